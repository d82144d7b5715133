// The k largest probabilities of a softmax on CUDA: one pass over the row keeps its maximum and sum, and the k largest elements
// so far (Milakov and Gimelshein, arXiv 1805.02867, section 4).
//
// Elements are ranked by keys: 64 bits, larger is better, the element above and its index, complemented, below: NaN first, as
// in torch.topk; equal elements in their order. No two keys of a row are equal, so results do not depend on who finds which
// first.
//   k <= 32   a warp keeps its best 32 keys in its lanes, sorted. A lane reads vectors and compares their maximum with the bar,
//   the
//             warp's k-th best; after the first few vectors hardly any is above. Those that are wait in shared memory until
//             there are enough to be sorted into the list. Lists of warps are merged in shared memory, those of a long row's
//             pieces through the workspace.
//   else      a block collects keys in shared memory and sorts them when it is full. Beyond 2048 it reads the row again for
//   each
//             2048, looking only at keys behind the last one found.
#include "dispatch.cuh"
#include "rows.h"

namespace flash_online::cuda {

namespace {

using Key = unsigned long long;
constexpr Key kNoKey = 0;  // behind every element's: indices are below 2^32 - 1

// Floats as integers of the same order, NaN above all.
__device__ __forceinline__ unsigned rank_of(float x) {
  const unsigned bits = __float_as_uint(x);
  return x != x ? 0xffffffffu : bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float element_of(Key key) {
  const unsigned rank = static_cast<unsigned>(key >> 32);
  return rank == 0xffffffffu ? __uint_as_float(0x7fffffffu) : __uint_as_float(rank & 0x80000000u ? rank & 0x7fffffffu : ~rank);
}
__device__ __forceinline__ Key key_of(float x, unsigned index) { return Key{rank_of(x)} << 32 | (0xffffffffu - index); }
__device__ __forceinline__ unsigned index_of(Key key) { return 0xffffffffu - static_cast<unsigned>(key); }

__device__ __forceinline__ Key larger(Key a, Key b) { return a > b ? a : b; }
__device__ __forceinline__ Key smaller(Key a, Key b) { return a < b ? a : b; }

// ---- a warp's best 32, one a lane, descending

__device__ __forceinline__ Key exchange(Key key, int step, bool keep_larger) {
  const Key other = __shfl_xor_sync(~0u, key, step);
  return keep_larger ? larger(key, other) : smaller(key, other);
}

// Bitonic sort, descending.
__device__ __forceinline__ Key sort_warp(Key key) {
  const int lane = threadIdx.x % kWarp;
#pragma unroll
  for (int size = 2; size <= kWarp; size *= 2)
#pragma unroll
    for (int step = size / 2; step > 0; step /= 2) key = exchange(key, step, ((lane & size) == 0) == ((lane & step) == 0));
  return key;
}

// The best 32 of two sorted lists.
__device__ __forceinline__ Key merge_sorted(Key a, Key b) {
  const int lane = threadIdx.x % kWarp;
  Key key = larger(a, __shfl_sync(~0u, b, kWarp - 1 - lane));  // bitonic
#pragma unroll
  for (int step = kWarp / 2; step > 0; step /= 2) key = exchange(key, step, (lane & step) == 0);
  return key;
}

__device__ __forceinline__ float sort_warp_descending(float x) {
  const int lane = threadIdx.x % kWarp;
#pragma unroll
  for (int size = 2; size <= kWarp; size *= 2)
#pragma unroll
    for (int step = size / 2; step > 0; step /= 2) {
      const float other = __shfl_xor_sync(~0u, x, step);
      x = ((lane & size) == 0) == ((lane & step) == 0) ? fmaxf(x, other) : fminf(x, other);
    }
  return x;
}

// The warp's list, and the candidates that wait to be sorted into it. All members are for all lanes together.
class Best {
 public:
  // `waiting`: room for 2 * kWarp keys, the warp's own.
  __device__ __forceinline__ Best(int k, Key* waiting) : last_(k - 1), waiting_(waiting) {}

  // Whether an element cannot be among the best k: false for NaN, and for all as long as there is no bar.
  __device__ __forceinline__ bool below(float x) const { return x <= bar_; }

  // A first bar, from the maximum of disjoint parts of what is to come, one a lane: k of them are as large as the k-th. One
  // step lower, as an element equal to the bar is no candidate.
  __device__ __forceinline__ void expect(float max) {
    const float bar = __shfl_sync(~0u, sort_warp_descending(max), last_);
    bar_ = bar > -INFINITY && bar < INFINITY ? nextafterf(bar, -INFINITY) : bar_;
  }

  // Takes the keys of the lanes that have a candidate.
  __device__ __forceinline__ void offer(bool has, Key key) {
    const unsigned who = __ballot_sync(~0u, has);
    if (who == 0) return;
    const int lane = threadIdx.x % kWarp;
    if (has) waiting_[count_ + __popc(who & ((1u << lane) - 1))] = key;
    count_ += __popc(who);
    __syncwarp();
    if (count_ < kWarp) return;
    merge(sort_warp(waiting_[lane]));
    count_ -= kWarp;
    const Key rest = waiting_[kWarp + lane];
    __syncwarp();
    waiting_[lane] = rest;
    __syncwarp();
    raise_bar();
  }
  __device__ __forceinline__ void merge(Key sorted) { list_ = merge_sorted(list_, sorted); }
  __device__ __forceinline__ Key finish() {
    if (count_ > 0) merge(sort_warp(static_cast<int>(threadIdx.x % kWarp) < count_ ? waiting_[threadIdx.x % kWarp] : kNoKey));
    count_ = 0;
    return list_;
  }

 private:
  __device__ __forceinline__ void raise_bar() {
    const Key last = __shfl_sync(~0u, list_, last_);
    if (last == kNoKey) return;
    const float bar = element_of(last);
    bar_ = bar != bar ? INFINITY : bar;
  }
  int last_;  // the lane that has the k-th
  Key* waiting_;
  int count_ = 0;
  Key list_ = kNoKey;
  float bar_ = NAN;  // nothing is below
};

constexpr int kListVectors = 4;  // of a lane at a time

// What a warp, or more of them, know of a row.
struct Found {
  RowState state;
  Key key;  // this lane's of the list
};

// The vectors first, first + step, ... of a row's classes [0, classes), whose indices count from `offset`, by one warp. The
// next vectors are on their way while these are looked at.
template <class T>
__device__ __forceinline__ Found search(const T* row, int first, int step, int classes, unsigned offset, int k, Key* waiting) {
  constexpr int kElements = kPerVector<T>;
  const int lane = threadIdx.x % kWarp;
  RowState state;
  Best best(k, waiting);
  uint4 next[kListVectors];
  load_row<T>(next, row, first + lane, step, classes, lowest_vector<T>());
  for (int begin = first; begin * kElements < classes; begin += step * kListVectors) {  // the same for all lanes
    uint4 v[kListVectors];
#pragma unroll
    for (int i = 0; i < kListVectors; ++i) v[i] = next[i];
    load_row<T>(next, row, begin + step * kListVectors + lane, step, classes, lowest_vector<T>());
    float max[kListVectors], most = -INFINITY;
#pragma unroll
    for (int i = 0; i < kListVectors; ++i) max[i] = max_of<T>(v[i]), most = fmaxf(most, max[i]);
    state.raise_beyond(kSlack, most);
    float sum = 0;
#pragma unroll
    for (int i = 0; i < kListVectors; ++i) {
      float x[kElements], part = 0;
      unpack<T>(v[i], x);
#pragma unroll
      for (int e = 0; e < kElements; ++e) part += state.weight(x[e]);
      sum += part;
    }
    state.add(sum);
    if (begin == first) best.expect(most);
    const bool nan = state.sum != state.sum;  // which is in no maximum
    if (!__any_sync(~0u, nan || !best.below(most))) continue;
#pragma unroll
    for (int i = 0; i < kListVectors; ++i) {
      if (!__any_sync(~0u, nan || !best.below(max[i]))) continue;
      const int c = (begin + lane + i * step) * kElements;
      float x[kElements];
      unpack<T>(v[i], x);
#pragma unroll
      for (int e = 0; e < kElements; ++e)
        best.offer(c + e < classes && !best.below(x[e]), key_of(x[e], offset + static_cast<unsigned>(c + e)));
    }
  }
  return {merge_lanes<kWarp>(state), best.finish()};
}

// Of all warps of a block, for the first.
template <int kWarps>
__device__ __forceinline__ Found merge_block(Found found) {
  __shared__ Key lists[kWarps][kWarp];
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  found.state = HeldTeam<kWarps * kWarp, kWarps * kWarp>::template merge_warps<0>(found.state);
#pragma unroll
  for (int half = kWarps / 2; half > 0; half /= 2) {
    if (warp >= half && warp < 2 * half) lists[warp][lane] = found.key;
    __syncthreads();
    if (warp < half) found.key = merge_sorted(found.key, lists[warp + half][lane]);
  }
  return found;
}

// The results of a row, by one warp.
template <class R>
__device__ __forceinline__ void write_list(const RowProblem& problem, const RowPlace& place, const Found& found) {
  const int lane = threadIdx.x % kWarp;
  RowState denominator = found.state;
  const bool mine = lane < problem.k;
  if (problem.renormalize) {
    RowState own;
    if (mine) own.absorb(element_of(found.key));
    denominator = merge_lanes<kWarp>(own);
  }
  if (!mine) return;
  const float p = denominator.weight(element_of(found.key)) * denominator.inverse_sum();
  row_of<R>(problem.result, place).set(lane, p);
  const View3<int64_t*>& indices = problem.indices;
  indices.data[place.outer * indices.stride[0] + lane * indices.stride[1] + place.inner * indices.stride[2]] =
      index_of(found.key);
}

constexpr int kListThreads = 256, kListWarps = kListThreads / kWarp;
constexpr int64_t kWarpRow = 256;  // vectors up to which a row is one warp's
constexpr int64_t kPieceVectors = 8 * kListThreads * kListVectors;  // of a block's piece of a longer row

template <class T, class R>
__global__ void __launch_bounds__(kListThreads, 4) list_by_warp_kernel(const __grid_constant__ RowProblem problem) {
  const int64_t number = int64_t{blockIdx.x} * kListWarps + threadIdx.x / kWarp;
  if (number >= problem.outer * problem.inner) return;
  const RowPlace place = place_at(problem, number);
  __shared__ Key waiting[kListWarps][2 * kWarp];
  const Found found = search<T>(row_of<const T>(problem.input, place).data, 0, kWarp, static_cast<int>(problem.classes), 0,
                                static_cast<int>(problem.k), waiting[threadIdx.x / kWarp]);
  write_list<R>(problem, place, found);
}

struct ListPieces {
  int64_t classes, count;
  template <class T>
  __host__ __device__ static ListPieces of(int64_t classes, Type<T>) {
    constexpr int64_t piece = kPieceVectors * kPerVector<T>;
    return {piece, (classes + piece - 1) / piece};
  }
};
// In the workspace: a state a piece of each row, then the lists.
struct PieceState {
  float max, sum;
};
__host__ __device__ inline int64_t list_bytes(int64_t pieces) {
  return pieces * static_cast<int64_t>(sizeof(PieceState) + kWarp * sizeof(Key));
}

constexpr int kGroups = 64, kWaiting = 1024;

// What the threads of a block share while they look for the best of a row.
struct Board {
  float groups[kGroups];  // the maximum of each group of 4 threads over the first vectors
  float bar;
  int count;  // of candidates that wait
  Key waiting[kWaiting];
};

// The first warp: a first bar from the groups' maxima, as Best::expect does.
__device__ __forceinline__ void expect(Board& board, int k) {
  const int lane = threadIdx.x % kWarp;
  const float a = sort_warp_descending(board.groups[lane]), b = sort_warp_descending(board.groups[kWarp + lane]);
  const float top = sort_warp_descending(fmaxf(a, __shfl_sync(~0u, b, kWarp - 1 - lane)));
  const float bar = __shfl_sync(~0u, top, k - 1);
  if (lane == 0) board.bar = bar > -INFINITY && bar < INFINITY ? nextafterf(bar, -INFINITY) : NAN;
}

// The first warp: sorts `count` waiting candidates into its list and raises the bar.
__device__ __forceinline__ Key take(Board& board, Key list, int count, int k) {
  const int lane = threadIdx.x % kWarp;
  for (int i = 0; i < count; i += kWarp)
    list = merge_sorted(list, sort_warp(i + lane < count ? board.waiting[i + lane] : kNoKey));
  const Key last = __shfl_sync(~0u, list, k - 1);
  if (lane == 0) {
    board.count = 0;
    if (last != kNoKey) board.bar = element_of(last) != element_of(last) ? INFINITY : element_of(last);
  }
  return list;
}

template <class T, class R>
__global__ void __launch_bounds__(kListThreads, 4) list_piece_kernel(const __grid_constant__ RowProblem problem) {
  constexpr int kElements = kPerVector<T>, kStep = kListThreads * kListVectors * kElements;
  constexpr int64_t kPiece = kPieceVectors * kElements;
  __shared__ Board board;
  const int64_t number = blockIdx.x, offset = blockIdx.y * kPiece;
  const RowPlace place = place_at(problem, number);
  const int classes = static_cast<int>(problem.classes - offset < kPiece ? problem.classes - offset : kPiece);
  const int k = static_cast<int>(problem.k), warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const T* row = row_of<const T>(problem.input, place).data + offset;
  if (threadIdx.x == 0) board.count = 0, board.bar = NAN;

  RowState state;
  Key list = kNoKey;
  float bar = NAN;  // nothing is below
  int before = 0;  // candidates that waited already
  uint4 next[kListVectors];
  load_row<T>(next, row, threadIdx.x, kListThreads, classes, lowest_vector<T>());
  for (int begin = 0; begin < classes; begin += kStep) {
    uint4 v[kListVectors];
#pragma unroll
    for (int i = 0; i < kListVectors; ++i) v[i] = next[i];
    const int ahead = (begin + kStep) / kElements + static_cast<int>(threadIdx.x);
    load_row<T>(next, row, ahead, kListThreads, classes, lowest_vector<T>());
    float max[kListVectors], most = -INFINITY;
#pragma unroll
    for (int i = 0; i < kListVectors; ++i) max[i] = max_of<T>(v[i]), most = fmaxf(most, max[i]);
    if (begin == 0) {
      float group = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
      group = fmaxf(group, __shfl_xor_sync(~0u, group, 2));
      if (lane % 4 == 0) board.groups[threadIdx.x / 4] = group;
      __syncthreads();
      if (warp == 0) expect(board, k);
    }
    state.raise_beyond(kSlack, most);
    float sum = 0;
#pragma unroll
    for (int i = 0; i < kListVectors; ++i) {
      float x[kElements], part = 0;
      unpack<T>(v[i], x);
#pragma unroll
      for (int e = 0; e < kElements; ++e) part += state.weight(x[e]);
      sum += part;
    }
    state.add(sum);
    if (begin == 0) {
      __syncthreads();
      bar = board.bar;
    }
    const bool nan = state.sum != state.sum;  // which is in no maximum
    const auto first_of = [&](int i) { return begin + (static_cast<int>(threadIdx.x) + i * kListThreads) * kElements; };
    const auto key_at = [&](float x, int c) { return key_of(x, static_cast<unsigned>(offset) + static_cast<unsigned>(c)); };
    if (nan || !(most <= bar)) {
#pragma unroll
      for (int i = 0; i < kListVectors; ++i) {
        if (!nan && max[i] <= bar) continue;
        float x[kElements];
        unpack<T>(v[i], x);
#pragma unroll
        for (int e = 0; e < kElements; ++e) {
          const int c = first_of(i) + e;
          if (c >= classes || x[e] <= bar) continue;
          const int at = atomicAdd(&board.count, 1);
          if (at < kWaiting) board.waiting[at] = key_at(x[e], c);
        }
      }
    }
    __syncthreads();
    const int count = board.count;
    __syncthreads();  // all have read it: take() sets it
    const bool last = begin + kStep >= classes;
    if (count > kWaiting) {
      // Far too many, as in a row that ascends: once more, one of each thread at a time.
      if (threadIdx.x == 0) board.count = before;
      __syncthreads();
#pragma unroll 1
      for (int n = 0; n < kListVectors * kElements; ++n) {
        const int i = n / kElements, c = first_of(i) + n % kElements;
        const float x = c < classes ? widen(row[c]) : 0.0f;
        if (c < classes && !(x <= bar)) board.waiting[atomicAdd(&board.count, 1)] = key_at(x, c);
        __syncthreads();
        const int waiting = board.count;
        __syncthreads();
        if (waiting > kWaiting - kListThreads || n + 1 == kListVectors * kElements) {
          if (warp == 0) list = take(board, list, waiting, k);
          __syncthreads();
          bar = board.bar;
        }
      }
      before = 0;
    } else if (count >= kWarp || last) {
      if (warp == 0) list = take(board, list, count, k);
      __syncthreads();
      bar = board.bar;
      before = 0;
    } else {
      before = count;
    }
  }

  const Found found{HeldTeam<kListThreads, kListThreads>::merge_warps<0>(merge_lanes<kWarp>(state)), list};
  if (warp != 0) return;
  if (gridDim.y == 1) {
    write_list<R>(problem, place, found);
    return;
  }
  auto* lists = static_cast<Key*>(problem.workspace);
  auto* states = reinterpret_cast<PieceState*>(lists + int64_t{gridDim.x} * gridDim.y * kWarp);
  const int64_t slot = number * gridDim.y + blockIdx.y;
  lists[slot * kWarp + lane] = found.key;
  if (lane == 0) states[slot] = {found.state.max, found.state.sum};
}

// A block a row: merges its pieces.
template <class T, class R>
__global__ void __launch_bounds__(kListThreads) list_merge_kernel(const __grid_constant__ RowProblem problem) {
  const int64_t pieces = ListPieces::of(problem.classes, Type<T>{}).count, all = problem.outer * problem.inner * pieces;
  const auto* lists = static_cast<const Key*>(problem.workspace);
  const auto* states = reinterpret_cast<const PieceState*>(lists + all * kWarp);
  const int64_t number = blockIdx.x, first = number * pieces;
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  RowState state;
  for (int64_t i = threadIdx.x; i < pieces; i += kListThreads)
    state.merge(RowState{states[first + i].max, states[first + i].sum});
  Key list = kNoKey;
  for (int64_t i = warp; i < pieces; i += kListWarps) list = merge_sorted(list, lists[(first + i) * kWarp + lane]);
  const Found found = merge_block<kListWarps>({merge_lanes<kWarp>(state), list});
  if (warp == 0) write_list<R>(problem, place_at(problem, number), found);
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
__global__ void __launch_bounds__(kSortThreads) sort_kernel(const __grid_constant__ RowProblem problem) {
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
      const auto settle = [&] {
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
        if (count + more > kSortKeys) settle();  // all threads read the same count: it changes behind barriers alone
        __syncthreads();
        if (has) keys[atomicAdd(&count, 1)] = key;
        __syncthreads();
      }
      settle();
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

template <class T, class R>
void launch_topk(const RowProblem& problem, cudaStream_t stream) {
  const int64_t rows = problem.outer * problem.inner, vectors = (problem.classes + kPerVector<T> - 1) / kPerVector<T>;
  const char* name = "topk_softmax";
  if (problem.k > kWarp || !classes_together(problem, {problem.input.stride[1]})) {
    sort_kernel<T, R><<<grid_for(rows, 16), kSortThreads, 0, stream>>>(problem);
  } else if (vectors <= kWarpRow) {
    list_by_warp_kernel<T, R>
        <<<static_cast<unsigned>((rows + kListWarps - 1) / kListWarps), kListThreads, 0, stream>>>(problem);
  } else {
    const int64_t pieces = ListPieces::of(problem.classes, Type<T>{}).count;
    const dim3 blocks(static_cast<unsigned>(rows), static_cast<unsigned>(pieces));
    list_piece_kernel<T, R><<<blocks, kListThreads, 0, stream>>>(problem);
    check_launch(name);
    if (pieces > 1) list_merge_kernel<T, R><<<static_cast<unsigned>(rows), kListThreads, 0, stream>>>(problem);
  }
  check_launch(name);
}

}  // namespace

int64_t topk_workspace(const RowProblem& problem) {
  if (problem.k > kWarp || !classes_together(problem, {problem.input.stride[1]})) return 0;
  const int64_t pieces = (problem.dtype == DType::kFloat32 ? ListPieces::of(problem.classes, Type<float>{})
                                                           : ListPieces::of(problem.classes, Type<__half>{}))
                             .count;
  return pieces > 1 ? list_bytes(problem.outer * problem.inner * pieces) : 0;
}

void topk_softmax(const RowProblem& problem, CUstream_st* stream) {
  if (is_empty(problem) || problem.k == 0) return;
  visit_types(problem, "topk_softmax", [&]<class T, class R>(Type<T>, Type<R>) { launch_topk<T, R>(problem, stream); });
}

}  // namespace flash_online::cuda
