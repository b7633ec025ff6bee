// What captured graphs need of the operator for as long as they may be replayed.
#pragma once

#include <c10/core/Storage.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <unordered_set>
#include <utility>
#include <vector>

#include "ops/npu/call_slot.h"
#include "runtime/runtime.h"
#include "transfer/deferred_call.h"

namespace npu_kv {

// One graph's: the deferred calls with their slots, and the tensors of all its calls, which it
// copies from and to whether or not anybody else still has them. Thread-safe.
class CapturedGraph {
 public:
  explicit CapturedGraph(int device);
  // Waits for calls that are still being served: a stream need not have waited for them.
  ~CapturedGraph();
  CapturedGraph(const CapturedGraph&) = delete;
  CapturedGraph& operator=(const CapturedGraph&) = delete;

  // Keeps what it was given; a storage is kept once.
  void hold(std::vector<c10::Storage> storages);
  // Numbers the call.
  DeferredCall* add(std::unique_ptr<DeferredCall> call,
                    std::vector<std::unique_ptr<CallSlot>> slots);

  // Notes copies that the graph's own tasks make, which the runtime limits by stream and direction.
  // False, and nothing is noted, when more than `limit` would be taken (0: no limit); `*taken` is
  // what was noted before.
  bool take_copies(StreamRef stream, Direction direction, size_t copies, size_t limit,
                   size_t* taken);

  const int device;
  const uint64_t number;  // from 1, of no other graph

 private:
  std::mutex mutex_;
  std::vector<c10::Storage> storages_;
  std::unordered_set<const c10::StorageImpl*> held_;
  std::vector<std::unique_ptr<CallSlot>> slots_;
  std::vector<std::unique_ptr<DeferredCall>> calls_;
  std::map<std::pair<void*, Direction>, size_t> copies_;
};

// Whether the stream captures now. A caller may be too early to know: torch_npu may not have issued
// yet what makes a stream part of a capture. On the thread that issues, behind that, it is known.
bool is_capturing(StreamRef stream);

// All graphs of the process. Thread-safe.
class CapturedGraphs {
 public:
  // The graph that the stream is capturing now; the device must be current. Throws when the capture
  // has become invalid.
  CapturedGraph& captured_by(StreamRef stream);

  // Lets go of what belongs to graphs of a device (of any device when negative), for runtimes that
  // do not tell when a graph is destroyed. No such graph may be replayed again. Returns how many.
  size_t release(int device);
  // For the end of the process: what belongs to graphs that are destroyed from now on is left to
  // it. Python is about to go, which their tensors may belong to. Waits for what is being released.
  void end(std::chrono::nanoseconds timeout);
  // Graphs that hold something now.
  size_t live() const;

 private:
  struct Entry {
    uint32_t id = 0;
    std::unique_ptr<CapturedGraph> graph;
  };
  static void on_destroyed(void* graph);
  std::unique_ptr<CapturedGraph> take(void* graph);

  mutable std::mutex mutex_;
  std::map<void*, Entry> graphs_;  // by the runtime's handle
};

CapturedGraphs& captured_graphs();

}  // namespace npu_kv
