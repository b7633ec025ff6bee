// Which call of the runtime asked for a piece of work, and from where it came.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

#include "engine/vector_clock.h"

namespace npu_kv::sim {

/// The exported function that the calling thread is in; "" outside of all.
const char*& current_function();

struct CallOrigin {
  /// That of the calling thread, now.
  static CallOrigin here();

  const char* function = "";
  std::string label;     // the type of an operator
  uint64_t thread = 0;   // as the system numbers it
  uint64_t number = 0;   // of the call, among those that are checked
  uint64_t session = 0;  // of the checker
  ClockRef host;         // what the host had seen; null in a graph, where the replay counts

  /// The callers outside the simulator as "function (library)", innermost first, with " < " between
  /// them: the first, and the next few of which the name is known.
  std::string describe_callers() const;

 private:
  std::array<void*, 16> frames_;
  int frame_count_ = 0;
};

}  // namespace npu_kv::sim
