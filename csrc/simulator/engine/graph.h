// Captured graphs: what a capture collects, the rules while it is under way, and the replay.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "engine/counters.h"
#include "engine/engine.h"
#include "engine/error.h"
#include "engine/event.h"
#include "engine/task.h"

namespace npu_kv::sim {

/// Guarded by the engine's mutex while it captures; its lanes do not change afterwards.
class Graph : public std::enable_shared_from_this<Graph> {
 public:
  enum class State { kCapturing, kInvalidated, kReady };

  Graph(Context& context, aclmdlRICaptureMode mode) : context(context), mode(mode) {}

  Context& context;
  const aclmdlRICaptureMode mode;
  const std::thread::id begin_thread = std::this_thread::get_id();
  State state = State::kCapturing;
  int id = 0;
  std::atomic<int> running{0};                       // replays that are queued or under way
  std::map<aclrtCallback, void*> destroy_callbacks;  // run in this order when it is destroyed

  /// Notes what makes the capture useless, though it goes on: finish throws the first of these.
  void refuse(Failure failure) {
    if (!refusal_) refusal_ = std::move(failure);
  }

  /// Adds a stream to the capture; lane 0 is the origin.
  int add_lane(std::shared_ptr<Stream> stream);
  /// Throws 507903 after an invalidation.
  void require_valid() const;
  /// Appends a task. Throws 507903 after an invalidation.
  void add(int lane, Task task);
  /// Throws 207008, and invalidates the capture, when `copies` more in this direction exceed the
  /// limit of the lane.
  void reserve_copies(int lane, Direction direction, int64_t copies, int64_t limit);

  /// A record of a captured event: a new edge that leaves `lane`.
  void add_record(int lane, Event& event);
  /// A wait for the event's edge: the edge enters `lane`.
  void add_wait(int lane, const Event& event);

  /// Ends the capture: streams and events are ordinary again. Throws what End has to answer, after
  /// which the graph is of no use.
  void finish();
  /// Takes streams and events out of the capture without finishing the graph.
  void release();

  Stream& origin() const { return *lanes_[0].stream; }
  size_t lane_count() const { return lanes_.size(); }
  std::string describe() const;  // JSON, for the debug prints

  /// Runs everything once, as part of `run`: lane 0 on the calling thread, each other lane on a
  /// thread of its own, so that a lane blocked on an external event does not block the others.
  void replay(TaskRun& run) const;
  /// For the race checker: what the replays so far have done. With the engine's mutex.
  ClockRef replayed() const { return replayed_; }

 private:
  struct Lane {
    std::shared_ptr<Stream> stream;  // until the capture ends
    std::vector<Task> tasks;
    int last_record = -1;  // edge, when the last task is an event record
    std::array<int64_t, 4> copies{};
  };
  struct Edge {
    int from;
    std::set<int> to;
  };

  bool all_lanes_joined() const;
  /// Moves `run` to the end of the lane.
  void run_lane(size_t lane, TaskRun& run, GraphRun& replay, uint32_t component) const;

  std::vector<Lane> lanes_;
  std::vector<Edge> edges_;
  std::vector<std::shared_ptr<Event>> events_;  // those this capture has recorded
  Failure refusal_;
  mutable ClockRef replayed_;
};

/// The state of one replay. Guarded by the engine's mutex.
class GraphRun {
 public:
  struct Edge {
    bool done = false;
    int64_t time_ns = 0;
    ClockRef clock;
  };
  std::vector<Edge> edges;
  Failure failure;         // of the first task that failed
  bool abandoned = false;  // a task was given up
};

/// Throws 107030 (107041 for an asynchronous copy that page-able memory makes synchronous) when a
/// capture under way forbids immediately executing operations to the calling thread. Mutex held.
void check_immediate_allowed(Context& context, aclError code);
aclmdlRICaptureMode& thread_capture_mode();

}  // namespace npu_kv::sim
