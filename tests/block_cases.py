"""Random lists of blocks for tests."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from flash_online import BlockList

SIZES = [(64, 64), (128, 64), (64, 128), (128, 128)]


def random_blocks(
    g: torch.Generator,
    leading: Sequence[int],
    lengths: Sequence[int],
    size: tuple[int, int],
    density: float = 0.5,
    device: str = "cpu",
) -> tuple[BlockList, torch.Tensor]:
    """(a list of blocks, the bool mask that it stands for). What stands after a row's count is no block, or another one."""
    blocks = [-(-n // rows) for n, rows in zip(lengths, size, strict=True)]
    seen = torch.rand(*leading, *blocks, generator=g) < density
    counts = seen.sum(-1, dtype=torch.int32)
    capacity = blocks[1] + 2
    indices = torch.randint(-5, blocks[1] + 5, (*leading, blocks[0], capacity), generator=g, dtype=torch.int32)
    for row, own, count in zip(indices.flatten(0, -2), seen.flatten(0, -2), counts.flatten(), strict=True):
        row[:count] = own.nonzero().flatten().to(torch.int32)
    mask = seen.repeat_interleave(size[0], -2)[..., : lengths[0], :].repeat_interleave(size[1], -1)[..., : lengths[1]]
    return BlockList(counts.to(device), indices.to(device), size), mask.to(device)


def random_tiles(
    g: torch.Generator, heads: int, lengths: Sequence[int], tile_keys: int, density: float = 0.5
) -> tuple[torch.Tensor, torch.Tensor]:
    """(bool tiles [heads, ..] of 64 queries and `tile_keys` keys, the bool mask that they stand for)."""
    tiles = torch.rand(heads, -(-lengths[0] // 64), -(-lengths[1] // tile_keys), generator=g) < density
    return tiles, tiles.repeat_interleave(64, -2).repeat_interleave(tile_keys, -1)[:, : lengths[0], : lengths[1]]


def mask_of_list(blocks: BlockList, queries: int, keys: int) -> torch.Tensor:
    """The bool mask [..., queries, keys] that a list stands for."""
    counts, indices, (rows, columns) = blocks
    listed = torch.arange(indices.shape[-1], device=indices.device) < counts.unsqueeze(-1)
    numbers = torch.where(listed, indices, -1).unsqueeze(-1)
    seen = (numbers == torch.arange(-(-keys // columns), device=indices.device)).any(-2)
    return seen.repeat_interleave(rows, -2)[..., :queries, :].repeat_interleave(columns, -1)[..., :keys]
