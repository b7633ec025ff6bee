// One operator call, copied out of the caller's descriptors, and the structures behind the opaque
// descriptor types of the ACL interface.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "abi/acl_op_abi.h"
#include "abi/operator_kernel.h"
#include "engine/memory.h"
#include "engine/task.h"

struct aclTensorDesc {
  aclDataType dtype = ACL_DT_UNDEFINED;
  aclFormat format = ACL_FORMAT_UNDEFINED;
  std::vector<int64_t> shape;
  aclFormat storage_format = ACL_FORMAT_UNDEFINED;
  std::vector<int64_t> storage_shape;
  aclMemType placement = ACL_MEMTYPE_DEVICE;
  std::string name;
};

struct aclDataBuffer {
  void* data = nullptr;
  size_t bytes = 0;
};

namespace npu_kv::sim {

struct AttributeValue {
  npu_sim_attribute_kind kind;
  std::vector<int64_t> ints;
  std::vector<float> floats;
  std::vector<std::string> strings;
  std::vector<size_t> row_lengths;
};

}  // namespace npu_kv::sim

struct aclopAttr {
  std::map<std::string, npu_kv::sim::AttributeValue> values;
};

namespace npu_kv::sim {

struct Kernel {
  npu_sim_operator_function run = nullptr;
  npu_sim_operator_function check = nullptr;
  void* user = nullptr;
};

/// What tells how far a tensor goes. Where torch_npu describes a tensor by its storage, it counts
/// the storage's elements and takes the dtype of the tensor: more bytes than there are, or fewer.
enum class Extent {
  kBuffer,      // its shape, which must fit into the buffer
  kShape,       // its shape; the buffer's size is that of a storage
  kAllocation,  // it is a view, of a storage that shape and buffer describe: what is left of memory
};

struct OperatorTensor {
  aclTensorDesc description;
  size_t bytes = 0;
  std::string constant;  // value of a host constant
  Location location;     // of anything else
  bool is_constant() const { return description.placement != ACL_MEMTYPE_DEVICE; }

  /// Finds the tensor's bytes. Those of a host constant are copied, as the caller frees them at
  /// once. Throws 107000 for an address that is not live memory of `device`, and 100000 for a
  /// buffer that is smaller than the tensor. `what` names the tensor in messages.
  void take(const MemoryMap& memory, const aclDataBuffer& buffer, int device,
            const std::string& what, Extent extent);
};

using Shapes = std::vector<std::vector<int64_t>>;

/// The bytes of its tensors that an operator has used, where it says so.
struct Touched {
  struct Range {
    size_t offset;
    size_t bytes;
  };
  std::vector<std::vector<Range>> inputs;
  std::vector<std::vector<Range>> outputs;
};

/// Everything a kernel needs, owned. Constant once it is queued.
class OperatorCall {
 public:
  std::string type;
  Kernel kernel;
  std::vector<OperatorTensor> inputs;
  std::vector<OperatorTensor> outputs;
  std::map<std::string, AttributeValue> attributes;
  /// Where the kernel puts output shapes that depend on the data; null when nobody can learn them.
  std::shared_ptr<Shapes> resized;
  int64_t bytes = 0;  // what it reads and writes; set by prepare

  /// "Add(float16[2,3], float16[] host constant) -> float16[2,3]"
  std::string signature() const;

  /// Sets `bytes`. Returns why the kernel does not take this call, or nothing when it does.
  std::string prepare();
  /// Returns why the kernel could not compute this; nothing when it has. Throws 507015 when the
  /// device would have failed, or the memory of a tensor has been freed.
  /// With `order` the race checker learns what was used.
  std::string run(const TaskOrder* order) const;

 private:
  int invoke(npu_sim_operator_function function, bool with_device_data, int64_t& traffic,
             std::string& reason, Touched* touched = nullptr) const;
  void note(const TaskOrder& order, const Touched& touched) const;
};

}  // namespace npu_kv::sim
