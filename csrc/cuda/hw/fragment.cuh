// Products of tiles in shared memory, a warp at a time: which lane holds which element, for 16-bit and for float elements.
//
// float runs on the tensor cores too, with the digits of float: x = high + low, each of tf32's digits, and
// a b = high high + high low + low high to some 23 digits ("3xTF32", as cutlass calls it). Tf32 stands for one product alone.
#pragma once

#include "mma.cuh"
#include "vector.cuh"

namespace flash_online::cuda {

struct Tf32 {};  // an element's kind: float in memory, tf32 in products

template <class Kind>
struct ElementOf {
  using type = Kind;
};
template <>
struct ElementOf<Tf32> {
  using type = float;
};

// An m x n accumulator of a warp: [m / 16][n / 8].
template <int kRows, int kColumns>
using Accumulator = float[kRows][kColumns][4];

template <int kRows, int kColumns>
__device__ __forceinline__ void clear(Accumulator<kRows, kColumns>& d) {
#pragma unroll
  for (int i = 0; i < kRows; ++i)
#pragma unroll
    for (int j = 0; j < kColumns; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) d[i][j][e] = 0;
}

// Rows of `kWidth` elements in shared memory, each 16 bytes longer than that: eight rows' 16 bytes at one column lie in
// different banks, and so do a float's words at (2 place, group).
template <class Kind, int kWidth>
struct SharedTile {
  using Element = typename ElementOf<Kind>::type;
  static constexpr int kPitch = kWidth + 16 / static_cast<int>(sizeof(Element));  // elements
  static constexpr int bytes(int rows) { return rows * kPitch * static_cast<int>(sizeof(Element)); }
  static_assert(kWidth * sizeof(Element) % 32 == 0);

  Element* data;

  __device__ __forceinline__ Element* row(int r) const { return data + r * kPitch; }
  __device__ __forceinline__ unsigned address(int row, int column) const {
    return shared_address(data) + static_cast<unsigned>((row * kPitch + column) * sizeof(Element));
  }
};

__device__ __forceinline__ int lane() { return static_cast<int>(threadIdx.x) % 32; }
__device__ __forceinline__ int lane_group() { return lane() / 4; }
__device__ __forceinline__ int lane_place() { return lane() % 4; }

// How the operands of a product a b lie: "rows" if the dimension that is summed over runs along a row in memory.
//   left:  rows [m][k], columns [k][m]      right: rows [n][k], columns [k][n]
template <class Kind>
struct Fragments {
  using Element = typename ElementOf<Kind>::type;
  static constexpr bool kHalf = sizeof(Element) == 2;
  static constexpr int kDepth = kHalf ? 16 : 8;                   // of one step
  static constexpr int kPerChunk = 16 / static_cast<int>(sizeof(Element));

  // Sixteen rows of the left operand.
  template <int kWidth>
  __device__ static void left_rows(unsigned (&a)[4], SharedTile<Kind, kWidth> tile, int m, int k) {
    load_matrices(a, tile.address(m + lane() % 16, k + lane() / 16 * kPerChunk));
  }
  // Of two blocks of eight columns: b[0], b[1] and b[2], b[3].
  template <int kWidth>
  __device__ static void right_rows(unsigned (&b)[4], SharedTile<Kind, kWidth> tile, int n, int k) {
    load_matrices(b, tile.address(n + lane() / 16 * 8 + lane() % 8, k + lane() / 8 % 2 * kPerChunk));
  }
  // Of one block of eight columns: b[0], b[1].
  template <int kWidth>
  __device__ static void right_rows_of_one(unsigned (&b)[4], SharedTile<Kind, kWidth> tile, int n, int k) {
    load_matrices(b, tile.address(n + lane() % 8, k + lane() / 8 % 2 * kPerChunk));
  }
  // Floats cannot be transposed on the way. They take the sum's terms in another order, the same in both operands and in
  // LeftOperand: the hardware's places t and t + 4 are the elements 2 t and 2 t + 1.
  template <int kWidth>
  __device__ static void left_columns(unsigned (&a)[4], SharedTile<Kind, kWidth> tile, int m, int k) {
    if constexpr (kHalf) {
      load_matrices_transposed(a, tile.address(k + lane() % 8 + lane() / 16 * 8, m + lane() / 8 % 2 * 8));
    } else {
      const float *even = tile.row(k + 2 * lane_place()) + m + lane_group(), *odd = even + tile.kPitch;
      a[0] = __float_as_uint(even[0]), a[1] = __float_as_uint(even[8]);
      a[2] = __float_as_uint(odd[0]), a[3] = __float_as_uint(odd[8]);
    }
  }
  // Sixteen rows of the left operand in that order: for a right operand of columns.
  template <int kWidth>
  __device__ static void left_rows_for_columns(unsigned (&a)[4], SharedTile<Kind, kWidth> tile, int m, int k) {
    if constexpr (kHalf) {
      left_rows(a, tile, m, k);
    } else {
      const float2 upper = *reinterpret_cast<const float2*>(tile.row(m + lane_group()) + k + 2 * lane_place()),
                   lower = *reinterpret_cast<const float2*>(tile.row(m + 8 + lane_group()) + k + 2 * lane_place());
      a[0] = __float_as_uint(upper.x), a[1] = __float_as_uint(lower.x);
      a[2] = __float_as_uint(upper.y), a[3] = __float_as_uint(lower.y);
    }
  }
  template <int kWidth>
  __device__ static void right_columns(unsigned (&b)[4], SharedTile<Kind, kWidth> tile, int n, int k) {
    if constexpr (kHalf) {
      load_matrices_transposed(b, tile.address(k + lane() % 16, n + lane() / 16 * 8));
    } else {
      const float *even = tile.row(k + 2 * lane_place()) + n + lane_group(), *odd = even + tile.kPitch;
      b[0] = __float_as_uint(even[0]), b[1] = __float_as_uint(odd[0]);
      b[2] = __float_as_uint(even[8]), b[3] = __float_as_uint(odd[8]);
    }
  }
  __device__ static unsigned pair(float x, float y) {
    if constexpr (std::is_same_v<Element, __half>) {
      const __half2 both = __floats2half2_rn(x, y);
      return reinterpret_cast<const unsigned&>(both);
    } else {
      const __nv_bfloat162 both = __floats2bfloat162_rn(x, y);
      return reinterpret_cast<const unsigned&>(both);
    }
  }

  // d += a b, one step.
  __device__ static void multiply(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    if constexpr (kHalf) {
      mma_16x8x16<Element>(d, a, b0, b1);
    } else if constexpr (std::is_same_v<Kind, Tf32>) {
      mma_16x8x8_tf32(d, a, b0, b1);
    } else {
      // The tensor cores cut off what a sum does not hold, instead of rounding it: long sums are the adders'.
      const Split x0(a[0]), x1(a[1]), x2(a[2]), x3(a[3]), y0(b0), y1(b1);
      const unsigned high[4] = {x0.high, x1.high, x2.high, x3.high}, low[4] = {x0.low, x1.low, x2.low, x3.low};
      float part[4];
      set_mma_16x8x8_tf32(part, low, y0.high, y1.high);
      mma_16x8x8_tf32(part, high, y0.low, y1.low);
      mma_16x8x8_tf32(part, high, y0.high, y1.high);
#pragma unroll
      for (int e = 0; e < 4; ++e) d[e] += part[e];
    }
  }

 private:
  // A float as two numbers of tf32, of which the tensor cores read the first 19 bits: the nearest one (half a unit is added to
  // what they read), and what is left. An infinity or NaN leaves nothing.
  struct Split {
    unsigned high, low;
    __device__ explicit Split(unsigned x) {
      const unsigned nearest = x + 0x1000u;
      const float rest = __uint_as_float(x) - __uint_as_float(nearest & 0xffffe000u);
      const bool finite = rest == rest;
      high = finite ? nearest : x;
      low = finite ? __float_as_uint(rest) : 0u;
    }
  };
};

// d[m][n] += sum over k of left[m][k] right[n][k], for 16 * kRows rows from m on, all of d's columns from row 0 of `right` on.
template <class Kind, int kDepthInAll, int kRows, int kColumns, int kWidthLeft, int kWidthRight>
__device__ __forceinline__ void multiply_rows(Accumulator<kRows, kColumns>& d, SharedTile<Kind, kWidthLeft> left, int m,
                                              SharedTile<Kind, kWidthRight> right) {
  using F = Fragments<Kind>;
#pragma unroll(kDepthInAll / F::kDepth > 16 ? 4 : kDepthInAll / F::kDepth)
  for (int k = 0; k < kDepthInAll; k += F::kDepth) {
    unsigned a[kRows][4];
#pragma unroll
    for (int i = 0; i < kRows; ++i) F::left_rows(a[i], left, m + 16 * i, k);
#pragma unroll
    for (int j = 0; j < kColumns; j += 2) {
      unsigned b[4];
      if (j + 1 < kColumns)
        F::right_rows(b, right, 8 * j, k);
      else
        F::right_rows_of_one(b, right, 8 * j, k);
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        F::multiply(d[i][j], a[i], b[0], b[1]);
        if (j + 1 < kColumns) F::multiply(d[i][j + 1], a[i], b[2], b[3]);
      }
    }
  }
}

// Accumulators as elements, in registers: the left operand of another product, and what is stored of them.
template <class Kind, int kRows, int kColumns>
struct LeftOperand {
  using F = Fragments<Kind>;
  static constexpr int kWords = F::kHalf ? 2 : 4;
  unsigned words[kRows][kColumns][kWords];

  __device__ __forceinline__ explicit LeftOperand(const Accumulator<kRows, kColumns>& d) {
#pragma unroll
    for (int i = 0; i < kRows; ++i)
#pragma unroll
      for (int j = 0; j < kColumns; ++j)
#pragma unroll
        for (int w = 0; w < kWords; ++w) {
          if constexpr (F::kHalf)
            words[i][j][w] = F::pair(d[i][j][2 * w], d[i][j][2 * w + 1]);
          else
            words[i][j][w] = __float_as_uint(d[i][j][w]);
        }
  }
  // Sixteen rows, of F::kDepth columns from `step` times as many on.
  __device__ __forceinline__ void fragment(unsigned (&a)[4], int i, int step) const {
    if constexpr (F::kHalf) {
      const unsigned (&first)[kWords] = words[i][2 * step], (&second)[kWords] = words[i][2 * step + 1];
      a[0] = first[0], a[1] = first[1], a[2] = second[0], a[3] = second[1];
    } else {
      const unsigned (&x)[kWords] = words[i][step];
      a[0] = x[0], a[1] = x[2], a[2] = x[1], a[3] = x[3];
    }
  }
  // Into a tile's rows from `row` on, columns from `column` on.
  template <int kWidth>
  __device__ __forceinline__ void store(SharedTile<Kind, kWidth> to, int row, int column) const {
#pragma unroll
    for (int i = 0; i < kRows; ++i)
#pragma unroll
      for (int j = 0; j < kColumns; ++j)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          void* const at = to.row(row + 16 * i + 8 * half + lane_group()) + column + 8 * j + 2 * lane_place();
          if constexpr (F::kHalf)
            *static_cast<unsigned*>(at) = words[i][j][half];
          else
            *static_cast<uint2*>(at) = make_uint2(words[i][j][2 * half], words[i][j][2 * half + 1]);
        }
  }
};

// d[m][n] += sum over k of left[m][k] right[k][n], k being left's 8 * kLeft columns; n from column `n` of `right` on.
template <class Kind, int kRows, int kColumns, int kLeft, int kWidth>
__device__ __forceinline__ void multiply_operand(Accumulator<kRows, kColumns>& d, const LeftOperand<Kind, kRows, kLeft>& left,
                                                 SharedTile<Kind, kWidth> right, int n = 0) {
  using F = Fragments<Kind>;
  static_assert(kColumns % 2 == 0);
#pragma unroll
  for (int step = 0; step < kLeft * 8 / F::kDepth; ++step) {
    unsigned a[kRows][4];
#pragma unroll
    for (int i = 0; i < kRows; ++i) left.fragment(a[i], i, step);
#pragma unroll
    for (int j = 0; j < kColumns; j += 2) {
      unsigned b[4];
      F::right_columns(b, right, n + 8 * j, step * F::kDepth);
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        F::multiply(d[i][j], a[i], b[0], b[1]);
        F::multiply(d[i][j + 1], a[i], b[2], b[3]);
      }
    }
  }
}
template <class Kind, int kRows, int kColumns, int kLeft, int kWidth>
__device__ __forceinline__ void multiply_accumulators(Accumulator<kRows, kColumns>& d, const Accumulator<kRows, kLeft>& left,
                                                      SharedTile<Kind, kWidth> right, int n = 0) {
  multiply_operand(d, LeftOperand<Kind, kRows, kLeft>(left), right, n);
}

// The same with the left operand's rows in shared memory: 16 * kRows of them from m on, k up to kDepthInAll.
template <class Kind, int kDepthInAll, int kRows, int kColumns, int kWidthLeft, int kWidthRight>
__device__ __forceinline__ void multiply_rows_by_columns(Accumulator<kRows, kColumns>& d, SharedTile<Kind, kWidthLeft> left,
                                                         int m, SharedTile<Kind, kWidthRight> right, int n) {
  using F = Fragments<Kind>;
  static_assert(kColumns % 2 == 0);
#pragma unroll
  for (int k = 0; k < kDepthInAll; k += F::kDepth) {
    unsigned a[kRows][4];
#pragma unroll
    for (int i = 0; i < kRows; ++i) F::left_rows_for_columns(a[i], left, m + 16 * i, k);
#pragma unroll
    for (int j = 0; j < kColumns; j += 2) {
      unsigned b[4];
      F::right_columns(b, right, n + 8 * j, k);
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        F::multiply(d[i][j], a[i], b[0], b[1]);
        F::multiply(d[i][j + 1], a[i], b[2], b[3]);
      }
    }
  }
}

// d[m][n] += sum over k of left[k][m] right[k][n], for 16 * kRows columns of `left` from m on, n from column `n` of `right` on.
template <class Kind, int kDepthInAll, int kRows, int kColumns, int kWidthLeft, int kWidthRight>
__device__ __forceinline__ void multiply_columns(Accumulator<kRows, kColumns>& d, SharedTile<Kind, kWidthLeft> left, int m,
                                                 SharedTile<Kind, kWidthRight> right, int n) {
  using F = Fragments<Kind>;
  static_assert(kColumns % 2 == 0);
#pragma unroll
  for (int k = 0; k < kDepthInAll; k += F::kDepth) {
    unsigned a[kRows][4];
#pragma unroll
    for (int i = 0; i < kRows; ++i) F::left_columns(a[i], left, m + 16 * i, k);
#pragma unroll
    for (int j = 0; j < kColumns; j += 2) {
      unsigned b[4];
      F::right_columns(b, right, n + 8 * j, k);
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        F::multiply(d[i][j], a[i], b[0], b[1]);
        F::multiply(d[i][j + 1], a[i], b[2], b[3]);
      }
    }
  }
}

}  // namespace flash_online::cuda
