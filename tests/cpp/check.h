// The little that the C++ tests need of a test framework: TEST, CHECK, CHECK_EQUAL, CHECK_THROWS.
// Every test of the program runs; the exit code is 1 if a check of any failed.
#pragma once

#include <cstdio>
#include <exception>
#include <sstream>
#include <string>
#include <vector>

namespace check {

struct Test {
  const char* name;
  void (*run)();
};

inline std::vector<Test>& tests() {
  static std::vector<Test> all;
  return all;
}

inline int& failures() {
  static int count = 0;
  return count;
}

inline bool add(const char* name, void (*run)()) {
  tests().push_back({name, run});
  return true;
}

inline void fail(const char* file, int line, const std::string& what) {
  ++failures();
  std::fprintf(stderr, "%s:%d: %s\n", file, line, what.c_str());
}

template <typename A, typename B>
void equal(const A& a, const B& b, const char* text, const char* file, int line) {
  if (a == b) return;
  std::ostringstream out;
  out << text << ": " << a << " is not " << b;
  fail(file, line, out.str());
}

inline int run_all() {
  for (const Test& test : tests()) {
    const int before = failures();
    try {
      test.run();
    } catch (const std::exception& error) {
      fail(test.name, 0, std::string("unexpected exception: ") + error.what());
    }
    std::printf("%s %s\n", failures() == before ? "passed" : "FAILED", test.name);
  }
  return failures() == 0 ? 0 : 1;
}

}  // namespace check

#define TEST(name)                                                            \
  static void name();                                                         \
  [[maybe_unused]] static const bool name##_added = check::add(#name, &name); \
  static void name()

#define CHECK(condition) \
  ((condition) ? (void)0 : check::fail(__FILE__, __LINE__, "not true: " #condition))

#define CHECK_EQUAL(a, b) check::equal((a), (b), #a " == " #b, __FILE__, __LINE__)

// The exception must be of the kind and its text contain `text`.
#define CHECK_THROWS(kind, statement, text)                                               \
  do {                                                                                    \
    try {                                                                                 \
      statement;                                                                          \
      check::fail(__FILE__, __LINE__, "nothing was thrown by " #statement);               \
    } catch (const kind& error) {                                                         \
      if (std::string(error.what()).find(text) == std::string::npos) {                    \
        check::fail(__FILE__, __LINE__, std::string("unexpected text: ") + error.what()); \
      }                                                                                   \
    }                                                                                     \
  } while (false)

#define CHECK_MAIN \
  int main() { return check::run_all(); }
