#include "../../hw/launch.h"
#include "../../hw/pdl.cuh"
#include "../sm80/load.cuh"
#include "backward_workspace.cuh"
#include "dq_accum.cuh"
#include "scores.cuh"
#include "store_rows.cuh"
#include "visit_element.cuh"

namespace flash_online::cuda {

namespace {

struct WorkspaceArguments {
  AttentionProblem problem;
  AttentionGradients gradients;
  BackwardWorkspace space;
  unsigned* counter;  // to be zeroed; or null
  float lowest_score;  // ScoreMod's
  float score_scale = 1;  // ScoreMod's
  float lse_shift = 0, delta_scale = 1;  // see prepare_backward(); of lse in base 2
  KvGradPartials kv_grad_partials = {};
};

constexpr int kRowThreads = 256;
constexpr int kRowLanes = 8;  // lanes that share a row

// Dot products of rows of two tensors, accumulated in Sum, for the rows that kRowLanes lanes share; every lane gets them. All
// rows are read at once, since a CTA spends its time waiting for these reads.
template <class Element, class Sum, int kRows>
__device__ __forceinline__ void dot_rows(const HeadRows<Element>& a, const HeadRows<Element>& b, const int (&rows)[kRows],
                                         Sum (&sums)[kRows]) {
  constexpr int kPer = kPerVector<Element>;
  const int lane_of_row = static_cast<int>(threadIdx.x) % kRowLanes;
#pragma unroll
  for (int r = 0; r < kRows; ++r) sums[r] = 0;
  if (a.vectors && b.vectors && a.columns % kPer == 0) {
    for (int c = lane_of_row * kPer; c < a.columns; c += kRowLanes * kPer) {
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
      for (int c = lane_of_row; c < a.columns; c += kRowLanes)
        sums[r] += static_cast<Sum>(widen(x[c * a.column_stride])) * widen(y[c * b.column_stride]);
    }
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r)
#pragma unroll
    for (int step = kRowLanes / 2; step > 0; step /= 2) sums[r] += __shfl_xor_sync(~0u, sums[r], step);
}

// Dot products of sixteen rows of float32 tensors from `first` on, each as a sum of two floats. They are computed on the tensor
// cores from the bf16 digits of floats, as the backward kernels compute grad_out * value: if a query sees a single key, its
// output is that key's value, and delta must then equal the gradient of the weight to the last digit.
__device__ __forceinline__ void multiply_rows_precisely(const HeadRows<float>& out, const HeadRows<float>& grad_out, int first,
                                                        int queries, float2* products) {
  using F = Fragments<float>;
  Accumulator<1, 2> leading;
  CompensatedAccumulator<float, 1, 2> compensation;
  clear(leading);
#pragma unroll 1
  for (int column = 0; column < out.columns; column += F::kDepth) {
    typename F::Left left[1];
    typename F::Right right[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = first + 8 * half + quad();
      const auto words_of = [&](const HeadRows<float>& from, int c, unsigned (&words)[F::kDigits]) {
        const float* const at = from.data + row * from.row_stride + c * from.column_stride;
        F::to_digits(words, row < queries && c < from.columns ? at[0] : 0,
                     row < queries && c + 1 < from.columns ? at[from.column_stride] : 0);
      };
#pragma unroll
      for (int k_half = 0; k_half < 2; ++k_half) {
        unsigned x[F::kDigits], y[F::kDigits];
        words_of(out, column + 8 * k_half + 2 * lane_in_quad(), x);
        words_of(grad_out, column + 8 * k_half + 2 * lane_in_quad(), y);
#pragma unroll
        for (int digit = 0; digit < F::kDigits; ++digit)
          left[0].words[digit][2 * k_half + half] = x[digit], right[half].words[digit][k_half] = y[digit];
      }
    }
    compensation.multiply(leading, 0, left, right, 0);
  }
  clear_low_if_infinite(leading, compensation);
  // The product multiplies every row with every other: only its diagonal is wanted.
  for_each(leading, [&](float x, int, int half, int e) {
    if (e / 2 == half && 2 * lane_in_quad() + e % 2 == quad())
      products[8 * half + quad()] = make_float2(x, compensation.low[0][half][e]);
  });
}

// A thread's inputs for its query: lse, its low part, and the gradient of lse.
struct LseInputs {
  float lse = lowest<float>(), lse_low = 0, grad_lse = 0;
};

__device__ __forceinline__ LseInputs load_lse(const AttentionProblem& problem, const AttentionGradients& gradients,
                                              const TileCoord& coord, const Sequence& sequence, int query) {
  LseInputs inputs;
  if (static_cast<int>(threadIdx.x) < kStatsRows && query < static_cast<int>(sequence.queries.count)) {
    const int64_t at =
        coord.sequence * problem.lse_stride[0] + coord.head * problem.lse_stride[1] + sequence.queries.begin + query;
    inputs.lse = static_cast<const float*>(problem.lse)[at];
    if (problem.lse_low) inputs.lse_low = static_cast<const float*>(problem.lse_low)[at];
    if (gradients.grad_lse) inputs.grad_lse = static_cast<const float*>(gradients.grad_lse)[at];
  }
  return inputs;
}

// Zeros the rows of grad_query before a packed sequence, and after the last one.
template <class Element>
__device__ __forceinline__ void clear_padding_queries(const AttentionProblem& problem, const AttentionGradients& gradients,
                                                      const TileCoord& coord) {
  const auto clear = [&](int64_t n) {
    const Rows rows = padding_rows(problem.query_starts, problem.batch, n, problem.queries, problem.total_queries);
    clear_rows<Element, kRowThreads>(gradients.grad_query, coord.head, problem.head_dim, rows);
  };
  clear(coord.sequence);
  if (coord.sequence == problem.batch - 1) clear(problem.batch);
}

__device__ __forceinline__ void clear_dq_accum(const BackwardWorkspace& space, int64_t tile) {
  float4* const dq_accum = reinterpret_cast<float4*>(space.dq_accum + tile * kStatsRows * space.head_dim);
  for (int n = static_cast<int>(threadIdx.x); n < kStatsRows / 4 * static_cast<int>(space.head_dim); n += kRowThreads)
    dq_accum[n] = make_float4(0, 0, 0, 0);
}

// The sum of grad_out * out for each query of the tile.
template <class Element, class Sum>
__device__ __forceinline__ void multiply_rows(const HeadRows<Element>& grad_out, const HeadRows<Element>& out, int first,
                                              int queries, Sum (&products)[kStatsRows]) {
  constexpr int kStep = kRowThreads / kRowLanes, kRows = kStatsRows / kStep;
  const int thread = static_cast<int>(threadIdx.x);
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

// Writes a query's column of the operand; `lse` is in the units of the scores' product.
__device__ __forceinline__ void store_as_operand(StatsOperand& to, int query, double lse, float delta) {
  constexpr double kMost = 3e38;  // stands for infinity: bfloat16 holds it, and a score less it has the weight 0
  using Operand = StatsOperand;
  uint16_t (&rows)[Operand::kRows][Operand::kColumns] = to.bits[query / Operand::kColumns];
  const int column = query % Operand::kColumns;
  const auto store_digits = [&](int first, int count, double rest) {
    for (int i = 0; i < count; ++i) {
      const __nv_bfloat16 digit = __double2bfloat16(rest);
      rows[first + i][column] = __bfloat16_as_ushort(digit);
      rest -= static_cast<double>(__bfloat162float(digit));
      if (rest - rest != 0) rest = 0;
    }
  };
  store_digits(Operand::kLse, Operand::kLseDigits, lse > kMost ? -kMost : lse < -kMost ? kMost : -lse);
  store_digits(Operand::kDelta, Operand::kDeltaDigits, -static_cast<double>(delta));
  for (int row = Operand::kLse + Operand::kLseDigits; row < Operand::kRows; ++row) rows[row][column] = 0;
}

// Writes the row statistics of the thread's query, and returns its share of the gradient of the head's sink. `products` are the
// sums of grad_out * out; of float32 problems with all digits, precise_products are these as sums of two floats. Low parts of
// infinities and NaN are 0. `is_large` is set for a row of LargeRows.
template <bool kFloat32, class Sum>
__device__ __forceinline__ double store_row_stats(const WorkspaceArguments& arguments, int64_t tile, int64_t head,
                                                  const LseInputs& inputs, const Sum* products, const float2* precise_products,
                                                  StatsOperand& operand, bool& is_large) {
  const AttentionProblem& problem = arguments.problem;
  const BackwardWorkspace& space = arguments.space;
  const int thread = static_cast<int>(threadIdx.x);
  double sink = 0;
  float delta = 0, delta_low = 0;
  float high = -lowest<float>(), low = 0;
  if (inputs.lse != lowest<float>()) {
    if constexpr (kFloat32) {
      const double product = problem.tf32 ? static_cast<double>(products[thread])
                                          : static_cast<double>(precise_products[thread].x) + precise_products[thread].y,
                   whole = product - inputs.grad_lse;
      delta = static_cast<float>(whole);
      const float rounding = static_cast<float>(whole - delta);
      delta_low = rounding - rounding == 0 ? rounding : 0;
    } else {
      delta = products[thread] - inputs.grad_lse;
    }
    const double lse_base2 = (static_cast<double>(inputs.lse) + inputs.lse_low) / kLn2,
                 shifted = lse_base2 + arguments.lse_shift;
    delta *= arguments.delta_scale;
    high = static_cast<float>(shifted);
    const float rounding = static_cast<float>(shifted - high);
    low = rounding - rounding == 0 ? rounding : 0;
    const double size = ::fabs(lse_base2);
    if (inputs.lse <= kLowestBFloat16) {  // see lowest_lse()
      high = arguments.lowest_score, low = inputs.lse_low * kLog2E + arguments.lse_shift;
    } else if (size >= kLargeLse<std::conditional_t<kFloat32, float, __half>> && size < INFINITY) {
      is_large = true;
      high = INFINITY, low = delta = delta_low = 0;
    }
    if (space.sink_partials)
      sink = -::exp(static_cast<const float*>(problem.sinks)[head] - lse_base2 * kLn2) *
             (static_cast<double>(products[thread]) - inputs.grad_lse);
  }
  if constexpr (!kFloat32)
    if (space.stats_operand) {
      store_as_operand(operand, thread, (static_cast<double>(high) + low) / arguments.score_scale, delta);
      return sink;
    }
  float* const to = space.row_stats + tile * kRowStats + thread;
  to[0] = high;
  to[kStatsRows] = low;
  to[2 * kStatsRows] = delta;
  if constexpr (kFloat32) space.delta_low(tile)[thread] = delta_low;
  return sink;
}

// Marks the rows of a tile; `is_large`: that of the thread's query.
__device__ __forceinline__ void mark_large_rows(const LargeRows& large, int64_t tile, bool is_large) {
  const unsigned marks = __ballot_sync(~0u, is_large);
  const int thread = static_cast<int>(threadIdx.x);
  if (thread >= kStatsRows || thread % kWarpSize != 0) return;
  large.marks[LargeRows::kWords * tile + thread / kWarpSize] = marks;
  if (marks != 0) large.progress->token = large.token;
}

// Sums the shares of the tile's queries in a fixed order. shares: shared memory.
__device__ __forceinline__ void store_sink_partial(double* to, double sink, double (&shares)[kStatsRows]) {
  const int thread = static_cast<int>(threadIdx.x);
  if (thread < kStatsRows) shares[thread] = sink;
  __syncthreads();
  if (thread == 0) {
    double sum = 0;
    for (const double share : shares) sum += share;
    *to = sum;
  }
}

// One CTA per tile of kStatsRows queries, the last tile first: the next kernel starts with the first tiles, and their zeroed
// accumulators are then the ones most likely to be still in the cache.
template <class Element>
__global__ void __launch_bounds__(kRowThreads) prepare_backward_kernel(const __grid_constant__ WorkspaceArguments arguments) {
  constexpr bool kFloat32 = std::is_same_v<Element, float>;
  using Sum = std::conditional_t<kFloat32, double, float>;
  const AttentionProblem& problem = arguments.problem;
  const AttentionGradients& gradients = arguments.gradients;
  const BackwardWorkspace& space = arguments.space;
  const int64_t tile = gridDim.x - 1 - blockIdx.x;
  const int thread = static_cast<int>(threadIdx.x);
  launch_dependents();
  if (arguments.counter && tile == 0 && thread == 0) *arguments.counter = 0;
  if (tile == 0 && thread == 0) space.large_rows.progress->next = space.large_rows.progress->queries_done = 0;

  const TileCoord coord = tile_coord(problem, space.list, tile, false, kStatsRows, false);
  const int64_t batch = coord.sequence, head = coord.head;
  const Sequence sequence = sequence_of(problem, batch);
  const int queries = static_cast<int>(sequence.queries.count);
  if (problem.query_starts && coord.block == 0) clear_padding_queries<Element>(problem, gradients, coord);
  if (space.sink_partials && thread == 0) space.sink_partials[tile] = 0;
  if (coord.block < 0 || coord.block * kStatsRows >= queries) return mark_large_rows(space.large_rows, tile, false);

  const int first = static_cast<int>(coord.block) * kStatsRows;
  const HeadRows<Element> grad_out(gradients.grad_out, batch, head, sequence.queries.begin, problem.head_dim_v),
      out(as_const(problem.out), batch, head, sequence.queries.begin, problem.head_dim_v);
  __shared__ Sum products[kStatsRows];
  __shared__ float2 precise_products[kFloat32 ? kStatsRows : 1];
  // These loads come first, to overlap with the products.
  const LseInputs inputs = load_lse(problem, gradients, coord, sequence, first + thread);
  if (space.dq_accum) clear_dq_accum(space, tile);
  const bool precise = kFloat32 && !problem.tf32;  // with fewer digits no bits have to be those of the backward kernels
  // The gradient of a sink is a sum over all queries, which needs every digit of the products.
  if (!precise || space.sink_partials) multiply_rows(grad_out, out, first, queries, products);
  if constexpr (kFloat32)
    if (precise)
      for (int r = thread / kWarpSize * 16; r < kStatsRows; r += kRowThreads / kWarpSize * 16)
        multiply_rows_precisely(out, grad_out, first + r, queries, precise_products + r);
  __syncthreads();
  __shared__ __align__(16) StatsOperand operand;
  double sink = 0;
  bool is_large = false;
  if (thread < kStatsRows)
    sink = store_row_stats<kFloat32>(arguments, tile, head, inputs, products, precise_products, operand, is_large);
  mark_large_rows(space.large_rows, tile, is_large);
  if (!kFloat32 && space.stats_operand) {
    __syncthreads();
    if (thread < static_cast<int>(sizeof(operand) / sizeof(uint4)))
      reinterpret_cast<uint4*>(space.stats_operand + tile)[thread] = reinterpret_cast<const uint4*>(&operand)[thread];
  }
  if (space.sink_partials) {
    __shared__ double shares[kStatsRows];
    store_sink_partial(space.sink_partials + tile, sink, shares);
  }
}

constexpr int kConvertTiles = 4;  // tiles of 16 x 8 that a warp converts at a time

// Adds the partials of a cut tile of keys: kConvertTiles * 8 columns of dK or dV by a CTA, 16 keys by a warp.
template <class Element>
__device__ __forceinline__ void add_kv_grad_partials(const WorkspaceArguments& arguments, int cta) {
  const AttentionProblem& problem = arguments.problem;
  const KvGradPartials& partials = arguments.kv_grad_partials;
  constexpr int kColumns = kConvertTiles * 8;
  const int panels = (partials.head_dim + partials.head_dim_v) / kColumns, panel = cta % panels,
            band = static_cast<int>(threadIdx.x) / kWarpSize;
  if (band * 16 >= partials.keys) return;
  const bool of_values = panel * kColumns >= partials.head_dim;
  const int width = of_values ? partials.head_dim_v : partials.head_dim,
            column = panel * kColumns - (of_values ? partials.head_dim : 0);
  const TilePart first = partials.cuts.first_part(cta / panels);
  const int64_t size = partials.slot_size();
  const float* from = partials.data + first.slot * size + (of_values ? partials.keys * partials.head_dim : 0) +
                      (band * (width / 8) + column / 8) * 128 + dq_accum_offset(lane(), 0);
  Accumulator<1, kConvertTiles> sum;
#pragma unroll
  for (int t = 0; t < kConvertTiles; ++t) dq_accum_read(from + t * 128, sum[0][t]);
#pragma unroll 4
  for (unsigned n = 1; n < first.count; ++n) {
    from += size;
#pragma unroll
    for (int t = 0; t < kConvertTiles; ++t) {
      float x[4];
      dq_accum_read(from + t * 128, x);
#pragma unroll
      for (int e = 0; e < 4; ++e) sum[0][t][e] += x[e];
    }
  }
  const TileCoord at = tile_coord(problem, partials.list, first.tile, true, partials.keys, partials.reversed);
  const MutableView4& view = of_values ? arguments.gradients.grad_value : arguments.gradients.grad_key;
  const int64_t key = at.block * partials.keys;
  Element* const to = static_cast<Element*>(view.data) + at.sequence * view.stride[0] + at.head * view.stride[1] +
                      key * view.stride[2] + column * view.stride[3];
  const int64_t exist = of_values ? problem.head_dim_v : problem.head_dim;
  store_rows(sum, of_values ? 1.0f : static_cast<float>(problem.scale), band * 16, to, view.stride[2], view.stride[3],
             static_cast<int>(min(problem.keys - key, int64_t{partials.keys})), static_cast<int>(exist) - column);
}

// A warp converts four 16 x 8 tiles at a time, which lie one after another in dq_accum and side by side in grad_query.
// kAddsPartials: the first CTAs add partials of dK and dV.
template <class Element, bool kAddsPartials>
__global__ void __launch_bounds__(kRowThreads) convert_dq_accum_kernel(const __grid_constant__ WorkspaceArguments arguments) {
  const AttentionProblem& problem = arguments.problem;
  const BackwardWorkspace& space = arguments.space;
  grid_dependency_wait();
  const int64_t tile = gridDim.x - 1 - blockIdx.x;
  if constexpr (kAddsPartials)
    if (tile >= space.list.count())
      return add_kv_grad_partials<Element>(arguments, static_cast<int>(tile - space.list.count()));
  const TileCoord coord = tile_coord(problem, space.list, tile, false, kStatsRows, false);
  const Sequence sequence = sequence_of(problem, coord.sequence);
  const int64_t rows = sequence.queries.count - coord.block * kStatsRows;
  if (coord.block < 0 || rows <= 0) return;
  const MutableView4& view = arguments.gradients.grad_query;
  Element* const to = static_cast<Element*>(view.data) + coord.sequence * view.stride[0] + coord.head * view.stride[1] +
                      (sequence.queries.begin + coord.block * kStatsRows) * view.stride[2];
  const float* const dq_accum = space.dq_accum + tile * kStatsRows * space.head_dim;
  const float scale = static_cast<float>(problem.scale);
  const int head_dim = static_cast<int>(problem.head_dim), row_tiles = static_cast<int>(space.head_dim) / 8;
  constexpr int kTiles = kConvertTiles, kBands = kStatsRows / 16;
  const int chunks = ceil_div(row_tiles, kTiles);
#pragma unroll 2
  for (int chunk = static_cast<int>(threadIdx.x) / kWarpSize; chunk < kBands * chunks; chunk += kRowThreads / kWarpSize) {
    const int band = chunk % kBands, first = chunk / kBands * kTiles;  // a band is 16 rows; `first` counts its tiles
    Accumulator<1, kTiles> x;
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      if (first + t >= row_tiles) break;
      dq_accum_read(dq_accum + (band * row_tiles + first + t) * 128 + dq_accum_offset(lane(), 0), x[0][t]);
    }
    store_rows(x, scale, band * 16, to + first * 8 * view.stride[3], view.stride[2], view.stride[3],
               static_cast<int>(min(rows, int64_t{kStatsRows})), head_dim - first * 8);
  }
}

// One warp per head of a sequence sums the partials of its tiles.
__global__ void __launch_bounds__(kRowThreads)
    reduce_sink_partials_kernel(const __grid_constant__ WorkspaceArguments arguments) {
  const AttentionProblem& problem = arguments.problem;
  const int64_t plane = (blockIdx.x * int64_t{kRowThreads} + threadIdx.x) / kWarpSize;
  if (plane >= problem.batch * problem.heads) return;
  const int64_t batch = plane / problem.heads, head = plane % problem.heads;
  const int64_t first = first_row_block(problem, arguments.space.list, batch, head);
  const int64_t count = ceil_div(sequence_of(problem, batch).queries.count, kStatsRows);
  double sum = 0;
  for (int64_t n = threadIdx.x % kWarpSize; n < count; n += kWarpSize) sum += arguments.space.sink_partials[first + n];
#pragma unroll
  for (int step = kWarpSize / 2; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
  if (threadIdx.x % kWarpSize == 0) static_cast<float*>(arguments.gradients.grad_sinks)[plane] = static_cast<float>(sum);
}

}  // namespace

void prepare_backward(const AttentionProblem& problem, const AttentionGradients& gradients, const BackwardWorkspace& space,
                      CUstream_st* stream, unsigned* counter, bool scaled_weights) {
  const double keep = scaled_weights ? 1 - problem.dropout : 1;
  if (space.list.count() == 0) return;
  visit_element(problem.dtype, [&]<class Element>(Type<Element>) {
    launch<prepare_backward_kernel<Element>>(WorkspaceArguments{.problem = problem,
                                                                .gradients = gradients,
                                                                .space = space,
                                                                .counter = counter,
                                                                .lowest_score = ScoreMod(problem).lowest_score,
                                                                .score_scale = ScoreMod(problem).scale,
                                                                .lse_shift = static_cast<float>(std::log2(keep)),
                                                                .delta_scale = static_cast<float>(keep)},
                                             space.list.count(), kRowThreads, 0, stream);
  });
}

void convert_dq_accum(const AttentionProblem& problem, const AttentionGradients& gradients, const BackwardWorkspace& space,
                      CUstream_st* stream, const KvGradPartials& partials) {
  if (space.list.count() == 0) return;
  const int64_t partial_ctas = partials.cuts.cut_tiles() * ((partials.head_dim + partials.head_dim_v) / (kConvertTiles * 8));
  visit_element(problem.dtype, [&]<class Element>(Type<Element>) {
    const WorkspaceArguments arguments{.problem = problem,
                                       .gradients = gradients,
                                       .space = space,
                                       .counter = nullptr,
                                       .lowest_score = 0,
                                       .kv_grad_partials = partials};
    const int64_t tiles = space.list.count();
    if constexpr (sizeof(Element) == 2)
      if (partial_ctas > 0)
        return launch<convert_dq_accum_kernel<Element, true>>(arguments, tiles + partial_ctas, kRowThreads, 0, stream, true);
    launch<convert_dq_accum_kernel<Element, false>>(arguments, tiles, kRowThreads, 0, stream, true);
  });
}

void reduce_sink_partials(const AttentionProblem& problem, const AttentionGradients& gradients, const BackwardWorkspace& space,
                          CUstream_st* stream) {
  const int64_t planes = problem.batch * problem.heads;
  if (planes == 0) return;
  launch<reduce_sink_partials_kernel>(
      WorkspaceArguments{.problem = problem, .gradients = gradients, .space = space, .counter = nullptr, .lowest_score = 0},
      ceil_div(planes, kRowThreads / kWarpSize), kRowThreads, 0, stream);
}

}  // namespace flash_online::cuda
