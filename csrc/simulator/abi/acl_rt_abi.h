// The part of the ACL runtime's binary interface that the simulator implements: handles, enums,
// structs and error numbers. Declared here so that the simulator builds without CANN and without
// torch_npu; tests/cpp/abi_check.cpp compares every value with the headers of torch_npu's wheel.
#pragma once

#include <cstddef>
#include <cstdint>

#define NPU_SIM_EXPORT extern "C" __attribute__((visibility("default")))

using aclError = int;
using aclrtStream = void*;
using aclrtEvent = void*;
using aclrtContext = void*;
using aclmdlRI = void*;
using aclmdlRITask = void*;
using aclrtTaskGrp = void*;
using aclrtHostFunc = void (*)(void*);
using aclrtCallback = void (*)(void*);

enum aclrtMemLocationType : int {
  ACL_MEM_LOCATION_TYPE_HOST = 0,
  ACL_MEM_LOCATION_TYPE_DEVICE = 1,
  ACL_MEM_LOCATION_TYPE_UNREGISTERED = 2,
  ACL_MEM_LOCATION_TYPE_HOST_NUMA = 4,
};

struct aclrtMemLocation {
  uint32_t id;
  aclrtMemLocationType type;
};

struct aclrtPtrAttributes {
  aclrtMemLocation location;
  uint32_t pageSize;
  uint32_t rsv[4];
};

struct aclrtMemcpyBatchAttr {
  aclrtMemLocation dstLoc;
  aclrtMemLocation srcLoc;
  uint8_t rsv[16];
};

static_assert(sizeof(aclrtMemLocation) == 8 && sizeof(aclrtPtrAttributes) == 28 &&
              sizeof(aclrtMemcpyBatchAttr) == 32);

enum aclrtMemcpyKind : int {
  ACL_MEMCPY_HOST_TO_HOST = 0,
  ACL_MEMCPY_HOST_TO_DEVICE = 1,
  ACL_MEMCPY_DEVICE_TO_HOST = 2,
  ACL_MEMCPY_DEVICE_TO_DEVICE = 3,
  ACL_MEMCPY_DEFAULT = 4,
  ACL_MEMCPY_INTER_DEVICE_TO_DEVICE = 7,
};

enum aclmdlRICaptureMode : int {
  ACL_MODEL_RI_CAPTURE_MODE_GLOBAL = 0,
  ACL_MODEL_RI_CAPTURE_MODE_THREAD_LOCAL = 1,
  ACL_MODEL_RI_CAPTURE_MODE_RELAXED = 2,
};

enum aclmdlRICaptureStatus : int {
  ACL_MODEL_RI_CAPTURE_STATUS_NONE = 0,
  ACL_MODEL_RI_CAPTURE_STATUS_ACTIVE = 1,
  ACL_MODEL_RI_CAPTURE_STATUS_INVALIDATED = 2,
};

enum aclrtStreamStatus : int { ACL_STREAM_STATUS_COMPLETE = 0, ACL_STREAM_STATUS_NOT_READY = 1 };
enum aclrtEventStatus : int { ACL_EVENT_STATUS_COMPLETE = 0, ACL_EVENT_STATUS_NOT_READY = 1 };
enum aclrtEventRecordedStatus : int {
  ACL_EVENT_RECORDED_STATUS_NOT_READY = 0,
  ACL_EVENT_RECORDED_STATUS_COMPLETE = 1,
};
enum aclrtEventWaitStatus : int {
  ACL_EVENT_WAIT_STATUS_COMPLETE = 0,
  ACL_EVENT_WAIT_STATUS_NOT_READY = 1,
};

inline constexpr uint32_t ACL_EVENT_SYNC = 0x1;
inline constexpr uint32_t ACL_EVENT_CAPTURE_STREAM_PROGRESS = 0x2;
inline constexpr uint32_t ACL_EVENT_TIME_LINE = 0x8;
inline constexpr uint32_t ACL_EVENT_DEVICE_USE_ONLY = 0x10;
inline constexpr uint32_t ACL_EVENT_EXTERNAL = 0x20;
inline constexpr uint32_t ACL_EVENT_IPC = 0x40;

inline constexpr uint64_t ACL_CONTINUE_ON_FAILURE = 0;
inline constexpr uint64_t ACL_STOP_ON_FAILURE = 1;

inline constexpr aclError ACL_SUCCESS = 0;
inline constexpr aclError ACL_ERROR_INVALID_PARAM = 100000;
inline constexpr aclError ACL_ERROR_UNINITIALIZE = 100001;
inline constexpr aclError ACL_ERROR_REPEAT_INITIALIZE = 100002;
inline constexpr aclError ACL_ERROR_INVALID_FILE = 100003;
inline constexpr aclError ACL_ERROR_REPEAT_FINALIZE = 100037;
inline constexpr aclError ACL_ERROR_RT_PARAM_INVALID = 107000;
inline constexpr aclError ACL_ERROR_RT_INVALID_DEVICEID = 107001;
inline constexpr aclError ACL_ERROR_RT_CONTEXT_NULL = 107002;
inline constexpr aclError ACL_ERROR_RT_STREAM_CONTEXT = 107003;
inline constexpr aclError ACL_ERROR_RT_MODEL_CONTEXT = 107004;
inline constexpr aclError ACL_ERROR_RT_EVENT_TIMESTAMP_INVALID = 107006;
inline constexpr aclError ACL_ERROR_RT_EVENT_TIMESTAMP_REVERSAL = 107007;
inline constexpr aclError ACL_ERROR_RT_STREAM_SUBSCRIBE = 107011;
inline constexpr aclError ACL_ERROR_RT_THREAD_SUBSCRIBE = 107012;
inline constexpr aclError ACL_ERROR_RT_STREAM_NO_CB_REG = 107015;
inline constexpr aclError ACL_ERROR_RT_INVALID_HANDLE = 107017;
inline constexpr aclError ACL_ERROR_RT_CAPTURE_DEPENDENCY = 107024;
inline constexpr aclError ACL_ERROR_RT_STREAM_UNJOINED = 107025;
inline constexpr aclError ACL_ERROR_RT_MODEL_CAPTURED = 107026;
inline constexpr aclError ACL_ERROR_RT_STREAM_CAPTURED = 107027;
inline constexpr aclError ACL_ERROR_RT_EVENT_CAPTURED = 107028;
inline constexpr aclError ACL_ERROR_RT_STREAM_NOT_CAPTURED = 107029;
inline constexpr aclError ACL_ERROR_RT_CAPTURE_MODE_NOT_SUPPORT = 107030;
inline constexpr aclError ACL_ERROR_RT_STREAM_CAPTURE_IMPLICIT = 107031;
inline constexpr aclError ACL_ERROR_STREAM_CAPTURE_CONFLICT = 107032;
inline constexpr aclError ACL_ERROR_STREAM_TASK_GROUP_STATUS = 107033;
inline constexpr aclError ACL_ERROR_RT_STREAM_CAPTURE_UNMATCHED = 107036;
inline constexpr aclError ACL_ERROR_RT_MODEL_RUNNING = 107037;
inline constexpr aclError ACL_ERROR_RT_STREAM_CAPTURE_WRONG_THREAD = 107038;
inline constexpr aclError ACL_ERROR_RT_CAPTURE_MODE_BLOCK_ASYNC = 107041;
inline constexpr aclError ACL_ERROR_RT_FEATURE_NOT_SUPPORT = 207000;
inline constexpr aclError ACL_ERROR_RT_MEMORY_ALLOCATION = 207001;
inline constexpr aclError ACL_ERROR_RT_RESOURCE_ALLOC_FAIL = 207005;
inline constexpr aclError ACL_ERROR_RT_NO_EVENT_RESOURCE = 207007;
inline constexpr aclError ACL_ERROR_RT_NO_STREAM_RESOURCE = 207008;
inline constexpr aclError ACL_ERROR_INTERNAL_ERROR = 500000;
inline constexpr aclError ACL_ERROR_RT_INTERNAL_ERROR = 507000;
inline constexpr aclError ACL_ERROR_RT_TASK_TYPE_NOT_SUPPORT = 507009;
inline constexpr aclError ACL_ERROR_RT_MODEL_EXECUTE = 507011;
inline constexpr aclError ACL_ERROR_RT_REPORT_TIMEOUT = 507012;
inline constexpr aclError ACL_ERROR_RT_SYS_DMA = 507013;
inline constexpr aclError ACL_ERROR_RT_AICORE_EXCEPTION = 507015;
inline constexpr aclError ACL_ERROR_RT_STREAM_SYNC_TIMEOUT = 507046;
inline constexpr aclError ACL_ERROR_RT_EVENT_SYNC_TIMEOUT = 507047;
inline constexpr aclError ACL_ERROR_RT_STREAM_CAPTURE_INVALIDATED = 507903;
inline constexpr aclError ACL_ERROR_HOST_MEMORY_ALREADY_REGISTERED = 507910;
inline constexpr aclError ACL_ERROR_HOST_MEMORY_NOT_REGISTERED = 507911;
