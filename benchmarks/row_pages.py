"""Makes the docs pages of row functions from the records: all cases including attention on the CPU, rows of any width, the
linear loss, and the kernels of the online-softmax paper."""

from __future__ import annotations

from collections import defaultdict

from .attention.summary import MIB
from .paper.summary import (
    BASELINE,
    CHOSEN,
    CLAIMS,
    FASTER,
    LEAST_CLASSES,
    SOFTMAX,
    TOP_BASELINE,
    TOP_FASTER,
    measured,
    over_one_read,
    speed_up,
)
from .summary import DIRECTIONS, OURS
from .tables import heading, number, pair, table, targets_table, times

# --- Row functions, and attention on the CPU ----------------------------------------------------------------------------------


def summary_table(record: dict) -> list[str]:
    """A row per (function, kind, peer), with the dtypes in columns."""
    dtypes = list(dict.fromkeys(entry["dtype"] for entry in record["summary"]))
    groups = defaultdict(dict)
    for entry in record["summary"]:
        groups[entry["family"], entry["kind"], entry["against"]][entry["dtype"]] = entry
    shares = any("share" in entry["forward"] for entry in record["summary"])
    rows = []
    for (function, kind, against), by_dtype in groups.items():
        cases = dict.fromkeys(str(e["cases"]) for e in by_dtype.values())
        row = [f"{function}, {kind}", against, ", ".join(cases)]
        for dtype in dtypes:
            entry = by_dtype.get(dtype)
            row.append("-" if entry is None else _faster(entry))
            if shares:
                row.append("-" if entry is None else _share(entry))
        rows.append(row)
    head = ["times faster: forward / backward (worst)", "than", "cases"]
    for dtype in dtypes:
        head += [dtype, "share, %"] if shares else [dtype]
    return table(head, rows)


def _faster(entry: dict) -> str:
    sides = [entry[direction] for direction in DIRECTIONS]
    mean = pair((s["mean"] for s in sides), times)
    return mean if entry["cases"] == 1 else f"{mean} ({pair((s['worst'] for s in sides), times)})"


def _share(entry: dict) -> str:
    sides = [entry[direction].get("share") for direction in DIRECTIONS]
    return pair((100 * s for s in sides), lambda s: f"{s:.0f}") if all(sides) else "-"


def case_tables(record: dict) -> list[str]:
    """Every case, in one table per function."""
    by_function = defaultdict(list)
    for result in record["results"]:
        by_function[result["family"]].append(result)
    lines = []
    for function, results in by_function.items():
        names = list(dict.fromkeys(name for r in results for name in r["providers"]))
        baseline = next((name for name in ("matmul", "copy") if name in results[0]), None)
        head, moved = [f"{function}: forward / backward, ms", "dtype", *names, "times faster"], False
        if baseline == "matmul":
            head += ["GFLOP/s", "of matmul, %"]
        elif baseline == "copy":
            head += ["GB/s", "copy (to new memory), GB/s", "of copy, %"]
        elif moved := all("forward_gb_per_s" in e for r in results for e in r["providers"].values()):
            head += ["GB/s"]
        rows = []
        for r in results:
            entries = [r["providers"].get(name) for name in names]
            present = [e for e in entries if e]
            row = [r["case"], r["dtype"]]
            row += ["-" if e is None else pair(e[f"{d}_ms"] for d in DIRECTIONS) for e in entries]
            row.append(pair((r["ratio"][d] for d in DIRECTIONS), times) if r["ratio"] else "-")
            if baseline or moved:
                row += _rates(r, baseline)
            row.append(pair(e["step_extra_bytes"] / 2**20 for e in present))
            row.append(pair((e["error"] for e in present), lambda e: f"{e:.0e}".replace("e-0", "e-")))
            rows.append(row)
        lines += ["", *table([*head, "memory of a step, MiB", "error"], rows)]
        if any(e.get("in_graphs") for r in results for e in r["providers"].values()):
            waits = dict.fromkeys(name for r in results for name, e in r["providers"].items() if not e["in_graphs"])
            rest = f"; between events, as they wait for the device: {', '.join(waits)}" if waits else ""
            lines += ["", f"All as replays of CUDA graphs{rest}."]
        for name, reason in dict.fromkeys((name, reason) for r in results for name, reason in r["unavailable"].items()):
            cases = sum(r["unavailable"].get(name) == reason for r in results)
            lines += ["", f"{name} is unavailable in {cases} of these: {reason}."]
    return lines


def _rates(result: dict, baseline: str | None) -> list[str]:
    """Our rates, the baseline's and our shares of it; without a baseline, only our rates."""
    ours, unit = result["providers"].get(OURS), "gflop_per_s" if baseline == "matmul" else "gb_per_s"
    cells = [pair(ours[f"{d}_{unit}"] for d in DIRECTIONS) if ours else "-"]
    if baseline == "copy":
        cells.append(f"{number(result['copy']['gb_per_s'])} ({number(result['copy']['new_gb_per_s'])})")
    if baseline:
        cells.append(pair((100 * ours[f"{d}_share"] for d in DIRECTIONS), lambda s: f"{s:.0f}") if ours else "-")
    return cells


def conditions(record: dict) -> list[str]:
    """Conditions of the run that the heading lacks."""
    facts = []
    if "took_seconds" in record:
        facts.append(f"{record['took_seconds']} s, at least {record['seconds']:g} s and {record['rounds']} rounds per case")
    if "memory" in record:
        facts.append(f"results' memory: {record['memory']}")
    if record.get("mhz"):
        facts.append(f"{record['mhz']:.0f} MHz")
    if "load_at_end" in record:
        facts.append(
            f"load {record['load_at_start']} at the start, {record['load_at_end']} at the end, this run's own included"
        )
    for dtype, rates in record.get("matmul", {}).items():
        if "median" in rates:
            start, median, best, end = (number(rates[at]) for at in ("at_start", "median", "best", "at_end"))
            facts.append(f"matmul {dtype}, GFLOP/s: {start} at the start, {median} during (best {best}), {end} at the end")
    return ["", "; ".join(facts) + "."] if facts else []


def best_table(record: dict) -> list[str]:
    """Ours compared with the fastest of several peers; empty if no case had several."""
    entries = [entry for entry in record["summary"] if entry.get("over_best")]
    rows = []
    for entry in entries:
        sides = entry["over_best"].values()
        worst = min(sides, key=lambda side: side["worst"])
        row = [f"{entry['family']}, {entry['kind']}", entry["dtype"]]
        row += [pair((s["mean"] for s in sides), times), pair((s["worst"] for s in sides), times)]
        rows.append([*row, f"{worst['worst_case']}: {worst['peer']}"])
    head = [
        "times faster than the fastest peer: forward / backward / both",
        "dtype",
        "mean",
        "worst",
        "the worst, and its peer",
    ]
    return ["", *table(head, rows)] if rows else []


def case_page(record: dict) -> list[str]:
    lines = [*heading(record), *conditions(record)]
    if targets := targets_table(record):
        lines += ["", *targets]
    return [*lines, "", *summary_table(record), *best_table(record), *case_tables(record)]


def odd_page(record: dict) -> list[str]:
    """Rows of any width: a row per width, ours compared with the fastest peer and the copy."""
    by_width, columns = defaultdict(dict), {}
    for result in record["results"]:
        column = result["family"], result["dtype"]
        columns[column] = f"{result['family']} {result['dtype'].replace('float', 'fp').replace('bfp', 'bf')}"
        by_width[result["sizes"]["classes"]][column] = result
    rows = [[str(width), *(_odd_cell(of_width.get(c)) for c in columns)] for width, of_width in sorted(by_width.items())]
    about = "Rows of any width: times faster than the fastest peer, forward / backward (share of the copy, %)."
    lines = [about, "", *heading(record), *conditions(record), "", *targets_table(record), ""]
    return [*lines, *table(["classes", *columns.values()], rows)]


def _odd_cell(result: dict | None) -> str:
    if not result or OURS not in result["providers"]:
        return "-"
    ours, best = result["providers"][OURS], result["over_best"]
    shares = pair((100 * ours[f"{d}_share"] for d in DIRECTIONS), lambda s: f"{s:.0f}")
    return f"{pair((best[d]['times'] for d in DIRECTIONS), times) if best else '-'} ({shares})"


def terminal_summary(record: dict) -> list[str]:
    lines = ["", "ours against torch, times faster: geometric mean forward / backward (worst case), share of the baseline"]
    for entry in record["summary"]:
        sides = [entry[direction] for direction in DIRECTIONS]
        means = " / ".join(f"{s['mean']:.2f}" for s in sides)
        worst = " / ".join(f"{s['worst']:.2f}" for s in sides)
        shares = " / ".join(f"{100 * s['share']:.0f}" for s in sides if "share" in s)
        lines.append(
            f"{entry['family']:13} {entry['kind']:16} {entry['dtype']:8} {entry['cases']:2} cases  {means:>13} ({worst})"
            + (f", {shares} % of {entry['share_of']}" if shares else "")
            + f", against {entry['against']}"
        )
    for entry in record["summary"]:
        if best := entry["over_best"]:
            sides = (f"{what} {s['mean']:.2f} ({s['worst']:.2f}, {s['worst_case']}, {s['peer']})" for what, s in best.items())
            lines.append(f"{entry['family']:13} {entry['kind']:16} {entry['dtype']:8} over the best: {', '.join(sides)}")
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


# --- The linear loss ----------------------------------------------------------------------------------------------------------


def linear_table(result: dict) -> list[str]:
    """A case of linear_cross_entropy: its providers, then the parts of a step of ours."""
    rows = [
        [name, *(number(e[f"{what}_{unit}"]) for what in ("forward", "step") for unit in ("ms", "tflop_per_s"))]
        + [number(e["beyond_results_bytes"] / MIB), f"{e['error']:.0e}".replace("e-0", "e-")]
        for name, e in result["providers"].items()
    ]
    head = [
        f"{result['case']}, {result['dtype']}",
        "forward, ms",
        "TFLOP/s",
        "a step, ms",
        "TFLOP/s",
        "MiB beyond gradients",
        "error",
    ]
    lines = [*table(head, rows), *(f"{name} is unavailable: {why}." for name, why in result["unavailable"].items())]
    parts = [[name, str(part["count"]), number(part["ms"])] for name, part in result["parts"].items()]
    return [*lines, "", *table([result["chunks"], "times", "ms"], parts)]


# --- The paper ----------------------------------------------------------------------------------------------------------------


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
    too_large = [
        f"V {r['sizes']['classes']} at batch {r['sizes']['rows']} ({r['too_large']})"
        for r in record["results"]
        if "too_large" in r
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
        *(["", f"Too large for this GPU: {'; '.join(too_large)}."] if too_large else []),
    ]
