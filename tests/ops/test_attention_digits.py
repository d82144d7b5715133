"""The last digits of attention: large scores, what cancels, infinities in problems of several tiles."""

from __future__ import annotations

import math

import pytest
import torch
from devices import skip_without_room
from oracle import Attention, Packed

import flash_online

INF = math.inf
DTYPES = [torch.float16, torch.bfloat16, torch.float32]


def made(*shape, dtype=torch.bfloat16, device):
    return torch.randn(shape, device=device).to(dtype)


@pytest.mark.parametrize("size", [10.0, 100.0, 1000.0])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("lengths", [(192, 320), (128, 64)], ids=str)
def test_extreme_scores(size, dtype, lengths, device):
    """Logarithms of denominators below -88 and over 88, few key heads, lengths that end half-way in a tile."""
    for sign in (1, -1):
        Attention(
            dtype=dtype,
            heads=(4, 1, 1),
            lengths=lengths,
            head_dims=(64, 64),
            options={"scale": sign * size / 64, "causal": True},
            grad_lse=False,
        ).check(device)


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
def test_gradients_of_masks_at_large_scores(shape, options, seed, device):
    """Sums over keys are 0 only if weights are computed from the very scores that lse was computed from. At scores of 1,000 and
    more every last bit counts."""
    made = {"lengths": (128, 128), "mask": "-inf", "size": 4.0, "grad_lse": False}
    Attention(**shape, **made, options=options, seed=seed).check(device)


LAST_DIGITS = {  # problems of float32 that a score, or a difference of two gradients of weights, rounded once too often fails
    "alibi": Attention(
        batch=(1,), heads=(4, 4, 1), lengths=(9, 160), head_dims=(8, 1), mask="bool", mask_shape=(0, 1, 1, 0),
        options={"causal": True, "alignment": "lower_right"}, alibi=1, sinks=True, size=4.0, seed=6011316,
    ),
    "alibi, mask": Attention(
        heads=(6, 2, 3), lengths=(14, 8), head_dims=(16, 16), layouts=("expanded", "columns", "contiguous", "strided"),
        mask="-inf", options={"alignment": "lower_right"}, alibi=1, size=4.0, seed=6012186,
    ),
    "one query": Attention(
        batch=(), heads=(4, 2, 1), lengths=(1, 16), head_dims=(64, 16), options={"scale": -0.5}, alibi=1,
        layouts=("contiguous", "contiguous", "contiguous", "expanded"), mask_shape=(0, 0, 1, 0), seed=336006534,
    ),
    "a few large scores": Attention(
        batch=(), heads=(4, 2, 1), lengths=(16, 37), head_dims=(64, 64), options={"scale": -0.5}, sinks=True, seed=335008539,
        layouts=("unaligned", "contiguous", "sliced", "contiguous"),
    ),
    "dropout": Packed(
        heads=(4, 2, 2), lengths=((16, 3), (19, 65), (5, 23)), head_dims=(16, 16), wanted="kv", seed=331026278, spare=(1, 1),
        layouts=("expanded", "contiguous", "expanded", "strided"),
        options={"alignment": "lower_right", "dropout_p": 0.9, "scale": 1.0},
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
def test_last_digits_of_float32(name, device):
    LAST_DIGITS[name].check(device)


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
def test_lse_of_wide_head_dims(problem, device):
    """In 16 bits: lse has the tolerance of float32, though the tensor cores truncate each of sixteen partial sums."""
    Attention(dtype=torch.float16, batch=(1,), heads=(1, 1, 1), head_dims=(256, 256), grad_lse=False, **problem).check(device)


@pytest.mark.parametrize("options", [{}, {"dropout_p": 0.1}], ids=["", "dropout"])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("head_dim", [20, 64, 128, 256])
def test_scores_of_a_lone_key_have_no_gradient(head_dim, deterministic, options, device):
    """A query that sees one key weighs it 1 whatever its score: float32 says 0, not the rounding of two sums of products."""
    skip_without_room(device, torch.float32, head_dim)
    query, key, value = (torch.randn(2, 4, 150, head_dim, device=device, requires_grad=True) for _ in range(3))
    bias = torch.zeros(150, 150, device=device, requires_grad=True)
    for mask in (None, bias):
        out = flash_online.attention(query, key, value, window=(0, 0), mask=mask, deterministic=deterministic, **options)
        wanted = [t for t in (query, key, mask) if t is not None]
        for grad in torch.autograd.grad(out, wanted, torch.randn_like(out)):
            assert grad.count_nonzero() == 0


def test_float16_keeps_its_digits(device):
    """A lone key: the output is its value and lse its score, with all of float16's 11 digits, subnormal numbers among them."""
    query, key, value = (torch.randint(1025, 2048, (1, 2, n, 72), device=device) for n in (40, 1, 1))
    query, key, value = query.half() / 1024, key.half() / 1024, (value - 1024).half() * 2.0**-24
    query[..., ::2] *= -1
    value[..., 1::2] *= -(2.0**20)
    leaves = [t.requires_grad_() for t in (query, key, value)]
    out, lse = flash_online.attention(*leaves, scale=1.0, return_lse=True)
    assert torch.equal(out, value.expand_as(out))
    score = (query.double() @ key.double().mT)[..., 0]
    torch.testing.assert_close(lse.double(), score, rtol=1e-6, atol=1e-4)
    grad_out = torch.zeros_like(out)
    grad_out[:, :, 7] = value[:, :, 0]
    assert torch.equal(torch.autograd.grad(out, value, grad_out)[0], value)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scores_of_minus_infinity_by_infinite_keys(dtype, device):
    """An infinite key whose scores are -inf weighs nothing, whatever digits the factors of its products have."""
    query, key, value = (made(1, 1, n, 64, dtype=dtype, device=device) for n in (70, 200, 200))
    query[..., 5] = torch.where(torch.arange(70, device=device) % 2 == 0, 1.0, 1.0009765625).to(dtype)
    expected = flash_online.attention(query, key[:, :, :199], value[:, :, :199])
    key[0, 0, 199, 5] = -INF
    torch.testing.assert_close(flash_online.attention(query, key, value), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nan_and_infinity_reach_their_rows(dtype, device):
    query, key, value = (made(1, 1, 200, 64, dtype=dtype, device=device) for _ in range(3))
    query[0, 0, 3], query[0, 0, 150, 5] = math.nan, math.nan
    out = flash_online.attention(query, key, value)
    bad = torch.zeros(200, dtype=torch.bool, device=device)
    bad[[3, 150]] = True
    assert out[0, 0, bad].isnan().all() and out[0, 0, ~bad].isfinite().all()
    value[0, 0, 199, 7], value[0, 0, 198, 9] = INF, -INF
    out = flash_online.attention(query[:, :, 4:100], key, value)
    assert (out[..., 7] == INF).all() and (out[..., 9] == -INF).all() and out[..., 10:].isfinite().all()
