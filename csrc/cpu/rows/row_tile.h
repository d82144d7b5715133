// How the row kernels walk a tensor: tiles of rows, and of these a chunk of classes at a time. Where a row's classes lie side
// by side, arithmetic works on the tensor's own memory; else on a chunk copied into a buffer.
//
// A row is always cut into the same chunks and segments and summed in the same order, so that its result depends on nothing
// but its elements: not on the strides, the other rows, the number of threads, or on how many of them share the row.
#pragma once

#include "../../core/rows.h"
#include "../../core/visit.h"
#include "../executor.h"
#include "row_weights.h"

namespace flash_online::cpu::FLASH_ONLINE_ISA {

constexpr int64_t kChunk = 2048;         // classes that are weighed from one maximum
constexpr int64_t kSegment = 8 * kChunk; // classes of a long row that one thread takes at a time
constexpr int64_t kTileRows = 32;        // at most
constexpr int64_t kLine = 64;            // bytes of the cache
constexpr int64_t kKept = 640 * 1024;    // bytes of a tile's weights that are kept: a third of a large L2 cache
constexpr int64_t kSoon = 1024 * 1024;   // bytes of a row's result that may wait in the cache to be written
constexpr int64_t kMostSharedRows = 64;  // more rows keep the threads busy without sharing one

// `rows` neighbouring rows: along inner, or along outer where inner is 1.
struct Tile {
  int64_t outer, inner;  // coordinates of the first row
  int64_t number;        // of the first row, outer * problem.inner + inner
  int64_t rows;
};

template <class Pointer>
FLASH_ONLINE_INLINE int64_t row_stride(const RowProblem& problem, const View3<Pointer>& view) {
  return problem.inner == 1 ? view.stride[0] : view.stride[2];
}

// Whether the classes of a row lie side by side.
template <class Pointer>
FLASH_ONLINE_INLINE bool is_direct(const RowProblem& problem, const View3<Pointer>& view) {
  return view.stride[1] == 1 || problem.classes == 1;
}

// A worker's scratch, handed out front to back.
class Arena {
 public:
  explicit Arena(std::byte* begin) : next_(begin) {}
  template <class T>
  T* take(int64_t count) {
    T* taken = reinterpret_cast<T*>(next_);
    next_ += bytes<T>(count);
    return taken;
  }
  template <class T>
  static int64_t bytes(int64_t count) {
    return (count * static_cast<int64_t>(sizeof(T)) + 63) / 64 * 64;
  }

 private:
  std::byte* next_;
};

// From one row's buffer to the next: past whole vectors, and not a power of two, which would put all rows into one cache set.
constexpr int64_t kPitchExtra = 48;
FLASH_ONLINE_INLINE int64_t buffer_pitch(const RowProblem& problem) {
  return (problem.classes < kChunk ? padded(problem.classes) : kChunk) + kPitchExtra;
}

// A tile's rows of a tensor, a chunk at a time.
template <class E, class Pointer>
class Chunks {
  using Element = std::conditional_t<std::is_const_v<std::remove_pointer_t<Pointer>>, const E, E>;

 public:
  Chunks(const RowProblem& problem, const View3<Pointer>& view, const Tile& tile, Arena& arena)
      : data_(static_cast<Element*>(view.data) + tile.outer * view.stride[0] + tile.inner * view.stride[2]),
        row_stride_(row_stride(problem, view)),
        class_stride_(view.stride[1]),
        rows_(tile.rows),
        direct_(view.data == nullptr || is_direct(problem, view)),
        soon_(problem.classes * static_cast<int64_t>(sizeof(E)) <= kSoon) {
    if (direct_) return;
    pitch_ = buffer_pitch(problem);
    buffer_ = arena.take<E>(rows_ * pitch_);
  }

  // Makes classes [begin, begin + count) readable, where they are not.
  FLASH_ONLINE_INLINE void read(int64_t begin, int64_t count) {
    if (!direct_ && begin != held_) gather(begin, count);
    held_ = begin;
  }
  // Starts on classes from `begin` on, to be written.
  FLASH_ONLINE_INLINE void start(int64_t begin) { held_ = begin; }
  // Row r's classes from the held `begin` on.
  FLASH_ONLINE_INLINE Element* row(int64_t r) const { return direct_ ? data_ + r * row_stride_ + held_ : buffer_ + r * pitch_; }
  // Where row r's classes from `begin` on will be written, if that is a stretch of memory, and soon.
  FLASH_ONLINE_INLINE Ahead ahead(int64_t r, int64_t begin) const {
    if (!direct_ || !soon_) return {};
    return {reinterpret_cast<char*>(data_ + r * row_stride_ + begin), sizeof(E)};
  }
  // Where the rows lie side by side: fetches row r's share of the cache lines that `count` classes of them will be written to.
  FLASH_ONLINE_INLINE void fetch_share(int64_t r, int64_t begin, int64_t count) const {
    if (direct_ || row_stride_ != 1) return;
    const int64_t share = (count + rows_ - 1) / rows_, end = (r + 1) * share < count ? (r + 1) * share : count;
    for (int64_t c = r * share; c < end; ++c) __builtin_prefetch(data_ + (begin + c) * class_stride_ + rows_ / 2, 1, 2);
  }
  // Both, for a pass that does not fetch as it goes.
  FLASH_ONLINE_INLINE void fetch(int64_t r, int64_t begin, int64_t count) const {
    const Ahead stretch = ahead(r, begin);
    stretch.touch(count);
    stretch.fetch(0, count);
    fetch_share(r, begin, count);
  }
  // Puts `count` classes, now written to row(r), where they belong.
  FLASH_ONLINE_INLINE void finish(int64_t count) {
    if (!direct_) scatter(count);
  }

 private:
  __attribute__((noinline)) void gather(int64_t begin, int64_t count) {
    const Element* from = data_ + begin * class_stride_;
    if (row_stride_ == 1) return transpose(from, class_stride_, count, rows_, buffer_, pitch_);
    for (int64_t c = 0; c < count; ++c)
      for (int64_t r = 0; r < rows_; ++r) buffer_[r * pitch_ + c] = from[r * row_stride_ + c * class_stride_];
  }
  __attribute__((noinline)) void scatter(int64_t count) {
    Element* to = data_ + held_ * class_stride_;
    if (row_stride_ == 1) return transpose(buffer_, pitch_, rows_, count, to, class_stride_);
    for (int64_t c = 0; c < count; ++c)
      for (int64_t r = 0; r < rows_; ++r) to[r * row_stride_ + c * class_stride_] = buffer_[r * pitch_ + c];
  }

  Element* data_;
  int64_t row_stride_, class_stride_, rows_;
  bool direct_, soon_;
  E* buffer_ = nullptr;
  int64_t pitch_ = 0, held_ = -1;
};

// One element of row r of a tile.
template <class E, class Pointer>
FLASH_ONLINE_INLINE auto& element_of(const RowProblem& problem, const View3<Pointer>& view, const Tile& tile, int64_t r,
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

// The maximum and the sum of a row, or of a part of it.
template <class T>
using RowState = OnlineSoftmax<T, FastNatural, double>;

// Merges, where merging with the empty state is spared: it would change no bit.
template <class T>
FLASH_ONLINE_INLINE void join(RowState<T>& state, const RowState<T>& other) {
  if (state.max == lowest<double>() && state.sum == T(0))
    state = other;
  else
    state.merge(other);
}

// How many numbers the weights of so many rows are, rounded up to whole pairs of the widest set; whether they are kept.
FLASH_ONLINE_INLINE int64_t kept_numbers(const RowProblem& problem, int64_t rows) {
  return rows * ((problem.classes + 31) / 32 * 32);
}
FLASH_ONLINE_INLINE bool may_keep(const RowProblem& problem, int64_t rows) {
  return kept_numbers(problem, rows) * (problem.dtype == DType::kFloat64 ? 8 : 4) <= kKept;
}

// The sum of a chunk's weights; the weights too, pair by pair, if they are to be kept.
template <bool kKeep, class E, class W>
__attribute__((noinline)) Accumulator<E> weigh_chunk(const E* x, int64_t count, const W& weight, Accumulator<E>* keep,
                                                     Ahead ahead) {
  return weigh<kKeep>(x, count, weight, keep, ahead);
}

// The weights of a tile's rows, twice: added up in a first pass and written, times a factor, in a second. They are computed
// once if there was room to keep them.
template <class E, Weighing weighing>
class Weights {
 public:
  using T = Accumulator<E>;

  Weights(const RowProblem& problem, const Tile& tile, Arena& arena, bool keep)
      : input_(problem, problem.input, tile, arena), rows_(tile.rows) {
    if (!keep) return;
    pitch_ = kept_numbers(problem, 1);
    chunks_ = (problem.classes + kChunk - 1) / kChunk;
    kept_ = arena.take<T>(rows_ * pitch_);
    max_ = arena.take<double>(rows_ * chunks_);
  }

  // Adds classes [begin, end) of each row, whose results will go to result, to its state(r); also(r, x, begin, count, max, sum)
  // sees each chunk.
  template <class State, class Also, class Result>
  FLASH_ONLINE_INLINE void absorb(int64_t begin, int64_t end, const State& state, const Also& also, const Result& result) {
    RowState<T> segment[kTileRows];
    for_each_chunk(begin, end, [&](int64_t first, int64_t count) {
      input_.read(first, count);
      for (int64_t r = 0; r < rows_; ++r) {
        const E* x = input_.row(r);
        result.fetch_share(r, first, count);
        with_weigher<weighing>(x, count, [&](const auto& weight) {
          RowState<T> chunk{.max = weight.max};
          if (kept_ != nullptr) {
            max_[r * chunks_ + first / kChunk] = weight.max;
            chunk.sum = weigh_chunk<true>(x, count, weight, kept_ + r * pitch_ + first, result.ahead(r, first));
          } else {
            chunk.sum = weigh_chunk<false>(x, count, weight, static_cast<T*>(nullptr), result.ahead(r, first));
          }
          join(segment[r], chunk);
          also(r, x, first, count, weight.max, chunk.sum);
        });
      }
    });
    for (int64_t r = 0; r < rows_; ++r) join(state(r), segment[r]);
  }

  // Calls emit(r, begin, count, f) for every chunk of classes [begin, end) of each row, where f(i, n) is a pair of the weights
  // from begin + i on, as parts of the row's state(r) and times its factor(r).
  template <class State, class Factor, class Start, class Emit, class Finish>
  FLASH_ONLINE_INLINE void write(int64_t begin, int64_t end, const State& state, const Factor& factor, const Start& start,
                                 const Emit& emit, const Finish& finish) {
    for_each_chunk(begin, end, [&](int64_t first, int64_t count) {
      if (kept_ == nullptr) input_.read(first, count);
      start(first);
      for (int64_t r = 0; r < rows_; ++r) {
        const RowState<T>& row = state(r);
        const auto scale_from = [&](double max) {
          return broadcast(max == row.max ? factor(r) : RowState<T>::rescale(max, row.max) * factor(r));
        };
        if (kept_ != nullptr) {
          const T* kept = kept_ + r * pitch_ + first;
          const Vector<T> scale = scale_from(max_[r * chunks_ + first / kChunk]);
          emit(r, first, count, [=](int64_t i, int64_t) __attribute__((always_inline)) {
            return Pair<T>{load_vector(kept + i) * scale, load_vector(kept + i + kLanes<T>) * scale};
          });
        } else {
          const E* x = input_.row(r);
          with_weigher<weighing>(x, count, [&](const auto& weight) {
            const Vector<T> scale = scale_from(weight.max);
            emit(r, first, count, [=](int64_t i, int64_t n) __attribute__((always_inline)) {
              const Pair<T> pair = load_some(x + i, n, lowest<T>());
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
  T* kept_ = nullptr;
  double* max_ = nullptr;
};

// For Weights::absorb.
constexpr auto nothing_also = [](auto&&...) {};
struct NoResult {
  static Ahead ahead(int64_t, int64_t) { return {}; }
  static void fetch_share(int64_t, int64_t, int64_t) {}
};

// What a row kernel is: a class constructed for a tile, or for a part of one row, as Op(problem, tile, arena, keep, shared...);
// first(begin, end, partials) adds classes to what is known of each row, merge() joins what two parts of a row know, finish()
// sees all of it, and second() writes classes of the result. Here: what most of them have in common.
struct RowOp {
  static constexpr bool kSecond = false;
  static int64_t storage(const RowProblem&) { return 0; }  // bytes beside each Partial, which place() is told of
  template <class Partial>
  static void place(const RowProblem&, Partial&, std::byte*) {}
};

constexpr int64_t kPartialBytes = 64;  // of any Op's Partial, at most

// How the rows of a problem are dealt out.
struct Cut {
  int64_t groups, run, rows, segments;  // `run` neighbouring rows in each group; `rows` of them in a tile
  explicit Cut(const RowProblem& problem, int64_t workers)
      : groups(problem.inner == 1 ? 1 : problem.outer),
        run(problem.inner == 1 ? problem.outer : problem.inner),
        segments((problem.classes + kSegment - 1) / kSegment) {
    // Rows that lie side by side in memory share cache lines and are read together; others if they are short, to spare the
    // work of dealing them out one by one.
    const ConstView3& view = problem.input.data != nullptr ? problem.input : problem.grad;
    const bool side_by_side = !is_direct(problem, view) && view.stride[1] > row_stride(problem, view);
    rows = side_by_side || problem.classes == 0 ? kLine / size_of(problem.dtype) : 2 * kChunk / problem.classes;
    rows = rows < 1 ? 1 : rows > kTileRows ? kTileRows : rows;
    while (rows > 1 && (rows > run || rows * workers > total() || rows * problem.k > kChunk)) rows /= 2;
  }
  int64_t total() const { return groups * run; }
};

FLASH_ONLINE_INLINE bool may_share_rows(const RowProblem& problem, const Cut& cut) {
  return cut.segments > 1 && cut.total() <= kMostSharedRows && problem.k <= kMostSharedRows;
}

// Bytes in front of every worker's scratch: in the first one's lie the partials of rows that several threads share.
FLASH_ONLINE_INLINE int64_t shared_scratch(const RowProblem& problem, int64_t storage) {
  const Cut cut(problem, 1);
  return may_share_rows(problem, cut) ? cut.total() * cut.segments * (kPartialBytes + storage) : 0;
}

// Runs a kernel over all rows, in parallel: over tiles of rows or, if there are few rows and they are long, over parts of them.
template <class Op, class... Shared>
FLASH_ONLINE_INLINE void run_rows(const RowProblem& problem, const Executor& executor, const Shared&... shared) {
  using Partial = typename Op::Partial;
  static_assert(sizeof(Partial) <= kPartialBytes);
  const Cut cut(problem, executor.workers);
  const int64_t storage = Op::storage(problem), shared_bytes = shared_scratch(problem, storage);

  if (cut.total() < 2 * executor.workers && may_share_rows(problem, cut)) {
    const auto partial = [&](int64_t part) -> Partial& {
      return *reinterpret_cast<Partial*>(executor.scratch + part * (kPartialBytes + storage));
    };
    const auto op_for = [&](int64_t row, std::byte* scratch) {
      Arena arena(scratch + shared_bytes);
      return Op(problem, Tile{row / problem.inner, row % problem.inner, row, 1}, arena, false, shared...);
    };
    const auto for_each_part = [&](const auto& body) {
      for_each_item(executor, cut.total() * cut.segments, [&](int64_t part, std::byte* scratch) {
        const int64_t row = part / cut.segments, begin = part % cut.segments * kSegment;
        const int64_t end = begin + kSegment < problem.classes ? begin + kSegment : problem.classes;
        Op op = op_for(row, scratch);
        body(op, part, begin, end);
      });
    };
    for_each_part([&](Op& op, int64_t part, int64_t begin, int64_t end) {
      Partial& known = *new (&partial(part)) Partial();
      Op::place(problem, known, reinterpret_cast<std::byte*>(&known) + kPartialBytes);
      op.first(begin, end, &known);
    });
    for (int64_t row = 0; row < cut.total(); ++row) {
      Partial& known = partial(row * cut.segments);
      for (int64_t s = 1; s < cut.segments; ++s) Op::merge(known, partial(row * cut.segments + s));
      op_for(row, executor.scratch).finish(&known);
    }
    if constexpr (Op::kSecond)
      for_each_part([&](Op& op, int64_t part, int64_t begin, int64_t end) {
        op.second(begin, end, &partial(part / cut.segments * cut.segments));
      });
    return;
  }

  const int64_t tiles_a_group = (cut.run + cut.rows - 1) / cut.rows, tiles = cut.groups * tiles_a_group;
  const int64_t tile_size = cut.rows * (problem.classes > 0 ? problem.classes : 1);
  const int64_t tiles_an_item = tile_size < kRowGrain ? kRowGrain / tile_size : 1;
  const bool keep = may_keep(problem, cut.rows);
  for_each_item(executor, (tiles + tiles_an_item - 1) / tiles_an_item, [&](int64_t item, std::byte* scratch) {
    const int64_t first = item * tiles_an_item, last = first + tiles_an_item < tiles ? first + tiles_an_item : tiles;
    for (int64_t t = first; t < last; ++t) {
      const int64_t group = t / tiles_a_group, row = t % tiles_a_group * cut.rows, left = cut.run - row;
      Tile tile{group, row, group * cut.run + row, left < cut.rows ? left : cut.rows};
      if (problem.inner == 1) tile.outer = row, tile.inner = 0;
      Arena arena(scratch + shared_bytes);
      Partial partial[kTileRows];
      if (storage > 0)
        for (int64_t r = 0; r < tile.rows; ++r) Op::place(problem, partial[r], arena.take<std::byte>(storage));
      Op op(problem, tile, arena, keep, shared...);
      for (int64_t begin = 0; begin < problem.classes; begin += kSegment)
        op.first(begin, begin + kSegment < problem.classes ? begin + kSegment : problem.classes, partial);
      op.finish(partial);
      if constexpr (Op::kSecond) op.second(0, problem.classes, partial);
    }
  });
}

// Calls f(E{}, R{}), the element types of a problem and of its result: R is E, or float beside an E of 16 bits.
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

// Reports a row whose target or index is out of range: the first of them is kept, whatever the order of the threads.
FLASH_ONLINE_INLINE void report_bad_row(const RowProblem& problem, int64_t row) {
  int64_t seen = __atomic_load_n(problem.bad_row, __ATOMIC_RELAXED);
  while ((seen < 0 || row < seen) &&
         !__atomic_compare_exchange_n(problem.bad_row, &seen, row, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
}

// The kernels of cross_entropy.cpp and topk.cpp, which rows.cpp puts into the table of the instruction set.
void cross_entropy(const RowProblem& problem, const Executor& executor);
void cross_entropy_backward(const RowProblem& problem, const Executor& executor);
void topk_softmax(const RowProblem& problem, const Executor& executor);
void topk_softmax_backward(const RowProblem& problem, const Executor& executor);
int64_t topk_storage(const RowProblem& problem);

// What logsumexp gives for a row that holds +inf: infinity, unless it holds a NaN too. The sum cannot tell these apart.
template <class E>
FLASH_ONLINE_INLINE void settle_infinite(const RowProblem& problem, const Tile& tile, int64_t r,
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
