// Attention backward on Hopper where a sequence's keys are one block: one launch, no workspace. docs/backward_sm90.md.
//
// A block of threads is one warpgroup. It owns the keys and values of a sequence and a head, at most 64, and takes the blocks
// of queries of the heads that share them one by one. With all keys at hand, gradients of queries are complete where they are
// made and are written in their own type; delta comes out of the rows of grad_out that are in shared memory anyway. What a
// block of threads waits for, the others on its multiprocessor fill.
#pragma once

#include "../../../hw/mbarrier.cuh"
#include "../../../hw/setmaxnreg.cuh"
#include "../../../hw/stmatrix.cuh"
#include "../../common/scores.cuh"
#include "../../common/tile_list.cuh"
#include "../../sm80/load.cuh"
#include "../gemm.cuh"
#include "../supported.h"
#include "../tma_tensor.cuh"

namespace flash_online::cuda {

struct ShortBackwardArguments {
  TmaTensor query, key, value, grad_out;
  AttentionProblem problem;
  AttentionGradients gradients;
  ScoreMod rule;
};

// kOnce: one block of queries passes by. Then no sums wait for the next, and three blocks of threads fit a multiprocessor.
template <class T, int kHeadDim, bool kOnce>
struct ShortBackwardOnSm90 {
  static constexpr int kRows = kShortBackwardRowsSm90, kThreads = 128, kStages = kOnce ? 1 : 2;
  static constexpr int kBlocks = kOnce || kHeadDim <= 64 ? 3 : 2;  // of threads, on a multiprocessor at a time
  static constexpr int kBoxes = kHeadDim / kBoxColumns, kRowSteps = kRows / 16;
  static constexpr unsigned kRowBytes = kBoxColumns * sizeof(T);
  static constexpr int kPer = kPerVector<T>;
  static_assert(kRows == kBoxColumns);

  struct alignas(kBoxAlignment) Tile {
    T box[kBoxes][kRows][kBoxColumns];
  };
  struct Stage {
    Tile query, grad_out;
  };
  struct Shared {
    Tile key, value;
    Stage stage[kStages];
    alignas(kBoxAlignment) T scores[kRows][kBoxColumns];  // their gradients, [key][query]
    float high[kRows], low[kRows], delta[kRows];  // of queries: lse in base 2 in two floats, +inf where nothing is seen
    uint64_t keys_full, full[kStages];
  };

  using Sums = Accumulator<1, kHeadDim / 8>;
  using Scores = Accumulator<1, kRows / 8>;
  using Words = unsigned[kRowSteps][4];  // of 16-bit pairs: a left operand

  const ShortBackwardArguments& a;
  Shared& shared;
  int batch, unit, first_head, blocks;
  Sequence sequence;
  int queries, keys;

  __device__ ShortBackwardOnSm90(const ShortBackwardArguments& arguments, Shared& memory) : a(arguments), shared(memory) {
    const unsigned kv_grad_heads = static_cast<unsigned>(a.gradients.kv_grad_heads);
    batch = static_cast<int>(blockIdx.x / kv_grad_heads);
    unit = static_cast<int>(blockIdx.x % kv_grad_heads);
    const int heads = static_cast<int>(a.problem.heads) / static_cast<int>(kv_grad_heads);
    first_head = unit * heads;
    sequence = sequence_of(a.problem, batch);
    queries = static_cast<int>(sequence.queries.count);
    keys = static_cast<int>(sequence.keys.count);
    blocks = heads * ((queries + kRows - 1) / kRows);
  }

  // Of a head, blocks go in order; heads one after another.
  __device__ __forceinline__ int head_of(int block) const { return first_head + block / ((queries + kRows - 1) / kRows); }
  __device__ __forceinline__ int query_of(int block) const { return block % ((queries + kRows - 1) / kRows) * kRows; }

  // Rows before packed sequence n that are nobody's.
  __device__ void clear_padding(int64_t n) const {
    const AttentionProblem& p = a.problem;
    const Rows of_keys = padding_rows(p.key_starts, p.batch, n, p.keys, p.total_keys);
    clear_rows<T, kThreads>(a.gradients.grad_key, unit, p.head_dim, of_keys);
    clear_rows<T, kThreads>(a.gradients.grad_value, unit, p.head_dim_v, of_keys);
    const Rows of_queries = padding_rows(p.query_starts, p.batch, n, p.queries, p.total_queries);
    const int heads = static_cast<int>(p.heads) / static_cast<int>(a.gradients.kv_grad_heads);
    for (int head = first_head; head < first_head + heads; ++head)
      clear_rows<T, kThreads>(a.gradients.grad_query, head, p.head_dim, of_queries);
  }

  __device__ void load(Tile& to, const TmaTensor& from, int head, int64_t row, uint64_t* full) const {
#pragma unroll
    for (int box = 0; box < kBoxes; ++box)
      tma_load(to.box[box], from.map, from.at(batch, head, static_cast<int>(row), box), full);
  }
  // By one thread.
  __device__ void send(int block) const {
    uint64_t* const full = &shared.full[block % kStages];
    Stage& stage = shared.stage[block % kStages];
    arrive_expect_tx(full, sizeof(Stage));
    load(stage.query, a.query, head_of(block), sequence.queries.begin + query_of(block), full);
    load(stage.grad_out, a.grad_out, head_of(block), sequence.queries.begin + query_of(block), full);
  }

  __device__ static void clear_tail(Tile& tile, int from) {
    cuda::clear_tail<kThreads>(tile.box, from, static_cast<int>(threadIdx.x));
  }

  // A block's rows of numbers. Eight lanes share a row, whose part of the results comes from global memory meanwhile.
  struct RowNumbers {
    static constexpr int kLanes = 8, kPasses = kRows * kLanes / kThreads;
    uint4 out[kPasses][kBoxes];
    float lse = -INFINITY, lse_low = 0, grad_lse = 0;  // of row(lane % kLanes), in lanes that have one

    __device__ __forceinline__ static int row(int pass) {
      return static_cast<int>(threadIdx.x) / kWarpSize * (kRows / 4) + pass * (kWarpSize / kLanes) + lane() / kLanes;
    }
    __device__ __forceinline__ static int part() { return lane() % kLanes; }

    __device__ __forceinline__ RowNumbers(const ShortBackwardOnSm90& at, int head, int query) {
      const AttentionProblem& p = at.a.problem;
      const int left = at.queries - query;
      const T* const data = static_cast<const T*>(p.out.data) + at.batch * p.out.stride[0] + head * p.out.stride[1] +
                            (at.sequence.queries.begin + query) * p.out.stride[2];
#pragma unroll
      for (int pass = 0; pass < kPasses; ++pass)
#pragma unroll
        for (int box = 0; box < kBoxes; ++box) {
          const int column = box * kBoxColumns + part() * kPer;
          out[pass][box] = row(pass) < left && column < p.head_dim_v
                               ? *reinterpret_cast<const uint4*>(data + row(pass) * p.out.stride[2] + column)
                               : uint4{0, 0, 0, 0};
        }
      if (part() < kPasses && row(part()) < left) {
        const int64_t n = at.batch * p.lse_stride[0] + head * p.lse_stride[1] + at.sequence.queries.begin + query + row(part());
        lse = static_cast<const float*>(p.lse)[n];
        lse_low = static_cast<const float*>(p.lse_low)[n];
        if (at.a.gradients.grad_lse) grad_lse = static_cast<const float*>(at.a.gradients.grad_lse)[n];
      }
    }

    __device__ __forceinline__ void finish(Shared& to, const Tile& grad_out) const {
      float mine = 0;
#pragma unroll
      for (int pass = 0; pass < kPasses; ++pass) {
        float sum = 0;
#pragma unroll
        for (int box = 0; box < kBoxes; ++box) {
          const int r = row(pass);
          float x[kPer], y[kPer];
          unpack<T>(out[pass][box], x);
          unpack<T>(reinterpret_cast<const uint4*>(grad_out.box[box][r])[part() ^ (r % 8)], y);
#pragma unroll
          for (int n = 0; n < kPer; ++n) sum += x[n] * y[n];
        }
#pragma unroll
        for (int step = kLanes / 2; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
        mine = part() == pass ? sum : mine;
      }
      if (part() >= kPasses) return;
      const int r = row(part());
      const bool seen = lse != lowest<float>();
      const double binary = (static_cast<double>(lse) + lse_low) / kLn2;
      const float high = static_cast<float>(binary), rest = static_cast<float>(binary - high);
      to.high[r] = seen ? high : -lowest<float>();
      to.low[r] = seen && rest - rest == 0 ? rest : 0;
      to.delta[r] = seen ? mine - grad_lse : 0;
    }
  };

  __device__ __forceinline__ static float2 numbers(const float (&of)[kRows], int j) {
    return *reinterpret_cast<const float2*>(&of[8 * j + lane_in_quad() * 2]);
  }
  __device__ __forceinline__ static void start_scores(Scores& d, const Tile& left, const Tile& right) {
    start_row_products<T, kHeadDim / 16, kRows, kRows>(d, shared_address(left.box), shared_address(right.box));
  }
  // d = left right, or += : [keys][columns] over a block's queries.
  __device__ __forceinline__ static void start_sums(Sums& d, const Words& left, const Tile& right, bool add) {
    const uint64_t columns = mn_major_descriptor(shared_address(right.box), kRows * kRowBytes);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kRowSteps; ++step)
      Wgmma<T, kHeadDim>::template rs<true>(flat(d), left[step], offset_descriptor(columns, step * 16 * kRowBytes),
                                            add || step > 0);
    wgmma_commit();
  }
  __device__ __forceinline__ void start_queries(Sums& d) const {
    const uint64_t scores = k_major_descriptor(shared_address(shared.scores)),
                   columns = mn_major_descriptor(shared_address(shared.key.box), kRows * kRowBytes);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kRowSteps; ++step)
      Wgmma<T, kHeadDim>::template ss<true, true>(flat(d), offset_descriptor(scores, step * 16 * kRowBytes),
                                                  offset_descriptor(columns, step * 16 * kRowBytes), step > 0);
    wgmma_commit();
  }

  // Rows of a head's gradients from `first` on.
  __device__ __forceinline__ void store(const Sums& d, float scale, const MutableView4& view, int head, int64_t first, int left,
                                        int64_t width) const {
    T* const to = static_cast<T*>(view.data) + batch * view.stride[0] + head * view.stride[1] + first * view.stride[2];
    int thread = static_cast<int>(threadIdx.x);
    make_opaque(thread);  // or what follows from it takes registers over the loop
    store_rows(d, scale, thread / kWarpSize * 16, to, view.stride[2], view.stride[3], left, static_cast<int>(width),
               thread % kWarpSize);
  }
  __device__ __forceinline__ void store_keys(const Sums& d, float scale, const MutableView4& view, int64_t width) const {
    store(d, scale, view, unit, sequence.keys.begin, keys, width);
  }
  __device__ __forceinline__ static int row() { return static_cast<int>(threadIdx.x) / kWarpSize * 16; }

  __device__ __forceinline__ void work(Sums& all_key, Sums& all_value, int block) const {
    const AttentionProblem& p = a.problem;
    const float scale = static_cast<float>(p.scale);
    const int head = head_of(block), query = query_of(block), left = queries - query;
    Stage& stage = shared.stage[block % kStages];
    {
      const RowNumbers rows(*this, head, query);
      wait(&shared.full[block % kStages], block / kStages % 2);
      rows.finish(shared, stage.grad_out);
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
    __syncthreads();
    // All have done with the block before.
    if (!kOnce && block > 0 && block + 1 < blocks && threadIdx.x == 0) send(block + 1);

    Scores score, grad;
    start_scores(score, shared.key, stage.query);
    start_scores(grad, shared.value, stage.grad_out);
    wgmma_wait<1>();
    fence_registers(flat(score));
    if (left < kRows || keys < kRows || sequence.visible.left >= 0 || sequence.visible.right >= 0)
      hide_scores<true>(score, row(), {query, 0, queries, keys, false}, sequence.visible);
    Words weight, grad_score;
    const auto read_lse = [&](int j, float2& high, float2& low) {
      high = numbers(shared.high, j);
      low = numbers(shared.low, j);
    };
    exp_products<T>(score, a.rule, read_lse, weight);
    wgmma_wait<0>();
    fence_registers(flat(grad));
#pragma unroll
    for (int j = 0; j < kRows / 8; ++j) {
      const float2 delta = numbers(shared.delta, j);
#pragma unroll
      for (int half = 0; half < 2; ++half)
        grad_score[j / 2][j % 2 * 2 + half] =
            Fragments<T>::pair(score[0][j][2 * half] * (grad[0][j][2 * half] - delta.x),
                               score[0][j][2 * half + 1] * (grad[0][j][2 * half + 1] - delta.y));
    }
    const int r = row() + lane() % 16;
#pragma unroll
    for (int t = 0; t < kRowSteps; ++t)
      stmatrix_x4(grad_score[t],
                  shared_address(shared.scores[r]) + ((2 * t + lane() / 16) ^ (lane() % 8)) * static_cast<int>(kVectorBytes));
    fence_async_proxy();
    const int64_t first = sequence.queries.begin + query;
    if constexpr (kOnce) {
      Sums grad_value, grad_key, grad_query;
      start_sums(grad_value, weight, stage.grad_out, false);
      wgmma_wait<0>();
      fence_registers(flat(grad_value));
      store_keys(grad_value, 1, a.gradients.grad_value, p.head_dim_v);
      start_sums(grad_key, grad_score, stage.query, false);
      wgmma_wait<0>();
      fence_registers(flat(grad_key));
      store_keys(grad_key, scale, a.gradients.grad_key, p.head_dim);
      __syncthreads();
      start_queries(grad_query);
      wgmma_wait<0>();
      fence_registers(flat(grad_query));
      store(grad_query, scale, a.gradients.grad_query, head, first, left, p.head_dim);
    } else {
      start_sums(all_value, weight, stage.grad_out, true);
      start_sums(all_key, grad_score, stage.query, true);
      __syncthreads();
      Sums grad_query;
      start_queries(grad_query);
      wgmma_wait<0>();
      fence_registers(flat(all_value));
      fence_registers(flat(all_key));
      fence_registers(flat(grad_query));
      store(grad_query, scale, a.gradients.grad_query, head, first, left, p.head_dim);
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
        send(0);
        arrive_expect_tx(&shared.keys_full, 2 * sizeof(Tile));
        load(shared.key, a.key, first_head, sequence.keys.begin, &shared.keys_full);
        load(shared.value, a.value, first_head, sequence.keys.begin, &shared.keys_full);
        if (!kOnce && blocks > 1) send(1);
      }
    }
    if (p.query_starts) {
      clear_padding(batch);
      if (batch == p.batch - 1) clear_padding(p.batch);
    }
    __syncthreads();
    Sums grad_key, grad_value;
    clear(grad_key);
    clear(grad_value);
    if constexpr (kOnce) {
      if (blocks > 0) work(grad_key, grad_value, 0);
    } else {
#pragma unroll 1
      for (int block = 0; block < blocks; ++block) work(grad_key, grad_value, block);
    }
    if (!kOnce || blocks == 0) {
      store_keys(grad_key, static_cast<float>(p.scale), a.gradients.grad_key, p.head_dim);
      store_keys(grad_value, 1, a.gradients.grad_value, p.head_dim_v);
    }
  }
};

template <class T, int kHeadDim, bool kOnce>
__global__ void __launch_bounds__(ShortBackwardOnSm90<T, kHeadDim, kOnce>::kThreads,
                                  ShortBackwardOnSm90<T, kHeadDim, kOnce>::kBlocks)
    attention_backward_short_sm90(const __grid_constant__ ShortBackwardArguments arguments) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using Body = ShortBackwardOnSm90<T, kHeadDim, kOnce>;
  extern __shared__ __align__(kBoxAlignment) char shared_boxes[];
  Body(arguments, *reinterpret_cast<typename Body::Shared*>(shared_boxes)).run();
#endif
}

// Of a problem that is_short_backward_sm90().
template <int kHeadDim>
void short_backward_sm90(const AttentionProblem& problem, const AttentionGradients& gradients, CUstream_st* stream) {
  constexpr int kRows = kShortBackwardRowsSm90;
  const auto start = [&]<class T, bool kOnce>(Type<T>, std::bool_constant<kOnce>) {
    using Body = ShortBackwardOnSm90<T, kHeadDim, kOnce>;
    const ShortBackwardArguments arguments{
        tma_tensor_of<T>(problem, problem.query, false, problem.heads, problem.head_dim, kRows),
        tma_tensor_of<T>(problem, problem.key, true, problem.key_heads, problem.head_dim, kRows),
        tma_tensor_of<T>(problem, problem.value, true, problem.value_heads, problem.head_dim_v, kRows),
        tma_tensor_of<T>(problem, gradients.grad_out, false, problem.heads, problem.head_dim_v, kRows),
        problem,
        gradients,
        ScoreMod(problem)};
    launch<attention_backward_short_sm90<T, kHeadDim, kOnce>>(
        arguments, gradients.kv_grad_heads * std::max(problem.batch, int64_t{1}), Body::kThreads,
        static_cast<int>(sizeof(typename Body::Shared)), stream);
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
