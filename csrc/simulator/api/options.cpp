// Options that are kept and reported back. None changes what the simulated operators compute.
#include <atomic>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <utility>

#include "abi/acl_op_abi.h"
#include "api/api.h"
#include "api/arguments.h"
#include "engine/engine.h"
#include "engine/operator_table.h"

namespace npu_kv::sim {
namespace {

/// Options by scope (a context, or null for the process) and number; 0 until set. Thread-safe.
class NumberedOptions {
 public:
  void set(const void* scope, int option, int64_t value) {
    const std::lock_guard lock(mutex_);
    values_[{scope, option}] = value;
  }
  int64_t get(const void* scope, int option) const {
    const std::lock_guard lock(mutex_);
    const auto found = values_.find({scope, option});
    return found == values_.end() ? 0 : found->second;
  }

 private:
  mutable std::mutex mutex_;
  std::map<std::pair<const void*, int>, int64_t> values_;
};

class CompileOptions {
 public:
  void set(aclCompileOpt option, const char* value) {
    check(option);
    check_pointer(value, "value");
    const std::lock_guard lock(mutex_);
    values_[option] = value;
  }
  std::string get(aclCompileOpt option) const {
    check(option);
    const std::lock_guard lock(mutex_);
    const auto found = values_.find(option);
    return found == values_.end() ? std::string() : found->second;
  }

 private:
  static void check(aclCompileOpt option) {
    require(option >= ACL_PRECISION_MODE && option <= ACL_OP_DEBUG_OPTION,
            "unknown compile option " + std::to_string(static_cast<int>(option)));
  }

  mutable std::mutex mutex_;
  std::map<int, std::string> values_;
};

void check_system_option(aclSysParamOpt option) {
  require(option >= ACL_OPT_DETERMINISTIC && option <= ACL_OPT_STRONG_CONSISTENCY,
          "unknown system parameter " + std::to_string(static_cast<int>(option)));
}

// None of these is ever destroyed: other threads may still call in while the process ends.
NumberedOptions& system_options() {
  static auto* one = new NumberedOptions;
  return *one;
}
NumberedOptions& saturation_modes() {
  static auto* one = new NumberedOptions;
  return *one;
}
CompileOptions& compile_options() {
  static auto* one = new CompileOptions;
  return *one;
}

std::atomic<uint64_t> execute_timeout_us{0};

}  // namespace
}  // namespace npu_kv::sim

using namespace npu_kv::sim;  // NOLINT: everything here is this namespace's C face

NPU_SIM_EXPORT aclError aclSetCompileopt(aclCompileOpt option, const char* value) {
  return NPU_SIM_CALL([&] {
    compile_options().set(option, value);
    load_operator_library();  // torch_npu gets ready for its first operator
  });
}

NPU_SIM_EXPORT size_t aclGetCompileoptSize(aclCompileOpt option) {
  size_t size = 0;
  NPU_SIM_CALL([&] { size = compile_options().get(option).size() + 1; });
  return size;
}

NPU_SIM_EXPORT aclError aclGetCompileopt(aclCompileOpt option, char* value, size_t length) {
  return NPU_SIM_CALL([&] {
    check_pointer(value, "value");
    const std::string text = compile_options().get(option);
    require(length > text.size(),
            "length is " + std::to_string(length) + ", needs " + std::to_string(text.size() + 1));
    std::memcpy(value, text.c_str(), text.size() + 1);
  });
}

NPU_SIM_EXPORT aclError aclopSetCompileFlag(int flag) {
  return NPU_SIM_CALL(
      [&] { require(flag == 0 || flag == 1, "unknown compile flag " + std::to_string(flag)); });
}

NPU_SIM_EXPORT aclError aclrtSetSysParamOpt(aclSysParamOpt option, int64_t value) {
  return NPU_SIM_CALL([&] {
    check_system_option(option);
    system_options().set(nullptr, option, value);
  });
}

NPU_SIM_EXPORT aclError aclrtGetSysParamOpt(aclSysParamOpt option, int64_t* value) {
  return NPU_SIM_CALL([&] {
    check_system_option(option);
    check_pointer(value, "value");
    *value = system_options().get(nullptr, option);
  });
}

NPU_SIM_EXPORT aclError aclrtCtxSetSysParamOpt(aclSysParamOpt option, int64_t value) {
  return NPU_SIM_CALL([&] {
    check_system_option(option);
    system_options().set(&require_context(), option, value);
  });
}

NPU_SIM_EXPORT aclError aclrtCtxGetSysParamOpt(aclSysParamOpt option, int64_t* value) {
  return NPU_SIM_CALL([&] {
    check_system_option(option);
    check_pointer(value, "value");
    *value = system_options().get(&require_context(), option);
  });
}

NPU_SIM_EXPORT aclError aclrtSetDeviceSatMode(aclrtFloatOverflowMode mode) {
  return NPU_SIM_CALL([&] {
    require(mode == ACL_RT_OVERFLOW_MODE_SATURATION || mode == ACL_RT_OVERFLOW_MODE_INFNAN,
            "unknown overflow mode " + std::to_string(static_cast<int>(mode)));
    saturation_modes().set(&require_context(), 0, mode);
  });
}

NPU_SIM_EXPORT aclError aclrtGetDeviceSatMode(aclrtFloatOverflowMode* mode) {
  return NPU_SIM_CALL([&] {
    check_pointer(mode, "mode");
    *mode = static_cast<aclrtFloatOverflowMode>(saturation_modes().get(&require_context(), 0));
  });
}

// Simulated operators do not time out; the value is kept because it is asked back.
NPU_SIM_EXPORT aclError aclrtSetOpExecuteTimeOut(uint32_t seconds) {
  return NPU_SIM_CALL([&] { execute_timeout_us = uint64_t{seconds} * 1'000'000; });
}

NPU_SIM_EXPORT aclError aclrtSetOpExecuteTimeOutWithMs(uint32_t milliseconds) {
  return NPU_SIM_CALL([&] { execute_timeout_us = uint64_t{milliseconds} * 1'000; });
}

NPU_SIM_EXPORT aclError aclrtSetOpExecuteTimeOutV2(uint64_t microseconds, uint64_t* actual) {
  return NPU_SIM_CALL([&] {
    check_pointer(actual, "actualTimeout");
    execute_timeout_us = microseconds;
    *actual = microseconds;
  });
}

NPU_SIM_EXPORT aclError aclrtGetOpExecuteTimeout(uint32_t* milliseconds) {
  return NPU_SIM_CALL([&] {
    check_pointer(milliseconds, "timeoutMs");
    *milliseconds = static_cast<uint32_t>(execute_timeout_us / 1'000);
  });
}

NPU_SIM_EXPORT aclError aclrtSetOpWaitTimeout(uint32_t /*seconds*/) {
  return NPU_SIM_CALL([] {});
}

// Both callbacks tell of things that the simulator does not do by itself: a kernel exception with
// its registers, and a device that is taken away.
NPU_SIM_EXPORT aclError aclrtSetExceptionInfoCallback(void (* /*callback*/)(void*)) {
  return NPU_SIM_CALL([] {});
}

NPU_SIM_EXPORT aclError aclrtRegDeviceStateCallback(const char* name,
                                                    void (* /*callback*/)(int32_t, int, void*),
                                                    void* /*arguments*/) {
  return NPU_SIM_CALL([&] { check_pointer(name, "regName"); });
}
