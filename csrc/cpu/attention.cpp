// Attention on the CPU: the forward pass, dropout's mask, and the table of all attention kernels of an instruction set. Scores
// exist a tile at a time (kQueries x kKeys), so that memory beyond the results is O(length). FlashAttention (arXiv 2205.14135),
// with the outer loops of FlashAttention-2 (arXiv 2307.08691).
//
// A work item is a tile of queries of one head; it writes its own results alone, so that they do not depend on threads.
#include "attention_tile.h"
#include "kernels.h"

namespace flash_online::cpu::FLASH_ONLINE_ISA {
namespace {

// The state of a query: its maximum is as wide as its scores may be.
template <class E>
using QueryState =
    OnlineSoftmax<Accumulator<E>, FastNatural, std::conditional_t<std::is_same_v<E, float>, double, Accumulator<E>>>;

template <class E, class A = Accumulator<E>>
struct ForwardScratch : ScoreTile<A> {
  A *value, *score, *out;
  QueryState<E>* state;

  ForwardScratch(const AttentionProblem& problem, Carver& carver) : ScoreTile<A>(problem, carver) {
    const int64_t value_width = padded(problem.value_width);
    value = carver.take<A>(kKeys * value_width);
    score = carver.take<A>(kQueries * kKeys);
    out = carver.take<A>(kQueries * value_width);
    state = carver.take<QueryState<E>>(kQueries);
  }
};

template <class E>
void forward_tile(const AttentionProblem& problem, int64_t batch, int64_t head, int64_t first, std::byte* scratch) {
  using A = Accumulator<E>;
  Carver carver(scratch);
  const ForwardScratch<E> tile(problem, carver);
  const int64_t rows = std::min(kQueries, problem.queries - first), last = first + rows;
  const int64_t key_head = head / (problem.heads / problem.key_heads),
                value_head = head / (problem.heads / problem.value_heads);
  const int64_t value_width = padded(problem.value_width);

  load_rows<E>(problem.query, batch, head, first, rows, problem.width, tile.query);
  std::fill_n(tile.out, rows * value_width, A(0));
  for (int64_t i = 0; i < rows; ++i) {
    tile.state[i] = {};
    if (problem.sinks) tile.state[i].absorb(static_cast<const A*>(problem.sinks)[head]);
  }

  const KeyRange range = keys_of_any(problem.visible, first, last, problem.keys);
  for (int64_t begin = range.begin / kKeys * kKeys; begin < range.end; begin += kKeys) {
    const int64_t count = std::min(kKeys, problem.keys - begin);
    load_rows<E>(problem.key, batch, key_head, begin, count, problem.width, tile.key);
    transpose(tile.key, count, problem.width, tile.key_transposed);
    load_rows<E>(problem.value, batch, value_head, begin, count, problem.value_width, tile.value);

    compute_scores<E, A>(problem, batch, head, first, rows, begin, count, tile, tile.score, nullptr);
    for (int64_t i = 0; i < rows; ++i) {
      A* score = tile.score + i * kKeys;
      QueryState<E> state = tile.state[i];  // a copy: through the reference it might alias the scores, and no loop vectorise
      const A factor = state.raise(tile.block_max[i]);
      const OnlineSoftmax<A, FastNatural> narrow_state{static_cast<A>(state.max)};
      if (tile.is_wide[i])
        for (int64_t j = 0; j < padded(count); ++j) score[j] = state.weight(tile.wide_score[i * kKeys + j]);
      else if (narrow_state.max == state.max)  // the common case, and the faster loop
        for (int64_t j = 0; j < padded(count); ++j) score[j] = narrow_state.weight(score[j]);
      else
        for (int64_t j = 0; j < padded(count); ++j) score[j] = state.weight(score[j]);
      state.add(reduce(padded(count), A(0), SumOf<A>{score}));
      tile.state[i] = state;
      if (factor != A(1)) {
        A* out = tile.out + i * value_width;
        for (int64_t e = 0; e < value_width; ++e) out[e] *= factor;
      }
      if (problem.dropout > 0) drop<A>(problem, batch, head, first + i, begin, count, score);
    }
    multiply(rows, value_width, count, tile.score, kKeys, 1, tile.value, value_width, tile.out, value_width);
  }

  const int64_t row = (batch * problem.heads + head) * problem.queries + first;
  for (int64_t i = 0; i < rows; ++i) {
    const A inverse = tile.state[i].inverse_sum_or_zero();
    A* out = tile.out + i * value_width;
    for (int64_t e = 0; e < value_width; ++e) out[e] *= inverse;
    static_cast<A*>(problem.lse)[row + i] = tile.state[i].lse();
    static_cast<A*>(problem.lse_low)[row + i] = tile.state[i].lse_low();
  }
  store_rows<E>(tile.out, problem.out, batch, head, first, rows, problem.value_width);
}

int64_t forward_scratch(const AttentionProblem& problem) {
  Carver carver(nullptr);
  visit_floating<Float16, BFloat16>(problem.dtype, [&]<class E>(Type<E>) { ForwardScratch<E>(problem, carver); });
  return carver.used();
}

void forward(const AttentionProblem& problem, const Executor& executor) {
  const int64_t tiles = tiles_of(problem.queries, kQueries);
  visit_floating<Float16, BFloat16>(problem.dtype, [&]<class E>(Type<E>) {
    for_each_item(executor, problem.batch * problem.heads * tiles, [&](int64_t item, std::byte* scratch) {
      // Late tiles first: under causal visibility they are the longest.
      const int64_t tile = tiles - 1 - item / (problem.batch * problem.heads), rest = item % (problem.batch * problem.heads);
      forward_tile<E>(problem, rest / problem.heads, rest % problem.heads, tile * kQueries, scratch);
    });
  });
}

void dropout_mask(const DropoutProblem& problem, const Executor& executor) {
  for_each_item(executor, problem.batch * problem.heads * problem.queries, [&](int64_t row, std::byte*) {
    const int64_t plane = row / problem.queries, query = problem.query_begin + row % problem.queries;
    bool* keep = problem.keep + row * problem.keys;
    for_each_kept(problem.rng, problem.dropout, plane / problem.heads, plane % problem.heads, query, 0, problem.keys,
                  [&](int64_t j, bool kept) { keep[j] = kept; });
  });
}

}  // namespace

extern const AttentionKernels attention_kernels;
const AttentionKernels attention_kernels = {
    .forward_scratch = forward_scratch,
    .backward_scratch = backward_scratch,
    .forward = forward,
    .backward = backward,
    .dropout_mask = dropout_mask,
    .merge = merge,
    .merge_backward = merge_backward,
};

}  // namespace flash_online::cpu::FLASH_ONLINE_ISA
