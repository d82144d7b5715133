"""The annotations of the public functions: a user's program passes mypy --strict, and what it says of types is so."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import flash_online

PROGRAM = Path(__file__).with_name("typed_user.py")
PACKAGE = Path(flash_online.__file__).parent


@pytest.mark.slow
def test_a_program_of_public_calls_passes_mypy_strict(tmp_path):
    """mypy finds the package on the path of imports, so that it reads its annotations only if the package has a py.typed."""
    pytest.importorskip("mypy")
    path = os.pathsep.join(filter(None, [str(PACKAGE.parent), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--warn-unreachable", "--cache-dir", tmp_path / "cache", PROGRAM],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_program_runs():
    runpy.run_path(str(PROGRAM))["main"]()


def test_the_program_uses_every_public_name():
    source = PROGRAM.read_text()
    used = set(re.findall(r"\bflash_online\.(\w+)", source))
    assert set(flash_online.__all__) <= used
    assert set(flash_online.functional.NAMES) <= set(re.findall(r"\bF\.(\w+)", source))


def test_the_package_says_that_it_is_typed():
    assert (PACKAGE / "py.typed").is_file()
