"""cross_entropy of flash_online.functional against torch.nn.functional's, the corners line by line.

test_opinfo.py has torch's own samples.
"""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from cases import DTYPES
from drop_in import both_raise, compare

import flash_online
import flash_online.functional as F

INF = math.inf
TF = torch.nn.functional


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_cross_entropy_options(reduction, smoothing, weighted, dtype, device):
    weight = torch.rand(7, device=device).to(dtype) if weighted else None
    kwargs = {"weight": weight, "reduction": reduction, "label_smoothing": smoothing}
    for shape in ((7,), (5, 7), (2, 7, 3), (2, 7, 3, 2)):
        logits = torch.randn(shape, device=device).to(dtype).requires_grad_()
        target = torch.randint(0, 7, shape[:1] + shape[2:] if len(shape) > 1 else (), device=device)
        if len(shape) > 1:
            target.view(-1)[1] = -100
        compare(F.cross_entropy, TF.cross_entropy, (logits, target), kwargs)
        probabilities = torch.rand(shape, device=device).softmax(0).to(dtype).requires_grad_()
        compare(F.cross_entropy, TF.cross_entropy, (logits, probabilities), kwargs)


@pytest.mark.parametrize("ignore_index", [-100, -1, 0, 3, 6, 7, 1000])
def test_ignore_index_may_be_any_number(ignore_index, device):
    logits = torch.randn(8, 7, requires_grad=True, device=device)
    target = torch.randint(0, 7, (8,), device=device)
    target[2] = ignore_index
    for reduction in ("mean", "sum", "none"):
        kwargs = {
            "ignore_index": ignore_index,
            "reduction": reduction,
            "label_smoothing": 0.2,
            "weight": torch.rand(7, device=device),
        }
        compare(F.cross_entropy, TF.cross_entropy, (logits, target), kwargs)


def test_all_targets_ignored(device):
    logits, target = torch.randn(4, 7, requires_grad=True, device=device), torch.full((4,), -100, device=device)
    assert F.cross_entropy(logits, target).isnan()
    assert F.cross_entropy(logits, target, reduction="sum") == 0
    assert (F.cross_entropy(logits, target, reduction="none") == 0).all()
    (grad,) = torch.autograd.grad(F.cross_entropy(logits, target, reduction="sum"), logits)
    assert (grad == 0).all()


def test_ignored_rows_may_hold_anything(device):
    """torch hands NaN on (pytorch issue 11551); an ignored row has gradient 0 here."""
    logits, target = torch.randn(5, 7, device=device), torch.tensor([1, -100, 2, -100, 6], device=device)
    logits[1], logits[3] = math.nan, -INF
    logits.requires_grad_()
    kept = [0, 2, 4]
    for reduction in ("mean", "sum", "none"):
        for smoothing in (0.0, 0.1):
            options = {"reduction": reduction, "label_smoothing": smoothing}
            loss = F.cross_entropy(logits, target, **options)
            expected = TF.cross_entropy(logits[kept], target[kept], **options)
            torch.testing.assert_close(loss[kept] if reduction == "none" else loss, expected)
            (grad,) = torch.autograd.grad(loss.sum(), logits)
            assert (grad[[1, 3]] == 0).all() and grad.isfinite().all()


def test_target_out_of_range():
    """On the CPU. On CUDA it is a device assert, which test_rows_cuda.py looks at from outside of the process."""
    logits = torch.randn(3, 7)
    for bad in (7, -1, 10**12, -(10**12)):
        with pytest.raises(IndexError, match="target"):
            F.cross_entropy(logits, torch.tensor([0, bad, 1]))
    both_raise("cross_entropy", logits, torch.tensor([0, 7, 1]))


def test_cross_entropy_of_nothing(device):
    for reduction in ("mean", "sum", "none"):
        compare(
            F.cross_entropy,
            TF.cross_entropy,
            (torch.randn(0, 7, requires_grad=True, device=device), torch.zeros(0, dtype=torch.long, device=device)),
            {"reduction": reduction},
        )


def test_cross_entropy_legacy_arguments(device):
    logits, target = torch.randn(5, 7, device=device), torch.randint(0, 7, (5,), device=device)
    for size_average, reduce in ((True, None), (False, None), (None, False), (True, True), (False, False)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ours = F.cross_entropy(logits, target, None, size_average, -100, reduce)
            theirs = TF.cross_entropy(logits, target, None, size_average, -100, reduce)
        torch.testing.assert_close(ours, theirs)


def test_infinite_logits(device):
    logits = torch.tensor(
        [[0.0, -INF, 1.0], [INF, 0.0, 1.0], [-INF, -INF, -INF], [math.nan, 0.0, 1.0], [0.0, 1.0, 2.0]], device=device
    )
    for target in ([0, 0, 0, 0, 0], [1, 1, 1, 1, 1]):
        ours = F.cross_entropy(logits, torch.tensor(target, device=device), reduction="none")
        theirs = TF.cross_entropy(logits, torch.tensor(target, device=device), reduction="none")
        torch.testing.assert_close(ours, theirs, equal_nan=True)


def test_cross_entropy_raises_as_torch(device):
    name, logits, target = "cross_entropy", torch.randn(3, 7, device=device), torch.tensor([0, 1, 2], device=device)
    both_raise(name, logits, target[:2])
    both_raise(name, logits, target.int().float())
    both_raise(name, logits, target, torch.ones(6, device=device))
    both_raise(name, logits, target, reduction="average")
    both_raise(name, logits, target, label_smoothing=1.5)
    both_raise(name, torch.tensor(1.0, device=device), torch.tensor(0, device=device))
    both_raise(name, logits, torch.rand(3, 6, device=device))
    both_raise(name, logits, torch.rand(3, 7, device=device), ignore_index=2)
    both_raise(name, logits.long(), target)
    both_raise(name, logits, target, torch.ones(7, 1, device=device))


def test_logits_that_change_before_the_backward_pass(device):
    """Torch keeps log-probabilities, and lets it pass; ours reads the logits again, and does not do so unseen."""
    target = torch.tensor([0, 3, 1], device=device)
    for function, raises in ((torch.nn.functional.cross_entropy, False), (F.cross_entropy, True)):
        leaf = torch.randn(3, 4, device=device, requires_grad=True)
        logits = leaf * 1
        loss = function(logits, target)
        with torch.no_grad():
            logits.mul_(2)
        if raises:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()
        else:
            loss.backward()


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_probabilities_of_no_classes(reduction, device):
    """A row's loss is a sum of no terms, as torch's."""
    input = torch.randn(2, 0, device=device, requires_grad=True)
    target = torch.rand(2, 0, device=device)
    expected = torch.nn.functional.cross_entropy(input, target, reduction=reduction)
    for smoothing in (0.0, 0.1):
        found = F.cross_entropy(input, target, reduction=reduction, label_smoothing=smoothing)
        torch.testing.assert_close(found, expected, equal_nan=True)
    found.sum().backward()
    assert input.grad.shape == (2, 0)
    linear = F.linear_cross_entropy(
        torch.randn(2, 3, device=device), torch.randn(0, 3, device=device), target, reduction=reduction
    )
    torch.testing.assert_close(linear, expected, equal_nan=True)
    _, entropy = flash_online.cross_entropy(input, target, return_entropy=True)
    assert not entropy.any()


def test_the_dtype_under_autocast(device):
    """Autocast leaves float64 alone, and the result is of the widest dtype."""
    wide = torch.rand(5, dtype=torch.float64, device=device)
    with torch.autocast(device, torch.bfloat16):
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            input, target = torch.randn(3, 5, device=device).to(dtype), torch.rand(3, 5, device=device)
            for call in ((target,), (target.double(),), (target, wide), (target, wide.float()), (target.double(), wide)):
                found, expected = (m.cross_entropy(input, *call) for m in (F, torch.nn.functional))
                assert found.dtype == expected.dtype
                torch.testing.assert_close(found, expected)
        loss = F.linear_cross_entropy(torch.randn(3, 4, device=device), torch.randn(5, 4, device=device), target.double())
        assert loss.dtype == torch.float64


def test_classes_in_uint8_raise_as_torch_with_positions(device):
    input, target = torch.randn(2, 5, 3, device=device), torch.zeros(2, 3, dtype=torch.uint8, device=device)
    for module in (F, torch.nn.functional):
        with pytest.raises(RuntimeError):
            module.cross_entropy(input, target)
    torch.testing.assert_close(*(m.cross_entropy(input[..., 0], target[:, 0]) for m in (F, torch.nn.functional)))
    assert flash_online.cross_entropy(input, target).isfinite()


def test_a_scalar_raises_as_torch(device):
    for target in (torch.tensor([0], device=device), torch.tensor(0.5, device=device), torch.zeros(2, 2, device=device).long()):
        for module in (F, torch.nn.functional):
            with pytest.raises(IndexError):
                module.cross_entropy(torch.tensor(1.0, device=device), target)
