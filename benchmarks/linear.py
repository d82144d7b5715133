"""linear_cross_entropy, forward and backward, compared with torch's and torch.compile's, then by its parts: python -m
flash_online bench linear

Loss and both gradients of every provider are first checked against float64; ours within the tests' tolerance, which uses
torch's own error if torch is measured too. Forward runs without gradient; a step is forward and backward. Samples of all
providers, and of the parts of a step of ours, are interleaved; memory is the peak of torch's allocator in a step in addition to
the two gradients.
"""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from unittest import mock

import torch
import torch.nn.functional as torch_functional
from torch import Tensor

import flash_online
import flash_online.functional as our_functional
from flash_online import _linear_cross_entropy_ops, testing

from . import harness
from .case import Case
from .peers import PEER_TOLERANCE
from .row_pages import linear_table
from .summary import OURS
from .timing import call_timer, interleave

MIB = 1 << 20
OPS = torch.ops.flash_online
TRUTH_ROWS = 1024  # rows that the reference computes at a time
FOUR_PRODUCTS, OUR_LOSS_ALONE = f"{OURS}, four products", "torch's linear, our cross_entropy"
WITH_ENTROPY = f"{OURS}, with entropy"  # and the loss's gradient alone


def plain(x: Tensor, w: Tensor, target: Tensor) -> Tensor:
    return torch_functional.cross_entropy(torch_functional.linear(x, w), target)


def _liger(x: Tensor, w: Tensor, target: Tensor) -> Tensor:
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

    return LigerFusedLinearCrossEntropyFunction.apply(x, w, target)[0]


def _liger_scaled(x: Tensor, w: Tensor, target: Tensor, return_entropy: bool = False) -> Tensor:
    from liger_kernel.ops.fused_linear_scaled_cross_entropy import LigerFusedLinearScaledCrossEntropyFunction

    found = LigerFusedLinearScaledCrossEntropyFunction.apply(x, w, target, return_entropy=return_entropy)
    return (found[0] if return_entropy else found).mean()


def _quack(x: Tensor, w: Tensor, target: Tensor) -> Tensor:
    from quack.linear_cross_entropy import chunked_linear_cross_entropy

    return chunked_linear_cross_entropy(x, w, target)


# Peers that may not be installed: whatever their first step raises is the reason why they are left out.
OPTIONAL = {
    "Liger": _liger,
    "Liger, scaled": _liger_scaled,
    "Liger, scaled, with entropy": functools.partial(_liger_scaled, return_entropy=True),
    "quack": _quack,
}
PEERS = ("torch", "torch.compile", FOUR_PRODUCTS, WITH_ENTROPY, OUR_LOSS_ALONE, *OPTIONAL)


def cases(rows: list[int], width: int, classes: int, dtype: str, quick: bool) -> list[Case]:
    if quick:
        rows, width, classes = [64], 32, 500
    sizes = [{"rows": r, "width": width, "classes": classes} for r in rows]
    return [Case("linear_cross_entropy", of_one, dtype=getattr(torch, dtype)) for of_one in sizes]


def inputs(case: Case, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Input, linear weight, target: the same elements in every run."""
    rows, width, classes = case.sizes.values()
    generator = torch.Generator(device).manual_seed(0)
    w = torch.randn(classes, width, generator=generator, device=device) * width**-0.5
    x = torch.randn(rows, width, generator=generator, device=device)
    target = torch.randint(0, classes, (rows,), generator=generator, device=device)
    return x.to(case.dtype).requires_grad_(), w.to(case.dtype).requires_grad_(), target


def providers(device: str, wanted: list[str] | None, chunks: list[int]) -> dict[str, tuple]:
    """name -> (function, setting), ours first; `chunks` are further sizes of a chunk of logits, in MiB."""

    def budget(mib: int) -> AbstractContextManager:
        return mock.patch.dict(_linear_cross_entropy_ops._CHUNK_BYTES, {device: mib * MIB})

    peers = {
        "torch": plain,
        "torch.compile": torch.compile(plain),
        FOUR_PRODUCTS: lambda x, w, t: flash_online.linear_cross_entropy(x, w, t, reduction="none").mean(),
        WITH_ENTROPY: lambda x, w, t: flash_online.linear_cross_entropy(x, w, t, return_entropy=True)[0],
        OUR_LOSS_ALONE: lambda x, w, t: our_functional.cross_entropy(torch_functional.linear(x, w), t),
    } | (OPTIONAL if device == "cuda" else {})
    ours = our_functional.linear_cross_entropy
    found = {OURS: (ours, nullcontext)}
    found |= {f"{OURS}, chunks of {mib} MiB": (ours, functools.partial(budget, mib)) for mib in chunks}
    return found | {name: (peer, nullcontext) for name, peer in peers.items() if not wanted or name in wanted}


def truth(x: Tensor, w: Tensor, target: Tensor) -> list[Tensor]:
    """Loss and gradients in float64, in chunks of rows."""
    w, loss, grads, grad_weight = w.detach().double(), 0.0, [], torch.zeros_like(w, dtype=torch.float64)
    for rows, wanted in zip(x.detach().double().split(TRUTH_ROWS), target.split(TRUTH_ROWS), strict=True):
        logits = rows @ w.t()
        loss = loss + torch_functional.cross_entropy(logits, wanted, reduction="sum") / len(x)
        grad_logits = torch.softmax(logits, -1)
        grad_logits[torch.arange(len(rows), device=x.device), wanted] -= 1
        grad_logits /= len(x)
        grads.append(grad_logits @ w)
        grad_weight += grad_logits.t() @ rows
    return [loss, torch.cat(grads), grad_weight]


def check(case: Case, functions: dict, tensors: tuple, result: dict) -> dict[str, dict]:
    """Checks a step of every provider. Returns its error relative to max|truth|, and its memory; raises AssertionError for a
    wrong result. A provider without room for its logits is entered under `unavailable`."""
    x, w, target = tensors
    expected, theirs, facts = truth(*tensors), [], {}
    names = sorted(functions, key=lambda name: name != "torch")  # torch's result first: ours is compared with it
    for name in names:
        function, setting = functions[name]
        parts = []

        def step(function=function, parts=parts):
            loss = function(x, w, target)
            parts.extend([loss.detach(), *torch.autograd.grad(loss, (x, w))])

        try:
            with setting():
                step()  # exclude a first call's compilation and caches from the memory of the next
                parts.clear()
                extra = testing.peak_extra_bytes(step, device=x.device.type)
        except torch.OutOfMemoryError:
            result["unavailable"][name] = "out of memory"
            continue
        except Exception as error:
            if name not in OPTIONAL:
                raise
            result["unavailable"][name] = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
            continue
        errors = [testing.error(a, b).max / b.abs().max().item() for a, b in zip(parts, expected, strict=True)]
        if name == "torch":
            theirs = parts
        for n, error in enumerate(errors):
            what = f"{case.label}, {name}: {f'gradient {n}' if n else 'loss'}"
            if name.startswith(OURS) and theirs:
                testing.assert_close_to_float64(parts[n], theirs[n : n + 1], expected[n], case.dtype, name=what)
            assert error <= PEER_TOLERANCE[case.dtype], f"{what}: off by {error:.2g} of the largest"
        returned = sum(t.numel() * t.element_size() for t in parts)
        facts[name] = {"error": max(errors), "step_extra_bytes": extra, "beyond_results_bytes": extra - returned}
    return facts


def parts_of(x: Tensor, w: Tensor, target: Tensor) -> tuple[str, dict]:
    """The chunks in words, and the parts of a step of ours: name -> (calls per step, call)."""
    device, dtype = x.device.type, x.dtype
    x, w = x.detach(), w.detach()
    rows, _ = _linear_cross_entropy_ops.chunk_plan(x.shape[0], w.shape[0], x.shape[1], dtype, device, dtype.itemsize == 2)
    chunks = -(-x.shape[0] // rows)
    pitch = _linear_cross_entropy_ops._pitch(w.shape[0], dtype, device)
    logits = x.new_zeros(rows, pitch)[:, : w.shape[0]]
    chunk, t = x[:rows], target[:rows]
    ones = torch.ones(len(chunk), device=x.device)
    logits = logits[: len(chunk)]
    grad_input, grad_weight = torch.zeros_like(chunk), torch.zeros_like(w)
    one, other = torch.tensor(1.0, device=x.device), torch.tensor(1.0001, device=x.device)
    options = (t, None, -100, 0.0, False)
    calls = {
        "logits": (chunks, lambda: torch.mm(chunk, w.t(), out=logits)),
        "grad_input": (chunks, lambda: torch.mm(logits, w, out=grad_input)),
        "grad_linear_weight, first chunk": (1, lambda: torch.mm(logits.t(), chunk, out=grad_weight)),
        "grad_linear_weight, the others": (chunks - 1, lambda: grad_weight.addmm_(logits.t(), chunk)),
        "loss alone": (chunks, lambda: OPS.cross_entropy_forward(logits, t, None, -100, 0.0)),
        "loss and entropy": (0, lambda: OPS.cross_entropy_forward(logits, t, None, -100, 0.0, True)),
        "gradient alone, in place": (chunks, lambda: OPS.cross_entropy_backward_(ones, None, logits, *options, False)),
        "loss and gradient, in place": (chunks, lambda: OPS.cross_entropy_backward_(ones, None, logits, *options, True)),
        "scale by 1": (1, lambda: OPS.scale_(grad_weight, one)),
        "scale by another number": (1, lambda: OPS.scale_(grad_weight, other)),
    }
    torch.mm(chunk, w.t(), out=logits)
    words = f"{chunks} chunks of {rows} rows, {logits.element_size() * rows * pitch / MIB:.0f} MiB each"
    return words, {name: part for name, part in calls.items() if part[0] or "entropy" in name}


def measure(case: Case, device: str, seconds: float, rounds: int, wanted: list[str] | None, chunks: list[int]) -> dict:
    result, tensors, timers = case.head(), inputs(case, device), {}
    x, w, target = tensors
    functions = providers(device, wanted, chunks)
    facts = check(case, functions, tensors, result)
    for name in (name for name in functions if name in facts):
        function, setting = functions[name]

        def step(function=function):
            return torch.autograd.grad(function(x, w, target), (x, w))

        def forward(function=function):
            with torch.no_grad():
                function(x, w, target)

        timers[name] = {"forward": call_timer(forward, setting, device), "step": call_timer(step, setting, device)}
    interleave([of_one[what] for what in ("forward", "step") for of_one in timers.values()], seconds, rounds)
    product = 2 * x.shape[0] * x.shape[1] * w.shape[0]
    for name, of_one in timers.items():
        entry = {f"{what}_ms": 1e3 * timer.median for what, timer in of_one.items()}
        rates = {f"{what}_tflop_per_s": 1e-12 * n * product / of_one[what].median for what, n in (("forward", 1), ("step", 3))}
        rates["rounds"] = len(of_one["step"].times)
        result["providers"][name] = entry | rates | facts[name]
    result["chunks"], parts = parts_of(*tensors)
    of_parts = {name: call_timer(call, torch.no_grad, device) for name, (_, call) in parts.items()}
    interleave(list(of_parts.values()), seconds, rounds)
    result["parts"] = {name: {"count": parts[name][0], "ms": 1e3 * timer.median} for name, timer in of_parts.items()}
    return result


def line(result: dict) -> str:
    return "\n".join(linear_table(result))


def run(
    of_cases: list[Case], device: str, facts: dict, path: Path, wanted: list[str] | None = None, chunks: list[int] | None = None
) -> int:
    def of_case(case: Case) -> dict:
        return measure(case, device, facts["seconds"], facts["rounds"], wanted, chunks or [])

    return harness.run("linear_cross_entropy", of_cases, of_case, line, facts, path)
