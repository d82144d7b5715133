"""The Markdown formats of records on all pages of the docs: numbers, tables, headings and targets."""

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


def targets_table(record: dict) -> list[str]:
    rows = []
    for target in record["targets"]:
        if "unit" in target:
            wanted, mean, worst = (
                f"<= {target['most']:g} {target['unit']}",
                "",
                f"{number(target['measured'])} {target['unit']}",
            )
        elif "most" in target:
            wanted, mean, worst = f"< {target['most'] / 2**20:.3g} MiB", "", f"{target['measured'] / 2**20:.3g} MiB"
        else:
            wanted = [f"mean >= {target['least']}"] * (target["least"] is not None)
            wanted = ", ".join(wanted + [f"each >= {target['least_each']}"] * (target["least_each"] is not None))
            mean, worst = times(target["mean"]), f"{times(target['worst'])} ({target['worst_case']})"
        rows.append([target["target"], wanted, mean, worst, "yes" if target["met"] else "no"])
    return table(["target", "wanted", "mean", "worst", "met"], rows) if rows else []


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
    if (record.get("noise") or 1) > 1.3:
        lines += ["", f"The machine was not quiet: in the median the baseline took {record['noise']:.1f} times its least time."]
    return lines
