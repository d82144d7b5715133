// dQ of a block: the products, and the ways by which it reaches the dQ accumulator in global memory.
#pragma once

#include <cstdint>

#include "../../../hw/compiler.cuh"
#include "../../../hw/mbarrier.cuh"
#include "../../../hw/tma.cuh"
#include "../../../hw/wgmma.cuh"
#include "../../common/dq_accum.cuh"
#include "warpgroup.cuh"

namespace flash_online::cuda {

// ---- the products

// Starts this warpgroup's chunk of dQ = dS K, from the dS in `buffer`: the block before's, or where a warpgroup is alone this
// block's.
template <class T, class Config>
__device__ __forceinline__ void BackwardSm90Kernel<T, Config>::MathWarpgroup::start_dq(DqAccumulator& d, int buffer) {
  if constexpr (!kSingleWarpgroup) wait(&shared.ds_full[buffer], (block_count - 1) / 2 % 2);
  const uint64_t ds = k_major_descriptor(shared_address(shared.ds[buffer].box[kDqSideBySide ? 0 : warpgroup()])),
                 keys = mn_major_descriptor(shared_address(key_tile().box[kDqSideBySide ? warpgroup() : 0]), kKeys * kRowBytes);
  if constexpr (kTransposed && kKeys > kWarpgroupKeys) {
    const int visible = query_block(-1).mask_flags & kBothVisible;
    if (visible != kBothVisible) {  // only one warpgroup's keys are seen: half of the sum
      const unsigned first = (visible >> 1) * kWarpgroupKeys * kRowBytes;
      wgmma_fence();
#pragma unroll
      for (int step = 0; step < kKeySteps / 2; ++step)
        Wgmma<T, kDqChunkColumns>::template ss<true, true>(d, offset_descriptor(ds, first + step * 16 * kRowBytes),
                                                           offset_descriptor(keys, first + step * 16 * kRowBytes), step > 0);
      wgmma_commit();
      return;
    }
  }
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < kKeySteps; ++step)
    Wgmma<T, kDqChunkColumns>::template ss<true, true>(d, offset_descriptor(ds, step * 16 * kRowBytes),
                                                       offset_descriptor(keys, step * 16 * kRowBytes), step > 0);
  wgmma_commit();
}

// The same in the pipeline, for one of the kDqChunks that its third warpgroup makes one after another: of the dS and the keys
// of both CTAs of the cluster. Where they share an odd number of boxes, the chunk's last columns are half of the box in the
// middle.
template <class T, class Config>
__device__ __forceinline__ void BackwardSm90Kernel<T, Config>::MathWarpgroup::start_shared_dq_chunk(DqAccumulator& d,
                                                                                                    int buffer, int chunk) {
  constexpr unsigned kBoxBytes = kKeys * kRowBytes, kNarrowBytes = kDqNarrowColumns * sizeof(T);
  const int box = dq_box(chunk), peer_box = box - first_peer_box(), middle = kBoxes / 2;
  const auto start = [&](const DsTile& ds, const auto& keys, int wide, int narrow, bool adds) {
    const uint64_t left = k_major_descriptor(shared_address(ds.box[0])),
                   right = mn_major_descriptor(shared_address(keys.box[wide]), kBoxBytes),
                   last = mn_major_descriptor(shared_address(keys.box[narrow]) + rank() * kNarrowBytes, kBoxBytes);
#pragma unroll
    for (int step = 0; step < kKeySteps; ++step) {
      constexpr int kStepBytes = 16 * kRowBytes;
      const uint64_t left_step = offset_descriptor(left, step * kStepBytes);
      Wgmma<T, kBoxColumns>::template ss<true, true>(reinterpret_cast<float (&)[kBoxColumns / 2]>(d), left_step,
                                                     offset_descriptor(right, step * kStepBytes), adds || step > 0);
      if constexpr (kDqNarrowColumns > 0)
        Wgmma<T, kDqNarrowColumns>::template ss<true, true>(
            reinterpret_cast<float (&)[kDqNarrowColumns / 2]>(d[kBoxColumns / 2]), left_step,
            offset_descriptor(last, step * kStepBytes), adds || step > 0);
    }
  };
  wgmma_fence();
  start(shared.ds[buffer], key_tile(), box, middle, false);
  start(shared.peer.ds[buffer], shared.peer.key, peer_box, middle - first_peer_box(), true);
  wgmma_commit();
}

// ---- on the way to global memory

// The address in the dQ accumulator of this lane's values of a block's dQ; null: the warpgroup's chunk is padding.
template <class T, class Config>
__device__ __forceinline__ float* BackwardSm90Kernel<T, Config>::MathWarpgroup::dq_accum_of(const QueryBlock& block) const {
  const int width = dq_accum_width(a.space);
  constexpr int kRowTiles = kDqSideBySide ? 0 : kDqChunkColumns / 16,
                kColumnTiles = kDqSideBySide && !kPipelined ? kDqChunkColumns / 8 : 0;  // per warpgroup
  const bool exists = kDqSideBySide ? kPipelined || warpgroup() * kDqChunkColumns < width
                                    : block.query + warpgroup() * kDqChunkColumns < tile().queries;
  const int first = ((warpgroup() * kRowTiles + warp % 4) * (width / 8) + warpgroup() * kColumnTiles) * 128;
  return exists ? a.space.dq_accum + block.dq_offset + first + dq_accum_offset(lane(), 0) : nullptr;
}

// The number of 16 x 8 tiles from there on that are not padding.
template <class T, class Config>
__device__ __forceinline__ int BackwardSm90Kernel<T, Config>::MathWarpgroup::dq_tiles() const {
  constexpr int kTiles = kDqChunkColumns / 8;
  if constexpr (kPipelined) return static_cast<int>(a.problem.head_dim + 7) / 8;
  return kAllOptions || kHeadDim % kDqChunkColumns == 0 || warpgroup() < kHeadDim / kDqChunkColumns
             ? kTiles
             : kHeadDim % kDqChunkColumns / 8;
}

// The index among these tiles of a chunk's n-th tile.
template <class T, class Config>
__device__ __forceinline__ int BackwardSm90Kernel<T, Config>::MathWarpgroup::dq_tile(int chunk, int n) const {
  constexpr int kBoxTiles = kBoxColumns / 8, kNarrowTiles = kDqNarrowColumns / 8;
  if (!kPipelined) return n;
  if (kDqNarrowColumns > 0 && n >= kBoxTiles) return kBoxes / 2 * kBoxTiles + rank() * kNarrowTiles + n - kBoxTiles;
  return dq_box(chunk) * kBoxTiles + n;
}

// Adds a chunk's tiles from number kFirst on from registers.
template <class T, class Config>
template <int kFirst>
__device__ __forceinline__ void BackwardSm90Kernel<T, Config>::MathWarpgroup::add_dq_tiles(float* to, const DqAccumulator& d,
                                                                                           int chunk) const {
  if (!to) return;
  const int tiles = dq_tiles();
#pragma unroll
  for (int j = kFirst; j < kDqChunkColumns / 8; ++j)
    if (dq_tile(chunk, j) < tiles) dq_accum_add(to + dq_tile(chunk, j) * 128, reinterpret_cast<const float (&)[4]>(d[4 * j]));
}

// Adds all of a chunk from registers; in deterministic mode when the dQ semaphore admits this CTA.
template <class T, class Config>
__device__ __forceinline__ void BackwardSm90Kernel<T, Config>::MathWarpgroup::add_dq(float* to, const DqAccumulator& d,
                                                                                     int buffer, int chunk) {
  if (a.dq_semaphore) wait(&shared.dq_may_add[buffer], (block_count - 1) / 2 % 2);
  add_dq_tiles<0>(to, d, chunk);
  if (a.dq_semaphore && chunk == kDqChunks - 1) {
    __syncwarp();
    release(&shared.dq_added[buffer]);
  }
}

// A chunk, but for its last tiles, is added by bulk reductions: stage_dq() writes it into shared memory, publish() follows, and
// send_dq() starts the reduction.
template <class T, class Config>
__device__ __forceinline__ void BackwardSm90Kernel<T, Config>::MathWarpgroup::stage_dq(const DqAccumulator& d, int chunk) {
  if (lane() == 0) tma_store_wait_read();
  __syncwarp();
  float4* const to = reinterpret_cast<float4*>(shared.dq_staging[row_warp()]) + lane();
#pragma unroll
  for (int j = 0; j < kDqBulkTiles; ++j) to[j * kWarpSize] = make_float4(d[4 * j], d[4 * j + 1], d[4 * j + 2], d[4 * j + 3]);
}

template <class T, class Config>
__device__ __forceinline__ void BackwardSm90Kernel<T, Config>::MathWarpgroup::send_dq(float* to, int chunk) {
  const int first = dq_tile(chunk, 0), tiles = min(dq_tiles() - first, kDqBulkTiles);
  if (to && lane() == 0) {
    if (!kPipelined || tiles > 0)
      bulk_reduce_add(to + first * 128, shared.dq_staging[row_warp()], tiles * 128 * static_cast<int>(sizeof(float)));
    tma_store_commit();
  }
}

// The last tiles of the chunk are added from registers. They are copied first, so that the next chunk can be started.
template <class T, class Config>
__device__ __forceinline__ void BackwardSm90Kernel<T, Config>::MathWarpgroup::keep_last_dq(DqAccumulator& to,
                                                                                           const DqAccumulator& from) {
#pragma unroll
  for (int n = 4 * kDqBulkTiles; n < kDqChunkColumns / 2; ++n) {
    to[n] = from[n];
    make_opaque(to[n]);
  }
}

template <class T, class Config>
__device__ __forceinline__ void BackwardSm90Kernel<T, Config>::MathWarpgroup::add_last_dq(float* to, const DqAccumulator& d,
                                                                                          int chunk) {
  if constexpr (kDqBulkTiles < kDqChunkColumns / 8) add_dq_tiles<kDqBulkTiles>(to, d, chunk);
}

}  // namespace flash_online::cuda
