// The three softmaxes of the literature (Milakov and Gimelshein, arXiv 1805.02867, algorithms 1 to 3), for tests and for
// `python -m flash_online trace`. The kernels use only the third.
#pragma once

#include <cstdint>

#include "../core/online_softmax.h"

namespace flash_online {

// Two passes over x. exp overflows float32 for scores over 88.7, so that the result is NaN; a row of very small scores divides
// 0 by 0.
template <class T, class Base>
void naive_softmax(const T* x, int64_t size, T* y) {
  T sum = 0;
  for (int64_t i = 0; i < size; ++i) sum += Base::exp(x[i]);
  for (int64_t i = 0; i < size; ++i) y[i] = Base::exp(x[i]) / sum;
}

// Three passes: the maximum, the sum, the result.
template <class T, class Base>
void safe_softmax(const T* x, int64_t size, T* y) {
  T max = -std::numeric_limits<T>::infinity();
  for (int64_t i = 0; i < size; ++i) max = maximum(max, x[i]);
  T sum = 0;
  for (int64_t i = 0; i < size; ++i) sum += Base::exp(x[i] - pivot(max));
  for (int64_t i = 0; i < size; ++i) y[i] = Base::exp(x[i] - pivot(max)) / sum;
}

// Two passes, safe: the first finds the maximum and the sum together.
template <class T, class Base>
void online_softmax(const T* x, int64_t size, T* y) {
  OnlineSoftmax<T, Base> state;
  for (int64_t i = 0; i < size; ++i) state.absorb(x[i]);
  for (int64_t i = 0; i < size; ++i) y[i] = state.weight(x[i]) / state.sum;
}

}  // namespace flash_online
