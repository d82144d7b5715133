"""Detects who has patched torch.nn.functional, torch's context_parallel in particular.

context_parallel replaces scaled_dot_product_attention with a wrapper that makes each rank's shard a DTensor. A function that
replaces the wrapper, or is called without it, gets a plain tensor and would silently attend to the shard alone.
"""

from __future__ import annotations

import functools
import itertools
import types
from collections.abc import Iterator

# The modules of torch's own functions: F.scaled_dot_product_attention is torch._C._nn's.
_TORCHS = ("torch.nn.functional", "torch._C._nn")
_MOST_LAYERS = 100  # an object may generate attributes without end


def is_torchs(function: object) -> bool:
    """Returns whether this is one of torch's own functions, not a wrapper around one."""
    return isinstance(function, types.FunctionType | types.BuiltinFunctionType) and _home(function) in _TORCHS


def shards(function: object, *replaced: object) -> bool:
    """Returns whether this is a wrapper of torch.distributed, or holds one around one of the `replaced` functions. Holding
    another function of torch.distributed, such as get_rank, does not count."""
    if _is_distributed(function):
        return True
    for layer in _layers(function):
        if _is_distributed(layer) and any(part is one for part in _layers(layer) for one in replaced):
            return True
    return False


def describe(function: object) -> str:
    """The function's name and the module of its code, for messages."""
    name = getattr(function, "__qualname__", None) or type(function).__qualname__
    return f"{name.rpartition('<locals>.')[2]} of {_home(function)}"


def _is_distributed(function: object) -> bool:
    return f"{_home(function)}.".startswith("torch.distributed.")


def _home(function: object) -> str:
    """The name of the module that defines a function. functools.wraps copies __module__, but not __globals__."""
    while isinstance(function, functools.partial | types.MethodType):
        function = function.func if isinstance(function, functools.partial) else function.__func__
    if isinstance(function, types.FunctionType):
        return str(function.__globals__.get("__name__", function.__module__))
    return str(function.__module__ if isinstance(function, types.BuiltinFunctionType) else type(function).__module__)


def _layers(function: object) -> Iterator[object]:
    """A function and the callables that it holds at any depth: in a closure, a partial, a method or the attribute that
    functools.wraps sets."""

    def walk() -> Iterator[object]:
        seen, waiting = set(), [function]
        while waiting:
            layer = waiting.pop()
            if id(layer) not in seen:
                seen.add(id(layer))
                yield layer
                waiting += [part for part in _parts(layer) if callable(part)]

    return itertools.islice(walk(), _MOST_LAYERS)


def _parts(function: object) -> Iterator[object]:
    for attribute in ("__wrapped__", "func", "__func__"):
        yield getattr(function, attribute, None)
    for cell in getattr(function, "__closure__", None) or ():
        try:
            yield cell.cell_contents
        except ValueError:  # a variable that has no value yet
            continue
