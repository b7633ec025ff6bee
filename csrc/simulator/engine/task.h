// A task is one unit of work of a stream. It lives in a stream's queue and runs once, or in a
// captured graph and runs at every replay; hence its body is a constant function of the run.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "engine/vector_clock.h"

namespace npu_kv::sim {

class Stream;
class GraphRun;
class Record;
struct CallOrigin;
struct TaskOrder;

/// One execution of one task, on the worker thread of `stream` (or on a replay's helper thread).
struct TaskRun {
  Stream& stream;   // the visible stream that executes this (for a replay: where it was put)
  GraphRun* graph;  // the replay this task belongs to, or null
  int64_t now_ns;   // virtual time: start of the task; the body moves it forward
  std::shared_ptr<TaskOrder> order = nullptr;  // null unless races are checked

  void advance(int64_t ns) { now_ns += ns; }
  void reach(int64_t ns) {
    if (ns > now_ns) now_ns = ns;
  }
  /// For the race checker: what is over for this task from now on, and for what comes after it.
  void happens_after(const ClockRef& earlier);
  ClockRef clock() const;
};

struct Task {
  const char* kind;  // "copy", "batch", "record", "wait", ...; literals only
  int64_t bytes = 0;
  int64_t submitted_ns =
      0;  // virtual host time of the call: no task starts before it was submitted
  /// Throws SimulatorError when the device would report a failure of this task.
  std::function<void(TaskRun&)> body;
  /// Completed (as failed) when the task is dropped unrun, so that no waiter hangs.
  std::shared_ptr<Record> record;
  std::string label;                         // the type of an operator
  std::shared_ptr<const CallOrigin> origin;  // null unless races are checked
};

}  // namespace npu_kv::sim
