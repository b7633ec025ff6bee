// Swaps with a tensor on an NPU: what the kernels of swap_blocks_batch do.
#pragma once

#include <ATen/core/Tensor.h>

namespace npu_kv {

void swap_on_npu(at::TensorList src, at::TensorList dst, const at::Tensor& src_blocks,
                 const at::Tensor& dst_blocks);
void swap_on_npu(at::TensorList src, at::TensorList dst, at::IntArrayRef src_blocks,
                 at::IntArrayRef dst_blocks);

}  // namespace npu_kv
