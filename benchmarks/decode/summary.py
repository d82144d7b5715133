"""The summary of a run of attention over cached keys, and its targets."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ..attention.summary import CUDNN, FA3
from ..summary import FLASH, OURS, geometric_mean

FA3_FULL, FLASHINFER = "FA3, without lengths", "FlashInfer"
# Variants of our call: not peers, but targets compare with them.
PLAIN, ANY_SPLITS = f"{OURS}, without append", f"{OURS}, num_splits None"
CONTIGUOUS, WIDE = f"{OURS}, contiguous", f"{OURS}, 16-bit caches"
REPEATED, WITH_LENGTHS = f"{OURS}, repeated pages", f"{OURS}, with lengths"
FAMILIES = {
    "plain": "Contiguous caches",
    "drop-in": "Torch's function, one query",
    "paged": "Pages",
    "options": "Windows, sinks, lengths, head dims",
    "prefill": "Prefill in chunks",
    "append": "Append, with rotary embedding",
    "prefix": "One prefix for all sequences",
    "splits": "A number of splits",
    "float8": "float8 caches",
    "MLA": "Values in the keys",
}
DRAWN = (OURS, FA3, FA3_FULL, CUDNN, FLASH, FLASHINFER)  # of the figure


def over(result: dict, peers: Iterable[str] | None = None) -> tuple[float, str] | None:
    """Speedup of ours over the fastest of these peers (default: all), and the peer's name."""
    entries = result["providers"]
    named = peers or [name for name in entries if not name.startswith(OURS)]
    peer_times = {name: entries[name]["us"] for name in named if name in entries}
    if not peer_times or OURS not in entries:
        return None
    best = min(peer_times, key=peer_times.get)
    return peer_times[best] / entries[OURS]["us"], best


def summarize(results: list[dict]) -> list[dict]:
    """An entry per family: geometric means of our share of the read rate and of our speedup over each peer and over the
    fastest, with the worst cell."""
    families = defaultdict(list)
    for result in results:
        if OURS in result["providers"]:
            families[result["family"]].append(result)
    summary = []
    for family, members in families.items():
        entry = {"family": family, "cases": len(members), "over": {}}
        entry["share"] = geometric_mean(m["providers"][OURS]["share"] for m in members)
        for name in dict.fromkeys(n for m in members for n in m["providers"] if not n.startswith(OURS)):
            entry["over"][name] = _over(members, [name])
        entry["over_best"] = _over(members, None)
        summary.append(entry)
    return summary


def _over(members: list[dict], peers: list[str] | None) -> dict | None:
    found = [(*ratio, m["case"]) for m in members if (ratio := over(m, peers))]
    if not found:
        return None
    worst, peer, case = min(found)
    mean = geometric_mean(ratio for ratio, *_ in found)
    return {"mean": mean, "worst": worst, "worst_case": case, "peer": peer, "cases": len(found)}


# --- Targets -----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Faster:
    """The required speedup of ours over the fastest of `peers` (default: all), in every member that has one."""

    name: str
    members: Callable[[dict], bool]
    peers: tuple[str, ...]
    each: float


@dataclass(frozen=True)
class Compared:
    """The most that a call may take compared with the same problem in another form: `times` its time, or `us` more."""

    name: str
    members: Callable[[dict], bool]
    other: str
    times: float | None = None
    us: float | None = None


def _of(family: str, kind: str | None = None, **sizes: int) -> Callable[[dict], bool]:
    """Whether a result is of this family and of this kind and these sizes, if given."""
    return lambda r: (
        r["family"] == family and kind in (None, r["kind"]) and all(r["sizes"].get(n) == s for n, s in sizes.items())
    )


FASTER = (
    Faster("every cell", lambda r: True, (), 1.0),
    Faster("lengths", _of("options", "lengths"), (FA3,), 1.15),
    Faster("prefill in chunks", _of("prefill"), (FA3,), 1.1),
)
COMPARED = (
    Compared("float8 compared with 16 bits", _of("float8", "many sequences"), WIDE, times=0.55),
    Compared("pages compared with a contiguous cache", _of("prefill", "in chunks, paged"), CONTIGUOUS, times=1.05),
    Compared("an append", _of("append", B=1), PLAIN, us=1.5),
    Compared("an append", _of("append", B=64), PLAIN, us=3.0),
    Compared("num_splits 4", _of("splits", B=32), ANY_SPLITS, times=1.05),
    Compared("num_splits 16", _of("splits", B=1), ANY_SPLITS, times=1.15),
)


def targets(results: list[dict]) -> list[dict]:
    """Each target with this run's measurement, and whether it is met. Targets in microseconds are for an H200."""
    found = []
    for target in FASTER:
        ratios = [(*ratio, r["case"]) for r in results if target.members(r) and (ratio := over(r, target.peers or None))]
        if ratios:
            worst, peer, case = min(ratios)
            found.append(
                {
                    "target": f"{target.name}, x {' and '.join(target.peers) or 'the fastest peer'}",
                    "least": None,
                    "least_each": target.each,
                    "cases": len(ratios),
                    "mean": geometric_mean(ratio for ratio, *_ in ratios),
                    "worst": worst,
                    "worst_case": f"{case}; {peer}",
                    "met": worst >= target.each,
                }
            )
    for target in COMPARED:
        for result in filter(target.members, results):
            ours, other = (result["providers"].get(name, {}).get("us") for name in (OURS, target.other))
            if ours is not None and other is not None:
                name = f"{target.name}, {result['case']}"
                if target.times is not None:
                    found.append(_at_most(name, ours / other, target.times, "times"))
                else:
                    found.append(_at_most(name, ours - other, target.us, "us"))
    for result in results:
        if result["wanted_us"] is not None and OURS in result["providers"]:
            found.append(_at_most(result["case"], result["providers"][OURS]["us"], result["wanted_us"], "us"))
    return found


def _at_most(name: str, measured: float, most: float, unit: str) -> dict:
    return {"target": name, "most": most, "unit": unit, "measured": measured, "met": measured <= most}
