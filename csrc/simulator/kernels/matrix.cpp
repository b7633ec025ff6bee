// Matrix products.
#include <ATen/ATen.h>

#include "kernels/table.h"

namespace npu_kv::sim::kernels {
namespace {

at::Tensor turned(const at::Tensor& x, bool transposed) {
  return transposed ? x.transpose(-1, -2) : x;
}

/// Input 2, when there is one, is added to every row.
void mat_mul(const Call& call) {
  const at::Tensor a = turned(call.in(0), call.flag("transpose_x1", false));
  const at::Tensor b = turned(call.in(1), call.flag("transpose_x2", false));
  call.give(call.has(2) ? at::addmm(call.in(2), a, b) : at::mm(a, b));
}

}  // namespace

void add_matrix(Table& table) {
  table["MatMul"] = {mat_mul};
  table["BatchMatMul"] = {[](const Call& call) {
    call.give(at::matmul(turned(call.in(0), call.flag("adj_x1", false)),
                         turned(call.in(1), call.flag("adj_x2", false))));
  }};
  table["Dot"] = {[](const Call& call) { call.give(at::dot(call.in(0), call.in(1))); }};
}

}  // namespace npu_kv::sim::kernels
