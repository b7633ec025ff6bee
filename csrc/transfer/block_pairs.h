// The pairs of block ids of one call: checked, without the skipped ones, and grouped into runs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <vector>

#include "runtime/export.h"

namespace npu_kv {

// A view of ids as the caller holds them.
struct IdList {
  const void* data = nullptr;
  bool is_int64 = true;  // else int32
  size_t count = 0;

  int64_t at(size_t i) const {
    return is_int64 ? static_cast<const int64_t*>(data)[i] : static_cast<const int32_t*>(data)[i];
  }
};

// The ids of a list must be below `num_blocks`, which is that of tensor `tensor` of the list.
struct IdLimit {
  int64_t num_blocks = 0;
  size_t tensor = 0;
};

// Runs of neighbouring blocks (neighbours in both src and dst): blocks src[r] .. src[r] + count[r]
// - 1 go to dst[r] .. . Three arrays of one length.
struct Runs {
  std::vector<int64_t> src;
  std::vector<int64_t> dst;
  std::vector<int64_t> count;
  int64_t pairs = 0;  // the sum of count

  bool all_single() const { return static_cast<size_t>(pairs) == src.size(); }
  void clear() {
    src.clear();
    dst.clear();
    count.clear();
    pairs = 0;
  }
};

// A workspace to be kept and used again: it allocates only when a call is larger than all before.
// Not thread-safe; one per thread.
class NPU_KV_API BlockPairs {
 public:
  // Takes the pairs in which no id is negative. Throws std::out_of_range for an id beyond its limit
  // and std::invalid_argument for a destination that is named twice. Both lists have one length.
  void assign(const IdList& src, const IdList& dst, IdLimit src_limit, IdLimit dst_limit);

  const std::vector<int64_t>& src() const { return src_; }
  const std::vector<int64_t>& dst() const { return dst_; }
  size_t size() const { return src_.size(); }

  // Whether a block in [first, last] is a destination.
  bool is_destination(int64_t first, int64_t last) const;

  void build_runs(Runs* runs) const;

 private:
  // For every destination block: which call named it last, and as which of that call's pairs. An
  // entry of another call is free, so nothing is cleared between calls.
  struct Entry {
    uint32_t call;
    uint32_t pair;
  };
  struct Pair {
    int64_t dst;
    int64_t src;
  };
  struct Free {
    void operator()(Entry* entries) const { std::free(entries); }
  };

  // Each returns whether the destinations it took are in ascending order, no two of them equal.
  template <typename SrcId, typename DstId>
  bool take(const SrcId* src, const DstId* dst, size_t count, IdLimit src_limit, IdLimit dst_limit);
  bool take(const IdList& src, const IdList& dst, IdLimit src_limit, IdLimit dst_limit);

  // Both return a destination that is named twice, or -1.
  int64_t fill_table();
  int64_t sort_pairs();
  void begin_table();

  bool names(int64_t dst_block) const { return table_[dst_block].call == call_; }
  [[noreturn]] static void throw_named_twice(const IdList& src, const IdList& dst, int64_t block);

  std::vector<int64_t> src_;
  std::vector<int64_t> dst_;
  int64_t dst_blocks_ = 0;
  // Pairs in ascending order of destination need no table.
  bool ascending_ = true;
  std::unique_ptr<Entry[], Free> table_;
  size_t table_size_ = 0;
  uint32_t call_ = 0;
  std::vector<Pair> to_sort_;
};

}  // namespace npu_kv
