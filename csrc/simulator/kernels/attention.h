#pragma once

namespace npu_kv::sim::kernels {

/// Makes torch's scaled_dot_product_attention say what is missing and what to do. torch_npu
/// computes it with one operator of the library that is not there, and has no other way.
void explain_missing_attention();

}  // namespace npu_kv::sim::kernels
