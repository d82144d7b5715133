"""The argument `blocks`: checks, and the form that operators take, tiles of 64 queries and 64 keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ._checks import check_tensor
from ._ops import InvalidArgument, is_known
from ._span_arguments import check_leading

LIST_TILE = 64  # rows of a tile; csrc/core/problem.h
BLOCK_SIZES = (64, 128)


def check_block_size(size: Any) -> None:
    """Raises InvalidArgument unless this is a pair of 64 or 128."""
    if not isinstance(size, (tuple, list)) or len(size) != 2 or any(rows not in BLOCK_SIZES for rows in size):
        raise InvalidArgument(f"size: expected a pair (rows of queries, rows of keys), each 64 or 128, got {size!r}")


def blocks_in(length: int, size: int) -> int:
    """The number of blocks of `size` rows in a sequence."""
    return (length + size - 1) // size


def tiles_of_blocks(
    blocks: tuple[Tensor, Tensor, tuple[int, int] | None] | None, query: Tensor, batch_and_heads: Sequence[int], keys: int
) -> Tensor | None:
    """A list of blocks as the operators take it: bool `[..., 1 or Hq, tiles of queries, tiles of keys]`, with the dimensions of
    `batch_and_heads`, `[..., Hq]`, and size 1 where it broadcasts. Reads no value on the host.

    Args:
        blocks: counts, indices and size of a BlockList.
        query: `[..., Hq, L, E]`.
        batch_and_heads: query's leading dimensions.
        keys: S.

    Raises:
        TypeError, InvalidArgument: blocks is no list of these lengths.
        NotImplementedError: the device has no kernel for lists.
    """
    if blocks is None:
        return None
    counts, indices, size = _checked(blocks, query, batch_and_heads)
    queries = query.shape[-2]
    if size is None:  # a number of blocks is that of one size alone, unless there is one block
        rows = columns = next((rows for rows in BLOCK_SIZES if counts.shape[-1] == blocks_in(queries, rows)), BLOCK_SIZES[0])
    else:
        rows, columns = size
    key_blocks = blocks_in(keys, columns)
    if is_known(counts.shape[-1] != blocks_in(queries, rows)):
        raise InvalidArgument(
            f"blocks: expected counts of {blocks_in(queries, rows)} blocks of {rows} queries (last dimension), got "
            f"{counts.shape[-1]}"
        )
    listed = listed_blocks(counts, indices, key_blocks)
    for dim, rows_per_block, length in ((-2, rows, queries), (-1, columns, keys)):
        if rows_per_block != LIST_TILE:
            listed = listed.repeat_interleave(rows_per_block // LIST_TILE, dim).narrow(dim, 0, blocks_in(length, LIST_TILE))
    while listed.dim() < len(batch_and_heads) + 2:
        listed = listed.unsqueeze(0)
    return listed


def listed_blocks(counts: Tensor, indices: Tensor, key_blocks: int) -> Tensor:
    """bool `[..., nq, key_blocks]`: whether each block of keys is listed. Indices from a row's count on, and those that are no
    block's, count as none."""
    numbers = torch.arange(indices.shape[-1], device=indices.device)
    valid = (numbers < counts.unsqueeze(-1)) & (indices >= 0) & (indices < key_blocks)
    places = torch.where(valid, indices, key_blocks).long()  # one more block, which is cut off
    listed = torch.zeros(*places.shape[:-1], key_blocks + 1, dtype=torch.bool, device=places.device)
    return listed.scatter(-1, places, True)[..., :key_blocks]


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
    if query.is_cuda:
        raise NotImplementedError("flash_online.attention: blocks: expected None on CUDA, which has no kernel for them yet")
    return counts, indices, size
