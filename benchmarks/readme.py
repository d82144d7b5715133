"""Makes the README's table from a few rows of five records: ours compared with torch, cuDNN, FA3, FA4 and the fastest peer."""

from __future__ import annotations

from textwrap import wrap

from .attention.summary import CUDNN, EFFICIENT, FA3, FA4, VARLEN
from .summary import DIRECTIONS, FLASH, OURS, TORCH
from .tables import heading, pair, table, times

# The rows of each record in the README, and their names there: eight, the weak ones among them. The pages have all.
OF_ATTENTION = {
    ("plain", "E 128, causal"): "causal, head dim 128",
    ("features", "bool mask"): "bool mask",
    ("packed", "128 to 4096"): "packed sequences",
}
OF_DECODE = {"plain": "decoding, contiguous caches"}
OF_ROWS = (("softmax", "short rows", "bfloat16"), ("cross_entropy", "long rows", "bfloat16"))
OF_CPU = (("attention", "causal", "bfloat16"),)


def readme_page(attention: dict, decode: dict, cuda: dict, cpu: dict, training: dict) -> list[str]:
    """One table from five records: ours compared with torch, cuDNN, FA3, the fastest peer, and FA4 where attention's record has
    it."""
    records = {
        "attention": attention,
        "decode": decode,
        "rows --device cuda": cuda,
        "rows --device cpu": cpu,
        "training": training,
    }
    facts = [
        line
        for command, record in records.items()
        for line in wrap(f"- `python -m flash_online bench {command}`: {_in_a_sentence(record)}", 128, subsequent_indent="  ")
    ]
    sides = [side for entry in attention["summary"] for d in DIRECTIONS if (side := entry[d])]
    peers = [name for name in (CUDNN, FA3, FA4) if name != FA4 or any(side["over"].get(FA4) for side in sides)]
    than = [f"than {name}" for name in ("torch", *peers, "the fastest peer")]
    rows = [
        *_of_attention(attention, peers),
        *_of_decode(decode, peers),
        *_of_functions(cuda, OF_ROWS, "rows, GPU", peers),
        *_of_functions(cpu, OF_CPU, "rows, CPU", peers),
        *_of_training(training, peers),
    ]
    return [*facts, "", *table(["times faster: forward / backward", *than, "`bench`"], rows)]


def _in_a_sentence(record: dict) -> str:
    return ". ".join(line.strip("*.") for line in heading(record) if line) + "."


def _of_attention(record: dict, peers: list[str]) -> list[list[str]]:
    entries = {(e["family"], e["kind"]): e for e in record["summary"]}
    rows = []
    for kind, label in OF_ATTENTION.items():
        if entry := entries.get(kind):
            sides = [entry[d] for d in DIRECTIONS]
            of_torch = next((name for name in (FLASH, EFFICIENT, VARLEN) if sides[0]["over"].get(name)), None)
            columns = [[side["over"].get(name) for side in sides] for name in (of_torch, *peers)]
            columns.append([side["over_best"] for side in sides])
            cells = [pair((side["mean"] for side in column), times) if all(column) else "-" for column in columns]
            rows.append([f"attention, {label}", *cells, "attention"])
    return rows


def _of_decode(record: dict, peers: list[str]) -> list[list[str]]:
    entries, rows = {e["family"]: e for e in record["summary"]}, []
    for family, label in OF_DECODE.items():
        if entry := entries.get(family):
            # A peer that runs few of a family's cells has no mean.
            sides = [entry["over"].get(name) for name in (FLASH, *peers)]
            cells = [times(side["mean"]) if side and 2 * side["cases"] > entry["cases"] else "-" for side in sides]
            rows.append([label, *cells, times(entry["over_best"]["mean"]), "decode"])
    return rows


def _of_functions(record: dict, chosen: tuple[tuple[str, str, str], ...], command: str, peers: list[str]) -> list[list[str]]:
    entries = {(e["family"], e["kind"], e["dtype"]): e for e in record["summary"]}
    rows = []
    for family, kind, dtype in chosen:
        if entry := entries.get((family, kind, dtype)):
            best = entry.get("over_best")
            cells = [pair((side[d]["mean"] for d in DIRECTIONS), times) if side else "-" for side in (entry, best)]
            rows.append([f"{family}, {kind}, {dtype}", cells[0], *("-" for _ in peers), cells[1], command])
    return rows


def _of_training(record: dict, peers: list[str]) -> list[list[str]]:
    """The longest sequences: a step's attention, and the whole step."""
    keys, rows = ("attention_ms", "step_ms"), []
    for result in record["results"][-1:]:
        ours, *theirs = ([result["providers"].get(name, {}).get(key) for key in keys] for name in (OURS, TORCH, *peers))
        cells = [
            pair((taken / own for taken, own in zip(peer, ours, strict=True)), times) if all([*ours, *peer]) else "-"
            for peer in theirs
        ]
        label = f"training step, L {result['sizes']['L']}: attention / all of it"
        rows.append([label, *cells, "-", "training"])
    return rows
