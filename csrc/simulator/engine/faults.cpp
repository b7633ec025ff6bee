#include "engine/faults.h"

namespace npu_kv::sim {

void Faults::fail_call(const std::string& function, int64_t nth, aclError code, int64_t times) {
  std::lock_guard lock(mutex_);
  calls_.push_back({function, nth - 1, code, times});
  any_call_ = true;
}

void Faults::drop_call(const std::string& function, int64_t nth, int64_t times) {
  fail_call(function, nth, ACL_SUCCESS, times);
}

void Faults::fail_copy(int64_t nth, aclError code) {
  std::lock_guard lock(mutex_);
  copies_before_ = nth - 1;
  copy_code_ = code;
  any_copy_ = true;
}

void Faults::clear() {
  std::lock_guard lock(mutex_);
  calls_.clear();
  any_call_ = false;
  any_copy_ = false;
}

bool Faults::check_call(const char* function) {
  if (!any_call_.load(std::memory_order_relaxed)) return true;
  std::lock_guard lock(mutex_);
  for (auto fault = calls_.begin(); fault != calls_.end(); ++fault) {
    if (fault->function != function) continue;
    if (fault->before > 0) {
      --fault->before;
      continue;
    }
    const aclError code = fault->code;
    if (--fault->times == 0) {
      calls_.erase(fault);
      any_call_ = !calls_.empty();
    }
    if (code == ACL_SUCCESS) return false;
    throw SimulatorError(code, std::string("EE9999: injected fault: this call of ") + function +
                                   " was told to fail");
  }
  return true;
}

void Faults::check_copy() {
  if (!any_copy_.load(std::memory_order_relaxed)) return;
  std::lock_guard lock(mutex_);
  if (!any_copy_ || copies_before_-- > 0) return;
  any_copy_ = false;
  throw SimulatorError(copy_code_,
                       "EE9999: injected fault: this copy was told to fail on the device");
}

}  // namespace npu_kv::sim
