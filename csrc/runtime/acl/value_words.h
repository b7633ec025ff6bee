// Words of device memory that streams write and wait for.
#pragma once

#include <cstddef>
#include <map>
#include <mutex>
#include <vector>

#include "runtime/runtime.h"

namespace npu_kv {

// Takes words from blocks of device memory, which it keeps: the runtime's smallest allocation is
// much larger than a word. A word is zero when it is taken, and must be zero again when it is given
// back. Thread-safe; the calling thread must have the device as its current one.
class ValueWords {
 public:
  Status take(int device, void** word);
  void give_back(void* word);

 private:
  Status add_block(int device);

  std::mutex mutex_;
  std::map<int, std::vector<void*>> free_;  // by device
  std::map<void*, int> device_of_block_;    // by the block's first byte
};

}  // namespace npu_kv
