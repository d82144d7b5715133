"""Dropout on CUDA around the edges of the Hopper tiles: of head dims up to 64, and of those up to 128."""

from __future__ import annotations

import pytest
import torch
from oracle import Attention, Packed

import flash_online

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("ours_alone")]

DTYPES = [torch.bfloat16, torch.float16]
OPTIONS = {
    "full": {},
    "causal": {"causal": True},
    "lower right": {"causal": True, "alignment": "lower_right"},
    "window": {"causal": True, "window": (130, 0)},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize(
    "lengths", [(300, 300), (129, 577), (577, 65), (1, 200), (200, 1), (63, 129), (128, 128), (65, 127), (192, 191)], ids=str
)
@pytest.mark.parametrize("head_dims", [(64, 64), (40, 24), (96, 128)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_lengths(dtype, head_dims, lengths, options):
    """Blocks of 128 queries in two halves, of which the second may not exist; tiles of 128 keys of which half exists."""
    made = {"heads": (4, 2, 2), "head_dims": head_dims, "lengths": lengths, "sinks": lengths[0] == 300}
    Attention(dtype=dtype, batch=(2,), options=options | {"dropout_p": 0.3}, **made).check("cuda")


MASKS = {
    "bool": {"mask": "bool"},
    "blocks": {"mask": "blocks"},
    "blocks, groups": {"mask": "blocks", "heads": (6, 2, 2)},
    "padding": {"mask": "bool", "mask_shape": (1, 0, 0, 1)},
    "blocks, alibi": {"mask": "blocks", "alibi": 2},
    "blocks, causal": {"mask": "blocks", "options": {"causal": True}},
    "alibi, window": {"alibi": 1, "options": {"window": (90, 20)}},
    "float": {"mask": "float"},
}


@pytest.mark.parametrize("made", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("lengths", [(300, 304), (130, 584)], ids=str)
@pytest.mark.parametrize("head_dims", [(64, 64), (40, 64), (128, 128)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_masks(dtype, head_dims, lengths, made):
    made = {"heads": (4, 2, 2), "head_dims": head_dims} | made
    made["options"] = made.get("options", {}) | {"dropout_p": 0.3}
    mask_dtype = dtype if made.get("mask") == "float" else None
    Attention(dtype=dtype, batch=(2,), lengths=lengths, mask_dtype=mask_dtype, **made).check("cuda")


@pytest.mark.parametrize("size", [4.0, 16.0])
@pytest.mark.parametrize("head_dims", [(64, 64), (128, 128)], ids=str)
def test_large_scores(head_dims, size):
    """Where lse in base 2 is 256 or more, its low part counts."""
    made = {"dtype": torch.bfloat16, "heads": (2, 2, 2), "head_dims": head_dims, "lengths": (200, 260), "size": size}
    Attention(options={"dropout_p": 0.2, "causal": True}, **made).check("cuda")


@pytest.mark.parametrize("dropout", [0.01, 0.5, 0.9, 0.995])
@pytest.mark.parametrize("head_dims", [(64, 64), (128, 128)], ids=str)
def test_probabilities(head_dims, dropout):
    made = {"dtype": torch.bfloat16, "heads": (4, 4, 4), "head_dims": head_dims, "lengths": (257, 513)}
    Attention(options={"dropout_p": dropout}, **made).check("cuda")


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dims", [(64, 64), (32, 48)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_packed_sequences(dtype, head_dims, causal):
    lengths = ((300, 300), (1, 1), (0, 5), (64, 200), (129, 129), (65, 64))
    options = {"dropout_p": 0.3} | ({"causal": True, "alignment": "lower_right"} if causal else {})
    Packed(heads=(4, 2, 2), dtype=dtype, lengths=lengths, head_dims=head_dims, options=options).check("cuda")


@pytest.mark.parametrize("causal", [False, True])
def test_deterministic_where_asked(causal):
    inputs = [torch.randn(2, 4, 700, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    grad = torch.randn_like(inputs[0])

    def step():
        torch.manual_seed(7)
        out = flash_online.attention(*inputs, causal=causal, dropout_p=0.1, deterministic=True)
        return out, *torch.autograd.grad(out, inputs, grad)

    first = step()
    for _ in range(5):
        assert all(torch.equal(a, b) for a, b in zip(first, step(), strict=True))
