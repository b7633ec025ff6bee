// What the core library asks of the NPU library, which registers itself when it is loaded. Calls
// whose tensors are all on the CPU (`.ptrs`) get to the NPU this way and not through the
// dispatcher.
#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <cstddef>
#include <functional>

#include "runtime/export.h"
#include "runtime/signal_runtime.h"
#include "runtime/stream_runtime.h"
#include "transfer/call_scheduler.h"

namespace npu_kv {

class NpuHook {
 public:
  virtual ~NpuHook() = default;

  // The arguments have passed check_pointer_arguments().
  virtual void copy_pointers(const at::Tensor& src_ptrs, const at::Tensor& dst_ptrs,
                             const at::Tensor& sizes, int64_t direction) = 0;

  // Lets go of host memory whose copies are done, and looks for copies that have failed.
  virtual void release_finished() = 0;

  // Of the calls whose block ids lie on an NPU: has streams that get to one copy nothing from now
  // on; lets go of what belongs to graphs and returns how many; stops doing so because the process
  // ends; what a device has served; what the runtime has for them.
  virtual void stop_deferred_calls(std::chrono::nanoseconds timeout) = 0;
  virtual size_t release_graphs(int device) = 0;
  virtual void end_graphs(std::chrono::nanoseconds timeout) = 0;
  virtual size_t live_graphs() = 0;
  virtual CallStats deferred_call_stats(int device) = 0;
  virtual SignalSupport signal_support() = 0;

  // For the copy backend.
  virtual StreamRuntime& runtime() = 0;
  // The runtime's handle of a stream of torch_npu; does not wait for the task queue.
  virtual StreamRef stream(int device, int64_t stream_id) = 0;
  // Puts a task into the device's task queue, behind what was put there before. It must not throw.
  virtual void run_in_queue(int device, const char* name, std::function<void()> task) = 0;
  // Throws when the stream captures a graph.
  virtual void refuse_capture(StreamRef stream, const char* what) = 0;
};

NPU_KV_API void set_npu_hook(NpuHook* hook);
NPU_KV_API NpuHook* npu_hook();  // null when the NPU library is not loaded

}  // namespace npu_kv
