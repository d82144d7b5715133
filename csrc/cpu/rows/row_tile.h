// The row kernels read and write a tensor in tiles of rows, one chunk of classes of a tile at a time. Where the classes of a
// row are contiguous, kernels work on the tensor's own memory; elsewhere on a chunk copied to a buffer.
//
// Every row is cut into the same chunks and segments and summed in the same order. Its result therefore depends on its elements
// alone: not on strides, on other rows, on the number of threads, or on how many threads share the row.
#pragma once

#include <new>

#include "../../core/row_problem.h"
#include "../../core/visit.h"
#include "../executor.h"
#include "row_weights.h"

namespace flash_online::cpu::FLASH_ONLINE_ISA {

constexpr int64_t kChunk = 2048;  // classes that share one maximum
constexpr int64_t kSegment = 8 * kChunk;  // classes of a long row that one thread takes at a time
constexpr int64_t kMaxTileRows = 32;
constexpr int64_t kCacheLineBytes = 64;
constexpr int64_t kMaxStoredWeightBytes = 640 * 1024;  // stored between the passes: a third of a large L2 cache
constexpr int64_t kMaxPrefetchedRowBytes = 1024 * 1024;  // the longest row of results that is worth prefetching
constexpr int64_t kMaxSharedRows = 64;  // with more rows, all threads are busy without sharing a row

// `rows` neighbouring rows: along inner, or along outer where inner is 1.
struct RowTile {
  int64_t outer, inner;  // coordinates of the first row
  int64_t first_row;  // the index of the first row, outer * problem.inner + inner
  int64_t rows;
};

template <class Pointer>
FLASH_ONLINE_INLINE int64_t row_stride(const RowProblem& problem, const View3<Pointer>& view) {
  return problem.inner == 1 ? view.stride[0] : view.stride[2];
}

// Returns whether the classes of a row are contiguous.
template <class Pointer>
FLASH_ONLINE_INLINE bool has_contiguous_classes(const RowProblem& problem, const View3<Pointer>& view) {
  return view.stride[1] == 1 || problem.classes == 1;
}

// The pitch of the rows of a buffer: whole vectors plus kPitchExtra, so that it is no power of two, which would map all rows to
// one cache set.
constexpr int64_t kPitchExtra = 48;
FLASH_ONLINE_INLINE int64_t buffer_pitch(const RowProblem& problem) {
  return (problem.classes < kChunk ? padded(problem.classes) : kChunk) + kPitchExtra;
}

// A tile's rows of one tensor, a chunk of classes at a time.
template <class E, class Pointer>
class Chunks {
  using Element = std::conditional_t<std::is_const_v<std::remove_pointer_t<Pointer>>, const E, E>;

 public:
  Chunks(const RowProblem& problem, const View3<Pointer>& view, const RowTile& tile, ScratchAllocator& allocator)
      : data_(static_cast<Element*>(view.data) + tile.outer * view.stride[0] + tile.inner * view.stride[2]),
        row_stride_(row_stride(problem, view)),
        class_stride_(view.stride[1]),
        rows_(tile.rows),
        contiguous_(view.data == nullptr || has_contiguous_classes(problem, view)),
        prefetchable_(problem.classes * static_cast<int64_t>(sizeof(E)) <= kMaxPrefetchedRowBytes) {
    if (contiguous_) return;
    pitch_ = buffer_pitch(problem);
    buffer_ = allocator.take<E>(rows_ * pitch_);
  }

  // Makes classes [begin, begin + count) readable, unless they are.
  FLASH_ONLINE_INLINE void read(int64_t begin, int64_t count) {
    if (!contiguous_ && begin != current_) gather(begin, count);
    current_ = begin;
  }
  // Announces that the classes from `begin` on will be written to row(r).
  FLASH_ONLINE_INLINE void begin_write(int64_t begin) { current_ = begin; }
  FLASH_ONLINE_INLINE bool is_contiguous() const { return contiguous_; }
  // Row r from the first class of the current chunk on.
  FLASH_ONLINE_INLINE Element* row(int64_t r) const {
    return contiguous_ ? data_ + r * row_stride_ + current_ : buffer_ + r * pitch_;
  }
  // The address of row r's results from class `begin` on; null if the row is strided or too long to stay in the cache.
  FLASH_ONLINE_INLINE PrefetchTarget prefetch_target(int64_t r, int64_t begin) const {
    if (!contiguous_ || !prefetchable_) return {};
    return {reinterpret_cast<char*>(data_ + r * row_stride_ + begin), sizeof(E)};
  }
  // Prefetches row r's share of the cache lines to which `count` classes will be written, if the rows are adjacent.
  FLASH_ONLINE_INLINE void prefetch_strided_share(int64_t r, int64_t begin, int64_t count) const {
    if (contiguous_ || row_stride_ != 1) return;
    const int64_t share = ceil_div(count, rows_), end = (r + 1) * share < count ? (r + 1) * share : count;
    for (int64_t c = r * share; c < end; ++c) __builtin_prefetch(data_ + (begin + c) * class_stride_ + rows_ / 2, 1, 2);
  }
  // Moves `count` classes, now written to row(r), to the tensor.
  FLASH_ONLINE_INLINE void finish_write(int64_t count) {
    if (!contiguous_) scatter(count);
  }

 private:
  __attribute__((noinline)) void gather(int64_t begin, int64_t count) {
    const Element* from = data_ + begin * class_stride_;
    if (row_stride_ == 1) return transpose(from, class_stride_, count, rows_, buffer_, pitch_);
    for (int64_t c = 0; c < count; ++c)
      for (int64_t r = 0; r < rows_; ++r) buffer_[r * pitch_ + c] = from[r * row_stride_ + c * class_stride_];
  }
  __attribute__((noinline)) void scatter(int64_t count) {
    Element* to = data_ + current_ * class_stride_;
    if (row_stride_ == 1) return transpose(buffer_, pitch_, rows_, count, to, class_stride_);
    for (int64_t c = 0; c < count; ++c)
      for (int64_t r = 0; r < rows_; ++r) to[r * row_stride_ + c * class_stride_] = buffer_[r * pitch_ + c];
  }

  Element* data_;
  int64_t row_stride_, class_stride_, rows_;
  bool contiguous_, prefetchable_;
  E* buffer_ = nullptr;
  int64_t pitch_ = 0, current_ = -1;
};

// One element of row r of a tile.
template <class E, class Pointer>
FLASH_ONLINE_INLINE auto& element_of(const RowProblem& problem, const View3<Pointer>& view, const RowTile& tile, int64_t r,
                                     int64_t c) {
  using Element = std::conditional_t<std::is_const_v<std::remove_pointer_t<Pointer>>, const E, E>;
  return static_cast<Element*>(view.data)[tile.outer * view.stride[0] + tile.inner * view.stride[2] +
                                          r * row_stride(problem, view) + c * view.stride[1]];
}

// Calls body(begin, count) for every chunk of classes [begin, end).
template <class Body>
FLASH_ONLINE_INLINE void for_each_chunk(int64_t begin, int64_t end, const Body& body) {
  for (; begin < end; begin += kChunk) body(begin, end - begin < kChunk ? end - begin : kChunk);
}

// The maximum and the sum of a row or of a part of it.
template <class T>
using RowState = OnlineSoftmax<T, FastNatural, double>;

// Merges two states, but copies `other` where `state` is empty: merging would change no bit.
template <class T>
FLASH_ONLINE_INLINE void merge_states(RowState<T>& state, const RowState<T>& other) {
  if (state.max == lowest<double>() && state.sum == T(0))
    state = other;
  else
    state.merge(other);
}

// The number of weights of `rows` rows, each row padded to whole pairs of the widest instruction set; and whether they fit into
// the memory for stored weights.
FLASH_ONLINE_INLINE int64_t stored_weight_count(const RowProblem& problem, int64_t rows) {
  return rows * round_up(problem.classes, 32);
}
FLASH_ONLINE_INLINE bool can_store_weights(const RowProblem& problem, int64_t rows) {
  return stored_weight_count(problem, rows) * (problem.dtype == DType::kFloat64 ? 8 : 4) <= kMaxStoredWeightBytes;
}

// Returns the sum of a chunk's weights and, if kKeep is set, stores the weights pair by pair.
template <bool kKeep, class E, class W>
__attribute__((noinline)) Accumulator<E> exp_scores_of_chunk(const E* x, int64_t count, const W& weight, Accumulator<E>* keep,
                                                             PrefetchTarget prefetch_target) {
  return exp_scores<kKeep>(x, count, weight, keep, prefetch_target);
}

// The weights of a tile's rows, which are added up in the first pass and written, times a factor, in the second. If there is
// room to store them, they are computed once.
template <class E, ExpAccuracy accuracy>
class RowWeights {
 public:
  using T = Accumulator<E>;

  RowWeights(const RowProblem& problem, const RowTile& tile, ScratchAllocator& allocator, bool keep)
      : input_(problem, problem.input, tile, allocator), rows_(tile.rows) {
    if (!keep) return;
    pitch_ = stored_weight_count(problem, 1);
    chunks_ = ceil_div(problem.classes, kChunk);
    stored_ = allocator.take<T>(rows_ * pitch_);
    max_ = allocator.take<double>(rows_ * chunks_);
  }

  // Adds classes [begin, end) of each row to its state(r). chunk_hook(r, x, begin, count, max, sum) is called for each chunk.
  // `result` is the output to prefetch for the second pass.
  template <class State, class Hook, class Result>
  FLASH_ONLINE_INLINE void absorb(int64_t begin, int64_t end, const State& state, const Hook& chunk_hook,
                                  const Result& result) {
    RowState<T> segment[kMaxTileRows];
    for_each_chunk(begin, end, [&](int64_t first, int64_t count) {
      input_.read(first, count);
      for (int64_t r = 0; r < rows_; ++r) {
        const E* x = input_.row(r);
        result.prefetch_strided_share(r, first, count);
        with_score_exp<accuracy>(x, count, [&](const auto& weight) {
          RowState<T> chunk{.max = weight.max};
          if (stored_ != nullptr) {
            max_[r * chunks_ + first / kChunk] = weight.max;
            chunk.sum =
                exp_scores_of_chunk<true>(x, count, weight, stored_ + r * pitch_ + first, result.prefetch_target(r, first));
          } else {
            chunk.sum =
                exp_scores_of_chunk<false>(x, count, weight, static_cast<T*>(nullptr), result.prefetch_target(r, first));
          }
          merge_states(segment[r], chunk);
          chunk_hook(r, x, first, count, weight.max, chunk.sum);
        });
      }
    });
    for (int64_t r = 0; r < rows_; ++r) merge_states(state(r), segment[r]);
  }

  // Calls emit(r, begin, count, f) for every chunk of classes [begin, end) of each row; f(i, n) returns a pair of weights from
  // class begin + i on, measured from the maximum of state(r) and multiplied by factor(r).
  template <class State, class Factor, class Start, class Emit, class Finish>
  FLASH_ONLINE_INLINE void write(int64_t begin, int64_t end, const State& state, const Factor& factor, const Start& start,
                                 const Emit& emit, const Finish& finish) {
    for_each_chunk(begin, end, [&](int64_t first, int64_t count) {
      if (stored_ == nullptr) input_.read(first, count);
      start(first);
      for (int64_t r = 0; r < rows_; ++r) {
        const RowState<T>& row = state(r);
        const auto scale_from = [&](double max) {
          return broadcast(max == row.max ? factor(r) : RowState<T>::rescale(max, row.max) * factor(r));
        };
        if (stored_ != nullptr) {
          const T* stored = stored_ + r * pitch_ + first;
          const Vector<T> scale = scale_from(max_[r * chunks_ + first / kChunk]);
          emit(r, first, count, [=](int64_t i, int64_t) __attribute__((always_inline)) {
            return Pair<T>{load_vector(stored + i) * scale, load_vector(stored + i + kLanes<T>) * scale};
          });
        } else {
          const E* x = input_.row(r);
          with_score_exp<accuracy>(x, count, [&](const auto& weight) {
            const Vector<T> scale = scale_from(weight.max);
            emit(r, first, count, [=](int64_t i, int64_t n) __attribute__((always_inline)) {
              const Pair<T> pair = load_partial(x + i, n, lowest<T>());
              return Pair<T>{weight(pair.a) * scale, weight(pair.b) * scale};
            });
          });
        }
      }
      finish(count);
    });
  }

  Chunks<E, const void*>& input() { return input_; }

 private:
  Chunks<E, const void*> input_;
  int64_t rows_, pitch_ = 0, chunks_ = 0;
  T* stored_ = nullptr;
  double* max_ = nullptr;
};

// Arguments of RowWeights::absorb for callers without a hook or without an output.
constexpr auto no_chunk_hook = [](auto&&...) {};
struct NoResult {
  static PrefetchTarget prefetch_target(int64_t, int64_t) { return {}; }
  static void prefetch_strided_share(int64_t, int64_t, int64_t) {}
};

// A row kernel is a class Op(problem, tile, allocator, keep, shared...), constructed for a tile or for a segment of one row.
// first_pass(begin, end, partials) adds classes to the partial of each row; merge() joins two partials of a row;
// finish() sees the partials of whole rows; second_pass() writes classes of the result. RowOp has the defaults of most kernels.
struct RowOp {
  static constexpr bool kHasSecondPass = false;
  static int64_t extra_bytes(const RowProblem&) { return 0; }  // extra bytes per Partial, for assign_extra()
  template <class Partial>
  static void assign_extra(const RowProblem&, Partial&, std::byte*) {}
};

constexpr int64_t kPartialBytes = 64;  // the largest Partial of all kernels

// The division of a problem's rows into tiles.
struct RowPartition {
  int64_t groups, rows_per_group, rows_per_tile, segments;  // neighbouring rows form groups; a tile is in one group
  explicit RowPartition(const RowProblem& problem, int64_t workers)
      : groups(problem.inner == 1 ? 1 : problem.outer),
        rows_per_group(problem.inner == 1 ? problem.outer : problem.inner),
        segments(ceil_div(problem.classes, kSegment)) {
    // A tile has several rows if rows are adjacent in memory, so that they share cache lines, or short, so that handing out
    // tiles costs little.
    const ConstView3& view = problem.input.data != nullptr ? problem.input : problem.grad;
    const bool side_by_side = !has_contiguous_classes(problem, view) && view.stride[1] > row_stride(problem, view);
    rows_per_tile =
        side_by_side || problem.classes == 0 ? kCacheLineBytes / size_of(problem.dtype) : 2 * kChunk / problem.classes;
    rows_per_tile = rows_per_tile < 1 ? 1 : rows_per_tile > kMaxTileRows ? kMaxTileRows : rows_per_tile;
    while (rows_per_tile > 1 &&
           (rows_per_tile > rows_per_group || rows_per_tile * workers > total() || rows_per_tile * problem.k > kChunk))
      rows_per_tile /= 2;
  }
  int64_t total() const { return groups * rows_per_group; }
};

FLASH_ONLINE_INLINE bool may_share_rows(const RowProblem& problem, const RowPartition& partition) {
  return partition.segments > 1 && partition.total() <= kMaxSharedRows && problem.k <= kMaxSharedRows;
}

// Returns whether several threads share a row.
FLASH_ONLINE_INLINE bool shares_rows(const RowProblem& problem, const RowPartition& partition, int64_t workers) {
  return partition.total() < 2 * workers && may_share_rows(problem, partition);
}

// Bytes at the start of every worker's scratch. The first worker's hold the partials of rows that several threads share.
FLASH_ONLINE_INLINE int64_t shared_row_scratch_bytes(const RowProblem& problem, int64_t storage) {
  const RowPartition partition(problem, 1);
  return may_share_rows(problem, partition) ? partition.total() * partition.segments * (kPartialBytes + storage) : 0;
}

// Runs a kernel over all rows in parallel: over tiles of rows or, if there are few rows and they are long, over segments of
// rows.
template <class Op, class... Shared>
FLASH_ONLINE_INLINE void run_rows(const RowProblem& problem, const Executor& executor, const Shared&... shared) {
  using Partial = typename Op::Partial;
  static_assert(sizeof(Partial) <= kPartialBytes);
  const RowPartition partition(problem, executor.workers);
  const int64_t storage = Op::extra_bytes(problem), shared_row_bytes = shared_row_scratch_bytes(problem, storage);

  if (shares_rows(problem, partition, executor.workers)) {
    const auto partial = [&](int64_t segment) -> Partial& {
      return *reinterpret_cast<Partial*>(executor.scratch + segment * (kPartialBytes + storage));
    };
    const auto op_for = [&](int64_t row, std::byte* scratch) {
      ScratchAllocator allocator(scratch + shared_row_bytes);
      return Op(problem, RowTile{row / problem.inner, row % problem.inner, row, 1}, allocator, false, shared...);
    };
    const auto for_each_segment = [&](const auto& body) {
      for_each_independent_item(executor, partition.total() * partition.segments, [&](int64_t segment, std::byte* scratch) {
        const int64_t row = segment / partition.segments, begin = segment % partition.segments * kSegment;
        const int64_t end = begin + kSegment < problem.classes ? begin + kSegment : problem.classes;
        Op op = op_for(row, scratch);
        body(op, segment, begin, end);
      });
    };
    for_each_segment([&](Op& op, int64_t segment, int64_t begin, int64_t end) {
      Partial& joined = *new (&partial(segment)) Partial();
      Op::assign_extra(problem, joined, reinterpret_cast<std::byte*>(&joined) + kPartialBytes);
      op.first_pass(begin, end, &joined);
    });
    for (int64_t row = 0; row < partition.total(); ++row) {
      Partial& joined = partial(row * partition.segments);
      for (int64_t s = 1; s < partition.segments; ++s) Op::merge(joined, partial(row * partition.segments + s));
      op_for(row, executor.scratch).finish(&joined);
    }
    if constexpr (Op::kHasSecondPass)
      for_each_segment([&](Op& op, int64_t segment, int64_t begin, int64_t end) {
        op.second_pass(begin, end, &partial(segment / partition.segments * partition.segments));
      });
    return;
  }

  const int64_t tiles_per_group = ceil_div(partition.rows_per_group, partition.rows_per_tile),
                tiles = partition.groups * tiles_per_group;
  const int64_t tile_size = partition.rows_per_tile * (problem.classes > 0 ? problem.classes : 1);
  const int64_t grain = row_grain(problem), tiles_per_item = tile_size < grain ? grain / tile_size : 1;
  const bool keep = can_store_weights(problem, partition.rows_per_tile);
  for_each_independent_item(executor, ceil_div(tiles, tiles_per_item), [&](int64_t item, std::byte* scratch) {
    const int64_t first = item * tiles_per_item, last = first + tiles_per_item < tiles ? first + tiles_per_item : tiles;
    for (int64_t t = first; t < last; ++t) {
      const int64_t group = t / tiles_per_group, row = t % tiles_per_group * partition.rows_per_tile,
                    left = partition.rows_per_group - row;
      RowTile tile{group, row, group * partition.rows_per_group + row,
                   left < partition.rows_per_tile ? left : partition.rows_per_tile};
      if (problem.inner == 1) tile.outer = row, tile.inner = 0;
      ScratchAllocator allocator(scratch + shared_row_bytes);
      Partial partial[kMaxTileRows];
      if (storage > 0)
        for (int64_t r = 0; r < tile.rows; ++r) Op::assign_extra(problem, partial[r], allocator.take<std::byte>(storage));
      Op op(problem, tile, allocator, keep, shared...);
      for (int64_t begin = 0; begin < problem.classes; begin += kSegment)
        op.first_pass(begin, begin + kSegment < problem.classes ? begin + kSegment : problem.classes, partial);
      op.finish(partial);
      if constexpr (Op::kHasSecondPass) op.second_pass(0, problem.classes, partial);
    }
  });
}

// Calls f(E{}, R{}) with the element types of a problem and of its result: R is E or, if E has 16 bits, float.
template <class F>
FLASH_ONLINE_INLINE void visit_row_types(const RowProblem& problem, const F& f) {
  visit_floating<Float16, BFloat16>(problem.dtype, [&](auto type) {
    using E = typename decltype(type)::type;
    if constexpr (sizeof(E) == 2) {
      if (problem.result_dtype == DType::kFloat32) return f(E{}, float{});
    }
    f(E{}, E{});
  });
}

// Reports a row with a target or index out of range. The lowest row is kept, whatever the order of the threads.
FLASH_ONLINE_INLINE void report_bad_row(const RowProblem& problem, int64_t row) {
  int64_t lowest_row = __atomic_load_n(problem.bad_row, __ATOMIC_RELAXED);
  while ((lowest_row < 0 || row < lowest_row) &&
         !__atomic_compare_exchange_n(problem.bad_row, &lowest_row, row, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
}

// The kernels of softmax_backward.cpp, cross_entropy.cpp and topk.cpp, which softmax.cpp puts into the table of the instruction
// set.
void softmax_backward(const RowProblem& problem, const Executor& executor);
void cross_entropy(const RowProblem& problem, const Executor& executor);
void cross_entropy_backward(const RowProblem& problem, const Executor& executor);
void topk_softmax(const RowProblem& problem, const Executor& executor);
void topk_softmax_backward(const RowProblem& problem, const Executor& executor);
int64_t topk_row_bytes(const RowProblem& problem);

// Corrects the state of a row that holds +inf and so has a sum of NaN: its logsumexp is infinity, unless the row holds a NaN.
template <class E>
FLASH_ONLINE_INLINE void resolve_infinity(const RowProblem& problem, const RowTile& tile, int64_t r,
                                          RowState<Accumulator<E>>& state) {
  if (state.max != std::numeric_limits<double>::infinity()) return;
  bool nan = false;
  for (int64_t c = 0; c < problem.classes; ++c) {
    const auto x = widen(element_of<E>(problem, problem.input, tile, r, c));
    nan |= x != x;
  }
  if (!nan) state.sum = Accumulator<E>(1);
}

}  // namespace flash_online::cpu::FLASH_ONLINE_ISA
