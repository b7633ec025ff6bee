#include "transfer/block_pairs.h"

#include <algorithm>
#include <limits>
#include <new>
#include <stdexcept>
#include <string>

namespace npu_kv {
namespace {

// Destination pools up to this size get a table (8 bytes a block, of which only the pages that ids
// touch become real memory); the ids of larger ones are sorted.
constexpr int64_t kLargestTable = int64_t{1} << 22;

[[noreturn]] void throw_out_of_range(const char* list, size_t position, int64_t id, IdLimit limit) {
  std::string message = std::string(list) + "_blocks[" + std::to_string(position) + "] is " +
                        std::to_string(id) + ", out of range for " + list + "[" +
                        std::to_string(limit.tensor) + "] with " +
                        std::to_string(limit.num_blocks) + " blocks";
  if (limit.num_blocks > 0) {
    message += " (allowed: 0 to " + std::to_string(limit.num_blocks - 1) +
               ", or a negative id to skip the pair)";
  }
  throw std::out_of_range(message);
}

}  // namespace

template <typename SrcId, typename DstId>
bool BlockPairs::take(const SrcId* src, const DstId* dst, size_t count, IdLimit src_limit,
                      IdLimit dst_limit) {
  src_.resize(count);
  dst_.resize(count);
  size_t taken = 0;
  int64_t last = -1;
  bool ascending = true;
  for (size_t i = 0; i < count; ++i) {
    const int64_t s = src[i];
    const int64_t d = dst[i];
    if ((s | d) < 0) continue;
    if (s >= src_limit.num_blocks) [[unlikely]]
      throw_out_of_range("src", i, s, src_limit);
    if (d >= dst_limit.num_blocks) [[unlikely]]
      throw_out_of_range("dst", i, d, dst_limit);
    ascending &= d > last;
    last = d;
    src_[taken] = s;
    dst_[taken] = d;
    ++taken;
  }
  src_.resize(taken);
  dst_.resize(taken);
  return ascending;
}

bool BlockPairs::take(const IdList& src, const IdList& dst, IdLimit src_limit, IdLimit dst_limit) {
  const size_t count = src.count;
  auto* src64 = static_cast<const int64_t*>(src.data);
  auto* dst64 = static_cast<const int64_t*>(dst.data);
  auto* src32 = static_cast<const int32_t*>(src.data);
  auto* dst32 = static_cast<const int32_t*>(dst.data);
  if (src.is_int64) {
    return dst.is_int64 ? take(src64, dst64, count, src_limit, dst_limit)
                        : take(src64, dst32, count, src_limit, dst_limit);
  }
  return dst.is_int64 ? take(src32, dst64, count, src_limit, dst_limit)
                      : take(src32, dst32, count, src_limit, dst_limit);
}

void BlockPairs::begin_table() {
  if (++call_ != 0 && static_cast<size_t>(dst_blocks_) <= table_size_) return;
  const size_t size = std::max<size_t>({static_cast<size_t>(dst_blocks_), table_size_, 1024});
  // calloc: untouched pages of a large table cost nothing.
  table_.reset(static_cast<Entry*>(std::calloc(size, sizeof(Entry))));
  if (!table_) {
    table_size_ = 0;
    throw std::bad_alloc();
  }
  table_size_ = size;
  call_ = 1;
}

int64_t BlockPairs::fill_table() {
  begin_table();
  int64_t repeated = -1;
  for (size_t i = 0; i < dst_.size(); ++i) {
    Entry& entry = table_[dst_[i]];
    if (entry.call == call_ && repeated < 0) [[unlikely]]
      repeated = dst_[i];
    entry = {call_, static_cast<uint32_t>(i)};
  }
  return repeated;
}

int64_t BlockPairs::sort_pairs() {
  to_sort_.resize(size());
  for (size_t i = 0; i < size(); ++i) to_sort_[i] = {dst_[i], src_[i]};
  std::sort(to_sort_.begin(), to_sort_.end(),
            [](const Pair& a, const Pair& b) { return a.dst < b.dst; });
  for (size_t i = 0; i < size(); ++i) {
    dst_[i] = to_sort_[i].dst;
    src_[i] = to_sort_[i].src;
  }
  auto twice = std::adjacent_find(dst_.begin(), dst_.end());
  return twice == dst_.end() ? -1 : *twice;
}

void BlockPairs::assign(const IdList& src, const IdList& dst, IdLimit src_limit,
                        IdLimit dst_limit) {
  if (src.count > std::numeric_limits<uint32_t>::max()) {
    throw std::invalid_argument("a call takes at most 4294967295 ids, got " +
                                std::to_string(src.count));
  }
  dst_blocks_ = dst_limit.num_blocks;
  ascending_ = take(src, dst, src_limit, dst_limit);
  if (ascending_) return;
  int64_t repeated = -1;
  if (dst_blocks_ <= kLargestTable) {
    repeated = fill_table();
  } else {
    repeated = sort_pairs();
    ascending_ = true;
  }
  if (repeated >= 0) [[unlikely]]
    throw_named_twice(src, dst, repeated);
}

void BlockPairs::throw_named_twice(const IdList& src, const IdList& dst, int64_t block) {
  size_t first = dst.count;
  for (size_t i = 0; i < dst.count; ++i) {
    if (dst.at(i) != block || src.at(i) < 0) continue;
    if (first == dst.count) {
      first = i;
      continue;
    }
    throw std::invalid_argument("dst_blocks[" + std::to_string(i) + "] is " +
                                std::to_string(block) + ", which dst_blocks[" +
                                std::to_string(first) +
                                "] named already: the copies of one call are unordered, so a "
                                "destination block may be named once");
  }
  throw std::invalid_argument("dst_blocks names block " + std::to_string(block) + " twice");
}

bool BlockPairs::is_destination(int64_t first, int64_t last) const {
  first = std::max<int64_t>(first, 0);
  last = std::min(last, dst_blocks_ - 1);
  if (first > last) return false;
  if (ascending_) {
    auto at = std::lower_bound(dst_.begin(), dst_.end(), first);
    return at != dst_.end() && *at <= last;
  }
  if (static_cast<size_t>(last - first) > dst_.size()) {
    return std::any_of(dst_.begin(), dst_.end(),
                       [=](int64_t block) { return block >= first && block <= last; });
  }
  for (int64_t block = first; block <= last; ++block) {
    if (names(block)) return true;
  }
  return false;
}

void BlockPairs::build_runs(Runs* runs) const {
  const size_t pairs = size();
  const int64_t* srcs = src_.data();
  const int64_t* dsts = dst_.data();
  runs->pairs = static_cast<int64_t>(pairs);
  runs->src.resize(pairs);
  runs->dst.resize(pairs);
  runs->count.resize(pairs);
  size_t found = 0;
  auto add = [&](int64_t src, int64_t dst, int64_t count) {
    runs->src[found] = src;
    runs->dst[found] = dst;
    runs->count[found] = count;
    ++found;
  };
  if (ascending_) {
    for (size_t i = 0; i < pairs;) {
      size_t next = i + 1;
      while (next < pairs && dsts[next] == dsts[next - 1] + 1 && srcs[next] == srcs[next - 1] + 1) {
        ++next;
      }
      add(srcs[i], dsts[i], static_cast<int64_t>(next - i));
      i = next;
    }
  } else {
    // A pair starts a run when the pair just below it is not there; runs are followed through the
    // table, so the order in which the caller named the blocks does not matter and nothing is
    // sorted.
    const Entry* table = table_.get();
    auto holds = [&](int64_t src, int64_t dst) {
      return table[dst].call == call_ && srcs[table[dst].pair] == src;
    };
    for (size_t i = 0; i < pairs; ++i) {
      const int64_t s = srcs[i];
      const int64_t d = dsts[i];
      if (d > 0 && holds(s - 1, d - 1)) continue;
      int64_t count = 1;
      while (d + count < dst_blocks_ && holds(s + count, d + count)) ++count;
      add(s, d, count);
    }
  }
  runs->src.resize(found);
  runs->dst.resize(found);
  runs->count.resize(found);
}

}  // namespace npu_kv
