#include "transfer/shared_blocks.h"

#include <algorithm>

namespace npu_kv {
namespace {

bool overlap(const BlockLayout& a, const BlockLayout& b) {
  return a.place == b.place && !a.empty() && !b.empty() && a.base < b.end() && b.base < a.end();
}

BlockRange blocks_between(const BlockLayout& pool, int64_t begin, int64_t end) {
  const int64_t first = std::max<int64_t>(0, (begin - pool.base) / pool.block_stride);
  const int64_t last = std::min(pool.num_blocks - 1, (end - 1 - pool.base) / pool.block_stride);
  return {first, last - first + 1};
}

}  // namespace

void add_shared_blocks(std::span<const BlockLayout> pools, std::span<const BlockLayout> tensors,
                       const std::vector<int64_t>& first, const std::vector<int64_t>& count,
                       std::vector<BlockRange>* blocks) {
  bool has_same_ids = false;  // what every tensor of the same geometry would add
  for (const BlockLayout& tensor : tensors) {
    for (const BlockLayout& pool : pools) {
      if (!overlap(tensor, pool)) continue;
      const bool same_ids = tensor.base == pool.base && tensor.block_stride == pool.block_stride;
      if (same_ids && has_same_ids) continue;
      has_same_ids |= same_ids;
      for (size_t r = 0; r < first.size(); ++r) {
        const int64_t begin = tensor.base + first[r] * tensor.block_stride;
        const int64_t end = begin + (count[r] - 1) * tensor.block_stride + tensor.payload_bytes;
        if (begin >= pool.end() || end <= pool.base) continue;
        const BlockRange range =
            same_ids ? BlockRange{first[r], count[r]} : blocks_between(pool, begin, end);
        if (range.count > 0) blocks->push_back(range);
      }
    }
  }
}

}  // namespace npu_kv
