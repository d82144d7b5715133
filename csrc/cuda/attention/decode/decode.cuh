// The decode family as dispatch.cu calls it: what it takes, its workspace, its launches.
#pragma once

#include "../../../core/visit.h"
#include "../../hw/launch.h"
#include "../kernels.h"
#include "kernel.cuh"

namespace flash_online::cuda {

constexpr int kDecodeMostRows = 128;  // per sequence and key head

constexpr int64_t decode_rows_of(const AttentionProblem& problem) {
  return problem.heads / problem.key_heads * problem.queries;
}

// Calls f(Type<Element>, bool_constant<is float8>, integral_constant<most rows>) for a problem's kernel.
template <int kHeadDim, class F>
void visit_decode(const AttentionProblem& problem, F&& f) {
  const auto with_rows = [&](auto element, auto float8) {
    const int64_t rows = decode_rows_of(problem);
    if (rows <= 8) return f(element, float8, std::integral_constant<int, 8>{});
    if constexpr (kHeadDim <= 128)
      if (rows > 16) return f(element, float8, std::integral_constant<int, 32>{});
    return f(element, float8, std::integral_constant<int, 16>{});
  };
  const auto with_cache = [&](auto element) {
    return is_float8(problem.cache.dtype) ? with_rows(element, std::true_type{}) : with_rows(element, std::false_type{});
  };
  problem.dtype == DType::kFloat16 ? with_cache(Type<__half>{}) : with_cache(Type<__nv_bfloat16>{});
}

inline KvSplits decode_kv_splits(const AttentionProblem& problem) {
  return problem.cache.kv_splits > 0 ? KvSplits::of(problem, 0, 0) : KvSplits{};
}

inline DecodeShape decode_shape(const AttentionProblem& problem, int tile_rows, int tile_keys, int warps) {
  return DecodeShape::of(problem, problem.heads / problem.key_heads, tile_rows, tile_keys, warps);
}

// True if no share cuts an item; an item then belongs to the CTA with the share in which it begins. This holds for kv_splits by
// num_splits, and for items that take less time than the merge of their partials would.
inline bool decode_has_whole_items(const AttentionProblem& problem, const DecodeShape& shape) {
  constexpr int64_t kFewSteps = 2;
  return problem.cache.kv_splits > 0 || shape.most_steps(problem) <= kFewSteps;
}

inline DecodePool decode_pool(const AttentionProblem& problem, const ConstView4& view, int64_t width) {
  const int64_t bytes = is_float8(problem.cache.dtype) ? 1 : 2;
  const auto vectors = [&](int i) { return static_cast<unsigned>(view.stride[i] * bytes / kVectorBytes); };
  return {static_cast<const char*>(view.data), view.stride[1] * bytes, vectors(0), vectors(2), static_cast<int>(width * bytes)};
}

// Whether the host knows which keys a call sees: all that the cache has room for, in one block per sequence.
inline bool has_known_keys(const CacheView& cache) {
  return !cache.table && !cache.lengths && !cache.left && !cache.rows && !cache.query_lengths && !cache.new_starts &&
         !is_float8(cache.dtype) && !cache.key_scale && !cache.value_scale;
}

// The instance for a problem: kPlain if plain_arguments() has its arguments, kDense if dense_arguments() has them. Some of the
// former's calls run as the latter's (DecodeSetup).
inline DecodeCalls decode_calls(const AttentionProblem& p) {
  const CacheView& cache = p.cache;
  if (score_mods(p) != 0 || (p.out.stride[3] != 1 && p.head_dim_v > 1)) return DecodeCalls::kAll;
  if (cache.is_dense) return DecodeCalls::kDense;
  const bool is_plain = !p.query_starts && p.lower_right && !cache.query_lengths && !cache.left && !cache.rows &&
                        !cache.new_starts && cache.kv_splits == 0 && !ScoreMod(p).has_score_mod &&
                        (is_float8(cache.dtype) || (!cache.key_scale && !cache.value_scale));
  return is_plain ? DecodeCalls::kPlain : DecodeCalls::kAll;
}

// A kernel's instance and layout, and what follows from them.
template <int kHeadDim, bool kFloat8, int kRows>
struct DecodeSetup {
  static constexpr int kStageBytes = decode_stage_bytes(kHeadDim, kFloat8), kQueryBytes = decode_query_bytes(kHeadDim, kRows),
                       kTileKeys = decode_tile_keys(kHeadDim, kFloat8);
  DecodeCalls calls;
  DecodeLayout layout;
  DecodeShape shape{};
  DenseShared dense{};
  DenseSplit split{};
  DensePartials dense_partials{};

  DecodeSetup(const AttentionProblem& problem, int most_shared_bytes)
      : calls(decode_calls(problem)),
        layout(decode_layout(has_few_items(problem), kStageBytes, kQueryBytes, most_shared_bytes)) {
    if (layout.warps == 0) return;
    const bool may_be_dense = calls == DecodeCalls::kDense || (calls == DecodeCalls::kPlain && has_known_keys(problem.cache));
    if (!kFloat8 && kRows <= 16 && may_be_dense && set_dense(problem, most_shared_bytes)) return;
    if (calls == DecodeCalls::kDense) calls = DecodeCalls::kAll;
    shape = decode_shape(problem, kRows, kTileKeys, layout.warps);
  }
  // Sets up a dense call; one over a cache only if its items are then split better. Otherwise changes nothing.
  bool set_dense(const AttentionProblem& problem, int most_shared_bytes) {
    DecodeSetup own = *this;
    own.calls = DecodeCalls::kDense;
    if (problem.cache.is_dense ? !own.set_units(problem, most_shared_bytes) : !own.set_few_units(problem, most_shared_bytes))
      return false;
    own.dense_partials = DensePartials::of(problem, own.shape, own.units(problem));
    *this = own;
    return true;
  }
  // Sets up a call whose bits must not depend on the batch: kv_splits units per item, each computed by four warps.
  bool set_units(const AttentionProblem& problem, int most_shared_bytes) {
    if (!set_busy_split(problem, 2, most_shared_bytes)) {
      split = {};
      // Where no SM has two units, its only CTA takes all of the room.
      const bool is_small = problem.batch * problem.key_heads * problem.cache.kv_splits <= sm_count();
      if (is_small || !set_layout(problem, 4, 1, 2, most_shared_bytes)) {
        if (!set_layout(problem, 4, 1, 1, most_shared_bytes)) return false;
        if (!is_small) set_whole_items(problem);
      }
    }
    shape.unit_steps =
        static_cast<int>(ceil_div(ceil_div(problem.keys, problem.cache.kv_splits), int64_t{kTileKeys} * shape.warps()));
    return true;
  }
  // Sets up a call over a cache whose keys the host knows: each CTA has one unit of an item, which one or two CTAs share.
  bool set_few_units(const AttentionProblem& problem, int most_shared_bytes) {
    if (!set_busy_split(problem, 1, most_shared_bytes)) return false;
    shape.unit_steps = static_cast<int>(ceil_div(shape.most_steps(problem), int64_t{split.cluster}));
    return true;
  }
  // Takes the first of these layouts that keeps nearly all SMs busy: two CTAs of four warps per SM, which take whole items (one
  // reads while the other one ends a unit); one CTA of eight warps per SM, in `teams` teams, with whole items; the same, with a
  // pair of CTAs per item.
  bool set_busy_split(const AttentionProblem& problem, int teams, int most_shared_bytes) {
    return (set_layout(problem, 4, 1, 2, most_shared_bytes) && set_whole_items(problem)) ||
           (set_layout(problem, 8 / teams, teams, 1, most_shared_bytes) && (set_whole_items(problem) || set_pairs(problem)));
  }
  bool set_whole_items(const AttentionProblem& problem) {
    const int64_t all = items(problem);
    if (!keeps_busy(all)) return false;
    split = {1, static_cast<int>(ceil_div(all, most_ctas()))};
    return true;
  }
  bool set_pairs(const AttentionProblem& problem) {
    if (largest_cluster() < 2 || !keeps_busy(2 * items(problem))) return false;
    split = {2, 1};
    return true;
  }
  // Whether `ctas` equal CTAs leave at most one in 33 of those that the GPU holds at once unused, as 128 on 132 SMs do.
  bool keeps_busy(int64_t ctas) const { return ctas > 0 && ctas * 33 >= round_up(ctas, most_ctas()) * 32; }
  // The layout, with one or two buffers, whatever there is room for, and what follows from it.
  bool set_layout(const AttentionProblem& problem, int warps_of_team, int teams, int ctas_per_sm, int most_shared_bytes) {
    const int rows = static_cast<int>(round_up(std::min<int64_t>(decode_rows_of(problem), 16), 8)),
              warps = warps_of_team * teams;
    layout = {};
    for (int buffers = 2; buffers > 0 && layout.warps == 0; --buffers) {
      dense = {buffers, rows};
      const int bytes_of_warp = kQueryBytes + ceil_div(dense.bytes<kHeadDim>(warps), warps);
      layout = decode_layout_of(warps, ctas_per_sm, kStageBytes, bytes_of_warp, most_shared_bytes);
    }
    if (layout.warps == 0) return false;
    shape = decode_shape(problem, kRows, kTileKeys, warps_of_team);
    shape.teams = teams;
    return true;
  }
  int64_t items(const AttentionProblem& problem) const { return problem.batch * shape.key_heads * shape.row_tiles; }
  // The most units of an item of a dense call.
  int64_t units(const AttentionProblem& problem) const {
    return ceil_div(shape.most_steps(problem), int64_t{shape.unit_steps});
  }
  // The number of warps decides in which order a row is summed: with num_splits it must not depend on the batch.
  static bool has_few_items(const AttentionProblem& problem) {
    return problem.cache.kv_splits == 0 && problem.batch * problem.key_heads * 4 <= sm_count();
  }
  int shared_bytes() const {
    return decode_shared_bytes(layout, kStageBytes, kQueryBytes) + dense.bytes<kHeadDim>(layout.warps);
  }
  int64_t most_ctas() const { return int64_t{sm_count()} * layout.ctas_per_sm; }
  int ctas(const AttentionProblem& problem) const {
    if (split.cluster > 0) return static_cast<int>(ceil_div(items(problem), int64_t{split.items}) * split.cluster);
    const int64_t line = calls == DecodeCalls::kDense ? items(problem) * units(problem) : shape.most_units(problem);
    return static_cast<int>(std::clamp<int64_t>(line, 1, most_ctas()));
  }
  int64_t workspace_bytes(const AttentionProblem& problem) const {
    if (calls == DecodeCalls::kDense) return split.cluster == 1 ? 0 : dense_partials.bytes(items(problem));
    if (problem.cache.kv_splits > 0) return decode_kv_splits(problem).bytes(problem);
    return DecodePartials::of(problem, shape).bytes(ctas(problem));
  }
};

// The reason why no decode kernel takes a problem, or null.
inline const char* decode_refusal(const AttentionProblem& p) {
  if (p.dtype == DType::kFloat32) return "float32";
  if (p.cache.kv_splits == 1) return "num_splits=1: results that do not depend on how queries are cut into calls";
  if (p.cache.kv_splits > 1 && p.query_starts)
    return "num_splits together with packed queries: the longest sequence must not matter";
  if (p.has_spans()) return "spans";
  if (p.mask.data && ((p.queries > 1 && p.mask.stride[2] != 0) || (p.heads > p.key_heads && p.mask.stride[1] != 0)))
    return "a mask with several rows per key head";
  if (decode_rows_of(p) > kDecodeMostRows) return "more than 128 rows of queries per sequence and key head";
  if (p.total_queries >= int64_t{1} << 31) return "2^31 rows of packed queries or more";
  if (capacity_of(p.cache) >= int64_t{1} << 29) return "the cache has room for 2^29 keys per sequence or more";
  if (ceil_div(capacity_of(p.cache), kKeysPerKvSplitBlock) * decode_kv_splits(p).most >= int64_t{1} << 31)
    return "num_splits: too many kv_splits of too many keys";
  const bool float8 = is_float8(p.cache.dtype);
  const auto is_aligned = [&](const ConstView4& view, int64_t width) {
    const int64_t size = float8 ? 1 : 2;
    uintptr_t bits = reinterpret_cast<uintptr_t>(view.data) | static_cast<uintptr_t>(width * size);
    for (int i = 0; i < 3; ++i) bits |= static_cast<uintptr_t>(view.stride[i] * size);
    const int64_t last = (p.cache.blocks - 1) * view.stride[0] + (p.cache.page - 1) * view.stride[2];  // of a head, its row
    return bits % kVectorBytes == 0 && (view.stride[3] == 1 || width <= 1) && view.stride[0] >= 0 && view.stride[2] > 0 &&
           last * size / kVectorBytes < int64_t{1} << 32;
  };
  if (!is_aligned(p.key, p.head_dim) || !is_aligned(p.value, p.head_dim_v))
    return "the rows of the cache are not multiples of 16 bytes, their columns do not lie side by side, or it has over 64 GiB";
  if (p.query.stride[3] != 1 ||
      (reinterpret_cast<uintptr_t>(p.query.data) | static_cast<uintptr_t>(p.query.stride[0] * 2) |
       static_cast<uintptr_t>(p.query.stride[1] * 2) | static_cast<uintptr_t>(p.query.stride[2] * 2)) %
              4 !=
          0)
    return "the rows of the queries are not multiples of 4 bytes, or their columns do not lie side by side";
  return nullptr;
}

// The arguments of a kernel, with the addresses of its partial results; not those of a dense call.
inline DecodeArguments decode_arguments(const AttentionProblem& problem, const DecodeShape& shape, const DecodePool& keys,
                                        const DecodePool& values, int stages, void* workspace) {
  DecodeArguments arguments{
      .problem = problem,
      .score_mod = ScoreMod(problem),
      .kv_splits = decode_kv_splits(problem),
      .whole_items = decode_has_whole_items(problem, shape),
      .shape = shape,
      .keys = keys,
      .values = values,
      .partials = DecodePartials::of(problem, shape),
      .dense = {},
      .dense_split = {},
      .dense_partials = {},
      .stages = stages,
  };
  arguments.score_mod.has_score_mod |= problem.cache.key_scale != nullptr;
  (arguments.whole_items ? arguments.kv_splits.partials : arguments.partials.data) = static_cast<float*>(workspace);
  return arguments;
}

// Queues the kernel that merges what `ctas` CTAs have left, if there is one; not that of a dense call.
inline void merge_results(const DecodeArguments& arguments, int ctas, CUstream_st* stream) {
  const AttentionProblem& problem = arguments.problem;
  if (arguments.whole_items)
    merge_kv_splits(problem, arguments.kv_splits, stream);
  else
    merge_partials(problem, arguments.shape, arguments.partials, ctas, stream);
}

template <int kHeadDim>
const char* AttentionDecode<kHeadDim>::refusal(const ForwardPass& pass, const Gpu& gpu) {
  const AttentionProblem& p = pass.problem;
  const char* reason = decode_refusal(p);
  if (reason) return reason;
  visit_decode<kHeadDim>(p,
                         [&]<bool kFloat8, int kRows>(auto, std::bool_constant<kFloat8>, std::integral_constant<int, kRows>) {
                           const DecodeSetup<kHeadDim, kFloat8, kRows> setup(p, gpu.shared_bytes);
                           if (setup.layout.warps == 0)
                             reason = "the GPU has too little shared memory for this head dim";
                           else if (setup.shape.most_units(p) >= int64_t{1} << 30)
                             reason = "the caches of all sequences have room for too many keys";
                         });
  return reason;
}

template <int kHeadDim>
int64_t AttentionDecode<kHeadDim>::workspace_bytes(const ForwardPass& pass) {
  const AttentionProblem& problem = pass.problem;
  int64_t bytes = 0;
  visit_decode<kHeadDim>(
      problem, [&]<bool kFloat8, int kRows>(auto, std::bool_constant<kFloat8>, std::integral_constant<int, kRows>) {
        bytes = DecodeSetup<kHeadDim, kFloat8, kRows>(problem, shared_bytes_per_cta()).workspace_bytes(problem);
      });
  return bytes;
}

template <class Element, int kHeadDim, bool kFloat8, int kRows>
void launch_decode(const DecodeSetup<kHeadDim, kFloat8, kRows>& setup, const AttentionProblem& problem, void* workspace,
                   CUstream_st* stream) {
  DecodeArguments arguments =
      decode_arguments(problem, setup.shape, decode_pool(problem, problem.key, problem.head_dim),
                       decode_pool(problem, problem.value, problem.head_dim_v), setup.layout.stages, workspace);
  const int ctas = setup.ctas(problem);
  const auto run_as = [&]<DecodeCalls kCalls>(std::integral_constant<DecodeCalls, kCalls>) {
    launch<attention_decode<Element, kHeadDim, kFloat8, kRows, kCalls>>(
        arguments, ctas, setup.layout.warps * kWarpSize, setup.shared_bytes(), stream, true, std::max(setup.split.cluster, 1));
  };
  if constexpr (!kFloat8 && kRows <= 16)
    if (setup.calls == DecodeCalls::kDense) {
      arguments.dense = setup.dense;
      arguments.dense_split = setup.split;
      arguments.dense_partials = setup.dense_partials;
      arguments.dense_partials.data = static_cast<float*>(workspace);
      run_as(std::integral_constant<DecodeCalls, DecodeCalls::kDense>{});
      if (setup.split.cluster == 0) merge_dense(problem, arguments.dense_partials, setup.shape, ctas, stream);
      return;
    }
  setup.calls == DecodeCalls::kPlain ? run_as(std::integral_constant<DecodeCalls, DecodeCalls::kPlain>{})
                                     : run_as(std::integral_constant<DecodeCalls, DecodeCalls::kAll>{});
  merge_results(arguments, ctas, stream);
}

template <int kHeadDim>
void AttentionDecode<kHeadDim>::run(const ForwardPass& pass, void* workspace, CUstream_st* stream) {
  const AttentionProblem& problem = pass.problem;
  visit_decode<kHeadDim>(problem, [&]<class Element, bool kFloat8, int kRows>(Type<Element>, std::bool_constant<kFloat8>,
                                                                              std::integral_constant<int, kRows>) {
    const DecodeSetup<kHeadDim, kFloat8, kRows> setup(problem, shared_bytes_per_cta());
    launch_decode<Element>(setup, problem, workspace, stream);
  });
}

}  // namespace flash_online::cuda
