"""Runs a list of cases: checks, measures and records each; a wrong case is reported, not timed."""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tqdm import tqdm

from .case import Case


def chosen(cases: list[Case], families: list[str] | None, match: str | None) -> list[Case]:
    return [c for c in cases if (not families or c.family in families) and (not match or match in c.title)]


def written(record: dict) -> str:
    """A record as JSON: a line for each field, and for each entry of a list of records."""

    def field(value) -> str:
        if not isinstance(value, list) or not value or not isinstance(value[0], dict):
            return json.dumps(value)
        return "[\n" + ",\n".join(f"  {json.dumps(entry)}" for entry in value) + "\n ]"

    return "{\n" + ",\n".join(f" {json.dumps(name)}: {field(value)}" for name, value in record.items()) + "\n}\n"


def run(
    name: str,
    cases: list[Case],
    measure: Callable[[Case], dict],
    line: Callable[[dict], str],
    facts: dict,
    path: Path,
    finish: Callable[[dict, bool], dict] = lambda record, done: record,
    summary: Callable[[dict], list[str]] = lambda record: [],
) -> int:
    """Measures every case and writes the record after each, in case the run is interrupted. `measure` raises AssertionError for
    a wrong result; `line` formats a result and `summary` the whole record for the terminal; `finish` adds values computed from
    the results so far, and is told whether all are there. Returns 1 if a result was wrong."""
    started, record = time.perf_counter(), facts | {"wrong": 0, "results": []}
    path.parent.mkdir(parents=True, exist_ok=True)

    def save(done: bool) -> dict:
        record["took_seconds"] = round(time.perf_counter() - started)
        whole = finish(record, done)
        path.write_text(written(whole))
        return whole

    # A log file wants a line now and then, a terminal a moving bar.
    with tqdm(cases, desc=name, dynamic_ncols=True, mininterval=0.1 if sys.stderr.isatty() else 30) as bar:
        for case in bar:
            bar.set_postfix_str(f"{case.family}, {case.label}", refresh=sys.stderr.isatty())
            gc.collect()
            try:
                record["results"].append(measure(case))
                bar.write(line(record["results"][-1]))
            except AssertionError as wrong:
                bar.write(f"WRONG, not timed: {wrong}")
                record["wrong"] += 1
            save(done=False)
    whole = save(done=True)
    if whole["results"]:
        print("\n".join(summary(whole)))
    print(f"wrote {path}" + (f"; {record['wrong']} cases were WRONG" if record["wrong"] else ""))
    return 1 if record["wrong"] else 0
