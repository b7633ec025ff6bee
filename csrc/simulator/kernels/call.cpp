#include "kernels/call.h"

#include <ATen/ATen.h>
#include <c10/util/strides.h>

#include <cstring>
#include <sstream>

#include "abi/acl_op_abi.h"

namespace npu_kv::sim::kernels {
namespace {

at::ScalarType scalar_type(int32_t dtype) {
  switch (dtype) {
    case ACL_FLOAT:
      return at::kFloat;
    case ACL_FLOAT16:
      return at::kHalf;
    case ACL_INT8:
      return at::kChar;
    case ACL_INT32:
      return at::kInt;
    case ACL_UINT8:
      return at::kByte;
    case ACL_INT16:
      return at::kShort;
    case ACL_UINT16:
      return at::kUInt16;
    case ACL_UINT32:
      return at::kUInt32;
    case ACL_INT64:
      return at::kLong;
    case ACL_UINT64:
      return at::kUInt64;
    case ACL_DOUBLE:
      return at::kDouble;
    case ACL_BOOL:
      return at::kBool;
    case ACL_COMPLEX64:
      return at::kComplexFloat;
    case ACL_COMPLEX128:
      return at::kComplexDouble;
    case ACL_BF16:
      return at::kBFloat16;
    default:
      throw Unsupported("the kernels have no dtype for aclDataType " + std::to_string(dtype));
  }
}

at::IntArrayRef extents(const npu_sim_tensor& tensor) {
  return {tensor.shape, static_cast<size_t>(tensor.dims)};
}

at::Tensor view(const npu_sim_tensor& tensor, at::IntArrayRef sizes, at::IntArrayRef strides,
                int64_t offset) {
  const at::ScalarType type = scalar_type(tensor.dtype);
  const auto options = at::TensorOptions().dtype(type).device(at::kCPU);
  if (c10::multiply_integers(sizes) == 0) return at::empty(sizes, options);
  int64_t last = offset;
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (strides[i] < 0) throw Unsupported("stride " + std::to_string(strides[i]) + " is negative");
    last += (sizes[i] - 1) * strides[i];
  }
  if (tensor.data == nullptr) throw Unsupported("a tensor has no data yet");
  const auto item = static_cast<int64_t>(c10::elementSize(type));
  if (offset < 0 || (last + 1) * item > static_cast<int64_t>(tensor.bytes)) {
    throw DeviceFault("a view from element " + std::to_string(offset) + " to element " +
                      std::to_string(last) + " leaves its memory of " +
                      std::to_string(tensor.bytes) + " bytes");
  }
  return at::from_blob(static_cast<char*>(tensor.data) + offset * item, sizes, strides, options);
}

at::Tensor dense(const npu_sim_tensor& tensor) {
  const at::IntArrayRef storage(tensor.storage_shape, static_cast<size_t>(tensor.storage_dims));
  const at::IntArrayRef shape = extents(tensor);
  if (c10::multiply_integers(shape) != c10::multiply_integers(storage)) {
    throw Unsupported("a tensor whose storage has another number of elements (a private format)");
  }
  return view(tensor, shape, c10::contiguous_strides(shape), 0);
}

}  // namespace

const npu_sim_tensor& Call::input(size_t index) const {
  if (!has(index)) throw Unsupported("input " + std::to_string(index) + " is missing");
  return call_.input[index];
}

const npu_sim_tensor& Call::output(size_t index) const {
  if (index >= call_.outputs) {
    throw Unsupported("output " + std::to_string(index) + " is missing");
  }
  return call_.output[index];
}

bool Call::has(size_t input) const {
  return input < call_.inputs && call_.input[input].dtype != ACL_DT_UNDEFINED;
}

at::Tensor Call::in(size_t index) const { return dense(input(index)); }

std::vector<at::Tensor> Call::ins(size_t first) const {
  std::vector<at::Tensor> tensors;
  for (size_t i = first; i < call_.inputs; ++i) tensors.push_back(in(i));
  return tensors;
}

std::vector<int64_t> Call::ints(size_t index) const {
  const at::Tensor values = in(index).to(at::kLong).contiguous();
  const int64_t* begin = values.const_data_ptr<int64_t>();
  return {begin, begin + values.numel()};
}

at::Scalar Call::number(size_t index) const {
  const at::Tensor value = in(index);
  if (value.numel() != 1) {
    throw Unsupported("input " + std::to_string(index) + " must be one number");
  }
  return value.item();
}

at::IntArrayRef Call::shape(size_t index) const { return extents(input(index)); }

at::IntArrayRef Call::out_shape(size_t index) const { return extents(output(index)); }

at::ScalarType Call::out_type(size_t index) const { return scalar_type(output(index).dtype); }

int64_t Call::bytes(size_t index) const { return static_cast<int64_t>(input(index).bytes); }

int64_t Call::out_bytes(size_t index) const { return static_cast<int64_t>(output(index).bytes); }

bool Call::nothing_to_do() const {
  for (size_t i = 0; i < call_.outputs; ++i) {
    if (c10::multiply_integers(out_shape(i)) > 0) return false;
  }
  return true;
}

at::Tensor Call::out(size_t index) const { return dense(output(index)); }

bool Call::in_place(size_t input_index, size_t output_index) const {
  return input(input_index).data == output(output_index).data;
}

at::Tensor Call::strided_in(size_t index, at::IntArrayRef sizes, at::IntArrayRef strides,
                            int64_t offset) const {
  return view(input(index), sizes, strides, offset);
}

at::Tensor Call::strided_out(size_t index, at::IntArrayRef sizes, at::IntArrayRef strides,
                             int64_t offset) const {
  return view(output(index), sizes, strides, offset);
}

void Call::touch_in(size_t index, const at::Tensor& part) const { touch(false, index, part); }

void Call::touch_out(size_t index, const at::Tensor& part) const { touch(true, index, part); }

void Call::touch_in(size_t index, const at::Tensor& whole, const Indices& indices) const {
  touch(false, index, whole, indices);
}

void Call::touch_out(size_t index, const at::Tensor& whole, const Indices& indices) const {
  touch(true, index, whole, indices);
}

void Call::touch(bool is_output, size_t index, const at::Tensor& part) const {
  if (call_.touch == nullptr || part.numel() == 0) return;
  // The dimensions at the end that are dense make one row; the others say where rows begin.
  int64_t row = 1;
  int64_t outer = part.dim();
  while (outer > 0 && (part.size(outer - 1) == 1 || part.stride(outer - 1) == row)) {
    row *= part.size(--outer);
  }
  at::Tensor firsts = at::zeros({1}, at::kLong);
  for (int64_t dim = 0; dim < outer; ++dim) {
    firsts =
        (firsts.unsqueeze(1) + at::arange(part.size(dim), at::kLong) * part.stride(dim)).flatten();
  }
  touch_rows(is_output, index, part, firsts, row);
}

void Call::touch(bool is_output, size_t index, const at::Tensor& whole,
                 const Indices& indices) const {
  if (call_.touch == nullptr || whole.numel() == 0) return;
  int64_t outer = 0;  // dimensions up to the last that has an index
  at::Tensor chosen = at::zeros({1}, at::kLong);
  at::Tensor firsts = at::zeros({1}, at::kLong);
  for (int64_t dim = 0; dim < static_cast<int64_t>(indices.size()); ++dim) {
    const std::optional<at::Tensor> along = indices.get(dim);
    if (!along) continue;
    outer = dim + 1;
    const at::Tensor place = along->to(at::kLong).remainder(whole.size(dim));
    chosen = chosen + place * whole.stride(dim);
  }
  if (chosen.numel() == 0) return;
  firsts = chosen.flatten();
  for (int64_t dim = 0; dim < outer; ++dim) {
    if (indices.get(dim)) continue;
    firsts = (firsts.unsqueeze(1) + at::arange(whole.size(dim), at::kLong) * whole.stride(dim))
                 .flatten();
  }
  int64_t row = 1;
  for (int64_t dim = outer; dim < whole.dim(); ++dim) row *= whole.size(dim);
  touch_rows(is_output, index, whole, firsts, row);
}

void Call::touch_rows(bool is_output, size_t index, const at::Tensor& view,
                      const at::Tensor& firsts, int64_t elements) const {
  const npu_sim_tensor& tensor = is_output ? output(index) : input(index);
  const auto item = static_cast<size_t>(view.element_size());
  const auto base = static_cast<size_t>(static_cast<const char*>(view.const_data_ptr()) -
                                        static_cast<const char*>(tensor.data));
  const at::Tensor sorted = std::get<0>(firsts.sort()).contiguous();
  const int64_t* first = sorted.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < sorted.numel(); ++i) {
    if (i > 0 && first[i] == first[i - 1]) continue;
    call_.touch(&call_, is_output, index, base + static_cast<size_t>(first[i]) * item,
                static_cast<size_t>(elements) * item);
  }
}

void Call::give(std::initializer_list<at::Tensor> results) const {
  size_t index = 0;
  for (const at::Tensor& result : results) {
    const at::IntArrayRef shape = extents(output(index));
    if (result.sizes() != shape) {
      std::ostringstream text;
      text << "the result has shape " << result.sizes() << ", output " << index << " has " << shape;
      throw Unsupported(text.str());
    }
    ++index;
  }
  index = 0;
  for (const at::Tensor& result : results) out(index++).copy_(result);
}

void Call::give_resized(const at::Tensor& result, size_t index) const {
  const npu_sim_tensor& target = output(index);
  const at::IntArrayRef shape = result.sizes();
  const at::Tensor place = view(target, shape, c10::contiguous_strides(shape), 0);
  if (call_.resize_output(&call_, index, static_cast<int32_t>(shape.size()), shape.data()) != 0) {
    throw Unsupported(
        "its output's shape depends on the data, which only aclopCompileAndExecuteV2 "
        "can report");
  }
  if (result.numel() > 0) place.copy_(result);
}

const npu_sim_attribute* Call::find(const char* name, int kind) const {
  for (size_t i = 0; i < call_.attributes; ++i) {
    const npu_sim_attribute& attribute = call_.attribute[i];
    if (std::strcmp(attribute.name, name) != 0) continue;
    if (attribute.kind != kind) {
      throw Unsupported("attribute " + std::string(name) + " has kind " +
                        std::to_string(attribute.kind) + ", expected " + std::to_string(kind));
    }
    return &attribute;
  }
  return nullptr;
}

bool Call::flag(const char* name, bool otherwise) const {
  const npu_sim_attribute* attribute = find(name, NPU_SIM_BOOL);
  return attribute == nullptr ? otherwise : attribute->ints[0] != 0;
}

int64_t Call::integer(const char* name, int64_t otherwise) const {
  const npu_sim_attribute* attribute = find(name, NPU_SIM_INT);
  return attribute == nullptr ? otherwise : attribute->ints[0];
}

double Call::real(const char* name, double otherwise) const {
  const npu_sim_attribute* attribute = find(name, NPU_SIM_FLOAT);
  return attribute == nullptr ? otherwise : attribute->floats[0];
}

std::string Call::text(const char* name, const char* otherwise) const {
  const npu_sim_attribute* attribute = find(name, NPU_SIM_STRING);
  return attribute == nullptr ? otherwise : attribute->strings[0];
}

std::vector<int64_t> Call::integers(const char* name) const {
  const npu_sim_attribute* attribute = find(name, NPU_SIM_INTS);
  if (attribute == nullptr) return {};
  return {attribute->ints, attribute->ints + attribute->count};
}

}  // namespace npu_kv::sim::kernels
