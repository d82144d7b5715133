// A math warpgroup of the Hopper kernel of e4m3 attention: 64 queries of a work tile, from the products of scores to the
// results.
#pragma once

#include "../../../../core/online_softmax.h"
#include "../../../hw/compiler.cuh"
#include "../../../hw/float8.cuh"
#include "../../../hw/math.cuh"
#include "../../../hw/mbarrier.cuh"
#include "../../../hw/named_barrier.cuh"
#include "../../../hw/shared_memory.cuh"
#include "../../../mma/fragments.cuh"
#include "config.cuh"

namespace flash_online::cuda {

template <class Out, class Variant>
struct Float8Sm90Kernel<Out, Variant>::MathWarpgroup {
  const Float8Arguments& a;
  Shared& shared;
  int warpgroup, first_row, lane;  // first_row: of the warp, in the tile
  PipelineState<kQueryStages> query;
  PipelineState<kStages> key, value;
  float out[kOutRegisters], part[kPartRegisters], score[kScoreRegisters];
  unsigned weight[kWords];  // four e4m3 elements each: the left operand of P V
  // Of rows lane / 4 and lane / 4 + 8 of the warp's 16. Maxima are those of scores before their multiplication by `scale`;
  // sums are the lane's own, of weights before their rounding.
  float max[2], sum[2], factor[2];
  float scale;  // of scores, in base 2
  bool is_scaled_first;  // whether scores are products times their scale before all else, and `scale` is 1
  bool is_large;  // whether scores may be beyond kLargeScore
  bool maxima_are_positive;  // of all rows of the warp, or 0
  struct Capped {
    float scale, term[2];  // of products, and the rows' terms, in units of near_tanh_of_exponent()
  };
  struct NotCapped {};
  [[no_unique_address]] std::conditional_t<kOptions, Capped, NotCapped> capped;

  __device__ __forceinline__ void release(uint64_t* barrier) {
    if (lane == 0) arrive(barrier);
  }
  // Warpgroups have the tensor cores in turn, from the first product of a block to the end of the last one. Without turns
  // all warpgroups would come to multiply at the same time and then to the exponentials at the same time.
  __device__ __forceinline__ void take_turn() {
    if constexpr (kTile.takes_turns) sync_named(kTurnBarrier + warpgroup, 256);
  }
  __device__ __forceinline__ void end_turn() {
    if constexpr (kTile.takes_turns) arrive_named(kTurnBarrier + (warpgroup + 1) % kWarpgroups, 256);
  }

  __device__ __forceinline__ void issue_scores() {
    const uint64_t queries =
                       k_major_descriptor(shared_address(shared.query[query.stage].box[0][warpgroup * kRowsPerWarpgroup])),
                   keys = k_major_descriptor(shared_address(shared.key[key.stage].box));
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kHeadDimSteps; ++step)
      Product::ss(score, offset_descriptor(queries, step / 4 * kRows * kBoxBytes + step % 4 * 32),
                  offset_descriptor(keys, step / 4 * kKeys * kBoxBytes + step % 4 * 32), step > 0);
    wgmma_commit();
  }
  // What columns [n * kPartColumns, ..) of P V are.
  __device__ __forceinline__ void issue_part(int n) {
    const uint64_t values = k_major_descriptor(shared_address(shared.value[value.stage].box[n * kPartColumns]));
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kKeySteps; ++step) {
      const unsigned left[4] = {weight[4 * step], weight[4 * step + 1], weight[4 * step + 2], weight[4 * step + 3]};
      PartProduct::rs(part, left, offset_descriptor(values, step * 32), step > 0);
    }
    wgmma_commit();
  }
  // tanh_of_exponent() within 2^-19: two terms of its series are enough, where products have 8 bits.
  __device__ __forceinline__ static float near_tanh_of_exponent(float u) {
    constexpr float kFirst = kTanhTerm[0], kSecond = kTanhTerm[1];
    return fabsf(u) < 0.3f ? u * fmaf(u * u, kSecond, kFirst) : large_tanh_of_exponent(u);
  }
  __device__ __forceinline__ void cap_scores() {
    const float cap = static_cast<float>(a.problem.softcap) * kLog2E;
#pragma unroll
    for (int i = 0; i < kScoreRegisters; ++i)
      score[i] = cap * near_tanh_of_exponent(fmaf(score[i], capped.scale, capped.term[i / 2 % 2]));
  }
  // What is left to add to the scores times `scale`, the exponents of weights, where `most` is the maximum.
  __device__ __forceinline__ float bias_of(float most) const {
    return is_large ? kWeightExponent : fmaf(-pivot(most), scale, kWeightExponent);
  }
  __device__ __forceinline__ void scale_first() {
    if constexpr (kOptions) {
      if (has_softcap()) return cap_scores();
    }
    const float first = scale_of_products() * kLog2E;
#pragma unroll
    for (int i = 0; i < kScoreRegisters; ++i) score[i] *= first;
  }
  // The largest score of each of the lane's rows, and the maxima so far. The bits of floats from 0 on are in the order of
  // integers, for which there is an instruction that compares three: with a maximum from 0 on, a negative score does not
  // matter. NaN counts as more than all others, and makes the row NaN, as it must.
  __device__ __forceinline__ void find_maxima(float (&most)[2]) {
    if (maxima_are_positive) {
      int bits[2][2];
#pragma unroll
      for (int r = 0; r < 2; ++r) bits[r][0] = __float_as_int(max[r]), bits[r][1] = 0;
#pragma unroll
      for (int i = 0; i < kScoreRegisters; i += 2) {
        int& m = bits[i / 2 % 2][i / 4 % 2];
        m = __vimax3_s32(m, __float_as_int(score[i]), __float_as_int(score[i + 1]));
      }
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        int m = bits[r][0] > bits[r][1] ? bits[r][0] : bits[r][1];
        m = __vimax3_s32(m, __shfl_xor_sync(~0u, m, 1), m);
        most[r] = __int_as_float(__vimax3_s32(m, __shfl_xor_sync(~0u, m, 2), m));
      }
    } else {
      float m[2][2] = {{max[0], score[0]}, {max[1], score[2]}};
#pragma unroll
      for (int i = 1; i < kScoreRegisters; ++i)
        if (i != 2) m[i / 2 % 2][i % 2] = fmaxf(m[i / 2 % 2][i % 2], score[i]);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float x = fmaxf(m[r][0], m[r][1]);
        x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
        most[r] = fmaxf(x, __shfl_xor_sync(~0u, x, 2));
      }
      maxima_are_positive = __all_sync(~0u, most[0] >= 0 && most[1] >= 0);
    }
  }
  // Raises the maxima to the block's, and returns the exponents' biases.
  __device__ __forceinline__ void raise_maxima(const Block& block, float (&bias)[2]) {
    fence_registers(score);
    if (is_scaled_first) [[unlikely]]
      scale_first();
    if (block.mixed_for >> warpgroup & 1) [[unlikely]]
      hide(block.key);
    float most[2];
    find_maxima(most);
    if (is_large) [[unlikely]] {
#pragma unroll
      for (int i = 0; i < kScoreRegisters; ++i) score[i] -= pivot(most[i / 2 % 2]);
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      bias[r] = bias_of(most[r]);
      // The rounding of a bias belongs to the weights that were made with it.
      const float rise = is_large ? (max[r] - most[r]) * scale : bias[r] - bias_of(max[r]);
      factor[r] = max[r] == -INFINITY ? 0 : exp2_flushed(rise);
      max[r] = most[r];
    }
  }
  // The softmax of a block: its weights, and the rows' maxima and sums.
  __device__ __forceinline__ void compute_weights(const Block& block) {
    float bias[2], of_block[2][2];
    uint16_t pair[2 * kWords];
    raise_maxima(block, bias);
#pragma unroll
    for (int i = 0; i < kScoreRegisters; ++i) {
      score[i] = exp2_flushed(fmaf(score[i], scale, bias[i / 2 % 2]));
      float& partial = of_block[i / 2 % 2][i % 2];
      partial = i < 4 ? score[i] : partial + score[i];
      if (i % 2) pair[i / 2] = e4m3_pair(score[i - 1], score[i]);
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) sum[r] = fmaf(sum[r], factor[r], of_block[r][0] + of_block[r][1]);
#pragma unroll
    for (int i = 0; i < kWords; ++i) weight[i] = join_pairs_here(pair[i / 2 * 4 + i % 2], pair[i / 2 * 4 + i % 2 + 2]);
  }

  // Hides the scores of a mixed block by position and by spans.
  __device__ __forceinline__ void hide(int first_key) {
    const AttentionProblem& p = a.problem;
    const int keys = static_cast<int>(p.keys), queries = static_cast<int>(p.queries);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = min(row_of(r), queries - 1);
      const KeyRange range = keys_of(p.visible, row, keys);
      const int column = first_key + 2 * (lane % 4), begin = static_cast<int>(range.begin) - column,
                end = static_cast<int>(range.end) - column;
#pragma unroll
      for (int j = 0; j < kScoreRegisters / 4; ++j)
#pragma unroll
        for (int e = 0; e < 2; ++e)
          if (8 * j + e < begin || 8 * j + e >= end) score[4 * j + 2 * r + e] = -INFINITY;
    }
    if constexpr (kOptions) {
      const HeadSparsity sparsity(p, {{0, queries}, {0, keys}, p.visible}, tile().batch, tile().head);
      if (!sparsity.exists()) return;
      const int row[2] = {min(row_of(0), queries - 1), min(row_of(1), queries - 1)};
      unsigned shown[2] = {};
#pragma unroll 1  // in registers there is no room for the bounds of many keys
      for (int n = 0; n < kScoreRegisters / 2; ++n) {
        const int at = min(first_key + n / 2 * 8 + 2 * (lane % 4) + n % 2, keys - 1);
        shown[0] |= unsigned{sparsity.show(row[0], at)} << n, shown[1] |= unsigned{sparsity.show(row[1], at)} << n;
      }
#pragma unroll
      for (int i = 0; i < kScoreRegisters; ++i)
        if (!(shown[i / 2 % 2] >> (i / 4 * 2 + i % 2) & 1)) score[i] = -INFINITY;
    }
  }

  // ---- a tile

  __device__ __forceinline__ const WorkTile& tile() const { return shared.tile[query.stage]; }
  __device__ __forceinline__ int row_of(int r) const { return tile().first_query + first_row + lane / 4 + 8 * r; }
  __device__ __forceinline__ bool has_softcap() const { return kOptions && a.problem.softcap > 0; }
  // In natural units.
  __device__ __forceinline__ float scale_of_products() const {
    const int head = key_head(a, tile().head), batch = tile().batch;
    return scale_of(a.operands.query_scale, a.operands.query_scale_stride, batch, head) *
           scale_of(a.operands.key_scale, a.operands.key_scale_stride, batch, head) * static_cast<float>(a.problem.scale);
  }
  __device__ __forceinline__ float row_term(int r) const {
    const int row = row_of(r);
    return a.operands.row_terms && row < a.problem.queries
               ? __ldg(a.operands.row_terms + (int64_t{tile().batch} * a.heads + tile().head) * a.problem.queries + row)
               : 0;
  }

  __device__ __forceinline__ void begin_tile() {
    scale = scale_of_products() * kLog2E;
    is_scaled_first = has_softcap() || !(scale > 1e-30f && scale < 1e30f);
    // As float8's largest products are: a scale that was applied before may be any.
    is_large = is_scaled_first || scale * kMostOfProduct > kLargeScore;
    if (is_scaled_first) scale = 1;
    maxima_are_positive = false;
    if constexpr (kOptions) {
      const float to_exponent = 2 * kLog2E / static_cast<float>(a.problem.softcap);
      capped = {scale_of_products() * to_exponent, {row_term(0) * to_exponent, row_term(1) * to_exponent}};
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) max[r] = -INFINITY, sum[r] = 0;
#pragma unroll
    for (int i = 0; i < kOutRegisters; ++i) out[i] = 0;
  }

  // The next block; its `key` is negative if the tile has no more.
  __device__ __forceinline__ Block wait_block() {
    wait(&shared.key_full[key.stage], key.parity);
    return shared.block[key.stage];
  }
  __device__ __forceinline__ void end_scores() {
    release(&shared.key_empty[key.stage]);
    key.advance();
  }
  __device__ __forceinline__ void end_values() {
    release(&shared.value_empty[value.stage]);
    value.advance();
  }
  // out = factor out + part, of the part's columns.
  __device__ __forceinline__ void absorb_part(int n) {
    fence_registers(part);
#pragma unroll
    for (int i = 0; i < kPartRegisters; ++i) {
      float& o = out[n * kPartRegisters + i];
      o = fmaf(o, factor[i / 2 % 2], part[i]);
    }
  }
  // The products P V of the block before, and the scores of the next one if there is one.
  __device__ __forceinline__ void multiply(const Block& block) {
    wait(&shared.value_full[value.stage], value.parity);
    take_turn();
#pragma unroll
    for (int n = 0; n < kTile.parts; ++n) {
      issue_part(n);
      if (kTile.overlaps && n + 1 == kTile.parts && block.key >= 0) {
        issue_scores();  // they run while the products are absorbed
        wgmma_wait<1>();
      } else {
        wgmma_wait<0>();
      }
      if (n + 1 == kTile.parts) end_values();
      absorb_part(n);
    }
    if (!kTile.overlaps && block.key >= 0) issue_scores();
    wgmma_wait<0>();
    end_turn();
  }
  __device__ __forceinline__ bool is_hidden(const Block& block) const { return kBounded && block.hidden_from >> warpgroup & 1; }
  // Passes over a block that other warpgroups alone see. Without waiting for its values it could be ahead of them by more
  // blocks than there are stages.
  __device__ __forceinline__ void skip_block() {
    end_scores();
    wait(&shared.value_full[value.stage], value.parity);
    end_values();
  }
  __device__ __forceinline__ void skip_hidden(Block& block) {
#pragma unroll 1
    while (is_hidden(block)) {
      pass_turn();
      skip_block();
      block = wait_block();
    }
  }
  __device__ __forceinline__ void pass_turn() {
    take_turn();
    end_turn();
  }
  // Blocks that position hides from a warpgroup are the first or the last ones of a tile.
  __device__ __forceinline__ void run_blocks_in_turns() {
    Block block = wait_block();
    if (is_hidden(block)) [[unlikely]] {
      skip_hidden(block);
      if (block.key < 0) return pass_turn();  // as many turns as a warpgroup that sees some block has
    }
    if (block.key < 0) return;
    take_turn();
    issue_scores();
    wgmma_wait<0>();
    end_turn();
    end_scores();
    compute_weights(block);
#pragma unroll 1
    for (block = wait_block(); block.key >= 0 && !is_hidden(block); block = wait_block()) {
      multiply(block);
      end_scores();
      compute_weights(block);
    }
    const Block none{-1, 0, 0};
    multiply(none);
    skip_hidden(block);
  }
  __device__ __forceinline__ void run_blocks() {
#pragma unroll 1
    for (Block block = wait_block(); block.key >= 0; block = wait_block()) {
      if (is_hidden(block)) [[unlikely]] {
        skip_block();
        continue;
      }
      issue_scores();
      wgmma_wait<0>();
      end_scores();
      compute_weights(block);
      wait(&shared.value_full[value.stage], value.parity);
#pragma unroll
      for (int n = 0; n < kTile.parts; ++n) {
        issue_part(n);
        wgmma_wait<0>();
        if (n + 1 == kTile.parts) end_values();
        absorb_part(n);
      }
    }
  }

  // Division by the sums, lse, and the store of the results.
  __device__ __forceinline__ void end_tile() {
    const AttentionProblem& p = a.problem;
    const float value_scale =
        scale_of(a.operands.value_scale, a.operands.value_scale_stride, tile().batch, key_head(a, tile().head));
    const float* const sinks = static_cast<const float*>(p.sinks);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float total = sum[r] + __shfl_xor_sync(~0u, sum[r], 1);
      total += __shfl_xor_sync(~0u, total, 2);
      const int row = row_of(r);
      // In base 2, without the row's term: sums are those of weights times 2^kWeightExponent.
      OnlineSoftmax<float, Binary> state;
      state.max = is_large ? pivot(max[r]) * scale : kWeightExponent - bias_of(max[r]);
      state.sum = total * exp2_flushed(-kWeightExponent);
      if (total == 0) state.max = -INFINITY;
      const float term = has_softcap() ? 0 : row_term(r) * kLog2E;
      state.max += term;
      float inverse = value_scale * exp2_flushed(-kWeightExponent);
      const bool is_empty = state.sum == 0;
      if (sinks) {
        const float sink = __ldg(sinks + tile().head) * kLog2E;
        inverse *= state.raise_max(sink);
        state.add(state.weight(sink));
      }
      inverse = state.sum == 0 || is_empty ? 0 : inverse / state.sum;
      if (p.lse && lane % 4 == 0 && row < p.queries) {
        float lse = state.lse() * 0.693147182464599609375f;
        if (sinks && is_empty) lse = __ldg(sinks + tile().head);
        static_cast<float*>(p.lse)[tile().batch * p.lse_stride[0] + tile().head * p.lse_stride[1] + row] = lse;
      }
#pragma unroll
      for (int i = 0; i < kOutRegisters / 4; ++i) out[4 * i + 2 * r] *= inverse, out[4 * i + 2 * r + 1] *= inverse;
    }
    store();
  }
  // A quad has 2 columns of every 8 of a row in each lane, and after a transposition all 8 of every fourth group.
  __device__ __forceinline__ void store() {
    const AttentionProblem& p = a.problem;
    const int columns = static_cast<int>(p.head_dim_v);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = row_of(r);
      Out* const to = static_cast<Out*>(p.out.data) + tile().batch * p.out.stride[0] + tile().head * p.out.stride[1] +
                      row * p.out.stride[2];
#pragma unroll
      for (int i = 0; i < kOutRegisters / 16; ++i) {
        unsigned words[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) words[j] = pair_of<Out>(out[16 * i + 4 * j + 2 * r], out[16 * i + 4 * j + 2 * r + 1]);
        transpose_quad(words);
        const int column = 32 * i + lane % 4 * 8;
        if (row >= p.queries || column >= columns) continue;
        if (a.stores_vectors) {
          *reinterpret_cast<uint4*>(to + column) = {words[0], words[1], words[2], words[3]};
        } else {
          const uint4 all{words[0], words[1], words[2], words[3]};
          for (int e = 0; e < min(8, columns - column); ++e)
            to[(column + e) * p.out.stride[3]] = narrow<Out>(element<Out>(all, e));
        }
      }
    }
  }

  __device__ __forceinline__ void run() {
    if (warpgroup == kWarpgroups - 1) end_turn();
    while (true) {
      wait(&shared.query_full[query.stage], query.parity);
      if (tile().batch < 0) return;
      begin_tile();
      if constexpr (kTile.takes_turns)
        run_blocks_in_turns();
      else
        run_blocks();
      skip_block();  // which ends the tile's, and has no values
      end_tile();
      __syncwarp();
      release(&shared.query_empty[query.stage]);
      query.advance();
    }
  }
};

}  // namespace flash_online::cuda
