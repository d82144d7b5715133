// The sums of attention's weights per key on Hopper (key_statistic.cuh), weights from the rows' lse. No other CTA writes a
// key's sum, and it is added in the order of the queries.
#pragma once

#include "key_statistic.cuh"

namespace flash_online::cuda {

struct WeightSums {
  static constexpr bool kReadsLse = true, kMissingCount = true;  // their weights are 0, or are not stored
  float scale;  // of scores, in base 2
  float* sums;  // [batch, heads, keys], contiguous

  template <int kQueries>
  struct Sums {
    float sum[2];  // the lane's own, of rows quad() and quad() + 8

    // kHides: a hidden score is -inf, and has no weight even where lse is NaN.
    template <bool kHides>
    __device__ __forceinline__ void add(const WeightSums& statistic, const Accumulator<1, kQueries / 8>& scores,
                                        const KeyStatisticPlace& at) {
      float of_block[4] = {0, 0, 0, 0};  // several sums, so that no addition waits for the one before
#pragma unroll
      for (int j = 0; j < kQueries / 8; ++j) {
        const float2 lse = *reinterpret_cast<const float2*>(&at.lse[8 * j + 2 * lane_in_quad()]);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const float score = scores[0][j][e], weight = exp2_flushed(fmaf(score, statistic.scale, e % 2 ? -lse.y : -lse.x));
          of_block[e] += kHides && score == -INFINITY ? 0.0f : weight;
        }
      }
      sum[0] += of_block[0] + of_block[1];
      sum[1] += of_block[2] + of_block[3];
    }
    __device__ __forceinline__ void store(const WeightSums& statistic, const KeyStatisticPlace& at) const {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float total = sum[half] + __shfl_xor_sync(~0u, sum[half], 1);
        total += __shfl_xor_sync(~0u, total, 2);
        const int row = at.key + 8 * half + quad();
        if (lane_in_quad() == 0 && row < at.problem.keys)
          statistic.sums[(at.batch * at.problem.heads + at.head) * at.problem.keys + row] = total;
      }
    }
  };
};

template <int kHeadDim>
const char* AttentionWeightSumsSm90<kHeadDim>::refusal(const WeightSumsPass& pass, const Gpu& gpu) {
  return key_statistic_refusal(pass.problem, gpu);
}

template <int kHeadDim>
int64_t AttentionWeightSumsSm90<kHeadDim>::workspace_bytes(const WeightSumsPass&) {
  return 0;
}

template <int kHeadDim>
void AttentionWeightSumsSm90<kHeadDim>::run(const WeightSumsPass& pass, void*, CUstream_st* stream) {
  const auto scale = static_cast<float>(pass.problem.scale * kLog2EInDouble);
  run_key_statistic<kHeadDim>(pass.problem, WeightSums{.scale = scale, .sums = pass.sums}, stream);
}

}  // namespace flash_online::cuda
