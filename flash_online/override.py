"""torch.nn.functional itself made ours: for a block, or until undone."""

from __future__ import annotations

import threading
from contextlib import contextmanager

import torch.nn.functional as _torch

from . import functional

_lock = threading.Lock()
_depth = 0  # of enable() calls and override() blocks
_replaced: dict[str, object] = {}  # what stood in torch.nn.functional before


def enable() -> None:
    """Makes torch.nn.functional's scaled_dot_product_attention, softmax, log_softmax, cross_entropy and (where torch has it)
    linear_cross_entropy ours, until disable().

    The module's attributes are replaced: callers that look them up there follow (torch.nn's modules do, and
    multi_head_attention_forward), those that imported a function by name, and torch.softmax or Tensor.softmax, do not. For
    all threads of the process. Calls nest with those of override().
    """
    global _depth
    with _lock:
        if _depth == 0:
            for name in functional.ORIGINALS:
                _replaced[name] = getattr(_torch, name)
                setattr(_torch, name, getattr(functional, name))
        _depth += 1


def disable() -> None:
    """Undoes one enable(); the last one puts back what stood in torch.nn.functional before the first."""
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
def override():
    """enable() for a block. Blocks nest; in several threads at once the functions are ours until the last one leaves."""
    enable()
    try:
        yield
    finally:
        disable()
