#include "transfer/block_transfer.h"

#include <algorithm>

#include "transfer/overlap.h"

namespace npu_kv {
namespace {

bool merges(const BlockLayout& src, const BlockLayout& dst) {
  return src.block_stride == src.payload_bytes && dst.block_stride == dst.payload_bytes;
}

IdLimit smallest_pool(const std::vector<BlockLayout>& layouts) {
  IdLimit limit{layouts[0].num_blocks, 0};
  for (size_t i = 1; i < layouts.size(); ++i) {
    if (layouts[i].num_blocks < limit.num_blocks) limit = {layouts[i].num_blocks, i};
  }
  return limit;
}

// Fills one batch after the other and passes each on when it is full.
class BatchWriter {
 public:
  BatchWriter(Runtime& runtime, Direction direction, StreamRef stream, size_t limit)
      : runtime_(runtime), direction_(direction), stream_(stream), limit_(limit) {
    if (dst_.size() < limit) {
      dst_.resize(limit);
      src_.resize(limit);
      size_.resize(limit);
    }
  }

  // One descriptor for each run of [first, last).
  Status add_runs(const BlockLayout& src, const BlockLayout& dst, const Runs& runs) {
    const int64_t* src_ids = runs.src.data();
    const int64_t* dst_ids = runs.dst.data();
    const int64_t* counts = runs.count.data();
    for (size_t done = 0, total = runs.src.size(); done < total;) {
      const size_t part = std::min(limit_ - filled_, total - done);
      void** d = dst_.data() + filled_;
      void** s = src_.data() + filled_;
      size_t* bytes = size_.data() + filled_;
      for (size_t i = 0; i < part; ++i) {
        d[i] = pointer(dst.base + dst_ids[done + i] * dst.block_stride);
        s[i] = pointer(src.base + src_ids[done + i] * src.block_stride);
        bytes[i] = static_cast<size_t>(counts[done + i] * src.payload_bytes);
      }
      filled_ += part;
      done += part;
      if (filled_ == limit_) {
        if (Status status = flush(); !status.ok()) return status;
      }
    }
    return {};
  }

  // One descriptor for each block.
  Status add_blocks(const BlockLayout& src, const BlockLayout& dst, const Runs& runs) {
    for (size_t r = 0; r < runs.src.size(); ++r) {
      int64_t s = src.base + runs.src[r] * src.block_stride;
      int64_t d = dst.base + runs.dst[r] * dst.block_stride;
      for (int64_t i = 0; i < runs.count[r]; ++i) {
        dst_[filled_] = pointer(d);
        src_[filled_] = pointer(s);
        size_[filled_] = static_cast<size_t>(src.payload_bytes);
        s += src.block_stride;
        d += dst.block_stride;
        if (++filled_ < limit_) continue;
        if (Status status = flush(); !status.ok()) return status;
      }
    }
    return {};
  }

  Status flush() {
    if (filled_ == 0) return {};
    Descriptors batch{dst_.data(), src_.data(), size_.data(), filled_};
    filled_ = 0;
    return runtime_.copy(batch, direction_, stream_);
  }

 private:
  static void* pointer(int64_t address) { return reinterpret_cast<void*>(address); }

  Runtime& runtime_;
  Direction direction_;
  StreamRef stream_;
  size_t limit_;
  size_t filled_ = 0;
  // Kept by each thread that issues, so that it allocates once.
  static thread_local std::vector<void*> dst_;
  static thread_local std::vector<void*> src_;
  static thread_local std::vector<size_t> size_;
};

thread_local std::vector<void*> BatchWriter::dst_;
thread_local std::vector<void*> BatchWriter::src_;
thread_local std::vector<size_t> BatchWriter::size_;

}  // namespace

TransferSize size_of(const BlockTransfer& transfer) {
  TransferSize total;
  const auto pairs = static_cast<uint64_t>(transfer.runs.pairs);
  for (size_t t = 0; t < transfer.src.size(); ++t) {
    const BlockLayout& src = transfer.src[t];
    if (src.payload_bytes == 0) continue;
    total.bytes += pairs * static_cast<uint64_t>(src.payload_bytes);
    total.copies_before += pairs;
    total.copies_after += merges(src, transfer.dst[t]) ? transfer.runs.src.size() : pairs;
  }
  return total;
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
  BatchWriter writer(runtime, transfer.direction, stream, batch_limit);
  for (size_t t = 0; t < transfer.src.size(); ++t) {
    const BlockLayout& src = transfer.src[t];
    const BlockLayout& dst = transfer.dst[t];
    if (src.payload_bytes == 0) continue;
    Status status = transfer.runs.all_single() || merges(src, dst)
                        ? writer.add_runs(src, dst, transfer.runs)
                        : writer.add_blocks(src, dst, transfer.runs);
    if (!status.ok()) return status;
  }
  return writer.flush();
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
