#include "runtime/streaming_copy.h"

#include <cstdint>
#include <cstring>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

namespace npu_kv {

#ifdef __SSE2__
namespace {

constexpr size_t kLine = 64;  // bytes of a cache line
// Lines between the one that is copied and the one that is fetched; measured, flat around this
// value.
constexpr size_t kAhead = 8;

void prefetch(const void* address) { _mm_prefetch(static_cast<const char*>(address), _MM_HINT_T0); }

// A store that does not read the destination's line first, which saves a third of the memory
// traffic.
void copy_line(char* dst, const char* src) {
  auto* to = reinterpret_cast<__m128i*>(dst);
  auto* from = reinterpret_cast<const __m128i*>(src);
  const __m128i a = _mm_loadu_si128(from);
  const __m128i b = _mm_loadu_si128(from + 1);
  const __m128i c = _mm_loadu_si128(from + 2);
  const __m128i d = _mm_loadu_si128(from + 3);
  _mm_stream_si128(to, a);
  _mm_stream_si128(to + 1, b);
  _mm_stream_si128(to + 2, c);
  _mm_stream_si128(to + 3, d);
}

// `next_src` is where the copy after this one begins: its first lines are fetched during the last
// ones here, so that short copies do not each wait for memory anew.
void copy_one(char* dst, const char* src, size_t size, const char* next_src) {
  const size_t head = -reinterpret_cast<uintptr_t>(dst) % kLine;
  if (size < head + kLine * kAhead) {
    std::memcpy(dst, src, size);
    return;
  }
  std::memcpy(dst, src, head);
  dst += head;
  src += head;
  size -= head;
  size_t done = 0;
  for (const size_t end = size - kLine * kAhead; done + kLine <= end; done += kLine) {
    prefetch(src + done + kLine * kAhead);
    copy_line(dst + done, src + done);
  }
  for (size_t ahead = 0; done + kLine <= size; done += kLine, ahead += kLine) {
    prefetch(next_src + ahead);
    copy_line(dst + done, src + done);
  }
  std::memcpy(dst + done, src + done, size - done);
}

}  // namespace

void copy_streaming(const Descriptors& copies) {
  for (size_t i = 0; i < copies.count; ++i) {
    const size_t next = i + 1 < copies.count ? i + 1 : i;
    // Both pages of the next copy are looked up while this one runs.
    prefetch(copies.src[next]);
    prefetch(copies.dst[next]);
    copy_one(static_cast<char*>(copies.dst[i]), static_cast<const char*>(copies.src[i]),
             copies.size[i], static_cast<const char*>(copies.src[next]));
  }
  // The stores above are weakly ordered: other threads must see them when the call has returned.
  _mm_sfence();
}

#else  // The C library's memcpy is the best that is known on other processors.

void copy_streaming(const Descriptors& copies) {
  for (size_t i = 0; i < copies.count; ++i) {
    std::memcpy(copies.dst[i], copies.src[i], copies.size[i]);
  }
}

#endif

}  // namespace npu_kv
