"""Softmaxes, losses and top k against torch's own functions in the same dtype and in float64, on the device of their input."""

from __future__ import annotations

import torch

import flash_online
import flash_online.functional
from flash_online.testing import assert_close_to_float64

TF = torch.nn.functional


def random_rows(*shape, dtype=torch.float32, scale=3.0, device):
    return (torch.randn(shape, device=device) * scale).to(dtype)


def gpu(*shape, dtype=torch.float32):
    return random_rows(*shape, dtype=dtype, device="cuda")


def softmax_and_gradient(function, x, dim, grad, dtype=None):
    """The function's result, and the gradient of x for the result's gradient `grad`."""
    x = x.detach().requires_grad_()
    y = function(x, dim, dtype=dtype)
    return y.detach(), torch.autograd.grad(y, x, grad.to(y.dtype))[0]


def compare_softmaxes(x, dim, dtype=None, grad=None):
    """Both functions on x against torch's and float64's, forward and backward."""
    grad = torch.randn(x.shape, device=x.device).to(dtype or x.dtype) if grad is None else grad
    for name in ("softmax", "log_softmax"):
        ours = softmax_and_gradient(getattr(flash_online.functional, name), x, dim, grad, dtype)
        torchs = softmax_and_gradient(getattr(torch.nn.functional, name), x, dim, grad, dtype)
        truth = softmax_and_gradient(getattr(torch, name), x.double(), dim, grad)
        assert ours[0].dtype == torchs[0].dtype and ours[1].dtype == x.dtype
        assert ours[0].is_contiguous() and ours[0].device == x.device
        # The gradient of a row is a difference of terms as large as grad, and 0 for a row of one class.
        magnitudes = (0.0, grad.abs().max().item() if grad.numel() else 0.0)
        for what, mine, theirs, exact, magnitude in zip(("result", "gradient"), ours, torchs, truth, magnitudes, strict=True):
            label = f"{what} of {name}({x.dtype}{list(x.shape)} strides {list(x.stride())}, {dim})"
            assert_close_to_float64(mine, theirs, exact, name=label, magnitude=magnitude)


def gradients(outputs, inputs, grads):
    return torch.autograd.grad(outputs, inputs, [g.to(o.dtype) for g, o in zip(grads, outputs, strict=True)])


def leaf(x, convert):
    return convert(x.detach()).requires_grad_() if x.is_floating_point() else x


def wide_as_possible(x):
    return x.double() if x.is_floating_point() else x


def compare_logsumexp(x, dim):
    grad = torch.randn([n for i, n in enumerate(x.shape) if i != dim % x.dim()], device=x.device).to(x.dtype)

    def run(function, convert):
        y = leaf(x, convert)
        out = function(y, dim)
        return out, gradients([out], [y], [grad])[0]

    ours = run(flash_online.logsumexp, lambda t: t)
    theirs, truth = run(torch.logsumexp, lambda t: t), run(torch.logsumexp, wide_as_possible)
    assert ours[0].dtype == x.dtype and ours[1].dtype == x.dtype
    for what, a, b, c in zip(("lse", "gradient"), ours, theirs, truth, strict=True):
        assert_close_to_float64(a, b, c, name=f"{what} of {x.dtype}{list(x.shape)} {x.stride()}, {dim}", magnitude=1.0)


def reference_loss(x, target, weight, options, z_loss=0.0):
    """torch's loss, lse and z-loss."""
    weight = None if weight is None else weight.to(x.dtype)
    target = target.to(x.dtype) if target.is_floating_point() else target
    loss = TF.cross_entropy(x, target, weight, **options)
    lse = torch.logsumexp(x, 1)
    if z_loss:
        kept = lse if target.is_floating_point() else lse[target != options.get("ignore_index", -100)]
        if options.get("reduction") == "none":
            keep = torch.ones_like(lse, dtype=torch.bool) if target.is_floating_point() else target != -100
            loss = loss + z_loss * torch.where(keep, lse, 0).square()
        else:
            loss = loss + z_loss * (kept.square().mean() if options.get("reduction", "mean") == "mean" else kept.square().sum())
    return loss, lse


def compare_loss(x, target, weight=None, z_loss=0.0, **options):
    """Loss, lse and every gradient against torch's and float64's; compared in float32, whatever the logits are."""
    given = [x, target] if target.is_floating_point() else [x]
    grads = None
    results = []
    for name, convert in (("ours", lambda t: t), ("torch", lambda t: t), ("truth", wide_as_possible)):
        leaves = [leaf(t, convert) for t in given]
        y, t = leaves[0], leaves[1] if len(leaves) > 1 else target
        if name == "ours":
            outputs = flash_online.cross_entropy(y, t, weight, z_loss=z_loss, return_lse=True, dtype=torch.float32, **options)
        else:
            outputs = reference_loss(y, t, weight, options, z_loss)
        if grads is None:
            grads = [torch.randn(o.shape, device=x.device) for o in outputs]
        results.append([*outputs, *gradients(outputs, leaves, grads)])
    ours, theirs, truth = results
    rows = x.numel() / max(x.shape[1], 1)
    size = x.detach().double()
    size = size[size.isfinite()].abs().max().item() if size.isfinite().any() else 0.0
    mean = options.get("reduction", "mean") == "mean"
    for i, (a, b, c) in enumerate(zip(ours, theirs, truth, strict=True)):
        label = f"result {i} (loss, lse, gradients) of {x.dtype}{list(x.shape)} {x.stride()} {options} z {z_loss}"
        magnitude = size if i < 2 else max(1 / rows if mean else 1.0, *(g.abs().max().item() for g in grads[1:]))
        assert_close_to_float64(a, b.to(a.dtype), c, name=label, magnitude=magnitude)


def random_targets(x, ignored=True):
    target = torch.randint(0, x.shape[1], x.shape[:1] + x.shape[2:], device=x.device)
    if ignored and target.numel() > 2:
        target.view(-1)[1] = -100
    return target


def compare_topk(x, k, dim=-1, **options):
    """Values, indices and gradient against float64's; equal elements in any order."""
    y = x.detach().requires_grad_()
    probabilities, at = flash_online.topk_softmax(y, k, dim, **options)
    exact = torch.softmax(x.double(), dim)
    largest = exact.topk(k, dim).values
    assert at.dtype == torch.int64 and probabilities.dtype == options.get("dtype", x.dtype)
    label = f"{x.dtype}{list(x.shape)} {x.stride()} {k} {dim} {options}"
    assert k < 2 or (at.sort(dim).values.diff(dim=dim) > 0).all(), f"an index twice: {label}"
    z = x.detach().double().requires_grad_()
    chosen = torch.softmax(z, dim).gather(dim, at)
    torch.testing.assert_close(chosen, largest, rtol=1e-9, atol=0.0, msg=lambda m: f"{label}: {m}")
    theirs = torch.softmax(x, dim, dtype=probabilities.dtype).gather(dim, at)
    if options.get("renormalize"):
        chosen, theirs = chosen / chosen.sum(dim, keepdim=True), theirs / theirs.sum(dim, keepdim=True)
    assert_close_to_float64(probabilities, theirs, chosen, name=label)
    grad = torch.randn_like(probabilities)
    (ours,) = torch.autograd.grad(probabilities, y, grad)
    (truth,) = torch.autograd.grad(chosen, z, grad.double())
    w = x.detach().requires_grad_()
    plain = torch.softmax(w, dim, dtype=probabilities.dtype).gather(dim, at)
    plain = plain / plain.sum(dim, keepdim=True) if options.get("renormalize") else plain
    (theirs,) = torch.autograd.grad(plain, w, grad)
    rounding = max(x.dtype, probabilities.dtype, key=lambda d: torch.finfo(d).eps)
    assert_close_to_float64(ours, theirs, truth, rounding, name=f"gradient, {label}", magnitude=1.0)


# Row functions of x and a target, as lists of results.
OPERATORS = {
    "logsumexp": lambda x, t: [flash_online.logsumexp(x, 1)],
    "cross_entropy": lambda x, t: list(flash_online.cross_entropy(x, t, reduction="none", return_lse=True)),
    "entropy": lambda x, t: list(flash_online.cross_entropy(x, t, reduction="none", return_entropy=True)),
    "softmax": lambda x, t: [flash_online.softmax(x, 1)],
}


def forward_and_backward(function, x, target):
    """The floating results of one of OPERATORS, and the gradient of their sum."""
    x = x.detach().requires_grad_()
    outputs = function(x, target)
    outputs = [o for o in outputs if o.is_floating_point()]
    return [*(o.detach() for o in outputs), *torch.autograd.grad([o.sum() for o in outputs], x)]
