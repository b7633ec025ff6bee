// Stands in for CANN's header, so that the ACL runtime of the core builds against the simulator
// alone and with sanitizers. tests/cpp/abi_check.cpp holds the declarations to the real ones.
#pragma once

#include "simulator/acl.h"

#define ACL_STREAM_FAST_LAUNCH 0x1u
#define ACL_STREAM_FAST_SYNC 0x2u

inline constexpr aclError ACL_ERROR_API_NOT_SUPPORT = 200001;
inline constexpr int ACL_MEM_MALLOC_HUGE_FIRST = 0;
inline constexpr int ACL_CALLBACK_BLOCK = 1;

extern "C" {
aclError aclrtMemGetAddressRange(void* pointer, void** base, size_t* size);
}
