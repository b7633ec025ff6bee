// Walks through the copies of a transfer a batch at a time, so that its issuing can be cut into
// steps.
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

// Whether a run of neighbouring blocks is one range of bytes on both sides.
inline bool merges(const BlockLayout& src, const BlockLayout& dst) {
  return src.block_stride == src.payload_bytes && dst.block_stride == dst.payload_bytes;
}

inline constexpr size_t kAnyBytes = static_cast<size_t>(-1);

// Room for one batch; kept by whoever issues, so that it allocates once.
class NPU_KV_API DescriptorBuffer {
 public:
  void reserve(size_t count);
  Descriptors view(size_t count) { return {dst.data(), src.data(), size.data(), count}; }

  std::vector<void*> dst;
  std::vector<void*> src;
  std::vector<size_t> size;
};

// Holds views: layouts and runs must outlive it. Not thread-safe.
class NPU_KV_API DescriptorCursor {
 public:
  // Which block of which tensor a copy begins with.
  struct Position {
    size_t tensor = 0;
    size_t run = 0;
    int64_t block = 0;  // within the run
  };

  DescriptorCursor(std::span<const BlockLayout> src, std::span<const BlockLayout> dst,
                   const Runs& runs);

  bool done() const { return at_.tensor == src_.size(); }

  // The next copies: at most `max_copies`, and no more after their bytes reach `max_bytes`. Empty
  // when done. Valid until the buffer is used again.
  Descriptors next(size_t max_copies, size_t max_bytes, DescriptorBuffer& buffer);

  // Where copy `index` of the batch that next() returned last begins.
  Position position_in_batch(size_t index) const;

 private:
  bool takes_runs(size_t tensor) const {
    return runs_.all_single() || merges(src_[tensor], dst_[tensor]);
  }
  void skip_empty();
  size_t add_runs(size_t room, size_t max_bytes, size_t* bytes, size_t filled,
                  DescriptorBuffer& buffer);
  size_t add_blocks(size_t room, size_t max_bytes, size_t* bytes, size_t filled,
                    DescriptorBuffer& buffer);

  std::span<const BlockLayout> src_;
  std::span<const BlockLayout> dst_;
  const Runs& runs_;
  Position at_;
  Position batch_;
};

}  // namespace npu_kv
