// Streams.
#include "engine/stream.h"

#include "api/api.h"
#include "engine/callbacks.h"
#include "engine/context.h"
#include "engine/engine.h"

using namespace npu_kv::sim;

namespace {

constexpr int kFailureModeAttribute = 1;

void create(aclrtStream* handle, uint32_t flags) {
  require(handle != nullptr, "stream is null");
  Engine& engine = Engine::get();
  Engine::Lock lock(engine.mutex);
  *handle = create_stream(engine, require_context(), flags).get();
}

void synchronize(aclrtStream handle, int32_t timeout_ms) {
  check_timeout(timeout_ms);
  Engine& engine = Engine::get();
  Engine::Lock lock(engine.mutex);
  auto stream = resolve_stream_locked(engine, handle);
  synchronize_streams(lock, engine, {stream}, timeout_ms);
}

void set_failure_mode(aclrtStream handle, uint64_t mode) {
  require(handle != nullptr, "stream is null");
  require(mode == ACL_CONTINUE_ON_FAILURE || mode == ACL_STOP_ON_FAILURE,
          "failure mode is " + std::to_string(mode) + ", allowed are 0 and 1");
  Engine& engine = Engine::get();
  Engine::Lock lock(engine.mutex);
  Context& context = resolve_stream_locked(engine, handle)->context;
  if (context.stop_on_failure && mode == ACL_CONTINUE_ON_FAILURE) {
    throw SimulatorError(ACL_ERROR_RT_FEATURE_NOT_SUPPORT,
                         "EE1003: failure mode STOP cannot be taken back");
  }
  context.stop_on_failure = mode == ACL_STOP_ON_FAILURE;
}

void destroy(aclrtStream handle, bool discard) {
  require(handle != nullptr, "stream is null");
  Engine& engine = Engine::get();
  Engine::Lock lock(engine.mutex);
  auto stream = resolve_stream_locked(engine, handle);
  if (stream->capture != nullptr) {
    throw SimulatorError(ACL_ERROR_RT_STREAM_CAPTURED,
                         "EE1016: a capturing stream cannot be destroyed");
  }
  if (stream == stream->context.default_stream) {
    throw SimulatorError(ACL_ERROR_RT_PARAM_INVALID,
                         "EE1003: the default stream lives as long as its context");
  }
  stream->retired = true;
  stream->discarding = discard;
  engine.streams.erase(handle);
  lock.unlock();
  stream->join();
  lock.lock();
  unsubscribe(engine, *stream);  // only now: callbacks of its last tasks needed the thread
  engine.races.host_saw(stream->clock);
  engine.races.drop_component(stream->component);
  for (const uint32_t component : stream->lane_components) engine.races.drop_component(component);
}

}  // namespace

NPU_SIM_EXPORT aclError aclrtCreateStream(aclrtStream* stream) {
  return NPU_SIM_CALL([&] { create(stream, 0); });
}

NPU_SIM_EXPORT aclError aclrtCreateStreamWithConfig(aclrtStream* stream, uint32_t /*priority*/,
                                                    uint32_t flags) {
  return NPU_SIM_CALL([&] { create(stream, flags); });
}

NPU_SIM_EXPORT aclError aclrtDestroyStream(aclrtStream stream) {
  return NPU_SIM_CALL([&] { destroy(stream, false); });
}

NPU_SIM_EXPORT aclError aclrtDestroyStreamForce(aclrtStream stream) {
  return NPU_SIM_CALL([&] { destroy(stream, true); });
}

NPU_SIM_EXPORT aclError aclrtSynchronizeStream(aclrtStream stream) {
  return NPU_SIM_CALL([&] { synchronize(stream, -1); });
}

NPU_SIM_EXPORT aclError aclrtSynchronizeStreamWithTimeout(aclrtStream stream, int32_t timeout_ms) {
  return NPU_SIM_CALL([&] { synchronize(stream, timeout_ms); });
}

NPU_SIM_EXPORT aclError aclrtStreamQuery(aclrtStream handle, aclrtStreamStatus* status) {
  return NPU_SIM_CALL([&] {
    require(status != nullptr, "status is null");
    Engine& engine = Engine::get();
    Engine::Lock lock(engine.mutex);
    auto stream = resolve_stream_locked(engine, handle);
    if (stream->capture != nullptr) {
      throw SimulatorError(ACL_ERROR_RT_STREAM_CAPTURED,
                           "EE1016: a capturing stream cannot be queried");
    }
    *status = stream->idle() ? ACL_STREAM_STATUS_COMPLETE : ACL_STREAM_STATUS_NOT_READY;
    if (stream->idle()) engine.races.host_saw(stream->clock);
  });
}

NPU_SIM_EXPORT aclError aclrtStreamGetId(aclrtStream handle, int32_t* id) {
  return NPU_SIM_CALL([&] {
    require(id != nullptr, "streamId is null");
    *id = resolve_stream(handle)->id;
  });
}

NPU_SIM_EXPORT aclError aclrtCtxGetCurrentDefaultStream(aclrtStream* stream) {
  return NPU_SIM_CALL([&] {
    require(stream != nullptr, "stream is null");
    *stream = resolve_stream(nullptr).get();
  });
}

NPU_SIM_EXPORT aclError aclrtSetStreamFailureMode(aclrtStream stream, uint64_t mode) {
  return NPU_SIM_CALL([&] { set_failure_mode(stream, mode); });
}

NPU_SIM_EXPORT aclError aclrtSetStreamAttribute(aclrtStream stream, int attribute,
                                                const uint64_t* value) {
  return NPU_SIM_CALL([&] {
    require(value != nullptr, "value is null");
    if (attribute == kFailureModeAttribute) {
      set_failure_mode(stream, *value);
    } else {
      resolve_stream(stream);  // the others steer what is not simulated; the handle is checked
    }
  });
}

NPU_SIM_EXPORT aclError aclrtSetStreamOverflowSwitch(aclrtStream handle, uint32_t /*flag*/) {
  return NPU_SIM_CALL([&] {
    if (resolve_stream(handle)->capture != nullptr) {
      throw SimulatorError(ACL_ERROR_RT_STREAM_CAPTURED,
                           "EE1016: the overflow switch of a capturing stream cannot be set");
    }
  });
}
