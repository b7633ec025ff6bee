#include "engine/engine.h"

#include <pthread.h>

#include <algorithm>
#include <cstdlib>
#include <optional>

#include "engine/context.h"
#include "engine/stream.h"

namespace npu_kv::sim {

Engine& Engine::get() {
  static Engine* engine = new Engine;
  return *engine;
}

Engine::Engine() {
  pthread_atfork(nullptr, nullptr, [] { get().forked = true; });
  // Work in flight at the end of the process is dropped: what it would touch is being torn down.
  std::atexit([] {
    Engine& engine = get();
    if (engine.forked) return;
    Lock lock(engine.mutex);
    engine.exiting = true;
    for (auto& [handle, stream] : engine.streams) stream->leave_worker();
    engine.changed.notify_all();
  });
}

namespace {
// Of a thread that has a time of its own.
thread_local std::optional<int64_t> own_host_ns;
}  // namespace

int64_t Engine::host_ns() const { return own_host_ns ? *own_host_ns : shared_host_ns_.load(); }

int64_t Engine::host_spends(int64_t ns) {
  return own_host_ns ? *own_host_ns += ns : shared_host_ns_ += ns;
}

void Engine::host_reaches(int64_t ns) {
  if (own_host_ns) {
    own_host_ns = std::max(*own_host_ns, ns);
    return;
  }
  int64_t now = shared_host_ns_.load();
  while (now < ns && !shared_host_ns_.compare_exchange_weak(now, ns)) {
  }
}

void Engine::thread_is_caused_at(int64_t ns) {
  own_host_ns = std::max(own_host_ns.value_or(ns), ns);
}

Context& Engine::primary_context(int device) {
  const int64_t count = settings.devices;
  if (device < 0 || device >= count) {
    throw SimulatorError(ACL_ERROR_RT_INVALID_DEVICEID,
                         "EE1001: device " + std::to_string(device) + " is not one of the " +
                             std::to_string(count) + " simulated devices");
  }
  for (auto& context : contexts) {
    if (context->device == device && context->primary) return *context;
  }
  contexts.push_back(std::make_unique<Context>(device, true));
  return *contexts.back();
}

void Engine::add_timeline(const Stream& stream, const Task& task, int64_t start_ns,
                          int64_t end_ns) {
  if (!recording_timeline) return;
  timeline.push_back(
      {stream.id, const_cast<Stream*>(&stream), task.kind, task.bytes, start_ns, end_ns});
}

Context*& current_context() {
  thread_local Context* context = nullptr;
  return context;
}

Context& require_context() {
  Context* context = current_context();
  if (context == nullptr) {
    throw SimulatorError(ACL_ERROR_RT_CONTEXT_NULL,
                         "EE1001: this thread has no context; call aclrtSetDevice first");
  }
  return *context;
}

}  // namespace npu_kv::sim
