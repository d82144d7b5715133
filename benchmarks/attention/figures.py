"""Draws the curves of docs/attention_benchmarks.md: python benchmarks/attention/figures.py [--json PATH] [--out FOLDER]"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import matplotlib  # noqa: E402

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
from summary import DIRECTIONS, FLASH, OURS  # noqa: E402

from attention.tables import CUDNN, FA3  # noqa: E402

COLORS = {OURS: "#3465a4", FA3: "#e08214", CUDNN: "#3a8a4d", FLASH: "#8a8f98"}


def plain(record: dict):
    """A panel for each direction and mask by head dim: TFLOP/s over the length, the matmul rate of the run as a line."""
    results = [r for r in record["results"] if r["group"] == "plain"]
    head_dims = sorted({r["sizes"]["E"] for r in results})
    rows = [(direction, causal) for direction in DIRECTIONS for causal in (False, True)]
    size = (3.2 * len(head_dims), 2.7 * len(rows))
    figure, panels = plt.subplots(len(rows), len(head_dims), figsize=size, layout="constrained", squeeze=False, sharey="row")
    for (direction, causal), of_row in zip(rows, panels, strict=True):
        for head_dim, axes in zip(head_dims, of_row, strict=True):
            members = [r for r in results if r["sizes"]["E"] == head_dim and bool(r["options"].get("causal")) == causal]
            members.sort(key=lambda r: r["sizes"]["L"])
            key = f"{direction}_tflop_per_s"
            for name, color in COLORS.items():
                of_name = [(r["sizes"]["L"], r["providers"].get(name, {})) for r in members]
                points = [(length, entry[key]) for length, entry in of_name if key in entry]
                if points:
                    axes.plot(*zip(*points, strict=True), marker="o", ms=3, lw=1.5, label=name, color=color)
            axes.plot(
                [r["sizes"]["L"] for r in members],
                [r["matmul"]["tflop_per_s"] for r in members],
                color="#22262b",
                lw=0.8,
                ls="--",
                label="matmul",
            )
            axes.set_xscale("log", base=2)
            axes.xaxis.set_major_formatter(lambda value, _: f"{value / 1024:g}k")
            axes.set_ylim(bottom=0)
            axes.grid(alpha=0.3)
            axes.set_title(f"{direction}, {'causal' if causal else 'full'}, E {head_dim}", fontsize=9)
        of_row[0].set_ylabel("TFLOP/s")
    for axes in panels[-1]:
        axes.set_xlabel("L")
    panels[0][0].legend(fontsize=7)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, default=ROOT / "benchmarks" / "results" / "attention.json")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "figures")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    figure = plain(json.loads(options.json.read_text()))
    figure.savefig(options.out / "attention_plain.png", dpi=130, metadata={"Software": None})


if __name__ == "__main__":
    main()
