// A stream: a queue of tasks and the thread that runs them one after the other.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "engine/engine.h"
#include "engine/error.h"
#include "engine/submit.h"
#include "engine/task.h"

namespace npu_kv::sim {

enum class CallbackKind { kNone, kHostFunction, kSubscribed };

/// Every member is guarded by the engine's mutex. The worker thread starts with the first task.
class Stream : public std::enable_shared_from_this<Stream> {
 public:
  Stream(Context& context, int id, uint32_t flags) : context(context), id(id), flags(flags) {}

  Context& context;
  const int id;
  const uint32_t flags;

  std::condition_variable work;  // only the worker waits on it
  std::deque<Task> queue;
  uint64_t submitted = 0;  // tasks that were ever queued
  uint64_t finished = 0;   // those of them that have run or were dropped
  int stalls = 0;
  bool retired = false;     // destroyed: takes no more tasks, the worker ends after the last one
  bool discarding = false;  // destroyed by force: drop queued tasks, leave blocking ones
  Failure failure;          // failure mode CONTINUE: reported once, by the next synchronise
  int64_t now_ns = 0;       // virtual time at which the last task ended
  ClockRef clock;           // for the race checker: what has happened by then
  uint32_t component = 0;   // in its clocks; further ones for the streams inside a graph
  std::vector<uint32_t> lane_components;

  Graph* capture = nullptr;  // the graph this stream records into
  int lane = -1;

  CallbackKind callback_kind = CallbackKind::kNone;
  std::shared_ptr<CallbackThread> subscriber;

  bool idle() const { return finished == submitted; }
  void enqueue(Task task);
  /// Waits for the worker of a retired stream to end. Called without the lock.
  void join();
  /// Lets the worker end by itself, as the process does. With the lock.
  void leave_worker();

 private:
  void run_worker();
  void run_task(Engine::Lock& lock, Task task);

  std::thread worker_;
};

/// Makes a stream of `context` and registers its handle. With mutex held; 207008 at the limit.
std::shared_ptr<Stream> create_stream(Engine& engine, Context& context, uint32_t flags);

/// As resolve_stream, with the mutex held.
std::shared_ptr<Stream> resolve_stream_locked(Engine& engine, aclrtStream handle);
/// As submit, with the mutex held.
void submit_locked(Engine& engine, Stream& stream, Task task);

/// Waits for every task that these streams hold at the call, not for later ones, then throws the
/// first failure that waits to be reported. timeout_ms -1: for ever; expiry throws 507046. Throws
/// 107027 when one of them captures.
void synchronize_streams(Engine::Lock& lock, Engine& engine,
                         const std::vector<std::shared_ptr<Stream>>& streams, int timeout_ms);

/// Throws what a synchronise of this stream has to report: the context's failure for good, the
/// stream's own once.
void report_failure(Stream& stream);

/// Thrown out of a task that was given up, not failed: nobody is to blame and nothing is reported.
struct Abandoned {};

/// Blocks a task until `ready()`, which is evaluated with the mutex held. Throws Abandoned when the
/// task has to be given up: the process ends, the stream is destroyed by force, its context has
/// failed, or another lane of the same replay has.
void wait_in_task(Engine::Lock& lock, Engine& engine, TaskRun& run,
                  const std::function<bool()>& ready);

}  // namespace npu_kv::sim
