// Which blocks of a backend's pools a transfer touches that was described by other tensors.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "runtime/export.h"
#include "transfer/block_layout.h"
#include "transfer/block_transfer.h"

namespace npu_kv {

struct BlockRange {
  int64_t first = 0;
  int64_t count = 0;
};

// Adds the blocks of `pools`, whose tensors share block ids, that the blocks `first[r]` ...
// `first[r] + count[r] - 1` of `tensors` share a byte with. Views of another geometry are taken to
// touch all that lies between their first and last byte.
NPU_KV_API void add_shared_blocks(std::span<const BlockLayout> pools,
                                  std::span<const BlockLayout> tensors,
                                  const std::vector<int64_t>& first,
                                  const std::vector<int64_t>& count,
                                  std::vector<BlockRange>* blocks);

}  // namespace npu_kv
