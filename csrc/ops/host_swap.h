// Swaps between host tensors.
#pragma once

#include <ATen/core/Tensor.h>

#include "runtime/export.h"

namespace npu_kv {

// The copies are done when these return. They throw what the operator raises.
NPU_KV_API void swap_on_host(at::TensorList src, at::TensorList dst, const at::Tensor& src_blocks,
                             const at::Tensor& dst_blocks);
NPU_KV_API void swap_on_host(at::TensorList src, at::TensorList dst, at::IntArrayRef src_blocks,
                             at::IntArrayRef dst_blocks);

}  // namespace npu_kv
