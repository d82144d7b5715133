// A warp's work on up to eight rows, transposed: S^T = K Q^T and O^T += V^T P^T. The sixteen rows of the tensor cores' products
// are then keys, and columns of values, so that none is computed in vain, and the outputs take half as many registers. A quad's
// lanes have two rows each, and each of them a part of their keys.
#pragma once

#include "../../hw/matrix_copy.cuh"
#include "rows.cuh"

namespace flash_online::cuda {

// The interface is that of DecodeRowTiles.
template <class Element, int kHeadDimAsked, bool kFloat8>
struct DecodeEightRows {
  static constexpr int kHeadDim = kHeadDimAsked, kRowTiles = 1, kKeys = decode_tile_keys(kHeadDim, kFloat8),
                       kSteps = kHeadDim / 16;
  static constexpr bool kTransposed = true;
  using Rows = DecodeRows<1, true>;
  using Scores = Accumulator<kKeys / 16, 1>;  // [keys][rows]: element e of a tile is of row 2 * lane_in_quad() + e % 2
  using Outputs = Accumulator<1, kHeadDim / 16>;  // [columns][rows], the tiles side by side
  using States = ScoreState[1][2];
  // The right operands of Q^T.
  struct Queries {
    unsigned words[kSteps][2];

    __device__ __forceinline__ void load(const AttentionProblem& problem, const Rows& rows) {
      const int row = rows.existing(quad()), query = rows.query_of(row);
      load_query_row<Element, kFloat8, kSteps>(
          problem, rows, query, rows.row_in_group(row, query), [](int step) { return 16 * step; },
          [&](int step, int half, unsigned word) { words[step][half] = word; });
    }
    template <class F>
    __device__ __forceinline__ void for_each_word(F&& f) {
#pragma unroll
      for (int word = 0; word < 2 * kSteps; ++word) f(words[word / 2][word % 2]);
    }
  };

  template <class Mask>
  __device__ __forceinline__ static void apply_mask(Scores& scores, const Mask& mask, DType dtype, float lowest_score, int key,
                                                    const States& states) {
    mask.template apply<kTransposed>(scores, dtype, lowest_score, key, states);
  }
  // As softmax_step() does.
  __device__ __forceinline__ static void softmax(Scores& scores, Outputs& out, States& states, float scale) {
    bool rises = false;
    float most[2];
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      most[e] = lowest<float>();
      for_each_key<true>(scores, 0, e, [&](float x, int) { most[e] = fmaxf(most[e], x); });
      rises |= states[0][e].exceeds(kRescaleThreshold, __fmul_rn(most[e], scale)) || is_large_score(states[0][e].max);
    }
    bool is_large = false;
    if (__any_sync(~0u, rises)) {
      float factors[2];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
#pragma unroll
        for (int step = 4; step < kWarpSize; step *= 2) most[e] = fmaxf(most[e], __shfl_xor_sync(~0u, most[e], step));
        factors[e] = states[0][e].raise_max_lazily(kRescaleThreshold, __fmul_rn(most[e], scale));
        is_large |= is_large_score(states[0][e].max);
      }
      for_each(out, [&](float& x, int, int, int e) { x *= factors[e % 2]; });
      is_large = __any_sync(~0u, is_large);
    }
    const auto make_weights = [&](auto&& weight) __attribute__((always_inline)) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float sum = 0;
        for_each_key<true>(scores, 0, e, [&](float& x, int) {
          x = weight(states[0][e], x);
          sum += x;
        });
        states[0][e].add(sum);
      }
    };
    if (is_large) [[unlikely]]
      make_weights(
          [&](const ScoreState& state, float x) { return FastBinary::exp(exponent_below(x, scale, pivot(state.max))); });
    else
      make_weights([&](const ScoreState& state, float x) { return state.weight_of_product(x, scale); });
  }
  // O^T += V^T P^T.
  template <class ValueElement, int kBoxBytes>
  __device__ __forceinline__ static void multiply_values(Outputs& out, const Scores& weights, unsigned values,
                                                         __nv_fp8_interpretation_t kind) {
    using V = Fragments<ValueElement>;
#pragma unroll
    for (int k = 0; k < kKeys / 16; ++k) {
      const float (&weight)[4] = weights[k][0];
      const unsigned right[2] = {movmatrix_trans(V::pair(weight[0], weight[1])),
                                 movmatrix_trans(V::pair(weight[2], weight[3]))};
      for_each_values<ValueElement, kFloat8, kTransposed, kBoxBytes, kHeadDim / 8>(
          values, k, kind, [&](int column, const auto& x) {
            const unsigned left[4] = {x[0].words[0][0], x[1].words[0][0], x[0].words[0][1], x[1].words[0][1]};
            mma_16x8x16<ValueElement>(out[0][column / 2], left, right[0], right[1]);
          });
    }
  }
  // ---- the eight rows, of which there are `count`

  static constexpr int kGroups = 1;
  // Stores their states, over all lanes.
  __device__ __forceinline__ static void store_states(float2* to, States& states, int, int count) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      ScoreState& own = states[0][e];
#pragma unroll
      for (int step = 4; step < kWarpSize; step *= 2) own.sum += __shfl_xor_sync(~0u, own.sum, step);
      const int row = 2 * lane_in_quad() + e;
      if (quad() == 0 && row < count) to[row] = {own.max, own.sum};
    }
  }
  // Rows 2 * lane_in_quad() are stored at a time.
  __device__ __forceinline__ static int place_of(int row, int column) { return row * kHeadDim + (column ^ (row / 2 * 8)); }
  __device__ __forceinline__ static void store(float* to, const Outputs& out, int, int count) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int row = 2 * lane_in_quad() + e;
      if (row >= count) break;
#pragma unroll
      for (int j = 0; j < kHeadDim / 8; ++j) to[place_of(row, value_column<kFloat8>(j, quad()))] = out[0][j / 2][j % 2 * 2 + e];
    }
  }
};

}  // namespace flash_online::cuda
