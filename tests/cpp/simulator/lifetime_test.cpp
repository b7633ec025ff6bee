// Threads, the end of the process, and forked children.
#include <pthread.h>
#include <sys/resource.h>

#include <fstream>

#include "simulator/fixture.h"

namespace {

int process_threads() {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.rfind("Threads:", 0) == 0) return std::atoi(line.c_str() + 8);
  }
  return -1;
}

double cpu_seconds() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  const auto seconds = [](const timeval& t) {
    return static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_usec) / 1e6;
  };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

/// A word that nobody ever sets.
void* zero_word() {
  void* word = nullptr;
  CHECK_OK(aclrtMalloc(&word, 8, 0));
  CHECK_OK(aclrtMemset(word, 8, 0, 8));
  return word;
}

}  // namespace

TEST(a_stream_has_a_thread_from_its_first_task_to_its_end) {
  Session session;
  DeviceMemory device(8);
  std::thread([] {}).join();  // a sanitizer's own thread starts with the first one
  const int before = process_threads();
  const int64_t live = stat("live.threads");
  {
    std::vector<Stream> idle(10);
    CHECK_EQUAL(process_threads(), before);
    Stream used;
    CHECK_OK(aclrtMemsetAsync(device, 8, 0, 8, used));
    CHECK_OK(aclrtSynchronizeStream(used));
    CHECK_EQUAL(process_threads(), before + 1);
    CHECK_EQUAL(stat("live.threads"), live + 1);
  }
  CHECK_EQUAL(process_threads(), before);
  CHECK_EQUAL(stat("live.threads"), live);
}

TEST(replays_leave_no_threads) {
  Session session;
  Stream a;
  Stream b;
  Event forked;
  Event back;
  Graph graph(capture(a, [&] {
    CHECK_OK(aclrtRecordEvent(forked, a));
    CHECK_OK(aclrtStreamWaitEvent(b, forked));
    CHECK_OK(aclrtRecordEvent(back, b));
    CHECK_OK(aclrtStreamWaitEvent(a, back));
  }));
  const int before = process_threads();
  for (int i = 0; i < 20; ++i) CHECK_OK(aclmdlRIExecuteAsync(graph, a));
  CHECK_OK(aclrtSynchronizeStream(a));
  CHECK_EQUAL(process_threads(), before + 1);  // the stream's own
}

TEST(waiting_costs_no_processor_time) {
  Session session;
  std::vector<Stream> streams(4);
  FlagEvent flag(ACL_EVENT_SYNC);
  void* word = zero_word();
  CHECK_OK(aclrtValueWait(word, 1, 1, streams[0]));
  CHECK_OK(aclrtStreamWaitEvent(streams[1], flag));
  CHECK_OK(npu_sim_stall(streams[2]));
  CHECK_OK(aclrtMemsetAsync(word, 8, 0, 8, streams[2]));
  std::thread synchronises([&] {
    aclrtSetCurrentContext(session.context);
    CHECK_OK(aclrtSynchronizeStream(streams[1]));
  });
  std::thread reports([&] { aclrtProcessReport(400); });
  wait_a_while();
  const double before = cpu_seconds();
  std::this_thread::sleep_for(std::chrono::milliseconds(300));
  CHECK(cpu_seconds() - before < 0.1);  // any thread that spins uses three times that
  CHECK_OK(aclrtValueWrite(word, 1, 0, streams[3]));
  CHECK_OK(aclrtRecordEvent(flag, streams[3]));
  synchronises.join();
  reports.join();
  CHECK_OK(npu_sim_release(streams[2]));
  CHECK_OK(aclrtSynchronizeDevice());
  CHECK_OK(aclrtFree(word));
}

// --- the end of a process
// -------------------------------------------------------------------------

CHILD(exits_with_copies_in_flight) {
  CHECK_OK(aclrtSetDevice(0));
  void* device = nullptr;
  void* host = nullptr;
  CHECK_OK(aclrtMalloc(&device, 64 << 20, 0));
  CHECK_OK(aclrtMallocHost(&host, 64 << 20));
  aclrtStream stream = nullptr;
  CHECK_OK(aclrtCreateStream(&stream));
  for (int i = 0; i < 1000; ++i) CHECK_OK(h2d(device, host, 64 << 20, stream));
  return 0;
}

CHILD(exits_with_blocked_work) {
  CHECK_OK(aclrtSetDevice(0));
  void* word = zero_word();
  std::vector<aclrtStream> streams(5);
  for (auto& stream : streams) CHECK_OK(aclrtCreateStream(&stream));
  CHECK_OK(aclrtValueWait(word, 1, 1, streams[0]));
  CHECK_OK(npu_sim_stall(streams[1]));
  CHECK_OK(aclrtMemsetAsync(word, 8, 0, 8, streams[1]));
  aclrtEvent event = nullptr;
  CHECK_OK(aclrtCreateEventExWithFlag(&event, ACL_EVENT_SYNC));
  CHECK_OK(aclrtRecordEvent(event, streams[1]));
  CHECK_OK(aclrtStreamWaitEvent(streams[2], event));
  aclmdlRI graph = capture(streams[4], [&] { CHECK_OK(aclrtValueWait(word, 1, 1, streams[4])); });
  CHECK_OK(aclmdlRIExecuteAsync(graph, streams[3]));
  return 0;
}

CHILD(exits_while_threads_wait) {
  CHECK_OK(aclrtSetDevice(0));
  aclrtContext context = nullptr;
  CHECK_OK(aclrtGetCurrentContext(&context));
  void* word = zero_word();
  aclrtStream stream = nullptr;
  CHECK_OK(aclrtCreateStream(&stream));
  CHECK_OK(aclrtValueWait(word, 1, 1, stream));
  static std::atomic<int> started{0};
  std::thread([=] {
    aclrtSetCurrentContext(context);
    ++started;
    aclrtSynchronizeStream(stream);
  }).detach();
  std::thread([=] {
    aclrtSubscribeReport(static_cast<uint64_t>(pthread_self()), nullptr);
    ++started;
    for (;;) aclrtProcessReport(100);
  }).detach();
  wait_until([] { return started == 2; });
  wait_a_while();
  return 0;
}

CHILD(exits_inside_a_host_function) {
  CHECK_OK(aclrtSetDevice(0));
  static std::atomic<bool> inside{false};
  CHECK_OK(aclrtLaunchHostFunc(
      nullptr,
      [](void*) {
        inside = true;
        for (;;) wait_a_while();
      },
      nullptr));
  wait_until([] { return inside.load(); });
  return 0;
}

CHILD(calls_in_after_the_end_has_begun) {
  static void* word = nullptr;
  static aclrtStream stream = nullptr;
  // Older than the runtime's own exit handler, so it is destroyed after that has run.
  struct Late {
    ~Late() {
      aclrtMemsetAsync(word, 8, 0, 8, stream);
      aclrtSynchronizeStream(stream);
      aclrtSynchronizeDevice();
      aclrtProcessReport(10);
      aclrtDestroyStream(stream);
      aclrtFree(word);
    }
  };
  static Late late;
  CHECK_OK(aclrtSetDevice(0));
  word = zero_word();
  CHECK_OK(aclrtCreateStream(&stream));
  CHECK_OK(aclrtValueWait(word, 1, 1, stream));
  return 0;
}

TEST(a_process_ends_with_work_in_flight) {
  for (const char* name :
       {"exits_with_copies_in_flight", "exits_with_blocked_work", "exits_while_threads_wait",
        "exits_inside_a_host_function", "calls_in_after_the_end_has_begun"}) {
    const ChildEnd end = run_child(name);
    if (end.exit_code != 0) std::fprintf(stderr, "%s:\n", name);
    CHECK_EQUAL(end.exit_code, 0);
  }
}

// --- fork
// -----------------------------------------------------------------------------------------

CHILD(forks_while_streams_are_busy) {
  CHECK_OK(aclrtSetDevice(0));
  DeviceMemory device(64);
  aclrtStream stream = nullptr;
  CHECK_OK(aclrtCreateStream(&stream));
  for (int round = 0; round < 20; ++round) {
    for (int i = 0; i < 200; ++i) CHECK_OK(aclrtMemsetAsync(device, 64, 0, 64, stream));
    const pid_t child = fork();
    if (child == 0) {
      alarm(30);
      void* pointer = nullptr;
      const bool refused = aclrtMalloc(&pointer, 64, 0) == ACL_ERROR_RT_INTERNAL_ERROR &&
                           contains(last_message(), "forked") &&
                           aclrtSynchronizeStream(stream) == ACL_ERROR_RT_INTERNAL_ERROR &&
                           npu_sim_set("shuffle", 1) == ACL_ERROR_RT_INTERNAL_ERROR;
      std::exit(refused ? 0 : 1);  // also has to get through the runtime's exit handler
    }
    int status = 0;
    waitpid(child, &status, 0);
    if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) return 1;
  }
  CHECK_OK(aclrtSynchronizeStream(stream));
  return check::failures() == 0 ? 0 : 1;
}

TEST(a_forked_child_gets_an_error_and_the_parent_goes_on) {
  CHECK_EQUAL(run_child("forks_while_streams_are_busy").exit_code, 0);
}

// --- many threads at once, for the sanitizers
// -----------------------------------------------------

TEST(many_threads_use_everything_at_once) {
  Session session;
  std::atomic<int> failures{0};
  std::atomic<int> callbacks{0};
  const auto work = [&](int seed) {
    const auto ok = [&](aclError code) {
      if (code != ACL_SUCCESS) ++failures;
    };
    ok(aclrtSetCurrentContext(session.context));
    for (int round = 0; round < 10; ++round) {
      aclrtStream streams[2] = {};
      aclrtEvent events[3] = {};
      void* device = nullptr;
      void* host = nullptr;
      aclmdlRI graph = nullptr;
      for (auto& stream : streams) ok(aclrtCreateStream(&stream));
      for (auto& event : events) ok(aclrtCreateEventExWithFlag(&event, ACL_EVENT_SYNC));
      ok(aclrtMalloc(&device, 4096, 0));
      ok(aclrtMallocHost(&host, 4096));
      ok(aclmdlRICaptureBegin(streams[0], ACL_MODEL_RI_CAPTURE_MODE_RELAXED));
      ok(h2d(device, host, 4096, streams[0]));
      ok(aclrtRecordEvent(events[0], streams[0]));
      ok(aclrtStreamWaitEvent(streams[1], events[0]));
      ok(d2h(host, device, 16, streams[1]));
      ok(aclrtLaunchHostFunc(
          streams[1], [](void* count) { ++*static_cast<std::atomic<int>*>(count); }, &callbacks));
      ok(aclrtRecordEvent(events[1], streams[1]));
      ok(aclrtStreamWaitEvent(streams[0], events[1]));
      ok(aclmdlRICaptureEnd(streams[0], &graph));
      ok(aclmdlRIExecuteAsync(graph, streams[0]));
      ok(aclrtRecordEvent(events[2], streams[0]));
      ok(aclrtStreamWaitEvent(streams[1], events[2]));
      ok(aclmdlRIExecuteAsync(graph, streams[1]));
      ok(round % 2 == 0 ? aclrtSynchronizeStream(streams[1]) : aclrtDestroyStream(streams[1]));
      ok(aclmdlRIDestroy(graph));
      ok(aclrtDestroyStream(streams[0]));
      if (round % 2 == 0) ok(aclrtDestroyStreamForce(streams[1]));
      for (auto& event : events) ok(aclrtDestroyEvent(event));
      ok(aclrtFree(device));
      ok(aclrtFreeHost(host));
      npu_sim_free(npu_sim_stats());
      if (seed == 0) npu_sim_set("seed", round);
    }
  };
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) threads.emplace_back(work, i);
  for (auto& thread : threads) thread.join();
  CHECK_EQUAL(failures.load(), 0);
  CHECK_EQUAL(callbacks.load(), 4 * 10 * 2);
}

SIMULATOR_TEST_MAIN
