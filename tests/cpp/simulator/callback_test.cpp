// Host callbacks of both kinds.
#include <pthread.h>

#include <mutex>

#include "simulator/fixture.h"

namespace {

/// What callbacks leave behind, and a gate at which they can be held.
struct Trace {
  std::atomic<int> runs{0};
  std::atomic<bool> open{true};
  std::atomic<bool> returned{false};
  std::thread::id thread;

  static void run(void* argument) {
    auto& trace = *static_cast<Trace*>(argument);
    trace.thread = std::this_thread::get_id();
    ++trace.runs;
    wait_until([&] { return trace.open.load(); });
    trace.returned = true;
  }
};

/// A thread that serves callbacks until it is stopped.
class Server {
 public:
  explicit Server(aclrtContext context)
      : thread_([this, context] {
          aclrtSetCurrentContext(context);
          while (!stop_) last_result_ = aclrtProcessReport(5);
        }) {}
  ~Server() { join(); }
  void join() {
    stop_ = true;
    if (thread_.joinable()) thread_.join();
  }
  uint64_t id() { return static_cast<uint64_t>(thread_.native_handle()); }
  std::thread::id thread_id() const { return thread_.get_id(); }
  aclError last_result() const { return last_result_; }

 private:
  std::atomic<bool> stop_{false};
  std::atomic<aclError> last_result_{ACL_SUCCESS};
  std::thread thread_;
};

uint64_t this_thread() { return static_cast<uint64_t>(pthread_self()); }

}  // namespace

TEST(host_functions_of_a_context_share_one_thread_that_is_not_the_callers) {
  Session session;
  Stream first;
  Stream second;
  Trace a;
  Trace b;
  Trace c;
  CHECK_OK(aclrtLaunchHostFunc(first, Trace::run, &a));
  CHECK_OK(aclrtLaunchHostFunc(second, Trace::run, &b));
  CHECK_OK(aclrtSynchronizeDevice());
  aclrtContext other = nullptr;
  CHECK_OK(aclrtCreateContext(&other, 0));
  CHECK_OK(aclrtLaunchHostFunc(nullptr, Trace::run, &c));
  CHECK_OK(aclrtSynchronizeDevice());
  CHECK_EQUAL(a.runs + b.runs + c.runs, 3);
  CHECK(a.thread != std::this_thread::get_id());
  CHECK(a.thread == b.thread);
  CHECK(a.thread != c.thread);
  CHECK_OK(aclrtSetCurrentContext(session.context));
}

TEST(a_stream_waits_for_its_host_function) {
  Session session;
  Stream stream;
  DeviceMemory device(1);
  device.write(".");
  Trace trace;
  trace.open = false;
  CHECK_OK(aclrtMemsetAsync(device, 1, 'a', 1, stream));
  CHECK_OK(aclrtLaunchHostFunc(stream, Trace::run, &trace));
  CHECK_OK(aclrtMemsetAsync(device, 1, 'b', 1, stream));
  wait_until([&] { return trace.runs == 1; });
  wait_a_while();
  CHECK_EQUAL(device.read(1), "a");
  trace.open = true;
  CHECK_OK(aclrtSynchronizeStream(stream));
  CHECK(trace.returned);
  CHECK_EQUAL(device.read(1), "b");
}

TEST(a_slow_host_function_delays_those_of_other_streams) {
  Session session;
  Stream first;
  Stream second;
  Trace slow;
  Trace fast;
  slow.open = false;
  CHECK_OK(aclrtLaunchHostFunc(first, Trace::run, &slow));
  wait_until([&] { return slow.runs == 1; });
  CHECK_OK(aclrtLaunchHostFunc(second, Trace::run, &fast));
  CHECK(blocked(second));
  CHECK_EQUAL(fast.runs.load(), 0);
  slow.open = true;
  CHECK_OK(aclrtSynchronizeStream(second));
  CHECK_EQUAL(fast.runs.load(), 1);
  CHECK_OK(aclrtSynchronizeStream(first));
}

TEST(callbacks_run_on_the_subscribed_thread) {
  Session session;
  Stream stream;
  Trace trace;
  trace.open = false;
  Server server(session.context);
  CHECK_OK(aclrtSubscribeReport(server.id(), stream));
  CHECK_OK(aclrtLaunchCallback(Trace::run, &trace, 1, stream));
  wait_until([&] { return trace.runs == 1; });
  CHECK(blocked(stream));
  trace.open = true;
  CHECK_OK(aclrtSynchronizeStream(stream));
  CHECK(trace.returned);
  CHECK(trace.thread == server.thread_id());
  CHECK_OK(aclrtUnSubscribeReport(server.id(), stream));
}

TEST(a_callback_that_does_not_block_lets_the_stream_go_on) {
  Session session;
  Stream stream;
  DeviceMemory device(1);
  Trace trace;
  CHECK_OK(aclrtSubscribeReport(this_thread(), stream));
  CHECK_OK(aclrtLaunchCallback(Trace::run, &trace, 0, stream));
  CHECK_OK(aclrtMemsetAsync(device, 1, 'a', 1, stream));
  CHECK_OK(aclrtSynchronizeStream(stream));
  CHECK_EQUAL(trace.runs.load(), 0);
  CHECK_OK(aclrtProcessReport(60000));
  CHECK_EQUAL(trace.runs.load(), 1);
  CHECK_OK(aclrtUnSubscribeReport(this_thread(), stream));
}

TEST(process_report_really_waits) {
  Session session;
  Stream stream;
  const auto waited_ms = [](aclError expected) {
    const auto start = std::chrono::steady_clock::now();
    CHECK_EQUAL(aclrtProcessReport(kWhileMs), expected);
    return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start)
        .count();
  };
  CHECK(waited_ms(ACL_ERROR_RT_THREAD_SUBSCRIBE) >= kWhileMs);
  CHECK_OK(aclrtSubscribeReport(this_thread(), stream));
  CHECK(waited_ms(ACL_ERROR_RT_REPORT_TIMEOUT) >= kWhileMs);
  CHECK_OK(aclrtUnSubscribeReport(this_thread(), stream));
  CHECK(waited_ms(ACL_ERROR_RT_THREAD_SUBSCRIBE) >= kWhileMs);
  {
    Stream destroyed;
    CHECK_OK(aclrtSubscribeReport(this_thread(), destroyed));
  }
  CHECK(waited_ms(ACL_ERROR_RT_THREAD_SUBSCRIBE) >= kWhileMs);
  CHECK_EQUAL(aclrtProcessReport(0), ACL_ERROR_INVALID_PARAM);
  CHECK_EQUAL(aclrtProcessReport(-2), ACL_ERROR_INVALID_PARAM);
}

TEST(unsubscribing_wakes_a_thread_that_waits_for_ever) {
  Session session;
  Stream stream;
  std::atomic<aclError> result{-1};
  std::thread waiter([&] { result = aclrtProcessReport(-1); });
  const auto id = static_cast<uint64_t>(waiter.native_handle());
  // Before the first subscription it pauses and answers; then it waits.
  CHECK_OK(aclrtSubscribeReport(id, stream));
  wait_a_while();
  CHECK_OK(aclrtUnSubscribeReport(id, stream));
  waiter.join();
  CHECK_EQUAL(result.load(), ACL_ERROR_RT_THREAD_SUBSCRIBE);
}

TEST(subscription_rules) {
  Session session(0, 2);
  Stream stream;
  Stream second;
  Trace trace;
  CHECK_EQUAL(aclrtLaunchCallback(Trace::run, &trace, 1, stream), ACL_ERROR_RT_STREAM_NO_CB_REG);
  CHECK_EQUAL(aclrtUnSubscribeReport(this_thread(), stream), ACL_ERROR_RT_THREAD_SUBSCRIBE);
  CHECK_OK(aclrtSubscribeReport(this_thread(), stream));
  CHECK_EQUAL(aclrtSubscribeReport(this_thread(), stream), ACL_ERROR_RT_STREAM_SUBSCRIBE);
  CHECK_EQUAL(aclrtSubscribeReport(this_thread() + 1, stream), ACL_ERROR_RT_STREAM_SUBSCRIBE);
  CHECK_OK(aclrtSubscribeReport(this_thread(), second));
  CHECK_EQUAL(aclrtLaunchCallback(nullptr, &trace, 1, stream), ACL_ERROR_INVALID_PARAM);
  CHECK_EQUAL(aclrtLaunchCallback(Trace::run, &trace, 2, stream), ACL_ERROR_INVALID_PARAM);
  CHECK_OK(aclrtSetDevice(1));
  Stream other_device;
  CHECK_EQUAL(aclrtSubscribeReport(this_thread(), other_device), ACL_ERROR_RT_THREAD_SUBSCRIBE);
  CHECK_OK(aclrtDestroyStream(other_device.release()));
  CHECK_OK(aclrtSetCurrentContext(session.context));
  CHECK_OK(aclrtUnSubscribeReport(this_thread(), stream));
  CHECK_EQUAL(aclrtLaunchCallback(Trace::run, &trace, 1, stream), ACL_ERROR_RT_STREAM_NO_CB_REG);
  CHECK_OK(aclrtUnSubscribeReport(this_thread(), second));
  CHECK_EQUAL(trace.runs.load(), 0);
}

TEST(the_two_kinds_do_not_mix_on_one_stream) {
  Session session;
  Stream function_stream;
  Stream callback_stream;
  Trace trace;
  CHECK_EQUAL(aclrtLaunchHostFunc(function_stream, nullptr, &trace), ACL_ERROR_INVALID_PARAM);
  CHECK_OK(aclrtLaunchHostFunc(function_stream, Trace::run, &trace));
  CHECK_OK(aclrtSynchronizeStream(function_stream));
  const auto mixed = ACL_ERROR_RT_STREAM_SUBSCRIBE;
  CHECK_EQUAL(aclrtLaunchCallback(Trace::run, &trace, 1, function_stream), mixed);
  CHECK_EQUAL(aclrtSubscribeReport(this_thread(), function_stream), mixed);
  CHECK_EQUAL(aclrtUnSubscribeReport(this_thread(), function_stream), mixed);
  CHECK_OK(aclrtSubscribeReport(this_thread(), callback_stream));
  CHECK_EQUAL(aclrtLaunchHostFunc(callback_stream, Trace::run, &trace), mixed);
  CHECK_OK(aclrtUnSubscribeReport(this_thread(), callback_stream));
  CHECK_EQUAL(trace.runs.load(), 1);
}

TEST(captured_callbacks_run_at_every_replay_and_not_before) {
  Session session;
  Stream stream;
  Stream subscribed;
  Trace function;
  Trace callback;
  Server server(session.context);
  CHECK_OK(aclrtSubscribeReport(server.id(), subscribed));
  Graph first(
      capture(stream, [&] { CHECK_OK(aclrtLaunchHostFunc(stream, Trace::run, &function)); }));
  Graph second(capture(
      subscribed, [&] { CHECK_OK(aclrtLaunchCallback(Trace::run, &callback, 1, subscribed)); }));
  // The visible stream has not run a host function: it may still be subscribed.
  CHECK_OK(aclrtSubscribeReport(server.id(), stream));
  wait_a_while();
  CHECK_EQUAL(function.runs + callback.runs, 0);
  Stream other;
  for (int i = 1; i <= 3; ++i) {
    CHECK_OK(aclmdlRIExecuteAsync(first, other));
    CHECK_OK(aclmdlRIExecuteAsync(second, other));
    CHECK_OK(aclrtSynchronizeStream(other));
    CHECK_EQUAL(function.runs.load(), i);
    CHECK_EQUAL(callback.runs.load(), i);
  }
  CHECK(callback.thread == server.thread_id());
  CHECK(function.thread != server.thread_id());
}

TEST(runtime_calls_from_inside_a_callback_are_reported) {
  Session session;
  Stream stream;
  static std::atomic<aclError> inner;
  CHECK_OK(aclrtLaunchHostFunc(
      stream,
      [](void*) {
        uint32_t count = 0;
        inner = aclrtGetDeviceCount(&count);
        aclrtPeekAtLastError(0);  // reading the thread's own state is harmless
      },
      nullptr));
  CHECK_OK(aclrtSynchronizeStream(stream));
  CHECK_OK(inner.load());
  CHECK_EQUAL(stat("calls_in_callback"), 1);
}

TEST(destroying_by_force_withdraws_callbacks_that_have_not_begun) {
  Session session;
  Stream first;
  aclrtStream second = nullptr;
  CHECK_OK(aclrtCreateStream(&second));
  Trace running;
  Trace waiting;
  running.open = false;
  CHECK_OK(aclrtLaunchHostFunc(first, Trace::run, &running));
  wait_until([&] { return running.runs == 1; });
  CHECK_OK(aclrtLaunchHostFunc(second, Trace::run, &waiting));
  CHECK(!query(second));
  wait_a_while();
  CHECK_OK(aclrtDestroyStreamForce(second));
  running.open = true;
  CHECK_OK(aclrtSynchronizeStream(first));
  Trace last;
  CHECK_OK(aclrtLaunchHostFunc(first, Trace::run, &last));
  CHECK_OK(aclrtSynchronizeStream(first));
  CHECK_EQUAL(waiting.runs.load(), 0);
}

TEST(destroying_by_force_waits_for_a_callback_that_runs) {
  Session session;
  aclrtStream stream = nullptr;
  CHECK_OK(aclrtCreateStream(&stream));
  Trace trace;
  trace.open = false;
  CHECK_OK(aclrtLaunchHostFunc(stream, Trace::run, &trace));
  wait_until([&] { return trace.runs == 1; });
  std::thread opener([&] {
    wait_a_while();
    trace.open = true;
  });
  CHECK_OK(aclrtDestroyStreamForce(stream));
  CHECK(trace.returned);  // its argument may be freed now
  opener.join();
}

TEST(destroying_a_stream_lets_its_pending_callbacks_run) {
  Session session;
  Trace trace;
  Server server(session.context);
  {
    StalledStream stream;
    CHECK_OK(aclrtSubscribeReport(server.id(), stream));
    CHECK_OK(aclrtLaunchCallback(Trace::run, &trace, 1, stream));
  }
  CHECK_EQUAL(trace.runs.load(), 1);
  wait_until([&] { return server.last_result() == ACL_ERROR_RT_THREAD_SUBSCRIBE; });
}

SIMULATOR_TEST_MAIN
