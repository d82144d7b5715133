"""What runs a pass of attention on CUDA is decided once per pass."""

from __future__ import annotations

import pytest
import torch

import flash_online
import flash_online.functional as F
from flash_online._ops import LIBRARY

pytestmark = pytest.mark.gpu


def plans(call) -> int:
    """How many passes `call` plans. A machine with a GPU has the introspection module, or this fails."""
    from flash_online import _introspect as introspect

    before = introspect.attention_plans(str(LIBRARY))
    call()
    torch.cuda.synchronize()
    return introspect.attention_plans(str(LIBRARY)) - before


def inputs(*shapes, dtype=torch.bfloat16):
    return [torch.randn(shape, device="cuda", dtype=dtype, requires_grad=True) for shape in shapes]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    "options", [{}, {"softcap": 5.0}, {"window": (5, 0)}, {"dropout_p": 0.3}, {"deterministic": True}], ids=str
)
def test_one_plan_per_pass_of_attention(dtype, options):
    query, key, value = inputs(*[(2, 4, 100, 64)] * 3, dtype=dtype)
    with torch.no_grad():
        assert plans(lambda: flash_online.attention(query, key, value, **options)) == 1
    out = flash_online.attention(query, key, value, **options)
    assert plans(lambda: out.sum().backward()) == 1


def test_one_plan_per_pass_of_the_drop_in():
    query, key, value = inputs(*[(2, 4, 100, 64)] * 3)
    with torch.no_grad():
        assert plans(lambda: F.scaled_dot_product_attention(query, key, value, is_causal=True)) == 1
    assert plans(lambda: F.scaled_dot_product_attention(query, key, value).sum().backward()) == 2


@pytest.mark.parametrize("options", [{}, {"deterministic": True}], ids=str)
def test_one_plan_per_pass_of_packed_sequences(options):
    query, key, value = inputs(*[(100, 4, 64)] * 3)
    starts = torch.tensor([0, 30, 100], device="cuda", dtype=torch.int32)
    with torch.no_grad():
        assert plans(lambda: flash_online.varlen_attention(query, key, value, starts, starts, 70, 70, **options)) == 1
    out = flash_online.varlen_attention(query, key, value, starts, starts, 70, 70, **options)
    assert plans(lambda: out.sum().backward()) == 1


def test_one_plan_per_problem_of_batch_dimensions_that_do_not_fuse():
    """[2, 3] transposed to [3, 2] in the queries alone: no stride steps through both of its dimensions, so the
    kernels see three problems with a batch of two."""
    query, key, value = inputs((2, 3, 4, 20, 64), (3, 2, 4, 20, 64), (3, 2, 4, 20, 64))
    with torch.no_grad():
        assert plans(lambda: flash_online.attention(query.transpose(0, 1), key, value)) == 3


def test_no_plan_without_queries():
    query, key, value = inputs((2, 4, 0, 64), (2, 4, 9, 64), (2, 4, 9, 64))
    with torch.no_grad():
        assert plans(lambda: flash_online.attention(query, key, value)) == 0
