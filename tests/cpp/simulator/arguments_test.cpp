// Arguments that every function checks alike: a null pointer for a result is the acl layer's
// 100000.
#include <cstdio>

#include "simulator/fixture.h"

extern "C" {
aclError aclrtMemGetAddressRange(void* pointer, void** base, size_t* bytes);
aclError aclrtGetPrimaryCtxState(int32_t device, uint32_t* flags, int32_t* active);
}

TEST(null_results_are_refused) {
  Session session;
  Stream stream;
  Event event(ACL_EVENT_SYNC | ACL_EVENT_TIME_LINE);
  FlagEvent flag(ACL_EVENT_SYNC);
  DeviceMemory device(8);
  Graph graph(capture(stream, [] {}));
  CHECK_OK(aclrtRecordEvent(event, stream));
  CHECK_OK(aclrtSynchronizeStream(stream));
  void* pointer = nullptr;
  size_t bytes = 0;
  float ms = 0;
  aclrtPtrAttributes attributes{};
  const std::vector<std::pair<const char*, aclError>> results = {
      {"aclrtGetDeviceCount", aclrtGetDeviceCount(nullptr)},
      {"aclrtGetDevice", aclrtGetDevice(nullptr)},
      {"aclrtCreateContext", aclrtCreateContext(nullptr, 0)},
      {"aclrtGetCurrentContext", aclrtGetCurrentContext(nullptr)},
      {"aclrtGetMemInfo, free", aclrtGetMemInfo(1, nullptr, &bytes)},
      {"aclrtGetMemInfo, total", aclrtGetMemInfo(1, &bytes, nullptr)},
      {"aclrtPointerGetAttributes", aclrtPointerGetAttributes(device, nullptr)},
      {"aclrtPointerGetAttributes, pointer", aclrtPointerGetAttributes(nullptr, &attributes)},
      {"aclrtMemGetAddressRange", aclrtMemGetAddressRange(device, &pointer, nullptr)},
      {"aclrtHostRegister", aclrtHostRegister(&bytes, 8, 0, nullptr)},
      {"aclrtHostUnregister", aclrtHostUnregister(nullptr)},
      {"aclrtStreamGetId", aclrtStreamGetId(stream, nullptr)},
      {"aclrtCtxGetCurrentDefaultStream", aclrtCtxGetCurrentDefaultStream(nullptr)},
      {"aclrtSetStreamAttribute", aclrtSetStreamAttribute(stream, 1, nullptr)},
      {"aclrtQueryEvent", aclrtQueryEvent(flag, nullptr)},
      {"aclrtQueryEventStatus", aclrtQueryEventStatus(event, nullptr)},
      {"aclrtQueryEventWaitStatus", aclrtQueryEventWaitStatus(flag, nullptr)},
      {"aclrtEventElapsedTime", aclrtEventElapsedTime(nullptr, event, event)},
      {"aclrtEventElapsedTime, start", aclrtEventElapsedTime(&ms, nullptr, event)},
      {"aclrtEventGetTimestamp", aclrtEventGetTimestamp(event, nullptr)},
      {"aclmdlRICaptureThreadExchangeMode", aclmdlRICaptureThreadExchangeMode(nullptr)},
      {"aclmdlRIGetId", aclmdlRIGetId(graph, nullptr)},
      {"aclmdlRIDebugJsonPrint", aclmdlRIDebugJsonPrint(graph, nullptr, 0)},
      {"aclmdlRIDebugJsonPrint, folder", aclmdlRIDebugJsonPrint(graph, "/no/such/folder/g", 0)},
      {"aclrtValueWrite, flag", aclrtValueWrite(device, 1, 1, stream)},
  };
  for (const auto& [what, code] : results) {
    if (code != ACL_ERROR_INVALID_PARAM) std::fprintf(stderr, "%s:\n", what);
    CHECK_EQUAL(code, ACL_ERROR_INVALID_PARAM);
  }
}

TEST(the_range_of_an_allocation_is_found_from_an_inner_pointer) {
  Session session;
  DeviceMemory device(64);
  void* base = nullptr;
  size_t bytes = 0;
  CHECK_OK(aclrtMemGetAddressRange(device.data() + 63, &base, &bytes));
  CHECK(base == device);
  CHECK_EQUAL(bytes, 64u);
  CHECK_EQUAL(aclrtMemGetAddressRange(&bytes, &base, &bytes), ACL_ERROR_RT_PARAM_INVALID);
}

TEST(a_printed_graph_shows_its_tasks) {
  Session session;
  Stream stream;
  DeviceMemory device(8);
  Graph graph(capture(stream, [&] { CHECK_OK(aclrtMemsetAsync(device, 8, 0, 8, stream)); }));
  char path[] = "/tmp/npu_kv_graph_XXXXXX";
  close(mkstemp(path));
  CHECK_OK(aclmdlRIDebugJsonPrint(graph, path, 0));
  char text[200] = {};
  FILE* file = std::fopen(path, "r");
  CHECK(std::fread(text, 1, sizeof text - 1, file) > 0);
  std::fclose(file);
  std::remove(path);
  CHECK_EQUAL(std::string(text), "{\"lanes\": [[{\"kind\": \"memset\", \"bytes\": 8}]]}\n");
}

TEST(a_primary_context_is_active_between_set_and_reset) {
  Session session(0, 3);
  const auto active = [] {
    int32_t value = -1;
    CHECK_OK(aclrtGetPrimaryCtxState(2, nullptr, &value));  // as torch_npu asks
    return value;
  };
  CHECK_EQUAL(active(), 0);
  CHECK_OK(aclrtSetDevice(2));
  CHECK_EQUAL(active(), 1);
  CHECK_OK(aclrtResetDevice(2));
  CHECK_EQUAL(active(), 0);
  CHECK_OK(aclrtSetCurrentContext(session.context));
}

SIMULATOR_TEST_MAIN
