// The number formats of tensors: their sizes, and one scalar to and from each.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "abi/acl_op_abi.h"

namespace npu_kv::sim {

/// Bytes of one element; 0 for a type that has no whole bytes or is unknown.
size_t element_bytes(int dtype);
std::string dtype_name(int dtype);

/// One scalar without loss: integers stay integers.
struct Number {
  double real = 0;
  double imaginary = 0;
  int64_t integer = 0;  // the bits, modulo 2^64
  bool is_integer = false;

  static Number of(int64_t value) { return {double(value), 0, value, true}; }
};

/// Nothing for a dtype whose values the simulator does not know.
std::optional<Number> decode_number(int dtype, const void* bytes);
bool encode_number(int dtype, const Number& number, void* bytes);

/// IEEE binary16, rounded to nearest even.
uint16_t encode_float16(double value);
double decode_float16(uint16_t bits);

}  // namespace npu_kv::sim
