// Serves deferred calls: a thread per device that reads the block ids when a stream has got to the
// call, checks them, issues the copies on a stream of its own, and lets the waiting stream go on
// behind them. It never needs the GIL.
//
//   the caller's stream   ids to host memory | callback ------------------- wait for signal | ...
//   the scheduler                                       check, merge, issue
//   a stream of its own                                       copies, set signal
//
// Between the callback and the wait the caller's stream may have other work. A call has a signal
// for each of its parts, which are copied in their order.
//
// What goes wrong ends with the signal set all the same, for as long as the runtime takes it at
// all: a graph goes on, and the error is told.
#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "runtime/export.h"
#include "runtime/signal_runtime.h"
#include "runtime/stream_runtime.h"
#include "transfer/deferred_call.h"
#include "transfer/event_pool.h"
#include "transfer/latency_histogram.h"

namespace npu_kv {

struct CallStats {
  uint64_t calls = 0;         // served; a replay serves every call of its graph
  uint64_t failures = 0;      // errors that were told
  LatencyHistogram start_ns;  // from the stream's callback to the first copy given to the runtime
};

class NPU_KV_API CallScheduler {
 public:
  // Is told what went wrong, on any thread.
  using Report = std::function<void(std::string message)>;

  // Starts the thread. The scheduler lives as long as the process, since graphs may call it.
  static Status start(StreamRuntime& runtime, SignalRuntime& signals, int device, Report report,
                      CallScheduler** scheduler);
  CallScheduler(const CallScheduler&) = delete;
  CallScheduler& operator=(const CallScheduler&) = delete;

  // All of these may be called from any thread.

  // Makes the stream for copies of a direction. To be called before a stream waits for such a call,
  // with the device as the calling thread's current one.
  Status open(Direction direction);

  // What a stream calls; the argument is a DeferredCall. Only hands it over: a callback may not
  // call the runtime.
  static void on_stream(void* call);

  // Returns when the call is not waiting to be served and not being served. No stream may get to it
  // any more.
  void let_go(const DeferredCall& call);

  // Reports copies that have failed since. The calling thread must have the device as its current
  // one.
  void check_copies();

  // Calls that streams get to from now on copy nothing, and are errors. Waits until the thread is
  // out of the runtime, at most so long.
  void stop(std::chrono::nanoseconds timeout);
  bool stopped() const;

  CallStats stats() const;
  int device() const { return device_; }

 private:
  using Lock = std::unique_lock<std::mutex>;
  static constexpr int kDirections = 4;

  // Copies that are on their way, on one stream.
  struct Issued {
    EventHandle done;
    std::string what;
  };
  struct Lane {
    StreamRef stream;
    std::atomic<bool> made{false};
    std::mutex issued_mutex;
    std::deque<Issued> issued;  // guarded by issued_mutex
  };

  CallScheduler(StreamRuntime& runtime, SignalRuntime& signals, int device, Report report);

  void run();
  void serve(DeferredCall& call, bool stopped);
  // Both count the parts whose signals are set.
  Status copy(DeferredCall& call, Lane& lane, size_t* released);
  void release(DeferredCall& call, Lane& lane, size_t released);
  Status issue_parts(DeferredCall& call, Lane& lane, size_t* released);
  EventHandle track(const DeferredCall& call, Lane& lane);
  void check_copies(Lane& lane);
  void fail(const DeferredCall& call, const std::string& reason);

  StreamRuntime& runtime_;
  SignalRuntime& signals_;
  const int device_;
  const Report report_;
  EventPool events_;
  std::array<Lane, kDirections> lanes_;  // by direction

  std::mutex open_mutex_;

  mutable std::mutex mutex_;
  std::condition_variable work_;
  std::condition_variable idle_;
  // Guarded by mutex_.
  std::deque<DeferredCall*> waiting_;  // in the order in which streams called
  DeferredCall* serving_ = nullptr;
  bool started_ = false;
  Status start_status_;
  bool stopped_ = false;
  CallStats stats_;
};

}  // namespace npu_kv
