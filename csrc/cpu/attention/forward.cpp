// Attention on the CPU: the forward pass, dropout's mask, and the table of all attention kernels of an instruction set. Only
// one tile of scores (kQueries x kKeys) per worker exists at a time, so that memory beyond the results is O(length). The
// algorithm is FlashAttention (arXiv 2205.14135) with the loop order of FlashAttention-2 (arXiv 2307.08691).
//
// A work item is a tile of queries of one head. No other item writes its results, which therefore do not depend on the number
// of threads.
#include <atomic>

#include "../kernels.h"
#include "score_tile.h"
#include "work_items.h"

namespace flash_online::cpu::FLASH_ONLINE_ISA {
namespace {

// Keys and values as operands of the matmuls: the tensors themselves where possible, else copies that all tiles of queries
// share. Paired values are copied as blocks of kKeys keys, each transposed to [padded(head_dim_v), kKeys]. With `by_tile` each
// tile makes its own copies instead, for calls of few heads that must not need more memory.
template <class E>
struct KeyValueOperands {
  using F = Operand<E>;
  CpuTileList blocks;
  F *key = nullptr, *value = nullptr;
  int64_t key_pitch = 0, value_pitch = 0;

  KeyValueOperands(const AttentionProblem& call, ScratchAllocator& allocator, bool by_tile)
      : blocks(key_blocks(call, allocator)) {
    const int64_t length = call.key_starts ? 1 : call.keys;  // packed sequences are of any length
    key_pitch = operand_pitch<F>(call.head_dim);
    value_pitch = kPaired<F> ? padded(call.head_dim_v) : call.head_dim_v;
    if (by_tile) return;
    if (!is_usable_in_place<E>(call.key, length, call.head_dim))
      key = allocator.take<F>(call.key_heads * blocks.total() * kKeys * key_pitch);
    if (kPaired<F> || !is_usable_in_place<E>(call.value, length, call.head_dim_v))
      value = allocator.take<F>(call.value_heads * blocks.total() * kKeys * value_pitch);
  }

  F* key_rows(const SequenceProblem& sequence, int64_t head, int64_t begin) const {
    return key + row(sequence.problem.key_heads, sequence, head, begin) * key_pitch;
  }
  F* value_rows(const SequenceProblem& sequence, int64_t head, int64_t begin) const {
    return value + row(sequence.problem.value_heads, sequence, head, begin) * value_pitch;
  }

 private:
  int64_t row(int64_t heads, const SequenceProblem& sequence, int64_t head, int64_t begin) const {
    return blocks.index_of(heads, {sequence.index, head, begin / kKeys}) * kKeys + begin % kKeys;
  }
};

template <class E>
Operand<E>* take_value_pairs(const AttentionProblem& problem, ScratchAllocator& allocator) {
  return allocator.take<Operand<E>>(kPaired<Operand<E>> ? kKeys * padded(problem.head_dim_v) : 0);
}

// Copies one block of a sequence's keys and values, of one head.
template <class E>
void copy_key_block(const SequenceProblem& sequence, const KeyValueOperands<E>& operands, int64_t head, int64_t block,
                    std::byte* scratch) {
  using F = Operand<E>;
  const AttentionProblem& problem = sequence.problem;
  const int64_t begin = block * kKeys, count = std::min(kKeys, problem.keys - begin);
  if (operands.key && head < problem.key_heads)
    load_rows<E>(matrix_of<const E>(problem.key, sequence.batch, head, begin), count, problem.head_dim,
                 operands.key_rows(sequence, head, begin), kKeys, operands.key_pitch);
  if (!operands.value || head >= problem.value_heads) return;
  const auto from = matrix_of<const E>(problem.value, sequence.batch, head, begin);
  F* to = operands.value_rows(sequence, head, begin);
  if constexpr (kPaired<F>) {
    ScratchAllocator allocator(scratch);
    F* const pairs = take_value_pairs<E>(problem, allocator);
    const int64_t pitch = operands.value_pitch;
    load_row_pairs<E>(from, count, problem.head_dim_v, pairs, kKeys, pitch);
    transpose_pairs(pairs, pitch * kBf16Digits<F>, kKeys / 2, pitch, to, kKeys / 2 * kBf16Digits<F>);
  } else {
    load_rows<E>(from, count, problem.head_dim_v, to, count, operands.value_pitch);
  }
}

// The number of keys in one sum of weights and values; the sums are then added up, see add_partial. With ALiBi, which sets the
// order of keys, the keys after the first block have separate sums.
constexpr int64_t kKeysPerSum = 2048;
inline bool has_several_sums(const AttentionProblem& problem) { return problem.keys > kKeysPerSum || problem.alibi_slopes; }
inline int64_t sum_of_block(const AttentionProblem& problem, int64_t begin, int64_t start_key) {
  return begin / kKeysPerSum * 2 + (problem.alibi_slopes && begin > start_key);
}

template <class E>
struct ForwardScratch : ScoreTile<E> {
  using A = Accumulator<E>;
  using F = Operand<E>;
  F* weight_pairs;  // [kKeys / 2, kQueries] pairs
  A* out;  // [padded(head_dim_v), kQueries]
  // [kQueries]: the states; the factor of the output so far; the number subtracted from scores
  A *max, *sum, *rescale, *shift;
  bool* has_double_max;  // [kQueries]: whether the state's maximum is double_max, since it is no float
  double* double_max;
  A* dropout_factor;  // [kKeys, kQueries]
  // The sums over the keys before the keys of `out` and `sum`, and their rounding errors: [padded(head_dim_v), kQueries] each,
  // [kQueries] each
  A *out_total, *out_low, *sum_total, *sum_low;
  A* largest;  // [kQueries]: the largest scores so far, if the maximum logit is wanted
  F *key_buffer, *value_buffer;  // `by_tile`: copies of a block, [kKeys, head_dim], [kKeys, head_dim_v]

  ForwardScratch(const AttentionProblem& problem, ScratchAllocator& allocator, bool by_tile)
      : ScoreTile<E>(problem, allocator) {
    weight_pairs = allocator.take<F>(kPaired<F> ? kKeys * kQueries : 0);
    out = allocator.take<A>(padded(problem.head_dim_v) * kQueries);
    max = allocator.take<A>(kQueries);
    sum = allocator.take<A>(kQueries);
    rescale = allocator.take<A>(kQueries);
    shift = allocator.take<A>(kQueries);
    has_double_max = allocator.take<bool>(kQueries);
    double_max = allocator.take<double>(kQueries);
    dropout_factor = allocator.take<A>(problem.dropout > 0 ? kKeys * kQueries : 0);
    // Allocated for few keys too, which do not use them: scratch depends on the widths alone.
    out_total = allocator.take<A>(padded(problem.head_dim_v) * kQueries);
    out_low = allocator.take<A>(padded(problem.head_dim_v) * kQueries);
    sum_total = allocator.take<A>(kQueries);
    sum_low = allocator.take<A>(kQueries);
    largest = allocator.take<A>(kQueries);
    key_buffer = allocator.take<F>(by_tile ? kKeys * problem.head_dim : 0);
    value_buffer = allocator.take<F>(by_tile ? kKeys * problem.head_dim_v : 0);
  }
};

// A state with a maximum in double, as scores may be.
template <class A>
using DoubleState = OnlineSoftmax<A, FastNatural, double>;

// Raises the states of a tile to the maxima of a block, which sets max, sum, rescale and shift. Returns whether any query's
// output has to be rescaled.
template <class E>
bool raise_maxima(const QueryTile& query, int64_t count, const ForwardScratch<E>& tile) {
  using A = Accumulator<E>;
  constexpr A kRescaleThreshold = 5;
  bool any = false;
  const auto is_double = [&](int64_t i) {
    return ScoreTile<E>::kMayUseDouble && (tile.is_double[i] || tile.has_double_max[i]);
  };
  for (int64_t i = 0; i < query.rows; ++i)
    if (is_double(i)) {
      DoubleState<A> state{tile.has_double_max[i] ? tile.double_max[i] : tile.max[i], tile.sum[i]};
      tile.rescale[i] = state.raise_max(tile.is_double[i] ? tile.double_block_max[i] : tile.block_max[i]);
      tile.double_max[i] = state.max;
      tile.sum[i] = state.sum;
      narrow_double_scores(i, count, tile, pivot(state.max));
    }
  for (int64_t l = 0; l < query.lanes; l += kLanes<A>) {
    Softmax<Vector<A>> state{load_vector(tile.max + l), load_vector(tile.sum + l)};
    Vector<A> rescale = ScoreTile<E>::kDefersScale ? state.raise_max_lazily(kRescaleThreshold, load_vector(tile.block_max + l))
                                                   : state.raise_max(load_vector(tile.block_max + l));
    Vector<A> shift = pivot(state.max);
    for (int i = 0; i < kLanes<A>; ++i)
      if (ScoreTile<E>::kMayUseDouble && is_double(l + i))
        rescale[i] = tile.rescale[l + i], shift[i] = A(0), state.sum[i] = tile.sum[l + i], tile.has_double_max[l + i] = true;
    const auto is_rescaled = rescale != A(1);
    for (int i = 0; i < kLanes<A>; ++i) any |= is_rescaled[i] != 0;
    store_vector(tile.rescale + l, rescale);
    store_vector(tile.shift + l, shift);
    store_vector(tile.max + l, state.max);
    store_vector(tile.sum + l, state.sum);
  }
  return any;
}

// Turns a block's scores into weights, in place or as pairs, and adds them to the states. Returns whether the output so far has
// to be rescaled.
template <class E>
bool absorb_block(const AttentionProblem& problem, const QueryTile& query, int64_t begin, int64_t count,
                  const ForwardScratch<E>& tile) {
  using A = Accumulator<E>;
  using F = Operand<E>;
  using State = Softmax<Vector<A>>;
  const bool needs_rescale = raise_maxima(query, count, tile);

  const bool pairs_at_once = kPaired<F> && problem.dropout == 0;
  const int64_t paired_count = round_up(count, kDepthStep<F>);
  for (int64_t l = 0; l < query.lanes; l += kLanes<A>) {
    const State state{load_vector(tile.shift + l), load_vector(tile.sum + l)};
    const Vector<A> deferred_scale = load_vector(tile.deferred_scale + l);
    // Four sums, so that no addition waits for the previous one. The key alone selects the sum of its weight: a block may end
    // with the last key of the tile's last query, which must not change the order of sums of other queries.
    Vector<A> partial_sum[4] = {};
    A* score = tile.score + l;
    const auto exp_scores = [&](int64_t k, int lane) {
      const Vector<A> weight = state.weight(load_vector(score + k * kQueries) * deferred_scale);
      partial_sum[lane] += weight;
      return weight;
    };
    if constexpr (kPaired<F>) {
      if (pairs_at_once) {
        int64_t k = 0;
        for (; k + 4 <= count; k += 4) {
          const Vector<A> first = exp_scores(k, 0), second = exp_scores(k + 1, 1);
          store_narrowed_pairs(tile.weight_pairs + k * kQueries + 2 * l, first, second);
          const Vector<A> third = exp_scores(k + 2, 2), fourth = exp_scores(k + 3, 3);
          store_narrowed_pairs(tile.weight_pairs + (k + 2) * kQueries + 2 * l, third, fourth);
        }
        for (int lane = 0; k < paired_count; k += 2, lane ^= 2) {
          const Vector<A> first = k < count ? exp_scores(k, lane) : Vector<A>{},
                          second = k + 1 < count ? exp_scores(k + 1, lane + 1) : Vector<A>{};
          store_narrowed_pairs(tile.weight_pairs + k * kQueries + 2 * l, first, second);
        }
      }
    }
    if (!pairs_at_once) {
      int64_t k = 0;
      for (; k + 4 <= count; k += 4)
        for (int lane = 0; lane < 4; ++lane) store_vector(score + (k + lane) * kQueries, exp_scores(k + lane, lane));
      for (int lane = 0; k < count; ++k, ++lane) store_vector(score + k * kQueries, exp_scores(k, lane));
    }
    State total = state;
    total.add((partial_sum[0] + partial_sum[1]) + (partial_sum[2] + partial_sum[3]));
    store_vector(tile.sum + l, total.sum);
  }

  if (problem.dropout > 0) {
    make_dropout_factors(problem, query, begin, count, tile.dropout_factor);
    for_each_vector(tile.score, count, query.lanes,
                    [&](Vector<A> x, int64_t k, int64_t l) { return x * load_vector(tile.dropout_factor + k * kQueries + l); });
    if constexpr (kPaired<F>) narrow_to_pairs(tile.score, count, paired_count, query.lanes, kQueries, tile.weight_pairs);
  }
  return needs_rescale;
}

// Raises the queries' largest scores to those of a block; a NaN stays.
template <class E>
__attribute__((noinline)) void raise_largest(const QueryTile& query, int64_t count, const ForwardScratch<E>& tile) {
  using A = Accumulator<E>;
  const auto raise = [](auto& largest, auto x) {
    if (x > largest || x != x) largest = x;
  };
  for (int64_t l = 0; l < query.lanes; l += kLanes<A>) {
    Vector<A> of_block = lowest<Vector<A>>();
    const Vector<A> deferred_scale = load_vector(tile.deferred_scale + l);
    for (int64_t k = 0; k < count; ++k) {
      const Vector<A> x = load_vector(tile.score + k * kQueries + l) * deferred_scale;
      of_block = (x > of_block) | (x != x) ? x : of_block;
    }
    for (int64_t i = 0; i < kLanes<A>; ++i) {
      A most = of_block[i];
      if constexpr (ScoreTile<E>::kMayUseDouble)
        if (tile.is_double[l + i]) {
          double in_double = lowest<double>();
          for (int64_t k = 0; k < count; ++k) raise(in_double, tile.double_score[k * kQueries + l + i]);
          most = static_cast<A>(in_double);
        }
      raise(tile.largest[l + i], most);
    }
  }
}

// Raises the maximum logit of a head, which other threads raise too, to those of a tile's queries.
template <class A>
void store_max_logit(const AttentionProblem& problem, const QueryTile& query, const A* largest) {
  float own = lowest<float>();
  for (int64_t i = 0; i < query.rows; ++i)
    if (const float x = static_cast<float>(largest[i]); x > own || x != x) own = x;
  const std::atomic_ref<float> shared(problem.max_logit[query.batch * problem.heads + query.head]);
  float now = shared.load();
  while ((own > now || (own != own && now == now)) && !shared.compare_exchange_weak(now, own)) {
  }
}

// Sets the states of all queries to the state of the head's sink, or of an empty row.
template <class E>
FLASH_ONLINE_INLINE void start_states(const AttentionProblem& problem, const QueryTile& query, const ForwardScratch<E>& tile) {
  using A = Accumulator<E>;
  Softmax<A> start;
  if (problem.sinks) start.absorb(static_cast<const A*>(problem.sinks)[query.head]);
  std::fill_n(tile.max, kQueries, start.max);
  std::fill_n(tile.sum, kQueries, start.sum);
  std::fill_n(tile.has_double_max, kQueries, false);
}

// The sums of a tile over the keys before the keys of `out` and `sum`.
template <class E>
class EarlierSums {
  using A = Accumulator<E>;

 public:
  // The sums cover `rows` columns of values and `lanes` queries.
  EarlierSums(int64_t rows, int64_t lanes, const ForwardScratch<E>& tile) : tile_(tile), rows_(rows), lanes_(lanes) {}

  // Moves `out` and `sum` here; the next block overwrites `out`.
  __attribute__((noinline)) void take() {
    if (!any_) {
      for (A* data : {tile_.out_total, tile_.out_low}) std::fill_n(data, rows_ * kQueries, A(0));
      for (A* data : {tile_.sum_total, tile_.sum_low}) std::fill_n(data, kQueries, A(0));
    }
    any_ = true;
    for (int64_t i = 0; i < rows_ * kQueries; i += kQueries)
      add_partials(tile_.out_total + i, tile_.out_low + i, tile_.out + i, lanes_);
    add_partials(tile_.sum_total, tile_.sum_low, tile_.sum, lanes_);
    std::fill_n(tile_.sum, lanes_, A(0));
  }
  // Rescales all sums to the states' new maxima.
  void rescale() {
    if (!any_) return;
    for (int64_t i = 0; i < rows_ * kQueries; i += kQueries)
      for (A* data : {tile_.out_total, tile_.out_low}) scale_by(tile_.rescale, data + i, lanes_);
    for (A* data : {tile_.sum_total, tile_.sum_low}) scale_by(tile_.rescale, data, lanes_);
  }
  // Adds all sums to `out` and `sum`.
  void finish() {
    if (!any_) return;
    for (int64_t i = 0; i < rows_ * kQueries; i += kQueries)
      join_partials(tile_.out_total + i, tile_.out_low + i, tile_.out + i, lanes_);
    join_partials(tile_.sum_total, tile_.sum_low, tile_.sum, lanes_);
  }
  bool any() const { return any_; }

 private:
  const ForwardScratch<E>& tile_;
  int64_t rows_, lanes_;
  bool any_ = false;

  static void scale_by(const A* factor, A* data, int64_t count) {
    for (int64_t i = 0; i < count; i += kLanes<A>) store_vector(data + i, load_vector(data + i) * load_vector(factor + i));
  }
};

// The epilogue: lse, and the output divided by the sum of weights.
template <class E>
FLASH_ONLINE_INLINE void store_results(const AttentionProblem& problem, const QueryTile& query, const ForwardScratch<E>& tile) {
  using A = Accumulator<E>;
  const int64_t offset = query.lse_offset(problem);
  for (int64_t i = 0; problem.lse && i < query.rows; ++i) {
    // lse is computed in double, so that lse and lse_low together hold more digits than a float.
    const DoubleState<A> state{tile.has_double_max[i] ? tile.double_max[i] : tile.max[i], tile.sum[i]};
    static_cast<A*>(problem.lse)[offset + i] = state.lse();
    if (problem.lse_low) static_cast<A*>(problem.lse_low)[offset + i] = state.lse_low();
  }
  for (int64_t i = 0; i < query.lanes; ++i) tile.rescale[i] = Softmax<A>{tile.max[i], tile.sum[i]}.inverse_sum_or_zero();
  store_transposed<E>(tile.out, kQueries, tile.rescale, query.rows, problem.head_dim_v,
                      matrix_of<E>(problem.out, query.batch, query.head, query.first));
}

// Runs a work item: computes the results of one tile of queries.
template <class E>
void forward_tile(const SequenceProblem& sequence, const KeyValueOperands<E>& operands, const QueryTile& query,
                  std::byte* scratch, bool by_tile) {
  using A = Accumulator<E>;
  using F = Operand<E>;
  const AttentionProblem& problem = sequence.problem;
  [[maybe_unused]] const AmxTiles registers;
  ScratchAllocator allocator(scratch);
  ForwardScratch<E> tile(problem, allocator, by_tile);
  const int64_t key_head = query.head / (problem.heads / problem.key_heads),
                value_head = query.head / (problem.heads / problem.value_heads);
  const int64_t value_rows = round_up(problem.head_dim_v, kRowStep<F>);

  load_query_lanes<E>(problem.query, query, problem.head_dim, tile.query, tile.row_buffer);
  start_states(problem, query, tile);
  if (problem.max_logit) std::fill_n(tile.largest, kQueries, lowest<A>());

  bool is_first = true;
  EarlierSums<E> earlier(value_rows, query.lanes, tile);
  int64_t sum_index = -1;
  const KeyRange range = keys_of_any(problem.visible, query.first, query.end(), problem.keys);
  // ALiBi's scores fall with the distance. Visiting the nearest keys first shows early that the scores of far keys are small.
  // All queries of a tile are in one block of positions (see ForwardTiles), so that a query has the same order in any call.
  const int64_t start_key = problem.alibi_slopes ? query.first + problem.visible.offset : 0;
  for_each_key_block(range, 0, problem.keys, start_key, [&](int64_t begin, int64_t count) {
    if (!load_mask(problem, query, begin, count, tile.mask)) return;
    if (has_several_sums(problem) && !is_first && sum_of_block(problem, begin, start_key) != sum_index) {
      earlier.take();
      is_first = true;
    }
    sum_index = sum_of_block(problem, begin, start_key);
    const auto key = matrix_of<const E>(problem.key, query.batch, key_head, begin),
               value = matrix_of<const E>(problem.value, query.batch, value_head, begin);
    RowMatrix<F> keys{operands.key ? operands.key_rows(sequence, key_head, begin) : nullptr, operands.key_pitch};
    RowMatrix<F> values{nullptr, operands.value_pitch};
    if constexpr (std::is_same_v<E, F>) {
      if (!operands.key) keys = {key.data, key.row_stride};
      if (!operands.value) values = {value.data, value.row_stride};
    } else if constexpr (!kPaired<F>) {
      if (by_tile) {
        keys = {tile.key_buffer, problem.head_dim}, values = {tile.value_buffer, problem.head_dim_v};
        load_rows<E>(key, count, keys.pitch, tile.key_buffer, count, keys.pitch);
        load_rows<E>(value, count, values.pitch, tile.value_buffer, count, values.pitch);
      }
    }
    compute_scores(problem, query, begin, count, keys, tile, tile.max, static_cast<A*>(nullptr));
    if (problem.max_logit) raise_largest(query, count, tile);
    const bool needs_rescale = absorb_block(problem, query, begin, count, tile);
    if (needs_rescale) earlier.rescale();

    const Accumulate mode = is_first ? Accumulate::kOverwrite : needs_rescale ? Accumulate::kRescaleAndAdd : Accumulate::kAdd;
    is_first = false;
    if constexpr (kPaired<F>) {
      const int64_t block = begin / kKeys * kKeys;
      const F* columns = operands.value_rows(sequence, value_head, block) + begin - block;
      matmul(mode, value_rows, query.lanes, round_up(count, kDepthStep<F>), columns, kKeys, 1, tile.weight_pairs, kQueries,
             tile.out, kQueries, tile.rescale);
    } else {
      if (operands.value) values.data = operands.value_rows(sequence, value_head, begin);
      matmul(mode, value_rows, query.lanes, count, values.data, 1, values.pitch, tile.score, kQueries, tile.out, kQueries,
             tile.rescale);
    }
  });
  if (is_first) std::fill_n(tile.out, value_rows * kQueries, A(0));
  if (earlier.any() && !is_first) earlier.take();
  earlier.finish();
  if (problem.max_logit) store_max_logit(problem, query, tile.largest);
  store_results(problem, query, tile);
}

// Sets the results of padding rows of a packed call: 0, and the lse of an empty row.
template <class E>
void forward_padding(const AttentionProblem& call, int64_t index) {
  using A = Accumulator<E>;
  const Rows rows = padding_rows(call.query_starts, call.batch, index, call.queries, call.total_queries);
  zero_rows<E>(call.out, call.heads, rows, call.head_dim_v);
  for (int64_t head = 0; head < call.heads; ++head) {
    std::fill_n(static_cast<A*>(call.lse) + head * call.lse_stride[1] + rows.begin, rows.count, Softmax<A>{}.lse());
    std::fill_n(static_cast<A*>(call.lse_low) + head * call.lse_stride[1] + rows.begin, rows.count, Softmax<A>{}.lse_low());
  }
}

// The tiles of the forward pass. Where the order of key blocks follows the position (ALiBi), tiles are cut at multiples of
// kQueries of the position, not of the query's index: the order, and with it the rounding, then depends on the position alone.
struct ForwardTiles {
  int64_t skipped = 0;  // positions of the first tile before the first query

  explicit ForwardTiles(const AttentionProblem& problem) {
    if (problem.alibi_slopes) skipped = (problem.visible.offset % kQueries + kQueries) % kQueries;
  }
  int64_t count(const AttentionProblem& problem) const {
    return problem.queries ? ceil_div(problem.queries + skipped, kQueries) : 0;
  }
  QueryTile tile(const AttentionProblem& problem, int64_t batch, int64_t head, int64_t index) const {
    const int64_t first = index * kQueries - skipped;
    return {batch, head, std::max<int64_t>(first, 0), std::min(first + kQueries, problem.queries)};
  }
};

CpuTileList forward_tiles(const AttentionProblem& call, ScratchAllocator& allocator) {
  return CpuTileList(call, allocator,
                     [](const SequenceProblem& sequence) { return ForwardTiles(sequence.problem).count(sequence.problem); });
}

template <class E>
Memory memory_of_pass(const AttentionProblem& call, bool by_tile) {
  ScratchAllocator scratch(nullptr), pack(nullptr), shared(nullptr);
  ForwardScratch<E>(call, scratch, by_tile);
  take_value_pairs<E>(call, pack);
  forward_tiles(call, shared);
  KeyValueOperands<E>(call, shared, by_tile);
  return {std::max(scratch.bytes(), pack.bytes()), shared.bytes()};
}

Memory forward_memory(const AttentionProblem& call) {
  Memory memory;
  visit_floating<Float16, BFloat16>(call.dtype, [&]<class E>(Type<E>) {
    memory = memory_of_pass<E>(call, false);
    if constexpr (kLosesTinyProducts<E>) {
      const Memory other = avx512::forward_memory_of_tiny_heads(call);
      memory = {std::max(memory.scratch, other.scratch), std::max(memory.shared, other.shared)};
    }
  });
  return memory;
}

// Computes the chosen heads of a call.
template <class E>
void forward_heads(const AttentionProblem& call, const Executor& executor, HeadChoice& choice) {
  ScratchAllocator shared(executor.shared);
  const bool by_tile = choice.heads == Heads::kTiny;
  const CpuTileList tiles = forward_tiles(call, shared);
  const KeyValueOperands<E> operands(call, shared, by_tile);
  const int64_t key_heads = std::max(call.key_heads, call.value_heads);
  if (operands.key || operands.value)
    for_each_item(executor, key_heads * operands.blocks.total(), [&](int64_t item, std::byte* scratch) {
      const auto [index, head, block] = operands.blocks.tile(key_heads, item);
      copy_key_block<E>(SequenceProblem(call, index), operands, head, block, scratch);
    });
  for_each_item(executor, call.heads * tiles.total(), [&](int64_t item, std::byte* scratch) {
    // The tiles of one head follow one another, as they read the same keys. They run in descending order: under causal
    // visibility the last tile has the most work.
    const auto [index, head, tile] = tiles.tile(call.heads, item);
    const SequenceProblem sequence(call, index);
    const ForwardTiles cut(sequence.problem);
    if (!choice.takes([&] { return is_tiny(sequence.problem, sequence.batch, head); })) return;
    forward_tile<E>(sequence, operands,
                    cut.tile(sequence.problem, sequence.batch, head, tiles.tiles_per_head(index) - 1 - tile), scratch, by_tile);
  });
  if (call.query_starts)
    for_each_item(executor, call.batch + 1, [&](int64_t index, std::byte*) { forward_padding<E>(call, index); });
}

void forward(const AttentionProblem& call, const Executor& executor) {
  visit_floating<Float16, BFloat16>(call.dtype, [&]<class E>(Type<E>) {
    HeadChoice choice{.heads = kLosesTinyProducts<E> ? Heads::kOrdinary : Heads::kAll};
    forward_heads<E>(call, executor, choice);
    if constexpr (kLosesTinyProducts<E>)
      if (choice.left_out) avx512::forward_of_tiny_heads(call, executor);
  });
}

void dropout_mask(const DropoutProblem& problem, const Executor& executor) {
  const Philox philox(problem.rng[0], problem.rng[1]);
  const uint32_t threshold = drop_threshold(problem.dropout);
  for_each_item(executor, problem.batch * problem.heads * problem.queries, [&](int64_t row, std::byte*) {
    const int64_t plane = row / problem.queries, query = problem.query_begin + row % problem.queries;
    bool* keep = problem.keep + row * problem.keys;
    for (int64_t k = 0; k < problem.keys; k += Philox::kKeys) {
      const unsigned kept =
          philox.kept(problem.batch_begin + plane / problem.heads, plane % problem.heads, query, k / Philox::kKeys, threshold);
      for (int64_t j = 0; j < Philox::kKeys && k + j < problem.keys; ++j) keep[k + j] = problem.dropout < 1 && kept >> j & 1;
    }
  });
}

}  // namespace

Memory forward_memory_of_tiny_heads(const AttentionProblem& problem) { return memory_of_pass<BFloat16>(problem, true); }
void forward_of_tiny_heads(const AttentionProblem& problem, const Executor& executor) {
  HeadChoice choice{.heads = Heads::kTiny};
  forward_heads<BFloat16>(problem, executor, choice);
}

extern const AttentionKernels attention_kernels;
const AttentionKernels attention_kernels = {
    .forward_memory = forward_memory,
    .backward_memory = backward_memory,
    .forward = forward,
    .backward = backward,
    .cached_memory = cached_memory,
    .cached = cached,
    .few_rows_kv_splits = few_rows_kv_splits,
    .float8_memory = float8_memory,
    .float8 = float8,
    .append = append,
    .dropout_mask = dropout_mask,
    .merge = merge,
    .merge_backward = merge_backward,
};

}  // namespace flash_online::cpu::FLASH_ONLINE_ISA
