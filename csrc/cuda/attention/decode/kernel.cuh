// Attention of few queries over cached keys, a step of decoding: it takes as long as its keys and values take to arrive, and
// all is arranged so that they never stop arriving. docs/design/decode.md draws it.
//
// The CTAs, as many as the SMs hold, take equal shares of the line of work (line.cuh). The warps of a CTA take tiles of keys by
// turns, each with all rows of the item: scores, weights and outputs are in the warp's registers, and no warp waits for another
// one before the end of a part, where the warps merge what they have.
#pragma once

#include "../../hw/compiler.cuh"
#include "../../hw/pdl.cuh"
#include "dense.cuh"
#include "eight_rows.cuh"
#include "load.cuh"
#include "partials.cuh"
#include "rows.cuh"

namespace flash_online::cuda {

struct DecodeArguments {
  AttentionProblem problem;
  ScoreMod score_mod;
  KvSplits kv_splits;  // `partials`: where the keys of a sequence are cut by its own length
  bool whole_items;  // whether they are, so that no share cuts an item
  DecodeShape shape;
  DecodePool keys, values;
  DecodePartials partials;  // where they are cut by the shares of CTAs
  DenseShared dense;
  DenseSplit dense_split;
  DensePartials dense_partials;
  int stages;
};

// Reads a word of each line of the arguments, so that the constants are in the cache by the time that they are needed.
__device__ __forceinline__ void touch_constants(const DecodeArguments& arguments) {
  constexpr int kLine = 64;
  unsigned sum = 0;
#pragma unroll
  for (unsigned at = 0; at < sizeof(DecodeArguments) / 4; at += kLine / 4)
    sum += reinterpret_cast<const unsigned*>(&arguments)[at];
  keep(sum);
}

// The calls that an instance of the kernel takes. Common calls have instances that spend no instructions on other calls'
// options, which a call of a few microseconds would notice. decode_calls() is the host's side.
enum class DecodeCalls {
  kAll,
  kPlain,  // over cached keys, without the options that plain_arguments() removes
  kDense,  // the tensors of a dense call, without softcap and ALiBi
};

// The arguments of a call without packed queries, kv_splits, padding on the left, rows of the cache by number, and changes of
// scores, as the compiler then knows.
template <bool kFloat8>
__device__ __forceinline__ DecodeArguments plain_arguments(const DecodeArguments& arguments) {
  DecodeArguments plain = arguments;
  AttentionProblem& problem = plain.problem;
  problem.query_starts = nullptr;
  problem.alibi_slopes = nullptr;
  problem.mask.data = nullptr;
  problem.lower_right = true;
  problem.out.stride[3] = 1;
  problem.cache.query_lengths = problem.cache.left = problem.cache.rows = problem.cache.new_starts = nullptr;
  plain.kv_splits.most = 1;
  plain.shape.unit_steps = 1;
  plain.score_mod.cap = 0;
  if constexpr (!kFloat8) {  // else scores have a scale that only the device knows
    problem.cache.key_scale = problem.cache.value_scale = nullptr;
    plain.score_mod.has_score_mod = false;
  }
  return plain;
}

// The same of a dense call, which has one block of keys per sequence, and perhaps a mask.
__device__ __forceinline__ DecodeArguments dense_arguments(const DecodeArguments& arguments) {
  DecodeArguments dense = arguments;
  AttentionProblem& problem = dense.problem;
  problem.query_starts = nullptr;
  problem.alibi_slopes = nullptr;
  problem.out.stride[3] = 1;
  CacheView& cache = problem.cache;
  cache.table = cache.rows = cache.lengths = cache.left = cache.new_starts = cache.query_lengths = nullptr;
  cache.key_scale = cache.value_scale = nullptr;
  cache.new_keys = 0;
  cache.entries = 1;
  dense.whole_items = false;
  dense.kv_splits.most = 1;
  dense.score_mod.cap = 0;
  return dense;
}

// The address of a row of a partial that is to be merged: its outputs, then maximum and sum in two floats. Null: it is final.
struct DecodePartialRow {
  float* data;
  int pitch;

  // Row r of the part, which is `row` of the call.
  __device__ __forceinline__ DecodePartialRow(const DecodeArguments& arguments, const DecodeWalk& walk, const CachedRow& row,
                                              int r)
      : data(nullptr), pitch(0) {
    const bool is_whole = walk.begins_item && walk.ends_item;
    if (is_whole && walk.s.kv_splits == 1) return;
    const DecodePartials& partials = arguments.partials;
    pitch = is_whole ? static_cast<int>(arguments.kv_splits.pitch) : partials.pitch;
    data = is_whole ? arguments.kv_splits.partial(lse_index(arguments.problem, row), walk.kv_split)
                    : partials.partial(static_cast<int>(blockIdx.x), walk.begins_item) + r * pitch;
  }
  __device__ __forceinline__ void set_state(const ScoreState& state) const {
    *reinterpret_cast<float2*>(data + pitch - 2) = {state.max, state.sum};
  }
};

// kRows: the most rows of an item.
template <class Element, int kHeadDim, bool kFloat8, int kRows>
class DecodeKernel {
 public:
  static constexpr int kRowTiles = (kRows + 15) / 16, kKeys = decode_tile_keys(kHeadDim, kFloat8);
  static constexpr int kBoxes = decode_boxes(kHeadDim, kFloat8);
  template <bool kDense>
  using LoadsOf = DecodeLoads<kBoxes, kKeys, kDense>;
  using Loads = LoadsOf<false>;
  static constexpr int kBoxBytes = Loads::kBoxBytes, kStageBytes = Loads::kStageBytes,
                       kQueryBytes = decode_query_bytes(kHeadDim, kRows);
  static_assert(kStageBytes == decode_stage_bytes(kHeadDim, kFloat8));

  // kDense: DecodeCalls::kDense.
  template <bool kDense>
  __device__ __forceinline__ static void run(const DecodeArguments& arguments, char* shared);

 private:
  using F = Fragments<Element>;
  using Left = typename F::Left;
  // float8 keys and values are widened to halves, which hold them exactly; so queries and weights are halves too.
  using CacheElement = std::conditional_t<kFloat8, __half, Element>;
  static constexpr bool kConvertsQueries = kFloat8 && !std::is_same_v<Element, __half>;
  // How a warp holds a part.
  using Part = std::conditional_t<kRows == 8, DecodeEightRows<Element, kHeadDim, kFloat8>,
                                  DecodeRowTiles<Element, kHeadDim, kFloat8, kRowTiles>>;
  using Scores = Part::Scores;
  using Outputs = Part::Outputs;
  using RowStates = Part::States;
  using PartRows = Part::Rows;
  static constexpr int kSteps = kHeadDim / 16;
  static constexpr bool kSharesQueries = decode_shares_queries(kHeadDim, kRows);
  static_assert(!(kSharesQueries && Part::kTransposed));
  using QueryTile = SharedTile<Element, kHeadDim>;
  // A part's queries: a tile in shared memory, or the operands of a warp in its registers.
  using Queries = std::conditional_t<kSharesQueries, QueryTile, typename Part::Queries>;

  __device__ __forceinline__ static void load_queries(const DecodeArguments& arguments, const PartRows& rows, Queries& queries);
  __device__ __forceinline__ static float convert_queries(Queries& queries);
  template <class Factor>
  __device__ __forceinline__ static void multiply_keys(Scores& scores, const Queries& queries, unsigned keys,
                                                       __nv_fp8_interpretation_t kind);
  __device__ __forceinline__ static void finish_part(const DecodeArguments& arguments, const DecodeWalk& walk,
                                                     const PartRows& rows, char* shared, char* free_stage, Outputs& out,
                                                     RowStates& states);
  __device__ __forceinline__ static void store_row(const DecodeArguments& arguments, const DecodeWalk& walk,
                                                   const PartRows& rows, int r, const ScoreState& state,
                                                   const float4 (&sum)[(kHeadDim + 127) / 128]);
};

// ---- queries

template <class Element, int kHeadDim, bool kFloat8, int kRows>
__device__ __forceinline__ void DecodeKernel<Element, kHeadDim, kFloat8, kRows>::load_queries(const DecodeArguments& arguments,
                                                                                              const PartRows& rows,
                                                                                              Queries& queries) {
  if constexpr (kSharesQueries) {
    const ConstView4& view = arguments.problem.query;
    const int head_dim = static_cast<int>(arguments.problem.head_dim);
    const Element* const data = rows.template queries<Element>(view);
    constexpr int kPairs = kHeadDim / 2;
    const int lane = cuda::lane(), own = max(min(lane, rows.count - 1), 0), query = rows.query_of(own);
    const int64_t own_offset = query * view.stride[2] + (rows.first + own - query * rows.group) * view.stride[1];
    __syncwarp();  // all have read the queries before
#pragma unroll 16
    for (int r = 0; r < kRows; ++r) {
      const Element* const from = data + __shfl_sync(~0u, own_offset, r);
#pragma unroll
      for (int n = 0; n < kPairs; n += kWarpSize) {
        const int pair = n + lane, step = pair / 8, in_step = pair % 8;
        if (kPairs % kWarpSize != 0 && pair >= kPairs) break;
        // A lane of a product of float8 keys takes four neighbouring columns (multiply_keys).
        const int word = kFloat8 ? in_step % 2 * 4 + in_step / 2 : in_step;
        *reinterpret_cast<unsigned*>(queries.row(r) + 16 * step + 2 * word) =
            2 * pair < head_dim ? *reinterpret_cast<const unsigned*>(from + 2 * pair) : 0;
      }
    }
    __syncwarp();
  } else {
    queries.load(arguments.problem, rows);
  }
}

// Converts bfloat16 queries to halves for float8 keys: see bfloat16_to_halves.
template <class Element, int kHeadDim, bool kFloat8, int kRows>
__device__ __forceinline__ float DecodeKernel<Element, kHeadDim, kFloat8, kRows>::convert_queries(Queries& queries) {
  if constexpr (kSharesQueries) {
    const float factor = bfloat16_to_halves([&](auto&& f) {
      constexpr int kPairs = kHeadDim / 2;
#pragma unroll 1
      for (int r = 0; r < kRows; ++r)
#pragma unroll
        for (int pair = lane(); pair < kPairs; pair += kWarpSize) f(*reinterpret_cast<unsigned*>(queries.row(r) + 2 * pair));
    });
    __syncwarp();
    return factor;
  } else {
    return bfloat16_to_halves([&](auto&& f) { queries.for_each_word(f); });
  }
}

// ---- a tile of keys

// S = Q K^T. Even and odd steps have separate sums: half as many products wait for each other, and the tensor cores, which cut
// off the digits that a sum does not hold, lose less. 32 rows with float8 keys have one sum: they have products enough, and two
// sums over 32 keys would not fit the registers. The operands are multiplied as elements of type Factor.
template <class Element, int kHeadDim, bool kFloat8, int kRows>
template <class Factor>
__device__ __forceinline__ void DecodeKernel<Element, kHeadDim, kFloat8, kRows>::multiply_keys(Scores& scores,
                                                                                               const Queries& queries,
                                                                                               unsigned keys,
                                                                                               __nv_fp8_interpretation_t kind) {
  constexpr bool kHasOdd = !kFloat8 || kRowTiles == 1;
  Scores odd;
  clear(scores);
  clear(odd);
  // Of sixteen bits ldmatrix loads sixteen keys and one step at a time. Of eight bits it loads as many bytes of a key, which
  // are one matrix instead of two, so 32 keys and one step, or sixteen and two.
  constexpr int kStepsAtOnce = kFloat8 && kKeys == 16 ? 2 : 1, kStepsPerBox = kFloat8 ? 8 : 4;
  constexpr bool kKeysFirst = kFloat8 || Part::kTransposed;  // matrices of more keys come before those of more columns
  const unsigned base = keys + (kFloat8 && kKeys == 32 ? box_offset(lane(), 0) : matrix_offset(kKeysFirst));
  static_assert(kSteps % kStepsAtOnce == 0);
#pragma unroll
  for (int first = 0; first < kSteps; first += kStepsAtOnce) {
    typename Fragments<Factor>::Right right[kStepsAtOnce][kKeys / 8];
    const unsigned at = (base ^ (first % kStepsPerBox * (kFloat8 ? 16 : 32))) + first / kStepsPerBox * kBoxBytes;
    if constexpr (kFloat8) {
      unsigned x[4];
      ldmatrix_x4(x, at);
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        // The order of the sum is free: a lane's four neighbouring columns are those that it multiplies.
        const uint2 columns = widen_float8_word<Factor>(x[n], kind);
        unsigned (&words)[2] = right[n / (kKeys / 8)][n % (kKeys / 8)].words[0];
        words[0] = columns.x;
        words[1] = columns.y;
      }
    } else {
#pragma unroll
      for (int j = 0; j < kKeys / 8; j += 2) {
        unsigned x[4];
        ldmatrix_x4(x, at + j * 8 * 128);
#pragma unroll
        for (int n = 0; n < 4; ++n) {
          const int key = kKeysFirst ? n % 2 : n / 2, column = kKeysFirst ? n / 2 : n % 2;
          right[0][j + key].words[0][column] = x[n];
        }
      }
    }
#pragma unroll
    for (int n = 0; n < kStepsAtOnce; ++n) {
      const int step = first + n;
      Scores& sum = kHasOdd && step % 2 == 1 ? odd : scores;
      if constexpr (Part::kTransposed) {
#pragma unroll
        for (int i = 0; i < kKeys / 16; ++i) {
          const unsigned (&low)[2] = right[n][2 * i].words[0], (&high)[2] = right[n][2 * i + 1].words[0];
          const unsigned left[4] = {low[0], high[0], low[1], high[1]};
          mma_16x8x16<Factor>(sum[i][0], left, queries.words[step][0], queries.words[step][1]);
        }
      } else {
        Left left[kRowTiles];
        if constexpr (kSharesQueries)
#pragma unroll
          for (int i = 0; i < kRowTiles; ++i) F::left_rows(left[i], queries, 16 * i, 16 * step);
        else
          queries.get(left, step);
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
          for (int j = 0; j < kKeys / 8; ++j)
            mma_16x8x16<Factor>(sum[i][j], left[i].words[0], right[n][j].words[0][0], right[n][j].words[0][1]);
      }
    }
  }
  if constexpr (kHasOdd) for_each(scores, [&](float& x, int i, int j, int e) { x += odd[i][j][e]; });
}

// ---- the end of a part

// Stores a row of the result, by a warp: to the tensors, or to those with which it is merged. A lane has columns [4 * lane, 4 *
// lane + 4) of each 128.
template <class Element, int kHeadDim, bool kFloat8, int kRows>
__device__ __forceinline__ void DecodeKernel<Element, kHeadDim, kFloat8, kRows>::store_row(
    const DecodeArguments& arguments, const DecodeWalk& walk, const PartRows& rows, int r, const ScoreState& state,
    const float4 (&sum)[(kHeadDim + 127) / 128]) {
  const AttentionProblem& problem = arguments.problem;
  const int width = static_cast<int>(problem.head_dim_v), lane = cuda::lane();
  const CachedRow row = rows.place(r);
  if (const DecodePartialRow partial(arguments, walk, row, r); partial.data) {
    float* const to = partial.data;
    if (lane == 0) partial.set_state(state);
#pragma unroll
    for (int n = 0; n < (kHeadDim + 127) / 128; ++n) {
      const int column = 128 * n + 4 * lane;
      if (column < width) *reinterpret_cast<float2*>(to + column) = {sum[n].x, sum[n].y};
      if (column + 2 < width) *reinterpret_cast<float2*>(to + column + 2) = {sum[n].z, sum[n].w};
    }
    return;
  }
  float* const lse = static_cast<float*>(problem.lse);
  const float scale = finish_row(problem, row, state, lse && lane == 0 ? lse + lse_index(problem, row) : nullptr);
  store_row_of_warp<Element, kHeadDim>(problem, row, sum, scale);
}

// Merges what the warps have, and stores it, eight rows at a time. Outputs go through the stage of each warp's ring that waits
// for its copies; there the groups of eight columns of a row change places, so that four rows lie in different banks. `shared`:
// the warps' states, and where these stages are.
template <class Element, int kHeadDim, bool kFloat8, int kRows>
__device__ __forceinline__ void DecodeKernel<Element, kHeadDim, kFloat8, kRows>::finish_part(const DecodeArguments& arguments,
                                                                                             const DecodeWalk& walk,
                                                                                             const PartRows& rows, char* shared,
                                                                                             char* free_stage, Outputs& out,
                                                                                             RowStates& states) {
  constexpr int kRowsAtOnce = 8, kVectors = (kHeadDim + 127) / 128;
  static_assert(kRowsAtOnce * kHeadDim * 4 <= kStageBytes);
  const int lane = cuda::lane(), warp = static_cast<int>(threadIdx.x) / kWarpSize, warps = arguments.shape.warps();
  const auto states_of = [&](int w) { return reinterpret_cast<float2*>(shared + w * kDecodeWarpBytes); };
  __syncwarp();  // all lanes have read the stage, which was that of the last tile
#pragma unroll 1
  for (int turn = 0; turn * kRowsAtOnce < rows.count; ++turn) {
    float* const to = reinterpret_cast<float*>(free_stage);
#pragma unroll
    for (int p = 0; p < Part::kGroups; ++p) {  // registers have no run-time index
      if (p != turn) continue;
      Part::store_states(states_of(warp), states, p, rows.count - p * kRowsAtOnce);
      Part::store(to, out, p, rows.count - p * kRowsAtOnce);
    }
    if (lane == 0) *reinterpret_cast<int*>(states_of(warp) + kRowsAtOnce) = static_cast<int>(free_stage - shared);
    __syncthreads();
    const int first = turn * kRowsAtOnce, end = min(rows.count - first, kRowsAtOnce);
    // A lane looks at the state of one warp.
    const bool is_warp = lane < warps;
    const float2* const of_warp = states_of(is_warp ? lane : 0);
    const int offset = *reinterpret_cast<const int*>(of_warp + kRowsAtOnce);
#pragma unroll 1
    for (int r = warp; r < end; r += warps) {
      const float2 one = is_warp ? of_warp[r] : float2{lowest<float>(), 0};
      ScoreState state{one.x, 0};
#pragma unroll
      for (int step = 1; step < kDecodeMostWarps; step *= 2)
        state.max = fmaxf(state.max, __shfl_xor_sync(~0u, state.max, step));
      state.max = __shfl_sync(~0u, state.max, 0);
      const float factor = ScoreState::rescale(one.x, state.max);
      float4 sum[kVectors] = {};
#pragma unroll
      for (int w = 0; w < kDecodeMostWarps; ++w) {
        if (w >= warps) break;
        const float share = __shfl_sync(~0u, factor, w);
        state.sum = fmaf(share, __shfl_sync(~0u, one.y, w), state.sum);
        const float* const from = reinterpret_cast<const float*>(shared + __shfl_sync(~0u, offset, w));
#pragma unroll
        for (int n = 0; n < kVectors; ++n) {
          const int column = 128 * n + 4 * lane;
          if (kHeadDim % 128 != 0 && column >= kHeadDim) break;
          const float4 x = *reinterpret_cast<const float4*>(from + Part::place_of(r, column));
          sum[n] = {fmaf(share, x.x, sum[n].x), fmaf(share, x.y, sum[n].y), fmaf(share, x.z, sum[n].z),
                    fmaf(share, x.w, sum[n].w)};
        }
      }
      store_row(arguments, walk, rows, first + r, state, sum);
    }
    __syncthreads();  // all have read
  }
}

// ---- a warp

template <bool kDense>
__device__ __forceinline__ DecodeShare share_of_cta(const DecodeArguments& arguments) {
  const int ctas = static_cast<int>(gridDim.x), cta = static_cast<int>(blockIdx.x);
  if constexpr (kDense) return arguments.dense_split.share(arguments.problem, arguments.shape, ctas, cta);
  return find_share(arguments.problem, arguments.kv_splits, arguments.shape, ctas, cta);
}

template <class Element, int kHeadDim, bool kFloat8, int kRows>
template <bool kDense>
__device__ __forceinline__ void DecodeKernel<Element, kHeadDim, kFloat8, kRows>::run(const DecodeArguments& arguments,
                                                                                     char* shared) {
  const AttentionProblem& problem = arguments.problem;
  const DecodeShape& shape = arguments.shape;
  const int warps = shape.warps(), stages = arguments.stages, warp = static_cast<int>(threadIdx.x) / kWarpSize;
  const int teams = kDense ? shape.teams : 1;
  const bool whole_items = arguments.whole_items;
  // Shared memory: the warps' rings, their queries, and what they exchange.
  char *const ring = shared + warp * stages * kStageBytes, *const queries_at = shared + teams * warps * stages * kStageBytes,
              *const exchanged_at = queries_at + teams * warps * kQueryBytes;
  LoadsOf<kDense> loads(problem, arguments.kv_splits, shape, arguments.keys, arguments.values, whole_items, ring, stages);
  grid_dependency_wait();
  launch_dependents();  // what follows may rely on all before this kernel having ended
  if (problem.query_starts) clear_rows_without_result<Element>(problem);
  const DecodeShare share = share_of_cta<kDense>(arguments);
  if (share.begin >= share.end && !(kDense && arguments.dense_split.cluster > 1)) return;
  const __nv_fp8_interpretation_t kind = problem.cache.dtype == DType::kFloat8E4M3 ? __NV_E4M3 : __NV_E5M2;
  DecodeWalk walk(share);
  std::conditional_t<kDense, DenseFolder<Element, Part>, NoFolder> folder(problem, arguments.dense_partials, shape,
                                                                          arguments.dense, exchanged_at);
  int starts = stages - 1;  // tiles that are started before the first one is waited for
#pragma unroll 1
  for (bool is_first = true;; is_first = false) {
    walk.next(problem, arguments.kv_splits, shape, whole_items);
    if (walk.done()) break;
    if (is_first) loads.begin(walk);
    const PartRows rows(shape, walk);
    Queries queries;
    if constexpr (kSharesQueries) queries.data = reinterpret_cast<Element*>(queries_at + warp * kQueryBytes);
    bool has_queries = false;
    ScoreMod score_mod = arguments.score_mod;
    score_mod.multiply(scale_of(problem.cache.key_scale, problem.cache.key_scale_stride, walk.n, rows.key_head));
    float scale = score_mod.remaining_scale();
    const std::conditional_t<kFloat8, NoMask, DecodeMask<kKeys>> mask(problem, rows);
    bool as_halves = true;  // the queries, for float8 keys
    // The keys that all rows see.
    const int whole_begin = shape.begin_of(rows.query_of(max(rows.count - 1, 0)) + rows.offset),
              whole_end = shape.end_of(rows.query_of(0) + rows.offset, rows.keys);
    Outputs out;
    RowStates states;
    clear(out);
    const int end = rows.count > 0 ? walk.end : 0;
    int steps = 0, turn = 0;  // dense: of the unit; of the teams
#pragma unroll 1
    for (int tile = first_tile_of_warp<kDense>(shape, walk.tile);;) {
      unsigned stage = 0;
      if (starts == 0) {
        if (!has_queries && rows.count > 0) {
          load_queries(arguments, rows, queries);
          if constexpr (kConvertsQueries) {
            const float factor = convert_queries(queries);
            as_halves = factor != 0;
            if (as_halves) score_mod.multiply(factor);
            scale = score_mod.remaining_scale();
          }
        }
        has_queries = true;
        folder.end_units(walk, end, rows, tile, steps, turn, out, states);
        if (tile >= end) break;
        stage = loads.wait();
        ++steps;
      }
      loads.start();
      if (starts > 0) {
        --starts;
        continue;
      }
      const int key = tile * kKeys;
      tile += warps;
      if (mask && mask.hides_tile(problem.mask_dtype, key)) continue;
      Scores scores;
      if constexpr (kFloat8) {
        if (kConvertsQueries && !as_halves) [[unlikely]]
          multiply_keys<Element>(scores, queries, stage, kind);
        else
          visit_float8(kind, [&](auto kind) { multiply_keys<__half>(scores, queries, stage, kind); });
      } else {
        multiply_keys<Element>(scores, queries, stage, kind);
      }
      if (score_mod.has_score_mod) [[unlikely]]
        apply_mod(problem, score_mod, scores, rows, key);
      if (mask) Part::apply_mask(scores, mask, problem.mask_dtype, score_mod.lowest_score, key, states);
      if (key < whole_begin || key + kKeys > whole_end) [[unlikely]]
        hide(scores, shape, rows, key);
      Part::softmax(scores, out, states, scale);
      const unsigned values = stage + kBoxes * kBoxBytes;
      if constexpr (kFloat8)
        visit_float8(kind,
                     [&](auto kind) { Part::template multiply_values<CacheElement, kBoxBytes>(out, scores, values, kind); });
      else
        Part::template multiply_values<CacheElement, kBoxBytes>(out, scores, values, kind);
    }
    if constexpr (!kDense) finish_part(arguments, walk, rows, exchanged_at, ring + loads.next_stage(), out, states);
  }
  if constexpr (kDense)
    if (arguments.dense_split.cluster > 1)
      fold_in_cluster<Element>(problem, arguments.dense_partials, shape, arguments.dense_split, share.s.weight);
}

// The most registers per thread. Those of few rows leave room for the CTAs of merge_shares() and merge_dense(), which so may
// start before these end. The dense instance of 16 rows needs them all.
constexpr int decode_registers(int head_dim, bool is_float8, int rows, DecodeCalls calls) {
  if (head_dim > 128 || rows > 16) return 255;
  if (rows == 8 && !is_float8) return calls == DecodeCalls::kDense ? 200 : 192;
  return calls == DecodeCalls::kDense ? 255 : 224;
}

template <class Element, int kHeadDim, bool kFloat8, int kRows, DecodeCalls kCalls,
          class Kernel = DecodeKernel<Element, kHeadDim, kFloat8, kRows>>
__global__ void __maxnreg__(decode_registers(kHeadDim, kFloat8, kRows, kCalls))
    attention_decode(const __grid_constant__ DecodeArguments arguments) {
  extern __shared__ __align__(128) char shared[];
  touch_constants(arguments);
  if constexpr (kCalls == DecodeCalls::kPlain)
    Kernel::template run<false>(plain_arguments<kFloat8>(arguments), shared);
  else if constexpr (kCalls == DecodeCalls::kDense)
    Kernel::template run<true>(dense_arguments(arguments), shared);
  else
    Kernel::template run<false>(arguments, shared);
}

}  // namespace flash_online::cuda
