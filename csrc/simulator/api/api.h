// What every exported function does around its work: counts the call, injects faults, advances the
// virtual host clock, reports calls made from inside a host callback, and turns failures into the
// return code, the thread's last error and the thread's error message.
#pragma once

#include <atomic>
#include <string>

#include "abi/acl_rt_abi.h"
#include "engine/error.h"

namespace npu_kv::sim {

/// One per exported function; lives in a static of that function.
class CallSite {
 public:
  explicit CallSite(const char* name);
  const char* name() const { return name_; }
  std::atomic<int64_t> calls{0};

 private:
  const char* name_;
};

/// False when an injected fault makes the call do nothing. Throws when one makes it fail, and when
/// the process is a fork of the one that activated the simulator.
bool enter_call(CallSite& site);
/// The function that this thread called before the one it is in; "" when there was none.
const char* previous_call();
/// Throws in a forked child, where nothing of the simulator may be touched.
void check_not_forked();
/// Keeps code and message for aclrtPeekAtLastError and aclGetRecentErrMsg; returns the code.
aclError keep_failure(const char* function, const Failure& failure);
aclError keep_current_exception(const char* function) noexcept;

/// Throws 100000, the acl layer's answer to an argument it can refuse by itself.
inline void require(bool condition, const char* what) {
  if (!condition) throw SimulatorError(ACL_ERROR_INVALID_PARAM, std::string("EH0001: ") + what);
}
inline void require(bool condition, const std::string& what) { require(condition, what.c_str()); }

inline void check_timeout(int32_t timeout_ms) {
  if (timeout_ms == 0 || timeout_ms < -1) {
    throw SimulatorError(ACL_ERROR_RT_PARAM_INVALID,
                         "EE1003: timeout is " + std::to_string(timeout_ms) +
                             ", allowed are -1 (for ever) and positive milliseconds");
  }
}

template <typename Work>
aclError call(CallSite& site, Work&& work) noexcept {
  try {
    if (enter_call(site)) work();
    return ACL_SUCCESS;
  } catch (...) {
    return keep_current_exception(site.name());
  }
}

}  // namespace npu_kv::sim

/// The body of an exported function, as a lambda that throws SimulatorError on failure:
///   NPU_SIM_EXPORT aclError aclrtFree(void* p) { return NPU_SIM_CALL([&] { ... }); }
#define NPU_SIM_CALL(...)                                      \
  [&](const char* npu_sim_name) {                              \
    static ::npu_kv::sim::CallSite npu_sim_site{npu_sim_name}; \
    return ::npu_kv::sim::call(npu_sim_site, __VA_ARGS__);     \
  }(__func__)
