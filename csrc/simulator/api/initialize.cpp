// Start, end and versions of the runtime.
#include <algorithm>
#include <cstdint>
#include <fstream>
#include <iterator>
#include <mutex>
#include <string>

#include "abi/acl_op_abi.h"
#include "api/api.h"

namespace npu_kv::sim {
namespace {

/// aclInit is counted; all calls must name a configuration of the same content.
class Initialization {
 public:
  void begin(const char* config_path) {
    const std::string config = read(config_path);
    const std::lock_guard lock(mutex_);
    if (references_ == 0) {
      config_ = config;
      references_ = 1;
      return;
    }
    if (config != config_) {
      throw SimulatorError(ACL_ERROR_INVALID_PARAM,
                           "EH0001: aclInit was called before with another configuration");
    }
    ++references_;
    throw SimulatorError(ACL_ERROR_REPEAT_INITIALIZE, "EH0001: aclInit was called before");
  }

  void end() {
    const std::lock_guard lock(mutex_);
    require_references();
    references_ = 0;
  }

  uint64_t release() {
    const std::lock_guard lock(mutex_);
    require_references();
    return --references_;
  }

 private:
  static std::string read(const char* path) {
    if (path == nullptr || *path == '\0') return {};
    std::ifstream file(path, std::ios::binary);
    if (!file) {
      throw SimulatorError(ACL_ERROR_INVALID_FILE,
                           std::string("EH0001: cannot read the configuration ") + path);
    }
    return {std::istreambuf_iterator<char>(file), {}};
  }

  void require_references() const {
    if (references_ == 0) {
      throw SimulatorError(ACL_ERROR_REPEAT_FINALIZE, "EH0001: the runtime is not initialized");
    }
  }

  std::mutex mutex_;
  std::string config_;
  uint64_t references_ = 0;
};

Initialization& initialization() {
  static auto* one = new Initialization;  // other threads may still call in at exit
  return *one;
}

// The real function reads files below $ASCEND_HOME_PATH, which do not exist here. torch_npu takes a
// failure as "version unknown" and then stays on the paths that every CANN release supports.
[[noreturn]] void no_version_files() {
  throw SimulatorError(ACL_ERROR_INVALID_FILE,
                       "EH0001: the simulated runtime has no version files");
}

}  // namespace
}  // namespace npu_kv::sim

using npu_kv::sim::initialization;
using npu_kv::sim::SimulatorError;

NPU_SIM_EXPORT aclError aclInit(const char* config_path) {
  return NPU_SIM_CALL([&] { initialization().begin(config_path); });
}

NPU_SIM_EXPORT aclError aclFinalize() {
  return NPU_SIM_CALL([] { initialization().end(); });
}

NPU_SIM_EXPORT aclError aclFinalizeReference(uint64_t* references) {
  return NPU_SIM_CALL([&] {
    const uint64_t left = initialization().release();
    if (references != nullptr) *references = left;
  });
}

NPU_SIM_EXPORT aclError aclrtGetVersion(int32_t* major, int32_t* minor, int32_t* patch) {
  return NPU_SIM_CALL([&] {
    if (major == nullptr || minor == nullptr || patch == nullptr) {
      throw SimulatorError(ACL_ERROR_INVALID_PARAM, "EH0001: a version pointer is null");
    }
    // The interface version of the headers in torch_npu 2.13.0.
    *major = 1;
    *minor = 17;
    *patch = 0;
  });
}

NPU_SIM_EXPORT aclError aclsysGetCANNVersion(int /*package*/, void* /*version*/) {
  return NPU_SIM_CALL([] { npu_kv::sim::no_version_files(); });
}

NPU_SIM_EXPORT aclError aclsysGetVersionStr(char* /*package*/, char* /*version*/) {
  return NPU_SIM_CALL([] { npu_kv::sim::no_version_files(); });
}
