// Copies of blocks of memory, of any strides: what a message of a collective is packed from, and unpacked to.
#pragma once

#include <cstdint>

namespace flash_online {

// A block of units, each of `unit` bytes (1, 2, 4, 8 or 16; addresses are multiples of it). Strides count units.
struct BlockCopy {
  static constexpr int kDims = 5;
  const char* from = nullptr;
  char* to = nullptr;
  int64_t size[kDims] = {1, 1, 1, 1, 1};  // at least 1 each
  int64_t from_stride[kDims] = {}, to_stride[kDims] = {};
  int unit = 1;

  constexpr int64_t units() const {
    int64_t product = 1;
    for (const int64_t n : size) product *= n;
    return product;
  }
};

}  // namespace flash_online
