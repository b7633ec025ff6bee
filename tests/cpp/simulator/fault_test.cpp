// Faults on demand.
#include "simulator/fixture.h"

namespace {

std::vector<aclError> outcomes(int calls) {
  std::vector<aclError> codes;
  for (int i = 0; i < calls; ++i) {
    uint32_t count = 0;
    codes.push_back(aclrtGetDeviceCount(&count));
  }
  return codes;
}

}  // namespace

TEST(the_chosen_calls_fail_and_no_others) {
  Session session;
  CHECK_OK(npu_sim_fail_call("aclrtGetDeviceCount", 2, 507899, 3));
  CHECK_OK(npu_sim_fail_call("aclrtMemset", 1, 507899, 1));
  CHECK((outcomes(6) == std::vector<aclError>{0, 507899, 507899, 507899, 0, 0}));
  CHECK_EQUAL(stat("calls.aclrtGetDeviceCount"), 6);  // failing calls are calls
  CHECK(contains(last_message(), "aclrtGetDeviceCount"));
  CHECK_EQUAL(aclrtPeekAtLastError(0), 507899);
  npu_sim_clear_faults();
  CHECK_OK(aclrtMemset(nullptr, 0, 0, 0));
}

TEST(a_failed_call_does_nothing) {
  Session session;
  const int64_t streams = stat("live.streams");
  CHECK_OK(npu_sim_fail_call("aclrtCreateStream", 1, 507899, 1));
  aclrtStream stream = nullptr;
  CHECK_EQUAL(aclrtCreateStream(&stream), 507899);
  CHECK(stream == nullptr);
  CHECK_EQUAL(stat("live.streams"), streams);
}

TEST(fault_requests_are_checked) {
  CHECK_EQUAL(npu_sim_fail_call("aclrtGetDeviceCount", 0, 507899, 1), ACL_ERROR_INVALID_PARAM);
  CHECK_EQUAL(npu_sim_fail_call("aclrtGetDeviceCount", 1, 0, 1), ACL_ERROR_INVALID_PARAM);
  CHECK_EQUAL(npu_sim_fail_call("aclrtGetDeviceCount", 1, 507899, 0), ACL_ERROR_INVALID_PARAM);
  CHECK_EQUAL(npu_sim_fail_call("aclrtGetDevicesCount", 1, 507899, 1), ACL_ERROR_INVALID_PARAM);
  CHECK(contains(npu_sim_error(), "aclrtGetDevicesCount"));
  CHECK_EQUAL(npu_sim_fail_copy(0, 507013), ACL_ERROR_INVALID_PARAM);
  CHECK_EQUAL(npu_sim_fail_copy(1, 0), ACL_ERROR_INVALID_PARAM);
  Session session;
  Stream stream;
  CHECK_EQUAL(npu_sim_release(stream), ACL_ERROR_INVALID_PARAM);
  CHECK_EQUAL(npu_sim_stall(nullptr), ACL_ERROR_RT_INVALID_HANDLE);
}

TEST(the_nth_copy_counts_singles_and_items_of_batches) {
  Session session;
  Stream stream;
  npu_sim_set("shuffle", 0);
  PinnedMemory host("abcdef");
  DeviceMemory device(6);
  device.write("......");
  std::vector<void*> dsts;
  std::vector<void*> srcs;
  std::vector<size_t> sizes(4, 1);
  for (int i = 1; i < 5; ++i) {
    dsts.push_back(device.data() + i);
    srcs.push_back(host.data() + i);
  }
  size_t index = 0;
  size_t fail_index = 0;
  aclrtMemcpyBatchAttr attr{{0, ACL_MEM_LOCATION_TYPE_DEVICE}, {0, ACL_MEM_LOCATION_TYPE_HOST}, {}};
  CHECK_OK(npu_sim_fail_copy(3, 507013));
  CHECK_OK(h2d(device, host, 1, stream));
  CHECK_OK(aclrtMemcpyBatchAsync(dsts.data(), sizes.data(), srcs.data(), sizes.data(), 4, &attr,
                                 &index, 1, &fail_index, stream));
  CHECK_OK(h2d(device.data() + 5, host.data() + 5, 1, stream));
  CHECK_EQUAL(aclrtSynchronizeStream(stream), 507013);
  CHECK_EQUAL(device.read(6), "ab...f");
}

TEST(synchronous_copies_return_their_fault) {
  Session session;
  DeviceMemory device(1);
  PinnedMemory host(1);
  CHECK_OK(npu_sim_fail_copy(1, 507013));
  CHECK_EQUAL(aclrtMemcpy(device, 1, host, 1, ACL_MEMCPY_HOST_TO_DEVICE), 507013);
  CHECK_OK(aclrtMemcpy(device, 1, host, 1, ACL_MEMCPY_HOST_TO_DEVICE));
}

TEST(a_stalled_stream_finishes_its_task_and_starts_no_other) {
  Session session;
  Stream stream;
  DeviceMemory word(8);
  word.write(std::string(8, '\0'));
  CHECK_OK(aclrtValueWait(word, 1, 1, stream));
  CHECK(blocked(stream));
  CHECK_OK(npu_sim_stall(stream));
  CHECK_OK(npu_sim_stall(stream));
  CHECK_OK(aclrtValueWrite(word, 2, 0, stream));
  CHECK_OK(aclrtMemset(word, 8, 1, 1));
  CHECK(blocked(stream));
  CHECK_EQUAL(word.read(1), "\1");
  CHECK_OK(npu_sim_release(stream));
  CHECK(blocked(stream));  // one stall is left
  CHECK_OK(npu_sim_release(stream));
  CHECK_OK(aclrtSynchronizeStream(stream));
  CHECK_EQUAL(word.read(1), "\2");
}

TEST(clearing_faults_releases_stalls) {
  Session session;
  StalledStream stream;
  DeviceMemory device(8);
  CHECK_OK(aclrtMemsetAsync(device, 8, 0, 8, stream));
  CHECK(blocked(stream));
  npu_sim_clear_faults();
  CHECK_OK(aclrtSynchronizeStream(stream));
}

SIMULATOR_TEST_MAIN
