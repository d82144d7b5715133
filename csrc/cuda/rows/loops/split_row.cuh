// Rows too long to be held, their classes side by side: each row is cut into pieces, a block each. One kernel leaves every
// piece's part of the row's maximum and sum in the workspace; a second one merges the parts of its row, all in the same order,
// and reads its piece again. Where the pieces end depends on the row's length alone.
#pragma once

#include "register_row.cuh"

namespace flash_online::cuda {

struct alignas(16) Partial {
  float max, sum;  // of a RowState
  float extra;     // another sum, of the kernel's own
  float nan;       // how many elements are NaN, or just not 0
};

// For kernels that sum up nothing of their own.
struct NoExtra {
  __device__ __forceinline__ float operator()(int64_t, float) const { return 0.0f; }
};

struct SplitTeam : HeldTeam<256, 256> {};
constexpr int kSplitBlocks = 5;        // to be resident on a multiprocessor: 48 registers a thread
constexpr int kSplitVectors = 4;       // of a thread at a time
constexpr int64_t kMostPieces = 256;

template <class T>
constexpr int64_t kChunk = SplitTeam::kThreads * kSplitVectors * kPerVector<T>;  // classes

struct Pieces {
  int64_t classes, count;  // of a piece, but the last one's; of a row
  template <class T>
  __host__ __device__ static int64_t classes_a_piece(int64_t classes) {
    return (classes + kChunk<T> * kMostPieces - 1) / (kChunk<T> * kMostPieces) * kChunk<T>;
  }
  template <class T>
  __host__ __device__ static Pieces of(int64_t classes, Type<T>) {
    const int64_t piece = classes_a_piece<T>(classes);
    return {piece, (classes + piece - 1) / piece};
  }
};

// What split rows need of the workspace, in bytes: a Partial a piece, and one more for sums that need the row's state.
inline int64_t split_workspace(int64_t rows, int64_t pieces) {
  return 2 * rows * pieces * static_cast<int64_t>(sizeof(Partial));
}

// A grid of split rows is rows x pieces.
__device__ __forceinline__ RowPlace split_place(const RowProblem& problem) {
  const int64_t number = blockIdx.x;
  if (problem.inner == 1) return {number, 0, number, true};
  return {number / problem.inner, number % problem.inner, number, true};
}

// What the pieces of a row left, merged by each warp for itself.
struct Whole {
  RowState state;
  float extra, nan;
  // What settled() gives for other rows.
  __device__ __forceinline__ RowState settled() const {
    return state.max == INFINITY && nan == 0 ? RowState{state.max, 1} : state;
  }
};
__device__ __forceinline__ Whole merge_pieces(const Partial* partials, int64_t count) {
  Whole whole{};
  for (int64_t i = threadIdx.x % kWarpSize; i < count; i += kWarpSize) {
    const Partial part = partials[i];
    whole.state.merge(RowState{part.max, part.sum});
    whole.extra += part.extra;
    whole.nan += part.nan;
  }
  return {merge_lanes<kWarpSize>(whole.state), lanes_sum<kWarpSize>(whole.extra), lanes_sum<kWarpSize>(whole.nan)};
}

// This block's piece of a row.
template <class T>
class SplitRow {
 public:
  using Element = T;
  static constexpr int kElements = kPerVector<T>;

  __device__ __forceinline__ SplitRow(const RowProblem& problem, const ConstView3& view)
      : place_(split_place(problem)),
        row_(row_of<const T>(view, place_).data),
        begin_(blockIdx.y * Pieces::classes_a_piece<T>(problem.classes)),
        end_(begin_ + Pieces::classes_a_piece<T>(problem.classes)),
        partials_(static_cast<Partial*>(problem.workspace)) {
    if (end_ > problem.classes) end_ = problem.classes;
  }

  // The first kernel: leaves this piece's part of the row's state. extra(class, element) is summed up beside, unless it is
  // NoExtra.
  template <class F>
  __device__ __forceinline__ void leave_part(const F& extra) const {
    constexpr bool kExtra = !std::is_same_v<F, NoExtra>;
    RowState state;
    Sum more, nan;
    Compensation compensation, of_more;
    for (int64_t at = begin_; at < end_; at += kChunk<T>) {
      uint4 v[kSplitVectors];
      load(v, at, lowest_vector<T>());
      float max = -INFINITY;
#pragma unroll
      for (int i = 0; i < kSplitVectors; ++i) max = fmaxf(max, max_of<T>(v[i]));
      compensation.rescale(state.raise_max_lazily(kSlack, max));
#pragma unroll
      for (int i = 0; i < kSplitVectors; ++i) {
        float x[kElements], part = 0, part_of_more = 0;
        unpack<T>(v[i], x);
#pragma unroll
        for (int e = 0; e < kElements; ++e) {
          part += state.weight(x[e]);
          if constexpr (kExtra) {
            const int64_t c = class_of(at, i) + e;
            if (c < end_) part_of_more += extra(c, x[e]);
          }
        }
        compensation.add(state, part);
        if constexpr (kExtra) of_more.add(more, part_of_more);
      }
    }
    state = SplitTeam::merge_warps<0>(merge_lanes<kWarpSize>(state));
    if constexpr (kExtra) more = SplitTeam::merge_warps<1>(merge_lanes<kWarpSize>(more));
    if (state.max == INFINITY) {  // rare: see settled()
      each_with(*this, [&](int64_t c, const float (&x)[kElements], const float (&)[kElements]) {
#pragma unroll
        for (int e = 0; e < kElements; ++e)
          if (c + e < end_ && x[e] != x[e]) nan.add(1);
      });
      nan = SplitTeam::merge_warps<2>(merge_lanes<kWarpSize>(nan));
    } else if (state.sum != state.sum) {
      nan.value = 1;
    }
    if (threadIdx.x == 0) partials_[slot()] = {state.max, state.sum, more.value, nan.value};
  }

  // The same of a sum alone: of f(class, element, the other row's element). `behind`: how many Partials to leave alone.
  template <class F>
  __device__ __forceinline__ void leave_sum(const SplitRow& other, int64_t behind, const F& f) const {
    Sum sum;
    Compensation compensation;
    each_with(other, [&](int64_t c, const float (&x)[kElements], const float (&y)[kElements]) {
      float part = 0;
#pragma unroll
      for (int e = 0; e < kElements; ++e)
        if (c + e < end_) part += f(c + e, x[e], y[e]);
      compensation.add(sum, part);
    });
    sum = SplitTeam::merge_warps<0>(merge_lanes<kWarpSize>(sum));
    if (threadIdx.x == 0) partials_[behind + slot()] = {-INFINITY, 0, sum.value, 0};
  }

  // The second kernel.
  __device__ __forceinline__ Whole whole() const { return merge_pieces(partials_ + place_.number * gridDim.y, gridDim.y); }
  __device__ __forceinline__ RowState state() const { return whole().state; }
  // What the first kernel summed up by this f.
  template <int kSlot = 1, class F>
  __device__ __forceinline__ float sum(const F&) const {
    return whole().extra;
  }
  template <int kSlot = 1, class F>
  __device__ __forceinline__ float sum_with(const SplitRow&, const F&) const {
    return whole().extra;
  }

  template <class Result, class F>
  __device__ __forceinline__ void write(const MutableView3& view, const F& f) const {
    write_with<Result>(*this, view, [&](int64_t c, float x, float) { return f(c, x); });
  }
  template <class Result, class F>
  __device__ __forceinline__ void write_less(const MutableView3& view, int64_t at, float less, const F& f) const {
    write<Result>(view, [&](int64_t c, float x) { return f(c, x) - (c == at ? less : 0.0f); });
  }
  template <class Result, class F>
  __device__ __forceinline__ void write_with(const SplitRow& other, const MutableView3& view, const F& f) const {
    Result* result = row_of<Result>(view, place_).data + begin_;
    each_with(other, [&](int64_t c, const float (&x)[kElements], const float (&y)[kElements]) {
      float z[kElements];
#pragma unroll
      for (int e = 0; e < kElements; ++e) z[e] = f(c + e, x[e], y[e]);
      store_vector(result + (c - begin_), 0, static_cast<int>(end_ - c < kElements ? end_ - c : kElements), z);
    });
  }

  __device__ __forceinline__ float count_nan() const { return whole().nan; }
  __device__ __forceinline__ bool together(bool reason) const { return reason; }
  __device__ __forceinline__ bool owns(int64_t c) const {
    return begin_ <= c && c < end_ && (c - begin_) / kElements % SplitTeam::kThreads == threadIdx.x;
  }
  __device__ __forceinline__ float operator[](int64_t c) const { return widen(row_[c]); }
  __device__ __forceinline__ const RowPlace& place() const { return place_; }
  __device__ __forceinline__ int64_t pieces() const { return gridDim.y; }
  __device__ __forceinline__ bool leads() const { return blockIdx.y == 0 && threadIdx.x == 0; }

 private:
  __device__ __forceinline__ static int64_t class_of(int64_t chunk, int i) {
    return chunk + (static_cast<int>(threadIdx.x) + i * SplitTeam::kThreads) * kElements;
  }
  __device__ __forceinline__ void load(uint4 (&v)[kSplitVectors], int64_t at, uint4 filler) const {
    const int64_t left = end_ - at;
    load_row<T, true>(v, row_ + at, threadIdx.x, SplitTeam::kThreads, static_cast<int>(left < kChunk<T> ? left : kChunk<T>),
                      filler);
  }
  template <class F>
  __device__ __forceinline__ void each_with(const SplitRow& other, const F& f) const {
    for (int64_t at = begin_; at < end_; at += kChunk<T>) {
      uint4 v[kSplitVectors], w[kSplitVectors];
      load(v, at, uint4{});
      if (&other != this) other.load(w, at, uint4{});
#pragma unroll
      for (int i = 0; i < kSplitVectors; ++i) {
        const int64_t c = class_of(at, i);
        float x[kElements], y[kElements];
        unpack<T>(v[i], x);
        unpack<T>(&other != this ? w[i] : v[i], y);
        if (c < end_) f(c, x, y);
      }
    }
  }

  __device__ __forceinline__ int64_t slot() const { return place_.number * gridDim.y + blockIdx.y; }

  RowPlace place_;
  const T* row_;
  int64_t begin_, end_;
  Partial* partials_;
};

}  // namespace flash_online::cuda
