#include "block_map.cuh"

#include "mask_block.cuh"

namespace flash_online::cuda {

namespace {

struct MapArguments {
  AttentionProblem problem;
  BlockMap map;
};

constexpr int kMapWarps = 4;

// A block of threads a block of the mask; a lane takes two columns of every fourth row.
__global__ void __launch_bounds__(kMapWarps * kWarp) block_map(const __grid_constant__ MapArguments arguments) {
  const AttentionProblem& problem = arguments.problem;
  const BlockMap& map = arguments.map;
  int64_t rest = blockIdx.x;
  const int64_t column = rest % map.size[3], row = (rest /= map.size[3]) % map.size[2], head = (rest /= map.size[2]) % map.size[1];
  const HeadMask mask(problem, rest / map.size[1], head);
  const int64_t query = row * kMapBlock, key = column * kMapBlock;
  const int queries = map.size[2] == 1 && mask.row_stride == 0 ? 1 : static_cast<int>(min(problem.queries - query, int64_t{kMapBlock}));
  const int keys = mask.column_stride == 0 ? 1 : static_cast<int>(min(problem.keys - key, int64_t{kMapBlock}));
  const char* const data = mask.data + query * mask.row_stride + key * mask.column_stride;
  bool hidden = true, nothing = true;
  visit_mask(mask.dtype, [&]<class T>(T) {
    for (int r = static_cast<int>(threadIdx.x) / kWarp; r < queries; r += kMapWarps)
      for (int c = static_cast<int>(threadIdx.x) % kWarp; c < keys; c += kWarp) {
        const char* const at = data + r * mask.row_stride + c * mask.column_stride;
        if constexpr (std::is_same_v<T, bool>) {
          const bool seen = *reinterpret_cast<const unsigned char*>(at) != 0;
          hidden &= !seen;
          nothing &= seen;
        } else {
          const float x = widen(*reinterpret_cast<const T*>(at));
          hidden &= x == -INFINITY;
          nothing &= x == 0;
        }
      }
  });
  hidden = __syncthreads_and(hidden);
  nothing = __syncthreads_and(nothing);
  if (threadIdx.x == 0)
    map.data[blockIdx.x] =
        static_cast<uint8_t>(hidden ? MaskKind::kHidden : nothing ? MaskKind::kNothing : MaskKind::kMixed);
}

}  // namespace

BlockMap block_map_of(const AttentionProblem& problem) {
  BlockMap map;
  const ConstView4& mask = problem.mask;
  const auto blocks = [](int64_t count, int64_t stride) { return stride == 0 ? 1 : (count + kMapBlock - 1) / kMapBlock; };
  if (!mask.data || blocks(problem.queries, mask.stride[2]) * blocks(problem.keys, mask.stride[3]) <= 1) return map;
  const int64_t planes = (mask.stride[0] == 0 ? 1 : problem.batch) * (mask.stride[1] == 0 ? 1 : problem.heads);
  // Reading a float mask twice pays where more than one head shares it.
  if (problem.mask_dtype != DType::kBool && planes * 2 > problem.batch * problem.heads) return map;
  map.size[0] = mask.stride[0] == 0 ? 1 : problem.batch;
  map.size[1] = mask.stride[1] == 0 ? 1 : problem.heads;
  map.size[2] = blocks(problem.queries, mask.stride[2]);
  map.size[3] = blocks(problem.keys, mask.stride[3]);
  return map;
}

void fill_block_map(const AttentionProblem& problem, const BlockMap& map, CUstream_st* stream) {
  if (map.count() > 0) launch<block_map>(MapArguments{problem, map}, map.count(), kMapWarps * kWarp, 0, stream);
}

}  // namespace flash_online::cuda
