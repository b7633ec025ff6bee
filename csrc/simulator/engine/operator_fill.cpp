// ZerosLike, OnesLike and Fill. They need no arithmetic, only the bytes of one value.
#include <algorithm>
#include <array>
#include <cstdio>
#include <cstring>
#include <string>

#include "engine/number_formats.h"
#include "engine/operator_table.h"

namespace npu_kv::sim {
namespace {

constexpr size_t kMaxElementBytes = 16;
using Element = std::array<char, kMaxElementBytes>;

int refuse(const npu_sim_operator_call* call, const std::string& reason) {
  std::snprintf(call->error, call->error_bytes, "%s", reason.c_str());
  return 1;
}

int check_counts(const npu_sim_operator_call* call, size_t inputs) {
  if (call->inputs == inputs && call->outputs == 1) return 0;
  return refuse(call, "takes " + std::to_string(inputs) + " inputs and 1 output");
}

int64_t elements(const npu_sim_tensor& tensor) {
  int64_t count = 1;
  for (int32_t i = 0; i < tensor.storage_dims; ++i) count *= tensor.storage_shape[i];
  return count;
}

void repeat(const Element& element, size_t size, const npu_sim_tensor& tensor) {
  auto* const begin = static_cast<char*>(tensor.data);
  size_t filled = std::min(size, tensor.bytes);
  std::memcpy(begin, element.data(), filled);
  while (filled < tensor.bytes) {  // doubles: each round copies what is there already
    const size_t more = std::min(filled, tensor.bytes - filled);
    std::memcpy(begin + filled, begin, more);
    filled += more;
  }
}

int zeros_like_check(const npu_sim_operator_call* call, void*) { return check_counts(call, 1); }

int zeros_like(const npu_sim_operator_call* call, void*) {
  if (call->output[0].bytes > 0) std::memset(call->output[0].data, 0, call->output[0].bytes);
  return 0;
}

int encode_one(const npu_sim_operator_call* call, Element& element) {
  const int dtype = call->output[0].dtype;
  if (encode_number(dtype, Number::of(1), element.data())) return 0;
  return refuse(call, dtype_name(dtype) + " is not supported");
}

int ones_like_check(const npu_sim_operator_call* call, void*) {
  Element element;
  if (check_counts(call, 1) != 0) return 1;
  return encode_one(call, element);
}

int ones_like(const npu_sim_operator_call* call, void*) {
  Element element;
  if (encode_one(call, element) != 0) return 1;
  repeat(element, element_bytes(call->output[0].dtype), call->output[0]);
  return 0;
}

/// Input 0 is the shape, input 1 the value, on the host or on the device.
int fill_check(const npu_sim_operator_call* call, void*) {
  if (check_counts(call, 2) != 0) return 1;
  Element element{};
  const npu_sim_tensor& value = call->input[1];
  const npu_sim_tensor& output = call->output[0];
  const auto number = decode_number(value.dtype, element.data());
  if (value.dtype != output.dtype &&
      (!number || !encode_number(output.dtype, *number, element.data()))) {
    return refuse(call,
                  "cannot turn " + dtype_name(value.dtype) + " into " + dtype_name(output.dtype));
  }
  if (elements(value) != 1 || element_bytes(value.dtype) == 0) {
    return refuse(call, "the value must be one number");
  }
  const npu_sim_tensor& shape = call->input[0];
  if (shape.dtype != ACL_INT64 && shape.dtype != ACL_INT32) {
    return refuse(call, "the shape must be int32 or int64");
  }
  return 0;
}

int fill(const npu_sim_operator_call* call, void*) {
  const npu_sim_tensor& value = call->input[1];
  const npu_sim_tensor& output = call->output[0];
  const npu_sim_tensor& shape = call->input[0];
  const size_t extent_bytes = element_bytes(shape.dtype);
  int64_t wanted = 1;
  for (size_t offset = 0; offset < shape.bytes; offset += extent_bytes) {
    wanted *= decode_number(shape.dtype, static_cast<const char*>(shape.data) + offset)->integer;
  }
  if (wanted != elements(output)) {
    return refuse(call, "the shape asks for " + std::to_string(wanted) +
                            " elements, the output has " + std::to_string(elements(output)));
  }
  if (output.bytes == 0) return 0;
  Element element;
  if (value.dtype == output.dtype) {
    std::memcpy(element.data(), value.data, element_bytes(value.dtype));
  } else {
    encode_number(output.dtype, *decode_number(value.dtype, value.data), element.data());
  }
  repeat(element, element_bytes(output.dtype), output);
  return 0;
}

}  // namespace

void register_fill_operators(OperatorTable& table) {
  table.add("ZerosLike", {zeros_like, zeros_like_check, nullptr});
  table.add("OnesLike", {ones_like, ones_like_check, nullptr});
  table.add("Fill", {fill, fill_check, nullptr});
}

}  // namespace npu_kv::sim
