#include "engine/memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <mutex>

#include "engine/engine.h"
#include "engine/error.h"

namespace npu_kv::sim {
namespace {

constexpr size_t kZoneBytes = size_t{1} << 40;
constexpr size_t kSmallestZoneBytes = size_t{1} << 36;
constexpr int kPoison = 0xA5;
// Ranges start at multiples of this, with at least one such unit unused between two of them, so
// that running over an end never lands in a neighbour.
constexpr size_t kRangeAlignment = size_t{2} << 20;

size_t round_up(size_t value, size_t unit) { return (value + unit - 1) / unit * unit; }

bool fits(size_t bytes, int64_t free) { return free >= 0 && bytes <= static_cast<size_t>(free); }

char* map_storage(size_t bytes) {
  // Shared, so that a forked child sees the same device as its parent and not a copy of it.
  void* mapped = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                      MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return mapped == MAP_FAILED ? nullptr : static_cast<char*>(mapped);
}

std::string range_text(uintptr_t address, size_t bytes) {
  char text[64];
  std::snprintf(text, sizeof text, "[0x%zx, +%zu)", static_cast<size_t>(address), bytes);
  return text;
}

}  // namespace

Allocation::~Allocation() {
  if (mapped_bytes != 0) munmap(storage, mapped_bytes);
}

MemoryMap::MemoryMap(const Settings& settings) : settings_(settings) {
  // Less where so much cannot be had: under a limit on addresses, or a sanitizer.
  void* zone = MAP_FAILED;
  for (zone_bytes_ = kZoneBytes; zone_bytes_ >= kSmallestZoneBytes; zone_bytes_ /= 2) {
    zone =
        mmap(nullptr, zone_bytes_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (zone != MAP_FAILED) break;
  }
  if (zone == MAP_FAILED) {
    throw SimulatorError(ACL_ERROR_INTERNAL_ERROR,
                         "EE9999: cannot reserve " + std::to_string(kSmallestZoneBytes >> 30) +
                             " GiB of addresses for the device memory zone");
  }
  zone_begin_ = reinterpret_cast<uintptr_t>(zone);
  zone_cursor_ = round_up(zone_begin_, kRangeAlignment);
}

uintptr_t MemoryMap::reserve_device_range(size_t bytes) {
  // Addresses are not reused until the zone has been walked through once: a pointer to freed memory
  // then stays wrong for long, instead of pointing into the next allocation.
  const size_t span = round_up(bytes, kRangeAlignment) + kRangeAlignment;
  const uintptr_t end = zone_begin_ + zone_bytes_;
  for (int lap = 0; lap < 2; ++lap) {
    while (zone_cursor_ + span <= end) {
      auto next = by_address_.lower_bound(zone_cursor_);
      uintptr_t blocked_until = 0;
      if (next != by_address_.end() && next->first < zone_cursor_ + span) {
        blocked_until = next->first + next->second->bytes;
      } else if (next != by_address_.begin()) {
        const auto& previous = *std::prev(next)->second;
        if (previous.address + previous.bytes > zone_cursor_) {
          blocked_until = previous.address + previous.bytes;
        }
      }
      if (blocked_until == 0) {
        const uintptr_t found = zone_cursor_;
        zone_cursor_ += span;
        return found;
      }
      zone_cursor_ = round_up(blocked_until, kRangeAlignment) + kRangeAlignment;
    }
    zone_cursor_ = round_up(zone_begin_, kRangeAlignment);
  }
  throw SimulatorError(ACL_ERROR_RT_MEMORY_ALLOCATION, "EL0004: the device address zone is full");
}

void MemoryMap::insert(std::shared_ptr<Allocation> allocation) {
  by_address_[allocation->address] = std::move(allocation);
}

void* MemoryMap::allocate_device(int device, size_t bytes) {
  // aclrtMallocAlign32 rounds to 32 bytes; the whole rounded range is the caller's.
  const size_t rounded = round_up(bytes, 32);
  std::unique_lock lock(mutex_);
  const int64_t capacity = settings_.device_memory_bytes;
  int64_t& used = device_bytes_[device];
  if (!fits(bytes, capacity - used) || !fits(rounded, capacity - used)) {
    throw SimulatorError(ACL_ERROR_RT_MEMORY_ALLOCATION,
                         "EL0004: device " + std::to_string(device) + " has " +
                             std::to_string(capacity - used) + " bytes free of " +
                             std::to_string(capacity) + ", asked for " + std::to_string(bytes));
  }
  auto allocation =
      std::make_shared<Allocation>(Place::kDevice, device, reserve_device_range(rounded), rounded);
  const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  allocation->storage = map_storage(round_up(rounded, page));
  if (allocation->storage == nullptr) {
    throw SimulatorError(ACL_ERROR_RT_MEMORY_ALLOCATION,
                         "EL0004: the host has no memory left to back " + std::to_string(bytes) +
                             " bytes of simulated device memory");
  }
  allocation->mapped_bytes = round_up(rounded, page);
  used += static_cast<int64_t>(rounded);
  insert(allocation);
  lock.unlock();
  if (settings_.poison) std::memset(allocation->storage, kPoison, rounded);
  return reinterpret_cast<void*>(allocation->address);
}

void* MemoryMap::allocate_pinned(size_t bytes) {
  if (bytes > static_cast<size_t>(settings_.pinned_bytes_per_call.load())) {
    throw SimulatorError(ACL_ERROR_RT_MEMORY_ALLOCATION,
                         "EL0004: one call pins at most " +
                             std::to_string(settings_.pinned_bytes_per_call.load()) +
                             " bytes, asked for " + std::to_string(bytes));
  }
  std::unique_lock lock(mutex_);
  const int64_t capacity = settings_.pinned_memory_bytes;
  if (!fits(bytes, capacity - pinned_bytes_)) {
    throw SimulatorError(ACL_ERROR_RT_MEMORY_ALLOCATION,
                         "EL0004: " + std::to_string(capacity - pinned_bytes_) +
                             " bytes can still be pinned, asked for " + std::to_string(bytes));
  }
  const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  char* storage = map_storage(round_up(bytes, page));
  if (storage == nullptr) {
    throw SimulatorError(
        ACL_ERROR_RT_MEMORY_ALLOCATION,
        "EL0004: the host has no memory left for " + std::to_string(bytes) + " pinned bytes");
  }
  auto allocation =
      std::make_shared<Allocation>(Place::kPinned, -1, reinterpret_cast<uintptr_t>(storage), bytes);
  allocation->storage = storage;
  allocation->mapped_bytes = round_up(bytes, page);
  pinned_bytes_ += static_cast<int64_t>(bytes);
  insert(allocation);
  lock.unlock();
  if (settings_.poison) std::memset(storage, kPoison, bytes);
  return storage;
}

std::shared_ptr<Allocation> MemoryMap::remove(void* pointer, Place place, bool registered) {
  auto found = by_address_.find(reinterpret_cast<uintptr_t>(pointer));
  if (found == by_address_.end() || found->second->place != place ||
      found->second->registered != registered) {
    return nullptr;
  }
  auto allocation = found->second;
  by_address_.erase(found);
  allocation->live = false;
  if (place == Place::kDevice) {
    device_bytes_[allocation->device] -= static_cast<int64_t>(allocation->bytes);
  } else {
    pinned_bytes_ -= static_cast<int64_t>(allocation->bytes);
  }
  return allocation;
}

void MemoryMap::free_device(void* pointer) {
  std::shared_ptr<Allocation> freed;  // unmapped after the lock is released
  std::unique_lock lock(mutex_);
  freed = remove(pointer, Place::kDevice, false);
  lock.unlock();
  if (freed) Engine::get().races.freed(freed);
  if (!freed) {
    throw SimulatorError(ACL_ERROR_RT_PARAM_INVALID,
                         "EE1011: " + range_text(reinterpret_cast<uintptr_t>(pointer), 0) +
                             " is not the start of a live device allocation");
  }
}

void MemoryMap::free_pinned(void* pointer) {
  std::shared_ptr<Allocation> freed;
  std::unique_lock lock(mutex_);
  freed = remove(pointer, Place::kPinned, false);
  lock.unlock();
  if (freed) Engine::get().races.freed(freed);
  if (!freed) {
    throw SimulatorError(ACL_ERROR_RT_PARAM_INVALID,
                         "EE1011: " + range_text(reinterpret_cast<uintptr_t>(pointer), 0) +
                             " is not the start of a live pinned allocation");
  }
}

void MemoryMap::register_host(void* pointer, size_t bytes) {
  const auto address = reinterpret_cast<uintptr_t>(pointer);
  if (bytes > static_cast<size_t>(settings_.pinned_bytes_per_call.load())) {
    throw SimulatorError(ACL_ERROR_RT_MEMORY_ALLOCATION,
                         "EL0004: one call pins at most " +
                             std::to_string(settings_.pinned_bytes_per_call.load()) +
                             " bytes, asked for " + std::to_string(bytes));
  }
  std::unique_lock lock(mutex_);
  if (in_device_zone(address)) {
    throw SimulatorError(ACL_ERROR_RT_PARAM_INVALID,
                         "EE1003: device memory cannot be registered as host memory");
  }
  auto next = by_address_.lower_bound(address);
  const bool overlaps_next = next != by_address_.end() && next->first < address + bytes;
  const bool overlaps_previous =
      next != by_address_.begin() &&
      std::prev(next)->second->address + std::prev(next)->second->bytes > address;
  if (overlaps_next || overlaps_previous) {
    throw SimulatorError(
        ACL_ERROR_HOST_MEMORY_ALREADY_REGISTERED,
        "EE1003: " + range_text(address, bytes) + " overlaps memory that is page-locked already");
  }
  const int64_t capacity = settings_.pinned_memory_bytes;
  if (!fits(bytes, capacity - pinned_bytes_)) {
    throw SimulatorError(ACL_ERROR_RT_MEMORY_ALLOCATION,
                         "EL0004: " + std::to_string(capacity - pinned_bytes_) +
                             " bytes can still be pinned, asked for " + std::to_string(bytes));
  }
  auto allocation = std::make_shared<Allocation>(Place::kPinned, -1, address, bytes);
  allocation->storage = static_cast<char*>(pointer);
  allocation->registered = true;
  pinned_bytes_ += static_cast<int64_t>(bytes);
  insert(std::move(allocation));
}

void MemoryMap::unregister_host(void* pointer) {
  std::unique_lock lock(mutex_);
  const auto unregistered = remove(pointer, Place::kPinned, true);
  lock.unlock();
  if (unregistered) Engine::get().races.freed(unregistered);
  if (!unregistered) {
    throw SimulatorError(ACL_ERROR_HOST_MEMORY_NOT_REGISTERED,
                         "EE1003: " + range_text(reinterpret_cast<uintptr_t>(pointer), 0) +
                             " is not the start of a registered range");
  }
}

void MemoryMap::locate(const void* pointer, size_t bytes, const char* what, Location& hint) const {
  const auto address = reinterpret_cast<uintptr_t>(pointer);
  if (hint.allocation) {
    const Allocation& last = *hint.allocation;
    const uintptr_t offset = address - last.address;
    if (offset < last.bytes && bytes <= last.bytes - offset && last.live) {
      hint.storage = last.storage + offset;
      return;
    }
  }
  hint = locate(pointer, bytes, what);
}

Location MemoryMap::locate(const void* pointer, size_t bytes, const char* what) const {
  const auto address = reinterpret_cast<uintptr_t>(pointer);
  std::shared_lock lock(mutex_);
  auto next = by_address_.upper_bound(address);
  if (next != by_address_.begin()) {
    const auto& allocation = std::prev(next)->second;
    const uintptr_t offset = address - allocation->address;
    if (offset < allocation->bytes) {
      if (bytes > allocation->bytes - offset) {
        throw SimulatorError(ACL_ERROR_RT_PARAM_INVALID,
                             std::string("EE1003: ") + what + " " + range_text(address, bytes) +
                                 " runs over the end of the allocation " +
                                 range_text(allocation->address, allocation->bytes));
      }
      return {allocation->place, allocation->device, allocation->storage + offset, allocation};
    }
  }
  if (in_device_zone(address)) {
    throw SimulatorError(ACL_ERROR_RT_PARAM_INVALID,
                         std::string("EE1003: ") + what + " " + range_text(address, bytes) +
                             " is device memory that is not allocated (freed, or never was)");
  }
  if (next != by_address_.end() && next->first - address < bytes) {
    throw SimulatorError(ACL_ERROR_RT_PARAM_INVALID,
                         std::string("EE1003: ") + what + " " + range_text(address, bytes) +
                             " starts in page-able memory and runs into page-locked memory");
  }
  return {Place::kPageable, -1, reinterpret_cast<char*>(address), nullptr};
}

int64_t MemoryMap::device_bytes(int device) const {
  std::shared_lock lock(mutex_);
  auto found = device_bytes_.find(device);
  return found == device_bytes_.end() ? 0 : found->second;
}

MemoryMap::Counts MemoryMap::counts() const {
  std::shared_lock lock(mutex_);
  Counts counts{0, 0, 0, 0};
  for (const auto& [address, allocation] : by_address_) {
    if (allocation->place == Place::kDevice) {
      ++counts.device_allocations;
      counts.device_bytes += static_cast<int64_t>(allocation->bytes);
    } else if (allocation->registered) {
      ++counts.registered_ranges;
    } else {
      ++counts.pinned_allocations;
    }
  }
  return counts;
}

}  // namespace npu_kv::sim
