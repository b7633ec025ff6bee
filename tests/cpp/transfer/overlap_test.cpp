#include "transfer/overlap.h"

#include <random>
#include <stdexcept>
#include <vector>

#include "check.h"
#include "transfer/reference.h"

using namespace npu_kv;
using testing::conflicts;
using testing::ids;
using testing::kDevice;
using testing::layout;

namespace {

using Ids = std::vector<int64_t>;
using Layouts = std::vector<BlockLayout>;

// The tensors of a pool packed into one page: `count` views with one stride and disjoint payloads.
Layouts packed(int64_t base, int64_t count, int64_t payload, int64_t blocks) {
  Layouts result;
  for (int64_t i = 0; i < count; ++i) {
    result.push_back(layout(base + i * payload, count * payload, payload, blocks));
  }
  return result;
}

void prepare_call(const Layouts& src, const Layouts& dst, const Ids& src_ids, const Ids& dst_ids) {
  BlockTransfer call{src, dst, {}, Direction::kHostToHost};
  prepare(&call, ids(src_ids), ids(dst_ids));
}

}  // namespace

TEST(separate_and_interleaved_pools_need_no_look_at_ids) {
  const Layouts separate{layout(1000, 8, 8, 10), layout(1080, 8, 8, 10), layout(2000, 16, 8, 10)};
  CHECK(find_overlaps({}, separate).empty());
  CHECK(find_overlaps({}, packed(4096, 64, 16, 100)).empty());
  // Interleaved, and the second view starts a few blocks later.
  CHECK(find_overlaps({}, Layouts{layout(1000, 24, 8, 10), layout(1056, 24, 16, 10)}).empty());
  // Strides that differ, payloads disjoint modulo what they have in common.
  CHECK(find_overlaps({}, Layouts{layout(1000, 32, 8, 10), layout(1008, 16, 8, 20)}).empty());
}

TEST(equal_addresses_on_host_and_device_are_different_memory) {
  CHECK(find_overlaps(Layouts{layout(1000, 8, 8, 10)}, Layouts{layout(1000, 8, 8, 10, kDevice)})
            .empty());
}

TEST(one_geometry_is_reported_once) {
  const Layouts pool = packed(4096, 64, 16, 100);
  CHECK_EQUAL(find_overlaps(pool, pool).size(), 1u);
}

TEST(a_tensor_listed_twice_is_refused_unless_nothing_is_copied) {
  const Layouts twice{layout(1000, 8, 8, 10), layout(1000, 8, 8, 10)};
  const Layouts src{layout(5000, 8, 8, 10), layout(6000, 8, 8, 10)};
  CHECK_THROWS(std::invalid_argument, prepare_call(src, twice, {1}, {2}),
               "block 2 of dst[0] and block 2 of dst[1] are both written");
  prepare_call(src, twice, {-1}, {2});
}

TEST(blocks_of_one_tensor_may_be_source_and_destination_if_they_differ) {
  const Layouts pool{layout(1000, 16, 8, 10)};
  prepare_call(pool, pool, {0, 1}, {5, 6});
  CHECK_THROWS(std::invalid_argument, prepare_call(pool, pool, {0, 5}, {5, 6}),
               "block 5 of src[0] is read and shares memory with block 5 of dst[0]");
  CHECK_THROWS(std::invalid_argument, prepare_call(pool, pool, {3}, {3}), "block 3 of src[0]");
}

TEST(views_shifted_by_whole_blocks_are_compared_by_bytes) {
  const Layouts src{layout(1000, 8, 8, 10)};
  const Layouts dst{layout(1024, 8, 8, 10)};  // its block 0 is block 3 of src
  prepare_call(src, dst, {0, 1, 2}, {0, 1, 2});
  CHECK_THROWS(std::invalid_argument, prepare_call(src, dst, {3}, {0}),
               "block 3 of src[0] is read and shares memory with block 0 of dst[0]");
}

TEST(views_shifted_by_part_of_a_block_are_compared_by_bytes) {
  const Layouts src{layout(1000, 8, 8, 10)};
  const Layouts dst{layout(1004, 8, 8, 10)};  // its block 0 lies on blocks 0 and 1 of src
  CHECK_THROWS(std::invalid_argument, prepare_call(src, dst, {0}, {0}), "shares memory");
  CHECK_THROWS(std::invalid_argument, prepare_call(src, dst, {1}, {0}), "shares memory");
  prepare_call(src, dst, {2}, {0});
}

TEST(small_blocks_inside_a_large_one_are_found) {
  const Layouts src{layout(5000, 4, 4, 100), layout(6000, 64, 64, 4)};
  const Layouts dst{layout(1000, 4, 4, 64), layout(1000, 64, 64, 4)};
  CHECK_THROWS(std::invalid_argument, prepare_call(src, dst, {0, 1}, {0, 1}), "both written");
  // Block 3 of the small ones lies in block 0 of the large ones, 17 and 18 in block 1.
  CHECK_THROWS(std::invalid_argument, prepare_call(src, dst, {0, 1}, {3, 0}), "both written");
  prepare_call({src[0]}, {dst[0]}, {0, 1}, {3, 0});
}

TEST(empty_layouts_have_no_memory) {
  CHECK(find_overlaps({}, Layouts{layout(1000, 8, 0, 10), layout(1000, 8, 0, 10)}).empty());
  CHECK(find_overlaps({}, Layouts{layout(1000, 8, 8, 0), layout(1000, 8, 8, 10)}).empty());
}

TEST(the_cache_gives_what_a_fresh_look_gives) {
  OverlapCache cache;
  std::vector<Layouts> sets;
  for (int64_t i = 0; i < 20; ++i) {
    sets.push_back({layout(1000, 8, 8, 10), layout(1000 + 16 * i, 8, 8, 10)});
  }
  for (int round = 0; round < 3; ++round) {
    for (const Layouts& dst : sets) {
      const auto fresh = find_overlaps({}, dst);
      const auto cached = cache.find({}, dst);
      CHECK_EQUAL(cached.size(), fresh.size());
      if (!fresh.empty() && !cached.empty()) CHECK_EQUAL(cached[0].distance, fresh[0].distance);
    }
    CHECK(cache.find(sets[0], sets[15]).size() == find_overlaps(sets[0], sets[15]).size());
  }
}

// Random tensors in one small stretch of memory: refused exactly when a byte is written twice, or
// written and read.
TEST(agrees_with_bytes) {
  std::mt19937 random(11);
  auto below = [&random](int64_t limit) { return static_cast<int64_t>(random() % limit); };
  int refused = 0;
  int accepted = 0;
  for (int round = 0; round < 20000; ++round) {
    const int64_t tensors = 1 + below(3);
    const bool common_stride = below(2) == 0;
    const int64_t stride = 1 + below(12);
    Layouts src;
    Layouts dst;
    for (int64_t t = 0; t < tensors; ++t) {
      const int64_t payload = 1 + below(common_stride ? stride : 8);
      auto place = [&](int64_t blocks) {
        const int64_t own = common_stride ? stride : payload + below(6);
        return layout(1000 + below(60), blocks == 1 ? payload : own, payload, blocks);
      };
      dst.push_back(place(1 + below(6)));
      src.push_back(place(1 + below(6)));
      if (below(4) == 0) src.back().base += 10000;
    }
    int64_t src_blocks = 100;
    int64_t dst_blocks = 100;
    for (int64_t t = 0; t < tensors; ++t) {
      src_blocks = std::min(src_blocks, src[t].num_blocks);
      dst_blocks = std::min(dst_blocks, dst[t].num_blocks);
    }
    Ids src_ids;
    Ids dst_ids;
    for (int64_t d = 0; d < dst_blocks; ++d) {
      if (below(2) == 0) continue;
      dst_ids.push_back(below(8) == 0 ? -1 : d);
      src_ids.push_back(below(8) == 0 ? -1 : below(src_blocks));
    }
    BlockTransfer call{src, dst, {}, Direction::kHostToHost};
    bool thrown = false;
    try {
      prepare(&call, ids(src_ids), ids(dst_ids));
    } catch (const std::invalid_argument&) {
      thrown = true;
    }
    const bool conflict = conflicts(call, src_ids, dst_ids);
    if (thrown != conflict) {
      CHECK_EQUAL(thrown, conflict);
      return;
    }
    ++(conflict ? refused : accepted);
  }
  CHECK(refused > 1000);
  CHECK(accepted > 1000);
}

CHECK_MAIN
