// A warp's fragments of a matrix product: which lane holds which element, for 16-bit elements and for floats in bf16 digits.
#pragma once

#include "../hw/matrix_copy.cuh"
#include "../hw/mma.cuh"
#include "../hw/vector.cuh"
#include "shared_tile.cuh"

namespace flash_online::cuda {

// A warp's m x n accumulator, [m / 16][n / 8]: its element e of a lane is that of hw/mma.cuh.
template <int kRows, int kColumns, class T = float>
using Accumulator = T[kRows][kColumns][4];

template <int kRows, int kColumns, class T>
__device__ __forceinline__ void clear(Accumulator<kRows, kColumns, T>& d) {
#pragma unroll
  for (int i = 0; i < kRows; ++i)
#pragma unroll
    for (int j = 0; j < kColumns; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) d[i][j][e] = 0;
}

template <int kRows, int kColumns, class T, class F>
__device__ __forceinline__ void for_each(Accumulator<kRows, kColumns, T>& d, F&& f) {
#pragma unroll
  for (int i = 0; i < kRows; ++i)
#pragma unroll
    for (int j = 0; j < kColumns; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) f(d[i][j][e], i, j, e);
}

__device__ __forceinline__ int lane() { return static_cast<int>(threadIdx.x) % 32; }
__device__ __forceinline__ int quad() { return lane() / 4; }
__device__ __forceinline__ int lane_in_quad() { return lane() % 4; }

// The transpose of a quad's 4 x 4 words: lane p of the quad gets word p of all four lanes, in the order of the lanes.
__device__ __forceinline__ void transpose_quad(unsigned (&x)[4], int lane = lane_in_quad()) {
#pragma unroll
  for (int step = 2; step > 0; step /= 2) {
    const bool upper = lane & step;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i & step) continue;
      const unsigned other = __shfl_xor_sync(~0u, upper ? x[i] : x[i + step], step);
      (upper ? x[i] : x[i + step]) = other;
    }
  }
}

// The operands of a product a b as mma.sync takes them. A function is named by how the operand lies in memory: "rows" if the
// dimension that is summed over runs along a row.
//   left:  rows [m][k], columns [k][m]      right: rows [n][k], columns [k][n]
// A left fragment has sixteen rows, a right one eight columns; each has kDepth terms of the sum.
template <class Element>
struct Fragments {
  using Digit = typename Digits<Element>::Digit;
  static constexpr int kDigits = Digits<Element>::kDigits;
  static constexpr int kDepth = 16;

  struct Left {
    unsigned words[kDigits][4];
  };
  struct Right {
    unsigned words[kDigits][2];
  };

  template <int kWidth>
  __device__ static void left_rows(Left& a, SharedTile<Element, kWidth> tile, int m, int k) {
#pragma unroll
    for (int digit = 0; digit < kDigits; ++digit)
      ldmatrix_x4(a.words[digit], tile.address(m + lane() % 16, k + lane() / 16 * 8, digit));
  }
  template <int kWidth>
  __device__ static void left_columns(Left& a, SharedTile<Element, kWidth> tile, int m, int k) {
#pragma unroll
    for (int digit = 0; digit < kDigits; ++digit)
      ldmatrix_x4_trans(a.words[digit], tile.address(k + lane() % 8 + lane() / 16 * 8, m + lane() / 8 % 2 * 8, digit));
  }
  // kCount neighbouring fragments of eight columns.
  template <int kCount, int kWidth>
  __device__ static void right_rows(Right (&b)[kCount], SharedTile<Element, kWidth> tile, int n, int k) {
#pragma unroll
    for (int j = 0; j < kCount; j += 2)
#pragma unroll
      for (int digit = 0; digit < kDigits; ++digit) {
        unsigned x[4];
        const int row = n + 8 * j + (kCount > 1 ? lane() / 16 * 8 : 0) + lane() % 8;
        ldmatrix_x4(x, tile.address(row, k + lane() / 8 % 2 * 8, digit));
        put(b, j, digit, x);
      }
  }
  template <int kCount, int kWidth>
  __device__ static void right_columns(Right (&b)[kCount], SharedTile<Element, kWidth> tile, int n, int k) {
    static_assert(kCount % 2 == 0);
#pragma unroll
    for (int j = 0; j < kCount; j += 2)
#pragma unroll
      for (int digit = 0; digit < kDigits; ++digit) {
        unsigned x[4];
        ldmatrix_x4_trans(x, tile.address(k + lane() % 16, n + 8 * j + lane() / 16 * 8, digit));
        put(b, j, digit, x);
      }
  }

  // Two elements in a word, the first in the lower half.
  __device__ static unsigned pair(float x, float y) { return pair_of<Digit>(x, y); }
  // The digits of two numbers. What is left of a number once a digit is taken away is exact; of an infinity it is NaN.
  __device__ static void to_digits(unsigned (&words)[kDigits], float x, float y) {
#pragma unroll
    for (int digit = 0; digit < kDigits; ++digit) {
      words[digit] = pair(x, y);
      if (digit + 1 < kDigits) x -= __uint_as_float(words[digit] << 16), y -= __uint_as_float(words[digit] & 0xffff0000u);
    }
  }

 private:
  template <int kCount>
  __device__ static void put(Right (&b)[kCount], int j, int digit, const unsigned (&x)[4]) {
    b[j].words[digit][0] = x[0], b[j].words[digit][1] = x[1];
    if (kCount > 1) b[j + 1].words[digit][0] = x[2], b[j + 1].words[digit][1] = x[3];
  }
};

// Accumulators rounded to elements, in registers: the left operand of another product, and what is stored to shared memory.
template <class Element, int kRows, int kColumns>
struct LeftOperand {
  using F = Fragments<Element>;
  unsigned words[kRows][kColumns][2][F::kDigits];  // of the rows quad() and quad() + 8

  __device__ __forceinline__ explicit LeftOperand(const Accumulator<kRows, kColumns>& d) {
#pragma unroll
    for (int i = 0; i < kRows; ++i)
#pragma unroll
      for (int j = 0; j < kColumns; ++j)
#pragma unroll
        for (int half = 0; half < 2; ++half) F::to_digits(words[i][j][half], d[i][j][2 * half], d[i][j][2 * half + 1]);
  }
  // The fragment of the i-th sixteen rows, F::kDepth columns from step * F::kDepth on.
  __device__ __forceinline__ void fragment(typename F::Left& a, int i, int step) const {
#pragma unroll
    for (int digit = 0; digit < F::kDigits; ++digit)
#pragma unroll
      for (int n = 0; n < 4; ++n) a.words[digit][n] = words[i][2 * step + n / 2][n % 2][digit];
  }
  // Stores to a tile, rows from `row` and columns from `column` on.
  template <int kWidth>
  __device__ __forceinline__ void store(SharedTile<Element, kWidth> to, int row, int column) const {
#pragma unroll
    for (int i = 0; i < kRows; ++i)
#pragma unroll
      for (int j = 0; j < kColumns; ++j)
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
          for (int digit = 0; digit < F::kDigits; ++digit)
            *reinterpret_cast<unsigned*>(to.row(row + 16 * i + 8 * half + quad(), digit) + column + 8 * j +
                                         2 * lane_in_quad()) = words[i][j][half][digit];
  }
};

}  // namespace flash_online::cuda
