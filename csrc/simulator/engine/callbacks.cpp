#include "engine/callbacks.h"

#include <utility>

#include "engine/context.h"
#include "engine/stream.h"

namespace npu_kv::sim {
namespace {
thread_local bool inside_callback = false;
thread_local int64_t callback_time_ns = 0;
}  // namespace

bool in_callback() { return inside_callback; }
int64_t callback_ns() { return callback_time_ns; }

void run_callback(CallbackThread& thread, aclrtHostFunc function, void* argument, bool blocking,
                  TaskRun& run) {
  Engine& engine = Engine::get();
  auto record = std::make_shared<Record>();
  Engine::Lock lock(engine.mutex);
  engine.host_reaches(run.now_ns);  // what the host does because of this happens after it
  engine.races.host_saw(run.clock());
  thread.jobs.push_back({function, argument, record, run.now_ns});
  engine.changed.notify_all();
  if (!blocking) return;
  try {
    wait_in_task(lock, engine, run, [&] { return record->done; });
    run.happens_after(record->clock);
  } catch (const Abandoned&) {
    const auto waiting = std::erase_if(
        thread.jobs, [&](const CallbackThread::Job& job) { return job.record == record; });
    // Once it has begun, its argument has to stay valid until it returns.
    if (waiting == 0) {
      engine.changed.wait(lock, [&] { return record->done || engine.exiting; });
    }
    throw;
  }
}

bool run_one_job(Engine::Lock& lock, Engine& engine, CallbackThread& thread) {
  if (thread.jobs.empty()) return false;
  const CallbackThread::Job job = thread.jobs.front();
  thread.jobs.pop_front();
  lock.unlock();
  inside_callback = true;
  callback_time_ns = job.time_ns;
  job.function(job.argument);
  inside_callback = false;
  lock.lock();
  job.record->done = true;
  job.record->clock = engine.races.host_clock();
  engine.changed.notify_all();
  return true;
}

void unsubscribe(Engine& engine, Stream& stream) {
  const auto thread = std::exchange(stream.subscriber, nullptr);
  if (!thread) return;
  stream.callback_kind = CallbackKind::kNone;
  if (--thread->streams == 0) {
    std::erase_if(engine.subscribed_threads,
                  [&](const auto& entry) { return entry.second == thread; });
  }
  engine.changed.notify_all();
}

std::shared_ptr<CallbackThread> host_function_thread(Engine& engine, Context& context) {
  if (context.host_functions) return context.host_functions;
  auto thread = std::make_shared<CallbackThread>();
  thread->context = &context;
  context.host_functions = thread;
  ++engine.live_threads;
  // Lives as long as the process, like its context.
  std::thread([thread] {
    Engine& engine = Engine::get();
    Engine::Lock lock(engine.mutex);
    while (!engine.exiting) {
      engine.changed.wait(lock, [&] { return engine.exiting || !thread->jobs.empty(); });
      if (!engine.exiting) run_one_job(lock, engine, *thread);
    }
    --engine.live_threads;
  }).detach();
  return thread;
}

}  // namespace npu_kv::sim
