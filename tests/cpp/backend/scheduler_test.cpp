// The copy scheduler on the simulated runtime, with its streams, events and threads.
#include <algorithm>
#include <chrono>
#include <cstring>
#include <new>
#include <random>
#include <semaphore>

#include "pools.h"
#include "runtime/acl/acl_runtime.h"
#include "runtime/host_runtime.h"

using namespace npu_kv;
using namespace std::chrono_literals;

namespace {

std::shared_ptr<CopyScheduler> start_with_stores_on(Pools& pools, aclrtStream stream) {
  auto options = pools.options();
  options.own_streams[static_cast<int>(Lane::kStore)] = false;
  options.streams[static_cast<int>(Lane::kStore)] = {stream, 0};
  std::shared_ptr<CopyScheduler> scheduler;
  CHECK(CopyScheduler::start(acl_runtime(), options, &scheduler).ok());
  return scheduler;
}

std::shared_ptr<const CopyPlan> plan(const CopyScheduler& scheduler, Lane lane,
                                     const std::vector<int64_t>& src,
                                     const std::vector<int64_t>& dst) {
  return make_plan(scheduler.pools(), lane, {src.data(), true, src.size()},
                   {dst.data(), true, dst.size()});
}

std::shared_ptr<CopyJob> submit(CopyScheduler& scheduler, Lane lane,
                                const std::vector<int64_t>& src, const std::vector<int64_t>& dst,
                                bool gated = false) {
  return scheduler.submit(plan(scheduler, lane, src, dst), gated, 0);
}

std::vector<int64_t> range(int64_t first, int64_t count) {
  std::vector<int64_t> ids(count);
  for (int64_t i = 0; i < count; ++i) ids[i] = first + i;
  return ids;
}

std::vector<int64_t> choose(std::minstd_rand& random, int64_t blocks, size_t count) {
  std::vector<int64_t> ids = range(0, blocks);
  std::shuffle(ids.begin(), ids.end(), random);
  ids.resize(count);
  return ids;
}

void random_jobs(bool on_device, unsigned seed) {
  Pools pools(12, 20, on_device);
  StreamRuntime& runtime = on_device ? static_cast<StreamRuntime&>(acl_runtime()) : host_runtime();
  auto scheduler = start(pools, runtime);
  std::minstd_rand random(seed);
  std::unique_ptr<Stream> compute = on_device ? std::make_unique<Stream>() : nullptr;
  std::vector<std::unique_ptr<Event>> events;
  for (int round = 0; round < 120; ++round) {
    const Lane lane = random() % 2 == 0 ? Lane::kLoad : Lane::kStore;
    const size_t count = random() % 7;
    const bool store = lane == Lane::kStore;
    const auto src = choose(random, store ? 12 : 20, count);
    const auto dst = choose(random, store ? 20 : 12, count);
    const bool gated = on_device && random() % 3 == 0;
    auto job = submit(*scheduler, lane, src, dst, gated);
    pools.apply(lane, src, dst);
    if (gated) {
      events.push_back(std::make_unique<Event>());
      CHECK_OK(aclrtRecordEvent(*events.back(), *compute));
      scheduler->open_gate(*job, *events.back());
    }
    if (random() % 10 == 0) CHECK(scheduler->wait(*job, 20s));
    if (random() % 25 == 0) {
      CHECK(scheduler->drain(20s));
      CHECK(pools.agree());
    }
  }
  CHECK(scheduler->drain(20s));
  CHECK(pools.agree());
  CHECK(scheduler->shutdown(20s));
}

}  // namespace

TEST(random_jobs_end_as_if_run_one_after_the_other) {
  DeviceSession session;
  for (unsigned seed = 1; seed <= 6; ++seed) random_jobs(true, seed);
}

TEST(random_jobs_between_host_pools_too) {
  for (unsigned seed = 1; seed <= 6; ++seed) random_jobs(false, seed);
}

TEST(a_job_that_shares_a_block_with_the_other_lane_waits_for_it) {
  DeviceSession session;
  npu_sim_set("h2d_bytes_per_second", 1'000'000);
  npu_sim_set("d2h_bytes_per_second", 1'000'000);
  struct Case {
    Lane first;
    std::vector<int64_t> src1, dst1, src2, dst2;
    bool ordered;
  };
  const Case cases[] = {
      {Lane::kStore, {7}, {1}, {2}, {7}, true},   // load into 7 after a store from 7
      {Lane::kStore, {7}, {1}, {1}, {3}, true},   // load from host 1 after a store into it
      {Lane::kLoad, {1}, {7}, {7}, {2}, true},    // store from 7 after a load into it
      {Lane::kLoad, {3}, {7}, {5}, {3}, true},    // store into host 3 after a load from it
      {Lane::kStore, {7}, {1}, {2}, {6}, false},  // nothing in common: they overlap
  };
  for (const Case& c : cases) {
    Pools pools(8, 8, true);
    auto scheduler = start(pools, acl_runtime());
    npu_sim_timeline_start();
    // Both are on their streams before either runs.
    StalledStream compute;
    Event event;
    CHECK_OK(aclrtRecordEvent(event, compute));
    auto first = submit(*scheduler, c.first, c.src1, c.dst1, true);
    auto second = submit(*scheduler, other_lane(c.first), c.src2, c.dst2, true);
    scheduler->open_gate(*first, event);
    scheduler->open_gate(*second, event);
    CHECK(scheduler->wait_launched(*first, 20s));
    CHECK(scheduler->wait_launched(*second, 20s));
    compute.go();
    pools.apply(c.first, c.src1, c.dst1);
    pools.apply(other_lane(c.first), c.src2, c.dst2);
    CHECK(scheduler->drain(20s));
    const std::string timeline = take_text(npu_sim_timeline_stop());
    std::vector<int64_t> starts, ends;
    for (size_t at = timeline.find("\"batch\""); at != std::string::npos;
         at = timeline.find("\"batch\"", at + 1)) {
      starts.push_back(std::atoll(timeline.c_str() + timeline.find("start_ns\": ", at) + 11));
      ends.push_back(std::atoll(timeline.c_str() + timeline.find("end_ns\": ", at) + 9));
    }
    CHECK_EQUAL(starts.size(), size_t{2});
    if (starts.size() == 2) {
      const bool apart = starts[1] >= ends[0] || starts[0] >= ends[1];
      CHECK_EQUAL(apart, c.ordered);
    }
    CHECK(pools.agree());
    CHECK(scheduler->shutdown(20s));
  }
}

TEST(a_gate_takes_the_record_at_its_opening) {
  DeviceSession session;
  Pools pools(8, 8, true);
  auto scheduler = start(pools, acl_runtime());
  Stream compute;
  StalledStream later;
  Event event;
  CHECK_OK(aclrtRecordEvent(event, compute));
  auto job = submit(*scheduler, Lane::kStore, {1}, {2}, true);
  CHECK(!scheduler->wait(*job, 20ms));
  scheduler->open_gate(*job, event);
  // Recorded again, behind work that does not end: the job must not care.
  CHECK_OK(aclrtRecordEvent(event, later));
  CHECK(scheduler->wait(*job, 20s));
  later.go();
  CHECK(scheduler->shutdown(20s));
}

TEST(a_closed_gate_holds_its_lane_and_not_the_other) {
  DeviceSession session;
  Pools pools(8, 8, true);
  auto scheduler = start(pools, acl_runtime());
  auto held = submit(*scheduler, Lane::kStore, {1}, {2}, true);
  auto behind = submit(*scheduler, Lane::kStore, {3}, {4});
  auto load = submit(*scheduler, Lane::kLoad, {5}, {6});
  CHECK(scheduler->wait(*load, 20s));
  CHECK(!scheduler->query(*held));
  CHECK(!scheduler->query(*behind));
  scheduler->refuse(*held, {-1, "the queue is gone"});
  CHECK(scheduler->wait(*held, 20s));
  CHECK(contains(scheduler->error(*held).message(), "the queue is gone"));
  CHECK(scheduler->wait(*behind, 20s));
  CHECK(scheduler->error(*behind).ok());
  CHECK(scheduler->shutdown(20s));
}

TEST(a_load_gets_its_turn_between_the_steps_of_a_large_store) {
  // Holds the scheduler in the first step of the store until the load is submitted.
  class Watched : public HostRuntime {
   public:
    Status copy(const Descriptors& copies, Direction direction, StreamRef stream) override {
      calls.push_back(copies.count);
      if (calls.size() == 1) {
        in_first_step.release();
        go_on.acquire();
      }
      return HostRuntime::copy(copies, direction, stream);
    }
    std::vector<size_t> calls;
    std::binary_semaphore in_first_step{0};
    std::binary_semaphore go_on{0};
  } runtime;
  Pools pools(4096, 4096, false);
  auto options = pools.options();
  options.store_step_copies = 64;
  std::shared_ptr<CopyScheduler> scheduler;
  CHECK(CopyScheduler::start(runtime, options, &scheduler).ok());
  std::vector<int64_t> ids;  // every second block: nothing to merge
  for (int64_t i = 0; i < 2000; ++i) ids.push_back(2 * i);
  submit(*scheduler, Lane::kStore, ids, ids);
  runtime.in_first_step.acquire();
  submit(*scheduler, Lane::kLoad, {4003}, {4003});
  pools.apply(Lane::kStore, ids, ids);
  pools.apply(Lane::kLoad, {4003}, {4003});
  runtime.go_on.release();
  CHECK(scheduler->drain(20s));
  CHECK_EQUAL(runtime.calls[0], size_t{64});
  CHECK_EQUAL(runtime.calls[1], kTensors);  // the load
  CHECK_EQUAL(runtime.calls.size(), 1 + (2000 * kTensors + 63) / 64);
  CHECK(pools.agree());
  CHECK(scheduler->shutdown(20s));
}

TEST(stores_get_their_turn_in_a_flow_of_loads) {
  DeviceSession session;
  npu_sim_set("move_payload", 0);
  Pools pools(64, 64, true);
  auto scheduler = start(pools, acl_runtime());
  // All are ready at once: the gate of the first load holds its lane.
  auto store = submit(*scheduler, Lane::kStore, {60}, {60}, true);
  std::vector<std::shared_ptr<CopyJob>> loads;
  for (int64_t i = 0; i < 40; ++i) {
    loads.push_back(submit(*scheduler, Lane::kLoad, {i}, {i}, i == 0));
  }
  scheduler->start_trace(100);
  Event event;
  scheduler->open_gate(*store, event);
  scheduler->open_gate(*loads[0], event);
  CHECK(scheduler->drain(20s));
  size_t before = 0;
  const std::vector<JobTimes> times = scheduler->stop_trace();
  CHECK_EQUAL(times.size(), size_t{41});
  const auto of_store = std::find_if(times.begin(), times.end(),
                                     [](const JobTimes& job) { return job.lane == Lane::kStore; });
  CHECK(of_store != times.end());
  for (const JobTimes& job : times) before += job.started < of_store->started;
  CHECK(before <= 5);
  CHECK(scheduler->shutdown(20s));
}

TEST(a_refused_copy_fails_its_job_by_name_and_no_other) {
  DeviceSession session;
  Pools pools(8, 8, true);
  auto scheduler = start(pools, acl_runtime());
  CHECK_EQUAL(npu_sim_fail_call("aclrtMemcpyBatchAsync", 1, 107000, 1), 0);
  auto failed = scheduler->submit(plan(*scheduler, Lane::kStore, {1}, {2}), false, 17);
  auto good = submit(*scheduler, Lane::kStore, {3}, {4});
  pools.apply(Lane::kStore, {3}, {4});
  CHECK(scheduler->wait(*failed, 20s));
  CHECK(scheduler->wait(*good, 20s));
  const std::string message = scheduler->error(*failed).message();
  CHECK(contains(message, "store 17"));
  CHECK(contains(message, "device to host"));
  CHECK(contains(message, "107000"));
  CHECK(scheduler->error(*good).ok());
  CHECK(pools.agree());
  CHECK_EQUAL(scheduler->stats()[1].failures, 1u);
  CHECK(scheduler->shutdown(20s));
}

TEST(a_failure_in_any_function_ends_in_an_error_and_never_in_a_wait) {
  for (const char* function :
       {"aclrtCreateEventExWithFlag", "aclrtRecordEvent", "aclrtStreamWaitEvent",
        "aclrtMemcpyBatchAsync", "aclrtQueryEventStatus", "aclrtSynchronizeEvent",
        "aclrtEventGetTimestamp"}) {
    DeviceSession session;
    Pools pools(8, 8, true);
    auto scheduler = start(pools, acl_runtime());
    Stream compute;
    Event event;
    CHECK_OK(aclrtRecordEvent(event, compute));
    CHECK_OK(aclrtSynchronizeStream(compute));
    CHECK_EQUAL(npu_sim_fail_call(function, 1, 507899, 1), 0);
    auto job = submit(*scheduler, Lane::kStore, {1}, {2}, true);
    scheduler->open_gate(*job, event);
    CHECK(scheduler->wait(*job, 20s));
    const bool needs_it = std::string(function) != "aclrtEventGetTimestamp";
    CHECK_EQUAL(scheduler->error(*job).ok(), !needs_it);
    auto next = submit(*scheduler, Lane::kLoad, {3}, {4});
    CHECK(scheduler->wait(*next, 20s));
    CHECK(scheduler->error(*next).ok());
    CHECK(scheduler->shutdown(20s));
  }
}

TEST(a_scheduler_that_cannot_start_says_why_and_leaves_nothing) {
  DeviceSession session;
  const int64_t streams = stat("live.streams");
  for (int nth = 1; nth <= 4; ++nth) {
    Pools pools(8, 8, true);
    CHECK_EQUAL(npu_sim_fail_call("aclrtCreateStreamWithConfig", nth, 207008, 1), 0);
    std::shared_ptr<CopyScheduler> scheduler;
    const Status status = CopyScheduler::start(acl_runtime(), pools.options(), &scheduler);
    CHECK(!status.ok());
    CHECK(contains(status.message(), "207008"));
  }
  CHECK_EQUAL(stat("live.streams"), streams);
}

TEST(the_copy_that_the_runtime_refuses_is_named_by_its_pair) {
  DeviceSession session;
  Pools pools(8, 8, true);
  auto options = pools.options();
  // Not device memory: refused when its turn comes, with its index.
  static char elsewhere[8 * kBlock];
  options.pools.device[1].base = reinterpret_cast<int64_t>(elsewhere);
  std::shared_ptr<CopyScheduler> scheduler;
  CHECK(CopyScheduler::start(acl_runtime(), options, &scheduler).ok());
  auto job = submit(*scheduler, Lane::kStore, {1, 3}, {2, 5});
  CHECK(scheduler->wait(*job, 20s));
  CHECK(contains(scheduler->error(*job).message(), "at pair 1 -> 2 of tensor 1"));
  auto next = submit(*scheduler, Lane::kStore, {}, {});
  CHECK(scheduler->wait(*next, 20s));
  CHECK(scheduler->error(*next).ok());
  CHECK(scheduler->shutdown(20s));
}

TEST(jobs_that_may_hold_the_failed_copy_fail_with_it) {
  DeviceSession session;
  Pools pools(8, 8, true);
  StalledStream stalled;
  auto scheduler = start_with_stores_on(pools, stalled);
  // The third copy on the stream fails: the runtime tells that of the stream, not of the job.
  CHECK_EQUAL(npu_sim_fail_copy(7, 507013), 0);
  std::vector<std::shared_ptr<CopyJob>> jobs;
  for (int64_t i = 0; i < 3; ++i) jobs.push_back(submit(*scheduler, Lane::kStore, {i}, {i}));
  for (auto& job : jobs) CHECK(scheduler->wait_launched(*job, 20s));
  stalled.go();
  for (auto& job : jobs) CHECK(scheduler->wait(*job, 20s));
  CHECK(contains(scheduler->error(*jobs[2]).message(), "507013"));
  auto later = submit(*scheduler, Lane::kStore, {4}, {4});
  CHECK(scheduler->wait(*later, 20s));
  CHECK(scheduler->error(*later).ok());
  CHECK(scheduler->shutdown(20s));
}

TEST(a_job_without_an_event_is_done_when_its_stream_is_at_rest) {
  DeviceSession session;
  Pools pools(8, 8, true);
  StalledStream stalled;
  auto scheduler = start_with_stores_on(pools, stalled);
  // The first record marks where the job begins.
  CHECK_EQUAL(npu_sim_fail_call("aclrtRecordEvent", 2, 507899, 1), 0);
  auto job = submit(*scheduler, Lane::kStore, {1}, {2});
  auto same_block = submit(*scheduler, Lane::kLoad, {2}, {3});
  auto same_lane = submit(*scheduler, Lane::kStore, {5}, {6});
  CHECK(!scheduler->wait(*job, 50ms));  // its copies may still be under way
  CHECK(!scheduler->query(*same_block));
  stalled.go();
  for (auto& each : {job, same_block, same_lane}) CHECK(scheduler->wait(*each, 20s));
  CHECK(contains(scheduler->error(*job).message(), "507899"));
  CHECK(scheduler->error(*same_block).ok());
  CHECK(scheduler->error(*same_lane).ok());
  CHECK(scheduler->shutdown(20s));
}

TEST(graphs_are_launched_in_order_with_other_jobs_and_released) {
  DeviceSession session;
  Pools pools(12, 20, true);
  auto scheduler = start(pools, acl_runtime());
  const auto ordinary = plan(*scheduler, Lane::kStore, {1, 2, 7}, {3, 4, 9});
  std::shared_ptr<const CopyPlan> graph;
  CHECK(scheduler->capture(*ordinary, &graph).ok());
  CHECK(pools.agree());  // a capture copies nothing
  for (int64_t i = 0; i < 20; ++i) {
    submit(*scheduler, Lane::kLoad, {i}, {2});
    pools.apply(Lane::kLoad, {i}, {2});
    scheduler->submit(graph, false, i);
    pools.apply(Lane::kStore, {1, 2, 7}, {3, 4, 9});
  }
  CHECK_EQUAL(stat("live.graphs"), 1);
  graph.reset();
  CHECK(scheduler->drain(20s));
  // The thread lets go of it behind the end of its last job.
  wait_until([] { return stat("live.graphs") == 0; });
  CHECK(pools.agree());
  CHECK(scheduler->shutdown(20s));
  CHECK(!scheduler->capture(*ordinary, &graph).ok());
}

TEST(an_exception_on_the_thread_is_the_failure_of_the_job) {
  class Throwing : public HostRuntime {
   public:
    Status copy(const Descriptors& copies, Direction direction, StreamRef stream) override {
      if (std::exchange(throws, false)) throw std::bad_alloc();
      return HostRuntime::copy(copies, direction, stream);
    }
    bool throws = true;
  } runtime;
  Pools pools(8, 8, false);
  auto scheduler = start(pools, runtime);
  auto failed = submit(*scheduler, Lane::kStore, {1}, {2});
  auto good = submit(*scheduler, Lane::kStore, {3}, {4});
  pools.apply(Lane::kStore, {3}, {4});
  CHECK(scheduler->wait(*failed, 20s));
  CHECK(contains(scheduler->error(*failed).message(), "bad_alloc"));
  CHECK(scheduler->wait(*good, 20s));
  CHECK(scheduler->error(*good).ok());
  CHECK(pools.agree());
  CHECK(scheduler->shutdown(20s));
}

TEST(a_copy_that_fails_on_the_device_fails_its_job) {
  DeviceSession session;
  Pools pools(8, 8, true);
  auto scheduler = start(pools, acl_runtime());
  CHECK_EQUAL(npu_sim_fail_copy(2, 507013), 0);
  auto job = submit(*scheduler, Lane::kStore, {1, 3, 5}, {0, 2, 4});
  CHECK(scheduler->wait(*job, 20s));
  CHECK(contains(scheduler->error(*job).message(), "507013"));
  CHECK(scheduler->shutdown(20s));
}

TEST(when_the_device_has_stopped_later_jobs_fail_with_its_cause) {
  DeviceSession session;
  Stream any;
  CHECK_OK(aclrtSetStreamFailureMode(any, ACL_STOP_ON_FAILURE));
  Pools pools(8, 8, true);
  auto scheduler = start(pools, acl_runtime());
  CHECK_EQUAL(npu_sim_fail_copy(1, 507013), 0);
  auto job = submit(*scheduler, Lane::kStore, {1}, {0});
  CHECK(scheduler->wait(*job, 20s));
  CHECK(contains(scheduler->error(*job).message(), "507013"));
  for (int i = 0; i < 3; ++i) {
    auto later = submit(*scheduler, i % 2 == 0 ? Lane::kStore : Lane::kLoad, {2}, {3});
    CHECK(scheduler->wait(*later, 20s));
    CHECK(contains(scheduler->error(*later).message(), "507013"));
  }
  npu_sim_clear_faults();
  auto healed = submit(*scheduler, Lane::kStore, {5}, {6});
  CHECK(scheduler->wait(*healed, 20s));
  CHECK(scheduler->error(*healed).ok());
  CHECK(scheduler->shutdown(20s));
}

TEST(waiting_and_shutting_down_end_when_their_time_is_over) {
  DeviceSession session;
  Pools pools(8, 8, true);
  StalledStream stalled;
  auto scheduler = start_with_stores_on(pools, stalled);
  auto job = submit(*scheduler, Lane::kStore, {1}, {2});
  CHECK(!scheduler->wait(*job, 50ms));
  CHECK(!scheduler->drain(50ms));
  CHECK(!scheduler->shutdown(50ms));
  CHECK(submit(*scheduler, Lane::kLoad, {1}, {2}) == nullptr);
  stalled.go();
  CHECK(scheduler->shutdown(20s));
  CHECK(scheduler->error(*job).ok());
  CHECK(scheduler->shutdown(0s));
}

TEST(abandoning_fails_what_is_not_done) {
  DeviceSession session;
  Pools pools(8, 8, true);
  StalledStream stalled;
  auto scheduler = start_with_stores_on(pools, stalled);
  auto job = submit(*scheduler, Lane::kStore, {1}, {2});
  CHECK(!scheduler->wait(*job, 20ms));
  scheduler->abandon();
  CHECK(scheduler->wait(*job, 20s));
  CHECK(!scheduler->error(*job).ok());
  stalled.go();
}

TEST(many_jobs_leave_nothing_behind) {
  DeviceSession session;
  npu_sim_set("move_payload", 0);
  Pools pools(64, 64, true);
  auto scheduler = start(pools, acl_runtime());
  auto run = [&](int jobs) {
    for (int i = 0; i < jobs; ++i) {
      submit(*scheduler, i % 2 == 0 ? Lane::kStore : Lane::kLoad, {i % 64}, {(i * 7) % 64});
      if (i % 64 == 63) CHECK(scheduler->drain(20s));
    }
    CHECK(scheduler->drain(20s));
  };
  run(128);
  const int64_t events = stat("live.events");
  const int64_t threads = stat("live.threads");
  run(5000);
  CHECK(stat("live.events") <= events + 64);
  CHECK_EQUAL(stat("live.threads"), threads);
  CHECK(scheduler->shutdown(20s));
}

TEST(shutdown_gives_every_stream_and_event_back) {
  DeviceSession session;
  const int64_t streams = stat("live.streams");
  const int64_t events = stat("live.events");
  {
    Pools pools(8, 8, true);
    auto scheduler = start(pools, acl_runtime());
    submit(*scheduler, Lane::kStore, {1}, {2});
    submit(*scheduler, Lane::kLoad, {2}, {1});
    CHECK(scheduler->shutdown(20s));
  }
  CHECK_EQUAL(stat("live.streams"), streams);
  CHECK_EQUAL(stat("live.events"), events);
}

TEST(any_thread_may_submit_query_and_wait) {
  DeviceSession session;
  Pools pools(64, 64, true);
  auto scheduler = start(pools, acl_runtime());
  std::vector<std::thread> threads;
  std::atomic<int> wrong{0};
  for (int64_t n = 0; n < 4; ++n) {
    threads.emplace_back([&, n] {
      for (int i = 0; i < 100; ++i) {
        const int64_t block = 16 * n + i % 16;
        auto job = submit(*scheduler, i % 2 == 0 ? Lane::kStore : Lane::kLoad, {block}, {block});
        scheduler->query(*job);
        if (i % 8 == 0 && !scheduler->wait(*job, 20s)) ++wrong;
      }
    });
  }
  for (auto& thread : threads) thread.join();
  CHECK(scheduler->drain(20s));
  CHECK_EQUAL(wrong.load(), 0);
  const auto stats = scheduler->stats();
  CHECK_EQUAL(stats[0].jobs + stats[1].jobs, 400u);
  CHECK(scheduler->shutdown(20s));
}

CHECK_MAIN
