#include "engine/graph.h"

#include <algorithm>
#include <exception>
#include <sstream>

#include "engine/context.h"
#include "engine/stream.h"

namespace npu_kv::sim {

int Graph::add_lane(std::shared_ptr<Stream> stream) {
  const int lane = static_cast<int>(lanes_.size());
  stream->capture = this;
  stream->lane = lane;
  lanes_.push_back({std::move(stream), {}, -1, {}});
  return lane;
}

void Graph::require_valid() const {
  if (state == State::kInvalidated) {
    throw SimulatorError(ACL_ERROR_RT_STREAM_CAPTURE_INVALIDATED,
                         "EE1016: the capture of this stream has been invalidated");
  }
}

void Graph::add(int lane, Task task) {
  require_valid();
  lanes_[lane].tasks.push_back(std::move(task));
  lanes_[lane].last_record = -1;
}

void Graph::reserve_copies(int lane, Direction direction, int64_t copies, int64_t limit) {
  int64_t& used = lanes_[lane].copies[static_cast<size_t>(direction)];
  if (limit > 0 && used + copies > limit) {
    state = State::kInvalidated;  // what is missing in it makes the graph useless
    throw SimulatorError(ACL_ERROR_RT_NO_STREAM_RESOURCE,
                         "EE1023: a captured stream holds at most " + std::to_string(limit) +
                             " copies in one direction; " + std::to_string(used) +
                             " are captured, " + std::to_string(copies) + " more were asked for");
  }
  used += copies;
}

void Graph::add_record(int lane, Event& event) {
  const int edge = static_cast<int>(edges_.size());
  Task task;
  task.kind = "record";
  task.body = [edge](TaskRun& run) {
    Engine& engine = Engine::get();
    Engine::Lock lock(engine.mutex);
    run.graph->edges[edge] = {true, run.now_ns, run.clock()};
    engine.changed.notify_all();
  };
  add(lane, std::move(task));
  edges_.push_back({lane, {}});
  lanes_[lane].last_record = edge;
  event.captured_in = this;
  event.edge = edge;
  event.edge_lane = lane;
  events_.push_back(Engine::get().events.at(&event));
}

void Graph::add_wait(int lane, const Event& event) {
  if (event.edge_lane == lane) return;
  const int edge = event.edge;
  Task task;
  task.kind = "wait";
  task.body = [edge](TaskRun& run) {
    Engine& engine = Engine::get();
    Engine::Lock lock(engine.mutex);
    wait_in_task(lock, engine, run, [&] { return run.graph->edges[edge].done; });
    run.reach(run.graph->edges[edge].time_ns);
    run.happens_after(run.graph->edges[edge].clock);
  };
  add(lane, std::move(task));
  edges_[edge].to.insert(lane);
}

bool Graph::all_lanes_joined() const {
  // A lane is joined when its last task is a record that a joined lane waits for.
  std::vector<bool> joined(lanes_.size(), false);
  joined[0] = true;
  for (bool grew = true; grew;) {
    grew = false;
    for (size_t lane = 1; lane < lanes_.size(); ++lane) {
      if (joined[lane] || lanes_[lane].last_record < 0) continue;
      const auto& waiting = edges_[lanes_[lane].last_record].to;
      if (std::any_of(waiting.begin(), waiting.end(), [&](int other) { return joined[other]; })) {
        joined[lane] = grew = true;
      }
    }
  }
  return std::find(joined.begin(), joined.end(), false) == joined.end();
}

void Graph::release() {
  for (Lane& lane : lanes_) {
    lane.stream->capture = nullptr;
    lane.stream->lane = -1;
    lane.stream.reset();
  }
  for (const auto& event : events_) {
    if (event->captured_in == this) event->captured_in = nullptr;
  }
  events_.clear();
  std::erase(context.captures, this);
}

void Graph::finish() {
  const bool valid = state == State::kCapturing;
  const bool joined = all_lanes_joined();
  release();
  if (!valid) {
    throw SimulatorError(ACL_ERROR_RT_STREAM_CAPTURE_INVALIDATED,
                         "EE1016: the capture was invalidated by an earlier error");
  }
  if (!joined) {
    throw SimulatorError(ACL_ERROR_RT_STREAM_UNJOINED,
                         "EE1016: a stream that was pulled into the capture does not end in an "
                         "event record that leads back to the capture's origin");
  }
  throw_if(refusal_);
  state = State::kReady;
}

std::string Graph::describe() const {
  std::ostringstream text;
  text << "{\"lanes\": [";
  for (size_t lane = 0; lane < lanes_.size(); ++lane) {
    text << (lane ? ", [" : "[");
    for (size_t i = 0; i < lanes_[lane].tasks.size(); ++i) {
      const Task& task = lanes_[lane].tasks[i];
      text << (i ? ", " : "") << "{\"kind\": \"" << task.kind << "\", \"bytes\": " << task.bytes
           << "}";
    }
    text << "]";
  }
  text << "]}";
  return text.str();
}

void Graph::run_lane(size_t lane, TaskRun& run, GraphRun& replay, uint32_t component) const {
  Engine& engine = Engine::get();
  const auto whole = run.order;
  uint64_t number = 0;
  for (const Task& task : lanes_[lane].tasks) {
    const int64_t start_ns = run.now_ns;
    if (whole) {
      run.order = engine.races.begin_captured(*whole, task, run.order->clock, component, ++number);
    }
    Failure failure;
    bool abandoned = false;
    try {
      task.body(run);
    } catch (const SimulatorError& error) {
      failure = error.failure();
    } catch (const Abandoned&) {
      abandoned = true;
    } catch (const std::exception& error) {
      failure = {ACL_ERROR_RT_INTERNAL_ERROR, std::string("EE9999: ") + error.what()};
    }
    Engine::Lock lock(engine.mutex);
    if (failure && !replay.failure) replay.failure = failure;
    replay.abandoned |= abandoned;
    engine.changed.notify_all();
    if (replay.failure || replay.abandoned) break;
    engine.add_timeline(run.stream, task, start_ns, run.now_ns);
  }
}

void Graph::replay(TaskRun& run) const {
  GraphRun state;
  state.edges.resize(edges_.size());
  std::vector<TaskRun> runs(lanes_.size(), TaskRun{run.stream, &state, run.now_ns, run.order});
  auto& components = run.stream.lane_components;  // replays in one stream follow one another
  while (components.size() + 1 < lanes_.size()) {
    components.push_back(Engine::get().races.add_component());
  }
  {
    std::vector<std::jthread> others;
    for (size_t lane = 1; lane < lanes_.size(); ++lane) {
      others.emplace_back([&, lane] { run_lane(lane, runs[lane], state, components[lane - 1]); });
    }
    run_lane(0, runs[0], state, run.stream.component);
  }
  if (run.order) {
    for (const TaskRun& lane : runs) run.happens_after(lane.clock());
    const Engine::Lock lock(Engine::get().mutex);
    auto all = std::make_shared<VectorClock>(run.order->clock);
    if (replayed_) all->join(*replayed_);
    replayed_ = std::move(all);
  }
  if (state.failure) throw SimulatorError(state.failure.code, state.failure.message);
  if (state.abandoned) throw Abandoned{};
  for (const TaskRun& lane : runs) run.reach(lane.now_ns);
}

aclmdlRICaptureMode& thread_capture_mode() {
  thread_local aclmdlRICaptureMode mode = ACL_MODEL_RI_CAPTURE_MODE_GLOBAL;
  return mode;
}

void check_immediate_allowed(Context& context, aclError code) {
  bool any_global = false;
  bool own_global = false;
  bool own_thread_local = false;
  for (const Graph* capture : context.captures) {
    const bool own = capture->begin_thread == std::this_thread::get_id();
    if (capture->mode == ACL_MODEL_RI_CAPTURE_MODE_GLOBAL) {
      any_global = true;
      own_global |= own;
    }
    if (capture->mode == ACL_MODEL_RI_CAPTURE_MODE_THREAD_LOCAL) own_thread_local |= own;
  }
  bool refused = false;
  switch (thread_capture_mode()) {
    case ACL_MODEL_RI_CAPTURE_MODE_GLOBAL:
      refused = any_global || own_thread_local;
      break;
    case ACL_MODEL_RI_CAPTURE_MODE_THREAD_LOCAL:
      refused = own_global || own_thread_local;
      break;
    case ACL_MODEL_RI_CAPTURE_MODE_RELAXED:
      break;
  }
  if (refused) {
    throw SimulatorError(code,
                         "EE1016: an operation that runs at once (a synchronous copy or memset, or "
                         "an asynchronous copy of page-able memory) is not allowed during capture");
  }
}

}  // namespace npu_kv::sim
