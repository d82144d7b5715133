// Attention over cached keys on the CPU, for few queries per sequence. Keys and values are read in place, page by page, and
// once for all queries of the heads that share them. Vectors run along the head dim. A query's arithmetic follows the order of
// the keys, so that its result depends neither on other queries nor on the addresses of pages.
//
// A work item is some queries of one sequence and key head, over one kv_split of its keys (FlashDecoding: kv_splits run in
// parallel and are merged afterwards). The kv_splits of a sequence depend on its own length alone.
#include "../../core/cache.h"
#include "../kernels.h"
#include "work_items.h"

namespace flash_online::cpu::FLASH_ONLINE_ISA {
namespace {

constexpr int64_t kRows = 8;  // queries of an item: their states and outputs stay in the L1 cache
constexpr int64_t kBlock = 16;  // keys at a time; a key's index fixes the lane of the sum that its weight is added to
constexpr int64_t kKeysPerKvSplit = 512, kMaxKvSplits = 64;  // where the kernel chooses
// The number of keys in one sum of weights and values; the sums are then added up, see add_partial
constexpr int64_t kKeysPerSum = 512;
constexpr int64_t kManyRows = 16;  // a sequence with more queries per key head fills the machine without kv_splits

// The lanes of kLanes vectors are added up in steps. Each adds neighbours, and their sums are neighbours in the next step:
// first inside of 16 bytes, then whole 16 bytes, since such shuffles are the cheapest. After every step there are half as many
// vectors; the last one has a sum in each lane.
template <class A>
constexpr int kPart = 16 / static_cast<int>(sizeof(A));

// One step for the first `count` of n vectors; the sums are in the first half of these.
template <class A, int n, int count, size_t... Lane>
FLASH_ONLINE_INLINE void add_neighbours(Vector<A>* v, std::index_sequence<Lane...>) {
  constexpr int lanes = kLanes<A>, part = kPart<A>, parts = lanes / part;
  // The lane of two vectors side by side that moves to `lane`: those with an even index, or an odd one.
  constexpr auto from = [](int lane, int odd) {
    const int at = lane / part, i = lane % part;
    if constexpr (n * part > lanes) return (i < part / 2 ? 0 : lanes - part) + at * part + 2 * i + odd;
    return ((at < parts / 2 ? 0 : parts) + (2 * at + odd) % parts) * part + i;
  };
  for (int i = 0; i < count / 2; ++i)
    v[i] = __builtin_shufflevector(v[2 * i], v[2 * i + 1], from(Lane, 0)...) +
           __builtin_shufflevector(v[2 * i], v[2 * i + 1], from(Lane, 1)...);
}

// Steps that leave `left` of `count` vectors.
template <class A, int n, int count, int left>
FLASH_ONLINE_INLINE void add_lanes(Vector<A>* v) {
  if constexpr (count > left) {
    add_neighbours<A, n, count>(v, std::make_index_sequence<kLanes<A>>());
    add_lanes<A, n / 2, count / 2, left>(v);
  }
}

// The items of a call, sequence by sequence. If a sequence is cut into several kv_splits, each of its queries has a partial
// result per kv_split.
struct CachedItems {
  int64_t *first_item, *first_partial;  // [batch + 1]

  CachedItems(const AttentionProblem& call, ScratchAllocator& allocator) {
    first_item = allocator.take<int64_t>(call.batch + 1);
    first_partial = allocator.take<int64_t>(call.batch + 1);
  }

  static int64_t kv_splits_of(const AttentionProblem& call, const Sequence& sequence) {
    if (call.cache.kv_splits > 0) return flash_online::kv_splits_of(sequence.keys.count, call.cache.kv_splits);
    const bool many_rows = call.heads / call.key_heads * sequence.queries.count > kManyRows;
    return flash_online::kv_splits_of(sequence.keys.count, many_rows ? 1 : kMaxKvSplits, kKeysPerKvSplit);
  }
  static int64_t tiles_of(const AttentionProblem& call, const Sequence& sequence) {
    return ceil_div(call.heads / call.key_heads * sequence.queries.count, kRows);
  }

  // Numbers the items; returns the number of partial results, which cached_memory needs as well.
  template <class Set>
  static int64_t count(const AttentionProblem& call, const Set& set) {
    int64_t items = 0, partials = 0;
    for (int64_t n = 0; n < call.batch; ++n) {
      set(n, items, partials);
      const Sequence sequence = cached_sequence(call, n);
      const int64_t kv_splits = kv_splits_of(call, sequence);
      items += call.key_heads * tiles_of(call, sequence) * kv_splits;
      partials += kv_splits > 1 ? call.heads * sequence.queries.count * kv_splits : 0;
    }
    set(call.batch, items, partials);
    return partials;
  }
};

// The type of a row's maximum, which is the type of the widest scores.
template <class E>
using Maximum = std::conditional_t<sizeof(E) == 2, float, double>;
template <class E>
using CachedState = OnlineSoftmax<Accumulator<E>, FastNatural, Maximum<E>>;

// A query of an item, and its keys.
struct Row {
  int64_t head, query;
  int64_t begin, end;  // the keys that the query sees
};

template <class E>
struct CachedScratch {
  using A = Accumulator<E>;
  Row* rows;  // [kRows]
  A* query;  // [kRows, padded(head_dim)]
  A* weights;  // [kRows, kBlock]: scores, then weights
  Maximum<E>* max;  // [kRows]
  A* sum;  // [kRows, kLanes]
  A* out;  // [kRows, padded(head_dim_v)]
  // The sums over the keys before the keys of `out` and `sum`, and their rounding errors; of the same shapes
  A *out_total, *out_low, *sum_total, *sum_low;
  A *key, *value;  // [kBlock, padded]: copies of what cannot be read in place
  std::byte* zeros;

  CachedScratch(const AttentionProblem& problem, ScratchAllocator& allocator) {
    const int64_t width = padded(problem.head_dim), width_v = padded(problem.head_dim_v);
    rows = allocator.take<Row>(kRows);
    query = allocator.take<A>(kRows * width);
    weights = allocator.take<A>(kRows * kBlock);
    max = allocator.take<Maximum<E>>(kRows);
    sum = allocator.take<A>(kRows * padded(1));
    for (A** data : {&out, &out_total, &out_low}) *data = allocator.take<A>(kRows * width_v);
    for (A** data : {&sum_total, &sum_low}) *data = allocator.take<A>(kRows * padded(1));
    key = allocator.take<A>(kBlock * width);
    value = allocator.take<A>(kBlock * width_v);
    zeros = allocator.take<std::byte>(sizeof(A) * std::max(width, width_v));
  }
};

// Pointers to the rows of a block of keys or values: in the pool, in a copy, or zeros.
template <class K>
struct BlockRows {
  const K* row[kBlock];
};

// scores[r][k] = query r . key k, for kCount queries.
template <int kCount, class K, class A>
FLASH_ONLINE_INLINE void multiply_keys(const A* query, int64_t pitch, int64_t columns, const BlockRows<K>& keys, A* scores) {
  constexpr int kAtOnce = kCount == 1 ? kLanes<A> : std::min(kLanes<A>, kVectorBytes == 64 ? 4 : 2);
  // The steps inside of 16 bytes are done at once, and leave fewer vectors than keys: registers would not hold all.
  constexpr int kLeft = std::max(kAtOnce / kPart<A>, 1), kVectors = kLanes<A> / kAtOnce * kLeft;
  for (int64_t first = 0; first < kBlock; first += kLanes<A>) {
    Vector<A> dot[kCount][kVectors];
    for (int first_lane = 0; first_lane < kLanes<A>; first_lane += kAtOnce) {
      Vector<A> sum[kCount][kAtOnce] = {};
      for (int64_t e = 0; e < columns; e += kLanes<A>) {
        Vector<A> q[kCount];
        for (int r = 0; r < kCount; ++r) q[r] = load_vector(query + r * pitch + e);
        for (int k = 0; k < kAtOnce; ++k) {
          const Vector<A> x = load_widened(keys.row[first + first_lane + k] + e);
          for (int r = 0; r < kCount; ++r) sum[r][k] += q[r] * x;
        }
      }
      for (int r = 0; r < kCount; ++r) {
        add_lanes<A, kLanes<A>, kAtOnce, kLeft>(sum[r]);
        for (int i = 0; i < kLeft; ++i) dot[r][first_lane / kAtOnce * kLeft + i] = sum[r][i];
      }
    }
    for (int r = 0; r < kCount; ++r) {
      add_lanes<A, kVectors, kVectors, 1>(dot[r]);
      store_vector(scores + r * kBlock + first, dot[r][0]);
    }
  }
}

// out[r] += sum of weights[r][k] value k over keys [begin, end) of the block, for kCount queries. The sum follows the order of
// the keys and is added to out at its end.
template <int kCount, class K, class A>
FLASH_ONLINE_INLINE void multiply_values(const A* weights, const BlockRows<K>& values, int64_t begin, int64_t end,
                                         int64_t pitch, int64_t columns, A* out) {
  // Vectors at a time. Each addition waits for the previous key's, so as many sums run in parallel as registers allow.
  constexpr int kColumns = (kVectorBytes == 64 ? 8 : 4) / kCount;
  int64_t e = 0;
  const auto some_columns = [&]<int n>(std::integral_constant<int, n>) FLASH_ONLINE_LAMBDA_INLINE {
    Vector<A> sum[kCount][n] = {};
    for (int64_t k = begin; k < end; ++k) {
      Vector<A> x[n];
      for (int c = 0; c < n; ++c) x[c] = load_widened(values.row[k] + e + c * kLanes<A>);
      for (int r = 0; r < kCount; ++r) {
        const Vector<A> weight = broadcast_from(weights + r * kBlock + k);
        for (int c = 0; c < n; ++c) sum[r][c] += weight * x[c];
      }
    }
    for (int r = 0; r < kCount; ++r)
      for (int c = 0; c < n; ++c) {
        A* const to = out + r * pitch + e + c * kLanes<A>;
        store_vector(to, load_vector(to) + sum[r][c]);
      }
    e += n * kLanes<A>;
  };
  while (e + kColumns * kLanes<A> <= columns) some_columns(std::integral_constant<int, kColumns>());
  while (e < columns) some_columns(std::integral_constant<int, 1>());
}

// Calls f<count>(first) for the rows in groups of four, two and one.
template <class F>
FLASH_ONLINE_INLINE void in_groups(int64_t rows, const F& f) {
  int64_t r = 0;
  for (; r + 4 <= rows; r += 4) f(std::integral_constant<int, 4>(), r);
  if (r + 2 <= rows) f(std::integral_constant<int, 2>(), r), r += 2;
  if (r < rows) f(std::integral_constant<int, 1>(), r);
}

// An item without its index: `rows` queries of a sequence over its keys [begin, end), counted from the first key that may be
// seen.
struct CachedItem {
  Sequence sequence;
  int64_t n, key_head, rows, begin, end;
};

// What a mask or spans say about a block of keys, to each row of an item.
template <class A>
struct BlockMask {
  const std::byte* row[kRows];  // the mask of each row, from the sequence's first key on; null: there is none
  const int32_t* spans[kRows];  // of each row; null: there are none
  uint32_t seen[kRows];  // bit k: whether the row sees key k of the block, by its position, the mask and spans
  uint32_t seen_by_any;
  const A* bias[kRows];  // what a float mask adds to the row's scores; rows with the same mask share it. Null: a bool mask
  A values[kRows][kBlock];

  void find(const AttentionProblem& problem, const CachedItem& item, const Row* rows) {
    const int64_t (&stride)[4] = problem.mask.stride;
    const SpanView& view = problem.query_spans;
    for (int64_t r = 0; r < item.rows; ++r) {
      const int64_t at = item.n * stride[0] + rows[r].head * stride[1] + rows[r].query * stride[2];
      row[r] =
          problem.mask.data ? static_cast<const std::byte*>(problem.mask.data) + at * size_of(problem.mask_dtype) : nullptr;
      spans[r] = view.data ? view.data + item.n * view.stride[0] + rows[r].head * view.stride[1] +
                                 (item.sequence.queries.begin + rows[r].query) * view.stride[2]
                           : nullptr;
      bias[r] = nullptr;
    }
  }
};

// The part of one row of an item.
template <class A>
struct RowMask {
  uint32_t seen;
  const A* bias;
};
struct NoMask {};  // in calls without a mask

// The places of a block's keys: row row[k] of block block[k] of the pool, or nowhere if block[k] is -1.
struct BlockPlaces {
  int64_t block[kBlock], row[kBlock];
};

// Finds the places of keys [first, first + kBlock) of an item; keys outside of the item are nowhere.
inline BlockPlaces find_places(const CacheView& cache, const CachedItem& item, int64_t first) {
  BlockPlaces places;
  std::fill_n(places.block, kBlock, int64_t{-1});
  const int64_t begin = std::max(item.begin, first), end = std::min(item.end, first + kBlock);
  if (begin >= end) return places;
  const int64_t place = item.sequence.keys.begin + begin;
  int64_t entry = place / cache.page, row = place - entry * cache.page, block = block_of(cache, item.n, entry);
  for (int64_t key = begin; key < end; ++key, ++row) {
    if (row == cache.page) row = 0, block = block_of(cache, item.n, ++entry);
    places.block[key - first] = block;
    places.row[key - first] = row;
  }
  return places;
}

// Finds the rows of keys (or values) at these places: in the pool, or in `copy` if not read in place; zeros for nowhere.
template <class C, class K, bool kInPlace, class A>
void find_rows(const ConstView4& view, int64_t key_head, const BlockPlaces& places, int64_t head_dim, const std::byte* zeros,
               A* copy, BlockRows<K>& to) {
  const C* const head = static_cast<const C*>(view.data) + key_head * view.stride[1];
  for (int64_t k = 0; k < kBlock; ++k) {
    to.row[k] = reinterpret_cast<const K*>(zeros);
    if (places.block[k] < 0) continue;
    const C* const row = head + places.block[k] * view.stride[0] + places.row[k] * view.stride[2];
    if constexpr (kInPlace) {
      to.row[k] = row;
    } else {
      A* const own = copy + k * padded(head_dim);
      load_rows<C>(Matrix<const C>{row, view.stride[2], view.stride[3]}, 1, head_dim, own, 1, padded(head_dim));
      to.row[k] = own;
    }
  }
}

// Prefetches rows: a block is too short for the hardware prefetcher to notice that rows follow one another. They go to the L2
// cache, as that has more loads under way than the L1 cache: up to 1.37 times the speed from memory on an AMD EPYC.
template <class K>
FLASH_ONLINE_INLINE void prefetch(const BlockRows<K>& rows, int64_t columns) {
  constexpr int64_t kLine = 64 / sizeof(K);
  for (int64_t k = 0; k < kBlock; ++k)
    for (int64_t e = 0; e < columns; e += kLine) __builtin_prefetch(rows.row[k] + e, 0, 2);
}

// Returns whether any of the keys [first, first + lanes) is hidden from a query.
FLASH_ONLINE_INLINE bool has_hidden(const Row& row, int64_t first, int64_t lanes) {
  return first < row.begin || first + lanes > row.end;
}
FLASH_ONLINE_INLINE bool is_seen(const Row& row, int64_t key) { return row.begin <= key && key < row.end; }

// Returns the bits of the keys [first, first + kBlock) that a row sees by its position.
inline uint32_t seen_by_position(const Row& row, int64_t first) {
  const int64_t begin = std::clamp(row.begin - first, int64_t{0}, kBlock), end = std::clamp(row.end - first, begin, kBlock);
  return (uint32_t{1} << end) - (uint32_t{1} << begin);
}

// Returns the bits of the keys that a bool mask shows, of `count` keys from `mask` on.
inline uint32_t read_bool_mask(const uint8_t* mask, int64_t stride, int64_t count) {
  if (stride == 1) return static_cast<uint32_t>(bits_of_bytes(mask, count));
  uint32_t bits = 0;
  for (int64_t k = 0; k < count; ++k) bits |= static_cast<uint32_t>(mask[k * stride] != 0) << k;
  return bits;
}

// Loads a float mask's values for `count` keys from `mask` on; returns the bits of the keys that it does not hide by -inf.
template <class M, class A>
uint32_t read_float_mask(const M* mask, int64_t stride, int64_t count, A* bias) {
  uint32_t bits = 0;
  if constexpr (std::is_same_v<Accumulator<M>, A> && std::is_same_v<A, float>)
    if (stride == 1 && count == kBlock) {
      for (int64_t l = 0; l < kBlock; l += kLanes<A>) {
        const Vector<A> x = load_widened(mask + l);
        store_vector(bias + l, x);
        bits |= lane_bits(x != lowest<Vector<A>>()) << l;
      }
      return bits;
    }
  for (int64_t k = 0; k < kBlock; ++k) {
    bias[k] = k < count ? static_cast<A>(widen(mask[k * stride])) : lowest<A>();
    bits |= static_cast<uint32_t>(bias[k] != lowest<A>()) << k;
  }
  return bits;
}

// Loads the mask, or the spans, of keys [first, first + kBlock) for the rows of an item; returns whether any of them sees any
// of the keys.
template <class A>
__attribute__((noinline)) bool load_block_mask(const AttentionProblem& problem, const CachedItem& item, const Row* rows,
                                               int64_t first, BlockMask<A>& mask) {
  const int64_t count = std::min(kBlock, item.end - first), stride = problem.mask.stride[3];
  uint32_t shown = ~uint32_t{0};
  mask.seen_by_any = 0;
  for (int64_t r = 0; r < item.rows; ++r) {
    if (!mask.row[r] || (r > 0 && mask.row[r] == mask.row[r - 1]))
      mask.bias[r] = r > 0 ? mask.bias[r - 1] : nullptr;
    else if (problem.mask_dtype == DType::kBool)
      shown = read_bool_mask(reinterpret_cast<const uint8_t*>(mask.row[r]) + first * stride, stride, count);
    else
      visit_floating<Float16, BFloat16>(problem.mask_dtype, [&]<class M>(Type<M>) {
        shown = read_float_mask(reinterpret_cast<const M*>(mask.row[r]) + first * stride, stride, count, mask.values[r]);
        mask.bias[r] = mask.values[r];
      });
    mask.seen[r] = shown & seen_by_position(rows[r], first);
    // Spans count from the cache's first key, which may be left of those that can be seen.
    if (mask.spans[r])
      mask.seen[r] &=
          static_cast<uint32_t>(bits_of_spans(problem.query_spans, mask.spans[r], item.sequence.keys.begin + first));
    mask.seen_by_any |= mask.seen[r];
  }
  return mask.seen_by_any != 0;
}

// Turns the products of a block into scores: scale, score modification, float mask; -inf for keys that the query does not see.
// Score is the accumulator's type A, or wider.
template <class A, class Score, class Mask>
FLASH_ONLINE_INLINE void make_scores(const AttentionProblem& problem, const CachedItem& item, const Row& row, int64_t first,
                                     const Mask& mask, Score scale, Score* score) {
  for (int64_t l = 0; l < kBlock; l += kLanes<Score>) {
    Vector<Score> x = load_vector(score + l) * scale;
    if constexpr (!std::is_same_v<A, Score>) x = as_float_overflows(x);
    ScoreMod::for_each<A, Score>(problem, item.n, row.head, [&]<class One>(const One& modification) {
      Vector<Score> distance{};
      if constexpr (One::kNeedsDistance)
        for (int i = 0; i < kLanes<Score>; ++i)
          distance[i] = static_cast<Score>(std::abs(row.query + item.sequence.visible.offset - (first + l + i)));
      x = modification(x, distance).value;
    });
    if constexpr (std::is_same_v<Mask, NoMask>) {
      if (has_hidden(row, first + l, kLanes<Score>))
        for (int i = 0; i < kLanes<Score>; ++i)
          if (!is_seen(row, first + l + i)) x[i] = lowest<Score>();
    } else {
      if (mask.bias) {
        if constexpr (std::is_same_v<A, Score>)
          x += load_vector(mask.bias + l);
        else
          for (int i = 0; i < kLanes<Score>; ++i) x[i] += mask.bias[l + i];
      }
      x = hide<Score>(x, mask.seen >> l);
    }
    store_vector(score + l, x);
  }
}

template <class Score>
FLASH_ONLINE_INLINE Score largest_of(const Score* score) {
  Vector<Score> largest = broadcast(lowest<Score>());
  for (int64_t l = 0; l < kBlock; l += kLanes<Score>) largest = maximum(largest, load_vector(score + l));
  return reduce(largest, [](auto a, auto b) __attribute__((always_inline)) { return maximum(a, b); });
}

// Calls f(sum, total, low, count) for the sums of row r of an item: the kLanes sums of its weights, and its output.
template <class E, class F>
FLASH_ONLINE_INLINE void for_each_sum(const CachedScratch<E>& tile, int64_t r, int64_t pitch_v, const F& f) {
  const int64_t lanes = r * padded(1), row = r * pitch_v;
  f(tile.sum + lanes, tile.sum_total + lanes, tile.sum_low + lanes, kLanes<Accumulator<E>>);
  f(tile.out + row, tile.out_total + row, tile.out_low + row, pitch_v);
}

// Turns the scores of a block into weights and adds them to the query's state. `sum` holds kLanes sums; rescale(factor) moves
// them and the output to another maximum. If the maximum comes from scores in double and is no float, all differences from it
// are taken in double from then on.
template <class A, class Score, class Max, class Rescale>
FLASH_ONLINE_INLINE void absorb_scores(const Score* score, A* weights, Max& max, A* sum, const Rescale& rescale) {
  const Max block_max = largest_of(score);
  if (block_max > max) {
    rescale(broadcast(OnlineSoftmax<A, FastNatural, Max>::rescale(max, block_max)));
    max = block_max;
  }
  Softmax<Vector<A>> state{broadcast(static_cast<A>(max)), load_vector(sum)};
  const bool is_double = !std::is_same_v<A, Score> || Max(static_cast<A>(max)) != max;
  for (int64_t l = 0; l < kBlock; l += kLanes<A>) {
    Vector<A> weight;
    if constexpr (std::is_same_v<A, Score>)
      if (!is_double) weight = state.weight(load_vector(score + l));
    if (is_double) {
      for (int i = 0; i < kLanes<A>; ++i) weight[i] = static_cast<A>(score[l + i] - pivot(max));
      weight = FastNatural::exp(weight);
    }
    state.add(weight);
    store_vector(weights + l, weight);
  }
  store_vector(sum, state.sum);
}

// Returns whether a product that the query sees, the keys of the bits `seen`, is infinite in float, scaled or not.
inline bool any_overflows(uint32_t seen, const float* product, float scale) {
  for (int64_t k = 0; k < kBlock; ++k)
    if (std::abs(product[k] * scale) == -lowest<float>() && (seen >> k & 1)) return true;
  return false;
}

// Large scores of float inputs are computed again in double, since the exponential turns the absolute error of a score, which
// grows with the score, into the relative error of a weight. The decision is per query, by the keys that it sees. `product`
// holds the products of a block, `scores` the scores made of them: -inf for keys that the query does not see. Under a mask the
// largest score decides, not any large one: keys that are hidden by large negative numbers have no weight.
template <class Mask>
FLASH_ONLINE_INLINE bool needs_double(const Row& row, int64_t first, const Mask& mask, const float* product,
                                      const float* scores, float scale, float max) {
  // kNegligible: the logarithm of a negligible weight, whatever rounding did to a score; see compute_scores
  constexpr float kLarge = 5, kLargeMasked = 8, kNegligible = -9.2f, kRoundingOfScore = 0x1p-10f;
  constexpr bool kMasked = !std::is_same_v<Mask, NoMask>;
  const float infinity = -lowest<float>();
  const auto magnitude = [](Vector<float> x) __attribute__((always_inline)) { return x < 0 ? -x : x; };
  Vector<float> largest = {};
  for (int64_t l = 0; l < kBlock; l += kLanes<float>) {
    const Vector<float> scaled = magnitude(load_vector(product + l) * scale), score = magnitude(load_vector(scores + l));
    const Vector<float> larger = kMasked ? scaled : scaled > score ? scaled : score;
    largest = maximum(largest, scaled < infinity && score < infinity ? larger : Vector<float>{});
  }
  const float of_all = reduce(largest, [](auto a, auto b) __attribute__((always_inline)) { return maximum(a, b); });
  const float rounding = kRoundingOfScore * maximum(of_all, std::abs(max));
  const float top = largest_of(scores), top_size = kMasked && std::abs(top) < infinity ? std::abs(top) : 0;
  if ((of_all > kLarge || top_size > kLargeMasked) && top > max + kNegligible - rounding) return true;
  // Unless other scores are among the largest floats, a score of -inf has weight 0, whether it overflowed or not.
  constexpr float kMayOverflow = 0x1p100f;
  if (std::abs(top) < infinity && of_all <= kMayOverflow && top_size <= kMayOverflow) return false;
  if constexpr (kMasked) return any_overflows(mask.seen, product, scale);
  return any_overflows(seen_by_position(row, first), product, scale);
}

// query . key k, in double.
template <class K>
void multiply_keys_in_double(const float* query, int64_t columns, const BlockRows<K>& keys, double* products) {
  constexpr int n = kLanes<double>;
  typedef float Half __attribute__((vector_size(kVectorBytes / 2), aligned(4), may_alias));
  const auto load = [](const float* from) {
    return __builtin_convertvector(*reinterpret_cast<const Half*>(from), Vector<double>);
  };
  for (int64_t k = 0; k < kBlock; ++k) {
    Vector<double> sum = {};
    for (int64_t e = 0; e < columns; e += n) sum += load(query + e) * load(keys.row[k] + e);
    products[k] = sum_of_lanes<double>(sum);
  }
}

// Computes the weights of a block for row r of an item from its products.
template <class E, class K, class Mask>
FLASH_ONLINE_INLINE void absorb_block(const AttentionProblem& problem, const CachedItem& item, const CachedScratch<E>& tile,
                                      int64_t r, int64_t first, const Mask& mask, const BlockRows<K>& keys, int64_t columns,
                                      double scale, bool has_totals) {
  using A = Accumulator<E>;
  const int64_t pitch = padded(problem.head_dim), pitch_v = padded(problem.head_dim_v);
  const Row& row = tile.rows[r];
  A* const weights = tile.weights + r * kBlock;
  Maximum<E>& max = tile.max[r];
  A* const sum = tile.sum + r * padded(1);
  const auto rescale = [&](Vector<A> factor) FLASH_ONLINE_LAMBDA_INLINE {
    for_each_sum(tile, r, pitch_v, [&](A* sums, A* total, A* low, int64_t count) FLASH_ONLINE_LAMBDA_INLINE {
      for (int64_t i = 0; i < count; i += kLanes<A>) store_vector(sums + i, load_vector(sums + i) * factor);
      for (int64_t i = 0; has_totals && i < count; i += kLanes<A>) {
        store_vector(total + i, load_vector(total + i) * factor);
        store_vector(low + i, load_vector(low + i) * factor);
      }
    });
  };
  if constexpr (std::is_same_v<E, float>) {
    float product[kBlock];
    std::copy_n(weights, kBlock, product);
    make_scores<A>(problem, item, row, first, mask, static_cast<A>(scale), weights);
    if (needs_double(row, first, mask, product, weights, static_cast<A>(scale), static_cast<A>(max))) {
      double score[kBlock];
      multiply_keys_in_double(tile.query + r * pitch, columns, keys, score);
      make_scores<A>(problem, item, row, first, mask, scale, score);
      return absorb_scores<A, double>(score, weights, max, sum, rescale);
    }
  } else {
    make_scores<A>(problem, item, row, first, mask, static_cast<A>(scale), weights);
  }
  absorb_scores<A, A>(weights, weights, max, sum, rescale);
}

// Adds an item's keys to the states and outputs of its rows. C is the element type of the cache.
template <class E, class C, bool kInPlace, bool kMasked = false>
void absorb_keys(const AttentionProblem& problem, const CachedItem& item, const CachedScratch<E>& tile) {
  using A = Accumulator<E>;
  using K = std::conditional_t<kInPlace, C, A>;
  const CacheView& cache = problem.cache;
  const int64_t pitch = padded(problem.head_dim), pitch_v = padded(problem.head_dim_v);
  const int64_t columns = kInPlace ? problem.head_dim : pitch, columns_v = kInPlace ? problem.head_dim_v : pitch_v;
  const double scale = problem.scale * scale_of(cache.key_scale, cache.key_scale_stride, item.n, item.key_head);
  int64_t begin = item.end, end = item.begin;
  KeyRange common{item.begin, item.end};  // the keys that every row sees
  for (int64_t r = 0; r < item.rows; ++r) {
    const Row& row = tile.rows[r];
    begin = std::min(begin, row.begin), end = std::max(end, row.end);
    common = {std::max(common.begin, row.begin), std::min(common.end, row.end)};
  }
  begin = std::max(begin, item.begin), end = std::min(end, item.end);
  const auto find_keys = [&](const BlockPlaces& places, BlockRows<K>& rows) {
    find_rows<C, K, kInPlace>(problem.key, item.key_head, places, problem.head_dim, tile.zeros, tile.key, rows);
  };
  const int64_t first_block = begin / kBlock * kBlock;
  BlockPlaces places = find_places(cache, item, first_block);
  BlockRows<K> keys, values;
  if (first_block < end) find_keys(places, keys);
  [[maybe_unused]] std::conditional_t<kMasked, BlockMask<A>, NoMask> mask = {};
  if constexpr (kMasked) mask.find(problem, item, tile.rows);
  const auto mask_of = [&]([[maybe_unused]] int64_t r) FLASH_ONLINE_LAMBDA_INLINE {
    if constexpr (kMasked)
      return RowMask<A>{mask.seen[r], mask.bias[r]};
    else
      return NoMask();
  };
  bool has_totals = false;
  const auto end_sums = [&] {
    for (int64_t r = 0; r < item.rows; ++r)
      for_each_sum(tile, r, pitch_v, [&](A* sums, A* total, A* low, int64_t count) {
        if (!has_totals) std::fill_n(total, count, A(0)), std::fill_n(low, count, A(0));
        add_partials(total, low, sums, count);
        std::fill_n(sums, count, A(0));
      });
    has_totals = true;
  };
  for (int64_t first = first_block; first < end; first += kBlock) {
    if (first % kKeysPerSum == 0 && first > first_block) end_sums();
    if constexpr (kMasked)
      if (!load_block_mask(problem, item, tile.rows, first, mask)) {
        places = find_places(cache, item, first + kBlock);
        find_keys(places, keys);
        continue;
      }
    const auto find_values = [&] {
      find_rows<C, K, kInPlace>(problem.value, item.key_head, places, problem.head_dim_v, tile.zeros, tile.value, values);
      if constexpr (kMasked)
        for (int64_t k = 0; k < kBlock; ++k)
          if (!(mask.seen_by_any >> k & 1)) values.row[k] = reinterpret_cast<const K*>(tile.zeros);
    };
    if constexpr (kInPlace) {
      find_values();
      prefetch(values, columns_v);
    }
    in_groups(item.rows, [&](auto count, int64_t r) FLASH_ONLINE_LAMBDA_INLINE {
      multiply_keys<count()>(tile.query + r * pitch, pitch, columns, keys, tile.weights + r * kBlock);
    });
    for (int64_t r = 0; r < item.rows; ++r)
      absorb_block<E>(problem, item, tile, r, first, mask_of(r), keys, columns, scale, has_totals);
    if constexpr (!kInPlace) find_values();
    places = find_places(cache, item, first + kBlock);
    find_keys(places, keys);
    if constexpr (kInPlace) prefetch(keys, columns);
    // A hidden value must not be multiplied by its weight of 0, since it may be NaN.
    const auto multiply = [&](auto count, int64_t r) FLASH_ONLINE_LAMBDA_INLINE {
      const int64_t from = std::clamp(std::max(tile.rows[r].begin, item.begin) - first, int64_t{0}, kBlock),
                    to = std::clamp(std::min(tile.rows[r].end, item.end) - first, int64_t{0}, kBlock);
      multiply_values<count()>(tile.weights + r * kBlock, values, from, to, pitch_v, columns_v, tile.out + r * pitch_v);
    };
    if (first < common.begin || first + kBlock > common.end)
      for (int64_t r = 0; r < item.rows; ++r) multiply(std::integral_constant<int, 1>(), r);
    else
      in_groups(item.rows, multiply);
  }
  if (!has_totals) return;
  end_sums();
  for (int64_t r = 0; r < item.rows; ++r)
    for_each_sum(tile, r, pitch_v, [](A* sums, A* total, A* low, int64_t count) { join_partials(total, low, sums, count); });
}

// Returns whether whole vectors of a row can be read in place.
template <class E>
bool is_readable_in_place(const ConstView4& view, int64_t head_dim) {
  return view.stride[3] == 1 && head_dim % kLanes<Accumulator<E>> == 0;
}

template <class E>
void absorb_cached_keys(const AttentionProblem& problem, const CachedItem& item, const CachedScratch<E>& tile) {
  const bool masked = problem.mask.data || problem.query_spans.data;
  const auto absorb_float8 = [&]<class C>(Type<C>) {
    masked ? absorb_keys<E, C, false, true>(problem, item, tile) : absorb_keys<E, C, false>(problem, item, tile);
  };
  if (problem.cache.dtype == DType::kFloat8E4M3) return absorb_float8(Type<Float8E4M3>{});
  if (problem.cache.dtype == DType::kFloat8E5M2) return absorb_float8(Type<Float8E5M2>{});
  const bool in_place =
      is_readable_in_place<E>(problem.key, problem.head_dim) && is_readable_in_place<E>(problem.value, problem.head_dim_v);
  if (masked)
    in_place ? absorb_keys<E, E, true, true>(problem, item, tile) : absorb_keys<E, E, false, true>(problem, item, tile);
  else
    in_place ? absorb_keys<E, E, true>(problem, item, tile) : absorb_keys<E, E, false>(problem, item, tile);
}

// The addresses of a query's results.
template <class E>
struct Destination {
  Matrix<E> out;  // one row
  Accumulator<E>* lse;

  Destination(const AttentionProblem& problem, const Sequence& sequence, int64_t n, int64_t head, int64_t query)
      : out(matrix_of<E>(problem.out, problem.query_starts ? 0 : n, head, sequence.queries.begin + query)) {
    const int64_t at =
        (problem.query_starts ? 0 : n * problem.lse_stride[0]) + head * problem.lse_stride[1] + sequence.queries.begin + query;
    lse = problem.lse ? static_cast<Accumulator<E>*>(problem.lse) + at : nullptr;
  }

  // The epilogue: lse, and the output divided by the sum of weights.
  template <class A>
  void store(const CachedState<E>& state, A value_scale, const A* row, int64_t head_dim) const {
    const A factor = state.inverse_sum_or_zero() * value_scale;
    for (int64_t e = 0; e < head_dim; ++e) out.data[e * out.column_stride] = narrow<E>(row[e] * factor);
    // In double, since the rounding of the logarithm adds to the rounding of the sum.
    if (lse) *lse = static_cast<A>(OnlineSoftmax<double, FastNatural>{state.max, state.sum}.lse());
  }
};

// A partial result: the state and output row of a query over one kv_split of the keys, [max, sum, out...]. `max` may take two
// elements.
constexpr int64_t kPartialHead = 3;
constexpr int64_t partial_pitch(int64_t head_dim) { return round_up(head_dim + kPartialHead, 16); }
template <class E>
void store_state(const CachedState<E>& state, Accumulator<E>* partial) {
  std::memcpy(partial, &state.max, sizeof state.max);
  partial[kPartialHead - 1] = state.sum;
}
template <class E>
CachedState<E> load_state(const Accumulator<E>* partial) {
  CachedState<E> state;
  std::memcpy(&state.max, partial, sizeof state.max);
  state.sum = partial[kPartialHead - 1];
  return state;
}

// Runs a work item: computes the states of some queries over one kv_split of their keys, or their results if there is one
// kv_split.
template <class E>
void attend_cached(const AttentionProblem& call, const CachedItems& items, Accumulator<E>* partials, int64_t n, int64_t index,
                   std::byte* scratch) {
  using A = Accumulator<E>;
  ScratchAllocator allocator(scratch);
  const CachedScratch<E> tile(call, allocator);
  CachedItem item{cached_sequence(call, n), n, 0, 0, 0, 0};
  const int64_t kv_splits = CachedItems::kv_splits_of(call, item.sequence), tiles = CachedItems::tiles_of(call, item.sequence),
                group = call.heads / call.key_heads, queries = item.sequence.queries.count;
  // Tiles that read the same keys follow one another.
  const int64_t first_row = index % tiles * kRows, kv_split = index / tiles % kv_splits;
  item.key_head = index / tiles / kv_splits;
  item.rows = std::min(kRows, group * queries - first_row);
  const Rows keys = kv_split_of(item.sequence.keys.count, kv_splits, kv_split);
  item.begin = keys.begin, item.end = keys.begin + keys.count;

  const int64_t pitch = padded(call.head_dim), pitch_v = padded(call.head_dim_v);
  std::fill_n(tile.zeros, sizeof(A) * std::max(pitch, pitch_v), std::byte{});
  std::fill_n(tile.out, item.rows * pitch_v, A(0));
  std::fill_n(tile.sum, item.rows * padded(1), A(0));
  for (int64_t r = 0; r < item.rows; ++r) {
    // The heads of a group are outermost: neighbouring rows see the same keys except for the last ones.
    const int64_t head = item.key_head * group + (first_row + r) / queries, query = (first_row + r) % queries;
    const KeyRange seen = keys_of(item.sequence.visible, query, item.sequence.keys.count);
    tile.rows[r] = {head, query, seen.begin, std::max(seen.begin, seen.end)};
    tile.max[r] = lowest<Maximum<E>>();
    const auto from = matrix_of<const E>(call.query, call.query_starts ? 0 : n, head, item.sequence.queries.begin + query);
    load_rows<E>(from, 1, call.head_dim, tile.query + r * pitch, 1, pitch);
  }
  absorb_cached_keys<E>(call, item, tile);

  const A value_scale = scale_of(call.cache.value_scale, call.cache.value_scale_stride, item.n, item.key_head);
  for (int64_t r = 0; r < item.rows; ++r) {
    const Row& row = tile.rows[r];
    CachedState<E> state{tile.max[r], sum_of_lanes<A>(load_vector(tile.sum + r * padded(1)))};
    A* const out = tile.out + r * pitch_v;
    if (kv_splits > 1) {
      const int64_t partial = items.first_partial[n] + (row.head * queries + row.query) * kv_splits + kv_split;
      A* const to = partials + partial * partial_pitch(call.head_dim_v);
      store_state<E>(state, to);
      std::copy_n(out, call.head_dim_v, to + kPartialHead);
      continue;
    }
    if (call.sinks) {
      const A factor = state.absorb(static_cast<const A*>(call.sinks)[row.head]);
      for (int64_t e = 0; e < call.head_dim_v; ++e) out[e] *= factor;
    }
    Destination<E>(call, item.sequence, n, row.head, row.query).store(state, value_scale, out, call.head_dim_v);
  }
}

// Merges one head of a sequence that was cut into kv_splits: its sink, then the kv_splits in ascending order.
template <class E>
void merge_kv_splits(const AttentionProblem& call, const CachedItems& items, const Accumulator<E>* partials, int64_t n,
                     int64_t head, std::byte* scratch) {
  using A = Accumulator<E>;
  if (items.first_partial[n] == items.first_partial[n + 1]) return;
  ScratchAllocator allocator(scratch);
  const CachedScratch<E> tile(call, allocator);
  const Sequence sequence = cached_sequence(call, n);
  const int64_t kv_splits = CachedItems::kv_splits_of(call, sequence), pitch = partial_pitch(call.head_dim_v);
  const int64_t key_head = head / (call.heads / call.key_heads);
  const A value_scale = scale_of(call.cache.value_scale, call.cache.value_scale_stride, n, key_head);
  const A* partial = partials + (items.first_partial[n] + head * sequence.queries.count * kv_splits) * pitch;
  for (int64_t query = 0; query < sequence.queries.count; ++query) {
    CachedState<E> state;
    if (call.sinks) state.absorb(static_cast<const A*>(call.sinks)[head]);
    std::fill_n(tile.out, call.head_dim_v, A(0));
    for (int64_t kv_split = 0; kv_split < kv_splits; ++kv_split, partial += pitch) {
      const CachedState<E> of_kv_split = load_state<E>(partial);
      const A factor = state.raise_max(of_kv_split.max), share = CachedState<E>::rescale(of_kv_split.max, state.max);
      state.add(of_kv_split.sum * share);
      for (int64_t e = 0; e < call.head_dim_v; ++e) tile.out[e] = tile.out[e] * factor + partial[kPartialHead + e] * share;
    }
    Destination<E>(call, sequence, n, head, query).store(state, value_scale, tile.out, call.head_dim_v);
  }
}

// Sets the results of padding rows, and of queries that a sequence does not use, to 0 and to the lse of an empty row.
template <class E>
void clear_unused(const AttentionProblem& call, int64_t n) {
  using A = Accumulator<E>;
  const auto clear = [&](Rows rows) {
    zero_rows<E>(call.out, call.heads, rows, call.head_dim_v);
    for (int64_t head = 0; call.lse && head < call.heads; ++head)
      std::fill_n(static_cast<A*>(call.lse) + head * call.lse_stride[1] + rows.begin, rows.count, Softmax<A>{}.lse());
  };
  clear(padding_rows(call.query_starts, call.batch, n, call.queries, call.total_queries));
  clear(unused_queries(call, n));
}

}  // namespace

// The most queries of a dense call that this kernel takes from `forward`. Its time grows with the queries; that of `forward`,
// which has them in the lanes, is the same up to 16. The numbers are where this kernel is ahead even with all keys in the
// caches, shared by eight heads; elsewhere it is ahead for longer, as it copies no keys and values. Products of pairs make
// `forward` faster, and those of tiles once more.
template <class E>
constexpr int64_t most_queries(int64_t head_dim) {
#if defined(__AMX_BF16__)
  if (kPaired<Operand<E>>) return 4;
#endif
  return kPaired<Operand<E>> && head_dim <= 64 ? 7 : 8;
}

// The cut follows from the number of keys alone: a row has the same bits whatever other rows there are.
int64_t few_rows_kv_splits(const AttentionProblem& problem) {
  int64_t most = 0;
  visit_floating<Float16, BFloat16>(problem.dtype, [&]<class E>(Type<E>) { most = most_queries<E>(problem.head_dim); });
  constexpr int64_t kLeastKeys = 256;  // it is ahead from 16 on; calls over few keys keep the bits of longer ones
  if (problem.queries > most || problem.keys < kLeastKeys || !has_few_rows(problem)) return 0;
  return flash_online::kv_splits_of(problem.keys, kMaxKvSplits, kKeysPerKvSplit);
}

Memory cached_memory(const AttentionProblem& call) {
  ScratchAllocator scratch(nullptr), shared(nullptr);
  visit_floating<Float16, BFloat16>(call.dtype, [&]<class E>(Type<E>) {
    using A = Accumulator<E>;
    CachedScratch<E>(call, scratch);
    CachedItems(call, shared);
    shared.take<A>(CachedItems::count(call, [](int64_t, int64_t, int64_t) {}) * partial_pitch(call.head_dim_v));
  });
  return {scratch.bytes(), shared.bytes()};
}

void cached(const AttentionProblem& call, const Executor& executor) {
  visit_floating<Float16, BFloat16>(call.dtype, [&]<class E>(Type<E>) {
    using A = Accumulator<E>;
    ScratchAllocator shared(executor.shared);
    const CachedItems items(call, shared);
    const int64_t count = CachedItems::count(
        call, [&](int64_t n, int64_t item, int64_t partial) { items.first_item[n] = item, items.first_partial[n] = partial; });
    A* const partials = shared.take<A>(count * partial_pitch(call.head_dim_v));
    const auto sequence_at = [&](const int64_t* first, int64_t item) {
      return std::upper_bound(first, first + call.batch + 1, item) - first - 1;
    };
    for_each_item(executor, items.first_item[call.batch], [&](int64_t index, std::byte* scratch) {
      const int64_t n = sequence_at(items.first_item, index);
      attend_cached<E>(call, items, partials, n, index - items.first_item[n], scratch);
    });
    if (count > 0)
      for_each_item(executor, call.batch * call.heads, [&](int64_t index, std::byte* scratch) {
        merge_kv_splits<E>(call, items, partials, index / call.heads, index % call.heads, scratch);
      });
    if (call.query_starts) for_each_item(executor, call.batch + 1, [&](int64_t n, std::byte*) { clear_unused<E>(call, n); });
  });
}

}  // namespace flash_online::cpu::FLASH_ONLINE_ISA
