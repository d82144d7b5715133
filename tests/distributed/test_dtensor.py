"""DTensors on ranks that talk by gloo: our operators on shards, forward and backward."""

from __future__ import annotations

from pathlib import Path

import pytest
from ranks import run_on_ranks


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.nightly)])
def test_attention_softmax_and_losses_on_ranks(ranks):
    assert all("all agree" in said for said in run_on_ranks(Path(__file__).with_name("dtensor_ranks.py"), ranks=ranks))
