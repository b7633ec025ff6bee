// Copies of more bytes than the caches hold, past the caches.
#pragma once

#include <cstddef>

#include "runtime/runtime.h"

namespace npu_kv {

// Copies every descriptor; sources and destinations may have any alignment and must not overlap.
// The destinations are not in the cache afterwards, so this is for large amounts only. Thread-safe.
NPU_KV_API void copy_streaming(const Descriptors& copies);

}  // namespace npu_kv
