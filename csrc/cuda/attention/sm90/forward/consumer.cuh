// A warpgroup of the Hopper forward kernel that computes: scores, their softmax, results.
#pragma once

#include <cfloat>

#include "../../../../core/online_softmax.h"
#include "../../../hw/math.cuh"
#include "../../../hw/mbarrier.cuh"
#include "../../../hw/named_barrier.cuh"
#include "../../../hw/stmatrix.cuh"
#include "../../../hw/vector.cuh"
#include "../../../hw/wgmma.cuh"
#include "config.cuh"

namespace flash_online::cuda {

template <class T, class Tile>
struct ForwardSm90Kernel<T, Tile>::Group {
  using Row = OnlineSoftmax<float, Binary>;
  // Weights are measured from a maximum that is raised only where a thread's weights of a block sum to more than this: in
  // float16 a weight must stay below 65504, and float32 sums of rows and products must not overflow.
  static constexpr float kLargestSum = std::is_same_v<T, __half> ? 0x1p15f : 0x1p24f;
  static constexpr float kSlack = 8;  // where values are split: weights are up to 2^this before the maximum is raised

  const ForwardSm90Arguments& a;
  Shared& shared;
  int group;  // which 64 of the tile's queries: the warpgroup's number, or 0 where values are split
  int part;  // which of the values' columns: 0, or the warpgroup's number
  int warp, lane;
  PipelineState<kJobs> next;
  PipelineState<kQueries> query;
  PipelineState<kKeyStages> key;
  PipelineState<kStages> value;
  int job;  // the tile's place among the jobs
  int block, end, whole_begin, whole_end;  // the block at hand, and this warpgroup's numbers in the job
  // Blocks that only other warpgroups see: before the next of this one's, and behind the tile's last.
  int skipped = 0, behind = 0;
  // What a mask does to a block: looked up a block ahead.
  struct Masked {
    unsigned shown;  // bits of a bool mask, as MaskBits has them
    bool plain;
  };
  struct Walk {
    int next_block, next_skipped;  // `block` of the next, and what is read before it for others
    Masked next, now;
    // Of 32 blocks, from `from` on, those behind the next: what the tile reads, what this warpgroup takes, its plain ones.
    unsigned read, taken, plain;
    int from;
    const unsigned* bits;  // of the lane's rows
  };
  [[no_unique_address]] std::conditional_t<kMasked, Walk, Nothing> walk;
  [[no_unique_address]] std::conditional_t<kEverything, unsigned, Nothing> kept;  // what dropout keeps: kept_bit()
  float out[kOuts];
  float score[kScores];
  unsigned weight[kScores / 2];  // of 16-bit pairs: the left operand of the second product
  unsigned held[kTile.held_query ? kWidthSteps : 1][4];
  Row row[2];  // rows lane / 4 and lane / 4 + 8 of the warp's 16; sums are a thread's own
  bool accumulate;  // whether `out` holds something of this tile

  __device__ __forceinline__ void take_turn() {
    if constexpr (kTile.in_turn) sync_named(kTurn + group + part, 256);
  }
  __device__ __forceinline__ void pass_turn() {
    if constexpr (kTile.in_turn) arrive_named(kTurn + (group + part + 1) % kTile.warpgroups, 256);
  }
  __device__ __forceinline__ void release(uint64_t* barrier) {
    if (lane == 0) arrive(barrier);
  }

  // Where lane's 16 bytes of a 16 x 16 matrix stand in a box, the one for ldmatrix_x4 and stmatrix_x4.
  __device__ __forceinline__ unsigned matrix_place(int box_row, int chunk) const {
    const int r = box_row + lane % 16;
    return r * kRowBytes + ((chunk + lane / 16) ^ (r % 8)) * 16;
  }

  __device__ __forceinline__ void hold_query() {
    const unsigned base = shared_address(shared.query[query.stage].box);
#pragma unroll
    for (int step = 0; step < kWidthSteps; ++step)
      ldmatrix_x4(held[step], base + step / 4 * kRows * kRowBytes + matrix_place(16 * warp, step % 4 * 2));
  }

  // In 64 bits there are three times the instructions between the first products; in 32 one more register is held.
  __device__ __forceinline__ static uint64_t further(uint64_t descriptor, unsigned bytes) {
    return kEverything ? offset_descriptor(descriptor, bytes) : descriptor + bytes / kDescriptorStep;
  }

  // Where keys come in two parts, the first is done and released behind it.
  __device__ __forceinline__ void start_scores() {
    uint64_t keys = k_major_descriptor(shared_address(shared.key[key.stage].box));
    wgmma_fence();
    if constexpr (kTile.held_query) {
#pragma unroll
      for (int step = 0; step < kWidthSteps; ++step)
        Wgmma<T, kKeys>::template rs<false>(score, held[step], further(keys, step / 4 * kKeys * kRowBytes + step % 4 * 32),
                                            step > 0);
    } else {
      uint64_t queries = k_major_descriptor(shared_address(shared.query[query.stage].box));
      if constexpr (kSplit) queries = opaque(queries);
      constexpr int kPartSteps = kWidthSteps / kKeyParts;
#pragma unroll
      for (int step = 0; step < kWidthSteps; ++step) {
        if (step > 0 && step % kPartSteps == 0) {
          wgmma_commit();
          PipelineState<kKeyStages> next_part = key;
          next_part.advance();
          wait(&shared.key_full[next_part.stage], next_part.parity);
          keys = k_major_descriptor(shared_address(shared.key[next_part.stage].box));
          wgmma_fence();
        }
        Wgmma<T, kKeys>::template ss<false>(score, further(queries, step / 4 * kRows * kRowBytes + step % 4 * 32),
                                            further(keys, step % kPartSteps / 4 * kKeys * kRowBytes + step % 4 * 32), step > 0);
      }
    }
    wgmma_commit();
    if constexpr (kKeyParts == 2) {
      wgmma_wait<1>();
      release_key();
    }
  }

  __device__ __forceinline__ void start_out() {
    const unsigned first_box = shared_address(shared.value[value.stage].box[part * kOutColumns / kBoxColumns]);
    uint64_t values = mn_major_descriptor(first_box, kKeys * kRowBytes);
    if constexpr (kSplit) values = opaque(values);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kKeySteps; ++step) {
      const unsigned left[4] = {weight[4 * step], weight[4 * step + 1], weight[4 * step + 2], weight[4 * step + 3]};
      Wgmma<T, kOutColumns>::template rs<true>(out, left, further(values, step * 16 * kRowBytes), step > 0 || accumulate);
    }
    wgmma_commit();
    accumulate = true;
  }

  // -inf for the keys that a row does not see, in a block that not all rows see all of.
  __device__ __forceinline__ void hide() {
    // Registers are too few to hold these with more to do.
    constexpr bool kLooksUp = kPacked || kEverything;
    const auto& mine_of_tile = shared.job[job].group[group];
    const bool left = block < (kLooksUp ? mine_of_tile.whole_begin : whole_begin),
               right = block >= (kLooksUp ? mine_of_tile.whole_end : whole_end);
    if (!left && !right) [[likely]]
      return;
    const int first = block * kKeys, mine = first + lane % 4 * 2, row_of_tile = group * kRows + 16 * warp;
    const int band_begin = shared.job[job].band_begin + row_of_tile, band_end = shared.job[job].band_end + row_of_tile;
    const int keys = ForwardSm90Kernel::keys(a, shared.job[job]);
    const int all_from = band_begin + 15 - first, all_to = min(band_end, keys) - first;
    if (right) {
      const int to[2] = {min(band_end + lane / 4, keys) - mine, min(band_end + lane / 4 + 8, keys) - mine};
#pragma unroll
      for (int step = 0; step < kKeySteps; ++step) {
        if (16 * step + 16 <= all_to) continue;
#pragma unroll
        for (int i = 0; i < 8; ++i)
          if (16 * step + i / 4 * 8 + i % 2 >= to[i / 2 % 2]) score[8 * step + i] = -INFINITY;
      }
    }
    if (left) {
      const int from[2] = {band_begin + lane / 4 - mine, band_begin + lane / 4 + 8 - mine};
#pragma unroll
      for (int step = 0; step < kKeySteps; ++step) {
        if (16 * step >= all_from) continue;
#pragma unroll
        for (int i = 0; i < 8; ++i)
          if (16 * step + i / 4 * 8 + i % 2 < from[i / 2 % 2]) score[8 * step + i] = -INFINITY;
      }
    }
  }

  // Scores as they come from the product to scores in the units of `scale`: softcap and ALiBi.
  __device__ __forceinline__ void adjust() {
    if (a.softcap > 0) {
      constexpr bool kSplitsSmall = kTile.head_dim <= 128;  // beyond, the registers are too few for both ways
      float squares = 0;
#pragma unroll
      for (int i = 0; kSplitsSmall && i < kScores; ++i) squares = fmaf(score[i], score[i], squares);
      if (kSplitsSmall && __all_sync(~0u, squares < a.small_scores)) {
#pragma unroll
        for (int i = 0; i < kScores; ++i) score[i] *= polynomial(a.softcap_term, score[i] * score[i]);
      } else {
#pragma unroll
        for (int i = 0; i < kScores; ++i) score[i] = a.softcap * tanh_of_exponent(score[i] * a.softcap_scale);
      }
    }
    if (a.alibi_slopes) {
      const Job& tile = shared.job[job];
      const int row = tile.first_query + group * kRows + 16 * warp + lane / 4;
      int offset = static_cast<int>(a.visible.offset);
      if constexpr (kPacked) offset = tile.of.offset;
      const float distance = static_cast<float>(row + offset - block * kKeys - lane % 4 * 2);
#pragma unroll
      for (int i = 0; i < kScores; ++i)
        score[i] = fmaf(-tile.slope, fabsf(distance + static_cast<float>(i / 2 % 2 * 8 - i / 4 * 8 - i % 2)), score[i]);
    }
  }

  // ---- masks and dropout

  // Beside the product of the block's scores.
  __device__ __forceinline__ void fetch_kept() {
    if constexpr (kEverything) {
      if (a.rng) {
        // Of a query's keys the lane has two of every eight.
        const auto* const rows = &shared.drawn.kept[key.stage][group * kRows + 16 * warp + lane / 4];
        const auto own = [&](const auto& of_row) {
          constexpr unsigned kTwo = 0x03030303;
          const uint2 keys = reinterpret_cast<const uint2&>(of_row);
          return (keys.x >> lane % 4 * 2 & kTwo) | (keys.y >> lane % 4 * 2 & kTwo) << 4;
        };
        kept = own(rows[0]) | own(rows[8]) << 2;
      }
    }
  }
  static constexpr unsigned kept_bit(int i) { return 1u << (i / 4 % 4 * 8 + i / 16 * 4 + i % 4); }

  // The next block of the walk, `end` or more if there is none: arithmetic for the weights' exponentials to hide.
  __device__ __forceinline__ void look_ahead() {
    if constexpr (kMasked) {
      const unsigned lowest = walk.taken & -walk.taken, below = lowest - 1;
      walk.next_block = walk.from + __popc(below);
      walk.next_skipped += __popc(walk.read & below);
      walk.next.plain = walk.plain & lowest;
      if (a.mask_way == MaskWay::kBits) walk.next.shown = __ldg(walk.bits + min(walk.next_block, a.bits_last_unit) * kWarpSize);
      walk.taken ^= lowest;
      walk.read &= ~(lowest | below);
    }
  }
  // Words of the map until one has a block for the next look_ahead(), or is the last.
  __device__ __forceinline__ void load_words() {
    const auto& map = shared.job[job].map;
    const int begin = shared.job[job].begin, shift = map.shift, n = walk.from - begin;
    walk.read = bits_of_blocks(map.read, shift, end - begin, n);
    walk.taken = bits_of_blocks(map.group[group].taken, shift, end - begin, n);
    walk.plain = bits_of_blocks(map.group[group].plain, shift, end - begin, n);
  }
  __device__ __forceinline__ void next_words() {
#pragma unroll 1
    while (walk.taken == 0 && walk.from + 32 < end) {
      walk.next_skipped += __popc(walk.read);
      walk.from += 32;
      load_words();
    }
  }

  template <class Element>
  __device__ __forceinline__ void add_boxes() {
    const unsigned base = shared_address(shared.mask.stage[key.stage].box[group]);
#pragma unroll
    for (int step = 0; step < kKeySteps; ++step) {
      unsigned words[4];
      ldmatrix_x4(words, base + (a.mask_rows == 1 ? (2 * step + lane / 16) * 16 : matrix_place(16 * warp, 2 * step)));
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 values = unpair<Element>(words[i]);
        score[8 * step + 2 * i] = fmaf(values.x, a.added_scale, score[8 * step + 2 * i]);
        score[8 * step + 2 * i + 1] = fmaf(values.y, a.added_scale, score[8 * step + 2 * i + 1]);
      }
    }
  }

  __device__ __forceinline__ void mask_scores() {
    if constexpr (kFloatMask) {
      a.mask_way == MaskWay::kHalves ? add_boxes<__half>() : add_boxes<__nv_bfloat16>();
    } else if (a.mask_way == MaskWay::kBits) {
#pragma unroll
      for (int i = 0; i < kScores; ++i)
        if (!(walk.now.shown >> i & 1)) score[i] = -INFINITY;
    }
  }

  __device__ __forceinline__ void settle_scores() {
    if constexpr (kEverything) {
      if (a.has_score_mod) [[unlikely]]
        adjust();
    }
    if constexpr (kMasked) {
      if (walk.now.plain) return;
      mask_scores();
    }
    hide();
  }

  // Raises the rows' maxima to the block's; returns in factor what was accumulated before must be multiplied by.
  __device__ __forceinline__ void raise(float (&factor)[2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float most[2] = {score[2 * r], score[2 * r + 1]};
#pragma unroll
      for (int i = 1; i < kScores / 4; ++i) {
        most[0] = fmaxf(most[0], score[4 * i + 2 * r]);
        most[1] = fmaxf(most[1], score[4 * i + 2 * r + 1]);
      }
      float all = fmaxf(most[0], most[1]);
      all = fmaxf(all, __shfl_xor_sync(~0u, all, 1));
      all = fmaxf(all, __shfl_xor_sync(~0u, all, 2));
      factor[r] = kSplit ? row[r].raise_max_lazily(kSlack, all * a.scale) : row[r].raise_max(all * a.scale);
    }
  }

  // What weights are measured from. Under a mask a row without a reference yet may stay so for many blocks: measured from
  // the lowest number, what it sees is infinite, and what it does not see is 0.
  __device__ __forceinline__ static float reference(float max) {
    if constexpr (kEverything) return max == -INFINITY ? -FLT_MAX : max;
    return pivot(max);
  }

  // Scores to weights, in place; sums of a thread's.
  __device__ __forceinline__ void weigh(float (&sum)[2]) {
    const float pivots[2] = {reference(row[0].max), reference(row[1].max)};
    sum[0] = sum[1] = 0;
#pragma unroll
    for (int i = 0; i < kScores; ++i) {
      const int r = i / 2 % 2;
      score[i] = exp2_flushed(fmaf(score[i], a.scale, -pivots[r]));
      sum[r] += score[i];
    }
  }

  __device__ __forceinline__ void pack_weights() {
    if constexpr (kEverything) {
      if (a.rng) {
#pragma unroll
        for (int i = 0; i < kScores; ++i)
          if (!(kept & kept_bit(i))) score[i] = 0;
      }
    }
#pragma unroll
    for (int i = 0; i < kScores / 2; ++i) weight[i] = pair(score[2 * i], score[2 * i + 1]);
  }
  __device__ static unsigned pair(float x, float y) {
    if constexpr (std::is_same_v<T, __half>) {
      const __half2 both = __floats2half2_rn(x, y);
      return reinterpret_cast<const unsigned&>(both);
    } else {
      const __nv_bfloat162 both = __floats2bfloat162_rn(x, y);
      return reinterpret_cast<const unsigned&>(both);
    }
  }

  // The block's weights measured from the maxima so far: no pass over the scores for their maximum, which hardly ever moves
  // far after the first block. Where it does, the scores are made again and everything is moved to the new maximum.
  __device__ __forceinline__ void next_weights() {
    look_ahead();
    float sum[2];
    weigh(sum);
    const bool astray = !(sum[0] < kLargestSum && sum[1] < kLargestSum) ||
                        (!kEverything && (row[0].max == -INFINITY || row[1].max == -INFINITY));
    // Asked before the wait, or the compiler puts the weights' work behind it.
    const bool any_astray = any_named(kVote + group, 128, astray);
    wgmma_wait<0>();
    release_value();
    if (any_astray) [[unlikely]] {
      start_scores();
      wgmma_wait<0>();
      settle_scores();
      float factor[2];
      raise(factor);
#pragma unroll
      for (int i = 0; i < kOuts; ++i) out[i] *= factor[i / 2 % 2];
      weigh(sum);
    }
    row[0].add(sum[0]);
    row[1].add(sum[1]);
  }

  // The same where values are split: from the block's maxima, so that its keys are not kept for a second product.
  __device__ __forceinline__ void raised_weights() {
    float factor[2], sum[2];
    raise(factor);
    weigh(sum);
    // Asked before the wait and of the weights too, or the compiler puts their work behind it.
    const bool offset_descriptor =
        any_named(kVote + part, 128, factor[0] != 1 || factor[1] != 1 || !(sum[0] < kLargestSum && sum[1] < kLargestSum));
    wgmma_wait<0>();
    release_value();
    if (offset_descriptor) {
#pragma unroll
      for (int i = 0; i < kOuts; ++i) out[i] *= factor[i / 2 % 2];
    }
    row[0].add(sum[0]);
    row[1].add(sum[1]);
  }

  // The rows' lse, and what their results are to be multiplied by.
  __device__ __forceinline__ void finish_rows(int of_job, float (&inverse)[2]) {
    const Job& tile = shared.job[of_job];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      row[r].sum += __shfl_xor_sync(~0u, row[r].sum, 1);
      row[r].sum += __shfl_xor_sync(~0u, row[r].sum, 2);
      float factor = 1;
      if (a.sinks) {
        const float sink = a.sinks[tile.head] * kLog2E;
        factor = row[r].raise_max(sink);
        row[r].add(row[r].weight(sink));
      }
      inverse[r] = row[r].sum == 0 ? 0 : factor * reciprocal(row[r].sum);
      if constexpr (kEverything) inverse[r] *= a.keep_scale;
    }
    // Two lanes of a row's four write its logarithm.
    const bool second = lane % 4 == 1;
    Row mine;
    mine.max = second ? row[1].max : row[0].max;
    mine.sum = second ? row[1].sum : row[0].sum;
    const int query_row = tile.first_query + group * kRows + 16 * warp + lane / 4 + (second ? 8 : 0);
    if (lane % 4 < 2 && part == 0 && query_row < queries(a, tile) && a.lse) {
      const int64_t at =
          (kPacked ? 0 : tile.batch * a.lse_stride[0]) + tile.head * a.lse_stride[1] + query_begin(tile) + query_row;
      // From the base 2, in two floats.
      constexpr float kLn2 = 0.693147182464599609375f, kLn2Low = -1.904654323148236017e-9f;
      const float high = mine.lse(), lse = high * kLn2;
      const float low = fmaf(high, kLn2, -lse) + fmaf(high, kLn2Low, mine.lse_low() * kLn2);
      a.lse[at] = lse;
      a.lse_low[at] = low - low == 0 ? low : 0;
    }
    __syncwarp();
  }

  __device__ __forceinline__ void store_out(int of_job, const float (&inverse)[2]) {
    const Job& tile = shared.job[of_job];
    const int first = tile.first_query + group * kRows + 16 * warp;
    if constexpr (kTile.staged_out) {
      if (lane == 0) tma_store_wait_read();
      __syncwarp();
#pragma unroll
      for (int step = 0; step < kOuts / 8; ++step) {
        unsigned words[4];
#pragma unroll
        for (int i = 0; i < 4; ++i)
          words[i] = pair(out[8 * step + 2 * i] * inverse[i % 2], out[8 * step + 2 * i + 1] * inverse[i % 2]);
        stmatrix_x4(words, shared_address(shared.out.box[4 * group + warp][step / 4]) + matrix_place(0, step % 4 * 2));
      }
      if (const int rows = queries(a, tile) - first; kPacked && rows < kOutRows) {
        // The next rows are another sequence's.
        __syncwarp();
        const int chunks = a.head_dim_v / kPerVector<T>;
        T* const to = static_cast<T*>(a.out) + tile.head * a.out_stride[1] + (query_begin(tile) + first) * a.out_stride[2];
        for (int n = lane; n < rows * chunks; n += kWarpSize) {
          const int r = n / chunks, chunk = n % chunks;
          *reinterpret_cast<uint4*>(to + r * a.out_stride[2] + chunk * kPerVector<T>) =
              reinterpret_cast<const uint4*>(shared.out.box[4 * group + warp][chunk / 8][r])[(chunk ^ r) % 8];
        }
      } else {
        fence_async_proxy();
        __syncwarp();
        if (lane == 0) {
#pragma unroll
          for (int box = 0; box < kValueBoxes; ++box)
            tma_store(a.out_map, {box * kBoxColumns, query_begin(tile) + first, tile.head, kPacked ? 0 : tile.batch},
                      shared.out.box[4 * group + warp][box]);
          tma_store_commit();
        }
      }
      __syncwarp();
    } else {
      // Four lanes hold 2 columns each of eight; turned, each holds all of eight and writes 16 bytes.
      static_assert(kOutColumns % 32 == 0);
      const bool odd = lane & 1, upper = lane & 2;
      const auto swap = [](bool high, unsigned& low_word, unsigned& high_word, int mask) {
        const unsigned got = __shfl_xor_sync(~0u, high ? low_word : high_word, mask);
        (high ? low_word : high_word) = got;
      };
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int at_row = first + lane / 4 + 8 * r;
        T* to = static_cast<T*>(a.out) + (kPacked ? 0 : tile.batch * a.out_stride[0]) + tile.head * a.out_stride[1] +
                (query_begin(tile) + at_row) * a.out_stride[2];
#pragma unroll
        for (int i = 0; i < kOuts / 16; ++i) {
          unsigned words[4];
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            const int at = 16 * i + 4 * j + 2 * r;
            words[j] = pair(out[at] * inverse[r], out[at + 1] * inverse[r]);
          }
          swap(odd, words[0], words[1], 1);
          swap(odd, words[2], words[3], 1);
          swap(upper, words[0], words[2], 2);
          swap(upper, words[1], words[3], 2);
          const int column = part * kOutColumns + 32 * i + lane % 4 * 8;
          if (at_row < queries(a, tile) && column < a.head_dim_v)
            *reinterpret_cast<uint4*>(to + column) = {words[0], words[1], words[2], words[3]};
        }
      }
      __syncwarp();
    }
  }

  // The next tile, or false if there is none.
  __device__ __forceinline__ bool fetch() {
    wait(&shared.job_full[next.stage], next.parity);
    job = next.stage;
    next.advance();
    const Job& of = shared.job[job];
    if constexpr (!kMasked) skipped = behind;
    if (of.batch < 0) return false;
    if constexpr (kMasked) {
      if (a.mask_way == MaskWay::kBits)
        walk.bits = a.bits + of.batch * a.bits_batch_step + of.head * a.bits_head_step +
                    min((of.first_query + group * kRows) / kBitRows + warp, a.bits_last_row) * a.bits_row_step + lane;
      walk.from = of.begin;
      walk.next_skipped = skipped;  // behind the last tile's blocks
      end = of.end;
      load_words();
      next_words();
      look_ahead();
      step();
    } else {
      block = of.group[group].begin;
      end = of.group[group].end;
      skipped += block - of.begin;
      behind = of.end - end;
    }
    whole_begin = of.group[group].whole_begin;
    whole_end = of.group[group].whole_end;
    return true;
  }
  // The tile's next block.
  __device__ __forceinline__ void step() {
    if constexpr (kMasked) {
      block = walk.next_block;
      skipped = walk.next_skipped;
      walk.next_skipped = 0;
      walk.now = walk.next;
      if (walk.taken == 0) [[unlikely]]
        next_words();
    } else {
      ++block;
    }
  }
  __device__ __forceinline__ bool is_last() const {
    if constexpr (kMasked) return walk.next_block >= end;
    return block + 1 == end;
  }

  // A block at a time: under a mask the values of this warpgroup's last block may still be held.
  __device__ __forceinline__ void skip_blocks() {
#pragma unroll 1
    for (; kGroups > 1 && skipped > 0; --skipped) {
      wait(&shared.key_full[key.stage], key.parity);
      release(&shared.key_empty[key.stage]);
      wait(&shared.value_full[key.stage], key.parity);
      release(&shared.value_empty[key.stage]);
      key.advance();
      if constexpr (!kMasked) value.advance();
      take_turn();
      pass_turn();
    }
  }

  // The first block's scores: started here, turned into weights by first_weights().
  __device__ __forceinline__ void start_tile() {
    skip_blocks();  // first of all: others' last scores, and with them the queries' buffers, may wait for these releases
    wait(&shared.query_full[query.stage], query.parity);
    if constexpr (kTile.held_query) hold_query();
    wait(&shared.key_full[key.stage], key.parity);
    take_turn();
    start_scores();
    pass_turn();
    if constexpr (kMasked) value = key;
    fetch_kept();
  }

  __device__ __forceinline__ void first_weights() {
    // Not behind hold_query(): its loads take their time, and an arrival overtakes them. A product has waited for them.
    if constexpr (kTile.held_query) release(&shared.query_empty[query.stage]);
    row[0] = row[1] = Row{};
    accumulate = false;
    settle_scores();
    look_ahead();
    float unused[2], sum[2];
    raise(unused);
    weigh(sum);
    row[0].add(sum[0]);
    row[1].add(sum[1]);
    release_scores();
    pack_weights();
    step();
  }

  __device__ void run() {
    query.advance(group);
    if (kTile.in_turn && group + part == kTile.warpgroups - 1) pass_turn();
    if (!fetch()) return;
    start_tile();
    wgmma_wait<0>();
    first_weights();
    while (true) {
#pragma unroll 1
      for (; block < end; step()) {
        if constexpr (kMasked)
          if (skipped > 0) [[unlikely]]
            skip_blocks();
        wait(&shared.key_full[key.stage], key.parity);
        take_turn();
        start_scores();
        wait(&shared.value_full[value.stage], value.parity);
        start_out();
        pass_turn();
        fetch_kept();
        wgmma_wait<1>();
        if constexpr (kSplit) {
          release_scores();
          settle_scores();
          raised_weights();
        } else {
          settle_scores();
          next_weights();
          release_scores();
        }
        pack_weights();
      }
      query.advance(kGroups);
      const int last = job;
      const bool more = fetch();
      // The tile's last product, and the next tile's first, which runs while this tile is finished.
      wait(&shared.value_full[value.stage], value.parity);
      float inverse[2];
      if (!more) {
        start_out();
        finish_rows(last, inverse);
        wgmma_wait<0>();
        store_out(last, inverse);
        release(&shared.value_empty[value.stage]);
        value.advance();
        skip_blocks();
        break;
      }
      start_out();
      finish_rows(last, inverse);
      uint64_t* const last_value = &shared.value_empty[value.stage];
      value.advance();
      const bool skips = skipped > kSkips;  // then others' values may need this one's buffer
      if (skips) {
        wgmma_wait<0>();
        release(last_value);
      }
      start_tile();
      wgmma_wait<1>();
      fence_registers(out);
      if (!skips) release(last_value);
      store_out(last, inverse);
      release(&shared.job_empty[last]);
      wgmma_wait<0>();
      first_weights();
    }
    if constexpr (kTile.staged_out)
      if (lane == 0) tma_store_wait();
  }

  __device__ __forceinline__ void release_key() {
    release(&shared.key_empty[key.stage]);
    key.advance();
  }
  __device__ __forceinline__ void release_value() {
    release(&shared.value_empty[value.stage]);
    if constexpr (kMasked)
      value = key;
    else
      value.advance();
  }
  // What the block's scores are made of: the keys, and behind the tile's last scores the queries.
  __device__ __forceinline__ void release_scores() {
    release_key();
    if (!kTile.held_query && is_last()) release(&shared.query_empty[query.stage]);
  }
};

}  // namespace flash_online::cuda
