"""Cached keys in plain torch: the part of `reference` that appends to caches and gathers the keys of a sequence from them.
`reference` exports its public functions.

The host reads lengths, tables and starts here, and processes one sequence at a time. A contiguous cache is treated as a paged
one with one page per sequence.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, overload

import torch
from torch import Tensor

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of lse for inputs of `dtype`: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@overload
def cache_append(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, *, query: None = ..., **options: Any
) -> None: ...
@overload
def cache_append(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, *, query: Tensor, **options: Any
) -> Tensor: ...
def cache_append(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    *,
    cache_seqlens: Tensor | int | None = None,
    slots: Tensor | None = None,
    block_table: Tensor | None = None,
    cu_seqlens_new: Tensor | None = None,
    rotary: tuple | None = None,
    query: Tensor | None = None,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
) -> Tensor | None:
    """Writes new keys and values into their caches, in place: at the ends of the sequences, or at slots.

    key [B, Hkv, new, E] and value [B, Hkv, new, Ev], or [T, Hkv, E] and [T, Hkv, Ev] with `cu_seqlens_new`: row i of a sequence
    goes to position n_old + i, n_old = clamp(cache_seqlens, 0, capacity), and rows past the capacity are dropped. The caches
    and `block_table` are as in `kvcache_attention`. With `slots` [T]: row t of key [T, Hkv, E] goes to row slots[t] of the
    pool, where row r of block b is slot b * page + r; slots outside the pool are skipped.

    `rotary` = (cos, sin[, interleaved[, offsets]]), cos and sin [positions, width / 2], rotates the first `width` columns of
    row i by its position n_old + i, or offsets[b] + i; with slots by offsets[t]. Positions past the table's end use its last
    row. The pairs are column i with column i + width / 2, or neighbours if `interleaved`. `query` [B, Hq, L, E], or [T, Hq, E]
    with packed keys or slots, is rotated at the same positions and returned in its dtype; padding rows are 0.

    A cache holds the rows divided by `key_scale` and `value_scale` (float32, broadcastable to [B, Hkv], with slots to
    [T, Hkv]), rounded once to the nearest, ties to even; float8 saturates, infinities too, and NaN stays NaN. The arithmetic
    before that is in float32 (float64 for a float64 key).

    Raises RuntimeError if a tensor requires a gradient while gradients are on, ValueError for arguments that do not fit.

    Source: rotary embedding, RoFormer (arXiv 2104.09864).
    """
    scales = (key_scale, value_scale)
    refuse_gradients(key, value, key_cache, value_cache, query, *scales, *(rotary or ())[:2])
    if (cache_seqlens is None) == (slots is None):
        raise ValueError(f"cache_seqlens, slots: expected one of the two, got {'none' if slots is None else 'both'}")
    if query is not None and rotary is None:
        raise ValueError("query: expected None without rotary, got a tensor to rotate")
    with torch.no_grad():
        if slots is not None:
            if block_table is not None or cu_seqlens_new is not None:
                raise ValueError("slots: expected no block_table or cu_seqlens_new with slots, got one")
            return _append_at_slots(key, value, key_cache, value_cache, slots, rotary, query, scales)
        check_caches(key_cache, value_cache, key, value, cu_seqlens_new)
        count = key.shape[0] if cu_seqlens_new is None else len(cu_seqlens_new) - 1
        cache = Cache.of(count, key_cache, value_cache, block_table, None, scales)
        _, old = clamped_lengths(cache_seqlens, None, count, cache.capacity)
        cache.append(sequences_of(key, cu_seqlens_new), sequences_of(value, cu_seqlens_new), old, rotary)
        if query is None:
            return None
        rotated = torch.zeros_like(query)
        for first, own, result in zip(
            first_positions(rotary, old),
            sequences_of(query, cu_seqlens_new),
            sequences_of(rotated, cu_seqlens_new),
            strict=True,
        ):
            result.copy_(rotate(own, first + torch.arange(own.shape[1]), rotary))
        return rotated


def seen_keys(
    queries: int, keys: int, *, causal: bool, window: tuple[int | None, int | None] | None, alignment: str = "lower_right"
) -> tuple[int, int]:
    """(begin, end) of the keys that `reference.visible` shows to any of the queries; other keys must not be read.

    With "lower_right" end is `keys`, and with "upper_left" begin is 0: cutting keys off there keeps the positions of the rest.
    """
    offset = keys - queries if alignment == "lower_right" else 0
    left, right = (None, None) if window is None else window
    right = 0 if causal else right
    begin = 0 if left is None else min(max(0, offset - left), keys)
    end = keys if right is None else min(max(begin, offset + queries + right), keys)
    return begin, end


class Cache(NamedTuple):
    """The two caches as pools [blocks, Hkv, page, width], and the blocks in which each sequence of a call lies."""

    pools: tuple[Tensor, Tensor]
    table: Tensor  # int64 [B, entries], on the host; -1 for a block of zeros
    scales: list[Tensor | None]  # of keys and of values, [B, Hkv]

    @classmethod
    def of(cls, count, key_cache, value_cache, block_table, cache_batch_idx=None, scales=(None, None)) -> Cache:
        blocks, heads = key_cache.shape[:2]
        table = torch.arange(blocks)[:, None] if block_table is None else block_table.cpu().long()
        if cache_batch_idx is None and len(table) < count:
            name = "key_cache" if block_table is None else "block_table"
            raise ValueError(f"{name}: expected {count} rows, one per sequence without cache_batch_idx, got {len(table)}")
        rows = torch.arange(count) if cache_batch_idx is None else cache_batch_idx.cpu().long()
        known = (rows >= 0) & (rows < len(table))
        own = table.new_full((count, table.shape[1]), -1)
        own[known] = table[rows[known]]
        own[own >= blocks] = -1
        scales = [s if s is None else s.expand(count, heads) for s in scales]
        return cls((key_cache, value_cache), own.clamp(min=-1), scales)

    @property
    def capacity(self) -> int:
        return self.table.shape[1] * self.pools[0].shape[2]

    def places(self, sequence: int, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """A mask of the positions that lie in a block, and their blocks and the rows inside these."""
        page = max(self.pools[0].shape[2], 1)
        blocks = self.table[sequence, positions // page]
        inside = blocks >= 0
        return inside, blocks[inside], (positions % page)[inside]

    def read(self, sequence: int, begin: int, end: int, dtype: torch.dtype) -> list[Tensor]:
        """The keys [Hkv, end - begin, E] and values [Hkv, end - begin, Ev] at positions begin up to end."""
        inside, blocks, rows = self.places(sequence, torch.arange(begin, end))
        wide = accumulator_dtype(dtype)
        read = []
        for pool, scale in zip(self.pools, self.scales, strict=True):
            held = pool.new_zeros(end - begin, pool.shape[1], pool.shape[3], dtype=wide)
            held[inside.to(pool.device)] = pool[blocks, :, rows].to(wide)
            held = held if scale is None else held * scale[sequence, :, None].to(wide)
            read.append(held.to(dtype).transpose(0, 1))
        return read

    def append(self, keys: list[Tensor], values: list[Tensor], old: list[int], rotary: tuple | None) -> list[int]:
        """Writes keys [Hkv, new, E] and values [Hkv, new, Ev] of each sequence after its `old` rows; returns the new
        lengths."""
        ends = []
        for n, (begin, first, new) in enumerate(
            zip(old, first_positions(rotary, old), zip(keys, values, strict=True), strict=True)
        ):
            ends.append(min(begin + new[0].shape[1], self.capacity))
            inside, blocks, at = self.places(n, torch.arange(begin, ends[-1]))
            for pool, scale, rows, tables in zip(self.pools, self.scales, new, (rotary, None), strict=True):
                rows = rows if tables is None else rotate(rows, first + torch.arange(rows.shape[1]), tables)
                stored = _stored(rows, None if scale is None else scale[n, :, None, None], pool.dtype)
                stored = stored[:, : ends[-1] - begin].transpose(0, 1)
                pool[blocks, :, at] = stored[inside.to(pool.device)]
        return ends


def _append_at_slots(key, value, key_cache, value_cache, slots, rotary, query, scales) -> Tensor | None:
    blocks, heads, page = key_cache.shape[:3]
    inside = (slots >= 0) & (slots < blocks * page)
    block, row = slots[inside] // max(page, 1), slots[inside] % max(page, 1)
    positions = None
    if rotary is not None:
        if len(rotary) < 4 or rotary[3] is None:
            raise ValueError("rotary: expected offsets, the positions of the rows, with slots, got none")
        positions = rotary[3].cpu().long()
    for pool, rows, scale, tables in zip((key_cache, value_cache), (key, value), scales, (rotary, None), strict=True):
        rows = rows.transpose(0, 1)
        rows = rows if tables is None else rotate(rows, positions, tables)
        scale = None if scale is None else scale.expand(len(slots), heads).transpose(0, 1)[..., None]
        pool[block, :, row] = _stored(rows, scale, pool.dtype).transpose(0, 1)[inside]
    if query is None:
        return None
    return rotate(query.transpose(0, 1), positions, rotary).transpose(0, 1).to(query.dtype)


def rotate(rows: Tensor, positions: Tensor, rotary: tuple) -> Tensor:
    """Rows [heads, rows, E] rotated by their positions [rows], in float32, or in float64 for float64."""
    cos, sin, interleaved = (*rotary, False)[:3] if len(rotary) == 2 else rotary[:3]
    rows = rows.to(accumulator_dtype(rows.dtype))
    at = positions.clamp(0, max(len(cos) - 1, 0)).to(cos.device)
    cos, sin = cos[at].to(rows.dtype), sin[at].to(rows.dtype)
    width = 2 * cos.shape[-1]
    if width > rows.shape[-1]:
        raise ValueError(f"rotary: expected cos and sin for at most {rows.shape[-1]} columns, got {width}")
    pairs, rest = rows[..., :width], rows[..., width:]
    x, y = (pairs[..., 0::2], pairs[..., 1::2]) if interleaved else pairs.chunk(2, dim=-1)
    rotated = x * cos - y * sin, x * sin + y * cos
    pairs = torch.stack(rotated, dim=-1).flatten(-2) if interleaved else torch.cat(rotated, dim=-1)
    return torch.cat([pairs, rest], dim=-1)


def _stored(rows: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Rows [Hkv, rows, width] as a cache of `dtype` holds them; a scale broadcasts to them."""
    if scale is not None:
        rows = rows.to(accumulator_dtype(rows.dtype))
        rows = rows / scale.to(rows.dtype)
    if dtype in FLOAT8:
        # torch's own conversion turns too large values into NaN or inf in some versions.
        largest = torch.finfo(dtype).max
        rows = rows.to(accumulator_dtype(rows.dtype)).clamp(-largest, largest)
    return rows.to(dtype)


def packed_rows(starts: Tensor, total: int, longest: int | None = None, used: Tensor | None = None) -> list[slice]:
    """The rows of each packed sequence in a tensor of `total` rows, at most `longest` and at most used[n]. `starts` and `used`
    may hold any values."""
    bounds = [min(max(start, 0), total) for start in starts.tolist()]
    most = [total if longest is None else longest] * (len(bounds) - 1)
    if used is not None:
        most = [min(n, max(own, 0)) for n, own in zip(most, used.tolist(), strict=True)]
    return [slice(a, min(max(a, b), a + n)) for a, b, n in zip(bounds[:-1], bounds[1:], most, strict=True)]


def results_of(query: Tensor, width: int, starts: Tensor | None, longest: int | None):
    """out and lse of rows that see nothing, and for each sequence query [Hq, L, E] and the views of out and lse to write."""
    out = query.new_zeros(*query.shape[:-1], width)
    lse_shape = query.shape[:-1] if starts is None else query.shape[1::-1]
    lse = query.new_full(lse_shape, -math.inf, dtype=accumulator_dtype(query.dtype))
    if starts is None:
        return out, lse, list(zip(query, out, lse, strict=True))
    rows = packed_rows(starts, query.shape[0], longest)
    return out, lse, [(query[r].transpose(0, 1), out[r].transpose(0, 1), lse[:, r]) for r in rows]


def sequences_of(tensor: Tensor, starts: Tensor | None) -> list[Tensor]:
    """A view [heads, rows, width] of each sequence of a dense or a packed tensor."""
    if starts is None:
        return list(tensor.unbind(0))
    return [tensor[rows].transpose(0, 1) for rows in packed_rows(starts, tensor.shape[0])]


def clamped_lengths(cache_seqlens, leftpad, count: int, capacity: int) -> tuple[list[int], list[int]]:
    """leftpad and n_old of each sequence, clamped."""
    if cache_seqlens is None:
        lengths = [capacity] * count
    else:
        lengths = cache_seqlens.tolist() if isinstance(cache_seqlens, Tensor) else [int(cache_seqlens)] * count
    left = [0] * count if leftpad is None else [min(max(n, 0), capacity) for n in leftpad.tolist()]
    return left, [min(max(length, least), capacity) for length, least in zip(lengths, left, strict=True)]


def first_positions(rotary: tuple | None, old: list[int]) -> list[int]:
    """The rotary position of each sequence's first new row."""
    return old if rotary is None or len(rotary) < 4 or rotary[3] is None else rotary[3].tolist()


def check_caches(key_cache, value_cache, key, value, cu_seqlens_new) -> None:
    if key_cache.shape[:3] != value_cache.shape[:3] or key_cache.dim() != 4:
        raise ValueError(
            f"key_cache, value_cache: expected four dimensions, equal except for the last, got {list(key_cache.shape)} and "
            f"{list(value_cache.shape)}"
        )
    if (key is None) != (value is None):
        raise ValueError("key, value: expected both or none, got one of them")
    if key is not None and (key.dim() != (4 if cu_seqlens_new is None else 3) or key.shape[:-1] != value.shape[:-1]):
        raise ValueError(
            "key, value: expected four dimensions, or three with cu_seqlens_new, equal except for the last, got "
            f"{list(key.shape)} and {list(value.shape)}"
        )


def refuse_gradients(*tensors: Tensor | None) -> None:
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        raise RuntimeError("attention over cached keys has no gradient: call it in torch.no_grad(), or detach its inputs")
