"""The last digits of attention on CUDA: large scores, what cancels, infinities, and fewer digits where torch allows tf32."""

from __future__ import annotations

import math

import pytest
import torch
from oracle import Attention, Packed
from test_cuda import missing
from test_cuda_attention import DTYPES, INF, gpu, on_cuda  # noqa: F401 (on_cuda: a fixture of every test here)

import flash_online

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))


@pytest.mark.parametrize("size", [10.0, 100.0, 1000.0])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("lengths", [(192, 320), (128, 64)], ids=str)
def test_extreme_scores(size, dtype, lengths):
    """Logarithms of denominators below -88 and over 88, few key heads, lengths that end half-way in a tile."""
    for sign in (1, -1):
        Attention(
            dtype=dtype,
            heads=(4, 1, 1),
            lengths=lengths,
            head_dims=(64, 64),
            options={"scale": sign * size / 64, "causal": True},
            grad_lse=False,
        ).check()


@pytest.mark.parametrize(
    "shape, options, seed",
    [
        ({"heads": (4, 4, 1), "head_dims": (64, 64), "mask_shape": (1, 1, 1, 0)}, {"window": (30, 2), "scale": 1.0}, 8001118),
        (
            {"head_dims": (128, 128), "mask_shape": (1, 1, 0, 0), "alibi": 1},
            {"alignment": "lower_right", "scale": 4.0},
            8001145,
        ),
    ],
    ids=["keys", "queries and keys"],
)
def test_gradients_of_masks_at_large_scores(shape, options, seed):
    """Sums over keys are 0 only if weights are computed from the very scores that lse was computed from. At scores of 1,000 and
    more every last bit counts."""
    made = {"lengths": (128, 128), "mask": "-inf", "size": 4.0, "grad_lse": False}
    Attention(**shape, **made, options=options, seed=seed).check()


LAST_DIGITS = {  # problems of float32 that a score, or a difference of two gradients of weights, rounded once too often fails
    "alibi": Attention(
        batch=(1,), heads=(4, 4, 1), lengths=(9, 160), head_dims=(8, 1), mask="bool", mask_shape=(0, 1, 1, 0),
        options={"causal": True, "alignment": "lower_right"}, alibi=1, sinks=True, size=4.0, seed=6011316,
    ),
    "alibi, mask": Attention(
        heads=(6, 2, 3), lengths=(14, 8), head_dims=(16, 16), layouts=("expanded", "columns", "contiguous", "strided"),
        mask="-inf", options={"alignment": "lower_right"}, alibi=1, size=4.0, seed=6012186,
    ),
    "alibi, packed": Packed(
        heads=(6, 2, 3), lengths=((29, 0), (7, 20)), head_dims=(3, 16), alibi=1, size=4.0, seed=6007111, spare=(0, 70),
        layouts=("unaligned", "contiguous", "transposed", "strided"),
    ),
    "scale below 0": Attention(
        batch=(1, 2), heads=(3, 1, 1), lengths=(8, 24), head_dims=(1, 1), size=4.0, grad_lse=False, seed=6010156,
        layouts=("unaligned", "contiguous", "expanded", "contiguous"),
        options={"causal": True, "alignment": "lower_right", "scale": -0.5},
    ),
    "large scale": Packed(
        heads=(1, 1, 1), lengths=((26, 160), (1, 24)), head_dims=(64, 64), options={"scale": 4.0}, size=4.0, wanted="kv",
        layouts=("expanded", "contiguous", "contiguous", "contiguous"), seed=8001156, spare=(70, 0),
    ),
    "sinks": Attention(
        heads=(4, 2, 1), lengths=(21, 2), head_dims=(8, 40), layouts=("strided", "contiguous", "contiguous", "transposed"),
        options={"causal": True, "alignment": "lower_right"}, sinks=True, size=4.0, wanted="kv", grad_lse=False, seed=6008101,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LAST_DIGITS)
def test_last_digits_of_float32(name):
    LAST_DIGITS[name].check()


@pytest.mark.parametrize(
    "problem",
    [
        {"lengths": (64, 400), "layouts": ("contiguous", "contiguous", "strided", "transposed"), "seed": 7010334}
        | {"options": {"causal": True, "scale": -0.5}, "wanted": "q"},
        {"lengths": (128, 400), "layouts": ("contiguous", "contiguous", "contiguous", "sliced"), "seed": 7002263, "size": 4.0}
        | {"mask": "float", "mask_shape": (1, 0, 0, 1), "mask_rank": 2, "mask_dtype": torch.float32},
        {"lengths": (128, 257), "layouts": ("transposed", "contiguous", "unaligned", "contiguous"), "seed": 2005187}
        | {
            "mask": "float",
            "mask_shape": (0, 1, 0, 1),
            "options": {"dropout_p": 0.1, "scale": -0.5},
            "sinks": True,
            "wanted": "m",
        },
    ],
    ids=["scale below 0", "mask", "dropout"],
)
def test_lse_of_wide_head_dims(problem):
    """In 16 bits: lse has the tolerance of float32, though the tensor cores truncate each of sixteen partial sums."""
    Attention(dtype=torch.float16, batch=(1,), heads=(1, 1, 1), head_dims=(256, 256), grad_lse=False, **problem).check()


@pytest.mark.parametrize("options", [{}, {"dropout_p": 0.1}], ids=["", "dropout"])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("head_dim", [20, 64, 128, 256])
def test_scores_of_a_lone_key_have_no_gradient(head_dim, deterministic, options):
    """A query that sees one key weighs it 1 whatever its score: float32 says 0, not the rounding of two sums of products."""
    query, key, value = (torch.randn(2, 4, 150, head_dim, device="cuda", requires_grad=True) for _ in range(3))
    bias = torch.zeros(150, 150, device="cuda", requires_grad=True)
    for mask in (None, bias):
        out = flash_online.attention(query, key, value, window=(0, 0), mask=mask, deterministic=deterministic, **options)
        wanted = [t for t in (query, key, mask) if t is not None]
        for grad in torch.autograd.grad(out, wanted, torch.randn_like(out)):
            assert grad.count_nonzero() == 0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nan_and_infinity_reach_their_rows(dtype):
    query, key, value = (gpu(1, 1, 200, 64, dtype=dtype) for _ in range(3))
    query[0, 0, 3], query[0, 0, 150, 5] = math.nan, math.nan
    out = flash_online.attention(query, key, value)
    bad = torch.zeros(200, dtype=torch.bool, device="cuda")
    bad[[3, 150]] = True
    assert out[0, 0, bad].isnan().all() and out[0, 0, ~bad].isfinite().all()
    value[0, 0, 199, 7] = INF
    out = flash_online.attention(query[:, :, 4:100], key, value)
    assert (out[..., 7] == INF).all() and out[..., 8:].isfinite().all()


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
