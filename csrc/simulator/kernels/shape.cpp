// Operators that move elements without computing: views made dense, joins, pads, sequences.
#include <ATen/ATen.h>

#include "kernels/table.h"

namespace npu_kv::sim::kernels {
namespace {

int64_t twice_the_output(const Call& call) { return 2 * call.out_bytes(); }

/// Input 1 sizes, 2 strides, 3 offset.
void as_strided(const Call& call) {
  const at::Tensor source = call.strided_in(0, call.ints(1), call.ints(2), call.number(3).toLong());
  call.touch_in(0, source);
  call.give(source);
}

/// Copies one strided view over another: destination, sizes, strides, offset, then the source with
/// the same. The data starts where the view does and ends with the allocation, so only the views
/// themselves say what is touched; AsStrided likewise.
void view_copy(const Call& call) {
  const std::vector<int64_t> sizes = call.ints(1);
  const at::Tensor target = call.strided_out(0, sizes, call.ints(2), call.number(3).toLong());
  const at::Tensor source = call.strided_in(4, call.ints(5), call.ints(6), call.number(7).toLong());
  call.touch_in(0, target);
  call.touch_out(0, target);
  call.touch_in(4, source);
  target.copy_(source.clone());  // the two may overlap
}

int64_t view_copy_bytes(const Call& call) {
  int64_t elements = 1;
  for (const int64_t extent : call.ints(1)) elements *= extent;
  return 2 * elements * static_cast<int64_t>(c10::elementSize(call.out_type()));
}

void slice(const Call& call) {
  at::Tensor x = call.in(0);
  const std::vector<int64_t> begin = call.ints(1);
  const std::vector<int64_t> size = call.ints(2);
  for (size_t dim = 0; dim < begin.size(); ++dim) {
    const int64_t extent = size[dim] == -1 ? x.size(dim) - begin[dim] : size[dim];
    x = x.narrow(static_cast<int64_t>(dim), begin[dim], extent);
  }
  call.touch_in(0, x);
  call.give(x.reshape(call.out_shape()));  // a dimension of one element may be left out
}

void strided_slice(const Call& call) {
  for (const char* mask : {"begin_mask", "end_mask", "ellipsis_mask", "new_axis_mask"}) {
    if (call.integer(mask, 0) != 0) throw Unsupported(std::string("a ") + mask);
  }
  const int64_t left_out = call.integer("shrink_axis_mask", 0);
  at::Tensor x = call.in(0);
  const std::vector<int64_t> begin = call.ints(1);
  const std::vector<int64_t> end = call.ints(2);
  const std::vector<int64_t> step = call.ints(3);
  for (size_t dim = 0; dim < begin.size(); ++dim) {
    if (step[dim] <= 0) throw Unsupported("a step of " + std::to_string(step[dim]));
    // A dimension that is left out of the result has the one element of its begin.
    const int64_t last = (left_out >> dim & 1) != 0 ? begin[dim] + 1 : end[dim];
    x = x.slice(static_cast<int64_t>(dim), begin[dim], last, step[dim]);
  }
  call.touch_in(0, x);
  call.give(x.reshape(call.out_shape()));
}

/// Input 1 holds what to add before and behind each dimension, in the order of the dimensions.
void pad(const Call& call) {
  const at::Tensor x = call.in(0);
  const std::vector<int64_t> amounts = call.ints(1);
  if (!call.flag("paddings_contiguous", true)) throw Unsupported("paddings in two rows");
  if (amounts.size() != 2 * static_cast<size_t>(x.dim())) {
    throw Unsupported(std::to_string(amounts.size()) + " paddings");
  }
  std::vector<int64_t> from_last;  // ATen counts dimensions from the last
  for (size_t dim = amounts.size() / 2; dim-- > 0;) {
    from_last.push_back(amounts[2 * dim]);
    from_last.push_back(amounts[2 * dim + 1]);
  }
  const std::string mode = call.text("mode", "constant");
  if (mode == "constant") {
    return call.give(
        at::constant_pad_nd(x, from_last, call.has(2) ? call.number(2) : at::Scalar(0)));
  }
  throw Unsupported("padding mode " + mode);
}

/// Start and step as passed, and as many as the output holds: the caller has rounded already.
void range(const Call& call) {
  const at::Scalar start = call.number(0);
  const at::Scalar step = call.number(2);
  const int64_t count = call.out_shape().at(0);
  const bool whole = at::isIntegralType(call.out_type(), /*includeBool=*/false);
  const at::Tensor index = at::arange(count, whole ? at::kLong : at::kDouble);
  call.give(index * step + start);
}

void repeat_interleave(const Call& call) {
  const at::Tensor repeats = call.in(1);
  const int64_t axis = call.integer("axis", 0);
  call.give(repeats.dim() == 0 ? at::repeat_interleave(call.in(0), call.number(1).toLong(), axis)
                               : at::repeat_interleave(call.in(0), repeats.to(at::kLong), axis));
}

}  // namespace

void add_shapes(Table& table) {
  table["AsStrided"] = {as_strided, twice_the_output};
  table["ViewCopy"] = {view_copy, view_copy_bytes};
  table["Slice"] = {slice, twice_the_output};
  table["StridedSlice"] = {strided_slice, twice_the_output};
  table["BroadcastTo"] = {[](const Call& call) { call.give(call.in(0).expand(call.ints(1))); }};
  table["ConcatD"] = {
      [](const Call& call) { call.give(at::cat(call.ins(0), call.integer("concat_dim", 0))); }};
  table["Eye"] = {[](const Call& call) {
    call.give(at::eye(call.integer("num_rows", 0), call.integer("num_columns", 0)));
  }};
  table["LinSpace"] = {[](const Call& call) {
    call.give(at::linspace(call.number(0), call.number(1), call.ints(2).at(0), call.out_type()));
  }};
  table["Pack"] = {
      [](const Call& call) { call.give(at::stack(call.ins(0), call.integer("axis", 0))); }};
  table["PadV3"] = {pad};
  table["Range"] = {range};
  table["RepeatInterleave"] = {repeat_interleave};
  table["ReverseV2"] = {[](const Call& call) { call.give(call.in(0).flip(call.ints(1))); }};
  table["Roll"] = {[](const Call& call) {
    call.give(call.in(0).roll(call.integers("shifts"), call.integers("dims")));
  }};
  table["Tile"] = {[](const Call& call) { call.give(call.in(0).repeat(call.ints(1))); }};
  table["Transpose"] = {[](const Call& call) { call.give(call.in(0).permute(call.ints(1))); }};
  table["Tril"] = {
      [](const Call& call) { call.give(call.in(0).tril(call.integer("diagonal", 0))); }};
  table["Triu"] = {
      [](const Call& call) { call.give(call.in(0).triu(call.integer("diagonal", 0))); }};
}

}  // namespace npu_kv::sim::kernels
