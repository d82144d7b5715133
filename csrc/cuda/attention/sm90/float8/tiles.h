// The tiles of the Hopper kernel of e4m3 attention.
#pragma once

namespace flash_online::cuda {

struct Float8Tile {
  int head_dim;
  int warpgroups;  // of 64 queries each
  int stages, query_stages;
  int parts;  // that a block's P V is computed in, one after another: registers for all columns are too many
  // Whether warpgroups have the tensor cores in turn, for a block's P V and the scores of the next block.
  bool takes_turns = false;
  bool overlaps = false;  // with turns: whether these scores are computed while P V is added to the results
};

// docs/lab/float8.md has what was measured.
constexpr Float8Tile float8_tile(int head_dim) {
  switch (head_dim) {
    case 64:
      return {
          .head_dim = 64, .warpgroups = 3, .stages = 4, .query_stages = 2, .parts = 1, .takes_turns = true, .overlaps = true};
    case 96: return {.head_dim = 96, .warpgroups = 3, .stages = 4, .query_stages = 2, .parts = 2};
    case 128: return {.head_dim = 128, .warpgroups = 3, .stages = 4, .query_stages = 2, .parts = 2};
    case 192: return {.head_dim = 192, .warpgroups = 2, .stages = 3, .query_stages = 1, .parts = 2};
    default: return {.head_dim = 256, .warpgroups = 2, .stages = 3, .query_stages = 1, .parts = 4, .takes_turns = true};
  }
}

}  // namespace flash_online::cuda
