// What the core library asks of the NPU library, which registers itself when it is loaded. Calls
// whose tensors are all on the CPU (`.ptrs`) get to the NPU this way and not through the
// dispatcher.
#pragma once

#include <ATen/core/Tensor.h>

#include "runtime/export.h"

namespace npu_kv {

class NpuHook {
 public:
  virtual ~NpuHook() = default;

  // The arguments have passed check_pointer_arguments().
  virtual void copy_pointers(const at::Tensor& src_ptrs, const at::Tensor& dst_ptrs,
                             const at::Tensor& sizes, int64_t direction) = 0;

  // Lets go of host memory whose copies are done.
  virtual void release_finished() = 0;
};

NPU_KV_API void set_npu_hook(NpuHook* hook);
NPU_KV_API NpuHook* npu_hook();  // null when the NPU library is not loaded

}  // namespace npu_kv
