// A math warpgroup of the Hopper backward kernel: what all of its schedules (schedule_*.cuh) are made of. Products, weights,
// the stores of dK and dV; dQ is in dq.cuh.
#pragma once

#include <cstdint>
#include <type_traits>

#include "../../../hw/compiler.cuh"
#include "../../../hw/matrix_copy.cuh"
#include "../../../hw/mbarrier.cuh"
#include "../../../hw/named_barrier.cuh"
#include "../../../hw/prmt.cuh"
#include "../../../hw/shared_memory.cuh"
#include "../../../hw/tma.cuh"
#include "../../../hw/vector.cuh"
#include "../../../hw/wgmma.cuh"
#include "../../common/store_rows.cuh"
#include "../gemm.cuh"
#include "config.cuh"

namespace flash_online::cuda {

template <class T, class Config>
struct BackwardSm90Kernel<T, Config>::MathWarpgroup {
  const BackwardSm90Arguments& a;
  Shared& shared;
  int thread;    // among those of the math warpgroups
  int warp = 0;  // among those of the math warpgroups: uniform, as far as the compiler knows
  int block_count = 0;  // blocks of queries before this one
  int tile_count = 0;   // work tiles before this one
  GradAccumulator<kHeadDim> dk;
  GradAccumulator<kHeadDimV> dv;

  // ---- where this thread stands

  // Computes `warp` once more, and whatever follows from `thread` afterwards, since the compiler forgets what it knows of them.
  // That takes fewer registers than to keep these numbers.
  __device__ __forceinline__ void recompute_warp_index() {
    make_opaque(thread);
    warp = __shfl_sync(~0u, static_cast<unsigned>(thread) / kWarpSize, 0);
  }
  __device__ __forceinline__ int warpgroup() const { return warp / 4; }
  __device__ __forceinline__ int lane() const { return static_cast<unsigned>(thread) % kWarpSize; }
  // This warp among the kDqWarps that share the same scores, or dQ.
  __device__ __forceinline__ int row_warp() const { return kPipelined ? warp % 4 : warp; }
  __device__ __forceinline__ int score_row() const { return row_warp() * kWarpKeys; }

  __device__ __forceinline__ const BackwardWorkTile& tile() const { return shared.tile[tile_count % kWorkTiles]; }
  __device__ __forceinline__ KeyTile& key_tile() const { return shared.key[tile_count % kKeyBuffers]; }
  // The current block, or the one `offset` after it.
  __device__ __forceinline__ const QueryBlock& query_block(int offset = 0) const {
    return shared.query_block[(block_count + offset) % kQueryBlocks];
  }

  // Blocks of queries alternate between the two stages. The loops have one body for both stages, and the uniform datapath
  // computes its addresses: a body for each stage was twice the code and no faster.
  __device__ __forceinline__ int stage() const { return block_count % 2; }
  __device__ __forceinline__ unsigned parity() const { return block_count / 2 % 2; }

  // ---- barriers

  __device__ __forceinline__ void release(uint64_t* barrier) {
    if (lane() == 0) arrive(barrier);
  }
  // The same barrier in each CTA of the cluster.
  __device__ __forceinline__ void release_in_cluster(uint64_t* barrier) {
    if constexpr (!kPipelined)
      release(barrier);
    else if (lane() < kCluster)
      arrive_at(barrier, lane());
  }
  // Once all lanes of the warp have come here.
  __device__ __forceinline__ void sync_and_release(uint64_t* barrier) {
    __syncwarp();
    release(barrier);
  }
  __device__ __forceinline__ void wait_for_keys() {
    wait(&shared.key_full[tile_count % kKeyBuffers], tile_count / kKeyBuffers % 2);
  }
  // Waits for the block `offset` after the one at hand; false: there is none.
  __device__ __forceinline__ bool wait_for_block(int stage, int offset = 0) {
    wait(&shared.query_full[stage], (block_count + offset) / 2 % 2);
    return query_block(offset).query >= 0;
  }
  // grad_out of the block at hand: the number of its buffer, the parity of that buffer's phase, and the wait for it.
  __device__ __forceinline__ int grad_out_buffer() const { return block_count % kGradOutStages; }
  __device__ __forceinline__ unsigned grad_out_parity() const { return block_count / kGradOutStages % 2; }
  __device__ __forceinline__ void wait_for_grad_out() { wait(&shared.grad_out_full[grad_out_buffer()], grad_out_parity()); }
  // Waits until all dS have been read, for dQ of the last blocks.
  __device__ __forceinline__ void wait_for_last_dq() {
    for (int n = 0; n < kDsBuffers; ++n)
      wait(&shared.ds_empty[(block_count + n) % kDsBuffers], (block_count + n) / kDsBuffers % 2 ^ 1);
  }
  // True if a phase is complete. All lanes of the warp get the same answer.
  __device__ __forceinline__ bool is_complete(uint64_t* barrier, unsigned parity) const {
    return __shfl_sync(~0u, static_cast<int>(test_wait(barrier, parity)), 0) != 0;
  }
  // Makes what the warp has written into shared memory readable for TMA and wgmma.
  __device__ __forceinline__ void publish() {
    fence_async_proxy();
    __syncwarp();
  }
  // Ping-pong: a warpgroup starts its scores when the other one has started its own.
  __device__ __forceinline__ void ping_pong_enter() {
    if constexpr (kTile.ping_pong) sync_named(kPingPongBarrier + warpgroup(), kMathThreads);
  }
  __device__ __forceinline__ void ping_pong_leave() {
    if constexpr (kTile.ping_pong) arrive_named(kPingPongBarrier + (warpgroup() ^ 1), kMathThreads);
  }
  // All math threads wait for each other. The warpgroups of the pipelined schedule come here from different places of the code;
  // compute-sanitizer takes a barrier for threads of one place, so each of them has a barrier that the other one arrives at. No
  // warpgroup reaches a point for the second time before the other one has left it: it needs that one's next block first.
  __device__ __forceinline__ void sync_math(int point) {
    if constexpr (kPipelined) {
      arrive_named(kSyncBarrier + 2 * point + (warpgroup() ^ 1), kMathThreads);
      sync_named(kSyncBarrier + 2 * point + warpgroup(), kMathThreads);
    } else {
      sync_named(kAllMathBarrier, kMathThreads);
    }
  }

  // ---- products

  // Starts S = K Q^T or dP = V dO^T, [this warpgroup's keys][the block's queries]; kAdd: added to what `d` has; kCommit: as one
  // group. `shift` is 0, but the compiler must not know it in the block that stands before the loop: else it keeps that block's
  // addresses for the loop.
  template <int kColumns, bool kAdd = false, bool kCommit = true, int kCount>
  __device__ __forceinline__ void start_scores(ScoreAccumulator& d, const TmaTile<kCount, kKeys>& left,
                                               const TmaTile<kCount, kQueries>& right, unsigned shift = 0) {
    int first = kPipelined ? 0 : warpgroup() * kWarpgroupKeys;
    // Else ptxas keeps the keys' addresses of all steps from before the loop, and finds no uniform registers for others.
    if constexpr (kPipelined) make_opaque(first);
    start_row_products<T, kColumns / 16, kKeys, kQueries, kAdd, kCommit>(
        d, shared_address(left.box) + first * kRowBytes + shift, shared_address(right.box) + shift);
  }

  // Starts the product that subtracts a row statistic of the block's queries from `d`, or makes it minus that statistic unless
  // kAdd. kStat: the first row of the StatsOperand, kLse or kDelta.
  template <int kStat, bool kAdd>
  __device__ __forceinline__ void start_subtraction(ScoreAccumulator& d, int stage, unsigned shift) {
    constexpr unsigned kOnes = 0x3f803f80;  // a pair of bfloat16
    // In the first two words, this lane has 2 * (lane() % 4) + {0, 1} of a step's 16 k: delta's are the first two.
    const unsigned ones = kStat == StatsOperand::kLse || lane() % 4 == 0 ? kOnes : 0;
    const unsigned left[4] = {ones, ones, 0, 0};
    // The step's other 8 k, which meet zeros, are lse's, whatever the statistic: delta may be infinite.
    const uint64_t stats =
        unswizzled_descriptor(shared_address(shared.row_stats[stage][0].bits[0][kStat]) + shift, StatsOperand::kGroupBytes,
                              (StatsOperand::kLse - kStat) * StatsOperand::kRowBytes);
    wgmma_fence();
    Wgmma<__nv_bfloat16, kQueries>::template rs<true>(flat(d), left, stats, kAdd);
  }

  // Starts the scores of a block, less lse where products subtract it: last, so that before it the scores are those of the
  // forward pass to the last bit, since lse is made of them.
  __device__ __forceinline__ void start_scores_of(int stage, ScoreAccumulator& score, unsigned shift = 0) {
    start_scores<kHeadDim, false, !kSubtractsByProducts>(score, key_tile(), shared.stage[stage].query, shift);
    if constexpr (kSubtractsByProducts) {
      start_subtraction<StatsOperand::kLse, true>(score, stage, shift);
      wgmma_commit();
    }
  }
  // Starts dP less delta of a block, after begin_dp.
  __device__ __forceinline__ void start_dp_less_delta(int stage, ScoreAccumulator& dp) {
    if constexpr (kSubtractsByProducts) start_subtraction<StatsOperand::kDelta, false>(dp, stage, 0);
    start_scores<kHeadDimV, true>(dp, shared.value, grad_out_tile(shared, stage));
  }

  // Starts dV += P^T dO or dK += dS^T Q, [this warpgroup's keys][columns]; `shift` as for start_scores.
  template <int kColumns, int kCount>
  __device__ __forceinline__ void start_grads(GradAccumulator<kColumns>& d, const PackedScores& left,
                                              const TmaTile<kCount, kQueries>& right, unsigned shift = 0) {
    // In a kernel of four warpgroups ptxas has no registers for one product of 256 columns.
    constexpr int kChunks = kColumns > 192 ? 2 : 1, kChunkColumns = kColumns / kChunks;
    wgmma_fence();
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      const uint64_t columns =
          mn_major_descriptor(shared_address(right.box[chunk * (kChunkColumns / kBoxColumns)]) + shift, kQueries * kRowBytes);
#pragma unroll
      for (int step = 0; step < kQuerySteps; ++step)
        Wgmma<T, kChunkColumns>::template rs<true>(
            reinterpret_cast<float (&)[kChunkColumns / 2]>(d[0][chunk * (kChunkColumns / 8)]), left[step],
            offset_descriptor(columns, step * 16 * kRowBytes), true);
    }
    wgmma_commit();
  }

  // ---- dQ (dq.cuh)

  __device__ __forceinline__ void start_dq(DqAccumulator& d, int buffer);
  __device__ __forceinline__ void start_shared_dq_chunk(DqAccumulator& d, int buffer, int chunk);
  __device__ __forceinline__ float* dq_accum_of(const QueryBlock& block) const;
  // The first of a chunk's boxes of columns, where the pipeline makes it.
  __device__ __forceinline__ static int dq_box(int chunk) { return rank() * (kBoxes - kDqChunks) + chunk; }
  __device__ __forceinline__ int dq_tiles() const;
  __device__ __forceinline__ int dq_tile(int chunk, int n) const;
  template <int kFirst>
  __device__ __forceinline__ void add_dq_tiles(float* to, const DqAccumulator& d, int chunk) const;
  __device__ __forceinline__ void add_dq(float* to, const DqAccumulator& d, int buffer, int chunk = 0);
  __device__ __forceinline__ void stage_dq(const DqAccumulator& d, int chunk = 0);
  __device__ __forceinline__ void send_dq(float* to, int chunk = 0);
  __device__ __forceinline__ static void keep_last_dq(DqAccumulator& to, const DqAccumulator& from);
  __device__ __forceinline__ void add_last_dq(float* to, const DqAccumulator& d, int chunk = 0);

  // ---- row statistics

  static constexpr int kLse = 0, kLseLow = 1, kDelta = 2;  // kinds, in the order of shared memory
  // A kind's numbers of the two neighbouring queries of the block that this lane holds in columns 8 j to 8 j + 7.
  __device__ __forceinline__ float2 row_stats(int stage, int kind, int j) const {
    const int at = 8 * j % kStatsRows + lane() % 4 * 2;
    if constexpr (kLseLowInStaging) {
      if (kind == kLseLow) return *reinterpret_cast<const float2*>(&shared.dq_staging[warp][8 * j + lane() % 4 * 2]);
      kind /= 2;
    }
    return *reinterpret_cast<const float2*>(&shared.row_stats[stage][8 * j / kStatsRows][kind * kStatsRows + at]);
  }
  // Where kLseLowInStaging: reads the block's low parts, which hardly ever count, from global memory.
  __device__ __forceinline__ void stage_lse_low() {
    if (lane() == 0) tma_store_wait_read();
    __syncwarp();
    const QueryBlock& block = query_block();
    const int n = 4 * lane() / kStatsRows, last = (tile().queries - 1) / kStatsRows - block.query / kStatsRows;
    const int64_t row_block = block.dq_offset / (kStatsRows * kHeadDim) + min(n, last);  // as in Producer::load_block
    reinterpret_cast<float4*>(shared.dq_staging[warp])[lane()] =
        reinterpret_cast<const float4*>(a.space.row_stats + row_block * kRowStats + kStatsRows)[lane() % (kStatsRows / 4)];
    __syncwarp();
  }

  // A block's row statistics, read at the end of the block before: shared memory has a long latency while it feeds the
  // products.
  struct Prefetch {
    static constexpr int kLsePairs = kTile.prefetch_lse ? kQueries / 8 : 1;
    bool all_visible, last, third;  // of QueryBlock
    bool needs_lse_low;  // unless kSubtractsByProducts
    int mask_flags;  // QueryBlock::mask_flags
    float2 lse[kLsePairs];
  };
  // True if the low part of lse counts for any query of a block.
  __device__ __forceinline__ bool any_large_lse(int stage) const {
    // Below it the float nearest to lse is off by 2^-17 at most: 16 times less than weights are rounded by.
    constexpr float kLargeLse = 256;
    bool any_large = false;
#pragma unroll
    for (int n = 0; n < kQueries / kStatsRows; ++n) {
      const float2 x = *reinterpret_cast<const float2*>(&shared.row_stats[stage][n][2 * lane()]);
      const auto large = [](float y) { return fabsf(y) >= kLargeLse && y < -lowest<float>(); };
      any_large = any_large || large(x.x) || large(x.y);
    }
    return __any_sync(~0u, any_large);
  }
  __device__ __forceinline__ void prefetch(Prefetch& next, int stage, const QueryBlock& block) const {
    next.all_visible = block.all_visible;
    if constexpr (kPersistent) next.last = block.last, next.third = block.third;
    if constexpr (kTransposed) next.mask_flags = block.mask_flags;
    if constexpr (!kSubtractsByProducts) next.needs_lse_low = any_large_lse(stage);
    if constexpr (kTile.prefetch_lse)
#pragma unroll
      for (int j = 0; j < Prefetch::kLsePairs; ++j) next.lse[j] = row_stats(stage, kLse, j);
  }

  // ---- rows past a packed sequence's end become zeros, by all math threads

  template <int kCount, int kRows>
  __device__ __forceinline__ void clear_tail(TmaTile<kCount, kRows>& rows, int from) {
    cuda::clear_tail<kMathThreads>(rows.box, from, thread);
  }
  __device__ __forceinline__ void publish_tail(int point) {
    fence_async_proxy();
    sync_math(point);
  }
  __device__ __forceinline__ void clear_key_tail() {
    const BackwardWorkTile& tile = this->tile();
    const int cluster_key = tile.key - rank() * kKeys;
    if (a.problem.query_starts && cluster_key + kClusterKeys > tile.keys) {
      wait_for_keys();
      wait(&shared.value_full, tile_count % 2);
      const int from = max(tile.keys - tile.key, 0);
      clear_tail(key_tile(), from);
      clear_tail(shared.value, from);
      if constexpr (kPipelined) clear_tail(shared.peer.key, max(tile.keys - cluster_key - (rank() ^ 1) * kKeys, 0));
      publish_tail(kKeyTail);
    }
  }
  __device__ __forceinline__ bool has_query_tail() const {
    return a.problem.query_starts && query_block().query + kQueries > tile().queries;
  }
  // The condition is has_query_tail(), but with it the loops of head dims up to 128 take 2 to 5 % more clocks (`make sass`).
  __device__ __forceinline__ void clear_query_tail(int stage) {
    const BackwardWorkTile& tile = this->tile();
    const int query = query_block().query;
    if (a.problem.query_starts && query + kQueries > tile.queries) {
      wait_for_grad_out();
      clear_tail(shared.stage[stage].query, tile.queries - query);
      clear_tail(grad_out_tile(shared, stage), tile.queries - query);
      publish_tail(kQueryTail + (kPipelined ? stage : 0));
    }
  }

  // ---- from scores to weights

  __device__ __forceinline__ static unsigned pair(float x, float y) { return Fragments<T>::pair(x, y); }

  // Adds the 16-bit mask of the block's stage. kBounded: no score falls below the lowest one (score_levels.cuh).
  template <bool kBounded>
  __device__ __forceinline__ void add_mask(ScoreAccumulator& score) {
    // TMA's 128-byte swizzle. Added to the row's address, it takes an instruction less than as one offset of row and chunk.
    const int row = lane() % 16;
    const unsigned base = shared_address(mask_box(shared, warpgroup()).value[row]) +
                          ((warp % 4 * 2 + lane() / 16) ^ (row % 8)) * static_cast<int>(kVectorBytes);
    const auto add = [&](float& x, float value) {
      x = fmaf(value, a.bias_scale, x);
      if constexpr (kBounded) x = max_or_nan(x, lower_bound(value, a.score_mod.lowest_product));
    };
#pragma unroll
    for (int t = 0; t < kQueries / 16; ++t) {
      unsigned words[4];
      ldmatrix_x4_trans(words, base + t * 16 * kRowBytes);
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        float* const x = &score[0][2 * t + n % 2][n / 2 * 2];
        const float2 values = unpair<T>(words[n]);
        add(x[0], values.x);
        add(x[1], values.y);
      }
    }
  }
  __device__ __forceinline__ void add_alibi(ScoreAccumulator& score) const {
    if (a.problem.alibi_slopes) {
      const QueryBlock& block = query_block();
      const BackwardWorkTile& tile = this->tile();
      const float distance =
          static_cast<float>(block.query + lane() % 4 * 2 + tile.offset - tile.key - score_row() - lane() / 4);
      const Alibi<float> alibi{block.slope};
#pragma unroll
      for (int j = 0; j < kQueries / 8; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          float& x = score[0][j][e];
          x = alibi(x, fabsf(distance + static_cast<float>(8 * j + e % 2 - e / 2 * 8))).value;
        }
    }
  }
  // Adds ALiBi and a 16-bit mask to the scores.
  __device__ __forceinline__ void add_alibi_and_mask(ScoreAccumulator& score, const Prefetch& now) {
    add_alibi(score);
    if constexpr (!kHasDropout) {
      if (a.transposed_mask == TransposedMask::kTma) {
        wait(&shared.mask.full, block_count % 2);
        if (now.mask_flags & kMixed << warpgroup()) {
          // Rows with the lowest score for all keys have a large lse; float16 masks do not reach the lowest score.
          if (!std::is_same_v<T, __half> && now.needs_lse_low) [[unlikely]]
            add_mask<true>(score);
          else
            add_mask<false>(score);
        }
        fence_registers(flat(score));  // the values have been read before the arrival says so
        release(&shared.mask.empty);
      }
    }
  }

  // Does what hide_scores<true> does, in fewer registers.
  __device__ __forceinline__ void apply_visibility(ScoreAccumulator& score, int query) const {
    const BackwardWorkTile& tile = this->tile();
    const int first = query + lane() % 4 * 2, queries_left = tile.queries - first;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int key = tile.key + score_row() + 8 * half + lane() / 4, at = key - tile.offset - first;
      const int begin = at - tile.right, end = key < tile.keys ? min(at + tile.left + 1, queries_left) : -kQueries;
#pragma unroll
      for (int j = 0; j < kQueries / 8; ++j)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& x = score[0][j][2 * half + e];
          x = 8 * j + e >= begin && 8 * j + e < end ? x : lowest<float>();
        }
    }
  }

  // Hides what position or sparsity does not show, in a block that is not all visible.
  __device__ __forceinline__ void hide_scores_of_block(ScoreAccumulator& score) {
    const QueryBlock& block = query_block();
    apply_visibility(score, block.query);
    if constexpr (kHasScheduler) {
      if (!(block.mask_flags & kMixed << warpgroup())) return;
#pragma unroll
      for (int n = 0; n < kQueries / kStatsRows; ++n) {
        const unsigned bits = mask_bits(shared, block_count % kMaskBitsBuffers).word[n][warp][lane()];
#pragma unroll
        for (int j = 0; j < kStatsRows / 8; ++j)
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const unsigned shown =
                bits << TransposedMaskBits::place(j, half);  // of the lower and the higher query: bits 15, 31
            float* const x = &score[0][n * (kStatsRows / 8) + j][2 * half];
            x[0] = shown & 1u << 15 ? x[0] : lowest<float>();
            x[1] = shown & 1u << 31 ? x[1] : lowest<float>();
          }
      }
    }
  }

  // Exponentiates a block's scores into its weights.
  __device__ __forceinline__ void exp_scores(int stage, ScoreAccumulator& score, const Prefetch& now, PackedScores& weight) {
    if constexpr (kSubtractsByProducts)
      exp_each(score, weight, [&](float x) { return x * a.score_mod.scale; });  // x is less lse already
    else if constexpr (kHasDropout && kQueries == 128)
      exp_scores_in_two_steps(stage, score, now, weight);
    else
      exp_less_lse(stage, score, now, weight);
  }
  // Makes weights exp2(exponent(x)) of a block's scores x.
  template <class F>
  __device__ __forceinline__ static void exp_each(ScoreAccumulator& score, PackedScores& weight, const F& exponent) {
#pragma unroll
    for (int j = 0; j < kQueries / 8; ++j) {
#pragma unroll
      for (float& x : score[0][j]) x = FastBinary::exp(exponent(x));
#pragma unroll
      for (int half = 0; half < 2; ++half)
        weight[j / 2][j % 2 * 2 + half] = pair(score[0][j][2 * half], score[0][j][2 * half + 1]);
    }
  }
  __device__ __forceinline__ void exp_less_lse(int stage, ScoreAccumulator& score, const Prefetch& now, PackedScores& weight) {
    const auto exponentiate = [&]<bool kWithLow>(std::bool_constant<kWithLow>) {
      const auto read_lse = [&](int j, float2& high, float2& low) {
        high = kTile.prefetch_lse ? now.lse[j % Prefetch::kLsePairs] : row_stats(stage, kLse, j);
        low = kWithLow ? row_stats(stage, kLseLow, j) : make_float2(0, 0);
      };
      exp_products<T>(score, a.score_mod, read_lse, weight);
    };
    if (now.needs_lse_low) {
      if constexpr (kLseLowInStaging) stage_lse_low();
      exponentiate(std::true_type{});
    } else {
      exponentiate(std::false_type{});
    }
  }
  // The same in fewer registers: all scores become exponents, in place, ahead of the first exponential.
  __device__ __forceinline__ void exp_scores_in_two_steps(int stage, ScoreAccumulator& score, const Prefetch& now,
                                                          PackedScores& weight) const {
    const auto subtract_lse = [&]<bool kWithLow>(std::bool_constant<kWithLow>) {
#pragma unroll
      for (int j = 0; j < kQueries / 8; ++j) {
        const float2 high = row_stats(stage, kLse, j), low = kWithLow ? row_stats(stage, kLseLow, j) : make_float2(0, 0);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          float& x = score[0][j][e];
          x = fmaf(x, a.score_mod.scale, e % 2 ? -high.y : -high.x) - (e % 2 ? low.y : low.x);
        }
      }
    };
    now.needs_lse_low ? subtract_lse(std::true_type{}) : subtract_lse(std::false_type{});
    fence_registers(flat(score));
    exp_each(score, weight, [](float x) { return x; });
  }

  // The tangent of Softcap (score_mod.cuh), by one exponential: scores in units of the cap.
  __device__ __forceinline__ void apply_softcap(ScoreAccumulator& score) const {
    const float to_exponent = 2 * kLog2E * a.score_mod.scale;
#pragma unroll
    for (float& x : flat(score)) x = tanh_of_exponent(x * to_exponent);
  }
  // Exponentiates scores that apply_softcap has made, x, into the block's weights; hidden scores are -inf. `sloped` gets the
  // weights times the derivative of the softcap, 1 - x^2.
  __device__ __forceinline__ void exp_softcapped_scores(int stage, const ScoreAccumulator& score, const Prefetch& now,
                                                        PackedScores& weight, PackedScores& sloped) const {
    const float cap = a.score_mod.cap;
    const auto times_derivative = [](float weight, float x) {
      x = fmaxf(x, -1.0f);  // a hidden score is -inf
      return fmaf(-x * weight, x, weight);
    };
    const auto exponentiate = [&]<bool kWithLow>(std::bool_constant<kWithLow>) {
#pragma unroll
      for (int j = 0; j < kQueries / 8; ++j) {
        const float2 lse = row_stats(stage, kLse, j), low = kWithLow ? row_stats(stage, kLseLow, j) : make_float2(0, 0);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float x = score[0][j][2 * half], y = score[0][j][2 * half + 1],
                      p = FastBinary::exp(fmaf(x, cap, -lse.x) - low.x), q = FastBinary::exp(fmaf(y, cap, -lse.y) - low.y);
          weight[j / 2][j % 2 * 2 + half] = pair(p, q);
          sloped[j / 2][j % 2 * 2 + half] = pair(times_derivative(p, x), times_derivative(q, y));
        }
      }
    };
    now.needs_lse_low ? exponentiate(std::true_type{}) : exponentiate(std::false_type{});
  }

  // Clears the weights with a 0 bit in `bits`, which are laid out as TransposedMaskBits.
  __device__ __forceinline__ static void clear_by_bits(PackedScores& to, const PackedScores& from,
                                                       const unsigned (&bits)[kQueries / kStatsRows]) {
#pragma unroll
    for (int t = 0; t < kQueries / 16; ++t)
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const int query = t % 4 * 2 + n / 2;
        if constexpr (kHasDropout) {  // one shift for both keys' bits
          const unsigned signs = bits[t / 4] << TransposedMaskBits::place(query, 1);
          to[t][n] = from[t][n] & (n % 2 ? sign_mask_16x2(signs) : sign_mask_16x2_below(signs));
        } else {
          to[t][n] = from[t][n] & sign_mask_16x2(bits[t / 4] << TransposedMaskBits::place(query, n % 2));
        }
      }
  }

  // ---- from weights' gradients to scores' gradients

  __device__ __forceinline__ void subtract_delta(int stage, ScoreAccumulator& dp) const {
#pragma unroll
    for (int j = 0; j < kQueries / 8; ++j) {
      const float2 delta = row_stats(stage, kDelta, j);
      dp[0][j][0] -= delta.x, dp[0][j][1] -= delta.y;
      dp[0][j][2] -= delta.x, dp[0][j][3] -= delta.y;
    }
  }
  // Makes minus delta, to which dP is added, unless a product does it.
  __device__ __forceinline__ void begin_dp(int stage, ScoreAccumulator& dp) {
    if constexpr (!kSubtractsByProducts) {
#pragma unroll
      for (int j = 0; j < kQueries / 8; ++j) {
        const float2 delta = row_stats(stage, kDelta, j);
        dp[0][j][0] = dp[0][j][2] = -delta.x;
        dp[0][j][1] = dp[0][j][3] = -delta.y;
      }
      fence_registers(flat(dp));
    }
  }
  __device__ __forceinline__ void store_ds(DsTile& to, const PackedScores& ds) {
    const int r = score_row() + lane() % 16;  // its chunks are swizzled as TMA does
#pragma unroll
    for (int t = 0; t < kQueries / 16; ++t)
      stmatrix_x4(ds[t], shared_address(to.box[t / 4][r]) +
                             ((t % 4 * 2 + lane() / 16) ^ (lane() % 8)) * static_cast<int>(kVectorBytes));
  }

  // ---- the epilogue: dK and dV of this warpgroup's keys

  __device__ __forceinline__ void store_dk() {
    fence_registers(flat(dk));
    store_grad(dk, static_cast<float>(a.problem.scale), a.gradients.grad_key, a.problem.head_dim);
  }
  __device__ __forceinline__ void store_dv() {
    fence_registers(flat(dv));
    store_grad(dv, kAllOptions ? a.keep_scale : 1.0f, a.gradients.grad_value, a.problem.head_dim_v);
  }
  __device__ __forceinline__ void store_dk_and_dv() {
    fence_registers(flat(dk));
    fence_registers(flat(dv));
    if constexpr (!kPersistent) sync_named(kAllMathBarrier, kMathThreads);  // all are done with the queries in shared memory
    if (is_part()) [[unlikely]] {
      store_partial(dk, 0);
      store_partial(dv, kKeys * kHeadDim);
      return;
    }
    if constexpr (kPersistent)
      if (a.sends_grads && tile().key + score_row() + kWarpKeys <= tile().last_key) return send_dk_and_dv();
    store_dk();
    store_dv();
  }
  __device__ __forceinline__ bool is_part() const { return kCutsTiles && tile().slot >= 0; }
  // This warp's staging rows for box `box` of dK or dV, in a persistent kernel. They overlay dS, which is no longer needed, and
  // dq_staging, in memory that no other warp writes: only this warp has to wait until TMA has read them before it writes again.
  __device__ __forceinline__ T* outgoing_rows(bool is_key, int box) {
    if constexpr (kQueryBoxes == 2) return shared.ds[0].box[is_key ? 1 : 0][score_row()];
    return is_key ? shared.ds[box].box[0][score_row()]
                  : reinterpret_cast<T*>(shared.dq_staging[warp]) + box * kWarpKeys * kBoxColumns;
  }
  template <int kColumns>
  __device__ __forceinline__ void stage_grad(const GradAccumulator<kColumns>& d, float scale, bool is_key) {
#pragma unroll
    for (int t = 0; t < kColumns / 16; ++t) {
      unsigned words[4];
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const float* const x = &d[0][2 * t + n / 2][n % 2 * 2];
        words[n] = pair(scale * x[0], scale * x[1]);
      }
      stmatrix_x4(words, shared_address(outgoing_rows(is_key, t / 4)) + swizzle128(lane() % 16, t % 4 * 2 + lane() / 16));
    }
  }
  __device__ __forceinline__ void send_dk_and_dv() {
    if (lane() == 0) tma_store_wait_read();
    __syncwarp();
    wait_for_last_dq();
    stage_grad<kHeadDimV>(dv, 1.0f, false);
    stage_grad<kHeadDim>(dk, static_cast<float>(a.problem.scale), true);
    publish();
    if (lane() == 0) {
      const BackwardWorkTile& tile = this->tile();
      const int row = tile.first_key + score_row();
#pragma unroll
      for (int box = 0; box < kBoxes; ++box)
        tma_store(a.grad_key.map, a.grad_key.at(tile.batch, tile.first_head, row, box), outgoing_rows(true, box));
#pragma unroll
      for (int box = 0; box < kValueBoxes; ++box)
        tma_store(a.grad_value.map, a.grad_value.at(tile.batch, tile.first_head, row, box), outgoing_rows(false, box));
      tma_store_commit();
    }
  }
  // Leaves the sums of a part of a work tile to convert_dq_accum. `first`: of the matrix in the part's slot.
  template <int kCount>
  __device__ __forceinline__ void store_partial(const Accumulator<1, kCount>& d, int first) const {
    float4* const to =
        reinterpret_cast<float4*>(a.kv_grad_partials.data + tile().slot * a.kv_grad_partials.slot_size() + first) +
        ((4 * rank() + row_warp()) * kCount * kWarpSize + lane());
#pragma unroll
    for (int j = 0; j < kCount; ++j) to[j * kWarpSize] = make_float4(d[0][j][0], d[0][j][1], d[0][j][2], d[0][j][3]);
  }
  template <int kCount>
  __device__ __forceinline__ void store_grad(Accumulator<1, kCount>& d, float scale, const MutableView4& view, int64_t width) {
    const BackwardWorkTile& tile = this->tile();
    const int rows = tile.last_key - tile.key, columns = static_cast<int>(width);
    T* const to = static_cast<T*>(view.data) + tile.batch * view.stride[0] + tile.kv_grad_head * view.stride[1] +
                  tile.first_key * view.stride[2];
    if constexpr (kPersistent) {  // the next work tile's queries arrive in shared memory
      store_rows(d, scale, score_row(), to, view.stride[2], view.stride[3], rows, columns, lane());
    } else {
#pragma unroll
      for (float& x : flat(d)) x *= scale;
      // Staged where queries and grad_out were; each warpgroup of the pipeline has its own range of that memory.
      char* const tile_at = reinterpret_cast<char*>(&shared.stage) + (kPipelined ? warpgroup() * OutTile::bytes(kKeys) : 0);
      store_rows<T>(d, OutTile{reinterpret_cast<T*>(tile_at)}, 0, score_row(), to, view.stride[2], view.stride[3], rows,
                    columns);
    }
  }

  // ---- schedules

  // Each warpgroup has keys of its own (schedule_own_keys.cuh).
  template <bool kFirst>
  __device__ __forceinline__ void start_scores_and_dp(int now, ScoreAccumulator& score, ScoreAccumulator& dp,
                                                      const Prefetch& ahead, int shift);
  __device__ __forceinline__ void compute_weights(int now, ScoreAccumulator& score, PackedScores& weight, PackedScores& kept,
                                                  const Prefetch& ahead);
  __device__ __forceinline__ void compute_weights_and_ds(ScoreAccumulator& score, ScoreAccumulator& dp, PackedScores& weight,
                                                         PackedScores& ds, const Prefetch& ahead);
  __device__ __forceinline__ void compute_ds(int now, PackedScores& ds, const PackedScores& weight, const PackedScores& kept,
                                             const ScoreAccumulator& dp) const;
  template <bool kFirst>
  __device__ __forceinline__ void finish_dq(int before, DqAccumulator& dq);
  __device__ __forceinline__ bool prefetch_next(int next, Prefetch& ahead);
  template <bool kFirst>
  __device__ __forceinline__ bool own_block(int now, Prefetch& ahead);
  template <bool kFirst>
  __device__ __forceinline__ bool single_warpgroup_block(int now, Prefetch& ahead);
  template <bool kFirst>
  __device__ __forceinline__ bool skip_block(int now, Prefetch& ahead);
  template <bool kFirst>
  __device__ __forceinline__ bool step(int now, Prefetch& ahead);
  __device__ __forceinline__ void mainloop();
  __device__ __forceinline__ void process_work_tile();
  __device__ __forceinline__ void run_own_keys();

  // Each warpgroup has keys of its own, and there are all options (schedule_all_options.cuh).
  template <bool kFirst>
  __device__ __forceinline__ void compute_weights_and_dp(ScoreAccumulator& score, ScoreAccumulator& dp, PackedScores& weight);
  __device__ __forceinline__ void accumulate_and_publish_ds(ScoreAccumulator& score, ScoreAccumulator& dp,
                                                            const PackedScores& weight);
  __device__ __forceinline__ void run_all_options();

  // Three warpgroups form a pipeline (schedule_pipeline.cuh).
  __device__ __forceinline__ void make_weights_with_options(int now, ScoreAccumulator& score, const Prefetch& block,
                                                            PackedScores& weight, PackedScores& sloped);
  __device__ __forceinline__ bool weights_and_dv_block(int now, ScoreAccumulator& score);
  __device__ __forceinline__ void run_weights_and_dv();
  __device__ __forceinline__ bool ds_and_dk_block(int now, ScoreAccumulator& dp);
  __device__ __forceinline__ void run_ds_and_dk();
  __device__ __forceinline__ uint4* weights_in(int buffer) const;
  __device__ __forceinline__ void send_ds(int buffer) const;
  __device__ __forceinline__ void wait_for_peer_ds(int buffer) const;
  __device__ __forceinline__ void run_dq();
};

}  // namespace flash_online::cuda
