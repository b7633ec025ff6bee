// Allocation, registration and classification of memory.
#include "api/api.h"
#include "engine/context.h"
#include "engine/engine.h"

using namespace npu_kv::sim;

namespace {

constexpr uint32_t kRegisterMapped = 0x2;
constexpr uint32_t kRegisterPinned = 0x10000000;
constexpr uint32_t kRegisterKnown = kRegisterMapped | 0x4 | 0x8 | kRegisterPinned;

void allocate_device(void** pointer, size_t bytes) {
  require(pointer != nullptr, "devPtr is null");
  require(bytes > 0, "size is 0");
  *pointer = Engine::get().memory.allocate_device(require_context().device, bytes);
}

void allocate_pinned(void** pointer, size_t bytes) {
  require(pointer != nullptr, "hostPtr is null");
  require(bytes > 0, "size is 0");
  require_context();
  *pointer = Engine::get().memory.allocate_pinned(bytes);
}

}  // namespace

NPU_SIM_EXPORT aclError aclrtMalloc(void** pointer, size_t bytes, int /*policy*/) {
  return NPU_SIM_CALL([&] { allocate_device(pointer, bytes); });
}

NPU_SIM_EXPORT aclError aclrtMallocAlign32(void** pointer, size_t bytes, int /*policy*/) {
  return NPU_SIM_CALL([&] { allocate_device(pointer, bytes); });
}

NPU_SIM_EXPORT aclError aclrtMallocCached(void** pointer, size_t bytes, int /*policy*/) {
  return NPU_SIM_CALL([&] { allocate_device(pointer, bytes); });
}

NPU_SIM_EXPORT aclError aclrtMallocWithCfg(void** pointer, size_t bytes, int /*policy*/,
                                           void* /*config*/) {
  return NPU_SIM_CALL([&] { allocate_device(pointer, bytes); });
}

NPU_SIM_EXPORT aclError aclrtFree(void* pointer) {
  return NPU_SIM_CALL([&] {
    require(pointer != nullptr, "devPtr is null");
    Engine::get().memory.free_device(pointer);
  });
}

NPU_SIM_EXPORT aclError aclrtMallocHost(void** pointer, size_t bytes) {
  return NPU_SIM_CALL([&] { allocate_pinned(pointer, bytes); });
}

NPU_SIM_EXPORT aclError aclrtMallocHostWithCfg(void** pointer, uint64_t bytes, void* /*config*/) {
  return NPU_SIM_CALL([&] { allocate_pinned(pointer, bytes); });
}

NPU_SIM_EXPORT aclError aclrtFreeHost(void* pointer) {
  return NPU_SIM_CALL([&] {
    require(pointer != nullptr, "hostPtr is null");
    Engine::get().memory.free_pinned(pointer);
  });
}

NPU_SIM_EXPORT aclError aclrtHostRegister(void* pointer, uint64_t bytes, int type, void** device) {
  return NPU_SIM_CALL([&] {
    require(pointer != nullptr && device != nullptr && bytes > 0, "ptr, devPtr or size is null");
    if (type != 0 && type != 4 && type != 8) {
      throw SimulatorError(ACL_ERROR_RT_FEATURE_NOT_SUPPORT,
                           "EE1003: type is " + std::to_string(type) + ", allowed are 0, 4 and 8");
    }
    if (reinterpret_cast<uintptr_t>(pointer) % 4096 != 0) {
      throw SimulatorError(ACL_ERROR_RT_PARAM_INVALID, "EE1003: ptr is not 4 KiB aligned");
    }
    require_context();
    Engine::get().memory.register_host(pointer, bytes);
    *device = pointer;
  });
}

NPU_SIM_EXPORT aclError aclrtHostRegisterV2(void* pointer, uint64_t bytes, uint32_t flags) {
  return NPU_SIM_CALL([&] {
    require(pointer != nullptr && bytes > 0, "ptr or size is null");
    if (flags == 0 || (flags & ~kRegisterKnown) != 0) {
      throw SimulatorError(ACL_ERROR_RT_PARAM_INVALID,
                           "EE1003: flag is " + std::to_string(flags) +
                               ", allowed are 0x2, 0x4, 0x8 and 0x10000000");
    }
    require_context();
    Engine::get().memory.register_host(pointer, bytes);
  });
}

NPU_SIM_EXPORT aclError aclrtHostUnregister(void* pointer) {
  return NPU_SIM_CALL([&] {
    require(pointer != nullptr, "ptr is null");
    Engine::get().memory.unregister_host(pointer);
  });
}

NPU_SIM_EXPORT aclError aclrtPointerGetAttributes(const void* pointer,
                                                  aclrtPtrAttributes* attributes) {
  return NPU_SIM_CALL([&] {
    require(pointer != nullptr && attributes != nullptr, "ptr or attributes is null");
    *attributes = {};
    const Location location = Engine::get().memory.locate(pointer, 0, "ptr");
    attributes->pageSize = 4096;
    switch (location.place) {
      case Place::kDevice:
        attributes->location = {static_cast<uint32_t>(location.device),
                                ACL_MEM_LOCATION_TYPE_DEVICE};
        break;
      case Place::kPinned:
        attributes->location = {0, ACL_MEM_LOCATION_TYPE_HOST};
        break;
      case Place::kPageable:
        attributes->location = {0, ACL_MEM_LOCATION_TYPE_UNREGISTERED};
        break;
    }
  });
}

NPU_SIM_EXPORT aclError aclrtMemGetAddressRange(void* pointer, void** base, size_t* bytes) {
  return NPU_SIM_CALL([&] {
    require(pointer != nullptr && base != nullptr && bytes != nullptr,
            "ptr, pbase or psize is null");
    const Location location = Engine::get().memory.locate(pointer, 0, "ptr");
    if (location.allocation == nullptr) {
      throw SimulatorError(ACL_ERROR_RT_PARAM_INVALID, "EE1003: ptr lies in no allocation");
    }
    *base = reinterpret_cast<void*>(location.allocation->address);
    *bytes = location.allocation->bytes;
  });
}

NPU_SIM_EXPORT aclError aclrtGetMemInfo(int /*attribute*/, size_t* free, size_t* total) {
  return NPU_SIM_CALL([&] {
    require(free != nullptr && total != nullptr, "free or total is null");
    Engine& engine = Engine::get();
    const int64_t capacity = engine.settings.device_memory_bytes;
    const int64_t used = engine.memory.device_bytes(require_context().device);
    *total = static_cast<size_t>(capacity);
    *free = static_cast<size_t>(std::max<int64_t>(0, capacity - used));
  });
}
