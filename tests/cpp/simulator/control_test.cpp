// The simulator's own interface: settings and statistics.
#include <sstream>

#include "simulator/fixture.h"

TEST(every_setting_is_listed_and_can_be_read_and_written) {
  Session session;
  std::istringstream names(npu_sim_setting_names());
  int count = 0;
  for (std::string name; names >> name; ++count) {
    int64_t value = -1;
    CHECK_OK(npu_sim_get(name.c_str(), &value));
    CHECK_OK(npu_sim_set(name.c_str(), value + 1));
    int64_t changed = -1;
    CHECK_OK(npu_sim_get(name.c_str(), &changed));
    CHECK_EQUAL(changed, value + 1);
    CHECK_OK(npu_sim_set(name.c_str(), value));
  }
  CHECK(count >= 20);
}

TEST(settings_are_checked) {
  int64_t value = 0;
  CHECK_EQUAL(npu_sim_set("no_such_setting", 1), ACL_ERROR_INVALID_PARAM);
  CHECK(contains(npu_sim_error(), "no_such_setting"));
  CHECK_EQUAL(npu_sim_get("no_such_setting", &value), ACL_ERROR_INVALID_PARAM);
  CHECK_EQUAL(npu_sim_set("max_streams", -1), ACL_ERROR_INVALID_PARAM);
  CHECK_EQUAL(npu_sim_set("h2d_bytes_per_second", 0), ACL_ERROR_INVALID_PARAM);
}

TEST(devices_exist_as_set) {
  Session session(0, 3);
  uint32_t count = 0;
  CHECK_OK(aclrtGetDeviceCount(&count));
  CHECK_EQUAL(count, 3u);
  CHECK_OK(aclrtSetDevice(2));
  int32_t device = -1;
  CHECK_OK(aclrtGetDevice(&device));
  CHECK_EQUAL(device, 2);
  CHECK_EQUAL(aclrtSetDevice(3), ACL_ERROR_RT_INVALID_DEVICEID);
  CHECK_EQUAL(aclrtSetDevice(-1), ACL_ERROR_RT_INVALID_DEVICEID);
  CHECK_OK(aclrtGetDevice(&device));
  CHECK_EQUAL(device, 2);
  CHECK_OK(aclrtSetCurrentContext(session.context));
  int32_t in_thread = -1;
  std::thread([&] {
    aclrtSetDevice(1);
    aclrtGetDevice(&in_thread);
  }).join();
  CHECK_EQUAL(in_thread, 1);  // a context belongs to a thread
  CHECK_OK(aclrtGetDevice(&device));
  CHECK_EQUAL(device, 0);
}

TEST(live_objects_are_counted) {
  Session session;
  const std::vector<std::string> names = {"device_allocations",
                                          "device_bytes",
                                          "pinned_allocations",
                                          "pinned_bytes",
                                          "registered_ranges",
                                          "streams",
                                          "events",
                                          "graphs"};
  const auto live = [&] {
    std::vector<int64_t> values;
    for (const auto& name : names) values.push_back(stat("live." + name));
    return values;
  };
  const auto before = live();
  {
    DeviceMemory device(64);
    PinnedMemory pinned(100);
    Stream stream;
    Event event;
    Graph graph(capture(stream, [] {}));
    std::vector<char> buffer(50);
    CHECK_OK(aclrtHostRegisterV2(buffer.data(), 50, 0x10000000));
    const std::vector<int64_t> more = {1, 64, 1, 150, 1, 1, 1, 1};
    const auto now = live();
    for (size_t i = 0; i < names.size(); ++i) CHECK_EQUAL(now[i] - before[i], more[i]);
    npu_sim_reset_stats();  // what is alive is no counter
    CHECK(live() == now);
    CHECK_OK(aclrtHostUnregister(buffer.data()));
  }
  CHECK(live() == before);
}

TEST(calls_are_counted_by_name_until_a_reset) {
  Session session;
  CHECK_OK(aclrtMemset(nullptr, 0, 0, 0));
  CHECK_OK(aclrtMemset(nullptr, 0, 0, 0));
  CHECK_EQUAL(aclrtMemset(nullptr, 1, 0, 1), ACL_ERROR_INVALID_PARAM);
  CHECK_EQUAL(stat("calls.aclrtMemset"), 3);
  aclrtPeekAtLastError(0);
  npu_sim_reset_stats();
  CHECK_EQUAL(stat("calls.aclrtMemset"), 0);
  const std::string text = take_text(npu_sim_stats());
  CHECK(contains(text, "\"calls\": {}"));
  CHECK(contains(text, "\"batches\": 0"));
}

SIMULATOR_TEST_MAIN
