// A context: the streams of one device that share a failure, a callback thread and capture rules.
#pragma once

#include <memory>
#include <thread>
#include <vector>

#include "engine/error.h"

namespace npu_kv::sim {

class CallbackThread;
class Graph;
class Stream;

/// Guarded by the engine's mutex.
class Context {
 public:
  Context(int device, bool primary) : device(device), primary(primary) {}

  const int device;
  const bool primary;

  std::shared_ptr<Stream> default_stream;          // made at first use
  std::shared_ptr<CallbackThread> host_functions;  // runs aclrtLaunchHostFunc, made at first use
  /// Failure mode STOP (set on any stream, it holds for the whole context), and the first failure
  /// since: every later submission and synchronise answers it.
  bool stop_on_failure = false;
  Failure failure;
  std::vector<Graph*> captures;  // captures that are under way
  int set_device_count = 0;
};

}  // namespace npu_kv::sim
