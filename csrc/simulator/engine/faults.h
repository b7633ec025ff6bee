// Faults on demand: the n-th call of a function, or the n-th copy on the device, fails.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "engine/error.h"

namespace npu_kv::sim {

/// Thread-safe.
class Faults {
 public:
  void fail_call(const std::string& function, int64_t nth, aclError code, int64_t times);
  void fail_copy(int64_t nth, aclError code);
  void clear();

  /// Such calls answer success and do nothing.
  void drop_call(const std::string& function, int64_t nth, int64_t times);

  /// Throws when this call of `function` is to fail; false when it is to do nothing. One relaxed
  /// load when nothing is injected.
  bool check_call(const char* function);
  /// Throws when the copy that is about to run is to fail.
  void check_copy();

 private:
  struct CallFault {
    std::string function;
    int64_t before;  // calls that still succeed
    aclError code;   // ACL_SUCCESS: the call is dropped
    int64_t times;
  };
  std::atomic<bool> any_call_{false};
  std::atomic<bool> any_copy_{false};
  std::mutex mutex_;
  std::vector<CallFault> calls_;
  int64_t copies_before_ = 0;
  aclError copy_code_ = ACL_SUCCESS;
};

}  // namespace npu_kv::sim
