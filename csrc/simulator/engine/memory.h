// Address classes and live allocations. Device memory is handed out as addresses of a reserved zone
// in which nothing is ever mapped: code that touches them from the CPU crashes, as on an NPU. The
// bytes live elsewhere, known to the simulator alone.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <shared_mutex>
#include <string>
#include <unordered_map>

#include "engine/settings.h"
#include "engine/vector_clock.h"

namespace npu_kv::sim {

struct Actor;

enum class Place { kDevice, kPinned, kPageable };

/// When a word got its value: on the virtual clock, and for the race checker.
struct WordWrite {
  int64_t time_ns = 0;
  ClockRef clock;
};

/// One live allocation or registered host range. The bytes stay mapped while anybody holds the
/// object, so a copy in flight never faults; `live` turns false at the free.
struct Allocation {
  Allocation(Place place, int device, uintptr_t address, size_t bytes)
      : place(place), device(device), address(address), bytes(bytes) {}
  ~Allocation();
  Allocation(const Allocation&) = delete;
  Allocation& operator=(const Allocation&) = delete;

  const Place place;
  const int device;         // -1 for host memory
  const uintptr_t address;  // as the user sees it
  const size_t bytes;       // as asked for
  char* storage = nullptr;  // where the bytes are; equals `address` for host memory
  size_t mapped_bytes = 0;  // what the destructor unmaps; 0 for registered memory
  bool registered = false;
  std::atomic<bool> live{true};
  /// The last aclrtValueWrite, by offset. Guarded by the engine's mutex.
  std::unordered_map<uintptr_t, WordWrite> words_written;
  std::shared_ptr<const Actor> freed_by;  // the race checker's
};

/// Where an address range lies. `allocation` is null for page-able memory.
struct Location {
  Place place = Place::kPageable;
  int device = -1;
  char* storage = nullptr;
  std::shared_ptr<Allocation> allocation;
};

/// Thread-safe.
class MemoryMap {
 public:
  explicit MemoryMap(const Settings& settings);

  void* allocate_device(int device, size_t bytes);
  void free_device(void* pointer);
  void* allocate_pinned(size_t bytes);
  void free_pinned(void* pointer);
  void register_host(void* pointer, size_t bytes);
  void unregister_host(void* pointer);

  /// Throws 107000 when the range starts in an allocation and leaves it, or lies in the device zone
  /// outside every live allocation. `what` names the argument in the message.
  Location locate(const void* pointer, size_t bytes, const char* what) const;
  /// As above, but looks at `hint` first: the items of a batch mostly share an allocation.
  void locate(const void* pointer, size_t bytes, const char* what, Location& hint) const;

  int64_t device_bytes(int device) const;
  int64_t pinned_bytes() const { return pinned_bytes_.load(); }
  struct Counts {
    int64_t device_allocations, device_bytes, pinned_allocations, registered_ranges;
  };
  Counts counts() const;

 private:
  void insert(std::shared_ptr<Allocation> allocation);
  /// With mutex_ held; null when `pointer` does not start such a range.
  std::shared_ptr<Allocation> remove(void* pointer, Place place, bool registered);
  uintptr_t reserve_device_range(size_t bytes);  // with mutex_ held
  bool in_device_zone(uintptr_t address) const { return address - zone_begin_ < zone_bytes_; }

  const Settings& settings_;
  uintptr_t zone_begin_ = 0;
  size_t zone_bytes_ = 0;
  mutable std::shared_mutex mutex_;
  std::map<uintptr_t, std::shared_ptr<Allocation>> by_address_;
  uintptr_t zone_cursor_ = 0;
  std::map<int, int64_t> device_bytes_;
  std::atomic<int64_t> pinned_bytes_{0};
};

}  // namespace npu_kv::sim
