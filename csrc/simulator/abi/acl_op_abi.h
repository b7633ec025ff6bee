// The part of the ACL operator interface that the simulator implements. As acl_rt_abi.h: declared
// here so that the simulator builds alone, compared with the wheel by tests/cpp/abi_check.cpp.
#pragma once

#include "abi/acl_rt_abi.h"

enum aclDataType : int {
  ACL_DT_UNDEFINED = -1,
  ACL_FLOAT = 0,
  ACL_FLOAT16 = 1,
  ACL_INT8 = 2,
  ACL_INT32 = 3,
  ACL_UINT8 = 4,
  ACL_INT16 = 6,
  ACL_UINT16 = 7,
  ACL_UINT32 = 8,
  ACL_INT64 = 9,
  ACL_UINT64 = 10,
  ACL_DOUBLE = 11,
  ACL_BOOL = 12,
  ACL_STRING = 13,
  ACL_COMPLEX64 = 16,
  ACL_COMPLEX128 = 17,
  ACL_BF16 = 27,
  ACL_COMPLEX32 = 33,
  ACL_HIFLOAT8 = 34,
  ACL_FLOAT8_E5M2 = 35,
  ACL_FLOAT8_E4M3FN = 36,
  ACL_FLOAT8_E8M0 = 37,
};

enum aclFormat : int {
  ACL_FORMAT_UNDEFINED = -1,
  ACL_FORMAT_NCHW = 0,
  ACL_FORMAT_NHWC = 1,
  ACL_FORMAT_ND = 2,
  ACL_FORMAT_NDHWC = 27,
  ACL_FORMAT_NCDHW = 30,
  ACL_FORMAT_NCL = 47,
};

enum aclMemType : int {
  ACL_MEMTYPE_DEVICE = 0,
  ACL_MEMTYPE_HOST = 1,
  ACL_MEMTYPE_HOST_COMPILE_INDEPENDENT = 2,
};

enum aclDeviceInfo : int {
  ACL_DEVICE_INFO_AI_CORE_NUM = 0,
  ACL_DEVICE_INFO_VECTOR_CORE_NUM = 1,
  ACL_DEVICE_INFO_L2_SIZE = 2,
};

enum aclSysParamOpt : int {
  ACL_OPT_DETERMINISTIC = 0,
  ACL_OPT_ENABLE_DEBUG_KERNEL = 1,
  ACL_OPT_STRONG_CONSISTENCY = 2,
};

enum aclCompileOpt : int { ACL_PRECISION_MODE = 0, ACL_OP_DEBUG_OPTION = 16 };

enum aclrtFloatOverflowMode : int {
  ACL_RT_OVERFLOW_MODE_SATURATION = 0,
  ACL_RT_OVERFLOW_MODE_INFNAN = 1,
  ACL_RT_OVERFLOW_MODE_UNDEF = 2,
};

enum aclrtDevResLimitType : int { ACL_RT_DEV_RES_CUBE_CORE = 0, ACL_RT_DEV_RES_VECTOR_CORE = 1 };

enum aclLogLevel : int { ACL_DEBUG = 0, ACL_INFO = 1, ACL_WARNING = 2, ACL_ERROR = 3 };

using aclopEngineType = int;
using aclopCompileType = int;

inline constexpr aclError ACL_ERROR_OP_NOT_FOUND = 100024;
inline constexpr aclError ACL_ERROR_API_NOT_SUPPORT = 200001;
