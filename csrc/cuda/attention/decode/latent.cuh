// A decoding step over latent keys (DeepSeek's MLA, absorbed): one wide head of keys. The first columns are the values, so that
// a key is read once. docs/design/decode.md draws the decode kernel for other heads.
//
// A CTA takes its share of the line of work (line.cuh) in tiles of 32 keys, which all of its warps load together into one ring.
// A row of keys is too wide for one warp: each multiplies eight keys by half of the columns, the sums of both halves go through
// shared memory to all warps, and every warp makes all weights, the same bits in each, and multiplies them by the values of its
// own eighth of the columns. So a part ends without an exchange.
#pragma once

#include "decode.cuh"

namespace flash_online::cuda {

// Stores a warp's columns of sixteen rows, 8 * kCount of them from `first_column` on: to the tensors, or to the partials with
// which they are merged. `states` are over all keys of the part; has_states: whether the warp stores them too. `skipped`: how
// many rows of the part lie before `rows`.
template <class Element, int kCount>
__device__ __forceinline__ void store_latent_rows(const DecodeArguments& arguments, const DecodeWalk& walk,
                                                  const DecodeRows<1>& rows, const Accumulator<1, kCount>& out,
                                                  const ScoreState (&states)[1][2], int first_column, bool has_states,
                                                  int skipped = 0) {
  const AttentionProblem& problem = arguments.problem;
  const int width = static_cast<int>(problem.head_dim_v);
  int first = first_column + 2 * lane_in_quad();
  make_opaque(first);  // or the places of all columns are computed once, and take registers throughout
  const bool has_state = has_states && lane_in_quad() == 0;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const ScoreState& state = states[0][half];
    const int r = 8 * half + quad();
    if (r >= rows.count) continue;
    const CachedRow row = rows.place(r);
    // Rows of keys, and so those of values, are multiples of eight columns.
    if (const DecodePartialRow partial(arguments, walk, row, skipped + r); partial.data) {
      if (has_state) partial.set_state(state);
#pragma unroll
      for (int j = 0; j < kCount; ++j)
        if (first + 8 * j < width)
          *reinterpret_cast<float2*>(partial.data + first + 8 * j) = {out[0][j][2 * half], out[0][j][2 * half + 1]};
      continue;
    }
    float* const lse = static_cast<float*>(problem.lse);
    const float scale = finish_row(problem, row, state, lse && has_state ? lse + lse_index(problem, row) : nullptr);
    const int64_t column_stride = problem.out.stride[3];
    Element* const to = out_of<Element>(problem, row);
    const bool pairs = column_stride == 1 && reinterpret_cast<uintptr_t>(to) % 4 == 0;
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      const int column = first + 8 * j;
      if (column >= width) break;
      const float x = out[0][j][2 * half] * scale, y = out[0][j][2 * half + 1] * scale;
      if (pairs) {
        *reinterpret_cast<unsigned*>(to + column) = Fragments<Element>::pair(x, y);
      } else {
        to[column * column_stride] = narrow<Element>(x);
        to[(column + 1) * column_stride] = narrow<Element>(y);
      }
    }
  }
}

// Adds up the sums of a quad's lanes, which each have some of a row's weights.
__device__ __forceinline__ void sum_states(ScoreState (&states)[1][2]) {
#pragma unroll
  for (int half = 0; half < 2; ++half)
#pragma unroll
    for (int step = 1; step < 4; step *= 2) states[0][half].sum += __shfl_xor_sync(~0u, states[0][half].sum, step);
}

constexpr int kLatentTile = 32, kLatentWarps = 8, kLatentThreads = kLatentWarps * kWarpSize, kLatentRows = 16;
constexpr int kLatentBoxBytes = kLatentTile * 128;

// A CTA's ring of tiles of keys.
template <int kBoxes>
class LatentLoads : public DecodeTiles<kLatentTile, DecodeLoaders::kCta> {
 public:
  static constexpr int kStageBytes = kBoxes * kLatentBoxBytes;
  static_assert(kLatentThreads == 8 * kLatentTile);  // eight threads copy a row: a line of 128 bytes of each box

  __device__ __forceinline__ LatentLoads(const DecodeArguments& arguments, char* ring)
      : DecodeTiles(arguments.problem, arguments.kv_splits, arguments.shape, arguments.whole_items),
        keys_(arguments.keys),
        stages_(arguments.stages),
        ring_(ring) {}

  // Starts the copies of the next tile, if there is one.
  __device__ __forceinline__ void start() {
    if (!done()) {
      check_block();
      const int row = own_row(), chunk = static_cast<int>(threadIdx.x) % 8;
      const char* const from = keys_.data + key_head_ * keys_.head_bytes +
                               (uint64_t{vectors_before(keys_)} + static_cast<unsigned>(chunk)) * kVectorBytes;
      char* const to = ring_ + next_ * kStageBytes + box_offset(row, chunk);
      const int bytes = block_ < 0 ? 0 : keys_.row_bytes - chunk * kVectorBytes;  // from this chunk on; zeros follow
#pragma unroll
      for (int box = 0; box < kBoxes; ++box)
        cp_async(reinterpret_cast<uint4*>(to + box * kLatentBoxBytes), from + box * 128, bytes > box * 128 ? kVectorBytes : 0);
      next_tile();
    }
    cp_async_commit();
    next_ = next_ + 1 == stages_ ? 0 : next_ + 1;
  }

  // Waits for the oldest tile that was not waited for, and returns its stage. All warps have then read what they exchanged, and
  // the stage that is filled next.
  __device__ __forceinline__ char* wait() {
    wait_for_groups(stages_ - 2);
    __syncthreads();
    char* const stage = ring_ + oldest_ * kStageBytes;
    oldest_ = oldest_ + 1 == stages_ ? 0 : oldest_ + 1;
    return stage;
  }

 private:
  const DecodePool& keys_;
  int stages_;
  int next_ = 0, oldest_ = 0;  // stages
  char* ring_;
};

template <class Element, int kHeadDim>
class LatentKernel {
 public:
  static constexpr int kBoxes = kHeadDim / 64;
  static_assert(kHeadDim % 64 == 0 && kBoxes >= kLatentWarps);
  using Loads = LatentLoads<kBoxes>;
  static constexpr int kExchangedBytes = 2 * kLatentRows * kLatentTile * static_cast<int>(sizeof(float));

  __device__ static void run(const DecodeArguments& arguments, char* shared);

 private:
  using F = Fragments<Element>;
  using Scores = Accumulator<1, kLatentTile / 8>;
  using Outputs = Accumulator<1, 8>;
  using Rows = DecodeRows<1>;
  static constexpr int kSteps = 2 * kBoxes, kGroups = kLatentTile / 8;  // of a warp; eight keys each
  using Queries = typename F::Left[kSteps][1];

  // For the scores a warp multiplies one half of the columns of every box of 64, for eight of the tile's keys.
  __device__ __forceinline__ static int warp() { return static_cast<int>(threadIdx.x) / kWarpSize; }
  __device__ __forceinline__ static int half() { return warp() / kGroups; }
  __device__ __forceinline__ static int group() { return warp() % kGroups; }

  __device__ __forceinline__ static void multiply_keys(Scores& scores, const Queries& queries, const char* keys,
                                                       char* exchanged);
};

// S = Q K^T: the warp's share, and then the sums of all warps. Neighbouring steps have sums of their own, as in DecodeKernel.
template <class Element, int kHeadDim>
__device__ __forceinline__ void LatentKernel<Element, kHeadDim>::multiply_keys(Scores& scores, const Queries& queries,
                                                                               const char* keys, char* exchanged) {
  constexpr int kSums = 4;
  Accumulator<1, 1> sums[kSums] = {};
  const unsigned base = shared_address(keys) + box_offset(8 * group() + cuda::lane() % 8, 4 * half() + cuda::lane() / 8);
#pragma unroll
  for (int box = 0; box < kBoxes; ++box) {
    unsigned x[4];
    ldmatrix_x4(x, base + box * kLatentBoxBytes);
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const int step = 2 * box + n;
      const typename F::Right right[1] = {{{{x[2 * n], x[2 * n + 1]}}}};
      multiply<Element>(sums[step % kSums], queries[step], right, 0);
    }
  }
  float4* const at = reinterpret_cast<float4*>(exchanged) + cuda::lane();
  const auto sum = [&](int e) { return (sums[0][0][0][e] + sums[1][0][0][e]) + (sums[2][0][0][e] + sums[3][0][0][e]); };
  at[warp() * kWarpSize] = {sum(0), sum(1), sum(2), sum(3)};
  __syncthreads();
#pragma unroll
  for (int j = 0; j < kGroups; ++j) {
    const float4 a = at[j * kWarpSize], b = at[(kGroups + j) * kWarpSize];
    scores[0][j][0] = a.x + b.x, scores[0][j][1] = a.y + b.y, scores[0][j][2] = a.z + b.z, scores[0][j][3] = a.w + b.w;
  }
}

template <class Element, int kHeadDim>
__device__ void LatentKernel<Element, kHeadDim>::run(const DecodeArguments& arguments, char* shared) {
  const AttentionProblem& problem = arguments.problem;
  const DecodeShape& shape = arguments.shape;
  const bool whole_items = arguments.whole_items;
  char* const exchanged = shared + arguments.stages * Loads::kStageBytes;
  Loads loads(arguments, shared);
  touch_constants(arguments);
  grid_dependency_wait();
  launch_dependents();  // what follows may rely on all before this kernel having ended
  if (problem.query_starts) clear_rows_without_result<Element>(problem);
  const DecodeShare share =
      find_share(problem, arguments.kv_splits, shape, static_cast<int>(gridDim.x), static_cast<int>(blockIdx.x));
  if (share.begin == share.end) return;
  const ScoreMod& score_mod = arguments.score_mod;
  const float scale = score_mod.remaining_scale();
  DecodeWalk walk(share);
  int starts = arguments.stages - 1;  // tiles that are started before the first one is waited for
#pragma unroll 1
  for (bool is_first = true;; is_first = false) {
    walk.next(problem, arguments.kv_splits, shape, whole_items);
    if (walk.done()) break;
    if (is_first) loads.begin(walk);
    const Rows rows(shape, walk);
    // The keys that all rows see.
    const int whole_begin = shape.begin_of(rows.query_of(max(rows.count - 1, 0)) + rows.offset),
              whole_end = shape.end_of(rows.query_of(0) + rows.offset, rows.keys);
    Queries queries;
    bool has_queries = false;
    Outputs out;
    ScoreState states[1][2];
    clear(out);
    const int end = rows.count > 0 ? walk.end : 0;
#pragma unroll 1
    for (int tile = walk.tile;;) {
      char* stage = nullptr;
      if (starts == 0) {
        if (!has_queries && rows.count > 0)
          load_query_fragments<Element, false>(queries, problem, rows,
                                               [](int step) { return step / 2 * 64 + 32 * half() + step % 2 * 16; });
        has_queries = true;
        if (tile >= end) break;
        stage = loads.wait();
      }
      loads.start();
      if (starts > 0) {
        --starts;
        continue;
      }
      const int key = kLatentTile * tile++;
      Scores scores;
      multiply_keys(scores, queries, stage, exchanged);
      if (score_mod.has_score_mod) [[unlikely]]
        apply_mod(problem, score_mod, scores, rows, key);
      if (key < whole_begin || key + kLatentTile > whole_end) [[unlikely]]
        hide(scores, shape, rows, key);
      softmax_step(scores, out, states, scale);
      multiply_values<Element, false, kLatentBoxBytes>(out, scores, shared_address(stage + warp() * kLatentBoxBytes),
                                                       __NV_E4M3);
    }
    sum_states(states);
    store_latent_rows<Element>(arguments, walk, rows, out, states, 64 * warp(), warp() == 0);
  }
}

// As many registers as leave room for the CTAs that merge, which so may start before this kernel ends.
template <class Element, int kHeadDim, class Kernel = LatentKernel<Element, kHeadDim>>
__global__ void __maxnreg__(224) attention_latent(const __grid_constant__ DecodeArguments arguments) {
  extern __shared__ __align__(128) char shared[];
  Kernel::run(arguments, shared);
}

// ---- the family

template <int kHeadDim>
struct LatentSetup {
  static constexpr int kExchangedBytes = LatentKernel<__half, kHeadDim>::kExchangedBytes,
                       kStageBytes = LatentLoads<kHeadDim / 64>::kStageBytes;
  int stages;
  DecodeShape shape;
  int ctas;

  LatentSetup(const AttentionProblem& problem, int shared_bytes)
      : stages(std::min((shared_bytes - kExchangedBytes) / kStageBytes, kDecodeMostStages)),
        shape(decode_shape(problem, kLatentRows, kLatentTile, 1)) {
    // Where there is little to do, a CTA takes several tiles: one costs less than merging a partial.
    constexpr int64_t kLeastUnits = 3;
    ctas = static_cast<int>(std::clamp<int64_t>(ceil_div(shape.most_units(problem), kLeastUnits), 1, sm_count()));
  }
  int shared_bytes() const { return stages * kStageBytes + kExchangedBytes; }
};

// True if the values are the first columns of the keys.
inline bool has_latent_values(const AttentionProblem& p) {
  const auto same = [&](int i) { return p.key.stride[i] == p.value.stride[i]; };
  return p.key.data == p.value.data && p.key_heads == p.value_heads && p.head_dim_v <= p.head_dim && same(0) &&
         (p.key_heads == 1 || same(1)) && same(2) && same(3);
}

// The reason why no kernel of latent keys takes a problem, or null.
inline const char* latent_refusal(const AttentionProblem& p) {
  if (const char* const reason = decode_refusal(p)) return reason;
  if (is_float8(p.cache.dtype)) return "latent keys of float8";
  if (p.cache.key_scale) return "scales of latent keys";
  if (!has_latent_values(p)) return "the values are not the first columns of the keys";
  if (p.head_dim_v > 64 * kLatentWarps) return "values of more than 512 columns";
  return nullptr;
}

template <int kHeadDim>
const char* AttentionDecodeLatent<kHeadDim>::refusal(const ForwardPass& pass, const Gpu& gpu) {
  const AttentionProblem& p = pass.problem;
  if (const char* const reason = latent_refusal(p)) return reason;
  const LatentSetup<kHeadDim> setup(p, gpu.shared_bytes);
  if (setup.stages < 2) return "the GPU has too little shared memory for this head dim";
  if (setup.shape.most_units(p) >= int64_t{1} << 30) return "the caches of all sequences have room for too many keys";
  return nullptr;
}

template <int kHeadDim>
int64_t AttentionDecodeLatent<kHeadDim>::workspace_bytes(const ForwardPass& pass) {
  const AttentionProblem& problem = pass.problem;
  if (problem.cache.kv_splits > 0) return decode_kv_splits(problem).bytes(problem);
  const LatentSetup<kHeadDim> setup(problem, shared_bytes_per_cta());
  return DecodePartials::of(problem, setup.shape).bytes(setup.ctas);
}

template <int kHeadDim>
void AttentionDecodeLatent<kHeadDim>::run(const ForwardPass& pass, void* workspace, CUstream_st* stream) {
  const AttentionProblem& problem = pass.problem;
  const LatentSetup<kHeadDim> setup(problem, shared_bytes_per_cta());
  const DecodePool keys = decode_pool(problem, problem.key, problem.head_dim);
  const DecodeArguments arguments = decode_arguments(problem, setup.shape, keys, keys, setup.stages, workspace);
  const auto launch_kernel = [&]<class Element>(Type<Element>) {
    launch<attention_latent<Element, kHeadDim>>(arguments, setup.ctas, kLatentThreads, setup.shared_bytes(), stream, true);
  };
  problem.dtype == DType::kFloat16 ? launch_kernel(Type<__half>{}) : launch_kernel(Type<__nv_bfloat16>{});
  merge_results(arguments, setup.ctas, stream);
}

}  // namespace flash_online::cuda
