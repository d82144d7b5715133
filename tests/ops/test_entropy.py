"""The entropy that the losses return, against plain torch in float64: what the tests of the losses themselves leave out."""

from __future__ import annotations

import math

import pytest
import torch
from cases import DTYPES, linear_problem
from row_oracle import leaf, random_rows, random_targets, wide_as_possible

import flash_online
from flash_online.testing import assert_close_to_float64, peak_extra_bytes

INF, NAN = math.inf, math.nan
# On both sides of a CPU kernel's lanes, chunks and segments, and of a CUDA kernel's vectors, registers and slices.
ROW_LENGTHS = [1, 2, 3, 4, 5, 31, 32, 33, 65, 130, 257, 1031, 2047, 2048, 2049, 4099, 16384, 16390, 32771, 70001, 131073]


def plain_entropy(x):
    """-sum p log p over dimension 1, in torch operations."""
    log_p = torch.log_softmax(x, 1)
    return -(log_p.exp() * log_p.masked_fill(log_p == -INF, 0)).sum(1)


def entropy_and_gradient(function, x, grad):
    y = leaf(x, lambda t: t)
    entropy = function(y)
    return entropy.detach(), torch.autograd.grad(entropy, y, grad.to(entropy.dtype))[0]


def ours(x, target=None, **options):
    target = random_targets(x, ignored=False) if target is None else target
    return flash_online.cross_entropy(x, target, return_entropy=True, **options)[1]


def compare(x, **options):
    grad = torch.randn(x.shape[:1] + x.shape[2:], device=x.device)
    found = entropy_and_gradient(lambda y: ours(y, **options), x, grad)
    theirs = entropy_and_gradient(lambda y: plain_entropy(y.float() if y.dtype.itemsize == 2 else y), x, grad)
    truth = entropy_and_gradient(plain_entropy, wide_as_possible(x), grad.double())
    assert found[0].dtype == (torch.float64 if x.dtype == torch.float64 else torch.float32) and found[1].dtype == x.dtype
    size = max(1.0, math.log(x.shape[1]))
    for what, a, b, c in zip(("entropy", "gradient"), found, theirs, truth, strict=True):
        assert_close_to_float64(a, b.to(a.dtype), c, name=f"{what} of {x.dtype}{list(x.shape)} {x.stride()}", magnitude=size)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("classes", ROW_LENGTHS)
def test_lengths_of_rows(classes, dtype, device):
    for scale in (0.1, 3.0, 30.0):
        x = random_rows(5, classes, dtype=dtype, scale=scale, device=device)
        compare(x)
        compare(x.t().contiguous().t())
    compare(random_rows(3, classes, 2, dtype=dtype, device=device), label_smoothing=0.2)


@pytest.mark.parametrize("offset", [0.0, 1e4, -1e8])
def test_what_all_logits_have_in_common_does_not_count(offset, device):
    for classes in (3, 100, 7000):
        x = random_rows(4, classes, device=device).double().round(decimals=1)
        compare((x + torch.linspace(-9, 9, classes, device=device).round() + offset).float())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("classes", [4, 33, 3000, 40000])
def test_rows_that_are_not_finite(classes, dtype, device):
    rows = torch.randn(7, classes, device=device).to(dtype)
    rows[0] = -INF
    rows[1, 2] = INF
    rows[2, [1, 3]] = torch.tensor([INF, NAN], device=device, dtype=dtype)
    rows[3, 0] = NAN
    rows[4, 1:] = -INF
    rows[5, ::2] = -INF
    for x in (rows, rows.t().contiguous().t()):
        entropy = ours(x, torch.ones(7, dtype=torch.int64, device=device), reduction="none")
        assert entropy[:4].isnan().all() and entropy[4] == 0
        torch.testing.assert_close(entropy, plain_entropy(x.double()).to(entropy.dtype), equal_nan=True)
        finite = x[4:]
        grad = torch.tensor([1.0, -2.0, 0.5], device=device)
        _, found = entropy_and_gradient(ours, finite, grad)
        _, truth = entropy_and_gradient(plain_entropy, finite.double(), grad)
        assert (found[finite == -INF] == 0).all()
        torch.testing.assert_close(found, truth.to(dtype))


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("classes", [7, 100, 5000])
def test_ignored_rows_have_entropy_0_without_gradient(classes, bad, device):
    x = random_rows(5, classes, device=device)
    x[1], x[3, 2:] = bad, bad
    target = torch.tensor([1, -100, 2, -100, 6], device=device)
    for options in ({}, {"label_smoothing": 0.1, "weight": torch.rand(classes, device=device)}, {"z_loss": 0.1}):
        y = x.clone().requires_grad_()
        loss, lse, entropy = flash_online.cross_entropy(y, target, return_lse=True, return_entropy=True, **options)
        assert (entropy[[1, 3]] == 0).all() and entropy.isfinite().all()
        (grad,) = torch.autograd.grad(loss + entropy.sum() + lse[[0, 2]].sum(), y)
        assert (grad[[1, 3]] == 0).all() and grad.isfinite().all() and (grad[0] != 0).any()


@pytest.mark.parametrize("soft", [False, True])
def test_class_weights_smoothing_and_z_loss_do_not_enter(soft, device):
    x = random_rows(6, 50, device=device)
    target = torch.rand(6, 50, device=device) if soft else random_targets(x)
    expected = ours(x, target)
    for options in ({"weight": torch.rand(50, device=device)}, {"label_smoothing": 0.3}, {"z_loss": 1.0}, {"reduction": "sum"}):
        assert torch.equal(ours(x, target, **options), expected), options


def test_the_order_of_results(device):
    x, target = random_rows(6, 50, device=device), torch.arange(6, device=device)
    loss, lse, entropy = flash_online.cross_entropy(x, target, return_lse=True, return_entropy=True)
    torch.testing.assert_close(lse, torch.logsumexp(x, 1))
    torch.testing.assert_close(entropy, plain_entropy(x))
    torch.testing.assert_close(loss, torch.nn.functional.cross_entropy(x, target))
    assert flash_online.cross_entropy(x[0], target[0], return_entropy=True)[1].shape == ()
    hidden, weight = random_rows(6, 8, device=device), random_rows(50, 8, device=device)
    everything = {f"return_{name}": True for name in ("lse", "z_loss", "argmax", "entropy")}
    results = flash_online.linear_cross_entropy(hidden, weight, target, **everything)
    assert len(results) == 5 and results[3].dtype == torch.int64
    torch.testing.assert_close(results[4], plain_entropy(hidden @ weight.t()))
    with pytest.raises(TypeError, match="return_entropy"):
        flash_online.cross_entropy(x, target, return_entropy=1)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_an_entropy_bonus_of_a_linear_layer(reduction, dtype, device):
    """The gradient of loss - 0.1 entropy, which a trainer of policies takes, through chunks of logits."""
    (x, w), options = linear_problem(rows=300, hidden=16, classes=40, dtype=dtype, device=device)

    def gradients(module, convert):
        made = [convert(t.detach()).requires_grad_() for t in (x, w, options["linear_bias"])]
        loss, entropy = module.linear_cross_entropy(
            made[0], made[1], options["target"], linear_bias=made[2], reduction=reduction, return_entropy=True
        )
        return torch.autograd.grad(loss.sum() - 0.1 * entropy.sum(), made)

    found, plain = (gradients(module, torch.clone) for module in (flash_online, flash_online.reference))
    truth = gradients(flash_online.reference, torch.Tensor.double)
    for a, b, c in zip(found, plain, truth, strict=True):
        assert_close_to_float64(a, b, c, name=f"{list(a.shape)}", magnitude=1.0)


def test_entropy_takes_no_table_of_logits(device):
    """The rows' scalars and nothing of the size of the logits, in either direction."""
    x = random_rows(512, 4096, device=device).requires_grad_()
    target = random_targets(x)

    def step():
        loss, entropy = flash_online.cross_entropy(x, target, return_entropy=True)
        return torch.autograd.grad(loss + entropy.sum(), x)

    step()
    assert peak_extra_bytes(step, device=device) < 1.2 * x.numel() * 4  # the gradient itself
