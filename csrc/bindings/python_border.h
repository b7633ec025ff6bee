#pragma once

namespace npu_kv {

// Makes the core library throw `transfer_error_type`, a Python exception class, and warn through
// Python's warnings. Keeps a reference for ever.
void install_python_border(void* transfer_error_type);

}  // namespace npu_kv
