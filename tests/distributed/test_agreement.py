"""The ranks' calls are compared, one call late: processes on this machine that talk by gloo."""

from __future__ import annotations

from pathlib import Path

import pytest
from ranks import run_on_ranks

PROGRAM = Path(__file__).with_name("agreement_ranks.py")
CHECKS = [line[4 : line.index("(")] for line in PROGRAM.read_text().splitlines() if line.startswith("def check_")]


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.nightly)])
def test_checks_on(ranks):
    for said in run_on_ranks(PROGRAM, *CHECKS, ranks=ranks):
        assert [line for line in said.splitlines() if line.startswith("ok ")] == [f"ok {name}" for name in CHECKS]


@pytest.mark.slow
def test_a_dead_rank():
    run_on_ranks(PROGRAM, "dead")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["pending", "undestroyed"])
def test_an_exit_with_a_comparison_pending(name):
    """Nothing is said, and no process hangs or aborts."""
    for said in run_on_ranks(PROGRAM, name):
        assert said.replace(f"ok {name}\n", "") == ""
