#include "../../../core/scratch.h"
#include "../../hw/launch.h"
#include "mask_map.cuh"
#include "mask_tile.cuh"

namespace flash_online::cuda {

namespace {

struct MaskMapArguments {
  AttentionProblem problem;
  MaskMap map;                // without data: only the sizes count
  MaskBits bits;              // without data: not wanted
  unsigned* transposed_bits;  // TransposedMaskBits of the map's sizes; null: not wanted
};

constexpr int kMapWarps = kMaskMapTile / kBitRows;

// Of a row's 64 bits, those of a lane's two columns out of every eight: bits 4 j and 4 j + 1 are the columns
// 8 j + 2 * lane_in_quad and the next.
__device__ __forceinline__ unsigned lane_bits(const unsigned (&row)[2], int lane_in_quad) {
  unsigned bits = 0;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    unsigned x = row[half] >> 2 * lane_in_quad & 0x03030303;
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

// read_bits() and read_bias() read a warp's rows of a tile: `rows` rows (none if 0 or less) of `keys` values, from `data` on.
// `vectors`: they are kBitRows rows of kMaskMapTile neighbouring, aligned values. `hidden` becomes false if a value shows a
// key, `clear` if a value hides a key or adds something.

// Reads a bool mask. row_bits: the 64 bits each of the rows lane / 4 and lane / 4 + 8.
__device__ __forceinline__ void read_bits(const HeadMask& mask, const char* data, int rows, int keys, bool vectors, int lane,
                                          unsigned (&row_bits)[2][2], bool& hidden, bool& clear) {
  if (vectors) {
    const uint4* const half_row = reinterpret_cast<const uint4*>(data + lane / 2 * mask.row_stride) + lane % 2 * 2;
    const uint4 a = half_row[0], b = half_row[1];
    const unsigned shown = bits_of_bytes(a.x) | bits_of_bytes(a.y) << 4 | bits_of_bytes(a.z) << 8 | bits_of_bytes(a.w) << 12 |
                           bits_of_bytes(b.x) << 16 | bits_of_bytes(b.y) << 20 | bits_of_bytes(b.z) << 24 |
                           bits_of_bytes(b.w) << 28;
    hidden = shown == 0;
    clear = shown == ~0u;
#pragma unroll
    for (int i = 0; i < 4; ++i) row_bits[i / 2][i % 2] = __shfl_sync(~0u, shown, (lane / 4 + i / 2 * 8) * 2 + i % 2);
  } else {
#pragma unroll 4
    for (int r = 0; r < rows; ++r) {
      unsigned shown_bits[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int c = lane + half * kWarpSize;
        const bool shown =
            c < keys && *reinterpret_cast<const unsigned char*>(data + r * mask.row_stride + c * mask.column_stride) != 0;
        hidden &= !shown;
        clear &= shown || c >= keys;
        shown_bits[half] = __ballot_sync(~0u, shown);
      }
      if (mask.row_stride == 0 || r % 8 == lane / 4) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          if (mask.row_stride == 0 || r < 8) row_bits[0][half] = shown_bits[half];
          if (mask.row_stride == 0 || r >= 8) row_bits[1][half] = shown_bits[half];
        }
      }
    }
  }
}

// Writes the CTA's tile of TransposedMaskBits. queries: 1 if all queries of the tile share a row.
__device__ __forceinline__ void store_transposed_bits(unsigned* words, const unsigned (&row_bits)[2][2], const int& first_row,
                                                      int lane, int queries) {
  __shared__ unsigned tile_bits[kMaskMapTile][2];
  if (lane % 4 == 0)
#pragma unroll
    for (int i = 0; i < 4; ++i) tile_bits[first_row + lane / 4 + i / 2 * 8][i % 2] = row_bits[i / 2][i % 2];
  __syncthreads();
  const int warp = first_row / kBitRows;
  unsigned word = 0;
#pragma unroll
  for (int j = 0; j < kMaskMapTile / 8; ++j)
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int r = queries == 1 ? 0 : 8 * j + lane % 4 * 2 + e;
      const unsigned keys_of_row = tile_bits[r][warp / 2] >> (warp % 2 * 16 + lane / 4);
      word |= (keys_of_row & 1) << (16 * e + 15 - TransposedMaskBits::place(j, 0)) |
              (keys_of_row >> 8 & 1) << (16 * e + 15 - TransposedMaskBits::place(j, 1));
    }
  words[int64_t{blockIdx.x} * TransposedMaskBits::kWords + threadIdx.x] = word;
}

// Reads a mask of floating-point values.
template <class T>
__device__ __forceinline__ void read_bias(const HeadMask& mask, const char* data, int rows, int keys, bool vectors, int lane,
                                          bool& hidden, bool& clear) {
  using Value = std::conditional_t<std::is_same_v<T, double>, double, float>;  // a large double is no infinity
  const auto examine = [&](Value x) {
    hidden &= x == -static_cast<Value>(INFINITY);
    clear &= x == 0;
  };
  if constexpr (!std::is_same_v<T, double>) {
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
        for (int i = 0; i < kPerVector<T>; ++i) examine(x[i]);
      }
      return;
    }
  }
  for (int r = 0; r < rows; ++r)
    for (int c = lane; c < (mask.column_stride == 0 ? 1 : keys); c += kWarpSize) {
      const T value = *reinterpret_cast<const T*>(data + r * mask.row_stride + c * mask.column_stride);
      if constexpr (std::is_same_v<T, double>)
        examine(value);
      else
        examine(widen(value));
    }
}

// One CTA per tile of the mask; a warp reads 16 rows.
__global__ void __launch_bounds__(kMapWarps* kWarpSize) mask_map_kernel(const __grid_constant__ MaskMapArguments arguments) {
  const AttentionProblem& problem = arguments.problem;
  const MaskMap& map = arguments.map;
  const MaskBits& bits = arguments.bits;
  int64_t index = blockIdx.x;
  const int64_t column = index % map.size[3], row = (index /= map.size[3]) % map.size[2],
                head = (index /= map.size[2]) % map.size[1], batch = index / map.size[1];
  const HeadMask mask(problem, batch, head);
  const int64_t query = row * kMaskMapTile, key = column * kMaskMapTile;
  const int queries =
      map.size[2] == 1 && mask.row_stride == 0 ? 1 : static_cast<int>(min(problem.queries - query, int64_t{kMaskMapTile}));
  const int keys = static_cast<int>(min(problem.keys - key, int64_t{kMaskMapTile}));
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize, first_row = static_cast<int>(threadIdx.x) / kWarpSize * kBitRows;
  const char* const data = mask.data + (query + first_row) * mask.row_stride + key * mask.column_stride;
  const int rows = min(queries - first_row, kBitRows);
  const bool vectors = rows == kBitRows && keys == kMaskMapTile && mask.column_stride == mask.bytes &&
                       mask.row_stride % kVectorBytes == 0 && misalignment(data) == 0;
  bool hidden = true, clear = true;
  visit_any_mask(mask.dtype, [&]<class T>(T) {
    if constexpr (std::is_same_v<T, bool>) {
      unsigned row_bits[2][2] = {};
      read_bits(mask, data, rows, keys, vectors, lane, row_bits, hidden, clear);
      if (arguments.transposed_bits) store_transposed_bits(arguments.transposed_bits, row_bits, first_row, lane, queries);
      const int64_t row_group = row * kMapWarps + first_row / kBitRows;
      if (bits.data && row_group < bits.size[2])
        bits.data[(((batch * bits.size[1] + head) * bits.size[2] + row_group) * bits.size[3] + column) * kWarpSize + lane] =
            lane_bits(row_bits[0], lane % 4) | lane_bits(row_bits[1], lane % 4) << 2;
    } else {
      read_bias<T>(mask, data, rows, keys, vectors, lane, hidden, clear);
    }
  });
  if (!map.data) return;
  hidden = __syncthreads_and(hidden);
  clear = __syncthreads_and(clear);
  if (threadIdx.x == 0)
    map.data[blockIdx.x] = static_cast<uint8_t>(hidden ? MaskKind::kHidden : clear ? MaskKind::kClear : MaskKind::kMixed);
}

int64_t tiles_of(int64_t count, int64_t stride, int64_t size) { return stride == 0 ? 1 : ceil_div(count, size); }

// The sizes of a table with one entry per `rows` rows and kMaskMapTile columns of the mask.
void set_sizes(int64_t (&size)[4], const AttentionProblem& problem, int64_t rows) {
  const ConstView4& mask = problem.mask;
  size[0] = mask.stride[0] == 0 ? 1 : problem.batch;
  size[1] = mask.stride[1] == 0 ? 1 : problem.heads;
  size[2] = tiles_of(problem.queries, mask.stride[2], rows);
  size[3] = tiles_of(problem.keys, mask.stride[3], kMaskMapTile);
}

void launch_mask_map(const MaskMapArguments& arguments, CUstream_st* stream) {
  launch<mask_map_kernel>(arguments, arguments.map.count(), kMapWarps * kWarpSize, 0, stream);
}

}  // namespace

MaskMap mask_map_of(const AttentionProblem& problem) {
  const ConstView4& mask = problem.mask;
  if (!mask.data) return {};
  // Reading a float mask once more pays only if heads share the mask: such a mask hides keys. One per head is a bias.
  if (problem.mask_dtype != DType::kBool && (mask.stride[1] != 0 || problem.heads == 1)) return {};
  MaskMap map;
  set_sizes(map.size, problem, kMaskMapTile);
  return map.size[2] * map.size[3] > 1 ? map : MaskMap{};
}

MaskMap map_of_list(const AttentionProblem& problem) {
  const auto& [data, stride] = problem.tiles;
  if (!data || problem.tile_keys != kMaskMapTile) return {};
  MaskMap map{
      .data = const_cast<uint8_t*>(data),
      .size = {problem.batch, problem.heads, ceil_div(problem.queries, kMaskMapTile), ceil_div(problem.keys, kMaskMapTile)},
      .is_list = true};
  int64_t step = 1;
  for (int i = 3; i >= 0; --i) {
    if (stride[i] == 0) map.size[i] = 1;
    if (map.size[i] != 1 && stride[i] != step) return {};
    step *= map.size[i];
  }
  return map;
}

void fill_mask_map(const AttentionProblem& problem, const MaskMap& map, CUstream_st* stream) {
  if (map.count() > 0 && !map.is_list)
    launch_mask_map({.problem = problem, .map = map, .bits = {}, .transposed_bits = nullptr}, stream);
}

MaskTables mask_tables_of(const AttentionProblem& problem, void* workspace) {
  MaskTables tables;
  tables.map = mask_map_of(problem);
  if (problem.mask.data && problem.mask_dtype == DType::kBool) set_sizes(tables.bits.size, problem, kBitRows);
  ScratchAllocator scratch(workspace);
  tables.bits.data = scratch.take<unsigned>(tables.bits.count());
  tables.map.data = scratch.take<uint8_t>(tables.map.count());
  return tables;
}

void fill_mask_tables(const AttentionProblem& problem, const MaskTables& tables, CUstream_st* stream) {
  if (tables.bits.count() == 0) return fill_mask_map(problem, tables.map, stream);
  MaskMap map = tables.map;  // a mask of a single tile has none, but the kernel needs its sizes
  if (map.count() == 0)
    for (int i = 0; i < 4; ++i) map.size[i] = i < 2 ? tables.bits.size[i] : 1;
  launch_mask_map({.problem = problem, .map = map, .bits = tables.bits, .transposed_bits = nullptr}, stream);
}

TransposedMaskBits transposed_mask_bits_of(const AttentionProblem& problem, void* workspace) {
  TransposedMaskBits bits;
  set_sizes(bits.size, problem, kMaskMapTile);
  bits.data = static_cast<unsigned*>(workspace);
  return bits;
}

void fill_transposed_mask_bits(const AttentionProblem& problem, const MaskMap& map, const TransposedMaskBits& bits,
                               CUstream_st* stream) {
  MaskMap sized = map;  // a mask of a single tile has no map, but the kernel needs its sizes
  for (int i = 0; i < 4; ++i) sized.size[i] = bits.size[i];
  launch_mask_map({.problem = problem, .map = sized, .bits = {}, .transposed_bits = bits.data}, stream);
}

}  // namespace flash_online::cuda
