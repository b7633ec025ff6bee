#include "transfer/overlap.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <stdexcept>
#include <string>

namespace npu_kv {
namespace {

struct Item {
  BlockLayout layout;
  bool is_source;
  size_t index;
};

int64_t floor_div(int64_t a, int64_t b) { return a / b - (a % b != 0 && (a < 0) != (b < 0)); }

int64_t positive_mod(int64_t a, int64_t b) {
  const int64_t rest = a % b;
  return rest < 0 ? rest + b : rest;
}

// Whether [0, first) and [offset, offset + second) have a common point on a circle of length
// `period`.
bool meet_on_circle(int64_t offset, int64_t first, int64_t second, int64_t period) {
  if (first >= period || second >= period) return true;
  const int64_t at = positive_mod(offset, period);
  return at < first || at + second > period;
}

bool may_share_bytes(const BlockLayout& a, const BlockLayout& b) {
  if (a.base >= b.end() || b.base >= a.end()) return false;
  // All distances between blocks are this apart, plus multiples of what the strides have in common.
  const int64_t period = std::gcd(a.block_stride, b.block_stride);
  return meet_on_circle(b.base - a.base, a.payload_bytes, b.payload_bytes, period);
}

class Collector {
 public:
  explicit Collector(std::vector<Overlap>* found) : found_(found) {}

  void consider(const Item* a, const Item* b) {
    if (a->is_source && b->is_source) return;
    if (!may_share_bytes(a->layout, b->layout)) return;
    // The source first, else the lower index.
    if (b->is_source || (!a->is_source && b->index < a->index)) std::swap(a, b);
    Overlap overlap{.first_is_source = a->is_source,
                    .first = a->index,
                    .second = b->index,
                    .distance = b->layout.base - a->layout.base,
                    .first_stride = a->layout.block_stride,
                    .first_payload = a->layout.payload_bytes,
                    .second_stride = b->layout.block_stride,
                    .second_payload = b->layout.payload_bytes};
    auto same = [&](const Overlap& other) {
      return other.first_is_source == overlap.first_is_source &&
             other.distance == overlap.distance && other.first_stride == overlap.first_stride &&
             other.first_payload == overlap.first_payload &&
             other.second_stride == overlap.second_stride &&
             other.second_payload == overlap.second_payload;
    };
    if (std::none_of(found_->begin(), found_->end(), same)) found_->push_back(overlap);
  }

 private:
  std::vector<Overlap>* found_;
};

// Tensors with a common stride: those can meet only whose payloads meet modulo that stride, and
// sorted by remainder these are neighbours. Saves looking at every pair of the layers of a packed
// page.
void consider_common_stride(std::span<Item> items, Collector* collector) {
  const int64_t stride = items[0].layout.block_stride;
  const int64_t origin = items[0].layout.base;
  auto remainder = [&](const Item& item) {
    return positive_mod(item.layout.base - origin, stride);
  };
  std::sort(items.begin(), items.end(),
            [&](const Item& a, const Item& b) { return remainder(a) < remainder(b); });
  for (size_t i = 0; i < items.size(); ++i) {
    const int64_t end = remainder(items[i]) + items[i].layout.payload_bytes;
    for (size_t j = i + 1; j < items.size() && remainder(items[j]) < end; ++j) {
      collector->consider(&items[i], &items[j]);
    }
    for (size_t j = 0; j < i && remainder(items[j]) < end - stride; ++j) {
      collector->consider(&items[i], &items[j]);
    }
  }
}

void consider_group(std::span<Item> items, Collector* collector) {
  if (items.size() < 2) return;
  const int64_t stride = items[0].layout.block_stride;
  if (std::all_of(items.begin(), items.end(),
                  [&](const Item& item) { return item.layout.block_stride == stride; })) {
    consider_common_stride(items, collector);
    return;
  }
  for (size_t i = 0; i < items.size(); ++i) {
    for (size_t j = i + 1; j < items.size(); ++j) collector->consider(&items[i], &items[j]);
  }
}

[[noreturn]] void throw_overlap(const Overlap& overlap, int64_t first_block, int64_t second_block) {
  const std::string first =
      std::string(overlap.first_is_source ? "src[" : "dst[") + std::to_string(overlap.first) + "]";
  const std::string second = "dst[" + std::to_string(overlap.second) + "]";
  if (overlap.first_is_source) {
    throw std::invalid_argument("block " + std::to_string(first_block) + " of " + first +
                                " is read and shares memory with block " +
                                std::to_string(second_block) + " of " + second +
                                ", which is written: the copies of one call are unordered");
  }
  throw std::invalid_argument("block " + std::to_string(first_block) + " of " + first +
                              " and block " + std::to_string(second_block) + " of " + second +
                              " are both written and share memory: the copies of one call are "
                              "unordered, so a destination may be named once");
}

bool same_bytes(std::span<const BlockLayout> a, const std::vector<BlockLayout>& b) {
  return a.size() == b.size() &&
         (a.empty() || std::memcmp(a.data(), b.data(), a.size_bytes()) == 0);
}

}  // namespace

std::vector<Overlap> find_overlaps(std::span<const BlockLayout> src,
                                   std::span<const BlockLayout> dst) {
  std::vector<Overlap> found;
  if (dst.empty()) return found;
  std::vector<Item> items;
  items.reserve(src.size() + dst.size());
  for (size_t i = 0; i < dst.size(); ++i) {
    if (!dst[i].empty()) items.push_back({dst[i], false, i});
  }
  // Host and device addresses are of different spaces and may have equal numbers.
  if (!src.empty() && src[0].place == dst[0].place) {
    for (size_t i = 0; i < src.size(); ++i) {
      if (!src[i].empty()) items.push_back({src[i], true, i});
    }
  }
  std::sort(items.begin(), items.end(),
            [](const Item& a, const Item& b) { return a.layout.base < b.layout.base; });
  // Groups whose extents form one stretch of memory without a hole.
  Collector collector(&found);
  for (size_t begin = 0; begin < items.size();) {
    int64_t end_address = items[begin].layout.end();
    size_t end = begin + 1;
    while (end < items.size() && items[end].layout.base < end_address) {
      end_address = std::max(end_address, items[end].layout.end());
      ++end;
    }
    consider_group(std::span(items).subspan(begin, end - begin), &collector);
    begin = end;
  }
  return found;
}

void check_overlaps(std::span<const Overlap> overlaps, const BlockPairs& pairs) {
  for (const Overlap& overlap : overlaps) {
    const std::vector<int64_t>& ids = overlap.first_is_source ? pairs.src() : pairs.dst();
    if (overlap.first_stride == overlap.second_stride &&
        overlap.distance % overlap.first_stride == 0) {
      const int64_t shift = overlap.distance / overlap.first_stride;
      for (int64_t id : ids) {
        if (pairs.is_destination(id - shift, id - shift)) throw_overlap(overlap, id, id - shift);
      }
      continue;
    }
    for (int64_t id : ids) {
      // Blocks j of the second tensor with j * stride + distance in (begin - payload, end).
      const int64_t begin = id * overlap.first_stride - overlap.distance;
      const int64_t first = floor_div(begin - overlap.second_payload, overlap.second_stride) + 1;
      const int64_t last = floor_div(begin + overlap.first_payload - 1, overlap.second_stride);
      if (!pairs.is_destination(first, last)) continue;
      int64_t block = first;
      while (!pairs.is_destination(block, block)) ++block;
      throw_overlap(overlap, id, block);
    }
  }
}

std::span<const Overlap> OverlapCache::find(std::span<const BlockLayout> src,
                                            std::span<const BlockLayout> dst) {
  for (const Entry& entry : entries_) {
    if (entry.used && same_bytes(src, entry.src) && same_bytes(dst, entry.dst)) {
      return entry.overlaps;
    }
  }
  Entry& entry = entries_[next_];
  next_ = (next_ + 1) % entries_.size();
  entry.used = false;
  entry.overlaps = find_overlaps(src, dst);
  entry.src.assign(src.begin(), src.end());
  entry.dst.assign(dst.begin(), dst.end());
  entry.used = true;
  return entry.overlaps;
}

}  // namespace npu_kv
