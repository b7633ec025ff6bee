// libhccl.so: collective communication is not simulated; only what torchair must find at load.
#include <cstdint>

#include "abi/acl_rt_abi.h"

namespace {
constexpr int kHcclNotSupported = 5;
}

NPU_SIM_EXPORT int HcclSetConfig(int /*config*/, uint64_t /*value*/) { return kHcclNotSupported; }
