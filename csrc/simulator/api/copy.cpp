// Copies and fills: single, batched, synchronous.
#include "engine/copy.h"

#include <cstdint>
#include <cstring>

#include "api/api.h"
#include "engine/context.h"
#include "engine/engine.h"
#include "engine/graph.h"
#include "engine/stream.h"

using namespace npu_kv::sim;

namespace {

const char* place_name(Place place) {
  switch (place) {
    case Place::kDevice:
      return "device";
    case Place::kPinned:
      return "pinned host";
    case Place::kPageable:
      break;
  }
  return "page-able host";
}

/// The runtime corrects a wrong kind of an asynchronous copy by itself; code that depends on it is
/// wrong, so here the kind has to be true.
void check_kind(aclrtMemcpyKind kind, const Location& destination, const Location& source) {
  if (kind == ACL_MEMCPY_DEFAULT) return;
  Direction claimed;
  switch (static_cast<int>(kind)) {
    case ACL_MEMCPY_HOST_TO_HOST:
      claimed = Direction::kH2H;
      break;
    case ACL_MEMCPY_HOST_TO_DEVICE:
    case 5:  // HOST_TO_BUF_TO_DEVICE
      claimed = Direction::kH2D;
      break;
    case ACL_MEMCPY_DEVICE_TO_HOST:
      claimed = Direction::kD2H;
      break;
    case ACL_MEMCPY_DEVICE_TO_DEVICE:
    case 6:  // INNER_D2D
    case ACL_MEMCPY_INTER_DEVICE_TO_DEVICE:
      claimed = Direction::kD2D;
      break;
    default:
      throw SimulatorError(ACL_ERROR_RT_PARAM_INVALID,
                           "EE1003: kind is " + std::to_string(kind) + ", allowed are 0 to 7");
  }
  if (claimed != direction_of(source.place, destination.place)) {
    throw SimulatorError(ACL_ERROR_RT_PARAM_INVALID, "EE1003: kind is " + std::to_string(kind) +
                                                         ", but the copy goes from " +
                                                         place_name(source.place) + " to " +
                                                         place_name(destination.place) + " memory");
  }
}

/// Locates both sides of a single copy. False when there is nothing to do.
bool prepare(void* dst, size_t dst_max, const void* src, size_t count, aclrtMemcpyKind kind,
             CopySet& copies) {
  if (count == 0) return false;
  require(dst != nullptr && src != nullptr, "dst or src is null");
  if (count > dst_max) {
    throw SimulatorError(ACL_ERROR_RT_PARAM_INVALID, "EE1003: count is " + std::to_string(count) +
                                                         ", above destMax, " +
                                                         std::to_string(dst_max));
  }
  if (dst == src) return false;
  const MemoryMap& memory = Engine::get().memory;
  const Location destination = memory.locate(dst, count, "dst");
  const Location source = memory.locate(src, count, "src");
  check_kind(kind, destination, source);
  copies.add(destination, source, count);
  return true;
}

/// Why page-able memory is refused: on a capturing stream, and on another one while a capture
/// forbids operations that run at once.
struct PageableCodes {
  aclError capturing;
  aclError elsewhere;
};
constexpr PageableCodes kSinglePageable = {ACL_ERROR_RT_PARAM_INVALID,
                                           ACL_ERROR_RT_CAPTURE_MODE_BLOCK_ASYNC};
// An item of a batch is handed to the synchronous copy, whose own check answers.
constexpr PageableCodes kBatchPageable = {ACL_ERROR_RT_CAPTURE_MODE_NOT_SUPPORT,
                                          ACL_ERROR_RT_CAPTURE_MODE_NOT_SUPPORT};

/// Queues the copies. Page-able memory makes the call synchronous: everything before it on the
/// stream, then the copies, then the call returns, with their failure if they failed.
void submit_copies(aclrtStream handle, std::shared_ptr<CopySet> copies, const char* kind,
                   const PageableCodes& pageable) {
  Engine& engine = Engine::get();
  Task task;
  task.kind = kind;
  task.bytes = copies->bytes();
  task.body = [copies](TaskRun& run) { copies->run(run); };
  Engine::Lock lock(engine.mutex);
  auto stream = resolve_stream_locked(engine, handle);
  if (!copies->pageable()) {
    if (stream->capture != nullptr) {
      stream->capture->reserve_copies(stream->lane, copies->direction(),
                                      static_cast<int64_t>(copies->size()),
                                      engine.settings.graph_copies);
    }
    submit_locked(engine, *stream, std::move(task));
    return;
  }
  if (stream->capture != nullptr) {
    throw SimulatorError(pageable.capturing,
                         "EE1016: pageable host memory cannot be copied on a capturing stream");
  }
  check_immediate_allowed(stream->context, pageable.elsewhere);
  synchronize_streams(lock, engine, {stream}, -1);
  submit_locked(engine, *stream, std::move(task));
  synchronize_streams(lock, engine, {stream}, -1);
}

void copy_async(void* dst, size_t dst_max, const void* src, size_t count, aclrtMemcpyKind kind,
                aclrtStream stream) {
  auto copies = std::make_shared<CopySet>();
  if (!prepare(dst, dst_max, src, count, kind, *copies)) return;
  if (copies->direction() == Direction::kH2H) {
    throw SimulatorError(ACL_ERROR_RT_FEATURE_NOT_SUPPORT,
                         "EE1003: an asynchronous copy from host to host memory");
  }
  submit_copies(stream, std::move(copies), "copy", kSinglePageable);
}

bool is_host(aclrtMemLocationType type) {
  return type == ACL_MEM_LOCATION_TYPE_HOST || type == ACL_MEM_LOCATION_TYPE_HOST_NUMA;
}

/// Page-able memory counts as host memory. Called for every item, so the good case is cheap.
bool matches(const aclrtMemLocation& declared, const Location& real) {
  if (real.place != Place::kDevice) return is_host(declared.type);
  return declared.type == ACL_MEM_LOCATION_TYPE_DEVICE &&
         static_cast<int>(declared.id) == real.device;
}

std::string describe(const Location& real) {
  return std::string(place_name(real.place)) + " memory" +
         (real.place == Place::kDevice ? " of device " + std::to_string(real.device) : "");
}

[[noreturn]] void refuse_declared(const aclrtMemLocation& declared, const Location& real,
                                  const char* side) {
  std::string wrong = "type " + std::to_string(declared.type) + ", allowed are host and device";
  if (is_host(declared.type)) wrong = "host memory";
  if (declared.type == ACL_MEM_LOCATION_TYPE_DEVICE) {
    wrong = "memory of device " + std::to_string(declared.id);
  }
  throw SimulatorError(ACL_ERROR_RT_PARAM_INVALID, std::string("EE1016: the ") + side +
                                                       " lies in " + describe(real) +
                                                       ", but is declared as " + wrong);
}

/// The rules of one item of a batch.
void add_item(CopySet& copies, void* dst, const void* src, size_t bytes,
              const aclrtMemcpyBatchAttr& attr, Location& destination, Location& source) {
  if (bytes == 0) throw SimulatorError(ACL_ERROR_RT_PARAM_INVALID, "EE1016: the size is 0");
  if (dst == nullptr || src == nullptr) {
    throw SimulatorError(ACL_ERROR_RT_PARAM_INVALID, "EE1016: dst or src is null");
  }
  const MemoryMap& memory = Engine::get().memory;
  memory.locate(dst, bytes, "dst", destination);
  memory.locate(src, bytes, "src", source);
  if (!matches(attr.dstLoc, destination)) refuse_declared(attr.dstLoc, destination, "destination");
  if (!matches(attr.srcLoc, source)) refuse_declared(attr.srcLoc, source, "source");
  const Direction direction = direction_of(source.place, destination.place);
  if (direction == Direction::kD2D || direction == Direction::kH2H) {
    throw SimulatorError(ACL_ERROR_RT_PARAM_INVALID,
                         "EE1016: a batch copies between host and device only");
  }
  if (copies.size() > 0 && direction != copies.direction()) {
    throw SimulatorError(ACL_ERROR_RT_PARAM_INVALID,
                         "EE1016: a batch copies in one direction only");
  }
  copies.add(destination, source, bytes);
}

/// All rules of a batch. Everything is checked before anything is submitted, which the runtime
/// promises only on some products; `fail_index` names the item that was refused.
std::shared_ptr<CopySet> prepare_batch(void** dsts, size_t* dst_maxs, void** srcs, size_t* sizes,
                                       size_t count, const aclrtMemcpyBatchAttr* attrs,
                                       const size_t* attr_indexes, size_t attr_count,
                                       size_t* fail_index) {
  require(fail_index != nullptr && sizes != nullptr && count > 0,
          "failIndex or sizes is null, or numBatches is 0");
  *fail_index = SIZE_MAX;
  bool all_empty = true;
  for (size_t i = 0; i < count && all_empty; ++i) all_empty = sizes[i] == 0;
  if (all_empty) return nullptr;
  require(dsts != nullptr && dst_maxs != nullptr && srcs != nullptr && attrs != nullptr &&
              attr_indexes != nullptr,
          "an array of the batch is null");
  for (size_t i = 0; i < count; ++i) {
    if (dst_maxs[i] < sizes[i]) {
      require(false, "destMaxs[" + std::to_string(i) + "] is below sizes");
    }
  }
  bool ordered = attr_count >= 1 && attr_count <= count && attr_indexes[0] == 0;
  for (size_t k = 1; k < attr_count && ordered; ++k) {
    ordered = attr_indexes[k] > attr_indexes[k - 1] && attr_indexes[k] < count;
  }
  if (!ordered) {
    throw SimulatorError(ACL_ERROR_RT_PARAM_INVALID,
                         "EE1016: attrsIndexes has to start at 0, rise, and stay below numBatches");
  }
  for (size_t k = 0; k < attr_count; ++k) {
    for (const uint8_t byte : attrs[k].rsv) require(byte == 0, "rsv of an attribute is not 0");
  }
  auto copies = std::make_shared<CopySet>();
  copies->reserve(count);
  Location destination;
  Location source;
  size_t attr = 0;
  for (size_t i = 0; i < count; ++i) {
    if (attr + 1 < attr_count && attr_indexes[attr + 1] == i) ++attr;
    try {
      add_item(*copies, dsts[i], srcs[i], sizes[i], attrs[attr], destination, source);
    } catch (const SimulatorError& error) {
      *fail_index = i;
      throw SimulatorError(error.code(), std::string(error.what()) + ", item " + std::to_string(i) +
                                             " of the batch");
    }
  }
  return copies;
}

/// `limit` 0: any number of items.
void check_batch_size(size_t count, int64_t limit) {
  if (limit > 0 && count > static_cast<size_t>(limit)) {
    throw SimulatorError(ACL_ERROR_RT_PARAM_INVALID, "EE1016: numBatches is " +
                                                         std::to_string(count) + ", at most " +
                                                         std::to_string(limit) + " are allowed");
  }
}

void check_synchronous_allowed() {
  Engine& engine = Engine::get();
  Engine::Lock lock(engine.mutex);
  check_immediate_allowed(require_context(), ACL_ERROR_RT_CAPTURE_MODE_NOT_SUPPORT);
}

/// `later`: the fill runs on a stream, not before the call returns.
std::function<void(const TaskOrder*)> prepare_fill(void* pointer, size_t max, int32_t value,
                                                   size_t count, bool later) {
  require(pointer != nullptr, "devPtr is null");
  if (count > max) {
    throw SimulatorError(
        ACL_ERROR_RT_PARAM_INVALID,
        "EE1003: count is " + std::to_string(count) + ", above maxCount, " + std::to_string(max));
  }
  const Location target = Engine::get().memory.locate(pointer, count, "devPtr");
  if (later && target.place == Place::kPageable) {
    throw SimulatorError(ACL_ERROR_RT_PARAM_INVALID,
                         "EE1003: page-able host memory cannot be set asynchronously");
  }
  return [target, value, count](const TaskOrder* order) {
    if (order != nullptr) {
      RaceChecker::Accesses(Engine::get().races, *order, {&target.allocation, 1})
          .write(target.storage, count);
    }
    check_live(target.allocation);
    if (Engine::get().settings.move_payload) std::memset(target.storage, value, count);
  };
}

}  // namespace

NPU_SIM_EXPORT aclError aclrtMemcpy(void* dst, size_t dst_max, const void* src, size_t count,
                                    aclrtMemcpyKind kind) {
  return NPU_SIM_CALL([&] {
    CopySet copies;
    if (!prepare(dst, dst_max, src, count, kind, copies)) return;
    check_synchronous_allowed();
    copies.run_on_host();
  });
}

NPU_SIM_EXPORT aclError aclrtMemcpyAsync(void* dst, size_t dst_max, const void* src, size_t count,
                                         aclrtMemcpyKind kind, aclrtStream stream) {
  return NPU_SIM_CALL([&] { copy_async(dst, dst_max, src, count, kind, stream); });
}

NPU_SIM_EXPORT aclError aclrtMemcpyAsyncWithCondition(void* dst, size_t dst_max, const void* src,
                                                      size_t count, aclrtMemcpyKind /*kind*/,
                                                      aclrtStream stream) {
  return NPU_SIM_CALL([&] { copy_async(dst, dst_max, src, count, ACL_MEMCPY_DEFAULT, stream); });
}

NPU_SIM_EXPORT aclError aclrtMemcpyBatchAsync(void** dsts, size_t* dst_maxs, void** srcs,
                                              size_t* sizes, size_t count,
                                              aclrtMemcpyBatchAttr* attrs, size_t* attr_indexes,
                                              size_t attr_count, size_t* fail_index,
                                              aclrtStream stream) {
  return NPU_SIM_CALL([&] {
    auto copies = prepare_batch(dsts, dst_maxs, srcs, sizes, count, attrs, attr_indexes, attr_count,
                                fail_index);
    if (!copies) return;
    check_batch_size(count, Engine::get().settings.batch_limit);
    submit_copies(stream, std::move(copies), "batch", kBatchPageable);
    Engine::get().counters.batches += 1;
  });
}

NPU_SIM_EXPORT aclError aclrtMemcpyBatch(void** dsts, size_t* dst_maxs, void** srcs, size_t* sizes,
                                         size_t count, aclrtMemcpyBatchAttr* attrs,
                                         size_t* attr_indexes, size_t attr_count,
                                         size_t* fail_index) {
  return NPU_SIM_CALL([&] {
    auto copies = prepare_batch(dsts, dst_maxs, srcs, sizes, count, attrs, attr_indexes, attr_count,
                                fail_index);
    if (!copies) return;
    check_batch_size(count, 4096);  // DEVMM_MEMCPY_BATCH_MAX_COUNT of the driver
    check_synchronous_allowed();
    copies->run_on_host();
    Engine::get().counters.batches += 1;
  });
}

NPU_SIM_EXPORT aclError aclrtMemset(void* pointer, size_t max, int32_t value, size_t count) {
  return NPU_SIM_CALL([&] {
    if (count == 0) return;
    const auto fill = prepare_fill(pointer, max, value, count, false);
    check_synchronous_allowed();
    Engine& engine = Engine::get();
    const HostAccess access(engine.races, "memset");
    fill(access.order());
    engine.host_spends(device_time_ns(engine.settings, static_cast<int64_t>(count)));
    Engine::Lock lock(engine.mutex);
    engine.changed.notify_all();
  });
}

NPU_SIM_EXPORT aclError aclrtMemsetAsync(void* pointer, size_t max, int32_t value, size_t count,
                                         aclrtStream stream) {
  return NPU_SIM_CALL([&] {
    if (count == 0) return;
    Task task;
    task.kind = "memset";
    task.bytes = static_cast<int64_t>(count);
    task.body = [fill = prepare_fill(pointer, max, value, count, true), count](TaskRun& run) {
      fill(run.order.get());
      run.advance(device_time_ns(Engine::get().settings, static_cast<int64_t>(count)));
    };
    submit(*resolve_stream(stream), std::move(task));
  });
}
