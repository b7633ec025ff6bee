// Host memory that torch_npu does not own, kept alive until the copies that use it are done.
#pragma once

#include <c10/core/Storage.h>

#include <cstddef>
#include <deque>
#include <mutex>
#include <vector>

#include "runtime/runtime.h"

namespace npu_kv {

// Thread-safe.
class HostMemoryInFlight {
 public:
  // Holds the storages until the stream has passed this point. Called by whoever issues, after the
  // copies; the device must be current. When no event can be recorded it waits for the stream.
  void hold(std::vector<c10::Storage> storages, StreamRef stream);

  // Lets go of what is done, oldest first, without waiting. Gives up after `patience` that are not
  // done, so that a call of the operator does not get slower with the number of calls under way.
  // Storages may be freed on the calling thread.
  void release_finished(size_t patience);

 private:
  struct Held {
    void* event;
    int device;
    std::vector<c10::Storage> storages;
  };

  void* take_event(int device);
  static bool is_done(void* event);

  std::mutex mutex_;
  std::deque<Held> held_;
  std::vector<std::pair<int, void*>> free_events_;  // device, event
};

HostMemoryInFlight& host_memory_in_flight();

}  // namespace npu_kv
