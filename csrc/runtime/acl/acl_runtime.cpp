#include "runtime/acl/acl_runtime.h"

#include <cstdint>
#include <sstream>

#include "runtime/acl/acl_api.h"
#include "runtime/batch_limit.h"

namespace npu_kv {
namespace {

aclrtMemcpyKind kind_of(Direction direction) {
  switch (direction) {
    case Direction::kHostToDevice:
      return ACL_MEMCPY_HOST_TO_DEVICE;
    case Direction::kDeviceToHost:
      return ACL_MEMCPY_DEVICE_TO_HOST;
    case Direction::kDeviceToDevice:
      return ACL_MEMCPY_DEVICE_TO_DEVICE;
    case Direction::kHostToHost:
      break;
  }
  return ACL_MEMCPY_HOST_TO_HOST;
}

// Page-able memory too is declared as host memory.
aclrtMemLocation location_of(bool on_device, int device) {
  aclrtMemLocation location{};
  location.type = on_device ? ACL_MEM_LOCATION_TYPE_DEVICE : ACL_MEM_LOCATION_TYPE_HOST;
  location.id = on_device ? static_cast<uint32_t>(device) : 0;
  return location;
}

std::string describe(const Descriptors& copies, size_t i, Direction direction) {
  std::ostringstream out;
  out << "copy " << i << " of " << copies.count << ", " << direction_name(direction) << ", "
      << copies.size[i] << " bytes from " << copies.src[i] << " to " << copies.dst[i];
  return out.str();
}

static_assert(kNotSupported == ACL_ERROR_RT_FEATURE_NOT_SUPPORT);

bool is_not_supported(aclError code) {
  return code == ACL_ERROR_RT_FEATURE_NOT_SUPPORT || code == ACL_ERROR_API_NOT_SUPPORT;
}

}  // namespace

size_t AclRuntime::batch_limit() const { return max_batch(); }

Status AclRuntime::copy(const Descriptors& copies, Direction direction, StreamRef stream) {
  // The batch function takes no device-to-device copies.
  if (direction != Direction::kDeviceToDevice && batch_supported_.load(std::memory_order_relaxed)) {
    bool supported = true;
    Status status = copy_batch(copies, direction, stream, &supported);
    if (supported) return status;
    batch_supported_.store(false, std::memory_order_relaxed);
  }
  return copy_singly(copies, direction, stream);
}

Status AclRuntime::copy_batch(const Descriptors& copies, Direction direction, StreamRef stream,
                              bool* supported) {
  const auto batch = optional_acl_functions().memcpy_batch_async;
  if (batch == nullptr) {
    *supported = false;
    return {};
  }
  aclrtMemcpyBatchAttr attributes{};
  attributes.dstLoc = location_of(direction == Direction::kHostToDevice, stream.device);
  attributes.srcLoc = location_of(direction == Direction::kDeviceToHost, stream.device);
  size_t first_of_attributes = 0;
  size_t failed = SIZE_MAX;
  // The sizes serve as the destinations' limits too: ids were checked against the pools.
  const aclError code =
      batch(copies.dst, copies.size, copies.src, copies.size, copies.count, &attributes,
            &first_of_attributes, 1, &failed, static_cast<aclrtStream>(stream.handle));
  if (code == ACL_SUCCESS) return {};
  if (is_not_supported(code)) {
    *supported = false;
    return {};
  }
  std::string text = acl_error_text("aclrtMemcpyBatchAsync", code);
  if (failed < copies.count) text += " (" + describe(copies, failed, direction) + ")";
  return {code, text};
}

Status AclRuntime::copy_singly(const Descriptors& copies, Direction direction, StreamRef stream) {
  const aclrtMemcpyKind kind = kind_of(direction);
  for (size_t i = 0; i < copies.count; ++i) {
    const aclError code =
        aclrtMemcpyAsync(copies.dst[i], copies.size[i], copies.src[i], copies.size[i], kind,
                         static_cast<aclrtStream>(stream.handle));
    if (code != ACL_SUCCESS) {
      return {code, acl_error_text("aclrtMemcpyAsync", code) + " (" +
                        describe(copies, i, direction) + ")"};
    }
  }
  return {};
}

Status AclRuntime::place_of(const void* address, MemoryPlace* place) {
  const auto attributes_of = optional_acl_functions().pointer_get_attributes;
  if (attributes_of == nullptr) {
    return {kNotSupported, "the runtime has no aclrtPointerGetAttributes"};
  }
  aclrtPtrAttributes attributes{};
  const aclError code = attributes_of(address, &attributes);
  if (code != ACL_SUCCESS) return {code, acl_error_text("aclrtPointerGetAttributes", code)};
  switch (attributes.location.type) {
    case ACL_MEM_LOCATION_TYPE_DEVICE:
      *place = {MemoryKind::kDevice, static_cast<int>(attributes.location.id)};
      break;
    case ACL_MEM_LOCATION_TYPE_UNREGISTERED:
      *place = {MemoryKind::kPageableHost, -1};
      break;
    default:
      *place = {MemoryKind::kPinnedHost, -1};
  }
  return {};
}

Status AclRuntime::allocation_of(const void* address, MemoryRange* range) {
  const auto range_of = optional_acl_functions().mem_get_address_range;
  if (range_of == nullptr) {
    return {kNotSupported, "the runtime has no aclrtMemGetAddressRange"};
  }
  void* begin = nullptr;
  const aclError code = range_of(const_cast<void*>(address), &begin, &range->size);
  if (code != ACL_SUCCESS) return {code, acl_error_text("aclrtMemGetAddressRange", code)};
  range->begin = static_cast<const char*>(begin);
  return {};
}

AclRuntime& acl_runtime() {
  // Never destroyed: the task queue's thread may still copy while the process ends.
  static auto* runtime = new AclRuntime;
  return *runtime;
}

}  // namespace npu_kv
