// Tensors whose blocks lie side by side, copied as one.
#pragma once

#include <span>
#include <vector>

#include "runtime/export.h"
#include "transfer/block_layout.h"

namespace npu_kv {

// Keys beside values, or the layers of one block beside each other: where block i of a tensor ends
// and that of the next tensor begins at the same byte, in the source and in the destination, both
// are one payload. A workspace to be kept and used again. Not thread-safe; one per thread.
class NPU_KV_API JoinedLayouts {
 public:
  // Of equal length; a pair has equal payloads. Valid until the next call.
  void assign(std::span<const BlockLayout> src, std::span<const BlockLayout> dst);

  const std::vector<BlockLayout>& src() const { return src_; }
  const std::vector<BlockLayout>& dst() const { return dst_; }

 private:
  std::vector<BlockLayout> src_;
  std::vector<BlockLayout> dst_;
};

}  // namespace npu_kv
