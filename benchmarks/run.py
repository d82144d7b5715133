"""The benchmarks, one entry: python benchmarks/run.py [cpu | cuda] [--json PATH] [--only attention ...]

Each case: correctness first (every result and gradient against float64), then the contestants in turn, round after round, so
that a change of the machine's load or clock meets all of them; the median counts. Backward is timed apart from forward.
Writes benchmarks/results/<cpu or cuda>.json unless told otherwise; benchmarks/report.py makes the README's tables of those.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import torch
from tqdm import tqdm

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT))  # last: an installed package comes first, a checkout serves where there is none

from cases import CPU, CUDA, Case  # noqa: E402
from peers import OURS, PEERS, Absent  # noqa: E402

from flash_online import _info, reference, testing  # noqa: E402

SCHEMA = 1
CHECKED_HEADS = 1  # attention is checked on this many heads: float64 needs its whole square of scores


def environment(device: str) -> dict:
    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True).stdout.strip()

    dirty = "+" if git("status", "--porcelain", "--untracked-files=no") else ""
    facts = {
        "schema": SCHEMA,
        "device": torch.cuda.get_device_name() if device == "cuda" else _info.processor(),
        "date": datetime.date.today().isoformat(),
        "commit": (git("rev-parse", "--short", "HEAD") or "uncommitted") + dirty,
        "flash_online": _info.version(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
    }
    if device == "cpu":
        facts["instruction_set"] = _info.build_info()["cpu"]
        facts["load_at_start"] = round(os.getloadavg()[0], 1)  # of others, on a machine that is shared
    return facts


def truth_of(case: Case, inputs, extras, grad) -> list[torch.Tensor]:
    """The output and the gradients in float64, by the package's plain reference."""
    leaves = [t.detach().double().requires_grad_() for t in inputs]
    functions = {
        "attention": lambda: reference.attention(*leaves, causal=case.options["causal"]),
        "softmax": lambda: reference.softmax(leaves[0], -1),
        "log_softmax": lambda: reference.log_softmax(leaves[0], -1),
        "cross_entropy": lambda: reference.cross_entropy(leaves[0], extras[0]),
        "topk_softmax": lambda: reference.topk_softmax(leaves[0], case.options["k"])[0],
    }
    out = functions[case.function]()
    return [out.detach(), *torch.autograd.grad(out, leaves, grad.double())]


def run_once(contestant, case: Case, inputs, extras, grad) -> list[torch.Tensor]:
    out = contestant(inputs, extras, case.options)
    return [out.detach(), *torch.autograd.grad(out, inputs, grad)]


def check(case: Case, contestants: dict, inputs, extras, grad) -> dict[str, float]:
    """Raises AssertionError if ours is farther from float64 than the contract allows; the errors, relative to max|truth|."""
    checked = slice(0, CHECKED_HEADS) if case.function == "attention" else slice(None)

    def head(tensors):
        return [t[:, checked] if t.dim() == 4 else t for t in tensors]

    truth = truth_of(case, head(inputs), extras, head([grad])[0])
    results = {name: head(run_once(f, case, inputs, extras, grad)) for name, f in contestants.items()}
    theirs = [result for name, result in results.items() if name != OURS]
    for i, (ours, expected) in enumerate(zip(results.get(OURS, []), truth, strict=False)):
        name = f"{case.function} ({case.label}, {case.dtype}): {'output' if i == 0 else f'gradient {i}'}"
        # The loss of a 16-bit mean is one number: rounding it is all that torch errs, or more by luck.
        testing.assert_close_to_float64(ours, [result[i] for result in theirs], expected, case.dtype, name=name)
    return {
        name: max(testing.error(r, t).max / max(t.abs().max().item(), 1e-300) for r, t in zip(result, truth, strict=True))
        for name, result in results.items()
    }


def measure(case: Case, device: str, seconds: float, rounds: int) -> dict:
    inputs, extras = case.inputs(device)
    contestants, absent = {}, {}
    grad = None
    for name, function in PEERS[case.function].items():
        try:
            out = function(inputs, extras, case.options)
        except Absent as reason:
            absent[name] = str(reason)
            continue
        contestants[name] = function
        if grad is None:
            generator = torch.Generator().manual_seed(1)
            grad = torch.randn(out.shape, generator=generator).to(out.dtype).to(device)
    if not contestants:
        return {
            "function": case.function,
            "case": case.label,
            "dtype": str(case.dtype)[6:],
            "contestants": {},
            "absent": absent,
        }
    errors = check(case, contestants, inputs, extras, grad)

    repeat = 10 if device == "cuda" else 1  # calls between two waits, so that a launch's latency does not count
    calls = {}
    for name, function in contestants.items():
        out = function(inputs, extras, case.options)

        def forward(function=function):
            for _ in range(repeat):
                function(inputs, extras, case.options)

        def backward(out=out):
            for _ in range(repeat):
                torch.autograd.grad(out, inputs, grad, retain_graph=True)

        calls[name] = {"forward": forward, "backward": backward}
    times = {name: {"forward": [], "backward": []} for name in contestants}
    spent = 0.0
    while min(len(t["forward"]) for t in times.values()) < rounds or spent < seconds:
        for direction in ("forward", "backward"):
            for name, call in calls.items():
                took = testing.time_call(call[direction], seconds=0, least_runs=1, device=device).median
                times[name][direction].append(took / repeat)
                spent += took

    result = {"function": case.function, "case": case.label, "dtype": str(case.dtype)[6:], "contestants": {}, "absent": absent}
    for name, function in contestants.items():
        entry = {f"{direction}_ms": 1e3 * statistics.median(t) for direction, t in times[name].items()}
        entry |= {f"{direction}_best_ms": 1e3 * min(t) for direction, t in times[name].items()}
        entry["rounds"] = len(times[name]["forward"])
        for direction in ("forward", "backward"):
            if moved := case.moved_bytes(direction):
                entry[f"{direction}_gb_per_s"] = moved / entry[f"{direction}_ms"] / 1e6
        entry["step_extra_bytes"] = testing.peak_extra_bytes(
            lambda function=function: run_once(function, case, inputs, extras, grad), device=device
        )
        entry["error"] = errors[name]
        result["contestants"][name] = entry
    return result


def line(result: dict) -> str:
    parts = []
    for name, entry in result["contestants"].items():
        rate = (
            f" ({entry['forward_gb_per_s']:.0f} / {entry['backward_gb_per_s']:.0f} GB/s)" if "forward_gb_per_s" in entry else ""
        )
        times = f"{entry['forward_ms']:.3g} / {entry['backward_ms']:.3g} ms{rate}"
        parts.append(f"{name} {times}, {entry['step_extra_bytes'] / 2**20:.1f} MiB")
    parts += [f"{name} absent: {reason}" for name, reason in result["absent"].items()]
    return f"{result['function']:14} {result['case']:34} {result['dtype']:9} " + "; ".join(parts)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("device", choices=("cpu", "cuda"), nargs="?", default=default)
    parser.add_argument("--json", type=Path, help="where the results go; none: benchmarks/results/<device>.json")
    parser.add_argument("--only", nargs="+", choices=sorted(PEERS), help="these functions alone; needs --json")
    parser.add_argument("--seconds", type=float, default=2.0, help="least time of a case")
    parser.add_argument("--rounds", type=int, default=5, help="least rounds of a case")
    options = parser.parse_args()
    if options.only and not options.json:
        parser.error("--only: needs --json, since the committed results hold every function")
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the memory meter's profiler writes two lines a call otherwise
    cases = [c for c in (CPU if options.device == "cpu" else CUDA) if not options.only or c.function in options.only]
    path = options.json or ROOT / "benchmarks" / "results" / f"{options.device}.json"

    record, failures = environment(options.device) | {"results": []}, 0
    with tqdm(cases, desc=f"benchmarks, {options.device}", dynamic_ncols=True) as bar:
        for case in bar:
            bar.set_postfix_str(f"{case.function}, {case.label}", refresh=sys.stderr.isatty())
            try:
                result = measure(case, options.device, options.seconds, options.rounds)
            except AssertionError as wrong:
                bar.write(f"WRONG, not timed: {wrong}")
                failures += 1
                continue
            record["results"].append(result)
            bar.write(line(result))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")
    print(f"wrote {path}" + (f"; {failures} cases were WRONG" if failures else ""))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
