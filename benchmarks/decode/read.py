"""The baseline of attention over cached keys: a pass that only reads memory."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import torch

SOURCE = Path(__file__).with_name("read.cu")
BYTES = {"cpu": 1 << 24, "cuda": 1 << 30}  # far beyond any cache
THREADS, CTAS_PER_SM = 512, 4


@functools.cache
def read_pass(device: str) -> tuple[Callable[[], object], int, str]:
    """A call that reads a buffer once, the number of bytes, and the reader: our kernel, or torch's sum if torch cannot compile
    our kernel."""
    size = BYTES[device]
    buffer = torch.zeros(size // 8, dtype=torch.int64, device=device)
    if device == "cuda" and (kernel := _kernel()):
        unwritten = torch.zeros(1, dtype=torch.int32, device=device)
        grid = (CTAS_PER_SM * torch.cuda.get_device_properties().multi_processor_count, 1, 1)
        arguments = [buffer, unwritten, size // 16]
        return lambda: kernel(grid=grid, block=(THREADS, 1, 1), args=arguments), size, "a kernel of loads"
    return buffer.sum, size, "torch.sum"


def _kernel():
    """The kernel of read.cu, compiled by torch's NVRTC; None if this torch lacks it, or it fails."""
    try:
        return torch.cuda._compile_kernel(SOURCE.read_text(), "read_only")
    except (AttributeError, ImportError, OSError, RuntimeError):
        return None
