// Host callbacks and signals of the Ascend runtime, with what the running release has for them.
#pragma once

#include "runtime/acl/value_words.h"
#include "runtime/signal_runtime.h"

namespace npu_kv {

// Callbacks are aclrtLaunchHostFunc, or aclrtLaunchCallback with a thread of ours that serves them.
// Signals are words of device memory (aclrtValueWait, aclrtValueWrite), as torch_npu makes its
// external events, or ACL_EVENT_EXTERNAL events where those are missing.
class AclSignals final : public SignalRuntime {
 public:
  Status launch_callback(StreamRef stream, Callback callback, void* argument) override;
  int64_t callback_time() override;
  void caused_at(int64_t time) override;
  Status create_signal(int device, void** signal) override;
  void destroy_signal(void* signal) override;
  Status wait_signal(StreamRef stream, void* signal) override;
  Status set_signal(StreamRef stream, void* signal) override;
  Status allocate_host(size_t bytes, void** memory) override;
  void free_host(void* memory) override;
  Status read_device(void* host, const void* device, size_t bytes, StreamRef stream) override;

 private:
  ValueWords words_;
};

AclSignals& acl_signals();

SignalSupport signal_support();

}  // namespace npu_kv
