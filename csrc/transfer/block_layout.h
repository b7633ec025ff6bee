// Where the blocks of one tensor lie in memory: all that the transfer layer knows about a tensor.
#pragma once

#include <cstdint>

namespace npu_kv {

enum class PlaceKind : int32_t { kHost = 0, kDevice = 1 };

struct Place {
  PlaceKind kind = PlaceKind::kHost;
  int32_t device = -1;  // device index, -1 on the host

  bool operator==(const Place&) const = default;
};

// Block i occupies the bytes [base + i * block_stride, ... + payload_bytes), i in [0, num_blocks).
// block_stride >= payload_bytes. Plain data without padding, so that layouts can be compared as
// bytes.
struct BlockLayout {
  int64_t base = 0;
  int64_t block_stride = 0;   // bytes
  int64_t payload_bytes = 0;  // bytes
  int64_t num_blocks = 0;
  Place place;

  bool operator==(const BlockLayout&) const = default;
  bool empty() const { return num_blocks == 0 || payload_bytes == 0; }
  int64_t end() const { return base + (num_blocks - 1) * block_stride + payload_bytes; }
};

static_assert(sizeof(BlockLayout) == 40);

}  // namespace npu_kv
