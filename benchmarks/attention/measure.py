"""python -m flash_online bench attention: every cell is checked first, then its providers are timed, interleaved.

Each provider, ours and peers, is checked against float64: the output and all gradients of the query heads of the first key
head, in the first batch entry (in every one for a bias with gradient) or in three packed sequences. Ours must meet the
tolerance of the tests, peers a looser one. Dropout is checked through the mean and variance of the kept weights, and through
the results of the same call without dropout.

Times are medians between CUDA events; backward is timed separately from forward, forward without gradient. Short cells are
replayed from a CUDA graph; for the host time calls are only enqueued; for calls of torch's function the wall time counts. The
baseline, a product of two 8192 x 8192 matrices, is timed in the same rounds. Cells of float8 have providers and a check of
their own, in float8.py, and no backward pass.

With a kernel family (--kernel) the cells are those of `cases.GENERAL`, or of `cases.SPARSE` with --sparse too, and every call
of ours runs that family.
"""

from __future__ import annotations

import contextlib
import functools
from pathlib import Path

import torch
from torch import Tensor

import flash_online
from flash_online import reference, testing

from .. import harness
from ..attention_pages import attention_terminal_summary, general_terminal_summary
from ..peers import PEER_TOLERANCE, Unavailable
from ..summary import DIRECTIONS, FLASH, MATH, OURS
from ..timing import EventTimer, GraphTimer, HostTimer, interleave, matmul
from . import float8
from .cases import CELLS, GENERAL, GENERAL_QUICK, IN_FLOAT8, QUICK, SPARSE, Cell, Problem
from .peers import KERNEL_PEERS, SPARSE_PEERS, Call, fa4_version, providers, reason
from .summary import CUDNN, EFFICIENT, FA4, FLOAT8, summarize, targets

CHUNK = 1 << 25  # scores that the reference computes at a time
# The product is in bfloat16 for every cell dtype, but in float8 for cells of that: it measures the chip's rate.
BASELINE_SIZE, BASELINE_ROUNDS = {"cpu": 512, "cuda": 8192}, 3
STEP = "step"  # forward and backward together, where the host's time counts
REFUSED = "no kernel takes this call"  # in dispatch.cu's error: a tile that the GPU has no room for, not a wrong result


# --- Correctness -----------------------------------------------------------------------------------------------------------


def expected(problem: Problem, dtype: torch.dtype) -> list[Tensor]:
    """The expected `problem.parts` of [out, gradients...] from the plain reference: exact in float64; in the cell's dtype, with
    plain torch's error."""
    results = []
    slopes = None if problem.slopes is None else problem.slopes[: problem.cell.group_size].to(dtype)
    whole = problem.dense_mask(slice(0, problem.cell.group_size))
    for piece in problem.pieces():
        leaves = [problem.part(t.detach(), piece, n == 0).to(dtype) for n, t in enumerate(problem.leaves)]
        mask = None
        if whole is not None and len(leaves) == 3:
            mask = problem.part(whole, piece, True)
            mask = mask if mask.dtype == torch.bool else mask.to(dtype)
        results += _attend(leaves, mask, slopes, problem.part(problem.grad, piece, True).to(dtype), problem.options)
    return results


def _attend(leaves: list[Tensor], mask: Tensor | None, slopes: Tensor | None, grad: Tensor, options: dict) -> list[Tensor]:
    """The reference in chunks of queries. A causal chunk needs only the keys up to its end, and aligns to them."""
    batch, heads, length = leaves[0].shape[:3]
    causal, window, band = options.get("causal", False), options.get("window"), options.get("band")
    all_keys = leaves[1].shape[-2]
    size = max(1, CHUNK // (batch * heads * all_keys))
    outs, totals = [], [torch.zeros_like(t, dtype=torch.float64) for t in leaves]
    for begin in range(0, length, size):
        rows = slice(begin, min(begin + size, length))
        keys = slice(max(0, begin - window) if window else 0, rows.stop if causal else all_keys)
        indices = [(..., rows, slice(None)), (..., keys, slice(None)), (..., keys, slice(None)), (..., rows, keys)]
        chunk = [t[index].detach().requires_grad_() for t, index in zip(leaves, indices, strict=False)]
        seen = chunk[3] if len(chunk) > 3 else mask
        if band:  # as a mask: neither alignment fits a chunk's queries
            places = torch.arange(length, device=grad.device)
            seen = ((places[:, None] - places).abs() <= band)[None, None]
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
        for total, index, part in zip(totals, indices, torch.autograd.grad(out, chunk, grad[..., rows, :]), strict=False):
            total[index] += part
    return [torch.cat(outs, -2), *totals]


def step(call: Call) -> tuple[list[Tensor], str | None]:
    """[out, gradients...] in the problem's layout; without a backward pass [out] and the reason."""
    with call.setting():
        try:
            out = call.run()
            grads = torch.autograd.grad(out, call.leaves, call.grad)
        except Exception as error:  # torch's flash backend refuses forward too where it has no backward pass
            with torch.no_grad():
                return [call.view(call.run().detach())], reason(error)
    return [call.view(t.detach()) for t in (out, *grads)], None


def check_dropout(name: str, problem: Problem, make) -> None:
    """With values of 1, an output element is the sum of a query's kept weights w over 1 - p. Its mean is 1 and its variance
    p / (1 - p) sum(w^2), which is least if all n keys have the same weight."""
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
            f"{name}: the kept weights sum to {mean:.4g} on average with variance {variance:.2g}; expected 1 and at "
            f"least {least:.2g}"
        )


def check(problem: Problem, makers: dict, result: dict) -> dict[str, tuple[Call, dict]]:
    """Checks a step of every provider. Returns its call, its error relative to max|truth|, and its memory. Peers that fail or
    are wrong are entered under `unavailable`; raises AssertionError if ours is wrong."""
    cell, parts, facts, calls = problem.cell, {}, {}, {}
    for name, make in makers.items():
        taken = []
        try:
            call = make(problem)
            step(call)  # exclude a first call's compilation, plans and caches from the memory of the next
            extra = testing.peak_extra_bytes(lambda call=call, taken=taken: taken.append(step(call)), device=problem.device)
        except Unavailable as why:
            result["unavailable"][name] = str(why)
            continue
        except Exception as error:  # peers may raise anything, ours only NotImplementedError
            if name.startswith(OURS) and not isinstance(error, NotImplementedError):
                raise AssertionError(f"{cell.kind} ({cell.label}), {name}: {reason(error)}") from error
            result["unavailable"][name] = reason(error)
            continue
        results, missing = taken.pop()
        calls[name] = call
        facts[name] = {"error": None, "step_extra_bytes": None, "beyond_results_bytes": None}
        if missing:
            if name.startswith(OURS) and REFUSED not in missing:
                raise AssertionError(f"{cell.kind} ({cell.label}), {name}, backward: {missing}")
            result["unavailable"][f"{name}, backward"] = missing
        else:
            returned = sum(t.numel() * t.element_size() for t in results)
            facts[name] |= {"step_extra_bytes": extra, "beyond_results_bytes": extra - returned}
        if cell.options.get("dropout"):
            check_dropout(name, problem, make)
            results = step(make(problem.without("dropout")))[0]
        if call.problem.mask is problem.mask:
            parts[name] = problem.parts(results)
    truth, plain = expected(problem, torch.float64), expected(problem, cell.dtype)
    count = 1 + len(problem.leaves)  # tensors per checked slice
    # Peers come first, so that ours is not compared with a wrong peer.
    for name in sorted(parts, key=lambda name: name.startswith(OURS)):
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
                result["unavailable"][name] = f"wrong here, its {what} is {wrong}"
                del parts[name], calls[name]
                break
        facts[name]["error"] = max(errors)
    return {name: (call, facts[name]) for name, call in calls.items()}


# --- Time ------------------------------------------------------------------------------------------------------------------


def timers_of(group: str, call: Call, backward: bool, device: str) -> dict[str, object]:
    """direction or STEP -> timer."""

    @contextlib.contextmanager
    def inference():
        with call.setting(), torch.no_grad():
            yield

    def whole_step():
        return torch.autograd.grad(call.run(), call.leaves, call.grad)

    if group in ("host", "calls"):
        timers = {"forward": HostTimer(call.run, inference, device, wait=group == "calls")}
        return timers | ({STEP: HostTimer(whole_step, call.setting, device, wait=True)} if backward else {})
    if group == "short":
        with inference():
            return {"forward": GraphTimer(call.run, torch.cuda.graph_pool_handle())}
    timers = {"forward": EventTimer(call.run, inference, device)}
    if backward:
        with call.setting():
            out = call.run()
        again = functools.partial(torch.autograd.grad, out, call.leaves, call.grad, retain_graph=True)
        timers["backward"] = EventTimer(again, call.setting, device)
    return timers


@contextlib.contextmanager
def precision_of(cell: Cell):
    """Torch's setting for float32 products during the check and the timing of the cell."""
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    if cell.options.get("tf32"):
        matmul.fp32_precision = "tf32"
    try:
        yield
    finally:
        matmul.fp32_precision = before


def measure(cell: Cell, device: str, seconds: float, rounds: int, peers: list[str] | None = None) -> dict:
    with precision_of(cell):
        return _measure(cell, device, seconds, rounds, peers)


def _measure(cell: Cell, device: str, seconds: float, rounds: int, peers: list[str] | None) -> dict:
    result = cell.head()
    problem = Problem(cell, device)
    if cell.family == FLOAT8:
        checked, product = float8.check(problem, float8.providers(peers), result), float8.product_dtype(device)
    else:
        checked, product = check(problem, providers(cell, peers), result), torch.bfloat16
    timers = {}
    for name, (call, _) in checked.items():
        try:
            backward = cell.family != FLOAT8 and f"{name}, backward" not in result["unavailable"]
            timers[name] = timers_of(cell.family, call, backward, device)
        except Exception as error:  # a call that runs may still fail in capture
            if name.startswith(OURS):
                raise AssertionError(f"{cell.kind} ({cell.label}), {name}, in a CUDA graph: {reason(error)}") from error
            result["unavailable"][name] = reason(error)
    baseline = EventTimer(matmul(BASELINE_SIZE[device], product, device), torch.no_grad, device, BASELINE_ROUNDS)
    in_order = [of_one[what] for what in (*DIRECTIONS, STEP) for of_one in timers.values() if what in of_one]
    interleave([*in_order, baseline], seconds, rounds)
    result["matmul"] = {"tflop_per_s": 2e-12 * BASELINE_SIZE[device] ** 3 / baseline.median, "dtype": str(product)[6:]}
    for name, of_one in timers.items():
        call, facts = checked[name]
        entry = facts | {"rounds": len(of_one["forward"].times)}
        for what, taken in of_one.items():
            entry[f"{what}_ms"] = 1e3 * taken.median
            if cell.family not in ("host", "calls"):
                entry[f"{what}_tflop_per_s"] = 1e-12 * call.problem.flops(what) / taken.median
                entry[f"{what}_share"] = entry[f"{what}_tflop_per_s"] / result["matmul"]["tflop_per_s"]
        result["providers"][name] = entry
    return result


# --- The run ---------------------------------------------------------------------------------------------------------------


def line(result: dict) -> str:
    parts = []
    for name, entry in result["providers"].items():
        if result["family"] in ("plain", "features", "between", "packed", FLOAT8):
            rates = (f"{entry[f'{d}_tflop_per_s']:.0f}" for d in DIRECTIONS if f"{d}_ms" in entry)
            error = f" ({100 * entry['error']:.2f} %)" if result["family"] == FLOAT8 else ""
            parts.append(f"{name} {'/'.join(rates)}{error}")
        else:
            took = (f"{1e3 * entry[key]:.1f}" for key in ("forward_ms", f"{STEP}_ms") if key in entry)
            parts.append(f"{name} {'/'.join(took)} us")
    parts += [f"{name} unavailable ({why[:40]})" for name, why in result["unavailable"].items()]
    return f"{result['kind']:20} {result['case']:44} matmul {result['matmul']['tflop_per_s']:.0f}; " + ", ".join(parts)


def chosen(
    groups: list[str] | None, match: str | None, quick: bool, kernel: str | None = None, sparse: bool = False
) -> list[Cell]:
    """The cells of these groups that have `match` in their title; of `cases.SPARSE` where `sparse` says so or a group is named,
    else with a kernel family those of `cases.GENERAL`, and of `cases.IN_FLOAT8` where its group is named."""
    if kernel and not sparse:
        return harness.chosen(GENERAL_QUICK if quick else GENERAL, groups, match)
    if quick:
        return harness.chosen(QUICK, groups, match)
    named = CELLS | SPARSE | IN_FLOAT8 if groups else SPARSE if sparse else CELLS
    return harness.chosen([cell for group in named.values() for cell in group], groups, match)


def require_kernel(kernel: str, device: str) -> None:
    """Raises SystemExit if attention's calls run another kernel family, as they do once the library has read the variable."""
    if device != "cuda":
        return
    row = torch.zeros(1, 1, 64, 64, dtype=torch.bfloat16, device=device)
    found = flash_online.explain(flash_online.attention, row, row, row).kernel
    if found.endswith(")") and not found.endswith(f"({kernel})"):  # without the introspection module it names no family
        raise SystemExit(f"kernel: expected {kernel}, got {found}")


def run(cells: list[Cell], device: str, facts: dict, path: Path, peers: list[str] | None) -> int:
    """Measures the cells; `facts` describe the machine and the run, and have `kernel` if a kernel family is forced."""
    is_sparse = all(cell.family in SPARSE for cell in cells)
    if "kernel" in facts:
        require_kernel(facts["kernel"], device)
        peers = peers or (SPARSE_PEERS if is_sparse else KERNEL_PEERS)
    if any(cell.family == FLOAT8 for cell in cells):
        facts = facts | float8.versions()

    def of_cell(cell: Cell) -> dict:
        return measure(cell, device, facts["seconds"], facts["rounds"], peers)

    def finish(record: dict, _: bool) -> dict:
        results = record["results"]
        judged = [] if "kernel" in facts else targets(results)  # the targets are those of Hopper's kernels
        known = {"fa4": fa4_version()} if any(FA4 in result["providers"] for result in results) else {}
        return record | known | {"summary": summarize(results), "targets": judged}

    summary = general_terminal_summary if "kernel" in facts and not is_sparse else attention_terminal_summary
    return harness.run("attention", cells, of_cell, line, facts, path, finish, summary)
