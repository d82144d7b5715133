"""The summary of a run: speedups over torch by kind of case, and the targets."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable

SCHEMA = 3  # version of the records in benchmarks/results
OURS, FLASH, MATH = "flash_online", "torch flash", "torch math"
TORCH = "torch's default"  # with the backend that it chooses by itself
BY_REGISTRY = "flash_online by torch_sdpa"  # ours under torch's own operators
CONTEXT = (MATH,)  # only for comparison if another peer runs: few rounds suffice
DIRECTIONS = ("forward", "backward")
SMALL_CALLS = "small calls"  # cases so small that the host's time decides


def geometric_mean(values: Iterable[float]) -> float:
    """The mean of ratios: twice as fast in one case and half as fast in another gives 1."""
    values = list(values)
    return math.exp(math.fsum(map(math.log, values)) / len(values))


def ratio(providers: dict[str, dict]) -> dict | None:
    """Speedup of ours over the first available peer: above 1, ours is faster. None without ours or a peer."""
    peers = [name for name in providers if name != OURS]
    if OURS not in providers or not peers:
        return None
    ours, theirs = providers[OURS], providers[peers[0]]
    of_medians = {d: theirs[f"{d}_ms"] / ours[f"{d}_ms"] for d in DIRECTIONS}
    return {"against": peers[0]} | of_medians | {f"{d}_best": theirs[f"{d}_best_ms"] / ours[f"{d}_best_ms"] for d in DIRECTIONS}


def over_best(providers: dict[str, dict]) -> dict | None:
    """Speedup of ours over the fastest of several peers, forward, backward and in a step of both, each with the peer's name.
    None without ours, or with a single peer.
    """
    peers = [name for name in providers if name != OURS and name not in CONTEXT]
    if OURS not in providers or len(peers) < 2:
        return None

    def ms(name: str, what: str) -> float:
        return sum(providers[name][f"{d}_ms"] for d in (DIRECTIONS if what == "step" else (what,)))

    best = {what: min(peers, key=lambda name, what=what: ms(name, what)) for what in (*DIRECTIONS, "step")}
    return {what: {"times": ms(peer, what) / ms(OURS, what), "peer": peer} for what, peer in best.items()}


def noise(results: list[dict]) -> float | None:
    """The baseline's median time over its least time: little above 1 on a quiet machine. If far above 1, scheduling dominates
    the times of short calls. The least is taken over the whole run, since a case may have no quiet moment. The copy's least
    time is taken per case, since its size differs by case.
    """
    rates = [(r["dtype"], r["matmul"]) for r in results if "matmul" in r]
    best = {dtype: max(rate["best_gflop_per_s"] for other, rate in rates if other == dtype) for dtype, _ in rates}
    slower = [best[dtype] / rate["gflop_per_s"] for dtype, rate in rates]
    slower = slower or [r["copy"]["best_gb_per_s"] / r["copy"]["gb_per_s"] for r in results if "copy" in r]
    return geometric_mean(slower) if slower else None


def summarize(results: list[dict]) -> list[dict]:
    """An entry per (function, kind, dtype, peer): geometric means, the worst case, shares of this run's baseline."""
    groups = defaultdict(list)
    for result in results:
        if result["ratio"]:
            groups[result["family"], result["kind"], result["dtype"], result["ratio"]["against"]].append(result)
    summary = []
    for (function, kind, dtype, against), members in groups.items():
        entry = {"family": function, "kind": kind, "dtype": dtype, "against": against, "cases": len(members)}
        for direction in DIRECTIONS:
            entry[direction] = _of_ratios(members, direction)
            shares = [m["providers"][OURS].get(f"{direction}_share") for m in members]
            if all(shares):
                entry[direction]["share"] = geometric_mean(shares)
        entry["over_best"] = _over_best([m for m in members if m.get("over_best")])
        baselines = {name for m in members for name in ("matmul", "copy") if name in m}
        entry["share_of"] = baselines.pop() if len(baselines) == 1 else None
        summary.append(entry)
    return summary


def _over_best(members: list[dict]) -> dict | None:
    entries = {}
    for what in members[0]["over_best"] if members else ():
        worst = min(members, key=lambda m, what=what: m["over_best"][what]["times"])
        entries[what] = {
            "mean": geometric_mean(m["over_best"][what]["times"] for m in members),
            "worst": worst["over_best"][what]["times"],
            "worst_case": worst["case"],
            "peer": worst["over_best"][what]["peer"],
        }
    return entries or None


def _of_ratios(members: list[dict], direction: str) -> dict:
    worst = min(members, key=lambda m: m["ratio"][direction])
    return {
        "mean": geometric_mean(m["ratio"][direction] for m in members),
        "worst": worst["ratio"][direction],
        "worst_case": worst["case"],
    }


def targets(results: list[dict]) -> list[dict]:
    """The targets of the CPU kernels, each with this run's measurement and whether it is met.

    `least` bounds the geometric mean, `least_each` every case.
    """
    small = [r for r in results if r["kind"] == SMALL_CALLS and r["ratio"]]
    attention = [r for r in results if r["family"] == "attention" and r["ratio"] and r["kind"] != SMALL_CALLS]
    beside_flash = [r for r in attention if r["ratio"]["against"] == FLASH]
    plain = [r for r in beside_flash if "window" not in r["options"]]  # a window's speedup would inflate the mean
    found = []
    for dtype, least, least_each in (("float32", 1.0, 0.85), ("bfloat16", 0.9, None), ("float16", 1.0, None)):
        of_dtype = [r for r in plain if r["dtype"] == dtype]
        found += _faster(f"attention, {dtype}, x {FLASH}", of_dtype, least=least, least_each=least_each)
    long_window = [r for r in beside_flash if "window" in r["options"] and r["sizes"]["L"] == 8192]
    found += _faster(f"attention, window 512, L 8192, x {FLASH}", long_window, least_each=3.0)
    for function in ("softmax", "log_softmax", "cross_entropy"):
        of_function = [r for r in results if r["family"] == function and r["ratio"] and r["dtype"] != "float16"]
        long = [r for r in of_function if r["sizes"]["classes"] >= 32768]
        found += _faster(f"{function}, 32768 classes and more, x torch", long, least_each=4.0)
        found += judge(
            f"{function}, 32768 classes and more, of the copy rate",
            [r for r in long if "copy" in r],
            lambda r, direction: r["providers"][OURS][f"{direction}_share"],
            least_each=0.5,
        )
        found += _faster(
            f"{function}, 1024 classes, x torch", [r for r in of_function if r["sizes"]["classes"] == 1024], least_each=1.0
        )
    top = [r for r in results if r["family"] == "topk_softmax" and r["ratio"]]
    found += _faster("topk_softmax, k 5, x topk of softmax", top, least_each=5.0)
    for direction, least_each in (("forward", 0.5), ("step", 0.77)):
        found += judge("calls of 64 elements, x torch", small, _of_least_times, least_each=least_each, directions=(direction,))
    for result in attention:
        if result["options"].get("bias") == "shared" and result["sizes"]["L"] >= 512:  # below, fixed costs dominate
            beyond = result["providers"][OURS]["beyond_results_bytes"]
            found.append(
                {
                    "target": f"attention, {result['case']}, {result['dtype']}: bytes of a step beyond its results",
                    "most": result["scores_bytes"],
                    "measured": beyond,
                    "met": beyond < result["scores_bytes"],
                }
            )
    return found


def cuda_targets(results: list[dict]) -> list[dict]:
    """The targets of the row functions on a GPU. Shares are relative to the copy rate, also for reads alone."""
    of = {
        function: [r for r in results if r["family"] == function and OURS in r["providers"]]
        for function in ("softmax", "log_softmax", "cross_entropy", "topk_softmax")
    }

    def share(result: dict, direction: str) -> float:
        return result["providers"][OURS][f"{direction}_share"]

    def beside_best(result: dict, direction: str) -> float:
        return result["over_best"][direction]["times"]

    def quack_step(result: dict, _: str) -> float:
        ours, theirs = (sum(result["providers"][name][f"{d}_ms"] for d in DIRECTIONS) for name in (OURS, "quack"))
        return theirs / ours

    forward = DIRECTIONS[:1]
    softmaxes = of["softmax"] + of["log_softmax"]
    several = [r for r in softmaxes if r["over_best"]]
    with_quack = [r for r in of["cross_entropy"] if "quack" in r["providers"]]
    wide = [r for r in of["topk_softmax"] if r["sizes"]["rows"] > 10]
    few = [r for r in of["topk_softmax"] if r["sizes"]["rows"] <= 10]
    return [
        *judge("softmax, log_softmax, of the copy rate", softmaxes, share, least_each=0.93),
        *judge("softmax, log_softmax, x the fastest peer", several, beside_best, least=1.03, least_each=1.0),
        *judge("cross_entropy, of the copy rate", of["cross_entropy"], share, least_each=0.9, directions=forward),
        *judge("cross_entropy, x quack", with_quack, quack_step, least=1.1, least_each=1.0, directions=("step",)),
        *judge("topk_softmax, 4000 rows, of the copy rate", wide, share, least_each=0.834, directions=forward),  # 1.2 reads
        *judge("topk_softmax, 10 rows, of the copy rate", few, share, least_each=0.8, directions=forward),
    ]


def odd_targets(results: list[dict]) -> list[dict]:
    """The targets of rows of any width on a GPU. Shares of the copy count only logits: all traffic but targets and losses of
    rows with few classes."""
    ours = [r for r in results if OURS in r["providers"]]
    several = [r for r in ours if r["over_best"]]
    wide = [r for r in ours if r["sizes"]["classes"] >= 16 or r["family"] in ("softmax", "log_softmax")]
    return [
        *judge("x the fastest peer", several, lambda r, d: r["over_best"][d]["times"], least=1.2, least_each=0.97),
        *judge("of the copy rate", wide, lambda r, d: r["providers"][OURS][f"{d}_share"], least_each=0.9),
    ]


def _of_least_times(result: dict, direction: str) -> float:
    """The speedup over the first peer by least times, forward or in a step of both passes: while other processes compute, two
    threads of a small call wait for each other for a time slice of the system."""
    passes = DIRECTIONS if direction == "step" else (direction,)
    ours, theirs = (result["providers"][name] for name in (OURS, result["ratio"]["against"]))
    return sum(theirs[f"{one}_best_ms"] for one in passes) / sum(ours[f"{one}_best_ms"] for one in passes)


def _faster(name: str, members: list[dict], **least) -> list[dict]:
    return judge(name, members, lambda r, direction: r["ratio"][direction], **least)


def judge(
    name: str,
    members: list[dict],
    value: Callable[[dict, str], float],
    least: float | None = None,
    least_each: float | None = None,
    directions: tuple[str, ...] = DIRECTIONS,
) -> list[dict]:
    """An entry per direction: the mean and the worst of `value` over the members, and whether they meet the target."""
    entries = []
    for direction in directions if members else ():
        values = {id(m): value(m, direction) for m in members}
        worst = min(members, key=lambda m: values[id(m)])
        mean = geometric_mean(values.values())
        entries.append(
            {
                "target": f"{name}, {direction}",
                "least": least,
                "least_each": least_each,
                "cases": len(members),
                "mean": mean,
                "worst": values[id(worst)],
                "worst_case": f"{worst['case']}, {worst['dtype']}",
                "met": mean >= (least or 0) and values[id(worst)] >= (least_each or 0),
            }
        )
    return entries
