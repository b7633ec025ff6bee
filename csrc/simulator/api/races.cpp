// The controls of the race checker.
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <sstream>
#include <string>

#include "api/control.h"
#include "engine/engine.h"

using namespace npu_kv::sim;

namespace {

constexpr int kExitCode = 66;  // as of the thread sanitizer

const char* name_of(Race::Kind kind) {
  switch (kind) {
    case Race::Kind::kAccess:
      return "access";
    case Race::Kind::kBatch:
      return "batch";
    case Race::Kind::kFreed:
      break;
  }
  return "freed";
}

const char* name_of(Place place) {
  switch (place) {
    case Place::kDevice:
      return "device";
    case Place::kPinned:
      return "pinned";
    case Place::kPageable:
      break;
  }
  return "pageable";
}

std::string quoted(const std::string& text) {
  std::string result = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') result += '\\';
    result += static_cast<unsigned char>(c) < ' ' ? ' ' : c;
  }
  return result + "\"";
}

void write(std::ostream& out, const char* name, const Actor& actor, bool writes) {
  const CallOrigin* call = actor.call ? actor.call.get() : actor.replay.get();
  out << quoted(name) << ": {\"call\": " << quoted(call == nullptr ? "" : call->function)
      << ", \"kind\": " << quoted(actor.kind)
      << ", \"operator\": " << quoted(call == nullptr ? "" : call->label)
      << ", \"writes\": " << (writes ? "true" : "false") << ", \"stream\": " << actor.stream
      << ", \"handle\": " << reinterpret_cast<uintptr_t>(actor.handle)
      << ", \"task\": " << actor.task << ", \"thread\": " << (call == nullptr ? 0 : call->thread)
      << ", \"replay\": " << quoted(actor.replay ? actor.replay->function : "")
      << ", \"callers\": " << quoted(call == nullptr ? "" : call->describe_callers()) << "}";
}

std::string json(const std::vector<Race>& races) {
  std::ostringstream out;
  out << "[";
  for (size_t i = 0; i < races.size(); ++i) {
    const Race& race = races[i];
    out << (i > 0 ? ", " : "") << "{\"kind\": " << quoted(name_of(race.kind))
        << ", \"place\": " << quoted(name_of(race.place)) << ", \"address\": " << race.address
        << ", \"bytes\": " << race.bytes << ", \"count\": " << race.count << ", ";
    write(out, "first", *race.first, race.first_writes);
    out << ", ";
    write(out, "second", *race.second, race.second_writes);
    out << "}";
  }
  out << "]";
  return out.str();
}

void report_and_end() {
  if (Engine::get().forked) return;
  const std::vector<Race> races = Engine::get().races.take();
  if (races.empty()) return;
  std::fprintf(stderr, "npu_kv_ops simulator: %zu races: %s\n", races.size(), json(races).c_str());
  std::fflush(nullptr);
  _exit(kExitCode);
}

}  // namespace

NPU_SIM_EXPORT void npu_sim_check_races(int on) {
  RaceChecker& races = Engine::get().races;
  if (on != 0) {
    races.start();
  } else {
    races.stop();
  }
}

NPU_SIM_EXPORT void npu_sim_report_races_at_exit() {
  Engine::get();  // its exit function is registered first and so runs last: streams are still there
  static const int registered = std::atexit(report_and_end);
  (void)registered;
}

NPU_SIM_EXPORT int64_t npu_sim_mark_races() {
  return static_cast<int64_t>(Engine::get().races.mark());
}

NPU_SIM_EXPORT char* npu_sim_take_races(int64_t first) {
  const std::string text = json(Engine::get().races.take(static_cast<size_t>(first)));
  return ::strdup(text.c_str());
}
