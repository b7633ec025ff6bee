// What a call must know about the memory of its tensors beyond addresses: whether host memory is
// page-locked, who owns it, and what keeps it alive until the copies are done.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>
#include <torch_npu/csrc/core/npu/NPUStream.h>

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "transfer/block_transfer.h"

namespace npu_kv {

struct MemoryUse {
  // The first page-able host tensor ("src[3]"), empty when all host memory is page-locked.
  std::string pageable;
  // Every storage once.
  std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> storages;
  // The host storages that torch_npu did not allocate: nobody but the operator keeps them alive.
  std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> foreign_host;
};

// Finds the MemoryUse of a call and marks the blocks of torch_npu's allocators as used by the
// stream, so that they are not handed out again before the stream has passed the copies. The
// answers for the last few sets of tensors are remembered for as long as their storages live: an
// engine passes the same tensors again and again. Not thread-safe; one per thread.
class MemoryUseCache {
 public:
  // Valid until the next call. `transfer` describes src and dst.
  const MemoryUse& find(at::TensorList src, at::TensorList dst, const BlockTransfer& transfer,
                        c10_npu::NPUStream stream);

 private:
  // Identifies a tensor's memory: the weak reference makes sure that no other storage gets the same
  // StorageImpl address meanwhile.
  struct Key {
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;
    int64_t begin;
    int64_t end;
  };
  struct Entry {
    std::vector<Key> keys;
    MemoryUse use;
    std::vector<c10::StreamId> streams;
    bool used = false;
  };

  static bool matches(const Entry& entry, at::TensorList src, at::TensorList dst,
                      const BlockTransfer& transfer);
  static void fill(Entry* entry, at::TensorList src, at::TensorList dst,
                   const BlockTransfer& transfer);
  static void record(Entry* entry, at::TensorList src, at::TensorList dst,
                     const BlockTransfer& transfer, c10_npu::NPUStream stream);

  std::array<Entry, 4> entries_;
  size_t next_ = 0;
};

// The cache of the calling thread; valid until the thread's next call.
const MemoryUse& memory_use(at::TensorList src, at::TensorList dst, const BlockTransfer& transfer,
                            c10_npu::NPUStream stream);

}  // namespace npu_kv
