// The largest score of each block of queries and block of keys on Hopper (key_statistic.cuh). A warp raises the maxima to those
// of its sixteen keys, in any order.
#pragma once

#include "../common/max_logit.cuh"
#include "key_statistic.cuh"

namespace flash_online::cuda {

struct BlockMaxima {
  static constexpr bool kReadsLse = false, kMissingCount = false;
  BlockMaximaPass pass;
  float scale;  // positive

  template <int kQueries>
  struct Sums {
    template <bool kHides>
    __device__ __forceinline__ void add(const BlockMaxima& statistic, const Accumulator<1, kQueries / 8>& scores,
                                        const KeyStatisticPlace& at) const {
      constexpr int kParts = kQueries / 64;  // the queries of a part lie in one block
      float most[kParts];
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        float of_part[4] = {-INFINITY, -INFINITY, -INFINITY, -INFINITY};  // so that no maximum waits for the one before
#pragma unroll
        for (int j = 0; j < 8; ++j)
#pragma unroll
          for (int e = 0; e < 4; ++e) of_part[e] = max_or_nan(of_part[e], scores[0][8 * part + j][e]);
        most[part] = max_or_nan(max_or_nan(of_part[0], of_part[1]), max_or_nan(of_part[2], of_part[3])) * statistic.scale;
      }
      const auto raise = [&](int query, float x) {
        if (!kHides || (query < at.problem.queries && at.key < at.problem.keys))
          raise_max_logit(statistic.pass.maximum(at.batch, at.head, query, at.key), x);
      };
      if constexpr (kParts == 2) {
        if (statistic.pass.rows == kQueries) return raise(at.query, max_or_nan(most[0], most[1]));
      }
#pragma unroll
      for (int part = 0; part < kParts; ++part) raise(at.query + 64 * part, most[part]);
    }
    __device__ __forceinline__ void store(const BlockMaxima&, const KeyStatisticPlace&) const {}
  };
};

template <int kHeadDim>
const char* AttentionBlockMaximaSm90<kHeadDim>::refusal(const BlockMaximaPass& pass, const Gpu& gpu) {
  return key_statistic_refusal(pass.problem, gpu);
}

template <int kHeadDim>
int64_t AttentionBlockMaximaSm90<kHeadDim>::workspace_bytes(const BlockMaximaPass&) {
  return 0;
}

template <int kHeadDim>
void AttentionBlockMaximaSm90<kHeadDim>::run(const BlockMaximaPass& pass, void*, CUstream_st* stream) {
  run_key_statistic<kHeadDim>(pass.problem, BlockMaxima{.pass = pass, .scale = static_cast<float>(pass.problem.scale)}, stream);
}

}  // namespace flash_online::cuda
