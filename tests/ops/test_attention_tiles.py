"""attention and varlen_attention on problems of several tiles, which end inside one, of every head dim: what a tile scheduler,
a mask by blocks and a split of the keys can get wrong. Sizes are those of the CUDA kernels' tiles."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch
from oracle import Attention, Packed, gradients_of_ones

import flash_online
import flash_online.functional as F

INF = math.inf
DTYPES_16_BIT = [torch.float16, torch.bfloat16]
DTYPES = [*DTYPES_16_BIT, torch.float32]


def made(*shape, dtype=torch.bfloat16, grad=False, device):
    return torch.randn(shape, device=device).to(dtype).requires_grad_(grad)


# Whole tiles of every size, for the kernels that want aligned rows of many; ragged ends, and more than one tile of each.
@pytest.mark.thin(6)
@pytest.mark.parametrize("head_dim", [8, 32, 64, 80, 96, 128, 160, 192, 256, 264, 512])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"causal": True, "alignment": "lower_right"}, {"window": (100, 20)}])
def test_head_dims(head_dim, dtype, options, device):
    for lengths in [(256, 256), (200, 333), (333, 130)]:
        Attention(
            dtype=dtype, batch=(2,), heads=(2, 1, 1), lengths=lengths, head_dims=(head_dim, head_dim), options=options
        ).check(device)


@pytest.mark.thin(2)
@pytest.mark.parametrize("head_dims", [(192, 128), (64, 256), (256, 64), (40, 72), (512, 264), (72, 400)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES_16_BIT, ids=str)
def test_wide_and_narrow_values(head_dims, dtype, device):
    Attention(dtype=dtype, heads=(4, 2, 2), lengths=(300, 270), head_dims=head_dims, options={"causal": True}).check(device)


# Options by pairs, on lengths of several tiles.
PAIRS = {
    "mask": {"mask": "bool"},
    "float mask": {"mask": "float"},
    "-inf mask": {"mask": "-inf", "mask_shape": (0, 0, 1, 1)},
    "padding": {"mask": "bool", "mask_shape": (1, 0, 0, 1)},
    "softcap": {"options": {"softcap": 4.0}},
    "alibi": {"alibi": 2},
    "sinks": {"sinks": True},
    "dropout": {"options": {"dropout_p": 0.3}},
    "causal": {"options": {"causal": True}},
    "window": {"options": {"window": (70, 40), "alignment": "lower_right"}},
    "groups": {"heads": (4, 2, 1)},
}


@pytest.mark.thin(2)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("pair", [(a, b) for i, a in enumerate(PAIRS) for b in list(PAIRS)[i + 1 :]], ids="-".join)
def test_options_in_pairs(pair, dtype, device):
    first, second = (PAIRS[name] for name in pair)
    options = first.get("options", {}) | second.get("options", {})
    made = {"lengths": (150, 210), "head_dims": (64, 64)} | first | second | {"options": options}
    if "mask" in first and "mask" in second:
        pytest.skip("a call has one mask")
    Attention(dtype=dtype, **made).check(device)


SPARSE_MASKS = {
    "alone": {},
    "of heads": {"mask_shape": (1, 1, 1, 1)},
    "ragged": {"lengths": (333, 715)},
    "few seen": {"lengths": (130, 1100), "mask_shape": (0, 1, 1, 1)},
    "values": {"mask": "bool"},
    "padding": {"mask": "bool", "mask_shape": (1, 0, 0, 1)},
    "16 bits": {"mask": "float"},
    "alibi": {"alibi": 2},
    "dropout": {"options": {"dropout_p": 0.3}},
    "causal": {"options": {"causal": True}},
    "groups": {"heads": (4, 2, 1)},
    "large": {"size": 4.0},
}


@pytest.mark.thin(3)
@pytest.mark.parametrize("made", SPARSE_MASKS.values(), ids=SPARSE_MASKS)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("dtype", DTYPES_16_BIT, ids=str)
def test_masks_of_blocks(dtype, head_dim, made, device):
    """Masks of whole 64 x 64 blocks, where a block of queries often sees only one half of a tile of keys, and all options that
    run on tiles of that size."""
    made = {"mask": "blocks", "mask_shape": (0, 0, 1, 1), "lengths": (576, 640), "head_dims": (head_dim, head_dim)} | made
    Attention(dtype=dtype, **made).check(device)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_packed_sequences_of_many_lengths(dtype, device):
    lengths = tuple((random.Random(n).choice([0, 1, 63, 64, 65, 128, 200, 513]),) * 2 for n in range(40))
    Packed(dtype=dtype, heads=(4, 2, 2), lengths=lengths, head_dims=(64, 64), options={"causal": True}).check(device)


# One block of keys: its backward kernel takes one head's block of queries, or one after another of several heads and blocks.
@pytest.mark.thin(4)
@pytest.mark.parametrize("dtype", DTYPES_16_BIT, ids=str)
@pytest.mark.parametrize("head_dim", [32, 64, 96, 128])
@pytest.mark.parametrize("heads", [(4, 4, 4), (4, 2, 1)], ids=str)
@pytest.mark.parametrize("longest", [64, 128])
def test_packed_sequences_of_one_block_of_keys(dtype, head_dim, heads, longest, device):
    choose = random.Random(head_dim)
    lengths = tuple((choose.choice([0, 1, 33, 64, longest]), choose.choice([0, 1, 5, 63, 64])) for _ in range(30))
    for options in ({"causal": True}, {"window": (9, 3)}):
        Packed(dtype=dtype, heads=heads, lengths=lengths, head_dims=(head_dim, head_dim), options=options).check(device)


@pytest.mark.parametrize("options", [{}, {"causal": True}], ids=str)
@pytest.mark.parametrize("lengths", [(1, 1), (63, 64), (64, 7), (128, 64)], ids=str)
def test_gradients_of_one_block_of_keys_repeat(lengths, options, device):
    """In both modes, since no kernel adds to sums in global memory."""
    queries, keys = lengths
    query, key, value = (
        made(3, 4, queries, 64, grad=True, device=device),
        made(3, 2, keys, 64, grad=True, device=device),
        made(3, 2, keys, 64, grad=True, device=device),
    )
    first, second = (gradients_of_ones(flash_online.attention, query, key, value, **options) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_packed_results_repeat(head_dim, device):
    """Short tiles follow each other closely: what is loaded for the next must not reach the one before."""
    choose = random.Random(head_dim)
    lengths = [choose.choice([0, 1, 5, 63, 64, 65, 128, 200, 513]) for _ in range(60)]
    starts = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device)
    query, key, value = (made(sum(lengths), heads, head_dim, device=device) for heads in (4, 2, 2))

    def call():
        return flash_online.varlen_attention(query, key, value, starts, starts, 513, 513, causal=True, return_lse=True)

    expected = call()
    for _ in range(100 if device == "cuda" else 5):
        assert all(torch.equal(got, first) for got, first in zip(call(), expected, strict=True))


@pytest.mark.thin(3)
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"mask": True}, {"dropout_p": 0.1}], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_deterministic_runs_agree(head_dim, options, device):
    inputs = [made(2, 4, 1000, head_dim, grad=True, device=device) for _ in range(3)]
    options = dict(options)
    if "mask" in options:
        options["mask"] = made(1, 4, 1000, 1000, device=device)

    def run():
        torch.manual_seed(1)
        return gradients_of_ones(flash_online.attention, *inputs, deterministic=True, **options)

    first = run()
    for _ in range(3):
        for a, b in zip(first, run(), strict=True):
            assert torch.equal(a, b)


def test_forward_and_key_gradients_repeat_anyway(device):
    inputs = [made(2, 4, 1000, 64, grad=True, device=device) for _ in range(3)]
    first, second = (gradients_of_ones(flash_online.attention, *inputs) for _ in range(2))
    for at in (0, 2, 3):
        assert torch.equal(first[at], second[at])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_does_not_depend_on_its_batch(dtype, device):
    query, key, value = (made(5, 3, 200, 64, dtype=dtype, device=device) for _ in range(3))
    whole = flash_online.attention(query, key, value, causal=True)
    for b in range(5):
        alone = flash_online.attention(query[b : b + 1], key[b : b + 1], value[b : b + 1], causal=True)
        assert torch.equal(whole[b : b + 1], alone)


@pytest.mark.thin(3)
@pytest.mark.parametrize("layout", ["contiguous", "transposed", "sliced", "expanded"])
@pytest.mark.parametrize("lengths", [(1, 300), (5, 300), (33, 65)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_few_queries_of_many_heads(dtype, lengths, layout, device):
    """Query heads that share a key head may share a tile if all of their rows see equal keys: causal rows of one query do, and
    other causal rows do not."""
    for options in ({}, {"causal": True, "alignment": "lower_right"}, {"softcap": 20.0}, {"window": (50, 300)}):
        Attention(
            dtype=dtype,
            heads=(12, 2, 2),
            lengths=lengths,
            head_dims=(64, 64),
            layouts=(layout, "contiguous", "contiguous", "contiguous"),
            options=options,
        ).check(device)


@pytest.mark.parametrize("hidden", ["bool", "-inf"])
def test_hidden_blocks_are_passed_over(hidden, device):
    """NaN in keys and values of blocks that a mask hides as a whole does not reach a result: they are not read."""
    query, (key, value) = made(1, 2, 512, 64, device=device), (made(1, 2, 1152, 64, device=device) for _ in range(2))
    whole = slice(384, 768)  # blocks of 64, 96 and 128 keys all begin and end there
    seen = torch.ones(512, 1152, dtype=torch.bool, device=device)
    seen[:, whole] = False
    mask = seen if hidden == "bool" else torch.where(seen, 0.0, -INF).to(torch.bfloat16)
    expected = flash_online.attention(query, key, value, mask=mask)
    key[:, :, whole], value[:, :, whole] = math.nan, math.nan
    assert torch.equal(flash_online.attention(query, key, value, mask=mask), expected)


def test_drop_in_under_autocast_and_layouts(device):
    query, key, value = (torch.randn(2, 100, 4, 64, device=device).transpose(1, 2) for _ in range(3))
    with torch.autocast(device, torch.bfloat16):
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    assert out.dtype == torch.bfloat16 and out.stride() == query.stride()
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    torch.testing.assert_close(out.float(), expected, atol=2e-2, rtol=2e-2)
