#include "ops/npu/deferred_calls.h"

#include <torch_npu/csrc/core/npu/NPUGuard.h>
#include <torch_npu/csrc/framework/OpCommand.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <map>
#include <mutex>
#include <utility>

#include "ops/npu/captured_graphs.h"
#include "ops/npu/host_memory_in_flight.h"
#include "ops/python_border.h"
#include "runtime/acl/acl_runtime.h"
#include "runtime/acl/acl_signals.h"
#include "runtime/pending_errors.h"

namespace npu_kv {
namespace {

constexpr int kMostDevices = 64;
constexpr size_t kSmallestIdsMemory = 4096;
// The second list begins where both kinds of ids may begin.
constexpr size_t kIdsAlignment = 64;

// The schedulers of the process, by device.
class Schedulers {
 public:
  // The one of a device, ready for copies of a direction; starts it at the first use. The device
  // must be current.
  CallScheduler& of(int device, Direction direction) {
    TORCH_CHECK(device < kMostDevices, "npu_kv::swap_blocks_batch: npu:", device, " is beyond the ",
                kMostDevices, " devices that are supported");
    if (getpid() != pid_) {
      throw_transfer_error(
          "npu_kv::swap_blocks_batch with block ids on the NPU: this process was forked from the "
          "one that loaded the operator, and an NPU belongs to one process");
    }
    CallScheduler* scheduler = find(device);
    if (scheduler == nullptr) scheduler = start(device);
    if (scheduler->stopped()) {
      throw_transfer_error(
          "npu_kv::swap_blocks_batch with block ids on the NPU: npu_kv_ops was shut down");
    }
    if (Status status = scheduler->open(direction); !status.ok()) {
      throw_transfer_error("npu_kv::swap_blocks_batch: no stream for its copies: " +
                           status.message());
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
      throw_transfer_error("npu_kv::swap_blocks_batch: the scheduler for npu:" +
                           std::to_string(device) + " could not start: " + status.message());
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

// The eager calls of a stream follow one another, each waiting for its copies before the next one's
// ids are read, so they share one slot.
struct StreamSlot {
  std::mutex mutex;  // held while a call is put on the stream, so that two do not mix
  std::unique_ptr<CallSlot> slot;
  uint64_t calls = 0;
};

StreamSlot& slot_of(c10_npu::NPUStream stream) {
  static std::mutex mutex;
  static auto* slots = new std::map<std::pair<int, c10::StreamId>, StreamSlot>;
  const std::lock_guard lock(mutex);
  return (*slots)[{stream.device_index(), stream.id()}];
}

size_t bytes_of(const at::Tensor& ids) {
  return static_cast<size_t>(ids.numel()) * ids.element_size();
}

size_t dst_offset(const at::Tensor& src_ids) {
  return (bytes_of(src_ids) + kIdsAlignment - 1) / kIdsAlignment * kIdsAlignment;
}

size_t ids_bytes(const DeferredArguments& arguments) {
  return dst_offset(arguments.src_ids) + bytes_of(arguments.dst_ids);
}

IdList id_view(const at::Tensor& ids, char* memory) {
  return {memory, ids.scalar_type() == at::kLong, static_cast<size_t>(ids.numel())};
}

// Has the call read its ids from the slot's memory, and its stream wait for the slot's signal.
void bind(DeferredCall& call, const CallSlot& slot, const DeferredArguments& arguments) {
  auto* memory = static_cast<char*>(slot.ids_memory().get());
  call.src_ids = id_view(arguments.src_ids, memory);
  call.dst_ids = id_view(arguments.dst_ids, memory + dst_offset(arguments.src_ids));
  call.ids_memory = slot.ids_memory();
  call.signal = slot.signal();
}

Status read_ids(const at::Tensor& ids, const IdList& to, StreamRef stream) {
  return acl_signals().read_device(const_cast<void*>(to.data), ids.const_data_ptr(), bytes_of(ids),
                                   stream);
}

// Puts the call on the stream. `launched` is called when the stream is going to call the scheduler:
// an eager call may be gone at any time from then on.
template <typename Launched>
Status put_on_stream(DeferredCall& call, const DeferredArguments& arguments, StreamRef stream,
                     Launched launched) {
  AclSignals& runtime = acl_signals();
  if (Status status = read_ids(arguments.src_ids, call.src_ids, stream); !status.ok()) {
    return status;
  }
  if (Status status = read_ids(arguments.dst_ids, call.dst_ids, stream); !status.ok()) {
    return status;
  }
  void* const signal = call.signal;
  Status status = runtime.launch_callback(stream, &CallScheduler::on_stream, &call);
  if (!status.ok()) return status;
  launched();
  return runtime.wait_signal(stream, signal);
}

// A call on its way through the task queue, which copies its tasks.
struct Launching {
  std::unique_ptr<DeferredCall> call;
  DeferredArguments arguments;
  StreamRef stream;
  StreamSlot* slot = nullptr;
  bool await = false;
  std::string failed;  // for the caller that awaits it

  void fail(const std::string& message) {
    if (await) {
      failed = message;
    } else {
      pending_errors().add(stream.device, message);
    }
  }
};

void issue_eager(Launching& launching) {
  StreamSlot& slot = *launching.slot;
  DeferredCall* const call = launching.call.get();
  const std::lock_guard lock(slot.mutex);
  call->number = ++slot.calls;
  const size_t bytes = ids_bytes(launching.arguments);
  if (!slot.slot) {
    slot.slot = std::make_unique<CallSlot>(acl_signals(), launching.stream.device,
                                           std::max(kSmallestIdsMemory, std::bit_ceil(bytes)));
  }
  if (bytes > slot.slot->ids_bytes()) slot.slot->grow(std::bit_ceil(bytes));
  bind(*call, *slot.slot, launching.arguments);
  const std::string what = call->describe(launching.stream.device);
  const Status status = put_on_stream(*call, launching.arguments, launching.stream, [&] {
    (void)launching.call.release();  // the scheduler's now
  });
  if (!status.ok()) {
    launching.fail(what + ": " + status.message());
    if (!launching.call) {
      // The stream does not wait for the copies. Nobody will take the signal back, and nobody knows
      // when the tensors are free: both are given up.
      (void)slot.slot.release();
      new std::vector<c10::Storage>(std::move(launching.arguments.storages));
      return;
    }
  }
  if (!launching.arguments.foreign_host.empty()) {
    host_memory_in_flight().hold(std::move(launching.arguments.foreign_host), launching.stream);
  }
}

void issue_in_graph(Launching& launching) {
  CapturedGraph& graph = captured_graphs().captured_by(launching.stream);
  auto slot = std::make_unique<CallSlot>(acl_signals(), launching.stream.device,
                                         ids_bytes(launching.arguments));
  bind(*launching.call, *slot, launching.arguments);
  graph.hold(std::move(launching.arguments.storages));
  DeferredCall* const call = graph.add(std::move(launching.call), std::move(slot));
  const Status status = put_on_stream(*call, launching.arguments, launching.stream, [] {});
  if (!status.ok()) {
    launching.fail("npu_kv::swap_blocks_batch cannot be captured: " + status.message());
  }
}

void issue(Launching& launching) {
  try {
    if (is_capturing(launching.stream)) {
      issue_in_graph(launching);
    } else {
      issue_eager(launching);
    }
  } catch (const std::exception& error) {
    launching.fail(std::string("npu_kv::swap_blocks_batch: ") + error.what());
  }
}

}  // namespace

void defer(std::unique_ptr<DeferredCall> call, DeferredArguments arguments,
           c10_npu::NPUStream stream, bool await) {
  const int device = stream.device_index();
  CallScheduler& scheduler = schedulers().of(device, call->transfer.direction);
  static const std::string missing = signal_support().missing;
  if (!missing.empty()) {
    throw_transfer_error("npu_kv::swap_blocks_batch with block ids on the NPU: " + missing);
  }
  call->scheduler = &scheduler;
  auto launching = std::make_shared<Launching>();
  launching->call = std::move(call);
  launching->arguments = std::move(arguments);
  launching->stream = {stream.stream(false), device};
  launching->slot = &slot_of(stream);
  launching->await = await;
  at_npu::native::OpCommand::RunOpApiV2("npu_kv::swap_blocks_batch", [launching]() -> int {
    issue(*launching);
    // Never an error code: it would end the use of the device for the whole process.
    return 0;
  });
  if (!await) return;
  (void)stream.stream();  // a capture that lacks a part must not end well
  if (!launching->failed.empty()) throw_transfer_error(launching->failed);
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
