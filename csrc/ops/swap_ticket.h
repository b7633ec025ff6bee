// What swap_blocks_start hands out and swap_blocks_wait takes: a swap that is under way, and which
// of its parts have been waited for.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "runtime/export.h"
#include "transfer/block_transfer.h"

namespace npu_kv {

// Numbers of tensors. Throws ValueError unless each is positive and they add up to `tensors`;
// without parts all tensors are one.
NPU_KV_API std::vector<size_t> parts_of(at::OptionalIntArrayRef parts, size_t tensors);

// Thread-safe.
class NPU_KV_API SwapTicket {
 public:
  // A swap that is done by the time its caller, or its caller's stream, goes on. `device` is -1 for
  // one on the host.
  SwapTicket(std::vector<size_t> parts, int device);
  // A swap that is under way: its waits have to name the very tensors of its layouts.
  SwapTicket(std::vector<size_t> parts, int device, const BlockTransfer& transfer);
  virtual ~SwapTicket();
  SwapTicket(const SwapTicket&) = delete;
  SwapTicket& operator=(const SwapTicket&) = delete;

  // Notes that a part is waited for. Throws ValueError: there is no such part, it was waited for
  // before, or it has other tensors.
  void take(int64_t part, at::TensorList src, at::TensorList dst);
  // The wait for a part that was taken has failed.
  void put_back(int64_t part);

  // What is wrong when nobody can wait for the swap any more; empty when nothing is.
  std::string missing_waits() const;
  int device() const { return device_; }

 private:
  struct Part {
    size_t first;
    size_t tensors;
    bool waited = false;
  };
  void check_tensors(const Part& part, at::TensorList src, at::TensorList dst) const;

  const int device_;
  std::vector<BlockLayout> src_;  // empty when the swap is done
  std::vector<BlockLayout> dst_;
  mutable std::mutex mutex_;
  std::vector<Part> parts_;  // `waited` is guarded by mutex_
  size_t missing_ = 0;       // guarded by mutex_
};

// A 0-d int64 CPU tensor that stands for the ticket and keeps it alive. When its memory goes and
// parts were not waited for, that is a pending error of the device.
NPU_KV_API at::Tensor ticket_tensor(std::shared_ptr<SwapTicket> ticket);

// Throws ValueError when the tensor, or the one that it is a copy of, stands for no ticket.
NPU_KV_API std::shared_ptr<SwapTicket> find_ticket(const at::Tensor& ticket);

}  // namespace npu_kv
