// Durations in buckets whose width grows with the value (within 1/16), in fixed memory.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>

namespace npu_kv {

// Not thread-safe.
class LatencyHistogram {
 public:
  void add(int64_t ns) {
    ++counts_[bucket(ns)];
    ++total_;
  }

  int64_t total() const { return total_; }

  // The value below which `share` (0 to 1) of the durations lie, ns; 0 when there are none.
  int64_t quantile(double share) const {
    const auto wanted = static_cast<int64_t>(share * static_cast<double>(total_));
    int64_t seen = 0;
    for (size_t i = 0; i < counts_.size(); ++i) {
      seen += counts_[i];
      if (seen > wanted) return upper_bound(i);
    }
    return total_ == 0 ? 0 : upper_bound(counts_.size() - 1);
  }

 private:
  static constexpr int kSteps = 16;  // per power of two

  static size_t bucket(int64_t ns) {
    const auto value = static_cast<uint64_t>(ns < 0 ? 0 : ns);
    if (value < kSteps) return value;
    const int exponent = std::bit_width(value) - 5;  // value >> exponent is in [16, 32)
    return static_cast<size_t>(exponent + 1) * kSteps + ((value >> exponent) - kSteps);
  }

  static int64_t upper_bound(size_t index) {
    if (index < kSteps) return static_cast<int64_t>(index);
    const auto exponent = static_cast<int>(index / kSteps) - 1;
    return static_cast<int64_t>(((index % kSteps) + kSteps + 1) << exponent) - 1;
  }

  std::array<int64_t, 61 * kSteps> counts_{};
  int64_t total_ = 0;
};

}  // namespace npu_kv
