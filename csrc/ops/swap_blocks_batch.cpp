// The schemas, the kernels for calls without an NPU tensor, and the Meta kernels.
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <atomic>

#include "ops/arguments.h"
#include "ops/host_swap.h"
#include "ops/npu_hook.h"
#include "ops/python_border.h"
#include "runtime/host_runtime.h"
#include "transfer/block_transfer.h"
#include "transfer/copy_stats.h"

namespace npu_kv {
namespace {

std::atomic<NpuHook*> registered_hook{nullptr};

// Host to host: the copies are done when this returns.
void copy_on_host(at::TensorList src, at::TensorList dst, const IdList& src_ids,
                  const IdList& dst_ids) {
  thread_local BlockTransfer transfer;
  const int device = describe_tensors(src, dst, &transfer);
  TORCH_CHECK(device < 0,
              "npu_kv::swap_blocks_batch: NPU tensors need the NPU library of "
              "npu_kv_ops, which is not loaded");
  prepare_checked(&transfer, src_ids, dst_ids);
  const TransferSize size = size_of(transfer);
  if (size.copies_after == 0) return;
  HostRuntime& runtime = host_runtime();
  const Status status = issue(transfer, runtime, StreamRef{}, runtime.batch_limit());
  if (!status.ok()) throw_transfer_error(status.message());
  count_call(size.bytes, size.copies_before, size.copies_after);
}

void swap_ptrs_cpu(const at::Tensor& src_ptrs, const at::Tensor& dst_ptrs, const at::Tensor& sizes,
                   int64_t direction) {
  check_pointer_arguments(src_ptrs, dst_ptrs, sizes, direction, /*check_device=*/true);
  NpuHook* hook = npu_hook();
  TORCH_CHECK(hook != nullptr,
              "npu_kv::swap_blocks_batch.ptrs copies from or to an NPU, and the NPU "
              "library of npu_kv_ops is not loaded");
  hook->copy_pointers(src_ptrs, dst_ptrs, sizes, direction);
}

void swap_meta(at::TensorList src, at::TensorList dst, const at::Tensor& src_blocks,
               const at::Tensor& dst_blocks) {
  check_id_tensors(src_blocks, dst_blocks);
  check_meta_tensors(src, dst);
  TORCH_CHECK_VALUE(on_npu(src_blocks) == on_npu(dst_blocks),
                    "src_blocks and dst_blocks are on different devices; they must be on one");
  const bool reads_cpu_ids = !on_npu(src_blocks);
  const bool pools_on_npu = !src.empty() && (on_npu(src[0]) || on_npu(dst[0]));
  check_trace("default", reads_cpu_ids && pools_on_npu);
}

void swap_static_meta(at::TensorList src, at::TensorList dst, at::IntArrayRef src_blocks,
                      at::IntArrayRef dst_blocks) {
  check_equal_length(src_blocks.size(), dst_blocks.size());
  check_meta_tensors(src, dst);
  check_trace("static", /*reads_cpu_ids=*/false);
}

void swap_ptrs_meta(const at::Tensor& src_ptrs, const at::Tensor& dst_ptrs, const at::Tensor& sizes,
                    int64_t direction) {
  check_pointer_arguments(src_ptrs, dst_ptrs, sizes, direction, /*check_device=*/false);
  check_trace("ptrs", /*reads_cpu_ids=*/false);
}

}  // namespace

void swap_on_host(at::TensorList src, at::TensorList dst, const at::Tensor& src_blocks,
                  const at::Tensor& dst_blocks) {
  check_id_tensors(src_blocks, dst_blocks);
  check_ids_on_cpu(src_blocks, dst_blocks);
  const at::Tensor src_ids = src_blocks.contiguous();
  const at::Tensor dst_ids = dst_blocks.contiguous();
  copy_on_host(src, dst, id_list(src_ids), id_list(dst_ids));
}

void swap_on_host(at::TensorList src, at::TensorList dst, at::IntArrayRef src_blocks,
                  at::IntArrayRef dst_blocks) {
  check_equal_length(src_blocks.size(), dst_blocks.size());
  copy_on_host(src, dst, id_list(src_blocks), id_list(dst_blocks));
}

void set_npu_hook(NpuHook* hook) { registered_hook = hook; }

NpuHook* npu_hook() { return registered_hook.load(); }

}  // namespace npu_kv

// The sources count as written too, though they are not: graph compilers of torch_npu copy an input
// that is only read into memory of the graph at every call, which for a store is the whole pool,
// and never notice that a host tensor is another one.
TORCH_LIBRARY(npu_kv, m) {
  m.def(
      "swap_blocks_batch(Tensor(a!)[] src, Tensor(b!)[] dst, Tensor src_blocks, Tensor dst_blocks) "
      "-> "
      "()");
  m.def(
      "swap_blocks_batch.static(Tensor(a!)[] src, Tensor(b!)[] dst, int[] src_blocks, int[] "
      "dst_blocks) -> ()");
  m.def(
      "swap_blocks_batch.ptrs(Tensor src_ptrs, Tensor dst_ptrs, Tensor sizes, int direction) -> "
      "()");
}

// Every backend without a kernel of its own, and no tensor at all: `.static` of empty lists, a
// no-op.
TORCH_LIBRARY_IMPL(npu_kv, CompositeExplicitAutograd, m) {
  using SwapWithTensors =
      void(at::TensorList, at::TensorList, const at::Tensor&, const at::Tensor&);
  using SwapWithLists = void(at::TensorList, at::TensorList, at::IntArrayRef, at::IntArrayRef);
  m.impl("swap_blocks_batch", static_cast<SwapWithTensors*>(&npu_kv::swap_on_host));
  m.impl("swap_blocks_batch.static", static_cast<SwapWithLists*>(&npu_kv::swap_on_host));
  m.impl("swap_blocks_batch.ptrs", &npu_kv::swap_ptrs_cpu);
}

TORCH_LIBRARY_IMPL(npu_kv, Meta, m) {
  m.impl("swap_blocks_batch", &npu_kv::swap_meta);
  m.impl("swap_blocks_batch.static", &npu_kv::swap_static_meta);
  m.impl("swap_blocks_batch.ptrs", &npu_kv::swap_ptrs_meta);
}
