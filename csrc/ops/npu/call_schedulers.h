// The call schedulers of the process, one a device, each started at its first use. Thread-safe.
#pragma once

#include <chrono>

#include "runtime/runtime.h"
#include "transfer/call_scheduler.h"

namespace npu_kv {

// The one of a device, ready for copies of a direction. The device must be current. Throws
// TransferError when it cannot start or was stopped, or the runtime lacks what it needs.
CallScheduler& call_scheduler(int device, Direction direction);

// Reports copies of deferred calls that have failed to the pending errors.
void check_deferred_copies(int device);
void check_all_deferred_copies();

// Deferred calls that streams get to from now on copy nothing and are errors.
void stop_deferred_calls(std::chrono::nanoseconds timeout);

// Of a device; zeros when it has had no such call.
CallStats deferred_call_stats(int device);

}  // namespace npu_kv
