// Allocation, address classes, registration and their limits.
#include <sys/mman.h>

#include "simulator/fixture.h"

namespace {

struct Class {
  int type;
  int id;
};

Class class_of(const void* pointer) {
  aclrtPtrAttributes attributes{};
  CHECK_OK(aclrtPointerGetAttributes(pointer, &attributes));
  return {attributes.location.type, static_cast<int>(attributes.location.id)};
}

aclError allocate(size_t bytes) {
  void* pointer = nullptr;
  return aclrtMalloc(&pointer, bytes, 0);
}

aclError allocate_host(size_t bytes) {
  void* pointer = nullptr;
  return aclrtMallocHost(&pointer, bytes);
}

constexpr uint32_t kPinned = 0x10000000;

/// Pages of ordinary memory.
class Pages {
 public:
  explicit Pages(size_t bytes) : bytes_(bytes) {
    data_ = static_cast<char*>(
        mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  }
  ~Pages() { munmap(data_, bytes_); }
  operator char*() const { return data_; }

 private:
  char* data_;
  size_t bytes_;
};

}  // namespace

TEST(addresses_are_classified_by_range) {
  Session session(1, 2);
  DeviceMemory device(4096);
  PinnedMemory pinned(4096);
  char pageable[16];
  CHECK_EQUAL(class_of(device).type, ACL_MEM_LOCATION_TYPE_DEVICE);
  CHECK_EQUAL(class_of(device.data() + 4095).type, ACL_MEM_LOCATION_TYPE_DEVICE);
  CHECK_EQUAL(class_of(device.data() + 4095).id, 1);
  CHECK_EQUAL(class_of(pinned.data() + 4095).type, ACL_MEM_LOCATION_TYPE_HOST);
  CHECK_EQUAL(class_of(pageable).type, ACL_MEM_LOCATION_TYPE_UNREGISTERED);
}

TEST(device_addresses_outside_live_memory_are_refused) {
  Session session;
  aclrtPtrAttributes attributes{};
  void* freed = DeviceMemory(64);
  CHECK_EQUAL(aclrtPointerGetAttributes(freed, &attributes), ACL_ERROR_RT_PARAM_INVALID);
  DeviceMemory memory(4096);
  CHECK_EQUAL(aclrtPointerGetAttributes(memory.data() + 4096, &attributes),
              ACL_ERROR_RT_PARAM_INVALID);
}

TEST(freed_device_addresses_are_not_handed_out_again_soon) {
  Session session;
  void* freed = DeviceMemory(64);
  DeviceMemory next(64);
  CHECK(freed != static_cast<void*>(next));
}

TEST(blocks_are_aligned_and_not_zeroed) {
  Session session;
  for (const size_t bytes : {1, 33, 4097}) {
    DeviceMemory device(bytes);
    PinnedMemory pinned(bytes);
    CHECK_EQUAL(reinterpret_cast<uintptr_t>(device.data()) % 64, 0u);
    CHECK_EQUAL(reinterpret_cast<uintptr_t>(pinned.data()) % 64, 0u);
    CHECK_EQUAL(device.read(bytes).find('\0'), std::string::npos);
    CHECK_EQUAL(pinned.read(bytes).find('\0'), std::string::npos);
  }
}

CHILD(reads_device_memory) {
  Session session;
  DeviceMemory memory(64);
  return *static_cast<volatile char*>(memory.data());
}

CHILD(writes_device_memory) {
  Session session;
  DeviceMemory memory(64);
  *static_cast<volatile char*>(memory.data()) = 1;
  return 0;
}

TEST(the_cpu_cannot_touch_device_memory) {
  CHECK_EQUAL(run_child("reads_device_memory").signal, SIGSEGV);
  CHECK_EQUAL(run_child("writes_device_memory").signal, SIGSEGV);
}

TEST(device_memory_is_limited_per_device) {
  Session session(0, 2);
  const int64_t live = stat("live.device_bytes");
  npu_sim_set("device_memory_bytes", 1 << 20);
  {
    DeviceMemory most((1 << 20) - 64);
    CHECK_OK(allocate(64));
    CHECK_EQUAL(allocate(1), ACL_ERROR_RT_MEMORY_ALLOCATION);
    const std::string message = last_message();
    CHECK(contains(message, "EL0004"));  // what torch_npu turns into OutOfMemoryError
    CHECK(contains(message, "0 bytes free of 1048576"));
    size_t free = 1;
    size_t total = 0;
    CHECK_OK(aclrtGetMemInfo(1, &free, &total));
    CHECK_EQUAL(free, 0u);
    CHECK_EQUAL(total, size_t{1} << 20);
    CHECK_OK(aclrtSetDevice(1));
    DeviceMemory other(1 << 20);
    CHECK_OK(aclrtSetCurrentContext(session.context));
  }
  DeviceMemory again((1 << 20) - 64);
  CHECK_EQUAL(stat("live.device_bytes"), live + (1 << 20));
}

TEST(sizes_that_overflow_are_refused) {
  Session session;
  CHECK_EQUAL(allocate(SIZE_MAX), ACL_ERROR_RT_MEMORY_ALLOCATION);
  CHECK_EQUAL(allocate(SIZE_MAX - 31), ACL_ERROR_RT_MEMORY_ALLOCATION);
  npu_sim_set("pinned_bytes_per_call", INT64_MAX);
  CHECK_EQUAL(allocate_host(SIZE_MAX), ACL_ERROR_RT_MEMORY_ALLOCATION);
  CHECK_EQUAL(allocate_host(INT64_MAX), ACL_ERROR_RT_MEMORY_ALLOCATION);
}

TEST(pinned_memory_is_limited_per_call_and_in_total) {
  Session session;
  npu_sim_set("pinned_bytes_per_call", 4096);
  CHECK_EQUAL(allocate_host(4097), ACL_ERROR_RT_MEMORY_ALLOCATION);
  Pages pages(8192);
  CHECK_EQUAL(aclrtHostRegisterV2(pages, 8192, kPinned), ACL_ERROR_RT_MEMORY_ALLOCATION);
  npu_sim_set("pinned_memory_bytes", stat("live.pinned_bytes") + 8192);
  {
    PinnedMemory first(4096);
    CHECK_OK(aclrtHostRegisterV2(pages, 4096, kPinned));
    CHECK_EQUAL(allocate_host(1), ACL_ERROR_RT_MEMORY_ALLOCATION);
    CHECK_EQUAL(aclrtHostRegisterV2(pages + 4096, 1, kPinned), ACL_ERROR_RT_MEMORY_ALLOCATION);
    CHECK_OK(aclrtHostUnregister(pages));
    PinnedMemory second(4096);
  }
  PinnedMemory again(4096);
}

TEST(only_the_start_of_a_live_block_of_the_right_kind_is_freed) {
  Session session;
  DeviceMemory device(64);
  PinnedMemory pinned(64);
  Pages pages(4096);
  CHECK_OK(aclrtHostRegisterV2(pages, 4096, kPinned));
  CHECK_EQUAL(aclrtFree(nullptr), ACL_ERROR_INVALID_PARAM);
  CHECK_EQUAL(aclrtFreeHost(nullptr), ACL_ERROR_INVALID_PARAM);
  CHECK_EQUAL(aclrtFree(device.data() + 32), ACL_ERROR_RT_PARAM_INVALID);
  CHECK_EQUAL(aclrtFree(pinned), ACL_ERROR_RT_PARAM_INVALID);
  CHECK_EQUAL(aclrtFree(pages), ACL_ERROR_RT_PARAM_INVALID);
  CHECK_EQUAL(aclrtFreeHost(pinned.data() + 1), ACL_ERROR_RT_PARAM_INVALID);
  CHECK_EQUAL(aclrtFreeHost(device), ACL_ERROR_RT_PARAM_INVALID);
  CHECK_EQUAL(aclrtFreeHost(pages), ACL_ERROR_RT_PARAM_INVALID);
  void* once = device.release();
  CHECK_OK(aclrtFree(once));
  CHECK_EQUAL(aclrtFree(once), ACL_ERROR_RT_PARAM_INVALID);
  void* host = pinned.release();
  CHECK_OK(aclrtFreeHost(host));
  CHECK_EQUAL(aclrtFreeHost(host), ACL_ERROR_RT_PARAM_INVALID);
  CHECK_OK(aclrtHostUnregister(pages));
}

TEST(allocation_arguments) {
  Session session;
  CHECK_EQUAL(aclrtMalloc(nullptr, 64, 0), ACL_ERROR_INVALID_PARAM);
  CHECK_EQUAL(allocate(0), ACL_ERROR_INVALID_PARAM);
  CHECK_EQUAL(aclrtMallocHost(nullptr, 64), ACL_ERROR_INVALID_PARAM);
  CHECK_EQUAL(allocate_host(0), ACL_ERROR_INVALID_PARAM);
  aclError without_context = ACL_SUCCESS;
  aclError info = ACL_SUCCESS;
  std::thread([&] {
    without_context = allocate(64);
    size_t free = 0;
    size_t total = 0;
    info = aclrtGetMemInfo(1, &free, &total);
  }).join();
  CHECK_EQUAL(without_context, ACL_ERROR_RT_CONTEXT_NULL);
  CHECK_EQUAL(info, ACL_ERROR_RT_CONTEXT_NULL);
}

TEST(registered_memory_is_pinned_until_it_is_unregistered) {
  Session session;
  const int64_t ranges = stat("live.registered_ranges");
  Pages pages(8192);
  CHECK_OK(aclrtHostRegisterV2(pages, 4096, kPinned | 0x2));
  CHECK_EQUAL(class_of(pages + 4095).type, ACL_MEM_LOCATION_TYPE_HOST);
  CHECK_EQUAL(class_of(pages + 4096).type, ACL_MEM_LOCATION_TYPE_UNREGISTERED);
  CHECK_EQUAL(stat("live.registered_ranges"), ranges + 1);
  CHECK_EQUAL(aclrtHostUnregister(pages + 64), ACL_ERROR_HOST_MEMORY_NOT_REGISTERED);
  CHECK_OK(aclrtHostUnregister(pages));
  CHECK_EQUAL(class_of(pages).type, ACL_MEM_LOCATION_TYPE_UNREGISTERED);
  CHECK_EQUAL(aclrtHostUnregister(pages), ACL_ERROR_HOST_MEMORY_NOT_REGISTERED);
  void* mapped = nullptr;
  CHECK_OK(aclrtHostRegister(pages, 4096, 0, &mapped));
  CHECK_EQUAL(class_of(pages).type, ACL_MEM_LOCATION_TYPE_HOST);
  CHECK_OK(aclrtHostUnregister(pages));
}

TEST(registration_refusals) {
  Session session;
  Pages pages(16384);
  DeviceMemory device(4096);
  PinnedMemory pinned(4096);
  void* mapped = nullptr;
  CHECK_EQUAL(aclrtHostRegisterV2(pages, 4096, 0), ACL_ERROR_RT_PARAM_INVALID);
  CHECK_EQUAL(aclrtHostRegisterV2(pages, 4096, kPinned | 0x1), ACL_ERROR_RT_PARAM_INVALID);
  CHECK_EQUAL(aclrtHostRegisterV2(nullptr, 4096, kPinned), ACL_ERROR_INVALID_PARAM);
  CHECK_EQUAL(aclrtHostRegisterV2(pages, 0, kPinned), ACL_ERROR_INVALID_PARAM);
  CHECK_EQUAL(aclrtHostRegister(pages, 4096, 1, &mapped), ACL_ERROR_RT_FEATURE_NOT_SUPPORT);
  CHECK_EQUAL(aclrtHostRegister(pages + 64, 64, 0, &mapped), ACL_ERROR_RT_PARAM_INVALID);
  CHECK_EQUAL(aclrtHostRegisterV2(device, 4096, kPinned), ACL_ERROR_RT_PARAM_INVALID);
  CHECK_EQUAL(aclrtHostRegisterV2(pinned, 4096, kPinned), ACL_ERROR_HOST_MEMORY_ALREADY_REGISTERED);
  CHECK_EQUAL(aclrtHostUnregister(pinned), ACL_ERROR_HOST_MEMORY_NOT_REGISTERED);
  CHECK_OK(aclrtHostRegisterV2(pages + 4096, 4096, kPinned));
  for (const int offset : {0, 4096, 8191}) {
    CHECK_EQUAL(aclrtHostRegisterV2(pages + offset, 4097, kPinned),
                ACL_ERROR_HOST_MEMORY_ALREADY_REGISTERED);
  }
  CHECK_OK(aclrtHostRegisterV2(pages, 4096, kPinned));  // touches it, shares nothing
  CHECK_OK(aclrtHostUnregister(pages));
  CHECK_OK(aclrtHostUnregister(pages + 4096));
}

SIMULATOR_TEST_MAIN
