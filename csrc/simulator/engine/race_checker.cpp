#include "engine/race_checker.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "engine/stream.h"
#include "engine/task.h"

namespace npu_kv::sim {
namespace {

constexpr size_t kSmallMap = 1 << 14;
constexpr size_t kMostRaces = 1000;
constexpr uint32_t kHost = 0;

std::string describe(const Actor& actor) {
  std::string text = std::string(actor.kind) + "/" + std::to_string(actor.stream) + "/";
  for (const auto& call : {actor.call, actor.replay}) {
    if (call) text += std::string(call->function) + ":" + call->label + "/";
  }
  return text;
}

const Allocation* find(std::span<const std::shared_ptr<Allocation>> allocations,
                       uintptr_t storage) {
  for (const auto& allocation : allocations) {
    if (allocation &&
        storage - reinterpret_cast<uintptr_t>(allocation->storage) < allocation->bytes) {
      return allocation.get();
    }
  }
  return nullptr;
}

}  // namespace

void TaskRun::happens_after(const ClockRef& earlier) {
  if (order && earlier) order->clock.join(*earlier);
}

ClockRef TaskRun::clock() const { return order ? ClockRef(order, &order->clock) : nullptr; }

void RaceChecker::start() {
  (void)CallOrigin::here();  // the first loads a library, better not under a lock
  const std::lock_guard lock(mutex_);
  if (on()) return;
  host_snapshot_.reset();
  prune_at_ = kSmallMap;
  ++session_;
}

void RaceChecker::stop() {
  const std::lock_guard lock(mutex_);
  if (!on()) return;
  ++session_;
  map_.clear();
  open_.clear();
}

size_t RaceChecker::mark() {
  const std::lock_guard lock(mutex_);
  known_.clear();
  return races_.size();
}

std::vector<Race> RaceChecker::take(size_t first) {
  const std::lock_guard lock(mutex_);
  first = std::min(first, races_.size());
  const auto begin = races_.begin() + static_cast<std::ptrdiff_t>(first);
  std::vector<Race> taken(std::make_move_iterator(begin), std::make_move_iterator(races_.end()));
  races_.erase(begin, races_.end());
  known_.clear();
  return taken;
}

uint32_t RaceChecker::add_component() {
  const std::lock_guard lock(mutex_);
  if (!free_components_.empty()) {
    const uint32_t component = free_components_.back();
    free_components_.pop_back();
    return component;
  }
  steps_.push_back(0);
  return static_cast<uint32_t>(steps_.size() - 1);
}

void RaceChecker::drop_component(uint32_t component) {
  const std::lock_guard lock(mutex_);
  free_components_.push_back(component);
}

const ClockRef& RaceChecker::host_snapshot() {
  if (!host_snapshot_) host_snapshot_ = std::make_shared<const VectorClock>(host_);
  return host_snapshot_;
}

std::shared_ptr<const CallOrigin> RaceChecker::submitting(const std::string& label, bool captured) {
  if (!on()) return nullptr;
  auto call = std::make_shared<CallOrigin>(CallOrigin::here());
  call->label = label;
  const std::lock_guard lock(mutex_);
  call->session = session_;
  call->number = ++last_call_;
  if (!captured) {
    call->host = host_snapshot();
    open_.emplace_hint(open_.end(), call->number, call->host);
  }
  return call;
}

void RaceChecker::host_saw(const ClockRef& clock) {
  if (!on() || !clock) return;
  const std::lock_guard lock(mutex_);
  if (host_.covers(*clock)) return;
  host_.join(*clock);
  host_snapshot_.reset();
}

ClockRef RaceChecker::host_clock() {
  if (!on()) return nullptr;
  const std::lock_guard lock(mutex_);
  return host_snapshot();
}

std::shared_ptr<TaskOrder> RaceChecker::begin_on_host(const char* kind) {
  if (!on()) return nullptr;
  auto call = std::make_shared<const CallOrigin>(CallOrigin::here());
  auto actor = std::make_shared<Actor>();
  actor->call = std::move(call);
  actor->kind = kind;
  auto order = std::make_shared<TaskOrder>();
  const std::lock_guard lock(mutex_);
  actor->moment = {kHost, ++steps_[kHost]};
  order->clock = host_;
  order->clock.add(actor->moment);
  order->actor = std::move(actor);
  return order;
}

void RaceChecker::finish_on_host(const std::shared_ptr<TaskOrder>& order) {
  if (!order) return;
  const std::lock_guard lock(mutex_);
  host_.add(order->actor->moment);
  host_snapshot_.reset();
}

void RaceChecker::freed(const std::shared_ptr<Allocation>& allocation) {
  const auto order = begin_on_host("free");
  if (!order) return;
  {
    const std::lock_guard lock(mutex_);
    allocation->freed_by = order->actor;
    const auto base = reinterpret_cast<uintptr_t>(allocation->storage);
    map_.forget(base, base + allocation->bytes, order->clock,
                [&](uintptr_t begin, uintptr_t end, const ActorRef& user, bool wrote) {
                  report({Race::Kind::kFreed, user, order->actor, wrote, true, allocation->place,
                          allocation->address + (begin - base), end - begin});
                });
  }
  finish_on_host(order);
}

std::shared_ptr<TaskOrder> RaceChecker::begin(const Stream& stream, const Task& task) {
  if (!task.origin || task.origin->session != session_) return nullptr;
  auto actor = std::make_shared<Actor>();
  actor->call = task.origin;
  actor->kind = task.kind;
  actor->stream = stream.id;
  actor->handle = &stream;
  actor->task = stream.finished + 1;
  auto order = std::make_shared<TaskOrder>();
  order->clock = *task.origin->host;
  if (stream.clock) order->clock.join(*stream.clock);
  const std::lock_guard lock(mutex_);
  actor->moment = {stream.component, ++steps_[stream.component]};
  order->clock.add(actor->moment);
  order->actor = std::move(actor);
  return order;
}

void RaceChecker::finish(const Task& task) {
  if (!task.origin) return;
  const std::lock_guard lock(mutex_);
  open_.erase(task.origin->number);
}

std::shared_ptr<TaskOrder> RaceChecker::begin_captured(const TaskOrder& replay, const Task& task,
                                                       const VectorClock& before,
                                                       uint32_t component, uint64_t number) {
  auto actor = std::make_shared<Actor>(*replay.actor);
  actor->call = task.origin;
  actor->replay = replay.actor->call;
  actor->kind = task.kind;
  actor->task = number;
  auto order = std::make_shared<TaskOrder>();
  order->clock = before;
  const std::lock_guard lock(mutex_);
  actor->moment = {component, ++steps_[component]};
  order->clock.add(actor->moment);
  order->actor = std::move(actor);
  return order;
}

void RaceChecker::saw_word(TaskOrder& order, const char* storage) {
  const std::lock_guard lock(mutex_);
  const ActorRef writer = map_.last_write(reinterpret_cast<uintptr_t>(storage));
  if (!writer) return;
  order.clock.add(writer->moment);
  if (writer->moment.component == kHost) order.clock.join(host_);
}

void RaceChecker::report(Race race) {
  const std::string key = std::to_string(static_cast<int>(race.kind)) + "/" +
                          std::to_string(static_cast<int>(race.place)) + "/" +
                          describe(*race.first) + describe(*race.second);
  const auto [known, is_new] = known_.emplace(key, races_.size());
  if (!is_new) {
    Race& same = races_[known->second];
    if (same.first == race.first && same.second == race.second) {
      same.first_writes |= race.first_writes;
      same.second_writes |= race.second_writes;
    } else {
      ++same.count;
    }
  } else if (races_.size() < kMostRaces) {
    races_.push_back(std::move(race));
  } else {
    known_.erase(known);
  }
}

void RaceChecker::prune_if_large() {
  if (map_.size() < prune_at_) return;
  // What the host had seen only grows, so the oldest call has the least of all that is to come.
  map_.prune(open_.empty() ? host_ : *open_.begin()->second);
  prune_at_ = std::max(kSmallMap, 2 * map_.size());
}

RaceChecker::Accesses::Accesses(RaceChecker& checker, const TaskOrder& order,
                                std::span<const std::shared_ptr<Allocation>> allocations,
                                bool unordered)
    : checker_(checker),
      order_(order),
      allocations_(allocations),
      unordered_(unordered),
      lock_(checker.mutex_) {
  for (const auto& allocation : allocations) {
    if (!allocation || !allocation->freed_by) continue;
    if (order.clock.has(allocation->freed_by->moment)) continue;  // wrong, but ordered
    checker_.report({Race::Kind::kFreed, allocation->freed_by, order.actor, true, true,
                     allocation->place, allocation->address, allocation->bytes});
  }
}

void RaceChecker::Accesses::read(const char* storage, size_t bytes) { add(storage, bytes, false); }

void RaceChecker::Accesses::write(const char* storage, size_t bytes) { add(storage, bytes, true); }

void RaceChecker::Accesses::add(const char* storage, size_t bytes, bool writes) {
  const auto begin = reinterpret_cast<uintptr_t>(storage);
  const Map::Access access{order_.actor, order_.clock, unordered_};
  const auto found = [&](uintptr_t from, uintptr_t to, const ActorRef& earlier, bool wrote) {
    const Allocation* allocation = find(allocations_, from);
    Race race{earlier == order_.actor ? Race::Kind::kBatch : Race::Kind::kAccess,
              earlier,
              order_.actor,
              wrote,
              writes,
              Place::kPageable,
              from,
              to - from};
    if (allocation != nullptr) {
      race.place = allocation->place;
      race.address =
          allocation->address + (from - reinterpret_cast<uintptr_t>(allocation->storage));
    }
    checker_.report(std::move(race));
  };
  if (writes) {
    checker_.map_.write(begin, begin + bytes, access, found);
  } else {
    checker_.map_.read(begin, begin + bytes, access, found);
  }
  checker_.prune_if_large();
}

}  // namespace npu_kv::sim
