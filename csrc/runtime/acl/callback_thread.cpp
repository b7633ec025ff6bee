#include "runtime/acl/callback_thread.h"

#include <acl/acl.h>

#include <chrono>
#include <condition_variable>

#include "runtime/acl/acl_api.h"

namespace npu_kv {
namespace {

constexpr int kReportTimeoutMs = 100;
// A thread whose last stream is gone is answered at once.
constexpr auto kPauseWithoutStreams = std::chrono::milliseconds(10);

struct Start {
  std::mutex mutex;
  std::condition_variable changed;
  bool subscribed = false;
};

void serve(const std::shared_ptr<Start>& start, int device) {
  (void)aclrtSetDevice(device);
  {
    std::unique_lock lock(start->mutex);
    start->changed.wait(lock, [&] { return start->subscribed; });
  }
  for (;;) {
    const aclError code = aclrtProcessReport(kReportTimeoutMs);
    if (code != ACL_SUCCESS && code != ACL_ERROR_RT_REPORT_TIMEOUT) {
      std::this_thread::sleep_for(kPauseWithoutStreams);
    }
  }
}

}  // namespace

Status CallbackThreads::subscribe(StreamRef stream) {
  const std::lock_guard lock(mutex_);
  std::shared_ptr<Start> start;
  auto found = threads_.find(stream.device);
  if (found == threads_.end()) {
    start = std::make_shared<Start>();
    std::thread thread([start, device = stream.device] { serve(start, device); });
    found = threads_.emplace(stream.device, thread.native_handle()).first;
    thread.detach();
  }
  const aclError code = aclrtSubscribeReport(static_cast<uint64_t>(found->second),
                                             static_cast<aclrtStream>(stream.handle));
  if (start) {
    const std::lock_guard lock_start(start->mutex);
    start->subscribed = true;
    start->changed.notify_one();
  }
  // 107011: somebody else's thread serves the stream; it will do.
  if (code == ACL_SUCCESS || code == ACL_ERROR_RT_STREAM_SUBSCRIBE) return {};
  return {code, acl_error_text("aclrtSubscribeReport", code)};
}

}  // namespace npu_kv
