// Errors that happened after the call they belong to had returned. They wait here, by device, for
// the next npu_kv call on that device or for raise_pending_errors(). Thread-safe.
#pragma once

#include <atomic>
#include <mutex>
#include <string>
#include <vector>

#include "runtime/export.h"

namespace npu_kv {

class NPU_KV_API PendingErrors {
 public:
  void add(int device, std::string message);

  // Removes and joins what is pending for `device` (every device when negative); empty if nothing
  // is.
  std::string take(int device);

  // One load: what the calls on the fast path ask first.
  bool any() const { return count_.load(std::memory_order_acquire) != 0; }

 private:
  struct Entry {
    int device;
    std::string message;
  };

  std::atomic<size_t> count_{0};
  std::mutex mutex_;
  std::vector<Entry> entries_;
  size_t dropped_ = 0;
};

NPU_KV_API PendingErrors& pending_errors();

}  // namespace npu_kv
