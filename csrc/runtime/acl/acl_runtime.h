// Copies through the Ascend runtime, real or simulated.
#pragma once

#include <atomic>

#include "runtime/runtime.h"

namespace npu_kv {

class AclRuntime final : public Runtime {
 public:
  const char* name() const override { return "acl"; }
  size_t batch_limit() const override;
  Status copy(const Descriptors& copies, Direction direction, StreamRef stream) override;
  Status place_of(const void* address, MemoryPlace* place) override;
  Status allocation_of(const void* address, MemoryRange* range) override;

 private:
  Status copy_batch(const Descriptors& copies, Direction direction, StreamRef stream,
                    bool* supported);
  Status copy_singly(const Descriptors& copies, Direction direction, StreamRef stream);

  // Cleared by the first answer "not supported": products that lack the function never get it.
  std::atomic<bool> batch_supported_{true};
};

AclRuntime& acl_runtime();

}  // namespace npu_kv
