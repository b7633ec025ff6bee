// Profiling and logging. Neither touches the device, so these calls are not counted and may be made
// from host callbacks.
#include <chrono>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string_view>

#include "abi/acl_op_abi.h"

namespace {

/// Lowest level that is printed, from NPU_KV_SIM_LOG; everything is silent when it is not set.
int lowest_level() {
  static const int level = [] {
    const char* text = std::getenv("NPU_KV_SIM_LOG");
    const std::string_view name = text == nullptr ? "" : text;
    if (name == "debug") return int{ACL_DEBUG};
    if (name == "info") return int{ACL_INFO};
    if (name == "warning") return int{ACL_WARNING};
    if (name == "error") return int{ACL_ERROR};
    return ACL_ERROR + 1;
  }();
  return level;
}

}  // namespace

NPU_SIM_EXPORT void aclAppLog(aclLogLevel level, const char* function, const char* file,
                              uint32_t line, const char* format, ...) {
  if (level < lowest_level() || format == nullptr) return;
  static constexpr const char* kNames[] = {"debug", "info", "warning", "error"};
  char text[2048];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  std::fprintf(stderr, "[npu log %s] %s:%u %s: %s\n", kNames[level & 3], file ? file : "?", line,
               function ? function : "?", text);
}

// The profiler is never switched on here: reports are accepted and forgotten.
NPU_SIM_EXPORT int32_t MsprofRegisterCallback(uint32_t, int32_t (*)(uint32_t, void*, uint32_t)) {
  return 0;
}
NPU_SIM_EXPORT int32_t MsprofReportApi(uint32_t, const void*) { return 0; }
NPU_SIM_EXPORT int32_t MsprofReportCompactInfo(uint32_t, const void*, uint32_t) { return 0; }
NPU_SIM_EXPORT int32_t MsprofReportAdditionalInfo(uint32_t, const void*, uint32_t) { return 0; }

NPU_SIM_EXPORT uint64_t MsprofGetHashId(const char* text, size_t length) {
  if (text == nullptr) return 0;
  return std::hash<std::string_view>{}(std::string_view(text, length));
}

NPU_SIM_EXPORT uint64_t MsprofSysCycleTime() {
  return static_cast<uint64_t>(std::chrono::steady_clock::now().time_since_epoch().count());
}
