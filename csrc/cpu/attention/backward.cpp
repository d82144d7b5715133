// Attention on the CPU: the backward pass, with the gradients of query, key and value, of the mask and of sinks. Scores are
// recomputed, a tile at a time. The algorithm is FlashAttention's (arXiv 2205.14135, appendix B.4), with keys in the outer
// loop.
//
// A work item is a chunk of keys, of all heads that share these keys or values. It alone writes the gradients of its keys and
// values. The items add to the gradients of a tile of queries in the order of their keys, for which each tile has a semaphore.
// The results therefore do not depend on the number of threads.
#include <atomic>
#include <numeric>
#include <thread>

#include "gradient_tile.h"
#include "work_items.h"

namespace flash_online::cpu::FLASH_ONLINE_ISA {
namespace {

// Returns whether delta has to be exact: if a gradient adds up whole rows of score gradients (of sinks, or of a mask that all
// keys share), or if a mask gets the score gradients themselves and `out` was rounded to 16 bits.
template <class E>
bool needs_exact_delta(const AttentionGradients& gradients) {
  return gradients.grad_sinks || (gradients.grad_mask.data && (sizeof(E) == 2 || gradients.mask_size[3] == 1));
}

// Computes maxima and the rest of lse, from scores in double, for the rows of a tile that have a large lse.
template <class E>
__attribute__((noinline)) void fill_row_statistics(const AttentionProblem& problem, const AttentionGradients& gradients,
                                                   const QueryTile& query, GradientScratch<E>& tile) {
  using A = Accumulator<E>;
  constexpr double kNegligible = -60;  // the logarithm of a weight that a double loses when 1 is added
  const int64_t offset = query.lse_offset(problem);
  OnlineSoftmax<double, FastNatural> state[kQueries];
  A reference[kQueries] = {};
  for (int64_t i = 0; i < query.rows; ++i) {
    reference[i] = pivot(static_cast<const A*>(problem.lse)[offset + i]);
    if (problem.sinks) state[i].absorb(static_cast<const A*>(problem.sinks)[query.head]);
  }
  load_query_lanes<E>(problem.query, query, problem.head_dim, tile.query, tile.row_buffer);
  const KeyRange range = keys_of_any(problem.visible, query.first, query.end(), problem.keys);
  for_each_key_block(range, 0, problem.keys, 0, [&](int64_t begin, int64_t count) {
    if (!load_mask(problem, query, begin, count, tile.mask)) return;
    const auto key = key_rows_or_copy<E>(problem, query.batch, query.head, begin, count, tile.key_buffer);
    compute_scores(problem, query, begin, count, key, tile, reference, static_cast<A*>(nullptr));
    for (int64_t i = 0; i < query.rows; ++i) {
      if (!has_row_statistics(reference[i])) continue;
      const double block_max = tile.is_double[i] ? tile.double_block_max[i] : tile.block_max[i];
      if (block_max < state[i].max + kNegligible) continue;
      state[i].raise_max(block_max);
      for (int64_t index = i; index < count * kQueries; index += kQueries)
        state[i].add(state[i].weight(tile.is_double[i] ? tile.double_score[index] : tile.score[index]));
    }
  });
  for (int64_t i = 0; i < query.rows; ++i) {
    gradients.row_max[offset + i] = pivot(state[i].max);
    gradients.row_log_sum[offset + i] = FastNatural::log(state[i].sum);
  }
}

// Writes delta of a tile of queries as grad_out . out, which equals the sum over keys of weight * grad_weight except for the
// rounding of out. In the sum of a whole row of score gradients (0 without sinks) that rounding does not average out. There
// delta is computed as the sum over the keys, for two more matmuls.
template <class E>
void fill_delta(const AttentionProblem& problem, const AttentionGradients& gradients, const QueryTile& query,
                std::byte* scratch) {
  using A = Accumulator<E>;
  [[maybe_unused]] const AmxTiles registers;
  ScratchAllocator allocator(scratch);
  GradientScratch<E> tile(problem, allocator);
  const int64_t offset = query.lse_offset(problem);
  A* narrow_delta = static_cast<A*>(gradients.delta) + offset;
  double delta[kQueries] = {}, weight_sum[kQueries] = {};
  if constexpr (ScoreTile<E>::kMayUseDouble) {
    const A* const lse = static_cast<const A*>(problem.lse) + offset;
    if (std::any_of(lse, lse + query.rows, [](A x) { return has_row_statistics(x); }))
      fill_row_statistics(problem, gradients, query, tile);
  }
  // While delta is 0, compute_score_gradients gives weight * grad_weight, the terms of delta.
  std::fill_n(narrow_delta, query.rows, A(0));
  if (gradients.wide_delta) std::fill_n(gradients.wide_delta + offset, query.rows, 0.0);
  if (needs_exact_delta<E>(gradients)) {
    load_queries(problem, gradients, query, tile);
    std::fill_n(tile.row_sum, kQueries, A(0));
    const KeyRange range = keys_of_any(problem.visible, query.first, query.end(), problem.keys);
    for_each_key_block(range, 0, problem.keys, 0, [&](int64_t begin, int64_t count) {
      const auto key = key_rows_or_copy<E>(problem, query.batch, query.head, begin, count, tile.key_buffer),
                 value = value_rows_or_copy<E>(problem, query.batch, query.head, begin, count, tile.value_buffer);
      if (!compute_score_gradients(problem, query, begin, count, key, value, tile, weight_sum)) return;
      for (int64_t k = 0; k < count; ++k)
        for (int64_t i = 0; i < query.lanes; ++i) delta[i] += tile.grad[k * kQueries + i];
    });
    for (int64_t i = 0; i < query.rows; ++i) {
      // The weights add up to 1 except for their rounding, which the division removes.
      if (problem.sinks) weight_sum[i] += sink_weight<A>(problem, gradients, query.head, offset + i);
      if (weight_sum[i] != 0) delta[i] /= weight_sum[i];
      narrow_delta[i] = static_cast<A>(delta[i]);
    }
  } else {
    // The terms are added in the order of matmul(): where a query sees one key alone, delta then equals the gradient of that
    // key's weight to the last bit, and their difference is 0.
    constexpr int64_t kColumns = 32;  // divides kMaxTerms of float
    A grad_out[kColumns * kQueries], out[kColumns * kQueries], sum[kQueries] = {}, partial[kQueries] = {};
    auto grad_rows = matrix_of<const E>(gradients.grad_out, query.batch, query.head, query.first),
         out_rows = matrix_of<const E>(problem.out, query.batch, query.head, query.first);
    for (int64_t begin = 0; begin < problem.head_dim_v; begin += kColumns) {
      const int64_t columns = std::min(kColumns, problem.head_dim_v - begin);
      load_transposed<E>(grad_rows, query.rows, columns, grad_out, kQueries);
      load_transposed<E>(out_rows, query.rows, columns, out, kQueries);
      grad_rows.data += columns * grad_rows.column_stride;
      out_rows.data += columns * out_rows.column_stride;
      for (int64_t e = 0; e < columns; ++e) {
        for (int64_t l = 0; l < query.lanes; l += kLanes<A>)
          store_vector(partial + l, load_vector(partial + l) +
                                        load_vector(grad_out + e * kQueries + l) * load_vector(out + e * kQueries + l));
        if (gradients.wide_delta)
          for (int64_t i = 0; i < query.lanes; ++i)
            delta[i] += static_cast<double>(grad_out[e * kQueries + i]) * out[e * kQueries + i];
      }
      if ((begin + columns) % kMaxTerms<Operand<E>> != 0 && begin + columns < problem.head_dim_v) continue;
      for (int64_t l = 0; l < query.lanes; l += kLanes<A>) {
        store_vector(sum + l, load_vector(partial + l) + load_vector(sum + l));
        store_vector(partial + l, Vector<A>{});
      }
    }
    std::copy_n(sum, query.rows, narrow_delta);
  }
  for (int64_t i = 0; i < query.rows; ++i) {
    const A grad_lse = gradients.grad_lse ? static_cast<const A*>(gradients.grad_lse)[offset + i] : A(0);
    narrow_delta[i] -= grad_lse;
    if (gradients.wide_delta) gradients.wide_delta[offset + i] = delta[i] - grad_lse;
  }
}

// The number of groups of heads; the heads of a group share keys or values.
int64_t kv_groups(const AttentionProblem& problem) { return std::gcd(problem.key_heads, problem.value_heads); }

constexpr int64_t kMaxChunkKeys = 4 * kKeys;

// The number of keys that a work item owns: many, since each item loads all queries again, but few enough that every thread
// gets an item. It depends on the sequence's number of keys alone, as it sets the order of sums: the gradients of a head must
// not depend on the number of heads or sequences in a call.
int64_t chunk_of(const AttentionProblem& problem) { return std::clamp(round_up(problem.keys, kKeys), kKeys, kMaxChunkKeys); }

// Returns whether one work item has all keys that the tile's queries see. It then knows the row sums before it uses a gradient.
bool is_in_one_chunk(const AttentionProblem& problem, const QueryTile& query) {
  const KeyRange range = keys_of_any(problem.visible, query.first, query.end(), problem.keys);
  const int64_t chunk = chunk_of(problem);
  return range.begin >= range.end || range.begin / chunk == (range.end - 1) / chunk;
}

CpuTileList key_chunks(const AttentionProblem& call, ScratchAllocator& allocator) {
  return CpuTileList(call, allocator, [](const SequenceProblem& sequence) {
    return ceil_div(sequence.problem.keys, chunk_of(sequence.problem));
  });
}

// The sums that are accumulated for a tile of queries, and their size.
template <class A>
struct DqTile {
  A* grad_query;  // [padded(head_dim), kQueries]
  A* excess;  // [kQueries], see excess_of_row_sums; row sums, until store_dq
  A *key_sum, *key_count;  // [padded(head_dim)], [1]: the sum of some of the keys that the queries see, and their count

  DqTile(const AttentionProblem& problem, A* data)
      : grad_query(data),
        excess(grad_query + padded(problem.head_dim) * kQueries),
        key_sum(excess + kQueries),
        key_count(key_sum + padded(problem.head_dim)) {}
  static int64_t size(const AttentionProblem& problem) {
    return padded(problem.head_dim) * (kQueries + 1) + kQueries + padded(1);
  }
};

// The dQ accumulator: for each tile of queries a DqTile, and a semaphore that counts the items that have added to it.
template <class E>
struct DqAccumulator {
  using A = Accumulator<E>;
  CpuTileList tiles;
  A* accum;
  std::atomic<int32_t>* semaphore;
  int64_t tile_size;

  DqAccumulator(const AttentionProblem& call, ScratchAllocator& allocator) : tiles(query_tiles(call, allocator)) {
    tile_size = DqTile<A>::size(call);
    accum = allocator.take<A>(call.heads * tiles.total() * tile_size);
    semaphore = allocator.take<std::atomic<int32_t>>(call.heads * tiles.total());
  }

  // Adds an item's share of a tile after the `before` items with lower keys; `share` is null if the item has nothing to add.
  // Waiting cannot deadlock: items start in the order of their keys and wait for lower keys only, so one of the started items
  // always runs.
  void add(const SequenceProblem& sequence, const QueryTile& query, int32_t before, const A* share) const {
    const int64_t tile = tiles.index_of(sequence.problem.heads, {sequence.index, query.head, query.first / kQueries});
    while (semaphore[tile].load(std::memory_order_acquire) != before) std::this_thread::yield();
    A* to = accum + tile * tile_size;
    if (before == 0) {
      if (share)
        std::copy_n(share, tile_size, to);
      else
        std::fill_n(to, tile_size, A(0));
    } else if (share) {
      for (int64_t i = 0; i < tile_size; ++i) to[i] += share[i];
    }
    semaphore[tile].store(before + 1, std::memory_order_release);
  }
};

// Writes the mask's gradient for a tile of queries and keys [begin, begin + count): the transpose of share[count, kQueries], or
// 0 if `share` is null.
template <class A>
void store_mask_gradient(const AttentionGradients& gradients, const QueryTile& query, int64_t begin, int64_t count,
                         const A* share) {
  if (count <= 0) return;
  visit_floating<Float16, BFloat16>(gradients.grad_mask_dtype, [&]<class M>(Type<M>) {
    auto to = matrix_of<M>(gradients.grad_mask, query.batch, query.head, query.first);
    to.data += begin * to.column_stride;
    if constexpr (std::is_same_v<A, Accumulator<M>>) {
      if (share && !gradients.add_to_grad_mask) {
        A one[kQueries];
        std::fill_n(one, kQueries, A(1));
        return store_transposed<M>(share, kQueries, one, query.rows, count, to);
      }
    }
    for (int64_t i = 0; i < query.rows; ++i)
      for (int64_t k = 0; k < count; ++k) {
        M& element = to.data[i * to.row_stride + k * to.column_stride];
        const auto before = gradients.add_to_grad_mask ? widen(element) : Accumulator<M>(0);
        element = narrow<M>(before + (share ? static_cast<Accumulator<M>>(share[k * kQueries + i]) : Accumulator<M>(0)));
      }
  });
}

// The gradient of a mask that has a row for each query and a column for each key. If each head of each batch has its own mask,
// tiles are written as they are computed. Otherwise they are summed over the heads and batches that share the mask: there is a
// sum [keys, kQueries] for each tile of queries, and a semaphore for each of its chunks of keys counts the heads that have
// added.
template <class E>
struct MaskGradients {
  using A = Accumulator<E>;
  const AttentionGradients& gradients;
  A* accum = nullptr;
  std::atomic<int32_t>* semaphore = nullptr;
  int64_t tiles, chunks, chunk, keys;
  bool wanted, sums_batches, sums_heads;
  int64_t mask_heads;

  MaskGradients(const AttentionProblem& problem, const AttentionGradients& gradients, ScratchAllocator& allocator)
      : gradients(gradients) {
    const int64_t* size = gradients.mask_size;
    wanted = gradients.grad_mask.data && size[2] == problem.queries && size[3] == problem.keys;
    sums_batches = size[0] != problem.batch, sums_heads = size[1] != problem.heads, mask_heads = size[1];
    tiles = ceil_div(problem.queries, kQueries), chunk = chunk_of(problem), chunks = ceil_div(problem.keys, chunk),
    keys = problem.keys;
    if (!wanted || (!sums_batches && !sums_heads)) return;
    accum = allocator.take<A>(size[0] * size[1] * tiles * keys * kQueries);
    semaphore = allocator.take<std::atomic<int32_t>>(size[0] * size[1] * tiles * chunks);
  }
  int64_t planes() const { return gradients.mask_size[0] * gradients.mask_size[1]; }
  int64_t tile_of(const QueryTile& query) const {
    const int64_t plane = (sums_batches ? 0 : query.batch) * mask_heads + (sums_heads ? 0 : query.head);
    return plane * tiles + query.first / kQueries;
  }
  A* at(const QueryTile& query, int64_t key) const { return accum + (tile_of(query) * keys + key) * kQueries; }

  // Called before the first share of a tile in a chunk: waits until the heads and batches before this one have added theirs.
  // DqAccumulator::add says why waiting cannot deadlock.
  void begin(const AttentionProblem& problem, const QueryTile& query, int64_t index) const {
    if (!accum) return;
    const int32_t before = static_cast<int32_t>((sums_batches ? query.batch * (sums_heads ? problem.heads : 1) : 0) +
                                                (sums_heads ? query.head : 0));
    const std::atomic<int32_t>& now = semaphore[tile_of(query) * chunks + index];
    while (now.load(std::memory_order_acquire) != before) std::this_thread::yield();
    if (before == 0) std::fill(at(query, index * chunk), at(query, std::min((index + 1) * chunk, keys)), A(0));
  }
  void end(const QueryTile& query, int64_t index) const {
    if (accum) semaphore[tile_of(query) * chunks + index].fetch_add(1, std::memory_order_release);
  }
  // Adds a share; `share` is null for keys that no query sees.
  void add(const QueryTile& query, int64_t key, int64_t count, const A* share) const {
    if (!accum) return store_mask_gradient(gradients, query, key, count, share);
    A* to = at(query, key);
    for (int64_t i = 0; share && i < count * kQueries; i += kLanes<A>)
      store_vector(to + i, load_vector(to + i) + load_vector(share + i));
  }
  // Writes the sums of a tile to the gradient.
  void finish(const QueryTile& query) const {
    for (int64_t index = 0; index < chunks; ++index) {
      const int64_t first = index * chunk, count = std::min(chunk, keys - first);
      const bool is_visible = semaphore[tile_of(query) * chunks + index].load(std::memory_order_relaxed) != 0;
      store_mask_gradient(gradients, query, first, count, is_visible ? at(query, first) : nullptr);
    }
  }
};

template <class E>
struct BackwardScratch : GradientScratch<E> {
  using A = Accumulator<E>;
  using F = Operand<E>;
  F *keys, *values;  // the rows of a chunk, where they are copied: [chunk, operand_pitch(head_dim or head_dim_v)]
  F* key_columns;  // paired: [chunk / kKeys, padded(head_dim), kKeys]
  F* pairs;  // paired: a buffer [kKeys / 2, padded(head_dim)] pairs
  F *query_rows, *grad_out_rows;  // [kQueries, padded(head_dim)], [kQueries, padded(head_dim_v)]; paired by columns
  F *weight_rows, *grad_rows;  // paired: [kKeys, kQueries] each
  F* grad_pairs;  // paired: [kKeys / 2, kQueries] pairs
  A* grad_query;  // a DqTile
  bool* is_visible;  // [tiles]
  A *grad_key, *grad_value;  // [heads of the group, chunk, padded(head_dim or head_dim_v)]

  BackwardScratch(const AttentionProblem& problem, int64_t chunk, ScratchAllocator& allocator)
      : GradientScratch<E>(problem, allocator, chunk / kKeys) {
    const int64_t groups = kv_groups(problem);
    const int64_t padded_head_dim = padded(problem.head_dim), padded_head_dim_v = padded(problem.head_dim_v);
    keys = allocator.take<F>(chunk * operand_pitch<F>(problem.head_dim));
    values = allocator.take<F>(chunk * operand_pitch<F>(problem.head_dim_v));
    constexpr int64_t paired = kPaired<F> ? 1 : 0;
    key_columns = allocator.take<F>(paired * chunk * padded_head_dim);
    pairs = allocator.take<F>(paired * kKeys * padded_head_dim);
    query_rows = allocator.take<F>(kQueries * padded_head_dim);
    grad_out_rows = allocator.take<F>(kQueries * padded_head_dim_v);
    weight_rows = allocator.take<F>(paired * kKeys * kQueries);
    grad_rows = allocator.take<F>(paired * kKeys * kQueries);
    grad_pairs = allocator.take<F>(paired * kKeys * kQueries);
    grad_query = allocator.take<A>(DqTile<A>::size(problem));
    is_visible = allocator.take<bool>(chunk / kKeys);
    grad_key = allocator.take<A>(problem.key_heads / groups * chunk * padded_head_dim);
    grad_value = allocator.take<A>(problem.value_heads / groups * chunk * padded_head_dim_v);
  }
};

// The rows of a tile of queries as the right operand of a matmul over queries: [queries, padded(head_dim)], paired by columns.
template <class E>
RowMatrix<Operand<E>> right_operand_rows(const ConstView4& view, const QueryTile& query, int64_t head_dim, Operand<E>* copy) {
  using F = Operand<E>;
  const auto from = matrix_of<const E>(view, query.batch, query.head, query.first);
  const int64_t pitch = padded(head_dim);
  if constexpr (kPaired<F>) {
    load_row_pairs<E>(from, query.rows, head_dim, copy, round_up(query.rows, kDepthStep<F>), pitch);
  } else {
    if constexpr (std::is_same_v<E, F>)
      if (from.column_stride == 1 && head_dim == pitch) return {from.data, from.row_stride};
    load_rows<E>(from, query.rows, head_dim, copy, query.rows, pitch);
  }
  return {copy, pitch};
}

// Adds the contributions of one tile of scores to the gradients of its keys and values, and to grad_query.
template <class E>
void add_gradients(const AttentionProblem& problem, const QueryTile& query, int64_t count, int64_t key_in_chunk, bool first,
                   RowMatrix<Operand<E>> key, RowMatrix<Operand<E>> query_rows, RowMatrix<Operand<E>> grad_out_rows,
                   Accumulator<E>* grad_key, Accumulator<E>* grad_value, const GradientScratch<E>& scores,
                   const BackwardScratch<E>& tile) {
  using F = Operand<E>;
  const int64_t padded_head_dim = padded(problem.head_dim), padded_head_dim_v = padded(problem.head_dim_v);
  const Accumulate mode = first ? Accumulate::kOverwrite : Accumulate::kAdd;
  grad_key += key_in_chunk * padded_head_dim;
  grad_value += key_in_chunk * padded_head_dim_v;
  if constexpr (kPaired<F>) {
    const int64_t rows = round_up(count, kRowStep<F>), depth = round_up(query.rows, kDepthStep<F>);
    narrow_rows(scores.score, count, rows, query.lanes, depth, kQueries, tile.weight_rows);
    narrow_rows(scores.grad, count, rows, query.lanes, depth, kQueries, tile.grad_rows);
    narrow_to_pairs(scores.grad, count, round_up(count, kDepthStep<F>), query.lanes, kQueries, tile.grad_pairs);
    matmul(Accumulate::kAdd, rows, padded_head_dim_v, depth, tile.weight_rows, kQueries, 1, grad_out_rows.data,
           grad_out_rows.pitch, grad_value, padded_head_dim_v);
    matmul(Accumulate::kAdd, rows, padded_head_dim, depth, tile.grad_rows, kQueries, 1, query_rows.data, query_rows.pitch,
           grad_key, padded_head_dim);
    const int64_t block = key_in_chunk / kKeys * kKeys;
    matmul(mode, padded_head_dim, query.lanes, round_up(count, kDepthStep<F>),
           tile.key_columns + block * padded_head_dim + key_in_chunk - block, kKeys, 1, tile.grad_pairs, kQueries,
           tile.grad_query, kQueries);
  } else {
    matmul(Accumulate::kAdd, count, padded_head_dim_v, query.rows, scores.score, kQueries, 1, grad_out_rows.data,
           grad_out_rows.pitch, grad_value, padded_head_dim_v);
    matmul(Accumulate::kAdd, count, padded_head_dim, query.rows, scores.grad, kQueries, 1, query_rows.data, query_rows.pitch,
           grad_key, padded_head_dim);
    matmul(mode, problem.head_dim, query.lanes, count, key.data, 1, key.pitch, scores.grad, kQueries, tile.grad_query,
           kQueries);
  }
}

// Paired operands: loads the chunk's keys as columns, the left operand of dQ.
template <class E>
FLASH_ONLINE_INLINE void load_key_columns(const AttentionProblem& problem, int64_t batch, int64_t key_head, int64_t start,
                                          int64_t end, const BackwardScratch<E>& tile) {
  const int64_t padded_head_dim = padded(problem.head_dim);
  for (int64_t begin = start; begin < end; begin += kKeys) {
    const auto from = matrix_of<const E>(problem.key, batch, key_head, begin);
    constexpr int digits = kBf16Digits<Operand<E>>;
    load_row_pairs<E>(from, std::min(kKeys, end - begin), problem.head_dim, tile.pairs, kKeys, padded_head_dim);
    transpose_pairs(tile.pairs, padded_head_dim * digits, kKeys / 2, padded_head_dim,
                    tile.key_columns + (begin - start) * padded_head_dim, kKeys / 2 * digits);
  }
}

// The operands of a work item for one head, and the addresses of its sums.
template <class E>
struct ChunkHead {
  using A = Accumulator<E>;
  int64_t index, start, end;  // of the chunk; its keys
  RowMatrix<Operand<E>> keys, values;
  A *grad_key, *grad_value;
};

// Sums the keys [begin, begin + count). store_dq then knows a mean of the keys without reading hidden keys.
template <class E, class A = Accumulator<E>>
void sum_keys(const AttentionProblem& problem, const ChunkHead<E>& head, int64_t begin, int64_t count, const DqTile<A>& dq) {
  const Operand<E>* key = head.keys.data + (begin - head.start) * head.keys.pitch;
  for (int64_t k = 0; k < count; ++k, key += head.keys.pitch)
    for (int64_t e = 0; e < problem.head_dim; ++e) dq.key_sum[e] += widen_element(key, e);
  *dq.key_count = static_cast<A>(count);
}

// Adds the contributions of one tile of queries to the gradients of a chunk's keys and values, and computes tile.grad_query,
// the chunk's share of the queries' gradients. Returns false if no key of the chunk is visible. If the chunk has all keys that
// the queries see, all tiles of scores are computed before any is used, and delta is corrected by their row sums.
template <class E>
bool add_query_tile(const AttentionProblem& problem, const AttentionGradients& gradients, const MaskGradients<E>& mask,
                    const QueryTile& query, KeyRange range, const ChunkHead<E>& head, const BackwardScratch<E>& tile) {
  using A = Accumulator<E>;
  if (mask.wanted) mask.begin(problem, query, head.index);
  load_queries(problem, gradients, query, tile);
  const auto query_rows = right_operand_rows<E>(problem.query, query, problem.head_dim, tile.query_rows),
             grad_out_rows = right_operand_rows<E>(gradients.grad_out, query, problem.head_dim_v, tile.grad_out_rows);
  std::fill_n(tile.row_sum, kQueries, A(0));
  const DqTile<A> dq(problem, tile.grad_query);
  A* excess = dq.excess;
  std::fill_n(dq.key_sum, padded(problem.head_dim) + padded(1), A(0));
  const bool has_whole_rows = is_in_one_chunk(problem, query);
  bool empty = true;
  int64_t done = head.start;  // up to here the mask's gradient is written

  const auto for_each_block = [&](const auto& run) FLASH_ONLINE_LAMBDA_INLINE {
    for_each_key_block(range, head.start, head.end, head.start, [&](int64_t begin, int64_t count) {
      const int64_t block = (begin - head.start) / kKeys;
      GradientScratch<E> scores = tile.at_tile(has_whole_rows ? block : 0);
      run(begin, count, tile.is_visible[block], scores);
    });
  };
  const auto compute = [&](int64_t begin, int64_t count, bool& is_visible, GradientScratch<E>& scores) {
    const RowMatrix<Operand<E>> key{head.keys.data + (begin - head.start) * head.keys.pitch, head.keys.pitch},
        value{head.values.data + (begin - head.start) * head.values.pitch, head.values.pitch};
    is_visible = compute_score_gradients(problem, query, begin, count, key, value, scores);
  };
  const auto use = [&](int64_t begin, int64_t count, bool is_visible, const GradientScratch<E>& scores) {
    if (is_visible && has_whole_rows) correct_delta(problem, query, count, excess, scores);
    if (mask.wanted) {
      mask.add(query, done, begin - done, nullptr);
      mask.add(query, begin, count, is_visible ? scores.grad : nullptr);
      done = begin + count;
    }
    if (!is_visible) return;
    ScoreMod::chain(problem, query, count, scores.grad, scores.derivative);
    const RowMatrix<Operand<E>> key{head.keys.data + (begin - head.start) * head.keys.pitch, head.keys.pitch};
    add_gradients(problem, query, count, begin - head.start, empty, key, query_rows, grad_out_rows, head.grad_key,
                  head.grad_value, scores, tile);
    empty = false;
  };
  if (has_whole_rows) {
    for_each_block(compute);
    excess_of_row_sums(problem, gradients, query, tile.row_sum, excess);
    for_each_block(use);
    std::fill_n(excess, kQueries, A(0));
  } else {
    for_each_block([&](int64_t begin, int64_t count, bool& is_visible, GradientScratch<E>& scores) {
      compute(begin, count, is_visible, scores);
      if (is_visible && empty) sum_keys(problem, head, begin, count, dq);
      use(begin, count, is_visible, scores);
    });
    std::copy_n(tile.row_sum, kQueries, excess);
  }
  if (mask.wanted) {
    mask.add(query, done, head.end - done, nullptr);
    mask.end(query, head.index);
  }
  return !empty;
}

// A work item: the gradients of the keys and values of one chunk, and their share of the gradients of all queries.
template <class E>
void backward_chunk(const SequenceProblem& sequence, const AttentionGradients& gradients, const DqAccumulator<E>& dq_accum,
                    const MaskGradients<E>& mask, int64_t group, int64_t index, std::byte* scratch) {
  using A = Accumulator<E>;
  using F = Operand<E>;
  [[maybe_unused]] const AmxTiles registers;
  const AttentionProblem& problem = sequence.problem;
  const int64_t batch = sequence.batch, chunk = chunk_of(problem);
  ScratchAllocator allocator(scratch);
  BackwardScratch<E> tile(problem, chunk, allocator);
  const int64_t groups = kv_groups(problem), heads = problem.heads / groups;
  const int64_t key_heads = problem.key_heads / groups, value_heads = problem.value_heads / groups;
  const int64_t padded_head_dim = padded(problem.head_dim), padded_head_dim_v = padded(problem.head_dim_v);
  const int64_t start = index * chunk, end = std::min(start + chunk, problem.keys);
  std::fill_n(tile.grad_key, key_heads * chunk * padded_head_dim, A(0));
  std::fill_n(tile.grad_value, value_heads * chunk * padded_head_dim_v, A(0));

  for (int64_t member = 0; member < heads; ++member) {
    const int64_t head = group * heads + member;
    const ChunkHead<E> of_head{
        .index = index,
        .start = start,
        .end = end,
        .keys = key_rows_or_copy<E>(problem, batch, head, start, end - start, tile.keys),
        .values = value_rows_or_copy<E>(problem, batch, head, start, end - start, tile.values),
        .grad_key = tile.grad_key + member / (heads / key_heads) * chunk * padded_head_dim,
        .grad_value = tile.grad_value + member / (heads / value_heads) * chunk * padded_head_dim_v,
    };
    if constexpr (kPaired<F>) {
      if (member % (heads / key_heads) == 0)
        load_key_columns<E>(problem, batch, head / (problem.heads / problem.key_heads), start, end, tile);
    }
    for (int64_t first = 0; first < problem.queries; first += kQueries) {
      const QueryTile query(problem, batch, head, first);
      const KeyRange range = keys_of_any(problem.visible, first, query.end(), problem.keys);
      if (range.begin >= range.end || range.begin >= end || range.end <= start) {
        if (mask.wanted) mask.add(query, start, end - start, nullptr);
        continue;
      }
      const bool is_seen = add_query_tile(problem, gradients, mask, query, range, of_head, tile);
      dq_accum.add(sequence, query, static_cast<int32_t>(index - range.begin / chunk), is_seen ? tile.grad_query : nullptr);
    }
  }
  const A scale = static_cast<A>(problem.scale);
  for (int64_t h = 0; h < key_heads; ++h)
    store_rows<E>(tile.grad_key + h * chunk * padded_head_dim, padded_head_dim, scale, end - start, problem.head_dim,
                  matrix_of<E>(gradients.grad_key, batch, group * key_heads + h, start));
  for (int64_t h = 0; h < value_heads; ++h)
    store_rows<E>(tile.grad_value + h * chunk * padded_head_dim_v, padded_head_dim_v, A(1), end - start, problem.head_dim_v,
                  matrix_of<E>(gradients.grad_value, batch, group * value_heads + h, start));
}

// Writes the gradients of a tile of queries. If score gradients should sum to 0 but do not, dQ has an error along the mean of
// the keys, which may be large; subtracting the excess times a mean of keys removes the error.
template <class E>
void store_dq(const AttentionProblem& problem, const AttentionGradients& gradients, const DqAccumulator<E>& dq_accum,
              int64_t tile, const QueryTile& query) {
  using A = Accumulator<E>;
  const auto to = matrix_of<E>(gradients.grad_query, query.batch, query.head, query.first);
  // Without a visible key no item has written the accumulator.
  if (dq_accum.semaphore[tile].load(std::memory_order_relaxed) == 0) {
    for (int64_t i = 0; i < query.rows; ++i)
      for (int64_t e = 0; e < problem.head_dim; ++e) to.data[i * to.row_stride + e * to.column_stride] = narrow<E>(A(0));
    return;
  }
  const DqTile<A> dq(problem, dq_accum.accum + tile * dq_accum.tile_size);
  A* accum = dq.grad_query;
  // With a score modification, the sum of a row's score gradients is unknown.
  if (*dq.key_count > 0 && !ScoreMod::has_derivative(problem)) {
    A excess[kQueries];
    excess_of_row_sums(problem, gradients, query, dq.excess, excess);
    for_each_vector(accum, problem.head_dim, query.lanes, [&](Vector<A> x, int64_t e, int64_t l) {
      const A mean = dq.key_sum[e] / *dq.key_count;
      return x - load_vector(excess + l) * (mean - mean == 0 ? mean : A(0));
    });
  }
  A scale[kQueries];
  std::fill_n(scale, kQueries, static_cast<A>(problem.scale));
  store_transposed<E>(accum, kQueries, scale, query.rows, problem.head_dim, to);
}

// A sink is in the denominator alone: its gradient is the sum over queries of its weight times grad_lse - grad_out . out.
template <class A>
void sink_gradient(const AttentionProblem& problem, const AttentionGradients& gradients, int64_t batch, int64_t head) {
  const int64_t row = batch * problem.lse_stride[0] + head * problem.lse_stride[1];
  double sum = 0;
  for (int64_t i = row; i < row + problem.queries; ++i)
    sum -= sink_weight<A>(problem, gradients, head, i) *
           (gradients.wide_delta ? gradients.wide_delta[i] : static_cast<double>(static_cast<const A*>(gradients.delta)[i]));
  static_cast<A*>(gradients.grad_sinks)[batch * problem.heads + head] = static_cast<A>(sum);
}

// One tile of the gradient of a mask that all queries or all keys share: the sum of the gradients of all scores to which the
// mask's elements were added. Summing here costs two matmuls more than storing the gradients of all scores, but needs no memory
// for them.
template <class E>
struct MaskScratch : GradientScratch<E> {
  double* sum;  // [kKeys, kQueries]; in double, since the gradients of a row of scores cancel

  MaskScratch(const AttentionProblem& problem, ScratchAllocator& allocator) : GradientScratch<E>(problem, allocator) {
    sum = allocator.take<double>(kKeys * kQueries);
  }
};

template <class E>
void mask_gradient_tile(const AttentionProblem& problem, const AttentionGradients& gradients, int64_t mask_batch,
                        int64_t mask_head, int64_t first_tile, int64_t first_block, std::byte* scratch) {
  [[maybe_unused]] const AmxTiles registers;
  ScratchAllocator allocator(scratch);
  MaskScratch<E> tile(problem, allocator);
  const int64_t* size = gradients.mask_size;
  const bool sums_batches = size[0] == 1, sums_heads = size[1] == 1, sums_queries = size[2] == 1, sums_keys = size[3] == 1;
  std::fill_n(tile.sum, kKeys * kQueries, 0.0);

  const int64_t first_key = sums_keys ? 0 : first_block * kKeys,
                last_key = sums_keys ? problem.keys : std::min(problem.keys, first_key + kKeys);
  const int64_t first_query = sums_queries ? 0 : first_tile * kQueries,
                last_query = sums_queries ? problem.queries : std::min(problem.queries, first_query + kQueries);
  for (int64_t batch = sums_batches ? 0 : mask_batch; batch < (sums_batches ? problem.batch : mask_batch + 1); ++batch)
    for (int64_t head = sums_heads ? 0 : mask_head; head < (sums_heads ? problem.heads : mask_head + 1); ++head)
      for (int64_t first = first_query; first < last_query; first += kQueries) {
        const QueryTile query(problem, batch, head, first);
        bool is_loaded = false;
        const KeyRange range = keys_of_any(problem.visible, first, query.end(), problem.keys);
        for_each_key_block(range, first_key, last_key, first_key, [&](int64_t begin, int64_t count) {
          if (!is_loaded) load_queries(problem, gradients, query, tile);
          is_loaded = true;
          const auto key = key_rows_or_copy<E>(problem, batch, head, begin, count, tile.key_buffer),
                     value = value_rows_or_copy<E>(problem, batch, head, begin, count, tile.value_buffer);
          if (!compute_score_gradients(problem, query, begin, count, key, value, tile)) return;
          for (int64_t k = 0; k < count; ++k) {
            double* sum = tile.sum + (sums_keys ? 0 : (begin - first_key + k) * kQueries);
            for (int64_t i = 0; i < query.lanes; ++i) sum[i] += tile.grad[k * kQueries + i];
          }
        });
      }

  const MutableView4& to = gradients.grad_mask;
  const int64_t rows = last_query - first_query, columns = last_key - first_key;
  visit_floating<Float16, BFloat16>(gradients.grad_mask_dtype, [&]<class M>(Type<M>) {
    M* base = static_cast<M*>(to.data) + mask_batch * to.stride[0] + mask_head * to.stride[1] +
              first_tile * kQueries * to.stride[2] + first_block * kKeys * to.stride[3];
    for (int64_t i = 0; i < (sums_queries ? 1 : rows); ++i)
      for (int64_t k = 0; k < (sums_keys ? 1 : columns); ++k) {
        double sum = tile.sum[k * kQueries + i];
        if (sums_queries)
          for (int64_t lane = 1; lane < std::min(kQueries, rows); ++lane) sum += tile.sum[k * kQueries + lane];
        M& element = base[i * to.stride[2] + k * to.stride[3]];
        const auto before = gradients.add_to_grad_mask ? widen(element) : Accumulator<M>(0);
        element = narrow<M>(before + static_cast<Accumulator<M>>(sum));
      }
  });
}

// The gradients with room for row_max and row_log_sum, which have the layout of lse.
template <class E>
AttentionGradients take_row_statistics(const AttentionProblem& call, AttentionGradients gradients,
                                       ScratchAllocator& allocator) {
  if (!ScoreTile<E>::kMayUseDouble) return gradients;
  const int64_t rows = call.heads * (call.query_starts ? call.total_queries : call.batch * call.queries);
  gradients.row_max = allocator.take<double>(rows);
  gradients.row_log_sum = allocator.take<double>(rows);
  return gradients;
}

}  // namespace

Memory backward_memory(const AttentionProblem& call, const AttentionGradients& gradients) {
  ScratchAllocator backward(nullptr), mask(nullptr), shared(nullptr);
  visit_floating<Float16, BFloat16>(call.dtype, [&]<class E>(Type<E>) {
    BackwardScratch<E>(call, call.query_starts ? kMaxChunkKeys : chunk_of(call), backward);
    MaskScratch<E>(call, mask);
    DqAccumulator<E>(call, shared);
    MaskGradients<E>(call, gradients, shared);
    take_row_statistics<E>(call, gradients, shared);
    key_chunks(call, shared);
  });
  Memory memory{std::max(backward.bytes(), mask.bytes()), shared.bytes()};
#if defined(__AVX512BF16__)
  if (call.dtype == DType::kBFloat16) {
    const Memory other = avx512::backward_memory(call, gradients);
    memory = {std::max(memory.scratch, other.scratch), std::max(memory.shared, other.shared)};
  }
#endif
  return memory;
}

namespace {

// Computes the gradients of the chosen groups of heads. All are chosen where heads add to one mask's gradient.
template <class E>
void backward_heads(const AttentionProblem& call, const AttentionGradients& given, const Executor& executor,
                    HeadChoice& choice) {
  const int64_t groups = kv_groups(call), heads_per_group = call.heads / groups;
  const auto takes = [&](const SequenceProblem& sequence, int64_t group) {
    return choice.takes([&] {
      return has_tiny_gradients(sequence.problem, sequence.gradients_of(given), sequence.batch, group * heads_per_group,
                                heads_per_group);
    });
  };
  ScratchAllocator shared(executor.shared);
  const DqAccumulator<E> dq_accum(call, shared);
  const MaskGradients<E> mask(call, given, shared);
  const AttentionGradients gradients = take_row_statistics<E>(call, given, shared);
  const CpuTileList chunks = key_chunks(call, shared);
  const int64_t* mask_size = gradients.mask_size;
  for (int64_t i = 0; mask.accum && i < mask.planes() * mask.tiles * mask.chunks; ++i)
    mask.semaphore[i].store(0, std::memory_order_relaxed);

  const auto for_each_query_tile = [&](const auto& run) {
    for_each_item(executor, call.heads * dq_accum.tiles.total(), [&](int64_t item, std::byte* scratch) {
      const auto [index, head, tile] = dq_accum.tiles.tile(call.heads, item);
      const SequenceProblem sequence(call, index);
      run(item, sequence, QueryTile(sequence.problem, sequence.batch, head, tile * kQueries), scratch);
    });
  };
  for_each_query_tile([&](int64_t tile, const SequenceProblem& sequence, const QueryTile& query, std::byte* scratch) {
    dq_accum.semaphore[tile].store(0, std::memory_order_relaxed);
    if (choice.heads != Heads::kTiny || takes(sequence, query.head / heads_per_group))
      fill_delta<E>(sequence.problem, sequence.gradients_of(gradients), query, scratch);
  });
  // In interleaved order, items of one head, which add to the same queries, seldom run at the same time.
  for_each_item(executor, groups * chunks.total(), [&](int64_t item, std::byte* scratch) {
    const auto [index, group, chunk] = chunks.interleaved_tile(groups, item);
    const SequenceProblem sequence(call, index);
    if (!takes(sequence, group)) return;
    backward_chunk<E>(sequence, sequence.gradients_of(gradients), dq_accum, mask, group, chunk, scratch);
  });
  for_each_query_tile([&](int64_t tile, const SequenceProblem& sequence, const QueryTile& query, std::byte*) {
    if (choice.heads != Heads::kTiny || takes(sequence, query.head / heads_per_group))
      store_dq<E>(sequence.problem, sequence.gradients_of(gradients), dq_accum, tile, query);
  });
  if (gradients.grad_sinks)
    for_each_item(executor, call.batch * call.heads, [&](int64_t item, std::byte*) {
      const SequenceProblem sequence(call, item / call.heads);
      sink_gradient<Accumulator<E>>(sequence.problem, sequence.gradients_of(gradients), sequence.batch, item % call.heads);
    });
  if (call.query_starts)
    for_each_item(executor, call.batch + 1, [&](int64_t index, std::byte*) {
      const Rows queries = padding_rows(call.query_starts, call.batch, index, call.queries, call.total_queries);
      const Rows keys = padding_rows(call.key_starts, call.batch, index, call.keys, call.total_keys);
      zero_rows<E>(gradients.grad_query, call.heads, queries, call.head_dim);
      zero_rows<E>(gradients.grad_key, call.key_heads, keys, call.head_dim);
      zero_rows<E>(gradients.grad_value, call.value_heads, keys, call.head_dim_v);
    });
  if (mask.accum)
    for_each_item(executor, mask.planes() * mask.tiles, [&](int64_t item, std::byte*) {
      const int64_t plane = item / mask.tiles;
      mask.finish(QueryTile(call, plane / mask_size[1], plane % mask_size[1], item % mask.tiles * kQueries));
    });
  if (gradients.grad_mask.data && !mask.wanted) {
    const int64_t rows = mask_size[2] == 1 ? 1 : ceil_div(mask_size[2], kQueries),
                  blocks = mask_size[3] == 1 ? 1 : ceil_div(mask_size[3], kKeys);
    for_each_item(executor, mask_size[0] * mask_size[1] * rows * blocks, [&](int64_t item, std::byte* scratch) {
      const int64_t plane = item / (rows * blocks), element = item % (rows * blocks);
      mask_gradient_tile<E>(call, gradients, plane / mask_size[1], plane % mask_size[1], element / blocks, element % blocks,
                            scratch);
    });
  }
}

// Returns whether any group of heads has tiny gradients.
bool has_any_tiny_gradients(const AttentionProblem& call, const AttentionGradients& gradients) {
  for (int64_t n = 0; n < call.batch; ++n) {
    const SequenceProblem sequence(call, n);
    if (has_tiny_gradients(sequence.problem, sequence.gradients_of(gradients), sequence.batch, 0, call.heads)) return true;
  }
  return false;
}

}  // namespace

void backward(const AttentionProblem& call, const AttentionGradients& gradients, const Executor& executor) {
  visit_floating<Float16, BFloat16>(call.dtype, [&]<class E>(Type<E>) {
    HeadChoice choice;
    if constexpr (kLosesTinyProducts<E>) {
      if (gradients.grad_mask.data == nullptr)
        choice.heads = Heads::kOrdinary;
      else if (has_any_tiny_gradients(call, gradients))
        return avx512::backward_of_tiny_heads(call, gradients, executor);
    }
    backward_heads<E>(call, gradients, executor, choice);
    if constexpr (kLosesTinyProducts<E>)
      if (choice.left_out) avx512::backward_of_tiny_heads(call, gradients, executor);
  });
}

void backward_of_tiny_heads(const AttentionProblem& call, const AttentionGradients& gradients, const Executor& executor) {
  HeadChoice choice{.heads = gradients.grad_mask.data ? Heads::kAll : Heads::kTiny};
  backward_heads<BFloat16>(call, gradients, executor, choice);
}

}  // namespace flash_online::cpu::FLASH_ONLINE_ISA
