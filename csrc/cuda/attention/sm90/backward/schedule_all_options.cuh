// The schedule of warpgroups with keys of their own in the kernel that has all options. What these take of registers, less can
// be in flight at once.
#pragma once

#include "../../../hw/compiler.cuh"
#include "../../../hw/cp_async.cuh"
#include "../../../hw/mbarrier.cuh"
#include "../../../hw/named_barrier.cuh"
#include "../../../hw/wgmma.cuh"
#include "dq.cuh"
#include "warpgroup.cuh"

namespace flash_online::cuda {

// Makes the block's weights, and its dP less delta; meanwhile dQ of the block before.
// This is one function because ptxas makes other code of it when its dropout and its exponentials are functions of their own.
template <class T, class Config>
template <bool kFirst>
__device__ __forceinline__ void BackwardSm90Kernel<T, Config>::MathWarpgroup::compute_weights_and_dp(ScoreAccumulator& score,
                                                                                                     ScoreAccumulator& dp,
                                                                                                     PackedScores& weight) {
  const AttentionProblem& problem = a.problem;
  const BackwardWorkTile& tile = this->tile();
  const int now = block_count % 2;
  const QueryBlock& block = query_block();
  Stage& stage = shared.stage[now];
  const auto here = [&] { return ScoreBlock{block.query, tile.key, tile.queries, tile.keys, block.all_visible}; };
  clear_query_tail(now);
  // In registers that dP has later.
  DqAccumulator& dq = reinterpret_cast<DqAccumulator&>(dp);
  start_scores<kHeadDim>(score, key_tile(), stage.query);
  const bool all_visible = block.all_visible;
  if constexpr (!kFirst) {
    start_dq(dq, now ^ 1);
    float* const to = dq_accum_of(query_block(-1));
    wgmma_wait<1>();
    release(&shared.stage_empty[now ^ 1]);
    fence_registers(flat(score));
    wgmma_wait<0>();
    fence_registers(dq);
    add_dq(to, dq, now ^ 1);
  } else {
    wgmma_wait<0>();
    fence_registers(flat(score));
    wait(&shared.value_full, 0);
  }
  wait(&shared.grad_out_full[now], parity());
  start_scores<kHeadDimV>(dp, shared.value, stage.grad_out);
  const HeadMask mask(problem, tile.batch, block.head);
  const bool masked = mask.data && block.mask_flags != kBothVisible;
  Mask mask_tile(reinterpret_cast<char*>(&shared) + kMaskOffset, thread);
  if (masked) {
    mask_tile.load(mask, block.query, tile.queries, tile.key, tile.keys);
    cp_async_commit();
    cp_async_wait();
    sync_named(kAllMathBarrier, kMathThreads);
  }
  wgmma_wait<0>();
  fence_registers(flat(dp));
  const Dropout dropout(problem, tile.batch, block.head);
  unsigned dropped = 0;  // a bit for each weight
  if (dropout) {
#pragma unroll
    for (int j = 0; j < kQueries / 8; j += 2)
      dropped |= (kept_weights<true>(score_row(), 8 * j, dropout, here()) ^ 0xff) << (4 * j);
#pragma unroll
    for (int j = 0; j < kQueries / 8; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) dp[0][j][e] = dropped >> (4 * j + e) & 1 ? 0 : dp[0][j][e] * a.keep_scale;
  }
  recompute_warp_index();
  subtract_delta(now, dp);
  const ScoreMod score_mod = a.score_mod.of_head(problem, tile.batch, block.head);
  if (score_mod.has_score_mod) apply_score_mod<true>(score, score_row(), score_mod, here(), tile.visible, TimesDerivative{dp});
  if (masked)
    mask_scores<true>(score, score_row(), mask.dtype, score_mod.lowest_score, mask_tile, [&] {
      float least = INFINITY;
#pragma unroll
      for (int j = 0; j < kQueries / 8; ++j) {
        const float2 lse = row_stats(now, kLse, j);
        least = fminf(least, fminf(lse.x, lse.y));
      }
      return least;
    });
  if (!all_visible) apply_visibility(score, block.query);
  const bool has_score_mod = a.score_mod.has_score_mod;
#pragma unroll
  for (int j = 0; j < kQueries / 8; ++j) {
    const float2 high = row_stats(now, kLse, j), low = row_stats(now, kLseLow, j);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      float& x = score[0][j][e];
      const float h = e % 2 ? high.y : high.x, l = e % 2 ? low.y : low.x;
      x = FastBinary::exp((has_score_mod ? x - h : fmaf(x, a.score_mod.scale, -h)) - l);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const auto kept = [&](int e) { return dropped >> (4 * j + e) & 1 ? 0.0f : score[0][j][e]; };
      weight[j / 2][j % 2 * 2 + half] = pair(kept(2 * half), kept(2 * half + 1));
    }
  }
  fence_registers(weight);
}

// Starts what the weights add to dV; makes dS of the unrounded weights, publishes it for dQ, and starts what it adds to dK.
template <class T, class Config>
__device__ __forceinline__ void BackwardSm90Kernel<T, Config>::MathWarpgroup::accumulate_and_publish_ds(
    ScoreAccumulator& score, ScoreAccumulator& dp, const PackedScores& weight) {
  recompute_warp_index();
  const int now = block_count % 2;
  Stage& stage = shared.stage[now];
  start_grads<kHeadDimV>(dv, weight, stage.grad_out);
  PackedScores ds;
#pragma unroll
  for (int j = 0; j < kQueries / 8; ++j)
#pragma unroll
    for (int half = 0; half < 2; ++half)
      ds[j / 2][j % 2 * 2 + half] =
          pair(score[0][j][2 * half] * dp[0][j][2 * half], score[0][j][2 * half + 1] * dp[0][j][2 * half + 1]);
  store_ds(shared.ds[now], ds);
  publish();
  release(&shared.ds_full[now]);
  start_grads<kHeadDim>(dk, ds, stage.query);
  ++block_count;
}

template <class T, class Config>
__device__ __forceinline__ void BackwardSm90Kernel<T, Config>::MathWarpgroup::run_all_options() {
  recompute_warp_index();
  clear(dk);
  clear(dv);
  wait_for_keys();
  if (wait_for_block(stage())) {
    clear_key_tail();
    ScoreAccumulator score, dp;
    PackedScores weight;
    compute_weights_and_dp<true>(score, dp, weight);
    while (true) {
      accumulate_and_publish_ds(score, dp, weight);
      recompute_warp_index();
      const bool more = wait_for_block(stage());
      wgmma_wait<0>();  // with products in flight here, ptxas finds no registers (C7512) and runs all in order
      if (!more) break;
      compute_weights_and_dp<false>(score, dp, weight);
    }
    DqAccumulator dq;
    start_dq(dq, (block_count - 1) % 2);
    wgmma_wait<0>();
    fence_registers(dq);
    add_dq(dq_accum_of(query_block(-1)), dq, (block_count - 1) % 2);
  }
  store_dk_and_dv();
}

}  // namespace flash_online::cuda
