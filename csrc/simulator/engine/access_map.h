// Who used which bytes last: for every byte the last write and the reads since, as far as later
// accesses can still collide with them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "engine/vector_clock.h"

namespace npu_kv::sim {

/// `Actor` has a `moment`. Neighbouring bytes with the same history are one entry, so the size goes
/// with the number of pieces that differ and not with their bytes. Not thread-safe.
template <typename Actor>
class AccessMap {
 public:
  using ActorRef = std::shared_ptr<const Actor>;

  struct Access {
    ActorRef actor;
    VectorClock const& clock;  // what happened before the access, and itself
    /// The access is one of several of the same actor that have no order among themselves.
    bool unordered = false;
  };

  /// Calls found(begin, end, earlier actor, whether that one wrote) for each piece of an earlier
  /// access that is not ordered before this one, then notes this one in its place.
  template <typename Found>
  void write(uintptr_t begin, uintptr_t end, const Access& access, Found&& found) {
    if (begin >= end) return;
    const auto first = split(begin);
    auto entry = first;
    for (; entry != entries_.end() && entry->first < end; ++entry) {
      cut(entry, end);
      const History& history = entry->second.history;
      if (collides(history.write, access)) {
        found(entry->first, entry->second.end, history.write, true);
      }
      for (const ActorRef& read : history.reads) {
        if (collides(read, access)) found(entry->first, entry->second.end, read, false);
      }
    }
    entry = entries_.erase(first, entry);
    entry = entries_.emplace_hint(entry, begin, Entry{end, {access.actor, {}}});
    merge_around(entry);
  }

  template <typename Found>
  void read(uintptr_t begin, uintptr_t end, const Access& access, Found&& found) {
    if (begin >= end) return;
    auto entry = split(begin);
    for (uintptr_t at = begin; at < end;) {
      if (entry == entries_.end() || entry->first > at) {  // nothing is known of these bytes yet
        const uintptr_t gap = entry == entries_.end() ? end : std::min(end, entry->first);
        entry = entries_.emplace_hint(entry, at, Entry{gap, {}});
      }
      cut(entry, end);
      History& history = entry->second.history;
      if (collides(history.write, access)) {
        found(entry->first, entry->second.end, history.write, true);
      }
      add_read(history, access);
      at = entry->second.end;
      entry = std::next(merge_with_previous(entry));
    }
    if (entry != entries_.end()) merge_with_previous(entry);
  }

  /// Forgets the bytes, after found(begin, end, actor, whether it wrote) for each access that
  /// `clock` has not seen.
  template <typename Found>
  void forget(uintptr_t begin, uintptr_t end, const VectorClock& clock, Found&& found) {
    const auto first = split(begin);
    auto entry = first;
    for (; entry != entries_.end() && entry->first < end; ++entry) {
      cut(entry, end);
      const History& history = entry->second.history;
      if (history.write && !clock.has(history.write->moment)) {
        found(entry->first, entry->second.end, history.write, true);
      }
      for (const ActorRef& read : history.reads) {
        if (!clock.has(read->moment)) found(entry->first, entry->second.end, read, false);
      }
    }
    entries_.erase(first, entry);
  }

  /// Drops what is ordered before everything that is still to come.
  void prune(const VectorClock& floor) {
    for (auto entry = entries_.begin(); entry != entries_.end();) {
      History& history = entry->second.history;
      std::erase_if(history.reads, [&](const ActorRef& read) { return floor.has(read->moment); });
      if (history.write && floor.has(history.write->moment)) history.write.reset();
      const bool empty = !history.write && history.reads.empty();
      entry = empty ? entries_.erase(entry) : std::next(entry);
    }
  }

  /// The last write of the byte; null when there was none that matters.
  ActorRef last_write(uintptr_t address) const {
    auto entry = entries_.upper_bound(address);
    if (entry == entries_.begin()) return nullptr;
    --entry;
    return address < entry->second.end ? entry->second.history.write : nullptr;
  }

  size_t size() const { return entries_.size(); }
  void clear() { entries_.clear(); }

 private:
  struct History {
    ActorRef write;
    std::vector<ActorRef> reads;
    bool operator==(const History&) const = default;
  };
  struct Entry {
    uintptr_t end;
    History history;
  };
  using Entries = std::map<uintptr_t, Entry>;
  using Place = typename Entries::iterator;

  static bool collides(const ActorRef& earlier, const Access& access) {
    if (!earlier) return false;
    if (earlier == access.actor) return access.unordered;
    return !access.clock.has(earlier->moment);
  }

  static void add_read(History& history, const Access& access) {
    // A read that this one comes after says nothing more: what comes after this comes after both.
    std::erase_if(history.reads,
                  [&](const ActorRef& read) { return access.clock.has(read->moment); });
    history.reads.push_back(access.actor);
  }

  /// Lets an entry begin at `at` if one covers it; returns the first that begins at or behind it.
  Place split(uintptr_t at) {
    auto entry = entries_.lower_bound(at);
    if (entry == entries_.begin()) return entry;
    const auto before = std::prev(entry);
    if (before->second.end <= at) return entry;
    return divide(before, at);
  }
  void cut(Place entry, uintptr_t at) {
    if (entry->second.end > at) divide(entry, at);
  }
  Place divide(Place entry, uintptr_t at) {
    const auto behind = entries_.emplace_hint(std::next(entry), at, entry->second);
    entry->second.end = at;
    return behind;
  }

  Place merge_with_previous(Place entry) {
    if (entry == entries_.begin()) return entry;
    const auto before = std::prev(entry);
    if (before->second.end != entry->first || before->second.history != entry->second.history) {
      return entry;
    }
    before->second.end = entry->second.end;
    entries_.erase(entry);
    return before;
  }
  void merge_around(Place entry) {
    entry = merge_with_previous(entry);
    if (std::next(entry) != entries_.end()) merge_with_previous(std::next(entry));
  }

  Entries entries_;
};

}  // namespace npu_kv::sim
