// The size of a warp, for code that host and device compile.
#pragma once

namespace flash_online::cuda {

constexpr int kWarpSize = 32;  // threads

}  // namespace flash_online::cuda
