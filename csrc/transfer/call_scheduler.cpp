#include "transfer/call_scheduler.h"

#include <algorithm>
#include <exception>
#include <span>
#include <utility>

#include "runtime/host_runtime.h"
#include "transfer/copy_scheduler.h"
#include "transfer/copy_stats.h"

namespace npu_kv {
namespace {

using Clock = std::chrono::steady_clock;

// How long the copies of a stream that has failed may take to come to rest.
constexpr int kSettleTimeoutMs = 1000;
constexpr int kSignalRetries = 3;

// The place of a call's copies among the jobs of the copy backends that share blocks with it.
class BackendOrder {
 public:
  BackendOrder(const BlockTransfer& transfer, int device, StreamRef stream) {
    for (auto& backend : CopyScheduler::on_device(device)) {
      if (auto copy = backend->enter(transfer, stream, &status_)) {
        entered_.emplace_back(std::move(backend), std::move(copy));
      }
    }
  }
  ~BackendOrder() {
    for (const auto& [backend, copy] : entered_) backend->leave(copy, done_);
  }
  BackendOrder(const BackendOrder&) = delete;
  BackendOrder& operator=(const BackendOrder&) = delete;

  const Status& status() const { return status_; }
  bool has_jobs() const { return !entered_.empty(); }
  void issued(EventHandle done) { done_ = std::move(done); }

 private:
  std::vector<std::pair<std::shared_ptr<CopyScheduler>, std::shared_ptr<OutsideCopy>>> entered_;
  EventHandle done_;
  Status status_;
};

}  // namespace

std::string DeferredCall::describe(int device) const {
  std::string text = std::string(op) + ", " + direction_name(transfer.direction) +
                     " on npu:" + std::to_string(device) + ", call " + std::to_string(number);
  if (captured) text += " of its graph, replay " + std::to_string(served);
  return text;
}

CallScheduler::CallScheduler(StreamRuntime& runtime, SignalRuntime& signals, int device,
                             Report report)
    : runtime_(runtime),
      signals_(signals),
      device_(device),
      report_(std::move(report)),
      events_(runtime) {}

Status CallScheduler::start(StreamRuntime& runtime, SignalRuntime& signals, int device,
                            Report report, CallScheduler** scheduler) {
  auto self = std::unique_ptr<CallScheduler>(
      new CallScheduler(runtime, signals, device, std::move(report)));
  std::thread thread([raw = self.get()] { raw->run(); });
  Lock lock(self->mutex_);
  self->work_.wait(lock, [&] { return self->started_; });
  lock.unlock();
  if (!self->start_status_.ok()) {
    thread.join();
    return self->start_status_;
  }
  thread.detach();
  *scheduler = self.release();
  return {};
}

void CallScheduler::run() {
  const Status bound = runtime_.use_device(device_);
  Lock lock(mutex_);
  start_status_ = bound;
  started_ = true;
  work_.notify_all();
  if (!bound.ok()) return;
  for (;;) {
    work_.wait(lock, [&] { return !waiting_.empty(); });
    serving_ = waiting_.front();
    waiting_.pop_front();
    const bool stopped = stopped_;
    lock.unlock();
    serve(*serving_, stopped);
    lock.lock();
    serving_ = nullptr;
    idle_.notify_all();
  }
}

Status CallScheduler::open(Direction direction) {
  Lane& lane = lanes_[static_cast<size_t>(direction)];
  if (lane.made) return {};
  const std::lock_guard lock(open_mutex_);
  if (lane.made) return {};
  Status status = runtime_.create_stream(device_, &lane.stream);
  lane.made = status.ok();
  return status;
}

void CallScheduler::on_stream(void* argument) {
  auto* call = static_cast<DeferredCall*>(argument);
  CallScheduler& self = *call->scheduler;
  {
    const Lock lock(self.mutex_);
    call->reached = Clock::now();
    call->callback_time = self.signals_.callback_time();
    self.waiting_.push_back(call);
  }
  self.work_.notify_one();
}

void CallScheduler::let_go(const DeferredCall& call) {
  Lock lock(mutex_);
  idle_.wait(lock, [&] {
    return serving_ != &call &&
           std::find(waiting_.begin(), waiting_.end(), &call) == waiting_.end();
  });
}

void CallScheduler::serve(DeferredCall& call, bool stopped) {
  Lane& lane = lanes_[static_cast<size_t>(call.transfer.direction)];
  ++call.served;
  signals_.caused_at(call.callback_time);
  size_t released = 0;
  Status status;
  try {
    status = stopped ? Status(-1, "npu_kv_ops was shut down, so nothing was copied")
                     : copy(call, lane, &released);
  } catch (const std::exception& error) {  // of the ids, or out of memory
    status = {-1, error.what()};
  }
  {
    const Lock lock(mutex_);
    ++stats_.calls;
  }
  if (!status.ok()) fail(call, status.message());
  release(call, lane, released);
}

Status CallScheduler::copy(DeferredCall& call, Lane& lane, size_t* released) {
  if (!call.ids_are_constants) prepare(&call.transfer, call.src_ids, call.dst_ids);
  TransferSize size;
  size_t first = 0;
  for (const CallPart& part : call.parts) {
    size += size_of(call.transfer, first, part.tensors);
    first += part.tensors;
  }
  if (size.copies_after == 0) return {};
  BackendOrder order(call.transfer, device_, lane.stream);
  if (!order.status().ok()) return order.status();
  const bool on_host = call.transfer.direction == Direction::kHostToHost;
  if (on_host && order.has_jobs()) {
    // These copies are not on the stream that waits for the jobs.
    if (Status status = runtime_.synchronize_stream(lane.stream, -1); !status.ok()) return status;
  }
  const auto start = Clock::now();
  Status status = issue_parts(call, lane, released);
  order.issued(track(call, lane));
  if (status.ok()) count_call(size.bytes, size.copies_before, size.copies_after);
  const Lock lock(mutex_);
  stats_.start_ns.add((start - call.reached).count());
  return status;
}

// The last signal is left to release(): before it the copies become known to others.
Status CallScheduler::issue_parts(DeferredCall& call, Lane& lane, size_t* released) {
  const BlockTransfer& transfer = call.transfer;
  const bool on_host = transfer.direction == Direction::kHostToHost;
  Runtime& runtime = on_host ? static_cast<Runtime&>(host_runtime()) : runtime_;
  size_t first = 0;
  for (const CallPart& part : call.parts) {
    Status status = issue(transfer, first, part.tensors, runtime, lane.stream, call.batch_limit);
    if (!status.ok()) return status;
    first += part.tensors;
    if (&part == &call.parts.back()) break;
    if (Status status = signals_.set_signal(lane.stream, part.signal); !status.ok()) return status;
    ++*released;
  }
  return {};
}

// Lets the stream that called go on.
void CallScheduler::release(DeferredCall& call, Lane& lane, size_t released) {
  const std::unique_ptr<DeferredCall> owned(call.captured ? nullptr : &call);
  for (const CallPart& part : std::span(call.parts).subspan(released)) {
    Status status = signals_.set_signal(lane.stream, part.signal);
    // Without the signal the stream would wait for ever, so a refusal is not the last word.
    for (int i = 0; i < kSignalRetries && !status.ok(); ++i) {
      (void)runtime_.synchronize_stream(lane.stream, kSettleTimeoutMs);
      status = signals_.set_signal(lane.stream, part.signal);
    }
    if (!status.ok()) fail(call, "its stream cannot go on: " + status.message());
  }
}

// Whether the copies succeed is known when they are done, which somebody has to ask about.
EventHandle CallScheduler::track(const DeferredCall& call, Lane& lane) {
  EventHandle done;
  Status status = events_.take(&done);
  if (status.ok()) status = runtime_.record_event(done.get(), lane.stream);
  if (!status.ok()) {
    // Others could not wait for the copies: they have to be over.
    (void)runtime_.synchronize_stream(lane.stream, -1);
    fail(call, "whether its copies succeed is unknown: " + status.message());
    return nullptr;
  }
  check_copies(lane);
  const std::lock_guard lock(lane.issued_mutex);
  lane.issued.push_back({done, call.describe(device_)});
  return done;
}

void CallScheduler::check_copies() {
  for (Lane& lane : lanes_) check_copies(lane);
}

void CallScheduler::check_copies(Lane& lane) {
  const std::lock_guard lock(lane.issued_mutex);
  while (!lane.issued.empty()) {
    EventState state = EventState::kPending;
    const Status status = runtime_.event_state(lane.issued.front().done.get(), &state);
    if (status.ok() && state == EventState::kPending) return;
    if (status.ok()) {
      lane.issued.pop_front();
      continue;
    }
    // The runtime tells once that a copy on the stream has failed, and not which: of the calls that
    // are over by now any may be the one.
    const Issued first = std::move(lane.issued.front());
    lane.issued.pop_front();
    size_t more = 0;
    while (!lane.issued.empty() && runtime_.event_reached(lane.issued.front().done.get())) {
      lane.issued.pop_front();
      ++more;
    }
    std::string message = first.what + ": " + status.message();
    if (more > 0) {
      message += " (or one of the " + std::to_string(more) + " calls behind it in this direction)";
    }
    {
      const Lock stats_lock(mutex_);
      ++stats_.failures;
    }
    report_(std::move(message));
  }
}

void CallScheduler::fail(const DeferredCall& call, const std::string& reason) {
  {
    const Lock lock(mutex_);
    ++stats_.failures;
  }
  report_(call.describe(device_) + ": " + reason);
}

void CallScheduler::stop(std::chrono::nanoseconds timeout) {
  Lock lock(mutex_);
  stopped_ = true;
  idle_.wait_for(lock, timeout, [&] { return serving_ == nullptr && waiting_.empty(); });
}

bool CallScheduler::stopped() const {
  const Lock lock(mutex_);
  return stopped_;
}

CallStats CallScheduler::stats() const {
  const Lock lock(mutex_);
  return stats_;
}

}  // namespace npu_kv
