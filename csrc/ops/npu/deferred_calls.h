// Puts calls that the call scheduler serves on their stream, and waits for them.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>
#include <torch_npu/csrc/core/npu/NPUStream.h>

#include <memory>
#include <vector>

#include "ops/npu/started_swap.h"
#include "transfer/deferred_call.h"

namespace npu_kv {

// What the stream reads the ids from, and what the operator has to keep alive meanwhile.
struct DeferredArguments {
  at::Tensor src_ids;  // contiguous; undefined when the ids are constants
  at::Tensor dst_ids;
  std::vector<c10::Storage> storages;      // of the pools
  std::vector<c10::Storage> foreign_host;  // of them, those that nobody else keeps alive
};

// These put a task into the device's task queue; the device must be current. They throw
// TransferError when the runtime lacks what is needed. What goes wrong later is told by the pending
// errors of the device; with `await`, for what is known to be captured, by an exception.
// Thread-safe.

// The stream waits for the copies.
void defer(std::unique_ptr<DeferredCall> call, DeferredArguments arguments,
           c10_npu::NPUStream stream, bool await);

// The stream goes on. The call has the ticket's parts, without signals.
void start(std::unique_ptr<DeferredCall> call, DeferredArguments arguments,
           const std::shared_ptr<StartedSwap>& ticket, c10_npu::NPUStream stream, bool await);

// The stream waits for a part, which SwapTicket::take() has accepted.
void wait_for(const std::shared_ptr<StartedSwap>& ticket, size_t part, c10_npu::NPUStream stream,
              bool await);

}  // namespace npu_kv
