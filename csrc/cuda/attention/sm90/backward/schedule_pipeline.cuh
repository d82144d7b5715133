// The schedule of head dims over 128, where dK and dV of 128 keys take too many registers. A CTA owns 64 keys, and three math
// warpgroups form a pipeline: the first makes weights and dV, the second makes of these weights dS and dK, the third makes dQ.
// What one hands to the next goes through shared memory. Two CTAs may form a cluster that shares dQ: the third warpgroup of
// each makes half of its columns, of the dS of both.
#pragma once

#include "../../../hw/cluster.cuh"
#include "../../../hw/compiler.cuh"
#include "../../../hw/mbarrier.cuh"
#include "../../../hw/named_barrier.cuh"
#include "../../../hw/tma.cuh"
#include "../../../hw/wgmma.cuh"
#include "dq.cuh"
#include "warpgroup.cuh"

namespace flash_online::cuda {

// This lane's weights of a block, kWarpSize vectors apart, in the rows that its warp later writes dS to.
template <class T, class Config>
__device__ __forceinline__ uint4* BackwardSm90Kernel<T, Config>::MathWarpgroup::weights_in(int buffer) const {
  return reinterpret_cast<uint4*>(shared.ds[buffer].box[0][score_row()]) + lane();
}

// ---- the first warpgroup: weights and dV

// Makes weights of the block's scores under a softcap or ALiBi, and a bool mask. `sloped` is what dS is made of: the weights,
// under a softcap times its derivative.
template <class T, class Config>
__device__ __forceinline__ void BackwardSm90Kernel<T, Config>::MathWarpgroup::make_weights_with_options(
    int now, ScoreAccumulator& score, const Prefetch& block, PackedScores& weight, PackedScores& sloped) {
  const bool capped = a.score_mod.cap > 0, has_mask_bits = a.transposed_mask == TransposedMask::kBits && block.mask_flags != 0;
  const unsigned visible[1] = {
      has_mask_bits ? mask_bits(shared, kSparse ? block_count % kMaskBitsBuffers : now).word[0][row_warp()][lane()] : 0};
  if (capped)
    apply_softcap(score);
  else
    add_alibi(score);
  if (!block.all_visible) apply_visibility(score, query_block().query);
  if (capped) {
    exp_softcapped_scores(now, score, block, weight, sloped);
    if (has_mask_bits) clear_by_bits(sloped, sloped, visible);
  } else {
    exp_scores(now, score, block, weight);
  }
  if (has_mask_bits) clear_by_bits(weight, weight, visible);
  if (!capped) {
#pragma unroll
    for (int t = 0; t < kQuerySteps; ++t)
#pragma unroll
      for (int n = 0; n < 4; ++n) sloped[t][n] = weight[t][n];
  }
}

// Makes weights of the block's scores, which are there, hands them on and adds to dV; meanwhile the next block's scores. False:
// there is no next block.
template <class T, class Config>
__device__ __forceinline__ bool BackwardSm90Kernel<T, Config>::MathWarpgroup::weights_and_dv_block(int now,
                                                                                                   ScoreAccumulator& score) {
  const int next = now ^ 1;
  recompute_warp_index();
  Prefetch block;
  prefetch(block, now, query_block());
  PackedScores weight, sloped;
  if constexpr (kTransposed) {
    make_weights_with_options(now, score, block, weight, sloped);
    fence_registers(sloped);
  } else {
    if (!block.all_visible) apply_visibility(score, query_block().query);
    exp_scores(now, score, block, weight);
  }
  fence_registers(weight);
  const PackedScores& handed_on = kTransposed ? sloped : weight;
  sync_and_release(&shared.stage_empty[now]);
  const int buffer = block_count % kDsBuffers;
  wait(&shared.ds_empty[buffer], block_count / kDsBuffers % 2 ^ 1);
  uint4* const to = weights_in(buffer);
#pragma unroll
  for (int t = 0; t < kQuerySteps; ++t)
    to[t * kWarpSize] = make_uint4(handed_on[t][0], handed_on[t][1], handed_on[t][2], handed_on[t][3]);
  sync_and_release(&shared.hand_over.weights_full[buffer]);
  uint64_t* const grad_out_empty = &shared.hand_over.grad_out_empty[grad_out_buffer()];
  wait_for_grad_out();
  start_grads<kHeadDimV>(dv, weight, grad_out_tile(shared, now));
  ++block_count;
  // While the next block is loaded, this waits for dV, so that the copy of the next grad_out can start. It has to start in any
  // case before its tail can be cleared.
  const bool releases_early = !is_complete(&shared.query_full[next], parity()) || has_query_tail();
  if (releases_early) {
    wgmma_wait<0>();
    release(grad_out_empty);
  }
  if (!wait_for_block(next)) {
    wgmma_wait<0>();
    return false;
  }
  clear_query_tail(next);
  start_scores_of(next, score);
  if (!releases_early) {
    wgmma_wait<1>();
    release(grad_out_empty);
  }
  wgmma_wait<0>();
  fence_registers(flat(score));
  return true;
}

template <class T, class Config>
__device__ __forceinline__ void BackwardSm90Kernel<T, Config>::MathWarpgroup::run_weights_and_dv() {
  recompute_warp_index();
  clear(dv);
  wait_for_keys();
  if (wait_for_block(0)) {
    clear_key_tail();
    clear_query_tail(0);
    ScoreAccumulator score;
    start_scores_of(0, score);
    wgmma_wait<0>();
    fence_registers(flat(score));
    while (weights_and_dv_block(stage(), score)) continue;
  }
  sync_math(kEnd);  // all are done with the queries in shared memory
  is_part() ? store_partial(dv, kClusterKeys * kHeadDim) : store_dv();
}

// ---- the second warpgroup: dS and dK

// Makes dS of the block's dP, which is there, hands it on and adds to dK; meanwhile the next block's dP. False: there is no
// next block.
template <class T, class Config>
__device__ __forceinline__ bool BackwardSm90Kernel<T, Config>::MathWarpgroup::ds_and_dk_block(int now, ScoreAccumulator& dp) {
  const int next = now ^ 1;
  recompute_warp_index();
  const int buffer = block_count % kDsBuffers;
  wait(&shared.hand_over.weights_full[buffer], block_count / kDsBuffers % 2);
  const uint4* const weights = weights_in(buffer);
  PackedScores ds;
#pragma unroll
  for (int t = 0; t < kQuerySteps; ++t) {
    const uint4 four = weights[t * kWarpSize];
    const unsigned weight[] = {four.x, four.y, four.z, four.w};
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const float2 x = unpair<T>(weight[n]);
      const int j = 2 * t + n / 2, half = n % 2;
      ds[t][n] = pair(x.x * dp[0][j][2 * half], x.y * dp[0][j][2 * half + 1]);
    }
  }
  fence_registers(ds);
  __syncwarp();  // all lanes have read the weights
  store_ds(shared.ds[buffer], ds);
  publish();
  release(&shared.ds_full[buffer]);
  send_ds(buffer);
  start_grads<kHeadDim>(dk, ds, shared.stage[now].query);
  ++block_count;
  if (!wait_for_block(next)) {
    wgmma_wait<0>();
    return false;
  }
  clear_query_tail(next);
  begin_dp(next, dp);
  // While grad_out is loaded, this waits for dK, so that the copy of the queries of the block after the next can start.
  const bool releases_early = !is_complete(&shared.grad_out_full[grad_out_buffer()], grad_out_parity());
  if (releases_early) {
    wgmma_wait<0>();
    release(&shared.stage_empty[now]);
  }
  wait_for_grad_out();
  start_dp_less_delta(next, dp);
  if (!releases_early) {
    wgmma_wait<1>();
    release(&shared.stage_empty[now]);
  }
  wgmma_wait<0>();
  fence_registers(flat(dp));
  release(&shared.hand_over.grad_out_empty[grad_out_buffer()]);
  return true;
}

template <class T, class Config>
__device__ __forceinline__ void BackwardSm90Kernel<T, Config>::MathWarpgroup::run_ds_and_dk() {
  recompute_warp_index();
  clear(dk);
  if (wait_for_block(0)) {
    wait(&shared.value_full, 0);
    clear_key_tail();
    clear_query_tail(0);
    ScoreAccumulator dp;
    begin_dp(0, dp);
    wait_for_grad_out();
    start_dp_less_delta(0, dp);
    wgmma_wait<0>();
    fence_registers(flat(dp));
    release(&shared.hand_over.grad_out_empty[0]);
    while (ds_and_dk_block(stage(), dp)) continue;
  }
  // This hands a block that does not exist to the third warpgroup, which so learns that there are no more.
  wait(&shared.ds_empty[block_count % kDsBuffers], block_count / kDsBuffers % 2 ^ 1);
  release(&shared.ds_full[block_count % kDsBuffers]);
  sync_math(kEnd);
  is_part() ? store_partial(dk, 0) : store_dk();
  // The other CTA still reads the dS that this one sent, and arrives here: its last arrivals must find this CTA running.
  wait_for_last_dq();
}

// Sends this warp's dS of a block to the cluster's other CTA. Its buffer there is free, as this CTA's is: ds_empty counts both.
template <class T, class Config>
__device__ __forceinline__ void BackwardSm90Kernel<T, Config>::MathWarpgroup::send_ds(int buffer) const {
  if (lane() == 0)
    bulk_copy_to(shared.peer.ds[buffer].box[0][score_row()], shared.ds[buffer].box[0][score_row()], kWarpKeys * kRowBytes,
                 &shared.peer.ds_full[buffer], rank() ^ 1);
}

// ---- the third warpgroup: dQ

// Waits for the other CTA's dS of the block at hand, and says that another one is going to come in its place.
template <class T, class Config>
__device__ __forceinline__ void BackwardSm90Kernel<T, Config>::MathWarpgroup::wait_for_peer_ds(int buffer) const {
  uint64_t* const full = &shared.peer.ds_full[buffer];
  wait(full, block_count / kDsBuffers % 2);
  if (thread == 2 * kWarpgroupThreads) arrive_expect_tx(full, sizeof(DsTile));
}

template <class T, class Config>
__device__ __forceinline__ void BackwardSm90Kernel<T, Config>::MathWarpgroup::run_dq() {
  recompute_warp_index();
  wait_for_keys();
  while (true) {
    const int buffer = block_count % kDsBuffers;
    wait(&shared.ds_full[buffer], block_count / kDsBuffers % 2);
    if (query_block().query < 0) break;
    float* const to = dq_accum_of(query_block());
    wait_for_peer_ds(buffer);
    ++block_count;
    recompute_warp_index();
    DqAccumulator dq;
    start_shared_dq_chunk(dq, buffer, 0);
#pragma unroll
    for (int chunk = 0; chunk < kDqChunks; ++chunk) {
      wgmma_wait<0>();
      fence_registers(dq);
      if (chunk == kDqChunks - 1) release_in_cluster(&shared.ds_empty[buffer]);
      if (a.dq_semaphore) {
        add_dq(to, dq, (block_count - 1) % 2, chunk);
        if (chunk < kDqChunks - 1) start_shared_dq_chunk(dq, buffer, chunk + 1);
      } else {
        stage_dq(dq, chunk);
        DqAccumulator last;
        keep_last_dq(last, dq);
        // The registers are free: the next product overlaps the fence.
        if (chunk < kDqChunks - 1) start_shared_dq_chunk(dq, buffer, chunk + 1);
        publish();
        send_dq(to, chunk);
        add_last_dq(to, last, chunk);  // after the fence, which would wait for these additions
      }
    }
  }
  if (lane() == 0) tma_store_wait_read();
}

}  // namespace flash_online::cuda
