// aclrtValueWrite and aclrtValueWait.
#include "simulator/fixture.h"

namespace {

constexpr uint32_t kGreaterEqual = 0;
constexpr uint32_t kEqual = 1;
constexpr uint32_t kAnd = 2;
constexpr uint32_t kNor = 3;

struct Word {
  DeviceMemory memory{8};
  explicit Word(uint64_t value = 0) { set(value); }
  operator void*() const { return memory; }
  void set(uint64_t value) const {
    CHECK_OK(aclrtMemcpy(memory, 8, &value, 8, ACL_MEMCPY_HOST_TO_DEVICE));
  }
  uint64_t get() const {
    uint64_t value = 0;
    CHECK_OK(aclrtMemcpy(&value, 8, memory, 8, ACL_MEMCPY_DEVICE_TO_HOST));
    return value;
  }
};

}  // namespace

TEST(four_ways_to_compare) {
  Session session;
  struct Case {
    uint32_t flag;
    uint64_t value;
    uint64_t no;   // a word that holds the stream
    uint64_t yes;  // one that lets it go on
  };
  const uint64_t minus_one = ~uint64_t{0};
  const std::vector<Case> cases = {
      {kGreaterEqual, 5, 4, 5},
      {kGreaterEqual, 5, minus_one, 6},
      {kGreaterEqual, minus_one, minus_one - 1, 0},  // signed: 0 >= -1
      {kEqual, 5, 6, 5},
      {kEqual, 5, 4, 5},
      {kAnd, 6, 1, 2},
      {kAnd, 6, 8, 12},
      {kNor, 0xff, ~uint64_t{0xff}, 0},
      {kNor, 0, minus_one, minus_one - 1},
  };
  Stream waiter;
  Stream writer;
  for (const Case& c : cases) {
    Word word(c.no);
    CHECK_OK(aclrtValueWait(word, c.value, c.flag, waiter));
    CHECK(blocked(waiter));
    CHECK_OK(aclrtValueWrite(word, c.yes, 0, writer));
    CHECK_OK(aclrtSynchronizeStream(waiter));
    CHECK_EQUAL(word.get(), c.yes);  // waiting changes nothing
  }
}

TEST(writes_run_in_stream_order) {
  Session session;
  StalledStream stream;
  Word word(1);
  CHECK_OK(aclrtValueWrite(word, 2, 0, stream));
  wait_a_while();
  CHECK_EQUAL(word.get(), 1u);
  stream.go();
  CHECK_OK(aclrtSynchronizeStream(stream));
  CHECK_EQUAL(word.get(), 2u);
}

TEST(a_word_written_by_a_fill_or_a_synchronous_copy_wakes_a_wait) {
  Session session;
  Stream waiter;
  Word word(0);
  CHECK_OK(aclrtValueWait(word, 3, kEqual, waiter));
  CHECK(blocked(waiter));
  word.set(3);
  CHECK_OK(aclrtSynchronizeStream(waiter));
  CHECK_OK(aclrtValueWait(word, 0, kEqual, waiter));
  CHECK_OK(aclrtMemset(word, 8, 0, 8));
  CHECK_OK(aclrtSynchronizeStream(waiter));
}

TEST(record_and_wait_as_torch_npu_builds_external_events) {
  Session session;
  Stream recorder;
  Stream waiter;
  Word word(0);
  for (int i = 0; i < 3; ++i) {
    CHECK_OK(aclrtValueWait(word, 1, kEqual, waiter));
    CHECK_OK(aclrtValueWrite(word, 0, 0, waiter));
    CHECK(blocked(waiter));
    CHECK_OK(aclrtValueWrite(word, 1, 0, recorder));
    CHECK_OK(aclrtSynchronizeStream(waiter));
    CHECK_EQUAL(word.get(), 0u);
  }
}

TEST(both_are_captured_and_run_at_every_replay) {
  Session session;
  Stream stream;
  Stream writer;
  Word gate(0);
  Word done(0);
  Graph graph(capture(stream, [&] {
    CHECK_OK(aclrtValueWait(gate, 1, kEqual, stream));
    CHECK_OK(aclrtValueWrite(gate, 0, 0, stream));
    CHECK_OK(aclrtValueWrite(done, 1, 0, stream));
  }));
  CHECK_EQUAL(done.get(), 0u);
  for (int i = 0; i < 2; ++i) {
    done.set(0);
    CHECK_OK(aclmdlRIExecuteAsync(graph, stream));
    CHECK(blocked(stream));
    CHECK_OK(aclrtValueWrite(gate, 1, 0, writer));
    CHECK_OK(aclrtSynchronizeStream(stream));
    CHECK_EQUAL(done.get(), 1u);
  }
}

TEST(where_a_word_may_lie) {
  Session session;
  Stream stream;
  DeviceMemory device(16);
  PinnedMemory pinned(16);
  alignas(8) char pageable[16] = {};
  const auto bad = ACL_ERROR_RT_PARAM_INVALID;
  for (void* address : {static_cast<void*>(device.data() + 4), static_cast<void*>(pinned),
                        static_cast<void*>(pageable), static_cast<void*>(device.data() + 32)}) {
    CHECK_EQUAL(aclrtValueWrite(address, 1, 0, stream), bad);
    CHECK_EQUAL(aclrtValueWait(address, 1, 0, stream), bad);
  }
  CHECK_EQUAL(aclrtValueWait(device, 1, 4, stream), bad);
  CHECK_EQUAL(aclrtValueWrite(nullptr, 1, 0, stream), ACL_ERROR_INVALID_PARAM);
  CHECK_EQUAL(aclrtValueWait(nullptr, 1, 0, stream), ACL_ERROR_INVALID_PARAM);
}

SIMULATOR_TEST_MAIN
