// The copy backend's scheduler: a thread per device that launches stores (device to host) and loads
// (host to device) on a stream each, in order, and knows when they are done. It never needs the
// GIL.
//
// Order. Jobs of one lane run first in, first out. Jobs of different lanes that share a block run
// in the order in which they were submitted; all others overlap. Stores are issued in steps,
// between which a load gets its turn.
//
// Copies of others on the device (deferred calls of the operator) that share blocks with the pools
// are ordered too: they run behind the jobs that are launched and, if these wait for an event,
// whose event has happened; the other jobs run behind them. A job whose event has not happened is
// left out because the event may be behind those copies.
//
// A job may have a gate: it is then launched when the gate opens, behind the event that comes with
// the opening. The jobs behind it in its lane wait with it.
#pragma once

#include <array>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "runtime/export.h"
#include "runtime/stream_runtime.h"
#include "transfer/block_users.h"
#include "transfer/copy_job.h"
#include "transfer/event_pool.h"
#include "transfer/latency_histogram.h"

namespace npu_kv {

struct LaneStats {
  uint64_t jobs = 0;  // done
  uint64_t failures = 0;
  uint64_t bytes = 0;
  uint64_t copies_before = 0;
  uint64_t copies_after = 0;
  uint64_t hazards = 0;       // jobs that were held behind one of the other lane for a common block
  uint64_t queued = 0;        // not launched yet
  uint64_t in_flight = 0;     // launched, not done yet
  uint64_t peak_depth = 0;    // the most of both together
  LatencyHistogram start_ns;  // launch to the first copies given to the runtime
  LatencyHistogram completion_ns;  // from there to the time completion was seen
};

// A copy of somebody else on the blocks of a scheduler's pools. The blocks do not change; `done` is
// guarded by the scheduler's mutex and kept until the copy is over.
struct OutsideCopy {
  std::vector<BlockRange> device;
  std::vector<BlockRange> host;
  EventHandle done;  // null until the copies are issued
};

class NPU_KV_API CopyScheduler : public std::enable_shared_from_this<CopyScheduler> {
 public:
  struct Options {
    int device = -1;
    CopyPools pools;
    // A stream that is not given is made, and destroyed at the end.
    bool own_streams[kLanes] = {false, false};
    StreamRef streams[kLanes];
    size_t store_step_copies = 2048;        // a load waits for at most one such step
    size_t step_bytes = size_t{256} << 20;  // likewise; matters where copies are synchronous
  };

  // Starts the thread, which must be able to use the device and to make its streams.
  static Status start(StreamRuntime& runtime, Options options,
                      std::shared_ptr<CopyScheduler>* scheduler);
  ~CopyScheduler();
  CopyScheduler(const CopyScheduler&) = delete;
  CopyScheduler& operator=(const CopyScheduler&) = delete;

  // All of these may be called from any thread.

  // Null after shutdown has begun. `launched` is when the caller began, for the statistics.
  std::shared_ptr<CopyJob> submit(std::shared_ptr<const CopyPlan> plan, bool gated, int64_t label,
                                  Clock::time_point launched = Clock::now());
  // Opens the gate of a job: its copies run behind the latest record of `event` at this moment. The
  // calling thread must have the device as its current one. Called for the jobs of a lane in the
  // order of their submission.
  void open_gate(CopyJob& job, void* event);
  // Opens the gate of a job that shall fail.
  void refuse(CopyJob& job, const Status& status);

  // The schedulers that run on a device now.
  static std::vector<std::shared_ptr<CopyScheduler>> on_device(int device);
  // Announces copies that are about to be issued on `stream`, which is made to wait for the jobs
  // before them. Null when they share no block with the pools. Until `leave` no job is begun.
  std::shared_ptr<OutsideCopy> enter(const BlockTransfer& transfer, StreamRef stream,
                                     Status* status);
  // They are issued; `done` is recorded behind them (null: nothing was issued).
  void leave(const std::shared_ptr<OutsideCopy>& copy, EventHandle done);

  // Records the copies of a plan as a graph of the runtime, on a stream of the scheduler's own: the
  // lanes' streams may be others' too, whose work would be recorded with it. Leaves the plan as it
  // is where copies are between host pools, which have no graphs.
  Status capture(const CopyPlan& plan, std::shared_ptr<const CopyPlan>* captured);

  // Whether the job is finished. Asks the runtime.
  bool query(CopyJob& job);
  // Waits until the job is finished; false when the time is over. Negative: for ever.
  bool wait(CopyJob& job, std::chrono::nanoseconds timeout);
  // Waits until the job is launched or failed; false when the time is over.
  bool wait_launched(CopyJob& job, std::chrono::nanoseconds timeout);
  // Of a finished job: its error, if it failed.
  Status error(const CopyJob& job) const;
  // The event behind the job's copies; null unless it is launched and not finished.
  EventHandle done_event(const CopyJob& job) const;
  // False when the job is not done or the runtime has no such clock.
  bool timestamp(const CopyJob& job, uint64_t* microseconds) const;

  // Waits for all jobs submitted so far; false when the time is over.
  bool drain(std::chrono::nanoseconds timeout);
  // Refuses new jobs, waits for the others, then ends the thread and releases streams and events.
  // False when the time is over: jobs go on, and it may be called again. Idempotent.
  bool shutdown(std::chrono::nanoseconds timeout);
  // For the end of the process: gives up on everything without waiting for it. Jobs fail.
  void abandon();

  std::array<LaneStats, kLanes> stats() const;
  // Keeps the times of jobs that finish from now on, of the first `most` of them.
  void start_trace(size_t most);
  std::vector<JobTimes> stop_trace();

  const CopyPools& pools() const { return options_.pools; }
  const Options& options() const { return options_; }

 private:
  using Lock = std::unique_lock<std::mutex>;
  struct LaneQueue {
    std::deque<std::shared_ptr<CopyJob>> queued;     // in order; the first may be half issued
    std::deque<std::shared_ptr<CopyJob>> in_flight;  // launched, in order
    LaneStats stats;
  };
  struct CaptureRequest {
    const CopyPlan& plan;
    void* graph = nullptr;
    Status status;
    bool done = false;
  };

  CopyScheduler(StreamRuntime& runtime, Options options);

  void run();
  void run_jobs(Lock& lock);
  Status prepare_thread();
  void destroy_streams();
  CopyJob* next_job(Lane* lane);
  std::vector<EventHandle> outside_copies_before(const CopyJob& job) const;
  // One job as seen from the outside copies.
  struct Obstacle {
    std::shared_ptr<CopyJob> job;
    uint64_t behind = 0;  // the job of the other lane that it waits for
    std::vector<EventHandle> events;
    bool held_up = false;
  };
  using Obstacles = std::array<std::vector<Obstacle>, kLanes>;
  Obstacles obstacles() const;
  void find_held_up(Obstacles& lanes) const;
  std::array<std::shared_ptr<CopyJob>, kLanes> jobs_before(Lock& lock, const OutsideCopy& copy,
                                                           bool begun_only);
  void forget_outside_copies();
  static bool may_launch(const CopyJob& job);
  void step(Lock& lock, Lane lane, CopyJob& job);
  void mark(Lock& lock, Lane lane, CopyJob& job);
  Status begin(Lane lane, CopyJob& job, const std::vector<EventHandle>& behind);
  Status issue_step(Lane lane, CopyJob& job, bool* issued);
  Status copy_next(const CopyPlan& plan, DescriptorCursor& cursor, size_t most, StreamRef stream,
                   Clock::time_point* first_copy);
  void finish_launch(Lock& lock, Lane lane, CopyJob& job, Status outcome);
  void answer_captures(Lock& lock);
  Status record_graph(const CopyPlan& plan, void** graph);
  void open(CopyJob& job, EventHandle event, const Status& status);
  void reap();
  void settle(CopyJob& job, const Status& status);
  void fail_launched(Lane lane, const Status& status);
  void fail_everything(const Status& status);
  bool idle() const;
  std::string describe(const CopyJob& job) const;
  StreamRef stream(Lane lane) const { return options_.streams[static_cast<int>(lane)]; }
  LaneQueue& queue(Lane lane) { return lanes_[static_cast<int>(lane)]; }
  template <typename Ready>
  bool wait_until(Lock& lock, std::chrono::nanoseconds timeout, Ready ready);

  StreamRuntime& runtime_;
  Options options_;
  // One a lane, for the relays of gates: what a relay waits for, an earlier job of the lane waits
  // for as well, so queueing the relays of a lane behind one another orders nothing that was not
  // ordered.
  StreamRef gate_streams_[kLanes];
  StreamRef capture_stream_;
  bool has_capture_stream_ = false;
  std::vector<StreamRef> made_streams_;
  EventPool events_;
  DescriptorBuffer buffer_;  // only the scheduler's thread

  // Held by the one who asks the runtime what is done, who takes mutex_ after it: the runtime may
  // tell of a failure only once, and whoever hears of it has to act before another is told that all
  // is well.
  std::mutex reap_mutex_;
  mutable std::mutex mutex_;
  std::condition_variable work_;      // the scheduler waits for it
  std::condition_variable finished_;  // everybody else
  // Guarded by mutex_.
  std::array<LaneQueue, kLanes> lanes_;
  BlockUsers users_;
  std::vector<std::shared_ptr<OutsideCopy>> outside_;
  int outside_entering_ = 0;
  std::deque<CaptureRequest*> captures_;
  std::vector<std::shared_ptr<const CopyPlan>> retired_;  // of finished jobs, with graphs
  uint64_t last_number_ = 0;
  int loads_in_a_row_ = 0;
  int waiters_ = 0;
  bool started_ = false;
  Status start_status_;
  bool stopping_ = false;
  bool abandoned_ = false;
  bool ended_ = false;
  size_t trace_most_ = 0;
  std::vector<JobTimes> trace_;
  std::thread thread_;
};

}  // namespace npu_kv
