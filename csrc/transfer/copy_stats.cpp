#include "transfer/copy_stats.h"

#include <atomic>

namespace npu_kv {
namespace {

std::atomic<uint64_t> calls{0}, bytes_total{0}, before_total{0}, after_total{0};

}  // namespace

void count_call(uint64_t bytes, uint64_t copies_before, uint64_t copies_after) {
  calls.fetch_add(1, std::memory_order_relaxed);
  bytes_total.fetch_add(bytes, std::memory_order_relaxed);
  before_total.fetch_add(copies_before, std::memory_order_relaxed);
  after_total.fetch_add(copies_after, std::memory_order_relaxed);
}

CopyStats copy_stats() {
  return {calls.load(), bytes_total.load(), before_total.load(), after_total.load()};
}

void reset_copy_stats() {
  calls = 0;
  bytes_total = 0;
  before_total = 0;
  after_total = 0;
}

}  // namespace npu_kv
