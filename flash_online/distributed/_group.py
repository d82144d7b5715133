"""A process group, and its collectives."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .._ops import InvalidArgument

if not dist.is_available():
    raise ImportError("flash_online.distributed: this torch was built without torch.distributed")


class Group(NamedTuple):
    """The name of a process group in torch's functional collectives, and this process's rank. The group itself is not held:
    gloo aborts the process if an autograd graph or a traceback holds a group until the interpreter exits."""

    name: str
    rank: int
    ranks: int
    call: int = 0  # the number of a call that was compared (_agreement.py), for its backward pass


def group_of(group: dist.ProcessGroup | dist.DeviceMesh | None) -> Group:
    """The process group of a caller's argument: a ProcessGroup, a DeviceMesh of one dimension, or None for the default
    group."""
    if not dist.is_initialized():
        raise InvalidArgument("group: expected a call after init_process_group, got no process group of torch.distributed")
    if group is None:
        group = dist.group.WORLD
    elif isinstance(group, dist.DeviceMesh):
        if group.ndim != 1:
            raise InvalidArgument(f"group: expected a DeviceMesh of 1 dimension (such as mesh['cp']), got {group.ndim}")
        group = group.get_group()
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise InvalidArgument("group: expected a group with this process in it, got one without")
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"group: expected a ProcessGroup, a DeviceMesh or None, got {type(group).__name__}")
    return Group(group.group_name, dist.get_rank(group), dist.get_world_size(group))


def process_group(group: Group | str) -> dist.ProcessGroup:
    """The ProcessGroup itself, also by its name alone."""
    return _resolve_process_group(group if isinstance(group, str) else group.name)


# --- Collectives ------------------------------------------------------------------------------------------------------------
#
# torch's functional collectives, which Dynamo traces and CUDA graphs capture. A started collective runs on the backend's
# stream, after the current stream's work so far. `wait` makes the current stream, not the host, wait for it (gloo has no
# streams: there the host waits). In between, the current stream computes something else.

_c10d, _resolve_process_group = torch.ops._c10d_functional, torch._C._distributed_c10d._resolve_process_group
wait: Callable[[Tensor], Tensor] = _c10d.wait_tensor.default


def start_all_gather(tensor: Tensor, group: Group) -> Tensor:
    """[n, ...] of all ranks as [ranks * n, ...] in rank order, after `wait`."""
    return _c10d.all_gather_into_tensor.default(tensor.contiguous(), group.ranks, group.name)


def start_reduce_scatter(tensor: Tensor, group: Group) -> Tensor:
    """Starts the sum over ranks of [ranks * n, ...]. After `wait`, each rank has its own [n, ...] of the sum."""
    return _c10d.reduce_scatter_tensor.default(tensor.contiguous(), "sum", group.ranks, group.name)


def all_reduce_(tensor: Tensor, group: Group) -> Tensor:
    """Sums a contiguous tensor over ranks, in place."""
    return wait(_c10d.all_reduce_.default(tensor, "sum", group.name)) if tensor.numel() else tensor


def max_of_ranks(own: Tensor, begin: int, heads: int, group: Group) -> Tensor:
    """The largest of all ranks' numbers per head, [..., heads], where a rank has those of its heads from `begin` on; NaN if one
    is NaN."""
    whole = torch.nn.functional.pad(own, (begin, heads - begin - own.shape[-1]), value=float("-inf"))
    return wait(start_all_gather(whole.unsqueeze(0), group)).amax(0)


def start_all_to_all(messages: Tensor, group: Group) -> Tensor:
    """Sends a contiguous vector of messages of equal size, one for each other rank, in rank order. Returns the received
    messages in the same order, after `wait`. Either all ranks have something to send or none has."""
    if not messages.numel():
        return messages
    sizes = [messages.numel() // (group.ranks - 1) * (rank != group.rank) for rank in range(group.ranks)]
    return start_exchange(messages, sizes, sizes, group)


def start_exchange(messages: Tensor, sent: list[int], received: list[int], group: Group) -> Tensor:
    """Sends a contiguous vector with `sent[rank]` elements for each rank. Returns the `received[rank]` elements of each, after
    `wait`."""
    return _c10d.all_to_all_single.default(messages, received, sent, group.name)


# Methods of a ProcessGroup, for eager mode. A frame of torch.distributed's functions would hold the group in the traceback of
# an error. torch 2.13 renamed the methods.

_all_gather = getattr(dist.ProcessGroup, "all_gather_single", None) or dist.ProcessGroup._allgather_base
_all_to_all = getattr(dist.ProcessGroup, "all_to_all_single", None) or dist.ProcessGroup.alltoall_base
_ON_CURRENT_STREAM = dist.AllToAllOptions()
_ON_CURRENT_STREAM.asyncOp = False  # over NCCL: nothing else is computed meanwhile


def all_gather_on_host(name: str, received: Tensor, own: Tensor) -> dist.Work:
    """Starts gathering the CPU tensors of all ranks of the group of this name into `received`."""
    return _all_gather(process_group(name), received, own)


def all_to_all(messages: Tensor, splits: list[int], group: Group) -> Tensor:
    """Sends `splits[rank]` elements to each rank, and returns as many of each."""
    received = torch.empty_like(messages)
    work = _all_to_all(process_group(group), received, messages, splits, splits, _ON_CURRENT_STREAM)
    if work is not None:  # NCCL has nothing to wait for on the current stream
        work.wait()
    return received
