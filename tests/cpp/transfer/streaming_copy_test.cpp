#include "runtime/streaming_copy.h"

#include <cstring>
#include <vector>

#include "check.h"

using namespace npu_kv;

namespace {

constexpr char kUntouched = 0x5a;

// Copies of the given sizes, packed with a gap after each, at odd distances from cache lines.
struct Copies {
  Copies(const std::vector<size_t>& sizes, size_t src_shift, size_t dst_shift) : size(sizes) {
    size_t total = 64;
    for (size_t bytes : sizes) total += bytes + kGap;
    source.resize(total);
    for (size_t i = 0; i < total; ++i) source[i] = static_cast<char>(i * 131 + i / 251);
    destination.assign(total, kUntouched);
    expected = destination;
    size_t at = 0;
    for (size_t bytes : sizes) {
      src.push_back(source.data() + at + src_shift);
      dst.push_back(destination.data() + at + dst_shift);
      std::memcpy(expected.data() + at + dst_shift, src.back(), bytes);
      at += bytes + kGap;
    }
  }

  Descriptors view() { return {dst.data(), src.data(), size.data(), size.size()}; }

  static constexpr size_t kGap = 40;
  std::vector<char> source, destination, expected;
  std::vector<void*> src, dst;
  std::vector<size_t> size;
};

}  // namespace

TEST(every_byte_arrives_and_none_besides_whatever_size_and_alignment) {
  std::vector<size_t> sizes;
  for (size_t bytes = 1; bytes <= 130; ++bytes) sizes.push_back(bytes);
  // Around the lengths at which another loop takes over.
  for (size_t lines : {7, 8, 9, 10, 15, 16, 17, 64}) {
    for (int off : {-1, 0, 1, 31}) sizes.push_back(lines * 64 + off);
  }
  for (size_t src_shift : {0, 1, 16, 33, 63}) {
    for (size_t dst_shift : {0, 1, 8, 16, 63}) {
      Copies copies(sizes, src_shift, dst_shift);
      copy_streaming(copies.view());
      CHECK(copies.destination == copies.expected);
    }
  }
}

TEST(no_copies_are_no_problem) { copy_streaming({}); }

CHECK_MAIN
