// What a user can set on the simulator: limits, behaviour and the costs of the virtual clock.
#pragma once

#include <atomic>
#include <cstdint>
#include <string_view>
#include <vector>

namespace npu_kv::sim {

/// Thread-safe: every value is an atomic of its own, read at the moment it matters.
struct Settings {
  using Value = std::atomic<int64_t>;

  Value devices{1};
  Value device_memory_bytes{int64_t{64} << 30};
  Value pinned_bytes_per_call{int64_t{64} << 30};
  Value pinned_memory_bytes{int64_t{1} << 40};
  Value max_streams{1984};
  Value max_events{65536};
  Value graph_copies{0};  // copy tasks per captured stream and direction; 0: unlimited
  Value graph_destroy_wait_ms{10000};
  Value batch_limit{0};   // items of one asynchronous batch; 0: unlimited
  Value move_payload{1};  // 0: copies are checked, counted and timed, bytes stay put
  Value shuffle{1};       // items of a batch run in a random order
  Value seed{0};
  Value poison{1};             // new memory is filled with a pattern, as nothing promises zeros
  Value capture_operators{1};  // 0: torch_npu refuses to capture compute operators

  Value h2d_bytes_per_second{int64_t{25} * 1000 * 1000 * 1000};
  Value d2h_bytes_per_second{int64_t{25} * 1000 * 1000 * 1000};
  Value d2d_bytes_per_second{int64_t{800} * 1000 * 1000 * 1000};
  Value h2h_bytes_per_second{int64_t{10} * 1000 * 1000 * 1000};
  Value copy_ns{3000};      // device time of one copy besides its bytes
  Value operator_ns{5000};  // device time of one compute operator besides its bytes
  Value operator_bytes_per_second{int64_t{800} * 1000 * 1000 * 1000};  // of all it reads and writes
  Value call_ns{1000};  // host time of one runtime call

  struct Entry {
    std::string_view name;
    Value Settings::* value;
    int64_t minimum;
  };
  /// Every setting by name, in the order above.
  static const std::vector<Entry>& entries();
};

}  // namespace npu_kv::sim
