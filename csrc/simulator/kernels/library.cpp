// The library's one entry: hands the table to the simulated runtime, which opens this library when
// torch_npu gets ready for its first operator.
#include <ATen/Parallel.h>
#include <ATen/record_function.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/Exception.h>

#include <cstdio>
#include <exception>
#include <mutex>
#include <string>
#include <thread>

#include "kernels/attention.h"
#include "kernels/table.h"

namespace npu_kv::sim::kernels {
namespace {

const Table& table() {
  static const auto* all = [] {
    auto* made = new Table;
    add_elementwise(*made);
    add_reductions(*made);
    add_matrix(*made);
    add_shapes(*made);
    add_indexing(*made);
    add_normalisation(*made);
    add_random(*made);
    return made;
  }();
  return *all;
}

/// A stream has one thread. Were each to open a pool of its own, a few streams would fight for the
/// processors; and the order of a sum would depend on how many there are.
///
/// ATen sets the number for the calling thread and as the start value of new threads, so the latter
/// is put back.
void use_one_thread() {
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  const int threads = at::get_num_threads();
  at::set_num_threads(1);
  std::thread([threads] { at::set_num_threads(threads); }).join();
}

int fail(const npu_sim_operator_call* call, int result, const std::string& reason) {
  std::snprintf(call->error, call->error_bytes, "%s", reason.c_str());
  return result;
}

template <typename Work>
int guarded(const npu_sim_operator_call* call, Work work) {
  try {
    work(Call(*call));
    return NPU_SIM_DONE;
  } catch (const DeviceFault& error) {
    return fail(call, NPU_SIM_FAULT, error.what());
  } catch (const c10::Error& error) {
    return fail(call, NPU_SIM_REFUSED, error.what_without_backtrace());
  } catch (const std::exception& error) {
    return fail(call, NPU_SIM_REFUSED, error.what());
  }
}

int run(const npu_sim_operator_call* call, void* user) {
  thread_local const bool prepared = (use_one_thread(), true);
  (void)prepared;
  const c10::InferenceMode without_gradients;
  const at::DisableRecordFunctionGuard unseen_by_profilers;
  return guarded(call, [&](const Call& view) {
    if (!view.nothing_to_do()) static_cast<const Kernel*>(user)->run(view);
  });
}

int count_bytes(const npu_sim_operator_call* call, void* user) {
  const c10::InferenceMode without_gradients;
  const auto& kernel = *static_cast<const Kernel*>(user);
  if (kernel.bytes == nullptr) return NPU_SIM_DONE;
  return guarded(call, [&](const Call& view) { *call->bytes = kernel.bytes(view); });
}

}  // namespace
}  // namespace npu_kv::sim::kernels

extern "C" __attribute__((visibility("default"))) int npu_sim_provide_operators(
    npu_sim_register_function add) {
  using namespace npu_kv::sim::kernels;  // NOLINT: the library's C face
  for (const auto& [type, kernel] : table()) {
    add(type.c_str(), run, count_bytes, const_cast<Kernel*>(&kernel));
  }
  explain_missing_attention();
  return 0;
}
