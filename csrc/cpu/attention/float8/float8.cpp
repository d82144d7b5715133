// float8_attention on the CPU, the oracle of CUDA's kernels: it rounds where they round. Queries, keys and values are quantised
// to e4m3 and kept as floats, in which the product of two of them is exact.
//
// A work item is a tile of queries of one head. Scores, weights and outputs have the queries in the lanes, as in score_tile.h.
#include "../../../core/cache.h"
#include "../../kernels.h"
#include "../score_tile.h"

namespace flash_online::cpu::FLASH_ONLINE_ISA {
namespace {

// A row's maximum rises once per block of so many keys, before their weights are rounded.
constexpr int64_t kBlockKeys = 128;
// Weights, which are at most 1, are rounded as multiples of 2^-8: e4m3 has as many digits from 2^-6 to 448.
constexpr float kWeightUnit = 0x1p-8f;

// Rounds to e4m3 as narrow<Float8E4M3> does: to nearest, ties to even, saturating; NaN stays NaN.
FLASH_ONLINE_INLINE Vector<float> rounded_to_e4m3(Vector<float> x) {
  using Bits = Vector<uint32_t>;
  const Bits sign = reinterpret_cast<Bits>(x) & 0x80000000u;
  const Vector<float> size = reinterpret_cast<Vector<float>>(reinterpret_cast<Bits>(x) ^ sign);
  const Vector<float> kept = size > 448.f ? broadcast(448.f) : size;
  const Bits bits = reinterpret_cast<Bits>(kept);
  const Bits normal = (bits + 0x7ffffu + (bits >> 20 & 1u)) & 0xfff00000u;
  const Bits subnormal = reinterpret_cast<Bits>((kept + 0x1p14f) - 0x1p14f);  // below 2^-6 numbers count in units of 2^-9
  const Bits rounded = (kept < 0x1p-6f ? subnormal : normal) | sign;
  return x == x ? reinterpret_cast<Vector<float>>(rounded) : x;
}

// The quotient in e4m3. A scale of 0 is that of an operand without a finite number other than 0, and makes all numbers 0.
FLASH_ONLINE_INLINE Vector<float> quantised(Vector<float> x, float scale) {
  if (scale != 0.f) return rounded_to_e4m3(x / scale);
  return x == x ? Vector<float>{} : x;
}

// Calls f(row, column, x) for every vector of a matrix, widened; x is 0 past the end of a row.
template <class E, class F>
FLASH_ONLINE_INLINE void for_each_row_vector(Matrix<const E> from, int64_t rows, int64_t columns, const F& f) {
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t c = 0; c < columns; c += kLanes<float>) f(r, c, load_vector_of_row(from, rows, columns, r, c));
}

FLASH_ONLINE_INLINE Vector<float> finite_or_zero(Vector<float> x) { return x - x == 0.f ? x : Vector<float>{}; }

// The largest magnitude among the finite numbers of vectors.
class LargestMagnitude {
 public:
  FLASH_ONLINE_INLINE void add(Vector<float> x) {
    const Vector<float> finite = finite_or_zero(x);
    largest_ = vector_max(largest_, finite < 0.f ? -finite : finite);
  }
  float scale() const {
    return reduce(largest_, [](auto a, auto b) FLASH_ONLINE_LAMBDA_INLINE { return a > b ? a : b; }) / 448.f;
  }

 private:
  Vector<float> largest_ = {};
};

// The operands that all tiles of queries share, of each group: the query heads of a batch that have one key head.
struct Operands {
  float *query_scale, *key_scale, *value_scale;  // [groups]: what operands are multiplied by
  float* key_mean = nullptr;  // [groups, key_pitch]: what was subtracted from keys; null: nothing
  float *key, *value;  // [groups, keys, pitch], quantised
  int64_t key_pitch, value_pitch;

  Operands(const Float8Problem& call, ScratchAllocator& allocator)
      : key_pitch(padded(call.attention.head_dim)), value_pitch(padded(call.attention.head_dim_v)) {
    const int64_t groups = call.attention.batch * call.attention.key_heads, rows = groups * call.attention.keys;
    for (float** scale : {&query_scale, &key_scale, &value_scale}) *scale = allocator.take<float>(groups);
    if (call.smooth_keys && call.input != DType::kFloat8E4M3) key_mean = allocator.take<float>(groups * key_pitch);
    key = allocator.take<float>(rows * key_pitch);
    value = allocator.take<float>(rows * value_pitch);
  }
};

// Writes the means of a matrix's columns; numbers that are not finite count as 0.
template <class E>
void find_column_means(Matrix<const E> from, int64_t rows, int64_t columns, float* mean) {
  constexpr int n = kLanes<float>;
  for (int64_t c = 0; c < columns; c += n) {
    double sum[n] = {};
    for (int64_t r = 0; r < rows; ++r) {
      const Vector<float> x = finite_or_zero(load_vector_of_row(from, rows, columns, r, c));
      for (int l = 0; l < n; ++l) sum[l] += x[l];
    }
    for (int l = 0; l < n; ++l) mean[c + l] = rows ? static_cast<float>(sum[l] / static_cast<double>(rows)) : 0.f;
  }
}

// Quantises a matrix less `mean` (null: 0) to to[rows, pitch]; returns the scale.
template <class E>
float quantise_rows(Matrix<const E> from, int64_t rows, int64_t columns, const float* mean, float* to, int64_t pitch) {
  const auto centred = [&](Vector<float> x, int64_t c)
                           FLASH_ONLINE_LAMBDA_INLINE { return mean ? x - load_vector(mean + c) : x; };
  LargestMagnitude largest;
  for_each_row_vector<E>(from, rows, columns,
                         [&](int64_t, int64_t c, Vector<float> x) FLASH_ONLINE_LAMBDA_INLINE { largest.add(centred(x, c)); });
  const float scale = largest.scale();
  for_each_row_vector<E>(from, rows, columns, [&](int64_t r, int64_t c, Vector<float> x) FLASH_ONLINE_LAMBDA_INLINE {
    store_vector(to + r * pitch + c, quantised(centred(x, c), scale));
  });
  return scale;
}

// Prepares one operand of a group: 0 is the query, of which the scale alone is found, 1 the key, 2 the value.
template <class E>
void prepare_operand(const Float8Problem& call, const Operands& operands, int64_t group, int64_t operand) {
  const AttentionProblem& problem = call.attention;
  const int64_t batch = group / problem.key_heads, head = group % problem.key_heads, keys = problem.keys;
  const auto rows_of = [&](const ConstView4& view) { return matrix_of<const E>(view, batch, head, 0); };
  float* const key = operands.key + group * keys * operands.key_pitch;
  float* const value = operands.value + group * keys * operands.value_pitch;
  if constexpr (std::is_same_v<E, Float8E4M3>) {
    const auto widen_rows = [&](const ConstView4& view, int64_t columns, float* to, int64_t pitch) {
      load_rows<E>(rows_of(view), keys, columns, to, keys, pitch);
    };
    if (operand == 0) {
      operands.query_scale[group] = scale_of(call.query_scale, call.query_scale_stride, batch, head);
    } else if (operand == 1) {
      operands.key_scale[group] = scale_of(call.key_scale, call.key_scale_stride, batch, head);
      widen_rows(problem.key, problem.head_dim, key, operands.key_pitch);
    } else {
      operands.value_scale[group] = scale_of(call.value_scale, call.value_scale_stride, batch, head);
      widen_rows(problem.value, problem.head_dim_v, value, operands.value_pitch);
    }
  } else if (operand == 0) {
    LargestMagnitude largest;
    const int64_t heads = problem.heads / problem.key_heads;
    for (int64_t h = head * heads; h < (head + 1) * heads; ++h)
      for_each_row_vector<E>(matrix_of<const E>(problem.query, batch, h, 0), problem.queries, problem.head_dim,
                             [&](int64_t, int64_t, Vector<float> x) FLASH_ONLINE_LAMBDA_INLINE { largest.add(x); });
    operands.query_scale[group] = largest.scale();
  } else if (operand == 1) {
    float* const mean = operands.key_mean ? operands.key_mean + group * operands.key_pitch : nullptr;
    if (mean) find_column_means<E>(rows_of(problem.key), keys, problem.head_dim, mean);
    operands.key_scale[group] = quantise_rows<E>(rows_of(problem.key), keys, problem.head_dim, mean, key, operands.key_pitch);
  } else {
    operands.value_scale[group] =
        quantise_rows<E>(rows_of(problem.value), keys, problem.head_dim_v, nullptr, value, operands.value_pitch);
  }
}

struct Float8Scratch {
  float *query_rows, *query;  // [kQueries, padded(head_dim)], [head_dim, kQueries]
  float* score;  // [kBlockKeys, kQueries]: scores, then rounded weights in units of kWeightUnit
  MaskTile<float> mask;
  float* term;  // [kQueries]: the product with the keys' mean, which belongs to each score of a query
  float *block_max, *max, *sum, *rescale;  // [kQueries], as in forward.cpp
  float* out;  // [head_dim_v, kQueries]

  Float8Scratch(const AttentionProblem& problem, ScratchAllocator& allocator) {
    query_rows = allocator.take<float>(kQueries * padded(problem.head_dim));
    query = allocator.take<float>(kQueries * problem.head_dim);
    score = allocator.take<float>(kBlockKeys * kQueries);
    mask.visible = allocator.take<uint64_t>(kBlockKeys);
    mask.bias = nullptr;
    for (float** row : {&term, &block_max, &max, &sum, &rescale}) *row = allocator.take<float>(kQueries);
    out = allocator.take<float>(kQueries * problem.head_dim_v);
  }
};

// Loads a tile of queries, quantised, and their products with the keys' mean.
template <class E>
void load_queries(const AttentionProblem& problem, const QueryTile& query, float query_scale, const float* key_mean,
                  const Float8Scratch& tile) {
  const int64_t pitch = padded(problem.head_dim);
  const auto from = matrix_of<const E>(problem.query, query.batch, query.head, query.first);
  std::fill_n(tile.term, kQueries, 0.f);
  if (key_mean)
    for (int64_t r = 0; r < query.rows; ++r) {
      Vector<float> product = {};
      for (int64_t c = 0; c < problem.head_dim; c += kLanes<float>)
        product += load_vector_of_row(from, query.rows, problem.head_dim, r, c) * load_vector(key_mean + c);
      tile.term[r] = sum_of_lanes<float>(product) * static_cast<float>(problem.scale);
    }
  for_each_row_vector<E>(
      from, query.rows, problem.head_dim, [&](int64_t r, int64_t c, Vector<float> x) FLASH_ONLINE_LAMBDA_INLINE {
        store_vector(tile.query_rows + r * pitch + c, std::is_same_v<E, Float8E4M3> ? x : quantised(x, query_scale));
      });
  load_transposed<float>(Matrix<const float>{tile.query_rows, pitch, 1}, query.rows, problem.head_dim, tile.query, kQueries);
}

// Turns a block's products into scores. They are stored before anything is subtracted from them, which a compiler might
// otherwise contract with the multiplication.
__attribute__((noinline)) void finish_scores(const AttentionProblem& problem, const QueryTile& query, int64_t begin,
                                             int64_t count, float factor, const Float8Scratch& tile) {
  for_each_vector(tile.score, count, query.lanes, [&](Vector<float> x, int64_t, int64_t l) FLASH_ONLINE_LAMBDA_INLINE {
    return x * factor + load_vector(tile.term + l);
  });
  ScoreMod::apply<float>(problem, query, begin, count, tile.score, static_cast<float*>(nullptr), nullptr);
  if (tile.mask.has_hidden) hide_scores(tile.mask, count, query.lanes, tile.score, 1.f);
}

// Raises the states to a block's maxima, turns its scores into rounded weights and adds the weights, not rounded, to the sums.
// Returns whether the output so far has to be rescaled.
__attribute__((noinline)) bool absorb_scores(const QueryTile& query, int64_t count, const Float8Scratch& tile) {
  block_maxima(tile.score, count, query.lanes, tile.block_max);
  bool needs_rescale = false;
  for (int64_t l = 0; l < query.lanes; l += kLanes<float>) {
    Softmax<Vector<float>> state{load_vector(tile.max + l), load_vector(tile.sum + l)};
    const Vector<float> rescale = state.raise_max(load_vector(tile.block_max + l));
    const auto is_rescaled = rescale != 1.f;
    for (int i = 0; i < kLanes<float>; ++i) needs_rescale |= is_rescaled[i] != 0;
    store_vector(tile.rescale + l, rescale);
    Vector<float> partial_sum[4] = {};  // the key alone selects the sum of its weight, wherever a block ends
    for (int64_t k = 0; k < count; ++k) {
      float* const score = tile.score + k * kQueries + l;
      const Vector<float> weight = state.weight(load_vector(score));
      partial_sum[k % 4] += weight;
      store_vector(score, rounded_to_e4m3(weight / kWeightUnit));
    }
    state.add((partial_sum[0] + partial_sum[1]) + (partial_sum[2] + partial_sum[3]));
    store_vector(tile.max + l, state.max);
    store_vector(tile.sum + l, state.sum);
  }
  return needs_rescale;
}

// The epilogue: the sink, lse, and the output divided by the sum of weights.
void store_results(const AttentionProblem& problem, const QueryTile& query, float value_scale, const Float8Scratch& tile) {
  const int64_t offset = query.lse_offset(problem);
  std::fill_n(tile.rescale, kQueries, 0.f);
  for (int64_t i = 0; i < query.rows; ++i) {
    Softmax<float> state{tile.max[i], tile.sum[i]};
    float weight = kWeightUnit;
    if (problem.sinks) weight *= state.absorb(static_cast<const float*>(problem.sinks)[query.head]);
    if (problem.lse) static_cast<float*>(problem.lse)[offset + i] = state.lse();
    tile.rescale[i] = weight * state.inverse_sum_or_zero();
  }
  for_each_vector(tile.out, problem.head_dim_v, query.lanes,
                  [&](Vector<float> x, int64_t, int64_t l) { return x * load_vector(tile.rescale + l); });
  std::fill_n(tile.rescale, kQueries, value_scale);
  visit_floating<Float16, BFloat16>(problem.dtype, [&]<class E>(Type<E>) {
    if constexpr (sizeof(E) == 2)
      store_transposed<E>(tile.out, kQueries, tile.rescale, query.rows, problem.head_dim_v,
                          matrix_of<E>(problem.out, query.batch, query.head, query.first));
  });
}

template <class E>
void float8_tile(const AttentionProblem& problem, const Operands& operands, const QueryTile& query, std::byte* scratch) {
  ScratchAllocator allocator(scratch);
  Float8Scratch tile(problem, allocator);
  const int64_t group = query.batch * problem.key_heads + query.head / (problem.heads / problem.key_heads);
  const float* const mean = operands.key_mean ? operands.key_mean + group * operands.key_pitch : nullptr;
  load_queries<E>(problem, query, operands.query_scale[group], mean, tile);
  const auto factor =
      static_cast<float>(double(operands.query_scale[group]) * double(operands.key_scale[group]) * problem.scale);
  std::fill_n(tile.max, kQueries, lowest<float>());
  std::fill_n(tile.sum, kQueries, 0.f);

  bool is_first = true;
  const KeyRange range = keys_of_any(problem.visible, query.first, query.end(), problem.keys);
  for (int64_t begin = range.begin / kBlockKeys * kBlockKeys; begin < range.end; begin += kBlockKeys) {
    const int64_t count = std::min(kBlockKeys, range.end - begin), row = group * problem.keys + begin;
    if (!load_mask(problem, query, begin, count, tile.mask)) continue;
    matmul<float>(Accumulate::kOverwrite, count, query.lanes, problem.head_dim, operands.key + row * operands.key_pitch,
                  operands.key_pitch, 1, tile.query, kQueries, tile.score, kQueries);
    finish_scores(problem, query, begin, count, factor, tile);
    const bool needs_rescale = absorb_scores(query, count, tile);
    const Accumulate mode = is_first ? Accumulate::kOverwrite : needs_rescale ? Accumulate::kRescaleAndAdd : Accumulate::kAdd;
    is_first = false;
    matmul<float>(mode, problem.head_dim_v, query.lanes, count, operands.value + row * operands.value_pitch, 1,
                  operands.value_pitch, tile.score, kQueries, tile.out, kQueries, tile.rescale);
  }
  if (is_first) std::fill_n(tile.out, kQueries * problem.head_dim_v, 0.f);
  store_results(problem, query, operands.value_scale[group], tile);
}

}  // namespace

Memory float8_memory(const Float8Problem& call) {
  ScratchAllocator scratch(nullptr), shared(nullptr);
  Float8Scratch(call.attention, scratch);
  Operands(call, shared);
  return {scratch.bytes(), shared.bytes()};
}

void float8(const Float8Problem& call, const Executor& executor) {
  const AttentionProblem& problem = call.attention;
  ScratchAllocator shared(executor.shared);
  const Operands operands(call, shared);
  const auto run = [&]<class E>(Type<E>) {
    for_each_item(executor, 3 * problem.batch * problem.key_heads,
                  [&](int64_t item, std::byte*) { prepare_operand<E>(call, operands, item / 3, item % 3); });
    const int64_t tiles = ceil_div(problem.queries, kQueries);
    for_each_item(executor, problem.batch * problem.heads * tiles, [&](int64_t item, std::byte* scratch) {
      const int64_t head = item / tiles, tile = tiles - 1 - item % tiles;  // under a causal mask the last has the most work
      float8_tile<E>(problem, operands, QueryTile(problem, head / problem.heads, head % problem.heads, tile * kQueries),
                     scratch);
    });
  };
  if (call.input == DType::kFloat8E4M3)
    run(Type<Float8E4M3>{});
  else if (call.input == DType::kFloat16)
    run(Type<Float16>{});
  else
    run(Type<BFloat16>{});
}

}  // namespace flash_online::cpu::FLASH_ONLINE_ISA
