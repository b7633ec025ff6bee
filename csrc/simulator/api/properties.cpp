// What the runtime says about its devices.
#include <unistd.h>

#include <string>

#include "abi/acl_op_abi.h"
#include "api/api.h"
#include "api/arguments.h"
#include "engine/chip.h"

using npu_kv::sim::check_device;
using npu_kv::sim::check_pointer;
using npu_kv::sim::SimulatorError;

NPU_SIM_EXPORT const char* aclrtGetSocName() {
  const char* name = nullptr;
  NPU_SIM_CALL([&] { name = npu_kv::sim::kSocName; });
  return name;
}

NPU_SIM_EXPORT aclError aclGetDeviceCapability(uint32_t device, aclDeviceInfo info,
                                               int64_t* value) {
  return NPU_SIM_CALL([&] {
    check_pointer(value, "value");
    check_device(device);
    switch (info) {
      case ACL_DEVICE_INFO_AI_CORE_NUM:
        *value = npu_kv::sim::kCubeCores;
        return;
      case ACL_DEVICE_INFO_VECTOR_CORE_NUM:
        *value = npu_kv::sim::kVectorCores;
        return;
      case ACL_DEVICE_INFO_L2_SIZE:
        *value = npu_kv::sim::kL2Bytes;
        return;
    }
    throw SimulatorError(ACL_ERROR_INVALID_PARAM,
                         "EH0001: unknown device info " + std::to_string(static_cast<int>(info)));
  });
}

NPU_SIM_EXPORT aclError aclrtDeviceGetBareTgid(int32_t* process) {
  return NPU_SIM_CALL([&] {
    check_pointer(process, "pid");
    *process = static_cast<int32_t>(getpid());
  });
}

// All devices live in one process, so each may reach every other one.
NPU_SIM_EXPORT aclError aclrtDeviceCanAccessPeer(int32_t* can_access, int32_t device,
                                                 int32_t peer) {
  return NPU_SIM_CALL([&] {
    check_pointer(can_access, "canAccessPeer");
    check_device(device);
    check_device(peer);
    *can_access = device != peer;
  });
}

NPU_SIM_EXPORT aclError aclrtDeviceEnablePeerAccess(int32_t peer, uint32_t flags) {
  return NPU_SIM_CALL([&] {
    check_device(peer);
    if (flags != 0) {
      throw SimulatorError(ACL_ERROR_INVALID_PARAM,
                           "EH0001: flags is " + std::to_string(flags) + ", must be 0");
    }
  });
}

NPU_SIM_EXPORT aclError aclrtDeviceDisablePeerAccess(int32_t peer) {
  return NPU_SIM_CALL([&] { check_device(peer); });
}
