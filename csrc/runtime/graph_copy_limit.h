// How many copies of one direction a stream of a captured graph may hold.
#pragma once

#include <cstddef>

#include "runtime/export.h"

namespace npu_kv {

// NPU_KV_MAX_GRAPH_COPIES, else what the chip is known to hold: chips with UB queues (Ascend 950)
// 32768, those before them no fixed number, which is 0. Throws std::invalid_argument when the
// variable is set and is not a positive integer.
NPU_KV_API size_t graph_copy_limit(const char* soc_name);

}  // namespace npu_kv
