#include "../../../core/visit.h"
#include "../../hw/pdl.cuh"
#include "../sm80/load.cuh"
#include "backward_workspace.cuh"
#include "dq_accum.cuh"
#include "scores.cuh"

namespace flash_online::cuda {

namespace {

struct RowArguments {
  AttentionProblem problem;
  AttentionGradients gradients;
  BackwardWorkspace space;
  unsigned* counter;  // to be 0; or null
};

constexpr int kRowThreads = 256, kRowLanes = 8;  // lanes that share a row

__device__ __forceinline__ ConstView4 as_const(const MutableView4& view) {
  return {view.data, {view.stride[0], view.stride[1], view.stride[2], view.stride[3]}};
}

// The sums of products of a row each of two tensors, for the rows that kRowLanes lanes share, in Sum; every lane has them. All
// rows at once: what a block of threads does is wait for these reads.
template <class Element, class Sum, int kRows>
__device__ __forceinline__ void dot_rows(const HeadRows<Element>& a, const HeadRows<Element>& b, const int (&rows)[kRows],
                                         Sum (&sums)[kRows]) {
  constexpr int kPer = kPerVector<Element>;
  const int part = static_cast<int>(threadIdx.x) % kRowLanes;
#pragma unroll
  for (int r = 0; r < kRows; ++r) sums[r] = 0;
  if (a.vectors && b.vectors && a.columns % kPer == 0) {
    for (int c = part * kPer; c < a.columns; c += kRowLanes * kPer) {
      uint4 x[kRows], y[kRows];
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        x[r] = *reinterpret_cast<const uint4*>(a.data + rows[r] * a.row_stride + c);
        y[r] = *reinterpret_cast<const uint4*>(b.data + rows[r] * b.row_stride + c);
      }
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        float left[kPer], right[kPer];
        unpack<Element>(x[r], left);
        unpack<Element>(y[r], right);
#pragma unroll
        for (int n = 0; n < kPer; ++n) sums[r] += static_cast<Sum>(left[n]) * right[n];
      }
    }
  } else {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const Element *const x = a.data + rows[r] * a.row_stride, *const y = b.data + rows[r] * b.row_stride;
      for (int c = part; c < a.columns; c += kRowLanes)
        sums[r] += static_cast<Sum>(widen(x[c * a.column_stride])) * widen(y[c * b.column_stride]);
    }
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r)
#pragma unroll
    for (int step = kRowLanes / 2; step > 0; step /= 2) sums[r] += __shfl_xor_sync(~0u, sums[r], step);
}

// What dot_rows gives, of sixteen rows from `first` on, by the products that the passes make gradients of weights with, as the
// sum of two floats: the output of a query that sees one key alone is that key's value, and the two then differ by nothing.
__device__ __forceinline__ void multiply_row_pairs(const HeadRows<float>& out, const HeadRows<float>& grad_out, int first,
                                                   int queries, float2* products) {
  using F = Fragments<float>;
  Accumulator<1, 2> leading;
  CompensatedAccumulator<float, 1, 2> rest;
  clear(leading);
#pragma unroll 1
  for (int column = 0; column < out.columns; column += F::kDepth) {
    typename F::Left left[1];
    typename F::Right right[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = first + 8 * half + quad();
      const auto words_of = [&](const HeadRows<float>& from, int c, unsigned (&words)[F::kPieces]) {
        const float* const at = from.data + row * from.row_stride + c * from.column_stride;
        F::split(words, row < queries && c < from.columns ? at[0] : 0,
                 row < queries && c + 1 < from.columns ? at[from.column_stride] : 0);
      };
#pragma unroll
      for (int part = 0; part < 2; ++part) {
        unsigned x[F::kPieces], y[F::kPieces];
        words_of(out, column + 8 * part + 2 * lane_in_quad(), x);
        words_of(grad_out, column + 8 * part + 2 * lane_in_quad(), y);
#pragma unroll
        for (int piece = 0; piece < F::kPieces; ++piece)
          left[0].words[piece][2 * part + half] = x[piece], right[half].words[piece][part] = y[piece];
      }
    }
    rest.multiply(leading, 0, left, right, 0);
  }
  without_infinite(leading, rest);
  // The diagonal of what each row makes with each.
  for_each(leading, [&](float x, int, int half, int e) {
    if (e / 2 == half && 2 * lane_in_quad() + e % 2 == quad())
      products[8 * half + quad()] = make_float2(x, rest.sums[0][half][e]);
  });
}

// The last blocks first: of what is cleared here and not written back yet, the kernel behind begins with the other end.
template <class Element>
__global__ void __launch_bounds__(kRowThreads) prepare_rows(const __grid_constant__ RowArguments arguments) {
  constexpr bool kFloats = std::is_same_v<Element, float>;
  using Sum = std::conditional_t<kFloats, double, float>;
  const AttentionProblem& problem = arguments.problem;
  const AttentionGradients& gradients = arguments.gradients;
  const BackwardWorkspace& space = arguments.space;
  const int64_t number = gridDim.x - 1 - blockIdx.x;
  const int thread = static_cast<int>(threadIdx.x);
  launch_dependents();
  if (arguments.counter && number == 0 && thread == 0) *arguments.counter = 0;

  const TileCoord place = tile_coord(problem, space.list, number, false, kStatsRows, false);
  const int64_t batch = place.sequence, head = place.head;
  const Sequence sequence = sequence_of(problem, batch);
  const int queries = static_cast<int>(sequence.queries.count);
  if (problem.query_starts && place.block == 0) {
    const auto clear = [&](int64_t n) {
      const Rows rows = padding_rows(problem.query_starts, problem.batch, n, problem.queries, problem.total_queries);
      clear_rows<Element, kRowThreads>(gradients.grad_query, head, problem.head_dim, rows);
    };
    clear(batch);
    if (batch == problem.batch - 1) clear(problem.batch);
  }
  if (space.sinks && thread == 0) space.sinks[number] = 0;
  if (place.block < 0 || place.block * kStatsRows >= queries) return;

  const int first = static_cast<int>(place.block) * kStatsRows;
  const HeadRows<Element> grad_out(gradients.grad_out, batch, head, sequence.queries.begin, problem.head_dim_v),
      out(as_const(problem.out), batch, head, sequence.queries.begin, problem.head_dim_v);
  __shared__ Sum products[kStatsRows];
  __shared__ float2 deltas[kFloats ? kStatsRows : 1];
  // A thread a row, in the end; what it reads is asked for ahead of the products.
  const int query = first + thread;
  const bool there = thread < kStatsRows && query < queries;
  float lse = lowest<float>(), lse_low = 0, grad_lse = 0;
  if (there) {
    const int64_t at = batch * problem.lse_stride[0] + head * problem.lse_stride[1] + sequence.queries.begin + query;
    lse = static_cast<const float*>(problem.lse)[at];
    lse_low = static_cast<const float*>(problem.lse_low)[at];
    if (gradients.grad_lse) grad_lse = static_cast<const float*>(gradients.grad_lse)[at];
  }
  if (space.sums) {
    float4* const sums = reinterpret_cast<float4*>(space.sums + number * kStatsRows * space.head_dim);
    for (int n = thread; n < kStatsRows / 4 * static_cast<int>(space.head_dim); n += kRowThreads)
      sums[n] = make_float4(0, 0, 0, 0);
  }
  if (!kFloats || space.sinks) {  // the gradient of a sink is a sum over rows, which needs all of their digits
    constexpr int kStep = kRowThreads / kRowLanes, kRows = kStatsRows / kStep;
    int rows[kRows];
    Sum sums[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int row = first + thread / kRowLanes + r * kStep;
      rows[r] = row < queries ? row : 0;
    }
    dot_rows(grad_out, out, rows, sums);
#pragma unroll
    for (int r = 0; r < kRows; ++r)
      if (thread % kRowLanes == 0) products[thread / kRowLanes + r * kStep] = sums[r];
  }
  if constexpr (kFloats)
    for (int r = thread / kWarpSize * 16; r < kStatsRows; r += kRowThreads / kWarpSize * 16)
      multiply_row_pairs(out, grad_out, first + r, queries, deltas + r);
  __syncthreads();
  double sink = 0;
  if (thread < kStatsRows) {
    float delta = 0, delta_low = 0;
    float high = -lowest<float>(), low = 0;
    if (lse != lowest<float>()) {
      if constexpr (kFloats) {
        const double whole = static_cast<double>(deltas[thread].x) + deltas[thread].y - grad_lse;
        delta = static_cast<float>(whole);
        const float rest = static_cast<float>(whole - delta);
        delta_low = rest - rest == 0 ? rest : 0;
      } else {
        delta = products[thread] - grad_lse;
      }
      const double binary = (static_cast<double>(lse) + lse_low) / kLn2;
      high = static_cast<float>(binary);
      const float rest = static_cast<float>(binary - high);
      low = rest - rest == 0 ? rest : 0;
      if (space.sinks)
        sink = -::exp(static_cast<const float*>(problem.sinks)[head] - binary * kLn2) *
               (static_cast<double>(products[thread]) - grad_lse);
    }
    float* const to = space.rows + number * kRowStats + thread;
    to[0] = high;
    to[kStatsRows] = low;
    to[2 * kStatsRows] = delta;
    if constexpr (kFloats) space.rest_of_delta(number)[thread] = delta_low;
  }
  if (space.sinks) {
    __shared__ double parts[kStatsRows];
    if (thread < kStatsRows) parts[thread] = sink;
    __syncthreads();
    if (thread == 0) {
      double sum = 0;
      for (const double part : parts) sum += part;
      space.sinks[number] = sum;
    }
  }
}

// A warp takes 16 rows of four tiles at a time, as they lie in memory, 512 bytes in a row. Four neighbouring lanes have pairs
// of columns of the same rows: they exchange them, so that each writes eight columns.
template <class Element>
__global__ void __launch_bounds__(kRowThreads) store_queries(const __grid_constant__ RowArguments arguments) {
  const AttentionProblem& problem = arguments.problem;
  const BackwardWorkspace& space = arguments.space;
  grid_dependency_wait();
  const int64_t number = gridDim.x - 1 - blockIdx.x;
  const TileCoord place = tile_coord(problem, space.list, number, false, kStatsRows, false);
  const Sequence sequence = sequence_of(problem, place.sequence);
  const int64_t left = sequence.queries.count - place.block * kStatsRows;
  if (place.block < 0 || left <= 0) return;
  const MutableView4& view = arguments.gradients.grad_query;
  Element* const to = static_cast<Element*>(view.data) + place.sequence * view.stride[0] + place.head * view.stride[1] +
                      (sequence.queries.begin + place.block * kStatsRows) * view.stride[2];
  const float* const sums = space.sums + number * kStatsRows * space.head_dim;
  const float scale = static_cast<float>(problem.scale);
  const int width = static_cast<int>(problem.head_dim), row_tiles = static_cast<int>(space.head_dim) / 8;
  constexpr int kTiles = 4, kBands = kStatsRows / 16;
  const int pieces = (row_tiles + kTiles - 1) / kTiles;
#pragma unroll 2
  for (int piece = static_cast<int>(threadIdx.x) / kWarpSize; piece < kBands * pieces; piece += kRowThreads / kWarpSize) {
    const int band = piece % kBands, first = piece / kBands * kTiles;  // tile of a row of tiles
    Accumulator<1, kTiles> x;
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      if (first + t >= row_tiles) break;
      dq_accum_read(sums + (band * row_tiles + first + t) * 128 + dq_accum_offset(lane(), 0), x[0][t]);
    }
    store_rows(x, scale, band * 16, to + first * 8 * view.stride[3], view.stride[2], view.stride[3],
               static_cast<int>(min(left, int64_t{kStatsRows})), width - first * 8);
  }
}

// A warp sums the blocks of one head of one sequence.
__global__ void __launch_bounds__(kRowThreads) sum_sinks(const __grid_constant__ RowArguments arguments) {
  const AttentionProblem& problem = arguments.problem;
  const int64_t plane = (blockIdx.x * int64_t{kRowThreads} + threadIdx.x) / kWarpSize;
  if (plane >= problem.batch * problem.heads) return;
  const int64_t batch = plane / problem.heads, head = plane % problem.heads;
  const int64_t first = first_row_block(problem, arguments.space.list, batch, head);
  const int64_t count = (sequence_of(problem, batch).queries.count + kStatsRows - 1) / kStatsRows;
  double sum = 0;
  for (int64_t n = threadIdx.x % kWarpSize; n < count; n += kWarpSize) sum += arguments.space.sinks[first + n];
#pragma unroll
  for (int step = kWarpSize / 2; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
  if (threadIdx.x % kWarpSize == 0) static_cast<float*>(arguments.gradients.grad_sinks)[plane] = static_cast<float>(sum);
}

// Calls f with a value of the element type.
template <class F>
void visit_element(DType dtype, F&& f) {
  switch (dtype) {
    case DType::kFloat16: return f(__half{});
    case DType::kBFloat16: return f(__nv_bfloat16{});
    default: return f(float{});
  }
}

}  // namespace

void prepare_backward(const AttentionProblem& problem, const AttentionGradients& gradients, const BackwardWorkspace& space,
                      CUstream_st* stream, unsigned* counter) {
  if (space.list.count() == 0) return;
  visit_element(problem.dtype, [&]<class Element>(Element) {
    launch<prepare_rows<Element>>(RowArguments{problem, gradients, space, counter}, space.list.count(), kRowThreads, 0, stream);
  });
}

void finish_queries(const AttentionProblem& problem, const AttentionGradients& gradients, const BackwardWorkspace& space,
                    CUstream_st* stream) {
  if (space.list.count() == 0) return;
  visit_element(problem.dtype, [&]<class Element>(Element) {
    launch<store_queries<Element>>(RowArguments{problem, gradients, space, nullptr}, space.list.count(), kRowThreads, 0, stream,
                                   true);
  });
}

void finish_sinks(const AttentionProblem& problem, const AttentionGradients& gradients, const BackwardWorkspace& space,
                  CUstream_st* stream) {
  const int64_t planes = problem.batch * problem.heads;
  if (planes == 0) return;
  constexpr int kPlanes = kRowThreads / kWarpSize;
  launch<sum_sinks>(RowArguments{problem, gradients, space, nullptr}, (planes + kPlanes - 1) / kPlanes, kRowThreads, 0, stream);
}

}  // namespace flash_online::cuda
