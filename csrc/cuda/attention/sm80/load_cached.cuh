// Loads of cached keys and values into tiles in shared memory: every row lies where a table says.
#pragma once

#include "../../../core/cache.h"
#include "../../../core/mask.h"
#include "../cache/float8.cuh"
#include "load.cuh"

namespace flash_online::cuda {

// The query and the head of a tile's rows.
struct PlainRows {
  static constexpr int heads = 1;
  __device__ __forceinline__ int query_of(int row) const { return row; }
  __device__ __forceinline__ int head_of(int) const { return 0; }
};
// Over cached keys, those of `heads` heads that share keys lie side by side, query by query: few queries fill a tile, and keys
// are read once for all of these heads.
struct GroupRows {
  int heads;
  __device__ __forceinline__ int query_of(int row) const { return row / heads; }
  __device__ __forceinline__ int head_of(int row) const { return row % heads; }
};

// Loads queries into a tile by these rows, from query `query` on of `queries`. `from` is the first of the heads.
template <int kRows, int kThreads, class Element, int kWidth>
__device__ __forceinline__ void load_group(SharedTile<Element, kWidth> tile, const HeadRows<Element>& from, int64_t head_stride,
                                           const GroupRows& rows, int query, int queries) {
  using F = Fragments<Element>;
  constexpr int kPer = F::kDigits == 1 ? 8 : 2, kChunks = kWidth / kPer;
  const bool vectors = from.vectors && head_stride * sizeof(Element) % kVectorBytes == 0;
  for (int index = static_cast<int>(threadIdx.x); index < kRows * kChunks; index += kThreads) {
    const int r = index / kChunks, c = index % kChunks * kPer, at = query + rows.query_of(r);
    const Element* const source = from.data + rows.head_of(r) * head_stride + at * from.row_stride + c * from.column_stride;
    const int there = at < queries ? min(from.columns - c, kPer) : 0;  // elements
    if constexpr (F::kDigits == 1) {
      Element* const to = tile.row(r) + c;
      if (vectors) {
        cp_async(reinterpret_cast<uint4*>(to), source, max(there, 0) * static_cast<int>(sizeof(Element)));
      } else {
#pragma unroll
        for (int n = 0; n < kPer; ++n) to[n] = n < there ? source[n * from.column_stride] : narrow<Element>(0.0f);
      }
    } else {
      unsigned words[F::kDigits];
      F::to_digits(words, there > 0 ? source[0] : 0, there > 1 ? source[from.column_stride] : 0);
#pragma unroll
      for (int digit = 0; digit < F::kDigits; ++digit) *reinterpret_cast<unsigned*>(tile.row(r, digit) + c) = words[digit];
    }
  }
}

// Row `row` of block `block` of a pool; block -1: nowhere, which counts as zeros.
struct CachedPlace {
  int block, row;
};

// Bytes of the places of two blocks of `rows` rows.
constexpr int cached_place_bytes(int rows) { return 2 * rows * static_cast<int>(sizeof(CachedPlace)); }

// The rows of a sequence's cached keys, or values, of one head. A block of kRows of them has its places in shared memory, in
// one of two buffers by turns: locate() may find the next block's while this one's are read.
template <class Element, int kRows, int kThreads>
class CachedRows {
 public:
  int columns;
  bool vectors;  // every row starts at a multiple of what a thread loads at once, and its columns are contiguous
  char* staging;  // where float8 rows of this width wait to be widened, contiguous; null: they are widened as they are loaded

  // `keys`: those of the sequence, by their place in the cache.
  __device__ CachedRows(const ConstView4& view, const CacheView& cache, int64_t sequence, const Rows& keys, int64_t head,
                        int64_t all_columns, int64_t first_column, char* places, char* staging_)
      : columns(static_cast<int>(all_columns - first_column)),
        cache_(cache),
        is_float8_(cuda::is_float8(cache.dtype)),
        sequence_(sequence),
        first_key_(keys.begin),
        places_(reinterpret_cast<CachedPlace*>(places)) {
    const int64_t size = is_float8_ ? 1 : sizeof(Element), step = is_float8_ ? 8 : kVectorBytes;
    column_stride_ = view.stride[3] * size;
    row_stride_ = view.stride[2] * size;
    block_stride_ = view.stride[0] * size;
    data_ = static_cast<const char*>(view.data) + (head * view.stride[1] + first_column * view.stride[3]) * size;
    vectors = (view.stride[3] == 1 || all_columns <= 1) && reinterpret_cast<uintptr_t>(data_) % step == 0 &&
              row_stride_ % step == 0 && block_stride_ % step == 0 &&
              (!(is_float8_ || sizeof(Element) == 4) || columns % (is_float8_ ? 8 : 4) == 0);
    const auto is_multiple = [](int64_t number) { return number % kVectorBytes == 0; };
    const bool is_staged = is_float8_ && vectors && is_multiple(reinterpret_cast<intptr_t>(data_)) &&
                           is_multiple(row_stride_) && is_multiple(block_stride_) && is_multiple(columns);
    staging = is_staged ? staging_ : nullptr;
  }

  // Finds the places of the rows from `row` on, a multiple of kRows. Rows outside of `seen` have none: what they hold may not
  // even be multiplied by 0. The threads need a barrier before they read places.
  __device__ __forceinline__ void locate(int row, const KeyRange& seen) const {
    CachedPlace* const places = places_of(row);
    const unsigned page = static_cast<unsigned>(cache_.page);
    for (int r = static_cast<int>(threadIdx.x); r < kRows; r += kThreads) {
      const unsigned key = static_cast<unsigned>(first_key_ + row + r), entry = key / page;
      const int64_t block = row + r >= seen.begin && row + r < seen.end ? block_of(cache_, sequence_, entry) : -1;
      places[r] = {static_cast<int>(block), static_cast<int>(key - entry * page)};
    }
  }

  __device__ __forceinline__ CachedPlace* places_of(int row) const { return places_ + row / kRows % 2 * kRows; }
  // The address of a column in the row of a place; place.block is not -1.
  __device__ __forceinline__ const char* at(const CachedPlace& place, int column) const {
    return data_ + place.block * block_stride_ + place.row * row_stride_ + column * column_stride_;
  }
  __device__ __forceinline__ bool is_float8() const { return is_float8_; }
  __device__ __forceinline__ __nv_fp8_interpretation_t float8() const {
    return cache_.dtype == DType::kFloat8E4M3 ? __NV_E4M3 : __NV_E5M2;
  }
  // One element, widened; 0 where there is none.
  __device__ __forceinline__ Element element(const CachedPlace& place, int column) const {
    if (place.block < 0 || column >= columns) return narrow<Element>(0.0f);
    const char* const from = at(place, column);
    if constexpr (sizeof(Element) == 2) {
      if (is_float8_) {
        const auto bits = *reinterpret_cast<const __nv_fp8_storage_t*>(from);
        return narrow<Element>(__half2float(__nv_cvt_fp8_to_halfraw(bits, float8())));
      }
    }
    return *reinterpret_cast<const Element*>(from);
  }

 private:
  const CacheView& cache_;
  const char* data_;
  int64_t column_stride_, row_stride_, block_stride_;  // in bytes
  bool is_float8_;
  int64_t sequence_, first_key_;
  CachedPlace* places_;
};

// Copies the rows from `row` on, which have been located, into a tile. As in the other load(), 16-bit elements arrive
// asynchronously, unless they are cached as float8.
template <int kRows, int kThreads, class Element, int kWidth>
__device__ __forceinline__ void load(SharedTile<Element, kWidth> tile, const CachedRows<Element, kRows, kThreads>& from,
                                     int row, int) {
  using F = Fragments<Element>;
  const CachedPlace* const places = from.places_of(row);
  const int thread = static_cast<int>(threadIdx.x);
  if (from.vectors) {
    constexpr int kPer = F::kDigits == 1 ? 8 : 4, kChunks = kWidth / kPer;
    for (int index = thread; index < kRows * kChunks; index += kThreads) {
      const int r = index / kChunks, c = index % kChunks * kPer;
      const CachedPlace place = places[r];
      const bool there = place.block >= 0 && c < from.columns;
      if constexpr (F::kDigits == 1) {
        uint4* const to = reinterpret_cast<uint4*>(tile.row(r) + c);
        if (!there)
          *to = {};
        else if (from.is_float8())
          *to = widen_float8<Element>(*reinterpret_cast<const uint2*>(from.at(place, c)), from.float8());
        else
          cp_async(to, from.at(place, c), min(kVectorBytes, (from.columns - c) * static_cast<int>(sizeof(Element))));
      } else {
        const float4 x = there ? *reinterpret_cast<const float4*>(from.at(place, c)) : make_float4(0, 0, 0, 0);
        unsigned left[F::kDigits], right[F::kDigits];
        F::to_digits(left, x.x, x.y);
        F::to_digits(right, x.z, x.w);
#pragma unroll
        for (int digit = 0; digit < F::kDigits; ++digit)
          *reinterpret_cast<uint2*>(tile.row(r, digit) + c) = make_uint2(left[digit], right[digit]);
      }
    }
  } else {
#pragma unroll 1
    for (int index = thread; index < kRows * kWidth / 2; index += kThreads) {
      const int r = index / (kWidth / 2), c = index % (kWidth / 2) * 2;
      const Element x = from.element(places[r], c), y = from.element(places[r], c + 1);
      if constexpr (F::kDigits == 1) {
        tile.row(r)[c] = x;
        tile.row(r)[c + 1] = y;
      } else {
        unsigned words[F::kDigits];
        F::to_digits(words, x, y);
#pragma unroll
        for (int digit = 0; digit < F::kDigits; ++digit) *reinterpret_cast<unsigned*>(tile.row(r, digit) + c) = words[digit];
      }
    }
  }
}

// Copies float8 rows, which have been located, into their staging memory, and from there into a tile. A thread widens what it
// has copied itself.
template <int kRows, int kThreads, int kWidth, class F>
__device__ __forceinline__ void for_each_staged(F&& f) {
  constexpr int kChunks = kWidth / kVectorBytes;
  for (int index = static_cast<int>(threadIdx.x); index < kRows * kChunks; index += kThreads)
    f(index / kChunks, index % kChunks * kVectorBytes, index * kVectorBytes);
}
template <int kWidth, class Element, int kRows, int kThreads>
__device__ __forceinline__ void stage(const CachedRows<Element, kRows, kThreads>& from, int row) {
  const CachedPlace* const places = from.places_of(row);
  for_each_staged<kRows, kThreads, kWidth>([&](int r, int column, int offset) {
    const CachedPlace place = places[r];
    const bool there = place.block >= 0 && column < from.columns;
    cp_async(reinterpret_cast<uint4*>(from.staging + offset), from.at(there ? place : CachedPlace{0, 0}, there ? column : 0),
             there ? kVectorBytes : 0);
  });
}
template <int kRows, int kThreads, class Element, int kWidth>
__device__ __forceinline__ void widen_staged(SharedTile<Element, kWidth> tile,
                                             const CachedRows<Element, kRows, kThreads>& from) {
  cp_async_wait();
  for_each_staged<kRows, kThreads, kWidth>([&](int r, int column, int offset) {
    const uint4 bits = *reinterpret_cast<const uint4*>(from.staging + offset);
    uint4* const to = reinterpret_cast<uint4*>(tile.row(r) + column);
    to[0] = widen_float8<Element>({bits.x, bits.y}, from.float8());
    to[1] = widen_float8<Element>({bits.z, bits.w}, from.float8());
  });
}

// TilePrefetch's functions over cached rows: elements that pass through registers are loaded once the tile is free.
template <class Element, TileCopy kCopy>
struct CachedPrefetch {
  using Tile = SharedTile<Element, kCopy.width>;
  using From = CachedRows<Element, kCopy.rows, kCopy.threads>;
  __device__ __forceinline__ static bool is_asynchronous(const From& from) {
    return Fragments<Element>::kDigits == 1 && from.vectors && !from.is_float8();
  }
  __device__ __forceinline__ void start(Tile tile, const From& from, int row, int rows) const {
    if (is_asynchronous(from)) return load(tile, from, row, rows);
    if constexpr (Fragments<Element>::kDigits == 1)
      if (from.staging) stage<kCopy.width>(from, row);
  }
  __device__ __forceinline__ void finish(Tile tile, const From& from, int row, int rows) const {
    if (is_asynchronous(from)) return;
    if constexpr (Fragments<Element>::kDigits == 1)
      if (from.staging) return widen_staged(tile, from);
    load(tile, from, row, rows);
  }
};

}  // namespace flash_online::cuda
