// Copies between host memory and host memory, done by the calling thread before copy() returns.
#pragma once

#include "runtime/stream_runtime.h"

namespace npu_kv {

class NPU_KV_API HostRuntime : public StreamRuntime {
 public:
  const char* name() const override { return "host"; }
  size_t batch_limit() const override;
  Status copy(const Descriptors& copies, Direction direction, StreamRef stream) override;
  Status place_of(const void* address, MemoryPlace* place) override;

  // There are no streams: what was issued is done, and an event is the time of its record.
  Status use_device(int device) override;
  Status create_stream(int device, StreamRef* stream) override;
  void destroy_stream(StreamRef stream) override;
  Status create_event(void** event) override;
  void destroy_event(void* event) override;
  Status record_event(void* event, StreamRef stream) override;
  Status wait_event(StreamRef stream, void* event) override;
  Status event_state(void* event, EventState* state) override;
  bool event_reached(void*) override { return true; }
  Status event_timestamp(void* event, uint64_t* microseconds) override;
  Status synchronize_stream(StreamRef stream, int timeout_ms) override;
  Status begin_capture(StreamRef stream) override;
  Status end_capture(StreamRef stream, void** graph) override;
  Status execute_graph(void* graph, StreamRef stream) override;
  void destroy_graph(void* graph) override;
  Status allocation_of(const void* address, MemoryRange* range) override;
};

NPU_KV_API HostRuntime& host_runtime();

}  // namespace npu_kv
