#include "runtime/host_runtime.h"

#include <cstring>
#include <numeric>

#include "runtime/streaming_copy.h"

namespace npu_kv {
namespace {

// There is no call to save by longer batches here: this size keeps the descriptors in the L1 cache.
constexpr size_t kHostBatch = 512;

// A batch of this many bytes goes past the caches: with sources and destinations together it would
// fill a good part of the last level, and push out what others have there.
constexpr size_t kStreamingBytes = size_t{8} << 20;

constexpr int kWrongDirection = 1;

}  // namespace

const char* direction_name(Direction direction) {
  switch (direction) {
    case Direction::kHostToDevice:
      return "host to device";
    case Direction::kDeviceToHost:
      return "device to host";
    case Direction::kDeviceToDevice:
      return "device to device";
    case Direction::kHostToHost:
      return "host to host";
  }
  return "unknown direction";
}

size_t HostRuntime::batch_limit() const { return kHostBatch; }

Status HostRuntime::copy(const Descriptors& copies, Direction direction, StreamRef) {
  if (direction != Direction::kHostToHost) {
    return {kWrongDirection,
            std::string("the host runtime cannot copy ") + direction_name(direction)};
  }
  if (std::accumulate(copies.size, copies.size + copies.count, size_t{0}) >= kStreamingBytes) {
    copy_streaming(copies);
    return {};
  }
  for (size_t i = 0; i < copies.count; ++i) {
    std::memcpy(copies.dst[i], copies.src[i], copies.size[i]);
  }
  return {};
}

Status HostRuntime::place_of(const void*, MemoryPlace* place) {
  *place = {MemoryKind::kPageableHost, -1};
  return {};
}

Status HostRuntime::allocation_of(const void*, MemoryRange*) {
  return {kNotSupported, "the host runtime knows no allocations"};
}

HostRuntime& host_runtime() {
  static HostRuntime runtime;
  return runtime;
}

}  // namespace npu_kv
