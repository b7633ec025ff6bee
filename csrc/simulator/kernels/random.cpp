// Random numbers. Each operator is a function of the seed and the offset that come with it, so runs
// repeat; the numbers are neither those of an NPU nor those of torch on the CPU.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>

#include "kernels/table.h"

namespace npu_kv::sim::kernels {
namespace {

uint64_t mix(uint64_t value) {  // the finaliser of splitmix64
  value += 0x9E3779B97F4A7C15;
  value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9;
  value = (value ^ (value >> 27)) * 0x94D049BB133111EB;
  return value ^ (value >> 31);
}

/// Seeds from the values of the inputs from `first` to `last`.
at::Generator generator_of(const Call& call, size_t first, size_t last) {
  uint64_t seed = 0;
  for (size_t input = first; input <= last; ++input) {
    for (const int64_t value : call.ints(input)) seed = mix(seed ^ static_cast<uint64_t>(value));
  }
  return at::detail::createCPUGenerator(seed);
}

at::Tensor empty_output(const Call& call) {
  return at::empty(call.out_shape(), at::TensorOptions().dtype(call.out_type()));
}

/// Shape, probability of a one, seed, offset.
void bernoulli(const Call& call) {
  const at::Tensor uniform =
      at::rand(call.out_shape(), generator_of(call, 2, 3), at::TensorOptions().dtype(at::kFloat));
  call.give(uniform.lt(call.in(1)));
}

/// Shape, probability to keep, seed, second seed, offset. One bit an element, lowest first.
void dropout_mask(const Call& call) {
  const int64_t bytes = call.out_shape().at(0);
  const at::Tensor keep =
      at::rand({bytes, 8}, generator_of(call, 2, 4), at::TensorOptions().dtype(at::kFloat))
          .lt(call.number(1));
  const at::Tensor weight =
      at::bitwise_left_shift(at::ones({8}, at::kInt), at::arange(8, at::kInt));
  call.give((keep.to(at::kInt) * weight).sum(1));
}

/// Values, bits of dropout_mask, probability to keep.
void dropout(const Call& call) {
  const at::Tensor x = call.in(0);
  const at::Tensor bit =
      at::bitwise_right_shift(call.in(1).to(at::kInt).unsqueeze(1), at::arange(8, at::kInt))
          .bitwise_and(1)
          .flatten()
          .narrow(0, 0, x.numel())
          .reshape(x.sizes());
  const double keep = call.number(2).toDouble();
  call.give(keep == 0 ? at::zeros_like(x) : x * bit.to(x.scalar_type()) / keep);
}

}  // namespace

void add_random(Table& table) {
  // Shape, key, counter, algorithm.
  table["StatelessRandomUniformV2"] = {[](const Call& call) {
    call.give(empty_output(call).uniform_(0, 1, generator_of(call, 1, 2)));
  }};
  table["StatelessRandomNormalV2"] = {[](const Call& call) {
    call.give(empty_output(call).normal_(0, 1, generator_of(call, 1, 2)));
  }};
  // Count, seed, offset.
  table["StatelessRandperm"] = {[](const Call& call) {
    call.give(at::randperm(call.number(0).toLong(), generator_of(call, 1, 2),
                           at::TensorOptions().dtype(at::kLong)));
  }};
  // Weights, seed, offset.
  table["MultinomialWithReplacement"] = {[](const Call& call) {
    call.give(at::multinomial(call.in(0), call.integer("numsamples", 1),
                              call.flag("replacement", true), generator_of(call, 1, 2)));
  }};
  table["StatelessBernoulli"] = {bernoulli};
  table["StatelessDropOutGenMask"] = {dropout_mask};
  table["DropOutDoMask"] = {dropout};
}

}  // namespace npu_kv::sim::kernels
