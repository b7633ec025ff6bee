// What the operator is compared with, without torch: the runtime's batch call made by hand.
// host_cost.py builds it with the system's compiler and calls it through ctypes. What copies
// returns the runtime's error code, 0 for success.
#include <acl/acl.h>
#include <dlfcn.h>
#include <time.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace {

using BatchCopy = decltype(&aclrtMemcpyBatchAsync);

constexpr int kNoSuchFunction = -1;

// The runtime that the process has loaded, as the operator finds it.
BatchCopy look_up() {
  void* library = dlopen("libascendcl.so", RTLD_LAZY | RTLD_NOLOAD);
  if (library == nullptr) return nullptr;
  return reinterpret_cast<BatchCopy>(dlsym(library, "aclrtMemcpyBatchAsync"));
}

int batch_copy(void** dst, void** src, size_t* size, size_t count, bool to_device, int device,
               void* stream) {
  static const BatchCopy function = look_up();
  if (function == nullptr) return kNoSuchFunction;
  const aclrtMemLocation host{.id = 0, .type = ACL_MEM_LOCATION_TYPE_HOST};
  const aclrtMemLocation npu{.id = static_cast<uint32_t>(device),
                             .type = ACL_MEM_LOCATION_TYPE_DEVICE};
  aclrtMemcpyBatchAttr attributes{};
  attributes.dstLoc = to_device ? npu : host;
  attributes.srcLoc = to_device ? host : npu;
  size_t first_of_attributes = 0;
  size_t failed = 0;
  return function(dst, size, src, size, count, &attributes, &first_of_attributes, 1, &failed,
                  stream);
}

}  // namespace

// One runtime call with arrays that the caller filled.
extern "C" int bare_batch_copy(void** dst, void** src, size_t* size, size_t count, int to_device,
                               int device, void* stream) {
  return batch_copy(dst, src, size, count, to_device != 0, device, stream);
}

// Fills the arrays for every tensor and block, and makes a runtime call whenever `limit` items are
// there. Nothing is checked and nothing is merged.
extern "C" int bare_block_copy(const int64_t* dst_base, const int64_t* src_base, size_t tensors,
                               const int64_t* dst_blocks, const int64_t* src_blocks, size_t blocks,
                               int64_t block_bytes, size_t limit, int to_device, int device,
                               void* stream) {
  static std::vector<void*> dst, src;
  static std::vector<size_t> size;
  dst.resize(limit);
  src.resize(limit);
  size.resize(limit);
  size_t filled = 0;
  for (size_t t = 0; t < tensors; ++t) {
    for (size_t i = 0; i < blocks; ++i) {
      dst[filled] = reinterpret_cast<void*>(dst_base[t] + dst_blocks[i] * block_bytes);
      src[filled] = reinterpret_cast<void*>(src_base[t] + src_blocks[i] * block_bytes);
      size[filled] = static_cast<size_t>(block_bytes);
      if (++filled < limit) continue;
      const int code =
          batch_copy(dst.data(), src.data(), size.data(), filled, to_device != 0, device, stream);
      if (code != 0) return code;
      filled = 0;
    }
  }
  if (filled == 0) return 0;
  return batch_copy(dst.data(), src.data(), size.data(), filled, to_device != 0, device, stream);
}

// For aclrtLaunchHostFunc: adds the time at which a stream calls it. The argument is an array: how
// many times are in it, how many there is room for, then the times in ns.
extern "C" void bare_stamp(void* argument) {
  auto* stamps = static_cast<int64_t*>(argument);
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  const int64_t count = stamps[0];
  if (count < stamps[1]) {
    stamps[2 + count] = static_cast<int64_t>(now.tv_sec) * 1'000'000'000 + now.tv_nsec;
  }
  ++stamps[0];
}
