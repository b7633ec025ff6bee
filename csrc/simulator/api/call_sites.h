// What the API layer keeps per function (counts) and per thread (last error, message).
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "abi/acl_rt_abi.h"

namespace npu_kv::sim {

/// Functions that were called at least once since the last reset, with their counts. Thread-safe.
std::vector<std::pair<std::string, int64_t>> call_counts();
void reset_call_counts();

/// The calling thread's message, once; null when there is none. Valid until the next call.
const char* take_message();
aclError peek_last_error();
aclError take_last_error();

}  // namespace npu_kv::sim
