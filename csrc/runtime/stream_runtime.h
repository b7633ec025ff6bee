// What the copy backend needs of a runtime besides copies: streams of its own, events, and binding
// a thread to a device. The host runtime, which has neither, answers as if every stream were idle.
#pragma once

#include <cstdint>

#include "runtime/runtime.h"

namespace npu_kv {

enum class EventState { kPending, kDone };

// What synchronize_stream answers when the time is over: the number that ACL has for it.
inline constexpr int kTimedOut = 507046;

// May be used from any thread that has called use_device. Handles are the runtime's own; a null
// event or stream is not valid, except that host streams are null.
class StreamRuntime : public Runtime {
 public:
  // Makes `device` current on the calling thread.
  virtual Status use_device(int device) = 0;

  // A stream of the lowest priority the runtime has.
  virtual Status create_stream(int device, StreamRef* stream) = 0;
  virtual void destroy_stream(StreamRef stream) = 0;

  // An event that can be recorded again and again; a wait takes its latest record.
  virtual Status create_event(void** event) = 0;
  virtual void destroy_event(void* event) = 0;
  virtual Status record_event(void* event, StreamRef stream) = 0;
  virtual Status wait_event(StreamRef stream, void* event) = 0;

  // Does not block. An error of the work before the event is the status.
  virtual Status event_state(void* event, EventState* state) = 0;
  // Whether the event was reached, and nothing else: an error of the work before it stays to be
  // told.
  virtual bool event_reached(void* event) = 0;
  // When the event was reached, in microseconds of a clock of the device. 207000 where the runtime
  // cannot tell.
  virtual Status event_timestamp(void* event, uint64_t* microseconds) = 0;

  // Waits for everything on the stream, at most so long. An error of that work, or the running out
  // of the time, is the status.
  virtual Status synchronize_stream(StreamRef stream, int timeout_ms) = 0;

  // Copies issued between the two are recorded instead, for execute_graph. A capture that went
  // wrong ends with an error and a null graph. Other threads may go on with blocking copies
  // meanwhile, and may not synchronise the device. All answer kNotSupported where the runtime has
  // no graphs.
  virtual Status begin_capture(StreamRef stream) = 0;
  virtual Status end_capture(StreamRef stream, void** graph) = 0;
  virtual Status execute_graph(void* graph, StreamRef stream) = 0;
  virtual void destroy_graph(void* graph) = 0;
};

}  // namespace npu_kv
