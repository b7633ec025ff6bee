// Single copies and fills.
#include "simulator/fixture.h"

TEST(bytes_move_in_every_direction) {
  Session session;
  Stream stream;
  PinnedMemory in("0123456789");
  PinnedMemory out(10);
  DeviceMemory first(10);
  DeviceMemory second(10);
  CHECK_OK(h2d(first, in, 10, stream));
  CHECK_OK(aclrtMemcpyAsync(second.data() + 2, 8, first.data() + 1, 4, ACL_MEMCPY_DEVICE_TO_DEVICE,
                            stream));
  CHECK_OK(d2h(out, second.data() + 2, 4, stream));
  CHECK_OK(aclrtSynchronizeStream(stream));
  CHECK_EQUAL(out.read(4), "1234");
  char host[4];
  CHECK_OK(aclrtMemcpy(host, 4, in.data() + 6, 4, ACL_MEMCPY_HOST_TO_HOST));
  CHECK_EQUAL(std::string(host, 4), "6789");
}

TEST(asynchronous_copies_read_and_write_when_they_run) {
  Session session;
  StalledStream stream;
  PinnedMemory in("old");
  PinnedMemory out("out");
  DeviceMemory device(3);
  CHECK_OK(h2d(device, in, 3, stream));
  CHECK_OK(d2h(out, device, 3, stream));
  in.write("new");
  wait_a_while();
  CHECK_EQUAL(out.read(3), "out");
  CHECK(!query(stream));
  stream.go();
  CHECK_OK(aclrtSynchronizeStream(stream));
  CHECK_EQUAL(out.read(3), "new");
}

TEST(arguments_are_checked_in_the_documented_order) {
  Session session;
  Stream stream;
  PinnedMemory host(64);
  DeviceMemory device(64);
  const auto kind = ACL_MEMCPY_HOST_TO_DEVICE;
  // Nothing to copy succeeds before any other check, also for fills.
  CHECK_OK(aclrtMemcpyAsync(nullptr, 0, nullptr, 0, kind, stream));
  CHECK_OK(aclrtMemcpy(nullptr, 0, nullptr, 0, kind));
  CHECK_OK(aclrtMemset(nullptr, 0, 0, 0));
  CHECK_OK(aclrtMemsetAsync(nullptr, 0, 0, 0, stream));
  CHECK_EQUAL(aclrtMemcpyAsync(nullptr, 64, host, 64, kind, stream), ACL_ERROR_INVALID_PARAM);
  CHECK_EQUAL(aclrtMemcpyAsync(device, 64, nullptr, 64, kind, stream), ACL_ERROR_INVALID_PARAM);
  CHECK_EQUAL(aclrtMemcpy(nullptr, 64, host, 64, kind), ACL_ERROR_INVALID_PARAM);
  CHECK_EQUAL(aclrtMemcpyAsync(device, 63, host, 64, kind, stream), ACL_ERROR_RT_PARAM_INVALID);
  CHECK_EQUAL(aclrtMemcpy(device, 63, host, 64, kind), ACL_ERROR_RT_PARAM_INVALID);
  CHECK_EQUAL(aclrtMemset(device, 63, 0, 64), ACL_ERROR_RT_PARAM_INVALID);
  CHECK_EQUAL(aclrtMemset(nullptr, 64, 0, 64), ACL_ERROR_INVALID_PARAM);
  CHECK_EQUAL(aclrtMemsetAsync(device, 63, 0, 64, stream), ACL_ERROR_RT_PARAM_INVALID);
  CHECK_OK(aclrtMemcpyAsync(device, 64, device, 64, kind, stream));  // onto itself: nothing to do
  CHECK_OK(aclrtSynchronizeStream(stream));
  for (const char* direction : {"h2d", "d2h", "d2d", "h2h"}) {
    CHECK_EQUAL(stat(std::string("copies.") + direction), 0);
  }
}

TEST(the_claimed_direction_has_to_be_true) {
  Session session;
  Stream stream;
  PinnedMemory host(8);
  PinnedMemory other_host(8);
  char pageable[8] = {};
  DeviceMemory device(8);
  DeviceMemory other_device(8);
  struct Case {
    void* dst;
    const void* src;
    std::vector<int> true_kinds;
  };
  const std::vector<Case> cases = {
      {device, host, {1, 5}},  {device, pageable, {1, 5}},        {host, device, {2}},
      {pageable, device, {2}}, {device, other_device, {3, 6, 7}}, {host, other_host, {0}}};
  for (const Case& c : cases) {
    for (int kind = -1; kind <= 9; ++kind) {
      const bool fits = kind == ACL_MEMCPY_DEFAULT ||
                        std::count(c.true_kinds.begin(), c.true_kinds.end(), kind) == 1;
      CHECK_EQUAL(aclrtMemcpy(c.dst, 8, c.src, 8, static_cast<aclrtMemcpyKind>(kind)),
                  fits ? ACL_SUCCESS : ACL_ERROR_RT_PARAM_INVALID);
    }
  }
  CHECK_EQUAL(d2h(device, host, 8, stream), ACL_ERROR_RT_PARAM_INVALID);
  CHECK_EQUAL(h2d(host, device, 8, stream), ACL_ERROR_RT_PARAM_INVALID);
  // The variant that torch_npu uses for device to host skips this one check.
  CHECK_OK(aclrtMemcpyAsyncWithCondition(host, 8, device, 8, ACL_MEMCPY_HOST_TO_DEVICE, stream));
  CHECK_EQUAL(aclrtMemcpyAsync(host, 8, other_host, 8, ACL_MEMCPY_HOST_TO_HOST, stream),
              ACL_ERROR_RT_FEATURE_NOT_SUPPORT);
  CHECK_EQUAL(aclrtMemcpyAsync(host, 8, pageable, 8, ACL_MEMCPY_DEFAULT, stream),
              ACL_ERROR_RT_FEATURE_NOT_SUPPORT);
}

TEST(ranges_that_no_allocation_holds_are_refused) {
  Session session;
  Stream stream;
  PinnedMemory host(64);
  DeviceMemory device(64);
  void* freed = DeviceMemory(64);
  CHECK_EQUAL(h2d(device.data() + 1, host, 64, stream), ACL_ERROR_RT_PARAM_INVALID);
  CHECK_EQUAL(h2d(device, host.data() + 1, 64, stream), ACL_ERROR_RT_PARAM_INVALID);
  CHECK_EQUAL(h2d(device.data() - 1, host, 2, stream), ACL_ERROR_RT_PARAM_INVALID);
  CHECK_EQUAL(h2d(freed, host, 64, stream), ACL_ERROR_RT_PARAM_INVALID);
  CHECK_EQUAL(d2h(host, freed, 64, stream), ACL_ERROR_RT_PARAM_INVALID);
  CHECK_EQUAL(aclrtMemcpy(device.data() + 1, 64, host, 64, ACL_MEMCPY_HOST_TO_DEVICE),
              ACL_ERROR_RT_PARAM_INVALID);
  CHECK_EQUAL(aclrtMemset(device.data() + 1, 64, 0, 64), ACL_ERROR_RT_PARAM_INVALID);
  CHECK_EQUAL(aclrtMemsetAsync(device.data() + 1, 64, 0, 64, stream), ACL_ERROR_RT_PARAM_INVALID);
  // Half page-able, half pinned is neither.
  std::vector<char> buffer(4096);
  CHECK_OK(aclrtHostRegisterV2(buffer.data() + 2048, 1024, 0x10000000));
  CHECK_EQUAL(h2d(device, buffer.data() + 2047, 2, stream), ACL_ERROR_RT_PARAM_INVALID);
  CHECK_EQUAL(h2d(device, buffer.data() + 3071, 2, stream), ACL_ERROR_RT_PARAM_INVALID);
  CHECK_OK(h2d(device, buffer.data() + 3072, 2, stream));
  CHECK_OK(aclrtHostUnregister(buffer.data() + 2048));
}

TEST(pageable_copies_drain_the_stream_and_are_done_on_return) {
  Session session;
  StalledStream stream;
  PinnedMemory first("first");
  DeviceMemory device(5);
  char out[5] = {};
  CHECK_OK(h2d(device, first, 5, stream));
  std::atomic<bool> returned{false};
  std::thread caller([&] {
    aclrtSetCurrentContext(session.context);
    CHECK_OK(d2h(out, device, 5, stream));
    CHECK_EQUAL(std::string(out, 5), "first");
    returned = true;
  });
  wait_a_while();
  CHECK(!returned);
  stream.go();
  caller.join();
}

TEST(pageable_copies_return_failures_themselves) {
  Session session;
  Stream stream;
  DeviceMemory device(8);
  PinnedMemory pinned(8);
  const char pageable[8] = {};
  npu_sim_fail_copy(1, ACL_ERROR_RT_SYS_DMA);
  CHECK_EQUAL(h2d(device, pageable, 8, stream), ACL_ERROR_RT_SYS_DMA);
  CHECK_OK(aclrtSynchronizeStream(stream));
  npu_sim_fail_copy(1, ACL_ERROR_RT_SYS_DMA);  // an earlier copy of the drained stream
  CHECK_OK(h2d(device, pinned, 8, stream));
  npu_sim_reset_stats();
  CHECK_EQUAL(h2d(device, pageable, 8, stream), ACL_ERROR_RT_SYS_DMA);
  CHECK_EQUAL(stat("copies.h2d"), 0);
  CHECK_OK(aclrtSynchronizeStream(stream));
}

TEST(synchronous_calls_do_not_wait_for_streams) {
  Session session;
  StalledStream stream;
  DeviceMemory device(8);
  PinnedMemory pinned("pinned..");
  CHECK_OK(h2d(device, pinned, 8, stream));
  device.write("directly");
  CHECK_EQUAL(device.read(8), "directly");
  CHECK_OK(aclrtMemset(device, 8, '.', 8));
  CHECK_EQUAL(device.read(8), "........");
  stream.go();
  CHECK_OK(aclrtSynchronizeStream(stream));
  CHECK_EQUAL(device.read(8), "pinned..");
}

TEST(fills_run_in_stream_order) {
  Session session;
  StalledStream stream;
  DeviceMemory device(8);
  device.write("........");
  CHECK_OK(aclrtMemsetAsync(device, 8, 'x', 8, stream));
  CHECK_OK(aclrtMemsetAsync(device.data() + 2, 6, 'y', 3, stream));
  wait_a_while();
  CHECK_EQUAL(device.read(8), "........");
  stream.go();
  CHECK_OK(aclrtSynchronizeStream(stream));
  CHECK_EQUAL(device.read(8), "xxyyyxxx");
  char pageable[8] = {};
  CHECK_EQUAL(aclrtMemsetAsync(pageable, 8, 1, 8, stream), ACL_ERROR_RT_PARAM_INVALID);
}

TEST(memory_freed_in_flight_fails_the_task) {
  Session session;
  PinnedMemory host(64);
  DeviceMemory device(64);
  const std::vector<std::function<void(void*, aclrtStream)>> uses = {
      [&](void* freed, aclrtStream stream) { CHECK_OK(h2d(freed, host, 64, stream)); },
      [&](void* freed, aclrtStream stream) { CHECK_OK(d2h(host, freed, 64, stream)); },
      [&](void* freed, aclrtStream stream) {
        CHECK_OK(aclrtMemsetAsync(freed, 64, 0, 64, stream));
      },
      [&](void* freed, aclrtStream stream) { CHECK_OK(aclrtValueWrite(freed, 1, 0, stream)); },
      [&](void* freed, aclrtStream stream) { CHECK_OK(aclrtValueWait(freed, 1, 0, stream)); },
  };
  for (const auto& use : uses) {
    StalledStream stream;
    void* freed = nullptr;
    CHECK_OK(aclrtMalloc(&freed, 64, 0));
    use(freed, stream);
    CHECK_OK(aclrtFree(freed));
    stream.go();
    CHECK_EQUAL(aclrtSynchronizeStream(stream), ACL_ERROR_RT_SYS_DMA);
    CHECK(contains(last_message(), "freed"));
  }
  StalledStream stream;
  void* freed = nullptr;
  CHECK_OK(aclrtMallocHost(&freed, 64));
  CHECK_OK(h2d(device, freed, 64, stream));
  CHECK_OK(aclrtFreeHost(freed));
  stream.go();
  CHECK_EQUAL(aclrtSynchronizeStream(stream), ACL_ERROR_RT_SYS_DMA);
}

TEST(copies_and_bytes_are_counted_by_direction_when_they_run) {
  Session session;
  StalledStream stream;
  PinnedMemory host(100);
  DeviceMemory first(100);
  DeviceMemory second(100);
  CHECK_OK(h2d(first, host, 10, stream));
  CHECK_OK(h2d(first, host, 5, stream));
  CHECK_OK(d2h(host, first, 20, stream));
  CHECK_OK(aclrtMemcpyAsync(second, 100, first, 40, ACL_MEMCPY_DEVICE_TO_DEVICE, stream));
  CHECK_EQUAL(stat("copies.h2d"), 0);
  stream.go();
  CHECK_OK(aclrtSynchronizeStream(stream));
  char other[80];
  CHECK_OK(aclrtMemcpy(other, 80, host, 80, ACL_MEMCPY_HOST_TO_HOST));
  CHECK_EQUAL(stat("copies.h2d"), 2);
  CHECK_EQUAL(stat("bytes.h2d"), 15);
  CHECK_EQUAL(stat("copies.d2h"), 1);
  CHECK_EQUAL(stat("bytes.d2h"), 20);
  CHECK_EQUAL(stat("copies.d2d"), 1);
  CHECK_EQUAL(stat("bytes.d2d"), 40);
  CHECK_EQUAL(stat("copies.h2h"), 1);
  CHECK_EQUAL(stat("bytes.h2h"), 80);
  CHECK_EQUAL(stat("calls.aclrtMemcpyAsync"), 4);
  CHECK_EQUAL(stat("calls.aclrtMemcpy"), 1);
}

TEST(payload_stays_put_when_told_so) {
  Session session;
  Stream stream;
  PinnedMemory host("moved");
  DeviceMemory device(5);
  device.write("still");
  npu_sim_reset_stats();
  npu_sim_set("move_payload", 0);
  CHECK_OK(h2d(device, host, 5, stream));
  CHECK_OK(aclrtMemsetAsync(device, 5, 0, 5, stream));
  CHECK_OK(aclrtSynchronizeStream(stream));
  CHECK_EQUAL(h2d(device, host, 6, stream), ACL_ERROR_RT_PARAM_INVALID);
  npu_sim_set("move_payload", 1);
  CHECK_EQUAL(device.read(5), "still");
  CHECK_EQUAL(stat("copies.h2d"), 1);
  CHECK_EQUAL(stat("bytes.h2d"), 5);
}

SIMULATOR_TEST_MAIN
