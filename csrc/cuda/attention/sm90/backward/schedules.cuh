// What the computing warpgroups of the Hopper backward kernel do one after another, in three schedules: with keys of their own,
// with these and everything that a problem may have, and in line.
#pragma once

#include "../../../hw/cp_async.cuh"
#include "../../../hw/mbarrier.cuh"
#include "../../../hw/named_barrier.cuh"
#include "../../../hw/setmaxnreg.cuh"
#include "../../../hw/tma.cuh"
#include "../../../hw/vector.cuh"
#include "../../../hw/wgmma.cuh"
#include "warpgroup.cuh"

namespace flash_online::cuda {

// ---- with keys of its own

// A block of which this warpgroup sees nothing: it makes the block before's gradients of queries all the same.
template <class T, class Tile>
template <bool kFirst, int kNow>
__device__ __forceinline__ bool BackwardOnSm90<T, Tile>::Group::skip_block(Ahead& ahead) {
  constexpr int kOther = kNow ^ 1;
  place_anew();
  if constexpr (kFirst) {
    wait(&shared.value_full, 0);
  } else {
    QuerySums query;
    start_queries(query, kOther);
    if constexpr (kTile.sends_late)
      if (count > 1) {
        publish();
        send_queries(sums_of(job(2)));
      }
    wgmma_wait<0>();
    fence_registers(query);
    release(&shared.scores_empty[kOther]);
    stage_queries(query);
    if constexpr (!kTile.sends_late) {
      publish();
      send_queries(sums_of(job(1)));
    }
  }
  release(&shared.scores_full[kNow]);
  if (a.transposed_mask == TransposedMask::kBoxes) {
    wait(&shared.mask_full, count % 2);
    release(&shared.mask_empty);
  }
  const bool more = fetch<kOther>(1);
  if (more) look_ahead<kOther>(ahead, job(-1));
  __syncwarp();
  release(&shared.empty[kNow]);
  ++count;
  return more;
}

// A block; false: it was the last. The block before's gradients of queries are made amid it.
template <class T, class Tile>
template <bool kFirst, int kNow>
__device__ __forceinline__ bool BackwardOnSm90<T, Tile>::Group::own_block(Ahead& ahead) {
  constexpr int kOther = kNow ^ 1;
  clear_query_tail<kNow>();
  int shift = 0;
  if constexpr (kFirst) make_opaque(shift);
  Stage& stage = shared.stage[kNow];
  ScoreSums score, grad;
  if constexpr (!kDrops) begin_gradients<kNow>(grad);
  take_turn();
  start_scores<kHeadDim>(score, shared.key, stage.query, shift);
  if constexpr (kFirst) wait(&shared.value_full, number % 2);
  if constexpr (!kFirst && kTile.sends_late)
    if ((kStays ? ahead.third : count > 1) && !a.turns) {
      publish();
      send_queries(sums_of(job(2)));
    }
  wait(&shared.grad_out_full[kNow], parity());
  start_scores<kHeadDimV, !kDrops>(grad, shared.value, stage.grad_out, shift);
  pass_turn();
  unsigned shown[kQueries / kStatsRows] = {};
  const bool hides = kTransposed && a.transposed_mask == TransposedMask::kBits && (ahead.sides & kAsks << group());
  if constexpr (kTransposed)
    if (hides)
#pragma unroll
      for (int n = 0; n < kQueries / kStatsRows; ++n) shown[n] = shown_bits(shared, kNow).word[n][warp][lane()];
  wgmma_wait<1>();
  fence_registers(flat(score));
  if constexpr (kTransposed) add(score, ahead);
  if (!ahead.whole) hide(score, job().query);

  Words weight;
  weigh<kNow>(score, ahead, weight);
  if constexpr (kTransposed)
    if (hides) keep(weight, weight, shown);
  fence_registers(weight);
  Words kept;
  if constexpr (kDrops) {
    wait(&shared.drawn_full[kNow], parity());
    const unsigned drawn[1] = {kept_bits(a, shared, kNow).word[0][warp][lane()]};
    keep(kept, weight, drawn);
    fence_registers(kept);
  }
  start_sums<kHeadDimV>(grad_value, kDrops ? kept : weight, stage.grad_out, shift);
  QuerySums query;
  if constexpr (!kFirst && !kDrops && !kAlone) start_queries(query, kOther);
  wgmma_wait<kFirst || kDrops || kAlone ? 1 : 2>();
  fence_registers(flat(grad));
  // Of the weights as they were rounded for the products: the scores' registers are others' by now.
  Words grad_score;
#pragma unroll
  for (int j = 0; j < kQueries / 8; ++j) {
    float2 delta;
    if constexpr (kDrops) {
      delta = numbers<kNow>(2, j);
      delta.x *= a.keep, delta.y *= a.keep;
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int t = j / 2, n = j % 2 * 2 + half;
      const float2 x = unpair<T>(weight[t][n]);
      if constexpr (kDrops) {
        const float2 y = unpair<T>(kept[t][n]);
        grad_score[t][n] =
            pair(fmaf(y.x, grad[0][j][2 * half], -x.x * delta.x), fmaf(y.y, grad[0][j][2 * half + 1], -x.y * delta.y));
      } else {
        grad_score[t][n] = pair(x.x * grad[0][j][2 * half], x.y * grad[0][j][2 * half + 1]);
      }
    }
  }
  place_anew();
  if constexpr (kAlone) {
    fence_registers(grad_score);
    wgmma_wait<0>();
    sync_named(kAllMath, kMathThreads);  // all have made their gradients of the block before's queries
    put(shared.scores[0], grad_score);
    fence_async_proxy();
    sync_named(kAllMath, kMathThreads);
    start_sums<kHeadDim>(grad_key, grad_score, stage.query, shift);
    float* const sums = sums_of(job());
    wgmma_wait<0>();  // what it takes leaves no registers for dQ
    release(&shared.empty[kNow]);
    start_queries(query, 0);
    const bool more = fetch<kOther>(1);
    if (more) look_ahead<kOther>(ahead, job(-1));
    wgmma_wait<0>();
    fence_registers(query);
    add_queries(sums, query, kNow);
    ++count;
    return more;
  }
  if constexpr (!kFirst && kDrops) {
    fence_registers(grad_score);
    wgmma_wait<0>();  // dV's: what its left operand takes leaves no registers for dQ
    start_queries(query, kOther);
  }
  wait(&shared.scores_empty[kNow], parity() ^ 1);
  put(shared.scores[kNow], grad_score);
  start_sums<kHeadDim>(grad_key, grad_score, stage.query, shift);

  const auto finish_queries = [&] {
    if constexpr (!kFirst) {
      wgmma_wait<1>();
      fence_registers(query);
      release(&shared.scores_empty[kOther]);
      if (a.turns)
        add_queries(sums_of(job(1)), query, kOther);
      else
        stage_queries(query);
    }
  };
  if constexpr (!kTile.sends_late) finish_queries();
  publish();
  release(&shared.scores_full[kNow]);
  if constexpr (!kFirst && !kTile.sends_late)
    if (!a.turns) send_queries(sums_of(job(1)));
  const bool more = kStays ? !ahead.last : fetch<kOther>(1);
  if (more) {
    if constexpr (kStays) wait(&shared.query_full[kOther], (count + 1) / 2 % 2);
    look_ahead<kOther>(ahead, job(-1));
  }
  if constexpr (kTile.sends_late) finish_queries();
  wgmma_wait<0>();
  // The second buffer also says that the place's end is over.
  if (!kStays || kNow == 0 || more) release(&shared.empty[kNow]);
  ++count;
  return more;
}

template <class T, class Tile>
template <bool kFirst, int kNow>
__device__ __forceinline__ bool BackwardOnSm90<T, Tile>::Group::own_step(Ahead& ahead) {
  if constexpr (kTransposed && !kAlone)
    if (!(ahead.sides & kSees << group())) return skip_block<kFirst, kNow>(ahead);
  return own_block<kFirst, kNow>(ahead);
}

// A place's blocks, of which there is one.
template <class T, class Tile>
__device__ __forceinline__ void BackwardOnSm90<T, Tile>::Group::own_blocks() {
  clear_key_tail();
  Ahead ahead;
  look_ahead<0>(ahead, job());
  if (own_step<true, 0>(ahead))
    while (own_step<false, 1>(ahead) && own_step<false, 0>(ahead)) continue;
  if constexpr (kAlone) return;
  place_anew();
  QuerySums query;
  start_queries(query, (count - 1) % 2);
  if (kTile.sends_late && (kStays ? blocks_of(place()) : count) > 1 && !a.turns) {
    publish();
    send_queries(sums_of(job(2)));
  }
  wgmma_wait<0>();
  fence_registers(query);
  if constexpr (kStays) {
    release(&shared.scores_empty[(count - 1) % 2]);
    release(&shared.keys_empty);
  }
  if (a.turns) {
    add_queries(sums_of(job(1)), query, (count - 1) % 2);
  } else {
    stage_queries(query);
    publish();
    send_queries(sums_of(job(1)));
  }
}

template <class T, class Tile>
__device__ __forceinline__ void BackwardOnSm90<T, Tile>::Group::own_place() {
  place_anew();
  clear(grad_key);
  clear(grad_value);
  if (blocks_of(place()) > 0) {
    wait(&shared.query_full[0], parity());
    own_blocks();
  } else {
    wait(&shared.value_full, number % 2);  // or the next place's values were asked for while these are on their way
    release(&shared.keys_empty);
  }
  for (int n = blocks_of(place()); n < 2 || n % 2 != 0; ++n, ++count) {  // what passes by empty
    const int buffer = count % 2;
    wait(&shared.query_full[buffer], parity());  // until all are done with the place before: arrivals for both would mix
    release(&shared.scores_full[buffer]);
    release(&shared.scores_empty[buffer]);
    if (a.turns) release(&shared.added[buffer]);
    if (buffer == 0) release(&shared.empty[0]);
  }
  place_anew();
  store_sums();
  release(&shared.empty[1]);
}

template <class T, class Tile>
__device__ __forceinline__ void BackwardOnSm90<T, Tile>::Group::run_own() {
  place_anew();
  if (group() == 1) pass_turn();
  if constexpr (kStays) {
#pragma unroll 1
    for (;; ++number) {
      wait(&shared.key_full, number % 2);
      if (place().begin < 0) break;
      own_place();
    }
  } else {
    clear(grad_key);
    clear(grad_value);
    wait(&shared.key_full, 0);
    if (fetch<0>()) own_blocks();
    store_sums();
  }
  if (lane() == 0) tma_store_wait_read();
}

// ---- with keys of its own and everything, which takes registers from what could be in flight

// The block at hand's weights; the block before's gradients of queries meanwhile, and the gradients of the weights, less
// delta.
template <class T, class Tile>
template <bool kFirst>
__device__ __forceinline__ void BackwardOnSm90<T, Tile>::Group::weigh(ScoreSums& score, ScoreSums& grad, Words& weight) {
  const AttentionProblem& problem = a.problem;
  const Place& place = this->place();
  const int now = count % 2;
  const Job& job = this->job();
  Stage& stage = shared.stage[now];
  const auto here = [&] { return ScoreBlock{job.query, place.key, place.queries, place.keys, job.whole}; };
  clear_query_tail<kEither>();
  // In registers that `grad` has.
  QuerySums& grad_query = reinterpret_cast<QuerySums&>(grad);
  start_scores<kHeadDim>(score, shared.key, stage.query);
  const bool whole = job.whole;
  if constexpr (!kFirst) {
    start_queries(grad_query, now ^ 1);
    float* const sums = sums_of(this->job(1));
    wgmma_wait<1>();
    release(&shared.empty[now ^ 1]);
    fence_registers(flat(score));
    wgmma_wait<0>();
    fence_registers(grad_query);
    add_queries(sums, grad_query, now ^ 1);
  } else {
    wgmma_wait<0>();
    fence_registers(flat(score));
    wait(&shared.value_full, 0);
  }
  wait(&shared.grad_out_full[now], parity());
  start_scores<kHeadDimV>(grad, shared.value, stage.grad_out);
  const HeadMask mask(problem, place.batch, job.head);
  const bool masked = mask.data && job.sides != kAllSee;
  Mask mask_tile(reinterpret_cast<char*>(&shared) + kMaskOffset, thread);
  if (masked) {
    mask_tile.load(mask, job.query, place.queries, place.key, place.keys);
    cp_async_commit();
    cp_async_wait();
    sync_named(kAllMath, kMathThreads);
  }
  wgmma_wait<0>();
  fence_registers(flat(grad));
  const Dropout dropout(problem, place.batch, job.head);
  unsigned dropped = 0;  // a bit for each weight
  if (dropout) {
#pragma unroll
    for (int j = 0; j < kQueries / 8; j += 2)
      dropped |= (kept_weights<true>(score_row(), 8 * j, dropout, here()) ^ 0xff) << (4 * j);
#pragma unroll
    for (int j = 0; j < kQueries / 8; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) grad[0][j][e] = dropped >> (4 * j + e) & 1 ? 0 : grad[0][j][e] * a.keep_scale;
  }
  place_anew();
  subtract_delta<kEither>(grad);
  const ScoreMod rule = a.rule.of_head(problem, place.batch, job.head);
  if (rule.has_score_mod) apply_score_mod<true>(score, score_row(), rule, here(), place.visible, &grad);
  if (masked) mask_scores<true>(score, score_row(), mask.dtype, mask_tile);
  if (!whole) hide(score, job.query);
  const bool has_score_mod = a.rule.has_score_mod;
#pragma unroll
  for (int j = 0; j < kQueries / 8; ++j) {
    const float2 high = numbers<kEither>(0, j), low = numbers<kEither>(1, j);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      float& x = score[0][j][e];
      const float h = e % 2 ? high.y : high.x, l = e % 2 ? low.y : low.x;
      x = FastBinary::exp((has_score_mod ? x - h : fmaf(x, a.rule.scale, -h)) - l);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const auto kept = [&](int e) { return dropped >> (4 * j + e) & 1 ? 0.0f : score[0][j][e]; };
      weight[j / 2][j % 2 * 2 + half] = pair(kept(2 * half), kept(2 * half + 1));
    }
  }
  fence_registers(weight);
}

// What the weights add to the gradients of values, and of keys; the scores' gradients for those of queries.
template <class T, class Tile>
__device__ __forceinline__ void BackwardOnSm90<T, Tile>::Group::spread(ScoreSums& score, ScoreSums& grad, const Words& weight) {
  place_anew();
  const int now = count % 2;
  Stage& stage = shared.stage[now];
  start_sums<kHeadDimV>(grad_value, weight, stage.grad_out);
  Words grad_score;
#pragma unroll
  for (int j = 0; j < kQueries / 8; ++j)
#pragma unroll
    for (int half = 0; half < 2; ++half)
      grad_score[j / 2][j % 2 * 2 + half] =
          pair(score[0][j][2 * half] * grad[0][j][2 * half], score[0][j][2 * half + 1] * grad[0][j][2 * half + 1]);
  put(shared.scores[now], grad_score);
  publish();
  release(&shared.scores_full[now]);
  start_sums<kHeadDim>(grad_key, grad_score, stage.query);
  ++count;
}

template <class T, class Tile>
__device__ __forceinline__ void BackwardOnSm90<T, Tile>::Group::run_everything() {
  place_anew();
  clear(grad_key);
  clear(grad_value);
  wait(&shared.key_full, 0);
  if (fetch<kEither>()) {
    clear_key_tail();
    ScoreSums score, grad;
    Words weight;
    weigh<true>(score, grad, weight);
    while (true) {
      spread(score, grad, weight);
      place_anew();
      const bool more = fetch<kEither>();
      wgmma_wait<0>();  // with products in flight here, ptxas finds no registers (C7512) and runs all in order
      if (!more) break;
      weigh<false>(score, grad, weight);
    }
    QuerySums grad_query;
    start_queries(grad_query, (count - 1) % 2);
    wgmma_wait<0>();
    fence_registers(grad_query);
    add_queries(sums_of(job(1)), grad_query, (count - 1) % 2);
  }
  store_sums();
}

// ---- in line

// The first warpgroup: a block's scores, which are there, into weights, and what these add; meanwhile the next block's
// scores. False: there is none.
template <class T, class Tile>
template <int kNow>
__device__ __forceinline__ bool BackwardOnSm90<T, Tile>::Group::value_block(ScoreSums& score) {
  constexpr int kOther = kNow ^ 1;
  place_anew();
  Ahead ahead;
  look_ahead<kNow>(ahead, job());
  if (!ahead.whole) hide(score, job().query);
  Words weight;
  weigh<kNow>(score, ahead, weight);
  fence_registers(weight);
  release_after(&shared.empty[kNow]);
  wait(&shared.weights_empty, count % 2 ^ 1);
#pragma unroll
  for (int t = 0; t < kQuerySteps; ++t)
    shared.weights[t][thread % 128] = make_uint4(weight[t][0], weight[t][1], weight[t][2], weight[t][3]);
  release_after(&shared.weights_full);
  const Stage& stage = shared.stage[kNow];
  wait(&shared.grad_out_full[kNow], parity());
  ++count;
  if (!fetch<kOther>()) {
    start_sums<kHeadDimV>(grad_value, weight, stage.grad_out);
    wgmma_wait<0>();
    return false;
  }
  clear_query_tail<kOther>();
  start_sums<kHeadDimV>(grad_value, weight, stage.grad_out);
  start_scores<kHeadDim>(score, shared.key, shared.stage[kOther].query);
  wgmma_wait<1>();
  release(&shared.grad_out_empty[kNow]);
  wgmma_wait<0>();
  fence_registers(flat(score));
  return true;
}

template <class T, class Tile>
__device__ __forceinline__ void BackwardOnSm90<T, Tile>::Group::run_values() {
  place_anew();
  clear(grad_value);
  wait(&shared.key_full, 0);
  if (fetch<0>()) {
    clear_key_tail();
    clear_query_tail<0>();
    ScoreSums score;
    start_scores<kHeadDim>(score, shared.key, shared.stage[0].query);
    wgmma_wait<0>();
    fence_registers(flat(score));
    while (value_block<0>(score) && value_block<1>(score)) continue;
  }
  sync_named(kAllMath, kMathThreads);  // all have done with the queries in shared memory
  store_values();
}

// The second: a block's gradients of weights, which are there, into those of scores, and what these add; meanwhile the next
// block's gradients of weights.
template <class T, class Tile>
template <int kNow>
__device__ __forceinline__ bool BackwardOnSm90<T, Tile>::Group::key_block(ScoreSums& grad) {
  constexpr int kOther = kNow ^ 1;
  place_anew();
  wait(&shared.weights_full, count % 2);
  Words grad_score;
#pragma unroll
  for (int t = 0; t < kQuerySteps; ++t) {
    const uint4 four = shared.weights[t][thread % 128];
    const unsigned weight[] = {four.x, four.y, four.z, four.w};
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const float2 x = unpair<T>(weight[n]);
      const int j = 2 * t + n / 2, half = n % 2;
      grad_score[t][n] = pair(x.x * grad[0][j][2 * half], x.y * grad[0][j][2 * half + 1]);
    }
  }
  fence_registers(grad_score);
  release_after(&shared.weights_empty);
  const int place = count % kScoreBuffers;
  wait(&shared.scores_empty[place], count / kScoreBuffers % 2 ^ 1);
  put(shared.scores[place], grad_score);
  publish();
  release(&shared.scores_full[place]);
  const Stage& stage = shared.stage[kNow];
  ++count;
  if (!fetch<kOther>()) {
    start_sums<kHeadDim>(grad_key, grad_score, stage.query);
    wgmma_wait<0>();
    return false;
  }
  clear_query_tail<kOther>();
  begin_gradients<kOther>(grad);
  wait(&shared.grad_out_full[kOther], parity());
  start_sums<kHeadDim>(grad_key, grad_score, stage.query);
  start_scores<kHeadDimV, true>(grad, shared.value, shared.stage[kOther].grad_out);
  wgmma_wait<1>();
  release(&shared.empty[kNow]);
  wgmma_wait<0>();
  fence_registers(flat(grad));
  release(&shared.grad_out_empty[kOther]);
  return true;
}

template <class T, class Tile>
__device__ __forceinline__ void BackwardOnSm90<T, Tile>::Group::run_keys() {
  place_anew();
  clear(grad_key);
  if (fetch<0>()) {
    wait(&shared.value_full, 0);
    clear_key_tail();
    clear_query_tail<0>();
    ScoreSums grad;
    begin_gradients<0>(grad);
    wait(&shared.grad_out_full[0], 0);
    start_scores<kHeadDimV, true>(grad, shared.value, shared.stage[0].grad_out);
    wgmma_wait<0>();
    fence_registers(flat(grad));
    release(&shared.grad_out_empty[0]);
    while (key_block<0>(grad) && key_block<1>(grad)) continue;
  }
  // The third warpgroup learns here that there are no more.
  wait(&shared.scores_empty[count % kScoreBuffers], count / kScoreBuffers % 2 ^ 1);
  release(&shared.scores_full[count % kScoreBuffers]);
  sync_named(kAllMath, kMathThreads);
  store_keys();
}

// The third: gradients of queries.
template <class T, class Tile>
__device__ __forceinline__ void BackwardOnSm90<T, Tile>::Group::run_queries() {
  place_anew();
  wait(&shared.key_full, 0);
  while (true) {
    const int now = count % kScoreBuffers;
    wait(&shared.scores_full[now], count / kScoreBuffers % 2);
    if (job().query < 0) break;
    float* const sums = sums_of(job());
    ++count;
    place_anew();
    QuerySums d;
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece) {
      start_queries(d, now, piece);
      wgmma_wait<0>();
      fence_registers(d);
      if (piece == kPieces - 1) release(&shared.scores_empty[now]);
      if (a.turns) {
        add_queries(sums, d, (count - 1) % 2, piece);
      } else {
        stage_queries(d);
        publish();
        send_queries(sums, piece);
      }
    }
  }
  if (lane() == 0) tma_store_wait_read();
}

}  // namespace flash_online::cuda
