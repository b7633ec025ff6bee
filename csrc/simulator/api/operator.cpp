// Compute operators. Without an operator library torch_npu sends every one of them through
// aclopCompileAndExecute, with the operator's type and tensor descriptors.
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "abi/acl_op_abi.h"
#include "abi/operator_kernel.h"
#include "api/api.h"
#include "api/arguments.h"
#include "engine/context.h"
#include "engine/graph.h"
#include "engine/operator_call.h"
#include "engine/operator_table.h"
#include "engine/stream.h"

namespace npu_kv::sim {
namespace {

void check_descriptions(int count, const aclTensorDesc* const* descriptions,
                        const aclDataBuffer* const* buffers, const char* role) {
  if (count < 0) {
    throw SimulatorError(ACL_ERROR_INVALID_PARAM,
                         "EH0001: " + std::to_string(count) + " tensors where there is " + role);
  }
  if (count == 0) return;
  check_pointer(descriptions, role);
  check_pointer(buffers, role);
  for (int i = 0; i < count; ++i) {
    check_pointer(descriptions[i], role);
    check_pointer(buffers[i], role);
  }
}

/// What the tensors are, without looking at their data.
std::vector<OperatorTensor> describe_tensors(int count, const aclTensorDesc* const* descriptions) {
  std::vector<OperatorTensor> tensors(static_cast<size_t>(count));
  for (int i = 0; i < count; ++i) tensors[i].description = *descriptions[i];
  return tensors;
}

void locate_tensors(OperatorCall& operation, const aclDataBuffer* const* inputs,
                    const aclDataBuffer* const* outputs, int device) {
  const bool on_views = operation.type == "AsStrided" || operation.type == "ViewCopy";
  const auto locate = [&](std::vector<OperatorTensor>& tensors, const aclDataBuffer* const* buffers,
                          const std::string& role, Extent extent) {
    if (on_views) extent = Extent::kAllocation;
    for (size_t i = 0; i < tensors.size(); ++i) {
      tensors[i].take(Engine::get().memory, *buffers[i], device, role + " " + std::to_string(i),
                      extent);
    }
  };
  locate(operation.inputs, inputs, "input", Extent::kBuffer);
  locate(operation.outputs, outputs, "output", Extent::kShape);
}

/// An operator that cannot be computed is accepted and fails on the stream: the next synchronise of
/// the stream or the device reports it, once. Were the call itself to fail, torch_npu's queue
/// thread would report it and from then on drop every later operator of the device without a word;
/// and so it would if the stream stopped, as streams of torch_npu do on an ordinary failure.
void refuse(TaskRun& run, const std::string& message) {
  // Of some errors (a blocking copy's) torch_npu shows the code and not the text.
  std::fprintf(stderr, "npu_kv_ops simulator: %s\n", message.c_str());
  Engine& engine = Engine::get();
  const Engine::Lock lock(engine.mutex);
  if (!run.stream.failure) run.stream.failure = {ACL_ERROR_OP_NOT_FOUND, message};
}

/// Until it has been reported, operators behind a refused one are not run: they would compute from
/// whatever was in memory, and an index from there would fault.
bool follows_a_refusal(TaskRun& run) {
  Engine& engine = Engine::get();
  const Engine::Lock lock(engine.mutex);
  return run.stream.failure.code == ACL_ERROR_OP_NOT_FOUND;
}

std::string refusal_text(const OperatorCall& operation, const std::string& reason) {
  return "EZ3003: the simulated NPU cannot compute " + operation.signature() + ": " + reason +
         ". Nothing was computed.";
}

Task make_task(std::shared_ptr<const OperatorCall> operation) {
  Task task{};
  task.kind = "operator";
  task.bytes = operation->bytes;
  task.label = operation->type;
  task.body = [operation = std::move(operation)](TaskRun& run) {
    if (follows_a_refusal(run)) return;
    const std::string reason = operation->run(run.order.get());
    if (!reason.empty()) return refuse(run, refusal_text(*operation, reason));
    operator_counts().add(operation->type, operation->bytes);
    run.advance(
        operator_costs().duration_ns(operation->type, operation->bytes, Engine::get().settings));
  };
  return task;
}

/// A capture that takes such an operator in cannot become a graph: its end reports the message.
void submit_refusal(Stream& stream, const std::string& message) {
  {
    Engine& engine = Engine::get();
    const Engine::Lock lock(engine.mutex);
    if (stream.capture != nullptr) {
      std::fprintf(stderr, "npu_kv_ops simulator: %s\n", message.c_str());
      return stream.capture->refuse({ACL_ERROR_OP_NOT_FOUND, message});
    }
  }
  Task task{};
  task.kind = "operator";
  task.body = [message](TaskRun& run) { refuse(run, message); };
  submit(stream, std::move(task));
}

std::string unknown_text(const OperatorCall& operation) {
  const std::string missing = load_operator_library();
  const std::string advice =
      missing.empty() ? "A kernel is a few lines: csrc/simulator/kernels, CONTRIBUTING.md"
                      : "It has no more than " + OperatorTable::get().types() + ", as " + missing;
  return "EZ3003: the simulated NPU has no operator " + operation.signature() +
         ". Nothing was computed. " + advice + ".";
}

void execute(const char* type, int inputs, const aclTensorDesc* const* input_descriptions,
             const aclDataBuffer* const* input_buffers, int outputs,
             const aclTensorDesc* const* output_descriptions,
             const aclDataBuffer* const* output_buffers, const aclopAttr* attributes,
             aclrtStream handle, std::shared_ptr<Shapes> resized = nullptr) {
  check_pointer(type, "opType");
  check_descriptions(inputs, input_descriptions, input_buffers, "an input");
  check_descriptions(outputs, output_descriptions, output_buffers, "an output");
  const std::shared_ptr<Stream> stream = resolve_stream(handle);
  auto operation = std::make_shared<OperatorCall>();
  operation->type = type;
  operation->inputs = describe_tensors(inputs, input_descriptions);
  operation->outputs = describe_tensors(outputs, output_descriptions);
  if (attributes != nullptr) operation->attributes = attributes->values;
  operation->resized = std::move(resized);
  if (!OperatorTable::get().find(type, operation->kernel)) {
    return submit_refusal(*stream, unknown_text(*operation));
  }
  locate_tensors(*operation, input_buffers, output_buffers, stream->context.device);
  const std::string reason = operation->prepare();
  if (!reason.empty()) return submit_refusal(*stream, refusal_text(*operation, reason));
  submit(*stream, make_task(std::move(operation)));
}

/// Waits until the operator has run and writes the shapes of its outputs into their descriptors.
void report_shapes(aclrtStream handle, const Shapes& shapes, aclTensorDesc** descriptions) {
  Engine& engine = Engine::get();
  {
    Engine::Lock lock(engine.mutex);
    synchronize_streams(lock, engine, {resolve_stream_locked(engine, handle)}, -1);
  }
  for (size_t i = 0; i < shapes.size(); ++i) {
    if (!shapes[i].empty()) descriptions[i]->shape = shapes[i];
  }
}

}  // namespace
}  // namespace npu_kv::sim

using namespace npu_kv::sim;  // NOLINT: everything here is this namespace's C face

NPU_SIM_EXPORT aclError aclopCompileAndExecute(
    const char* type, int inputs, const aclTensorDesc* const* input_descriptions,
    const aclDataBuffer* const* input_buffers, int outputs,
    const aclTensorDesc* const* output_descriptions, aclDataBuffer* const* output_buffers,
    const aclopAttr* attributes, aclopEngineType, aclopCompileType, const char* /*path*/,
    aclrtStream stream) {
  return NPU_SIM_CALL([&] {
    execute(type, inputs, input_descriptions, input_buffers, outputs, output_descriptions,
            output_buffers, attributes, stream);
  });
}

// The second version also reports the shape of outputs that depend on the data, and so has to wait.
NPU_SIM_EXPORT aclError aclopCompileAndExecuteV2(
    const char* type, int inputs, aclTensorDesc** input_descriptions, aclDataBuffer** input_buffers,
    int outputs, aclTensorDesc** output_descriptions, aclDataBuffer** output_buffers,
    aclopAttr* attributes, aclopEngineType, aclopCompileType, const char* /*path*/,
    aclrtStream stream) {
  return NPU_SIM_CALL([&] {
    const auto shapes = std::make_shared<Shapes>();
    {
      Engine& engine = Engine::get();
      const Engine::Lock lock(engine.mutex);
      if (resolve_stream_locked(engine, stream)->capture != nullptr) {
        throw SimulatorError(ACL_ERROR_RT_STREAM_CAPTURED,
                             std::string("EE1016: the shape that ") +
                                 (type == nullptr ? "an operator" : type) +
                                 " gives depends on data, which a capturing stream does not have");
      }
    }
    execute(type, inputs, input_descriptions, input_buffers, outputs, output_descriptions,
            output_buffers, attributes, stream, shapes);
    report_shapes(stream, *shapes, output_descriptions);
  });
}

extern "C" __attribute__((visibility("default"))) int npu_sim_register_operator(
    const char* type, npu_sim_operator_function run, npu_sim_operator_function check, void* user) {
  if (type == nullptr || run == nullptr) return ACL_ERROR_INVALID_PARAM;
  OperatorTable::get().add(type, {run, check, user});
  return ACL_SUCCESS;
}
