// Events, and value write and wait.
#include "engine/event.h"

#include <chrono>

#include "api/api.h"
#include "engine/context.h"
#include "engine/copy.h"
#include "engine/graph.h"
#include "engine/stream.h"

using namespace npu_kv::sim;

namespace {

constexpr uint32_t kKnownFlags = ACL_EVENT_SYNC | ACL_EVENT_CAPTURE_STREAM_PROGRESS |
                                 ACL_EVENT_TIME_LINE | ACL_EVENT_DEVICE_USE_ONLY |
                                 ACL_EVENT_EXTERNAL | ACL_EVENT_IPC;

[[noreturn]] void unsupported(const std::string& what) {
  throw SimulatorError(ACL_ERROR_RT_FEATURE_NOT_SUPPORT, "EE1003: " + what);
}

void create(aclrtEvent* handle, Event::Kind kind, uint32_t flags) {
  require(handle != nullptr, "event is null");
  if (flags == 0 || (flags & ~kKnownFlags) != 0) {
    throw SimulatorError(ACL_ERROR_RT_PARAM_INVALID,
                         "EE1003: flag is " + std::to_string(flags) +
                             ", allowed are combinations of 0x1, 0x2, 0x8, 0x10, and 0x20 alone");
  }
  const bool external = (flags & ACL_EVENT_EXTERNAL) != 0;
  if (external && (kind != Event::Kind::kFlag || flags != ACL_EVENT_EXTERNAL)) {
    throw SimulatorError(ACL_ERROR_RT_PARAM_INVALID,
                         "EE1003: ACL_EVENT_EXTERNAL stands alone, on aclrtCreateEventWithFlag");
  }
  if ((flags & ACL_EVENT_IPC) != 0) unsupported("IPC events are not simulated");
  Engine& engine = Engine::get();
  Engine::Lock lock(engine.mutex);
  require_context();
  if (static_cast<int64_t>(engine.events.size()) >= engine.settings.max_events) {
    throw SimulatorError(
        ACL_ERROR_RT_NO_EVENT_RESOURCE,
        "EE1023: all " + std::to_string(engine.settings.max_events) + " events are in use");
  }
  auto event = std::make_shared<Event>(kind, flags);
  engine.events[event.get()] = event;
  *handle = event.get();
}

std::shared_ptr<Event> find(Engine& engine, aclrtEvent handle) {
  require(handle != nullptr, "event is null");
  auto found = engine.events.find(handle);
  if (found == engine.events.end()) {
    throw SimulatorError(ACL_ERROR_RT_INVALID_HANDLE, "EE1003: the event handle is not live");
  }
  return found->second;
}

void refuse_captured(const Event& event) {
  if (event.captured_in != nullptr) {
    throw SimulatorError(ACL_ERROR_RT_EVENT_CAPTURED,
                         "EE1016: the event was recorded in a capture that is under way; it can "
                         "neither be synchronised nor queried");
  }
}

bool is_external(const Event& event) { return event.flags == ACL_EVENT_EXTERNAL; }

void refuse_external(const Event& event) {
  if (is_external(event)) {
    unsupported("an ACL_EVENT_EXTERNAL event can neither be synchronised nor queried");
  }
}

bool is_snapshot(const Event& event) { return event.kind == Event::Kind::kSnapshot; }

std::shared_ptr<Record> new_record(Stream& stream) {
  auto record = std::make_shared<Record>();
  record->stream = stream.shared_from_this();
  return record;
}

/// The record, reset and wait of a flag event: the same tasks in a stream and in a graph.
void submit_flag_record(Engine& engine, Stream& stream, std::shared_ptr<Event> event) {
  Task task;
  task.kind = "record";
  task.body = [event](TaskRun& run) {
    Engine& engine = Engine::get();
    Engine::Lock lock(engine.mutex);
    if (!event->flag_set) event->flag_clock = run.clock();
    event->flag_set = true;
    event->flag_ns = run.now_ns;
    engine.changed.notify_all();
  };
  std::shared_ptr<Record> record;
  if (stream.capture == nullptr) task.record = record = new_record(stream);
  submit_locked(engine, stream, std::move(task));
  if (record) event->latest = std::move(record);
}

void submit_flag_wait(Engine& engine, Stream& stream, std::shared_ptr<Event> event) {
  Task task;
  task.kind = "wait";
  task.body = [event](TaskRun& run) {
    Engine& engine = Engine::get();
    Engine::Lock lock(engine.mutex);
    wait_in_task(lock, engine, run, [&] { return event->flag_set; });
    run.reach(event->flag_ns);
    run.happens_after(event->flag_clock);
  };
  submit_locked(engine, stream, std::move(task));
}

void submit_record_wait(Engine& engine, Stream& stream, std::shared_ptr<Record> record) {
  Task task;
  task.kind = "wait";
  task.body = [record = std::move(record)](TaskRun& run) {
    Engine& engine = Engine::get();
    Engine::Lock lock(engine.mutex);
    wait_in_task(lock, engine, run, [&] { return record->done; });
    run.reach(record->time_ns);
    run.happens_after(record->clock);
  };
  submit_locked(engine, stream, std::move(task));
}

void submit_flag_reset(Engine& engine, Stream& stream, std::shared_ptr<Event> event) {
  Task task;
  task.kind = "reset";
  task.body = [event](TaskRun&) {
    Engine& engine = Engine::get();
    Engine::Lock lock(engine.mutex);
    event->flag_set = false;
  };
  submit_locked(engine, stream, std::move(task));
}

void refuse_flag_event_under_capture(const Event& event, const Stream& stream) {
  if (stream.capture != nullptr && !is_external(event)) {
    unsupported("a capturing stream takes Ex events and ACL_EVENT_EXTERNAL events only");
  }
}

void record(Engine& engine, Stream& stream, std::shared_ptr<Event> event) {
  if (!is_snapshot(*event)) {
    refuse_flag_event_under_capture(*event, stream);
    submit_flag_record(engine, stream, std::move(event));
    return;
  }
  if (stream.capture != nullptr) {
    if ((event->flags & ACL_EVENT_SYNC) == 0) return;
    if (event->captured_in != nullptr && event->captured_in != stream.capture) {
      event->captured_in->state = stream.capture->state = Graph::State::kInvalidated;
      throw SimulatorError(ACL_ERROR_STREAM_CAPTURE_CONFLICT,
                           "EE1016: the event belongs to another capture");
    }
    stream.capture->add_record(stream.lane, *event);
    return;
  }
  if (event->captured_in != nullptr && &stream == stream.context.default_stream.get()) {
    throw SimulatorError(ACL_ERROR_RT_STREAM_CAPTURE_IMPLICIT,
                         "EE1016: a captured event cannot be used on the default stream");
  }
  auto record = new_record(stream);
  Task task;
  task.kind = "record";
  task.body = [](TaskRun&) {};
  task.record = record;
  submit_locked(engine, stream, std::move(task));
  event->captured_in = nullptr;
  event->latest = std::move(record);
}

void wait_for_captured(Engine& engine, Stream& stream, const Event& event) {
  Graph& graph = *event.captured_in;
  graph.require_valid();
  if (stream.capture == nullptr) {
    if (&stream == stream.context.default_stream.get()) {
      throw SimulatorError(ACL_ERROR_RT_STREAM_CAPTURE_IMPLICIT,
                           "EE1016: a captured event cannot be used on the default stream");
    }
    graph.add_lane(engine.streams.at(&stream));
  } else if (stream.capture != &graph) {
    graph.state = stream.capture->state = Graph::State::kInvalidated;
    throw SimulatorError(ACL_ERROR_STREAM_CAPTURE_CONFLICT,
                         "EE1016: the event belongs to another capture than the stream");
  }
  graph.add_wait(stream.lane, event);
}

void wait(Engine& engine, Stream& stream, std::shared_ptr<Event> event) {
  if (!is_snapshot(*event)) {
    if (event->kind == Event::Kind::kFlag && !is_external(*event) &&
        (event->flags & ACL_EVENT_SYNC) == 0) {
      unsupported("a stream can wait only for events with ACL_EVENT_SYNC");
    }
    refuse_flag_event_under_capture(*event, stream);
    if (event->kind == Event::Kind::kFlag) {
      submit_flag_wait(engine, stream, std::move(event));
      return;
    }
    if (!event->latest) {
      throw SimulatorError(ACL_ERROR_RT_PARAM_INVALID,
                           "EE1018: the event was not recorded before the wait");
    }
    submit_record_wait(engine, stream, event->latest);
    return;
  }
  if ((event->flags & ACL_EVENT_SYNC) == 0) {
    unsupported("a stream can wait only for events with ACL_EVENT_SYNC");
  }
  if (event->captured_in != nullptr) {
    wait_for_captured(engine, stream, *event);
    return;
  }
  if (!event->latest) return;
  if (stream.capture != nullptr) {
    throw SimulatorError(ACL_ERROR_RT_CAPTURE_DEPENDENCY,
                         "EE1016: a capturing stream cannot wait for a record outside the capture");
  }
  if (event->latest->stream.lock().get() == &stream) return;
  // The runtime leaves the task out when the record is complete; here it stays, because complete in
  // real time is not the same as complete on the virtual clock.
  submit_record_wait(engine, stream, event->latest);
}

/// For the calls that tell the host so.
bool complete(Engine& engine, const Event& event) {
  if (!event.latest) return is_snapshot(event);
  if (event.latest->done) engine.races.host_saw(event.latest->clock);
  return event.latest->done;
}

void synchronize(aclrtEvent handle, int32_t timeout_ms) {
  check_timeout(timeout_ms);
  Engine& engine = Engine::get();
  Engine::Lock lock(engine.mutex);
  auto event = find(engine, handle);
  refuse_external(*event);
  refuse_captured(*event);
  auto record = event->latest;
  if (!record) return;
  auto stream = record->stream.lock();  // null once it is destroyed, its work is over then
  const auto ready = [&] {
    return record->done || engine.exiting || (stream && stream->context.failure);
  };
  if (timeout_ms < 0) {
    engine.changed.wait(lock, ready);
  } else if (!engine.changed.wait_for(lock, std::chrono::milliseconds(timeout_ms), ready)) {
    throw SimulatorError(
        ACL_ERROR_RT_EVENT_SYNC_TIMEOUT,
        "EE1002: the event was not reached after " + std::to_string(timeout_ms) + " ms");
  }
  engine.host_reaches(record->time_ns);
  engine.races.host_saw(record->clock);
  if (stream) report_failure(*stream);
  throw_if(record->failure);
}

const Record& finished_record(Engine& engine, const Event& event) {
  refuse_external(event);
  refuse_captured(event);
  if (!event.latest || !event.latest->done || event.latest->failure) {
    throw SimulatorError(ACL_ERROR_RT_INTERNAL_ERROR, "EE9999: the event was not recorded");
  }
  if (event.kind != Event::Kind::kDefault && (event.flags & ACL_EVENT_TIME_LINE) == 0) {
    throw SimulatorError(ACL_ERROR_RT_EVENT_TIMESTAMP_INVALID,
                         "EE1003: the event was created without ACL_EVENT_TIME_LINE");
  }
  engine.races.host_saw(event.latest->clock);
  return *event.latest;
}

using Word = std::atomic<int64_t>;

/// The 64-bit word of device memory at `address`, and what keeps it mapped.
Location locate_word(void* address) {
  const Location word = Engine::get().memory.locate(address, sizeof(int64_t), "devAddr");
  if (word.place != Place::kDevice || reinterpret_cast<uintptr_t>(address) % 8 != 0) {
    throw SimulatorError(ACL_ERROR_RT_PARAM_INVALID,
                         "EE1003: devAddr has to be an 8-byte aligned address of device memory");
  }
  return word;
}

Word& word_at(const Location& location) { return *reinterpret_cast<Word*>(location.storage); }

/// With mutex held.
WordWrite& last_write(const Location& location) {
  Allocation& allocation = *location.allocation;
  return allocation.words_written[location.storage - allocation.storage];
}

bool satisfied(int64_t word, uint64_t value, uint32_t flag) {
  const auto bits = static_cast<uint64_t>(word);
  switch (flag) {
    case 0:  // GEQ
      return static_cast<int64_t>(bits - value) >= 0;
    case 1:  // EQ
      return bits == value;
    case 2:  // AND
      return (bits & value) != 0;
    default:  // NOR
      return ~(bits | value) != 0;
  }
}

}  // namespace

NPU_SIM_EXPORT aclError aclrtCreateEvent(aclrtEvent* event) {
  return NPU_SIM_CALL(
      [&] { create(event, Event::Kind::kDefault, ACL_EVENT_SYNC | ACL_EVENT_TIME_LINE); });
}

NPU_SIM_EXPORT aclError aclrtCreateEventWithFlag(aclrtEvent* event, uint32_t flags) {
  return NPU_SIM_CALL([&] { create(event, Event::Kind::kFlag, flags); });
}

NPU_SIM_EXPORT aclError aclrtCreateEventExWithFlag(aclrtEvent* event, uint32_t flags) {
  return NPU_SIM_CALL([&] { create(event, Event::Kind::kSnapshot, flags); });
}

NPU_SIM_EXPORT aclError aclrtDestroyEvent(aclrtEvent handle) {
  return NPU_SIM_CALL([&] {
    Engine& engine = Engine::get();
    Engine::Lock lock(engine.mutex);
    find(engine, handle);
    engine.events.erase(handle);  // tasks that still use it hold it
  });
}

NPU_SIM_EXPORT aclError aclrtRecordEvent(aclrtEvent handle, aclrtStream stream) {
  return NPU_SIM_CALL([&] {
    Engine& engine = Engine::get();
    Engine::Lock lock(engine.mutex);
    auto event = find(engine, handle);
    record(engine, *resolve_stream_locked(engine, stream), std::move(event));
  });
}

NPU_SIM_EXPORT aclError aclrtResetEvent(aclrtEvent handle, aclrtStream handle_stream) {
  return NPU_SIM_CALL([&] {
    Engine& engine = Engine::get();
    Engine::Lock lock(engine.mutex);
    auto event = find(engine, handle);
    if (is_snapshot(*event)) unsupported("an Ex event is not reset");
    auto stream = resolve_stream_locked(engine, handle_stream);
    refuse_flag_event_under_capture(*event, *stream);
    submit_flag_reset(engine, *stream, std::move(event));
  });
}

NPU_SIM_EXPORT aclError aclrtStreamWaitEvent(aclrtStream stream, aclrtEvent handle) {
  return NPU_SIM_CALL([&] {
    Engine& engine = Engine::get();
    Engine::Lock lock(engine.mutex);
    auto event = find(engine, handle);
    wait(engine, *resolve_stream_locked(engine, stream), std::move(event));
  });
}

NPU_SIM_EXPORT aclError aclrtSynchronizeEvent(aclrtEvent event) {
  return NPU_SIM_CALL([&] { synchronize(event, -1); });
}

NPU_SIM_EXPORT aclError aclrtSynchronizeEventWithTimeout(aclrtEvent event, int32_t timeout_ms) {
  return NPU_SIM_CALL([&] { synchronize(event, timeout_ms); });
}

NPU_SIM_EXPORT aclError aclrtQueryEvent(aclrtEvent handle, aclrtEventStatus* status) {
  return NPU_SIM_CALL([&] {
    require(status != nullptr, "status is null");
    Engine& engine = Engine::get();
    Engine::Lock lock(engine.mutex);
    auto event = find(engine, handle);
    if (is_snapshot(*event)) unsupported("aclrtQueryEvent of an Ex event");
    refuse_external(*event);
    refuse_captured(*event);
    *status = complete(engine, *event) ? ACL_EVENT_STATUS_COMPLETE : ACL_EVENT_STATUS_NOT_READY;
  });
}

NPU_SIM_EXPORT aclError aclrtQueryEventStatus(aclrtEvent handle, aclrtEventRecordedStatus* status) {
  return NPU_SIM_CALL([&] {
    require(status != nullptr, "status is null");
    Engine& engine = Engine::get();
    Engine::Lock lock(engine.mutex);
    auto event = find(engine, handle);
    refuse_external(*event);
    refuse_captured(*event);
    *status = complete(engine, *event) ? ACL_EVENT_RECORDED_STATUS_COMPLETE
                                       : ACL_EVENT_RECORDED_STATUS_NOT_READY;
  });
}

NPU_SIM_EXPORT aclError aclrtQueryEventWaitStatus(aclrtEvent handle, aclrtEventWaitStatus* status) {
  return NPU_SIM_CALL([&] {
    require(status != nullptr, "status is null");
    Engine& engine = Engine::get();
    Engine::Lock lock(engine.mutex);
    auto event = find(engine, handle);
    if (is_snapshot(*event)) unsupported("aclrtQueryEventWaitStatus of an Ex event");
    refuse_external(*event);
    refuse_captured(*event);
    *status =
        complete(engine, *event) ? ACL_EVENT_WAIT_STATUS_COMPLETE : ACL_EVENT_WAIT_STATUS_NOT_READY;
  });
}

NPU_SIM_EXPORT aclError aclrtEventElapsedTime(float* ms, aclrtEvent start, aclrtEvent end) {
  return NPU_SIM_CALL([&] {
    require(ms != nullptr, "ms is null");
    Engine& engine = Engine::get();
    Engine::Lock lock(engine.mutex);
    auto first = find(engine, start);
    auto last = find(engine, end);
    const int64_t elapsed =
        finished_record(engine, *last).time_ns - finished_record(engine, *first).time_ns;
    if (elapsed < 0) {
      throw SimulatorError(ACL_ERROR_RT_EVENT_TIMESTAMP_REVERSAL,
                           "EE1003: the end event was reached before the start event");
    }
    *ms = static_cast<float>(static_cast<double>(elapsed) / 1e6);
  });
}

NPU_SIM_EXPORT aclError aclrtEventGetTimestamp(aclrtEvent handle, uint64_t* microseconds) {
  return NPU_SIM_CALL([&] {
    require(microseconds != nullptr, "timestamp is null");
    Engine& engine = Engine::get();
    Engine::Lock lock(engine.mutex);
    auto event = find(engine, handle);
    *microseconds = static_cast<uint64_t>(finished_record(engine, *event).time_ns / 1000);
  });
}

NPU_SIM_EXPORT aclError aclrtValueWrite(void* address, uint64_t value, uint32_t flag,
                                        aclrtStream stream) {
  return NPU_SIM_CALL([&] {
    require(address != nullptr, "devAddr is null");
    require(flag == 0, "flag is " + std::to_string(flag) + ", allowed is 0");
    Task task;
    task.kind = "value_write";
    task.bytes = sizeof(int64_t);
    task.body = [word = locate_word(address), value](TaskRun& run) {
      Engine& engine = Engine::get();
      Engine::Lock lock(engine.mutex);
      check_live(word.allocation);
      WordWrite& write = last_write(word);
      // Who waits for this value may have gone on at the first write of it.
      if (word_at(word).exchange(static_cast<int64_t>(value)) != static_cast<int64_t>(value)) {
        write.clock = run.clock();
      }
      write.time_ns = run.now_ns;
      engine.changed.notify_all();
    };
    submit(*resolve_stream(stream), std::move(task));
  });
}

NPU_SIM_EXPORT aclError aclrtValueWait(void* address, uint64_t value, uint32_t flag,
                                       aclrtStream stream) {
  return NPU_SIM_CALL([&] {
    require(address != nullptr, "devAddr is null");
    if (flag > 3) {
      throw SimulatorError(ACL_ERROR_RT_PARAM_INVALID,
                           "EE1003: flag is " + std::to_string(flag) + ", allowed are 0 to 3");
    }
    Task task;
    task.kind = "value_wait";
    task.bytes = sizeof(int64_t);
    task.body = [word = locate_word(address), value, flag](TaskRun& run) {
      Engine& engine = Engine::get();
      Engine::Lock lock(engine.mutex);
      wait_in_task(lock, engine, run, [&] {
        return !word.allocation->live || satisfied(word_at(word).load(), value, flag);
      });
      check_live(word.allocation);
      const WordWrite& write = last_write(word);
      run.reach(write.time_ns);
      run.happens_after(write.clock);
      if (run.order) engine.races.saw_word(*run.order, word.storage);
    };
    submit(*resolve_stream(stream), std::move(task));
  });
}
