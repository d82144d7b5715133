"""python -m flash_online bench paper: the paper's kernels and this library's, each checked first, then timed, interleaved.

Every kernel is checked against torch in float64, on rows spread over the batch with half a million elements in total; on all
rows, that probabilities sum to 1 and that every index was written. Calls are repeated to fill two milliseconds, short ones in a
CUDA graph, which excludes host time; inputs are normally distributed, the same in every sample. Data that fits into the chip's
cache is read from there, as in the paper.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import Tensor

import flash_online

from .. import harness
from ..case import Case
from ..nvcc import Missing
from ..summary import OURS
from ..timing import GraphTimer, interleave
from .build import KS, Kernels
from .summary import SOFTMAX

BATCHES = (4000, 10)  # the paper's
CLASSES = (
    *(63, 100, 200, 500, 1000, 2000, 4000, 8000, 16000, 25000, 50000, 100000),
    *(200000, 500000, 1000000, 2000000, 5000000, 10000000),
)
QUICK = (63, 1000, 25000)
CHECKED_ELEMENTS = 1 << 19
TOLERANCE = 1e-4  # of the largest probability: float32 sums over up to 10^7 terms, by the chip's own exp
ALIKE = 1e-5  # logits this close may have equal float32 probabilities
TENSORS = 3  # of the input's size: the input, the paper's result, ours
TOP = "top {}"  # name of the results for a k


class Rows:
    """A batch of rows, its results, and the expected result of the rows that are checked."""

    def __init__(self, rows: int, classes: int, device: str = "cuda"):
        generator = torch.Generator(device).manual_seed(0)
        self.x = torch.randn(rows, classes, generator=generator, device=device)
        self.y = torch.empty_like(self.x)
        count = max(1, min(rows, CHECKED_ELEMENTS // classes))
        self.checked = torch.linspace(0, rows - 1, count, device=device).long()
        self.sample = self.x[self.checked]
        self.expected = torch.softmax(self.sample.double(), -1)
        self.values = {k: torch.empty(rows, k, device=device) for k in KS}
        self.indices = {k: torch.empty(rows, k, dtype=torch.int32, device=device) for k in KS}

    def poison(self, k: int | None) -> None:
        if k is None:
            self.y.fill_(torch.nan)
        else:
            self.values[k].fill_(torch.nan)
            self.indices[k].fill_(-1)

    def error(self, name: str, result: Tensor, indices: Tensor | None) -> float:
        """Relative to the largest probability. Raises AssertionError beyond the tolerance, or if indices are wrong."""
        expected = self.expected
        if indices is None:
            worst = (result.sum(-1) - 1).abs().max().item()
            assert worst < 1e-3, f"{name}: a row sums to 1 {worst:+.2g}"
        else:
            k = result.shape[1]
            assert result.isfinite().all() and (indices >= 0).all(), f"{name}: not everything was written"
            expected = expected.topk(k).values
            chosen = self.sample.gather(-1, indices[self.checked].long())
            off = (chosen - self.sample.topk(k).values).abs().max().item()
            assert off <= ALIKE, f"{name}: these are not the indices of the {k} largest"
        error = ((result[self.checked] - expected).abs().max() / expected.max()).item()
        assert error <= TOLERANCE, f"{name}: off by {error:.2g} of the largest probability, allowed {TOLERANCE}"
        return error


def providers(rows: Rows, kernels: Kernels) -> dict[str, dict]:
    """problem -> name -> a call that returns (probabilities, indices or None)."""

    def softmax(name):
        def call():
            kernels.softmax(name, rows.x, rows.y)
            return rows.y, None

        return call

    def our_softmax():
        return flash_online.softmax(rows.x, -1), None

    def unfused(k):
        def call():
            kernels.softmax("safe", rows.x, rows.y)
            kernels.top_k(rows.y, rows.values[k], rows.indices[k])
            return rows.values[k], rows.indices[k]

        return call

    def fused(name, k):
        def call():
            kernels.softmax_top_k(name, rows.x, rows.values[k], rows.indices[k])
            return rows.values[k], rows.indices[k]

        return call

    calls = {SOFTMAX: {name: softmax(name) for name in ("safe", "naive", "online")} | {OURS: our_softmax}}
    for k in KS:
        calls[TOP.format(k)] = {
            "unfused": unfused(k),
            "safe, fused": fused("safe", k),
            "online, fused": fused("online", k),
            OURS: lambda k=k: flash_online.topk_softmax(rows.x, k),
        }
    return calls


def case_of(rows: int, classes: int) -> Case:
    return Case("paper", {"rows": rows, "classes": classes}, dtype=torch.float32)


def measure(case: Case, kernels: Kernels, seconds: float, rounds: int) -> dict:
    torch.cuda.empty_cache()  # the largest size needs nearly all memory
    size, result = tuple(case.sizes.values()), case.head() | {"us": {}, "error": {}}
    needed = TENSORS * 4 * size[0] * size[1]
    if needed > 0.95 * torch.cuda.mem_get_info()[0]:
        return result | {"too_large": f"{TENSORS} tensors of its size take {needed / 2**30:.0f} GiB"}
    rows = Rows(*size)
    calls = providers(rows, kernels)
    with torch.no_grad(), flash_online.strict():
        for what, by_name in calls.items():
            k = None if what == SOFTMAX else int(what.split()[1])
            result["error"][what] = {}
            for name, call in by_name.items():
                rows.poison(k)
                label = f"{what}, {name}, rows {size[0]}, classes {size[1]}"
                result["error"][what][name] = rows.error(label, *call())
        pool = torch.cuda.graph_pool_handle()
        timers = {(what, name): GraphTimer(call, pool) for what, by_name in calls.items() for name, call in by_name.items()}
        # copy_() in a CUDA graph is not a kernel, and a third slower at some sizes; torch.neg moves the same bytes.
        copy = GraphTimer(lambda: torch.neg(rows.x, out=rows.y), pool)
        interleave([*timers.values(), copy], seconds, rounds)
    result["copy_us"] = 1e6 * copy.median
    result["rounds"] = len(copy.times)
    for (what, name), t in timers.items():
        result["us"].setdefault(what, {})[name] = 1e6 * t.median
    return result


def line(result: dict) -> str:
    head = f"{result['case']:26} "
    if "too_large" in result:
        return head + result["too_large"]
    parts = [f"copy {result['copy_us']:.1f}"]
    for what, us in result["us"].items():
        parts.append(f"{what}: " + " ".join(f"{name} {t:.1f}" for name, t in us.items()))
    return head + "; ".join(parts) + " us"


def run(quick: bool, facts: dict, path: Path) -> int:
    """The whole benchmark; `facts` describe the machine and the run. Returns 2 if it cannot run here."""
    try:
        if not torch.cuda.is_available():
            raise Missing("the paper's kernels need a CUDA GPU")
        kernels = Kernels()
    except Missing as reason:
        print(f"bench paper: {reason}", file=sys.stderr)
        return 2
    cases = [case_of(rows, classes) for rows in BATCHES for classes in (QUICK if quick else CLASSES)]
    return harness.run("paper", cases, lambda c: measure(c, kernels, facts["seconds"], facts["rounds"]), line, facts, path)
