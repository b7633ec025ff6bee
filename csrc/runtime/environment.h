// Numbers that the environment sets.
#pragma once

#include <cstddef>
#include <optional>

namespace npu_kv {

// Nothing when the variable is unset or empty. Throws std::invalid_argument, naming it, unless its
// value is a positive integer.
std::optional<size_t> positive_from_environment(const char* name);

}  // namespace npu_kv
