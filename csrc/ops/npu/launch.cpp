#include "ops/npu/launch.h"

#include <exception>
#include <mutex>
#include <utility>

#include "ops/npu/captured_graphs.h"
#include "ops/npu/host_memory_in_flight.h"
#include "runtime/acl/acl_runtime.h"
#include "runtime/pending_errors.h"

namespace npu_kv {
namespace {

constexpr size_t kMostPooled = 64;
constexpr int kNoCode = -1;

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

// For a stream that has become part of a capture since the call.
Status join_graph(Launch& launch) {
  if (!launch.may_be_captured) {
    return {kNoCode,
            "the stream captures a graph, which would copy the blocks of the capture at every "
            "replay. Nothing was captured, so the graph lacks this call: pass the ids as NPU "
            "tensors"};
  }
  captured_graphs().captured_by(launch.stream).hold(launch.storages);
  launch.foreign_host.clear();
  return {};
}

Status issue_copies(Launch& launch) {
  if (!launch.in_graph && is_capturing(launch.stream)) {
    if (Status status = join_graph(launch); !status.ok()) return status;
  }
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
  if (launch.outcome_is_awaited || std::this_thread::get_id() == launch.caller) {
    launch.status = Status(status.code(), describe(launch, status));
  } else {
    pending_errors().add(launch.stream.device, describe(launch, status));
  }
}

}  // namespace npu_kv
