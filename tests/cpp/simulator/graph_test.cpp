// Captured graphs: what a capture takes, what it refuses, and replays.
#include "simulator/fixture.h"

namespace {

constexpr auto kGlobal = ACL_MODEL_RI_CAPTURE_MODE_GLOBAL;
constexpr auto kThreadLocal = ACL_MODEL_RI_CAPTURE_MODE_THREAD_LOCAL;
constexpr auto kRelaxed = ACL_MODEL_RI_CAPTURE_MODE_RELAXED;

aclmdlRICaptureStatus status_of(aclrtStream stream) {
  aclmdlRICaptureStatus status{};
  CHECK_OK(aclmdlRICaptureGetInfo(stream, &status, nullptr));
  return status;
}

aclmdlRI graph_of(aclrtStream stream) {
  aclmdlRI graph = nullptr;
  CHECK_OK(aclmdlRICaptureGetInfo(stream, nullptr, &graph));
  return graph;
}

/// Makes the second stream wait for what the first holds now.
void fork(aclrtStream from, aclrtStream to, aclrtEvent event) {
  CHECK_OK(aclrtRecordEvent(event, from));
  CHECK_OK(aclrtStreamWaitEvent(to, event));
}

/// A graph pointer that End has to set to null when it fails.
aclmdlRI not_null() { return reinterpret_cast<aclmdlRI>(1); }

/// Runs with the thread's exchange mode set.
template <typename Work>
void with_exchange_mode(aclmdlRICaptureMode mode, Work&& work) {
  CHECK_OK(aclmdlRICaptureThreadExchangeMode(&mode));
  work();
  CHECK_OK(aclmdlRICaptureThreadExchangeMode(&mode));
}

}  // namespace

TEST(a_capture_stores_tasks_and_runs_none) {
  Session session;
  Stream stream;
  PinnedMemory host("new");
  DeviceMemory device(3);
  device.write("old");
  CHECK_EQUAL(status_of(stream), ACL_MODEL_RI_CAPTURE_STATUS_NONE);
  CHECK(graph_of(stream) == nullptr);
  CHECK_OK(aclmdlRICaptureBegin(stream, kGlobal));
  CHECK_EQUAL(status_of(stream), ACL_MODEL_RI_CAPTURE_STATUS_ACTIVE);
  const aclmdlRI during = graph_of(stream);
  CHECK_OK(h2d(device, host, 3, stream));
  aclmdlRI ended = nullptr;
  CHECK_OK(aclmdlRICaptureEnd(stream, &ended));
  Graph graph(ended);
  CHECK(during == ended);
  CHECK_EQUAL(status_of(stream), ACL_MODEL_RI_CAPTURE_STATUS_NONE);
  CHECK_OK(aclrtSynchronizeStream(stream));
  CHECK_EQUAL(device.read(3), "old");
  CHECK_OK(aclmdlRIExecuteAsync(graph, stream));
  CHECK_OK(aclrtSynchronizeStream(stream));
  CHECK_EQUAL(device.read(3), "new");
}

TEST(an_empty_capture_is_legal) {
  Session session;
  Stream stream;
  Graph graph(capture(stream, [] {}));
  CHECK_OK(aclmdlRIExecuteAsync(graph, stream));
  CHECK_OK(aclrtSynchronizeStream(stream));
}

TEST(replays_use_the_contents_of_their_time) {
  Session session;
  Stream stream;
  PinnedMemory in("....");
  PinnedMemory out("....");
  DeviceMemory device(4);
  Graph graph(capture(stream, [&] {
    CHECK_OK(h2d(device, in, 4, stream));
    CHECK_OK(d2h(out, device, 4, stream));
  }));
  for (const char* content : {"one.", "two."}) {
    in.write(content);
    CHECK_OK(aclmdlRIExecuteAsync(graph, nullptr));  // any stream of the context will do
    CHECK_OK(aclrtSynchronizeStream(nullptr));
    CHECK_EQUAL(out.read(4), content);
  }
  CHECK_EQUAL(stat("copies.h2d"), 2);
}

TEST(a_replay_is_one_task_of_its_stream) {
  Session session;
  Stream origin;
  Stream branch;
  Stream target;
  Event forked;
  Event joined;
  PinnedMemory host("abc");
  DeviceMemory device(3);
  DeviceMemory gate(8);
  gate.write(std::string(8, '\0'));
  Graph graph(capture(origin, [&] {
    fork(origin, branch, forked);
    CHECK_OK(aclrtValueWait(gate, 1, 1, branch));
    CHECK_OK(h2d(device, host, 3, branch));
    fork(branch, origin, joined);
  }));
  CHECK_OK(npu_sim_stall(target));
  CHECK_OK(aclrtMemsetAsync(device, 3, '1', 3, target));
  CHECK_OK(aclmdlRIExecuteAsync(graph, target));
  CHECK_OK(aclrtMemsetAsync(device, 1, '3', 1, target));
  wait_a_while();
  CHECK_EQUAL(stat("copies.h2d"), 1);  // the gate's; the replay has not started
  CHECK_OK(npu_sim_release(target));
  CHECK(blocked(target));
  CHECK_EQUAL(device.read(3), "111");  // the branch has not run, nor what follows the replay
  CHECK_OK(aclrtValueWrite(gate, 1, 0, nullptr));
  CHECK_OK(aclrtSynchronizeStream(target));
  CHECK_EQUAL(device.read(3), "3bc");
}

TEST(capture_across_streams_keeps_the_order_that_events_made) {
  Session session;
  Stream a;
  Stream b;
  Stream c;
  Event to_b;
  Event to_c;
  Event from_c;
  Event from_b;
  PinnedMemory host("x");
  DeviceMemory device(4);
  device.write("....");
  const aclmdlRI ended = capture(a, [&] {
    CHECK_OK(h2d(device, host, 1, a));
    fork(a, b, to_b);
    CHECK_EQUAL(status_of(b), ACL_MODEL_RI_CAPTURE_STATUS_ACTIVE);
    CHECK(graph_of(b) == graph_of(a));
    CHECK_OK(aclrtMemcpyAsync(device.data() + 1, 1, device, 1, ACL_MEMCPY_DEVICE_TO_DEVICE, b));
    fork(b, c, to_c);
    CHECK_OK(aclrtMemcpyAsync(device.data() + 2, 1, device.data() + 1, 1,
                              ACL_MEMCPY_DEVICE_TO_DEVICE, c));
    fork(c, b, from_c);  // c is joined through b
    fork(b, a, from_b);
    CHECK_OK(aclrtMemcpyAsync(device.data() + 3, 1, device.data() + 2, 1,
                              ACL_MEMCPY_DEVICE_TO_DEVICE, a));
  });
  Graph graph(ended);
  for (aclrtStream stream : {aclrtStream{a}, aclrtStream{b}, aclrtStream{c}}) {
    CHECK_EQUAL(status_of(stream), ACL_MODEL_RI_CAPTURE_STATUS_NONE);
    CHECK_OK(aclrtSynchronizeStream(stream));
  }
  CHECK_EQUAL(device.read(4), "....");
  for (const char* content : {"y", "z"}) {
    host.write(content);
    CHECK_OK(aclmdlRIExecuteAsync(graph, b));
    CHECK_OK(aclrtSynchronizeStream(b));
    CHECK_EQUAL(device.read(4), std::string(4, content[0]));
  }
}

TEST(a_stream_that_does_not_lead_back_fails_the_capture) {
  Session session;
  Stream a;
  Stream b;
  Stream c;
  Event forked;
  Event back;
  Event onward;
  DeviceMemory device(8);
  const std::vector<std::function<void()>> bodies = {
      [] {},                                         // never recorded
      [&] { CHECK_OK(aclrtRecordEvent(back, b)); },  // recorded, nobody waits
      [&] {                                          // work after the record
        fork(b, a, back);
        CHECK_OK(aclrtMemsetAsync(device, 8, 0, 8, b));
      },
      [&] { fork(b, c, onward); },  // waited for by a stream that does not lead back either
  };
  for (const auto& body : bodies) {
    const int64_t graphs = stat("live.graphs");
    CHECK_OK(aclmdlRICaptureBegin(a, kGlobal));
    fork(a, b, forked);
    body();
    aclmdlRI graph = not_null();
    CHECK_EQUAL(aclmdlRICaptureEnd(a, &graph), ACL_ERROR_RT_STREAM_UNJOINED);
    CHECK(graph == nullptr);
    CHECK_EQUAL(stat("live.graphs"), graphs);
    CHECK_EQUAL(status_of(a), ACL_MODEL_RI_CAPTURE_STATUS_NONE);
    CHECK_EQUAL(status_of(b), ACL_MODEL_RI_CAPTURE_STATUS_NONE);
    CHECK_OK(aclrtSynchronizeDevice());
    CHECK(reached(forked));
  }
}

TEST(waiting_on_the_recording_lane_changes_nothing) {
  Session session;
  Stream a;
  Stream b;
  Event forked;
  Event back;
  Graph graph(capture(a, [&] {
    fork(a, b, forked);
    fork(b, a, back);
    CHECK_OK(aclrtStreamWaitEvent(b, back));  // no task, so b still ends in its record
  }));
}

TEST(a_record_outside_the_capture_replaces_one_inside) {
  Session session;
  Stream a;
  Stream outside;
  Event event;
  CHECK_OK(aclmdlRICaptureBegin(a, kGlobal));
  CHECK_OK(aclrtRecordEvent(event, a));
  CHECK_OK(aclrtRecordEvent(event, outside));
  CHECK_EQUAL(aclrtStreamWaitEvent(a, event), ACL_ERROR_RT_CAPTURE_DEPENDENCY);
  CHECK_OK(aclrtSynchronizeEvent(event));
  aclmdlRI graph = nullptr;
  CHECK_OK(aclmdlRICaptureEnd(a, &graph));
  CHECK_OK(aclmdlRIDestroy(graph));
}

TEST(events_are_what_they_were_after_the_capture) {
  Session session;
  Stream a;
  Stream b;
  Stream waiter;
  Event event;
  Event back;
  StalledStream recorder;
  CHECK_OK(aclrtRecordEvent(event, recorder));
  Graph graph(capture(a, [&] {
    fork(a, b, event);
    fork(b, a, back);
  }));
  CHECK(!reached(event));
  CHECK_OK(aclmdlRIExecuteAsync(graph, a));  // its edges are not the events
  CHECK_OK(aclrtSynchronizeStream(a));
  CHECK(!reached(event));
  CHECK_OK(aclrtStreamWaitEvent(waiter, event));
  CHECK(blocked(waiter));
  recorder.go();
  CHECK_OK(aclrtSynchronizeStream(waiter));
}

namespace {

/// A thread as the copy scheduler has it: woken by a captured callback, it records the event that
/// the graph waits for, on a stream of its own.
class Scheduler {
 public:
  Scheduler(aclrtContext context, aclrtStream stream, aclrtEvent event)
      : thread_([this, context, stream, event] {
          aclrtSetCurrentContext(context);
          while (!stop_) {
            if (wakes_ > records) {
              if (aclrtRecordEvent(event, stream) == ACL_SUCCESS) ++records;
            } else {
              wait_a_while();
            }
          }
        }) {}
  ~Scheduler() {
    stop_ = true;
    thread_.join();
  }
  static void wake(void* self) { ++static_cast<Scheduler*>(self)->wakes_; }
  std::atomic<int> records{0};

 private:
  std::atomic<int> wakes_{0};
  std::atomic<bool> stop_{false};
  std::thread thread_;
};

}  // namespace

TEST(a_lane_may_wait_for_what_the_callback_of_another_lane_causes) {
  Session session;
  Stream a;
  Stream b;
  Stream own;
  Event forked;
  Event back;
  FlagEvent external(ACL_EVENT_EXTERNAL);
  Scheduler scheduler(session.context, own, external);
  for (const bool origin_waits : {true, false}) {
    Graph graph(capture(a, [&] {
      fork(a, b, forked);
      const aclrtStream waits = origin_waits ? a : b;
      const aclrtStream calls = origin_waits ? b : a;
      CHECK_OK(aclrtStreamWaitEvent(waits, external));
      CHECK_OK(aclrtResetEvent(external, waits));
      CHECK_OK(aclrtLaunchHostFunc(calls, Scheduler::wake, &scheduler));
      fork(b, a, back);
    }));
    for (int i = 0; i < 3; ++i) {
      const int before = scheduler.records;
      CHECK_OK(aclmdlRIExecuteAsync(graph, a));
      CHECK_OK(aclrtSynchronizeStream(a));
      wait_until([&] { return scheduler.records == before + 1; });
    }
  }
}

TEST(one_graph_runs_on_two_streams_at_once) {
  Session session;
  Stream a;
  Stream b;
  DeviceMemory word(16);
  word.write(std::string(16, '\0'));
  Graph graph(capture(a, [&] {
    CHECK_OK(aclrtValueWrite(word, 1, 0, a));
    CHECK_OK(aclrtValueWait(word.data() + 8, 1, 1, a));
  }));
  CHECK_OK(aclmdlRIExecuteAsync(graph, a));
  CHECK_OK(aclmdlRIExecuteAsync(graph, a));
  CHECK_OK(aclmdlRIExecuteAsync(graph, b));
  CHECK(blocked(a));
  CHECK(blocked(b));
  CHECK_OK(aclrtValueWrite(word.data() + 8, 1, 0, nullptr));
  CHECK_OK(aclrtSynchronizeDevice());
}

TEST(several_captures_at_once) {
  Session session;
  Stream a;
  Stream b;
  DeviceMemory device(2);
  device.write("..");
  CHECK_OK(aclmdlRICaptureBegin(a, kGlobal));
  CHECK_OK(aclmdlRICaptureBegin(b, kThreadLocal));
  CHECK_OK(aclrtMemsetAsync(device, 1, 'a', 1, a));
  CHECK_OK(aclrtMemsetAsync(device.data() + 1, 1, 'b', 1, b));
  aclmdlRI first = nullptr;
  aclmdlRI second = nullptr;
  CHECK_OK(aclmdlRICaptureEnd(a, &first));
  CHECK_EQUAL(status_of(b), ACL_MODEL_RI_CAPTURE_STATUS_ACTIVE);
  CHECK_OK(aclmdlRICaptureEnd(b, &second));
  Graph first_owner(first);
  Graph second_owner(second);
  CHECK_OK(aclmdlRIExecuteAsync(second, a));
  CHECK_OK(aclrtSynchronizeStream(a));
  CHECK_EQUAL(device.read(2), ".b");
}

TEST(begin_and_end_refusals) {
  Session session;
  Stream a;
  Stream b;
  Event forked;
  Event back;
  aclrtStream by_default = nullptr;
  CHECK_OK(aclrtCtxGetCurrentDefaultStream(&by_default));
  aclmdlRI graph = nullptr;
  CHECK_EQUAL(aclmdlRICaptureBegin(nullptr, kGlobal), ACL_ERROR_INVALID_PARAM);
  CHECK_EQUAL(aclmdlRICaptureBegin(a, static_cast<aclmdlRICaptureMode>(3)),
              ACL_ERROR_INVALID_PARAM);
  CHECK_EQUAL(aclmdlRICaptureBegin(by_default, kGlobal), ACL_ERROR_RT_FEATURE_NOT_SUPPORT);
  CHECK_EQUAL(aclmdlRICaptureEnd(by_default, &graph), ACL_ERROR_RT_FEATURE_NOT_SUPPORT);
  CHECK_EQUAL(aclmdlRICaptureEnd(a, &graph), ACL_ERROR_RT_STREAM_NOT_CAPTURED);
  CHECK_EQUAL(aclmdlRICaptureEnd(nullptr, &graph), ACL_ERROR_INVALID_PARAM);
  CHECK_EQUAL(aclmdlRICaptureGetInfo(a, nullptr, nullptr), ACL_ERROR_INVALID_PARAM);
  CHECK_OK(aclmdlRICaptureBegin(a, kGlobal));
  CHECK_EQUAL(aclmdlRICaptureBegin(a, kGlobal), ACL_ERROR_RT_STREAM_CAPTURED);
  CHECK_EQUAL(aclmdlRICaptureEnd(a, nullptr), ACL_ERROR_INVALID_PARAM);
  fork(a, b, forked);
  CHECK_EQUAL(aclmdlRICaptureBegin(b, kGlobal), ACL_ERROR_RT_STREAM_CAPTURED);
  CHECK_EQUAL(aclmdlRICaptureEnd(b, &graph), ACL_ERROR_RT_STREAM_CAPTURE_UNMATCHED);
  fork(b, a, back);
  CHECK_OK(aclmdlRICaptureEnd(a, &graph));  // none of these changed anything
  CHECK_OK(aclmdlRIDestroy(graph));
}

TEST(only_a_relaxed_capture_ends_on_another_thread) {
  Session session;
  for (const auto mode : {kGlobal, kThreadLocal, kRelaxed}) {
    Stream stream;
    CHECK_OK(aclmdlRICaptureBegin(stream, mode));
    aclmdlRI graph = not_null();
    aclError result = ACL_SUCCESS;
    std::thread([&] {
      aclrtSetCurrentContext(session.context);
      result = aclmdlRICaptureEnd(stream, &graph);
    }).join();
    CHECK_EQUAL(status_of(stream), ACL_MODEL_RI_CAPTURE_STATUS_NONE);
    if (mode == kRelaxed) {
      CHECK_OK(result);
      CHECK_OK(aclmdlRIDestroy(graph));
    } else {
      CHECK_EQUAL(result, ACL_ERROR_RT_STREAM_CAPTURE_WRONG_THREAD);
      CHECK_EQUAL(aclmdlRICaptureEnd(stream, &graph), ACL_ERROR_RT_STREAM_NOT_CAPTURED);
      Graph next(capture(stream, [] {}));  // the stream is as good as new
    }
  }
}

TEST(an_event_shared_by_two_captures_invalidates_both) {
  Session session;
  DeviceMemory device(8);
  const std::vector<std::function<aclError(aclrtEvent, aclrtStream)>> uses = {
      [](aclrtEvent event, aclrtStream stream) { return aclrtRecordEvent(event, stream); },
      [](aclrtEvent event, aclrtStream stream) { return aclrtStreamWaitEvent(stream, event); },
  };
  for (const auto& use : uses) {
    Stream a;
    Stream b;
    Event event;
    CHECK_OK(aclmdlRICaptureBegin(a, kGlobal));
    CHECK_OK(aclmdlRICaptureBegin(b, kGlobal));
    CHECK_OK(aclrtRecordEvent(event, a));
    CHECK_EQUAL(use(event, b), ACL_ERROR_STREAM_CAPTURE_CONFLICT);
    for (aclrtStream stream : {aclrtStream{a}, aclrtStream{b}}) {
      CHECK_EQUAL(status_of(stream), ACL_MODEL_RI_CAPTURE_STATUS_INVALIDATED);
      CHECK(aclrtMemsetAsync(device, 8, 0, 8, stream) != ACL_SUCCESS);
      Stream bystander;
      aclrtStreamWaitEvent(bystander, event);
      CHECK_EQUAL(status_of(bystander), ACL_MODEL_RI_CAPTURE_STATUS_NONE);
    }
    for (aclrtStream stream : {aclrtStream{a}, aclrtStream{b}}) {
      aclmdlRI graph = not_null();
      CHECK_EQUAL(aclmdlRICaptureEnd(stream, &graph), ACL_ERROR_RT_STREAM_CAPTURE_INVALIDATED);
      CHECK(graph == nullptr);
      CHECK_OK(aclrtMemsetAsync(device, 8, 0, 8, stream));
      CHECK_OK(aclrtSynchronizeStream(stream));
    }
    CHECK(reached(event));
  }
}

TEST(calls_that_a_capturing_stream_refuses) {
  Session session;
  Stream a;
  Stream b;
  Event back;
  Event inside(ACL_EVENT_SYNC | ACL_EVENT_TIME_LINE);
  Event outside;
  Event never;
  Event no_sync(ACL_EVENT_CAPTURE_STREAM_PROGRESS);
  FlagEvent flag(ACL_EVENT_SYNC);
  DefaultEvent by_default;
  Graph other(capture(b, [] {}));
  CHECK_OK(aclrtRecordEvent(outside, b));
  CHECK_OK(aclrtRecordEvent(by_default, b));
  CHECK_OK(aclrtSynchronizeStream(b));
  CHECK_OK(aclmdlRICaptureBegin(a, kGlobal));
  fork(a, b, inside);
  const auto captured = ACL_ERROR_RT_STREAM_CAPTURED;
  for (aclrtStream stream : {aclrtStream{a}, aclrtStream{b}}) {
    aclrtStreamStatus status{};
    CHECK_EQUAL(aclrtSynchronizeStream(stream), captured);
    CHECK_EQUAL(aclrtSynchronizeStreamWithTimeout(stream, 1), captured);
    CHECK_EQUAL(aclrtStreamQuery(stream, &status), captured);
    CHECK_EQUAL(aclrtDestroyStream(stream), captured);
    CHECK_EQUAL(aclrtDestroyStreamForce(stream), captured);
    CHECK_EQUAL(aclmdlRIExecuteAsync(other, stream), captured);
    CHECK_EQUAL(aclrtSetStreamOverflowSwitch(stream, 1), captured);
    CHECK_EQUAL(aclmdlRICaptureTaskUpdateBegin(stream, nullptr), captured);
    CHECK_EQUAL(aclmdlRICaptureTaskUpdateEnd(stream), captured);
  }
  CHECK_EQUAL(aclrtSynchronizeDevice(), captured);
  CHECK_EQUAL(aclrtSynchronizeDeviceWithTimeout(1), captured);

  float ms = 0;
  uint64_t microseconds = 0;
  aclrtEventRecordedStatus recorded{};
  const auto event_captured = ACL_ERROR_RT_EVENT_CAPTURED;
  CHECK_EQUAL(aclrtSynchronizeEvent(inside), event_captured);
  CHECK_EQUAL(aclrtSynchronizeEventWithTimeout(inside, 1), event_captured);
  CHECK_EQUAL(aclrtQueryEventStatus(inside, &recorded), event_captured);
  CHECK_EQUAL(aclrtEventElapsedTime(&ms, inside, inside), event_captured);
  CHECK_EQUAL(aclrtEventGetTimestamp(inside, &microseconds), event_captured);
  CHECK_EQUAL(aclrtRecordEvent(inside, nullptr), ACL_ERROR_RT_STREAM_CAPTURE_IMPLICIT);
  CHECK_EQUAL(aclrtStreamWaitEvent(nullptr, inside), ACL_ERROR_RT_STREAM_CAPTURE_IMPLICIT);

  CHECK_EQUAL(aclrtStreamWaitEvent(a, outside), ACL_ERROR_RT_CAPTURE_DEPENDENCY);
  CHECK_OK(aclrtStreamWaitEvent(a, never));
  for (aclrtEvent event : {aclrtEvent{flag}, aclrtEvent{by_default}}) {
    CHECK_EQUAL(aclrtRecordEvent(event, a), ACL_ERROR_RT_FEATURE_NOT_SUPPORT);
    CHECK_EQUAL(aclrtStreamWaitEvent(a, event), ACL_ERROR_RT_FEATURE_NOT_SUPPORT);
    CHECK_EQUAL(aclrtResetEvent(event, a), ACL_ERROR_RT_FEATURE_NOT_SUPPORT);
  }
  CHECK_OK(aclrtRecordEvent(no_sync, a));
  CHECK(reached(no_sync));  // nothing was recorded

  CHECK_EQUAL(aclmdlRICaptureTaskGrpBegin(a), ACL_ERROR_RT_TASK_TYPE_NOT_SUPPORT);
  CHECK_EQUAL(status_of(a), ACL_MODEL_RI_CAPTURE_STATUS_ACTIVE);
  fork(b, a, back);
  aclmdlRI graph = nullptr;
  CHECK_OK(aclmdlRICaptureEnd(a, &graph));
  Graph owner(graph);
  CHECK_OK(aclmdlRIExecuteAsync(graph, a));
  CHECK_OK(aclrtSynchronizeStream(a));
}

TEST(task_groups_need_a_capture) {
  Session session;
  Stream stream;
  aclrtTaskGrp group = nullptr;
  CHECK_EQUAL(aclmdlRICaptureTaskGrpBegin(stream), ACL_ERROR_RT_STREAM_NOT_CAPTURED);
  CHECK_EQUAL(aclmdlRICaptureTaskGrpEnd(stream, &group), ACL_ERROR_STREAM_TASK_GROUP_STATUS);
  CHECK_EQUAL(aclmdlRICaptureTaskUpdateBegin(stream, group), ACL_ERROR_STREAM_TASK_GROUP_STATUS);
}

TEST(external_events_are_captured_as_tasks) {
  Session session;
  Stream stream;
  FlagEvent in(ACL_EVENT_EXTERNAL);
  FlagEvent out(ACL_EVENT_EXTERNAL);
  Graph graph(capture(stream, [&] {
    CHECK_OK(aclrtStreamWaitEvent(stream, in));
    CHECK_OK(aclrtResetEvent(in, stream));
    CHECK_OK(aclrtRecordEvent(out, stream));
  }));
  Stream waiter;
  CHECK_OK(aclrtStreamWaitEvent(waiter, out));
  CHECK_OK(aclrtResetEvent(out, waiter));
  for (int i = 0; i < 2; ++i) {
    CHECK_OK(aclmdlRIExecuteAsync(graph, stream));
    CHECK(blocked(stream));
    if (i == 0) CHECK(blocked(waiter));
    CHECK_OK(aclrtRecordEvent(in, nullptr));
    CHECK_OK(aclrtSynchronizeStream(stream));
    CHECK_OK(aclrtSynchronizeStream(waiter));
  }
}

TEST(pageable_memory_is_refused_on_a_capturing_stream) {
  Session session;
  Stream stream;
  DeviceMemory device(4);
  device.write("....");
  char pageable[4] = {'p', 'a', 'g', 'e'};
  const auto code_of_batch = [&] {
    void* dst = device;
    void* src = pageable;
    size_t bytes = 4;
    size_t index = 0;
    size_t fail_index = 0;
    aclrtMemcpyBatchAttr attr{
        {0, ACL_MEM_LOCATION_TYPE_DEVICE}, {0, ACL_MEM_LOCATION_TYPE_HOST}, {}};
    return aclrtMemcpyBatchAsync(&dst, &bytes, &src, &bytes, 1, &attr, &index, 1, &fail_index,
                                 stream);
  };
  for (const auto mode : {kGlobal, kRelaxed}) {
    CHECK_OK(aclmdlRICaptureBegin(stream, mode));
    with_exchange_mode(mode, [&] {
      CHECK_EQUAL(h2d(device, pageable, 4, stream), ACL_ERROR_RT_PARAM_INVALID);
      CHECK_EQUAL(code_of_batch(), ACL_ERROR_RT_CAPTURE_MODE_NOT_SUPPORT);
    });
    aclmdlRI graph = nullptr;
    CHECK_OK(aclmdlRICaptureEnd(stream, &graph));  // not invalidated
    CHECK_OK(aclmdlRIExecuteAsync(graph, stream));
    CHECK_OK(aclrtSynchronizeStream(stream));
    CHECK_EQUAL(device.read(4), "....");
    CHECK_OK(aclmdlRIDestroy(graph));
  }
  CHECK_OK(code_of_batch());
}

TEST(what_runs_at_once_is_refused_by_mode_and_thread) {
  Session session;
  Stream capturing;
  Stream other;
  DeviceMemory device(4);
  char pageable[4] = {};
  for (const auto capture_mode : {kGlobal, kThreadLocal, kRelaxed}) {
    for (const bool own : {true, false}) {
      for (const auto exchange : {kGlobal, kThreadLocal, kRelaxed}) {
        bool refused = false;
        if (exchange == kGlobal) {
          refused = capture_mode == kGlobal || (own && capture_mode == kThreadLocal);
        } else if (exchange == kThreadLocal) {
          refused = own && capture_mode != kRelaxed;
        }
        CHECK_OK(aclmdlRICaptureBegin(capturing, capture_mode));
        const auto guarded = [&] {
          aclrtSetCurrentContext(session.context);
          with_exchange_mode(exchange, [&] {
            const aclError synchronous =
                refused ? ACL_ERROR_RT_CAPTURE_MODE_NOT_SUPPORT : ACL_SUCCESS;
            CHECK_EQUAL(aclrtMemcpy(device, 4, pageable, 4, ACL_MEMCPY_HOST_TO_DEVICE),
                        synchronous);
            CHECK_EQUAL(aclrtMemset(device, 4, 0, 4), synchronous);
            CHECK_EQUAL(h2d(device, pageable, 4, other),
                        refused ? ACL_ERROR_RT_CAPTURE_MODE_BLOCK_ASYNC : ACL_SUCCESS);
          });
        };
        if (own) {
          guarded();
        } else {
          std::thread(guarded).join();
        }
        aclmdlRI graph = nullptr;
        CHECK_OK(aclmdlRICaptureEnd(capturing, &graph));  // a refused call does not invalidate
        CHECK_OK(aclmdlRIDestroy(graph));
      }
    }
  }
}

TEST(allocation_and_creation_are_free_during_a_capture) {
  Session session;
  Stream capturing;
  Graph graph(capture(capturing, [] {
    DeviceMemory device(64);
    PinnedMemory pinned(64);
    Stream stream;
    Event event;
    CHECK_OK(aclrtSynchronizeStream(stream));
  }));
}

TEST(a_capture_forbids_nothing_in_another_context) {
  Session session;
  Stream capturing;
  DeviceMemory device(4);
  CHECK_OK(aclmdlRICaptureBegin(capturing, kGlobal));
  aclrtContext other = nullptr;
  CHECK_OK(aclrtCreateContext(&other, 0));
  CHECK_OK(aclrtMemset(device, 4, 0, 4));
  CHECK_OK(aclrtSynchronizeDevice());
  CHECK_OK(aclrtSetCurrentContext(session.context));
  aclmdlRI graph = nullptr;
  CHECK_OK(aclmdlRICaptureEnd(capturing, &graph));
  CHECK_OK(aclmdlRIDestroy(graph));
}

TEST(the_exchange_mode_is_per_thread_and_global_at_first) {
  Session session;
  aclmdlRICaptureMode mode = kRelaxed;
  CHECK_OK(aclmdlRICaptureThreadExchangeMode(&mode));
  CHECK_EQUAL(mode, kGlobal);
  aclmdlRICaptureMode other = kThreadLocal;
  std::thread([&] { CHECK_OK(aclmdlRICaptureThreadExchangeMode(&other)); }).join();
  CHECK_EQUAL(other, kGlobal);
  CHECK_OK(aclmdlRICaptureThreadExchangeMode(&mode));
  CHECK_EQUAL(mode, kRelaxed);
  mode = static_cast<aclmdlRICaptureMode>(3);
  CHECK_EQUAL(aclmdlRICaptureThreadExchangeMode(&mode), ACL_ERROR_INVALID_PARAM);
}

TEST(execute_refusals) {
  Session session;
  Stream stream;
  Stream capturing;
  Graph graph(capture(stream, [] {}));
  CHECK_EQUAL(aclmdlRIExecuteAsync(nullptr, stream), ACL_ERROR_INVALID_PARAM);
  CHECK_EQUAL(aclmdlRIExecute(graph, -1), ACL_ERROR_RT_PARAM_INVALID);
  CHECK_OK(aclmdlRICaptureBegin(capturing, kGlobal));
  CHECK_EQUAL(aclmdlRIExecuteAsync(graph_of(capturing), stream), ACL_ERROR_RT_MODEL_CAPTURED);
  CHECK_EQUAL(aclmdlRIDestroy(graph_of(capturing)), ACL_ERROR_RT_MODEL_CAPTURED);
  aclmdlRI ended = nullptr;
  CHECK_OK(aclmdlRICaptureEnd(capturing, &ended));
  CHECK_OK(aclmdlRIDestroy(ended));
  CHECK_EQUAL(aclmdlRIExecuteAsync(ended, stream), ACL_ERROR_RT_INVALID_HANDLE);
  CHECK_EQUAL(aclmdlRIDestroy(ended), ACL_ERROR_RT_INVALID_HANDLE);
  aclrtContext other = nullptr;
  CHECK_OK(aclrtCreateContext(&other, 0));
  CHECK_EQUAL(aclmdlRIExecuteAsync(graph, stream), ACL_ERROR_RT_STREAM_CONTEXT);
  CHECK_EQUAL(aclmdlRIExecuteAsync(graph, nullptr), ACL_ERROR_RT_MODEL_CONTEXT);
  CHECK_OK(aclrtSetCurrentContext(session.context));
}

TEST(destroy_waits_for_replays_up_to_a_limit) {
  Session session;
  StalledStream stream;
  Stream capturing;
  DeviceMemory device(8);
  Graph graph(
      capture(capturing, [&] { CHECK_OK(aclrtMemsetAsync(device, 8, 'g', 8, capturing)); }));
  CHECK_OK(aclmdlRIExecuteAsync(graph, stream));
  npu_sim_set("graph_destroy_wait_ms", 1);
  CHECK_EQUAL(aclmdlRIDestroy(graph), ACL_ERROR_RT_MODEL_RUNNING);
  npu_sim_set("graph_destroy_wait_ms", 60000);
  std::thread destroyer([&] { CHECK_OK(aclmdlRIDestroy(graph.release())); });
  wait_a_while();
  stream.go();
  destroyer.join();
  CHECK_OK(aclrtSynchronizeStream(stream));
  CHECK_EQUAL(device.read(8), "gggggggg");
}

TEST(who_asked_is_told_when_a_graph_is_destroyed) {
  Session session;
  Stream stream;
  static std::vector<int> told;
  told.clear();
  const aclrtCallback first = [](void* argument) { told.push_back(*static_cast<int*>(argument)); };
  const aclrtCallback second = [](void* argument) {
    told.push_back(10 * *static_cast<int*>(argument));
  };
  int numbers[] = {1, 2, 3};

  CHECK_OK(aclmdlRICaptureBegin(stream, kGlobal));
  aclmdlRI graph = graph_of(stream);
  // Already during the capture; a function once, whatever its argument.
  CHECK_OK(aclmdlRIDestroyRegisterCallback(graph, first, &numbers[0]));
  CHECK_EQUAL(aclmdlRIDestroyRegisterCallback(graph, first, &numbers[1]), ACL_ERROR_INVALID_PARAM);
  CHECK_OK(aclmdlRICaptureEnd(stream, &graph));
  CHECK_OK(aclmdlRIDestroyRegisterCallback(graph, second, &numbers[2]));
  CHECK_OK(aclmdlRIExecuteAsync(graph, stream));
  CHECK_OK(aclrtSynchronizeStream(stream));
  CHECK(told.empty());
  CHECK_OK(aclmdlRIDestroy(graph));
  std::sort(told.begin(), told.end());
  CHECK((told == std::vector<int>{1, 30}));

  // Not after it has withdrawn.
  told.clear();
  graph = capture(stream, [] {});
  CHECK_EQUAL(aclmdlRIDestroyUnregisterCallback(graph, first), ACL_ERROR_INVALID_PARAM);
  CHECK_OK(aclmdlRIDestroyRegisterCallback(graph, first, &numbers[0]));
  CHECK_OK(aclmdlRIDestroyUnregisterCallback(graph, first));
  CHECK_OK(aclmdlRIDestroy(graph));
  CHECK(told.empty());

  // A capture that fails destroys its graph too.
  CHECK_OK(aclmdlRICaptureBegin(stream, kGlobal));
  CHECK_OK(aclmdlRIDestroyRegisterCallback(graph_of(stream), first, &numbers[1]));
  npu_sim_set("graph_copies", 1);
  PinnedMemory host(8);
  DeviceMemory device(8);
  CHECK_OK(h2d(device, host, 8, stream));
  CHECK_EQUAL(h2d(device, host, 8, stream), ACL_ERROR_RT_NO_STREAM_RESOURCE);
  CHECK_EQUAL(aclmdlRICaptureEnd(stream, &graph), ACL_ERROR_RT_STREAM_CAPTURE_INVALIDATED);
  CHECK((told == std::vector<int>{2}));
}

TEST(captured_copies_are_limited_per_stream_and_direction) {
  Session session;
  Stream a;
  Stream b;
  Event forked;
  Event back;
  PinnedMemory host(8);
  DeviceMemory device(8);
  npu_sim_set("graph_copies", 2);
  const auto within_limits = [&] {
    fork(a, b, forked);
    for (aclrtStream stream : {aclrtStream{a}, aclrtStream{b}}) {
      for (int i = 0; i < 2; ++i) {
        CHECK_OK(h2d(device, host, 8, stream));
        CHECK_OK(d2h(host, device, 8, stream));
      }
    }
    fork(b, a, back);
  };
  Graph fits(capture(a, within_limits));
  CHECK_OK(aclmdlRICaptureBegin(a, kGlobal));
  within_limits();
  CHECK_EQUAL(d2h(host, device, 8, a), ACL_ERROR_RT_NO_STREAM_RESOURCE);
  CHECK_EQUAL(status_of(a), ACL_MODEL_RI_CAPTURE_STATUS_INVALIDATED);
  aclmdlRI graph = not_null();
  CHECK_EQUAL(aclmdlRICaptureEnd(a, &graph), ACL_ERROR_RT_STREAM_CAPTURE_INVALIDATED);
  CHECK(graph == nullptr);
  for (int i = 0; i < 3; ++i) CHECK_OK(h2d(device, host, 8, a));  // eager copies are not limited
  CHECK_OK(aclrtSynchronizeStream(a));
}

TEST(items_of_a_captured_batch_count_one_by_one) {
  Session session;
  Stream stream;
  PinnedMemory host(3);
  DeviceMemory device(3);
  npu_sim_set("graph_copies", 2);
  void* dsts[3] = {device.data(), device.data() + 1, device.data() + 2};
  void* srcs[3] = {host.data(), host.data() + 1, host.data() + 2};
  size_t sizes[3] = {1, 1, 1};
  size_t index = 0;
  size_t fail_index = 0;
  aclrtMemcpyBatchAttr attr{{0, ACL_MEM_LOCATION_TYPE_DEVICE}, {0, ACL_MEM_LOCATION_TYPE_HOST}, {}};
  const auto batch = [&](size_t count) {
    return aclrtMemcpyBatchAsync(dsts, sizes, srcs, sizes, count, &attr, &index, 1, &fail_index,
                                 stream);
  };
  Graph graph(capture(stream, [&] { CHECK_OK(batch(2)); }));
  CHECK_OK(aclmdlRICaptureBegin(stream, kGlobal));
  CHECK_EQUAL(batch(3), ACL_ERROR_RT_NO_STREAM_RESOURCE);
  aclmdlRI failed = nullptr;
  CHECK_EQUAL(aclmdlRICaptureEnd(stream, &failed), ACL_ERROR_RT_STREAM_CAPTURE_INVALIDATED);
  npu_sim_reset_stats();
  CHECK_OK(aclmdlRIExecuteAsync(graph, stream));
  CHECK_OK(aclrtSynchronizeStream(stream));
  CHECK_EQUAL(stat("copies.h2d"), 2);
}

TEST(memory_freed_before_a_replay_fails_it) {
  Session session;
  Stream stream;
  PinnedMemory host(8);
  void* freed = nullptr;
  CHECK_OK(aclrtMalloc(&freed, 8, 0));
  Graph graph(capture(stream, [&] { CHECK_OK(h2d(freed, host, 8, stream)); }));
  CHECK_OK(aclrtFree(freed));
  CHECK_OK(aclmdlRIExecuteAsync(graph, stream));
  CHECK_EQUAL(aclrtSynchronizeStream(stream), ACL_ERROR_RT_SYS_DMA);
}

TEST(a_failed_task_ends_its_replay_and_frees_the_other_lanes) {
  Session session;
  Stream a;
  Stream b;
  Event forked;
  Event back;
  PinnedMemory host(8);
  DeviceMemory device(8);
  DeviceMemory word(8);
  word.write(std::string(8, '\0'));
  Graph graph(capture(a, [&] {
    fork(a, b, forked);
    CHECK_OK(h2d(device, host, 8, b));
    fork(b, a, back);
    CHECK_OK(aclrtValueWrite(word, 1, 0, a));
  }));
  npu_sim_fail_copy(1, ACL_ERROR_RT_SYS_DMA);
  CHECK_OK(aclmdlRIExecuteAsync(graph, a));
  CHECK_EQUAL(aclrtSynchronizeStream(a), ACL_ERROR_RT_SYS_DMA);
  CHECK_EQUAL(word.read(1), std::string(1, '\0'));
  CHECK_OK(aclmdlRIExecuteAsync(graph, a));
  CHECK_OK(aclrtSynchronizeStream(a));
  CHECK_EQUAL(word.read(1), "\1");
}

TEST(a_replay_needs_neither_the_captured_streams_nor_the_events) {
  Session session;
  DeviceMemory device(1);
  aclmdlRI ended = nullptr;
  {
    Stream a;
    Stream b;
    Event forked;
    Event back;
    ended = capture(a, [&] {
      fork(a, b, forked);
      CHECK_OK(aclrtMemsetAsync(device, 1, 'r', 1, b));
      fork(b, a, back);
    });
  }
  Graph owner(ended);
  CHECK_OK(aclmdlRIExecuteAsync(ended, nullptr));
  CHECK_OK(aclrtSynchronizeStream(nullptr));
  CHECK_EQUAL(device.read(1), "r");
}

TEST(a_blocked_replay_is_given_up_with_its_stream) {
  Session session;
  Stream a;
  Stream b;
  Event forked;
  Event back;
  DeviceMemory word(8);
  word.write(std::string(8, '\0'));
  Graph graph(capture(a, [&] {
    fork(a, b, forked);
    CHECK_OK(aclrtValueWait(word, 1, 1, b));
    fork(b, a, back);
  }));
  aclrtStream target = nullptr;
  CHECK_OK(aclrtCreateStream(&target));
  CHECK_OK(aclmdlRIExecuteAsync(graph, target));
  CHECK(blocked(target));
  CHECK_OK(aclrtDestroyStreamForce(target));
  CHECK_OK(aclmdlRIDestroy(graph.release()));
}

SIMULATOR_TEST_MAIN
