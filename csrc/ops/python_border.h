// What crosses to Python in a way that the dispatcher does not offer: TransferError, warnings and
// the release of many arguments at once. The core library knows no Python; the bindings put
// themselves in here when they are loaded.
#pragma once

#include <ATen/core/stack.h>

#include <cstddef>
#include <string>

#include "runtime/export.h"

namespace npu_kv {

// What went wrong on the way, after the arguments were found to be right. Throws
// npu_kv_ops.TransferError once the bindings are loaded, else a plain c10::Error (RuntimeError), of
// which TransferError is a subclass.
[[noreturn]] NPU_KV_API void throw_transfer_error(const std::string& message);

// Throws what is pending for the device (any device when negative), if something is.
NPU_KV_API void throw_pending_errors(int device);

// A UserWarning; may throw what a warnings filter makes of it. Without bindings a line on stderr.
NPU_KV_API void warn(const std::string& message);

// Takes the last `count` arguments off a kernel's stack. A tensor whose last C++ reference goes
// lets go of its Python object under the GIL; here the GIL is taken once for all of them.
NPU_KV_API void drop_arguments(torch::jit::Stack* stack, size_t count);

// Tells that a compiler traces a call of an overload, which may be refused. `reads_cpu_ids`: it has
// CPU ids and tensors on an NPU.
NPU_KV_API void check_trace(const char* overload, bool reads_cpu_ids);

struct PythonBorder {
  void (*throw_transfer_error)(const std::string& message);
  void (*warn)(const std::string& message);
  void (*drop_arguments)(torch::jit::Stack* stack, size_t count);
  void (*check_trace)(const char* overload, bool reads_cpu_ids);
};

// `border` must live for ever. Called once, before the operator is used.
NPU_KV_API void set_python_border(const PythonBorder* border);

}  // namespace npu_kv
