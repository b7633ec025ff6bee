// Attributes of operators: a plain host object of the caller.
#include <string>
#include <utility>
#include <vector>

#include "abi/acl_op_abi.h"
#include "api/api.h"
#include "api/arguments.h"
#include "engine/operator_call.h"

using namespace npu_kv::sim;  // NOLINT: everything here is this namespace's C face

namespace {

AttributeValue integer(npu_sim_attribute_kind kind, int64_t value) {
  return {kind, {value}, {}, {}, {}};
}

void check_list(int count, const void* values) {
  if (count < 0 || (count > 0 && values == nullptr)) {
    throw SimulatorError(ACL_ERROR_INVALID_PARAM,
                         "EH0001: an attribute of " + std::to_string(count) + " values");
  }
}

template <typename T>
AttributeValue integers(npu_sim_attribute_kind kind, int count, const T* values) {
  check_list(count, values);
  return {kind, std::vector<int64_t>(values, values + count), {}, {}, {}};
}

void put(aclopAttr* attributes, const char* name, AttributeValue value) {
  check_pointer(attributes, "attr");
  check_pointer(name, "attrName");
  attributes->values.insert_or_assign(name, std::move(value));
}

}  // namespace

NPU_SIM_EXPORT aclopAttr* aclopCreateAttr() {
  aclopAttr* made = nullptr;
  NPU_SIM_CALL([&] { made = new aclopAttr; });
  return made;
}

NPU_SIM_EXPORT void aclopDestroyAttr(const aclopAttr* attributes) {
  NPU_SIM_CALL([&] { delete attributes; });
}

NPU_SIM_EXPORT aclError aclopSetAttrBool(aclopAttr* attributes, const char* name, uint8_t value) {
  return NPU_SIM_CALL([&] { put(attributes, name, integer(NPU_SIM_BOOL, value != 0)); });
}

NPU_SIM_EXPORT aclError aclopSetAttrInt(aclopAttr* attributes, const char* name, int64_t value) {
  return NPU_SIM_CALL([&] { put(attributes, name, integer(NPU_SIM_INT, value)); });
}

NPU_SIM_EXPORT aclError aclopSetAttrFloat(aclopAttr* attributes, const char* name, float value) {
  return NPU_SIM_CALL([&] { put(attributes, name, {NPU_SIM_FLOAT, {}, {value}, {}, {}}); });
}

NPU_SIM_EXPORT aclError aclopSetAttrString(aclopAttr* attributes, const char* name,
                                           const char* value) {
  return NPU_SIM_CALL([&] {
    check_pointer(value, "attrValue");
    put(attributes, name, {NPU_SIM_STRING, {}, {}, {value}, {}});
  });
}

NPU_SIM_EXPORT aclError aclopSetAttrDataType(aclopAttr* attributes, const char* name,
                                             aclDataType value) {
  return NPU_SIM_CALL([&] { put(attributes, name, integer(NPU_SIM_DATA_TYPE, value)); });
}

NPU_SIM_EXPORT aclError aclopSetAttrListDataType(aclopAttr* attributes, const char* name, int count,
                                                 const aclDataType* values) {
  return NPU_SIM_CALL([&] { put(attributes, name, integers(NPU_SIM_DATA_TYPES, count, values)); });
}

NPU_SIM_EXPORT aclError aclopSetAttrListBool(aclopAttr* attributes, const char* name, int count,
                                             const uint8_t* values) {
  return NPU_SIM_CALL([&] { put(attributes, name, integers(NPU_SIM_BOOLS, count, values)); });
}

NPU_SIM_EXPORT aclError aclopSetAttrListInt(aclopAttr* attributes, const char* name, int count,
                                            const int64_t* values) {
  return NPU_SIM_CALL([&] { put(attributes, name, integers(NPU_SIM_INTS, count, values)); });
}

NPU_SIM_EXPORT aclError aclopSetAttrListFloat(aclopAttr* attributes, const char* name, int count,
                                              const float* values) {
  return NPU_SIM_CALL([&] {
    check_list(count, values);
    put(attributes, name, {NPU_SIM_FLOATS, {}, std::vector<float>(values, values + count), {}, {}});
  });
}

NPU_SIM_EXPORT aclError aclopSetAttrListString(aclopAttr* attributes, const char* name, int count,
                                               const char** values) {
  return NPU_SIM_CALL([&] {
    check_list(count, values);
    put(attributes, name,
        {NPU_SIM_STRINGS, {}, {}, std::vector<std::string>(values, values + count), {}});
  });
}

NPU_SIM_EXPORT aclError aclopSetAttrListListInt(aclopAttr* attributes, const char* name, int rows,
                                                const int* lengths, const int64_t* const* values) {
  return NPU_SIM_CALL([&] {
    check_list(rows, lengths);
    check_list(rows, values);
    AttributeValue list{NPU_SIM_INT_ROWS, {}, {}, {}, {}};
    for (int row = 0; row < rows; ++row) {
      check_list(lengths[row], values[row]);
      list.row_lengths.push_back(static_cast<size_t>(lengths[row]));
      list.ints.insert(list.ints.end(), values[row], values[row] + lengths[row]);
    }
    put(attributes, name, std::move(list));
  });
}
