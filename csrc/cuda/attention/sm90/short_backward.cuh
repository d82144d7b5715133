// Attention backward on Hopper where a sequence's keys are one tile: one launch, no workspace.
// docs/design/backward_sm90_options.md draws it.
//
// A CTA is one warpgroup. It owns the keys and values of a sequence and a head, at most 64, and loops over the blocks of
// queries of the heads that share them. With all keys at hand, dQ of a block is complete where it is computed and is written in
// its own dtype, and delta is the sum of P dP over them. There is no producer warp: while a CTA waits, the other CTAs of its SM
// compute.
#pragma once

#include "../../hw/compiler.cuh"
#include "../../hw/launch.h"
#include "../../hw/matrix_copy.cuh"
#include "../../hw/mbarrier.cuh"
#include "../../hw/shared_memory.cuh"
#include "../common/scores.cuh"
#include "../common/store_rows.cuh"
#include "../common/tile_list.cuh"
#include "backward/supported.h"
#include "gemm.cuh"
#include "tma_tensor.cuh"

namespace flash_online::cuda {

struct ShortBackwardArguments {
  TmaTensor query, key, value, grad_out;
  AttentionProblem problem;
  AttentionGradients gradients;
  ScoreMod score_mod;
};

// kOnce: a CTA has one block of queries. Then no sums are kept for the next block, and three CTAs fit an SM.
template <class T, int kHeadDim, bool kOnce>
struct ShortBackwardSm90Kernel {
  static constexpr int kRows = kShortBackwardRowsSm90, kThreads = 128, kStages = kOnce ? 1 : 2;
  static constexpr int kCtasPerSm = kOnce || kHeadDim <= 64 ? 3 : 2;
  static constexpr int kBoxes = kHeadDim / kBoxColumns, kRowSteps = kRows / 16;
  static constexpr unsigned kRowBytes = kBoxColumns * sizeof(T);
  static_assert(kRows == kBoxColumns);

  struct alignas(kBoxAlignment) TmaTile {
    T box[kBoxes][kRows][kBoxColumns];
  };
  struct Stage {
    TmaTile query, grad_out;
  };
  struct Shared {
    TmaTile key, value;
    Stage stage[kStages];
    alignas(kBoxAlignment) T ds[kRows][kBoxColumns];  // [key][query]
    float lse[kRows], lse_low[kRows], delta[kRows];  // lse in base 2 as two floats, +inf for a query that sees nothing
    alignas(float2) float partial[kThreads / kWarpSize][kRows];  // of a query's sum or maximum: of the keys that a warp has
    uint64_t keys_full, full[kStages];
  };

  using GradAccumulator = Accumulator<1, kHeadDim / 8>;
  using ScoreAccumulator = Accumulator<1, kRows / 8>;
  using PackedScores = unsigned[kRowSteps][4];  // weights or dS, in pairs of 16 bits: a left operand

  const ShortBackwardArguments& a;
  Shared& shared;
  int batch, kv_grad_head, first_head, blocks;
  Sequence sequence;
  int queries, keys;

  __device__ ShortBackwardSm90Kernel(const ShortBackwardArguments& arguments, Shared& memory) : a(arguments), shared(memory) {
    const unsigned kv_grad_heads = static_cast<unsigned>(a.gradients.kv_grad_heads);
    batch = static_cast<int>(blockIdx.x / kv_grad_heads);
    kv_grad_head = static_cast<int>(blockIdx.x % kv_grad_heads);
    const int heads = static_cast<int>(a.problem.heads) / static_cast<int>(kv_grad_heads);
    first_head = kv_grad_head * heads;
    sequence = sequence_of(a.problem, batch);
    queries = static_cast<int>(sequence.queries.count);
    keys = static_cast<int>(sequence.keys.count);
    blocks = heads * ((queries + kRows - 1) / kRows);
  }

  // The blocks of the first head come first, then those of the next one.
  __device__ __forceinline__ int head_of(int block) const { return first_head + block / ((queries + kRows - 1) / kRows); }
  __device__ __forceinline__ int query_of(int block) const { return block % ((queries + kRows - 1) / kRows) * kRows; }

  // Writes zeros into the gradients of the padding rows before packed sequence n.
  __device__ void clear_padding(int64_t n) const {
    const AttentionProblem& p = a.problem;
    const Rows of_keys = padding_rows(p.key_starts, p.batch, n, p.keys, p.total_keys);
    clear_rows<T, kThreads>(a.gradients.grad_key, kv_grad_head, p.head_dim, of_keys);
    clear_rows<T, kThreads>(a.gradients.grad_value, kv_grad_head, p.head_dim_v, of_keys);
    const Rows of_queries = padding_rows(p.query_starts, p.batch, n, p.queries, p.total_queries);
    const int heads = static_cast<int>(p.heads) / static_cast<int>(a.gradients.kv_grad_heads);
    for (int head = first_head; head < first_head + heads; ++head)
      clear_rows<T, kThreads>(a.gradients.grad_query, head, p.head_dim, of_queries);
  }

  __device__ void load(TmaTile& to, const TmaTensor& from, int head, int64_t row, uint64_t* full) const {
#pragma unroll
    for (int box = 0; box < kBoxes; ++box)
      tma_load(to.box[box], from.map, from.at(batch, head, static_cast<int>(row), box), full);
  }
  // Starts the copies of a block, by one thread.
  __device__ void load_block(int block) const {
    uint64_t* const full = &shared.full[block % kStages];
    Stage& stage = shared.stage[block % kStages];
    arrive_expect_tx(full, sizeof(Stage));
    load(stage.query, a.query, head_of(block), sequence.queries.begin + query_of(block), full);
    load(stage.grad_out, a.grad_out, head_of(block), sequence.queries.begin + query_of(block), full);
  }

  __device__ static void clear_tail(TmaTile& tile, int from) {
    cuda::clear_tail<kThreads>(tile.box, from, static_cast<int>(threadIdx.x));
  }

  // A block's row statistics, which are not copied: each thread below kRows reads one row's before it waits for the copies.
  struct RowStats {
    float lse = -INFINITY, lse_low = 0, grad_lse = 0;

    __device__ __forceinline__ RowStats(const ShortBackwardSm90Kernel& at, int head, int query) {
      const AttentionProblem& p = at.a.problem;
      const int row = static_cast<int>(threadIdx.x);
      if (row >= kRows || row >= at.queries - query) return;
      const int64_t n = at.batch * p.lse_stride[0] + head * p.lse_stride[1] + at.sequence.queries.begin + query + row;
      lse = static_cast<const float*>(p.lse)[n];
      lse_low = static_cast<const float*>(p.lse_low)[n];
      if (at.a.gradients.grad_lse) grad_lse = static_cast<const float*>(at.a.gradients.grad_lse)[n];
    }
    // Leaves -grad_lse in `delta`, to which sum_delta() adds. Returns whether the row is for normalize_large_rows().
    __device__ __forceinline__ bool store(Shared& to) const {
      const int row = static_cast<int>(threadIdx.x);
      if (row >= kRows) return false;
      const bool seen = lse != lowest<float>();
      const double binary = (static_cast<double>(lse) + lse_low) / kLn2;
      const float high = static_cast<float>(binary), low = static_cast<float>(binary - high);
      to.lse[row] = seen ? high : -lowest<float>();
      to.lse_low[row] = seen && low - low == 0 ? low : 0;
      to.delta[row] = seen ? -grad_lse : 0;
      return seen && ::fabs(binary) >= kLargeLse<T>;
    }
  };

  // Adds the sum over keys of P dP to the block's `delta`. With all keys at hand this costs less than to read O, and it has no
  // part in the rounding of O.
  __device__ __forceinline__ void sum_delta(const ScoreAccumulator& weight, const ScoreAccumulator& dp) const {
    float sum[kRows / 8][2];
#pragma unroll
    for (int j = 0; j < kRows / 8; ++j)
#pragma unroll
      for (int e = 0; e < 2; ++e) sum[j][e] = fmaf(weight[0][j][e], dp[0][j][e], weight[0][j][2 + e] * dp[0][j][2 + e]);
    // Eight lanes hold different keys of the same queries. Each step leaves a lane half of the queries: at the end 2 lane() and
    // the next.
#pragma unroll
    for (int count = kRows / 16, step = kWarpSize / 2; count > 0; count /= 2, step /= 2) {
      const bool upper = lane() & step;
#pragma unroll
      for (int j = 0; j < count; ++j)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const float kept = upper ? sum[count + j][e] : sum[j][e], sent = upper ? sum[j][e] : sum[count + j][e];
          sum[j][e] = kept + __shfl_xor_sync(~0u, sent, step);
        }
    }
    reinterpret_cast<float2*>(shared.partial[threadIdx.x / kWarpSize])[lane()] = make_float2(sum[0][0], sum[0][1]);
    __syncthreads();
    if (threadIdx.x < kRows) {
      float all = 0;
#pragma unroll
      for (int n = 0; n < kThreads / kWarpSize; ++n) all += shared.partial[n][threadIdx.x];
      shared.delta[threadIdx.x] += all;
    }
    __syncthreads();
  }

  // Returns the join of x over all keys of `query`: over the lanes of the warp that hold it, then over all warps.
  template <class Join>
  __device__ __forceinline__ float join_partials(float x, int query, Join&& join) const {
#pragma unroll
    for (int step = 4; step < kWarpSize; step *= 2) x = join(x, __shfl_xor_sync(~0u, x, step));
    if (quad() == 0) shared.partial[threadIdx.x / kWarpSize][query] = x;
    __syncthreads();
#pragma unroll
    for (int n = 0; n < kThreads / kWarpSize; ++n) x = n == 0 ? shared.partial[0][query] : join(x, shared.partial[n][query]);
    __syncthreads();
    return x;
  }

  // For rows with a large lse (kLargeLse): scores become exponents in units of products, measured from the maximum, and lse
  // becomes the logarithm of the sum of weights. The CTA has all keys, so it does not need the lse of the forward pass: its
  // rounding error would be as large as the exponent.
  __device__ __forceinline__ void normalize_large_rows(ScoreAccumulator& score) const {
    const float scale = a.score_mod.scale;
    // Rolled: a step works on the first eight queries and moves all others down.
#pragma unroll 1
    for (int j = 0; j < kRows / 8; ++j) {
      float first[4];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int query = 8 * j + 2 * lane_in_quad() + e;
        float x[2] = {score[0][0][e], score[0][0][2 + e]};
        const float most = join_partials(fmaxf(x[0], x[1]), query, [](float left, float right) { return fmaxf(left, right); }),
                    max = pivot(__fmul_rn(most, scale));
        const float high = shared.lse[query];
        const bool is_large = fabsf(high) >= static_cast<float>(kLargeLse<T>) && fabsf(high) < INFINITY;
        float exponent[2], sum = 0;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          exponent[half] = exponent_below(x[half], scale, max);
          sum += FastBinary::exp(exponent[half]);
        }
        sum = join_partials(sum, query, [](float left, float right) { return left + right; });
        if (is_large && threadIdx.x / kWarpSize == 0 && quad() == 0)
          shared.lse[query] = 0, shared.lse_low[query] = FastBinary::log(sum);
#pragma unroll
        for (int half = 0; half < 2; ++half) first[2 * half + e] = is_large ? exponent[half] * (1 / scale) : x[half];
      }
#pragma unroll
      for (int n = 0; n < kRows / 8; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) score[0][n][e] = n + 1 < kRows / 8 ? score[0][n + 1][e] : first[e];
    }
    __syncthreads();
  }

  __device__ __forceinline__ static float2 row_stat(const float (&of)[kRows], int j) {
    return *reinterpret_cast<const float2*>(&of[8 * j + lane_in_quad() * 2]);
  }
  __device__ __forceinline__ static void start_scores(ScoreAccumulator& d, const TmaTile& left, const TmaTile& right) {
    start_row_products<T, kHeadDim / 16, kRows, kRows>(d, shared_address(left.box), shared_address(right.box));
  }
  // Starts dV or dK = left right, or += where `add`: [keys][columns], summed over a block's queries.
  __device__ __forceinline__ static void start_grads(GradAccumulator& d, const PackedScores& left, const TmaTile& right,
                                                     bool add) {
    const uint64_t columns = mn_major_descriptor(shared_address(right.box), kRows * kRowBytes);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kRowSteps; ++step)
      Wgmma<T, kHeadDim>::template rs<true>(flat(d), left[step], offset_descriptor(columns, step * 16 * kRowBytes),
                                            add || step > 0);
    wgmma_commit();
  }
  __device__ __forceinline__ void start_dq(GradAccumulator& d) const {
    const uint64_t ds = k_major_descriptor(shared_address(shared.ds)),
                   columns = mn_major_descriptor(shared_address(shared.key.box), kRows * kRowBytes);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kRowSteps; ++step)
      Wgmma<T, kHeadDim>::template ss<true, true>(flat(d), offset_descriptor(ds, step * 16 * kRowBytes),
                                                  offset_descriptor(columns, step * 16 * kRowBytes), step > 0);
    wgmma_commit();
  }

  // Stores `left` rows of a head's gradients from row `first` on.
  __device__ __forceinline__ void store(const GradAccumulator& d, float scale, const MutableView4& view, int head,
                                        int64_t first, int left, int64_t width) const {
    T* const to = static_cast<T*>(view.data) + batch * view.stride[0] + head * view.stride[1] + first * view.stride[2];
    int thread = static_cast<int>(threadIdx.x);
    make_opaque(thread);  // else what follows from it takes registers all over the loop
    store_rows(d, scale, thread / kWarpSize * 16, to, view.stride[2], view.stride[3], left, static_cast<int>(width),
               thread % kWarpSize);
  }
  __device__ __forceinline__ void store_key_grad(const GradAccumulator& d, float scale, const MutableView4& view,
                                                 int64_t width) const {
    store(d, scale, view, kv_grad_head, sequence.keys.begin, keys, width);
  }
  __device__ __forceinline__ static int row() { return static_cast<int>(threadIdx.x) / kWarpSize * 16; }

  __device__ __forceinline__ void process_block(GradAccumulator& sum_dk, GradAccumulator& sum_dv, int block) const {
    const AttentionProblem& p = a.problem;
    const float scale = static_cast<float>(p.scale);
    const int head = head_of(block), query = query_of(block), left = queries - query;
    Stage& stage = shared.stage[block % kStages];
    bool is_large;
    {
      const RowStats rows(*this, head, query);
      wait(&shared.full[block % kStages], block / kStages % 2);
      is_large = rows.store(shared);
    }
    if (block == 0) wait(&shared.keys_full, 0);
    if (p.query_starts) {
      __syncthreads();
      if (left < kRows) {
        clear_tail(stage.query, left);
        clear_tail(stage.grad_out, left);
      }
      if (block == 0 && keys < kRows) {
        clear_tail(shared.key, keys);
        clear_tail(shared.value, keys);
      }
      fence_async_proxy();
    }
    const bool any_large = __syncthreads_or(is_large);
    // All threads are done with the block before.
    if (!kOnce && block > 0 && block + 1 < blocks && threadIdx.x == 0) load_block(block + 1);

    ScoreAccumulator score, dp;
    start_scores(score, shared.key, stage.query);
    start_scores(dp, shared.value, stage.grad_out);
    wgmma_wait<1>();
    fence_registers(flat(score));
    if (left < kRows || keys < kRows || sequence.visible.left >= 0 || sequence.visible.right >= 0)
      hide_scores<true>(score, row(), {query, 0, queries, keys, false}, sequence.visible);
    if (any_large) [[unlikely]]
      normalize_large_rows(score);
    PackedScores weight, ds;
    const auto read_lse = [&](int j, float2& high, float2& low) {
      high = row_stat(shared.lse, j);
      low = row_stat(shared.lse_low, j);
    };
    exp_products<T>(score, a.score_mod, read_lse, weight);
    wgmma_wait<0>();
    fence_registers(flat(dp));
    sum_delta(score, dp);
#pragma unroll
    for (int j = 0; j < kRows / 8; ++j) {
      const float2 delta = row_stat(shared.delta, j);
#pragma unroll
      for (int half = 0; half < 2; ++half)
        ds[j / 2][j % 2 * 2 + half] = Fragments<T>::pair(score[0][j][2 * half] * (dp[0][j][2 * half] - delta.x),
                                                         score[0][j][2 * half + 1] * (dp[0][j][2 * half + 1] - delta.y));
    }
    const int r = row() + lane() % 16;  // its chunks are swizzled as TMA does
#pragma unroll
    for (int t = 0; t < kRowSteps; ++t)
      stmatrix_x4(ds[t],
                  shared_address(shared.ds[r]) + ((2 * t + lane() / 16) ^ (lane() % 8)) * static_cast<int>(kVectorBytes));
    fence_async_proxy();
    const int64_t first = sequence.queries.begin + query;
    if constexpr (kOnce) {
      GradAccumulator dv, dk, dq;
      start_grads(dv, weight, stage.grad_out, false);
      wgmma_wait<0>();
      fence_registers(flat(dv));
      store_key_grad(dv, 1, a.gradients.grad_value, p.head_dim_v);
      start_grads(dk, ds, stage.query, false);
      wgmma_wait<0>();
      fence_registers(flat(dk));
      store_key_grad(dk, scale, a.gradients.grad_key, p.head_dim);
      __syncthreads();
      start_dq(dq);
      wgmma_wait<0>();
      fence_registers(flat(dq));
      store(dq, scale, a.gradients.grad_query, head, first, left, p.head_dim);
    } else {
      start_grads(sum_dv, weight, stage.grad_out, true);
      start_grads(sum_dk, ds, stage.query, true);
      __syncthreads();
      GradAccumulator dq;
      start_dq(dq);
      wgmma_wait<0>();
      fence_registers(flat(sum_dv));
      fence_registers(flat(sum_dk));
      fence_registers(flat(dq));
      store(dq, scale, a.gradients.grad_query, head, first, left, p.head_dim);
    }
  }

  __device__ void run() {
    const AttentionProblem& p = a.problem;
    if (threadIdx.x == 0) {
      mbarrier_init(&shared.keys_full, 1);
#pragma unroll
      for (uint64_t& full : shared.full) mbarrier_init(&full, 1);
      fence_barrier_init();
      if (blocks > 0) {
        load_block(0);
        arrive_expect_tx(&shared.keys_full, 2 * sizeof(TmaTile));
        load(shared.key, a.key, first_head, sequence.keys.begin, &shared.keys_full);
        load(shared.value, a.value, first_head, sequence.keys.begin, &shared.keys_full);
        if (!kOnce && blocks > 1) load_block(1);
      }
    }
    if (p.query_starts) {
      clear_padding(batch);
      if (batch == p.batch - 1) clear_padding(p.batch);
    }
    __syncthreads();
    GradAccumulator dk, dv;
    clear(dk);
    clear(dv);
    if constexpr (kOnce) {
      if (blocks > 0) process_block(dk, dv, 0);
    } else {
#pragma unroll 1
      for (int block = 0; block < blocks; ++block) process_block(dk, dv, block);
    }
    if (!kOnce || blocks == 0) {
      store_key_grad(dk, static_cast<float>(p.scale), a.gradients.grad_key, p.head_dim);
      store_key_grad(dv, 1, a.gradients.grad_value, p.head_dim_v);
    }
  }
};

template <class T, int kHeadDim, bool kOnce>
__global__ void __launch_bounds__(ShortBackwardSm90Kernel<T, kHeadDim, kOnce>::kThreads,
                                  ShortBackwardSm90Kernel<T, kHeadDim, kOnce>::kCtasPerSm)
    attention_backward_short_sm90(const __grid_constant__ ShortBackwardArguments arguments) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using Kernel = ShortBackwardSm90Kernel<T, kHeadDim, kOnce>;
  extern __shared__ __align__(kBoxAlignment) char shared_boxes[];
  Kernel(arguments, *reinterpret_cast<typename Kernel::Shared*>(shared_boxes)).run();
#endif
}

// Takes the problems that is_short_backward_sm90() accepts.
template <int kHeadDim>
void short_backward_sm90(const AttentionProblem& problem, const AttentionGradients& gradients, CUstream_st* stream) {
  constexpr int kRows = kShortBackwardRowsSm90;
  const auto start = [&]<class T, bool kOnce>(Type<T>, std::bool_constant<kOnce>) {
    using Kernel = ShortBackwardSm90Kernel<T, kHeadDim, kOnce>;
    const ShortBackwardArguments arguments{
        .query = tma_tensor_of<T>(problem, problem.query, false, problem.heads, problem.head_dim, kRows),
        .key = tma_tensor_of<T>(problem, problem.key, true, problem.key_heads, problem.head_dim, kRows),
        .value = tma_tensor_of<T>(problem, problem.value, true, problem.value_heads, problem.head_dim_v, kRows),
        .grad_out = tma_tensor_of<T>(problem, gradients.grad_out, false, problem.heads, problem.head_dim_v, kRows),
        .problem = problem,
        .gradients = gradients,
        .score_mod = ScoreMod(problem)};
    launch<attention_backward_short_sm90<T, kHeadDim, kOnce>>(
        arguments, gradients.kv_grad_heads * std::max(problem.batch, int64_t{1}), Kernel::kThreads,
        static_cast<int>(sizeof(typename Kernel::Shared)), stream);
  };
  const auto visit = [&](auto element) {
    if (problem.heads == gradients.kv_grad_heads && problem.queries <= kRows)
      start(element, std::true_type{});
    else
      start(element, std::false_type{});
  };
  problem.dtype == DType::kFloat16 ? visit(Type<__half>{}) : visit(Type<__nv_bfloat16>{});
}

}  // namespace flash_online::cuda
