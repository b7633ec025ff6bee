#include "kernels/attention.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include <memory>
#include <sstream>
#include <string>
#include <utility>

namespace npu_kv::sim::kernels {
namespace {

std::string describe(const torch::jit::Stack& stack) {
  std::ostringstream text;
  for (const c10::IValue& value : stack) {
    if (!value.isTensor() || !value.toTensor().defined()) continue;
    const at::Tensor& tensor = value.toTensor();
    text << (text.tellp() > 0 ? ", " : "") << tensor.scalar_type() << tensor.sizes();
  }
  return text.str();
}

/// Calls the kernel that was there before, and explains its failure.
class Explained : public c10::OperatorKernel {
 public:
  explicit Explained(c10::SafeKernelFunction original) : original_(std::move(original)) {}

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                  torch::jit::Stack* stack) {
    const std::string arguments = describe(*stack);
    try {
      original_.callBoxed(op, keys, stack);
    } catch (const c10::Error& error) {
      if (std::string(error.what_without_backtrace()).find("libopapi") == std::string::npos) throw;
      TORCH_CHECK(false, "EZ3003: the simulated NPU has no operator scaled_dot_product_attention(",
                  arguments,
                  "). Nothing was computed. torch_npu has no way to compute it but "
                  "aclnnFlashAttentionScore of CANN's operator library: write the attention with "
                  "matmul and softmax, or add it in csrc/simulator/kernels/attention.cpp "
                  "(CONTRIBUTING.md).");
    }
  }

 private:
  c10::SafeKernelFunction original_;
};

/// Ignores the warning that a kernel is replaced: that is what is wanted.
class Silent : public c10::WarningHandler {
 public:
  void process(const c10::Warning&) override {}
};

}  // namespace

void explain_missing_attention() {
  const auto attention =
      c10::Dispatcher::singleton().findSchemaOrThrow("aten::scaled_dot_product_attention", "");
  Silent silent;
  const c10::WarningUtils::WarningHandlerGuard guard(&silent);
  // Never destroyed: with it the kernels would go.
  static auto* library =
      new torch::Library(torch::Library::IMPL, "aten", std::nullopt, __FILE__, __LINE__);
  for (const auto key : {c10::DispatchKey::PrivateUse1, c10::DispatchKey::AutogradPrivateUse1}) {
    if (!attention.hasKernelForDispatchKey(key)) continue;
    library->impl(
        "scaled_dot_product_attention",
        torch::dispatch(key, torch::CppFunction::makeFromBoxedFunctor(std::make_unique<Explained>(
                                 attention.getComputedKernelForDispatchKey(key)))));
  }
}

}  // namespace npu_kv::sim::kernels
