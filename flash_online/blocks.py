"""Sparse attention by blocks: lists of the blocks of keys that each block of queries sees, and how they are chosen.

    scores = flash_online.block_scores(query, key, (64, 64))
    blocks = flash_online.BlockList.topk(scores, 16, causal=True)
    out = flash_online.attention(query, key, value, causal=True, blocks=blocks)

Lists lie on the device; no function reads them on the host, except `BlockList.from_flex`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from . import _policy
from ._autograd import is_differentiated, without_derivative
from ._block_arguments import blocks_in, check_block_size, listed_blocks
from ._checks import check_flag, check_float, check_floating, check_int, check_size, check_tensor
from ._ops import InvalidArgument, direct_call, implement, is_known, ops, without_autocast

__all__ = ["BlockList", "block_scores"]

_DEFAULT_SIZE = (128, 128)
_block_topk, _block_means, _block_maxima = map(direct_call, (ops.block_topk, ops.block_means, ops.block_maxima))
without_derivative(ops.block_topk, "which blocks are chosen has none")
for _operator in (ops.block_means, ops.block_maxima):
    without_derivative(_operator, "block_scores differentiates operations of torch")
_CHUNK_SCORES = 1 << 24  # scores of all heads that exist at a time where no kernel of ours makes them, or of a block of queries


class BlockList(NamedTuple):
    """The blocks of keys that each block of queries sees: attention's argument `blocks`.

    Attributes:
        counts: int32 `[..., 1 or Hq, nq]`: how many blocks each block of queries sees.
        indices: int32 `[..., 1 or Hq, nq, capacity]`, ascending: their numbers. What stands from a row's count on is not read,
            nor is a number outside of the blocks.
        size: rows of a block of queries and of a block of keys, 64 or 128 each; None: both are the same, and follow from how
            many blocks the queries have. The last blocks may be shorter.
    """

    counts: Tensor
    indices: Tensor
    size: tuple[int, int] | None = None

    @staticmethod
    def from_mask(mask: Tensor, size: tuple[int, int] | None = None) -> BlockList:
        """The list of a mask of whole blocks.

        Args:
            mask: bool `[..., 1 or Hq, nq, nk]`, an element per block of queries and block of keys; True: it is seen.
            size: as in BlockList.

        Raises:
            InvalidArgument: mask or size is not as above.
        """
        check_tensor("mask", mask)
        if size is not None:
            check_block_size(size)
        if mask.dtype != torch.bool or mask.dim() < 2:
            raise InvalidArgument(f"mask: expected bool [..., nq, nk], got {mask.dtype} {list(mask.shape)}")
        numbers = torch.arange(mask.shape[-1], dtype=torch.int32, device=mask.device)
        unseen = mask.shape[-1]
        indices = torch.where(mask, numbers, unseen).sort(-1).values
        return BlockList(mask.sum(-1, dtype=torch.int32), indices, size)

    @staticmethod
    def from_flex(block_mask: Any) -> BlockList:
        """The list of a FlexAttention `BlockMask` of whole blocks. Reads it on the host, once.

        Args:
            block_mask: of torch.nn.attention.flex_attention, with blocks of 64 or 128.

        Raises:
            InvalidArgument: a block is partial, or of another size.
        """
        from torch.nn.attention.flex_attention import BlockMask, noop_mask

        if not isinstance(block_mask, BlockMask):
            raise TypeError(f"block_mask: expected a BlockMask of FlexAttention, got {type(block_mask).__name__}")
        size = tuple(block_mask.BLOCK_SIZE)
        check_block_size(size)
        parts = [(block_mask.full_kv_num_blocks, block_mask.full_kv_indices)]
        partial = block_mask.kv_num_blocks, block_mask.kv_indices
        if block_mask.mask_mod in (None, noop_mask):  # hides nothing, so that these blocks are whole too
            parts.append(partial)
        elif bool(partial[0].any()):
            raise InvalidArgument(
                f"block_mask: expected whole blocks, got {int(partial[0].sum())} partial ones: use query_spans, key_spans or "
                "mask for what they hide"
            )
        key_blocks = partial[1].shape[-1]
        listed = (listed_blocks(counts, indices, key_blocks) for counts, indices in parts if counts is not None)
        seen = functools.reduce(torch.logical_or, listed, torch.zeros_like(partial[1], dtype=torch.bool))
        return BlockList.from_mask(seen, (size[0], size[1]))

    @staticmethod
    def dense(L: int, S: int, size: tuple[int, int] = _DEFAULT_SIZE, *, device: torch.device | str | None = None) -> BlockList:
        """The list in which every block of L queries sees every block of S keys."""
        for name, length in (("L", L), ("S", S)):
            if is_known(check_size(name, length) < 0):
                raise InvalidArgument(f"{name}: expected an int >= 0, got {length}")
        check_block_size(size)
        seen = torch.ones(1, blocks_in(L, size[0]), blocks_in(S, size[1]), dtype=torch.bool, device=device)
        return BlockList.from_mask(seen, size)

    @staticmethod
    def topk(scores: Tensor, k: int, *, causal: bool = False, size: tuple[int, int] | None = None) -> BlockList:
        """The k blocks of keys with the largest scores for each block of queries, or fewer where fewer have a score above -inf.
        Of equal scores the first blocks are chosen; scores are compared as float32.

        Args:
            scores: floating `[..., 1 or Hq, nq, nk]`, as `block_scores` returns them.
            k: how many, at least 1.
            causal: blocks of keys that begin after a block of queries are left out, and the block's own keys are always among
                the k: the block of keys with its last query. Where the last block of queries is not full, -inf says which
                blocks of keys come after that query, as in the scores of `block_scores(causal=True)`.
            size: as in BlockList; needed where blocks of queries and of keys differ.

        Raises:
            InvalidArgument: an argument is not as above.
        """
        check_tensor("scores", scores)
        check_int("k", k)
        check_flag("causal", causal)
        if size is not None:
            check_block_size(size)
        if not scores.is_floating_point() or scores.dim() < 2:
            raise InvalidArgument(f"scores: expected floating [..., nq, nk], got {scores.dtype} {list(scores.shape)}")
        if is_known(k < 1):
            raise InvalidArgument(f"k: expected at least 1, got {k}")
        k = torch.sym_min(k, torch.sym_max(scores.shape[-1], 1))
        counts, indices = _block_topk(scores.detach().float(), k, causal, *(size or (1, 1)))
        return BlockList(counts, indices, size)

    def transpose(self, key_blocks: int | None = None) -> BlockList:
        """The list of the blocks of queries that see each block of keys.

        Args:
            key_blocks: how many blocks of keys there are; None: the largest number in the list says so, read on the host.

        Returns:
            A list with counts `[..., 1 or Hq, key_blocks]` and a size in the other order. Its transpose has the same blocks.
        """
        counts, indices, size = self
        if key_blocks is None:
            valid = torch.arange(indices.shape[-1], device=indices.device) < counts.unsqueeze(-1)
            key_blocks = int(torch.where(valid, indices, -1).max()) + 1 if valid.numel() else 0
        if is_known(check_int("key_blocks", key_blocks) < 0):
            raise InvalidArgument(f"key_blocks: expected None or an int >= 0, got {key_blocks}")
        seen = listed_blocks(counts, indices, key_blocks)
        return BlockList.from_mask(seen.transpose(-1, -2), None if size is None else (size[1], size[0]))


def check_blocks(blocks: object) -> None:
    """Raises TypeError unless this is a BlockList or None."""
    if blocks is not None and not isinstance(blocks, BlockList):
        raise TypeError(f"blocks: expected a BlockList or None, got {type(blocks).__name__}")


def block_scores(
    query: Tensor,
    key: Tensor,
    size: tuple[int, int],
    *,
    causal: bool = False,
    reduce: str = "mean",
    scale: float | None = None,
) -> Tensor:
    """A score for each block of queries and block of keys, from which `BlockList.topk` chooses.

    Args:
        query: `[..., Hq, L, E]`, floating.
        key: `[..., Hk, S, E]`, of query's dtype and device. Hk divides Hq; leading dimensions are query's.
        size: as in BlockList.
        causal: query i sees keys j <= i only; blocks without a visible pair get -inf.
        reduce: "mean": the score of the blocks' mean query and mean key; "max": the largest score of the visible pairs.
        scale: 1 / sqrt(E) if None.

    Returns:
        float32 `[..., Hq, nq, nk]`. With "max" no score is written on CUDA, unless a derivative is asked for or the tensors are
        float64: no more than 2^24 then exist at a time, or those of one block of queries, and so it is on the CPU.

    Raises:
        InvalidArgument: a tensor or option is not as above.

    Source: MoBA (arXiv 2502.13189), VSA (arXiv 2505.13389).
    """
    check_tensor("query", query)
    check_tensor("key", key)
    check_flag("causal", causal)
    check_block_size(size)
    check_floating("query", query.dtype)
    for name, tensor in (("query", query), ("key", key)):
        reason = _policy.layout_refusal(tensor)
        if reason is not None:
            raise _policy.no_kernel("block_scores", f"{name}: {reason}")
    scale = None if scale is None else check_float("scale", scale)
    if reduce not in ("mean", "max"):
        raise InvalidArgument(f"reduce: expected 'mean' or 'max', got {reduce!r}")
    fits = query.dim() == key.dim() >= 3 and query.shape[:-3] == key.shape[:-3] and query.shape[-1] == key.shape[-1]
    if not fits or key.shape[-3] == 0 or query.shape[-3] % key.shape[-3]:
        raise InvalidArgument(
            f"key: expected [..., Hk, S, E] for query {list(query.shape)}, where Hk divides Hq, got {list(key.shape)}"
        )
    if key.dtype != query.dtype or key.device != query.device:
        raise InvalidArgument(
            f"key: expected query's dtype {query.dtype} and device {query.device}, got {key.dtype} and {key.device}"
        )
    if scale is None:
        scale = query.shape[-1] ** -0.5 if query.shape[-1] else 1.0
    if reduce == "max":
        return _by_kernel(_block_maxima, _largest_scores, query, key, *size, causal, float(scale))
    means = _by_kernel(_block_means, _means, query, key, *size)
    scores = _scaled_products(*means, float(scale))
    if not causal:
        return scores
    last = _ends(query.shape[-2], size[0], query.device) - 1
    first = torch.arange(scores.shape[-1], device=query.device) * size[1]
    return scores.masked_fill(first > last.unsqueeze(-1), -torch.inf)


@without_autocast
def _scaled_products(query: Tensor, key: Tensor, scale: float) -> Tensor:
    """scale query key^T; the query heads of a key head are rows of one product."""
    *batch, heads, rows, width = query.shape
    groups = math.prod(batch) * key.shape[-3]
    left = query.reshape(groups, heads // key.shape[-3] * rows, width)
    right = key.reshape(groups, key.shape[-2], width).transpose(-1, -2)
    products = torch.baddbmm(left.new_empty(()), left, right, beta=0, alpha=scale)
    return products.view(*batch, heads, rows, key.shape[-2])


def _per_query_head(key: Tensor, query: Tensor) -> Tensor:
    return key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)


def _ends(length: int, size: int, device: torch.device) -> Tensor:
    """The end of each block of a sequence."""
    return ((torch.arange(blocks_in(length, size), device=device) + 1) * size).clamp(max=length)


def _by_kernel(operator: Callable, by_torch: Callable, query: Tensor, key: Tensor, *options):
    """The operator's results for query and key with their own leading dimensions; those of torch's operations where a
    derivative is asked for, or no kernel takes the tensors."""
    refused = query.is_cuda and query.dtype == torch.float64 or _policy.is_dtensor(query)
    if refused or is_differentiated(query) or is_differentiated(key) or _policy.refusal("attention", query, key) is not None:
        return by_torch(query, key, *options)
    batch = query.shape[:-3]
    if len(batch) == 1:
        return operator(query, key, *options)
    results = operator(*(rows.reshape(batch.numel(), *rows.shape[-3:]) for rows in (query, key)), *options)
    return tree_map(lambda result: result.unflatten(0, batch) if batch else result.squeeze(0), results)


def _means(query: Tensor, key: Tensor, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """The means of blocks of queries and of keys, float32 `[..., blocks, E]`."""
    return _means_of(query, rows), _means_of(key, columns)


def _means_of(rows: Tensor, size: int) -> Tensor:
    whole = rows.shape[-2] // size
    rest = rows.shape[-2] - whole * size
    means = rows.narrow(-2, 0, whole * size).unflatten(-2, (whole, size)).mean(-2, dtype=torch.float32)  # reads rows once
    if not rest:
        return means
    return torch.cat([means, rows.narrow(-2, whole * size, rest).mean(-2, keepdim=True, dtype=torch.float32)], -2)


@without_autocast
def _largest_scores(query: Tensor, key: Tensor, rows: int, columns: int, causal: bool, scale: float) -> Tensor:
    """The largest score of each block, from pieces of the scores."""
    length, keys = query.shape[-2], key.shape[-2]
    query_blocks, key_blocks = blocks_in(length, rows), blocks_in(keys, columns)
    key = torch.nn.functional.pad(_per_query_head(key, query).float(), (0, 0, 0, key_blocks * columns - keys))
    numbers = torch.arange(key.shape[-2], device=query.device)
    heads = query.shape[:-2].numel()
    at_once = max(1, _CHUNK_SCORES // max(1, heads * key.shape[-2] * rows))
    results = []
    for block in range(0, query_blocks, at_once):
        begin, end = block * rows, min((block + at_once) * rows, length)
        scores = (query[..., begin:end, :].float() @ key.transpose(-1, -2)).mul_(scale)
        if causal:
            scores.masked_fill_(numbers > torch.arange(begin, end, device=query.device).unsqueeze(-1), -torch.inf)
        scores[..., keys:] = -torch.inf
        scores = scores.unflatten(-1, (key_blocks, columns)).amax(-1)
        count = blocks_in(end - begin, rows)
        padded = torch.nn.functional.pad(scores, (0, 0, 0, count * rows - (end - begin)), value=-torch.inf)
        results.append(padded.unflatten(-2, (count, rows)).amax(-2))
    empty = query.new_empty((*query.shape[:-2], 0, key_blocks), dtype=torch.float32)
    return torch.cat(results, -2) if results else empty


implement("block_means", _means, "CPU")
implement("block_maxima", _largest_scores, "CPU")
