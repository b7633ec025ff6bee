// One accepted call on its way through torch_npu's task queue.
#pragma once

#include <c10/core/Storage.h>

#include <memory>
#include <thread>
#include <vector>

#include "runtime/runtime.h"
#include "transfer/block_transfer.h"

namespace npu_kv {

// Copies given as addresses (`.ptrs`), owned by the call.
struct PointerCopies {
  std::vector<void*> dst;
  std::vector<void*> src;
  std::vector<size_t> size;

  Descriptors view() { return {dst.data(), src.data(), size.data(), size.size()}; }
};

struct Launch {
  BlockTransfer transfer;
  PointerCopies pointers;
  bool by_pointers = false;

  StreamRef stream;
  size_t batch_limit = 0;
  // Alive until the copies are issued ...
  std::vector<c10::Storage> storages;
  // ... and until they are done.
  std::vector<c10::Storage> foreign_host;

  // Whether the caller has found that the stream captures, and taken care of it; whether it may
  // turn out so later.
  bool in_graph = false;
  bool may_be_captured = false;

  // The caller waits for the copies.
  bool caller_waits = false;
  // The caller takes `status` itself.
  bool outcome_is_awaited = false;
  std::thread::id caller;
  Status status;
};

// A Launch from a pool, to which it returns with its buffers when the last reference goes, on
// whatever thread that is. Thread-safe.
std::shared_ptr<Launch> new_launch();

// Issues the copies and deals with the outcome: an error goes to `status` when the caller is there
// to take it, else to the pending errors of the device.
void run(Launch& launch);

}  // namespace npu_kv
