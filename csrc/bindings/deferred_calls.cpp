#include "bindings/deferred_calls.h"

#include <chrono>

#include "ops/npu_hook.h"

namespace py = pybind11;

namespace npu_kv {
namespace {

std::chrono::nanoseconds to_nanoseconds(double seconds) {
  return std::chrono::nanoseconds(static_cast<int64_t>(seconds * 1e9));
}

}  // namespace

// Without the NPU library there are no such calls, and nothing to say of them.
void bind_deferred_calls(py::module_& m) {
  m.def(
      "stop_deferred_calls",
      [](double seconds) {
        const py::gil_scoped_release no_gil;
        if (NpuHook* hook = npu_hook()) hook->stop_deferred_calls(to_nanoseconds(seconds));
      },
      py::arg("seconds"));
  m.def(
      "end_graphs",
      [](double seconds) {
        const py::gil_scoped_release no_gil;
        if (NpuHook* hook = npu_hook()) hook->end_graphs(to_nanoseconds(seconds));
      },
      py::arg("seconds"));
  m.def(
      "release_graphs",
      [](int device) -> size_t {
        const py::gil_scoped_release no_gil;
        NpuHook* hook = npu_hook();
        return hook == nullptr ? 0 : hook->release_graphs(device);
      },
      py::arg("device"));
  m.def("live_graphs", []() -> size_t {
    NpuHook* hook = npu_hook();
    return hook == nullptr ? 0 : hook->live_graphs();
  });
  m.def(
      "deferred_call_stats",
      [](int device) {
        NpuHook* hook = npu_hook();
        const CallStats stats = hook == nullptr ? CallStats{} : hook->deferred_call_stats(device);
        return py::make_tuple(stats.calls, stats.failures, stats.start_ns.quantile(0.5),
                              stats.start_ns.quantile(0.99));
      },
      py::arg("device"));
  m.def("signal_support", []() -> py::object {
    NpuHook* hook = npu_hook();
    if (hook == nullptr) return py::none();
    const SignalSupport support = hook->signal_support();
    return py::make_tuple(support.callbacks, support.signals, support.missing);
  });
}

}  // namespace npu_kv
