#include "ops/npu/call_checks.h"

#include <c10/util/Exception.h>
#include <torch_npu/csrc/core/npu/NPUGraphsUtils.h>

#include <atomic>

#include "ops/npu/call_schedulers.h"
#include "ops/python_border.h"

namespace npu_kv {

bool stream_is_capturing() {
  return c10_npu::currentStreamCaptureStatusMayInitCtx() != c10_npu::CaptureStatus::None;
}

void raise_earlier_errors(int device, bool capturing) {
  if (capturing) return;
  check_deferred_copies(device);
  throw_pending_errors(device);
}

void refuse_cpu_ids_under_capture(const char* op) {
  TORCH_CHECK(false, op,
              ": the current stream captures a graph, and ids in CPU memory would be read once, "
              "now, so that every replay copies the same blocks. Pass them as NPU tensors, which "
              "are read at every replay, or, if the same blocks are meant, as lists of int to the "
              ".static overload");
}

void admit_pageable(const char* op, const std::string& name, bool capturing) {
  TORCH_CHECK(!capturing, op, ": ", name,
              " is in page-able host memory, which a graph cannot copy. Use page-locked memory: "
              "torch.empty(..., pin_memory=True) or npu_kv_ops.empty_pinned. If it is page-locked, "
              "the compiler has cloned it, as it does with tensors of one call that lie in one "
              "storage: compile with npu_kv_ops.graph_passes.npugraph_ex_options()");
  static std::atomic<bool> warned{false};
  if (warned.exchange(true)) return;
  warn(std::string(op) + ": " + name +
       " is in page-able host memory, so the copy is synchronous. Page-locked memory "
       "(torch.empty(..., pin_memory=True), npu_kv_ops.empty_pinned) makes it asynchronous. This "
       "warning is given once");
}

std::vector<c10::Storage> strong(
    const std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>>& storages) {
  std::vector<c10::Storage> locked;
  locked.reserve(storages.size());
  for (const auto& storage : storages) locked.emplace_back(storage.lock());
  return locked;
}

}  // namespace npu_kv
