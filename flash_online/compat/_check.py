"""`python -m flash_online check flash_attn`: compares flash_online.compat's functions with plain torch in float64, on random
tensors. FlashAttention need not be installed; where it is, the last line is left out.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from .. import reference, testing
from .._check_doors import shares_of_allowed
from .._check_install import why_no_cuda
from .._policy import strict
from . import flash_attn, flash_attn_cute, flash_attn_interface, install

BATCH, QUERIES, KEYS, HEADS, KEY_HEADS, HEAD_DIM = 2, 70, 96, 4, 2, 32


class _LargestMask(TorchDispatchMode):
    """Records the number of elements of the largest [..., QUERIES, KEYS] tensor that an operator made."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        for result in results if isinstance(results, (tuple, list)) else [results]:
            if isinstance(result, Tensor) and result.shape[-2:] == (QUERIES, KEYS):
                self.elements = max(self.elements, result.numel())
        return results


def check(say: Callable[[str], None]) -> bool:
    """Compares outputs and gradients with float64, within the tolerance of flash_online.testing. Prints a line per function,
    device and dtype: the largest errors of out and of the gradients as fractions of the tolerance, and the elements of the
    largest mask or score matrix. Returns whether every fraction is at most 1 and there was no such matrix."""
    right = True
    say(f"{'function':45}{'device':8}{'dtype':10}{'out':>6}{'gradients':>11}{'largest mask':>14}")
    for device in ("cpu",) if why_no_cuda() else ("cpu", "cuda"):
        for name, call, rules in _calls():
            for dtype in (torch.bfloat16, torch.float16):
                (out, *grads), mask = _shares(call, rules, dtype, device)
                passed = max(out, *grads) <= 1 and not mask
                right = right and passed
                said = f"{name:45}{device:8}{str(dtype)[6:]:10}{out:>6.2f}{max(grads):>11.2f}{mask or 'none':>14}"
                say(said if passed else f"{said}  FAILED")
    return _imports(say) and right


def _calls() -> list[tuple[str, Callable[..., Any], dict[str, Any]]]:
    """(name, a call of q, k, v that returns out, the reference's options)."""
    causal = {"causal": True, "alignment": "lower_right"}

    def packed(function: Callable[..., Any], q: Tensor, k: Tensor, v: Tensor, **names: Any) -> Any:
        starts = [torch.arange(BATCH + 1, dtype=torch.int32, device=q.device) * n for n in (QUERIES, KEYS)]
        lengths = {"cu_seqlens_q": starts[0], "cu_seqlens_k": starts[1], "max_seqlen_q": QUERIES, "max_seqlen_k": KEYS}
        out = function(*(t.flatten(0, 1) for t in (q, k, v)), **lengths, causal=True, **names)
        return (out[0] if isinstance(out, tuple) else out).unflatten(0, (BATCH, QUERIES))

    def sinks(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        sink = torch.linspace(-1, 1, HEADS, device=q.device)
        return flash_attn_cute.flash_attn_func(q, k, v, window_size=(20, 0), learnable_sink=sink)[0]

    return [
        ("flash_attn.flash_attn_func", lambda *t: flash_attn.flash_attn_func(*t, causal=True), causal),
        (
            "flash_attn.flash_attn_kvpacked_func, window",
            lambda q, k, v: flash_attn.flash_attn_kvpacked_func(q, torch.stack([k, v], 2), window_size=(20, -1), softcap=5.0),
            {"window": (20, None), "softcap": 5.0, "alignment": "lower_right"},
        ),
        ("flash_attn.flash_attn_varlen_func", lambda *t: packed(flash_attn.flash_attn_varlen_func, *t), causal),
        ("flash_attn_interface.flash_attn_func", lambda *t: flash_attn_interface.flash_attn_func(*t, causal=True), causal),
        (
            "flash_attn_interface.flash_attn_varlen_func",
            lambda *t: packed(flash_attn_interface.flash_attn_varlen_func, *t),
            causal,
        ),
        ("flash_attn.cute.flash_attn_func, sinks", sinks, {"window": (20, 0), "sinks": True, "alignment": "lower_right"}),
        ("flash_attn.cute.flash_attn_varlen_func", lambda *t: packed(flash_attn_cute.flash_attn_varlen_func, *t), causal),
    ]


def _shares(call: Callable[..., Any], rules: dict[str, Any], dtype: torch.dtype, device: str) -> tuple[list[float], int]:
    """The errors of out and the three gradients as fractions of the tolerance; the elements of the largest mask."""
    generator = torch.Generator().manual_seed(2307_08691)
    shapes = ((BATCH, QUERIES, HEADS, HEAD_DIM), (BATCH, KEYS, KEY_HEADS, HEAD_DIM), (BATCH, KEYS, KEY_HEADS, HEAD_DIM))
    inputs = [testing.random_tensor(*shape, dtype=dtype, generator=generator, device=device) for shape in shapes]
    grad = testing.random_tensor(*shapes[0], dtype=dtype, generator=generator, device=device)

    def plain(*leaves: Tensor) -> Tensor:
        options = rules
        if "sinks" in rules:
            options = rules | {"sinks": torch.linspace(-1, 1, HEADS, device=device, dtype=leaves[0].dtype)}
        return reference.attention(*(t.transpose(1, 2) for t in leaves), **options).transpose(1, 2)

    with strict():
        masks = _LargestMask()
        return shares_of_allowed(call, plain, inputs, grad, masks), masks.elements


def _imports(say: Callable[[str], None]) -> bool:
    """Whether `import flash_attn` finds ours within an installation; with FlashAttention installed, whether it is kept."""
    try:
        with install("flash_attn"):
            found = importlib.import_module("flash_attn").flash_attn_func is flash_attn.flash_attn_func
    except RuntimeError as reason:
        say(f"compat.install(): not tried: {reason}")
        return True
    say(f"compat.install(): import flash_attn finds {'these functions' if found else 'others: FAILED'}")
    return found
