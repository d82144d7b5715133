// Attention on the CPU, backward: gradients of query, key and value, of the mask and of sinks. Scores are made again, a tile at
// a time. FlashAttention (arXiv 2205.14135, appendix B.4), keys in the outer loop.
//
// A work item is a span of the keys of the heads that share them. It alone writes the gradients of its keys and values; to
// those of a tile of queries the items add in the order of their keys, each in its turn. So results do not depend on threads.
#include <atomic>
#include <numeric>
#include <thread>

#include "gradient_tile.h"
#include "work_items.h"

namespace flash_online::cpu::FLASH_ONLINE_ISA {
namespace {

// The weight that a head's sink has among the scores of the query whose lse is at `row`.
template <class A>
A sink_weight(const AttentionProblem& problem, int64_t head, int64_t row) {
  const A lse = pivot(static_cast<const A*>(problem.lse)[row]), low = static_cast<const A*>(problem.lse_low)[row];
  return FastNatural::exp((static_cast<const A*>(problem.sinks)[head] - lse) - low);
}

// delta of a tile of queries, by grad_out . out, which equals the sum over keys but for the rounding of out. The gradients of a
// mask and of sinks add up rows, where that rounding does not average out (the sum over a row's scores is 0 without sinks): for
// them the sum is taken over the keys themselves, two matrix products more.
template <class E>
void fill_delta(const AttentionProblem& problem, const AttentionGradients& gradients, const QueryTile& query,
                std::byte* scratch) {
  using A = Accumulator<E>;
  [[maybe_unused]] const TileRegisters registers;
  Carver carver(scratch);
  GradientScratch<E> tile(problem, carver);
  const int64_t number = query.number(problem);
  A* narrow_delta = static_cast<A*>(gradients.delta) + number;
  double delta[kQueries] = {}, weight_sum[kQueries] = {};
  // A delta of 0 makes score_gradients, below, give weight * grad_weight, the terms of delta.
  std::fill_n(narrow_delta, query.rows, A(0));
  if (gradients.wide_delta) std::fill_n(gradients.wide_delta + number, query.rows, 0.0);
  if (gradients.grad_mask.data || gradients.grad_sinks) {
    load_queries(problem, gradients, query, tile);
    const KeyRange range = keys_of_any(problem.visible, query.first, query.last(), problem.keys);
    for_each_block(range, 0, problem.keys, 0, [&](int64_t begin, int64_t count) {
      const auto key = key_rows_of<E>(problem, query.batch, query.head, begin, count, tile.key_copy),
                 value = value_rows_of<E>(problem, query.batch, query.head, begin, count, tile.value_copy);
      if (!score_gradients(problem, query, begin, count, key, value, tile, weight_sum)) return;
      for (int64_t k = 0; k < count; ++k)
        for (int64_t i = 0; i < query.columns; ++i) delta[i] += tile.grad[k * kQueries + i];
    });
    for (int64_t i = 0; i < query.rows; ++i) {
      // The weights add up to 1 but for their rounding, which divides out.
      if (problem.sinks) weight_sum[i] += sink_weight<A>(problem, query.head, number + i);
      if (weight_sum[i] != 0) delta[i] /= weight_sum[i];
      narrow_delta[i] = static_cast<A>(delta[i]);
    }
  } else {
    // In the order of product(): where a query sees one key alone, delta is then the gradient of its weight to the last bit,
    // and their difference 0.
    constexpr int64_t kColumns = 32;
    A grad_out[kColumns * kQueries], out[kColumns * kQueries], sum[kQueries] = {};
    auto grad_rows = matrix_of<const E>(gradients.grad_out, query.batch, query.head, query.first),
         out_rows = matrix_of<const E>(problem.out, query.batch, query.head, query.first);
    for (int64_t begin = 0; begin < problem.head_dim_v; begin += kColumns) {
      const int64_t columns = std::min(kColumns, problem.head_dim_v - begin);
      load_columns<E>(grad_rows, query.rows, columns, grad_out, kQueries);
      load_columns<E>(out_rows, query.rows, columns, out, kQueries);
      grad_rows.data += columns * grad_rows.column_stride;
      out_rows.data += columns * out_rows.column_stride;
      for (int64_t e = 0; e < columns; ++e) {
        for (int64_t l = 0; l < query.columns; l += kLanes<A>)
          store_vector(sum + l,
                       load_vector(sum + l) + load_vector(grad_out + e * kQueries + l) * load_vector(out + e * kQueries + l));
        if (gradients.wide_delta)
          for (int64_t i = 0; i < query.columns; ++i)
            delta[i] += static_cast<double>(grad_out[e * kQueries + i]) * out[e * kQueries + i];
      }
    }
    std::copy_n(sum, query.rows, narrow_delta);
  }
  for (int64_t i = 0; i < query.rows; ++i) {
    const A grad_lse = gradients.grad_lse ? static_cast<const A*>(gradients.grad_lse)[number + i] : A(0);
    narrow_delta[i] -= grad_lse;
    if (gradients.wide_delta) gradients.wide_delta[number + i] = delta[i] - grad_lse;
  }
}

// The heads that share keys or values form a group.
int64_t groups_of(const AttentionProblem& problem) { return std::gcd(problem.key_heads, problem.value_heads); }

constexpr int64_t kLongestSpan = 4 * kKeys;

// How many keys an item owns: many, since all queries are loaded again for each item; but few enough that there are items for
// every thread. Decided by the problem alone, as the order of sums depends on it: of a packed call by a sequence's own.
int64_t span_of(const AttentionProblem& problem) {
  constexpr int64_t kItems = 16;
  int64_t span = kLongestSpan;
  while (span > kKeys && problem.batch * groups_of(problem) * tiles_of(problem.keys, span) < kItems) span /= 2;
  return span;
}

Schedule key_spans(const AttentionProblem& call, Carver& carver) {
  return Schedule(call, carver,
                  [](const OneSequence& sequence) { return tiles_of(sequence.problem.keys, span_of(sequence.problem)); });
}

// The gradients of all queries while they are summed: for each tile [padded(width), kQueries], and how many items have added.
template <class E>
struct QueryGradients {
  using A = Accumulator<E>;
  Schedule tiles;
  A* sum;
  std::atomic<int32_t>* turn;
  int64_t tile_size;

  QueryGradients(const AttentionProblem& call, Carver& carver) : tiles(query_tiles(call, carver)) {
    tile_size = padded(call.head_dim) * kQueries;
    sum = carver.take<A>(call.heads * tiles.total() * tile_size);
    turn = carver.take<std::atomic<int32_t>>(call.heads * tiles.total());
  }

  // Adds an item's part of a tile, after the `before` items with lower keys; null for nothing to add. They have all been
  // started before this one, and wait for lower ones only, so that one of them always runs.
  void add(const OneSequence& sequence, const QueryTile& query, int32_t before, const A* part) const {
    const int64_t tile = tiles.number(sequence.problem.heads, {sequence.index, query.head, query.first / kQueries});
    while (turn[tile].load(std::memory_order_acquire) != before) std::this_thread::yield();
    A* to = sum + tile * tile_size;
    if (before == 0) {
      if (part)
        std::copy_n(part, tile_size, to);
      else
        std::fill_n(to, tile_size, A(0));
    } else if (part) {
      for (int64_t i = 0; i < tile_size; ++i) to[i] += part[i];
    }
    turn[tile].store(before + 1, std::memory_order_release);
  }
};

// Writes keys [begin, begin + count) of the mask's gradient for a tile of queries: the transpose of part[count, kQueries], or 0
// if there is none.
template <class A>
void store_mask_gradient(const AttentionGradients& gradients, const QueryTile& query, int64_t begin, int64_t count,
                         const A* part) {
  if (count <= 0) return;
  visit_floating<Float16, BFloat16>(gradients.grad_mask_dtype, [&]<class M>(Type<M>) {
    auto to = matrix_of<M>(gradients.grad_mask, query.batch, query.head, query.first);
    to.data += begin * to.column_stride;
    if constexpr (std::is_same_v<A, Accumulator<M>>) {
      if (part && !gradients.add_to_grad_mask) {
        A one[kQueries];
        std::fill_n(one, kQueries, A(1));
        return store_columns<M>(part, kQueries, one, query.rows, count, to);
      }
    }
    for (int64_t i = 0; i < query.rows; ++i)
      for (int64_t k = 0; k < count; ++k) {
        M& element = to.data[i * to.row_stride + k * to.column_stride];
        const auto before = gradients.add_to_grad_mask ? widen(element) : Accumulator<M>(0);
        element = narrow<M>(before + (part ? static_cast<Accumulator<M>>(part[k * kQueries + i]) : Accumulator<M>(0)));
      }
  });
}

// The gradient of a mask with a row for each query and a column for each key. Of one head and batch alone, its tiles are
// written as they come. Else they are summed over the heads and batches that share them: for each tile of queries [keys,
// kQueries], and for each span of its keys how many heads have added.
template <class E>
struct MaskGradients {
  using A = Accumulator<E>;
  const AttentionGradients& gradients;
  A* sum = nullptr;
  std::atomic<int32_t>* turn = nullptr;
  int64_t tiles, spans, span, keys;
  bool wanted, every_batch, every_head;
  int64_t mask_heads;

  MaskGradients(const AttentionProblem& problem, const AttentionGradients& gradients, Carver& carver) : gradients(gradients) {
    const int64_t* size = gradients.mask_size;
    wanted = gradients.grad_mask.data && size[2] == problem.queries && size[3] == problem.keys;
    every_batch = size[0] != problem.batch, every_head = size[1] != problem.heads, mask_heads = size[1];
    tiles = tiles_of(problem.queries, kQueries), span = span_of(problem), spans = tiles_of(problem.keys, span),
    keys = problem.keys;
    if (!wanted || (!every_batch && !every_head)) return;
    sum = carver.take<A>(size[0] * size[1] * tiles * keys * kQueries);
    turn = carver.take<std::atomic<int32_t>>(size[0] * size[1] * tiles * spans);
  }
  int64_t planes() const { return gradients.mask_size[0] * gradients.mask_size[1]; }
  int64_t tile_of(const QueryTile& query) const {
    const int64_t plane = (every_batch ? 0 : query.batch) * mask_heads + (every_head ? 0 : query.head);
    return plane * tiles + query.first / kQueries;
  }
  A* at(const QueryTile& query, int64_t key) const { return sum + (tile_of(query) * keys + key) * kQueries; }

  // Before a tile's first part of a span: waits until the heads and batches before this one have added theirs; see
  // QueryGradients::add.
  void begin(const AttentionProblem& problem, const QueryTile& query, int64_t index) const {
    if (!sum) return;
    const int32_t before = static_cast<int32_t>((every_batch ? query.batch * (every_head ? problem.heads : 1) : 0) +
                                                (every_head ? query.head : 0));
    const std::atomic<int32_t>& now = turn[tile_of(query) * spans + index];
    while (now.load(std::memory_order_acquire) != before) std::this_thread::yield();
    if (before == 0) std::fill(at(query, index * span), at(query, std::min((index + 1) * span, keys)), A(0));
  }
  void end(const QueryTile& query, int64_t index) const {
    if (sum) turn[tile_of(query) * spans + index].fetch_add(1, std::memory_order_release);
  }
  // Keys that nobody sees have no part.
  void add(const QueryTile& query, int64_t key, int64_t count, const A* part) const {
    if (!sum) return store_mask_gradient(gradients, query, key, count, part);
    A* to = at(query, key);
    for (int64_t i = 0; part && i < count * kQueries; i += kLanes<A>)
      store_vector(to + i, load_vector(to + i) + load_vector(part + i));
  }
  // The sums of a tile, into the gradient.
  void finish(const QueryTile& query) const {
    for (int64_t index = 0; index < spans; ++index) {
      const int64_t first = index * span, count = std::min(span, keys - first);
      const bool seen = turn[tile_of(query) * spans + index].load(std::memory_order_relaxed) != 0;
      store_mask_gradient(gradients, query, first, count, seen ? at(query, first) : nullptr);
    }
  }
};

template <class E>
struct BackwardScratch : GradientScratch<E> {
  using A = Accumulator<E>;
  using F = Factor<E>;
  F *keys, *values;  // rows of a span, for rows_of: [span, pitch_of(width)], [span, pitch_of(value_width)]
  F* key_columns;  // paired: [span / kKeys, padded(width), kKeys]
  F *key_padded, *pairs;  // paired: [kKeys, padded(width)], twice
  F *query_rows, *grad_out_rows;  // [kQueries, padded(width)], [kQueries, padded(value_width)], paired by columns
  F* unpaired_rows;  // paired: [kQueries, padded(either width)]
  F *weight_rows, *grad_rows, *grad_pairs;  // paired: [kKeys, kQueries], the same, [kKeys / 2, kQueries] pairs
  A* grad_query;  // [padded(width), kQueries]
  A *grad_key, *grad_value;  // [heads of the group, span, padded(width)]

  BackwardScratch(const AttentionProblem& problem, int64_t span, Carver& carver) : GradientScratch<E>(problem, carver) {
    const int64_t groups = groups_of(problem);
    const int64_t width = padded(problem.head_dim), value_width = padded(problem.head_dim_v);
    keys = carver.take<F>(span * pitch_of<F>(problem.head_dim));
    values = carver.take<F>(span * pitch_of<F>(problem.head_dim_v));
    constexpr int64_t paired = kPaired<F> ? 1 : 0;
    key_columns = carver.take<F>(paired * span * width);
    key_padded = carver.take<F>(paired * kKeys * width);
    pairs = carver.take<F>(paired * kKeys * width);
    query_rows = carver.take<F>(kQueries * width);
    grad_out_rows = carver.take<F>(kQueries * value_width);
    unpaired_rows = carver.take<F>(paired * kQueries * std::max(width, value_width));
    weight_rows = carver.take<F>(paired * kKeys * kQueries);
    grad_rows = carver.take<F>(paired * kKeys * kQueries);
    grad_pairs = carver.take<F>(paired * kKeys * kQueries);
    grad_query = carver.take<A>(width * kQueries);
    grad_key = carver.take<A>(problem.key_heads / groups * span * width);
    grad_value = carver.take<A>(problem.value_heads / groups * span * value_width);
  }
};

// A tile's rows as the right factor of a product over queries: [queries, padded(width)], paired by columns.
template <class E>
RowsOf<Factor<E>> right_rows(const ConstView4& view, const QueryTile& query, int64_t width, Factor<E>* copy,
                             [[maybe_unused]] Factor<E>* unpaired) {
  using F = Factor<E>;
  const auto from = matrix_of<const E>(view, query.batch, query.head, query.first);
  const int64_t pitch = padded(width);
  if constexpr (kPaired<F>) {
    const int64_t rows = round_up(query.rows, kDepthStep<F>);
    load_rows<E>(from, query.rows, width, unpaired, rows, pitch);
    pair_rows(unpaired, rows, pitch, copy);
  } else {
    if constexpr (std::is_same_v<E, F>)
      if (from.column_stride == 1 && width == pitch) return {from.data, from.row_stride};
    load_rows<E>(from, query.rows, width, copy, query.rows, pitch);
  }
  return {copy, pitch};
}

// The gradients that a tile of scores adds: of its keys and values, and grad_query, of its queries.
template <class E>
void add_gradients(const AttentionProblem& problem, const QueryTile& query, int64_t count, int64_t key_in_span, bool first,
                   RowsOf<Factor<E>> key, RowsOf<Factor<E>> query_rows, RowsOf<Factor<E>> grad_out_rows,
                   Accumulator<E>* grad_key, Accumulator<E>* grad_value, const BackwardScratch<E>& tile) {
  using F = Factor<E>;
  const int64_t width = padded(problem.head_dim), value_width = padded(problem.head_dim_v);
  const Into into = first ? Into::kReplace : Into::kAdd;
  grad_key += key_in_span * width;
  grad_value += key_in_span * value_width;
  if constexpr (kPaired<F>) {
    const int64_t rows = round_up(count, kRowStep<F>), depth = round_up(query.rows, kDepthStep<F>);
    narrow_rows(tile.score, count, rows, query.columns, depth, kQueries, tile.weight_rows);
    narrow_rows(tile.grad, count, rows, query.columns, depth, kQueries, tile.grad_rows);
    make_pairs(tile.grad, count, round_up(count, kDepthStep<F>), query.columns, kQueries, tile.grad_pairs);
    product(Into::kAdd, rows, value_width, depth, tile.weight_rows, kQueries, 1, grad_out_rows.data, grad_out_rows.pitch,
            grad_value, value_width);
    product(Into::kAdd, rows, width, depth, tile.grad_rows, kQueries, 1, query_rows.data, query_rows.pitch, grad_key, width);
    const int64_t block = key_in_span / kKeys * kKeys;
    product(into, width, query.columns, round_up(count, kDepthStep<F>), tile.key_columns + block * width + key_in_span - block,
            kKeys, 1, tile.grad_pairs, kQueries, tile.grad_query, kQueries);
  } else {
    product(Into::kAdd, count, value_width, query.rows, tile.score, kQueries, 1, grad_out_rows.data, grad_out_rows.pitch,
            grad_value, value_width);
    product(Into::kAdd, count, width, query.rows, tile.grad, kQueries, 1, query_rows.data, query_rows.pitch, grad_key, width);
    product(into, problem.head_dim, query.columns, count, key.data, 1, key.pitch, tile.grad, kQueries, tile.grad_query,
            kQueries);
  }
}

template <class E>
void backward_span(const OneSequence& sequence, const AttentionGradients& gradients, const QueryGradients<E>& sums,
                   const MaskGradients<E>& mask, int64_t group, int64_t index, std::byte* scratch) {
  using A = Accumulator<E>;
  using F = Factor<E>;
  [[maybe_unused]] const TileRegisters registers;
  const AttentionProblem& problem = sequence.problem;
  const int64_t batch = sequence.batch, span = span_of(problem);
  Carver carver(scratch);
  BackwardScratch<E> tile(problem, span, carver);
  const int64_t groups = groups_of(problem), heads = problem.heads / groups;
  const int64_t key_heads = problem.key_heads / groups, value_heads = problem.value_heads / groups;
  const int64_t width = padded(problem.head_dim), value_width = padded(problem.head_dim_v);
  const int64_t start = index * span, end = std::min(start + span, problem.keys);
  std::fill_n(tile.grad_key, key_heads * span * width, A(0));
  std::fill_n(tile.grad_value, value_heads * span * value_width, A(0));

  for (int64_t member = 0; member < heads; ++member) {
    const int64_t head = group * heads + member;
    A* grad_key = tile.grad_key + member / (heads / key_heads) * span * width;
    A* grad_value = tile.grad_value + member / (heads / value_heads) * span * value_width;
    const auto keys = key_rows_of<E>(problem, batch, head, start, end - start, tile.keys),
               values = value_rows_of<E>(problem, batch, head, start, end - start, tile.values);
    if constexpr (kPaired<F>) {
      if (member % (heads / key_heads) == 0)
        for (int64_t begin = start; begin < end; begin += kKeys) {
          const auto from = matrix_of<const E>(problem.key, batch, head / (problem.heads / problem.key_heads), begin);
          load_rows<E>(from, std::min(kKeys, end - begin), problem.head_dim, tile.key_padded, kKeys, width);
          transpose_pairs(tile.key_padded, kKeys, width, tile.pairs, tile.key_columns + (begin - start) * width, kKeys);
        }
    }
    for (int64_t first = 0; first < problem.queries; first += kQueries) {
      const QueryTile query(problem, batch, head, first);
      const KeyRange range = keys_of_any(problem.visible, first, query.last(), problem.keys);
      if (range.begin >= range.end || range.begin >= end || range.end <= start) {
        if (mask.wanted) mask.add(query, start, end - start, nullptr);
        continue;
      }
      RowsOf<F> query_rows{}, grad_out_rows{};
      bool loaded = false, empty = true;
      int64_t done = start;  // the mask's gradient is written up to here
      for_each_block(range, start, end, start, [&](int64_t begin, int64_t count) {
        if (!loaded) {
          if (mask.wanted) mask.begin(problem, query, index);
          load_queries(problem, gradients, query, tile);
          query_rows = right_rows<E>(problem.query, query, problem.head_dim, tile.query_rows, tile.unpaired_rows);
          grad_out_rows = right_rows<E>(gradients.grad_out, query, problem.head_dim_v, tile.grad_out_rows, tile.unpaired_rows);
          loaded = true;
        }
        const RowsOf<F> key{keys.data + (begin - start) * keys.pitch, keys.pitch},
            value{values.data + (begin - start) * values.pitch, values.pitch};
        const bool seen = score_gradients(problem, query, begin, count, key, value, tile);
        if (mask.wanted) {
          mask.add(query, done, begin - done, nullptr);
          mask.add(query, begin, count, seen ? tile.grad : nullptr);
          done = begin + count;
        }
        if (!seen) return;
        if (problem.softcap > 0)
          for_each_vector(tile.grad, count, query.columns,
                          [&](Vector<A> x, int64_t k, int64_t l) { return x * load_vector(tile.slope + k * kQueries + l); });
        add_gradients(problem, query, count, begin - start, empty, key, query_rows, grad_out_rows, grad_key, grad_value, tile);
        empty = false;
      });
      if (mask.wanted) {
        mask.add(query, done, end - done, nullptr);
        mask.end(query, index);
      }
      sums.add(sequence, query, static_cast<int32_t>(index - range.begin / span), empty ? nullptr : tile.grad_query);
    }
  }
  const A scale = static_cast<A>(problem.scale);
  for (int64_t h = 0; h < key_heads; ++h)
    store_rows<E>(tile.grad_key + h * span * width, width, scale, end - start, problem.head_dim,
                  matrix_of<E>(gradients.grad_key, batch, group * key_heads + h, start));
  for (int64_t h = 0; h < value_heads; ++h)
    store_rows<E>(tile.grad_value + h * span * value_width, value_width, A(1), end - start, problem.head_dim_v,
                  matrix_of<E>(gradients.grad_value, batch, group * value_heads + h, start));
}

template <class E>
void store_query_gradient(const AttentionProblem& problem, const AttentionGradients& gradients, const QueryGradients<E>& sums,
                          int64_t tile, const QueryTile& query) {
  using A = Accumulator<E>;
  const auto to = matrix_of<E>(gradients.grad_query, query.batch, query.head, query.first);
  if (sums.turn[tile].load(std::memory_order_relaxed) == 0) {  // no key is seen: nobody has written the sums
    for (int64_t i = 0; i < query.rows; ++i)
      for (int64_t e = 0; e < problem.head_dim; ++e) to.data[i * to.row_stride + e * to.column_stride] = narrow<E>(A(0));
    return;
  }
  A scale[kQueries];
  std::fill_n(scale, kQueries, static_cast<A>(problem.scale));
  store_columns<E>(sums.sum + tile * sums.tile_size, kQueries, scale, query.rows, problem.head_dim, to);
}

// A sink joins the denominator alone: its gradient is the sum over queries of its weight times grad_lse - grad_out . out.
template <class A>
void sink_gradient(const AttentionProblem& problem, const AttentionGradients& gradients, int64_t batch, int64_t head) {
  const int64_t row = batch * problem.lse_stride[0] + head * problem.lse_stride[1];
  double sum = 0;
  for (int64_t i = row; i < row + problem.queries; ++i)
    sum -= sink_weight<A>(problem, head, i) *
           (gradients.wide_delta ? gradients.wide_delta[i] : static_cast<double>(static_cast<const A*>(gradients.delta)[i]));
  static_cast<A*>(gradients.grad_sinks)[batch * problem.heads + head] = static_cast<A>(sum);
}

// One tile of the gradient of a mask that all queries or all keys share: the gradients of all scores that its elements were
// added to, summed in registers' reach instead of in a tensor of all scores. Costs two matrix products more, needs no memory
// but the gradient itself.
template <class E>
struct MaskScratch : GradientScratch<E> {
  double* sum;  // [kKeys, kQueries]; in double, since the gradients of a row of scores cancel

  MaskScratch(const AttentionProblem& problem, Carver& carver) : GradientScratch<E>(problem, carver) {
    sum = carver.take<double>(kKeys * kQueries);
  }
};

template <class E>
void mask_gradient_tile(const AttentionProblem& problem, const AttentionGradients& gradients, int64_t mask_batch,
                        int64_t mask_head, int64_t first_tile, int64_t first_block, std::byte* scratch) {
  [[maybe_unused]] const TileRegisters registers;
  Carver carver(scratch);
  MaskScratch<E> tile(problem, carver);
  const int64_t* size = gradients.mask_size;
  const bool every_batch = size[0] == 1, every_head = size[1] == 1, every_query = size[2] == 1, every_key = size[3] == 1;
  std::fill_n(tile.sum, kKeys * kQueries, 0.0);

  const int64_t first_key = every_key ? 0 : first_block * kKeys,
                last_key = every_key ? problem.keys : std::min(problem.keys, first_key + kKeys);
  const int64_t first_query = every_query ? 0 : first_tile * kQueries,
                last_query = every_query ? problem.queries : std::min(problem.queries, first_query + kQueries);
  for (int64_t batch = every_batch ? 0 : mask_batch; batch < (every_batch ? problem.batch : mask_batch + 1); ++batch)
    for (int64_t head = every_head ? 0 : mask_head; head < (every_head ? problem.heads : mask_head + 1); ++head)
      for (int64_t first = first_query; first < last_query; first += kQueries) {
        const QueryTile query(problem, batch, head, first);
        bool loaded = false;
        const KeyRange range = keys_of_any(problem.visible, first, query.last(), problem.keys);
        for_each_block(range, first_key, last_key, first_key, [&](int64_t begin, int64_t count) {
          if (!loaded) load_queries(problem, gradients, query, tile);
          loaded = true;
          const auto key = key_rows_of<E>(problem, batch, head, begin, count, tile.key_copy),
                     value = value_rows_of<E>(problem, batch, head, begin, count, tile.value_copy);
          if (!score_gradients(problem, query, begin, count, key, value, tile)) return;
          for (int64_t k = 0; k < count; ++k) {
            double* sum = tile.sum + (every_key ? 0 : (begin - first_key + k) * kQueries);
            for (int64_t i = 0; i < query.columns; ++i) sum[i] += tile.grad[k * kQueries + i];
          }
        });
      }

  const MutableView4& to = gradients.grad_mask;
  const int64_t rows = last_query - first_query, columns = last_key - first_key;
  visit_floating<Float16, BFloat16>(gradients.grad_mask_dtype, [&]<class M>(Type<M>) {
    M* base = static_cast<M*>(to.data) + mask_batch * to.stride[0] + mask_head * to.stride[1] +
              first_tile * kQueries * to.stride[2] + first_block * kKeys * to.stride[3];
    for (int64_t i = 0; i < (every_query ? 1 : rows); ++i)
      for (int64_t k = 0; k < (every_key ? 1 : columns); ++k) {
        double sum = tile.sum[k * kQueries + i];
        if (every_query)
          for (int64_t lane = 1; lane < std::min(kQueries, rows); ++lane) sum += tile.sum[k * kQueries + lane];
        M& element = base[i * to.stride[2] + k * to.stride[3]];
        const auto before = gradients.add_to_grad_mask ? widen(element) : Accumulator<M>(0);
        element = narrow<M>(before + static_cast<Accumulator<M>>(sum));
      }
  });
}

}  // namespace

Memory backward_memory(const AttentionProblem& call, const AttentionGradients& gradients) {
  Carver backward(nullptr), mask(nullptr), shared(nullptr);
  visit_floating<Float16, BFloat16>(call.dtype, [&]<class E>(Type<E>) {
    BackwardScratch<E>(call, call.query_starts ? kLongestSpan : span_of(call), backward);
    MaskScratch<E>(call, mask);
    QueryGradients<E>(call, shared);
    MaskGradients<E>(call, gradients, shared);
    key_spans(call, shared);
  });
  return {std::max(backward.used(), mask.used()), shared.used()};
}

void backward(const AttentionProblem& call, const AttentionGradients& gradients, const Executor& executor) {
  const int64_t groups = groups_of(call);
  visit_floating<Float16, BFloat16>(call.dtype, [&]<class E>(Type<E>) {
    Carver shared(executor.shared);
    const QueryGradients<E> sums(call, shared);
    const MaskGradients<E> mask(call, gradients, shared);
    const Schedule spans = key_spans(call, shared);
    const int64_t* mask_size = gradients.mask_size;
    for (int64_t i = 0; mask.sum && i < mask.planes() * mask.tiles * mask.spans; ++i)
      mask.turn[i].store(0, std::memory_order_relaxed);

    const auto for_each_query_tile = [&](const auto& run) {
      for_each_item(executor, call.heads * sums.tiles.total(), [&](int64_t item, std::byte* scratch) {
        const auto [index, head, tile] = sums.tiles.find(call.heads, item);
        const OneSequence sequence(call, index);
        run(item, sequence, QueryTile(sequence.problem, sequence.batch, head, tile * kQueries), scratch);
      });
    };
    for_each_query_tile([&](int64_t tile, const OneSequence& sequence, const QueryTile& query, std::byte* scratch) {
      sums.turn[tile].store(0, std::memory_order_relaxed);
      fill_delta<E>(sequence.problem, sequence.of(gradients), query, scratch);
    });
    // Scattered, so that items of one head, which add to the same queries, seldom run at the same time.
    for_each_item(executor, groups * spans.total(), [&](int64_t item, std::byte* scratch) {
      const auto [index, group, span] = spans.find_scattered(groups, item);
      const OneSequence sequence(call, index);
      backward_span<E>(sequence, sequence.of(gradients), sums, mask, group, span, scratch);
    });
    for_each_query_tile([&](int64_t tile, const OneSequence& sequence, const QueryTile& query, std::byte*) {
      store_query_gradient<E>(sequence.problem, sequence.of(gradients), sums, tile, query);
    });
    if (gradients.grad_sinks)
      for_each_item(executor, call.batch * call.heads, [&](int64_t item, std::byte*) {
        const OneSequence sequence(call, item / call.heads);
        sink_gradient<Accumulator<E>>(sequence.problem, sequence.of(gradients), sequence.batch, item % call.heads);
      });
    if (call.query_starts)
      for_each_item(executor, call.batch + 1, [&](int64_t index, std::byte*) {
        const Rows queries = padding_rows(call.query_starts, call.batch, index, call.queries, call.total_queries);
        const Rows keys = padding_rows(call.key_starts, call.batch, index, call.keys, call.total_keys);
        zero_rows<E>(gradients.grad_query, call.heads, queries, call.head_dim);
        zero_rows<E>(gradients.grad_key, call.key_heads, keys, call.head_dim);
        zero_rows<E>(gradients.grad_value, call.value_heads, keys, call.head_dim_v);
      });
    if (mask.sum)
      for_each_item(executor, mask.planes() * mask.tiles, [&](int64_t item, std::byte*) {
        const int64_t plane = item / mask.tiles;
        mask.finish(QueryTile(call, plane / mask_size[1], plane % mask_size[1], item % mask.tiles * kQueries));
      });
    if (gradients.grad_mask.data && !mask.wanted) {
      const int64_t rows = mask_size[2] == 1 ? 1 : tiles_of(mask_size[2], kQueries),
                    blocks = mask_size[3] == 1 ? 1 : tiles_of(mask_size[3], kKeys);
      for_each_item(executor, mask_size[0] * mask_size[1] * rows * blocks, [&](int64_t item, std::byte* scratch) {
        const int64_t plane = item / (rows * blocks), rest = item % (rows * blocks);
        mask_gradient_tile<E>(call, gradients, plane / mask_size[1], plane % mask_size[1], rest / blocks, rest % blocks,
                              scratch);
      });
    }
  });
}

}  // namespace flash_online::cpu::FLASH_ONLINE_ISA
