#include "bindings/copy_backend.h"

#include <pybind11/stl.h>

#include <chrono>
#include <cmath>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <tuple>
#include <utility>
#include <vector>

#include "ops/npu_hook.h"
#include "ops/python_border.h"
#include "runtime/host_runtime.h"
#include "runtime/pending_errors.h"
#include "transfer/copy_scheduler.h"
#include "transfer/overlap.h"

namespace py = pybind11;

namespace npu_kv {
namespace {

// Base address, block stride, payload bytes, number of blocks.
using LayoutTuple = std::tuple<int64_t, int64_t, int64_t, int64_t>;
// Device stream id of torch_npu; none: the backend makes one.
using StreamId = std::optional<int64_t>;

std::chrono::nanoseconds to_timeout(std::optional<double> seconds) {
  if (!seconds) return std::chrono::nanoseconds(-1);
  // A century is for ever, and fits.
  return std::chrono::nanoseconds(static_cast<int64_t>(std::fmin(*seconds, 3e9) * 1e9));
}

// Waits without the GIL and looks for signals in between, so that Ctrl-C ends a wait without a
// timeout. `wait` takes the time it may take and returns whether what it waits for is there.
template <typename Wait>
bool wait_for_signals_too(std::optional<double> seconds, Wait wait) {
  constexpr std::chrono::nanoseconds kSlice = std::chrono::milliseconds(100);
  const std::chrono::nanoseconds timeout = to_timeout(seconds);
  const auto start = Clock::now();
  for (;;) {
    std::chrono::nanoseconds left = kSlice;
    if (timeout.count() >= 0) left = std::min(kSlice, timeout - (Clock::now() - start));
    left = std::max(left, std::chrono::nanoseconds(0));
    {
      py::gil_scoped_release no_gil;
      if (wait(left)) return true;
    }
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
    if (timeout.count() >= 0 && Clock::now() - start >= timeout) return false;
  }
}

std::vector<BlockLayout> to_layouts(const std::vector<LayoutTuple>& tuples, Place place) {
  std::vector<BlockLayout> layouts;
  layouts.reserve(tuples.size());
  for (const auto& [base, stride, payload, blocks] : tuples) {
    layouts.push_back({base, stride, payload, blocks, place});
  }
  return layouts;
}

// Two tensors of the pools that share bytes make the copies of one job depend on their order.
void refuse_overlaps(const std::vector<BlockLayout>& written, const std::vector<BlockLayout>& read,
                     const char* pool) {
  if (!find_overlaps(read, written).empty()) {
    throw std::invalid_argument(std::string(pool) +
                                ": two tensors share memory; list every byte of a pool once");
  }
}

int64_t to_id(PyObject* item, size_t position, const char* list) {
  const int64_t id = PyLong_AsLongLong(item);
  if (id == -1 && PyErr_Occurred() != nullptr) {
    PyErr_Clear();
    throw py::type_error(std::string(list) + "[" + std::to_string(position) + "] is " +
                         py::repr(item).cast<std::string>() + ", not a block id");
  }
  return id;
}

// Ids as Python hands them over: a list or tuple of int is taken over, an array is looked at.
class PythonIds {
 public:
  PythonIds(const py::object& ids, const char* list) {
    if (PyList_Check(ids.ptr()) || PyTuple_Check(ids.ptr())) {
      owned_.reserve(static_cast<size_t>(PySequence_Fast_GET_SIZE(ids.ptr())));
      // What is no int may run code of its own here, which may change the list.
      for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(ids.ptr()); ++i) {
        const auto item =
            py::reinterpret_borrow<py::object>(PySequence_Fast_GET_ITEM(ids.ptr(), i));
        owned_.push_back(to_id(item.ptr(), static_cast<size_t>(i), list));
      }
      view_ = {owned_.data(), true, owned_.size()};
      return;
    }
    if (!py::isinstance<py::buffer>(ids)) {
      throw py::type_error(std::string(list) + " is a " +
                           py::str(py::type::handle_of(ids).attr("__name__")).cast<std::string>() +
                           ", allowed are list, tuple and 1-D int32 or int64 arrays");
    }
    buffer_ = py::reinterpret_borrow<py::buffer>(ids).request();
    const bool is_int64 = buffer_.item_type_is_equivalent_to<int64_t>();
    if (buffer_.ndim != 1 || !(is_int64 || buffer_.item_type_is_equivalent_to<int32_t>())) {
      throw py::type_error(std::string(list) + " has to be 1-D and int32 or int64");
    }
    if (buffer_.shape[0] > 1 && buffer_.strides[0] != buffer_.itemsize) {
      throw py::type_error(std::string(list) + " has to be contiguous");
    }
    view_ = {buffer_.ptr, is_int64, static_cast<size_t>(buffer_.shape[0])};
  }

  const IdList& view() const { return view_; }

 private:
  std::vector<int64_t> owned_;
  py::buffer_info buffer_;
  IdList view_;
};

using PlanHandle = std::shared_ptr<const CopyPlan>;

// Opens a job's gate on torch_npu's queue thread, after what was queued before it. If the queue
// drops its tasks, the job fails instead of waiting for ever. The event is not held: torch_npu
// destroys events through the same queue, behind this. One thread at a time.
class GateOpening {
 public:
  GateOpening(std::shared_ptr<CopyScheduler> scheduler, std::shared_ptr<CopyJob> job, void* event)
      : scheduler_(std::move(scheduler)), job_(std::move(job)), event_(event) {}
  ~GateOpening() {
    if (!opened_) scheduler_->refuse(*job_, {-1, "torch_npu's task queue dropped the job's event"});
  }
  GateOpening(const GateOpening&) = delete;
  GateOpening& operator=(const GateOpening&) = delete;

  void run() {
    scheduler_->open_gate(*job_, event_);
    opened_ = true;
  }

 private:
  std::shared_ptr<CopyScheduler> scheduler_;
  std::shared_ptr<CopyJob> job_;
  void* event_;
  bool opened_ = false;
};

// One job as Python sees it. Any thread; keeps the scheduler, not the pools.
class CopyEvent {
 public:
  CopyEvent(std::shared_ptr<CopyScheduler> scheduler, std::shared_ptr<CopyJob> job)
      : scheduler_(std::move(scheduler)), job_(std::move(job)) {}

  bool query() {
    if (!scheduler_->query(*job_)) return false;
    throw_if_failed();
    return true;
  }

  // False when the time is over.
  bool synchronize(std::optional<double> seconds) {
    auto wait = [&](std::chrono::nanoseconds left) { return scheduler_->wait(*job_, left); };
    if (!wait_for_signals_too(seconds, wait)) return false;
    throw_if_failed();
    return true;
  }

  // Makes a stream of torch_npu wait for the job; not between host pools, which have none.
  void wait(int64_t stream_id) {
    scheduler_->query(*job_);
    throw_if_failed();
    NpuHook* hook = npu_hook();
    const int device = scheduler_->options().device;
    const StreamRef stream = hook->stream(device, stream_id);
    hook->refuse_capture(stream, "TransferEvent.wait");
    hook->run_in_queue(device, "npu_kv::wait_for_transfer",
                       [scheduler = scheduler_, job = job_, stream, hook] {
                         // The event can be waited for once it is recorded. The scheduler needs
                         // nothing of this thread to get there: the gates of this job and of those
                         // before it were queued before this task.
                         scheduler->wait_launched(*job, std::chrono::nanoseconds(-1));
                         const EventHandle done = scheduler->done_event(*job);
                         if (!done) return;
                         const Status status = hook->runtime().wait_event(stream, done.get());
                         if (!status.ok()) pending_errors().add(stream.device, status.message());
                       });
  }

  std::optional<double> elapsed_ms(const CopyEvent& end) const {
    uint64_t first = 0;
    uint64_t last = 0;
    if (!scheduler_->timestamp(*job_, &first) || !end.scheduler_->timestamp(*end.job_, &last)) {
      return std::nullopt;
    }
    return (static_cast<double>(last) - static_cast<double>(first)) / 1000.0;
  }

 private:
  void throw_if_failed() const {
    const Status status = scheduler_->error(*job_);
    if (!status.ok()) throw_transfer_error(status.message());
  }

  std::shared_ptr<CopyScheduler> scheduler_;
  std::shared_ptr<CopyJob> job_;
};

// The scheduler as Python sees it. Any thread. The pools and given streams are the caller's to keep
// until shutdown has returned true.
class CopyBackend {
 public:
  CopyBackend(int device, const std::vector<LayoutTuple>& device_layouts,
              const std::vector<LayoutTuple>& host_layouts, StreamId load_stream,
              StreamId store_stream) {
    const Place host{PlaceKind::kHost, -1};
    CopyScheduler::Options options;
    options.device = device;
    options.pools.device =
        to_layouts(device_layouts, device < 0 ? host : Place{PlaceKind::kDevice, device});
    options.pools.host = to_layouts(host_layouts, host);
    refuse_overlaps(options.pools.device, options.pools.host, "npu_caches");
    refuse_overlaps(options.pools.host, options.pools.device, "cpu_caches");
    StreamRuntime* runtime = &host_runtime();
    if (device >= 0) {
      if (npu_hook() == nullptr) {
        throw std::invalid_argument("npu_caches are on an NPU, but the NPU library is not loaded");
      }
      runtime = &npu_hook()->runtime();
      const StreamId given[kLanes] = {load_stream, store_stream};
      for (int lane = 0; lane < kLanes; ++lane) {
        options.own_streams[lane] = !given[lane];
        if (given[lane]) options.streams[lane] = npu_hook()->stream(device, *given[lane]);
      }
    } else {
      // Copies between host memory are made by the scheduler's thread itself: short steps, so that
      // a load does not wait for long.
      options.step_bytes = size_t{8} << 20;
    }
    py::gil_scoped_release no_gil;
    const Status status = CopyScheduler::start(*runtime, std::move(options), &scheduler_);
    if (!status.ok()) throw_transfer_error("the copy backend cannot start: " + status.message());
  }

  PlanHandle plan(const py::object& src, const py::object& dst, bool is_store) const {
    const PythonIds sources(src, "src_blocks");
    const PythonIds destinations(dst, "dst_blocks");
    if (sources.view().count != destinations.view().count) {
      throw std::invalid_argument("src_blocks has " + std::to_string(sources.view().count) +
                                  " ids, dst_blocks " + std::to_string(destinations.view().count));
    }
    // Who lets go of the GIL may get it back late.
    std::optional<py::gil_scoped_release> no_gil;
    if (sources.view().count > kPairsWithGil) no_gil.emplace();
    return make_plan(scheduler_->pools(), is_store ? Lane::kStore : Lane::kLoad, sources.view(),
                     destinations.view());
  }

  CopyEvent launch(const py::object& src, const py::object& dst, bool is_store, int64_t label,
                   int64_t wait_event) {
    const auto now = Clock::now();
    return submit(plan(src, dst, is_store), label, wait_event, now);
  }

  // The copies of the plan as a graph of the runtime.
  PlanHandle capture(const PlanHandle& plan) {
    PlanHandle captured;
    const Status status = scheduler_->capture(*plan, &captured);
    if (status.ok()) return captured;
    std::string message = "the transfer cannot be captured: " + status.message();
    if (status.code() == kNoGraphRoom) {
      message += ". A graph holds a limited number of copies, this transfer has " +
                 std::to_string(plan->size.copies_after) + "; launch_copy has no such limit";
    }
    throw_transfer_error(message);
  }

  // `wait_event` is the raw handle of an event of torch_npu, 0 for none.
  CopyEvent submit(const PlanHandle& plan, int64_t label, int64_t wait_event,
                   Clock::time_point now = Clock::now()) {
    // Jobs and the openings of their gates have to be queued in one order; also for jobs without a
    // gate, or a stream could be made to wait for one whose lane still waits for a gate behind it.
    std::unique_lock lock(order_, std::try_to_lock);
    // torch_npu's queue may be full, and its thread want the GIL.
    std::optional<py::gil_scoped_release> no_gil;
    if (wait_event != 0 || !lock) no_gil.emplace();
    if (!lock) lock.lock();
    const std::shared_ptr<CopyJob> job = scheduler_->submit(plan, wait_event != 0, label, now);
    if (!job) throw std::runtime_error("the copy backend was shut down");
    if (wait_event != 0) {
      auto opening =
          std::make_shared<GateOpening>(scheduler_, job, reinterpret_cast<void*>(wait_event));
      npu_hook()->run_in_queue(scheduler_->options().device, "npu_kv::open_gate",
                               [opening] { opening->run(); });
    }
    return {scheduler_, job};
  }

  bool drain(std::optional<double> seconds) {
    return wait_for_signals_too(
        seconds, [&](std::chrono::nanoseconds left) { return scheduler_->drain(left); });
  }
  bool shutdown(std::optional<double> seconds) {
    return wait_for_signals_too(
        seconds, [&](std::chrono::nanoseconds left) { return scheduler_->shutdown(left); });
  }
  void abandon() { scheduler_->abandon(); }

  py::dict stats(bool is_store) const {
    LaneStats lane;
    {
      py::gil_scoped_release no_gil;
      lane = scheduler_->stats()[static_cast<size_t>(is_store ? Lane::kStore : Lane::kLoad)];
    }
    py::dict stats;
    stats["jobs"] = lane.jobs;
    stats["failures"] = lane.failures;
    stats["bytes"] = lane.bytes;
    stats["copies_before"] = lane.copies_before;
    stats["copies_after"] = lane.copies_after;
    stats["hazards"] = lane.hazards;
    stats["queued"] = lane.queued;
    stats["in_flight"] = lane.in_flight;
    stats["peak_depth"] = lane.peak_depth;
    stats["launch_us_p50"] = microseconds(lane.start_ns.quantile(0.5));
    stats["launch_us_p99"] = microseconds(lane.start_ns.quantile(0.99));
    stats["completion_us_p50"] = microseconds(lane.completion_ns.quantile(0.5));
    stats["completion_us_p99"] = microseconds(lane.completion_ns.quantile(0.99));
    return stats;
  }

  // The runtime's handles of the lanes' streams: loads, stores; 0 between host pools.
  std::pair<int64_t, int64_t> stream_handles() const {
    auto handle = [&](Lane lane) {
      const StreamRef& stream = scheduler_->options().streams[static_cast<size_t>(lane)];
      return static_cast<int64_t>(reinterpret_cast<intptr_t>(stream.handle));
    };
    return {handle(Lane::kLoad), handle(Lane::kStore)};
  }

  void start_trace(size_t most) { scheduler_->start_trace(most); }

  py::list stop_trace() {
    std::vector<JobTimes> jobs;
    {
      py::gil_scoped_release no_gil;
      jobs = scheduler_->stop_trace();
    }
    auto ns = [](Clock::time_point at) { return at.time_since_epoch().count(); };
    py::list list;
    for (const JobTimes& job : jobs) {
      py::dict row;
      row["number"] = job.number;
      row["label"] = job.label;
      row["is_store"] = job.lane == Lane::kStore;
      row["pairs"] = job.pairs;
      row["bytes"] = job.bytes;
      row["behind"] = job.behind;
      row["gated"] = job.gated;
      row["failed"] = job.failed;
      row["submitted_ns"] = ns(job.submitted);
      row["gate_opened_ns"] = ns(job.gate_opened);
      row["started_ns"] = ns(job.started);
      row["launched_ns"] = ns(job.launched);
      row["finished_ns"] = ns(job.finished);
      list.append(row);
    }
    return list;
  }

 private:
  static constexpr size_t kPairsWithGil = 4096;
  // What a runtime answers when a captured graph is full.
  static constexpr int kNoGraphRoom = 207008;

  static double microseconds(int64_t ns) { return static_cast<double>(ns) / 1000.0; }

  std::shared_ptr<CopyScheduler> scheduler_;
  std::mutex order_;
};

}  // namespace

void bind_copy_backend(py::module_& m) {
  m.def(
      "is_page_locked",
      [](int64_t address) {
        MemoryPlace place;
        NpuHook* hook = npu_hook();
        return hook != nullptr &&
               hook->runtime().place_of(reinterpret_cast<const void*>(address), &place).ok() &&
               place.kind == MemoryKind::kPinnedHost;
      },
      py::arg("address"));
  using NoGil = py::call_guard<py::gil_scoped_release>;
  py::class_<CopyPlan, std::shared_ptr<CopyPlan>>(m, "CopyPlan")
      .def_property_readonly("pairs", [](const CopyPlan& plan) { return plan.runs.pairs; })
      .def_property_readonly("bytes", [](const CopyPlan& plan) { return plan.size.bytes; })
      .def_property_readonly("copies", [](const CopyPlan& plan) { return plan.size.copies_after; });
  py::class_<CopyEvent>(m, "CopyEvent")
      .def("query", &CopyEvent::query, NoGil())
      .def("synchronize", &CopyEvent::synchronize, py::arg("timeout"))
      .def("wait", &CopyEvent::wait, py::arg("stream_id"), NoGil())
      .def("elapsed_ms", &CopyEvent::elapsed_ms, py::arg("end"), NoGil());
  py::class_<CopyBackend>(m, "CopyBackend")
      .def(py::init<int, const std::vector<LayoutTuple>&, const std::vector<LayoutTuple>&, StreamId,
                    StreamId>(),
           py::arg("device"), py::arg("device_layouts"), py::arg("host_layouts"),
           py::arg("load_stream"), py::arg("store_stream"))
      .def(
          "plan",
          [](const CopyBackend& backend, const py::object& src, const py::object& dst,
             bool is_store) {
            return std::const_pointer_cast<CopyPlan>(backend.plan(src, dst, is_store));
          },
          py::arg("src_blocks"), py::arg("dst_blocks"), py::arg("is_store"))
      .def(
          "submit",
          [](CopyBackend& backend, const std::shared_ptr<CopyPlan>& plan, int64_t label,
             int64_t wait_event) { return backend.submit(plan, label, wait_event); },
          py::arg("plan"), py::arg("label"), py::arg("wait_event"))
      .def("launch", &CopyBackend::launch, py::arg("src_blocks"), py::arg("dst_blocks"),
           py::arg("is_store"), py::arg("label"), py::arg("wait_event"))
      .def(
          "capture",
          [](CopyBackend& backend, const std::shared_ptr<CopyPlan>& plan) {
            return std::const_pointer_cast<CopyPlan>(backend.capture(plan));
          },
          py::arg("plan"), NoGil())
      .def("stream_handles", &CopyBackend::stream_handles)
      .def("start_trace", &CopyBackend::start_trace, py::arg("most"), NoGil())
      .def("stop_trace", &CopyBackend::stop_trace)
      .def("drain", &CopyBackend::drain, py::arg("timeout"))
      .def("shutdown", &CopyBackend::shutdown, py::arg("timeout"))
      .def("abandon", &CopyBackend::abandon, NoGil())
      .def("stats", &CopyBackend::stats, py::arg("is_store"));
}

}  // namespace npu_kv
