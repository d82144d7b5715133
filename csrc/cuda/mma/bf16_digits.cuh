// float32 on the tensor cores with float32's precision: x = x0 + x1 + x2. Each of these bf16 digits is a bfloat16, which has a
// third of float's bits and all of its range. Of the nine products of two such numbers the six largest are made; what they
// leave out is 2^-25 of the whole. Where a caller allows less precision, two digits and three products leave out 2^-16. Numbers
// are cut into digits once, on their way into shared memory.
#pragma once

#include <cuda_bf16.h>

namespace flash_online::cuda {

// A float that takes part in products with 16 of its 24 bits: two digits.
struct Bf16x2Float {
  float value;
};

// The representation of an element in shared memory: the type of its digits, and how many there are.
template <class Element>
struct Digits {
  using Digit = Element;
  static constexpr int kDigits = 1;
};
template <>
struct Digits<float> {
  using Digit = __nv_bfloat16;
  static constexpr int kDigits = 3;
};
template <>
struct Digits<Bf16x2Float> {
  using Digit = __nv_bfloat16;
  static constexpr int kDigits = 2;
};
// Bytes of an element in shared memory, by which a kernel's tile is chosen.
template <class Element>
constexpr int kDigitsBytes = Digits<Element>::kDigits * static_cast<int>(sizeof(typename Digits<Element>::Digit));

}  // namespace flash_online::cuda
