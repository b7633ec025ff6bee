// The kernels of swap_blocks_start and swap_blocks_wait for calls with an NPU tensor.
#include <ATen/core/Tensor.h>
#include <torch/library.h>
#include <torch_npu/csrc/core/npu/NPUGuard.h>
#include <torch_npu/csrc/core/npu/NPUStream.h>

#include <memory>
#include <utility>
#include <vector>

#include "ops/arguments.h"
#include "ops/npu/call_checks.h"
#include "ops/npu/deferred_calls.h"
#include "ops/npu/host_memory_in_flight.h"
#include "ops/npu/memory_use.h"
#include "ops/npu/npu_swap.h"
#include "ops/npu/started_swap.h"
#include "ops/swap_ticket.h"
#include "transfer/deferred_call.h"

namespace npu_kv {
namespace {

constexpr char kStart[] = "npu_kv::swap_blocks_start";

// A start on its way to be accepted.
struct Start {
  std::vector<size_t> parts;
  std::unique_ptr<DeferredCall> call = std::make_unique<DeferredCall>();
  DeferredArguments arguments;
  int device = -1;
  // Page-able memory is copied at once, and a copy on the NPU is for the stream to do: the memory
  // of a compiler's clones, which must not be clones of what is under way, is always one of these.
  bool overlaps = false;
  bool capturing = false;
};

Start describe(at::TensorList src, at::TensorList dst, at::OptionalIntArrayRef parts) {
  Start start;
  start.parts = parts_of(parts, src.size());
  BlockTransfer& transfer = start.call->transfer;
  start.device = describe_tensors(src, dst, &transfer);
  if (start.device < 0) return start;
  const c10_npu::NPUGuard guard(static_cast<c10::DeviceIndex>(start.device));
  start.capturing = stream_is_capturing();
  const c10_npu::NPUStream stream =
      c10_npu::getCurrentNPUStream(static_cast<c10::DeviceIndex>(start.device));
  const MemoryUse& use = memory_use(src, dst, transfer, stream);
  start.overlaps = use.pageable.empty() && (transfer.direction == Direction::kHostToDevice ||
                                            transfer.direction == Direction::kDeviceToHost);
  start.arguments.storages = strong(use.storages);
  start.arguments.foreign_host = strong(use.foreign_host);
  return start;
}

at::Tensor done(Start start) {
  return ticket_tensor(std::make_shared<SwapTicket>(std::move(start.parts), start.device));
}

at::Tensor launch(Start started) {
  DeferredCall& call = *started.call;
  call.op = kStart;
  call.batch_limit = max_batch_checked();
  for (const size_t tensors : started.parts) call.parts.push_back({tensors, nullptr});
  auto ticket =
      std::make_shared<StartedSwap>(std::move(started.parts), started.device, call.transfer);
  ticket->captured = started.capturing;
  const c10_npu::NPUStream stream =
      c10_npu::getCurrentNPUStream(static_cast<c10::DeviceIndex>(started.device));
  start(std::move(started.call), std::move(started.arguments), ticket, stream, started.capturing);
  return ticket_tensor(std::move(ticket));
}

// Before ids are looked at.
void begin(const Start& start) {
  host_memory_in_flight().release_finished(kPatience);
  raise_earlier_errors(start.device, start.capturing);
}

at::Tensor start_with_constants(Start start, const IdList& src_ids, const IdList& dst_ids) {
  begin(start);
  BlockTransfer& transfer = start.call->transfer;
  prepare_checked(&transfer, src_ids, dst_ids);
  if (size_of(transfer).copies_after == 0) return done(std::move(start));
  start.call->ids_are_constants = true;
  return launch(std::move(start));
}

at::Tensor start_npu(at::TensorList src, at::TensorList dst, const at::Tensor& src_blocks,
                     const at::Tensor& dst_blocks, at::OptionalIntArrayRef parts) {
  check_id_tensors(src_blocks, dst_blocks);
  Start start = describe(src, dst, parts);
  if (!start.overlaps) {
    swap_on_npu(src, dst, src_blocks, dst_blocks);
    return done(std::move(start));
  }
  const c10_npu::NPUGuard guard(static_cast<c10::DeviceIndex>(start.device));
  if (on_npu(src_blocks) || on_npu(dst_blocks)) {
    check_ids_on_npu(src_blocks, dst_blocks, start.device);
    begin(start);
    if (src.empty() || src_blocks.numel() == 0) return done(std::move(start));
    start.arguments.src_ids = src_blocks.contiguous();
    start.arguments.dst_ids = dst_blocks.contiguous();
    return launch(std::move(start));
  }
  check_ids_on_cpu(src_blocks, dst_blocks);
  if (start.capturing) refuse_cpu_ids_under_capture(kStart);
  const at::Tensor src_ids = src_blocks.contiguous();
  const at::Tensor dst_ids = dst_blocks.contiguous();
  start.call->may_be_captured = false;
  return start_with_constants(std::move(start), id_list(src_ids), id_list(dst_ids));
}

at::Tensor start_static_npu(at::TensorList src, at::TensorList dst, at::IntArrayRef src_blocks,
                            at::IntArrayRef dst_blocks, at::OptionalIntArrayRef parts) {
  check_equal_length(src_blocks.size(), dst_blocks.size());
  Start start = describe(src, dst, parts);
  if (!start.overlaps) {
    swap_on_npu(src, dst, src_blocks, dst_blocks);
    return done(std::move(start));
  }
  const c10_npu::NPUGuard guard(static_cast<c10::DeviceIndex>(start.device));
  return start_with_constants(std::move(start), id_list(src_blocks), id_list(dst_blocks));
}

void wait_npu(const at::Tensor& ticket, at::TensorList src, at::TensorList dst, int64_t part) {
  const std::shared_ptr<SwapTicket> found = find_ticket(ticket);
  const auto started = std::dynamic_pointer_cast<StartedSwap>(found);
  if (started == nullptr) {
    found->take(part, src, dst);
    return;
  }
  const c10_npu::NPUGuard guard(static_cast<c10::DeviceIndex>(started->device()));
  const bool capturing = stream_is_capturing();
  TORCH_CHECK(capturing || !started->captured,
              "npu_kv::swap_blocks_wait: the swap was started in the capture of a graph, which has "
              "ended or goes on on another stream; both belong to one capture");
  const c10_npu::NPUStream stream =
      c10_npu::getCurrentNPUStream(static_cast<c10::DeviceIndex>(started->device()));
  started->take(part, src, dst);
  try {
    wait_for(started, static_cast<size_t>(part), stream, capturing);
  } catch (...) {
    started->put_back(part);
    throw;
  }
}

}  // namespace
}  // namespace npu_kv

TORCH_LIBRARY_IMPL(npu_kv, PrivateUse1, m) {
  m.impl("swap_blocks_start", &npu_kv::start_npu);
  m.impl("swap_blocks_start.static", &npu_kv::start_static_npu);
  m.impl("swap_blocks_wait", &npu_kv::wait_npu);
}
