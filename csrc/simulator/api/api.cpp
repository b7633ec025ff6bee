#include "api/api.h"

#include <cstdio>
#include <cstring>
#include <mutex>
#include <utility>
#include <vector>

#include "api/call_sites.h"
#include "engine/call_origin.h"
#include "engine/callbacks.h"
#include "engine/engine.h"

namespace npu_kv::sim {
namespace {

/// Without a destructor: other destructors of the thread may still call in.
struct ThreadError {
  char message[4096];   // waiting to be read; empty when there is none
  char returned[4096];  // keeps the pointer of the last read valid
  aclError last;
};
constinit thread_local ThreadError thread_error{};

constinit thread_local const char* previous_function = "";

struct Sites {
  std::mutex mutex;
  std::vector<CallSite*> all;
};

Sites& sites() {
  static Sites* instance = new Sites;
  return *instance;
}

void report_call_in_callback(const char* function) {
  Engine::get().counters.calls_in_callback += 1;
  std::fprintf(stderr,
               "npu_kv_ops simulator: %s was called inside a host callback; on an NPU this may "
               "deadlock\n",
               function);
}

}  // namespace

CallSite::CallSite(const char* name) : name_(name) {
  std::lock_guard lock(sites().mutex);
  sites().all.push_back(this);
}

std::vector<std::pair<std::string, int64_t>> call_counts() {
  std::lock_guard lock(sites().mutex);
  std::vector<std::pair<std::string, int64_t>> counts;
  for (const CallSite* site : sites().all) {
    if (site->calls > 0) counts.emplace_back(site->name(), site->calls);
  }
  return counts;
}

void reset_call_counts() {
  std::lock_guard lock(sites().mutex);
  for (CallSite* site : sites().all) site->calls = 0;
}

const char* previous_call() { return previous_function; }

bool enter_call(CallSite& site) {
  previous_function = std::exchange(current_function(), site.name());
  site.calls.fetch_add(1, std::memory_order_relaxed);
  check_not_forked();
  if (in_callback()) report_call_in_callback(site.name());
  return Engine::get().faults.check_call(site.name());
}

void check_not_forked() {
  if (Engine::get().forked) {
    throw SimulatorError(ACL_ERROR_RT_INTERNAL_ERROR,
                         "EE9999: the simulated NPU cannot be used in a forked child; start the "
                         "process with spawn");
  }
}

aclError keep_failure(const char* function, const Failure& failure) {
  ThreadError& error = thread_error;
  std::snprintf(error.message, sizeof error.message, "%s (%s, simulated NPU)",
                failure.message.c_str(), function);
  // Failures of the acl layer leave the last error alone (the runtime's own codes are 107xxx,
  // 207xxx and 507xxx), and so does asking for the device of a thread that has none.
  const bool runtime_layer = failure.code / 1000 % 100 == 7;
  const bool asked_for_device =
      failure.code == ACL_ERROR_RT_CONTEXT_NULL && std::strcmp(function, "aclrtGetDevice") == 0;
  if (runtime_layer && !asked_for_device) error.last = failure.code;
  return failure.code;
}

aclError keep_current_exception(const char* function) noexcept {
  try {
    throw;
  } catch (const SimulatorError& error) {
    return keep_failure(function, error.failure());
  } catch (const std::exception& error) {
    return keep_failure(function,
                        {ACL_ERROR_INTERNAL_ERROR, std::string("EE9999: ") + error.what()});
  }
}

const char* take_message() {
  ThreadError& error = thread_error;
  if (error.message[0] == '\0') return nullptr;
  std::memcpy(error.returned, error.message, sizeof error.returned);
  error.message[0] = '\0';
  return error.returned;
}

aclError peek_last_error() { return thread_error.last; }

aclError take_last_error() { return std::exchange(thread_error.last, ACL_SUCCESS); }

}  // namespace npu_kv::sim
