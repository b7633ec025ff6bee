// The plain C view of one operator call, for kernels that live in libraries of their own: such a
// library exports npu_sim_provide_operators and is handed the function that registers them.
#pragma once

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/// A dense tensor in row-major order. `format`, `dims` and `shape` are the tensor as the framework
/// sees it; the `storage_` members are how the device holds it. They differ for private formats
/// only.
typedef struct npu_sim_tensor {
  int32_t dtype;  // aclDataType; -1 for an optional tensor that was left out
  int32_t format;
  int32_t dims;
  int32_t host_constant;  // 1: the value was passed from the host (axes, sizes, a scalar)
  const int64_t* shape;
  int32_t storage_format;
  int32_t storage_dims;
  const int64_t* storage_shape;
  void* data;  // readable and writable by the CPU; null where only a check is asked for
  size_t bytes;
} npu_sim_tensor;

enum npu_sim_attribute_kind {
  NPU_SIM_BOOL = 0,
  NPU_SIM_INT = 1,
  NPU_SIM_FLOAT = 2,
  NPU_SIM_STRING = 3,
  NPU_SIM_DATA_TYPE = 4,
  NPU_SIM_BOOLS = 5,
  NPU_SIM_INTS = 6,
  NPU_SIM_FLOATS = 7,
  NPU_SIM_STRINGS = 8,
  NPU_SIM_DATA_TYPES = 9,
  NPU_SIM_INT_ROWS = 10,
};

/// `count` values in the array that fits the kind: booleans, integers and data types in `ints`. The
/// rows of NPU_SIM_INT_ROWS follow one another in `ints`; `count` is then the number of rows.
typedef struct npu_sim_attribute {
  const char* name;
  int32_t kind;
  size_t count;
  const int64_t* ints;
  const float* floats;
  const char* const* strings;
  const size_t* row_lengths;
} npu_sim_attribute;

typedef struct npu_sim_operator_call npu_sim_operator_call;
struct npu_sim_operator_call {
  const char* type;
  size_t inputs;
  const npu_sim_tensor* input;
  size_t outputs;
  const npu_sim_tensor* output;
  size_t attributes;
  const npu_sim_attribute* attribute;
  char* error;  // room for the reason of a failure
  size_t error_bytes;
  /// What the operator reads and writes, for the statistics and the clock. Holds the size of all
  /// device tensors; a check may replace it where the operator touches less.
  int64_t* bytes;
  /// Reports the shape of an output that depends on the data. Returns 0, or 1 when the caller has
  /// no means to learn it.
  int (*resize_output)(const npu_sim_operator_call* call, size_t output, int32_t dims,
                       const int64_t* shape);
  /// Says which bytes of an input or output the operator really uses, counted from its data; of a
  /// tensor of which nothing is said it uses all. Null where nobody wants to know.
  void (*touch)(const npu_sim_operator_call* call, int is_output, size_t tensor, size_t offset,
                size_t bytes);
  void* runtime;  // the simulator's own
};

/// What a kernel or a check answers; with anything but DONE it has written the reason to `error`
/// and nothing else.
enum npu_sim_operator_result {
  NPU_SIM_DONE = 0,
  NPU_SIM_FAULT = 1,    // the device would have failed: its context takes no more work
  NPU_SIM_REFUSED = 2,  // not simulated: the stream reports it once and goes on
};

/// Must not throw and must not call the runtime. Runs on a thread of the simulator, several at a
/// time.
typedef int (*npu_sim_operator_function)(const npu_sim_operator_call* call, void* user);

/// Makes `run` the kernel of an operator type, in place of the one it had. `check` (may be null) is
/// asked at the call, so that an unsupported dtype or shape is refused in the same gentle way as an
/// unknown operator. Tensors on the device have no data then; host constants do. Thread-safe.
/// Returns 0, or 100000 when `type` or `run` is null.
int npu_sim_register_operator(const char* type, npu_sim_operator_function run,
                              npu_sim_operator_function check, void* user);
typedef int (*npu_sim_register_function)(const char* type, npu_sim_operator_function run,
                                         npu_sim_operator_function check, void* user);

/// Exported by a library of kernels: registers all of them. Returns 0.
int npu_sim_provide_operators(npu_sim_register_function add);
typedef int (*npu_sim_provide_function)(npu_sim_register_function add);

#ifdef __cplusplus
}
#endif
