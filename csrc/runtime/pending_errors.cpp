#include "runtime/pending_errors.h"

namespace npu_kv {
namespace {

// A device that is lost fails every later call too: the first errors tell, the rest are counted.
constexpr size_t kMostKept = 16;

}  // namespace

void PendingErrors::add(int device, std::string message) {
  std::lock_guard lock(mutex_);
  if (entries_.size() >= kMostKept) {
    ++dropped_;
    return;
  }
  entries_.push_back({device, std::move(message)});
  count_.store(entries_.size(), std::memory_order_release);
}

std::string PendingErrors::take(int device) {
  std::lock_guard lock(mutex_);
  std::string joined;
  auto wanted = [device](const Entry& entry) { return device < 0 || entry.device == device; };
  for (const Entry& entry : entries_) {
    if (!wanted(entry)) continue;
    if (!joined.empty()) joined += "\n";
    joined += entry.message;
  }
  std::erase_if(entries_, wanted);
  count_.store(entries_.size(), std::memory_order_release);
  if (!joined.empty() && dropped_ != 0) {
    joined.append("\n").append(std::to_string(dropped_)).append(" more errors were not kept");
    dropped_ = 0;
  }
  return joined;
}

PendingErrors& pending_errors() {
  // Never destroyed: the task queue's thread may still report while the process ends.
  static auto* errors = new PendingErrors;
  return *errors;
}

}  // namespace npu_kv
