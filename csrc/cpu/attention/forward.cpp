// Attention on the CPU: the forward pass, dropout's mask, and the table of all attention kernels of an instruction set. Scores
// exist a tile at a time (kQueries x kKeys), so that memory beyond the results is O(length). FlashAttention (arXiv 2205.14135),
// with the outer loops of FlashAttention-2 (arXiv 2307.08691).
//
// A work item is a tile of queries of one head; it writes its own results alone, so that they do not depend on threads.
#include "../kernels.h"
#include "score_tile.h"
#include "work_items.h"

namespace flash_online::cpu::FLASH_ONLINE_ISA {
namespace {

// Keys and values as the products take them: the tensors themselves where that can be, else copies that every tile of queries
// shares. Paired values lie as blocks of kKeys of their transpose, [padded(value_width), kKeys].
template <class E>
struct KeyMemory {
  using F = Factor<E>;
  Schedule blocks;
  F *key = nullptr, *value = nullptr;
  int64_t key_pitch = 0, value_pitch = 0;

  KeyMemory(const AttentionProblem& call, Carver& carver) : blocks(key_blocks(call, carver)) {
    const int64_t length = call.key_starts ? 1 : call.keys;  // packed sequences are of any length
    key_pitch = pitch_of<F>(call.head_dim);
    value_pitch = kPaired<F> ? padded(call.head_dim_v) : call.head_dim_v;
    if (!lies_as_rows<E>(call.key, length, call.head_dim))
      key = carver.take<F>(call.key_heads * blocks.total() * kKeys * key_pitch);
    if (kPaired<F> || !lies_as_rows<E>(call.value, length, call.head_dim_v))
      value = carver.take<F>(call.value_heads * blocks.total() * kKeys * value_pitch);
  }

  F* key_rows(const OneSequence& sequence, int64_t head, int64_t begin) const {
    return key + row(sequence.problem.key_heads, sequence, head, begin) * key_pitch;
  }
  F* value_rows(const OneSequence& sequence, int64_t head, int64_t begin) const {
    return value + row(sequence.problem.value_heads, sequence, head, begin) * value_pitch;
  }

 private:
  int64_t row(int64_t heads, const OneSequence& sequence, int64_t head, int64_t begin) const {
    return blocks.number(heads, {sequence.index, head, begin / kKeys}) * kKeys + begin % kKeys;
  }
};

template <class E>
struct PackScratch {
  Factor<E>*rows = nullptr, *pairs = nullptr;

  PackScratch(const AttentionProblem& problem, Carver& carver) {
    if (!kPaired<Factor<E>>) return;
    rows = carver.take<Factor<E>>(kKeys * padded(problem.head_dim_v));
    pairs = carver.take<Factor<E>>(kKeys * padded(problem.head_dim_v));
  }
};

// Copies block `block` of a sequence's keys, and of its values.
template <class E>
void pack_block(const OneSequence& sequence, const KeyMemory<E>& memory, int64_t head, int64_t block, std::byte* scratch) {
  using F = Factor<E>;
  const AttentionProblem& problem = sequence.problem;
  const int64_t begin = block * kKeys, count = std::min(kKeys, problem.keys - begin);
  if (memory.key && head < problem.key_heads)
    load_rows<E>(matrix_of<const E>(problem.key, sequence.batch, head, begin), count, problem.head_dim,
                 memory.key_rows(sequence, head, begin), kKeys, memory.key_pitch);
  if (!memory.value || head >= problem.value_heads) return;
  const auto from = matrix_of<const E>(problem.value, sequence.batch, head, begin);
  F* to = memory.value_rows(sequence, head, begin);
  if constexpr (kPaired<F>) {
    Carver carver(scratch);
    const PackScratch<E> pack(problem, carver);
    load_rows<E>(from, count, problem.head_dim_v, pack.rows, kKeys, memory.value_pitch);
    transpose_pairs(pack.rows, kKeys, memory.value_pitch, pack.pairs, to, kKeys);
  } else {
    load_rows<E>(from, count, problem.head_dim_v, to, count, memory.value_pitch);
  }
}

template <class E>
struct ForwardScratch : ScoreTile<E> {
  using A = Accumulator<E>;
  using F = Factor<E>;
  F* weight_pairs;  // [kKeys / 2, kQueries] pairs
  A* out;  // [padded(value_width), kQueries]
  A *max, *sum, *factor, *shift;  // [kQueries]: the states; what the sums so far are multiplied by; what is subtracted
  bool* has_been_wide;  // [kQueries]: wide_max holds the state's maximum, which is no float
  double* wide_max;
  A* kept;  // [kKeys, kQueries], of dropout

  ForwardScratch(const AttentionProblem& problem, Carver& carver) : ScoreTile<E>(problem, carver) {
    weight_pairs = carver.take<F>(kPaired<F> ? kKeys * kQueries : 0);
    out = carver.take<A>(padded(problem.head_dim_v) * kQueries);
    max = carver.take<A>(kQueries);
    sum = carver.take<A>(kQueries);
    factor = carver.take<A>(kQueries);
    shift = carver.take<A>(kQueries);
    has_been_wide = carver.take<bool>(kQueries);
    wide_max = carver.take<double>(kQueries);
    kept = carver.take<A>(problem.dropout > 0 ? kKeys * kQueries : 0);
  }
};

// A state whose maximum is as wide as scores may be.
template <class A>
using WideState = OnlineSoftmax<A, FastNatural, double>;

// Raises the states of a tile to a block's maxima: max, sum, factor, and shift, what is subtracted from the block's scores.
// Returns whether any query's factor is other than 1.
template <class E>
bool raise_states(const QueryTile& query, int64_t count, const ForwardScratch<E>& tile) {
  using A = Accumulator<E>;
  constexpr A kSlack = 5;
  bool any = false;
  const auto is_wide = [&](int64_t i) { return ScoreTile<E>::kMayBeWide && (tile.is_wide[i] || tile.has_been_wide[i]); };
  for (int64_t i = 0; i < query.rows; ++i)
    if (is_wide(i)) {
      WideState<A> state{tile.has_been_wide[i] ? tile.wide_max[i] : tile.max[i], tile.sum[i]};
      tile.factor[i] = state.raise_max(tile.is_wide[i] ? tile.wide_block_max[i] : tile.block_max[i]);
      tile.wide_max[i] = state.max;
      tile.sum[i] = state.sum;
      settle_scores(i, count, tile, pivot(state.max));
    }
  for (int64_t l = 0; l < query.columns; l += kLanes<A>) {
    Softmax<Vector<A>> state{load_vector(tile.max + l), load_vector(tile.sum + l)};
    Vector<A> factor = ScoreTile<E>::kScalesLate ? state.raise_max_lazily(kSlack, load_vector(tile.block_max + l))
                                                 : state.raise_max(load_vector(tile.block_max + l));
    Vector<A> shift = pivot(state.max);
    for (int i = 0; i < kLanes<A>; ++i)
      if (ScoreTile<E>::kMayBeWide && is_wide(l + i))
        factor[i] = tile.factor[l + i], shift[i] = A(0), state.sum[i] = tile.sum[l + i], tile.has_been_wide[l + i] = true;
    const auto moved = factor != A(1);
    for (int i = 0; i < kLanes<A>; ++i) any |= moved[i] != 0;
    store_vector(tile.factor + l, factor);
    store_vector(tile.shift + l, shift);
    store_vector(tile.max + l, state.max);
    store_vector(tile.sum + l, state.sum);
  }
  return any;
}

// Turns a block's scores into weights, in place or as pairs, and adds them to the states. Returns whether the results so far
// have to be multiplied by their factors.
template <class E>
bool absorb_block(const AttentionProblem& problem, const QueryTile& query, int64_t begin, int64_t count,
                  const ForwardScratch<E>& tile) {
  using A = Accumulator<E>;
  using F = Factor<E>;
  using State = Softmax<Vector<A>>;
  const bool rescale = raise_states(query, count, tile);

  const A late_scale = tile.late_scale;
  const bool pairs_at_once = kPaired<F> && problem.dropout == 0;
  const int64_t paired_count = round_up(count, kDepthStep<F>);
  for (int64_t l = 0; l < query.columns; l += kLanes<A>) {
    const State state{load_vector(tile.shift + l), load_vector(tile.sum + l)};
    Vector<A> part[4] = {};  // short sums, one after another in time but not in each other's way
    A* score = tile.score + l;
    const auto weigh = [&](int64_t k, int lane) {
      const Vector<A> weight = state.weight(load_vector(score + k * kQueries) * late_scale);
      part[lane] += weight;
      return weight;
    };
    if constexpr (kPaired<F>) {
      if (pairs_at_once) {
        int64_t k = 0;
        for (; k + 4 <= count; k += 4) {
          const Vector<A> first = weigh(k, 0), second = weigh(k + 1, 1);
          store_pairs(tile.weight_pairs + k * kQueries + 2 * l, first, second);
          const Vector<A> third = weigh(k + 2, 2), fourth = weigh(k + 3, 3);
          store_pairs(tile.weight_pairs + (k + 2) * kQueries + 2 * l, third, fourth);
        }
        for (; k < paired_count; k += 2) {
          const Vector<A> first = k < count ? weigh(k, 0) : Vector<A>{}, second = k + 1 < count ? weigh(k + 1, 1) : Vector<A>{};
          store_pairs(tile.weight_pairs + k * kQueries + 2 * l, first, second);
        }
      }
    }
    if (!pairs_at_once) {
      int64_t k = 0;
      for (; k + 4 <= count; k += 4)
        for (int lane = 0; lane < 4; ++lane) store_vector(score + (k + lane) * kQueries, weigh(k + lane, lane));
      for (; k < count; ++k) store_vector(score + k * kQueries, weigh(k, 0));
    }
    State whole = state;
    whole.add((part[0] + part[1]) + (part[2] + part[3]));
    store_vector(tile.sum + l, whole.sum);
  }

  if (problem.dropout > 0) {
    draw_dropout(problem, query, begin, count, tile.kept);
    for_each_vector(tile.score, count, query.columns,
                    [&](Vector<A> x, int64_t k, int64_t l) { return x * load_vector(tile.kept + k * kQueries + l); });
    if constexpr (kPaired<F>) make_pairs(tile.score, count, paired_count, query.columns, kQueries, tile.weight_pairs);
  }
  return rescale;
}

template <class E>
void forward_tile(const OneSequence& sequence, const KeyMemory<E>& memory, const QueryTile& query, std::byte* scratch) {
  using A = Accumulator<E>;
  using F = Factor<E>;
  const AttentionProblem& problem = sequence.problem;
  [[maybe_unused]] const TileRegisters registers;
  Carver carver(scratch);
  ForwardScratch<E> tile(problem, carver);
  const int64_t key_head = query.head / (problem.heads / problem.key_heads),
                value_head = query.head / (problem.heads / problem.value_heads);
  const int64_t value_rows = round_up(problem.head_dim_v, kRowStep<F>);

  load_lanes<E>(problem.query, query, problem.head_dim, tile.query, tile.rows_copy);
  Softmax<A> start;
  if (problem.sinks) start.absorb(static_cast<const A*>(problem.sinks)[query.head]);
  std::fill_n(tile.max, kQueries, start.max);
  std::fill_n(tile.sum, kQueries, start.sum);
  std::fill_n(tile.has_been_wide, kQueries, false);

  bool empty = true;
  const KeyRange range = keys_of_any(problem.visible, query.first, query.last(), problem.keys);
  // Where scores fall with the distance, nearest first: those of far keys are then known to count for little.
  const int64_t near = problem.alibi_slopes ? query.last() - 1 + problem.visible.offset : 0;
  for_each_block(range, 0, problem.keys, near, [&](int64_t begin, int64_t count) {
    if (!load_mask(problem, query, begin, count, tile.mask)) return;
    const auto key = matrix_of<const E>(problem.key, query.batch, key_head, begin),
               value = matrix_of<const E>(problem.value, query.batch, value_head, begin);
    RowsOf<F> keys{memory.key ? memory.key_rows(sequence, key_head, begin) : nullptr, memory.key_pitch};
    RowsOf<F> values{nullptr, memory.value_pitch};
    if constexpr (std::is_same_v<E, F>) {
      if (!memory.key) keys = {key.data, key.row_stride};
      if (!memory.value) values = {value.data, value.row_stride};
    }
    compute_scores(problem, query, begin, count, keys, tile, tile.max, static_cast<A*>(nullptr));
    const bool rescale = absorb_block(problem, query, begin, count, tile);

    const Into into = empty ? Into::kReplace : rescale ? Into::kRescaleAndAdd : Into::kAdd;
    empty = false;
    if constexpr (kPaired<F>) {
      const int64_t block = begin / kKeys * kKeys;
      const F* columns = memory.value_rows(sequence, value_head, block) + begin - block;
      product(into, value_rows, query.columns, round_up(count, kDepthStep<F>), columns, kKeys, 1, tile.weight_pairs, kQueries,
              tile.out, kQueries, tile.factor);
    } else {
      if (memory.value) values.data = memory.value_rows(sequence, value_head, begin);
      product(into, value_rows, query.columns, count, values.data, 1, values.pitch, tile.score, kQueries, tile.out, kQueries,
              tile.factor);
    }
  });
  if (empty) std::fill_n(tile.out, value_rows * kQueries, A(0));

  const int64_t number = query.number(problem);
  for (int64_t i = 0; problem.lse && i < query.rows; ++i) {
    // In double, so that lse and lse_low together hold more than the digits of a float.
    const WideState<A> state{tile.has_been_wide[i] ? tile.wide_max[i] : tile.max[i], tile.sum[i]};
    static_cast<A*>(problem.lse)[number + i] = state.lse();
    static_cast<A*>(problem.lse_low)[number + i] = state.lse_low();
  }
  for (int64_t i = 0; i < query.columns; ++i) tile.factor[i] = Softmax<A>{tile.max[i], tile.sum[i]}.inverse_sum_or_zero();
  store_columns<E>(tile.out, kQueries, tile.factor, query.rows, problem.head_dim_v,
                   matrix_of<E>(problem.out, query.batch, query.head, query.first));
}

// Rows that belong to no sequence of a packed call: nothing is attended to.
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

Memory forward_memory(const AttentionProblem& call) {
  Carver scratch(nullptr), pack(nullptr), shared(nullptr);
  visit_floating<Float16, BFloat16>(call.dtype, [&]<class E>(Type<E>) {
    ForwardScratch<E>(call, scratch);
    PackScratch<E>(call, pack);
    query_tiles(call, shared);
    KeyMemory<E>(call, shared);
  });
  return {std::max(scratch.used(), pack.used()), shared.used()};
}

void forward(const AttentionProblem& call, const Executor& executor) {
  visit_floating<Float16, BFloat16>(call.dtype, [&]<class E>(Type<E>) {
    Carver shared(executor.shared);
    const Schedule tiles = query_tiles(call, shared);
    const KeyMemory<E> memory(call, shared);
    const int64_t key_heads = std::max(call.key_heads, call.value_heads);
    if (memory.key || memory.value)
      for_each_item(executor, key_heads * memory.blocks.total(), [&](int64_t item, std::byte* scratch) {
        const auto [index, head, block] = memory.blocks.find(key_heads, item);
        pack_block<E>(OneSequence(call, index), memory, head, block, scratch);
      });
    for_each_item(executor, call.heads * tiles.total(), [&](int64_t item, std::byte* scratch) {
      // A head's tiles follow one another, as they read the same keys; late ones first, the longest under causal visibility.
      const auto [index, head, tile] = tiles.find(call.heads, item);
      const OneSequence sequence(call, index);
      const int64_t first = (tiles.of(index) - 1 - tile) * kQueries;
      forward_tile<E>(sequence, memory, QueryTile(sequence.problem, sequence.batch, head, first), scratch);
    });
    if (call.query_starts)
      for_each_item(executor, call.batch + 1, [&](int64_t index, std::byte*) { forward_padding<E>(call, index); });
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

extern const AttentionKernels attention_kernels;
const AttentionKernels attention_kernels = {
    .forward_memory = forward_memory,
    .backward_memory = backward_memory,
    .forward = forward,
    .backward = backward,
    .dropout_mask = dropout_mask,
    .merge = merge,
    .merge_backward = merge_backward,
};

}  // namespace flash_online::cpu::FLASH_ONLINE_ISA
