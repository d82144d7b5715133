#include "mask_map.cuh"
#include "mask_tile.cuh"

namespace flash_online::cuda {

namespace {

struct MapArguments {
  AttentionProblem problem;
  MaskMap map;  // sizes alone: not wanted
  MaskBits bits;
  unsigned* turned;  // TransposedMaskBits, of the map's sizes; null: not wanted
};

constexpr int kMapWarps = kMaskMapTile / kBitRows;

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

// Four bytes to four bits, set where a byte is not 0.
__device__ __forceinline__ unsigned bits_of_bytes(unsigned bytes) {
  return (__vcmpne4(bytes, 0) & 0x01010101) * 0x10204080 >> 28;
}

// A block of threads a block of the mask, 16 rows a warp.
__global__ void __launch_bounds__(kMapWarps* kWarpSize) block_map(const __grid_constant__ MapArguments arguments) {
  const AttentionProblem& problem = arguments.problem;
  const MaskMap& map = arguments.map;
  const MaskBits& words = arguments.bits;
  int64_t rest = blockIdx.x;
  const int64_t column = rest % map.size[3], row = (rest /= map.size[3]) % map.size[2],
                head = (rest /= map.size[2]) % map.size[1], batch = rest / map.size[1];
  const HeadMask mask(problem, batch, head);
  const int64_t query = row * kMaskMapTile, key = column * kMaskMapTile;
  const int queries =
      map.size[2] == 1 && mask.row_stride == 0 ? 1 : static_cast<int>(min(problem.queries - query, int64_t{kMaskMapTile}));
  const int keys = static_cast<int>(min(problem.keys - key, int64_t{kMaskMapTile}));
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize, first = static_cast<int>(threadIdx.x) / kWarpSize * kBitRows;
  const char* const data = mask.data + (query + first) * mask.row_stride + key * mask.column_stride;
  const int rows = min(queries - first, kBitRows);  // of the warp, below 1 if there is none
  const bool vectors = rows == kBitRows && keys == kMaskMapTile && mask.column_stride == mask.bytes &&
                       mask.row_stride % kVectorBytes == 0 && misalignment(data) == 0;
  bool hidden = true, nothing = true;
  visit_mask(mask.dtype, [&]<class T>(T) {
    if constexpr (std::is_same_v<T, bool>) {
      unsigned own[2][2] = {};  // of the lane's two rows
      if (vectors) {
        const uint4* const half_row = reinterpret_cast<const uint4*>(data + lane / 2 * mask.row_stride) + lane % 2 * 2;
        const uint4 a = half_row[0], b = half_row[1];
        const unsigned seen = bits_of_bytes(a.x) | bits_of_bytes(a.y) << 4 | bits_of_bytes(a.z) << 8 |
                              bits_of_bytes(a.w) << 12 | bits_of_bytes(b.x) << 16 | bits_of_bytes(b.y) << 20 |
                              bits_of_bytes(b.z) << 24 | bits_of_bytes(b.w) << 28;
        hidden = seen == 0;
        nothing = seen == ~0u;
#pragma unroll
        for (int i = 0; i < 4; ++i) own[i / 2][i % 2] = __shfl_sync(~0u, seen, (lane / 4 + i / 2 * 8) * 2 + i % 2);
      } else {
#pragma unroll 4
        for (int r = 0; r < rows; ++r) {
          unsigned seen[2];
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const int c = lane + half * kWarpSize;
            const bool shown =
                c < keys && *reinterpret_cast<const unsigned char*>(data + r * mask.row_stride + c * mask.column_stride) != 0;
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
      }
      if (arguments.turned) {
        __shared__ unsigned rows_bits[kMaskMapTile][2];
        if (lane % 4 == 0)
#pragma unroll
          for (int i = 0; i < 4; ++i) rows_bits[first + lane / 4 + i / 2 * 8][i % 2] = own[i / 2][i % 2];
        __syncthreads();
        const int warp = first / kBitRows;
        unsigned turned = 0;
#pragma unroll
        for (int j = 0; j < kMaskMapTile / 8; ++j)
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const int r = queries == 1 ? 0 : 8 * j + lane % 4 * 2 + e;
            const unsigned keys_of_row = rows_bits[r][warp / 2] >> (warp % 2 * 16 + lane / 4);
            turned |= (keys_of_row & 1) << (16 * e + 15 - TransposedMaskBits::place(j, 0)) |
                      (keys_of_row >> 8 & 1) << (16 * e + 15 - TransposedMaskBits::place(j, 1));
          }
        arguments.turned[int64_t{blockIdx.x} * TransposedMaskBits::kWords + threadIdx.x] = turned;
      }
      const int64_t group = row * kMapWarps + first / kBitRows;
      if (words.data && group < words.size[2])
        words.data[(((batch * words.size[1] + head) * words.size[2] + group) * words.size[3] + column) * kWarpSize + lane] =
            lane_bits(own[0], lane % 4) | lane_bits(own[1], lane % 4) << 2;
    } else {
      const auto look = [&](float x) {
        hidden &= x == -INFINITY;
        nothing &= x == 0;
      };
      if (vectors) {
        constexpr int kRowVectors = kMaskMapTile / kPerVector<T>, kVectors = kBitRows * kRowVectors / kWarpSize;
        uint4 v[kVectors];
#pragma unroll
        for (int n = 0; n < kVectors; ++n) {
          const int i = n * kWarpSize + lane;
          v[n] = reinterpret_cast<const uint4*>(data + i / kRowVectors * mask.row_stride)[i % kRowVectors];
        }
#pragma unroll
        for (int n = 0; n < kVectors; ++n) {
          float x[kPerVector<T>];
          unpack<T>(v[n], x);
#pragma unroll
          for (int i = 0; i < kPerVector<T>; ++i) look(x[i]);
        }
      } else {
        for (int r = 0; r < rows; ++r)
          for (int c = lane; c < (mask.column_stride == 0 ? 1 : keys); c += kWarpSize)
            look(widen(*reinterpret_cast<const T*>(data + r * mask.row_stride + c * mask.column_stride)));
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

// Of what is made of a mask, for blocks of so many rows and of kMaskMapTile columns.
void set_sizes(int64_t (&size)[4], const AttentionProblem& problem, int64_t rows) {
  const ConstView4& mask = problem.mask;
  size[0] = mask.stride[0] == 0 ? 1 : problem.batch;
  size[1] = mask.stride[1] == 0 ? 1 : problem.heads;
  size[2] = blocks_of(problem.queries, mask.stride[2], rows);
  size[3] = blocks_of(problem.keys, mask.stride[3], kMaskMapTile);
}

}  // namespace

MaskMap mask_map_of(const AttentionProblem& problem) {
  const ConstView4& mask = problem.mask;
  if (!mask.data) return {};
  // One more pass over a float mask pays where heads share it: that hides keys. One that differs from head to head is a bias.
  if (problem.mask_dtype != DType::kBool && (mask.stride[1] != 0 || problem.heads == 1)) return {};
  MaskMap map;
  set_sizes(map.size, problem, kMaskMapTile);
  return map.size[2] * map.size[3] > 1 ? map : MaskMap{};
}

void fill_mask_map(const AttentionProblem& problem, const MaskMap& map, CUstream_st* stream) {
  if (map.count() > 0)
    launch<block_map>(MapArguments{problem, map, {}, nullptr}, map.count(), kMapWarps * kWarpSize, 0, stream);
}

MaskTables mask_tables_of(const AttentionProblem& problem, void* workspace) {
  MaskTables tables;
  tables.map = mask_map_of(problem);
  if (problem.mask.data && problem.mask_dtype == DType::kBool) set_sizes(tables.bits.size, problem, kBitRows);
  if (tables.bits.count() > 0) tables.bits.data = static_cast<unsigned*>(workspace);
  if (tables.map.count() > 0)
    tables.map.data = reinterpret_cast<uint8_t*>(static_cast<unsigned*>(workspace) + tables.bits.count());
  return tables;
}

void fill_mask_tables(const AttentionProblem& problem, const MaskTables& tables, CUstream_st* stream) {
  if (tables.bits.count() == 0) return fill_mask_map(problem, tables.map, stream);
  MaskMap map = tables.map;  // a mask of one block has none
  if (map.count() == 0)
    for (int i = 0; i < 4; ++i) map.size[i] = i < 2 ? tables.bits.size[i] : 1;
  launch<block_map>(MapArguments{problem, map, tables.bits, nullptr}, map.count(), kMapWarps * kWarpSize, 0, stream);
}

TransposedMaskBits transposed_mask_bits_of(const AttentionProblem& problem, void* workspace) {
  TransposedMaskBits bits;
  set_sizes(bits.size, problem, kMaskMapTile);
  bits.data = static_cast<unsigned*>(workspace);
  return bits;
}

void fill_transposed_mask_bits(const AttentionProblem& problem, const MaskMap& map, const TransposedMaskBits& bits,
                               CUstream_st* stream) {
  MaskMap sizes = map;  // a mask of one block has no map
  for (int i = 0; i < 4; ++i) sizes.size[i] = bits.size[i];
  launch<block_map>(MapArguments{problem, sizes, {}, bits.data}, sizes.count(), kMapWarps * kWarpSize, 0, stream);
}

}  // namespace flash_online::cuda
