"""Which devices tests can run on here."""

from __future__ import annotations

import functools

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
