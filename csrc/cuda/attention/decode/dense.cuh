// Few rows over dense keys: the units of a row are folded in the order of their keys.
//
// A row's bits must not depend on the batch, so its keys are cut by their number alone (units of the line, line.cuh), and every
// sum has one order: the warps of a team take the tiles of a unit by turns, their results are folded in the order of the warps,
// and those of the units in the order of the keys. A CTA is one team, or two that take units by turns. It folds the units that
// it has of a row if the first one is among them. Each other unit is a partial result of its own. The cluster whose CTAs share
// the row, or merge_dense(), then folds these in the order of the keys.
#pragma once

#include "../../hw/cluster.cuh"
#include "../cache/result.cuh"
#include "rows.cuh"

namespace flash_online::cuda {

// The shared memory of a CTA in addition to the rings and queries of its warps.
struct DenseShared {
  int buffers;  // 1 or 2; 0: results are stored by other code
  int rows;  // of a warp's results, a multiple of 8

  template <int kHeadDim>
  __host__ __device__ constexpr int warp_bytes() const {
    return rows * (kHeadDim * 4 + 8);
  }
  // The results of the warps in each buffer, and those of a row's units so far.
  template <int kHeadDim>
  constexpr int bytes(int warps) const {
    return buffers > 0 ? (buffers * warps + 1) * warp_bytes<kHeadDim>() : 0;
  }
};

// The partial results of a dense call.
struct DensePartials {
  // [items of all sequences, units, rows, pitch]: a row's outputs, which still are to be divided by the sum, then maximum (base
  // 2) and sum. Unit 0: of all units that the CTA folded that has the first one.
  float* data = nullptr;
  int units = 0, rows = 0, pitch = 0;

  static DensePartials of(const AttentionProblem& problem, const DecodeShape& shape, int64_t units) {
    return {nullptr, static_cast<int>(units), std::min(static_cast<int>(shape.group * problem.queries), shape.tile_rows),
            round_up(static_cast<int>(problem.head_dim_v), 2) + 2};
  }
  int64_t bytes(int64_t items) const { return items * units * rows * pitch * static_cast<int64_t>(sizeof(float)); }
  __device__ __forceinline__ float* partial(int64_t item, int unit, int row) const {
    return data + ((item * units + unit) * rows + row) * pitch;
  }
  __device__ __forceinline__ float2& state(float* partial) const { return *reinterpret_cast<float2*>(partial + pitch - 2); }
};

// How the CTAs of a dense call share the line.
struct DenseSplit {
  // CTAs per cluster, which share `items` items evenly (one, if there are several CTAs). 0: all CTAs have equal shares of the
  // line, which cut items anywhere; merge_dense() folds what they leave.
  int cluster = 0;
  int items = 1;

  // The units of a CTA of a cluster.
  __device__ __forceinline__ int units(int weight) const {
    return static_cast<int>(static_cast<unsigned>(items * weight + cluster - 1) / static_cast<unsigned>(cluster));
  }
  // If shares cut items: how many units of an item belong to the share in which it begins. `item`: of all sequences.
  __device__ __forceinline__ static int units_in_first_share(const DecodeSequence& s, const DecodeShape& shape, int sequences,
                                                             int ctas, int item) {
    const int begin = item * s.weight, size = DecodeShare::of_line(sequences * s.length(shape), 1, ctas, 0).size;
    return min((begin / size + 1) * size - begin, s.weight);
  }
  // The share of CTA `cta` of `ctas`. All sequences are alike.
  __device__ __forceinline__ DecodeShare share(const AttentionProblem& problem, const DecodeShape& shape, int ctas,
                                               int cta) const {
    const DecodeSequence s = decode_sequence(problem, KvSplits{}, shape, 0);
    const int of_sequence = s.length(shape), length = static_cast<int>(problem.batch) * of_sequence;
    DecodeShare share{};
    if (cluster > 0) {
      const int which = cta / cluster, rank = cta - which * cluster, own = units(s.weight), all = items * s.weight;
      share.begin = min(which * all + min(rank * own, all), length);
      share.end = min(which * all + min((rank + 1) * own, all), length);
    } else {
      share = DecodeShare::of_line(length, 1, ctas, cta);
    }
    share.sequence = of_sequence > 0 ? share.begin / of_sequence : 0;
    share.sequence_begin = share.sequence * of_sequence;
    share.s = s;
    return share;
  }
};

// After a dense call whose shares cut items: folds the partial results of each row that several CTAs have computed.
void merge_dense(const AttentionProblem& problem, const DensePartials& partials, const DecodeShape& shape, int ctas,
                 CUstream_st* stream);

// Row `in_tile` of an item of a dense call.
struct DenseRow {
  int row;  // of the key head, over all queries; perhaps past the last one
  CachedRow place;

  // `item`: of all sequences.
  __device__ __forceinline__ DenseRow(const DecodeShape& shape, int item, int in_tile) {
    int head_of_all = item, row_tile = 0;
    if (shape.row_tiles > 1) head_of_all /= shape.row_tiles, row_tile = item - head_of_all * shape.row_tiles;
    row = row_tile * shape.tile_rows + in_tile;
    const int n = head_of_all / shape.key_heads, key_head = head_of_all - n * shape.key_heads, query = row / shape.group;
    place = {n, key_head * shape.group + row - query * shape.group, key_head, query};
  }
};

// A warp folds the partial results of a row, or of kColumns of its columns: kPairs pairs of columns per lane, which reads
// kAtOnce partial results before it folds any.
template <class Element, int kPairs, int kAtOnce>
struct DenseMerge {
  static constexpr int kWarps = 4, kThreads = kWarps * kWarpSize;  // of a CTA of merge_dense()
  static constexpr int kColumns = 2 * kPairs * kWarpSize;
  static_assert(kAtOnce <= kWarpSize);

  // Partial 0 is the sum of the `first` leading units.
  __device__ __forceinline__ static void fold(const AttentionProblem& problem, const DensePartials& all, const CachedRow& row,
                                              int item, int in_tile, int first, int units, int run) {
    const RowPartials partials{all.partial(item, 0, in_tile), all.partial(item, first, in_tile), int64_t{all.rows} * all.pitch,
                               all.pitch - 2, 1 + units - first};
    const int width = static_cast<int>(problem.head_dim_v), first_column = run * kColumns + 2 * lane();
    ScoreState state;
    float2 sum[kPairs] = {};
#pragma unroll 1
    for (int begin = 0; begin < partials.count; begin += kAtOnce) {
      const int count = min(partials.count - begin, kAtOnce);
      // Lane i has the state of part i, and computes its factors: of all maxima up to it. Loads pass by the L1 cache, which may
      // have a line as it was before another SM's CTA wrote to it.
      const auto load = [](const float* from) { return __ldcg(reinterpret_cast<const float2*>(from)); };
      const float2 one = lane() < count ? load(partials.partial(begin + lane()) + partials.state) : float2{lowest<float>(), 0};
      float2 x[kAtOnce][kPairs];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i)
#pragma unroll
        for (int pair = 0; pair < kPairs; ++pair) {
          const int column = first_column + pair * 2 * kWarpSize;
          x[i][pair] = i < count && column < width ? load(partials.partial(begin + i) + column) : float2{};
        }
      float max = fmaxf(one.x, state.max);
#pragma unroll
      for (int step = 1; step < kAtOnce; step *= 2) {
        const float other = __shfl_up_sync(~0u, max, step);
        if (lane() >= step) max = fmaxf(max, other);
      }
      float before = __shfl_up_sync(~0u, max, 1);
      if (lane() == 0) before = state.max;
      const FoldFactors own{ScoreState::rescale(before, max), ScoreState::rescale(one.x, max)};
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (i >= count) break;
        const FoldFactors factors{__shfl_sync(~0u, own.total, i), __shfl_sync(~0u, own.part, i)};
        state.sum = factors.of(state.sum, __shfl_sync(~0u, one.y, i));
#pragma unroll
        for (int pair = 0; pair < kPairs; ++pair)
          sum[pair] = {factors.of(sum[pair].x, x[i][pair].x), factors.of(sum[pair].y, x[i][pair].y)};
      }
      state.max = __shfl_sync(~0u, max, count - 1);
    }
    float* const lse = static_cast<float*>(problem.lse);
    const bool stores_lse = lse && run == 0 && lane() == 0;
    const float scale = finish_row(problem, row, state, stores_lse ? lse + lse_index(problem, row) : nullptr);
    Element* const out = out_of<Element>(problem, row);
#pragma unroll
    for (int pair = 0; pair < kPairs; ++pair) {
      const int column = first_column + pair * 2 * kWarpSize;
      if (column < width) out[column] = narrow<Element>(sum[pair].x * scale);
      if (column + 1 < width) out[column + 1] = narrow<Element>(sum[pair].y * scale);
    }
  }
};

// Folds what the CTAs of a cluster have left of their item. All of their threads call it.
template <class Element>
__device__ __forceinline__ void fold_in_cluster(const AttentionProblem& problem, const DensePartials& partials,
                                                const DecodeShape& shape, const DenseSplit& split, int weight) {
  using Merge = DenseMerge<Element, 1, 16>;
  __syncwarp();
  cluster_arrive();
  cluster_wait();
  const int first = split.units(weight);
  if (first == weight) return;  // the second CTA had none
  const int item = static_cast<int>(blockIdx.x) / split.cluster, rank = static_cast<int>(blockIdx.x) - item * split.cluster,
            runs = max((static_cast<int>(problem.head_dim_v) + Merge::kColumns - 1) / Merge::kColumns, 1);
  // Neighbouring runs are folded on different SMs.
#pragma unroll 1
  for (int index = rank + split.cluster * (static_cast<int>(threadIdx.x) / kWarpSize); index < partials.rows * runs;
       index += split.cluster * shape.warps() * shape.teams) {
    const int in_tile = index / runs;
    const DenseRow row(shape, item, in_tile);
    if (row.row < shape.group * static_cast<int>(problem.queries))
      Merge::fold(problem, partials, row.place, item, in_tile, first, weight, index - in_tile * runs);
  }
}

// The results of a CTA's warps. Each warp folds some of their rows.
template <class Element, class Part>
class DenseFolder {
 public:
  static constexpr int kHeadDim = Part::kHeadDim;
  using Rows = Part::Rows;
  static constexpr int kVectors = (kHeadDim + 127) / 128;  // of four columns, of a lane

  __device__ __forceinline__ DenseFolder(const AttentionProblem& problem, const DensePartials& partials,
                                         const DecodeShape& shape, const DenseShared& layout, char* shared)
      : problem_(problem),
        partials_(partials),
        shape_(shape),
        layout_(layout),
        shared_(shared),
        warps_(shape.warps()),
        teams_(shape.teams) {}

  // Ends the unit if the warp has processed all of its steps. At the end of a part it also ends the turns in which the warp
  // has no tile. Then moves `tile` on to the team's next unit.
  __device__ __forceinline__ void end_units(const DecodeWalk& walk, int end, const Rows& rows, int& tile, int& steps, int& turn,
                                            Part::Outputs& out, Part::States& states) {
#pragma unroll 1
    for (; steps == shape_.unit_steps || (tile >= end && turn * teams_ < walk.units); steps = 0) {
      if (steps == shape_.unit_steps) tile += tiles_of_other_teams(shape_);
      add(walk, turn++, rows, out, states);
    }
  }

 private:
  // Takes what the warp has of its team's unit of a turn of the teams, and clears it. All warps call it.
  __device__ __forceinline__ void add(const DecodeWalk& walk, int turn, const Rows& rows, Part::Outputs& out,
                                      Part::States& states) {
    const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
    char* const first = results(is_second_ ? teams_ * warps_ : 0);
    char* const to = first + warp * layout_.warp_bytes<kHeadDim>();
#pragma unroll
    for (int p = 0; p < Part::kGroups; ++p) {
      Part::store_states(states_of(to) + 8 * p, states, p, rows.count - 8 * p);
      Part::store(outputs_of(to) + 8 * p * kHeadDim, out, p, rows.count - 8 * p);
    }
    clear(out);
    for_each_state(states, [](ScoreState& state) { state = {}; });
    __syncthreads();
#pragma unroll 1
    for (int r = warp; r < rows.count; r += teams_ * warps_)
#pragma unroll 1
      for (int team = 0; team < teams_ && turn * teams_ + team < walk.units; ++team)
        fold_row(walk, turn * teams_ + team, rows, first + team * warps_ * layout_.warp_bytes<kHeadDim>(), r);
    // With two buffers, warps that have passed the next barrier have read this one's results.
    if (layout_.buffers == 2)
      is_second_ = !is_second_;
    else
      __syncthreads();
  }
  __device__ __forceinline__ char* results(int index) const { return shared_ + index * layout_.warp_bytes<kHeadDim>(); }
  // Of the row's units before, which the warp alone reads and writes.
  __device__ __forceinline__ char* total() const { return results(layout_.buffers * teams_ * warps_); }
  __device__ __forceinline__ static float* outputs_of(char* results) { return reinterpret_cast<float*>(results); }
  __device__ __forceinline__ float2* states_of(char* results) const {
    return reinterpret_cast<float2*>(results + layout_.rows * kHeadDim * 4);
  }
  __device__ __forceinline__ void fold_row(const DecodeWalk& walk, int unit, const Rows& rows, char* first, int r) {
    const bool folds = walk.begins_item, ends = unit + 1 == walk.units, is_final = folds && ends && walk.ends_item;
    ScoreState state;
    float4 sum[kVectors];
#pragma unroll
    for (int w = 0; w < kDecodeMostWarps; ++w) {
      if (w >= warps_) break;
      fold(state, sum, first + w * layout_.warp_bytes<kHeadDim>(), r, w == 0);
    }
    if (folds && unit > 0) {
      ScoreState all;
      float4 all_sum[kVectors];
      fold(all, all_sum, total(), r, true);
      const FoldFactors factors = fold_state(all, state);
      state = all;
      for_each_vector([&](int n, int) { sum[n] = folded(all_sum[n], sum[n], factors); });
    }
    if (folds && !ends) {
      __syncwarp();  // all lanes have read the state before
      states_of(total())[r] = {state.max, state.sum};
      for_each_vector(
          [&](int n, int column) { *reinterpret_cast<float4*>(outputs_of(total()) + Part::place_of(r, column)) = sum[n]; });
      __syncwarp();
    } else if (is_final) {
      const CachedRow row = rows.place(r);
      float* const lse = static_cast<float*>(problem_.lse);
      const float scale = finish_row(problem_, row, state, lse && lane() == 0 ? lse + lse_index(problem_, row) : nullptr);
      store_row_of_warp<Element, kHeadDim>(problem_, row, sum, scale);
    } else {
      const int64_t item = int64_t{walk.n} * (shape_.key_heads * shape_.row_tiles) + walk.item;
      float* const to = partials_.partial(item, folds ? 0 : walk.first_unit + unit, r);
      const int width = static_cast<int>(problem_.head_dim_v);
      if (lane() == 0) partials_.state(to) = {state.max, state.sum};
      for_each_vector([&](int n, int column) {
        if (column < width) *reinterpret_cast<float2*>(to + column) = {sum[n].x, sum[n].y};
        if (column + 2 < width) *reinterpret_cast<float2*>(to + column + 2) = {sum[n].z, sum[n].w};
      });
    }
  }

  template <class F>
  __device__ __forceinline__ static void for_each_vector(F&& f) {
#pragma unroll
    for (int n = 0; n < kVectors; ++n)
      if (const int column = 128 * n + 4 * lane(); kHeadDim % 128 == 0 || column < kHeadDim) f(n, column);
  }
  __device__ __forceinline__ static float4 folded(const float4& total, const float4& part, const FoldFactors& factors) {
    return {factors.of(total.x, part.x), factors.of(total.y, part.y), factors.of(total.z, part.z), factors.of(total.w, part.w)};
  }
  // Folds the row of `from`, or begins with it.
  __device__ __forceinline__ void fold(ScoreState& state, float4 (&sum)[kVectors], char* from, int row, bool begins) const {
    const float2 one = states_of(from)[row];
    FoldFactors factors{0, 1};
    if (begins)
      state = {one.x, one.y};
    else
      factors = fold_state(state, {one.x, one.y});
    for_each_vector([&](int n, int column) {
      const float4 x = *reinterpret_cast<const float4*>(outputs_of(from) + Part::place_of(row, column));
      sum[n] = begins ? x : folded(sum[n], x, factors);
    });
  }

  const AttentionProblem& problem_;
  const DensePartials& partials_;
  const DecodeShape& shape_;
  const DenseShared& layout_;
  char* shared_;
  int warps_, teams_;  // of a team; of the CTA
  bool is_second_ = false;  // buffer
};

// Takes the folder's place in all other calls: DecodeKernel::finish_part() stores or merges their parts.
struct NoFolder {
  template <class... Arguments>
  __device__ __forceinline__ explicit NoFolder(const Arguments&...) {}
  template <class... Arguments>
  __device__ __forceinline__ void end_units(const Arguments&...) {}
};

}  // namespace flash_online::cuda
