#include "runtime/acl/value_words.h"

#include <acl/acl.h>

#include "runtime/acl/acl_api.h"
#include "runtime/acl/relaxed_capture.h"

namespace npu_kv {
namespace {

// Words that different streams write do not share a cache line.
constexpr size_t kWordBytes = 64;
constexpr size_t kBlockBytes = 64 << 10;

Status clear(void* memory, size_t bytes) {
  const RelaxedCapture relaxed;  // a memset runs at once, which a capture may forbid
  const aclError code = aclrtMemset(memory, bytes, 0, bytes);
  if (code == ACL_SUCCESS) return {};
  return {code, acl_error_text("aclrtMemset", code)};
}

}  // namespace

Status ValueWords::add_block(int device) {
  void* block = nullptr;
  const aclError code = aclrtMalloc(&block, kBlockBytes, ACL_MEM_MALLOC_HUGE_FIRST);
  if (code != ACL_SUCCESS) return {code, acl_error_text("aclrtMalloc", code)};
  if (Status status = clear(block, kBlockBytes); !status.ok()) {
    (void)aclrtFree(block);
    return status;
  }
  device_of_block_.emplace(block, device);
  auto& free = free_[device];
  for (size_t offset = kBlockBytes; offset != 0; offset -= kWordBytes) {
    free.push_back({static_cast<char*>(block) + offset - kWordBytes, false});
  }
  return {};
}

Status ValueWords::take(int device, void** word) {
  const std::lock_guard lock(mutex_);
  auto& free = free_[device];
  if (free.empty()) {
    if (Status status = add_block(device); !status.ok()) return status;
  }
  // A capture that failed between a wait and what takes it back may have left it set.
  if (free.back().used) {
    if (Status status = clear(free.back().address, kWordBytes); !status.ok()) return status;
  }
  *word = free.back().address;
  free.pop_back();
  return {};
}

void ValueWords::give_back(void* word) {
  const std::lock_guard lock(mutex_);
  const auto block = std::prev(device_of_block_.upper_bound(word));
  free_[block->second].push_back({word, true});
}

}  // namespace npu_kv
