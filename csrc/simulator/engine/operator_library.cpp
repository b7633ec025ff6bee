// Opens the library of kernels that link torch.
#include <dlfcn.h>

#include <mutex>
#include <string>

#include "engine/operator_table.h"

namespace npu_kv::sim {
namespace {

int add_operator(const char* type, npu_sim_operator_function run, npu_sim_operator_function check,
                 void* user) {
  OperatorTable::get().add(type, {run, check, user});
  return 0;
}

/// Returns why not, or nothing.
std::string open_library(const std::string& path) {
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) return std::string("the kernels could not be loaded: ") + dlerror();
  const auto provide =
      reinterpret_cast<npu_sim_provide_function>(dlsym(library, "npu_sim_provide_operators"));
  if (provide == nullptr) return path + " has no npu_sim_provide_operators";
  if (provide(add_operator) != 0) return path + " did not provide its operators";
  return {};
}

bool torch_is_loaded() {
  // Never closed: the handle counts as one more user of a library that stays anyway.
  return dlopen("libtorch_cpu.so", RTLD_NOLOAD | RTLD_LAZY) != nullptr;
}

/// Never destroyed.
struct Library {
  std::mutex mutex;
  std::string path;
  bool tried = false;
  std::string missing = "torch is not loaded";

  static Library& get() {
    static auto* made = new Library;
    return *made;
  }
};

}  // namespace

void set_operator_library(const std::string& path) {
  Library& library = Library::get();
  const std::lock_guard lock(library.mutex);
  library.path = path;
}

std::string load_operator_library() {
  Library& library = Library::get();
  const std::lock_guard lock(library.mutex);
  if (library.path.empty()) return "no library of kernels has been named";
  if (!library.tried && torch_is_loaded()) {
    library.tried = true;
    library.missing = open_library(library.path);
  }
  return library.missing;
}

}  // namespace npu_kv::sim
