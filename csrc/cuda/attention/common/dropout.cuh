// Dropout of a warp's weights and of their gradients. Accumulators are [query][key], or transposed [key][query].
#pragma once

#include "../../../core/philox.h"
#include "../../../core/problem.h"
#include "../../mma/compensated_accumulator.cuh"
#include "../../mma/fragments.cuh"
#include "scores.cuh"

namespace flash_online::cuda {

// The weights of one head that dropout keeps.
struct Dropout {
  Philox random;
  uint32_t threshold;
  int64_t batch, head;

  __device__ Dropout(const AttentionProblem& problem, int64_t sequence, int64_t head_)
      : random(problem.rng ? problem.rng[0] : 0, problem.rng ? problem.rng[1] : 0),
        threshold(problem.rng ? drop_threshold(problem.dropout) : 0),
        batch(problem.batch_begin + sequence),
        head(head_) {}

  __device__ explicit operator bool() const { return threshold > 0; }

  // Bit n says whether the weight of key Philox::kKeys * group + n is kept.
  __device__ unsigned kept(int64_t query, int64_t group) const { return random.kept(batch, head, query, group, threshold); }
};

// Returns which weights are kept of two neighbouring 16 x 8 accumulators, side by side or (kStacked) one below the other: bit
// 4 n + e for element e of accumulator n. The first one begins at `row` and `column` of the block. Eight neighbouring keys
// share a random draw, and each lane makes one of the two accumulators' 32 draws: block.key and the accumulators' first keys
// must be multiples of 8.
template <bool kTransposed, bool kStacked = false>
__device__ __forceinline__ unsigned kept_weights(int row, int column, const Dropout& dropout, const ScoreBlock& block) {
  static_assert(Philox::kKeys == 8);
  if constexpr (!kTransposed) {
    // The four lanes of a quad hold eight keys of each accumulator, in the rows quad() and quad() + 8: each lane draws a byte.
    const int upper = lane_in_quad() & 1, second = lane_in_quad() / 2, below = kStacked ? second : 0,
              to_right = kStacked ? 0 : second;
    unsigned drawn = dropout.kept(block.query + row + 16 * below + quad() + 8 * upper, (block.key + column) / 8 + to_right)
                     << 8 * lane_in_quad();
    drawn |= __shfl_xor_sync(~0u, drawn, 1);
    drawn |= __shfl_xor_sync(~0u, drawn, 2);
    const unsigned own = drawn >> 2 * lane_in_quad() & 0x03030303u;
    return (own | own >> 6 | own >> 12 | own >> 18) & 0xffu;
  } else {
    // The eight lanes that have the same lane_in_quad() hold 16 keys of four queries. Of their eight draws, bit 0 of a draw's
    // number is the query's parity, bit 1 says that the keys are the upper eight, bit 2 that the accumulator is the second;
    // each of the eight lanes needs one bit of each draw.
    const int number = quad(), below = kStacked ? number / 4 : 0, to_right = kStacked ? 0 : number / 4;
    unsigned bits = dropout.kept(block.query + column + 8 * to_right + 2 * lane_in_quad() + number % 2,
                                 (block.key + row) / 8 + 2 * below + number / 2 % 2);
    // The eight lanes' bytes are an 8 x 8 matrix of bits, which is transposed.
#pragma unroll
    for (int side = 1; side < 8; side *= 2) {
      const unsigned right = side == 1 ? 0xaau : side == 2 ? 0xccu : 0xf0u;
      const unsigned other = __shfl_xor_sync(~0u, bits, 4 * side);
      bits = number & side ? (bits & right) | (other & right) >> side : (bits & ~right) | (other << side & right);
    }
    return bits & 0xffu;
  }
}

// Calls f(i, j, kept) for each 16 x 8 accumulator of a warp's: bit e of `kept` for its element e.
template <bool kTransposed, int kRows, int kColumns, class F>
__device__ __forceinline__ void draw_weights(int row, const Dropout& dropout, const ScoreBlock& block, F&& f) {
  static_assert(kColumns % 2 == 0);
#pragma unroll
  for (int i = 0; i < kRows; ++i)
#pragma unroll
    for (int j = 0; j < kColumns; j += 2) {
      const unsigned kept = kept_weights<kTransposed>(row + 16 * i, 8 * j, dropout, block);
      f(i, j, kept & 15);
      f(i, j + 1, kept >> 4);
    }
}

// All of a warp's weights in one word: bit 4 * (i * kColumns + j) + e for the weight at [i][j][e]. It is a call, so that the
// registers that the draws take are the kernel's own where there is no dropout.
template <bool kTransposed, int kRows, int kColumns>
__device__ __noinline__ unsigned draw_weights(int row, const Dropout dropout, const ScoreBlock block) {
  constexpr bool kStacked = kColumns == 1;
  static_assert(kRows * kColumns <= 8 && (kColumns % 2 == 0 || kStacked));
  unsigned kept = 0;
#pragma unroll 2
  for (int n = 0; n < kRows * kColumns; n += 2)
    kept |= kept_weights<kTransposed, kStacked>(row + n / kColumns * 16, n % kColumns * 8, dropout, block) << (4 * n);
  return kept;
}

// Calls drop(x) for every weight that dropout drops.
template <bool kTransposed, int kRows, int kColumns, class Drop>
__device__ __forceinline__ void drop_weights(Accumulator<kRows, kColumns>& d, int row, const Dropout& dropout,
                                             const ScoreBlock& block, Drop&& drop) {
  draw_weights<kTransposed, kRows, kColumns>(row, dropout, block, [&](int i, int j, unsigned kept) {
#pragma unroll
    for (int e = 0; e < 4; ++e)
      if (!(kept >> e & 1)) drop(d[i][j][e]);
  });
}

// Makes gradients of kept weights of the gradients of all weights, by the bits of draw_weights. Those of 16-bit elements are
// multiplied by keep_scale here, those of floats have it from load_values.
template <class Element, int kRows, int kColumns>
__device__ __forceinline__ void drop_gradients(Accumulator<kRows, kColumns>& d,
                                               CompensatedAccumulator<Element, kRows, kColumns>& compensation, unsigned kept,
                                               float keep_scale) {
  for_each(d, [&](float& x, int i, int j, int e) {
    const bool keep = kept >> (4 * (i * kColumns + j) + e) & 1;
    if constexpr (Fragments<Element>::kDigits == 1) x *= keep_scale;
    if constexpr (CompensatedAccumulator<Element, kRows, kColumns>::kCompensated)
      compensation.low[i][j][e] = keep ? compensation.low[i][j][e] : 0;
    x = keep ? x : 0;
  });
}

}  // namespace flash_online::cuda
