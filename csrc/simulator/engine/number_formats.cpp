#include "engine/number_formats.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

namespace npu_kv::sim {
namespace {

/// A binary floating-point format narrower than float. `infinity` is the pattern that a value too
/// large becomes: infinity, or NaN in a format that has none.
struct SmallFloat {
  int exponent_bits;
  int mantissa_bits;
  uint32_t infinity;
  uint32_t nan;

  int bias() const { return (1 << (exponent_bits - 1)) - 1; }
  int sign_shift() const { return exponent_bits + mantissa_bits; }
};

constexpr SmallFloat kFloat16 = {5, 10, 0x7C00, 0x7E00};
constexpr SmallFloat kBfloat16 = {8, 7, 0x7F80, 0x7FC0};
constexpr SmallFloat kFloat8E5M2 = {5, 2, 0x7C, 0x7F};
constexpr SmallFloat kFloat8E4M3FN = {4, 3, 0x7F, 0x7F};

uint32_t encode(const SmallFloat& format, double value) {
  const uint32_t sign = uint32_t{std::signbit(value)} << format.sign_shift();
  if (std::isnan(value)) return sign | format.nan;
  const double magnitude = std::fabs(value);
  if (std::isinf(magnitude)) return sign | format.infinity;
  if (magnitude == 0) return sign;
  // Below the smallest normal number the spacing stays that of the smallest exponent.
  const int exponent = std::max(std::ilogb(magnitude), 1 - format.bias());
  // Exact in double; rounds half to even. With its hidden bit the mantissa carries into the
  // exponent.
  const double steps = std::nearbyint(std::ldexp(magnitude, format.mantissa_bits - exponent));
  const int64_t bits =
      (int64_t{exponent + format.bias() - 1} << format.mantissa_bits) + static_cast<int64_t>(steps);
  return sign | static_cast<uint32_t>(std::min<int64_t>(bits, format.infinity));
}

double decode(const SmallFloat& format, uint32_t bits) {
  const uint32_t magnitude_bits = bits & ((1u << format.sign_shift()) - 1);
  const double sign = (bits >> format.sign_shift()) & 1 ? -1.0 : 1.0;
  if (magnitude_bits == format.infinity && format.infinity != format.nan) {
    return sign * std::numeric_limits<double>::infinity();
  }
  if (magnitude_bits >= format.infinity) return std::numeric_limits<double>::quiet_NaN();
  const int exponent = static_cast<int>(magnitude_bits >> format.mantissa_bits);
  const uint32_t mantissa = magnitude_bits & ((1u << format.mantissa_bits) - 1);
  const uint32_t hidden = exponent == 0 ? 0 : 1u << format.mantissa_bits;
  return sign * std::ldexp(double(mantissa | hidden),
                           std::max(exponent, 1) - format.bias() - format.mantissa_bits);
}

template <typename T>
T load(const void* bytes) {
  T value;
  std::memcpy(&value, bytes, sizeof value);
  return value;
}

template <typename T>
bool store(void* bytes, T value) {
  std::memcpy(bytes, &value, sizeof value);
  return true;
}

Number from_real(double real, double imaginary = 0) { return {real, imaginary, 0, false}; }

Number from_unsigned(uint64_t value) {
  return {double(value), 0, static_cast<int64_t>(value), true};
}

/// Like a cast in C++, but defined where that is not: clamped, and 0 for NaN.
template <typename T>
T to_integer(const Number& number) {
  if (number.is_integer) return static_cast<T>(number.integer);
  if (std::isnan(number.real)) return 0;
  // The limits of 64-bit types are not doubles; the comparison with the rounded limit is exact.
  if (number.real >= std::ldexp(1.0, std::numeric_limits<T>::digits)) {
    return std::numeric_limits<T>::max();
  }
  if (number.real <= double(std::numeric_limits<T>::min())) return std::numeric_limits<T>::min();
  return static_cast<T>(number.real);
}

}  // namespace

size_t element_bytes(int dtype) {
  switch (dtype) {
    case ACL_INT8:
    case ACL_UINT8:
    case ACL_BOOL:
    case ACL_HIFLOAT8:
    case ACL_FLOAT8_E5M2:
    case ACL_FLOAT8_E4M3FN:
    case ACL_FLOAT8_E8M0:
      return 1;
    case ACL_FLOAT16:
    case ACL_BF16:
    case ACL_INT16:
    case ACL_UINT16:
      return 2;
    case ACL_FLOAT:
    case ACL_INT32:
    case ACL_UINT32:
    case ACL_COMPLEX32:
      return 4;
    case ACL_INT64:
    case ACL_UINT64:
    case ACL_DOUBLE:
    case ACL_COMPLEX64:
      return 8;
    case ACL_COMPLEX128:
      return 16;
    default:
      return 0;
  }
}

std::string dtype_name(int dtype) {
  switch (dtype) {
    case ACL_DT_UNDEFINED:
      return "none";
    case ACL_FLOAT:
      return "float32";
    case ACL_FLOAT16:
      return "float16";
    case ACL_INT8:
      return "int8";
    case ACL_INT32:
      return "int32";
    case ACL_UINT8:
      return "uint8";
    case ACL_INT16:
      return "int16";
    case ACL_UINT16:
      return "uint16";
    case ACL_UINT32:
      return "uint32";
    case ACL_INT64:
      return "int64";
    case ACL_UINT64:
      return "uint64";
    case ACL_DOUBLE:
      return "float64";
    case ACL_BOOL:
      return "bool";
    case ACL_STRING:
      return "string";
    case ACL_COMPLEX32:
      return "complex32";
    case ACL_COMPLEX64:
      return "complex64";
    case ACL_COMPLEX128:
      return "complex128";
    case ACL_BF16:
      return "bfloat16";
    case ACL_HIFLOAT8:
      return "hifloat8";
    case ACL_FLOAT8_E5M2:
      return "float8_e5m2";
    case ACL_FLOAT8_E4M3FN:
      return "float8_e4m3fn";
    case ACL_FLOAT8_E8M0:
      return "float8_e8m0";
    default:
      return "dtype " + std::to_string(dtype);
  }
}

std::optional<Number> decode_number(int dtype, const void* bytes) {
  switch (dtype) {
    case ACL_BOOL:
      return Number::of(load<uint8_t>(bytes) != 0);
    case ACL_INT8:
      return Number::of(load<int8_t>(bytes));
    case ACL_UINT8:
      return Number::of(load<uint8_t>(bytes));
    case ACL_INT16:
      return Number::of(load<int16_t>(bytes));
    case ACL_UINT16:
      return Number::of(load<uint16_t>(bytes));
    case ACL_INT32:
      return Number::of(load<int32_t>(bytes));
    case ACL_UINT32:
      return Number::of(load<uint32_t>(bytes));
    case ACL_INT64:
      return Number::of(load<int64_t>(bytes));
    case ACL_UINT64:
      return from_unsigned(load<uint64_t>(bytes));
    case ACL_FLOAT:
      return from_real(load<float>(bytes));
    case ACL_DOUBLE:
      return from_real(load<double>(bytes));
    case ACL_FLOAT16:
      return from_real(decode(kFloat16, load<uint16_t>(bytes)));
    case ACL_BF16:
      return from_real(decode(kBfloat16, load<uint16_t>(bytes)));
    case ACL_FLOAT8_E5M2:
      return from_real(decode(kFloat8E5M2, load<uint8_t>(bytes)));
    case ACL_FLOAT8_E4M3FN:
      return from_real(decode(kFloat8E4M3FN, load<uint8_t>(bytes)));
    case ACL_COMPLEX32:
      return from_real(decode(kFloat16, load<uint16_t>(bytes)),
                       decode(kFloat16, load<uint16_t>(static_cast<const char*>(bytes) + 2)));
    case ACL_COMPLEX64:
      return from_real(load<float>(bytes), load<float>(static_cast<const char*>(bytes) + 4));
    case ACL_COMPLEX128:
      return from_real(load<double>(bytes), load<double>(static_cast<const char*>(bytes) + 8));
    default:
      return std::nullopt;
  }
}

bool encode_number(int dtype, const Number& number, void* bytes) {
  auto* second = static_cast<char*>(bytes) + element_bytes(dtype) / 2;
  switch (dtype) {
    case ACL_BOOL:
      return store(bytes, static_cast<uint8_t>(number.real != 0 || number.imaginary != 0));
    case ACL_INT8:
      return store(bytes, to_integer<int8_t>(number));
    case ACL_UINT8:
      return store(bytes, to_integer<uint8_t>(number));
    case ACL_INT16:
      return store(bytes, to_integer<int16_t>(number));
    case ACL_UINT16:
      return store(bytes, to_integer<uint16_t>(number));
    case ACL_INT32:
      return store(bytes, to_integer<int32_t>(number));
    case ACL_UINT32:
      return store(bytes, to_integer<uint32_t>(number));
    case ACL_INT64:
      return store(bytes, to_integer<int64_t>(number));
    case ACL_UINT64:
      return store(bytes, to_integer<uint64_t>(number));
    case ACL_FLOAT:
      return store(bytes, static_cast<float>(number.real));
    case ACL_DOUBLE:
      return store(bytes, number.real);
    case ACL_FLOAT16:
      return store(bytes, static_cast<uint16_t>(encode(kFloat16, number.real)));
    case ACL_BF16:
      return store(bytes, static_cast<uint16_t>(encode(kBfloat16, number.real)));
    case ACL_FLOAT8_E5M2:
      return store(bytes, static_cast<uint8_t>(encode(kFloat8E5M2, number.real)));
    case ACL_FLOAT8_E4M3FN:
      return store(bytes, static_cast<uint8_t>(encode(kFloat8E4M3FN, number.real)));
    case ACL_COMPLEX32:
      return store(bytes, static_cast<uint16_t>(encode(kFloat16, number.real))) &&
             store(second, static_cast<uint16_t>(encode(kFloat16, number.imaginary)));
    case ACL_COMPLEX64:
      return store(bytes, static_cast<float>(number.real)) &&
             store(second, static_cast<float>(number.imaginary));
    case ACL_COMPLEX128:
      return store(bytes, number.real) && store(second, number.imaginary);
    default:
      return false;
  }
}

uint16_t encode_float16(double value) { return static_cast<uint16_t>(encode(kFloat16, value)); }
double decode_float16(uint16_t bits) { return decode(kFloat16, bits); }

}  // namespace npu_kv::sim
