// Attention forward for every GPU from compute capability 8.0 on, on mma.sync and cp.async: FlashAttention-2's organisation
// (arXiv 2307.08691). docs/attention_sm80.md draws it.
//
// A block of threads owns a block of one head's queries; each warp 16 * row_tiles of them, with their scores, weights and
// outputs in its registers. The keys pass by in blocks: while scores are made the block's values and mask arrive, while its
// weights and outputs are made the next keys do.
#pragma once

#include "../common/mask_map.cuh"
#include "../common/scores.cuh"
#include "../common/tile_list.cuh"
#include "../kernels.h"
#include "load.cuh"
#include "tiles.h"
#include "variants.cuh"

namespace flash_online::cuda {

struct ForwardArguments {
  AttentionProblem problem;
  TileList list;
  MaskMap map;
  ScoreMod rule;
  float keep_scale;  // of dropout: 1 / (1 - p)
};

template <class Element, int kHeadDim, Variant kVariant>
struct ForwardOnSm80 {
  static constexpr bool kEverything = kVariant != Variant::kPlain;
  static constexpr ForwardSm80 kTile = forward_sm80_tile(kSplitBytes<Element>, kHeadDim, kVariant);
  static constexpr int kThreads = kTile.threads(), kQueries = kTile.queries(), kKeys = kTile.keys;
  static constexpr int kHeadDimV = kTile.head_dim_v, kRows = kTile.row_tiles;
  using Piece = typename Split<Element>::Piece;
  using QueryTile = SharedTile<Element, kHeadDim>;
  using ValueTile = SharedTile<Element, kHeadDimV>;
  static constexpr int kQueryBytes = QueryTile::bytes(kQueries), kKeyBytes = QueryTile::bytes(kKeys),
                       kValueBytes = ValueTile::bytes(kKeys);
  static_assert(kQueryBytes % 16 == 0 && kKeyBytes % 16 == 0 && kValueBytes % 16 == 0);

  static int shared_bytes(const AttentionProblem& problem) {
    const int rows = !problem.mask.data ? 0 : problem.mask.stride[2] == 0 ? 1 : kQueries;
    return kQueryBytes + kKeyBytes + kValueBytes + rows * mask_pitch(kKeys, static_cast<int>(size_of(problem.mask_dtype)));
  }

  __device__ static void run(const ForwardArguments& arguments);

 private:
  // Rows that no sequence owns, in the head that a block of threads works on: 0, and an lse of -inf.
  __device__ static void clear_padding(const AttentionProblem& problem, int64_t head, Rows rows) {
    clear_rows<Element, kThreads>(problem.out, head, problem.head_dim_v, rows);
    for (int64_t n = threadIdx.x; n < rows.count; n += kThreads) {
      static_cast<float*>(problem.lse)[head * problem.lse_stride[1] + rows.begin + n] = lowest<float>();
      static_cast<float*>(problem.lse_low)[head * problem.lse_stride[1] + rows.begin + n] = 0;
    }
  }
};

template <class Element, int kHeadDim, Variant kVariant>
__device__ __forceinline__ void ForwardOnSm80<Element, kHeadDim, kVariant>::run(const ForwardArguments& arguments) {
  extern __shared__ __align__(16) char shared[];
  const AttentionProblem& problem = arguments.problem;

  // Where: an outer list of pieces of the values' columns, each with the list of blocks.
  const int64_t blocks = arguments.list.count(), piece = blockIdx.x / blocks;
  const TileCoord place = tile_coord(problem, arguments.list, blockIdx.x % blocks, false, kQueries, problem.visible.right >= 0);
  const int64_t batch = place.sequence, head = place.head;
  if (problem.query_starts && place.block == 0 && piece == 0) {
    const auto clear_before = [&](int64_t n) {
      clear_padding(problem, head,
                    padding_rows(problem.query_starts, problem.batch, n, problem.queries, problem.total_queries));
    };
    clear_before(batch);
    if (batch == problem.batch - 1) clear_before(problem.batch);
  }
  const Sequence sequence = sequence_of(problem, batch);
  const int queries = static_cast<int>(sequence.queries.count), keys = static_cast<int>(sequence.keys.count);
  if (place.block < 0 || place.block * kQueries >= queries) return;
  const int query = static_cast<int>(place.block) * kQueries, last_query = min(query + kQueries, queries);

  // In shared memory: queries, keys, values, mask.
  const QueryTile query_tile{reinterpret_cast<Piece*>(shared)}, key_tile{reinterpret_cast<Piece*>(shared + kQueryBytes)};
  const ValueTile value_tile{reinterpret_cast<Piece*>(shared + kQueryBytes + kKeyBytes)};
  MaskTile<kQueries, kKeys, kThreads> mask_tile(shared + kQueryBytes + kKeyBytes + kValueBytes);

  const int64_t key_head = head / (problem.heads / problem.key_heads),
                value_head = head / (problem.heads / problem.value_heads);
  const HeadRows<Element> query_rows(problem.query, batch, head, sequence.queries.begin, problem.head_dim);
  const HeadRows<Element> key_rows(problem.key, batch, key_head, sequence.keys.begin, problem.head_dim);
  const HeadRows<Element> value_rows(problem.value, batch, value_head, sequence.keys.begin, problem.head_dim_v,
                                     piece * kHeadDimV);
  const HeadMask mask(problem, batch, head);
  const auto rule = score_mod_of_head<Element>(arguments.rule, problem, batch, head);
  const Dropout dropout(problem, batch, head);
  const float scale = kEverything ? rule.remaining_scale() : rule.scale;
  const int row = static_cast<int>(threadIdx.x) / 32 * 16 * kRows;  // the warp's first, in the block

  const KeyRange range = keys_of_any(sequence.visible, query, last_query, keys);
  const int end = range.end > range.begin ? static_cast<int>((range.end + kKeys - 1) / kKeys) : 0;
  KeyBlocks<kQueries, kKeys> key_blocks(arguments.map, batch, head, query, queries, static_cast<int>(range.begin / kKeys), end);
  bool nothing_hidden, next_nothing_hidden = false;
  int block = key_blocks.next(nothing_hidden);

  Accumulator<kRows, kHeadDimV / 8> out;
  clear(out);
  ScoreState state[kRows][2];
  Incoming<kKeys, kThreads, Element, kHeadDim> next_keys;
  Incoming<kKeys, kThreads, Element, kHeadDimV> values;
  load<kQueries, kThreads>(query_tile, query_rows, query, queries);
  if (block < end) load<kKeys, kThreads>(key_tile, key_rows, block * kKeys, keys);
  cp_async_commit();

  for (int next; block < end; block = next, nothing_hidden = next_nothing_hidden) {
    const int key = block * kKeys;
    const bool masked = kEverything && mask.data && !nothing_hidden;
    cp_async_wait();
    __syncthreads();  // the keys are there, and all have done with the values and the mask before
    values.start(value_tile, value_rows, key, keys);
    if (masked) mask_tile.load(mask, query, queries, key, keys);
    cp_async_commit();

    Accumulator<kRows, kKeys / 8> scores;
    CompensatedAccumulator<Element, kRows, kKeys / 8> rest;
    clear(scores);
    // A wide head dim's sums lose several units in the last place to the tensor cores, and lse would show it.
    multiply_rows<Element, kHeadDim, false, (kHeadDim > 128)>(scores, rest, query_tile, row, key_tile);
    next = key_blocks.next(next_nothing_hidden);
    values.finish(value_tile, value_rows, key, keys);
    cp_async_wait();
    __syncthreads();  // the values are there, and all have done with the keys
    if (next < end) next_keys.start(key_tile, key_rows, next * kKeys, keys);
    cp_async_commit();

    const ScoreBlock here{query, key, queries, keys, all_see(sequence.visible, query, last_query, key, key + kKeys, keys)};
    if (kEverything && rule.has_score_mod) apply_score_mod<false>(scores, row, rule, here, sequence.visible, nullptr, &rest);
    if (masked) mask_scores<false>(scores, row, mask.dtype, mask_tile, &rest);
    round_to_sum(scores, rest);
    if (!here.whole) hide_scores<false>(scores, row, here, sequence.visible);

#pragma unroll
    for (int i = 0; i < kRows; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float most = lowest<float>();
#pragma unroll
        for (int j = 0; j < kKeys / 8; ++j) most = fmaxf(most, fmaxf(scores[i][j][2 * half], scores[i][j][2 * half + 1]));
        most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
        most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
        const float factor = state[i][half].raise_max_lazily(kRescaleThreshold, most * scale);
        if (__any_sync(~0u, factor != 1)) {
#pragma unroll
          for (int j = 0; j < kHeadDimV / 8; ++j) {
            out[i][j][2 * half] *= factor;
            out[i][j][2 * half + 1] *= factor;
          }
        }
        float sum = 0;
#pragma unroll
        for (int j = 0; j < kKeys / 8; ++j)
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            float& x = scores[i][j][2 * half + e];
            if constexpr (rest.kCompensated)
              x = state[i][half].weight_of_product(x, rest.sums[i][j][2 * half + e], scale);
            else
              x = state[i][half].weight_of_product(x, scale);
            sum += x;
          }
        state[i][half].add(sum);
      }
    if (kEverything && dropout) drop_weights<false>(scores, row, dropout, here, [](float& x) { x = 0; });
    multiply_accumulators<Element>(out, scores, value_tile);
    if (next < end) next_keys.finish(key_tile, key_rows, next * kKeys, keys);
  }
  cp_async_wait();
  __syncthreads();  // the queries are there, if no key was, and have been read by all: the outputs take their place

#pragma unroll
  for (int i = 0; i < kRows; ++i)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      ScoreState& own = state[i][half];
      own.sum += __shfl_xor_sync(~0u, own.sum, 1);
      own.sum += __shfl_xor_sync(~0u, own.sum, 2);
      const float factor = problem.sinks ? own.absorb(static_cast<const float*>(problem.sinks)[head] * kLog2E) : 1.0f;
      const float inverse = own.inverse_sum_or_zero(), last = factor * inverse * arguments.keep_scale;
#pragma unroll
      for (int j = 0; j < kHeadDimV / 8; ++j)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& x = out[i][j][2 * half + e];
          if constexpr (CompensatedAccumulator<Element, 1, 1>::kCompensated)
            x = divide(x, factor, own.sum, inverse) * arguments.keep_scale;  // the multiple of a lone key's value: load_values
          else
            x *= last;
        }
      const int at = query + row + 16 * i + 8 * half + quad();
      if (piece == 0 && lane_in_quad() == 0 && at < queries && problem.lse) {
        const double lse = (static_cast<double>(own.max) + ::log2(static_cast<double>(own.sum))) * kLn2;
        const int64_t number = batch * problem.lse_stride[0] + head * problem.lse_stride[1] + sequence.queries.begin + at;
        const float high = static_cast<float>(lse), low = static_cast<float>(lse - high);
        static_cast<float*>(problem.lse)[number] = high;
        static_cast<float*>(problem.lse_low)[number] = low - low == 0 ? low : 0;
      }
    }
  Element* const to = static_cast<Element*>(problem.out.data) + batch * problem.out.stride[0] + head * problem.out.stride[1] +
                      (sequence.queries.begin + query) * problem.out.stride[2] + piece * kHeadDimV * problem.out.stride[3];
  store_rows<Element>(out, ValueTile{query_tile.data}, 0, row, to, problem.out.stride[2], problem.out.stride[3],
                      last_query - query, static_cast<int>(min(problem.head_dim_v - piece * kHeadDimV, int64_t{kHeadDimV})));
}

template <class Element, int kHeadDim, Variant kVariant, class Body = ForwardOnSm80<Element, kHeadDim, kVariant>>
__global__ void __launch_bounds__(Body::kThreads, Body::kTile.blocks)
    attention_forward_sm80(const __grid_constant__ ForwardArguments arguments) {
  Body::run(arguments);
}

template <int kHeadDim, class F, class... Room>
void visit_forward_sm80(const AttentionProblem& problem, F&& f, Room... room) {
  visit_sm80<ForwardOnSm80, has_forward_sm80_tile, kHeadDim>(problem, f, room...);
}

template <class Element, int kHeadDim, Variant kVariant>
void launch_forward_sm80(const AttentionProblem& problem, const MaskMap& map, CUstream_st* stream) {
  using Body = ForwardOnSm80<Element, kHeadDim, kVariant>;
  const ForwardArguments arguments{problem, TileList::of(problem, false, problem.heads, Body::kQueries), map, ScoreMod(problem),
                                   problem.dropout < 1 ? static_cast<float>(1 / (1 - problem.dropout)) : 0.0f};
  const int64_t pieces = (problem.head_dim_v + Body::kHeadDimV - 1) / Body::kHeadDimV;
  launch<attention_forward_sm80<Element, kHeadDim, kVariant>>(arguments, arguments.list.count() * (pieces > 0 ? pieces : 1),
                                                              Body::kThreads, Body::shared_bytes(problem), stream);
}

template <int kHeadDim>
void forward_sm80(const AttentionProblem& problem, const MaskMap& map, CUstream_st* stream) {
  visit_forward_sm80<kHeadDim>(problem,
                               [&]<class Element, Variant kVariant>(Type<Element>, std::integral_constant<Variant, kVariant>) {
                                 launch_forward_sm80<Element, kHeadDim, kVariant>(problem, map, stream);
                               });
}

template <int kHeadDim>
const char* forward_sm80_refusal(const AttentionProblem& problem, const Gpu& gpu) {
  const char* reason = nullptr;
  visit_forward_sm80<kHeadDim>(
      problem,
      [&]<class Element, Variant kVariant>(Type<Element>, std::integral_constant<Variant, kVariant>) {
        if (ForwardOnSm80<Element, kHeadDim, kVariant>::shared_bytes(problem) > gpu.shared_bytes)
          reason = "the GPU has too little shared memory for this head dim";
      },
      gpu.shared_bytes);
  return reason;
}

}  // namespace flash_online::cuda
