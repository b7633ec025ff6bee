// How a failure travels inside the simulator: thrown where it is found, turned into a return code
// and a message by the API layer (calls) or kept by the stream (tasks).
#pragma once

#include <stdexcept>
#include <string>
#include <utility>

#include "abi/acl_rt_abi.h"

namespace npu_kv::sim {

struct Failure {
  aclError code = ACL_SUCCESS;
  std::string message;

  explicit operator bool() const { return code != ACL_SUCCESS; }
};

class SimulatorError : public std::runtime_error {
 public:
  SimulatorError(aclError code, const std::string& message)
      : std::runtime_error(message), code_(code) {}

  aclError code() const { return code_; }
  Failure failure() const { return {code_, what()}; }

 private:
  aclError code_;
};

inline void throw_if(const Failure& failure) {
  if (failure) throw SimulatorError(failure.code, failure.message);
}

}  // namespace npu_kv::sim
