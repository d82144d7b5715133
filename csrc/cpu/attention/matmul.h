// The matrix multiplication of attention on the CPU: c[rows, columns] = a[rows, depth] b[depth, columns], with the columns,
// mostly queries, in the lanes of vectors.
//
// Operand<E> is the type in which elements of type E are multiplied: float and double as they are, 16-bit elements as float.
// BFloat16 stays as it is where the instruction set multiplies pairs of it and adds in float (the VNNI layout); the depth then
// runs in pairs, and b is [depth / 2, columns, 2]. Where tile registers multiply such pairs, Float16 becomes Bf16x2Float16.
#pragma once

#include <algorithm>
#include <cstring>
#include <limits>

#include "../simd.h"

namespace flash_online::cpu::FLASH_ONLINE_ISA {

// A Float16 as the sum of two BFloat16, its digits, which is exact: they hold 8 of its 11 bits, and the other 3. The product of
// two is a sum of four products of BFloat16. The unit of memory of such numbers is the vector: a vector of pairs of first
// digits is followed by the vector of their second digits. Offsets in a row are therefore multiples of 32 elements, and in a
// row of pairs of 16 pairs.
//
// A second digit has the sign of its number and is 0 only where the number is 0, so that infinity times a number stays
// infinity.
struct Bf16x2Float16 {
  BFloat16 digit[2];
};

template <class E>
struct OperandOf {
  using type = Accumulator<E>;
};
#if defined(__AVX512BF16__)
template <>
struct OperandOf<BFloat16> {
  using type = BFloat16;
};
#endif
#if defined(__AMX_BF16__)
template <>
struct OperandOf<Float16> {
  using type = Bf16x2Float16;
};
#endif
template <class E>
using Operand = typename OperandOf<E>::type;

// The number of BFloat16 that sum to one element; 0: elements are not multiplied in pairs of BFloat16.
template <class F>
constexpr int kBf16Digits = 0;
template <>
inline constexpr int kBf16Digits<BFloat16> = 1;
template <>
inline constexpr int kBf16Digits<Bf16x2Float16> = 2;
template <class F>
constexpr bool kPaired = kBf16Digits<F> > 0;
// The depth and the rows of a paired matmul are padded to the shape of the AMX tile registers, which have no tails.
template <class F>
constexpr int64_t kDepthStep = kPaired<F> ? 32 : 1;
template <class F>
constexpr int64_t kRowStep = kPaired<F> ? 16 : 1;

// The number of products that are summed at a time. A long sum of float inputs loses digits; a sum of partial sums loses fewer.
template <class F>
constexpr int64_t kMaxTerms = std::is_same_v<F, float> ? 64 : std::numeric_limits<int64_t>::max();

// The use of the result: it overwrites c, is added to c, or is added to c * factor[column].
enum class Accumulate { kOverwrite, kAdd, kRescaleAndAdd };

// The unit in which operands are read: an element, or the bits of a pair of elements.
template <class F>
struct WordOf {
  using type = F;
};
template <>
struct WordOf<BFloat16> {
  using type = float;  // the bits of a pair
};
template <>
struct WordOf<Bf16x2Float16> {
  using type = float;
};
template <class F>
using Word = typename WordOf<F>::type;

template <class F>
FLASH_ONLINE_INLINE Vector<Accumulator<F>> multiply_add(Vector<Accumulator<F>> sum, Vector<Word<F>> a, Vector<Word<F>> b) {
  if constexpr (kPaired<F>) {
#if defined(__AVX512BF16__)
    return reinterpret_cast<Vector<float>>(
        _mm512_dpbf16_ps(reinterpret_cast<__m512>(sum), reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b)));
#endif
  }
  return sum + a * b;
}

// Rows x Vectors of the result, summed in registers. The sum starts at 0 and is added to c once, at its end: products added to
// c one by one would lose digits with every tile.
template <int Rows, int Vectors, class F, class A>
FLASH_ONLINE_INLINE void matmul_in_registers(Accumulate mode, int64_t words, const Word<F>* a, int64_t a_row, int64_t a_column,
                                             const Word<F>* b, int64_t b_row, A* c, int64_t c_row, const A* factor) {
  Vector<A> sum[Rows][Vectors] = {};
  for (int64_t k = 0; k < words; ++k, a += a_column, b += b_row) {
    Vector<Word<F>> row[Vectors];
    for (int v = 0; v < Vectors; ++v) row[v] = load_vector(b + v * kLanes<A>);
    for (int i = 0; i < Rows; ++i) {
      const Vector<Word<F>> a_lanes = broadcast_from(a + i * a_row);
      for (int v = 0; v < Vectors; ++v) sum[i][v] = multiply_add<F>(sum[i][v], a_lanes, row[v]);
    }
  }
  for (int v = 0; v < Vectors; ++v) {
    const Vector<A> scale = mode == Accumulate::kRescaleAndAdd ? load_vector(factor + v * kLanes<A>) : Vector<A>{};
    for (int i = 0; i < Rows; ++i) {
      A* to = c + i * c_row + v * kLanes<A>;
      if (mode == Accumulate::kRescaleAndAdd) sum[i][v] += load_vector(to) * scale;
      if (mode == Accumulate::kAdd) sum[i][v] += load_vector(to);
      store_vector(to, sum[i][v]);
    }
  }
}

template <int Vectors, class F, class A>
__attribute__((noinline)) void matmul_strip(Accumulate mode, int64_t rows, int64_t words, const Word<F>* a, int64_t a_row,
                                            int64_t a_column, const Word<F>* b, int64_t b_row, A* c, int64_t c_row,
                                            const A* factor) {
  // With the widest Vectors, 12 (of 16 registers) or 24 (of 32) hold sums. A single vector needs as many rows, to keep the
  // multipliers busy while each sum waits for its previous step.
  constexpr int kRows = Vectors == 1 ? 12 : 6;
  int64_t i = 0;
  const auto do_rows = [&]<int Rows>() FLASH_ONLINE_LAMBDA_INLINE {
    matmul_in_registers<Rows, Vectors, F, A>(mode, words, a + i * a_row, a_row, a_column, b, b_row, c + i * c_row, c_row,
                                             factor);
    i += Rows;
  };
  while (i + kRows <= rows) do_rows.template operator()<kRows>();
  if (i + 6 <= rows) do_rows.template operator()<6>();
  switch (rows - i) {
    case 1: return do_rows.template operator()<1>();
    case 2: return do_rows.template operator()<2>();
    case 3: return do_rows.template operator()<3>();
    case 4: return do_rows.template operator()<4>();
    case 5: return do_rows.template operator()<5>();
  }
}

#if defined(__AMX_BF16__)

// Configures the AMX tile registers and releases them: a thread that keeps them in use pays at every context switch.
class AmxTiles {
 public:
  AmxTiles() {
    struct alignas(64) Shape {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    };
    static constexpr Shape kShape;
    _tile_loadconfig(&kShape);
  }
  ~AmxTiles() { _tile_release(); }
  AmxTiles(const AmxTiles&) = delete;
  AmxTiles& operator=(const AmxTiles&) = delete;
};

// Computes up to 32 x 32 of c: tiles 0 to 3 hold sums, 4 and 5 rows of a, 6 and 7 columns of b. `words` counts the pairs of the
// depth, a multiple of 16; a_row, b_row and c_row count floats.
template <int kDigits, bool kTwoRows, bool kTwoColumns>
FLASH_ONLINE_INLINE void multiply_amx_block(bool add, int64_t words, const float* a, int64_t a_row, const float* b,
                                            int64_t b_row, float* c, int64_t c_row) {
  constexpr int64_t kVector = 16;  // words of a tile's row
  const int64_t a_bytes = a_row * 4, b_bytes = b_row * 4, c_bytes = c_row * 4;
  float* const c1 = c + 16 * c_row;
  if (add) {
    _tile_loadd(0, c, c_bytes);
    if (kTwoColumns) _tile_loadd(1, c + 16, c_bytes);
    if (kTwoRows) _tile_loadd(2, c1, c_bytes);
    if (kTwoRows && kTwoColumns) _tile_loadd(3, c1 + 16, c_bytes);
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  const auto load_a = [&](const float* from) FLASH_ONLINE_LAMBDA_INLINE {
    _tile_loadd(4, from, a_bytes);
    if (kTwoRows) _tile_loadd(5, from + 16 * a_row, a_bytes);
  };
  const auto load_b = [&](const float* from) FLASH_ONLINE_LAMBDA_INLINE {
    _tile_loadd(6, from, b_bytes);
    if (kTwoColumns) _tile_loadd(7, from + kVector * kDigits, b_bytes);
  };
  const auto multiply = [&]() FLASH_ONLINE_LAMBDA_INLINE {
    _tile_dpbf16ps(0, 4, 6);
    if (kTwoColumns) _tile_dpbf16ps(1, 4, 7);
    if (kTwoRows) _tile_dpbf16ps(2, 5, 6);
    if (kTwoRows && kTwoColumns) _tile_dpbf16ps(3, 5, 7);
  };
  for (int64_t k = 0; k < words; k += kVector) {
    const float *a_words = a + k * kDigits, *b_words = b + k * b_row;
    load_a(a_words);
    load_b(b_words);
    multiply();
    if constexpr (kDigits == 2) {
      load_b(b_words + kVector);
      multiply();
      load_a(a_words + kVector);
      multiply();
      load_b(b_words);
      multiply();
    }
  }
  _tile_stored(0, c, c_bytes);
  if (kTwoColumns) _tile_stored(1, c + 16, c_bytes);
  if (kTwoRows) _tile_stored(2, c1, c_bytes);
  if (kTwoRows && kTwoColumns) _tile_stored(3, c1 + 16, c_bytes);
}

// Rows and columns are multiples of 16.
template <int kDigits>
inline void matmul_in_amx_tiles(bool add, int64_t rows, int64_t columns, int64_t words, const float* a, int64_t a_row,
                                const float* b, int64_t b_row, float* c, int64_t c_row) {
  for (int64_t j = 0; j < columns; j += 32)
    for (int64_t i = 0; i < rows; i += 32) {
      const auto block = [&]<bool kTwoRows, bool kTwoColumns>() FLASH_ONLINE_LAMBDA_INLINE {
        multiply_amx_block<kDigits, kTwoRows, kTwoColumns>(add, words, a + i * a_row, a_row, b + j * kDigits, b_row,
                                                           c + i * c_row + j, c_row);
      };
      const bool two_rows = i + 16 < rows;
      if (j + 16 < columns)
        two_rows ? block.template operator()<true, true>() : block.template operator()<false, true>();
      else
        two_rows ? block.template operator()<true, false>() : block.template operator()<false, false>();
    }
}

#else

struct AmxTiles {
  AmxTiles() {}
};

#endif

// Computes c[rows, columns] from a b, see Accumulate. a has any strides, but a_column is 1 if the operands are paired. Rows of
// b and c are contiguous; b_row counts elements or, if paired, pairs. `columns` is padded(); rows and depth are multiples of
// kRowStep and kDepthStep.
template <class F, class A>
FLASH_ONLINE_INLINE void matmul(Accumulate mode, int64_t rows, int64_t columns, int64_t depth, const F* a, int64_t a_row,
                                int64_t a_column, const F* b, int64_t b_row, A* c, int64_t c_row, const A* factor = nullptr) {
  constexpr int64_t pair = kPaired<F> ? 2 : 1;
  const Word<F>*a_words = reinterpret_cast<const Word<F>*>(a), *b_words = reinterpret_cast<const Word<F>*>(b);
  const int64_t words = depth / pair;
  // A row of pairs has a word for each digit of its numbers.
  if (kPaired<F>) a_row = a_row * kBf16Digits<F> / 2, b_row *= kBf16Digits<F>;
#if defined(__AMX_BF16__)
  if constexpr (kPaired<F>) {
    if (mode == Accumulate::kRescaleAndAdd)
      for (int64_t j = 0; j < columns; j += kLanes<A>) {
        const Vector<A> scale = load_vector(factor + j);
        for (int64_t i = 0; i < rows; ++i) store_vector(c + i * c_row + j, load_vector(c + i * c_row + j) * scale);
      }
    return matmul_in_amx_tiles<kBf16Digits<F>>(mode != Accumulate::kOverwrite, rows, columns, words, a_words, a_row, b_words,
                                               b_row, c, c_row);
  }
#endif
  constexpr int kStripVectors = kVectorBytes == 64 ? 4 : 2;
  for (int64_t done = 0; done == 0 || done < words; done += kMaxTerms<F>) {
    const int64_t terms = std::min(words - done, kMaxTerms<F>);
    int64_t j = 0;
    for (; j + kStripVectors * kLanes<A> <= columns; j += kStripVectors * kLanes<A>)
      matmul_strip<kStripVectors, F, A>(mode, rows, terms, a_words, a_row, a_column, b_words + j, b_row, c + j, c_row,
                                        factor + j);
    for (; j < columns; j += kLanes<A>)
      matmul_strip<1, F, A>(mode, rows, terms, a_words, a_row, a_column, b_words + j, b_row, c + j, c_row, factor + j);
    mode = Accumulate::kAdd, a_words += terms * a_column, b_words += terms * b_row;
  }
}

}  // namespace flash_online::cpu::FLASH_ONLINE_ISA
