// Appends new keys and values to a cache on the CPU, rotated and quantised; rotates queries as well.
#include "../../core/cache.h"
#include "../kernels.h"
#include "work_items.h"

namespace flash_online::cpu::FLASH_ONLINE_ISA {
namespace {

// The cosine or sine of a pair of columns at a position.
template <class A>
A angle_of(const AppendProblem& problem, const void* table, int64_t position, int64_t pair) {
  const int64_t at = position * problem.rotary_stride[0] + pair * problem.rotary_stride[1];
  A value = 0;
  visit_floating<Float16, BFloat16>(problem.rotary_dtype,
                                    [&]<class R>(Type<R>) { value = static_cast<A>(widen(static_cast<const R*>(table)[at])); });
  return value;
}

// Calls store(column, x) for every column of a row, rotated to `position` where there are angles.
template <class E, class Store>
void for_each_rotated(const AppendProblem& problem, const E* row, int64_t stride, int64_t columns, bool rotates,
                      int64_t position, const Store& store) {
  using A = Accumulator<E>;
  const auto load = [&](int64_t column) { return static_cast<A>(widen(row[column * stride])); };
  int64_t rest = 0;
  if (rotates && problem.cosines) {
    position = clamp(position, 0, problem.positions - 1);
    for (int64_t pair = 0; pair < problem.pairs; ++pair) {
      const int64_t first = problem.interleaved ? 2 * pair : pair,
                    second = problem.interleaved ? 2 * pair + 1 : pair + problem.pairs;
      const A x = load(first), y = load(second), cosine = angle_of<A>(problem, problem.cosines, position, pair),
              sine = angle_of<A>(problem, problem.sines, position, pair);
      store(first, x * cosine - y * sine);
      store(second, x * sine + y * cosine);
    }
    rest = 2 * problem.pairs;
  }
  for (int64_t column = rest; column < columns; ++column) store(column, load(column));
}

// Writes one new row of type E, divided by `scale`, into the pool, which has elements of type C.
template <class E, class C>
void store_row(const AppendProblem& problem, const ConstView4& from, int64_t batch, int64_t head, int64_t index,
               const MutableView4& to, int64_t block, int64_t row, int64_t columns, bool is_key, int64_t position,
               float scale) {
  using A = Accumulator<E>;
  const auto source = matrix_of<const E>(from, batch, head, index);
  const auto target = matrix_of<C>(to, block, head, row);
  for_each_rotated<E>(problem, source.data, source.column_stride, columns, is_key, position, [&](int64_t column, A x) {
    target.data[column * target.column_stride] =
        narrow<C>(static_cast<Accumulator<C>>(scale == 1.0f ? x : x / static_cast<A>(scale)));
  });
}

// Stores the key and value of one new row in row `row` of a block. `sequence` selects the scales.
template <class E, class C>
void store_key_and_value(const AppendProblem& problem, int64_t batch, int64_t head, int64_t index, int64_t sequence,
                         int64_t block, int64_t row, int64_t position) {
  const CacheView& cache = problem.cache;
  store_row<E, C>(problem, problem.key, batch, head, index, problem.key_cache, block, row, problem.head_dim, true, position,
                  scale_of(cache.key_scale, cache.key_scale_stride, sequence, head));
  store_row<E, C>(problem, problem.value, batch, head, index, problem.value_cache, block, row, problem.head_dim_v, false,
                  position, scale_of(cache.value_scale, cache.value_scale_stride, sequence, head));
}

template <class E, class C>
void append_rows(const AppendProblem& problem, const Executor& executor) {
  const CacheView& cache = problem.cache;
  if (problem.slots) {
    for_each_item(executor, problem.rows, [&](int64_t index, std::byte*) {
      const int64_t slot = problem.slots[index];
      if (slot < 0 || slot >= cache.blocks * cache.page) return;
      const int64_t position = problem.offsets ? problem.offsets[index] : slot;
      for (int64_t head = 0; head < problem.heads; ++head)
        store_key_and_value<E, C>(problem, 0, head, index, index, slot / cache.page, slot % cache.page, position);
    });
    return;
  }
  for_each_item(executor, problem.batch * problem.heads, [&](int64_t item, std::byte*) {
    const int64_t n = item / problem.heads, head = item % problem.heads, old = old_keys(cache, n);
    const Rows rows =
        cache.new_starts ? packed_rows(cache.new_starts, n, cache.new_keys, problem.rows) : Rows{0, cache.new_keys};
    for (int64_t i = 0; i < rows.count && old + i < capacity_of(cache); ++i) {
      const int64_t place = old + i, block = block_of(cache, n, place / cache.page);
      if (block < 0) continue;
      const int64_t position = problem.offsets ? problem.offsets[n] + i : place;
      store_key_and_value<E, C>(problem, cache.new_starts ? 0 : n, head, rows.begin + i, n, block, place % cache.page,
                                position);
    }
  });
}

template <class E>
void rotate_queries(const AppendProblem& problem, const Executor& executor) {
  using A = Accumulator<E>;
  const auto rotate = [&](int64_t batch, int64_t head, int64_t index, int64_t position, bool rotates) {
    const auto from = matrix_of<const E>(problem.query, batch, head, index);
    const auto to = matrix_of<E>(problem.rotated, batch, head, index);
    for_each_rotated<E>(problem, from.data, from.column_stride, problem.head_dim, rotates, position,
                        [&](int64_t column, A x) { to.data[column * to.column_stride] = narrow<E>(x); });
  };
  if (problem.slots) {
    for_each_item(executor, problem.total_queries, [&](int64_t index, std::byte*) {
      for (int64_t head = 0; head < problem.query_heads; ++head)
        rotate(0, head, index, problem.offsets ? problem.offsets[index] : problem.slots[index], true);
    });
    return;
  }
  for_each_item(executor, problem.batch * problem.query_heads, [&](int64_t item, std::byte*) {
    const int64_t n = item / problem.query_heads, head = item % problem.query_heads;
    const int64_t first = problem.offsets ? problem.offsets[n] : old_keys(problem.cache, n);
    const bool packed = problem.query_starts;
    const Rows rows =
        packed ? packed_rows(problem.query_starts, n, problem.queries, problem.total_queries) : Rows{0, problem.queries};
    for (int64_t i = 0; i < rows.count; ++i)
      rotate(packed ? 0 : n, head, rows.begin + i, first + (problem.queries_advance ? i : 0), true);
  });
  if (!problem.query_starts) return;
  for_each_item(executor, problem.batch + 1, [&](int64_t n, std::byte*) {  // padding rows are copied without rotation
    const Rows rows = padding_rows(problem.query_starts, problem.batch, n, problem.queries, problem.total_queries);
    for (int64_t head = 0; head < problem.query_heads; ++head)
      for (int64_t i = 0; i < rows.count; ++i) rotate(0, head, rows.begin + i, 0, false);
  });
}

}  // namespace

void append(const AppendProblem& problem, const Executor& executor) {
  visit_floating<Float16, BFloat16>(problem.dtype, [&]<class E>(Type<E>) {
    if (problem.key.data) {
      if (problem.cache.dtype == DType::kFloat8E4M3)
        append_rows<E, Float8E4M3>(problem, executor);
      else if (problem.cache.dtype == DType::kFloat8E5M2)
        append_rows<E, Float8E5M2>(problem, executor);
      else
        append_rows<E, E>(problem, executor);
    }
    if (problem.query.data) rotate_queries<E>(problem, executor);
  });
}

}  // namespace flash_online::cpu::FLASH_ONLINE_ISA
