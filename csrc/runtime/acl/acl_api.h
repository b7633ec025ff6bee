// The ACL functions that a CANN release or a product may lack, looked up once at first use.
#pragma once

#include <acl/acl.h>

#include <cstdint>
#include <string>

namespace npu_kv {

// A null pointer where the runtime lacks the function. All others are called directly.
struct OptionalAclFunctions {
  decltype(&aclrtMemcpyBatchAsync) memcpy_batch_async = nullptr;
  decltype(&aclrtPointerGetAttributes) pointer_get_attributes = nullptr;
  decltype(&aclrtMemGetAddressRange) mem_get_address_range = nullptr;
  decltype(&aclrtQueryEventStatus) query_event_status = nullptr;
  decltype(&aclrtEventGetTimestamp) event_get_timestamp = nullptr;
  decltype(&aclmdlRICaptureBegin) capture_begin = nullptr;
  decltype(&aclmdlRICaptureEnd) capture_end = nullptr;
  decltype(&aclmdlRIExecuteAsync) execute_async = nullptr;
  decltype(&aclmdlRIDestroy) destroy_graph = nullptr;
  decltype(&aclmdlRICaptureGetInfo) capture_info = nullptr;
  decltype(&aclmdlRICaptureThreadExchangeMode) exchange_capture_mode = nullptr;
  decltype(&aclmdlRIDestroyRegisterCallback) register_destroy_callback = nullptr;
  decltype(&aclrtLaunchHostFunc) launch_host_func = nullptr;
  decltype(&aclrtLaunchCallback) launch_callback = nullptr;
  decltype(&aclrtValueWait) value_wait = nullptr;
  decltype(&aclrtValueWrite) value_write = nullptr;
  decltype(&aclrtCreateEventWithFlag) create_event_with_flag = nullptr;
  decltype(&aclrtCreateStreamWithConfig) create_stream_with_config = nullptr;
  decltype(&aclrtStreamQuery) stream_query = nullptr;
  decltype(&aclrtSynchronizeStreamWithTimeout) synchronize_stream_with_timeout = nullptr;
  decltype(&aclGetRecentErrMsg) get_recent_err_msg = nullptr;
  // Of the simulated runtime.
  int64_t (*simulated_callback_ns)() = nullptr;
  void (*simulated_caused_at)(int64_t ns) = nullptr;
};

const OptionalAclFunctions& optional_acl_functions();

// "<call> failed with error <code>: <text of aclGetRecentErrMsg>". Must run on the thread of the
// call, whose text it takes.
std::string acl_error_text(const std::string& call, int code);

}  // namespace npu_kv
