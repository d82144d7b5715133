"""The check that all ranks of a group make the same call.

With every call the hosts gather a message of each rank: a digest of what must agree, two numbers that may differ, and the
description itself, so that an error needs no second exchange. A group whose backends take CPU tensors alone (gloo) waits for
it. Elsewhere (NCCL) the gather runs over a gloo group of its own, and is waited for when the group's next call begins, or in a
backward pass before that: no host waits for another, and a difference is found one call late. The ranks are then out of step by
a call, so every later call on the group is refused.
"""

from __future__ import annotations

import functools
import hashlib
import json
import struct
import weakref
import zlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .._ops import InvalidArgument
from ._group import Group, all_gather_on_host, process_group

SIZE = 1024  # bytes of a message, the same for every call: two ranks that differ still take part in one gather
HEADER = struct.Struct("=16s3q")  # digest, two numbers, bytes of the description


def checked_on_all_ranks(group: Group, call: Callable[[], tuple[dict[str, Any], Any]]) -> Any:
    """The result of `call`, which checks this rank's arguments without communication and returns (description, result).

    Raises on every rank if it raised on any rank, or if the descriptions differ: otherwise the valid ranks would wait for the
    rest. Over NCCL the other ranks raise at their next call. It runs on every call: a rank that skipped it for arguments it had
    seen before could not know that another rank has new ones. Not under torch.compile; a CUDA graph compares when it is
    captured, not when it is replayed.
    """

    def with_numbers() -> tuple[dict[str, Any], tuple[int, int], Any]:
        description, result = call()
        return description, (0, 0), result

    if torch.compiler.is_compiling() or group.ranks == 1:
        return call()[1]
    agreement = _agreement_of(group)
    return agreement.check(with_numbers, late=agreement.late)[0]


def checked_with_numbers(
    group: Group, call: Callable[[], tuple[dict[str, Any], tuple[int, int], Any]]
) -> tuple[Any, list[list[int]]]:
    """Like `checked_on_all_ranks`; `call` also returns two numbers, which may differ: (result, the numbers of every rank). It
    always waits for the gather."""
    if group.ranks == 1:
        _, numbers, result = call()
        return result, [list(numbers)]
    return _agreement_of(group).check(call, late=False)


def numbered(group: Group) -> Group:
    """The group with the number of its last call, for `settle`."""
    if torch.compiler.is_compiling() or group.ranks == 1:
        return group
    agreement = _agreements.get(process_group(group))
    return group if agreement is None else group._replace(call=agreement.calls)


def settle(group: Group) -> None:
    """Waits for the comparison of a call, if it is still to come, and raises what it finds. The backward passes of calls that
    are compared late begin with it. It does not wait for a later call, such as one that a checkpoint repeats."""
    if torch.compiler.is_compiling() or group.ranks == 1:
        return
    agreement = _agreements.get(process_group(group))
    if agreement is not None and (agreement.refused is not None or group.call in (0, agreement.calls)):
        agreement.settle()


class _Agreement:
    """The comparisons of a group. It holds no ProcessGroup: gloo aborts a process that still holds one when it exits."""

    def __init__(self, group: Group):
        own = process_group(group)
        self.late = not _is_for_cpu(own)
        self.host = _new_cpu_group(own) if self.late else group.name  # the name of the group that gathers
        with torch.inference_mode(False):  # no later call could write to an inference tensor
            self.received = torch.empty(group.ranks * SIZE, dtype=torch.uint8, device="cpu")
        self.rows = self.received.view(group.ranks, SIZE)
        self.headers = self.received.view(torch.int64).view(group.ranks, SIZE // 8)[:, :4]  # digest and numbers
        self.pending: dist.Work | None = None
        self.calls = 0
        self.refused: Exception | None = None

    def check(self, call: Callable, late: bool) -> tuple[Any, list[list[int]]]:
        """(result of `call`, the numbers of every rank, none if `late`)."""
        self.settle()
        failure = None
        try:
            try:
                description, numbers, result = call()
            except Exception as error:
                failure, description, numbers = error, {"error": f"{type(error).__name__}: {error}"}, (0, 0)
            self.calls += 1
            self.pending = all_gather_on_host(self.host, self.received, _message(tuple(description.items()), *numbers))
            every = [] if late else self.settle(failure)
            if failure is not None:
                raise failure
            return result, every
        finally:
            del failure  # its traceback holds this frame: a cycle

    def settle(self, failure: Exception | None = None) -> list[list[int]]:
        """The numbers of every rank, after the pending gather. `failure`: this rank's error of the call."""
        if self.refused is not None:
            raise type(self.refused)(*self.refused.args)
        work, self.pending = self.pending, None
        if work is None:
            return []
        try:
            work.wait()
            headers = self.headers.tolist()
            if all(header[:2] == headers[0][:2] for header in headers):
                return [header[2:] for header in headers]
            error: Exception = InvalidArgument(_difference([_description(bytes(row.tolist())) for row in self.rows]))
        except RuntimeError as lost:
            said = f"group: expected a call of every rank within the group's timeout, got an error of the gather: {lost}"
            error, failure = RuntimeError(said), lost
        if self.late:
            self.refused = type(error)(*error.args)  # one that is never raised, and so holds no frames
        raise error from failure


_agreements: weakref.WeakKeyDictionary[dist.ProcessGroup, _Agreement] = weakref.WeakKeyDictionary()


def _agreement_of(group: Group) -> _Agreement:
    own = process_group(group)
    found = _agreements.get(own)
    if found is None:
        found = _agreements[own] = _Agreement(group)
    return found


def _is_for_cpu(group: dist.ProcessGroup) -> bool:
    """Whether the group has one backend, which takes CPU tensors: its users wait for the other hosts anyway."""
    backends = dict(entry.split(":") for entry in dist.get_backend_config(group).split(","))
    return "cpu" in backends and len(set(backends.values())) == 1


def _new_cpu_group(own: dist.ProcessGroup) -> str:
    """The name of a new gloo group of the same ranks, for CPU tensors."""
    ranks, timeout = dist.get_process_group_ranks(own), own._get_backend(own._device_types[0]).options._timeout
    return dist.new_group(ranks, timeout, "gloo", use_local_synchronization=True).group_name


# --- Messages ---------------------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=256)
def _message(items: tuple[tuple[str, Any], ...], *numbers: int) -> Tensor:
    """The message of a description, uint8 [SIZE]. Equal calls share one tensor."""
    texts = {name: str(value) for name, value in items}
    digest, packed = hashlib.blake2b(json.dumps(texts).encode(), digest_size=16).digest(), _packed(texts)
    message = bytearray(SIZE)
    HEADER.pack_into(message, 0, digest, *numbers, len(packed))
    message[HEADER.size : HEADER.size + len(packed)] = packed
    with torch.inference_mode(False):
        return torch.frombuffer(message, dtype=torch.uint8)


def _packed(texts: dict[str, str]) -> bytes:
    """A description in the room that a message has. Long values are cut, and if that is not enough the last ones left out."""
    most = max(map(len, texts.values()), default=0)
    while len(packed := zlib.compress(json.dumps(texts).encode())) > SIZE - HEADER.size:
        most //= 2
        if most >= 32:
            texts = {name: text if len(text) <= most else f"{text[:most]}... (cut)" for name, text in texts.items()}
        else:
            texts = dict(list(texts.items())[: len(texts) // 2])
    return packed


def _description(message: bytes) -> dict[str, str]:
    *_, size = HEADER.unpack_from(message)
    return json.loads(zlib.decompress(message[HEADER.size : HEADER.size + size]))


def _difference(descriptions: list[dict[str, str]]) -> str:
    """The error of ranks with these descriptions."""
    refused = {rank: d["error"] for rank, d in enumerate(descriptions) if "error" in d}
    if refused:
        said = "; ".join(f"rank {rank} refuses its call: {error}" for rank, error in refused.items())
        return f"group: {said}. No rank continues"
    different = []
    for name in dict.fromkeys(name for d in descriptions for name in d):
        values = [d.get(name, "not there") for d in descriptions]
        if any(value != values[0] for value in values):
            said = ", ".join(f"{value} on rank {rank}" for rank, value in enumerate(values))
            different.append(f"{name}: the ranks differ: {said}")
    if not different:
        return f"group: expected the same call on all ranks, got calls that differ in what {SIZE} bytes do not hold"
    return f"{'; '.join(different)}; expected the same on all ranks of the group"
