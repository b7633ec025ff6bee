// The simulator declares the part of the ACL interface that it implements by itself. This compares
// every constant and every struct of those declarations with the headers in torch_npu's wheel; a
// difference is a compile error. ABI_CONSTANTS(X) is generated from the declarations.
#include <cstddef>
#include <cstdint>

namespace simulated {
#include "abi/acl_op_abi.h"
#include "abi/acl_rt_abi.h"
}  // namespace simulated

#include "abi_constants.inc"

// The wheel has macros of some of these names, so ours are taken before its headers come.
#define NPU_SIM_VALUE(name) constexpr long long simulated_##name = simulated::name;
ABI_CONSTANTS(NPU_SIM_VALUE)
#undef NPU_SIM_VALUE

#include "acl/acl.h"
#include "acl/acl_base.h"
#include "acl/acl_op.h"
#include "acl/acl_op_compiler.h"
#include "acl/acl_rt.h"

#define NPU_SIM_SAME(name) \
  static_assert(simulated_##name == static_cast<long long>(name), #name " differs");
ABI_CONSTANTS(NPU_SIM_SAME)

#define NPU_SIM_SAME_TYPE(type)                                                                 \
  static_assert(                                                                                \
      sizeof(simulated::type) == sizeof(::type) && alignof(simulated::type) == alignof(::type), \
      #type " differs");
#define NPU_SIM_SAME_MEMBER(type, member)                                        \
  static_assert(offsetof(simulated::type, member) == offsetof(::type, member) && \
                    sizeof(simulated::type::member) == sizeof(::type::member),   \
                #type "::" #member " differs");

NPU_SIM_SAME_TYPE(aclrtMemLocation)
NPU_SIM_SAME_MEMBER(aclrtMemLocation, id)
NPU_SIM_SAME_MEMBER(aclrtMemLocation, type)
NPU_SIM_SAME_TYPE(aclrtPtrAttributes)
NPU_SIM_SAME_MEMBER(aclrtPtrAttributes, location)
NPU_SIM_SAME_MEMBER(aclrtPtrAttributes, pageSize)
NPU_SIM_SAME_TYPE(aclrtMemcpyBatchAttr)
NPU_SIM_SAME_MEMBER(aclrtMemcpyBatchAttr, dstLoc)
NPU_SIM_SAME_MEMBER(aclrtMemcpyBatchAttr, srcLoc)
NPU_SIM_SAME_MEMBER(aclrtMemcpyBatchAttr, rsv)

NPU_SIM_SAME_TYPE(aclError)
NPU_SIM_SAME_TYPE(aclrtStream)
NPU_SIM_SAME_TYPE(aclrtEvent)
NPU_SIM_SAME_TYPE(aclrtContext)
NPU_SIM_SAME_TYPE(aclmdlRI)
NPU_SIM_SAME_TYPE(aclmdlRITask)
NPU_SIM_SAME_TYPE(aclrtTaskGrp)
NPU_SIM_SAME_TYPE(aclrtHostFunc)
NPU_SIM_SAME_TYPE(aclrtCallback)
NPU_SIM_SAME_TYPE(aclDataType)
NPU_SIM_SAME_TYPE(aclFormat)
NPU_SIM_SAME_TYPE(aclMemType)
NPU_SIM_SAME_TYPE(aclDeviceInfo)
NPU_SIM_SAME_TYPE(aclSysParamOpt)
NPU_SIM_SAME_TYPE(aclCompileOpt)
NPU_SIM_SAME_TYPE(aclrtFloatOverflowMode)
NPU_SIM_SAME_TYPE(aclrtDevResLimitType)
NPU_SIM_SAME_TYPE(aclLogLevel)
NPU_SIM_SAME_TYPE(aclopEngineType)
NPU_SIM_SAME_TYPE(aclopCompileType)
NPU_SIM_SAME_TYPE(aclrtMemLocationType)
NPU_SIM_SAME_TYPE(aclrtMemcpyKind)
NPU_SIM_SAME_TYPE(aclmdlRICaptureMode)
NPU_SIM_SAME_TYPE(aclmdlRICaptureStatus)
NPU_SIM_SAME_TYPE(aclrtStreamStatus)
NPU_SIM_SAME_TYPE(aclrtEventStatus)
NPU_SIM_SAME_TYPE(aclrtEventRecordedStatus)
NPU_SIM_SAME_TYPE(aclrtEventWaitStatus)
