// Lists of blocks: the tiles that they name, means of blocks, and the lists of the blocks with the largest scores. A list is a
// warp's, and a mean is a CTA's.
#include <cmath>
#include <type_traits>

#include "../../../core/integer.h"
#include "../../hw/compiler.cuh"
#include "../../hw/launch.h"
#include "../../hw/vector.cuh"
#include "../../hw/warp.h"
#include "../attention.h"
#include "../common/visit_element.cuh"

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

constexpr int kMeansThreads = 256;

// The mean of a block's rows. Each thread adds up some rows of neighbouring columns, kVector of them; then threads with the
// same columns are added up in shared memory, in the order of their rows.
template <class T, int kVector>
__global__ void __launch_bounds__(kMeansThreads) block_means_kernel(const __grid_constant__ BlockMeansProblem problem) {
  const auto blocks_of = [&](const BlockMeans& of) { return ceil_div(of.count, of.size); };
  const int64_t of_queries = problem.batch * problem.of[0].heads * blocks_of(problem.of[0]);
  const bool over_keys = blockIdx.x >= of_queries;
  const BlockMeans& of = problem.of[over_keys];
  const int64_t index = over_keys ? blockIdx.x - of_queries : blockIdx.x, blocks = blocks_of(of), plane = index / blocks,
                first = index % blocks * of.size;
  const int rows = static_cast<int>(min(of.count - first, of.size)), width = static_cast<int>(problem.width);
  const auto& stride = of.rows.stride;
  const T* const from =
      static_cast<const T*>(of.rows.data) + plane / of.heads * stride[0] + plane % of.heads * stride[1] + first * stride[2];
  // Columns are taken so many at a time, each by so many threads.
  const int across = min((width + kVector - 1) / kVector, kMeansThreads), down = kMeansThreads / across;
  const int thread = static_cast<int>(threadIdx.x), own_row = thread / across;
  __shared__ float partial[kMeansThreads * kVector];
  for (int begin = 0; begin < width; begin += across * kVector) {
    const int column = begin + thread % across * kVector;
    float sum[kVector] = {};
    if (own_row < down && column < width) {
      const T* at = from + own_row * stride[2] + column * stride[3];
      const int64_t step = down * stride[2];
      if constexpr (kVector == 1) {
        for (int row = own_row; row < rows; row += down, at += step) sum[0] += widen(*at);
      } else {
        constexpr int kAtOnce = 8;  // reads on their way
        for (int row = own_row; row < rows; row += kAtOnce * down) {
          unsigned words[kAtOnce][4];
#pragma unroll
          for (int n = 0; n < kAtOnce; ++n, at += step) {
            const uint4 read = row + n * down < rows ? __ldcs(reinterpret_cast<const uint4*>(at)) : uint4{};
            words[n][0] = read.x, words[n][1] = read.y, words[n][2] = read.z, words[n][3] = read.w;
          }
          fence_registers(words);  // else the compiler waits for each read before the next, to save registers
#pragma unroll
          for (const auto& [x, y, z, w] : words)
#pragma unroll
            for (int e = 0; e < kVector; ++e) sum[e] += widen(element<T>(uint4{x, y, z, w}, e));
        }
      }
    }
#pragma unroll
    for (int e = 0; e < kVector; ++e) partial[e * kMeansThreads + thread] = sum[e];
    __syncthreads();
    for (int n = thread; n < across * kVector && begin + n < width; n += kMeansThreads) {
      float total = 0;
      for (int row = 0; row < down; ++row) total += partial[n % kVector * kMeansThreads + row * across + n / kVector];
      of.means[index * width + begin + n] = total / static_cast<float>(rows);
    }
    __syncthreads();
  }
}

// Keys of scores, in their order as unsigned numbers; 0: not to be chosen.
__device__ __forceinline__ unsigned key_of(float score) {
  if (!(score > -INFINITY)) return 0;
  const unsigned bits = __float_as_uint(score);
  return bits >> 31 ? ~bits : bits | 1u << 31;
}

// A list's keys: those of a lane in registers, kPerLane of them, or read from memory each time (kPerLane = 0).
template <int kPerLane>
struct ListKeys {
  const float* scores;
  int own, end;  // the block that is always chosen, or -1; no block from `end` on is
  unsigned of_lane[kPerLane > 0 ? kPerLane : 1];

  __device__ __forceinline__ unsigned read(int block) const {
    return block >= end ? 0 : block == own ? ~0u : key_of(scores[block]);
  }
  __device__ __forceinline__ void load(int lane) {
#pragma unroll
    for (int n = 0; n < kPerLane; ++n) of_lane[n] = read(n * kWarpSize + lane);
  }
  // How many keys are at least as large.
  __device__ __forceinline__ int count_from(unsigned least, int lane) const {
    unsigned count = 0;
    if constexpr (kPerLane > 0) {
#pragma unroll
      for (int n = 0; n < kPerLane; ++n) count += of_lane[n] >= least;
    } else {
#pragma unroll 4
      for (int block = lane; block < end; block += kWarpSize) count += read(block) >= least;
    }
    return static_cast<int>(__reduce_add_sync(~0u, count));
  }
  // Calls f(first, key) for each 32 blocks from `first` on, with the lane's key.
  template <class F>
  __device__ __forceinline__ void for_each(int lane, const F& f) const {
    if constexpr (kPerLane > 0) {
#pragma unroll
      for (int n = 0; n < kPerLane; ++n) f(n * kWarpSize, of_lane[n]);
    } else {
      for (int first = 0; first < end; first += kWarpSize) f(first, read(first + lane));
    }
  }
};

// Finds the least key that is chosen, bit by bit, from how many keys are at least as large as a candidate. Of equal ones the
// first blocks are chosen.
template <int kPerLane>
__global__ void __launch_bounds__(kWarps* kWarpSize) block_topk_kernel(const __grid_constant__ BlockTopkProblem problem) {
  const int64_t list = int64_t{blockIdx.x} * kWarps + threadIdx.x / kWarpSize;
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize, blocks = static_cast<int>(problem.key_blocks),
            k = static_cast<int>(problem.k);
  if (list >= problem.lists) return;
  const int own = problem.causal ? static_cast<int>(problem.own(list)) : -1;
  ListKeys<kPerLane> keys{problem.scores + list * problem.key_blocks, own, problem.causal ? own + 1 : blocks, {}};
  keys.load(lane);
  // With fewer than k keys above 0, all of them are chosen, and `least` stays 0.
  unsigned least = 0;
  int equal = 0;  // how many keys equal to `least` are chosen
  bool found = false;
  for (int bit = 31; bit >= 0 && !found; --bit) {
    const int count = keys.count_from(least | 1u << bit, lane);
    if (count >= k) least |= 1u << bit;
    found = count == k;  // these are chosen, whatever the other bits
  }
  if (found)
    equal = k;
  else if (least > 0)
    equal = k - (least == ~0u ? 0 : keys.count_from(least + 1, lane));
  int count = 0;
  int32_t* const indices = problem.indices + list * k;
  const unsigned before = (1u << lane) - 1;
  keys.for_each(lane, [&](int first, unsigned key) {
    const unsigned ties = __ballot_sync(~0u, least > 0 && key == least);
    const bool is_chosen = key > least || (ties >> lane & 1 && __popc(ties & before) < equal);
    const unsigned chosen = __ballot_sync(~0u, is_chosen);
    if (is_chosen) indices[count + __popc(chosen & before)] = first + lane;
    count += __popc(chosen);
    equal -= min(__popc(ties), equal);
  });
  for (int n = count + lane; n < k; n += kWarpSize) indices[n] = blocks;
  if (lane == 0) problem.counts[list] = count;
}

}  // namespace

void block_topk(const BlockTopkProblem& problem, CUstream_st* stream) {
  const auto start = [&](auto per_lane) {
    launch<block_topk_kernel<per_lane()>>(problem, ceil_div(problem.lists, int64_t{kWarps}), kWarps * kWarpSize, 0, stream);
  };
  const int64_t per_lane = ceil_div(problem.key_blocks, int64_t{kWarpSize});
  if (per_lane <= 8)
    start(std::integral_constant<int, 8>{});
  else if (per_lane <= 16)
    start(std::integral_constant<int, 16>{});
  else if (per_lane <= 64)
    start(std::integral_constant<int, 64>{});
  else
    start(std::integral_constant<int, 0>{});
}

void block_means(const BlockMeansProblem& problem, CUstream_st* stream) {
  const auto start = [&]<class T>(Type<T>) {
    constexpr int kVector = kPerVector<T>;
    int64_t ctas = 0;
    bool vectors = problem.width % kVector == 0;
    for (const BlockMeans& of : problem.of) {
      ctas += problem.batch * of.heads * ceil_div(of.count, of.size);
      const auto& [data, stride] = of.rows;
      vectors &= (stride[3] == 1 || problem.width == 1) && reinterpret_cast<uintptr_t>(data) % kVectorBytes == 0;
      for (int i = 0; i < 3; ++i) vectors &= stride[i] % kVector == 0;
    }
    if (ctas == 0) return;
    if (vectors)
      launch<block_means_kernel<T, kVector>>(problem, ctas, kMeansThreads, 0, stream);
    else
      launch<block_means_kernel<T, 1>>(problem, ctas, kMeansThreads, 0, stream);
  };
  visit_element(problem.dtype, start);
}

void fill_block_tiles(const BlockListProblem& problem, CUstream_st* stream) {
  launch<block_tiles_kernel>(problem, ceil_div(problem.lists, int64_t{kWarps}), kWarps * kWarpSize, 0, stream);
}

}  // namespace flash_online::cuda
