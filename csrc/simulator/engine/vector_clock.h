// Vector clocks: what has happened before a moment, of every component (a stream, the host) that
// has steps of its own.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace npu_kv::sim {

/// One step of one component. Steps count from 1.
struct Moment {
  uint32_t component = 0;
  uint64_t step = 0;
};

class VectorClock {
 public:
  uint64_t at(uint32_t component) const {
    return component < steps_.size() ? steps_[component] : 0;
  }
  bool has(const Moment& moment) const { return at(moment.component) >= moment.step; }

  void add(const Moment& moment) {
    if (moment.component >= steps_.size()) steps_.resize(moment.component + 1);
    steps_[moment.component] = std::max(steps_[moment.component], moment.step);
  }
  void join(const VectorClock& other) {
    if (other.steps_.size() > steps_.size()) steps_.resize(other.steps_.size());
    for (size_t i = 0; i < other.steps_.size(); ++i) {
      steps_[i] = std::max(steps_[i], other.steps_[i]);
    }
  }
  /// Whether everything in `other` is in this one too.
  bool covers(const VectorClock& other) const {
    for (size_t i = 0; i < other.steps_.size(); ++i) {
      if (other.steps_[i] > at(static_cast<uint32_t>(i))) return false;
    }
    return true;
  }

 private:
  std::vector<uint64_t> steps_;
};

/// A clock that nobody changes any more; null where order is not tracked.
using ClockRef = std::shared_ptr<const VectorClock>;

}  // namespace npu_kv::sim
