// Visibility by position: which keys a query sees and, for a tile of queries, which blocks of keys matter and which of these
// every query of the tile sees whole. A loop asks once per tile; it then runs the whole blocks without a check, and only the
// blocks at the edge with one.
#pragma once

#include <cstdint>

#include "config.h"
#include "problem.h"

namespace flash_online {

// Keys [begin, end); empty if end <= begin.
struct KeyRange {
  int64_t begin, end;
};

// The keys that the query of index `query` sees.
FLASH_ONLINE_HD KeyRange keys_of(const Visibility& visible, int64_t query, int64_t keys) {
  const int64_t position = query + visible.offset;
  // A bound may be as large as an int64, so it is compared before it is subtracted.
  const int64_t begin = visible.left < 0 || visible.left >= position ? 0 : position - visible.left;
  const int64_t end = visible.right < 0 || visible.right >= keys - position - 1 ? keys : position + visible.right + 1;
  return {begin, end < 0 ? 0 : end};
}

// The keys that a query would see if there were keys before the first and after the last, clamped to [-far, far]. Both bounds
// grow by one with the query: a tile asks once, adds the query's index in the tile, and clamps to [0, keys).
FLASH_ONLINE_HD KeyRange band_of(const Visibility& visible, int64_t query, int64_t far) {
  const int64_t position = query + visible.offset;
  const int64_t begin = visible.left < 0 || visible.left >= position + far ? -far : position - visible.left;
  const int64_t end = visible.right < 0 || visible.right >= far - position - 1 ? far : position + visible.right + 1;
  return {begin > far ? far : begin, end < -far ? -far : end};
}

// The keys that any of the queries [first, last) sees. Both bounds of keys_of grow with the query.
FLASH_ONLINE_HD KeyRange keys_of_any(const Visibility& visible, int64_t first, int64_t last, int64_t keys) {
  return {keys_of(visible, first, keys).begin, keys_of(visible, last - 1, keys).end};
}

// Queries [begin, end); empty if end <= begin.
struct QueryRange {
  int64_t begin, end;
};

// The inverse of keys_of_any: the range of queries that see any of the keys [first, last).
FLASH_ONLINE_HD QueryRange queries_of_any(const Visibility& visible, int64_t first, int64_t last, int64_t queries) {
  const int64_t from = first - visible.offset, to = last - visible.offset;  // The queries at the positions of these keys
  const int64_t begin = visible.right < 0 || visible.right >= from ? 0 : from - visible.right;
  const int64_t end = visible.left < 0 || visible.left >= queries - to ? queries : to + visible.left;
  return {begin, end < 0 ? 0 : end};
}

// The queries that see all of the keys [first, last).
FLASH_ONLINE_HD QueryRange queries_of_all(const Visibility& visible, int64_t first, int64_t last, int64_t queries) {
  // The queries at the positions of the outermost keys
  const int64_t from = first - visible.offset, to = last - visible.offset - 1;
  const int64_t begin = visible.right < 0 || visible.right >= to ? 0 : to - visible.right;
  const int64_t end = visible.left < 0 || visible.left >= queries - from - 1 ? queries : from + visible.left + 1;
  return {begin, end < 0 ? 0 : end};
}

// True if each of the queries [first, last) sees all keys [begin, end).
FLASH_ONLINE_HD bool all_see(const Visibility& visible, int64_t first, int64_t last, int64_t begin, int64_t end, int64_t keys) {
  return keys_of(visible, last - 1, keys).begin <= begin && end <= keys_of(visible, first, keys).end;
}

}  // namespace flash_online
