#include "block_map.cuh"
#include "mask_block.cuh"

namespace flash_online::cuda {

namespace {

struct MapArguments {
  AttentionProblem problem;
  BlockMap map;  // sizes alone: not wanted
  MaskBits bits;
};

constexpr int kMapWarps = kMapBlock / kBitRows;

// Of a row's 64 bits, the word's share that belongs to a lane's two columns of every eight.
__device__ __forceinline__ unsigned lane_bits(const unsigned (&row)[2], int place) {
  unsigned bits = 0;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    unsigned x = row[half] >> 2 * place & 0x03030303;
    x = (x | x >> 4) & 0x00330033;
    x = (x | x >> 8) & 0x3333;
    bits |= x << 16 * half;
  }
  return bits;
}

// A block of threads a block of the mask, 16 rows a warp; a lane takes two columns.
__global__ void __launch_bounds__(kMapWarps* kWarp) block_map(const __grid_constant__ MapArguments arguments) {
  const AttentionProblem& problem = arguments.problem;
  const BlockMap& map = arguments.map;
  const MaskBits& words = arguments.bits;
  int64_t rest = blockIdx.x;
  const int64_t column = rest % map.size[3], row = (rest /= map.size[3]) % map.size[2],
                head = (rest /= map.size[2]) % map.size[1], batch = rest / map.size[1];
  const HeadMask mask(problem, batch, head);
  const int64_t query = row * kMapBlock, key = column * kMapBlock;
  const int queries =
      map.size[2] == 1 && mask.row_stride == 0 ? 1 : static_cast<int>(min(problem.queries - query, int64_t{kMapBlock}));
  const int keys = static_cast<int>(min(problem.keys - key, int64_t{kMapBlock}));
  const char* const data = mask.data + query * mask.row_stride + key * mask.column_stride;
  const int lane = static_cast<int>(threadIdx.x) % kWarp, first = static_cast<int>(threadIdx.x) / kWarp * kBitRows;
  bool hidden = true, nothing = true;
  visit_mask(mask.dtype, [&]<class T>(T) {
    if constexpr (std::is_same_v<T, bool>) {
      unsigned own[2][2] = {};  // of the lane's two rows
#pragma unroll 4
      for (int r = 0; r < min(queries - first, kBitRows); ++r) {
        unsigned seen[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int c = lane + half * kWarp;
          const bool shown = c < keys && *reinterpret_cast<const unsigned char*>(data + (first + r) * mask.row_stride +
                                                                                 c * mask.column_stride) != 0;
          hidden &= !shown;
          nothing &= shown || c >= keys;
          seen[half] = __ballot_sync(~0u, shown);
        }
        if (mask.row_stride == 0 || r % 8 == lane / 4) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            if (mask.row_stride == 0 || r < 8) own[0][half] = seen[half];
            if (mask.row_stride == 0 || r >= 8) own[1][half] = seen[half];
          }
        }
      }
      const int64_t group = row * kMapWarps + first / kBitRows;
      if (words.data && group < words.size[2])
        words.data[(((batch * words.size[1] + head) * words.size[2] + group) * words.size[3] + column) * kWarp + lane] =
            lane_bits(own[0], lane % 4) | lane_bits(own[1], lane % 4) << 2;
    } else {
      for (int r = first; r < min(queries, first + kBitRows); ++r)
        for (int c = lane; c < (mask.column_stride == 0 ? 1 : keys); c += kWarp) {
          const float x = widen(*reinterpret_cast<const T*>(data + r * mask.row_stride + c * mask.column_stride));
          hidden &= x == -INFINITY;
          nothing &= x == 0;
        }
    }
  });
  if (!map.data) return;
  hidden = __syncthreads_and(hidden);
  nothing = __syncthreads_and(nothing);
  if (threadIdx.x == 0)
    map.data[blockIdx.x] = static_cast<uint8_t>(hidden ? MaskKind::kHidden : nothing ? MaskKind::kNothing : MaskKind::kMixed);
}

int64_t blocks_of(int64_t count, int64_t stride, int64_t size) { return stride == 0 ? 1 : (count + size - 1) / size; }

}  // namespace

BlockMap block_map_of(const AttentionProblem& problem) {
  BlockMap map;
  const ConstView4& mask = problem.mask;
  const int64_t rows = blocks_of(problem.queries, mask.stride[2], kMapBlock),
                columns = blocks_of(problem.keys, mask.stride[3], kMapBlock);
  if (!mask.data || rows * columns <= 1) return map;
  const int64_t planes = (mask.stride[0] == 0 ? 1 : problem.batch) * (mask.stride[1] == 0 ? 1 : problem.heads);
  // Reading a float mask twice pays where more than one head shares it.
  if (problem.mask_dtype != DType::kBool && planes * 2 > problem.batch * problem.heads) return map;
  map.size[0] = mask.stride[0] == 0 ? 1 : problem.batch;
  map.size[1] = mask.stride[1] == 0 ? 1 : problem.heads;
  map.size[2] = rows;
  map.size[3] = columns;
  return map;
}

void fill_block_map(const AttentionProblem& problem, const BlockMap& map, CUstream_st* stream) {
  if (map.count() > 0) launch<block_map>(MapArguments{problem, map, {}}, map.count(), kMapWarps * kWarp, 0, stream);
}

MaskTables mask_tables_of(const AttentionProblem& problem, void* workspace) {
  MaskTables tables;
  const ConstView4& mask = problem.mask;
  tables.map = block_map_of(problem);
  if (mask.data && problem.mask_dtype == DType::kBool) {
    tables.bits.size[0] = mask.stride[0] == 0 ? 1 : problem.batch;
    tables.bits.size[1] = mask.stride[1] == 0 ? 1 : problem.heads;
    tables.bits.size[2] = blocks_of(problem.queries, mask.stride[2], kBitRows);
    tables.bits.size[3] = blocks_of(problem.keys, mask.stride[3], kMapBlock);
  }
  if (tables.bits.count() > 0) tables.bits.data = static_cast<unsigned*>(workspace);
  if (tables.map.count() > 0)
    tables.map.data = reinterpret_cast<uint8_t*>(static_cast<unsigned*>(workspace) + tables.bits.count());
  return tables;
}

void fill_mask_tables(const AttentionProblem& problem, const MaskTables& tables, CUstream_st* stream) {
  if (tables.bits.count() == 0) return fill_block_map(problem, tables.map, stream);
  BlockMap map = tables.map;  // a mask of one block has none
  if (map.count() == 0)
    for (int i = 0; i < 4; ++i) map.size[i] = i < 2 ? tables.bits.size[i] : 1;
  launch<block_map>(MapArguments{problem, map, tables.bits}, map.count(), kMapWarps * kWarp, 0, stream);
}

}  // namespace flash_online::cuda
