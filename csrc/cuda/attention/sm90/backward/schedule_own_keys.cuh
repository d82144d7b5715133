// The schedule of math warpgroups that have keys of their own, 64 each: two per CTA, or one (kSingleWarpgroup).
// docs/design/backward_sm90.md draws it. The order of statements matters: it decides what is in flight at once, and what finds
// registers.
#pragma once

#include "../../../hw/compiler.cuh"
#include "../../../hw/mbarrier.cuh"
#include "../../../hw/named_barrier.cuh"
#include "../../../hw/tma.cuh"
#include "../../../hw/wgmma.cuh"
#include "dq.cuh"
#include "warpgroup.cuh"

namespace flash_online::cuda {

// ---- phases of a block

// Starts S and dP of the block.
template <class T, class Config>
template <bool kFirst>
__device__ __forceinline__ void BackwardSm90Kernel<T, Config>::MathWarpgroup::start_scores_and_dp(
    int now, ScoreAccumulator& score, ScoreAccumulator& dp, const Prefetch& ahead, int shift) {
  if constexpr (!kHasDropout) begin_dp(now, dp);
  ping_pong_enter();
  start_scores_of(now, score, shift);
  if constexpr (kFirst) wait(&shared.value_full, tile_count % 2);
  if constexpr (!kFirst && kTile.send_dq_late)
    if ((kPersistent ? ahead.third : block_count > 1) && !a.dq_semaphore) {
      publish();
      send_dq(dq_accum_of(query_block(-2)));
    }
  if constexpr (kSubtractsByProducts) start_subtraction<StatsOperand::kDelta, false>(dp, now, shift);
  wait(&shared.grad_out_full[now], parity());
  start_scores<kHeadDimV, !kHasDropout>(dp, shared.value, shared.stage[now].grad_out, shift);
  ping_pong_leave();
}

// Makes weights of the scores, when S is there. With dropout `kept` has the weights that are kept, and `weight` all of them.
template <class T, class Config>
__device__ __forceinline__ void BackwardSm90Kernel<T, Config>::MathWarpgroup::compute_weights(int now, ScoreAccumulator& score,
                                                                                              PackedScores& weight,
                                                                                              PackedScores& kept,
                                                                                              const Prefetch& ahead) {
  unsigned visible[kQueries / kStatsRows] = {};
  const bool has_mask_bits =
      kTransposed && a.transposed_mask == TransposedMask::kBits && (ahead.mask_flags & kMixed << warpgroup());
  if constexpr (kTransposed)
    if (has_mask_bits)
#pragma unroll
      for (int n = 0; n < kQueries / kStatsRows; ++n)
        visible[n] = mask_bits(shared, kSparse ? block_count % kMaskBitsBuffers : now).word[n][warp][lane()];
  wgmma_wait<1>();
  fence_registers(flat(score));
  if constexpr (kTransposed) add_alibi_and_mask(score, ahead);
  if (!ahead.all_visible) hide_scores_of_block(score);

  exp_scores(now, score, ahead, weight);
  if constexpr (kTransposed)
    if (has_mask_bits) clear_by_bits(weight, weight, visible);
  fence_registers(weight);
  if constexpr (kHasDropout) {
    int count = block_count;
    // Else ptxas keeps the parity of the wait for grad_out, and has no register for it.
    if constexpr (kQueries == 128) make_opaque(count);
    wait(&shared.mask.dropout_full[now], count / 2 % 2);
    unsigned bits[kQueries / kStatsRows];
#pragma unroll
    for (int n = 0; n < kQueries / kStatsRows; ++n) bits[n] = dropout_bits(a, shared, now).word[n][warp][lane()];
    clear_by_bits(kept, weight, bits);
    fence_registers(kept);
  }
}

// Makes weights and dS in one stretch, for the plain kernel: dP is waited for amid the exponentials, so that the
// multiplications of dS fill the time between them, and dS is made of weights that are not rounded.
template <class T, class Config>
__device__ __forceinline__ void BackwardSm90Kernel<T, Config>::MathWarpgroup::compute_weights_and_ds(
    ScoreAccumulator& score, ScoreAccumulator& dp, PackedScores& weight, PackedScores& ds, const Prefetch& ahead) {
  static_assert(kSubtractsByProducts);
  constexpr int kPairs = kQueries / 8;
  wgmma_wait<1>();
  fence_registers(flat(score));
  if (!ahead.all_visible) hide_scores_of_block(score);
#pragma unroll
  for (int j = 0; j < kPairs; ++j) {
    if (j == kPairs / 2) {
      wgmma_wait<0>();
      fence_registers(flat(dp));
    }
#pragma unroll
    for (float& x : score[0][j]) x = FastBinary::exp(x * a.score_mod.scale);
  }
#pragma unroll
  for (int j = 0; j < kPairs; ++j)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float x = score[0][j][2 * half], y = score[0][j][2 * half + 1];
      weight[j / 2][j % 2 * 2 + half] = pair(x, y);
      ds[j / 2][j % 2 * 2 + half] = pair(x * dp[0][j][2 * half], y * dp[0][j][2 * half + 1]);
    }
  fence_registers(weight);
}

// Makes dS = P (dP - delta), or with dropout dS = (kept P) dP - P (1 - p) delta. P are the weights as they were rounded for the
// products: the registers of the scores hold other values by now.
template <class T, class Config>
__device__ __forceinline__ void BackwardSm90Kernel<T, Config>::MathWarpgroup::compute_ds(int now, PackedScores& ds,
                                                                                         const PackedScores& weight,
                                                                                         const PackedScores& kept,
                                                                                         const ScoreAccumulator& dp) const {
#pragma unroll
  for (int j = 0; j < kQueries / 8; ++j) {
    float2 delta;
    if constexpr (kHasDropout) delta = row_stats(now, kDelta, j);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int t = j / 2, n = j % 2 * 2 + half;
      const float2 x = unpair<T>(weight[t][n]);
      if constexpr (kHasDropout) {
        const float2 y = unpair<T>(kept[t][n]);
        ds[t][n] = pair(fmaf(y.x, dp[0][j][2 * half], -x.x * delta.x), fmaf(y.y, dp[0][j][2 * half + 1], -x.y * delta.y));
      } else {
        ds[t][n] = pair(x.x * dp[0][j][2 * half], x.y * dp[0][j][2 * half + 1]);
      }
    }
  }
}

// Takes dQ of the block before out of its registers, when it is there.
template <class T, class Config>
template <bool kFirst>
__device__ __forceinline__ void BackwardSm90Kernel<T, Config>::MathWarpgroup::finish_dq(int before, DqAccumulator& dq) {
  if constexpr (!kFirst) {
    wgmma_wait<1>();
    fence_registers(dq);
    release(&shared.ds_empty[before]);
    if (a.dq_semaphore)
      add_dq(dq_accum_of(query_block(-1)), dq, before);
    else
      stage_dq(dq);
  }
}

// Waits for the next block and reads what it needs; false: there is none.
template <class T, class Config>
__device__ __forceinline__ bool BackwardSm90Kernel<T, Config>::MathWarpgroup::prefetch_next(int next, Prefetch& ahead) {
  const bool more = kPersistent ? !ahead.last : wait_for_block(next, 1);
  if (more) {
    if constexpr (kPersistent) wait(&shared.query_full[next], (block_count + 1) / 2 % 2);
    prefetch(ahead, next, query_block(1));
  } else if constexpr (kHasDropout && kQueries == 128) {
    ahead = {};  // else ptxas keeps this block's for a next one
  }
  return more;
}

// ---- a block

// Works on a block, and amid it on dQ of the block before; false: it was the last one.
template <class T, class Config>
template <bool kFirst>
__device__ __forceinline__ bool BackwardSm90Kernel<T, Config>::MathWarpgroup::own_block(int now, Prefetch& ahead) {
  static_assert(!kSingleWarpgroup);
  const int other = now ^ 1;
  clear_query_tail(now);
  int shift = 0;
  if constexpr (kFirst) make_opaque(shift);
  Stage& stage = shared.stage[now];
  ScoreAccumulator score, dp;
  start_scores_and_dp<kFirst>(now, score, dp, ahead, shift);
  PackedScores weight, kept, ds;
  DqAccumulator dq;
  if constexpr (kTile.ds_before_dv) {
    compute_weights_and_ds(score, dp, weight, ds, ahead);
    recompute_warp_index();
    start_grads<kHeadDimV>(dv, weight, stage.grad_out, shift);
    if constexpr (!kFirst) start_dq(dq, other);
  } else {
    compute_weights(now, score, weight, kept, ahead);
    start_grads<kHeadDimV>(dv, kHasDropout ? kept : weight, stage.grad_out, shift);
    if constexpr (!kFirst && !kHasDropout) start_dq(dq, other);
    wgmma_wait<kFirst || kHasDropout ? 1 : 2>();
    fence_registers(flat(dp));
    compute_ds(now, ds, weight, kept, dp);
    recompute_warp_index();
  }
  if constexpr (!kFirst && kHasDropout) {
    fence_registers(ds);
    wgmma_wait<0>();  // dV's left operand takes the registers that dQ needs
    start_dq(dq, other);
  }
  wait(&shared.ds_empty[now], parity() ^ 1);
  if constexpr (kPersistent && kFirst) {  // TMA has read dK and dV of the work tile before
    if (lane() == 0) tma_store_wait_read();
    __syncwarp();
  }
  store_ds(shared.ds[now], ds);
  start_grads<kHeadDim>(dk, ds, stage.query, shift);

  if constexpr (!kTile.send_dq_late) finish_dq<kFirst>(other, dq);
  publish();
  release(&shared.ds_full[now]);
  if constexpr (!kFirst && !kTile.send_dq_late)
    if (!a.dq_semaphore) send_dq(dq_accum_of(query_block(-1)));
  const bool more = prefetch_next(other, ahead);
  if constexpr (kTile.send_dq_late) finish_dq<kFirst>(other, dq);
  wgmma_wait<0>();
  // The second stage's release also says that the work tile's end is over: process_work_tile does it for the last block.
  if (!kPersistent || now == 0 || more) release(&shared.stage_empty[now]);
  ++block_count;
  return more;
}

// Works on a block where a CTA has one warpgroup, which makes all of the block's dQ itself; false: it was the last block.
template <class T, class Config>
template <bool kFirst>
__device__ __forceinline__ bool BackwardSm90Kernel<T, Config>::MathWarpgroup::single_warpgroup_block(int now, Prefetch& ahead) {
  static_assert(kSingleWarpgroup && !kHasDropout && !kPersistent);
  const int other = now ^ 1;
  clear_query_tail(now);
  int shift = 0;
  if constexpr (kFirst) make_opaque(shift);
  Stage& stage = shared.stage[now];
  ScoreAccumulator score, dp;
  start_scores_and_dp<kFirst>(now, score, dp, ahead, shift);
  PackedScores weight, ds;
  compute_weights(now, score, weight, weight, ahead);

  start_grads<kHeadDimV>(dv, weight, stage.grad_out, shift);
  wgmma_wait<1>();
  fence_registers(flat(dp));
  compute_ds(now, ds, weight, weight, dp);
  recompute_warp_index();
  fence_registers(ds);
  wgmma_wait<0>();
  sync_named(kAllMathBarrier, kMathThreads);  // all warps have made their dQ of the block before
  store_ds(shared.ds[0], ds);
  fence_async_proxy();
  sync_named(kAllMathBarrier, kMathThreads);
  start_grads<kHeadDim>(dk, ds, stage.query, shift);
  float* const to = dq_accum_of(query_block());
  wgmma_wait<0>();  // dK's left operand takes the registers that dQ needs
  release(&shared.stage_empty[now]);
  DqAccumulator dq;
  start_dq(dq, 0);
  const bool more = prefetch_next(other, ahead);
  wgmma_wait<0>();
  fence_registers(dq);
  add_dq(to, dq, now);
  ++block_count;
  return more;
}

// Passes over a block in which the mask hides all from this warpgroup: it makes its chunk of the block before's dQ all the
// same.
template <class T, class Config>
template <bool kFirst>
__device__ __forceinline__ bool BackwardSm90Kernel<T, Config>::MathWarpgroup::skip_block(int now, Prefetch& ahead) {
  const int other = now ^ 1;
  recompute_warp_index();
  if constexpr (kFirst) {
    wait(&shared.value_full, 0);
  } else {
    DqAccumulator dq;
    start_dq(dq, other);
    if constexpr (kTile.send_dq_late)
      if (block_count > 1) {
        publish();
        send_dq(dq_accum_of(query_block(-2)));
      }
    wgmma_wait<0>();
    fence_registers(dq);
    release(&shared.ds_empty[other]);
    stage_dq(dq);
    if constexpr (!kTile.send_dq_late) {
      publish();
      send_dq(dq_accum_of(query_block(-1)));
    }
  }
  release(&shared.ds_full[now]);
  if (a.transposed_mask == TransposedMask::kTma) {
    wait(&shared.mask.full, block_count % 2);
    release(&shared.mask.empty);
  }
  const bool more = wait_for_block(other, 1);
  if (more) prefetch(ahead, other, query_block(1));
  __syncwarp();
  release(&shared.stage_empty[now]);
  ++block_count;
  return more;
}

template <class T, class Config>
template <bool kFirst>
__device__ __forceinline__ bool BackwardSm90Kernel<T, Config>::MathWarpgroup::step(int now, Prefetch& ahead) {
  if constexpr (kSingleWarpgroup) {
    return single_warpgroup_block<kFirst>(now, ahead);
  } else {
    if constexpr (kTransposed)
      if (!(ahead.mask_flags & kVisible << warpgroup())) return skip_block<kFirst>(now, ahead);
    return own_block<kFirst>(now, ahead);
  }
}

// ---- a work tile

// Processes a work tile's blocks, at least one; then dQ of the last block, and what is left of the one before. A function of
// its own for the last dQ would change the machine code of all kernels of two warpgroups.
template <class T, class Config>
__device__ __forceinline__ void BackwardSm90Kernel<T, Config>::MathWarpgroup::mainloop() {
  clear_key_tail();
  Prefetch ahead;
  prefetch(ahead, 0, query_block());
  if (step<true>(0, ahead))
    while (step<false>(stage(), ahead)) continue;
  if constexpr (kSingleWarpgroup) return;

  if constexpr (kPersistent) release(&shared.value_empty);
  recompute_warp_index();
  DqAccumulator dq;
  start_dq(dq, (block_count - 1) % 2);
  if (kTile.send_dq_late && (kPersistent ? tile().blocks : block_count) > 1 && !a.dq_semaphore) {
    publish();
    send_dq(dq_accum_of(query_block(-2)));
  }
  wgmma_wait<0>();
  fence_registers(dq);
  if constexpr (kPersistent) {
    release(&shared.ds_empty[(block_count - 1) % 2]);
    release(&shared.key_empty[tile_count % kKeyBuffers]);
  }
  if (kPersistent || a.dq_semaphore) {  // dq_staging may be wanted for dV at once
    add_dq(dq_accum_of(query_block(-1)), dq, (block_count - 1) % 2);
  } else {
    stage_dq(dq);
    publish();
    send_dq(dq_accum_of(query_block(-1)));
  }
}

// A work tile of a persistent kernel.
template <class T, class Config>
__device__ __forceinline__ void BackwardSm90Kernel<T, Config>::MathWarpgroup::process_work_tile() {
  recompute_warp_index();
  clear(dk);
  clear(dv);
  if (tile().blocks > 0) {
    wait(&shared.query_full[0], parity());
    mainloop();
  } else {
    // Waits for values that no block needs: the producer must not load the next work tile's into the same buffer before.
    wait(&shared.value_full, tile_count % 2);
    release(&shared.value_empty);
    release(&shared.key_empty[tile_count % kKeyBuffers]);
  }
  for (int n = tile().blocks; n < 2 || n % 2 != 0; ++n, ++block_count) {  // empty stages (Producer::run_persistent)
    const int stage = block_count % 2;
    // Until all warps are done with the work tile before: else arrivals for both would count in one phase.
    wait(&shared.query_full[stage], parity());
    wait(&shared.ds_full[stage], parity() ^ 1);
    release(&shared.ds_full[stage]);
    wait(&shared.ds_empty[stage], parity() ^ 1);
    release(&shared.ds_empty[stage]);
    if (a.dq_semaphore) release(&shared.dq_added[stage]);
    if (stage == 0) release(&shared.stage_empty[0]);
  }
  recompute_warp_index();
  store_dk_and_dv();
  release(&shared.stage_empty[1]);
}

template <class T, class Config>
__device__ __forceinline__ void BackwardSm90Kernel<T, Config>::MathWarpgroup::run_own_keys() {
  recompute_warp_index();
  if (warpgroup() == 1) ping_pong_leave();
  if constexpr (kPersistent) {
#pragma unroll 1
    for (;; ++tile_count) {
      wait_for_keys();
      if (tile().begin < 0) break;
      process_work_tile();
    }
  } else {
    clear(dk);
    clear(dv);
    wait_for_keys();
    if (wait_for_block(0)) mainloop();
    store_dk_and_dv();
  }
  if (lane() == 0) tma_store_wait_read();
}

}  // namespace flash_online::cuda
