"""Draws the figures of online_softmax.md and the pages that go on from it, and prints the numbers that its text quotes.

python docs/figures.py [--out docs/figures] needs numpy and matplotlib, not flash_online: every float32 operation is spelled
out here and rounded once, so that the page's numbers do not depend on a build.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle

F32 = np.float32
BLUE, ORANGE, GREEN, RED, GREY, INK = "#3465a4", "#e08214", "#3a8a4d", "#b5342b", "#8a8f98", "#22262b"
PALE = {BLUE: "#c9d8ec", ORANGE: "#f8dcb8", GREEN: "#cde6d2", RED: "#f2cfcb", GREY: "#e6e8ea"}


# --- arithmetic: float32 with one rounding an operation ------------------------------------------------------------------


def exp32(x: np.float32) -> np.float32:
    return F32(math.exp(float(x))) if x > -np.inf else F32(0)


def online(row) -> list[tuple]:
    """The walk over a row in float32: (x, m, d, factor) a number."""
    m, d, walk = F32(-np.inf), F32(0), []
    for x in map(F32, row):
        m_new = max(m, x)
        factor = exp32(F32(m - m_new)) if m > -np.inf else F32(0)
        d = F32(F32(d * factor) + exp32(F32(x - m_new)))
        m = m_new
        walk.append((x, m, d, factor))
    return walk


def safe(row) -> np.float32:
    """The sum of exp(x - max) in float32, left to right, with the maximum known beforehand."""
    row, d = [F32(x) for x in row], F32(0)
    for x in row:
        d = F32(d + exp32(F32(x - max(row))))
    return d


def started_with_x0(row) -> tuple[float, float]:
    """The faulty recurrence: d starts as x[0] where it should start as 1."""
    m, d = row[0], float(row[0])
    for x in row[1:]:
        m_new = max(m, x)
        d, m = d * math.exp(m - m_new) + math.exp(x - m_new), m_new
    return m, d


def disagreement(length: int, rows: int, seed: int = 0) -> np.ndarray:
    """online - safe in units in the last place of the safe sum, for `rows` normal rows (deviation 3)."""

    def exp(x):
        return np.exp(x.astype(np.float64)).astype(F32)

    x = (3 * np.random.default_rng(seed).standard_normal((length, rows))).astype(F32)
    top = x.max(axis=0)
    known = np.zeros(rows, F32)
    m, d = x[0], np.ones(rows, F32)
    for value in x:
        known += exp(value - top)
    for value in x[1:]:
        m_new = np.maximum(m, value)
        d = d * exp(m - m_new) + exp(value - m_new)
        m = m_new
    return np.rint((d - known) / np.spacing(known)).astype(int)


def new_maxima(length: int, rows: int, seed: int = 0) -> float:
    """How often the maximum rises in a row in random order, the first element included: about ln(length) + 0.58."""
    rng = np.random.default_rng(seed)
    counts = []
    for _ in range(rows):
        row = rng.standard_normal(length)
        counts.append(np.count_nonzero(np.diff(np.maximum.accumulate(row))) + 1)
    return float(np.mean(counts))


def two_equal_scores(score: float) -> tuple[float, float, float, float]:
    """(lse, lse_low, exp(s - lse), exp((s - lse) - lse_low)) in float32 for the row [score, score], where p is 1/2."""
    m, log_sum = F32(score), F32(math.log(2))
    lse = F32(m + log_sum)
    part = F32(lse - m)
    low = F32(F32(m - F32(lse - part)) + F32(log_sum - part))
    return float(lse), float(low), float(exp32(F32(m - lse))), float(exp32(F32(F32(m - lse) - low)))


def numbers() -> None:
    print("by hand, float32")
    for row in ([2, 1, 3], [1, 3, 2]):
        for x, m, d, factor in online(row):
            print(f"  {row}  x {x:g}  m {m:g}  factor {factor:.7f}  d {d:.7f}")
    print("started with d = x[0]")
    for row in ([2, 1, 3], [1, 3, 2], [0, 1, 3], [-2, 1, 3]):
        right, (_, wrong) = sum(math.exp(x - max(row)) for x in row), started_with_x0(row)
        print(f"  {row}  d {wrong:.4f}  true {right:.4f}  the probabilities sum to {right / wrong:.4f}")
    row = [1, 2, 3, 4]
    exact = sum(math.exp(x - 4) for x in row)
    print(f"not the same bits: {row}: online {online(row)[-1][2]:.9f}  safe {safe(row):.9f}  exact {exact:.12f}")
    for length in (3, 10, 100, 1000):
        ulps = disagreement(length, 1000)
        print(f"  n {length}: the same bits in {np.mean(ulps == 0):.1%} of 1000 rows, at worst {np.abs(ulps).max()} ulp apart")
    for length in (1000, 1000000):
        print(
            f"  rises of the maximum, n {length}: {new_maxima(length, 20):.1f} (ln n + 0.58 = {math.log(length) + 0.5772:.1f})"
        )
    print("two equal scores, p = 0.5")
    for score in (10, 1e2, 1e3, 1e4, 1e5, 1e6, 1e7, 1e8):
        lse, low, careless, right = two_equal_scores(score)
        print(f"  s {score:.0e}  lse {lse:.10g}  lse_low {low:.7g}  exp(s - lse) {careless:.6f}  with lse_low {right:.7f}")


# --- figures -------------------------------------------------------------------------------------------------------------


def blank(width: float, height: float, xlim, ylim):
    figure, axes = plt.subplots(figsize=(width, height))
    axes.set(xlim=xlim, ylim=ylim)
    axes.axis("off")
    return figure, axes


def box(axes, x, y, w, h, text, color=BLUE, size=11, weight="normal"):
    axes.add_patch(FancyBboxPatch((x, y), w, h, boxstyle="round,pad=0,rounding_size=0.08", fc=PALE[color], ec=color, lw=1.3))
    axes.text(x + w / 2, y + h / 2, text, ha="center", va="center", fontsize=size, color=INK, weight=weight)


def arrow(axes, start, end, color=INK, style="-|>", curvature=0.0):
    axes.add_patch(
        FancyArrowPatch(
            start, end, arrowstyle=style, mutation_scale=12, lw=1.3, color=color, connectionstyle=f"arc3,rad={curvature}"
        )
    )


def overflow():
    figure, axes = plt.subplots(figsize=(8.2, 3.9))
    x = np.linspace(-120, 120, 400)
    axes.plot(x, x / math.log(10), color=INK, lw=1.8)
    top, bottom = math.log(float(np.finfo(F32).max)), math.log(float(np.finfo(F32).smallest_subnormal))
    axes.axvspan(top, 120, color=PALE[RED])
    axes.axvspan(-120, bottom, color=PALE[GREY])
    axes.axvspan(bottom, 0, color=PALE[GREEN], alpha=0.7)
    axes.text((top + 120) / 2, -38, "$e^x=\\infty$\n$\\infty/\\infty$ = NaN", ha="center", fontsize=10, color=RED)
    axes.text((bottom - 120) / 2, 22, "$e^x=0$", ha="center", fontsize=10)
    axes.text(
        -95,
        27,
        "where $x-m$ lives: it can only\nunderflow, and the largest\nterm is exactly 1",
        va="center",
        fontsize=10,
        color=GREEN,
    )
    for limit, height, label in ((top, 46, "float32, bfloat16: 88.72"), (math.log(65504), -30, "float16: 11.09")):
        axes.axvline(limit, color=RED, lw=1.2, ls="--")
        side = -1 if height > 0 else 1
        axes.text(limit + 3 * side, height, label, ha="right" if side < 0 else "left", va="center", fontsize=10, color=RED)
    axes.axhline(0, color=GREY, lw=0.7)
    axes.set(xlim=(-120, 120), ylim=(-52, 52), xlabel="$x$", ylabel="$\\log_{10} e^x$")
    axes.set_title("$e^x$ overflows early, $e^{x-m}$ cannot", fontsize=12)
    return figure


def accesses():
    figure, axes = blank(8.6, 4.4, (0, 17.8), (0, 9.0))
    rows = (
        ("naive", 6.1, ("$d=\\Sigma e^{x}$", "R", BLUE), ("$y=e^{x}/d$", "RW", GREEN), None, "3", "overflows"),
        (
            "safe",
            3.4,
            ("$m=\\max x$", "R", BLUE),
            ("$d=\\Sigma e^{x-m}$", "R", BLUE),
            ("$y=e^{x-m}/d$", "RW", GREEN),
            "4",
            "right",
        ),
        ("online", 0.7, ("$(m,\\ d)$ at once", "R", ORANGE), ("$y=e^{x-m}/d$", "RW", GREEN), None, "3", "right"),
    )
    for name, y, *passes, count, verdict in rows:
        axes.text(0.1, y + 0.75, name, fontsize=13, weight="bold", va="center", color=INK)
        for slot, entry in enumerate(passes):
            if entry is None:
                continue
            text, kind, color = entry
            x = 2.6 + 3.6 * slot
            box(axes, x, y, 3.1, 1.5, text, color, 11)
            axes.text(x + 1.55, y + 1.82, "1 read" if kind == "R" else "1 read + 1 write", ha="center", fontsize=9, color=GREY)
        axes.text(
            14.3,
            y + 0.75,
            count,
            fontsize=17,
            weight="bold",
            ha="center",
            va="center",
            color=RED if verdict != "right" else GREEN,
        )
        axes.text(16.7, y + 0.75, verdict, fontsize=11, ha="center", va="center", color=RED if verdict != "right" else GREEN)
    for x, label in (
        (4.15, "pass 1"),
        (7.75, "pass 2"),
        (11.35, "pass 3"),
        (14.3, "accesses\nper element"),
        (16.7, "large $x$"),
    ):
        axes.text(x, 8.7, label, ha="center", va="center", fontsize=10, color=INK)
    return figure


def walk():
    figure, panels = plt.subplots(1, 2, figsize=(9.2, 4.3), sharey=True, layout="constrained")
    colors = {1: ORANGE, 2: GREEN, 3: BLUE}
    for axes, row in zip(panels, ([2, 1, 3], [1, 3, 2]), strict=True):
        terms: list[tuple[int, float]] = []
        m = -math.inf
        ticks = []
        for step, x in enumerate(row):
            factor = math.exp(m - max(m, x))
            m = max(m, x)
            terms = [(name, value * factor) for name, value in terms] + [(x, math.exp(x - m))]
            base = 0.0
            for name, value in terms:
                axes.bar(step, value, 0.6, bottom=base, color=PALE[colors[name]], edgecolor=colors[name], lw=1.3)
                label = "1" if value == 1 else f"$e^{{{name - m}}}$"
                axes.text(step, base + value / 2, label, ha="center", va="center", fontsize=10.5 if value > 0.1 else 8.5)
                base += value
            axes.text(step, base + 0.035, f"$d$ = {base:.4g}", ha="center", fontsize=11.5, weight="bold", color=INK)
            if step:
                axes.annotate(
                    "",
                    (step - 0.3, 1.76),
                    (step - 0.7, 1.76),
                    arrowprops={"arrowstyle": "-|>", "color": RED if factor < 1 else GREY, "lw": 1.3},
                )
                text = f"$\\times e^{{{round(math.log(factor))}}}$" if factor < 1 else "$\\times 1$"
                axes.text(step - 0.5, 1.8, text, ha="center", fontsize=10.5, color=RED if factor < 1 else GREY)
            ticks.append(f"$x$ = {x}\n$m$ = {m:g}")
        axes.set_xticks(range(3), ticks, fontsize=11)
        axes.set(ylim=(0, 1.95), xlim=(-0.5, 2.5))
        axes.set_title(f"{row}", fontsize=12)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("sum of weights, measured from $m$")
    figure.suptitle("Two orders, one end: $d=1+e^{-1}+e^{-2}=1.503$", fontsize=12.5)
    return figure


def merge():
    figure, axes = blank(8.6, 4.3, (0, 17.2), (-0.2, 8.4))
    for slot, x in enumerate((2, 1, 3, 1)):
        box(axes, 0.6 + 4.2 * slot, 0.2, 3.2, 1.1, f"$x$ = {x}:  ({x}, 1)", GREY, 11)
    left, right = (2, 1 + math.exp(-1)), (3, 1 + math.exp(-2))
    box(axes, 1.6, 3.3, 5.4, 1.2, f"(2, $1+e^{{-1}}$) = (2, {left[1]:.4f})", BLUE, 10.5)
    box(axes, 10.0, 3.3, 5.4, 1.2, f"(3, $1+e^{{-2}}$) = (3, {right[1]:.4f})", BLUE, 10.5)
    total = left[1] * math.exp(-1) + right[1]
    box(axes, 4.4, 6.7, 8.2, 1.3, f"(3, {left[1]:.4f}$\\cdot e^{{-1}}$ + {right[1]:.4f}) = (3, {total:.4f})", ORANGE, 10.5)
    for start, end, label in (
        ((2.2, 1.35), (3.6, 3.25), "$\\times 1$"),
        ((6.4, 1.35), (5.0, 3.25), "$\\times e^{-1}$"),
        ((10.6, 1.35), (12.0, 3.25), "$\\times 1$"),
        ((14.8, 1.35), (13.4, 3.25), "$\\times e^{-2}$"),
        ((4.3, 4.55), (7.2, 6.65), "$\\times e^{2-3}$"),
        ((12.7, 4.55), (9.8, 6.65), "$\\times 1$"),
    ):
        arrow(axes, start, end)
        side = -1 if start[0] < end[0] else 1
        axes.text(
            (start[0] + end[0]) / 2 + side * 0.95,
            (start[1] + end[1]) / 2,
            label,
            ha="center",
            va="center",
            fontsize=11,
            color=RED,
        )
    return figure


def rounding():
    figure, (left, right) = plt.subplots(1, 2, figsize=(9.4, 3.9), layout="constrained")
    lengths, shares, worst = (3, 10, 30, 100, 300, 1000), [], []
    for length in lengths:
        ulps = disagreement(length, 400, seed=1)
        shares.append(100 * np.mean(ulps == 0))
        worst.append(np.abs(ulps).max())
    left.semilogx(lengths, shares, "o-", color=BLUE, lw=1.8)
    for length, share, ulp in zip(lengths, shares, worst, strict=True):
        left.annotate(f"{ulp}", (length, share), (0, 9), textcoords="offset points", ha="center", fontsize=9.5, color=RED)
    left.text(3, 8, "red: the worst distance seen,\nin units in the last place", fontsize=9.5, color=RED)
    left.set(ylim=(0, 112), xlabel="length of the row", ylabel="% of rows with the same bits")
    left.set_title("online and safe sum, float32, 400 rows each", fontsize=11)
    scores = np.logspace(1, 8, 60)
    careless = [abs(two_equal_scores(s)[2] - 0.5) / 0.5 for s in scores]
    kept = [max(abs(two_equal_scores(s)[3] - 0.5) / 0.5, 3e-8) for s in scores]
    right.loglog(scores, careless, "o", ms=3.5, color=RED)
    right.loglog(scores, kept, "o", ms=3.5, color=GREEN)
    right.text(2e3, 4e-2, "$e^{\\,s-\\mathrm{lse}}$", fontsize=13, color=RED, ha="right")
    right.text(
        3e4,
        7e-8,
        "$e^{\\,(s-\\mathrm{lse})-\\mathrm{lse\\_low}}$: below $3\\cdot10^{-8}$",
        fontsize=11,
        color=GREEN,
        ha="center",
    )
    right.set(ylim=(1e-8, 10), xlabel="score $s$ of the row $[s, s]$", ylabel="relative error of $p=1/2$")
    right.set_title("a probability recomputed from lse, float32", fontsize=11, pad=8)
    for axes in (left, right):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def attention():
    figure, axes = blank(9.2, 4.5, (0, 18.4), (0, 9))
    axes.add_patch(Rectangle((0.4, 2.6), 1.3, 3.0, fc=PALE[BLUE], ec=BLUE, lw=1.3))
    axes.text(1.05, 4.1, "$Q_i$", ha="center", va="center", fontsize=13)
    axes.text(1.05, 2.2, "a block of\nqueries, read once", ha="center", va="top", fontsize=9)
    for slot in range(3):
        x = 4.0 + 3.2 * slot
        axes.add_patch(Rectangle((x, 6.7), 2.2, 1.0, fc=PALE[GREY], ec=GREY, lw=1.3))
        axes.text(x + 1.1, 7.2, f"$K_{slot + 1}$, $V_{slot + 1}$", ha="center", va="center", fontsize=12)
        axes.add_patch(
            Rectangle(
                (x, 2.6), 2.2, 3.0, fc=PALE[ORANGE] if slot == 1 else "white", ec=ORANGE, lw=1.3, ls="-" if slot == 1 else ":"
            )
        )
        axes.text(x + 1.1, 4.55, f"$S=Q_iK_{slot + 1}^T$", ha="center", va="center", fontsize=11)
        axes.text(x + 1.1, 3.5, "$P=e^{S-m}$", ha="center", va="center", fontsize=11)
        arrow(axes, (x + 1.1, 6.65), (x + 1.1, 5.65))
        if slot:
            arrow(axes, (x - 0.95, 1.1), (x - 0.05, 1.1), RED)
        box(axes, x, 0.5, 2.2, 1.2, "$(m,\\ l,\\ o)$", BLUE, 12)
        arrow(axes, (x + 1.1, 2.55), (x + 1.1, 1.75))
    arrow(axes, (1.75, 4.1), (3.95, 4.1))
    axes.text(
        8.3,
        8.35,
        "blocks of keys and values, one after another; only one tile of $S$ exists at a time",
        ha="center",
        fontsize=10,
    )
    axes.text(
        8.3,
        0.1,
        "at each red arrow $l$ and $o$ are multiplied by $e^{m_{old}-m_{new}}$",
        ha="center",
        va="center",
        fontsize=9.5,
        color=RED,
    )
    arrow(axes, (12.65, 1.1), (14.05, 1.1))
    box(axes, 14.1, 0.3, 4.1, 1.6, "$y=o/l$\nlse $=m+\\ln l$", GREEN, 11.5)
    return figure


FIGURES = (overflow, accesses, walk, merge, rounding, attention)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "figures")
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    plt.rcParams.update({"font.family": "DejaVu Sans", "mathtext.fontset": "dejavusans"})
    for draw in FIGURES:
        figure = draw()
        figure.savefig(out / f"{draw.__name__}.png", dpi=130, bbox_inches="tight", metadata={"Software": None})
        plt.close(figure)
    numbers()


if __name__ == "__main__":
    main()
