// Operators that reduce, scan or order along dimensions.
#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/table.h"

namespace npu_kv::sim::kernels {
namespace {

/// The axes of input 1, counted from the front, largest first, so that removing one leaves the
/// others in place.
std::vector<int64_t> axes_of(const Call& call, const std::vector<int64_t>& given) {
  const auto dims = static_cast<int64_t>(call.shape(0).size());
  std::vector<int64_t> axes;
  for (const int64_t axis : given) {
    if (dims > 0) axes.push_back(at::maybe_wrap_dim(axis, dims));
  }
  std::sort(axes.rbegin(), axes.rend());
  return axes;
}

/// Applies `step(tensor, axis, keep)` along each axis of input 1.
template <typename Step>
void reduce_stepwise(const Call& call, Step step) {
  at::Tensor x = call.in(0);
  const bool keep = call.flag("keep_dims", false);
  for (const int64_t axis : axes_of(call, call.ints(1))) x = step(x, axis, keep);
  call.give(x);
}

/// Applies `function(tensor, axes, keep)`. No axes: nothing to reduce, as for 0-d tensors.
template <typename Function>
void reduce(const Call& call, const std::vector<int64_t>& given, Function function) {
  const std::vector<int64_t> axes = axes_of(call, given);
  const at::Tensor x = call.in(0);
  call.give(axes.empty() ? x : function(x, axes, call.flag("keep_dims", false)));
}

at::Tensor mean(const at::Tensor& x, at::IntArrayRef axes, bool keep) {
  return at::mean(x, axes, keep);
}

at::Tensor accumulated(const at::Tensor& x, at::IntArrayRef axes, bool keep) {
  return at::sum(x, axes, keep, x.scalar_type() == at::kBool ? at::kLong : x.scalar_type());
}

/// Standard deviation or variance around a given mean, which may have been broadcast.
void deviation(const Call& call, bool square_root) {
  const at::Tensor x = call.in(0);
  const std::vector<int64_t> axes = axes_of(call, call.integers("dim"));
  int64_t count = 1;
  for (const int64_t axis : axes) count *= x.size(axis);
  const int64_t correction = call.flag("unbiased", true) ? call.integer("correction", 1) : 0;
  at::Tensor sum = (x - call.in(1)).square().sum(axes, call.flag("keepdim", false));
  sum = sum / std::max<double>(0, static_cast<double>(count - correction));
  if (square_root) sum = sum.sqrt();
  if (call.flag("invert", false)) sum = (sum + call.real("epsilon", 0)).reciprocal();
  call.give(sum);
}

/// The order of a norm; infinity comes as the largest 32-bit integer.
double order_of(const Call& call) {
  const double p = call.real("p", 2);
  return std::abs(p) >= std::numeric_limits<int32_t>::max()
             ? std::copysign(std::numeric_limits<double>::infinity(), p)
             : p;
}

/// The p-norm comes in two operators: the sum of powers, then its root.
void norm_sum(const Call& call) {
  const at::Tensor x = call.in(0).abs();
  std::vector<int64_t> axes = call.integers("axes");
  if (axes.empty()) {
    for (int64_t axis = 0; axis < x.dim(); ++axis) axes.push_back(axis);
  }
  const double p = order_of(call);
  const bool keep = call.flag("keepdim", false);
  if (std::isinf(p) && axes.empty()) return call.give(x);
  if (axes.empty()) return call.give(p == 0 ? x.ne(0).to(x.scalar_type()) : x.pow(p));
  if (std::isinf(p)) return call.give(p > 0 ? at::amax(x, axes, keep) : at::amin(x, axes, keep));
  call.give(at::sum(p == 0 ? x.ne(0).to(x.scalar_type()) : x.pow(p), axes, keep));
}

void norm_root(const Call& call) {
  const double p = order_of(call);
  call.give(p == 0 || std::isinf(p) ? call.in(0) : call.in(0).pow(1 / p));
}

/// Index of the extreme value along the axis in input 1.
template <at::Tensor (*function)(const at::Tensor&, std::optional<int64_t>, bool)>
void arg_extreme(const Call& call) {
  call.give(function(call.in(0), call.number(1).toLong(), call.flag("keep_dims", false)));
}

/// Outputs: the indices, then the values.
template <std::tuple<at::Tensor, at::Tensor> (*function)(const at::Tensor&, int64_t, bool)>
void extreme_with_index(const Call& call) {
  const auto [values, indices] =
      function(call.in(0), call.integer("dimension", 0), call.flag("keep_dims", false));
  call.give({indices, values});
}

void top_k(const Call& call) {
  const auto [values, indices] = at::topk(call.in(0), call.ints(1).at(0), call.integer("dim", -1),
                                          call.flag("largest", true), call.flag("sorted", true));
  call.give({values, indices});
}

void sort(const Call& call) {
  const auto [values, indices] = at::sort(call.in(0), /*stable=*/true, call.integer("axis", -1),
                                          call.flag("descending", false));
  call.give({values, indices});
}

/// Outputs: the values, then the indices.
template <std::tuple<at::Tensor, at::Tensor> (*function)(const at::Tensor&, int64_t)>
void running_extreme(const Call& call) {
  const auto [values, indices] = function(call.in(0), call.integer("dim", 0));
  call.give({values, indices});
}

/// Values, how many there are at least, weights (may be empty).
void bincount(const Call& call) {
  const at::Tensor weights = call.has(2) ? call.in(2) : at::Tensor();
  const bool weighted = weights.defined() && weights.numel() > 0;
  const at::Tensor counts = at::bincount(
      call.in(0), weighted ? std::optional(weights) : std::nullopt, call.number(1).toLong());
  call.give(counts);
}

/// Outputs: the values and, where asked for, the place of each input element among them and how
/// often each occurs. The sizes are known only afterwards.
void unique(const Call& call) {
  const auto [values, inverse, counts] =
      at::_unique2(call.in(0), call.flag("sorted", true), true, true);
  call.give_resized(values, 0);
  if (call.flag("return_inverse", false)) call.give_resized(inverse, 1);
  if (call.flag("return_counts", false)) call.give_resized(counts, 2);
}

}  // namespace

void add_reductions(Table& table) {
  table["ReduceAll"] = {[](const Call& call) {
    reduce_stepwise(
        call, [](const at::Tensor& x, int64_t axis, bool keep) { return at::all(x, axis, keep); });
  }};
  table["ReduceAny"] = {[](const Call& call) {
    reduce_stepwise(
        call, [](const at::Tensor& x, int64_t axis, bool keep) { return at::any(x, axis, keep); });
  }};
  table["ReduceProd"] = {[](const Call& call) {
    reduce_stepwise(call, [](const at::Tensor& x, int64_t axis, bool keep) {
      return at::prod(x, axis, keep, x.scalar_type());
    });
  }};
  table["ReduceMax"] = {[](const Call& call) {
    reduce(call, call.ints(1), [](const at::Tensor& x, at::IntArrayRef axes, bool keep) {
      return at::amax(x, axes, keep);
    });
  }};
  table["ReduceMin"] = {[](const Call& call) {
    reduce(call, call.ints(1), [](const at::Tensor& x, at::IntArrayRef axes, bool keep) {
      return at::amin(x, axes, keep);
    });
  }};
  table["ReduceLogSumExp"] = {[](const Call& call) {
    reduce(call, call.ints(1), [](const at::Tensor& x, at::IntArrayRef axes, bool keep) {
      return at::logsumexp(x, axes, keep);
    });
  }};
  table["ReduceMean"] = {[](const Call& call) { reduce(call, call.ints(1), mean); }};
  table["ReduceMeanD"] = {[](const Call& call) { reduce(call, call.integers("axes"), mean); }};
  table["ReduceSum"] = {[](const Call& call) { reduce(call, call.ints(1), accumulated); }};
  table["ReduceStdV2Update"] = {
      [](const Call& call) { deviation(call, call.flag("if_std", false)); }};
  table["ReduceStdWithMean"] = {[](const Call& call) { deviation(call, true); }};
  table["LpNormReduceV2"] = {norm_sum};
  table["LpNormUpdateV2"] = {norm_root};

  table["ArgMaxV2"] = {arg_extreme<at::argmax>};
  table["ArgMin"] = {arg_extreme<at::argmin>};
  table["ArgMaxWithValue"] = {extreme_with_index<at::max>};
  table["ArgMinWithValue"] = {extreme_with_index<at::min>};
  table["TopKV2"] = {top_k};
  table["Sort"] = {sort};
  table["Bincount"] = {bincount};
  table["Cummax"] = {running_extreme<at::cummax>};
  table["Cummin"] = {running_extreme<at::cummin>};
  table["Trace"] = {[](const Call& call) { call.give(at::trace(call.in(0))); }};
  table["UniqueWithCountsAndSorting"] = {unique};

  table["Cumsum"] = {[](const Call& call) {
    const at::Tensor x = call.in(0);
    call.give(at::cumsum(x, call.number(1).toLong(), call.out_type()));
  }};
  table["Cumprod"] = {[](const Call& call) {
    call.give(at::cumprod(call.in(0), call.number(1).toLong(), call.out_type()));
  }};
  table["SearchSorted"] = {[](const Call& call) {
    call.give(at::searchsorted(call.in(0), call.in(1), false, call.flag("right", false)));
  }};
}

}  // namespace npu_kv::sim::kernels
