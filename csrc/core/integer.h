// Integer arithmetic that sizes of tiles, grids and workspaces are made with.
#pragma once

#include "config.h"

namespace flash_online {

// a / b rounded up, and the least multiple of b that is at least a; for a >= 0 and b > 0 of any integer types.
template <class A, class B>
FLASH_ONLINE_HD constexpr auto ceil_div(A a, B b) {
  return (a + b - 1) / b;
}
template <class A, class B>
FLASH_ONLINE_HD constexpr auto round_up(A a, B b) {
  return ceil_div(a, b) * b;
}

}  // namespace flash_online
