// The order in which the CTAs of the Hopper forward kernel take work tiles of dense problems: what the host decides, and how
// each CTA walks through its tiles.
#pragma once

#include <algorithm>
#include <cstdint>

#include "../../../../core/problem.h"
#include "../../../hw/warp.h"
#include "../../common/tile_list.cuh"

namespace flash_online::cuda {

struct WorkTileCoord {
  int batch, head, row_tile;  // batch: over packed sequences the sequence; -1: there are no more tiles
};

// The number of tiles at the end of a head that are about the same work: all tiles, or those with a window that begins after
// the first key.
inline int64_t count_even_row_tiles(const Visibility& v, int64_t row_tiles, int64_t tile_rows) {
  if (v.left < 0) return v.right < 0 ? row_tiles : 0;
  if (v.right < 0) return 0;
  const int64_t left = std::min(v.left, row_tiles * tile_rows + std::max(v.offset, int64_t{0}));
  return row_tiles - std::clamp((left - v.offset + tile_rows - 1) / tile_rows, int64_t{0}, row_tiles);
}

// The keys and values of a section of heads should stay in the L2 cache: so much out of the 60 MiB of an H200.
constexpr int64_t kSectionBytes = 48 << 20;

// Heads per section, if tiles differ in work: as many as fill `min_rounds` rounds of `ctas` tiles, or some more if these fill
// their rounds better.
inline int64_t choose_section_heads(int64_t heads, int64_t q_heads_per_key_head, int64_t row_tiles, int64_t head_bytes,
                                    int64_t ctas, int64_t min_rounds) {
  const int64_t most = std::max(kSectionBytes / head_bytes, int64_t{1});
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

// The most work that any of nine CTAs gets, in tiles of keys, where tiles are dealt as TileScheduler does: a head's n-th tile
// is n tiles of keys long and takes kTileEnds more.
inline int64_t most_work(const HeadSections& sections, int64_t heads, int64_t row_tiles, int64_t ctas) {
  constexpr int64_t kSamples = 9, kTileEnds = 2;
  int64_t work[kSamples] = {}, round = 0;
  for (int64_t section = 0; section <= sections.last; ++section) {
    const int64_t here = section < sections.last ? sections.heads : heads - section * sections.heads, tiles = here * row_tiles;
    for (int64_t begin = 0; begin < tiles; begin += ctas, ++round)
      for (int64_t n = 0; n < kSamples; ++n) {
        const int64_t cta = n * (ctas - 1) / (kSamples - 1), index = begin + (round % 2 ? ctas - 1 - cta : cta);
        if (index < tiles) work[n] += row_tiles - index / here + kTileEnds;
      }
  }
  return *std::max_element(work, work + kSamples);
}

// Sections of `section` heads. What is left of the heads is a section of its own, or joins the last one or two, whichever ends
// first: the tiles of few heads do not fill a round, and the longest of them would be among the last to run. All heads are one
// section if that ends first and their keys and values fit.
inline HeadSections choose_sections(int64_t section, int64_t heads, int64_t row_tiles, int64_t head_bytes, int64_t ctas) {
  const auto sections_of = [&](int64_t size, int64_t last) {
    return HeadSections{.heads = static_cast<int>(size), .last = static_cast<int>(std::max(last, int64_t{0}))};
  };
  constexpr int64_t kManyRounds = 24;  // then an unfilled last round is short compared with the rest
  HeadSections best = sections_of(section, (heads - 1) / section);
  if (best.last == 0 || heads * row_tiles > kManyRounds * ctas) return best;
  int64_t least = most_work(best, heads, row_tiles, ctas);
  const auto consider = [&](const HeadSections& other) {
    const int64_t work = most_work(other, heads, row_tiles, ctas);
    if (work * 101 < least * 100) best = other, least = work;
  };
  consider(sections_of(section, heads / section - 1));
  consider(sections_of(section, heads / section - 2));
  if (heads * head_bytes <= kSectionBytes) consider(sections_of(heads, 0));
  return best;
}

struct TileSchedule {
  int row_tiles;  // per head
  int even_row_tiles;  // the last ones of a head, which are about the same work
  bool batch_innermost;  // heads are counted with the batch as the inner index, for a mask that the batch shares
  HeadSections sections;

  // The schedule of a dense problem with tiles of `tile_rows` queries.
  static TileSchedule make(const AttentionProblem& p, int64_t row_tiles, int64_t tile_rows, int section_rounds,
                           int q_heads_per_key_head, int64_t element_bytes, int64_t ctas) {
    const int64_t heads = p.batch * p.heads, even = count_even_row_tiles(p.visible, row_tiles, tile_rows),
                  uneven = row_tiles - even;
    HeadSections sections{.heads = static_cast<int>(heads), .last = 0};
    if (uneven > 0 && heads > 0) {
      constexpr int kWindowRounds = 4;
      const int64_t seen_keys =
                        even > 0 ? std::min(p.keys, p.visible.left + std::min(p.visible.right, p.keys) + tile_rows) : p.keys,
                    head_bytes = seen_keys * (p.head_dim + p.head_dim_v) * element_bytes / q_heads_per_key_head + 1,
                    section = choose_section_heads(heads, q_heads_per_key_head, uneven, head_bytes, ctas,
                                                   even > 0 ? std::max(section_rounds, kWindowRounds) : section_rounds);
      // The sections are little work compared with even tiles.
      sections = even > 0 ? HeadSections{.heads = static_cast<int>(section), .last = static_cast<int>((heads - 1) / section)}
                          : choose_sections(section, heads, uneven, head_bytes, ctas);
    }
    return {.row_tiles = static_cast<int>(row_tiles),
            .even_row_tiles = static_cast<int>(even),
            .batch_innermost = false,
            .sections = sections};
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
    for (; section_ <= schedule.sections.last; ++section_, round_begin_ = 0) {
      const int even = section_ == 0 ? heads * schedule.even_row_tiles : 0,
                uneven_row_tiles = schedule.row_tiles - schedule.even_row_tiles;
      const int first_head = section_ * schedule.sections.heads,
                heads_here = section_ < schedule.sections.last ? schedule.sections.heads : heads - first_head;
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

// The same tiles, where the host does not know which of them are long: with sparsity. Each CTA has its own first tile, and
// claims the others one by one from a counter in global memory.
struct ClaimingTileScheduler {
  // Called by a whole warp.
  template <class Arguments>
  __device__ WorkTileCoord next(const Arguments& a, unsigned* counter, int lane) {
    unsigned claimed = blockIdx.x;
    if (!is_first && lane == 0) claimed = gridDim.x + atomicAdd(counter, 1u);
    is_first = false;
    const int index = static_cast<int>(__shfl_sync(~0u, claimed, 0));
    const TileSchedule& schedule = a.schedule;
    const int heads = a.batch * a.heads, even = heads * schedule.even_row_tiles,
              uneven_row_tiles = schedule.row_tiles - schedule.even_row_tiles;
    if (index >= heads * schedule.row_tiles) return {-1, 0, 0};
    if (index < even) {
      const int head = index / schedule.even_row_tiles;
      return {head / a.heads, head % a.heads, schedule.row_tiles - 1 - index % schedule.even_row_tiles};
    }
    const HeadSections& sections = schedule.sections;
    const int section = min((index - even) / (sections.heads * uneven_row_tiles), sections.last),
              first_head = section * sections.heads, heads_here = section < sections.last ? sections.heads : heads - first_head,
              n = index - even - first_head * uneven_row_tiles, head = first_head + n % heads_here;
    return {head / a.heads, head % a.heads, uneven_row_tiles - 1 - n / heads_here};
  }

  bool is_first = true;
};

}  // namespace flash_online::cuda
