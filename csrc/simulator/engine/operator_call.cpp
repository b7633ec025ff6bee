#include "engine/operator_call.h"

#include <algorithm>
#include <array>

#include "engine/engine.h"
#include "engine/error.h"
#include "engine/number_formats.h"

namespace npu_kv::sim {
namespace {

/// Formats in which the device holds a tensor as the framework sees it.
bool is_plain(aclFormat format) {
  switch (format) {
    case ACL_FORMAT_UNDEFINED:
    case ACL_FORMAT_NCHW:
    case ACL_FORMAT_NHWC:
    case ACL_FORMAT_ND:
    case ACL_FORMAT_NDHWC:
    case ACL_FORMAT_NCDHW:
    case ACL_FORMAT_NCL:
      return true;
  }
  return false;
}

int64_t product(const std::vector<int64_t>& shape) {
  int64_t elements = 1;
  for (const int64_t extent : shape) elements *= std::max<int64_t>(extent, 0);
  return elements;
}

std::string describe(const OperatorTensor& tensor) {
  if (tensor.description.dtype == ACL_DT_UNDEFINED) return "none";
  std::string text = dtype_name(tensor.description.dtype) + "[";
  for (size_t i = 0; i < tensor.description.shape.size(); ++i) {
    if (i > 0) text += ",";
    text += std::to_string(tensor.description.shape[i]);
  }
  text += "]";
  if (tensor.is_constant()) text += " host constant";
  return text;
}

std::string describe(const std::vector<OperatorTensor>& tensors) {
  std::string text;
  for (const OperatorTensor& tensor : tensors) {
    if (!text.empty()) text += ", ";
    text += describe(tensor);
  }
  return text;
}

npu_sim_tensor view(const OperatorTensor& tensor, bool with_device_data) {
  const aclTensorDesc& description = tensor.description;
  void* data = nullptr;
  if (tensor.is_constant()) {
    data = const_cast<char*>(tensor.constant.data());
  } else if (with_device_data) {
    data = tensor.location.storage;
  }
  return {description.dtype,
          description.format,
          static_cast<int32_t>(description.shape.size()),
          tensor.is_constant(),
          description.shape.data(),
          description.storage_format,
          static_cast<int32_t>(description.storage_shape.size()),
          description.storage_shape.data(),
          data,
          tensor.bytes};
}

void require_live(const OperatorTensor& tensor, const std::string& type) {
  if (tensor.location.allocation && !tensor.location.allocation->live) {
    throw SimulatorError(ACL_ERROR_RT_AICORE_EXCEPTION,
                         "EZ9999: operator " + type + " ran on device memory (" + describe(tensor) +
                             ") that had been freed");
  }
}

/// Where an operator's reports go.
struct Reports {
  Shapes* shapes;
  Touched* touched;
};

void touch(const npu_sim_operator_call* call, int is_output, size_t tensor, size_t offset,
           size_t bytes) {
  Touched& touched = *static_cast<Reports*>(call->runtime)->touched;
  auto& ranges = (is_output != 0 ? touched.outputs : touched.inputs)[tensor];
  if (!ranges.empty() && ranges.back().offset + ranges.back().bytes == offset) {
    ranges.back().bytes += bytes;
  } else {
    ranges.push_back({offset, bytes});
  }
}

int resize_output(const npu_sim_operator_call* call, size_t output, int32_t dims,
                  const int64_t* shape) {
  auto* const shapes = static_cast<Reports*>(call->runtime)->shapes;
  if (shapes == nullptr) return 1;
  if (shapes->size() <= output) shapes->resize(output + 1);
  (*shapes)[output].assign(shape, shape + dims);
  return 0;
}

/// The views of one call, with everything they point to.
struct Views {
  std::vector<npu_sim_tensor> inputs;
  std::vector<npu_sim_tensor> outputs;
  std::vector<npu_sim_attribute> attributes;
  std::vector<std::vector<const char*>> strings;
};

}  // namespace

std::string OperatorCall::signature() const {
  return type + "(" + describe(inputs) + ") -> " + describe(outputs);
}

int OperatorCall::invoke(npu_sim_operator_function function, bool with_device_data,
                         int64_t& traffic, std::string& error, Touched* touched) const {
  Views views;
  for (const OperatorTensor& tensor : inputs) {
    views.inputs.push_back(view(tensor, with_device_data));
  }
  for (const OperatorTensor& tensor : outputs) {
    views.outputs.push_back(view(tensor, with_device_data));
  }
  views.strings.reserve(attributes.size());
  for (const auto& [name, value] : attributes) {
    auto& strings = views.strings.emplace_back();
    for (const std::string& text : value.strings) strings.push_back(text.c_str());
    const size_t count =
        std::max({value.kind == NPU_SIM_INT_ROWS ? value.row_lengths.size() : value.ints.size(),
                  value.floats.size(), strings.size()});
    views.attributes.push_back({name.c_str(), value.kind, count, value.ints.data(),
                                value.floats.data(), strings.data(), value.row_lengths.data()});
  }
  std::array<char, 1024> reason{};
  Reports reports{resized.get(), touched};
  const npu_sim_operator_call call = {type.c_str(),
                                      views.inputs.size(),
                                      views.inputs.data(),
                                      views.outputs.size(),
                                      views.outputs.data(),
                                      views.attributes.size(),
                                      views.attributes.data(),
                                      reason.data(),
                                      reason.size(),
                                      &traffic,
                                      resize_output,
                                      touched == nullptr ? nullptr : touch,
                                      &reports};
  const int result = function(&call, kernel.user);
  reason.back() = '\0';
  error = reason.data();
  return result;
}

std::string OperatorCall::prepare() {
  bytes = 0;
  for (const OperatorTensor& tensor : inputs) {
    if (!tensor.is_constant()) bytes += static_cast<int64_t>(tensor.bytes);
  }
  for (const OperatorTensor& tensor : outputs) bytes += static_cast<int64_t>(tensor.bytes);
  if (kernel.check == nullptr) return {};
  std::string reason;
  if (invoke(kernel.check, false, bytes, reason) == NPU_SIM_DONE) return {};
  return reason.empty() ? "it was refused" : reason;
}

void OperatorCall::note(const TaskOrder& order, const Touched& touched) const {
  std::vector<std::shared_ptr<Allocation>> allocations;
  for (const auto* tensors : {&inputs, &outputs}) {
    for (const OperatorTensor& tensor : *tensors) allocations.push_back(tensor.location.allocation);
  }
  RaceChecker::Accesses accesses(Engine::get().races, order, allocations);
  const auto each = [](const OperatorTensor& tensor, const std::vector<Touched::Range>& ranges,
                       auto&& use) {
    if (!tensor.location.allocation) return;
    if (ranges.empty()) use(tensor.location.storage, tensor.bytes);
    for (const auto& [offset, bytes] : ranges) use(tensor.location.storage + offset, bytes);
  };
  for (size_t i = 0; i < inputs.size(); ++i) {
    each(inputs[i], touched.inputs[i],
         [&](const char* begin, size_t bytes) { accesses.read(begin, bytes); });
  }
  for (size_t i = 0; i < outputs.size(); ++i) {
    each(outputs[i], touched.outputs[i],
         [&](const char* begin, size_t bytes) { accesses.write(begin, bytes); });
  }
}

std::string OperatorCall::run(const TaskOrder* order) const {
  for (const OperatorTensor& tensor : inputs) require_live(tensor, type);
  for (const OperatorTensor& tensor : outputs) require_live(tensor, type);
  std::string reason;
  int64_t traffic = bytes;
  Touched touched;
  if (order != nullptr) {
    touched.inputs.resize(inputs.size());
    touched.outputs.resize(outputs.size());
  }
  const int result =
      invoke(kernel.run, true, traffic, reason, order == nullptr ? nullptr : &touched);
  if (order != nullptr && result == NPU_SIM_DONE) note(*order, touched);
  if (result == NPU_SIM_DONE) return {};
  if (result == NPU_SIM_REFUSED) return reason.empty() ? "it was refused" : reason;
  throw SimulatorError(ACL_ERROR_RT_AICORE_EXCEPTION,
                       "EZ9999: simulated operator " + signature() + ": " + reason);
}

void OperatorTensor::take(const MemoryMap& memory, const aclDataBuffer& buffer, int device,
                          const std::string& what, Extent extent) {
  // The storage may be larger than the tensor, which then is a part of it.
  if (is_plain(description.storage_format)) description.storage_shape = description.shape;
  if (is_constant()) extent = Extent::kBuffer;
  const bool is_view = extent == Extent::kAllocation;
  const size_t element = is_view ? 0 : element_bytes(description.dtype);
  bytes = element != 0 ? element * product(description.storage_shape) : buffer.bytes;
  if (bytes > buffer.bytes && extent == Extent::kBuffer) {
    throw SimulatorError(ACL_ERROR_INVALID_PARAM, "EZ9999: " + what + " is " + describe(*this) +
                                                      " and needs " + std::to_string(bytes) +
                                                      " bytes, its buffer has " +
                                                      std::to_string(buffer.bytes));
  }
  if (bytes == 0) return;
  if (buffer.data == nullptr) {
    throw SimulatorError(ACL_ERROR_INVALID_PARAM, "EZ9999: the data of " + what + " is null");
  }
  const Location found = memory.locate(buffer.data, is_view ? 1 : bytes, what.c_str());
  if (is_view && found.allocation) {
    bytes = found.allocation->bytes - (found.storage - found.allocation->storage);
  }
  if (is_constant()) {
    if (found.place == Place::kDevice) {
      throw SimulatorError(ACL_ERROR_RT_PARAM_INVALID,
                           "EE1003: " + what + " is a host constant but lies in device memory");
    }
    constant.assign(static_cast<const char*>(buffer.data), bytes);
    return;
  }
  if (found.place != Place::kDevice || found.device != device) {
    throw SimulatorError(
        ACL_ERROR_RT_PARAM_INVALID,
        "EE1003: " + what + " (" + describe(*this) + ") is " +
            (found.place == Place::kDevice ? "memory of device " + std::to_string(found.device)
                                           : "host memory") +
            ", the stream belongs to device " + std::to_string(device));
  }
  location = found;
}

}  // namespace npu_kv::sim
