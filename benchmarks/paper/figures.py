"""Draws the curves of docs/paper.md from the results: python benchmarks/paper/figures.py [--json PATH] [--out FOLDER]"""

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
from summary import OURS  # noqa: E402

from paper.tables import CLAIMS, FASTER, SOFTMAX, TOP_FASTER, measured, speed_up  # noqa: E402

COLORS = {"naive": "#8a8f98", "online": "#e08214", "safe, fused": "#3a8a4d", "online, fused": "#e08214", OURS: "#3465a4"}
BY_K = ("#7f3b08", "#e08214", "#fdb863", "#8a8f98")


def curve(axes, results: dict, what: str, name: str, label: str, **style) -> None:
    axes.plot(
        list(results), [speed_up(r, what, name) for r in results.values()], marker="o", ms=3, lw=1.5, label=label, **style
    )


def finish(axes, title: str, claim: float, baseline: str) -> None:
    axes.axhline(claim, color="#b5342b", lw=1, ls="--", label=f"the paper: up to {claim:g}")
    axes.axhline(1, color="#22262b", lw=0.8)
    axes.set_xscale("log")
    if axes.get_ylim()[1] > 10:
        axes.set_yscale("log", base=2)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    else:
        axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.set_title(title, fontsize=10)
    axes.set_xlabel("V")
    axes.set_ylabel(f"times faster than {baseline}")
    axes.legend(fontsize=8)


def softmax(record: dict):
    batches = measured(record)
    figure, panels = plt.subplots(1, len(batches), figsize=(9.2, 3.8), layout="constrained", squeeze=False)
    for axes, (batch, results) in zip(panels[0], batches.items(), strict=True):
        for name in FASTER:
            curve(axes, results, SOFTMAX, name, name, color=COLORS[name])
        finish(axes, f"softmax, batch {batch}", CLAIMS[SOFTMAX], "safe")
    return figure


def top(record: dict):
    """Upper row: k 5, every provider. Lower row: the paper's fused kernel for every k."""
    batches = measured(record)
    figure, panels = plt.subplots(2, len(batches), figsize=(9.2, 7.2), layout="constrained", squeeze=False)
    tops = [what for what in record["results"][0]["us"] if what != SOFTMAX]
    for (upper, lower), (batch, results) in zip(panels.T, batches.items(), strict=True):
        for name in TOP_FASTER:
            curve(upper, results, "top 5", name, name, color=COLORS[name])
        finish(upper, f"softmax and top 5, batch {batch}", CLAIMS["top 5"], "unfused")
        for what, color in zip(tops, BY_K, strict=True):
            curve(lower, results, what, "online, fused", f"online, fused, k {what.split()[1]}", color=color)
        finish(lower, f"softmax and top k, batch {batch}", CLAIMS["top 5"], "unfused")
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, default=ROOT / "benchmarks" / "results" / "paper.json")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "figures")
    options = parser.parse_args()
    record = json.loads(options.json.read_text())
    options.out.mkdir(parents=True, exist_ok=True)
    for draw in (softmax, top):
        figure = draw(record)
        figure.savefig(options.out / f"paper_{draw.__name__}.png", dpi=130, metadata={"Software": None})
        plt.close(figure)


if __name__ == "__main__":
    main()
