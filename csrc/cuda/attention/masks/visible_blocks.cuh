// The blocks of keys, or of queries, that a tile's loop takes: those that neither the map of a mask nor sparsity hides.
#pragma once

#include "../../../core/integer.h"
#include "mask_map.cuh"
#include "sparsity.cuh"

namespace flash_online::cuda {

// What is known of the tiles of scores before these are computed.
struct TileTables {
  MaskMap map;
  SpanTables spans;

  // Each table begins at a multiple of 16 bytes.
  int64_t bytes() const { return round_up(map.count(), int64_t{16}) + spans.bytes(); }
};

// The tables of a problem in a workspace of bytes() bytes, or their sizes alone if it is null.
TileTables tile_tables_of(const AttentionProblem& problem, void* workspace);
void fill_tile_tables(const AttentionProblem& problem, const TileTables& tables, CUstream_st* stream);

// Iterates over a range of blocks of kSize keys (kAlongKeys) or queries and skips those that are hidden. A whole warp calls
// next(); all its lanes get the same answer.
template <int kSize, bool kAlongKeys>
class VisibleBlocks {
 public:
  // For the rows [across, last_across) in the other direction, and `count` rows in the direction of iteration. No tables: every
  // block is taken.
  __device__ __forceinline__ VisibleBlocks(const AttentionProblem& problem, const TileTables* tables, int64_t batch,
                                           int64_t head, int across, int last_across, int count, int begin, int end)
      : problem_(&problem),
        tables_(tables),
        batch_(batch),
        head_(head),
        across_(across),
        last_across_(last_across),
        count_(count),
        next_(begin),
        end_(end),
        limit_(end),
        known_end_(begin),
        asks_(tables && (tables->map.data || problem.is_sparse())) {
    if (!tables) return;
    const auto& [queries, keys] = tables->spans;
    (kAlongKeys ? keys : queries).template narrow<kSize>(batch, head, across, last_across, next_, limit_);
    known_end_ = next_;
  }

  // The number of the next block, or `end` if there is none. `clear`: neither the mask nor sparsity need be read for it.
  __device__ __forceinline__ int next(bool& clear) {
    clear = false;
    while (next_ < limit_) {
      if (!asks_) return next_++;
      if (next_ >= known_end_) look_ahead();
      const unsigned left = ~hidden_ >> (kWarpSize - (known_end_ - next_));
      next_ = left ? next_ + __ffs(left) - 1 : known_end_;
      if (next_ < known_end_ && next_ < limit_) {
        clear = clear_ >> (kWarpSize - (known_end_ - next_)) & 1;
        return next_++;
      }
    }
    return end_;
  }

 private:
  // Finds out about the next 32 blocks, one per lane.
  __device__ __forceinline__ void look_ahead() {
    static_assert(kSize <= kMaskMapTile && kMaskMapTile % kSize == 0);
    const int block = next_ + static_cast<int>(threadIdx.x) % kWarpSize;
    bool hidden = false, clear = false;
    if (block < limit_) {
      const auto add = [&](MaskKind kind) { hidden |= kind == MaskKind::kHidden, clear &= kind == MaskKind::kClear; };
      clear = true;
      if (tables_->map.data)
        add(kind_in_map(block * kSize / kMaskMapTile));
      else if (problem_->mask.data)
        clear = false;
      const TileSparsity sparsity(*problem_, tables_->spans, batch_, head_);
      if (sparsity.exists()) {
        const int from = block * kSize, to = min(from + kSize, count_);
        add(kAlongKeys ? sparsity.kind(across_, last_across_, from, to) : sparsity.kind(from, to, across_, last_across_));
      }
    }
    hidden_ = __ballot_sync(~0u, hidden);
    clear_ = __ballot_sync(~0u, clear);
    known_end_ = next_ + kWarpSize;
  }

  // `tile`: in the direction of iteration. A block may cover several of the map's tiles in the other direction.
  __device__ __forceinline__ MaskKind kind_in_map(int tile) const {
    constexpr int kAlong = kAlongKeys ? 3 : 2, kAcross = kAlongKeys ? 2 : 3;  // the map's dimensions
    const MaskMap& map = tables_->map;
    const int64_t row_step = map.size[3], along = map.size[kAlong] == 1 ? 0 : tile;
    const uint8_t* const plane = map.row(batch_, head_, 0);
    const bool shared = map.size[kAcross] == 1;
    const int first = shared ? 0 : across_ / kMaskMapTile, last = shared ? 1 : ceil_div(last_across_, kMaskMapTile);
    bool hidden = true, clear = true;
    for (int n = first; n < last; ++n) {
      const auto kind = static_cast<MaskKind>(plane[kAlongKeys ? n * row_step + along : along * row_step + n]);
      hidden &= kind == MaskKind::kHidden;
      clear &= kind == MaskKind::kClear;
    }
    return hidden ? MaskKind::kHidden : clear ? MaskKind::kClear : MaskKind::kMixed;
  }

  const AttentionProblem* problem_;
  const TileTables* tables_;
  int64_t batch_, head_;
  int across_, last_across_, count_;
  int next_, end_, limit_, known_end_;  // limit_: no block from there on is visible
  bool asks_;  // whether anything may hide blocks
  unsigned hidden_ = 0, clear_ = 0;  // bit n: block known_end_ - 32 + n
};

// The blocks of kKeys keys that some of the queries [query, last_query) may see.
template <int kKeys>
using KeyBlocks = VisibleBlocks<kKeys, true>;
// The blocks of kQueries queries that may see some of the keys [key, last_key).
template <int kQueries>
using QueryBlocks = VisibleBlocks<kQueries, false>;

// Without tables: every block.
struct AllBlocks {
  int block;
  __device__ __forceinline__ int next(bool&) { return block++; }
};

}  // namespace flash_online::cuda
