// The work items of attention: an item's sequence, head and tile, for dense and packed calls; the sums of an item; heads of
// tiny numbers.
#pragma once

#include <algorithm>
#include <atomic>
#include <cmath>

#include "../../core/sequence.h"
#include "score_tile.h"

namespace flash_online::cpu {
// For heads that products of bfloat16 lose (see kLosesTinyProducts); used by instruction sets with such products.
namespace avx512 {
Memory forward_memory_of_tiny_heads(const AttentionProblem& problem);
void forward_of_tiny_heads(const AttentionProblem& problem, const Executor& executor);
Memory backward_memory(const AttentionProblem& problem, const AttentionGradients& gradients);
void backward_of_tiny_heads(const AttentionProblem& problem, const AttentionGradients& gradients, const Executor& executor);
}  // namespace avx512
}  // namespace flash_online::cpu

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
    if (problem.max_logit) problem.max_logit += index * call.heads;
    if (problem.query_spans.data) problem.query_spans.data += first_query_ * problem.query_spans.stride[2];
    if (problem.key_spans.data) problem.key_spans.data += first_key_ * problem.key_spans.stride[2];
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

// The numbering of all tiles of a call: the sequences are outermost, then come the heads, then the tiles of one head. The
// number of tiles per head depends on the sequence's length.
class CpuTileList {
 public:
  struct CpuWorkTile {
    int64_t sequence, head, tile;
  };

  // tiles(SequenceProblem) returns the tiles per head of a sequence. For packed calls the results are kept in a table of
  // scratch.
  template <class Tiles>
  CpuTileList(const AttentionProblem& call, ScratchAllocator& allocator, const Tiles& tiles) : sequences_(call.batch) {
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

  int64_t index_of(int64_t heads, const CpuWorkTile& work) const {
    return heads * tiles_before(work.sequence) + work.head * tiles_per_head(work.sequence) + work.tile;
  }
  // The tile of index `item`.
  CpuWorkTile tile(int64_t heads, int64_t item) const {
    const int64_t sequence = sequence_at(item / heads), tiles = tiles_per_head(sequence),
                  index = item - heads * tiles_before(sequence);
    return {sequence, index / tiles, index % tiles};
  }
  // The tile of `item` in another order: neighbours belong to different heads, and to different sequences if all sequences have
  // one length. The tiles of one head still come in ascending order.
  CpuWorkTile interleaved_tile(int64_t heads, int64_t item) const {
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
inline CpuTileList query_tiles(const AttentionProblem& call, ScratchAllocator& allocator) {
  return CpuTileList(call, allocator,
                     [](const SequenceProblem& sequence) { return ceil_div(sequence.problem.queries, kQueries); });
}
inline CpuTileList key_blocks(const AttentionProblem& call, ScratchAllocator& allocator) {
  return CpuTileList(call, allocator, [](const SequenceProblem& sequence) { return ceil_div(sequence.problem.keys, kKeys); });
}

// A long sum of floats loses digits, and stops growing where a term is less than its last digit. The sums over a row's keys are
// therefore sums of partial sums; the rounding errors of adding these are kept in a number below the sum's last digit.
template <class V>
FLASH_ONLINE_INLINE void add_partial(V& sum, V& low, V partial) {
  const V total = sum + partial, difference = total - sum;  // two-sum (Knuth)
  V rest = low + ((sum - (total - difference)) + (partial - difference));
  rest = rest - rest == 0 ? rest : V{};  // the sum is not finite
  sum = total + rest;
  low = rest - (sum - total);
}
template <class T>
void add_partials(T* sum, T* low, const T* partial, int64_t count) {
  for (int64_t i = 0; i < count; i += kLanes<T>) {
    Vector<T> to = load_vector(sum + i), to_low = load_vector(low + i);
    add_partial(to, to_low, load_vector(partial + i));
    store_vector(sum + i, to);
    store_vector(low + i, to_low);
  }
}
// Writes sum + low; an infinite sum stays infinite.
template <class T>
void join_partials(const T* sum, const T* low, T* to, int64_t count) {
  for (int64_t i = 0; i < count; i += kLanes<T>) {
    const Vector<T> x = load_vector(low + i);
    store_vector(to + i, load_vector(sum + i) + (x - x == 0 ? x : Vector<T>{}));
  }
}

// Clears the results of padding rows of a packed call.
template <class E>
void zero_rows(const MutableView4& view, int64_t heads, Rows rows, int64_t head_dim) {
  for (int64_t head = 0; head < heads; ++head) {
    const auto to = matrix_of<E>(view, 0, head, rows.begin);
    for (int64_t i = 0; i < rows.count; ++i)
      for (int64_t e = 0; e < head_dim; ++e) to.data[i * to.row_stride + e * to.column_stride] = narrow<E>(Accumulator<E>(0));
  }
}

// Heads with inputs so small that products of bfloat16 lose them. The instructions that multiply pairs of bfloat16 take
// subnormal numbers for 0 and round subnormal sums to 0, under 2^-126. That is negligible next to numbers of ordinary size, but
// not if a whole head is that small. Only such heads are left to the kernels of avx512, which multiply floats.

// True if products of elements of type E lose small numbers.
template <class E>
constexpr bool kLosesTinyProducts = kBf16Digits<Operand<E>> == 1;

// The binary exponent of the largest element of a matrix, or of the first element of ordinary size, where the search ends; 0 if
// all are 0.
inline int exponent_of_largest(Matrix<const BFloat16> from, int64_t rows, int64_t columns) {
  constexpr uint16_t kOrdinary = (127 - 28) << 7;  // 2^-28: the product of three such numbers is not tiny
  uint16_t largest = 0;
  for (int64_t r = 0; r < rows && largest < kOrdinary; ++r) {
    const BFloat16* row = from.data + r * from.row_stride;
    for (int64_t c = 0; c < columns; ++c) {
      const uint16_t magnitude = row[c * from.column_stride].bits & 0x7fffu;
      largest = magnitude > largest ? magnitude : largest;
    }
  }
  return largest == 0 ? 0 : std::ilogb(widen(BFloat16{largest}));
}

// Far enough above 2^-126 for a sum's terms to be a share of it.
constexpr int kTinyExponent = -90;

// Returns whether the results of a query head are lost.
inline bool is_tiny(const AttentionProblem& problem, int64_t batch, int64_t head) {
  const auto exponent = [&](const ConstView4& view, int64_t heads, int64_t rows, int64_t columns) {
    return exponent_of_largest(matrix_of<const BFloat16>(view, batch, head / (problem.heads / heads), 0), rows, columns);
  };
  return exponent(problem.query, problem.heads, problem.queries, problem.head_dim) < kTinyExponent ||
         exponent(problem.key, problem.key_heads, problem.keys, problem.head_dim) < kTinyExponent ||
         exponent(problem.value, problem.value_heads, problem.keys, problem.head_dim_v) < kTinyExponent;
}

// Returns whether the gradients of heads [first, first + count) are lost; these are products of up to three of the inputs.
inline bool has_tiny_gradients(const AttentionProblem& problem, const AttentionGradients& gradients, int64_t batch,
                               int64_t first, int64_t count) {
  for (int64_t head = first; head < first + count; ++head) {
    const auto exponent = [&](const ConstView4& view, int64_t heads, int64_t rows, int64_t columns) {
      return exponent_of_largest(matrix_of<const BFloat16>(view, batch, head / (problem.heads / heads), 0), rows, columns);
    };
    const int query = exponent(problem.query, problem.heads, problem.queries, problem.head_dim),
              key = exponent(problem.key, problem.key_heads, problem.keys, problem.head_dim),
              value = exponent(problem.value, problem.value_heads, problem.keys, problem.head_dim_v),
              grad_out = exponent(gradients.grad_out, problem.heads, problem.queries, problem.head_dim_v);
    const int grad_score = value + grad_out;
    for (const int product : {query, key, value, grad_out, grad_score, grad_score + query, grad_score + key})
      if (product < kTinyExponent) return true;
  }
  return false;
}

// The heads of a call that a pass computes; left_out records that it skipped some.
enum class Heads { kAll, kOrdinary, kTiny };
struct HeadChoice {
  Heads heads = Heads::kAll;
  std::atomic<bool> left_out = false;

  template <class IsTiny>
  bool takes(const IsTiny& is_tiny) {
    if (heads == Heads::kAll || is_tiny() == (heads == Heads::kTiny)) return true;
    left_out.store(true, std::memory_order_relaxed);
    return false;
  }
};

}  // namespace flash_online::cpu::FLASH_ONLINE_ISA
