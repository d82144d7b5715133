// The largest score of each block of queries and block of keys, on any GPU, for any head dim, scale and strides. A CTA computes
// the scores of 64 queries and 128 keys, some columns at a time, and each of its warps raises the maxima to those of its
// sixteen queries, in any order.
#include <type_traits>

#include "../../hw/cp_async.cuh"
#include "../../hw/launch.h"
#include "../../mma/gemm.cuh"
#include "../common/max_logit.cuh"
#include "../common/scores.cuh"
#include "../common/visit_element.cuh"
#include "../kernels.h"
#include "load.cuh"

namespace flash_online::cuda {

namespace {

constexpr int kWarps = 4, kThreads = kWarps * kWarpSize, kQueries = 16 * kWarps, kKeys = 128;
// Head dims are taken so many columns at a time; digits of floats take three times the memory.
template <class Element>
constexpr int kColumns = std::is_same_v<Element, float> ? 32 : 64;

template <class Element>
struct BlockMaximaShared {
  using Tile = SharedTile<Element, kColumns<Element>>;
  alignas(16) char query[Tile::bytes(kQueries)], key[Tile::bytes(kKeys)];
};

struct BlockMaximaArguments {
  BlockMaximaPass pass;
  float scale;
};

template <class Element>
__global__ void __launch_bounds__(kThreads) block_maxima_sm80(const __grid_constant__ BlockMaximaArguments arguments) {
  using Shared = BlockMaximaShared<Element>;
  using Tile = typename Shared::Tile;
  extern __shared__ __align__(16) char block_maxima_shared[];
  Shared& shared = *reinterpret_cast<Shared*>(block_maxima_shared);
  const Tile query_tile{reinterpret_cast<typename Tile::Digit*>(shared.query)},
      key_tile{reinterpret_cast<typename Tile::Digit*>(shared.key)};

  const BlockMaximaPass& pass = arguments.pass;
  const AttentionProblem& p = pass.problem;
  const auto key_tiles = static_cast<unsigned>(ceil_div(p.keys, int64_t{kKeys})),
             query_tiles = static_cast<unsigned>(ceil_div(p.queries, int64_t{kQueries}));
  const unsigned row = blockIdx.x / key_tiles, plane = row / query_tiles;
  const int key = static_cast<int>(blockIdx.x % key_tiles) * kKeys, query = static_cast<int>(row % query_tiles) * kQueries,
            queries = static_cast<int>(p.queries), keys = static_cast<int>(p.keys);
  const int64_t batch = plane / p.heads, head = plane % p.heads, key_head = head / (p.heads / p.key_heads);
  const QueryRange seeing = queries_of_any(p.visible, key, min(key + kKeys, keys), queries);
  if (seeing.begin >= query + kQueries || seeing.end <= query) return;

  const int first_row = static_cast<int>(threadIdx.x) / kWarpSize * 16;  // of the warp
  Accumulator<1, kKeys / 8> scores;
  CompensatedAccumulator<Element, 1, kKeys / 8> compensation;
  clear(scores);
  for (int64_t column = 0; column < p.head_dim; column += kColumns<Element>) {
    const HeadRows<Element> query_rows(p.query, batch, head, query, p.head_dim, column),
        key_rows(p.key, batch, key_head, key, p.head_dim, column);
    load<kQueries, kThreads>(query_tile, query_rows, 0, queries - query);
    load<kKeys, kThreads>(key_tile, key_rows, 0, keys - key);
    cp_async_commit();
    cp_async_wait<0>();
    __syncthreads();
    multiply_rows_partial(scores, compensation, query_tile, first_row, key_tile);
    __syncthreads();
  }
  add_low(scores, compensation);
  for_each(scores, [&](float& x, int, int, int) { x *= arguments.scale; });
  const ScoreBlock here{query, key, queries, keys, false};
  hide_scores<false>(scores, first_row, here, p.visible);

  constexpr int kParts = kKeys / 64;  // the keys of a part lie in one block
  float most[kParts];
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
    most[part] = -INFINITY;
#pragma unroll
    for (int j = 0; j < 8; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e)
        if (query + first_row + quad() + e / 2 * 8 < queries) most[part] = max_or_nan(most[part], scores[0][8 * part + j][e]);
  }
  const auto raise = [&](int from, float x) {
    if (query + first_row < queries && from < keys) raise_max_logit(pass.maximum(batch, head, query + first_row, from), x);
  };
  if (pass.columns == kKeys) return raise(key, max_or_nan(most[0], most[1]));
#pragma unroll
  for (int part = 0; part < kParts; ++part) raise(key + 64 * part, most[part]);
}

}  // namespace

template <int kHeadDim>
const char* AttentionBlockMaximaSm80<kHeadDim>::refusal(const BlockMaximaPass& pass, const Gpu& gpu) {
  constexpr int64_t kMost = (int64_t{1} << 31) - 1;
  const AttentionProblem& p = pass.problem;
  if (gpu.major < 8) return "the GPU's compute capability is below 8.0";
  if (p.queries > kMost - kQueries || p.keys > kMost - kKeys ||
      p.batch * p.heads * ceil_div(p.queries, int64_t{kQueries}) * ceil_div(p.keys, int64_t{kKeys}) > kMost)
    return "a size beyond 32-bit indices";
  return nullptr;
}

template <int kHeadDim>
int64_t AttentionBlockMaximaSm80<kHeadDim>::workspace_bytes(const BlockMaximaPass&) {
  return 0;
}

template <int kHeadDim>
void AttentionBlockMaximaSm80<kHeadDim>::run(const BlockMaximaPass& pass, void*, CUstream_st* stream) {
  const AttentionProblem& p = pass.problem;
  const int64_t ctas = p.batch * p.heads * ceil_div(p.queries, int64_t{kQueries}) * ceil_div(p.keys, int64_t{kKeys});
  const BlockMaximaArguments arguments{.pass = pass, .scale = static_cast<float>(p.scale)};
  const auto start = [&]<class Element>(Type<Element>) {
    launch<block_maxima_sm80<Element>>(arguments, ctas, kThreads, static_cast<int>(sizeof(BlockMaximaShared<Element>)), stream);
  };
  visit_element(p.dtype, start);
}

template struct AttentionBlockMaximaSm80<kAnyHeadDim>;

}  // namespace flash_online::cuda
