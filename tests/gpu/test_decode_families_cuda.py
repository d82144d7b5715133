"""These tests ask which calls over cached keys a family of CUDA kernels takes, and for which reason it refuses the others."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest
import torch
from decode_calls import BFLOAT16, DEVICE, E4M3, E5M2, HALF, attend, integers, randn

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("ours_alone")]


def _calls():
    """By name: a call, and words of the reason for which the family refuses it; None: it takes it."""

    def call(heads=(8, 2), queries=1, width=64, keys=200, dtype=BFLOAT16, cache_dtype=None, **options):
        query = randn(2, heads[0], queries, width, dtype=dtype)
        caches = [randn(2, heads[1], keys, width, dtype=dtype).to(cache_dtype or dtype) for _ in range(2)]
        return attend(query, *caches, integers(keys, 7), **options)

    def packed(**options):
        caches = [randn(2, 2, 200, 64) for _ in range(2)]
        return attend(randn(5, 8, 64), *caches, integers(200, 7), cu_seqlens_q=integers(0, 2, 5), max_seqlen_q=3, **options)

    def columns_apart():
        caches = [randn(2, 2, 64, 200).transpose(2, 3) for _ in range(2)]
        return attend(randn(2, 8, 1, 64), *caches, integers(200, 7))

    return {
        "a step": (call, None),
        "float16": (lambda: call(dtype=HALF), None),
        "float8": (lambda: call(cache_dtype=E4M3, width=128), None),
        "128 rows": (lambda: call(heads=(32, 1), queries=4), None),
        "pieces": (lambda: call(num_splits=7), None),
        "packed": (packed, None),
        "every option": (lambda: call(window=(9, None), softcap=3.0, sinks=torch.zeros(8, device=DEVICE)), None),
        "129 rows": (lambda: call(heads=(43, 1), queries=3), "128 rows"),
        "one piece": (lambda: call(num_splits=1), "num_splits=1"),
        "packed, in pieces": (lambda: packed(num_splits=2), "packed"),
        "float32": (lambda: call(dtype=torch.float32), "float32"),
        "rows of 72 bytes": (lambda: call(width=36), "16 bytes"),
        "rows of 24 bytes": (lambda: call(width=24, cache_dtype=E5M2), "16 bytes"),
        "columns apart": (columns_apart, "side by side"),
    }


def _calls_of_tiles():
    """The same for the Hopper kernel."""

    def call(heads=(16, 2), queries=4, keys=9000, batch=1, **options):
        caches = [randn(batch, heads[1], keys, 128) for _ in range(2)]
        return attend(randn(batch, heads[0], queries, 128), *caches, integers(*[keys] * batch), **options)

    return {
        "a step": (lambda: call(queries=1), None),
        "few rows": (call, None),
        "one tile": (lambda: call(heads=(128, 1), queries=1), None),
        "many rows, few tiles": (lambda: call(queries=64), None),
        "a window and sinks": (lambda: call(window=(900, None), sinks=torch.zeros(16, device=DEVICE)), None),
        "one piece": (lambda: call(num_splits=1), None),
        "pieces": (lambda: call(num_splits=2), "num_splits"),
        "softcap": (lambda: call(softcap=3.0), "few queries"),
    }


FAMILIES = {"decode": _calls, "sm90": _calls_of_tiles}


@pytest.mark.parametrize("family", FAMILIES)
def test_which_calls_a_family_takes(family):
    """A process of its own, where FLASH_ONLINE_KERNEL lets no other family run: what it refuses is an error with the reason."""
    if family == "sm90" and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs Hopper")
    environment = os.environ | {"FLASH_ONLINE_KERNEL": family, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, __file__, family], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    for name, (_, words) in FAMILIES[family]().items():
        message = found[name]
        if words is None:
            assert message is None, (name, message)
        else:
            reason = re.search(rf"\b{family}: ([^;]*)", message or "")
            assert reason and words in reason[1], (name, message)


def _main():
    """Makes every call, and prints the errors by name."""
    errors = {}
    for name, (call, _) in FAMILIES[sys.argv[1]]().items():
        try:
            call()
            torch.cuda.synchronize()
            errors[name] = None
        except RuntimeError as error:
            errors[name] = str(error)
    print(json.dumps(errors))


if __name__ == "__main__":
    _main()
