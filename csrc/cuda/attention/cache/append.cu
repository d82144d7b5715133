// New keys and values into a cache on CUDA, rotated and quantised on their way, and queries rotated alike. A warp takes some
// rows of one head, one after another, and its lanes the columns.
#include <cuda_fp8.h>

#include "../../../core/cache.h"
#include "../../../core/visit.h"
#include "../../hw/launch.h"
#include "../../hw/vector.cuh"
#include "../attention.h"

namespace flash_online::cuda {

namespace {

constexpr int kThreads = 128;
constexpr int kRowsPerWarp = 16;  // of a sequence, at most

// An element of a cache: float8 by its bits.
template <DType kDType>
struct Float8 {
  __nv_fp8_storage_t bits;
};
using Float8E4M3 = Float8<DType::kFloat8E4M3>;
using Float8E5M2 = Float8<DType::kFloat8E5M2>;

template <class Cached>
__device__ __forceinline__ Cached narrow_to_cache(float x) {
  if constexpr (std::is_same_v<Cached, Float8E4M3>)
    return {__nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3)};
  else if constexpr (std::is_same_v<Cached, Float8E5M2>)
    return {__nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E5M2)};
  else
    return narrow<Cached>(x);
}

// A row of a tensor; strides count elements.
template <class T>
struct Row {
  T* data;
  int64_t stride;

  template <class View>
  __device__ Row(const View& view, int64_t batch, int64_t head, int64_t index)
      : data(static_cast<T*>(view.data) + batch * view.stride[0] + head * view.stride[1] + index * view.stride[2]),
        stride(view.stride[3]) {}
  __device__ T& operator[](int64_t column) const { return data[column * stride]; }
};

__device__ __forceinline__ float angle_of(const AppendProblem& problem, const void* table, int64_t position, int64_t pair) {
  const int64_t at = position * problem.rotary_stride[0] + pair * problem.rotary_stride[1];
  switch (problem.rotary_dtype) {
    case DType::kFloat16: return widen(static_cast<const __half*>(table)[at]);
    case DType::kBFloat16: return widen(static_cast<const __nv_bfloat16*>(table)[at]);
    default: return static_cast<const float*>(table)[at];
  }
}

// Calls store(column, x) for every column of a row, rotated to `position` where there are angles.
template <class Element, class Store>
__device__ __forceinline__ void for_each_rotated(const AppendProblem& problem, const Row<const Element>& row, int64_t columns,
                                                 bool rotates, int64_t position, const Store& store) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  int64_t rest = 0;
  if (rotates && problem.cosines) {
    position = clamp(position, 0, problem.positions - 1);
    for (int64_t pair = lane; pair < problem.pairs; pair += kWarpSize) {
      const int64_t first = problem.interleaved ? 2 * pair : pair,
                    second = problem.interleaved ? 2 * pair + 1 : pair + problem.pairs;
      const float x = widen(row[first]), y = widen(row[second]), cosine = angle_of(problem, problem.cosines, position, pair),
                  sine = angle_of(problem, problem.sines, position, pair);
      store(first, x * cosine - y * sine);
      store(second, x * sine + y * cosine);
    }
    rest = 2 * problem.pairs;
  }
  for (int64_t column = rest + lane; column < columns; column += kWarpSize) store(column, widen(row[column]));
}

// Writes one new row into row `row` of a block. The cache holds it divided by `scale`.
template <class Element, class Cached>
__device__ void store_row(const AppendProblem& problem, const Row<const Element>& from, const MutableView4& cache,
                          int64_t block, int64_t head, int64_t row, int64_t columns, bool is_key, int64_t position,
                          float scale) {
  const Row<Cached> to(cache, block, head, row);
  for_each_rotated<Element>(problem, from, columns, is_key, position, [&](int64_t column, float x) {
    to[column] = narrow_to_cache<Cached>(scale == 1 ? x : __fdiv_rn(x, scale));
  });
}

// Key and value of one new row. `sequence` names the scales.
template <class Element, class Cached>
__device__ void store_key_and_value(const AppendProblem& problem, int64_t batch, int64_t head, int64_t index, int64_t sequence,
                                    int64_t block, int64_t row, int64_t position) {
  const CacheView& cache = problem.cache;
  store_row<Element, Cached>(problem, Row<const Element>(problem.key, batch, head, index), problem.key_cache, block, head, row,
                             problem.head_dim, true, position,
                             scale_of(cache.key_scale, cache.key_scale_stride, sequence, head));
  store_row<Element, Cached>(problem, Row<const Element>(problem.value, batch, head, index), problem.value_cache, block, head,
                             row, problem.head_dim_v, false, position,
                             scale_of(cache.value_scale, cache.value_scale_stride, sequence, head));
}

template <class Element>
__device__ void rotate_query(const AppendProblem& problem, int64_t batch, int64_t head, int64_t index, int64_t position,
                             bool rotates) {
  const Row<Element> to(problem.rotated, batch, head, index);
  for_each_rotated<Element>(problem, Row<const Element>(problem.query, batch, head, index), problem.head_dim, rotates, position,
                            [&](int64_t column, float x) { to[column] = narrow<Element>(x); });
}

// Calls f(batch, head, chunk) for the warps' items: `chunks` of each head of each batch index.
template <class F>
__device__ __forceinline__ void for_each_item(int64_t batch, int64_t heads, int64_t chunks, F&& f) {
  const int64_t items = batch * heads * chunks;
  for (int64_t item = (blockIdx.x * int64_t{kThreads} + threadIdx.x) / kWarpSize; item < items;
       item += int64_t{gridDim.x} * kThreads / kWarpSize)
    f(item / chunks / heads, item / chunks % heads, item % chunks);
}

template <class Element, class Cached>
__global__ void __launch_bounds__(kThreads) append_rows(const __grid_constant__ AppendProblem problem) {
  const CacheView& cache = problem.cache;
  if (problem.slots) {
    for_each_item(1, problem.heads, problem.rows, [&](int64_t, int64_t head, int64_t index) {
      const int64_t slot = problem.slots[index];
      if (slot < 0 || slot >= cache.blocks * cache.page) return;
      store_key_and_value<Element, Cached>(problem, 0, head, index, index, slot / cache.page, slot % cache.page,
                                           problem.offsets ? problem.offsets[index] : slot);
    });
    return;
  }
  for_each_item(problem.batch, problem.heads, ceil_div(cache.new_keys, int64_t{kRowsPerWarp}),
                [&](int64_t n, int64_t head, int64_t chunk) {
                  const Rows rows = cache.new_starts ? packed_rows(cache.new_starts, n, cache.new_keys, problem.rows)
                                                     : Rows{0, cache.new_keys};
                  const int64_t old = old_keys(cache, n), room = capacity_of(cache) - old,
                                end = clamp((chunk + 1) * kRowsPerWarp, 0, rows.count < room ? rows.count : room);
                  for (int64_t i = chunk * kRowsPerWarp; i < end; ++i) {
                    const int64_t place = old + i, block = block_of(cache, n, place / cache.page);
                    if (block < 0) continue;
                    store_key_and_value<Element, Cached>(problem, cache.new_starts ? 0 : n, head, rows.begin + i, n, block,
                                                         place % cache.page, problem.offsets ? problem.offsets[n] + i : place);
                  }
                });
}

template <class Element>
__global__ void __launch_bounds__(kThreads) rotate_queries(const __grid_constant__ AppendProblem problem) {
  if (problem.slots) {
    for_each_item(1, problem.query_heads, problem.total_queries, [&](int64_t, int64_t head, int64_t index) {
      rotate_query<Element>(problem, 0, head, index, problem.offsets ? problem.offsets[index] : problem.slots[index], true);
    });
    return;
  }
  // Of packed queries, batch index n has the padding rows before sequence n too, which stay as they are.
  const bool packed = problem.query_starts;
  for_each_item(
      problem.batch + packed, problem.query_heads, ceil_div(problem.queries, int64_t{kRowsPerWarp}),
      [&](int64_t n, int64_t head, int64_t chunk) {
        const int64_t begin = chunk * kRowsPerWarp, end = begin + kRowsPerWarp;
        if (packed) {
          const Rows rows = padding_rows(problem.query_starts, problem.batch, n, problem.queries, problem.total_queries);
          for (int64_t i = begin; i < clamp(end, 0, rows.count); ++i)
            rotate_query<Element>(problem, 0, head, rows.begin + i, 0, false);
          if (n == problem.batch) return;
        }
        const Rows rows =
            packed ? packed_rows(problem.query_starts, n, problem.queries, problem.total_queries) : Rows{0, problem.queries};
        const int64_t first = problem.offsets ? problem.offsets[n] : old_keys(problem.cache, n);
        for (int64_t i = begin; i < clamp(end, 0, rows.count); ++i)
          rotate_query<Element>(problem, packed ? 0 : n, head, rows.begin + i, first + (problem.queries_advance ? i : 0), true);
      });
}

unsigned ctas_for(int64_t warps) { return grid_for(ceil_div(warps, int64_t{kThreads / kWarpSize}), 16); }

template <class Element>
void run(const AppendProblem& problem, CUstream_st* stream) {
  const CacheView& cache = problem.cache;
  const int64_t new_rows = problem.slots ? problem.rows : problem.batch * ceil_div(cache.new_keys, int64_t{kRowsPerWarp});
  if (problem.key.data && new_rows * problem.heads > 0) {
    const unsigned ctas = ctas_for(new_rows * problem.heads);
    if (cache.dtype == problem.dtype) {
      launch<append_rows<Element, Element>>(problem, ctas, kThreads, 0, stream);
    } else if constexpr (sizeof(Element) == 2) {  // float8 stands beside 16 bits alone
      if (cache.dtype == DType::kFloat8E4M3)
        launch<append_rows<Element, Float8E4M3>>(problem, ctas, kThreads, 0, stream);
      else
        launch<append_rows<Element, Float8E5M2>>(problem, ctas, kThreads, 0, stream);
    }
  }
  const int64_t queries =
      problem.slots ? problem.total_queries
                    : (problem.batch + (problem.query_starts ? 1 : 0)) * ceil_div(problem.queries, int64_t{kRowsPerWarp});
  if (problem.query.data && queries * problem.query_heads > 0)
    launch<rotate_queries<Element>>(problem, ctas_for(queries * problem.query_heads), kThreads, 0, stream);
}

}  // namespace

void cache_append(const AppendProblem& problem, CUstream_st* stream) {
  switch (problem.dtype) {
    case DType::kFloat16: return run<__half>(problem, stream);
    case DType::kBFloat16: return run<__nv_bfloat16>(problem, stream);
    default: return run<float>(problem, stream);
  }
}

}  // namespace flash_online::cuda
