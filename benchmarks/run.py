"""The benchmarks, one entry: python benchmarks/run.py [cpu | cuda | attention | paper] [--json PATH] [--only ...] [--quick]

Each case: correctness first, then the contestants in turn, round after round, in alternating order, so that a change of the
machine's load or clock meets all of them; the median counts. Backward is timed apart from forward. A yardstick takes its turns
with them: beside attention torch's product of two square matrices, beside a row function the copy of its input. On CUDA a row
function's calls, and the copy, are replayed from a CUDA graph, so that the host's part of a call does not count; a turn of a
contestant that waits for the device lies between two events, as does one of attention.

Checked against float64: of attention the output and all gradients of one head (every head for a bias that heads share); from
L 8192 up at 512 queries, spread over the length, the output's gradient being 0 at the others; of row functions as many rows,
spread likewise, as have half a million elements. Ours must meet the tolerance of the tests; torch's contestants a looser one,
which catches a peer that was given another problem.

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
from peers import PEER_TOLERANCE, PEERS, Absent  # noqa: E402
from summary import CONTEXT, DIRECTIONS, OURS, SCHEMA, cuda_marks, marks, over_best, ratio, summarize, unrest  # noqa: E402
from training import run as run_training  # noqa: E402
from turns import Events, Replays, Turns, take_turns  # noqa: E402

from flash_online import _info, reference, testing  # noqa: E402

MATMUL_SIZE = 2048
CHECKED_IN_FULL = 4096  # longest sequence whose every query is checked
CHECKED_ELEMENTS = 1 << 19  # of a row function's input, and at least one row
CONTEXT_ROUNDS = 5


# --- The machine -----------------------------------------------------------------------------------------------------------


def settle_memory(keep: bool) -> str:
    """Fixes what malloc does with large tensors; says what, for the record.

    By itself glibc raises its threshold for going to the system, block by block that is freed, up to 32 MiB, so that the same
    call is fast or slow by what ran before it. Here the threshold is at its end from the start: a result of 32 MiB or more
    is new memory from the system each time, and pays for its page faults. With `keep`, all freed memory is used
    again, as caching allocators do it.
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
        facts["load_at_start"] = round(os.getloadavg()[0], 1)  # of others, on a machine that is shared
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
    """Which part of a case's results is checked, and that part in float64, by the package's plain reference."""

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
        """The output's gradient for the step that is checked: what is not checked must not reach what is."""
        if self.case.function != "attention" or len(self.rows) == grad.shape[-2]:
            return grad
        only = torch.zeros_like(grad)
        only[:, :, self.rows] = grad[:, :, self.rows]
        return only

    def part(self, results):
        """What of [output, gradients...] is checked."""
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
            # Of a causal chunk only the keys up to its end, with which its queries then align.
            keys = slice(max(0, rows.start - window + 1) if window else 0, rows.stop if causal else length)
            places = [(..., rows, slice(None)), (..., keys, slice(None)), (..., keys, slice(None)), (..., rows, keys)]
            leaves = [t[place].detach().requires_grad_() for t, place in zip(wide, places, strict=False)]
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
            for total, place, part in zip(
                grads, places, torch.autograd.grad(out, leaves, grad[:, heads, rows].double()), strict=False
            ):
                total[place] += part
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


def check(case: Case, contestants: dict, inputs, extras, grad, device: str) -> dict[str, dict]:
    """A step of each: its error, relative to max|truth|, and its memory. Raises AssertionError where one is wrong."""
    truth = Truth(case)
    grad = truth.checked_grad(grad)
    parts, facts = {}, {}
    for name, contestant in contestants.items():
        results = []

        def step(contestant=contestant, results=results):
            out = contestant.call(inputs, extras, case.options)
            results.extend([out.detach(), *torch.autograd.grad(out, inputs, grad)])

        with contestant.setting():
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


def turns_of(call, setting, device: str, most: int | None = None) -> Turns:
    return (Events if device == "cuda" else Turns)(call, setting, device, most)


def replays_of(call, setting, stream, most: int | None = None) -> Turns:
    """Turns of a call on that stream as replays of a CUDA graph."""
    with setting(), torch.cuda.stream(stream):
        return Replays(call, torch.cuda.graph_pool_handle(), stream, most)


def gflop_per_s(seconds: float) -> float:
    return 2e-9 * MATMUL_SIZE**3 / seconds


def everyone(function: str, device: str, wanted: list[str] | None = None) -> dict:
    """Ours and its peers on a device; of the peers those that are wanted, if any are named."""
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
        "contestants": {},
        "absent": {},
        "ratio": None,
        "over_best": None,
    }
    inputs, extras = case.inputs(device)
    contestants, outs = {}, {}
    for name, contestant in everyone(case.function, device, peers).items():
        try:
            with contestant.setting():
                outs[name] = contestant.first_call(inputs, extras, case.options)
        except Absent as reason:
            result["absent"][name] = str(reason)
            continue
        contestants[name] = contestant
    if not contestants:
        return result
    like = next(iter(outs.values()))
    grad = torch.randn(like.shape, generator=torch.Generator().manual_seed(1)).to(like.dtype).to(device)
    facts = check(case, contestants, inputs, extras, grad, device)

    judged = [name for name in contestants if name != OURS and name not in CONTEXT]
    most = {name: CONTEXT_ROUNDS if name in CONTEXT and judged else None for name in contestants}
    turned = in_turns = functools.partial(turns_of, device=device)
    if device == "cuda" and case.function != "attention":
        # A backward pass runs on the streams of its forward pass and of the leaves' first use; only what runs on the captured
        # stream is captured.
        stream = torch.cuda.Stream()
        turned = functools.partial(replays_of, stream=stream)
        inputs = [x.detach().requires_grad_() for x in inputs]
        with torch.cuda.stream(stream):
            for name, contestant in contestants.items():
                with contestant.setting():
                    outs[name] = contestant.call(inputs, extras, case.options)
        torch.cuda.synchronize()
    if case.function == "attention":
        yardsticks = {"matmul": turns_of(matmul(case.dtype, device), torch.no_grad, device, CONTEXT_ROUNDS)}
    else:
        plain = inputs[0].detach()
        there = torch.empty_like(plain)
        # On CUDA not copy_(): in a graph that is no kernel, and at some sizes a third slower.
        copy, copy_to_new = there.copy_, torch.clone
        if device == "cuda":
            copy, copy_to_new = functools.partial(torch.neg, out=there), torch.neg
        yardsticks = {"copy": turned(lambda: copy(plain), torch.no_grad)}
        yardsticks["copy to new"] = turned(lambda: copy_to_new(plain), torch.no_grad)
    turns: dict[tuple[str, str], Turns] = {}
    for name, contestant in contestants.items():
        forward = functools.partial(contestant.call, inputs, extras, case.options)
        backward = functools.partial(torch.autograd.grad, outs[name], inputs, grad, retain_graph=True)
        for direction, call in zip(DIRECTIONS, (forward, backward), strict=True):
            turns_of_it = in_turns if contestant.waits else turned
            turns[name, direction] = turns_of_it(call, contestant.setting, most=most[name])
    by_direction = [turns[name, direction] for direction in DIRECTIONS for name in contestants]
    take_turns([*by_direction, *yardsticks.values()], seconds, rounds)

    copied = 2 * inputs[0].numel() * inputs[0].element_size()
    if "matmul" in yardsticks:
        yardstick = yardsticks["matmul"]
        result["matmul"] = {
            "gflop_per_s": gflop_per_s(yardstick.median),
            "best_gflop_per_s": gflop_per_s(yardstick.best),
        }
        batch, heads, length = (case.sizes[name] for name in ("B", "H", "L"))
        result["scores_bytes"] = batch * heads * length**2 * case.dtype.itemsize  # what a square a head would take
    else:
        result["copy"] = {
            "gb_per_s": 1e-9 * copied / yardsticks["copy"].median,
            "best_gb_per_s": 1e-9 * copied / yardsticks["copy"].best,
            "new_gb_per_s": 1e-9 * copied / yardsticks["copy to new"].median,  # into a tensor of its own: what a result costs
        }
    for name in contestants:
        taken = {direction: turns[name, direction] for direction in DIRECTIONS}
        entry = {f"{direction}_ms": 1e3 * t.median for direction, t in taken.items()}
        entry |= {f"{direction}_best_ms": 1e3 * t.best for direction, t in taken.items()}
        entry["rounds"] = len(taken["forward"].times)
        entry["in_graphs"] = all(isinstance(t, Replays) for t in taken.values())
        for direction, t in taken.items():
            if flops := case.flops(direction, extras):
                entry[f"{direction}_gflop_per_s"] = 1e-9 * flops / t.median
                entry[f"{direction}_share"] = entry[f"{direction}_gflop_per_s"] / result["matmul"]["gflop_per_s"]
            if moved := case.moved_bytes(direction):
                entry[f"{direction}_gb_per_s"] = 1e-9 * moved / t.median
                entry[f"{direction}_share"] = entry[f"{direction}_gb_per_s"] / result["copy"]["gb_per_s"]
        result["contestants"][name] = entry | facts[name]
    result["ratio"] = ratio(result["contestants"])
    result["over_best"] = over_best(result["contestants"])
    return result


# --- The run ---------------------------------------------------------------------------------------------------------------


def line(result: dict) -> str:
    parts = []
    if against := result["ratio"]:
        parts.append(f"{against['forward']:.2f} / {against['backward']:.2f} x {against['against']}")
    unit = "gflop_per_s" if result["function"] == "attention" else "gb_per_s"
    if best := result["over_best"]:
        parts.append(" / ".join(f"{side['times']:.2f} x {side['peer']}" for side in best.values()))
    for name, entry in result["contestants"].items():
        rates = " / ".join(f"{entry[f'{direction}_{unit}']:.0f}" for direction in DIRECTIONS)
        times = " / ".join(f"{entry[f'{direction}_ms']:.3g}" for direction in DIRECTIONS)
        unit_name = "GFLOP/s" if unit == "gflop_per_s" else "GB/s"
        parts.append(f"{name} {times} ms ({rates} {unit_name}), {entry['step_extra_bytes'] / 2**20:.1f} MiB")
    if "matmul" in result:
        parts.append(f"matmul {result['matmul']['gflop_per_s']:.0f} GFLOP/s")
    if "copy" in result:
        parts.append(f"copy {result['copy']['gb_per_s']:.0f} GB/s, to new memory {result['copy']['new_gb_per_s']:.0f}")
    parts += [f"{name} absent: {reason}" for name, reason in result["absent"].items()]
    return f"{result['function']:13} {result['case']:38} {result['dtype']:8} " + "; ".join(parts)


def summary_lines(record: dict) -> list[str]:
    lines = ["", "ours beside torch, times faster: geometric mean forward / backward (worst case), share of the yardstick"]
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
    if record["unrest"]:
        lines += [
            "",
            f"unrest {record['unrest']:.2f}: a yardstick's median time over its least; little above 1 on a quiet machine",
        ]
    lines += ["", "marks"]
    for mark in record["marks"]:
        if "most" in mark:
            what = f"{mark['measured']}, less than {mark['most']} wanted"
        else:
            wanted = [f"mean {mark['least']}"] * (mark["least"] is not None)
            wanted += [f"each {mark['least_each']}"] * (mark["least_each"] is not None)
            what = f"mean {mark['mean']:.2f}, worst {mark['worst']:.2f} ({mark['worst_case']}); wanted {', '.join(wanted)}"
        lines.append(f"{'met   ' if mark['met'] else 'MISSED'} {mark['mark']}: {what}")
    return lines


def matmul_rates(record: dict, device: str, at: str, dtypes) -> None:
    for dtype in dtypes:
        turns = turns_of(matmul(dtype, device), torch.no_grad, device)
        take_turns([turns], 0, CONTEXT_ROUNDS)
        record["matmul"].setdefault(str(dtype)[6:], {"size": MATMUL_SIZE})[at] = gflop_per_s(turns.median)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("device", choices=("cpu", "cuda", "attention", "training", "paper"), nargs="?", default=default)
    parser.add_argument("--json", type=Path, help="where the results go; none: benchmarks/results/<device>.json")
    groups = list(attention_cases.CELLS)
    parser.add_argument("--only", nargs="+", choices=[*sorted(PEERS), *groups], help="functions, or groups; needs --json")
    parser.add_argument("--match", help="only cases whose label and dtype have this in them; needs --json")
    named = sorted({name for peers in (PEERS, CUDA_PEERS) for of_one in peers.values() for name in of_one} - {OURS})
    named = list(dict.fromkeys([*named, *attention_peers.PEERS]))
    parser.add_argument("--peers", nargs="+", choices=named, help="these peers alone; none: all that run here; needs --json")
    parser.add_argument("--quick", action="store_true", help="a few small cases instead; needs --json")
    parser.add_argument("--list", action="store_true", help="print the cases and their reasons, measure nothing")
    parser.add_argument("--seconds", type=float, help="least time of a case's turns; none: 1.5, of attention 0.3")
    parser.add_argument("--rounds", type=int, default=5, help="least rounds of a case")
    parser.add_argument("--note", help="a remark for the record, shown above its tables")
    parser.add_argument("--keep-memory", action="store_true", help="CPU: malloc keeps freed memory instead of returning it")
    parser.add_argument(
        "--fa3", help=f"attention, training: FlashAttention-3's binary; none: what {attention_peers.FA3_VARIABLE} names"
    )
    options = parser.parse_args()
    if (options.only or options.quick or options.match or options.peers) and not (options.json or options.list):
        parser.error("--only, --match, --peers and --quick need --json, since the committed results hold everything")
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the memory meter's profiler writes two lines a call otherwise
    device = options.device
    seconds = options.seconds if options.seconds is not None else 0.3 if device == "attention" else 1.5
    facts = {"seconds": seconds, "rounds": options.rounds}
    if options.note:
        facts["note"] = options.note
    path = options.json or ROOT / "benchmarks" / "results" / f"{device}.json"
    if device == "paper":
        if options.only or options.match or options.peers or options.list:
            parser.error("paper has no --only, --match, --peers or --list: it is one table")
        return paper.run(options.quick, lambda: environment("cuda") | facts, path)
    if options.fa3:
        os.environ[attention_peers.FA3_VARIABLE] = options.fa3
    if device == "training":
        if options.only or options.match or options.peers or options.list:
            parser.error("training has no --only, --match, --peers or --list: it is one table")
        where = default if options.quick else "cuda"
        return run_training(where, lambda: environment(where) | facts, path)
    if device == "attention":
        if set(options.only or ()) - set(groups):
            parser.error(f"attention has the groups {', '.join(groups)} for --only, got {' '.join(options.only)}")
        cells = attention.chosen(options.only, options.match, options.quick)
        if options.list:
            print("\n".join(f"{c.group:9} {c.kind:24} {c.label}, {str(c.dtype)[6:]}" for c in cells))
            return 0
        if not cells:
            parser.error("no cell of attention is chosen")
        where = default if options.quick else "cuda"
        if not torch.cuda.is_available() and where == "cuda":
            parser.error("attention needs a CUDA GPU; with --quick it runs without one")
        return attention.run(cells, where, lambda: environment(where) | facts, path, options.peers)
    if set(options.only or ()) & set(groups):
        parser.error(f"--only {' '.join(options.only)}: groups are of attention, here functions are named")
    cases = QUICK if options.quick else CPU if device == "cpu" else CUDA
    cases = [c for c in cases if not options.only or c.function in options.only]
    cases = [c for c in cases if not options.match or options.match in f"{c.label}, {str(c.dtype)[6:]}"]
    if options.list:
        print("\n".join(f"{c.function:13} {c.label:38} {str(c.dtype)[6:]:8} {c.reason}" for c in cases))
        return 0

    started, failures = time.perf_counter(), 0
    record = environment(device) | facts | {"matmul": {}, "results": []}
    if device == "cpu":
        record["memory"] = settle_memory(options.keep_memory)
        if record["load_at_start"] > 0.5:
            print(
                f"load {record['load_at_start']}: others are at work, and times of short calls will be theirs", file=sys.stderr
            )
    dtypes = dict.fromkeys(c.dtype for c in cases if c.function == "attention")
    matmul_rates(record, device, "at_start", dtypes)
    # A log file wants a line now and then, a terminal a moving bar.
    interval = 0.1 if sys.stderr.isatty() else 30
    with tqdm(cases, desc=f"benchmarks, {device}", dynamic_ncols=True, mininterval=interval) as bar:
        for case in bar:
            bar.set_postfix_str(f"{case.function}, {case.label}", refresh=sys.stderr.isatty())
            try:
                result = measure(case, device, seconds, options.rounds, options.peers)
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
    record["unrest"] = unrest(record["results"])
    record["summary"] = summarize(record["results"])
    record["marks"] = (marks if device == "cpu" else cuda_marks)(record["results"])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")
    print("\n".join(summary_lines(record)))
    print(f"wrote {path}" + (f"; {failures} cases were WRONG" if failures else ""))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
