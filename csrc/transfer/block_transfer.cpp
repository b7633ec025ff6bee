#include "transfer/block_transfer.h"

#include <algorithm>

#include "transfer/descriptor_cursor.h"
#include "transfer/joined_layouts.h"
#include "transfer/overlap.h"

namespace npu_kv {
namespace {

// Valid until the calling thread's next call.
const JoinedLayouts& join(std::span<const BlockLayout> src, std::span<const BlockLayout> dst) {
  thread_local JoinedLayouts joined;
  joined.assign(src, dst);
  return joined;
}

}  // namespace

TransferSize size_of(std::span<const BlockLayout> src, std::span<const BlockLayout> dst,
                     const Runs& runs) {
  TransferSize total;
  const auto pairs = static_cast<uint64_t>(runs.pairs);
  for (size_t t = 0; t < src.size(); ++t) {
    if (src[t].payload_bytes == 0) continue;
    total.bytes += pairs * static_cast<uint64_t>(src[t].payload_bytes);
    total.copies_before += pairs;
    total.copies_after += merges(src[t], dst[t]) ? runs.src.size() : pairs;
  }
  return total;
}

TransferSize& TransferSize::operator+=(const TransferSize& other) {
  bytes += other.bytes;
  copies_before += other.copies_before;
  copies_after += other.copies_after;
  return *this;
}

TransferSize size_of(const BlockTransfer& transfer) {
  return size_of(transfer, 0, transfer.src.size());
}

TransferSize size_of(const BlockTransfer& transfer, size_t first, size_t tensors) {
  const auto src = std::span(transfer.src).subspan(first, tensors);
  const auto dst = std::span(transfer.dst).subspan(first, tensors);
  TransferSize size = size_of(src, dst, transfer.runs);
  const JoinedLayouts& joined = join(src, dst);
  if (joined.src().size() != tensors) {
    size.copies_after = size_of(joined.src(), joined.dst(), transfer.runs).copies_after;
  }
  return size;
}

IdLimit smallest_pool(std::span<const BlockLayout> layouts) {
  IdLimit limit;
  for (size_t i = 0; i < layouts.size(); ++i) {
    if (i == 0 || layouts[i].num_blocks < limit.num_blocks) limit = {layouts[i].num_blocks, i};
  }
  return limit;
}

void prepare(BlockTransfer* transfer, const IdList& src_ids, const IdList& dst_ids) {
  thread_local BlockPairs pairs;
  thread_local OverlapCache overlaps;
  transfer->runs.clear();
  if (transfer->src.empty()) return;
  pairs.assign(src_ids, dst_ids, smallest_pool(transfer->src), smallest_pool(transfer->dst));
  if (pairs.size() == 0) return;
  check_overlaps(overlaps.find(transfer->src, transfer->dst), pairs);
  pairs.build_runs(&transfer->runs);
}

Status issue(const BlockTransfer& transfer, Runtime& runtime, StreamRef stream,
             size_t batch_limit) {
  return issue(transfer, 0, transfer.src.size(), runtime, stream, batch_limit);
}

Status issue(const BlockTransfer& transfer, size_t first, size_t tensors, Runtime& runtime,
             StreamRef stream, size_t batch_limit) {
  thread_local DescriptorBuffer buffer;
  const JoinedLayouts& joined = join(std::span(transfer.src).subspan(first, tensors),
                                     std::span(transfer.dst).subspan(first, tensors));
  DescriptorCursor cursor(joined.src(), joined.dst(), transfer.runs);
  while (!cursor.done()) {
    const Descriptors batch = cursor.next(batch_limit, kAnyBytes, buffer);
    if (Status status = runtime.copy(batch, transfer.direction, stream); !status.ok()) {
      return status;
    }
  }
  return {};
}

Status issue(const Descriptors& copies, Direction direction, Runtime& runtime, StreamRef stream,
             size_t batch_limit) {
  for (size_t done = 0; done < copies.count;) {
    const size_t part = std::min(batch_limit, copies.count - done);
    Descriptors batch{copies.dst + done, copies.src + done, copies.size + done, part};
    if (Status status = runtime.copy(batch, direction, stream); !status.ok()) return status;
    done += part;
  }
  return {};
}

}  // namespace npu_kv
