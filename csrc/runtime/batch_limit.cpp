#include "runtime/batch_limit.h"

#include <atomic>
#include <stdexcept>
#include <string>

#include "runtime/environment.h"

namespace npu_kv {
namespace {

std::atomic<size_t> current_limit{0};  // 0: not read from the environment yet

}  // namespace

size_t max_batch() {
  size_t limit = current_limit.load(std::memory_order_relaxed);
  if (limit == 0) {
    const size_t from_environment =
        positive_from_environment("NPU_KV_MAX_BATCH").value_or(kDefaultMaxBatch);
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
