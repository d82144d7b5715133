// Blocks of a tensor's rows on their way into shared memory.
#pragma once

#include "../../../core/problem.h"
#include "../../../core/sequence.h"
#include "../../hw/cp_async.cuh"
#include "../../mma/fragments.cuh"

namespace flash_online::cuda {

// A head's rows in global memory. Strides in elements.
template <class Element>
struct HeadRows {
  const Element* data;
  int64_t row_stride, column_stride;
  int columns;
  bool vectors;  // whether every row starts at a multiple of 16 bytes, its columns side by side

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

// Whole vectors of floats on their way into a tile of their pieces: kCount of them a thread, from its `first`-th on.
template <class Element, int kRows, int kThreads, int kWidth, int kCount>
struct FloatsInRegisters {
  static constexpr unsigned kAcross = kWidth / 4, kVectors = kRows * kAcross;
  float4 values[kCount];

  __device__ static bool take(const HeadRows<Element>& from) { return from.vectors && from.columns % 4 == 0; }

  __device__ __forceinline__ void fetch(const HeadRows<Element>& from, int row, int rows, int first = 0) {
    // Where a thread keeps to its column, there is one address, moved on by a constant number of rows.
    constexpr bool kDown = kThreads % kAcross == 0;
    const int left = min(rows - row, kRows);
    const Element* at = nullptr;
#pragma unroll
    for (int n = 0; n < kCount; ++n) {
      const unsigned index = threadIdx.x + (first + n) * kThreads;
      const int r = static_cast<int>(index / kAcross), c = static_cast<int>(index % kAcross) * 4;
      if (n == 0 || !kDown)
        at = from.data + (row + r) * from.row_stride + c;
      else
        at += kThreads / kAcross * from.row_stride;
      values[n] = r < left && c < from.columns ? *reinterpret_cast<const float4*>(at) : make_float4(0, 0, 0, 0);
    }
  }
  // Times `factor`.
  __device__ __forceinline__ void put(SharedTile<Element, kWidth> tile, int first = 0, float factor = 1) const {
    using F = Fragments<Element>;
#pragma unroll
    for (int n = 0; n < kCount; ++n) {
      const unsigned index = threadIdx.x + (first + n) * kThreads;
      if (kVectors % (kThreads * kCount) != 0 && index >= kVectors) return;
      unsigned left[F::kPieces], right[F::kPieces];
      F::split(left, values[n].x * factor, values[n].y * factor);
      F::split(right, values[n].z * factor, values[n].w * factor);
#pragma unroll
      for (int piece = 0; piece < F::kPieces; ++piece)
        *reinterpret_cast<uint2*>(tile.row(index / kAcross, piece) + index % kAcross * 4) =
            make_uint2(left[piece], right[piece]);
    }
  }
};

// Floats, times `factor`, into a tile of their pieces, as load() below.
template <int kRows, int kThreads, class Element, int kWidth>
  requires(Fragments<Element>::kPieces > 1)
__device__ __forceinline__ void load(SharedTile<Element, kWidth> tile, const HeadRows<Element>& from, int row, int rows,
                                     float factor = 1) {
  constexpr int kCount = 4;
  using F = Fragments<Element>;
  using Part = FloatsInRegisters<Element, kRows, kThreads, kWidth, kCount>;
  if (Part::take(from)) {
#pragma unroll 1
    for (int first = 0; first * kThreads < Part::kVectors; first += kCount) {
      Part part;
      part.fetch(from, row, rows, first);
      part.put(tile, first, factor);
    }
  } else {
#pragma unroll 1
    for (int index = static_cast<int>(threadIdx.x); index < kRows * kWidth / 2; index += kThreads) {
      const int r = index / (kWidth / 2), c = index % (kWidth / 2) * 2;
      const float* const at = reinterpret_cast<const float*>(from.data + (row + r) * from.row_stride + c * from.column_stride);
      const bool there = row + r < rows;
      unsigned words[F::kPieces];
      F::split(words, there && c < from.columns ? at[0] * factor : 0,
               there && c + 1 < from.columns ? at[from.column_stride] * factor : 0);
#pragma unroll
      for (int piece = 0; piece < F::kPieces; ++piece) *reinterpret_cast<unsigned*>(tile.row(r, piece) + c) = words[piece];
    }
  }
}

// Copies the rows [row, row + kRows) into a tile; zeros stand for what is past `rows` or past the columns. Seen after
// cp_async_commit, cp_async_wait and a barrier.
template <int kRows, int kThreads, class Element, int kWidth>
  requires(Fragments<Element>::kPieces == 1)
__device__ __forceinline__ void load(SharedTile<Element, kWidth> tile, const HeadRows<Element>& from, int row, int rows) {
  constexpr int kPer = kPerVector<Element>, kChunks = kWidth / kPer;
  const int thread = static_cast<int>(threadIdx.x), left = min(rows - row, kRows);
  const Element* const data = from.data + row * from.row_stride;
  if (from.vectors) {
    // A thread keeps to its column: one address, moved on by a constant number of rows.
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

// Values for the gradients of weights that dropout kept: of floats as many times larger as the weights are. A query that sees
// one key alone has that value's multiple, rounded, as its output, and its scores then have no gradient, to the last digit. Of
// 16-bit elements as they are, since their products are multiplied (drop_gradients).
template <int kRows, int kThreads, class Element, int kWidth>
__device__ __forceinline__ void load_values(SharedTile<Element, kWidth> tile, const HeadRows<Element>& from, int row, int rows,
                                            [[maybe_unused]] float keep_scale) {
  if constexpr (Fragments<Element>::kPieces > 1)
    load<kRows, kThreads>(tile, from, row, rows, keep_scale);
  else
    load<kRows, kThreads>(tile, from, row, rows);
}

// A block of rows under way while others are worked on: start() at any time, finish() once all have done with the tile. 16-bit
// elements are copied into a tile that is free already; floats stay in registers until they are split.
template <int kRows, int kThreads, class Element, int kWidth, bool kSplit = (Fragments<Element>::kPieces > 1)>
struct Incoming {
  using Tile = SharedTile<Element, kWidth>;
  __device__ __forceinline__ void start(Tile tile, const HeadRows<Element>& from, int row, int rows) {
    load<kRows, kThreads>(tile, from, row, rows);
  }
  __device__ __forceinline__ void finish(Tile, const HeadRows<Element>&, int, int) const {}
};
template <int kRows, int kThreads, class Element, int kWidth>
struct Incoming<kRows, kThreads, Element, kWidth, true> {
  using Tile = SharedTile<Element, kWidth>;
  static constexpr int kCount = (kRows * kWidth / 4 + kThreads - 1) / kThreads;
  static constexpr bool kAhead = kCount <= 8;  // more take registers from the work meanwhile
  FloatsInRegisters<Element, kRows, kThreads, kWidth, kAhead ? kCount : 1> part;

  __device__ __forceinline__ void start(Tile, const HeadRows<Element>& from, int row, int rows) {
    if (kAhead && part.take(from)) part.fetch(from, row, rows);
  }
  __device__ __forceinline__ void finish(Tile tile, const HeadRows<Element>& from, int row, int rows) const {
    if (kAhead && part.take(from))
      part.put(tile);
    else
      load<kRows, kThreads>(tile, from, row, rows);
  }
};

// Writes a warp's 16 * kTiles rows of accumulators into a head's rows: `at` is the warp's place in shared memory, of which the
// warp uses as many rows, from an element `place` on; `row` counts there and in the tensor alike from the block's first.
template <class Element, int kTiles, int kColumns, int kWidth>
__device__ __forceinline__ void store_rows(const Accumulator<kTiles, kColumns>& d, SharedTile<Element, kWidth> at, int place,
                                           int row, Element* data, int64_t row_stride, int64_t column_stride, int left,
                                           int width) {
  static_assert(kColumns * 8 <= kWidth);
  __syncwarp();
#pragma unroll
  for (int i = 0; i < kTiles; ++i)
#pragma unroll
    for (int j = 0; j < kColumns; ++j)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        Element* const to = at.elements(row + 16 * i + 8 * half + quad()) + place + 8 * j + 2 * lane_in_quad();
        if constexpr (sizeof(Element) == 2)
          *reinterpret_cast<unsigned*>(to) = Fragments<Element>::pair(d[i][j][2 * half], d[i][j][2 * half + 1]);
        else
          *reinterpret_cast<float2*>(to) = {d[i][j][2 * half], d[i][j][2 * half + 1]};
      }
  __syncwarp();
  constexpr int kPer = kPerVector<Element>, kChunks = kColumns * 8 / kPer;
  const bool vectors = column_stride == 1 && width % kPer == 0 && misalignment(data) == 0 &&
                       row_stride * static_cast<int>(sizeof(Element)) % kVectorBytes == 0;
  for (int index = lane(); index < 16 * kTiles * kChunks; index += 32) {
    const int r = row + index / kChunks, c = index % kChunks * kPer;
    if (r >= left || c >= width) continue;
    if (vectors)
      *reinterpret_cast<uint4*>(data + r * row_stride + c) = *reinterpret_cast<const uint4*>(at.elements(r) + place + c);
    else
      for (int n = 0; n < kPer && c + n < width; ++n)
        data[r * row_stride + (c + n) * column_stride] = at.elements(r)[place + c + n];
  }
}

// The same of 16 rows and without shared memory, times `scale`: four neighbouring lanes have pairs of columns of the same rows
// and exchange them, so that each writes eight columns. A caller that stands in a loop may give its lane anew (make_opaque):
// what follows from it is not kept over the loop then.
template <class Element, int kColumns>
__device__ __forceinline__ void store_rows(const Accumulator<1, kColumns>& d, float scale, int row, Element* data,
                                           int64_t row_stride, int64_t column_stride, int left, int width,
                                           int lane = cuda::lane()) {
  static_assert(kColumns % 4 == 0);
  constexpr bool kWords = sizeof(Element) == 2;
  const bool vectors = kWords && column_stride == 1 && width % 8 == 0 && misalignment(data) == 0 &&
                       row_stride * static_cast<int>(sizeof(Element)) % kVectorBytes == 0;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int r = row + half * 8 + lane / 4;
    Element* const at = data + r * row_stride;
#pragma unroll
    for (int first = 0; first < kColumns; first += 4) {
      if constexpr (kWords) {
        if (vectors) {
          unsigned words[4];
#pragma unroll
          for (int t = 0; t < 4; ++t)
            words[t] = Fragments<Element>::pair(scale * d[0][first + t][2 * half], scale * d[0][first + t][2 * half + 1]);
          transpose_quad(words);
          const int column = (first + lane % 4) * 8;
          if (r < left && column < width)
            *reinterpret_cast<uint4*>(at + column) = make_uint4(words[0], words[1], words[2], words[3]);
          continue;
        }
      }
#pragma unroll
      for (int t = 0; t < 4; ++t)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int column = (first + t) * 8 + 2 * (lane % 4) + e;
          if (r < left && column < width) at[column * column_stride] = narrow<Element>(scale * d[0][first + t][2 * half + e]);
        }
    }
  }
}

// Zeros for rows of one head that no sequence owns, by the kThreads of a block.
template <class Element, int kThreads>
__device__ __forceinline__ void clear_rows(const MutableView4& to, int64_t head, int64_t width, Rows rows) {
  Element* const data = static_cast<Element*>(to.data) + head * to.stride[1];
  for (int64_t n = threadIdx.x; n < rows.count * width; n += kThreads)
    data[(rows.begin + n / width) * to.stride[2] + n % width * to.stride[3]] = narrow<Element>(0.0f);
}

}  // namespace flash_online::cuda
