// What the tests of the transfer layer share: layouts, a runtime that only records, and the rules
// of a call in their plainest form.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <random>
#include <set>
#include <utility>
#include <vector>

#include "transfer/block_transfer.h"

namespace npu_kv::testing {

inline BlockLayout layout(int64_t base, int64_t stride, int64_t payload, int64_t blocks,
                          Place place = {}) {
  return {base, stride, payload, blocks, place};
}

inline constexpr Place kDevice{PlaceKind::kDevice, 0};

struct Copy {
  int64_t dst;
  int64_t src;
  int64_t size;

  auto operator<=>(const Copy&) const = default;
};

// Records what it is given; optionally refuses one of the batches.
class RecordingRuntime final : public Runtime {
 public:
  const char* name() const override { return "recording"; }
  size_t batch_limit() const override { return 4096; }
  Status place_of(const void*, MemoryPlace*) override { return {}; }
  Status allocation_of(const void*, MemoryRange*) override { return {}; }

  Status copy(const Descriptors& copies, Direction direction, StreamRef stream) override {
    if (refused_batch && *refused_batch == batches.size()) return Status(7, "refused");
    batches.push_back(copies.count);
    directions.insert(direction);
    streams.insert(stream.handle);
    for (size_t i = 0; i < copies.count; ++i) {
      all.push_back({reinterpret_cast<int64_t>(copies.dst[i]),
                     reinterpret_cast<int64_t>(copies.src[i]),
                     static_cast<int64_t>(copies.size[i])});
    }
    return {};
  }

  // Destination byte to source byte. Fails the caller's comparison if a byte is written twice.
  std::map<int64_t, int64_t> bytes() const {
    std::map<int64_t, int64_t> result;
    for (const Copy& copy : all) {
      for (int64_t i = 0; i < copy.size; ++i) {
        if (!result.emplace(copy.dst + i, copy.src + i).second) result[copy.dst + i] = -1;
      }
    }
    return result;
  }

  std::vector<Copy> all;
  std::vector<size_t> batches;
  std::set<Direction> directions;
  std::set<void*> streams;
  std::optional<size_t> refused_batch;
};

// The same mapping, straight from the definition of the operator.
inline std::map<int64_t, int64_t> expected_bytes(const BlockTransfer& call,
                                                 const std::vector<int64_t>& src_ids,
                                                 const std::vector<int64_t>& dst_ids) {
  std::map<int64_t, int64_t> result;
  for (size_t t = 0; t < call.src.size(); ++t) {
    for (size_t i = 0; i < src_ids.size(); ++i) {
      if (src_ids[i] < 0 || dst_ids[i] < 0) continue;
      for (int64_t byte = 0; byte < call.src[t].payload_bytes; ++byte) {
        result[call.dst[t].base + dst_ids[i] * call.dst[t].block_stride + byte] =
            call.src[t].base + src_ids[i] * call.src[t].block_stride + byte;
      }
    }
  }
  return result;
}

// Whether the call writes a byte twice, or writes a byte that it reads.
inline bool conflicts(const BlockTransfer& call, const std::vector<int64_t>& src_ids,
                      const std::vector<int64_t>& dst_ids) {
  std::set<int64_t> written;
  for (size_t t = 0; t < call.dst.size(); ++t) {
    for (size_t i = 0; i < dst_ids.size(); ++i) {
      if (src_ids[i] < 0 || dst_ids[i] < 0) continue;
      for (int64_t byte = 0; byte < call.dst[t].payload_bytes; ++byte) {
        if (!written.insert(call.dst[t].base + dst_ids[i] * call.dst[t].block_stride + byte).second)
          return true;
      }
    }
  }
  for (size_t t = 0; t < call.src.size(); ++t) {
    if (call.src[t].place != call.dst[t].place) continue;
    for (size_t i = 0; i < src_ids.size(); ++i) {
      if (src_ids[i] < 0 || dst_ids[i] < 0) continue;
      for (int64_t byte = 0; byte < call.src[t].payload_bytes; ++byte) {
        if (written.count(call.src[t].base + src_ids[i] * call.src[t].block_stride + byte))
          return true;
      }
    }
  }
  return false;
}

inline IdList ids(const std::vector<int64_t>& list) { return {list.data(), true, list.size()}; }
inline IdList ids(const std::vector<int32_t>& list) { return {list.data(), false, list.size()}; }

}  // namespace npu_kv::testing
