#include "ops/npu/captured_graphs.h"

#include <acl/acl.h>
#include <c10/util/Exception.h>
#include <torch_npu/csrc/core/npu/NPUGraphsUtils.h>

#include <atomic>
#include <condition_variable>
#include <iterator>
#include <thread>

#include "runtime/acl/acl_api.h"
#include "transfer/call_scheduler.h"

namespace npu_kv {
namespace {

// Destroys graphs' belongings on a thread of its own: the runtime tells of a graph's end from
// within its own call, and a tensor's memory may belong to Python. Thread-safe.
class ReleaseThread {
 public:
  void release(std::unique_ptr<CapturedGraph> graph) {
    const std::lock_guard lock(mutex_);
    if (ended_) {
      (void)graph.release();
      return;
    }
    if (!started_) std::thread([this] { run(); }).detach();
    started_ = true;
    waiting_.push_back(std::move(graph));
    work_.notify_one();
  }

  // Graphs that are not released yet.
  size_t pending() {
    const std::lock_guard lock(mutex_);
    return waiting_.size() + releasing_;
  }

  void end(std::chrono::nanoseconds timeout) {
    std::unique_lock lock(mutex_);
    ended_ = true;
    idle_.wait_for(lock, timeout, [&] { return waiting_.empty() && releasing_ == 0; });
  }

 private:
  void run() {
    std::unique_lock lock(mutex_);
    for (;;) {
      work_.wait(lock, [&] { return !waiting_.empty(); });
      auto graphs = std::exchange(waiting_, {});
      releasing_ = graphs.size();
      lock.unlock();
      for (auto& graph : graphs) {
        (void)aclrtSetDevice(graph->device);
        graph.reset();
      }
      lock.lock();
      releasing_ = 0;
      idle_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable work_;
  std::condition_variable idle_;
  std::vector<std::unique_ptr<CapturedGraph>> waiting_;
  bool started_ = false;
  size_t releasing_ = 0;
  bool ended_ = false;
};

ReleaseThread& release_thread() {
  static auto* thread = new ReleaseThread;  // it runs as long as the process
  return *thread;
}

}  // namespace

void CapturedGraph::hold(std::vector<c10::Storage> storages) {
  const std::lock_guard lock(mutex_);
  for (c10::Storage& storage : storages) {
    if (held_.insert(storage.unsafeGetStorageImpl()).second) {
      storages_.push_back(std::move(storage));
    }
  }
}

CapturedGraph::CapturedGraph(int device)
    : device(device), number([] {
        static std::atomic<uint64_t> last{0};
        return ++last;
      }()) {}

CapturedGraph::~CapturedGraph() {
  for (const auto& call : calls_) call->scheduler->let_go(*call);
}

DeferredCall* CapturedGraph::add(std::unique_ptr<DeferredCall> call,
                                 std::vector<std::unique_ptr<CallSlot>> slots) {
  const std::lock_guard lock(mutex_);
  call->captured = true;
  call->number = calls_.size() + 1;
  slots_.insert(slots_.end(), std::move_iterator(slots.begin()), std::move_iterator(slots.end()));
  calls_.push_back(std::move(call));
  return calls_.back().get();
}

bool CapturedGraph::take_copies(StreamRef stream, Direction direction, size_t copies, size_t limit,
                                size_t* taken) {
  const std::lock_guard lock(mutex_);
  size_t& noted = copies_[{stream.handle, direction}];
  *taken = noted;
  if (limit != 0 && noted + copies > limit) return false;
  noted += copies;
  return true;
}

bool is_capturing(StreamRef stream) {
  const auto info = optional_acl_functions().capture_info;
  aclmdlRICaptureStatus status = ACL_MODEL_RI_CAPTURE_STATUS_NONE;
  return info != nullptr &&
         info(static_cast<aclrtStream>(stream.handle), &status, nullptr) == ACL_SUCCESS &&
         status != ACL_MODEL_RI_CAPTURE_STATUS_NONE;
}

CapturedGraph& CapturedGraphs::captured_by(StreamRef stream) {
  const OptionalAclFunctions& acl = optional_acl_functions();
  auto raw = static_cast<aclrtStream>(stream.handle);
  aclmdlRICaptureStatus status = ACL_MODEL_RI_CAPTURE_STATUS_NONE;
  aclmdlRI handle = nullptr;
  const aclError code = acl.capture_info(raw, &status, &handle);
  TORCH_CHECK(code == ACL_SUCCESS,
              "npu_kv::swap_blocks_batch: ", acl_error_text("aclmdlRICaptureGetInfo", code));
  TORCH_CHECK(status == ACL_MODEL_RI_CAPTURE_STATUS_ACTIVE && handle != nullptr,
              "npu_kv::swap_blocks_batch: the capture on the current stream is no longer valid, an "
              "earlier operation has broken it");
  const auto id = static_cast<uint32_t>(c10_npu::captureIdMayInitCtx(raw).value_or(0));

  std::unique_ptr<CapturedGraph> stale;
  CapturedGraph* graph = nullptr;
  bool is_new = false;
  {
    const std::lock_guard lock(mutex_);
    Entry& entry = graphs_[handle];
    // Another graph has the handle of one whose end nobody told.
    if (entry.graph && entry.id != id) stale = std::move(entry.graph);
    is_new = !entry.graph;
    if (is_new) entry = {id, std::make_unique<CapturedGraph>(stream.device)};
    graph = entry.graph.get();
  }
  // Without the lock: the runtime may call on_destroyed, which takes it, under a lock of its own. A
  // runtime that lacks this, or does not take it during a capture, leaves it to release().
  if (is_new && acl.register_destroy_callback != nullptr) {
    (void)acl.register_destroy_callback(handle, &CapturedGraphs::on_destroyed, handle);
  }
  if (stale) release_thread().release(std::move(stale));
  return *graph;
}

std::unique_ptr<CapturedGraph> CapturedGraphs::take(void* graph) {
  const std::lock_guard lock(mutex_);
  const auto found = graphs_.find(graph);
  if (found == graphs_.end()) return nullptr;
  auto taken = std::move(found->second.graph);
  graphs_.erase(found);
  return taken;
}

void CapturedGraphs::on_destroyed(void* graph) {
  if (auto taken = captured_graphs().take(graph)) release_thread().release(std::move(taken));
}

size_t CapturedGraphs::release(int device) {
  const std::lock_guard lock(mutex_);
  size_t released = 0;
  for (auto at = graphs_.begin(); at != graphs_.end();) {
    if (device >= 0 && at->second.graph->device != device) {
      ++at;
      continue;
    }
    release_thread().release(std::move(at->second.graph));
    at = graphs_.erase(at);
    ++released;
  }
  return released;
}

void CapturedGraphs::end(std::chrono::nanoseconds timeout) { release_thread().end(timeout); }

size_t CapturedGraphs::live() const {
  const std::lock_guard lock(mutex_);
  return graphs_.size() + release_thread().pending();
}

CapturedGraphs& captured_graphs() {
  // Never destroyed: graphs may be destroyed while the process ends.
  static auto* graphs = new CapturedGraphs;
  return *graphs;
}

}  // namespace npu_kv
