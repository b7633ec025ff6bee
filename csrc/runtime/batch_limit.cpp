#include "runtime/batch_limit.h"

#include <atomic>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>

namespace npu_kv {
namespace {

std::atomic<size_t> current_limit{0};  // 0: not read from the environment yet

size_t limit_from_environment() {
  const char* text = std::getenv("NPU_KV_MAX_BATCH");
  if (text == nullptr || *text == '\0') return kDefaultMaxBatch;
  size_t value = 0;
  const char* end = text + std::strlen(text);
  auto [rest, error] = std::from_chars(text, end, value);
  if (error != std::errc() || rest != end || value == 0) {
    throw std::invalid_argument("NPU_KV_MAX_BATCH must be a positive integer, got '" +
                                std::string(text) + "'");
  }
  return value;
}

}  // namespace

size_t max_batch() {
  size_t limit = current_limit.load(std::memory_order_relaxed);
  if (limit == 0) {
    size_t from_environment = limit_from_environment();
    // A concurrent set_max_batch() wins over the environment.
    if (current_limit.compare_exchange_strong(limit, from_environment)) limit = from_environment;
  }
  return limit;
}

void set_max_batch(long long limit) {
  if (limit <= 0) {
    throw std::invalid_argument("max_batch must be positive, got " + std::to_string(limit));
  }
  current_limit.store(static_cast<size_t>(limit));
}

}  // namespace npu_kv
