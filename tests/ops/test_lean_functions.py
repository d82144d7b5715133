"""The autograd Functions of the fast paths (`_autograd.lean`) are called without torch's wrappers in Python, and keep the
promises of a Function."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as TF

import flash_online

TARGET = torch.tensor([0, 3, 1])
# name -> (our function of one tensor, torch's, the tensor's shape, the name of the node)
CALLS = {
    "softmax": (lambda x: flash_online.softmax(x, -1), lambda x: TF.softmax(x, -1), (3, 4), "LeanSoftmaxBackward"),
    "log_softmax": (lambda x: flash_online.log_softmax(x, 0), lambda x: TF.log_softmax(x, 0), (3, 4), "LeanSoftmaxBackward"),
    "cross_entropy": (
        lambda x: flash_online.cross_entropy(x, TARGET.to(x.device)),
        lambda x: TF.cross_entropy(x, TARGET.to(x.device)),
        *((3, 4), "LeanLossBackward"),
    ),
    "attention": (
        lambda x: flash_online.attention(x, x, x, causal=True),
        lambda x: TF.scaled_dot_product_attention(x, x, x, is_causal=True),
        *((2, 3, 5, 8), "LeanAttentionBackward"),
    ),
}
pytestmark = pytest.mark.parametrize("name", CALLS)


def leaf(name, device):
    return torch.randn(CALLS[name][2], device=device, requires_grad=True)


def weighted(out):
    """A number whose gradient in `out` is not constant."""
    return (out * torch.linspace(-1, 1, out.numel(), device=out.device).view(out.shape)).sum() if out.dim() else 3 * out


def gradient(function, x, **options):
    return torch.autograd.grad(weighted(function(x)), x, **options)[0]


def test_the_gradient(name, device):
    ours, torchs, _, node = CALLS[name]
    x = leaf(name, device)
    assert ours(x).grad_fn.name() == node
    torch.testing.assert_close(gradient(ours, x), gradient(torchs, x))


def test_a_second_backward(name, device):
    ours, *_ = CALLS[name]
    loss = weighted(ours(x := leaf(name, device)))
    first, again = (torch.autograd.grad(loss, x, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, again)
    torch.autograd.grad(loss, x)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(loss, x)


def test_the_graph_of_the_gradient(name, device):
    """With create_graph the gradient is the same, and has a gradient."""
    ours, torchs, *_ = CALLS[name]
    x = leaf(name, device)
    torch.testing.assert_close(gradient(ours, x, create_graph=True), gradient(ours, x))
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):  # torch's fused kernels have no second derivative
        seconds = [torch.autograd.grad(gradient(f, x, create_graph=True).sin().sum(), x)[0] for f in (ours, torchs)]
    torch.testing.assert_close(*seconds, rtol=1e-4, atol=1e-5)


def test_what_is_saved_and_then_overwritten(name, device):
    ours, *_ = CALLS[name]
    x = leaf(name, device)
    out = ours(x)
    with torch.no_grad():
        (x if name == "cross_entropy" else out).mul_(2)  # the loss itself is not saved
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(weighted(out), x)


def test_hooks(name, device):
    """Hooks of saved tensors, of the node and of the result run."""
    ours, *_ = CALLS[name]
    x = leaf(name, device)
    expected, packed, seen = gradient(ours, x), [], []

    def pack(tensor):
        packed.append(tensor.shape)
        return tensor.cpu()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor.to(device)):
        out = ours(x)
    assert packed
    out.register_hook(lambda grad: seen.append("result"))
    out.grad_fn.register_hook(lambda *_: seen.append("node"))
    out.grad_fn.register_prehook(lambda grads: seen.append("before"))
    assert torch.equal(torch.autograd.grad(weighted(out), x)[0], expected)
    assert sorted(seen) == ["before", "node", "result"]


def test_a_tensor_that_outlived_its_transform(name, device):
    """torch.func.grad passes its function a wrapper of the tensor, which still reaches the tensor after the transform."""
    ours, *_ = CALLS[name]
    x, kept = leaf(name, device), []
    torch.func.grad(lambda t: (kept.append(t), t.sum())[1])(x)
    assert torch.equal(torch.autograd.grad(weighted(ours(kept[0])), x)[0], gradient(ours, x))


def test_an_anomaly(name, device):
    """Anomaly mode names the node whose gradient is NaN."""
    ours, _, shape, node = CALLS[name]
    x = torch.full(shape, float("nan"), device=device, requires_grad=True)
    with pytest.warns(UserWarning, match=f"Error detected in {node}"), torch.autograd.detect_anomaly(check_nan=True):
        out = ours(x)
        with pytest.raises(RuntimeError, match=f"'{node}' returned nan"):
            torch.autograd.grad(out, x, torch.ones_like(out))
