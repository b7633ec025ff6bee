// Python's view of the calls whose block ids lie on an NPU.
#pragma once

#include <pybind11/pybind11.h>

namespace npu_kv {

void bind_deferred_calls(pybind11::module_& m);

}  // namespace npu_kv
