"""Ulysses: from rows over ranks to heads over ranks, attention of whole sequences, and back (arXiv 2309.14509).

All tensors here have their rows first: [rows, batch, heads, width].
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from .._ops import accumulator_of, dense_strides_in_order
from ._group import Group, all_to_all
from ._layout import by_rank, in_sequence

HeadRanges = tuple[tuple[int, int], ...]  # heads [begin, end) of each rank


class HeadPlan(NamedTuple):
    """The heads of each rank, and a rank's own as runs (query heads, key heads, value heads) whose groups are of one size."""

    query: HeadRanges
    key: HeadRanges
    value: HeadRanges
    runs: list[tuple[int, int, int]]


def plan_heads(heads: int, key_heads: int, value_heads: int, rank: int, ranks: int) -> HeadPlan:
    """Query heads are dealt out as evenly as they go. A rank gets the key heads that its query heads use, so that several ranks
    have a key head where key heads do not divide. There a rank's first or last group of query heads may be part of a group:
    each run of its heads is a call of attention of its own, and no head is repeated or padded."""
    query = tuple((r * heads // ranks, (r + 1) * heads // ranks) for r in range(ranks))

    def used(own: int) -> HeadRanges:
        group = heads // own if own else 1
        return tuple((begin // group, -(-end // group) if end > begin else begin // group) for begin, end in query)

    groups = [heads // own if own else 1 for own in (key_heads, value_heads)]
    runs, (begin, last) = [], query[rank]
    while begin < last:
        end = next(e for e in range(last, begin, -1) if all(_even(begin, e, group) for group in groups))
        runs.append((end - begin, *(-(-end // group) - begin // group for group in groups)))
        begin = end
    return HeadPlan(query, used(key_heads), used(value_heads), runs)


def _even(begin: int, end: int, group: int) -> bool:
    """Whether heads [begin, end) are whole groups, or lie in one."""
    return begin % group == end % group == 0 or begin // group == (end - 1) // group


def ulysses(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    group: Group,
    layout: str,
    attend: Callable[..., tuple[Tensor, Tensor | None]],
) -> tuple[Tensor, Tensor | None]:
    """(out, lse [rows, batch, heads, 1] or None) of a rank's rows. `attend(query, key, value, alibi_slopes, sinks)` is
    attention of whole sequences, differentiable; the last dimension of slopes is the heads."""
    plan = plan_heads(query.shape[2], key.shape[2], value.shape[2], group.rank, group.ranks)
    splits = (plan.query, plan.key, plan.value)
    whole = _ToHeads.apply(group, layout, splits, query, key, value)
    begin, end = plan.query[group.rank]
    slopes = None if alibi_slopes is None else alibi_slopes[..., begin:end]
    logits = None if sinks is None else sinks[begin:end]
    if len(plan.runs) <= 1:
        out, lse = attend(*whole, slopes, logits)
    else:
        out, lse = _attend_runs(plan, whole, slopes, logits, group.rank, attend)
    (out,) = _ToRows.apply(group, layout, (plan.query,), (query.stride(),), out)
    if lse is not None:
        (lse,) = _ToRows.apply(group, layout, (plan.query,), (None,), lse)
    return out, lse


def _attend_runs(plan: HeadPlan, whole, slopes, logits, rank: int, attend):
    """The runs of a rank's heads, one after another. A key head that two runs share is cut out twice."""
    query, key, value = whole
    first_key, first_value = plan.key[rank][0], plan.value[rank][0]
    heads, keys, values = (max(e for _, e in ranges) for ranges in (plan.query, plan.key, plan.value))
    at, outs, lses = plan.query[rank][0], [], []
    for count, key_count, value_count in plan.runs:
        own = at - plan.query[rank][0]
        k, v = at // (heads // keys) - first_key, at // (heads // values) - first_value
        out, lse = attend(
            query[:, :, own : own + count],
            key[:, :, k : k + key_count],
            value[:, :, v : v + value_count],
            None if slopes is None else slopes[..., own : own + count],
            None if logits is None else logits[own : own + count],
        )
        outs.append(out)
        lses.append(lse)
        at += count
    return torch.cat(outs, 2), None if lses[0] is None else torch.cat(lses, 2)


# --- The exchange: two linear maps, each the transpose of the other ---------------------------------------------------------


class _ToHeads(Function):
    """Rows of all heads [n, batch, heads, width] to all rows of a rank's heads, of several tensors in one message."""

    @staticmethod
    def forward(ctx, group: Group, layout: str, splits: tuple[HeadRanges, ...], *tensors: Tensor):
        ctx.group, ctx.layout, ctx.splits = group, layout, splits
        ctx.heads = [tensor.shape[2] for tensor in tensors]
        return _to_heads(group, layout, splits, tensors)

    @staticmethod
    def backward(ctx, *grads):
        # All ranks want the same gradients: the call checks that.
        wanted = [n for n, need in enumerate(ctx.needs_input_grad[3:]) if need]
        splits, heads = tuple(ctx.splits[n] for n in wanted), [ctx.heads[n] for n in wanted]
        found = _SumRows.apply(ctx.group, ctx.layout, splits, tuple(heads), *(grads[n] for n in wanted))
        every = dict(zip(wanted, found, strict=True))
        return (None, None, None, *(every.get(n) for n in range(len(grads))))


class _ToRows(Function):
    """The inverse of _ToHeads for tensors of whose heads no two ranks have the same: `strides`, or None, gives the order in
    which the dimensions of a result lie in memory."""

    @staticmethod
    def forward(ctx, group: Group, layout: str, splits: tuple[HeadRanges, ...], strides, *tensors: Tensor):
        ctx.group, ctx.layout, ctx.splits = group, layout, splits
        heads = [split[-1][1] for split in splits]
        return _to_rows(group, layout, splits, heads, tensors, strides)

    @staticmethod
    def backward(ctx, *grads):
        return (None, None, None, None, *_ToHeads.apply(ctx.group, ctx.layout, ctx.splits, *grads))


class _SumRows(Function):
    """The transpose of _ToHeads: of a head that several ranks have, the sum of their parts, in float32."""

    @staticmethod
    def forward(ctx, group: Group, layout: str, splits: tuple[HeadRanges, ...], heads, *tensors: Tensor):
        ctx.group, ctx.layout, ctx.splits = group, layout, splits
        return _to_rows(group, layout, splits, heads, tensors, (None,) * len(tensors))

    @staticmethod
    def backward(ctx, *grads):
        return (None, None, None, None, *_ToHeads.apply(ctx.group, ctx.layout, ctx.splits, *grads))


def _to_heads(group: Group, layout: str, splits, tensors) -> tuple[Tensor, ...]:
    rows, batch = tensors[0].shape[:2]
    counts = [[(end - begin) * tensor.shape[3] for begin, end in split] for split, tensor in zip(splits, tensors, strict=True)]
    sizes = [rows * batch * sum(count[r] for count in counts) for r in range(group.ranks)]
    send = tensors[0].new_empty(sum(sizes))
    if _all_equal(splits):
        parts = send.view(group.ranks, rows, batch, sum(count[0] for count in counts))
        first = 0
        for split, tensor, count in zip(splits, tensors, counts, strict=True):
            part = parts[..., first : first + count[0]].unflatten(3, (split[0][1] - split[0][0], tensor.shape[3]))
            part.copy_(_heads_of_ranks(tensor, split))
            first += count[0]
    else:
        for r, message in enumerate(send.split(sizes)):
            first, message = 0, message.view(rows, batch, sum(count[r] for count in counts))
            for split, tensor, count in zip(splits, tensors, counts, strict=True):
                begin, end = split[r]
                part = message[..., first : first + count[r]].unflatten(2, (end - begin, tensor.shape[3]))
                part.copy_(tensor[:, :, begin:end])
                first += count[r]
    own = [count[group.rank] for count in counts]
    receive = [rows * batch * sum(own)] * group.ranks
    got = all_to_all(send, receive, sizes, group).view(group.ranks * rows, batch, sum(own))
    got, first, found = in_sequence(got, group.ranks, layout), 0, []
    for split, tensor, count in zip(splits, tensors, own, strict=True):
        begin, end = split[group.rank]
        found.append(got[..., first : first + count].unflatten(2, (end - begin, tensor.shape[3])))
        first += count
    return tuple(found)


def _to_rows(group: Group, layout: str, splits, heads, tensors, strides) -> tuple[Tensor, ...]:
    length, batch = tensors[0].shape[:2]
    rows, widths = length // group.ranks, [tensor.shape[3] for tensor in tensors]
    flat = [tensor.flatten(2) for tensor in tensors]
    send = by_rank(flat[0] if len(flat) == 1 else torch.cat(flat, 2), group.ranks, layout).reshape(-1).contiguous()
    counts = [[(end - begin) * width for begin, end in split] for split, width in zip(splits, widths, strict=True)]
    receive = [rows * batch * sum(count[r] for count in counts) for r in range(group.ranks)]
    got = all_to_all(send, receive, [send.numel() // group.ranks] * group.ranks, group)
    parts = [
        part.view(rows, batch, sum(count[r] for count in counts)).split([count[r] for count in counts], 2)
        for r, part in enumerate(got.split(receive))
    ]
    found = []
    for n, (split, width) in enumerate(zip(splits, widths, strict=True)):
        mine = [part[n].unflatten(2, (end - begin, width)) for part, (begin, end) in zip(parts, split, strict=True)]
        if any(end > begin for (_, end), (begin, _) in zip(split, split[1:], strict=False)):
            found.append(_summed(mine, split, heads[n]))
        else:
            found.append(_side_by_side(mine, (rows, batch, heads[n], width), strides[n]))
    return tuple(found)


def _summed(parts: list[Tensor], split: HeadRanges, heads: int) -> Tensor:
    """Of each head the sum over the ranks that have it, in the accumulator's dtype. Sums into slices of one tensor would be
    shorter, but the compiler takes minutes for them."""
    dtype, sums = parts[0].dtype, []
    for head in range(heads):
        ranges = zip(parts, split, strict=True)
        own = [part[:, :, head - begin, None].to(accumulator_of(dtype)) for part, (begin, end) in ranges if begin <= head < end]
        sums.append(sum(own[1:], own[0]))
    return torch.cat(sums, 2).to(dtype)


def _side_by_side(parts: list[Tensor], shape, strides) -> Tensor:
    """The heads of all ranks in one tensor whose dimensions lie in memory in the order of `strides`, copied once."""
    dense = dense_strides_in_order(shape, strides or (4, 3, 2, 1))
    order = sorted(range(4), key=lambda dim: -dense[dim])
    return torch.cat([part.permute(order) for part in parts], order.index(2)).permute([order.index(dim) for dim in range(4)])


def _all_equal(splits) -> bool:
    """Whether all ranks have as many heads of each tensor."""
    return all(end - begin == split[0][1] - split[0][0] for split in splits for begin, end in split)


def _heads_of_ranks(tensor: Tensor, split: HeadRanges) -> Tensor:
    """[rows, batch, heads, width] as [ranks, rows, batch, heads of one, width]: a view where no head goes to two ranks."""
    count, ranks = split[0][1] - split[0][0], len(split)
    if split[-1][1] == count * ranks and split[0][0] == 0 and count:
        return tensor.unflatten(2, (ranks, count)).permute(2, 0, 1, 3, 4)
    return torch.stack([tensor[:, :, begin:end] for begin, end in split])
