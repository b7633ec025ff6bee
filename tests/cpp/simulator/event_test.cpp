// Events of the three kinds: aclrtCreateEventExWithFlag (Ex), aclrtCreateEventWithFlag (a flag that
// records set and resets clear; with ACL_EVENT_EXTERNAL: external), aclrtCreateEvent (default).
#include "simulator/fixture.h"

namespace {

/// Words of device memory through which a test sees and steers what its streams do.
class Words {
 public:
  explicit Words(int count) : memory_(8 * static_cast<size_t>(count)) {
    CHECK_OK(aclrtMemset(memory_, memory_.bytes, 0, memory_.bytes));
  }
  void* operator[](int i) const { return memory_.data() + 8 * i; }
  int64_t value(int i) const {
    int64_t word = 0;
    CHECK_OK(aclrtMemcpy(&word, 8, (*this)[i], 8, ACL_MEMCPY_DEVICE_TO_HOST));
    return word;
  }

 private:
  DeviceMemory memory_;
};

}  // namespace

TEST(a_wait_holds_the_stream_until_the_record) {
  Session session;
  Event snapshot;
  FlagEvent flag(ACL_EVENT_SYNC);
  FlagEvent external(ACL_EVENT_EXTERNAL);
  DefaultEvent by_default;
  for (aclrtEvent event :
       {aclrtEvent{snapshot}, aclrtEvent{flag}, aclrtEvent{external}, aclrtEvent{by_default}}) {
    StalledStream recorder;
    Stream waiter;
    CHECK_OK(aclrtRecordEvent(event, recorder));
    CHECK_OK(aclrtStreamWaitEvent(waiter, event));
    CHECK(blocked(waiter));
    recorder.go();
    CHECK_OK(aclrtSynchronizeStream(waiter));
  }
}

TEST(waiting_before_any_record) {
  Session session;
  Stream waiter;
  Stream recorder;
  Event snapshot;
  CHECK_OK(aclrtStreamWaitEvent(waiter, snapshot));
  CHECK_OK(aclrtSynchronizeStream(waiter));  // no task at all
  DefaultEvent by_default;
  CHECK_EQUAL(aclrtStreamWaitEvent(waiter, by_default), ACL_ERROR_RT_PARAM_INVALID);
  CHECK(contains(last_message(), "EE1018"));
  for (const uint32_t flags : {ACL_EVENT_SYNC, ACL_EVENT_EXTERNAL}) {
    FlagEvent flag(flags);
    CHECK_OK(aclrtStreamWaitEvent(waiter, flag));
    CHECK(blocked(waiter));
    CHECK_OK(aclrtRecordEvent(flag, recorder));
    CHECK_OK(aclrtSynchronizeStream(waiter));
  }
}

TEST(ex_waits_keep_the_record_they_found) {
  Session session;
  Stream first;
  StalledStream second;
  Stream waiter;
  Words words(1);
  Event event;
  CHECK_OK(aclrtValueWait(words[0], 1, 1, first));
  CHECK_OK(aclrtRecordEvent(event, first));
  CHECK_OK(aclrtStreamWaitEvent(waiter, event));
  CHECK_OK(aclrtRecordEvent(event, second));  // replaces the record, not the wait's
  CHECK(blocked(waiter));
  Stream releaser;
  CHECK_OK(aclrtValueWrite(words[0], 1, 0, releaser));
  CHECK_OK(aclrtSynchronizeStream(waiter));
  CHECK(!reached(event));  // queries see the latest record
  CHECK_OK(aclrtStreamWaitEvent(waiter, event));
  CHECK(blocked(waiter));
  second.go();
  CHECK_OK(aclrtSynchronizeStream(waiter));
  CHECK(reached(event));
}

TEST(default_events_follow_their_latest_record_without_a_reset) {
  Session session;
  Stream recorder;
  Stream waiter;
  DefaultEvent event;
  CHECK_OK(aclrtRecordEvent(event, recorder));
  CHECK_OK(aclrtSynchronizeEvent(event));
  CHECK_OK(npu_sim_stall(recorder));
  CHECK_OK(aclrtRecordEvent(event, recorder));
  CHECK_OK(aclrtStreamWaitEvent(waiter, event));
  CHECK(blocked(waiter));
  CHECK_OK(npu_sim_release(recorder));
  CHECK_OK(aclrtSynchronizeStream(waiter));
  CHECK_OK(aclrtResetEvent(event, recorder));
}

TEST(flag_events_stay_set_until_a_reset) {
  Session session;
  Stream stream;
  Stream waiter;
  FlagEvent event(ACL_EVENT_SYNC);
  CHECK_OK(aclrtRecordEvent(event, stream));
  CHECK_OK(aclrtSynchronizeStream(stream));
  for (int i = 0; i < 2; ++i) {
    CHECK_OK(aclrtStreamWaitEvent(waiter, event));
    CHECK_OK(aclrtSynchronizeStream(waiter));
  }
  CHECK_OK(aclrtResetEvent(event, stream));
  CHECK_OK(aclrtSynchronizeStream(stream));
  CHECK_OK(aclrtStreamWaitEvent(waiter, event));
  CHECK(blocked(waiter));
  CHECK_OK(aclrtRecordEvent(event, stream));
  CHECK_OK(aclrtSynchronizeStream(waiter));
}

TEST(waiting_on_the_recording_stream_is_free_for_ex_events) {
  Session session;
  Stream stream;
  Event event;
  CHECK_OK(aclrtRecordEvent(event, stream));
  CHECK_OK(aclrtSynchronizeStream(stream));
  npu_sim_timeline_start();
  CHECK_OK(aclrtStreamWaitEvent(stream, event));
  CHECK_OK(aclrtSynchronizeStream(stream));
  CHECK_EQUAL(take_text(npu_sim_timeline_stop()), "[]");
  FlagEvent flag(ACL_EVENT_SYNC);
  CHECK_OK(aclrtRecordEvent(flag, stream));
  CHECK_OK(aclrtSynchronizeStream(stream));
  npu_sim_timeline_start();
  CHECK_OK(aclrtStreamWaitEvent(stream, flag));
  CHECK_OK(aclrtSynchronizeStream(stream));
  CHECK(contains(take_text(npu_sim_timeline_stop()), "\"wait\""));
}

TEST(query_before_at_and_after_the_record) {
  Session session;
  Event snapshot;
  FlagEvent flag(ACL_EVENT_SYNC);
  DefaultEvent by_default;
  aclrtEventRecordedStatus recorded{};
  // Never recorded: an Ex event counts as reached, the others do not. Recorded COMPLETE is 1.
  CHECK_OK(aclrtQueryEventStatus(snapshot, &recorded));
  CHECK_EQUAL(static_cast<int>(recorded), 1);
  CHECK_OK(aclrtQueryEventStatus(flag, &recorded));
  CHECK_EQUAL(static_cast<int>(recorded), 0);
  CHECK_OK(aclrtQueryEventStatus(by_default, &recorded));
  CHECK_EQUAL(static_cast<int>(recorded), 0);
  for (aclrtEvent event : {aclrtEvent{flag}, aclrtEvent{by_default}, aclrtEvent{snapshot}}) {
    StalledStream stream;
    CHECK_OK(aclrtRecordEvent(event, stream));
    CHECK(!reached(event));
    // COMPLETE is 0 for the other two queries.
    aclrtEventStatus status{};
    aclrtEventWaitStatus wait_status{};
    if (event != snapshot) {
      CHECK_OK(aclrtQueryEvent(event, &status));
      CHECK_EQUAL(static_cast<int>(status), 1);
      CHECK_OK(aclrtQueryEventWaitStatus(event, &wait_status));
      CHECK_EQUAL(static_cast<int>(wait_status), 1);
    }
    stream.go();
    CHECK_OK(aclrtSynchronizeEvent(event));
    CHECK(reached(event));
    if (event != snapshot) {
      CHECK_OK(aclrtQueryEvent(event, &status));
      CHECK_EQUAL(static_cast<int>(status), 0);
      CHECK_OK(aclrtQueryEventWaitStatus(event, &wait_status));
      CHECK_EQUAL(static_cast<int>(wait_status), 0);
    }
  }
}

TEST(synchronise_waits_for_the_record) {
  Session session;
  StalledStream stream;
  Words words(1);
  Event event;
  CHECK_OK(aclrtSynchronizeEvent(event));  // never recorded
  CHECK_OK(aclrtValueWrite(words[0], 7, 0, stream));
  CHECK_OK(aclrtRecordEvent(event, stream));
  CHECK_OK(aclrtValueWait(words[0], 8, 1, stream));  // work after the record does not matter
  CHECK_EQUAL(aclrtSynchronizeEventWithTimeout(event, 1), ACL_ERROR_RT_EVENT_SYNC_TIMEOUT);
  CHECK_EQUAL(aclrtSynchronizeEventWithTimeout(event, 0), ACL_ERROR_RT_PARAM_INVALID);
  CHECK_EQUAL(aclrtSynchronizeEventWithTimeout(event, -2), ACL_ERROR_RT_PARAM_INVALID);
  stream.go();
  CHECK_OK(aclrtSynchronizeEventWithTimeout(event, -1));
  CHECK_EQUAL(words.value(0), 7);
  Stream releaser;
  CHECK_OK(aclrtValueWrite(words[0], 8, 0, releaser));
}

TEST(what_a_kind_does_not_support) {
  Session session;
  Stream stream;
  aclrtEventStatus status{};
  aclrtEventRecordedStatus recorded{};
  aclrtEventWaitStatus wait_status{};
  float ms = 0;
  uint64_t microseconds = 0;
  const auto no = ACL_ERROR_RT_FEATURE_NOT_SUPPORT;
  Event snapshot;
  CHECK_EQUAL(aclrtResetEvent(snapshot, stream), no);
  CHECK_EQUAL(aclrtQueryEvent(snapshot, &status), no);
  CHECK_EQUAL(aclrtQueryEventWaitStatus(snapshot, &wait_status), no);
  Event no_sync(ACL_EVENT_CAPTURE_STREAM_PROGRESS);
  CHECK_OK(aclrtRecordEvent(no_sync, stream));
  CHECK_EQUAL(aclrtStreamWaitEvent(stream, no_sync), no);
  FlagEvent flag_no_sync(ACL_EVENT_TIME_LINE);
  CHECK_OK(aclrtRecordEvent(flag_no_sync, stream));
  CHECK_EQUAL(aclrtStreamWaitEvent(stream, flag_no_sync), no);
  FlagEvent external(ACL_EVENT_EXTERNAL);
  CHECK_OK(aclrtRecordEvent(external, stream));
  CHECK_EQUAL(aclrtSynchronizeEvent(external), no);
  CHECK_EQUAL(aclrtQueryEventStatus(external, &recorded), no);
  CHECK_EQUAL(aclrtQueryEvent(external, &status), no);
  CHECK_EQUAL(aclrtEventElapsedTime(&ms, external, external), no);
  CHECK_EQUAL(aclrtEventGetTimestamp(external, &microseconds), no);
}

TEST(flags_are_checked) {
  Session session;
  aclrtEvent event = nullptr;
  CHECK_EQUAL(aclrtCreateEventExWithFlag(&event, 0), ACL_ERROR_RT_PARAM_INVALID);
  CHECK_EQUAL(aclrtCreateEventWithFlag(&event, 0), ACL_ERROR_RT_PARAM_INVALID);
  CHECK_EQUAL(aclrtCreateEventWithFlag(&event, 0x80), ACL_ERROR_RT_PARAM_INVALID);
  CHECK_EQUAL(aclrtCreateEventWithFlag(&event, ACL_EVENT_EXTERNAL | ACL_EVENT_SYNC),
              ACL_ERROR_RT_PARAM_INVALID);
  CHECK_EQUAL(aclrtCreateEventExWithFlag(&event, ACL_EVENT_EXTERNAL), ACL_ERROR_RT_PARAM_INVALID);
  CHECK_EQUAL(aclrtCreateEventExWithFlag(&event, ACL_EVENT_IPC), ACL_ERROR_RT_FEATURE_NOT_SUPPORT);
  CHECK_EQUAL(aclrtCreateEvent(nullptr), ACL_ERROR_INVALID_PARAM);
}

TEST(elapsed_time_needs_records_and_timestamps) {
  Session session;
  Stream stream;
  StalledStream held;
  const uint32_t timed = ACL_EVENT_SYNC | ACL_EVENT_TIME_LINE;
  Event start(timed);
  Event end(timed);
  Event untimed;
  DefaultEvent by_default;
  float ms = -1;
  CHECK_OK(aclrtRecordEvent(start, stream));
  CHECK_OK(aclrtSynchronizeEvent(start));
  CHECK_EQUAL(aclrtEventElapsedTime(&ms, start, end), ACL_ERROR_RT_INTERNAL_ERROR);
  CHECK_OK(aclrtRecordEvent(end, held));
  CHECK_EQUAL(aclrtEventElapsedTime(&ms, start, end), ACL_ERROR_RT_INTERNAL_ERROR);
  held.go();
  DeviceMemory device(1);
  CHECK_OK(aclrtMemsetAsync(device, 1, 0, 1, stream));
  CHECK_OK(aclrtRecordEvent(end, stream));
  CHECK_OK(aclrtRecordEvent(untimed, stream));
  CHECK_OK(aclrtRecordEvent(by_default, stream));
  CHECK_OK(aclrtSynchronizeStream(stream));
  CHECK_OK(aclrtEventElapsedTime(&ms, start, end));
  CHECK(ms > 0);
  CHECK_OK(aclrtEventElapsedTime(&ms, start, by_default));
  CHECK_EQUAL(aclrtEventElapsedTime(&ms, end, start), ACL_ERROR_RT_EVENT_TIMESTAMP_REVERSAL);
  CHECK_EQUAL(aclrtEventElapsedTime(&ms, start, untimed), ACL_ERROR_RT_EVENT_TIMESTAMP_INVALID);
  uint64_t microseconds = 0;
  CHECK_EQUAL(aclrtEventGetTimestamp(untimed, &microseconds), ACL_ERROR_RT_EVENT_TIMESTAMP_INVALID);
  CHECK_OK(aclrtEventGetTimestamp(end, &microseconds));
}

TEST(events_are_limited_and_die_with_their_handle) {
  Session session;
  npu_sim_set("max_events", stat("live.events") + 1);
  aclrtEvent dead = nullptr;
  {
    Event only;
    aclrtEvent one_more = nullptr;
    CHECK_EQUAL(aclrtCreateEventExWithFlag(&one_more, 1), ACL_ERROR_RT_NO_EVENT_RESOURCE);
    CHECK_EQUAL(aclrtCreateEvent(&one_more), ACL_ERROR_RT_NO_EVENT_RESOURCE);
    dead = only;
  }
  Stream stream;
  CHECK_EQUAL(aclrtRecordEvent(dead, stream), ACL_ERROR_RT_INVALID_HANDLE);
  CHECK_EQUAL(aclrtDestroyEvent(dead), ACL_ERROR_RT_INVALID_HANDLE);
  CHECK_EQUAL(aclrtDestroyEvent(nullptr), ACL_ERROR_INVALID_PARAM);
  Event again;
}

TEST(events_may_be_destroyed_before_they_are_reached) {
  Session session;
  StalledStream recorder;
  Stream waiter;
  Words words(1);
  for (const bool ex : {true, false}) {
    aclrtEvent event = nullptr;
    CHECK_OK(ex ? aclrtCreateEventExWithFlag(&event, ACL_EVENT_SYNC)
                : aclrtCreateEventWithFlag(&event, ACL_EVENT_SYNC));
    CHECK_OK(aclrtValueWrite(words[0], ex ? 1 : 2, 0, recorder));
    CHECK_OK(aclrtRecordEvent(event, recorder));
    CHECK_OK(aclrtStreamWaitEvent(waiter, event));
    CHECK_OK(aclrtDestroyEvent(event));
  }
  CHECK(blocked(waiter));
  recorder.go();
  CHECK_OK(aclrtSynchronizeStream(waiter));
  CHECK_EQUAL(words.value(0), 2);
}

TEST(a_record_whose_stream_is_gone_is_not_taken_for_one_of_a_new_stream) {
  Session session;
  Event event;
  float unused = 0;
  {
    Stream stream;
    CHECK_OK(aclrtRecordEvent(event, stream));
  }
  CHECK_OK(aclrtSynchronizeEvent(event));
  // The new stream probably lies where the old one was. Its wait has to be a task all the same.
  Stream stream;
  npu_sim_timeline_start();
  CHECK_OK(aclrtStreamWaitEvent(stream, event));
  CHECK_OK(aclrtSynchronizeStream(stream));
  CHECK(contains(take_text(npu_sim_timeline_stop()), "\"wait\""));
  CHECK_EQUAL(aclrtEventElapsedTime(&unused, event, event), ACL_ERROR_RT_EVENT_TIMESTAMP_INVALID);
}

SIMULATOR_TEST_MAIN
