"""The functions of flash_online written in plain torch operations: an oracle for tests, and a readable definition.

This module shares no code with the kernels, and is slow: attention builds its whole [..., queries, keys] matrix. Every function
works on any device and in any floating dtype, and computes in that dtype, so that the same code serves two purposes: with
float64 inputs it gives the truth, and with narrower inputs the error that plain torch makes. Autograd differentiates the plain
operations, to any order. For empty rows, the inputs of `0 / 0` and `log(0)` are replaced before these operations: a `where`
after them would leave NaN in the gradient.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, overload

import torch
from torch import Tensor

from ._reference_cache import (
    Cache,
    accumulator_dtype,
    cache_append,
    check_caches,
    clamped_lengths,
    first_positions,
    packed_rows,
    refuse_gradients,
    results_of,
    rotate,
    seen_keys,
    sequences_of,
)

__all__ = [
    "attention",
    "varlen_attention",
    "kvcache_attention",
    "cascade_attention",
    "cache_append",
    "merge_attention",
    "softmax",
    "log_softmax",
    "logsumexp",
    "topk_softmax",
    "cross_entropy",
    "linear_cross_entropy",
    "attention_weight_sums",
    "block_scores",
    "float8_attention",
    "visible",
    "dropout_keep",
]

INFINITY = float("inf")


def visible(
    queries: int,
    keys: int,
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    alignment: str = "upper_left",
    device: torch.device | str | None = None,
) -> Tensor:
    """bool [queries, keys]: True where a query may see a key by position alone.

    The position of query i is p = i ("upper_left") or p = i + keys - queries ("lower_right"). `causal`: keys j <= p.
    `window` = (left, right): p - left <= j <= p + right, where None is no bound.
    """
    p, j = _positions(queries, keys, alignment, device)
    keep = torch.ones(queries, keys, dtype=torch.bool, device=device)
    if causal:
        keep = keep & (j <= p)
    left, right = (None, None) if window is None else window
    if left is not None:
        keep = keep & (j >= p - left)
    if right is not None:
        keep = keep & (j <= p + right)
    return keep


@overload
def attention(query: Tensor, key: Tensor, value: Tensor, *, return_lse: Literal[False] = ..., **options: Any) -> Tensor: ...
@overload
def attention(
    query: Tensor, key: Tensor, value: Tensor, *, return_lse: Literal[True], **options: Any
) -> tuple[Tensor, Tensor]: ...
@overload
def attention(
    query: Tensor, key: Tensor, value: Tensor, *, return_lse: bool = ..., return_max_logit: bool, **options: Any
) -> Tensor | tuple[Tensor, ...]: ...
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Tensor | None = None,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    alignment: str = "upper_left",
    query_spans: Tensor | None = None,
    key_spans: Tensor | None = None,
    blocks: tuple[Tensor, Tensor, tuple[int, int]] | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    scale: float | None = None,
    return_lse: bool = False,
    return_max_logit: bool = False,
    rng: Tensor | None = None,
    keep: Tensor | None = None,
) -> Tensor | tuple[Tensor, ...]:
    """softmax(bias(softcap(scale * query key^T))) value, and lse, the logarithm of the softmax's denominator.

    query [..., Hq, L, E], key [..., Hk, S, E], value [..., Hv, S, Ev] -> out [..., Hq, L, Ev], lse [..., Hq, L]. Query head
    h uses key head h // (Hq // Hk) and value head h // (Hq // Hv); the dimensions before the heads broadcast. [L, E]
    counts as one head.

    `query_spans`, int32 [..., 1 or Hq, L, 2 or 4], holds one or two intervals [begin, end) per query: of the keys that it may
    see. `key_spans` [..., 1 or Hq, S, 2 or 4] holds intervals of the queries that may see a key. Bounds may have any values.

    `blocks` is (counts int32 [..., 1 or Hq, nq], indices int32 [..., 1 or Hq, nq, capacity], size): query i sees the keys j
    with j // size[1] among the first counts[i // size[0]] of indices[i // size[0]].

    The order of operations on a score: scale, softcap `c * tanh(s / c)`, ALiBi `-slope * |p - j|`, float mask, visibility.
    `sinks` [Hq] adds exp(sink) to a head's denominator and nothing to its numerator. `alibi_slopes` is [Hq] or [..., Hq].

    `return_max_logit` adds the largest score that a query sees, [..., Hq], in float32; -inf where none sees anything.

    Dropout takes its mask from `keep` (bool, of the weights' shape), or from `rng`, the int64 pair (seed, offset) of
    `dropout_keep`.
    """
    headless = query.dim() == key.dim() == value.dim() == 2
    query, key, value = (t if t.dim() > 2 else t[None] for t in (query, key, value))
    heads, queries, head_dim = query.shape[-3:]
    keys = key.shape[-2]
    if scale is None:
        scale = 1 / math.sqrt(head_dim) if head_dim else 1.0
    if heads != 1:  # a single query head broadcasts instead, as in torch
        key = key.repeat_interleave(heads // key.shape[-3], dim=-3)
        value = value.repeat_interleave(heads // value.shape[-3], dim=-3)

    scores = query @ key.transpose(-2, -1) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if alibi_slopes is not None:
        p, j = _positions(queries, keys, alignment, query.device)
        scores = scores - alibi_slopes[..., None, None].to(scores.dtype) * (p - j).abs()
    allowed = visible(queries, keys, causal=causal, window=window, alignment=alignment, device=query.device)
    if query_spans is not None:
        allowed = allowed & _in_spans(query_spans, keys)
    if key_spans is not None:
        allowed = allowed & _in_spans(key_spans, queries).transpose(-2, -1)
    if blocks is not None:
        allowed = allowed & _in_blocks(*blocks, queries, keys)
    if mask is not None and mask.dtype == torch.bool:
        allowed = allowed & mask
    elif mask is not None:
        scores = scores + mask
    scores = torch.where(allowed, scores, -INFINITY)

    # The sink is one more score, for a key with value 0.
    joined = scores
    if sinks is not None:
        sink = sinks[:, None, None].to(scores.dtype).expand(*scores.shape[:-3], -1, queries, 1)
        joined = torch.cat([scores, sink], dim=-1)
    pivot = _pivot(joined)
    total = torch.exp(joined - pivot).sum(-1, keepdim=True)
    empty = total == 0
    weights = torch.exp(scores - pivot) / torch.where(empty, 1, total)

    if dropout_p > 0:
        if keep is None:
            keep = dropout_keep(rng, dropout_p, weights.shape)
        weights = torch.where(keep, weights / (1 - dropout_p), 0) if dropout_p < 1 else weights * 0
    out = weights.to(value.dtype) @ value
    lse = torch.where(empty, -INFINITY, pivot + torch.log(torch.where(empty, 1, total)))
    lse = lse.squeeze(-1).to(accumulator_dtype(query.dtype))
    none = scores.new_full((*scores.shape[:-2], 1), -INFINITY)
    max_logit = torch.cat([scores.detach().flatten(-2), none], -1).amax(-1).float()
    results = out, *([lse] if return_lse else []), *([max_logit] if return_max_logit else [])
    if headless:
        results = tuple(result.squeeze(0) for result in results)
    return results if len(results) > 1 else results[0]


@overload
def varlen_attention(
    query: Tensor, key: Tensor, value: Tensor, *packing: Any, return_lse: Literal[False] = ..., **options: Any
) -> Tensor: ...
@overload
def varlen_attention(
    query: Tensor, key: Tensor, value: Tensor, *packing: Any, return_lse: Literal[True], **options: Any
) -> tuple[Tensor, Tensor]: ...
@overload
def varlen_attention(
    query: Tensor, key: Tensor, value: Tensor, *packing: Any, return_lse: bool = ..., return_max_logit: bool, **options: Any
) -> Tensor | tuple[Tensor, ...]: ...
def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    alignment: str = "lower_right",
    query_spans: Tensor | None = None,
    key_spans: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    dropout_p: float = 0.0,
    return_lse: bool = False,
    return_max_logit: bool = False,
    rng: Tensor | None = None,
    block_table: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    num_splits: int | None = None,
    out: Tensor | None = None,
    **options: Any,
) -> Tensor | tuple[Tensor, ...]:
    """attention() of each packed sequence in query [Tq, Hq, E], key [Tk, Hk, E] and value [Tk, Hv, Ev] -> out [Tq, Hq, Ev], lse
    [Hq, Tq].

    Sequence n is rows cu_seqlens[n] up to cu_seqlens[n + 1], and at most max_seqlen of them. Padding rows are 0, their lse
    -inf. `alibi_slopes` is [Hq] or [sequences, Hq]; the batch index of dropout is n; `options` are as in attention.
    `query_spans` is [Tq, 2 or 4] or [1 or Hq, Tq, 2 or 4], `key_spans` likewise of Tk; positions are counted in the sequence.

    `seqused_q` and `seqused_k` [sequences] are the numbers of used rows of each sequence. With `block_table` [sequences,
    entries] key and value are pools [blocks, page, Hk, E] and [blocks, page, Hk, Ev], as in `kvcache_attention`; a sequence has
    seqused_k[n] keys, or the number in cu_seqlens_k. `num_splits` changes no value; `out` is written in place. In a call with
    one of these five, no hidden key reaches a result.
    """
    cached = any(x is not None for x in (block_table, seqused_q, seqused_k, num_splits, out))
    if cached and dropout_p > 0:
        raise ValueError(f"dropout_p: expected 0 over cached keys, got {dropout_p}")
    result = query.new_zeros(*query.shape[:2], value.shape[-1])
    lse = query.new_full(query.shape[1::-1], -INFINITY, dtype=accumulator_dtype(query.dtype))
    query_rows = packed_rows(cu_seqlens_q, len(query), max_seqlen_q, seqused_q)
    if block_table is not None and key_spans is not None:
        raise ValueError("key_spans: expected None with block_table, got a tensor")
    if block_table is None:
        key_rows = packed_rows(cu_seqlens_k, len(key), max_seqlen_k, seqused_k)
    else:
        cache = Cache.of(len(query_rows), key.transpose(1, 2), value.transpose(1, 2), block_table)
        lengths = cu_seqlens_k.diff() if seqused_k is None else seqused_k
        key_rows = [slice(0, min(max(length, 0), max_seqlen_k, cache.capacity)) for length in lengths.tolist()]
    max_logit = query.new_full((len(query_rows), query.shape[1]), -INFINITY, dtype=torch.float32)
    visibility = {"causal": options.get("causal", False), "window": options.get("window"), "alignment": alignment}
    for n, (rows, keys) in enumerate(zip(query_rows, key_rows, strict=True)):
        begin = 0
        if cached:
            begin, end = seen_keys(rows.stop - rows.start, keys.stop - keys.start, **visibility)
            keys = slice(keys.start + begin, keys.start + end)
        dense = [query[rows].transpose(0, 1)]
        if block_table is None:
            dense += [t[keys].transpose(0, 1) for t in (key, value)]
        else:
            dense += cache.read(n, keys.start, keys.stop, query.dtype)
        slopes = alibi_slopes[n] if alibi_slopes is not None and alibi_slopes.dim() == 2 else alibi_slopes
        keep = None
        if dropout_p > 0:
            shape = (1, *dense[0].shape[:2], dense[1].shape[1])
            keep = dropout_keep(rng, dropout_p, shape, first_batch=n)[0]
        if query_spans is not None:  # int64: the difference may be less than any int32
            options["query_spans"] = query_spans[..., rows, :].long() - begin
        if key_spans is not None:
            options["key_spans"] = key_spans[..., keys, :]
        options |= {"return_lse": True, "return_max_logit": True}
        attended, lse[:, rows], max_logit[n] = attention(
            *dense, alignment=alignment, alibi_slopes=slopes, dropout_p=dropout_p, keep=keep, **options
        )
        result[rows] = attended.transpose(0, 1)
    result = result if out is None else out.copy_(result)
    results = result, *([lse] if return_lse else []), *([max_logit] if return_max_logit else [])
    return results if len(results) > 1 else result


@overload
def kvcache_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    cache_seqlens: Tensor | int | None,
    *,
    return_lse: Literal[False] = ...,
    **options: Any,
) -> Tensor: ...
@overload
def kvcache_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    cache_seqlens: Tensor | int | None,
    *,
    return_lse: Literal[True],
    **options: Any,
) -> tuple[Tensor, Tensor]: ...
@overload
def kvcache_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    cache_seqlens: Tensor | int | None,
    *,
    return_lse: bool,
    **options: Any,
) -> Tensor | tuple[Tensor, Tensor]: ...
def kvcache_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    cache_seqlens: Tensor | int | None,
    *,
    key: Tensor | None = None,
    value: Tensor | None = None,
    block_table: Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    leftpad: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    max_seqlen_q: int | None = None,
    cu_seqlens_new: Tensor | None = None,
    rotary: tuple | None = None,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
    causal: bool = True,
    window: tuple[int | None, int | None] | None = None,
    query_spans: Tensor | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    scale: float | None = None,
    num_splits: int | None = None,
    return_lse: bool = False,
    out: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """attention() of each sequence's queries over the keys of its cache, lower-right aligned, after new keys were appended.

    query [B, Hq, L, E], or [Tq, Hq, E] with `cu_seqlens_q` -> out of query's dtype, its width Ev; lse [B, Hq, L], or [Hq, Tq].
    Caches [B, Hkv, S, E] and [B, Hkv, S, Ev], or with `block_table` [B, entries] pools [blocks, Hkv, page, E] and
    [blocks, Hkv, page, Ev]. `cache_batch_idx` [B] picks the row of the cache, or of the table. An entry outside [0, blocks)
    reads as zeros and is never written; so does a row outside the cache or the table.

    `cache_seqlens` [B] (or an int, or None, which is full) counts the keys before the append, `leftpad` [B] included. `key` and
    `value` are appended as in `cache_append`. With n_old = clamp(length, leftpad, capacity) and n = min(n_old + new, capacity),
    query i is at i + n - L and may see the keys from leftpad up to n. Nothing else that the cache holds reaches a result.

    `rotary` = (cos, sin[, interleaved[, offsets]]) rotates new keys as `cache_append` does, and query i at n_old + i, or at
    n_old where neither `causal` nor a bound of `window` is given; offsets [B] replaces n_old. The rotated query is rounded to
    its dtype. Cached keys are multiplied by `key_scale`, broadcast to [B, Hkv], and values by `value_scale`. `alibi_slopes` is
    [Hq] or [B, Hq]. `query_spans` is as in `attention`, or as in `varlen_attention` with `cu_seqlens_q`; positions are counted
    from the cache's first key, `leftpad` included. `num_splits` changes no value. A row that sees nothing is 0, its lse -inf or
    its sink; padding rows are 0 and -inf. `out` is written in place.

    Raises RuntimeError if a tensor requires a gradient while gradients are on, ValueError for arguments that do not fit.
    """
    scales = (key_scale, value_scale)
    refuse_gradients(query, key_cache, value_cache, key, value, *scales, alibi_slopes, sinks, out, *(rotary or ())[:2])
    check_caches(key_cache, value_cache, key, value, cu_seqlens_new)
    if query.dim() != (4 if cu_seqlens_q is None else 3):
        raise ValueError(f"query: expected 4 dimensions, or 3 with cu_seqlens_q, got {query.dim()}")
    shared = {"window": window, "softcap": softcap, "sinks": sinks, "scale": scale, "alignment": "lower_right"}
    moves = causal or (window is not None and any(bound is not None for bound in window))
    with torch.no_grad():
        count = query.shape[0] if cu_seqlens_q is None else len(cu_seqlens_q) - 1
        cache = Cache.of(count, key_cache, value_cache, block_table, cache_batch_idx, scales)
        left, ends = clamped_lengths(cache_seqlens, leftpad, count, cache.capacity)
        first = first_positions(rotary, ends)
        if key is not None:
            ends = cache.append(sequences_of(key, cu_seqlens_new), sequences_of(value, cu_seqlens_new), ends, rotary)
        result, lse, sequences = results_of(query, value_cache.shape[-1], cu_seqlens_q, max_seqlen_q)
        if query_spans is not None and cu_seqlens_q is None:
            own_spans = query_spans.expand(count, *query_spans.shape[-3:] if query_spans.dim() > 2 else query_spans.shape)
        elif query_spans is not None:
            own_spans = [query_spans[..., rows, :] for rows in packed_rows(cu_seqlens_q, query.shape[0], max_seqlen_q)]
        for n, (own, own_result, own_lse) in enumerate(sequences):
            queries = own.shape[1]
            if rotary is not None:
                own = rotate(own, first[n] + torch.arange(queries) * moves, rotary).to(query.dtype)
            begin, end = seen_keys(queries, ends[n], causal=causal, window=window)
            keys, values = cache.read(n, max(begin, left[n]), end, query.dtype)
            spans = None
            if query_spans is not None:  # int64: the difference may be less than any int32
                spans = own_spans[n].long() - max(begin, left[n])
            slopes = alibi_slopes[n] if alibi_slopes is not None and alibi_slopes.dim() == 2 else alibi_slopes
            own_result[:], own_lse[:] = attention(
                own, keys, values, causal=causal, query_spans=spans, alibi_slopes=slopes, return_lse=True, **shared
            )
        result = result if out is None else out.copy_(result)
    return (result, lse) if return_lse else result


@overload
def cascade_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    levels: Sequence[Sequence[Any]],
    *,
    return_lse: Literal[False] = ...,
    **options: Any,
) -> Tensor: ...
@overload
def cascade_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    levels: Sequence[Sequence[Any]],
    *,
    return_lse: Literal[True],
    **options: Any,
) -> tuple[Tensor, Tensor]: ...
def cascade_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    levels: Sequence[Sequence[Any]],
    *,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
    causal: bool = True,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    scale: float | None = None,
    num_splits: int | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """attention() of each query over the keys of its groups, concatenated over the levels.

    query [Tq, Hq, E] -> out [Tq, Hq, Ev], lse [Hq, Tq]; pools [blocks, Hkv, page, E] and [blocks, Hkv, page, Ev]. A level is
    (cu_seqlens_q [groups + 1], block_table [groups, entries], cache_seqlens [groups] or int[, max_seqlen_q]), read as
    `kvcache_attention` reads them: group g has the query rows from cu_seqlens_q[g] up to cu_seqlens_q[g + 1], at most
    max_seqlen_q, and cache_seqlens[g] keys. In the last level of n keys, query i of L sees keys up to i + n - L if `causal`; it
    sees all keys of other levels. `sinks` count for the queries of the last level's groups. A query that sees nothing is 0, its
    lse -inf or its sink. `num_splits` changes no value.
    """
    refuse_gradients(query, key_cache, value_cache, key_scale, value_scale, sinks)
    check_caches(key_cache, value_cache, None, None, None)
    result = query.new_zeros(*query.shape[:2], value_cache.shape[-1])
    lse = query.new_full(query.shape[1::-1], -INFINITY, dtype=accumulator_dtype(query.dtype))
    with torch.no_grad():
        groups, owners = [], []  # of each level: (cache, rows, keys of its groups); the group of each row, or None
        for starts, table, lengths, *longest in levels:
            rows = packed_rows(starts, len(query), *longest)
            cache = Cache.of(len(rows), key_cache, value_cache, table, None, (key_scale, value_scale))
            groups.append((cache, rows, clamped_lengths(lengths, None, len(rows), cache.capacity)[1]))
            owners.append(
                [next((g for g, own in enumerate(rows) if own.start <= i < own.stop), None) for i in range(len(query))]
            )
        for i in range(len(query)):
            held, seen = [], []
            for n, ((cache, rows, ends), owner) in enumerate(zip(groups, owners, strict=True)):
                if (group := owner[i]) is not None:
                    own, keys = rows[group], torch.arange(ends[group])
                    last = i + ends[group] - own.stop if causal and n == len(levels) - 1 else ends[group]
                    held.append(cache.read(group, 0, ends[group], query.dtype))
                    seen.append(keys <= last)
            if held:
                keys, values = (torch.cat(parts, 1) for parts in zip(*held, strict=True))
                own_sinks = None if owners[-1][i] is None else sinks
                options = {"mask": torch.cat(seen).to(query.device), "softcap": softcap, "sinks": own_sinks, "scale": scale}
                row, row_lse = attention(query[i, :, None], keys, values, return_lse=True, **options)
                result[i], lse[:, i] = row[:, 0], row_lse[:, 0]
    return (result, lse) if return_lse else result


def merge_attention(outs: Sequence[Tensor] | Tensor, lses: Sequence[Tensor] | Tensor) -> tuple[Tensor, Tensor]:
    """Attention over the union of disjoint sets of keys, from attention over each.

    outs [parts, ..., Ev] and lses [parts, ...], or sequences of the parts -> out [..., Ev] of the outs' dtype, lse [...].
    A row with only lses of -inf becomes 0 and -inf.
    """
    outs = outs if isinstance(outs, Tensor) else torch.stack(list(outs))
    lses = lses if isinstance(lses, Tensor) else torch.stack(list(lses))
    pivot = _pivot(lses.movedim(0, -1)).movedim(-1, 0)
    weights = torch.exp(lses - pivot)
    total = weights.sum(0)
    empty = total == 0
    safe = torch.where(empty, 1, total)
    out = ((weights / safe)[..., None] * outs).sum(0)
    lse = torch.where(empty, -INFINITY, pivot[0] + torch.log(safe))
    return out.to(outs.dtype), lse


def softmax(input: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """exp(input) / sum(exp(input)) along dim; a row of -inf gives NaN. The cast to `dtype` comes first."""
    input = input if dtype is None else input.to(dtype)
    if input.numel() == 0:
        return input * 1
    weights = torch.exp(input - _largest(input, dim))
    return weights / weights.sum(dim, keepdim=True)


def log_softmax(input: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """input - log(sum(exp(input))) along dim; a row of -inf gives NaN. The cast to `dtype` comes first."""
    input = input if dtype is None else input.to(dtype)
    if input.numel() == 0:
        return input * 1
    shifted = input - _largest(input, dim)
    return shifted - torch.log(torch.exp(shifted).sum(dim, keepdim=True))


def logsumexp(input: Tensor, dim: int, keepdim: bool = False) -> Tensor:
    """log(sum(exp(input))) along dim; -inf, with gradient 0, where every element is -inf; inf where one is inf."""
    rows = (input if input.dim() else input[None]).movedim(dim, -1)
    pivot = _pivot(rows)
    pivot = torch.where(pivot == INFINITY, 0, pivot)
    total = torch.exp(rows - pivot).sum(-1, keepdim=True)
    empty = total == 0
    lse = torch.where(empty, -INFINITY, pivot + torch.log(torch.where(empty, 1, total)))
    if input.dim() == 0:
        return lse.squeeze(-1) if keepdim else lse.reshape(())
    return lse.movedim(-1, dim) if keepdim else lse.squeeze(-1)


def topk_softmax(
    input: Tensor, k: int, dim: int = -1, *, renormalize: bool = False, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """The k largest of softmax(input, dim), descending, with their indices; `renormalize` divides by their sum."""
    probabilities, indices = torch.topk(softmax(input, dim, dtype), k, dim=dim)
    if renormalize:
        probabilities = probabilities / probabilities.sum(dim, keepdim=True)
    return probabilities, indices


@overload
def cross_entropy(
    input: Tensor,
    target: Tensor,
    *arguments: Any,
    return_lse: Literal[False] = ...,
    return_entropy: Literal[False] = ...,
    **options: Any,
) -> Tensor: ...
@overload
def cross_entropy(
    input: Tensor, target: Tensor, *arguments: Any, return_lse: bool = ..., return_entropy: bool = ..., **options: Any
) -> Any: ...
def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    *,
    return_lse: bool = False,
    return_entropy: bool = False,
    z_loss: float = 0.0,
    dtype: torch.dtype | None = None,
) -> Any:
    """Cross-entropy of logits [C], [N, C] or [N, C, ...] with class indices [], [N] or [N, ...], or with probabilities.

    With logp the log-softmax over classes, e the smoothing and w the class weights, a row's loss is

        indices y:        -(1 - e) * w[y] * logp[y] - e / C * sum_c(w[c] * logp[c])     (0 if y is ignored)
        probabilities t:  -sum_c(w[c] * ((1 - e) * t[c] + e / C) * logp[c])

    and `mean` divides their sum by the sum of w[y] over the rows not ignored, or by the number of rows for probabilities.
    `z_loss` adds z_loss * lse^2 for every row not ignored; `mean` divides that part by the number of such rows. The entropy of
    a row is -sum_c(exp(logp[c]) * logp[c]), 0 if the row is ignored.
    """
    if dtype is not None:
        input = input.to(dtype)
        target = target.to(dtype) if target.is_floating_point() else target
    class_dim = 1 if input.dim() > 1 else 0
    logits = input.movedim(class_dim, -1)
    classes = logits.shape[-1]
    w = torch.ones(classes, dtype=input.dtype, device=input.device) if weight is None else weight.to(input.dtype)

    if target.is_floating_point():
        counted = torch.ones(logits.shape[:-1], dtype=torch.bool, device=input.device)
        logp = log_softmax(logits, -1)
        wanted = target.movedim(class_dim, -1)
        if label_smoothing:
            wanted = (1 - label_smoothing) * wanted + label_smoothing / classes
        loss = -(w * wanted * logp).sum(-1)
        divisor = counted.sum()
    else:
        counted = target != ignore_index
        if bool((counted & ((target < 0) | (target >= classes))).any()):
            raise IndexError(f"target: expected 0 to {classes - 1} or {ignore_index}, got a class index out of bounds")
        # The logits of an ignored row may hold NaN, and are replaced before they are used.
        logp = log_softmax(torch.where(counted[..., None], logits, 0), -1)
        y = torch.where(counted, target, 0)
        row_weight = torch.where(counted, w[y], 0)
        loss = -row_weight * logp.gather(-1, y[..., None]).squeeze(-1)
        if label_smoothing:
            smooth = torch.where(counted, -(w * logp).sum(-1), 0)
            loss = (1 - label_smoothing) * loss + label_smoothing / classes * smooth
        divisor = row_weight.sum()

    logits = logits.to(accumulator_dtype(input.dtype))
    lse = logsumexp(logits, -1)
    results = [lse] if return_lse else []
    if return_entropy:
        logp = log_softmax(torch.where(counted[..., None], logits, 0), -1)
        terms = logp.exp() * logp.masked_fill(logp == -math.inf, 0)  # a class of probability 0 has the term 0
        results.append(torch.where(counted, -terms.sum(-1), 0))
    penalty = z_loss * torch.where(counted, lse, 0).square().to(loss.dtype) if z_loss else None
    if reduction == "mean":
        loss = loss.sum() / divisor
        loss = loss if penalty is None else loss + penalty.sum() / counted.sum()
    elif reduction == "sum":
        loss = loss.sum() if penalty is None else loss.sum() + penalty.sum()
    elif penalty is not None:
        loss = loss + penalty
    return (loss, *results) if results else loss


@overload
def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    return_lse: Literal[False] = ...,
    return_z_loss: Literal[False] = ...,
    return_argmax: Literal[False] = ...,
    return_entropy: Literal[False] = ...,
    **options: Any,
) -> Tensor: ...
@overload
def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    return_lse: bool = ...,
    return_z_loss: bool = ...,
    return_argmax: bool = ...,
    return_entropy: bool = ...,
    **options: Any,
) -> Any: ...
def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int | None = None,
    label_smoothing: float = 0.0,
    options: object = None,
    return_lse: bool = False,
    z_loss: float = 0.0,
    dtype: torch.dtype | None = None,
    softcap: float = 0.0,
    scale: float | Tensor = 1.0,
    return_z_loss: bool = False,
    return_argmax: bool = False,
    return_entropy: bool = False,
    top_log_probs: int = 0,
) -> Any:
    """cross_entropy of the logits scale * (input linear_weight^T + linear_bias), which are computed all at once and then capped
    by `softcap * tanh(logits / softcap)`; the loss, or a tuple with lse, the part that z_loss adds, the logits' argmax, the
    entropy of their softmax, and the `top_log_probs` largest log-probabilities with their classes. `scale` is a number or a
    tensor of one for each row.

    input [..., H], linear_weight [C, d_1, ..., d_K, H], linear_bias [C, d_1, ..., d_K] -> logits [..., C, d_1, ..., d_K];
    target [..., d_1, ..., d_K], or probabilities like the logits.
    """
    batch, (classes, *positions, hidden) = list(input.shape[:-1]), linear_weight.shape
    logits = input.reshape(math.prod(batch), hidden) @ linear_weight.reshape(classes * math.prod(positions), hidden).t()
    logits = logits.reshape(math.prod(batch), classes, *positions)
    if linear_bias is not None:
        logits = logits + linear_bias
    if isinstance(scale, Tensor):
        scale = scale.to(accumulator_dtype(logits.dtype)).reshape(-1, 1, *([1] * len(positions)))
    logits = (logits * scale).to(logits.dtype)
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    probabilities = target.is_floating_point()
    target = target.reshape(logits.shape if probabilities else [logits.shape[0], *positions])
    ignore_index = -100 if ignore_index is None else ignore_index
    loss, lse, entropy = cross_entropy(
        *(logits, target, weight, ignore_index, reduction, label_smoothing),
        return_lse=True,
        return_entropy=True,
        z_loss=z_loss,
        dtype=dtype,
    )
    results = [loss, *([lse] if return_lse else [])]
    if return_z_loss:
        counted = torch.ones_like(lse, dtype=torch.bool) if probabilities else target != ignore_index
        term = z_loss * torch.where(counted, lse.detach(), 0).square()
        term = {"none": term, "sum": term.sum(), "mean": term.sum() / counted.sum()}[reduction]
        results.append(term.to(loss.dtype))
    if return_argmax:
        results.append(logits.argmax(1))
    if return_entropy:
        results.append(entropy)
    shaped = [result.reshape(batch + positions) if result.dim() > 0 else result for result in results]
    if top_log_probs:
        wide = logits.detach().to(accumulator_dtype(logits.dtype))
        top, classes = log_softmax(wide, 1).topk(top_log_probs, 1)
        shaped += [part.movedim(1, -1).reshape(batch + positions + [top_log_probs]) for part in (top, classes)]
    return tuple(shaped) if len(shaped) > 1 else shaped[0]


def dropout_keep(rng: Tensor, dropout_p: float, shape: Sequence[int], first_batch: int = 0) -> Tensor:
    """bool [..., heads, queries, keys]: which weights survive dropout; a function of (seed, offset) and position alone.

    Philox4x32-10 (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", SC 2011). The key is
    seed + 0x9E3779B97F4A7C15 * offset modulo 2^64, its low word first; the counter is (head, query, batch, key index >> 3),
    with the leading dimensions flattened to one batch index, which counts from `first_batch`. The four resulting words decide
    for eight neighbouring keys: the words themselves for the first four, the words times 2^16 + 1 for the last four. A weight
    survives if its word is at least floor(dropout_p * 2^32).
    """
    *batch, heads, queries, keys = shape
    seed, offset = (int(x) for x in rng)
    key = (seed + 0x9E3779B97F4A7C15 * offset) % 2**64
    key_low, key_high = key & 0xFFFFFFFF, key >> 32

    sizes = (math.prod(batch), heads, queries, (keys + 7) // 8)
    x2, x0, x1, x3 = torch.meshgrid(*(torch.arange(n, device=rng.device) for n in sizes), indexing="ij")
    x2 = x2 + first_batch
    for _ in range(10):
        high0, low0 = _multiply(x0, 0xD2511F53)
        high1, low1 = _multiply(x2, 0xCD9E8D57)
        x0, x1, x2, x3 = high1 ^ x1 ^ key_low, low1, high0 ^ x3 ^ key_high, low0
        key_low, key_high = (key_low + 0x9E3779B9) & 0xFFFFFFFF, (key_high + 0xBB67AE85) & 0xFFFFFFFF
    words = torch.stack([x0, x1, x2, x3], dim=-1)
    words = torch.cat([words, _multiply(words, 0x10001)[1]], dim=-1).flatten(-2)[..., :keys]
    return (words >= math.floor(dropout_p * 2**32)).reshape(shape)


def attention_weight_sums(
    query: Tensor,
    key: Tensor,
    lse: Tensor,
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    alignment: str = "upper_left",
    softcap: float = 0.0,
    scale: float | None = None,
    last: int | None = None,
) -> Tensor:
    """The sum over the queries, or the last of them, of each key's weights exp(score - lse), [..., Hq, S] in float32."""
    headless = query.dim() == key.dim() == 2
    query, key, lse = (query[None], key[None], lse[None]) if headless else (query, key, lse)
    if scale is None:
        scale = 1 / math.sqrt(query.shape[-1]) if query.shape[-1] else 1.0
    scores = query @ key.repeat_interleave(query.shape[-3] // key.shape[-3], -3).transpose(-2, -1) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    seen = visible(*scores.shape[-2:], causal=causal, window=window, alignment=alignment, device=query.device)
    weights = torch.where(seen, torch.exp(scores.to(lse.dtype) - torch.where(lse == -INFINITY, INFINITY, lse)[..., None]), 0)
    begin = 0 if last is None else max(query.shape[-2] - last, 0)
    sums = weights[..., begin:, :].sum(-2).float()
    return sums.squeeze(0) if headless else sums


@overload
def float8_attention(
    query: Tensor, key: Tensor, value: Tensor, *, return_lse: Literal[False] = ..., **options: Any
) -> Tensor: ...
@overload
def float8_attention(
    query: Tensor, key: Tensor, value: Tensor, *, return_lse: Literal[True], **options: Any
) -> tuple[Tensor, Tensor]: ...
@overload
def float8_attention(
    query: Tensor, key: Tensor, value: Tensor, *, return_lse: bool, **options: Any
) -> Tensor | tuple[Tensor, Tensor]: ...
def float8_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    query_scale: Tensor | None = None,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
    smooth_keys: bool = True,
    scale: float | None = None,
    return_lse: bool = False,
    out_dtype: torch.dtype | None = None,
    **options: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """attention() in float64 of the operands that float8 leaves of query, key and value; `options` are its own.

    e4m3 inputs are multiplied by their scales, which broadcast to [..., Hkv]. Others, of any floating dtype, are rounded to
    multiples of a scale in e4m3, one scale for the finite numbers of a batch and key head; keys less their mean over the
    sequence with `smooth_keys`. Weights are not rounded.
    """
    if scale is None:
        scale = 1 / math.sqrt(query.shape[-1]) if query.shape[-1] else 1.0
    if query.dtype == torch.float8_e4m3fn:
        scales = (query_scale, key_scale, value_scale)
        q, k, v = (_times(t, s, query.shape[-3:-2]) for t, s in zip((query, key, value), scales, strict=True))
    else:
        heads = key.shape[-3] if key.dim() > 2 else 1
        groups = query.shape[-3] // heads if query.dim() > 2 and heads and query.shape[-3] % heads == 0 else 1
        product, k = torch.zeros(1), key.float()
        if smooth_keys and key.shape[-2]:
            mean = torch.where(k.isfinite(), k, 0).double().mean(-2, keepdim=True).float()
            each = mean.repeat_interleave(groups, -3) if key.dim() > 2 else mean
            product, k = (query.double() * each).sum(-1, keepdim=True), k - mean
        q = query.float()
        q = _in_float8(q.unflatten(-3, (-1, groups)), 3).flatten(-4, -3) if groups > 1 else _in_float8(q, 2)
        k, v = _in_float8(k, 2), _in_float8(value.float(), 2)
        # The product is one more column of the query, which meets a column of ones.
        rows = torch.broadcast_shapes(q.shape[:-1], product.shape[:-1])
        q = torch.cat([q.expand(*rows, -1), product.double().to(q.device).expand(*rows, 1)], -1)
        k = torch.cat([k, k.new_ones(*k.shape[:-1], 1)], -1)
    out, lse = attention(q, k, v, scale=scale, return_lse=True, **options)
    if out_dtype is None:
        out_dtype = torch.bfloat16 if query.dtype == torch.float8_e4m3fn else query.dtype
    return (out.to(out_dtype), lse.float()) if return_lse else out.to(out_dtype)


def _times(tensor: Tensor, scale: Tensor | None, heads: Sequence[int]) -> Tensor:
    """An e4m3 operand in float64, multiplied by its scale [..., Hkv], which each key head's queries share."""
    wide = tensor.float().double()
    if scale is None:
        return wide
    if scale.dim() and scale.shape[-1] not in (1, *tensor.shape[-3:-2]):  # the tensor is the query
        scale = scale.repeat_interleave(tensor.shape[-3] // scale.shape[-1], -1)
    return wide * scale.double()[..., None, None]


def _in_float8(tensor: Tensor, dims: int) -> Tensor:
    """A float32 tensor in float64, rounded to multiples of one scale in e4m3 for its last `dims` dimensions each."""
    last = tuple(range(-dims, 0))
    largest = torch.where(tensor.isfinite(), tensor.abs(), 0)
    largest = largest.amax(last, keepdim=True) if tensor.numel() else largest.sum(last, keepdim=True)
    scale = largest / 448
    multiple = (tensor / torch.where(scale == 0, 1, scale)).clamp(-448, 448).to(torch.float8_e4m3fn)
    return multiple.float().double() * scale.double()


def block_scores(
    query: Tensor,
    key: Tensor,
    size: tuple[int, int],
    *,
    causal: bool = False,
    reduce: str = "mean",
    scale: float | None = None,
) -> Tensor:
    """The mean or the largest of the scores between each block of size[0] queries and block of size[1] keys, [..., Hq, nq, nk];
    with `causal`, -inf where a block has no visible pair, and "max" takes visible pairs alone."""
    if scale is None:
        scale = 1 / math.sqrt(max(query.shape[-1], 1))
    scores = query @ key.repeat_interleave(query.shape[-3] // key.shape[-3], -3).transpose(-2, -1) * scale
    seen = visible(*scores.shape[-2:], causal=causal, device=query.device)
    if not scores.numel():
        counts = (-(-length // rows) for length, rows in zip(scores.shape[-2:], size, strict=True))
        return scores.new_zeros(*query.shape[:-2], *counts, dtype=torch.float32)
    rows = []
    for i in range(0, scores.shape[-2], size[0]):
        row = []
        for j in range(0, scores.shape[-1], size[1]):
            block, pairs = scores[..., i : i + size[0], j : j + size[1]], seen[i : i + size[0], j : j + size[1]]
            if reduce == "max":
                found = torch.where(pairs, block, -INFINITY).amax((-2, -1))
            else:
                found = torch.where(pairs.any(), block.mean((-2, -1)), -INFINITY)
            row.append(found)
        rows.append(torch.stack(row, -1))
    return torch.stack(rows, -2).to(accumulator_dtype(query.dtype))


def _multiply(x: Tensor, constant: int) -> tuple[Tensor, Tensor]:
    """The high and the low 32 bits of a product of 32-bit numbers. int64 overflows, but wraps to the bits of the product."""
    product = x * constant
    return (product >> 32) & 0xFFFFFFFF, product & 0xFFFFFFFF


def _positions(queries: int, keys: int, alignment: str, device) -> tuple[Tensor, Tensor]:
    offset = {"upper_left": 0, "lower_right": keys - queries}[alignment]
    return torch.arange(queries, device=device)[:, None] + offset, torch.arange(keys, device=device)


def _in_blocks(counts: Tensor, indices: Tensor, size: tuple[int, int], queries: int, keys: int) -> Tensor:
    """bool [..., queries, keys]: True where the block of a key is listed for the block of a query."""
    blocks = torch.arange(keys, device=indices.device) // size[1]
    read = torch.arange(indices.shape[-1], device=indices.device) < counts[..., None]
    listed = ((indices[..., None] == blocks) & read[..., None]).any(-2)  # [..., nq, keys]
    return listed[..., torch.arange(queries, device=indices.device) // size[0], :]


def _in_spans(spans: Tensor, length: int) -> Tensor:
    """bool [..., rows, length]: True where a position lies in one of the intervals of a row, spans [..., rows, 2 or 4]."""
    begins, ends = spans[..., 0::2, None], spans[..., 1::2, None]
    positions = torch.arange(length, device=spans.device)
    return ((begins <= positions) & (positions < ends)).any(-2)


def _largest(input: Tensor, dim: int) -> Tensor:
    # Softmax does not depend on the value subtracted from the scores, so its derivative may ignore that value: detach.
    return input.detach().amax(dim, keepdim=True)


def _pivot(scores: Tensor) -> Tensor:
    """The number that the exponents of a row are measured from: its maximum, or 0 where that is -inf (an empty row)."""
    if scores.shape[-1] == 0:
        return scores.new_zeros((*scores.shape[:-1], 1))
    largest = _largest(scores, -1)
    return torch.where(largest == -INFINITY, 0, largest)
