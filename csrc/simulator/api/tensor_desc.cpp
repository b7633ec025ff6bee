// Tensor descriptors and data buffers: plain host objects of the caller.
#include <string>
#include <vector>

#include "abi/acl_op_abi.h"
#include "api/api.h"
#include "api/arguments.h"
#include "engine/number_formats.h"
#include "engine/operator_call.h"

using namespace npu_kv::sim;  // NOLINT: everything here is this namespace's C face

namespace {

std::vector<int64_t> make_shape(int dims, const int64_t* extents) {
  if (dims < 0 || (dims > 0 && extents == nullptr)) {
    throw SimulatorError(ACL_ERROR_INVALID_PARAM,
                         "EH0001: a shape of " + std::to_string(dims) + " dimensions");
  }
  return std::vector<int64_t>(extents, extents + dims);
}

int64_t element_count(const aclTensorDesc& description) {
  int64_t count = 1;
  for (const int64_t extent : description.shape) {
    if (extent < 0) return 0;  // a dimension that is not known
    count *= extent;
  }
  return count;
}

}  // namespace

NPU_SIM_EXPORT aclTensorDesc* aclCreateTensorDesc(aclDataType dtype, int dims,
                                                  const int64_t* extents, aclFormat format) {
  aclTensorDesc* made = nullptr;
  NPU_SIM_CALL([&] {
    const std::vector<int64_t> shape = make_shape(dims, extents);
    made = new aclTensorDesc{dtype, format, shape, format, shape, ACL_MEMTYPE_DEVICE, {}};
  });
  return made;
}

NPU_SIM_EXPORT void aclDestroyTensorDesc(const aclTensorDesc* description) {
  NPU_SIM_CALL([&] { delete description; });
}

NPU_SIM_EXPORT aclError aclSetTensorFormat(aclTensorDesc* description, aclFormat format) {
  return NPU_SIM_CALL([&] {
    check_pointer(description, "desc");
    description->storage_format = format;
  });
}

NPU_SIM_EXPORT aclError aclSetTensorStorageFormat(aclTensorDesc* description, aclFormat format) {
  return NPU_SIM_CALL([&] {
    check_pointer(description, "desc");
    description->storage_format = format;
  });
}

NPU_SIM_EXPORT aclError aclSetTensorShape(aclTensorDesc* description, int dims,
                                          const int64_t* extents) {
  return NPU_SIM_CALL([&] {
    check_pointer(description, "desc");
    description->storage_shape = make_shape(dims, extents);
  });
}

NPU_SIM_EXPORT aclError aclSetTensorStorageShape(aclTensorDesc* description, int dims,
                                                 const int64_t* extents) {
  return NPU_SIM_CALL([&] {
    check_pointer(description, "desc");
    description->storage_shape = make_shape(dims, extents);
  });
}

NPU_SIM_EXPORT aclError aclSetTensorPlaceMent(aclTensorDesc* description, aclMemType placement) {
  return NPU_SIM_CALL([&] {
    check_pointer(description, "desc");
    if (placement < ACL_MEMTYPE_DEVICE || placement > ACL_MEMTYPE_HOST_COMPILE_INDEPENDENT) {
      throw SimulatorError(ACL_ERROR_INVALID_PARAM,
                           "EH0001: unknown placement " + std::to_string(int{placement}));
    }
    description->placement = placement;
  });
}

NPU_SIM_EXPORT void aclSetTensorDescName(aclTensorDesc* description, const char* name) {
  NPU_SIM_CALL([&] {
    if (description != nullptr) description->name = name == nullptr ? "" : name;
  });
}

NPU_SIM_EXPORT const char* aclGetTensorDescName(aclTensorDesc* description) {
  return description == nullptr ? "" : description->name.c_str();
}

NPU_SIM_EXPORT aclDataType aclGetTensorDescType(const aclTensorDesc* description) {
  return description == nullptr ? ACL_DT_UNDEFINED : description->dtype;
}

NPU_SIM_EXPORT aclFormat aclGetTensorDescFormat(const aclTensorDesc* description) {
  return description == nullptr ? ACL_FORMAT_UNDEFINED : description->format;
}

NPU_SIM_EXPORT size_t aclGetTensorDescNumDims(const aclTensorDesc* description) {
  return description == nullptr ? 0 : description->shape.size();
}

NPU_SIM_EXPORT size_t aclGetTensorDescElementCount(const aclTensorDesc* description) {
  return description == nullptr ? 0 : static_cast<size_t>(element_count(*description));
}

NPU_SIM_EXPORT size_t aclGetTensorDescSize(const aclTensorDesc* description) {
  return aclGetTensorDescElementCount(description) *
         element_bytes(aclGetTensorDescType(description));
}

NPU_SIM_EXPORT aclError aclGetTensorDescDimV2(const aclTensorDesc* description, size_t index,
                                              int64_t* extent) {
  return NPU_SIM_CALL([&] {
    check_pointer(description, "desc");
    check_pointer(extent, "dimSize");
    if (index >= description->shape.size()) {
      throw SimulatorError(ACL_ERROR_INVALID_PARAM, "EH0001: dimension " + std::to_string(index) +
                                                        " of a tensor with " +
                                                        std::to_string(description->shape.size()));
    }
    *extent = description->shape[index];
  });
}

NPU_SIM_EXPORT size_t aclDataTypeSize(aclDataType dtype) { return element_bytes(dtype); }

NPU_SIM_EXPORT float aclFloat16ToFloat(uint16_t value) {
  return static_cast<float>(decode_float16(value));
}

NPU_SIM_EXPORT uint16_t aclFloatToFloat16(float value) { return encode_float16(value); }

NPU_SIM_EXPORT aclDataBuffer* aclCreateDataBuffer(void* data, size_t bytes) {
  aclDataBuffer* made = nullptr;
  NPU_SIM_CALL([&] { made = new aclDataBuffer{data, bytes}; });
  return made;
}

NPU_SIM_EXPORT aclError aclDestroyDataBuffer(const aclDataBuffer* buffer) {
  return NPU_SIM_CALL([&] {
    check_pointer(buffer, "dataBuffer");
    delete buffer;
  });
}

NPU_SIM_EXPORT aclError aclUpdateDataBuffer(aclDataBuffer* buffer, void* data, size_t bytes) {
  return NPU_SIM_CALL([&] {
    check_pointer(buffer, "dataBuffer");
    *buffer = {data, bytes};
  });
}

NPU_SIM_EXPORT void* aclGetDataBufferAddr(const aclDataBuffer* buffer) {
  return buffer == nullptr ? nullptr : buffer->data;
}

NPU_SIM_EXPORT size_t aclGetDataBufferSizeV2(const aclDataBuffer* buffer) {
  return buffer == nullptr ? 0 : buffer->bytes;
}

NPU_SIM_EXPORT uint32_t aclGetDataBufferSize(const aclDataBuffer* buffer) {
  return static_cast<uint32_t>(aclGetDataBufferSizeV2(buffer));
}
