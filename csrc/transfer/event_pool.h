// Runtime events that are used again: a job takes one, and it comes back when the last user lets
// go.
#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "runtime/export.h"
#include "runtime/stream_runtime.h"

namespace npu_kv {

using EventHandle = std::shared_ptr<void>;

// Thread-safe. Events may outlive the pool object; the calling thread of the last release destroys
// those that come back after close().
class NPU_KV_API EventPool {
 public:
  explicit EventPool(StreamRuntime& runtime);

  Status take(EventHandle* event);
  // Destroys the free events; later ones are destroyed when they come back.
  void close();

 private:
  struct Shared {
    StreamRuntime& runtime;
    std::mutex mutex;
    std::vector<void*> free;
    bool closed = false;
  };
  std::shared_ptr<Shared> shared_;
};

}  // namespace npu_kv
