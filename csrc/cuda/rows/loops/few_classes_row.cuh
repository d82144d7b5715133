// Contiguous rows of up to kMostFewClasses classes, a number that the kernel knows: a thread has a whole row in registers. What
// such rows wait for is instructions: nothing here asks where a row ends.
#pragma once

#include "register_row.cuh"

namespace flash_online::cuda {

constexpr int kMostFewClasses = 4;

// The location of a row, and of results that are written to the view `of_result`: in shared memory, in a block of rows
// (block_row.cuh). kInWords: both lie at multiples of 4 bytes, if the results have the elements' size.
template <class T, int kClasses, bool kInWords>
struct PlaceInBlock {
  const char* row;
  const MutableView3* of_result;
  char* result;

  __device__ __forceinline__ void load(float (&x)[kClasses]) const {
    if constexpr (kClasses * sizeof(T) == kVectorBytes) {  // dealt by vectors, hence at a multiple of 16 bytes
      unpack<T>(*reinterpret_cast<const uint4*>(row), x);
    } else if constexpr (sizeof(T) == 2 && kInWords && kClasses % 2 == 0) {
#pragma unroll
      for (int c = 0; c < kClasses; c += 2) {
        const float2 pair = unpair<T>(reinterpret_cast<const unsigned*>(row)[c / 2]);
        x[c] = pair.x;
        x[c + 1] = pair.y;
      }
    } else {
#pragma unroll
      for (int c = 0; c < kClasses; ++c) x[c] = widen(reinterpret_cast<const T*>(row)[c]);
    }
  }
  template <class Result>
  __device__ __forceinline__ void store(const float (&z)[kClasses]) const {
    if constexpr (kClasses * sizeof(Result) == kVectorBytes && sizeof(Result) == sizeof(T)) {
      *reinterpret_cast<uint4*>(result) = pack<Result>(z);
    } else if constexpr (sizeof(Result) == 2 && sizeof(T) == 2 && kInWords && kClasses % 2 == 0) {
#pragma unroll
      for (int c = 0; c < kClasses; c += 2) reinterpret_cast<unsigned*>(result)[c / 2] = pair_of<Result>(z[c], z[c + 1]);
    } else {
#pragma unroll
      for (int c = 0; c < kClasses; ++c) reinterpret_cast<Result*>(result)[c] = narrow<Result>(z[c]);
    }
  }
};

// The members are those of OnChipRow (register_row.cuh).
template <class T, int kClasses, bool kInWords>
class FewClassesRow {
 public:
  static constexpr bool kIsFewClasses = true;  // see kFusesRowWeights
  __device__ __forceinline__ FewClassesRow(const RowCoord& coord, const PlaceInBlock<T, kClasses, kInWords>& place)
      : coord_(coord), place_(place) {
    place.load(x_);
  }

  template <class Result = T, class State = RowState>
  __device__ __forceinline__ State state() const {
    State state;
#pragma unroll
    for (int c = 0; c < kClasses; ++c) state.max = fmaxf(state.max, x_[c]);
    state.sum = sum([&](int, float x) { return state.weight(x); });
    if constexpr (std::is_same_v<State, RowEntropyState>)
      state.products = sum([&](int, float x) { return state.weight(x) * state.distance(x); });
    return state;
  }

  template <int kSlot = 1, class F>
  __device__ __forceinline__ float sum(const F& f) const {
    return sum_with<kSlot>(*this, [&](int c, float x, float) { return f(c, x); });
  }
  template <int kSlot = 1, class F>
  __device__ __forceinline__ float sum_with(const FewClassesRow& other, const F& f) const {
    float sum = 0;
#pragma unroll
    for (int c = 0; c < kClasses; ++c) sum += f(c, x_[c], other.x_[c]);
    return sum;
  }
  template <int kSlot = 1, class F>
  __device__ __forceinline__ TwoFloats precise_sum(const F& f) const {
    TwoFloats sum;
#pragma unroll
    for (int c = 0; c < kClasses; ++c) sum.merge(f(c, x_[c]));
    return sum;
  }
  template <int kSlot = 1>
  __device__ __forceinline__ WeightedMean mean_by(const FewClassesRow& other) const {
    WeightedMean mean;
#pragma unroll
    for (int c = 0; c < kClasses; ++c) mean.add(x_[c], other.x_[c]);
    return mean;
  }

  template <class Result, class F>
  __device__ __forceinline__ void write(const MutableView3& view, const F& f) const {
    write_with<Result>(*this, view, [&](int c, float x, float) { return f(c, x); });
  }
  template <class Result, class F, class Exact, class Special>
  __device__ __forceinline__ void write_except(const MutableView3& view, int64_t at, const F&, const Exact& exact,
                                               const Special& special) const {
    const int except = static_cast<int>(at);
    write<Result>(view, [&](int c, float x) { return c == except ? special(x) : exact(c, x); });
  }
  template <class Result, class F>
  __device__ __forceinline__ void write_with(const FewClassesRow& other, const MutableView3& view, const F& f) const {
    float z[kClasses];
#pragma unroll
    for (int c = 0; c < kClasses; ++c) z[c] = f(c, x_[c], other.x_[c]);
    if (&view == place_.of_result)
      place_.template store<Result>(z);
    else if (coord_.exists)
#pragma unroll
      for (int c = 0; c < kClasses; ++c) row_of<Result>(view, coord_).data[c] = narrow<Result>(z[c]);
  }

  __device__ __forceinline__ bool owns(int64_t) const { return coord_.exists; }
  __device__ __forceinline__ float operator[](int64_t c) const {
    float x = x_[0];
#pragma unroll
    for (int i = 1; i < kClasses; ++i) x = c == i ? x_[i] : x;
    return x;
  }
  __device__ __forceinline__ const RowCoord& coord() const { return coord_; }
  __device__ __forceinline__ bool is_leader() const { return coord_.exists; }
  __device__ __forceinline__ float count_nan() const {
    return sum([](int, float x) { return x != x ? 1.0f : 0.0f; });
  }
  __device__ __forceinline__ bool any_sharing_barrier(bool reason) const { return reason; }

 private:
  RowCoord coord_;
  PlaceInBlock<T, kClasses, kInWords> place_;
  float x_[kClasses];
};

}  // namespace flash_online::cuda
