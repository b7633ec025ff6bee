// How many descriptors a batch may have: NPU_KV_MAX_BATCH, or what set_max_batch() said last.
#pragma once

#include <cstddef>

#include "runtime/export.h"

namespace npu_kv {

inline constexpr size_t kDefaultMaxBatch = 4096;

// Throws std::invalid_argument when NPU_KV_MAX_BATCH is set and is not a positive integer.
NPU_KV_API size_t max_batch();

// Process-wide, from the next call on. Throws std::invalid_argument unless `limit` is positive.
NPU_KV_API void set_max_batch(long long limit);

}  // namespace npu_kv
