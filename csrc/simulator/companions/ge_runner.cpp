// libge_runner.so: the graph engine, as far as torchair's libraries must find its functions when
// they are loaded. Graphs run by GE are not simulated; torch.npu.NPUGraph, npugraph_ex and
// torchair's reduce-overhead mode need none of these functions.
#include <cxxabi.h>

#include <cstdlib>
#include <memory>
#include <stdexcept>
#include <string>

namespace {

// An exception rather than abort(): torchair hands it to Python with its text. Where none may pass
// (a destructor), the C++ runtime prints the text and aborts.
[[noreturn]] void refuse(const char* mangled) {
  int status = 0;
  const std::unique_ptr<char, decltype(&std::free)> name(
      abi::__cxa_demangle(mangled, nullptr, nullptr, &status), &std::free);
  throw std::runtime_error("simulated NPU: " + std::string(status == 0 ? name.get() : mangled) +
                           " was called, but graphs of the graph engine (GE) are not simulated; "
                           "use torchair's reduce-overhead mode, npugraph_ex or NPUGraph");
}

}  // namespace

#define NPU_SIM_GE_FUNCTION(name)                                             \
  extern "C" [[noreturn]] __attribute__((visibility("default"))) void name(); \
  void name() { refuse(#name); }
#include "ge_functions.inc"
#undef NPU_SIM_GE_FUNCTION
