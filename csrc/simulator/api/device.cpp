// Devices, contexts and the per-thread error state.
#include <algorithm>

#include "api/api.h"
#include "api/call_sites.h"
#include "engine/context.h"
#include "engine/engine.h"
#include "engine/stream.h"

using namespace npu_kv::sim;

namespace {

Context& find_context(Engine& engine, aclrtContext handle) {
  for (auto& context : engine.contexts) {
    if (context.get() == handle) return *context;
  }
  throw SimulatorError(ACL_ERROR_RT_CONTEXT_NULL, "EE1003: the context handle is not live");
}

/// In the order they were made.
std::vector<std::shared_ptr<Stream>> streams_of(const Engine& engine, const Context& context) {
  std::vector<std::shared_ptr<Stream>> streams;
  for (const auto& [handle, stream] : engine.streams) {
    if (&stream->context == &context) streams.push_back(stream);
  }
  std::sort(streams.begin(), streams.end(),
            [](const auto& left, const auto& right) { return left->id < right->id; });
  return streams;
}

/// Waits for the work of every stream of the context, then heals it, as a reset device is healthy.
void reset(Engine::Lock& lock, Engine& engine, Context& context) {
  for (const auto& stream : streams_of(engine, context)) {
    engine.changed.wait(lock, [&] {
      return stream->idle() || stream->context.failure || engine.exiting || stream->stalls > 0;
    });
    stream->failure = {};
    engine.races.host_saw(stream->clock);
  }
  context.failure = {};
}

}  // namespace

NPU_SIM_EXPORT aclError aclrtGetDeviceCount(uint32_t* count) {
  return NPU_SIM_CALL([&] {
    require(count != nullptr, "count is null");
    *count = static_cast<uint32_t>(Engine::get().settings.devices.load());
  });
}

NPU_SIM_EXPORT aclError aclrtSetDevice(int32_t device) {
  return NPU_SIM_CALL([&] {
    Engine& engine = Engine::get();
    Engine::Lock lock(engine.mutex);
    Context& context = engine.primary_context(device);
    ++context.set_device_count;
    current_context() = &context;
  });
}

NPU_SIM_EXPORT aclError aclrtGetDevice(int32_t* device) {
  return NPU_SIM_CALL([&] {
    require(device != nullptr, "device is null");
    *device = require_context().device;
  });
}

NPU_SIM_EXPORT aclError aclrtResetDevice(int32_t device) {
  return NPU_SIM_CALL([&] {
    Engine& engine = Engine::get();
    Engine::Lock lock(engine.mutex);
    Context& context = engine.primary_context(device);
    if (context.set_device_count > 0) --context.set_device_count;
    if (context.set_device_count == 0) reset(lock, engine, context);
  });
}

NPU_SIM_EXPORT aclError aclrtResetDeviceForce(int32_t device) {
  return NPU_SIM_CALL([&] {
    Engine& engine = Engine::get();
    Engine::Lock lock(engine.mutex);
    Context& context = engine.primary_context(device);
    context.set_device_count = 0;
    reset(lock, engine, context);
  });
}

NPU_SIM_EXPORT aclError aclrtCreateContext(aclrtContext* context, int32_t device) {
  return NPU_SIM_CALL([&] {
    require(context != nullptr, "context is null");
    Engine& engine = Engine::get();
    Engine::Lock lock(engine.mutex);
    engine.primary_context(device);  // checks the device
    engine.contexts.push_back(std::make_unique<Context>(device, false));
    *context = engine.contexts.back().get();
    current_context() = engine.contexts.back().get();
  });
}

NPU_SIM_EXPORT aclError aclrtDestroyContext(aclrtContext context) {
  return NPU_SIM_CALL([&] {
    Engine& engine = Engine::get();
    Engine::Lock lock(engine.mutex);
    reset(lock, engine, find_context(engine, context));
  });
}

NPU_SIM_EXPORT aclError aclrtGetCurrentContext(aclrtContext* context) {
  return NPU_SIM_CALL([&] {
    require(context != nullptr, "context is null");
    *context = &require_context();
  });
}

NPU_SIM_EXPORT aclError aclrtSetCurrentContext(aclrtContext context) {
  return NPU_SIM_CALL([&] {
    Engine& engine = Engine::get();
    Engine::Lock lock(engine.mutex);
    current_context() = &find_context(engine, context);
  });
}

NPU_SIM_EXPORT aclError aclrtGetPrimaryCtxState(int32_t device, uint32_t* flags, int32_t* active) {
  return NPU_SIM_CALL([&] {
    Engine& engine = Engine::get();
    Engine::Lock lock(engine.mutex);
    if (flags != nullptr) *flags = 0;
    if (active != nullptr) {
      *active = 0;
      for (auto& context : engine.contexts) {
        if (context->primary && context->device == device && context->set_device_count > 0) {
          *active = 1;
        }
      }
    }
  });
}

NPU_SIM_EXPORT aclError aclrtSynchronizeDeviceWithTimeout(int32_t timeout_ms) {
  return NPU_SIM_CALL([&] {
    check_timeout(timeout_ms);
    Engine& engine = Engine::get();
    Engine::Lock lock(engine.mutex);
    synchronize_streams(lock, engine, streams_of(engine, require_context()), timeout_ms);
  });
}

NPU_SIM_EXPORT aclError aclrtSynchronizeDevice() { return aclrtSynchronizeDeviceWithTimeout(-1); }

// Reading the error state must not change it, so these three are not calls like the others.
NPU_SIM_EXPORT const char* aclGetRecentErrMsg() { return take_message(); }

NPU_SIM_EXPORT aclError aclrtPeekAtLastError(int level) {
  return level == 0 ? peek_last_error() : ACL_ERROR_INVALID_PARAM;
}

NPU_SIM_EXPORT aclError aclrtGetLastError(int level) {
  return level == 0 ? take_last_error() : ACL_ERROR_INVALID_PARAM;
}
