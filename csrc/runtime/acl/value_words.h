// Words of device memory that streams write and wait for.
#pragma once

#include <cstddef>
#include <map>
#include <mutex>
#include <vector>

#include "runtime/runtime.h"

namespace npu_kv {

// Takes words from blocks of device memory, which it keeps: the runtime's smallest allocation is
// much larger than a word. A word is zero when it is taken; nobody may write it any more when it is
// given back. Thread-safe; the calling thread must have the device as its current one.
class ValueWords {
 public:
  Status take(int device, void** word);
  void give_back(void* word);

 private:
  struct Word {
    void* address;
    bool used;
  };
  Status add_block(int device);

  std::mutex mutex_;
  std::map<int, std::vector<Word>> free_;  // by device
  std::map<void*, int> device_of_block_;   // by the block's first byte
};

}  // namespace npu_kv
