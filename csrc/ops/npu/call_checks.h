// What every call with an NPU tensor looks at before it is accepted.
#pragma once

#include <c10/core/Storage.h>

#include <cstddef>
#include <string>
#include <vector>

namespace npu_kv {

// Calls under way that a call looks at to find host memory to let go of.
inline constexpr size_t kPatience = 4;

// Whether the current stream is known to capture. The device must be current.
bool stream_is_capturing();

// Throws what earlier calls on the device have left; not into a capture, which would break a
// function that has nothing to do with them.
void raise_earlier_errors(int device, bool capturing);

// `op` is the operator, for the message.
[[noreturn]] void refuse_cpu_ids_under_capture(const char* op);

// For a call with page-able host memory (`name`: of what): throws in a capture, warns once else.
void admit_pageable(const char* op, const std::string& name, bool capturing);

std::vector<c10::Storage> strong(
    const std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>>& storages);

}  // namespace npu_kv
