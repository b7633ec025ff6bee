// The race checker, through the functions of the runtime: what orders two accesses and what does
// not.
#include <pthread.h>

#include <condition_variable>
#include <mutex>

#include "simulator/fixture.h"

namespace {

/// Checks for its own lifetime.
struct Checking {
  Checking() { npu_sim_check_races(1); }
  ~Checking() {
    take();
    npu_sim_check_races(0);
  }
  static std::string take() { return take_text(npu_sim_take_races(0)); }
  /// What was found once all is over.
  static std::string found() {
    CHECK_OK(aclrtSynchronizeDevice());
    return take();
  }
};

const char* const kNone = "[]";

int count(const std::string& text, const std::string& part) {
  int found = 0;
  for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++found;
  return found;
}

/// Two streams that use one piece of device memory.
struct Scene {
  // What races here would be seen by a sanitizer too.
  Scene() { npu_sim_set("move_payload", 0); }

  Session session;
  PinnedMemory host{64};
  DeviceMemory device{64};
  Stream a;
  Stream b;
  Checking checking;

  void write_on_a() const { CHECK_OK(h2d(device, host, 64, a)); }
  void read_on_b() const { CHECK_OK(d2h(host, device, 64, b)); }
};

/// The read on b comes after the write on a if `order` orders them; not if it is left out, and not
/// if any of the calls in `needed` does nothing.
template <typename Order>
void check_order(Order order, std::initializer_list<const char*> needed) {
  {
    Scene scene;
    PinnedMemory target(64);
    scene.write_on_a();
    order(scene);
    CHECK_OK(d2h(target, scene.device, 64, scene.b));
    CHECK_EQUAL(Checking::found(), kNone);
  }
  for (const char* call : needed) {
    Scene scene;
    PinnedMemory target(64);
    scene.write_on_a();
    CHECK_OK(npu_sim_drop_call(call, 1, 1));
    order(scene);
    CHECK_OK(d2h(target, scene.device, 64, scene.b));
    CHECK_EQUAL(count(Checking::found(), "\"kind\": \"access\""), 1);
  }
}

class Signal {
 public:
  void set() {
    const std::lock_guard lock(mutex_);
    is_set_ = true;
    changed_.notify_all();
  }
  void wait() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return is_set_; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool is_set_ = false;
};

}  // namespace

TEST(two_streams_without_an_order_race) {
  Scene scene;
  scene.write_on_a();
  CHECK_OK(d2h(scene.host, scene.device.data() + 16, 32, scene.b));
  const std::string found = Checking::found();
  // The write of the device bytes against their read, and the read of the host bytes against their
  // write. Which stream comes first is not known.
  CHECK_EQUAL(count(found, "\"first\": "), 2);
  CHECK_EQUAL(count(found, "\"bytes\": 32"), 2);
  CHECK_EQUAL(count(found, "\"place\": \"device\""), 1);
  CHECK_EQUAL(count(found, "\"place\": \"pinned\""), 1);
  CHECK_EQUAL(count(found, "\"call\": \"aclrtMemcpyAsync\""), 4);
  CHECK(contains(found, "\"handle\": " + std::to_string(reinterpret_cast<uintptr_t>(
                                             static_cast<void*>(scene.a)))));
  CHECK(contains(found, "\"address\": " +
                            std::to_string(reinterpret_cast<uintptr_t>(scene.device.data()) + 16)));
  CHECK(contains(found, "race_test"));    // the caller
  CHECK_EQUAL(Checking::found(), kNone);  // taken
}

TEST(reads_and_other_bytes_do_not_race) {
  Scene scene;
  PinnedMemory other(64);
  CHECK_OK(d2h(scene.host, scene.device, 64, scene.a));
  CHECK_OK(d2h(other, scene.device, 64, scene.b));
  CHECK_EQUAL(Checking::found(), kNone);
  CHECK_OK(h2d(scene.device, scene.host, 32, scene.a));
  CHECK_OK(h2d(scene.device.data() + 32, scene.host.data() + 32, 32, scene.b));
  CHECK_EQUAL(Checking::found(), kNone);
}

TEST(fills_race_too) {
  Scene scene;
  scene.write_on_a();
  CHECK_OK(aclrtMemsetAsync(scene.device.data() + 60, 4, 0, 4, scene.b));
  CHECK(contains(Checking::found(), "aclrtMemsetAsync"));
}

TEST(an_event_orders_what_was_before_its_record) {
  check_order(
      [](Scene& scene) {
        Event event;
        CHECK_OK(aclrtRecordEvent(event, scene.a));
        CHECK_OK(aclrtStreamWaitEvent(scene.b, event));
      },
      {"aclrtRecordEvent", "aclrtStreamWaitEvent"});
}

TEST(an_event_does_not_order_what_came_after_its_record) {
  Scene scene;
  Event event;
  CHECK_OK(aclrtRecordEvent(event, scene.a));
  scene.write_on_a();
  CHECK_OK(aclrtStreamWaitEvent(scene.b, event));
  scene.read_on_b();
  CHECK(Checking::found() != kNone);
}

TEST(order_is_handed_on) {
  Scene scene;
  Stream between;
  Event first;
  Event second;
  scene.write_on_a();
  CHECK_OK(aclrtRecordEvent(first, scene.a));
  CHECK_OK(aclrtStreamWaitEvent(between, first));
  CHECK_OK(aclrtRecordEvent(second, between));
  CHECK_OK(aclrtStreamWaitEvent(scene.b, second));
  scene.read_on_b();
  CHECK_EQUAL(Checking::found(), kNone);
}

TEST(a_flag_event_orders_until_its_reset) {
  for (const bool with_reset : {true, false}) {
    Scene scene;
    FlagEvent event(ACL_EVENT_SYNC);
    Event back;
    for (int round = 0; round < 2; ++round) {
      scene.write_on_a();
      CHECK_OK(aclrtRecordEvent(event, scene.a));
      CHECK_OK(aclrtStreamWaitEvent(scene.b, event));
      if (!with_reset) CHECK_OK(npu_sim_drop_call("aclrtResetEvent", 1, 1));
      CHECK_OK(aclrtResetEvent(event, scene.b));
      scene.read_on_b();
      CHECK_OK(aclrtRecordEvent(back, scene.b));
      CHECK_OK(aclrtStreamWaitEvent(scene.a, back));
    }
    // Without it the second wait ends at the first record.
    CHECK_EQUAL(Checking::found() == kNone, with_reset);
  }
}

TEST(an_external_event_orders) {
  check_order(
      [](Scene& scene) {
        FlagEvent event(ACL_EVENT_EXTERNAL);
        CHECK_OK(aclrtRecordEvent(event, scene.a));
        CHECK_OK(aclrtStreamWaitEvent(scene.b, event));
        CHECK_OK(aclrtResetEvent(event, scene.b));
      },
      {"aclrtStreamWaitEvent"});
}

TEST(a_word_orders) {
  DeviceMemory* word = nullptr;
  const auto order = [&](Scene& scene) {
    CHECK_OK(aclrtValueWrite(*word, 1, 0, scene.a));
    CHECK_OK(aclrtValueWait(*word, 1, 1, scene.b));
    CHECK_OK(aclrtValueWrite(*word, 0, 0, scene.b));
  };
  const auto fresh = [&](Scene& scene) {
    DeviceMemory memory(8);
    memory.write(std::string(8, '\0'));
    word = &memory;
    order(scene);
    CHECK_OK(aclrtSynchronizeStream(scene.b));
  };
  check_order(fresh, {});
  Scene scene;
  DeviceMemory memory(8);
  memory.write(std::string(8, '\0'));
  word = &memory;
  CHECK_OK(npu_sim_drop_call("aclrtValueWait", 1, 1));
  scene.write_on_a();
  order(scene);
  scene.read_on_b();
  CHECK(Checking::found() != kNone);
}

TEST(a_value_written_again_orders_nothing_more) {
  Scene scene;
  DeviceMemory word(8);
  word.write(std::string(8, '\0'));
  CHECK_OK(aclrtValueWrite(word, 1, 0, scene.a));
  CHECK_OK(aclrtSynchronizeStream(scene.a));
  scene.write_on_a();
  CHECK_OK(aclrtValueWrite(word, 1, 0, scene.a));
  CHECK_OK(aclrtValueWait(word, 1, 1, scene.b));
  scene.read_on_b();
  CHECK(Checking::found() != kNone);
}

TEST(the_host_orders_by_waiting) {
  check_order([](Scene& scene) { CHECK_OK(aclrtSynchronizeStream(scene.a)); },
              {"aclrtSynchronizeStream"});
  check_order([](Scene&) { CHECK_OK(aclrtSynchronizeDevice()); },
              {"aclrtSynchronizeDeviceWithTimeout"});
  check_order(
      [](Scene& scene) {
        Event event;
        CHECK_OK(aclrtRecordEvent(event, scene.a));
        CHECK_OK(aclrtSynchronizeEvent(event));
      },
      {"aclrtRecordEvent", "aclrtSynchronizeEvent"});
}

TEST(the_host_orders_by_seeing_that_work_is_over) {
  check_order([](Scene& scene) { wait_until([&] { return query(scene.a); }); }, {});
  check_order(
      [](Scene& scene) {
        Event event;
        CHECK_OK(aclrtRecordEvent(event, scene.a));
        wait_until([&] { return reached(event); });
      },
      {});
}

TEST(a_query_that_finds_work_under_way_orders_nothing) {
  Scene scene;
  CHECK_OK(npu_sim_stall(scene.a));
  scene.write_on_a();
  CHECK(!query(scene.a));
  scene.read_on_b();
  CHECK_OK(npu_sim_release(scene.a));
  CHECK(Checking::found() != kNone);
}

TEST(destroying_a_stream_waits_for_it) {
  Scene scene;
  aclrtStream shortlived = nullptr;
  for (int round = 0; round < 3; ++round) {
    CHECK_OK(aclrtCreateStream(&shortlived));
    CHECK_OK(h2d(scene.device, scene.host, 64, shortlived));
    CHECK_OK(aclrtDestroyStream(shortlived));
  }
  scene.read_on_b();
  CHECK_EQUAL(Checking::found(), kNone);
}

TEST(other_threads_are_ordered_by_their_calls) {
  Scene scene;
  scene.write_on_a();
  std::thread([&] {
    CHECK_OK(aclrtSetCurrentContext(scene.session.context));
    CHECK_OK(aclrtSynchronizeStream(scene.a));
  }).join();
  scene.read_on_b();
  CHECK_EQUAL(Checking::found(), kNone);
}

TEST(a_host_function_orders_what_the_host_does_because_of_it) {
  Scene scene;
  Signal called;
  Signal copied;
  scene.write_on_a();
  struct Both {
    Signal& called;
    Signal& copied;
  } both{called, copied};
  CHECK_OK(aclrtLaunchHostFunc(
      scene.a,
      [](void* argument) {
        static_cast<Both*>(argument)->called.set();
        static_cast<Both*>(argument)->copied.wait();
      },
      &both));
  CHECK_OK(h2d(scene.device, scene.host, 64, scene.a));
  called.wait();
  scene.read_on_b();  // after the first copy on a
  CHECK_OK(aclrtSynchronizeStream(scene.b));
  copied.set();  // and before the second, which waits for the function
  CHECK_EQUAL(Checking::found(), kNone);
}

TEST(what_follows_a_host_function_is_not_ordered_before_it) {
  Scene scene;
  Signal called;
  CHECK_OK(aclrtLaunchHostFunc(
      scene.a, [](void* argument) { static_cast<Signal*>(argument)->set(); }, &called));
  scene.write_on_a();
  called.wait();
  scene.read_on_b();
  CHECK(Checking::found() != kNone);
}

TEST(a_callback_that_does_not_block_orders_the_host_behind_the_stream) {
  Scene scene;
  Signal called;
  Signal copied;
  std::atomic<bool> stop{false};
  uint64_t thread_id = 0;
  Signal known;
  std::thread reporter([&] {
    thread_id = static_cast<uint64_t>(pthread_self());
    known.set();
    while (!stop) aclrtProcessReport(10);
  });
  known.wait();
  CHECK_OK(aclrtSubscribeReport(thread_id, scene.a));
  scene.write_on_a();
  CHECK_OK(aclrtLaunchCallback([](void* argument) { static_cast<Signal*>(argument)->set(); },
                               &called, 0, scene.a));
  called.wait();
  scene.read_on_b();
  CHECK_EQUAL(Checking::found(), kNone);
  CHECK_OK(aclrtUnSubscribeReport(thread_id, scene.a));
  stop = true;
  reporter.join();
}

TEST(copies_of_the_host_race_with_work_in_flight) {
  Scene scene;
  scene.write_on_a();
  scene.device.write("now");
  CHECK_EQUAL(count(Checking::found(), "\"stream\": -1"), 1);
  scene.write_on_a();
  CHECK_OK(aclrtMemset(scene.device, 64, 0, 64));
  CHECK(contains(Checking::found(), "\"call\": \"aclrtMemset\""));
  scene.device.write("before what is launched later");
  scene.write_on_a();
  CHECK_OK(aclrtSynchronizeStream(scene.a));
  scene.device.read(64);
  CHECK_EQUAL(Checking::found(), kNone);
}

TEST(page_able_copies_are_ordered_for_the_host) {
  Scene scene;
  std::string buffer(64, 'x');
  CHECK_OK(h2d(scene.device, buffer.data(), 64, scene.a));  // synchronous
  CHECK_OK(d2h(buffer.data(), scene.device, 64, scene.b));
  CHECK_EQUAL(Checking::found(), kNone);
}

TEST(items_of_a_batch_have_no_order) {
  Scene scene;
  DeviceMemory device(64);
  const auto batch = [&](size_t second) {
    void* dsts[] = {device.data(), device.data() + second};
    void* srcs[] = {scene.host.data(), scene.host.data()};  // reading twice is fine
    size_t sizes[] = {8, 8};
    aclrtMemcpyBatchAttr attr{
        {0, ACL_MEM_LOCATION_TYPE_DEVICE}, {0, ACL_MEM_LOCATION_TYPE_HOST}, {}};
    size_t index = 0;
    size_t failed = 0;
    CHECK_OK(
        aclrtMemcpyBatchAsync(dsts, sizes, srcs, sizes, 2, &attr, &index, 1, &failed, scene.a));
    return Checking::found();
  };
  CHECK_EQUAL(batch(8), kNone);
  const std::string found = batch(4);
  CHECK(contains(found, "\"kind\": \"batch\""));
  CHECK(contains(found, "\"bytes\": 4"));
}

TEST(memory_is_freed_behind_its_last_use) {
  for (const bool wait : {true, false}) {
    Scene scene;
    PinnedMemory pinned(16);
    DeviceMemory device(16);
    CHECK_OK(h2d(device, pinned, 16, scene.a));
    wait_until([&] { return stat("copies.h2d") == 1; });  // known to us, not to the runtime
    if (wait) CHECK_OK(aclrtSynchronizeStream(scene.a));
    CHECK_OK(aclrtFree(device.release()));
    CHECK_OK(aclrtFreeHost(pinned.release()));
    const std::string found = Checking::found();
    CHECK_EQUAL(count(found, "\"kind\": \"freed\""), wait ? 0 : 2);
    CHECK_EQUAL(count(found, "\"call\": \"aclrtFreeHost\""), wait ? 0 : 1);
  }
}

TEST(memory_that_was_freed_before_its_use_is_found) {
  Scene scene;
  DeviceMemory device(16);
  CHECK_OK(npu_sim_stall(scene.a));
  CHECK_OK(h2d(device, scene.host, 16, scene.a));
  CHECK_OK(aclrtFree(device.release()));
  CHECK_OK(npu_sim_release(scene.a));
  CHECK(aclrtSynchronizeStream(scene.a) != ACL_SUCCESS);
  const std::string found = Checking::take();
  CHECK_EQUAL(count(found, "\"kind\": \"freed\""), 1);
  CHECK(contains(found, "\"call\": \"aclrtFree\""));
}

TEST(addresses_that_are_used_again_are_new_memory) {
  Scene scene;
  for (int round = 0; round < 20; ++round) {  // page-locked memory gets its old address back
    PinnedMemory pinned(4096);
    CHECK_OK(h2d(scene.device, pinned, 64, round % 2 == 0 ? scene.a : scene.b));
    CHECK_OK(aclrtSynchronizeDevice());
  }
  CHECK_EQUAL(Checking::found(), kNone);
}

// --- graphs

TEST(streams_of_a_graph_are_ordered_by_its_events) {
  for (const bool joined_first : {true, false}) {
    Scene scene;
    Event fork;
    Event join;
    PinnedMemory source(64);
    PinnedMemory target(64);
    Graph graph(capture(scene.a, [&] {
      CHECK_OK(aclrtRecordEvent(fork, scene.a));
      CHECK_OK(aclrtStreamWaitEvent(scene.b, fork));
      CHECK_OK(h2d(scene.device, source, 64, scene.b));
      CHECK_OK(aclrtRecordEvent(join, scene.b));
      if (joined_first) CHECK_OK(aclrtStreamWaitEvent(scene.a, join));
      CHECK_OK(d2h(target, scene.device, 64, scene.a));
      if (!joined_first) CHECK_OK(aclrtStreamWaitEvent(scene.a, join));
    }));
    for (int round = 0; round < 3; ++round) CHECK_OK(aclmdlRIExecuteAsync(graph, scene.a));
    const std::string found = Checking::found();
    CHECK_EQUAL(found == kNone, joined_first);
    if (!joined_first) {
      CHECK(contains(found, "\"replay\": \"aclmdlRIExecuteAsync\""));
      CHECK(contains(found, "\"call\": \"aclrtMemcpyAsync\""));
    }
  }
}

TEST(a_replay_is_one_task_of_its_stream) {
  for (const bool ordered : {true, false}) {
    Scene scene;
    Event fork;
    Event join;
    Graph graph(capture(scene.a, [&] {
      CHECK_OK(aclrtRecordEvent(fork, scene.a));
      CHECK_OK(aclrtStreamWaitEvent(scene.b, fork));
      CHECK_OK(h2d(scene.device, scene.host, 64, scene.b));
      CHECK_OK(aclrtRecordEvent(join, scene.b));
      CHECK_OK(aclrtStreamWaitEvent(scene.a, join));
    }));
    Stream other;
    CHECK_OK(h2d(scene.device, scene.host, 64, other));
    if (ordered) CHECK_OK(aclrtSynchronizeStream(other));
    CHECK_OK(aclmdlRIExecuteAsync(graph, other));
    CHECK_OK(aclmdlRIExecuteAsync(graph, other));
    if (ordered) {
      Event replayed;
      CHECK_OK(aclrtRecordEvent(replayed, other));
      CHECK_OK(aclrtStreamWaitEvent(scene.a, replayed));
    }
    PinnedMemory target(64);
    CHECK_OK(d2h(target, scene.device, 64, scene.a));
    CHECK_EQUAL(Checking::found() == kNone, ordered);
  }
}

TEST(replays_in_two_streams_race) {
  Scene scene;
  Graph graph(capture(scene.a, [&] { scene.write_on_a(); }));
  CHECK_OK(aclmdlRIExecuteAsync(graph, scene.a));
  CHECK_OK(aclmdlRIExecuteAsync(graph, scene.b));
  CHECK(contains(Checking::found(), "aclmdlRIExecuteAsync"));
}

TEST(destroying_a_graph_waits_for_its_replays) {
  Scene scene;
  Graph graph(capture(scene.a, [&] { scene.write_on_a(); }));
  CHECK_OK(aclmdlRIExecuteAsync(graph, scene.a));
  CHECK_OK(aclmdlRIDestroy(graph.release()));
  scene.read_on_b();
  CHECK_EQUAL(Checking::found(), kNone);
}

TEST(a_graph_that_was_captured_before_is_checked_too) {
  Scene scene;
  npu_sim_check_races(0);
  Graph graph(capture(scene.a, [&] { scene.write_on_a(); }));
  npu_sim_check_races(1);
  CHECK_OK(aclmdlRIExecuteAsync(graph, scene.a));
  scene.read_on_b();
  CHECK(contains(Checking::found(), "aclmdlRIExecuteAsync"));
}

// --- on and off

TEST(nothing_is_checked_while_it_is_off) {
  Scene scene;
  npu_sim_check_races(0);
  scene.write_on_a();
  scene.read_on_b();
  CHECK_EQUAL(Checking::found(), kNone);
}

TEST(what_was_launched_before_is_not_checked) {
  Scene scene;
  npu_sim_check_races(0);
  CHECK_OK(npu_sim_stall(scene.a));
  scene.write_on_a();
  npu_sim_check_races(1);
  scene.read_on_b();
  CHECK_OK(aclrtSynchronizeStream(scene.b));
  CHECK_OK(npu_sim_release(scene.a));
  CHECK_EQUAL(Checking::found(), kNone);
}

TEST(one_pair_of_calls_is_one_race_and_counted) {
  Scene scene;
  CHECK_OK(npu_sim_stall(scene.a));
  CHECK_OK(npu_sim_stall(scene.b));
  for (int i = 0; i < 5; ++i) {
    scene.write_on_a();
    CHECK_OK(aclrtMemsetAsync(scene.device, 64, 0, 64, scene.b));
  }
  CHECK_OK(npu_sim_release(scene.a));
  CHECK_OK(aclrtSynchronizeStream(scene.a));
  CHECK_OK(npu_sim_release(scene.b));
  const std::string found = Checking::found();
  CHECK_EQUAL(count(found, "\"first\": "), 1);
  CHECK(contains(found, "\"count\": 1,"));  // the first fill takes the place of the last copy
}

TEST(marked_races_stay) {
  Scene scene;
  scene.write_on_a();
  scene.read_on_b();
  CHECK_OK(aclrtSynchronizeDevice());
  const int64_t before = npu_sim_mark_races();
  CHECK_EQUAL(before, 2);
  scene.write_on_a();
  CHECK_OK(aclrtMemsetAsync(scene.device, 64, 0, 64, scene.b));
  CHECK_OK(aclrtSynchronizeDevice());
  CHECK_EQUAL(count(take_text(npu_sim_take_races(before)), "\"first\": "), 1);
  CHECK_EQUAL(npu_sim_mark_races(), 2);
}

TEST(only_calls_that_give_nothing_back_can_be_dropped) {
  CHECK_EQUAL(npu_sim_drop_call("aclrtMalloc", 1, 1), ACL_ERROR_INVALID_PARAM);
  CHECK_EQUAL(npu_sim_drop_call("aclrtRecordEvent", 0, 1), ACL_ERROR_INVALID_PARAM);
  CHECK_EQUAL(npu_sim_drop_call("aclrtRecordEvent", 1, 0), ACL_ERROR_INVALID_PARAM);
  CHECK(contains(npu_sim_error(), "start at 1"));
}

CHILD(a_process_that_races) {
  npu_sim_report_races_at_exit();
  npu_sim_check_races(1);
  aclrtSetDevice(0);
  auto* device = new DeviceMemory(8);
  auto* host = new PinnedMemory(8);
  auto* a = new Stream;
  auto* b = new Stream;
  h2d(*device, *host, 8, *a);
  h2d(*device, *host, 8, *b);
  aclrtSynchronizeDevice();
  return 0;
}

TEST(a_process_can_end_with_its_races) {
  const ChildEnd end = run_child("a_process_that_races");
  CHECK_EQUAL(end.exit_code, 66);
}

SIMULATOR_TEST_MAIN
