// The schedule of head dims from 136 to 192. A CTA owns 96 keys that its three math warpgroups share: each makes the scores of
// all queries of a block and a third of the keys, and with all weights and all dS the 64 columns of dQ, dK and dV that are its
// own. dK and dV are made transposed, [column][key], so that 96 keys take no more registers than 64 do otherwise. Weights and
// dS go through shared memory, as [query][key].
#pragma once

#include "../../../hw/compiler.cuh"
#include "../../../hw/matrix_copy.cuh"
#include "../../../hw/mbarrier.cuh"
#include "../../../hw/named_barrier.cuh"
#include "../../../hw/vector.cuh"
#include "../../../hw/wgmma.cuh"
#include "warpgroup.cuh"

namespace flash_online::cuda {

// ---- products

// Starts S = Q K^T or dP = dO V^T, [the block's queries][this warpgroup's keys].
template <class T, class Config>
template <int kColumns, int kCount>
__device__ __forceinline__ void BackwardSm90Kernel<T, Config>::MathWarpgroup::start_shared_scores(
    ScoreAccumulator& d, const TmaTile<kCount, kQueries>& left, const TmaTile<kCount, kKeys>& right) {
  int first = warpgroup() * kScoreKeys;
  make_opaque(first);  // as in start_scores
  start_row_products<T, kColumns / 16, kQueries, kKeys>(d, shared_address(left.box),
                                                        shared_address(right.box) + first * kRowBytes);
}

// Starts dV^T += dO^T P or dK^T += Q^T dS, [this warpgroup's columns][key].
template <class T, class Config>
__device__ __forceinline__ void BackwardSm90Kernel<T, Config>::MathWarpgroup::start_transposed_grads(
    TransposedGrads& d, const T (&left)[kQueries][kBoxColumns], const DsTile& right) {
  const uint64_t columns = mn_major_descriptor(shared_address(left), 0),
                 scores = mn_major_descriptor(shared_address(right.box), kQueries * kRowBytes);
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < kQueries / 16; ++step)
    Wgmma<T, kKeys>::template ss<true, true>(flat(d), offset_descriptor(columns, step * 16 * kRowBytes),
                                             offset_descriptor(scores, step * 16 * kRowBytes), true);
  wgmma_commit();
}

// Starts dQ = dS K, [the block's queries][this warpgroup's columns].
template <class T, class Config>
__device__ __forceinline__ void BackwardSm90Kernel<T, Config>::MathWarpgroup::start_shared_dq(DqAccumulator& d) {
  const uint64_t ds = k_major_descriptor(shared_address(shared.ds[0].box)),
                 keys = mn_major_descriptor(shared_address(key_tile().box[warpgroup()]), 0);
  constexpr int kBoxSteps = kBoxColumns / 16;
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < kKeys / 16; ++step)
    Wgmma<T, kDqPieceColumns>::template ss<true>(
        d, offset_descriptor(ds, step / kBoxSteps * kQueries * kRowBytes + step % kBoxSteps * (kRowBytes / 4)),
        offset_descriptor(keys, step * 16 * kRowBytes), step > 0);
  wgmma_commit();
}

// ---- scores, weights and dS: a lane holds those of queries score_query() and score_query() + 8

template <class T, class Config>
__device__ __forceinline__ int BackwardSm90Kernel<T, Config>::MathWarpgroup::score_query() const {
  return warp % 4 * 16 + lane() / 4;
}

template <class T, class Config>
__device__ __forceinline__ void BackwardSm90Kernel<T, Config>::MathWarpgroup::hide_shared_scores(
    ScoreAccumulator& score) const {
  const WorkTile& tile = this->tile();
  const int key = tile.key + warpgroup() * kScoreKeys + lane() % 4 * 2;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int query = query_block().query + score_query() + 8 * half, at = query + tile.offset - key, begin = at - tile.left,
              end = query < tile.queries ? min(at + tile.right + 1, tile.keys - key) : -kKeys;
#pragma unroll
    for (int j = 0; j < kScoreKeys / 8; ++j)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float& x = score[0][j][2 * half + e];
        x = 8 * j + e >= begin && 8 * j + e < end ? x : lowest<float>();
      }
  }
}

// Writes this warp's part of the weights or of dS.
template <class T, class Config>
__device__ __forceinline__ void BackwardSm90Kernel<T, Config>::MathWarpgroup::store_shared_scores(DsTile& to,
                                                                                                  const PackedScores& words) {
  const int first = warpgroup() * kScoreKeys;
#pragma unroll
  for (int t = 0; t < kScoreKeys / 16; ++t)
    stmatrix_x4(words[t], shared_address(to.box[first / kBoxColumns]) +
                              swizzle128(warp % 4 * 16 + lane() % 16, first % kBoxColumns / 8 + 2 * t + lane() / 16));
}

// ---- a block

// Works on a block, and leaves its dK running.
template <class T, class Config>
__device__ __forceinline__ void BackwardSm90Kernel<T, Config>::MathWarpgroup::shared_keys_block() {
  const int now = stage(), other = now ^ 1;
  ScoreAccumulator score, dp;
  wait(&shared.query_full[now], parity());
  clear_query_tail(now);
  // These are read before the products of scores start: beside them, a read of shared memory takes 400 clocks.
  const QueryBlock& block = query_block();
  const bool all_visible = block.all_visible;
  float lse[2], lse_low[2], delta[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float* const stats = shared.row_stats[now][0] + score_query() + 8 * half;
    lse[half] = stats[kLse * kStatsRows];
    lse_low[half] = stats[kLseLow * kStatsRows];
    delta[half] = stats[kDelta * kStatsRows];
  }
  start_shared_scores<kHeadDim>(score, shared.stage[now].query, key_tile());
  wgmma_wait<1>();  // dK of the block before
  if (block_count > 0) release(&shared.stage_empty[other]);
  wait(&shared.grad_out_full[0], block_count % 2);
  start_shared_scores<kHeadDimV>(dp, shared.grad_out, shared.value);
  wgmma_wait<1>();
  fence_registers(flat(score));
  if (!all_visible) hide_shared_scores(score);
  PackedScores weight, ds;
#pragma unroll
  for (int j = 0; j < kScoreKeys / 8; ++j)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const auto exponentiate = [&](float x) {
        return FastBinary::exp(fmaf(x, a.score_mod.scale, -lse[half]) - lse_low[half]);
      };
      const float* const x = &score[0][j][2 * half];
      weight[j / 2][j % 2 * 2 + half] = pair(exponentiate(x[0]), exponentiate(x[1]));
    }
  wgmma_wait<0>();
  fence_registers(flat(dp));
#pragma unroll
  for (int t = 0; t < kScoreKeys / 16; ++t)
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const float2 w = unpair<T>(weight[t][n]);
      const float* const x = &dp[0][2 * t + n / 2][n % 2 * 2];
      ds[t][n] = pair(w.x * (x[0] - delta[n % 2]), w.y * (x[1] - delta[n % 2]));
    }
  // All have made dV, dQ and dK of the block before, for which they read what is overwritten here.
  if (block_count > 0) wait(&shared.stage_empty[other], (block_count - 1) / 2 % 2);
  store_shared_scores(shared.ds[kWeights], weight);
  store_shared_scores(shared.ds[0], ds);
  fence_async_proxy();
  sync_named(kAllMathBarrier, kMathThreads);  // all weights and all dS are there
  if (has_values())
    start_transposed_grads(dv, shared.grad_out.box[warpgroup()], shared.ds[kWeights]);
  else
    wgmma_commit();  // so that there are as many groups
  DqAccumulator dq;
  start_shared_dq(dq);
  wgmma_wait<1>();  // dV
  release(&shared.hand_over.grad_out_empty[0]);
  start_transposed_grads(dk, shared.stage[now].query.box[warpgroup()], shared.ds[0]);
  wgmma_wait<1>();  // dQ
  fence_registers(dq);
  ++block_count;
  if (a.dq_semaphore) {
    add_dq(dq_accum_of(query_block(-1)), dq, now);
  } else {
    stage_dq(dq);
    publish();
    release(&shared.dq.full[warpgroup()]);  // for send_dq
  }
}

template <class T, class Config>
__device__ __forceinline__ void BackwardSm90Kernel<T, Config>::MathWarpgroup::run_shared_keys() {
  recompute_warp_index();
  // By a shuffle, since the compiler would else read the special register again wherever the thread's number is needed.
  thread = __shfl_sync(~0u, thread, thread % kWarpSize);
  clear(dk);
  clear(dv);
  wait_for_keys();
  if (const int blocks = tile().blocks; blocks > 0) {
    clear_key_tail();
    wait(&shared.value_full, 0);
    while (block_count < blocks) shared_keys_block();
    wgmma_wait<0>();
  }
  recompute_warp_index();
  sync_named(kAllMathBarrier, kMathThreads);  // all are done with keys and values in shared memory
  fence_registers(flat(dk));
  fence_registers(flat(dv));
  if (is_part()) [[unlikely]] {
    store_transposed_part(dk, 0, kHeadDim);
    if (has_values()) store_transposed_part(dv, kKeys * kHeadDim, kHeadDimV);
  } else {
    store_transposed_grad(dk, key_tile().box[warpgroup()], static_cast<float>(a.problem.scale), a.gradients.grad_key,
                          a.problem.head_dim);
    if (has_values())
      store_transposed_grad(dv, shared.value.box[warpgroup()], 1.0f, a.gradients.grad_value, a.problem.head_dim_v);
  }
}

// ---- the epilogue

// Stores this warpgroup's columns of dK or dV, times `scale`, by way of the box of keys or values that it alone still needs.
template <class T, class Config>
__device__ __forceinline__ void BackwardSm90Kernel<T, Config>::MathWarpgroup::store_transposed_grad(
    const TransposedGrads& d, T (&box)[kKeys][kBoxColumns], float scale, const MutableView4& view, int64_t width) {
#pragma unroll
  for (int t = 0; t < kKeys / 16; ++t) {
    unsigned words[4];
    pack_scaled(d, t, scale, words);
    stmatrix_x4_trans(words,
                      shared_address(box) + swizzle128(16 * t + lane() / 16 * 8 + lane() % 8, warp % 4 * 2 + lane() / 8 % 2));
  }
  sync_named(kWarpgroupBarrier + warpgroup(), kWarpgroupThreads);
  const WorkTile& tile = this->tile();
  const int first_column = warpgroup() * kBoxColumns, rows = tile.last_key - tile.key,
            columns = static_cast<int>(width) - first_column;
  const int64_t row_stride = view.stride[2], column_stride = view.stride[3];
  T* const to = static_cast<T*>(view.data) + tile.batch * view.stride[0] + tile.kv_grad_head * view.stride[1] +
                tile.first_key * row_stride + first_column * column_stride;
  constexpr int kPer = kPerVector<T>, kChunks = kBoxColumns / kPer;
  const bool vectors = column_stride == 1 && columns % kPer == 0 && misalignment(to) == 0 && row_stride % kPer == 0;
#pragma unroll 1
  for (int index = thread % kWarpgroupThreads; index < rows * kChunks; index += kWarpgroupThreads) {
    const int row = index / kChunks, column = index % kChunks * kPer;
    const T* const from = &box[row][(index % kChunks ^ row % 8) * kPer];
    if (vectors) {
      if (column < columns) *reinterpret_cast<uint4*>(to + row * row_stride + column) = *reinterpret_cast<const uint4*>(from);
    } else {
      for (int n = 0; n < min(kPer, columns - column); ++n) to[row * row_stride + (column + n) * column_stride] = from[n];
    }
  }
}

// Leaves the sums of a part of a work tile to convert_dq_accum, which takes them in tiles of 16 keys and 8 columns. `first`: of
// the matrix in the part's slot; `width`: its columns.
template <class T, class Config>
__device__ __forceinline__ void BackwardSm90Kernel<T, Config>::MathWarpgroup::store_transposed_part(const TransposedGrads& d,
                                                                                                    int first,
                                                                                                    int width) const {
  float* const to = a.kv_grad_parts.data + tile().slot * a.kv_grad_parts.slot_size() + first;
#pragma unroll
  for (int j = 0; j < kKeys / 8; ++j)
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int key = 8 * j + lane() % 4 * 2 + e % 2, column = warpgroup() * kBoxColumns + score_query() + e / 2 * 8,
                at = key % 8 * 4 + column % 8 / 2;  // the lane that holds it in such a tile
      if (column < width)
        to[(key / 16 * (width / 8) + column / 8) * 128 + dq_accum_offset(at, key % 16 / 8 * 2 + column % 2)] = d[0][j][e];
    }
}

}  // namespace flash_online::cuda
