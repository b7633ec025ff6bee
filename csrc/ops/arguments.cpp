#include "ops/arguments.h"

#include <c10/core/SymInt.h>
#include <c10/util/Exception.h>

#include <stdexcept>

#include "runtime/batch_limit.h"

namespace npu_kv {
namespace {

constexpr c10::DeviceType kNpu = c10::DeviceType::PrivateUse1;

struct Name {
  const char* list;
  size_t index;
};

std::ostream& operator<<(std::ostream& out, Name name) {
  return out << name.list << "[" << name.index << "]";
}

// Payload: the dimensions after the first, laid out without gaps.
bool payload_is_contiguous(at::IntArrayRef sizes, at::IntArrayRef strides) {
  int64_t expected = 1;
  for (size_t d = sizes.size(); d-- > 1;) {
    if (sizes[d] != 1 && strides[d] != expected) return false;
    expected *= sizes[d];
  }
  return true;
}

int64_t payload_elements(at::IntArrayRef sizes) {
  int64_t elements = 1;
  for (size_t d = 1; d < sizes.size(); ++d) elements *= sizes[d];
  return elements;
}

void check_kind(const at::Tensor& tensor, Name name) {
  TORCH_CHECK_VALUE(tensor.defined(), name, " is an undefined tensor");
  TORCH_CHECK_TYPE(tensor.layout() == at::kStrided, name, " has layout ", tensor.layout(),
                   "; only dense (strided) tensors have blocks");
  TORCH_CHECK_VALUE(tensor.dim() >= 1, name, " has no dimension; dim 0 of a tensor is its blocks");
}

void check_geometry(const at::Tensor& tensor, Name name) {
  const auto sizes = tensor.sizes();
  const auto strides = tensor.strides();
  const int64_t elements = payload_elements(sizes);
  if (elements == 0 || sizes[0] == 0) return;
  TORCH_CHECK_VALUE(payload_is_contiguous(sizes, strides), name, " has shape ", sizes,
                    " and strides ", strides,
                    ": the payload of a block (all dimensions but the first) must be contiguous");
  TORCH_CHECK_VALUE(sizes[0] == 1 || strides[0] >= elements, name, " has shape ", sizes,
                    " and strides ", strides, ": stride(0) must be at least the payload of ",
                    elements, " elements, or blocks would share memory");
}

BlockLayout layout_of(const at::Tensor& tensor, Name name) {
  check_kind(tensor, name);
  check_geometry(tensor, name);
  const auto item = static_cast<int64_t>(tensor.element_size());
  BlockLayout layout;
  layout.num_blocks = tensor.size(0);
  layout.payload_bytes = payload_elements(tensor.sizes()) * item;
  layout.block_stride = layout.num_blocks > 1 ? tensor.stride(0) * item : layout.payload_bytes;
  layout.place = tensor.device().is_cpu()
                     ? Place{}
                     : Place{PlaceKind::kDevice, static_cast<int32_t>(tensor.device().index())};
  if (layout.empty()) return layout;
  // A storage that was freed or shrunk under the tensor has fewer bytes than the tensor spans.
  const auto offset = tensor.storage_offset() * item;
  const auto span = (layout.num_blocks - 1) * layout.block_stride + layout.payload_bytes;
  const auto held = static_cast<int64_t>(tensor.storage().nbytes());
  TORCH_CHECK_VALUE(offset + span <= held, name, " spans ", offset + span,
                    " bytes of its storage, which holds ", held,
                    ": the storage was freed or resized");
  layout.base = reinterpret_cast<int64_t>(tensor.const_data_ptr());
  TORCH_CHECK_VALUE(layout.base != 0, name, " has no memory: its storage was freed");
  return layout;
}

void check_device(const at::Tensor& tensor, Name name, c10::Device expected) {
  const c10::Device device = tensor.device();
  TORCH_CHECK_VALUE(device.is_cpu() || device.type() == kNpu, name, " is on ", device,
                    "; allowed are CPU and NPU");
  TORCH_CHECK_VALUE(device == expected, name, " is on ", device, " and ", name.list, "[0] on ",
                    expected, ": the tensors of a list must be on one device");
}

void check_list_lengths(at::TensorList src, at::TensorList dst) {
  TORCH_CHECK_VALUE(src.size() == dst.size(), "src has ", src.size(), " tensors and dst has ",
                    dst.size(), ": they are copied pairwise");
}

void check_dtypes(const at::Tensor& src, const at::Tensor& dst, size_t index) {
  TORCH_CHECK_TYPE(src.scalar_type() == dst.scalar_type(), Name{"src", index}, " has dtype ",
                   src.scalar_type(), " and ", Name{"dst", index}, " has dtype ", dst.scalar_type(),
                   "; they must be equal");
}

void check_payloads(int64_t src_bytes, int64_t dst_bytes, size_t index) {
  TORCH_CHECK_VALUE(src_bytes == dst_bytes, "a block of ", Name{"src", index}, " has ", src_bytes,
                    " bytes and a block of ", Name{"dst", index}, " has ", dst_bytes,
                    "; they must be equal");
}

Direction direction_of(const at::Tensor& src, const at::Tensor& dst) {
  if (src.device().is_cpu()) {
    return dst.device().is_cpu() ? Direction::kHostToHost : Direction::kHostToDevice;
  }
  if (dst.device().is_cpu()) return Direction::kDeviceToHost;
  TORCH_CHECK_VALUE(src.device() == dst.device(), "src is on ", src.device(), " and dst is on ",
                    dst.device(), ": a copy between two NPUs is not supported");
  return Direction::kDeviceToDevice;
}

// The bytes of a block as far as they are known: -1 with a symbolic size.
int64_t known_payload_bytes(const at::Tensor& tensor) {
  int64_t bytes = static_cast<int64_t>(tensor.element_size());
  const auto sizes = tensor.sym_sizes();
  for (size_t d = 1; d < sizes.size(); ++d) {
    const auto size = sizes[d].maybe_as_int();
    if (!size) return -1;
    bytes *= *size;
  }
  return bytes;
}

bool has_symbols(const at::Tensor& tensor) {
  return tensor.unsafeGetTensorImpl()->has_symbolic_sizes_strides();
}

void check_id_tensor(const at::Tensor& ids, const char* name) {
  TORCH_CHECK_VALUE(ids.defined(), name, " is an undefined tensor");
  TORCH_CHECK_TYPE(ids.scalar_type() == at::kLong || ids.scalar_type() == at::kInt, name,
                   " has dtype ", ids.scalar_type(), "; block ids are int32 or int64");
  TORCH_CHECK_TYPE(ids.layout() == at::kStrided, name, " has layout ", ids.layout(),
                   "; block ids are a dense (strided) tensor");
  TORCH_CHECK_VALUE(ids.dim() == 1, name, " has ", ids.dim(),
                    " dimensions; block ids are a 1-D tensor");
}

void check_pointer_tensor(const at::Tensor& tensor, const char* name, bool check_device) {
  TORCH_CHECK_VALUE(tensor.defined(), name, " is an undefined tensor");
  TORCH_CHECK_TYPE(tensor.scalar_type() == at::kLong || tensor.scalar_type() == at::kUInt64, name,
                   " has dtype ", tensor.scalar_type(), "; addresses and sizes are int64");
  TORCH_CHECK_VALUE(tensor.dim() == 1, name, " has ", tensor.dim(),
                    " dimensions; addresses and sizes are 1-D tensors");
  TORCH_CHECK_VALUE(!check_device ? !on_npu(tensor) : tensor.device().is_cpu(), name,
                    " is not on the CPU: addresses and sizes are read by the host");
  if (has_symbols(tensor)) return;
  TORCH_CHECK_VALUE(tensor.numel() <= 1 || tensor.stride(0) == 1, name, " has stride ",
                    tensor.stride(0), "; it must be contiguous");
}

void check_same_length(const at::Tensor& a, const char* a_name, const at::Tensor& b,
                       const char* b_name) {
  const auto a_length = a.sym_size(0).maybe_as_int();
  const auto b_length = b.sym_size(0).maybe_as_int();
  if (!a_length || !b_length) return;
  TORCH_CHECK_VALUE(*a_length == *b_length, a_name, " has ", *a_length, " elements and ", b_name,
                    " has ", *b_length, "; they must be equally long");
}

}  // namespace

int describe_tensors(at::TensorList src, at::TensorList dst, BlockTransfer* transfer) {
  transfer->clear();
  transfer->direction = Direction::kHostToHost;
  check_list_lengths(src, dst);
  if (src.empty()) return -1;
  TORCH_CHECK_VALUE(src[0].defined(), "src[0] is an undefined tensor");
  TORCH_CHECK_VALUE(dst[0].defined(), "dst[0] is an undefined tensor");
  const c10::Device src_device = src[0].device();
  const c10::Device dst_device = dst[0].device();
  transfer->src.reserve(src.size());
  transfer->dst.reserve(src.size());
  for (size_t i = 0; i < src.size(); ++i) {
    transfer->src.push_back(layout_of(src[i], {"src", i}));
    transfer->dst.push_back(layout_of(dst[i], {"dst", i}));
    check_device(src[i], {"src", i}, src_device);
    check_device(dst[i], {"dst", i}, dst_device);
    check_dtypes(src[i], dst[i], i);
    check_payloads(transfer->src[i].payload_bytes, transfer->dst[i].payload_bytes, i);
  }
  transfer->direction = direction_of(src[0], dst[0]);
  return src_device.is_cpu() ? (dst_device.is_cpu() ? -1 : dst_device.index()) : src_device.index();
}

void check_meta_tensors(at::TensorList src, at::TensorList dst) {
  check_list_lengths(src, dst);
  // One tensor on meta brings the whole call here, where nothing is copied. Under fake mode all
  // are.
  auto check_meta = [](const at::Tensor& tensor, Name name) {
    TORCH_CHECK_VALUE(tensor.is_meta(), name, " is on ", tensor.device(),
                      " and another tensor on meta, which has no data to copy");
  };
  for (size_t i = 0; i < src.size(); ++i) {
    for (auto& [tensor, name] :
         {std::pair(src[i], Name{"src", i}), std::pair(dst[i], Name{"dst", i})}) {
      check_kind(tensor, name);
      check_meta(tensor, name);
      if (!has_symbols(tensor)) check_geometry(tensor, name);
    }
    check_dtypes(src[i], dst[i], i);
    const int64_t src_bytes = known_payload_bytes(src[i]);
    const int64_t dst_bytes = known_payload_bytes(dst[i]);
    if (src_bytes >= 0 && dst_bytes >= 0) check_payloads(src_bytes, dst_bytes, i);
    TORCH_CHECK_VALUE(on_npu(src[i]) == on_npu(src[0]), Name{"src", i}, " and src[0] are on ",
                      "different devices: the tensors of a list must be on one device");
    TORCH_CHECK_VALUE(on_npu(dst[i]) == on_npu(dst[0]), Name{"dst", i}, " and dst[0] are on ",
                      "different devices: the tensors of a list must be on one device");
  }
}

bool on_npu(const at::Tensor& tensor) {
  // A fake tensor says "meta" when asked for its device here; its dispatch keys tell the truth.
  return tensor.key_set().has_backend(c10::BackendComponent::PrivateUse1Bit);
}

void check_id_tensors(const at::Tensor& src_blocks, const at::Tensor& dst_blocks) {
  check_id_tensor(src_blocks, "src_blocks");
  check_id_tensor(dst_blocks, "dst_blocks");
  check_same_length(src_blocks, "src_blocks", dst_blocks, "dst_blocks");
}

void check_ids_on_cpu(const at::Tensor& src_blocks, const at::Tensor& dst_blocks) {
  TORCH_CHECK_VALUE(src_blocks.device().is_cpu(), "src_blocks is on ", src_blocks.device(),
                    "; allowed are CPU and NPU");
  TORCH_CHECK_VALUE(dst_blocks.device().is_cpu(), "dst_blocks is on ", dst_blocks.device(),
                    "; allowed are CPU and NPU");
}

void check_ids_on_npu(const at::Tensor& src_blocks, const at::Tensor& dst_blocks, int device) {
  TORCH_CHECK_VALUE(src_blocks.device() == dst_blocks.device(), "src_blocks is on ",
                    src_blocks.device(), " and dst_blocks on ", dst_blocks.device(),
                    "; they must be on one device");
  TORCH_CHECK_VALUE(device < 0 || src_blocks.device().index() == device, "src_blocks is on ",
                    src_blocks.device(), " and the pools are on npu:", device,
                    "; ids on an NPU must be on that of the pools");
}

IdList id_list(const at::Tensor& ids) {
  return {ids.const_data_ptr(), ids.scalar_type() == at::kLong, static_cast<size_t>(ids.size(0))};
}

void check_equal_length(size_t src_blocks, size_t dst_blocks) {
  TORCH_CHECK_VALUE(src_blocks == dst_blocks, "src_blocks has ", src_blocks,
                    " elements and dst_blocks has ", dst_blocks, "; they must be equally long");
}

void check_pointer_arguments(const at::Tensor& src_ptrs, const at::Tensor& dst_ptrs,
                             const at::Tensor& sizes, int64_t direction, bool check_device) {
  check_pointer_tensor(src_ptrs, "src_ptrs", check_device);
  check_pointer_tensor(dst_ptrs, "dst_ptrs", check_device);
  check_pointer_tensor(sizes, "sizes", check_device);
  check_same_length(src_ptrs, "src_ptrs", dst_ptrs, "dst_ptrs");
  check_same_length(src_ptrs, "src_ptrs", sizes, "sizes");
  TORCH_CHECK_VALUE(direction >= 0 && direction <= 2, "direction is ", direction,
                    "; allowed are 0 (host to device), 1 (device to host) and 2 (device to "
                    "device)");
}

void prepare_checked(BlockTransfer* transfer, const IdList& src_ids, const IdList& dst_ids) {
  try {
    prepare(transfer, src_ids, dst_ids);
  } catch (const std::out_of_range& error) {
    TORCH_CHECK_INDEX(false, error.what());
  } catch (const std::invalid_argument& error) {
    TORCH_CHECK_VALUE(false, error.what());
  }
}

size_t max_batch_checked() {
  try {
    return max_batch();
  } catch (const std::invalid_argument& error) {
    TORCH_CHECK_VALUE(false, error.what());
  }
}

}  // namespace npu_kv
