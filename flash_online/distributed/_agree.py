"""Ranks agree on a call before they communicate for it: a rank that has other shapes or options, or that refused its arguments,
becomes an error on every rank, and not a collective that never ends.
"""

from __future__ import annotations

import hashlib

import torch
import torch.distributed as dist
from torch import Tensor

from .._ops import InvalidArgument

# torch 2.13 renamed the function, and warns of the old name.
_all_gather = getattr(dist, "all_gather_single", None) or getattr(dist, "all_gather_into_tensor", None)


def gather(tensor: Tensor, group) -> Tensor:
    """The tensors of all ranks, which have one shape and dtype, stacked along a new first dimension in the order of ranks."""
    ranks = dist.get_world_size(group)
    whole = tensor.new_empty([ranks, *tensor.shape])
    if tensor.numel():
        _all_gather(whole.view(-1), tensor.contiguous().view(-1), group=group)
    return whole


def check_group(group) -> None:
    """Raises unless `group` is a process group, or None for the default one, that this rank belongs to."""
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError("group: torch.distributed has no process group; call torch.distributed.init_process_group first")
    if group is not None and not isinstance(group, dist.ProcessGroup):
        if group is dist.GroupMember.NON_GROUP_MEMBER:
            raise InvalidArgument("group: this rank is no member of it")
        raise TypeError(f"group: expected a torch.distributed.ProcessGroup or None, got {type(group).__name__}")
    if dist.get_rank(group) < 0:
        raise InvalidArgument("group: this rank is no member of it")


def header_device(group, like) -> torch.device:
    """Where ranks exchange numbers that the host reads: the CPU if the group has a backend for it, else `like`'s device."""
    if "cpu" in dist.get_backend_config(group):
        return torch.device("cpu")
    if isinstance(like, Tensor) and like.is_cuda:
        return like.device
    return torch.device("cuda", torch.cuda.current_device())


def agree(
    function: str, group, device: torch.device, common: dict[str, object], own: list, error: Exception | None
) -> list[list[int]]:
    """`own` of every rank: integers, or one-element int64 tensors on `device`, as many on each rank. Raises InvalidArgument on
    every rank if one has another value in `common`, or could not take its arguments: that rank raises its own `error`."""
    digest = hashlib.blake2b(repr(sorted(common.items())).encode(), digest_size=7).digest()
    header = [int(error is not None), int.from_bytes(digest, "big"), *own]
    parts = [h.reshape(1) if isinstance(h, Tensor) else torch.tensor([h], dtype=torch.int64) for h in header]
    headers = gather(torch.cat([part.to(device) for part in parts]), group).tolist()
    refused = [rank for rank, (failed, *_) in enumerate(headers) if failed]
    if refused:
        words = _gather_objects(None if error is None else f"{type(error).__name__}: {error}", group)
        if error is not None:
            raise error
        raise InvalidArgument(f"{function}: rank {refused[0]} of the group refused its arguments: {words[refused[0]]}")
    if any(header[1] != headers[0][1] for header in headers):
        everyones = _gather_objects(common, group)
        told = []
        for name in common:
            values = [others.get(name) for others in everyones]
            if any(value != values[0] for value in values):
                by_rank = ", ".join(f"{value} on rank {rank}" for rank, value in enumerate(values))
                told.append(f"{name}: {by_rank}")
        raise InvalidArgument(f"{function}: the ranks of the group do not agree. " + "; ".join(told))
    return [numbers for _, _, *numbers in headers]


def _gather_objects(value, group) -> list:
    values = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values
