// dQ, and dK with dV, for head dims up to 128, on GPUs of compute capability 9.0. docs/design/attention_float64.md draws it.
//
// Two tiles stay in shared memory, of queries and of grad_out, or of keys and of values, and blocks of the two other tensors
// pass by. Four pairs of warps share the rows of the tiles: of a pair, the first warp makes scores and weights, the second the
// weights' gradients and, of both, the scores' gradients. Four more warps load. The two of a pair are not in step: the tensor
// cores work for one of them while the other makes exponentials, which need the same unit.
#pragma once

#include "../../hw/mbarrier.cuh"
#include "../../hw/named_barrier.cuh"
#include "../../hw/setmaxnreg.cuh"
#include "backward.cuh"
#include "exponential.cuh"

namespace flash_online::cuda::float64 {

constexpr int kPart = 64;  // a block passes by in parts of so many columns

template <int kWidth_>
struct Pairs {
  static constexpr int kWidth = kWidth_, kParts = kWidth / kPart;  // columns
  static constexpr int kPairs = 4, kWarps = 2 * kPairs, kMathThreads = kWarps * kWarpSize;
  static constexpr int kLoadThreads = 4 * kWarpSize, kThreads = kMathThreads + kLoadThreads;
  static constexpr int kMathRegisters = 232, kLoadRegisters = 40;
  // A pair has kFragments times sixteen rows of a tile, and a block kTiles times eight rows: a warp's 64 doubles of a result
  // and 16 of scores leave registers for operands that are read ahead.
  static constexpr int kFragments = kWidth == 64 ? 2 : 1, kTiles = kWidth == 64 ? 2 : 4, kBlock = 8 * kTiles;
  static constexpr int kPairRows = kFragments * kWarpRows, kRows = kPairs * kPairRows;

  using Scores = Accumulator<kFragments, kTiles, double>;

  // A block of queries or keys, as the warps that load announce it.
  struct alignas(16) Block {
    int row;  // the first
    int head;  // counts from the first of those that share the tile
    int mask_is_clear, exists;
  };

  // A CTA's shared memory. Position and row statistics are kept of the last kKeptBlocks blocks.
  static constexpr int kSlots = 5, kKeptBlocks = kWidth == 64 ? 4 : 2;
  struct Shared {
    double tiles[2][kRows * kWidth];
    double slots[kSlots][kBlock * kPart];
    double exchanged[kRows * kBlock];
    double stats[3][kRows];  // lse, its low part, delta: of the tile's rows, or of blocks
    WorkTile tile;
    unsigned kept[kPairs * kWarpSize];
    Block blocks[kKeptBlocks];
    uint64_t full[kSlots], empty[kSlots], weights_full[kPairs], weights_empty[kPairs];
  };
  static constexpr int kSharedBytes = sizeof(Shared);
  static_assert(kKeptBlocks * kBlock <= kRows && kWarps * ResultRows::kPartDoubles <= kSlots * kBlock * kPart);

  __device__ static bool is_first_of_pair() { return threadIdx.x < kMathThreads / 2; }
  __device__ static int pair() { return static_cast<int>(threadIdx.x) / kWarpSize % kPairs; }
  __device__ static int row() { return pair() * kPairRows; }
};

// ---- operands in shared memory ---------------------------------------------------------------------------------------------

// Starts copying kRows rows of a tile from `row` on; zeros where rows or columns end. A tile is always a left operand, and is
// stored as a sequence of fragments of 16 rows by 8 columns. A lane's four numbers of a fragment are two pairs of neighbours.
template <int kRows, int kWidth, int kThreads>
__device__ __forceinline__ void load_tile(double* to, const HeadRows<double>& from, int row, int rows) {
#pragma unroll 4
  for (int i = static_cast<int>(threadIdx.x); i < kRows * kWidth; i += kThreads) {
    const int r = i / kWidth, c = i % kWidth;
    const bool exists = row + r < rows && c < from.columns;
    cp_async_8(to + (r / 16 * (kWidth / 8) + c / 8) * 128 + c % 2 * 64 + (r % 8 * 4 + c % 8 / 2) * 2 + r % 16 / 8,
               exists ? from.data + (row + r) * from.row_stride + c * from.column_stride : from.data, exists);
  }
}

// Column c of row r of a part of a block lies at column c ^ permuted_by(r), so that there are no conflicts of banks where a
// warp reads neighbours of eight rows (multiply_rows), and where it reads four even rows, or the odd ones (multiply_columns).
FLASH_ONLINE_HD constexpr int permuted_by(int row) { return (row / 2 % 4 * 4) ^ (row % 2 * 8); }

// Starts copying kRows rows from `row` on, kPart columns each from `column` on; zeros where rows or columns end. `thread`: of
// kThreads.
template <int kRows, int kThreads>
__device__ __forceinline__ void load_part(double* to, const HeadRows<double>& from, int row, int rows, int column, int thread) {
  const int left = rows - row, columns = from.columns - column;
  if (from.vectors) {
    constexpr int kVectors = kPart / 2, kDown = kThreads / kVectors;
    static_assert(kThreads % kVectors == 0 && kRows % kDown == 0);
    const int c = thread % kVectors * 2, bytes = min(max(columns - c, 0), 2) * static_cast<int>(sizeof(double));
    const double* source = from.data + (row + thread / kVectors) * from.row_stride + column + c;
#pragma unroll
    for (int r = thread / kVectors; r < kRows; r += kDown, source += kDown * from.row_stride) {
      const bool exists = r < left && bytes > 0;
      cp_async(reinterpret_cast<uint4*>(to + r * kPart + (c ^ permuted_by(r))), exists ? source : from.data,
               exists ? bytes : 0);
    }
  } else {
#pragma unroll 1
    for (int i = thread; i < kRows * kPart; i += kThreads) {
      const int r = i / kPart, c = i % kPart;
      const bool exists = r < left && c < columns;
      cp_async_8(to + r * kPart + (c ^ permuted_by(r)),
                 exists ? from.data + (row + r) * from.row_stride + (column + c) * from.column_stride : from.data, exists);
    }
  }
}

// d += a b^T over kColumns columns: `rows` are the pair's rows of a tile of kWidth columns, from a multiple of 8 columns on,
// `block` is a part of a block. The order of the sum is that of float64::multiply_rows. Operands are read one step ahead.
template <int kWidth, int kColumns, int kFragments, int kTiles>
__device__ __forceinline__ void multiply_rows(Accumulator<kFragments, kTiles, double>& d, const double* rows,
                                              const double* block) {
  const int first = (2 * lane_in_quad()) ^ permuted_by(quad());
  const double *const left = rows + 2 * lane(), *const right = block + quad() * kPart;
  double2 a[2][kFragments][2], b[2][kTiles];
  const auto read = [&](int step) {
    const int column = step / 2 * 16 + (step % 2 == 0 ? first : first ^ 8);
#pragma unroll
    for (int i = 0; i < 2 * kFragments; ++i)
      a[step % 2][i / 2][i % 2] = *reinterpret_cast<const double2*>(left + (i / 2 * (kWidth / 8) + step) * 128 + i % 2 * 64);
#pragma unroll
    for (int j = 0; j < kTiles; ++j) b[step % 2][j] = *reinterpret_cast<const double2*>(right + 8 * j * kPart + column);
  };
  read(0);
#pragma unroll
  for (int step = 0; step < kColumns / 8; ++step) {
    if (step + 1 < kColumns / 8) read(step + 1);
#pragma unroll
    for (int j = 0; j < kTiles; ++j)
#pragma unroll
      for (int i = 0; i < kFragments; ++i) {
        const double2(&pairs)[2] = a[step % 2][i];
        const double operand[4] = {pairs[0].x, pairs[0].y, pairs[1].x, pairs[1].y};
        mma_16x8x8(d[i][j], operand, b[step % 2][j].x, b[step % 2][j].y);
      }
  }
}
template <int kWidth, int kFragments, int kTiles>
__device__ __forceinline__ void multiply_rows(Accumulator<kFragments, kTiles, double>& d, const double* rows,
                                              const double* block, int columns) {
  if (columns > kPart / 2)
    multiply_rows<kWidth, kPart>(d, rows, block);
  else if (columns > 0)
    multiply_rows<kWidth, kPart / 2>(d, rows, block);
}

// Columns [kFirst, kFirst + kColumns) of d += a b: `block` is a part of b, from the first of these columns on. The order of the
// sum is that of float64::multiply_columns.
template <int kFirst, int kColumns, int kFragments, int kTiles, int kResultTiles>
__device__ __forceinline__ void multiply_columns(Accumulator<kFragments, kResultTiles, double>& d,
                                                 const Accumulator<kFragments, kTiles, double>& a, const double* block) {
  constexpr int kAcross = 4, kSteps = kColumns / 8 / kAcross;  // a step has kAcross tiles of the result
  const int first = quad() ^ permuted_by(2 * lane_in_quad());
  const double *const even = block + 2 * lane_in_quad() * kPart, *const odd = even + kPart;
  double b[2][kAcross][2];
  const auto read = [&](int step) {
#pragma unroll
    for (int j = 0; j < kAcross; ++j) {
      const int tile = step % kSteps * kAcross + j, at = step / kSteps * 8 * kPart + tile / 2 * 16;
      b[step % 2][j][0] = even[at + (tile % 2 == 0 ? first : first ^ 8)];
      b[step % 2][j][1] = odd[at + (tile % 2 == 0 ? first ^ 8 : first)];
    }
  };
  read(0);
#pragma unroll
  for (int step = 0; step < kTiles * kSteps; ++step) {
    if (step + 1 < kTiles * kSteps) read(step + 1);
#pragma unroll
    for (int j = 0; j < kAcross; ++j)
#pragma unroll
      for (int i = 0; i < kFragments; ++i) {
        const double (&x)[4] = a[i][step / kSteps];
        const double left[4] = {x[0], x[2], x[1], x[3]};
        mma_16x8x8(d[i][kFirst / 8 + step % kSteps * kAcross + j], left, b[step % 2][j][0], b[step % 2][j][1]);
      }
  }
}
// The same for a part of which only the first `columns` columns exist.
template <int kFirst, int kFragments, int kTiles, int kResultTiles>
__device__ __forceinline__ void multiply_columns(Accumulator<kFragments, kResultTiles, double>& d,
                                                 const Accumulator<kFragments, kTiles, double>& a, const double* block,
                                                 int columns) {
  if (columns > kPart / 2)
    multiply_columns<kFirst, kPart>(d, a, block);
  else if (columns > 0)
    multiply_columns<kFirst, kPart / 2>(d, a, block);
}

// ---- the pipeline ----------------------------------------------------------------------------------------------------------

// Slots for parts of blocks, and barriers of mbarrier.h that say when they are full and empty. Whoever goes through the blocks
// counts the fills of the slots: bit n of `parities` is that of slot n's.
template <int kWidth>
struct Pipeline {
  using P = Pairs<kWidth>;
  typename P::Shared& shared;
  unsigned parities = 0;

  __device__ __forceinline__ explicit Pipeline(typename P::Shared& shared_) : shared(shared_) {}

  // To be called by all of the CTA's threads.
  __device__ __forceinline__ void init(const WorkTile& tile) const {
    if (threadIdx.x == 0) {
      shared.tile = tile;
      for (int n = 0; n < P::kSlots; ++n) {
        mbarrier_init(&shared.full[n], P::kLoadThreads + 1);
        mbarrier_init(&shared.empty[n], P::kWarps);
      }
      for (int n = 0; n < P::kPairs; ++n) {
        mbarrier_init(&shared.weights_full[n], 1);
        mbarrier_init(&shared.weights_empty[n], 1);
      }
      fence_barrier_init();
    }
    __syncthreads();
  }

  // The warps that load: load() starts copies to the slot once it is empty.
  template <class Load>
  __device__ __forceinline__ void fill(int slot, Load&& load) const {
    wait(&shared.empty[slot], parities >> slot & 1 ^ 1);
    load(shared.slots[slot]);
    cp_async_arrive(&shared.full[slot]);
    if (threadIdx.x == P::kMathThreads) arrive(&shared.full[slot]);
  }
  // The others: what is in the slot once it is full.
  __device__ __forceinline__ const double* filled(int slot) const {
    wait(&shared.full[slot], parities >> slot & 1);
    return shared.slots[slot];
  }
  // `arrivals`: of the kWarps that empty the slot.
  __device__ __forceinline__ void release(int slot, int arrivals = 1) const {
    __syncwarp();
    if (lane() < arrivals) arrive(&shared.empty[slot]);
  }
  // The slots have been filled, and their next fill is another.
  template <class... Slots>
  __device__ __forceinline__ void next_fill(Slots... slots) {
    parities ^= (0 | ... | (1u << slots));
  }
};

// Numbers of slots, four bits each, since registers are few.
struct SlotList {
  unsigned list;
  __device__ __forceinline__ static SlotList of(unsigned a, unsigned b, unsigned c, unsigned d, unsigned e) {
    return {a | b << 4 | c << 8 | d << 12 | e << 16};
  }
  __device__ __forceinline__ unsigned operator[](int n) const { return list >> 4 * n & 15; }
};

__device__ __forceinline__ void arrive_as_warp(uint64_t* barrier) {
  __syncwarp();
  if (lane() == 0) arrive(barrier);
}

// ---- weights ---------------------------------------------------------------------------------------------------------------

// A block's scores of a pair's rows, or what is made of them, which both of its warps hold alike: a lane reads what the same
// lane of the other warp wrote.
template <int kWidth>
struct Exchange {
  using P = Pairs<kWidth>;
  double2* lanes;
  __device__ __forceinline__ explicit Exchange(typename P::Shared& shared)
      : lanes(reinterpret_cast<double2*>(shared.exchanged) + P::row() * P::kBlock / 2 + lane()) {}
  // Element e, which is even, and the next.
  __device__ __forceinline__ double2& at(int i, int j, int e) const {
    return lanes[((i * P::kTiles + j) * 2 + e / 2) * kWarpSize];
  }
  __device__ __forceinline__ double& element(int i, int j, int e) const { return e % 2 == 0 ? at(i, j, e).x : at(i, j, e).y; }
};

// Calls f(i, j, e) for the even elements of scores, kCount from number kFirst on.
template <int kFirst, int kCount, int kFragments, int kTiles, class F>
__device__ __forceinline__ void for_pairs_of(const Accumulator<kFragments, kTiles, double>&, F&& f) {
#pragma unroll
  for (int n = kFirst; n < kFirst + kCount; ++n) f(n / 2 % kFragments, n / 2 / kFragments, n % 2 * 2);
}

// ---- the kernel ------------------------------------------------------------------------------------------------------------

// With kOverKeys a CTA owns a tile of keys and makes their dK and dV; its scores are transposed, [key][query]. Otherwise it
// owns a tile of queries and makes their dQ, as in brackets below. For each block of the other kind,
//
//   the first warp of a pair                         the second
//     S  = K Q^T     (Q K^T)                           dP = V dO^T     (dO V^T)
//     P, which it gives to the second                  dS
//     dV += P^T dO   (-)                               dK += dS^T Q   (dQ += dS K)
template <int kWidth, bool kOverKeys>
struct TileGradients {
  using P = Pairs<kWidth>;
  using Block = typename P::Block;
  using Items = std::conditional_t<kOverKeys, QueryItems<P::kRows, P::kBlock>, KeyItems<P::kRows, P::kBlock>>;

  const BackwardArguments& arguments;
  const AttentionProblem& problem = arguments.problem;
  const AttentionGradients& gradients = arguments.gradients;
  typename P::Shared& shared;
  const WorkTile& tile = shared.tile;
  Pipeline<kWidth> pipeline{shared};
  SlotList slots = SlotList::of(0, 1, 2, 3, 4);

  // The slots of a block's parts: of Q or K, and of dO or V. The first two of the list are the former's of the block before; a
  // second part of the latter takes the place of the first of these.
  __device__ __forceinline__ int slot_of(int tensor, int part) const {
    return slots[tensor == 0 ? 2 + part : part == 0 ? 4 : 0];
  }
  __device__ __forceinline__ void end_block() {
    if constexpr (P::kParts == 1) {
      pipeline.next_fill(slots[2], slots[4]);
      slots = SlotList::of(slots[2], slots[4], slots[1], slots[3], slots[0]);
    } else {
      pipeline.next_fill(slots[0], slots[2], slots[3], slots[4]);
      slots = SlotList::of(slots[2], slots[3], slots[1], slots[4], slots[0]);
    }
  }

  // The tile's first row, and the end of its rows, which are keys or queries.
  __device__ __forceinline__ int row() const { return static_cast<int>(tile.block) * P::kRows; }
  __device__ __forceinline__ int rows() const { return kOverKeys ? tile.keys : tile.queries; }
  __device__ __forceinline__ int last_row() const { return min(row() + P::kRows, rows()); }
  // The first of the query heads that share the tile.
  __device__ __forceinline__ int64_t first_head() const {
    return kOverKeys ? tile.head * (problem.heads / gradients.kv_grad_heads) : tile.head;
  }
  // Rows of queries (of_queries) or keys: of Q or K (tensor 0), or of dO or V. `head` is a query's.
  __device__ __forceinline__ HeadRows<double> rows_of(bool of_queries, int tensor, int64_t head) const {
    const int64_t columns = tensor == 0 ? problem.head_dim : problem.head_dim_v;
    if (of_queries)
      return {tensor == 0 ? problem.query : gradients.grad_out, tile.batch, head, tile.sequence.queries.begin, columns};
    return {tensor == 0 ? problem.key : problem.value, tile.batch,
            head / (problem.heads / (tensor == 0 ? problem.key_heads : problem.value_heads)), tile.sequence.keys.begin,
            columns};
  }
  __device__ __forceinline__ int64_t first_query(int64_t head) const {
    return Workspace::first_query(problem, tile.batch, head, tile.sequence);
  }

  // ---- the warps that load

  __device__ __forceinline__ Items items() const {
    if constexpr (kOverKeys)
      return {arguments.space.map,
              tile,
              first_head(),
              static_cast<int>(problem.heads / gradients.kv_grad_heads),
              row(),
              queries_of_any(tile.sequence.visible, row(), last_row(), tile.queries)};
    else
      return {arguments.space.map, tile, row(), last_row()};
  }
  __device__ __forceinline__ static Block next_of(Items& items) {
    const auto item = items.next();
    if constexpr (kOverKeys)
      return {item.query, item.head, item.clear, item.exists};
    else
      return {item.key, 0, item.clear, item.exists};
  }

  __device__ __forceinline__ void load_blocks() {
    Items remaining = items();
    const int thread = static_cast<int>(threadIdx.x) - P::kMathThreads;
    for (int number = 0;; ++number) {
      const Block block = next_of(remaining);
      const int at_block = number % P::kKeptBlocks, count = kOverKeys ? tile.queries : tile.keys;
      const int64_t head = first_head() + block.head;
      const auto load = [&](double* slot, int tensor, int part) {
        const HeadRows<double> from = rows_of(kOverKeys, tensor, head);
        if (part * kPart < from.columns)
          load_part<P::kBlock, P::kLoadThreads>(slot, from, block.row, count, part * kPart, thread);
      };
      pipeline.fill(slot_of(0, 0), [&](double* slot) {
        if (thread == 0) shared.blocks[at_block] = block;
        if (!block.exists) return;
        load(slot, 0, 0);
        if (!kOverKeys || thread >= P::kBlock) return;
        const bool exists = block.row + thread < count;
        const int64_t from = exists ? first_query(head) + block.row + thread : 0;
        const int at = at_block * P::kBlock + thread;
        cp_async_8(shared.stats[0] + at, arguments.space.lse + from, exists);
        cp_async_8(shared.stats[1] + at, arguments.space.lse_low + from, exists);
        cp_async_8(shared.stats[2] + at, arguments.space.delta + from, exists);
      });
      if (!block.exists) return;
      if (P::kParts == 2) pipeline.fill(slot_of(0, 1), [&](double* slot) { load(slot, 0, 1); });
#pragma unroll 1
      for (int part = 0; part < P::kParts; ++part) pipeline.fill(slot_of(1, part), [&](double* slot) { load(slot, 1, part); });
      end_block();
    }
  }

  // ---- the warps that multiply

  // Adds the products of the pair's rows of a tile, of Q or K or of dO or V, and a block's. `arrivals`: see release().
  __device__ __forceinline__ void add_rows(typename P::Scores& scores, int tensor, int arrivals) const {
    const double* const of_tile = shared.tiles[tensor] + P::row() * kWidth;
    const int depth = static_cast<int>(tensor == 0 ? problem.head_dim : problem.head_dim_v);
#pragma unroll 1
    for (int part = 0; part < P::kParts; ++part) {
      const int slot = slot_of(tensor, part);
      multiply_rows<kWidth>(scores, of_tile + part * kPart * 16, pipeline.filled(slot), depth - part * kPart);
      pipeline.release(slot, arrivals);
    }
  }
  // Adds the products of scores and a block of Q or K, or of dO or V.
  using Result = Accumulator<P::kFragments, kWidth / 8, double>;
  __device__ __forceinline__ void add_columns(Result& result, const typename P::Scores& scores, int tensor) const {
    const int columns = static_cast<int>(tensor == 0 ? problem.head_dim : problem.head_dim_v);
    multiply_columns<0>(result, scores, pipeline.filled(slot_of(tensor, 0)), columns);
    pipeline.release(slot_of(tensor, 0));
    if constexpr (P::kParts == 2) {
      multiply_columns<kPart>(result, scores, pipeline.filled(slot_of(tensor, 1)), columns - kPart);
      pipeline.release(slot_of(tensor, 1));
    }
  }
  __device__ __forceinline__ void store(const Result& result, const MutableView4& to, double factor, int64_t columns) const {
    const ResultRows to_rows(to, tile.batch, tile.head, kOverKeys ? tile.sequence.keys.begin : tile.sequence.queries.begin,
                             columns, 0);
    const double factors[2] = {factor, factor};
    double* const part = shared.slots[0] + static_cast<int>(threadIdx.x) / kWarpSize * ResultRows::kPartDoubles;
#pragma unroll
    for (int i = 0; i < P::kFragments; ++i) to_rows.store(result[i], factors, row() + P::row() + 16 * i, rows(), part);
  }

  // Statistic `which` of elements e and e + 1 of scores, e being even, with block `number`.
  __device__ __forceinline__ double2 stats(int which, int number, int i, int j, int e) const {
    if constexpr (kOverKeys)
      return *reinterpret_cast<const double2*>(shared.stats[which] + number % P::kKeptBlocks * P::kBlock + 8 * j +
                                               2 * lane_in_quad());
    const double x = shared.stats[which][P::row() + 16 * i + 4 * e + quad()];
    return {x, x};
  }

  __device__ __forceinline__ void make_weights(typename P::Scores& scores, const Exchange<kWidth>& exchange,
                                               const Exponential& exponential, int number, const Block& block) const {
    const int64_t head = first_head() + block.head;
    const Visibility& visible = tile.sequence.visible;
    const int last_of_block = block.row + P::kBlock, query = kOverKeys ? block.row : row(), key = kOverKeys ? row() : block.row,
              last_query = kOverKeys ? last_of_block : last_row(), last_key = kOverKeys ? last_row() : last_of_block;
    const ScoreBlock here{query, key, tile.queries, tile.keys,
                          last_query <= tile.queries && all_see(visible, query, last_query, key, last_key, tile.keys)};
    const auto wait_for_exchange = [&] { wait(&shared.weights_empty[P::pair()], number & 1 ^ 1); };
    if (problem.softcap > 0) wait_for_exchange();
    // The softcap's derivatives wait in the exchange, since registers are few.
    make_scores<kOverKeys>(scores, P::row(), ScoreMod(problem, tile.batch, head), HeadMask(problem, tile.batch, head),
                           block.mask_is_clear, here, visible,
                           [&](int i, int j, int e, double x) { exchange.element(i, j, e) = x; });
    const auto make = [&]<int kFirst, int kCount>() {
      double x[2 * kCount];
      for_pairs_of<kFirst, kCount>(scores, [&, n = 0](int i, int j, int e) mutable {
        const double2 lse = stats(0, number, i, j, e), low = stats(1, number, i, j, e);
        x[n++] = (scores[i][j][e] - lse.x) - low.x;
        x[n++] = (scores[i][j][e + 1] - lse.y) - low.y;
      });
      exponential.apply(x);
      wait_for_exchange();
      for_pairs_of<kFirst, kCount>(scores, [&, n = 0](int i, int j, int e) mutable {
        double2& to = exchange.at(i, j, e);
        double2 both = make_double2(x[n], x[n + 1]);
        scores[i][j][e] = x[n++], scores[i][j][e + 1] = x[n++];
        if (problem.softcap > 0) both.x *= to.x, both.y *= to.y;
        to = both;
      });
    };
    if constexpr (kOverKeys) {
      make.template operator()<0, 4>();
      make.template operator()<4, 4>();
    } else {
      make.template operator()<0, 8>();
    }
    const Dropout dropout(problem, tile.batch, head);
    if (dropout) {
      const unsigned kept = kept_scores<kOverKeys, P::kFragments, P::kTiles>(P::row(), dropout, here);
      shared.kept[P::pair() * kWarpSize + lane()] = kept;
      for_each(scores, [&](double& x, int i, int j, int e) { x = is_kept<P::kTiles>(kept, i, j, e) ? x : 0; });
    }
    arrive_as_warp(&shared.weights_full[P::pair()]);
  }

  __device__ __forceinline__ void first_of_pair() {
    const Exponential exponential;
    const Exchange<kWidth> exchange(shared);
    Result result;
    clear(result);
    for (int number = 0;; ++number) {
      pipeline.filled(slot_of(0, 0));
      const Block block = shared.blocks[number % P::kKeptBlocks];
      if (!block.exists) break;
      typename P::Scores scores;
      clear(scores);
      add_rows(scores, 0, 1);
      make_weights(scores, exchange, exponential, number, block);
      if constexpr (kOverKeys) add_columns(result, scores, 1);
      end_block();
    }
    sync_named(1, P::kMathThreads);  // all have done with the slots
    if constexpr (kOverKeys) store(result, gradients.grad_value, arguments.keep_scale, problem.head_dim_v);
  }

  __device__ __forceinline__ void second_of_pair() {
    const Exchange<kWidth> exchange(shared);
    const bool drops = bool(Dropout(problem, 0, 0));
    Result result;
    clear(result);
    for (int number = 0;; ++number) {
      pipeline.filled(slot_of(0, 0));
      if (!shared.blocks[number % P::kKeptBlocks].exists) break;
      typename P::Scores grads;
      clear(grads);
      add_rows(grads, 1, kOverKeys ? 1 : 2);
      wait(&shared.weights_full[P::pair()], number & 1);
      if (drops) drop_gradients(grads, shared.kept[P::pair() * kWarpSize + lane()], arguments.keep_scale);
      for_pairs_of<0, 2 * P::kFragments * P::kTiles>(grads, [&](int i, int j, int e) {
        const double2 weight = exchange.at(i, j, e), delta = stats(2, number, i, j, e);
        grads[i][j][e] = weight.x * (grads[i][j][e] - delta.x);
        grads[i][j][e + 1] = weight.y * (grads[i][j][e + 1] - delta.y);
      });
      arrive_as_warp(&shared.weights_empty[P::pair()]);
      add_columns(result, grads, 0);
      end_block();
    }
    sync_named(1, P::kMathThreads);  // all have done with the slots
    store(result, kOverKeys ? gradients.grad_key : gradients.grad_query, problem.scale, problem.head_dim);
  }

  __device__ __forceinline__ void run(const WorkTile& of_cta) {
    pipeline.init(of_cta);
    if (threadIdx.x >= P::kMathThreads) {
      reg_dealloc<P::kLoadRegisters>();
      return load_blocks();
    }
    reg_alloc<P::kMathRegisters>();
    for (int tensor = 0; tensor < 2; ++tensor)
      load_tile<P::kRows, kWidth, P::kMathThreads>(shared.tiles[tensor], rows_of(!kOverKeys, tensor, first_head()), row(),
                                                   rows());
    cp_async_commit();
    const int thread = static_cast<int>(threadIdx.x);
    if (!kOverKeys && thread < P::kRows) {
      const int query = row() + thread;
      const RowStats of_row(arguments.space, first_query(tile.head) + query, query < tile.queries);
      shared.stats[0][thread] = of_row.lse, shared.stats[1][thread] = of_row.lse_low, shared.stats[2][thread] = of_row.delta;
    }
    cp_async_wait();
    sync_named(1, P::kMathThreads);
    if (P::is_first_of_pair())
      first_of_pair();
    else
      second_of_pair();
  }
};

template <int kWidth, bool kOverKeys>
__global__ void __launch_bounds__(Pairs<kWidth>::kThreads, 1)
    tile_gradients(const __grid_constant__ BackwardArguments arguments) {
  using P = Pairs<kWidth>;
  const AttentionProblem& problem = arguments.problem;
  const AttentionGradients& gradients = arguments.gradients;
  const TileCoord coord =
      tile_coord(problem, arguments.list, blockIdx.x, kOverKeys, P::kRows, kOverKeys == (problem.visible.right < 0));
  if (problem.query_starts && coord.block == 0) {
    const auto clear_before = [&](int64_t n) {
      const auto rows = [&](const int32_t* starts, int64_t count, int64_t total) {
        return padding_rows(starts, problem.batch, n, count, total);
      };
      if constexpr (kOverKeys) {
        const Rows keys = rows(problem.key_starts, problem.keys, problem.total_keys);
        clear_rows(gradients.grad_key, coord.head, problem.head_dim, keys);
        clear_rows(gradients.grad_value, coord.head, problem.head_dim_v, keys);
      } else {
        clear_rows(gradients.grad_query, coord.head, problem.head_dim,
                   rows(problem.query_starts, problem.queries, problem.total_queries));
      }
    };
    clear_before(coord.sequence);
    if (coord.sequence == problem.batch - 1) clear_before(problem.batch);
  }
  const WorkTile tile(problem, coord);  // of keys, its head is one of kv_grad_heads
  if (tile.block < 0 || tile.block * P::kRows >= (kOverKeys ? tile.keys : tile.queries)) return;
#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)  // in code for another GPU it is empty, and never launched
  extern __shared__ __align__(16) double shared[];
  TileGradients<kWidth, kOverKeys>{.arguments = arguments, .shared = *reinterpret_cast<typename P::Shared*>(shared)}.run(tile);
#endif
}

}  // namespace flash_online::cuda::float64
