"""The summary of a run of attention on a GPU, and its targets."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ..summary import DIRECTIONS, FLASH, MATH, OURS, geometric_mean, judge

FA3, FA4, CUDNN = "FA3", "FA4", "cuDNN"
EFFICIENT, FLEX, VARLEN = "torch efficient", "FlexAttention", "torch varlen_attn"
# Variants of our call: not peers, but targets may compare with them.
DROP_IN, DEFAULT, DENSE = f"{OURS}, drop-in", f"{OURS}, default", f"{OURS}, all visible"
BY_OVERRIDE = f"{OURS} by override"
BY_MASK, PACKED, PLAIN = f"{OURS}, bool mask", f"{OURS}, packed", f"{OURS}, no list"
# Of products in float8: ours quantises 16-bit inputs itself, or has products in bfloat16; the peers.
FLOAT8, QUANTISING, IN_BFLOAT16 = "float8", f"{OURS}, quantising", f"{OURS}, bfloat16"
CUDNN_FLOAT8, FA3_FLOAT8 = "cuDNN float8", "FA3 float8"
FORWARD, BACKWARD = (("forward",), ("backward",))
MIB = 1 << 20
GROUPS = {
    "plain": f"Plain cells: bfloat16, {16384} tokens, hidden 2048",
    "features": "Options, dtypes and head dims",
    "between": "Shapes between the others",
    "packed": "Packed sequences, causal",
    "spans": "Spans",
    "blocks": "Lists of blocks",
    FLOAT8: "Products in float8: forward, 16384 tokens, hidden 2048",
    "short": "Short sequences, replayed from a CUDA graph",
    "host": "The host's part of a call",
    "calls": "Calls of torch's function, with the host's time",
}


def over(result: dict, direction: str, peers: Iterable[str] | None = None) -> tuple[float, str] | None:
    """Speedup of ours over the fastest of these peers (default: all but math), and the peer's name."""
    entries, key = result["providers"], f"{direction}_ms"
    named = peers or [name for name in entries if name != MATH and not name.startswith(OURS)]
    peer_times = {name: entries[name][key] for name in named if key in entries.get(name, ())}
    if not peer_times or key not in entries.get(OURS, ()):
        return None
    best = min(peer_times, key=peer_times.get)
    return peer_times[best] / entries[OURS][key], best


def summarize(results: list[dict]) -> list[dict]:
    """An entry per (group, kind): geometric means of our rate and share, and of our speedup over each peer and over the
    fastest, each with its worst cell."""
    groups = defaultdict(list)
    for result in results:
        if OURS in result["providers"] and result["family"] != "host":
            groups[result["family"], result["kind"]].append(result)
    return [
        {"family": group, "kind": kind, "cases": len(members)} | {d: _side(members, d) for d in DIRECTIONS}
        for (group, kind), members in groups.items()
    ]


def _side(members: list[dict], direction: str) -> dict | None:
    ours = [m["providers"][OURS] for m in members if f"{direction}_ms" in m["providers"][OURS]]
    if not ours:
        return None
    side = {key: geometric_mean(e[f"{direction}_{key}"] for e in ours) for key in ("tflop_per_s", "share")} | {"over": {}}
    for name in dict.fromkeys(name for m in members for name in m["providers"] if name != OURS):
        side["over"][name] = _over([(m["case"], over(m, direction, [name])) for m in members])
    side["over_best"] = _over([(m["case"], over(m, direction)) for m in members])
    return side


def _over(found: list[tuple[str, tuple[float, str] | None]]) -> dict | None:
    ratios = [(*entry, case) for case, entry in found if entry]
    if not ratios:
        return None
    worst, peer, case = min(ratios)
    mean = geometric_mean(ratio for ratio, *_ in ratios)
    return {"mean": mean, "worst": worst, "worst_case": case, "peer": peer, "cases": len(ratios)}


# --- Marks -----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Target:
    """A bound on our speedup over the fastest of `peers` (default: all), over the cells that have such a peer: `mean` bounds
    the geometric mean, `each` every cell."""

    name: str
    members: Callable[[dict], bool]
    peers: tuple[str, ...] = ()
    mean: float | None = None
    each: float | None = None
    directions: tuple[str, ...] = DIRECTIONS


def _of(group: str, *kinds: str, **sizes: int) -> Callable[[dict], bool]:
    """Whether a result is of this group and of these kinds and sizes, if given."""
    return lambda r: (
        r["family"] == group and (not kinds or r["kind"] in kinds) and all(r["sizes"].get(n) == s for n, s in sizes.items())
    )


def _of_lengths(group: str, kind: str, lengths: tuple[int, ...]) -> Callable[[dict], bool]:
    return lambda r: _of(group, kind)(r) and r["sizes"]["L"] in lengths


def _is_sparse(result: dict, size: int) -> bool:
    return _of("blocks", f"size {size}")(result) and 0.1 <= result["options"]["density"] <= 0.25


def _long_packed(result: dict) -> bool:
    return result["family"] == "packed" and result["kind"] != "512 of 64"


_WHOLE = ("prefix", "shared question", "tree", "frames")  # patterns that see most of their blocks as a whole
TARGETS = (
    Target("plain", _of("plain"), (FA3, CUDNN), 1.04, 0.95, FORWARD),
    Target("plain, E 64", _of("plain", E=64), (FA3, CUDNN), 1.08, None, FORWARD),
    Target("plain", _of("plain"), (FA3, CUDNN), 1.03, 0.92, BACKWARD),
    Target("plain, L <= 1024", lambda r: _of("plain")(r) and r["sizes"]["L"] <= 1024, (FA3, CUDNN), 1.15, None, BACKWARD),
    Target("plain, E 256", _of("plain", E=256), (FA3, CUDNN), 1.1, None, BACKWARD),
    Target("plain", _of("plain"), (FLASH,), 1.1, 0.95),
    Target(
        "bool mask, padding mask, bias", _of("features", "bool mask", "padding mask", "bias"), (CUDNN,), None, 1.15, FORWARD
    ),
    Target(
        "masks, biases, dropout",
        _of("features", "bool mask", "padding mask", "bias", "bias with gradient", "bool mask, GQA", "dropout"),
        (EFFICIENT,),
        None,
        1.8,
    ),
    Target("bias with gradient", _of("features", "bias with gradient"), (EFFICIENT,), None, 3.0, BACKWARD),
    Target("block-sparse mask", _of("features", "block-sparse mask"), (DENSE,), None, 2.5),
    Target("dropout", _of("features", "dropout"), (CUDNN, FLASH), None, 1.3, FORWARD),
    Target("dropout", _of("features", "dropout"), (CUDNN,), None, 1.0, BACKWARD),
    Target("float32", _of("features", "float32"), (EFFICIENT,), None, 1.1),
    Target("tf32", _of("features", "tf32"), (EFFICIENT, MATH), None, 1.0),
    Target("E 512", _of("features", "E 512"), (EFFICIENT,), None, 1.5),
    Target("GQA, 8 key heads", _of("features", "GQA", Hkv=8), (), None, 1.0),
    Target("window", _of("features", "window"), (), None, 1.0),
    Target("window 128", lambda r: r["options"].get("window") == 128, (FA3,), None, 2.0, FORWARD),
    Target("deterministic", _of("features", "deterministic"), (DEFAULT,), None, 0.85, BACKWARD),
    Target("deterministic", _of("features", "deterministic"), (FA3,), None, 1.1, BACKWARD),
    Target("deterministic, E 256", _of("features", "deterministic", E=256), (FLASH,), None, 2.0, BACKWARD),
    Target("packed", _long_packed, (FA3,), None, 1.0),
    Target("packed, 512 of 64", _of("packed", "512 of 64"), (FA3,), None, 3.0),
    Target("packed", _long_packed, (VARLEN,), None, 1.1),
    Target("packed, 512 of 64", _of("packed", "512 of 64"), (VARLEN,), None, 2.0),
    Target(
        "spans, L 32768: prefix, shared question, tree, frames",
        lambda r: _of("spans", "E 128", L=32768)(r) and r["options"]["spans"] in _WHOLE,
        (FLEX,),
        None,
        1.6,
    ),
    Target(
        "spans: sinks or global keys, and a window",
        lambda r: _of("spans", "E 128")(r) and "window" in r["options"]["spans"],
        (FLEX,),
        None,
        1.5,
    ),
    Target("spans", _of("spans", "E 64", "E 256"), (FLEX,), None, 1.3),
    Target("spans: documents", lambda r: _of("spans", "E 128")(r), (PACKED,), None, 0.95),
    Target("lists of blocks", _of("blocks"), (FLEX,), None, 1.5),
    Target("lists of all blocks", lambda r: r["options"].get("blocks") == "everything", (PLAIN,), None, 0.96),
    Target("float8", _of(FLOAT8), (CUDNN_FLOAT8,), None, 1.15, FORWARD),
    Target("float8", _of(FLOAT8), (IN_BFLOAT16,), None, 1.2, FORWARD),
    Target("short, in a CUDA graph", _of("short"), (), None, 1.0, FORWARD),
)
# TFLOP/s of visible pairs, forward and, where there is a backward pass, backward.
MIN_RATES = (
    ("spans, L 32768", lambda r: _of("spans", "E 128", L=32768)(r) and r["options"]["spans"] in _WHOLE, (600, 480)),
    ("lists of 10 and 25 % of blocks of 128", lambda r: _is_sparse(r, 128), (520, 430)),
    ("lists of 10 and 25 % of blocks of 64", lambda r: _is_sparse(r, 64), (450, 350)),
    *(
        (f"float8, {kind}, L {' and '.join(map(str, lengths))}", _of_lengths(FLOAT8, kind, lengths), (least,))
        for kind, lengths, least in (
            ("E 128, full", (1024,), 900),
            ("E 128, full", (4096, 16384), 1100),
            ("E 128, causal", (1024,), 620),
            ("E 128, causal", (4096,), 900),
            ("E 128, causal", (16384,), 1000),
            ("E 64, full", (4096, 16384), 640),
            ("E 64, causal", (4096, 16384), 560),
            ("E 256, full", (4096, 16384), 1200),
            ("E 256, causal", (4096, 16384), 1050),
        )
    ),
)
QUANTISED, MIN_QUANTISING = _of(FLOAT8, "E 128, full", L=16384), 1.25  # times faster than bfloat16, quantising included
MAX_FLOAT8_ERROR = 3.5  # percent: root mean square of the error over that of float64's results
MAX_STEP_MIB = 1100  # for a bias with gradient; the gradient itself takes 512
MAX_US = {"forward": 12.0, "step": 100.0}  # for the host group


def targets(results: list[dict]) -> list[dict]:
    """The targets of the CUDA kernels, each with this run's measurement and whether it is met."""
    found = []
    for target in TARGETS:
        name = f"{target.name}, x {' and '.join(target.peers) or 'the fastest peer'}"
        for direction in target.directions:
            members = [r for r in results if target.members(r) and over(r, direction, target.peers)]
            found += judge(
                name,
                members,
                lambda r, d, peers=target.peers: over(r, d, peers)[0],
                target.mean,
                target.each,
                (direction,),
            )
    for name, is_member, least in MIN_RATES:
        members = [r for r in results if is_member(r) and OURS in r["providers"]]
        for direction, rate in zip(DIRECTIONS, least, strict=False):
            rate_of = lambda r, d: r["providers"][OURS][f"{d}_tflop_per_s"]  # noqa: E731
            found += judge(f"TFLOP/s of {name}", members, rate_of, None, rate, (direction,))
    found += _float8_targets([r for r in results if r["family"] == FLOAT8])
    for result in results:
        ours = result["providers"].get(OURS)
        if ours and result["kind"] == "bias with gradient":
            found.append(_at_most("memory of a step", result, ours["step_extra_bytes"] / MIB, MAX_STEP_MIB, "MiB"))
        for what, most in MAX_US.items() if ours and result["family"] == "host" else ():
            taken = max(e[f"{what}_ms"] for name, e in result["providers"].items() if name.startswith(OURS))
            label = "host's time of a call" if what == "forward" else "wall time of forward and backward"
            found.append(_at_most(label, result, 1e3 * taken, most, "us"))
    return found


def _float8_targets(results: list[dict]) -> list[dict]:
    def quantising(result: dict, direction: str) -> float:
        theirs, ours = (result["providers"][name][f"{direction}_ms"] for name in (IN_BFLOAT16, QUANTISING))
        return theirs / ours

    members = [r for r in results if QUANTISED(r) and {QUANTISING, IN_BFLOAT16} <= r["providers"].keys()]
    found = judge(f"float8, quantising included, x {IN_BFLOAT16}", members, quantising, None, MIN_QUANTISING, FORWARD)
    if known := [r for r in results if OURS in r["providers"]]:
        worst = max(known, key=lambda r: r["providers"][OURS]["error"])
        error = 100 * worst["providers"][OURS]["error"]
        found.append(_at_most("float8's relative error, the worst cell", worst, error, MAX_FLOAT8_ERROR, "%"))
    return found


def _at_most(what: str, result: dict, measured: float, most: float, unit: str) -> dict:
    return {
        "target": f"{what}, {result['case']}",
        "most": most,
        "unit": unit,
        "measured": measured,
        "met": measured <= most,
    }
