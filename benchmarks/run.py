"""The benchmarks, one entry: python benchmarks/run.py [cpu | cuda | attention | paper] [--json PATH] [--only ...] [--quick]

Each case is checked for correctness first. Then samples of all providers are interleaved, round after round, in alternating
order, so that a change of the machine's load or clock reaches all of them; the median counts. Backward is timed apart from
forward. The baseline is timed in the same rounds: for attention torch's product of two square matrices, for a row function the
copy of its input. On CUDA a row function's calls, and the copy, are replayed from a CUDA graph, so that the host's part of a
call does not count; samples of attention, and of a provider that waits for the device, lie between two events.

The check is against float64: of attention the output and all gradients of one head (every head for a bias that heads share);
from L 8192 up at 512 queries, spread over the length, with an output gradient of 0 at the others; of row functions as many rows
as have half a million elements, spread over the input. Ours must meet the tolerance of the tests; torch's providers a looser
one, which catches a peer that was given another problem.

`attention` measures attention on a GPU beside its peers, cell by cell of attention/cases.py: see attention/measure.py. `paper`
measures the kernels of the online-softmax paper: see paper/measure.py.

Writes benchmarks/results/<cpu, cuda, attention or paper>.json unless told otherwise; report.py makes the tables of those.
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import functools
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
from tqdm import tqdm

ROOT = Path(__file__).resolve().parents[1]
# A checkout that was built measures itself, whatever else is installed; one that was not measures the installed package.
BUILT_HERE = (ROOT / "flash_online" / "libflash_online.so").is_file()
sys.path.insert(0 if BUILT_HERE else len(sys.path), str(ROOT))

from attention import cases as attention_cases  # noqa: E402
from attention import measure as attention  # noqa: E402
from attention import peers as attention_peers  # noqa: E402
from cases import CPU, CUDA, QUICK, Case  # noqa: E402
from cuda_peers import CUDA_PEERS  # noqa: E402
from paper import measure as paper  # noqa: E402
from peers import PEER_TOLERANCE, PEERS, Unavailable  # noqa: E402
from summary import CONTEXT, DIRECTIONS, OURS, SCHEMA, cuda_targets, noise, over_best, ratio, summarize, targets  # noqa: E402
from timing import EventTimer, GraphTimer, Timer, interleave  # noqa: E402
from training import run as run_training  # noqa: E402

from flash_online import _info, reference, testing  # noqa: E402

MATMUL_SIZE = 2048
CHECKED_IN_FULL = 4096  # the longest sequence of which every query is checked
CHECKED_ELEMENTS = 1 << 19  # of a row function's input, and at least one row
CONTEXT_ROUNDS = 5


# --- The machine -----------------------------------------------------------------------------------------------------------


def fix_malloc_thresholds(keep: bool) -> str:
    """Fixes what malloc does with large tensors; returns a description for the record.

    glibc raises the size from which it maps fresh memory with each block that is freed, up to 32 MiB, so that the speed of a
    call depends on what ran before it. Here the threshold is 32 MiB from the start: a larger result is fresh memory from the
    system each time and pays for its page faults. With `keep` all freed memory is used again, as caching allocators do.
    """
    trim_threshold, mmap_threshold, mmap_max = -1, -3, -4  # mallopt's numbers for its options
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return "as the system has it"
    if keep:
        done = mallopt(mmap_max, 0) and mallopt(trim_threshold, 2**31 - 1)
    else:
        done = mallopt(mmap_threshold, 32 << 20) and mallopt(trim_threshold, 64 << 20)
    return ("kept" if keep else "new from 32 MiB up") if done else "as the system has it"


def environment(device: str) -> dict:
    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True).stdout.strip()

    measured = ["csrc", "flash_online", "benchmarks", ":!benchmarks/results", "CMakeLists.txt", "setup.py"]
    changed = "+" if git("status", "--porcelain", "--untracked-files=no", "--", *measured) else ""
    facts = {
        "schema": SCHEMA,
        "device": torch.cuda.get_device_name() if device == "cuda" else _info.processor(),
        "date": datetime.date.today().isoformat(),
        "commit": (git("rev-parse", "--short", "HEAD") or "uncommitted") + changed,
        "package": "of this checkout" if BUILT_HERE else "installed",
        "flash_online": _info.version(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
    }
    if device == "cpu":
        facts["instruction_set"] = _info.build_info()["cpu"]
        facts["mhz"] = frequency()
        facts["load_at_start"] = round(os.getloadavg()[0], 1)  # from other processes, on a shared machine
    return facts


def frequency() -> float | None:
    """MHz of the first core at this moment; on a virtual machine the nominal one, if any."""
    try:
        return int(Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_cur_freq").read_text()) / 1000
    except (OSError, ValueError):
        pass
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return None
    return next((float(line.split(":")[1]) for line in lines if line.startswith("cpu MHz")), None)


# --- Correctness -----------------------------------------------------------------------------------------------------------


class Truth:
    """Which part of a case's results is checked, and that part in float64, computed by the package's plain reference."""

    def __init__(self, case: Case):
        self.case, sizes = case, case.sizes
        if case.function == "attention":
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
        """The output's gradient for the step that is checked. It is 0 at queries that are not checked, whose contributions the
        expected gradients lack."""
        if self.case.function != "attention" or len(self.rows) == grad.shape[-2]:
            return grad
        only = torch.zeros_like(grad)
        only[:, :, self.rows] = grad[:, :, self.rows]
        return only

    def part(self, results):
        """The part of [output, gradients...] that is checked."""
        if self.case.function == "attention":
            out, grad_query, *others = (t[:, self.heads] for t in results)
            return [out[:, :, self.rows], grad_query[:, :, self.rows], *others]
        out, grad = results
        grad = grad[self.rows]
        if self.case.function == "topk_softmax" and grad.dtype != torch.float32:
            grad = grad.sort(-1).values  # among equal 16-bit logits either may be the one chosen
        return [out[self.rows] if out.dim() else out, grad]

    def compute(self, inputs, extras, grad):
        return self._attention(inputs, extras, grad) if self.case.function == "attention" else self._rows(inputs, extras, grad)

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
            # A causal chunk needs only the keys up to its end, to which its queries are then aligned.
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
        function, x = self.case.function, inputs[0].detach()
        leaf = x[self.rows].double().requires_grad_()
        if function == "cross_entropy":  # a mean over all rows, whose gradient is checked at some

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


def check(case: Case, providers: dict, inputs, extras, grad, device: str) -> dict[str, dict]:
    """Checks a step of every provider. Returns its error, relative to max|truth|, and its memory, or raises AssertionError."""
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
    theirs = [part for name, part in parts.items() if name in PEERS[case.function] and name != OURS]
    for name, part in parts.items():
        errors = [
            testing.error(got, wanted).max / max(wanted.abs().max().item(), 1e-300)
            for got, wanted in zip(part, expected, strict=True)
        ]
        facts[name]["error"] = max(errors)
        for i, (got, wanted) in enumerate(zip(part, expected, strict=True)):
            what = f"{case.function} ({case.label}, {case.dtype}), {name}: {'output' if i == 0 else f'gradient {i}'}"
            if name == OURS:
                testing.assert_close_to_float64(got, [peer[i] for peer in theirs], wanted, case.dtype, name=what)
            elif not errors[i] <= PEER_TOLERANCE[case.dtype]:
                raise AssertionError(f"{what}: off by {errors[i]:.2g} of the largest; was it given the same problem?")
    return facts


# --- Time ------------------------------------------------------------------------------------------------------------------


@functools.cache
def matmul(dtype: torch.dtype, device: str):
    """A product of two square matrices: what attention's products are measured against."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(MATMUL_SIZE, MATMUL_SIZE, generator=generator).to(dtype).to(device) for _ in range(2))
    out = torch.empty_like(a)
    return lambda: torch.mm(a, b, out=out)


def call_timer(call, setting, device: str, max_samples: int | None = None) -> Timer:
    return (EventTimer if device == "cuda" else Timer)(call, setting, device, max_samples)


def graph_timer(call, setting, stream, max_samples: int | None = None) -> Timer:
    """Times a call as replays of a CUDA graph on that stream."""
    with setting(), torch.cuda.stream(stream):
        return GraphTimer(call, torch.cuda.graph_pool_handle(), stream, max_samples)


def gflop_per_s(seconds: float) -> float:
    return 2e-9 * MATMUL_SIZE**3 / seconds


def providers_on(function: str, device: str, wanted: list[str] | None = None) -> dict:
    """Ours and its peers on a device; if `wanted` names peers, only those."""
    peers = PEERS[function] | (CUDA_PEERS.get(function, {}) if device == "cuda" else {})
    return {name: peer for name, peer in peers.items() if not wanted or name == OURS or name in wanted}


def measure(case: Case, device: str, seconds: float, rounds: int, peers: list[str] | None = None) -> dict:
    result = {
        "function": case.function,
        "case": case.label,
        "kind": case.kind,
        "sizes": case.sizes,
        "options": case.options,
        "dtype": str(case.dtype)[6:],
        "providers": {},
        "unavailable": {},
        "ratio": None,
        "over_best": None,
    }
    inputs, extras = case.inputs(device)
    providers, outs = {}, {}
    for name, provider in providers_on(case.function, device, peers).items():
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


def timers_of(case: Case, device: str, providers: dict, inputs, extras, outs: dict, grad) -> tuple[dict, dict]:
    """(provider, direction) -> timer, and the baselines' timers by name. `outs` are the providers' outputs for `inputs`."""
    only_called = make_timer = functools.partial(call_timer, device=device)
    if device == "cuda" and case.function != "attention":
        # A backward pass runs on the streams of its forward pass and of the leaves' first use; only what runs on the captured
        # stream is captured.
        stream = torch.cuda.Stream()
        make_timer = functools.partial(graph_timer, stream=stream)
        inputs, outs = [x.detach().requires_grad_() for x in inputs], {}
        with torch.cuda.stream(stream):
            for name, provider in providers.items():
                with provider.setting():
                    outs[name] = provider.call(inputs, extras, case.options)
        torch.cuda.synchronize()
    if case.function == "attention":
        baselines = {"matmul": call_timer(matmul(case.dtype, device), torch.no_grad, device, CONTEXT_ROUNDS)}
    else:
        plain = inputs[0].detach()
        copied = torch.empty_like(plain)
        # copy_() is no kernel in a CUDA graph, and a third slower at some sizes; torch.neg moves the same bytes.
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


def baseline_rates(case: Case, inputs, baselines: dict[str, Timer]) -> dict:
    if matmul_timer := baselines.get("matmul"):
        rates = {"gflop_per_s": gflop_per_s(matmul_timer.median), "best_gflop_per_s": gflop_per_s(matmul_timer.best)}
        batch, heads, length = (case.sizes[name] for name in ("B", "H", "L"))
        # What the scores of all heads would take.
        return {"matmul": rates, "scores_bytes": batch * heads * length**2 * case.dtype.itemsize}
    moved = 2 * inputs[0].numel() * inputs[0].element_size()
    return {
        "copy": {
            "gb_per_s": 1e-9 * moved / baselines["copy"].median,
            "best_gb_per_s": 1e-9 * moved / baselines["copy"].best,
            "new_gb_per_s": 1e-9 * moved / baselines["copy to new"].median,  # to a new tensor, as a function's result is
        }
    }


def provider_entry(case: Case, extras, timers: dict[str, Timer], result: dict) -> dict:
    """A provider's times and rates by direction, and their shares of the baseline's rate in `result`."""
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
    unit = "gflop_per_s" if result["function"] == "attention" else "gb_per_s"
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
    return f"{result['function']:13} {result['case']:38} {result['dtype']:8} " + "; ".join(parts)


def summary_lines(record: dict) -> list[str]:
    lines = ["", "ours beside torch, times faster: geometric mean forward / backward (worst case), share of the baseline"]
    for entry in record["summary"]:
        sides = [entry[direction] for direction in DIRECTIONS]
        means = " / ".join(f"{s['mean']:.2f}" for s in sides)
        worst = " / ".join(f"{s['worst']:.2f}" for s in sides)
        shares = " / ".join(f"{100 * s['share']:.0f}" for s in sides if "share" in s)
        lines.append(
            f"{entry['function']:13} {entry['kind']:16} {entry['dtype']:8} {entry['cases']:2} cases  {means:>13} ({worst})"
            + (f", {shares} % of {entry['share_of']}" if shares else "")
            + f", against {entry['against']}"
        )
    for entry in record["summary"]:
        if best := entry["over_best"]:
            sides = (f"{what} {s['mean']:.2f} ({s['worst']:.2f}, {s['worst_case']}, {s['peer']})" for what, s in best.items())
            lines.append(f"{entry['function']:13} {entry['kind']:16} {entry['dtype']:8} over the best: {', '.join(sides)}")
    if record["noise"]:
        lines += [
            "",
            f"noise {record['noise']:.2f}: the baseline's median time over its least; little above 1 on a quiet machine",
        ]
    lines += ["", "targets"]
    for target in record["targets"]:
        if "most" in target:
            what = f"{target['measured']}, less than {target['most']} wanted"
        else:
            wanted = [f"mean {target['least']}"] * (target["least"] is not None)
            wanted += [f"each {target['least_each']}"] * (target["least_each"] is not None)
            what = (
                f"mean {target['mean']:.2f}, worst {target['worst']:.2f} ({target['worst_case']}); wanted {', '.join(wanted)}"
            )
        lines.append(f"{'met   ' if target['met'] else 'MISSED'} {target['target']}: {what}")
    return lines


def matmul_rates(record: dict, device: str, at: str, dtypes) -> None:
    for dtype in dtypes:
        timer = call_timer(matmul(dtype, device), torch.no_grad, device)
        interleave([timer], 0, CONTEXT_ROUNDS)
        record["matmul"].setdefault(str(dtype)[6:], {"size": MATMUL_SIZE})[at] = gflop_per_s(timer.median)


def parse_arguments() -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument(
        "device", choices=("cpu", "cuda", "attention", "training", "paper"), nargs="?", default=default_device()
    )
    parser.add_argument("--json", type=Path, help="where the results go; none: benchmarks/results/<device>.json")
    functions = [*sorted(PEERS), *attention_cases.CELLS]
    parser.add_argument("--only", nargs="+", choices=functions, help="functions, or groups; needs --json")
    parser.add_argument("--match", help="only cases whose label and dtype have this in them; needs --json")
    named = sorted({name for peers in (PEERS, CUDA_PEERS) for of_one in peers.values() for name in of_one} - {OURS})
    named = list(dict.fromkeys([*named, *attention_peers.PEERS]))
    parser.add_argument("--peers", nargs="+", choices=named, help="these peers alone; none: all that run here; needs --json")
    parser.add_argument("--quick", action="store_true", help="a few small cases instead; needs --json")
    parser.add_argument("--list", action="store_true", help="print the cases and their reasons, measure nothing")
    parser.add_argument("--seconds", type=float, help="least time to sample a case; none: 1.5, of attention 0.3")
    parser.add_argument("--rounds", type=int, default=5, help="least rounds of a case")
    parser.add_argument("--note", help="a remark for the record, shown above its tables")
    parser.add_argument("--keep-memory", action="store_true", help="CPU: malloc keeps freed memory instead of returning it")
    parser.add_argument(
        "--fa3", help=f"attention, training: FlashAttention-3's binary; none: what {attention_peers.FA3_VARIABLE} names"
    )
    options = parser.parse_args()
    if (options.only or options.quick or options.match or options.peers) and not (options.json or options.list):
        parser.error("--only, --match, --peers and --quick need --json, since the committed results hold everything")
    if options.device in ("paper", "training") and (options.only or options.match or options.peers or options.list):
        parser.error(f"{options.device} has no --only, --match, --peers or --list: it is one table")
    return parser, options


def default_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def run_attention(parser: argparse.ArgumentParser, options: argparse.Namespace, facts: dict, path: Path) -> int:
    groups = list(attention_cases.CELLS)
    if set(options.only or ()) - set(groups):
        parser.error(f"attention has the groups {', '.join(groups)} for --only, got {' '.join(options.only)}")
    cells = attention.chosen(options.only, options.match, options.quick)
    if options.list:
        print("\n".join(f"{c.group:9} {c.kind:24} {c.label}, {str(c.dtype)[6:]}" for c in cells))
        return 0
    if not cells:
        parser.error("no cell of attention is chosen")
    device = default_device() if options.quick else "cuda"
    if not torch.cuda.is_available() and device == "cuda":
        parser.error("attention needs a CUDA GPU; with --quick it runs without one")
    return attention.run(cells, device, lambda: environment(device) | facts, path, options.peers)


def run_cases(cases: list[Case], options: argparse.Namespace, facts: dict, path: Path) -> int:
    """The benchmark of the list CPU or CUDA, or of a part of it."""
    device, started, failures = options.device, time.perf_counter(), 0
    record = environment(device) | facts | {"matmul": {}, "results": []}
    if device == "cpu":
        record["memory"] = fix_malloc_thresholds(options.keep_memory)
        if record["load_at_start"] > 0.5:
            print(f"load {record['load_at_start']}: other processes are running and will disturb short calls", file=sys.stderr)
    dtypes = dict.fromkeys(c.dtype for c in cases if c.function == "attention")
    matmul_rates(record, device, "at_start", dtypes)
    # A log file wants a line now and then, a terminal a moving bar.
    interval = 0.1 if sys.stderr.isatty() else 30
    with tqdm(cases, desc=f"benchmarks, {device}", dynamic_ncols=True, mininterval=interval) as bar:
        for case in bar:
            bar.set_postfix_str(f"{case.function}, {case.label}", refresh=sys.stderr.isatty())
            try:
                result = measure(case, device, facts["seconds"], options.rounds, options.peers)
            except AssertionError as wrong:
                bar.write(f"WRONG, not timed: {wrong}")
                failures += 1
                continue
            record["results"].append(result)
            bar.write(line(result))
    matmul_rates(record, device, "at_end", dtypes)
    for dtype, rates in record["matmul"].items():
        during = [r["matmul"] for r in record["results"] if r["dtype"] == dtype and "matmul" in r]
        if during:
            rates["median"] = statistics.median(m["gflop_per_s"] for m in during)
            rates["best"] = max(m["best_gflop_per_s"] for m in during)
    if device == "cpu":
        record["load_at_end"] = round(os.getloadavg()[0], 1)  # this run's own threads included
    record["took_seconds"] = round(time.perf_counter() - started)
    record["wrong"] = failures
    record["noise"] = noise(record["results"])
    record["summary"] = summarize(record["results"])
    record["targets"] = (targets if device == "cpu" else cuda_targets)(record["results"])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")
    print("\n".join(summary_lines(record)))
    print(f"wrote {path}" + (f"; {failures} cases were WRONG" if failures else ""))
    return 1 if failures else 0


def main() -> int:
    parser, options = parse_arguments()
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # otherwise the memory meter's profiler writes two lines per call
    device = options.device
    seconds = options.seconds if options.seconds is not None else 0.3 if device == "attention" else 1.5
    facts = {"seconds": seconds, "rounds": options.rounds}
    if options.note:
        facts["note"] = options.note
    path = options.json or ROOT / "benchmarks" / "results" / f"{device}.json"
    if device == "paper":
        return paper.run(options.quick, lambda: environment("cuda") | facts, path)
    if options.fa3:
        os.environ[attention_peers.FA3_VARIABLE] = options.fa3
    if device == "training":
        on = default_device() if options.quick else "cuda"
        return run_training(on, lambda: environment(on) | facts, path)
    if device == "attention":
        return run_attention(parser, options, facts, path)
    if set(options.only or ()) & set(attention_cases.CELLS):
        parser.error(f"--only {' '.join(options.only)}: groups are of attention, here functions are named")
    cases = QUICK if options.quick else CPU if device == "cpu" else CUDA
    cases = [c for c in cases if not options.only or c.function in options.only]
    cases = [c for c in cases if not options.match or options.match in f"{c.label}, {str(c.dtype)[6:]}"]
    if options.list:
        print("\n".join(f"{c.function:13} {c.label:38} {str(c.dtype)[6:]:8} {c.reason}" for c in cases))
        return 0
    return run_cases(cases, options, facts, path)


if __name__ == "__main__":
    sys.exit(main())
