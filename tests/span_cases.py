"""Random spans for tests: intervals that hide whole tiles, that show whole tiles, and that cut them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

LEAST, MOST = -(2**31), 2**31 - 1
KINDS = ("any", "documents", "window", "blocks", "everything")


def random_spans(g: torch.Generator, leading: Sequence[int], own: int, other: int, intervals: int) -> torch.Tensor:
    """Spans int32 [*leading, own, 2 * intervals] over `other` places, each interval of a kind of its own; some are empty."""
    drawn = [_interval(g, (*leading, own), other) for _ in range(intervals)]
    if own and torch.rand((), generator=g) < 0.3:
        first, last = torch.randint(0, own + 1, (2,), generator=g).sort().values.tolist()
        for bounds in drawn:
            bounds[..., first:last, 1] = bounds[..., first:last, 0]
    return torch.cat(drawn, -1).clamp(LEAST, MOST).to(torch.int32)


def far_spans(g: torch.Generator, leading: Sequence[int], own: int, other: int, intervals: int) -> torch.Tensor:
    """Spans of many rows of which only some in the middle see anything: whole groups of 2,048 rows before and after are empty,
    and the last group is not full."""
    spans = random_spans(g, leading, own, other, intervals)
    spans[..., 0] = 0
    spans[..., 1] = torch.randint(0, other + 1, spans.shape[:-1], generator=g)
    first, last = own * 5 // 9, own * 7 // 9
    spans[..., :first, :] = spans[..., last:, :] = 0
    return spans


def _interval(g: torch.Generator, shape: Sequence[int], other: int) -> torch.Tensor:
    kind, own = KINDS[int(torch.randint(len(KINDS), (), generator=g))], shape[-1]
    rows = torch.arange(own)
    if kind == "any":  # a third of the rows have begin > end
        bounds = torch.randint(-3, other + 4, (*shape, 2), generator=g)
        return torch.where(torch.rand(*shape, 1, generator=g) < 0.6, bounds.sort(-1).values, bounds)
    if kind == "documents":
        cuts = torch.randint(0, other + 1, (4,), generator=g).sort().values
        edges = torch.cat([torch.zeros(1, dtype=torch.int64), cuts, torch.tensor([max(other, 1)])])
        place = (rows * max(other, 1)) // max(own, 1)
        number = torch.searchsorted(edges, place, right=True) - 1
        bounds = torch.stack([edges[number], edges[number + 1]], -1)
    elif kind == "window":
        left, right = torch.randint(0, other + 1, (2,), generator=g).tolist()
        place = (rows * max(other, 1)) // max(own, 1)
        bounds = torch.stack([place - left, place + right + 1], -1)
    elif kind == "blocks":
        tiles = -(-own // 64)
        ends = torch.randint(0, -(-other // 64) + 1, (tiles, 2), generator=g).sort(-1).values * 64
        bounds = ends.repeat_interleave(64, 0)[:own]
    else:
        bounds = torch.tensor([LEAST, MOST]).expand(own, 2)
    return bounds.expand(*shape, 2).clone()
