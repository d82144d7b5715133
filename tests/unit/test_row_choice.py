"""The kernel that csrc/cuda/rows/choice.h names for a row, for every operator, element size and length, against the list in
row_choices.txt. A change of the table changes the list: write the program's output there, and read the difference."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SOURCES = HERE.parents[1] / "csrc"
if not SOURCES.is_dir():
    pytest.skip("the sources are part of a checkout", allow_module_level=True)


def test_softmax_row_choices(tmp_path):
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if not compiler:
        pytest.skip("no C++ compiler")
    program = tmp_path / "row_choice"
    source = HERE / "device_on_host" / "row_choice.cpp"
    subprocess.run([*compiler.split(), "-std=c++20", "-O1", f"-I{SOURCES}", source, "-o", program], check=True)
    run = subprocess.run([program], check=False, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout
    assert run.stdout.splitlines() == (HERE / "row_choices.txt").read_text().splitlines()
