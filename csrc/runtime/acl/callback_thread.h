// The host thread that serves aclrtLaunchCallback, for runtimes without aclrtLaunchHostFunc, which
// has a thread of the runtime for that.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <thread>

#include "runtime/runtime.h"

namespace npu_kv {

// One thread a device, started at first use. It lives as long as the process, because graphs that
// call it may: nothing tells when the last of them is gone. Thread-safe.
class CallbackThreads {
 public:
  // Subscribes the device's thread to the stream.
  Status subscribe(StreamRef stream);

 private:
  std::mutex mutex_;
  std::map<int, std::thread::native_handle_type> threads_;
};

}  // namespace npu_kv
