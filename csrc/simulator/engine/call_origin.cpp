#include "engine/call_origin.h"

#include <cxxabi.h>
#include <dlfcn.h>
#include <execinfo.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string_view>

namespace npu_kv::sim {
namespace {

constexpr int kMostCallers = 4;

const char* base_name(const char* path) {
  const char* slash = std::strrchr(path, '/');
  return slash == nullptr ? path : slash + 1;
}

/// Without arguments: those of a template fill a screen.
std::string short_name(const char* symbol) {
  int status = 0;
  const std::unique_ptr<char, decltype(&std::free)> demangled(
      abi::__cxa_demangle(symbol, nullptr, nullptr, &status), &std::free);
  std::string name = status == 0 ? demangled.get() : symbol;
  return name.substr(0, name.find_first_of("(<"));
}

const void* own_library() {
  static const void* base = [] {
    Dl_info own{};
    dladdr(reinterpret_cast<const void*>(&own_library), &own);
    return own.dli_fbase;
  }();
  return base;
}

/// Libraries through which calls pass, sanitizers among them.
bool is_in_between(const char* library) {
  for (const std::string_view name : {"libc.so", "libffi", "libtsan", "libasan"}) {
    if (std::strncmp(library, name.data(), name.size()) == 0) return true;
  }
  return false;
}

}  // namespace

const char*& current_function() {
  constinit thread_local const char* function = "";
  return function;
}

CallOrigin CallOrigin::here() {
  CallOrigin origin;
  origin.function = current_function();
  origin.thread = static_cast<uint64_t>(gettid());
  origin.frame_count_ = backtrace(origin.frames_.data(), static_cast<int>(origin.frames_.size()));
  return origin;
}

std::string CallOrigin::describe_callers() const {
  std::string text;
  int callers = 0;
  for (int i = 0; i < frame_count_ && callers < kMostCallers; ++i) {
    Dl_info frame{};
    // A return address may be the first byte behind its function.
    const auto* address = static_cast<const char*>(frames_[i]) - 1;
    if (dladdr(address, &frame) == 0 || frame.dli_fbase == own_library()) continue;
    const char* library = base_name(frame.dli_fname);
    if (is_in_between(library)) continue;
    if (callers > 0 && frame.dli_sname == nullptr) continue;
    if (callers > 0) text += " < ";
    if (frame.dli_sname != nullptr) {
      text += short_name(frame.dli_sname) + " (" + library + ")";
    } else {
      char offset[32];
      std::snprintf(offset, sizeof offset, "+0x%zx",
                    static_cast<size_t>(address - static_cast<const char*>(frame.dli_fbase)));
      text += library + std::string(offset);
    }
    ++callers;
  }
  return text;
}

}  // namespace npu_kv::sim
