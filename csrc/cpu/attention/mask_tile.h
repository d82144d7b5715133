// The visible scores of a tile, by position and by the mask, and the values that a float mask adds. They are known before the
// scores, so that a tile without a visible score is never computed.
#pragma once

#include <algorithm>
#include <cstring>

#include "../../core/mask.h"
#include "../../core/visit.h"
#include "layout.h"

namespace flash_online::cpu::FLASH_ONLINE_ISA {

constexpr int64_t kQueries = 64;  // queries per tile, in the lanes of vectors; as many as a word of visibility has bits
constexpr int64_t kKeys = 64;  // keys per block, at most; blocks begin at multiples of kKeyStep
constexpr int64_t kKeyStep = 32;

// Queries [first, first + rows) of a head, in padded(rows) lanes.
struct QueryTile {
  int64_t batch, head, first, rows, lanes;
  QueryTile(int64_t batch, int64_t head, int64_t first, int64_t end)
      : batch(batch), head(head), first(first), rows(end - first), lanes(padded(rows)) {}
  QueryTile(const AttentionProblem& problem, int64_t batch, int64_t head, int64_t first)
      : QueryTile(batch, head, first, std::min(first + kQueries, problem.queries)) {}
  int64_t end() const { return first + rows; }
  // The offset of the first query's lse, in lse and all other arrays with one number per query.
  int64_t lse_offset(const AttentionProblem& problem) const {
    return batch * problem.lse_stride[0] + head * problem.lse_stride[1] + first;
  }
};

template <class A>
struct MaskTile {
  uint64_t* visible;  // [kKeys]: bit i of word k is set where the tile's query i sees key k
  A* bias;  // [kKeys, kQueries], of a float mask
  bool has_hidden = false, has_bias = false;  // whether any bit is 0; whether `bias` is to be added
};

// Transposes a matrix of 64 x 64 bits (Hacker's Delight, section 7-3), with bit 0 as the first column.
inline void transpose_bits(uint64_t (&a)[64]) {
  uint64_t keep = 0x00000000ffffffffu;
  for (int width = 32; width > 0; width /= 2, keep ^= keep << width)
    for (int base = 0; base < 64; base += 2 * width)
      for (int i = base; i < base + width; ++i) {
        const uint64_t moved = ((a[i] >> width) ^ a[i + width]) & keep;
        a[i + width] ^= moved;
        a[i] ^= moved << width;
      }
}

// Sets bit j where byte j of `count` <= 64 bytes is not 0.
FLASH_ONLINE_INLINE uint64_t bits_of_bytes(const uint8_t* bytes, int64_t count) {
#if defined(__AVX512BW__)
  const __mmask64 present = count < 64 ? (uint64_t{1} << count) - 1 : ~uint64_t{0};
  const __m512i x = _mm512_maskz_loadu_epi8(present, bytes);
  return _mm512_test_epi8_mask(x, x);
#else
  uint64_t bits = 0;
  for (int64_t j = 0; j < count; j += 8) {
    uint64_t eight = 0;
    std::memcpy(&eight, bytes + j, static_cast<size_t>(std::min<int64_t>(8, count - j)));
    // Each byte sets its own lowest bit; the multiplication then gathers these bits in the highest byte.
    eight = ((eight & 0x7f7f7f7f7f7f7f7fu) + 0x7f7f7f7f7f7f7f7fu) | eight;
    bits |= (((eight >> 7 & 0x0101010101010101u) * 0x0102040810204080u) >> 56) << j;
  }
  return bits;
#endif
}

// Clears the bits of visible[k] that a bool mask hides, for key begin + k.
inline void read_bool_mask(const AttentionProblem& problem, const QueryTile& query, int64_t begin, int64_t count,
                           uint64_t* visible) {
  const auto from = matrix_of<uint8_t>(problem.mask, query.batch, query.head, query.first);
  const uint8_t* data = from.data + begin * from.column_stride;
  if (from.row_stride == 0) {
    for (int64_t k = 0; k < count; ++k) visible[k] &= data[k * from.column_stride] ? ~uint64_t{0} : 0;
    return;
  }
  for (int64_t first = 0; first < count; first += 64) {
    const int64_t keys = std::min<int64_t>(64, count - first);
    uint64_t word[64] = {};
    for (int64_t i = 0; i < query.rows; ++i) {
      const uint8_t* row = data + i * from.row_stride + first * from.column_stride;
      if (from.column_stride == 1)
        word[i] = bits_of_bytes(row, keys);
      else
        for (int64_t k = 0; k < keys; ++k) word[i] |= static_cast<uint64_t>(row[k * from.column_stride] != 0) << k;
    }
    transpose_bits(word);
    for (int64_t k = 0; k < keys; ++k) visible[first + k] &= word[k];
  }
}

// Bits [begin - first, end - first) of 64.
inline uint64_t bits_between(int64_t begin, int64_t end, int64_t first) {
  const int64_t low = std::clamp<int64_t>(begin - first, 0, 64), high = std::clamp<int64_t>(end - first, 0, 64);
  if (low >= high) return 0;
  const uint64_t below = high == 64 ? ~uint64_t{0} : (uint64_t{1} << high) - 1;
  return below & ~uint64_t{0} << low;
}
// The bits of 64 places from `first` on that lie in a row of spans.
inline uint64_t bits_of_spans(const SpanView& spans, const int32_t* row, int64_t first) {
  const uint64_t bits = bits_between(row[0], row[1], first);
  return spans.intervals == 1 ? bits : bits | bits_between(row[2], row[3], first);
}
inline const int32_t* spans_of(const SpanView& spans, const QueryTile& query, int64_t row) {
  return spans.data + query.batch * spans.stride[0] + query.head * spans.stride[1] + row * spans.stride[2];
}

// What spans say about a tile, by the least and largest bounds of its rows, a tenth of the work of their bits: most tiles of a
// long sequence are hidden or whole.
enum class SpanKind { kMixed, kHidden, kWhole };

// kStride: of the rows, or -1 if it is not known.
template <int kStride>
SpanKind kind_of_interval(const int32_t* row, int64_t stride, int64_t count, int64_t first, int64_t end) {
  if (kStride >= 0) stride = kStride;
  int32_t least_begin = row[0], most_begin = row[0], least_end = row[1], most_end = row[1];
  for (int64_t i = 1; i < count; ++i) {
    const int32_t own_begin = row[i * stride], own_end = row[i * stride + 1];
    least_begin = std::min(least_begin, own_begin), most_begin = std::max(most_begin, own_begin);
    least_end = std::min(least_end, own_end), most_end = std::max(most_end, own_end);
  }
  if (most_end <= first || least_begin >= end) return SpanKind::kHidden;
  return most_begin <= first && least_end >= end ? SpanKind::kWhole : SpanKind::kMixed;
}
// Of `count` rows from `row` on, and places [first, end).
inline SpanKind kind_of_spans(const SpanView& spans, const int32_t* row, int64_t count, int64_t first, int64_t end) {
  const int64_t stride = spans.stride[2];
  bool hidden = true, whole = false;
  for (int n = 0; n < spans.intervals; ++n, row += 2) {
    const SpanKind kind = stride == 0   ? kind_of_interval<0>(row, 0, 1, first, end)
                          : stride == 2 ? kind_of_interval<2>(row, 2, count, first, end)
                          : stride == 4 ? kind_of_interval<4>(row, 4, count, first, end)
                                        : kind_of_interval<-1>(row, stride, count, first, end);
    hidden &= kind == SpanKind::kHidden, whole |= kind == SpanKind::kWhole;
  }
  return hidden ? SpanKind::kHidden : whole ? SpanKind::kWhole : SpanKind::kMixed;
}
inline SpanKind kind_of_spans(const AttentionProblem& problem, const QueryTile& query, int64_t begin, int64_t count) {
  const SpanView &queries = problem.query_spans, &keys = problem.key_spans;
  const SpanKind by_query = !queries.data ? SpanKind::kWhole
                                          : kind_of_spans(queries, spans_of(queries, query, query.first), query.rows, begin,
                                                          begin + count),
                 by_key = !keys.data ? SpanKind::kWhole
                                     : kind_of_spans(keys, spans_of(keys, query, begin), count, query.first, query.end());
  if (by_query == SpanKind::kHidden || by_key == SpanKind::kHidden) return SpanKind::kHidden;
  return by_query == by_key ? by_query : SpanKind::kMixed;
}

// Clears the bits of visible[k] that spans hide, for key begin + k.
inline void read_spans(const AttentionProblem& problem, const QueryTile& query, int64_t begin, int64_t count,
                       uint64_t* visible) {
  if (problem.key_spans.data)
    for (int64_t k = 0; k < count; ++k)
      visible[k] &= bits_of_spans(problem.key_spans, spans_of(problem.key_spans, query, begin + k), query.first);
  if (!problem.query_spans.data) return;
  for (int64_t first = 0; first < count; first += 64) {
    uint64_t word[64] = {};
    for (int64_t i = 0; i < query.rows; ++i)
      word[i] = bits_of_spans(problem.query_spans, spans_of(problem.query_spans, query, query.first + i), begin + first);
    transpose_bits(word);
    for (int64_t k = 0; k < std::min<int64_t>(64, count - first); ++k) visible[first + k] &= word[k];
  }
}

// What the list of blocks says about a tile: `problem.tiles` has a number for each 64 queries and 64 or 128 keys. A block of
// keys may lie in two of these, and so may the queries, as tiles may begin at any query (forward.cpp).
static_assert(kQueries == 64 && kKeys <= 64);
inline bool is_listed(const AttentionProblem& problem, const QueryTile& query, int64_t row, int64_t key) {
  const auto& [data, stride] = problem.tiles;
  return data[query.batch * stride[0] + query.head * stride[1] + row / kQueries * stride[2] +
              key / problem.tile_keys * stride[3]] != 0;
}
inline SpanKind kind_of_list(const AttentionProblem& problem, const QueryTile& query, int64_t begin, int64_t count) {
  const bool first = is_listed(problem, query, query.first, begin);
  for (const int64_t row : {query.first, query.end() - 1})
    for (const int64_t key : {begin, begin + count - 1})
      if (is_listed(problem, query, row, key) != first) return SpanKind::kMixed;
  return first ? SpanKind::kWhole : SpanKind::kHidden;
}
// Clears the bits of visible[k] of the queries for which the tile of key begin + k is not listed.
inline void hide_unlisted(const AttentionProblem& problem, const QueryTile& query, int64_t begin, int64_t count,
                          uint64_t* visible) {
  const int64_t rows = (query.first / kQueries + 1) * kQueries - query.first;  // of the first number
  const uint64_t first_rows = ~uint64_t{0} >> (kQueries - rows);
  for (int64_t k = 0; k < count; ++k) {
    uint64_t shown = is_listed(problem, query, query.first, begin + k) ? first_rows : 0;
    if (rows < query.rows && is_listed(problem, query, query.end() - 1, begin + k)) shown |= ~first_rows;
    visible[k] &= shown;
  }
}

// Returns the bits of the tile's queries that see a key by position. They are neighbours, since both bounds of keys_of grow
// with the query.
inline uint64_t visible_by_position(const Visibility& visible, const QueryTile& query, int64_t key) {
  constexpr int64_t kFar = int64_t{1} << 61;  // a bound may be as large as an int64
  const int64_t position = key - visible.offset - query.first;
  const int64_t low = visible.right < 0 ? 0 : position - std::min(visible.right, kFar);
  const int64_t high = visible.left < 0 ? kQueries : position + std::min(visible.left, kFar) + 1;
  if (low >= kQueries || high <= 0 || low >= high) return 0;
  const uint64_t from_low = ~uint64_t{0} << std::max<int64_t>(low, 0);
  return high >= kQueries ? from_low : from_low & ((uint64_t{1} << high) - 1);
}

// Loads a float mask's values for `count` keys from `from` on.
template <class M, class A>
void load_bias(Matrix<const M> from, const QueryTile& query, int64_t count, A* bias) {
  if (from.row_stride == 0) {
    for (int64_t k = 0; k < count; ++k) {
      const Vector<A> all = broadcast(static_cast<A>(widen(from.data[k * from.column_stride])));
      for (int64_t l = 0; l < query.lanes; l += kLanes<A>) store_vector(bias + k * kQueries + l, all);
    }
    return;
  }
  load_transposed<M>(from, query.rows, count, bias, kQueries);
  // Prefetches the next block: it has too few lines per row for the hardware prefetcher. A 16-bit mask has half as many, and
  // prefetching them gains nothing.
  if (sizeof(M) < 4 || from.column_stride != 1) return;
  for (int64_t i = 0; i < query.rows; ++i)
    for (int64_t k = count; k < count + kKeys; k += kVectorBytes / static_cast<int64_t>(sizeof(M)))
      __builtin_prefetch(from.data + i * from.row_stride + k, 0, 2);
}

// Loads the visibility of keys [begin, begin + count), and a float mask's values; returns false if none is visible.
template <class A>
__attribute__((noinline)) bool load_mask(const AttentionProblem& problem, const QueryTile& query, int64_t begin, int64_t count,
                                         MaskTile<A>& mask) {
  mask.has_hidden = mask.has_bias = false;
  const SpanKind listed = problem.tiles.data ? kind_of_list(problem, query, begin, count) : SpanKind::kWhole;
  if (listed == SpanKind::kHidden) return false;
  const SpanKind spans = problem.has_spans() ? kind_of_spans(problem, query, begin, count) : SpanKind::kWhole;
  if (spans == SpanKind::kHidden) return false;
  const bool all_visible = all_see(problem.visible, query.first, query.end(), begin, begin + count, problem.keys);
  if (all_visible && !problem.mask.data && spans == SpanKind::kWhole && listed == SpanKind::kWhole) return true;
  for (int64_t k = 0; k < count; ++k)
    mask.visible[k] = all_visible ? ~uint64_t{0} : visible_by_position(problem.visible, query, begin + k);
  if (problem.mask.data && problem.mask_dtype == DType::kBool) read_bool_mask(problem, query, begin, count, mask.visible);
  if (spans == SpanKind::kMixed) read_spans(problem, query, begin, count, mask.visible);
  if (listed == SpanKind::kMixed) hide_unlisted(problem, query, begin, count, mask.visible);

  const uint64_t present = query.rows == kQueries ? ~uint64_t{0} : (uint64_t{1} << query.rows) - 1;
  uint64_t any = 0, all = ~uint64_t{0};
  for (int64_t k = 0; k < count; ++k) any |= mask.visible[k], all &= mask.visible[k];
  mask.has_hidden = (all & present) != present;
  if ((any & present) == 0) return false;

  if (problem.mask.data && problem.mask_dtype != DType::kBool) {
    mask.has_bias = true;
    visit_floating<Float16, BFloat16>(problem.mask_dtype, [&]<class M>(Type<M>) {
      auto from = matrix_of<const M>(problem.mask, query.batch, query.head, query.first);
      from.data += begin * from.column_stride;
      load_bias<M>(from, query, count, mask.bias);
    });
    bool hidden = true;
    for (int64_t l = 0; l < query.lanes; l += kLanes<A>)
      for (int64_t k = 0; hidden && k < count; ++k) {
        const Vector<A> x = load_vector(mask.bias + k * kQueries + l);
        for (int i = 0; i < kLanes<A>; ++i) hidden = hidden && (l + i >= query.rows || x[i] == lowest<A>());
      }
    return !hidden;
  }
  return true;
}

// x where the lane's bit is set, else `hidden`.
template <class T>
FLASH_ONLINE_INLINE Vector<T> hide(Vector<T> x, uint64_t bits, Vector<T> hidden = lowest<Vector<T>>()) {
#if defined(__AVX512F__)
  if constexpr (sizeof(T) == 4)
    return reinterpret_cast<Vector<T>>(
        _mm512_mask_mov_ps(reinterpret_cast<__m512>(hidden), static_cast<__mmask16>(bits), reinterpret_cast<__m512>(x)));
  else
    return reinterpret_cast<Vector<T>>(
        _mm512_mask_mov_pd(reinterpret_cast<__m512d>(hidden), static_cast<__mmask8>(bits), reinterpret_cast<__m512d>(x)));
#else
  using Bits = Vector<std::conditional_t<sizeof(T) == 8, int64_t, int32_t>>;
  Bits bit;
  for (int l = 0; l < kLanes<T>; ++l) bit[l] = 1 << l;
  return (bit & static_cast<int32_t>(bits & 0xffff)) != 0 ? x : hidden;
#endif
}

}  // namespace flash_online::cpu::FLASH_ONLINE_ISA
