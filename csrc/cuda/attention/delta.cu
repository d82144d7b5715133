#include "delta.cuh"

#include "../../core/visit.h"
#include "../hw/reduce.cuh"
#include "load.cuh"
#include "scores.cuh"

namespace flash_online::cuda {

namespace {

struct RowArguments {
  AttentionProblem problem;
  AttentionGradients gradients;
  BackwardSpace space;
};

constexpr int kRowThreads = 256, kRowLanes = 8;  // lanes that share a row

__device__ __forceinline__ ConstView4 as_const(const MutableView4& view) {
  return {view.data, {view.stride[0], view.stride[1], view.stride[2], view.stride[3]}};
}

// The sum of products of two rows, by kRowLanes lanes, in Sum; every lane has it.
template <class Element, class Sum>
__device__ __forceinline__ Sum dot_rows(const HeadRows<Element>& a, const HeadRows<Element>& b, int row) {
  constexpr int kPer = kPerVector<Element>;
  const int part = static_cast<int>(threadIdx.x) % kRowLanes;
  const Element *const x = a.data + row * a.row_stride, *const y = b.data + row * b.row_stride;
  Sum sum = 0;
  if (a.vectors && b.vectors && a.width % kPer == 0) {
    for (int c = part * kPer; c < a.width; c += kRowLanes * kPer) {
      float left[kPer], right[kPer];
      unpack<Element>(*reinterpret_cast<const uint4*>(x + c), left);
      unpack<Element>(*reinterpret_cast<const uint4*>(y + c), right);
#pragma unroll
      for (int n = 0; n < kPer; ++n) sum += static_cast<Sum>(left[n]) * right[n];
    }
  } else {
    for (int c = part; c < a.width; c += kRowLanes)
      sum += static_cast<Sum>(widen(x[c * a.column_stride])) * widen(y[c * b.column_stride]);
  }
#pragma unroll
  for (int step = kRowLanes / 2; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
  return sum;
}

// Gradients of queries that no sequence owns, in one head: 0.
template <class Element>
__device__ void clear_queries(const AttentionProblem& problem, const MutableView4& to, int64_t head, Rows rows) {
  Element* const data = static_cast<Element*>(to.data) + head * to.stride[1];
  for (int64_t n = threadIdx.x; n < rows.count * problem.width; n += kRowThreads)
    data[(rows.begin + n / problem.width) * to.stride[2] + n % problem.width * to.stride[3]] = narrow<Element>(0.0f);
}

template <class Element>
__global__ void __launch_bounds__(kRowThreads) prepare_rows(const __grid_constant__ RowArguments arguments) {
  using Sum = std::conditional_t<std::is_same_v<Element, float>, double, float>;
  const AttentionProblem& problem = arguments.problem;
  const AttentionGradients& gradients = arguments.gradients;
  const BackwardSpace& space = arguments.space;
  const int64_t number = blockIdx.x;
  const int thread = static_cast<int>(threadIdx.x);

  const BlockPlace place = place_of(problem, space.list, number, false, kRowBlock, false);
  const int64_t batch = place.sequence, head = place.head;
  const Sequence sequence = sequence_of(problem, batch);
  const int queries = static_cast<int>(sequence.queries.count);
  if (problem.query_starts && place.block == 0) {
    const auto clear = [&](int64_t n) {
      clear_queries<Element>(problem, gradients.grad_query, head,
                             unowned_rows(problem.query_starts, problem.batch, n, problem.queries, problem.total_queries));
    };
    clear(batch);
    if (batch == problem.batch - 1) clear(problem.batch);
  }
  if (space.sinks && thread == 0) space.sinks[number] = 0;
  if (place.block < 0 || place.block * kRowBlock >= queries) return;

  if (space.sums) {
    float4* const sums = reinterpret_cast<float4*>(space.sums + number * kRowBlock * space.width);
    for (int64_t n = thread; n < kRowBlock * space.width / 4; n += kRowThreads) sums[n] = make_float4(0, 0, 0, 0);
  }
  const int first = static_cast<int>(place.block) * kRowBlock;
  const HeadRows<Element> grad_out(gradients.grad_out, batch, head, sequence.queries.begin, problem.value_width),
      out(as_const(problem.out), batch, head, sequence.queries.begin, problem.value_width);
  float* const to = space.rows + number * kRowNumbers;
  double sink_sum = 0;
#pragma unroll
  for (int r = thread / kRowLanes; r < kRowBlock; r += kRowThreads / kRowLanes) {
    const int query = first + r;
    const bool there = query < queries;
    Sum delta = dot_rows<Element, Sum>(grad_out, out, there ? query : 0);
    if (thread % kRowLanes != 0) continue;
    float high = -lowest<float>(), low = 0;
    if (there) {
      const int64_t at = batch * problem.lse_stride[0] + head * problem.lse_stride[1] + sequence.queries.begin + query;
      const float lse = static_cast<const float*>(problem.lse)[at];
      if (gradients.grad_lse) delta -= static_cast<const float*>(gradients.grad_lse)[at];
      if (lse != lowest<float>()) {
        const double binary = (static_cast<double>(lse) + static_cast<const float*>(problem.lse_low)[at]) / kLn2;
        high = static_cast<float>(binary);
        const float rest = static_cast<float>(binary - high);
        low = rest - rest == 0 ? rest : 0;
        if (space.sinks)
          sink_sum -= ::exp(static_cast<const float*>(problem.sinks)[head] - binary * kLn2) * static_cast<double>(delta);
      } else {
        delta = 0;
      }
    }
    to[r] = high;
    to[kRowBlock + r] = low;
    to[2 * kRowBlock + r] = there ? static_cast<float>(delta) : 0;
  }
  if (space.sinks) {
    __shared__ double parts[kRowThreads / kRowLanes];
    if (thread % kRowLanes == 0) parts[thread / kRowLanes] = sink_sum;
    __syncthreads();
    if (thread == 0) {
      double sum = 0;
      for (const double part : parts) sum += part;
      space.sinks[number] = sum;
    }
  }
}

// A lane takes the rows r and r + 8 of eight columns, which are half a tile's lanes.
template <class Element>
__global__ void __launch_bounds__(kRowThreads) store_queries(const __grid_constant__ RowArguments arguments) {
  const AttentionProblem& problem = arguments.problem;
  const BackwardSpace& space = arguments.space;
  const BlockPlace place = place_of(problem, space.list, blockIdx.x, false, kRowBlock, false);
  const Sequence sequence = sequence_of(problem, place.sequence);
  const int64_t left = sequence.queries.count - place.block * kRowBlock;
  if (place.block < 0 || left <= 0) return;
  const MutableView4& view = arguments.gradients.grad_query;
  Element* const to = static_cast<Element*>(view.data) + place.sequence * view.stride[0] + place.head * view.stride[1] +
                      (sequence.queries.begin + place.block * kRowBlock) * view.stride[2];
  const float* const sums = space.sums + blockIdx.x * kRowBlock * space.width;
  const float scale = static_cast<float>(problem.scale);
  const bool vectors = view.stride[3] == 1 && problem.width % 8 == 0 && misalignment(to) == 0 &&
                       view.stride[2] * static_cast<int>(sizeof(Element)) % kVectorBytes == 0;
  const int across = static_cast<int>(problem.width + 7) / 8;
  for (int index = static_cast<int>(threadIdx.x); index < kRowBlock / 2 * across; index += kRowThreads) {
    const int column = index % across, pair = index / across, row = pair / 8 * 16 + pair % 8;
    const float* const tile = sums + (pair / 8 * (space.width / 8) + column) * 128;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (row + 8 * half >= left) break;
      float x[8];
#pragma unroll
      for (int n = 0; n < 8; ++n) x[n] = scale * tile[place_in_sum(pair % 8 * 4 + n / 2, 2 * half + n % 2)];
      Element* const at = to + (row + 8 * half) * view.stride[2] + column * 8 * view.stride[3];
      if (vectors) {
#pragma unroll
        for (int n = 0; n < 8; n += kPerVector<Element>) *reinterpret_cast<uint4*>(at + n) = pack<Element>(x + n);
      } else {
#pragma unroll
        for (int n = 0; n < 8; ++n)
          if (column * 8 + n < problem.width) at[n * view.stride[3]] = narrow<Element>(x[n]);
      }
    }
  }
}

// A warp sums the blocks of one head of one sequence.
__global__ void __launch_bounds__(kRowThreads) sum_sinks(const __grid_constant__ RowArguments arguments) {
  const AttentionProblem& problem = arguments.problem;
  const int64_t plane = (blockIdx.x * int64_t{kRowThreads} + threadIdx.x) / kWarp;
  if (plane >= problem.batch * problem.heads) return;
  const int64_t batch = plane / problem.heads, head = plane % problem.heads;
  const int64_t first = first_row_block(problem, arguments.space.list, batch, head);
  const int64_t count = (sequence_of(problem, batch).queries.count + kRowBlock - 1) / kRowBlock;
  double sum = 0;
  for (int64_t n = threadIdx.x % kWarp; n < count; n += kWarp) sum += arguments.space.sinks[first + n];
#pragma unroll
  for (int step = kWarp / 2; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
  if (threadIdx.x % kWarp == 0) static_cast<float*>(arguments.gradients.grad_sinks)[plane] = static_cast<float>(sum);
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

void prepare_backward(const AttentionProblem& problem, const AttentionGradients& gradients, const BackwardSpace& space,
                      CUstream_st* stream) {
  if (space.list.count() == 0) return;
  visit_element(problem.dtype, [&]<class Element>(Element) {
    launch<prepare_rows<Element>>(RowArguments{problem, gradients, space}, space.list.count(), kRowThreads, 0, stream);
  });
}

void finish_queries(const AttentionProblem& problem, const AttentionGradients& gradients, const BackwardSpace& space,
                    CUstream_st* stream) {
  if (space.list.count() == 0) return;
  visit_element(problem.dtype, [&]<class Element>(Element) {
    launch<store_queries<Element>>(RowArguments{problem, gradients, space}, space.list.count(), kRowThreads, 0, stream);
  });
}

void finish_sinks(const AttentionProblem& problem, const AttentionGradients& gradients, const BackwardSpace& space,
                  CUstream_st* stream) {
  const int64_t planes = problem.batch * problem.heads;
  if (planes == 0) return;
  constexpr int kPlanes = kRowThreads / kWarp;
  launch<sum_sinks>(RowArguments{problem, gradients, space}, (planes + kPlanes - 1) / kPlanes, kRowThreads, 0, stream);
}

}  // namespace flash_online::cuda
