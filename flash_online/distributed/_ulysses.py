"""Ulysses: exchange row shards for head shards, attention of whole sequences, and back (arXiv 2309.14509).

An exchange is two Functions, `start` and `finish`, so that another group of heads is computed in between. Autograd runs ready
nodes in the reverse order of their creation, so that the backward pass overlaps as the forward pass does:

    forward:  start all groups; for each group: finish, attend, start its results; finish all
    backward: start all gradients of results; for each group, last first: finish, attention's backward, start; finish all

`start` passes `received` and `own` to `finish`: a flat tensor that must not be read before `wait`, and views of the rows that
stay on the rank, which no collective copies. Names: B batch, h heads, L rows of the sequence, n rows on a rank in c chunks of m
rows (c is 2 in a zigzag, else 1). Row-sharded tensors are [B, H, n, E], whole sequences [B, h, L, E], own and every part of a
message [B, h, c, m, E].
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from .._ops import accumulator_of, dense_strides_in_order
from ._agreement import settle
from ._group import Group, start_all_to_all, wait

HeadRanges = tuple[tuple[int, int], ...]  # heads [begin, end) of each rank
WIDE = torch.complex128  # 16 bytes: torch copies element by element if strides differ
GROUPED_SCORES = 1 << 33  # of a rank's rows and all heads: with fewer, two groups are slower (docs/lab/distributed.md)
PLAIN = (Tensor, torch.nn.Parameter)  # not fake tensors, for example, which have no address


class HeadPlan(NamedTuple):
    """The heads of each rank, and this rank's heads as runs (query heads, key heads, value heads) with groups of equal size."""

    query: HeadRanges
    key: HeadRanges
    value: HeadRanges
    runs: list[tuple[int, int, int]]


def plan_heads(heads: int, key_heads: int, value_heads: int, rank: int, ranks: int) -> HeadPlan:
    """Distributes query heads as evenly as possible. A rank gets the key heads that its query heads use, so several ranks have
    the same key head if the ranks do not divide the key heads. A rank's first or last group of query heads may then be partial:
    each run of its heads is a separate call of attention, and no head is repeated or padded."""
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


def head_groups(query: Tensor, key: Tensor, value: Tensor, ranks: int, keys: int) -> int:
    """Number of groups that a rank's heads are exchanged and computed in, of tensors [B, H, n, E] whose rows see `keys` keys on
    average: whole key heads, with equal numbers of heads of each tensor on every rank."""
    batch, heads, rows, _ = query.shape
    even = all(tensor.shape[1] % (2 * ranks) == 0 for tensor in (query, key, value))
    return 2 if even and batch * heads * rows * keys >= GROUPED_SCORES else 1


class PerHead(NamedTuple):
    """What a call has for every query head beyond query, key and value, alike on all ranks: slopes [..., Hq], sinks [Hq], spans
    [..., 1 or Hq, L, 2 or 4], tiles of a list of blocks [..., 1 or Hq, tiles of queries, blocks of keys]. Each may be None."""

    alibi_slopes: Tensor | None
    sinks: Tensor | None
    query_spans: Tensor | None = None
    key_spans: Tensor | None = None
    tiles: Tensor | None = None

    def of(self, heads: slice) -> PerHead:
        """Views for these heads."""
        slopes, sinks, *sparsity = self
        return PerHead(
            None if slopes is None else slopes[..., heads],
            None if sinks is None else sinks[heads],
            *(one if one is None or one.shape[-3] == 1 else one[..., heads, :, :] for one in sparsity),
        )


class Exchange(NamedTuple):
    """The group and rows of an exchange, and the heads of each rank, per tensor."""

    group: Group
    layout: str
    splits: tuple[HeadRanges, ...]

    @property
    def chunks(self) -> int:
        return 2 if self.layout == "zigzag" else 1

    @property
    def sequence(self) -> list[tuple[int, int]]:
        """(rank, index of its chunk) in sequence order."""
        ranks = range(self.group.ranks)
        return [(rank, 0) for rank in ranks] + [(rank, 1) for rank in reversed(ranks) if self.chunks == 2]

    def rows_of(self, whole: Tensor, rank: int) -> Tensor:
        """The rows of a rank, [B, h, L, E] -> [B, h, c, m, E], a view."""
        count = self.chunks * self.group.ranks
        rows, last = whole.unflatten(2, (count, whole.shape[2] // count)), 2 * self.group.ranks - 1 - rank
        return rows[:, :, rank : last + 1 : last - rank] if self.chunks == 2 else rows[:, :, rank : rank + 1]

    def heads_of(self, tensor: Tensor, n: int, rank: int) -> Tensor:
        """The heads of a rank of tensor n, [B, H, n, E] -> [B, h, c, m, E], a view."""
        begin, end = self.splits[n][rank]
        return tensor[:, begin:end].unflatten(2, (self.chunks, tensor.shape[2] // self.chunks))

    def heads_count(self, n: int, rank: int) -> int:
        begin, end = self.splits[n][rank]
        return end - begin

    def room(self, n: int) -> int:
        """The largest number of heads of tensor n on a rank: all messages have room for it, so that their sizes are equal."""
        return max(end - begin for begin, end in self.splits[n])


def ulysses(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    others: PerHead,
    group: Group,
    layout: str,
    count: int,
    attend: Callable[..., tuple[Tensor, Tensor | None]],
) -> tuple[Tensor, Tensor | None]:
    """(out [B, Hq, n, Ev], lse [B, Hq, n] or None) of a rank's rows, its heads in `count` groups. `attend(query, key, value,
    others)` is differentiable attention of whole sequences with lse [B, h, L] or None."""
    tensors = (query, key, value)
    plan = plan_heads(*(tensor.shape[1] for tensor in tensors), group.rank, group.ranks)
    splits = [_in_groups(split, count) for split in plan[:3]]
    # Tensors that need a gradient are sent separately: the backward pass returns whole messages.
    wants, flights = [torch.is_grad_enabled() and tensor.requires_grad for tensor in tensors], []
    for members in ([n for n in range(3) if wants[n] is want] for want in (True, False)):
        if members:
            exchanges = tuple(Exchange(group, layout, tuple(splits[n][g] for n in members)) for g in range(count))
            started = _by_group(StartToHeads.apply(exchanges, *(tensors[n] for n in members)), count)
            flights.append((members, exchanges, started))
    results: list[Tensor] = []
    lses: list[Tensor | None] = []
    for g in range(count):
        whole: dict[int, Tensor] = {}
        for members, exchanges, started in flights:
            strides = tuple(tensors[n].stride() for n in members)
            whole |= zip(members, FinishToHeads.apply(exchanges[g], strides, *started.pop(0)), strict=True)
        own = others.of(slice(*splits[0][g][group.rank]))
        out, lse = _attend(plan, [whole.pop(n) for n in range(3)], own, group.rank, attend)
        results += StartToRows.apply(Exchange(group, layout, splits[0][g : g + 1]), out)
        lses.append(lse)
    exchanges = tuple(Exchange(group, layout, (split,)) for split in splits[0])
    (out,) = FinishToRows.apply(exchanges, (query.stride(),), *results)
    if lses[0] is None:
        return out, None
    exchange, lse = Exchange(group, layout, (plan.query,)), lses[0] if count == 1 else torch.cat(lses, 1)
    (lse,) = FinishToRows.apply((exchange,), (None,), *StartToRows.apply(exchange, lse.unsqueeze(3)))
    return out, lse.squeeze(3)


def _in_groups(split: HeadRanges, count: int) -> tuple[HeadRanges, ...]:
    """The heads of each rank, per group. Several groups have equal sizes."""
    if count == 1:
        return (split,)
    size = (split[0][1] - split[0][0]) // count
    return tuple(tuple((begin + g * size, begin + (g + 1) * size) for begin, _ in split) for g in range(count))


def _by_group(flat: tuple[Tensor, ...], count: int) -> list[tuple[Tensor, ...]]:
    """(received, *own) of each group of heads, as a list."""
    size = len(flat) // count
    return [flat[g * size : (g + 1) * size] for g in range(count)]


def _attend(plan: HeadPlan, whole: list[Tensor], others: PerHead, rank: int, attend):
    """The runs of a rank's heads, in order. A key head that two runs share is sliced twice."""
    if len(plan.runs) <= 1:
        return attend(*whole, others)
    query, key, value = whole
    first_key, first_value = plan.key[rank][0], plan.value[rank][0]
    heads, keys, values = (max(e for _, e in ranges) for ranges in (plan.query, plan.key, plan.value))
    at, outs, lses = plan.query[rank][0], [], []
    for count, key_count, value_count in plan.runs:
        own = at - plan.query[rank][0]
        k, v = at // (heads // keys) - first_key, at // (heads // values) - first_value
        out, lse = attend(
            query[:, own : own + count],
            key[:, k : k + key_count],
            value[:, v : v + value_count],
            others.of(slice(own, own + count)),
        )
        outs.append(out)
        lses.append(lse)
        at += count
    return torch.cat(outs, 1), None if lses[0] is None else torch.cat(lses, 1)


# --- The exchanges: linear maps. The derivative of one's start is the other's finish, and vice versa --------------------------


class StartToHeads(Function):
    """(an Exchange of each group of heads, *tensors [B, H, n, E]) -> (received, *own) of each group."""

    @staticmethod
    def forward(ctx, exchanges: tuple[Exchange, ...], *tensors: Tensor):
        ctx.exchanges, ctx.strides = exchanges, tuple(tensor.stride() for tensor in tensors)
        wide, rank, found = widened(tensors), exchanges[0].group.rank, []
        for exchange in exchanges:
            parts = [[exchange.heads_of(t, n, r) for n, t in enumerate(wide)] for r in range(exchange.group.ranks) if r != rank]
            found.append(_start(exchange, parts, tensors[0].new_empty(0)))
            found += [exchange.heads_of(tensor, n, rank) for n, tensor in enumerate(tensors)]
        return tuple(found)

    @staticmethod
    def backward(ctx, *grads):
        return None, *FinishToRows.apply(ctx.exchanges, ctx.strides, *grads)


class FinishToHeads(Function):
    """(Exchange, strides, received, *own) -> whole sequences [B, h, L, E], each with its given order of strides."""

    @staticmethod
    def forward(ctx, exchange: Exchange, strides, received: Tensor, *own: Tensor):
        ctx.exchange, found = exchange, []
        received, *parts = widened((_arrived(received), *own), strides)
        counts = [exchange.heads_count(n, exchange.group.rank) for n in range(len(own))]
        for n, order in enumerate(strides):
            by_rank = [_part(exchange, received, parts, n, rank, counts[n]) for rank in range(exchange.group.ranks)]
            pieces = [by_rank[rank][:, :, chunk] for rank, chunk in exchange.sequence]
            found.append(joined(pieces, 2, memory_order(order)).view(own[0].dtype))
        return tuple(found)

    @staticmethod
    def backward(ctx, *grads):
        return None, None, *StartToRows.apply(ctx.exchange, *grads)


class StartToRows(Function):
    """(Exchange, *whole sequences [B, h, L, E]) -> (received, *own)."""

    @staticmethod
    def forward(ctx, exchange: Exchange, *wholes: Tensor):
        ctx.exchange, ctx.strides = exchange, tuple(whole.stride() for whole in wholes)
        wide, rank = widened(wholes), exchange.group.rank
        parts = [[exchange.rows_of(whole, r) for whole in wide] for r in range(exchange.group.ranks) if r != rank]
        received = _start(exchange, parts, wholes[0].new_empty(0))
        return received, *(exchange.rows_of(whole, rank) for whole in wholes)

    @staticmethod
    def backward(ctx, *grads):
        return None, *FinishToHeads.apply(ctx.exchange, ctx.strides, *grads)


class FinishToRows(Function):
    """(an Exchange per group of heads, strides, (received, *own) of each) -> tensors [B, H, n, E], each with its given order of
    strides. A head on several ranks is the sum of their parts in float32."""

    @staticmethod
    def forward(ctx, exchanges: tuple[Exchange, ...], strides, *flights: Tensor):
        ctx.exchanges, found = exchanges, []
        ranks, dtype = range(exchanges[0].group.ranks), flights[0].dtype
        shared = [any(end > begin for (_, end), (begin, _) in zip(s, s[1:], strict=False)) for s in exchanges[0].splits]
        started = [(_arrived(received), *own) for received, *own in _by_group(flights, len(exchanges))]
        if not any(shared):
            started = _by_group(widened(tuple(t for flight in started for t in flight), strides), len(exchanges))
        for n, order in enumerate(strides):
            parts = [
                _part(exchange, received, own, n, rank, exchange.heads_count(n, rank))
                for rank in ranks
                for exchange, (received, *own) in zip(exchanges, started, strict=True)
            ]
            if shared[n]:
                parts = [_summed(parts, exchanges[0].splits[n])]
            found.append(joined(parts, 1, chunked_order(order)).flatten(2, 3).view(dtype))
        return tuple(found)

    @staticmethod
    def backward(ctx, *grads):
        settle(ctx.exchanges[0].group)
        return None, None, *StartToHeads.apply(ctx.exchanges, *grads)


def _start(exchange: Exchange, parts: list[list[Tensor]], none: Tensor) -> Tensor:
    """Sends each other rank its tensors [B, h, c, m, E], packed in one copy. Returns the received messages, after `wait`;
    `none`: an empty tensor of the collective's dtype."""
    blocks = []
    for tensors in parts:
        for n, tensor in enumerate(tensors):
            room = exchange.room(n) - tensor.shape[1]
            for part in tensor.unbind():
                blocks.append(part)
                if room:
                    blocks.append(part.new_zeros(room, *part.shape[1:]))
    if not any(block.numel() for block in blocks):
        return none
    if any(block.shape[1:] != blocks[0].shape[1:] for block in blocks):
        blocks = [block.flatten() for block in blocks]
    return start_all_to_all(torch.cat(blocks).flatten().view(none.dtype), exchange.group)


def _arrived(received: Tensor) -> Tensor:
    return wait(received) if received.numel() else received


def _part(exchange: Exchange, received: Tensor, own: Sequence[Tensor], n: int, rank: int, heads: int) -> Tensor:
    """The part of tensor n received from a rank, [B, h, c, m, E] with `heads` heads: a view."""
    if rank == exchange.group.rank:
        return own[n]
    shapes = [(t.shape[0], exchange.room(k), *t.shape[2:]) for k, t in enumerate(own)]
    sizes = [math.prod(shape) for shape in shapes]
    message = received.view(exchange.group.ranks - 1, sum(sizes))[rank - (rank > exchange.group.rank)]
    return message.narrow(0, sum(sizes[:n]), sizes[n]).view(shapes[n])[:, :heads]


def memory_order(strides) -> list[int]:
    """The dimensions of [B, H, n, E] in memory order, outermost first."""
    dense = dense_strides_in_order((2, 2, 2, 2), strides or (4, 3, 2, 1))
    return sorted(range(4), key=lambda dim: -dense[dim])


def chunked_order(strides) -> list[int]:
    """The dimensions of [B, H, c, m, E] in memory order, for [B, H, n, E] with the order of these strides."""
    return [place for dim in memory_order(strides) for place in ((0,), (1,), (2, 3), (4,))[dim]]


def widened(tensors: Sequence[Tensor], orders: Sequence = ()) -> Sequence[Tensor]:
    """Views of the same memory with 16-byte elements, if rows allow it and results can be viewed alike; else the tensors."""
    if torch.compiler.is_compiling() or any(memory_order(strides)[-1] != 3 for strides in orders):
        return tensors
    for tensor in tensors:
        per = WIDE.itemsize // tensor.element_size()
        counts = (tensor.shape[-1], tensor.storage_offset(), *tensor.stride()[:-1])
        if type(tensor) not in PLAIN or tensor.stride(-1) != 1 or any(count % per for count in counts):
            return tensors
        if tensor.data_ptr() % WIDE.itemsize:
            return tensors
    return [tensor.view(WIDE) for tensor in tensors]


def _summed(parts: list[Tensor], split: HeadRanges) -> Tensor:
    """The sum of each head over the ranks that have it, in the accumulator's dtype. Sums into slices of one tensor would be
    shorter, but the compiler takes minutes for them."""
    dtype, sums = parts[0].dtype, []
    for head in range(split[-1][1]):
        ranges = zip(parts, split, strict=True)
        own = [part[:, head - begin, None].to(accumulator_of(dtype)) for part, (begin, end) in ranges if begin <= head < end]
        sums.append(sum(own[1:], own[0]))
    return torch.cat(sums, 1).to(dtype)


def joined(parts: list[Tensor], dim: int, order: list[int]) -> Tensor:
    """Concatenates tensors along a dimension in one copy; `order` is the memory order of the result's dimensions."""
    views, along = arranged(parts, dim, order)
    whole = torch.cat(views, along)
    if parts[0].shape[0] == 1:
        whole = whole.unsqueeze(order.index(0))
    return whole.permute([order.index(d) for d in range(len(order))])


def arranged(parts: list[Tensor], dim: int, order: list[int]) -> tuple[list[Tensor], int]:
    """Views of the tensors for `joined`, and the dimension along which torch's cat joins them."""
    if parts[0].shape[0] != 1:
        return [part.permute(order) for part in parts], order.index(dim)
    rest = [d - 1 for d in order if d]  # torch's cat copies tensors of more than four dimensions one at a time
    return [part[0].permute(rest) for part in parts], rest.index(dim - 1)
