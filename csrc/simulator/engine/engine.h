// The simulated machine: its devices, everything that lives on them, and the one lock that guards
// streams, events, graphs and callbacks.
//
// One mutex and one condition variable for all of them keeps the rules that cut across streams
// (capture, stop-on-failure, event waits) simple; payloads move and callbacks run without it.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "engine/counters.h"
#include "engine/faults.h"
#include "engine/memory.h"
#include "engine/race_checker.h"
#include "engine/settings.h"
#include "engine/task.h"

namespace npu_kv::sim {

class CallbackThread;
class Context;
class Event;
class Graph;

/// One executed task on the virtual clock.
struct TimelineEntry {
  int stream;
  void* handle;
  const char* kind;
  int64_t bytes;
  int64_t start_ns;
  int64_t end_ns;
};

/// Created at the first call and never destroyed: threads of a process that ends may still call in.
class Engine {
 public:
  using Lock = std::unique_lock<std::mutex>;

  static Engine& get();

  Settings settings;
  MemoryMap memory{settings};
  Counters counters;
  Faults faults;
  RaceChecker races;

  /// Virtual time of the host, ns. Moves with each submission and each completed synchronise. The
  /// same for all threads, but for those that have told what they were caused by.
  int64_t host_ns() const;
  int64_t host_spends(int64_t ns);  // returns the time afterwards
  void host_reaches(int64_t ns);
  /// From now on the calling thread has a time of its own, which is not before `ns`.
  static void thread_is_caused_at(int64_t ns);

  /// True in a child that was forked after the first call: the threads are the parent's, and the
  /// lock may be held by one of them.
  std::atomic<bool> forked{false};

  std::mutex mutex;
  /// Notified, with `mutex` held, whenever anything a thread may wait for has changed.
  std::condition_variable changed;

  // --- guarded by mutex ---------------------------------------------------------------------
  std::unordered_map<void*, std::shared_ptr<Stream>> streams;
  std::unordered_map<void*, std::shared_ptr<Event>> events;
  std::unordered_map<void*, std::shared_ptr<Graph>> graphs;
  std::map<uint64_t, std::shared_ptr<CallbackThread>> subscribed_threads;
  int next_stream_id = 0;
  int live_threads = 0;
  bool recording_timeline = false;
  std::vector<TimelineEntry> timeline;
  bool exiting = false;
  // ------------------------------------------------------------------------------------------

  /// The device's default context, made at first use. Throws 107001 for an unknown device.
  /// With mutex held.
  Context& primary_context(int device);
  /// All contexts, never removed. With mutex held.
  std::vector<std::unique_ptr<Context>> contexts;

  void add_timeline(const Stream& stream, const Task& task, int64_t start_ns, int64_t end_ns);

 private:
  Engine();
  std::atomic<int64_t> shared_host_ns_{0};
};

/// Context of the calling thread; null until aclrtSetDevice.
Context*& current_context();
/// As above; throws 107002.
Context& require_context();

}  // namespace npu_kv::sim
