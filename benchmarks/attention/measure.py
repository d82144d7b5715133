"""python benchmarks/run.py attention: every cell checked first, then its contestants timed in turn.

Checked against float64, for ours and for every peer: the output and all gradients of the query heads that share the first key
head, of the first batch entry (of every one for a bias with gradient) or of three packed sequences. Ours must meet the
tolerance of the tests, the peers a looser one. What dropout drops is checked by its mean, the same call without it by numbers.

Times are medians between CUDA events; backward is timed apart from forward, forward without gradient. Short cells are replayed
from a CUDA graph; for the host's cost calls are only enqueued. A product of two 8192 x 8192 matrices takes its turns with them.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from peers import PEER_TOLERANCE, Absent
from summary import DIRECTIONS, FLASH, MATH, OURS
from torch import Tensor
from tqdm import tqdm
from turns import Enqueued, Events, Replays, take_turns

from flash_online import reference, testing

from .cases import CELLS, QUICK, Cell, Problem
from .peers import Call, contestants
from .tables import CUDNN, EFFICIENT, marks, summarize, summary_lines

CHUNK = 1 << 25  # scores of the reference at a time
YARDSTICK, YARDSTICK_ROUNDS = {"cpu": 512, "cuda": 8192}, 3
STEP = "step"  # forward and backward together, of the host group


# --- Correctness -----------------------------------------------------------------------------------------------------------


def expected(problem: Problem, dtype: torch.dtype) -> list[Tensor]:
    """What `problem.parts` of [out, gradients...] should be, by the plain reference: in float64 the truth, in the cell's dtype
    the error that plain torch makes."""
    results = []
    slopes = None if problem.slopes is None else problem.slopes[: problem.cell.group_size].to(dtype)
    for piece in problem.pieces():
        leaves = [problem.part(t.detach(), piece, n == 0).to(dtype) for n, t in enumerate(problem.leaves)]
        mask = None
        if problem.mask is not None and len(leaves) == 3:
            mask = problem.part(problem.mask, piece, True)
            mask = mask if mask.dtype == torch.bool else mask.to(dtype)
        results += _attend(leaves, mask, slopes, problem.part(problem.grad, piece, True).to(dtype), problem.options)
    return results


def _attend(leaves: list[Tensor], mask: Tensor | None, slopes: Tensor | None, grad: Tensor, options: dict) -> list[Tensor]:
    """In chunks of queries; of a causal chunk only the keys up to its end, with which its queries then align."""
    batch, heads, length = leaves[0].shape[:3]
    causal, window = options.get("causal", False), options.get("window")
    size = max(1, CHUNK // (batch * heads * length))
    outs, totals = [], [torch.zeros_like(t, dtype=torch.float64) for t in leaves]
    for begin in range(0, length, size):
        rows = slice(begin, min(begin + size, length))
        keys = slice(max(0, begin - window) if window else 0, rows.stop if causal else length)
        places = [(..., rows, slice(None)), (..., keys, slice(None)), (..., keys, slice(None)), (..., rows, keys)]
        chunk = [t[place].detach().requires_grad_() for t, place in zip(leaves, places, strict=False)]
        seen = chunk[3] if len(chunk) > 3 else mask
        out = reference.attention(
            *chunk[:3],
            mask=seen if seen is None or len(chunk) > 3 or seen.shape[-2] == 1 else seen[..., rows, keys],
            causal=causal,
            window=(window, 0) if window else None,
            alignment="lower_right" if causal else "upper_left",
            softcap=options.get("softcap", 0.0),
            alibi_slopes=slopes,
        )
        outs.append(out.detach())
        for total, place, part in zip(totals, places, torch.autograd.grad(out, chunk, grad[..., rows, :]), strict=False):
            total[place] += part
    return [torch.cat(outs, -2), *totals]


def step(call: Call) -> tuple[list[Tensor], str | None]:
    """[out, gradients...] in the problem's layout; [out] alone, and why, where there is no backward pass."""
    with call.setting():
        out = call.run()
        try:
            grads = torch.autograd.grad(out, call.leaves, call.grad)
        except Exception as error:
            return [call.view(out.detach())], reason(error)
    return [call.view(t.detach()) for t in (out, *grads)], None


def reason(error: Exception) -> str:
    return f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')[:160].rstrip('. ')}"


def check_dropout(name: str, problem: Problem, make) -> None:
    """With values of one a row of the output is the sum of the weights w kept, over 1 - p: its mean is 1, its variance
    p / (1 - p) sum(w^2), which is least where all n keys have the same weight."""
    ones = problem.without()
    ones.value = torch.ones_like(problem.value)
    call = make(ones)
    with call.setting(), torch.no_grad():
        sums = call.view(call.run()).double()
    mean, variance = sums.mean().item(), sums.var().item()
    p, keys = problem.options["dropout"], problem.key.shape[-2]
    least = p / (1 - p) / keys
    if not (abs(mean - 1) < 0.01 and variance > least / 2):
        raise AssertionError(
            f"{name}: what dropout keeps sums to {mean:.4g} in the mean, its variance is {variance:.2g}; expected 1 and at "
            f"least {least:.2g}"
        )


def check(problem: Problem, makers: dict, result: dict) -> dict[str, tuple[Call, dict]]:
    """A step of each: its call, its error, relative to max|truth|, and its memory. Peers that cannot, or that are wrong, are
    entered under `absent`; raises AssertionError where ours is wrong."""
    cell, parts, facts, calls = problem.cell, {}, {}, {}
    for name, make in makers.items():
        taken = []
        try:
            call = make(problem)
            step(call)  # what is compiled, planned or kept from now on is not this step's memory
            extra = testing.peak_extra_bytes(lambda call=call, taken=taken: taken.append(step(call)), device=problem.device)
        except Absent as why:
            result["absent"][name] = str(why)
            continue
        except Exception as error:  # whatever a peer raises; ours may only be missing
            if name.startswith(OURS) and not isinstance(error, NotImplementedError):
                raise AssertionError(f"{cell.kind} ({cell.label}), {name}: {reason(error)}") from error
            result["absent"][name] = reason(error)
            continue
        results, missing = taken.pop()
        calls[name] = call
        facts[name] = {"error": None, "step_extra_bytes": None, "beyond_results_bytes": None}
        if missing:
            if name.startswith(OURS):
                raise AssertionError(f"{cell.kind} ({cell.label}), {name}, backward: {missing}")
            result["absent"][f"{name}, backward"] = missing
        else:
            returned = sum(t.numel() * t.element_size() for t in results)
            facts[name] |= {"step_extra_bytes": extra, "beyond_results_bytes": extra - returned}
        if cell.options.get("dropout"):
            check_dropout(name, problem, make)
            results = step(make(problem.without("dropout")))[0]
        if call.problem.mask is problem.mask:
            parts[name] = problem.parts(results)
    truth, plain = expected(problem, torch.float64), expected(problem, cell.dtype)
    count = 1 + len(problem.leaves)  # parts of a piece
    for name in sorted(parts, key=lambda name: name.startswith(OURS)):  # the peers first: ours is not judged by a wrong one
        got, errors = parts[name], []
        without_backward = len(got) < len(truth)
        wanted, theirs = (list(t[::count]) if without_backward else t for t in (truth, plain))
        fused = [parts[peer] for peer in (FLASH, CUDNN, EFFICIENT, MATH) if len(parts.get(peer, ())) == len(got)]
        for n, (part, right) in enumerate(zip(got, wanted, strict=True)):
            index = 0 if without_backward else n % count
            what = f"gradient {index}" if index else "output"
            errors.append(testing.error(part, right).max / max(right.abs().max().item(), 1e-300))
            if name.startswith(OURS):
                whose = f"{cell.kind} ({cell.label}), {name}: {what}"
                testing.assert_close_to_float64(part, [theirs[n], *(peer[n] for peer in fused)], right, cell.dtype, name=whose)
            elif not (errors[-1] <= PEER_TOLERANCE[cell.dtype] and part.isfinite().all()):
                wrong = f"off by {errors[-1]:.2g} of the largest" if part.isfinite().all() else "not finite"
                result["absent"][name] = f"wrong here, its {what} is {wrong}"
                del parts[name], calls[name]
                break
        facts[name]["error"] = max(errors)
    return {name: (call, facts[name]) for name, call in calls.items()}


# --- Time ------------------------------------------------------------------------------------------------------------------


@functools.cache
def matmul(device: str):
    """Of bfloat16, whatever the cell's dtype: the chip's rate."""
    size = YARDSTICK[device]
    a, b = (torch.randn(size, size, device=device).bfloat16() for _ in range(2))
    out = torch.empty_like(a)
    return lambda: torch.mm(a, b, out=out)


def turns_of(group: str, call: Call, backward: bool, device: str) -> dict[str, object]:
    """What is timed -> its turns."""

    @contextlib.contextmanager
    def inference():
        with call.setting(), torch.no_grad():
            yield

    def whole_step():
        return torch.autograd.grad(call.run(), call.leaves, call.grad)

    if group == "host":
        return {
            "forward": Enqueued(call.run, inference, device, wait=False),
            STEP: Enqueued(whole_step, call.setting, device, wait=True),
        }
    if group == "short":
        with inference():
            return {"forward": Replays(call.run, torch.cuda.graph_pool_handle())}
    turns = {"forward": Events(call.run, inference, device)}
    if backward:
        with call.setting():
            out = call.run()
        again = functools.partial(torch.autograd.grad, out, call.leaves, call.grad, retain_graph=True)
        turns["backward"] = Events(again, call.setting, device)
    return turns


def measure(cell: Cell, device: str, seconds: float, rounds: int, peers: list[str] | None = None) -> dict:
    result = {
        "group": cell.group,
        "kind": cell.kind,
        "case": cell.label,
        "sizes": cell.sizes,
        "options": cell.options,
        "dtype": str(cell.dtype)[6:],
        "contestants": {},
        "absent": {},
    }
    problem = Problem(cell, device)
    checked = check(problem, contestants(cell, peers), result)
    turns = {}
    for name, (call, _) in checked.items():
        try:
            turns[name] = turns_of(cell.group, call, f"{name}, backward" not in result["absent"], device)
        except Exception as error:  # what runs may still refuse to be captured
            if name.startswith(OURS):
                raise AssertionError(f"{cell.kind} ({cell.label}), {name}, in a CUDA graph: {reason(error)}") from error
            result["absent"][name] = reason(error)
    yardstick = Events(matmul(device), torch.no_grad, device, YARDSTICK_ROUNDS)
    in_order = [of_one[what] for what in (*DIRECTIONS, STEP) for of_one in turns.values() if what in of_one]
    take_turns([*in_order, yardstick], seconds, rounds)
    result["matmul"] = {"tflop_per_s": 2e-12 * YARDSTICK[device] ** 3 / yardstick.median}
    for name, of_one in turns.items():
        call, facts = checked[name]
        entry = facts | {"rounds": len(of_one["forward"].times)}
        for what, taken in of_one.items():
            entry[f"{what}_ms"] = 1e3 * taken.median
            if cell.group != "host":
                entry[f"{what}_tflop_per_s"] = 1e-12 * call.problem.flops(what) / taken.median
                entry[f"{what}_share"] = entry[f"{what}_tflop_per_s"] / result["matmul"]["tflop_per_s"]
        result["contestants"][name] = entry
    return result


# --- The run ---------------------------------------------------------------------------------------------------------------


def line(result: dict) -> str:
    parts = []
    for name, entry in result["contestants"].items():
        if result["group"] in ("plain", "features", "packed"):
            rates = (f"{entry[f'{d}_tflop_per_s']:.0f}" for d in DIRECTIONS if f"{d}_ms" in entry)
            parts.append(f"{name} {'/'.join(rates)}")
        else:
            took = (f"{1e3 * entry[key]:.1f}" for key in ("forward_ms", f"{STEP}_ms") if key in entry)
            parts.append(f"{name} {'/'.join(took)} us")
    parts += [f"{name} absent ({why[:40]})" for name, why in result["absent"].items()]
    return f"{result['kind']:20} {result['case']:44} matmul {result['matmul']['tflop_per_s']:.0f}; " + ", ".join(parts)


def chosen(only: list[str] | None, match: str | None, quick: bool) -> list[Cell]:
    cells = QUICK if quick else [cell for group in CELLS.values() for cell in group]
    cells = [cell for cell in cells if not only or cell.group in only]
    return [cell for cell in cells if not match or match in f"{cell.kind}, {cell.label}, {str(cell.dtype)[6:]}"]


def save(record: dict, path: Path) -> dict:
    """The record with its summary and marks; written after every cell, so that a run that is cut short leaves what it has."""
    record = record | {"summary": summarize(record["results"]), "marks": marks(record["results"])}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")
    return record


def run(cells: list[Cell], device: str, facts: Callable[[], dict], path: Path, peers: list[str] | None) -> int:
    """The whole benchmark; `facts` are those of the machine and the run."""
    started, record = time.perf_counter(), facts() | {"wrong": 0, "results": []}
    with tqdm(cells, desc="attention", dynamic_ncols=True, mininterval=0.1 if sys.stderr.isatty() else 30) as bar:
        for cell in bar:
            gc.collect()
            try:
                record["results"].append(measure(cell, device, record["seconds"], record["rounds"], peers))
                bar.write(line(record["results"][-1]))
            except AssertionError as wrong:
                bar.write(f"WRONG, not timed: {wrong}")
                record["wrong"] += 1
            record = save(record | {"took_seconds": round(time.perf_counter() - started)}, path)
    print("\n".join(summary_lines(record)))
    print(f"wrote {path}" + (f"; {record['wrong']} cells were WRONG" if record["wrong"] else ""))
    return 1 if record["wrong"] else 0
