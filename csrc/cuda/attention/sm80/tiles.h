// How large the pieces are that a kernel works on, by element and head dim. A head dim between two rows runs in the next larger
// tile, filled up with zeros in shared memory. A pair that has no row does not compile.
#pragma once

namespace flash_online::cuda {

// The head dims that have a tile of their own.
inline constexpr int kHeadDims[] = {32, 64, 96, 128, 192, 256, 512};

// What a kernel is made for.
enum class Variant : signed char {
  kPlain,  // ranges of keys alone
  kEverything,  // with softcap, ALiBi, masks, dropout and any scale
  kSmall,  // the same where kEverything takes more shared memory than the GPU has: 163 KiB (8.0), 99 KiB (8.6, 8.9, 12.x)
};

inline constexpr Variant kPlain = Variant::kPlain, kAll = Variant::kEverything, kSmall = Variant::kSmall;

template <class Tile, int kCount>
constexpr const Tile* find_tile(const Tile (&tiles)[kCount], int bytes, int head_dim, Variant variant) {
  for (const Tile& tile : tiles)
    if (tile.bytes == bytes && tile.head_dim == head_dim && tile.variant == variant) return &tile;
  return nullptr;
}

// forward_sm80.cuh: a block of threads takes `warps` * 16 * `row_tiles` queries and passes over the keys, `keys` at a time.
struct ForwardSm80 {
  // Of an element in shared memory: 2; of a float in three pieces 6, in two 4. The head dim, of queries and keys.
  int bytes, head_dim;
  Variant variant;  // what all options need of registers leaves a warp 16 rows
  int head_dim_v;  // of the values' columns that one block of threads sums
  int row_tiles, warps, keys;
  int blocks;  // on a multiprocessor at a time, for the compiler's budget of registers
  constexpr int threads() const { return 32 * warps; }
  constexpr int queries() const { return warps * row_tiles * 16; }
};

inline constexpr ForwardSm80 kForwardSm80[] = {
    {2, 32, kPlain, 32, 2, 4, 64, 2},   {2, 64, kPlain, 64, 2, 4, 64, 2},   {2, 96, kPlain, 96, 2, 4, 64, 2},
    {2, 128, kPlain, 128, 2, 4, 64, 2}, {2, 192, kPlain, 192, 1, 8, 64, 1}, {2, 256, kPlain, 256, 1, 8, 64, 1},
    {2, 32, kAll, 32, 1, 4, 64, 2},     {2, 64, kAll, 64, 1, 4, 64, 2},     {2, 96, kAll, 96, 1, 4, 64, 2},
    {2, 128, kAll, 128, 1, 4, 64, 2},   {2, 192, kAll, 192, 1, 4, 64, 1},   {2, 256, kAll, 256, 1, 4, 64, 1},
    {2, 512, kPlain, 256, 1, 8, 32, 1}, {2, 512, kAll, 256, 1, 8, 32, 1},   {2, 512, kSmall, 256, 1, 4, 32, 1},
    {6, 32, kPlain, 32, 1, 4, 64, 2},   {6, 64, kPlain, 64, 1, 4, 64, 2},   {6, 96, kPlain, 96, 1, 8, 32, 1},
    {6, 128, kPlain, 128, 1, 8, 32, 1}, {6, 192, kPlain, 192, 1, 4, 32, 1}, {6, 256, kPlain, 256, 1, 4, 32, 1},
    {6, 32, kAll, 32, 1, 4, 64, 2},     {6, 64, kAll, 64, 1, 4, 32, 2},     {6, 96, kAll, 96, 1, 4, 32, 2},
    {6, 128, kAll, 128, 1, 8, 32, 1},   {6, 192, kAll, 192, 1, 4, 32, 1},   {6, 256, kAll, 256, 1, 4, 32, 1},
    {6, 512, kAll, 256, 1, 2, 16, 1},   {6, 128, kSmall, 128, 1, 4, 16, 1}, {6, 192, kSmall, 192, 1, 2, 16, 1},
    {4, 32, kPlain, 32, 1, 4, 64, 2},   {4, 64, kPlain, 64, 1, 4, 64, 2},   {4, 96, kPlain, 96, 1, 8, 32, 1},
    {4, 128, kPlain, 128, 1, 8, 64, 1}, {4, 192, kPlain, 192, 1, 8, 32, 1}, {4, 256, kPlain, 256, 1, 4, 32, 1},
    {4, 32, kAll, 32, 1, 4, 64, 2},     {4, 64, kAll, 64, 1, 4, 32, 2},     {4, 96, kAll, 96, 1, 4, 32, 2},
    {4, 128, kAll, 128, 1, 8, 32, 1},   {4, 192, kAll, 192, 1, 4, 32, 1},   {4, 256, kAll, 256, 1, 4, 32, 1},
};

constexpr bool has_forward_sm80_tile(int bytes, int head_dim, Variant variant) {
  return find_tile(kForwardSm80, bytes, head_dim, variant) != nullptr;
}

consteval ForwardSm80 forward_sm80_tile(int bytes, int head_dim, Variant variant) {
  return *find_tile(kForwardSm80, bytes, head_dim, variant);
}

// backward_sm80.cuh: a block of threads takes `keys` keys and passes over the queries, `queries` at a time. Each product's
// result is cut over the warps: that of scores and of weights' gradients into `score_warps` pieces along the keys times the
// rest along the queries; the gradients of keys and values, and of queries, into so many pieces along their rows times the rest
// along columns.
struct BackwardSm80 {
  int bytes, head_dim;  // as above
  Variant variant;
  int keys, queries, warps;
  int score_warps;  // along the keys
  int score_split;  // along the queries; where there are fewer pieces than warps, the last warps have none
  // 0: weights stay with the warp that made them, which sums the gradients of its own keys and all columns in registers (and if
  // score_split > 1, of its own queries); else weights go through shared memory.
  int sum_warps;
  int query_warps;
  int stages;  // blocks of queries in shared memory
  int blocks;  // on a multiprocessor at a time, for the compiler's budget of registers
  constexpr int threads() const { return 32 * warps; }
};

inline constexpr BackwardSm80 kBackwardSm80[] = {
    {2, 32, kPlain, 64, 64, 4, 2, 2, 0, 4, 2, 2},  {2, 64, kPlain, 64, 64, 4, 2, 2, 0, 2, 2, 2},
    {2, 96, kPlain, 128, 64, 8, 4, 2, 4, 4, 2, 1}, {2, 128, kPlain, 128, 64, 8, 4, 2, 4, 2, 2, 1},
    {2, 192, kPlain, 64, 64, 8, 4, 2, 2, 2, 1, 1}, {2, 256, kPlain, 64, 64, 8, 4, 2, 2, 2, 1, 1},
    {2, 32, kAll, 64, 64, 4, 4, 1, 0, 4, 1, 2},    {2, 64, kAll, 64, 64, 4, 4, 1, 0, 4, 1, 2},
    {2, 96, kAll, 64, 64, 4, 4, 1, 0, 4, 1, 2},    {2, 128, kAll, 128, 64, 8, 4, 2, 4, 2, 1, 1},
    {2, 192, kAll, 64, 32, 8, 4, 2, 2, 2, 1, 1},   {2, 256, kAll, 64, 32, 8, 4, 2, 2, 2, 1, 1},
    {2, 512, kAll, 32, 32, 8, 2, 4, 1, 2, 1, 1},  //
    {2, 128, kSmall, 64, 64, 4, 4, 1, 0, 2, 1, 2},  //
    {6, 64, kPlain, 64, 32, 4, 4, 1, 0, 2, 1, 2},  {6, 96, kPlain, 64, 64, 8, 4, 2, 4, 4, 1, 1},
    {6, 128, kPlain, 64, 32, 8, 4, 2, 2, 2, 1, 1}, {6, 256, kPlain, 32, 32, 8, 2, 4, 1, 2, 1, 1},
    {6, 32, kAll, 64, 64, 4, 4, 1, 0, 4, 1, 2},    {6, 64, kAll, 64, 32, 4, 4, 1, 0, 2, 1, 2},
    {6, 96, kAll, 64, 64, 8, 4, 2, 4, 4, 1, 1},    {6, 128, kAll, 64, 32, 8, 4, 2, 2, 2, 1, 1},
    {6, 192, kAll, 32, 32, 8, 2, 4, 2, 2, 1, 1},   {6, 256, kAll, 32, 32, 8, 2, 4, 1, 2, 1, 1},
    {6, 512, kAll, 16, 16, 8, 1, 2, 1, 1, 1, 1},   {6, 32, kSmall, 64, 32, 4, 4, 1, 0, 2, 1, 2},
    {6, 64, kSmall, 32, 32, 4, 2, 2, 2, 2, 1, 1},  {6, 96, kSmall, 32, 32, 4, 2, 2, 2, 2, 1, 1},
    {6, 128, kSmall, 32, 16, 4, 2, 2, 1, 1, 1, 1}, {4, 32, kPlain, 64, 64, 4, 4, 1, 0, 4, 1, 2},
    {4, 64, kPlain, 64, 32, 4, 4, 1, 0, 2, 1, 2},  {4, 96, kPlain, 64, 64, 8, 4, 2, 4, 4, 1, 1},
    {4, 128, kPlain, 64, 32, 8, 4, 2, 2, 2, 1, 1}, {4, 192, kPlain, 64, 32, 8, 4, 2, 2, 2, 1, 1},
    {4, 256, kPlain, 32, 32, 8, 2, 4, 1, 2, 1, 1}, {4, 32, kAll, 64, 64, 4, 4, 1, 0, 4, 1, 2},
    {4, 64, kAll, 64, 32, 4, 4, 1, 0, 2, 1, 2},    {4, 96, kAll, 64, 64, 8, 4, 2, 4, 4, 1, 1},
    {4, 128, kAll, 64, 32, 8, 4, 2, 2, 2, 1, 1},   {4, 192, kAll, 32, 32, 8, 2, 4, 2, 2, 1, 1},
    {4, 256, kAll, 32, 32, 8, 2, 4, 1, 2, 1, 1},
};

// backward_queries_sm80.cuh: a block of threads takes `warps` * 16 queries and sums `columns` of their gradients' columns.
struct BackwardQueriesSm80 {
  int bytes, head_dim, columns, warps, keys;
};

inline constexpr BackwardQueriesSm80 kBackwardQueriesSm80[] = {
    {2, 32, 32, 4, 64},   {2, 64, 64, 4, 64},   {2, 96, 96, 4, 64},   {2, 128, 128, 4, 32}, {2, 192, 192, 4, 64},
    {2, 256, 256, 4, 64}, {2, 512, 256, 2, 32}, {6, 32, 32, 4, 64},   {6, 64, 64, 4, 32},   {6, 96, 96, 2, 32},
    {6, 128, 128, 2, 16}, {6, 192, 192, 4, 16}, {6, 256, 256, 2, 32}, {6, 512, 256, 1, 16},
};

constexpr bool has_backward_sm80_tile(int bytes, int head_dim, Variant variant) {
  return find_tile(kBackwardSm80, bytes, head_dim, variant) != nullptr;
}

consteval BackwardSm80 backward_sm80_tile(int bytes, int head_dim, Variant variant) {
  return *find_tile(kBackwardSm80, bytes, head_dim, variant);
}

consteval BackwardQueriesSm80 backward_queries_sm80_tile(int bytes, int head_dim) {
  for (const BackwardQueriesSm80& tile : kBackwardQueriesSm80)
    if (tile.bytes == bytes && tile.head_dim == head_dim) return tile;
  throw "no row in kBackwardQueriesSm80";
}

}  // namespace flash_online::cuda
