"""Makes the docs pages of attention on a GPU from the records: all cells, the general kernels, cached keys, the kernels of
FlashAttention-1 and -2, several GPUs, a training step, and whole models."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable

from .attention.summary import (
    BY_OVERRIDE,
    CUDNN_FLOAT8,
    DEFAULT,
    DENSE,
    FA3_FLOAT8,
    FLOAT8,
    FORWARD,
    GROUPS,
    IN_BFLOAT16,
    MIB,
    QUANTISING,
    over,
)
from .decode import summary as decode_summary
from .distributed import GRAPHS, HOST_LENGTH, METHODS, ONE, PEERS, TWINS
from .family.summary import PROFILED_LENGTH
from .family.summary import PROVIDERS as FAMILY
from .summary import BY_REGISTRY, DIRECTIONS, MATH, OURS, TORCH, geometric_mean
from .tables import heading, number, pair, table, targets_table, times

# --- Attention on a GPU -------------------------------------------------------------------------------------------------------


def _sides(entry: dict, form: Callable[[dict], str]) -> str:
    return " / ".join("-" if side is None else form(side) for side in (entry[d] for d in DIRECTIONS))


def attention_summary_table(record: dict) -> list[str]:
    entries = record["summary"]
    peers = [
        name
        for name in dict.fromkeys(n for e in entries for d in DIRECTIONS for n in (e[d] or {"over": ()})["over"])
        if name not in (MATH, DEFAULT, DENSE)
    ]

    def faster(entry: dict, of: Callable[[dict], dict | None]) -> str:
        cell = _sides(entry, lambda side: times(of(side)["mean"]) if of(side) else "-")
        return "-" if set(cell) <= set("- /") else cell

    rows = []
    for entry in entries:
        worst = [entry[d]["over_best"] for d in DIRECTIONS if entry[d] and entry[d]["over_best"]]
        worst = min(worst, key=lambda side: side["worst"], default=None)
        rows.append(
            [
                f"{entry['family']}: {entry['kind']}",
                str(entry["cases"]),
                _sides(entry, lambda side: number(side["tflop_per_s"])),
                _sides(entry, lambda side: f"{100 * side['share']:.0f}"),
                *(faster(entry, lambda side, name=name: side["over"].get(name)) for name in peers),
                faster(entry, lambda side: side["over_best"]),
                "-" if worst is None else f"{times(worst['worst'])} ({worst['worst_case']}; {worst['peer']})",
            ]
        )
    head = ["forward / backward", "cells", "TFLOP/s", "of matmul, %", *(f"x {name}" for name in peers), "x the fastest"]
    return table([*head, "the worst cell"], rows) if rows else []


def attention_terminal_summary(record: dict) -> list[str]:
    return ["", *attention_summary_table(record), "", *targets_table(record), *unavailable_in(record["results"])]


def cell_table(results: list[dict]) -> list[str]:
    """TFLOP/s, forward / backward; microseconds for short and host cells."""
    group = results[0]["family"]
    names = list(dict.fromkeys(name for r in results for name in r["providers"]))
    rated = group in ("plain", "features", "between", "packed", "spans", "blocks")
    keys = [f"{d}_{'tflop_per_s' if rated else 'ms'}" for d in ("forward", "step" if group == "host" else "backward")]

    def value(entry: dict | None) -> str:
        if entry is None:
            return "-"
        found = [entry.get(key) for key in keys if group != "short" or "forward" in key]
        return " / ".join("-" if v is None else number(v if rated else 1e3 * v) for v in found)

    rows = []
    for r in results:
        ours, best = r["providers"].get(OURS, {}), [over(r, d) for d in DIRECTIONS]
        row = [f"{r['kind']}: {r['case']}" if group != "plain" else r["case"], *(value(r["providers"].get(n)) for n in names)]
        if group != "host":
            shares = [ours.get(f"{d}_share") for d in DIRECTIONS if f"{d}_share" in ours]
            row.append(pair((100 * s for s in shares), lambda s: f"{s:.0f}") or "-")
            row.append(pair((b[0] for b in best if b), times) or "-")
        if rated:
            extra = [r["providers"].get(n, {}).get("beyond_results_bytes") for n in names]
            row.append(" / ".join("-" if e is None else number(e / MIB) for e in extra))
        errors = [r["providers"].get(n, {}).get("error") for n in names]
        row.append(" / ".join("-" if e is None else f"{e:.0e}".replace("e-0", "e-") for e in errors))
        rows.append(row)
    unit = (
        "TFLOP/s, forward / backward" if rated else "us per launch" if group == "short" else "us: call / forward and backward"
    )
    head = [unit, *names, *(["of matmul, %", "x the fastest"] if group != "host" else [])]
    return table([*head, *(["MiB beyond results"] if rated else []), "error"], rows)


def call_table(results: list[dict]) -> list[str]:
    """Wall time of a call, forward / forward and backward; by how much override() and activate() are faster than torch."""
    keys, ways = ("forward_ms", "step_ms"), {"override()": BY_OVERRIDE, "activate()": BY_REGISTRY}
    rows = []
    for r in results:
        took = {name: [r["providers"].get(name, {}).get(key) for key in keys] for name in (TORCH, *ways.values())}
        cells = [[None if ms is None else number(1e3 * ms) for ms in of_one] for of_one in took.values()]
        for own in ways.values():
            pairs = zip(took[TORCH], took[own], strict=True)
            cells.append([times(theirs / ours) if theirs and ours else None for theirs, ours in pairs])
        rows.append([r["case"], *(" / ".join(entry or "-" for entry in of_one) for of_one in cells)])
    head = ["us per call: forward / forward and backward", TORCH, *ways, *(f"x {TORCH}, {way}" for way in ways)]
    return table(head, rows)


def float8_table(results: list[dict]) -> list[str]:
    """TFLOP/s of the forward pass, ratios and errors; a ratio is between two providers, the first one faster if above 1."""
    (direction,) = FORWARD
    names = list(dict.fromkeys(name for r in results for name in r["providers"]))
    ratios = [(OURS, name) for name in (CUDNN_FLOAT8, FA3_FLOAT8, IN_BFLOAT16)]
    ratios = [pair for pair in (*ratios, (QUANTISING, IN_BFLOAT16)) if set(pair) <= set(names)]
    rows = []
    for r in results:
        entries, ours = [r["providers"].get(name) for name in names], r["providers"].get(OURS)
        row = [r["case"], *("-" if e is None else number(e[f"{direction}_tflop_per_s"]) for e in entries)]
        row.append(f"{100 * ours[f'{direction}_share']:.0f}" if ours else "-")
        for pair_of_names in ratios:
            taken, theirs = (r["providers"].get(name, {}).get(f"{direction}_ms") for name in pair_of_names)
            row.append(times(theirs / taken) if taken and theirs else "-")
        row.append(" / ".join("-" if e is None else number(e["beyond_results_bytes"] / MIB) for e in entries))
        rows.append([*row, " / ".join("-" if e is None else f"{100 * e['error']:.2f}" for e in entries)])
    faster = [f"x {theirs}" if own == OURS else f"{own}, x {theirs}" for own, theirs in ratios]
    return table(
        ["TFLOP/s, forward", *names, "of float8 matmul, %", *faster, "MiB beyond results", "relative error, %"],
        rows,
    )


def cell_tables(record: dict) -> list[str]:
    lines = []
    for group, title in GROUPS.items():
        results = [r for r in record["results"] if r["family"] == group]
        if not results:
            continue
        of_group = {"calls": call_table, FLOAT8: float8_table}.get(group, cell_table)
        lines += ["", f"### {title}", "", *of_group(results), *unavailable_in(results)]
    return lines


def unavailable_in(results: list[dict]) -> list[str]:
    """Reasons why providers are missing from these results."""
    reasons = defaultdict(Counter)
    for r in results:
        for name, why in r["unavailable"].items():
            reasons[why][name] += 1
    lines = ["", "Unavailable, in so many of these cells:", ""] if reasons else []
    for why, names in reasons.items():
        lines.append(f"- {', '.join(f'{name} ({count})' for name, count in names.items())}: {why}.")
    return lines


def _attention_heading(record: dict) -> list[str]:
    matmul = [r["matmul"]["tflop_per_s"] for r in record["results"]]
    lines = [*heading(record), ""]
    if matmul:
        took = f"{record['took_seconds']} s, at least {record['seconds']:g} s and {record['rounds']} rounds per cell"
        lines += [f"{took}; matmul {number(min(matmul))} to {number(max(matmul))} TFLOP/s.", ""]
    if record.get("fa4"):
        lines += [f"FA4 is flash-attn-4 {record['fa4']}.", ""]
    if record["wrong"]:
        lines += [f"{record['wrong']} cells of ours were wrong and are not here.", ""]
    return lines


def attention_page(record: dict) -> list[str]:
    lines = _attention_heading(record)
    met = sum(target["met"] for target in record["targets"])
    lines += [
        f"{met} of {len(record['targets'])} targets are met.",
        "",
        *targets_table(record),
        "",
        *attention_summary_table(record),
    ]
    if any(r["family"] == "plain" for r in record["results"]):
        lines += ["", "![Plain attention: TFLOP/s over the length, ours and the peers](../figures/attention_plain.png)"]
    return lines + cell_tables(record)


def float8_page(record: dict) -> list[str]:
    known = [f"{name} {record[key]}" for key, name in (("cudnn", "cuDNN"), ("cudnn_frontend", "frontend")) if key in record]
    return ["## Products in float8", "", *attention_page(record), *(["", f"{', '.join(known)}."] if known else [])]


# --- The general kernels ------------------------------------------------------------------------------------------------------


def general_means(record: dict) -> list[str]:
    """Geometric means of FlashAttention-2's time over ours, over all cells and over the plain ones, and every ratio below 1."""
    found = [(r, d, over(r, d)) for r in record["results"] for d in DIRECTIONS]
    ratios = [(r, d, best[0]) for r, d, best in found if best]
    rows = []
    for name, families in (("all", set(GROUPS)), ("plain", {"plain"})):
        of_one = {d: [x for r, direction, x in ratios if direction == d and r["family"] in families] for d in DIRECTIONS}
        if any(of_one.values()):
            means = [times(geometric_mean(of_one[d])) if of_one[d] else "-" for d in DIRECTIONS]
            rows.append([name, " / ".join(str(len(of_one[d])) for d in DIRECTIONS), *means])
    slower = sorted((x, r["kind"], r["case"], r["dtype"], d) for r, d, x in ratios if x < 1)
    lines = [*table(["x FlashAttention-2, geometric means", "cells", *DIRECTIONS], rows), ""] if rows else []
    lines.append(f"{len(slower)} of {len(ratios)} ratios are below 1{':' if slower else '.'}")
    if slower:
        below = [[f"{kind}: {case}, {dtype}", direction, f"{x:.3f}"] for x, kind, case, dtype, direction in slower]
        lines += ["", *table(["below 1", "", "x FlashAttention-2"], below)]
    return lines


def general_page(record: dict) -> list[str]:
    """The general kernels on one GPU, compared with FlashAttention-2; and torch's function, with ours in its place."""
    lines = [f"## {record['device']}", "", *_attention_heading(record), *general_means(record)]
    return [*lines, "", *attention_summary_table(record), *cell_tables(record)]


def general_terminal_summary(record: dict) -> list[str]:
    calls = [r for r in record["results"] if r["family"] == "calls"]
    return ["", *general_means(record), "", *attention_summary_table(record), "", *(call_table(calls) if calls else [])]


# --- Cached keys on a GPU -----------------------------------------------------------------------------------------------------


def decode_summary_table(record: dict) -> list[str]:
    peers = list(dict.fromkeys(name for entry in record["summary"] for name in entry["over"]))
    rows = []
    for entry in record["summary"]:
        sides = [*(entry["over"].get(name) for name in peers), entry["over_best"]]
        worst = entry["over_best"]
        row = [decode_summary.FAMILIES[entry["family"]], str(entry["cases"]), f"{100 * entry['share']:.0f}"]
        row += ["-" if side is None else times(side["mean"]) for side in sides]
        rows.append([*row, "-" if worst is None else f"{times(worst['worst'])} ({worst['worst_case']}; {worst['peer']})"])
    head = ["times faster", "cells", "of the reads, %", *(f"x {name}" for name in peers), "x the fastest", "the worst cell"]
    return table(head, rows) if rows else []


def decode_cell_table(results: list[dict]) -> list[str]:
    """Microseconds of every provider, our share of the read rate, the wanted and the previously known time."""
    names = list(dict.fromkeys(name for r in results for name in r["providers"]))
    rows = []
    for r in results:
        entries = [r["providers"].get(name) for name in names]
        ours, best = r["providers"].get(OURS), decode_summary.over(r)
        row = [f"{r['kind']}: {r['case']}", *("-" if e is None else number(e["us"]) for e in entries)]
        row.append(number(r["bytes"] / 1e6))
        row += [number(ours["gb_per_s"]), f"{100 * ours['share']:.0f}", number(ours["tflop_per_s"])] if ours else ["-"] * 3
        row.append(times(best[0]) if best else "-")
        row.append(" / ".join("-" if us is None else f"{us:g}" for us in (r["wanted_us"], r["known_us"])))
        rows.append([*row, " / ".join("-" if e is None else f"{e['error']:.0e}".replace("e-0", "e-") for e in entries)])
    head = ["us per call", *names, "MB", "GB/s", "of the reads, %", "TFLOP/s", "x the fastest", "wanted / known", "error"]
    return table(head, rows)


def decode_page(record: dict) -> list[str]:
    results = record["results"]
    lines = [*heading(record), ""]
    if rates := [r["read"]["gb_per_s"] for r in results]:
        took = f"{record['took_seconds']} s, at least {record['seconds']:g} s and {record['rounds']} rounds per cell"
        lines += [f"{took}; reads alone, by {results[0]['read']['by']}: {number(min(rates))} to {number(max(rates))} GB/s.", ""]
    if record["wrong"]:
        lines += [f"{record['wrong']} cells of ours were wrong and are not here.", ""]
    met = sum(target["met"] for target in record["targets"])
    lines += [f"{met} of {len(record['targets'])} targets are met.", "", *targets_table(record), ""]
    lines += decode_summary_table(record)
    if any(r["family"] == "plain" for r in results):
        lines += ["", "![One query over contiguous caches: time over length and batch, and peers](../figures/decode.png)"]
    for family, title in decode_summary.FAMILIES.items():
        if members := [r for r in results if r["family"] == family]:
            lines += ["", f"### {title}", "", *decode_cell_table(members), *unavailable_in(members)]
    return lines


def decode_terminal_summary(record: dict) -> list[str]:
    return ["", *decode_summary_table(record), "", *targets_table(record)]


# --- The family ---------------------------------------------------------------------------------------------------------------

SHOWN_HEAD_DIM = 128  # of the tables of bytes; the record has other head dims


def family_rates(record: dict) -> list[str]:
    """TFLOP/s of every provider, with the lengths of a kind in one cell."""
    kinds = defaultdict(list)
    for result in record["results"]:
        kinds[result["kind"]].append(result)
    head = [f"forward, TFLOP/s at L {' / '.join(str(r['sizes']['L']) for r in next(iter(kinds.values())))}", *kinds]
    rows = []
    for name in FAMILY:
        entries = {kind: [r["providers"].get(name) for r in of_kind] for kind, of_kind in kinds.items()}
        if any(any(of_kind) for of_kind in entries.values()):
            cells = [" / ".join(number(e["tflop_per_s"]) if e else "-" for e in of_kind) for of_kind in entries.values()]
            rows.append([name, *cells])
    rows.append(["matmul", *(" / ".join(number(r["matmul"]["tflop_per_s"]) for r in of_kind) for of_kind in kinds.values())])
    return table(head, rows)


def family_bytes(timed: dict, profiled: dict | None) -> list[str]:
    """For one cell: computed bytes and the profiler's counts."""

    def gigabytes(values: dict | None, kind: str = "") -> str:
        return pair(values[f"{kind}{way}"] / 1e9 for way in ("read", "written")) if values else "-"

    rows = [["each tensor once", gigabytes(timed["least"]), *(["", "", ""] if profiled else [])]]
    for name in FAMILY:
        entry, counted = timed["providers"].get(name), (profiled or {}).get("providers", {}).get(name)
        if entry:
            row = [name, gigabytes(entry.get("asked"))]
            if profiled:
                row += [gigabytes(counted, "l2_"), gigabytes(counted, "dram_"), str(counted["kernels"]) if counted else "-"]
            rows.append(row)
    counts = ["L2, counted", "DRAM, counted", "kernels"] if profiled else []
    return table([f"{timed['case']}: GB read / written", "SMs ask of L2, arithmetic", *counts], rows)


def family_page(record: dict) -> list[str]:
    lines = [*heading(record), "", *family_rates(record)]
    reasons = defaultdict(list)
    for result in record["results"]:
        for name, why in result["unavailable"].items():
            reasons[name, why].append(result["case"])
    lines += [line for (name, why), cases in reasons.items() for line in ("", f"{name}, {'; '.join(cases)}: {why}.")]
    traffic = record.get("traffic", {})
    profiled = {r["case"]: r for r in traffic.get("results", [])}
    for result in record["results"]:
        counted = profiled.get(result["case"])
        if result["sizes"]["E"] == SHOWN_HEAD_DIM and (counted or result["sizes"]["L"] == PROFILED_LENGTH):
            lines += ["", *family_bytes(result, counted)]
    if why := traffic.get("unavailable"):
        lines += ["", f"The profiler counted nothing: {why}."]
    return lines


# --- Several GPUs -------------------------------------------------------------------------------------------------------------


def distributed_page(record: dict) -> list[str]:
    """A row per cell: milliseconds and shares of ideal scaling; exposed communication; memory; and the host's time."""
    lines = [
        *heading(record),
        "",
        f"{record['ranks']} ranks of one host, NCCL {record['nccl']}, {record['results'][0]['dtype']}.",
    ]
    torchs = ["torch, flash, allgather", "torch, cuDNN, allgather", f"torch, {BY_REGISTRY}"]
    by_time, by_share, by_bytes, by_host = [], [], [], []
    for result in record["results"]:
        of = result["providers"]
        cell = [result["kind"], f"{result['sizes']['L']:,}", f"{result['sizes']['heads']} : {result['sizes']['key heads']}"]

        def entry(name: str, key: str, form: Callable[[float], str], of=of) -> str:
            return form(of[name][key]) if key in of.get(name, {}) else "-"

        # ring-flash-attn has one method for plain and one for packed attention; both use the same column.
        ring = next((PEERS[name] for name in ("zigzag", "llama3") if PEERS[name] in of), PEERS["zigzag"])
        peers = [*torchs, ring, PEERS["ulysses"]]
        graphs = [entry(name, "ms", number) for name in GRAPHS]
        if result["sizes"]["L"] == HOST_LENGTH:
            by_host.append([*cell, *(entry(name, "host_ms", number) for name in (ONE, *METHODS.values(), *peers, *GRAPHS))])
            continue
        by_time.append([*cell, *(entry(name, "ms", number) for name in (ONE, *METHODS.values(), *peers)), pair_of(graphs)])
        exposed = [
            number(of[name]["ms"] - of[TWINS[method]]["ms"]) if TWINS[method] in of else "-" for method, name in METHODS.items()
        ]
        scaling = [entry(name, "share_of_ideal", "{:.2f}".format) for name in (*METHODS.values(), *peers)]
        scaling += [pair_of([entry(name, "share_of_ideal", "{:.2f}".format) for name in GRAPHS]), pair_of(exposed)]
        by_share.append([*cell, result["auto"], *scaling])
        by_bytes.append([*cell, *(entry(n, "share_of_least_bytes", times) for n in (ONE, *METHODS.values(), *peers))])
    names = ["Ulysses", "gathered", "torch flash", "torch cuDNN", "torch, our kernels", "ring-flash-attn", "yunchang"]
    cells, pairs = ["", "L", "heads"], "Ulysses / gathered"
    hosts = ["one GPU", *names, "graph, Ulysses", "graph, gathered"]
    return [
        *lines,
        "",
        "Forward and backward, ms; the slowest rank. The last column is ours in a CUDA graph.",
        "",
        *table([*cells, "one GPU", *names, f"graph, {pairs}"], by_time),
        "",
        "Shares of ideal scaling, the time of one GPU over the ranks; and milliseconds of communication that nothing hid.",
        "",
        *table([*cells, "auto", *names, f"graph, {pairs}", f"exposed, {pairs}"], by_share),
        "",
        "Memory at the peak, over a rank's share of inputs, output and gradients, which are among it; one GPU's likewise.",
        "",
        *table([*cells, "one GPU", *names], by_bytes),
        *(["", "What a host takes to issue a step, ms.", "", *table([*cells, *hosts], by_host)] if by_host else []),
    ]


def pair_of(entries: list[str]) -> str:
    return "-" if set(entries) == {"-"} else " / ".join(entries)


# --- The training step --------------------------------------------------------------------------------------------------------


def training_page(record: dict) -> list[str]:
    names, rows = list(record["results"][0]["providers"]), []
    peers = [name for name in names if name not in (OURS, BY_REGISTRY)]
    for result in record["results"]:
        of_one = {n: [entry.get(k) for k in ("attention_ms", "step_ms")] for n, entry in result["providers"].items()}
        if not all(of_one[OURS]):
            continue
        faster = [" / ".join(times(theirs / ours) for theirs, ours in zip(of_one[p], of_one[OURS], strict=True)) for p in peers]
        rows.append([str(result["sizes"]["L"]), *(" / ".join(map(number, of_one[n])) for n in names), *faster])
    head = ["a training step: attention / all of it, ms; L", *names, *(f"x {p}" for p in peers)]
    model = f"{record['layers']} layers, {record['heads']} heads of {record['head_dim']}"
    model += f", bfloat16, causal, {record['tokens']} tokens per step"
    return [*heading(record), "", f"{model}; forward and backward.", "", *table(head, rows)]


# --- Models of transformers ---------------------------------------------------------------------------------------------------


def models_page(record: dict) -> list[str]:
    """A row per model, length and pass: milliseconds and GiB of each implementation, and our speedup. Then generation."""
    results = [result for result in record["results"] if result["family"] == "models"]
    lines = [*heading(record), "", f"transformers {record['transformers']}, {results[0]['dtype']}, one sequence."]
    names, rows = record["implementations"], []
    peers = [name for name in names if name != OURS]
    for result in results:
        for what in ("prefill", "step"):
            entries = {n: result["providers"].get(n, {}) for n in names}
            took = {n: e[f"{what}_ms"] for n, e in entries.items() if f"{what}_ms" in e}
            cells = [
                pair((took[n], entries[n][f"{what}_bytes"] / 2**30)) if n in took else result["unavailable"].get(n, "-")
                for n in names
            ]
            faster = [times(took[p] / took[OURS]) if p in took and OURS in took else "-" for p in peers]
            rows.append([result["kind"], str(result["sizes"]["L"]), what, *cells, *faster])
    head = ["model", "L", "ms / GiB", *names, *(f"x {peer}" for peer in peers)]
    return [*lines, "", *table(head, rows), *generation_table(record)]


def generation_table(record: dict) -> list[str]:
    """A row per prompt and cache: milliseconds of the prompt and of a token, and our speedup over the fastest peer."""
    results, rows = [result for result in record["results"] if result["family"] == "generation"], []
    names = list(dict.fromkeys(name for result in results for name in (*result["providers"], *result["unavailable"])))
    ours = [name for name in names if name.startswith(OURS)]
    for result in results:
        found = result["providers"]
        row = [result["options"]["cache"], str(result["sizes"]["B"]), str(result["sizes"]["L"])]
        for n in names:
            row.append(pair(found[n][what] for what in ("prompt_ms", "token_ms") if what in found[n]) if n in found else "-")
        for what in ("prompt_ms", "token_ms"):
            took = {name: entry[what] for name, entry in found.items() if what in entry}
            best = min((ms for name, ms in took.items() if name not in ours), default=None)
            row += [times(best / took[n]) if best and n in took else "-" for n in ours]
        rows.append(row)
    if not rows:
        return []
    head = ["cache", "B", "prompt", *names, *(f"x the fastest peer, {what}: {n}" for what in ("prompt", "token") for n in ours)]
    return ["", "Llama 3, generation: ms of the prompt / of a token; one number: of a token.", "", *table(head, rows)]
