"""Attention over cached keys that groups of sequences share; each group's keys are read once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple, TypedDict, overload

from torch import Tensor

from . import _policy
from ._checks import check_tensor
from ._ops import InvalidArgument, ops
from .kvcache import kvcache_attention

if TYPE_CHECKING:
    from typing_extensions import Unpack


class CascadeLevel(NamedTuple):
    """The keys of one level of `cascade_attention`: which queries share them, and where they are stored.

    Attributes:
        cu_seqlens_q: int32 `[groups + 1]`, ascending: group g has the query rows from `cu_seqlens_q[g]` up to
            `cu_seqlens_q[g + 1]`.
        block_table: int32 `[groups, entries]`: the pages of each group's keys; a page outside [0, blocks) is zeros.
        cache_seqlens: int32 `[groups]`: number of keys of each group, 0 or more; an int for all groups.
        max_seqlen_q: at least the rows of the largest group; a group's rows beyond it have no keys in this level. None: all
            rows of the query. The kernel is chosen by it, so a tight bound is faster.
    """

    cu_seqlens_q: Tensor
    block_table: Tensor
    cache_seqlens: Tensor | int
    max_seqlen_q: int | None = None


class _Keywords(TypedDict, total=False):
    """The keywords of cascade_attention that do not change the type of the result, for type checkers."""

    key_scale: Tensor | None
    value_scale: Tensor | None
    causal: bool
    softcap: float
    sinks: Tensor | None
    scale: float | None
    num_splits: int | None


@overload
def cascade_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    levels: Sequence[CascadeLevel],
    *,
    return_lse: Literal[False] = ...,
    **options: Unpack[_Keywords],
) -> Tensor: ...
@overload
def cascade_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    levels: Sequence[CascadeLevel],
    *,
    return_lse: Literal[True],
    **options: Unpack[_Keywords],
) -> tuple[Tensor, Tensor]: ...
@overload
def cascade_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    levels: Sequence[CascadeLevel],
    *,
    return_lse: bool,
    **options: Unpack[_Keywords],
) -> Tensor | tuple[Tensor, Tensor]: ...
def cascade_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    levels: Sequence[CascadeLevel],
    *,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
    causal: bool = True,
    softcap: float | None = 0.0,
    sinks: Tensor | None = None,
    scale: float | None = None,
    num_splits: int | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact attention of packed queries over cached keys, with prefixes that groups of sequences share, for inference.

    A level holds keys that groups of neighbouring queries share: the first level, for example, a common prompt, the last one
    the keys of each sequence. A query sees the keys of its group in every level, in the last level only those that `causal`
    allows, where query i of a group of L over n keys is at i + n - L, as in `kvcache_attention`. The result equals attention
    over the concatenated keys of all levels, if the last level holds the keys of the queries themselves. The queries of a group
    form one problem, which reads the group's keys once for many of them.

    Only the device reads lengths, tables and groups, so a CUDA graph can be replayed with other values, and any values are
    safe. Append new keys first (`cache_append`). There is no window and no ALiBi: the visible part of a prefix would depend on
    the number of keys after it, which differs within a group. For both, use `kvcache_attention` with tables that repeat the
    prefix's pages.

    Args:
        query: packed `[Tq, Hq, E]`; float16, bfloat16, float32 or float64 (CPU). One row per sequence in a step of decoding.
        key_cache: a pool of pages `[blocks, Hkv, page, E]`, as in `kvcache_attention`: any strides, any page size, of query's
            dtype, or float8 with a 16-bit query. Hkv divides Hq. value_cache: the same with width Ev.
        levels: one `CascadeLevel` or more, from the keys that most queries share to each sequence's keys; tuples are taken too.
            A level may have groups without keys, and queries in no group.
        key_scale: float32, broadcastable to `[Hkv]`: factor of the stored keys; value_scale: factor of the values.
        causal: hides keys of the last level after the query's position.
        softcap: as in `kvcache_attention`, and so is scale.
        sinks: `[Hq]`, as in `kvcache_attention`. They count once, with the keys of the last level; a query in none of its
            groups has no sink.
        num_splits: as in `kvcache_attention`, for each level.

    Returns:
        out `[Tq, Hq, Ev]` of query's dtype, merged from the levels' results, each rounded to this dtype; 0 where a query sees
        nothing. With `return_lse` also lse `[Hq, Tq]`, float32 (float64 for float64): there -inf, or the sink.

    Raises:
        InvalidArgument (a RuntimeError and ValueError): a tensor or option is not as above, or requires a gradient.
        NotImplementedError: the device has no kernel for this call.

    Source: Hydragen (arXiv 2402.05099); cascade inference of FlashInfer (Ye et al. 2024); the merge of arXiv 1805.02867.
    """
    if not isinstance(levels, (list, tuple)):
        raise TypeError(f"levels: expected a sequence of CascadeLevel, got {type(levels).__name__}")
    if not levels:
        raise InvalidArgument("levels: expected at least one, got none")
    for name, tensor in (("query", query), ("key_cache", key_cache), ("value_cache", value_cache)):
        check_tensor(name, tensor)
    _policy.require_kernel("cascade_attention", query=query, key_cache=key_cache, value_cache=value_cache)
    for name, tensor in (("key_scale", key_scale), ("value_scale", value_scale)):
        if isinstance(tensor, Tensor) and tensor.dim() > 1:
            raise InvalidArgument(
                f"{name}: expected what broadcasts to [Hkv], as all groups share it, got {list(tensor.shape)}"
            )
    shared = {"key_scale": key_scale, "value_scale": value_scale, "softcap": softcap, "scale": scale, "num_splits": num_splits}
    last, outs, lses = len(levels) - 1, [], []
    for n, level in enumerate(levels):
        own = {"causal": causal, "sinks": sinks} if n == last else {"causal": False}
        out, lse = _attend(query, key_cache, value_cache, n, level, **shared, **own)
        outs.append(out)
        lses.append(lse.transpose(0, 1))  # rows in the order of out's
    if last > 0:
        out, lse = ops.attention_merge.default(outs, lses)
        lse = lse.transpose(0, 1)
    return (out, lse) if return_lse else out


def _attend(query: Tensor, key_cache: Tensor, value_cache: Tensor, n: int, level: CascadeLevel, **options):
    """(out, lse) over the keys of level n. Errors about its fields name the level."""
    if not isinstance(level, (tuple, list)) or len(level) not in (3, 4):
        raise TypeError(f"levels[{n}]: expected a CascadeLevel, or a tuple of its 3 or 4 fields, got {type(level).__name__}")
    starts, table, lengths, longest = CascadeLevel(*level)
    check_tensor(f"levels[{n}].cu_seqlens_q", starts), check_tensor(f"levels[{n}].block_table", table)
    if lengths is None:
        raise TypeError(f"levels[{n}].cache_seqlens: expected a Tensor or an int, got None")
    options |= {"block_table": table, "cu_seqlens_q": starts, "max_seqlen_q": longest, "return_lse": True}
    try:
        return kvcache_attention(query, key_cache, value_cache, lengths, **options)
    except (InvalidArgument, TypeError) as error:
        if str(error).startswith(CascadeLevel._fields):
            raise type(error)(f"levels[{n}].{error}") from None
        raise
