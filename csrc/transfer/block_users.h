// Which job last used a block, so that jobs of different lanes that touch a common block keep their
// order. Jobs of one lane are in order anyway: they run on one stream.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "transfer/block_pairs.h"
#include "transfer/shared_blocks.h"

namespace npu_kv {

enum class Lane { kLoad = 0, kStore = 1 };
inline constexpr int kLanes = 2;
inline constexpr Lane other_lane(Lane lane) {
  return lane == Lane::kLoad ? Lane::kStore : Lane::kLoad;
}

// Job numbers count from 1 in the order of launch. Not thread-safe.
class BlockUsers {
 public:
  BlockUsers(int64_t device_blocks, int64_t host_blocks) {
    for (int lane = 0; lane < kLanes; ++lane) {
      device_[lane].resize(static_cast<size_t>(device_blocks));
      host_[lane].resize(static_cast<size_t>(host_blocks));
    }
  }

  // Enters job `number` as the user of its blocks. Returns the latest job of the other lane that
  // has used one of them, 0 if none has. A store reads device blocks and writes host blocks, a load
  // the reverse, so any block that two lanes share is written by one of them.
  uint64_t enter(uint64_t number, Lane lane, const Runs& runs) {
    const auto own = static_cast<size_t>(lane);
    const auto other = static_cast<size_t>(other_lane(lane));
    const auto& device = lane == Lane::kStore ? runs.src : runs.dst;
    const auto& host = lane == Lane::kStore ? runs.dst : runs.src;
    uint64_t latest = 0;
    for (size_t r = 0; r < device.size(); ++r) {
      const int64_t count = runs.count[r];
      visit(device_[own], device_[other], device[r], count, number, &latest);
      visit(host_[own], host_[other], host[r], count, number, &latest);
    }
    return latest;
  }

  // The latest job of a lane that has used one of the blocks, 0 if none has.
  uint64_t latest(Lane lane, const std::vector<BlockRange>& device,
                  const std::vector<BlockRange>& host) const {
    const auto which = static_cast<size_t>(lane);
    return std::max(latest_in(device_[which], device), latest_in(host_[which], host));
  }

 private:
  using Users = std::vector<uint64_t>;

  static void visit(Users& own, const Users& other, int64_t first, int64_t count, uint64_t number,
                    uint64_t* latest) {
    for (int64_t block = first; block < first + count; ++block) {
      own[static_cast<size_t>(block)] = number;
      *latest = std::max(*latest, other[static_cast<size_t>(block)]);
    }
  }

  static uint64_t latest_in(const Users& users, const std::vector<BlockRange>& blocks) {
    uint64_t latest = 0;
    for (const BlockRange& range : blocks) {
      for (int64_t block = range.first; block < range.first + range.count; ++block) {
        // A view may be longer than the smallest tensor of the pool, beyond which no job goes.
        if (static_cast<size_t>(block) >= users.size()) break;
        latest = std::max(latest, users[static_cast<size_t>(block)]);
      }
    }
    return latest;
  }

  Users device_[kLanes];
  Users host_[kLanes];
};

}  // namespace npu_kv
