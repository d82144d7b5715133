// Attention's work, cut into tiles: which sequence, head and tile an item is, for dense and for packed calls.
#pragma once

#include <algorithm>

#include "../../core/sequence.h"
#include "score_tile.h"

namespace flash_online::cpu::FLASH_ONLINE_ISA {

// A sequence as the tiles' code takes it: of a dense call the call itself and an index into its batch; of a packed call a
// dense problem of its own, with a batch of one.
struct OneSequence {
  AttentionProblem problem;
  int64_t index, batch;  // among the call's sequences, and in `problem`

  OneSequence(const AttentionProblem& call, int64_t index) : problem(call), index(index), batch(index) {
    if (!call.query_starts) return;
    const Sequence sequence = sequence_of(call, index);
    first_query_ = sequence.queries.begin, first_key_ = sequence.keys.begin;
    batch = 0;
    problem.batch = 1;
    problem.batch_begin = call.batch_begin + index;
    problem.queries = sequence.queries.count;
    problem.keys = sequence.keys.count;
    problem.visible = sequence.visible;
    problem.query_starts = problem.key_starts = nullptr;
    skip_rows(problem.query, first_query_);
    skip_rows(problem.key, first_key_);
    skip_rows(problem.value, first_key_);
    skip_rows(problem.out, first_query_);
    skip(problem.lse, first_query_ * accumulator_size());
    skip(problem.lse_low, first_query_ * accumulator_size());
    skip(problem.alibi_slopes, index * call.alibi_stride[0] * accumulator_size());
  }

  // The gradients that belong to `problem`.
  AttentionGradients of(AttentionGradients gradients) const {
    skip_rows(gradients.grad_out, first_query_);
    skip_rows(gradients.grad_query, first_query_);
    skip_rows(gradients.grad_key, first_key_);
    skip_rows(gradients.grad_value, first_key_);
    skip(gradients.grad_lse, first_query_ * accumulator_size());
    skip(gradients.delta, first_query_ * accumulator_size());
    if (gradients.wide_delta) gradients.wide_delta += first_query_;
    skip(gradients.grad_sinks, (index - batch) * problem.heads * accumulator_size());
    return gradients;
  }

 private:
  int64_t first_query_ = 0, first_key_ = 0;

  int64_t accumulator_size() const { return problem.dtype == DType::kFloat64 ? 8 : 4; }
  template <class Void>
  static void skip(Void*& pointer, int64_t bytes) {
    using Byte = std::conditional_t<std::is_const_v<Void>, const std::byte, std::byte>;
    if (pointer) pointer = static_cast<Byte*>(pointer) + bytes;
  }
  template <class Pointer>
  void skip_rows(View4<Pointer>& view, int64_t rows) const {
    skip(view.data, rows * view.stride[2] * size_of(problem.dtype));
  }
};

// How a length of each sequence is cut into tiles, and the numbers of the tiles: sequences outside, then heads, then tiles.
class Schedule {
 public:
  struct Place {
    int64_t sequence, head, tile;
  };

  // tiles(OneSequence) is how many a head of the sequence has. Packed: a table, in memory of the carver.
  template <class Tiles>
  Schedule(const AttentionProblem& call, Carver& carver, const Tiles& tiles) : sequences_(call.batch) {
    if (!call.query_starts) {
      each_ = tiles(OneSequence(call, 0));
      total_ = sequences_ * each_;
      return;
    }
    first_ = carver.take<int64_t>(sequences_ + 1);
    for (int64_t n = 0; n < sequences_; ++n) {
      if (!carver.counts()) first_[n] = total_;
      total_ += tiles(OneSequence(call, n));
    }
    if (!carver.counts()) first_[sequences_] = total_;
  }

  // Tiles of a head of all sequences, and of one.
  int64_t total() const { return total_; }
  int64_t of(int64_t sequence) const { return first_ ? first_[sequence + 1] - first_[sequence] : each_; }

  int64_t number(int64_t heads, const Place& place) const {
    return heads * before(place.sequence) + place.head * of(place.sequence) + place.tile;
  }
  // The place of number `item`.
  Place find(int64_t heads, int64_t item) const {
    const int64_t sequence = sequence_at(item / heads), tiles = of(sequence), rest = item - heads * before(sequence);
    return {sequence, rest / tiles, rest % tiles};
  }
  // The place of `item` in another order, where neighbours are of different heads, and of different sequences if all are of one
  // length; the tiles of a head still come in their order.
  Place find_scattered(int64_t heads, int64_t item) const {
    if (!first_) return {item / heads % sequences_, item % heads, item / heads / sequences_};
    const int64_t sequence = sequence_at(item / heads), rest = item - heads * before(sequence);
    return {sequence, rest % heads, rest / heads};
  }

 private:
  int64_t sequences_, total_ = 0, each_ = 0;
  int64_t* first_ = nullptr;  // [sequences + 1], packed: tiles of the sequences before

  int64_t before(int64_t sequence) const { return first_ ? first_[sequence] : sequence * each_; }
  // The sequence of a head's tile.
  int64_t sequence_at(int64_t tile) const {
    return first_ ? std::upper_bound(first_, first_ + sequences_, tile) - first_ - 1 : tile / each_;
  }
};

// Tiles of kQueries queries and blocks of kKeys keys.
inline Schedule query_tiles(const AttentionProblem& call, Carver& carver) {
  return Schedule(call, carver, [](const OneSequence& sequence) { return tiles_of(sequence.problem.queries, kQueries); });
}
inline Schedule key_blocks(const AttentionProblem& call, Carver& carver) {
  return Schedule(call, carver, [](const OneSequence& sequence) { return tiles_of(sequence.problem.keys, kKeys); });
}

// Results for rows that belong to no sequence of a packed call.
template <class E>
void zero_rows(const MutableView4& view, int64_t heads, Rows rows, int64_t width) {
  for (int64_t head = 0; head < heads; ++head) {
    const auto to = matrix_of<E>(view, 0, head, rows.begin);
    for (int64_t i = 0; i < rows.count; ++i)
      for (int64_t e = 0; e < width; ++e) to.data[i * to.row_stride + e * to.column_stride] = narrow<E>(Accumulator<E>(0));
  }
}

}  // namespace flash_online::cpu::FLASH_ONLINE_ISA
