// How large the pieces are that forward_sm90.cuh and backward_sm90.cuh work on, by head dim. A head dim between two rows runs
// in the next larger tile, which the copy engine fills up with zeros.
#pragma once

namespace flash_online::cuda {

// A block of threads: `warpgroups` that compute, 64 queries each (or all the same: split_values), and one that loads, `keys` at
// a time.
struct ForwardSm90 {
  int head_dim, head_dim_v;
  int warpgroups, keys;
  int stages;  // buffers of keys, and as many of values
  int query_buffers;  // of 64 queries each
  bool held_query;  // as the products' left operand in registers, so that its buffer is free behind the first of them
  bool staged_out;  // results leave through shared memory of their own and the copy engine, not from registers
  bool in_turn;  // warpgroups start their products one after another
  int section_rounds;  // how many tiles a block of threads takes from the heads that run side by side, under a causal mask
  int registers, loader_registers;
  // All warpgroups take the same 64 queries: each makes all of their scores, but its part of the results' columns alone. Keys
  // come in parts of the head dim.
  bool split_values = false;
  int blocks = 1;  // of threads, on a multiprocessor at a time
  // Of a row for little work, without everything: it takes sequences of up to so many queries, windows of up to so many keys,
  // and what would leave half of the sm_count without a tile of the next row's. 0: a row for all.
  int most_queries = 0, most_window = 0;
  int drawers = 0, drawer_registers = 0;  // warps that draw what dropout keeps

  constexpr int threads() const { return 128 * (warpgroups + 1) + 32 * drawers; }
  constexpr int row_groups() const { return split_values ? 1 : warpgroups; }
  constexpr int queries() const { return 64 * row_groups(); }
  constexpr int key_parts() const { return split_values ? 2 : 1; }
  constexpr int key_stages() const { return split_values ? 3 : stages; }  // buffers of a part each
};

// Of one width those for little work first.
inline constexpr ForwardSm90 kForwardSm90[] = {
    {64, 64, 1, 64, 3, 2, false, true, false, 8, 128, 32, false, 3, 256, 512},
    {64, 64, 3, 128, 3, 6, false, true, true, 8, 160, 32},
    {96, 96, 2, 128, 2, 2, true, true, true, 1, 232, 40},
    {128, 128, 1, 64, 2, 1, true, true, false, 1, 208, 40, false, 2, 64, 128},
    {128, 128, 2, 128, 2, 2, true, true, true, 1, 232, 40},
    {192, 128, 2, 96, 2, 2, true, true, true, 1, 232, 40},
    {192, 192, 2, 96, 2, 3, false, false, true, 1, 232, 40},
    {256, 256, 2, 64, 2, 3, false, false, true, 1, 232, 40},
    {512, 512, 2, 64, 1, 1, false, false, false, 1, 232, 40, true},
};

inline constexpr int kForwardSm90Rows = sizeof(kForwardSm90) / sizeof(kForwardSm90[0]);

inline constexpr int kWidestEverythingSm90 = 192, kWidestPackedSm90 = 256;

// What a kernel has besides plain attention: nothing, everything (softcap, ALiBi, bool masks, dropout) but a float mask, or
// that too, whose tiles take shared memory.
enum class ForwardSm90Features { kNothing, kEverything, kFloatMask };

// A row, and what with. Masks are known by blocks of 64 keys, so these are what is read or passed over.
template <int kRow, ForwardSm90Features kFeatures, bool kOfPacked>
struct ForwardSm90Tile {
  static constexpr bool kEverything = kFeatures != ForwardSm90Features::kNothing,
                        kFloatMask = kFeatures == ForwardSm90Features::kFloatMask;
  static constexpr bool kPacked = kOfPacked;
  static constexpr ForwardSm90 kTile = [] {
    ForwardSm90 tile = kForwardSm90[kRow];
    if (kEverything) {
      tile.keys = 64;
      tile.stages = tile.head_dim > 128 ? 3 : tile.head_dim > 64 ? 4 : 6;
      if (kFloatMask) tile.stages = tile.head_dim > 128 ? 2 : 3;
      tile.in_turn = false;
      tile.drawers = tile.head_dim > 128 || kFloatMask ? 4 : 8;
      const bool many = tile.drawers == 8;
      tile.registers = tile.warpgroups == 3 ? (many ? 120 : 128) : many ? 184 : tile.head_dim > 128 ? 216 : 208;
      tile.loader_registers = tile.head_dim > 128 ? 40 : 48;
      tile.drawer_registers = many ? 32 : tile.loader_registers;
    } else if (kPacked && tile.warpgroups == 1) {  // there is more to plan
      tile.blocks = 2;
      tile.registers = 200;
      tile.loader_registers = 56;
    } else if (kPacked && tile.head_dim <= 192) {
      if (tile.warpgroups == 3 && tile.keys > 96) tile.keys = 96;
      tile.registers = tile.warpgroups == 3 ? 152 : 224;
      tile.loader_registers = 56;
    }
    return tile;
  }();
};

// What a kernel of backward_sm90.cuh has besides plain attention: nothing; a bool mask, a mask of 16 bits, ALiBi (in halves:
// where a bool mask hides much); dropout, a bool mask, ALiBi; softcap, any mask, ALiBi, dropout, any scale.
enum class BackwardSm90Features { kNothing, kMasks, kMaskHalves, kDropout, kEverything };

// backward_sm90.cuh: a block of threads is warpgroups of 64 keys each and a warp that loads, `queries` at a time. Where there
// are 64 keys in all, three warpgroups stand in line, or one is alone.
struct BackwardSm90 {
  int head_dim, head_dim_v;
  BackwardSm90Features with;
  int keys, queries;
  // Not with everything, nor in line.
  bool lse_ahead;  // a block's lse is read into registers before its scores are there
  bool in_turn;  // warpgroups start their scores one after another
  bool sends_late;  // gradients of queries leave amid the next block, and not at once
  int registers, loader_registers;
  int drawers = 0;  // warps that draw what dropout keeps, a quarter of a block each
  int others_registers = 0;  // theirs, or the third warpgroup's in line
  int warpgroups = 2;  // that compute, but for the third in line
  int blocks = 1;  // of threads, on a multiprocessor at a time
  // A block of threads stays for one block of keys after another where sequences have up to so many keys.
  int most_keys_staying = 0;

  constexpr bool in_line() const { return keys == 64 && warpgroups == 2; }
  constexpr int threads() const { return 128 * (warpgroups + 1 + in_line()) + 32 * drawers; }
};

inline constexpr BackwardSm90 kBackwardSm90[] = {
    {64, 64, BackwardSm90Features::kNothing, 128, 128, false, false, true, 240, 24, 0, 0, 2, 1, 1 << 28},
    {64, 64, BackwardSm90Features::kMasks, 128, 128, false, false, true, 232, 40},
    {96, 96, BackwardSm90Features::kNothing, 128, 64, true, true, false, 240, 24},
    {128, 128, BackwardSm90Features::kNothing, 128, 64, true, true, false, 240, 24, 0, 0, 2, 1, 1024},
    {128, 128, BackwardSm90Features::kMasks, 128, 64, true, false, false, 240, 24},
    {128, 128, BackwardSm90Features::kMaskHalves, 64, 64, false, false, false, 232, 24, 0, 0, 1, 2},
    {128, 128, BackwardSm90Features::kDropout, 128, 64, false, false, false, 224, 24, 4, 40},
    {128, 128, BackwardSm90Features::kEverything, 128, 64, false, false, false, 240, 24},
    {192, 128, BackwardSm90Features::kNothing, 64, 64, false, false, false, 208, 24, 0, 72},
    {192, 192, BackwardSm90Features::kNothing, 64, 64, false, false, false, 208, 24, 0, 72},
    {256, 256, BackwardSm90Features::kNothing, 64, 64, false, false, false, 208, 24, 0, 72},
};

inline constexpr int kWidestEverythingBackwardSm90 = 128;

consteval BackwardSm90 backward_sm90_tile(int head_dim, int head_dim_v, BackwardSm90Features with) {
  for (const BackwardSm90& tile : kBackwardSm90)
    if (tile.head_dim == head_dim && tile.head_dim_v == head_dim_v && tile.with == with) return tile;
  throw "no row in kBackwardSm90";
}

// A row. kThatStays: a block of threads takes one block of keys after another: while the gradients of one's keys are stored,
// the next one's queries, keys and values are on their way.
template <int kHeadDim, int kHeadDimV, BackwardSm90Features kFeatures, bool kThatStays>
struct BackwardSm90Tile {
  static constexpr BackwardSm90 kTile = backward_sm90_tile(kHeadDim, kHeadDimV, kFeatures);
  static constexpr bool kStays = kThatStays;
};

}  // namespace flash_online::cuda
