"""The curves of the docs, drawn from the records in benchmarks/results; needs matplotlib."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from .attention.summary import CUDNN, FA3, FA4
from .decode.summary import DRAWN, FA3_FULL, FLASHINFER
from .paper.summary import CLAIMS, FASTER, SOFTMAX, TOP_FASTER, measured, speed_up
from .summary import DIRECTIONS, FLASH, OURS

ATTENTION_COLORS = {OURS: "#3465a4", FA3: "#e08214", FA4: "#b5342b", CUDNN: "#3a8a4d", FLASH: "#8a8f98"}
IN_WORDS = {FA3: "FlashAttention-3", FA4: "FlashAttention-4", CUDNN: "cuDNN, through torch", FLASH: "torch, flash backend"}
DECODE_COLORS = ATTENTION_COLORS | {FA3_FULL: "#fdb863", FLASHINFER: "#7b4a9e"}
PAPER_COLORS = {"naive": "#8a8f98", "online": "#e08214", "safe, fused": "#3a8a4d", "online, fused": "#e08214", OURS: "#3465a4"}
BY_K = ("#7f3b08", "#e08214", "#fdb863", "#8a8f98")


def attention_plain(record: dict):
    """A panel per direction, mask and head dim: TFLOP/s over the length, with the run's matmul rate as a line."""
    results = [r for r in record["results"] if r["family"] == "plain"]
    head_dims = sorted({r["sizes"]["E"] for r in results})
    rows = [(direction, causal) for direction in DIRECTIONS for causal in (False, True)]
    size = (3.2 * len(head_dims), 2.7 * len(rows))
    figure, panels = plt.subplots(len(rows), len(head_dims), figsize=size, layout="constrained", squeeze=False, sharey="row")
    for (direction, causal), of_row in zip(rows, panels, strict=True):
        for head_dim, axes in zip(head_dims, of_row, strict=True):
            members = [r for r in results if r["sizes"]["E"] == head_dim and bool(r["options"].get("causal")) == causal]
            members.sort(key=lambda r: r["sizes"]["L"])
            key = f"{direction}_tflop_per_s"
            for name, color in ATTENTION_COLORS.items():
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


def speed(record: dict):
    """Causal attention of one head dim: panels for forward and for forward and backward, bars of TFLOP/s by length."""
    causal = [r for r in record["results"] if r["family"] == "plain" and r["options"].get("causal")]
    head_dim = min((r["sizes"]["E"] for r in causal), key=lambda size: abs(size - 128))
    members = sorted((r for r in causal if r["sizes"]["E"] == head_dim), key=lambda r: r["sizes"]["L"])

    def step_tflop_per_s(entry: dict) -> float | None:
        if not all(f"{d}_ms" in entry for d in DIRECTIONS):
            return None
        work = sum(entry[f"{d}_tflop_per_s"] * entry[f"{d}_ms"] for d in DIRECTIONS)
        return work / sum(entry[f"{d}_ms"] for d in DIRECTIONS)

    rates = {"forward": lambda entry: entry.get("forward_tflop_per_s"), "forward and backward": step_tflop_per_s}
    figure, panels = plt.subplots(1, 2, figsize=(9.2, 3.7), layout="constrained", sharey=True)
    drawn = [name for name in ATTENTION_COLORS if any(name in r["providers"] for r in members)]
    width = 0.8 / len(drawn)
    for (title, rate), axes in zip(rates.items(), panels, strict=True):
        for slot, name in enumerate(drawn):
            found = [(place, rate(r["providers"].get(name, {}))) for place, r in enumerate(members)]
            bars = [(place + width * (slot - (len(drawn) - 1) / 2), height) for place, height in found if height]
            if bars:
                color = ATTENTION_COLORS[name]
                axes.bar(*zip(*bars, strict=True), width=width, color=color, label=IN_WORDS.get(name, name))
        axes.set_xticks(range(len(members)), [f"{r['sizes']['L']}" for r in members])
        axes.grid(axis="y", alpha=0.3)
        axes.set_axisbelow(True)
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("length")
    panels[0].set_ylabel("TFLOP/s")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(drawn), fontsize=9)
    dtype = members[0]["dtype"]
    figure.suptitle(f"Causal attention, {dtype}, head dim {head_dim}, {record['device']}, torch {record['torch']}", fontsize=11)
    return figure


def decode(record: dict):
    """One query, 32 heads on 8 key heads, contiguous caches: microseconds over the length of one sequence, and over the batch
    size at one length. The lower line is the time of the reads alone."""
    members = [r for r in record["results"] if r["family"] == "plain" and (r["sizes"]["H"], r["sizes"]["Hkv"]) == (32, 8)]
    lone = [r for r in members if r["sizes"]["B"] == 1]
    by_length = {length: [r for r in members if r["sizes"]["S"] == length] for length in {r["sizes"]["S"] for r in members}}
    length, batches = max(by_length.items(), key=lambda item: len(item[1]))
    figure, panels = plt.subplots(1, 2, figsize=(9.2, 3.9), layout="constrained")
    of_panels = (("S", lone, "one sequence"), ("B", batches, f"{length} keys each"))
    for axes, (size, of_panel, title) in zip(panels, of_panels, strict=True):
        of_panel = sorted(of_panel, key=lambda r: r["sizes"][size])
        for name in DRAWN:
            points = [(r["sizes"][size], r["providers"][name]["us"]) for r in of_panel if name in r["providers"]]
            if points:
                label = IN_WORDS.get(name, name)
                axes.plot(*zip(*points, strict=True), marker="o", ms=3, lw=1.5, label=label, color=DECODE_COLORS[name])
        reads = [(r["sizes"][size], 1e-3 * r["bytes"] / r["read"]["gb_per_s"]) for r in of_panel]
        axes.plot(*zip(*reads, strict=True), color="#22262b", lw=0.8, ls="--", label="reads alone")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value / 1024:g}k" if value >= 1024 else f"{value:g}")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.grid(alpha=0.3)
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("keys" if size == "S" else "sequences")
    panels[0].set_ylabel("microseconds")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=9)
    facts = f"{members[0]['dtype']}, head dim {members[0]['sizes']['E']}, {record['device']}, torch {record['torch']}"
    figure.suptitle(f"One query over cached keys, {facts}", fontsize=11)
    return figure


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


def paper_softmax(record: dict):
    batches = measured(record)
    figure, panels = plt.subplots(1, len(batches), figsize=(9.2, 3.8), layout="constrained", squeeze=False)
    for axes, (batch, results) in zip(panels[0], batches.items(), strict=True):
        for name in FASTER:
            curve(axes, results, SOFTMAX, name, name, color=PAPER_COLORS[name])
        finish(axes, f"softmax, batch {batch}", CLAIMS[SOFTMAX], "safe")
    return figure


def paper_top(record: dict):
    """Upper row: k 5, every provider. Lower row: the paper's fused kernel for every k."""
    batches = measured(record)
    figure, panels = plt.subplots(2, len(batches), figsize=(9.2, 7.2), layout="constrained", squeeze=False)
    tops = [what for what in record["results"][0]["us"] if what != SOFTMAX]
    for (upper, lower), (batch, results) in zip(panels.T, batches.items(), strict=True):
        for name in TOP_FASTER:
            curve(upper, results, "top 5", name, name, color=PAPER_COLORS[name])
        finish(upper, f"softmax and top 5, batch {batch}", CLAIMS["top 5"], "unfused")
        for what, color in zip(tops, BY_K, strict=True):
            curve(lower, results, what, "online, fused", f"online, fused, k {what.split()[1]}", color=color)
        finish(lower, f"softmax and top k, batch {batch}", CLAIMS["top 5"], "unfused")
    return figure


def rollouts(record: dict):
    """What examples/rollouts.py measured: answers that share a prompt in one row, and in rows of their own."""
    figure, sides = plt.subplots(1, 2, figsize=(7, 2.4), layout="constrained")
    for axes, key, unit, title in (
        (sides[0], "answer_tokens_per_s", 1e3, "thousand tokens of answers per second"),
        (sides[1], "extra_bytes", 2**30, "GiB at the peak of a step"),
    ):
        axes.barh(list(record["forms"]), [form[key] / unit for form in record["forms"].values()], height=0.5)
        axes.set_title(title, fontsize=10)
    return figure


# results -> the functions that draw its figures, named like their files
FIGURES = {
    "attention": (attention_plain, speed),
    "decode": (decode,),
    "paper": (paper_softmax, paper_top),
    "rollouts": (rollouts,),
}


def draw(name: str, record: dict, folder: Path) -> None:
    """Draws the figures of a record; `name` is its file name in benchmarks/results."""
    folder.mkdir(parents=True, exist_ok=True)
    for function in FIGURES.get(name, ()):
        figure = function(record)
        figure.savefig(folder / f"{function.__name__}.png", dpi=130, metadata={"Software": None})
        plt.close(figure)
