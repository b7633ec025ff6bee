#include "transfer/event_pool.h"

namespace npu_kv {

EventPool::EventPool(StreamRuntime& runtime) : shared_(new Shared{runtime, {}, {}, false}) {}

Status EventPool::take(EventHandle* event) {
  void* raw = nullptr;
  {
    std::lock_guard lock(shared_->mutex);
    if (!shared_->free.empty()) {
      raw = shared_->free.back();
      shared_->free.pop_back();
    }
  }
  if (raw == nullptr) {
    if (Status status = shared_->runtime.create_event(&raw); !status.ok()) return status;
  }
  *event = EventHandle(raw, [shared = shared_](void* released) {
    std::unique_lock lock(shared->mutex);
    if (!shared->closed) {
      shared->free.push_back(released);
      return;
    }
    lock.unlock();
    shared->runtime.destroy_event(released);
  });
  return {};
}

void EventPool::close() {
  std::vector<void*> free;
  {
    std::lock_guard lock(shared_->mutex);
    shared_->closed = true;
    free.swap(shared_->free);
  }
  for (void* event : free) shared_->runtime.destroy_event(event);
}

}  // namespace npu_kv
