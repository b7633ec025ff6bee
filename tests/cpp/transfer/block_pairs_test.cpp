#include "transfer/block_pairs.h"

#include <algorithm>
#include <numeric>
#include <random>
#include <stdexcept>
#include <tuple>
#include <vector>

#include "check.h"
#include "transfer/reference.h"

using namespace npu_kv;
using testing::ids;

namespace {

using Run = std::tuple<int64_t, int64_t, int64_t>;
using Ids = std::vector<int64_t>;

// A pool of this size is too large for a table: ids are sorted instead.
constexpr int64_t kHugePool = int64_t{1} << 40;

std::vector<Run> runs_of(const BlockPairs& pairs) {
  Runs runs;
  pairs.build_runs(&runs);
  std::vector<Run> result;
  for (size_t r = 0; r < runs.src.size(); ++r) {
    result.emplace_back(runs.src[r], runs.dst[r], runs.count[r]);
  }
  std::sort(result.begin(), result.end());
  return result;
}

std::vector<Run> runs_of(const Ids& src, const Ids& dst, int64_t blocks) {
  BlockPairs pairs;
  pairs.assign(ids(src), ids(dst), {blocks, 0}, {blocks, 0});
  return runs_of(pairs);
}

}  // namespace

TEST(runs_join_neighbours_whatever_their_order) {
  for (int64_t blocks : {int64_t{32}, kHugePool}) {
    CHECK(runs_of({0, 1, 2}, {5, 6, 7}, blocks) == (std::vector<Run>{{0, 5, 3}}));
    CHECK(runs_of({2, 1, 0}, {7, 6, 5}, blocks) == (std::vector<Run>{{0, 5, 3}}));
    CHECK(runs_of({1, 9, 2, 0}, {6, 20, 7, 5}, blocks) ==
          (std::vector<Run>{{0, 5, 3}, {9, 20, 1}}));
  }
}

TEST(runs_need_neighbours_on_both_sides) {
  for (int64_t blocks : {int64_t{32}, kHugePool}) {
    CHECK(runs_of({0, 1}, {5, 7}, blocks) == (std::vector<Run>{{0, 5, 1}, {1, 7, 1}}));
    CHECK(runs_of({0, 2}, {5, 6}, blocks) == (std::vector<Run>{{0, 5, 1}, {2, 6, 1}}));
    // Neighbours that run against each other.
    CHECK(runs_of({0, 1}, {6, 5}, blocks) == (std::vector<Run>{{0, 6, 1}, {1, 5, 1}}));
  }
}

TEST(a_source_may_be_named_twice) {
  CHECK(runs_of({3, 3}, {5, 6}, 32) == (std::vector<Run>{{3, 5, 1}, {3, 6, 1}}));
}

TEST(the_whole_pool_is_one_run) {
  Ids all(1000);
  std::iota(all.begin(), all.end(), 0);
  CHECK(runs_of(all, all, 1000) == (std::vector<Run>{{0, 0, 1000}}));
}

TEST(a_negative_id_in_either_list_skips_the_pair) {
  for (int64_t blocks : {int64_t{32}, kHugePool}) {
    BlockPairs pairs;
    // The partner of a negative id is not looked at, nor does it count as named.
    pairs.assign(ids(Ids{-1, 2, 3, -5}), ids(Ids{4, -9, 4, kHugePool}), {blocks, 0}, {blocks, 0});
    CHECK(pairs.src() == Ids{3});
    CHECK(pairs.dst() == Ids{4});
  }
}

TEST(both_widths_of_ids_mix) {
  const std::vector<int32_t> narrow{1, -1, 2};
  const Ids wide{3, 4, 5};
  BlockPairs pairs;
  pairs.assign(ids(narrow), ids(wide), {8, 0}, {8, 0});
  CHECK(pairs.src() == (Ids{1, 2}));
  CHECK(pairs.dst() == (Ids{3, 5}));
  pairs.assign(ids(wide), ids(narrow), {8, 0}, {8, 0});
  CHECK(pairs.src() == (Ids{3, 5}));
  CHECK(pairs.dst() == (Ids{1, 2}));
  pairs.assign(ids(narrow), ids(narrow), {8, 0}, {8, 0});
  CHECK(pairs.src() == (Ids{1, 2}));
}

TEST(an_id_beyond_its_pool_names_list_position_id_and_limit) {
  BlockPairs pairs;
  CHECK_THROWS(std::out_of_range, pairs.assign(ids(Ids{0, 8}), ids(Ids{0, 1}), {8, 3}, {9, 0}),
               "src_blocks[1] is 8, out of range for src[3] with 8 blocks (allowed: 0 to 7");
  CHECK_THROWS(std::out_of_range, pairs.assign(ids(Ids{0}), ids(Ids{9}), {8, 0}, {9, 2}),
               "dst_blocks[0] is 9, out of range for dst[2] with 9 blocks");
  CHECK_THROWS(std::out_of_range, pairs.assign(ids(Ids{0}), ids(Ids{0}), {0, 0}, {9, 0}),
               "src_blocks[0] is 0, out of range for src[0] with 0 blocks");
  CHECK_THROWS(std::out_of_range,
               pairs.assign(ids(Ids{kHugePool}), ids(Ids{0}), {kHugePool, 0}, {kHugePool, 0}),
               "src_blocks[0] is 1099511627776");
}

TEST(a_destination_named_twice_is_refused) {
  for (int64_t blocks : {int64_t{32}, kHugePool}) {
    BlockPairs pairs;
    // The pair of position 0 is skipped, so it does not name block 6.
    CHECK_THROWS(
        std::invalid_argument,
        pairs.assign(ids(Ids{-1, 1, 2, 3}), ids(Ids{6, 6, 7, 6}), {blocks, 0}, {blocks, 0}),
        "dst_blocks[3] is 6, which dst_blocks[1] named already");
    // A refused call leaves nothing behind for the next.
    pairs.assign(ids(Ids{1}), ids(Ids{6}), {blocks, 0}, {blocks, 0});
    CHECK_EQUAL(pairs.size(), 1u);
    CHECK(!pairs.is_destination(7, 7));
  }
}

TEST(a_workspace_forgets_the_call_before) {
  BlockPairs pairs;
  for (int round = 0; round < 3; ++round) {
    pairs.assign(ids(Ids{0, 1}), ids(Ids{4, 5}), {8, 0}, {8, 0});
    pairs.assign(ids(Ids{2}), ids(Ids{6}), {8, 0}, {8, 0});
    CHECK(runs_of(pairs) == (std::vector<Run>{{2, 6, 1}}));
    // A larger pool, for which the table grows.
    pairs.assign(ids(Ids{2}), ids(Ids{4999 << round}), {8, 0}, {5000 << round, 0});
    CHECK(runs_of(pairs) == (std::vector<Run>{{2, 4999 << round, 1}}));
  }
}

TEST(is_destination_looks_at_a_range) {
  for (int64_t blocks : {int64_t{32}, kHugePool}) {
    BlockPairs pairs;
    pairs.assign(ids(Ids{0, 1, 2}), ids(Ids{4, 9, 20}), {blocks, 0}, {blocks, 0});
    CHECK(pairs.is_destination(9, 9));
    CHECK(pairs.is_destination(-5, 4));
    CHECK(pairs.is_destination(10, kHugePool * 2));
    CHECK(!pairs.is_destination(5, 8));
    CHECK(!pairs.is_destination(10, 19));
    CHECK(!pairs.is_destination(21, kHugePool * 2));
    CHECK(!pairs.is_destination(-3, -1));
    CHECK(!pairs.is_destination(4, 3));
  }
}

TEST(table_and_sorting_agree) {
  std::mt19937 random(7);
  BlockPairs small;
  BlockPairs huge;
  for (int round = 0; round < 300; ++round) {
    const int64_t blocks = 1 + static_cast<int64_t>(random() % 40);
    Ids src;
    Ids dst(static_cast<size_t>(blocks));
    std::iota(dst.begin(), dst.end(), 0);
    if (round % 3 != 0) std::shuffle(dst.begin(), dst.end(), random);
    dst.resize(random() % dst.size() + 1);
    // Mostly neighbours, so that there are runs.
    for (int64_t d : dst) src.push_back(random() % 4 == 0 ? random() % blocks : (d + 1) % blocks);
    small.assign(ids(src), ids(dst), {blocks, 0}, {blocks, 0});
    huge.assign(ids(src), ids(dst), {kHugePool, 0}, {kHugePool, 0});
    CHECK(runs_of(small) == runs_of(huge));
    Runs runs;
    small.build_runs(&runs);
    CHECK_EQUAL(runs.pairs, static_cast<int64_t>(dst.size()));
    CHECK_EQUAL(std::accumulate(runs.count.begin(), runs.count.end(), int64_t{0}), runs.pairs);
  }
}

CHECK_MAIN
