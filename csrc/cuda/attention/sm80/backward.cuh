// Attention backward for every GPU from compute capability 8.0 on, on mma.sync and cp.async: FlashAttention-2's organisation
// (arXiv 2307.08691). docs/attention_sm80.md draws it.
//
// A block of threads owns a block of keys and values, and the queries of every head that shares them pass by in blocks. Scores
// are made again, transposed: [key][query], so that weights and the scores' gradients are left operands of the products that
// are the gradients of values and keys, which stay in registers to the end. The gradients of queries are summed over blocks of
// threads, in global memory.
#pragma once

#include "../attention.h"
#include "../common/backward_workspace.cuh"
#include "../common/dq_accum.cuh"
#include "../common/mask_grad.h"
#include "../common/mask_map.cuh"
#include "../common/scores.cuh"
#include "load.cuh"
#include "tiles.h"
#include "variants.cuh"

namespace flash_online::cuda {

// backward_queries_sm80.cuh: the gradients of queries by themselves.
template <int kHeadDim>
void backward_queries_sm80(const AttentionProblem& problem, const AttentionGradients& gradients, const BackwardWorkspace& space,
                           CUstream_st* stream);

// Where the gradients of queries go.
enum class QueryGradients : int8_t {
  kSum,     // into sums that other blocks of threads add to
  kDirect,  // into the result: one block of keys is all there are
  kNone,    // nowhere: another kernel makes them
};

struct BackwardArguments {
  AttentionProblem problem;
  AttentionGradients gradients;
  BackwardWorkspace space;
  TileList list;    // of keys; its heads are the kv_grad_heads
  ScoreMod rule;
  float keep_scale;  // of dropout: 1 / (1 - p)
  QueryGradients query_gradients;
};

// A mask's block as a warp sees it whose queries begin `query` further on.
template <class Mask>
struct LaterQueries {
  const Mask& mask;
  int query;
  template <class T>
  __device__ __forceinline__ T at(int q, int key) const {
    return mask.template at<T>(query + q, key);
  }
  __device__ __forceinline__ bool has_vectors() const { return mask.has_vectors(); }
  __device__ __forceinline__ void transposed(unsigned (&words)[4], int q, int key) const {
    mask.transposed(words, query + q, key);
  }
};

// The numbers of kQueries queries, in shared memory: see kRowStats; with kPrecise also the rest of delta.
template <int kQueries, bool kPrecise>
struct RowNumbers {
  static constexpr int kKinds = kPrecise ? 4 : 3;
  static constexpr int kBytes = kKinds * kQueries * static_cast<int>(sizeof(float));
  float* data;

  // Starts copying those of the queries from `query` on, out of a head's blocks.
  template <int kThreads>
  __device__ __forceinline__ void load(const float* rows, [[maybe_unused]] const float* rests, int query) const {
    static_assert(kStatsRows % kQueries == 0 && kKinds * kQueries / 4 <= kThreads);
    const int thread = static_cast<int>(threadIdx.x);
    if (thread >= kKinds * kQueries / 4) return;
    const int kind = thread / (kQueries / 4), column = thread % (kQueries / 4) * 4;
    const float* from = rows + int64_t{query} / kStatsRows * kRowStats + kind * kStatsRows + query % kStatsRows + column;
    if (kPrecise && kind == 3) from = rests + query + column;
    cp_async(reinterpret_cast<uint4*>(data + kind * kQueries + column), from);
  }
  // Of two neighbouring queries.
  __device__ __forceinline__ float2 high(int query) const { return *reinterpret_cast<const float2*>(data + query); }
  __device__ __forceinline__ float2 low(int query) const { return *reinterpret_cast<const float2*>(data + kQueries + query); }
  __device__ __forceinline__ float2 delta(int query) const {
    return *reinterpret_cast<const float2*>(data + 2 * kQueries + query);
  }
  __device__ __forceinline__ float2 rest_of_delta(int query) const {
    return kPrecise ? *reinterpret_cast<const float2*>(data + 3 * kQueries + query) : float2{};
  }
};

// Writes accumulators straight into rows of global memory, times `scale`: a warp's rows from `row` on, columns from `column`
// on.
template <class Element, int kRows, int kColumns>
__device__ __forceinline__ void store_accumulators(const Accumulator<kRows, kColumns>& d, float scale, Element* data,
                                                   int64_t row_stride, int64_t column_stride, int row, int column, int rows,
                                                   int columns) {
#pragma unroll
  for (int i = 0; i < kRows; ++i)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int r = row + 16 * i + 8 * half + quad();
      if (r >= rows) continue;
      Element* const to = data + r * row_stride;
#pragma unroll
      for (int j = 0; j < kColumns; ++j)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int c = column + 8 * j + 2 * lane_in_quad() + e;
          if (c < columns) to[c * column_stride] = narrow<Element>(scale * d[i][j][2 * half + e]);
        }
    }
}

template <class Element, int kHeadDim, Variant kVariant>
struct BackwardOnSm80 {
  static constexpr bool kEverything = kVariant != Variant::kPlain;
  static constexpr BackwardSm80 kTile = backward_sm80_tile(kSplitBytes<Element>, kHeadDim, kVariant);
  static constexpr int kThreads = kTile.threads(), kKeys = kTile.keys, kQueries = kTile.queries, kStages = kTile.stages;
  // Scores: [key][query], so many rows of 16 and columns of 8 a warp.
  static constexpr int kScoreQueries = kQueries / kTile.score_split;
  static constexpr int kScoreRows = kKeys / kTile.score_warps / 16, kScoreColumns = kScoreQueries / 8;
  static constexpr bool kAllScore = kTile.score_warps * kTile.score_split == kTile.warps;
  // Gradients of keys and values: [key][column].
  static constexpr bool kInRegisters = kTile.sum_warps == 0;
  static constexpr int kSumSplit = kInRegisters ? 1 : kTile.warps / kTile.sum_warps;
  static constexpr int kSumRows = kKeys / (kInRegisters ? kTile.score_warps : kTile.sum_warps) / 16;
  static constexpr int kSumWidth = kHeadDim / kSumSplit;
  // Whether a warp sums the keys that it makes weights of: those of its own queries are its left operand without a detour.
  static constexpr bool kOwnHalf = kTile.sum_warps == kTile.score_warps && kTile.score_split == 2 && kSumSplit == 2;
  // Gradients of queries: [query][column].
  static constexpr int kQuerySplit = kTile.warps / kTile.query_warps;
  static constexpr int kQueryRows = kQueries / kTile.query_warps / 16, kQueryWidth = kHeadDim / kQuerySplit;
  static_assert(kScoreRows > 0 && kScoreColumns > 0 && kSumRows > 0 && kQueryRows > 0 && kSumWidth % 16 == 0 &&
                kQueryWidth % 16 == 0);
  static_assert(kAllScore || !kInRegisters);
  // A step of a product with weights out of registers is two blocks of eight queries.
  static_assert((!kInRegisters && !kOwnHalf) || kScoreColumns % 2 == 0);

  using Piece = typename Split<Element>::Piece;
  using WideTile = SharedTile<Element, kHeadDim>;
  using ScoreTile = SharedTile<Element, kQueries>;
  using Rest = CompensatedAccumulator<Element, kScoreRows, kScoreColumns>;
  using Numbers = RowNumbers<kQueries, Rest::kCompensated>;
  static constexpr int kKeyBytes = WideTile::bytes(kKeys), kQueryBytes = WideTile::bytes(kQueries),
                       kScoreBytes = ScoreTile::bytes(kKeys);
  // Keys, values; of each stage queries, gradients of outputs, numbers; gradients of scores; weights; mask.
  static constexpr int kStageBytes = 2 * kQueryBytes + Numbers::kBytes;
  static constexpr int kBytes = 2 * kKeyBytes + kStages * kStageBytes + (kInRegisters ? 1 : 2) * kScoreBytes;
  static_assert(kKeyBytes % 16 == 0 && kQueryBytes % 16 == 0 && kScoreBytes % 16 == 0);

  static int shared_bytes(const AttentionProblem& problem) {
    const int rows = !problem.mask.data ? 0 : problem.mask.stride[2] == 0 ? 1 : kQueries;
    return kBytes + rows * mask_pitch(kKeys, static_cast<int>(size_of(problem.mask_dtype)));
  }

  __device__ static void run(const BackwardArguments& arguments);

 private:
  using Sums = Accumulator<kSumRows, kSumWidth / 8>;

  // Where a warp keeps its sums for others to read.
  __device__ static float* sums_of_warp(char* shared, int warp) {
    return reinterpret_cast<float*>(shared) + warp * kSumRows * (kSumWidth / 8) * 128;
  }
  // In registers' order: what one warp leaves, another adds.
  __device__ static void leave(const Sums& d, float* at) {
#pragma unroll
    for (int i = 0; i < kSumRows; ++i)
#pragma unroll
      for (int j = 0; j < kSumWidth / 8; ++j)
        reinterpret_cast<float4*>(at)[(i * (kSumWidth / 8) + j) * 32 + lane()] =
            make_float4(d[i][j][0], d[i][j][1], d[i][j][2], d[i][j][3]);
  }
  __device__ static void take(Sums& d, const float* at) {
#pragma unroll
    for (int i = 0; i < kSumRows; ++i)
#pragma unroll
      for (int j = 0; j < kSumWidth / 8; ++j) {
        const float4 x = reinterpret_cast<const float4*>(at)[(i * (kSumWidth / 8) + j) * 32 + lane()];
        d[i][j][0] += x.x, d[i][j][1] += x.y, d[i][j][2] += x.z, d[i][j][3] += x.w;
      }
  }
  __device__ static void scale_by(Sums& d, float factor) {
#pragma unroll
    for (int i = 0; i < kSumRows; ++i)
#pragma unroll
      for (int j = 0; j < kSumWidth / 8; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) d[i][j][e] *= factor;
  }
};

template <class Element, int kHeadDim, Variant kVariant>
__device__ __forceinline__ void BackwardOnSm80<Element, kHeadDim, kVariant>::run(const BackwardArguments& arguments) {
  extern __shared__ __align__(16) char shared[];
  const AttentionProblem& problem = arguments.problem;
  const AttentionGradients& gradients = arguments.gradients;
  const bool sums_queries = arguments.query_gradients != QueryGradients::kNone,
             direct = arguments.query_gradients == QueryGradients::kDirect;

  const TileCoord place = tile_coord(problem, arguments.list, blockIdx.x, true, kKeys, problem.visible.right < 0);
  const int64_t batch = place.sequence, unit = place.head;
  const Sequence sequence = sequence_of(problem, batch);
  const int queries = static_cast<int>(sequence.queries.count), keys = static_cast<int>(sequence.keys.count);
  if (problem.query_starts && place.block == 0) {
    const auto clear = [&](int64_t n) {
      const Rows rows = padding_rows(problem.key_starts, problem.batch, n, problem.keys, problem.total_keys);
      clear_rows<Element, kThreads>(gradients.grad_key, unit, problem.head_dim, rows);
      clear_rows<Element, kThreads>(gradients.grad_value, unit, problem.head_dim_v, rows);
    };
    clear(batch);
    if (batch == problem.batch - 1) clear(problem.batch);
  }
  if (place.block < 0 || place.block * kKeys >= keys) return;
  const int key = static_cast<int>(place.block) * kKeys, last_key = min(key + kKeys, keys);

  const WideTile key_tile{reinterpret_cast<Piece*>(shared)}, value_tile{reinterpret_cast<Piece*>(shared + kKeyBytes)};
  char* const stages = shared + 2 * kKeyBytes;
  const auto query_tile = [&](int stage) { return WideTile{reinterpret_cast<Piece*>(stages + stage * kStageBytes)}; };
  const auto grad_out_tile = [&](int stage) {
    return WideTile{reinterpret_cast<Piece*>(stages + stage * kStageBytes + kQueryBytes)};
  };
  const auto numbers = [&](int stage) {
    return Numbers{reinterpret_cast<float*>(stages + stage * kStageBytes + 2 * kQueryBytes)};
  };
  const ScoreTile grad_tile{reinterpret_cast<Piece*>(stages + kStages * kStageBytes)},
      weight_tile{reinterpret_cast<Piece*>(stages + kStages * kStageBytes + kScoreBytes)};
  MaskTile<kQueries, kKeys, kThreads> mask_tile(shared + kBytes);

  // A warp's pieces of the products.
  const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
  const int score_row = warp / kTile.score_split * (16 * kScoreRows), score_query = warp % kTile.score_split * kScoreQueries;
  const int sum_row = kInRegisters ? score_row : warp / kSumSplit * (16 * kSumRows),
            sum_column = kInRegisters ? 0 : warp % kSumSplit * kSumWidth;
  const int query_row = warp / kQuerySplit * (16 * kQueryRows), query_column = warp % kQuerySplit * kQueryWidth;
  const bool scores_here = kAllScore || warp < kTile.score_warps * kTile.score_split;

  const int heads = static_cast<int>(problem.heads) / static_cast<int>(arguments.list.heads), first_head = place.head * heads;
  load<kKeys, kThreads>(key_tile,
                        HeadRows<Element>(problem.key, batch,
                                          first_head / (static_cast<int>(problem.heads) / static_cast<int>(problem.key_heads)),
                                          sequence.keys.begin, problem.head_dim),
                        key, keys);
  load_values<kKeys, kThreads>(
      value_tile,
      HeadRows<Element>(problem.value, batch,
                        first_head / (static_cast<int>(problem.heads) / static_cast<int>(problem.value_heads)),
                        sequence.keys.begin, problem.head_dim_v),
      key, keys, kEverything ? arguments.keep_scale : 1.0f);
  Sums grad_key, grad_value;
  clear(grad_key);
  clear(grad_value);

  const QueryRange range = direct ? QueryRange{0, queries} : queries_of_any(sequence.visible, key, last_key, queries);
  const int begin = static_cast<int>(min(range.begin, int64_t{queries}) / kQueries),
            end = range.end > range.begin ? static_cast<int>((range.end + kQueries - 1) / kQueries) : 0;

  const QueryRange whole = queries_of_all(sequence.visible, key, key + kKeys, key + kKeys <= keys ? queries : 0);
  const int whole_begin = static_cast<int>(min(whole.begin, int64_t{queries})), whole_end = static_cast<int>(whole.end);

  for (int head = first_head; head < first_head + heads; ++head) {
    const HeadRows<Element> query_rows(problem.query, batch, head, sequence.queries.begin, problem.head_dim),
        grad_out_rows(gradients.grad_out, batch, head, sequence.queries.begin, problem.head_dim_v);
    const int64_t first_block = first_row_block(problem, arguments.space.list, batch, head);
    const float* const row_numbers = arguments.space.rows + first_block * kRowStats;
    const float* const rests_of_delta = Rest::kCompensated ? arguments.space.rest_of_delta(first_block) : nullptr;
    const HeadMask mask(problem, batch, head);
    const auto rule = score_mod_of_head<Element>(arguments.rule, problem, batch, head);
    const Dropout dropout(problem, batch, head);
    QueryBlocks<kQueries, kKeys> query_blocks(direct ? MaskMap{} : arguments.space.map, batch, head, key, keys, begin, end);

    Incoming<kQueries, kThreads, Element, kHeadDim> next_queries, next_grad_out;
    const auto load_queries = [&](int stage, int block) {
      next_queries.start(query_tile(stage), query_rows, block * kQueries, queries);
    };
    const auto load_grad_out = [&](int stage, int block) {
      next_grad_out.start(grad_out_tile(stage), grad_out_rows, block * kQueries, queries);
      numbers(stage).template load<kThreads>(row_numbers, rests_of_delta, block * kQueries);
    };
    const auto finish_loads = [&](int stage, int block) {
      next_queries.finish(query_tile(stage), query_rows, block * kQueries, queries);
      next_grad_out.finish(grad_out_tile(stage), grad_out_rows, block * kQueries, queries);
    };
    bool nothing_hidden, next_nothing_hidden = false;
    int block = query_blocks.next(nothing_hidden), stage = 0;
    if (head > first_head) __syncthreads();  // all have done with the head before
    if (block < end) {
      load_queries(0, block);
      load_grad_out(0, block);
      finish_loads(0, block);
      if (kEverything && mask.data && !nothing_hidden) mask_tile.load(mask, block * kQueries, queries, key, keys);
    }
    cp_async_commit();

    for (int next; block < end; block = next, nothing_hidden = next_nothing_hidden, stage = (stage + 1) % kStages) {
      const int query = block * kQueries;
      const bool masked = kEverything && mask.data && !nothing_hidden;
      cp_async_wait();
      __syncthreads();  // this block is there, and all have done with the one before
      next = query_blocks.next(next_nothing_hidden);
      if (kStages > 1 && next < end) {
        load_queries((stage + 1) % kStages, next);
        load_grad_out((stage + 1) % kStages, next);
      }

      const ScoreBlock here{query + score_query, key, queries, keys, query >= whole_begin && query + kQueries <= whole_end};
      [[maybe_unused]] unsigned kept = ~0u;
      if (kEverything && dropout && scores_here) kept = draw_weights<true, kScoreRows, kScoreColumns>(score_row, dropout, here);
      Accumulator<kScoreRows, kScoreColumns> scores, grads;
      Rest scores_rest, grads_rest;
      clear(scores);
      clear(grads);
      if (scores_here) {
        multiply_rows<Element, kHeadDim>(scores, scores_rest, key_tile, score_row, query_tile(stage).from(score_query, 0));
        multiply_rows<Element, kHeadDim>(grads, grads_rest, value_tile, score_row, grad_out_tile(stage).from(score_query, 0));
      }
      if (scores_here) {
        if (kEverything && dropout) drop_gradients<Element>(grads, grads_rest, kept, arguments.keep_scale);
        without_infinite(grads, grads_rest);
        const Numbers rows{numbers(stage).data + score_query};
#pragma unroll
        for (int j = 0; j < kScoreColumns; ++j) {
          const float2 delta = rows.delta(8 * j + 2 * lane_in_quad()),
                       delta_low = rows.rest_of_delta(8 * j + 2 * lane_in_quad());
#pragma unroll
          for (int i = 0; i < kScoreRows; ++i)
#pragma unroll
            for (int e = 0; e < 4; ++e)
              grads[i][j][e] = less_delta<Rest>(grads[i][j][e], grads_rest.sums[i][j][e], e % 2 ? delta.y : delta.x,
                                                e % 2 ? delta_low.y : delta_low.x);
        }
        if (kEverything && rule.has_score_mod)
          apply_score_mod<true>(scores, score_row, rule, here, sequence.visible, &grads, &scores_rest);
        if (masked)
          mask_scores<true>(scores, score_row, mask.dtype, LaterQueries<decltype(mask_tile)>{mask_tile, score_query},
                            &scores_rest);
        round_to_sum(scores, scores_rest);
        if (!here.whole) hide_scores<true>(scores, score_row, here, sequence.visible);
        const float factor = kEverything ? rule.remaining_scale() : rule.scale;
#pragma unroll
        for (int j = 0; j < kScoreColumns; ++j) {
          const float2 high = rows.high(8 * j + 2 * lane_in_quad()), low = rows.low(8 * j + 2 * lane_in_quad());
#pragma unroll
          for (int i = 0; i < kScoreRows; ++i)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
              float& x = scores[i][j][e];
              x = FastBinary::exp(
                  exponent_of<Rest>(x, scores_rest.sums[i][j][e], factor, e % 2 ? high.y : high.x, e % 2 ? low.y : low.x));
              grads[i][j][e] *= x;
              if (kEverything && !(kept >> (4 * (i * kScoreColumns + j) + e) & 1)) x = 0;
            }
        }
      }
      const LeftOperand<Element, kScoreRows, kScoreColumns> weight_operand(scores), grad_operand(grads);
      if (scores_here && !kInRegisters) weight_operand.store(weight_tile, score_row, score_query);
      if (scores_here && (!kInRegisters || sums_queries)) grad_operand.store(grad_tile, score_row, score_query);

      // What others than the warp itself made of the weights and the scores' gradients: these queries.
      const int other = kOwnHalf ? kScoreQueries - score_query : 0;
      constexpr int kOthers = kOwnHalf ? kScoreQueries : kQueries;
      if constexpr (kInRegisters || kOwnHalf)
        multiply_operand(grad_value, weight_operand, grad_out_tile(stage).from(score_query, 0), sum_column);
      if constexpr (kOwnHalf) multiply_operand(grad_key, grad_operand, query_tile(stage).from(score_query, 0), sum_column);
      __syncthreads();  // weights and scores' gradients are there, and all have done with the mask
      if (kEverything && next < end && mask.data && !next_nothing_hidden)
        mask_tile.load(mask, next * kQueries, queries, key, keys);
      if constexpr (!kInRegisters) {
        multiply_rows_by_columns<Element, kOthers>(grad_value, weight_tile.from(0, other), sum_row,
                                                   grad_out_tile(stage).from(other, 0), sum_column);
        if (kStages == 1) __syncthreads();  // all have done with the gradients of outputs
      }
      if (kStages == 1 && next < end) load_grad_out(0, next);
      if constexpr (kInRegisters)
        multiply_operand(grad_key, grad_operand, query_tile(stage).from(score_query, 0));
      else
        multiply_rows_by_columns<Element, kOthers>(grad_key, grad_tile.from(0, other), sum_row,
                                                   query_tile(stage).from(other, 0), sum_column);
      if (kStages == 1) {
        __syncthreads();  // all have done with the queries
        if (next < end) load_queries(0, next);
      }
      cp_async_commit();

      if (sums_queries) {
        Accumulator<kQueryRows, kQueryWidth / 8> grad_query;
        clear(grad_query);
        multiply_columns<Element, kKeys>(grad_query, grad_tile, query_row, key_tile, query_column);
        if (direct) {
          const MutableView4& view = gradients.grad_query;
          store_accumulators(grad_query, static_cast<float>(problem.scale),
                             static_cast<Element*>(view.data) + batch * view.stride[0] + head * view.stride[1], view.stride[2],
                             view.stride[3], query + query_row, query_column, queries, static_cast<int>(problem.head_dim));
        } else {
          float* const sums = arguments.space.sums + first_block * (kStatsRows * kHeadDim);
#pragma unroll
          for (int i = 0; i < kQueryRows; ++i)
#pragma unroll
            for (int j = 0; j < kQueryWidth / 8; ++j)
              dq_accum_add(sums + (int64_t{query + query_row} / 16 + i) * (16 * kHeadDim) + (query_column / 8 + j) * 128 +
                               dq_accum_offset(lane(), 0),
                           grad_query[i][j]);
        }
      }
      if (next < end) finish_loads((stage + 1) % kStages, next);
    }
  }
  cp_async_wait();
  __syncthreads();  // all have done with shared memory

  const float scale = static_cast<float>(problem.scale);
  scale_by(grad_key, scale);
  if (kEverything) scale_by(grad_value, arguments.keep_scale);
  if constexpr (kInRegisters && kTile.score_split > 1) {
    static_assert(kTile.score_split == 2 &&
                  kTile.warps * kSumRows * kSumWidth * 16 * static_cast<int>(sizeof(float)) <= kBytes);
    const int slot = warp / 2 * 2;
    if (warp % 2 == 1) {
      leave(grad_key, sums_of_warp(shared, slot));
      leave(grad_value, sums_of_warp(shared, slot + 1));
    }
    __syncthreads();
    if (warp % 2 == 0) {
      take(grad_key, sums_of_warp(shared, slot));
      take(grad_value, sums_of_warp(shared, slot + 1));
    }
    __syncthreads();
    if (warp % 2 == 1) return;
  }
  const auto store = [&](const Sums& d, WideTile at, const MutableView4& view, int64_t width) {
    Element* const to = static_cast<Element*>(view.data) + batch * view.stride[0] + unit * view.stride[1] +
                        (sequence.keys.begin + key) * view.stride[2] + sum_column * view.stride[3];
    store_rows<Element>(d, at, sum_column, sum_row, to, view.stride[2], view.stride[3], last_key - key,
                        static_cast<int>(width) - sum_column);
  };
  store(grad_key, key_tile, gradients.grad_key, problem.head_dim);
  store(grad_value, value_tile, gradients.grad_value, problem.head_dim_v);
}

template <class Element, int kHeadDim, Variant kVariant, class Body = BackwardOnSm80<Element, kHeadDim, kVariant>>
__global__ void __launch_bounds__(Body::kThreads, Body::kTile.blocks)
    attention_backward_sm80(const __grid_constant__ BackwardArguments arguments) {
  Body::run(arguments);
}

template <int kHeadDim, class F, class... Room>
void visit_backward_sm80(const AttentionProblem& problem, F&& f, Room... room) {
  visit_sm80<BackwardOnSm80, has_backward_sm80_tile, kHeadDim>(problem, f, room...);
}

template <int kHeadDim>
QueryGradients query_gradients_on_sm80(const AttentionProblem& problem, bool deterministic) {
  int tile_keys = 0;
  visit_backward_sm80<kHeadDim>(problem,
                                [&]<class Element, Variant kVariant>(Type<Element>, std::integral_constant<Variant, kVariant>) {
                                  tile_keys = BackwardOnSm80<Element, kHeadDim, kVariant>::kKeys;
                                });
  if (problem.keys == 0) return QueryGradients::kSum;  // of nothing
  if (!problem.query_starts && problem.keys <= tile_keys) return QueryGradients::kDirect;
  return deterministic ? QueryGradients::kNone : QueryGradients::kSum;
}

template <int kHeadDim>
BackwardWorkspace backward_sm80_space(const AttentionProblem& problem, const AttentionGradients& gradients, bool deterministic,
                                      void* workspace) {
  return BackwardWorkspace(problem, gradients, kHeadDim,
                           query_gradients_on_sm80<kHeadDim>(problem, deterministic) == QueryGradients::kSum,
                           mask_gradient_parts(problem, gradients), workspace);
}

template <class Element, int kHeadDim, Variant kVariant>
void launch_backward_sm80(const AttentionProblem& problem, const AttentionGradients& gradients, const BackwardWorkspace& space,
                          QueryGradients query_gradients, CUstream_st* stream) {
  using Body = BackwardOnSm80<Element, kHeadDim, kVariant>;
  const BackwardArguments arguments{problem,
                                    gradients,
                                    space,
                                    TileList::of(problem, true, gradients.kv_grad_heads, Body::kKeys),
                                    ScoreMod(problem),
                                    problem.dropout < 1 ? static_cast<float>(1 / (1 - problem.dropout)) : 0.0f,
                                    query_gradients};
  if (arguments.list.count() > 0)
    launch<attention_backward_sm80<Element, kHeadDim, kVariant>>(arguments, arguments.list.count(), Body::kThreads,
                                                                 Body::shared_bytes(problem), stream);
}

template <int kHeadDim>
int64_t backward_sm80_workspace(const AttentionProblem& problem, const AttentionGradients& gradients, bool deterministic) {
  return backward_sm80_space<kHeadDim>(problem, gradients, deterministic, nullptr).bytes;
}

template <int kHeadDim>
void backward_sm80(const AttentionProblem& problem, const AttentionGradients& gradients, bool deterministic, void* workspace,
                   CUstream_st* stream) {
  const BackwardWorkspace space = backward_sm80_space<kHeadDim>(problem, gradients, deterministic, workspace);
  const QueryGradients query_gradients = query_gradients_on_sm80<kHeadDim>(problem, deterministic);
  fill_mask_map(problem, space.map, stream);
  prepare_backward(problem, gradients, space, stream);
  visit_backward_sm80<kHeadDim>(
      problem, [&]<class Element, Variant kVariant>(Type<Element>, std::integral_constant<Variant, kVariant>) {
        launch_backward_sm80<Element, kHeadDim, kVariant>(problem, gradients, space, query_gradients, stream);
      });
  if (query_gradients == QueryGradients::kSum) finish_queries(problem, gradients, space, stream);
  if (query_gradients == QueryGradients::kNone) backward_queries_sm80<kHeadDim>(problem, gradients, space, stream);
  if (gradients.grad_sinks) finish_sinks(problem, gradients, space, stream);
  if (gradients.grad_mask.data) mask_gradient(problem, gradients, space, stream);
}

template <int kHeadDim>
const char* backward_sm80_refusal(const AttentionProblem& problem, const Gpu& gpu) {
  const char* reason = nullptr;
  visit_backward_sm80<kHeadDim>(
      problem,
      [&]<class Element, Variant kVariant>(Type<Element>, std::integral_constant<Variant, kVariant>) {
        if (BackwardOnSm80<Element, kHeadDim, kVariant>::shared_bytes(problem) > gpu.shared_bytes)
          reason = "the GPU has too little shared memory for this head dim";
      },
      gpu.shared_bytes);
  return reason;
}

}  // namespace flash_online::cuda
