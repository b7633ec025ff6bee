// The kernels for calls with an NPU tensor.
#include <ATen/core/Tensor.h>
#include <torch/library.h>
#include <torch_npu/csrc/core/npu/NPUGraphsUtils.h>
#include <torch_npu/csrc/core/npu/NPUGuard.h>
#include <torch_npu/csrc/core/npu/NPUStream.h>
#include <torch_npu/csrc/framework/OpCommand.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "ops/arguments.h"
#include "ops/boxed_kernel.h"
#include "ops/npu/host_memory_in_flight.h"
#include "ops/npu/launch.h"
#include "ops/npu/memory_use.h"
#include "ops/npu_hook.h"
#include "ops/pointer_checks.h"
#include "ops/python_border.h"
#include "runtime/acl/acl_runtime.h"
#include "transfer/copy_stats.h"

namespace npu_kv {
namespace {

// Calls under way that a call looks at to find host memory to let go of.
constexpr size_t kPatience = 4;

bool stream_is_capturing() {
  return c10_npu::currentStreamCaptureStatusMayInitCtx() != c10_npu::CaptureStatus::None;
}

void refuse_cpu_ids_under_capture() {
  TORCH_CHECK(
      false,
      "npu_kv::swap_blocks_batch: the current stream captures a graph, and ids in CPU "
      "memory would be read once, now, so that every replay copies the same blocks. If that "
      "is meant, pass them as lists of int to the .static overload");
}

void warn_of_pageable_memory(const std::string& name) {
  static std::atomic<bool> warned{false};
  if (warned.exchange(true)) return;
  warn("npu_kv::swap_blocks_batch: " + name +
       " is in page-able host memory, so the copy is synchronous. Page-locked memory "
       "(torch.empty(..., pin_memory=True), npu_kv_ops.empty_pinned) makes it asynchronous. This "
       "warning is given once");
}

// Puts the launch into the task queue, in order with the other operators of the device.
void enqueue(const std::shared_ptr<Launch>& launch, c10_npu::NPUStream stream) {
  launch->caller = std::this_thread::get_id();
  at_npu::native::OpCommand::RunOpApiV2("npu_kv::swap_blocks_batch", [launch]() -> int {
    run(*launch);
    // Never an error code: it would end the use of the device for the whole process.
    return 0;
  });
  if (launch->caller_waits) {
    try {
      stream.synchronize();
    } catch (const c10::Error& error) {
      if (launch->status.ok()) throw_transfer_error(error.what_without_backtrace());
    }
  }
  if (!launch->status.ok()) throw_transfer_error(launch->status.message());
}

void hold_storages(const MemoryUse& use, bool capturing, Launch* launch) {
  auto strong = [](const c10::weak_intrusive_ptr<c10::StorageImpl>& storage) {
    return c10::Storage(storage.lock());
  };
  for (const auto& storage : use.storages) launch->storages.push_back(strong(storage));
  // A graph holds addresses, not tensors; its owner keeps them alive.
  if (capturing) return;
  for (const auto& storage : use.foreign_host) launch->foreign_host.push_back(strong(storage));
}

void copy(at::TensorList src, at::TensorList dst, const IdList& src_ids, const IdList& dst_ids,
          bool ids_are_constants) {
  const std::shared_ptr<Launch> launch = new_launch();
  launch->by_pointers = false;
  const int device = describe_tensors(src, dst, &launch->transfer);
  TORCH_CHECK(device >= 0, "npu_kv::swap_blocks_batch: neither src nor dst is on an NPU");
  host_memory_in_flight().release_finished(kPatience);
  throw_pending_errors(device);

  c10_npu::NPUGuard guard(static_cast<c10::DeviceIndex>(device));
  const bool capturing = stream_is_capturing();
  if (capturing && !ids_are_constants) refuse_cpu_ids_under_capture();

  prepare_checked(&launch->transfer, src_ids, dst_ids);
  const TransferSize size = size_of(launch->transfer);
  if (size.copies_after == 0) return;

  const c10_npu::NPUStream stream =
      c10_npu::getCurrentNPUStream(static_cast<c10::DeviceIndex>(device));
  thread_local MemoryUseCache uses;
  const MemoryUse& use = uses.find(src, dst, launch->transfer, stream);
  launch->caller_waits = !use.pageable.empty();
  if (launch->caller_waits) {
    TORCH_CHECK(!capturing, "npu_kv::swap_blocks_batch: ", use.pageable,
                " is in page-able host memory, which a graph cannot copy. Use page-locked memory: "
                "torch.empty(..., pin_memory=True) or npu_kv_ops.empty_pinned");
    warn_of_pageable_memory(use.pageable);
  }
  hold_storages(use, capturing, launch.get());
  launch->batch_limit = max_batch_checked();
  launch->stream = {stream.stream(false), device};
  count_call(size.bytes, size.copies_before, size.copies_after);
  enqueue(launch, stream);
}

void swap_npu(at::TensorList src, at::TensorList dst, const at::Tensor& src_blocks,
              const at::Tensor& dst_blocks) {
  check_id_tensors(src_blocks, dst_blocks);
  check_ids_on_cpu(src_blocks, dst_blocks);
  const at::Tensor src_ids = src_blocks.contiguous();
  const at::Tensor dst_ids = dst_blocks.contiguous();
  copy(src, dst, id_list(src_ids), id_list(dst_ids), /*ids_are_constants=*/false);
}

void swap_static_npu(at::TensorList src, at::TensorList dst, at::IntArrayRef src_blocks,
                     at::IntArrayRef dst_blocks) {
  check_equal_length(src_blocks.size(), dst_blocks.size());
  copy(src, dst, id_list(src_blocks), id_list(dst_blocks), /*ids_are_constants=*/true);
}

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
    throw_pending_errors(device);
    TORCH_CHECK(
        !stream_is_capturing(),
        "npu_kv::swap_blocks_batch.ptrs: the current stream captures a graph, which would "
        "copy these addresses at every replay. If that is meant, pass tensors and lists of int "
        "to the .static overload");
    launch->caller_waits = places.pageable;
    if (places.pageable) warn_of_pageable_memory("an address");
    launch->batch_limit = max_batch_checked();
    launch->stream = {stream.stream(false), device};
    uint64_t bytes = 0;
    for (size_t i = 0; i < copies.count; ++i) bytes += copies.size[i];
    count_call(bytes, copies.count, copies.count);
    enqueue(launch, stream);
  }

  void release_finished() override { host_memory_in_flight().release_finished(SIZE_MAX); }

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
}  // namespace npu_kv

TORCH_LIBRARY_IMPL(npu_kv, PrivateUse1, m) {
  m.impl("swap_blocks_batch", npu_kv::boxed_kernel<&npu_kv::swap_npu>());
  m.impl("swap_blocks_batch.static", npu_kv::boxed_kernel<&npu_kv::swap_static_npu>());
  m.impl("swap_blocks_batch.ptrs", &npu_kv::swap_ptrs_npu);
}
