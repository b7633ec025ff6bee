#include "transfer/joined_layouts.h"

namespace npu_kv {
namespace {

bool follows(const BlockLayout& first, const BlockLayout& next) {
  return next.base == first.base + first.payload_bytes && next.block_stride == first.block_stride &&
         next.num_blocks == first.num_blocks && next.place == first.place;
}

}  // namespace

void JoinedLayouts::assign(std::span<const BlockLayout> src, std::span<const BlockLayout> dst) {
  src_.clear();
  dst_.clear();
  for (size_t t = 0; t < src.size(); ++t) {
    if (!src_.empty() && !src[t].empty() && !dst[t].empty() && follows(src_.back(), src[t]) &&
        follows(dst_.back(), dst[t])) {
      src_.back().payload_bytes += src[t].payload_bytes;
      dst_.back().payload_bytes += dst[t].payload_bytes;
    } else {
      src_.push_back(src[t]);
      dst_.push_back(dst[t]);
    }
  }
}

}  // namespace npu_kv
