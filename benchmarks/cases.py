"""The measured cases: a list per device, each entry with its reason."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .case import Case
from .summary import SMALL_CALLS

# The least memory traffic of a row function, in passes over the input: each required read and write once.
PASSES = {
    "softmax": {"forward": 2, "backward": 3},  # x -> y; y, grad y -> grad x
    "log_softmax": {"forward": 2, "backward": 3},
    "logsumexp": {"forward": 1, "backward": 2},  # x -> one element per row; x -> grad x
    "cross_entropy": {"forward": 1, "backward": 2},
    "topk_softmax": {"forward": 1, "backward": 2},
}
ROWS = tuple(PASSES)
LONG_ROW, FEW_ROWS, SMALL_CALL = 32768, 8, 64


@dataclass(frozen=True)
class RowCase(Case):
    """A problem of a row function, the family, or of attention on the CPU; `reason` is printed by --list.

    Options of attention: `causal`; `window` W: a query sees the W keys up to itself; `mask` "random" (bool [L, L], half of it
    visible) or "padding" (bool [B, 1, 1, L]; sequences alternate between three quarters and a quarter of visible keys);
    `bias` "per head" ([1, H, L, L]) or "shared" ([1, 1, L, L]), both with gradient, or "frozen" ("per head" without gradient).
    """

    reason: str = ""

    @property
    def kind(self) -> str:
        """The key of the summary: the mask of attention, the shape of rows."""
        if math.prod(self.sizes.values()) <= SMALL_CALL:
            return SMALL_CALLS
        if self.family == "attention":
            kinds = [name if value is True else f"{name} {value}" for name, value in self.options.items() if value is not False]
            return ", ".join(kinds) or "full"
        if self.sizes["rows"] <= FEW_ROWS:
            return "few rows"
        return "long rows" if self.sizes["classes"] >= LONG_ROW else "short rows"

    def inputs(self, device: str) -> tuple[list[Tensor], list[Tensor]]:
        """(tensors that get gradients, tensors that do not), with the same elements in every run.

        Attention: ([query, key, value, bias?], [mask?]). A window comes with its bool mask, for providers without windows.
        """
        generator = torch.Generator().manual_seed(0)

        def normal(*shape: int, scale: float = 1.0) -> Tensor:
            return (torch.randn(shape, generator=generator) * scale).to(self.dtype).to(device)

        if self.family == "attention":
            batch, heads, length, head_dim = (self.sizes[name] for name in ("B", "H", "L", "E"))
            wanted = [normal(batch, heads, length, head_dim) for _ in range(3)]
            extras = []
            if bias := self.options.get("bias"):
                (extras if bias == "frozen" else wanted).append(normal(1, 1 if bias == "shared" else heads, length, length))
            elif self.options.get("mask") == "random":
                extras.append((torch.rand(length, length, generator=generator) < 0.5).to(device))
            elif self.options.get("mask") == "padding":
                extras.append((torch.arange(length) < torch.tensor(self._lengths())[:, None])[:, None, None].to(device))
            elif window := self.options.get("window"):
                extras.append(torch.ones(length, length, dtype=torch.bool).tril_().triu_(1 - window).to(device))
            return [t.requires_grad_() for t in wanted], extras
        rows, classes = self.sizes["rows"], self.sizes["classes"]
        there = {"generator": torch.Generator(device).manual_seed(0), "device": device}
        target = [torch.randint(classes, (rows,), **there)] if self.family == "cross_entropy" else []
        return [(torch.randn(rows, classes, **there) * 3).to(self.dtype).requires_grad_()], target

    def _lengths(self) -> list[int]:
        return [(3 if n % 2 == 0 else 1) * self.sizes["L"] // 4 for n in range(self.sizes["B"])]

    def visible_pairs(self, extras: list[Tensor]) -> int:
        """Number of visible pairs of query and key, over batch and heads."""
        batch, heads, length = (self.sizes[name] for name in ("B", "H", "L"))
        if self.options.get("mask") or self.options.get("window"):
            return int(extras[0].sum()) * heads * (length if self.options.get("mask") == "padding" else batch)
        return batch * heads * (length * (length + 1) // 2 if self.options.get("causal") else length**2)

    def flops(self, direction: str, extras: list[Tensor]) -> int | None:
        """Floating-point operations of the matrix products over visible pairs: forward QK', PV; backward QK' again, dV, dP, dQ,
        dK. None for row functions."""
        if self.family != "attention":
            return None
        return self.visible_pairs(extras) * self.sizes["E"] * (4 if direction == "forward" else 10)

    def moved_bytes(self, direction: str) -> int | None:
        """The least memory traffic of a row function. None for attention."""
        if self.family not in PASSES:
            return None
        return math.prod(self.sizes.values()) * self.dtype.itemsize * PASSES[self.family][direction]


def _attention(length: int, dtype: torch.dtype, reason: str, *, head_dim: int = 64, batch: int = 1, **options) -> RowCase:
    # Long sequences have fewer heads, so that a case takes seconds, not minutes; at least two, so that two threads have work
    # with a peer that parallelizes only over heads.
    heads = (8 if length <= 2048 else 4 if length <= 4096 else 2) // batch
    return RowCase("attention", {"B": batch, "H": heads, "L": length, "E": head_dim}, options, dtype, reason)


def _attention_kinds(dtype: torch.dtype) -> list[RowCase]:
    grown = (512, 1024, 2048, 4096, 8192, 16384)
    wide = {"full": (1024, 4096), "causal": (512, 2048, 8192), "mask": (2048,), "window": (8192,)}
    causal, full, mask, window = (
        "as in training: half the square is skipped",
        "no block to skip: the plain cost",
        "a mask without structure: every block is read",
        "512 keys per query: the cost is to be linear in the length",
    )
    return [
        *(_attention(n, dtype, causal, causal=True) for n in grown),
        *(_attention(n, dtype, causal, head_dim=128, causal=True) for n in wide["causal"]),
        *(_attention(n, dtype, full) for n in grown),
        *(_attention(n, dtype, full, head_dim=128) for n in wide["full"]),
        *(_attention(n, dtype, mask, mask="random") for n in (512, 1024, 2048, 4096, 8192)),
        *(_attention(n, dtype, mask, head_dim=128, mask="random") for n in wide["mask"]),
        *(_attention(n, dtype, "sequences of unequal length in one batch", batch=2, mask="padding") for n in (1024, 4096)),
        *(_attention(n, dtype, "a learned bias: its gradient is as large as the scores", bias="per head") for n in (512, 2048)),
        _attention(1024, dtype, "the same, wide", head_dim=128, bias="per head"),
        *(
            _attention(n, dtype, "its gradient is summed over heads, without a tensor of scores per head", bias="shared")
            for n in (512, 2048)
        ),
        *(_attention(n, dtype, "a float mask that torch's flash takes too", bias="frozen") for n in (1024, 2048)),
        *(_attention(n, dtype, window, window=512) for n in (2048, 4096, 8192, 16384)),
        *(_attention(n, dtype, window, head_dim=128, window=512) for n in wide["window"]),
    ]


def _rows(function: str, shapes, dtypes, reason: str, **options) -> list[RowCase]:
    return [
        RowCase(function, {"rows": rows, "classes": classes}, options, dtype, reason)
        for dtype in dtypes
        for rows, classes in shapes
    ]


FLOAT, BFLOAT, HALF = torch.float32, torch.bfloat16, torch.float16
# (rows, classes). malloc reuses the memory of a result of 4 Mi elements; a result of 16 Mi elements (32 MiB and more) gets new
# memory from the system each time, and its page faults can cost more than the function: see docs/performance/rows.md.
SHORT = ((16384, 256), (4096, 1024), (16384, 1024), (1024, 4096))  # rows of attention, of small vocabularies
LONG = ((128, 32768), (512, 32768), (32, 131072), (64, 262144))  # vocabularies
FEW = ((8, 262144), (1, 1048576))  # one step of decoding: too few rows to keep the threads busy
SMALL = "64 elements: the time that a call takes the host"

CPU = [
    *(case for dtype in (FLOAT, BFLOAT, HALF) for case in _attention_kinds(dtype)),
    *_rows("softmax", SHORT + LONG + FEW, (FLOAT, BFLOAT), "one read of the row where three passes read it three times"),
    *_rows("log_softmax", SHORT + LONG + FEW, (FLOAT, BFLOAT), "the same rows: the logarithm must cost nothing more"),
    *_rows("cross_entropy", SHORT + LONG + FEW, (FLOAT, BFLOAT), "reads the logits once, writes none"),
    *_rows("logsumexp", SHORT[1:2] + LONG[1:3] + FEW[:1], (FLOAT, BFLOAT), "the merge itself and nothing else"),
    *_rows("topk_softmax", SHORT + LONG + FEW, (FLOAT, BFLOAT), "the paper's fused top-k: few of many", k=5),
    *(RowCase("attention", {"B": 1, "H": 1, "L": 8, "E": 8}, {}, dtype, SMALL) for dtype in (FLOAT, BFLOAT)),
    *(case for name in ("softmax", "log_softmax", "cross_entropy") for case in _rows(name, ((8, 8),), (FLOAT, BFLOAT), SMALL)),
]

CUDA = [
    *_rows(
        "softmax",
        ((65536, 1024), (16384, 4096), (4096, 16384), (1024, 131072)),
        (FLOAT, BFLOAT, HALF),
        "64 to 128 Mi elements, beyond any cache: share of the memory's speed",
    ),
    *_rows("log_softmax", ((16384, 4096),), (BFLOAT,), "the logarithm must cost nothing more"),
    *_rows("cross_entropy", ((32768, 4096), (4096, 65536)), (FLOAT, BFLOAT), "reads the logits once, writes none"),
    *_rows("logsumexp", ((16384, 4096),), (FLOAT,), "the merge itself and nothing else"),
    *(
        case
        for k in (5, 15, 30)
        for case in _rows("topk_softmax", ((4000, 4000), (4000, 25000)), (FLOAT,), "the paper's fused top-k, its batch", k=k)
    ),
    *_rows("topk_softmax", ((10, 1000000),), (FLOAT,), "few long rows, each on many SMs", k=5),
]

# Widths without an advantage: few classes, odd, a power of two or one less, vocabularies not divisible by 8.
ODD_CLASSES = (
    1,
    2,
    3,
    7,
    16,
    31,
    77,
    100,
    127,
    256,
    577,
    1000,
    1023,
    1024,
    3000,
    4096,
    8191,
    10000,
    32000,
    50257,
    128256,
    151936,
)
MOST_ODD_ROWS = 1 << 24


def _odd(elements: int, widths, dtypes) -> list[RowCase]:
    shapes = [(min(elements // classes, MOST_ODD_ROWS), classes) for classes in widths]
    return [case for name in ROWS[:-1] for case in _rows(name, shapes, dtypes, "any width at the memory's speed")]


ODD, ODD_QUICK = _odd(1 << 26, ODD_CLASSES, (BFLOAT, FLOAT)), _odd(1 << 12, (3, 77), (FLOAT,))

_QUICK = "seconds for all of them: does the benchmark itself work?"
QUICK = [
    *(
        RowCase("attention", {"B": 2, "H": 2, "L": 128, "E": 32}, options, FLOAT, _QUICK)
        for options in ({"causal": True}, {"mask": "padding"}, {"window": 24}, {"bias": "shared"})
    ),
    *(
        RowCase("attention", {"B": 1, "H": 2, "L": 128, "E": 32}, options, BFLOAT, _QUICK)
        for options in ({}, {"mask": "random"}, {"bias": "per head"}, {"bias": "frozen"})
    ),
    *(case for function in ROWS[:-1] for case in _rows(function, ((64, 512), (2, LONG_ROW)), (FLOAT,), _QUICK)),
    *_rows(ROWS[-1], ((64, 512), (2, LONG_ROW)), (BFLOAT,), _QUICK, k=5),
]
