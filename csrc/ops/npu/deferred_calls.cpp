#include "ops/npu/deferred_calls.h"

#include <torch_npu/csrc/framework/OpCommand.h>

#include <algorithm>
#include <bit>
#include <string>
#include <utility>

#include "ops/npu/call_schedulers.h"
#include "ops/npu/captured_graphs.h"
#include "ops/npu/host_memory_in_flight.h"
#include "ops/npu/stream_slots.h"
#include "ops/python_border.h"
#include "runtime/acl/acl_signals.h"
#include "runtime/pending_errors.h"

namespace npu_kv {
namespace {

constexpr char kWaitName[] = "npu_kv::swap_blocks_wait";
constexpr size_t kSmallestIdsMemory = 4096;
// The second list begins where both kinds of ids may begin.
constexpr size_t kIdsAlignment = 64;

size_t bytes_of(const at::Tensor& ids) {
  return static_cast<size_t>(ids.numel()) * ids.element_size();
}

size_t dst_offset(const at::Tensor& src_ids) {
  return (bytes_of(src_ids) + kIdsAlignment - 1) / kIdsAlignment * kIdsAlignment;
}

size_t ids_bytes(const DeferredArguments& arguments) {
  if (!arguments.src_ids.defined()) return 0;
  return dst_offset(arguments.src_ids) + bytes_of(arguments.dst_ids);
}

IdList id_view(const at::Tensor& ids, char* memory) {
  return {memory, ids.scalar_type() == at::kLong, static_cast<size_t>(ids.numel())};
}

// Has the call read its ids from the slot's memory.
void bind_ids(DeferredCall& call, const CallSlot& slot, const DeferredArguments& arguments) {
  if (call.ids_are_constants) return;
  auto* memory = static_cast<char*>(slot.ids_memory().get());
  call.src_ids = id_view(arguments.src_ids, memory);
  call.dst_ids = id_view(arguments.dst_ids, memory + dst_offset(arguments.src_ids));
  call.ids_memory = slot.ids_memory();
}

Status read_ids(const at::Tensor& ids, const IdList& to, StreamRef stream) {
  return acl_signals().read_device(const_cast<void*>(to.data), ids.const_data_ptr(), bytes_of(ids),
                                   stream);
}

// Has the stream call the scheduler. An eager call may be gone at any time afterwards.
Status launch(DeferredCall& call, const DeferredArguments& arguments, StreamRef stream) {
  if (!call.ids_are_constants) {
    Status status = read_ids(arguments.src_ids, call.src_ids, stream);
    if (status.ok()) status = read_ids(arguments.dst_ids, call.dst_ids, stream);
    if (!status.ok()) return status;
  }
  return acl_signals().launch_callback(stream, &CallScheduler::on_stream, &call);
}

// The task of a call, which the task queue copies.
struct Launching {
  std::unique_ptr<DeferredCall> call;
  DeferredArguments arguments;
  std::shared_ptr<StartedSwap> ticket;  // null: the stream waits at once
  StreamRef stream;
  StreamSlots* slots = nullptr;
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

std::unique_ptr<CallSlot> new_slot(int device, size_t ids_bytes) {
  const size_t bytes = ids_bytes == 0 ? 0 : std::max(kSmallestIdsMemory, std::bit_ceil(ids_bytes));
  return std::make_unique<CallSlot>(acl_signals(), device, bytes);
}

// One that the stream has waited for, if there is one that fits.
std::unique_ptr<CallSlot> take_slot(StreamSlots& slots, int device, size_t ids_bytes) {
  for (auto& slot : slots.waited_for) {
    if (slot->ids_bytes() < ids_bytes) continue;
    std::swap(slot, slots.waited_for.back());
    auto taken = std::move(slots.waited_for.back());
    slots.waited_for.pop_back();
    return taken;
  }
  return new_slot(device, ids_bytes);
}

// Gives every part of the call a slot; the first has the ids.
template <typename Make>
std::vector<std::unique_ptr<CallSlot>> make_slots(Launching& launching, Make make) {
  std::vector<std::unique_ptr<CallSlot>> slots;
  for (CallPart& part : launching.call->parts) {
    slots.push_back(make(slots.empty() ? ids_bytes(launching.arguments) : 0));
    part.signal = slots.back()->signal();
  }
  bind_ids(*launching.call, *slots.front(), launching.arguments);
  return slots;
}

void issue_eager(Launching& launching) {
  StreamSlots& slots = *launching.slots;
  DeferredCall* const call = launching.call.get();
  const int device = launching.stream.device;
  const std::lock_guard lock(slots.mutex);
  call->number = ++slots.calls;
  const size_t bytes = ids_bytes(launching.arguments);
  if (!slots.shared) slots.shared = new_slot(device, std::max(bytes, kSmallestIdsMemory));
  if (bytes > slots.shared->ids_bytes()) slots.shared->grow(std::bit_ceil(bytes));
  void* const signal = slots.shared->signal();
  call->parts = {{call->transfer.src.size(), signal}};
  bind_ids(*call, *slots.shared, launching.arguments);
  const std::string what = call->describe(device);
  Status status = launch(*call, launching.arguments, launching.stream);
  if (status.ok()) {
    (void)launching.call.release();  // the scheduler's now
    status = acl_signals().wait_signal(launching.stream, signal);
  }
  if (!status.ok()) {
    launching.fail(what + ": " + status.message());
    if (!launching.call) {
      // The stream does not wait for the copies. Nobody will take the signal back, and nobody knows
      // when the tensors are free: both are given up.
      (void)slots.shared.release();
      new std::vector<c10::Storage>(std::move(launching.arguments.storages));
      return;
    }
  }
  if (!launching.arguments.foreign_host.empty()) {
    host_memory_in_flight().hold(std::move(launching.arguments.foreign_host), launching.stream);
  }
}

void start_eager(Launching& launching) {
  StartedSwap& ticket = *launching.ticket;
  StreamSlots& slots = *launching.slots;
  DeferredCall* const call = launching.call.get();
  const int device = launching.stream.device;
  const std::scoped_lock lock(slots.mutex, ticket.mutex);
  call->number = ++slots.calls;
  auto own = make_slots(launching, [&](size_t bytes) { return take_slot(slots, device, bytes); });
  const std::string what = call->describe(device);
  if (Status status = launch(*call, launching.arguments, launching.stream); !status.ok()) {
    for (auto& slot : own) slots.waited_for.push_back(std::move(slot));
    launching.fail(what + ": " + status.message());
    return;
  }
  (void)launching.call.release();  // the scheduler's now
  ticket.launched = true;
  for (const auto& slot : own) ticket.slots.push_back(slot.get());
  ticket.own_slots = std::move(own);
  ticket.storages = std::move(launching.arguments.storages);
  ticket.foreign_host = std::move(launching.arguments.foreign_host);
}

void issue_in_graph(Launching& launching) {
  if (!launching.call->may_be_captured) {
    launching.fail(std::string(launching.call->op) +
                   ": the stream captures a graph, which would copy the blocks of the capture at "
                   "every replay. Nothing was captured: pass the ids as NPU tensors");
    return;
  }
  CapturedGraph& graph = captured_graphs().captured_by(launching.stream);
  auto slots = make_slots(launching, [&](size_t bytes) {
    return std::make_unique<CallSlot>(acl_signals(), launching.stream.device, bytes);
  });
  graph.hold(std::move(launching.arguments.storages));
  std::vector<CallSlot*> started;
  for (const auto& slot : slots) started.push_back(slot.get());
  DeferredCall* const call = graph.add(std::move(launching.call), std::move(slots));
  Status status = launch(*call, launching.arguments, launching.stream);
  if (status.ok() && launching.ticket) {
    StartedSwap& ticket = *launching.ticket;
    const std::lock_guard lock(ticket.mutex);
    ticket.launched = true;
    ticket.graph = graph.number;
    ticket.slots = std::move(started);
    for (CallSlot* slot : ticket.slots) slot->will_be_waited_for();
  } else if (status.ok()) {
    status = acl_signals().wait_signal(launching.stream, call->parts.front().signal);
  }
  if (!status.ok()) {
    launching.fail(std::string(call->op) + " cannot be captured: " + status.message());
  }
}

void issue(Launching& launching) {
  const char* const op = launching.call->op;
  try {
    if (is_capturing(launching.stream)) {
      issue_in_graph(launching);
    } else if (launching.ticket) {
      start_eager(launching);
    } else {
      issue_eager(launching);
    }
  } catch (const std::exception& error) {
    launching.fail(std::string(op) + ": " + error.what());
  }
}

void enqueue(const std::shared_ptr<Launching>& launching, c10_npu::NPUStream stream) {
  const char* const op = launching->call->op;
  at_npu::native::OpCommand::RunOpApiV2(op, [launching]() -> int {
    issue(*launching);
    // Never an error code: it would end the use of the device for the whole process.
    return 0;
  });
  if (!launching->await) return;
  (void)stream.stream();  // a capture that lacks a part must not end well
  if (!launching->failed.empty()) throw_transfer_error(launching->failed);
}

std::shared_ptr<Launching> new_launching(std::unique_ptr<DeferredCall> call,
                                         DeferredArguments arguments, c10_npu::NPUStream stream,
                                         bool await) {
  const int device = stream.device_index();
  call->scheduler = &call_scheduler(device, call->transfer.direction);
  auto launching = std::make_shared<Launching>();
  launching->call = std::move(call);
  launching->arguments = std::move(arguments);
  launching->stream = {stream.stream(false), device};
  launching->slots = &slots_of(stream);
  launching->await = await;
  return launching;
}

// The task of a wait.
struct Waiting {
  std::shared_ptr<StartedSwap> ticket;
  size_t part = 0;
  StreamRef stream;
  StreamSlots* slots = nullptr;
  // Of the start, to be freed with the task and not on the queue's thread.
  std::vector<c10::Storage> storages;
};

Status wait_on_stream(Waiting& waiting) {
  StartedSwap& ticket = *waiting.ticket;
  const std::scoped_lock lock(waiting.slots->mutex, ticket.mutex);
  if (!ticket.launched) return {};  // which was told
  const uint64_t graph =
      is_capturing(waiting.stream) ? captured_graphs().captured_by(waiting.stream).number : 0;
  if (graph != ticket.graph) {
    return {-1, ticket.graph == 0
                    ? "the stream captures a graph, and the swap was started outside of it"
                    : "the swap was started in the capture of a graph, to which this wait does not "
                      "belong"};
  }
  CallSlot& slot = *ticket.slots[waiting.part];
  if (Status status = acl_signals().wait_signal(waiting.stream, slot.signal()); !status.ok()) {
    return status;
  }
  slot.is_waited_for();
  if (graph != 0) return {};
  waiting.slots->waited_for.push_back(std::move(ticket.own_slots[waiting.part]));
  // The tensors are in use until streams wait for all parts, which a refused wait is not.
  const auto& left = ticket.own_slots;
  if (std::any_of(left.begin(), left.end(), [](const auto& own) { return own != nullptr; })) {
    return {};
  }
  waiting.storages = std::move(ticket.storages);
  ticket.storages.clear();
  if (!ticket.foreign_host.empty()) {
    host_memory_in_flight().hold(std::move(ticket.foreign_host), waiting.stream);
    ticket.foreign_host.clear();
  }
  return {};
}

std::string run(Waiting& waiting) {
  try {
    const Status status = wait_on_stream(waiting);
    return status.ok() ? std::string() : kWaitName + (": " + status.message());
  } catch (const std::exception& error) {
    return kWaitName + std::string(": ") + error.what();
  }
}

}  // namespace

void defer(std::unique_ptr<DeferredCall> call, DeferredArguments arguments,
           c10_npu::NPUStream stream, bool await) {
  call->parts = {{call->transfer.src.size(), nullptr}};
  enqueue(new_launching(std::move(call), std::move(arguments), stream, await), stream);
}

void start(std::unique_ptr<DeferredCall> call, DeferredArguments arguments,
           const std::shared_ptr<StartedSwap>& ticket, c10_npu::NPUStream stream, bool await) {
  auto launching = new_launching(std::move(call), std::move(arguments), stream, await);
  launching->ticket = ticket;
  enqueue(launching, stream);
}

void wait_for(const std::shared_ptr<StartedSwap>& ticket, size_t part, c10_npu::NPUStream stream,
              bool await) {
  auto waiting = std::make_shared<Waiting>();
  waiting->ticket = ticket;
  waiting->part = part;
  waiting->stream = {stream.stream(false), stream.device_index()};
  waiting->slots = &slots_of(stream);
  auto failed = std::make_shared<std::string>();
  at_npu::native::OpCommand::RunOpApiV2(kWaitName, [waiting, failed, await]() -> int {
    *failed = run(*waiting);
    if (!await && !failed->empty()) pending_errors().add(waiting->stream.device, *failed);
    return 0;
  });
  if (!await) return;
  (void)stream.stream();
  if (!failed->empty()) throw_transfer_error(*failed);
}

}  // namespace npu_kv
