// What one part of a deferred call has of the runtime: the signal that its stream waits for and,
// for one part of each call, page-locked memory for the ids.
#pragma once

#include <cstddef>
#include <memory>

#include "runtime/signal_runtime.h"

namespace npu_kv {

// Not thread-safe: a stream's is guarded by that stream's mutex, a graph's by the mutex of the
// StartedSwap that it is of, if any, and not changed once it is captured. Must outlive every use by
// a stream. The device must be current on the threads that make, grow and destroy it.
class CallSlot {
 public:
  // Throws TransferError when the runtime refuses or lacks something. No bytes: no memory.
  CallSlot(SignalRuntime& runtime, int device, size_t ids_bytes);
  ~CallSlot();
  CallSlot(const CallSlot&) = delete;
  CallSlot& operator=(const CallSlot&) = delete;

  void* signal() const { return signal_; }
  // Between the two the signal may still be set by somebody: it is not used again.
  void will_be_waited_for() { left_set_ = true; }
  void is_waited_for() { left_set_ = false; }
  const std::shared_ptr<void>& ids_memory() const { return ids_memory_; }
  size_t ids_bytes() const { return ids_bytes_; }

  // Exchanges the memory for more. Calls that are under way keep the old one alive.
  void grow(size_t ids_bytes);

 private:
  SignalRuntime& runtime_;
  void* signal_ = nullptr;
  bool left_set_ = false;
  std::shared_ptr<void> ids_memory_;
  size_t ids_bytes_ = 0;
};

}  // namespace npu_kv
