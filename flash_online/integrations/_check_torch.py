"""`python -m flash_online check torch`: compares PyTorch's flash attention operators on our kernels with float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import flash_online

from .. import reference
from .._self_check import Call, compare_calls, require, why_no_cuda
from . import torch_sdpa

BATCH, LENGTH, HEADS = 2, 90, 4


def check(say: Callable[[str], None]) -> bool:
    """Compares out and gradients with float64, and out with the bits of flash_online's own function, which show that our kernel
    ran. Returns whether all are right.

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
    """`check` with the kernels that PyTorch's function uses on the device."""
    calls = [
        _call("plain", HEADS, 64),
        _call("causal", HEADS, 128, is_causal=True),
        _call("grouped heads", 2, 64, is_causal=True, enable_gqa=True),
        _call("head dim 256", HEADS, 256, scale=0.05),
    ]
    return compare_calls(say, calls, (torch.bfloat16, torch.float16), (device,))


def _call(name: str, key_heads: int, head_dim: int, **options: Any) -> Call:
    generator = torch.Generator().manual_seed(2205_14135)
    heads = {"query": HEADS, "key": key_heads, "value": key_heads}
    tensors = {n: torch.randn(BATCH, count, LENGTH, head_dim, generator=generator) for n, count in heads.items()}
    return Call(name, "scaled_dot_product_attention", _ours, _plain, tensors | options)


def _ours(**given: Any) -> Tensor:
    with torch.no_grad():
        same = torch.equal(scaled_dot_product_attention(**given), flash_online.attention(**_renamed(**given)))
    require(same, "expected the bits of flash_online.attention, got others: another kernel ran")
    return scaled_dot_product_attention(**given)


def _plain(**given: Any) -> Tensor:
    return reference.attention(**_renamed(**given))


def _renamed(is_causal: bool = False, enable_gqa: bool = False, **given: Any) -> dict[str, Any]:
    return {"causal": is_causal, **given}
