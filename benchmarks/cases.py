"""What is measured: one list a device, each entry with the reason it is there."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class Case:
    """One problem. `sizes` is what its label shows and what its inputs are made from; `reason` is for the reader."""

    function: str
    sizes: dict[str, int]
    dtype: torch.dtype
    reason: str
    options: dict[str, object] = field(default_factory=dict)

    @property
    def label(self) -> str:
        parts = [f"{name} {size}" for name, size in self.sizes.items()]
        parts += [name if value is True else f"{name} {value}" for name, value in self.options.items() if value is not False]
        return ", ".join(parts)

    def inputs(self, device: str) -> tuple[list[Tensor], list[Tensor]]:
        """(tensors that want gradients, tensors that do not), the same numbers in every run."""
        generator = torch.Generator().manual_seed(0)

        def normal(*shape: int, scale: float = 1.0) -> Tensor:
            return (torch.randn(shape, generator=generator) * scale).to(self.dtype).to(device).requires_grad_()

        if self.function == "attention":
            batch, heads, length, width = (self.sizes[name] for name in ("B", "H", "L", "E"))
            return [normal(batch, heads, length, width) for _ in range(3)], []
        rows, classes = self.sizes["rows"], self.sizes["classes"]
        target = [torch.randint(classes, (rows,), generator=generator).to(device)] if self.function == "cross_entropy" else []
        return [normal(rows, classes, scale=3.0)], target

    def moved_bytes(self, direction: str) -> int | None:
        """The least memory traffic of a row function: what must be read and written once. None for attention."""
        if self.function not in ("softmax", "log_softmax"):
            return None
        elements = math.prod(self.sizes.values())
        return elements * self.dtype.itemsize * (2 if direction == "forward" else 3)  # x -> y; y, grad y -> grad x


def _attention(lengths, dtypes) -> list[Case]:
    return [
        Case(
            "attention", {"B": 1, "H": 8, "L": n, "E": 64}, dtype, "growth with length, causal as in training", {"causal": True}
        )
        for dtype in dtypes
        for n in lengths
    ]


def _rows(function: str, shapes, dtypes, reason: str, **options) -> list[Case]:
    return [
        Case(function, {"rows": rows, "classes": classes}, dtype, reason, options)
        for dtype in dtypes
        for rows, classes in shapes
    ]


FLOAT, BFLOAT, HALF = torch.float32, torch.bfloat16, torch.float16
SHORT_AND_LONG = ((16384, 256), (512, 8192), (32, 131072))  # attention-like rows, in cache; hidden sizes; vocabularies

CPU = [
    *_attention((512, 1024, 2048, 4096), (FLOAT, BFLOAT)),
    Case("attention", {"B": 1, "H": 8, "L": 1024, "E": 64}, FLOAT, "no block to skip: the plain cost", {"causal": False}),
    *_rows("softmax", SHORT_AND_LONG, (FLOAT, BFLOAT), "short rows in cache, long rows out of it"),
    *_rows("log_softmax", SHORT_AND_LONG, (FLOAT,), "the same rows: the logarithm must cost nothing more"),
    *_rows("cross_entropy", ((4096, 1024), (512, 32768), (64, 131072)), (FLOAT, BFLOAT), "sizes of vocabularies"),
    *_rows("topk_softmax", ((4096, 1024), (512, 32768)), (FLOAT,), "the paper's fused top-k: few of many", k=8),
]

CUDA = [
    *_rows(
        "softmax",
        ((65536, 1024), (16384, 4096), (4096, 16384), (1024, 131072)),
        (FLOAT, BFLOAT, HALF),
        "64 to 128 Mi elements, beyond any cache: share of the memory's speed",
    ),
    *_rows("log_softmax", ((16384, 4096),), (BFLOAT,), "the logarithm must cost nothing more"),
]
