"""Numbers, tables and headings of the pages that report.py writes."""

from __future__ import annotations

from collections.abc import Callable


def number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def pair(values, form: Callable[[float], str] = number) -> str:
    return " / ".join(map(form, values))


def times(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.0f}"


def table(head: list[str], rows: list[list[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows)]


def marks_table(record: dict) -> list[str]:
    rows = []
    for mark in record["marks"]:
        if "unit" in mark:
            wanted, mean, worst = f"<= {mark['most']:g} {mark['unit']}", "", f"{number(mark['measured'])} {mark['unit']}"
        elif "most" in mark:
            wanted, mean, worst = f"< {mark['most'] / 2**20:.3g} MiB", "", f"{mark['measured'] / 2**20:.3g} MiB"
        else:
            wanted = [f"mean >= {mark['least']}"] * (mark["least"] is not None)
            wanted = ", ".join(wanted + [f"each >= {mark['least_each']}"] * (mark["least_each"] is not None))
            mean, worst = times(mark["mean"]), f"{times(mark['worst'])} ({mark['worst_case']})"
        rows.append([mark["mark"], wanted, mean, worst, "yes" if mark["met"] else "no"])
    return table(["mark", "wanted", "mean", "worst", "met"], rows) if rows else []


def heading(record: dict) -> list[str]:
    facts = [record["device"]]
    if "instruction_set" in record:
        facts += [f"{record['threads']} thread{'s' * (record['threads'] > 1)}", record["instruction_set"]]
    facts += [f"torch {record['torch']}", f"commit {record['commit']}", record["date"]]
    lines = [f"**{', '.join(facts)}**"]
    if record.get("note"):
        lines += ["", f"{record['note']}."]
    if record.get("load_at_start", 0) > 0.5:
        lines += ["", f"On a shared machine: load {record['load_at_start']} from others at the start."]
    if (record.get("unrest") or 1) > 1.3:
        lines += ["", f"The machine was not quiet: in the median a yardstick took {record['unrest']:.1f} times its least time."]
    return lines
