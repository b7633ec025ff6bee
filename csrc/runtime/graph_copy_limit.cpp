#include "runtime/graph_copy_limit.h"

#include <string_view>

#include "runtime/environment.h"

namespace npu_kv {
namespace {

constexpr size_t kUbQueueEntries = 32768;

bool has_ub_queues(std::string_view soc_name) {
  return !soc_name.starts_with("Ascend910") && !soc_name.starts_with("Ascend310");
}

}  // namespace

size_t graph_copy_limit(const char* soc_name) {
  if (const auto limit = positive_from_environment("NPU_KV_MAX_GRAPH_COPIES")) return *limit;
  return soc_name != nullptr && has_ub_queues(soc_name) ? kUbQueueEntries : 0;
}

}  // namespace npu_kv
