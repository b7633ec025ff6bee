#include "bindings/python_border.h"

#include <torch/csrc/Exceptions.h>

#include <string>
#include <utility>

#include "ops/python_border.h"

namespace npu_kv {
namespace {

PyObject* python_transfer_error = nullptr;

// torch translates its own exception classes at the border to Python; this one brings its type
// along, and so passes through the dispatcher. Throwing it needs no GIL.
struct PythonTransferError final : torch::PyTorchError {
  explicit PythonTransferError(std::string message) : torch::PyTorchError(std::move(message)) {}
  PyObject* python_type() override { return python_transfer_error; }
};

void throw_python_transfer_error(const std::string& message) { throw PythonTransferError(message); }

void warn_in_python(const std::string& message) {
  // The caller of the operator, not torch's call of the kernel.
  constexpr int kStackLevel = 2;
  pybind11::gil_scoped_acquire gil;
  if (PyErr_WarnEx(PyExc_UserWarning, message.c_str(), kStackLevel) < 0) {
    throw pybind11::error_already_set();
  }
}

void drop_arguments_with_gil(torch::jit::Stack* stack, size_t count) {
  // torch leaves Python objects alone once the interpreter is gone.
  if (!Py_IsInitialized()) {
    torch::jit::drop(*stack, count);
    return;
  }
  pybind11::gil_scoped_acquire gil;
  torch::jit::drop(*stack, count);
}

void check_trace_in_python(const char* overload, bool reads_cpu_ids) {
  pybind11::gil_scoped_acquire gil;
  pybind11::module_::import("npu_kv_ops.compiler_checks").attr("at_trace")(overload, reads_cpu_ids);
}

constexpr PythonBorder border{&throw_python_transfer_error, &warn_in_python,
                              &drop_arguments_with_gil, &check_trace_in_python};

}  // namespace

void install_python_border(void* transfer_error_type) {
  python_transfer_error = static_cast<PyObject*>(transfer_error_type);
  Py_INCREF(python_transfer_error);
  set_python_border(&border);
}

}  // namespace npu_kv
