// The bounds-checked string functions that torchair takes from CANN's C library: where the C
// standard's Annex K is silent about a detail, an error empties the destination and is returned.
#include <cerrno>
#include <cstdarg>
#include <cstddef>
#include <cstdio>
#include <cstring>

#include "abi/acl_rt_abi.h"

NPU_SIM_EXPORT int vsnprintf_s(char* destination, size_t capacity, size_t count, const char* format,
                               va_list arguments) {
  if (destination == nullptr || format == nullptr || capacity == 0) {
    if (destination != nullptr && capacity > 0) *destination = '\0';
    return -1;
  }
  // At most `count` characters are written; truncation to `count` is reported with -1 but keeps the
  // text, truncation because `destination` is too small empties it.
  const size_t room = count < capacity ? count + 1 : capacity;
  const int written = std::vsnprintf(destination, room, format, arguments);
  if (written >= 0 && static_cast<size_t>(written) < room) return written;
  if (written < 0 || room == capacity) *destination = '\0';
  return -1;
}

NPU_SIM_EXPORT int snprintf_s(char* destination, size_t capacity, size_t count, const char* format,
                              ...) {
  va_list arguments;
  va_start(arguments, format);
  const int written = vsnprintf_s(destination, capacity, count, format, arguments);
  va_end(arguments);
  return written;
}

NPU_SIM_EXPORT int strcpy_s(char* destination, size_t capacity, const char* source) {
  if (destination == nullptr || capacity == 0) return EINVAL;
  if (source == nullptr) {
    *destination = '\0';
    return EINVAL;
  }
  const size_t length = ::strnlen(source, capacity);
  if (length == capacity) {
    *destination = '\0';
    return ERANGE;
  }
  std::memmove(destination, source, length + 1);
  return 0;
}
