// From products to scores in base 2, for a warp's accumulators: softcap, ALiBi, the mask, visibility, dropout; and to the
// backward pass's weights. Accumulators are [query][key], or transposed [key][query].
#pragma once

#include "../../../core/mask.h"
#include "../../../core/online_softmax.h"
#include "../../../core/philox.h"
#include "../../hw/math.cuh"
#include "../../mma/fragments.cuh"
#include "mask_tile.cuh"

namespace flash_online::cuda {

constexpr double kLn2 = 0.693147180559945309417, kLog2EInDouble = 1.4426950408889634074;

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

// How far above its point of reference a row's maximum may grow before sums and outputs are moved: weights reach 2^8.
constexpr float kRescaleThreshold = 8;

// Calls f(i, j, e, query, key) for every accumulator of a warp, whose rows (of 16 * kRows) begin at `row` of the block.
template <bool kTransposed, int kRows, int kColumns, class F>
__device__ __forceinline__ void for_each_score(const Accumulator<kRows, kColumns>&, int row, F&& f) {
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

// What a head's scores are made by.
struct ScoreMod {
  float scale;  // of a product, log2(e) included; of one under a softcap, that over the softcap
  float cap;  // softcap * log2(e), 0: none
  float slope;  // ALiBi's, times log2(e), 0: none
  bool has_score_mod;  // whether scores are made, or the product and its scale stand for them (scale > 0)

  // What all heads share; on the host, since it takes doubles.
  explicit ScoreMod(const AttentionProblem& problem)
      : scale(static_cast<float>(problem.softcap > 0 ? problem.scale / problem.softcap : problem.scale * kLog2EInDouble)),
        cap(static_cast<float>(problem.softcap * kLog2EInDouble)),
        slope(0),
        // A scale of 0, NaN or below would turn the order of the products.
        has_score_mod(problem.softcap > 0 || problem.alibi_slopes ||
                      (problem.mask.data && problem.mask_dtype != DType::kBool) || !(scale > 0 && scale < 1e30f)) {}

  __device__ ScoreMod of_head(const AttentionProblem& problem, int64_t batch, int64_t head) const {
    ScoreMod rule = *this;
    if (problem.alibi_slopes)
      rule.slope = kLog2E * static_cast<const float*>(
                                problem.alibi_slopes)[batch * problem.alibi_stride[0] + head * problem.alibi_stride[1]];
    return rule;
  }

  // What a score that came out of this rule is multiplied by.
  __device__ float remaining_scale() const { return has_score_mod ? 1.0f : scale; }
};

// The same with what float leaves of its factors, for scores that are sums of two floats.
struct PreciseScoreMod : ScoreMod {
  float scale_low, slope_low = 0;

  __device__ PreciseScoreMod(const ScoreMod& rule, const AttentionProblem& problem, int64_t batch, int64_t head)
      : ScoreMod(rule.of_head(problem, batch, head)),
        scale_low(static_cast<float>(problem.scale * kLog2EInDouble - static_cast<double>(scale))) {
    if (!problem.alibi_slopes) return;
    const float natural =
        static_cast<const float*>(problem.alibi_slopes)[batch * problem.alibi_stride[0] + head * problem.alibi_stride[1]];
    slope = two_product(kLog2E, natural, slope_low);
    slope_low = fmaf(kLog2ELow, natural, slope_low);
  }
};

// What the scores of a head of these elements are made by.
template <class Element>
__device__ __forceinline__ auto score_mod_of_head(const ScoreMod& rule, const AttentionProblem& problem, int64_t batch,
                                                  int64_t head) {
  if constexpr (CompensatedAccumulator<Element, 1, 1>::kCompensated)
    return PreciseScoreMod(rule, problem, batch, head);
  else
    return rule.of_head(problem, batch, head);
}

// For scores that are one float each.
struct NotCompensated {
  static constexpr bool kCompensated = false;
};

// A block of scores, [queries from `query` on][keys from `key` on] of a sequence.
struct ScoreBlock {
  int query, key;
  int queries, keys;  // of the sequence
  bool whole;  // every query of the block sees every key by arithmetic, and all of both exist
};

// x + rest += bias * (factor + factor_low)
__device__ __forceinline__ void add_in_two_floats(float& x, float& rest, float bias, float factor, float factor_low) {
  float product_low, sum_low;
  x = two_sum(x, two_product(bias, factor, product_low), sum_low);
  rest += sum_low + fmaf(bias, factor_low, product_low);
}

// Softcap and ALiBi. `gradients`, if any, of the same shape, are multiplied by the derivative of a softcap.
template <bool kTransposed, int kRows, int kColumns, class Rule, class Rest = NotCompensated>
__device__ __forceinline__ void apply_score_mod(Accumulator<kRows, kColumns>& d, int row, const Rule& rule,
                                                const ScoreBlock& block, const Visibility& visible,
                                                std::type_identity_t<Accumulator<kRows, kColumns>>* gradients = nullptr,
                                                Rest* rest = nullptr) {
  if (rule.cap > 0) {
    if constexpr (Rest::kCompensated) {
      add_rest(d, *rest);
      clear(rest->sums);
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i)
#pragma unroll
      for (int j = 0; j < kColumns; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const float bent = tanhf(d[i][j][e] * rule.scale);
          if (gradients) (*gradients)[i][j][e] *= 1 - bent * bent;
          d[i][j][e] = rule.cap * bent;
        }
  } else if constexpr (Rest::kCompensated) {
    for_each(d, [&](float& x, int i, int j, int e) {
      float &low = rest->sums[i][j][e], rounded;
      const float whole = x;
      x = two_product(x, rule.scale, rounded);
      low = rounded + fmaf(low, rule.scale, whole * rule.scale_low);
    });
  } else {
    for_each(d, [&](float& x, int, int, int) { x *= rule.scale; });
  }
  if (rule.slope != 0) {
    const int between = static_cast<int>(block.query + visible.offset - block.key);
    for_each_score<kTransposed>(d, row, [&](int i, int j, int e, int query, int key) {
      float& x = d[i][j][e];
      const float distance = fabsf(static_cast<float>(between + query - key));
      if constexpr (Rest::kCompensated) {
        add_in_two_floats(x, rest->sums[i][j][e], distance, -rule.slope, -rule.slope_low);
      } else {
        x -= rule.slope * distance;
      }
    });
  }
}

// Adds a float mask, hides by a bool one.
template <bool kTransposed, int kRows, int kColumns, class Mask, class Rest = NotCompensated>
__device__ __forceinline__ void mask_scores(Accumulator<kRows, kColumns>& d, int row, DType dtype, const Mask& mask,
                                            Rest* rest = nullptr) {
  visit_mask(dtype, [&]<class T>(T) {
    using Value = std::conditional_t<std::is_same_v<T, bool>, unsigned char, T>;
    const auto apply = [&](int i, int j, int e, Value value) {
      float& x = d[i][j][e];
      if constexpr (std::is_same_v<T, bool>) {
        x = value ? x : lowest<float>();
      } else if constexpr (Rest::kCompensated) {
        add_in_two_floats(x, rest->sums[i][j][e], widen(value), kLog2E, kLog2ELow);
      } else {
        x = fmaf(widen(value), kLog2E, x);
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
    if constexpr (kTransposed && sizeof(T) == 2 && kColumns % 2 == 0) {
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
    for_each_score<kTransposed>(
        d, row, [&](int i, int j, int e, int query, int key) { apply(i, j, e, mask.template at<Value>(query, key)); });
  });
}

// Hides what is out of a query's range. With kTransposed also queries that do not exist.
template <bool kTransposed, int kRows, int kColumns>
__device__ __forceinline__ void hide_scores(Accumulator<kRows, kColumns>& d, int row, const ScoreBlock& block,
                                            const Visibility& visible) {
  if constexpr (!kTransposed) {
#pragma unroll
    for (int i = 0; i < kRows; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const KeyRange range = keys_of(visible, block.query + row + 16 * i + 8 * half + quad(), block.keys);
        const int begin = static_cast<int>(max(range.begin - block.key, int64_t{0})),
                  end = static_cast<int>(max(min(range.end - block.key, int64_t{kColumns * 8}), int64_t{0}));
#pragma unroll
        for (int j = 0; j < kColumns; ++j)
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const int key = 8 * j + 2 * lane_in_quad() + e;
            float& x = d[i][j][2 * half + e];
            x = key >= begin && key < end ? x : lowest<float>();
          }
      }
  } else {
    // A key's queries: those whose position is in [key - right, key + left].
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
            float& x = d[i][j][2 * half + e];
            x = query >= begin && query < end ? x : lowest<float>();
          }
      }
  }
}

// The exponent of the weight of score x, whose rest is `rest` (0: of scores that are one float each) and both times `scale`,
// from an lse of two parts.
template <class Rest>
__device__ __forceinline__ float exponent_of(float x, float rest, float scale, float high, float low) {
  const float whole = fmaf(x, scale, -high) - low;
  return Rest::kCompensated ? fmaf(rest, scale, whole) : whole;
}

// A weight's gradient less delta, both the sum of two floats where the rest is kept.
template <class Rest>
__device__ __forceinline__ float less_delta(float x, float rest, float high, float low) {
  return Rest::kCompensated ? (x - high) + (rest - low) : x - high;
}

// What dropout leaves of weights' gradients, as draw_weights' bits tell; those of load_values().
template <class Element, int kRows, int kColumns>
__device__ __forceinline__ void drop_gradients(Accumulator<kRows, kColumns>& d,
                                               CompensatedAccumulator<Element, kRows, kColumns>& rest, unsigned kept,
                                               float keep_scale) {
  for_each(d, [&](float& x, int i, int j, int e) {
    const bool keep = kept >> (4 * (i * kColumns + j) + e) & 1;
    if constexpr (Fragments<Element>::kPieces == 1) x *= keep_scale;
    if constexpr (CompensatedAccumulator<Element, kRows, kColumns>::kCompensated)
      rest.sums[i][j][e] = keep ? rest.sums[i][j][e] : 0;
    x = keep ? x : 0;
  });
}

// Transposed products, [key][query], of a rule that does not bend them, into weights: 2^(product * rule.scale - high - low),
// also in 16 bits, as a left operand has them. read_lse(j, high, low) sets the two for the queries 8 j + 2 place and the next.
template <class T, int kColumns, class Read>
__device__ __forceinline__ void exp_products(Accumulator<1, kColumns>& d, const ScoreMod& rule, Read&& read_lse,
                                             unsigned (&weight)[kColumns / 2][4]) {
#pragma unroll
  for (int j = 0; j < kColumns; ++j) {
    float2 high, low;
    read_lse(j, high, low);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      float& x = d[0][j][e];
      x = FastBinary::exp(fmaf(x, rule.scale, e % 2 ? -high.y : -high.x) - (e % 2 ? low.y : low.x));
    }
#pragma unroll
    for (int half = 0; half < 2; ++half)
      weight[j / 2][j % 2 * 2 + half] = Fragments<T>::pair(d[0][j][2 * half], d[0][j][2 * half + 1]);
  }
}

// Dropout of one head.
struct Dropout {
  Philox random;
  uint32_t threshold;
  int64_t batch, head;

  __device__ Dropout(const AttentionProblem& problem, int64_t sequence, int64_t head_)
      : random(problem.rng ? problem.rng[0] : 0, problem.rng ? problem.rng[1] : 0),
        threshold(problem.rng ? drop_threshold(problem.dropout) : 0),
        batch(problem.batch_begin + sequence),
        head(head_) {}

  __device__ explicit operator bool() const { return threshold > 0; }

  // Bit n: whether the weight of key Philox::kKeys * group + n is kept.
  __device__ unsigned kept(int64_t query, int64_t group) const { return random.kept(batch, head, query, group, threshold); }
};

// Which weights of two neighbouring pieces of 16 x 8 accumulators, side by side or (kStacked) one below the other, are kept:
// bit 4 n + e for accumulator e of the n-th. Of the block they begin at `row` and `column`. Eight neighbouring keys share a
// draw, and each of the 32 lanes makes one of the two pieces' 32: block.key and where the pieces' keys begin must be multiples
// of 8.
template <bool kTransposed, bool kStacked = false>
__device__ __forceinline__ unsigned kept_weights(int row, int column, const Dropout& dropout, const ScoreBlock& block) {
  static_assert(Philox::kKeys == 8);
  if constexpr (!kTransposed) {
    // The four lanes of a `group` hold eight keys of each piece, of the rows `group` and `group` + 8: a byte of each lane.
    const int upper = lane_in_quad() & 1, piece = lane_in_quad() / 2, below = kStacked ? piece : 0,
              beside = kStacked ? 0 : piece;
    unsigned drawn = dropout.kept(block.query + row + 16 * below + quad() + 8 * upper, (block.key + column) / 8 + beside)
                     << 8 * lane_in_quad();
    drawn |= __shfl_xor_sync(~0u, drawn, 1);
    drawn |= __shfl_xor_sync(~0u, drawn, 2);
    const unsigned own = drawn >> 2 * lane_in_quad() & 0x03030303u;
    return (own | own >> 6 | own >> 12 | own >> 18) & 0xffu;
  } else {
    // The eight lanes of a `place` hold 16 keys of four queries: the draw of number `group` has bit 0 of it for the query's
    // parity, bit 1 for the upper keys and bit 2 for the piece, and is of one bit to each of the eight lanes.
    const int number = quad(), below = kStacked ? number / 4 : 0, beside = kStacked ? 0 : number / 4;
    unsigned bits = dropout.kept(block.query + column + 8 * beside + 2 * lane_in_quad() + number % 2,
                                 (block.key + row) / 8 + 2 * below + number / 2 % 2);
    // Eight lanes' bytes, as a square of bits, are turned over.
#pragma unroll
    for (int side = 1; side < 8; side *= 2) {
      const unsigned right = side == 1 ? 0xaau : side == 2 ? 0xccu : 0xf0u;
      const unsigned other = __shfl_xor_sync(~0u, bits, 4 * side);
      bits = number & side ? (bits & right) | (other & right) >> side : (bits & ~right) | (other << side & right);
    }
    return bits & 0xffu;
  }
}

// Calls f(i, j, kept) for each piece of an accumulator's shape: bit e of `kept` for accumulator e.
template <bool kTransposed, int kRows, int kColumns, class F>
__device__ __forceinline__ void draw_weights(int row, const Dropout& dropout, const ScoreBlock& block, F&& f) {
  static_assert(kColumns % 2 == 0);
#pragma unroll
  for (int i = 0; i < kRows; ++i)
#pragma unroll
    for (int j = 0; j < kColumns; j += 2) {
      const unsigned kept = kept_weights<kTransposed>(row + 16 * i, 8 * j, dropout, block);
      f(i, j, kept & 15);
      f(i, j + 1, kept >> 4);
    }
}

// The same as bits: 4 * (i * kColumns + j) + e for the weight at [i][j][e]. By a call, so that a kernel has the registers that
// the draws take to itself where there is no dropout.
template <bool kTransposed, int kRows, int kColumns>
__device__ __noinline__ unsigned draw_weights(int row, const Dropout dropout, const ScoreBlock block) {
  constexpr bool kStacked = kColumns == 1;
  static_assert(kRows * kColumns <= 8 && (kColumns % 2 == 0 || kStacked));
  unsigned kept = 0;
#pragma unroll 2
  for (int n = 0; n < kRows * kColumns; n += 2)
    kept |= kept_weights<kTransposed, kStacked>(row + n / kColumns * 16, n % kColumns * 8, dropout, block) << (4 * n);
  return kept;
}

// Calls drop(x) for every accumulator that dropout drops.
template <bool kTransposed, int kRows, int kColumns, class Drop>
__device__ __forceinline__ void drop_weights(Accumulator<kRows, kColumns>& d, int row, const Dropout& dropout,
                                             const ScoreBlock& block, Drop&& drop) {
  draw_weights<kTransposed, kRows, kColumns>(row, dropout, block, [&](int i, int j, unsigned kept) {
#pragma unroll
    for (int e = 0; e < 4; ++e)
      if (!(kept >> e & 1)) drop(d[i][j][e]);
  });
}

}  // namespace flash_online::cuda
