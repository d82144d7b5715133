// Copies between tensors of any strides and the operands of matmuls: rows, transposed rows (queries in the lanes), and pairs.
#pragma once

#include <algorithm>
#include <utility>

#include "matmul.h"

namespace flash_online::cpu::FLASH_ONLINE_ISA {

// A matrix in memory, with strides in elements.
template <class E>
struct Matrix {
  E* data;
  int64_t row_stride, column_stride;
};

// The rows of one head of a tensor, from row `first` on.
template <class E, class Pointer>
auto matrix_of(const View4<Pointer>& view, int64_t batch, int64_t head, int64_t first) {
  using Element = std::conditional_t<std::is_const_v<std::remove_pointer_t<Pointer>>, const E, E>;
  return Matrix<Element>{
      static_cast<Element*>(view.data) + batch * view.stride[0] + head * view.stride[1] + first * view.stride[2],
      view.stride[2], view.stride[3]};
}

// Transposes a square of vectors. Each step interleaves the rows of the two halves, which moves the highest bit of an element's
// column into the lowest bit of its row, and the highest bit of its row into the lowest of its column. After one step per bit,
// row and column have changed places.
template <class T, size_t... Lane>
FLASH_ONLINE_INLINE void transpose(Vector<T> (&row)[kLanes<T>], std::index_sequence<Lane...>) {
  constexpr int n = kLanes<T>;
  for (int bit = 1; bit < n; bit *= 2) {
    Vector<T> next[n];
    for (int i = 0; i < n / 2; ++i) {
      next[2 * i] = __builtin_shufflevector(row[i], row[i + n / 2], (Lane / 2 + Lane % 2 * n)...);
      next[2 * i + 1] = __builtin_shufflevector(row[i], row[i + n / 2], (Lane / 2 + Lane % 2 * n + n / 2)...);
    }
    for (int i = 0; i < n; ++i) row[i] = next[i];
  }
}
template <class T>
FLASH_ONLINE_INLINE void transpose(Vector<T> (&row)[kLanes<T>]) {
  transpose<T>(row, std::make_index_sequence<kLanes<T>>());
}

// Writes the transpose of a matrix, widened, to to[columns, pitch]. Rows beyond the matrix, up to padded(rows), become 0.
template <class E, class A>
__attribute__((noinline)) void load_transposed(Matrix<const E> from, int64_t rows, int64_t columns, A* to, int64_t pitch) {
  constexpr int n = kLanes<A>;
  for (int64_t r = 0; r < padded(rows); r += n) {
    int64_t c = 0;
    if constexpr (std::is_same_v<A, Accumulator<E>>) {
      if (r + n <= rows && from.column_stride == 1)
        for (; c + n <= columns; c += n) {
          Vector<A> square[n];
          for (int i = 0; i < n; ++i) square[i] = load_widened(from.data + (r + i) * from.row_stride + c);
          transpose<A>(square);
          for (int i = 0; i < n; ++i) store_vector(to + (c + i) * pitch + r, square[i]);
        }
    }
    for (int i = 0; i < n; ++i)
      for (int64_t column = c; column < columns; ++column)
        to[column * pitch + r + i] =
            r + i < rows ? static_cast<A>(widen(from.data[(r + i) * from.row_stride + column * from.column_stride])) : A(0);
  }
}

// Writes the transpose of from[columns, pitch] to a matrix, narrowed; row i of the matrix is multiplied by scale[i].
template <class E, class A>
__attribute__((noinline)) void store_transposed(const A* from, int64_t pitch, const A* scale, int64_t rows, int64_t columns,
                                                Matrix<E> to) {
  constexpr int n = kLanes<A>;
  for (int64_t r = 0; r < rows; r += n) {
    const Vector<A> scales = load_vector(scale + r);
    int64_t c = 0;
    if (r + n <= rows && to.column_stride == 1)
      for (; c + n <= columns; c += n) {
        Vector<A> square[n];
        for (int i = 0; i < n; ++i) square[i] = load_vector(from + (c + i) * pitch + r) * scales;
        transpose<A>(square);
        for (int i = 0; i < n; ++i) store_narrowed(to.data + (r + i) * to.row_stride + c, square[i]);
      }
    for (int64_t i = r; i < std::min<int64_t>(r + n, rows); ++i)
      for (int64_t column = c; column < columns; ++column)
        to.data[i * to.row_stride + column * to.column_stride] = narrow<E>(from[column * pitch + i] * scale[i]);
  }
}

// Joins the upper halves of two vectors in the words of one: neighbours in a column become a pair.
FLASH_ONLINE_INLINE Vector<uint32_t> join_upper_halves(Vector<float> first, Vector<float> second) {
  return reinterpret_cast<Vector<uint32_t>>(first) >> 16 | (reinterpret_cast<Vector<uint32_t>>(second) & 0xffff0000u);
}

// The two bf16 digits of a number. Each is a float with a lower half that is 0 or ignored; Bf16x2Float16 gives the sign of the
// second.
struct Bf16x2Vector {
  Vector<float> first, second;
};
FLASH_ONLINE_INLINE Vector<float> first_digit(Vector<float> x) {
  return reinterpret_cast<Vector<float>>(reinterpret_cast<Vector<uint32_t>>(x) & 0xffff0000u);
}
// The digits of a number of at most 16 bits, without rounding.
FLASH_ONLINE_INLINE Bf16x2Vector bf16x2_exactly(Vector<float> x) {
  const Vector<float> first = first_digit(x);
  return {first, x == first ? x * 0x1p-40f : x - first};
}
// The digits of a float, with an error of 2^-16 of it: the added 2^-17 offsets the loss in the second digit.
FLASH_ONLINE_INLINE Bf16x2Vector bf16x2_rounded(Vector<float> x) {
  const Vector<float> first = first_digit(x);
  return {first, x * (1.f + 0x1p-17f) - first};
}

// Loads the elements [column, column + kLanes) of a row, widened; 0 past the end of the matrix.
template <class E>
FLASH_ONLINE_INLINE Vector<float> load_vector_of_row(Matrix<const E> from, int64_t rows, int64_t columns, int64_t r,
                                                     int64_t column) {
  const E* row = from.data + r * from.row_stride;
  if (r < rows && from.column_stride == 1 && column + kLanes<float> <= columns) return load_widened(row + column);
  Vector<float> x = {};
  for (int l = 0; r < rows && l < kLanes<float> && column + l < columns; ++l)
    x[l] = widen(row[(column + l) * from.column_stride]);
  return x;
}

// Stores 32 neighbours of a row in the layout of a left operand: a vector for each digit.
FLASH_ONLINE_INLINE void store_row(BFloat16* to, Vector<float> first, Vector<float> second) {
  store_narrowed(to, first);
  store_narrowed(to + kLanes<float>, second);
}
FLASH_ONLINE_INLINE void store_row(Bf16x2Float16* to, Bf16x2Vector first, Bf16x2Vector second) {
  constexpr int n = kLanes<float>;
  const auto store = [](BFloat16* half, Vector<float> x) FLASH_ONLINE_LAMBDA_INLINE {
    const auto bits = __builtin_convertvector(reinterpret_cast<Vector<uint32_t>>(x) >> 16, Vector16BitOf::type);
    *reinterpret_cast<Vector16BitOf::unaligned*>(half) = bits;
  };
  BFloat16* const digits = to->digit;
  store(digits, first.first), store(digits + n, second.first);
  store(digits + 2 * n, first.second), store(digits + 3 * n, second.second);
}

// Widens element e of a row of a tensor, or of a row that store_row wrote.
template <class F>
FLASH_ONLINE_INLINE auto widen_element(const F* row, int64_t e) {
  if constexpr (std::is_same_v<F, Bf16x2Float16>) {
    const BFloat16* digits = row[e / 32 * 32].digit + e % 32;
    return widen(digits[0]) + widen(digits[32]);
  } else {
    return widen(row[e]);
  }
}

// Copies a matrix to to[padded_rows, pitch], widened unless F is E; the padding becomes 0.
template <class E, class F>
__attribute__((noinline)) void load_rows(Matrix<const E> from, int64_t rows, int64_t columns, F* to, int64_t padded_rows,
                                         int64_t pitch) {
  for (int64_t r = 0; r < rows; ++r) {
    const E* row = from.data + r * from.row_stride;
    F* to_row = to + r * pitch;
    int64_t c = 0;
    if constexpr (std::is_same_v<F, Bf16x2Float16>) {
      for (; c < pitch; c += 32)
        store_row(to_row + c, bf16x2_exactly(load_vector_of_row(from, rows, columns, r, c)),
                  bf16x2_exactly(load_vector_of_row(from, rows, columns, r, c + kLanes<float>)));
      continue;
    } else if constexpr (std::is_same_v<E, F>) {
      if (from.column_stride == 1) std::copy_n(row, columns, to_row), c = columns;
      for (; c < columns; ++c) to_row[c] = row[c * from.column_stride];
    } else {
      if constexpr (std::is_same_v<F, Accumulator<E>>)
        if (from.column_stride == 1)
          for (; c + kLanes<F> <= columns; c += kLanes<F>) store_vector(to_row + c, load_widened(row + c));
      for (; c < columns; ++c) to_row[c] = widen(row[c * from.column_stride]);
    }
    std::fill(to_row + columns, to_row + pitch, F{});
  }
  std::fill(to + rows * pitch, to + padded_rows * pitch, F{});
}

// Writes from[rows, pitch] * scale to a matrix, narrowed.
template <class E, class A>
void store_rows(const A* from, int64_t pitch, A scale, int64_t rows, int64_t columns, Matrix<E> to) {
  for (int64_t r = 0; r < rows; ++r) {
    const A* row = from + r * pitch;
    E* to_row = to.data + r * to.row_stride;
    int64_t c = 0;
    if (to.column_stride == 1)
      for (; c + kLanes<A> <= columns; c += kLanes<A>) store_narrowed(to_row + c, load_vector(row + c) * scale);
    for (; c < columns; ++c) to_row[c * to.column_stride] = narrow<E>(row[c] * scale);
  }
}

// The following functions make the pairs that a paired matmul reads. A pair is moved as a float, by its bits.

// Writes the transpose of words[rows, columns], of each digit, to to[columns, to_pitch]; a pitch counts floats. Rows and
// columns are multiples of 16.
template <class F>
__attribute__((noinline)) void transpose_pairs(const F* from, int64_t pitch, int64_t rows, int64_t columns, F* to,
                                               int64_t to_pitch) {
  constexpr int n = kLanes<float>, digits = kBf16Digits<F>;
  const float* from_words = reinterpret_cast<const float*>(from);
  float* to_words = reinterpret_cast<float*>(to);
  for (int64_t r = 0; r < rows; r += n)
    for (int64_t c = 0; c < columns; c += n)
      for (int digit = 0; digit < digits; ++digit) {
        Vector<float> square[n];
        for (int i = 0; i < n; ++i) square[i] = load_vector(from_words + (r + i) * pitch + c * digits + digit * n);
        transpose<float>(square);
        for (int i = 0; i < n; ++i) store_vector(to_words + (c + i) * to_pitch + r * digits + digit * n, square[i]);
      }
}

// Stores two rows as one row of pairs.
FLASH_ONLINE_INLINE void store_pairs(Bf16x2Float16* to, Bf16x2Vector first, Bf16x2Vector second) {
  uint32_t* const words = reinterpret_cast<uint32_t*>(to);
  store_vector(words, join_upper_halves(first.first, second.first));
  store_vector(words + kLanes<float>, join_upper_halves(first.second, second.second));
}

// Stores two rows of sums, narrowed, as one row of pairs.
FLASH_ONLINE_INLINE void store_narrowed_pairs(Bf16x2Float16* to, Vector<float> first, Vector<float> second) {
  store_pairs(to, bf16x2_rounded(first), bf16x2_rounded(second));
}
FLASH_ONLINE_INLINE void store_narrowed_pairs(BFloat16* to, Vector<float> first, Vector<float> second) {
#if defined(__AVX512BF16__)
  const __m512bh halves = _mm512_cvtne2ps_pbh(reinterpret_cast<__m512>(second), reinterpret_cast<__m512>(first));
  Vector<uint16_t> order;
  for (int l = 0; l < 32; ++l) order[l] = static_cast<uint16_t>(l / 2 + l % 2 * 16);
  store_vector(reinterpret_cast<uint16_t*>(to), __builtin_shuffle(reinterpret_cast<Vector<uint16_t>>(halves), order));
#else
  for (int l = 0; l < kLanes<float>; ++l) to[2 * l] = narrow<BFloat16>(first[l]), to[2 * l + 1] = narrow<BFloat16>(second[l]);
#endif
}

// Copies a matrix as to[padded_rows / 2, pitch] pairs: neighbours in a column become a pair; the padding becomes 0.
template <class E, class F>
__attribute__((noinline)) void load_row_pairs(Matrix<const E> from, int64_t rows, int64_t columns, F* to, int64_t padded_rows,
                                              int64_t pitch) {
  for (int64_t r = 0; r < padded_rows; r += 2)
    for (int64_t c = 0; c < pitch; c += kLanes<float>) {
      const Vector<float> first = load_vector_of_row(from, rows, columns, r, c),
                          second = load_vector_of_row(from, rows, columns, r + 1, c);
      F* const pairs = to + r * pitch + 2 * c;
      if constexpr (kBf16Digits<F> == 2)
        store_pairs(pairs, bf16x2_exactly(first), bf16x2_exactly(second));
      else
        store_vector(reinterpret_cast<uint32_t*>(pairs), join_upper_halves(first, second));
    }
}

// Writes from[rows, pitch], narrowed, to to[padded_rows, pitch]; the padding of rows and of columns becomes 0.
template <class F>
void narrow_rows(const float* from, int64_t rows, int64_t padded_rows, int64_t columns, int64_t padded_columns, int64_t pitch,
                 F* to) {
  constexpr int n = kLanes<float>;
  for (int64_t r = 0; r < padded_rows; ++r)
    for (int64_t l = 0; l < padded_columns; l += 2 * n) {
      const auto load = [&](int64_t column) {
        return r < rows && column < columns ? load_vector(from + r * pitch + column) : Vector<float>{};
      };
      if constexpr (kBf16Digits<F> == 2)
        store_row(to + r * pitch + l, bf16x2_rounded(load(l)), bf16x2_rounded(load(l + n)));
      else
        store_row(to + r * pitch + l, load(l), load(l + n));
    }
}

// Writes from[rows, pitch], narrowed, as to[padded_rows / 2, pitch] pairs; the padding becomes 0.
template <class F>
void narrow_to_pairs(const float* from, int64_t rows, int64_t padded_rows, int64_t columns, int64_t pitch, F* to) {
  for (int64_t l = 0; l < columns; l += kLanes<float>)
    for (int64_t r = 0; r < padded_rows; r += 2)
      store_narrowed_pairs(to + r * pitch + 2 * l, r < rows ? load_vector(from + r * pitch + l) : Vector<float>{},
                           r + 1 < rows ? load_vector(from + (r + 1) * pitch + l) : Vector<float>{});
}

}  // namespace flash_online::cpu::FLASH_ONLINE_ISA
