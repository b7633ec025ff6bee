// A call of the operator that is served when the stream gets there, once in eager code and at every
// replay in a captured graph: its block ids lie in device memory, or the stream does not wait for
// the copies at once.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "runtime/export.h"
#include "transfer/block_transfer.h"

namespace npu_kv {

class CallScheduler;

// The next tensors of a call, and what the stream waits for before it uses them.
struct CallPart {
  size_t tensors = 0;
  void* signal = nullptr;
};

// Complete before it is put on a stream, and from then on only touched by the scheduler's thread
// and, in `reached` and `callback_time`, by the callback before that. Its tensors are kept by
// others: the graph, or in eager code their allocators, for which the stream is marked as their
// user.
struct DeferredCall {
  // Layouts and direction. The runs are made anew every time, unless the ids are constants: then
  // they are there already, and there are no lists.
  BlockTransfer transfer;
  bool ids_are_constants = false;
  bool may_be_captured = true;  // whether they are to be the same at every replay
  // Views of page-locked memory that the stream has filled when it calls the scheduler.
  IdList src_ids;
  IdList dst_ids;
  std::shared_ptr<void> ids_memory;
  // At least one; together they are all tensors.
  std::vector<CallPart> parts;
  CallScheduler* scheduler = nullptr;
  size_t batch_limit = 0;

  const char* op = "npu_kv::swap_blocks_batch";  // for messages
  // In eager code the scheduler deletes the call after it has served it; the calls of a graph
  // belong to the graph.
  bool captured = false;
  uint64_t number = 0;  // of the call, in its graph when captured, else on its device; from 1
  uint64_t served = 0;  // only touched by the scheduler
  // When the stream called, on the host's clock and on the runtime's own, if it has one.
  std::chrono::steady_clock::time_point reached;
  int64_t callback_time = 0;

  // "npu_kv::swap_blocks_batch, host to device on npu:0, call 2 of its graph, replay 57"
  NPU_KV_API std::string describe(int device) const;
};

}  // namespace npu_kv
