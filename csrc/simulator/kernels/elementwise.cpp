// Operators that work element by element, with broadcasting.
#include <ATen/ATen.h>

#include <cmath>
#include <limits>

#include "kernels/table.h"

namespace npu_kv::sim::kernels {
namespace {

using Unary = at::Tensor (*)(const at::Tensor&);
using Binary = at::Tensor (*)(const at::Tensor&, const at::Tensor&);

template <Unary function>
void unary(const Call& call) {
  call.give(function(call.in(0)));
}

template <Binary function>
void binary(const Call& call) {
  call.give(function(call.in(0), call.in(1)));
}

at::Tensor add(const at::Tensor& a, const at::Tensor& b) { return at::add(a, b); }
at::Tensor sub(const at::Tensor& a, const at::Tensor& b) { return at::sub(a, b); }
at::Tensor gelu(const at::Tensor& x) { return at::gelu(x, "tanh"); }
at::Tensor round(const at::Tensor& x) { return at::round(x); }

at::Tensor to_bool(const at::Tensor& x) { return x.scalar_type() == at::kBool ? x : x.ne(0); }
at::Tensor logical_or(const at::Tensor& a, const at::Tensor& b) {
  return at::logical_or(to_bool(a), to_bool(b));
}
at::Tensor logical_and(const at::Tensor& a, const at::Tensor& b) {
  return at::logical_and(to_bool(a), to_bool(b));
}

at::Tensor log(const at::Tensor& x, double base) {
  if (base == -1) return x.log();
  if (base == 2) return x.log2();
  if (base == 10) return x.log10();
  return x.log() / std::log(base);
}

void log(const Call& call) {
  at::Tensor x = call.in(0);
  const double scale = call.real("scale", 1);
  const double shift = call.real("shift", 0);
  if (scale != 1) x = x * scale;
  if (shift != 0) x = x + shift;
  call.give(log(x, call.real("base", -1)));
}

/// x * sigmoid(scale * x)
void swish(const Call& call) {
  const at::Tensor x = call.in(0);
  const double scale = call.real("scale", 1);
  call.give(scale == 1 ? at::silu(x) : x * at::sigmoid(x * scale));
}

void elu(const Call& call) {
  call.give(at::elu(call.in(0), call.real("alpha", 1), call.real("scale", 1),
                    call.real("input_scale", 1)));
}

void nan_to_num(const Call& call) {
  const double largest = std::numeric_limits<float>::max();
  call.give(at::nan_to_num(call.in(0), call.real("nan", 0), call.real("posinf", largest),
                           call.real("neginf", -largest)));
}

}  // namespace

void add_elementwise(Table& table) {
  table["Abs"] = {unary<at::abs>};
  table["Acos"] = {unary<at::acos>};
  table["Acosh"] = {unary<at::acosh>};
  table["Asin"] = {unary<at::asin>};
  table["Asinh"] = {unary<at::asinh>};
  table["Atan"] = {unary<at::atan>};
  table["Atanh"] = {unary<at::atanh>};
  table["Ceil"] = {unary<at::ceil>};
  table["Cos"] = {unary<at::cos>};
  table["Cosh"] = {unary<at::cosh>};
  table["Erf"] = {unary<at::erf>};
  table["Erfc"] = {unary<at::erfc>};
  table["Erfinv"] = {unary<at::erfinv>};
  table["Exp"] = {unary<at::exp>};
  table["Expm1"] = {unary<at::expm1>};
  table["Floor"] = {unary<at::floor>};
  table["Gelu"] = {unary<gelu>};
  table["HardSigmoid"] = {unary<at::hardsigmoid>};
  table["HardSwish"] = {unary<at::hardswish>};
  table["Invert"] = {unary<at::bitwise_not>};
  table["IsFinite"] = {unary<at::isfinite>};
  table["Log"] = {log};
  table["Log1p"] = {unary<at::log1p>};
  table["LogSigmoid"] = {unary<at::log_sigmoid>};
  table["LogicalNot"] = {unary<at::logical_not>};
  table["Mish"] = {unary<at::mish>};
  table["Neg"] = {unary<at::neg>};
  table["Reciprocal"] = {unary<at::reciprocal>};
  table["Relu"] = {unary<at::relu>};
  table["Round"] = {unary<round>};
  table["Rsqrt"] = {unary<at::rsqrt>};
  table["Sigmoid"] = {unary<at::sigmoid>};
  table["Sign"] = {unary<at::sign>};
  table["Sin"] = {unary<at::sin>};
  table["Sinh"] = {unary<at::sinh>};
  table["Sqrt"] = {unary<at::sqrt>};
  table["Square"] = {unary<at::square>};
  table["Swish"] = {swish};
  table["Tan"] = {unary<at::tan>};
  table["Tanh"] = {unary<at::tanh>};
  table["Trunc"] = {unary<at::trunc>};
  table["Elu"] = {elu};
  table["LeakyRelu"] = {[](const Call& call) {
    call.give(at::leaky_relu(call.in(0), call.real("negative_slope", 0.01)));
  }};
  table["SoftplusV2"] = {[](const Call& call) {
    call.give(at::softplus(call.in(0), call.real("beta", 1), call.real("threshold", 20)));
  }};
  table["ThresholdV2D"] = {[](const Call& call) {
    call.give(at::threshold(call.in(0), call.real("threshold", 0), call.real("value", 0)));
  }};
  table["GLU"] = {
      [](const Call& call) { call.give(at::glu(call.in(0), call.integer("dim", -1))); }};
  table["NanToNum"] = {nan_to_num};
  // What a conversion writes is decided by the output's dtype alone.
  table["Cast"] = {[](const Call& call) { call.give(call.in(0)); }};

  table["Add"] = {binary<add>};
  table["Atan2"] = {binary<at::atan2>};
  table["BitwiseAnd"] = {binary<at::bitwise_and>};
  table["BitwiseOr"] = {binary<at::bitwise_or>};
  table["BitwiseXor"] = {binary<at::bitwise_xor>};
  table["Equal"] = {binary<at::eq>};
  table["FloorDiv"] = {binary<at::floor_divide>};
  table["FloorMod"] = {binary<at::remainder>};
  table["Greater"] = {binary<at::gt>};
  table["GreaterEqual"] = {binary<at::ge>};
  table["LeftShift"] = {binary<at::bitwise_left_shift>};
  table["Less"] = {binary<at::lt>};
  table["LessEqual"] = {binary<at::le>};
  table["LogicalAnd"] = {binary<logical_and>};
  table["LogicalOr"] = {binary<logical_or>};
  table["Maximum"] = {binary<at::maximum>};
  table["Minimum"] = {binary<at::minimum>};
  table["Mod"] = {binary<at::fmod>};
  table["Mul"] = {binary<at::mul>};
  table["NotEqual"] = {binary<at::ne>};
  table["Pow"] = {binary<at::pow>};
  table["RealDiv"] = {binary<at::div>};
  table["RightShift"] = {binary<at::bitwise_right_shift>};
  table["Sub"] = {binary<sub>};
  table["Xlogy"] = {binary<at::xlogy>};
  table["IsClose"] = {[](const Call& call) {
    call.give(at::isclose(call.in(0), call.in(1), call.real("rtol", 1e-5), call.real("atol", 1e-8),
                          call.flag("equal_nan", false)));
  }};
  table["TensorEqual"] = {[](const Call& call) {
    call.give(at::full(call.out_shape(), at::equal(call.in(0), call.in(1)), at::kBool));
  }};

  table["Addcdiv"] = {[](const Call& call) {
    call.give(at::addcdiv(call.in(0), call.in(1), call.in(2), call.number(3)));
  }};
  table["Addcmul"] = {[](const Call& call) {
    call.give(at::addcmul(call.in(0), call.in(1), call.in(2), call.number(3)));
  }};
  // The first input plus a multiple of the second.
  table["AxpyV2"] = {
      [](const Call& call) { call.give(at::add(call.in(0), call.in(1), call.number(2))); }};
  table["ClipByValue"] = table["ClipByValueV2"] = {
      [](const Call& call) { call.give(at::clamp(call.in(0), call.in(1), call.in(2))); }};
  table["Lerp"] = {[](const Call& call) {
    const at::Tensor weight = call.in(2);
    call.give(weight.dim() == 0 ? at::lerp(call.in(0), call.in(1), weight.item())
                                : at::lerp(call.in(0), call.in(1), weight));
  }};
  table["MaskedFill"] = {[](const Call& call) {
    call.give(at::masked_fill(call.in(0), to_bool(call.in(1)), call.number(2)));
  }};
  table["Select"] = {
      [](const Call& call) { call.give(at::where(to_bool(call.in(0)), call.in(1), call.in(2))); }};
  table["MseLoss"] = {[](const Call& call) {
    const at::Tensor square = (call.in(0) - call.in(1)).square();
    const std::string reduction = call.text("reduction", "mean");
    if (reduction == "mean") return call.give(square.mean());
    call.give(reduction == "sum" ? square.sum() : square);
  }};
}

}  // namespace npu_kv::sim::kernels
