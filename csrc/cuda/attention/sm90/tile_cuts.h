// Cuts the work tiles of the last wave into parts, so that it fills all SMs: on the host, how many tiles into how many parts;
// on the device, which part a CTA works on. Each tile stands for a sequence of blocks, all for equally many; a part is a
// stretch of that sequence.
#pragma once

#include <algorithm>
#include <cstdint>

#include "../../../core/config.h"
#include "../../../core/integer.h"

namespace flash_online::cuda {

// The item that a CTA works on: a part of a tile, or all of it.
struct TilePart {
  unsigned tile;
  unsigned number, count;  // of this part among those of its tile; count 1: all of it
  unsigned slot;  // among all parts; nothing where count is 1

  // The first of its blocks, of those of the tile, and how many.
  FLASH_ONLINE_HD unsigned begin(unsigned blocks) const {
    const unsigned extra = blocks % count;
    return blocks / count * number + (number < extra ? number : extra);
  }
  FLASH_ONLINE_HD unsigned length(unsigned blocks) const { return blocks / count + (number < blocks % count ? 1 : 0); }
};

// The costs that decide about cuts, in blocks.
struct TileCosts {
  int tile;  // what a tile or a part costs in addition to its blocks
  int least_part;  // the blocks of a part, at least
  int parts_per_block;  // as many parts cost a block more, for their sums' way through memory
  int tile_parts_per_block = 8;  // and so do as many parts of one tile, which are added one after another
  int waves_per_block = 8;  // in as many waves SMs get out of step by a block, so that less of the last one is lost
};

// Tiles go in the order of their numbers: first those that are not cut, then some in parts that take one round on all SMs, then
// the others in smaller parts, which end at about the same time on all SMs. A tile's parts are neighbours.
struct TileCuts {
  int64_t whole = 0;  // tiles that are not cut
  int coarse = 0, coarse_parts = 1;  // tiles after them, and parts of each
  int fine = 0, fine_parts = 1;  // tiles after these

  FLASH_ONLINE_HD int cut_tiles() const { return coarse + fine; }
  FLASH_ONLINE_HD int parts() const { return coarse * coarse_parts + fine * fine_parts; }
  FLASH_ONLINE_HD int64_t items() const { return whole + parts(); }

  FLASH_ONLINE_HD TilePart part_of(unsigned item) const {
    const unsigned uncut = static_cast<unsigned>(whole);
    if (item < uncut) return {item, 0, 1, 0};
    const unsigned slot = item - uncut, of_coarse = static_cast<unsigned>(coarse * coarse_parts);
    const bool is_fine = slot >= of_coarse;
    const unsigned first = uncut + (is_fine ? static_cast<unsigned>(coarse) : 0), n = is_fine ? slot - of_coarse : slot,
                   count = static_cast<unsigned>(is_fine ? fine_parts : coarse_parts);
    return {first + n / count, n % count, count, slot};
  }
  // The first part of the n-th cut tile.
  FLASH_ONLINE_HD TilePart first_part(int n) const {
    const bool is_fine = n >= coarse;
    const int slot = is_fine ? coarse * coarse_parts + (n - coarse) * fine_parts : n * coarse_parts;
    return {static_cast<unsigned>(whole + n), 0, static_cast<unsigned>(is_fine ? fine_parts : coarse_parts),
            static_cast<unsigned>(slot)};
  }

  // For `tiles` tiles of `blocks` blocks each, on `sms` SMs that take one item at a time.
  static TileCuts choose(int64_t tiles, int64_t blocks, int64_t sms, const TileCosts& costs) {
    const int64_t rest = tiles % sms, most_parts = sms + sms / 4, most_of_tile = blocks / costs.least_part;
    TileCuts best{.whole = tiles};
    if (rest == 0) return best;
    const auto time_of = [&](int64_t parts) { return ceil_div(blocks, parts) + costs.tile; };
    int64_t least_time = time_of(1) - tiles / sms / costs.waves_per_block;
    // Coarse parts for all of the rest; or one part more, and fine parts for the tiles that then do not fit.
    for (int64_t parts = 2; parts <= std::min({sms / rest + 1, sms, most_of_tile}); ++parts) {
      const int64_t coarse = std::min(rest, sms / parts), fine = rest - coarse;
      const int64_t most_fine = fine == 0 ? parts : std::min((most_parts - coarse * parts) / fine, most_of_tile);
      for (int64_t fine_parts = parts; fine_parts <= most_fine; ++fine_parts) {
        // SMs in two groups: those that have nothing to do at first, and those that take a coarse part.
        int64_t group[2] = {sms - coarse * parts, coarse * parts}, free_at[2] = {0, time_of(parts)}, end = free_at[1];
        for (int64_t left = fine * fine_parts; left > 0;) {
          const int next = group[0] > 0 && free_at[0] <= free_at[1] ? 0 : 1;
          left -= group[next];
          end = std::max(end, free_at[next] += time_of(fine_parts));
        }
        end += (coarse * parts + fine * fine_parts) / costs.parts_per_block +
               (fine > 0 ? fine_parts : parts) / costs.tile_parts_per_block;
        if (end >= least_time) continue;
        least_time = end;
        best = TileCuts{.whole = tiles - rest,
                        .coarse = static_cast<int>(coarse),
                        .coarse_parts = static_cast<int>(parts),
                        .fine = static_cast<int>(fine),
                        .fine_parts = static_cast<int>(fine_parts)};
      }
    }
    return best;
  }
};

}  // namespace flash_online::cuda
