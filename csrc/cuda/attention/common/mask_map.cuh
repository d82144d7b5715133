// The map of a mask, made before scores are computed: for each 64 x 64 tile, whether it hides all keys, some, or none.
// Kernels skip hidden tiles without reading their keys and values, and do not read the mask of clear tiles again.
#pragma once

#include "../../../core/config.h"
#include "../../../core/integer.h"
#include "../../../core/problem.h"
#include "../../hw/warp.h"

struct CUstream_st;  // what a cudaStream_t points to

namespace flash_online::cuda {

constexpr int kMaskMapTile = 64;  // queries, and keys

enum class MaskKind : uint8_t {
  kMixed = 0,
  kHidden = 1,  // hides every key from every query
  kClear = 2,   // hides and adds nothing
};

// One MaskKind per tile, [batch, heads, queries / 64, keys / 64]; a size is 1 where the mask is broadcast.
struct MaskMap {
  uint8_t* data = nullptr;  // null: there is no map, so every tile counts as mixed
  int64_t size[4] = {};
  int64_t count() const { return size[0] * size[1] * size[2] * size[3]; }

  __device__ const uint8_t* row(int64_t batch, int64_t head, int64_t query_tile) const {
    return data +
           (((size[0] == 1 ? 0 : batch) * size[1] + (size[1] == 1 ? 0 : head)) * size[2] + (size[2] == 1 ? 0 : query_tile)) *
               size[3];
  }
};

// The sizes of a problem's map; count() is 0 if a map is not worth its cost. The caller provides count() bytes as `data`.
MaskMap mask_map_of(const AttentionProblem& problem);
void fill_mask_map(const AttentionProblem& problem, const MaskMap& map, CUstream_st* stream);

// A bool mask as a warp holds the scores of 16 queries by 64 keys, one word per lane: bit 4 j + e belongs to the lane's
// accumulator e of columns 8 j to 8 j + 7 (wgmma.cuh), and is set if the mask shows the key. [batch, heads, queries / 16,
// keys / 64, 32]; a size is 1 where the mask is broadcast.
constexpr int kBitRows = 16;
struct MaskBits {
  unsigned* data = nullptr;
  int64_t size[4] = {};
  int64_t count() const { return size[0] * size[1] * size[2] * size[3] * kWarpSize; }
};

// A bool mask as a warp of the Hopper backward kernel holds the transposed scores of 16 keys by 64 queries, one word per lane.
// For j < 8, half < 2 and n = place(j, half), lane l has the key l / 4 + 8 * half: bit 15 - n for query 8 j + 2 * (l % 4), bit
// 31 - n for the query after it. [batch, heads, queries / 64, keys / 64, 4, 32]; a size is 1 where the mask is broadcast.
struct TransposedMaskBits {
  unsigned* data = nullptr;
  int64_t size[4] = {};
  static constexpr int kWords = kMaskMapTile / 16 * kWarpSize;  // per tile of the map
  FLASH_ONLINE_HD static constexpr int place(int j, int half) { return 8 * (1 - half) + j; }
  int64_t count() const { return size[0] * size[1] * size[2] * size[3] * kWords; }
};
// The bits of a problem in a workspace of count() words, or their sizes alone if it is null.
TransposedMaskBits transposed_mask_bits_of(const AttentionProblem& problem, void* workspace);
// Fills the bits, and the map.
void fill_transposed_mask_bits(const AttentionProblem& problem, const MaskMap& map, const TransposedMaskBits& bits,
                               CUstream_st* stream);

// Tables that the Hopper forward kernel reads in addition to the mask, or instead of it.
struct MaskTables {
  MaskBits bits;
  MaskMap map;
  int64_t bytes() const { return bits.count() * static_cast<int64_t>(sizeof(unsigned)) + map.count(); }
};

// The tables of a problem in a workspace of bytes() bytes, or their sizes alone if it is null.
MaskTables mask_tables_of(const AttentionProblem& problem, void* workspace);
void fill_mask_tables(const AttentionProblem& problem, const MaskTables& tables, CUstream_st* stream);

// Iterates over a range of blocks of kSize keys (kAlongKeys) or queries and skips those that the mask hides. A whole warp calls
// next(); all its lanes get the same answer.
template <int kSize, bool kAlongKeys>
class VisibleBlocks {
 public:
  // The number of the next block, or `end` if there is none. `clear`: the mask need not be read for it.
  __device__ __forceinline__ int next(bool& clear) {
    clear = false;
    while (next_ < end_) {
      if (!kinds_) return next_++;
      if (next_ >= known_end_) look_ahead();
      const unsigned left = ~hidden_ >> (kWarpSize - (known_end_ - next_));
      next_ = left ? next_ + __ffs(left) - 1 : known_end_;
      if (next_ < known_end_ && next_ < end_) {
        clear = clear_ >> (kWarpSize - (known_end_ - next_)) & 1;
        return next_++;
      }
    }
    return end_;
  }

 protected:
  // kinds: of the first map tile in the direction of iteration, null without a map. A block covers `tiles_across` map tiles in
  // the other direction. step: bytes from one row of the map to the next; along queries 0 if the map has a single row.
  __device__ VisibleBlocks(const uint8_t* kinds, int64_t step, int tiles_across, int begin, int end)
      : kinds_(kinds),
        step_(static_cast<int>(step)),
        tiles_across_(tiles_across),
        next_(begin),
        end_(end),
        known_end_(kinds ? begin : end) {}

 private:
  // Reads the kinds of the next 32 blocks, one per lane.
  __device__ void look_ahead() {
    static_assert(kSize <= kMaskMapTile && kMaskMapTile % kSize == 0);
    const int block = next_ + static_cast<int>(threadIdx.x) % kWarpSize;
    bool hidden = false, clear = false;
    if (block < end_) {
      const int tile = block * kSize / kMaskMapTile;
      const uint8_t* const first = kinds_ + (kAlongKeys ? (step_ == 1 ? 0 : tile) : int64_t{tile} * step_);
      hidden = clear = true;
      for (int n = 0; n < tiles_across_; ++n) {
        const auto kind = static_cast<MaskKind>(first[kAlongKeys ? n * step_ : n]);
        hidden &= kind == MaskKind::kHidden;
        clear &= kind == MaskKind::kClear;
      }
    }
    hidden_ = __ballot_sync(~0u, hidden);
    clear_ = __ballot_sync(~0u, clear);
    known_end_ = next_ + kWarpSize;
  }

  const uint8_t* kinds_;
  int step_, tiles_across_, next_, end_, known_end_;
  unsigned hidden_ = 0, clear_ = 0;  // bit n: block known_end_ - 32 + n
};

// The number of map tiles that a block of kSize queries or keys from `from` on covers, out of `count` in all. map_size: the
// map's tiles in this dimension.
template <int kSize>
__device__ __forceinline__ int map_tiles_covered(int64_t map_size, int from, int count) {
  return map_size == 1 ? 1 : min(ceil_div(count, kMaskMapTile) - from / kMaskMapTile, ceil_div(kSize, kMaskMapTile));
}

// The blocks of kKeys keys that some of the kQueries queries from `query` on may see.
template <int kQueries, int kKeys>
struct KeyBlocks : VisibleBlocks<kKeys, true> {
  __device__ KeyBlocks(const MaskMap& map, int64_t batch, int64_t head, int query, int queries, int begin, int end)
      : VisibleBlocks<kKeys, true>(map.data ? map.row(batch, head, query / kMaskMapTile) : nullptr, map.size[3],
                                   map_tiles_covered<kQueries>(map.size[2], query, queries), begin, end) {}
};

// Without a mask: every block.
struct AllBlocks {
  int block;
  __device__ __forceinline__ int next(bool&) { return block++; }
};

// The blocks of kQueries queries that may see some of the kKeys keys from `key` on.
template <int kQueries, int kKeys>
struct QueryBlocks : VisibleBlocks<kQueries, false> {
  __device__ QueryBlocks(const MaskMap& map, int64_t batch, int64_t head, int key, int keys, int begin, int end)
      : VisibleBlocks<kQueries, false>(
            map.data ? map.row(batch, head, 0) + (map.size[3] == 1 ? 0 : key / kMaskMapTile) : nullptr,
            map.size[2] == 1 ? 0 : map.size[3], map_tiles_covered<kKeys>(map.size[3], key, keys), begin, end) {}
};

}  // namespace flash_online::cuda
