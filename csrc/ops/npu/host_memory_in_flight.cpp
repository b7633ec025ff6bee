#include "ops/npu/host_memory_in_flight.h"

#include <utility>

#include "runtime/acl/acl_api.h"

namespace npu_kv {

void* HostMemoryInFlight::take_event(int device) {
  {
    std::lock_guard lock(mutex_);
    for (auto at = free_events_.begin(); at != free_events_.end(); ++at) {
      if (at->first != device) continue;
      void* event = at->second;
      free_events_.erase(at);
      return event;
    }
  }
  aclrtEvent event = nullptr;
  // The kind torch_npu's own pinned allocator uses: recorded and queried, never waited for.
  if (optional_acl_functions().query_event_status == nullptr ||
      aclrtCreateEventExWithFlag(&event, ACL_EVENT_CAPTURE_STREAM_PROGRESS) != ACL_SUCCESS) {
    return nullptr;
  }
  return event;
}

void HostMemoryInFlight::hold(std::vector<c10::Storage> storages, StreamRef stream) {
  auto raw_stream = static_cast<aclrtStream>(stream.handle);
  void* event = take_event(stream.device);
  if (event == nullptr || aclrtRecordEvent(event, raw_stream) != ACL_SUCCESS) {
    if (event != nullptr) aclrtDestroyEvent(event);
    // An error of the stream surfaces at the caller's own synchronize.
    (void)aclrtSynchronizeStream(raw_stream);
    return;
  }
  std::lock_guard lock(mutex_);
  held_.push_back({event, stream.device, std::move(storages)});
}

bool HostMemoryInFlight::is_done(void* event) {
  aclrtEventRecordedStatus status = ACL_EVENT_RECORDED_STATUS_NOT_READY;
  // A query fails on a device that is lost: nothing will touch the memory any more.
  return optional_acl_functions().query_event_status(event, &status) != ACL_SUCCESS ||
         status == ACL_EVENT_RECORDED_STATUS_COMPLETE;
}

void HostMemoryInFlight::release_finished(size_t patience) {
  std::vector<Held> done;  // destroyed after the lock is released: a deleter may run any code
  std::unique_lock lock(mutex_);
  for (auto held = held_.begin(); held != held_.end() && patience > 0;) {
    if (!is_done(held->event)) {
      --patience;
      ++held;
      continue;
    }
    free_events_.emplace_back(held->device, held->event);
    done.push_back(std::move(*held));
    held = held_.erase(held);
  }
}

HostMemoryInFlight& host_memory_in_flight() {
  // Never destroyed: freeing page-locked memory after the runtime has shut down is an error.
  static auto* memory = new HostMemoryInFlight;
  return *memory;
}

}  // namespace npu_kv
