// Copies and fills: what they move, what they cost and what is checked, shared by the single, the
// batched and the synchronous functions.
#pragma once

#include <cstddef>
#include <vector>

#include "engine/counters.h"
#include "engine/engine.h"
#include "engine/memory.h"
#include "engine/task.h"

namespace npu_kv::sim {

/// Copies of one call. The allocations are kept, so that memory freed while a copy is in flight is
/// found out instead of faulting.
class CopySet {
 public:
  struct Item {
    char* destination;
    const char* source;
    size_t bytes;
    Direction direction;
  };

  void reserve(size_t items) { items_.reserve(items); }
  void add(const Location& destination, const Location& source, size_t bytes);

  size_t size() const { return items_.size(); }
  int64_t bytes() const { return bytes_; }
  bool pageable() const { return pageable_; }
  Direction direction() const { return items_.front().direction; }

  /// Moves everything, in a random order if the settings say so; counts and times each item.
  /// Throws 507013 when an allocation was freed in the meantime, or an injected fault.
  void run(TaskRun& run) const;
  /// As run(), for a synchronous call: the time passes on the host's virtual clock.
  void run_on_host() const;

 private:
  int64_t duration_ns() const;
  void keep(const std::shared_ptr<Allocation>& allocation);
  void move(const TaskOrder* runner) const;
  void note(const TaskOrder& runner) const;

  std::vector<Item> items_;
  std::vector<std::shared_ptr<Allocation>> allocations_;
  int64_t bytes_ = 0;
  bool pageable_ = false;
};

/// Throws 507013 when the memory has been freed since it was located.
void check_live(const std::shared_ptr<Allocation>& allocation);

int64_t bandwidth(const Settings& settings, Direction direction);

/// Bytes through the memory of a device, as fills and compute operators move them.
int64_t device_time_ns(const Settings& settings, int64_t bytes);

}  // namespace npu_kv::sim
