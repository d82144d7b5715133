// A tile of rows in shared memory, as ldmatrix reads it.
#pragma once

#include "../hw/shared_memory.cuh"
#include "bf16_digits.cuh"

namespace flash_online::cuda {

// Rows of kWidth elements. A row holds all first digits, then all second ones and so on; each run of digits is 16 bytes longer
// than its data, so that the 16 bytes that eight rows have at one column lie in different banks.
template <class Element, int kWidth>
struct SharedTile {
  using Digit = typename Digits<Element>::Digit;
  static constexpr int kDigits = Digits<Element>::kDigits;
  static constexpr int kDigitPitch = kWidth + 8, kPitch = kDigits * kDigitPitch;  // in elements of Digit
  static constexpr int bytes(int rows) { return rows * kPitch * static_cast<int>(sizeof(Digit)); }
  static_assert(sizeof(Digit) == 2 && kWidth % 16 == 0);

  Digit* data;

  __device__ __forceinline__ Digit* row(int r, int digit = 0) const { return data + r * kPitch + digit * kDigitPitch; }
  __device__ __forceinline__ unsigned address(int row, int column, int digit = 0) const {
    return shared_address(data) + static_cast<unsigned>((row * kPitch + digit * kDigitPitch + column) * sizeof(Digit));
  }
  // The sub-tile that begins at a row and a column.
  __device__ __forceinline__ SharedTile from(int row, int column) const { return {data + row * kPitch + column}; }
  // A row's memory for whole elements.
  __device__ __forceinline__ Element* elements(int r) const { return reinterpret_cast<Element*>(row(r)); }
};

}  // namespace flash_online::cuda
