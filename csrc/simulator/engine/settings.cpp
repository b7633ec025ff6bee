#include "engine/settings.h"

namespace npu_kv::sim {

const std::vector<Settings::Entry>& Settings::entries() {
  static const auto* all = new std::vector<Entry>{
      {"devices", &Settings::devices, 0},
      {"device_memory_bytes", &Settings::device_memory_bytes, 0},
      {"pinned_bytes_per_call", &Settings::pinned_bytes_per_call, 0},
      {"pinned_memory_bytes", &Settings::pinned_memory_bytes, 0},
      {"max_streams", &Settings::max_streams, 0},
      {"max_events", &Settings::max_events, 0},
      {"graph_copies", &Settings::graph_copies, 0},
      {"graph_destroy_wait_ms", &Settings::graph_destroy_wait_ms, 0},
      {"batch_limit", &Settings::batch_limit, 0},
      {"move_payload", &Settings::move_payload, 0},
      {"shuffle", &Settings::shuffle, 0},
      {"seed", &Settings::seed, 0},
      {"poison", &Settings::poison, 0},
      {"capture_operators", &Settings::capture_operators, 0},
      {"h2d_bytes_per_second", &Settings::h2d_bytes_per_second, 1},
      {"d2h_bytes_per_second", &Settings::d2h_bytes_per_second, 1},
      {"d2d_bytes_per_second", &Settings::d2d_bytes_per_second, 1},
      {"h2h_bytes_per_second", &Settings::h2h_bytes_per_second, 1},
      {"copy_ns", &Settings::copy_ns, 0},
      {"operator_ns", &Settings::operator_ns, 0},
      {"operator_bytes_per_second", &Settings::operator_bytes_per_second, 1},
      {"call_ns", &Settings::call_ns, 0},
  };
  return *all;
}

}  // namespace npu_kv::sim
