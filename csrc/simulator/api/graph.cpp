// Captured graphs.
#include "engine/graph.h"

#include <chrono>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <utility>

#include "api/api.h"
#include "engine/context.h"
#include "engine/stream.h"

using namespace npu_kv::sim;

namespace {

std::shared_ptr<Graph> find(Engine& engine, aclmdlRI handle) {
  require(handle != nullptr, "modelRI is null");
  auto found = engine.graphs.find(handle);
  if (found == engine.graphs.end()) {
    throw SimulatorError(ACL_ERROR_RT_INVALID_HANDLE, "EE1003: the graph handle is not live");
  }
  return found->second;
}

/// Counts as a running replay for as long as its task exists, whether that runs or is dropped.
struct Replay {
  explicit Replay(std::shared_ptr<Graph> replayed) : graph(std::move(replayed)) {
    ++graph->running;
  }
  ~Replay() { --graph->running; }
  Replay(const Replay&) = delete;
  Replay& operator=(const Replay&) = delete;

  const std::shared_ptr<Graph> graph;
};

void refuse_capturing(const Graph& graph) {
  if (graph.state != Graph::State::kReady) {
    throw SimulatorError(ACL_ERROR_RT_MODEL_CAPTURED,
                         "EE1016: the graph's capture is still under way");
  }
}

void refuse_default(const Stream& stream) {
  if (&stream == stream.context.default_stream.get()) {
    throw SimulatorError(ACL_ERROR_RT_FEATURE_NOT_SUPPORT,
                         "EE1016: the default stream cannot capture");
  }
}

/// Forgets the graph and tells those who asked to know. With the lock, which is released.
void destroy(Engine::Lock& lock, Engine& engine, const std::shared_ptr<Graph>& graph) {
  engine.graphs.erase(graph.get());
  const auto callbacks = std::exchange(graph->destroy_callbacks, {});
  lock.unlock();
  for (const auto& [function, argument] : callbacks) function(argument);
}

void refuse_task_update(aclrtStream handle, const char* why) {
  Engine& engine = Engine::get();
  Engine::Lock lock(engine.mutex);
  if (resolve_stream_locked(engine, handle)->capture != nullptr) {
    throw SimulatorError(ACL_ERROR_RT_STREAM_CAPTURED,
                         "EE1016: a task update cannot begin or end on a capturing stream");
  }
  throw SimulatorError(ACL_ERROR_STREAM_TASK_GROUP_STATUS, std::string("EE1016: ") + why);
}

}  // namespace

NPU_SIM_EXPORT aclError aclmdlRICaptureBegin(aclrtStream handle, aclmdlRICaptureMode mode) {
  return NPU_SIM_CALL([&] {
    require(handle != nullptr, "stream is null");
    require(mode >= 0 && mode <= 2, "mode is " + std::to_string(mode) + ", allowed are 0, 1 and 2");
    Engine& engine = Engine::get();
    Engine::Lock lock(engine.mutex);
    auto stream = resolve_stream_locked(engine, handle);
    if (stream->capture != nullptr) {
      throw SimulatorError(ACL_ERROR_RT_STREAM_CAPTURED, "EE1016: the stream captures already");
    }
    refuse_default(*stream);
    static int next_id = 0;
    auto graph = std::make_shared<Graph>(stream->context, mode);
    graph->id = next_id++;
    graph->add_lane(stream);
    engine.graphs[graph.get()] = graph;
    stream->context.captures.push_back(graph.get());
  });
}

NPU_SIM_EXPORT aclError aclmdlRICaptureEnd(aclrtStream handle, aclmdlRI* result) {
  return NPU_SIM_CALL([&] {
    require(handle != nullptr && result != nullptr, "stream or modelRI is null");
    Engine& engine = Engine::get();
    Engine::Lock lock(engine.mutex);
    auto stream = resolve_stream_locked(engine, handle);
    refuse_default(*stream);
    if (stream->capture == nullptr) {
      throw SimulatorError(ACL_ERROR_RT_STREAM_NOT_CAPTURED, "EE1016: the stream does not capture");
    }
    auto graph = engine.graphs.at(stream->capture);
    if (&graph->origin() != stream.get()) {
      throw SimulatorError(ACL_ERROR_RT_STREAM_CAPTURE_UNMATCHED,
                           "EE1016: the capture began on another stream");
    }
    *result = nullptr;
    if (graph->mode != ACL_MODEL_RI_CAPTURE_MODE_RELAXED &&
        graph->begin_thread != std::this_thread::get_id()) {
      graph->release();
      throw SimulatorError(ACL_ERROR_RT_STREAM_CAPTURE_WRONG_THREAD,
                           "EE1016: the capture began on another thread");
    }
    try {
      graph->finish();
    } catch (...) {
      destroy(lock, engine, graph);
      throw;
    }
    *result = graph.get();
  });
}

// On an NPU compute operators come from a library that can be captured. Here they take the older
// way, which torch_npu refuses under capture: after it has set the compile option of the operator
// it asks for the capture status, and goes on only if there is no capture. So the question that
// follows that call on the same thread is answered as if there were none.
static bool asked_for_an_operator() {
  return Engine::get().settings.capture_operators &&
         std::strcmp(previous_call(), "aclSetCompileopt") == 0;
}

NPU_SIM_EXPORT aclError aclmdlRICaptureGetInfo(aclrtStream handle, aclmdlRICaptureStatus* status,
                                               aclmdlRI* result) {
  return NPU_SIM_CALL([&] {
    require(status != nullptr || result != nullptr, "status and modelRI are both null");
    Engine& engine = Engine::get();
    Engine::Lock lock(engine.mutex);
    auto stream = resolve_stream_locked(engine, handle);
    aclmdlRICaptureStatus found = ACL_MODEL_RI_CAPTURE_STATUS_NONE;
    if (stream->capture != nullptr && !asked_for_an_operator()) {
      found = stream->capture->state == Graph::State::kInvalidated
                  ? ACL_MODEL_RI_CAPTURE_STATUS_INVALIDATED
                  : ACL_MODEL_RI_CAPTURE_STATUS_ACTIVE;
    }
    if (status != nullptr) *status = found;
    if (result != nullptr) *result = stream->capture;
  });
}

NPU_SIM_EXPORT aclError aclmdlRICaptureThreadExchangeMode(aclmdlRICaptureMode* mode) {
  return NPU_SIM_CALL([&] {
    require(mode != nullptr, "mode is null");
    require(*mode >= 0 && *mode <= 2,
            "mode is " + std::to_string(*mode) + ", allowed are 0, 1 and 2");
    std::swap(*mode, thread_capture_mode());
  });
}

NPU_SIM_EXPORT aclError aclmdlRIExecuteAsync(aclmdlRI handle, aclrtStream handle_stream) {
  return NPU_SIM_CALL([&] {
    Engine& engine = Engine::get();
    Engine::Lock lock(engine.mutex);
    auto graph = find(engine, handle);
    refuse_capturing(*graph);
    auto stream = resolve_stream_locked(engine, handle_stream);
    if (stream->capture != nullptr) {
      throw SimulatorError(ACL_ERROR_RT_STREAM_CAPTURED,
                           "EE1016: a graph cannot be executed on a capturing stream");
    }
    if (&graph->context != &stream->context) {
      throw SimulatorError(ACL_ERROR_RT_MODEL_CONTEXT,
                           "EE1003: the graph belongs to another context");
    }
    Task task;
    task.kind = "graph";
    task.body = [counted = std::make_shared<Replay>(graph)](TaskRun& run) {
      counted->graph->replay(run);
    };
    submit_locked(engine, *stream, std::move(task));
  });
}

NPU_SIM_EXPORT aclError aclmdlRIExecute(aclmdlRI /*graph*/, int32_t /*timeout_ms*/) {
  return NPU_SIM_CALL([] {
    throw SimulatorError(ACL_ERROR_RT_PARAM_INVALID,
                         "EE1016: captured graphs run by aclmdlRIExecuteAsync only");
  });
}

NPU_SIM_EXPORT aclError aclmdlRIDestroy(aclmdlRI handle) {
  return NPU_SIM_CALL([&] {
    Engine& engine = Engine::get();
    Engine::Lock lock(engine.mutex);
    auto graph = find(engine, handle);
    refuse_capturing(*graph);
    const std::chrono::milliseconds limit(engine.settings.graph_destroy_wait_ms);
    const bool finished =
        engine.changed.wait_for(lock, limit, [&] { return graph->running == 0 || engine.exiting; });
    if (!finished) {
      throw SimulatorError(ACL_ERROR_RT_MODEL_RUNNING, "EE1016: the graph is still running after " +
                                                           std::to_string(limit.count()) + " ms");
    }
    engine.races.host_saw(graph->replayed());
    destroy(lock, engine, graph);
  });
}

NPU_SIM_EXPORT aclError aclmdlRIDestroyRegisterCallback(aclmdlRI handle, aclrtCallback function,
                                                        void* argument) {
  return NPU_SIM_CALL([&] {
    require(function != nullptr, "func is null");
    Engine& engine = Engine::get();
    Engine::Lock lock(engine.mutex);
    const bool added = find(engine, handle)->destroy_callbacks.emplace(function, argument).second;
    require(added, "func is registered with the graph already");
  });
}

NPU_SIM_EXPORT aclError aclmdlRIDestroyUnregisterCallback(aclmdlRI handle, aclrtCallback function) {
  return NPU_SIM_CALL([&] {
    Engine& engine = Engine::get();
    Engine::Lock lock(engine.mutex);
    require(find(engine, handle)->destroy_callbacks.erase(function) == 1,
            "func is not registered with the graph");
  });
}

NPU_SIM_EXPORT aclError aclmdlRIGetId(aclmdlRI handle, uint32_t* id) {
  return NPU_SIM_CALL([&] {
    require(id != nullptr, "id is null");
    Engine& engine = Engine::get();
    Engine::Lock lock(engine.mutex);
    *id = static_cast<uint32_t>(find(engine, handle)->id);
  });
}

NPU_SIM_EXPORT aclError aclmdlRIDebugPrint(aclmdlRI handle) {
  return NPU_SIM_CALL([&] {
    Engine& engine = Engine::get();
    Engine::Lock lock(engine.mutex);
    std::printf("%s\n", find(engine, handle)->describe().c_str());
  });
}

NPU_SIM_EXPORT aclError aclmdlRIDebugJsonPrint(aclmdlRI handle, const char* path,
                                               uint32_t /*flags*/) {
  return NPU_SIM_CALL([&] {
    require(path != nullptr, "path is null");
    Engine& engine = Engine::get();
    Engine::Lock lock(engine.mutex);
    std::ofstream file(path);
    file << find(engine, handle)->describe() << "\n";
    require(file.good(), std::string("path cannot be written: ") + path);
  });
}

// Task groups and updates: copies and callbacks are never updatable on an NPU either (507009), and
// kernels are not simulated as updatable tasks.
NPU_SIM_EXPORT aclError aclmdlRICaptureTaskGrpBegin(aclrtStream handle) {
  return NPU_SIM_CALL([&] {
    Engine& engine = Engine::get();
    Engine::Lock lock(engine.mutex);
    if (resolve_stream_locked(engine, handle)->capture == nullptr) {
      throw SimulatorError(ACL_ERROR_RT_STREAM_NOT_CAPTURED, "EE1016: the stream does not capture");
    }
    throw SimulatorError(ACL_ERROR_RT_TASK_TYPE_NOT_SUPPORT,
                         "EE1016: task groups are not simulated");
  });
}

NPU_SIM_EXPORT aclError aclmdlRICaptureTaskGrpEnd(aclrtStream /*stream*/, aclrtTaskGrp* /*group*/) {
  return NPU_SIM_CALL([] {
    throw SimulatorError(ACL_ERROR_STREAM_TASK_GROUP_STATUS, "EE1016: no task group is open");
  });
}

NPU_SIM_EXPORT aclError aclmdlRICaptureTaskUpdateBegin(aclrtStream stream, aclrtTaskGrp /*group*/) {
  return NPU_SIM_CALL([&] {
    refuse_task_update(stream, "the handle is not a task group; task groups are not simulated");
  });
}

NPU_SIM_EXPORT aclError aclmdlRICaptureTaskUpdateEnd(aclrtStream stream) {
  return NPU_SIM_CALL([&] { refuse_task_update(stream, "no task update is open"); });
}
