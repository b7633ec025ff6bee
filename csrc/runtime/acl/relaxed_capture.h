// Lets the calling thread use, for its lifetime, calls that run at once while a graph is captured.
#pragma once

#include <acl/acl.h>

#include "runtime/acl/acl_api.h"

namespace npu_kv {

class RelaxedCapture {
 public:
  RelaxedCapture() { exchange(); }
  ~RelaxedCapture() { exchange(); }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  void exchange() {
    // A runtime without the function has no captures either.
    const auto function = optional_acl_functions().exchange_capture_mode;
    if (function != nullptr) (void)function(&mode_);
  }

  aclmdlRICaptureMode mode_ = ACL_MODEL_RI_CAPTURE_MODE_RELAXED;
};

}  // namespace npu_kv
