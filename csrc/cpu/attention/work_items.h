// The work items of attention: which sequence, head and tile an item computes, for dense and for packed calls.
#pragma once

#include <algorithm>

#include "../../core/sequence.h"
#include "score_tile.h"

namespace flash_online::cpu::FLASH_ONLINE_ISA {

// One sequence of a call, as the code of the tiles reads it. In a dense call `problem` is the call itself and `batch` an index
// into it; in a packed call `problem` is a dense problem of this sequence alone, and `batch` is 0.
struct SequenceProblem {
  AttentionProblem problem;
  int64_t index, batch;  // the index among the call's sequences, and in `problem`

  SequenceProblem(const AttentionProblem& call, int64_t index) : problem(call), index(index), batch(index) {
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
  AttentionGradients gradients_of(AttentionGradients gradients) const {
    skip_rows(gradients.grad_out, first_query_);
    skip_rows(gradients.grad_query, first_query_);
    skip_rows(gradients.grad_key, first_key_);
    skip_rows(gradients.grad_value, first_key_);
    skip(gradients.grad_lse, first_query_ * accumulator_size());
    skip(gradients.delta, first_query_ * accumulator_size());
    if (gradients.wide_delta) gradients.wide_delta += first_query_;
    if (gradients.row_max) gradients.row_max += first_query_, gradients.row_log_sum += first_query_;
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

// The numbering of all tiles of a call: the sequences are outermost, then come the heads, then the tiles of one head. How many
// tiles a head has depends on its sequence's length.
class TileList {
 public:
  struct WorkTile {
    int64_t sequence, head, tile;
  };

  // tiles(SequenceProblem) returns the tiles per head of a sequence. For packed calls the results are kept in a table of
  // scratch.
  template <class Tiles>
  TileList(const AttentionProblem& call, ScratchAllocator& allocator, const Tiles& tiles) : sequences_(call.batch) {
    if (!call.query_starts) {
      tiles_per_sequence_ = tiles(SequenceProblem(call, 0));
      total_ = sequences_ * tiles_per_sequence_;
      return;
    }
    first_tile_ = allocator.take<int64_t>(sequences_ + 1);
    for (int64_t n = 0; n < sequences_; ++n) {
      if (!allocator.only_counts()) first_tile_[n] = total_;
      total_ += tiles(SequenceProblem(call, n));
    }
    if (!allocator.only_counts()) first_tile_[sequences_] = total_;
  }

  // Tiles per head, summed over all sequences; and of one sequence.
  int64_t total() const { return total_; }
  int64_t tiles_per_head(int64_t sequence) const {
    return first_tile_ ? first_tile_[sequence + 1] - first_tile_[sequence] : tiles_per_sequence_;
  }

  int64_t index_of(int64_t heads, const WorkTile& work) const {
    return heads * tiles_before(work.sequence) + work.head * tiles_per_head(work.sequence) + work.tile;
  }
  // The tile of index `item`.
  WorkTile tile(int64_t heads, int64_t item) const {
    const int64_t sequence = sequence_at(item / heads), tiles = tiles_per_head(sequence),
                  index = item - heads * tiles_before(sequence);
    return {sequence, index / tiles, index % tiles};
  }
  // The tile of `item` in another order: neighbours belong to different heads, and to different sequences if all sequences have
  // one length. The tiles of one head still come in ascending order.
  WorkTile interleaved_tile(int64_t heads, int64_t item) const {
    if (!first_tile_) return {item / heads % sequences_, item % heads, item / heads / sequences_};
    const int64_t sequence = sequence_at(item / heads), index = item - heads * tiles_before(sequence);
    return {sequence, index % heads, index / heads};
  }

 private:
  int64_t sequences_, total_ = 0, tiles_per_sequence_ = 0;
  int64_t* first_tile_ = nullptr;  // packed: [sequences + 1], the tiles per head of all sequences before

  int64_t tiles_before(int64_t sequence) const { return first_tile_ ? first_tile_[sequence] : sequence * tiles_per_sequence_; }
  // The sequence to which a tile belongs; `tile` counts the tiles of one head through all sequences.
  int64_t sequence_at(int64_t tile) const {
    return first_tile_ ? std::upper_bound(first_tile_, first_tile_ + sequences_, tile) - first_tile_ - 1
                       : tile / tiles_per_sequence_;
  }
};

// The tiles of kQueries queries, and the blocks of kKeys keys.
inline TileList query_tiles(const AttentionProblem& call, ScratchAllocator& allocator) {
  return TileList(call, allocator,
                  [](const SequenceProblem& sequence) { return ceil_div(sequence.problem.queries, kQueries); });
}
inline TileList key_blocks(const AttentionProblem& call, ScratchAllocator& allocator) {
  return TileList(call, allocator, [](const SequenceProblem& sequence) { return ceil_div(sequence.problem.keys, kKeys); });
}

// Clears the results of padding rows, which no sequence of a packed call owns.
template <class E>
void zero_rows(const MutableView4& view, int64_t heads, Rows rows, int64_t head_dim) {
  for (int64_t head = 0; head < heads; ++head) {
    const auto to = matrix_of<E>(view, 0, head, rows.begin);
    for (int64_t i = 0; i < rows.count; ++i)
      for (int64_t e = 0; e < head_dim; ++e) to.data[i * to.row_stride + e * to.column_stride] = narrow<E>(Accumulator<E>(0));
  }
}

}  // namespace flash_online::cpu::FLASH_ONLINE_ISA
