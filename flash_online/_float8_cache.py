"""kvcache_attention with products in float8: makes what float8_attention takes of caches, tables and lengths, in torch's
operators. The host reads no values."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from . import _policy
from ._cache_arguments import check_out, check_splits
from ._canonicalize import window_bounds
from ._ops import InvalidArgument
from .float8 import float8_attention

_E4M3, _LARGEST = torch.float8_e4m3fn, 448.0


def check_products(query, key_cache, value_cache, cu_seqlens_q, max_seqlen_q, alibi_slopes, num_splits, out) -> None:
    """Raises unless float8_attention can run this call, which has passed the checks of all calls."""
    if key_cache.dtype != _E4M3:
        raise InvalidArgument(f"key_cache: expected {_E4M3} with float8_products, got {key_cache.dtype}")
    if alibi_slopes is not None:
        raise InvalidArgument("alibi_slopes: expected None with float8_products, got a tensor")
    if check_splits(num_splits):
        raise InvalidArgument(f"num_splits: expected None with float8_products, got {num_splits}")
    if cu_seqlens_q is not None and max_seqlen_q is None:  # as many rows as all have would be made for each sequence
        raise InvalidArgument(
            "float8_products: expected queries [B, Hq, L, E], or max_seqlen_q, got packed queries without max_seqlen_q"
        )
    if out is not None:
        check_out(out, query, value_cache.shape[-1])
    _policy.require_kernel("float8_attention", query=query, key_cache=key_cache, value_cache=value_cache)


def attend_in_float8(
    query, key_cache, value_cache, where, starts, longest, new, scales, options, return_lse, out
) -> Tensor | tuple[Tensor, Tensor]:
    """What `_attend` of kvcache.py returns, by float8_attention. The arguments are those of `_attend`."""
    packing, rows, spans = None, query, options.query_spans
    if starts.queries is not None:
        packing = _Packing.of(starts.queries, query.shape[0], longest)
        rows = packing.unpack(query)
        if spans is not None:
            spans = spans[:, packing.clamped].transpose(0, 1)
    capacity = key_cache.shape[2] * (1 if where.table is None else where.table.shape[1])
    left, ends = _ends(where, starts, new, capacity, rows)
    spans = _spans(left, ends, rows, None if packing is None else packing.counts, options, spans)
    key, value = _keys_and_values(key_cache, value_cache, where, _seen_by_any(spans, capacity, key_cache.shape[1]))
    rows, query_scale = _quantised(rows, key_cache.shape[1])
    result, lse = float8_attention(
        rows, key, value, query_scale=query_scale, key_scale=scales.key, value_scale=scales.value, query_spans=spans,
        softcap=options.softcap, sinks=options.sinks, scale=options.scale, return_lse=True, out_dtype=query.dtype,
    )  # fmt: skip
    if packing is not None:
        result, lse = packing.pack(result, lse)
    result = result if out is None else out.copy_(result)
    return (result, lse) if return_lse else result


class _Packing(NamedTuple):
    """Where the rows of packed queries lie: a place for `longest` rows of each sequence."""

    index: Tensor  # [B, longest]: the packed row, or `total` for none
    clamped: Tensor  # the same, where any row stands for none
    counts: Tensor  # [B]: the rows of each sequence
    total: int

    @classmethod
    def of(cls, starts: Tensor, total: int, longest: int) -> _Packing:
        """Starts may be any numbers, as they may for the kernels."""
        bounds = starts.long().clamp(0, total)
        counts = bounds.diff().clamp(0, longest)
        place = torch.arange(min(longest, total), device=starts.device)
        index = torch.where(place < counts[:, None], bounds[:-1, None] + place, total)
        return cls(index, index.clamp(max=max(total - 1, 0)), counts, total)

    def unpack(self, query: Tensor) -> Tensor:
        """Packed queries [Tq, Hq, E] as [B, Hq, longest, E], 0 after a sequence's own."""
        rows = query[self.clamped].masked_fill((self.index == self.total)[..., None, None], 0)
        return rows.transpose(1, 2)

    def pack(self, result: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        """[Tq, Hq, Ev] and [Hq, Tq], 0 and -inf in rows of no sequence. One more row takes what belongs to none."""
        out = result.new_zeros(self.total + 1, result.shape[1], result.shape[3])
        out[self.index] = result.transpose(1, 2)
        packed_lse = lse.new_full((self.total + 1, lse.shape[1]), -torch.inf)
        packed_lse[self.index] = lse.transpose(1, 2)
        return out[: self.total], packed_lse[: self.total].t().contiguous()


def _ends(where, starts, new, capacity, rows) -> tuple[Tensor, Tensor]:
    """(leftpad, number of keys after the append) of each sequence, int64 [B], clamped as the kernels clamp them."""
    none = torch.zeros(rows.shape[0], dtype=torch.int64, device=rows.device)
    left = none if where.left is None else where.left.long().clamp(0, capacity)
    old = none + capacity if where.lengths is None else where.lengths.long().maximum(left)
    added = new if starts.new is None else starts.new.long().clamp(0, new).diff().clamp(min=0)
    return left, (old + added).clamp(max=capacity)


def _spans(left, ends, rows, counts, options, given) -> Tensor:
    """The keys that each query sees: int32 [B, 1 or Hq, L, 2 or 4], the intersection with the spans `given`. `counts`: the
    queries of each sequence, None if all have L."""
    row = torch.arange(rows.shape[2], device=rows.device)
    begin, end = (bound[:, None].expand(-1, rows.shape[2]) for bound in (left, ends))
    position = row + (ends - (rows.shape[2] if counts is None else counts))[:, None]
    before, after = window_bounds(options.window or (None, None))
    after = 0 if options.causal else after
    if before >= 0:
        begin = begin.maximum(position - before)
    if after >= 0:
        end = end.minimum(position + after + 1)
    if counts is not None:  # rows after a sequence's own see nothing: no time is spent on them
        end = torch.where(row < counts[:, None], end, 0)
    begin, end = (bound[:, None, :, None].int() for bound in (begin, end))
    if given is not None:
        begin, end = begin.maximum(given[..., 0::2]), end.minimum(given[..., 1::2])
    return torch.stack([begin, end], -1).flatten(-2)


def _seen_by_any(spans: Tensor, keys: int, key_heads: int) -> Tensor:
    """Whether a key is in a span of any query: bool [B, 1 or key heads, keys]. Sums up +1 where an interval begins and -1 where
    it ends."""
    begin, end = spans[..., 0::2].clamp(0, keys), spans[..., 1::2].clamp(0, keys)
    edges = torch.stack([begin, end.maximum(begin)]).long().flatten(3)  # [2, B, 1 or Hq, L or 2 L]
    sums = torch.zeros(*spans.shape[:2], keys + 1, dtype=torch.int32, device=spans.device)
    first = torch.arange(sums.shape[0] * sums.shape[1], device=spans.device).view(*sums.shape[:2], 1) * (keys + 1)
    signs = (1 - 2 * torch.arange(2, dtype=torch.int32, device=spans.device)).view(2, 1, 1, 1)
    sums.view(-1).scatter_add_(0, (edges + first).flatten(), signs.expand_as(edges).flatten())
    seen = sums.cumsum(-1, dtype=torch.int32)[..., :keys] > 0
    return seen if seen.shape[1] == 1 else seen.unflatten(1, (key_heads, -1)).any(2)


def _keys_and_values(key_cache: Tensor, value_cache: Tensor, where, seen: Tensor) -> tuple[Tensor, Tensor]:
    """The sequences' keys and values [B, Hkv, capacity, *], values that no query sees as zeros: what is hidden in a tile has
    weight 0, and 0 times NaN is NaN. A hidden key's score is replaced, whatever it is."""
    key, value = key_cache.view(torch.uint8), value_cache.view(torch.uint8)
    hidden = ~seen[..., None]
    if where.table is not None or where.rows is not None:
        entries = _entries(where, key_cache)
        outside = (entries < 0) | (entries >= key_cache.shape[0])
        outside_rows = outside[..., None].expand(-1, -1, key_cache.shape[2]).flatten(1)[:, None, :, None]
        key, value = (_gathered(pool, entries) for pool in (key, value))
        key, hidden = key.masked_fill(outside_rows, 0), hidden | outside_rows
    return key.view(_E4M3), value.masked_fill(hidden, 0).view(_E4M3)


def _entries(where, key_cache: Tensor) -> Tensor:
    """The blocks of each sequence [B, entries], where a contiguous cache has one per row."""
    if where.table is None:
        return where.rows[:, None]
    if where.rows is None:
        return where.table
    own = _or_a_row(where.table)[where.rows.clamp(0, max(where.table.shape[0] - 1, 0)).long()]
    return own.masked_fill(((where.rows < 0) | (where.rows >= where.table.shape[0]))[:, None], -1)


def _gathered(pool: Tensor, entries: Tensor) -> Tensor:
    """The blocks of a pool [blocks, Hkv, page, width] one after another: [B, Hkv, entries * page, width]."""
    index = entries.clamp(0, max(pool.shape[0] - 1, 0)).flatten()
    rows = _or_a_row(pool).transpose(0, 1).index_select(1, index)
    return rows.unflatten(1, entries.shape).flatten(2, 3).transpose(0, 1)


def _or_a_row(tensor: Tensor) -> Tensor:
    """The tensor, or one row of zeros if it has none, so that there is what to index."""
    return tensor if tensor.shape[0] else tensor.new_zeros(1, *tensor.shape[1:])


def _quantised(query: Tensor, key_heads: int) -> tuple[Tensor, Tensor]:
    """Queries [B, Hq, L, E] as e4m3, with a scale for each batch and key head, as float8_attention quantises them."""
    groups = query.shape[1] // max(key_heads, 1)
    largest = torch.where(query.isfinite(), query.abs(), 0).unflatten(1, (key_heads, groups)).flatten(2)
    scale = (largest.amax(-1) if largest.shape[-1] else largest.sum(-1)).float() / _LARGEST
    divisor = torch.where(scale == 0, 1, scale)[..., None].expand(-1, -1, groups).flatten(1)[..., None, None]
    return (query / divisor).clamp_(-_LARGEST, _LARGEST).to(_E4M3), scale
