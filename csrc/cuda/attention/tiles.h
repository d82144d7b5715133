// How large the pieces are that a kernel works on, by element and head dim. A head dim between two rows runs in the next larger
// tile, filled up with zeros in shared memory. A pair that has no row does not compile.
#pragma once

namespace flash_online::cuda {

// The head dims that have a tile of their own.
inline constexpr int kHeadDims[] = {32, 64, 96, 128, 192, 256, 512};

// forward_sm80.cuh: a block of threads takes `warps` * 16 * `row_tiles` queries and passes over the keys, `keys` at a time.
struct ForwardSm80 {
  int bytes, width;    // of an element; the head dim, of queries and keys
  bool everything;     // softcap, masks and so on: what they need of registers leaves a warp 16 rows
  int value_width;     // of the values' columns that one block of threads sums
  int row_tiles, warps, keys;
  int blocks;          // on a multiprocessor at a time, for the compiler's budget of registers
  constexpr int threads() const { return 32 * warps; }
  constexpr int queries() const { return warps * row_tiles * 16; }
};

inline constexpr ForwardSm80 kForwardSm80[] = {
    {2, 32, false, 32, 2, 4, 64, 2},   {2, 64, false, 64, 2, 4, 64, 2},   {2, 96, false, 96, 2, 4, 64, 2},
    {2, 128, false, 128, 2, 4, 64, 2}, {2, 192, false, 192, 1, 8, 64, 1}, {2, 256, false, 256, 1, 8, 64, 1},
    {2, 32, true, 32, 1, 4, 64, 2},    {2, 64, true, 64, 1, 4, 64, 2},    {2, 96, true, 96, 1, 4, 64, 2},
    {2, 128, true, 128, 1, 4, 64, 2},  {2, 192, true, 192, 1, 4, 64, 1},  {2, 256, true, 256, 1, 4, 64, 1},
    {2, 512, true, 256, 1, 4, 32, 1},  //
    {4, 32, true, 32, 1, 4, 64, 3},    {4, 64, true, 64, 1, 4, 64, 2},    {4, 96, true, 96, 1, 4, 64, 2},
    {4, 128, true, 128, 1, 4, 64, 2},  {4, 192, true, 192, 1, 4, 32, 1},  {4, 256, true, 256, 1, 4, 32, 1},
    {4, 512, true, 256, 1, 2, 16, 1},
};

consteval ForwardSm80 forward_sm80_tile(int bytes, int width, bool everything) {
  for (const ForwardSm80& tile : kForwardSm80)
    if (tile.bytes == bytes && tile.width == width && tile.everything == everything) return tile;
  throw "no row in kForwardSm80";
}

// backward_sm80.cuh: a block of threads takes `keys` keys and passes over the queries, `queries` at a time. Each product's result
// is cut over the warps: that of scores and of weights' gradients into `score_warps` pieces along the keys times the rest along
// the queries; the gradients of keys and values, and of queries, into so many pieces along their rows times the rest along columns.
struct BackwardSm80 {
  int bytes, width;    // as above
  bool everything;
  int keys, queries, warps;
  int score_warps;     // along the keys
  int score_split;     // along the queries; where there are fewer pieces than warps, the last warps have none
  // 0: weights stay with the warp that made them, which sums the gradients of its own keys and all columns in registers (and if
  // score_split > 1, of its own queries); else weights go through shared memory.
  int sum_warps;
  int query_warps;
  int stages;          // blocks of queries in shared memory
  int blocks;          // on a multiprocessor at a time, for the compiler's budget of registers
  constexpr int threads() const { return 32 * warps; }
};

// "Everything" tiles up to 128 fit into the 99 KiB of shared memory that GPUs other than data centres' have, masks included.
inline constexpr BackwardSm80 kBackwardSm80[] = {
    {2, 32, false, 128, 64, 8, 4, 2, 0, 4, 2, 1},  {2, 64, false, 128, 64, 8, 4, 2, 0, 4, 2, 1},
    {2, 96, false, 128, 64, 8, 8, 1, 0, 4, 2, 1},  {2, 128, false, 128, 64, 8, 8, 1, 0, 2, 2, 1},
    {2, 192, false, 64, 64, 8, 4, 2, 2, 2, 1, 1},  {2, 256, false, 64, 64, 8, 4, 2, 2, 2, 1, 1},
    {2, 32, true, 64, 64, 4, 4, 1, 0, 4, 1, 2},    {2, 64, true, 64, 64, 4, 4, 1, 0, 4, 1, 2},
    {2, 96, true, 64, 64, 4, 4, 1, 0, 4, 1, 2},    {2, 128, true, 64, 64, 4, 4, 1, 0, 2, 1, 2},
    {2, 192, true, 64, 32, 8, 4, 2, 2, 2, 1, 1},   {2, 256, true, 64, 32, 8, 4, 2, 2, 2, 1, 1},
    {2, 512, true, 32, 32, 8, 2, 4, 1, 2, 1, 1},  //
    {4, 32, true, 64, 64, 4, 4, 1, 0, 4, 1, 2},    {4, 64, true, 64, 32, 4, 4, 1, 0, 2, 1, 2},
    {4, 96, true, 64, 32, 4, 4, 1, 0, 2, 1, 1},    {4, 128, true, 64, 32, 4, 4, 1, 0, 2, 1, 1},
    {4, 192, true, 32, 32, 8, 2, 4, 2, 2, 1, 1},   {4, 256, true, 32, 32, 8, 2, 4, 1, 2, 1, 1},
    {4, 512, true, 16, 16, 8, 1, 2, 1, 1, 1, 1},
};

// backward_queries_sm80.cuh: a block of threads takes `warps` * 16 queries and sums `columns` of their gradients' columns.
struct BackwardQueriesSm80 {
  int bytes, width, columns, warps, keys;
};

inline constexpr BackwardQueriesSm80 kBackwardQueriesSm80[] = {
    {2, 32, 32, 4, 64},   {2, 64, 64, 4, 64},   {2, 96, 96, 4, 64},   {2, 128, 128, 4, 64}, {2, 192, 192, 4, 64},
    {2, 256, 256, 4, 64}, {2, 512, 256, 2, 32}, {4, 32, 32, 4, 64},   {4, 64, 64, 4, 64},   {4, 96, 96, 4, 64},
    {4, 128, 128, 4, 64}, {4, 192, 192, 4, 32}, {4, 256, 256, 2, 32}, {4, 512, 256, 1, 16},
};

consteval BackwardSm80 backward_sm80_tile(int bytes, int width, bool everything) {
  for (const BackwardSm80& tile : kBackwardSm80)
    if (tile.bytes == bytes && tile.width == width && tile.everything == everything) return tile;
  throw "no row in kBackwardSm80";
}

consteval BackwardQueriesSm80 backward_queries_sm80_tile(int bytes, int width) {
  for (const BackwardQueriesSm80& tile : kBackwardQueriesSm80)
    if (tile.bytes == bytes && tile.width == width) return tile;
  throw "no row in kBackwardQueriesSm80";
}

}  // namespace flash_online::cuda
