#include "engine/operator_table.h"

#include <cmath>

namespace npu_kv::sim {

OperatorTable& OperatorTable::get() {
  static OperatorTable* table = [] {
    auto* made = new OperatorTable;
    register_fill_operators(*made);
    return made;
  }();
  return *table;
}

void OperatorTable::add(const std::string& type, const Kernel& kernel) {
  const std::lock_guard lock(mutex_);
  kernels_[type] = kernel;
}

bool OperatorTable::find(const std::string& type, Kernel& kernel) const {
  load_operator_library();
  const std::lock_guard lock(mutex_);
  const auto found = kernels_.find(type);
  if (found == kernels_.end()) return false;
  kernel = found->second;
  return true;
}

std::string OperatorTable::types() const {
  const std::lock_guard lock(mutex_);
  std::string text;
  for (const auto& [type, kernel] : kernels_) {
    if (!text.empty()) text += ", ";
    text += type;
  }
  return text;
}

void OperatorCounts::add(const std::string& type, int64_t bytes) {
  const std::lock_guard lock(mutex_);
  Count& count = counts_[type];
  count.calls += 1;
  count.bytes += bytes;
}

std::map<std::string, OperatorCounts::Count> OperatorCounts::snapshot() const {
  const std::lock_guard lock(mutex_);
  return counts_;
}

void OperatorCounts::reset() {
  const std::lock_guard lock(mutex_);
  counts_.clear();
}

OperatorCounts& operator_counts() {
  static auto* counts = new OperatorCounts;
  return *counts;
}

void OperatorCosts::set(const std::string& type, int64_t fixed_ns, int64_t bytes_per_second) {
  const std::lock_guard lock(mutex_);
  costs_[type] = {fixed_ns, bytes_per_second};
}

void OperatorCosts::clear() {
  const std::lock_guard lock(mutex_);
  costs_.clear();
}

int64_t OperatorCosts::duration_ns(const std::string& type, int64_t bytes,
                                   const Settings& settings) const {
  Cost cost{settings.operator_ns, settings.operator_bytes_per_second};
  const std::lock_guard lock(mutex_);
  if (const auto found = costs_.find(type); found != costs_.end()) {
    if (found->second.fixed_ns >= 0) cost.fixed_ns = found->second.fixed_ns;
    if (found->second.bytes_per_second > 0) cost.bytes_per_second = found->second.bytes_per_second;
  }
  return cost.fixed_ns + std::llround(double(bytes) * 1e9 / double(cost.bytes_per_second));
}

OperatorCosts& operator_costs() {
  static auto* costs = new OperatorCosts;
  return *costs;
}

}  // namespace npu_kv::sim
