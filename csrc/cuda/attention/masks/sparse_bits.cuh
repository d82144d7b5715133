// For a tile of 64 queries and 64 keys that sparsity hides in part: which scores it hides, as words of MaskBits and
// TransposedMaskBits. One warp computes the words of a tile. Each lane computes two rows, 64 bits each, one bit per place, and
// shuffles bring these bits into the order of the words. The loops over columns are not unrolled, because the warps that run
// them have few registers.
#pragma once

#include "../../hw/warp.h"
#include "sparsity.cuh"

namespace flash_online::cuda {

static_assert(kMaskMapTile == 2 * kWarpSize);

// 64 places of a row, a bit each.
struct PlaceBits {
  unsigned word[2];

  // Those of [begin, end), of the places from `first` on. Bounds may be any numbers.
  __device__ __forceinline__ static PlaceBits between(int begin, int end, int first) {
    const auto before = [&](int place) { return min(max(place, first), first + kMaskMapTile) - first; };
    const auto from = [](int n) { return n >= 32 ? 0u : ~0u << n; };
    const int b = before(begin), e = before(end);
    return {from(b) & ~from(e), from(max(b - 32, 0)) & ~from(max(e - 32, 0))};
  }
  __device__ __forceinline__ PlaceBits operator|(const PlaceBits& other) const {
    return {word[0] | other.word[0], word[1] | other.word[1]};
  }
};

// The bits of 64 rows, two per lane.
struct LaneBits {
  PlaceBits rows[2];

  // `spans_of`: from a row of [first, last] to its RowSpans; rows past `last` are like it.
  template <class F>
  __device__ __forceinline__ LaneBits(const F& spans_of, int first, int last, int first_place, int lane) {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const RowSpans spans = spans_of(min(first + lane + n * kWarpSize, last));
      rows[n] = PlaceBits::between(spans.begin[0], spans.end[0], first_place) |
                PlaceBits::between(spans.begin[1], spans.end[1], first_place);
    }
  }
  // Those of row kWarpSize * half + from.
  __device__ __forceinline__ PlaceBits of(int half, int from) const {
    return {__shfl_sync(~0u, rows[half].word[0], from), __shfl_sync(~0u, rows[half].word[1], from)};
  }
  __device__ __forceinline__ PlaceBits of_half(bool second, int from) const {
    return {__shfl_sync(~0u, second ? rows[1].word[0] : rows[0].word[0], from),
            __shfl_sync(~0u, second ? rows[1].word[1] : rows[0].word[1], from)};
  }
};

// A lane's bits of the columns 8 j + 2 * (lane % 4) + e, j < 8, of a tile's 64 columns, for the rows 8 r + lane / 4, r < 8:
// byte r % 4 of word[e][r / 4]. Where kFirstIsHighest the column of j = 0 is the highest bit of a byte, and else the lowest.
template <bool kFirstIsHighest>
struct ColumnBits {
  unsigned word[2][2] = {};

  __device__ __forceinline__ ColumnBits(const LaneBits& columns, int lane) {
#pragma unroll 1
    for (int n = 0; n < 8; ++n) {
      const int j = kFirstIsHighest ? n : 7 - n;
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const PlaceBits column = columns.of_half(j >= 4, 8 * j % kWarpSize + lane % 4 * 2 + e);
#pragma unroll
        for (int w = 0; w < 2; ++w) word[e][w] = word[e][w] << 1 | (column.word[w] >> lane / 4 & 0x01010101u);
      }
    }
  }
};

// The columns of a word of MaskBits that a list of blocks shows, for a tile from `query` and `key` on: the keys of up to two of
// the list's tiles.
__device__ __forceinline__ unsigned listed_columns(const ListedTiles& listed, int query, int key, int keys) {
  const int tile_keys = 1 << listed.key_shift,
            first_nibbles = min((tile_keys - key % tile_keys) / 8, 8);  // of the first of them; a nibble has eight columns
  const unsigned first = ~0u >> (32 - 4 * first_nibbles);
  const bool has_first = listed.has(query, min(key, keys - 1)),
             has_second = first_nibbles < 8 && listed.has(query, min(key + kMaskMapTile, keys - 1));
  return (has_first ? first : 0u) | (has_second ? ~first : 0u);
}

// The words of MaskBits that a lane has of the queries [query, query + 64), 16 in each group, and the keys [key, key + 64).
// Rows past `queries` and `keys` have any bits.
__device__ __forceinline__ void mask_bits_of(unsigned (&words)[4], const HeadSparsity& sparsity, int query, int queries,
                                             int key, int keys, int lane) {
  const unsigned listed = sparsity.listed.data ? listed_columns(sparsity.listed, min(query, queries - 1), key, keys) : ~0u;
#pragma unroll
  for (unsigned& word : words) word = listed;
  if (sparsity.queries) {
    const LaneBits rows([&](int row) { return sparsity.of_query(row); }, query, queries - 1, key, lane);
    // Two bits of each byte become two bits of each nibble.
    const auto to_nibbles = [](unsigned x) {
      x &= 0x03030303u;
      x = (x | x >> 4) & 0x00330033u;
      return (x | x >> 8) & 0x3333u;
    };
#pragma unroll
    for (int group = 0; group < 4; ++group) {
      unsigned shown = 0;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const PlaceBits row = rows.of(group / 2, (16 * group + 8 * half) % kWarpSize + lane / 4);
        shown |= (to_nibbles(row.word[0] >> lane % 4 * 2) | to_nibbles(row.word[1] >> lane % 4 * 2) << 16) << 2 * half;
      }
      words[group] &= shown;
    }
  }
  if (sparsity.keys) {
    const ColumnBits<false> by_key(LaneBits([&](int row) { return sparsity.of_key(row); }, key, keys - 1, query, lane), lane);
    // Each bit of a byte becomes the lowest one of a nibble.
    const auto spread = [](unsigned x) {
      x = (x | x << 12) & 0x000f000fu;
      x = (x | x << 6) & 0x03030303u;
      return (x | x << 3) & 0x11111111u;
    };
#pragma unroll
    for (int group = 0; group < 4; ++group) {
      unsigned shown = 0;
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int e = 0; e < 2; ++e)
          shown |= spread(by_key.word[e][group / 2] >> (16 * (group % 2) + 8 * half) & 0xffu) << (2 * half + e);
      words[group] &= shown;
    }
  }
}

// The words of TransposedMaskBits that a lane has of the queries [query, query + 64) and the keys [key, key + 64), 16 in each
// group.
__device__ __forceinline__ void transposed_bits_of(unsigned (&words)[4], const HeadSparsity& sparsity, int query, int queries,
                                                   int key, int keys, int lane) {
  const unsigned listed = !sparsity.listed.data || sparsity.listed.has(min(query, queries - 1), min(key, keys - 1)) ? ~0u : 0u;
#pragma unroll
  for (unsigned& word : words) word = listed;
  if (sparsity.keys) {
    const LaneBits rows([&](int row) { return sparsity.of_key(row); }, key, keys - 1, query, lane);
    // The lowest bits of four bytes become a nibble, the first one its highest bit: no two products meet in a bit.
    const auto gather = [](unsigned x) { return (x & 0x01010101u) * 0x80402010u >> 28; };
#pragma unroll
    for (int group = 0; group < 4; ++group) {
      unsigned shown = 0;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const PlaceBits row = rows.of(group / 2, (16 * group + 8 * half) % kWarpSize + lane / 4);
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int shift = lane % 4 * 2 + e;
          shown |= (gather(row.word[0] >> shift) << 4 | gather(row.word[1] >> shift)) << (16 * e + 8 * half);
        }
      }
      words[group] &= shown;
    }
  }
  if (sparsity.queries) {
    const ColumnBits<true> by_query(LaneBits([&](int row) { return sparsity.of_query(row); }, query, queries - 1, key, lane),
                                    lane);
#pragma unroll
    for (int group = 0; group < 4; ++group) {
      const unsigned even = by_query.word[0][group / 2], odd = by_query.word[1][group / 2];
      words[group] &= group % 2 == 0 ? (even & 0xffffu) | odd << 16 : even >> 16 | (odd & 0xffff0000u);
    }
  }
}

}  // namespace flash_online::cuda
