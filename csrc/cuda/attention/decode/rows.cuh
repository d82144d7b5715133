// A warp's work on the rows of a part, for any keys of a tile: it loads queries, turns products into scores and scores into
// weights, and multiplies weights by values.
#pragma once

#include "../../mma/gemm.cuh"
#include "../cache/float8.cuh"
#include "../common/scores.cuh"
#include "load.cuh"

namespace flash_online::cuda {

// The rows of a part: row r is query r / group of head r % group. kTransposed: scores are [keys][rows], of up to eight rows.
template <int kRowTiles, bool kTransposed = false>
struct DecodeRows {
  int first, count;  // the first row's number in the sequence; the rows that exist, perhaps none
  int group, key_head;
  int n, queries_begin, offset, keys;
  // Of the lane's rows of scores, or in their place of the last one that exists: the query, and the row past its first.
  int query[kRowTiles][2], in_group[kRowTiles][2];

  // Of an item's tile of tile_rows rows (at most: where there are fewer, it is the only one) `most` from `skipped` on.
  __device__ __forceinline__ DecodeRows(const DecodeShape& shape, const DecodeWalk& walk, int tile_rows = 16 * kRowTiles,
                                        int skipped = 0, int most = 16 * kRowTiles) {
    const int2 tile_and_head = walk.s.tile_and_head(shape, walk.item);
    first = tile_and_head.x * tile_rows + skipped;
    group = shape.group;
    count = max(min(walk.s.queries * group - first, most), 0);
    key_head = tile_and_head.y;
    n = walk.n;
    queries_begin = walk.s.queries_begin;
    offset = walk.s.offset;
    keys = walk.s.keys;
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = existing(kTransposed ? 2 * lane_in_quad() + half : 16 * i + 8 * half + quad());
        query[i][half] = query_of(row);
        in_group[i][half] = row_in_group(row, query[i][half]);
      }
  }
  __device__ __forceinline__ int query_of(int row) const {
    return static_cast<int>(static_cast<unsigned>(first + row) / static_cast<unsigned>(group));
  }
  // The row, or in its place the last one that exists.
  __device__ __forceinline__ int existing(int row) const { return max(min(row, count - 1), 0); }
  __device__ __forceinline__ int row_in_group(int row, int query) const { return first + row - query * group; }
  __device__ __forceinline__ int head(int row, int query) const { return key_head * group + row_in_group(row, query); }
  __device__ __forceinline__ CachedRow place(int row) const {
    const int query = query_of(row);
    return {n, head(row, query), key_head, queries_begin + query};
  }
  // The first query of the first head.
  template <class Element>
  __device__ __forceinline__ const Element* queries(const ConstView4& view) const {
    return static_cast<const Element*>(view.data) + n * view.stride[0] + int64_t{key_head * group} * view.stride[1] +
           queries_begin * view.stride[2];
  }
};

// Loads the lane's words of a row of queries, as a product's operand has them: calls store(step, half, word). column_of(step)
// is the first of a step's sixteen columns. Loads are four bytes wide.
template <class Element, bool kFloat8, int kSteps, class Rows, class ColumnOf, class Store>
__device__ __forceinline__ void load_query_row(const AttentionProblem& problem, const Rows& rows, int query, int in_group,
                                               ColumnOf&& column_of, Store&& store) {
  const ConstView4& view = problem.query;
  const int head_dim = static_cast<int>(problem.head_dim);
  const Element* const from = rows.template queries<Element>(view) + query * view.stride[2] + in_group * view.stride[1] +
                              (kFloat8 ? 4 : 2) * lane_in_quad();
#pragma unroll
  for (int step = 0; step < kSteps; ++step)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      // Rows are multiples of 16 bytes in the cache, so that all lanes' columns exist, or none does.
      constexpr int kBetween = kFloat8 ? 2 : 8;
      const bool there = column_of(step) + (kFloat8 ? 0 : 8 * half) < head_dim;
      store(step, half, there ? *reinterpret_cast<const unsigned*>(from + column_of(step) + kBetween * half) : 0);
    }
}

// Loads the left fragments of the steps of a product. Rows that do not exist are copies of the last row that does; their
// results are not used.
template <class Element, bool kFloat8, int kSteps, int kRowTiles, class ColumnOf>
__device__ __forceinline__ void load_query_fragments(typename Fragments<Element>::Left (&fragments)[kSteps][kRowTiles],
                                                     const AttentionProblem& problem, const DecodeRows<kRowTiles>& rows,
                                                     ColumnOf&& column_of) {
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
    for (int half_row = 0; half_row < 2; ++half_row)
      load_query_row<Element, kFloat8, kSteps>(
          problem, rows, rows.query[i][half_row], rows.in_group[i][half_row], column_of,
          [&](int step, int half, unsigned word) { fragments[step][i].words[0][2 * half + half_row] = word; });
}

// Calls f(score, key of the tile) for the scores of a lane's row: of row tile `i` and its `half`.
template <bool kTransposed, int kRows, int kColumns, class F>
__device__ __forceinline__ void for_each_key(Accumulator<kRows, kColumns>& scores, int i, int half, F&& f) {
  if constexpr (kTransposed) {
#pragma unroll
    for (int e = 0; e < 2 * kRows; ++e) f(scores[e / 2][0][e % 2 * 2 + half], 8 * e + quad());
  } else {
#pragma unroll
    for (int e = 0; e < 2 * kColumns; ++e) f(scores[i][e / 2][2 * half + e % 2], e / 2 * 8 + 2 * lane_in_quad() + e % 2);
  }
}

// Turns products into scores. Modifications of a head differ between rows, since rows are of several heads.
template <int kRows, int kColumns, int kRowTiles, bool kTransposed>
__device__ __forceinline__ void apply_mod(const AttentionProblem& problem, const ScoreMod& score_mod,
                                          Accumulator<kRows, kColumns>& scores, const DecodeRows<kRowTiles, kTransposed>& rows,
                                          int key) {
  score_mod.for_each_shared(
      [&](const auto& modification) { for_each(scores, [&](float& x, int, int, int) { x = modification(x, 0).value; }); });
  if (!(score_mods(problem) & kScoreModsOfHead)) return;
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int position = rows.query[i][half] + rows.offset - key;
      const int head = rows.key_head * rows.group + rows.in_group[i][half];
      score_mod.of_head(problem, rows.n, head).for_each_of_head([&](const auto& modification) {
        for_each_key<kTransposed>(
            scores, i, half, [&](float& x, int at) { x = modification(x, fabsf(static_cast<float>(position - at))).value; });
      });
    }
}

template <class State, int kRowTiles, class F>
__device__ __forceinline__ void for_each_state(State (&states)[kRowTiles][2], F&& f) {
#pragma unroll
  for (int i = 0; i < 2 * kRowTiles; ++i) f(states[i / 2][i % 2]);
}

// The mask of a part. All rows of a part have the same row of the mask. Lanes read it from global memory without a copy in
// shared memory: eight lanes want the same values, and a cache line holds those of several tiles.
template <int kKeys>
class DecodeMask {
 public:
  template <class Rows>
  __device__ __forceinline__ DecodeMask(const AttentionProblem& problem, const Rows& rows)
      : data_(nullptr), stride_(problem.mask.stride[3]), keys_(rows.keys), first_(0) {
    if (!problem.mask.data) return;
    const int64_t before = rows.n * problem.mask.stride[0] + int64_t{rows.key_head * rows.group} * problem.mask.stride[1];
    data_ = static_cast<const char*>(problem.mask.data) + before * size_of(problem.mask_dtype);
  }
  __device__ __forceinline__ explicit operator bool() const { return data_ != nullptr; }

  // Whether the mask hides all keys of the tile from `key` on, which then may hold anything. By a warp.
  __device__ __forceinline__ bool hides_tile(DType dtype, int key) const {
    static_assert(kKeys <= kWarpSize);
    bool is_seen = false;
    visit_mask(dtype, [&]<class T>(T) {
      using Value = std::conditional_t<std::is_same_v<T, bool>, unsigned char, T>;
      const int64_t own = min(key + min(lane(), kKeys - 1), keys_ - 1);
      const Value value = reinterpret_cast<const Value*>(data_)[own * stride_];
      if constexpr (std::is_same_v<T, bool>)
        is_seen = value != 0;
      else
        is_seen = !(widen(value) == lowest<float>());
    });
    return !__any_sync(~0u, is_seen);
  }

  // Masks the scores of the tile from `key` on.
  template <bool kTransposed, int kRows, int kColumns, int kRowTiles>
  __device__ __forceinline__ void apply(Accumulator<kRows, kColumns>& scores, DType dtype, float lowest_score, int key,
                                        const ScoreState (&states)[kRowTiles][2]) const {
    DecodeMask tile = *this;
    tile.first_ = key;
    mask_scores<kTransposed>(scores, 0, dtype, lowest_score, tile, [&] {
      float least = states[0][0].max;
      for_each_state(states, [&](const ScoreState& state) { least = fminf(least, state.max); });
      return least;
    });
  }

  // What mask_scores() asks for. Keys past the last one are hidden by position.
  template <class T>
  __device__ __forceinline__ T at(int, int key) const {
    return reinterpret_cast<const T*>(data_)[min(first_ + key, keys_ - 1) * stride_];
  }
  template <class T>
  __device__ __forceinline__ bool has_pairs() const {
    return stride_ == 1 && first_ + kKeys <= keys_ && reinterpret_cast<uintptr_t>(data_) % (2 * sizeof(T)) == 0;
  }
  template <class T>
  struct alignas(2 * sizeof(T)) Pair {
    T value[2];
  };
  template <class T>
  __device__ __forceinline__ Pair<T> pair_at(int, int key) const {
    return *reinterpret_cast<const Pair<T>*>(data_ + (first_ + key) * static_cast<int>(sizeof(T)));
  }

 private:
  const char* data_;  // of the row; null: there is no mask
  int64_t stride_;
  int keys_, first_;
};

// Of keys in float8, which no call with a mask has.
struct NoMask {
  template <class... Arguments>
  __device__ __forceinline__ explicit NoMask(const Arguments&...) {}
  __device__ __forceinline__ explicit operator bool() const { return false; }
  template <class... Arguments>
  __device__ __forceinline__ bool hides_tile(const Arguments&...) const {
    return false;
  }
  template <bool kTransposed, class... Arguments>
  __device__ __forceinline__ void apply(const Arguments&...) const {}
};

// Hides the keys that a row does not see by position.
template <int kRows, int kColumns, int kRowTiles, bool kTransposed>
__device__ __forceinline__ void hide(Accumulator<kRows, kColumns>& scores, const DecodeShape& shape,
                                     const DecodeRows<kRowTiles, kTransposed>& rows, int key) {
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int position = rows.query[i][half] + rows.offset;
      const int begin = shape.begin_of(position) - key, end = shape.end_of(position, rows.keys) - key;
      for_each_key<kTransposed>(scores, i, half, [&](float& x, int at) { x = at >= begin && at < end ? x : lowest<float>(); });
    }
}

// Makes weights of the scores of `count` rows, and calls rescale(i, half, factor) where the maximum of a row of the warp rises.
// The sums of states are a lane's own.
template <int kRowTiles, int kColumns, class Rescale>
__device__ __forceinline__ void softmax_step(Accumulator<kRowTiles, kColumns>& scores, ScoreState (&states)[kRowTiles][2],
                                             float scale, int count, Rescale&& rescale) {
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (16 * i + 8 * half >= count) continue;
      ScoreState& state = states[i][half];
      float most = lowest<float>();
#pragma unroll
      for (int j = 0; j < kColumns; ++j) most = fmaxf(most, fmaxf(scores[i][j][2 * half], scores[i][j][2 * half + 1]));
      // A lane's own scores tell whether the row's maximum rises, which it seldom does: the lanes find it only then.
      if (__any_sync(~0u, state.exceeds(kRescaleThreshold, __fmul_rn(most, scale)) || is_large_score(state.max))) {
        most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
        most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
        rescale(i, half, state.raise_max_lazily(kRescaleThreshold, __fmul_rn(most, scale)));
        if (__any_sync(~0u, is_large_score(state.max))) [[unlikely]] {
          state.add(make_large_row_weights(scores, i, half, scale, state.max));
          continue;
        }
      }
      state.add(make_row_weights(scores, i, half, [&](float x, int, int) { return state.weight_of_product(x, scale); }));
    }
}

// Multiplies the outputs of rows by a factor.
template <int kRowTiles, int kOutColumns>
__device__ __forceinline__ void rescale_rows(Accumulator<kRowTiles, kOutColumns>& out, int i, int half, float factor) {
#pragma unroll
  for (int j = 0; j < kOutColumns; ++j) {
    out[i][j][2 * half] *= factor;
    out[i][j][2 * half + 1] *= factor;
  }
}
template <int kRowTiles, int kColumns, int kOutColumns>
__device__ __forceinline__ void softmax_step(Accumulator<kRowTiles, kColumns>& scores, Accumulator<kRowTiles, kOutColumns>& out,
                                             ScoreState (&states)[kRowTiles][2], float scale) {
  softmax_step(scores, states, scale, 16 * kRowTiles,
               [&](int i, int half, float factor) { rescale_rows(out, i, half, factor); });
}
// Where, in a box, a lane of ldmatrix finds the 16 bytes that it points to, at the box's first columns; chunk c of a row is
// found by ^ 16 * c, as far as c is even. `right`: whether lanes 16 to 31 point to the next columns, or lanes 8 to 15 and 24
// to 31.
__device__ __forceinline__ unsigned matrix_offset(bool right) {
  const int lane = cuda::lane(), row = right ? lane % 16 : lane / 16 * 8 + lane % 8, chunk = right ? lane / 16 : lane / 8 % 2;
  return box_offset(row, chunk);
}

// The right operands of O += P V for the `step`-th sixteen keys of a tile: calls f(column, right) for each two groups of eight
// columns of values, from group `column` on. Element is the weights'; `values` is where a tile's first box lies. kTransposed:
// the words are loaded in the order of a left operand with sixteen columns as its rows, so that no instruction has to move
// them.
template <class Element, bool kFloat8, bool kTransposed, int kBoxBytes, int kGroups, class F>
__device__ __forceinline__ void for_each_values(unsigned values, int step, __nv_fp8_interpretation_t kind, F&& f) {
  constexpr bool kKeysFirst = kFloat8 || !kTransposed;  // matrices of more keys come before those of more columns
  const unsigned base = matrix_offset(kKeysFirst);
  // Sixteen columns of 16 bits, or 32 of 8 bits, at a time.
  constexpr int kColumnsAtOnce = kFloat8 ? 32 : 16;
#pragma unroll
  for (int n = 0; n < 8 * kGroups / kColumnsAtOnce; ++n) {
    unsigned x[4];
    ldmatrix_x4_trans(x, values + (base ^ (n % 4 * 32)) + n / 4 * kBoxBytes + step * 16 * 128);
    typename Fragments<Element>::Right right[2];
    if constexpr (kFloat8) {
#pragma unroll
      for (int pair = 0; pair < 2; ++pair) {
#pragma unroll
        for (int word = 0; word < 2; ++word) {
          // Two columns of one key, and of the next one, become two keys of one column, and of the next one.
          const uint2 columns = widen_float8_word<__half>(__byte_perm(x[2 * pair + word], 0, 0x3120), kind);
          right[0].words[0][word] = columns.x;
          right[1].words[0][word] = columns.y;
        }
        f(4 * n + 2 * pair, right);
      }
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) right[kKeysFirst ? i / 2 : i % 2].words[0][kKeysFirst ? i % 2 : i / 2] = x[i];
      f(2 * n, right);
    }
  }
}

// O += P V.
template <class Element, bool kFloat8, int kBoxBytes, int kRowTiles, int kColumns, int kOutColumns>
__device__ __forceinline__ void multiply_values(Accumulator<kRowTiles, kOutColumns>& out,
                                                const Accumulator<kRowTiles, kColumns>& weights, unsigned values,
                                                __nv_fp8_interpretation_t kind) {
  using V = Fragments<Element>;
#pragma unroll
  for (int k = 0; k < kColumns / 2; ++k) {
    typename V::Left left[kRowTiles];
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
      for (int word = 0; word < 4; ++word) {
        const float (&weight)[4] = weights[i][2 * k + word / 2];
        left[i].words[0][word] = V::pair(weight[word % 2 * 2], weight[word % 2 * 2 + 1]);
      }
    for_each_values<Element, kFloat8, false, kBoxBytes, kOutColumns>(
        values, k, kind, [&](int column, const auto& right) { multiply<Element>(out, left, right, column); });
  }
}

// The column of values that is column n of group j of eight (for_each_values).
template <bool kFloat8>
__device__ __forceinline__ int value_column(int j, int n) {
  return kFloat8 ? j / 2 * 16 + 2 * n + j % 2 : 8 * j + n;
}

// How a warp holds kRowTiles tiles of 16 rows: scores are [rows][keys], outputs [rows][columns]. DecodeEightRows holds them
// transposed.
template <class Element, int kHeadDimAsked, bool kFloat8, int kRowTilesAsked>
struct DecodeRowTiles {
  static constexpr int kHeadDim = kHeadDimAsked, kRowTiles = kRowTilesAsked, kKeys = decode_tile_keys(kHeadDim, kFloat8),
                       kSteps = kHeadDim / 16;
  static constexpr bool kTransposed = false;
  using Rows = DecodeRows<kRowTiles>;
  using Scores = Accumulator<kRowTiles, kKeys / 8>;
  using Outputs = Accumulator<kRowTiles, kHeadDim / 8>;
  using States = ScoreState[kRowTiles][2];
  struct Queries {
    typename Fragments<Element>::Left fragments[kSteps][kRowTiles];

    __device__ __forceinline__ void load(const AttentionProblem& problem, const Rows& rows) {
      load_query_fragments<Element, kFloat8>(fragments, problem, rows, [](int step) { return 16 * step; });
    }
    template <class F>
    __device__ __forceinline__ void for_each_word(F&& f) {
#pragma unroll
      for (int step = 0; step < kSteps; ++step)
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
          for (int word = 0; word < 4; ++word) f(fragments[step][i].words[0][word]);
    }
    __device__ __forceinline__ void get(typename Fragments<Element>::Left (&left)[kRowTiles], int step) const {
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i) left[i] = fragments[step][i];
    }
  };

  template <class Mask>
  __device__ __forceinline__ static void apply_mask(Scores& scores, const Mask& mask, DType dtype, float lowest_score, int key,
                                                    const States& states) {
    mask.template apply<kTransposed>(scores, dtype, lowest_score, key, states);
  }
  __device__ __forceinline__ static void softmax(Scores& scores, Outputs& out, States& states, float scale) {
    softmax_step(scores, out, states, scale);
  }
  template <class ValueElement, int kBoxBytes>
  __device__ __forceinline__ static void multiply_values(Outputs& out, const Scores& weights, unsigned values,
                                                         __nv_fp8_interpretation_t kind) {
    cuda::multiply_values<ValueElement, kFloat8, kBoxBytes>(out, weights, values, kind);
  }

  // ---- the p-th eight rows, of which there are `count`

  static constexpr int kGroups = 2 * kRowTiles;
  // Stores their states, over all lanes.
  __device__ __forceinline__ static void store_states(float2* to, States& states, int p, int count) {
    ScoreState& own = states[p / 2][p % 2];
    own.sum += __shfl_xor_sync(~0u, own.sum, 1);
    own.sum += __shfl_xor_sync(~0u, own.sum, 2);
    if (lane_in_quad() == 0 && quad() < count) to[quad()] = {own.max, own.sum};
  }
  // Where outputs lie in memory that warps share. Groups of eight columns change places, so that the rows that lanes store at a
  // time lie in different banks.
  __device__ __forceinline__ static int place_of(int row, int column) { return row * kHeadDim + (column ^ (row % 4 * 8)); }
  __device__ __forceinline__ static void store(float* to, const Outputs& out, int p, int count) {
    if (quad() >= count) return;
#pragma unroll
    for (int j = 0; j < kHeadDim / 8; ++j) {
      const float (&x)[4] = out[p / 2][j];
      const int column = value_column<kFloat8>(j, 2 * lane_in_quad());
      if constexpr (!kFloat8) {
        *reinterpret_cast<float2*>(to + place_of(quad(), column)) = {x[p % 2 * 2], x[p % 2 * 2 + 1]};
      } else {
        to[place_of(quad(), column)] = x[p % 2 * 2];
        to[place_of(quad(), column + 2)] = x[p % 2 * 2 + 1];
      }
    }
  }
};

// Stores a row's outputs times `scale`, by a warp: a lane has columns [4 * lane, 4 * lane + 4) of each 128.
template <class Element, int kHeadDim>
__device__ __forceinline__ void store_row_of_warp(const AttentionProblem& problem, const CachedRow& row,
                                                  const float4 (&sum)[(kHeadDim + 127) / 128], float scale) {
  const int width = static_cast<int>(problem.head_dim_v), lane = cuda::lane();
  const int64_t column_stride = problem.out.stride[3];
  Element* const to = out_of<Element>(problem, row);
  const bool vectors = column_stride == 1 && reinterpret_cast<uintptr_t>(to) % 8 == 0;
#pragma unroll
  for (int n = 0; n < (kHeadDim + 127) / 128; ++n) {
    const int column = 128 * n + 4 * lane;
    const float x[4] = {sum[n].x * scale, sum[n].y * scale, sum[n].z * scale, sum[n].w * scale};
    if (vectors && column + 4 <= width) {
      *reinterpret_cast<uint2*>(to + column) = {Fragments<Element>::pair(x[0], x[1]), Fragments<Element>::pair(x[2], x[3])};
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (column + i < width) to[(column + i) * column_stride] = narrow<Element>(x[i]);
    }
  }
}

}  // namespace flash_online::cuda
