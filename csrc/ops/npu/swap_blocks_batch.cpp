// The kernels for calls with an NPU tensor.
#include <ATen/core/Tensor.h>
#include <acl/acl.h>
#include <torch/library.h>
#include <torch_npu/csrc/core/npu/NPUGraphsUtils.h>
#include <torch_npu/csrc/core/npu/NPUGuard.h>
#include <torch_npu/csrc/core/npu/NPUStream.h>
#include <torch_npu/csrc/framework/OpCommand.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "ops/arguments.h"
#include "ops/boxed_kernel.h"
#include "ops/npu/call_checks.h"
#include "ops/npu/call_schedulers.h"
#include "ops/npu/captured_graphs.h"
#include "ops/npu/deferred_calls.h"
#include "ops/npu/host_memory_in_flight.h"
#include "ops/npu/launch.h"
#include "ops/npu/memory_use.h"
#include "ops/npu/npu_swap.h"
#include "ops/npu_hook.h"
#include "ops/pointer_checks.h"
#include "ops/python_border.h"
#include "runtime/acl/acl_runtime.h"
#include "runtime/acl/acl_signals.h"
#include "runtime/graph_copy_limit.h"
#include "runtime/pending_errors.h"
#include "transfer/copy_stats.h"

namespace npu_kv {
namespace {

constexpr char kName[] = "npu_kv::swap_blocks_batch";

// Puts the launch into the task queue, in order with the other operators of the device.
void enqueue(const std::shared_ptr<Launch>& launch, c10_npu::NPUStream stream, bool in_graph) {
  launch->in_graph = in_graph;
  launch->outcome_is_awaited = launch->caller_waits || in_graph;
  launch->caller = std::this_thread::get_id();
  at_npu::native::OpCommand::RunOpApiV2(kName, [launch]() -> int {
    run(*launch);
    // Never an error code: it would end the use of the device for the whole process.
    return 0;
  });
  if (in_graph) {
    // Known now, because a capture that lacks a part must not end well.
    (void)stream.stream();
  } else if (launch->caller_waits) {
    try {
      stream.synchronize();
    } catch (const c10::Error& error) {
      if (launch->status.ok()) throw_transfer_error(error.what_without_backtrace());
    }
  }
  if (!launch->status.ok()) throw_transfer_error(launch->status.message());
}

size_t graph_copy_limit_checked() {
  try {
    return graph_copy_limit(aclrtGetSocName());
  } catch (const std::invalid_argument& error) {
    TORCH_CHECK_VALUE(false, error.what());
  }
}

// Counts the copies that the call is about to add to the graph, and refuses what it has no room
// for: the runtime would break the capture.
void reserve_in_graph(CapturedGraph& graph, StreamRef stream, Direction direction, size_t copies) {
  const size_t limit = graph_copy_limit_checked();
  size_t taken = 0;
  TORCH_CHECK(graph.take_copies(stream, direction, copies, limit, &taken),
              "npu_kv::swap_blocks_batch: a stream of a captured graph holds at most ", limit,
              " copies ", direction_name(direction), "; ", taken,
              " are captured and this call adds ", copies,
              ". Pass the ids as NPU tensors to npu_kv::swap_blocks_batch: its copies are issued "
              "at the replay and take no room in the graph");
}

void copy(at::TensorList src, at::TensorList dst, const IdList& src_ids, const IdList& dst_ids,
          bool ids_are_constants) {
  const std::shared_ptr<Launch> launch = new_launch();
  launch->by_pointers = false;
  launch->may_be_captured = ids_are_constants;
  const int device = describe_tensors(src, dst, &launch->transfer);
  TORCH_CHECK(device >= 0, "npu_kv::swap_blocks_batch: neither src nor dst is on an NPU");
  host_memory_in_flight().release_finished(kPatience);

  c10_npu::NPUGuard guard(static_cast<c10::DeviceIndex>(device));
  const bool capturing = stream_is_capturing();
  raise_earlier_errors(device, capturing);
  if (capturing && !ids_are_constants) refuse_cpu_ids_under_capture(kName);

  prepare_checked(&launch->transfer, src_ids, dst_ids);
  const TransferSize size = size_of(launch->transfer);
  if (size.copies_after == 0) return;

  const c10_npu::NPUStream stream =
      c10_npu::getCurrentNPUStream(static_cast<c10::DeviceIndex>(device));
  const MemoryUse& use = memory_use(src, dst, launch->transfer, stream);
  launch->caller_waits = !use.pageable.empty();
  if (launch->caller_waits) admit_pageable(kName, use.pageable, capturing);
  launch->batch_limit = max_batch_checked();
  launch->stream = {stream.stream(false), device};
  launch->storages = strong(use.storages);
  if (capturing) {
    CapturedGraph& graph = captured_graphs().captured_by(launch->stream);
    reserve_in_graph(graph, launch->stream, launch->transfer.direction, size.copies_after);
    graph.hold(launch->storages);
  } else {
    launch->foreign_host = strong(use.foreign_host);
  }
  count_call(size.bytes, size.copies_before, size.copies_after);
  enqueue(launch, stream, capturing);
}

// The ids are on an NPU: the stream reads them when it gets there.
void copy_deferred(at::TensorList src, at::TensorList dst, const at::Tensor& src_blocks,
                   const at::Tensor& dst_blocks) {
  auto call = std::make_unique<DeferredCall>();
  const int device = describe_tensors(src, dst, &call->transfer);
  check_ids_on_npu(src_blocks, dst_blocks, device);
  const c10::DeviceIndex index = src_blocks.device().index();
  host_memory_in_flight().release_finished(kPatience);
  c10_npu::NPUGuard guard(index);
  const bool capturing = stream_is_capturing();
  raise_earlier_errors(index, capturing);
  if (src.empty() || src_blocks.numel() == 0) return;

  const c10_npu::NPUStream stream = c10_npu::getCurrentNPUStream(index);
  const MemoryUse& use = memory_use(src, dst, call->transfer, stream);
  const bool wait = !use.pageable.empty();
  if (wait) admit_pageable(kName, use.pageable, capturing);
  call->batch_limit = max_batch_checked();
  DeferredArguments arguments{
      src_blocks.contiguous(), dst_blocks.contiguous(), strong(use.storages), {}};
  arguments.foreign_host = strong(use.foreign_host);
  defer(std::move(call), std::move(arguments), stream, capturing);
  if (!wait) return;
  stream.synchronize();
  check_deferred_copies(index);
  const std::string failed = pending_errors().take(index);
  if (!failed.empty()) throw_transfer_error(failed);
}

// The overloads of swap_on_npu.
constexpr void (*kSwapWithTensors)(at::TensorList, at::TensorList, const at::Tensor&,
                                   const at::Tensor&) = &swap_on_npu;
constexpr void (*kSwapWithLists)(at::TensorList, at::TensorList, at::IntArrayRef,
                                 at::IntArrayRef) = &swap_on_npu;

void swap_ptrs_npu(const at::Tensor& src_ptrs, const at::Tensor& dst_ptrs, const at::Tensor& sizes,
                   int64_t direction) {
  // Always throws: one of them is on an NPU.
  check_pointer_arguments(src_ptrs, dst_ptrs, sizes, direction, /*check_device=*/true);
}

class TorchNpuHook final : public NpuHook {
 public:
  void copy_pointers(const at::Tensor& src_ptrs, const at::Tensor& dst_ptrs,
                     const at::Tensor& sizes, int64_t direction) override {
    const std::shared_ptr<Launch> launch = new_launch();
    launch->by_pointers = true;
    launch->may_be_captured = pointers_in_graphs();
    launch->transfer.clear();
    launch->transfer.direction = static_cast<Direction>(direction);
    take_pointers(src_ptrs, dst_ptrs, sizes, &launch->pointers.src, &launch->pointers.dst,
                  &launch->pointers.size);
    if (launch->pointers.size.empty()) return;
    const Descriptors copies = launch->pointers.view();
    const PointerPlaces places =
        check_pointers(copies, launch->transfer.direction, acl_runtime(), sizes);
    host_memory_in_flight().release_finished(kPatience);
    std::optional<c10_npu::NPUGuard> guard;
    if (places.device >= 0) guard.emplace(static_cast<c10::DeviceIndex>(places.device));
    const c10_npu::NPUStream stream = c10_npu::getCurrentNPUStream();
    const int device = stream.device_index();
    const bool capturing = stream_is_capturing();
    raise_earlier_errors(device, capturing);
    TORCH_CHECK(!capturing || pointers_in_graphs(),
                "npu_kv::swap_blocks_batch.ptrs: the current stream captures a graph, which would "
                "copy these addresses at every replay. If that is meant, say so with "
                "npu_kv_ops.ops.pointers_in_graphs(), or pass tensors and lists of int to the "
                ".static overload");
    launch->caller_waits = places.pageable;
    if (places.pageable) admit_pageable(kName, "an address", capturing);
    launch->batch_limit = max_batch_checked();
    launch->stream = {stream.stream(false), device};
    if (capturing) {
      reserve_in_graph(captured_graphs().captured_by(launch->stream), launch->stream,
                       launch->transfer.direction, copies.count);
    }
    uint64_t bytes = 0;
    for (size_t i = 0; i < copies.count; ++i) bytes += copies.size[i];
    count_call(bytes, copies.count, copies.count);
    enqueue(launch, stream, capturing);
  }

  void release_finished() override {
    host_memory_in_flight().release_finished(SIZE_MAX);
    check_all_deferred_copies();
  }

  void stop_deferred_calls(std::chrono::nanoseconds timeout) override {
    npu_kv::stop_deferred_calls(timeout);
  }
  size_t release_graphs(int device) override { return captured_graphs().release(device); }
  void end_graphs(std::chrono::nanoseconds timeout) override { captured_graphs().end(timeout); }
  size_t live_graphs() override { return captured_graphs().live(); }
  CallStats deferred_call_stats(int device) override { return npu_kv::deferred_call_stats(device); }
  SignalSupport signal_support() override { return npu_kv::signal_support(); }

  StreamRuntime& runtime() override { return acl_runtime(); }

  StreamRef stream(int device, int64_t stream_id) override {
    const auto stream = c10_npu::NPUStream::unpack3(
        stream_id, static_cast<c10::DeviceIndex>(device), c10::DeviceType::PrivateUse1);
    return {stream.stream(false), device};
  }

  void run_in_queue(int device, const char* name, std::function<void()> task) override {
    c10_npu::NPUGuard guard(static_cast<c10::DeviceIndex>(device));
    at_npu::native::OpCommand::RunOpApiV2(name, [task = std::move(task)]() -> int {
      task();
      return 0;
    });
  }

  void refuse_capture(StreamRef stream, const char* what) override {
    const c10_npu::NPUGuard guard(static_cast<c10::DeviceIndex>(stream.device));
    TORCH_CHECK(!c10_npu::isStreamCapturingMayInitCtx(static_cast<aclrtStream>(stream.handle)),
                what, ": the stream captures a graph, which cannot wait for work outside of it");
  }
};

struct HookRegistration {
  HookRegistration() {
    static TorchNpuHook hook;
    set_npu_hook(&hook);
  }
} hook_registration;

}  // namespace

void swap_on_npu(at::TensorList src, at::TensorList dst, const at::Tensor& src_blocks,
                 const at::Tensor& dst_blocks) {
  check_id_tensors(src_blocks, dst_blocks);
  if (on_npu(src_blocks) || on_npu(dst_blocks)) {
    copy_deferred(src, dst, src_blocks, dst_blocks);
    return;
  }
  check_ids_on_cpu(src_blocks, dst_blocks);
  const at::Tensor src_ids = src_blocks.contiguous();
  const at::Tensor dst_ids = dst_blocks.contiguous();
  copy(src, dst, id_list(src_ids), id_list(dst_ids), /*ids_are_constants=*/false);
}

void swap_on_npu(at::TensorList src, at::TensorList dst, at::IntArrayRef src_blocks,
                 at::IntArrayRef dst_blocks) {
  check_equal_length(src_blocks.size(), dst_blocks.size());
  copy(src, dst, id_list(src_blocks), id_list(dst_blocks), /*ids_are_constants=*/true);
}

}  // namespace npu_kv

TORCH_LIBRARY_IMPL(npu_kv, PrivateUse1, m) {
  m.impl("swap_blocks_batch", npu_kv::boxed_kernel<npu_kv::kSwapWithTensors>());
  m.impl("swap_blocks_batch.static", npu_kv::boxed_kernel<npu_kv::kSwapWithLists>());
  m.impl("swap_blocks_batch.ptrs", &npu_kv::swap_ptrs_npu);
}
