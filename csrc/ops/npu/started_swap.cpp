#include "ops/npu/started_swap.h"

namespace npu_kv {

StartedSwap::~StartedSwap() {
  for (auto& slot : own_slots) (void)slot.release();
  if (!storages.empty()) new std::vector<c10::Storage>(std::move(storages));
  if (!foreign_host.empty()) new std::vector<c10::Storage>(std::move(foreign_host));
}

}  // namespace npu_kv
