// Turns run-time values into compile-time types and constants.
#pragma once

#include <type_traits>
#include <utility>

#include "problem.h"

namespace flash_online {

template <class T>
struct Type {
  using type = T;
};

// Calls f(Type<T>{}) with the element type of a floating dtype. The caller passes its own Float16 and BFloat16, as host and
// device have different ones. Returns false if the dtype is not floating.
template <class Float16, class BFloat16, class F>
inline __attribute__((always_inline)) bool visit_floating(DType dtype, F&& f) {
  switch (dtype) {
    case DType::kFloat16: f(Type<Float16>{}); return true;
    case DType::kBFloat16: f(Type<BFloat16>{}); return true;
    case DType::kFloat32: f(Type<float>{}); return true;
    case DType::kFloat64: f(Type<double>{}); return true;
    default: return false;
  }
}

// Calls f(std::true_type) or f(std::false_type).
template <class F>
inline __attribute__((always_inline)) void visit_bool(bool value, F&& f) {
  if (value)
    f(std::true_type{});
  else
    f(std::false_type{});
}

// Calls f(std::integral_constant<int, n>), or f of the constant 0 if n is not in [1, kMost].
template <int kMost, class F>
inline __attribute__((always_inline)) void visit_up_to(int64_t n, const F& f) {
  if constexpr (kMost > 0)
    if (n != kMost) return visit_up_to<kMost - 1>(n, f);
  f(std::integral_constant<int, kMost>());
}

}  // namespace flash_online
