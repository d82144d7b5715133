"""torch's causal_upper_left and causal_lower_right as attn_mask: our own causal rules, without a mask."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

import flash_online
import flash_online.functional as F

TF = torch.nn.functional
ATTENTION = TF.scaled_dot_product_attention


def tensors(device, queries=30, keys=60, key_heads=4):
    shapes = ((2, 4, queries, 16), (2, key_heads, keys, 16), (2, key_heads, keys, 16))
    return [torch.randn(shape, device=device, requires_grad=True) for shape in shapes]


@pytest.mark.parametrize("options", [{}, {"scale": 0.3}, {"enable_gqa": True}], ids=repr)
@pytest.mark.parametrize(
    "queries, keys, bias",
    [
        (30, 60, causal_lower_right(30, 60)),
        (1, 60, causal_lower_right(1, 60)),
        (30, 30, causal_lower_right(30, 30)),
        (30, 30, causal_lower_right(50, 50)),  # where it is square torch asks for no more
        (30, 60, causal_upper_left(30, 60)),
        (60, 30, causal_upper_left(60, 30)),
        (30, 60, causal_upper_left(3, 6)),  # torch does not look at these sizes
    ],
    ids=lambda value: f"{value.variant.name} {value.seq_len_q} {value.seq_len_kv}" if hasattr(value, "variant") else str(value),
)
def test_results_and_gradients_are_those_of_torch(device, queries, keys, bias, options):
    inputs = tensors(device, queries, keys, 2 if options.get("enable_gqa") else 4)
    found = F.scaled_dot_product_attention(*inputs, bias, **options)
    wanted = ATTENTION(*inputs, bias, **options)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    grads = (torch.autograd.grad(out.square().sum(), inputs) for out in (found, wanted))
    for ours, torchs in zip(*grads, strict=True):
        torch.testing.assert_close(ours, torchs, rtol=1e-3, atol=1e-4)


@pytest.mark.filterwarnings("ignore:Lower right causal bias will produce NaNs")
def test_the_bits_of_attention(device):
    for queries, keys in ((30, 60), (60, 30)):
        query, key, value = tensors(device, queries, keys)
        found = F.scaled_dot_product_attention(query, key, value, causal_lower_right(queries, keys))
        wanted = flash_online.attention(query, key, value, causal=True, alignment="lower_right")
        assert torch.equal(found, wanted)
        assert not found[:, :, : max(queries - keys, 0)].any()
    torch.manual_seed(3)
    found = F.scaled_dot_product_attention(query, key, value, causal_lower_right(60, 30), dropout_p=0.4)
    torch.manual_seed(3)
    assert torch.equal(found, flash_online.attention(query, key, value, causal=True, alignment="lower_right", dropout_p=0.4))


@pytest.mark.parametrize("function", [F.scaled_dot_product_attention, ATTENTION])
@pytest.mark.parametrize("bias", [causal_lower_right(30, 60), causal_upper_left(30, 60)])
def test_explain_says_that_it_is_ours(device, function, bias):
    plan = flash_online.explain(function, *(t.detach() for t in tensors(device)), attn_mask=bias)
    assert plan.ours and len(plan.operators) == 1


def test_no_mask_is_made(device):
    class Largest(torch.utils._python_dispatch.TorchDispatchMode):
        elements = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            for tensor in result if isinstance(result, tuple) else (result,):
                self.elements = max(self.elements, tensor.numel())
            return result

    query, key, value = (t.detach() for t in tensors(device, 400, 500))
    bias = causal_lower_right(400, 500)
    with Largest() as seen:
        F.scaled_dot_product_attention(query, key, value, bias)
    assert seen.elements <= query.numel() < 400 * 500


def test_what_does_not_fit_raises_as_in_torch(device):
    inputs = tensors(device)
    for bias in (causal_lower_right(30, 59), causal_lower_right(29, 60)):
        with pytest.raises(RuntimeError):
            ATTENTION(*(t.cpu() for t in inputs), bias)
        with pytest.raises(flash_online.InvalidArgument, match=r"^attn_mask: expected .*\[30, 60\]"):
            F.scaled_dot_product_attention(*inputs, bias)
    with pytest.raises(flash_online.InvalidArgument, match=r"^attn_mask: expected .*\[30, 60\]"):
        F.scaled_dot_product_attention(*inputs, causal_lower_right(30, 30))  # torch aligns it to the upper left
    for function in (ATTENTION, F.scaled_dot_product_attention):
        with pytest.raises(ValueError):
            function(*inputs, causal_lower_right(30, 60), is_causal=True)


@pytest.mark.parametrize("bias", [causal_lower_right(30, 60), causal_upper_left(30, 60)])
def test_compiled(device, bias):
    inputs = tensors(device)

    def call(query, key, value, bias):
        return F.scaled_dot_product_attention(query, key, value, bias)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    found, wanted = compiled(*inputs, bias), call(*inputs, bias)
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    grads = (torch.autograd.grad(out.square().sum(), inputs) for out in (found, wanted))
    assert all(torch.allclose(ours, eager) for ours, eager in zip(*grads, strict=True))


def test_under_override_and_autocast(device):
    inputs, bias = tensors(device), causal_lower_right(30, 60)
    wanted = F.scaled_dot_product_attention(*inputs, bias)
    with flash_online.override():
        assert torch.equal(TF.scaled_dot_product_attention(*inputs, bias), wanted)
        with torch.autocast(device, torch.bfloat16):
            assert TF.scaled_dot_product_attention(*inputs, bias).dtype == torch.bfloat16


@pytest.mark.forwards
def test_what_goes_to_torch_takes_the_rule_along(monkeypatch):
    """Torch's own class sends on what it takes for torch.nn.functional's function, which under override() is ours."""
    seen = []
    monkeypatch.setitem(F.ORIGINALS, "scaled_dot_product_attention", lambda *args, **_: seen.append(args) or args[0])
    query, key, value = (t.detach().to(torch.complex64) for t in tensors("cpu"))
    F.scaled_dot_product_attention(query, key, value, causal_lower_right(30, 60))
    F.scaled_dot_product_attention(query, key, value, causal_upper_left(30, 60))
    (*_, mask, _, causal), (*_, no_mask, _, upper_left) = seen
    assert not causal and torch.equal(mask, torch.ones(30, 60, dtype=torch.bool).tril(30))
    assert no_mask is None and upper_left
