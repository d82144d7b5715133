"""kernels.cu, compiled into build/paper/ and called through ctypes."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from ..nvcc import ROOT, build

SOURCES = [
    ROOT / "benchmarks" / "paper" / "kernels.cu",
    *(ROOT / "csrc" / "core" / n for n in ("online_softmax.h", "config.h")),
]
KS = (5, 10, 15, 30)  # the values of k that kernels.cu has kernels for


class Kernels:
    """The kernels on torch tensors: contiguous float32 on the current device, queued on torch's current stream."""

    def __init__(self):
        major, minor = torch.cuda.get_device_capability()
        self._library = ctypes.CDLL(str(build("paper", SOURCES, f"sm_{major}{minor}")))

    def softmax(self, name: str, x: Tensor, y: Tensor) -> None:
        """name: naive, safe or online; x and y [rows, classes]."""
        self._call(f"{name}_softmax", [x, y], x.shape)

    def top_k(self, y: Tensor, values: Tensor, indices: Tensor) -> None:
        """y [rows, classes]; values and indices (int32) [rows, k], k one of KS."""
        self._call("top_k", [y, values, indices], [*y.shape, values.shape[1]])

    def softmax_top_k(self, name: str, x: Tensor, values: Tensor, indices: Tensor) -> None:
        """name: safe or online. The k largest probabilities, descending, and their indices; tensors as for top_k."""
        self._call(f"{name}_softmax_top_k", [x, values, indices], [*x.shape, values.shape[1]])

    def _call(self, function: str, tensors: list[Tensor], sizes) -> None:
        pointers = [ctypes.c_void_p(t.data_ptr()) for t in tensors]
        rows, classes, *k = sizes
        numbers = [ctypes.c_int64(rows), ctypes.c_int64(classes), *map(ctypes.c_int, k)]
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        if error := getattr(self._library, function)(*pointers, *numbers, stream):
            raise RuntimeError(f"{function} of {list(sizes)}: CUDA error {error}")
