// Attention backward on Hopper for floats with 16 of their 24 digits, where torch allows tf32: TMA loads, wgmma products of
// bf16 digits. docs/design/float32.md draws it.
//
// A CTA takes 128 keys and values, 64 per math warpgroup, and loops over blocks of 64 queries of the heads that share them,
// which a producer warp loads. Scores are made transposed, [key][query], so that weights and dS are left operands of the
// products that make dV and dK straight from registers. dS also goes through shared memory, for a warpgroup's share of dQ,
// which it adds to the dQ accumulator in global memory: the two warpgroups share nothing but the blocks.
#pragma once

#include "../../../hw/compiler.cuh"
#include "../../../hw/launch.h"
#include "../../../hw/matrix_copy.cuh"
#include "../../../hw/mbarrier.cuh"
#include "../../../hw/named_barrier.cuh"
#include "../../../hw/setmaxnreg.cuh"
#include "../../attention.h"
#include "../../common/backward_workspace.cuh"
#include "../../common/dq_accum.cuh"
#include "../../common/scores.cuh"
#include "../../common/store_rows.cuh"
#include "../../common/tile_list.cuh"
#include "../../kernels.h"
#include "../backward/tiles.h"
#include "../gemm.cuh"
#include "bf16x2_rows.cuh"

namespace flash_online::cuda {

struct BackwardBf16x2Sm90Arguments {
  TmaTensor query, key, value, grad_out;  // their digits
  AttentionProblem problem;
  AttentionGradients gradients;
  BackwardWorkspace space;
  TileList list;  // of keys; its heads are the kv_grad_heads
  float scale;  // of products, for scores in base 2
};

// A CTA's backward pass. Members that run on the device stand in the order in which they are called.
template <int kHeadDim>
class BackwardBf16x2Sm90Kernel {
 public:
  static constexpr int kWarpgroups = 2, kRows = 64;  // keys of a warpgroup, and queries of a block
  static constexpr int kKeys = kWarpgroups * kRows, kThreads = (kWarpgroups + 1) * 128;
  static constexpr int kProducerRegisters = 24, kMathRegisters = 240;
  static constexpr int kStages = kHeadDim <= 64 ? 2 : 1;
  // Blocks after which dK and dV are added to those in global memory. The tensor cores cut off what a sum does not hold, always
  // towards zero: by float adders its error stays within that of so many blocks.
  static constexpr int kBlocksPerSum = 32;

 private:
  using Digit = __nv_bfloat16;
  static constexpr int kDigits = 2, kLeading = 0, kLow = 1;
  static constexpr int kBoxes = kHeadDim / kBoxColumns;  // of a digit
  static constexpr int kSteps = kHeadDim / 16, kRowSteps = kRows / 16;
  static constexpr unsigned kRowBytes = kBoxColumns * sizeof(Digit), kStepBytes = 16 * kRowBytes;
  static_assert(kRows == kBoxColumns && kRows == kStatsRows);

  struct alignas(kBoxAlignment) Tile {
    Digit box[kDigits * kBoxes][kRows][kBoxColumns];
    // Opaque: the compiler would keep a descriptor of each operand in registers, more than there are.
    __device__ __forceinline__ unsigned address(int digit, int first_box = 0) const {
      return opaque(shared_address(box[digit * kBoxes + first_box]));
    }
  };
  struct Stage {
    Tile query, grad_out;
  };

 public:
  struct Shared {
    Tile key[kWarpgroups], value[kWarpgroups];
    Stage stage[kStages];
    alignas(kBoxAlignment) Digit ds[kWarpgroups][kDigits][kRows][kBoxColumns];  // [key][query]
    alignas(16) float row_stats[kStages][kRowStats / kStatsRows][kStatsRows];
    uint64_t keys_full, query_full[kStages], grad_out_full[kStages], query_empty[kStages], grad_out_empty[kStages];
  };

  __device__ __forceinline__ static void run(const BackwardBf16x2Sm90Arguments& arguments, Shared& shared) {
    const AttentionProblem& problem = arguments.problem;
    const WorkTile tile(problem, tile_coord(problem, arguments.list, blockIdx.x, true, kKeys, problem.visible.right < 0));
    if (problem.query_starts && tile.block == 0)
      clear_key_padding<float, kThreads>(problem, arguments.gradients, tile.batch, tile.head);
    if (tile.block < 0 || tile.block * kKeys >= tile.keys) return;
    const BackwardBf16x2Sm90Kernel kernel(arguments, tile, shared);
    if (threadIdx.x == 0) kernel.init_barriers();
    __syncthreads();
    const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / kWarpSize, 0);
    if (warp < 4) {
      reg_dealloc<kProducerRegisters>();
      if (threadIdx.x == 0) kernel.load();
    } else {
      reg_alloc<kMathRegisters>();
      kernel.compute(warp / 4 - 1);
    }
  }

 private:
  using Scores = Accumulator<1, kRows / 8>;
  using Grads = Accumulator<1, kHeadDim / 8>;
  using Operand = unsigned[kDigits][kRowSteps][4];  // weights or dS as a left operand

  // ---- what a CTA works on -------------------------------------------------------------------------------------------------
  const BackwardBf16x2Sm90Arguments& a;
  const AttentionProblem& problem;
  Shared& shared;
  const int batch, kv_grad_head;
  const Sequence sequence;
  const int queries, keys;  // the sequence's
  const int key;  // the tile's first
  const int heads, first_head;  // those of the queries that share the keys

  struct Blocks {
    int begin, end;  // blocks of queries
  };
  const Blocks blocks;  // those that see any key

  __device__ __forceinline__ BackwardBf16x2Sm90Kernel(const BackwardBf16x2Sm90Arguments& arguments, const WorkTile& tile,
                                                      Shared& memory)
      : a(arguments),
        problem(arguments.problem),
        shared(memory),
        batch(static_cast<int>(tile.batch)),
        kv_grad_head(static_cast<int>(tile.head)),
        sequence(tile.sequence),
        queries(tile.queries),
        keys(tile.keys),
        key(static_cast<int>(tile.block) * kKeys),
        heads(static_cast<int>(problem.heads) / static_cast<int>(arguments.list.heads)),
        first_head(kv_grad_head * heads),
        blocks(blocks_of_keys(key, min(key + kKeys, keys))) {}

  // The blocks of queries that see any of the keys [first, last).
  __device__ __forceinline__ Blocks blocks_of_keys(int first, int last) const {
    if (first >= last) return {0, 0};
    const QueryRange range = queries_of_any(sequence.visible, first, last, queries);
    if (range.end <= range.begin || range.begin >= queries) return {0, 0};
    return {static_cast<int>(range.begin) / kRows, static_cast<int>((min(range.end, int64_t{queries}) + kRows - 1) / kRows)};
  }

  __device__ __forceinline__ void init_barriers() const {
    constexpr int kMathWarps = kWarpgroups * 4;
    mbarrier_init(&shared.keys_full, 1);
#pragma unroll
    for (int i = 0; i < kStages; ++i) {
      mbarrier_init(&shared.query_full[i], 1);
      mbarrier_init(&shared.grad_out_full[i], 1);
      mbarrier_init(&shared.query_empty[i], kMathWarps);
      mbarrier_init(&shared.grad_out_empty[i], kMathWarps);
    }
    fence_barrier_init();
  }

  // The number of the first tile of row statistics of a head.
  __device__ __forceinline__ int64_t first_block(int head) const { return first_row_block(problem, a.space.list, batch, head); }

  // ---- loads, by one thread ------------------------------------------------------------------------------------------------
  __device__ __forceinline__ void load(Tile& to, const TmaTensor& from, int head, int64_t row, uint64_t* full) const {
#pragma unroll
    for (int box = 0; box < kDigits * kBoxes; ++box)
      tma_load(to.box[box], from.map, from.at(batch, head, static_cast<int>(row), box), full);
  }

  __device__ __forceinline__ void load() const {
    arrive_expect_tx(&shared.keys_full, 2 * kWarpgroups * sizeof(Tile));
#pragma unroll
    for (int n = 0; n < kWarpgroups; ++n) {
      load(shared.key[n], a.key, first_head, sequence.keys.begin + key + n * kRows, &shared.keys_full);
      load(shared.value[n], a.value, first_head, sequence.keys.begin + key + n * kRows, &shared.keys_full);
    }
    PipelineState<kStages> at;
    for (int head = first_head; head < first_head + heads; ++head)
#pragma unroll 1
      for (int block = blocks.begin; block < blocks.end; ++block, at.advance()) {
        const int64_t row = sequence.queries.begin + block * kRows;
        wait(&shared.query_empty[at.stage], at.parity ^ 1);
        uint64_t* const query_full = &shared.query_full[at.stage];
        arrive_expect_tx(query_full, sizeof(Tile) + sizeof(shared.row_stats[0]));
        load(shared.stage[at.stage].query, a.query, head, row, query_full);
        bulk_load(shared.row_stats[at.stage], a.space.row_stats + (first_block(head) + block) * kRowStats,
                  sizeof(shared.row_stats[0]), query_full);
        wait(&shared.grad_out_empty[at.stage], at.parity ^ 1);
        arrive_expect_tx(&shared.grad_out_full[at.stage], sizeof(Tile));
        load(shared.stage[at.stage].grad_out, a.grad_out, head, row, &shared.grad_out_full[at.stage]);
      }
  }

  // ---- mainloop, by a warpgroup --------------------------------------------------------------------------------------------
  __device__ __forceinline__ static int thread() { return static_cast<int>(threadIdx.x) % 128; }
  __device__ __forceinline__ static int row() { return thread() / kWarpSize * 16; }  // the warp's first
  __device__ __forceinline__ static void sync_warpgroup(int warpgroup) { sync_named(1 + warpgroup, 128); }

  // A block of queries of a head, and the pipeline stage that it arrives in.
  struct Position {
    int head, block;
    PipelineState<kStages> at;
  };

  __device__ __forceinline__ void compute(int warpgroup) const {
    const int own_key = key + warpgroup * kRows;
    const Blocks seen = blocks_of_keys(own_key, min(own_key + kRows, keys));
    wait(&shared.keys_full, 0);
    if (problem.query_starts && keys - own_key < kRows) {
      clear_tail(shared.key[warpgroup], max(keys - own_key, 0));
      clear_tail(shared.value[warpgroup], max(keys - own_key, 0));
      fence_async_proxy();
      sync_warpgroup(warpgroup);
    }
    Grads dk, dv;
    clear(dk);
    clear(dv);
    Scores scores;
    Position here{first_head, blocks.begin, {}};
    const bool any = skip_unseen(here, seen);
    if (any) start_block(scores, here, true, warpgroup);
    wgmma_wait<0>();
    fence_registers(flat(scores));
    bool more = any, stored = false;
    int count = 0;
#pragma unroll 1
    do {
      if (any) more = process_block(dk, dv, scores, here, seen, warpgroup);
      if (more && ++count < kBlocksPerSum) continue;
      store(dk, static_cast<float>(problem.scale), a.gradients.grad_key, own_key, problem.head_dim, stored);
      store(dv, 1, a.gradients.grad_value, own_key, problem.head_dim_v, stored);
      clear(dk);
      clear(dv);
      stored = true, count = 0;
    } while (more);
  }

  // Moves on to a block that sees any of the warpgroup's keys, and lets the producer overwrite those before it; false: there
  // are no more.
  __device__ __forceinline__ bool skip_unseen(Position& here, const Blocks& seen) const {
    while (true) {
      if (here.block >= blocks.end) ++here.head, here.block = blocks.begin;
      if (blocks.begin >= blocks.end || here.head >= first_head + heads) return false;
      if (here.block >= seen.begin && here.block < seen.end) return true;
      wait(&shared.query_full[here.at.stage], here.at.parity);
      wait(&shared.grad_out_full[here.at.stage], here.at.parity);
      release(&shared.query_empty[here.at.stage]);
      release(&shared.grad_out_empty[here.at.stage]);
      ++here.block, here.at.advance();
    }
  }

  // Lets the producer overwrite a tile once all warps have called it.
  __device__ __forceinline__ static void release(uint64_t* empty) {
    __syncwarp();
    if (lane() == 0) arrive(empty);
  }

  // In packed tensors, the next sequence's rows follow the last row of a sequence.
  __device__ __forceinline__ static void clear_tail(Tile& tile, int from) { cuda::clear_tail<128>(tile.box, from, thread()); }

  // Starts the scores of a block once it has arrived. If no block is left (`more` is false), the product uses old data of the
  // stage and its result is not used: the compiler would make a conditional product wait for the products before it.
  __device__ __forceinline__ void start_block(Scores& scores, const Position& here, bool more, int warpgroup) const {
    Stage& stage = shared.stage[here.at.stage];
    if (more) {
      wait(&shared.query_full[here.at.stage], here.at.parity);
      const int left = queries - here.block * kRows;
      if (problem.query_starts && left < kRows) {  // both warpgroups do it: zeros over zeros
        wait(&shared.grad_out_full[here.at.stage], here.at.parity);
        clear_tail(stage.query, left);
        clear_tail(stage.grad_out, left);
        fence_async_proxy();
        sync_warpgroup(warpgroup);
      }
    }
    start_scores(scores, shared.key[warpgroup], stage.query);
  }

  // Adds a block's share to dK, dV and dQ, given its scores, and computes the scores of the next block. Returns whether there
  // is a next block. In this order a product overlaps all other work.
  __device__ __forceinline__ bool process_block(Grads& dk, Grads& dv, Scores& scores, Position& here, const Blocks& seen,
                                                int warpgroup) const {
    const int at = here.at.stage;
    Stage& stage = shared.stage[at];
    float* const dq_accum = a.space.dq_accum + (first_block(here.head) + here.block) * (kRows * kHeadDim);
    Scores dp;
    wait(&shared.grad_out_full[at], here.at.parity);
    start_scores(dp, shared.value[warpgroup], stage.grad_out);
    hide(scores, here.block * kRows, key + warpgroup * kRows);
    make_weights(scores, at);
    Operand weights;
    to_digits(weights, scores);
    start_grads(dv, weights, stage.grad_out);
    wgmma_wait<1>();
    fence_registers(flat(dp));
    Operand ds;
    make_ds(ds, dp, weights, at);
    start_grads(dk, ds, stage.query);
    sync_warpgroup(warpgroup);  // all have done with dS of the block before
    store_ds(ds, warpgroup);
    fence_async_proxy();
    sync_warpgroup(warpgroup);
    wgmma_wait<1>();
    fence_registers(weights[0]), fence_registers(weights[1]);
    release(&shared.grad_out_empty[at]);
    // dQ by boxes of columns: all at once would take registers that the next scores need.
    Scores dq[kBoxes];
    start_dq(dq[0], 0, warpgroup);
    wgmma_wait<1>();
    fence_registers(ds[0]), fence_registers(ds[1]);
    release(&shared.query_empty[at]);
#pragma unroll
    for (int box = 1; box < kBoxes; ++box) {
      start_dq(dq[box], box, warpgroup);
      wgmma_wait<1>();
      fence_registers(flat(dq[box - 1]));
      add_dq(dq[box - 1], dq_accum, box - 1);
    }

    ++here.block, here.at.advance();
    const bool more = skip_unseen(here, seen);
    start_block(scores, here, more, warpgroup);
    wgmma_wait<1>();
    fence_registers(flat(dq[kBoxes - 1]));
    add_dq(dq[kBoxes - 1], dq_accum, kBoxes - 1);
    wgmma_wait<0>();
    fence_registers(flat(scores));
    fence_registers(flat(dk));
    fence_registers(flat(dv));
    return more;
  }

  // Hides the scores of keys that a query does not see by position.
  __device__ __forceinline__ void hide(Scores& scores, int query, int own_key) const {
    const QueryRange whole = queries_of_all(sequence.visible, own_key, own_key + kRows, own_key + kRows <= keys ? queries : 0);
    if (query >= whole.begin && query + kRows <= whole.end) return;
    hide_scores<true>(scores, row(), {query, own_key, queries, keys, false}, sequence.visible);
  }

  // d = left right^T: S of keys and queries, dP of values and gradients of outputs.
  __device__ __forceinline__ static void start_scores(Scores& d, const Tile& left, const Tile& right) {
    start_row_products<Digit, kSteps, kRows, kRows, false, false>(d, left.address(kLow), right.address(kLeading));
    start_row_products<Digit, kSteps, kRows, kRows, true, false>(d, left.address(kLeading), right.address(kLow));
    start_row_products<Digit, kSteps, kRows, kRows, true>(d, left.address(kLeading), right.address(kLeading));
  }

  __device__ __forceinline__ float2 row_stat(int stage, int stat, int j) const {
    return *reinterpret_cast<const float2*>(&shared.row_stats[stage][stat][8 * j + 2 * lane_in_quad()]);
  }

  // Weights of scores, P = exp(S - lse).
  __device__ __forceinline__ void make_weights(Scores& scores, int stage) const {
#pragma unroll
    for (int j = 0; j < kRows / 8; ++j) exp_column(scores, j, a.scale, row_stat(stage, 0, j), row_stat(stage, 1, j));
  }

  // dS = P (dP - delta), where the digits of P stand for it: its float would take registers.
  __device__ __forceinline__ void make_ds(Operand& ds, Scores& dp, const Operand& weights, int stage) const {
#pragma unroll
    for (int j = 0; j < kRows / 8; ++j) {
      const float2 delta = row_stat(stage, 2, j);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float2 weight = sum_of_digits(weights[kLeading][j / 2][j % 2 * 2 + half], weights[kLow][j / 2][j % 2 * 2 + half]);
        dp[0][j][2 * half] = weight.x * (dp[0][j][2 * half] - delta.x);
        dp[0][j][2 * half + 1] = weight.y * (dp[0][j][2 * half + 1] - delta.y);
      }
    }
    to_digits(ds, dp);
  }
  __device__ __forceinline__ static float2 sum_of_digits(unsigned leading, unsigned low) {
    return {__uint_as_float(leading << 16) + __uint_as_float(low << 16),
            __uint_as_float(leading & 0xffff0000u) + __uint_as_float(low & 0xffff0000u)};
  }

  __device__ __forceinline__ static void to_digits(Operand& to, const Scores& d) {
#pragma unroll
    for (int j = 0; j < kRows / 8; ++j)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        unsigned words[kDigits];
        Fragments<Bf16x2Float>::to_digits(words, d[0][j][2 * half], d[0][j][2 * half + 1]);
#pragma unroll
        for (int digit = 0; digit < kDigits; ++digit) to[digit][j / 2][j % 2 * 2 + half] = words[digit];
      }
  }

  // d += left right: dV of weights and gradients of outputs, dK of dS and queries.
  __device__ __forceinline__ static void start_grads(Grads& d, const Operand& left, const Tile& right) {
    const auto add = [&](int left_digit, int right_digit) {
      const uint64_t columns = mn_major_descriptor(right.address(right_digit), kRows * kRowBytes);
#pragma unroll
      for (int step = 0; step < kRowSteps; ++step)
        Wgmma<Digit, kHeadDim>::template rs<true>(flat(d), left[left_digit][step],
                                                  offset_descriptor(columns, step * kStepBytes), true);
    };
    wgmma_fence();
    add(kLow, kLeading);
    add(kLeading, kLow);
    add(kLeading, kLeading);
    wgmma_commit();
  }

  __device__ __forceinline__ void store_ds(const Operand& ds, int warpgroup) const {
    const int r = row() + lane() % 16;
#pragma unroll
    for (int digit = 0; digit < kDigits; ++digit)
#pragma unroll
      for (int step = 0; step < kRowSteps; ++step)
        stmatrix_x4(ds[digit][step], shared_address(shared.ds[warpgroup][digit]) + swizzle128(r, 2 * step + lane() / 16));
  }

  // A box of columns of dQ = dS K, over the warpgroup's keys.
  __device__ __forceinline__ void start_dq(Scores& d, int box, int warpgroup) const {
    const auto add = [&](int left_digit, int right_digit, bool first) {
      const uint64_t rows = k_major_descriptor(opaque(shared_address(shared.ds[warpgroup][left_digit]))),
                     columns = mn_major_descriptor(shared.key[warpgroup].address(right_digit, box), kRows * kRowBytes);
#pragma unroll
      for (int step = 0; step < kRowSteps; ++step)
        Wgmma<Digit, kBoxColumns>::template ss<true, true>(flat(d), offset_descriptor(rows, step * kStepBytes),
                                                           offset_descriptor(columns, step * kStepBytes), !first || step > 0);
    };
    wgmma_fence();
    add(kLow, kLeading, true);
    add(kLeading, kLow, false);
    add(kLeading, kLeading, false);
    wgmma_commit();
  }

  __device__ __forceinline__ static void add_dq(const Scores& dq, float* dq_accum, int box) {
    float* const to = dq_accum + row() * kHeadDim + box * (16 * kBoxColumns) + dq_accum_offset(lane(), 0);
#pragma unroll
    for (int j = 0; j < kBoxColumns / 8; ++j) dq_accum_add(to + j * 128, dq[0][j]);
  }

  // ---- sums ----------------------------------------------------------------------------------------------------------------
  // Writes the warpgroup's dK or dV, or adds to it.
  __device__ __forceinline__ void store(const Grads& d, float scale, const MutableView4& view, int own_key, int64_t width,
                                        bool add) const {
    // Opaque: what follows from them would take registers all over the loop.
    int thread = this->thread(), first = own_key;
    make_opaque(thread), make_opaque(first);
    const int lane = thread % kWarpSize, row = thread / kWarpSize * 16 + lane / 4;
    float* const data = static_cast<float*>(view.data) + batch * view.stride[0] + kv_grad_head * view.stride[1] +
                        (sequence.keys.begin + first) * view.stride[2];
    const bool pairs = view.stride[3] == 1 && width % 2 == 0 && view.stride[2] % 2 == 0 && misalignment(data) % 8 == 0;
    // Calls f(address, element) for every other element of the thread's, which are neighbours two by two.
    const auto for_each_pair = [&](auto&& f) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int r = row + 8 * half;
        if (r >= keys - first) continue;
        float* const to = data + r * view.stride[2];
#pragma unroll
        for (int j = 0; j < kHeadDim / 8; ++j) {
          const int column = 8 * j + 2 * (lane % 4);
          if (column < width) f(to + column * view.stride[3], j, 2 * half);
        }
      }
    };
    if (pairs)
      for_each_pair([&](float* to, int j, int e) {
        put(reinterpret_cast<float2*>(to), make_float2(scale * d[0][j][e], scale * d[0][j][e + 1]), add);
      });
    else
      for_each_pair([&](float* to, int j, int e) {
        put(to, scale * d[0][j][e], add);
        if (8 * j + 2 * (lane % 4) + 1 < width) put(to + view.stride[3], scale * d[0][j][e + 1], add);
      });
  }
  // No other thread adds here. The addition is atomic only so that the thread does not wait for it.
  template <class T>
  __device__ __forceinline__ static void put(T* to, T x, bool add) {
    if (add)
      atomicAdd(to, x);
    else
      *to = x;
  }
};

template <int kHeadDim>
__global__ void __launch_bounds__(BackwardBf16x2Sm90Kernel<kHeadDim>::kThreads, 1)
    attention_backward_bf16x2_sm90(const __grid_constant__ BackwardBf16x2Sm90Arguments arguments) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using Kernel = BackwardBf16x2Sm90Kernel<kHeadDim>;
  extern __shared__ __align__(kBoxAlignment) char shared_boxes[];
  Kernel::run(arguments, *reinterpret_cast<typename Kernel::Shared*>(shared_boxes));
#endif
}

// A pass's workspace: that of all backward passes, then the digits.
template <int kHeadDim>
struct BackwardBf16x2Sm90Workspace {
  BackwardWorkspace space;
  Bf16x2RowsArguments rows;  // queries, keys, values, gradients of outputs
  int64_t bytes;

  BackwardBf16x2Sm90Workspace(const BackwardPass& pass, void* workspace)
      : space(pass.problem, pass.gradients, kHeadDim, true, 0, workspace) {
    const AttentionProblem& p = pass.problem;
    const bool packed = p.query_starts != nullptr;
    const int64_t batch = packed ? 1 : p.batch, queries = packed ? p.total_queries : p.queries,
                  keys = packed ? p.total_keys : p.keys;
    const auto tensor = [&](const ConstView4& from, int64_t heads, int64_t count, int64_t columns) {
      return Bf16x2Tensor{.from = from, .batch = batch, .heads = heads, .rows = count, .columns = columns};
    };
    rows = {tensor(p.query, p.heads, queries, p.head_dim), tensor(p.key, p.key_heads, keys, p.head_dim),
            tensor(p.value, p.value_heads, keys, p.head_dim_v),
            tensor(pass.gradients.grad_out, p.heads, queries, p.head_dim_v)};
    ScratchAllocator scratch(workspace);
    scratch.take<std::byte>(space.bytes);
    for (Bf16x2Tensor& t : rows.tensor) t.digits = scratch.take<__nv_bfloat16>(Bf16x2Rows<kHeadDim>::elements(t));
    bytes = scratch.bytes();
  }
};

template <int kHeadDim>
const char* AttentionBackwardBf16x2Sm90<kHeadDim>::refusal(const BackwardPass& pass, const Gpu& gpu) {
  const AttentionProblem& p = pass.problem;
  const int64_t queries = p.query_starts ? p.total_queries : p.queries, keys = p.query_starts ? p.total_keys : p.keys;
  if (gpu.major != 9) return "the GPU's compute capability is not 9.0";
  if (p.dtype != DType::kFloat32 || !p.tf32) return "it takes float32 where torch allows tf32";
  if (pass.deterministic) return "deterministic";
  if (p.mask.data || p.is_sparse() || p.dropout != 0 || ScoreMod(p).has_score_mod)
    return "a mask, dropout, a softcap, ALiBi or a scale that is not positive";
  if (p.batch == 0 || p.heads == 0 || queries == 0 || keys == 0 || p.head_dim == 0 || p.head_dim_v == 0) return "a size of 0";
  if (std::max(queries, keys) > kMaxLengthBackwardSm90) return "a length over 2^28";
  return nullptr;
}

template <int kHeadDim>
int64_t AttentionBackwardBf16x2Sm90<kHeadDim>::workspace_bytes(const BackwardPass& pass) {
  return BackwardBf16x2Sm90Workspace<kHeadDim>(pass, nullptr).bytes;
}

template <int kHeadDim>
void AttentionBackwardBf16x2Sm90<kHeadDim>::run(const BackwardPass& pass, void* workspace, CUstream_st* stream) {
  using Kernel = BackwardBf16x2Sm90Kernel<kHeadDim>;
  using Rows = Bf16x2Rows<kHeadDim>;
  const AttentionProblem& problem = pass.problem;
  const AttentionGradients& gradients = pass.gradients;
  const BackwardBf16x2Sm90Workspace<kHeadDim> work(pass, workspace);
  const auto& [query, key, value, grad_out] = work.rows.tensor;
  launch_bf16x2_rows<kHeadDim>(work.rows, stream);
  prepare_backward(problem, gradients, work.space, stream);
  const BackwardBf16x2Sm90Arguments arguments{
      .query = Rows::tma_tensor(query, problem, Kernel::kRows),
      .key = Rows::tma_tensor(key, problem, Kernel::kRows),
      .value = Rows::tma_tensor(value, problem, Kernel::kRows),
      .grad_out = Rows::tma_tensor(grad_out, problem, Kernel::kRows),
      .problem = problem,
      .gradients = gradients,
      .space = work.space,
      .list = TileList::of(problem, true, gradients.kv_grad_heads, Kernel::kKeys).by_length(problem.visible, sm_count()),
      .scale = ScoreMod(problem).scale};
  launch<attention_backward_bf16x2_sm90<kHeadDim>>(arguments, arguments.list.count(), Kernel::kThreads,
                                                   static_cast<int>(sizeof(typename Kernel::Shared)), stream);
  convert_dq_accum(problem, gradients, work.space, stream);
  if (gradients.grad_sinks) reduce_sink_partials(problem, gradients, work.space, stream);
  add_large_rows(problem, gradients, work.space, stream);
}

}  // namespace flash_online::cuda
