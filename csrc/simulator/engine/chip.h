// The chip that is simulated. torch_npu chooses code paths by the name; the numbers are reported to
// whoever asks and limit nothing.
#pragma once

#include <cstdint>

namespace npu_kv::sim {

inline constexpr const char* kSocName = "Ascend910B3";
inline constexpr uint32_t kCubeCores = 20;
inline constexpr uint32_t kVectorCores = 40;
inline constexpr int64_t kL2Bytes = int64_t{192} << 20;

}  // namespace npu_kv::sim
