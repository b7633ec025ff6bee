// The operators that can be computed, by type: what each costs, and how often it has run.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <string>

#include "engine/operator_call.h"

namespace npu_kv::sim {

/// Thread-safe.
class OperatorTable {
 public:
  /// Never destroyed. Starts with the kernels of register_fill_operators.
  static OperatorTable& get();

  void add(const std::string& type, const Kernel& kernel);
  /// False when there is no such operator, even after load_operator_library.
  bool find(const std::string& type, Kernel& kernel) const;
  /// All types, comma-separated.
  std::string types() const;

 private:
  mutable std::mutex mutex_;
  std::map<std::string, Kernel> kernels_;
};

/// Names the library of kernels that link torch. Thread-safe.
void set_operator_library(const std::string& path);
/// Opens that library, once, and only when torch is in the process: this library links nothing, and
/// must not bring torch in. Later calls answer at once. Returns why those kernels are not there, or
/// nothing when they are. Thread-safe.
std::string load_operator_library();

/// Thread-safe. Operators are counted when they have run, captured ones at every replay.
class OperatorCounts {
 public:
  struct Count {
    int64_t calls = 0;
    int64_t bytes = 0;
  };
  void add(const std::string& type, int64_t bytes);
  std::map<std::string, Count> snapshot() const;
  void reset();

 private:
  mutable std::mutex mutex_;
  std::map<std::string, Count> counts_;
};

OperatorCounts& operator_counts();

/// Thread-safe. The device time of operators: a fixed part and one by bytes, set for a type or else
/// from the settings.
class OperatorCosts {
 public:
  /// A negative part stands for that of the settings.
  void set(const std::string& type, int64_t fixed_ns, int64_t bytes_per_second);
  void clear();
  int64_t duration_ns(const std::string& type, int64_t bytes, const Settings& settings) const;

 private:
  struct Cost {
    int64_t fixed_ns;
    int64_t bytes_per_second;
  };
  mutable std::mutex mutex_;
  std::map<std::string, Cost> costs_;
};

OperatorCosts& operator_costs();

/// ZerosLike, OnesLike and Fill.
void register_fill_operators(OperatorTable& table);

}  // namespace npu_kv::sim
