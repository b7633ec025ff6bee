#include "runtime/acl/acl_runtime.h"

#include <cstdint>
#include <sstream>

#include "runtime/acl/acl_api.h"
#include "runtime/batch_limit.h"

namespace npu_kv {
namespace {

constexpr uint32_t kLowestPriority = 7;
static_assert(kTimedOut == ACL_ERROR_RT_STREAM_SYNC_TIMEOUT);

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

Status checked(const char* call, aclError code) {
  if (code == ACL_SUCCESS) return {};
  return {code, acl_error_text(call, code)};
}

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
  return {code, text, failed};
}

Status AclRuntime::copy_singly(const Descriptors& copies, Direction direction, StreamRef stream) {
  const aclrtMemcpyKind kind = kind_of(direction);
  for (size_t i = 0; i < copies.count; ++i) {
    const aclError code =
        aclrtMemcpyAsync(copies.dst[i], copies.size[i], copies.src[i], copies.size[i], kind,
                         static_cast<aclrtStream>(stream.handle));
    if (code != ACL_SUCCESS) {
      return {
          code,
          acl_error_text("aclrtMemcpyAsync", code) + " (" + describe(copies, i, direction) + ")",
          i};
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

Status AclRuntime::use_device(int device) {
  return checked("aclrtSetDevice", aclrtSetDevice(device));
}

Status AclRuntime::create_stream(int device, StreamRef* stream) {
  aclrtStream raw = nullptr;
  const auto with_config = optional_acl_functions().create_stream_with_config;
  const Status status = with_config != nullptr
                            ? checked("aclrtCreateStreamWithConfig",
                                      with_config(&raw, kLowestPriority,
                                                  ACL_STREAM_FAST_LAUNCH | ACL_STREAM_FAST_SYNC))
                            : checked("aclrtCreateStream", aclrtCreateStream(&raw));
  *stream = {raw, device};
  return status;
}

void AclRuntime::destroy_stream(StreamRef stream) {
  (void)aclrtDestroyStream(static_cast<aclrtStream>(stream.handle));
}

Status AclRuntime::create_event(void** event) {
  // The kind that snapshots: a wait takes the latest record, and the event may be recorded anew.
  return checked("aclrtCreateEventExWithFlag",
                 aclrtCreateEventExWithFlag(event, ACL_EVENT_SYNC | ACL_EVENT_TIME_LINE));
}

void AclRuntime::destroy_event(void* event) { (void)aclrtDestroyEvent(event); }

Status AclRuntime::record_event(void* event, StreamRef stream) {
  return checked("aclrtRecordEvent",
                 aclrtRecordEvent(event, static_cast<aclrtStream>(stream.handle)));
}

Status AclRuntime::wait_event(StreamRef stream, void* event) {
  return checked("aclrtStreamWaitEvent",
                 aclrtStreamWaitEvent(static_cast<aclrtStream>(stream.handle), event));
}

Status AclRuntime::event_state(void* event, EventState* state) {
  const auto query = optional_acl_functions().query_event_status;
  aclrtEventRecordedStatus recorded = ACL_EVENT_RECORDED_STATUS_COMPLETE;
  if (query != nullptr) {
    const aclError code = query(event, &recorded);
    if (code != ACL_SUCCESS) return checked("aclrtQueryEventStatus", code);
    if (recorded == ACL_EVENT_RECORDED_STATUS_NOT_READY) {
      *state = EventState::kPending;
      return {};
    }
  }
  // A query does not tell whether the work before the event has failed; a synchronise does, and
  // does not wait once the event is complete.
  *state = EventState::kDone;
  return checked("aclrtSynchronizeEvent", aclrtSynchronizeEvent(event));
}

bool AclRuntime::event_reached(void* event) {
  const auto query = optional_acl_functions().query_event_status;
  aclrtEventRecordedStatus recorded = ACL_EVENT_RECORDED_STATUS_COMPLETE;
  // A query that fails is of a device that is lost, where nothing is under way any more.
  return query == nullptr || query(event, &recorded) != ACL_SUCCESS ||
         recorded == ACL_EVENT_RECORDED_STATUS_COMPLETE;
}

Status AclRuntime::event_timestamp(void* event, uint64_t* microseconds) {
  const auto timestamp = optional_acl_functions().event_get_timestamp;
  if (timestamp == nullptr) {
    return {ACL_ERROR_RT_FEATURE_NOT_SUPPORT, "the runtime has no aclrtEventGetTimestamp"};
  }
  return checked("aclrtEventGetTimestamp", timestamp(event, microseconds));
}

Status AclRuntime::synchronize_stream(StreamRef stream, int timeout_ms) {
  auto raw = static_cast<aclrtStream>(stream.handle);
  const OptionalAclFunctions& acl = optional_acl_functions();
  if (acl.synchronize_stream_with_timeout != nullptr) {
    return checked("aclrtSynchronizeStreamWithTimeout",
                   acl.synchronize_stream_with_timeout(raw, timeout_ms));
  }
  // A runtime that cannot stop waiting is not asked to wait.
  aclrtStreamStatus state = ACL_STREAM_STATUS_COMPLETE;
  if (acl.stream_query != nullptr && acl.stream_query(raw, &state) == ACL_SUCCESS &&
      state == ACL_STREAM_STATUS_NOT_READY) {
    return {kTimedOut, "the stream has not finished its work"};
  }
  return checked("aclrtSynchronizeStream", aclrtSynchronizeStream(raw));
}

Status AclRuntime::begin_capture(StreamRef stream) {
  const OptionalAclFunctions& acl = optional_acl_functions();
  if (acl.capture_begin == nullptr || acl.capture_end == nullptr || acl.execute_async == nullptr ||
      acl.destroy_graph == nullptr) {
    return {kNotSupported, "the runtime has no graphs (aclmdlRICaptureBegin and its like)"};
  }
  // Relaxed: blocking copies of other threads are not forbidden on account of this capture. A
  // synchronise of the whole device is, in every mode.
  return checked("aclmdlRICaptureBegin", acl.capture_begin(static_cast<aclrtStream>(stream.handle),
                                                           ACL_MODEL_RI_CAPTURE_MODE_RELAXED));
}

Status AclRuntime::end_capture(StreamRef stream, void** graph) {
  aclmdlRI captured = nullptr;
  const Status status = checked(
      "aclmdlRICaptureEnd",
      optional_acl_functions().capture_end(static_cast<aclrtStream>(stream.handle), &captured));
  *graph = captured;
  return status;
}

Status AclRuntime::execute_graph(void* graph, StreamRef stream) {
  return checked("aclmdlRIExecuteAsync", optional_acl_functions().execute_async(
                                             graph, static_cast<aclrtStream>(stream.handle)));
}

void AclRuntime::destroy_graph(void* graph) { (void)optional_acl_functions().destroy_graph(graph); }

AclRuntime& acl_runtime() {
  // Never destroyed: the task queue's thread may still copy while the process ends.
  static auto* runtime = new AclRuntime;
  return *runtime;
}

}  // namespace npu_kv
