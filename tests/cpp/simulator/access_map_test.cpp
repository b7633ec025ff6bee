// Vector clocks and the map of accesses, against a model that keeps the history of every byte.
#include "engine/access_map.h"

#include <algorithm>
#include <random>
#include <set>
#include <tuple>

#include "check.h"
#include "engine/vector_clock.h"

using npu_kv::sim::AccessMap;
using npu_kv::sim::Moment;
using npu_kv::sim::VectorClock;

namespace {

struct Actor {
  Moment moment;
  int id;
};
using Map = AccessMap<Actor>;
using ActorRef = Map::ActorRef;
/// byte, earlier actor, whether it wrote
using Found = std::set<std::tuple<uintptr_t, int, bool>>;

VectorClock clock_of(std::initializer_list<Moment> moments) {
  VectorClock clock;
  for (const Moment& moment : moments) clock.add(moment);
  return clock;
}

ActorRef actor(Moment moment, int id = 0) {
  return std::make_shared<const Actor>(Actor{moment, id});
}

struct Collector {
  Found& found;
  void operator()(uintptr_t begin, uintptr_t end, const ActorRef& earlier, bool wrote) const {
    CHECK(begin < end);
    for (uintptr_t at = begin; at < end; ++at) found.emplace(at, earlier->id, wrote);
  }
};

/// What the map does, byte by byte.
class Model {
 public:
  void write(uintptr_t begin, uintptr_t end, const Map::Access& access, Found& found) {
    for (uintptr_t at = begin; at < end; ++at) {
      Byte& byte = bytes_[at];
      look(at, byte, access.clock, true, found);
      byte = {access.actor, {}};
    }
  }
  void read(uintptr_t begin, uintptr_t end, const Map::Access& access, Found& found) {
    for (uintptr_t at = begin; at < end; ++at) {
      look(at, bytes_[at], access.clock, false, found);
      bytes_[at].reads.push_back(access.actor);
    }
  }
  void forget(uintptr_t begin, uintptr_t end, const VectorClock& clock, Found& found) {
    for (uintptr_t at = begin; at < end; ++at) {
      look(at, bytes_[at], clock, true, found);
      bytes_.erase(at);
    }
  }

 private:
  struct Byte {
    ActorRef write;
    std::vector<ActorRef> reads;
  };
  static void look(uintptr_t at, const Byte& byte, const VectorClock& clock, bool reads_too,
                   Found& found) {
    if (byte.write && !clock.has(byte.write->moment)) found.emplace(at, byte.write->id, true);
    if (!reads_too) return;
    for (const ActorRef& read : byte.reads) {
      if (!clock.has(read->moment)) found.emplace(at, read->id, false);
    }
  }
  std::map<uintptr_t, Byte> bytes_;
};

}  // namespace

TEST(a_clock_has_the_steps_it_was_told_of) {
  VectorClock clock = clock_of({{1, 3}, {4, 1}});
  CHECK(clock.has({1, 3}));
  CHECK(clock.has({1, 2}));
  CHECK(!clock.has({1, 4}));
  CHECK(!clock.has({2, 1}));
  CHECK(!clock.has({9, 1}));
  clock.add({1, 2});  // older: nothing is forgotten
  CHECK(clock.has({1, 3}));
  clock.join(clock_of({{1, 1}, {6, 5}}));
  CHECK(clock.has({1, 3}));
  CHECK(clock.has({6, 5}));
  CHECK(clock.covers(clock_of({{4, 1}, {6, 2}})));
  CHECK(!clock.covers(clock_of({{4, 2}})));
  CHECK(!clock.covers(clock_of({{12, 1}})));
  CHECK(VectorClock().covers(VectorClock()));
}

TEST(neighbours_with_one_history_are_one_entry) {
  Map map;
  Found found;
  const VectorClock clock = clock_of({{1, 1}});
  const Map::Access access{actor({1, 1}), clock};
  for (uintptr_t at = 0; at < 64; at += 2) map.write(at, at + 1, access, Collector{found});
  CHECK_EQUAL(map.size(), 32u);
  for (uintptr_t at = 1; at < 64; at += 2) map.write(at, at + 1, access, Collector{found});
  CHECK_EQUAL(map.size(), 1u);
  map.read(10, 20, access, Collector{found});
  CHECK_EQUAL(map.size(), 3u);
  map.write(0, 64, access, Collector{found});
  CHECK_EQUAL(map.size(), 1u);
  CHECK(found.empty());  // one actor does not collide with itself
}

TEST(items_without_an_order_collide_with_their_own_actor) {
  Map map;
  Found found;
  const VectorClock clock = clock_of({{1, 1}});
  const Map::Access access{actor({1, 1}, 7), clock, /*unordered=*/true};
  map.read(0, 8, access, Collector{found});
  map.read(0, 8, access, Collector{found});
  CHECK(found.empty());
  map.write(6, 10, access, Collector{found});
  CHECK((found == Found{{6, 7, false}, {7, 7, false}}));
}

TEST(what_everybody_has_seen_is_dropped_and_nothing_else) {
  Map map;
  Found found;
  const VectorClock nothing;
  map.write(0, 4, {actor({1, 1}, 1), nothing}, Collector{found});
  map.write(8, 12, {actor({2, 5}, 2), nothing}, Collector{found});
  map.read(16, 20, {actor({3, 1}, 3), nothing}, Collector{found});
  map.prune(clock_of({{1, 1}, {2, 4}, {3, 9}}));
  CHECK_EQUAL(map.size(), 1u);
  map.write(0, 20, {actor({4, 1}, 4), nothing}, Collector{found});
  CHECK((found == Found{{8, 2, true}, {9, 2, true}, {10, 2, true}, {11, 2, true}}));
}

TEST(the_last_write_of_a_byte_is_known) {
  Map map;
  Found found;
  const VectorClock nothing;
  map.write(4, 8, {actor({1, 1}, 1), nothing}, Collector{found});
  map.read(0, 12, {actor({2, 1}, 2), nothing}, Collector{found});
  CHECK(map.last_write(3) == nullptr);
  CHECK_EQUAL(map.last_write(4)->id, 1);
  CHECK_EQUAL(map.last_write(7)->id, 1);
  CHECK(map.last_write(8) == nullptr);
  CHECK(map.last_write(100) == nullptr);
}

TEST(random_accesses_collide_as_in_the_model) {
  constexpr uint32_t kComponents = 4;
  constexpr uintptr_t kBytes = 40;
  int collisions = 0;
  for (unsigned seed = 0; seed < 300; ++seed) {
    std::mt19937 random(seed);
    const auto draw = [&](uint64_t below) { return random() % below; };
    Map map;
    Model model;
    std::vector<VectorClock> clocks(kComponents);
    std::vector<uint64_t> steps(kComponents, 0);
    for (int id = 0; id < 60; ++id) {
      const auto own = static_cast<uint32_t>(draw(kComponents));
      if (draw(3) == 0) clocks[own].join(clocks[draw(kComponents)]);
      const Moment moment{own, ++steps[own]};
      clocks[own].add(moment);
      const Map::Access access{actor(moment, id), clocks[own]};
      const uintptr_t begin = draw(kBytes);
      const uintptr_t end = begin + draw(12);
      Found found;
      Found expected;
      switch (draw(5)) {
        case 0:
          map.forget(begin, end, clocks[own], Collector{found});
          model.forget(begin, end, clocks[own], expected);
          break;
        case 1:
        case 2:
          map.write(begin, end, access, Collector{found});
          model.write(begin, end, access, expected);
          break;
        default:
          map.read(begin, end, access, Collector{found});
          model.read(begin, end, access, expected);
      }
      // The map forgets a read that a later one comes after: then the later one collides as well.
      for (const auto& each : found) CHECK(expected.contains(each));
      std::set<std::pair<uintptr_t, bool>> colliding;
      for (const auto& [at, who, wrote] : found) colliding.emplace(at, wrote);
      for (const auto& [at, who, wrote] : expected) CHECK(colliding.contains({at, wrote}));
      collisions += static_cast<int>(found.size());
    }
  }
  CHECK(collisions > 1000);
}

int main() { return check::run_all(); }
