// The arguments of `.ptrs` as copies. The operator trusts its addresses; what can be checked at a
// reasonable cost is checked, and all of it where the runtime is the simulated one.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "runtime/export.h"
#include "runtime/runtime.h"

namespace npu_kv {

// Copies out the items of non-zero size. ValueError for a negative size and for a null address.
NPU_KV_API void take_pointers(const at::Tensor& src_ptrs, const at::Tensor& dst_ptrs,
                              const at::Tensor& sizes, std::vector<void*>* src,
                              std::vector<void*>* dst, std::vector<size_t>* size);

struct PointerPlaces {
  int device = -1;        // that of the first device address, -1 if the runtime cannot tell
  bool pageable = false;  // some host address is page-able, as far as it was asked
};

// Asks the runtime where the first and the last byte of ranges lie: of the first item, or of every
// item with set_check_all_pointers(true). ValueError when that contradicts the direction. `sizes`
// is the caller's list, zeros included: messages count as it does.
NPU_KV_API PointerPlaces check_pointers(const Descriptors& copies, Direction direction,
                                        Runtime& runtime, const at::Tensor& sizes);

// Process-wide. Two to four runtime queries for every item: for tests and the simulated runtime.
NPU_KV_API void set_check_all_pointers(bool all);
NPU_KV_API bool check_all_pointers();

// Whether a capture may record `.ptrs`, whose addresses every replay will use. Per thread.
NPU_KV_API void set_pointers_in_graphs(bool allowed);
NPU_KV_API bool pointers_in_graphs();

}  // namespace npu_kv
