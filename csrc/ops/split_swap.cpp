// The two halves of swap_blocks_batch, swap_blocks_start and swap_blocks_wait: the schemas and the
// kernels for calls without an NPU tensor.
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <memory>

#include "ops/arguments.h"
#include "ops/host_swap.h"
#include "ops/swap_ticket.h"

namespace npu_kv {
namespace {

// Copies at once: there is nothing that it could overlap with.
at::Tensor start_cpu(at::TensorList src, at::TensorList dst, const at::Tensor& src_blocks,
                     const at::Tensor& dst_blocks, at::OptionalIntArrayRef parts) {
  auto ticket = std::make_shared<SwapTicket>(parts_of(parts, src.size()), -1);
  swap_on_host(src, dst, src_blocks, dst_blocks);
  return ticket_tensor(std::move(ticket));
}

at::Tensor start_static_cpu(at::TensorList src, at::TensorList dst, at::IntArrayRef src_blocks,
                            at::IntArrayRef dst_blocks, at::OptionalIntArrayRef parts) {
  auto ticket = std::make_shared<SwapTicket>(parts_of(parts, src.size()), -1);
  swap_on_host(src, dst, src_blocks, dst_blocks);
  return ticket_tensor(std::move(ticket));
}

void wait_cpu(const at::Tensor& ticket, at::TensorList src, at::TensorList dst, int64_t part) {
  find_ticket(ticket)->take(part, src, dst);
}

void wait_meta(const at::Tensor& ticket, at::TensorList src, at::TensorList dst, int64_t part) {
  check_meta_tensors(src, dst);
  TORCH_CHECK_TYPE(ticket.scalar_type() == at::kLong, "ticket is a ", ticket.scalar_type(),
                   " tensor; it is what npu_kv::swap_blocks_start has returned, int64");
  TORCH_CHECK_VALUE(part >= 0, "part is ", part, "; parts are counted from 0");
}

}  // namespace
}  // namespace npu_kv

// The wait counts as writing what the start does: so everything that has to come behind the wait
// depends on it. The fake kernel of the start is in Python, because of its mixed devices.
TORCH_LIBRARY_FRAGMENT(npu_kv, m) {
  m.def(
      "swap_blocks_start(Tensor(a!)[] src, Tensor(b!)[] dst, Tensor src_blocks, Tensor dst_blocks, "
      "int[]? parts=None) -> Tensor");
  m.def(
      "swap_blocks_start.static(Tensor(a!)[] src, Tensor(b!)[] dst, int[] src_blocks, int[] "
      "dst_blocks, int[]? parts=None) -> Tensor");
  m.def("swap_blocks_wait(Tensor ticket, Tensor(a!)[] src, Tensor(b!)[] dst, int part=0) -> ()");
}

TORCH_LIBRARY_IMPL(npu_kv, CompositeExplicitAutograd, m) {
  m.impl("swap_blocks_start", &npu_kv::start_cpu);
  m.impl("swap_blocks_start.static", &npu_kv::start_static_cpu);
  m.impl("swap_blocks_wait", &npu_kv::wait_cpu);
}

TORCH_LIBRARY_IMPL(npu_kv, Meta, m) { m.impl("swap_blocks_wait", &npu_kv::wait_meta); }
