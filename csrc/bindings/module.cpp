// npu_kv_ops._C: counters, limits and deferred errors of the core library for Python.
#include <c10/util/Exception.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/version.h>

#include <optional>
#include <vector>

#include "bindings/copy_backend.h"
#include "bindings/deferred_calls.h"
#include "bindings/python_border.h"
#include "ops/npu_hook.h"
#include "ops/pointer_checks.h"
#include "ops/swap_ticket.h"
#include "runtime/batch_limit.h"
#include "runtime/pending_errors.h"
#include "transfer/copy_stats.h"

namespace py = pybind11;

PYBIND11_MODULE(_C, m) {
  m.doc() = "Compiled part of npu_kv_ops; use npu_kv_ops.ops.";

  npu_kv::install_python_border(
      py::module_::import("npu_kv_ops.errors").attr("TransferError").ptr());

  npu_kv::bind_copy_backend(m);

  m.def("stats", [] {
    const npu_kv::CopyStats stats = npu_kv::copy_stats();
    return py::make_tuple(stats.calls, stats.bytes, stats.copies_before, stats.copies_after);
  });
  m.def("reset_stats", &npu_kv::reset_copy_stats);
  m.def("max_batch", &npu_kv::max_batch);
  m.def("set_max_batch", &npu_kv::set_max_batch, py::arg("limit"));
  m.def(
      "take_pending_errors",
      [](int device) {
        // Dropping host memory may take the GIL on another thread or call the runtime.
        py::gil_scoped_release no_gil;
        if (npu_kv::NpuHook* hook = npu_kv::npu_hook()) hook->release_finished();
        return npu_kv::pending_errors().take(device);
      },
      py::arg("device"));
  m.def("set_pointers_in_graphs", &npu_kv::set_pointers_in_graphs, py::arg("allowed"));
  m.def("pointers_in_graphs", &npu_kv::pointers_in_graphs);
  npu_kv::bind_deferred_calls(m);
  m.def("check_all_pointers", &npu_kv::check_all_pointers);
  m.def(
      "check_parts",
      [](const std::optional<std::vector<int64_t>>& parts, size_t tensors) {
        try {
          (void)npu_kv::parts_of(parts ? at::OptionalIntArrayRef(*parts) : std::nullopt, tensors);
        } catch (const c10::ValueError& error) {
          throw py::value_error(error.what_without_backtrace());
        }
      },
      py::arg("parts"), py::arg("tensors"));
  m.def("set_check_all_pointers", &npu_kv::set_check_all_pointers, py::arg("all"));
  m.def("build_info", [] {
    py::dict info;
    info["torch"] = TORCH_VERSION;
    info["cxx11_abi"] = static_cast<bool>(_GLIBCXX_USE_CXX11_ABI);
    info["compiler"] = __VERSION__;
    return info;
  });
}
