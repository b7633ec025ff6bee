// One job of the copy backend: what shall be copied, how far it is, and when it got there.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "runtime/export.h"
#include "runtime/stream_runtime.h"
#include "transfer/block_layout.h"
#include "transfer/block_pairs.h"
#include "transfer/block_transfer.h"
#include "transfer/block_users.h"
#include "transfer/descriptor_cursor.h"
#include "transfer/event_pool.h"

namespace npu_kv {

using Clock = std::chrono::steady_clock;

// The two pools of a backend: the same tensors, on the device and on the host.
struct CopyPools {
  std::vector<BlockLayout> device;
  std::vector<BlockLayout> host;
};

// The checked ids of a job. Immutable, so that any number of jobs may share it.
struct CopyPlan {
  Lane lane = Lane::kLoad;
  Runs runs;
  TransferSize size;
  // The copies as a graph of the runtime; null: they are issued one batch after the other.
  std::shared_ptr<void> graph;
};

// Checks the ids against the pools (std::out_of_range, std::invalid_argument). Thread-safe.
NPU_KV_API std::shared_ptr<const CopyPlan> make_plan(const CopyPools& pools, Lane lane,
                                                     const IdList& src, const IdList& dst);

// What a trace tells about a job, times by the host's steady clock. A job that was refused before
// it was launched has `started` == `launched` == `finished`.
struct JobTimes {
  uint64_t number = 0;
  int64_t label = 0;
  Lane lane = Lane::kLoad;
  int64_t pairs = 0;
  uint64_t bytes = 0;
  uint64_t behind = 0;  // the job of the other lane that it waited for, 0: none
  bool gated = false;
  bool failed = false;
  Clock::time_point submitted;
  Clock::time_point gate_opened;
  Clock::time_point started;   // its first copies are handed to the runtime
  Clock::time_point launched;  // behind its last call
  Clock::time_point finished;  // when that was seen
};

// Made by CopyScheduler::submit and asked through the scheduler; its own members may be read by any
// thread.
class NPU_KV_API CopyJob {
 public:
  enum class State { kQueued, kLaunched, kDone, kFailed };

  CopyJob(uint64_t number, int64_t label, std::shared_ptr<const CopyPlan> plan, bool gated,
          Clock::time_point submitted)
      : number(number),
        label(label),
        lane(plan->lane),
        pairs(plan->runs.pairs),
        gated(gated),
        plan_(std::move(plan)),
        gate_open_(!gated),
        submitted_(submitted) {}

  const uint64_t number;  // from 1, in the order of submission
  const int64_t label;    // what messages call it
  const Lane lane;
  const int64_t pairs;
  const bool gated;

 private:
  friend class CopyScheduler;

  bool finished() const { return state_ == State::kDone || state_ == State::kFailed; }

  // Guarded by the scheduler's mutex.
  std::shared_ptr<const CopyPlan> plan_;  // until it is finished
  State state_ = State::kQueued;
  bool gate_open_;
  // Both until it is finished:
  EventHandle gate_;                 // the lane waits for it first; null: for nothing
  std::shared_ptr<CopyJob> behind_;  // a job of the other lane that shares a block
  EventHandle marker_;               // on a stream of the caller's: where the job begins on it
  uint64_t behind_number_ = 0;
  EventHandle done_;  // recorded behind the copies
  Status error_;
  uint64_t finished_us_ = 0;  // the runtime's clock
  bool has_timestamp_ = false;
  bool begun_ = false;  // some of it may have been issued
  Clock::time_point submitted_;
  Clock::time_point gate_opened_;
  Clock::time_point started_;
  Clock::time_point launched_;
  Clock::time_point probed_;

  // Only touched by the scheduler's thread.
  std::unique_ptr<DescriptorCursor> cursor_;
  Clock::time_point first_copy_;
};

}  // namespace npu_kv
