// What a call whose block ids lie in device memory needs of a runtime besides copies: a way for the
// stream to call the host, a way for the host to let the stream go on, and host memory for the ids.
// Everything that is put on a stream may be captured into a graph, and is done at every replay.
#pragma once

#include <cstddef>
#include <string>

#include "runtime/runtime.h"

namespace npu_kv {

// What a message or a report says of the running release. `missing` is empty when it has both.
struct SignalSupport {
  std::string callbacks;
  std::string signals;
  std::string missing;
};

// May be used from any thread; the calling thread must have the stream's device as its current one.
// What the runtime lacks is kNotSupported, with a message that names the missing functions.
class SignalRuntime {
 public:
  using Callback = void (*)(void*);

  virtual ~SignalRuntime() = default;

  // Has the stream call `callback(argument)` on some thread of the host and wait until it returns.
  // The callback may not call the runtime. A captured argument must outlive the graph.
  virtual Status launch_callback(StreamRef stream, Callback callback, void* argument) = 0;

  // For a runtime with a clock of its own (a simulated one): within a callback, its time; and that
  // what the calling thread does next was caused by what happened then.
  virtual int64_t callback_time() { return 0; }
  virtual void caused_at(int64_t /*time*/) {}

  // A signal is not set at first. Must be destroyed when no stream will use it any more.
  virtual Status create_signal(int device, void** signal) = 0;
  virtual void destroy_signal(void* signal) = 0;
  // The stream waits until the signal is set, also when that has not been asked for yet, and takes
  // it back.
  virtual Status wait_signal(StreamRef stream, void* signal) = 0;
  // Sets the signal when the stream gets there.
  virtual Status set_signal(StreamRef stream, void* signal) = 0;

  // Page-locked host memory.
  virtual Status allocate_host(size_t bytes, void** memory) = 0;
  virtual void free_host(void* memory) = 0;
  // An asynchronous copy of device memory to page-locked host memory.
  virtual Status read_device(void* host, const void* device, size_t bytes, StreamRef stream) = 0;
};

}  // namespace npu_kv
