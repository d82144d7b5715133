// Quantises 16-bit queries, keys and values to e4m3, per sequence and key head, and lays e4m3 ones out as the tensor cores read
// them.
//
// A scale is the largest finite magnitude / 448. Keys are quantised less their mean over the sequence, if that is wanted
// (SageAttention, arXiv 2410.02367): what all keys have in common would take digits from what tells them apart. A query's
// product with the mean is the same for all its scores, and is kept apart.
//
// Two kernels read the tensors once each. In the first, the CTAs of a key head write what they find in their rows, and the last
// one of them to end makes the scales of it, in the order of the rows: two runs have the same bits. Keys need no second read
// for the largest magnitude of what the mean leaves of them: columns' least and largest elements have it.
#include <cfloat>

#include "../../../core/scratch.h"
#include "../../../core/visit.h"
#include "../../hw/launch.h"
#include "../../hw/pdl.cuh"
#include "../../hw/vector.cuh"
#include "../../hw/wgmma.cuh"
#include "../sm90/tma_tensor.cuh"
#include "quantise.cuh"

namespace flash_online::cuda {

namespace {

constexpr int kThreads = 256;
constexpr int kStatisticsRows = 256;  // of a CTA
constexpr int kQuantisedRows = 256;  // likewise
constexpr int kValueKeys = 128, kValueColumns = 64;  // of a CTA that transposes values
constexpr float kLargest = 448;  // of e4m3
template <class T>
constexpr bool kQuantises = sizeof(T) == 2;  // e4m3 is copied

// A tensor [batch, heads, rows, columns] of a call.
struct Tensor {
  ConstView4 view;
  int64_t heads, rows;
  int columns;
  bool is_vector;  // whether eight columns are one access
};

// The partial results of a key head's CTAs, and what its last CTA makes of them.
struct Statistics {
  float *query_most, *value_most;  // [key heads][chunks]
  float* key_columns;  // [key heads][chunks][sum, least, largest][columns]
  unsigned* arrived;  // [key heads], 0 at the start
  float *query_scale, *key_scale, *value_scale;  // [key heads]
  float* mean;  // [key heads][columns of a key]
};

struct Arguments {
  Tensor query, key, value;
  int64_t batch, key_heads, group;  // query heads per key head
  int64_t query_chunks, key_chunks, value_chunks;  // of a key head, in the kernel that the arguments are for
  bool smooths;
  float scale;  // of scores
  Statistics statistics;
  // Results; null: the tensor is read where it is.
  uint8_t *query_to, *key_to, *value_to;
  int64_t row_pitch, value_pitch;  // of a row of query and key; of a column of values
  float* row_terms;  // null: none
};

// Columns [column, column + 8) of a row; those past the last are 0. kVector: they are one access.
template <class T, bool kVector>
__device__ __forceinline__ void load_columns(const Tensor& tensor, int64_t batch, int64_t head, int64_t row, int column,
                                             float (&x)[8]) {
  const T* const at = static_cast<const T*>(tensor.view.data) + batch * tensor.view.stride[0] + head * tensor.view.stride[1] +
                      row * tensor.view.stride[2];
  if constexpr (kVector) {
    if (column >= tensor.columns) {
#pragma unroll
      for (int i = 0; i < 8; ++i) x[i] = 0;
    } else if constexpr (sizeof(T) == 2) {
      unpack<T>(__ldg(reinterpret_cast<const uint4*>(at + column)), x);
    } else {
      const uint2 words = __ldg(reinterpret_cast<const uint2*>(at + column));
#pragma unroll
      for (int i = 0; i < 8; ++i)
        x[i] = static_cast<float>(__builtin_bit_cast(T, static_cast<uint8_t>((i < 4 ? words.x : words.y) >> i % 4 * 8)));
    }
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i)
      x[i] = column + i < tensor.columns ? static_cast<float>(at[(column + i) * tensor.view.stride[3]]) : 0;
  }
}

__device__ __forceinline__ float finite_or_zero(float x) { return fabsf(x) <= FLT_MAX ? x : 0; }

__device__ __forceinline__ float max_of_cta(float x) {
  __shared__ float of_warp[kThreads / kWarpSize];
  for (int step = kWarpSize / 2; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, step));
  __syncthreads();
  if (threadIdx.x % kWarpSize == 0) of_warp[threadIdx.x / kWarpSize] = x;
  __syncthreads();
  for (int warp = 0; warp < kThreads / kWarpSize; ++warp) x = fmaxf(x, of_warp[warp]);
  return x;
}

// Row `n` of those of several heads, one head after another.
struct Row {
  int64_t head, row;
  __device__ __forceinline__ Row(const Tensor& tensor, int64_t first_head, int64_t n) {
    const unsigned rows = static_cast<unsigned>(tensor.rows), at = static_cast<unsigned>(n), index = at / rows;
    head = first_head + index, row = at - index * rows;
  }
};

// The least power of two of threads that hold a row, each with kColumns columns.
template <int kColumns>
__device__ __forceinline__ int threads_per_row(int columns) {
  int n = 1;
  while (n * kColumns < columns) n *= 2;
  return n;
}

// The largest magnitude of rows [begin, end) of a key head's.
template <class T, bool kVector>
__device__ __forceinline__ float largest_of_rows(const Tensor& tensor, int64_t batch, int64_t first_head, int64_t begin,
                                                 int64_t end) {
  const int per_row = threads_per_row<8>(tensor.columns), column = static_cast<int>(threadIdx.x) % per_row * 8;
  float most = 0;
#pragma unroll 4
  for (int64_t n = begin + threadIdx.x / per_row; n < end; n += kThreads / per_row) {
    const Row row(tensor, first_head, n);
    float x[8];
    load_columns<T, kVector>(tensor, batch, row.head, row.row, column, x);
#pragma unroll
    for (int i = 0; i < 8; ++i) most = fmaxf(most, fabsf(finite_or_zero(x[i])));
  }
  return max_of_cta(most);
}

// Sum, least and largest of each column of keys [begin, end).
template <class T, bool kVector>
__device__ __forceinline__ void columns_of_keys(const Tensor& key, int64_t batch, int64_t head, int64_t begin, int64_t end,
                                                float* to) {
  __shared__ float of_thread[8 * kThreads];
  const int per_row = threads_per_row<8>(key.columns), column = static_cast<int>(threadIdx.x) % per_row * 8,
            first = static_cast<int>(threadIdx.x) / per_row, at_once = kThreads / per_row;
  float x[3][8];  // sum, least, largest
#pragma unroll
  for (int i = 0; i < 8; ++i) x[0][i] = 0, x[1][i] = INFINITY, x[2][i] = -INFINITY;
#pragma unroll 4
  for (int64_t row = begin + first; row < end; row += at_once) {
    float y[8];
    load_columns<T, kVector>(key, batch, head, row, column, y);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float z = finite_or_zero(y[i]);
      x[0][i] += z, x[1][i] = fminf(x[1][i], z), x[2][i] = fmaxf(x[2][i], z);
    }
  }
#pragma unroll
  for (int kind = 0; kind < 3; ++kind) {
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 8; ++i) of_thread[first * per_row * 8 + column + i] = x[kind][i];
    __syncthreads();
    for (int c = static_cast<int>(threadIdx.x); c < key.columns; c += kThreads) {
      float all = of_thread[c];
      for (int n = 1; n < at_once; ++n) {
        const float other = of_thread[n * per_row * 8 + c];
        all = kind == 0 ? all + other : kind == 1 ? fminf(all, other) : fmaxf(all, other);
      }
      to[kind * key.columns + c] = all;
    }
  }
}

// Scales and the mean of a key head, of its CTAs' results.
__device__ __forceinline__ void finish_statistics(const Arguments& a, int64_t key_head) {
  const Statistics& s = a.statistics;
  const int columns = a.key.columns;
  float most = 0;
  for (int c = static_cast<int>(threadIdx.x); c < columns; c += kThreads) {
    const float* const of_chunks = s.key_columns + key_head * a.key_chunks * 3 * columns + c;
    float sum = 0, least = INFINITY, largest = -INFINITY;
    for (int64_t n = 0; n < a.key_chunks; ++n) {
      const float* const x = of_chunks + n * 3 * columns;
      sum += __ldcg(x), least = fminf(least, __ldcg(x + columns)), largest = fmaxf(largest, __ldcg(x + 2 * columns));
    }
    const float mean = a.smooths ? finite_or_zero(sum / static_cast<float>(a.key.rows)) : 0;
    s.mean[key_head * columns + c] = mean;
    most = fmaxf(most, fmaxf(fabsf(finite_or_zero(largest - mean)), fabsf(finite_or_zero(mean - least))));
  }
  most = max_of_cta(most);
  if (threadIdx.x == 0) s.key_scale[key_head] = most / kLargest;
  const auto scale_of = [&](const float* of_chunks, int64_t chunks, float* scale) {
    float largest = 0;
    for (int64_t n = threadIdx.x; n < chunks; n += kThreads)
      largest = fmaxf(largest, __ldcg(of_chunks + key_head * chunks + n));
    largest = max_of_cta(largest);
    if (threadIdx.x == 0) scale[key_head] = largest / kLargest;
  };
  scale_of(s.query_most, a.query_chunks, s.query_scale);
  scale_of(s.value_most, a.value_chunks, s.value_scale);
}

template <class T, bool kVector>
__global__ void __launch_bounds__(kThreads) float8_statistics(const __grid_constant__ Arguments a) {
  launch_dependents();
  const Statistics& s = a.statistics;
  const int64_t chunks = a.query_chunks + a.key_chunks + a.value_chunks, key_head = blockIdx.x / chunks,
                batch = key_head / a.key_heads, head = key_head % a.key_heads;
  int64_t chunk = blockIdx.x % chunks;
  if (chunk < a.key_chunks) {
    const int64_t begin = chunk * kStatisticsRows, end = min(begin + kStatisticsRows, a.key.rows);
    columns_of_keys<T, kVector>(a.key, batch, head, begin, end,
                                s.key_columns + (key_head * a.key_chunks + chunk) * 3 * a.key.columns);
  } else if (chunk -= a.key_chunks; chunk < a.value_chunks) {
    const int64_t begin = chunk * kStatisticsRows, end = min(begin + kStatisticsRows, a.value.rows);
    const float most = largest_of_rows<T, kVector>(a.value, batch, head, begin, end);
    if (threadIdx.x == 0) s.value_most[key_head * a.value_chunks + chunk] = most;
  } else {
    chunk -= a.value_chunks;
    const int64_t begin = chunk * kStatisticsRows, end = min(begin + kStatisticsRows, a.group * a.query.rows);
    const float most = largest_of_rows<T, kVector>(a.query, batch, head * a.group, begin, end);
    if (threadIdx.x == 0) s.query_most[key_head * a.query_chunks + chunk] = most;
  }
  __shared__ bool is_last;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) is_last = atomicAdd(s.arrived + key_head, 1u) + 1 == chunks;
  __syncthreads();
  if (!is_last) return;
  __threadfence();
  finish_statistics(a, key_head);
}

// x / scale, rounded to e4m3: the nearest, and the largest where x is larger.
struct Quantiser {
  float lift, scale, inverse;  // lift: what keeps the inverse of a tiny scale finite

  __device__ __forceinline__ explicit Quantiser(float of_tensor)
      : lift(of_tensor < 0x1p-100f ? 0x1p100f : 1.0f), scale(of_tensor * lift), inverse(scale > 0 ? 1 / scale : 0) {}
  template <int kCount>
  __device__ __forceinline__ void divide(float (&x)[kCount]) const {
    if (scale == 0) [[unlikely]] {  // all elements are 0, but for infinities and NaN
#pragma unroll
      for (int i = 0; i < kCount; ++i) x[i] = x[i] == x[i] ? 0 : x[i];
    } else {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        const float lifted = x[i] * lift, near = lifted * inverse, exact = fmaf(fmaf(-near, scale, lifted), inverse, near);
        x[i] = fabsf(near) <= FLT_MAX ? exact : near;
      }
    }
  }
};
__device__ __forceinline__ unsigned e4m3_word(float x, float y, float z, float w) {
  return __nv_cvt_float2_to_fp8x2({x, y}, __NV_SATFINITE, __NV_E4M3) |
         static_cast<unsigned>(__nv_cvt_float2_to_fp8x2({z, w}, __NV_SATFINITE, __NV_E4M3)) << 16;
}

// Rows [begin, end) of the heads from first_head on. `mean`, that of the keys' columns, is subtracted from keys, and is
// multiplied with queries for their terms; null: it is 0.
template <class T, bool kVector, bool kIsKey>
__device__ __forceinline__ void quantise_rows(const Arguments& a, const Tensor& tensor, int64_t batch, int64_t first_head,
                                              int64_t begin, int64_t end, const float* scale, const float* mean, uint8_t* to,
                                              int64_t pitch) {
  const int per_row = threads_per_row<16>(tensor.columns), column = static_cast<int>(threadIdx.x) % per_row * 16;
  const Quantiser quantiser(scale ? __ldcg(scale) : 1);
  float of_mean[16] = {};
  if (mean) {
#pragma unroll
    for (int i = 0; i < 16; i += kVector ? 4 : 1) {
      if (column + i >= tensor.columns) continue;
      if constexpr (kVector) {
        const float4 four = __ldcg(reinterpret_cast<const float4*>(mean + column + i));
        of_mean[i] = four.x, of_mean[i + 1] = four.y, of_mean[i + 2] = four.z, of_mean[i + 3] = four.w;
      } else {
        of_mean[i] = __ldcg(mean + column + i);
      }
    }
  }
#pragma unroll 2
  for (int64_t n = begin + threadIdx.x / per_row; n < begin + kQuantisedRows; n += kThreads / per_row) {
    const bool exists = n < end;
    const Row row(tensor, first_head, exists ? n : begin);
    float x[2][8];
    load_columns<T, kVector>(tensor, batch, row.head, row.row, column, x[0]);
    load_columns<T, kVector>(tensor, batch, row.head, row.row, column + 8, x[1]);
    unsigned words[4];
    float term = 0;
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      float& y = x[i / 8][i % 8];
      if (!kIsKey) term = fmaf(y, of_mean[i], term);
      if (kIsKey) y -= of_mean[i];
    }
    if constexpr (kQuantises<T>) quantiser.divide(x[0]), quantiser.divide(x[1]);
#pragma unroll
    for (int i = 0; i < 4; ++i)
      words[i] = e4m3_word(x[i / 2][i % 2 * 4], x[i / 2][i % 2 * 4 + 1], x[i / 2][i % 2 * 4 + 2], x[i / 2][i % 2 * 4 + 3]);
    const int64_t flat = (batch * tensor.heads + row.head) * tensor.rows + row.row;
    if (exists && column < pitch)
      *reinterpret_cast<uint4*>(to + flat * pitch + column) = {words[0], words[1], words[2], words[3]};
    if (!kIsKey && a.row_terms) {
      for (int step = per_row / 2; step > 0; step /= 2) term += __shfl_xor_sync(~0u, term, step);
      if (exists && column == 0) a.row_terms[flat] = term * a.scale;
    }
  }
}

// Values [key, key + kValueKeys) of columns [column, column + kValueColumns), transposed.
template <class T, bool kVector>
__device__ __forceinline__ void transpose_values(const Arguments& a, int64_t batch, int64_t head, int64_t key, int column,
                                                 const float* scale) {
  constexpr int kPitch = kValueKeys / 4 + 1;  // words
  __shared__ unsigned word[kValueColumns][kPitch];
  const Quantiser quantiser(scale ? __ldcg(scale) : 1);
  constexpr int kVectors = kValueColumns / 8;
  const int vector = static_cast<int>(threadIdx.x) % kVectors, own = column + vector * 8;
  // Four places side by side are of the keys 2 t, 2 t + 1, 2 t + 8 and 2 t + 9 of 16.
  for (int place = static_cast<int>(threadIdx.x) / kVectors * 4; place < kValueKeys; place += kThreads / kVectors * 4) {
    float x[4][8];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int64_t at = key + place / 16 * 16 + place % 16 / 2 + i / 2 * 8 + i % 2;
      if (at < a.value.rows && own < a.value.columns) {
        load_columns<T, kVector>(a.value, batch, head, at, own, x[i]);
      } else {
#pragma unroll
        for (int c = 0; c < 8; ++c) x[i][c] = 0;
      }
      if constexpr (kQuantises<T>) quantiser.divide(x[i]);
    }
#pragma unroll
    for (int c = 0; c < 8; ++c) word[vector * 8 + c][place / 4] = e4m3_word(x[0][c], x[1][c], x[2][c], x[3][c]);
  }
  __syncthreads();
  for (int n = static_cast<int>(threadIdx.x); n < kValueColumns * kValueKeys / 16; n += kThreads) {
    const int row = n / (kValueKeys / 16), chunk = n % (kValueKeys / 16);
    const int64_t place = key + chunk * 16;
    if (column + row >= a.value.columns || place >= a.value_pitch) continue;
    const unsigned* const from = word[row] + chunk * 4;
    uint8_t* const to = a.value_to + ((batch * a.key_heads + head) * a.value.columns + column + row) * a.value_pitch + place;
    *reinterpret_cast<uint4*>(to) = {from[0], from[1], from[2], from[3]};
  }
}

template <class T, bool kVector>
__global__ void __launch_bounds__(kThreads) float8_quantise(const __grid_constant__ Arguments a) {
  launch_dependents();
  grid_dependency_wait();
  const Statistics& s = a.statistics;
  const int64_t chunks = a.query_chunks + a.key_chunks + a.value_chunks, key_head = blockIdx.x / chunks,
                batch = key_head / a.key_heads, head = key_head % a.key_heads;
  int64_t chunk = blockIdx.x % chunks;
  const auto own = [&](const float* scales) { return kQuantises<T> ? scales + key_head : nullptr; };
  const float* const mean = kQuantises<T> && a.smooths ? s.mean + key_head * a.key.columns : nullptr;
  if (chunk < a.key_chunks) {
    const int64_t begin = chunk * kQuantisedRows, end = min(begin + kQuantisedRows, a.key.rows);
    quantise_rows<T, kVector, true>(a, a.key, batch, head, begin, end, own(s.key_scale), mean, a.key_to, a.row_pitch);
  } else if (chunk -= a.key_chunks; chunk < a.value_chunks) {
    const int64_t column_blocks = (a.value.columns + kValueColumns - 1) / kValueColumns;
    transpose_values<T, kVector>(a, batch, head, chunk / column_blocks * kValueKeys,
                                 static_cast<int>(chunk % column_blocks) * kValueColumns, own(s.value_scale));
  } else {
    chunk -= a.value_chunks;
    const int64_t begin = chunk * kQuantisedRows, end = min(begin + kQuantisedRows, a.group * a.query.rows);
    quantise_rows<T, kVector, false>(a, a.query, batch, head * a.group, begin, end, own(s.query_scale), mean, a.query_to,
                                     a.row_pitch);
  }
}

Tensor tensor_of(const ConstView4& view, int64_t batch, int64_t heads, int64_t rows, int64_t columns, int64_t element_bytes) {
  const int64_t vector_bytes = 8 * element_bytes;
  const auto is_whole = [&](int i, int64_t size) { return size == 1 || view.stride[i] * element_bytes % vector_bytes == 0; };
  return {.view = view,
          .heads = heads,
          .rows = rows,
          .columns = static_cast<int>(columns),
          .is_vector = columns % 8 == 0 && view.stride[3] == 1 &&
                       reinterpret_cast<uintptr_t>(view.data) % static_cast<uintptr_t>(vector_bytes) == 0 &&
                       is_whole(0, batch) && is_whole(1, heads) && is_whole(2, rows)};
}

// What is written for a problem, and where. Without a workspace its size alone.
struct Layout {
  Arguments arguments;
  Float8Operands operands;
  int64_t bytes;

  Layout(const Float8Problem& problem, void* workspace) {
    const AttentionProblem& p = problem.attention;
    const int64_t key_heads = p.batch * p.key_heads, group = p.heads / p.key_heads, element_bytes = size_of(problem.input);
    const bool quantises = problem.input != DType::kFloat8E4M3;
    ScratchAllocator scratch(workspace);
    arguments = {.query = tensor_of(p.query, p.batch, p.heads, p.queries, p.head_dim, element_bytes),
                 .key = tensor_of(p.key, p.batch, p.key_heads, p.keys, p.head_dim, element_bytes),
                 .value = tensor_of(p.value, p.batch, p.key_heads, p.keys, p.head_dim_v, element_bytes),
                 .batch = p.batch,
                 .key_heads = p.key_heads,
                 .group = group,
                 .query_chunks = 0,
                 .key_chunks = 0,
                 .value_chunks = 0,
                 .smooths = problem.smooth_keys,
                 .scale = static_cast<float>(p.scale),
                 .statistics = {},
                 .query_to = nullptr,
                 .key_to = nullptr,
                 .value_to = nullptr,
                 .row_pitch = std::max(round_up(p.head_dim, int64_t{16}), int64_t{16}),
                 .value_pitch = std::max(round_up(p.keys, int64_t{32}), int64_t{32}),
                 .row_terms = nullptr};
    const auto rows_of = [&](const ConstView4& view, int64_t heads, int64_t rows, uint8_t*& to) -> Float8Rows {
      const bool in_place = !quantises && p.head_dim > 0 && rows > 0 &&
                            is_tma_compatible(view.data, view.stride, p.batch, heads, rows, p.head_dim, 16);
      if (in_place) return {view, rows, p.head_dim};
      const int64_t pitch = arguments.row_pitch, at_least_one = std::max(rows, int64_t{1});
      to = scratch.take<uint8_t>(p.batch * heads * at_least_one * pitch);
      return {{to, {heads * rows * pitch, rows * pitch, pitch, 1}}, at_least_one, pitch};
    };
    operands.query = rows_of(p.query, p.heads, p.queries, arguments.query_to);
    operands.key = rows_of(p.key, p.key_heads, p.keys, arguments.key_to);
    const int64_t columns = std::max(p.head_dim_v, int64_t{1}), places = arguments.value_pitch;
    arguments.value_to = scratch.take<uint8_t>(key_heads * columns * places);
    operands.value = {{arguments.value_to, {p.key_heads * columns * places, columns * places, places, 1}}, columns, places};
    if (quantises) {
      Statistics& s = arguments.statistics;
      s.arrived = scratch.take<unsigned>(key_heads);
      s.query_scale = scratch.take<float>(key_heads);
      s.key_scale = scratch.take<float>(key_heads);
      s.value_scale = scratch.take<float>(key_heads);
      s.mean = scratch.take<float>(key_heads * p.head_dim);
      s.query_most = scratch.take<float>(key_heads * statistics_chunks(group * p.queries));
      s.value_most = scratch.take<float>(key_heads * statistics_chunks(p.keys));
      s.key_columns = scratch.take<float>(key_heads * statistics_chunks(p.keys) * 3 * p.head_dim);
      if (problem.smooth_keys) arguments.row_terms = scratch.take<float>(p.batch * p.heads * p.queries);
      operands.query_scale = s.query_scale, operands.key_scale = s.key_scale, operands.value_scale = s.value_scale;
      for (auto* const stride : {operands.query_scale_stride, operands.key_scale_stride, operands.value_scale_stride})
        stride[0] = p.key_heads, stride[1] = 1;
      operands.row_terms = arguments.row_terms;
    } else {
      operands.query_scale = problem.query_scale, operands.key_scale = problem.key_scale;
      operands.value_scale = problem.value_scale;
      for (int i = 0; i < 2; ++i) {
        operands.query_scale_stride[i] = problem.query_scale_stride[i];
        operands.key_scale_stride[i] = problem.key_scale_stride[i];
        operands.value_scale_stride[i] = problem.value_scale_stride[i];
      }
    }
    bytes = scratch.bytes();
  }

  static int64_t statistics_chunks(int64_t rows) { return ceil_div(rows, int64_t{kStatisticsRows}); }

  Arguments for_statistics() const {
    Arguments a = arguments;
    a.query_chunks = statistics_chunks(a.group * a.query.rows);
    a.key_chunks = a.value_chunks = statistics_chunks(a.key.rows);
    return a;
  }
  Arguments for_quantise() const {
    Arguments a = arguments;
    a.query_chunks = a.query_to ? ceil_div(a.group * a.query.rows, int64_t{kQuantisedRows}) : 0;
    a.key_chunks = a.key_to ? ceil_div(a.key.rows, int64_t{kQuantisedRows}) : 0;
    a.value_chunks = ceil_div(a.value.rows, int64_t{kValueKeys}) * ceil_div(int64_t{a.value.columns}, int64_t{kValueColumns});
    return a;
  }
};

template <class T, bool kVector>
void queue(const Layout& layout, cudaStream_t stream) {
  const int64_t key_heads = layout.arguments.batch * layout.arguments.key_heads;
  const auto ctas = [&](const Arguments& a) { return key_heads * (a.query_chunks + a.key_chunks + a.value_chunks); };
  if constexpr (kQuantises<T>) {
    const Arguments a = layout.for_statistics();
    check(cudaMemsetAsync(a.statistics.arrived, 0, sizeof(unsigned) * key_heads, stream), "cudaMemsetAsync");
    launch<float8_statistics<T, kVector>>(a, ctas(a), kThreads, 0, stream);
  }
  const Arguments a = layout.for_quantise();
  if (ctas(a) > 0) launch<float8_quantise<T, kVector>>(a, ctas(a), kThreads, 0, stream, kQuantises<T>);
}

}  // namespace

int64_t float8_operand_bytes(const Float8Problem& problem) { return Layout(problem, nullptr).bytes; }

Float8Operands make_float8_operands(const Float8Problem& problem, void* workspace, CUstream_st* stream) {
  const Layout layout(problem, workspace);
  const Arguments& a = layout.arguments;
  visit_bool(a.query.is_vector && a.key.is_vector && a.value.is_vector, [&](auto is_vector) {
    switch (problem.input) {
      case DType::kFloat16: queue<__half, is_vector()>(layout, stream); break;
      case DType::kBFloat16: queue<__nv_bfloat16, is_vector()>(layout, stream); break;
      default: queue<__nv_fp8_e4m3, is_vector()>(layout, stream);
    }
  });
  return layout.operands;
}

}  // namespace flash_online::cuda
