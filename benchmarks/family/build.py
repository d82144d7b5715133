"""kernels.cu, compiled into build/family/ and called through ctypes."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from ..nvcc import ROOT, build
from .summary import ORGANISATIONS, TILE_KEYS, V1, V1_STRIPED

SOURCES = [
    ROOT / "benchmarks" / "family" / "kernels.cu",
    *sorted(
        header
        for folder in ("core", "cuda/hw", "cuda/mma", "cuda/attention/common")
        for header in (ROOT / "csrc" / folder).glob("*.*h")
    ),
]
HEAD_DIMS = (64, 128)


class Kernels:
    """The kernels on torch tensors: contiguous bfloat16 [B, H, L, E] on the current device, L a multiple of 128, E 64 or 128,
    as many keys as queries; queued on torch's current stream."""

    def __init__(self, library: str | None = None):
        if library is None:
            major, minor = torch.cuda.get_device_capability()
            library = str(build("family", SOURCES, f"sm_{major}{minor}"))
        self._library = ctypes.CDLL(library)
        for function in ("family_attention", "family_ctas_per_head", "family_provider_begins"):
            getattr(self._library, function).restype = ctypes.c_char_p

    def attention(self, organisation: str, query: Tensor, key: Tensor, value: Tensor, causal: bool):
        """A call without arguments that computes attention and returns it, always in the same tensor. `organisation` is one of
        ORGANISATIONS.

        Raises:
            ValueError: the tensors do not fit the class's description.
            RuntimeError: from the call, if CUDA rejects the launch.
        """
        tensors = (query, key, value)
        if any(t.shape != query.shape or t.dtype != torch.bfloat16 or not t.is_contiguous() for t in tensors):
            raise ValueError("query, key, value: expected contiguous bfloat16 of one shape, got others")
        batch, heads, length, head_dim = query.shape
        if length % TILE_KEYS or head_dim not in HEAD_DIMS:
            raise ValueError(f"query: expected L a multiple of {TILE_KEYS} and E 64 or 128, got L {length}, E {head_dim}")
        # NaN, so that unwritten elements show.
        out, kept = torch.full_like(query, torch.nan), []
        if organisation in (V1, V1_STRIPED):
            kept = [torch.full(s, torch.nan, device=query.device) for s in (query.shape, query.shape[:3], query.shape[:3])]
        pointers = [ctypes.c_void_p(t.data_ptr()) for t in (*tensors, out, *kept)] + [None] * (3 - len(kept))
        sizes = [ctypes.c_int(n) for n in (batch * heads, length, head_dim, causal)]
        number, scale = ctypes.c_int(ORGANISATIONS.index(organisation)), ctypes.c_float(head_dim**-0.5)

        def call(keep=(tensors, kept)) -> Tensor:
            self._check(self._library.family_attention(number, *pointers, *sizes, scale, _stream(query)))
            return out

        return call

    def ctas_per_head(self, organisation: str, query: Tensor) -> int:
        batch, heads, length, head_dim = query.shape
        ctas, sizes = ctypes.c_int(), [ctypes.c_int(n) for n in (batch * heads, length, head_dim)]
        number = ctypes.c_int(ORGANISATIONS.index(organisation))
        self._check(self._library.family_ctas_per_head(number, *sizes, ctypes.byref(ctas)))
        return ctas.value

    def provider_begins(self) -> None:
        """Launches an empty kernel, which separates the providers in a profile."""
        self._check(self._library.family_provider_begins(ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)))

    def _check(self, message: bytes | None) -> None:
        if message is not None:
            raise RuntimeError(f"benchmarks/family/kernels.cu: {message.decode()}")


def _stream(tensor: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(torch.cuda.current_stream().cuda_stream if tensor.is_cuda else None)
