#include "ops/npu/stream_slots.h"

#include <map>
#include <utility>

namespace npu_kv {

StreamSlots& slots_of(c10_npu::NPUStream stream) {
  static std::mutex mutex;
  static auto* slots = new std::map<std::pair<int, c10::StreamId>, StreamSlots>;
  const std::lock_guard lock(mutex);
  return (*slots)[{stream.device_index(), stream.id()}];
}

}  // namespace npu_kv
