// Operators that read or write where an index tensor says.
#include <ATen/ATen.h>

#include <algorithm>

#include "kernels/table.h"

namespace npu_kv::sim::kernels {
namespace {

/// A device does not look at indices before it uses them; here a wrong one fails before anything is
/// written.
void require_within(const at::Tensor& index, int64_t extent, bool from_the_end = false) {
  if (index.numel() == 0) return;
  const auto [least, greatest] = index.aminmax();
  const int64_t lowest = from_the_end ? -extent : 0;
  for (const int64_t value : {least.item().toLong(), greatest.item().toLong()}) {
    if (value < lowest || value >= extent) {
      throw DeviceFault("index " + std::to_string(value) + " is outside [" +
                        std::to_string(lowest) + ", " + std::to_string(extent) + ")");
    }
  }
}

int64_t axis_of(const Call& call, int64_t axis) {
  return at::maybe_wrap_dim(axis, static_cast<int64_t>(call.shape(0).size()));
}

/// Whole rows along an axis; indices of any shape take the axis' place.
at::Tensor rows(const at::Tensor& x, int64_t axis, const at::Tensor& index) {
  std::vector<int64_t> shape(x.sizes().begin(), x.sizes().begin() + axis);
  shape.insert(shape.end(), index.sizes().begin(), index.sizes().end());
  shape.insert(shape.end(), x.sizes().begin() + axis + 1, x.sizes().end());
  return x.index_select(axis, index.flatten()).reshape(shape);
}

Call::Indices along(int64_t axis, const at::Tensor& index) {
  Call::Indices indices;
  for (int64_t dim = 0; dim < axis; ++dim) indices.push_back(std::nullopt);
  indices.push_back(index);
  return indices;
}

void gather_rows(const Call& call) {
  if (call.integer("batch_dims", 0) != 0) throw Unsupported("batch_dims");
  const at::Tensor x = call.in(0);
  const at::Tensor index = call.in(1);
  const int64_t axis = axis_of(call, call.ints(2).at(0));
  require_within(index, x.size(axis));
  call.touch_in(0, x, along(axis, index));
  call.give(rows(x, axis, index));
}

int64_t gather_bytes(const Call& call) { return 2 * call.out_bytes() + call.bytes(1); }

void gather_elements(const Call& call) {
  const at::Tensor x = call.in(0);
  const at::Tensor index = call.in(1).to(at::kLong);
  const int64_t axis = axis_of(call, call.integer("dim", 0));
  require_within(index, x.dim() == 0 ? 1 : x.size(axis));
  call.give(at::gather(x, axis, index));
}

void scatter_elements(const Call& call) {
  const at::Tensor x = call.in(0);
  const at::Tensor index = call.in(1).to(at::kLong);
  const at::Tensor source = call.in(2);
  const int64_t axis = axis_of(call, call.integer("axis", 0));
  const std::string reduction = call.text("reduction", "none");
  require_within(index, x.dim() == 0 ? 1 : x.size(axis));
  if (reduction == "none") return call.give(at::scatter(x, axis, index, source));
  if (reduction == "add") return call.give(at::scatter_add(x, axis, index, source));
  throw Unsupported("reduction " + reduction);
}

/// Input 1 holds 1 for each dimension that has an index tensor; the tensors follow from `first`.
/// Dimensions behind its end have none.
Call::Indices index_list(const Call& call, size_t mask, size_t first) {
  Call::Indices list;
  size_t next = first;
  int64_t dim = 0;
  for (const int64_t indexed : call.ints(mask)) {
    if (indexed == 0) {
      list.push_back(std::nullopt);
    } else {
      const at::Tensor index = call.in(next++);
      require_within(index, call.shape(0).at(dim), /*from_the_end=*/true);
      list.push_back(index);
    }
    ++dim;
  }
  return list;
}

void index(const Call& call) {
  const at::Tensor x = call.in(0);
  const auto indices = index_list(call, 1, 3);
  call.touch_in(0, x, indices);
  call.give(at::index(x, indices));
}

int64_t index_bytes(const Call& call) {
  int64_t total = 2 * call.out_bytes();
  for (size_t i = 3; i < call.inputs(); ++i) total += call.bytes(i);
  return total;
}

/// Works in place where the framework asks for it: a KV cache is large, what a step writes is not.
void index_put(const Call& call) {
  const auto indices = index_list(call, 2, 4);
  const at::Tensor values = call.in(1);
  const at::Tensor target = call.out();
  // Refuses shapes that do not fit, before anything is written.
  const at::Tensor slots = at::index(target, indices);
  const at::Tensor expanded = values.expand_as(slots).clone();
  if (call.in_place(0)) {
    call.touch_in(0, target, indices);
    call.touch_out(0, target, indices);
  } else {
    call.give(call.in(0));
  }
  at::Tensor(target).index_put_(indices, expanded, call.flag("accumulate", false));
}

/// The values may be broadcast, so the indices say how many elements are written.
int64_t index_put_bytes(const Call& call) {
  const std::vector<int64_t> mask = call.ints(2);
  int64_t indices = 0;
  int64_t places = 0;
  for (size_t i = 4; i < call.inputs(); ++i) {
    indices += call.bytes(i);
    places = std::max(places, c10::multiply_integers(call.shape(i)));
  }
  for (size_t dim = 0; dim < call.shape(0).size(); ++dim) {
    if (dim >= mask.size() || mask[dim] == 0) places *= call.shape(0)[dim];
  }
  return indices + 2 * places * static_cast<int64_t>(c10::elementSize(call.out_type()));
}

/// Adds rows: self, indices, rows, factor.
void index_add(const Call& call) {
  const at::Tensor x = call.in(0);
  const at::Tensor index = call.in(1);
  const int64_t axis = axis_of(call, call.integer("axis", 0));
  require_within(index, x.size(axis));
  call.give(at::index_add(x, axis, index, call.in(2), call.number(3)));
}

/// The framework turns the indices into two tensors of the input's shape: one that is 0 where to
/// fill, and one that holds the value there.
void index_fill(const Call& call) {
  call.give(at::where(call.in(1).eq(0), call.in(2), call.in(0)));
}

/// Rows along the first axis.
void gather_first(const Call& call) {
  const at::Tensor x = call.in(0);
  const at::Tensor index = call.in(1).to(at::kLong);
  require_within(index, x.size(0));
  call.touch_in(0, x, along(0, index));
  call.give(rows(x, 0, index));
}

/// Input, indices [..., k] into its first k dimensions, values.
void scatter_nd(const Call& call, bool accumulate) {
  const at::Tensor index = call.in(1).to(at::kLong);
  c10::List<std::optional<at::Tensor>> indices;
  for (int64_t dim = 0; dim < index.size(-1); ++dim) {
    const at::Tensor along = index.select(-1, dim);
    require_within(along, call.shape(0).at(dim));
    indices.push_back(along);
  }
  call.give(at::index_put(call.in(0), indices, call.in(2), accumulate));
}

void one_hot(const Call& call) {
  const at::Tensor index = call.in(0).to(at::kLong);
  const int64_t classes = call.number(1).toLong();
  if (call.integer("axis", -1) != -1) throw Unsupported("an axis that is not the last");
  const at::Tensor hit = index.unsqueeze(-1).eq(at::arange(classes, at::kLong));
  call.give(at::where(hit, call.in(2), call.in(3)));
}

void nll_loss(const Call& call) {
  const std::string reduction = call.text("reduction", "mean");
  const int64_t kind = reduction == "none" ? 0 : reduction == "mean" ? 1 : 2;
  const auto [loss, weight] = at::nll_loss_forward(call.in(0), call.in(1).to(at::kLong), call.in(2),
                                                   kind, call.integer("ignore_index", -100));
  call.give({loss, kind == 0 ? at::zeros(call.out_shape(1)) : weight});
}

}  // namespace

void add_indexing(Table& table) {
  table["GatherV2"] = {gather_rows, gather_bytes};
  table["GatherElements"] = {gather_elements, gather_bytes};
  table["ScatterElements"] = {scatter_elements};
  table["Index"] = {index, index_bytes};
  table["IndexPutV2"] = {index_put, index_put_bytes};
  table["InplaceIndexAdd"] = {index_add};
  table["IndexFillD"] = {index_fill};
  table["Gather"] = {gather_first, gather_bytes};
  table["ScatterNdAdd"] = {[](const Call& call) { scatter_nd(call, true); }};
  table["ScatterNdUpdate"] = {[](const Call& call) { scatter_nd(call, false); }};
  table["OneHot"] = {one_hot};
  table["NLLLoss"] = {nll_loss};
  table["MaskedScatter"] = {
      [](const Call& call) { call.give(at::masked_scatter(call.in(0), call.in(1), call.in(2))); }};
  table["MaskedSelect"] = {
      [](const Call& call) { call.give_resized(at::masked_select(call.in(0), call.in(1))); }};
  table["NonZero"] = {[](const Call& call) {
    const at::Tensor places = at::nonzero(call.in(0));
    call.give_resized(call.flag("transpose", false) ? places.t() : places);
  }};
}

}  // namespace npu_kv::sim::kernels
