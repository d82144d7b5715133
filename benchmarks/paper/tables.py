"""The tables of docs/paper.md, which report.py makes from benchmarks/results/paper.json."""

from __future__ import annotations

from page import heading, number, table, times
from summary import OURS

# The baseline of each speed-up, and the kernels that have one.
SOFTMAX, BASELINE, FASTER = "softmax", "safe", ("naive", "online", OURS)
TOP_BASELINE, TOP_FASTER = "unfused", ("safe, fused", "online, fused", OURS)
CLAIMS = {SOFTMAX: 1.3, "top 5": 5.0}  # the abstract's, on a V100: "up to"
LEAST_CLASSES = 1000  # with fewer, a call is a launch and little else
CHOSEN = (4000, 25000, 1000000)  # classes at which every k is shown


def speed_up(result: dict, what: str, name: str) -> float:
    """Above 1: faster than the safe softmax, for a top k than the unfused functions."""
    us = result["us"][what]
    return us[BASELINE if what == SOFTMAX else TOP_BASELINE] / us[name]


def over_one_read(result: dict, what: str) -> float:
    """Our time over that of reading the input once, at the rate of the copy of the same tensor."""
    return result["us"][what][OURS] / (result["copy_us"] / 2)


def measured(record: dict) -> dict[int, dict[int, dict]]:
    """rows -> classes -> result, without the sizes that were too large."""
    by_rows: dict[int, dict[int, dict]] = {}
    for result in record["results"]:
        if "unavailable" not in result:
            by_rows.setdefault(result["rows"], {})[result["classes"]] = result
    return by_rows


def claims_table(record: dict) -> list[str]:
    batches = measured(record)
    rows = []
    for what, claim in CLAIMS.items():
        name = "online" if what == SOFTMAX else "online, fused"
        text = "softmax, online over safe" if what == SOFTMAX else "softmax and top 5, online and fused over safe and unfused"
        row = [text, f"up to {claim:g}"]
        for results in batches.values():
            ups = {v: speed_up(r, what, name) for v, r in results.items() if v >= LEAST_CLASSES}
            least, most = min(ups, key=ups.get), max(ups, key=ups.get)
            row.append(f"{times(ups[least])} (V {least}) to {times(ups[most])} (V {most})")
        rows.append(row)
    head = ["times faster", "paper, V100", *(f"here, batch {b}, V >= {LEAST_CLASSES}" for b in batches)]
    return table(head, rows)


def by_classes(record: dict, what: str) -> list[str]:
    baseline, faster = (BASELINE, FASTER) if what == SOFTMAX else (TOP_BASELINE, TOP_FASTER)
    batches, read = measured(record), [] if what == SOFTMAX else ["ours / one read"]
    head = ["V"]
    for batch in batches:
        head += [f"batch {batch}: {baseline}, us", *faster, *read]
    rows = []
    for classes in sorted({v for results in batches.values() for v in results}):
        row = [str(classes)]
        for results in batches.values():
            row += _cells(results.get(classes), what, baseline, faster, read)
        rows.append(row)
    return table(head, rows)


def by_k(record: dict) -> list[str]:
    batches = measured(record)
    head = ["V", "k"]
    for batch in batches:
        head += [f"batch {batch}: {TOP_BASELINE}, us", *TOP_FASTER, "ours / one read"]
    tops = [what for what in record["results"][0]["us"] if what != SOFTMAX]
    rows = []
    for classes in CHOSEN:
        for what in tops if any(classes in results for results in batches.values()) else ():
            row = [str(classes), what.split()[1]]
            for results in batches.values():
                row += _cells(results.get(classes), what, TOP_BASELINE, TOP_FASTER, ["ours / one read"])
            rows.append(row)
    return table(head, rows)


def _cells(result: dict | None, what: str, baseline: str, faster: tuple[str, ...], read: list[str]) -> list[str]:
    if result is None:
        return ["-"] * (1 + len(faster) + len(read))
    cells = [number(result["us"][what][baseline]), *(times(speed_up(result, what, name)) for name in faster)]
    return cells + [times(over_one_read(result, what))] * len(read)


def paper_page(record: dict) -> list[str]:
    unavailable = [
        f"V {r['classes']} at batch {r['rows']} ({r['unavailable']})" for r in record["results"] if "unavailable" in r
    ]
    return [
        *heading(record),
        "",
        *claims_table(record),
        "",
        "Softmax: the safe softmax in microseconds, then how many times faster than it the others are.",
        "",
        *by_classes(record, SOFTMAX),
        "",
        "Softmax and top 5: safe softmax, then top 5 of its result, in microseconds; how many times faster the others are.",
        "",
        *by_classes(record, "top 5"),
        "",
        "The same by k.",
        "",
        *by_k(record),
        *(["", f"Too large for this GPU: {'; '.join(unavailable)}."] if unavailable else []),
    ]
