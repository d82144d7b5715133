"""The argument `blocks`: checks, and the form that operators take, tiles of 64 queries and 64 or 128 keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ._checks import check_tensor
from ._ops import InvalidArgument, below_autograd, direct_call, is_known, ops
from ._plain import are_plain_numbers
from ._span_arguments import check_leading

LIST_TILE = 64  # queries of a tile; csrc/core/problem.h
BLOCK_SIZES = (64, 128)
_block_tiles, _run_block_tiles = direct_call(ops.block_tiles), below_autograd(ops.block_tiles)


def check_block_size(size: Any) -> None:
    """Raises InvalidArgument unless this is a pair of 64 or 128."""
    if (
        not isinstance(size, (tuple, list))
        or len(size) != 2
        or any(type(rows) is not int or rows not in BLOCK_SIZES for rows in size)
    ):
        raise InvalidArgument(f"size: expected a pair (rows of queries, rows of keys), each 64 or 128, got {size!r}")


def blocks_in(length: int, size: int) -> int:
    """The number of blocks of `size` rows in a sequence."""
    return (length + size - 1) // size


def try_fast_tiles(blocks: Sequence[Any], query: Tensor, shape: torch.Size, keys: int) -> Tensor | None:
    """`tiles_of_blocks` of plain tensors for a query of this shape, [B, Hq, L, E]: counts of two or three dimensions, and sizes
    of 1 where they broadcast. None for any other list: the caller then runs all checks."""
    counts, indices, size = blocks
    if type(counts) is not Tensor or type(size) is not tuple or len(size) != 2 or not 2 <= counts.dim() <= 3:
        return None
    rank = counts.dim()
    if not are_plain_numbers(counts, query, rank) or not are_plain_numbers(indices, query, rank + 1):
        return None
    rows, columns = size
    sizes = counts.shape
    if sizes != indices.shape[:-1] or rows not in BLOCK_SIZES or columns not in BLOCK_SIZES:
        return None
    if sizes[-1] != blocks_in(shape[2], rows) or sizes[-2] not in (1, shape[1]) or rank == 3 and sizes[0] not in (1, shape[0]):
        return None
    tiles = _run_block_tiles(counts, indices, rows, columns, shape[2], keys)
    return tiles if rank == 3 else tiles.unsqueeze(0)


def tiles_of_blocks(
    blocks: tuple[Tensor, Tensor, tuple[int, int] | None] | None,
    query: Tensor,
    batch_and_heads: Sequence[int],
    queries: int,
    keys: int,
) -> Tensor | None:
    """A list of blocks as the operators take it: bool `[..., 1 or Hq, tiles of queries, blocks of keys]`, with the dimensions
    of `batch_and_heads`, `[..., Hq]`, and size 1 where it broadcasts. Reads no value on the host.

    Args:
        blocks: counts, indices and size of a BlockList.
        query: the list is on its device.
        batch_and_heads: query's leading dimensions, `[..., Hq]`.
        queries: L.
        keys: S.

    Raises:
        TypeError, InvalidArgument: blocks is no list of these lengths.
    """
    if blocks is None:
        return None
    counts, indices, size = _checked(blocks, query, batch_and_heads)
    if size is None:  # a number of blocks is that of one size alone, unless there is one block
        rows = columns = next((rows for rows in BLOCK_SIZES if counts.shape[-1] == blocks_in(queries, rows)), BLOCK_SIZES[0])
    else:
        rows, columns = size
    if is_known(counts.shape[-1] != blocks_in(queries, rows)):
        raise InvalidArgument(
            f"blocks: expected counts of {blocks_in(queries, rows)} blocks of {rows} queries (last dimension), got "
            f"{counts.shape[-1]}"
        )
    tiles = _tiles(counts, indices, rows, columns, queries, keys)
    return tiles.view((1,) * (len(batch_and_heads) + 2 - tiles.dim()) + tiles.shape)


def tile_keys(tiles: Tensor, keys: int) -> int:
    """The keys of a tile of `tiles_of_blocks`."""
    return next(size for size in BLOCK_SIZES if tiles.shape[-1] == blocks_in(keys, size))


def listed_blocks(counts: Tensor, indices: Tensor, key_blocks: int) -> Tensor:
    """bool `[..., nq, key_blocks]`: whether each block of keys is listed. Indices from a row's count on, and those that are no
    block's, count as none."""
    return _tiles(counts, indices, LIST_TILE, LIST_TILE, counts.shape[-1] * LIST_TILE, key_blocks * LIST_TILE)


def _tiles(counts: Tensor, indices: Tensor, rows: int, columns: int, queries: int, keys: int) -> Tensor:
    """The operator block_tiles, for counts and indices whose leading dimensions broadcast."""
    if counts.shape != indices.shape[:-1]:
        shape = torch.broadcast_shapes(counts.shape, indices.shape[:-1])
        counts, indices = counts.expand(shape), indices.expand(*shape, -1)
    return _block_tiles(counts, indices, rows, columns, queries, keys)


def _checked(blocks: Any, query: Tensor, batch_and_heads: Sequence[int]) -> tuple[Tensor, Tensor, tuple[int, int] | None]:
    counts, indices, size = blocks
    if size is not None:
        check_block_size(size)
    for name, tensor in (("blocks.counts", counts), ("blocks.indices", indices)):
        check_tensor(name, tensor)
        if tensor.dtype != torch.int32:
            raise InvalidArgument(f"{name}: expected dtype int32, got {tensor.dtype}")
        if tensor.device != query.device:
            raise InvalidArgument(f"{name}: expected query's device {query.device}, got {tensor.device}")
    if counts.dim() < 1 or indices.dim() != counts.dim() + 1:
        raise InvalidArgument(
            "blocks.indices: expected [..., nq, capacity], one dimension more than counts [..., nq], got "
            f"{list(indices.shape)} and {list(counts.shape)}"
        )
    if is_known(indices.shape[-2] != counts.shape[-1]):
        raise InvalidArgument(f"blocks.indices: expected {counts.shape[-1]} blocks of queries, got {indices.shape[-2]}")
    check_leading("blocks.counts", counts, counts.dim() - 1, batch_and_heads)
    check_leading("blocks.indices", indices, indices.dim() - 2, batch_and_heads)
    return counts, indices, size
