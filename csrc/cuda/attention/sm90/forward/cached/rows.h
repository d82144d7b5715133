// The rows of a call over cached keys in tiles of the Hopper kernel.
#pragma once

#include "../../../../../core/integer.h"
#include "../../../../../core/problem.h"

namespace flash_online::cuda {

// The query heads that share keys become rows of a tile, query by query, as many as a power of two allows: 2^shift of them, at
// most 2^most. They must lie side by side in a box, and ALiBi is one head's.
inline int cached_group_shift(const AttentionProblem& p, int most = 6) {  // 6: the 64 rows of a warpgroup
  if ((score_mods(p) & kScoreModsOfHead) || p.query.stride[1] == 0) return 0;
  const int64_t group = p.heads / p.key_heads;
  int shift = 0;
  while (shift < most && group % (int64_t{2} << shift) == 0) ++shift;
  return shift;
}

// The same for tiles of so many rows.
inline int cached_group_shift_of(const AttentionProblem& p, int tile_rows) {
  int most = 0;
  while (tile_rows % (2 << most) == 0) ++most;
  return cached_group_shift(p, most);
}

// The number of tiles of `tile_rows` rows that read the same keys: of the longest sequence and all heads that share keys.
inline int64_t cached_tiles_per_key(const AttentionProblem& p, int tile_rows) {
  const int shift = cached_group_shift_of(p, tile_rows);
  return (p.heads / p.key_heads >> shift) * ceil_div(p.queries << shift, int64_t{tile_rows});
}

}  // namespace flash_online::cuda
