// Lists of blocks: the tiles that they name, and the lists of the blocks with the largest scores. A list is a warp's.
#include <cmath>

#include "../../../core/integer.h"
#include "../../hw/launch.h"
#include "../../hw/warp.h"
#include "../attention.h"

namespace flash_online::cuda {
namespace {

constexpr int kWarps = 4;

__global__ void __launch_bounds__(kWarps* kWarpSize) block_tiles_kernel(const __grid_constant__ BlockListProblem problem) {
  const int64_t list = int64_t{blockIdx.x} * kWarps + threadIdx.x / kWarpSize;
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  if (list >= problem.lists) return;
  uint8_t* const tiles = problem.tiles_of(list);
  const int64_t count = problem.row_tiles(list) * problem.key_tiles;
  const auto first = min(static_cast<int64_t>(-reinterpret_cast<uintptr_t>(tiles) % sizeof(uint4)), count),
             last = first + (count - first) / static_cast<int64_t>(sizeof(uint4)) * static_cast<int64_t>(sizeof(uint4));
  for (int64_t n = lane; n < first; n += kWarpSize) tiles[n] = 0;
  for (int64_t n = first + lane * static_cast<int64_t>(sizeof(uint4)); n < last; n += kWarpSize * sizeof(uint4))
    *reinterpret_cast<uint4*>(tiles + n) = {};
  for (int64_t n = last + lane; n < count; n += kWarpSize) tiles[n] = 0;
  __syncwarp();
  for (int64_t n = lane; n < problem.length(list); n += kWarpSize) problem.set(list, n);
}

// Keys of scores, in their order as unsigned numbers; 0: not to be chosen.
__device__ __forceinline__ unsigned key_of(float score) {
  if (!(score > -INFINITY)) return 0;
  const unsigned bits = __float_as_uint(score);
  return bits >> 31 ? ~bits : bits | 1u << 31;
}

constexpr int kCachedKeys = 2048;  // of a list, in shared memory

// Finds the least key that is chosen, bit by bit, from how many keys are at least as large as a candidate. Of equal ones the
// first blocks are chosen.
__global__ void __launch_bounds__(kWarps* kWarpSize) block_topk_kernel(const __grid_constant__ BlockTopkProblem problem) {
  const int64_t list = int64_t{blockIdx.x} * kWarps + threadIdx.x / kWarpSize;
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize, blocks = static_cast<int>(problem.key_blocks),
            k = static_cast<int>(problem.k);
  if (list >= problem.lists) return;
  const float* const scores = problem.scores + list * problem.key_blocks;
  const int own = problem.causal ? static_cast<int>(problem.own(list)) : -1, end = problem.causal ? own + 1 : blocks;
  const auto read_key = [&](int block) { return block >= end ? 0u : block == own ? ~0u : key_of(scores[block]); };
  extern __shared__ unsigned all_keys[];
  unsigned* const keys = all_keys + threadIdx.x / kWarpSize * blocks;
  const bool cached = blocks <= kCachedKeys;
  if (cached)
    for (int block = lane; block < blocks; block += kWarpSize) keys[block] = read_key(block);  // a lane reads its own again
  const auto key_at = [&](int block) { return cached && block < blocks ? keys[block] : read_key(block); };
  const auto count_from = [&](unsigned least) {
    int count = 0;
#pragma unroll 4
    for (int block = lane; block < end; block += kWarpSize) count += key_at(block) >= least;
    return static_cast<int>(__reduce_add_sync(~0u, static_cast<unsigned>(count)));
  };
  // With fewer than k keys above 0, all of them are chosen.
  unsigned least = 0;
  for (int bit = 31; bit >= 0; --bit)
    if (count_from(least | 1u << bit) >= k) least |= 1u << bit;
  int equal = least == 0 ? 0 : k - (least == ~0u ? 0 : count_from(least + 1));  // how many of the least are chosen
  int count = 0;
  int32_t* const indices = problem.indices + list * k;
  const unsigned before = (1u << lane) - 1;
  for (int first = 0; first < end; first += kWarpSize) {
    const unsigned key = key_at(first + lane);
    const unsigned ties = __ballot_sync(~0u, least > 0 && key == least);
    const bool is_chosen = key > least || (ties >> lane & 1 && __popc(ties & before) < equal);
    const unsigned chosen = __ballot_sync(~0u, is_chosen);
    if (is_chosen) indices[count + __popc(chosen & before)] = first + lane;
    count += __popc(chosen);
    equal -= min(__popc(ties), equal);
  }
  for (int n = count + lane; n < k; n += kWarpSize) indices[n] = blocks;
  if (lane == 0) problem.counts[list] = count;
}

}  // namespace

void block_topk(const BlockTopkProblem& problem, CUstream_st* stream) {
  const int64_t cached_keys = problem.key_blocks <= kCachedKeys ? kWarps * problem.key_blocks : 0;
  launch<block_topk_kernel>(problem, ceil_div(problem.lists, int64_t{kWarps}), kWarps * kWarpSize,
                            static_cast<int>(cached_keys * sizeof(unsigned)), stream);
}

void fill_block_tiles(const BlockListProblem& problem, CUstream_st* stream) {
  launch<block_tiles_kernel>(problem, ceil_div(problem.lists, int64_t{kWarps}), kWarps * kWarpSize, 0, stream);
}

}  // namespace flash_online::cuda
