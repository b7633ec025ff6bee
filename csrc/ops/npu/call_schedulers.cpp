#include "ops/npu/call_schedulers.h"

#include <c10/util/Exception.h>
#include <torch_npu/csrc/core/npu/NPUGuard.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <mutex>
#include <string>
#include <utility>

#include "ops/python_border.h"
#include "runtime/acl/acl_runtime.h"
#include "runtime/acl/acl_signals.h"
#include "runtime/pending_errors.h"

namespace npu_kv {
namespace {

constexpr int kMostDevices = 64;

class Schedulers {
 public:
  // The one of a device, ready for copies of a direction; starts it at the first use. The device
  // must be current.
  CallScheduler& of(int device, Direction direction) {
    TORCH_CHECK(device < kMostDevices, "npu_kv: npu:", device, " is beyond the ", kMostDevices,
                " devices that are supported");
    if (getpid() != pid_) {
      throw_transfer_error(
          "npu_kv: calls that the scheduler serves: this process was forked from the "
          "one that loaded the operator, and an NPU belongs to one process");
    }
    CallScheduler* scheduler = find(device);
    if (scheduler == nullptr) scheduler = start(device);
    if (scheduler->stopped()) {
      throw_transfer_error("npu_kv: calls that the scheduler serves: npu_kv_ops was shut down");
    }
    if (Status status = scheduler->open(direction); !status.ok()) {
      throw_transfer_error("npu_kv: no stream for its copies: " + status.message());
    }
    return *scheduler;
  }

  // Null in a forked child too, where its locks may be held for ever.
  CallScheduler* find(int device) const {
    CallScheduler* scheduler =
        device < kMostDevices ? schedulers_[static_cast<size_t>(device)].load() : nullptr;
    return scheduler != nullptr && getpid() == pid_ ? scheduler : nullptr;
  }

  template <typename Visit>
  void for_each(Visit visit) {
    for (int device = 0; device < kMostDevices; ++device) {
      if (CallScheduler* started = find(device)) visit(*started);
    }
  }

 private:
  CallScheduler* start(int device) {
    const std::lock_guard lock(mutex_);
    if (CallScheduler* scheduler = find(device)) return scheduler;
    CallScheduler* scheduler = nullptr;
    const Status status = CallScheduler::start(
        acl_runtime(), acl_signals(), device,
        [device](std::string message) { pending_errors().add(device, std::move(message)); },
        &scheduler);
    if (!status.ok()) {
      throw_transfer_error("npu_kv: the scheduler for npu:" + std::to_string(device) +
                           " could not start: " + status.message());
    }
    schedulers_[static_cast<size_t>(device)].store(scheduler);
    return scheduler;
  }

  const pid_t pid_ = getpid();
  std::mutex mutex_;
  std::array<std::atomic<CallScheduler*>, kMostDevices> schedulers_{};
};

Schedulers& schedulers() {
  static auto* all = new Schedulers;  // their threads run as long as the process
  return *all;
}

}  // namespace

CallScheduler& call_scheduler(int device, Direction direction) {
  CallScheduler& scheduler = schedulers().of(device, direction);
  static const std::string missing = signal_support().missing;
  if (!missing.empty()) throw_transfer_error("npu_kv: calls that the scheduler serves: " + missing);
  return scheduler;
}

void check_deferred_copies(int device) {
  if (CallScheduler* scheduler = schedulers().find(device)) scheduler->check_copies();
}

void check_all_deferred_copies() {
  schedulers().for_each([](CallScheduler& scheduler) {
    const c10_npu::NPUGuard guard(static_cast<c10::DeviceIndex>(scheduler.device()));
    scheduler.check_copies();
  });
}

void stop_deferred_calls(std::chrono::nanoseconds timeout) {
  schedulers().for_each([&](CallScheduler& scheduler) { scheduler.stop(timeout); });
}

CallStats deferred_call_stats(int device) {
  CallScheduler* scheduler = device < 0 ? nullptr : schedulers().find(device);
  return scheduler == nullptr ? CallStats{} : scheduler->stats();
}

}  // namespace npu_kv
