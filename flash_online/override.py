"""Replaces functions of torch.nn.functional by ours: for a block, or until undone."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch.nn.functional as _torch

from . import functional

_lock = threading.Lock()
_depth = 0  # of enable() calls and override() blocks
_replaced: dict[str, object] = {}  # the attributes of torch.nn.functional before the first enable()


def enable() -> None:
    """Replaces torch.nn.functional's scaled_dot_product_attention, softmax, log_softmax, cross_entropy and (where torch has it)
    linear_cross_entropy by ours, until disable().

    The module's attributes are replaced, in all threads of the process. Callers that look a function up there get ours, as
    torch.nn's modules and multi_head_attention_forward do. Callers that imported a function by name, torch.softmax and
    Tensor.softmax are not affected. Calls nest with each other and with override() blocks.
    """
    global _depth
    with _lock:
        if _depth == 0:
            for name in functional.ORIGINALS:
                _replaced[name] = getattr(_torch, name)
                setattr(_torch, name, getattr(functional, name))
        _depth += 1


def disable() -> None:
    """Undoes one enable(); the last call restores the functions that torch.nn.functional had before the first enable().

    Raises:
        RuntimeError: there is no enable() to undo.
    """
    global _depth
    with _lock:
        if _depth == 0:
            raise RuntimeError("disable: called without an enable() to undo")
        _depth -= 1
        if _depth == 0:
            for name, function in _replaced.items():
                setattr(_torch, name, function)
            _replaced.clear()


@contextmanager
def override() -> Iterator[None]:
    """Calls enable() for a block. Blocks nest; with blocks in several threads, the functions are ours until the last ends."""
    enable()
    try:
        yield
    finally:
        disable()
