"""cross_entropy against the float64 reference; cross_entropy and logsumexp against torch's own, forward and backward."""

from __future__ import annotations

import math

import pytest
import torch
from cases import CLASSES, DTYPES
from oracle import compare_with_reference
from row_oracle import (
    OPERATORS,
    compare_logsumexp,
    compare_loss,
    forward_and_backward,
    gradients,
    leaf,
    random_rows,
    random_targets,
    wide_as_possible,
)

import flash_online
from flash_online.testing import LAYOUTS, assert_close_to_float64, lay_out, random_tensor

INF, NAN = math.inf, math.nan
NARROW_DTYPES = [torch.float16, torch.bfloat16, torch.float32]
TF = torch.nn.functional


@pytest.mark.parametrize("classes", CLASSES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_losses_over_classes(classes, dtype, device):
    logits = random_tensor(6, classes, dtype=dtype, scale=3, requires_grad=True, device=device)
    target = torch.randint(0, classes, (6,), device=device)
    target[4] = -100
    for entropy in (False, True):
        for reduction in ("mean", "sum", "none"):
            options = {"reduction": reduction, "return_lse": True, "return_entropy": entropy}
            compare_with_reference("cross_entropy", logits, target, **options)
        probabilities = torch.rand(6, classes, device=device).to(dtype).requires_grad_()
        compare_with_reference("cross_entropy", logits, probabilities, return_lse=True, return_entropy=entropy)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("z_loss", [0.0, 1e-2])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("kind", ["indices", "probabilities"])
def test_loss_options(reduction, z_loss, smoothing, weighted, kind, device):
    options = {"reduction": reduction, "z_loss": z_loss, "label_smoothing": smoothing, "return_lse": True}
    for shape in ((9, 13), (2, 13, 5), (13,)):
        logits = random_tensor(*shape, scale=2, requires_grad=True, device=device)
        if kind == "indices":
            target = torch.randint(0, 13, shape[:1] + shape[2:] if len(shape) > 1 else (), device=device)
            if len(shape) > 1:
                target.view(-1)[2] = -100
        else:
            target = torch.rand(shape, requires_grad=True, device=device)
        weight = torch.rand(13, device=device) if weighted else None
        for entropy in (False, True):
            compare_with_reference("cross_entropy", logits, target, weight=weight, return_entropy=entropy, **options)


@pytest.mark.parametrize("offset", [0.0, 1e4, -1e9, 1e15, -1e30])
@pytest.mark.parametrize("kind", ["smoothed", "weighted", "probabilities"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_what_all_logits_have_in_common_does_not_count(dtype, kind, offset, device):
    """A loss is a difference of logits, each measured from the row's largest: torch's is exact however large they are. Rows of
    several chunks whose largest logits rise, fall and are equal."""
    for classes in (3, 100, 7000):
        logits = torch.randn(4, classes, device=device) * 3
        logits += torch.linspace(-20, 20, classes, device=device) * torch.tensor([[1.0], [-1.0], [0.0], [0.0]], device=device)
        logits = (logits + offset).to(dtype)
        options = {"reduction": "none", "label_smoothing": 0.0 if kind == "probabilities" else 0.2}
        target = torch.randint(0, classes, (4,), device=device)
        if kind == "probabilities":
            target = torch.rand(4, classes, device=device).to(dtype)
        weight = torch.rand(classes, device=device).to(dtype) if kind == "weighted" else None
        ours = flash_online.cross_entropy(logits, target, weight, **options)
        wide = [t.double() if t is not None and t.is_floating_point() else t for t in (logits, target, weight)]
        torchs, truth = TF.cross_entropy(logits, target, weight, **options), TF.cross_entropy(*wide, **options)
        assert_close_to_float64(ours, torchs, truth, name=f"{classes} classes")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("loss_dtype", [None, torch.float32], ids=str)
def test_float32_beside_16_bit_logits(dtype, loss_dtype, device):
    """A float32 loss, and float32 class weights, from 16-bit logits: no copy of the logits, no rounding of the loss."""
    logits = random_tensor(7, 40, dtype=dtype, scale=3, requires_grad=True, device=device)
    target, weight = torch.randint(0, 40, (7,), device=device), torch.rand(40, device=device)
    for w in (None, weight):
        loss, lse = flash_online.cross_entropy(logits, target, w, dtype=loss_dtype, return_lse=True, reduction="none")
        assert loss.dtype == (loss_dtype or dtype) and lse.dtype == torch.float32
        expected = TF.cross_entropy(logits.double(), target, None if w is None else w.double(), reduction="none")
        # The loss is a difference of numbers near lse.
        eps = torch.finfo(loss.dtype).eps
        torch.testing.assert_close(loss.double(), expected, rtol=4 * eps, atol=4 * eps if loss_dtype is None else 1e-6)
        torch.testing.assert_close(lse.double(), torch.logsumexp(logits.double(), 1), rtol=1e-6, atol=1e-6)
        (grad,) = torch.autograd.grad(loss.sum(), logits)
        assert grad.dtype == dtype


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", ["indices", "probabilities"])
def test_loss_layouts(layout, kind, device):
    for shape in ((6, 11), (3, 11, 7), (3, 11, 2, 5)):
        logits = random_tensor(*shape, layout=layout, requires_grad=True, device=device)
        if kind == "indices":
            target = lay_out(torch.randint(0, 11, shape[:1] + shape[2:], device=device), layout)
        else:
            target = lay_out(torch.rand(shape, device=device), layout).requires_grad_()
        weight = lay_out(torch.rand(11, device=device), layout)
        for reduction, entropy in (("mean", False), ("none", False), ("none", True)):
            options = {"reduction": reduction, "return_lse": True, "return_entropy": entropy, "label_smoothing": 0.1}
            compare_with_reference("cross_entropy", logits, target, weight=weight, **options)


def test_ignored_rows_have_no_gradient_with_every_option(device):
    logits, target = torch.randn(5, 7, device=device), torch.tensor([1, -100, 2, -100, 6], device=device)
    logits[1], logits[3] = math.nan, INF
    logits.requires_grad_()
    loss = flash_online.cross_entropy(logits, target, torch.rand(7, device=device), label_smoothing=0.1, z_loss=0.1)
    (grad,) = torch.autograd.grad(loss, logits)
    assert loss.isfinite() and (grad[[1, 3]] == 0).all() and grad.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_lse_of_cross_entropy_is_differentiable(dtype, device):
    logits = torch.randn(5, 7, dtype=dtype, requires_grad=True, device=device)
    _, lse = flash_online.cross_entropy(logits, torch.tensor([1, 0, 2, 3, 6], device=device), return_lse=True)
    grad = torch.randn(5, dtype=dtype, device=device)
    torch.testing.assert_close(
        torch.autograd.grad(lse, logits, grad), torch.autograd.grad(torch.logsumexp(logits, 1), logits, grad)
    )


def test_losses_repeat_for_any_number_of_threads():
    logits, target = torch.randn(300, 1000, requires_grad=True), torch.randint(0, 1000, (300,))

    def call():
        loss = flash_online.cross_entropy(logits, target)
        return loss, torch.autograd.grad(loss, logits)[0]

    first = call()
    for threads in (1, 3):
        torch.set_num_threads(threads)
        assert all(torch.equal(a, b) for a, b in zip(call(), first, strict=True))


# --- cross_entropy and logsumexp against torch's own --------------------------------------------------------------------------


# On both sides of every change of the row group, in vectors of 4 and of 8 elements; lengths after which the next row is not
# aligned to 16 bytes; the longest row kept in registers or shared memory, and the first split row.
ROW_LENGTHS = [1, 3, 64, 65, 127, 130, 256, 257, 513, 1024, 1031, 2048, 2049, 4099]
ROW_LENGTHS += [8192, 8195, 16384, 16390, 32771, 65537, 131073]


@pytest.mark.thin(2)
@pytest.mark.parametrize("dtype", NARROW_DTYPES, ids=str)
@pytest.mark.parametrize("classes", ROW_LENGTHS)
def test_lengths_of_rows(classes, dtype, device):
    x = random_rows(5, classes, dtype=dtype, device=device)
    compare_logsumexp(x, 1)
    compare_loss(x, random_targets(x), reduction="none")
    compare_loss(x, random_targets(x), torch.rand(classes, device=device), label_smoothing=0.1, reduction="none")
    compare_loss(x, torch.rand(x.shape, device=device).to(dtype), reduction="none", label_smoothing=0.1)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("z_loss", [0.0, 1e-2])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("kind", ["indices", "probabilities"])
def test_loss_options_as_torch(reduction, z_loss, smoothing, weighted, kind, device):
    for shape in ((90, 130), (4, 130, 5), (3, 7001)):
        x = random_rows(*shape, device=device)
        target = random_targets(x) if kind == "indices" else torch.rand(shape, device=device)
        weight = torch.rand(shape[1], device=device) if weighted else None
        compare_loss(x, target, weight, z_loss, reduction=reduction, label_smoothing=smoothing)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", NARROW_DTYPES, ids=str)
def test_layouts(layout, dtype, device):
    for shape in ((6, 1100), (3, 40, 70), (3, 11, 2, 5)):
        x = lay_out(random_rows(*shape, dtype=dtype, device=device), layout)
        for dim in range(len(shape)):
            compare_logsumexp(x, dim)
        compare_loss(x, random_targets(x), reduction="none")
        compare_loss(x, lay_out(torch.rand(shape, device=device).to(dtype), layout), reduction="none", label_smoothing=0.1)


@pytest.mark.parametrize("dtype", NARROW_DTYPES, ids=str)
def test_any_alignment(dtype, device):
    """Rows that start at each element of 16 bytes and of 32."""
    storage = random_rows(9000, dtype=dtype, device=device)
    for function in (flash_online.softmax, flash_online.log_softmax):
        for classes in (1, 5, 31, 200, 1500, 4100):
            for start in range(17):
                x = storage[start : start + 2 * classes].view(2, classes)
                assert torch.equal(function(x, 1), function(x.clone(), 1)), (classes, start)
    for start in range(17):
        x = storage[start : start + 8400].view(2, 4200)
        assert torch.equal(flash_online.logsumexp(x, 1), flash_online.logsumexp(x.clone(), 1))


@pytest.mark.parametrize("dtype", NARROW_DTYPES, ids=str)
@pytest.mark.parametrize("classes", [4, 3000, 40000, 600000])
def test_rows_that_are_not_finite(classes, dtype, device):
    rows = torch.full((6, classes), -3.0, device=device)
    rows[0] = -INF
    rows[1, 2] = INF
    rows[2, [1, 3]] = torch.tensor([INF, NAN], device=device)
    rows[3, 0] = NAN
    rows[4, 1:] = -INF
    for x in (rows.to(dtype), rows.to(dtype).t().contiguous().t()):
        torch.testing.assert_close(flash_online.logsumexp(x, 1), torch.logsumexp(x.float(), 1).to(dtype), equal_nan=True)
        for name in ("softmax", "log_softmax"):
            expected = getattr(torch, name)(x.float(), 1).to(dtype)  # torch's sum of 600,000 weights overflows in float16
            torch.testing.assert_close(getattr(flash_online, name)(x, 1), expected, equal_nan=True)
        target = torch.zeros(6, dtype=torch.int64, device=device)
        loss, lse = flash_online.cross_entropy(x, target, reduction="none", return_lse=True)
        expected = TF.cross_entropy(x.float(), target, reduction="none").to(dtype)
        torch.testing.assert_close(loss, expected, equal_nan=True)
        torch.testing.assert_close(lse, torch.logsumexp(x.float(), 1), equal_nan=True)


def test_ignored_rows_have_no_gradient(device):
    for classes in (7, 5000):
        x, target = random_rows(5, classes, device=device), torch.tensor([1, -100, 2, -100, 6], device=device)
        x[1], x[3] = NAN, INF
        x.requires_grad_()
        loss = flash_online.cross_entropy(x, target, torch.rand(classes, device=device), label_smoothing=0.1, z_loss=0.1)
        (grad,) = torch.autograd.grad(loss, x)
        assert loss.isfinite() and (grad[[1, 3]] == 0).all() and grad.isfinite().all()


@pytest.mark.parametrize("function", OPERATORS.values(), ids=OPERATORS)
@pytest.mark.parametrize("classes", [100, 1001, 4001, 40001, 300000, 1_000_001])
def test_same_bits_in_every_run_and_any_batch(function, classes, device):
    x = random_rows(5, classes, device=device)
    target = random_targets(x, ignored=False)
    first = forward_and_backward(function, x, target)
    for _ in range(3):
        assert all(torch.equal(a, b) for a, b in zip(first, forward_and_backward(function, x, target), strict=True))
    for row in range(5):
        alone = forward_and_backward(function, x[row : row + 1].clone(), target[row : row + 1])
        assert all(torch.equal(a[row : row + 1], b) for a, b in zip(first, alone, strict=True))


@pytest.mark.parametrize("dtype", NARROW_DTYPES, ids=str)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("kind", ["indices", "weighted", "smoothed", "probabilities"])
def test_reduced_losses(kind, reduction, dtype, device):
    """The loss that is one operator in each direction: rows for one CTA and for several, with a gradient other than 1."""
    for shape in ((90, 130), (4, 130, 5), (3, 40000), (5000, 17), (40000, 17)):
        x = random_rows(*shape, dtype=dtype, device=device)
        target = torch.rand(shape, device=device).to(dtype) if kind == "probabilities" else random_targets(x)
        weight = torch.rand(shape[1], device=device).to(dtype) if kind == "weighted" else None
        options = {"reduction": reduction, "label_smoothing": 0.1 if kind == "smoothed" else 0.0}
        results = []
        for function, convert in (
            (flash_online.cross_entropy, lambda t: t),
            (TF.cross_entropy, lambda t: t),
            (TF.cross_entropy, wide_as_possible),
        ):
            y = leaf(x, convert)
            loss = function(y, convert(target), None if weight is None else convert(weight), **options)
            results.append((loss.detach(), *gradients([loss], [y], [torch.full_like(loss, 0.75)])))
        rows = x.numel() / shape[1]
        for i, (a, b, c) in enumerate(zip(*results, strict=True)):
            magnitude = c.abs().max().item() if i == 0 else 1 / rows if reduction == "mean" else 1.0
            assert_close_to_float64(a, b, c, name=f"{('loss', 'gradient')[i]} of {dtype}{list(shape)}", magnitude=magnitude)


def test_second_derivatives(device):
    x = random_rows(3, 40, device=device).requires_grad_()
    target = random_targets(x, ignored=False)
    for function in (lambda x: flash_online.cross_entropy(x, target), lambda x: flash_online.logsumexp(x, 1).sum()):
        (grad,) = torch.autograd.grad(function(x), x, create_graph=True)
        (second,) = torch.autograd.grad(grad.square().sum(), x)
        y = x.detach().double().requires_grad_()
        other = TF.cross_entropy(y, target) if "cross_entropy" in function.__code__.co_names else torch.logsumexp(y, 1).sum()
        (grad,) = torch.autograd.grad(other, y, create_graph=True)
        (expected,) = torch.autograd.grad(grad.square().sum(), y)
        torch.testing.assert_close(second.double(), expected, rtol=1e-4, atol=1e-6)
