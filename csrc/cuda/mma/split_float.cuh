// float32 on the tensor cores with float32's digits: x = x0 + x1 + x2, each piece a bfloat16, which has a third of float's
// digits and all of its range. Of the nine products of two such numbers the six largest are made; what they leave out is 2^-25
// of the whole. Where a caller allows fewer digits, two pieces and three products leave out 2^-16. Numbers are split once, on
// their way into shared memory.
#pragma once

#include <cuda_bf16.h>

namespace flash_online::cuda {

// A float that takes part in products with 16 of its 24 digits.
struct Bf16x2Float {
  float value;
};

// The representation of an element in shared memory: the type of its pieces, and how many there are.
template <class Element>
struct Split {
  using Piece = Element;
  static constexpr int kPieces = 1;
};
template <>
struct Split<float> {
  using Piece = __nv_bfloat16;
  static constexpr int kPieces = 3;
};
template <>
struct Split<Bf16x2Float> {
  using Piece = __nv_bfloat16;
  static constexpr int kPieces = 2;
};
// Bytes of an element in shared memory, by which a kernel's tile is chosen.
template <class Element>
constexpr int kSplitBytes = Split<Element>::kPieces * static_cast<int>(sizeof(typename Split<Element>::Piece));

}  // namespace flash_online::cuda
