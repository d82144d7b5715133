// The static order in which the CTAs of the Hopper forward kernel take work tiles of dense problems: what the host decides, and
// how each CTA walks through its tiles.
#pragma once

#include <algorithm>
#include <cstdint>

#include "../../../../core/problem.h"
#include "../../../hw/warp.h"

namespace flash_online::cuda {

struct WorkTileCoord {
  int batch, head, row_tile;  // batch: over packed sequences the sequence; -1: there are no more tiles
};

// How many of the tiles of a head, its last ones, are about the same work: all, or those whose window begins after the first
// key.
inline int64_t count_even_row_tiles(const Visibility& v, int64_t row_tiles, int64_t tile_rows) {
  if (v.left < 0) return v.right < 0 ? row_tiles : 0;
  if (v.right < 0) return 0;
  const int64_t left = std::min(v.left, row_tiles * tile_rows + std::max(v.offset, int64_t{0}));
  return row_tiles - std::clamp((left - v.offset + tile_rows - 1) / tile_rows, int64_t{0}, row_tiles);
}

// How many heads make a section, where tiles differ in work: as many as fill `min_rounds` rounds of `ctas` tiles, or some more
// if these fill their rounds better. The keys and values of a section should stay in the L2 cache.
inline int64_t choose_section_heads(int64_t heads, int64_t q_heads_per_key_head, int64_t row_tiles, int64_t head_bytes,
                                    int64_t ctas, int64_t min_rounds) {
  constexpr int64_t kCacheBytes = 48 << 20;  // out of the 60 MiB of an H200
  const int64_t most = std::max(kCacheBytes / head_bytes, int64_t{1});
  int64_t best = 1, best_tiles = 0, best_slots = 1;
  for (int64_t rounds = min_rounds; rounds < min_rounds + 8; ++rounds) {
    int64_t n = std::max(std::min({rounds * ctas / row_tiles, most, heads}), int64_t{1});
    if (n > q_heads_per_key_head) n -= n % q_heads_per_key_head;  // heads of the same keys stay together
    const int64_t tiles = n * row_tiles, slots = (tiles + ctas - 1) / ctas * ctas;
    if (tiles * best_slots * 100 <= best_tiles * slots * 101) continue;
    best = n, best_tiles = tiles, best_slots = slots;
  }
  return best;
}

struct TileSchedule {
  int row_tiles;  // per head
  int even_row_tiles;  // the last ones of a head, which are about the same work
  bool batch_innermost;  // heads are counted with the batch as the inner index, for a mask that the batch shares
  int section_heads;

  // Of a dense problem, whose tiles have `tile_rows` queries.
  static TileSchedule make(const AttentionProblem& p, int64_t row_tiles, int64_t tile_rows, int section_rounds,
                           int q_heads_per_key_head, int64_t element_bytes, int64_t ctas) {
    const int64_t heads = p.batch * p.heads, even = count_even_row_tiles(p.visible, row_tiles, tile_rows),
                  uneven = row_tiles - even;
    int64_t section = heads;
    if (uneven > 0) {
      constexpr int kWindowRounds = 4;
      const int64_t seen_keys =
                        even > 0 ? std::min(p.keys, p.visible.left + std::min(p.visible.right, p.keys) + tile_rows) : p.keys,
                    head_bytes = seen_keys * (p.head_dim + p.head_dim_v) * element_bytes;
      section = choose_section_heads(heads, q_heads_per_key_head, uneven, head_bytes / q_heads_per_key_head + 1, ctas,
                                     even > 0 ? std::max(section_rounds, kWindowRounds) : section_rounds);
    }
    return {.row_tiles = static_cast<int>(row_tiles),
            .even_row_tiles = static_cast<int>(even),
            .batch_innermost = false,
            .section_heads = static_cast<int>(section)};
  }
};

// The tiles of one CTA. First come the tiles of even work, of all heads, one head after another. Then come the others, one
// section of heads after another, and within a section the most work first (under a causal mask the last rows see the most
// keys). Tiles are dealt in rounds of one tile per CTA, every other round backwards, so that the sums of work agree. The first
// section goes on in the round in which the even tiles end, every other section begins with a round of its own: that keeps the
// pairs of rounds together.
class TileScheduler {
 public:
  // a: the arguments of the kernel, which have the schedule, the batch and the heads per batch.
  template <class Arguments>
  __device__ WorkTileCoord next(const Arguments& a) {
    const TileSchedule& schedule = a.schedule;
    const int ctas = static_cast<int>(gridDim.x), cta = static_cast<int>(blockIdx.x), heads = a.batch * a.heads;
    for (; section_ * schedule.section_heads < heads; ++section_, round_begin_ = 0) {
      const int even = section_ == 0 ? heads * schedule.even_row_tiles : 0,
                uneven_row_tiles = schedule.row_tiles - schedule.even_row_tiles;
      const int first_head = section_ * schedule.section_heads, heads_here = min(schedule.section_heads, heads - first_head);
      const int tiles = even + heads_here * uneven_row_tiles;
      while (round_begin_ < tiles) {
        const int index = round_begin_ + (round_ % 2 ? ctas - 1 - cta : cta);
        ++round_;
        round_begin_ += ctas;
        if (index < tiles) {
          // Even tiles lie as [head][row tile], the others as [row tile][head of the section].
          const bool is_even = index < even;
          const int n = is_even ? index : index - even, outer = n / (is_even ? schedule.even_row_tiles : heads_here),
                    inner = n - outer * (is_even ? schedule.even_row_tiles : heads_here);
          const int head = is_even ? outer : first_head + inner;
          const int row_tile = is_even ? schedule.row_tiles - 1 - inner : uneven_row_tiles - 1 - outer;
          if (schedule.batch_innermost) return {head % a.batch, head / a.batch, row_tile};
          return {head / a.heads, head % a.heads, row_tile};
        }
      }
    }
    return {-1, 0, 0};
  }

 private:
  int round_ = 0, section_ = 0;
  int round_begin_ = 0;  // the first tile of this round, within the section
};

}  // namespace flash_online::cuda
