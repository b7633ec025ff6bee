#include "ops/pointer_checks.h"

#include <c10/util/Exception.h>

#include <atomic>

namespace npu_kv {
namespace {

std::atomic<bool> all_pointers{false};
thread_local bool allowed_in_graphs = false;

class PlaceChecker {
 public:
  PlaceChecker(Runtime& runtime, const at::Tensor& sizes, PointerPlaces* places)
      : runtime_(runtime), sizes_(sizes), places_(places) {}

  // False when the runtime cannot tell.
  bool check(const char* name, size_t item, const void* address, size_t size, bool on_device) {
    const auto* begin = static_cast<const char*>(address);
    MemoryPlace first;
    MemoryPlace last;
    const int code = runtime_.place_of(begin, &first).code();
    if (code == kNotSupported) return false;
    const bool known = code == 0 && runtime_.place_of(begin + size - 1, &last).ok();
    TORCH_CHECK_VALUE(known && as_expected(first, on_device) && first.kind == last.kind &&
                          is_one_allocation(begin, size, first),
                      name, "[", position_of(item), "]: the ", size, " bytes at ", address,
                      " do not lie in ", on_device ? "device" : "host", " memory");
    if (!on_device) {
      places_->pageable |= first.kind == MemoryKind::kPageableHost;
      return true;
    }
    if (places_->device < 0) places_->device = first.device;
    TORCH_CHECK_VALUE(first.device == places_->device, name, "[", position_of(item), "]: the ",
                      size, " bytes at ", address, " lie on npu:", first.device,
                      ", other addresses of the call on npu:", places_->device);
    return true;
  }

 private:
  static bool as_expected(const MemoryPlace& place, bool on_device) {
    return (place.kind == MemoryKind::kDevice) == on_device;
  }

  // As far as the runtime knows: both ends may lie in allocations of their own.
  bool is_one_allocation(const char* begin, size_t size, const MemoryPlace& place) const {
    MemoryRange range;
    if (place.kind == MemoryKind::kPageableHost || !runtime_.allocation_of(begin, &range).ok()) {
      return true;
    }
    return size <= range.size - static_cast<size_t>(begin - range.begin);
  }

  // Where the caller's list has the item: items of size zero are not among the copies.
  size_t position_of(size_t item) const {
    auto* sizes = static_cast<const int64_t*>(sizes_.const_data_ptr());
    size_t position = 0;
    for (size_t seen = 0;; ++position) {
      if (sizes[position] != 0 && seen++ == item) return position;
    }
  }

  Runtime& runtime_;
  const at::Tensor& sizes_;
  PointerPlaces* places_;
};

}  // namespace

void take_pointers(const at::Tensor& src_ptrs, const at::Tensor& dst_ptrs, const at::Tensor& sizes,
                   std::vector<void*>* src, std::vector<void*>* dst, std::vector<size_t>* size) {
  const auto count = static_cast<size_t>(sizes.numel());
  auto* src_in = static_cast<void* const*>(src_ptrs.const_data_ptr());
  auto* dst_in = static_cast<void* const*>(dst_ptrs.const_data_ptr());
  auto* size_in = static_cast<const int64_t*>(sizes.const_data_ptr());
  src->resize(count);
  dst->resize(count);
  size->resize(count);
  size_t taken = 0;
  for (size_t i = 0; i < count; ++i) {
    const int64_t bytes = size_in[i];
    if (bytes == 0) continue;
    TORCH_CHECK_VALUE(bytes > 0, "sizes[", i, "] is ", bytes, "; a size may not be negative");
    TORCH_CHECK_VALUE(src_in[i] != nullptr, "src_ptrs[", i, "] is null with a size of ", bytes);
    TORCH_CHECK_VALUE(dst_in[i] != nullptr, "dst_ptrs[", i, "] is null with a size of ", bytes);
    (*src)[taken] = src_in[i];
    (*dst)[taken] = dst_in[i];
    (*size)[taken] = static_cast<size_t>(bytes);
    ++taken;
  }
  src->resize(taken);
  dst->resize(taken);
  size->resize(taken);
}

PointerPlaces check_pointers(const Descriptors& copies, Direction direction, Runtime& runtime,
                             const at::Tensor& sizes) {
  PointerPlaces places;
  PlaceChecker checker(runtime, sizes, &places);
  const bool src_on_device = direction != Direction::kHostToDevice;
  const bool dst_on_device = direction != Direction::kDeviceToHost;
  const size_t count = check_all_pointers() ? copies.count : 1;
  for (size_t i = 0; i < count; ++i) {
    if (!checker.check("src_ptrs", i, copies.src[i], copies.size[i], src_on_device)) break;
    if (!checker.check("dst_ptrs", i, copies.dst[i], copies.size[i], dst_on_device)) break;
  }
  return places;
}

void set_check_all_pointers(bool all) { all_pointers = all; }

bool check_all_pointers() { return all_pointers; }

void set_pointers_in_graphs(bool allowed) { allowed_in_graphs = allowed; }

bool pointers_in_graphs() { return allowed_in_graphs; }

}  // namespace npu_kv
