"""Describes the machine and the software of a run, for its record."""

from __future__ import annotations

import ctypes
import datetime
import os
import re
import subprocess
from pathlib import Path

import torch

from flash_online import _info

from .summary import SCHEMA

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"


def fix_malloc_thresholds(keep: bool) -> str:
    """Fixes malloc's thresholds for large tensors; returns a description for the record.

    glibc raises the size from which it maps fresh memory with each freed block, up to 32 MiB, so that the speed of a call
    depends on previous calls. Here the threshold is 32 MiB from the start: a larger result gets fresh memory from the system
    each time and pays for its page faults. With `keep` all freed memory is reused, as in caching allocators.
    """
    trim_threshold, mmap_threshold, mmap_max = -1, -3, -4  # mallopt's numbers for its options
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return "as the system has it"
    if keep:
        done = mallopt(mmap_max, 0) and mallopt(trim_threshold, 2**31 - 1)
    else:
        done = mallopt(mmap_threshold, 32 << 20) and mallopt(trim_threshold, 64 << 20)
    return ("kept" if keep else "new from 32 MiB up") if done else "as the system has it"


def device_name(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else _info.processor()


def in_a_file_name(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")


def environment(device: str) -> dict:
    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True).stdout.strip()

    measured = ["csrc", "flash_online", "benchmarks", ":!benchmarks/results", "CMakeLists.txt", "setup.py"]
    changed = "+" if git("status", "--porcelain", "--untracked-files=no", "--", *measured) else ""
    facts = {
        "schema": SCHEMA,
        "device": device_name(device),
        "date": datetime.date.today().isoformat(),
        "commit": (git("rev-parse", "--short", "HEAD") or "uncommitted") + changed,
        "package": "of this checkout" if Path(_info.__file__).is_relative_to(ROOT) else "installed",
        "flash_online": _info.version(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
    }
    if device == "cpu":
        facts["instruction_set"] = _info.build_info()["cpu"]
        facts["mhz"] = frequency()
        facts["load_at_start"] = round(os.getloadavg()[0], 1)  # from other processes, on a shared machine
    return facts


def frequency() -> float | None:
    """Current MHz of the first core; on a virtual machine the nominal frequency, if available."""
    try:
        return int(Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_cur_freq").read_text()) / 1000
    except (OSError, ValueError):
        pass
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return None
    return next((float(line.split(":")[1]) for line in lines if line.startswith("cpu MHz")), None)
