#include "ops/swap_ticket.h"

#include <ATen/ops/from_blob.h>
#include <c10/util/Exception.h>

#include <unordered_map>
#include <utility>

#include "ops/arguments.h"
#include "runtime/pending_errors.h"

namespace npu_kv {
namespace {

// Tickets by the value of their tensor. Thread-safe.
class Tickets {
 public:
  int64_t add(const std::shared_ptr<SwapTicket>& ticket) {
    const std::lock_guard lock(mutex_);
    tickets_[++last_] = ticket;
    return last_;
  }
  void remove(int64_t number) {
    const std::lock_guard lock(mutex_);
    tickets_.erase(number);
  }
  std::shared_ptr<SwapTicket> find(int64_t number) {
    const std::lock_guard lock(mutex_);
    const auto found = tickets_.find(number);
    return found == tickets_.end() ? nullptr : found->second.lock();
  }

 private:
  std::mutex mutex_;
  std::unordered_map<int64_t, std::weak_ptr<SwapTicket>> tickets_;
  int64_t last_ = 0;
};

Tickets& tickets() {
  static auto* all = new Tickets;  // tensors may be freed while the process ends
  return *all;
}

// The memory of a ticket's tensor.
struct TicketMemory {
  int64_t number = 0;
  std::shared_ptr<SwapTicket> ticket;

  ~TicketMemory() {
    tickets().remove(number);
    if (std::string missing = ticket->missing_waits(); !missing.empty()) {
      pending_errors().add(ticket->device(), std::move(missing));
    }
  }
};

bool same_blocks(const BlockLayout& one, const BlockLayout& other) {
  return one.empty() ? other.empty() : one == other;
}

}  // namespace

std::vector<size_t> parts_of(at::OptionalIntArrayRef parts, size_t tensors) {
  if (!parts.has_value()) return {tensors};
  std::vector<size_t> numbers;
  int64_t sum = 0;
  for (size_t i = 0; i < parts->size(); ++i) {
    const int64_t number = (*parts)[i];
    TORCH_CHECK_VALUE(number > 0, "parts[", i, "] is ", number,
                      "; a part is a positive number of tensors");
    TORCH_CHECK_VALUE(number <= static_cast<int64_t>(tensors) - sum, "parts are ", *parts,
                      ", which are more than the ", tensors, " tensors of src");
    sum += number;
    numbers.push_back(static_cast<size_t>(number));
  }
  TORCH_CHECK_VALUE(sum == static_cast<int64_t>(tensors), "parts are ", *parts,
                    ", which are fewer than the ", tensors, " tensors of src");
  return numbers;
}

SwapTicket::SwapTicket(std::vector<size_t> parts, int device) : device_(device) {
  size_t first = 0;
  for (const size_t tensors : parts) {
    parts_.push_back({first, tensors});
    first += tensors;
  }
  missing_ = parts_.size();
}

SwapTicket::SwapTicket(std::vector<size_t> parts, int device, const BlockTransfer& transfer)
    : SwapTicket(std::move(parts), device) {
  src_ = transfer.src;
  dst_ = transfer.dst;
}

SwapTicket::~SwapTicket() = default;

void SwapTicket::check_tensors(const Part& part, at::TensorList src, at::TensorList dst) const {
  TORCH_CHECK_VALUE(src.size() == part.tensors && dst.size() == part.tensors, "src has ",
                    src.size(), " and dst has ", dst.size(), " tensors; the part has ",
                    part.tensors);
  if (src_.empty()) return;
  BlockTransfer given;
  describe_tensors(src, dst, &given);
  for (size_t i = 0; i < part.tensors; ++i) {
    const bool right = same_blocks(given.src[i], src_[part.first + i]);
    TORCH_CHECK_VALUE(
        right && same_blocks(given.dst[i], dst_[part.first + i]), right ? "dst" : "src", "[", i,
        "] is not the tensor ", part.first + i,
        " of the swap_blocks_start that the ticket is of. In compiled code that happens when a "
        "compiler has cloned it: compile with the options of npu_kv_ops.graph_passes, which leave "
        "no clones");
  }
}

void SwapTicket::take(int64_t part, at::TensorList src, at::TensorList dst) {
  const std::lock_guard lock(mutex_);
  TORCH_CHECK_VALUE(part >= 0 && part < static_cast<int64_t>(parts_.size()), "part is ", part,
                    "; the swap has ", parts_.size(), " parts, counted from 0");
  Part& taken = parts_[static_cast<size_t>(part)];
  TORCH_CHECK_VALUE(!taken.waited, "part ", part,
                    " has been waited for already; each part is waited for once");
  check_tensors(taken, src, dst);
  taken.waited = true;
  --missing_;
}

void SwapTicket::put_back(int64_t part) {
  const std::lock_guard lock(mutex_);
  parts_[static_cast<size_t>(part)].waited = false;
  ++missing_;
}

std::string SwapTicket::missing_waits() const {
  const std::lock_guard lock(mutex_);
  if (missing_ == 0) return {};
  return "npu_kv::swap_blocks_start: " + std::to_string(missing_) + " of " +
         std::to_string(parts_.size()) +
         " parts were never waited for, and the ticket is gone: each needs its "
         "npu_kv::swap_blocks_wait. Nothing was ordered behind their copies";
}

at::Tensor ticket_tensor(std::shared_ptr<SwapTicket> ticket) {
  auto memory = std::make_unique<TicketMemory>();
  memory->number = tickets().add(ticket);
  memory->ticket = std::move(ticket);
  TicketMemory* const raw = memory.release();
  return at::from_blob(&raw->number, {}, [raw](void*) { delete raw; }, at::kLong);
}

std::shared_ptr<SwapTicket> find_ticket(const at::Tensor& ticket) {
  TORCH_CHECK_TYPE(ticket.scalar_type() == at::kLong && ticket.device().is_cpu(), "ticket is a ",
                   ticket.scalar_type(), " tensor on ", ticket.device(),
                   "; it is what npu_kv::swap_blocks_start has returned, int64 on the CPU");
  TORCH_CHECK_VALUE(ticket.dim() == 0, "ticket has shape ", ticket.sizes(),
                    "; it is what npu_kv::swap_blocks_start has returned, without dimensions");
  const int64_t number = *ticket.const_data_ptr<int64_t>();
  std::shared_ptr<SwapTicket> found = tickets().find(number);
  TORCH_CHECK_VALUE(found != nullptr, "ticket is ", number,
                    ", which no npu_kv::swap_blocks_start has returned, or which is gone");
  return found;
}

}  // namespace npu_kv
