// Destinations that share memory with another destination or with a source. Whether a call may be
// run is a question of bytes, not of which tensor object names them: views of one storage may
// overlap.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "runtime/export.h"
#include "transfer/block_layout.h"
#include "transfer/block_pairs.h"

namespace npu_kv {

// Two tensors of a call of which some blocks share bytes. The second is always a destination.
struct Overlap {
  bool first_is_source = false;
  size_t first = 0;      // index in its list
  size_t second = 0;     // index in dst
  int64_t distance = 0;  // second's base minus first's, bytes
  int64_t first_stride = 0;
  int64_t first_payload = 0;
  int64_t second_stride = 0;
  int64_t second_payload = 0;
};

// The pairs of tensors that need a look at the ids, one of each geometry. Strided views that
// interleave without sharing a byte (several layers in one page) are no overlap.
NPU_KV_API std::vector<Overlap> find_overlaps(std::span<const BlockLayout> src,
                                              std::span<const BlockLayout> dst);

// Throws std::invalid_argument when with these ids a byte is written twice, or read and written.
NPU_KV_API void check_overlaps(std::span<const Overlap> overlaps, const BlockPairs& pairs);

// Remembers the answers for the last few sets of tensors, which an engine passes again and again.
// Not thread-safe; one per thread.
class NPU_KV_API OverlapCache {
 public:
  // Valid until the next call.
  std::span<const Overlap> find(std::span<const BlockLayout> src, std::span<const BlockLayout> dst);

 private:
  struct Entry {
    std::vector<BlockLayout> src;
    std::vector<BlockLayout> dst;
    std::vector<Overlap> overlaps;
    bool used = false;
  };
  std::array<Entry, 8> entries_;
  size_t next_ = 0;
};

}  // namespace npu_kv
