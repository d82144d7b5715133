"""python -m flash_online bench decode: every cell is checked first, then its providers are timed, interleaved.

Each provider, ours and peers, is checked against float64: the query heads of the first and the last key head, in the longest,
the first and the last sequence. Ours must meet the tolerance of the tests, peers a looser one.

A cell has several sets of tensors, together at least three times the L2 cache, and a CUDA graph calls each in turn, so that no
call finds its keys in the cache. Times are medians of replays between two events. The baseline, a pass that only reads a
buffer, is timed in the same rounds.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
from pathlib import Path

import torch
from torch import Tensor

from flash_online import reference, testing

from .. import harness
from ..attention.measure import reason
from ..attention_pages import decode_terminal_summary
from ..peers import PEER_TOLERANCE, Unavailable
from ..summary import OURS
from ..timing import GRAPH_SECONDS, MAX_NODES, EventTimer, Timer, call_timer, interleave
from .cases import CELLS, QUICK, Cell, Problem
from .peers import Call, providers
from .read import read_pass
from .summary import summarize, targets

L2_SHARE, READ_ROUNDS = 3, 5  # distinct bytes in multiples of the L2 cache; rounds of the baseline per cell
FLOAT8_TOLERANCE = 0.3  # of max|truth|, for peers: their queries and weights are float8 too


# --- Correctness -------------------------------------------------------------------------------------------------------------


def expected(problem: Problem, dtype: torch.dtype) -> list[Tensor]:
    """The expected pieces of the output from the plain reference: exact in float64; in the query's dtype, with plain torch's
    error."""
    results, one = [], problem.sets[0]
    window = problem.options.get("window")
    for piece in problem.pieces():
        (n, head), group = piece, problem.cell.group_size
        keys, values = (problem.keys_of(cache, piece) for cache in (one.key_cache, one.value_cache))
        if dtype == torch.float64:
            keys, values = keys.double(), values.double()
        options = {"window": (window - 1, 0) if window else None, "rotary": problem.rotary}
        if problem.sinks is not None:
            options["sinks"] = problem.sinks[head * group : (head + 1) * group].to(dtype)
        if problem.scales:
            scales = (scale[n : n + 1, head : head + 1] for scale in problem.scales)
            options |= dict(zip(("key_scale", "value_scale"), scales, strict=True))
        if one.key is not None:
            new = (rows[n : n + 1, head : head + 1].to(dtype) for rows in (one.key, one.value))
            options |= dict(zip(("key", "value"), new, strict=True))
        query = problem.part(one.query, piece).to(dtype)
        results.append(reference.kvcache_attention(query, keys, values, problem.lengths[n : n + 1], **options))
    return results


@contextlib.contextmanager
def inference(call: Call):
    with call.setting(), torch.no_grad():
        yield


def check(problem: Problem, makers: dict, result: dict) -> dict[str, tuple[Call, float]]:
    """Checks every provider's result for the first set. Returns its call and its error relative to max|truth|. Peers that fail
    or are wrong are entered under `unavailable`; raises AssertionError if ours is wrong."""
    cell, calls, checked = problem.cell, {}, {}
    tolerance = FLOAT8_TOLERANCE if problem.scales else PEER_TOLERANCE[cell.dtype]
    for name, make in makers.items():
        try:
            call = make(problem)
            with inference(call):
                calls[name] = call, call.view(call.runs[0]()).clone()
        except Unavailable as why:
            result["unavailable"][name] = str(why)
        except Exception as error:  # peers may raise anything, ours only NotImplementedError
            if name.startswith(OURS) and not isinstance(error, NotImplementedError):
                raise AssertionError(f"{cell.kind} ({cell.label}), {name}: {reason(error)}") from error
            result["unavailable"][name] = reason(error)
    solutions = {}  # after the calls: appended rows are part of the cache for calls without append
    for name, (call, out) in calls.items():
        appends, errors = "append" in call.problem.options, []
        if appends not in solutions:
            solved = problem if appends else problem.without("append")
            solutions[appends] = [expected(solved, dtype) for dtype in (torch.float64, cell.dtype)]
        truth, plain = solutions[appends]
        for piece, right, theirs in zip(problem.pieces(), truth, plain, strict=True):
            part = problem.part(out, piece)
            errors.append(testing.error(part, right).max / max(right.abs().max().item(), 1e-300))
            if name.startswith(OURS):
                whose = f"{cell.kind} ({cell.label}), {name}, sequence and key head {piece}"
                testing.assert_close_to_float64(part, theirs, right, cell.dtype, name=whose)
            elif not (errors[-1] <= tolerance and part.isfinite().all()):
                wrong = f"off by {errors[-1]:.2g} of the largest" if part.isfinite().all() else "not finite"
                result["unavailable"][name] = f"wrong here, its output is {wrong}"
                break
        else:
            checked[name] = call, max(errors)
    return checked


# --- Time --------------------------------------------------------------------------------------------------------------------


class SetsTimer(Timer):
    """Samples replay a CUDA graph with the calls of all sets in turn, equally often, between two events, after a replay that
    fills the L2 cache with other sets. Construct it within the call's setting."""

    def __init__(self, runs: list, pool):
        super().__init__(None, contextlib.nullcontext, "cuda")

        def all_sets() -> None:
            for run in runs:
                run()

        once = testing.time_call(all_sets, seconds=0, least_runs=2, device="cuda").best
        turns = max(1, min(MAX_NODES // len(runs), round(GRAPH_SECONDS / once)))
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, pool=pool):
            for _ in range(turns):
                all_sets()
        self.nodes, self.repeat = turns * len(runs), 1
        self.repeat = max(1, round(GRAPH_SECONDS / (self._on_cuda() * self.nodes)))

    def _on_cuda(self) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.graph.replay()
        begin.record()
        for _ in range(self.repeat):
            self.graph.replay()
        end.record()
        end.synchronize()
        return 1e-3 * begin.elapsed_time(end) / (self.repeat * self.nodes)


def timer_of(call: Call, device: str) -> Timer:
    if device == "cuda":
        with inference(call):
            return SetsTimer(call.runs, torch.cuda.graph_pool_handle())
    turns = itertools.cycle(call.runs)
    return call_timer(lambda: next(turns)(), lambda: inference(call), device)


def distinct_bytes(device: str) -> int:
    return L2_SHARE * torch.cuda.get_device_properties().L2_cache_size if device == "cuda" else 0


def measure(cell: Cell, device: str, seconds: float, rounds: int, peers: list[str] | None = None) -> dict:
    result = cell.head() | {"wanted_us": cell.wanted_us, "known_us": cell.known_us}
    problem = Problem(cell, device, distinct_bytes(device))
    checked = check(problem, providers(cell, peers), result)
    timers = {}
    for name, (call, _) in checked.items():
        try:
            timers[name] = timer_of(call, device)
        except Exception as error:  # a call that runs may still fail in capture
            if name.startswith(OURS):
                raise AssertionError(f"{cell.kind} ({cell.label}), {name}, in a CUDA graph: {reason(error)}") from error
            result["unavailable"][name] = reason(error)
    read, size, reader = read_pass(device)
    baseline = (EventTimer if device == "cuda" else Timer)(read, torch.no_grad, device, READ_ROUNDS)
    interleave([*timers.values(), baseline], seconds, rounds)
    rate = size / baseline.median
    result |= {"read": {"gb_per_s": 1e-9 * rate, "by": reader}, "sets": len(problem.sets)}
    result |= {"bytes": cell.bytes_read(), "flop": cell.flops()}
    for name, timer in timers.items():
        result["providers"][name] = {
            "us": 1e6 * timer.median,
            "best_us": 1e6 * timer.best,
            "gb_per_s": 1e-9 * cell.bytes_read() / timer.median,
            "share": cell.bytes_read() / timer.median / rate,
            "tflop_per_s": 1e-12 * cell.flops() / timer.median,
            "error": checked[name][1],
            "rounds": len(timer.times),
        }
    return result


# --- The run -----------------------------------------------------------------------------------------------------------------


def line(result: dict) -> str:
    parts = [f"{name} {entry['us']:.1f}" for name, entry in result["providers"].items()]
    if ours := result["providers"].get(OURS):
        parts[0] += f" us ({100 * ours['share']:.0f} %)"
    parts += [f"{name} unavailable ({why[:60]})" for name, why in result["unavailable"].items()]
    wanted = f"; wanted {result['wanted_us']:g}" if result["wanted_us"] else ""
    read = f"read {result['read']['gb_per_s']:.0f} GB/s"
    return f"{result['kind']:20} {result['case']:52} {read}; {', '.join(parts)}{wanted}"


def chosen(families: list[str] | None, match: str | None, quick: bool) -> list[Cell]:
    return harness.chosen(QUICK if quick else [cell for family in CELLS.values() for cell in family], families, match)


def software(device: str) -> dict:
    """Versions that matter here, in addition to the machine's facts."""
    facts = {"cuda": torch.version.cuda}
    if device == "cuda":
        facts |= {"cudnn": torch.backends.cudnn.version(), "l2_bytes": torch.cuda.get_device_properties().L2_cache_size}
    with contextlib.suppress(ImportError):
        facts["flashinfer"] = getattr(importlib.import_module("flashinfer"), "__version__", "unknown")
    return facts


def run(cells: list[Cell], device: str, facts: dict, path: Path, peers: list[str] | None) -> int:
    """Measures the cells; `facts` describe the machine and the run."""

    def of_cell(cell: Cell) -> dict:
        result = measure(cell, device, facts["seconds"], facts["rounds"], peers)
        if device == "cuda":
            torch.cuda.empty_cache()  # the next cell's caches are of another size
        return result

    def finish(record: dict, _: bool) -> dict:
        return record | {"summary": summarize(record["results"]), "targets": targets(record["results"])}

    return harness.run("decode", cells, of_cell, line, facts | software(device), path, finish, decode_terminal_summary)
