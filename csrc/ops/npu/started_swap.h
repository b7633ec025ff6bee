// A swap between an NPU and page-locked host memory that was started: its ticket, with what the
// waits need.
#pragma once

#include <c10/core/Storage.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "ops/npu/call_slot.h"
#include "ops/swap_ticket.h"

namespace npu_kv {

// Filled by the thread that issues the start, read by those that issue the waits, which come later
// in the same queue.
class StartedSwap final : public SwapTicket {
 public:
  using SwapTicket::SwapTicket;
  // The streams may still get to what nobody has waited for: its slots and tensors are given up.
  ~StartedSwap() override;

  // Whether the caller of the start knew that it was captured.
  bool captured = false;

  std::mutex mutex;
  // The following are guarded by mutex.
  bool launched = false;         // else there is nothing to wait for
  uint64_t graph = 0;            // number of the captured graph; 0 in eager code
  std::vector<CallSlot*> slots;  // by part; those of a graph belong to it
  // In eager code; a wait takes its own.
  std::vector<std::unique_ptr<CallSlot>> own_slots;
  // In eager code, until the last wait.
  std::vector<c10::Storage> storages;
  std::vector<c10::Storage> foreign_host;
};

}  // namespace npu_kv
