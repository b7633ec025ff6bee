#include "ops/npu/call_slot.h"

#include <string>

#include "ops/python_border.h"

namespace npu_kv {
namespace {

void require(const Status& status, const char* what) {
  if (status.ok()) return;
  throw_transfer_error("npu_kv: calls that the scheduler serves need " + std::string(what) + ": " +
                       status.message());
}

}  // namespace

CallSlot::CallSlot(SignalRuntime& runtime, int device, size_t ids_bytes) : runtime_(runtime) {
  if (ids_bytes != 0) grow(ids_bytes);
  require(runtime.create_signal(device, &signal_), "a signal that the stream can wait for");
}

CallSlot::~CallSlot() {
  if (!left_set_) runtime_.destroy_signal(signal_);
}

void CallSlot::grow(size_t ids_bytes) {
  void* memory = nullptr;
  require(runtime_.allocate_host(ids_bytes, &memory), "page-locked memory for the ids");
  ids_memory_ = std::shared_ptr<void>(
      memory, [&runtime = runtime_](void* released) { runtime.free_host(released); });
  ids_bytes_ = ids_bytes;
}

}  // namespace npu_kv
