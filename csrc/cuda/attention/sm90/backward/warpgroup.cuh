// What a warpgroup of the Hopper backward kernel that computes does in any of its schedules (backward_sm90_consumers.cuh):
// products, weights, sums and gradients of queries that leave, gradients of keys and values that are stored.
#pragma once

#include <cstdint>
#include <type_traits>

#include "../../../hw/mbarrier.cuh"
#include "../../../hw/mma.cuh"
#include "../../../hw/named_barrier.cuh"
#include "../../../hw/prmt.cuh"
#include "../../../hw/setmaxnreg.cuh"
#include "../../../hw/stmatrix.cuh"
#include "../../../hw/tma.cuh"
#include "../../../hw/vector.cuh"
#include "../../../hw/wgmma.cuh"
#include "../../common/dq_accum.cuh"
#include "../../sm80/load.cuh"
#include "../gemm.cuh"
#include "config.cuh"

namespace flash_online::cuda {

template <class T, class Tile>
struct BackwardOnSm90<T, Tile>::Group {
  const BackwardSm90Arguments& a;
  Shared& shared;
  int thread;  // of those that compute
  int warp = 0;  // of those that compute: in all lanes the same, as far as the compiler knows
  int count = 0;  // of blocks so far
  int number = 0;  // of places before this one
  Sums<kHeadDim> grad_key;
  Sums<kHeadDimV> grad_value;

  __device__ __forceinline__ const Place& place() const { return shared.place[kStays ? number % 2 : 0]; }

  // What follows from the thread's number is computed anew, which takes fewer registers than to keep it.
  __device__ __forceinline__ void place_anew() {
    make_opaque(thread);
    warp = __shfl_sync(~0u, static_cast<unsigned>(thread) / kWarpSize, 0);
  }
  __device__ __forceinline__ int group() const { return warp / 4; }
  __device__ __forceinline__ int lane() const { return static_cast<unsigned>(thread) % kWarpSize; }
  // Which of the kSummers warps with parts of the same scores, or sums.
  __device__ __forceinline__ int part() const { return kLine ? warp % 4 : warp; }
  __device__ __forceinline__ int score_row() const { return part() * 16; }
  __device__ __forceinline__ void release(uint64_t* barrier) {
    if (lane() == 0) arrive(barrier);
  }
  // Of a warp, all of whose lanes have done what it is about.
  __device__ __forceinline__ void release_after(uint64_t* barrier) {
    __syncwarp();
    release(barrier);
  }
  __device__ __forceinline__ const Job& job(int before = 0) const { return shared.job[(count - before) % 4]; }
  // The blocks take the two buffers in turn. What depends on which is a template, so that addresses are constants; kEither
  // counts, and is for code that would be too long twice.
  static constexpr int kEither = 2;
  template <int kBuffer>
  __device__ __forceinline__ int buffer() const {
    return kBuffer == kEither ? count % 2 : kBuffer;
  }
  __device__ __forceinline__ unsigned parity() const { return count / 2 % 2; }

  // Waits for the block that is `ahead` further on; false: there is none.
  template <int kBuffer>
  __device__ __forceinline__ bool fetch(int ahead = 0) {
    wait(&shared.query_full[kBuffer == kEither ? (count + ahead) % 2 : kBuffer], (count + ahead) / 2 % 2);
    return job(-ahead).query >= 0;
  }

  // Scores, or weights' gradients: [this warpgroup's keys][its queries]; added to what is there, or not. `shift` is 0, but
  // the compiler does not know it of a block that stands before the loop: or it keeps that one's addresses for the loop.
  template <int kColumns, bool kAdd = false, int kCount>
  __device__ __forceinline__ void start_scores(ScoreSums& d, const Boxes<kCount, kKeys>& left,
                                               const Boxes<kCount, kQueries>& right, unsigned shift = 0) {
    int first = kLine ? 0 : group() * kGroupKeys;
    // Or ptxas keeps the keys' addresses of all steps from before the loop, and finds no uniform registers for others.
    if constexpr (kLine) make_opaque(first);
    start_row_products<T, kColumns / 16, kKeys, kQueries, kAdd>(d, shared_address(left.box) + first * kRowBytes + shift,
                                                                shared_address(right.box) + shift);
  }

  using QuerySums = float[kPiece / 2];
  // The block before's gradients of queries, or where a warpgroup is alone this one's: this warpgroup's piece of that number.
  __device__ __forceinline__ void start_queries(QuerySums& d, int before, int piece = 0) {
    if constexpr (!kLine && !kAlone) wait(&shared.scores_full[before], (count - 1) / 2 % 2);
    const uint64_t scores = k_major_descriptor(shared_address(shared.scores[before].box[kSideBySide ? 0 : group()])),
                   keys = mn_major_descriptor(shared_address(shared.key.box[kLine         ? piece
                                                                            : kSideBySide ? group()
                                                                                          : 0]),
                                              kKeys * kRowBytes);
    if constexpr (kTransposed && !kAlone) {
      const int sides = job(1).sides & kAllSee;
      if (sides != kAllSee) {  // the other warpgroup's keys alone, or this one's
        const unsigned first = (sides >> 1) * kGroupKeys * kRowBytes;
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < kKeySteps / 2; ++step)
          Wgmma<T, kPiece>::template ss<true, true>(d, offset_descriptor(scores, first + step * 16 * kRowBytes),
                                                    offset_descriptor(keys, first + step * 16 * kRowBytes), step > 0);
        wgmma_commit();
        return;
      }
    }
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kKeySteps; ++step)
      Wgmma<T, kPiece>::template ss<true, true>(d, offset_descriptor(scores, step * 16 * kRowBytes),
                                                offset_descriptor(keys, step * 16 * kRowBytes), step > 0);
    wgmma_commit();
  }

  // Where the gradients of a block's queries go, from this lane's first on; null: they are nobody's.
  __device__ __forceinline__ float* sums_of(const Job& job) const {
    const int width = sum_width(a.space);
    constexpr int kBelow = kSideBySide ? 0 : kPiece / 16, kBeside = kSideBySide && !kLine ? kPiece / 8 : 0;
    const bool there = kSideBySide ? kLine || group() * kPiece < width : job.query + group() * kPiece < place().queries;
    const int first = ((group() * kBelow + warp % 4) * (width / 8) + group() * kBeside) * 128;
    return there ? a.space.sums + job.sums + first + dq_accum_offset(lane(), 0) : nullptr;
  }
  // How many tiles of 16 x 8 of its piece are somebody's.
  __device__ __forceinline__ int piece_tiles() const {
    return kEverything || kLine || kHeadDim % kPiece == 0 || group() == 0 ? kPiece / 8 : kHeadDim % kPiece / 8;
  }
  __device__ __forceinline__ void add_queries(float* to, const QuerySums& d, int before, int piece = 0) {
    if (a.turns) wait(&shared.turn[before], (count - 1) / 2 % 2);
    if (to) {
      const int tiles = piece_tiles();
#pragma unroll
      for (int j = 0; j < kPiece / 8; ++j)
        if (j < tiles) dq_accum_add(to + (piece * (kPiece / 8) + j) * 128, reinterpret_cast<const float (&)[4]>(d[4 * j]));
    }
    if (a.turns && piece == kPieces - 1) {
      __syncwarp();
      release(&shared.added[before]);
    }
  }

  // What the warp has written into shared memory becomes readable for the engines.
  __device__ __forceinline__ void publish() {
    fence_async_proxy();
    __syncwarp();
  }
  // The same as add_queries by the copy engine, by way of shared memory: put there, published, and sent.
  __device__ __forceinline__ void stage_queries(const QuerySums& d) {
    if (lane() == 0) tma_store_wait_read();
    __syncwarp();
    float4* const to = reinterpret_cast<float4*>(shared.sums[part()]) + lane();
#pragma unroll
    for (int j = 0; j < kPiece / 8; ++j) to[j * kWarpSize] = make_float4(d[4 * j], d[4 * j + 1], d[4 * j + 2], d[4 * j + 3]);
  }
  __device__ __forceinline__ void send_queries(float* to, int piece = 0) {
    if (to && lane() == 0) {
      bulk_reduce_add(to + piece * (kPiece / 8) * 128, shared.sums[part()],
                      piece_tiles() * 128 * static_cast<int>(sizeof(float)));
      tma_store_commit();
    }
  }

  // A pair's two numbers of kind 0 (lse), 1 (lse, low part) or 2 (delta), of the queries 8 j + 2 place and the next.
  template <int kBuffer>
  __device__ __forceinline__ float2 numbers(int kind, int j) const {
    const int at = 8 * j % kStatsRows + lane() % 4 * 2;
    if constexpr (kLowAside) {
      if (kind == 1) return *reinterpret_cast<const float2*>(&shared.sums[warp][8 * j + lane() % 4 * 2]);
      kind /= 2;
    }
    return *reinterpret_cast<const float2*>(&shared.rows[buffer<kBuffer>()][8 * j / kStatsRows][kind * kStatsRows + at]);
  }

  // Where shared memory has no room for lse's low parts, which hardly ever count: into what gradients of queries leave by.
  __device__ __forceinline__ void bring_low() {
    if (lane() == 0) tma_store_wait_read();
    __syncwarp();
    const Job& job = this->job();
    const int n = 4 * lane() / kStatsRows, last = (place().queries - 1) / kStatsRows - job.query / kStatsRows;
    const int64_t row_block = job.sums / (kStatsRows * kHeadDim) + min(n, last);  // as in row_numbers
    reinterpret_cast<float4*>(shared.sums[warp])[lane()] =
        reinterpret_cast<const float4*>(a.space.rows + row_block * kRowStats + kStatsRows)[lane() % (kStatsRows / 4)];
    __syncwarp();
  }

  // By all threads that compute.
  template <int kCount, int kRows>
  __device__ __forceinline__ void clear_tail(Boxes<kCount, kRows>& tile, int from) {
    cuda::clear_tail<kMathThreads>(tile.box, from, thread);
  }
  __device__ __forceinline__ void publish_tail() {
    fence_async_proxy();
    sync_named(kAllMath, kMathThreads);
  }

  __device__ __forceinline__ static unsigned pair(float x, float y) { return Fragments<T>::pair(x, y); }
  using Words = unsigned[kQueries / 16][4];  // of 16-bit pairs: a left operand

  __device__ __forceinline__ void clear_key_tail() {
    const Place& place = this->place();
    if (a.problem.query_starts && place.key + kKeys > place.keys) {
      wait(&shared.key_full, number % 2);
      wait(&shared.value_full, number % 2);
      clear_tail(shared.key, place.keys - place.key);
      clear_tail(shared.value, place.keys - place.key);
      publish_tail();
    }
  }
  template <int kBuffer>
  __device__ __forceinline__ void clear_query_tail() {
    const Place& place = this->place();
    const int now = buffer<kBuffer>(), query = job().query;
    if (a.problem.query_starts && query + kQueries > place.queries) {
      wait(&shared.grad_out_full[now], parity());
      clear_tail(shared.stage[now].query, place.queries - query);
      clear_tail(shared.stage[now].grad_out, place.queries - query);
      publish_tail();
    }
  }

  // What hide_scores<true> does, in few registers.
  __device__ __forceinline__ void hide(ScoreSums& score, int query) const {
    const Place& place = this->place();
    const int first = query + lane() % 4 * 2, left_over = place.queries - first;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int key = place.key + score_row() + 8 * half + lane() / 4, at = key - place.offset - first;
      const int begin = at - place.right, end = key < place.keys ? min(at + place.left + 1, left_over) : -kQueries;
#pragma unroll
      for (int j = 0; j < kQueries / 8; ++j)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& x = score[0][j][2 * half + e];
          x = 8 * j + e >= begin && 8 * j + e < end ? x : lowest<float>();
        }
    }
  }

  template <int kBuffer>
  __device__ __forceinline__ void subtract_delta(ScoreSums& d) const {
#pragma unroll
    for (int j = 0; j < kQueries / 8; ++j) {
      const float2 delta = numbers<kBuffer>(2, j);
      d[0][j][0] -= delta.x, d[0][j][1] -= delta.y;
      d[0][j][2] -= delta.x, d[0][j][3] -= delta.y;
    }
  }

  // The end: gradients of this warpgroup's keys and values.
  __device__ __forceinline__ void store_keys() {
    fence_registers(flat(grad_key));
    store(grad_key, static_cast<float>(a.problem.scale), a.gradients.grad_key, a.problem.head_dim);
  }
  __device__ __forceinline__ void store_values() {
    fence_registers(flat(grad_value));
    store(grad_value, kEverything ? a.keep_scale : 1.0f, a.gradients.grad_value, a.problem.head_dim_v);
  }
  __device__ __forceinline__ void store_sums() {
    fence_registers(flat(grad_key));
    fence_registers(flat(grad_value));
    if constexpr (!kStays) sync_named(kAllMath, kMathThreads);  // all have done with the queries in shared memory
    store_keys();
    store_values();
  }

  template <int kCount>
  __device__ __forceinline__ void store(Accumulator<1, kCount>& d, float scale, const MutableView4& view, int64_t width) {
    const Place& place = this->place();
    const int left = place.last_key - place.key, columns = static_cast<int>(width);
    T* const to = static_cast<T*>(view.data) + place.batch * view.stride[0] + place.unit * view.stride[1] +
                  place.first_key * view.stride[2];
    if constexpr (kStays) {  // the next place's queries arrive in shared memory
      store_rows(d, scale, score_row(), to, view.stride[2], view.stride[3], left, columns, lane());
    } else {
#pragma unroll
      for (float& x : flat(d)) x *= scale;
      store_rows<T>(d, OutTile{reinterpret_cast<T*>(&shared.stage[kLine ? group() : 0])}, 0, score_row(), to, view.stride[2],
                    view.stride[3], left, columns);
    }
  }

  // Sums over a block's queries: [this warpgroup's keys][columns]. `shift` is as that of start_scores.
  template <int kColumns, int kCount>
  __device__ __forceinline__ void start_sums(Sums<kColumns>& d, const Words& left, const Boxes<kCount, kQueries>& right,
                                             unsigned shift = 0) {
    // In a kernel of four warpgroups ptxas has no registers for one of 256 columns.
    constexpr int kParts = kColumns > 192 ? 2 : 1, kPart = kColumns / kParts;
    wgmma_fence();
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const uint64_t columns =
          mn_major_descriptor(shared_address(right.box[part * (kPart / kBoxColumns)]) + shift, kQueries * kRowBytes);
#pragma unroll
      for (int step = 0; step < kQuerySteps; ++step)
        Wgmma<T, kPart>::template rs<true>(reinterpret_cast<float (&)[kPart / 2]>(d[0][part * (kPart / 8)]), left[step],
                                           offset_descriptor(columns, step * 16 * kRowBytes), true);
    }
    wgmma_commit();
  }

  __device__ __forceinline__ void put(Scores& to, const Words& words) {
    const int r = score_row() + lane() % 16;
#pragma unroll
    for (int t = 0; t < kQueries / 16; ++t)
      stmatrix_x4(words[t], shared_address(to.box[t / 4][r]) +
                                ((t % 4 * 2 + lane() / 16) ^ (lane() % 8)) * static_cast<int>(kVectorBytes));
  }

  // What a block needs of its rows, read while the one before is at its end: shared memory answers late once it feeds the
  // products.
  struct Ahead {
    static constexpr int kHighs = kTile.lse_ahead ? kQueries / 8 : 1;
    bool whole, last, third, low;  // of Job; whether lse's low parts count
    int sides;  // Job::sides
    float2 high[kHighs];
  };
  template <int kBuffer>
  __device__ __forceinline__ void look_ahead(Ahead& ahead, const Job& job) const {
    // Below it the float nearest to lse is off by 2^-17 at most: 16 times less than weights are rounded by.
    constexpr float kLarge = 256;
    ahead.whole = job.whole;
    if constexpr (kStays) ahead.last = job.last, ahead.third = job.third;
    if constexpr (kTransposed) ahead.sides = job.sides;
    bool low = false;
#pragma unroll
    for (int n = 0; n < kQueries / kStatsRows; ++n) {
      const float2 x = *reinterpret_cast<const float2*>(&shared.rows[kBuffer][n][2 * lane()]);
      const auto large = [](float y) { return fabsf(y) >= kLarge && y < -lowest<float>(); };
      low = low || large(x.x) || large(x.y);
    }
    ahead.low = __any_sync(~0u, low);
    if constexpr (kTile.lse_ahead)
#pragma unroll
      for (int j = 0; j < Ahead::kHighs; ++j) ahead.high[j] = numbers<kBuffer>(0, j);
  }

  // A block's scores into its weights.
  template <int kBuffer>
  __device__ __forceinline__ void weigh(ScoreSums& score, const Ahead& ahead, Words& weight) {
    const auto with = [&]<bool kLow>(std::bool_constant<kLow>) {
      const auto read_lse = [&](int j, float2& high, float2& low) {
        high = kTile.lse_ahead ? ahead.high[j % Ahead::kHighs] : numbers<kBuffer>(0, j);
        low = kLow ? numbers<kBuffer>(1, j) : make_float2(0, 0);
        if constexpr (kDrops) high.x -= a.keep_exponent, high.y -= a.keep_exponent;
      };
      exp_products<T>(score, a.rule, read_lse, weight);
    };
    if (ahead.low) {
      if constexpr (kLowAside) bring_low();
      with(std::true_type{});
    } else {
      with(std::false_type{});
    }
  }

  // What a block's gradients of weights are added to: -delta.
  template <int kBuffer>
  __device__ __forceinline__ void begin_gradients(ScoreSums& grad) {
#pragma unroll
    for (int j = 0; j < kQueries / 8; ++j) {
      const float2 delta = numbers<kBuffer>(2, j);
      grad[0][j][0] = grad[0][j][2] = -delta.x;
      grad[0][j][1] = grad[0][j][3] = -delta.y;
    }
    fence_registers(flat(grad));
  }

  __device__ __forceinline__ void take_turn() {
    if constexpr (kTile.in_turn) sync_named(kTurn + group(), kMathThreads);
  }
  __device__ __forceinline__ void pass_turn() {
    if constexpr (kTile.in_turn) arrive_named(kTurn + (group() ^ 1), kMathThreads);
  }

  // What ALiBi and a mask of 16 bits add to the scores.
  __device__ __forceinline__ void add(ScoreSums& score, const Ahead& ahead) {
    if (a.problem.alibi_slopes) {
      const Job& job = this->job();
      const Place& place = this->place();
      const float distance =
          static_cast<float>(job.query + lane() % 4 * 2 + place.offset - place.key - score_row() - lane() / 4);
      const float slope = job.slope;
#pragma unroll
      for (int j = 0; j < kQueries / 8; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          float& x = score[0][j][e];
          x = fmaf(-slope, fabsf(distance + static_cast<float>(8 * j + e % 2 - e / 2 * 8)), x);
        }
    }
    if constexpr (!kDrops) {
      if (a.transposed_mask == TransposedMask::kBoxes) {
        wait(&shared.mask_full, count % 2);
        if (ahead.sides & kAsks << group()) {
          const int row = lane() % 16;
          const unsigned base = shared_address(mask_box(shared, group()).value[row]) +
                                ((warp % 4 * 2 + lane() / 16) ^ (row % 8)) * static_cast<int>(kVectorBytes);
#pragma unroll
          for (int t = 0; t < kQueries / 16; ++t) {
            unsigned words[4];
            ldmatrix_x4_trans(words, base + t * 16 * kRowBytes);
#pragma unroll
            for (int n = 0; n < 4; ++n) {
              float* const x = &score[0][2 * t + n % 2][n / 2 * 2];
              const float2 values = unpair<T>(words[n]);
              x[0] = fmaf(values.x, a.added_scale, x[0]);
              x[1] = fmaf(values.y, a.added_scale, x[1]);
            }
          }
        }
        fence_registers(flat(score));  // the values have been read before the arrival says so
        release(&shared.mask_empty);
      }
    }
  }
  // Clears the weights of which `bits`, as in TransposedMaskBits, has none.
  __device__ __forceinline__ static void keep(Words& to, const Words& from, const unsigned (&bits)[kQueries / kStatsRows]) {
#pragma unroll
    for (int t = 0; t < kQueries / 16; ++t)
#pragma unroll
      for (int n = 0; n < 4; ++n)
        to[t][n] = from[t][n] & sign_mask_16x2(bits[t / 4] << TransposedMaskBits::place(t % 4 * 2 + n / 2, n % 2));
  }

  // The schedules (backward_sm90_consumers.cuh): with keys of its own,
  template <bool kFirst, int kNow>
  __device__ __forceinline__ bool skip_block(Ahead& ahead);
  template <bool kFirst, int kNow>
  __device__ __forceinline__ bool own_block(Ahead& ahead);
  template <bool kFirst, int kNow>
  __device__ __forceinline__ bool own_step(Ahead& ahead);
  __device__ __forceinline__ void own_blocks();
  __device__ __forceinline__ void own_place();
  __device__ __forceinline__ void run_own();
  // with keys of its own and everything,
  template <bool kFirst>
  __device__ __forceinline__ void weigh(ScoreSums& score, ScoreSums& grad, Words& weight);
  __device__ __forceinline__ void spread(ScoreSums& score, ScoreSums& grad, const Words& weight);
  __device__ __forceinline__ void run_everything();
  // in line.
  template <int kNow>
  __device__ __forceinline__ bool value_block(ScoreSums& score);
  __device__ __forceinline__ void run_values();
  template <int kNow>
  __device__ __forceinline__ bool key_block(ScoreSums& grad);
  __device__ __forceinline__ void run_keys();
  __device__ __forceinline__ void run_queries();
};

}  // namespace flash_online::cuda
