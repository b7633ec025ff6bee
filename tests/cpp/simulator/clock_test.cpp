// The virtual clock: what each task costs, what overlaps and what does not, to the nanosecond.
#include "simulator/fixture.h"

namespace {

constexpr int64_t kCall = 10;
constexpr int64_t kCopy = 100;

/// Simple numbers: a byte takes 1 ns to the device, 2 ns back, 0.5 ns within it.
class Clock {
 public:
  Clock() {
    npu_sim_set("h2d_bytes_per_second", 1'000'000'000);
    npu_sim_set("d2h_bytes_per_second", 500'000'000);
    npu_sim_set("d2d_bytes_per_second", 2'000'000'000);
    npu_sim_set("h2h_bytes_per_second", 250'000'000);
    npu_sim_set("copy_ns", kCopy);
    npu_sim_set("call_ns", kCall);
    start_ = npu_sim_now_ns();
    npu_sim_timeline_start();
  }
  /// Since the start.
  int64_t now() const { return npu_sim_now_ns() - start_; }

  struct Task {
    int stream;
    std::string kind;
    int64_t bytes;
    int64_t start;
    int64_t end;
  };
  std::vector<Task> tasks() {
    const std::string text = take_text(npu_sim_timeline_stop());
    std::vector<Task> all;
    for (size_t at = text.find('{'); at != std::string::npos; at = text.find('{', at + 1)) {
      int stream = 0;
      long long handle = 0;
      char kind[32] = {};
      long long bytes = 0;
      long long start = 0;
      long long end = 0;
      std::sscanf(text.c_str() + at,
                  "{\"stream\": %d, \"handle\": %lld, \"kind\": \"%31[a-z_]\", \"bytes\": %lld, "
                  "\"start_ns\": %lld, \"end_ns\": %lld}",
                  &stream, &handle, kind, &bytes, &start, &end);
      all.push_back({stream, kind, bytes, start - start_, end - start_});
    }
    return all;
  }
  /// The one task of this kind and stream.
  Task task(const std::string& kind, aclrtStream stream) {
    if (tasks_.empty()) tasks_ = tasks();
    int32_t id = -1;
    CHECK_OK(aclrtStreamGetId(stream, &id));
    Task found{-1, "", 0, -1, -1};
    for (const Task& task : tasks_) {
      if (task.kind == kind && task.stream == id) {
        CHECK_EQUAL(found.stream, -1);
        found = task;
      }
    }
    return found;
  }

 private:
  int64_t start_ = 0;
  std::vector<Task> tasks_;
};

}  // namespace

TEST(a_copy_costs_its_call_its_overhead_and_its_bytes) {
  Session session;
  Stream stream;
  PinnedMemory host(1000);
  DeviceMemory device(1000);
  Clock clock;
  CHECK_OK(h2d(device, host, 1000, stream));
  CHECK_EQUAL(clock.now(), kCall);  // the host goes on
  CHECK_OK(aclrtSynchronizeStream(stream));
  CHECK_EQUAL(clock.now(), kCall + kCopy + 1000);
  const auto task = clock.task("copy", stream);
  CHECK_EQUAL(task.bytes, 1000);
  CHECK_EQUAL(task.start, kCall);
  CHECK_EQUAL(task.end, kCall + kCopy + 1000);
}

TEST(each_direction_has_its_bandwidth) {
  Session session;
  Stream stream;
  PinnedMemory host(100);
  DeviceMemory device(100);
  DeviceMemory other(100);
  Clock clock;
  CHECK_OK(h2d(device, host, 100, stream));
  CHECK_OK(d2h(host, device, 100, stream));
  CHECK_OK(aclrtMemcpyAsync(other, 100, device, 100, ACL_MEMCPY_DEVICE_TO_DEVICE, stream));
  CHECK_OK(aclrtMemsetAsync(other, 100, 0, 100, stream));
  CHECK_OK(aclrtSynchronizeStream(stream));
  const auto tasks = clock.tasks();
  CHECK_EQUAL(tasks.size(), 4u);
  const std::vector<int64_t> durations = {kCopy + 100, kCopy + 200, kCopy + 50, 50};
  int64_t begin = kCall;
  for (size_t i = 0; i < tasks.size(); ++i) {
    CHECK_EQUAL(tasks[i].start, begin);  // one after the other without a gap
    begin += durations[i];
    CHECK_EQUAL(tasks[i].end, begin);
  }
  CHECK_EQUAL(clock.now(), begin);
}

TEST(a_synchronous_copy_takes_host_time) {
  Session session;
  PinnedMemory host(100);
  DeviceMemory device(100);
  char other[100];
  Clock clock;
  CHECK_OK(aclrtMemcpy(other, 100, host, 100, ACL_MEMCPY_HOST_TO_HOST));
  CHECK_EQUAL(clock.now(), kCopy + 400);
  CHECK_OK(aclrtMemset(device, 100, 0, 100));
  CHECK_EQUAL(clock.now(), kCopy + 400 + 50);
}

TEST(an_idle_stream_starts_when_the_host_submits) {
  Session session;
  Stream first;
  Stream second;
  PinnedMemory host(1000);
  DeviceMemory device(1000);
  Clock clock;
  CHECK_OK(h2d(device, host, 1000, first));
  CHECK_OK(aclrtSynchronizeStream(first));
  CHECK_OK(h2d(device, host, 1000, second));
  CHECK_OK(aclrtSynchronizeStream(second));
  CHECK_EQUAL(clock.task("copy", second).start, clock.task("copy", first).end + kCall);
}

TEST(streams_overlap) {
  Session session;
  Stream load;
  Stream store;
  PinnedMemory host(1000);
  DeviceMemory device(1000);
  Clock clock;
  CHECK_OK(h2d(device, host, 1000, load));
  CHECK_OK(d2h(host, device, 1000, store));
  CHECK_OK(aclrtSynchronizeDevice());
  CHECK_EQUAL(clock.task("copy", load).end, kCall + kCopy + 1000);
  CHECK_EQUAL(clock.task("copy", store).start, 2 * kCall);
  CHECK_EQUAL(clock.task("copy", store).end, 2 * kCall + kCopy + 2000);
  CHECK_EQUAL(clock.now(), 2 * kCall + kCopy + 2000);
}

TEST(a_batch_pays_per_item_but_one_call) {
  Session session;
  Stream stream;
  PinnedMemory host(60);
  DeviceMemory device(60);
  void* dsts[3] = {device.data(), device.data() + 10, device.data() + 30};
  void* srcs[3] = {host.data(), host.data() + 10, host.data() + 30};
  size_t sizes[3] = {10, 20, 30};
  size_t index = 0;
  size_t fail_index = 0;
  aclrtMemcpyBatchAttr attr{{0, ACL_MEM_LOCATION_TYPE_DEVICE}, {0, ACL_MEM_LOCATION_TYPE_HOST}, {}};
  Clock clock;
  CHECK_OK(
      aclrtMemcpyBatchAsync(dsts, sizes, srcs, sizes, 3, &attr, &index, 1, &fail_index, stream));
  CHECK_OK(aclrtSynchronizeStream(stream));
  const auto task = clock.task("batch", stream);
  CHECK_EQUAL(task.bytes, 60);
  CHECK_EQUAL(task.start, kCall);
  CHECK_EQUAL(task.end, kCall + 3 * kCopy + 60);
}

TEST(events_carry_time_between_streams) {
  Session session;
  PinnedMemory host(1000);
  DeviceMemory device(1000);
  DeviceMemory word(8);
  word.write(std::string(8, '\0'));
  Event snapshot;
  FlagEvent flag(ACL_EVENT_SYNC);
  DefaultEvent by_default;
  using Use = std::function<void(aclrtStream)>;
  const auto records = [](aclrtEvent event) {
    return [event](aclrtStream stream) { CHECK_OK(aclrtRecordEvent(event, stream)); };
  };
  const auto waits = [](aclrtEvent event) {
    return [event](aclrtStream stream) { CHECK_OK(aclrtStreamWaitEvent(stream, event)); };
  };
  const std::vector<std::pair<Use, Use>> edges = {
      {records(snapshot), waits(snapshot)},
      {records(flag), waits(flag)},
      {records(by_default), waits(by_default)},
      {[&](aclrtStream stream) { CHECK_OK(aclrtValueWrite(word, 1, 0, stream)); },
       [&](aclrtStream stream) { CHECK_OK(aclrtValueWait(word, 1, 1, stream)); }},
  };
  for (const auto& [signal, wait] : edges) {
    for (const bool long_past : {false, true}) {
      Stream first;
      Stream second;
      Clock clock;
      CHECK_OK(h2d(device, host, 1000, first));
      signal(first);
      // Reached in real time or not makes no difference.
      if (long_past) wait_until([&] { return query(first); });
      wait(second);
      CHECK_OK(d2h(host, device, 10, second));
      CHECK_OK(aclrtSynchronizeStream(second));
      CHECK_EQUAL(clock.task("copy", second).start, clock.task("copy", first).end);
      CHECK_EQUAL(clock.now(), clock.task("copy", second).end);
      if (signal) CHECK_OK(aclrtMemset(word, 8, 0, 8));
      if (!long_past) CHECK_OK(aclrtResetEvent(flag, first));
      CHECK_OK(aclrtSynchronizeStream(first));
    }
  }
}

TEST(elapsed_time_is_virtual) {
  Session session;
  Stream stream;
  PinnedMemory host(3'000'000);
  DeviceMemory device(3'000'000);
  Event start(ACL_EVENT_SYNC | ACL_EVENT_TIME_LINE);
  Event end(ACL_EVENT_SYNC | ACL_EVENT_TIME_LINE);
  Clock clock;
  npu_sim_set("copy_ns", 0);
  npu_sim_set("call_ns", 0);
  CHECK_OK(aclrtRecordEvent(start, stream));
  CHECK_OK(h2d(device, host, 3'000'000, stream));
  CHECK_OK(aclrtRecordEvent(end, stream));
  CHECK_OK(aclrtSynchronizeEvent(end));
  float ms = 0;
  CHECK_OK(aclrtEventElapsedTime(&ms, start, end));
  CHECK_EQUAL(ms, 3.0f);
  uint64_t first = 0;
  uint64_t last = 0;
  CHECK_OK(aclrtEventGetTimestamp(start, &first));
  CHECK_OK(aclrtEventGetTimestamp(end, &last));
  CHECK_EQUAL(last - first, 3000u);  // microseconds
}

TEST(lanes_of_a_replay_overlap) {
  Session session;
  Stream a;
  Stream b;
  Stream target;
  Event forked;
  Event back;
  PinnedMemory host(1000);
  DeviceMemory device(1000);
  Graph graph(capture(a, [&] {
    CHECK_OK(aclrtRecordEvent(forked, a));
    CHECK_OK(aclrtStreamWaitEvent(b, forked));
    CHECK_OK(h2d(device, host, 1000, a));
    CHECK_OK(d2h(host, device, 1000, b));
    CHECK_OK(aclrtRecordEvent(back, b));
    CHECK_OK(aclrtStreamWaitEvent(a, back));
    CHECK_OK(aclrtMemsetAsync(device, 100, 0, 100, a));
  }));
  Clock clock;
  CHECK_OK(aclmdlRIExecuteAsync(graph, target));
  CHECK_OK(aclrtSynchronizeStream(target));
  const auto whole = clock.task("graph", target);
  CHECK_EQUAL(whole.start, kCall);
  CHECK_EQUAL(whole.end, kCall + kCopy + 2000 + 50);
  const auto fill = clock.task("memset", target);
  CHECK_EQUAL(fill.start, kCall + kCopy + 2000);  // after the longer lane
  CHECK_EQUAL(clock.now(), whole.end);
}

TEST(what_a_callback_causes_comes_after_it) {
  Session session;
  Stream stream;
  Stream own;
  PinnedMemory host(1000);
  DeviceMemory device(1000);
  std::atomic<bool> woken{false};
  Clock clock;
  CHECK_OK(h2d(device, host, 1000, stream));
  CHECK_OK(aclrtLaunchHostFunc(
      stream, [](void* flag) { *static_cast<std::atomic<bool>*>(flag) = true; }, &woken));
  wait_until([&] { return woken.load(); });
  CHECK_OK(d2h(host, device, 10, own));
  CHECK_OK(aclrtSynchronizeStream(own));
  CHECK_EQUAL(clock.task("copy", own).start, clock.task("copy", stream).end + kCall);
}

TEST(the_timeline_is_recorded_only_between_start_and_stop) {
  Session session;
  Stream stream;
  DeviceMemory device(8);
  CHECK_OK(aclrtMemsetAsync(device, 8, 0, 8, stream));
  CHECK_OK(aclrtSynchronizeStream(stream));
  npu_sim_timeline_start();
  CHECK_OK(aclrtMemsetAsync(device, 8, 0, 8, stream));
  CHECK_OK(aclrtSynchronizeStream(stream));
  const std::string text = take_text(npu_sim_timeline_stop());
  CHECK_EQUAL(text.find("\"kind\": \"memset\""), text.rfind("\"kind\": "));
  CHECK_OK(aclrtMemsetAsync(device, 8, 0, 8, stream));
  CHECK_OK(aclrtSynchronizeStream(stream));
  CHECK_EQUAL(take_text(npu_sim_timeline_stop()), "[]");
}

SIMULATOR_TEST_MAIN
