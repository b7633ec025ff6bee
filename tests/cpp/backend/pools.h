// What the tests of the schedulers share: two pools with a model of their content, and a session on
// the device that the schedulers use.
#pragma once

#include <memory>
#include <random>
#include <string>
#include <vector>

#include "simulator/fixture.h"
#include "transfer/copy_scheduler.h"

using namespace npu_kv;

inline constexpr int64_t kBlock = 256;  // bytes
inline constexpr size_t kTensors = 3;

// Two pools, and what they have to hold by the rule that jobs run one after the other.
class Pools {
 public:
  Pools(int64_t device_blocks, int64_t host_blocks, bool on_device)
      : device_blocks(device_blocks), host_blocks(host_blocks), on_device_(on_device) {
    for (size_t t = 0; t < kTensors; ++t) {
      if (on_device_) {
        device_memory_.push_back(std::make_unique<DeviceMemory>(device_blocks * kBlock));
        host_memory_.push_back(std::make_unique<PinnedMemory>(host_blocks * kBlock));
      } else {
        plain_.emplace_back(device_blocks * kBlock, '\0');
        plain_.emplace_back(host_blocks * kBlock, '\0');
      }
    }
    for (size_t t = 0; t < kTensors; ++t) {
      device_model.push_back(fill(device_blocks, 1 + t));
      host_model.push_back(fill(host_blocks, 101 + t));
      if (on_device_) {
        device_memory_[t]->write(device_model[t]);
        host_memory_[t]->write(host_model[t]);
      } else {
        plain_[2 * t] = device_model[t];
        plain_[2 * t + 1] = host_model[t];
      }
    }
  }

  CopyScheduler::Options options() {
    CopyScheduler::Options options;
    options.device = on_device_ ? 0 : -1;
    options.own_streams[0] = options.own_streams[1] = on_device_;
    const Place host{PlaceKind::kHost, -1};
    for (size_t t = 0; t < kTensors; ++t) {
      const auto device =
          reinterpret_cast<int64_t>(on_device_ ? device_memory_[t]->data() : plain_[2 * t].data());
      const auto mirror = reinterpret_cast<int64_t>(on_device_ ? host_memory_[t]->data()
                                                               : plain_[2 * t + 1].data());
      options.pools.device.push_back({device, kBlock, kBlock, device_blocks,
                                      on_device_ ? Place{PlaceKind::kDevice, 0} : host});
      options.pools.host.push_back({mirror, kBlock, kBlock, host_blocks, host});
    }
    return options;
  }

  void apply(Lane lane, const std::vector<int64_t>& src, const std::vector<int64_t>& dst) {
    for (size_t t = 0; t < kTensors; ++t) {
      std::string& from = lane == Lane::kStore ? device_model[t] : host_model[t];
      std::string& to = lane == Lane::kStore ? host_model[t] : device_model[t];
      for (size_t i = 0; i < src.size(); ++i) {
        to.replace(dst[i] * kBlock, kBlock, from, src[i] * kBlock, kBlock);
      }
    }
  }

  bool agree() const {
    for (size_t t = 0; t < kTensors; ++t) {
      const std::string device =
          on_device_ ? device_memory_[t]->read(device_blocks * kBlock) : plain_[2 * t];
      const std::string host =
          on_device_ ? host_memory_[t]->read(host_blocks * kBlock) : plain_[2 * t + 1];
      if (device != device_model[t] || host != host_model[t]) return false;
    }
    return true;
  }

  const int64_t device_blocks;
  const int64_t host_blocks;
  std::vector<std::string> device_model;
  std::vector<std::string> host_model;

 private:
  static std::string fill(int64_t blocks, size_t seed) {
    std::string content(blocks * kBlock, '\0');
    std::minstd_rand random(static_cast<unsigned>(seed));
    for (char& byte : content) byte = static_cast<char>(random());
    return content;
  }

  bool on_device_;
  std::vector<std::unique_ptr<DeviceMemory>> device_memory_;
  std::vector<std::unique_ptr<PinnedMemory>> host_memory_;
  std::vector<std::string> plain_;
};

// The scheduler's thread takes the device's own context; streams and events of a test have to be of
// it.
struct DeviceSession : Session {
  DeviceSession() { CHECK_OK(aclrtSetDevice(0)); }
};

inline std::shared_ptr<CopyScheduler> start(Pools& pools, StreamRuntime& runtime) {
  std::shared_ptr<CopyScheduler> scheduler;
  const Status status = CopyScheduler::start(runtime, pools.options(), &scheduler);
  CHECK(status.ok());
  return scheduler;
}
