"""Attention's results and gradients in every instruction set that this processor has, not in the best alone: options, dtypes,
widths, layouts, tiles and spans, packed sequences, large scores, masks of the lowest numbers."""

from __future__ import annotations

from pathlib import Path

import pytest
from instruction_sets import run_tests, skip_unless_lesser

TESTS = "test_options or test_block_edges or test_several_spans or test_widths or test_layouts or test_heads_and_batches"


@pytest.mark.slow
@pytest.mark.parametrize("instruction_set", ["portable", "avx2", "avx512", "avx512_bf16"])
def test_gradients(instruction_set):
    skip_unless_lesser(instruction_set)
    names = ("attention", "attention_digits", "attention_mask_extremes", "varlen")
    files = [Path(__file__).with_name(f"test_{name}.py") for name in names]
    run_tests(instruction_set, "-x", "-m", "not gpu", *files, "-k", f"{TESTS} or digits or extremes")
