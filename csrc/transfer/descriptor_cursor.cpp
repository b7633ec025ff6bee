#include "transfer/descriptor_cursor.h"

#include <algorithm>

namespace npu_kv {
namespace {

void* pointer(int64_t address) { return reinterpret_cast<void*>(address); }

}  // namespace

void DescriptorBuffer::reserve(size_t count) {
  if (dst.size() >= count) return;
  dst.resize(count);
  src.resize(count);
  size.resize(count);
}

DescriptorCursor::DescriptorCursor(std::span<const BlockLayout> src,
                                   std::span<const BlockLayout> dst, const Runs& runs)
    : src_(src), dst_(dst), runs_(runs) {
  if (runs_.src.empty()) at_.tensor = src_.size();
  skip_empty();
}

void DescriptorCursor::skip_empty() {
  while (at_.tensor < src_.size() && src_[at_.tensor].payload_bytes == 0) ++at_.tensor;
}

Descriptors DescriptorCursor::next(size_t max_copies, size_t max_bytes, DescriptorBuffer& buffer) {
  buffer.reserve(max_copies);
  batch_ = at_;
  size_t filled = 0;
  size_t bytes = 0;
  while (!done() && filled < max_copies && (filled == 0 || bytes < max_bytes)) {
    const size_t room = max_copies - filled;
    filled += takes_runs(at_.tensor) ? add_runs(room, max_bytes, &bytes, filled, buffer)
                                     : add_blocks(room, max_bytes, &bytes, filled, buffer);
    if (at_.run == runs_.src.size()) {
      at_ = {at_.tensor + 1, 0, 0};
      skip_empty();
    }
  }
  return buffer.view(filled);
}

size_t DescriptorCursor::add_runs(size_t room, size_t max_bytes, size_t* bytes, size_t filled,
                                  DescriptorBuffer& buffer) {
  const BlockLayout& src = src_[at_.tensor];
  const BlockLayout& dst = dst_[at_.tensor];
  const int64_t* src_ids = runs_.src.data() + at_.run;
  const int64_t* dst_ids = runs_.dst.data() + at_.run;
  const int64_t* counts = runs_.count.data() + at_.run;
  void** d = buffer.dst.data() + filled;
  void** s = buffer.src.data() + filled;
  size_t* sizes = buffer.size.data() + filled;
  size_t count = std::min(room, runs_.src.size() - at_.run);
  if (max_bytes != kAnyBytes) {
    const size_t most = count;
    for (count = 0; count < most && (*bytes < max_bytes || filled + count == 0); ++count) {
      *bytes += static_cast<size_t>(counts[count] * src.payload_bytes);
    }
  }
  for (size_t i = 0; i < count; ++i) {
    d[i] = pointer(dst.base + dst_ids[i] * dst.block_stride);
    s[i] = pointer(src.base + src_ids[i] * src.block_stride);
    sizes[i] = static_cast<size_t>(counts[i] * src.payload_bytes);
  }
  at_.run += count;
  return count;
}

size_t DescriptorCursor::add_blocks(size_t room, size_t max_bytes, size_t* bytes, size_t filled,
                                    DescriptorBuffer& buffer) {
  const BlockLayout& src = src_[at_.tensor];
  const BlockLayout& dst = dst_[at_.tensor];
  const auto payload = static_cast<size_t>(src.payload_bytes);
  size_t added = 0;
  while (added < room && at_.run < runs_.src.size() &&
         (*bytes < max_bytes || filled + added == 0)) {
    buffer.dst[filled + added] =
        pointer(dst.base + (runs_.dst[at_.run] + at_.block) * dst.block_stride);
    buffer.src[filled + added] =
        pointer(src.base + (runs_.src[at_.run] + at_.block) * src.block_stride);
    buffer.size[filled + added] = payload;
    *bytes += payload;
    ++added;
    if (++at_.block == runs_.count[at_.run]) {
      at_.block = 0;
      ++at_.run;
    }
  }
  return added;
}

DescriptorCursor::Position DescriptorCursor::position_in_batch(size_t index) const {
  Position at = batch_;
  for (;;) {
    while (at.tensor < src_.size() && src_[at.tensor].payload_bytes == 0) ++at.tensor;
    if (at.tensor == src_.size()) return at;
    const bool by_runs = takes_runs(at.tensor);
    for (; at.run < runs_.src.size(); ++at.run, at.block = 0) {
      const int64_t copies = by_runs ? 1 : runs_.count[at.run] - at.block;
      if (index < static_cast<size_t>(copies)) {
        if (!by_runs) at.block += static_cast<int64_t>(index);
        return at;
      }
      index -= static_cast<size_t>(copies);
    }
    at = {at.tensor + 1, 0, 0};
  }
}

}  // namespace npu_kv
