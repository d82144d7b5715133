"""softmax and log_softmax of flash_online.functional against torch.nn.functional's, the corners line by line.

test_opinfo.py has torch's own samples.
"""

from __future__ import annotations

import math

import pytest
import torch
from cases import DTYPES
from drop_in import both_raise

import flash_online.functional as F
from flash_online.testing import assert_close_to_float64

INF = math.inf
TF = torch.nn.functional


@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_softmax_rows_that_are_not_finite(name, dtype, device):
    rows = torch.tensor([[-INF, -INF, -INF], [INF, 0, 1], [math.nan, 0, 1], [-INF, 0, 1], [1, 2, 3]], device=device).to(dtype)
    ours, theirs = getattr(F, name)(rows, 1), getattr(TF, name)(rows, 1)
    torch.testing.assert_close(ours, theirs, equal_nan=True)
    assert ours[:3].isnan().all() and ours[4].isfinite().all()


@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_softmax_without_dim_warns_as_torch(name, device):
    for shape in ((), (3,), (3, 4), (2, 3, 4), (2, 2, 3, 4)):
        x = torch.randn(shape, device=device)
        with pytest.warns(UserWarning, match="dim"):
            theirs = getattr(TF, name)(x)
        with pytest.warns(UserWarning, match="dim"):
            ours = getattr(F, name)(x)
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_softmax_of_integers(name, device):
    x = torch.arange(6, device=device).view(2, 3)
    both_raise(name, x, 1)
    torch.testing.assert_close(getattr(F, name)(x, 1, dtype=torch.float32), getattr(TF, name)(x, 1, dtype=torch.float32))
    both_raise(name, torch.randn(2, 3, device=device), 2)
    both_raise(name, torch.randn(2, 3, device=device), -3)


@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_softmax_casts_first(name, device):
    x = torch.randn(4, 1000, device=device) * 10
    for source, dtype in ((torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16), (torch.float32, torch.float64)):
        ours = getattr(F, name)(x.to(source), 1, dtype=dtype)
        theirs = getattr(TF, name)(x.to(source), 1, dtype=dtype)
        truth = getattr(TF, name)(x.to(source).to(dtype).double(), 1)
        assert ours.dtype == dtype
        assert_close_to_float64(ours, theirs, truth)
