// Host callbacks: functions of the user that a stream's task hands to a host thread.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <thread>

#include "engine/engine.h"
#include "engine/event.h"

namespace npu_kv::sim {

/// The functions waiting for one host thread: the runtime's own, one per context, or a user thread
/// that subscribed and calls aclrtProcessReport. Guarded by the engine's mutex.
class CallbackThread {
 public:
  struct Job {
    aclrtHostFunc function;
    void* argument;
    std::shared_ptr<Record> record;
    int64_t time_ns;
  };

  std::deque<Job> jobs;
  Context* context = nullptr;
  int streams = 0;  // subscribed to this thread
};

/// Task body: hands the function over and, if `blocking`, waits for it to return.
void run_callback(CallbackThread& thread, aclrtHostFunc function, void* argument, bool blocking,
                  TaskRun& run);

/// Takes the oldest job and runs it with the lock released. False when there is none.
bool run_one_job(Engine::Lock& lock, Engine& engine, CallbackThread& thread);

/// Ends the stream's subscription, if it has one. With mutex held.
void unsubscribe(Engine& engine, Stream& stream);

/// The context's own callback thread, started at first use. With mutex held.
std::shared_ptr<CallbackThread> host_function_thread(Engine& engine, Context& context);

/// Whether the calling thread is inside a host callback, where runtime calls are not allowed.
bool in_callback();
/// The virtual time of the callback that the calling thread is inside of, or of its last one.
int64_t callback_ns();

}  // namespace npu_kv::sim
