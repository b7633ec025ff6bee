// Deferred calls on the simulated runtime: ids that lie in device memory, read by the scheduler
// when a stream, or a graph on it, gets there.
#include "transfer/call_scheduler.h"

#include <atomic>
#include <cstring>
#include <deque>
#include <mutex>

#include "pools.h"
#include "runtime/acl/acl_runtime.h"
#include "runtime/acl/acl_signals.h"

using namespace std::chrono_literals;

namespace {

constexpr size_t kIds = 8;
constexpr size_t kListBytes = kIds * sizeof(int64_t);

struct Errors {
  std::mutex mutex;
  std::vector<std::string> messages;

  std::vector<std::string> take() {
    const std::lock_guard lock(mutex);
    return std::exchange(messages, {});
  }
};

// One for all tests: it lives as long as the process.
Errors& errors() {
  static Errors all;
  return all;
}

CallScheduler& scheduler() {
  static CallScheduler* const started = [] {
    CallScheduler* made = nullptr;
    const Status status = CallScheduler::start(
        acl_runtime(), acl_signals(), 0,
        [](std::string message) {
          const std::lock_guard lock(errors().mutex);
          errors().messages.push_back(std::move(message));
        },
        &made);
    CHECK(status.ok());
    for (const Direction direction : {Direction::kHostToDevice, Direction::kDeviceToHost}) {
      CHECK(made->open(direction).ok());
    }
    return made;
  }();
  return *started;
}

// A call with everything it needs, put on streams by hand as the operator does it.
class Call {
 public:
  Call(Pools& pools, Lane lane, bool captured) : ids_(2 * kListBytes), memory_(2 * kListBytes) {
    CHECK(acl_signals().create_signal(0, &signal_).ok());
    const CopyPools layouts = pools.options().pools;
    const bool store = lane == Lane::kStore;
    call.transfer.src = store ? layouts.device : layouts.host;
    call.transfer.dst = store ? layouts.host : layouts.device;
    call.transfer.direction = store ? Direction::kDeviceToHost : Direction::kHostToDevice;
    call.src_ids = {memory_.data(), true, kIds};
    call.dst_ids = {memory_.data() + kListBytes, true, kIds};
    call.parts = {{call.transfer.src.size(), signal_}};
    call.scheduler = &scheduler();
    call.batch_limit = 4096;
    call.captured = captured;
    call.number = 1;
  }
  ~Call() { acl_signals().destroy_signal(signal_); }

  // The ids of the next time; the rest of the lists is padding.
  void set(std::vector<int64_t> src, std::vector<int64_t> dst) {
    src.resize(kIds, -1);
    dst.resize(kIds, -1);
    std::string bytes(2 * kListBytes, '\0');
    std::memcpy(bytes.data(), src.data(), kListBytes);
    std::memcpy(bytes.data() + kListBytes, dst.data(), kListBytes);
    ids_.write(bytes);
  }

  void put_on(aclrtStream stream) { put_on(stream, &call); }

  // Another call with the same ids and the same signal.
  void put_on(aclrtStream stream, DeferredCall* other) {
    start_on(stream, other);
    CHECK(acl_signals().wait_signal({stream, 0}, signal_).ok());
  }

  // The stream goes on at once.
  void start_on(aclrtStream stream, DeferredCall* other) {
    const StreamRef to{stream, 0};
    AclSignals& runtime = acl_signals();
    CHECK(runtime.read_device(memory_.data(), ids_.data(), 2 * kListBytes, to).ok());
    CHECK(runtime.launch_callback(to, &CallScheduler::on_stream, other).ok());
  }

  DeferredCall call;

 private:
  DeviceMemory ids_;
  PinnedMemory memory_;
  void* signal_ = nullptr;
};

// Holds up what a backend has on a stream of its own.
class StalledLane {
 public:
  StalledLane(const CopyScheduler& backend, Lane lane)
      : stream_(backend.options().streams[static_cast<int>(lane)].handle) {
    CHECK_OK(npu_sim_stall(stream_));
  }
  void go() const { CHECK_OK(npu_sim_release(stream_)); }

 private:
  void* const stream_;
};

std::shared_ptr<CopyJob> submit(CopyScheduler& backend, Lane lane, std::vector<int64_t> src,
                                std::vector<int64_t> dst, bool gated = false) {
  return backend.submit(make_plan(backend.pools(), lane, {src.data(), true, src.size()},
                                  {dst.data(), true, dst.size()}),
                        gated, 0);
}

std::vector<int64_t> shuffled(std::minstd_rand& random, int64_t blocks, size_t count) {
  std::vector<int64_t> ids(static_cast<size_t>(blocks));
  for (int64_t i = 0; i < blocks; ++i) ids[static_cast<size_t>(i)] = i;
  std::shuffle(ids.begin(), ids.end(), random);
  ids.resize(count);
  return ids;
}

void replay(aclmdlRI graph, aclrtStream stream) {
  CHECK_OK(aclmdlRIExecuteAsync(graph, stream));
  CHECK_OK(aclrtSynchronizeStreamWithTimeout(stream, 20000));
}

// Start and end of the batches of a timeline, in virtual time.
std::vector<std::pair<int64_t, int64_t>> batches_in(const std::string& timeline) {
  std::vector<std::pair<int64_t, int64_t>> found;
  for (size_t at = timeline.find("\"batch\""); at != std::string::npos;
       at = timeline.find("\"batch\"", at + 1)) {
    found.emplace_back(std::atoll(timeline.c_str() + timeline.find("start_ns\": ", at) + 11),
                       std::atoll(timeline.c_str() + timeline.find("end_ns\": ", at) + 9));
  }
  return found;
}

}  // namespace

TEST(every_replay_copies_the_blocks_of_that_replay) {
  DeviceSession session;
  Pools pools(16, 24, true);
  std::minstd_rand random(7);
  Stream stream;
  Call load(pools, Lane::kLoad, true);
  Call store(pools, Lane::kStore, true);
  Graph graph(capture(stream, [&] {
    load.put_on(stream);
    store.put_on(stream);
  }));
  for (int round = 0; round < 100; ++round) {
    const size_t count = random() % (kIds + 1);
    const auto loaded = std::pair(shuffled(random, 24, count), shuffled(random, 16, count));
    const auto stored = std::pair(shuffled(random, 16, count), shuffled(random, 24, count));
    load.set(loaded.first, loaded.second);
    store.set(stored.first, stored.second);
    replay(graph, stream);
    pools.apply(Lane::kLoad, loaded.first, loaded.second);
    pools.apply(Lane::kStore, stored.first, stored.second);
    CHECK(pools.agree());
  }
  CHECK_EQUAL(load.call.served, uint64_t{100});
  CHECK_EQUAL(errors().take().size(), size_t{0});
}

TEST(replays_may_be_queued_deep) {
  DeviceSession session;
  Pools pools(16, 16, true);
  Stream stream;
  Call load(pools, Lane::kLoad, true);
  load.set({3, 4}, {5, 6});
  Graph graph(capture(stream, [&] { load.put_on(stream); }));
  for (int i = 0; i < 1000; ++i) CHECK_OK(aclmdlRIExecuteAsync(graph, stream));
  CHECK_OK(aclrtSynchronizeStreamWithTimeout(stream, 60000));
  pools.apply(Lane::kLoad, {3, 4}, {5, 6});
  CHECK(pools.agree());
  CHECK_EQUAL(load.call.served, uint64_t{1000});
  CHECK_EQUAL(errors().take().size(), size_t{0});
}

TEST(each_part_of_a_call_has_a_signal) {
  DeviceSession session;
  Pools pools(16, 16, true);
  Stream stream;
  Call load(pools, Lane::kLoad, true);
  const size_t tensors = load.call.transfer.src.size();
  CHECK(tensors > 1);
  load.call.parts.clear();
  for (size_t i = 0; i < tensors; ++i) {
    load.call.parts.push_back({1, nullptr});
    CHECK(acl_signals().create_signal(0, &load.call.parts.back().signal).ok());
  }
  Graph graph(capture(stream, [&] {
    load.start_on(stream, &load.call);
    for (const CallPart& part : load.call.parts) {
      CHECK(acl_signals().wait_signal({stream, 0}, part.signal).ok());
    }
  }));
  // In the last round the second part fails, and the graph goes on all the same.
  for (int64_t round = 0; round < 3; ++round) {
    load.set({round}, {round + 1});
    if (round == 2) CHECK_OK(npu_sim_fail_call("aclrtMemcpyBatchAsync", 2, 507000, 1));
    replay(graph, stream);
    if (round < 2) {
      pools.apply(Lane::kLoad, {round}, {round + 1});
      CHECK(pools.agree());
    }
  }
  CHECK_EQUAL(errors().take().size(), size_t{1});
  for (const CallPart& part : load.call.parts) acl_signals().destroy_signal(part.signal);
}

TEST(a_call_is_let_go_when_it_is_served) {
  DeviceSession session;
  Pools pools(16, 16, true);
  Stream stream;
  Call load(pools, Lane::kLoad, true);
  for (uint64_t round = 1; round <= 200; ++round) {
    load.set({3}, {4});
    load.start_on(stream, &load.call);
    CHECK_OK(aclrtSynchronizeStreamWithTimeout(stream, 20000));  // not for the copies
    scheduler().let_go(load.call);
    CHECK_EQUAL(load.call.served, round);
  }
  // Set the last time, it can be taken back.
  CHECK_OK(aclrtSynchronizeDeviceWithTimeout(20000));
  CHECK(acl_signals().wait_signal({stream, 0}, load.call.parts[0].signal).ok());
  CHECK_OK(aclrtSynchronizeStreamWithTimeout(stream, 20000));
  CHECK_EQUAL(errors().take().size(), size_t{0});
}

TEST(an_eager_call_is_deleted_when_it_is_served) {
  DeviceSession session;
  Pools pools(16, 16, true);
  Stream stream;
  Call kept(pools, Lane::kLoad, false);
  kept.set({1}, {2});
  auto call = std::make_unique<DeferredCall>(kept.call);
  call->ids_memory = std::make_shared<int>(0);
  const std::weak_ptr<void> watched = call->ids_memory;
  kept.put_on(stream, call.release());
  CHECK_OK(aclrtSynchronizeStreamWithTimeout(stream, 20000));
  pools.apply(Lane::kLoad, {1}, {2});
  CHECK(pools.agree());
  for (int i = 0; i < 20000 && !watched.expired(); ++i) std::this_thread::sleep_for(1ms);
  CHECK(watched.expired());
}

TEST(wrong_ids_copy_nothing_and_the_graph_goes_on) {
  DeviceSession session;
  Pools pools(16, 16, true);
  Stream stream;
  Call load(pools, Lane::kLoad, true);
  Graph graph(capture(stream, [&] { load.put_on(stream); }));
  load.set({1}, {2});
  replay(graph, stream);
  pools.apply(Lane::kLoad, {1}, {2});
  for (const auto& [src, dst, told] :
       {std::tuple(std::vector<int64_t>{3, 16}, std::vector<int64_t>{4, 5}, "src_blocks[1] is 16"),
        std::tuple(std::vector<int64_t>{3, 4}, std::vector<int64_t>{5, 5}, "5")}) {
    load.set(src, dst);
    replay(graph, stream);
    const auto messages = errors().take();
    CHECK_EQUAL(messages.size(), size_t{1});
    if (messages.size() == 1) {
      CHECK(contains(messages[0], told));
      CHECK(contains(messages[0], "call 1 of its graph, replay "));
    }
    CHECK(pools.agree());
  }
  load.set({5}, {6});
  replay(graph, stream);
  pools.apply(Lane::kLoad, {5}, {6});
  CHECK(pools.agree());
  CHECK_EQUAL(errors().take().size(), size_t{0});
}

TEST(a_copy_that_fails_is_told_and_the_graph_goes_on) {
  DeviceSession session;
  Pools pools(16, 16, true);
  Stream stream;
  Call load(pools, Lane::kLoad, true);
  load.set({1}, {2});
  Graph graph(capture(stream, [&] { load.put_on(stream); }));
  CHECK_OK(npu_sim_fail_call("aclrtMemcpyBatchAsync", 1, 507013, 1));
  replay(graph, stream);
  auto messages = errors().take();
  CHECK_EQUAL(messages.size(), size_t{1});
  if (!messages.empty()) CHECK(contains(messages[0], "aclrtMemcpyBatchAsync failed"));

  // On the device, where it becomes known behind the copies. The first copy is that of the ids.
  CHECK_OK(npu_sim_fail_copy(2, 507013));
  CHECK_OK(aclmdlRIExecuteAsync(graph, stream));
  CHECK_OK(aclrtSynchronizeStreamWithTimeout(stream, 20000));
  scheduler().check_copies();
  messages = errors().take();
  CHECK_EQUAL(messages.size(), size_t{1});
  if (!messages.empty()) CHECK(contains(messages[0], "507013"));

  replay(graph, stream);
  scheduler().check_copies();
  CHECK_EQUAL(errors().take().size(), size_t{0});
  pools.apply(Lane::kLoad, {1}, {2});
  CHECK(pools.agree());
}

TEST(copies_run_behind_jobs_of_a_backend_that_share_a_block) {
  DeviceSession session;
  Pools pools(16, 16, true);
  auto backend = start(pools, acl_runtime());
  const StalledLane stores(*backend, Lane::kStore);
  const std::vector<int64_t> src{7}, dst{9};
  auto job = submit(*backend, Lane::kStore, src, dst);
  CHECK(backend->wait_launched(*job, 20s));

  Stream shares, apart;
  Call into_its_source(pools, Lane::kLoad, false);
  Call elsewhere(pools, Lane::kLoad, false);
  into_its_source.call.captured = elsewhere.call.captured = true;  // the test's to delete
  into_its_source.set({2}, {7});
  elsewhere.set({3}, {8});
  elsewhere.put_on(apart);
  CHECK_OK(aclrtSynchronizeStreamWithTimeout(apart, 20000));
  into_its_source.put_on(shares);
  CHECK(blocked(shares));
  stores.go();
  CHECK_OK(aclrtSynchronizeStreamWithTimeout(shares, 20000));
  CHECK(backend->drain(20s));
  pools.apply(Lane::kLoad, {3}, {8});
  pools.apply(Lane::kStore, src, dst);
  pools.apply(Lane::kLoad, {2}, {7});
  CHECK(pools.agree());
  CHECK(backend->shutdown(20s));
}

TEST(jobs_of_a_backend_run_behind_copies_that_share_a_block) {
  DeviceSession session;
  npu_sim_set("h2d_bytes_per_second", 1'000'000);
  Pools pools(16, 16, true);
  auto backend = start(pools, acl_runtime());
  const StalledLane stores(*backend, Lane::kStore);
  // Holds the copies of the call until the job behind them is launched.
  auto store = submit(*backend, Lane::kStore, {7}, {9});
  CHECK(backend->wait_launched(*store, 20s));
  Stream stream;
  Call call(pools, Lane::kLoad, true);
  call.set({2}, {7});
  const uint64_t before = scheduler().stats().calls;
  call.put_on(stream);
  for (int i = 0; i < 20000 && scheduler().stats().calls == before; ++i) {
    std::this_thread::sleep_for(1ms);
  }
  npu_sim_timeline_start();
  auto load = submit(*backend, Lane::kLoad, {3}, {7});
  CHECK(backend->wait_launched(*load, 20s));
  stores.go();
  CHECK_OK(aclrtSynchronizeStreamWithTimeout(stream, 20000));
  CHECK(backend->drain(20s));
  auto batches = batches_in(take_text(npu_sim_timeline_stop()));
  CHECK_EQUAL(batches.size(), size_t{3});  // the store, the call's and the load's
  std::sort(batches.begin(), batches.end());
  for (size_t i = 1; i < batches.size(); ++i) CHECK(batches[i].first >= batches[i - 1].second);
  pools.apply(Lane::kStore, {7}, {9});
  pools.apply(Lane::kLoad, {2}, {7});
  pools.apply(Lane::kLoad, {3}, {7});
  CHECK(pools.agree());
  CHECK(backend->shutdown(20s));
}

TEST(a_job_that_waits_for_the_stream_of_a_call_does_not_hold_the_call) {
  DeviceSession session;
  Pools pools(16, 16, true);
  auto backend = start(pools, acl_runtime());
  StalledStream stream;
  Call call(pools, Lane::kLoad, true);
  call.set({2}, {7});
  call.put_on(stream);
  // A store of the block that the call loads, behind the call: launched before the call is served.
  Event behind;
  CHECK_OK(aclrtRecordEvent(behind, stream));
  const std::vector<int64_t> src{7}, dst{9};
  auto job = backend->submit(
      make_plan(backend->pools(), Lane::kStore, {src.data(), true, 1}, {dst.data(), true, 1}), true,
      0);
  backend->open_gate(*job, behind);
  CHECK(backend->wait_launched(*job, 20s));
  // The same in the other lane, which has no gate of its own but waits for the store.
  const std::vector<int64_t> from{9}, to{7};
  auto load = backend->submit(
      make_plan(backend->pools(), Lane::kLoad, {from.data(), true, 1}, {to.data(), true, 1}), false,
      0);
  CHECK(backend->wait_launched(*load, 20s));
  stream.go();
  CHECK_OK(aclrtSynchronizeStreamWithTimeout(stream, 20000));
  CHECK(backend->drain(20s));
  pools.apply(Lane::kLoad, {2}, {7});
  pools.apply(Lane::kStore, src, dst);
  pools.apply(Lane::kLoad, from, to);
  CHECK(pools.agree());
  CHECK(backend->shutdown(20s));
}

TEST(graphs_and_a_backend_share_pools) {
  DeviceSession session;
  Pools pools(32, 32, true);
  auto backend = start(pools, acl_runtime());
  std::minstd_rand random(3);
  Stream stream;
  Call load(pools, Lane::kLoad, true);
  Graph graph(capture(stream, [&] { load.put_on(stream); }));
  for (int round = 0; round < 60; ++round) {
    // Each job is launched before the graph that shares its blocks, or after it has been served.
    const auto stored = std::pair(shuffled(random, 32, 6), shuffled(random, 32, 6));
    auto job = submit(*backend, Lane::kStore, stored.first, stored.second);
    pools.apply(Lane::kStore, stored.first, stored.second);
    CHECK(backend->wait_launched(*job, 20s));
    const auto loaded = std::pair(shuffled(random, 32, 5), shuffled(random, 32, 5));
    load.set(loaded.first, loaded.second);
    const uint64_t before = load.call.served;
    replay(graph, stream);
    CHECK_EQUAL(load.call.served, before + 1);
    pools.apply(Lane::kLoad, loaded.first, loaded.second);
  }
  CHECK(backend->drain(20s));
  CHECK(pools.agree());
  CHECK_EQUAL(errors().take().size(), size_t{0});
  CHECK(backend->shutdown(20s));
}

TEST(a_job_behind_which_another_waits_for_an_event_is_not_forgotten) {
  DeviceSession session;
  for (const bool begun : {false, true}) {
    Pools pools(16, 16, true);
    auto backend = start(pools, acl_runtime());
    const StalledLane stores(*backend, Lane::kStore);
    auto first = submit(*backend, Lane::kStore, {5}, {9});
    CHECK(backend->wait_launched(*first, 20s));
    // The newest user of the block, which nobody can wait for.
    StalledStream compute;
    Event later;
    CHECK_OK(aclrtRecordEvent(later, compute));
    auto second = submit(*backend, Lane::kStore, {5}, {10}, true);
    if (begun) {
      backend->open_gate(*second, later);
      CHECK(backend->wait_launched(*second, 20s));
    }
    Stream stream;
    Call call(pools, Lane::kLoad, true);
    call.set({2}, {5});
    call.put_on(stream);
    CHECK(blocked(stream));
    stores.go();
    CHECK_OK(aclrtSynchronizeStreamWithTimeout(stream, 20000));
    if (!begun) backend->open_gate(*second, later);
    compute.go();
    CHECK(backend->drain(20s));
    pools.apply(Lane::kStore, {5}, {9});
    pools.apply(Lane::kLoad, {2}, {5});
    pools.apply(Lane::kStore, {5}, {10});
    CHECK(pools.agree());
    CHECK(backend->shutdown(20s));
  }
}

TEST(jobs_that_were_submitted_before_are_not_overtaken) {
  DeviceSession session;
  Pools pools(4096, 4096, true);
  auto backend = start(pools, acl_runtime());
  Stream stream;
  Call call(pools, Lane::kLoad, true);
  for (int round = 0; round < 5; ++round) {
    std::vector<int64_t> even;  // nothing to merge
    for (int64_t i = 0; i < 2000; ++i) even.push_back(2 * i);
    for (int i = 0; i < 4; ++i) {
      submit(*backend, Lane::kStore, even, even);
      pools.apply(Lane::kStore, even, even);
    }
    submit(*backend, Lane::kStore, {4095}, {4093});
    call.set({7}, {4095});
    call.put_on(stream);
    CHECK_OK(aclrtSynchronizeStreamWithTimeout(stream, 60000));
    CHECK(backend->drain(60s));
    pools.apply(Lane::kStore, {4095}, {4093});
    pools.apply(Lane::kLoad, {7}, {4095});
    CHECK(pools.agree());
  }
  CHECK(backend->shutdown(20s));
}

TEST(a_job_on_a_stream_of_the_caller_does_not_hold_the_call_it_waits_for) {
  DeviceSession session;
  Pools pools(16, 16, true);
  Stream loads;
  auto options = pools.options();
  options.own_streams[static_cast<int>(Lane::kLoad)] = false;
  options.streams[static_cast<int>(Lane::kLoad)] = {loads, 0};
  std::shared_ptr<CopyScheduler> backend;
  CHECK(CopyScheduler::start(acl_runtime(), options, &backend).ok());
  StalledStream stream;
  Call call(pools, Lane::kLoad, true);
  call.set({2}, {7});
  call.put_on(stream);
  Event behind;
  CHECK_OK(aclrtRecordEvent(behind, stream));
  CHECK_OK(aclrtStreamWaitEvent(loads, behind));  // the owner's way to order the job
  auto job = submit(*backend, Lane::kLoad, {3}, {7});
  CHECK(backend->wait_launched(*job, 20s));
  stream.go();
  CHECK_OK(aclrtSynchronizeStreamWithTimeout(stream, 20000));
  CHECK(backend->drain(20s));
  pools.apply(Lane::kLoad, {2}, {7});
  pools.apply(Lane::kLoad, {3}, {7});
  CHECK(pools.agree());
  CHECK(backend->shutdown(20s));
}

TEST(a_signal_that_is_refused_is_set_all_the_same) {
  DeviceSession session;
  Pools pools(16, 16, true);
  Stream stream;
  Call call(pools, Lane::kLoad, true);
  call.set({2}, {7});
  Graph graph(capture(stream, [&] { call.put_on(stream); }));
  CHECK_OK(npu_sim_fail_call("aclrtValueWrite", 1, 507000, 2));
  replay(graph, stream);
  pools.apply(Lane::kLoad, {2}, {7});
  CHECK(pools.agree());
  CHECK_EQUAL(errors().take().size(), size_t{0});
}

// The last test: there is no way back.
TEST(after_a_stop_replays_go_on_without_copies) {
  DeviceSession session;
  Pools pools(16, 16, true);
  Stream stream;
  Call load(pools, Lane::kLoad, true);
  load.set({1}, {2});
  Graph graph(capture(stream, [&] { load.put_on(stream); }));
  scheduler().stop(1s);
  CHECK(scheduler().stopped());
  replay(graph, stream);
  const auto messages = errors().take();
  CHECK_EQUAL(messages.size(), size_t{1});
  if (!messages.empty()) CHECK(contains(messages[0], "shut down"));
  CHECK(pools.agree());
}

CHECK_MAIN
