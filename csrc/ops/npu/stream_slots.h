// The slots of eager deferred calls, by stream.
#pragma once

#include <torch_npu/csrc/core/npu/NPUStream.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "ops/npu/call_slot.h"

namespace npu_kv {

struct StreamSlots {
  std::mutex mutex;  // held while a call is put on the stream, so that two do not mix
  // Calls that wait for their copies at once follow one another, each before the next one's ids are
  // read: they share one.
  std::unique_ptr<CallSlot> shared;
  // Of calls that were started: what the stream has waited for may be used for what it gets to
  // later.
  std::vector<std::unique_ptr<CallSlot>> waited_for;
  uint64_t calls = 0;
};

// Lives as long as the process. Thread-safe.
StreamSlots& slots_of(c10_npu::NPUStream stream);

}  // namespace npu_kv
