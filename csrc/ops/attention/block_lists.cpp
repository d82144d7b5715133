// block_tiles: from lists of blocks to the tiles that attention_forward takes. block_means: the mean row of each block.
// block_maxima: the largest score of each block. block_topk: the lists of the largest scores.
#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "../../cpu/executor.h"
#include "../../cuda/attention/attention.h"
#include "../cuda_call.h"
#include "../operators.h"
#include "pass.h"

namespace flash_online::ops {
namespace {

// Of equal scores the first blocks are chosen.
void topk_of_list(const BlockTopkProblem& problem, int64_t list) {
  const float* const scores = problem.scores + list * problem.key_blocks;
  const int64_t own = problem.causal ? problem.own(list) : -1, end = problem.causal ? own + 1 : problem.key_blocks;
  std::vector<int32_t> blocks;
  for (int64_t block = 0; block < end; ++block)
    if (block == own || scores[block] > -INFINITY) blocks.push_back(static_cast<int32_t>(block));
  const auto count = std::min(static_cast<int64_t>(blocks.size()), problem.k);
  const auto score = [&](int32_t block) { return block == own ? INFINITY : scores[block]; };
  std::partial_sort(blocks.begin(), blocks.begin() + count, blocks.end(), [&](int32_t a, int32_t b) {
    if (a == own || b == own) return a == own && b != own;
    return score(a) > score(b) || (score(a) == score(b) && a < b);
  });
  int32_t* const indices = problem.indices + list * problem.k;
  std::sort(blocks.begin(), blocks.begin() + count);
  std::copy_n(blocks.begin(), count, indices);
  std::fill(indices + count, indices + problem.k, static_cast<int32_t>(problem.key_blocks));
  problem.counts[list] = static_cast<int32_t>(count);
}

struct BlockListsOnCpu : Cpu {
  static void topk(const BlockTopkProblem& problem, const Tensor& like) {
    cpu::for_each_item(CpuExecutor(problem.lists, {}, like), problem.lists,
                       [&](int64_t list, std::byte*) { topk_of_list(problem, list); });
  }
  static void tiles(const BlockListProblem& problem, const Tensor& like) {
    cpu::for_each_item(CpuExecutor(problem.lists, {}, like), problem.lists, [&](int64_t list, std::byte*) {
      std::fill_n(problem.tiles_of(list), problem.row_tiles(list) * problem.key_tiles, uint8_t{0});
      for (int64_t n = 0; n < problem.length(list); ++n) problem.set(list, n);
    });
  }
};

struct BlockListsOnCuda : Cuda {
  static void topk(const BlockTopkProblem& problem, const Tensor& like) { cuda::block_topk(problem, CudaCall(like).stream()); }
  static void tiles(const BlockListProblem& problem, const Tensor& like) {
    cuda::fill_block_tiles(problem, CudaCall(like).stream());
  }
};

template <class Device>
Tensor block_tiles(const Tensor& counts, const Tensor& indices, int64_t rows, int64_t columns, int64_t queries, int64_t keys) {
  constexpr int64_t kTile = BlockListProblem::kTile;
  for (const auto& [tensor, name] : {std::pair{&counts, "counts"}, {&indices, "indices"}})
    check(tensor->scalar_type() == ScalarType::Int, name, ": expected dtype int32, got ", name_of(tensor->scalar_type()));
  check_device(indices, "indices", counts, "counts");
  for (const auto& [size, name] : {std::pair{rows, "rows"}, {columns, "columns"}})
    check(size > 0 && size % kTile == 0, name, ": expected a multiple of ", kTile, ", got ", size);
  check(queries >= 0 && keys >= 0, "queries, keys: expected 0 or more, got ", queries, " and ", keys);
  const int64_t last = counts.dim() - 1;
  check(last >= 0, "counts: expected [..., blocks of queries], got ", shape_of(counts));
  std::vector<int64_t> sizes = sizes_of(counts), leading = sizes_of(indices);
  check(indices.dim() == counts.dim() + 1, "indices: expected one dimension more than counts, got ", shape_of(indices));
  leading.pop_back();
  check(leading == sizes, "indices: expected counts' shape before the last dimension, got ", shape_of(indices), " for ",
        shape_of(counts));
  check(sizes[last] == ceil_div(queries, rows), "counts: expected ", ceil_div(queries, rows), " blocks of ", rows,
        " queries (last dimension), got ", sizes[last]);
  const Tensor own_counts = as_contiguous(counts), own_indices = as_contiguous(indices);
  BlockListProblem problem{.counts = own_counts.const_data_ptr<int32_t>(),
                           .indices = own_indices.const_data_ptr<int32_t>(),
                           .lists = counts.numel(),
                           .capacity = indices.size(last + 1),
                           .query_blocks = sizes[last],
                           .rows = rows / kTile,
                           .query_tiles = ceil_div(queries, kTile),
                           .key_tiles = ceil_div(keys, columns)};
  sizes[last] = problem.query_tiles;
  sizes.push_back(problem.key_tiles);
  Tensor tiles = empty(sizes, ScalarType::Bool, counts);
  problem.tiles = static_cast<uint8_t*>(tiles.mutable_data_ptr());
  if (problem.lists > 0 && problem.key_tiles > 0) Device::tiles(problem, counts);
  return tiles;
}

template <class Device>
std::tuple<Tensor, Tensor> block_topk(const Tensor& scores, int64_t k, bool causal, int64_t rows, int64_t columns) {
  check(scores.scalar_type() == ScalarType::Float, "scores: expected dtype float32, got ", name_of(scores.scalar_type()));
  const int64_t last = scores.dim() - 1;
  check(last >= 1, "scores: expected [..., blocks of queries, blocks of keys], got ", shape_of(scores));
  check(k > 0, "k: expected at least 1, got ", k);
  check(rows > 0 && columns > 0, "rows, columns: expected at least 1, got ", rows, " and ", columns);
  const Tensor own_scores = as_contiguous(scores);
  std::vector<int64_t> sizes = sizes_of(scores);
  BlockTopkProblem problem{.scores = own_scores.const_data_ptr<float>(),
                           .key_blocks = sizes[last],
                           .k = std::min(k, sizes[last]),
                           .causal = causal,
                           .query_blocks = sizes[last - 1],
                           .rows = rows,
                           .columns = columns};
  sizes[last] = problem.k;
  Tensor indices = empty(sizes, ScalarType::Int, scores);
  sizes.pop_back();
  Tensor counts = empty(sizes, ScalarType::Int, scores);
  problem.lists = counts.numel();
  problem.indices = indices.mutable_data_ptr<int32_t>(), problem.counts = counts.mutable_data_ptr<int32_t>();
  if (problem.lists > 0 && problem.k > 0)
    Device::topk(problem, scores);
  else if (problem.lists > 0)
    torch::stable::zero_(counts);
  return {counts, indices};
}

void check_block(int64_t size, const char* name) { check(size == 64 || size == 128, name, ": expected 64 or 128, got ", size); }
void check_scored(const Tensor& query, const Tensor& key, int64_t rows, int64_t columns) {
  check_device(key, "key", query, "query");
  check_query_and_key(query, key);
  check_block(rows, "rows");
  check_block(columns, "columns");
  check(query.scalar_type() != ScalarType::Double, "query: expected float16, bfloat16 or float32, got ", NameOfDtype{query});
}

std::tuple<Tensor, Tensor> block_means(const Tensor& query, const Tensor& key, int64_t rows, int64_t columns) {
  check_scored(query, key, rows, columns);
  cuda::BlockMeansProblem problem;
  problem.dtype = dtype_of(query);
  problem.batch = query.size(0), problem.width = query.size(3);
  const auto means_of = [&](const Tensor& tensor, int64_t size, cuda::BlockMeans& of) {
    set_view(tensor, of.rows);
    of.heads = tensor.size(1), of.count = tensor.size(2), of.size = size;
    Tensor means = empty({problem.batch, of.heads, ceil_div(of.count, size), problem.width}, ScalarType::Float, query);
    of.means = means.mutable_data_ptr<float>();
    return means;
  };
  const Tensor of_query = means_of(query, rows, problem.of[0]), of_key = means_of(key, columns, problem.of[1]);
  if (problem.width > 0) cuda::block_means(problem, CudaCall(query).stream());
  return {of_query, of_key};
}

Tensor block_maxima(const Tensor& query, const Tensor& key, int64_t rows, int64_t columns, bool causal, double scale) {
  check_scored(query, key, rows, columns);
  cuda::BlockMaximaPass pass;
  pass.rows = static_cast<int>(rows), pass.columns = static_cast<int>(columns);
  AttentionProblem& problem = pass.problem;
  problem.dtype = dtype_of(query);
  problem.batch = query.size(0), problem.heads = query.size(1), problem.key_heads = problem.value_heads = key.size(1);
  problem.queries = query.size(2), problem.keys = key.size(2), problem.head_dim = query.size(3);
  set_view(query, problem.query);
  set_view(key, problem.key);
  if (causal) problem.visible.right = 0;
  problem.scale = scale;
  Tensor maxima = empty({problem.batch, problem.heads, ceil_div(problem.queries, rows), ceil_div(problem.keys, columns)},
                        ScalarType::Float, query);
  if (maxima.numel() == 0) return maxima;
  torch::stable::fill_(maxima, -std::numeric_limits<double>::infinity());
  pass.maxima = maxima.mutable_data_ptr<float>();
  CudaCall on_cuda(query);
  const auto plan = cuda::plan_block_maxima(pass);
  plan.run(on_cuda.workspace(plan.workspace_bytes), on_cuda.stream());
  return maxima;
}

template <class Device, class Library>
void add_block_lists(Library& m) {
  implement(m, "block_tiles", TORCH_BOX(&block_tiles<Device>));
  implement(m, "block_topk", TORCH_BOX(&block_topk<Device>));
}

}  // namespace
}  // namespace flash_online::ops

STABLE_TORCH_LIBRARY_IMPL(flash_online, CPU, m) { flash_online::ops::add_block_lists<flash_online::ops::BlockListsOnCpu>(m); }

STABLE_TORCH_LIBRARY_IMPL(flash_online, CUDA, m) {
  using namespace flash_online::ops;
  if constexpr (kBuiltWithCuda) {
    add_block_lists<BlockListsOnCuda>(m);
    implement(m, "block_means", TORCH_BOX(&block_means));
    implement(m, "block_maxima", TORCH_BOX(&block_maxima));
  }
}
