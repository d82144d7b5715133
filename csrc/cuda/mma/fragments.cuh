// Products of tiles in shared memory, a warp at a time: which lane holds which element, for 16-bit and for float elements.
//
// float runs on the tensor cores too, with the digits of float: x = x0 + x1 + x2, each a bfloat16, which has a third of float's
// digits and all of its range. Of the nine products of two such numbers the six largest are made; the rest is 2^-25 of the
// whole. Where a caller allows fewer digits, two pieces and three products: the rest is 2^-16. Numbers are split once, on their
// way into shared memory.
#pragma once

#include "../hw/mma.cuh"
#include "../hw/vector.cuh"

namespace flash_online::cuda {

// A float of which 16 of 24 digits are worked with.
struct Bf16x2Float {
  float value;
};

// As what an element is kept in shared memory, and how many of them.
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
// Bytes of an element in shared memory: what tiles are chosen by.
template <class Element>
constexpr int kSplitBytes = Split<Element>::kPieces * static_cast<int>(sizeof(typename Split<Element>::Piece));

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

template <int kRows, int kColumns, class F>
__device__ __forceinline__ void for_each(Accumulator<kRows, kColumns>& d, F&& f) {
#pragma unroll
  for (int i = 0; i < kRows; ++i)
#pragma unroll
    for (int j = 0; j < kColumns; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) f(d[i][j][e], i, j, e);
}

// Rows of `kWidth` elements in shared memory, each in its pieces one after the other, a piece 16 bytes longer than its data:
// eight rows' 16 bytes at one column lie in different banks.
template <class Element, int kWidth>
struct SharedTile {
  using Piece = typename Split<Element>::Piece;
  static constexpr int kPieces = Split<Element>::kPieces;
  static constexpr int kPiecePitch = kWidth + 8, kPitch = kPieces * kPiecePitch;  // in pieces' elements
  static constexpr int bytes(int rows) { return rows * kPitch * static_cast<int>(sizeof(Piece)); }
  static_assert(sizeof(Piece) == 2 && kWidth % 16 == 0);

  Piece* data;

  __device__ __forceinline__ Piece* row(int r, int piece = 0) const { return data + r * kPitch + piece * kPiecePitch; }
  __device__ __forceinline__ unsigned address(int row, int column, int piece = 0) const {
    return shared_address(data) + static_cast<unsigned>((row * kPitch + piece * kPiecePitch + column) * sizeof(Piece));
  }
  // The same memory from there on.
  __device__ __forceinline__ SharedTile from(int row, int column) const { return {data + row * kPitch + column}; }
  // A row's memory for whole elements.
  __device__ __forceinline__ Element* elements(int r) const { return reinterpret_cast<Element*>(row(r)); }
};

__device__ __forceinline__ int lane() { return static_cast<int>(threadIdx.x) % 32; }
__device__ __forceinline__ int quad() { return lane() / 4; }
__device__ __forceinline__ int lane_in_quad() { return lane() % 4; }

// Of four lanes of a group: the lane of place p gets the words number p of all four, in the order of their places.
__device__ __forceinline__ void transpose_quad(unsigned (&x)[4]) {
#pragma unroll
  for (int step = 2; step > 0; step /= 2) {
    const bool upper = lane_in_quad() & step;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i & step) continue;
      const unsigned other = __shfl_xor_sync(~0u, upper ? x[i] : x[i + step], step);
      (upper ? x[i] : x[i + step]) = other;
    }
  }
}

// How the operands of a product a b lie: "rows" if the dimension that is summed over runs along a row in memory.
//   left:  rows [m][k], columns [k][m]      right: rows [n][k], columns [k][n]
// Left fragments are sixteen rows, right ones eight columns; both of kDepth terms of the sum.
template <class Element>
struct Fragments {
  using Piece = typename Split<Element>::Piece;
  static constexpr int kPieces = Split<Element>::kPieces;
  static constexpr int kDepth = 16;

  struct Left {
    unsigned words[kPieces][4];
  };
  struct Right {
    unsigned words[kPieces][2];
  };

  template <int kWidth>
  __device__ static void left_rows(Left& a, SharedTile<Element, kWidth> tile, int m, int k) {
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece)
      ldmatrix_x4(a.words[piece], tile.address(m + lane() % 16, k + lane() / 16 * 8, piece));
  }
  template <int kWidth>
  __device__ static void left_columns(Left& a, SharedTile<Element, kWidth> tile, int m, int k) {
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece)
      ldmatrix_x4_trans(a.words[piece], tile.address(k + lane() % 8 + lane() / 16 * 8, m + lane() / 8 % 2 * 8, piece));
  }
  // Neighbouring blocks of eight columns.
  template <int kCount, int kWidth>
  __device__ static void right_rows(Right (&b)[kCount], SharedTile<Element, kWidth> tile, int n, int k) {
#pragma unroll
    for (int j = 0; j < kCount; j += 2)
#pragma unroll
      for (int piece = 0; piece < kPieces; ++piece) {
        unsigned x[4];
        const int row = n + 8 * j + (kCount > 1 ? lane() / 16 * 8 : 0) + lane() % 8;
        ldmatrix_x4(x, tile.address(row, k + lane() / 8 % 2 * 8, piece));
        put(b, j, piece, x);
      }
  }
  template <int kCount, int kWidth>
  __device__ static void right_columns(Right (&b)[kCount], SharedTile<Element, kWidth> tile, int n, int k) {
    static_assert(kCount % 2 == 0);
#pragma unroll
    for (int j = 0; j < kCount; j += 2)
#pragma unroll
      for (int piece = 0; piece < kPieces; ++piece) {
        unsigned x[4];
        ldmatrix_x4_trans(x, tile.address(k + lane() % 16, n + 8 * j + lane() / 16 * 8, piece));
        put(b, j, piece, x);
      }
  }

  // Two elements in a word, the first in its lower half.
  __device__ static unsigned pair(float x, float y) {
    if constexpr (std::is_same_v<Piece, __half>) {
      const __half2 both = __floats2half2_rn(x, y);
      return reinterpret_cast<const unsigned&>(both);
    } else {
      const __nv_bfloat162 both = __floats2bfloat162_rn(x, y);
      return reinterpret_cast<const unsigned&>(both);
    }
  }
  // Their pieces. What is left of a number once a piece is taken away is exact; of an infinity it is NaN.
  __device__ static void split(unsigned (&words)[kPieces], float x, float y) {
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece) {
      words[piece] = pair(x, y);
      if (piece + 1 < kPieces) x -= __uint_as_float(words[piece] << 16), y -= __uint_as_float(words[piece] & 0xffff0000u);
    }
  }

 private:
  template <int kCount>
  __device__ static void put(Right (&b)[kCount], int j, int piece, const unsigned (&x)[4]) {
    b[j].words[piece][0] = x[0], b[j].words[piece][1] = x[1];
    if (kCount > 1) b[j + 1].words[piece][0] = x[2], b[j + 1].words[piece][1] = x[3];
  }
};

// One step of products of 16-bit elements, for kCount columns from `column` on.
template <class Element, int kRows, int kColumns, int kCount>
__device__ __forceinline__ void multiply(Accumulator<kRows, kColumns>& d, const typename Fragments<Element>::Left (&a)[kRows],
                                         const typename Fragments<Element>::Right (&b)[kCount], int column) {
#pragma unroll
  for (int i = 0; i < kRows; ++i)
#pragma unroll
    for (int j = 0; j < kCount; ++j) mma_16x8x16<Element>(d[i][column + j], a[i].words[0], b[j].words[0][0], b[j].words[0][1]);
}

// Sums of products of floats, kept apart by size: those of the leading pieces are rounded each time that one is added, unless
// fewer digits are asked for; the others are so small that what the tensor cores cut off of their sum does not count.
template <class Element, int kRows, int kColumns>
struct CompensatedAccumulator {
  using F = Fragments<Element>;
  // Whether a result is better left as the sum of the two: rounding it to one float is most of its error.
  static constexpr bool kCompensated = F::kPieces == 3;
  Accumulator<kRows, kColumns> sums;

  __device__ __forceinline__ CompensatedAccumulator() {
    if constexpr (F::kPieces > 1) clear(sums);
  }

  // One step, for kCount columns from `column` of `rest` and from `to` of `leading` on: the same product of all before the
  // next, so that none waits for the one before. With kTurned to the bits that the transposed product has.
  template <bool kTurned = false, int kCount, int kLeading>
  __device__ __forceinline__ void multiply(Accumulator<kRows, kLeading>& leading, int to, const typename F::Left (&a)[kRows],
                                           const typename F::Right (&b)[kCount], int column) {
#pragma unroll
    for (int order = F::kPieces - 1; order >= 0; --order)  // the smallest first
#pragma unroll
      for (int piece = 0; piece <= order; ++piece)
#pragma unroll
        for (int j = 0; j < kCount; ++j)
#pragma unroll
          for (int i = 0; i < kRows; ++i) {
            float (&sum)[4] = order == 0 ? leading[i][to + j] : sums[i][column + j];
            const int left = kTurned ? order - piece : piece;
            const unsigned (&words)[2] = b[j].words[order - left];
            if (order == 0 && F::kPieces == 3)
              mma_16x8x16_rounded(sum, a[i].words[left], words[0], words[1]);
            else
              mma_16x8x16<typename F::Piece>(sum, a[i].words[left], words[0], words[1]);
          }
  }
};

// An infinity or NaN among the operands has made the products of the leading pieces what they must be, and NaN of the others.
__device__ __forceinline__ float add_if_finite(float leading, float rest) {
  return fabsf(leading) < INFINITY ? leading + rest : leading;
}

// d[m][n] += sum over k of left[m][k] right[n][k], for 16 * kRows rows from m on, all of d's columns from row 0 of `right` on;
// of floats the sums apart, which are d's in the end (add_rest). How k is cut up among calls changes no bit of them.
// With kRounded 16-bit elements' sums, too, are cut off by the tensor cores in pairs of steps alone, and rounded.
template <class Element, int kDepthInAll, bool kTurned = false, bool kRounded = false, int kRows, int kColumns, int kWidthLeft,
          int kWidthRight>
__device__ __forceinline__ void multiply_rows_apart(Accumulator<kRows, kColumns>& d,
                                                    CompensatedAccumulator<Element, kRows, kColumns>& rest,
                                                    SharedTile<Element, kWidthLeft> left, int m,
                                                    SharedTile<Element, kWidthRight> right) {
  using F = Fragments<Element>;
  constexpr int kSteps = kDepthInAll / F::kDepth, kCount = kColumns == 1 ? 1 : 2;
  static_assert(kColumns % kCount == 0);
  // Calls f(left fragments, right fragments, column) for a step's pieces.
  const auto multiply_step = [&](int step, auto&& f) {
    typename F::Left a[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) F::left_rows(a[i], left, m + 16 * i, step * F::kDepth);
#pragma unroll
    for (int j = 0; j < kColumns; j += kCount) {
      typename F::Right b[kCount];
      F::right_rows(b, right, 8 * j, step * F::kDepth);
      f(a, b, j);
    }
  };
  if constexpr (F::kPieces == 1 && kRounded) {
    static_assert(kSteps % 2 == 0);
#pragma unroll 2
    for (int step = 0; step < kSteps; step += 2) {
      typename F::Left a[2][kRows];
#pragma unroll
      for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int i = 0; i < kRows; ++i) F::left_rows(a[n][i], left, m + 16 * i, (step + n) * F::kDepth);
#pragma unroll
      for (int j = 0; j < kColumns; j += kCount) {
        Accumulator<kRows, kCount> part;
        clear(part);
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          typename F::Right b[kCount];
          F::right_rows(b, right, 8 * j, (step + n) * F::kDepth);
          multiply<Element>(part, a[n], b, 0);
        }
        for_each(part, [&](float x, int i, int column, int e) { d[i][j + column][e] += x; });
      }
    }
  } else if constexpr (F::kPieces == 1) {
#pragma unroll(kSteps > 16 ? 4 : kSteps)
    for (int step = 0; step < kSteps; ++step)
      multiply_step(step, [&](const auto& a, const auto& b, int j) { multiply<Element>(d, a, b, j); });
  } else {
#pragma unroll 1
    for (int step = 0; step < kSteps; ++step)
      multiply_step(step, [&](const auto& a, const auto& b, int j) { rest.template multiply<kTurned>(d, j, a, b, j); });
  }
}

template <class Element, int kRows, int kColumns>
__device__ __forceinline__ void add_rest(Accumulator<kRows, kColumns>& d,
                                         const CompensatedAccumulator<Element, kRows, kColumns>& rest) {
  if constexpr (Fragments<Element>::kPieces > 1)
    for_each(d, [&](float& x, int i, int j, int e) { x = add_if_finite(x, rest.sums[i][j][e]); });
}

// d is the whole result then, unless the rest is kept: see without_infinite and round_to_sum.
template <class Element, int kRows, int kColumns>
__device__ __forceinline__ void add_rest_unless_kept(Accumulator<kRows, kColumns>& d,
                                                     const CompensatedAccumulator<Element, kRows, kColumns>& rest) {
  if constexpr (!CompensatedAccumulator<Element, kRows, kColumns>::kCompensated) add_rest(d, rest);
}
// Leaves no rest where d is not finite.
template <class Element, int kRows, int kColumns>
__device__ __forceinline__ void without_infinite(const Accumulator<kRows, kColumns>& d,
                                                 CompensatedAccumulator<Element, kRows, kColumns>& rest) {
  if constexpr (CompensatedAccumulator<Element, kRows, kColumns>::kCompensated)
    for_each(rest.sums, [&](float& x, int i, int j, int e) { x = fabsf(d[i][j][e]) < INFINITY ? x : 0; });
}
// Makes d the sum rounded to float, and the rest what that leaves, 0 where d is not finite.
template <class Element, int kRows, int kColumns>
__device__ __forceinline__ void round_to_sum(Accumulator<kRows, kColumns>& d,
                                             CompensatedAccumulator<Element, kRows, kColumns>& rest) {
  if constexpr (CompensatedAccumulator<Element, kRows, kColumns>::kCompensated)
    for_each(d, [&](float& x, int i, int j, int e) {
      float& low = rest.sums[i][j][e];
      const bool finite = fabsf(x) < INFINITY;
      const float sum = x + (finite ? low : 0);
      low = finite ? low - (sum - x) : 0;
      x = sum;
    });
}

// All of a product in one call; as add_rest_unless_kept leaves it.
template <class Element, int kDepthInAll, bool kTurned = false, bool kRounded = false, int kRows, int kColumns, int kWidthLeft,
          int kWidthRight>
__device__ __forceinline__ void multiply_rows(Accumulator<kRows, kColumns>& d,
                                              CompensatedAccumulator<Element, kRows, kColumns>& rest,
                                              SharedTile<Element, kWidthLeft> left, int m,
                                              SharedTile<Element, kWidthRight> right) {
  multiply_rows_apart<Element, kDepthInAll, kTurned, kRounded>(d, rest, left, m, right);
  add_rest_unless_kept(d, rest);
}

// Accumulators as elements, in registers: the left operand of another product, and what is stored of them.
template <class Element, int kRows, int kColumns>
struct LeftOperand {
  using F = Fragments<Element>;
  unsigned words[kRows][kColumns][2][F::kPieces];  // of the rows `group` and `group` + 8

  __device__ __forceinline__ explicit LeftOperand(const Accumulator<kRows, kColumns>& d) {
#pragma unroll
    for (int i = 0; i < kRows; ++i)
#pragma unroll
      for (int j = 0; j < kColumns; ++j)
#pragma unroll
        for (int half = 0; half < 2; ++half) F::split(words[i][j][half], d[i][j][2 * half], d[i][j][2 * half + 1]);
  }
  // Sixteen rows, of F::kDepth columns from `step` times as many on.
  __device__ __forceinline__ void fragment(typename F::Left& a, int i, int step) const {
#pragma unroll
    for (int piece = 0; piece < F::kPieces; ++piece)
#pragma unroll
      for (int n = 0; n < 4; ++n) a.words[piece][n] = words[i][2 * step + n / 2][n % 2][piece];
  }
  // Into a tile's rows from `row` on, columns from `column` on.
  template <int kWidth>
  __device__ __forceinline__ void store(SharedTile<Element, kWidth> to, int row, int column) const {
#pragma unroll
    for (int i = 0; i < kRows; ++i)
#pragma unroll
      for (int j = 0; j < kColumns; ++j)
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
          for (int piece = 0; piece < F::kPieces; ++piece)
            *reinterpret_cast<unsigned*>(to.row(row + 16 * i + 8 * half + quad(), piece) + column + 8 * j +
                                         2 * lane_in_quad()) = words[i][j][half][piece];
  }
};

// d[m][n] += sum over k of left[m][k] right[k][n], k up to kSteps * Fragments::kDepth, n from column `n` of `right` on.
// left(a, i, step): the left operand's fragment of its i-th sixteen rows.
template <class Element, int kSteps, int kRows, int kColumns, int kWidth, class Left>
__device__ __forceinline__ void multiply_by_columns(Accumulator<kRows, kColumns>& d, const Left& left,
                                                    SharedTile<Element, kWidth> right, int n) {
  using F = Fragments<Element>;
  static_assert(kColumns % 2 == 0);
  if constexpr (F::kPieces == 1) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      typename F::Left a[kRows];
#pragma unroll
      for (int i = 0; i < kRows; ++i) left(a[i], i, step);
#pragma unroll
      for (int j = 0; j < kColumns; j += 2) {
        typename F::Right b[2];
        F::right_columns(b, right, n + 8 * j, step * F::kDepth);
        multiply<Element>(d, a, b, j);
      }
    }
  } else {
    constexpr int kCount = kColumns % 4 == 0 && kRows == 1 ? 4 : 2;
    // Steps whose sums are added to d at once.
    constexpr int kGroup = kSteps % 4 == 0 ? 4 : kSteps % 3 == 0 ? 3 : kSteps % 2 == 0 ? 2 : 1;
#pragma unroll
    for (int first = 0; first < kSteps; first += kGroup) {
      typename F::Left a[kGroup][kRows];
#pragma unroll
      for (int step = 0; step < kGroup; ++step)
#pragma unroll
        for (int i = 0; i < kRows; ++i) left(a[step][i], i, first + step);
#pragma unroll
      for (int j = 0; j < kColumns; j += kCount) {
        Accumulator<kRows, kCount> leading;
        CompensatedAccumulator<Element, kRows, kCount> rest;
        clear(leading);
#pragma unroll
        for (int step = 0; step < kGroup; ++step) {
          typename F::Right b[kCount];
          F::right_columns(b, right, n + 8 * j, (first + step) * F::kDepth);
          rest.multiply(leading, 0, a[step], b, 0);
        }
        for_each(leading,
                 [&](float x, int i, int column, int e) { d[i][j + column][e] += add_if_finite(x, rest.sums[i][column][e]); });
      }
    }
  }
}

// The same with the left operand in registers, k being its 8 * kLeft columns.
template <class Element, int kRows, int kColumns, int kLeft, int kWidth>
__device__ __forceinline__ void multiply_operand(Accumulator<kRows, kColumns>& d,
                                                 const LeftOperand<Element, kRows, kLeft>& left,
                                                 SharedTile<Element, kWidth> right, int n = 0) {
  using F = Fragments<Element>;
  multiply_by_columns<Element, kLeft * 8 / F::kDepth>(
      d, [&](typename F::Left& a, int i, int step) { left.fragment(a, i, step); }, right, n);
}
template <class Element, int kRows, int kColumns, int kLeft, int kWidth>
__device__ __forceinline__ void multiply_accumulators(Accumulator<kRows, kColumns>& d, const Accumulator<kRows, kLeft>& left,
                                                      SharedTile<Element, kWidth> right, int n = 0) {
  multiply_operand(d, LeftOperand<Element, kRows, kLeft>(left), right, n);
}

// With the left operand's rows in shared memory: 16 * kRows of them from m on, k up to kDepthInAll.
template <class Element, int kDepthInAll, int kRows, int kColumns, int kWidthLeft, int kWidthRight>
__device__ __forceinline__ void multiply_rows_by_columns(Accumulator<kRows, kColumns>& d, SharedTile<Element, kWidthLeft> left,
                                                         int m, SharedTile<Element, kWidthRight> right, int n) {
  using F = Fragments<Element>;
  multiply_by_columns<Element, kDepthInAll / F::kDepth>(
      d, [&](typename F::Left& a, int i, int step) { F::left_rows(a, left, m + 16 * i, step * F::kDepth); }, right, n);
}

// With the left operand's columns there, left[k][m], from m on.
template <class Element, int kDepthInAll, int kRows, int kColumns, int kWidthLeft, int kWidthRight>
__device__ __forceinline__ void multiply_columns(Accumulator<kRows, kColumns>& d, SharedTile<Element, kWidthLeft> left, int m,
                                                 SharedTile<Element, kWidthRight> right, int n) {
  using F = Fragments<Element>;
  multiply_by_columns<Element, kDepthInAll / F::kDepth>(
      d, [&](typename F::Left& a, int i, int step) { F::left_columns(a, left, m + 16 * i, step * F::kDepth); }, right, n);
}

}  // namespace flash_online::cuda
