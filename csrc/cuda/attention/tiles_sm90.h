// How large the pieces are that forward_sm90.cuh works on, by head dim. A head dim between two rows runs in the next larger
// tile, which the copy engine fills up with zeros.
#pragma once

#include <cstdint>

namespace flash_online::cuda {

// A block of threads: `warpgroups` that compute, 64 queries each, and one that loads, `keys` at a time.
struct ForwardSm90 {
  int width, value_width;
  int warpgroups, keys;
  int stages;              // buffers of keys, and as many of values
  int query_buffers;       // of 64 queries each
  bool held_query;         // as the products' left operand in registers, so that its buffer is free at once
  bool staged_out;         // results leave through shared memory of their own and the copy engine, not from registers
  bool in_turn;            // warpgroups start their products one after another
  int registers, loader_registers;

  constexpr int threads() const { return 128 * (warpgroups + 1); }
  constexpr int queries() const { return 64 * warpgroups; }
};

inline constexpr ForwardSm90 kForwardSm90[] = {
    {64, 64, 3, 128, 3, 6, false, true, true, 160, 32},
    {128, 128, 2, 128, 2, 2, true, true, true, 232, 40},
    {256, 256, 2, 64, 2, 3, false, false, true, 232, 40},
};

consteval ForwardSm90 forward_sm90_tile(int width, int value_width) {
  for (const ForwardSm90& tile : kForwardSm90)
    if (tile.width == width && tile.value_width == value_width) return tile;
  throw "no row in kForwardSm90";
}

template <int kWidth, int kValueWidth>
struct ForwardSm90Tile {
  static constexpr ForwardSm90 kTile = forward_sm90_tile(kWidth, kValueWidth);
};

}  // namespace flash_online::cuda
