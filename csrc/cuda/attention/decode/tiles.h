// How a CTA of the decode kernel is laid out in shared memory.
#pragma once

namespace flash_online::cuda {

// How many keys a warp takes at a time: where rows are short, more of them fill a stage, and their cost per step is divided.
constexpr int decode_tile_keys(int head_dim, bool is_float8) { return head_dim * (is_float8 ? 1 : 2) <= 128 ? 32 : 16; }
constexpr int kDecodeMostWarps = 8, kDecodeMostStages = 4;

struct DecodeLayout {
  int warps, stages;  // of each warp's ring; 0: there is no room
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

// What should be on its way to an SM: more is read no faster, and less evenly by the SMs.
constexpr int kDecodeBytesAhead = 64 << 10;

// Eight warps where each has room for two tiles or more, else four; then as many tiles ahead as are of use.
constexpr DecodeLayout decode_layout(int stage_bytes, int query_bytes, int shared_bytes) {
  for (int warps = kDecodeMostWarps; warps >= 4; warps /= 2) {
    const auto fits = [&](int stages) {
      return decode_shared_bytes({warps, stages}, stage_bytes, query_bytes) <= shared_bytes;
    };
    if (!fits(2)) continue;
    int stages = 2;
    while (stages < kDecodeMostStages && (stages - 1) * warps * stage_bytes < kDecodeBytesAhead && fits(stages + 1)) ++stages;
    return {warps, stages};
  }
  return {0, 0};
}

}  // namespace flash_online::cuda
