"""The commands that torchrun starts on every rank."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def start(ranks: int, *words: object, program: tuple[str, ...] = ("-m", "flash_online")) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), *program]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run([*command, *map(str, words)], env=environment, cwd=ROOT, capture_output=True, text=True, timeout=300)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_check(ranks):
    """Three ranks divide neither the query heads nor the key heads."""
    finished = start(ranks, "check", "distributed")
    assert finished.returncode == 0, finished.stderr
    lines = finished.stdout.splitlines()
    assert lines[1] == f"{ranks} ranks, CPU, gloo" and lines[-1] == "ok: distributed"
    assert sum(line.startswith("ok  ") for line in lines) == 23 and "WRONG" not in finished.stdout


def test_check_finds_what_is_wrong(monkeypatch, capsys):
    from flash_online.distributed import _check, context_parallel_attention

    def wrong(*tensors, **options):
        out, lse = context_parallel_attention(*tensors, **options)
        return out * 1.01, lse

    monkeypatch.setattr(_check, "context_parallel_attention", wrong)
    lines = []
    assert not _check.check(lines.append)
    assert "WRONG  causal, ulysses, zigzag: rank 0: out, dquery, dkey, dvalue" in lines


@pytest.mark.nightly
def test_bench(tmp_path):
    pytest.importorskip("tqdm")
    if not (ROOT / "benchmarks" / "run.py").is_file():
        pytest.skip("the benchmarks are part of a checkout")
    finished = start(2, "bench", "distributed", "--quick", "--rounds", 2, "--out", tmp_path / "record.json")
    assert finished.returncode == 0, finished.stderr
    record = json.loads((tmp_path / "record.json").read_text())
    assert record["ranks"] == 2 and record["wrong"] == 0 and len(record["results"]) == 3
    for result in record["results"]:
        assert {"flash_online, Ulysses", "flash_online, gathered keys"} < set(result["providers"])
        assert result["auto"] in ("ulysses", "gathered")
        assert all(0 < entry["best_ms"] <= entry["ms"] for entry in result["providers"].values())


@pytest.mark.nightly
def test_the_example_of_long_context(tmp_path):
    """Context parallelism and FSDP2 have the losses of one rank."""
    pytest.importorskip("transformers")
    program = ROOT / "examples" / "long_context.py"
    if not program.is_file():
        pytest.skip("the examples are part of a checkout")
    words = ("--length", 512, "--steps", 5, "--width", 64, "--checkpointing", "--out", tmp_path / "curves")
    finished = start(2, *words, program=(str(program),))
    assert finished.returncode == 0, finished.stderr
    alone, over = json.loads((tmp_path / "curves.json").read_text())["runs"]
    assert (alone["ranks"], over["ranks"]) == (1, 2) and alone["losses"][-1] < 0.9 * alone["losses"][0]
    assert over["losses"] == pytest.approx(alone["losses"], abs=1e-4)
