// Argument checks shared by functions that have no engine object to check with.
#pragma once

#include <cstdint>
#include <string>

#include "engine/engine.h"
#include "engine/error.h"

namespace npu_kv::sim {

inline void check_pointer(const void* pointer, const char* name) {
  if (pointer == nullptr) {
    throw SimulatorError(ACL_ERROR_INVALID_PARAM, std::string("EH0001: ") + name + " is null");
  }
}

inline void check_device(int64_t device) {
  const int64_t devices = Engine::get().settings.devices;
  if (device < 0 || device >= devices) {
    throw SimulatorError(ACL_ERROR_RT_INVALID_DEVICEID,
                         "EE1001: device " + std::to_string(device) + " is not one of the " +
                             std::to_string(devices) + " simulated devices");
  }
}

}  // namespace npu_kv::sim
