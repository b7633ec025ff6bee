#include "engine/stream.h"

#include <chrono>
#include <exception>

#include "engine/context.h"
#include "engine/event.h"
#include "engine/graph.h"

namespace npu_kv::sim {
namespace {

void complete(Record& record, int64_t time_ns, const ClockRef& clock, const Failure& failure) {
  record.done = true;
  record.time_ns = time_ns;
  record.clock = clock;
  record.failure = failure;
}

bool given_up(const Engine& engine, const Stream& stream) {
  return engine.exiting || stream.discarding || stream.context.failure;
}

}  // namespace

void Stream::enqueue(Task task) {
  if (!worker_.joinable()) {
    worker_ = std::thread([self = shared_from_this()] { self->run_worker(); });
    ++Engine::get().live_threads;
  }
  queue.push_back(std::move(task));
  ++submitted;
  work.notify_one();
}

void Stream::join() {
  Engine& engine = Engine::get();
  std::thread worker;
  {
    Engine::Lock lock(engine.mutex);
    work.notify_all();
    engine.changed.notify_all();
    worker.swap(worker_);
  }
  if (worker.joinable()) worker.join();
}

void Stream::leave_worker() {
  work.notify_all();
  if (worker_.joinable()) worker_.detach();
}

void Stream::run_worker() {
  Engine& engine = Engine::get();
  Engine::Lock lock(engine.mutex);
  current_context() = &context;
  for (;;) {
    work.wait(lock, [&] { return retired || engine.exiting || (!queue.empty() && stalls == 0); });
    if (queue.empty()) break;
    Task task = std::move(queue.front());
    queue.pop_front();
    run_task(lock, std::move(task));
    engine.changed.notify_all();
  }
  --engine.live_threads;
  engine.changed.notify_all();
}

void Stream::run_task(Engine::Lock& lock, Task task) {
  Engine& engine = Engine::get();
  TaskRun run{*this, nullptr, std::max(now_ns, task.submitted_ns)};
  const int64_t start_ns = run.now_ns;
  if (task.origin) run.order = engine.races.begin(*this, task);
  Failure outcome;
  bool ran = false;
  const bool drop = given_up(engine, *this);
  lock.unlock();
  if (!drop) {
    try {
      task.body(run);
      ran = true;
    } catch (const SimulatorError& error) {
      outcome = error.failure();
    } catch (const Abandoned&) {
    } catch (const std::exception& error) {
      outcome = {ACL_ERROR_RT_INTERNAL_ERROR, std::string("EE9999: ") + error.what()};
    }
  }
  task.body = nullptr;  // what it holds (memory, graphs) is released before the task counts as done
  lock.lock();
  ++finished;
  if (run.order) clock = run.clock();
  if (task.origin) engine.races.finish(task);
  if (outcome) {
    if (context.stop_on_failure) {
      if (!context.failure) context.failure = outcome;
    } else {
      failure = outcome;
    }
  }
  if (ran) {
    now_ns = run.now_ns;
    engine.add_timeline(*this, task, start_ns, now_ns);
  }
  if (task.record) {
    const Failure dropped{ACL_ERROR_RT_INTERNAL_ERROR, "EE9999: the task was dropped unrun"};
    complete(*task.record, now_ns, clock, ran || outcome ? outcome : dropped);
  }
}

std::shared_ptr<Stream> create_stream(Engine& engine, Context& context, uint32_t flags) {
  if (static_cast<int64_t>(engine.streams.size()) >= engine.settings.max_streams) {
    throw SimulatorError(
        ACL_ERROR_RT_NO_STREAM_RESOURCE,
        "EE1023: all " + std::to_string(engine.settings.max_streams) + " streams are in use");
  }
  auto stream = std::make_shared<Stream>(context, engine.next_stream_id++, flags);
  stream->component = engine.races.add_component();
  engine.streams[stream.get()] = stream;
  return stream;
}

std::shared_ptr<Stream> resolve_stream_locked(Engine& engine, aclrtStream handle) {
  Context& context = require_context();
  if (handle == nullptr) {
    if (!context.default_stream) context.default_stream = create_stream(engine, context, 0);
    return context.default_stream;
  }
  auto found = engine.streams.find(handle);
  if (found == engine.streams.end()) {
    throw SimulatorError(ACL_ERROR_RT_INVALID_HANDLE, "EE1003: the stream handle is not live");
  }
  if (&found->second->context != &context) {
    throw SimulatorError(
        ACL_ERROR_RT_STREAM_CONTEXT,
        "EE1003: the stream belongs to device " + std::to_string(found->second->context.device) +
            ", the calling thread's context to device " + std::to_string(context.device));
  }
  return found->second;
}

std::shared_ptr<Stream> resolve_stream(aclrtStream handle) {
  Engine& engine = Engine::get();
  Engine::Lock lock(engine.mutex);
  return resolve_stream_locked(engine, handle);
}

void submit_locked(Engine& engine, Stream& stream, Task task) {
  if (stream.retired) {
    throw SimulatorError(ACL_ERROR_RT_INVALID_HANDLE, "EE1003: the stream is being destroyed");
  }
  throw_if(stream.context.failure);
  task.submitted_ns = engine.host_spends(engine.settings.call_ns);
  task.origin = engine.races.submitting(task.label, stream.capture != nullptr);
  if (stream.capture != nullptr) {
    stream.capture->add(stream.lane, std::move(task));
  } else {
    stream.enqueue(std::move(task));
  }
}

void submit(Stream& stream, Task task) {
  Engine& engine = Engine::get();
  Engine::Lock lock(engine.mutex);
  submit_locked(engine, stream, std::move(task));
}

void synchronize_streams(Engine::Lock& lock, Engine& engine,
                         const std::vector<std::shared_ptr<Stream>>& streams, int timeout_ms) {
  std::vector<uint64_t> targets;
  for (const auto& stream : streams) {
    if (stream->capture != nullptr) {
      throw SimulatorError(ACL_ERROR_RT_STREAM_CAPTURED,
                           "EE1016: stream " + std::to_string(stream->id) +
                               " captures; neither it nor its device can be synchronised");
    }
    targets.push_back(stream->submitted);
  }
  const auto ready = [&] {
    for (size_t i = 0; i < streams.size(); ++i) {
      if (streams[i]->context.failure) return true;
      if (streams[i]->finished < targets[i]) return engine.exiting;
    }
    return true;
  };
  if (timeout_ms < 0) {
    engine.changed.wait(lock, ready);
  } else if (!engine.changed.wait_for(lock, std::chrono::milliseconds(timeout_ms), ready)) {
    throw SimulatorError(
        ACL_ERROR_RT_STREAM_SYNC_TIMEOUT,
        "EE1002: the work has not finished after " + std::to_string(timeout_ms) + " ms");
  }
  for (const auto& stream : streams) {
    engine.host_reaches(stream->now_ns);
    engine.races.host_saw(stream->clock);
  }
  for (const auto& stream : streams) report_failure(*stream);
}

void report_failure(Stream& stream) {
  throw_if(stream.context.failure);
  throw_if(std::exchange(stream.failure, {}));
}

void wait_in_task(Engine::Lock& lock, Engine& engine, TaskRun& run,
                  const std::function<bool()>& ready) {
  bool abandoned = false;
  engine.changed.wait(lock, [&] {
    abandoned = given_up(engine, run.stream) ||
                (run.graph != nullptr && (run.graph->failure || run.graph->abandoned));
    return abandoned || ready();
  });
  if (abandoned) throw Abandoned{};
}

}  // namespace npu_kv::sim
