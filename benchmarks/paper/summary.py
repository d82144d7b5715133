"""The values in the paper's tables and curves: speedups and the cost relative to one read."""

from __future__ import annotations

from ..summary import OURS

# The baseline of each speed-up, and the kernels that have one.
SOFTMAX, BASELINE, FASTER = "softmax", "safe", ("naive", "online", OURS)
TOP_BASELINE, TOP_FASTER = "unfused", ("safe, fused", "online, fused", OURS)
CLAIMS = {SOFTMAX: 1.3, "top 5": 5.0}  # the abstract's, on a V100: "up to"
LEAST_CLASSES = 1000  # with fewer, launch time dominates
CHOSEN = (4000, 25000, 1000000)  # classes at which every k is shown


def speed_up(result: dict, what: str, name: str) -> float:
    """Speedup over the safe softmax or, for a top k, over the unfused functions."""
    us = result["us"][what]
    return us[BASELINE if what == SOFTMAX else TOP_BASELINE] / us[name]


def over_one_read(result: dict, what: str) -> float:
    """Our time over the time of reading the input once, at the copy rate of the same tensor."""
    return result["us"][what][OURS] / (result["copy_us"] / 2)


def measured(record: dict) -> dict[int, dict[int, dict]]:
    """rows -> classes -> result, without the sizes that were too large."""
    by_rows: dict[int, dict[int, dict]] = {}
    for result in record["results"]:
        if "too_large" not in result:
            rows, classes = (result["sizes"][name] for name in ("rows", "classes"))
            by_rows.setdefault(rows, {})[classes] = result
    return by_rows
