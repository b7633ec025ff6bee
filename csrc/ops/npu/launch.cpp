#include "ops/npu/launch.h"

#include <exception>
#include <mutex>
#include <utility>

#include "ops/npu/host_memory_in_flight.h"
#include "runtime/acl/acl_runtime.h"
#include "runtime/pending_errors.h"

namespace npu_kv {
namespace {

constexpr size_t kMostPooled = 64;

class LaunchPool {
 public:
  Launch* take() {
    std::lock_guard lock(mutex_);
    if (free_.empty()) return new Launch;
    Launch* launch = free_.back();
    free_.pop_back();
    return launch;
  }

  void give_back(Launch* launch) {
    launch->storages.clear();
    launch->foreign_host.clear();
    launch->status = Status{};
    {
      std::lock_guard lock(mutex_);
      if (free_.size() < kMostPooled) {
        free_.push_back(launch);
        return;
      }
    }
    delete launch;
  }

 private:
  std::mutex mutex_;
  std::vector<Launch*> free_;
};

LaunchPool& pool() {
  // Never destroyed: the task queue may hand launches back while the process ends.
  static auto* launches = new LaunchPool;
  return *launches;
}

constexpr int kNoCode = -1;

Status issue_copies(Launch& launch) {
  AclRuntime& runtime = acl_runtime();
  Status status = launch.by_pointers
                      ? issue(launch.pointers.view(), launch.transfer.direction, runtime,
                              launch.stream, launch.batch_limit)
                      : issue(launch.transfer, runtime, launch.stream, launch.batch_limit);
  if (!launch.foreign_host.empty()) {
    host_memory_in_flight().hold(std::move(launch.foreign_host), launch.stream);
    launch.foreign_host.clear();
  }
  return status;
}

std::string describe(Launch& launch, const Status& status) {
  const Direction direction = launch.transfer.direction;
  return std::string("npu_kv::swap_blocks_batch, ") + direction_name(direction) +
         " on npu:" + std::to_string(launch.stream.device) + ": " + status.message() +
         ". Some blocks of that call may have been copied";
}

}  // namespace

std::shared_ptr<Launch> new_launch() {
  return std::shared_ptr<Launch>(pool().take(), [](Launch* launch) { pool().give_back(launch); });
}

void run(Launch& launch) {
  Status status;
  try {
    status = issue_copies(launch);
  } catch (const std::exception& error) {
    status = Status(kNoCode, error.what());  // out of memory
  }
  if (status.ok()) return;
  if (launch.caller_waits || std::this_thread::get_id() == launch.caller) {
    launch.status = Status(status.code(), describe(launch, status));
  } else {
    pending_errors().add(launch.stream.device, describe(launch, status));
  }
}

}  // namespace npu_kv
