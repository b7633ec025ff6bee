#include "ops/npu/memory_use.h"

#include <ATen/core/CachingHostAllocator.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <unordered_set>

#include "runtime/acl/acl_runtime.h"

namespace npu_kv {
namespace {

using WeakStorage = c10::weak_intrusive_ptr<c10::StorageImpl>;

WeakStorage weak(const at::Tensor& tensor) {
  return WeakStorage(tensor.storage().getWeakStorageImpl());
}

bool is_page_locked(const at::Tensor& tensor, const void* address) {
  MemoryPlace place;
  const Status status = acl_runtime().place_of(address, &place);
  // Without the query only torch_npu knows, and only its own blocks.
  if (status.code() == kNotSupported) return tensor.is_pinned();
  return status.ok() && place.kind == MemoryKind::kPinnedHost;
}

template <typename Visit>
void for_each_tensor(at::TensorList src, at::TensorList dst, const BlockTransfer& transfer,
                     Visit visit) {
  for (size_t i = 0; i < src.size(); ++i) visit(src[i], transfer.src[i], "src", i);
  for (size_t i = 0; i < dst.size(); ++i) visit(dst[i], transfer.dst[i], "dst", i);
}

int64_t begin_of(const BlockLayout& layout) { return layout.empty() ? 0 : layout.base; }
int64_t end_of(const BlockLayout& layout) { return layout.empty() ? 0 : layout.end(); }

}  // namespace

const MemoryUse& MemoryUseCache::find(at::TensorList src, at::TensorList dst,
                                      const BlockTransfer& transfer, c10_npu::NPUStream stream) {
  Entry* found = nullptr;
  for (Entry& entry : entries_) {
    if (entry.used && matches(entry, src, dst, transfer)) {
      found = &entry;
      break;
    }
  }
  if (found == nullptr) {
    found = &entries_[next_];
    next_ = (next_ + 1) % entries_.size();
    found->used = false;
    fill(found, src, dst, transfer);
    found->used = true;
  }
  const bool recorded =
      std::find(found->streams.begin(), found->streams.end(), stream.id()) != found->streams.end();
  if (!recorded) record(found, src, dst, transfer, stream);
  return found->use;
}

bool MemoryUseCache::matches(const Entry& entry, at::TensorList src, at::TensorList dst,
                             const BlockTransfer& transfer) {
  if (entry.keys.size() != src.size() + dst.size()) return false;
  auto key = entry.keys.begin();
  auto same = [&key](const at::Tensor& tensor, const BlockLayout& layout) {
    const bool equal = key->storage._unsafe_get_target() ==
                           tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl() &&
                       key->begin == begin_of(layout) && key->end == end_of(layout);
    ++key;
    return equal;
  };
  for (size_t i = 0; i < src.size(); ++i) {
    if (!same(src[i], transfer.src[i])) return false;
  }
  for (size_t i = 0; i < dst.size(); ++i) {
    if (!same(dst[i], transfer.dst[i])) return false;
  }
  return true;
}

void MemoryUseCache::fill(Entry* entry, at::TensorList src, at::TensorList dst,
                          const BlockTransfer& transfer) {
  entry->keys.clear();
  entry->streams.clear();
  entry->use = MemoryUse{};
  std::unordered_set<const c10::StorageImpl*> seen;
  for_each_tensor(
      src, dst, transfer,
      [&](const at::Tensor& tensor, const BlockLayout& layout, const char* list, size_t index) {
        entry->keys.push_back({weak(tensor), begin_of(layout), end_of(layout)});
        if (layout.empty()) return;
        if (seen.insert(tensor.storage().unsafeGetStorageImpl()).second) {
          entry->use.storages.push_back(weak(tensor));
        }
        if (layout.place.kind != PlaceKind::kHost || !entry->use.pageable.empty()) return;
        // Both ends: a part of an allocation may be registered with the runtime.
        if (!is_page_locked(tensor, reinterpret_cast<const void*>(layout.base)) ||
            !is_page_locked(tensor, reinterpret_cast<const void*>(layout.end() - 1))) {
          entry->use.pageable = std::string(list) + "[" + std::to_string(index) + "]";
        }
      });
}

void MemoryUseCache::record(Entry* entry, at::TensorList src, at::TensorList dst,
                            const BlockTransfer& transfer, c10_npu::NPUStream stream) {
  entry->use.foreign_host.clear();
  at::HostAllocator* host_allocator = at::getHostAllocator(at::kPrivateUse1);
  std::unordered_set<const c10::StorageImpl*> seen;
  for_each_tensor(
      src, dst, transfer,
      [&](const at::Tensor& tensor, const BlockLayout& layout, const char*, size_t) {
        if (layout.empty()) return;
        if (!seen.insert(tensor.storage().unsafeGetStorageImpl()).second) return;
        if (layout.place.kind == PlaceKind::kDevice) {
          tensor.record_stream(stream.unwrap());
          return;
        }
        if (!entry->use.pageable.empty()) return;  // the call waits for its copies
        const at::DataPtr& data = tensor.storage().data_ptr();
        if (!host_allocator->record_event(data.get(), data.get_context(), stream.unwrap())) {
          entry->use.foreign_host.push_back(weak(tensor));
        }
      });
  entry->streams.push_back(stream.id());
}

const MemoryUse& memory_use(at::TensorList src, at::TensorList dst, const BlockTransfer& transfer,
                            c10_npu::NPUStream stream) {
  thread_local MemoryUseCache cache;
  return cache.find(src, dst, transfer, stream);
}

}  // namespace npu_kv
