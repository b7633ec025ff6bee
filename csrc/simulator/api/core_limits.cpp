// Limits on the cores a device, a stream or a thread may use: kept and reported back. Simulated
// operators use no cores.
#include <array>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "abi/acl_op_abi.h"
#include "api/api.h"
#include "api/arguments.h"
#include "engine/chip.h"
#include "engine/context.h"
#include "engine/stream.h"

namespace npu_kv::sim {
namespace {

using Limits = std::array<uint32_t, 2>;
constexpr Limits kAllCores = {kCubeCores, kVectorCores};

size_t index_of(aclrtDevResLimitType type) {
  if (type != ACL_RT_DEV_RES_CUBE_CORE && type != ACL_RT_DEV_RES_VECTOR_CORE) {
    throw SimulatorError(ACL_ERROR_RT_PARAM_INVALID,
                         "EE1003: unknown core type " + std::to_string(static_cast<int>(type)));
  }
  return static_cast<size_t>(type);
}

void check_value(aclrtDevResLimitType type, uint32_t value) {
  const uint32_t most = kAllCores[index_of(type)];
  if (value == 0 || value > most) {
    throw SimulatorError(ACL_ERROR_RT_PARAM_INVALID, "EE1003: a limit of " + std::to_string(value) +
                                                         " cores is not in 1.." +
                                                         std::to_string(most));
  }
}

/// Thread-safe. A stream without a limit of its own has its device's.
class CoreLimits {
 public:
  Limits of_device(int device) const {
    const std::lock_guard lock(mutex_);
    return find(device);
  }
  void set_device(int device, size_t index, uint32_t value) {
    const std::lock_guard lock(mutex_);
    devices_.try_emplace(device, kAllCores).first->second[index] = value;
  }
  void reset_device(int device) {
    const std::lock_guard lock(mutex_);
    devices_.erase(device);
  }

  Limits of_stream(const std::shared_ptr<Stream>& stream, int device) const {
    const std::lock_guard lock(mutex_);
    const auto found = streams_.find(stream);
    return found == streams_.end() ? find(device) : found->second;
  }
  void set_stream(const std::shared_ptr<Stream>& stream, int device, size_t index, uint32_t value) {
    const std::lock_guard lock(mutex_);
    std::erase_if(streams_, [](const auto& entry) { return entry.first.expired(); });
    streams_.try_emplace(stream, find(device)).first->second[index] = value;
  }
  void reset_stream(const std::shared_ptr<Stream>& stream) {
    const std::lock_guard lock(mutex_);
    streams_.erase(stream);
  }

 private:
  Limits find(int device) const {
    const auto found = devices_.find(device);
    return found == devices_.end() ? kAllCores : found->second;
  }

  mutable std::mutex mutex_;
  std::map<int, Limits> devices_;
  std::map<std::weak_ptr<Stream>, Limits, std::owner_less<>> streams_;
};

CoreLimits& core_limits() {
  static auto* one = new CoreLimits;  // other threads may still call in at exit
  return *one;
}

/// The stream whose limits this thread has taken over; expired when there is none.
std::weak_ptr<Stream>& stream_of_thread() {
  thread_local std::weak_ptr<Stream> stream;
  return stream;
}

}  // namespace
}  // namespace npu_kv::sim

using namespace npu_kv::sim;  // NOLINT: everything here is this namespace's C face

NPU_SIM_EXPORT aclError aclrtGetDeviceResLimit(int32_t device, aclrtDevResLimitType type,
                                               uint32_t* value) {
  return NPU_SIM_CALL([&] {
    check_pointer(value, "value");
    check_device(device);
    *value = core_limits().of_device(device)[index_of(type)];
  });
}

NPU_SIM_EXPORT aclError aclrtSetDeviceResLimit(int32_t device, aclrtDevResLimitType type,
                                               uint32_t value) {
  return NPU_SIM_CALL([&] {
    check_device(device);
    check_value(type, value);
    core_limits().set_device(device, index_of(type), value);
  });
}

NPU_SIM_EXPORT aclError aclrtResetDeviceResLimit(int32_t device) {
  return NPU_SIM_CALL([&] {
    check_device(device);
    core_limits().reset_device(device);
  });
}

NPU_SIM_EXPORT aclError aclrtGetStreamResLimit(aclrtStream handle, aclrtDevResLimitType type,
                                               uint32_t* value) {
  return NPU_SIM_CALL([&] {
    check_pointer(value, "value");
    const auto stream = resolve_stream(handle);
    *value = core_limits().of_stream(stream, require_context().device)[index_of(type)];
  });
}

NPU_SIM_EXPORT aclError aclrtSetStreamResLimit(aclrtStream handle, aclrtDevResLimitType type,
                                               uint32_t value) {
  return NPU_SIM_CALL([&] {
    const auto stream = resolve_stream(handle);
    check_value(type, value);
    core_limits().set_stream(stream, require_context().device, index_of(type), value);
  });
}

NPU_SIM_EXPORT aclError aclrtResetStreamResLimit(aclrtStream handle) {
  return NPU_SIM_CALL([&] { core_limits().reset_stream(resolve_stream(handle)); });
}

NPU_SIM_EXPORT aclError aclrtUseStreamResInCurrentThread(aclrtStream handle) {
  return NPU_SIM_CALL([&] { stream_of_thread() = resolve_stream(handle); });
}

NPU_SIM_EXPORT aclError aclrtUnuseStreamResInCurrentThread(aclrtStream handle) {
  return NPU_SIM_CALL([&] {
    resolve_stream(handle);
    stream_of_thread().reset();
  });
}

NPU_SIM_EXPORT aclError aclrtGetResInCurrentThread(aclrtDevResLimitType type, uint32_t* value) {
  return NPU_SIM_CALL([&] {
    check_pointer(value, "value");
    const int device = require_context().device;
    const auto stream = stream_of_thread().lock();
    *value = (stream ? core_limits().of_stream(stream, device)
                     : core_limits().of_device(device))[index_of(type)];
  });
}
