// One call of the operator as the transfer layer sees it, and its way to the runtime.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "runtime/export.h"
#include "runtime/runtime.h"
#include "transfer/block_layout.h"
#include "transfer/block_pairs.h"

namespace npu_kv {

// For every tensor t, run r and block i of the run, one payload goes from src[t] to dst[t].
struct BlockTransfer {
  std::vector<BlockLayout> src;
  std::vector<BlockLayout> dst;
  Runs runs;
  Direction direction = Direction::kHostToHost;

  void clear() {
    src.clear();
    dst.clear();
    runs.clear();
  }
};

struct TransferSize {
  uint64_t bytes = 0;
  uint64_t copies_before = 0;  // blocks, counted for every tensor
  uint64_t copies_after = 0;   // descriptors

  TransferSize& operator+=(const TransferSize& other);
};

// What issue() will hand to the runtime, of all tensors or of some of them in one call; takes time
// in the number of tensors only.
NPU_KV_API TransferSize size_of(const BlockTransfer& transfer);
NPU_KV_API TransferSize size_of(const BlockTransfer& transfer, size_t first, size_t tensors);
// The same without joining tensors.
NPU_KV_API TransferSize size_of(std::span<const BlockLayout> src, std::span<const BlockLayout> dst,
                                const Runs& runs);

// The tensor with the fewest blocks decides which ids a list may have.
NPU_KV_API IdLimit smallest_pool(std::span<const BlockLayout> layouts);

// Checks ids and memory (std::out_of_range, std::invalid_argument: nothing is copied) and fills
// transfer->runs. The layouts and the direction must be set, src and dst of equal length and
// payload. Uses a workspace of the calling thread.
NPU_KV_API void prepare(BlockTransfer* transfer, const IdList& src_ids, const IdList& dst_ids);

// Joins tensors that lie side by side, builds the descriptors, at most `batch_limit` at a time, and
// has the runtime issue each batch. Stops at the first error; the batches before it are issued.
NPU_KV_API Status issue(const BlockTransfer& transfer, Runtime& runtime, StreamRef stream,
                        size_t batch_limit);
// The same for some of its tensors.
NPU_KV_API Status issue(const BlockTransfer& transfer, size_t first, size_t tensors,
                        Runtime& runtime, StreamRef stream, size_t batch_limit);

// The same for copies that are given as addresses.
NPU_KV_API Status issue(const Descriptors& copies, Direction direction, Runtime& runtime,
                        StreamRef stream, size_t batch_limit);

}  // namespace npu_kv
