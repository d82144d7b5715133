"""Replaces functions of torch.nn.functional with ours: for a block, or until undone."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.nn.functional as _torch
from torch.overrides import TorchFunctionMode

from . import _patches, functional

if "_depth" not in globals():  # a reload of this module keeps the replaced functions
    _lock = threading.Lock()
    _depth = 0  # of enable() calls and override() blocks
    _replaced: dict[str, Any] = {}  # the attributes of torch.nn.functional before the first enable()
    _left: dict[str, Any] = {}  # functions that disable() could not restore, as ours had been replaced
    _warned: set[tuple[str, str]] = set()  # (enable or disable, function): a warning once per process


def enable() -> None:
    """Replaces torch.nn.functional's scaled_dot_product_attention, softmax, log_softmax, cross_entropy and (where torch has it)
    linear_cross_entropy with ours, until disable().

    The module's attributes are replaced, in all threads of the process. Callers that look up a function there get ours, e.g.
    torch.nn's modules and multi_head_attention_forward. Callers that imported a function by name, torch.softmax and
    Tensor.softmax are not affected. Calls nest with each other and with override() blocks; only the first replaces anything.

    A function that other code has installed there is replaced too, with a warning; disable() restores it.

    Raises:
        RuntimeError: torch's context_parallel is active. Enter it inside override() instead: its calls then go to torch's own
            ring.
    """
    _enable(stacklevel=4)


def disable() -> None:
    """Undoes one enable(); the last call restores the functions that torch.nn.functional had before the first enable().

    A function that other code has installed since then stays in place, with a warning. If that code puts ours back later,
    another disable() restores the original.

    Raises:
        RuntimeError: there is no enable() to undo.
    """
    _disable(stacklevel=4)


def override() -> AbstractContextManager[None]:
    """Calls enable() for a block. Blocks nest; with blocks in several threads, the functions are ours until the last block
    ends. Enter context_parallel inside the block, not around it. Inside a function that torch.compile traces, the block affects
    only that function's calls."""
    return _OverrideInGraph() if torch.compiler.is_compiling() else _override()


class _OverrideInGraph(TorchFunctionMode):
    """override() for Dynamo, which cannot replace a module's attributes for a part of a graph."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        for original, ours in _PAIRS:
            if func is original:
                return ours(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


_PAIRS = tuple((original, getattr(functional, name)) for name, original in functional.ORIGINALS.items())


@contextmanager
def _override() -> Iterator[None]:
    _enable(stacklevel=5)  # this generator and contextlib lie between the caller and enable()
    try:
        yield
    finally:
        _disable(stacklevel=5)


def _enable(stacklevel: int) -> None:
    global _depth
    with _lock:
        standing = {name: getattr(_torch, name) for name in functional.ORIGINALS}
        if _depth == 0:
            for name, function in standing.items():
                if _patches.shards(function, functional.ORIGINALS[name], getattr(functional, name)):
                    raise RuntimeError(
                        f"enable: torch.nn.functional.{name} is {_patches.describe(function)}: torch's context_parallel is "
                        "active, and without its wrapper each rank would attend to its own shard alone. Enter "
                        "flash_online.override() first, and context_parallel inside it"
                    )
            # The caller may turn warnings into errors: issue them before anything is replaced.
            for name, function in standing.items():
                _warn_of_other(name, function, "enable", "is replaced until disable(), and not called", stacklevel)
            for name, function in standing.items():
                # Ours is installed already if a wrapper that disable() had left in place has put it back.
                is_ours = functional.is_ours(name, function)
                _replaced[name] = _left.get(name, functional.ORIGINALS[name]) if is_ours else function
                _place(name, getattr(functional, name))
            _left.clear()
        else:
            for name, function in standing.items():
                if not _patches.shards(function):
                    _warn_of_other(name, function, "enable", "was installed after the first enable(), and stays", stacklevel)
        _depth += 1


def _disable(stacklevel: int) -> None:
    global _depth
    with _lock:
        if _depth == 0:
            late = [name for name in _left if functional.is_ours(name, getattr(_torch, name))]
            if not late:
                raise RuntimeError("disable: called without an enable() to undo")
            for name in late:
                _place(name, _left.pop(name))
            return
        _depth -= 1
        if _depth > 0:
            return
        others = {}
        for name, function in _replaced.items():
            standing = getattr(_torch, name)
            if functional.is_ours(name, standing):
                _place(name, function)
            elif not _patches.is_torchs(standing):
                _left[name], others[name] = function, standing
        _replaced.clear()
        consequence = "was installed after enable() and stays. If it puts flash_online's function back when it ends, "
        for name, function in others.items():
            _warn_of_other(name, function, "disable", consequence + "call disable() once more then", stacklevel)


def _place(name: str, function: Callable[..., Any]) -> None:
    setattr(_torch, name, function)
    if name == "scaled_dot_product_attention":
        functional.expect(function)


def _warn_of_other(name: str, function: object, verb: str, consequence: str, stacklevel: int) -> None:
    if functional.is_ours(name, function) or _patches.is_torchs(function) or (verb, name) in _warned:
        return
    _warned.add((verb, name))
    said = f"{verb}: torch.nn.functional.{name} is {_patches.describe(function)}, neither torch's nor ours; it {consequence}"
    warnings.warn(said, RuntimeWarning, stacklevel=stacklevel)
