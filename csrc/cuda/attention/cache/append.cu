// New keys and values into a cache on CUDA, rotated and quantised on their way, and queries rotated alike, in one launch. A
// warp takes some rows of one head, one after another, and its lanes the columns.
#include <cuda_fp8.h>

#include "../../../core/cache.h"
#include "../../../core/visit.h"
#include "../../hw/launch.h"
#include "../../hw/pdl.cuh"
#include "../../hw/vector.cuh"
#include "../attention.h"

namespace flash_online::cuda {

namespace {

constexpr int kThreads = 128;
constexpr int kRowsPerWarp = 16;  // of a sequence, at most
constexpr int64_t kLongPage = 0xffffffff;

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
#pragma unroll 2
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
#pragma unroll 4
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

// Stores the key or the value of one new row. Each has its own warp, since it only waits for memory. If values are a view of
// the keys, the key's warp writes both, one after the other. `sequence` selects the scales.
template <class Element, class Cached>
__device__ __forceinline__ void store_key_or_value(const AppendProblem& problem, bool is_key, int64_t batch, int64_t head,
                                                   int64_t index, int64_t sequence, int64_t block, int64_t row,
                                                   int64_t position) {
  const CacheView& cache = problem.cache;
  const bool is_joined = problem.key_cache.data == problem.value_cache.data;
  if (is_joined && !is_key) return;
#pragma unroll 1
  for (bool writes_key = is_key;; writes_key = false) {
    const float scale = writes_key ? scale_of(cache.key_scale, cache.key_scale_stride, sequence, head)
                                   : scale_of(cache.value_scale, cache.value_scale_stride, sequence, head);
    store_row<Element, Cached>(problem, Row<const Element>(writes_key ? problem.key : problem.value, batch, head, index),
                               writes_key ? problem.key_cache : problem.value_cache, block, head, row,
                               writes_key ? problem.head_dim : problem.head_dim_v, writes_key, position, scale);
    if (!is_joined || !writes_key) return;
    __syncwarp();
  }
}

template <class Element>
__device__ void rotate_query(const AppendProblem& problem, int64_t batch, int64_t head, int64_t index, int64_t position,
                             bool rotates) {
  const Row<Element> to(problem.rotated, batch, head, index);
  for_each_rotated<Element>(problem, Row<const Element>(problem.query, batch, head, index), problem.head_dim, rotates, position,
                            [&](int64_t column, float x) { to[column] = narrow<Element>(x); });
}

// The CTAs of a launch that do one of its two jobs, counted from `first`.
struct Ctas {
  unsigned first, count;
};

// Calls f(batch, head, chunk) for the warps' items: `chunks` of each head of each batch index. There are fewer than 2^32.
template <class F>
__device__ __forceinline__ void for_each_item(const Ctas& ctas, int64_t batch, int64_t heads, int64_t chunks, F&& f) {
  const int64_t items = batch * heads * chunks;
  const unsigned heads_of_batch = static_cast<unsigned>(heads), chunks_of_head = static_cast<unsigned>(chunks);
  for (int64_t at = ((blockIdx.x - ctas.first) * int64_t{kThreads} + threadIdx.x) / kWarpSize; at < items;
       at += int64_t{ctas.count} * kThreads / kWarpSize) {
    const unsigned item = static_cast<unsigned>(at), plane = item / chunks_of_head, n = plane / heads_of_batch;
    f(int64_t{n}, int64_t{plane - n * heads_of_batch}, int64_t{item - plane * chunks_of_head});
  }
}

template <class Element, class Cached>
__device__ __forceinline__ void append_rows(const AppendProblem& problem, const Ctas& ctas) {
  const CacheView& cache = problem.cache;
  if (problem.slots) {
    for_each_item(ctas, 1, 2 * problem.heads, problem.rows, [&](int64_t, int64_t half_head, int64_t index) {
      const int64_t slot = problem.slots[index];
      if (slot < 0 || slot >= cache.blocks * cache.page) return;
      store_key_or_value<Element, Cached>(problem, half_head % 2 == 0, 0, half_head / 2, index, index, slot / cache.page,
                                          slot % cache.page, problem.offsets ? problem.offsets[index] : slot);
    });
    return;
  }
  for_each_item(ctas, problem.batch, 2 * problem.heads, ceil_div(cache.new_keys, int64_t{kRowsPerWarp}),
                [&](int64_t n, int64_t half_head, int64_t chunk) {
                  const Rows rows = cache.new_starts ? packed_rows(cache.new_starts, n, cache.new_keys, problem.rows)
                                                     : Rows{0, cache.new_keys};
                  const int64_t old = old_keys(cache, n), room = capacity_of(cache) - old,
                                end = clamp((chunk + 1) * kRowsPerWarp, 0, rows.count < room ? rows.count : room);
                  for (int64_t i = chunk * kRowsPerWarp; i < end; ++i) {
                    // Lengths have 32 bits, so that a page of more keys is as good as one of 2^32 - 1.
                    const int64_t place = old + i;
                    const unsigned page = static_cast<unsigned>(cache.page < kLongPage ? cache.page : kLongPage),
                                   entry = static_cast<unsigned>(place) / page;
                    const int64_t block = block_of(cache, n, entry);
                    if (block < 0) continue;
                    store_key_or_value<Element, Cached>(problem, half_head % 2 == 0, cache.new_starts ? 0 : n, half_head / 2,
                                                        rows.begin + i, n, block, place - int64_t{entry} * page,
                                                        problem.offsets ? problem.offsets[n] + i : place);
                  }
                });
}

template <class Element>
__device__ __forceinline__ void rotate_queries(const AppendProblem& problem, const Ctas& ctas) {
  if (problem.slots) {
    for_each_item(ctas, 1, problem.query_heads, problem.total_queries, [&](int64_t, int64_t head, int64_t index) {
      rotate_query<Element>(problem, 0, head, index, problem.offsets ? problem.offsets[index] : problem.slots[index], true);
    });
    return;
  }
  // With packed queries, batch index n also has the padding rows before sequence n, which stay as they are.
  const bool packed = problem.query_starts;
  for_each_item(
      ctas, problem.batch + packed, problem.query_heads, ceil_div(problem.queries, int64_t{kRowsPerWarp}),
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

struct AppendArguments {
  AppendProblem problem;
  unsigned append_ctas;  // the others rotate queries
};

template <class Element, class Cached>
__global__ void __launch_bounds__(kThreads) append_and_rotate(const __grid_constant__ AppendArguments arguments) {
  grid_dependency_wait();
  launch_dependents();  // what follows waits for the end of this kernel
  const unsigned append_ctas = arguments.append_ctas;
  if (blockIdx.x < append_ctas)
    append_rows<Element, Cached>(arguments.problem, {0, append_ctas});
  else
    rotate_queries<Element>(arguments.problem, {append_ctas, gridDim.x - append_ctas});
}

unsigned ctas_for(int64_t warps) {
  if (warps >= int64_t{1} << 32) throw std::runtime_error("cache_append on CUDA: 2^32 rows or more");
  return grid_for(ceil_div(warps, int64_t{kThreads / kWarpSize}), 16);
}

template <class Element>
void run(const AppendProblem& problem, CUstream_st* stream) {
  const CacheView& cache = problem.cache;
  const int64_t new_rows = problem.slots ? problem.rows : problem.batch * ceil_div(cache.new_keys, int64_t{kRowsPerWarp}),
                queries = problem.slots ? problem.total_queries
                                        : (problem.batch + (problem.query_starts ? 1 : 0)) *
                                              ceil_div(problem.queries, int64_t{kRowsPerWarp});
  const AppendArguments arguments{problem, problem.key.data ? ctas_for(new_rows * 2 * problem.heads) : 0};
  const unsigned ctas = arguments.append_ctas + (problem.query.data ? ctas_for(queries * problem.query_heads) : 0);
  if (ctas == 0) return;
  if (cache.dtype == problem.dtype) {
    launch<append_and_rotate<Element, Element>>(arguments, ctas, kThreads, 0, stream, true);
  } else if constexpr (sizeof(Element) == 2) {  // only 16-bit dtypes have float8 caches
    if (cache.dtype == DType::kFloat8E4M3)
      launch<append_and_rotate<Element, Float8E4M3>>(arguments, ctas, kThreads, 0, stream, true);
    else
      launch<append_and_rotate<Element, Float8E5M2>>(arguments, ctas, kThreads, 0, stream, true);
  }
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
