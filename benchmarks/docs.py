"""The generated parts of the docs: python -m flash_online bench docs writes every table and every figure from the records.

README.md gets the main numbers, rows.md, attention.md, attention_sm80.md, decode.md and distributed.md in docs/performance all
cases, paper.md the paper's tables, docs/design/family.md the tables of attention's kernels, docs/float8.md its errors and
docs/integrations/transformers.md whole models, each between two markers. The figures are curves and bars of the records, and
the figures of online_softmax.md, which docs/figures.py draws.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from .attention_pages import (
    attention_page,
    decode_page,
    distributed_page,
    family_page,
    float8_page,
    general_page,
    models_page,
    training_page,
)
from .float8_accuracy import accuracy_page
from .machine import RESULTS, ROOT
from .readme import readme_page
from .row_pages import case_page, odd_page, paper_page
from .summary import SCHEMA

BEGIN, END = "<!-- python -m flash_online bench docs writes from here -->", "<!-- to here -->"

# page -> one or several results -> the function that makes the page's lines; with a * it makes the lines of each such result
PAGES = {
    ROOT / "README.md": {("attention", "decode", "cuda", "cpu", "training"): readme_page},
    ROOT / "docs" / "performance" / "rows.md": {"cpu": case_page, "cpu_*": case_page, "cuda": case_page, "odd": odd_page},
    ROOT / "docs" / "performance" / "attention.md": {
        "attention": attention_page,
        "training": training_page,
        "float8": float8_page,
    },
    ROOT / "docs" / "performance" / "sparse.md": {"sparse": attention_page},
    ROOT / "docs" / "performance" / "attention_sm80.md": {"attention_sm80_*": general_page},
    ROOT / "docs" / "performance" / "decode.md": {"decode": decode_page},
    ROOT / "docs" / "performance" / "distributed.md": {"distributed": distributed_page},
    ROOT / "docs" / "performance" / "paper.md": {"paper": paper_page},
    ROOT / "docs" / "float8.md": {"accuracy": accuracy_page},
    ROOT / "docs" / "design" / "family.md": {"family": family_page},
    ROOT / "docs" / "integrations" / "transformers.md": {"models": models_page},
}


def read(path: Path) -> dict:
    record = json.loads(path.read_text())
    if record.get("schema") != SCHEMA:
        raise SystemExit(f"{path}: expected schema {SCHEMA}, got {record.get('schema')}; measure again")
    return record


def updated(page: Path) -> str:
    """The page's text with tables from the records."""
    body = []
    for names, lines_of in PAGES[page].items():
        if isinstance(names, str):
            sets = [[path] for path in sorted(RESULTS.glob(f"{names}.json"))]
        else:
            sets = [[RESULTS / f"{name}.json" for name in names]]
        for paths in sets:
            if all(path.is_file() for path in paths):
                body += [*lines_of(*map(read, paths)), ""]
    body = body or ["None committed yet.", ""]
    before, rest = page.read_text().split(BEGIN)
    _, after = rest.split(END)
    return before + BEGIN + "\n".join(["", *body, END]) + after


def draw_figures(folder: Path) -> None:
    from . import figures  # needs matplotlib

    for name in figures.FIGURES:
        if (path := RESULTS / f"{name}.json").is_file():
            figures.draw(name, read(path), folder)
    subprocess.run([sys.executable, ROOT / "docs" / "figures.py", "--out", folder], check=True)


def run(check: bool, folder: Path) -> int:
    """Writes tables and figures; with `check` writes nothing and returns 1 if a table is out of date."""
    outdated = [page for page in PAGES if updated(page) != page.read_text()]
    if check:
        for page in outdated:
            print(f"{page.name} is out of date with benchmarks/results: run python -m flash_online bench docs", file=sys.stderr)
        return 1 if outdated else 0
    for page in outdated:
        page.write_text(updated(page))
    draw_figures(folder)
    return 0
