// How the row kernels walk a tensor: tiles of rows, and of these a chunk of classes at a time, widened into a buffer of the
// accumulator type. Arithmetic sees contiguous numbers only, whatever the tensor's dtype and strides.
//
// A row is always cut into the same chunks and summed in the same order, so that its result depends on nothing but its
// elements: not on the strides, the other rows or the number of threads.
#pragma once

#include "../core/rows.h"
#include "../core/visit.h"
#include "executor.h"
#include "simd.h"

namespace flash_online::cpu::FLASH_ONLINE_ISA {

constexpr int64_t kChunk = 512;     // classes
constexpr int64_t kTileRows = 16;   // at most; a tile of buffer is kTileRows * kChunk
constexpr int64_t kSumLanes = 32;   // partial sums of a chunk, in every set: few enough additions each to lose no digit

// `rows` neighbouring rows: along inner, or along outer where inner is 1.
struct Tile {
  int64_t outer, inner;  // coordinates of the first row
  int64_t number;        // of the first row, outer * problem.inner + inner
  int64_t rows;
};

// A tile's rows of one tensor.
template <class Pointer>
struct TileRows {
  Pointer data;
  int64_t row_stride, class_stride;
};

template <class Pointer>
FLASH_ONLINE_INLINE int64_t row_stride(const RowProblem& problem, const View3<Pointer>& view) {
  return problem.inner == 1 ? view.stride[0] : view.stride[2];
}

template <class T, class F>
FLASH_ONLINE_INLINE void visit_element(DType dtype, F&& f) {
  if constexpr (std::is_same_v<T, double>) {
    f(Type<double>{});
  } else {
    switch (dtype) {
      case DType::kFloat16: f(Type<Float16>{}); break;
      case DType::kBFloat16: f(Type<BFloat16>{}); break;
      default: f(Type<float>{});
    }
  }
}

template <class E, class Pointer>
FLASH_ONLINE_INLINE auto rows_of(const RowProblem& problem, const View3<Pointer>& view, const Tile& tile) {
  constexpr bool constant = std::is_const_v<std::remove_pointer_t<Pointer>>;
  using Element = std::conditional_t<constant, const E, E>;
  return TileRows<Element*>{static_cast<Element*>(view.data) + tile.outer * view.stride[0] + tile.inner * view.stride[2],
                            row_stride(problem, view), view.stride[1]};
}

// Reads classes [begin, begin + count) of a tile's rows: row r goes to buffer + r * kChunk.
template <class T>
__attribute__((noinline)) void load(const RowProblem& problem, DType dtype, const ConstView3& view, const Tile& tile,
                                    int64_t begin, int64_t count, T* __restrict buffer) {
  visit_element<T>(dtype, [&](auto type) {
    const auto from = rows_of<typename decltype(type)::type>(problem, view, tile);
    const auto* data = from.data + begin * from.class_stride;
    if (from.class_stride == 1) {
      for (int64_t r = 0; r < tile.rows; ++r)
        for (int64_t c = 0; c < count; ++c) buffer[r * kChunk + c] = widen(data[r * from.row_stride + c]);
    } else {
      for (int64_t c = 0; c < count; ++c)
        for (int64_t r = 0; r < tile.rows; ++r)
          buffer[r * kChunk + c] = widen(data[r * from.row_stride + c * from.class_stride]);
    }
  });
}

// The reverse of load: narrows the buffer into classes [begin, begin + count).
template <class T>
__attribute__((noinline)) void store(const RowProblem& problem, DType dtype, const MutableView3& view, const Tile& tile,
                                     int64_t begin, int64_t count, const T* __restrict buffer) {
  visit_element<T>(dtype, [&](auto type) {
    using E = typename decltype(type)::type;
    const auto to = rows_of<E>(problem, view, tile);
    E* data = to.data + begin * to.class_stride;
    if (to.class_stride == 1) {
      for (int64_t r = 0; r < tile.rows; ++r)
        for (int64_t c = 0; c < count; ++c) data[r * to.row_stride + c] = narrow<E>(buffer[r * kChunk + c]);
    } else {
      for (int64_t c = 0; c < count; ++c)
        for (int64_t r = 0; r < tile.rows; ++r)
          data[r * to.row_stride + c * to.class_stride] = narrow<E>(buffer[r * kChunk + c]);
    }
  });
}

// One element of row r of a tile.
template <class T>
FLASH_ONLINE_INLINE T load_one(const RowProblem& problem, DType dtype, const ConstView3& view, const Tile& tile, int64_t r,
                               int64_t c) {
  T result{};
  visit_element<T>(dtype, [&](auto type) {
    const auto from = rows_of<typename decltype(type)::type>(problem, view, tile);
    result = widen(from.data[r * from.row_stride + c * from.class_stride]);
  });
  return result;
}

template <class T>
FLASH_ONLINE_INLINE void store_one(const RowProblem& problem, DType dtype, const MutableView3& view, const Tile& tile,
                                   int64_t r, int64_t c, T value) {
  visit_element<T>(dtype, [&](auto type) {
    using E = typename decltype(type)::type;
    const auto to = rows_of<E>(problem, view, tile);
    to.data[r * to.row_stride + c * to.class_stride] = narrow<E>(value);
  });
}

// f(0) + ... + f(count - 1), in kSumLanes partial sums. T is double where the terms may cancel: the sum is then as good as the
// terms, however long the row.
template <class T, class F>
FLASH_ONLINE_INLINE T sum_over(int64_t count, const F& f) {
  T lanes[kSumLanes] = {};
  int64_t i = 0;
  for (; i + kSumLanes <= count; i += kSumLanes)
    for (int64_t lane = 0; lane < kSumLanes; ++lane) lanes[lane] += f(i + lane);
  for (int64_t lane = 0; i + lane < count; ++lane) lanes[lane] += f(i + lane);
  for (int64_t half = kSumLanes / 2; half > 0; half /= 2)
    for (int64_t lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
  return lanes[0];
}

// The largest of `count` numbers, NaN aside; -inf if there are none.
template <class T>
FLASH_ONLINE_INLINE T max_of(const T* x, int64_t count) {
  T lanes[kSumLanes];
  for (T& lane : lanes) lane = -std::numeric_limits<T>::infinity();
  int64_t i = 0;
  for (; i + kSumLanes <= count; i += kSumLanes)
    for (int64_t lane = 0; lane < kSumLanes; ++lane) lanes[lane] = maximum(lanes[lane], x[i + lane]);
  for (int64_t lane = 0; i + lane < count; ++lane) lanes[lane] = maximum(lanes[lane], x[i + lane]);
  for (int64_t half = kSumLanes / 2; half > 0; half /= 2)
    for (int64_t lane = 0; lane < half; ++lane) lanes[lane] = maximum(lanes[lane], lanes[lane + half]);
  return lanes[0];
}

// Adds a chunk of a row to its state; returns the chunk's maximum.
template <class T>
FLASH_ONLINE_INLINE T absorb(Softmax<T>& state, const T* x, int64_t count) {
  const T chunk_max = max_of(x, count);
  state.raise(chunk_max);
  const Softmax<T> raised = state;
  state.add(sum_over<T>(count, [&](int64_t i) { return raised.weight(x[i]); }));
  return chunk_max;
}

// The buffer of a tile, which knows what it holds: a row of one chunk is read once, however many passes there are.
template <class T>
class Reader {
 public:
  FLASH_ONLINE_INLINE Reader(const RowProblem& problem, DType dtype, const ConstView3& view, const Tile& tile, T* buffer)
      : problem_(problem), dtype_(dtype), view_(view), tile_(tile), buffer_(buffer) {}
  FLASH_ONLINE_INLINE void read(int64_t begin, int64_t count) {
    if (begin == held_) return;
    load(problem_, dtype_, view_, tile_, begin, count, buffer_);
    held_ = begin;
  }
  FLASH_ONLINE_INLINE const T* row(int64_t r) const { return buffer_ + r * kChunk; }

 private:
  const RowProblem& problem_;
  DType dtype_;
  const ConstView3& view_;
  const Tile& tile_;
  T* buffer_;
  int64_t held_ = -1;
};

// Calls body(begin, count) for every chunk of a row.
template <class Body>
FLASH_ONLINE_INLINE void for_each_chunk(const RowProblem& problem, const Body& body) {
  for (int64_t begin = 0; begin < problem.classes; begin += kChunk)
    body(begin, problem.classes - begin < kChunk ? problem.classes - begin : kChunk);
}

// The maximum and the sum of every row of a tile: the first pass of most kernels.
template <class T>
FLASH_ONLINE_INLINE void absorb_rows(const RowProblem& problem, Reader<T>& input, int64_t rows, Softmax<T>* state) {
  for (int64_t r = 0; r < rows; ++r) state[r] = {};
  for_each_chunk(problem, [&](int64_t begin, int64_t count) {
    input.read(begin, count);
    for (int64_t r = 0; r < rows; ++r) absorb(state[r], input.row(r), count);
  });
}

constexpr int64_t kBuffers = 2;  // of a worker, each kTileRows * kChunk

// How many rows a tile of these rows has. Rows that lie side by side in memory share cache lines and are read together;
// others only if they are short, as a long one is read a second time and should still be in the cache then.
FLASH_ONLINE_INLINE int64_t tile_rows(const RowProblem& problem, int64_t workers) {
  const int64_t run = problem.inner == 1 ? problem.outer : problem.inner, total = problem.outer * problem.inner;
  const ConstView3& view = problem.input.data != nullptr ? problem.input : problem.grad;
  const bool side_by_side = view.stride[1] > row_stride(problem, view);
  int64_t rows = side_by_side || problem.classes == 0 ? kTileRows : kChunk / problem.classes;
  rows = rows < 1 ? 1 : rows > kTileRows ? kTileRows : rows;
  while (rows > 1 && (rows > run || rows * workers > total || rows * problem.k > kChunk)) rows /= 2;
  return rows;
}

// Calls body(tile, buffer) for tiles that cover every row once, in parallel. The buffer is the worker's scratch, a pointer to
// the problem's accumulator type.
template <class Body>
FLASH_ONLINE_INLINE void for_each_tile(const RowProblem& problem, const Executor& executor, const Body& body) {
  const int64_t rows = tile_rows(problem, executor.workers);
  const int64_t groups = problem.inner == 1 ? 1 : problem.outer, run = problem.inner == 1 ? problem.outer : problem.inner;
  const int64_t tiles_a_group = (run + rows - 1) / rows, tiles = groups * tiles_a_group;
  const int64_t tile_size = rows * (problem.classes > 0 ? problem.classes : 1);
  const int64_t tiles_an_item = tile_size < kRowGrain ? kRowGrain / tile_size : 1;
  for_each_item(executor, (tiles + tiles_an_item - 1) / tiles_an_item, [&](int64_t item, std::byte* scratch) {
    const int64_t begin = item * tiles_an_item, end = begin + tiles_an_item < tiles ? begin + tiles_an_item : tiles;
    for (int64_t t = begin; t < end; ++t) {
      const int64_t group = t / tiles_a_group, first = t % tiles_a_group * rows, left = run - first;
      Tile tile{group, first, group * run + first, left < rows ? left : rows};
      if (problem.inner == 1) tile.outer = first, tile.inner = 0;
      if (problem.dtype == DType::kFloat64)
        body(tile, reinterpret_cast<double*>(scratch));
      else
        body(tile, reinterpret_cast<float*>(scratch));
    }
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

// What logsumexp gives for a row that holds +inf: infinity, unless it holds a NaN too. The sum cannot tell these apart.
template <class T>
FLASH_ONLINE_INLINE void settle_infinite(const RowProblem& problem, Reader<T>& input, int64_t r, Softmax<T>& state) {
  if (state.max != std::numeric_limits<T>::infinity()) return;
  bool nan = false;
  for_each_chunk(problem, [&](int64_t begin, int64_t count) {
    input.read(begin, count);
    for (int64_t c = 0; c < count; ++c) nan |= input.row(r)[c] != input.row(r)[c];
  });
  if (!nan) state.sum = T(1);
}

}  // namespace flash_online::cpu::FLASH_ONLINE_ISA
