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
    {2, 32, false, 32, 2, 4, 64, 3},   {2, 64, false, 64, 2, 4, 64, 2},   {2, 96, false, 96, 2, 4, 64, 2},
    {2, 128, false, 128, 2, 4, 64, 2}, {2, 192, false, 192, 1, 8, 64, 1}, {2, 256, false, 256, 1, 8, 64, 1},
    {2, 32, true, 32, 1, 4, 64, 3},    {2, 64, true, 64, 1, 4, 64, 3},    {2, 96, true, 96, 1, 4, 64, 2},
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

}  // namespace flash_online::cuda
