"""`python -m flash_online check flash_attn`: compares flash_online.compat's functions with plain torch in float64, on random
tensors. FlashAttention need not be installed; where it is, install() is not tried.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from .. import reference
from .._self_check import Call, MaskMeter, compare_calls, devices, require
from . import flash_attn, flash_attn_cute, flash_attn_interface, install

BATCH, QUERIES, KEYS, HEADS, KEY_HEADS, HEAD_DIM = 2, 70, 96, 4, 2, 32


def check(say: Callable[[str], None]) -> bool:
    """Compares outputs and gradients of each function with float64, and sees that no mask or score matrix is made. Returns
    whether all are right."""
    causal, window, sinks = {"causal": True}, {"window_size": (20, -1), "softcap": 5.0}, torch.linspace(-1, 1, HEADS)
    calls = [_call(flash_attn, "flash_attn_kvpacked_func", window, {"window": (20, None), "softcap": 5.0})]
    for module in (flash_attn, flash_attn_interface, flash_attn_cute):
        calls += [_call(module, function, causal, causal) for function in ("flash_attn_func", "flash_attn_varlen_func")]
    calls.append(_call(flash_attn_cute, "flash_attn_func", {"window_size": (20, 0)}, {"window": (20, 0)}, sinks=sinks))
    right = compare_calls(say, calls, (torch.bfloat16, torch.float16), devices())
    try:
        with install("flash_attn"):
            found = importlib.import_module("flash_attn").flash_attn_func is flash_attn.flash_attn_func
    except RuntimeError as reason:
        say(f"compat.install(): not tried: {reason}")
        return right
    say(f"compat.install(): import flash_attn finds {'these functions' if found else 'others: FAILED'}")
    return right and found


@contextlib.contextmanager
def _without_masks() -> Iterator[None]:
    with MaskMeter((QUERIES, KEYS)) as meter:
        yield
    require(not meter.most, f"expected no mask or scores [{QUERIES}, {KEYS}], got one of {meter.most} elements")


def _call(module: ModuleType, function: str, options: dict[str, Any], rules: dict[str, Any], **sinks: Tensor) -> Call:
    """A call of module.function with `options`, which are `rules` in the reference. The tensors are [batch, length, heads, head
    dim]; by its name a function takes packed sequences, or keys and values in one tensor."""
    title = f"{module.__name__.rpartition('.')[2]}.{function}"
    generator = torch.Generator().manual_seed(2307_08691)
    shapes = {"q": (QUERIES, HEADS), "k": (KEYS, KEY_HEADS), "v": (KEYS, KEY_HEADS)}
    tensors = {name: torch.randn(BATCH, *shape, HEAD_DIM, generator=generator) for name, shape in shapes.items()}

    def ours(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None, **given: Any) -> Tensor:
        if sinks is not None:
            given["learnable_sink"] = sinks
        packed = "varlen" in function
        if packed:
            starts = [torch.arange(BATCH + 1, dtype=torch.int32, device=q.device) * n for n in (QUERIES, KEYS)]
            given |= {"cu_seqlens_q": starts[0], "cu_seqlens_k": starts[1], "max_seqlen_q": QUERIES, "max_seqlen_k": KEYS}
            q, k, v = (t.flatten(0, 1) for t in (q, k, v))
        keys = (torch.stack([k, v], 2),) if "kvpacked" in function else (k, v)
        out = getattr(module, function)(q, *keys, **given)
        out = out[0] if isinstance(out, tuple) else out
        return out.unflatten(0, (BATCH, QUERIES)) if packed else out

    def plain(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None, **_: Any) -> Tensor:
        heads_first = (t.transpose(1, 2) for t in (q, k, v))
        return reference.attention(*heads_first, alignment="lower_right", sinks=sinks, **rules).transpose(1, 2)

    return Call(title, title, ours, plain, {**tensors, **sinks, **options}, _without_masks)
