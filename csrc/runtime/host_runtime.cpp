#include "runtime/host_runtime.h"

#include <atomic>
#include <chrono>
#include <cstring>
#include <numeric>

#include "runtime/streaming_copy.h"

namespace npu_kv {
namespace {

Status no_graphs() { return {kNotSupported, "the host runtime has no graphs"}; }

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

Status HostRuntime::use_device(int) { return {}; }

Status HostRuntime::create_stream(int, StreamRef* stream) {
  *stream = {};
  return {};
}

void HostRuntime::destroy_stream(StreamRef) {}

Status HostRuntime::create_event(void** event) {
  *event = new std::atomic<uint64_t>(0);
  return {};
}

void HostRuntime::destroy_event(void* event) { delete static_cast<std::atomic<uint64_t>*>(event); }

Status HostRuntime::record_event(void* event, StreamRef) {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  *static_cast<std::atomic<uint64_t>*>(event) =
      static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::microseconds>(now).count());
  return {};
}

Status HostRuntime::wait_event(StreamRef, void*) { return {}; }

Status HostRuntime::event_state(void*, EventState* state) {
  *state = EventState::kDone;
  return {};
}

Status HostRuntime::event_timestamp(void* event, uint64_t* microseconds) {
  *microseconds = *static_cast<std::atomic<uint64_t>*>(event);
  return {};
}

Status HostRuntime::synchronize_stream(StreamRef, int) { return {}; }

Status HostRuntime::begin_capture(StreamRef) { return no_graphs(); }

Status HostRuntime::end_capture(StreamRef, void**) { return no_graphs(); }

Status HostRuntime::execute_graph(void*, StreamRef) { return no_graphs(); }

void HostRuntime::destroy_graph(void*) {}

HostRuntime& host_runtime() {
  static HostRuntime runtime;
  return runtime;
}

}  // namespace npu_kv
