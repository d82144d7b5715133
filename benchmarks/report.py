"""The tables of measured results, made from benchmarks/results/*.json: python benchmarks/report.py [--check]

README.md gets a summary, docs/benchmarks.md and docs/attention_benchmarks.md every case, docs/paper.md the paper's tables, each
between its two markers; --check writes nothing and exits with 1 where a page is behind the results.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from pathlib import Path

from attention.tables import attention_page, attention_summary
from page import heading, number, pair, table, targets_table, times
from paper.tables import paper_page
from summary import DIRECTIONS, OURS, SCHEMA
from training import training_page

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
BEGIN, END = "<!-- benchmarks/report.py writes from here -->", "<!-- to here -->"


def summary_table(record: dict) -> list[str]:
    """A row per (function, kind, peer), the dtypes side by side."""
    dtypes = list(dict.fromkeys(entry["dtype"] for entry in record["summary"]))
    groups = defaultdict(dict)
    for entry in record["summary"]:
        groups[entry["function"], entry["kind"], entry["against"]][entry["dtype"]] = entry
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
        by_function[result["function"]].append(result)
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
    """How the run was made, beyond the heading."""
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
    """Ours beside the fastest of several peers; empty if no case had several."""
    entries = [entry for entry in record["summary"] if entry.get("over_best")]
    rows = []
    for entry in entries:
        sides = entry["over_best"].values()
        worst = min(sides, key=lambda side: side["worst"])
        row = [f"{entry['function']}, {entry['kind']}", entry["dtype"]]
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


def summary_page(record: dict) -> list[str]:
    return [*heading(record), "", *summary_table(record), *best_table(record)]


def case_page(record: dict) -> list[str]:
    lines = [*heading(record), *conditions(record)]
    if targets := targets_table(record):
        lines += ["", *targets]
    return [*lines, *case_tables(record)]


# page -> results -> the function that makes the page's lines from them
PAGES = {
    ROOT / "README.md": {"cpu": summary_page, "cuda": summary_page, "attention": attention_summary, "training": training_page},
    ROOT / "docs" / "benchmarks.md": {"cpu": case_page, "cuda": case_page},
    ROOT / "docs" / "attention_benchmarks.md": {"attention": attention_page},
    ROOT / "docs" / "paper.md": {"paper": paper_page},
}


def read(path: Path) -> dict:
    record = json.loads(path.read_text())
    if record.get("schema") != SCHEMA:
        raise SystemExit(f"{path}: of schema {record.get('schema')}, expected {SCHEMA}; run benchmarks/run.py again")
    return record


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="only say whether the pages are up to date")
    check = parser.parse_args().check
    behind = 0
    for page, by_name in PAGES.items():
        paths = {RESULTS / f"{name}.json": lines_of for name, lines_of in by_name.items()}
        body = [line for path, lines_of in paths.items() if path.is_file() for line in [*lines_of(read(path)), ""]]
        body = body or ["None committed yet.", ""]
        text = page.read_text()
        before, rest = text.split(BEGIN)
        _, after = rest.split(END)
        updated = before + BEGIN + "\n".join(["", *body, END]) + after
        if check and updated != text:
            print(f"{page.name} is behind benchmarks/results: run python benchmarks/report.py", file=sys.stderr)
            behind = 1
        elif not check:
            page.write_text(updated)
    return behind


if __name__ == "__main__":
    sys.exit(main())
