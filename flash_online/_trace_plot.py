"""The picture of `python -m flash_online trace ... --plot FILE`: scores and running maximum above, the running sum below, and a
mark wherever the maximum rises and the sum is rescaled."""

from __future__ import annotations

import math
from collections.abc import Sequence

from matplotlib.figure import Figure

X, M, KEPT, NEW, RESCALE, INK = "#8a8f98", "#1f4e8c", "#c9d8ec", "#f8dcb8", "#b5342b", "#22262b"
MOST_LABELLED = 16  # with more numbers, values, sums and factors are not written out

Step = tuple[float, float, float, float]  # x, m, d, factor, as in _introspect's walk


def rescales(walk: Sequence[Step]) -> list[int]:
    """The steps at which the sum is rescaled: the number raises the maximum, and there is a sum to rescale."""
    before = [-math.inf] + [m for _, m, _, _ in walk]
    return [i for i, (_, m, _, _) in enumerate(walk) if m > before[i] > -math.inf]


def draw(walk: Sequence[Step], dtype: str) -> Figure:
    """The walk as a figure with two axes. Its numbers are -inf or at most 1e300.

    The artists have names (`get_gid`): "x" and "-inf" for the scores, "m", "d", and in both axes "rescale", which has one
    segment for each rescale.
    """
    # Not pyplot's figure: a plain Figure needs no window system and changes no global state.
    figure = Figure(figsize=(min(max(8.0, 2.5 + 0.6 * len(walk)), 11), 6), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True)
    few = len(walk) <= MOST_LABELLED
    fired = rescales(walk)
    _draw_scores(upper, walk, few)
    _draw_sum(lower, walk, few)
    for axes in (upper, lower):
        if fired:
            places, width = [i - 0.5 for i in fired], 1 if len(fired) <= MOST_LABELLED else 0.4
            axes.vlines(places, 0, 1, transform=axes.get_xaxis_transform(), color=RESCALE, lw=width, ls="--", gid="rescale")
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_xlim(-0.5 - 0.01 * len(walk), len(walk) - 0.5 + 0.01 * len(walk))
    upper.tick_params(axis="x", length=0)
    _label_rescales(lower, walk, fired, few)
    if few:
        lower.set_xticks(range(len(walk)), [f"$x$ = {x:.4g}\n$m$ = {m:.4g}" for x, m, _, _ in walk])
        lower.tick_params(axis="x", length=0, labelsize=10 if len(walk) <= 10 else 7.5)
    else:
        lower.set_xlabel("numbers read")
    _, m, d, _ = walk[-1]
    lse = m + math.log(d) if d > 0 else -math.inf
    numbers, marks = (f"{n} {what}{'' if n == 1 else 's'}" for n, what in ((len(walk), "number"), (len(fired), "rescale")))
    upper.set_title(f"online softmax, {dtype}: {numbers}, {marks}; lse = $m$ + ln $d$ = {lse:.5g}", fontsize=11)
    figure.legend(loc="outside lower center", ncols=3 if few else 6, frameon=False, fontsize=9)
    return figure


def _draw_scores(axes, walk: Sequence[Step], few: bool) -> None:
    finite = [(i, x) for i, (x, _, _, _) in enumerate(walk) if x > -math.inf]
    empty = [i for i, (x, _, _, _) in enumerate(walk) if x == -math.inf]
    lowest, highest = (min(x for _, x in finite), max(x for _, x in finite)) if finite else (0.0, 1.0)
    margin = (highest - lowest) / 8 or max(abs(highest), 1.0) / 8  # above and below, also where all scores are equal
    floor = lowest - margin
    if finite:
        places, scores = zip(*finite, strict=True)
        axes.vlines(places, floor, scores, color=X, lw=6 if few else 1.2, label="score $x$")
        axes.plot(places, scores, "o", color=X, ms=6 if few else 2.5, gid="x")
    if empty:
        axes.plot(
            empty, [floor] * len(empty), "v", color=INK, ms=9 if few else 4, clip_on=False, label="$-\\infty$", gid="-inf"
        )
    maxima = [m if m > -math.inf else math.nan for _, m, _, _ in walk]  # NaN leaves a gap
    if finite:
        edges = [i - 0.5 for i in range(len(walk) + 1)]
        axes.stairs(maxima, edges, baseline=None, color=M, lw=2, label="running maximum $m$", gid="m")
    else:
        axes.set_yticks([])
    axes.set_ylim(floor, highest + margin)
    axes.set_ylabel("scores")


def _draw_sum(axes, walk: Sequence[Step], few: bool) -> None:
    edges = [i - 0.5 for i in range(len(walk) + 1)]
    sums = [d for _, _, d, _ in walk]
    kept = [factor * before for (_, _, _, factor), before in zip(walk, [0.0, *sums], strict=False)]
    axes.stairs(kept, edges, fill=True, color=KEPT, label="$d$ before, times factor")
    axes.stairs(sums, edges, baseline=kept, fill=True, color=NEW, label="$e^{x-m}$")
    axes.stairs(sums, edges, baseline=None, color=INK, lw=1.4, gid="d")
    if few:
        for i, d in enumerate(sums):
            axes.annotate(f"{d:.4g}", (i, d), (0, 3), textcoords="offset points", ha="center", fontsize=9, color=INK)
    axes.set_ylim(0, 1.4 * max(*sums, 1.0))  # room for the factors
    axes.set_ylabel("running sum $d$")


def _label_rescales(axes, walk: Sequence[Step], fired: Sequence[int], few: bool) -> None:
    """Writes the factors next to their marks; in a long row it skips factors that would overlap the previous one."""
    last = -math.inf
    for i in fired:
        if not few and i - last < len(walk) / 25:
            continue
        last = i
        axes.annotate(
            f"$\\times${walk[i][3]:.3g}" + (f"\n= $e^{{{walk[i - 1][1] - walk[i][1]:.4g}}}$" if few else ""),
            (i - 0.5, 1),
            (2, -2),
            xycoords=axes.get_xaxis_transform(),
            textcoords="offset points",
            ha="left",
            va="top",
            rotation=0 if few else 90,
            fontsize=9 if few else 7.5,
            color=RESCALE,
        )
    if fired:
        axes.plot([], [], color=RESCALE, lw=1, ls="--", label="$m$ rises: $d$ is rescaled")
