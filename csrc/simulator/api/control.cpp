#include "api/control.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <sstream>
#include <string>

#include "api/api.h"
#include "api/call_sites.h"
#include "engine/callbacks.h"
#include "engine/context.h"
#include "engine/engine.h"
#include "engine/operator_table.h"
#include "engine/stream.h"

using namespace npu_kv::sim;

namespace {

constinit thread_local char last_message[1024]{};

void keep_message(const char* text) {
  std::snprintf(last_message, sizeof last_message, "%s", text);
}

/// As for API functions, but without counting, faults or the thread's ACL error state.
template <typename Work>
int guarded(Work&& work) {
  try {
    check_not_forked();
    work();
    return ACL_SUCCESS;
  } catch (const SimulatorError& error) {
    keep_message(error.what());
    return error.code();
  } catch (const std::exception& error) {
    keep_message(error.what());
    return ACL_ERROR_INTERNAL_ERROR;
  }
}

const Settings::Entry& find_setting(const char* name) {
  for (const auto& entry : Settings::entries()) {
    if (entry.name == name) return entry;
  }
  throw SimulatorError(ACL_ERROR_INVALID_PARAM, std::string("no setting is called ") + name);
}

bool is_exported(const char* function) {
  Dl_info self{};
  if (dladdr(reinterpret_cast<void*>(&npu_sim_fail_call), &self) == 0) return false;
  void* library = dlopen(self.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
  const bool found = library != nullptr && dlsym(library, function) != nullptr;
  if (library != nullptr) dlclose(library);
  return found;
}

char* give_away(const std::string& text) {
  char* copy = static_cast<char*>(std::malloc(text.size() + 1));
  if (copy != nullptr) std::memcpy(copy, text.c_str(), text.size() + 1);
  return copy;
}

/// Writes {"key": value, ...}; keys are names that need no escaping.
class JsonObject {
 public:
  explicit JsonObject(std::ostream& out) : out_(out) { out_ << "{"; }
  ~JsonObject() { out_ << "}"; }
  std::ostream& key(const std::string& name) {
    out_ << (first_ ? "" : ", ") << "\"" << name << "\": ";
    first_ = false;
    return out_;
  }
  void add(const std::string& name, int64_t value) { key(name) << value; }

 private:
  std::ostream& out_;
  bool first_ = true;
};

void write_live(std::ostream& out, Engine& engine) {
  const MemoryMap::Counts counts = engine.memory.counts();
  JsonObject live(out);
  live.add("device_allocations", counts.device_allocations);
  live.add("device_bytes", counts.device_bytes);
  live.add("pinned_allocations", counts.pinned_allocations);
  live.add("registered_ranges", counts.registered_ranges);
  live.add("pinned_bytes", engine.memory.pinned_bytes());
  Engine::Lock lock(engine.mutex);
  live.add("streams", static_cast<int64_t>(engine.streams.size()));
  live.add("events", static_cast<int64_t>(engine.events.size()));
  live.add("graphs", static_cast<int64_t>(engine.graphs.size()));
  live.add("threads", engine.live_threads);
}

std::shared_ptr<Stream> find_stream(Engine& engine, aclrtStream handle) {
  auto found = engine.streams.find(handle);
  if (found == engine.streams.end()) {
    throw SimulatorError(ACL_ERROR_RT_INVALID_HANDLE, "the stream handle is not live");
  }
  return found->second;
}

}  // namespace

NPU_SIM_EXPORT const char* npu_sim_error() { return last_message; }

NPU_SIM_EXPORT int npu_sim_set(const char* name, int64_t value) {
  return guarded([&] {
    const Settings::Entry& entry = find_setting(name);
    if (value < entry.minimum) {
      throw SimulatorError(ACL_ERROR_INVALID_PARAM,
                           std::string(name) + " is " + std::to_string(value) +
                               ", the smallest allowed value is " + std::to_string(entry.minimum));
    }
    Engine::get().settings.*entry.value = value;
  });
}

NPU_SIM_EXPORT int npu_sim_get(const char* name, int64_t* value) {
  return guarded([&] { *value = Engine::get().settings.*find_setting(name).value; });
}

NPU_SIM_EXPORT const char* npu_sim_setting_names() {
  static const std::string* names = [] {
    auto* text = new std::string;
    for (const auto& entry : Settings::entries()) {
      if (!text->empty()) *text += ' ';
      *text += entry.name;
    }
    return text;
  }();
  return names->c_str();
}

NPU_SIM_EXPORT char* npu_sim_stats() {
  Engine& engine = Engine::get();
  std::ostringstream out;
  {
    JsonObject stats(out);
    stats.key("calls");
    {
      JsonObject calls(out);
      for (const auto& [name, count] : call_counts()) calls.add(name, count);
    }
    const auto counts = operator_counts().snapshot();
    stats.key("operators");
    {
      JsonObject operators(out);
      for (const auto& [type, count] : counts) operators.add(type, count.calls);
    }
    stats.key("operator_bytes");
    {
      JsonObject operators(out);
      for (const auto& [type, count] : counts) operators.add(type, count.bytes);
    }
    for (const bool bytes : {false, true}) {
      stats.key(bytes ? "bytes" : "copies");
      JsonObject by_direction(out);
      const auto& values = bytes ? engine.counters.bytes : engine.counters.copies;
      for (size_t i = 0; i < values.size(); ++i) by_direction.add(kDirectionNames[i], values[i]);
    }
    stats.add("batches", engine.counters.batches);
    stats.add("calls_in_callback", engine.counters.calls_in_callback);
    stats.key("live");
    write_live(out, engine);
  }
  return give_away(out.str());
}

NPU_SIM_EXPORT void npu_sim_free(char* text) { std::free(text); }

NPU_SIM_EXPORT void npu_sim_reset_stats() {
  Engine::get().counters.reset();
  reset_call_counts();
  operator_counts().reset();
}

NPU_SIM_EXPORT void npu_sim_set_operator_library(const char* path) {
  set_operator_library(path == nullptr ? "" : path);
}

NPU_SIM_EXPORT char* npu_sim_operator_types() {
  load_operator_library();
  return give_away(OperatorTable::get().types());
}

NPU_SIM_EXPORT int npu_sim_set_operator_cost(const char* type, int64_t fixed_ns,
                                             int64_t bytes_per_second) {
  return guarded([&] {
    if (type == nullptr || *type == '\0') {
      throw SimulatorError(ACL_ERROR_INVALID_PARAM, "the operator's type is missing");
    }
    if (bytes_per_second == 0) {
      throw SimulatorError(ACL_ERROR_INVALID_PARAM,
                           "bytes_per_second is 0, the smallest allowed value is 1");
    }
    operator_costs().set(type, fixed_ns, bytes_per_second);
  });
}

NPU_SIM_EXPORT void npu_sim_clear_operator_costs() { operator_costs().clear(); }

NPU_SIM_EXPORT int npu_sim_fail_call(const char* function, int64_t nth, int code, int64_t times) {
  return guarded([&] {
    if (nth < 1 || times < 1 || code == ACL_SUCCESS) {
      throw SimulatorError(ACL_ERROR_INVALID_PARAM, "nth and times start at 1, code is not 0");
    }
    // A fault that never fires because of a spelling mistake would make a test pass by itself.
    if (!is_exported(function)) {
      throw SimulatorError(ACL_ERROR_INVALID_PARAM,
                           std::string("the simulator has no function ") + function);
    }
    Engine::get().faults.fail_call(function, nth, code, times);
  });
}

NPU_SIM_EXPORT int npu_sim_drop_call(const char* function, int64_t nth, int64_t times) {
  return guarded([&] {
    if (nth < 1 || times < 1) {
      throw SimulatorError(ACL_ERROR_INVALID_PARAM, "nth and times start at 1");
    }
    // The others would leave what they are to give back as it was.
    static constexpr const char* kDroppable[] = {
        "aclrtRecordEvent",       "aclrtStreamWaitEvent",
        "aclrtResetEvent",        "aclrtValueWrite",
        "aclrtValueWait",         "aclrtSynchronizeEvent",
        "aclrtSynchronizeStream", "aclrtSynchronizeStreamWithTimeout",
        "aclrtSynchronizeDevice", "aclrtSynchronizeDeviceWithTimeout"};
    const bool droppable =
        std::any_of(std::begin(kDroppable), std::end(kDroppable),
                    [&](const char* name) { return std::strcmp(name, function) == 0; });
    if (!droppable) {
      std::string names;
      for (const char* name : kDroppable) names += (names.empty() ? "" : ", ") + std::string(name);
      throw SimulatorError(
          ACL_ERROR_INVALID_PARAM,
          std::string("calls of ") + function + " cannot be dropped, those of " + names + " can");
    }
    Engine::get().faults.drop_call(function, nth, times);
  });
}

NPU_SIM_EXPORT int npu_sim_fail_copy(int64_t nth, int code) {
  return guarded([&] {
    if (nth < 1 || code == ACL_SUCCESS) {
      throw SimulatorError(ACL_ERROR_INVALID_PARAM, "nth starts at 1, code is not 0");
    }
    Engine::get().faults.fail_copy(nth, code);
  });
}

NPU_SIM_EXPORT int npu_sim_stall(aclrtStream handle) {
  return guarded([&] {
    Engine& engine = Engine::get();
    Engine::Lock lock(engine.mutex);
    ++find_stream(engine, handle)->stalls;
  });
}

NPU_SIM_EXPORT int npu_sim_release(aclrtStream handle) {
  return guarded([&] {
    Engine& engine = Engine::get();
    Engine::Lock lock(engine.mutex);
    auto stream = find_stream(engine, handle);
    if (stream->stalls == 0) {
      throw SimulatorError(ACL_ERROR_INVALID_PARAM, "the stream is not stalled");
    }
    --stream->stalls;
    stream->work.notify_all();
  });
}

NPU_SIM_EXPORT void npu_sim_clear_faults() {
  Engine& engine = Engine::get();
  engine.faults.clear();
  Engine::Lock lock(engine.mutex);
  for (auto& context : engine.contexts) context->failure = {};
  for (auto& [handle, stream] : engine.streams) {
    stream->stalls = 0;
    stream->failure = {};
    stream->work.notify_all();
  }
}

NPU_SIM_EXPORT int64_t npu_sim_now_ns() { return Engine::get().host_ns(); }
NPU_SIM_EXPORT int64_t npu_sim_callback_ns() { return callback_ns(); }
NPU_SIM_EXPORT void npu_sim_caused_at(int64_t ns) { Engine::thread_is_caused_at(ns); }

NPU_SIM_EXPORT void npu_sim_timeline_start() {
  Engine& engine = Engine::get();
  Engine::Lock lock(engine.mutex);
  engine.timeline.clear();
  engine.recording_timeline = true;
}

NPU_SIM_EXPORT char* npu_sim_timeline_stop() {
  Engine& engine = Engine::get();
  std::vector<TimelineEntry> entries;
  {
    Engine::Lock lock(engine.mutex);
    engine.recording_timeline = false;
    entries.swap(engine.timeline);
  }
  std::ostringstream out;
  out << "[";
  for (size_t i = 0; i < entries.size(); ++i) {
    const TimelineEntry& entry = entries[i];
    out << (i ? ", " : "");
    JsonObject task(out);
    task.add("stream", entry.stream);
    task.add("handle", static_cast<int64_t>(reinterpret_cast<uintptr_t>(entry.handle)));
    task.key("kind") << "\"" << entry.kind << "\"";
    task.add("bytes", entry.bytes);
    task.add("start_ns", entry.start_ns);
    task.add("end_ns", entry.end_ns);
  }
  out << "]";
  return give_away(out.str());
}
