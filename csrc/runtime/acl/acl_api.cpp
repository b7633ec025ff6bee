#include "runtime/acl/acl_api.h"

#include <dlfcn.h>

namespace npu_kv {
namespace {

template <typename Function>
void look_up(void* library, const char* name, Function* function) {
  *function = reinterpret_cast<Function>(dlsym(library, name));
}

OptionalAclFunctions look_up_all() {
  OptionalAclFunctions functions;
  // The library that torch_npu runs on is loaded already, under this name.
  void* library = dlopen("libascendcl.so", RTLD_LAZY | RTLD_NOLOAD);
  if (library == nullptr) library = RTLD_DEFAULT;
  look_up(library, "aclrtMemcpyBatchAsync", &functions.memcpy_batch_async);
  look_up(library, "aclrtPointerGetAttributes", &functions.pointer_get_attributes);
  look_up(library, "aclrtMemGetAddressRange", &functions.mem_get_address_range);
  look_up(library, "aclrtQueryEventStatus", &functions.query_event_status);
  look_up(library, "aclrtEventGetTimestamp", &functions.event_get_timestamp);
  look_up(library, "aclmdlRICaptureBegin", &functions.capture_begin);
  look_up(library, "aclmdlRICaptureEnd", &functions.capture_end);
  look_up(library, "aclmdlRIExecuteAsync", &functions.execute_async);
  look_up(library, "aclmdlRIDestroy", &functions.destroy_graph);
  look_up(library, "aclmdlRICaptureGetInfo", &functions.capture_info);
  look_up(library, "aclmdlRICaptureThreadExchangeMode", &functions.exchange_capture_mode);
  look_up(library, "aclmdlRIDestroyRegisterCallback", &functions.register_destroy_callback);
  look_up(library, "aclrtLaunchHostFunc", &functions.launch_host_func);
  look_up(library, "aclrtLaunchCallback", &functions.launch_callback);
  look_up(library, "aclrtValueWait", &functions.value_wait);
  look_up(library, "aclrtValueWrite", &functions.value_write);
  look_up(library, "aclrtCreateEventWithFlag", &functions.create_event_with_flag);
  look_up(library, "aclrtCreateStreamWithConfig", &functions.create_stream_with_config);
  look_up(library, "aclrtStreamQuery", &functions.stream_query);
  look_up(library, "aclrtSynchronizeStreamWithTimeout", &functions.synchronize_stream_with_timeout);
  look_up(library, "aclGetRecentErrMsg", &functions.get_recent_err_msg);
  look_up(library, "npu_sim_callback_ns", &functions.simulated_callback_ns);
  look_up(library, "npu_sim_caused_at", &functions.simulated_caused_at);
  return functions;
}

}  // namespace

const OptionalAclFunctions& optional_acl_functions() {
  static const OptionalAclFunctions functions = look_up_all();
  return functions;
}

std::string acl_error_text(const std::string& call, int code) {
  std::string text = call + " failed with error " + std::to_string(code);
  const auto recent = optional_acl_functions().get_recent_err_msg;
  if (const char* detail = recent != nullptr ? recent() : nullptr) {
    text.append(": ").append(detail);
  }
  return text;
}

}  // namespace npu_kv
