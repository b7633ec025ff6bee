#include "transfer/block_transfer.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <random>
#include <thread>
#include <vector>

#include "check.h"
#include "runtime/host_runtime.h"
#include "transfer/copy_stats.h"
#include "transfer/reference.h"

using namespace npu_kv;
using testing::Copy;
using testing::ids;
using testing::kDevice;
using testing::layout;
using testing::RecordingRuntime;

namespace {

using Ids = std::vector<int64_t>;

BlockTransfer call_with(std::vector<BlockLayout> src, std::vector<BlockLayout> dst,
                        const Ids& src_ids, const Ids& dst_ids) {
  BlockTransfer call{std::move(src), std::move(dst), {}, Direction::kHostToDevice};
  prepare(&call, ids(src_ids), ids(dst_ids));
  return call;
}

std::vector<Copy> sorted(std::vector<Copy> copies) {
  std::sort(copies.begin(), copies.end());
  return copies;
}

}  // namespace

TEST(runs_become_one_copy_where_nothing_lies_between_blocks) {
  const BlockTransfer call =
      call_with({layout(1000, 8, 8, 10), layout(2000, 8, 8, 10), layout(3000, 12, 8, 10)},
                {layout(1000, 8, 8, 10, kDevice), layout(2000, 10, 8, 10, kDevice),
                 layout(3000, 12, 8, 10, kDevice)},
                {2, 0, 1}, {6, 4, 5});
  RecordingRuntime runtime;
  CHECK(issue(call, runtime, StreamRef{}, 4096).ok());
  // A gap on one side, or the same gap on both, keeps blocks apart: only payloads are copied.
  CHECK(sorted(runtime.all) == (std::vector<Copy>{{1032, 1000, 24},
                                                  {2040, 2000, 8},
                                                  {2050, 2008, 8},
                                                  {2060, 2016, 8},
                                                  {3048, 3000, 8},
                                                  {3060, 3012, 8},
                                                  {3072, 3024, 8}}));
  const TransferSize size = size_of(call);
  CHECK_EQUAL(size.bytes, 72u);
  CHECK_EQUAL(size.copies_before, 9u);
  CHECK_EQUAL(size.copies_after, 7u);
}

TEST(tensors_that_lie_side_by_side_are_one_copy) {
  // Keys and values of a block, 8 and 4 bytes, in a pool of 16 bytes a block; the last one is
  // apart.
  const auto three = [](int64_t base, Place place) {
    return std::vector{layout(base, 16, 8, 10, place), layout(base + 8, 16, 4, 10, place),
                       layout(base + 13, 16, 3, 10, place)};
  };
  const BlockTransfer call = call_with(three(1000, Place{}), three(5000, kDevice), {2, 7}, {3, 1});
  RecordingRuntime runtime;
  CHECK(issue(call, runtime, StreamRef{}, 4096).ok());
  CHECK(sorted(runtime.all) ==
        (std::vector<Copy>{{5016, 1112, 12}, {5029, 1125, 3}, {5048, 1032, 12}, {5061, 1045, 3}}));
  const TransferSize size = size_of(call);
  CHECK_EQUAL(size.bytes, 30u);
  CHECK_EQUAL(size.copies_before, 6u);
  CHECK_EQUAL(size.copies_after, 4u);
}

TEST(what_is_side_by_side_without_gaps_is_one_run) {
  const BlockTransfer call = call_with(
      {layout(1000, 12, 8, 10), layout(1008, 12, 4, 10)},
      {layout(5000, 12, 8, 10, kDevice), layout(5008, 12, 4, 10, kDevice)}, {2, 3, 4}, {5, 6, 7});
  RecordingRuntime runtime;
  CHECK(issue(call, runtime, StreamRef{}, 4096).ok());
  CHECK(runtime.all == (std::vector<Copy>{{5060, 1024, 36}}));
}

TEST(parts_are_joined_by_themselves) {
  const BlockTransfer call =
      call_with({layout(1000, 12, 4, 9), layout(1004, 12, 4, 9), layout(1008, 12, 4, 9)},
                {layout(5000, 12, 4, 9, kDevice), layout(5004, 12, 4, 9, kDevice),
                 layout(5008, 12, 4, 9, kDevice)},
                {2}, {5});
  RecordingRuntime runtime;
  CHECK(issue(call, 0, 2, runtime, StreamRef{}, 4096).ok());
  CHECK(issue(call, 2, 1, runtime, StreamRef{}, 4096).ok());
  CHECK(runtime.all == (std::vector<Copy>{{5060, 1024, 8}, {5068, 1032, 4}}));
  CHECK_EQUAL(size_of(call, 0, 2).copies_after, 1u);
  CHECK_EQUAL(size_of(call, 2, 1).copies_after, 1u);
}

TEST(tensors_are_not_joined_when_one_side_or_the_number_of_blocks_differs) {
  const auto count = [](std::vector<BlockLayout> src, std::vector<BlockLayout> dst) {
    return size_of(call_with(std::move(src), std::move(dst), {1}, {2})).copies_after;
  };
  const std::vector beside{layout(1000, 16, 4, 10), layout(1004, 16, 4, 10)};
  const auto device = [](int64_t second, int64_t stride, int64_t blocks) {
    return std::vector{layout(5000, 16, 4, 10, kDevice),
                       layout(second, stride, 4, blocks, kDevice)};
  };
  CHECK_EQUAL(count(beside, device(5004, 16, 10)), 1u);
  CHECK_EQUAL(count(beside, device(5005, 16, 10)), 2u);
  CHECK_EQUAL(count(beside, device(5004, 20, 10)), 2u);
  CHECK_EQUAL(count(beside, device(5004, 16, 9)), 2u);
}

TEST(batches_are_cut_at_the_limit) {
  Ids even(10);
  for (size_t i = 0; i < even.size(); ++i) even[i] = static_cast<int64_t>(2 * i);
  const BlockTransfer call =
      call_with({layout(1000, 8, 8, 20), layout(2000, 12, 8, 20)},
                {layout(1000, 8, 8, 20, kDevice), layout(2000, 12, 8, 20, kDevice)}, even, even);
  for (size_t limit : {1u, 3u, 7u, 10u, 19u, 20u, 21u}) {
    RecordingRuntime runtime;
    CHECK(issue(call, runtime, StreamRef{&runtime, 0}, limit).ok());
    std::vector<size_t> expected(20 / limit, limit);
    if (20 % limit != 0) expected.push_back(20 % limit);
    CHECK(runtime.batches == expected);
    CHECK(runtime.bytes() == testing::expected_bytes(call, even, even));
    CHECK(runtime.streams == std::set<void*>{&runtime});
    CHECK(runtime.directions == std::set<Direction>{Direction::kHostToDevice});
  }
}

TEST(an_error_ends_the_call) {
  const BlockTransfer call = call_with({layout(1000, 9, 8, 20)}, {layout(1000, 8, 8, 20, kDevice)},
                                       {0, 1, 2, 3, 4}, {0, 1, 2, 3, 4});
  RecordingRuntime runtime;
  runtime.refused_batch = 1;
  const Status status = issue(call, runtime, StreamRef{}, 2);
  CHECK_EQUAL(status.code(), 7);
  CHECK(runtime.batches == std::vector<size_t>{2});
}

TEST(pointers_are_cut_at_the_limit_too) {
  std::vector<void*> dst(5), src(5);
  std::vector<size_t> size(5, 8);
  for (size_t i = 0; i < 5; ++i) {
    dst[i] = reinterpret_cast<void*>(1000 + 8 * i);
    src[i] = reinterpret_cast<void*>(2000 + 8 * i);
  }
  RecordingRuntime runtime;
  CHECK(issue(Descriptors{dst.data(), src.data(), size.data(), 5}, Direction::kDeviceToHost,
              runtime, StreamRef{}, 2)
            .ok());
  CHECK(runtime.batches == (std::vector<size_t>{2, 2, 1}));
  CHECK(runtime.all[4] == (Copy{1032, 2032, 8}));
}

TEST(nothing_to_copy_makes_no_runtime_call) {
  RecordingRuntime runtime;
  CHECK(issue(call_with({}, {}, {0}, {0}), runtime, StreamRef{}, 4).ok());
  CHECK(issue(call_with({layout(8, 8, 0, 4)}, {layout(8, 8, 0, 4, kDevice)}, {0}, {0}), runtime,
              StreamRef{}, 4)
            .ok());
  CHECK(issue(call_with({layout(8, 8, 8, 4)}, {layout(8, 8, 8, 4, kDevice)}, {-1}, {0}), runtime,
              StreamRef{}, 4)
            .ok());
  CHECK(runtime.batches.empty());
}

TEST(random_calls_copy_the_right_bytes) {
  std::mt19937 random(3);
  auto below = [&random](int64_t limit) { return static_cast<int64_t>(random() % limit); };
  for (int round = 0; round < 500; ++round) {
    std::vector<BlockLayout> src;
    std::vector<BlockLayout> dst;
    const int64_t src_blocks = 1 + below(30);
    const int64_t dst_blocks = 1 + below(30);
    for (int64_t t = below(4); t >= 0; --t) {
      const int64_t payload = below(10);
      src.push_back(layout(10000 * t, payload + below(2) * below(4), payload, src_blocks));
      dst.push_back(layout(10000 * t, payload + below(2) * below(4), payload, dst_blocks, kDevice));
    }
    Ids dst_ids(static_cast<size_t>(dst_blocks));
    std::iota(dst_ids.begin(), dst_ids.end(), 0);
    if (below(2) == 0) std::shuffle(dst_ids.begin(), dst_ids.end(), random);
    Ids src_ids;
    for (int64_t& d : dst_ids) {
      src_ids.push_back(below(6) == 0 ? -1 : below(3) == 0 ? below(src_blocks) : d % src_blocks);
      if (below(6) == 0) d = -1;
    }
    const BlockTransfer call = call_with(src, dst, src_ids, dst_ids);
    RecordingRuntime runtime;
    CHECK(issue(call, runtime, StreamRef{}, static_cast<size_t>(1 + below(50))).ok());
    CHECK(runtime.bytes() == testing::expected_bytes(call, src_ids, dst_ids));
    CHECK_EQUAL(runtime.all.size(), size_of(call).copies_after);
  }
}

TEST(the_host_runtime_moves_bytes_and_refuses_devices) {
  char from[] = "abcdef";
  char to[] = "......";
  void* dst[] = {to + 1, to + 4};
  void* src[] = {from, from + 5};
  size_t size[] = {2, 1};
  const Descriptors copies{dst, src, size, 2};
  CHECK(host_runtime().copy(copies, Direction::kHostToHost, StreamRef{}).ok());
  CHECK_EQUAL(std::string(to), std::string(".ab.f."));
  CHECK(!host_runtime().copy(copies, Direction::kHostToDevice, StreamRef{}).ok());
}

// Batches of many bytes go past the caches: any alignment, long and short copies in one batch.
TEST(large_host_batches_move_every_byte_and_no_other) {
  constexpr size_t kMiB = size_t{1} << 20;
  std::vector<unsigned char> from(12 * kMiB);
  std::mt19937 random(5);
  for (unsigned char& byte : from) byte = static_cast<unsigned char>(random());
  std::vector<unsigned char> to(from.size() + 4096, 0);
  std::vector<unsigned char> expected = to;
  std::vector<void*> dst, src;
  std::vector<size_t> size;
  // Uneven pieces with an uneven gap between them on the destination's side.
  size_t at = 1;
  for (size_t piece = 0; at + 3 * kMiB < from.size(); ++piece) {
    const size_t bytes = piece % 3 == 0 ? 1 + random() % 70 : random() % (2 * kMiB) + 1;
    const size_t shift = 3 + 5 * piece;
    src.push_back(from.data() + at);
    dst.push_back(to.data() + at + shift);
    size.push_back(bytes);
    std::memcpy(expected.data() + at + shift, from.data() + at, bytes);
    at += bytes + 7;
  }
  CHECK(std::accumulate(size.begin(), size.end(), size_t{0}) > 8 * kMiB);
  const Descriptors copies{dst.data(), src.data(), size.data(), size.size()};
  CHECK(host_runtime().copy(copies, Direction::kHostToHost, StreamRef{}).ok());
  CHECK(to == expected);
}

// Every thread has its own workspaces; the thread sanitizer looks at what is shared.
TEST(threads_do_not_disturb_each_other) {
  reset_copy_stats();
  std::vector<std::thread> threads;
  std::vector<int> wrong(4, 0);
  for (size_t n = 0; n < wrong.size(); ++n) {
    threads.emplace_back([n, &wrong] {
      for (int round = 0; round < 200; ++round) {
        std::vector<char> from(64 * 16, static_cast<char>(n));
        std::vector<char> to(64 * 16, 100);
        Ids all(64);
        std::iota(all.begin(), all.end(), 0);
        std::rotate(all.begin(), all.begin() + round % 64, all.end());
        BlockTransfer call{{layout(reinterpret_cast<int64_t>(from.data()), 16, 16, 64)},
                           {layout(reinterpret_cast<int64_t>(to.data()), 16, 16, 64)},
                           {},
                           Direction::kHostToHost};
        prepare(&call, ids(all), ids(all));
        if (!issue(call, host_runtime(), StreamRef{}, 8).ok() || to != from) ++wrong[n];
        count_call(size_of(call).bytes, 64, 1);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(wrong == std::vector<int>(4, 0));
  CHECK_EQUAL(copy_stats().calls, 800u);
  CHECK_EQUAL(copy_stats().bytes, 800u * 64 * 16);
}

CHECK_MAIN
