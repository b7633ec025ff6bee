#include "runtime/environment.h"

#include <charconv>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>

namespace npu_kv {

std::optional<size_t> positive_from_environment(const char* name) {
  const char* text = std::getenv(name);
  if (text == nullptr || *text == '\0') return std::nullopt;
  size_t value = 0;
  const char* end = text + std::strlen(text);
  auto [rest, error] = std::from_chars(text, end, value);
  if (error != std::errc() || rest != end || value == 0) {
    throw std::invalid_argument(std::string(name) + " must be a positive integer, got '" + text +
                                "'");
  }
  return value;
}

}  // namespace npu_kv
