// Attention backward for every GPU from compute capability 8.0 on, on mma.sync and cp.async: FlashAttention-2's organisation
// (arXiv 2307.08691). docs/design/attention_sm80.md draws it.
//
// A CTA takes a tile of keys and values, and its mainloop passes over blocks of the queries of every head that shares them.
// Scores are made transposed, [key][query], so that weights and the scores' gradients are left operands of the products that
// make dV and dK, which stay in registers to the end. dQ is summed over CTAs, in global memory.
#pragma once

#include "../../hw/compiler.cuh"
#include "../../hw/launch.h"
#include "../../hw/named_barrier.cuh"
#include "../../hw/uniform.cuh"
#include "../../mma/gemm.cuh"
#include "../attention.h"
#include "../common/backward_workspace.cuh"
#include "../common/dq_accum.cuh"
#include "../common/dropout.cuh"
#include "../common/scores.cuh"
#include "../common/store_rows.cuh"
#include "../common/tile_list.cuh"
#include "../kernels.h"
#include "../masks/mask_grad.h"
#include "../masks/visible_blocks.cuh"
#include "load.cuh"
#include "tiles.h"
#include "variants.cuh"

namespace flash_online::cuda {

// The destination of dQ.
enum class DqMode : int8_t {
  kAccumulate,  // into sums that other CTAs add to
  kDirect,      // into the result: one tile has all keys
  kNone,        // nowhere: another kernel makes it
};

struct BackwardSm80Arguments {
  AttentionProblem problem;
  AttentionGradients gradients;
  BackwardWorkspace space;
  TileList list;  // of keys; its heads are the kv_grad_heads
  ScoreMod score_mod;
  float keep_scale;  // 1 / (1 - dropout)
  DqMode dq_mode;
  int64_t query_step = 0, grad_out_step = 0;  // TileVectors::step
};

// A warp's values of a mask tile; its queries begin at `query`.
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

// The row statistics of kQueries queries in shared memory (kRowStats); with kPrecise also the low part of delta.
template <int kQueries, bool kPrecise>
struct RowStatsTile {
  static constexpr int kStats = kPrecise ? 4 : 3;
  static constexpr int kBytes = kStats * kQueries * static_cast<int>(sizeof(float));
  float* data;

  // Starts copying one head's statistics of the queries from `query` on.
  __device__ __forceinline__ void load(const float* row_stats, [[maybe_unused]] const float* delta_low_stats, int query,
                                       unsigned thread = threadIdx.x) const {
    static_assert(kStatsRows % kQueries == 0);
    if (thread >= kStats * kQueries / 4) return;
    const unsigned stat = thread / (kQueries / 4), column = thread % (kQueries / 4) * 4;
    const float* from = row_stats + int64_t{query} / kStatsRows * kRowStats + query % kStatsRows + stat * kStatsRows + column;
    if (kPrecise && stat == 3) from = delta_low_stats + query + column;
    cp_async(reinterpret_cast<uint4*>(data + stat * kQueries + column), from);
  }
  // lse, lse_low, delta and delta_low read the statistics of two neighbouring queries.
  __device__ __forceinline__ float2 lse(int query) const { return *reinterpret_cast<const float2*>(data + query); }
  // The least lse that a lane reads in kColumns groups of eight queries.
  template <int kColumns>
  __device__ __forceinline__ float least_lse() const {
    float least = INFINITY;
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
      const float2 both = lse(8 * j + 2 * lane_in_quad());
      least = fminf(least, fminf(both.x, both.y));
    }
    return least;
  }
  __device__ __forceinline__ float2 lse_low(int query) const {
    return *reinterpret_cast<const float2*>(data + kQueries + query);
  }
  __device__ __forceinline__ float2 delta(int query) const {
    return *reinterpret_cast<const float2*>(data + 2 * kQueries + query);
  }
  __device__ __forceinline__ float2 delta_low(int query) const {
    return kPrecise ? *reinterpret_cast<const float2*>(data + 3 * kQueries + query) : float2{};
  }
};

// Stores accumulators times `scale` straight to rows in global memory: a warp's rows from `row` on, columns from `column` on.
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

// A CTA's backward pass. Members that run on the device stand in the order in which they are called.
template <class Element, int kHeadDim, Variant kVariant>
class BackwardSm80Kernel {
 public:
  static constexpr bool kHasOptions = has_options(kVariant);
  // Kernels for 16-bit elements without options have a loop of their own for blocks whose queries all see every key of the
  // tile.
  static constexpr bool kHasWholeLoop = !kHasOptions && Fragments<Element>::kDigits == 1;
  static constexpr BackwardSm80Tile kTile = backward_sm80_tile(kDigitsBytes<Element>, kHeadDim, kVariant);
  static constexpr int kThreads = kTile.threads(), kKeys = kTile.keys, kQueries = kTile.queries, kStages = kTile.stages;

  static int shared_bytes(const AttentionProblem& problem) {
    const int rows = !problem.mask.data ? 0 : problem.mask.stride[2] == 0 ? 1 : kQueries;
    return kTile.shared_bytes() + rows * mask_pitch(kKeys, static_cast<int>(size_of(problem.mask_dtype)));
  }

  static constexpr TileCopy kQueryCopy{.rows = kQueries, .width = kHeadDim, .threads = kThreads};
  // TileVectors::step of the rows of `view`, where the kernel has TileVectors.
  static int64_t step_of(const ConstView4& view) {
    if constexpr (kHasWholeLoop) return TileVectors<Element, kQueryCopy>::step(view.stride[2]);
    return 0;
  }

  __device__ __forceinline__ static void run(const BackwardSm80Arguments& arguments) {
    extern __shared__ __align__(16) char shared[];
    const AttentionProblem& problem = arguments.problem;
    // Read here and not where they are used: two variants of the kernel would spill more registers.
    const bool makes_dq = arguments.dq_mode != DqMode::kNone, direct = arguments.dq_mode == DqMode::kDirect;
    const WorkTile tile(problem, tile_coord(problem, arguments.list, blockIdx.x, true, kKeys, problem.visible.right < 0));
    if (problem.query_starts && tile.block == 0)
      clear_key_padding<Element, kThreads>(problem, arguments.gradients, tile.batch, tile.head);
    if (tile.block < 0 || tile.block * kKeys >= tile.keys) return;

    BackwardSm80Kernel kernel(arguments, tile, makes_dq, direct, shared);
    kernel.load_keys_and_values();
    // Accumulators are not members: the compiler would keep the other members in memory until loops are unrolled.
    KeyGrads grad_key, grad_value;
    clear(grad_key);
    clear(grad_value);
    for (int head = kernel.first_head; head < kernel.first_head + kernel.heads; ++head)
      kernel.mainloop(head, grad_key, grad_value);
    kernel.epilogue(grad_key, grad_value);
  }

 private:
  // Scores, [key][query]: 16 * kScoreRows keys by kScoreQueries queries per warp.
  static constexpr int kScoreQueries = kQueries / kTile.score_query_warps;
  static constexpr int kScoreRows = kKeys / kTile.score_key_warps / 16, kScoreColumns = kScoreQueries / 8;
  static constexpr bool kAllScore = kTile.score_key_warps * kTile.score_query_warps == kTile.warps;
  static constexpr bool kSplits = kTile.splits_products;
  static constexpr int kPairs = kTile.warps / 2;  // of warps that exchange products, if kSplits
  // dK and dV, [key][column].
  static constexpr bool kInRegisters = kTile.dkv_warps == 0;  // weights stay with the warp that makes them
  static constexpr int kDkvColumnWarps = kInRegisters ? 1 : kTile.warps / kTile.dkv_warps;
  static constexpr int kDkvRows = kKeys / (kInRegisters ? kTile.score_key_warps : kTile.dkv_warps) / 16;
  static constexpr int kDkvWidth = kHeadDim / kDkvColumnWarps;
  // True if a warp sums over the keys for which it computes half of the weights: that half is a left operand in registers.
  static constexpr bool kOwnHalf =
      kTile.dkv_warps == kTile.score_key_warps && kTile.score_query_warps == 2 && kDkvColumnWarps == 2;
  // dQ, [query][column].
  static constexpr int kDqColumnWarps = kTile.warps / kTile.dq_warps;
  static constexpr int kDqRows = kQueries / kTile.dq_warps / 16, kDqWidth = kHeadDim / kDqColumnWarps;
  // Whether dQ comes before dK: its additions leave the SM during the product after it, which is faster where CTAs share an SM.
  static constexpr bool kDqFirst = kStages > 1 && kTile.ctas_per_sm > 1;
  // A step of a product with the left operand in registers takes two columns of accumulators.
  static_assert((!kInRegisters && !kOwnHalf) || kScoreColumns % 2 == 0);

  using Digit = typename Digits<Element>::Digit;
  using WideTile = SharedTile<Element, kHeadDim>;
  using ScoreTile = SharedTile<Element, kQueries>;
  using Scores = Accumulator<kScoreRows, kScoreColumns>;
  using Compensation = CompensatedAccumulator<Element, kScoreRows, kScoreColumns>;
  using ScoreOperand = LeftOperand<Element, kScoreRows, kScoreColumns>;
  using RowStats = RowStatsTile<kQueries, Compensation::kCompensated>;
  static_assert(RowStats::kStats * kQueries / 4 <= kThreads);
  using KeyGrads = Accumulator<kDkvRows, kDkvWidth / 8>;
  using Prefetch = TilePrefetch<Element, kQueryCopy>;

  // Shared memory: keys, values; for each stage queries, gradients of outputs and row statistics; gradients of scores; weights,
  // unless they stay in registers; mask.
  static constexpr int kKeyBytes = WideTile::bytes(kKeys), kQueryBytes = WideTile::bytes(kQueries),
                       kScoreBytes = ScoreTile::bytes(kKeys);
  static constexpr int kStageBytes = 2 * kQueryBytes + RowStats::kBytes;
  static constexpr int kBytes = 2 * kKeyBytes + kStages * kStageBytes + (kInRegisters ? 1 : 2) * kScoreBytes;
  static_assert(kKeyBytes % 16 == 0 && kQueryBytes % 16 == 0 && kScoreBytes % 16 == 0);
  static_assert(kBytes == kTile.shared_bytes());

  // ---- what a CTA works on -------------------------------------------------------------------------------------------------
  const BackwardSm80Arguments& arguments;
  const AttentionProblem& problem;
  const AttentionGradients& gradients;
  const bool makes_dq, direct;
  const int64_t batch, kv_grad_head;
  const Sequence sequence;
  const int queries, keys;  // the sequence's
  const int key, last_key;  // the tile's

  char* const shared;
  const WideTile key_tile, value_tile;
  char* const stages;
  const ScoreTile grad_tile, weight_tile;
  MaskTile<kQueries, kKeys, kThreads> mask_tile;

  // The warp's rows and columns of the products.
  const int warp;
  const int score_row, score_query;
  const int dkv_row, dkv_column;
  const int dq_row, dq_column;
  const bool has_scores;

  const int heads, first_head;  // those of the queries that share the keys
  int begin, end;  // blocks of queries that see any of the keys
  int whole_begin, whole_end;  // queries that see all of them

  __device__ __forceinline__ BackwardSm80Kernel(const BackwardSm80Arguments& arguments_, const WorkTile& tile, bool makes_dq_,
                                                bool direct_, char* shared_)
      : arguments(arguments_),
        problem(arguments.problem),
        gradients(arguments.gradients),
        makes_dq(makes_dq_),
        direct(direct_),
        batch(tile.batch),
        kv_grad_head(tile.head),
        sequence(tile.sequence),
        queries(tile.queries),
        keys(tile.keys),
        key(static_cast<int>(tile.block) * kKeys),
        last_key(min(key + kKeys, keys)),
        shared(shared_),
        key_tile{reinterpret_cast<Digit*>(shared)},
        value_tile{reinterpret_cast<Digit*>(shared + kKeyBytes)},
        stages(shared + 2 * kKeyBytes),
        grad_tile{reinterpret_cast<Digit*>(stages + kStages * kStageBytes)},
        weight_tile{reinterpret_cast<Digit*>(stages + kStages * kStageBytes + kScoreBytes)},
        mask_tile(shared + kBytes),
        warp(uniform(static_cast<int>(threadIdx.x) / kWarpSize)),
        score_row((kSplits ? warp % kPairs / (kTile.score_query_warps / 2) : warp / kTile.score_query_warps) *
                  (16 * kScoreRows)),
        score_query(
            (kSplits ? warp % kPairs % (kTile.score_query_warps / 2) * 2 + warp / kPairs : warp % kTile.score_query_warps) *
            kScoreQueries),
        dkv_row(kInRegisters ? score_row : warp / kDkvColumnWarps * (16 * kDkvRows)),
        dkv_column(kInRegisters ? 0 : warp % kDkvColumnWarps * kDkvWidth),
        dq_row(warp / kDqColumnWarps * (16 * kDqRows)),
        dq_column(warp % kDqColumnWarps * kDqWidth),
        has_scores(kAllScore || warp < kTile.score_key_warps * kTile.score_query_warps),
        heads(static_cast<int>(problem.heads) / static_cast<int>(arguments.list.heads)),
        first_head(static_cast<int>(tile.head) * heads) {
    const QueryRange range = direct ? QueryRange{0, queries} : queries_of_any(sequence.visible, key, last_key, queries);
    begin = static_cast<int>(min(range.begin, int64_t{queries}) / kQueries);
    end = range.end > range.begin ? static_cast<int>((range.end + kQueries - 1) / kQueries) : 0;
    const QueryRange whole = queries_of_all(sequence.visible, key, key + kKeys, key + kKeys <= keys ? queries : 0);
    whole_begin = static_cast<int>(min(whole.begin, int64_t{queries}));
    whole_end = static_cast<int>(whole.end);
  }

  __device__ __forceinline__ WideTile query_tile(int stage) const {
    return {reinterpret_cast<Digit*>(stages + stage * kStageBytes)};
  }
  __device__ __forceinline__ WideTile grad_out_tile(int stage) const {
    return {reinterpret_cast<Digit*>(stages + stage * kStageBytes + kQueryBytes)};
  }
  __device__ __forceinline__ RowStats row_stats(int stage) const {
    return {reinterpret_cast<float*>(stages + stage * kStageBytes + 2 * kQueryBytes)};
  }

  // One head's inputs of the mainloop.
  struct Head {
    const int index;
    const HeadRows<Element> query_rows, grad_out_rows;
    const int64_t first_block;  // of the workspace's blocks of rows
    const float *const row_stats, *const delta_low;
    float* const dq_accum;  // the warp's first tile of 16 x 8 (dq_accum.cuh)
    const HeadMask mask;
    const HeadScoreMod<Element> score_mod;
    const Dropout dropout;

    __device__ __forceinline__ Head(const BackwardSm80Kernel& kernel, int head)
        : index(head),
          query_rows(kernel.problem.query, kernel.batch, head, kernel.sequence.queries.begin, kernel.problem.head_dim),
          grad_out_rows(kernel.gradients.grad_out, kernel.batch, head, kernel.sequence.queries.begin,
                        kernel.problem.head_dim_v),
          first_block(first_row_block(kernel.problem, kernel.arguments.space.list, kernel.batch, head)),
          row_stats(kernel.arguments.space.row_stats + first_block * kRowStats),
          delta_low(Compensation::kCompensated ? kernel.arguments.space.delta_low(first_block) : nullptr),
          dq_accum(kernel.arguments.space.dq_accum + first_block * (kStatsRows * kHeadDim) + kernel.dq_row * kHeadDim +
                   kernel.dq_column * 16),
          mask(kernel.problem, kernel.batch, head),
          score_mod(score_mod_of_head<Element>(kernel.arguments.score_mod, kernel.problem, kernel.batch, head)),
          dropout(kernel.problem, kernel.batch, head) {}
  };

  // ---- loads ---------------------------------------------------------------------------------------------------------------
  __device__ __forceinline__ void load_keys_and_values() const {
    load<kKeys, kThreads>(
        key_tile,
        HeadRows<Element>(problem.key, batch,
                          first_head / (static_cast<int>(problem.heads) / static_cast<int>(problem.key_heads)),
                          sequence.keys.begin, problem.head_dim),
        key, keys);
    load_values<kKeys, kThreads>(
        value_tile,
        HeadRows<Element>(problem.value, batch,
                          first_head / (static_cast<int>(problem.heads) / static_cast<int>(problem.value_heads)),
                          sequence.keys.begin, problem.head_dim_v),
        key, keys, kHasOptions ? arguments.keep_scale : 1.0f);
  }

  // The copies of blocks of queries to shared memory: a step starts those of the next block, and finishes them at its end.
  struct BlockCopies {
    const BackwardSm80Kernel& kernel;
    const Head& head;
    Prefetch queries, grad_out;
    static constexpr bool kWhole = false;

    __device__ __forceinline__ BlockCopies(const BackwardSm80Kernel& kernel_, const Head& head_)
        : kernel(kernel_), head(head_) {}
    __device__ __forceinline__ void start_queries(int stage, int block) {
      queries.start(kernel.query_tile(stage), head.query_rows, block * kQueries, kernel.queries);
    }
    __device__ __forceinline__ void start_grad_out(int stage, int block) {
      grad_out.start(kernel.grad_out_tile(stage), head.grad_out_rows, block * kQueries, kernel.queries);
      kernel.row_stats(stage).load(head.row_stats, head.delta_low, block * kQueries);
    }
    __device__ __forceinline__ void finish(int stage, int block) const {
      queries.finish(kernel.query_tile(stage), head.query_rows, block * kQueries, kernel.queries);
      grad_out.finish(kernel.grad_out_tile(stage), head.grad_out_rows, block * kQueries, kernel.queries);
    }
  };
  // The same if every row of a block exists and consists of whole vectors. All addresses are made anew from the number of the
  // thread: what was kept from block to block would take the registers of fragments.
  struct WholeCopies {
    const BackwardSm80Kernel& kernel;
    const Head& head;
    static constexpr bool kWhole = true;
    using Vectors = TileVectors<Element, kQueryCopy>;

    __device__ __forceinline__ static bool can_load(const Head& head) {
      return Vectors::can_load(head.query_rows) && Vectors::can_load(head.grad_out_rows);
    }
    __device__ __forceinline__ static unsigned thread() { return opaque(threadIdx.x); }
    __device__ __forceinline__ void start_queries(int stage, int block) {
      Vectors(head.query_rows, block * kQueries, thread()).load(kernel.query_tile(stage), kernel.arguments.query_step);
    }
    __device__ __forceinline__ void start_grad_out(int stage, int block) {
      const unsigned here = thread();
      Vectors(head.grad_out_rows, block * kQueries, here).load(kernel.grad_out_tile(stage), kernel.arguments.grad_out_step);
      kernel.row_stats(stage).load(head.row_stats, head.delta_low, block * kQueries, here);
    }
    __device__ __forceinline__ void finish(int, int) const {}
  };

  // ---- mainloop over blocks of one head's queries --------------------------------------------------------------------------
  __device__ __forceinline__ auto query_blocks_of(int head) const {
    if constexpr (kHasOptions)
      return QueryBlocks<kQueries>(problem, direct ? nullptr : &arguments.space.tiles, batch, head, key, last_key, queries,
                                   begin, end);
    else
      return AllBlocks{begin};
  }

  __device__ __forceinline__ void mainloop(int head_index, KeyGrads& grad_key, KeyGrads& grad_value) {
    const Head head(*this, head_index);
    auto query_blocks = query_blocks_of(head_index);
    bool mask_is_clear, next_mask_is_clear = false;
    int block = query_blocks.next(mask_is_clear), stage = 0;
    if (head_index > first_head) __syncthreads();  // all have done with the head before
    BlockCopies general(*this, head);
    if (block < end) {
      general.start_queries(0, block);
      general.start_grad_out(0, block);
      general.finish(0, block);
      if (kHasOptions && head.mask.data && !mask_is_clear) mask_tile.load(head.mask, block * kQueries, queries, key, keys);
    }
    cp_async_commit();

    // Takes a block, and moves on to the next one.
    const auto step = [&](auto& copies) __attribute__((always_inline)) {
      using Copies = std::remove_reference_t<decltype(copies)>;
      const int query = block * kQueries;
      cp_async_wait();
      __syncthreads();  // this block is there, and all have done with the one before
      const int next = query_blocks.next(next_mask_is_clear), next_stage = kStages > 1 ? stage ^ 1 : 0;
      const ScoreBlock here{query + score_query, key, queries, keys,
                            Copies::kWhole || (query >= whole_begin && query + kQueries <= whole_end)};
      [[maybe_unused]] unsigned kept = ~0u;
      if (kHasOptions && head.dropout && has_scores)
        kept = draw_weights<true, kScoreRows, kScoreColumns>(score_row, head.dropout, here);
      Scores scores, grads;
      // Copies start after the products' own loads, which they would delay.
      const auto start_copies = [&]() __attribute__((always_inline)) {
        if (kStages == 1 || next >= end) return;
        copies.start_queries(next_stage, next);
        copies.start_grad_out(next_stage, next);
      };
      make_weights_and_grad_scores(scores, grads, head, stage, here, kept, mask_is_clear, start_copies);
      const ScoreOperand weight_operand(scores), grad_operand(grads);
      if (has_scores && !kInRegisters) weight_operand.store(weight_tile, score_row, score_query);
      if (has_scores && (!kInRegisters || makes_dq)) grad_operand.store(grad_tile, score_row, score_query);

      // dV += P^T dO and dK += dS^T Q. A warp's own weights and gradients of scores are in its registers; others' are of the
      // kOthers queries from `other` on.
      [[maybe_unused]] const int other = kOwnHalf ? kScoreQueries - score_query : 0;
      [[maybe_unused]] constexpr int kOthers = kOwnHalf ? kScoreQueries : kQueries;
      if constexpr (kInRegisters || kOwnHalf)
        multiply_operand(grad_value, weight_operand, grad_out_tile(stage).from(score_query, 0), dkv_column);
      if constexpr (kOwnHalf) multiply_operand(grad_key, grad_operand, query_tile(stage).from(score_query, 0), dkv_column);
      __syncthreads();  // weights and scores' gradients are there, and all have done with the mask
      if (kHasOptions && next < end && head.mask.data && !next_mask_is_clear)
        mask_tile.load(head.mask, next * kQueries, queries, key, keys);
      if constexpr (!kInRegisters) {
        multiply_rows_by_columns<kOthers>(grad_value, weight_tile.from(0, other), dkv_row, grad_out_tile(stage).from(other, 0),
                                          dkv_column);
        if (kStages == 1) __syncthreads();  // all have done with the gradients of outputs
      }
      if (kStages == 1 && next < end) copies.start_grad_out(0, next);
      if (kDqFirst && makes_dq) accumulate_dq<Copies::kWhole>(head, query);
      if constexpr (kInRegisters)
        multiply_operand(grad_key, grad_operand, query_tile(stage).from(score_query, 0));
      else
        multiply_rows_by_columns<kOthers>(grad_key, grad_tile.from(0, other), dkv_row, query_tile(stage).from(other, 0),
                                          dkv_column);
      if (kStages == 1) {
        __syncthreads();  // all have done with the queries
        if (next < end) copies.start_queries(0, next);
      }
      cp_async_commit();

      if (!kDqFirst && makes_dq) accumulate_dq<Copies::kWhole>(head, query);
      if (next < end) copies.finish(next_stage, next);
      block = next, mask_is_clear = next_mask_is_clear, stage = next_stage;
    };
    take_blocks(head, block, general, step);
  }

  // Calls step(copies), which moves `block` on, until there are no more blocks.
  template <class Step>
  __device__ __forceinline__ void take_blocks(const Head& head, int& block, BlockCopies& general, const Step& step) const {
    if constexpr (kHasWholeLoop) {
      const int first_whole = (whole_begin + kQueries - 1) / kQueries;
      // A step of the loop of whole blocks copies the next block, if there is one.
      const int last_copied = end * kQueries <= queries ? end : queries / kQueries - 1;
      const int whole_stop = WholeCopies::can_load(head) && !direct ? min(min(whole_end / kQueries, end), last_copied) : 0;
      while (block < end) {
        if (block >= first_whole && block < whole_stop) {
          WholeCopies copies{*this, head};
#pragma unroll 1
          while (block < whole_stop) step(copies);
        } else {
          const int stop = block < first_whole ? min(first_whole, end) : end;
#pragma unroll 1
          while (block < stop) step(general);
        }
      }
    } else {
      while (block < end) step(general);
    }
  }

  // S^T = K Q^T and dP^T = V dO^T of the warp's keys and queries, and from them P^T in `scores`, after dropout, and dS^T in
  // `grads`.
  // The warp's scores and gradients of weights, of which it computes one kind for itself and for another warp. What it gets
  // from that warp lies where it will put its own weights and gradients of scores: another warp neither reads nor writes there.
  __device__ __forceinline__ void multiply_in_pairs(Scores& scores, Scores& grads, int stage) const {
    Scores mine, theirs;
    const bool has_grads = warp >= kPairs;
    const int other_query = score_query ^ kScoreQueries;
    const WideTile left = has_grads ? value_tile : key_tile, right = has_grads ? grad_out_tile(stage) : query_tile(stage);
    clear(mine);
    clear(theirs);
    multiply_rows_twice(mine, theirs, left, score_row, right.from(score_query, 0), right.from(other_query, 0));
    static_assert(!kSplits || (kScoreRows == 2 && kScoreColumns == 2));
    const auto slot = [&](int query, int i, int j) {
      return reinterpret_cast<float4*>((i == 0 ? weight_tile : grad_tile).row(score_row + lane()) + query + 8 * j);
    };
#pragma unroll
    for (int i = 0; i < kScoreRows; ++i)
#pragma unroll
      for (int j = 0; j < kScoreColumns; ++j)
        *slot(other_query, i, j) = make_float4(theirs[i][j][0], theirs[i][j][1], theirs[i][j][2], theirs[i][j][3]);
    sync_named(1 + warp % kPairs, 2 * kWarpSize);
#pragma unroll
    for (int i = 0; i < kScoreRows; ++i)
#pragma unroll
      for (int j = 0; j < kScoreColumns; ++j) {
        const float4 x = *slot(score_query, i, j);
        const float others[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          scores[i][j][e] = has_grads ? others[e] : mine[i][j][e];
          grads[i][j][e] = has_grads ? mine[i][j][e] : others[e];
        }
      }
    __syncwarp();  // the warp's lanes overwrite what others of its lanes read
  }

  template <class AfterProducts>
  __device__ __forceinline__ void make_weights_and_grad_scores(Scores& scores, Scores& grads, const Head& head, int stage,
                                                               const ScoreBlock& here, unsigned kept, bool is_clear,
                                                               const AfterProducts& after_products) const {
    Compensation score_compensation, grad_compensation;
    if constexpr (kSplits) {
      multiply_in_pairs(scores, grads, stage);
    } else {
      clear(scores);
      clear(grads);
      if (has_scores) {
        // With the bits of the forward pass: the weight of the only key that a query sees is then 1, whatever rounding left of
        // its score, softcap and ALiBi.
        multiply_rows<GemmOptions{.transposed = true}>(scores, score_compensation, key_tile, score_row,
                                                       query_tile(stage).from(score_query, 0));
        multiply_rows(grads, grad_compensation, value_tile, score_row, grad_out_tile(stage).from(score_query, 0));
      }
    }
    after_products();
    if (has_scores) {
      const RowStats stats{row_stats(stage).data + score_query};
      subtract_deltas(grads, grad_compensation, head, stats, kept);
      make_scores(scores, score_compensation, grads, head, here, stats, is_clear);
      make_weights(scores, score_compensation, grads, head, stats, kept);
    }
  }

  // Gradients of weights, dP, less delta.
  __device__ __forceinline__ void subtract_deltas(Scores& grads, Compensation& compensation, const Head& head,
                                                  const RowStats& stats, unsigned kept) const {
    if (kHasOptions && head.dropout) drop_gradients<Element>(grads, compensation, kept, arguments.keep_scale);
    clear_low_if_infinite(grads, compensation);
#pragma unroll
    for (int j = 0; j < kScoreColumns; ++j) {
      const float2 delta = stats.delta(8 * j + 2 * lane_in_quad()), delta_low = stats.delta_low(8 * j + 2 * lane_in_quad());
#pragma unroll
      for (int i = 0; i < kScoreRows; ++i)
#pragma unroll
        for (int e = 0; e < 4; ++e)
          grads[i][j][e] = subtract_delta<Compensation>(grads[i][j][e], compensation.low[i][j][e], e % 2 ? delta.y : delta.x,
                                                        e % 2 ? delta_low.y : delta_low.x);
    }
  }

  // Turns products into scores: score modification (its derivative multiplies `grads`), mask and visibility.
  __device__ __forceinline__ void make_scores(Scores& scores, Compensation& compensation, Scores& grads, const Head& head,
                                              const ScoreBlock& here, const RowStats& stats, bool is_clear) const {
    if (kHasOptions && head.score_mod.has_score_mod)
      apply_score_mod<true>(scores, score_row, head.score_mod, here, sequence.visible, TimesDerivative{grads}, &compensation);
    if (kHasOptions && head.mask.data && !is_clear)
      mask_scores<true>(
          scores, score_row, head.mask.dtype, head.score_mod.lowest_score,
          LaterQueries<decltype(mask_tile)>{mask_tile, score_query}, [&] { return stats.template least_lse<kScoreColumns>(); },
          &compensation);
    renormalize(scores, compensation);
    if (kHasOptions && problem.is_sparse() && !is_clear)
      hide_by_sparsity<true>(scores, score_row, HeadSparsity(problem, sequence, batch, head.index), here);
    if (!here.whole) hide_scores<true>(scores, score_row, here, sequence.visible);
  }

  // Weights of scores, P = exp(S - lse), which dropout then drops; and gradients of scores, dS = P (dP - delta).
  __device__ __forceinline__ void make_weights(Scores& scores, const Compensation& compensation, Scores& grads,
                                               const Head& head, const RowStats& stats, unsigned kept) const {
    const float scale = kHasOptions ? head.score_mod.remaining_scale() : head.score_mod.scale;
#pragma unroll
    for (int j = 0; j < kScoreColumns; ++j) {
      const float2 lse = stats.lse(8 * j + 2 * lane_in_quad()), lse_low = stats.lse_low(8 * j + 2 * lane_in_quad());
#pragma unroll
      for (int i = 0; i < kScoreRows; ++i)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          float& x = scores[i][j][e];
          x = FastBinary::exp(exponent_of<Compensation>(x, compensation.low[i][j][e], scale, e % 2 ? lse.y : lse.x,
                                                        e % 2 ? lse_low.y : lse_low.x));
          grads[i][j][e] *= x;
          if (kHasOptions && !(kept >> (4 * (i * kScoreColumns + j) + e) & 1)) x = 0;
        }
    }
  }

  // dQ += dS K of the queries from `query` on. kWhole: a step of the loop of whole blocks, which never writes dQ directly.
  template <bool kWhole>
  __device__ __forceinline__ void accumulate_dq(const Head& head, int query) const {
    Accumulator<kDqRows, kDqWidth / 8> grad_query;
    clear(grad_query);
    multiply_columns<kKeys>(grad_query, grad_tile, dq_row, key_tile, dq_column);
    if (!kWhole && direct) {
      const MutableView4& view = gradients.grad_query;
      store_accumulators(grad_query, static_cast<float>(problem.scale),
                         static_cast<Element*>(view.data) + batch * view.stride[0] + head.index * view.stride[1],
                         view.stride[2], view.stride[3], query + dq_row, dq_column, queries,
                         static_cast<int>(problem.head_dim));
    } else {
      float* const to = head.dq_accum + int64_t{query} * kHeadDim + dq_accum_offset(lane(), 0);
#pragma unroll
      for (int i = 0; i < kDqRows; ++i)
#pragma unroll
        for (int j = 0; j < kDqWidth / 8; ++j) dq_accum_add(to + i * (16 * kHeadDim) + j * 128, grad_query[i][j]);
    }
  }

  // ---- epilogue ------------------------------------------------------------------------------------------------------------
  __device__ __forceinline__ void epilogue(KeyGrads& grad_key, KeyGrads& grad_value) const {
    cp_async_wait();
    __syncthreads();  // all have done with shared memory
    scale_by(grad_key, static_cast<float>(problem.scale));
    if (kHasOptions) scale_by(grad_value, arguments.keep_scale);
    if constexpr (kInRegisters && kTile.score_query_warps > 1) {
      sum_query_warps(grad_key, grad_value);
      if (warp % 2 == 1) return;
    }
    store(grad_key, key_tile, gradients.grad_key, problem.head_dim);
    store(grad_value, value_tile, gradients.grad_value, problem.head_dim_v);
  }

  __device__ __forceinline__ static void scale_by(KeyGrads& d, float factor) {
    for_each(d, [&](float& x, int, int, int) { x *= factor; });
  }

  // Adds the sums of two warps that have the same keys and different queries, in the even one.
  __device__ __forceinline__ void sum_query_warps(KeyGrads& grad_key, KeyGrads& grad_value) const {
    static_assert(kTile.score_query_warps == 2 &&
                  kTile.warps * kDkvRows * kDkvWidth * 16 * static_cast<int>(sizeof(float)) <= kBytes);
    const int slot = warp / 2 * 2;
    if (warp % 2 == 1) {
      write_partial(grad_key, slot);
      write_partial(grad_value, slot + 1);
    }
    __syncthreads();
    if (warp % 2 == 0) {
      add_partial(grad_key, slot);
      add_partial(grad_value, slot + 1);
    }
    __syncthreads();
  }

  // A slot of shared memory holds one warp's sums, in the order of its registers.
  __device__ __forceinline__ float4* partial(int slot) const {
    return reinterpret_cast<float4*>(reinterpret_cast<float*>(shared) + slot * kDkvRows * (kDkvWidth / 8) * 128);
  }
  __device__ __forceinline__ void write_partial(const KeyGrads& d, int slot) const {
#pragma unroll
    for (int i = 0; i < kDkvRows; ++i)
#pragma unroll
      for (int j = 0; j < kDkvWidth / 8; ++j)
        partial(slot)[(i * (kDkvWidth / 8) + j) * 32 + lane()] = make_float4(d[i][j][0], d[i][j][1], d[i][j][2], d[i][j][3]);
  }
  __device__ __forceinline__ void add_partial(KeyGrads& d, int slot) const {
#pragma unroll
    for (int i = 0; i < kDkvRows; ++i)
#pragma unroll
      for (int j = 0; j < kDkvWidth / 8; ++j) {
        const float4 x = partial(slot)[(i * (kDkvWidth / 8) + j) * 32 + lane()];
        d[i][j][0] += x.x, d[i][j][1] += x.y, d[i][j][2] += x.z, d[i][j][3] += x.w;
      }
  }

  __device__ __forceinline__ void store(const KeyGrads& d, WideTile at, const MutableView4& view, int64_t width) const {
    Element* const to = static_cast<Element*>(view.data) + batch * view.stride[0] + kv_grad_head * view.stride[1] +
                        (sequence.keys.begin + key) * view.stride[2] + dkv_column * view.stride[3];
    store_rows<Element>(d, at, dkv_column, dkv_row, to, view.stride[2], view.stride[3], last_key - key,
                        static_cast<int>(width) - dkv_column);
  }
};

template <class Element, int kHeadDim, Variant kVariant, class Kernel = BackwardSm80Kernel<Element, kHeadDim, kVariant>>
__global__ void __launch_bounds__(Kernel::kThreads, Kernel::kTile.ctas_per_sm)
    attention_backward_sm80(const __grid_constant__ BackwardSm80Arguments arguments) {
  Kernel::run(arguments);
}

template <int kHeadDim, class F, class... SharedBytes>
void visit_backward_sm80(const AttentionProblem& problem, F&& f, SharedBytes... shared_bytes) {
  visit_sm80<BackwardSm80Kernel, has_backward_sm80_tile, kHeadDim>(problem, f, shared_bytes...);
}

template <int kHeadDim, class... SharedBytes>
DqMode dq_mode_on_sm80(const AttentionProblem& problem, bool deterministic, SharedBytes... shared_bytes) {
  int tile_keys = 0;
  visit_backward_sm80<kHeadDim>(
      problem,
      [&]<class Element, Variant kVariant>(Type<Element>, VariantConstant<kVariant>) {
        tile_keys = BackwardSm80Kernel<Element, kHeadDim, kVariant>::kKeys;
      },
      shared_bytes...);
  if (problem.keys == 0) return DqMode::kAccumulate;  // of nothing
  if (!problem.query_starts && problem.keys <= tile_keys) return DqMode::kDirect;
  return deterministic ? DqMode::kNone : DqMode::kAccumulate;
}

template <int kHeadDim>
BackwardWorkspace backward_sm80_workspace(const BackwardPass& pass, void* workspace) {
  const bool accumulates = dq_mode_on_sm80<kHeadDim>(pass.problem, pass.deterministic) == DqMode::kAccumulate;
  return BackwardWorkspace(pass.problem, pass.gradients, kHeadDim, accumulates,
                           mask_gradient_partials(pass.problem, pass.gradients), workspace);
}

template <class Element, int kHeadDim, Variant kVariant>
void launch_backward_sm80(const AttentionProblem& problem, const AttentionGradients& gradients, const BackwardWorkspace& space,
                          DqMode dq_mode, CUstream_st* stream) {
  using Kernel = BackwardSm80Kernel<Element, kHeadDim, kVariant>;
  const BackwardSm80Arguments arguments{
      .problem = problem,
      .gradients = gradients,
      .space = space,
      .list = TileList::of(problem, true, gradients.kv_grad_heads, Kernel::kKeys)
                  .by_length(problem.visible, int64_t{sm_count()} * Kernel::kTile.ctas_per_sm),
      .score_mod = ScoreMod(problem),
      .keep_scale = problem.dropout < 1 ? static_cast<float>(1 / (1 - problem.dropout)) : 0.0f,
      .dq_mode = dq_mode,
      .query_step = Kernel::step_of(problem.query),
      .grad_out_step = Kernel::step_of(gradients.grad_out),
  };
  if (arguments.list.count() > 0)
    launch<attention_backward_sm80<Element, kHeadDim, kVariant>>(arguments, arguments.list.count(), Kernel::kThreads,
                                                                 Kernel::shared_bytes(problem), stream);
}

template <int kHeadDim>
const char* AttentionBackwardSm80<kHeadDim>::refusal(const BackwardPass& pass, const Gpu& gpu) {
  const char* reason = nullptr;
  visit_backward_sm80<kHeadDim>(
      pass.problem,
      [&]<class Element, Variant kVariant>(Type<Element>, VariantConstant<kVariant>) {
        if (BackwardSm80Kernel<Element, kHeadDim, kVariant>::shared_bytes(pass.problem) > gpu.shared_bytes)
          reason = "the GPU has too little shared memory for this head dim";
      },
      gpu.shared_bytes);
  if (dq_mode_on_sm80<kHeadDim>(pass.problem, pass.deterministic, gpu.shared_bytes) == DqMode::kNone &&
      !AttentionBackwardDqSm80<kHeadDim>::fits(pass.problem, gpu))
    reason = "the GPU has too little shared memory for this head dim in deterministic mode";
  return reason;
}

template <int kHeadDim>
int64_t AttentionBackwardSm80<kHeadDim>::workspace_bytes(const BackwardPass& pass) {
  return backward_sm80_workspace<kHeadDim>(pass, nullptr).bytes;
}

template <int kHeadDim>
void AttentionBackwardSm80<kHeadDim>::run(const BackwardPass& pass, void* workspace, CUstream_st* stream) {
  const AttentionProblem& problem = pass.problem;
  const AttentionGradients& gradients = pass.gradients;
  const BackwardWorkspace space = backward_sm80_workspace<kHeadDim>(pass, workspace);
  const DqMode dq_mode = dq_mode_on_sm80<kHeadDim>(problem, pass.deterministic);
  fill_tile_tables(problem, space.tiles, stream);
  prepare_backward(problem, gradients, space, stream);
  visit_backward_sm80<kHeadDim>(problem, [&]<class Element, Variant kVariant>(Type<Element>, VariantConstant<kVariant>) {
    launch_backward_sm80<Element, kHeadDim, kVariant>(problem, gradients, space, dq_mode, stream);
  });
  if (dq_mode == DqMode::kAccumulate) convert_dq_accum(problem, gradients, space, stream);
  if (dq_mode == DqMode::kNone) AttentionBackwardDqSm80<kHeadDim>::run(pass, space, stream);
  if (gradients.grad_sinks) reduce_sink_partials(problem, gradients, space, stream);
  if (gradients.grad_mask.data) mask_gradient(problem, gradients, space, stream);
  add_large_rows(problem, gradients, space, stream);
}

}  // namespace flash_online::cuda
