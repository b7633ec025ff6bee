// Functions that torch_npu must find and that the simulator does not model. They answer "API not
// supported": 207000 would be the natural code of some, but torch_npu takes that one as success.
#include <cstddef>
#include <cstdint>
#include <string>

#include "abi/acl_op_abi.h"
#include "api/api.h"

namespace {
[[noreturn]] void refuse(const char* feature) {
  throw npu_kv::sim::SimulatorError(ACL_ERROR_API_NOT_SUPPORT,
                                    std::string("EE9999: ") + feature + " is not simulated");
}
}  // namespace

#define NPU_SIM_UNSUPPORTED(feature, name, ...)   \
  NPU_SIM_EXPORT aclError name(__VA_ARGS__) {     \
    return NPU_SIM_CALL([] { refuse(feature); }); \
  }

#define VIRTUAL_MEMORY "the virtual memory interface (expandable segments)"
NPU_SIM_UNSUPPORTED(VIRTUAL_MEMORY, aclrtReserveMemAddress, void**, size_t, size_t, void*, uint64_t)
NPU_SIM_UNSUPPORTED(VIRTUAL_MEMORY, aclrtReleaseMemAddress, void*)
NPU_SIM_UNSUPPORTED(VIRTUAL_MEMORY, aclrtMallocPhysical, void**, size_t, const void*, uint64_t)
NPU_SIM_UNSUPPORTED(VIRTUAL_MEMORY, aclrtFreePhysical, void*)
NPU_SIM_UNSUPPORTED(VIRTUAL_MEMORY, aclrtMapMem, void*, size_t, size_t, void*, uint64_t)
NPU_SIM_UNSUPPORTED(VIRTUAL_MEMORY, aclrtUnmapMem, void*)
NPU_SIM_UNSUPPORTED(VIRTUAL_MEMORY, aclrtMemExportToShareableHandle, void*, int, uint64_t,
                    uint64_t*)
NPU_SIM_UNSUPPORTED(VIRTUAL_MEMORY, aclrtMemImportFromShareableHandle, uint64_t, int32_t, void**)
NPU_SIM_UNSUPPORTED(VIRTUAL_MEMORY, aclrtMemSetPidToShareableHandle, uint64_t, int32_t*, size_t)

#define PROCESS_SHARING "sharing memory or events with another process"
NPU_SIM_UNSUPPORTED(PROCESS_SHARING, aclrtIpcMemGetExportKey, void*, size_t, char*, size_t,
                    uint64_t)
NPU_SIM_UNSUPPORTED(PROCESS_SHARING, aclrtIpcMemImportByKey, void**, const char*, uint64_t)
NPU_SIM_UNSUPPORTED(PROCESS_SHARING, aclrtIpcMemSetImportPid, const char*, int32_t*, size_t)
NPU_SIM_UNSUPPORTED(PROCESS_SHARING, aclrtIpcMemClose, const char*)
NPU_SIM_UNSUPPORTED(PROCESS_SHARING, aclrtIpcGetEventHandle, aclrtEvent, void*)

#define KERNELS "loading and launching device binaries"
NPU_SIM_UNSUPPORTED(KERNELS, aclrtBinaryLoadFromData, const void*, size_t, const void*, void**)
NPU_SIM_UNSUPPORTED(KERNELS, aclrtBinaryGetFunction, void*, const char*, void**)
NPU_SIM_UNSUPPORTED(KERNELS, aclrtGetFunctionAddr, void*, void**, void**)
NPU_SIM_UNSUPPORTED(KERNELS, rtDevBinaryRegister, const void*, void**)
NPU_SIM_UNSUPPORTED(KERNELS, rtFunctionRegister, void*, const void*, const char*, const void*,
                    uint32_t)
NPU_SIM_UNSUPPORTED(KERNELS, rtKernelLaunch, const void*, uint32_t, void*, uint32_t, void*, void*)
NPU_SIM_UNSUPPORTED(KERNELS, rtGetC2cCtrlAddr, uint64_t*, uint32_t*)

#define DUMP "dumping operators and their data"
NPU_SIM_UNSUPPORTED(DUMP, aclmdlInitDump)
NPU_SIM_UNSUPPORTED(DUMP, aclmdlSetDump, const char*)
NPU_SIM_UNSUPPORTED(DUMP, aclmdlFinalizeDump)
NPU_SIM_UNSUPPORTED(DUMP, aclopStartDumpArgs, uint32_t, const char*)
NPU_SIM_UNSUPPORTED(DUMP, aclopStopDumpArgs, uint32_t)
