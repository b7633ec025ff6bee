// Softmax and the normalisations.
#include <ATen/ATen.h>

#include "kernels/table.h"

namespace npu_kv::sim::kernels {
namespace {

int64_t softmax_axis(const Call& call) {
  const std::vector<int64_t> axes = call.integers("axes");
  if (axes.empty()) return -1;
  if (axes.size() > 1) throw Unsupported("softmax over " + std::to_string(axes.size()) + " axes");
  return axes[0];
}

/// Outputs: the result, the mean, and the variance or, for LayerNormV3, its inverse root.
void layer_norm(const Call& call, bool give_inverse_root) {
  const at::Tensor x = call.in(0);
  const at::Tensor weight = call.in(1);
  const int64_t first = at::maybe_wrap_dim(call.integer("begin_norm_axis", 0), x.dim());
  const double epsilon = call.real("epsilon", 1e-5);
  const at::IntArrayRef normalised = x.sizes().slice(first);
  const auto [result, mean, root] = at::native_layer_norm(x, normalised, weight.reshape(normalised),
                                                          call.in(2).reshape(normalised), epsilon);
  const at::Tensor spread = give_inverse_root ? root : root.square().reciprocal() - epsilon;
  call.give({result, mean.reshape(call.out_shape(1)), spread.reshape(call.out_shape(2))});
}

/// Outputs: the result, the mean and the variance of each group.
void group_norm(const Call& call) {
  const at::Tensor x = call.in(0);
  const int64_t groups = call.integer("num_groups", 1);
  const at::Tensor grouped = x.reshape({x.size(0), groups, -1});
  const at::Tensor result =
      at::group_norm(x, groups, call.in(1), call.in(2), call.real("eps", 1e-5));
  call.give({result, grouped.mean(-1), grouped.var(-1, /*unbiased=*/false)});
}

/// The result, and the inverse root of the mean square.
std::pair<at::Tensor, at::Tensor> rms_norm_of(const at::Tensor& x, const at::Tensor& weight,
                                              double epsilon) {
  const at::Tensor wide = x.to(at::kFloat);
  std::vector<int64_t> axes;
  for (int64_t axis = x.dim() - weight.dim(); axis < x.dim(); ++axis) axes.push_back(axis);
  const at::Tensor root = (wide.square().mean(axes, /*keepdim=*/true) + epsilon).rsqrt();
  return {wide * root * weight, root};
}

void rms_norm(const Call& call) {
  const auto [result, root] = rms_norm_of(call.in(0), call.in(1), call.real("epsilon", 1e-6));
  call.give({result, root.reshape(call.out_shape(1))});
}

/// As rms_norm of the sum of two tensors; the sum is the third output.
void add_rms_norm(const Call& call) {
  const at::Tensor sum = call.in(0) + call.in(1);
  const auto [result, root] = rms_norm_of(sum, call.in(2), call.real("epsilon", 1e-6));
  call.give({result, root.reshape(call.out_shape(1)), sum});
}

/// Rotary embedding of two halves: x * cos + (-second, first) * sin.
void rotary(const Call& call) {
  const at::Tensor x = call.in(0);
  const std::vector<at::Tensor> half = x.chunk(2, -1);
  call.give(x * call.in(1) + at::cat({-half.at(1), half.at(0)}, -1) * call.in(2));
}

}  // namespace

void add_normalisation(Table& table) {
  table["SoftmaxV2"] = {
      [](const Call& call) { call.give(at::softmax(call.in(0), softmax_axis(call))); }};
  table["LogSoftmaxV2"] = {
      [](const Call& call) { call.give(at::log_softmax(call.in(0), softmax_axis(call))); }};
  table["LayerNorm"] = {[](const Call& call) { layer_norm(call, false); }};
  table["LayerNormV3"] = {[](const Call& call) { layer_norm(call, true); }};
  table["GroupNorm"] = {group_norm};
  table["AddRmsNorm"] = {add_rms_norm};
  table["RmsNorm"] = {rms_norm};
  table["RotaryMul"] = {rotary};
}

}  // namespace npu_kv::sim::kernels
