// The end of a work tile of the Hopper forward kernel: division by the sums of the rows, lse, the store of the results.
#pragma once

#include "../../../hw/matrix_copy.cuh"
#include "../../common/max_logit.cuh"
#include "consumer.cuh"

namespace flash_online::cuda {

template <class T, class Variant>
__device__ __forceinline__ void ForwardSm90Kernel<T, Variant>::MathWarpgroup::finish_rows(int stage, float (&inverse)[2]) {
  const ForwardWorkTile& tile = shared.tile[stage];
  int here = lane;
  if constexpr (kKvSplit) make_opaque(here);  // or what follows from it takes registers throughout the tiles
  bool is_empty[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    softmax[r].sum += __shfl_xor_sync(~0u, softmax[r].sum, 1);
    softmax[r].sum += __shfl_xor_sync(~0u, softmax[r].sum, 2);
  }
  if constexpr (kKvSplit) {
    if (tile.partial) return store_partial_states(tile);
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    is_empty[r] = softmax[r].sum == 0;
    float factor = 1;
    if (a.scores.sinks) {
      const float sink =
          a.scores.sinks[head_of_row(a, tile, row_block * kRowsPerWarpgroup + kRowsPerWarp * warp + here / 4 + 8 * r)] * kLog2E;
      factor = softmax[r].raise_max(sink);
      softmax[r].add(softmax[r].weight(sink));
    }
    inverse[r] = softmax[r].sum == 0 ? 0 : factor * reciprocal(softmax[r].sum);
    if constexpr (kHasDropout) inverse[r] *= a.dropout.keep_scale;
  }
  // The first two lanes of a quad write the lse of one row each.
  const bool second = here % 4 == 1;
  RowSoftmax own;
  own.max = second ? softmax[1].max : softmax[0].max;
  own.sum = second ? softmax[1].sum : softmax[0].sum;
  const int row_of_tile = row_block * kRowsPerWarpgroup + kRowsPerWarp * warp + here / 4 + (second ? 8 : 0);
  const int row = kCached
                      ? tile.first_query + query_of_row(a, row_of_tile)
                      : tile.first_query + row_block * kRowsPerWarpgroup + kRowsPerWarp * warp + here / 4 + (second ? 8 : 0);
  if (here % 4 < 2 && v_columns == 0 && row < queries(a, tile) && a.lse) {
    const int64_t at = (kPacked && !kCached ? 0 : tile.batch * a.lse_stride[0]) +
                       head_of_row(a, tile, row_of_tile) * a.lse_stride[1] + query_begin(tile) + row;
    // From base 2 to the natural logarithm, in two floats.
    constexpr float kLn2 = 0.693147182464599609375f, kLn2Low = -1.904654323148236017e-9f;
    const float high = own.lse();
    float lse = high * kLn2, low = fmaf(high, kLn2, -lse) + fmaf(high, kLn2Low, own.lse_low() * kLn2);
    if (a.scores.sinks && (second ? is_empty[1] : is_empty[0]))
      lse = a.scores.sinks[head_of_row(a, tile, row_of_tile)], low = 0;
    if constexpr (kFloatMask)
      if (own.max == a.scores.lowest_score) lse = kLowestBFloat16, low = log2f(own.sum) * kLn2;
    a.lse[at] = lse;
    if (a.lse_low) a.lse_low[at] = low - low == 0 ? low : 0;
  }
  if constexpr (kMaxLogit) store_max_logit(tile);
  __syncwarp();
}

// Raises the maximum logit of the tile's head to that of the warp's rows.
template <class T, class Variant>
__device__ __forceinline__ void ForwardSm90Kernel<T, Variant>::MathWarpgroup::store_max_logit(const ForwardWorkTile& tile) {
  const int rows = queries(a, tile) - tile.first_query - (row_block * kRowsPerWarpgroup + kRowsPerWarp * warp + lane / 4);
  float most = rows > 0 ? largest.of_row[0] : -INFINITY;
  if (rows > 8) most = max_or_nan(most, largest.of_row[1]);
  raise_max_logit(a.max_logit + int64_t{tile.batch} * a.heads + tile.head, most * a.natural_scale);
}

// The address of row r of a lane in a partial that is to be merged; null: the row does not exist.
template <class T, class Variant>
__device__ __forceinline__ float* ForwardSm90Kernel<T, Variant>::MathWarpgroup::row_of_partial(const ForwardWorkTile& tile,
                                                                                               int lane, int r) const {
  const int row = row_block * kRowsPerWarpgroup + kRowsPerWarp * warp + lane / 4 + 8 * r;
  return tile.first_query + query_of_row(a, row) < queries(a, tile) ? tile.partial + row * a.line.partials.pitch : nullptr;
}

// Maximum and sum of a partial's rows, which sinks do not belong to.
template <class T, class Variant>
__device__ __forceinline__ void ForwardSm90Kernel<T, Variant>::MathWarpgroup::store_partial_states(
    const ForwardWorkTile& tile) {
  int here = lane;
  make_opaque(here);  // or what follows from it takes registers throughout the tiles
  const bool second = here % 4 == 1;
  if (float* const row = row_of_partial(tile, here, second ? 1 : 0); row && here % 4 < 2)
    *reinterpret_cast<float2*>(row + a.line.partials.pitch - 2) = {second ? softmax[1].max : softmax[0].max,
                                                                   second ? softmax[1].sum : softmax[0].sum};
  __syncwarp();
}

// The outputs of a partial's rows, as they are. A quad stores whole sectors of 32 bytes.
template <class T, class Variant>
__device__ __forceinline__ void ForwardSm90Kernel<T, Variant>::MathWarpgroup::store_partial(const ForwardWorkTile& tile) {
  int here = lane;
  make_opaque(here);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float* const row = row_of_partial(tile, here, r);
    if (!row) continue;
    float* const to = row + here % 4 * 2;
#pragma unroll
    for (int j = 0; j < kOutRegisters / 4; ++j)
      if (8 * j < a.head_dim_v) *reinterpret_cast<float2*>(to + 8 * j) = {out[4 * j + 2 * r], out[4 * j + 2 * r + 1]};
  }
}

// The warp's rows from its buffer, where the rows of a tile are those of several heads. The last rows of a sequence are stored
// by the lanes.
template <class T, class Variant>
template <class Buffer>
__device__ __forceinline__ void ForwardSm90Kernel<T, Variant>::MathWarpgroup::store_cached_rows(const ForwardWorkTile& tile,
                                                                                                const Buffer& buffer) {
  const int first = row_block * kRowsPerWarpgroup + kRowsPerWarp * warp;
  const auto query = [&](int row) { return tile.first_query + query_of_row(a, row); };
  if (query(first + kRowsPerWarp - 1) < queries(a, tile)) {
    fence_async_proxy();
    __syncwarp();
    if (lane == 0) {
#pragma unroll
      for (int box = 0; box < kHeadDimVBoxes; ++box)
        tma_store(a.out_tma,
                  cached_row_at(box, head_of_row(a, tile, first), query_begin(tile) + query(first), out_batch(a, tile)),
                  buffer[box]);
      tma_store_commit();
    }
    return;
  }
  __syncwarp();
  const int chunks = a.head_dim_v / kPerVector<T>;
  for (int n = lane; n < kRowsPerWarp * chunks; n += kWarpSize) {
    const int r = n / chunks, chunk = n % chunks;
    if (query(first + r) >= queries(a, tile)) break;
    T* const to = static_cast<T*>(a.out) + tile.batch * a.out_stride[0] + head_of_row(a, tile, first + r) * a.out_stride[1] +
                  (query_begin(tile) + query(first + r)) * a.out_stride[2];
    *reinterpret_cast<uint4*>(to + chunk * kPerVector<T>) =
        reinterpret_cast<const uint4*>(buffer[chunk / 8][r])[(chunk ^ r) % 8];  // swizzled
  }
}

// Through shared memory. The last rows of a packed sequence are stored by the lanes, since a box would run into the next one.
template <class T, class Variant>
__device__ __forceinline__ void ForwardSm90Kernel<T, Variant>::MathWarpgroup::store_out_by_tma(int stage,
                                                                                               const float (&inverse)[2]) {
  const ForwardWorkTile& tile = shared.tile[stage];
  const int first = tile.first_query + row_block * kRowsPerWarpgroup + kRowsPerWarp * warp;
  auto& buffer = shared.out.box[4 * row_block + warp];
  int here = lane;
  if constexpr (kKvSplit) make_opaque(here);  // or the offsets take registers throughout the tiles
  if (lane == 0) tma_store_wait_read();
  __syncwarp();
#pragma unroll
  for (int step = 0; step < kOutRegisters / 8; ++step) {
    unsigned words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
      words[i] = Fragments<T>::pair(out[8 * step + 2 * i] * inverse[i % 2], out[8 * step + 2 * i + 1] * inverse[i % 2]);
    stmatrix_x4(words, shared_address(buffer[step / 4]) + matrix_offset(here, 0, step % 4 * 2));
  }
  if constexpr (kCached) return store_cached_rows(tile, buffer);
  if (const int rows = queries(a, tile) - first; kPacked && rows < kRowsPerWarp) {
    __syncwarp();
    const int chunks = a.head_dim_v / kPerVector<T>;
    T* const to = static_cast<T*>(a.out) + tile.head * a.out_stride[1] + (query_begin(tile) + first) * a.out_stride[2];
    for (int n = lane; n < rows * chunks; n += kWarpSize) {
      const int r = n / chunks, chunk = n % chunks;
      *reinterpret_cast<uint4*>(to + r * a.out_stride[2] + chunk * kPerVector<T>) =
          reinterpret_cast<const uint4*>(buffer[chunk / 8][r])[(chunk ^ r) % 8];  // swizzled
    }
  } else {
    fence_async_proxy();
    __syncwarp();
    if (lane == 0) {
#pragma unroll
      for (int box = 0; box < kHeadDimVBoxes; ++box)
        tma_store(a.out_tma, {box * kBoxColumns, query_begin(tile) + first, tile.head, kPacked ? 0 : tile.batch}, buffer[box]);
      tma_store_commit();
    }
  }
}

template <class T, class Variant>
__device__ __forceinline__ void ForwardSm90Kernel<T, Variant>::MathWarpgroup::store_out_from_registers(
    int stage, const float (&inverse)[2]) {
  const ForwardWorkTile& tile = shared.tile[stage];
  const int first = tile.first_query + row_block * kRowsPerWarpgroup + kRowsPerWarp * warp;
  // The four lanes of a quad hold 2 columns each of every 8. A transposition within the quad gives each lane all 8 of one group
  // of columns out of four: 16 bytes to store.
  static_assert(kOutColumns % 32 == 0);
  int here = lane;
  if constexpr (kKvSplit) make_opaque(here);
  const bool odd = here & 1, upper = here & 2;
  const auto swap = [](bool high, unsigned& low_word, unsigned& high_word, int mask) {
    const unsigned got = __shfl_xor_sync(~0u, high ? low_word : high_word, mask);
    (high ? low_word : high_word) = got;
  };
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row_of_tile = row_block * kRowsPerWarpgroup + kRowsPerWarp * warp + here / 4 + 8 * r;
    const int row = kCached ? tile.first_query + query_of_row(a, row_of_tile) : first + here / 4 + 8 * r;
    T* to = static_cast<T*>(a.out) + (kPacked && !kCached ? 0 : tile.batch * a.out_stride[0]) +
            head_of_row(a, tile, row_of_tile) * a.out_stride[1] + (query_begin(tile) + row) * a.out_stride[2];
#pragma unroll
    for (int i = 0; i < kOutRegisters / 16; ++i) {
      unsigned words[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int at = 16 * i + 4 * j + 2 * r;
        words[j] = Fragments<T>::pair(out[at] * inverse[r], out[at + 1] * inverse[r]);
      }
      swap(odd, words[0], words[1], 1);
      swap(odd, words[2], words[3], 1);
      swap(upper, words[0], words[2], 2);
      swap(upper, words[1], words[3], 2);
      const int column = v_columns * kOutColumns + 32 * i + here % 4 * 8;
      if (row < queries(a, tile) && column < a.head_dim_v)
        *reinterpret_cast<uint4*>(to + column) = {words[0], words[1], words[2], words[3]};
    }
  }
}

template <class T, class Variant>
__device__ __forceinline__ void ForwardSm90Kernel<T, Variant>::MathWarpgroup::store_out(int stage, const float (&inverse)[2]) {
  if constexpr (kKvSplit) {
    if (shared.tile[stage].partial) {
      store_partial(shared.tile[stage]);
      __syncwarp();
      return;
    }
  }
  if constexpr (kTile.staged_out)
    store_out_by_tma(stage, inverse);
  else
    store_out_from_registers(stage, inverse);
  __syncwarp();
}

}  // namespace flash_online::cuda
