// Process-wide counters of the operator. Thread-safe; each counter is exact, a snapshot taken while
// calls run may mix them.
#pragma once

#include <cstdint>

#include "runtime/export.h"

namespace npu_kv {

struct CopyStats {
  uint64_t calls = 0;          // calls that had something to copy
  uint64_t bytes = 0;          // payload bytes
  uint64_t copies_before = 0;  // pairs of ids times tensors
  uint64_t copies_after = 0;   // descriptors handed to the runtime after coalescing
};

NPU_KV_API void count_call(uint64_t bytes, uint64_t copies_before, uint64_t copies_after);
NPU_KV_API CopyStats copy_stats();
NPU_KV_API void reset_copy_stats();

}  // namespace npu_kv
