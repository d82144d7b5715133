"""Which devices tests can run on here, and what these have room for."""

from __future__ import annotations

import functools
import os

import pytest
import torch

from flash_online._info import build_info


@functools.cache
def why_no_cuda() -> str | None:
    """Why CUDA tests cannot run here; None where they can."""
    if not torch.cuda.is_available():
        return "no GPU, or a torch without CUDA"
    if torch.cuda.get_device_capability() < (8, 0):
        return f"the GPU's compute capability is {torch.cuda.get_device_capability()}, below (8, 0)"
    return None if build_info()["architectures"] else "this build has no CUDA kernels"


def shared_kibibytes() -> int:
    """The shared memory of a CTA that kernels are chosen for."""
    kibibytes = torch.cuda.get_device_properties("cuda").shared_memory_per_block_optin >> 10
    return min(kibibytes, int(os.environ.get("FLASH_ONLINE_SHARED_MEMORY", kibibytes)))


def skip_without_room(device: str, dtype: torch.dtype, *head_dims: int, gradients: bool = True) -> None:
    """Skips a test at head dims for which the GPU's shared memory has no room (docs/troubleshooting.md)."""
    if device == "cpu" or dtype == torch.float64:
        return
    kibibytes = shared_kibibytes()
    if gradients:  # of 16 bits, of float32
        most = (512, 512) if kibibytes >= 227 else (512, 256) if kibibytes >= 163 else (256, 192)
    else:
        most = (512, 512) if kibibytes >= 163 else (256, 256)
    if max(head_dims) > most[dtype == torch.float32]:
        what = "gradients" if gradients else "results"
        pytest.skip(f"{kibibytes} KiB of shared memory: {dtype} has {what} up to head dim {most[dtype == torch.float32]}")
