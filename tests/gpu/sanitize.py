"""`make sanitize`: the calls of sanitizer_calls.py under compute-sanitizer, and a table of what each tool found; exit code 1 if
any of them found something.

    python tests/gpu/sanitize.py [--tool memcheck racecheck synccheck initcheck] [--calls PATTERN] [--log FILE]

Without --tool, all tools run but initcheck.

torch's caching allocator is off, so that each tensor is an allocation of its own, whose ends memcheck sees. Tools look at
kernels of namespace flash_online alone: torch's are not ours to check; what these write counts as initialised.

racecheck does not look at the kernels of csrc/cuda/attention/sm90. There a warp's lanes write, the warp synchronises, and one
lane arrives at an mbarrier for all of them. racecheck orders the accesses of the lane that arrives alone, and reports those of
the others; docs/lab/forward_sm90.md has the smallest kernel of which it does so.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from sanitizer_calls import CALLS, chosen

TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
BY_DEFAULT = [tool for tool in TOOLS if tool != "initcheck"]  # which comes to no end
SCRIPT = Path(__file__).with_name("sanitizer_calls.py")
SUMMARY = re.compile(r"^=+ (?:ERROR|RACECHECK) SUMMARY: (\d+) (?:error|hazard)", re.MULTILINE)
KINDS = "Invalid|Misaligned|Uninitialized|Barrier error|Program hit|Race reported|Potential \\w+ hazard"
FINDING = re.compile(rf"^=+ (?:Error: |Warning: )?(?:{KINDS})")
DEADLINE = 1200  # seconds for one tool on one family


@dataclass
class Report:
    """What a run of one tool printed: the calls that ended well, findings by call, and the tool's own count of them."""

    done: list[str] = field(default_factory=list)
    findings: dict[str, int] = field(default_factory=dict)
    not_finite: list[str] = field(default_factory=list)
    summary: int | None = None  # None: the tool did not come to its end

    @classmethod
    def of(cls, output: str) -> Report:
        report, current = cls(), ""
        for line in output.splitlines():
            kind, _, name = line.partition(": ")
            if kind == "call":
                current = name
            elif kind == "done":
                report.done.append(name)
            elif kind == "not finite":
                report.not_finite.append(name)
            elif FINDING.match(line):
                report.findings[current] = report.findings.get(current, 0) + 1
        found = SUMMARY.findall(output)
        report.summary = sum(map(int, found)) if found else None
        return report

    def of_call(self, name: str) -> str:
        """The call's cell in the table."""
        if self.findings.get(name):
            return f"{self.findings[name]} found"
        if name in self.not_finite:
            return "not finite"
        return "ok" if name in self.done else "did not end"

    def clean(self, names: list[str]) -> bool:
        """Whether every call ended with finite results and the tool found nothing."""
        return self.summary == 0 and not self.findings and not self.not_finite and set(names) <= set(self.done)


def find_sanitizer() -> str | None:
    """The program, from PATH, a CUDA toolkit, or PyPI's package nvidia-cuda-sanitizer-api next to this Python."""
    homes = [os.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH")] + ["/usr/local/cuda"]
    places = [Path(home) / "bin" / "compute-sanitizer" for home in homes if home]
    places += [Path(folder) / "nvidia/cu13/bin/compute-sanitizer" for folder in sys.path if folder]
    return shutil.which("compute-sanitizer") or next((str(place) for place in places if place.is_file()), None)


def command_of(sanitizer: str, tool: str, family: str, pattern: str, help_text: str) -> list[str]:
    """compute-sanitizer's command line for the calls of one family."""
    name_filter = "--kernel-name" if "--kernel-name " in help_text else "--kernel-regex"
    excluded = [f"{name_filter}-exclude", "kns=sm90"] if tool == "racecheck" else []
    options = [
        "--tool",
        tool,
        name_filter,
        "kns=flash_online",
        *excluded,
        "--print-limit",
        "1000",
        "--target-processes",
        "application-only",
    ]
    if tool == "memcheck":
        options += ["--report-api-errors", "no"]
    return [sanitizer, *options, sys.executable, str(SCRIPT), "--family", family, "--calls", pattern]


def run_tool(sanitizer: str, tool: str, family: str, pattern: str, log) -> Report:
    help_text = subprocess.run([sanitizer, "--help"], capture_output=True, text=True).stdout
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYTHONUNBUFFERED": "1"}
    command = command_of(sanitizer, tool, family, pattern, help_text)
    try:
        done = subprocess.run(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=DEADLINE
        )
        output = done.stdout
    except subprocess.TimeoutExpired as late:
        output = (late.stdout or b"").decode(errors="replace")
    if log:
        log.write(f"$ {' '.join(command)}\n{output}\n")
    report = Report.of(output)
    if report.summary is None or not report.done:
        print(output[-3000:])
    return report


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tool", nargs="+", choices=TOOLS, default=BY_DEFAULT)
    parser.add_argument("--calls", default="", metavar="PATTERN", help="a regular expression; `--list` shows the names")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--log", type=argparse.FileType("w"), help="all that the tools print")
    options = parser.parse_args()
    names = chosen(options.calls)
    if options.list:
        print("\n".join(names))
        return 0
    sanitizer = find_sanitizer()
    if sanitizer is None or not names:
        print("no call matches" if sanitizer else "compute-sanitizer is in no PATH and in no CUDA toolkit")
        return 1
    cells, clean = {name: [] for name in names}, True
    for tool in options.tool:
        for family in sorted({CALLS[name][0] for name in names}):
            mine, start = [name for name in names if CALLS[name][0] == family], time.perf_counter()
            report = run_tool(sanitizer, tool, family, options.calls, options.log)
            clean &= report.clean(mine)
            for name in mine:
                cells[name].append(report.of_call(name))
            total = "did not end" if report.summary is None else f"{report.summary} found"
            print(f"{tool}, family {family}: {len(mine)} calls, {total}, {time.perf_counter() - start:.0f} s", flush=True)
    width = max(map(len, names))
    print(f"\n{'call':{width}}  " + "  ".join(f"{tool:11}" for tool in options.tool))
    for name, found in cells.items():
        print(f"{name:{width}}  " + "  ".join(f"{cell:11}" for cell in found))
    print("\nclean" if clean else "\nNOT CLEAN")
    return 0 if clean else 1


if __name__ == "__main__":
    sys.exit(main())
