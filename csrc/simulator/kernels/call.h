// One operator call as a kernel sees it: CPU tensors over the simulated device memory.
#pragma once

#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>

#include <initializer_list>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "abi/operator_kernel.h"

namespace npu_kv::sim::kernels {

/// The operator, or this use of it, is not simulated. Nothing has been written.
class Unsupported : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// The device itself would have failed: an index beyond its tensor.
class DeviceFault : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// Borrows the call; tensors share the device's memory and must not outlive it.
///
/// A kernel computes from inputs and attributes and hands its results to `give` as its last act: so
/// an operator that fails has written nothing. Missing inputs, attributes of another kind and
/// dtypes that ATen does not have throw Unsupported.
class Call {
 public:
  explicit Call(const npu_sim_operator_call& call) : call_(call) {}

  size_t inputs() const { return call_.inputs; }
  size_t outputs() const { return call_.outputs; }
  /// False for an optional input that was left out.
  bool has(size_t input) const;

  /// Input 0 is `in(0)`. Host constants too.
  at::Tensor in(size_t input) const;
  std::vector<at::Tensor> ins(size_t first) const;
  /// The values of an input that holds sizes, axes, offsets and the like.
  std::vector<int64_t> ints(size_t input) const;
  /// The value of an input with one element.
  at::Scalar number(size_t input) const;

  at::IntArrayRef shape(size_t input) const;
  at::IntArrayRef out_shape(size_t output = 0) const;
  at::ScalarType out_type(size_t output = 0) const;
  int64_t bytes(size_t input) const;
  int64_t out_bytes(size_t output = 0) const;
  /// True when there are no elements to write.
  bool nothing_to_do() const;

  /// The output's memory, for operators that change a part of it.
  at::Tensor out(size_t output = 0) const;
  /// True when the operator works in place: the input and the output are the same memory.
  bool in_place(size_t input, size_t output = 0) const;

  /// A view by sizes and strides, counted in elements from the data's start. Throws DeviceFault
  /// when it leaves the memory of the tensor.
  at::Tensor strided_in(size_t input, at::IntArrayRef sizes, at::IntArrayRef strides,
                        int64_t offset) const;
  at::Tensor strided_out(size_t output, at::IntArrayRef sizes, at::IntArrayRef strides,
                         int64_t offset) const;

  /// For an operator that uses a part of a tensor: says which, for the race checker. `part` is a
  /// view of the tensor's data. Nothing is said of a part without elements: the tensor then counts
  /// as a whole.
  void touch_in(size_t input, const at::Tensor& part) const;
  void touch_out(size_t output, const at::Tensor& part) const;
  /// As above, of the elements of `whole` that the index tensors select, as at::index does.
  using Indices = c10::List<std::optional<at::Tensor>>;
  void touch_in(size_t input, const at::Tensor& whole, const Indices& indices) const;
  void touch_out(size_t output, const at::Tensor& whole, const Indices& indices) const;

  /// Writes the results, converted to the outputs' dtypes. The shapes must agree.
  void give(const at::Tensor& result) const { give({result}); }
  void give(std::initializer_list<at::Tensor> results) const;
  /// Writes a result that has at most as many elements as the output, whose shape it becomes.
  void give_resized(const at::Tensor& result, size_t output = 0) const;

  bool flag(const char* attribute, bool otherwise) const;
  int64_t integer(const char* attribute, int64_t otherwise) const;
  double real(const char* attribute, double otherwise) const;
  std::string text(const char* attribute, const char* otherwise) const;
  std::vector<int64_t> integers(const char* attribute) const;

 private:
  const npu_sim_tensor& input(size_t index) const;
  const npu_sim_tensor& output(size_t index) const;
  const npu_sim_attribute* find(const char* name, int kind) const;
  void touch(bool is_output, size_t tensor, const at::Tensor& part) const;
  void touch(bool is_output, size_t tensor, const at::Tensor& whole, const Indices& indices) const;
  void touch_rows(bool is_output, size_t tensor, const at::Tensor& view, const at::Tensor& firsts,
                  int64_t elements) const;

  const npu_sim_operator_call& call_;
};

}  // namespace npu_kv::sim::kernels
