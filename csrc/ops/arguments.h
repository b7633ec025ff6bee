// From tensors to block layouts: every check of the operator's arguments that needs no block id.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

#include "runtime/export.h"
#include "transfer/block_transfer.h"

namespace npu_kv {

// Fills the layouts and the direction of `transfer` and returns the NPU's index, -1 for host to
// host. Throws IndexError, ValueError or TypeError (c10's), naming the argument. `transfer` is
// cleared first.
NPU_KV_API int describe_tensors(at::TensorList src, at::TensorList dst, BlockTransfer* transfer);

// What describe_tensors checks, as far as it is known without data and with symbolic sizes.
void check_meta_tensors(at::TensorList src, at::TensorList dst);

// Dtype, dimensions, layout and equal length of the two id tensors, wherever they live.
NPU_KV_API void check_id_tensors(const at::Tensor& src_blocks, const at::Tensor& dst_blocks);

// Whether an id tensor lives on an NPU; also true for a fake tensor that stands for one.
NPU_KV_API bool on_npu(const at::Tensor& tensor);

// Throws unless both are on the CPU. `check_id_tensors` must have passed.
NPU_KV_API void check_ids_on_cpu(const at::Tensor& src_blocks, const at::Tensor& dst_blocks);

// Throws unless both are on one NPU, that of the pools (`device`; negative: there is none among
// them).
NPU_KV_API void check_ids_on_npu(const at::Tensor& src_blocks, const at::Tensor& dst_blocks,
                                 int device);

// A view of a contiguous CPU id tensor.
NPU_KV_API IdList id_list(const at::Tensor& ids);
inline IdList id_list(at::IntArrayRef ids) { return {ids.data(), true, ids.size()}; }

// Lengths of two id lists that are not tensors.
NPU_KV_API void check_equal_length(size_t src_blocks, size_t dst_blocks);

// The arguments of `.ptrs`.
NPU_KV_API void check_pointer_arguments(const at::Tensor& src_ptrs, const at::Tensor& dst_ptrs,
                                        const at::Tensor& sizes, int64_t direction,
                                        bool check_device);

// Runs prepare() and turns its exceptions into the kinds that Python sees.
NPU_KV_API void prepare_checked(BlockTransfer* transfer, const IdList& src_ids,
                                const IdList& dst_ids);

// NPU_KV_MAX_BATCH; a bad value is a ValueError.
NPU_KV_API size_t max_batch_checked();

}  // namespace npu_kv
