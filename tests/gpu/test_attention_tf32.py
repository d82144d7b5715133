"""Attention of float32 with fewer digits on CUDA, where torch allows tf32."""

from __future__ import annotations

import math

import pytest
import torch

import flash_online

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("ours_alone")]
INF = math.inf


def gpu(*shape, dtype=torch.bfloat16):
    return torch.randn(shape, device="cuda").to(dtype)


TF32_CALLS = {
    "plain": {},
    "causal, window": {"causal": True, "window": (100, None)},
    "softcap": {"softcap": 5.0},
    "mask": {"mask": True},
}


@pytest.mark.parametrize("name", TF32_CALLS)
@pytest.mark.parametrize("head_dim", [20, 32, 64, 96, 128, 192, 256, 300])
def test_tf32_where_torch_allows_it(head_dim, name):
    """Errors are within 2^-15 of the terms that results are summed from, where tf32 itself has 2^-11. After the setting is
    undone, results are exact again."""
    options = dict(TF32_CALLS[name])
    lengths, matmul = (200, 333), torch.backends.cuda.matmul
    shapes = [(2, heads, n, head_dim) for heads, n in zip((4, 2, 2), (lengths[0], *lengths[1:] * 2), strict=True)]
    leaves = [torch.randn(shape, device="cuda", requires_grad=True) for shape in shapes]
    if options.pop("mask", False):
        options["mask"] = torch.rand(lengths, device="cuda") > 0.3
    grad_out, grad_lse = torch.randn(2, 4, lengths[0], head_dim, device="cuda"), torch.randn(2, 4, lengths[0], device="cuda")

    def run(function, leaves, dtype=torch.float32):
        out, lse = function(*leaves, **options, return_lse=True)
        return out, lse, *torch.autograd.grad((out, lse), leaves, (grad_out.to(dtype), grad_lse.to(dtype)))

    exact = run(flash_online.attention, leaves)
    before = matmul.fp32_precision
    try:
        matmul.fp32_precision = "tf32"
        coarse = run(flash_online.attention, leaves)
        with torch.no_grad():
            assert torch.equal(flash_online.attention(*leaves, **options), coarse[0])
    finally:
        matmul.fp32_precision = before
    assert all(map(torch.equal, run(flash_online.attention, leaves)[:2], exact[:2]))
    truth = run(flash_online.reference.attention, [t.detach().double().requires_grad_() for t in leaves], torch.float64)
    for ours, expected in zip(coarse, truth, strict=True):
        assert (ours - expected).abs().max() < 2**-15 * max(1, expected.abs().max().item())
    if torch.cuda.get_device_properties("cuda").shared_memory_per_block_optin > 100 << 10:  # with less some have no room for it
        assert torch.equal(coarse[0], exact[0]) == (head_dim > 256)


@pytest.mark.parametrize("setting", ["the forward pass alone", "the backward pass alone"])
def test_tf32_is_as_it_was_in_the_forward_pass(setting):
    """Sums of gradients over blocks of keys come in any order: deterministic ones repeat."""
    leaves = [gpu(2, 2, 200, 64, dtype=torch.float32).requires_grad_() for _ in range(3)]
    grad_out, matmul = gpu(2, 2, 200, 64, dtype=torch.float32), torch.backends.cuda.matmul
    before = matmul.fp32_precision

    def gradients(forward, backward):
        try:
            matmul.fp32_precision = forward
            out = flash_online.attention(*leaves, deterministic=True)
            matmul.fp32_precision = backward
            return torch.autograd.grad(out, leaves, grad_out)
        finally:
            matmul.fp32_precision = before

    first = "tf32" if setting == "the forward pass alone" else "ieee"
    then = "ieee" if first == "tf32" else "tf32"
    assert all(map(torch.equal, gradients(first, then), gradients(first, first)))
    assert not torch.equal(gradients(first, then)[2], gradients(then, then)[2])


def test_tf32_of_packed_sequences_and_infinities():
    lengths = torch.tensor([0, 70, 70, 331], dtype=torch.int32, device="cuda")
    query, key, value = (gpu(331, 2, 64, dtype=torch.float32) for _ in range(3))
    value[330, :, 7] = INF
    before = torch.backends.cuda.matmul.fp32_precision
    try:
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        out = flash_online.varlen_attention(query, key, value, lengths, lengths, 261, 261)
        for begin, end in ((0, 70), (70, 331)):
            alone = flash_online.attention(*(t[begin:end].transpose(0, 1).unsqueeze(0) for t in (query, key, value)))
            torch.testing.assert_close(out[begin:end], alone[0].transpose(0, 1), rtol=2**-15, atol=2**-15)
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
    assert (out[70:, :, 7] == INF).all() and out[:70].isfinite().all() and out[70:, :, 8:].isfinite().all()
