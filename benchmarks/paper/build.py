"""kernels.cu, compiled by one line of nvcc into build/paper/ and called through ctypes."""

from __future__ import annotations

import ctypes
import hashlib
import shutil
import subprocess
from pathlib import Path

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
SOURCES = [
    ROOT / "benchmarks" / "paper" / "kernels.cu",
    *(ROOT / "csrc" / "core" / n for n in ("online_softmax.h", "config.h")),
]
FOLDER = ROOT / "build" / "paper"
KS = (5, 10, 15, 30)  # the values of k that kernels.cu has kernels for
FLAGS = ["-std=c++20", "-O3", "--expt-relaxed-constexpr", "-shared", "-Xcompiler=-fPIC"]


class Missing(Exception):
    """The kernels cannot be built here; the message says why."""


def build(architecture: str) -> Path:
    """The library for an architecture as nvcc names it (sm_90); compiled unless the library of these very sources exists."""
    text = b"".join(source.read_bytes() for source in SOURCES) + " ".join([architecture, *FLAGS]).encode()
    library = FOLDER / f"libpaper-{architecture}-{hashlib.sha256(text).hexdigest()[:12]}.so"
    if library.is_file():
        return library
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        raise Missing("the paper's kernels need nvcc in the PATH")
    FOLDER.mkdir(parents=True, exist_ok=True)
    part = library.with_suffix(".part")
    command = [nvcc, *FLAGS, f"-arch={architecture}", f"-I{ROOT / 'csrc'}", "-o", str(part), str(SOURCES[0])]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise Missing(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    return part.rename(library)


class Kernels:
    """The kernels on torch tensors: contiguous float32 on the current device, queued on torch's current stream."""

    def __init__(self):
        major, minor = torch.cuda.get_device_capability()
        self._library = ctypes.CDLL(str(build(f"sm_{major}{minor}")))

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
