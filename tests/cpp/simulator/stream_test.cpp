// Streams: order, independence, synchronisation, destruction, limits.
#include "simulator/fixture.h"

TEST(tasks_of_a_stream_run_in_order) {
  Session session;
  Stream stream;
  PinnedMemory host(1);
  DeviceMemory device(1);
  for (int i = 0; i < 100; ++i) {
    CHECK_OK(aclrtMemsetAsync(device, 1, i, 1, stream));
    CHECK_OK(d2h(host, device, 1, stream));
  }
  CHECK_OK(aclrtSynchronizeStream(stream));
  CHECK_EQUAL(static_cast<int>(host.data()[0]), 99);
}

TEST(streams_do_not_wait_for_each_other) {
  Session session;
  StalledStream held;
  Stream free_stream;
  DeviceMemory device(8);
  device.write("........");
  CHECK_OK(aclrtMemsetAsync(device, 8, 'a', 4, held));
  CHECK_OK(aclrtMemsetAsync(device.data() + 4, 4, 'b', 2, free_stream));
  // Neither does the default stream, which is no barrier here.
  CHECK_OK(aclrtMemsetAsync(device.data() + 6, 2, 'c', 2, nullptr));
  CHECK_OK(aclrtSynchronizeStream(free_stream));
  CHECK_OK(aclrtSynchronizeStream(nullptr));
  CHECK_EQUAL(device.read(8), "....bbcc");
  CHECK(query(free_stream));
  CHECK(query(nullptr));
  CHECK(!query(held));
  held.go();
  CHECK_OK(aclrtSynchronizeStream(held));
  CHECK_EQUAL(device.read(8), "aaaabbcc");
  CHECK(query(held));
}

TEST(query_answers_0_for_complete) {
  Session session;
  StalledStream stream;
  DeviceMemory device(8);
  aclrtStreamStatus status{};
  CHECK_OK(aclrtMemsetAsync(device, 8, 0, 8, stream));
  CHECK_OK(aclrtStreamQuery(stream, &status));
  CHECK_EQUAL(static_cast<int>(status), 1);
  stream.go();
  CHECK_OK(aclrtSynchronizeStream(stream));
  CHECK_OK(aclrtStreamQuery(stream, &status));
  CHECK_EQUAL(static_cast<int>(status), 0);
}

TEST(synchronise_with_timeout) {
  Session session;
  StalledStream stream;
  DeviceMemory device(8);
  CHECK_OK(aclrtMemsetAsync(device, 8, 0, 8, stream));
  for (const int32_t bad : {0, -2}) {
    CHECK_EQUAL(aclrtSynchronizeStreamWithTimeout(stream, bad), ACL_ERROR_RT_PARAM_INVALID);
    CHECK_EQUAL(aclrtSynchronizeDeviceWithTimeout(bad), ACL_ERROR_RT_PARAM_INVALID);
  }
  CHECK_EQUAL(aclrtSynchronizeStreamWithTimeout(stream, 1), ACL_ERROR_RT_STREAM_SYNC_TIMEOUT);
  CHECK_EQUAL(aclrtSynchronizeDeviceWithTimeout(1), ACL_ERROR_RT_STREAM_SYNC_TIMEOUT);
  stream.go();
  CHECK_OK(aclrtSynchronizeStreamWithTimeout(stream, -1));
  CHECK_OK(aclrtSynchronizeDeviceWithTimeout(60000));
}

TEST(synchronise_waits_for_what_is_queued_at_the_call) {
  Session session;
  Stream stream;
  DeviceMemory device(16);
  device.write(std::string(16, '\0'));
  CHECK_OK(aclrtValueWait(device, 1, 1, stream));
  std::atomic<bool> returned{false};
  std::thread waiter([&] {
    aclrtSetCurrentContext(session.context);
    CHECK_OK(aclrtSynchronizeStream(stream));
    returned = true;
  });
  wait_until([] { return stat("calls.aclrtSynchronizeStream") == 1; });
  wait_a_while();
  CHECK(!returned);
  CHECK_OK(aclrtValueWait(device.data() + 8, 1, 1, stream));  // later: not the waiter's business
  Stream other;
  CHECK_OK(aclrtValueWrite(device, 1, 0, other));
  waiter.join();
  CHECK(blocked(stream));
  CHECK_OK(aclrtValueWrite(device.data() + 8, 1, 0, other));
  CHECK_OK(aclrtSynchronizeStream(stream));
}

TEST(device_synchronise_waits_for_every_stream_of_the_context) {
  Session session;
  StalledStream first;
  StalledStream second;
  DeviceMemory device(2);
  device.write("..");
  CHECK_OK(aclrtMemsetAsync(device, 1, 'a', 1, first));
  CHECK_OK(aclrtMemsetAsync(device.data() + 1, 1, 'b', 1, second));
  aclrtContext other = nullptr;
  CHECK_OK(aclrtCreateContext(&other, 0));
  CHECK_OK(aclrtSynchronizeDevice());  // another context: nothing to wait for
  CHECK_OK(aclrtSetCurrentContext(session.context));
  first.go();
  CHECK_EQUAL(aclrtSynchronizeDeviceWithTimeout(kWhileMs), ACL_ERROR_RT_STREAM_SYNC_TIMEOUT);
  second.go();
  CHECK_OK(aclrtSynchronizeDevice());
  CHECK_EQUAL(device.read(2), "ab");
}

TEST(destroying_a_stream_waits_for_its_work) {
  Session session;
  PinnedMemory host(1 << 20);
  DeviceMemory device(1 << 20);
  {
    Stream stream;
    for (int i = 0; i < 20; ++i) CHECK_OK(h2d(device, host, 1 << 20, stream));
  }
  CHECK_EQUAL(stat("copies.h2d"), 20);
}

TEST(destroying_by_force_drops_queued_work_and_frees_blocked_work) {
  Session session;
  PinnedMemory host(8);
  DeviceMemory device(8);
  device.write(std::string(8, '\0'));
  Event never;
  Event after;
  aclrtStream stalled = nullptr;
  aclrtStream blocking = nullptr;
  CHECK_OK(aclrtCreateStream(&stalled));
  CHECK_OK(aclrtCreateStream(&blocking));
  CHECK_OK(npu_sim_stall(stalled));
  CHECK_OK(aclrtRecordEvent(never, stalled));
  npu_sim_reset_stats();
  CHECK_OK(h2d(device, host, 8, stalled));
  CHECK_OK(aclrtValueWait(device, 1, 1, blocking));
  CHECK_OK(h2d(device, host, 8, blocking));
  CHECK_OK(aclrtRecordEvent(after, blocking));
  CHECK_OK(aclrtDestroyStreamForce(blocking));
  CHECK_OK(aclrtDestroyStreamForce(stalled));
  CHECK_EQUAL(stat("copies.h2d"), 0);
  // Who waits for a dropped record is told, and nobody hangs.
  CHECK(aclrtSynchronizeEvent(after) != ACL_SUCCESS);
  Stream other;
  CHECK_OK(aclrtStreamWaitEvent(other, never));
  CHECK_OK(aclrtSynchronizeStream(other));
}

TEST(a_stream_can_be_destroyed_while_another_thread_waits_for_it) {
  Session session;
  DeviceMemory device(8);
  device.write(std::string(8, '\0'));
  aclrtStream stream = nullptr;
  CHECK_OK(aclrtCreateStream(&stream));
  CHECK_OK(aclrtValueWait(device, 1, 1, stream));
  std::thread waiter([&] {
    aclrtSetCurrentContext(session.context);
    aclrtSynchronizeStream(stream);
  });
  wait_until([] { return stat("calls.aclrtSynchronizeStream") == 1; });
  wait_a_while();
  CHECK_OK(aclrtDestroyStreamForce(stream));
  waiter.join();
}

TEST(handles_that_are_not_live_are_refused) {
  Session session;
  Stream stream;
  aclrtStream dead = nullptr;
  CHECK_OK(aclrtCreateStream(&dead));
  CHECK_OK(aclrtDestroyStream(dead));
  aclrtStreamStatus status{};
  Event event;
  CHECK_EQUAL(aclrtSynchronizeStream(dead), ACL_ERROR_RT_INVALID_HANDLE);
  CHECK_EQUAL(aclrtStreamQuery(dead, &status), ACL_ERROR_RT_INVALID_HANDLE);
  CHECK_EQUAL(aclrtDestroyStream(dead), ACL_ERROR_RT_INVALID_HANDLE);
  CHECK_EQUAL(aclrtRecordEvent(event, dead), ACL_ERROR_RT_INVALID_HANDLE);
  CHECK_EQUAL(aclrtDestroyStream(nullptr), ACL_ERROR_INVALID_PARAM);
  CHECK_EQUAL(aclrtCreateStream(nullptr), ACL_ERROR_INVALID_PARAM);
  CHECK_EQUAL(aclrtStreamQuery(stream, nullptr), ACL_ERROR_INVALID_PARAM);
}

TEST(the_default_stream_is_not_destroyed) {
  Session session;
  DeviceMemory device(8);
  aclrtStream by_handle = nullptr;
  CHECK_OK(aclrtCtxGetCurrentDefaultStream(&by_handle));
  CHECK_EQUAL(aclrtDestroyStream(by_handle), ACL_ERROR_RT_PARAM_INVALID);
  CHECK_EQUAL(aclrtDestroyStreamForce(by_handle), ACL_ERROR_RT_PARAM_INVALID);
  int32_t id = -1;
  int32_t null_id = -2;
  CHECK_OK(aclrtStreamGetId(by_handle, &id));
  CHECK_OK(aclrtStreamGetId(nullptr, &null_id));
  CHECK_EQUAL(id, null_id);
  CHECK_OK(aclrtMemsetAsync(device, 8, 'd', 8, nullptr));
  CHECK_OK(aclrtSynchronizeStream(by_handle));
  CHECK_EQUAL(device.read(8), "dddddddd");
}

TEST(streams_of_another_context_are_refused) {
  Session session(0, 2);
  PinnedMemory host(8);
  DeviceMemory device(8);
  device.write(std::string(8, '\0'));
  Event event;
  CHECK_OK(aclrtSetDevice(1));
  aclrtContext second = nullptr;
  CHECK_OK(aclrtGetCurrentContext(&second));
  aclrtStream foreign = nullptr;
  CHECK_OK(aclrtCreateStream(&foreign));
  CHECK_OK(aclrtSetCurrentContext(session.context));
  aclrtStreamStatus status{};
  aclmdlRICaptureStatus capture_status{};
  CHECK_EQUAL(h2d(device, host, 8, foreign), ACL_ERROR_RT_STREAM_CONTEXT);
  CHECK_EQUAL(aclrtMemsetAsync(device, 8, 0, 8, foreign), ACL_ERROR_RT_STREAM_CONTEXT);
  CHECK_EQUAL(aclrtSynchronizeStream(foreign), ACL_ERROR_RT_STREAM_CONTEXT);
  CHECK_EQUAL(aclrtStreamQuery(foreign, &status), ACL_ERROR_RT_STREAM_CONTEXT);
  CHECK_EQUAL(aclrtDestroyStream(foreign), ACL_ERROR_RT_STREAM_CONTEXT);
  CHECK_EQUAL(aclrtRecordEvent(event, foreign), ACL_ERROR_RT_STREAM_CONTEXT);
  CHECK_EQUAL(aclrtStreamWaitEvent(foreign, event), ACL_ERROR_RT_STREAM_CONTEXT);
  CHECK_EQUAL(aclrtValueWrite(device, 1, 0, foreign), ACL_ERROR_RT_STREAM_CONTEXT);
  CHECK_EQUAL(aclrtLaunchHostFunc(foreign, [](void*) {}, nullptr), ACL_ERROR_RT_STREAM_CONTEXT);
  CHECK_EQUAL(aclmdlRICaptureBegin(foreign, ACL_MODEL_RI_CAPTURE_MODE_GLOBAL),
              ACL_ERROR_RT_STREAM_CONTEXT);
  CHECK_EQUAL(aclmdlRICaptureGetInfo(foreign, &capture_status, nullptr),
              ACL_ERROR_RT_STREAM_CONTEXT);
  // An event may be recorded on one device and waited for on another.
  Stream stream;
  CHECK_OK(npu_sim_stall(stream));
  CHECK_OK(aclrtValueWrite(device, 1, 0, stream));
  CHECK_OK(aclrtRecordEvent(event, stream));
  CHECK_OK(aclrtSetCurrentContext(second));
  CHECK_OK(aclrtStreamWaitEvent(foreign, event));
  CHECK(blocked(foreign));
  CHECK_OK(npu_sim_release(stream));
  CHECK_OK(aclrtSynchronizeStream(foreign));
  CHECK_OK(aclrtDestroyStream(foreign));
  CHECK_OK(aclrtSetCurrentContext(session.context));
}

TEST(without_a_context_there_is_no_stream) {
  Session session;
  Stream stream;
  std::vector<aclError> codes;
  std::thread([&] {
    aclrtStream created = nullptr;
    codes = {aclrtSynchronizeStream(stream), aclrtSynchronizeStream(nullptr),
             aclrtSynchronizeDevice(), aclrtCreateStream(&created)};
  }).join();
  CHECK(codes == std::vector<aclError>(4, ACL_ERROR_RT_CONTEXT_NULL));
}

TEST(the_number_of_streams_is_limited) {
  Session session;
  npu_sim_set("max_streams", stat("live.streams") + 2);
  aclrtStream one_more = nullptr;
  {
    Stream first;
    Stream second;
    CHECK_EQUAL(aclrtCreateStream(&one_more), ACL_ERROR_RT_NO_STREAM_RESOURCE);
    CHECK_EQUAL(aclrtCreateStreamWithConfig(&one_more, 0, 3), ACL_ERROR_RT_NO_STREAM_RESOURCE);
  }
  Stream again;
}

SIMULATOR_TEST_MAIN
