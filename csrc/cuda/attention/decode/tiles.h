// The shared memory layout of a CTA of the decode kernel.
#pragma once

namespace flash_online::cuda {

// Keys of a warp at a time. If rows are short, more of them fill a stage and share the cost of a step.
constexpr int decode_tile_keys(int head_dim, bool is_float8) { return head_dim * (is_float8 ? 1 : 2) <= 128 ? 32 : 16; }
constexpr int kDecodeMostWarps = 8, kDecodeMostStages = 4;

struct DecodeLayout {
  int warps, stages;  // per CTA; of each warp's ring. 0: there is no room
  int ctas_per_sm;
};

// A tile of keys, or of values, lies in boxes of rows of 128 bytes. Chunk c of 16 bytes of row r lies at chunk c ^ (r % 8), so
// that neither the copies nor ldmatrix find two of eight rows in one bank.
constexpr int decode_boxes(int head_dim, bool is_float8) { return (head_dim * (is_float8 ? 1 : 2) + 127) / 128; }
constexpr int decode_stage_bytes(int head_dim, bool is_float8) {
  return 2 * decode_boxes(head_dim, is_float8) * decode_tile_keys(head_dim, is_float8) * 128;
}
// Queries wait in shared memory, of each warp apart, where they would take more registers than a thread has left.
constexpr bool decode_shares_queries(int head_dim, int rows) { return head_dim * rows > 128 * 16; }
constexpr int decode_query_bytes(int head_dim, int rows) {
  return decode_shares_queries(head_dim, rows) ? rows * (2 * head_dim + 16) : 0;
}
// What a warp exchanges of eight rows: maximum and sum, and where in its ring the outputs are, which go through the stage that
// waits for its copies.
constexpr int kDecodeWarpBytes = 8 * 8 + 16;
constexpr int decode_shared_bytes(const DecodeLayout& layout, int stage_bytes, int query_bytes) {
  return layout.warps * (layout.stages * stage_bytes + query_bytes + kDecodeWarpBytes);
}

// Bytes that should be in flight to an SM: more are read no faster, and less evenly by the SMs.
constexpr int kDecodeBytesAhead = 64 << 10;

// As many stages for `warps` in each of `ctas` CTAs per SM as are of use and as there is room for; {0, 0, 0} where that is less
// than two. `most`: the shared memory of a CTA that has an SM for itself, which has 1 KiB more; so much more than it asks for
// is what a CTA takes.
constexpr DecodeLayout decode_layout_of(int warps, int ctas, int stage_bytes, int query_bytes, int most) {
  constexpr int kReserved = 1 << 10;
  int stages = 0;
  for (int n = 2; n <= kDecodeMostStages; ++n) {
    const int bytes = decode_shared_bytes({warps, n, ctas}, stage_bytes, query_bytes);
    if (ctas * (bytes + kReserved) > most + kReserved) break;
    stages = n;
    if (ctas * (n - 1) * warps * stage_bytes >= kDecodeBytesAhead) break;
  }
  return stages > 0 ? DecodeLayout{warps, stages, ctas} : DecodeLayout{0, 0, 0};
}

// Two CTAs of four warps per SM, so that one reads while the other one ends an item; where there are `few` items, which are cut
// into many parts, one of eight; else what there is room for.
constexpr DecodeLayout decode_layout(bool few, int stage_bytes, int query_bytes, int most) {
  const auto layout_of = [&](int warps, int ctas) { return decode_layout_of(warps, ctas, stage_bytes, query_bytes, most); };
  const DecodeLayout first = few ? layout_of(8, 1) : layout_of(4, 2);
  return first.warps > 0 ? first : layout_of(4, 1);
}

}  // namespace flash_online::cuda
