"""Row functions, and attention on the CPU, compared with torch: python -m flash_online bench rows; on a GPU, rows of any width:
python -m flash_online bench odd

Each case is first checked. Then samples of all providers are interleaved, in rounds of alternating order, so that a change of
load or clock affects all of them; the median counts. Backward is timed separately from forward. The baseline is timed in the
same rounds: for attention torch's product of two square matrices, for a row function the copy of its input. On CUDA the calls
of a row function, and the copy, are replayed from a CUDA graph, which excludes host time; samples of attention, and of a
provider that syncs, are timed between two events.

The check is against float64: for attention the output and all gradients of one head (every head for a bias that heads share);
from L 8192 up at 512 queries, spread over the length, with an output gradient of 0 at the other queries; for row functions as
many rows as have half a million elements, spread over the input. Ours must meet the tolerance of the tests; torch's providers a
looser one, which catches a peer that got a different problem.
"""

from __future__ import annotations

import functools
import os
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from flash_online import reference, testing

from . import harness
from .cases import CPU, CUDA, QUICK, RowCase
from .cuda_peers import CUDA_PEERS
from .machine import fix_malloc_thresholds
from .peers import PEER_TOLERANCE, PEERS, Unavailable
from .row_pages import terminal_summary
from .summary import CONTEXT, DIRECTIONS, OURS, cuda_targets, noise, over_best, ratio, summarize, targets
from .timing import GraphTimer, Timer, call_timer, graph_timer, interleave, matmul

MATMUL_SIZE = 2048
CHECKED_IN_FULL = 4096  # the longest sequence with every query checked
CHECKED_ELEMENTS = 1 << 19  # of a row function's input, and at least one row
CONTEXT_ROUNDS = 5


# --- Correctness -----------------------------------------------------------------------------------------------------------


class Truth:
    """The checked part of a case's results, and its value in float64 from the package's plain reference."""

    def __init__(self, case: RowCase):
        self.case, sizes = case, case.sizes
        if case.family == "attention":
            self.heads = slice(None) if case.options.get("bias") == "shared" else slice(0, 1)
            length, chunk = sizes["L"], 512
            if length <= CHECKED_IN_FULL:
                self.chunks = [slice(begin, min(begin + chunk, length)) for begin in range(0, length, chunk)]
            else:
                count, chunk = 4, chunk // 4
                self.chunks = [slice(b, b + chunk) for b in ((length - chunk) * n // (count - 1) for n in range(count))]
            self.rows = torch.cat([torch.arange(c.start, c.stop) for c in self.chunks])
        else:
            count = max(1, min(sizes["rows"], CHECKED_ELEMENTS // sizes["classes"]))
            self.rows = torch.linspace(0, sizes["rows"] - 1, count).long()

    def checked_grad(self, grad):
        """The output's gradient for the checked step: 0 at unchecked queries, since the expected gradients have no
        contributions of these."""
        if self.case.family != "attention" or len(self.rows) == grad.shape[-2]:
            return grad
        only = torch.zeros_like(grad)
        only[:, :, self.rows] = grad[:, :, self.rows]
        return only

    def part(self, results):
        """The checked part of [output, gradients...]."""
        if self.case.family == "attention":
            out, grad_query, *others = (t[:, self.heads] for t in results)
            return [out[:, :, self.rows], grad_query[:, :, self.rows], *others]
        out, grad = results
        grad = grad[self.rows]
        if self.case.family == "topk_softmax" and grad.dtype != torch.float32:
            grad = grad.sort(-1).values  # ties of 16-bit logits may go either way
        return [out[self.rows] if out.dim() else out, grad]

    def compute(self, inputs, extras, grad):
        return self._attention(inputs, extras, grad) if self.case.family == "attention" else self._rows(inputs, extras, grad)

    def _attention(self, inputs, extras, grad):
        options, heads, length = self.case.options, self.heads, self.case.sizes["L"]
        window = options.get("window")
        causal = bool(options.get("causal") or window)
        wide = [t.detach()[:, heads].double() for t in inputs]
        mask = None if window or not extras else extras[0]
        if mask is not None and mask.dtype != torch.bool:
            mask = mask[:, heads].double()
        outs, grads = [], [torch.zeros_like(t) for t in wide]
        for rows in self.chunks:
            # A causal chunk needs only the keys up to its end, and aligns to them.
            keys = slice(max(0, rows.start - window + 1) if window else 0, rows.stop if causal else length)
            indices = [(..., rows, slice(None)), (..., keys, slice(None)), (..., keys, slice(None)), (..., rows, keys)]
            leaves = [t[index].detach().requires_grad_() for t, index in zip(wide, indices, strict=False)]
            if len(leaves) > 3:
                chunk_mask = leaves[3]
            else:
                chunk_mask = mask if mask is None or mask.shape[-2] == 1 else mask[..., rows, :]
            out = reference.attention(
                *leaves[:3],
                mask=chunk_mask,
                causal=causal,
                window=(window - 1, 0) if window else None,
                alignment="lower_right" if causal else "upper_left",
            )
            outs.append(out.detach())
            for total, index, part in zip(
                grads, indices, torch.autograd.grad(out, leaves, grad[:, heads, rows].double()), strict=False
            ):
                total[index] += part
        return [torch.cat(outs, -2), grads[0][:, :, self.rows], *grads[1:]]

    def _rows(self, inputs, extras, grad):
        function, x = self.case.family, inputs[0].detach()
        leaf = x[self.rows].double().requires_grad_()
        if function == "cross_entropy":  # a mean over all rows; its gradient is checked at some rows

            def loss(logits, target):
                return reference.cross_entropy(logits, target, reduction="sum") / len(x)

            (grad_x,) = torch.autograd.grad(loss(leaf, extras[0][self.rows]), leaf, grad.double())
            pieces = zip(x.split(len(self.rows)), extras[0].split(len(self.rows)), strict=True)
            return [sum(loss(logits.double(), target) for logits, target in pieces), grad_x]
        if function == "topk_softmax":
            out = reference.topk_softmax(leaf, self.case.options["k"])[0]
        else:
            out = getattr(reference, function)(leaf, -1)
        (grad_x,) = torch.autograd.grad(out, leaf, grad[self.rows].double())
        return [out.detach(), grad_x.sort(-1).values if function == "topk_softmax" and x.dtype != torch.float32 else grad_x]


def check(case: RowCase, providers: dict, inputs, extras, grad, device: str) -> dict[str, dict]:
    """Checks a step of every provider. Returns its error relative to max|truth| and its memory, or raises AssertionError."""
    truth = Truth(case)
    grad = truth.checked_grad(grad)
    parts, facts = {}, {}
    for name, provider in providers.items():
        results = []

        def step(provider=provider, results=results):
            out = provider.call(inputs, extras, case.options)
            results.extend([out.detach(), *torch.autograd.grad(out, inputs, grad)])

        with provider.setting():
            extra = testing.peak_extra_bytes(step, device=device)
        returned = sum(t.numel() * t.element_size() for t in results)
        facts[name] = {"step_extra_bytes": extra, "beyond_results_bytes": extra - returned}
        parts[name] = truth.part(results)
    expected = truth.compute(inputs, extras, grad)
    theirs = [part for name, part in parts.items() if name in PEERS[case.family] and name != OURS]
    for name, part in parts.items():
        errors = [
            testing.error(got, wanted).max / max(wanted.abs().max().item(), 1e-300)
            for got, wanted in zip(part, expected, strict=True)
        ]
        facts[name]["error"] = max(errors)
        for i, (got, wanted) in enumerate(zip(part, expected, strict=True)):
            what = f"{case.family} ({case.label}, {case.dtype}), {name}: {'output' if i == 0 else f'gradient {i}'}"
            if name == OURS:
                testing.assert_close_to_float64(got, [peer[i] for peer in theirs], wanted, case.dtype, name=what)
            elif not errors[i] <= PEER_TOLERANCE[case.dtype]:
                raise AssertionError(f"{what}: off by {errors[i]:.2g} of the largest; is the problem the same?")
    return facts


# --- Time ------------------------------------------------------------------------------------------------------------------


@functools.cache
def matmul_size(dtype: torch.dtype, device: str) -> int:
    """MATMUL_SIZE, or a quarter of it if such a product would take over a second, as torch's 16-bit products do on processors
    without instructions for them."""
    smaller = MATMUL_SIZE // 4
    if device == "cuda":
        return MATMUL_SIZE
    timer = call_timer(matmul(smaller, dtype, device), torch.no_grad, device)
    interleave([timer], 0, 1)
    return smaller if timer.best * (MATMUL_SIZE / smaller) ** 3 > 1 else MATMUL_SIZE


def gflop_per_s(size: int, seconds: float) -> float:
    return 2e-9 * size**3 / seconds


def providers_on(function: str, device: str, wanted: list[str] | None = None) -> dict:
    """Ours and its peers on a device; if `wanted` names peers, only those."""
    peers = PEERS[function] | (CUDA_PEERS.get(function, {}) if device == "cuda" else {})
    return {name: peer for name, peer in peers.items() if not wanted or name == OURS or name in wanted}


def measure(case: RowCase, device: str, seconds: float, rounds: int, peers: list[str] | None = None) -> dict:
    result = case.head() | {"ratio": None, "over_best": None}
    inputs, extras = case.inputs(device)
    providers, outs = {}, {}
    for name, provider in providers_on(case.family, device, peers).items():
        try:
            with provider.setting():
                outs[name] = provider.first_call(inputs, extras, case.options)
        except Unavailable as reason:
            result["unavailable"][name] = str(reason)
            continue
        providers[name] = provider
    if not providers:
        return result
    like = next(iter(outs.values()))
    grad = torch.randn(like.shape, generator=torch.Generator().manual_seed(1)).to(like.dtype).to(device)
    facts = check(case, providers, inputs, extras, grad, device)

    timers, baselines = timers_of(case, device, providers, inputs, extras, outs, grad)
    by_direction = [timers[name, direction] for direction in DIRECTIONS for name in providers]
    interleave([*by_direction, *baselines.values()], seconds, rounds)

    result |= baseline_rates(case, inputs, baselines)
    for name in providers:
        of_provider = {direction: timers[name, direction] for direction in DIRECTIONS}
        result["providers"][name] = provider_entry(case, extras, of_provider, result) | facts[name]
    result["ratio"] = ratio(result["providers"])
    result["over_best"] = over_best(result["providers"])
    return result


def timers_of(case: RowCase, device: str, providers: dict, inputs, extras, outs: dict, grad) -> tuple[dict, dict]:
    """(provider, direction) -> timer, and the baselines' timers by name. `outs` are the providers' outputs for `inputs`."""
    only_called = make_timer = functools.partial(call_timer, device=device)
    if device == "cuda" and case.family != "attention":
        # A backward pass runs on the streams of its forward pass and of the leaves' first use; only work on the captured stream
        # is captured.
        stream = torch.cuda.Stream()
        make_timer = functools.partial(graph_timer, stream=stream)
        inputs, outs = [x.detach().requires_grad_() for x in inputs], {}
        with torch.cuda.stream(stream):
            for name, provider in providers.items():
                with provider.setting():
                    outs[name] = provider.call(inputs, extras, case.options)
        torch.cuda.synchronize()
    if case.family == "attention":
        product = matmul(matmul_size(case.dtype, device), case.dtype, device)
        baselines = {"matmul": call_timer(product, torch.no_grad, device, CONTEXT_ROUNDS)}
    else:
        plain = inputs[0].detach()
        copied = torch.empty_like(plain)
        # copy_() in a CUDA graph is not a kernel, and a third slower at some sizes; torch.neg moves the same bytes.
        copy, copy_to_new = copied.copy_, torch.clone
        if device == "cuda":
            copy, copy_to_new = functools.partial(torch.neg, out=copied), torch.neg
        baselines = {"copy": make_timer(lambda: copy(plain), torch.no_grad)}
        baselines["copy to new"] = make_timer(lambda: copy_to_new(plain), torch.no_grad)

    has_peers = any(name != OURS and name not in CONTEXT for name in providers)
    timers: dict[tuple[str, str], Timer] = {}
    for name, provider in providers.items():
        forward = functools.partial(provider.call, inputs, extras, case.options)
        backward = functools.partial(torch.autograd.grad, outs[name], inputs, grad, retain_graph=True)
        max_samples = CONTEXT_ROUNDS if name in CONTEXT and has_peers else None
        for direction, call in zip(DIRECTIONS, (forward, backward), strict=True):
            make = only_called if provider.waits else make_timer
            timers[name, direction] = make(call, provider.setting, max_samples=max_samples)
    return timers, baselines


def baseline_rates(case: RowCase, inputs, baselines: dict[str, Timer]) -> dict:
    if matmul_timer := baselines.get("matmul"):
        size = matmul_size(case.dtype, inputs[0].device.type)
        rates = {
            "gflop_per_s": gflop_per_s(size, matmul_timer.median),
            "best_gflop_per_s": gflop_per_s(size, matmul_timer.best),
        }
        batch, heads, length = (case.sizes[name] for name in ("B", "H", "L"))
        # Memory of all heads' scores.
        return {"matmul": rates, "scores_bytes": batch * heads * length**2 * case.dtype.itemsize}
    moved = 2 * inputs[0].numel() * inputs[0].element_size()
    return {
        "copy": {
            "gb_per_s": 1e-9 * moved / baselines["copy"].median,
            "best_gb_per_s": 1e-9 * moved / baselines["copy"].best,
            "new_gb_per_s": 1e-9 * moved / baselines["copy to new"].median,  # to a new tensor, as a function's result is
        }
    }


def provider_entry(case: RowCase, extras, timers: dict[str, Timer], result: dict) -> dict:
    """A provider's times and rates by direction, and its shares of the baseline's rate in `result`."""
    entry = {f"{direction}_ms": 1e3 * timer.median for direction, timer in timers.items()}
    entry |= {f"{direction}_best_ms": 1e3 * timer.best for direction, timer in timers.items()}
    entry["rounds"] = len(timers["forward"].times)
    entry["in_graphs"] = all(isinstance(timer, GraphTimer) for timer in timers.values())
    for direction, timer in timers.items():
        if flops := case.flops(direction, extras):
            entry[f"{direction}_gflop_per_s"] = 1e-9 * flops / timer.median
            entry[f"{direction}_share"] = entry[f"{direction}_gflop_per_s"] / result["matmul"]["gflop_per_s"]
        if moved := case.moved_bytes(direction):
            entry[f"{direction}_gb_per_s"] = 1e-9 * moved / timer.median
            entry[f"{direction}_share"] = entry[f"{direction}_gb_per_s"] / result["copy"]["gb_per_s"]
    return entry


# --- The run ---------------------------------------------------------------------------------------------------------------


def line(result: dict) -> str:
    parts = []
    if against := result["ratio"]:
        parts.append(f"{against['forward']:.2f} / {against['backward']:.2f} x {against['against']}")
    unit = "gflop_per_s" if result["family"] == "attention" else "gb_per_s"
    if best := result["over_best"]:
        parts.append(" / ".join(f"{side['times']:.2f} x {side['peer']}" for side in best.values()))
    for name, entry in result["providers"].items():
        rates = " / ".join(f"{entry[f'{direction}_{unit}']:.0f}" for direction in DIRECTIONS)
        times = " / ".join(f"{entry[f'{direction}_ms']:.3g}" for direction in DIRECTIONS)
        unit_name = "GFLOP/s" if unit == "gflop_per_s" else "GB/s"
        parts.append(f"{name} {times} ms ({rates} {unit_name}), {entry['step_extra_bytes'] / 2**20:.1f} MiB")
    if "matmul" in result:
        parts.append(f"matmul {result['matmul']['gflop_per_s']:.0f} GFLOP/s")
    if "copy" in result:
        parts.append(f"copy {result['copy']['gb_per_s']:.0f} GB/s, to new memory {result['copy']['new_gb_per_s']:.0f}")
    parts += [f"{name} unavailable: {reason}" for name, reason in result["unavailable"].items()]
    return f"{result['family']:13} {result['case']:38} {result['dtype']:8} " + "; ".join(parts)


def matmul_rates(record: dict, device: str, at: str, dtypes) -> None:
    for dtype in dtypes:
        size = matmul_size(dtype, device)
        timer = call_timer(matmul(size, dtype, device), torch.no_grad, device)
        interleave([timer], 0, CONTEXT_ROUNDS)
        record["matmul"].setdefault(str(dtype)[6:], {"size": size})[at] = gflop_per_s(size, timer.median)


def chosen(device: str, families: list[str] | None, match: str | None, quick: bool) -> list[RowCase]:
    return harness.chosen(QUICK if quick else CPU if device == "cpu" else CUDA, families, match)


def run(
    cases: list[RowCase],
    device: str,
    facts: dict,
    path: Path,
    peers: list[str] | None,
    keep_memory: bool = False,
    judge: Callable[[list[dict]], list[dict]] | None = None,
) -> int:
    """Measures the cases; `facts` describe the machine and the run. `judge` returns the targets; default: the device's."""
    judge = judge or (targets if device == "cpu" else cuda_targets)
    record = facts | {"matmul": {}}
    if device == "cpu":
        record["memory"] = fix_malloc_thresholds(keep_memory)
        if record["load_at_start"] > 0.5:
            print(f"load {record['load_at_start']}: other processes are running and will disturb short calls", file=sys.stderr)
    dtypes = dict.fromkeys(c.dtype for c in cases if c.family == "attention")
    matmul_rates(record, device, "at_start", dtypes)

    def finish(record: dict, done: bool) -> dict:
        if done:
            matmul_rates(record, device, "at_end", dtypes)
        for dtype, rates in record["matmul"].items():
            during = [r["matmul"] for r in record["results"] if r["dtype"] == dtype and "matmul" in r]
            if during:
                rates["median"] = statistics.median(m["gflop_per_s"] for m in during)
                rates["best"] = max(m["best_gflop_per_s"] for m in during)
        if device == "cpu":
            record["load_at_end"] = round(os.getloadavg()[0], 1)  # this run's own threads included
        results = record["results"]
        return record | {"noise": noise(results), "summary": summarize(results), "targets": judge(results)}

    def of_case(case: RowCase) -> dict:
        return measure(case, device, record["seconds"], record["rounds"], peers)

    return harness.run(f"rows, {device}", cases, of_case, line, record, path, finish, terminal_summary)
