#include "runtime/acl/acl_signals.h"

#include <acl/acl.h>

#include <cstdint>

#include "runtime/acl/acl_api.h"
#include "runtime/acl/callback_thread.h"

namespace npu_kv {
namespace {

constexpr uint64_t kSet = 1;
constexpr uint32_t kEqual = 1;  // aclrtValueWait: until the word equals the value

aclrtStream raw(StreamRef stream) { return static_cast<aclrtStream>(stream.handle); }

Status checked(const char* call, aclError code) {
  if (code == ACL_SUCCESS) return {};
  return {code, acl_error_text(call, code)};
}

bool has_value_words() {
  const OptionalAclFunctions& acl = optional_acl_functions();
  return acl.value_wait != nullptr && acl.value_write != nullptr;
}

CallbackThreads& callback_threads() {
  static auto* threads = new CallbackThreads;  // its threads outlive every static
  return *threads;
}

}  // namespace

Status AclSignals::launch_callback(StreamRef stream, Callback callback, void* argument) {
  const OptionalAclFunctions& acl = optional_acl_functions();
  if (acl.launch_host_func != nullptr) {
    const aclError code = acl.launch_host_func(raw(stream), callback, argument);
    // Refused on a stream that somebody has subscribed for the other kind of callbacks.
    const bool other_kind = code == ACL_ERROR_RT_STREAM_SUBSCRIBE && acl.launch_callback != nullptr;
    if (!other_kind) return checked("aclrtLaunchHostFunc", code);
  }
  if (acl.launch_callback == nullptr) return {kNotSupported, signal_support().missing};
  const auto launch = [&] {
    return acl.launch_callback(callback, argument, ACL_CALLBACK_BLOCK, raw(stream));
  };
  aclError code = launch();
  if (code == ACL_ERROR_RT_STREAM_NO_CB_REG) {
    if (Status status = callback_threads().subscribe(stream); !status.ok()) return status;
    code = launch();
  }
  return checked("aclrtLaunchCallback", code);
}

int64_t AclSignals::callback_time() {
  const auto time = optional_acl_functions().simulated_callback_ns;
  return time == nullptr ? 0 : time();
}

void AclSignals::caused_at(int64_t time) {
  if (const auto tell = optional_acl_functions().simulated_caused_at) tell(time);
}

Status AclSignals::create_signal(int device, void** signal) {
  if (has_value_words()) return words_.take(device, signal);
  const auto create = optional_acl_functions().create_event_with_flag;
  if (create == nullptr) return {kNotSupported, signal_support().missing};
  return checked("aclrtCreateEventWithFlag", create(signal, ACL_EVENT_EXTERNAL));
}

void AclSignals::destroy_signal(void* signal) {
  if (has_value_words()) {
    words_.give_back(signal);
  } else {
    (void)aclrtDestroyEvent(signal);
  }
}

Status AclSignals::wait_signal(StreamRef stream, void* signal) {
  if (has_value_words()) {
    const OptionalAclFunctions& acl = optional_acl_functions();
    Status waits = checked("aclrtValueWait", acl.value_wait(signal, kSet, kEqual, raw(stream)));
    if (!waits.ok()) return waits;
    return checked("aclrtValueWrite", acl.value_write(signal, 0, 0, raw(stream)));
  }
  Status waits = checked("aclrtStreamWaitEvent", aclrtStreamWaitEvent(raw(stream), signal));
  if (!waits.ok()) return waits;
  return checked("aclrtResetEvent", aclrtResetEvent(signal, raw(stream)));
}

Status AclSignals::set_signal(StreamRef stream, void* signal) {
  if (has_value_words()) {
    return checked("aclrtValueWrite",
                   optional_acl_functions().value_write(signal, kSet, 0, raw(stream)));
  }
  return checked("aclrtRecordEvent", aclrtRecordEvent(signal, raw(stream)));
}

Status AclSignals::allocate_host(size_t bytes, void** memory) {
  return checked("aclrtMallocHost", aclrtMallocHost(memory, bytes));
}

void AclSignals::free_host(void* memory) { (void)aclrtFreeHost(memory); }

Status AclSignals::read_device(void* host, const void* device, size_t bytes, StreamRef stream) {
  return checked("aclrtMemcpyAsync", aclrtMemcpyAsync(host, bytes, device, bytes,
                                                      ACL_MEMCPY_DEVICE_TO_HOST, raw(stream)));
}

SignalSupport signal_support() {
  const OptionalAclFunctions& acl = optional_acl_functions();
  SignalSupport support;
  if (acl.launch_host_func != nullptr) {
    support.callbacks = "aclrtLaunchHostFunc";
  } else if (acl.launch_callback != nullptr) {
    support.callbacks = "aclrtLaunchCallback";
  }
  if (has_value_words()) {
    support.signals = "aclrtValueWait, aclrtValueWrite";
  } else if (acl.create_event_with_flag != nullptr) {
    support.signals = "ACL_EVENT_EXTERNAL events";
  }
  if (support.callbacks.empty()) {
    support.missing = "the runtime has neither aclrtLaunchHostFunc nor aclrtLaunchCallback";
  }
  if (support.signals.empty()) {
    if (!support.missing.empty()) support.missing += ", and ";
    support.missing +=
        "the runtime has neither aclrtValueWait with aclrtValueWrite nor aclrtCreateEventWithFlag";
  }
  return support;
}

AclSignals& acl_signals() {
  // Never destroyed: graphs may use its signals while the process ends.
  static auto* signals = new AclSignals;
  return *signals;
}

}  // namespace npu_kv
