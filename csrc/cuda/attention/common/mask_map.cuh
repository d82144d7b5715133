// What is known of a mask before the scores are made: for each of its blocks of 64 x 64 whether it hides all, nothing, or some.
// Hidden blocks are passed over, keys and values unread; of blocks that hide nothing (and add nothing) the mask is not read
// again.
#pragma once

#include "../../../core/config.h"
#include "../../../core/problem.h"
#include "../../hw/launch.h"

namespace flash_online::cuda {

constexpr int kMaskMapTile = 64;  // queries and keys

enum class MaskKind : uint8_t { kMixed = 0, kHidden = 1, kNothing = 2 };

// One byte a block, [batch, heads, queries / 64, keys / 64], 1 where the mask is broadcast.
struct MaskMap {
  uint8_t* data = nullptr;  // null: every block may hide some
  int64_t size[4] = {};
  int64_t count() const { return size[0] * size[1] * size[2] * size[3]; }

  __device__ const uint8_t* row(int64_t batch, int64_t head, int64_t query_block) const {
    return data +
           (((size[0] == 1 ? 0 : batch) * size[1] + (size[1] == 1 ? 0 : head)) * size[2] + (size[2] == 1 ? 0 : query_block)) *
               size[3];
  }
};

// The map that a problem is worth, without its memory; no elements: none.
MaskMap mask_map_of(const AttentionProblem& problem);
void fill_mask_map(const AttentionProblem& problem, const MaskMap& map, CUstream_st* stream);

// A bool mask as warps hold the scores of 16 queries by 64 keys, a word a lane: bit 4 j + e is the lane's accumulator e of
// columns 8 j to 8 j + 7 (wgmma.cuh), set where the mask shows the key. [batch, heads, queries / 16, keys / 64, 32], 1 where
// the mask is broadcast.
constexpr int kBitRows = 16;
struct MaskBits {
  unsigned* data = nullptr;
  int64_t size[4] = {};
  int64_t count() const { return size[0] * size[1] * size[2] * size[3] * kWarpSize; }
};

// The same as backward_sm90's warps hold scores transposed, of 16 keys by 64 queries: of the queries 8 j + 2 place and the next
// and the key `group`, + 8 where half is 1, the bits 15 - n and 31 - n, n = place(j, half), lanes being 4 * group + place.
// [batch, heads, queries / 64, keys / 64, 4, 32], 1 where the mask is broadcast.
struct TransposedMaskBits {
  unsigned* data = nullptr;
  int64_t size[4] = {};
  static constexpr int kWords = kMaskMapTile / 16 * kWarpSize;  // of a block of the map
  FLASH_ONLINE_HD static constexpr int place(int j, int half) { return 8 * (1 - half) + j; }
  int64_t count() const { return size[0] * size[1] * size[2] * size[3] * kWords; }
};
// In a workspace of count() words; null: the sizes alone.
TransposedMaskBits transposed_mask_bits_of(const AttentionProblem& problem, void* workspace);
// Fills them, and the map.
void fill_transposed_mask_bits(const AttentionProblem& problem, const MaskMap& map, const TransposedMaskBits& bits,
                               CUstream_st* stream);

// What forward_sm90 reads of a mask beside the mask.
struct MaskTables {
  MaskBits bits;
  MaskMap map;
  int64_t bytes() const { return bits.count() * static_cast<int64_t>(sizeof(unsigned)) + map.count(); }
};

// In a workspace of as many bytes() as the tables of a problem take; null: sizes alone.
MaskTables mask_tables_of(const AttentionProblem& problem, void* workspace);
void fill_mask_tables(const AttentionProblem& problem, const MaskTables& tables, CUstream_st* stream);

// Blocks of kSize queries or keys in the order of a range, those that the mask hides passed over. A whole warp asks; all get
// the same answer.
template <int kSize, bool kAlongKeys>
class SeenBlocks {
 public:
  // The number of the next block, `end` if there is none; whether the mask hides nothing in it.
  __device__ __forceinline__ int next(bool& nothing) {
    nothing = false;
    while (next_ < end_) {
      if (!kinds_) return next_++;
      if (next_ >= known_end_) look_ahead();
      const unsigned left = ~hidden_ >> (kWarpSize - (known_end_ - next_));
      next_ = left ? next_ + __ffs(left) - 1 : known_end_;
      if (next_ < known_end_ && next_ < end_) {
        nothing = nothing_ >> (kWarpSize - (known_end_ - next_)) & 1;
        return next_++;
      }
    }
    return end_;
  }

 protected:
  // kinds: of the map's first block on the way, null without a map; a block covers `taken` beside each other. step: bytes from
  // one row of the map to the next; along queries 0 where there is one row only.
  __device__ SeenBlocks(const uint8_t* kinds, int64_t step, int taken, int begin, int end)
      : kinds_(kinds), step_(static_cast<int>(step)), taken_(taken), next_(begin), end_(end), known_end_(kinds ? begin : end) {}

 private:
  // Of 32 blocks, one a lane.
  __device__ void look_ahead() {
    static_assert(kSize <= kMaskMapTile && kMaskMapTile % kSize == 0);
    const int block = next_ + static_cast<int>(threadIdx.x) % kWarpSize;
    bool hidden = false, nothing = false;
    if (block < end_) {
      const int place = block * kSize / kMaskMapTile;
      const uint8_t* const first = kinds_ + (kAlongKeys ? (step_ == 1 ? 0 : place) : int64_t{place} * step_);
      hidden = nothing = true;
      for (int n = 0; n < taken_; ++n) {
        const auto kind = static_cast<MaskKind>(first[kAlongKeys ? n * step_ : n]);
        hidden &= kind == MaskKind::kHidden;
        nothing &= kind == MaskKind::kNothing;
      }
    }
    hidden_ = __ballot_sync(~0u, hidden);
    nothing_ = __ballot_sync(~0u, nothing);
    known_end_ = next_ + kWarpSize;
  }

  const uint8_t* kinds_;
  int step_, taken_, next_, end_, known_end_;
  unsigned hidden_ = 0, nothing_ = 0;  // bit n: block known_end_ - 32 + n
};

// How many of a map's blocks, out of those that hold `count` rows or columns, a block of kSize from `from` on covers.
template <int kSize>
__device__ __forceinline__ int map_blocks(int64_t map_size, int from, int count) {
  return map_size == 1
             ? 1
             : min((count + kMaskMapTile - 1) / kMaskMapTile - from / kMaskMapTile, (kSize + kMaskMapTile - 1) / kMaskMapTile);
}

// Blocks of kKeys keys that some of the kQueries queries from `query` on may see.
template <int kQueries, int kKeys>
struct KeyBlocks : SeenBlocks<kKeys, true> {
  __device__ KeyBlocks(const MaskMap& map, int64_t batch, int64_t head, int query, int queries, int begin, int end)
      : SeenBlocks<kKeys, true>(map.data ? map.row(batch, head, query / kMaskMapTile) : nullptr, map.size[3],
                                map_blocks<kQueries>(map.size[2], query, queries), begin, end) {}
};

// Blocks of kQueries queries that may see some of the kKeys keys from `key` on.
template <int kQueries, int kKeys>
struct QueryBlocks : SeenBlocks<kQueries, false> {
  __device__ QueryBlocks(const MaskMap& map, int64_t batch, int64_t head, int key, int keys, int begin, int end)
      : SeenBlocks<kQueries, false>(map.data ? map.row(batch, head, 0) + (map.size[3] == 1 ? 0 : key / kMaskMapTile) : nullptr,
                                    map.size[2] == 1 ? 0 : map.size[3], map_blocks<kKeys>(map.size[3], key, keys), begin, end) {
  }
};

}  // namespace flash_online::cuda
