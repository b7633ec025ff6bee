#include <cstdlib>
#include <stdexcept>
#include <string>

#include "check.h"
#include "runtime/batch_limit.h"
#include "runtime/pending_errors.h"

using namespace npu_kv;

TEST(the_limit_comes_from_the_environment_and_can_be_set) {
  for (const char* bad : {"0", "-1", "many", "12x", " 3", "99999999999999999999"}) {
    setenv("NPU_KV_MAX_BATCH", bad, 1);
    CHECK_THROWS(std::invalid_argument, (void)max_batch(), bad);
  }
  setenv("NPU_KV_MAX_BATCH", "77", 1);
  CHECK_EQUAL(max_batch(), 77u);
  set_max_batch(5);
  CHECK_EQUAL(max_batch(), 5u);
  CHECK_THROWS(std::invalid_argument, set_max_batch(0), "got 0");
  CHECK_THROWS(std::invalid_argument, set_max_batch(-3), "got -3");
  CHECK_EQUAL(max_batch(), 5u);
}

TEST(errors_wait_for_their_device) {
  PendingErrors errors;
  CHECK(!errors.any());
  errors.add(0, "first");
  errors.add(1, "other");
  errors.add(0, "second");
  CHECK(errors.any());
  CHECK_EQUAL(errors.take(0), "first\nsecond");
  CHECK_EQUAL(errors.take(0), "");
  CHECK_EQUAL(errors.take(-1), "other");
  CHECK(!errors.any());
}

TEST(a_flood_of_errors_is_counted_and_not_kept) {
  PendingErrors errors;
  for (int i = 0; i < 20; ++i) errors.add(0, "error " + std::to_string(i));
  const std::string text = errors.take(0);
  CHECK(text.starts_with("error 0\n"));
  CHECK(text.ends_with("4 more errors were not kept"));
  errors.add(0, "again");
  CHECK_EQUAL(errors.take(0), "again");
}

CHECK_MAIN
