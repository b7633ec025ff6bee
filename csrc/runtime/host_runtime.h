// Copies between host memory and host memory, done by the calling thread before copy() returns.
#pragma once

#include "runtime/runtime.h"

namespace npu_kv {

class NPU_KV_API HostRuntime final : public Runtime {
 public:
  const char* name() const override { return "host"; }
  size_t batch_limit() const override;
  Status copy(const Descriptors& copies, Direction direction, StreamRef stream) override;
  Status place_of(const void* address, MemoryPlace* place) override;
  Status allocation_of(const void* address, MemoryRange* range) override;
};

NPU_KV_API HostRuntime& host_runtime();

}  // namespace npu_kv
