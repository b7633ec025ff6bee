#include "ops/python_border.h"

#include <c10/util/Exception.h>

#include <atomic>

#include "runtime/pending_errors.h"

namespace npu_kv {
namespace {

std::atomic<const PythonBorder*> python{nullptr};

}  // namespace

void set_python_border(const PythonBorder* border) { python = border; }

void throw_transfer_error(const std::string& message) {
  if (const PythonBorder* border = python.load()) border->throw_transfer_error(message);
  TORCH_CHECK(false, message);
}

void throw_pending_errors(int device) {
  if (!pending_errors().any()) return;
  const std::string message = pending_errors().take(device);
  if (message.empty()) return;
  throw_transfer_error("an earlier call failed after it had returned; this call was not run. " +
                       message);
}

void warn(const std::string& message) {
  if (const PythonBorder* border = python.load()) {
    border->warn(message);
    return;
  }
  TORCH_WARN(message);
}

void drop_arguments(torch::jit::Stack* stack, size_t count) {
  if (const PythonBorder* border = python.load()) {
    border->drop_arguments(stack, count);
    return;
  }
  torch::jit::drop(*stack, count);
}

void check_trace(const char* overload, bool reads_cpu_ids) {
  if (const PythonBorder* border = python.load()) border->check_trace(overload, reads_cpu_ids);
}

}  // namespace npu_kv
