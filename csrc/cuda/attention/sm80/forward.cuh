// Attention forward for every GPU from compute capability 8.0 on, on mma.sync and cp.async: FlashAttention-2's organisation
// (arXiv 2307.08691). docs/design/attention_sm80.md draws it.
//
// A CTA takes a tile of one head's queries, and each of its warps 16 * row_tiles of them, whose scores, weights and outputs are
// in that warp's registers. The mainloop passes over blocks of keys: while scores are made, the block's values and mask arrive;
// while weights and outputs are made, the next block's keys do.
#pragma once

#include "../../hw/launch.h"
#include "../../mma/gemm.cuh"
#include "../common/dropout.cuh"
#include "../common/mask_map.cuh"
#include "../common/scores.cuh"
#include "../common/store_rows.cuh"
#include "../common/tile_list.cuh"
#include "../kernels.h"
#include "load.cuh"
#include "tiles.h"
#include "variants.cuh"

namespace flash_online::cuda {

struct ForwardSm80Arguments {
  AttentionProblem problem;
  TileList list;
  MaskMap map;
  ScoreMod score_mod;
  float keep_scale;  // 1 / (1 - dropout)
};

// A CTA's forward pass: run() calls the phases in the order in which they stand.
template <class Element, int kHeadDim, Variant kVariant>
class ForwardSm80Kernel {
 public:
  static constexpr bool kHasOptions = kVariant != Variant::kPlain;
  static constexpr ForwardSm80Tile kTile = forward_sm80_tile(kSplitBytes<Element>, kHeadDim, kVariant);
  static constexpr int kThreads = kTile.threads(), kQueries = kTile.queries(), kKeys = kTile.keys;
  static constexpr int kHeadDimV = kTile.head_dim_v, kRowTiles = kTile.row_tiles;

  static int shared_bytes(const AttentionProblem& problem) {
    const int rows = !problem.mask.data ? 0 : problem.mask.stride[2] == 0 ? 1 : kQueries;
    return kTile.shared_bytes() + rows * mask_pitch(kKeys, static_cast<int>(size_of(problem.mask_dtype)));
  }

  __device__ static void run(const ForwardSm80Arguments& arguments);

 private:
  using Piece = typename Split<Element>::Piece;
  using QueryTile = SharedTile<Element, kHeadDim>;
  using ValueTile = SharedTile<Element, kHeadDimV>;
  using Outputs = Accumulator<kRowTiles, kHeadDimV / 8>;
  using Scores = Accumulator<kRowTiles, kKeys / 8>;
  using Compensation = CompensatedAccumulator<Element, kRowTiles, kKeys / 8>;
  using RowStates = ScoreState[kRowTiles][2];
  static constexpr int kQueryBytes = QueryTile::bytes(kQueries), kKeyBytes = QueryTile::bytes(kKeys),
                       kValueBytes = ValueTile::bytes(kKeys);
  static_assert(kQueryBytes % 16 == 0 && kKeyBytes % 16 == 0 && kValueBytes % 16 == 0);
  static_assert(kQueryBytes + kKeyBytes + kValueBytes == kTile.shared_bytes());

  // Clears the padding rows of one head around a packed sequence: out is 0 there, lse is -inf.
  __device__ __forceinline__ static void clear_padding(const AttentionProblem& problem, const TileCoord& tile) {
    const int64_t batch = tile.sequence, head = tile.head;
    const auto clear_before = [&](int64_t sequence) {
      const Rows rows = padding_rows(problem.query_starts, problem.batch, sequence, problem.queries, problem.total_queries);
      clear_rows<Element, kThreads>(problem.out, head, problem.head_dim_v, rows);
      for (int64_t n = threadIdx.x; n < rows.count; n += kThreads) {
        const int64_t index = head * problem.lse_stride[1] + rows.begin + n;
        static_cast<float*>(problem.lse)[index] = lowest<float>();
        if (problem.lse_low) static_cast<float*>(problem.lse_low)[index] = 0;
      }
    };
    clear_before(batch);
    if (batch == problem.batch - 1) clear_before(problem.batch);
  }

  // The least maximum so far of the lane's queries.
  __device__ __forceinline__ static float least_max(const RowStates& states) {
    float least = INFINITY;
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) least = fminf(least, fminf(states[i][0].max, states[i][1].max));
    return least;
  }

  // Makes weights of a row's scores and adds their sum to the row's state. Where the maximum was raised, the outputs so far are
  // rescaled.
  __device__ __forceinline__ static void softmax_step(Scores& scores, const Compensation& compensation, Outputs& out,
                                                      RowStates& states, float scale) {
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float block_max = lowest<float>();
#pragma unroll
        for (int j = 0; j < kKeys / 8; ++j)
          block_max = fmaxf(block_max, fmaxf(scores[i][j][2 * half], scores[i][j][2 * half + 1]));
        block_max = fmaxf(block_max, __shfl_xor_sync(~0u, block_max, 1));
        block_max = fmaxf(block_max, __shfl_xor_sync(~0u, block_max, 2));
        const float factor = states[i][half].raise_max_lazily(kRescaleThreshold, block_max * scale);
        if (__any_sync(~0u, factor != 1)) {
#pragma unroll
          for (int j = 0; j < kHeadDimV / 8; ++j) {
            out[i][j][2 * half] *= factor;
            out[i][j][2 * half + 1] *= factor;
          }
        }
        const bool rounds_first = Compensation::kCompensated && is_rounding_large(states[i][half].max);
        float sum = 0;
#pragma unroll
        for (int j = 0; j < kKeys / 8; ++j)
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            float& x = scores[i][j][2 * half + e];
            if (rounds_first) [[unlikely]]
              x = states[i][half].weight(__fmul_rn(x, scale));
            else if constexpr (Compensation::kCompensated)
              x = states[i][half].weight_of_product(x, compensation.low[i][j][2 * half + e], scale);
            else
              x = states[i][half].weight_of_product(x, scale);
            sum += x;
          }
        states[i][half].add(sum);
      }
  }

  // Divides the outputs of row (i, half) by the sum of its weights and the sink's. Returns whether the row sees no key.
  __device__ __forceinline__ static bool finish_row(const ForwardSm80Arguments& arguments, int64_t head, Outputs& out,
                                                    RowStates& states, int i, int half) {
    const AttentionProblem& problem = arguments.problem;
    ScoreState& state = states[i][half];
    state.sum += __shfl_xor_sync(~0u, state.sum, 1);
    state.sum += __shfl_xor_sync(~0u, state.sum, 2);
    const bool is_empty = state.sum == 0;
    const float factor = problem.sinks ? state.absorb(static_cast<const float*>(problem.sinks)[head] * kLog2E) : 1.0f;
    const float inverse = state.inverse_sum_or_zero(), last = factor * inverse * arguments.keep_scale;
#pragma unroll
    for (int j = 0; j < kHeadDimV / 8; ++j)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float& x = out[i][j][2 * half + e];
        // A query that sees one key gets the multiple of that key's value that load_values has, to the last bit.
        if constexpr (Compensation::kCompensated)
          x = divide(x, factor, state.sum, inverse) * arguments.keep_scale;
        else
          x *= last;
      }
    return is_empty;
  }

  // Stores lse of the row as two floats: the sink's where the row is empty besides. The state is in base 2 and lse in base e:
  // the sum of maximum and logarithm is made in double, so that the product with ln 2 loses nothing that the two floats would
  // hold.
  __device__ __forceinline__ static void store_lse(const ForwardSm80Arguments& arguments, const ScoreState& state,
                                                   bool is_empty, int64_t head, int64_t index) {
    const AttentionProblem& problem = arguments.problem;
    const double lse = OnlineSoftmax<double, Binary>{state.max, state.sum}.lse() * kLn2;
    float high = static_cast<float>(lse), low = static_cast<float>(lse - high);
    if (problem.sinks && is_empty) high = static_cast<const float*>(problem.sinks)[head], low = 0;
    if (kHasOptions && problem.mask.data && state.max == arguments.score_mod.lowest_score)
      high = lowest_lse(problem.mask_dtype), low = static_cast<float>(log2f(state.sum) * kLn2);
    static_cast<float*>(problem.lse)[index] = high;
    if (problem.lse_low) static_cast<float*>(problem.lse_low)[index] = low - low == 0 ? low : 0;
  }
};

template <class Element, int kHeadDim, Variant kVariant>
__device__ __forceinline__ void ForwardSm80Kernel<Element, kHeadDim, kVariant>::run(const ForwardSm80Arguments& arguments) {
  extern __shared__ __align__(16) char shared[];
  const AttentionProblem& problem = arguments.problem;

  // CTAs are an outer list of pieces of the values' columns, each with the list of tiles.
  const int64_t tiles = arguments.list.count(), value_piece = blockIdx.x / tiles;
  const TileCoord tile = tile_coord(problem, arguments.list, blockIdx.x % tiles, false, kQueries, problem.visible.right >= 0);
  const int64_t batch = tile.sequence, head = tile.head;
  if (problem.query_starts && tile.block == 0 && value_piece == 0) clear_padding(problem, tile);
  const Sequence sequence = sequence_of(problem, batch);
  const int queries = static_cast<int>(sequence.queries.count), keys = static_cast<int>(sequence.keys.count);
  if (tile.block < 0 || tile.block * kQueries >= queries) return;
  const int query = static_cast<int>(tile.block) * kQueries, last_query = min(query + kQueries, queries);

  // Shared memory holds queries, keys, values and the mask.
  const QueryTile query_tile{reinterpret_cast<Piece*>(shared)}, key_tile{reinterpret_cast<Piece*>(shared + kQueryBytes)};
  const ValueTile value_tile{reinterpret_cast<Piece*>(shared + kQueryBytes + kKeyBytes)};
  MaskTile<kQueries, kKeys, kThreads> mask_tile(shared + kQueryBytes + kKeyBytes + kValueBytes);

  const int64_t key_head = head / (problem.heads / problem.key_heads),
                value_head = head / (problem.heads / problem.value_heads);
  const HeadRows<Element> query_rows(problem.query, batch, head, sequence.queries.begin, problem.head_dim);
  const HeadRows<Element> key_rows(problem.key, batch, key_head, sequence.keys.begin, problem.head_dim);
  const HeadRows<Element> value_rows(problem.value, batch, value_head, sequence.keys.begin, problem.head_dim_v,
                                     value_piece * kHeadDimV);
  const HeadMask mask(problem, batch, head);
  const auto score_mod = score_mod_of_head<Element>(arguments.score_mod, problem, batch, head);
  const Dropout dropout(problem, batch, head);
  const float scale = kHasOptions ? score_mod.remaining_scale() : score_mod.scale;
  const int row = static_cast<int>(threadIdx.x) / kWarpSize * 16 * kRowTiles;  // the warp's first in the tile

  const KeyRange range = keys_of_any(sequence.visible, query, last_query, keys);
  const int end = range.end > range.begin ? static_cast<int>((range.end + kKeys - 1) / kKeys) : 0;
  KeyBlocks<kQueries, kKeys> key_blocks(arguments.map, batch, head, query, queries, static_cast<int>(range.begin / kKeys), end);
  bool mask_is_clear, next_mask_is_clear = false;
  int block = key_blocks.next(mask_is_clear);

  Outputs out;
  clear(out);
  RowStates states;
  TilePrefetch<Element, TileCopy{.rows = kKeys, .width = kHeadDim, .threads = kThreads}> next_keys;
  TilePrefetch<Element, TileCopy{.rows = kKeys, .width = kHeadDimV, .threads = kThreads}> values;
  load<kQueries, kThreads>(query_tile, query_rows, query, queries);
  if (block < end) load<kKeys, kThreads>(key_tile, key_rows, block * kKeys, keys);
  cp_async_commit();

  for (int next; block < end; block = next, mask_is_clear = next_mask_is_clear) {
    const int key = block * kKeys;
    const bool masked = kHasOptions && mask.data && !mask_is_clear;
    cp_async_wait();
    __syncthreads();  // the keys are there, and all have done with the values and the mask of the block before
    values.start(value_tile, value_rows, key, keys);
    if (masked) mask_tile.load(mask, query, queries, key, keys);
    cp_async_commit();

    Scores scores;
    Compensation compensation;
    clear(scores);
    // Sums over a wide head dim lose several units in the last place to the tensor cores, and lse would show it.
    multiply_rows<GemmOptions{.rounded = kHeadDim > 128}>(scores, compensation, query_tile, row, key_tile);
    next = key_blocks.next(next_mask_is_clear);
    values.finish(value_tile, value_rows, key, keys);
    cp_async_wait();
    __syncthreads();  // the values are there, and all have done with the keys
    if (next < end) next_keys.start(key_tile, key_rows, next * kKeys, keys);
    cp_async_commit();

    const ScoreBlock here{query, key, queries, keys, all_see(sequence.visible, query, last_query, key, key + kKeys, keys)};
    if (kHasOptions && score_mod.has_score_mod)
      apply_score_mod<false>(scores, row, score_mod, here, sequence.visible, nullptr, &compensation);
    const auto least = [&] { return least_max(states); };
    if (masked) mask_scores<false>(scores, row, mask.dtype, score_mod.lowest_score, mask_tile, least, &compensation);
    renormalize(scores, compensation);
    if (!here.whole) hide_scores<false>(scores, row, here, sequence.visible);
    softmax_step(scores, compensation, out, states, scale);
    if (kHasOptions && dropout) drop_weights<false>(scores, row, dropout, here, [](float& x) { x = 0; });
    multiply_accumulators(out, scores, value_tile);
    if (next < end) next_keys.finish(key_tile, key_rows, next * kKeys, keys);
  }
  cp_async_wait();
  __syncthreads();  // the queries are there, if no key was, and have been read by all: the outputs take their place

#pragma unroll
  for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const bool is_empty = finish_row(arguments, head, out, states, i, half);
      const int at = query + row + 16 * i + 8 * half + quad();
      if (value_piece == 0 && lane_in_quad() == 0 && at < queries && problem.lse)
        store_lse(arguments, states[i][half], is_empty, head,
                  batch * problem.lse_stride[0] + head * problem.lse_stride[1] + sequence.queries.begin + at);
    }
  Element* const to = static_cast<Element*>(problem.out.data) + batch * problem.out.stride[0] + head * problem.out.stride[1] +
                      (sequence.queries.begin + query) * problem.out.stride[2] +
                      value_piece * kHeadDimV * problem.out.stride[3];
  store_rows<Element>(out, ValueTile{query_tile.data}, 0, row, to, problem.out.stride[2], problem.out.stride[3],
                      last_query - query,
                      static_cast<int>(min(problem.head_dim_v - value_piece * kHeadDimV, int64_t{kHeadDimV})));
}

template <class Element, int kHeadDim, Variant kVariant, class Kernel = ForwardSm80Kernel<Element, kHeadDim, kVariant>>
__global__ void __launch_bounds__(Kernel::kThreads, Kernel::kTile.ctas_per_sm)
    attention_forward_sm80(const __grid_constant__ ForwardSm80Arguments arguments) {
  Kernel::run(arguments);
}

template <int kHeadDim, class F, class... SharedBytes>
void visit_forward_sm80(const AttentionProblem& problem, F&& f, SharedBytes... shared_bytes) {
  visit_sm80<ForwardSm80Kernel, has_forward_sm80_tile, kHeadDim>(problem, f, shared_bytes...);
}

template <class Element, int kHeadDim, Variant kVariant>
void launch_forward_sm80(const AttentionProblem& problem, const MaskMap& map, CUstream_st* stream) {
  using Kernel = ForwardSm80Kernel<Element, kHeadDim, kVariant>;
  const ForwardSm80Arguments arguments{
      .problem = problem,
      .list = TileList::of(problem, false, problem.heads, Kernel::kQueries),
      .map = map,
      .score_mod = ScoreMod(problem),
      .keep_scale = problem.dropout < 1 ? static_cast<float>(1 / (1 - problem.dropout)) : 0.0f,
  };
  const int64_t value_pieces = (problem.head_dim_v + Kernel::kHeadDimV - 1) / Kernel::kHeadDimV;
  launch<attention_forward_sm80<Element, kHeadDim, kVariant>>(arguments,
                                                              arguments.list.count() * (value_pieces > 0 ? value_pieces : 1),
                                                              Kernel::kThreads, Kernel::shared_bytes(problem), stream);
}

template <int kHeadDim>
const char* AttentionForwardSm80<kHeadDim>::refusal(const ForwardPass& pass, const Gpu& gpu) {
  const char* reason = nullptr;
  visit_forward_sm80<kHeadDim>(
      pass.problem,
      [&]<class Element, Variant kVariant>(Type<Element>, std::integral_constant<Variant, kVariant>) {
        if (ForwardSm80Kernel<Element, kHeadDim, kVariant>::shared_bytes(pass.problem) > gpu.shared_bytes)
          reason = "the GPU has too little shared memory for this head dim";
      },
      gpu.shared_bytes);
  return reason;
}

template <int kHeadDim>
int64_t AttentionForwardSm80<kHeadDim>::workspace_bytes(const ForwardPass& pass) {
  return mask_map_of(pass.problem).count();
}

template <int kHeadDim>
void AttentionForwardSm80<kHeadDim>::run(const ForwardPass& pass, void* workspace, CUstream_st* stream) {
  MaskMap map = mask_map_of(pass.problem);
  if (map.count() > 0) map.data = static_cast<uint8_t*>(workspace);
  fill_mask_map(pass.problem, map, stream);
  visit_forward_sm80<kHeadDim>(pass.problem,
                               [&]<class Element, Variant kVariant>(Type<Element>, std::integral_constant<Variant, kVariant>) {
                                 launch_forward_sm80<Element, kHeadDim, kVariant>(pass.problem, map, stream);
                               });
}

}  // namespace flash_online::cuda
