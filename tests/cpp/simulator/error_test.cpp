// Asynchronous failures in both failure modes, and the error state of a thread.
#include <cctype>

#include "simulator/fixture.h"

namespace {

constexpr aclError kDma = ACL_ERROR_RT_SYS_DMA;
constexpr aclError kOther = ACL_ERROR_RT_AICORE_EXCEPTION;

/// Something to copy, and copies of it that fail on the device.
struct Copier {
  PinnedMemory host{std::string("x")};
  DeviceMemory device{1};

  void copy(aclrtStream stream) { CHECK_OK(h2d(device, host, 1, stream)); }
  void fail(aclrtStream stream, aclError code = kDma) {
    npu_sim_fail_copy(1, code);
    copy(stream);
    // Until it has run: the next copy would be the one that fails otherwise.
    aclrtStreamStatus status = ACL_STREAM_STATUS_NOT_READY;
    wait_until([&] {
      return aclrtStreamQuery(stream, &status) != ACL_SUCCESS ||
             status == ACL_STREAM_STATUS_COMPLETE;
    });
  }
};

bool has_code(const std::string& message) {
  return message.size() > 6 && message[0] == 'E' && std::isupper(message[1]) != 0 &&
         std::all_of(message.begin() + 2, message.begin() + 6,
                     [](char c) { return std::isdigit(c) != 0; });
}

}  // namespace

TEST(in_mode_continue_a_failure_is_reported_once) {
  Session session;
  Stream stream;
  Stream healthy;
  Copier copier;
  copier.device.write(".");
  copier.fail(stream);
  copier.copy(stream);  // later tasks run
  CHECK_OK(aclrtSynchronizeStream(healthy));
  CHECK_EQUAL(aclrtSynchronizeStream(stream), kDma);
  const std::string message = last_message();
  CHECK(has_code(message));
  CHECK(contains(message, "aclrtSynchronizeStream"));
  CHECK_EQUAL(copier.device.read(1), "x");
  CHECK_OK(aclrtSynchronizeStream(stream));
}

TEST(in_mode_continue_a_later_failure_replaces_an_earlier_one) {
  Session session;
  Stream stream;
  Copier copier;
  copier.fail(stream, kDma);
  copier.fail(stream, kOther);
  CHECK_EQUAL(aclrtSynchronizeStream(stream), kOther);
  CHECK_OK(aclrtSynchronizeStream(stream));
}

TEST(in_mode_continue_events_and_the_device_report_too) {
  Session session;
  Stream first;
  Stream second;
  Copier copier;
  Event event;
  copier.fail(first);
  CHECK_OK(aclrtRecordEvent(event, first));
  CHECK_EQUAL(aclrtSynchronizeEvent(event), kDma);
  CHECK_OK(aclrtSynchronizeStream(first));
  copier.fail(first, kDma);
  copier.fail(second, kOther);
  CHECK_EQUAL(aclrtSynchronizeDevice(), kDma);
  CHECK_EQUAL(aclrtSynchronizeDevice(), kOther);
  CHECK_OK(aclrtSynchronizeDevice());
}

TEST(device_synchronise_waits_for_healthy_streams_before_it_reports) {
  Session session;
  Stream broken;
  StalledStream healthy;
  Copier copier;
  copier.fail(broken);
  copier.copy(healthy);
  CHECK_EQUAL(aclrtSynchronizeDeviceWithTimeout(kWhileMs), ACL_ERROR_RT_STREAM_SYNC_TIMEOUT);
  healthy.go();
  CHECK_EQUAL(aclrtSynchronizeDevice(), kDma);
  CHECK(query(healthy));
}

TEST(in_mode_stop_the_first_failure_stays_for_the_whole_context) {
  Session session;
  Stream first;
  Stream second;
  Copier copier;
  Event event;
  FlagEvent flag(ACL_EVENT_SYNC);
  aclmdlRI graph = capture(first, [] {});
  CHECK_OK(aclrtRecordEvent(event, second));
  CHECK_OK(aclrtSetStreamFailureMode(first, ACL_STOP_ON_FAILURE));
  copier.fail(second, kDma);  // set on one stream, it holds for all
  wait_until([&] { return aclrtMemsetAsync(copier.device, 1, '.', 1, first) != ACL_SUCCESS; });
  for (int i = 0; i < 2; ++i) {
    CHECK_EQUAL(aclrtSynchronizeStream(first), kDma);
    CHECK_EQUAL(aclrtSynchronizeStream(second), kDma);
    CHECK_EQUAL(aclrtSynchronizeStream(nullptr), kDma);
    CHECK_EQUAL(aclrtSynchronizeDevice(), kDma);
    CHECK_EQUAL(aclrtSynchronizeEvent(event), kDma);
    CHECK_EQUAL(h2d(copier.device, copier.host, 1, first), kDma);
    CHECK_EQUAL(aclrtRecordEvent(event, first), kDma);
    CHECK_EQUAL(aclrtRecordEvent(flag, first), kDma);
    CHECK_EQUAL(aclrtLaunchHostFunc(first, [](void*) {}, nullptr), kDma);
    CHECK_EQUAL(aclmdlRIExecuteAsync(graph, first), kDma);
  }
  CHECK_OK(aclrtSynchronizeEvent(flag));  // whose only record was refused
  aclrtContext other = nullptr;
  CHECK_OK(aclrtCreateContext(&other, 0));
  copier.copy(nullptr);
  CHECK_OK(aclrtSynchronizeStream(nullptr));
  CHECK_OK(aclrtSetCurrentContext(session.context));
  npu_sim_clear_faults();
  copier.copy(second);
  CHECK_OK(aclrtSynchronizeStream(second));
  CHECK_OK(aclmdlRIDestroy(graph));
}

TEST(in_mode_stop_queued_work_is_dropped_and_blocked_work_given_up) {
  Session session;
  Copier copier;
  copier.device.write(".");
  DeviceMemory word(8);
  word.write(std::string(8, '\0'));
  Event event;
  npu_sim_reset_stats();
  {
    StalledStream broken;
    StalledStream behind;
    Stream waits;
    CHECK_OK(aclrtSetStreamFailureMode(broken, ACL_STOP_ON_FAILURE));
    CHECK_OK(aclrtValueWait(word, 1, 1, waits));
    CHECK_OK(aclrtRecordEvent(event, waits));
    copier.copy(behind);
    npu_sim_fail_copy(1, kDma);
    copier.copy(broken);
    copier.copy(broken);
    broken.go();
    CHECK_EQUAL(aclrtSynchronizeStream(waits), kDma);
    CHECK_EQUAL(aclrtSynchronizeStream(behind), kDma);
    CHECK_EQUAL(aclrtSynchronizeEvent(event), kDma);
  }
  CHECK_EQUAL(stat("copies.h2d"), 0);
}

TEST(a_reset_device_is_healthy) {
  Session session(0, 2);
  CHECK_OK(aclrtSetDevice(1));
  Copier copier;
  {
    Stream stream;
    CHECK_OK(aclrtSetStreamFailureMode(stream, ACL_STOP_ON_FAILURE));
    copier.fail(stream);
    CHECK_EQUAL(aclrtSynchronizeStream(stream), kDma);
    CHECK_OK(aclrtResetDevice(1));
    copier.copy(stream);
    CHECK_OK(aclrtSynchronizeStream(stream));
  }
  CHECK_OK(aclrtSetCurrentContext(session.context));
}

TEST(changing_the_failure_mode) {
  Session session;
  Stream stream;
  Stream other;
  const uint64_t stop = ACL_STOP_ON_FAILURE;
  const uint64_t proceed = ACL_CONTINUE_ON_FAILURE;
  CHECK_EQUAL(aclrtSetStreamFailureMode(nullptr, stop), ACL_ERROR_INVALID_PARAM);
  CHECK(aclrtSetStreamFailureMode(stream, 2) != ACL_SUCCESS);
  CHECK_OK(aclrtSetStreamFailureMode(stream, proceed));
  CHECK_OK(aclrtSetStreamAttribute(stream, 1, &stop));
  CHECK_OK(aclrtSetStreamFailureMode(stream, stop));
  CHECK_EQUAL(aclrtSetStreamFailureMode(stream, proceed), ACL_ERROR_RT_FEATURE_NOT_SUPPORT);
  CHECK_EQUAL(aclrtSetStreamAttribute(other, 1, &proceed), ACL_ERROR_RT_FEATURE_NOT_SUPPORT);
}

TEST(the_last_error_is_that_of_the_last_failing_runtime_call) {
  Session session;
  Stream stream;
  DeviceMemory device(1);
  CHECK_OK(aclrtMemset(device, 1, 0, 1));
  CHECK_OK(aclrtPeekAtLastError(0));  // successes leave nothing behind
  CHECK_EQUAL(aclrtMemset(device, 1, 0, 2), ACL_ERROR_RT_PARAM_INVALID);
  CHECK_EQUAL(aclrtMalloc(nullptr, 1, 0), ACL_ERROR_INVALID_PARAM);  // the acl layer's own
  CHECK_OK(aclrtSynchronizeStream(stream));
  CHECK_EQUAL(aclrtPeekAtLastError(0), ACL_ERROR_RT_PARAM_INVALID);
  aclError elsewhere = -1;
  aclError without_device = -1;
  std::thread([&] {
    int32_t device_id = 0;
    without_device = aclrtGetDevice(&device_id);
    elsewhere = aclrtPeekAtLastError(0);
  }).join();
  CHECK_EQUAL(without_device, ACL_ERROR_RT_CONTEXT_NULL);
  CHECK_OK(elsewhere);
  CHECK_EQUAL(aclrtPeekAtLastError(1), ACL_ERROR_INVALID_PARAM);
  CHECK_EQUAL(aclrtGetLastError(1), ACL_ERROR_INVALID_PARAM);
  CHECK_EQUAL(aclrtGetLastError(0), ACL_ERROR_RT_PARAM_INVALID);
  CHECK_OK(aclrtPeekAtLastError(0));
}

TEST(messages_are_read_once_and_per_thread) {
  Session session;
  DeviceMemory device(1);
  CHECK(aclGetRecentErrMsg() == nullptr);
  CHECK_EQUAL(aclrtMemset(device, 1, 0, 2), ACL_ERROR_RT_PARAM_INVALID);
  std::string elsewhere = "not read";
  std::thread([&] { elsewhere = last_message(); }).join();
  CHECK_EQUAL(elsewhere, "");
  const char* message = aclGetRecentErrMsg();
  CHECK(message != nullptr && contains(message, "aclrtMemset"));
  CHECK(aclGetRecentErrMsg() == nullptr);
  CHECK(contains(message, "aclrtMemset"));  // valid until the next failure
}

TEST(every_message_starts_with_a_code) {
  Session session;
  Stream stream;
  DeviceMemory device(8);
  aclrtEvent event = nullptr;
  aclmdlRI graph = nullptr;
  void* pointer = nullptr;
  const std::vector<std::function<aclError()>> calls = {
      [&] { return aclrtSetDevice(99); },
      [&] { return aclrtMalloc(nullptr, 1, 0); },
      [&] { return aclrtMalloc(&pointer, SIZE_MAX, 0); },
      [&] { return aclrtFree(device.data() + 1); },
      [&] { return aclrtMemset(device, 8, 0, 9); },
      [&] { return aclrtSynchronizeStream(device); },
      [&] { return aclrtSynchronizeStreamWithTimeout(stream, 0); },
      [&] { return aclrtCreateEventWithFlag(&event, 0); },
      [&] { return aclrtDestroyEvent(device); },
      [&] { return aclrtValueWait(device, 0, 9, stream); },
      [&] { return aclrtProcessReport(0); },
      [&] { return aclmdlRICaptureEnd(stream, &graph); },
      [&] { return aclmdlRIDestroy(device); },
  };
  for (size_t i = 0; i < calls.size(); ++i) {
    CHECK(calls[i]() != ACL_SUCCESS);
    const std::string message = last_message();
    if (!has_code(message)) std::fprintf(stderr, "call %zu: %s\n", i, message.c_str());
    CHECK(has_code(message));
  }
}

SIMULATOR_TEST_MAIN
