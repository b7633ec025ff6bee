// The kernels by operator type. To add one, add a line to one of the add_* functions:
//
//   table["Sin"] = {[](const Call& call) { call.give(call.in(0).sin()); }};
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "kernels/call.h"

namespace npu_kv::sim::kernels {

struct Kernel {
  /// Runs on a stream's thread, without gradients and without further threads.
  void (*run)(const Call&) = nullptr;
  /// The bytes that the operator reads and writes, where that is not the size of all its tensors.
  /// Asked before the data is there: shapes, attributes and host constants only.
  int64_t (*bytes)(const Call&) = nullptr;
};

using Table = std::map<std::string, Kernel>;

void add_elementwise(Table& table);
void add_reductions(Table& table);
void add_matrix(Table& table);
void add_shapes(Table& table);
void add_indexing(Table& table);
void add_normalisation(Table& table);
void add_random(Table& table);

}  // namespace npu_kv::sim::kernels
