// Loads of a tensor's rows into tiles in shared memory.
#pragma once

#include <algorithm>
#include <bit>

#include "../../../core/problem.h"
#include "../../../core/sequence.h"
#include "../../hw/cp_async.cuh"
#include "../../hw/vector.cuh"
#include "../../mma/fragments.cuh"

namespace flash_online::cuda {

// A head's rows in global memory; strides count elements.
template <class Element>
struct HeadRows {
  const Element* data;
  int64_t row_stride, column_stride;
  int columns;
  bool vectors;  // every row starts at a multiple of 16 bytes, and its columns are contiguous

  __device__ HeadRows(const ConstView4& view, int64_t batch, int64_t head, int64_t first_row, int64_t all_columns,
                      int64_t first_column = 0)
      : data(static_cast<const Element*>(view.data) + batch * view.stride[0] + head * view.stride[1] +
             first_row * view.stride[2] + first_column * view.stride[3]),
        row_stride(view.stride[2]),
        column_stride(view.stride[3]),
        columns(static_cast<int>(all_columns - first_column)),
        vectors((column_stride == 1 || all_columns <= 1) && misalignment(data) == 0 && row_stride * sizeof(Element) % 16 == 0) {
  }
};

// The shape of a tile, and how many threads load it.
struct TileCopy {
  int rows, width, threads;
};

// kCount vectors of floats per thread on their way into a tile of their digits: each is read to registers, cut into digits, and
// stored.
template <class Element, TileCopy kCopy, int kCount>
struct FloatsInRegisters {
  static constexpr unsigned kPerRow = kCopy.width / 4, kVectors = kCopy.rows * kPerRow;
  float4 values[kCount];

  __device__ static bool can_load(const HeadRows<Element>& from) { return from.vectors && from.columns % 4 == 0; }

  // Reads the thread's vectors from number `first` on of the rows from `row` on.
  __device__ __forceinline__ void fetch(const HeadRows<Element>& from, int row, int rows, int first = 0) {
    // Where a thread stays in one column, it has one address, advanced by a constant number of rows.
    constexpr bool kOneColumn = kCopy.threads % kPerRow == 0;
    const int left = min(rows - row, kCopy.rows);
    const Element* at = nullptr;
#pragma unroll
    for (int n = 0; n < kCount; ++n) {
      const unsigned index = threadIdx.x + (first + n) * kCopy.threads;
      const int r = static_cast<int>(index / kPerRow), c = static_cast<int>(index % kPerRow) * 4;
      if (n == 0 || !kOneColumn)
        at = from.data + (row + r) * from.row_stride + c;
      else
        at += kCopy.threads / kPerRow * from.row_stride;
      values[n] = r < left && c < from.columns ? *reinterpret_cast<const float4*>(at) : make_float4(0, 0, 0, 0);
    }
  }
  // Like fetch(), but element by element, for a tensor that cannot be read by vectors.
  __device__ __forceinline__ void fetch_elements(const HeadRows<Element>& from, int row, int rows) {
#pragma unroll
    for (int n = 0; n < kCount; ++n) {
      const unsigned index = threadIdx.x + n * kCopy.threads;
      const int r = row + static_cast<int>(index / kPerRow), c = static_cast<int>(index % kPerRow) * 4;
      const float* const at = reinterpret_cast<const float*>(from.data + r * from.row_stride + c * from.column_stride);
      const auto element = [&](int e) { return r < rows && c + e < from.columns ? at[e * from.column_stride] : 0.0f; };
      values[n] = make_float4(element(0), element(1), element(2), element(3));
    }
  }
  // Calls f(row, column, digit, words) for the digits of the vectors, each times `factor`.
  template <class F>
  __device__ __forceinline__ void for_each_digit(F&& f, int first = 0, float factor = 1) const {
    using Operand = Fragments<Element>;
#pragma unroll
    for (int n = 0; n < kCount; ++n) {
      const unsigned index = threadIdx.x + (first + n) * kCopy.threads;
      if (kVectors % (kCopy.threads * kCount) != 0 && index >= kVectors) return;
      unsigned left[Operand::kDigits], right[Operand::kDigits];
      Operand::to_digits(left, values[n].x * factor, values[n].y * factor);
      Operand::to_digits(right, values[n].z * factor, values[n].w * factor);
#pragma unroll
      for (int digit = 0; digit < Operand::kDigits; ++digit)
        f(index / kPerRow, index % kPerRow * 4, digit, make_uint2(left[digit], right[digit]));
    }
  }
  // Stores them to a tile.
  __device__ __forceinline__ void put(SharedTile<Element, kCopy.width> tile, int first = 0, float factor = 1) const {
    for_each_digit([&](unsigned row, unsigned column, int digit,
                       uint2 words) { *reinterpret_cast<uint2*>(tile.row(row, digit) + column) = words; },
                   first, factor);
  }
};

// Loads floats, times `factor`, into a tile of their digits: rows and columns as in the other load().
template <int kRows, int kThreads, class Element, int kWidth>
  requires(Fragments<Element>::kDigits > 1)
__device__ __forceinline__ void load(SharedTile<Element, kWidth> tile, const HeadRows<Element>& from, int row, int rows,
                                     float factor = 1) {
  constexpr int kCount = 4;
  using F = Fragments<Element>;
  using Vectors = FloatsInRegisters<Element, TileCopy{.rows = kRows, .width = kWidth, .threads = kThreads}, kCount>;
  if (Vectors::can_load(from)) {
#pragma unroll 1
    for (int first = 0; first * kThreads < Vectors::kVectors; first += kCount) {
      Vectors vectors;
      vectors.fetch(from, row, rows, first);
      vectors.put(tile, first, factor);
    }
  } else {
#pragma unroll 1
    for (int index = static_cast<int>(threadIdx.x); index < kRows * kWidth / 2; index += kThreads) {
      const int r = index / (kWidth / 2), c = index % (kWidth / 2) * 2;
      const float* const at = reinterpret_cast<const float*>(from.data + (row + r) * from.row_stride + c * from.column_stride);
      const bool there = row + r < rows;
      unsigned words[F::kDigits];
      F::to_digits(words, there && c < from.columns ? at[0] * factor : 0,
                   there && c + 1 < from.columns ? at[from.column_stride] * factor : 0);
#pragma unroll
      for (int digit = 0; digit < F::kDigits; ++digit) *reinterpret_cast<unsigned*>(tile.row(r, digit) + c) = words[digit];
    }
  }
}

// Copies the rows [row, row + kRows) into a tile; what is past `rows` or past the columns becomes 0. The tile may be read after
// cp_async_commit, cp_async_wait and a barrier.
template <int kRows, int kThreads, class Element, int kWidth>
  requires(Fragments<Element>::kDigits == 1)
__device__ __forceinline__ void load(SharedTile<Element, kWidth> tile, const HeadRows<Element>& from, int row, int rows) {
  constexpr int kPer = kPerVector<Element>, kChunks = kWidth / kPer;
  const int thread = static_cast<int>(threadIdx.x), left = min(rows - row, kRows);
  const Element* const data = from.data + row * from.row_stride;
  if (from.vectors) {
    // A thread stays in one column: it has one address, advanced by a constant number of rows.
    constexpr int kAcross = kChunks < kThreads ? kChunks : kThreads, kDown = kThreads / kAcross;
    constexpr bool kExact = kRows % kDown == 0 && kThreads % kAcross == 0 && kChunks % kAcross == 0;
    const int first = thread / kAcross;
    if (!kExact && first >= kDown) return;
    const int64_t step = kDown * from.row_stride;
    const bool whole = left >= kRows && from.columns >= kWidth;
#pragma unroll(kExact ? kChunks / kAcross : 1)
    for (int c = thread % kAcross * kPer; c < kWidth; c += kAcross * kPer) {
      const Element* source = data + first * from.row_stride + c;
      if (whole) {
#pragma unroll
        for (int r = 0; r < kRows; r += kDown, source += step)
          if (kExact || first + r < kRows) cp_async(reinterpret_cast<uint4*>(tile.row(first + r) + c), source);
      } else {
        const int bytes = max(0, min(kVectorBytes, (from.columns - c) * static_cast<int>(sizeof(Element))));
#pragma unroll 1
        for (int r = first; r < kRows; r += kDown, source += step)
          cp_async(reinterpret_cast<uint4*>(tile.row(r) + c), source, r < left ? bytes : 0);
      }
    }
  } else {
#pragma unroll 1
    for (int index = thread; index < kRows * kWidth; index += kThreads) {
      const int r = index / kWidth, c = index % kWidth;
      tile.row(r)[c] =
          r < left && c < from.columns ? data[r * from.row_stride + c * from.column_stride] : narrow<Element>(0.0f);
    }
  }
}

// Loads values for the gradients of weights under dropout. Values of floats are multiplied by keep_scale as kept weights are:
// the output of a query that sees one key is that multiple, rounded, and then the gradient of its score is 0 to the last digit.
// 16-bit elements stay as they are, since drop_gradients multiplies their products.
template <int kRows, int kThreads, class Element, int kWidth>
__device__ __forceinline__ void load_values(SharedTile<Element, kWidth> tile, const HeadRows<Element>& from, int row, int rows,
                                            [[maybe_unused]] float keep_scale) {
  if constexpr (Fragments<Element>::kDigits > 1)
    load<kRows, kThreads>(tile, from, row, rows, keep_scale);
  else
    load<kRows, kThreads>(tile, from, row, rows);
}

// A thread's vectors of a tile of kCopy.rows rows, each of which starts at a multiple of 16 bytes and consists of whole
// vectors. They are a constant number of rows apart. Threads past a whole number of rows have none.
template <class Element, TileCopy kCopy>
struct TileVectors {
  static constexpr int kPer = kPerVector<Element>, kAcross = kCopy.width / kPer;
  static constexpr int kDown = std::min(kCopy.rows, static_cast<int>(std::bit_floor(unsigned{kCopy.threads / kAcross}))),
                       kCount = kCopy.rows / kDown;  // rows at once; vectors of a thread
  static_assert(kCopy.rows % kDown == 0 && kDown * kAcross % kWarpSize == 0);
  using Tile = SharedTile<Element, kCopy.width>;

  const char* next;  // in global memory
  int row, column;  // the thread's first vector in a tile
  int count;  // of the thread's vectors that exist; the others become 0

  // Bytes from a vector of a thread to its next.
  static int64_t step(int64_t row_stride) { return kDown * row_stride * static_cast<int64_t>(sizeof(Element)); }
  __device__ __forceinline__ static bool can_load(const HeadRows<Element>& from) {
    return from.vectors && from.columns % kPer == 0;
  }

  // Those of the kCopy.rows rows from `first_row` on, all of which exist.
  __device__ __forceinline__ TileVectors(const HeadRows<Element>& from, int first_row, unsigned thread = threadIdx.x)
      : next(reinterpret_cast<const char*>(from.data + first_row * from.row_stride + thread / kAcross * from.row_stride +
                                           thread % kAcross * kPer)),
        row(static_cast<int>(thread / kAcross)),
        column(static_cast<int>(thread % kAcross * kPer)),
        count(column < from.columns ? kCount : 0) {}
  // Those of them before the row `rows`.
  __device__ __forceinline__ TileVectors(const HeadRows<Element>& from, int first_row, int rows, unsigned thread)
      : TileVectors(from, first_row, thread) {
    if (rows - first_row < kCopy.rows) count = min(count, (rows - first_row - row + kDown - 1) / kDown);
  }

  // Starts the thread's copies number `begin` to `end` to a tile.
  __device__ __forceinline__ void load(Tile tile, int64_t step, int begin = 0, int end = kCount) {
    static_assert(Fragments<Element>::kDigits == 1);
    constexpr int kPitch = kDown * Tile::kPitch * static_cast<int>(sizeof(Element));
    const unsigned to = tile.address(row, column);
#pragma unroll
    for (int n = begin; n < min(end, int{kCount}); ++n, next += step)
      if constexpr (kDown * kAcross < kCopy.threads)
        cp_async_if(row < kDown, n < count, to + n * kPitch, next);
      else
        cp_async_if(n < count, to + n * kPitch, next);
  }
};

// Loads a tile while the CTA works on others: start() at any time, finish() once all threads have done with the tile. 16-bit
// elements are copied straight to a tile that must be free at start(); floats stay in registers until they are cut into digits.
template <class Element, TileCopy kCopy, bool kInDigits = (Fragments<Element>::kDigits > 1)>
struct TilePrefetch {
  using Tile = SharedTile<Element, kCopy.width>;
  __device__ __forceinline__ void start(Tile tile, const HeadRows<Element>& from, int row, int rows) {
    load<kCopy.rows, kCopy.threads>(tile, from, row, rows);
  }
  __device__ __forceinline__ void finish(Tile, const HeadRows<Element>&, int, int) const {}
};
template <class Element, TileCopy kCopy>
struct TilePrefetch<Element, kCopy, true> {
  using Tile = SharedTile<Element, kCopy.width>;
  static constexpr int kCount = (kCopy.rows * kCopy.width / 4 + kCopy.threads - 1) / kCopy.threads;
  static constexpr bool kAhead = kCount <= 8;  // more vectors would take registers from the work meanwhile
  FloatsInRegisters<Element, kCopy, kAhead ? kCount : 1> vectors;

  __device__ __forceinline__ void start(Tile, const HeadRows<Element>& from, int row, int rows) {
    if (kAhead && vectors.can_load(from)) vectors.fetch(from, row, rows);
  }
  __device__ __forceinline__ void finish(Tile tile, const HeadRows<Element>& from, int row, int rows) const {
    if (kAhead && vectors.can_load(from))
      vectors.put(tile);
    else
      load<kCopy.rows, kCopy.threads>(tile, from, row, rows);
  }
};

}  // namespace flash_online::cuda
