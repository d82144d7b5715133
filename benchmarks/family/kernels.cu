// Attention forward in the organisations of FlashAttention-1 (arXiv 2205.14135) and FlashAttention-2 (arXiv 2307.08691), as
// plain as they are: bfloat16, tiles of 64 queries and 128 keys, four warps, mma.sync and cp.async. All four kernels make the
// same products and the same weights in tiles of the same size, so that what is measured is the organisation: which loop is the
// outer one, what the CTAs of a grid divide, and what the warps of a CTA divide. docs/design/family.md tells them apart. The
// library does not use it: python -m flash_online bench family does.
//
//   kernel           outer loop    a CTA has                  a warp has             O, m, l between two blocks of keys
//   v1               keys          a head                     32 keys of the block   in global memory, O divided
//   v1, striped      keys          every n-th tile of a head  32 keys of the block   in global memory, O divided
//   v2, warps: keys  queries       a tile of queries          32 keys of the block   in registers, O divided at the end
//   v2               queries       a tile of queries          16 queries of the tile in registers, O divided at the end
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "core/integer.h"
#include "cuda/attention/common/scores.cuh"
#include "cuda/attention/common/store_rows.cuh"
#include "cuda/hw/cp_async.cuh"
#include "cuda/hw/launch.h"
#include "cuda/mma/gemm.cuh"

namespace {

using namespace flash_online;
using namespace flash_online::cuda;

using Element = __nv_bfloat16;
constexpr int kQueries = 64, kKeys = 128, kWarps = 4, kThreads = 32 * kWarps;

struct Problem {
  const Element *query, *key, *value;  // [heads, length, head_dim], contiguous
  Element* out;
  float *partial_out, *row_max, *row_sum;  // with keys outside: O [heads, length, head_dim], m and l [heads, length]
  int length;  // of queries and of keys, a multiple of kKeys
  int ctas_per_head;
  bool causal;
  float scale;  // times log2(e)
};

template <int kHeadDim>
constexpr int kTilePitch = SharedTile<Element, kHeadDim>::kPitch / kPerVector<Element>;  // vectors from a row to the next

template <int kHeadDim>
struct Tiles {
  SharedTile<Element, kHeadDim> query, key, value;
  static constexpr int kBytes = SharedTile<Element, kHeadDim>::bytes(kQueries + 2 * kKeys);

  __device__ explicit Tiles(char* shared) {
    query.data = reinterpret_cast<Element*>(shared);
    key.data = query.row(kQueries);
    value.data = key.row(kKeys);
  }
};

// Starts to copy kRows rows that lie one after another; a thread stays in one column.
template <int kRows, int kHeadDim>
__device__ __forceinline__ void load(SharedTile<Element, kHeadDim> tile, const Element* from) {
  constexpr int kVectors = kHeadDim / kPerVector<Element>, kDown = kThreads / kVectors;
  const int thread = static_cast<int>(threadIdx.x);
  uint4* const to = reinterpret_cast<uint4*>(tile.row(thread / kVectors)) + thread % kVectors;
  const uint4* const source = reinterpret_cast<const uint4*>(from) + thread;
#pragma unroll
  for (int r = 0; r < kRows; r += kDown) cp_async(to + r * kTilePitch<kHeadDim>, source + r * kVectors);
}

__device__ __forceinline__ void wait_for_loads() {
  cp_async_wait();
  __syncthreads();
}

// Which queries and keys a pair of tiles has.
struct Block {
  int query, key;  // the first ones
  bool causal;

  __device__ bool has_hidden_scores() const { return causal && key + kKeys - 1 > query; }
};

// -inf for the keys after a query; the accumulators' rows begin at `row` of the tile of queries, their columns at `column` of
// the tile of keys.
template <int kRows, int kColumns>
__device__ __forceinline__ void hide_scores(Accumulator<kRows, kColumns>& scores, const Block& block, int row, int column) {
  if (!block.has_hidden_scores()) return;
  for_each(scores, [&](float& x, int i, int j, int e) {
    const int query = block.query + row + 16 * i + quad() + e / 2 * 8,
              key = block.key + column + 8 * j + 2 * lane_in_quad() + e % 2;
    if (key > query) x = lowest<float>();
  });
}

template <class F>
__device__ __forceinline__ float over_quad(float x, const F& combine) {
  x = combine(x, __shfl_xor_sync(~0u, x, 1));
  return combine(x, __shfl_xor_sync(~0u, x, 2));
}
__device__ __forceinline__ float add(float a, float b) { return a + b; }

// The largest score of the row (i, half) that the lanes of a quad hold.
template <int kRows, int kColumns>
__device__ __forceinline__ float max_of_row(const Accumulator<kRows, kColumns>& scores, int i, int half) {
  float most = lowest<float>();
#pragma unroll
  for (int j = 0; j < kColumns; ++j) most = fmaxf(most, fmaxf(scores[i][j][2 * half], scores[i][j][2 * half + 1]));
  return over_quad(most, fmaxf);
}

// The scores of the row (i, half) become weights, measured from the row's maximum; returns the sum of the thread's own.
template <int kRows, int kColumns>
__device__ __forceinline__ float make_weights_of_row(Accumulator<kRows, kColumns>& scores, int i, int half,
                                                     const ScoreState& state, float scale) {
  float sum = 0;
#pragma unroll
  for (int j = 0; j < kColumns; ++j)
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      float& x = scores[i][j][2 * half + e];
      x = state.weight_of_product(x, scale);
      sum += x;
    }
  return sum;
}

// ---- what the warps of a CTA divide

// FlashAttention-2: each warp has 16 queries and all keys of a block. Scores, weights, sums and O are the warp's own; no warp
// waits for another.
template <int kHeadDim>
struct SplitByQueries {
  struct Shared {};
  Accumulator<1, kKeys / 8> scores;
  Accumulator<1, kHeadDim / 8> out;
  ScoreState state[2];  // of rows quad() and quad() + 8; sums are the thread's own until finish()
  const int row = 16 * (static_cast<int>(threadIdx.x) / 32);

  __device__ __forceinline__ void begin() { clear(out); }

  __device__ __forceinline__ void make_weights(const Tiles<kHeadDim>& tiles, Shared&, const Block& block, float scale) {
    CompensatedAccumulator<Element, 1, kKeys / 8> none;
    clear(scores);
    multiply_rows(scores, none, tiles.query, row, tiles.key);
    hide_scores(scores, block, row, 0);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float factor = state[half].raise_max(max_of_row(scores, 0, half) * scale);
#pragma unroll
      for (int j = 0; j < kHeadDim / 8; ++j) out[0][j][2 * half] *= factor, out[0][j][2 * half + 1] *= factor;
      state[half].add(make_weights_of_row(scores, 0, half, state[half], scale));
    }
  }

  __device__ __forceinline__ void add_values(const Tiles<kHeadDim>& tiles, Shared&) {
    multiply_accumulators(out, scores, tiles.value);
  }

  // Divides, and writes the tile's rows of the result.
  __device__ __forceinline__ void finish(Element* to) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      state[half].sum = over_quad(state[half].sum, add);
      const float inverse = state[half].inverse_sum();
#pragma unroll
      for (int j = 0; j < kHeadDim / 8; ++j) out[0][j][2 * half] *= inverse, out[0][j][2 * half + 1] *= inverse;
    }
    store_rows(out, 1.0f, row, to, kHeadDim, 1, kQueries, kHeadDim);
  }
};

// FlashAttention-1: each warp has all queries and 32 keys of a block. A row's maximum, its sum and its O are spread over the
// warps, which meet in shared memory for each of the three.
template <int kHeadDim>
struct SplitByKeys {
  static constexpr int kOwnKeys = kKeys / kWarps, kRowTiles = kQueries / 16, kThreadsPerRow = kThreads / 16,
                       kVectors = kHeadDim / (4 * kThreadsPerRow), kPitch = kHeadDim + 8;  // so that a quad's rows lie apart
  struct Shared {
    float max_of_warp[kWarps][kQueries], sum_of_warp[kWarps][kQueries], row_max[kQueries];
    float partial[kWarps][16][kPitch];  // O of 16 queries, of each warp's keys
  };
  unsigned weights[kRowTiles][kOwnKeys / 8][2];  // of the rows quad() and quad() + 8 of 16, as pairs
  // A thread keeps four columns of every 4 * kThreadsPerRow of one row in 16, and that row's state.
  float4 out[kRowTiles][kVectors];
  ScoreState state[kRowTiles];
  float factor[kRowTiles];  // by which the block's maximum moves what was there before
  const int warp = static_cast<int>(threadIdx.x) / 32, row = static_cast<int>(threadIdx.x) / kThreadsPerRow,
            column = 4 * (static_cast<int>(threadIdx.x) % kThreadsPerRow);

  template <class F>
  __device__ __forceinline__ void for_each_vector(const F& f) {
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
      for (int n = 0; n < kVectors; ++n) f(out[i][n], (16 * i + row) * kHeadDim + column + 4 * kThreadsPerRow * n);
  }

  __device__ __forceinline__ void begin() {
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) state[i] = {};
    for_each_vector([](float4& x, int) { x = make_float4(0, 0, 0, 0); });
  }

  // All threads have done with queries and keys when one returns.
  __device__ __forceinline__ void make_weights(const Tiles<kHeadDim>& tiles, Shared& shared, const Block& block, float scale) {
    Accumulator<kRowTiles, kOwnKeys / 8> scores;
    CompensatedAccumulator<Element, kRowTiles, kOwnKeys / 8> none;
    clear(scores);
    multiply_rows(scores, none, tiles.query, 0, tiles.key.from(kOwnKeys * warp, 0));
    hide_scores(scores, block, 0, kOwnKeys * warp);
    const auto for_each_row = [](auto&& f) {
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
        for (int half = 0; half < 2; ++half) f(i, half, 16 * i + 8 * half + quad());
    };
    for_each_row([&](int i, int half, int r) {
      const float most = max_of_row(scores, i, half);
      if (lane_in_quad() == 0) shared.max_of_warp[warp][r] = most;
    });
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
      const int r = 16 * i + row;
      float most = shared.max_of_warp[0][r];
#pragma unroll
      for (int w = 1; w < kWarps; ++w) most = fmaxf(most, shared.max_of_warp[w][r]);
      factor[i] = state[i].raise_max(most * scale);
      if (column == 0) shared.row_max[r] = state[i].max;
    }
    __syncthreads();
    for_each_row([&](int i, int half, int r) {
      const float sum = over_quad(make_weights_of_row(scores, i, half, {.max = shared.row_max[r]}, scale), add);
      if (lane_in_quad() == 0) shared.sum_of_warp[warp][r] = sum;
#pragma unroll
      for (int j = 0; j < kOwnKeys / 8; ++j)
        weights[i][j][half] = Fragments<Element>::pair(scores[i][j][2 * half], scores[i][j][2 * half + 1]);
    });
  }

  // With kDivided, O is kept as the attention over the keys so far, and each block divides it anew.
  template <bool kDivided = false>
  __device__ __forceinline__ void add_values(const Tiles<kHeadDim>& tiles, Shared& shared) {
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
      Accumulator<1, kHeadDim / 8> partial;
      clear(partial);
      multiply_by_columns<kOwnKeys / 16>(
          partial,
          [&](Fragments<Element>::Left& a, int, int step) {
#pragma unroll
            for (int n = 0; n < 4; ++n) a.words[0][n] = weights[i][2 * step + n / 2][n % 2];
          },
          tiles.value.from(kOwnKeys * warp, 0), 0);
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int j = 0; j < kHeadDim / 8; ++j)
          *reinterpret_cast<float2*>(&shared.partial[warp][8 * half + quad()][8 * j + 2 * lane_in_quad()]) = {
              partial[0][j][2 * half], partial[0][j][2 * half + 1]};
      __syncthreads();
      const float before = state[i].sum;  // measured from the new maximum
#pragma unroll
      for (int w = 0; w < kWarps; ++w) state[i].add(shared.sum_of_warp[w][16 * i + row]);
      const float kept = kDivided ? before : factor[i], inverse = kDivided ? state[i].inverse_sum() : 1;
#pragma unroll
      for (int n = 0; n < kVectors; ++n) {
        float4& x = out[i][n];
        x = make_float4(x.x * kept, x.y * kept, x.z * kept, x.w * kept);
#pragma unroll
        for (int w = 0; w < kWarps; ++w) {
          const float4 y = *reinterpret_cast<const float4*>(&shared.partial[w][row][column + 4 * kThreadsPerRow * n]);
          x = make_float4(x.x + y.x, x.y + y.y, x.z + y.z, x.w + y.w);
        }
        if (kDivided) x = make_float4(x.x * inverse, x.y * inverse, x.z * inverse, x.w * inverse);
      }
      __syncthreads();  // before the next 16 queries take the place of these
    }
  }

  __device__ __forceinline__ void write(Element* to) {
    for_each_vector([&](const float4& x, int at) {
      *reinterpret_cast<uint2*>(to + at) = {Fragments<Element>::pair(x.x, x.y), Fragments<Element>::pair(x.z, x.w)};
    });
  }
  __device__ __forceinline__ void finish(Element* to) {
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
      const float inverse = state[i].inverse_sum();
#pragma unroll
      for (int n = 0; n < kVectors; ++n) {
        float4& x = out[i][n];
        x = make_float4(x.x * inverse, x.y * inverse, x.z * inverse, x.w * inverse);
      }
    }
    write(to);
  }

  // O, m and l of the tile whose first row is `first`, counted over all heads, from and to global memory. Each thread reads
  // what it wrote itself.
  __device__ __forceinline__ void fetch(const Problem& problem, int64_t first) {
    const float* const from = problem.partial_out + first * kHeadDim;
    for_each_vector([&](float4& x, int at) { x = *reinterpret_cast<const float4*>(from + at); });
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i)
      state[i] = {.max = problem.row_max[first + 16 * i + row], .sum = problem.row_sum[first + 16 * i + row]};
  }
  __device__ __forceinline__ void keep(const Problem& problem, int64_t first) {
    float* const to = problem.partial_out + first * kHeadDim;
    for_each_vector([&](const float4& x, int at) { *reinterpret_cast<float4*>(to + at) = x; });
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i)
      problem.row_max[first + 16 * i + row] = state[i].max, problem.row_sum[first + 16 * i + row] = state[i].sum;
  }
};

// ---- which loop is the outer one

// A block of keys and values is loaded once, and the tiles of queries pass by, with what is known of them so far. Of a head's n
// CTAs each has every n-th tile, with all of its blocks, so that CTAs never wait for each other.
template <int kHeadDim>
__global__ void __launch_bounds__(kThreads) keys_outside(const __grid_constant__ Problem problem) {
  using Split = SplitByKeys<kHeadDim>;
  extern __shared__ __align__(16) char memory[];
  const Tiles<kHeadDim> tiles(memory);
  auto& shared = *reinterpret_cast<typename Split::Shared*>(memory + Tiles<kHeadDim>::kBytes);
  const int stripes = problem.ctas_per_head, stripe = static_cast<int>(blockIdx.x) % stripes,
            tile_count = problem.length / kQueries;
  const int64_t head = int64_t{blockIdx.x / stripes} * problem.length;  // the head's first row
  Split split;
  for (int key = 0; key < problem.length; key += kKeys) {
    // Causal: the first tile of the stripe that sees a key of the block.
    const int unseen = problem.causal ? key / kQueries : 0;
    int tile = unseen <= stripe ? stripe : stripe + ceil_div(unseen - stripe, stripes) * stripes;
    if (tile >= tile_count) break;
    __syncthreads();  // all have done with the values of the block before
    load<kKeys>(tiles.key, problem.key + (head + key) * kHeadDim);
    load<kKeys>(tiles.value, problem.value + (head + key) * kHeadDim);
    load<kQueries>(tiles.query, problem.query + (head + tile * kQueries) * kHeadDim);
    cp_async_commit();
    for (; tile < tile_count; tile += stripes) {
      const int64_t first = head + tile * kQueries;
      if (key == 0)
        split.begin();
      else
        split.fetch(problem, first);
      wait_for_loads();
      split.make_weights(tiles, shared, {tile * kQueries, key, problem.causal}, problem.scale);
      if (tile + stripes < tile_count) load<kQueries>(tiles.query, problem.query + (first + stripes * kQueries) * kHeadDim);
      cp_async_commit();
      split.template add_values<true>(tiles, shared);
      const int last = problem.causal ? tile * kQueries + kQueries - 1 : problem.length - 1;  // the last key that it sees
      if (key + kKeys > last)
        split.write(problem.out + first * kHeadDim);
      else
        split.keep(problem, first);
    }
  }
}

// A tile of queries stays, and the blocks of keys and values pass by: values arrive while scores are made, the next keys while
// values are added.
template <int kHeadDim, template <int> class SplitOf>
__global__ void __launch_bounds__(kThreads) queries_outside(const __grid_constant__ Problem problem) {
  using Split = SplitOf<kHeadDim>;
  extern __shared__ __align__(16) char memory[];
  const Tiles<kHeadDim> tiles(memory);
  auto& shared = *reinterpret_cast<typename Split::Shared*>(memory + Tiles<kHeadDim>::kBytes);
  const int ctas = problem.ctas_per_head, cta = static_cast<int>(blockIdx.x);
  const int64_t head = int64_t{cta / ctas} * problem.length;
  const int query = (ctas - 1 - cta % ctas) * kQueries;  // causal: the most work comes first
  const int end = problem.causal ? query + kQueries : problem.length;
  Split split;
  split.begin();
  load<kQueries>(tiles.query, problem.query + (head + query) * kHeadDim);
  load<kKeys>(tiles.key, problem.key + head * kHeadDim);
  cp_async_commit();
#pragma unroll 1
  for (int key = 0; key < end; key += kKeys) {
    wait_for_loads();  // the keys are there, and all have done with the values of the block before
    load<kKeys>(tiles.value, problem.value + (head + key) * kHeadDim);
    cp_async_commit();
    split.make_weights(tiles, shared, {query, key, problem.causal}, problem.scale);
    wait_for_loads();  // the values are there, and all have done with the keys
    if (key + kKeys < end) load<kKeys>(tiles.key, problem.key + (head + key + kKeys) * kHeadDim);
    cp_async_commit();
    split.add_values(tiles, shared);
  }
  split.finish(problem.out + (head + query) * kHeadDim);
}

// Marks in a profile where the calls of the next provider begin.
__global__ void provider_begins(int) {}

template <auto kKernel>
struct Kernel {};

enum Organisation { kV1, kV1Striped, kV2WarpsByKeys, kV2 };

// Calls f(kernel, bytes of shared memory) with the kernel as a constant.
template <int kHeadDim, class F>
void visit_kernel(Organisation organisation, const F& f) {
  constexpr int kTiles = Tiles<kHeadDim>::kBytes,
                kWithPartial = kTiles + static_cast<int>(sizeof(typename SplitByKeys<kHeadDim>::Shared));
  if (organisation == kV2) return f(Kernel<queries_outside<kHeadDim, SplitByQueries>>{}, kTiles);
  if (organisation == kV2WarpsByKeys) return f(Kernel<queries_outside<kHeadDim, SplitByKeys>>{}, kWithPartial);
  f(Kernel<keys_outside<kHeadDim>>{}, kWithPartial);
}
template <class F>
void visit_kernel(Organisation organisation, int head_dim, const F& f) {
  if (head_dim == 64) return visit_kernel<64>(organisation, f);
  if (head_dim == 128) return visit_kernel<128>(organisation, f);
  throw std::invalid_argument("the head dim is " + std::to_string(head_dim) + ", and the kernels have 64 and 128");
}

// The CTAs of a head: with kV1Striped as many as the GPU holds at once, as FlashAttention 1.0 has it (num_splits).
int ctas_per_head(Organisation organisation, int heads, int length, int head_dim) {
  const int tiles = length / kQueries;
  if (organisation != kV1Striped) return organisation == kV1 ? 1 : tiles;
  int ctas_per_sm = 0;
  visit_kernel(organisation, head_dim, [&]<auto kKernel>(Kernel<kKernel>, int shared_bytes) {
    check(cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes), "cudaFuncSetAttribute");
    check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&ctas_per_sm, kKernel, kThreads, shared_bytes), "occupancy");
  });
  return std::clamp(sm_count() * ctas_per_sm / heads, 1, tiles);
}

// null, or what went wrong.
template <class F>
const char* message_of(const F& f) {
  static std::string message;
  try {
    f();
    return nullptr;
  } catch (const std::exception& error) {
    message = error.what();
    return message.c_str();
  }
}

}  // namespace

// What build.py calls. Pointers are to device memory, tensors are those of Problem; the last three may be null with queries
// outside. Functions return null or a message, which the next call overwrites.
extern "C" {

const char* family_attention(int organisation, const void* query, const void* key, const void* value, void* out,
                             float* partial_out, float* row_max, float* row_sum, int heads, int length, int head_dim,
                             int causal, float scale, void* stream) {
  return message_of([&] {
    const auto which = static_cast<Organisation>(organisation);
    const Problem problem{static_cast<const Element*>(query),
                          static_cast<const Element*>(key),
                          static_cast<const Element*>(value),
                          static_cast<Element*>(out),
                          partial_out,
                          row_max,
                          row_sum,
                          length,
                          ctas_per_head(which, heads, length, head_dim),
                          causal != 0,
                          static_cast<float>(scale * kLog2EInDouble)};
    visit_kernel(which, head_dim, [&]<auto kKernel>(Kernel<kKernel>, int shared_bytes) {
      launch<kKernel>(problem, int64_t{heads} * problem.ctas_per_head, kThreads, shared_bytes,
                      static_cast<cudaStream_t>(stream));
    });
  });
}

const char* family_ctas_per_head(int organisation, int heads, int length, int head_dim, int* ctas) {
  return message_of([&] { *ctas = ctas_per_head(static_cast<Organisation>(organisation), heads, length, head_dim); });
}

const char* family_provider_begins(void* stream) {
  return message_of([&] { launch<provider_begins>(0, 1, 1, 0, static_cast<cudaStream_t>(stream)); });
}

}  // extern "C"
