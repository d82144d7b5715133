"""The README's tables of measured results, made of benchmarks/results/*.json: python benchmarks/report.py [--check]

Writes between the two markers in README.md; --check writes nothing and exits with 1 where the README is behind the results.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS, README = ROOT / "benchmarks" / "results", ROOT / "README.md"
BEGIN, END = "<!-- benchmarks/report.py writes from here -->", "<!-- to here -->"
OURS = "flash_online"


def number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def cell(entry: dict | None, best: bool) -> str:
    if entry is None:
        return "-"
    if "forward_gb_per_s" in entry and best:  # a GPU's row kernels are judged by their share of the memory's speed
        return f"{entry['forward_gb_per_s']:.0f} / {entry['backward_gb_per_s']:.0f}"
    return f"{number(entry['forward_ms'])} / {number(entry['backward_ms'])}"


def tables(record: dict) -> list[str]:
    gpu = "instruction_set" not in record
    where = f"{record['device']}, " + (
        "" if gpu else f"{record['threads']} thread{'s' * (record['threads'] > 1)}, {record['instruction_set']}, "
    )
    lines = [f"**{where}torch {record['torch']}, commit {record['commit']}, {record['date']}**"]
    if record.get("load_at_start", 0) > 0.5:
        lines.append(f"(on a shared machine: load {record['load_at_start']} from others at the start)")
    by_function = defaultdict(list)
    for result in record["results"]:
        by_function[result["function"]].append(result)
    for function, results in by_function.items():
        names = list(dict.fromkeys(name for r in results for name in r["contestants"]))
        rates = gpu and any("forward_gb_per_s" in e for r in results for e in r["contestants"].values())
        unit = "GB/s" if rates else "ms"
        lines += [
            "",
            f"| {function}: forward / backward, {unit} | dtype | {' | '.join(names)} | memory of a step, MiB | error |",
            "|---" * (len(names) + 4) + "|",
        ]
        for r in results:
            entries = [r["contestants"].get(name) for name in names]
            present = [e for e in entries if e]
            memory = " / ".join(number(e["step_extra_bytes"] / 2**20) for e in present)
            errors = " / ".join(f"{e['error']:.0e}".replace("e-0", "e-") for e in present)
            cells = " | ".join(cell(e, rates) for e in entries)
            lines.append(f"| {r['case']} | {r['dtype']} | {cells} | {memory} | {errors} |")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="only say whether the README is up to date")
    check = parser.parse_args().check
    records = [json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))]
    body = ["", *(line for record in records for line in [*tables(record), ""])] if records else ["", "None committed yet.", ""]
    text = README.read_text()
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    updated = before + BEGIN + "\n".join([*body, END]) + after
    if check:
        if updated != text:
            print("README.md is behind benchmarks/results: run python benchmarks/report.py", file=sys.stderr)
        return int(updated != text)
    README.write_text(updated)
    return 0


if __name__ == "__main__":
    sys.exit(main())
