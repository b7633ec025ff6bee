// The one door through which API functions put work on a stream.
#pragma once

#include <memory>

#include "abi/acl_rt_abi.h"
#include "engine/task.h"

namespace npu_kv::sim {

/// The stream behind a handle; null means the current context's default stream.
/// Throws 107002 without a current context, 107017 for an unknown handle, 107003 for a stream of
/// another context.
std::shared_ptr<Stream> resolve_stream(aclrtStream handle);

/// Queues the task, or adds it to the graph when the stream captures. The virtual submission time
/// is filled in. Throws the context's sticky failure (failure mode STOP).
void submit(Stream& stream, Task task);

}  // namespace npu_kv::sim
