// Gradients of rows with a large lse. docs/design/large_scores.md draws the pass.
//
// CTAs take items from one list. Tiles of queries come first: the row statistics of their marked rows, computed from the inputs
// alone, and dQ. When all of them are done, tiles of keys (dK and dV) and rows of the mask's gradient follow. One CTA computes
// each sum, in a fixed order. Products, scores and sums are in double.
#include <algorithm>
#include <atomic>

#include "../../../core/visit.h"
#include "../../hw/launch.h"
#include "../../hw/pdl.cuh"
#include "../../hw/vector.cuh"
#include "../common/backward_workspace.cuh"
#include "../common/dropout.cuh"
#include "../common/scores.cuh"
#include "../common/tile_list.cuh"
#include "../common/visit_element.cuh"
#include "../sm80/load.cuh"
#include "head_dims.h"
#include "large_rows.cuh"

namespace flash_online::cuda {

LargeRows::LargeRows(ScratchAllocator<>& scratch, int64_t tiles)
    : marks(scratch.take<uint32_t>(tiles * kWords)),
      stats(scratch.take<Stats>(tiles * kWords * kWarpSize)),
      progress(scratch.take<Progress>(1)) {
  static std::atomic<uint64_t> calls = 0x9e3779b97f4a7c15;
  token = calls.fetch_add(1, std::memory_order_relaxed);
}

namespace {

static_assert(LargeRows::kWords * kWarpSize == kStatsRows);

constexpr int kThreads = 256, kWarps = kThreads / kWarpSize, kMostColumns = 512;
static_assert([]<int... kHeadDims>(std::integer_sequence<int, kHeadDims...>) {
  return ((kHeadDims <= kMostColumns) && ...);
}(HeadDims{}));
constexpr int kRows = 4, kShares = kStatsRows / kRows;  // rows of an item of queries; items per tile
constexpr int kKeys = 8, kKeysPerThread = kStatsRows * kKeys / kThreads;  // of an item of keys
constexpr int kSlots = 2 * kMostColumns / kThreads;  // columns of dK and dV per thread

struct LargeRowsArguments {
  AttentionProblem problem;
  AttentionGradients gradients;
  BackwardWorkspace space;
  TileList key_list;  // tiles of kKeys keys; its heads are the kv_grad_heads
  int mask_chunks, mask_items;  // a row of the mask's gradient in chunks of kThreads keys; 0: it is not wanted
  double keep_scale;  // 1 / (1 - dropout)
};

// A row's partial softmax, and the sum of weights times their gradients.
struct RowState {
  OnlineSoftmax<double> softmax;
  double weighted = 0;

  __device__ __forceinline__ void add(double score, double grad_weight) {
    weighted *= softmax.absorb(score);
    weighted += softmax.weight(score) * grad_weight;
  }
  __device__ __forceinline__ void merge(const RowState& other) {
    const double before = softmax.max;
    softmax.merge(other.softmax);
    weighted =
        weighted * softmax.rescale(before, softmax.max) + other.weighted * softmax.rescale(other.softmax.max, softmax.max);
  }
};

struct RowsShared {  // of an item of queries, and of one of the mask's gradient
  double query[kRows][kMostColumns], grad_out[kRows][kMostColumns];
  RowState states[kWarps][kRows];
  double grads[kRows][kThreads], sums[kThreads];
};
struct KeysShared {
  static constexpr int kPitch = kMostColumns + 2;  // without conflicts of banks where lanes read two keys each
  double key[kKeys][kPitch], value[kKeys][kPitch];
  double weights[kStatsRows][kKeys], grads[kStatsRows][kKeys];
  int rows[kStatsRows];
};
constexpr int kSharedBytes = static_cast<int>(std::max(sizeof(RowsShared), sizeof(KeysShared)));

// Dot products of kLeft rows in shared memory, `pitch` numbers apart, and one in global memory.
template <int kLeft, class Element>
__device__ __forceinline__ void dot(double (&sums)[kLeft], const double* left, int pitch, const HeadRows<Element>& right,
                                    int64_t row) {
  constexpr int kPer = kPerVector<Element>;
  const Element* const data = right.data + row * right.row_stride;
#pragma unroll
  for (double& sum : sums) sum = 0;
  if (right.vectors && right.columns % kPer == 0) {
#pragma unroll 1
    for (int c = 0; c < right.columns; c += kPer) {
      float x[kPer];
      unpack<Element>(*reinterpret_cast<const uint4*>(data + c), x);
#pragma unroll
      for (int n = 0; n < kPer; ++n)
#pragma unroll
        for (int l = 0; l < kLeft; ++l) sums[l] += left[l * pitch + c + n] * x[n];
    }
  } else {
#pragma unroll 1
    for (int c = 0; c < right.columns; ++c) {
      const double x = widen(data[c * right.column_stride]);
#pragma unroll
      for (int l = 0; l < kLeft; ++l) sums[l] += left[l * pitch + c] * x;
    }
  }
}

// Loads a row for a CTA, zeros where there is none; whether the thread has seen a number that is not 0.
template <class Element>
__device__ __forceinline__ bool load_row(double* to, const HeadRows<Element>& from, int64_t row, bool exists = true) {
  bool any = false;
  for (int c = static_cast<int>(threadIdx.x); c < from.columns; c += kThreads) {
    to[c] = exists ? widen(from.data[row * from.row_stride + c * from.column_stride]) : 0;
    any |= to[c] != 0;
  }
  return any;
}

// One head of a sequence: its tensors, and what makes scores and gradients of products.
template <class Element>
struct LargeRowsHead {
  const AttentionProblem& problem;
  const Sequence& sequence;
  HeadRows<Element> query, grad_out, key, value;
  HeadMask mask;
  HeadSparsity sparsity;
  Dropout dropout;
  DoubleScoreMod score_mod;
  double keep_scale;

  __device__ LargeRowsHead(const LargeRowsArguments& arguments, const Sequence& sequence_, int64_t batch, int64_t head)
      : problem(arguments.problem),
        sequence(sequence_),
        query(problem.query, batch, head, sequence.queries.begin, problem.head_dim),
        grad_out(arguments.gradients.grad_out, batch, head, sequence.queries.begin, problem.head_dim_v),
        key(problem.key, batch, head / (problem.heads / problem.key_heads), sequence.keys.begin, problem.head_dim),
        value(problem.value, batch, head / (problem.heads / problem.value_heads), sequence.keys.begin, problem.head_dim_v),
        mask(problem, batch, head),
        sparsity(problem, sequence, batch, head),
        dropout(problem, batch, head),
        score_mod(DoubleScoreMod::of<float>(problem, batch, head)),
        keep_scale(arguments.keep_scale) {}

  // The keys that a query sees by position.
  __device__ KeyRange keys_of(int query_index) const {
    KeyRange range = flash_online::keys_of(sequence.visible, query_index, sequence.keys.count);
    range.begin = max(range.begin, int64_t{0}), range.end = min(range.end, sequence.keys.count);
    return range;
  }

  // The natural score of a product, for a key that the query sees by position. `derivative`: d score / d (product * scale).
  __device__ double score(double product, int query_index, int key_index, double& derivative) const {
    const double distance = ::fabs(static_cast<double>(query_index + sequence.visible.offset - key_index));
    double x = product;
    derivative = 1;
    score_mod.for_each([&](const auto& modification) {
      const Modified<double> score = modification(x, distance);
      x = score.value;
      derivative *= score.derivative;
    });
    if (!sparsity.show(query_index, key_index)) return lowest<double>();
    if (!mask.data) return x;
    const char* const at = mask.data + query_index * mask.row_stride + key_index * mask.column_stride;
    visit_mask(mask.dtype, [&]<class T>(T) {
      if constexpr (std::is_same_v<T, bool>)
        x = *reinterpret_cast<const T*>(at) ? x : lowest<double>();
      else
        x += static_cast<double>(widen(*reinterpret_cast<const T*>(at)));
    });
    return x;
  }

  // The factor that dropout multiplies a weight by.
  __device__ double kept(int query_index, int key_index) const {
    if (!dropout) return 1;
    const unsigned bits = dropout.kept(query_index, key_index / Philox::kKeys);
    return bits >> key_index % Philox::kKeys & 1 ? keep_scale : 0;
  }
};

// The gradient of a score, and its weight after dropout.
struct WeightAndGrad {
  double weight = 0, grad = 0;
  __device__ __forceinline__ WeightAndGrad() {}
  __device__ __forceinline__ WeightAndGrad(double score, double kept, double grad_weight, const LargeRows::Stats& stats) {
    if (score == lowest<double>()) return;
    const double all = ::exp((score - stats.max) - stats.log_sum);
    weight = all * kept;
    grad = all * (grad_weight * kept - stats.delta);
  }
};

template <class Element>
struct LargeRowsKernel {
  const LargeRowsArguments& arguments;
  char* memory;  // kSharedBytes
  const AttentionProblem& problem = arguments.problem;
  const AttentionGradients& gradients = arguments.gradients;
  const LargeRows& large = arguments.space.large_rows;
  const int thread = static_cast<int>(threadIdx.x);

  using Head = LargeRowsHead<Element>;
  using Stats = LargeRows::Stats;

  __device__ uint64_t marks(int64_t tile) const {
    return large.marks[LargeRows::kWords * tile] | uint64_t{large.marks[LargeRows::kWords * tile + 1]} << kWarpSize;
  }
  __device__ static int take_first(uint64_t& rows) {
    const int row = __ffsll(static_cast<long long>(rows)) - 1;
    rows &= rows - 1;
    return row;
  }

  // Where lse has a query of a head.
  __device__ int64_t lse_index(const WorkTile& tile, int64_t head, int query) const {
    return tile.batch * problem.lse_stride[0] + head * problem.lse_stride[1] + tile.sequence.queries.begin + query;
  }

  // ---- queries ------------------------------------------------------------------------------------------------------------

  // Rows that are taken at once: bit r of `live` is set if there is a row r. The keys that any of them sees.
  struct RowGroup {
    int queries[kRows];
    unsigned live;
    int64_t begin, end;
    __device__ __forceinline__ bool sees(const Head& head, int r, int64_t key) const {
      if (!(live >> r & 1)) return false;
      const KeyRange range = head.keys_of(queries[r]);
      return key >= range.begin && key < range.end;
    }
  };

  // Calls f(r, score, derivative, kept, grad_weight) for the rows of the group that see `key`; kept: what dropout multiplies
  // the weight by; grad_weight: the gradient of the weight that is left.
  template <class F>
  __device__ __forceinline__ void for_each_score(const Head& head, const RowsShared& shared, const RowGroup& group, int64_t key,
                                                 F&& f) const {
    double products[kRows], grad_weights[kRows];
    dot(products, shared.query[0], kMostColumns, head.key, key);
    dot(grad_weights, shared.grad_out[0], kMostColumns, head.value, key);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (!group.sees(head, r, key)) continue;
      double derivative;
      const int query = group.queries[r], index = static_cast<int>(key);
      const double score = head.score(products[r], query, index, derivative);
      f(r, score, derivative, head.kept(query, index), grad_weights[r]);
    }
  }

  __device__ void take_queries(unsigned item) {
    RowsShared& shared = *reinterpret_cast<RowsShared*>(memory);
    const unsigned tile_index = item / kShares;
    const int first = static_cast<int>(item % kShares) * kRows;
    const unsigned marked = marks(tile_index) >> first & ((1u << kRows) - 1);
    if (marked == 0) return;
    const WorkTile tile(problem, tile_coord(problem, arguments.space.list, tile_index, false, kStatsRows, false));
    const Head head(arguments, tile.sequence, tile.batch, tile.head);
    RowGroup group{.queries = {}, .live = 0, .begin = tile.keys, .end = 0};
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const bool exists = marked >> r & 1;
      const int query = static_cast<int>(tile.block) * kStatsRows + first + r;
      load_row(shared.query[r], head.query, query, exists);
      group.queries[r] = query;
      // A row without a gradient, as of padding, adds nothing to any.
      const bool any = load_row(shared.grad_out[r], head.grad_out, query, exists);
      if (!__syncthreads_or(any || (exists && gradients.grad_lse))) continue;
      group.live |= 1u << r;
      const KeyRange range = head.keys_of(query);
      group.begin = min(group.begin, range.begin), group.end = max(group.end, range.end);
    }
    const unsigned dead = marked & ~group.live;
    if (dead != 0 && thread == 0)
      atomicAnd(large.marks + LargeRows::kWords * tile_index + first / kWarpSize, ~(dead << first % kWarpSize));
    if (group.live == 0) return;
    Stats stats[kRows];
    make_row_stats(stats, head, shared, tile, group);
#pragma unroll
    for (int r = 0; r < kRows; ++r)
      if (thread == 0 && (group.live >> r & 1)) large.stats[int64_t{tile_index} * kStatsRows + first + r] = stats[r];
    make_dq(head, shared, tile, group, stats);
  }

  // Row statistics from the scores. Where lse and out may be those of more keys than these, and are, they are taken as they
  // came.
  __device__ __forceinline__ void make_row_stats(Stats (&stats)[kRows], const Head& head, RowsShared& shared,
                                                 const WorkTile& tile, const RowGroup& group) {
    RowState states[kRows];
#pragma unroll 1
    for (int64_t key = group.begin + thread; key < group.end; key += kThreads) {
      for_each_score(head, shared, group, key, [&](int r, double score, double, double kept, double grad_weight) {
        states[r].add(score, grad_weight * kept);
      });
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      RowState& state = states[r];
#pragma unroll
      for (int step = kWarpSize / 2; step > 0; step /= 2) {
        RowState other;
        other.softmax.max = __shfl_xor_sync(~0u, state.softmax.max, step);
        other.softmax.sum = __shfl_xor_sync(~0u, state.softmax.sum, step);
        other.weighted = __shfl_xor_sync(~0u, state.weighted, step);
        state.merge(other);
      }
      if (thread % kWarpSize == 0) shared.states[thread / kWarpSize][r] = state;
    }
    __syncthreads();
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      RowState state;
      for (int warp = 0; warp < kWarps; ++warp) state.merge(shared.states[warp][r]);
      if (problem.sinks) state.add(static_cast<const float*>(problem.sinks)[tile.head], 0);
      stats[r] = {state.softmax.max, ::log(state.softmax.sum), state.weighted / state.softmax.sum};
      if (group.live >> r & 1) take_given(stats[r], shared.grad_out[r], tile, group.queries[r]);
    }
  }

  __device__ void take_given(Stats& stats, const double* grad_out, const WorkTile& tile, int query) const {
    const int64_t at = lse_index(tile, tile.head, query);
    if (!problem.lse_low) {
      const double lse = static_cast<const float*>(problem.lse)[at];
      constexpr double kRounding = 0x1p-20;  // of lse and of the products it was made of
      if (!(lse - (stats.max + stats.log_sum) <= kRounding * ::fabs(lse))) {
        double product[1];
        dot(product, grad_out, 0,
            HeadRows<Element>(as_const(problem.out), tile.batch, tile.head, tile.sequence.queries.begin, problem.head_dim_v),
            query);
        stats = {lse, 0, product[0]};
      }
    }
    if (gradients.grad_lse) stats.delta -= static_cast<const float*>(gradients.grad_lse)[at];
  }

  __device__ __forceinline__ void make_dq(const Head& head, RowsShared& shared, const WorkTile& tile, const RowGroup& group,
                                          const Stats (&stats)[kRows]) {
    // Threads side by side have a column each; groups of them share the keys.
    const int columns = head.key.columns,
              width = columns > 128  ? 256
                      : columns > 64 ? 128
                      : columns > 32 ? 64
                                     : 32,
              column_threads = kThreads / width, column_thread = thread / width, column = thread % width;
    static_assert(kThreads == 256);
    double sums[kMostColumns / kThreads][kRows] = {};
#pragma unroll 1
    for (int64_t first = group.begin; first < group.end; first += kThreads) {
      const int64_t key = first + thread;
      double grads[kRows] = {};
      if (key < group.end) {
        for_each_score(head, shared, group, key, [&](int r, double score, double derivative, double kept, double grad_weight) {
          grads[r] = WeightAndGrad(score, kept, grad_weight, stats[r]).grad * derivative;
        });
      }
      __syncthreads();  // all have done with the keys before
#pragma unroll
      for (int r = 0; r < kRows; ++r) shared.grads[r][thread] = grads[r];
      __syncthreads();
      const int count = static_cast<int>(min(group.end - first, int64_t{kThreads}));
#pragma unroll
      for (int slot = 0; slot < kMostColumns / kThreads; ++slot) {
        const int c = column + slot * kThreads;
        if (c >= columns) continue;
        const Element* const data = head.key.data + first * head.key.row_stride + c * head.key.column_stride;
#pragma unroll 4
        for (int n = column_thread; n < count; n += column_threads) {
          const double x = widen(data[n * head.key.row_stride]);
#pragma unroll
          for (int r = 0; r < kRows; ++r) sums[slot][r] += shared.grads[r][n] * x;
        }
      }
    }
    const MutableView4& view = gradients.grad_query;
    Element* const to = static_cast<Element*>(view.data) + tile.batch * view.stride[0] + tile.head * view.stride[1] +
                        tile.sequence.queries.begin * view.stride[2];
#pragma unroll
    for (int slot = 0; slot < kMostColumns / kThreads; ++slot)
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        __syncthreads();  // all have done with the sums before
        shared.sums[thread] = sums[slot][r];
        __syncthreads();
        const int c = column + slot * kThreads;
        if (column_thread > 0 || c >= columns || !(group.live >> r & 1)) continue;
        double sum = 0;
        for (int n = 0; n < column_threads; ++n) sum += shared.sums[n * width + column];
        to[group.queries[r] * view.stride[2] + c * view.stride[3]] = narrow<Element>(static_cast<float>(problem.scale * sum));
      }
  }

  // ---- keys ---------------------------------------------------------------------------------------------------------------

  using KeySums = double[kSlots][kKeys];

  // The keys of an item, and the blocks of queries that may see any of them.
  struct KeyGroup {
    WorkTile tile;  // its head is one of kv_grad_heads
    int key, last_key, begin, end;
  };

  __device__ void take_keys(unsigned item) {
    KeysShared& shared = *reinterpret_cast<KeysShared*>(memory);
    KeyGroup group{WorkTile(problem, tile_coord(problem, arguments.key_list, item, true, kKeys, false)), 0, 0, 0, 0};
    const WorkTile& tile = group.tile;
    group.key = static_cast<int>(tile.block) * kKeys, group.last_key = min(group.key + kKeys, tile.keys);
    if (tile.block < 0 || group.key >= tile.keys) return;
    const QueryRange range = queries_of_any(tile.sequence.visible, group.key, group.last_key, tile.queries);
    group.begin = static_cast<int>(max(range.begin, int64_t{0})) / kStatsRows;
    group.end = static_cast<int>(ceil_div(max(min(range.end, int64_t{tile.queries}), int64_t{0}), int64_t{kStatsRows}));
    KeySums sums = {};
    if (!add_blocks<true>(shared, sums, group)) return;
    // A contribution that is not finite may hide a sum that is: float16 ends at 65504. That of the other rows is then made
    // again.
    if (__syncthreads_or(!all_finite(group))) {
      add_blocks<false>(shared, sums, group);
      store<false>(sums, group);
    } else {
      store<true>(sums, group);
    }
  }

  // Adds the contribution of all rows that are marked, or of all that are not; false if there are none.
  template <bool kMarked>
  __device__ bool add_blocks(KeysShared& shared, KeySums& sums, const KeyGroup& group) {
    const WorkTile& tile = group.tile;
    const int heads = static_cast<int>(problem.heads / gradients.kv_grad_heads);
    bool any = false;
#pragma unroll 1
    for (int64_t index = tile.head * heads; index < (tile.head + 1) * heads; ++index) {
      const int64_t first_block = first_row_block(problem, arguments.space.list, tile.batch, index);
#pragma unroll 1
      for (int block = group.begin; block < group.end; ++block) {
        uint64_t rows = marks(first_block + block);
        if (!kMarked) {
          const int left = tile.queries - block * kStatsRows;
          rows = ~rows & (left < kStatsRows ? (uint64_t{1} << left) - 1 : ~uint64_t{0});
        }
        if (rows == 0) continue;
        const Head head(arguments, tile.sequence, tile.batch, index);
        if (!any)
          for (int n = 0; n < kKeys; ++n) {
            load_row(shared.key[n], head.key, group.key + n, group.key + n < group.last_key);
            load_row(shared.value[n], head.value, group.key + n, group.key + n < group.last_key);
          }
        any = true;
        if (thread < kStatsRows && (rows >> thread & 1)) shared.rows[__popcll(rows & ((uint64_t{1} << thread) - 1))] = thread;
        __syncthreads();
        const int query = block * kStatsRows;
        add_rows(head, shared, sums, query, __popcll(rows), group, [&](int row) {
          if constexpr (kMarked) return large.stats[(first_block + block) * kStatsRows + row];
          return given_stats(tile, index, query + row);
        });
      }
    }
    return any;
  }

  // The row statistics that the forward pass has left.
  __device__ Stats given_stats(const WorkTile& tile, int64_t head, int query) const {
    const int64_t at = lse_index(tile, head, query);
    const auto number = [&](const void* from) { return from ? double{static_cast<const float*>(from)[at]} : 0; };
    const double lse = number(problem.lse);
    const HeadRows<Element> grad_out(gradients.grad_out, tile.batch, head, tile.sequence.queries.begin, problem.head_dim_v),
        out(as_const(problem.out), tile.batch, head, tile.sequence.queries.begin, problem.head_dim_v);
    double delta = -number(gradients.grad_lse);
    for (int c = 0; c < out.columns; ++c)
      delta += static_cast<double>(widen(grad_out.data[query * grad_out.row_stride + c * grad_out.column_stride])) *
               widen(out.data[query * out.row_stride + c * out.column_stride]);
    return {lse == lowest<double>() ? -lse : lse, number(problem.lse_low), delta};
  }

  // Adds the contribution of `count` rows of a block of queries, which begins at `query`; stats_of(row) has their statistics.
  template <class StatsOf>
  __device__ __forceinline__ void add_rows(const Head& head, KeysShared& shared, KeySums& sums, int query, int count,
                                           const KeyGroup& group, StatsOf&& stats_of) {
    constexpr int kLanes = kKeys / kKeysPerThread;
    const int row = thread / kLanes, first = thread % kLanes * kKeysPerThread;
    if (row < count) {
      const int at = shared.rows[row];
      double products[kKeysPerThread], grad_weights[kKeysPerThread];
      dot(products, shared.key[first], KeysShared::kPitch, head.query, query + at);
      dot(grad_weights, shared.value[first], KeysShared::kPitch, head.grad_out, query + at);
      const KeyRange range = head.keys_of(query + at);
      const Stats stats = stats_of(at);
#pragma unroll
      for (int n = 0; n < kKeysPerThread; ++n) {
        const int index = group.key + first + n;
        WeightAndGrad result;
        double derivative = 1;
        if (index >= range.begin && index < range.end) {
          const double score = head.score(products[n], query + at, index, derivative);
          result = WeightAndGrad(score, head.kept(query + at, index), grad_weights[n], stats);
        }
        shared.weights[row][first + n] = result.weight, shared.grads[row][first + n] = result.grad * derivative;
      }
    }
    __syncthreads();
    const int columns = head.query.columns, all_columns = columns + head.grad_out.columns;
#pragma unroll
    for (int slot = 0; slot < kSlots; ++slot) {
      const int c = thread + slot * kThreads;
      if (c >= all_columns) continue;
      const bool is_key = c < columns;
      const HeadRows<Element>& from = is_key ? head.query : head.grad_out;
      const double (*const factors)[kKeys] = is_key ? shared.grads : shared.weights;
      const Element* const data = from.data + (is_key ? c : c - columns) * from.column_stride;
#pragma unroll 2
      for (int r = 0; r < count; ++r) {
        const double x = widen(data[(query + shared.rows[r]) * from.row_stride]);
#pragma unroll
        for (int k = 0; k < kKeys; ++k) sums[slot][k] += factors[r][k] * x;
      }
    }
    __syncthreads();  // all have done with the rows
  }

  // Calls f(gradient, slot, k, factor) for the thread's elements of dK and dV; factor: what sums are multiplied by.
  template <class F>
  __device__ __forceinline__ void for_each_result(const KeyGroup& group, F&& f) const {
    const WorkTile& tile = group.tile;
    const int columns = static_cast<int>(problem.head_dim), all_columns = columns + static_cast<int>(problem.head_dim_v);
#pragma unroll
    for (int slot = 0; slot < kSlots; ++slot) {
      const int c = thread + slot * kThreads;
      if (c >= all_columns) continue;
      const bool is_key = c < columns;
      const MutableView4& view = is_key ? gradients.grad_key : gradients.grad_value;
      Element* const to = static_cast<Element*>(view.data) + tile.batch * view.stride[0] + tile.head * view.stride[1] +
                          (tile.sequence.keys.begin + group.key) * view.stride[2] + (is_key ? c : c - columns) * view.stride[3];
#pragma unroll
      for (int k = 0; k < kKeys; ++k)
        if (group.key + k < group.last_key) f(to[k * view.stride[2]], slot, k, is_key ? problem.scale : 1);
    }
  }

  __device__ __forceinline__ bool all_finite(const KeyGroup& group) const {
    bool all = true;
    for_each_result(group, [&](Element& x, int, int, double) { all &= widen(x) - widen(x) == 0; });
    return all;
  }

  // kAdds: to what is there.
  template <bool kAdds>
  __device__ __forceinline__ void store(const KeySums& sums, const KeyGroup& group) const {
    for_each_result(group, [&](Element& x, int slot, int k, double factor) {
      const double before = kAdds ? double{widen(x)} : 0;
      x = narrow<Element>(static_cast<float>(before + factor * sums[slot][k]));
    });
  }

  // ---- the mask's gradient ------------------------------------------------------------------------------------------------

  __device__ void take_mask(unsigned item) {
    RowsShared& shared = *reinterpret_cast<RowsShared*>(memory);
    const int64_t* const size = gradients.mask_size;
    unsigned left = item;
    const auto digit = [&](int64_t base) {
      const unsigned value = left % static_cast<unsigned>(base);
      left /= static_cast<unsigned>(base);
      return static_cast<int>(value);
    };
    const int chunk = digit(arguments.mask_chunks), mask_query = digit(size[2]), mask_head = digit(size[1]),
              mask_batch = digit(size[0]);
    const bool all_keys = size[3] == 1;
    const auto end_of = [&](int dimension, int at, int64_t all) {
      return size[dimension] == 1 ? static_cast<int>(all) : at + 1;
    };
    double sum = 0;
    bool any = false;
    for (int batch = mask_batch; batch < end_of(0, mask_batch, problem.batch); ++batch)
      for (int index = mask_head; index < end_of(1, mask_head, problem.heads); ++index) {
        const int64_t first_block = first_row_block(problem, arguments.space.list, batch, index);
        const Sequence sequence = sequence_of(problem, batch);
        const int last = end_of(2, mask_query, problem.queries);
        for (int block = mask_query / kStatsRows; block * kStatsRows < last; ++block) {
          uint64_t rows = marks(first_block + block);
          if (size[2] > 1) rows &= uint64_t{1} << mask_query % kStatsRows;
          const Head head(arguments, sequence, batch, index);
          while (rows != 0) {
            any = true;
            sum += sum_scores(head, shared, block * kStatsRows, rows, large.stats + (first_block + block) * kStatsRows,
                              all_keys ? thread : chunk * kThreads + thread, all_keys ? problem.keys : (chunk + 1) * kThreads);
          }
        }
      }
    if (!any) return;
    if (all_keys) {
      shared.sums[thread] = sum;
      __syncthreads();
      sum = 0;
      for (int n = 0; thread == 0 && n < kThreads; ++n) sum += shared.sums[n];
    }
    const int64_t column = all_keys ? 0 : int64_t{chunk} * kThreads + thread;
    if (column < size[3] && (!all_keys || thread == 0)) {
      const MutableView4& to = gradients.grad_mask;
      const int64_t offset =
          mask_batch * to.stride[0] + mask_head * to.stride[1] + mask_query * to.stride[2] + column * to.stride[3];
      visit_mask(gradients.grad_mask_dtype, [&]<class T>(T) {
        if constexpr (!std::is_same_v<T, bool>) {
          T& x = static_cast<T*>(to.data)[offset];
          x = narrow<T>(static_cast<float>(static_cast<double>(widen(x)) + sum));
        }
      });
    }
    __syncthreads();  // all have done with the sums
  }

  // The sum of the gradients of scores of up to kRows marked rows, which are taken from `rows`, with the keys `first`, first +
  // kThreads and so on before `last`.
  __device__ __forceinline__ double sum_scores(const Head& head, RowsShared& shared, int query, uint64_t& rows,
                                               const Stats* stats, int64_t first, int64_t last) {
    RowGroup group{.queries = {}, .live = 0, .begin = 0, .end = 0};
    Stats own[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const bool exists = rows != 0;
      const int row = exists ? take_first(rows) : 0;
      group.queries[r] = query + row, group.live |= unsigned{exists} << r, own[r] = stats[row];
      load_row(shared.query[r], head.query, query + row, exists);
      load_row(shared.grad_out[r], head.grad_out, query + row, exists);
    }
    __syncthreads();
    double sum = 0;
#pragma unroll 1
    for (int64_t key = first; key < min(last, head.sequence.keys.count); key += kThreads) {
      for_each_score(head, shared, group, key, [&](int r, double score, double, double kept, double grad_weight) {
        sum += WeightAndGrad(score, kept, grad_weight, own[r]).grad;
      });
    }
    __syncthreads();  // all have done with the rows
    return sum;
  }

  // ---- the list of items --------------------------------------------------------------------------------------------------

  __device__ unsigned next_item() {
    __shared__ unsigned next;
    __syncthreads();
    if (thread == 0) next = atomicAdd(&large.progress->next, 1);
    __syncthreads();
    return next;
  }

  __device__ void run() {
    const unsigned tiles = static_cast<unsigned>(arguments.space.list.count()) * kShares,
                   key_tiles = static_cast<unsigned>(arguments.key_list.count()),
                   mask_items = static_cast<unsigned>(arguments.mask_items);
    unsigned item = next_item();
    for (; item < tiles; item = next_item()) {
      take_queries(item);
      __threadfence();
      __syncthreads();
      if (thread == 0) atomicAdd(&large.progress->queries_done, 1);
    }
    // An item that is not done yet is a running CTA's, so that the wait ends however few CTAs run at once.
    if (thread == 0)
      while (atomicAdd(&large.progress->queries_done, 0) < tiles) __nanosleep(200);
    __syncthreads();
    __threadfence();
    for (; item < tiles + key_tiles; item = next_item()) take_keys(item - tiles);
    for (; item < tiles + key_tiles + mask_items; item = next_item()) take_mask(item - tiles - key_tiles);
  }
};

template <class Element>
__global__ void __launch_bounds__(kThreads) large_rows_kernel(const __grid_constant__ LargeRowsArguments arguments) {
  extern __shared__ __align__(16) char memory[];
  grid_dependency_wait();
  const LargeRows& large = arguments.space.large_rows;
  if (large.progress->token == large.token) LargeRowsKernel<Element>{arguments, memory}.run();
}

}  // namespace

void add_large_rows(const AttentionProblem& problem, const AttentionGradients& gradients, const BackwardWorkspace& space,
                    CUstream_st* stream) {
  if (space.list.count() == 0) return;
  const int64_t* const size = gradients.mask_size;
  const int64_t chunks = gradients.grad_mask.data ? ceil_div(size[3], int64_t{kThreads}) : 0;
  const LargeRowsArguments arguments{.problem = problem,
                                     .gradients = gradients,
                                     .space = space,
                                     .key_list = TileList::of(problem, true, gradients.kv_grad_heads, kKeys),
                                     .mask_chunks = static_cast<int>(chunks),
                                     .mask_items = static_cast<int>(chunks * size[0] * size[1] * size[2]),
                                     .keep_scale = problem.dropout < 1 ? 1 / (1 - problem.dropout) : 0};
  visit_element(problem.dtype, [&]<class Element>(Type<Element>) {
    launch<large_rows_kernel<Element>>(arguments, sm_count(), kThreads, kSharedBytes, stream, true);
  });
}

}  // namespace flash_online::cuda
