"""Masks in memory that is linear in the length: functions that make the arguments `query_spans` and `key_spans` of attention.

    out = flash_online.attention(query, key, value, **flash_online.spans.documents(ids))

`query_spans`, int32 `[..., 1 or Hq, L, 2 or 4]`: query i may see key j where j lies in one of the query's one or two half-open
intervals [begin, end). `key_spans`, int32 `[..., 1 or Hq, S, 2 or 4]`: key j may be seen by query i where i lies in one of the
key's intervals. Bounds are clamped to the length, and an interval with begin >= end is empty. Both combine by "and", also with
`mask`, `causal` and `window`.

Each function returns a dict for `**`, of tensors on the device of its input. `to_mask` returns the bool mask that such a dict
stands for. No function reads a value on the host, except `from_flashmask` with 4 columns.
"""

from __future__ import annotations

from typing import TypedDict

import torch
from torch import Tensor

from ._checks import check_device, check_flag, check_size, check_tensor
from ._ops import InvalidArgument, is_known
from ._span_arguments import check_span_rows, in_spans

__all__ = [
    "Spans",
    "documents",
    "from_flashmask",
    "padding",
    "prefix",
    "shared_prefix",
    "sink_window",
    "to_mask",
    "tree",
]

# Where a mask is causal, one interval per key, [j, end), says it all. Its begin is what `causal` says as well, so that one
# integer per key is left. One interval per query could say documents too, but neither trees nor a shared prefix: one form
# serves all. `causal` is in the dict although the intervals imply it: kernels bound their tiles by it without reading them.


class Spans(TypedDict, total=False):
    """What the functions of this module return, for `**`: some of `query_spans`, `key_spans` and `causal`."""

    query_spans: Tensor
    key_spans: Tensor
    causal: bool


def documents(ids: Tensor | None = None, *, cu_seqlens: Tensor | None = None, L: int | None = None) -> Spans:
    """Packed documents: a query sees the keys of its own document up to itself.

    Args:
        ids: `[B, L]`, any integer dtype: the document of each position. An id that comes again after another one starts a new
            document.
        cu_seqlens: instead of ids, int32 `[documents + 1]`, ascending from 0: document n of one packed row has the positions
            from `cu_seqlens[n]` up to `cu_seqlens[n + 1]`. Positions past the last start are padding, a document of their own.
        L: the length of the row, with cu_seqlens alone.

    Returns:
        `key_spans` `[B, 1, L, 2]`, or `[1, 1, L, 2]` for cu_seqlens: [j, end of j's document), and `causal` True.

    Raises:
        InvalidArgument: both of ids and cu_seqlens or none of them, a wrong dtype or rank, L missing or negative.
    """
    if (ids is None) == (cu_seqlens is None):
        raise InvalidArgument(f"ids, cu_seqlens: expected one of the two, got {'none' if ids is None else 'both'}")
    if cu_seqlens is not None:
        _check_starts(cu_seqlens, 1)
        if L is None:
            raise InvalidArgument("L: expected an int >= 0 with cu_seqlens, got None")
        L = _check_length("L", L)
        ends = torch.cat([cu_seqlens, _one(L, cu_seqlens)])
        return {"key_spans": _from_position(_at_segment(cu_seqlens, ends, L)), "causal": True}
    assert ids is not None
    _check_integers("ids", ids, 2, "[B, L]")
    if L is not None:
        raise InvalidArgument(f"L: expected None with ids, which have a length, got {L}")
    # Documents are numbered in ascending order. The last position counts as the neighbour of the first one, which adds 0 or 1
    # to all numbers of a row. A document then ends where the numbers up to its own end.
    number = (ids != ids.roll(1, -1)).cumsum(-1, dtype=torch.int32).contiguous()
    return {"key_spans": _from_position(torch.searchsorted(number, number, right=True, out_int32=True)), "causal": True}


def prefix(lengths: Tensor, L: int) -> Spans:
    """A prefix whose positions see each other, then causal (prefix LM): query i sees keys [0, max(i + 1, lengths[b])).

    Args:
        lengths: `[B]`, any integer dtype: the length of each prefix, clamped to [0, L].
        L: the length of the sequences.

    Returns:
        `query_spans` `[B, 1, L, 2]`.

    Raises:
        InvalidArgument: a wrong dtype or rank, or a negative L.
    """
    L = _check_length("L", L)
    ends = torch.maximum(_bounds("lengths", lengths, L)[:, None], torch.arange(1, L + 1, device=lengths.device))
    return {"query_spans": _pairs(torch.zeros_like(ends), ends)}


def tree(parents: Tensor) -> Spans:
    """A forest in depth-first order, such as drafts for speculative decoding or rollouts with common prefixes: a query sees
    itself and its ancestors.

    Args:
        parents: `[B, L]`, any integer dtype: the index of each node's parent, which comes before the node, or -1 for a root.
            The nodes of a subtree are neighbours. No other order raises an error: what is visible is then not specified.

    Returns:
        `key_spans` `[B, 1, L, 2]`: [j, end of j's subtree), and `causal` True.

    Raises:
        InvalidArgument: a wrong dtype or rank.
    """
    _check_integers("parents", parents, 2, "[B, L]")
    L = parents.shape[1]
    own = torch.arange(L, device=parents.device)
    parents = torch.minimum(parents.long(), own - 1).clamp_min(-1)  # other values would be indices out of bounds
    # In depth-first order a subtree ends where the node's next sibling begins, or else where the parent's subtree ends. Roots
    # are siblings. Numbers parent * L + index, sorted, have the next sibling after each node.
    numbers = (parents * L + own).contiguous()
    ordered = numbers.sort(-1).values
    after = torch.searchsorted(ordered, numbers, right=True)
    following = ordered.gather(-1, after.clamp_max(L - 1))
    has_next = (after < L) & (following < (parents + 1) * L)  # else it is a child of a later parent
    sibling = torch.where(has_next, following - parents * L, L)
    # The nearest ancestor, or the node itself, with a next sibling, or else the root: each step doubles the distance.
    nearest = torch.where(has_next | (parents < 0), own, parents)
    known = type(L) is int and not torch.compiler.is_compiling()  # a tracer keeps L symbolic
    for _ in range((L if known else _INT32_MAX).bit_length()):
        nearest = nearest.gather(-1, nearest)
    return {"key_spans": _from_position(sibling.gather(-1, nearest)), "causal": True}


def shared_prefix(cu_seqlens: Tensor, L: int) -> Spans:
    """One question with several answers in one row: an answer sees the question and itself up to the query, not the others.

    Args:
        cu_seqlens: int32 `[segments + 1]`, ascending from 0, at least one segment. Segment 0 is the question, the others are
            answers: segment n has the positions from `cu_seqlens[n]` up to `cu_seqlens[n + 1]`. Positions past the last start
            are padding: they see each other, causally, and not the question.
        L: the length of the row.

    Returns:
        `key_spans` `[1, 1, L, 2]`: [j, `cu_seqlens[-1]`) for keys of the question, [j, end of j's segment) for others; and
        `causal` True.

    Raises:
        InvalidArgument: a wrong dtype or shape, or a negative L.
    """
    _check_starts(cu_seqlens, 2)
    L = _check_length("L", L)
    # The question ends where the last answer ends; that is all that differs from documents.
    ends = torch.cat([cu_seqlens[:1], cu_seqlens[-1:], cu_seqlens[2:], _one(L, cu_seqlens)])
    return {"key_spans": _from_position(_at_segment(cu_seqlens, ends, L)), "causal": True}


def padding(lengths: Tensor, L: int) -> Spans:
    """Sequences of several lengths in one batch: all queries, those of the padding too, see keys [0, lengths[b]).

    Args:
        lengths: `[B]`, any integer dtype: number of keys of each sequence that are not padding.
        L: number of queries; the keys may be more or fewer.

    Returns:
        `query_spans` `[B, 1, L, 2]`, which holds one interval per sequence (its stride along L is 0).

    Raises:
        InvalidArgument: a wrong dtype or rank, or a negative L.
    """
    L = _check_length("L", L)
    ends = _bounds("lengths", lengths, _INT32_MAX)[:, None]
    return {"query_spans": _pairs(torch.zeros_like(ends), ends).expand(-1, -1, L, -1)}


def sink_window(sinks: int, left: int, L: int, device: torch.device | str | None = None) -> Spans:
    """A sliding window, and the first keys besides (StreamingLLM): query i sees keys [0, sinks) and [i - left, i], causally.

    Args:
        sinks: number of first keys that every later query sees, at least 0.
        left: number of keys before the query that the window holds, at least 0.
        L: the length of the sequences.
        device: of the result; None: torch's default device.

    Returns:
        `key_spans` `[1, 1, L, 2]`: [j, L) for keys below `sinks`, [j, j + left + 1) for others; and `causal` True.

    Raises:
        InvalidArgument: a negative int.
    """
    sinks, left, L = _check_length("sinks", sinks), _check_length("left", left), _check_length("L", L)
    own = torch.arange(L, device=device)
    ends = torch.where(own < sinks, L, (own + left + 1).clamp_max(L))
    return {"key_spans": _from_position(ends[None]), "causal": True}


def from_flashmask(startend_row_indices: Tensor, causal: bool, *, L: int | None = None) -> Spans:
    """The mask of PaddlePaddle's FlashMask (arXiv 2410.01359), whose integers say which queries do not see a key.

    Args:
        startend_row_indices: int32 `[B, H, S, columns]` or `[B, H, S, 1, columns]`, where H is 1 or the number of query heads.
            With `causal` 1 column: key j is hidden from queries [start, L); 2 columns: from [start, end). Without `causal` 2
            columns (start below, end above): from [start, L) and from [0, end); 4 columns (start and end below, start and end
            above): from the two intervals. Bounds are not negative.
        causal: as in FlashMask. Its rule for L != S is `alignment="lower_right"`.
        L: number of queries; None: with 4 columns as many as keys, else any number.

    Returns:
        `key_spans` `[B, H, S, 2 or 4]`, the queries that are left, and `causal` as given.

    Raises:
        InvalidArgument: a wrong dtype, rank or number of columns, a negative L; with 4 columns, which the host reads once, a
            key with more than two intervals of queries left.
    """
    check_flag("causal", causal)
    check_tensor("startend_row_indices", startend_row_indices)
    indices = startend_row_indices
    if indices.dim() == 5 and indices.shape[-2] == 1:
        indices = indices.squeeze(-2)
    columns = (1, 2) if causal else (2, 4)
    if indices.dtype != torch.int32 or indices.dim() != 4 or indices.shape[-1] not in columns:
        raise InvalidArgument(
            f"startend_row_indices: expected int32 [B, H, S, {columns[0]} or {columns[1]}] with causal={causal}, got "
            f"{indices.dtype} {list(startend_row_indices.shape)}"
        )
    if L is not None:
        L = _check_length("L", L)
    last = _INT32_MAX if L is None else L  # attention clamps it to the number of queries
    start, *others = indices.unbind(-1)
    first = torch.zeros_like(start)
    bounds: list[Tensor] | tuple[Tensor, ...]
    if not others:
        bounds = [first, start]
    elif causal:
        bounds = [first, start, torch.maximum(start, others[0]), torch.full_like(start, last)]
    elif len(others) == 1:
        bounds = [others[0], start]
    else:
        bounds = _left_by_two((start, others[0]), (others[1], others[2]), indices.shape[2] if L is None else L, last)
    return {"key_spans": torch.stack(bounds, -1), "causal": causal}


def to_mask(
    L: int, S: int, *, query_spans: Tensor | None = None, key_spans: Tensor | None = None, causal: bool = False
) -> Tensor:
    """The mask that spans stand for, with one element per query and key: for tests, and for functions that take no spans.

    Args:
        L: number of queries.
        S: number of keys.
        query_spans: int32 `[..., L, 2 or 4]`, or None.
        key_spans: int32 `[..., S, 2 or 4]`, or None.
        causal: query i sees keys j <= i only.

    Returns:
        bool `[..., L, S]`, True where query i may see key j. The leading dimensions are those of the spans, broadcast.

    Raises:
        InvalidArgument: a wrong dtype or shape, spans on two devices, a negative int.
    """
    L, S = _check_length("L", L), _check_length("S", S)
    check_flag("causal", causal)
    device = None
    if query_spans is not None:
        check_span_rows("query_spans", query_spans, L)
        device = query_spans.device
    if key_spans is not None:
        check_span_rows("key_spans", key_spans, S)
        check_device("key_spans", key_spans, "query_spans", key_spans if query_spans is None else query_spans)
        device = key_spans.device
    if causal:
        mask = torch.arange(S, device=device) <= torch.arange(L, device=device)[:, None]
    else:
        mask = torch.ones(L, S, dtype=torch.bool, device=device)
    if query_spans is not None:
        mask = mask & _inside(query_spans, S)
    if key_spans is not None:
        mask = mask & _inside(key_spans, L).transpose(-2, -1)
    return mask


_INT32_MAX = 2**31 - 1


def _one(number: int, like: Tensor) -> Tensor:
    """[number], as `like`."""
    return like.new_zeros(1) + number


def _check_length(name: str, length: int) -> int:
    """`length` as an int. Raises TypeError for what is no int, InvalidArgument unless it is from 0 up to the largest int32."""
    length = check_size(name, length)
    if is_known(length < 0) or is_known(length > _INT32_MAX):
        raise InvalidArgument(f"{name}: expected an int from 0 to {_INT32_MAX}, got {length}")
    return length


_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64)


def _check_integers(name: str, tensor: Tensor, rank: int, expected: str) -> None:
    check_tensor(name, tensor)
    if tensor.dtype not in _INTEGERS or tensor.dim() != rank:
        raise InvalidArgument(f"{name}: expected integers {expected}, got {tensor.dtype} {list(tensor.shape)}")


def _check_starts(cu_seqlens: Tensor, fewest: int) -> None:
    check_tensor("cu_seqlens", cu_seqlens)
    if cu_seqlens.dtype != torch.int32 or cu_seqlens.dim() != 1 or is_known(cu_seqlens.shape[0] < fewest):
        expected = f"an int32 tensor of starts, at least {fewest}"
        raise InvalidArgument(f"cu_seqlens: expected {expected}, got {cu_seqlens.dtype} {list(cu_seqlens.shape)}")


def _bounds(name: str, lengths: Tensor, most: int) -> Tensor:
    """The lengths [B] as int64 from 0 up to `most`. Raises InvalidArgument for other dtypes and ranks."""
    _check_integers(name, lengths, 1, "[B]")
    return lengths.long().clamp(0, most)  # before the cast to int32, which would wrap


def _at_segment(cu_seqlens: Tensor, ends: Tensor, L: int) -> Tensor:
    """[1, L]: for each position the element of `ends` (one more than `cu_seqlens`, the last for padding) of its segment."""
    own = torch.arange(L, dtype=torch.int32, device=cu_seqlens.device)
    segment = torch.searchsorted(cu_seqlens.contiguous(), own, right=True)  # number of starts up to here, of empty ones too
    return ends[segment][None].clamp_max(L)


def _pairs(begin: Tensor, end: Tensor) -> Tensor:
    """Spans int32 [B, 1, L, 2] from their bounds [B, L]."""
    return torch.stack([begin, end], -1).to(torch.int32)[:, None]


def _from_position(end: Tensor) -> Tensor:
    """Spans [j, end[j]) of each position j, from ends [B, L]."""
    return _pairs(torch.arange(end.shape[-1], dtype=end.dtype, device=end.device).expand_as(end), end)


def _left_by_two(
    one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor], rows: int, last: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The bounds of the two intervals of [0, rows) that two hidden intervals leave; `last` stands for rows as a bound. Raises
    InvalidArgument if they leave three, for which the host reads a number."""
    # A hidden interval that is empty becomes [0, 0), which splits nothing.
    (a, a_end), (b, b_end) = ((begin * (begin < end), end * (begin < end)) for begin, end in (one, other))
    lower, upper = torch.minimum(a, b), torch.maximum(a, b)
    lower_end, both_end = torch.where(a <= b, a_end, b_end), torch.maximum(a_end, b_end)
    # What is left is [0, lower), [lower_end, upper) and [both_end, rows).
    has_first, has_middle = lower > 0, lower_end < upper
    if bool((has_first & has_middle & (both_end < rows)).any()):
        raise InvalidArgument(
            "startend_row_indices: expected at most two intervals of queries left to each key, got a key with three "
            f"(of {rows} queries); use a bool mask"
        )
    first, first_end = torch.where(has_first, 0, lower_end), torch.where(has_first, lower, upper)
    takes_middle = has_first & has_middle  # the third is then empty
    second, second_end = torch.where(takes_middle, lower_end, both_end), torch.where(takes_middle, upper, last)
    return first, first_end, second, second_end


def _inside(spans: Tensor, length: int) -> Tensor:
    """bool [..., rows, length]: True where a position lies in an interval of the row. Positions are in [0, length), so that no
    bound needs a clamp."""
    return in_spans(torch.arange(length, device=spans.device), spans.unsqueeze(-2))
