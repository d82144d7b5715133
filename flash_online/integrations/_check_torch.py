"""`python -m flash_online check torch`: compares PyTorch's flash attention operators on our kernels with float64."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import flash_online

from .. import reference, testing
from .._check_doors import shares_of_allowed
from .._check_install import why_no_cuda
from . import torch_sdpa

BATCH, LENGTH, HEADS = 2, 90, 4


def check(say: Callable[[str], None]) -> bool:
    """Prints a line per call and dtype: the largest errors of out and of the gradients as fractions of the tolerance, and
    whether out is bit-equal to flash_online's own function, which shows that our kernel ran. Returns whether all is right.

    Raises:
        ImportError: there is no supported GPU.
    """
    if reason := why_no_cuda():
        raise ImportError(f"torch_sdpa replaces operators on CUDA, and {reason}")
    torch_sdpa.activate()
    try:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return compare(say, "cuda")
    finally:
        torch_sdpa.restore()


def compare(say: Callable[[str], None], device: str) -> bool:
    """The lines of `check`, with the kernels that PyTorch's function uses on the device."""
    right = True
    say(f"{'call':45}{'dtype':10}{'out':>6}{'gradients':>11}{'our bits':>10}")
    for name, key_heads, head_dim, options in _calls():
        for dtype in (torch.bfloat16, torch.float16):
            (out, *grads), same = _compare(key_heads, head_dim, options, dtype, device)
            passed = max(out, *grads) <= 1 and same
            right = right and passed
            said = f"{name:45}{str(dtype)[6:]:10}{out:>6.2f}{max(grads):>11.2f}{'yes' if same else 'no':>10}"
            say(said if passed else f"{said}  FAILED")
    return right


def _calls() -> list[tuple[str, int, int, dict[str, Any]]]:
    """(name, key and value heads, head dim, options) of scaled_dot_product_attention."""
    return [
        ("scaled_dot_product_attention", HEADS, 64, {}),
        ("scaled_dot_product_attention, causal", HEADS, 128, {"is_causal": True}),
        ("scaled_dot_product_attention, grouped heads", 2, 64, {"is_causal": True, "enable_gqa": True}),
        ("scaled_dot_product_attention, head dim 256", HEADS, 256, {"scale": 0.05}),
    ]


def _compare(
    key_heads: int, head_dim: int, options: dict[str, Any], dtype: torch.dtype, device: str
) -> tuple[list[float], bool]:
    generator = torch.Generator().manual_seed(2205_14135)
    heads = (HEADS, key_heads, key_heads, HEADS)
    *inputs, grad = (
        testing.random_tensor(BATCH, count, LENGTH, head_dim, dtype=dtype, generator=generator, device=device)
        for count in heads
    )
    rules = {"causal": options.get("is_causal", False), "scale": options.get("scale")}
    call = partial(scaled_dot_product_attention, **options)

    def plain(*leaves: Tensor) -> Tensor:
        return reference.attention(*leaves, **rules)

    shares = shares_of_allowed(call, plain, inputs, grad)
    return shares, torch.equal(call(*inputs), flash_online.attention(*inputs, **rules))
