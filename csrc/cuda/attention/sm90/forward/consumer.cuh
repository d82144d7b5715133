// A math warpgroup of the Hopper forward kernel: 64 queries of a work tile, from the products of scores to the results. This is
// the mainloop over blocks of keys; epilogue.cuh ends a tile.
#pragma once

#include <cfloat>

#include "../../../../core/online_softmax.h"
#include "../../../hw/compiler.cuh"
#include "../../../hw/math.cuh"
#include "../../../hw/matrix_copy.cuh"
#include "../../../hw/mbarrier.cuh"
#include "../../../hw/named_barrier.cuh"
#include "../../../hw/shared_memory.cuh"
#include "../../../hw/vector.cuh"
#include "../../../hw/wgmma.cuh"
#include "../../../mma/fragments.cuh"
#include "../../large_rows/score_levels.cuh"
#include "config.cuh"

namespace flash_online::cuda {

template <class T, class Variant>
struct ForwardSm90Kernel<T, Variant>::MathWarpgroup {
  using RowSoftmax = OnlineSoftmax<float, Binary>;
  // Lazy rescale: the maximum of a row is updated only where a thread's weights of a block sum to more than this. In float16 a
  // weight must stay below 65504, and sums of rows and products in float32 must not overflow.
  static constexpr float kMaxWeightSum = std::is_same_v<T, __half> ? 0x1p15f : 0x1p24f;
  // With kVByColumns: weights reach 2^this before the maximum is updated.
  static constexpr float kRescaleThreshold = 8;
  // A block has kSubBlocks sub-blocks of keys, each of which may move a row's maximum.
  static constexpr int kSubBlocks = kKeys / kTile.sub_block_keys(), kSubBlockRegisters = kScoreRegisters / kSubBlocks,
                       kSubBlockSteps = kKeySteps / kSubBlocks;
  static_assert(kSubBlocks == 1 || (!kVByColumns && !kHasOptions));

  const Arguments& a;
  Shared& shared;
  int row_block;  // which 64 queries of the tile: the index of the warpgroup, or 0 with kVByColumns
  int v_columns;  // which columns of the values: 0, or with kVByColumns the index of the warpgroup
  int warp, lane;
  PipelineState<kWorkTiles> next_tile;
  PipelineState<kQueryStages> query;
  PipelineState<kKeyStages> key;
  PipelineState<kStages> value;
  int tile_stage;  // of the work tile
  int block, end, whole_begin, whole_end;  // the current block, and the warpgroup's ranges of the work tile
  // Blocks that only other warpgroups process: before the next one of this warpgroup, and after its last one of the tile.
  int skipped = 0, skipped_after = 0;

  // Bits of the 32 blocks from window_begin on, after those that are known: loaded, visited by this warpgroup, clear.
  struct MaskWindow {
    unsigned loaded, visited, clear;
    int window_begin;
  };
  // The mask of a block, looked up one block ahead.
  struct BlockMask {
    unsigned shown;  // by a bool mask: see MaskBits
    bool clear;
  };
  struct MaskPrefetch : MaskWindow {
    int next_block, next_skipped;  // the next value of `block`, and how many blocks are loaded before it for others
    BlockMask next, now;
    const unsigned* bits;  // of the lane's rows
  };
  // Where kTakesRuns: blocks in a row that this warpgroup visits, all of them clear or all mixed.
  struct BlockRun : MaskWindow {
    int run_end;
    bool is_clear;
  };
  [[no_unique_address]] std::conditional_t<kTakesRuns, BlockRun, std::conditional_t<kMasked, MaskPrefetch, Empty>> prefetch;
  [[no_unique_address]] std::conditional_t<kHasDropout, unsigned, Empty> dropout_bits;  // of the block: see dropout_bit()
  float out[kOutRegisters];
  float score[kScoreRegisters];  // and then the weights
  unsigned weight[kScoreRegisters / 2];  // as pairs of 16 bits: the left operand of P V
  unsigned query_fragment[kTile.query_in_registers ? kHeadDimSteps : 1][4];
  // Where kMaxLogit: the largest products that the lane has seen of its rows.
  struct LargestProducts {
    float of_row[2];
  };
  struct NoLargestProducts {};
  [[no_unique_address]] std::conditional_t<kMaxLogit, LargestProducts, NoLargestProducts> largest;
  RowSoftmax softmax[2];  // of rows lane / 4 and lane / 4 + 8 of the warp's 16; sums are the thread's own
  float pivots[2];  // what their exponents are measured from, by find_pivots()
  bool may_be_lowest = true;  // whether a row of the warp has seen nothing above the lowest score: maxima only rise
  bool accumulate;  // `out` holds something of this tile

  // ---- synchronisation

  __device__ __forceinline__ void ping_pong_enter() {
    if constexpr (kTile.ping_pong) sync_named(kPingPongBarrier + row_block + v_columns, 256);
  }
  __device__ __forceinline__ void ping_pong_leave() {
    if constexpr (kTile.ping_pong) arrive_named(kPingPongBarrier + (row_block + v_columns + 1) % kTile.warpgroups, 256);
  }
  __device__ __forceinline__ void release(uint64_t* barrier) {
    if (lane == 0) arrive(barrier);
  }
  __device__ __forceinline__ void release_key() {
    release(&shared.key_empty[key.stage]);
    key.advance();
  }
  __device__ __forceinline__ void release_value() {
    release(&shared.value_empty[value.stage]);
    if constexpr (kMasked)
      value = key;
    else
      value.advance();
  }
  // The operands of the block's scores: the keys, and after the last scores of the tile the queries.
  __device__ __forceinline__ void release_score_operands() {
    release_key();
    if (!kTile.query_in_registers && is_last_block()) release(&shared.query_empty[query.stage]);
  }
  // Releases blocks that only other warpgroups process, one at a time: under a mask the values of this warpgroup's last block
  // may still be held.
  __device__ __forceinline__ void release_skipped_blocks() {
#pragma unroll 1
    for (; kRowBlocks > 1 && skipped > 0; --skipped) {
      wait(&shared.key_full[key.stage], key.parity);
      release(&shared.key_empty[key.stage]);
      // Where blocks are skipped between others, these values may have no buffer before the next warpgroup has had its turn.
      if constexpr (kMasked) ping_pong_enter(), ping_pong_leave();
      wait(&shared.value_full[key.stage], key.parity);
      release(&shared.value_empty[key.stage]);
      key.advance();
      if constexpr (!kMasked) {
        value.advance();
        ping_pong_enter();
        ping_pong_leave();
      }
    }
  }

  // ---- products

  // The byte offset in a box of the address that this lane gives to ldmatrix_x4 and stmatrix_x4 for a 16 x 16 matrix.
  __device__ __forceinline__ static unsigned matrix_offset(int lane, int matrix_row, int matrix_chunk) {
    return swizzle128(matrix_row + lane % 16, matrix_chunk + lane / 16);
  }
  __device__ __forceinline__ unsigned matrix_offset(int matrix_row, int matrix_chunk) const {
    return matrix_offset(lane, matrix_row, matrix_chunk);
  }

  __device__ __forceinline__ void load_query_fragments() {
    const unsigned base = shared_address(shared.query[query.stage].box);
    int here = lane;
    make_opaque(here);  // or the offsets take registers throughout the tiles
#pragma unroll
    for (int step = 0; step < kHeadDimSteps; ++step)
      ldmatrix_x4(query_fragment[step],
                  base + step / 4 * kRowsPerWarpgroup * kBoxRowBytes + matrix_offset(here, kRowsPerWarp * warp, step % 4 * 2));
  }

  // In 64 bits there are three times the instructions between the first products; in 32 bits one more register is live.
  __device__ __forceinline__ static uint64_t advance_descriptor(uint64_t descriptor, unsigned bytes) {
    return kHasOptions ? offset_descriptor(descriptor, bytes) : descriptor + bytes / kDescriptorStep;
  }

  // S = Q K^T. Where a block of keys takes two stages, the product of the first one is finished here, and it is released.
  __device__ __forceinline__ void issue_qk() {
    uint64_t keys = k_major_descriptor(shared_address(shared.key[key.stage].box));
    wgmma_fence();
    if constexpr (kTile.query_in_registers) {
#pragma unroll
      for (int step = 0; step < kHeadDimSteps; ++step)
        Wgmma<T, kKeys>::template rs<false>(
            score, query_fragment[step], advance_descriptor(keys, step / 4 * kKeys * kBoxRowBytes + step % 4 * 32), step > 0);
    } else {
      uint64_t queries = k_major_descriptor(shared_address(shared.query[query.stage].box));
      if constexpr (kVByColumns) queries = opaque(queries);
      constexpr int kStageSteps = kHeadDimSteps / kKeyStagesPerBlock;
#pragma unroll
      for (int step = 0; step < kHeadDimSteps; ++step) {
        if (step > 0 && step % kStageSteps == 0) {
          wgmma_commit();
          PipelineState<kKeyStages> next_stage = key;
          next_stage.advance();
          wait(&shared.key_full[next_stage.stage], next_stage.parity);
          keys = k_major_descriptor(shared_address(shared.key[next_stage.stage].box));
          wgmma_fence();
        }
        Wgmma<T, kKeys>::template ss<false>(
            score, advance_descriptor(queries, step / 4 * kRowsPerWarpgroup * kBoxRowBytes + step % 4 * 32),
            advance_descriptor(keys, step % kStageSteps / 4 * kKeys * kBoxRowBytes + step % 4 * 32), step > 0);
      }
    }
    wgmma_commit();
    if constexpr (kKeyStagesPerBlock == 2) {
      wgmma_wait<1>();
      release_key();
    }
  }

  // O += P V, or what of it belongs to the 16 * steps keys from first_step on.
  __device__ __forceinline__ void issue_pv(int first_step = 0, int steps = kKeySteps) {
    const unsigned first_box = shared_address(shared.value[value.stage].box[v_columns * kOutColumns / kBoxColumns]);
    uint64_t values = mn_major_descriptor(first_box, kKeys * kBoxRowBytes);
    if constexpr (kVByColumns) values = opaque(values);
    wgmma_fence();
#pragma unroll
    for (int step = first_step; step < first_step + steps; ++step) {
      const unsigned left[4] = {weight[4 * step], weight[4 * step + 1], weight[4 * step + 2], weight[4 * step + 3]};
      Wgmma<T, kOutColumns>::template rs<true>(out, left, advance_descriptor(values, step * 16 * kBoxRowBytes),
                                               step > first_step || accumulate);
    }
    wgmma_commit();
    accumulate = true;
  }

  // ---- which block is next

  // Words of a TileMaskMap have a bit for each 2^shift blocks: returns a bit per block, of the 32 blocks from the n-th on.
  __device__ static unsigned bits_of_blocks(const unsigned (&words)[kMapWords], int shift, int blocks, int n) {
    if (shift == 0) return words[n / 32];
    unsigned bits = 0;
#pragma unroll 1
    for (int i = 0; i < min(32, blocks - n); ++i) bits |= (words[(n + i) >> shift >> 5] >> ((n + i) >> shift) % 32 & 1) << i;
    return bits;
  }
  __device__ __forceinline__ void load_mask_words() {
    const auto& map = shared.tile[tile_stage].map;
    const int begin = shared.tile[tile_stage].begin, shift = map.shift, n = prefetch.window_begin - begin;
    prefetch.loaded = bits_of_blocks(map.loaded, shift, end - begin, n);
    prefetch.visited = bits_of_blocks(map.row_block[row_block].visited, shift, end - begin, n);
    prefetch.clear = bits_of_blocks(map.row_block[row_block].clear, shift, end - begin, n);
  }
  // Moves the window on until it has a block for the next prefetch_mask(), or is the last one.
  __device__ __forceinline__ void advance_mask_window() {
#pragma unroll 1
    while (prefetch.visited == 0 && prefetch.window_begin + 32 < end) {
      prefetch.next_skipped += __popc(prefetch.loaded);
      prefetch.window_begin += 32;
      load_mask_words();
    }
  }
  // Finds the next block, `end` or more if there is none: arithmetic that the exponentials of the weights hide.
  __device__ __forceinline__ void prefetch_mask() {
    if constexpr (kMasked && !kTakesRuns) {
      const unsigned lowest = prefetch.visited & -prefetch.visited, below = lowest - 1;
      prefetch.next_block = prefetch.window_begin + __popc(below);
      prefetch.next_skipped += __popc(prefetch.loaded & below);
      prefetch.next.clear = prefetch.clear & lowest;
      if (kHasOptions && a.mask_source == MaskSource::kBits)
        prefetch.next.shown = __ldg(prefetch.bits + min(prefetch.next_block, a.mask.bits.last_block) * kWarpSize);
      prefetch.visited ^= lowest;
      prefetch.loaded &= ~(lowest | below);
    }
  }

  // Finds the next run; `block` is `end` or more if there is none.
  __device__ __forceinline__ void start_run() {
#pragma unroll 1
    while (prefetch.visited == 0 && prefetch.window_begin + 32 < end) {
      skipped += __popc(prefetch.loaded);
      prefetch.window_begin += 32;
      load_mask_words();
    }
    const unsigned lowest = prefetch.visited & -prefetch.visited, below = lowest - 1;
    prefetch.is_clear = prefetch.clear & lowest;
    const unsigned others = (~prefetch.visited | (prefetch.is_clear ? ~prefetch.clear : prefetch.clear)) & ~below,
                   run = ~below & ((others & -others) - 1);
    skipped += __popc(prefetch.loaded & below);
    block = prefetch.window_begin + __popc(below);
    prefetch.run_end = block + __popc(run);
    prefetch.visited &= ~run;
    prefetch.loaded &= ~(below | run);
  }

  // The next work tile; false if there is none.
  __device__ __forceinline__ bool fetch_tile() {
    wait(&shared.tile_full[next_tile.stage], next_tile.parity);
    tile_stage = next_tile.stage;
    next_tile.advance();
    const ForwardWorkTile& tile = shared.tile[tile_stage];
    if constexpr (!kMasked) skipped = skipped_after;
    if (tile.batch < 0) return false;
    if constexpr (kMasked) {
      if constexpr (kHasOptions)
        if (a.mask_source == MaskSource::kBits)
          prefetch.bits = a.mask.bits.words + tile.batch * a.mask.bits.batch_step + tile.head * a.mask.bits.head_step +
                          min((tile.first_query + row_block * kRowsPerWarpgroup) / kBitRows + warp, a.mask.bits.last_row) *
                              a.mask.bits.row_step +
                          lane;
      prefetch.window_begin = tile.begin;
      end = tile.end;
      load_mask_words();
      if constexpr (kTakesRuns) {
        start_run();
      } else {
        prefetch.next_skipped = skipped;  // after the blocks of the tile before
        advance_mask_window();
        prefetch_mask();
        next_block();
      }
    } else {
      block = tile.row_block[row_block].begin;
      end = tile.row_block[row_block].end;
      skipped += block - tile.begin;
      skipped_after = tile.end - end;
    }
    whole_begin = tile.row_block[row_block].whole_begin;
    whole_end = tile.row_block[row_block].whole_end;
    return true;
  }
  __device__ __forceinline__ void next_block() {
    if constexpr (kTakesRuns) {
      if (++block == prefetch.run_end) [[unlikely]]
        start_run();
    } else if constexpr (kMasked) {
      block = prefetch.next_block;
      skipped = prefetch.next_skipped;
      prefetch.next_skipped = 0;
      prefetch.now = prefetch.next;
      if (prefetch.visited == 0) [[unlikely]]
        advance_mask_window();
    } else {
      ++block;
    }
  }
  // With sparsity: whether it hides nothing of the block.
  __device__ __forceinline__ bool block_is_clear() const {
    if constexpr (kTakesRuns)
      return prefetch.is_clear;
    else
      return prefetch.now.clear;
  }
  __device__ __forceinline__ bool is_last_block() const {
    if constexpr (kTakesRuns)
      return block + 1 == prefetch.run_end && block + 1 == shared.tile[tile_stage].claims.last_end[row_block];
    else if constexpr (kMasked)
      return prefetch.next_block >= end;
    return block + 1 == end;
  }

  // ---- from products to scores: score modification, mask, visibility

  // Softcap of score_mod.cuh, its tangent by a polynomial or by one exponential.
  __device__ __forceinline__ void apply_softcap() {
    constexpr bool kHasPolynomial = kTile.head_dim <= 128;  // beyond, there are too few registers for two ways
    float squares = 0;
#pragma unroll
    for (int i = 0; kHasPolynomial && i < kScoreRegisters; ++i) squares = fmaf(score[i], score[i], squares);
    if (kHasPolynomial && __all_sync(~0u, squares < a.scores.small_squares)) {
#pragma unroll
      for (int i = 0; i < kScoreRegisters; ++i) score[i] *= polynomial(a.scores.softcap_term, score[i] * score[i]);
    } else if (kHasPolynomial && a.scores.small_squares > 0) {
      // A score with a small square gets the same polynomial, or its result would depend on other rows: no square exceeds the
      // rounded sum that it enters.
#pragma unroll
      for (int i = 0; i < kScoreRegisters; ++i) {
        const float square = score[i] * score[i];
        score[i] = square < a.scores.small_squares
                       ? score[i] * polynomial(a.scores.softcap_term, square)
                       : a.scores.softcap * large_tanh_of_exponent(score[i] * a.scores.softcap_scale);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kScoreRegisters; ++i)
        score[i] = a.scores.softcap * tanh_of_exponent(score[i] * a.scores.softcap_scale);
    }
  }
  __device__ __forceinline__ void apply_alibi() {
    const ForwardWorkTile& tile = shared.tile[tile_stage];
    const int row = tile.first_query + row_block * kRowsPerWarpgroup + kRowsPerWarp * warp + lane / 4;
    int offset = static_cast<int>(a.visible.offset);
    if constexpr (kPacked) offset = tile.sequence.offset;
    const float distance = static_cast<float>(row + offset - block * kKeys - lane % 4 * 2);
    const Alibi<float> alibi{tile.slope};
#pragma unroll
    for (int i = 0; i < kScoreRegisters; ++i)
      score[i] = alibi(score[i], fabsf(distance + static_cast<float>(i / 2 % 2 * 8 - i / 4 * 8 - i % 2))).value;
  }
  // After it scores are in units of a.scores.scale.
  __device__ __forceinline__ void apply_score_mod() {
    if (a.scores.softcap > 0) apply_softcap();
    if (a.scores.alibi_slopes) apply_alibi();
  }

  // kBounded: no score falls below the lowest one (score_levels.cuh).
  template <class Element, bool kBounded>
  __device__ __forceinline__ void add_float_mask() {
    const unsigned base = shared_address(shared.mask.stage[key.stage].box[row_block]);
#pragma unroll
    for (int step = 0; step < kKeySteps; ++step) {
      unsigned words[4];
      ldmatrix_x4(words, base + (a.mask.box_rows == 1 ? (2 * step + lane / 16) * 16  // one row is not swizzled
                                                      : matrix_offset(kRowsPerWarp * warp, 2 * step)));
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 values = unpair<Element>(words[i]);
        const auto add = [&](float& x, float value) {
          x = fmaf(value, a.scores.bias_scale, x);
          if constexpr (kBounded) x = max_or_nan(x, lower_bound(value, a.scores.lowest));
        };
        add(score[8 * step + 2 * i], values.x);
        add(score[8 * step + 2 * i + 1], values.y);
      }
    }
  }
  // The bound changes only the weights of rows that have seen nothing above the lowest score: with a larger maximum all such
  // scores have weight 0. float16 masks do not reach the bound.
  __device__ __forceinline__ bool needs_lowest_score() {
    if (may_be_lowest)
      may_be_lowest = __any_sync(~0u, fminf(softmax[0].max, softmax[1].max) <= a.scores.lowest * a.scores.scale);
    return may_be_lowest;
  }
  __device__ __forceinline__ void apply_mask() {
    if constexpr (kFloatMask) {
      if (a.mask_source == MaskSource::kTmaFloat16)
        add_float_mask<__half, false>();
      else if (needs_lowest_score()) [[unlikely]]
        add_float_mask<__nv_bfloat16, true>();
      else
        add_float_mask<__nv_bfloat16, false>();
    } else if constexpr (kSparse) {
#pragma unroll
      for (int n = 0; n < kBitWords; ++n) {
        const unsigned shown = shared.sparse.word[key.parity][key.stage][4 * row_block + warp][n][lane];
#pragma unroll
        for (int i = 32 * n; i < 32 * (n + 1) && i < kScoreRegisters; ++i)
          if (!(shown >> i % 32 & 1)) score[i] = -INFINITY;
      }
    } else if (a.mask_source == MaskSource::kBits) {
#pragma unroll
      for (int i = 0; i < kScoreRegisters; ++i)
        if (!(prefetch.now.shown >> i & 1)) score[i] = -INFINITY;
    }
  }

  // Sets scores to -inf for the keys that a row does not see. Does nothing if all rows see all keys of the block.
  __device__ __forceinline__ void apply_visibility() {
    // There are too few registers for these bounds where a kernel has more to do; shared memory has them too.
    constexpr bool kFromShared = kPacked || kHasOptions;
    const auto& own = shared.tile[tile_stage].row_block[row_block];
    const bool cuts_left = block < (kFromShared ? own.whole_begin : whole_begin),
               cuts_right = block >= (kFromShared ? own.whole_end : whole_end);
    if (!cuts_left && !cuts_right) [[likely]]
      return;
    // Columns count from the block's first key, or in `from` and `to` from the lane's first one.
    const int first = block * kKeys, lane_first = first + lane % 4 * 2,
              row_of_tile = row_block * kRowsPerWarpgroup + kRowsPerWarp * warp;
    // From where the queries of the warp's rows count.
    const int first_query = kCached ? 0 : row_of_tile;
    const auto query = [&](int row) { return kCached ? query_of_row(a, row_of_tile + row) : row; };
    const int band_begin = shared.tile[tile_stage].band_begin + first_query,
              band_end = shared.tile[tile_stage].band_end + first_query;
    const int keys = ForwardSm90Kernel::keys(a, shared.tile[tile_stage]);
    const int all_from = band_begin + query(15) - first, all_to = min(band_end + query(0), keys) - first;
    if (cuts_right) {
      const int to[2] = {min(band_end + query(lane / 4), keys) - lane_first,
                         min(band_end + query(lane / 4 + 8), keys) - lane_first};
#pragma unroll
      for (int step = 0; step < kKeySteps; ++step) {
        if (16 * step + 16 <= all_to) continue;
#pragma unroll
        for (int i = 0; i < 8; ++i)
          if (16 * step + i / 4 * 8 + i % 2 >= to[i / 2 % 2]) score[8 * step + i] = -INFINITY;
      }
    }
    if (cuts_left) {
      const int from[2] = {band_begin + query(lane / 4) - lane_first, band_begin + query(lane / 4 + 8) - lane_first};
#pragma unroll
      for (int step = 0; step < kKeySteps; ++step) {
        if (16 * step >= all_from) continue;
#pragma unroll
        for (int i = 0; i < 8; ++i)
          if (16 * step + i / 4 * 8 + i % 2 < from[i / 2 % 2]) score[8 * step + i] = -INFINITY;
      }
    }
  }

  __device__ __forceinline__ void finish_scores() {
    if constexpr (kHasOptions) {
      if (a.has_score_mod) [[unlikely]]
        apply_score_mod();
    }
    if constexpr (kSparse) {
      if (!block_is_clear()) apply_mask();
    } else if constexpr (kMasked) {
      if (prefetch.now.clear) return;
      apply_mask();
    }
    apply_visibility();
    if constexpr (kMaxLogit) raise_largest_products();
  }

  __device__ __forceinline__ void raise_largest_products() {
    static_assert(!kMasked && !kHasOptions);  // a score is a product times the scale
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float most[2] = {score[2 * r], score[2 * r + 1]};
#pragma unroll
      for (int i = 1; i < kScoreRegisters / 4; ++i) {
        most[0] = max_or_nan(most[0], score[4 * i + 2 * r]);
        most[1] = max_or_nan(most[1], score[4 * i + 2 * r + 1]);
      }
      largest.of_row[r] = max_or_nan(largest.of_row[r], max_or_nan(most[0], most[1]));
    }
  }

  // ---- from scores to weights

  // Fetched while the product of the block's scores runs.
  __device__ __forceinline__ void fetch_dropout_bits() {
    if constexpr (kHasDropout) {
      if (a.dropout.rng) {
        // The lane has two of every eight keys of a query.
        const auto* const rows =
            &shared.dropout.keep[key.stage][row_block * kRowsPerWarpgroup + kRowsPerWarp * warp + lane / 4];
        const auto own_bits = [&](const auto& row) {
          constexpr unsigned kTwoOfEight = 0x03030303;
          const uint2 keys = reinterpret_cast<const uint2&>(row);
          return (keys.x >> lane % 4 * 2 & kTwoOfEight) | (keys.y >> lane % 4 * 2 & kTwoOfEight) << 4;
        };
        dropout_bits = own_bits(rows[0]) | own_bits(rows[8]) << 2;
      }
    }
  }
  static constexpr unsigned dropout_bit(int i) { return 1u << (i / 4 % 4 * 8 + i / 16 * 4 + i % 4); }

  // The largest score of a row in a sub-block.
  __device__ __forceinline__ float max_of_row(int sub_block, int r) const {
    const int first = sub_block * kSubBlockRegisters;
    float most[2] = {score[first + 2 * r], score[first + 2 * r + 1]};
#pragma unroll
    for (int i = 1; i < kSubBlockRegisters / 4; ++i) {
      most[0] = fmaxf(most[0], score[first + 4 * i + 2 * r]);
      most[1] = fmaxf(most[1], score[first + 4 * i + 2 * r + 1]);
    }
    float row_max = fmaxf(most[0], most[1]);
    row_max = fmaxf(row_max, __shfl_xor_sync(~0u, row_max, 1));
    return fmaxf(row_max, __shfl_xor_sync(~0u, row_max, 2));
  }

  // True if only repeat_block() can compute a row's weights: the row has no maximum yet, or its scores are large. Scores that a
  // mask set to the lowest one are powers of two, from which an fma loses nothing.
  __device__ __forceinline__ bool needs_repeat(float max) const {
    return is_large_score(max) && !(kFloatMask && max == a.scores.lowest_score);
  }
  __device__ __forceinline__ bool is_large(int r) const { return needs_repeat(softmax[r].max) && softmax[r].max > -INFINITY; }

  // Sets what exponents are measured from: the maximum. A row without one, as under a mask for many blocks, and a row of large
  // scores are measured from the lowest float: what the row sees becomes infinite, and asks for repeat_block(); what it does
  // not see becomes 0.
  __device__ __forceinline__ void find_pivots() {
#pragma unroll
    for (int r = 0; r < 2; ++r) pivots[r] = needs_repeat(softmax[r].max) ? -FLT_MAX : softmax[r].max;
  }

  // Subtracts the maxima of large rows from their scores in a sub-block (exponent_below()): what is left are exponents
  // in units of a.scores.scale. `from`: what all rows' scores are still measured from.
  __device__ __forceinline__ void subtract_large_maxima(int sub_block, float (&from)[2]) {
    from[0] = pivots[0], from[1] = pivots[1];
    const bool large[2] = {is_large(0), is_large(1)};
    if (!large[0] && !large[1]) [[likely]]
      return;
    const float inverse_scale = reciprocal(a.scores.scale);
    const int first = sub_block * kSubBlockRegisters;
    // Rolled, or it would take up much of the loop's code.
#pragma unroll 1
    for (int n = 0; n < kSubBlockRegisters / 4; ++n) {
      float next[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float x = score[first + i], exponent = exponent_below(x, a.scores.scale, softmax[i / 2].max);
        next[i] = large[i / 2] ? exponent * inverse_scale : x;
      }
#pragma unroll
      for (int i = 0; i < kSubBlockRegisters; ++i)
        score[first + i] = i + 4 < kSubBlockRegisters ? score[first + i + 4] : next[i + 4 - kSubBlockRegisters];
    }
#pragma unroll
    for (int r = 0; r < 2; ++r)
      if (large[r]) from[r] = 0;
  }

  // Scores of a sub-block become weights, in place; `sum` is the thread's own.
  __device__ __forceinline__ void exp_sub_block(int sub_block, const float (&from)[2], float (&sum)[2]) {
#pragma unroll
    for (int i = 0; i < kSubBlockRegisters; ++i) {
      const int r = i / 2 % 2;
      float& x = score[sub_block * kSubBlockRegisters + i];
      x = exp2_flushed(fmaf(x, a.scores.scale, -from[r]));
      sum[r] = i == 2 * r ? x : sum[r] + x;
    }
  }

  // The scores of the block become weights. Returns the thread's sums of these, and in `total` the rows' sums with them, one
  // sub-block after another, as repeat_block() adds them.
  __device__ __forceinline__ void exp_scores(const float (&from)[2], float (&sum)[2], float (&total)[2]) {
#pragma unroll
    for (int sub_block = 0; sub_block < kSubBlocks; ++sub_block) {
      float sub_block_sum[2];
      exp_sub_block(sub_block, from, sub_block_sum);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        sum[r] = sub_block == 0 ? sub_block_sum[r] : sum[r] + sub_block_sum[r];
        total[r] = (sub_block == 0 ? softmax[r].sum : total[r]) + sub_block_sum[r];
      }
    }
  }

  __device__ __forceinline__ void rescale_out(const float (&factor)[2]) {
#pragma unroll
    for (int i = 0; i < kOutRegisters; ++i) out[i] *= factor[i / 2 % 2];
  }

  __device__ __forceinline__ static bool overflows(float sum) { return !(sum < kMaxWeightSum); }  // or is NaN

  // Whether a row's maximum has to move: its weights of a sub-block would be too large, or the row needs
  // repeat_block(), and then always has the largest score so far. Its scores stay; `most` is the largest one in base 2.
  __device__ __forceinline__ bool needs_rescale(int sub_block, int r, float most) const {
    float sum = 0;
#pragma unroll
    for (int i = 0; i < kSubBlockRegisters; ++i)
      if (i / 2 % 2 == r) sum += exp2_flushed(fmaf(score[sub_block * kSubBlockRegisters + i], a.scores.scale, -pivots[r]));
    const bool own = needs_repeat(softmax[r].max) ? most > softmax[r].max : overflows(sum);
    return __ballot_sync(~0u, own) >> lane / 4 * 4 & 0xf;  // of the row's four lanes
  }

  // Weights of a block in which some row's maximum has to move: its scores are computed again, and what was accumulated for
  // that row is rescaled. Each row decides by itself, for one sub-block after another, so that its result depends
  // neither on its neighbours nor on how many sub-blocks a block has. O takes all sub-blocks but the last at once, and their
  // weights become 0: the last sub-block may move the maximum again.
  __device__ __forceinline__ void repeat_block() {
    issue_qk();
    wgmma_wait<0>();
    finish_scores();
#pragma unroll
    for (int sub_block = 0; sub_block < kSubBlocks; ++sub_block) {
      float factor[2], sum[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float most = __fmul_rn(max_of_row(sub_block, r), a.scores.scale);
        factor[r] = needs_rescale(sub_block, r, most) ? softmax[r].raise_max(most) : 1;
      }
      rescale_out(factor);
      find_pivots();
      float from[2];
      subtract_large_maxima(sub_block, from);
      exp_sub_block(sub_block, from, sum);
      softmax[0].add(sum[0]);
      softmax[1].add(sum[1]);
      if (sub_block + 1 < kSubBlocks) {
        pack_weights();
        wait(&shared.value_full[value.stage], value.parity);
        issue_pv(sub_block * kSubBlockSteps, kSubBlockSteps);
        wgmma_wait<0>();
        fence_registers(out);
#pragma unroll
        for (int i = sub_block * kSubBlockRegisters; i < (sub_block + 1) * kSubBlockRegisters; ++i) score[i] = 0;
      }
    }
  }

  // Weights of the first block: measured from the maxima of its first sub-block, of which a row sees something.
  __device__ __forceinline__ void first_softmax() {
    // Not right after load_query_fragments(): its loads take their time, and an arrival overtakes them. By now a product has
    // waited for them.
    if constexpr (kTile.query_in_registers) release(&shared.query_empty[query.stage]);
    softmax[0] = softmax[1] = RowSoftmax{};
    may_be_lowest = true;
    accumulate = false;
    if constexpr (kMaxLogit) largest = {-INFINITY, -INFINITY};
    finish_scores();
    prefetch_mask();
#pragma unroll
    for (int sub_block = 0; sub_block < kSubBlocks; ++sub_block) {
      const bool missing[2] = {softmax[0].max == -INFINITY, softmax[1].max == -INFINITY};
      if (sub_block > 0 && !__any_sync(~0u, missing[0] || missing[1])) continue;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float most = max_of_row(sub_block, r);
        if (missing[r]) softmax[r].raise_max(__fmul_rn(most, a.scores.scale));
      }
    }
    find_pivots();
    float sum[2], total[2], from[2] = {pivots[0], pivots[1]};
    if constexpr (kSubBlocks == 1) subtract_large_maxima(0, from);
    exp_scores(from, sum, total);
    if (kSubBlocks > 1 && any_named(kVoteBarrier + row_block, 128, overflows(sum[0]) || overflows(sum[1]))) [[unlikely]]
      repeat_block();
    else
      softmax[0].sum = total[0], softmax[1].sum = total[1];
    release_score_operands();
    pack_weights();
    next_block();
  }

  // Weights of another block, by lazy rescale: measured from the maxima so far, without a pass over the scores for their
  // maximum, which hardly ever moves far after the first block.
  __device__ __forceinline__ void lazy_softmax() {
    prefetch_mask();
    float sum[2], total[2];
    exp_scores(pivots, sum, total);
    // The sum over a block is no smaller than that over any of its sub-blocks. The vote stands before the wait, or the compiler
    // moves the exponentials after it.
    const bool any_needs_rescale = any_named(kVoteBarrier + row_block, 128, overflows(sum[0]) || overflows(sum[1]));
    wgmma_wait<0>();
    release_value();
    if (any_needs_rescale) [[unlikely]]
      repeat_block();
    else
      softmax[0].sum = total[0], softmax[1].sum = total[1];
  }

  // Weights of another block with kVByColumns: every block's maxima are computed, so that its keys need not be kept for a
  // second product.
  __device__ __forceinline__ void v_by_columns_softmax() {
    float factor[2], sum[2], total[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float most = __fmul_rn(max_of_row(0, r), a.scores.scale);
      factor[r] = softmax[r].raise_max_lazily(kRescaleThreshold, most);
    }
    find_pivots();
    float from[2];
    subtract_large_maxima(0, from);
    exp_scores(from, sum, total);
    // The vote stands before the wait, and depends on the weights, or the compiler moves the exponentials after it.
    const bool any_needs_rescale =
        any_named(kVoteBarrier + v_columns, 128, factor[0] != 1 || factor[1] != 1 || overflows(sum[0]) || overflows(sum[1]));
    wgmma_wait<0>();
    release_value();
    if (any_needs_rescale) rescale_out(factor);
    softmax[0].sum = total[0], softmax[1].sum = total[1];
  }

  // Weights become the left operand of P V, without those that dropout drops.
  __device__ __forceinline__ void pack_weights() {
    if constexpr (kHasDropout) {
      if (a.dropout.rng) {
#pragma unroll
        for (int i = 0; i < kScoreRegisters; ++i)
          if (!(dropout_bits & dropout_bit(i))) score[i] = 0;
      }
    }
#pragma unroll
    for (int i = 0; i < kScoreRegisters / 2; ++i) weight[i] = Fragments<T>::pair(score[2 * i], score[2 * i + 1]);
  }

  // ---- the life of a work tile

  // Issues the product of the first block's scores.
  __device__ __forceinline__ void begin_tile() {
    // First of all, since the last scores of other warpgroups, and with them the buffers of queries, may wait for this.
    release_skipped_blocks();
    wait(&shared.query_full[query.stage], query.parity);
    if constexpr (kTile.query_in_registers) load_query_fragments();
    wait(&shared.key_full[key.stage], key.parity);
    ping_pong_enter();
    issue_qk();
    ping_pong_leave();
    if constexpr (kMasked) value = key;
    fetch_dropout_bits();
  }

  // One block: the product of its scores, O += P V of the block before, its weights.
  __device__ __forceinline__ void mainloop_step() {
    if constexpr (kMasked)
      if (skipped > 0) [[unlikely]]
        release_skipped_blocks();
    wait(&shared.key_full[key.stage], key.parity);
    ping_pong_enter();
    issue_qk();
    wait(&shared.value_full[value.stage], value.parity);
    issue_pv();
    ping_pong_leave();
    fetch_dropout_bits();
    wgmma_wait<1>();
    if constexpr (kVByColumns) {
      release_score_operands();
      finish_scores();
      v_by_columns_softmax();
    } else {
      finish_scores();
      lazy_softmax();
      release_score_operands();
    }
    pack_weights();
  }

  // The last product and the epilogue of a tile after which there is no other one.
  __device__ __forceinline__ void end_last_tile(int last) {
    float inverse[2];
    issue_pv();
    finish_rows(last, inverse);
    wgmma_wait<0>();
    store_out(last, inverse);
    release(&shared.value_empty[value.stage]);
    value.advance();
    release_skipped_blocks();
  }

  // Computes one tile after another. The epilogue of a tile overlaps the first product of the next tile. The softmax of a block
  // overlaps O += P V of the block before and the products of the other warpgroup.
  __device__ void run() {
    query.advance(row_block);
    if (kTile.ping_pong && row_block + v_columns == kTile.warpgroups - 1) ping_pong_leave();
    if (!fetch_tile()) return;
    begin_tile();
    wgmma_wait<0>();
    first_softmax();
    while (true) {
#pragma unroll 1
      for (; block < end; next_block()) mainloop_step();
      query.advance(kRowBlocks);
      const int last = tile_stage;
      const bool more = fetch_tile();
      wait(&shared.value_full[value.stage], value.parity);
      float inverse[2];
      if (!more) {
        end_last_tile(last);
        break;
      }
      // O += P V of the last block, and the first product of the next tile.
      issue_pv();
      finish_rows(last, inverse);
      uint64_t* const last_value = &shared.value_empty[value.stage];
      value.advance();
      const bool needs_last_value = skipped > kMaxSkips;  // the values of skipped blocks may need the buffer of the last one
      if (needs_last_value) {
        wgmma_wait<0>();
        release(last_value);
      }
      begin_tile();
      wgmma_wait<1>();  // for O
      fence_registers(out);
      if (!needs_last_value) release(last_value);
      store_out(last, inverse);
      release(&shared.tile_empty[last]);
      wgmma_wait<0>();
      first_softmax();
    }
    if constexpr (kTile.staged_out)
      if (lane == 0) tma_store_wait();
  }

  // ---- the epilogue (epilogue.cuh), of the work tile in a stage: finish_rows() returns what the results are multiplied by

  __device__ __forceinline__ void finish_rows(int stage, float (&inverse)[2]);
  __device__ __forceinline__ void store_out(int stage, const float (&inverse)[2]);
  __device__ __forceinline__ float* row_of_partial(const ForwardWorkTile& tile, int lane, int r) const;
  __device__ __forceinline__ void store_partial_states(const ForwardWorkTile& tile);
  __device__ __forceinline__ void store_partial(const ForwardWorkTile& tile);
  __device__ __forceinline__ void store_out_by_tma(int stage, const float (&inverse)[2]);
  __device__ __forceinline__ void store_max_logit(const ForwardWorkTile& tile);
  template <class Buffer>
  __device__ __forceinline__ void store_cached_rows(const ForwardWorkTile& tile, const Buffer& buffer);
  __device__ __forceinline__ void store_out_from_registers(int stage, const float (&inverse)[2]);
};

}  // namespace flash_online::cuda
