// What happened on the simulator: exact counts for tests, by direction.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <string>

#include "engine/memory.h"

namespace npu_kv::sim {

enum class Direction { kH2D = 0, kD2H = 1, kD2D = 2, kH2H = 3 };
inline constexpr std::array<const char*, 4> kDirectionNames = {"h2d", "d2h", "d2d", "h2h"};

inline Direction direction_of(Place source, Place destination) {
  const bool from_device = source == Place::kDevice;
  const bool to_device = destination == Place::kDevice;
  if (from_device) return to_device ? Direction::kD2D : Direction::kD2H;
  return to_device ? Direction::kH2D : Direction::kH2H;
}

/// Thread-safe. Copies and bytes are counted when they run, not when they are submitted.
struct Counters {
  std::array<std::atomic<int64_t>, 4> copies{};
  std::array<std::atomic<int64_t>, 4> bytes{};
  std::atomic<int64_t> batches{0};
  std::atomic<int64_t> calls_in_callback{0};

  void count_copy(Direction direction, int64_t size) {
    copies[static_cast<size_t>(direction)] += 1;
    bytes[static_cast<size_t>(direction)] += size;
  }
  void reset() {
    for (auto& value : copies) value = 0;
    for (auto& value : bytes) value = 0;
    batches = 0;
    calls_in_callback = 0;
  }
};

}  // namespace npu_kv::sim
