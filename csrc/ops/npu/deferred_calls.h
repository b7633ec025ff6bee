// Puts calls whose block ids lie on the NPU on their stream.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>
#include <torch_npu/csrc/core/npu/NPUStream.h>

#include <chrono>
#include <memory>
#include <vector>

#include "transfer/call_scheduler.h"
#include "transfer/deferred_call.h"

namespace npu_kv {

// What the stream reads the ids from, and what the operator has to keep alive meanwhile.
struct DeferredArguments {
  at::Tensor src_ids;  // contiguous
  at::Tensor dst_ids;
  std::vector<c10::Storage> storages;      // of the pools
  std::vector<c10::Storage> foreign_host;  // of them, those that nobody else keeps alive
};

// Puts the call into the device's task queue; the device must be current. Throws TransferError when
// the runtime lacks what is needed. What goes wrong later is told by the pending errors of the
// device; with `await`, for calls that are known to be captured, by an exception. Thread-safe.
void defer(std::unique_ptr<DeferredCall> call, DeferredArguments arguments,
           c10_npu::NPUStream stream, bool await);

// Reports copies of deferred calls that have failed to the pending errors.
void check_deferred_copies(int device);
void check_all_deferred_copies();

// Deferred calls that streams get to from now on copy nothing and are errors.
void stop_deferred_calls(std::chrono::nanoseconds timeout);

// Of a device; zeros when it has had no such call.
CallStats deferred_call_stats(int device);

}  // namespace npu_kv
