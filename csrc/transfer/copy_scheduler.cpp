#include "transfer/copy_scheduler.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <utility>

namespace npu_kv {
namespace {

using namespace std::chrono_literals;

// While copies are in flight the thread looks at them at this pace, faster when somebody waits.
// With nothing in flight it sleeps until it is called.
constexpr auto kPollWaited = 20us;
constexpr auto kPollFirst = 50us;
constexpr auto kPollSlowest = 2ms;
// How often reaping interrupts a backlog of launches.
constexpr auto kReapEvery = 200us;
// A job that makes no progress for so long: its stream is asked whether it has failed.
constexpr auto kProbeAfter = 100ms;
constexpr int kProbeTimeoutMs = 1;
// How long the copies of a lane that has failed may take to come to rest before their jobs count as
// failed and their blocks as free.
constexpr int kSettleTimeoutMs = 1000;
// Loads go first, but a steady flow of them does not starve the stores.
constexpr int kMostLoadsInARow = 4;
// How long abandon() lets the thread finish the call it is in.
constexpr auto kAbandonAfter = 500ms;

int64_t between(Clock::time_point start, Clock::time_point end) {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(end - start).count();
}

// An exception on the scheduler's thread (out of memory) becomes the failure of the job it met.
template <typename Call>
Status without_throwing(Call call) {
  try {
    return call();
  } catch (const std::exception& error) {
    return {-1, std::string("the scheduler's thread: ") + error.what()};
  }
}

// The schedulers of the process. Thread-safe.
class RunningSchedulers {
 public:
  void add(const std::shared_ptr<CopyScheduler>& scheduler) {
    const std::lock_guard lock(mutex_);
    std::erase_if(schedulers_, [](const auto& known) { return known.expired(); });
    schedulers_.push_back(scheduler);
    any_.store(true, std::memory_order_release);
  }

  std::vector<std::shared_ptr<CopyScheduler>> on_device(int device) {
    std::vector<std::shared_ptr<CopyScheduler>> found;
    if (!any_.load(std::memory_order_acquire)) return found;
    const std::lock_guard lock(mutex_);
    for (const auto& known : schedulers_) {
      auto scheduler = known.lock();
      if (scheduler && scheduler->options().device == device) found.push_back(std::move(scheduler));
    }
    return found;
  }

 private:
  std::atomic<bool> any_{false};
  std::mutex mutex_;
  std::vector<std::weak_ptr<CopyScheduler>> schedulers_;
};

RunningSchedulers& running_schedulers() {
  static auto* schedulers = new RunningSchedulers;  // threads may ask while the process ends
  return *schedulers;
}

std::string pair_text(const Runs& runs, const DescriptorCursor::Position& at) {
  return "pair " + std::to_string(runs.src[at.run] + at.block) + " -> " +
         std::to_string(runs.dst[at.run] + at.block) + " of tensor " + std::to_string(at.tensor);
}

}  // namespace

std::shared_ptr<const CopyPlan> make_plan(const CopyPools& pools, Lane lane, const IdList& src,
                                          const IdList& dst) {
  thread_local BlockPairs pairs;
  const bool store = lane == Lane::kStore;
  const auto& sources = store ? pools.device : pools.host;
  const auto& destinations = store ? pools.host : pools.device;
  pairs.assign(src, dst, smallest_pool(sources), smallest_pool(destinations));
  auto plan = std::make_shared<CopyPlan>();
  plan->lane = lane;
  pairs.build_runs(&plan->runs);
  plan->size = size_of(sources, destinations, plan->runs);
  return plan;
}

CopyScheduler::CopyScheduler(StreamRuntime& runtime, Options options)
    : runtime_(runtime),
      options_(std::move(options)),
      events_(runtime),
      users_(smallest_pool(options_.pools.device).num_blocks,
             smallest_pool(options_.pools.host).num_blocks) {}

CopyScheduler::~CopyScheduler() {
  // The thread holds a reference, so it has ended, or is what lets go of the last one.
  if (thread_.joinable()) thread_.detach();
}

Status CopyScheduler::start(StreamRuntime& runtime, Options options,
                            std::shared_ptr<CopyScheduler>* scheduler) {
  std::shared_ptr<CopyScheduler> self(new CopyScheduler(runtime, std::move(options)));
  Lock lock(self->mutex_);
  self->thread_ = std::thread([self] { self->run(); });
  self->finished_.wait(lock, [&] { return self->started_; });
  if (!self->start_status_.ok()) {
    std::thread thread = std::move(self->thread_);
    lock.unlock();
    thread.join();
    return self->start_status_;
  }
  running_schedulers().add(self);
  *scheduler = std::move(self);
  return {};
}

std::vector<std::shared_ptr<CopyScheduler>> CopyScheduler::on_device(int device) {
  return running_schedulers().on_device(device);
}

// --- the scheduler's thread

Status CopyScheduler::prepare_thread() {
  if (Status status = runtime_.use_device(options_.device); !status.ok()) return status;
  for (int lane = 0; lane < kLanes; ++lane) {
    for (StreamRef* stream : {&options_.streams[lane], &gate_streams_[lane]}) {
      const bool given = stream == &options_.streams[lane] && !options_.own_streams[lane];
      if (given) continue;
      if (Status status = runtime_.create_stream(options_.device, stream); !status.ok()) {
        destroy_streams();
        return status;
      }
      made_streams_.push_back(*stream);
    }
  }
  return {};
}

void CopyScheduler::destroy_streams() {
  for (StreamRef stream : made_streams_) runtime_.destroy_stream(stream);
  made_streams_.clear();
}

void CopyScheduler::run() {
  const Status prepared = without_throwing([&] { return prepare_thread(); });
  Lock lock(mutex_);
  started_ = true;
  start_status_ = prepared;
  finished_.notify_all();
  if (!prepared.ok()) return;
  run_jobs(lock);
  stopping_ = true;
  const bool abandoned = abandoned_;
  if (abandoned) fail_everything({-1, "the copy backend was given up before the job was done"});
  lock.unlock();
  if (!abandoned) {
    destroy_streams();
    events_.close();
  }
  lock.lock();
  answer_captures(lock);
  ended_ = true;
  finished_.notify_all();
}

void CopyScheduler::run_jobs(Lock& lock) {
  auto last_reap = Clock::now();
  auto pause = std::chrono::duration_cast<std::chrono::microseconds>(kPollFirst);
  while (!abandoned_) {
    answer_captures(lock);
    Lane lane;
    if (CopyJob* job = next_job(&lane)) {
      step(lock, lane, *job);
      pause = kPollFirst;
      if (Clock::now() - last_reap < kReapEvery) continue;
    }
    lock.unlock();
    reap();
    lock.lock();
    last_reap = Clock::now();
    if (abandoned_ || !captures_.empty() || next_job(&lane) != nullptr) continue;
    if (stopping_ && idle()) break;
    const bool in_flight = !lanes_[0].in_flight.empty() || !lanes_[1].in_flight.empty();
    if (!in_flight) {
      work_.wait(lock);
      pause = kPollFirst;
    } else if (waiters_ > 0) {
      work_.wait_for(lock, kPollWaited);
    } else {
      work_.wait_for(lock, pause);
      pause = std::min<std::chrono::microseconds>(pause * 2, kPollSlowest);
    }
  }
}

bool CopyScheduler::may_launch(const CopyJob& job) {
  if (!job.gate_open_) return false;
  if (!job.behind_ || job.behind_->finished()) return true;
  // A launched job without an event can only be waited for until it is finished.
  return job.behind_->state_ == CopyJob::State::kLaunched && job.behind_->done_;
}

CopyJob* CopyScheduler::next_job(Lane* lane) {
  auto ready = [&](Lane which) -> CopyJob* {
    const LaneQueue& own = queue(which);
    if (own.queued.empty() || !may_launch(*own.queued.front())) return nullptr;
    if (outside_entering_ > 0 && !own.queued.front()->begun_) return nullptr;
    // What has no event is done when its stream is at rest: let it come to rest.
    if (!own.in_flight.empty() && !own.in_flight.back()->done_) return nullptr;
    return own.queued.front().get();
  };
  CopyJob* load = ready(Lane::kLoad);
  CopyJob* store = ready(Lane::kStore);
  if (load != nullptr && (store == nullptr || loads_in_a_row_ < kMostLoadsInARow)) {
    loads_in_a_row_ = store == nullptr ? 0 : loads_in_a_row_ + 1;
    *lane = Lane::kLoad;
    return load;
  }
  loads_in_a_row_ = 0;
  *lane = Lane::kStore;
  return store;
}

CopyScheduler::Obstacles CopyScheduler::obstacles() const {
  Obstacles found;
  for (size_t lane = 0; lane < kLanes; ++lane) {
    for (const auto* jobs : {&lanes_[lane].in_flight, &lanes_[lane].queued}) {
      for (const auto& job : *jobs) {
        Obstacle obstacle;
        obstacle.job = job;
        if (job->behind_ && !job->behind_->finished()) obstacle.behind = job->behind_->number;
        if (job->gate_) obstacle.events.push_back(job->gate_);
        if (job->marker_) obstacle.events.push_back(job->marker_);
        const bool unknown = !options_.own_streams[lane] && !job->marker_;
        obstacle.held_up = !job->gate_open_ || unknown;
        found[lane].push_back(std::move(obstacle));
      }
    }
  }
  return found;
}

// Asks the runtime. Jobs are in order, so what is behind a job that is held up is so too.
void CopyScheduler::find_held_up(Obstacles& lanes) const {
  std::array<uint64_t, kLanes> first;
  first.fill(UINT64_MAX);
  for (bool changed = true; changed;) {
    changed = false;
    for (size_t lane = 0; lane < kLanes; ++lane) {
      for (Obstacle& obstacle : lanes[lane]) {
        const uint64_t number = obstacle.job->number;
        if (number >= first[lane]) break;
        auto pending = [&](const EventHandle& event) {
          return !runtime_.event_reached(event.get());
        };
        obstacle.held_up |= obstacle.behind >= first[1 - lane] ||
                            std::any_of(obstacle.events.begin(), obstacle.events.end(), pending);
        if (!obstacle.held_up) continue;
        first[lane] = number;
        changed = true;
        break;
      }
    }
  }
  for (size_t lane = 0; lane < kLanes; ++lane) {
    for (Obstacle& obstacle : lanes[lane]) obstacle.held_up = obstacle.job->number >= first[lane];
  }
}

// The last job of each lane that the copy has to run behind; null: none.
std::array<std::shared_ptr<CopyJob>, kLanes> CopyScheduler::jobs_before(Lock& lock,
                                                                        const OutsideCopy& copy,
                                                                        bool begun_only) {
  std::array<std::shared_ptr<CopyJob>, kLanes> before;
  std::array<uint64_t, kLanes> latest{};
  for (const Lane lane : {Lane::kLoad, Lane::kStore}) {
    latest[static_cast<size_t>(lane)] = users_.latest(lane, copy.device, copy.host);
  }
  if (latest[0] == 0 && latest[1] == 0) return before;
  Obstacles lanes = obstacles();
  std::array<uint64_t, kLanes> last_begun{};
  for (size_t lane = 0; lane < kLanes; ++lane) {
    for (const Obstacle& obstacle : lanes[lane]) {
      if (obstacle.job->begun_) last_begun[lane] = obstacle.job->number;
    }
  }
  lock.unlock();
  find_held_up(lanes);
  lock.lock();
  for (size_t lane = 0; lane < kLanes; ++lane) {
    const uint64_t last = begun_only ? std::min(latest[lane], last_begun[lane]) : latest[lane];
    for (const Obstacle& obstacle : lanes[lane]) {
      if (!obstacle.held_up && obstacle.job->number <= last) before[lane] = obstacle.job;
    }
  }
  return before;
}

std::vector<EventHandle> CopyScheduler::outside_copies_before(const CopyJob& job) const {
  std::vector<EventHandle> events;
  for (const auto& copy : outside_) {
    // A later job of the lane may be what names the block; then this one waits for nothing.
    if (users_.latest(job.lane, copy->device, copy->host) >= job.number) {
      events.push_back(copy->done);
    }
  }
  return events;
}

void CopyScheduler::step(Lock& lock, Lane lane, CopyJob& job) {
  Status status = job.error_;  // refused by its gate, or its stream failed between two steps
  const bool first = !std::exchange(job.begun_, true);
  std::vector<EventHandle> behind;
  if (first) {
    behind = outside_copies_before(job);
    if (job.gate_) behind.push_back(job.gate_);
    if (job.behind_ && job.behind_->done_) behind.push_back(job.behind_->done_);
  }
  bool issued = false;
  lock.unlock();
  if (first && !options_.own_streams[static_cast<size_t>(lane)]) mark(lock, lane, job);
  if (status.ok()) {
    status = without_throwing([&]() -> Status {
      if (first) {
        if (Status waited = begin(lane, job, behind); !waited.ok()) return waited;
      }
      return issue_step(lane, job, &issued);
    });
  }
  lock.lock();
  if (issued || !status.ok()) finish_launch(lock, lane, job, std::move(status));
}

// Notes where a job begins on a stream that others use too. Without a mark it counts as held up.
void CopyScheduler::mark(Lock& lock, Lane lane, CopyJob& job) {
  EventHandle marker;
  const Status marked = without_throwing([&]() -> Status {
    if (Status status = events_.take(&marker); !status.ok()) return status;
    return runtime_.record_event(marker.get(), stream(lane));
  });
  lock.lock();
  if (marked.ok()) job.marker_ = std::move(marker);
  lock.unlock();
}

Status CopyScheduler::begin(Lane lane, CopyJob& job, const std::vector<EventHandle>& behind) {
  const bool store = lane == Lane::kStore;
  job.cursor_ = std::make_unique<DescriptorCursor>(
      store ? options_.pools.device : options_.pools.host,
      store ? options_.pools.host : options_.pools.device, job.plan_->runs);
  for (const EventHandle& event : behind) {
    if (Status status = runtime_.wait_event(stream(lane), event.get()); !status.ok()) return status;
  }
  return {};
}

Status CopyScheduler::issue_step(Lane lane, CopyJob& job, bool* issued) {
  if (job.plan_->graph) {
    *issued = true;
    job.first_copy_ = Clock::now();
    return runtime_.execute_graph(job.plan_->graph.get(), stream(lane));
  }
  const size_t most = lane == Lane::kStore ? options_.store_step_copies : SIZE_MAX;
  const Status status = copy_next(*job.plan_, *job.cursor_, most, stream(lane), &job.first_copy_);
  *issued = job.cursor_->done();
  return status;
}

Status CopyScheduler::copy_next(const CopyPlan& plan, DescriptorCursor& cursor, size_t most,
                                StreamRef stream, Clock::time_point* first_copy) {
  most = std::min(most, runtime_.batch_limit());
  const Descriptors batch = cursor.next(most, options_.step_bytes, buffer_);
  if (batch.count == 0) return {};
  const Direction direction = options_.device < 0         ? Direction::kHostToHost
                              : plan.lane == Lane::kStore ? Direction::kDeviceToHost
                                                          : Direction::kHostToDevice;
  if (*first_copy == Clock::time_point{}) *first_copy = Clock::now();
  const Status status = runtime_.copy(batch, direction, stream);
  if (status.ok()) return status;
  const bool known = status.failed_copy() < batch.count;
  const auto at = cursor.position_in_batch(known ? status.failed_copy() : 0);
  return {status.code(), (known ? "at " : "in the batch that begins with ") +
                             pair_text(plan.runs, at) + ": " + status.message()};
}

void CopyScheduler::finish_launch(Lock& lock, Lane lane, CopyJob& job, Status outcome) {
  lock.unlock();
  // Recorded after a failure too: copies that were issued before it may still be on their way.
  EventHandle done;
  const Status tracked = without_throwing([&]() -> Status {
    if (Status status = events_.take(&done); !status.ok()) return status;
    return runtime_.record_event(done.get(), stream(lane));
  });
  if (!tracked.ok()) done.reset();
  job.cursor_.reset();
  lock.lock();

  LaneQueue& own = queue(lane);
  const std::shared_ptr<CopyJob> self = own.queued.front();
  own.queued.pop_front();
  if (job.error_.ok()) job.error_ = outcome.ok() ? tracked : std::move(outcome);
  job.launched_ = job.probed_ = Clock::now();
  job.started_ = job.first_copy_ == Clock::time_point{} ? job.launched_ : job.first_copy_;
  job.done_ = std::move(done);
  job.state_ = CopyJob::State::kLaunched;
  own.stats.start_ns.add(between(job.submitted_, job.started_));
  own.in_flight.push_back(self);
  finished_.notify_all();
}

// Without mutex_ while the runtime is asked, or callers of submit would wait for its answers.
void CopyScheduler::reap() {
  const std::lock_guard only_one(reap_mutex_);
  std::vector<std::shared_ptr<const CopyPlan>> retired;  // let go of without mutex_
  Lock lock(mutex_);
  for (const Lane lane : {Lane::kLoad, Lane::kStore}) {
    auto& in_flight = queue(lane).in_flight;
    while (!in_flight.empty()) {
      const std::shared_ptr<CopyJob> job = in_flight.front();
      const EventHandle event = job->done_;
      // Without an event, or on a stream that has stopped on a failure and may never reach it, the
      // stream itself is asked.
      const bool probe = !event || Clock::now() - job->probed_ >= kProbeAfter;
      if (probe) job->probed_ = Clock::now();
      lock.unlock();
      EventState state = EventState::kPending;
      Status status;
      if (event) status = runtime_.event_state(event.get(), &state);
      const bool pending = status.ok() && state == EventState::kPending;
      if (pending && probe) status = runtime_.synchronize_stream(stream(lane), kProbeTimeoutMs);
      const bool wait_on = pending && (!probe || status.code() == kTimedOut);
      if (!wait_on && !status.ok()) {
        (void)runtime_.synchronize_stream(stream(lane), kSettleTimeoutMs);
      }
      uint64_t reached_us = 0;
      const bool has_timestamp = status.ok() && !wait_on && event &&
                                 runtime_.event_timestamp(event.get(), &reached_us).ok();
      lock.lock();
      if (in_flight.empty() || in_flight.front() != job) continue;  // given up meanwhile
      if (wait_on) break;
      if (!status.ok()) {
        fail_launched(lane, status);
        break;
      }
      job->has_timestamp_ = has_timestamp;
      job->finished_us_ = reached_us;
      in_flight.pop_front();
      settle(*job, job->error_);
    }
  }
  retired.swap(retired_);
}

// The runtime tells that a copy on the stream has failed, and not which: of the jobs that are not
// known to be good, any may be the one.
void CopyScheduler::fail_launched(Lane lane, const Status& status) {
  LaneQueue& own = queue(lane);
  for (const auto& job : std::exchange(own.in_flight, {})) {
    settle(*job, job->error_.ok() ? status : job->error_);
  }
  const bool half_issued = !own.queued.empty() && own.queued.front()->begun_;
  if (half_issued && own.queued.front()->error_.ok()) own.queued.front()->error_ = status;
}

void CopyScheduler::settle(CopyJob& job, const Status& status) {
  LaneStats& stats = queue(job.lane).stats;
  const auto now = Clock::now();
  if (job.started_ == Clock::time_point{}) job.started_ = now;
  if (job.launched_ == Clock::time_point{}) job.launched_ = now;
  if (status.ok()) {
    job.state_ = CopyJob::State::kDone;
    ++stats.jobs;
    stats.bytes += job.plan_->size.bytes;
    stats.copies_before += job.plan_->size.copies_before;
    stats.copies_after += job.plan_->size.copies_after;
    stats.completion_ns.add(between(job.started_, now));
  } else {
    job.error_ = {status.code(), describe(job) + status.message()};
    job.state_ = CopyJob::State::kFailed;
    ++stats.failures;
  }
  if (trace_.size() < trace_most_) {
    trace_.push_back({job.number, job.label, job.lane, job.pairs, job.plan_->size.bytes,
                      job.behind_number_, job.gated, !status.ok(), job.submitted_, job.gate_opened_,
                      job.started_, job.launched_, now});
  }
  job.done_.reset();
  job.gate_.reset();
  job.behind_.reset();
  job.marker_.reset();
  // The last reference to a plan destroys its graph, which the runtime may take its time for.
  if (job.plan_->graph) retired_.push_back(job.plan_);
  job.plan_.reset();
  finished_.notify_all();
  work_.notify_one();  // a job of the other lane may have waited for this one
}

void CopyScheduler::fail_everything(const Status& status) {
  for (LaneQueue& lane : lanes_) {
    for (auto* jobs : {&lane.in_flight, &lane.queued}) {
      for (const auto& job : std::exchange(*jobs, {})) settle(*job, status);
    }
  }
}

bool CopyScheduler::idle() const {
  return std::all_of(lanes_.begin(), lanes_.end(), [](const LaneQueue& lane) {
    return lane.queued.empty() && lane.in_flight.empty();
  });
}

std::string CopyScheduler::describe(const CopyJob& job) const {
  const bool store = job.lane == Lane::kStore;
  std::string text = std::string(store ? "store " : "load ") + std::to_string(job.label) +
                     (store ? " (device to host, " : " (host to device, ") +
                     std::to_string(job.pairs) + (job.pairs == 1 ? " pair" : " pairs");
  if (job.pairs > 0) text += ", the first " + pair_text(job.plan_->runs, {0, 0, 0});
  return text + ") failed: ";
}

void CopyScheduler::answer_captures(Lock& lock) {
  while (!captures_.empty()) {
    CaptureRequest& request = *captures_.front();
    captures_.pop_front();
    if (ended_ || abandoned_ || (stopping_ && idle())) {
      request.status = {-1, "the copy backend was shut down"};
    } else {
      lock.unlock();
      const Status status =
          without_throwing([&] { return record_graph(request.plan, &request.graph); });
      lock.lock();
      request.status = status;
    }
    request.done = true;
    finished_.notify_all();
  }
}

Status CopyScheduler::record_graph(const CopyPlan& plan, void** graph) {
  if (!has_capture_stream_) {
    if (Status status = runtime_.create_stream(options_.device, &capture_stream_); !status.ok()) {
      return status;
    }
    made_streams_.push_back(capture_stream_);
    has_capture_stream_ = true;
  }
  if (Status status = runtime_.begin_capture(capture_stream_); !status.ok()) return status;
  Status recorded = without_throwing([&]() -> Status {
    const bool store = plan.lane == Lane::kStore;
    DescriptorCursor cursor(store ? options_.pools.device : options_.pools.host,
                            store ? options_.pools.host : options_.pools.device, plan.runs);
    while (!cursor.done()) {
      Clock::time_point unused;
      Status status = copy_next(plan, cursor, SIZE_MAX, capture_stream_, &unused);
      if (!status.ok()) return status;
    }
    return {};
  });
  Status ended = runtime_.end_capture(capture_stream_, graph);
  if (!ended.ok()) {
    // Some failures leave the stream capturing, and with it the device impossible to synchronise.
    if (*graph == nullptr) (void)runtime_.end_capture(capture_stream_, graph);
    has_capture_stream_ = false;
  }
  if (recorded.ok()) recorded = std::move(ended);
  if (!recorded.ok() && *graph != nullptr) runtime_.destroy_graph(std::exchange(*graph, nullptr));
  return recorded;
}

// --- any thread

std::shared_ptr<CopyJob> CopyScheduler::submit(std::shared_ptr<const CopyPlan> plan, bool gated,
                                               int64_t label, Clock::time_point launched) {
  const Lane lane = plan->lane;
  Lock lock(mutex_);
  if (stopping_) return nullptr;
  auto job = std::make_shared<CopyJob>(++last_number_, label, std::move(plan), gated, launched);
  const uint64_t latest = users_.enter(job->number, lane, job->plan_->runs);
  LaneQueue& other = queue(other_lane(lane));
  for (auto* jobs : {&other.queued, &other.in_flight}) {
    auto by_number = [](const std::shared_ptr<CopyJob>& a, uint64_t number) {
      return a->number < number;
    };
    auto found = std::lower_bound(jobs->begin(), jobs->end(), latest, by_number);
    if (found != jobs->end() && (*found)->number == latest) job->behind_ = *found;
  }
  LaneQueue& own = queue(lane);
  own.queued.push_back(job);
  if (job->behind_) {
    job->behind_number_ = latest;
    ++own.stats.hazards;
  }
  own.stats.peak_depth =
      std::max<uint64_t>(own.stats.peak_depth, own.queued.size() + own.in_flight.size());
  lock.unlock();  // or the thread wakes only to wait for the mutex
  work_.notify_one();
  return job;
}

std::shared_ptr<OutsideCopy> CopyScheduler::enter(const BlockTransfer& transfer, StreamRef stream,
                                                  Status* status) {
  auto copy = std::make_shared<OutsideCopy>();
  const Runs& runs = transfer.runs;
  for (const auto& [pools, blocks] : {std::pair{&options_.pools.device, &copy->device},
                                      std::pair{&options_.pools.host, &copy->host}}) {
    add_shared_blocks(*pools, transfer.src, runs.src, runs.count, blocks);
    add_shared_blocks(*pools, transfer.dst, runs.dst, runs.count, blocks);
  }
  if (copy->device.empty() && copy->host.empty()) return nullptr;

  Lock lock(mutex_);
  if (ended_) return nullptr;
  // What was submitted before runs before, so it has to be launched first.
  for (const auto& job : jobs_before(lock, *copy, false)) {
    if (!job || job->state_ != CopyJob::State::kQueued) continue;
    wait_until(lock, std::chrono::nanoseconds(-1),
               [&] { return job->state_ != CopyJob::State::kQueued; });
  }
  // From here on none begins until the copy is issued.
  outside_.push_back(copy);
  ++outside_entering_;
  for (const auto& job : jobs_before(lock, *copy, true)) {
    if (!job) continue;
    lock.unlock();
    wait_launched(*job, std::chrono::nanoseconds(-1));
    if (const EventHandle done = done_event(*job)) {
      Status waited = runtime_.wait_event(stream, done.get());
      if (!waited.ok()) *status = std::move(waited);
    }
    lock.lock();
  }
  return copy;
}

void CopyScheduler::leave(const std::shared_ptr<OutsideCopy>& copy, EventHandle done) {
  forget_outside_copies();
  const Lock lock(mutex_);
  --outside_entering_;
  copy->done = std::move(done);
  if (!copy->done) std::erase(outside_, copy);
  work_.notify_one();
}

void CopyScheduler::forget_outside_copies() {
  Lock lock(mutex_);
  const auto copies = outside_;
  lock.unlock();
  for (const auto& copy : copies) {
    lock.lock();
    const EventHandle done = copy->done;
    lock.unlock();
    if (!done || !runtime_.event_reached(done.get())) continue;
    lock.lock();
    std::erase(outside_, copy);
    lock.unlock();
  }
}

void CopyScheduler::open_gate(CopyJob& job, void* event) {
  // The event may be recorded again before this job is launched, so its latest record is relayed to
  // an event of our own now.
  const StreamRef relay = gate_streams_[static_cast<int>(job.lane)];
  EventHandle own;
  const Status status = without_throwing([&]() -> Status {
    if (Status taken = events_.take(&own); !taken.ok()) return taken;
    if (Status waited = runtime_.wait_event(relay, event); !waited.ok()) return waited;
    return runtime_.record_event(own.get(), relay);
  });
  open(job, std::move(own), status);
}

void CopyScheduler::refuse(CopyJob& job, const Status& status) { open(job, nullptr, status); }

void CopyScheduler::open(CopyJob& job, EventHandle event, const Status& status) {
  Lock lock(mutex_);
  if (job.gate_open_ || job.finished()) return;
  job.gate_ = std::move(event);
  job.error_ = status;
  job.gate_open_ = true;
  job.gate_opened_ = Clock::now();
  lock.unlock();
  work_.notify_one();
}

Status CopyScheduler::capture(const CopyPlan& plan, std::shared_ptr<const CopyPlan>* captured) {
  auto copy = std::make_shared<CopyPlan>(plan);
  if (options_.device >= 0 && plan.size.copies_after > 0) {
    CaptureRequest request{plan, nullptr, {}, false};
    Lock lock(mutex_);
    if (stopping_) return {-1, "the copy backend was shut down"};
    captures_.push_back(&request);
    work_.notify_one();
    finished_.wait(lock, [&] { return request.done; });
    lock.unlock();
    if (!request.status.ok()) return request.status;
    copy->graph = std::shared_ptr<void>(
        request.graph, [&runtime = runtime_](void* graph) { runtime.destroy_graph(graph); });
  }
  *captured = std::move(copy);
  return {};
}

bool CopyScheduler::query(CopyJob& job) {
  Lock lock(mutex_);
  if (job.state_ == CopyJob::State::kLaunched) {
    lock.unlock();
    reap();
    lock.lock();
  }
  return job.finished();
}

template <typename Ready>
bool CopyScheduler::wait_until(Lock& lock, std::chrono::nanoseconds timeout, Ready ready) {
  ++waiters_;
  work_.notify_one();
  bool reached = true;
  if (timeout < 0ns) {
    finished_.wait(lock, ready);
  } else {
    reached = finished_.wait_for(lock, timeout, ready);
  }
  --waiters_;
  return reached;
}

bool CopyScheduler::wait(CopyJob& job, std::chrono::nanoseconds timeout) {
  Lock lock(mutex_);
  return job.finished() || wait_until(lock, timeout, [&] { return job.finished(); });
}

bool CopyScheduler::wait_launched(CopyJob& job, std::chrono::nanoseconds timeout) {
  Lock lock(mutex_);
  auto launched = [&] { return job.state_ != CopyJob::State::kQueued; };
  return launched() || wait_until(lock, timeout, launched);
}

Status CopyScheduler::error(const CopyJob& job) const {
  const Lock lock(mutex_);
  return job.state_ == CopyJob::State::kFailed ? job.error_ : Status{};
}

EventHandle CopyScheduler::done_event(const CopyJob& job) const {
  const Lock lock(mutex_);
  return job.done_;
}

bool CopyScheduler::timestamp(const CopyJob& job, uint64_t* microseconds) const {
  const Lock lock(mutex_);
  *microseconds = job.finished_us_;
  return job.has_timestamp_;
}

bool CopyScheduler::drain(std::chrono::nanoseconds timeout) {
  Lock lock(mutex_);
  const uint64_t last = last_number_;
  auto drained = [&] {
    return std::all_of(lanes_.begin(), lanes_.end(), [&](const LaneQueue& lane) {
      const auto& first = lane.in_flight.empty() ? lane.queued : lane.in_flight;
      return first.empty() || first.front()->number > last;
    });
  };
  return drained() || wait_until(lock, timeout, drained);
}

bool CopyScheduler::shutdown(std::chrono::nanoseconds timeout) {
  Lock lock(mutex_);
  stopping_ = true;
  work_.notify_one();
  if (!ended_ && !wait_until(lock, timeout, [&] { return ended_; })) return false;
  std::thread thread = std::exchange(thread_, {});
  lock.unlock();
  if (thread.joinable()) thread.join();
  return true;
}

void CopyScheduler::abandon() {
  Lock lock(mutex_);
  if (ended_) return;
  abandoned_ = stopping_ = true;
  work_.notify_one();
  // The libraries below are about to be unloaded: let the thread come out of them if it can.
  finished_.wait_for(lock, kAbandonAfter, [&] { return ended_; });
  if (thread_.joinable()) thread_.detach();
}

std::array<LaneStats, kLanes> CopyScheduler::stats() const {
  const Lock lock(mutex_);
  std::array<LaneStats, kLanes> all;
  for (int i = 0; i < kLanes; ++i) {
    all[i] = lanes_[i].stats;
    all[i].queued = lanes_[i].queued.size();
    all[i].in_flight = lanes_[i].in_flight.size();
  }
  return all;
}

void CopyScheduler::start_trace(size_t most) {
  const Lock lock(mutex_);
  trace_.clear();
  trace_most_ = most;
}

std::vector<JobTimes> CopyScheduler::stop_trace() {
  const Lock lock(mutex_);
  trace_most_ = 0;
  return std::exchange(trace_, {});
}

}  // namespace npu_kv
