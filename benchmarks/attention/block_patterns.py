"""The lists of the cells with blocks: which blocks of keys each block of queries sees. Every head has a list of its own."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

LOCAL_SHARE = 0.5  # of "local" lists: the nearest blocks, the rest is random


def _closest(distance: Tensor, count: int) -> Tensor:
    """bool: the `count` blocks of keys with the least distance from each block of queries."""
    nearest = distance.topk(count, -1, largest=False).indices
    return torch.zeros_like(distance, dtype=torch.bool).scatter(-1, nearest, True)


def _random(heads: int, blocks: int, count: int, generator: torch.Generator) -> Tensor:
    """Any blocks."""
    distance = torch.rand(heads, blocks, blocks, generator=generator, device=generator.device)
    return _closest(distance, count)


def _local(heads: int, blocks: int, count: int, generator: torch.Generator) -> Tensor:
    """Half of them are the nearest ones, and half are any others."""
    place = torch.arange(blocks, device=generator.device)
    distance = (place[:, None] - place).abs().float()
    rank = torch.rand(heads, blocks, blocks, generator=generator, device=generator.device)
    near = _closest(distance.expand(heads, -1, -1), int(LOCAL_SHARE * count))
    return _closest(rank.masked_fill(near, -1), count)


def _video(heads: int, blocks: int, count: int, generator: torch.Generator) -> Tensor:
    """The nearest cubes of 4 x 4 x 4 tokens in frames, rows and columns of them, where a block is a cube; heads choose between
    equally near ones at random."""
    side = 8
    place = torch.arange(blocks, device=generator.device)
    cube = torch.stack([place // side**2, place // side % side, place % side], -1).float()
    distance = torch.cdist(cube, cube).expand(heads, -1, -1)
    return _closest(distance + 0.1 * torch.rand(distance.shape, generator=generator, device=generator.device), count)


def _everything(heads: int, blocks: int, count: int, generator: torch.Generator) -> Tensor:
    return torch.ones(heads, blocks, blocks, dtype=torch.bool, device=generator.device)


PATTERNS: dict[str, Callable[[int, int, int, torch.Generator], Tensor]] = {
    "random": _random,
    "local": _local,
    "video": _video,
    "everything": _everything,
}
