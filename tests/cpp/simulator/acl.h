// The ACL functions under test, declared as the runtime's headers declare them.
#pragma once

#include <cstddef>
#include <cstdint>

#include "abi/acl_rt_abi.h"

extern "C" {
aclError aclrtGetDeviceCount(uint32_t* count);
aclError aclrtSetDevice(int32_t device);
aclError aclrtGetDevice(int32_t* device);
aclError aclrtResetDevice(int32_t device);
aclError aclrtCreateContext(aclrtContext* context, int32_t device);
aclError aclrtGetCurrentContext(aclrtContext* context);
aclError aclrtSetCurrentContext(aclrtContext context);
const char* aclGetRecentErrMsg();
aclError aclrtPeekAtLastError(int level);
aclError aclrtGetLastError(int level);

aclError aclrtMalloc(void** pointer, size_t bytes, int policy);
aclError aclrtMallocAlign32(void** pointer, size_t bytes, int policy);
aclError aclrtFree(void* pointer);
aclError aclrtMallocHost(void** pointer, size_t bytes);
aclError aclrtFreeHost(void* pointer);
aclError aclrtHostRegister(void* pointer, uint64_t bytes, int type, void** device);
aclError aclrtHostRegisterV2(void* pointer, uint64_t bytes, uint32_t flags);
aclError aclrtHostUnregister(void* pointer);
aclError aclrtPointerGetAttributes(const void* pointer, aclrtPtrAttributes* attributes);
aclError aclrtGetMemInfo(int attribute, size_t* free, size_t* total);

aclError aclrtMemcpy(void* dst, size_t dst_max, const void* src, size_t count,
                     aclrtMemcpyKind kind);
aclError aclrtMemcpyAsync(void* dst, size_t dst_max, const void* src, size_t count,
                          aclrtMemcpyKind kind, aclrtStream stream);
aclError aclrtMemcpyAsyncWithCondition(void* dst, size_t dst_max, const void* src, size_t count,
                                       aclrtMemcpyKind kind, aclrtStream stream);
aclError aclrtMemcpyBatch(void** dsts, size_t* dst_maxs, void** srcs, size_t* sizes, size_t count,
                          aclrtMemcpyBatchAttr* attrs, size_t* attr_indexes, size_t attr_count,
                          size_t* fail_index);
aclError aclrtMemcpyBatchAsync(void** dsts, size_t* dst_maxs, void** srcs, size_t* sizes,
                               size_t count, aclrtMemcpyBatchAttr* attrs, size_t* attr_indexes,
                               size_t attr_count, size_t* fail_index, aclrtStream stream);
aclError aclrtMemset(void* pointer, size_t max, int32_t value, size_t count);
aclError aclrtMemsetAsync(void* pointer, size_t max, int32_t value, size_t count,
                          aclrtStream stream);

aclError aclrtCreateStream(aclrtStream* stream);
aclError aclrtCreateStreamWithConfig(aclrtStream* stream, uint32_t priority, uint32_t flags);
aclError aclrtDestroyStream(aclrtStream stream);
aclError aclrtDestroyStreamForce(aclrtStream stream);
aclError aclrtSynchronizeStream(aclrtStream stream);
aclError aclrtSynchronizeStreamWithTimeout(aclrtStream stream, int32_t timeout_ms);
aclError aclrtSynchronizeDevice();
aclError aclrtSynchronizeDeviceWithTimeout(int32_t timeout_ms);
aclError aclrtStreamQuery(aclrtStream stream, aclrtStreamStatus* status);
aclError aclrtStreamGetId(aclrtStream stream, int32_t* id);
aclError aclrtCtxGetCurrentDefaultStream(aclrtStream* stream);
aclError aclrtSetStreamFailureMode(aclrtStream stream, uint64_t mode);
aclError aclrtSetStreamAttribute(aclrtStream stream, int attribute, const uint64_t* value);
aclError aclrtSetStreamOverflowSwitch(aclrtStream stream, uint32_t flag);

aclError aclrtCreateEvent(aclrtEvent* event);
aclError aclrtCreateEventWithFlag(aclrtEvent* event, uint32_t flags);
aclError aclrtCreateEventExWithFlag(aclrtEvent* event, uint32_t flags);
aclError aclrtDestroyEvent(aclrtEvent event);
aclError aclrtRecordEvent(aclrtEvent event, aclrtStream stream);
aclError aclrtResetEvent(aclrtEvent event, aclrtStream stream);
aclError aclrtStreamWaitEvent(aclrtStream stream, aclrtEvent event);
aclError aclrtSynchronizeEvent(aclrtEvent event);
aclError aclrtSynchronizeEventWithTimeout(aclrtEvent event, int32_t timeout_ms);
aclError aclrtQueryEvent(aclrtEvent event, aclrtEventStatus* status);
aclError aclrtQueryEventStatus(aclrtEvent event, aclrtEventRecordedStatus* status);
aclError aclrtQueryEventWaitStatus(aclrtEvent event, aclrtEventWaitStatus* status);
aclError aclrtEventElapsedTime(float* ms, aclrtEvent start, aclrtEvent end);
aclError aclrtEventGetTimestamp(aclrtEvent event, uint64_t* microseconds);
aclError aclrtValueWrite(void* address, uint64_t value, uint32_t flag, aclrtStream stream);
aclError aclrtValueWait(void* address, uint64_t value, uint32_t flag, aclrtStream stream);

aclError aclrtLaunchHostFunc(aclrtStream stream, aclrtHostFunc function, void* argument);
aclError aclrtLaunchCallback(aclrtCallback function, void* argument, int block, aclrtStream stream);
aclError aclrtSubscribeReport(uint64_t thread_id, aclrtStream stream);
aclError aclrtUnSubscribeReport(uint64_t thread_id, aclrtStream stream);
aclError aclrtProcessReport(int32_t timeout_ms);

aclError aclmdlRICaptureBegin(aclrtStream stream, aclmdlRICaptureMode mode);
aclError aclmdlRICaptureEnd(aclrtStream stream, aclmdlRI* graph);
aclError aclmdlRICaptureGetInfo(aclrtStream stream, aclmdlRICaptureStatus* status, aclmdlRI* graph);
aclError aclmdlRICaptureThreadExchangeMode(aclmdlRICaptureMode* mode);
aclError aclmdlRIExecuteAsync(aclmdlRI graph, aclrtStream stream);
aclError aclmdlRIExecute(aclmdlRI graph, int32_t timeout_ms);
aclError aclmdlRIDestroy(aclmdlRI graph);
aclError aclmdlRIDestroyRegisterCallback(aclmdlRI graph, aclrtCallback function, void* argument);
aclError aclmdlRIDestroyUnregisterCallback(aclmdlRI graph, aclrtCallback function);
aclError aclmdlRIGetId(aclmdlRI graph, uint32_t* id);
aclError aclmdlRIDebugJsonPrint(aclmdlRI graph, const char* path, uint32_t flags);
aclError aclmdlRICaptureTaskGrpBegin(aclrtStream stream);
aclError aclmdlRICaptureTaskGrpEnd(aclrtStream stream, aclrtTaskGrp* group);
aclError aclmdlRICaptureTaskUpdateBegin(aclrtStream stream, aclrtTaskGrp group);
aclError aclmdlRICaptureTaskUpdateEnd(aclrtStream stream);
}
