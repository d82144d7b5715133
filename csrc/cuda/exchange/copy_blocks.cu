// Copies of blocks: a launch copies as many blocks as its arguments hold. A block's CTAs go over its units in the order of its
// dimensions, the last one fastest, so that neighbouring threads have neighbouring units.
#include <vector>

#include "../hw/launch.h"
#include "copy_blocks.h"

namespace flash_online::cuda {
namespace {

constexpr int kDims = BlockCopy::kDims, kThreads = 256;
constexpr int64_t kUnitsPerThread = 4, kMostUnits = int64_t{1} << 31;  // of a block: the kernel's indices have 32 bits

struct CopyArguments {
  static constexpr int kBlocks = 28;
  BlockCopy block[kBlocks];
};
static_assert(sizeof(CopyArguments) <= 4096);  // older drivers take no more

template <class Unit>
__device__ __forceinline__ void copy_units(const BlockCopy& block) {
  unsigned units = 1;
#pragma unroll
  for (int dim = 0; dim < kDims; ++dim) units *= static_cast<unsigned>(block.size[dim]);
  for (unsigned n = blockIdx.x * kThreads + threadIdx.x; n < units; n += gridDim.x * kThreads) {
    unsigned rest = n;
    int64_t from = 0, to = 0;
#pragma unroll
    for (int dim = kDims - 1; dim >= 0; --dim) {
      const auto size = static_cast<unsigned>(block.size[dim]);
      if (size == 1) continue;
      const unsigned outer = rest / size, index = rest - outer * size;
      from += index * block.from_stride[dim];
      to += index * block.to_stride[dim];
      rest = outer;
    }
    reinterpret_cast<Unit*>(block.to)[to] = reinterpret_cast<const Unit*>(block.from)[from];
  }
}

__global__ void __launch_bounds__(kThreads) copy_blocks_kernel(const __grid_constant__ CopyArguments arguments) {
  const BlockCopy& block = arguments.block[blockIdx.y];
  switch (block.unit) {
    case 16: return copy_units<uint4>(block);
    case 8: return copy_units<uint2>(block);
    case 4: return copy_units<unsigned>(block);
    case 2: return copy_units<unsigned short>(block);
    default: return copy_units<unsigned char>(block);
  }
}

// Adds a block, or the halves of one with too many units.
void add(std::vector<BlockCopy>& blocks, const BlockCopy& block) {
  if (block.units() < kMostUnits) return blocks.push_back(block);
  const int64_t dim = std::max_element(block.size, block.size + kDims) - block.size;
  BlockCopy half = block;
  half.size[dim] /= 2;
  add(blocks, half);
  half.from += half.size[dim] * block.from_stride[dim] * block.unit;
  half.to += half.size[dim] * block.to_stride[dim] * block.unit;
  half.size[dim] = block.size[dim] - half.size[dim];
  add(blocks, half);
}

}  // namespace

void copy_blocks(const BlockCopy* blocks, int64_t count, CUstream_st* stream) {
  std::vector<BlockCopy> all;
  for (int64_t n = 0; n < count; ++n) add(all, blocks[n]);
  for (size_t first = 0; first < all.size(); first += CopyArguments::kBlocks) {
    CopyArguments arguments;
    const size_t own = std::min<size_t>(all.size() - first, CopyArguments::kBlocks);
    std::copy_n(all.begin() + static_cast<int64_t>(first), own, arguments.block);
    int64_t most = 1;
    for (size_t n = 0; n < own; ++n) most = std::max(most, arguments.block[n].units());
    const dim3 grid(grid_for(ceil_div(most, kThreads * kUnitsPerThread), 16), static_cast<unsigned>(own));
    copy_blocks_kernel<<<grid, kThreads, 0, stream>>>(arguments);
    check_launch("copy_blocks");
  }
}

}  // namespace flash_online::cuda
