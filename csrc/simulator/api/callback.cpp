// Host callbacks.
#include <pthread.h>

#include <chrono>

#include "api/api.h"
#include "engine/callbacks.h"
#include "engine/context.h"
#include "engine/stream.h"

using namespace npu_kv::sim;

namespace {

[[noreturn]] void refuse_mixed(const char* what) {
  throw SimulatorError(ACL_ERROR_RT_STREAM_SUBSCRIBE, std::string("EE1016: ") + what);
}

/// Callers loop on aclrtProcessReport and ignore its result: answering at once would make them
/// spin.
template <typename Ready>
void pause(Engine::Lock& lock, Engine& engine, int32_t timeout_ms, Ready&& ready) {
  const auto limit = std::chrono::milliseconds(timeout_ms == -1 ? 100 : timeout_ms);
  engine.changed.wait_for(lock, limit, ready);
}

}  // namespace

NPU_SIM_EXPORT aclError aclrtLaunchHostFunc(aclrtStream handle, aclrtHostFunc function,
                                            void* argument) {
  return NPU_SIM_CALL([&] {
    require(function != nullptr, "fn is null");
    Engine& engine = Engine::get();
    Engine::Lock lock(engine.mutex);
    auto stream = resolve_stream_locked(engine, handle);
    if (stream->callback_kind == CallbackKind::kSubscribed) {
      refuse_mixed("the stream is subscribed to a thread; aclrtLaunchHostFunc cannot be mixed in");
    }
    Task task;
    task.kind = "host_function";
    task.body = [thread = host_function_thread(engine, stream->context), function,
                 argument](TaskRun& run) { run_callback(*thread, function, argument, true, run); };
    submit_locked(engine, *stream, std::move(task));
    // A capturing stream's bookkeeping is that of a hidden stream; the visible one stays as it is.
    if (stream->capture == nullptr) stream->callback_kind = CallbackKind::kHostFunction;
  });
}

NPU_SIM_EXPORT aclError aclrtLaunchCallback(aclrtCallback function, void* argument, int block,
                                            aclrtStream handle) {
  return NPU_SIM_CALL([&] {
    require(function != nullptr, "fn is null");
    require(block == 0 || block == 1,
            "blockType is " + std::to_string(block) + ", allowed are 0 and 1");
    Engine& engine = Engine::get();
    Engine::Lock lock(engine.mutex);
    auto stream = resolve_stream_locked(engine, handle);
    if (stream->callback_kind == CallbackKind::kHostFunction) {
      refuse_mixed(
          "the stream has run aclrtLaunchHostFunc; aclrtLaunchCallback cannot be mixed in");
    }
    if (!stream->subscriber) {
      throw SimulatorError(ACL_ERROR_RT_STREAM_NO_CB_REG,
                           "EE1016: no thread is subscribed to the stream");
    }
    Task task;
    task.kind = "callback";
    task.body = [thread = stream->subscriber, function, argument, block](TaskRun& run) {
      run_callback(*thread, function, argument, block == 1, run);
    };
    submit_locked(engine, *stream, std::move(task));
  });
}

NPU_SIM_EXPORT aclError aclrtSubscribeReport(uint64_t thread_id, aclrtStream handle) {
  return NPU_SIM_CALL([&] {
    Engine& engine = Engine::get();
    Engine::Lock lock(engine.mutex);
    auto stream = resolve_stream_locked(engine, handle);
    if (stream->callback_kind == CallbackKind::kHostFunction) {
      refuse_mixed("the stream has run aclrtLaunchHostFunc; it cannot be subscribed");
    }
    if (stream->subscriber) refuse_mixed("the stream is subscribed already");
    auto& thread = engine.subscribed_threads[thread_id];
    if (!thread) {
      thread = std::make_shared<CallbackThread>();
      thread->context = &stream->context;
    }
    if (thread->context->device != stream->context.device) {
      throw SimulatorError(ACL_ERROR_RT_THREAD_SUBSCRIBE,
                           "EE1016: the thread is subscribed to streams of another device");
    }
    ++thread->streams;
    stream->subscriber = thread;
    stream->callback_kind = CallbackKind::kSubscribed;
  });
}

NPU_SIM_EXPORT aclError aclrtUnSubscribeReport(uint64_t thread_id, aclrtStream handle) {
  return NPU_SIM_CALL([&] {
    Engine& engine = Engine::get();
    Engine::Lock lock(engine.mutex);
    auto stream = resolve_stream_locked(engine, handle);
    if (stream->callback_kind == CallbackKind::kHostFunction) {
      refuse_mixed("the stream has run aclrtLaunchHostFunc; it has no subscription");
    }
    auto found = engine.subscribed_threads.find(thread_id);
    if (found == engine.subscribed_threads.end() || stream->subscriber != found->second) {
      throw SimulatorError(ACL_ERROR_RT_THREAD_SUBSCRIBE,
                           "EE1016: the thread is not subscribed to the stream");
    }
    unsubscribe(engine, *stream);
  });
}

NPU_SIM_EXPORT aclError aclrtProcessReport(int32_t timeout_ms) {
  return NPU_SIM_CALL([&] {
    require(timeout_ms == -1 || timeout_ms > 0,
            "timeout is " + std::to_string(timeout_ms) +
                ", allowed are -1 (for ever) and positive milliseconds");
    const auto self = static_cast<uint64_t>(pthread_self());
    Engine& engine = Engine::get();
    Engine::Lock lock(engine.mutex);
    auto found = engine.subscribed_threads.find(self);
    if (found == engine.subscribed_threads.end()) {
      pause(lock, engine, timeout_ms, [&] { return engine.subscribed_threads.contains(self); });
      throw SimulatorError(ACL_ERROR_RT_THREAD_SUBSCRIBE,
                           "EE1016: the thread is not subscribed to any stream");
    }
    auto thread = found->second;
    const auto ready = [&] {
      return engine.exiting || !thread->jobs.empty() || thread->streams == 0;
    };
    if (timeout_ms < 0) {
      engine.changed.wait(lock, ready);
    } else {
      engine.changed.wait_for(lock, std::chrono::milliseconds(timeout_ms), ready);
    }
    if (engine.exiting) pause(lock, engine, timeout_ms, [] { return false; });
    if (!engine.exiting && run_one_job(lock, engine, *thread)) return;
    if (thread->streams == 0) {
      throw SimulatorError(ACL_ERROR_RT_THREAD_SUBSCRIBE,
                           "EE1016: the thread's last subscription has ended");
    }
    throw SimulatorError(ACL_ERROR_RT_REPORT_TIMEOUT, "EE1002: no callback arrived within " +
                                                          std::to_string(timeout_ms) + " ms");
  });
}
