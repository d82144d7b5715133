"""Tests run again in a process of their own, where the CPU kernels of another instruction set run: see `FLASH_ONLINE_CPU`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from flash_online._info import build_info

ROOT = Path(__file__).parents[1]


def skip_unless_lesser(instruction_set: str) -> None:
    """Skips a test where this set is not in the build or no lesser one than that in use, or where one was chosen by hand."""
    sets = build_info()["instruction_sets"]
    if instruction_set not in sets or sets.index(instruction_set) >= sets.index(build_info()["cpu"]):
        pytest.skip(f"{instruction_set} is not in this build, or no lesser set than the one in use")
    if "FLASH_ONLINE_CPU" in os.environ:
        pytest.skip("FLASH_ONLINE_CPU has chosen a set")


def run_tests(instruction_set: str, *arguments: object, **environment: str) -> None:
    """Runs pytest with these arguments on this set."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *map(str, arguments)]
    environment = os.environ | {"FLASH_ONLINE_CPU": instruction_set} | environment
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, f"FLASH_ONLINE_CPU={instruction_set}: {done.stdout[-3000:]}{done.stderr[-1000:]}"
