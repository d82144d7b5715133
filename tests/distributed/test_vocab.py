"""vocab_parallel_linear_cross_entropy on ranks that talk by gloo. Each number of ranks is one start of processes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from ranks import run_on_ranks

from flash_online.distributed import vocab_parallel_linear_cross_entropy


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.nightly)])
def test_linear_cross_entropy_on_ranks(ranks):
    assert all("all agree" in said for said in run_on_ranks(Path(__file__).with_name("vocab_ranks.py"), ranks=ranks))


def test_linear_cross_entropy_needs_a_process_group():
    x = torch.randn(3, 4)
    with pytest.raises(RuntimeError, match="init_process_group"):
        vocab_parallel_linear_cross_entropy(x, x, torch.tensor([0, 1, 2]), first_class=0)
    with pytest.raises(RuntimeError, match="init_process_group"):
        vocab_parallel_linear_cross_entropy(x, x, torch.tensor([0, 1, 2]), group="tensor", first_class=0)
