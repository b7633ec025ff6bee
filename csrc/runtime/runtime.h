// The small interface between descriptors and the library that moves the bytes. It knows addresses,
// sizes and streams, and nothing of blocks or tensors.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "runtime/export.h"

namespace npu_kv {

enum class Direction : int {
  kHostToDevice = 0,
  kDeviceToHost = 1,
  kDeviceToDevice = 2,
  kHostToHost = 3,
};

NPU_KV_API const char* direction_name(Direction direction);

// A view of copies: dst[i], src[i] and size[i] for i in [0, count). Three parallel arrays, because
// that is what the runtime's batch call takes. No size may be zero. The copies are unordered.
struct Descriptors {
  void** dst = nullptr;
  void** src = nullptr;
  size_t* size = nullptr;
  size_t count = 0;
};

// Where copies are issued. `handle` is the runtime's own stream handle; host-to-host copies have no
// stream and ignore it.
struct StreamRef {
  void* handle = nullptr;
  int device = -1;
};

enum class MemoryKind { kPinnedHost, kPageableHost, kDevice };

struct MemoryPlace {
  MemoryKind kind = MemoryKind::kPageableHost;
  int device = -1;  // only for kDevice
};

struct MemoryRange {
  const char* begin = nullptr;
  size_t size = 0;
};

// The code of a Status for a function that the runtime lacks.
inline constexpr int kNotSupported = 207000;

// The outcome of a runtime call, kept as data: an exception or an error code that reaches
// torch_npu's task queue ends the use of the device for the whole process.
class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(int code, std::string message, size_t failed_copy = kUnknownCopy)
      : code_(code), message_(std::move(message)), failed_copy_(failed_copy) {}

  static constexpr size_t kUnknownCopy = static_cast<size_t>(-1);

  bool ok() const { return code_ == 0; }
  int code() const { return code_; }
  const std::string& message() const { return message_; }
  // The index of the descriptor that was refused, where that is known.
  size_t failed_copy() const { return failed_copy_; }

 private:
  int code_ = 0;
  std::string message_;
  size_t failed_copy_ = kUnknownCopy;
};

// Implementations are stateless towards the caller and may be used from any thread; the calling
// thread must have the stream's device as its current one.
class Runtime {
 public:
  virtual ~Runtime() = default;

  virtual const char* name() const = 0;

  // The most descriptors one call of copy() should be given.
  virtual size_t batch_limit() const = 0;

  // Issues the copies on the stream and returns without waiting for them, unless host memory is
  // page-able. On an error some of the copies may have been issued.
  virtual Status copy(const Descriptors& copies, Direction direction, StreamRef stream) = 0;

  // What kind of memory an address lies in. kNotSupported when the runtime cannot tell; any other
  // error says that the address lies in none.
  virtual Status place_of(const void* address, MemoryPlace* place) = 0;

  // The allocation that an address lies in; errors as above.
  virtual Status allocation_of(const void* address, MemoryRange* range) = 0;
};

}  // namespace npu_kv
