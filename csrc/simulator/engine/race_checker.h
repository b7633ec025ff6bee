// Finds accesses to the same bytes, at least one a write, that nothing orders.
//
// Every stream, every stream inside a replayed graph and the host is a component with steps of its
// own. A task starts behind the task before it on its stream, what the host had seen when it
// submitted the task, and the records it waits for. All host threads are one component: the checker
// cannot see their mutexes, and takes a call that returned before another began to be ordered
// before it. docs/simulator.md says what follows from that.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "engine/access_map.h"
#include "engine/call_origin.h"
#include "engine/memory.h"
#include "engine/vector_clock.h"

namespace npu_kv::sim {

class Stream;
struct Task;

/// Who accesses memory: a task that runs, or a call of the host that works at once.
struct Actor {
  Moment moment;
  std::shared_ptr<const CallOrigin> call;    // that submitted it
  std::shared_ptr<const CallOrigin> replay;  // that queued the graph it is in; null outside graphs
  const char* kind = "";
  int stream = -1;  // -1: the host
  const void* handle = nullptr;
  uint64_t task = 0;  // its number on the stream, or in its stream inside the graph
};
using ActorRef = std::shared_ptr<const Actor>;

/// Where a running task stands: who it is, and what has happened before it.
struct TaskOrder {
  ActorRef actor;
  VectorClock clock;
};

struct Race {
  enum class Kind { kAccess, kBatch, kFreed };
  Kind kind;
  ActorRef first;
  ActorRef second;
  bool first_writes;
  bool second_writes;
  Place place;
  uintptr_t address;  // as the user sees it
  size_t bytes;
  int64_t count = 1;  // how many pairs of tasks of these two calls raced
};

/// Thread-safe; locks nothing else while it holds its own lock.
class RaceChecker {
 public:
  /// The only cost while it is off.
  bool on() const { return session_.load(std::memory_order_relaxed) % 2 == 1; }
  /// Work that was submitted before is not checked.
  void start();
  /// Forgets all accesses; the races that were found stay.
  void stop();
  /// How many races wait to be taken. One that is found again from now on is a new one.
  size_t mark();
  /// The races that wait, but for the `first` ones.
  std::vector<Race> take(size_t first = 0);

  /// For a stream. Numbers are used again, so a component is dropped only when the host has seen
  /// all it did.
  uint32_t add_component();
  void drop_component(uint32_t component);

  // --- the host ---
  /// Of a call that submits a task; null while off.
  std::shared_ptr<const CallOrigin> submitting(const std::string& label, bool captured);
  /// The host has learned that all this is over.
  void host_saw(const ClockRef& clock);
  /// What the host has seen by now; null while off.
  ClockRef host_clock();
  /// A call that accesses memory before it returns; null while off. finish_on_host follows.
  std::shared_ptr<TaskOrder> begin_on_host(const char* kind);
  void finish_on_host(const std::shared_ptr<TaskOrder>& order);
  /// The host has freed this memory, which is not live any more.
  void freed(const std::shared_ptr<Allocation>& allocation);

  // --- tasks ---
  /// Null for a task that is not checked. With the engine's mutex.
  std::shared_ptr<TaskOrder> begin(const Stream& stream, const Task& task);
  /// Of every task that begin was asked about.
  void finish(const Task& task);
  /// A task of a graph, behind `before`, as part of a replay.
  std::shared_ptr<TaskOrder> begin_captured(const TaskOrder& replay, const Task& task,
                                            const VectorClock& before, uint32_t component,
                                            uint64_t number);
  /// A wait for a value was met: whoever wrote it comes before.
  void saw_word(TaskOrder& order, const char* storage);

  /// The accesses of one task or call. Holds the checker's lock.
  class Accesses {
   public:
    /// `allocations` hold the bytes that follow, unless those are page-able. Finds out whether any
    /// of them has been freed.
    Accesses(RaceChecker& checker, const TaskOrder& order,
             std::span<const std::shared_ptr<Allocation>> allocations, bool unordered = false);
    void read(const char* storage, size_t bytes);
    void write(const char* storage, size_t bytes);

   private:
    void add(const char* storage, size_t bytes, bool write);

    RaceChecker& checker_;
    const TaskOrder& order_;
    std::span<const std::shared_ptr<Allocation>> allocations_;
    const bool unordered_;
    const std::lock_guard<std::mutex> lock_;
  };

 private:
  using Map = AccessMap<Actor>;

  const ClockRef& host_snapshot();
  void report(Race race);
  void prune_if_large();

  std::atomic<uint64_t> session_{0};  // odd while on
  std::mutex mutex_;
  std::vector<uint64_t> steps_{0};  // of every component; 0 is the host
  std::vector<uint32_t> free_components_;
  VectorClock host_;
  ClockRef host_snapshot_;  // null when host_ has moved on
  uint64_t last_call_ = 0;
  std::map<uint64_t, ClockRef> open_;  // submitted and not finished, by number of the call
  Map map_;
  size_t prune_at_ = 0;
  std::vector<Race> races_;
  std::map<std::string, size_t> known_;  // what tells races apart, and where in races_ it is
};

/// A call of the host that accesses memory before it returns.
class HostAccess {
 public:
  HostAccess(RaceChecker& checker, const char* kind)
      : checker_(checker), order_(checker.begin_on_host(kind)) {}
  ~HostAccess() { checker_.finish_on_host(order_); }
  HostAccess(const HostAccess&) = delete;
  HostAccess& operator=(const HostAccess&) = delete;
  /// Null unless races are checked.
  const TaskOrder* order() const { return order_.get(); }

 private:
  RaceChecker& checker_;
  const std::shared_ptr<TaskOrder> order_;
};

}  // namespace npu_kv::sim
