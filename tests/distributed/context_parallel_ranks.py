"""This program runs the checks that test_context_parallel_attention.py names, on two and on four ranks: functions of the
files next to it that begin with `check_`, or `dead`. It prints "ok" and the name of each on every rank."""

from __future__ import annotations

import sys

import context_parallel_calls
import context_parallel_cases
import context_parallel_eager
import context_parallel_spans
import context_parallel_statistics
import context_parallel_training
import context_parallel_windows
import torch
from ranks import joined

CHECKS = {
    name: function
    for module in (
        context_parallel_cases,
        context_parallel_calls,
        context_parallel_training,
        context_parallel_eager,
        context_parallel_windows,
        context_parallel_spans,
        context_parallel_statistics,
    )
    for name, function in vars(module).items()
    if name.startswith("check_")
}


if __name__ == "__main__":
    with joined() as (rank, ranks):
        for name in sys.argv[1:]:
            torch.manual_seed(0)
            context_parallel_calls.dead(rank, ranks) if name == "dead" else CHECKS[name](rank, ranks)
            print("ok", name, flush=True)
