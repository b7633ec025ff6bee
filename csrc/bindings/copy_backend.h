// Python's view of the copy scheduler: CopyBackend, CopyEvent and CopyPlan of npu_kv_ops._C.
#pragma once

#include <pybind11/pybind11.h>

namespace npu_kv {

void bind_copy_backend(pybind11::module_& m);

}  // namespace npu_kv
