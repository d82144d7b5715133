"""The fast paths of softmax, log_softmax and cross_entropy: which calls take one operator, and that the others keep their
results and errors."""

from __future__ import annotations

import pytest
import torch
from torch.nn import Parameter

import flash_online
from flash_online import functional as F
from flash_online.cross_entropy import try_fast_cross_entropy
from flash_online.softmax import try_fast_softmax

FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("dtype", FLOATING, ids=str)
@pytest.mark.parametrize("shape, dim", [((7,), 0), ((3, 5), -1), ((3, 5), 0), ((2, 0, 3), 2), ((2, 3, 0), -1), ((4, 1, 6), -2)])
def test_softmax_of_plain_tensors(shape, dim, dtype, log):
    """The same bits as the long way's, which a dtype takes, forward and backward."""
    name = "log_softmax" if log else "softmax"
    x = torch.randn(shape, dtype=dtype)
    fast = try_fast_softmax(name, x, dim, log)
    assert torch.equal(fast, getattr(flash_online, name)(x, dim, dtype))
    grads = []
    for call in (lambda t: try_fast_softmax(name, t, dim, log), lambda t: getattr(flash_online, name)(t, dim, dtype)):
        leaf = x.clone().requires_grad_()
        out = call(leaf)
        out.backward(torch.linspace(-1, 1, out.numel(), dtype=torch.float64).to(dtype).view(out.shape))
        grads.append(leaf.grad)
    assert torch.equal(*grads)


@pytest.mark.parametrize("log", [False, True])
def test_softmax_twice(log):
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda t: try_fast_softmax("softmax", t, -1, log), x)


OTHER_ROWS = {
    "dim too large": (torch.ones(3, 4), 2),
    "dim too small": (torch.ones(3, 4), -3),
    "a scalar": (torch.ones(()), 0),
    "no dim": (torch.ones(3, 4), None),
    "a bool": (torch.ones(3, 4), True),
    "a parameter": (Parameter(torch.ones(3, 4)), 0),
    "integers": (torch.ones(3, dtype=torch.int64), 0),
    "complex": (torch.ones(3, dtype=torch.complex64), 0),
    "sparse": (torch.ones(3, 3).to_sparse(), 0),
    "meta": (torch.ones(2, 2, device="meta"), 0),
    "a list": ([1.0, 2.0], 0),
    "nothing": (None, 0),
}


@pytest.mark.parametrize("x, dim", OTHER_ROWS.values(), ids=OTHER_ROWS)
def test_softmax_of_other_calls(x, dim):
    assert try_fast_softmax("softmax", x, dim, False) is None


def test_modes_that_need_the_long_way():
    """torch.func, autocast and forward-mode AD, of which the fast path knows nothing."""
    x, target = torch.randn(3, 4), torch.tensor([0, 3, 1])
    seen = []

    def look(t):
        seen.append((try_fast_softmax("softmax", t, -1, False), try_fast_cross_entropy(t, target, None, -100, "mean", 0.0)))
        return t.sum()

    torch.func.grad(look)(x)
    with torch.autocast("cpu", torch.bfloat16):
        look(x)
        assert (
            F.softmax(x.bfloat16(), -1).dtype == torch.bfloat16 and F.cross_entropy(x.bfloat16(), target).dtype == torch.float32
        )
    with torch.autograd.forward_ad.dual_level():
        look(x)
    assert seen == [(None, None)] * 3


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("dtype", FLOATING, ids=str)
@pytest.mark.parametrize("rows, classes", [(1, 1), (5, 7), (33, 300)])
def test_cross_entropy_of_plain_rows(rows, classes, dtype, reduction, smoothing):
    """Beside torch in float64; the same bits as for [N, C, 1], which goes the long way."""
    x, target = torch.randn(rows, classes, dtype=dtype), torch.randint(classes, (rows,))
    target[rows // 2] = -100 if rows > 1 else target[0]
    leaves = [x.clone().requires_grad_() for _ in range(2)] + [x.double().requires_grad_()]
    options = {"reduction": reduction, "label_smoothing": smoothing}
    losses = [
        try_fast_cross_entropy(leaves[0], target, None, -100, reduction, smoothing),
        flash_online.cross_entropy(leaves[1].unsqueeze(2), target.unsqueeze(1), **options),
        torch.nn.functional.cross_entropy(leaves[2], target, **options),
    ]
    for loss in losses:
        loss.backward()
    assert torch.equal(losses[0], losses[1]) and torch.equal(leaves[0].grad, leaves[1].grad)
    tolerance = {"rtol": 4 * torch.finfo(dtype).eps, "atol": 4 * torch.finfo(dtype).eps}
    torch.testing.assert_close(losses[0].double(), losses[2], **tolerance)
    torch.testing.assert_close(leaves[0].grad.double(), leaves[2].grad, **tolerance)


OTHER_LOSSES = {
    "no reduction": {"reduction": "none"},
    "an unknown reduction": {"reduction": "median"},
    "smoothing above 1": {"label_smoothing": 1.5},
    "smoothing of NaN": {"label_smoothing": float("nan")},
    "smoothing by an int": {"label_smoothing": 0},
    "ignore_index by a bool": {"ignore_index": True},
    "weights": {"weight": torch.ones(4)},
    "float targets": {"target": torch.tensor([0.0, 1.0, 2.0])},
    "two targets": {"target": torch.tensor([0, 1])},
    "uint8 targets": {"target": torch.tensor([0, 1, 2], dtype=torch.uint8)},
    "one row": {"input": torch.ones(4)},
    "three dimensions": {"input": torch.ones(3, 4, 2)},
    "no classes": {"input": torch.ones(3, 0)},
    "no target": {"target": None},
}


@pytest.mark.parametrize("change", OTHER_LOSSES.values(), ids=OTHER_LOSSES)
def test_cross_entropy_of_other_calls(change):
    call = {"input": torch.randn(3, 4), "target": torch.tensor([0, 1, 2]), "weight": None, "ignore_index": -100,
            "reduction": "mean", "label_smoothing": 0.0} | change  # fmt: skip
    assert try_fast_cross_entropy(**call) is None


def test_targets_out_of_range():
    for function in (flash_online.cross_entropy, F.cross_entropy):
        with pytest.raises(IndexError, match="^target: expected 0 to 2 .*got 9, which is out of bounds"):
            function(torch.randn(2, 3), torch.tensor([1, 9]))
