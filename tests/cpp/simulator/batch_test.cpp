// Batched copies.
#include <set>

#include "simulator/fixture.h"

namespace {

constexpr aclrtMemLocation kHost = {0, ACL_MEM_LOCATION_TYPE_HOST};
constexpr aclrtMemLocation kDevice = {0, ACL_MEM_LOCATION_TYPE_DEVICE};
constexpr aclrtMemcpyBatchAttr kH2D = {kDevice, kHost, {}};
constexpr aclrtMemcpyBatchAttr kD2H = {kHost, kDevice, {}};

/// The arguments of a batch; a test takes a valid one and breaks it.
struct Batch {
  std::vector<void*> dsts;
  std::vector<size_t> dst_maxs;
  std::vector<void*> srcs;
  std::vector<size_t> sizes;
  std::vector<aclrtMemcpyBatchAttr> attrs;
  std::vector<size_t> attr_indexes{0};
  size_t fail_index = 12345;

  explicit Batch(const aclrtMemcpyBatchAttr& attr = kH2D) : attrs{attr} {}

  void add(void* dst, void* src, size_t bytes) {
    dsts.push_back(dst);
    dst_maxs.push_back(bytes);
    srcs.push_back(src);
    sizes.push_back(bytes);
  }
  aclError run(aclrtStream stream) {
    return aclrtMemcpyBatchAsync(dsts.data(), dst_maxs.data(), srcs.data(), sizes.data(),
                                 dsts.size(), attrs.data(), attr_indexes.data(), attrs.size(),
                                 &fail_index, stream);
  }
  aclError run_now() {
    return aclrtMemcpyBatch(dsts.data(), dst_maxs.data(), srcs.data(), sizes.data(), dsts.size(),
                            attrs.data(), attr_indexes.data(), attrs.size(), &fail_index);
  }
};

/// Several copies to one place: what is there afterwards tells which ran last.
class Race {
 public:
  explicit Race(int items) : device_(1), host_(static_cast<size_t>(items)) {
    for (int i = 0; i < items; ++i) {
      host_.data()[i] = static_cast<char>(i);
      batch_.add(device_, host_.data() + i, 1);
    }
  }
  int run(aclrtStream stream) {
    CHECK_OK(batch_.run(stream));
    CHECK_OK(aclrtSynchronizeStream(stream));
    return device_.read(1)[0];
  }

 private:
  DeviceMemory device_;
  PinnedMemory host_;
  Batch batch_;
};

int winners_with_seed(int64_t seed) {
  Session session;
  Stream stream;
  npu_sim_set("seed", seed);
  Race race(100);
  int mixed = 0;
  for (int i = 0; i < 8; ++i) mixed = (mixed * 31 + race.run(stream)) & 0x7f;
  return mixed;
}

}  // namespace

TEST(every_item_moves) {
  Session session;
  Stream stream;
  PinnedMemory in("abcdefghij");
  PinnedMemory out("..........");
  DeviceMemory device(10);
  Batch in_batch(kH2D);
  Batch out_batch(kD2H);
  for (int i = 0; i < 10; ++i) {
    in_batch.add(device.data() + i, in.data() + 9 - i, 1);
    out_batch.add(out.data() + i, device.data() + i, 1);
  }
  CHECK_OK(in_batch.run(stream));
  CHECK_EQUAL(in_batch.fail_index, SIZE_MAX);
  CHECK_OK(out_batch.run(stream));
  CHECK_OK(aclrtSynchronizeStream(stream));
  CHECK_EQUAL(out.read(10), "jihgfedcba");
  CHECK_EQUAL(stat("batches"), 2);
  CHECK_EQUAL(stat("copies.h2d"), 10);
  CHECK_EQUAL(stat("bytes.d2h"), 10);
  out.write("..........");
  CHECK_OK(out_batch.run_now());
  CHECK_EQUAL(out.read(10), "jihgfedcba");
}

TEST(items_have_no_order) {
  Session session;
  Stream stream;
  Race many(64);
  std::set<int> last;
  for (int i = 0; i < 20; ++i) last.insert(many.run(stream));
  CHECK(last.size() > 5);
  Race two(2);
  std::vector<int> wins(2);
  for (int i = 0; i < 64; ++i) ++wins[two.run(stream)];
  CHECK(wins[0] > 8 && wins[1] > 8);
  npu_sim_set("shuffle", 0);
  for (int i = 0; i < 20; ++i) CHECK_EQUAL(many.run(stream), 63);
}

CHILD(winners_with_seed_1) { return winners_with_seed(1); }
CHILD(winners_with_seed_2) { return winners_with_seed(2); }

TEST(the_order_depends_on_the_seed_alone) {
  const int first = run_child("winners_with_seed_1").exit_code;
  CHECK_EQUAL(run_child("winners_with_seed_1").exit_code, first);
  CHECK(run_child("winners_with_seed_2").exit_code != first);
}

TEST(arrays_may_be_reused_when_the_call_returns) {
  Session session;
  StalledStream stream;
  PinnedMemory in("ab");
  DeviceMemory device(2);
  Batch batch;
  batch.add(device, in, 1);
  batch.add(device.data() + 1, in.data() + 1, 1);
  CHECK_OK(batch.run(stream));
  batch.dsts.assign(2, nullptr);
  batch.srcs.assign(2, nullptr);
  batch.sizes.assign(2, size_t{1} << 40);
  stream.go();
  CHECK_OK(aclrtSynchronizeStream(stream));
  CHECK_EQUAL(device.read(2), "ab");
}

TEST(what_is_refused_and_at_which_item) {
  Session session(0, 2);
  Stream stream;
  PinnedMemory host(64);
  PinnedMemory other_host(64);
  DeviceMemory device(64);
  DeviceMemory other_device(64);
  char pageable[64] = {};
  void* freed = DeviceMemory(64);
  CHECK_OK(aclrtSetDevice(1));
  DeviceMemory second(64);
  CHECK_OK(aclrtSetCurrentContext(session.context));
  const aclrtMemLocation unregistered = {0, ACL_MEM_LOCATION_TYPE_UNREGISTERED};
  const size_t none = SIZE_MAX;
  const size_t kept = 12345;  // the runtime layer was not reached

  struct Case {
    const char* what;
    std::function<void(Batch&)> break_it;
    aclError code;
    size_t fail_index;
  };
  const std::vector<Case> cases = {
      {"size 0 among others", [&](Batch& b) { b.sizes[2] = 0; }, 107000, 2},
      {"destMax below size", [&](Batch& b) { b.dst_maxs[3] = 15; }, 100000, none},
      {"attrsIndexes does not start at 0", [&](Batch& b) { b.attr_indexes[0] = 1; }, 107000, none},
      {"attrsIndexes does not rise",
       [&](Batch& b) {
         b.attrs.assign(3, kH2D);
         b.attr_indexes = {0, 2, 2};
       },
       107000, none},
      {"attrsIndexes beyond the batch",
       [&](Batch& b) {
         b.attrs.assign(2, kH2D);
         b.attr_indexes = {0, 4};
       },
       107000, none},
      {"no attributes",
       [&](Batch& b) {
         b.attrs.clear();
         b.attrs.reserve(1);
       },
       107000, none},
      {"more attributes than items",
       [&](Batch& b) {
         b.attrs.assign(5, kH2D);
         b.attr_indexes = {0, 1, 2, 3, 4};
       },
       107000, none},
      {"reserved bytes set", [&](Batch& b) { b.attrs[0].rsv[15] = 1; }, 100000, none},
      {"device declared as host", [&](Batch& b) { b.attrs[0].dstLoc = kHost; }, 107000, 0},
      {"host declared as device", [&](Batch& b) { b.attrs[0].srcLoc = kDevice; }, 107000, 0},
      {"wrong device", [&](Batch& b) { b.attrs[0].dstLoc.id = 1; }, 107000, 0},
      {"memory of another device", [&](Batch& b) { b.dsts[1] = second; }, 107000, 1},
      {"pinned declared as unregistered", [&](Batch& b) { b.attrs[0].srcLoc = unregistered; },
       107000, 0},
      {"page-able declared as unregistered",
       [&](Batch& b) {
         b.srcs[0] = pageable;
         b.attrs[0].srcLoc = unregistered;
       },
       107000, 0},
      {"host to host",
       [&](Batch& b) {
         b.attrs[0] = {kHost, kHost, {}};
         b.dsts[0] = other_host;
       },
       107000, 0},
      {"device to device",
       [&](Batch& b) {
         b.attrs[0] = {kDevice, kDevice, {}};
         b.srcs[0] = other_device;
       },
       107000, 0},
      {"two directions",
       [&](Batch& b) {
         b.attrs.push_back(kD2H);
         b.attr_indexes = {0, 3};
         std::swap(b.dsts[3], b.srcs[3]);
       },
       107000, 3},
      {"destination too long", [&](Batch& b) { b.dsts[1] = device.data() + 49; }, 107000, 1},
      {"source too long", [&](Batch& b) { b.srcs[3] = host.data() + 49; }, 107000, 3},
      {"freed destination", [&](Batch& b) { b.dsts[2] = freed; }, 107000, 2},
      {"null destination", [&](Batch& b) { b.dsts[2] = nullptr; }, 107000, 2},
      {"null source", [&](Batch& b) { b.srcs[2] = nullptr; }, 107000, 2},
      {"no items", [&](Batch& b) { b.dsts.clear(); }, 100000, kept},
  };
  for (const Case& c : cases) {
    for (const bool now : {false, true}) {
      Batch batch;
      for (int i = 0; i < 4; ++i) batch.add(device.data() + 16 * i, host.data() + 16 * i, 16);
      c.break_it(batch);
      const aclError code = now ? batch.run_now() : batch.run(stream);
      if (code != c.code || batch.fail_index != c.fail_index) {
        std::fprintf(stderr, "%s:\n", c.what);
      }
      CHECK_EQUAL(code, c.code);
      CHECK_EQUAL(batch.fail_index, c.fail_index);
    }
  }
  CHECK_OK(aclrtSynchronizeStream(stream));
  CHECK_EQUAL(stat("copies.h2d"), 0);
  CHECK_EQUAL(stat("batches"), 0);
}

TEST(null_arrays_are_refused) {
  Session session;
  Stream stream;
  PinnedMemory host(64);
  DeviceMemory device(64);
  Batch b;
  b.add(device, host, 64);
  size_t* const indexes = b.attr_indexes.data();
  const auto run = [&](void** dsts, size_t* maxs, void** srcs, size_t* sizes,
                       aclrtMemcpyBatchAttr* attrs, size_t* attr_indexes, size_t* fail_index) {
    return aclrtMemcpyBatchAsync(dsts, maxs, srcs, sizes, 1, attrs, attr_indexes, 1, fail_index,
                                 stream);
  };
  void** const dsts = b.dsts.data();
  void** const srcs = b.srcs.data();
  size_t* const maxs = b.dst_maxs.data();
  size_t* const sizes = b.sizes.data();
  aclrtMemcpyBatchAttr* const attrs = b.attrs.data();
  size_t* const fail = &b.fail_index;
  CHECK_EQUAL(run(nullptr, maxs, srcs, sizes, attrs, indexes, fail), ACL_ERROR_INVALID_PARAM);
  CHECK_EQUAL(run(dsts, nullptr, srcs, sizes, attrs, indexes, fail), ACL_ERROR_INVALID_PARAM);
  CHECK_EQUAL(run(dsts, maxs, nullptr, sizes, attrs, indexes, fail), ACL_ERROR_INVALID_PARAM);
  CHECK_EQUAL(run(dsts, maxs, srcs, nullptr, attrs, indexes, fail), ACL_ERROR_INVALID_PARAM);
  CHECK_EQUAL(run(dsts, maxs, srcs, sizes, nullptr, indexes, fail), ACL_ERROR_INVALID_PARAM);
  CHECK_EQUAL(run(dsts, maxs, srcs, sizes, attrs, nullptr, fail), ACL_ERROR_INVALID_PARAM);
  CHECK_EQUAL(run(dsts, maxs, srcs, sizes, attrs, indexes, nullptr), ACL_ERROR_INVALID_PARAM);
  // Nothing to copy comes before the other arrays.
  b.sizes[0] = 0;
  CHECK_OK(run(nullptr, nullptr, nullptr, sizes, nullptr, nullptr, fail));
  CHECK_EQUAL(b.fail_index, SIZE_MAX);
}

TEST(attributes_apply_to_ranges_of_items) {
  Session session(0, 2);
  Stream stream;
  PinnedMemory host("abcd");
  DeviceMemory first(4);
  CHECK_OK(aclrtSetDevice(1));
  DeviceMemory second(4);
  CHECK_OK(aclrtSetCurrentContext(session.context));
  Batch batch;
  for (int i = 0; i < 4; ++i) {
    batch.add((i < 2 ? first.data() : second.data()) + i, host.data() + i, 1);
  }
  const aclrtMemLocation numa_host = {7,
                                      ACL_MEM_LOCATION_TYPE_HOST_NUMA};  // a host's id is ignored
  batch.attrs.push_back({{1, ACL_MEM_LOCATION_TYPE_DEVICE}, numa_host, {}});
  batch.attr_indexes = {0, 2};
  CHECK_OK(batch.run(stream));
  CHECK_OK(aclrtSynchronizeStream(stream));
  CHECK_EQUAL(first.read(2), "ab");
  CHECK_EQUAL(second.read(4).substr(2), "cd");
  batch.attr_indexes = {0, 3};
  CHECK_EQUAL(batch.run(stream), ACL_ERROR_RT_PARAM_INVALID);
  CHECK_EQUAL(batch.fail_index, 2u);
}

TEST(a_stream_of_another_context_is_refused_after_validation) {
  Session session;
  PinnedMemory host(8);
  DeviceMemory device(8);
  aclrtContext other = nullptr;
  CHECK_OK(aclrtCreateContext(&other, 0));
  Stream stream;
  CHECK_OK(aclrtSetCurrentContext(session.context));
  Batch batch;
  batch.add(device, host, 8);
  CHECK_EQUAL(batch.run(stream), ACL_ERROR_RT_STREAM_CONTEXT);
  CHECK_EQUAL(batch.fail_index, SIZE_MAX);
  CHECK_OK(aclrtSetCurrentContext(other));
}

TEST(batch_sizes_are_limited) {
  Session session;
  Stream stream;
  PinnedMemory host(4097);
  DeviceMemory device(4097);
  Batch batch;
  for (int i = 0; i < 4096; ++i) batch.add(device.data() + i, host.data() + i, 1);
  CHECK_OK(batch.run_now());
  npu_sim_set("batch_limit", 4096);
  CHECK_OK(batch.run(stream));
  batch.add(device.data() + 4096, host.data() + 4096, 1);
  CHECK_EQUAL(batch.run_now(), ACL_ERROR_RT_PARAM_INVALID);
  CHECK_EQUAL(batch.run(stream), ACL_ERROR_RT_PARAM_INVALID);
  npu_sim_set("batch_limit", 0);
  CHECK_OK(batch.run(stream));
  CHECK_OK(aclrtSynchronizeStream(stream));
  CHECK_EQUAL(stat("copies.h2d"), 4096 + 4096 + 4097);
}

TEST(a_pageable_item_makes_the_batch_synchronous) {
  Session session;
  StalledStream stream;
  PinnedMemory pinned("pin");
  DeviceMemory device(6);
  char pageable[3] = {'p', 'a', 'g'};
  Batch batch;
  batch.add(device, pinned, 3);
  batch.add(device.data() + 3, pageable, 3);  // declared as host, as it has to be
  CHECK_OK(aclrtMemsetAsync(device, 6, '.', 6, stream));
  std::atomic<bool> returned{false};
  std::thread caller([&] {
    aclrtSetCurrentContext(session.context);
    CHECK_OK(batch.run(stream));
    returned = true;
  });
  wait_a_while();
  CHECK(!returned);
  stream.go();
  caller.join();
  CHECK_EQUAL(device.read(6), "pinpag");
}

TEST(memory_freed_in_flight_fails_the_batch_before_anything_is_copied) {
  Session session;
  StalledStream stream;
  PinnedMemory host("new");
  DeviceMemory device(3);
  device.write("old");
  void* freed = nullptr;
  CHECK_OK(aclrtMalloc(&freed, 64, 0));
  Batch batch;
  batch.add(device, host, 3);
  batch.add(freed, host, 3);
  CHECK_OK(batch.run(stream));
  CHECK_OK(aclrtFree(freed));
  stream.go();
  CHECK_EQUAL(aclrtSynchronizeStream(stream), ACL_ERROR_RT_SYS_DMA);
  CHECK_EQUAL(device.read(3), "old");
}

SIMULATOR_TEST_MAIN
