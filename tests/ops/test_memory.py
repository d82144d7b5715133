"""Memory on the CPU: attention needs O(L) in addition to its inputs, whatever its options, and the losses O(rows)."""

from __future__ import annotations

import pytest
import torch
from cases import OPTIONS

import flash_online
from flash_online.testing import peak_extra_bytes, peak_resident_bytes


def attention_inputs(length, heads=2, head_dim=16, requires_grad=True):
    return [torch.randn(1, heads, length, head_dim, requires_grad=requires_grad) for _ in range(3)]


@pytest.mark.parametrize("options", ["plain", "causal", "window", "softcap", "alibi", "sinks"])
@pytest.mark.parametrize("dropout_p", [0.0, 0.2])
def test_attention_is_linear(options, dropout_p):
    """Four times the length, at most about four times the memory; the scores alone would be sixteen times."""
    made = dict(OPTIONS[options])
    more = {}
    if made.pop("alibi", 0):
        more["alibi_slopes"] = torch.rand(2)
    if made.pop("sinks", False):
        more["sinks"] = torch.randn(2, requires_grad=True)

    def extra(length):
        inputs = attention_inputs(length)

        def call():
            out = flash_online.attention(*inputs, **made, **more, dropout_p=dropout_p)
            return out, torch.autograd.grad(out, inputs, torch.ones_like(out))

        call()
        return peak_extra_bytes(call)

    long = extra(2048)
    assert long < 4.5 * extra(512)
    assert long < 2048 * 2048  # a byte a score would be more


@pytest.mark.parametrize("shape", [(1, 1, 1, 2048), (1, 1, 2048, 1), (1, 2, 1, 2048)], ids=str)
def test_attention_mask_gradient_needs_the_size_of_the_mask(shape):
    inputs = attention_inputs(2048, requires_grad=False)
    mask = torch.randn(shape, requires_grad=True)

    def call():
        out = flash_online.attention(*inputs, mask=mask)
        return torch.autograd.grad(out, mask, torch.ones_like(out))

    call()
    assert peak_extra_bytes(call) < 2048 * 2048, "a byte a score would be more"


@pytest.mark.parametrize("shape", [(1, 1, 1024, 1024), (1, 8, 1024, 1024)], ids=str)
def test_attention_with_a_large_bias_needs_no_square_for_each_head(shape):
    """A gradient that heads share is summed in one buffer of its size; one of each head's own is written at once."""
    inputs = attention_inputs(1024, heads=8, requires_grad=False)
    mask = torch.randn(shape, requires_grad=True)

    def call():
        out = flash_online.attention(*inputs, mask=mask)
        return torch.autograd.grad(out, mask, torch.ones_like(out))

    call()
    squares = peak_extra_bytes(call) / (1024 * 1024 * 4)
    assert squares < (4 if shape[1] == 1 else 10), "a square of scores for each head would be 8 more"


def test_attention_of_a_long_sequence():
    """L = 16384, H = 8, E = 64 in float32: at most 1.5 times the bytes of q, k, v, out and their gradients.

    Memory does not depend on how many keys a query sees, so a window keeps the test short; the benchmarks measure without one.
    """
    inputs = attention_inputs(16384, heads=8, head_dim=64)
    tensors = 2 * 4 * inputs[0].numel() * 4
    grad = torch.randn_like(inputs[0])

    def call():
        out = flash_online.attention(*inputs, causal=True, window=(64, 0))
        return out, torch.autograd.grad(out, inputs, grad)

    assert peak_extra_bytes(call) + tensors // 2 <= 1.5 * tensors  # what is held before: q, k, v and the gradient of out
    resident = peak_resident_bytes(call)
    assert resident is None or resident + tensors // 2 <= 1.6 * tensors


def test_attention_forward_alone_keeps_out_and_lse():
    inputs = attention_inputs(4096, heads=4, head_dim=32, requires_grad=False)
    out_bytes = inputs[0].numel() * 4
    assert peak_extra_bytes(lambda: flash_online.attention(*inputs)) < 1.5 * out_bytes


def test_cross_entropy_makes_no_copy_of_the_logits():
    """The forward pass allocates a few numbers per row, the backward pass the gradient. Torch also keeps a log-softmax."""
    logits = torch.randn(256, 32000, dtype=torch.bfloat16, requires_grad=True)
    target = torch.randint(0, 32000, (256,))
    size = logits.numel() * 2
    assert peak_extra_bytes(lambda: flash_online.cross_entropy(logits, target, dtype=torch.float32)) < size // 50

    def call():
        return torch.autograd.grad(flash_online.cross_entropy(logits, target, dtype=torch.float32), logits)

    assert peak_extra_bytes(call) < 1.05 * size


def test_topk_softmax_keeps_k_numbers():
    x = torch.randn(64, 32000)
    assert peak_extra_bytes(lambda: flash_online.topk_softmax(x, 8)) < x.numel() * 4 // 20
