"""Every Markdown table of the docs, made from the records in benchmarks/results, and the pages' generated parts."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from textwrap import wrap

from .attention.summary import CUDNN, DEFAULT, DENSE, EFFICIENT, FA3, GROUPS, MIB, VARLEN, over
from .decode import summary as decode_summary
from .distributed import GRAPHS, METHODS, ONE, PEERS, TWINS
from .family.summary import PROFILED_LENGTH
from .family.summary import PROVIDERS as FAMILY
from .paper.summary import (
    BASELINE,
    CHOSEN,
    CLAIMS,
    FASTER,
    LEAST_CLASSES,
    SOFTMAX,
    TOP_BASELINE,
    TOP_FASTER,
    measured,
    over_one_read,
    speed_up,
)
from .summary import BY_REGISTRY, DIRECTIONS, FLASH, MATH, OURS


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


# --- Row functions, and attention on the CPU ----------------------------------------------------------------------------------


def summary_table(record: dict) -> list[str]:
    """A row per (function, kind, peer), the dtypes side by side."""
    dtypes = list(dict.fromkeys(entry["dtype"] for entry in record["summary"]))
    groups = defaultdict(dict)
    for entry in record["summary"]:
        groups[entry["family"], entry["kind"], entry["against"]][entry["dtype"]] = entry
    shares = any("share" in entry["forward"] for entry in record["summary"])
    rows = []
    for (function, kind, against), by_dtype in groups.items():
        cases = dict.fromkeys(str(e["cases"]) for e in by_dtype.values())
        row = [f"{function}, {kind}", against, ", ".join(cases)]
        for dtype in dtypes:
            entry = by_dtype.get(dtype)
            row.append("-" if entry is None else _faster(entry))
            if shares:
                row.append("-" if entry is None else _share(entry))
        rows.append(row)
    head = ["times faster: forward / backward (worst)", "than", "cases"]
    for dtype in dtypes:
        head += [dtype, "share, %"] if shares else [dtype]
    return table(head, rows)


def _faster(entry: dict) -> str:
    sides = [entry[direction] for direction in DIRECTIONS]
    mean = pair((s["mean"] for s in sides), times)
    return mean if entry["cases"] == 1 else f"{mean} ({pair((s['worst'] for s in sides), times)})"


def _share(entry: dict) -> str:
    sides = [entry[direction].get("share") for direction in DIRECTIONS]
    return pair((100 * s for s in sides), lambda s: f"{s:.0f}") if all(sides) else "-"


def case_tables(record: dict) -> list[str]:
    """Every case, in one table per function."""
    by_function = defaultdict(list)
    for result in record["results"]:
        by_function[result["family"]].append(result)
    lines = []
    for function, results in by_function.items():
        names = list(dict.fromkeys(name for r in results for name in r["providers"]))
        baseline = next((name for name in ("matmul", "copy") if name in results[0]), None)
        head, moved = [f"{function}: forward / backward, ms", "dtype", *names, "times faster"], False
        if baseline == "matmul":
            head += ["GFLOP/s", "of matmul, %"]
        elif baseline == "copy":
            head += ["GB/s", "copy (to new memory), GB/s", "of copy, %"]
        elif moved := all("forward_gb_per_s" in e for r in results for e in r["providers"].values()):
            head += ["GB/s"]
        rows = []
        for r in results:
            entries = [r["providers"].get(name) for name in names]
            present = [e for e in entries if e]
            row = [r["case"], r["dtype"]]
            row += ["-" if e is None else pair(e[f"{d}_ms"] for d in DIRECTIONS) for e in entries]
            row.append(pair((r["ratio"][d] for d in DIRECTIONS), times) if r["ratio"] else "-")
            if baseline or moved:
                row += _rates(r, baseline)
            row.append(pair(e["step_extra_bytes"] / 2**20 for e in present))
            row.append(pair((e["error"] for e in present), lambda e: f"{e:.0e}".replace("e-0", "e-")))
            rows.append(row)
        lines += ["", *table([*head, "memory of a step, MiB", "error"], rows)]
        if any(e.get("in_graphs") for r in results for e in r["providers"].values()):
            waits = dict.fromkeys(name for r in results for name, e in r["providers"].items() if not e["in_graphs"])
            rest = f"; between events, as they wait for the device: {', '.join(waits)}" if waits else ""
            lines += ["", f"All as replays of CUDA graphs{rest}."]
        for name, reason in dict.fromkeys((name, reason) for r in results for name, reason in r["unavailable"].items()):
            cases = sum(r["unavailable"].get(name) == reason for r in results)
            lines += ["", f"{name} is unavailable in {cases} of these: {reason}."]
    return lines


def _rates(result: dict, baseline: str | None) -> list[str]:
    """Our rates, the baseline's and our shares of it; without a baseline, only our rates."""
    ours, unit = result["providers"].get(OURS), "gflop_per_s" if baseline == "matmul" else "gb_per_s"
    cells = [pair(ours[f"{d}_{unit}"] for d in DIRECTIONS) if ours else "-"]
    if baseline == "copy":
        cells.append(f"{number(result['copy']['gb_per_s'])} ({number(result['copy']['new_gb_per_s'])})")
    if baseline:
        cells.append(pair((100 * ours[f"{d}_share"] for d in DIRECTIONS), lambda s: f"{s:.0f}") if ours else "-")
    return cells


def conditions(record: dict) -> list[str]:
    """How the run was made, beyond the heading."""
    facts = []
    if "took_seconds" in record:
        facts.append(f"{record['took_seconds']} s, at least {record['seconds']:g} s and {record['rounds']} rounds per case")
    if "memory" in record:
        facts.append(f"results' memory: {record['memory']}")
    if record.get("mhz"):
        facts.append(f"{record['mhz']:.0f} MHz")
    if "load_at_end" in record:
        facts.append(
            f"load {record['load_at_start']} at the start, {record['load_at_end']} at the end, this run's own included"
        )
    for dtype, rates in record.get("matmul", {}).items():
        if "median" in rates:
            start, median, best, end = (number(rates[at]) for at in ("at_start", "median", "best", "at_end"))
            facts.append(f"matmul {dtype}, GFLOP/s: {start} at the start, {median} during (best {best}), {end} at the end")
    return ["", "; ".join(facts) + "."] if facts else []


def best_table(record: dict) -> list[str]:
    """Ours beside the fastest of several peers; empty if no case had several."""
    entries = [entry for entry in record["summary"] if entry.get("over_best")]
    rows = []
    for entry in entries:
        sides = entry["over_best"].values()
        worst = min(sides, key=lambda side: side["worst"])
        row = [f"{entry['family']}, {entry['kind']}", entry["dtype"]]
        row += [pair((s["mean"] for s in sides), times), pair((s["worst"] for s in sides), times)]
        rows.append([*row, f"{worst['worst_case']}: {worst['peer']}"])
    head = [
        "times faster than the fastest peer: forward / backward / both",
        "dtype",
        "mean",
        "worst",
        "the worst, and its peer",
    ]
    return ["", *table(head, rows)] if rows else []


def case_page(record: dict) -> list[str]:
    lines = [*heading(record), *conditions(record)]
    if targets := targets_table(record):
        lines += ["", *targets]
    return [*lines, "", *summary_table(record), *best_table(record), *case_tables(record)]


def odd_page(record: dict) -> list[str]:
    """Rows of any width: a row per width, ours beside the fastest peer and the copy."""
    by_width, columns = defaultdict(dict), {}
    for result in record["results"]:
        column = result["family"], result["dtype"]
        columns[column] = f"{result['family']} {result['dtype'].replace('float', 'fp').replace('bfp', 'bf')}"
        by_width[result["sizes"]["classes"]][column] = result
    rows = [[str(width), *(_odd_cell(of_width.get(c)) for c in columns)] for width, of_width in sorted(by_width.items())]
    about = "Rows of any width: times faster than the fastest peer, forward / backward (share of the copy, %)."
    lines = [about, "", *heading(record), *conditions(record), "", *targets_table(record), ""]
    return [*lines, *table(["classes", *columns.values()], rows)]


def _odd_cell(result: dict | None) -> str:
    if not result or OURS not in result["providers"]:
        return "-"
    ours, best = result["providers"][OURS], result["over_best"]
    shares = pair((100 * ours[f"{d}_share"] for d in DIRECTIONS), lambda s: f"{s:.0f}")
    return f"{pair((best[d]['times'] for d in DIRECTIONS), times) if best else '-'} ({shares})"


def terminal_summary(record: dict) -> list[str]:
    lines = ["", "ours beside torch, times faster: geometric mean forward / backward (worst case), share of the baseline"]
    for entry in record["summary"]:
        sides = [entry[direction] for direction in DIRECTIONS]
        means = " / ".join(f"{s['mean']:.2f}" for s in sides)
        worst = " / ".join(f"{s['worst']:.2f}" for s in sides)
        shares = " / ".join(f"{100 * s['share']:.0f}" for s in sides if "share" in s)
        lines.append(
            f"{entry['family']:13} {entry['kind']:16} {entry['dtype']:8} {entry['cases']:2} cases  {means:>13} ({worst})"
            + (f", {shares} % of {entry['share_of']}" if shares else "")
            + f", against {entry['against']}"
        )
    for entry in record["summary"]:
        if best := entry["over_best"]:
            sides = (f"{what} {s['mean']:.2f} ({s['worst']:.2f}, {s['worst_case']}, {s['peer']})" for what, s in best.items())
            lines.append(f"{entry['family']:13} {entry['kind']:16} {entry['dtype']:8} over the best: {', '.join(sides)}")
    if record["noise"]:
        lines += [
            "",
            f"noise {record['noise']:.2f}: the baseline's median time over its least; little above 1 on a quiet machine",
        ]
    lines += ["", "targets"]
    for target in record["targets"]:
        if "most" in target:
            what = f"{target['measured']}, less than {target['most']} wanted"
        else:
            wanted = [f"mean {target['least']}"] * (target["least"] is not None)
            wanted += [f"each {target['least_each']}"] * (target["least_each"] is not None)
            what = (
                f"mean {target['mean']:.2f}, worst {target['worst']:.2f} ({target['worst_case']}); wanted {', '.join(wanted)}"
            )
        lines.append(f"{'met   ' if target['met'] else 'MISSED'} {target['target']}: {what}")
    return lines


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
    return ["", *attention_summary_table(record), "", *targets_table(record)]


def cell_table(results: list[dict]) -> list[str]:
    """TFLOP/s, forward / backward; microseconds for short and host cells."""
    group = results[0]["family"]
    names = list(dict.fromkeys(name for r in results for name in r["providers"]))
    rated = group in ("plain", "features", "between", "packed")
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


def cell_tables(record: dict) -> list[str]:
    lines = []
    for group, title in GROUPS.items():
        results = [r for r in record["results"] if r["family"] == group]
        if not results:
            continue
        lines += ["", f"### {title}", "", *cell_table(results), *unavailable_in(results)]
    return lines


def unavailable_in(results: list[dict]) -> list[str]:
    """A list of the reasons that providers are not in these results."""
    reasons = defaultdict(Counter)
    for r in results:
        for name, why in r["unavailable"].items():
            reasons[why][name] += 1
    lines = ["", "Unavailable, in so many of these cells:", ""] if reasons else []
    for why, names in reasons.items():
        lines.append(f"- {', '.join(f'{name} ({count})' for name, count in names.items())}: {why}.")
    return lines


def attention_page(record: dict) -> list[str]:
    matmul = [r["matmul"]["tflop_per_s"] for r in record["results"]]
    lines = [*heading(record), ""]
    if matmul:
        took = f"{record['took_seconds']} s, at least {record['seconds']:g} s and {record['rounds']} rounds per cell"
        lines += [f"{took}; matmul {number(min(matmul))} to {number(max(matmul))} TFLOP/s.", ""]
    if record["wrong"]:
        lines += [f"{record['wrong']} cells of ours were wrong and are not here.", ""]
    met = sum(target["met"] for target in record["targets"])
    lines += [
        f"{met} of {len(record['targets'])} targets are met.",
        "",
        *targets_table(record),
        "",
        *attention_summary_table(record),
    ]
    if any(r["family"] == "plain" for r in record["results"]):
        lines += ["", "![Plain attention: TFLOP/s over the length, ours beside the peers](../figures/attention_plain.png)"]
    return lines + cell_tables(record)


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
    """Microseconds of every provider, what of the reads' rate ours is, and what was wanted and known before."""
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


# --- Several GPUs -------------------------------------------------------------------------------------------------------------


def distributed_page(record: dict) -> list[str]:
    """A row per cell: milliseconds and shares of ideal scaling; what communication is not hidden; memory."""
    lines = [
        *heading(record),
        "",
        f"{record['ranks']} ranks of one host, NCCL {record['nccl']}, {record['results'][0]['dtype']}.",
    ]
    torchs = ["torch, flash, allgather", "torch, cuDNN, allgather", f"torch, {BY_REGISTRY}"]
    by_time, by_share, by_bytes = [], [], []
    for result in record["results"]:
        of = result["providers"]
        cell = [result["kind"], f"{result['sizes']['L']:,}", f"{result['sizes']['heads']} : {result['sizes']['key heads']}"]

        def entry(name: str, key: str, form: Callable[[float], str], of=of) -> str:
            return form(of[name][key]) if key in of.get(name, {}) else "-"

        # ring-flash-attn has one method for plain and one for packed attention: they share a column.
        ring = next((PEERS[name] for name in ("zigzag", "llama3") if PEERS[name] in of), PEERS["zigzag"])
        peers = [*torchs, ring, PEERS["ulysses"]]
        graphs = [entry(name, "ms", number) for name in GRAPHS]
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
    ]


def pair_of(entries: list[str]) -> str:
    return "-" if set(entries) == {"-"} else " / ".join(entries)


# --- Models of transformers ---------------------------------------------------------------------------------------------------


def models_page(record: dict) -> list[str]:
    """A row per model, length and pass: milliseconds and GiB of each implementation, and how many times ours is as fast."""
    lines = [*heading(record), "", f"transformers {record['transformers']}, {record['results'][0]['dtype']}, one sequence."]
    names, rows = record["implementations"], []
    peers = [name for name in names if name != OURS]
    for result in record["results"]:
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
    return [*lines, "", *table(head, rows)]


# --- The README ---------------------------------------------------------------------------------------------------------------

# What of each record the README shows, and what it calls it
OF_ATTENTION = {
    ("plain", "E 64, causal"): "causal, head dim 64",
    ("plain", "E 128, causal"): "causal, head dim 128",
    ("plain", "E 256, causal"): "causal, head dim 256",
    ("features", "bool mask"): "bool mask",
    ("features", "bias with gradient"): "bias with gradient",
    ("features", "window"): "window",
    ("features", "E 512"): "head dim 512",
    ("features", "float32"): "float32",
    ("packed", "128 to 4096"): "packed sequences",
}
OF_ROWS = (
    ("softmax", "short rows", "bfloat16"),
    ("softmax", "long rows", "bfloat16"),
    ("cross_entropy", "long rows", "bfloat16"),
    ("topk_softmax", "long rows", "float32"),
)
OF_CPU = (
    ("attention", "full", "float32"),
    ("attention", "causal", "bfloat16"),
    ("softmax", "long rows", "float32"),
    ("cross_entropy", "long rows", "float32"),
)


OF_DECODE = {
    "plain": "decoding, contiguous caches",
    "paged": "decoding, pages",
    "options": "decoding, windows, sinks, lengths, head dims",
    "prefill": "prefill in chunks over cached keys",
}


def readme_page(attention: dict, decode: dict, cuda: dict, cpu: dict, training: dict) -> list[str]:
    """One table from five records: ours beside torch, cuDNN, FA3 and the fastest peer of all."""
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
    head = ["times faster: forward / backward", "than torch", "than cuDNN", "than FA3", "than the fastest peer", "`bench`"]
    rows = [
        *_of_attention(attention),
        *_of_decode(decode),
        *_of_functions(cuda, OF_ROWS, "rows, GPU"),
        *_of_functions(cpu, OF_CPU, "rows, CPU"),
        *_of_training(training),
    ]
    return [*facts, "", *table(head, rows)]


def _in_a_sentence(record: dict) -> str:
    return ". ".join(line.strip("*.") for line in heading(record) if line) + "."


def _of_attention(record: dict) -> list[list[str]]:
    entries = {(e["family"], e["kind"]): e for e in record["summary"]}
    rows = []
    for kind, label in OF_ATTENTION.items():
        if entry := entries.get(kind):
            sides = [entry[d] for d in DIRECTIONS]
            of_torch = next((name for name in (FLASH, EFFICIENT, VARLEN) if sides[0]["over"].get(name)), None)
            columns = [[side["over"].get(name) for side in sides] for name in (of_torch, CUDNN, FA3)]
            columns.append([side["over_best"] for side in sides])
            cells = [pair((side["mean"] for side in column), times) if all(column) else "-" for column in columns]
            rows.append([f"attention, {label}", *cells, "attention"])
    return rows


def _of_decode(record: dict) -> list[list[str]]:
    entries, rows = {e["family"]: e for e in record["summary"]}, []
    for family, label in OF_DECODE.items():
        if entry := entries.get(family):
            # A peer that takes few of a family's cells has no mean over it.
            sides = [entry["over"].get(name) for name in (FLASH, CUDNN, FA3)]
            cells = [times(side["mean"]) if side and 2 * side["cases"] > entry["cases"] else "-" for side in sides]
            rows.append([label, *cells, times(entry["over_best"]["mean"]), "decode"])
    return rows


def _of_functions(record: dict, chosen: tuple[tuple[str, str, str], ...], command: str) -> list[list[str]]:
    entries = {(e["family"], e["kind"], e["dtype"]): e for e in record["summary"]}
    rows = []
    for family, kind, dtype in chosen:
        if entry := entries.get((family, kind, dtype)):
            best = entry.get("over_best")
            cells = [pair((side[d]["mean"] for d in DIRECTIONS), times) if side else "-" for side in (entry, best)]
            rows.append([f"{family}, {kind}, {dtype}", cells[0], "-", "-", cells[1], command])
    return rows


def _of_training(record: dict) -> list[list[str]]:
    """The shortest and the longest sequences: the attention of a step, and all of the step."""
    keys, rows = ("attention_ms", "step_ms"), []
    for result in record["results"][:: max(1, len(record["results"]) - 1)]:
        ours, default, fa3 = (
            [result["providers"].get(name, {}).get(key) for key in keys] for name in (OURS, "torch's default", FA3)
        )
        cells = [
            pair((theirs / own for theirs, own in zip(peer, ours, strict=True)), times) if all([*ours, *peer]) else "-"
            for peer in (default, fa3)
        ]
        label = f"training step, L {result['sizes']['L']}: attention / all of it"
        rows.append([label, cells[0], "-", cells[1], "-", "training"])
    return rows


# --- The paper ----------------------------------------------------------------------------------------------------------------


def claims_table(record: dict) -> list[str]:
    batches = measured(record)
    rows = []
    for what, claim in CLAIMS.items():
        name = "online" if what == SOFTMAX else "online, fused"
        text = "softmax, online over safe" if what == SOFTMAX else "softmax and top 5, online and fused over safe and unfused"
        row = [text, f"up to {claim:g}"]
        for results in batches.values():
            ups = {v: speed_up(r, what, name) for v, r in results.items() if v >= LEAST_CLASSES}
            least, most = min(ups, key=ups.get), max(ups, key=ups.get)
            row.append(f"{times(ups[least])} (V {least}) to {times(ups[most])} (V {most})")
        rows.append(row)
    head = ["times faster", "paper, V100", *(f"here, batch {b}, V >= {LEAST_CLASSES}" for b in batches)]
    return table(head, rows)


def by_classes(record: dict, what: str) -> list[str]:
    baseline, faster = (BASELINE, FASTER) if what == SOFTMAX else (TOP_BASELINE, TOP_FASTER)
    batches, read = measured(record), [] if what == SOFTMAX else ["ours / one read"]
    head = ["V"]
    for batch in batches:
        head += [f"batch {batch}: {baseline}, us", *faster, *read]
    rows = []
    for classes in sorted({v for results in batches.values() for v in results}):
        row = [str(classes)]
        for results in batches.values():
            row += _cells(results.get(classes), what, baseline, faster, read)
        rows.append(row)
    return table(head, rows)


def by_k(record: dict) -> list[str]:
    batches = measured(record)
    head = ["V", "k"]
    for batch in batches:
        head += [f"batch {batch}: {TOP_BASELINE}, us", *TOP_FASTER, "ours / one read"]
    tops = [what for what in record["results"][0]["us"] if what != SOFTMAX]
    rows = []
    for classes in CHOSEN:
        for what in tops if any(classes in results for results in batches.values()) else ():
            row = [str(classes), what.split()[1]]
            for results in batches.values():
                row += _cells(results.get(classes), what, TOP_BASELINE, TOP_FASTER, ["ours / one read"])
            rows.append(row)
    return table(head, rows)


def _cells(result: dict | None, what: str, baseline: str, faster: tuple[str, ...], read: list[str]) -> list[str]:
    if result is None:
        return ["-"] * (1 + len(faster) + len(read))
    cells = [number(result["us"][what][baseline]), *(times(speed_up(result, what, name)) for name in faster)]
    return cells + [times(over_one_read(result, what))] * len(read)


def paper_page(record: dict) -> list[str]:
    too_large = [
        f"V {r['sizes']['classes']} at batch {r['sizes']['rows']} ({r['too_large']})"
        for r in record["results"]
        if "too_large" in r
    ]
    return [
        *heading(record),
        "",
        *claims_table(record),
        "",
        "Softmax: the safe softmax in microseconds, then how many times faster than it the others are.",
        "",
        *by_classes(record, SOFTMAX),
        "",
        "Softmax and top 5: safe softmax, then top 5 of its result, in microseconds; how many times faster the others are.",
        "",
        *by_classes(record, "top 5"),
        "",
        "The same by k.",
        "",
        *by_k(record),
        *(["", f"Too large for this GPU: {'; '.join(too_large)}."] if too_large else []),
    ]


# --- The family ---------------------------------------------------------------------------------------------------------------

SHOWN_HEAD_DIM = 128  # of the tables of bytes; the record has the others


def family_rates(record: dict) -> list[str]:
    """TFLOP/s of every provider, the lengths of a kind side by side."""
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
    """Of one cell: what the arithmetic says, and what the profiler counted."""

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


# --- The linear loss -------------------------------------------------------------------------------------------------------


def linear_table(result: dict) -> list[str]:
    """A case of linear_cross_entropy: its providers, then the parts of a step of ours."""
    rows = [
        [name, number(e["forward_ms"]), number(e["step_ms"]), number(e["step_tflop_per_s"])]
        + [number(e["beyond_results_bytes"] / MIB), f"{e['error']:.0e}".replace("e-0", "e-")]
        for name, e in result["providers"].items()
    ]
    head = [f"{result['case']}, {result['dtype']}", "forward, ms", "a step, ms", "TFLOP/s", "MiB beyond gradients", "error"]
    lines = [*table(head, rows), *(f"{name} is unavailable: {why}." for name, why in result["unavailable"].items())]
    parts = [[name, str(part["count"]), number(part["ms"])] for name, part in result["parts"].items()]
    return [*lines, "", *table([result["chunks"], "times", "ms"], parts)]
