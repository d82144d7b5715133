"""Attention of sequences sharded over ranks: the public functions, and the choice of a method."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, overload

import torch
import torch.distributed as dist
from torch import Tensor

from .._attention_arguments import AttentionOptions
from .._autograd import differentiable, is_traced
from .._block_arguments import tiles_of_blocks
from .._canonicalize import (
    canonicalize,
    cast_and_check,
    check_attention,
    check_longest,
    check_packed,
    expand_sinks,
    expand_slopes,
    window_bounds,
)
from .._checks import none_as_zero
from .._ops import InvalidArgument, accumulator_of, below_autograd, ops
from .._span_arguments import canonical_spans
from ..attention import (
    Attention,
    AttentionKeywords,
    SpanKeywords,
    attention_impl,
    default_scale,
    is_deterministic,
    results_of,
    tf32_for,
)
from ..blocks import BlockList, check_blocks
from ..varlen import varlen_impl
from ._agreement import checked_on_all_ranks, numbered
from ._gathered import Gathered, GatheredCall, groups_of
from ._group import Group, group_of, max_of_ranks
from ._layout import check_layout
from ._ulysses import PerHead, head_groups, plan_heads, ulysses
from ._ulysses_eager import EagerCall, takes, ulysses_eager

if TYPE_CHECKING:
    from typing_extensions import Unpack

METHODS = ("auto", "ulysses", "gathered")


class _Keywords(AttentionKeywords, SpanKeywords, total=False):
    """Keywords of both functions that do not change the return type, for type checkers."""

    group: dist.ProcessGroup | dist.DeviceMesh | None
    method: str
    layout: str


class _DenseKeywords(_Keywords, total=False):
    """Keywords of context_parallel_attention."""

    blocks: BlockList | None


class _PackedKeywords(_Keywords, total=False):
    """Keywords of context_parallel_varlen_attention."""

    max_seqlen: int | None


@overload
def context_parallel_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    return_lse: Literal[False] = ...,
    return_max_logit: Literal[False] = ...,
    **options: Unpack[_DenseKeywords],
) -> Tensor: ...
@overload
def context_parallel_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    return_lse: Literal[True],
    return_max_logit: Literal[False] = ...,
    **options: Unpack[_DenseKeywords],
) -> tuple[Tensor, Tensor]: ...
@overload
def context_parallel_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    return_lse: Literal[False] = ...,
    return_max_logit: Literal[True],
    **options: Unpack[_DenseKeywords],
) -> tuple[Tensor, Tensor]: ...
@overload
def context_parallel_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    return_lse: Literal[True],
    return_max_logit: Literal[True],
    **options: Unpack[_DenseKeywords],
) -> tuple[Tensor, Tensor, Tensor]: ...
@overload
def context_parallel_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    return_lse: bool,
    return_max_logit: Literal[False] = ...,
    **options: Unpack[_DenseKeywords],
) -> Tensor | tuple[Tensor, Tensor]: ...
@overload
def context_parallel_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    return_lse: bool = ...,
    return_max_logit: bool,
    **options: Unpack[_DenseKeywords],
) -> Tensor | tuple[Tensor, ...]: ...
def context_parallel_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    group: dist.ProcessGroup | dist.DeviceMesh | None = None,
    method: str = "auto",
    layout: str = "zigzag",
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    alignment: str = "upper_left",
    query_spans: Tensor | None = None,
    key_spans: Tensor | None = None,
    blocks: BlockList | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    scale: float | None = None,
    return_lse: bool = False,
    return_max_logit: bool = False,
    deterministic: bool | None = None,
) -> Tensor | tuple[Tensor, ...]:
    """Exact self-attention of a sequence that is sharded over ranks: each rank passes its rows and gets its rows of `attention`
    of the whole sequence. Out and lse are bit-equal to one process's.

    Every rank of the group calls it, with its rows from `shard`. Positions are positions in the whole sequence.

    Args:
        query: `[..., Hq, n, E]`, n = L / ranks rows of the sequence; float16, bfloat16, float32 or float64; any strides.
        key: `[..., Hk, n, E]`, as in `attention`, with query's number of rows. value: `[..., Hv, n, Ev]`.
        group: a ProcessGroup, a DeviceMesh of one dimension, or None for the default group.
        method: "ulysses" exchanges rows of all heads for all rows of some heads, and back; the ranks need not divide the heads.
            "gathered" gathers all keys and values on every rank, a group of key heads at a time. "auto" uses Ulysses unless it
            receives many more bytes (docs/distributed.md has the rule).
        layout: "zigzag" (n is even) or "contiguous", the layout of `shard`.
        causal: as in `attention`, like window, alignment (both agree for equal lengths), softcap, alibi_slopes, scale,
            return_lse and return_max_logit. Slopes and sinks have all Hq heads, and the same values on all ranks.
        query_spans: as in `attention`, but of the whole sequence, `[..., 1 or Hq, L, 2 or 4]`, the same on all ranks; key_spans
            too.
        blocks: as in `attention`, of the whole sequence and all heads, the same on all ranks. By Ulysses.
        sinks: `[Hq]`. Its gradient is this rank's part, to be summed over the ranks like any weight gradient.
        dropout_p: 0: dropout is not supported.
        deterministic: as in `attention`.

    Returns:
        out `[..., Hq, n, Ev]`, this rank's rows, in query's dtype and order of strides. With `return_lse` also lse
        `[..., Hq, n]`, and with `return_max_logit` last max_logit `[..., Hq]` of the whole sequence. With
        `deterministic=True` Ulysses gradients are bit-equal to one process's: of query always, of key and value if the ranks
        divide Hk and Hv. Other gradients of key and value are sums over ranks in float32. Ulysses has second derivatives;
        gathered keys have first derivatives only.

    Raises:
        InvalidArgument (a RuntimeError and ValueError): an argument is invalid, or the ranks' calls differ (shapes, dtypes,
            options, what requires a gradient). All ranks raise it, even if only one is wrong; over NCCL one call late, or in
            the backward pass, and then at every later call on the group. A rank whose own argument is invalid raises at once.
        RuntimeError: a rank makes no call: a rank that waits for it ends at the group's timeout.
        NotImplementedError: the device has no kernel for this call; or a second derivative with gathered keys.

    Backward passes communicate too: every rank runs them, in the same order. The ranks' calls are not compared under
    torch.compile, nor when a CUDA graph is replayed.

    Source: Ulysses, arXiv 2309.14509; gathered keys, as in Llama 3, arXiv 2407.21783; compare ring attention, arXiv 2310.01889.
    """
    found = group_of(group)
    options = {"causal": causal, "window": window, "alignment": alignment, "softcap": none_as_zero(softcap), "scale": scale}
    options |= {"alibi_slopes": alibi_slopes, "sinks": sinks, "dropout_p": dropout_p}
    options |= {"return_lse": return_lse, "return_max_logit": return_max_logit, "deterministic": deterministic}
    options |= {"query_spans": query_spans, "key_spans": key_spans}

    def check():
        check_attention(query, key, value, None, -3, **options)
        _check_options(method, layout, dropout_p)
        check_blocks(blocks)
        if blocks is not None and method == "gathered":
            raise InvalidArgument("blocks: expected None with method='gathered', where a rank's rows may cut blocks, got one")
        q, k, v, _, restore = canonicalize(*cast_and_check("attention", query, key, value, None, dropout_p))
        slopes = None if alibi_slopes is None else expand_slopes(alibi_slopes, q.shape[:-2]).flatten(0, -2)
        _check_rows(q.shape[-2], k.shape[-2], layout)
        length = q.shape[-2] * found.ranks
        sparsity = [
            *_whole_spans(q, q.shape[:-2], length, query_spans, key_spans),
            tiles_of_blocks(blocks, q, q.shape[:-2], length, length),
        ]
        told = options if blocks is None else options | blocks._asdict()
        described = _described("context_parallel_attention", query, key, value, method, layout, told)
        return described, (q, k, v, slopes, sparsity, restore)

    q, k, v, slopes, sparsity, restore = checked_on_all_ranks(found, check)
    batch = q.shape[:-3]
    if len(batch) > 1:
        q, k, v = (tensor.flatten(0, -4) for tensor in (q, k, v))
        sparsity = [None if one is None else _flat_batch(one, batch) for one in sparsity]
    results = _run(found, q, k, v, slopes, sparsity, None, 0, method if blocks is None else "ulysses", layout, options)
    if len(batch) > 1:
        results = [None if result is None else result.unflatten(0, batch) for result in results]
    return results_of(*(None if result is None else restore(result) for result in results))


@overload
def context_parallel_varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    *,
    return_lse: Literal[False] = ...,
    return_max_logit: Literal[False] = ...,
    **options: Unpack[_PackedKeywords],
) -> Tensor: ...
@overload
def context_parallel_varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    *,
    return_lse: Literal[True],
    return_max_logit: Literal[False] = ...,
    **options: Unpack[_PackedKeywords],
) -> tuple[Tensor, Tensor]: ...
@overload
def context_parallel_varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    *,
    return_lse: Literal[False] = ...,
    return_max_logit: Literal[True],
    **options: Unpack[_PackedKeywords],
) -> tuple[Tensor, Tensor]: ...
@overload
def context_parallel_varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    *,
    return_lse: Literal[True],
    return_max_logit: Literal[True],
    **options: Unpack[_PackedKeywords],
) -> tuple[Tensor, Tensor, Tensor]: ...
@overload
def context_parallel_varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    *,
    return_lse: bool,
    return_max_logit: Literal[False] = ...,
    **options: Unpack[_PackedKeywords],
) -> Tensor | tuple[Tensor, Tensor]: ...
@overload
def context_parallel_varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    *,
    return_lse: bool = ...,
    return_max_logit: bool,
    **options: Unpack[_PackedKeywords],
) -> Tensor | tuple[Tensor, ...]: ...
def context_parallel_varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    *,
    group: dist.ProcessGroup | dist.DeviceMesh | None = None,
    method: str = "auto",
    layout: str = "contiguous",
    max_seqlen: int | None = None,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    alignment: str = "lower_right",
    query_spans: Tensor | None = None,
    key_spans: Tensor | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    scale: float | None = None,
    return_lse: bool = False,
    return_max_logit: bool = False,
    deterministic: bool | None = None,
) -> Tensor | tuple[Tensor, ...]:
    """Exact self-attention of documents packed into one stream that is sharded over ranks: each rank passes its rows and gets
    its rows of `varlen_attention` of the whole stream, bit-equal. Documents may be cut anywhere, and be empty.

    Args:
        query: `[n, Hq, E]`, n = T / ranks rows of the stream; float16, bfloat16, float32 or float64; any strides.
        key: `[n, Hk, E]`, as in `varlen_attention`. value: `[n, Hv, Ev]`.
        cu_seqlens: int32 `[documents + 1]` on query's device, ascending from 0: the first row of each document in the whole
            stream, the same on all ranks. Only the device reads it. Rows past `cu_seqlens[-1]` are padding, and get 0.
        group: as in `context_parallel_attention`, like method and layout. "contiguous": a rank's rows are adjacent in the
            stream.
        max_seqlen: at least the length of the longest document; None: the stream's length. A tight bound is faster.
        causal: as in `varlen_attention`, like window, alignment (both agree for equal lengths), softcap, scale, return_lse
            and return_max_logit. alibi_slopes: `[Hq]` or `[documents, Hq]`.
        query_spans: as in `varlen_attention`, of the whole stream, `[T, 2 or 4]` or `[1 or Hq, T, 2 or 4]`; key_spans too.
        sinks: as in `context_parallel_attention`, like dropout_p and deterministic.

    Returns:
        out `[n, Hq, Ev]`, this rank's rows, in query's dtype and order of strides. With `return_lse` also lse `[Hq, n]`, and
        with `return_max_logit` last max_logit `[documents, Hq]` of whole documents.
        Gradients are as in `context_parallel_attention`.

    Raises:
        InvalidArgument (a RuntimeError and ValueError): as in `context_parallel_attention`, on all ranks.
        NotImplementedError: likewise.

    Source: as in context_parallel_attention; a rank's chunk of a packed stream attends to its documents' keys as in Llama 3.
    """
    found = group_of(group)
    options = {"causal": causal, "window": window, "alignment": alignment, "softcap": none_as_zero(softcap), "scale": scale}
    options |= {"alibi_slopes": alibi_slopes, "sinks": sinks, "dropout_p": dropout_p}
    options |= {"return_lse": return_lse, "return_max_logit": return_max_logit, "deterministic": deterministic}
    options |= {"query_spans": query_spans, "key_spans": key_spans}

    def check():
        check_attention(query, key, value, None, -2, **options)
        _check_options(method, layout, dropout_p)
        q, k, v, _ = cast_and_check("varlen_attention", query, key, value, None, dropout_p)
        try:
            check_packed(q, k, v, cu_seqlens, cu_seqlens, 0, 0)
        except InvalidArgument as error:
            raise InvalidArgument(str(error).replace("cu_seqlens_q", "cu_seqlens")) from None
        if max_seqlen is not None:
            check_longest("max_seqlen", max_seqlen)
        slopes = None
        if alibi_slopes is not None:
            slopes = expand_slopes(alibi_slopes, (cu_seqlens.shape[0] - 1, q.shape[1]))
        _check_rows(q.shape[0], k.shape[0], layout)
        spans = _whole_spans(q, q.shape[1:2], q.shape[0] * found.ranks, query_spans, key_spans)
        more = {"max_seqlen": max_seqlen, "cu_seqlens": f"{list(cu_seqlens.shape)} on {cu_seqlens.device.type}"}
        if cu_seqlens.is_cpu and not torch.compiler.is_compiling():
            more["cu_seqlens"] += f" {hash(tuple(cu_seqlens.tolist()))}"  # on CUDA reading it would wait for the GPU
        description = _described("context_parallel_varlen_attention", query, key, value, method, layout, options)
        return description | more, (q, k, v, slopes, spans)

    q, k, v, slopes, spans = checked_on_all_ranks(found, check)
    length = q.shape[0] * found.ranks
    longest = length if max_seqlen is None else min(max_seqlen, length)
    return results_of(*_run(found, q, k, v, slopes, spans, cu_seqlens.contiguous(), longest, method, layout, options))


# --- Checks -----------------------------------------------------------------------------------------------------------------


def _check_options(method, layout, dropout_p) -> None:
    if dropout_p > 0:
        raise InvalidArgument(f"dropout_p: expected 0 (no dropout) over several ranks, got {dropout_p}")
    if method not in METHODS:
        raise InvalidArgument(f"method: expected 'auto', 'ulysses' or 'gathered', got {method!r}")
    check_layout(layout)


def _check_rows(queries: int, keys: int, layout: str) -> None:
    if keys != queries:
        raise InvalidArgument(f"key: expected query's {queries} rows (self-attention over ranks), got {keys}")
    if layout == "zigzag" and queries % 2:
        raise InvalidArgument(f"query: expected an even number of rows per rank (two chunks) in a zigzag layout, got {queries}")


def _whole_spans(query: Tensor, leading, length: int, query_spans, key_spans) -> list[Tensor | None]:
    """query_spans and key_spans of the whole sequence, as the operators take them."""
    given = {"query_spans": query_spans, "key_spans": key_spans}
    return [canonical_spans(name, spans, query, leading, length) for name, spans in given.items()]


def _flat_batch(spans: Tensor, batch: Sequence[int]) -> Tensor:
    """Spans, or tiles, of several batch dimensions with one, of size 1 if all sequences share them."""
    shared = all(size == 1 for size in spans.shape[:-3])
    return (spans if shared else spans.expand(*batch, *spans.shape[-3:])).flatten(0, -4)


def _described(function: str, query, key, value, method: str, layout: str, options: dict[str, Any]) -> dict[str, Any]:
    """The values that all ranks must agree on, by argument."""
    described: dict[str, Any] = {"function": function}
    enabled = torch.is_grad_enabled()
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        gradient = ", requires grad" if enabled and tensor.requires_grad else ""
        described[name] = f"{list(tensor.shape)} {tensor.dtype} on {tensor.device.type}{gradient}"
    described |= {"method": method, "layout": layout}
    for name, option in options.items():
        described[name] = f"{list(option.shape)} {option.dtype}" if isinstance(option, Tensor) else repr(option)
    described["autocast"] = torch.is_autocast_enabled(query.device.type) if query.device.type in ("cpu", "cuda") else False
    described["deterministic algorithms"] = torch.are_deterministic_algorithms_enabled()
    return described


# --- The choice of a method, and its run ------------------------------------------------------------------------------------


class Cost(NamedTuple):
    """Bytes per rank and call: received from other ranks, and held in addition to inputs and results."""

    received: int
    held: int


def costs(query: Tensor, key: Tensor, value: Tensor, ranks: int, train: bool) -> dict[str, Cost]:
    """Costs of each method for rows-first tensors [n, batch, heads, width], with the backward pass if `train`."""
    rows = query.shape[0] * query.shape[1]
    size, wide = query.element_size(), accumulator_of(query.dtype).itemsize
    plan = plan_heads(query.shape[2], key.shape[2], value.shape[2], 0, ranks)
    heads = [max(end - begin for begin, end in split) for split in (plan.query, plan.key, plan.value)]
    width, width_v = query.shape[3], value.shape[3]
    exchanged = rows * size * (heads[0] * (width + width_v) + heads[1] * width + heads[2] * width_v)
    both = key.shape[2] * width + value.shape[2] * width_v
    gathered, groups = rows * both * size, groups_of(key, value, ranks * query.shape[0])
    summed = rows * both * wide
    passes = 2 if train else 1
    return {
        "ulysses": Cost(passes * (ranks - 1) * exchanged, ranks * exchanged),
        "gathered": Cost(
            (ranks - 1) * (passes * gathered + (summed if train else 0)),
            min(2, groups) * ranks * (gathered + (summed if train else 0)) // groups,
        ),
    }


def choose(query: Tensor, key: Tensor, value: Tensor, group: Group, layout: str, causal: bool, train: bool) -> str:
    """The method that "auto" uses, the same on every rank. docs/distributed.md has the rule."""
    if query.shape[2] % group.ranks:
        return "gathered"  # with Ulysses some ranks would have more heads than other ranks, or none
    if causal and layout == "contiguous":
        return "ulysses"  # with gathered keys the last rank would have almost twice the mean work
    cost = costs(query, key, value, group.ranks, train)
    # On two H100s Ulysses is 2 to 6 % faster even when it receives 1.25 times as many bytes: it calls attention once.
    return "ulysses" if cost["ulysses"].received * 10 <= cost["gathered"].received * 13 else "gathered"


@functools.lru_cache(maxsize=256)
def _chosen(shapes: tuple, dtype: torch.dtype, ranks: int, layout: str, causal: bool, train: bool) -> str:
    """`choose` for tensors of these shapes, [B, H, n, E] or [n, H, E]."""
    tensors = [torch.empty(shape, dtype=dtype, device="meta") for shape in shapes]
    return choose(*map(_rows_first, tensors), Group("", 0, ranks), layout, causal, train)


def _rows_first(tensor: Tensor) -> Tensor:
    """[n, B, H, E]"""
    return tensor.permute(2, 0, 1, 3) if tensor.dim() == 4 else tensor.unsqueeze(1)


def _mean_keys(length: int, left: int, right: int) -> int:
    """About how many keys a row of a sequence of this length sees, on average; a bound below 0 is none."""
    seen = [length // 2 if bound < 0 else min(bound, length // 2) for bound in (left, right)]
    return max(sum(seen), 1)


def _run(group: Group, q, k, v, slopes, sparsity, starts, longest: int, method: str, layout: str, options: dict[str, Any]):
    """(out, lse or None, max_logit or None) of tensors [B, H, n, E]; or [n, H, E] of a packed stream, of which `starts` is
    cu_seqlens, else None."""
    group = numbered(group)
    accumulator, packed = accumulator_of(q.dtype), starts is not None
    slopes = None if slopes is None else slopes.to(accumulator)
    sinks = expand_sinks(options["sinks"], q.shape[1])
    sinks = None if sinks is None else sinks.to(accumulator).contiguous()
    left, right = window_bounds(options["window"] or (None, None))
    right = 0 if options["causal"] else right
    scale = default_scale(q.shape[-1]) if options["scale"] is None else float(options["scale"])
    shared = AttentionOptions(left, right, packed, scale, float(options["softcap"]), 0.0, tf32_for(q))
    deterministic = is_deterministic(options["deterministic"])
    if method == "auto":
        train = torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v))
        if is_traced():
            method = choose(*map(_rows_first, (q, k, v)), group, layout, options["causal"], train)
        else:
            method = _chosen((q.shape, k.shape, v.shape), q.dtype, group.ranks, layout, options["causal"], train)
    if method == "gathered":
        spans = sparsity[:2]
        has_spans = any(one is not None for one in spans)
        call = GatheredCall(
            *(group, layout, shared._replace(lower_right=True), deterministic, packed, longest, has_spans),
            options["return_max_logit"],
        )
        out, lse, max_logit = Gathered.apply(call, *map(_rows_first, (q, k, v)), slopes, sinks, starts, *spans)
        out, lse = (out.squeeze(1), lse.squeeze(1).T) if packed else (out.permute(1, 2, 0, 3), lse.permute(1, 2, 0))
        return out, lse if options["return_lse"] else None, max_logit
    # The kernels of packed sequences are as fast with one group.
    count = 1 if packed else head_groups(q, k, v, group.ranks, _mean_keys(q.shape[2] * group.ranks, left, right))
    others = PerHead(slopes, sinks, *sparsity)
    if count == 1 and not options["return_max_logit"] and takes(group, q, k, v, starts, *others):
        shared = shared._replace(deterministic=deterministic)
        call = EagerCall(group, layout, shared, deterministic, packed, longest, options["return_lse"])
        return *ulysses_eager(call, q, k, v, others, starts), None
    is_plain = all(one is None for one in sparsity)
    operator = _claimed_tiles if count > 1 and is_plain and _is_static(q, left if left >= 0 else None) else None
    keywords = {"causal": options["causal"], "window": options["window"] or (None, None), "scale": scale}
    keywords |= {"softcap": float(options["softcap"]), "deterministic": deterministic, "lower_right": packed}
    keywords["return_max_logit"] = options["return_max_logit"]
    max_logits: list[Tensor] = []  # of this rank's heads, in order

    def attend(query, key, value, own: PerHead):
        words = keywords | own._asdict()
        if packed:
            rows = (tensor.squeeze(0).transpose(0, 1) for tensor in (query, key, value))
            del words["tiles"]
            out, lse, max_logit = varlen_impl(*rows, starts, starts, longest, longest, **words)
            out, lse = out.transpose(0, 1).unsqueeze(0), lse.unsqueeze(0)
        else:
            words |= {"return_lse": options["return_lse"], "operator": operator}
            out, lse, max_logit = attention_impl(query, key, value, None, **words)
        if max_logit is not None:
            max_logits.append(max_logit)
        return out, lse if options["return_lse"] else None  # do not exchange an lse that is not returned

    if packed:
        q, k, v = (tensor.transpose(0, 1).unsqueeze(0) for tensor in (q, k, v))
    out, lse = ulysses(q, k, v, others, group, layout, count, attend)
    max_logit = None
    if max_logits:
        (begin, _), heads = plan_heads(*(t.shape[1] for t in (q, k, v)), group.rank, group.ranks).query[group.rank], q.shape[1]
        max_logit = max_of_ranks(torch.cat(max_logits, -1), begin, heads, group)
    if packed:
        out, lse = out.squeeze(0).transpose(0, 1), None if lse is None else lse.squeeze(0)
    return out, lse, max_logit


# --- Attention while collectives run ----------------------------------------------------------------------------------------


def _is_static(query: Tensor, left: int | None) -> bool:
    """Whether the dense forward kernel gives each CTA a fixed share of the tiles (on Hopper), while packed sequences let CTAs
    claim tiles. CTAs on an SM that NCCL occupies for a while start late and finish late. Narrow windows have other tiles."""
    narrow = 512
    if not query.is_cuda or query.shape[0] != 1 or query.element_size() != 2 or (left is not None and left <= narrow):
        return False
    return torch.cuda.get_device_capability(query.device) == (9, 0)


def _by_claimed_tiles(query, key, value, mask, alibi_slopes, sinks, rng, query_spans, key_spans, tiles, options):
    """attention_forward of one sequence, using the packed forward pass. Bit-equal. There are no mask, spans and tiles."""
    length = query.shape[2]
    starts = torch.arange(0, 2 * length, length, dtype=torch.int32, device=query.device)  # no copy from the host
    rows_first = (tensor.squeeze(0).transpose(0, 1) for tensor in (query, key, value))
    tensors = (*rows_first, starts, starts, alibi_slopes, sinks, rng)
    out, lse, lse_low = _run_varlen(*tensors, length, length, *options)
    return out.transpose(0, 1).unsqueeze(0), lse.unsqueeze(0), lse_low.unsqueeze(0)


_run_varlen = below_autograd(ops.attention_varlen_forward)
_claimed_tiles = differentiable(Attention, _by_claimed_tiles)
