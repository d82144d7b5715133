"""examples/rollouts.py: answers that share a prompt in one row have loss and gradients of separate rows."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest
import torch

from flash_online import spans

PROGRAM = Path(__file__).parents[2] / "examples" / "rollouts.py"
SMALL = ["--width", "32", "--vocabulary", "50", "--heads", "2"]

pytest.importorskip("transformers")
if not PROGRAM.is_file():
    pytest.skip("the examples are part of a checkout", allow_module_level=True)


@pytest.mark.parametrize(
    ("prompt", "answers", "longest"), [(33, 3, 17), (1, 5, 9), (64, 2, 64), (20, 4, 1)], ids=lambda n: str(n)
)
def test_one_row_has_the_loss_and_gradients_of_separate_rows(tmp_path, prompt, answers, longest):
    program = runpy.run_path(str(PROGRAM))
    sizes = ["--prompt", prompt, "--answers", answers, "--longest", longest]
    program["main"]([*map(str, sizes), *SMALL, "--out", str(tmp_path / "record.json")])
    record = json.loads((tmp_path / "record.json").read_text())
    assert record["loss_apart"] < 1e-5 and record["gradients_apart"] < 1e-4
    assert record["loss"] != 0
    if prompt > 1:
        one, separate = record["forms"]["one row"], record["forms"]["separate rows"]
        assert one["extra_bytes"] < separate["extra_bytes"]


def test_answers_that_see_each_other_are_noticed(tmp_path, monkeypatch):
    """What is compared depends on the spans."""
    program = runpy.run_path(str(PROGRAM))
    monkeypatch.setattr(spans, "shared_prefix", lambda starts, length: {"causal": True})
    record = program["compare"](program["options"]([*SMALL, "--prompt", "20", "--longest", "9"]))
    assert record["gradients_apart"] > 1e-2
    assert torch.isfinite(torch.tensor(record["loss"]))
