"""A process group, its collectives, and the check that all ranks make the same call."""

from __future__ import annotations

import hashlib
import json
import struct
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

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


def start_all_to_all(messages: Tensor, group: Group) -> Tensor:
    """Sends a contiguous vector of messages of equal size, one for each other rank, in rank order. Returns the received
    messages in the same order, after `wait`. Either all ranks have something to send or none has."""
    if not messages.numel():
        return messages
    sizes = [messages.numel() // (group.ranks - 1) * (rank != group.rank) for rank in range(group.ranks)]
    return _c10d.all_to_all_single.default(messages, sizes, sizes, group.name)


# --- The ranks' agreement ---------------------------------------------------------------------------------------------------

_hosts: weakref.WeakKeyDictionary[dist.ProcessGroup, str] = weakref.WeakKeyDictionary()  # cached results of _cpu_group


def _takes_cpu_tensors(group: dist.ProcessGroup) -> bool:
    try:
        group._get_backend(torch.device("cpu"))
        return True
    except RuntimeError:
        return False


def _cpu_group(group: Group) -> str:
    """The name of a group of the same ranks for CPU tensors: this group, or a gloo group that is made once."""
    own = _resolve_process_group(group.name)
    if own not in _hosts:
        name = group.name
        if not _takes_cpu_tensors(own):
            ranks, timeout = dist.get_process_group_ranks(own), own._get_backend(own._device_types[0]).options._timeout
            name = dist.new_group(ranks, timeout, "gloo", use_local_synchronization=True).group_name
        _hosts[own] = name
    return _hosts[own]


def checked_on_all_ranks(group: Group, call: Callable[[], tuple[dict[str, Any], Any]]) -> Any:
    """The result of `call`, which checks this rank's arguments without communication and returns (description, result).

    Raises on every rank if it raised on any rank, or if the descriptions differ: otherwise the valid ranks would wait for the
    rest. It costs a gather of 16 bytes on the host; no GPU waits for it. It runs on every call: a rank that skipped it for
    arguments it had seen before could not know that another rank has new ones. Not under torch.compile.
    """

    def numbered() -> tuple[dict[str, Any], list[int], Any]:
        description, result = call()
        return description, [], result

    if torch.compiler.is_compiling():
        return call()[1]
    return checked_with_numbers(group, numbered, 0)[0]


def checked_with_numbers(
    group: Group, call: Callable[[], tuple[dict[str, Any], list[int], Any]], count: int
) -> tuple[Any, list[list[int]]]:
    """Like `checked_on_all_ranks`; `call` also returns `count` numbers, which may differ: (result, the numbers of every
    rank)."""
    failure, result, numbers = None, None, [0] * count
    try:
        description, numbers, result = call()
    except Exception as error:
        failure, description = error, {"error": f"{type(error).__name__}: {error}"}
    try:
        every = _agree(group, description, numbers, failure) if group.ranks > 1 else [numbers]
        if failure is not None:
            raise failure
        return result, every
    finally:
        del failure  # its traceback holds this frame: a cycle


def _agree(group: Group, description: dict[str, Any], numbers: list[int], failure: Exception | None) -> list[list[int]]:
    host = _cpu_group(group)
    text = json.dumps(description, default=str)
    digest = hashlib.blake2b(text.encode(), digest_size=16).digest()
    own = torch.tensor([*struct.unpack("=2q", digest), *numbers])
    every = wait(_c10d.all_gather_into_tensor.default(own, group.ranks, host)).view(group.ranks, -1).tolist()
    if all(header[:2] == every[0][:2] for header in every):
        return [header[2:] for header in every]
    descriptions: list[Any] = [None] * group.ranks
    dist.all_gather_object(descriptions, json.loads(text), group=_resolve_process_group(host))
    refused = {rank: d["error"] for rank, d in enumerate(descriptions) if "error" in d}
    if refused:
        said = "; ".join(f"rank {rank} refuses its call: {error}" for rank, error in refused.items())
        raise InvalidArgument(f"group: {said}. No rank continues") from failure
    different = []
    for name in dict.fromkeys(name for d in descriptions for name in d):
        values = [d.get(name, "not there") for d in descriptions]
        if any(value != values[0] for value in values):
            said = ", ".join(f"{value} on rank {rank}" for rank, value in enumerate(values))
            different.append(f"{name}: the ranks differ: {said}")
    raise InvalidArgument(f"{'; '.join(different)}; expected the same on all ranks of the group")
