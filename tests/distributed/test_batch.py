"""shard_batch: a model's loss over ranks against that of one process."""

from __future__ import annotations

from pathlib import Path

import pytest
from ranks import run_on_ranks


@pytest.mark.slow
def test_on_two_ranks():
    pytest.importorskip("transformers")
    assert all("all agree" in said for said in run_on_ranks(Path(__file__).with_name("batch_ranks.py")))
