"""The rows of a sequence that each rank has, sharding and unsharding.

A sequence of L rows over W ranks. "contiguous": rank r has L / W rows from row r L / W on. "zigzag": the sequence is cut into
2 W chunks, and rank r has chunks r and 2 W - 1 - r, which balances the work of the causal rule; it is torch's head-tail layout
(`torch.distributed.tensor.experimental`, _HeadTailLoadBalancer).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from .._checks import check_int, check_tensor
from .._ops import InvalidArgument
from ._agreement import checked_on_all_ranks, numbered, settle
from ._group import Group, group_of, start_all_gather, start_reduce_scatter, wait

LAYOUTS = ("zigzag", "contiguous")


def check_layout(layout) -> None:
    """Raises InvalidArgument unless `layout` is one of LAYOUTS."""
    if layout not in LAYOUTS:
        raise InvalidArgument(f"layout: expected 'zigzag' or 'contiguous', got {layout!r}")


def pieces_of(rows: int, rank: int, ranks: int, layout: str) -> list[tuple[int, int]]:
    """The ranges [begin, end) of the sequence on a rank with this many rows, in the order of its rows."""
    if layout == "contiguous":
        return [(rank * rows, (rank + 1) * rows)]
    chunk, tail = rows // 2, 2 * ranks - 1 - rank
    return [(rank * chunk, (rank + 1) * chunk), (tail * chunk, (tail + 1) * chunk)]


def in_sequence(rows: Tensor, ranks: int, layout: str) -> Tensor:
    """Rows [ranks * n, ...] from rank order to sequence order; a view if both are the same."""
    if layout == "contiguous" or ranks == 1:
        return rows
    chunks = rows.chunk(2 * ranks) if rows.shape[0] else [rows]
    return torch.cat([*chunks[::2], *chunks[1::2][::-1]])


def by_rank(rows: Tensor, ranks: int, layout: str) -> Tensor:
    """The inverse of `in_sequence`."""
    if layout == "contiguous" or ranks == 1:
        return rows
    chunks = rows.chunk(2 * ranks) if rows.shape[0] else [rows]
    return torch.cat([chunk for pair in zip(chunks[:ranks], chunks[::-1][:ranks], strict=True) for chunk in pair])


def positions(
    length: int,
    group: dist.ProcessGroup | dist.DeviceMesh | None = None,
    layout: str = "zigzag",
    *,
    device: torch.device | str | int | None = None,
) -> Tensor:
    """Positions in the whole sequence of this rank's rows (see `shard`): for rotary embedding, or `position_ids`.

    Args:
        length: rows of the whole sequence, a multiple of the ranks (contiguous) or of twice the ranks (zigzag).
        group: as in `context_parallel_attention`, like layout.
        device: of the result; torch's default device if None.

    Returns:
        int64 `[length / ranks]`. Local: nothing is communicated.

    Raises:
        InvalidArgument (a RuntimeError and ValueError): the length does not divide, or an argument is invalid.
    """
    found = group_of(group)
    check_layout(layout)
    length = check_int("length", length)
    rows = _rows_of_rank("length", length, found, layout)
    ranges = [torch.arange(*piece, device=device) for piece in pieces_of(rows, found.rank, found.ranks, layout)]
    return ranges[0] if len(ranges) == 1 else torch.cat(ranges)


def shard(
    tensors: Sequence[Tensor],
    dims: Sequence[int] | int,
    group: dist.ProcessGroup | dist.DeviceMesh | None = None,
    layout: str = "zigzag",
) -> list[Tensor]:
    """This rank's rows of tensors that are whole on every rank.

    Args:
        tensors: a sequence of tensors of any dtypes and shapes.
        dims: the dimension to shard, one per tensor or one for all. Its length is a multiple of the ranks (contiguous) or of
            twice the ranks (zigzag); pad the sequence otherwise. Shift labels before sharding them.
        group: as in `context_parallel_attention`, like layout; "zigzag" is torch's head-tail layout.

    Returns:
        A list of new tensors, the dimension `ranks` times shorter. Differentiable: the gradient of a whole tensor is 0 outside
        this rank's rows. Local: nothing is communicated.

    Raises:
        InvalidArgument (a RuntimeError and ValueError): a length does not divide, or an argument is invalid.
    """
    found = group_of(group)
    check_layout(layout)
    shards = []
    for name, tensor, dim in _named(tensors, dims):
        rows = _rows_of_rank(f"{name}: dimension {dim}", tensor.shape[dim], found, layout)
        parts = [tensor.narrow(dim, a, b - a) for a, b in pieces_of(rows, found.rank, found.ranks, layout)]
        # Copy even a single range: a view would keep the whole tensor alive.
        shards.append(torch.cat(parts, dim) if len(parts) > 1 else parts[0].clone(memory_format=torch.contiguous_format))
    return shards


# Dtypes without a gradient that gloo or NCCL does not take: their bytes are gathered.
_NO_COLLECTIVES = (torch.int16, torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2)


def unshard(
    tensors: Sequence[Tensor],
    dims: Sequence[int] | int,
    group: dist.ProcessGroup | dist.DeviceMesh | None = None,
    layout: str = "zigzag",
) -> list[Tensor]:
    """The inverse of `shard`: the whole tensors, on every rank.

    Args:
        tensors: as in `shard`, of the same shapes and dtypes on all ranks. One collective per tensor.
        dims: as in `shard`, like group and layout.

    Returns:
        A list of new tensors, the dimension `ranks` times longer. Differentiable: the gradient of a rank's rows is summed over
        all ranks, so a loss that every rank computes of the whole counts once per rank.

    Raises:
        InvalidArgument (a RuntimeError and ValueError): an argument is invalid, or the ranks' calls differ; on every rank, at
            the time that `context_parallel_attention` says.
    """
    found = group_of(group)

    def check():
        check_layout(layout)
        named = _named(tensors, dims)
        description: dict[str, object] = {"function": "unshard", "layout": layout}
        for name, tensor, dim in named:
            if layout == "zigzag" and tensor.shape[dim] % 2:
                raise InvalidArgument(
                    f"{name}: expected an even number of rows (dimension {dim}) in a zigzag layout, got {tensor.shape[dim]}"
                )
            grad = torch.is_grad_enabled() and tensor.requires_grad
            description[name] = f"{list(tensor.shape)} {tensor.dtype} on {tensor.device.type}, dim {dim}, gradient {grad}"
        return description, named

    whole, named = [], checked_on_all_ranks(found, check)
    found = numbered(found)
    for _, tensor, dim in named:
        rows = tensor.movedim(dim, 0)
        if tensor.dtype in _NO_COLLECTIVES:
            rows = _Whole.apply(rows.contiguous().view(torch.uint8), found, layout).view(tensor.dtype)
        else:
            rows = _Whole.apply(rows, found, layout)
        whole.append(rows.movedim(0, dim).contiguous())
    return whole


class _Whole(Function):
    """Rows [n, ...] of every rank as [ranks * n, ...] in sequence order."""

    @staticmethod
    def forward(ctx, rows: Tensor, group: Group, layout: str):
        ctx.group, ctx.layout = group, layout
        return in_sequence(wait(start_all_gather(rows, group)) if rows.numel() else _repeated(rows, group), group.ranks, layout)

    @staticmethod
    def backward(ctx, grad):
        settle(ctx.group)
        return _Part.apply(grad, ctx.group, ctx.layout), None, None


class _Part(Function):
    """The transpose of _Whole."""

    @staticmethod
    def forward(ctx, whole: Tensor, group: Group, layout: str):
        ctx.group, ctx.layout = group, layout
        rows = by_rank(whole, group.ranks, layout)
        if not rows.numel():
            return whole.new_empty(whole.shape[0] // group.ranks, *whole.shape[1:])
        wide = rows if rows.dtype == torch.float64 else rows.float()  # 16-bit sums would be rounded on each rank
        return wait(start_reduce_scatter(wide, group)).to(whole.dtype)

    @staticmethod
    def backward(ctx, grad):
        return _Whole.apply(grad, ctx.group, ctx.layout), None, None


def _repeated(rows: Tensor, group: Group) -> Tensor:
    return rows.new_empty(rows.shape[0] * group.ranks, *rows.shape[1:])


def _rows_of_rank(name: str, length: int, group: Group, layout: str) -> int:
    parts = group.ranks * (2 if layout == "zigzag" else 1)
    if length < 0 or length % parts:
        raise InvalidArgument(
            f"{name}: expected a multiple of {parts} in a {layout} layout of {group.ranks} ranks, got length {length}"
        )
    return length // group.ranks


def _named(tensors, dims) -> list[tuple[str, Tensor, int]]:
    """(name, tensor, dimension from 0) of each."""
    if not isinstance(tensors, (list, tuple)):
        raise TypeError(f"tensors: expected a list or tuple of Tensors, got {type(tensors).__name__}")
    dims = list(dims) if isinstance(dims, (list, tuple)) else [dims] * len(tensors)
    if len(dims) != len(tensors):
        raise InvalidArgument(f"dims: expected an int, or one for each of the {len(tensors)} tensors, got {len(dims)}")
    named = []
    for n, (tensor, dim) in enumerate(zip(tensors, dims, strict=True)):
        check_tensor(f"tensors[{n}]", tensor)
        dim = check_int(f"dims[{n}]", dim)
        if not -tensor.dim() <= dim < tensor.dim():
            raise IndexError(f"dims[{n}]: {dim} is out of range for a tensor of {tensor.dim()} dimensions")
        named.append((f"tensors[{n}]", tensor, dim % tensor.dim()))
    return named
