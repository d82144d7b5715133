"""python -m flash_online bench family: every provider is checked, then timed, interleaved; then a profiler counts its bytes.

All of a result is checked against float64, within the tests' tolerance for this library and for our own kernels, on outputs
filled with NaN before. Times are medians between CUDA events, forward only and without gradient. The profiler counts one call
of each provider, in a separate process (traffic.py).
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from flash_online import reference, testing

from .. import harness
from ..attention.cases import HIDDEN, TOKENS, Cell, Problem
from ..attention.measure import BASELINE_SIZE, reason
from ..attention.peers import PROVIDERS as PEERS
from ..attention.peers import Call, sdpa
from ..attention.summary import EFFICIENT, FA3, FLEX
from ..attention_pages import family_page
from ..nvcc import Missing
from ..peers import Unavailable
from ..summary import FLASH, MATH, OURS
from ..timing import EventTimer, interleave, matmul
from . import traffic
from .build import Kernels
from .summary import ORGANISATIONS, PROFILED_LENGTH, TRITON, asked, least

MAX_MATH_BYTES = 1 << 34  # of scores; the math backend holds about four tensors of that size
OWN = (*ORGANISATIONS, TRITON, OURS)  # a wrong result of one of these is our error


def cell(head_dim: int, causal: bool, length: int, tokens: int = TOKENS) -> Cell:
    sizes = {"B": tokens // length, "H": HIDDEN // head_dim, "L": length, "E": head_dim}
    return Cell("family", sizes, {"causal": causal}, kind=f"E {head_dim}, {'causal' if causal else 'full'}")


CELLS = [cell(E, causal, length) for E in (64, 128) for causal in (False, True) for length in (1024, PROFILED_LENGTH, 16384)]
QUICK = [cell(E, causal, 384, 768) for E in (64, 128) for causal in (False, True)]


def profiled_cells(quick: bool) -> list[Cell]:
    return QUICK if quick else [cell for cell in CELLS if cell.sizes["L"] == PROFILED_LENGTH]


def triton_attention(problem: Problem) -> Call:
    try:
        from . import triton_attention
    except ImportError as missing:
        raise Unavailable(f"it needs {missing.name}") from None
    causal = problem.options["causal"]
    run = functools.partial(triton_attention.attention, problem.query, problem.key, problem.value, causal)
    return Call(problem, run, problem.leaves, problem.grad)


def providers(kernels: Kernels) -> dict[str, Callable[[Problem], Call]]:
    def own(organisation: str) -> Callable[[Problem], Call]:
        def provider(problem: Problem) -> Call:
            tensors = (problem.query.detach(), problem.key.detach(), problem.value.detach())
            run = kernels.attention(organisation, *tensors, problem.options["causal"])
            return Call(problem, run, problem.leaves, problem.grad)

        return provider

    peers = {name: PEERS[name] for name in (FLEX, EFFICIENT, FLASH, FA3, OURS)}
    math = {MATH: sdpa(SDPBackend.MATH, MAX_MATH_BYTES)}
    return {name: own(name) for name in ORGANISATIONS} | {TRITON: triton_attention} | peers | math


def expected(problem: Problem, dtype: torch.dtype) -> Tensor:
    """From the plain reference, one head at a time, as a head's scores may take gigabytes."""
    out = torch.empty(problem.query.shape, dtype=dtype, device=problem.query.device)
    with torch.no_grad():
        for b in range(out.shape[0]):
            for h in range(out.shape[1]):
                tensors = (t[b : b + 1, h : h + 1].to(dtype) for t in (problem.query, problem.key, problem.value))
                out[b, h] = reference.attention(*tensors, causal=problem.options["causal"])[0, 0]
    return out


@contextlib.contextmanager
def inference(call: Call):
    with call.setting(), torch.no_grad():
        yield


def check(problem: Problem, makers: dict[str, Callable[[Problem], Call]], result: dict) -> dict[str, Call]:
    """The calls of all providers with correct results. Raises AssertionError if this library or one of our kernels is wrong;
    peers that fail or are wrong are entered under `unavailable`."""
    truth, plain = expected(problem, torch.float64), expected(problem, problem.query.dtype)
    calls = {}
    for name, make in makers.items():
        title = f"{problem.cell.title}, {name}"
        try:
            call = make(problem)
            with inference(call):
                out = call.view(call.run())
            testing.assert_close_to_float64(out, plain, truth, name=title)
        except Unavailable as why:
            result["unavailable"][name] = str(why)
        except AssertionError as wrong:
            if name in OWN:
                raise
            result["unavailable"][name] = reason(wrong)
        except Exception as error:  # peers may raise anything
            if name in (*ORGANISATIONS, OURS):
                raise AssertionError(f"{title}: {error}") from error
            result["unavailable"][name] = reason(error)
        else:
            calls[name] = call
            result["providers"][name] = {"error": testing.error(out, truth).max / truth.abs().max().item()}
        torch.cuda.empty_cache()
    return calls


def describe(name: str, problem: Problem, kernels: Kernels, call: Call) -> dict:
    """Launch facts of a provider that the byte computation needs."""
    if name in ORGANISATIONS:
        return {"ctas_per_head": kernels.ctas_per_head(name, problem.query)}
    if name == TRITON:
        from .triton_attention import chosen_tile

        with inference(call):
            call.run()
        return {"tile": chosen_tile()}
    return {}


def measure(cell: Cell, kernels: Kernels, seconds: float, rounds: int) -> dict:
    result = cell.head()
    problem = Problem(cell, "cuda")
    calls = check(problem, providers(kernels), result)
    baseline = EventTimer(matmul(BASELINE_SIZE["cuda"], torch.bfloat16, "cuda"), torch.no_grad, "cuda", 3)
    timers = {name: EventTimer(call.run, functools.partial(inference, call), "cuda") for name, call in calls.items()}
    interleave([*timers.values(), baseline], seconds, rounds)
    result["matmul"] = {"tflop_per_s": 2e-12 * BASELINE_SIZE["cuda"] ** 3 / baseline.median}
    result["least"] = vars(least(cell.sizes))
    for name, timer in timers.items():
        entry = result["providers"][name] | describe(name, problem, kernels, calls[name])
        entry |= {"ms": 1e3 * timer.median, "tflop_per_s": 1e-12 * problem.flops("forward") / timer.median}
        entry["rounds"] = len(timer.times)
        if bytes_asked := asked(name, cell.sizes, cell.options["causal"], entry):
            entry["asked"] = vars(bytes_asked)
        result["providers"][name] = entry
    return result


def line(result: dict) -> str:
    parts = [f"{name} {entry['tflop_per_s']:.0f}" for name, entry in result["providers"].items()]
    parts += [f"{name} unavailable ({why[:60]})" for name, why in result["unavailable"].items()]
    return f"{result['kind']:14} {result['case']:34} matmul {result['matmul']['tflop_per_s']:.0f}; " + ", ".join(parts)


def run(quick: bool, facts: dict, path: Path, profiler: str | None) -> int:
    """The whole benchmark; `facts` describe the machine and the run, `profiler` is Nsight Compute's program, None for times
    only. Returns 2 if it cannot run here."""
    try:
        if not torch.cuda.is_available():
            raise Missing("the kernels need a CUDA GPU")
        kernels = Kernels()
    except Missing as why:
        print(f"bench family: {why}", file=sys.stderr)
        return 2
    cells = QUICK if quick else CELLS
    profiled = profiled_cells(quick)

    def finish(record: dict, done: bool) -> dict:
        if done and profiler:
            torch.cuda.empty_cache()
            record["traffic"] = traffic.profile(profiler, profiled, quick)
        return record

    def of_cell(cell: Cell) -> dict:
        return measure(cell, kernels, facts["seconds"], facts["rounds"])

    return harness.run("family", cells, of_cell, line, facts, path, finish, family_page)
