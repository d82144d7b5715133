// Turns products of queries and keys in a warp's accumulators into scores in base 2 (score modification, mask, visibility), and
// scores into the backward pass's weights. Accumulators are [query][key], or transposed [key][query].
#pragma once

#include "../../../core/mask.h"
#include "../../../core/online_softmax.h"
#include "../../hw/math.cuh"
#include "../../mma/compensated_accumulator.cuh"
#include "../../mma/fragments.cuh"
#include "../large_rows/score_levels.cuh"
#include "../masks/mask_tile.cuh"
#include "../masks/sparsity.cuh"
#include "score_mod.cuh"

namespace flash_online::cuda {

constexpr double kLn2 = 0.693147180559945309417;

struct FastBinary {
  FLASH_ONLINE_HD static float exp(float x) {
#ifdef __CUDA_ARCH__
    return exp2_flushed(x);
#else
    return ::exp2f(x);
#endif
  }
  FLASH_ONLINE_HD static float log(float x) { return ::log2f(x); }
};

using ScoreState = OnlineSoftmax<float, FastBinary>;

// How far above the running maximum a block's maximum may be before the sum and the outputs are rescaled: weights reach 2^8.
constexpr float kRescaleThreshold = 8;

// Calls f(i, j, e, query, key) for every accumulator of a warp; the warp's 16 * kRows rows begin at `row` of the block.
template <bool kTransposed, int kRows, int kColumns, class T, class F>
__device__ __forceinline__ void for_each_score(const Accumulator<kRows, kColumns, T>&, int row, F&& f) {
#pragma unroll
  for (int i = 0; i < kRows; ++i)
#pragma unroll
    for (int j = 0; j < kColumns; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int r = row + 16 * i + quad() + e / 2 * 8, c = 8 * j + 2 * lane_in_quad() + e % 2;
        f(i, j, e, kTransposed ? c : r, kTransposed ? r : c);
      }
}

// The position of a block of scores in its sequence.
struct ScoreBlock {
  int query, key;  // the first of the block
  int queries, keys;  // the sequence's length
  bool whole;  // all queries and keys of the block exist, and by position every query sees every key
  __device__ __forceinline__ int query_of(int row) const { return query + row; }
  __device__ __forceinline__ int head_of(int) const { return 0; }  // counts from the block's first
};

// A ScoreBlock with rows of `heads` heads interleaved: all heads of a query, then the next query.
struct GroupScoreBlock : ScoreBlock {
  int heads;
  __device__ __forceinline__ int query_of(int row) const { return query + row / heads; }
  __device__ __forceinline__ int head_of(int row) const { return row % heads; }
};

// What happens to the derivatives of a score modification: nothing, or gradients of scores are multiplied by them.
struct NoDerivative {
  template <class T>
  __device__ __forceinline__ void operator()(int, int, int, T) const {}
};
template <class Gradients>
struct TimesDerivative {
  Gradients& gradients;
  template <class T>
  __device__ __forceinline__ void operator()(int i, int j, int e, T x) const {
    gradients[i][j][e] *= x;
  }
};

// Makes scores of products: applies each modification of `score_mod`. Calls on_derivative(i, j, e, x) with the derivatives of
// those that have one.
template <bool kTransposed, int kRows, int kColumns, class T, class Mod, class OnDerivative,
          class Compensation = NotCompensated>
__device__ __forceinline__ void apply_score_mod(Accumulator<kRows, kColumns, T>& d, int row, const Mod& score_mod,
                                                const ScoreBlock& block, const Visibility& visible,
                                                OnDerivative&& on_derivative, Compensation* compensation = nullptr) {
  using Position = std::conditional_t<std::is_same_v<T, double>, int64_t, int>;
  const Position between = static_cast<Position>(block.query + visible.offset - block.key);
  score_mod.for_each([&]<class One>(const One& modification) {
    const auto modify = [&](int i, int j, int e, T distance) {
      T& x = d[i][j][e];
      if constexpr (Compensation::kCompensated)
        if constexpr (kTakesTwoFloats<One>) return modification(x, compensation->low[i][j][e], distance);
      if constexpr (!kTakesTwoFloats<One>) {
        const Modified<T> score = modification(x, distance);
        if constexpr (One::kHasDerivative) on_derivative(i, j, e, score.derivative);
        x = score.value;
      }
    };
    if constexpr (Compensation::kCompensated)
      if constexpr (!kTakesTwoFloats<One>) {
        add_low(d, *compensation);
        clear(compensation->low);
      }
    if constexpr (One::kNeedsDistance)
      for_each_score<kTransposed>(d, row, [&](int i, int j, int e, int query, int key) {
        modify(i, j, e, ::fabs(static_cast<T>(between + query - key)));
      });
    else
      for_each(d, [&](T&, int i, int j, int e) { modify(i, j, e, T(0)); });
  });
}

// Adds a float mask, or hides the scores that a bool mask does not show. `lowest_score`: ScoreMod's. `least_row_statistic`
// returns the least maximum so far, or the least lse, of the lane's queries. Scores are raised to the lowest one only if a
// query of the warp has seen nothing above it: with a larger maximum all such scores have weight 0.
template <bool kTransposed, int kRows, int kColumns, class Mask, class Least, class Compensation = NotCompensated>
__device__ __forceinline__ void mask_scores(Accumulator<kRows, kColumns>& d, int row, DType dtype, float lowest_score,
                                            const Mask& mask, Least&& least_row_statistic,
                                            Compensation* compensation = nullptr) {
  const auto add = [&]<class T, bool kBounded>(T, std::bool_constant<kBounded>) {
    using Value = std::conditional_t<std::is_same_v<T, bool>, unsigned char, T>;
    const auto apply = [&](int i, int j, int e, Value value) {
      float& x = d[i][j][e];
      if constexpr (std::is_same_v<T, bool>) {
        x = value ? x : lowest<float>();
      } else if constexpr (Compensation::kCompensated) {
        float& low = compensation->low[i][j][e];
        add_in_two_floats(x, low, widen(value), kLog2E, kLog2ELow);
        if constexpr (kBounded) x = max_or_nan(x, lower_bound(widen(value), lowest_score));
        if constexpr (!std::is_same_v<T, __half>) low = x > lowest_score ? low : 0;
      } else {
        x = fmaf(widen(value), kLog2E, x);
        if constexpr (kBounded) x = max_or_nan(x, lower_bound(widen(value), lowest_score));
      }
    };
    if constexpr (!kTransposed) {
      if (mask.template has_pairs<Value>()) {
#pragma unroll
        for (int i = 0; i < kRows; ++i)
#pragma unroll
          for (int j = 0; j < kColumns; ++j)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
              const auto pair = mask.template pair_at<Value>(row + 16 * i + 8 * half + quad(), 8 * j + 2 * lane_in_quad());
              apply(i, j, 2 * half, pair.value[0]);
              apply(i, j, 2 * half + 1, pair.value[1]);
            }
        return;
      }
    }
    if constexpr (kTransposed && kColumns % 2 == 0) {
      if constexpr (sizeof(T) == 2) {
        if (mask.has_vectors()) {
#pragma unroll
          for (int i = 0; i < kRows; ++i)
#pragma unroll
            for (int j = 0; j < kColumns; j += 2) {
              unsigned words[4];
              mask.transposed(words, 8 * j, row + 16 * i);
#pragma unroll
              for (int n = 0; n < 4; ++n) {
                const Value* const pair = reinterpret_cast<const Value*>(&words[n]);
                apply(i, j + n % 2, n / 2 * 2, pair[0]);
                apply(i, j + n % 2, n / 2 * 2 + 1, pair[1]);
              }
            }
          return;
        }
      }
    }
    for_each_score<kTransposed>(
        d, row, [&](int i, int j, int e, int query, int key) { apply(i, j, e, mask.template at<Value>(query, key)); });
  };
  visit_mask(dtype, [&]<class T>(T value) {
    // float16 masks stay far from the bound.
    if constexpr (std::is_same_v<T, __nv_bfloat16> || std::is_same_v<T, float>)
      if (__any_sync(~0u, least_row_statistic() <= lowest_score)) [[unlikely]]
        return add(value, std::true_type{});
    add(value, std::false_type{});
  });
}

// Hides the keys that a query does not see by position. With kTransposed also queries that do not exist.
template <bool kTransposed, int kRows, int kColumns, class T, class Block = ScoreBlock>
__device__ __forceinline__ void hide_scores(Accumulator<kRows, kColumns, T>& d, int row, const Block& block,
                                            const Visibility& visible) {
  if constexpr (!kTransposed) {
#pragma unroll
    for (int i = 0; i < kRows; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const KeyRange range = keys_of(visible, block.query_of(row + 16 * i + 8 * half + quad()), block.keys);
        const int begin = static_cast<int>(max(range.begin - block.key, int64_t{0})),
                  end = static_cast<int>(max(min(range.end - block.key, int64_t{kColumns * 8}), int64_t{0}));
#pragma unroll
        for (int j = 0; j < kColumns; ++j)
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const int key = 8 * j + 2 * lane_in_quad() + e;
            T& x = d[i][j][2 * half + e];
            x = key >= begin && key < end ? x : lowest<T>();
          }
      }
  } else {
    // The queries at positions [key - right, key + left] see a key.
    const int queries = min(block.queries - block.query, kColumns * 8);
#pragma unroll
    for (int i = 0; i < kRows; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int64_t key = block.key + row + 16 * i + 8 * half + quad(), at = key - visible.offset - block.query;
        const int begin =
            visible.right < 0 || visible.right >= at ? 0 : static_cast<int>(min(at - visible.right, int64_t{kColumns * 8}));
        const int64_t last = visible.left < 0 || visible.left >= queries - 1 - at ? queries - 1 : at + visible.left;
        const int end = key < block.keys ? static_cast<int>(max(last, int64_t{-1})) + 1 : 0;
#pragma unroll
        for (int j = 0; j < kColumns; ++j)
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const int query = 8 * j + 2 * lane_in_quad() + e;
            T& x = d[i][j][2 * half + e];
            x = query >= begin && query < end ? x : lowest<T>();
          }
      }
  }
}

// Hides the keys that lie in none of a query's intervals, the queries that lie in none of a key's, and tiles that are not
// listed: the block's columns lie in one of these. `first_key`: the place of the sequence's key 0, from which the intervals of
// queries count.
template <bool kTransposed, int kRows, int kColumns, class T, class Block = ScoreBlock>
__device__ __forceinline__ void hide_by_sparsity(Accumulator<kRows, kColumns, T>& d, int row, const HeadSparsity& sparsity,
                                                 const Block& block, int first_key = 0) {
  const auto hide = [&](T& x, bool shown) { x = shown ? x : lowest<T>(); };
  const auto of_query = [&](int r) { return sparsity.of_query(min(block.query_of(r), block.queries - 1), block.head_of(r)); };
  const auto of_key = [&](int c) { return sparsity.of_key(min(block.key + c, block.keys - 1)); };
  if (sparsity.listed.data) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int r = row + 16 * i;  // sixteen rows lie in one tile of the list, too
      const int query = kTransposed ? block.query : min(block.query_of(r), block.queries - 1),
                key = min(kTransposed ? block.key + r : block.key, block.keys - 1);
      if (sparsity.listed.has(query, key)) continue;
#pragma unroll
      for (int j = 0; j < kColumns; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) d[i][j][e] = lowest<T>();
    }
  }
  // The spans of accumulators' rows, and those of their columns.
  if (kTransposed ? sparsity.keys : sparsity.queries) {
#pragma unroll
    for (int i = 0; i < kRows; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int r = row + 16 * i + 8 * half + quad();
        const RowSpans own = kTransposed ? of_key(r) : of_query(r);
        const int first = kTransposed ? block.query : block.key + first_key;
#pragma unroll
        for (int j = 0; j < kColumns; ++j)
#pragma unroll
          for (int e = 0; e < 2; ++e) hide(d[i][j][2 * half + e], own.has(first + 8 * j + 2 * lane_in_quad() + e));
      }
  }
  if (kTransposed ? sparsity.queries : sparsity.keys) {
#pragma unroll
    for (int j = 0; j < kColumns; ++j)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int c = 8 * j + 2 * lane_in_quad() + e;
        const RowSpans column = kTransposed ? of_query(c) : of_key(c);
#pragma unroll
        for (int i = 0; i < kRows; ++i)
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const int r = row + 16 * i + 8 * half + quad();
            hide(d[i][j][2 * half + e], column.has(kTransposed ? block.key + r + first_key : block.query_of(r)));
          }
      }
  }
}

// Replaces the scores of row (i, half) by their weights, weight(score, j, e) with the score's place in the accumulators, and
// returns the sum of the lane's own weights.
template <int kRows, int kColumns, class Weight>
__device__ __forceinline__ float make_row_weights(Accumulator<kRows, kColumns>& scores, int i, int half, Weight&& weight) {
  float sum = 0;
#pragma unroll
  for (int j = 0; j < kColumns; ++j)
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      float& x = scores[i][j][2 * half + e];
      x = weight(x, j, 2 * half + e);
      sum += x;
    }
  return sum;
}

// The same for scores that may be large. max: the maximum that they are measured from.
template <int kRows, int kColumns>
__device__ __forceinline__ float make_large_row_weights(Accumulator<kRows, kColumns>& scores, int i, int half, float scale,
                                                        float max) {
  return make_row_weights(scores, i, half,
                          [&](float x, int, int) { return FastBinary::exp(exponent_below(x, scale, pivot(max))); });
}

// The exponent in base 2 of a score's weight, (x + x_low) * scale - (lse + lse_low); x_low is read of compensated scores alone.
template <class Compensation>
__device__ __forceinline__ float exponent_of(float x, float x_low, float scale, float lse, float lse_low) {
  const float leading = fmaf(x, scale, -lse) - lse_low;
  return Compensation::kCompensated ? fmaf(x_low, scale, leading) : leading;
}

// A weight's gradient less delta; the low parts are read of compensated gradients alone.
template <class Compensation>
__device__ __forceinline__ float subtract_delta(float x, float x_low, float delta, float delta_low) {
  return Compensation::kCompensated ? (x - delta) + (x_low - delta_low) : x - delta;
}

// Makes weights, 2^(product * scale - lse), of column j of transposed products, [key][query]. `high` and `low`: lse in base 2
// of the queries 8 * j + 2 * lane_in_quad() and the next, as a sum of two floats.
template <int kColumns>
__device__ __forceinline__ void exp_column(Accumulator<1, kColumns>& d, int j, float scale, float2 high, float2 low) {
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    float& x = d[0][j][e];
    x = FastBinary::exp(fmaf(x, scale, e % 2 ? -high.y : -high.x) - (e % 2 ? low.y : low.x));
  }
}

// Computes weights, 2^(product * scale - high - low), from transposed products, [key][query], without score modification
// (has_score_mod is false). `weight` gets them in 16 bits, in a left operand's layout. read_lse(j, high, low) sets the two
// parts of lse for the queries 8 * j + 2 * lane_in_quad() and the next.
template <class T, int kColumns, class Read>
__device__ __forceinline__ void exp_products(Accumulator<1, kColumns>& d, const ScoreMod& score_mod, Read&& read_lse,
                                             unsigned (&weight)[kColumns / 2][4]) {
#pragma unroll
  for (int j = 0; j < kColumns; ++j) {
    float2 high, low;
    read_lse(j, high, low);
    exp_column(d, j, score_mod.scale, high, low);
#pragma unroll
    for (int half = 0; half < 2; ++half)
      weight[j / 2][j % 2 * 2 + half] = Fragments<T>::pair(d[0][j][2 * half], d[0][j][2 * half + 1]);
  }
}

}  // namespace flash_online::cuda
