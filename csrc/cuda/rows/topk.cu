// The k largest probabilities of a softmax on CUDA: one pass over the row keeps its maximum and sum, and the k largest elements
// so far (Milakov and Gimelshein, arXiv 1805.02867, section 4).
//
// Elements are ranked by keys: 64 bits, larger is better, the element above and its index, complemented, below: NaN first, as
// in torch.topk; equal elements in their order. No two keys of a row are equal, so results do not depend on who finds which
// first.
//   k <= 32   a block reads vectors. The maxima of parts of the first ones give a bar that k elements are above and few more;
//             who is above waits in shared memory, and a key's rank is the number of waiting keys that are larger. In a row
//             that no block's registers hold, those that wait are ranked and the bar is raised when what was seen has doubled;
//             such rows pass through rings (ring.cuh), the longest in pieces, whose lists another kernel merges.
//   else      a block collects keys in shared memory and sorts them when it is full. Beyond 2048 it reads the row again for
//             each 2048, looking only at keys behind the last one found.
#include "../hw/pdl.cuh"
#include "dispatch.cuh"
#include "loops/pipeline.cuh"
#include "rows.h"

namespace flash_online::cuda {

namespace {

using Key = unsigned long long;
constexpr Key kNoKey = 0;  // behind every element's: indices are below 2^32 - 1

// Floats as integers of the same order, NaN above all; -0 as 0, which it equals.
__device__ __forceinline__ unsigned rank_of(float x) {
  const unsigned bits = __float_as_uint(x + 0.0f);
  return x != x ? 0xffffffffu : bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float element_of(Key key) {
  const unsigned rank = static_cast<unsigned>(key >> 32);
  return rank == 0xffffffffu ? __uint_as_float(0x7fffffffu) : __uint_as_float(rank & 0x80000000u ? rank & 0x7fffffffu : ~rank);
}
__device__ __forceinline__ Key key_of(float x, unsigned index) { return Key{rank_of(x)} << 32 | (0xffffffffu - index); }
__device__ __forceinline__ unsigned index_of(Key key) { return 0xffffffffu - static_cast<unsigned>(key); }

constexpr int kMostInLists = kWarpSize;  // k

// ---- k <= 32, classes side by side, rows that a block holds at once

// Steps of a bitonic sort of a warp's numbers, one a lane, descending; from_size kWarpSize: of what is bitonic already.
__device__ __forceinline__ float sort_descending(float x, int from_size = 2) {
  const int lane = threadIdx.x % kWarpSize;
#pragma unroll
  for (int size = from_size; size <= kWarpSize; size *= 2)
#pragma unroll
    for (int step = size / 2; step > 0; step /= 2) {
      const float other = __shfl_xor_sync(~0u, x, step);
      x = ((lane & size) == 0) == ((lane & step) == 0) ? fmaxf(x, other) : fminf(x, other);
    }
  return x;
}

// What the threads of a block share while they look for the best of a row.
template <int kThreads>
struct Board {
  static constexpr int kGroups = 2 * kWarpSize, kWarps = kThreads / kWarpSize;
  static constexpr int kWaiting = 512, kRoom = kWaiting - kThreads;  // kRoom: for those who come next
  float groups[kGroups];  // the maxima of parts of the first vectors
  float bar;  // who is not above it is not among the best
  int count;  // of keys that wait
  Key waiting[kWaiting];
  Key best[kMostInLists];  // k of those, descending
  SharedStates<RowState, kWarps> states;
};

// The first bar, by the first warp: just below the k-th largest of the groups' maxima, so that k elements are above.
template <int kThreads>
__device__ __forceinline__ void set_first_bar(Board<kThreads>& board, int k) {
  constexpr int kFew = kWarpSize / 4;  // up to which half as many groups do
  const int lane = threadIdx.x % kWarpSize;
  float a = board.groups[lane], b = board.groups[kWarpSize + lane];
  if (k <= kFew) {
    a = sort_descending(fmaxf(a, b));
  } else {
    a = sort_descending(a);
    b = sort_descending(b);
    a = sort_descending(fmaxf(a, __shfl_sync(~0u, b, kWarpSize - 1 - lane)), kWarpSize);
  }
  const float bar = __shfl_sync(~0u, a, k - 1);
  if (lane == 0) board.bar = nextafterf(bar, -INFINITY);
}

// The k best of `count` waiting keys, into `best`; behind them kNoKey up to the k-th. Barriers before and after.
template <int kThreads>
__device__ __forceinline__ void rank_waiting(Board<kThreads>& board, int count, int k) {
  const int thread = threadIdx.x;
  if (thread < k && thread >= count) board.best[thread] = kNoKey;
  for (int at = thread; at < count; at += kThreads) {
    const Key mine = board.waiting[at];
    int larger = 0;
#pragma unroll 8
    for (int i = 0; i < count; ++i) larger += board.waiting[i] > mine;
    if (larger < k) board.best[larger] = mine;
  }
}

// Keeps the k best of the waiting keys, and raises the bar. Barriers before and after.
template <int kThreads>
__device__ __forceinline__ void keep_best(Board<kThreads>& board, int count, int k) {
  rank_waiting(board, count, k);
  __syncthreads();
  const int kept = count < k ? count : k;
  if (static_cast<int>(threadIdx.x) < kept) board.waiting[threadIdx.x] = board.best[threadIdx.x];
  if (threadIdx.x == 0) {
    board.count = kept;
    if (kept == k) {
      const float bar = element_of(board.best[k - 1]);
      board.bar = bar == bar ? bar : INFINITY;  // behind k NaNs comes nothing
    }
  }
}

// The maxima of neighbours' first vectors.
template <int kThreads>
__device__ __forceinline__ void group_maxima(Board<kThreads>& board, float most) {
  constexpr int kGroup = kThreads / Board<kThreads>::kGroups;
#pragma unroll
  for (int with = 1; with < kGroup; with *= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, with));
  if (threadIdx.x % kGroup == 0) board.groups[threadIdx.x / kGroup] = most;
}

// All threads' states, for the first warp. A barrier, behind which board.best is there too.
template <int kThreads>
__device__ __forceinline__ RowState merge_states(Board<kThreads>& board, RowState state) {
  constexpr int kWarps = kThreads / kWarpSize;
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  state = merge_lanes<kWarpSize>(state);
  if (kWarps > 1 && lane == 0) board.states[warp] = state;
  __syncthreads();
  if (kWarps > 1 && warp == 0) state = merge_lanes<kWarpSize>(lane < kWarps ? board.states[lane] : RowState{});
  return state;
}

// Whether a row's element x of class c may be among the best.
struct Above {
  float bar;
  int free;  // nothing is below -infinity, but only the first k of a row can be among its best with that
  __device__ __forceinline__ Above(float bar, int k) : bar(bar), free(bar == -INFINITY ? k : 0) {}
  __device__ __forceinline__ bool operator()(float x, int c) const { return !(x <= bar) || c < free; }
};

// Adds those of a vector's elements, of the classes c and on, that are above to the waiting ones, as long as there is room;
// returns how many wait then, if any was added. `offset`: the row's class that is class 0 here.
template <class T, int kThreads>
__device__ __forceinline__ int let_wait(Board<kThreads>& board, const uint4& v, int c, int classes, unsigned offset,
                                        const Above& above) {
  constexpr int kElements = kPerVector<T>;
  float x[kElements];
  unpack<T>(v, x);
  unsigned found = 0;
#pragma unroll
  for (int e = 0; e < kElements; ++e) found |= c + e < classes && above(x[e], c + e) ? 1u << e : 0;
  if (found == 0) return 0;
  const int before = atomicAdd(&board.count, __popc(found)), after = before + __popc(found);
  for (int at = before; found != 0; found &= found - 1, ++at) {
    const int e = __ffs(static_cast<int>(found)) - 1;
    if (at < Board<kThreads>::kWaiting) board.waiting[at] = key_of(element<T>(v, e), offset + static_cast<unsigned>(c + e));
  }
  return after;
}

// The same of all classes from `begin` on, where there were far too many, as of equal elements: one of each thread at a time.
// Keeps the k best. Barriers before and after.
template <class T, int kThreads>
__device__ __forceinline__ void let_all_wait(Board<kThreads>& board, const T* row, int begin, int classes, unsigned offset,
                                             Above above, int k) {
  for (; begin < classes; begin += kThreads) {
    const int c = begin + static_cast<int>(threadIdx.x);
    const float x = c < classes ? widen(row[c]) : 0.0f;
    if (c < classes && above(x, c)) board.waiting[atomicAdd(&board.count, 1)] = key_of(x, offset + static_cast<unsigned>(c));
    __syncthreads();
    const int waiting = board.count;
    if (waiting > Board<kThreads>::kRoom || begin + kThreads >= classes) {
      keep_best(board, waiting, k);
      __syncthreads();
      above.bar = board.bar;
    }
    __syncthreads();
  }
}

// The best k of a row that the block's threads hold in kVectors vectors each are left in board.best, and their maximum and sum
// are returned to the first warp.
template <int kThreads, int kVectors, class T>
__device__ __forceinline__ RowState search(Board<kThreads>& board, const T* row, int classes, int k) {
  using B = Board<kThreads>;
  constexpr int kElements = kPerVector<T>;
  const int thread = threadIdx.x, warp = thread / kWarpSize;
  if (thread == 0) board.count = 0;
  uint4 v[kVectors];
  load_row<T>(v, row, thread, kThreads, classes, lowest_vector<T>());
  float halves[2] = {-INFINITY, -INFINITY};
#pragma unroll
  for (int i = 0; i < kVectors; ++i) halves[i % 2] = fmaxf(halves[i % 2], max_of<T>(v[i]));
  const float most = fmaxf(halves[0], halves[1]);
  if constexpr (kThreads == kWarpSize) {
    board.groups[thread] = halves[0];
    board.groups[kWarpSize + thread] = halves[1];
  } else {
    group_maxima(board, most);
  }
  __syncthreads();
  if (warp == 0) set_first_bar(board, k);
  RowState state;
  state.raise_max(most);
  add_weights<T>(state, v);
  __syncthreads();
  const Above above(board.bar, k);
  const bool nan = state.sum != state.sum;  // which is in no maximum
  const auto first_of = [&](int i) { return (thread + i * kThreads) * kElements; };
  unsigned who = 0;
  if (most > above.bar || nan || first_of(0) < above.free) {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) who |= max_of<T>(v[i]) > above.bar || nan || first_of(i) < above.free ? 1u << i : 0;
  }
  for (; who != 0; who &= who - 1) {
    const int i = __ffs(static_cast<int>(who)) - 1;
    let_wait<T>(board, any_of(v, i), first_of(i), classes, 0, above);
  }
  __syncthreads();
  const int count = board.count;
  if (count <= B::kWaiting) {
    rank_waiting(board, count, k);
  } else {
    __syncthreads();
    if (thread == 0) board.count = 0;
    __syncthreads();
    let_all_wait(board, row, 0, classes, 0, above, k);
  }
  return merge_states(board, state);
}

// The results of a row, by one warp: a lane has a key.
template <class R>
__device__ __forceinline__ void write_list(const RowProblem& problem, const RowPlace& place, const RowState& state, Key key) {
  const int lane = threadIdx.x % kWarpSize;
  RowState denominator = state;
  const bool mine = lane < problem.k;
  if (problem.renormalize) {
    RowState own;
    if (mine) own.absorb(element_of(key));
    denominator = merge_lanes<kWarpSize>(own);
  }
  if (!mine) return;
  const float p = denominator.weight(element_of(key)) * denominator.inverse_sum();
  row_of<R>(problem.result, place).set(lane, p);
  const View3<int64_t*>& indices = problem.indices;
  indices.data[place.outer * indices.stride[0] + lane * indices.stride[1] + place.inner * indices.stride[2]] = index_of(key);
}

// A block a row.
template <class T, class R, int kThreads, int kVectors>
__global__ void __launch_bounds__(kThreads, (kVectors > 8 ? 576 : 1024) / kThreads)
    list_kernel(const __grid_constant__ RowProblem problem) {
  __shared__ Board<kThreads> board;
  launch_dependents();
  grid_dependency_wait();
  const RowPlace place = held_place(problem, blockIdx.x);
  const T* row = row_of<const T>(problem.input, place).data;
  const RowState state = search<kThreads, kVectors>(board, row, static_cast<int>(problem.classes), static_cast<int>(problem.k));
  if (threadIdx.x < kWarpSize) write_list<R>(problem, place, state, board.best[threadIdx.x]);
}

// ---- the same, longer rows

// A block takes piece after piece through its ring: whole rows, or pieces of them. Measured: blocks of 64 threads with twice
// the vectors are 3 to 4 % slower; a third stage with fewer blocks is 2 % faster, but 26 % slower for ten rows of 10^6 classes.
constexpr int kRingThreads = 128, kRingVectors = 8, kRingStages = 2, kRingBlocks = 6;
template <class T>
using ListShape = RingShape<T, kRingThreads, kRingVectors, kRingStages>;

template <class T>
PiecedRows list_pieces(const RowProblem& problem, Type<T>) {
  return pieced(problem, ListShape<T>::kClasses, 8, 4, 128);  // a piece's list and a merge are dear to a short row
}
// In the workspace: a state a piece of each row, then the lists.
struct PieceState {
  float max, sum;
};
inline int64_t list_bytes(int64_t pieces) {
  return pieces * static_cast<int64_t>(sizeof(PieceState) + kWarpSize * sizeof(Key));
}
__device__ __forceinline__ Key* lists_of(const PiecedRows& rows) { return static_cast<Key*>(rows.problem.workspace); }
__device__ __forceinline__ PieceState* states_of(const PiecedRows& rows) {
  return reinterpret_cast<PieceState*>(lists_of(rows) + rows.all_pieces * kWarpSize);
}

// Leaves those of a chunk in which far too many were above, as of equal elements, to wait once more, one of each thread at a
// time, and keeps the k best. What waited before is still there. Barriers before and after.
template <class T>
__device__ __forceinline__ void look_again(Board<kRingThreads>& board, const Piece<T>& piece, int begin, const Above& above,
                                           int k) {
  constexpr int kWaiting = Board<kRingThreads>::kWaiting, kClasses = ListShape<T>::kClasses;
  int before = 0;
  for (int i = threadIdx.x; i < kWaiting; i += kRingThreads)
    before +=
        __syncthreads_count(index_of(board.waiting[i]) - static_cast<unsigned>(piece.first) < static_cast<unsigned>(begin));
  if (threadIdx.x == 0) board.count = before;
  __syncthreads();
  const int end = piece.classes - begin < kClasses ? piece.classes : begin + kClasses;
  let_all_wait(board, piece.data, begin, end, static_cast<unsigned>(piece.first), above, k);
}

template <class T, class R>
__global__ void __launch_bounds__(kRingThreads, kRingBlocks) list_ring_kernel(const __grid_constant__ PiecedRows rows) {
  using B = Board<kRingThreads>;
  using Shape = ListShape<T>;
  using Chunk = RingChunk<Shape>;
  constexpr int kMany = B::kWaiting / 2;  // from so many on the bar is raised
  extern __shared__ __align__(128) uint4 all_shared[];
  __shared__ B board;
  __shared__ uint64_t full[kRingStages];
  const RowProblem& problem = rows.problem;
  const int thread = threadIdx.x, warp = thread / kWarpSize, lane = thread % kWarpSize, k = static_cast<int>(problem.k);
  const bool loads = kHasBulkCopy && thread == kRingThreads - kWarpSize;  // of the last warp: the first one writes results
  RingLoader<Shape> loader(rows, all_shared, full, blockIdx.x, gridDim.x);
  launch_dependents();
  grid_dependency_wait();
  if constexpr (kHasBulkCopy) {
    if (loads) {
      loader.begin();
      loader.fill();
    }
    __syncthreads();
  }
  PipelineState<kRingStages> at;
  const unsigned all = static_cast<unsigned>(rows.all_pieces);
  for (unsigned number = blockIdx.x; number < all; number += gridDim.x) {
    const Piece<T> piece(rows, number);
    const unsigned offset = static_cast<unsigned>(piece.first);
    RowState state;
    Above above(0, k);
#pragma unroll 1
    for (int begin = 0, n = 1; begin < piece.classes; begin += Shape::kClasses, ++n) {
      const Chunk chunk{all_shared + at.stage * Shape::kStageVectors, piece.data + begin, piece.classes - begin};
      uint4 v[kRingVectors];
      if constexpr (kHasBulkCopy) wait(&full[at.stage], at.parity);
      chunk.read(v);
      float tops[kRingVectors], most = -INFINITY;
#pragma unroll
      for (int i = 0; i < kRingVectors; ++i) tops[i] = max_of<T>(v[i]), most = fmaxf(most, tops[i]);
      if (begin == 0) {
        if (thread == 0) board.count = 0;
        group_maxima(board, most);
        __syncthreads();
        if (warp == 0) set_first_bar(board, k);
      }
      state.raise_max_lazily(kSlack, most);
      add_weights<T>(state, v);
      if (begin == 0) {
        __syncthreads();
        above = Above(board.bar, k);
      }
      const bool nan = state.sum != state.sum;  // which is in no maximum
      unsigned who = 0;
      if (most > above.bar || nan || begin < above.free) {
#pragma unroll
        for (int i = 0; i < kRingVectors; ++i)
          who |= tops[i] > above.bar || nan || begin + Chunk::first_of(i) < above.free ? 1u << i : 0;
      }
      int waiting = 0;
      for (; who != 0; who &= who - 1) {
        const int i = __ffs(static_cast<int>(who)) - 1, c = begin + Chunk::first_of(i);
        waiting = max(waiting, let_wait<T>(board, chunk.any(v, i), c, piece.classes, offset, above));
      }
      const bool many = __syncthreads_or(waiting > kMany);
      if constexpr (kHasBulkCopy) {
        if (loads) loader.load(at.stage);
        at.advance();
      }
      const bool last = begin + Shape::kClasses >= piece.classes, doubled = n > 1 && (n & (n - 1)) == 0;
      if (!last && !many && !doubled) continue;
      const int count = board.count;
      if (count > B::kWaiting) {
        look_again(board, piece, begin, above, k);
        above = Above(board.bar, k);
      } else if (last) {
        rank_waiting(board, count, k);
      } else {
        keep_best(board, count, k);
        __syncthreads();
        above = Above(board.bar, k);
      }
    }
    state = merge_states(board, state);
    if (warp != 0) continue;
    if (rows.pieces == 1) {
      write_list<R>(problem, piece.place, state, board.best[lane]);
    } else {
      lists_of(rows)[int64_t{number} * kWarpSize + lane] = lane < k ? board.best[lane] : kNoKey;
      if (lane == 0) states_of(rows)[number] = {state.max, state.sum};
    }
  }
}

// A warp's best 32 keys, one a lane, descending.
__device__ __forceinline__ Key exchange(Key key, int step, bool keep_larger) {
  const Key other = __shfl_xor_sync(~0u, key, step);
  return (key > other) == keep_larger ? key : other;
}

// The best 32 of two sorted lists.
__device__ __forceinline__ Key merge_sorted(Key a, Key b) {
  const int lane = threadIdx.x % kWarpSize;
  const Key reversed = __shfl_sync(~0u, b, kWarpSize - 1 - lane);
  Key key = a > reversed ? a : reversed;  // bitonic
#pragma unroll
  for (int step = kWarpSize / 2; step > 0; step /= 2) key = exchange(key, step, (lane & step) == 0);
  return key;
}

constexpr int kMergeThreads = 256, kMergeWarps = kMergeThreads / kWarpSize;

// A block a row: merges its pieces.
template <class R>
__global__ void __launch_bounds__(kMergeThreads) list_merge_kernel(const __grid_constant__ PiecedRows rows) {
  __shared__ Key merged[kMergeWarps][kWarpSize];
  const int64_t first = int64_t{blockIdx.x} * rows.pieces;
  const Key* lists = lists_of(rows) + first * kWarpSize;
  const PieceState* states = states_of(rows) + first;
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize, pieces = static_cast<int>(rows.pieces);
  grid_dependency_wait();
  RowState state;
  for (int i = threadIdx.x; i < pieces; i += kMergeThreads) state.merge(RowState{states[i].max, states[i].sum});
  Key key = kNoKey;
#pragma unroll 4
  for (int i = warp; i < pieces; i += kMergeWarps) key = merge_sorted(key, lists[i * kWarpSize + lane]);
  state = HeldTeam<kMergeThreads, kMergeThreads>::merge_warps<0>(merge_lanes<kWarpSize>(state));
#pragma unroll
  for (int half = kMergeWarps / 2; half > 0; half /= 2) {
    if (warp >= half && warp < 2 * half) merged[warp][lane] = key;
    __syncthreads();
    if (warp < half) key = merge_sorted(key, merged[warp + half][lane]);
  }
  if (warp == 0) write_list<R>(rows.problem, held_place(rows.problem, blockIdx.x), state, key);
}

// ---- any k, any strides

constexpr int kSortThreads = 512, kSortKeys = 4096, kSortKept = 2048;

// Sorts `keys` by a block, descending.
__device__ __forceinline__ void sort_block(Key* keys) {
  for (int size = 2; size <= kSortKeys; size *= 2)
    for (int step = size / 2; step > 0; step /= 2) {
      __syncthreads();
      for (int i = threadIdx.x; i < kSortKeys / 2; i += kSortThreads) {
        const int low = 2 * i - (i & (step - 1)), high = low + step;
        const Key a = keys[low], b = keys[high];
        if ((a < b) == ((low & size) == 0)) keys[low] = b, keys[high] = a;
      }
    }
  __syncthreads();
}

template <class T, class R>
__global__ void __launch_bounds__(kSortThreads, 2) sort_kernel(const __grid_constant__ RowProblem problem) {
  __shared__ Key keys[kSortKeys];
  __shared__ int count;
  for (int64_t number = blockIdx.x; number < problem.outer * problem.inner; number += gridDim.x) {
    const RowPlace place = place_at(problem, number);
    const StridedRow<BlockPerRow, T> reader(problem, problem.input, place);
    const Row<const T> row = row_of<const T>(problem.input, place);
    RowState denominator;
    if (!problem.renormalize) denominator = reader.state();
    Key before = ~Key{0};  // keys from here on were written by earlier passes
    const auto pass = [&](int64_t done, bool write) {
      const int64_t wanted = problem.k - done < kSortKept ? problem.k - done : kSortKept;
      Key bar = kNoKey;  // the wanted-th best so far
      __syncthreads();
      for (int i = threadIdx.x; i < kSortKeys; i += kSortThreads) keys[i] = kNoKey;
      if (threadIdx.x == 0) count = 0;
      __syncthreads();
      const auto fence_registers = [&] {
        sort_block(keys);
        bar = keys[wanted - 1];
        __syncthreads();
        for (int i = threadIdx.x; i < kSortKeys; i += kSortThreads)
          if (i >= wanted) keys[i] = kNoKey;
        if (threadIdx.x == 0) count = static_cast<int>(wanted);
        __syncthreads();
      };
      for (int64_t begin = 0; begin < problem.classes; begin += kSortThreads) {
        const int64_t c = begin + threadIdx.x;
        const Key key = c < problem.classes ? key_of(row[c], static_cast<unsigned>(c)) : kNoKey;
        const bool has = key > bar && key < before;
        const int more = __syncthreads_count(has);
        if (more == 0) continue;
        if (count + more > kSortKeys) fence_registers();  // all threads read the same count: it changes behind barriers alone
        __syncthreads();
        if (has) keys[atomicAdd(&count, 1)] = key;
        __syncthreads();
      }
      fence_registers();
      before = keys[wanted - 1];
      if (problem.renormalize && !write) {
        RowState own;
        for (int64_t j = threadIdx.x; j < wanted; j += kSortThreads) own.absorb(element_of(keys[j]));
        denominator.merge(BlockPerRow::merge(own));
      }
      if (!write) return;
      const float scale = denominator.inverse_sum();
      const Row<R> result = row_of<R>(problem.result, place);
      const View3<int64_t*>& indices = problem.indices;
      int64_t* at = indices.data + place.outer * indices.stride[0] + place.inner * indices.stride[2];
      for (int64_t j = threadIdx.x; j < wanted; j += kSortThreads) {
        result.set(done + j, denominator.weight(element_of(keys[j])) * scale);
        at[(done + j) * indices.stride[1]] = index_of(keys[j]);
      }
    };
    if (problem.renormalize) {
      for (int64_t done = 0; done < problem.k; done += kSortKept) pass(done, false);
      before = ~Key{0};
    }
    for (int64_t done = 0; done < problem.k; done += kSortKept) pass(done, true);
  }
}

PiecedRows list_pieces(const RowProblem& problem) {
  return problem.dtype == DType::kFloat32 ? list_pieces(problem, Type<float>{}) : list_pieces(problem, Type<__half>{});
}

// Whether a row's lists are made of vectors.
bool has_lists(const RowProblem& problem) {
  return problem.k <= kMostInLists && classes_together(problem, {problem.input.stride[1]}) && list_pieces(problem).countable();
}

template <class T, class R>
void launch_topk(const RowProblem& problem, cudaStream_t stream) {
  const int64_t rows = problem.outer * problem.inner, vectors = (problem.classes + kPerVector<T> - 1) / kPerVector<T>;
  const auto launch = [&]<int kThreads, int kVectors>() {
    launch_dependent(list_kernel<T, R, kThreads, kVectors>, problem, static_cast<unsigned>(rows), kThreads, stream);
  };
  if (!has_lists(problem)) {
    sort_kernel<T, R><<<grid_for(rows, 16), kSortThreads, 0, stream>>>(problem);
  } else if (vectors <= 32 * 4) {
    launch.template operator()<32, 4>();
  } else if (vectors <= 32 * 8) {
    launch.template operator()<32, 8>();
  } else if (vectors <= 32 * 16) {
    launch.template operator()<32, 16>();
  } else if (vectors <= 64 * 16) {
    launch.template operator()<64, 16>();
  } else if (vectors <= 128 * 16) {
    launch.template operator()<128, 16>();
  } else {
    static PersistentKernel kernel(list_ring_kernel<T, R>, kRingThreads, ListShape<T>::kBytes);
    const PiecedRows pieces = list_pieces(problem);
    kernel.launch_all(pieces, pieces.all_pieces, true, stream);
    if (pieces.pieces > 1) launch_dependent(list_merge_kernel<R>, pieces, static_cast<unsigned>(rows), kMergeThreads, stream);
  }
  check_launch("topk_softmax");
}

}  // namespace

int64_t topk_workspace(const RowProblem& problem) {
  if (!has_lists(problem)) return 0;
  const PiecedRows pieces = list_pieces(problem);
  return pieces.pieces > 1 ? list_bytes(pieces.all_pieces) : 0;
}

void topk_softmax(const RowProblem& problem, CUstream_st* stream) {
  if (is_empty(problem) || problem.k == 0) return;
  visit_types(problem, "topk_softmax", [&]<class T, class R>(Type<T>, Type<R>) { launch_topk<T, R>(problem, stream); });
}

}  // namespace flash_online::cuda
