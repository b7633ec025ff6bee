// Events, in the runtime's three kinds, and the record that a waiter holds.
#pragma once

#include <cstdint>
#include <memory>

#include "engine/error.h"
#include "engine/vector_clock.h"

namespace npu_kv::sim {

class Graph;
class Stream;

/// One record of an event, or any other completion somebody can wait for. Guarded by the engine's
/// mutex. A task that is dropped unrun completes its record as well, as failed.
class Record {
 public:
  std::weak_ptr<Stream> stream;
  bool done = false;
  int64_t time_ns = 0;
  ClockRef clock;  // what has happened before it
  Failure failure;
};

/// Guarded by the engine's mutex.
class Event {
 public:
  enum class Kind {
    kSnapshot,  // aclrtCreateEventExWithFlag: a wait takes the latest record at the call
    kFlag,      // aclrtCreateEventWithFlag: a word that records set and resets clear
    kDefault,   // aclrtCreateEvent: a wait takes the latest record too, and there has to be one
  };

  Event(Kind kind, uint32_t flags) : kind(kind), flags(flags) {}

  const Kind kind;
  const uint32_t flags;
  std::shared_ptr<Record> latest;
  bool flag_set = false;
  int64_t flag_ns = 0;
  ClockRef flag_clock;

  /// While a capture is under way: the edge its latest captured record made.
  Graph* captured_in = nullptr;
  int edge = -1;
  int edge_lane = -1;
};

}  // namespace npu_kv::sim
