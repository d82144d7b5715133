// The host side of the Hopper kernel of e4m3 attention: what it refuses, its workspace, the launch.
#pragma once

#include "../../float8/quantise.cuh"
#include "../../kernels.h"
#include "kernel.cuh"

namespace flash_online::cuda {

// In the order in which a kernel does more: it takes each problem of those before it.
enum class Float8Features { kUnbounded, kBounded, kOptions };

template <int kHeadDim, Float8Features kFeatures>
struct Float8Variant {
  static constexpr Float8Tile kTile = float8_tile(kHeadDim);
  static constexpr bool kBounded = kFeatures != Float8Features::kUnbounded, kOptions = kFeatures == Float8Features::kOptions;
};

template <class Out, class Variant>
void launch_float8_sm90(const AttentionProblem& p, const Float8Operands& operands, const SpanTables& tables,
                        unsigned* tile_counter, cudaStream_t stream) {
  using Kernel = Float8Sm90Kernel<Out, Variant>;
  const auto tensor = [&](const Float8Rows& all, int64_t heads, int box_rows) {
    return make_tma_tensor(all.view, TmaElement::kByte, p.batch, p.heads, heads, all.rows, all.columns, box_rows);
  };
  const int64_t row_tiles = ceil_div(p.queries, int64_t{Kernel::kRows}), tiles = p.batch * p.heads * row_tiles;
  Float8Arguments a{
      .query = tensor(operands.query, p.heads, Kernel::kRows),
      .key = tensor(operands.key, p.key_heads, Kernel::kKeys),
      .value = tensor(operands.value, p.key_heads, Kernel::kTile.head_dim),
      .problem = p,
      .batch = static_cast<int>(p.batch),
      .heads = static_cast<int>(p.heads),
      .schedule = TileSchedule::make(p, row_tiles, Kernel::kRows, 2, static_cast<int>(p.heads / p.key_heads), 1, sm_count()),
      .tables = tables,
      .tile_counter = tile_counter,
      .operands = operands,
      .stores_vectors =
          p.head_dim_v % 8 == 0 && is_tma_compatible(p.out.data, p.out.stride, p.batch, p.heads, p.queries, p.head_dim_v),
  };
  launch<attention_float8_sm90<Out, Variant>>(a, std::min(tiles, int64_t{sm_count()}), Kernel::kThreads,
                                              static_cast<int>(sizeof(typename Kernel::Shared)), stream, true);
}

constexpr int64_t kTileCounterBytesFloat8 = 16;

template <int kHeadDim>
const char* AttentionFloat8Sm90<kHeadDim>::refusal(const Float8Pass& pass, const Gpu& gpu) {
  constexpr int64_t kMost = int64_t{1} << 30;
  const AttentionProblem& p = pass.problem.attention;
  if (gpu.major != 9) return "the GPU's compute capability is not 9.0";
  if (p.keys > kMost || p.heads / p.key_heads * p.queries > kMost || p.batch * p.heads * (p.queries / 64 + 1) > kMost)
    return "a size beyond 32-bit indices";
  return nullptr;
}

template <int kHeadDim>
int64_t AttentionFloat8Sm90<kHeadDim>::workspace_bytes(const Float8Pass& pass) {
  const AttentionProblem& p = pass.problem.attention;
  return (p.is_sparse() ? kTileCounterBytesFloat8 + span_tables_of(p, nullptr).bytes() : 0) +
         float8_operand_bytes(pass.problem);
}

template <int kHeadDim>
void AttentionFloat8Sm90<kHeadDim>::run(const Float8Pass& pass, void* workspace, CUstream_st* stream) {
  const AttentionProblem& p = pass.problem.attention;
  std::byte* at = static_cast<std::byte*>(workspace);
  SpanTables tables;
  unsigned* tile_counter = nullptr;
  if (p.is_sparse()) {
    tile_counter = reinterpret_cast<unsigned*>(at);
    tables = span_tables_of(p, at + kTileCounterBytesFloat8);
    at += kTileCounterBytesFloat8 + tables.bytes();
    fill_span_tables(p, tables, stream, tile_counter);
  }
  const Float8Operands operands = make_float8_operands(pass.problem, at, stream);
  const auto start = [&]<class Out>(Out) {
    const auto launch_with = [&]<Float8Features kFeatures>() {
      launch_float8_sm90<Out, Float8Variant<kHeadDim, kFeatures>>(p, operands, tables, tile_counter, stream);
    };
    if (p.softcap > 0 || p.is_sparse())
      launch_with.template operator()<Float8Features::kOptions>();
    else if (p.visible.left >= 0 || p.visible.right >= 0)
      launch_with.template operator()<Float8Features::kBounded>();
    else
      launch_with.template operator()<Float8Features::kUnbounded>();
  };
  p.dtype == DType::kFloat16 ? start(__half{}) : start(__nv_bfloat16{});
}

}  // namespace flash_online::cuda
