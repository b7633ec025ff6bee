// What the tests of the simulated runtime share: a session per test that leaves nothing behind,
// owners of runtime objects, and child processes.
//
// Checks that something has *not* happened give a wrong implementation some milliseconds to do it;
// they never fail a right one, however slow the machine.
#pragma once

#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "api/control.h"
#include "check.h"
#include "simulator/acl.h"

#define CHECK_OK(call) CHECK_EQUAL(call, ACL_SUCCESS)

inline constexpr int kWhileMs = 20;
inline void wait_a_while() { std::this_thread::sleep_for(std::chrono::milliseconds(kWhileMs)); }

/// A fresh context on the device, current on this thread; settings, faults and counters are as at
/// the start of the program again when it ends.
class Session {
 public:
  explicit Session(int device = 0, int devices = 1) {
    std::string names = npu_sim_setting_names();
    for (size_t begin = 0; begin < names.size();) {
      const size_t end = std::min(names.find(' ', begin), names.size());
      const std::string name = names.substr(begin, end - begin);
      npu_sim_get(name.c_str(), &settings_[name]);
      begin = end + 1;
    }
    npu_sim_set("devices", devices);
    CHECK_OK(aclrtCreateContext(&context, device));
    npu_sim_reset_stats();
    aclrtGetLastError(0);
    aclGetRecentErrMsg();
  }
  ~Session() {
    npu_sim_clear_faults();
    aclrtSetCurrentContext(context);
    aclrtSynchronizeDevice();
    for (const auto& [name, value] : settings_) npu_sim_set(name.c_str(), value);
  }
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;

  aclrtContext context = nullptr;

 private:
  std::map<std::string, int64_t> settings_;
};

/// An owner that hands its object to functions as the handle it is.
template <aclError (*destroy)(void*)>
class Owner {
 public:
  Owner() = default;
  ~Owner() {
    if (handle_ != nullptr) destroy(handle_);
  }
  Owner(const Owner&) = delete;
  Owner& operator=(const Owner&) = delete;
  operator void*() const { return handle_; }
  void* release() { return std::exchange(handle_, nullptr); }

 protected:
  void* handle_ = nullptr;
};

struct Stream : Owner<aclrtDestroyStream> {
  Stream() { CHECK_OK(aclrtCreateStream(&handle_)); }
};

/// A stream that is stalled; the rest of the work on it waits for go().
struct StalledStream : Owner<aclrtDestroyStream> {
  StalledStream() {
    CHECK_OK(aclrtCreateStream(&handle_));
    CHECK_OK(npu_sim_stall(handle_));
  }
  void go() { CHECK_OK(npu_sim_release(handle_)); }
};

struct Event : Owner<aclrtDestroyEvent> {
  explicit Event(uint32_t flags = ACL_EVENT_SYNC) {
    CHECK_OK(aclrtCreateEventExWithFlag(&handle_, flags));
  }
};
struct FlagEvent : Owner<aclrtDestroyEvent> {
  explicit FlagEvent(uint32_t flags) { CHECK_OK(aclrtCreateEventWithFlag(&handle_, flags)); }
};
struct DefaultEvent : Owner<aclrtDestroyEvent> {
  DefaultEvent() { CHECK_OK(aclrtCreateEvent(&handle_)); }
};

struct DeviceMemory : Owner<aclrtFree> {
  explicit DeviceMemory(size_t bytes) : bytes(bytes) {
    CHECK_OK(aclrtMallocAlign32(&handle_, bytes, 0));
  }
  char* data() const { return static_cast<char*>(handle_); }

  void write(const std::string& content) const {
    CHECK_OK(aclrtMemcpy(data(), bytes, content.data(), content.size(), ACL_MEMCPY_HOST_TO_DEVICE));
  }
  std::string read(size_t count) const {
    std::string content(count, '\0');
    CHECK_OK(aclrtMemcpy(content.data(), count, data(), count, ACL_MEMCPY_DEVICE_TO_HOST));
    return content;
  }
  const size_t bytes;
};

struct PinnedMemory : Owner<aclrtFreeHost> {
  explicit PinnedMemory(size_t bytes) : bytes(bytes) { CHECK_OK(aclrtMallocHost(&handle_, bytes)); }
  explicit PinnedMemory(const std::string& content) : PinnedMemory(content.size()) {
    write(content);
  }
  char* data() const { return static_cast<char*>(handle_); }
  void write(const std::string& content) const {
    std::memcpy(data(), content.data(), content.size());
  }
  std::string read(size_t count) const { return {data(), count}; }
  const size_t bytes;
};

struct Graph : Owner<aclmdlRIDestroy> {
  Graph() = default;
  explicit Graph(aclmdlRI graph) { handle_ = graph; }
};

inline aclError h2d(void* dst, const void* src, size_t bytes, aclrtStream stream) {
  return aclrtMemcpyAsync(dst, bytes, src, bytes, ACL_MEMCPY_HOST_TO_DEVICE, stream);
}
inline aclError d2h(void* dst, const void* src, size_t bytes, aclrtStream stream) {
  return aclrtMemcpyAsync(dst, bytes, src, bytes, ACL_MEMCPY_DEVICE_TO_HOST, stream);
}

/// Captures what `work` puts on the stream.
inline aclmdlRI capture(aclrtStream stream, const std::function<void()>& work) {
  aclmdlRI graph = nullptr;
  CHECK_OK(aclmdlRICaptureBegin(stream, ACL_MODEL_RI_CAPTURE_MODE_GLOBAL));
  work();
  CHECK_OK(aclmdlRICaptureEnd(stream, &graph));
  return graph;
}

inline bool query(aclrtStream stream) {
  aclrtStreamStatus status{};
  CHECK_OK(aclrtStreamQuery(stream, &status));
  return status == ACL_STREAM_STATUS_COMPLETE;
}

inline bool reached(aclrtEvent event) {
  aclrtEventRecordedStatus status{};
  CHECK_OK(aclrtQueryEventStatus(event, &status));
  return status == ACL_EVENT_RECORDED_STATUS_COMPLETE;
}

/// Whether work on the stream is still blocked after a while.
inline bool blocked(aclrtStream stream) {
  return aclrtSynchronizeStreamWithTimeout(stream, kWhileMs) == ACL_ERROR_RT_STREAM_SYNC_TIMEOUT;
}

/// A number of npu_sim_stats by its path, "copies.h2d"; 0 when it is not there.
inline int64_t stat(const std::string& path) {
  char* text = npu_sim_stats();
  const char* at = text;
  for (size_t begin = 0; at != nullptr && begin < path.size();) {
    const size_t end = std::min(path.find('.', begin), path.size());
    const std::string key = "\"" + path.substr(begin, end - begin) + "\": ";
    at = std::strstr(at, key.c_str());
    if (at != nullptr) at += key.size();
    begin = end + 1;
  }
  const int64_t value = at == nullptr ? 0 : std::strtoll(at, nullptr, 10);
  npu_sim_free(text);
  return value;
}

inline std::string take_text(char* text) {
  std::string copy = text;
  npu_sim_free(text);
  return copy;
}

inline std::string last_message() {
  const char* message = aclGetRecentErrMsg();
  return message == nullptr ? "" : message;
}

inline bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

/// Waits for a condition that another thread brings about.
template <typename Ready>
void wait_until(Ready&& ready) {
  while (!ready()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

// --- child processes
// ------------------------------------------------------------------------------

using ChildMain = int (*)();
inline std::map<std::string, ChildMain>& children() {
  static std::map<std::string, ChildMain> all;
  return all;
}

/// A function that run_child can run in a process of its own; its result is the exit code.
#define CHILD(name)                                                                          \
  static int name();                                                                         \
  [[maybe_unused]] static const bool name##_added = children().emplace(#name, &name).second; \
  static int name()

struct ChildEnd {
  int exit_code = -1;  // of a child that ended by itself
  int signal = 0;      // that killed it
};

/// Runs a CHILD of this program. One that hangs is killed by its own alarm.
inline ChildEnd run_child(const char* name) {
  const pid_t child = fork();
  if (child == 0) {
    // The sanitizers would turn a crash into an exit.
    setenv("ASAN_OPTIONS", "handle_segv=0:detect_leaks=0", 1);
    setenv("TSAN_OPTIONS", "handle_segv=0", 1);
    execl("/proc/self/exe", "child", "--child", name, nullptr);
    _exit(127);
  }
  int status = 0;
  waitpid(child, &status, 0);
  ChildEnd end;
  if (WIFEXITED(status)) end.exit_code = WEXITSTATUS(status);
  if (WIFSIGNALED(status)) end.signal = WTERMSIG(status);
  return end;
}

inline int simulator_test_main(int argc, char** argv) {
  if (argc == 3 && std::strcmp(argv[1], "--child") == 0) {
    alarm(60);
    std::exit(children().at(argv[2])());
  }
  return check::run_all();
}

#define SIMULATOR_TEST_MAIN \
  int main(int argc, char** argv) { return simulator_test_main(argc, argv); }
