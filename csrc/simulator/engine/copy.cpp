#include "engine/copy.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "engine/error.h"

namespace npu_kv::sim {
namespace {

int64_t transfer_ns(int64_t bytes, int64_t bytes_per_second) {
  return static_cast<int64_t>(static_cast<__int128>(bytes) * 1'000'000'000 / bytes_per_second);
}

/// The splitmix64 generator: cheap to start, and neighbouring seeds give unrelated numbers, which
/// matters for batches of two items.
class Random {
 public:
  using result_type = uint64_t;
  explicit Random(uint64_t seed) : state_(seed) {}
  static constexpr uint64_t min() { return 0; }
  static constexpr uint64_t max() { return UINT64_MAX; }
  uint64_t operator()() {
    uint64_t mixed = state_ += 0x9e3779b97f4a7c15;
    mixed = (mixed ^ (mixed >> 30)) * 0xbf58476d1ce4e5b9;
    mixed = (mixed ^ (mixed >> 27)) * 0x94d049bb133111eb;
    return mixed ^ (mixed >> 31);
  }

 private:
  uint64_t state_;
};

/// A new order at every call, the same sequence of orders for the same seed.
std::vector<uint32_t> shuffled_order(size_t count, int64_t seed) {
  static std::atomic<uint64_t> draws{0};
  std::vector<uint32_t> order(count);
  std::iota(order.begin(), order.end(), 0);
  Random random(Random(static_cast<uint64_t>(seed))() + ++draws);
  std::shuffle(order.begin(), order.end(), random);
  return order;
}

}  // namespace

int64_t bandwidth(const Settings& settings, Direction direction) {
  switch (direction) {
    case Direction::kH2D:
      return settings.h2d_bytes_per_second;
    case Direction::kD2H:
      return settings.d2h_bytes_per_second;
    case Direction::kD2D:
      return settings.d2d_bytes_per_second;
    case Direction::kH2H:
      break;
  }
  return settings.h2h_bytes_per_second;
}

int64_t device_time_ns(const Settings& settings, int64_t bytes) {
  return transfer_ns(bytes, settings.d2d_bytes_per_second);
}

void check_live(const std::shared_ptr<Allocation>& allocation) {
  if (allocation && !allocation->live) {
    throw SimulatorError(ACL_ERROR_RT_SYS_DMA,
                         "EE1003: a task uses memory that was freed after the task was submitted");
  }
}

void CopySet::keep(const std::shared_ptr<Allocation>& allocation) {
  if (!allocation) {
    pageable_ = true;
    return;
  }
  // Items mostly come in runs of the same two allocations.
  const size_t recent = std::min<size_t>(allocations_.size(), 4);
  for (size_t i = 1; i <= recent; ++i) {
    if (allocations_[allocations_.size() - i] == allocation) return;
  }
  allocations_.push_back(allocation);
}

void CopySet::add(const Location& destination, const Location& source, size_t bytes) {
  keep(destination.allocation);
  keep(source.allocation);
  items_.push_back(
      {destination.storage, source.storage, bytes, direction_of(source.place, destination.place)});
  bytes_ += static_cast<int64_t>(bytes);
}

int64_t CopySet::duration_ns() const {
  const Settings& settings = Engine::get().settings;
  int64_t total = 0;
  for (const Item& item : items_) {
    total += settings.copy_ns +
             transfer_ns(static_cast<int64_t>(item.bytes), bandwidth(settings, item.direction));
  }
  return total;
}

void CopySet::note(const TaskOrder& runner) const {
  RaceChecker::Accesses accesses(Engine::get().races, runner, allocations_, items_.size() > 1);
  for (const Item& item : items_) {
    accesses.read(item.source, item.bytes);
    accesses.write(item.destination, item.bytes);
  }
}

void CopySet::move(const TaskOrder* runner) const {
  Engine& engine = Engine::get();
  if (runner != nullptr) note(*runner);
  for (const auto& allocation : allocations_) check_live(allocation);
  std::vector<uint32_t> order;
  if (items_.size() > 1 && engine.settings.shuffle) {
    order = shuffled_order(items_.size(), engine.settings.seed);
  }
  const bool move_payload = engine.settings.move_payload != 0;
  for (size_t i = 0; i < items_.size(); ++i) {
    const Item& item = items_[order.empty() ? i : order[i]];
    engine.faults.check_copy();
    if (move_payload) std::memmove(item.destination, item.source, item.bytes);
    engine.counters.count_copy(item.direction, static_cast<int64_t>(item.bytes));
  }
}

void CopySet::run(TaskRun& run) const {
  move(run.order.get());
  run.advance(duration_ns());
}

void CopySet::run_on_host() const {
  Engine& engine = Engine::get();
  const HostAccess access(engine.races, "copy");
  move(access.order());
  engine.host_spends(duration_ns());
  Engine::Lock lock(engine.mutex);
  engine.changed.notify_all();  // a stream may wait for a word this has written
}

}  // namespace npu_kv::sim
