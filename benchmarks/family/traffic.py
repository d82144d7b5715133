"""Counts the bytes that each provider moves, using Nsight Compute (ncu) in a process that calls each provider once.

python -m benchmarks.family.traffic is that process. It calls every provider before the profiler starts, so that nothing is
compiled or allocated later, and launches an empty kernel before each profiled call, which separates the providers in the
profile. The profiler clears the caches before each kernel; data that a kernel wrote and that is still in the L2 cache at its
end is not counted in the bytes written to DRAM.
"""

from __future__ import annotations

import csv
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from ..attention.cases import Cell, Problem
from ..nvcc import ROOT

# Nsight Compute's metric -> our name. A sector has 32 bytes; srcunit_tex are the requests of the SMs.
METRICS = {
    "dram__bytes_read.sum": "dram_read",
    "dram__bytes_write.sum": "dram_written",
    "lts__t_sectors_srcunit_tex_op_read.sum": "l2_read",
    "lts__t_sectors_srcunit_tex_op_write.sum": "l2_written",
    "lts__t_bytes.sum": "l2_all",
}
SECTOR_BYTES = 32
BOUNDARY = "provider_begins"  # the empty kernel of kernels.cu
LIMIT_SECONDS = 400


def bytes_of(rows: Iterable[str], names: list[list[str]]) -> list[dict[str, dict[str, int]]]:
    """Parses ncu's CSV lines, a metric of a kernel each, with unscaled units. Returns for each cell, by provider, the bytes of
    all its kernels and their number. `names` are the providers of each cell in call order.

    Raises:
        ValueError: the numbers of boundaries and providers differ, or a provider has no kernel.
    """
    order = [(cell, name) for cell, of_cell in enumerate(names) for name in of_cell]
    found: list[dict[str, dict[str, int]]] = [{} for _ in names]
    current, kernels = -1, set()
    table = csv.DictReader(line for line in rows if line.startswith('"'))
    for row in table:
        is_new = row["ID"] not in kernels
        kernels.add(row["ID"])
        if BOUNDARY in row["Kernel Name"]:
            current += is_new
            continue
        if not 0 <= current < len(order):
            raise ValueError(f"the profile has a kernel of no provider: {row['Kernel Name']}")
        cell, name = order[current]
        entry = found[cell].setdefault(name, {"kernels": 0} | dict.fromkeys(METRICS.values(), 0))
        entry["kernels"] += is_new
        if what := METRICS.get(row["Metric Name"]):
            value = float(row["Metric Value"].replace(",", ""))
            entry[what] += round(value * (SECTOR_BYTES if "sectors" in row["Metric Name"] else 1))
    if current + 1 != len(order) or any(name not in found[cell] for cell, name in order):
        raise ValueError(f"the profile has {current + 1} providers with {len(kernels)} kernels in all, expected {len(order)}")
    return found


def profile(program: str, cells: list[Cell], quick: bool) -> dict:
    """{"command": ..., "results": [{"case", "kind", "providers": {name: bytes}}]}, or {"command", "unavailable": why}."""
    with tempfile.TemporaryDirectory() as folder:
        log, names = Path(folder) / "ncu.csv", Path(folder) / "names.json"
        ncu = [program, "--clock-control", "none", "--profile-from-start", "off", "--csv", "--print-units", "base"]
        ncu += ["--target-processes", "application-only", "--metrics", ",".join(METRICS)]
        called = ["-m", "benchmarks.family.traffic", *(["--quick"] if quick else [])]
        command = " ".join([Path(program).name, *ncu[1:], "python", *called])
        try:
            done = subprocess.run(
                [*ncu, "--log-file", str(log), sys.executable, *called, "--names", str(names)],
                cwd=ROOT,
                capture_output=True,
                text=True,
                timeout=LIMIT_SECONDS,
            )
            output = done.stdout + done.stderr + (log.read_text() if log.is_file() else "")
            if done.returncode:
                errors = [text for text in output.splitlines() if "==ERROR==" in text or "Error" in text]
                return {"command": command, "unavailable": (errors or output.splitlines() or ["no output"])[-1].strip()}
            found = bytes_of(log.read_text().splitlines(), json.loads(names.read_text()))
        except (OSError, subprocess.TimeoutExpired, ValueError) as error:
            return {"command": command, "unavailable": f"{type(error).__name__}: {error}"}
    results = [
        {"case": cell.label, "kind": cell.kind, "sizes": cell.sizes, "options": cell.options, "providers": of_cell}
        for cell, of_cell in zip(cells, found, strict=True)
    ]
    return {"command": command, "results": results}


def main() -> None:
    import argparse

    import torch

    from . import measure

    parser = argparse.ArgumentParser(description="The process that ncu profiles.")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--names", type=Path, required=True, help="output file for the profiled providers' names, per cell")
    options = parser.parse_args()
    kernels, names = measure.Kernels(), []
    for cell in measure.profiled_cells(options.quick):
        problem, calls = Problem(cell, "cuda"), {}
        for name, make in measure.providers(kernels).items():
            try:
                call = make(problem)
                with measure.inference(call):
                    call.run()
                calls[name] = call
            except Exception as error:  # the timing run reported the reason
                print(f"{cell.title}, {name}: {error}", file=sys.stderr)
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
        for call in calls.values():
            kernels.provider_begins()
            with measure.inference(call):
                call.run()
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()
        names.append(list(calls))
        torch.cuda.empty_cache()
    options.names.write_text(json.dumps(names))


if __name__ == "__main__":
    main()
