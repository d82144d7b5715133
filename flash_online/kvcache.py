"""Attention over cached keys, for inference: the public functions, and the calls of their operators."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple, TypedDict, overload

import torch
from torch import Tensor

from . import _checked, _policy
from ._autograd import without_derivative
from ._cache_arguments import (
    CACHE_NAMES,
    MANY_KEYS,
    NO_SCALES,
    RotaryEmbedding,
    Starts,
    Where,
    autocast_cached,
    check_call,
    check_new,
    check_no_gradient,
    check_numbers,
    check_out,
    check_pool,
    check_query,
    check_slots,
    check_splits,
    check_starts,
    check_writable,
    expand_scales,
    is_plain_place,
    note_write,
)
from ._canonicalize import (
    autocast,
    check_attention_options,
    check_longest,
    check_packed,
    check_types,
    longest_of,
    window_bounds,
)
from ._checks import check_float, check_tensor, is_traced_size, none_as_zero
from ._float8_cache import attend_in_float8, check_products
from ._ops import InvalidArgument, accumulator_of, below_autograd, direct_call, ops, surfaced
from ._plain import NUMBERS, are_plain, are_plain_numbers, is_compiling
from ._span_arguments import canonical_spans
from .attention import default_scale

if TYPE_CHECKING:
    from typing_extensions import Unpack

Rotary = Sequence[object]  # (cos, sin[, interleaved[, offsets]])


class _MaskKeywords(TypedDict, total=False):
    """The keywords that determine the keys that a query sees and its scores."""

    causal: bool
    window: tuple[int | None, int | None] | None
    softcap: float
    scale: float | None


class _VarlenKeywords(_MaskKeywords, total=False):
    """The keywords of varlen_attention."""

    alignment: str


class _Keywords(_MaskKeywords, total=False):
    """The keywords of kvcache_attention that do not change the type of the result, for type checkers."""

    key: Tensor | None
    value: Tensor | None
    block_table: Tensor | None
    cache_batch_idx: Tensor | None
    leftpad: Tensor | None
    cu_seqlens_q: Tensor | None
    max_seqlen_q: int | None
    cu_seqlens_new: Tensor | None
    rotary: Rotary | None
    key_scale: Tensor | None
    value_scale: Tensor | None
    float8_products: bool
    query_spans: Tensor | None
    alibi_slopes: Tensor | None
    sinks: Tensor | None
    num_splits: int | None
    out: Tensor | None


@overload
def kvcache_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    cache_seqlens: Tensor | int | None,
    *,
    return_lse: Literal[False] = ...,
    **options: Unpack[_Keywords],
) -> Tensor: ...
@overload
def kvcache_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    cache_seqlens: Tensor | int | None,
    *,
    return_lse: Literal[True],
    **options: Unpack[_Keywords],
) -> tuple[Tensor, Tensor]: ...
@overload
def kvcache_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    cache_seqlens: Tensor | int | None,
    *,
    return_lse: bool,
    **options: Unpack[_Keywords],
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
    rotary: Rotary | None = None,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
    float8_products: bool = False,
    causal: bool = True,
    window: tuple[int | None, int | None] | None = None,
    query_spans: Tensor | None = None,
    softcap: float | None = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    scale: float | None = None,
    num_splits: int | None = None,
    return_lse: bool = False,
    out: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact attention of new queries over each sequence's cached keys, for inference.

    A sequence has n_old = clamp(length, leftpad, capacity) keys. New keys are appended first, in place; keys past the capacity
    are dropped. With n keys then, query i of L is at i + n - L, and sees the keys from leftpad on that `causal` and `window`
    allow. No other memory of the cache reaches a result, whatever it holds, NaN included. Only the device reads lengths and
    tables, so a CUDA graph can be replayed with other values. Values out of range cause no invalid memory access, and are an
    error only inside `flash_online.checked()`. Autocast casts query and new keys to the cache's dtype.

    Args:
        query: `[B, Hq, L, E]`, or with `cu_seqlens_q` packed `[Tq, Hq, E]`; float16, bfloat16, float32 or float64 (CPU).
        key_cache: `[B, Hkv, S, E]`, or with `block_table` a pool of pages `[blocks, Hkv, page, E]`; any strides, any page size;
            of query's dtype, or float8_e4m3fn or float8_e5m2 if that has 16 bits. Hkv divides Hq. value_cache: same, width Ev.
        cache_seqlens: int32 `[B]`: number of keys before the new ones, leftpad included; an int for all; None: full caches.
        key: new keys `[B, Hkv, new, E]`, or with `cu_seqlens_new` packed `[Tnew, Hkv, E]`; value: new values, as key.
        block_table: int32 `[B, entries]`: the pages of each sequence. A page outside [0, blocks) is zeros, never written.
        cache_batch_idx: int32 `[B]`: the row of the cache, or of the table, of each sequence; its index if None.
        leftpad: int32 `[B]`: number of keys at the beginning of each sequence that all queries skip.
        cu_seqlens_q: int32 `[B + 1]`: starts of packed queries, at most max_seqlen_q per sequence; cu_seqlens_new: of new keys.
        rotary: (cos, sin[, interleaved[, offsets]]): cos and sin `[positions, width / 2]`, of query's dtype or float32,
            rotate the first `width` columns of new key i and query i by position n_old + i, or offsets[b] + i (int32 `[B]`);
            without causal and window all queries use the first position. Pairs are column i and i + width / 2, or neighbours if
            interleaved. Positions past the table use its last row. Without `key` only queries are rotated.
        key_scale: float32, broadcastable to `[B, Hkv]`: factor of the cached keys; appended keys are divided by it.
            value_scale: the same for values.
        float8_products: over float8_e4m3fn caches, multiply in float8 as `float8_attention` does. No alibi_slopes, num_splits.
        causal: as in `attention` with lower-right alignment, and so are `window`, `softcap`, `sinks`, `scale`, `return_lse`.
        query_spans: as in `attention`, or of packed queries; they count from the cache's first key, leftpad included.
        alibi_slopes: `[Hq]` or `[B, Hq]`, positive slopes.
        num_splits: number of pieces of a sequence's keys (at most its blocks of 64 keys), which are merged in order, so that
            neither batch nor pages change the bits. None and 0: the kernel chooses (on the CPU independently of the batch too).
        out: a tensor for the result, which must not share memory with query.

    Returns:
        out `[B, Hq, L, Ev]` or `[Tq, Hq, Ev]`, of query's dtype; 0 where a query sees nothing, and in padding rows. With
        `return_lse` also lse `[B, Hq, L]` or `[Hq, Tq]`, float32 (float64 for float64): there -inf, or the sink.

    Raises:
        InvalidArgument (a RuntimeError and ValueError): a tensor or option is not as above, or requires a gradient.
        NotImplementedError: the device has no kernel for this call.

    Source: FlashDecoding (Dao, Haziza, Massa, Sizov 2023); PagedAttention (arXiv 2309.06180).
    """
    softcap = none_as_zero(softcap)
    plain = key is value is cache_batch_idx is leftpad is cu_seqlens_q is max_seqlen_q is cu_seqlens_new is rotary is None
    plain = plain and key_scale is value_scale is alibi_slopes is sinks is out is query_spans is None
    plain = plain and return_lse is float8_products is False and causal is True and type(softcap) in NUMBERS and not softcap
    if plain:
        result = try_fast_path(query, key_cache, value_cache, cache_seqlens, block_table, window, scale, num_splits)
        if result is not None:
            return result
    tensors = {"query": query, "key_cache": key_cache, "value_cache": value_cache}
    optional = {"key": key, "value": value, "alibi_slopes": alibi_slopes, "sinks": sinks, "out": out, "key_scale": key_scale}
    optional |= {"value_scale": value_scale, "query_spans": query_spans}
    check_types(tensors, optional, {"causal": causal, "return_lse": return_lse, "float8_products": float8_products})
    check_attention_options(query, -3 if cu_seqlens_q is None else -2, window, "lower_right", softcap, sinks, alibi_slopes, 0.0)
    _policy.require_kernel("kvcache_attention", **tensors)
    check_no_gradient(tensors, optional)
    query, key, value = autocast_cached(key_cache, query, key, value)
    batch = check_call(query, key_cache, value_cache, cu_seqlens_q, CACHE_NAMES)
    where = Where.of(batch, query, key_cache, cache_seqlens, block_table, cache_batch_idx, leftpad)
    new = _check_appended(key, value, key_cache, value_cache, query, cu_seqlens_new, batch)
    starts, longest = Starts(cu_seqlens_q, None, cu_seqlens_new), _longest(query, max_seqlen_q)
    scales, embedding = expand_scales(key_scale, value_scale, batch, key_cache), RotaryEmbedding.of(rotary, query, batch)
    if float8_products:
        check_products(query, key_cache, value_cache, cu_seqlens_q, max_seqlen_q, alibi_slopes, num_splits, out)
    advance = causal or window is not None and tuple(window) != (None, None)
    _check_values(where, key_cache, query, key, starts, longest, embedding, advance, window)
    options = _Options(causal, window, softcap, alibi_slopes, sinks, scale, query_spans=_spans_of(query_spans, query, starts))
    query = _append(key_cache, value_cache, key, value, query, where, starts, scales, embedding, advance)
    call = (query, key_cache, value_cache, where, starts, longest, new, scales, options)
    return attend_in_float8(*call, return_lse, out) if float8_products else _attend(*call, num_splits, return_lse, out)


def try_fast_path(query, key_cache, value_cache, lengths, table, window, scale, num_splits) -> Tensor | None:
    """A step of decoding that appends nothing: one operator call, after tests that take a fifth of the time of all checks.
    Takes causal calls with caches of query's dtype and `lengths` in a tensor, None, or an int without a table: then no device
    has to be asked, as the cache ends there. Returns None for any other call: the caller then runs all checks.
    """
    if not are_plain("kvcache_attention", query, (key_cache, value_cache), True) or _checked.active:
        return None
    shape, key_shape, value_shape = query.shape, key_cache.shape, value_cache.shape
    if not len(shape) == len(key_shape) == len(value_shape) == 4:
        return None
    batch, heads, _, width = shape
    rows, key_heads, page, key_width = key_shape
    if key_shape != value_shape and value_shape[:3] != (rows, key_heads, page):
        return None
    if width != key_width or heads == 0 or key_heads == 0 or heads % key_heads:
        return None
    if type(lengths) is int and table is None and 0 <= lengths <= page:
        if lengths < page:
            key_cache, value_cache = key_cache[:, :, :lengths], value_cache[:, :, :lengths]
        lengths = None
    if not is_plain_place(lengths, table, query, batch, rows):
        return None
    left = -1
    if window is not None:
        if type(window) is not tuple or len(window) != 2:
            return None
        left, right = window
        if not (right is None or type(right) is int and right >= 0):  # causal hides keys on the right
            return None
        if left is None:
            left = -1
        elif type(left) is not int or not 0 <= left < MANY_KEYS:
            return None
    if num_splits is None:
        num_splits = 0
    elif type(num_splits) is not int or not 0 <= num_splits < MANY_KEYS:
        return None
    if scale is None:
        scale = _default_scale(width)
    elif type(scale) is not float:
        return None
    try:
        return _run_decode(query, key_cache, value_cache, lengths, table, left, scale, num_splits)
    except RuntimeError as error:
        raise surfaced(error, query) from None


_run_decode = below_autograd(ops.attention_decode)
_decode, _cached = direct_call(ops.attention_decode), direct_call(ops.attention_cached)
_cached_in_place, _cache_append = direct_call(ops.attention_cached_), direct_call(ops.cache_append_)
for _operator in (ops.attention_decode, ops.attention_cached, ops.attention_cached_, ops.cache_append_):
    without_derivative(_operator, "attention over cached keys is for inference")
_default_scale = functools.cache(default_scale)


def _check_appended(key, value, key_cache, value_cache, query, starts, batch) -> int:
    """Checks new keys and values; returns the maximal number of new keys per sequence."""
    if (key is None) != (value is None):
        raise InvalidArgument("key, value: expected both or none, got one of them")
    if key is None:
        if starts is not None:
            raise InvalidArgument("cu_seqlens_new: expected None without key, got starts")
        return 0
    if starts is not None:
        check_starts("cu_seqlens_new", starts, query, batch)
    check_new(key, value, key_cache, value_cache, query, batch if starts is None else None)
    check_writable("key_cache", key_cache), check_writable("value_cache", value_cache)
    return key.shape[2] if starts is None else key.shape[0]


def _longest(query: Tensor, max_seqlen_q: int | None) -> int:
    """The maximal number of queries per sequence, if they are packed."""
    longest = longest_of(query.shape[0] if max_seqlen_q is None else max_seqlen_q)
    check_longest("max_seqlen_q", longest)
    return longest


def _check_values(where, key_cache, query, key, starts, longest, embedding, advance, window) -> None:
    """Reads values on the device and checks them, inside `checked()`."""
    if not is_compiling() and _checked.active:
        left, _ = window or (None, None)
        _checked.check_cached(where, key_cache, query, key, starts.queries, longest, starts.new, embedding, advance, left)


def varlen_over_pools(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    block_table: Tensor | None,
    seqused_q: Tensor | None,
    seqused_k: Tensor | None,
    num_splits: int | None,
    out: Tensor | None,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    return_lse: bool,
    query_spans: Tensor | None,
    **options: Unpack[_VarlenKeywords],
) -> Tensor | tuple[Tensor, Tensor]:
    """varlen_attention over cached keys, as documented there. The caller has checked types and options."""
    _policy.require_kernel("kvcache_attention", query=query, key=key, value=value)
    named = {"query": query, "key": key, "value": value, "sinks": sinks, "out": out}
    if out is not None:
        check_tensor("out", out)
    check_no_gradient(named)
    reads, paged = not is_compiling() and _checked.active, block_table is not None
    if block_table is None:  # each packed key is a page of one row, and a sequence has the pages from its start on
        query, key, value = autocast(query, key, value)
        check_packed(query, key, value, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        if reads:
            rows = query.shape[0], key.shape[0]
            _checked.check_packed(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, *rows)
        key_pool, value_pool = key.unsqueeze(2), value.unsqueeze(2)
        longest = key.shape[0] if is_traced_size(key.shape[0]) else torch.sym_min(max_seqlen_k, key.shape[0])
        block_table = cu_seqlens_k[:-1, None] + torch.arange(longest, dtype=torch.int32, device=query.device)
    else:
        for name, pool in (("key", key), ("value", value)):
            if pool.dim() != 4:
                raise InvalidArgument(f"{name}: expected [blocks, page, heads, width] with block_table, got {list(pool.shape)}")
        check_longest("max_seqlen_q", max_seqlen_q), check_longest("max_seqlen_k", max_seqlen_k)
        (query,) = autocast_cached(key, query)
        key_pool, value_pool = key.transpose(1, 2), value.transpose(1, 2)
    batch = check_call(query, key_pool, value_pool, cu_seqlens_q, ("key", "value"))
    if cu_seqlens_k is None and seqused_k is None:
        raise InvalidArgument("cu_seqlens_k: expected starts without seqused_k, got None")
    if seqused_k is not None:
        check_numbers("seqused_k", seqused_k, query, batch)
        if reads and not paged:
            _checked.check_used("seqused_k", seqused_k, "cu_seqlens_k", cu_seqlens_k)
    lengths = seqused_k
    if cu_seqlens_k is not None:
        check_starts("cu_seqlens_k", cu_seqlens_k, query, batch)
        packed = cu_seqlens_k.diff()
        lengths = packed if seqused_k is None else seqused_k if paged else torch.minimum(seqused_k, packed)
    where = Where.of(batch, query, key_pool, lengths, block_table, None, None)
    if reads and paged:
        left, _ = options["window"] or (None, None)
        packing = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
        bound = left if options["alignment"] == "lower_right" else None
        _checked.check_pools(*packing, query, block_table, seqused_k, key_pool, bound)
    where = where._replace(lengths=where.lengths.clamp(max=torch.sym_min(max_seqlen_k, 2**31 - 1)))
    if seqused_q is not None:
        check_numbers("seqused_q", seqused_q, query, batch)
        if reads:
            _checked.check_used("seqused_q", seqused_q, "cu_seqlens_q", cu_seqlens_q)
        seqused_q = seqused_q.contiguous()
    starts = Starts(cu_seqlens_q, seqused_q, None)
    return _attend(
        query, key_pool, value_pool, where, starts, max_seqlen_q, 0, NO_SCALES,
        _Options(alibi_slopes=alibi_slopes, sinks=sinks, query_spans=_spans_of(query_spans, query, starts), **options),
        num_splits, return_lse, out,
    )  # fmt: skip


def _spans_of(spans: Tensor | None, query: Tensor, starts: Starts) -> Tensor | None:
    """query_spans as the operators take them: [1 or B, 1 or Hq, L, 2 or 4], or of packed queries [1 or Hq, Tq, 2 or 4]."""
    packed = starts.queries is not None
    leading, length = (query.shape[1:2], query.shape[0]) if packed else (query.shape[:2], query.shape[2])
    return canonical_spans("query_spans", spans, query, leading, length)


class _Options(NamedTuple):
    """Arguments of the public functions that, with the lengths, determine visible keys and scores."""

    causal: bool
    window: tuple[int | None, int | None] | None
    softcap: float
    alibi_slopes: Tensor | None
    sinks: Tensor | None
    scale: float | None
    alignment: str = "lower_right"
    query_spans: Tensor | None = None


def _attend(
    query, key_pool, value_pool, where, starts, longest, new, scales, options, num_splits, return_lse, out
) -> Tensor | tuple[Tensor, Tensor]:
    """Runs the operator; returns out, or (out, lse). A sequence has `longest` queries and `new` new keys at most."""
    alibi_slopes, sinks, accumulator = options.alibi_slopes, options.sinks, accumulator_of(query.dtype)
    batch = query.shape[0] if starts.queries is None else len(starts.queries) - 1
    if alibi_slopes is not None:
        shape = (batch, query.shape[1])
        if tuple(alibi_slopes.shape) not in (shape, shape[1:]):
            raise InvalidArgument(f"alibi_slopes: expected [{shape[1]}] or {list(shape)}, got {list(alibi_slopes.shape)}")
        alibi_slopes = alibi_slopes.to(accumulator).expand(shape)
    left, right = window_bounds(options.window or (None, None))
    right = 0 if options.causal else right
    scale = default_scale(query.shape[-1]) if options.scale is None else check_float("scale", options.scale)
    softcap, splits, lower_right = float(options.softcap), check_splits(num_splits), options.alignment == "lower_right"
    sinks = None if sinks is None else sinks.to(accumulator).contiguous()
    spans = options.query_spans
    if out is not None:
        check_out(out, query, value_pool.shape[-1])
    is_decode = where.left is where.rows is starts.queries is starts.used is starts.new is scales.key is scales.value is None
    is_decode = is_decode and alibi_slopes is sinks is out is spans is None and options.causal and lower_right
    is_decode = is_decode and not (new or softcap or return_lse)
    tensors = (query, key_pool, value_pool, *where, *starts, alibi_slopes, sinks, *scales)
    arguments = (*tensors, new, longest, left, right, lower_right, scale, softcap, splits, *(() if spans is None else (spans,)))
    try:
        if is_decode:
            return _decode(query, key_pool, value_pool, where.lengths, where.table, left, scale, splits)
        if out is None:
            out, lse = _cached(*arguments)
        else:
            lse = _cached_in_place(out, *arguments)
            note_write(out)
    except RuntimeError as error:
        raise surfaced(error, query) from None
    return (out, lse) if return_lse else out


class _AppendKeywords(TypedDict, total=False):
    """The keywords of cache_append that do not change the type of the result, for type checkers."""

    cache_seqlens: Tensor | int | None
    slots: Tensor | None
    block_table: Tensor | None
    cu_seqlens_new: Tensor | None
    rotary: Rotary | None
    key_scale: Tensor | None
    value_scale: Tensor | None


@overload
def cache_append(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    *,
    query: None = ...,
    **options: Unpack[_AppendKeywords],
) -> None: ...
@overload
def cache_append(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, *, query: Tensor, **options: Unpack[_AppendKeywords]
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
    rotary: Rotary | None = None,
    query: Tensor | None = None,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
) -> Tensor | None:
    """Writes new keys and values into a cache in place: at the ends of its sequences, or at slots.

    Args:
        key: `[B, Hkv, new, E]`, or with `cu_seqlens_new` or `slots` `[T, Hkv, E]`; float16, bfloat16, float32 or float64 (CPU).
        value: the same with width Ev.
        key_cache: as in `kvcache_attention`, and so are `value_cache`, `block_table`, `cu_seqlens_new`, and autocast; not an
            expanded tensor, as its rows would overwrite each other.
        cache_seqlens: int32 `[B]` or an int: row i of sequence b goes to position clamp(length, 0, capacity) + i; rows past the
            capacity are dropped. One of `cache_seqlens` and `slots` is needed.
        slots: int64 `[T]`: row t goes to row slots[t] % page of block slots[t] // page. Slots outside the pool are skipped.
        rotary: as in `kvcache_attention`; with slots, offsets are required: int32 `[T]`, the positions of the rows.
        query: `[B, Hq, L, E]`, or packed as key: rotated as the keys are, and returned.
        key_scale: float32, broadcastable to `[B, Hkv]`, with slots to `[T, Hkv]`: keys are divided by it. The quotient is
            rounded to the nearest, ties to even; in float8 caches it saturates, and NaN stays NaN.
        value_scale: the same for values.

    Returns:
        The rotated query, a new tensor; None without query.

    Raises:
        InvalidArgument (a RuntimeError and ValueError): a tensor is not as above, or requires a gradient outside
            `torch.no_grad()`.
        NotImplementedError: the device has no kernel for this call.

    Source: rotary embedding, RoFormer (arXiv 2104.09864).
    """
    if cu_seqlens_new is rotary is query is key_scale is value_scale is None:
        if _try_fast_append(key, value, key_cache, value_cache, cache_seqlens, slots, block_table):
            return None
    tensors = {"key": key, "value": value, "key_cache": key_cache, "value_cache": value_cache}
    optional = {"query": query, "key_scale": key_scale, "value_scale": value_scale}
    check_types(tensors, optional, {})
    _policy.require_kernel("cache_append", **tensors)
    check_no_gradient(tensors, optional)
    key, value, query = autocast_cached(key_cache, key, value, query)
    if (cache_seqlens is None) == (slots is None):
        raise InvalidArgument(f"cache_seqlens, slots: expected one of the two, got {'none' if slots is None else 'both'}")
    if query is not None and rotary is None:
        raise InvalidArgument("query: expected None without rotary, got a tensor to rotate")
    check_pool(key_cache, value_cache, key, "key")
    check_writable("key_cache", key_cache), check_writable("value_cache", value_cache)
    if slots is not None:
        if block_table is not None or cu_seqlens_new is not None:
            raise InvalidArgument("slots: expected no block_table or cu_seqlens_new with slots, got one")
        if rotary is not None and (len(rotary) < 4 or rotary[3] is None):
            raise InvalidArgument("rotary: expected offsets, the positions of the rows, with slots, got none")
        check_slots(slots, key)
        batch, where = len(slots), Where(None, None, None, None)
        check_new(key, value, key_cache, value_cache, key, None)
    else:
        packed = cu_seqlens_new is not None
        batch = check_starts("cu_seqlens_new", cu_seqlens_new, key) if packed else key.shape[0] if key.dim() else 0
        check_new(key, value, key_cache, value_cache, key, None if packed else batch)
        where = Where.of(batch, key, key_cache, cache_seqlens, block_table, None, None)
    if query is not None:
        starts = slots if slots is not None else cu_seqlens_new
        check_query(query, key_cache, starts)
        if query.dtype != key.dtype or query.device != key.device or query.shape[0] != key.shape[0]:
            raise InvalidArgument(
                f"query: expected what fits key {list(key.shape)} {key.dtype}, got {list(query.shape)} {query.dtype}"
            )
    scales, embedding = expand_scales(key_scale, value_scale, batch, key_cache), RotaryEmbedding.of(rotary, key, batch)
    if not is_compiling() and _checked.active:
        if slots is not None:
            _checked.check_slots(slots, key_cache, embedding)
        else:
            _checked.check_cached(where, key_cache, query, key, cu_seqlens_new, None, cu_seqlens_new, embedding)
    starts = Starts(None if query is None else cu_seqlens_new, None, cu_seqlens_new)
    return _append(key_cache, value_cache, key, value, query, where, starts, scales, embedding, True, slots)


def _try_fast_append(key, value, key_cache, value_cache, lengths, slots, table) -> bool:
    """Writes plain rows with one operator call, as `try_fast_path` does for attention. Returns False if nothing was done."""
    if not are_plain("cache_append", key, (value, key_cache, value_cache), True) or _checked.active:
        return False
    shape, value_shape, cache_shape, value_cache_shape = key.shape, value.shape, key_cache.shape, value_cache.shape
    rank = 4 if slots is None else 3
    if not (len(shape) == len(value_shape) == rank and len(cache_shape) == len(value_cache_shape) == 4):
        return False
    if shape != value_shape and shape[:-1] != value_shape[:-1] or shape[1] != cache_shape[1]:
        return False
    if cache_shape != value_cache_shape and cache_shape[:-1] != value_cache_shape[:-1]:
        return False
    if shape[-1] != cache_shape[-1] or value_shape[-1] != value_cache_shape[-1]:
        return False
    if key_cache.is_neg() or value_cache.is_neg() or 0 in key_cache.stride() or 0 in value_cache.stride():
        return False  # check_writable decides
    if slots is None:
        if lengths is None or not is_plain_place(lengths, table, key, shape[0], cache_shape[0]):
            return False
    elif not (lengths is table is None and are_plain_numbers(slots, key, 1, _INT64) and slots.shape[0] == shape[0]):
        return False
    try:
        _run_append(key_cache, value_cache, key, value, None, lengths, None, None, table, slots, *_NO_ROTARY)
    except RuntimeError as error:
        raise surfaced(error, key_cache) from None
    note_write(key_cache, value_cache)
    return True


_run_append, _INT64 = below_autograd(ops.cache_append_), torch.int64
_NO_ROTARY = (None,) * 7 + (False, True)  # nor scales; in the order of `_append`


def _append(key_cache, value_cache, key, value, query, where, starts, scales, embedding, advance, slots=None) -> Tensor | None:
    """Runs the operator, if there is something to do; returns the query, rotated if there is an embedding."""
    if key is embedding is None:
        return query
    rotates = query is not None and embedding is not None
    cosines, sines, interleaved, offsets = embedding or (None, None, False, None)
    try:
        rotated = _cache_append(
            *(key_cache, value_cache, key, value, query if rotates else None, *where, slots, starts.new, starts.queries),
            *(cosines, sines, offsets, *scales, interleaved, advance),
        )
    except RuntimeError as error:
        raise surfaced(error, key_cache) from None
    if key is not None:
        note_write(key_cache, value_cache)
    return rotated if rotates else query
