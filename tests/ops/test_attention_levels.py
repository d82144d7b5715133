"""Scores and float masks of every level: from products of 1e-3 to those near the largest finite number, masks far from 0."""

from __future__ import annotations

import math

import pytest
import torch
from devices import skip_without_room
from instruction_sets import run_tests, skip_unless_lesser
from oracle import Attention, Packed

import flash_online

DTYPES = [torch.float16, torch.bfloat16, torch.float32]
LESSER_SETS = ["portable", "avx2", "avx512", "avx512_bf16"]
# Off the tile, within a tile, over several spans of keys, a lone key, no key, no query
LENGTHS = [(18, 35), (65, 130), (20, 530), (18, 1), (5, 0), (0, 7)]
OPTIONS = {
    "plain": {},
    "causal": {"options": {"causal": True}},
    "sinks": {"sinks": True, "options": {"causal": True, "alignment": "lower_right"}},
    "softcap": {"options": {"softcap": 30.0}},
    "alibi": {"alibi": 1},
    "dropout": {"options": {"dropout_p": 0.3}},
}


@pytest.mark.parametrize("offset", [-1e4, -200.0, -90.0, 90.0, 200.0, 1e4], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_masks_far_from_zero(dtype, offset, device):
    """An offset that all scores share leaves the weights as they are; rows of padding must not meet its exponential."""
    for lengths in LENGTHS:
        for mask_shape in ((1, 1, 1, 1), (0, 0, 0, 1), (0, 1, 1, 0)):
            common = {"dtype": dtype, "batch": (1,), "lengths": lengths, "head_dims": (16, 8), "mask": "float"}
            common |= {"mask_shape": mask_shape, "mask_offset": offset, "mask_dtype": torch.float32}
            Attention(**common).check(device)
        Attention(**common | {"mask_dtype": dtype}, grad_lse=False).check(device)
        Attention(**common, options={"dropout_p": 0.3, "window": (20, 3)}, sinks=True).check(device)


def levels(dtype: torch.dtype):
    """Scores that come from the inputs, and scores that come from the scale."""
    largest = {torch.float16: 1e8, torch.bfloat16: 1e35, torch.float32: 1e35}[dtype]
    sizes = [1e-3, 1e2, 1e4, 1e6, 1e8, 3e9, 1e12, 1e15, 1e20, 1e35]
    yield from ({"level": level} for level in sizes if level <= largest)
    for scale in (1e-3, 1e4, 3e9, 1e20, 1e35):
        # Score gradients times a large scale are beyond float16, or the parts that they are summed from.
        wanted = {"wanted": "vs"} if dtype == torch.float16 and scale > 1e3 else {}
        yield from ({"options": {"scale": sign * scale}} | wanted for sign in (1, -0.3))


@pytest.mark.thin(3)
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_levels_of_scores(dtype, option, device):
    for level in levels(dtype):
        for lengths in LENGTHS:
            more = OPTIONS[option] | level
            more["options"] = OPTIONS[option].get("options", {}) | level.get("options", {})
            Attention(dtype=dtype, batch=(1,), heads=(2, 1, 2), lengths=lengths, head_dims=(24, 8), **more).check(device)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_levels_of_packed_scores(dtype, device):
    for level in levels(dtype):
        Packed(dtype=dtype, head_dims=(24, 8), **level).check(device)


def tied(dtype, device, level, *, keys=70, ties=(3, 40, 66), queries=21, head_dim=32):
    """Queries whose scores with the keys `ties` are equal and of size `level`, and small ones with the others."""
    side = {torch.float16: min(1e2, level**0.5)}.get(dtype, level**0.5)
    scale = level / side**2
    query = torch.full((1, 2, queries, head_dim), side / head_dim**0.5)
    key = torch.randn(1, 2, keys, head_dim) * side * 1e-3
    key[:, :, list(ties)] = query[:, :, :1]
    value, grad_out = torch.randn(1, 2, keys, 8), torch.randn(1, 2, queries, 8)
    return scale, [t.to(device, dtype).requires_grad_() for t in (query, key, value)], grad_out.to(device, dtype)


@pytest.mark.parametrize("option", ["plain", "alibi", "mask", "softcap"])
@pytest.mark.parametrize("level", [1e2, 1e7, 3e9, 1e12, 1e18, 1e30, 1e36], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_ties_share_the_weight(dtype, level, option, device):
    """Whatever their score is: the output is the mean of their values, and a value's gradient the share of its key."""
    ties = (3, 40, 66)
    scale, (query, key, value), grad_out = tied(dtype, device, level, ties=ties)
    options = {
        "plain": {},
        "alibi": {"alibi_slopes": torch.zeros(2, device=device)},
        "mask": {"mask": torch.zeros(21, 70, dtype=dtype, device=device)},
        "softcap": {"softcap": level},
    }[option]
    out, lse = flash_online.attention(query, key, value, scale=scale, return_lse=True, **options)
    grads = torch.autograd.grad(out, (query, key, value), grad_out)
    mean = value[:, :, list(ties)].double().mean(2, keepdim=True).expand_as(out)
    close = {"rtol": 4 * torch.finfo(dtype).eps, "atol": 4 * torch.finfo(dtype).eps}
    torch.testing.assert_close(out.double(), mean, **close)
    share = torch.zeros_like(value, dtype=torch.float64)
    share[:, :, list(ties)] = grad_out.double().sum(2, keepdim=True) / 3
    torch.testing.assert_close(grads[2].double(), share, rtol=close["rtol"], atol=8 * close["atol"])
    score = (query.double() * key[:, :, 3:4].double()).sum(-1) * scale
    if option == "softcap":
        score = level * torch.tanh(score / level)
    torch.testing.assert_close(lse.double(), score + math.log(3), rtol=2e-6, atol=1e-4)
    assert not any(g.isnan().any() for g in grads)  # a score's gradient times a scale of 1e30 is infinite in float16


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("head_dim", [32, 64, 100, 256])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_key_of_a_large_score(dtype, head_dim, sign, device):
    """It has the weight 1, and its score no gradient; by the default scale, which may be no power of two."""
    skip_without_room(device, dtype, head_dim)
    for size in {torch.float16: [3e4, 6e4], torch.bfloat16: [1e9, 1e18], torch.float32: [1e9, 1e18]}[dtype]:
        query = torch.full((1, 1, 3, head_dim), size).to(device, dtype).requires_grad_()
        key = (sign * query[:, :, :1].detach()).requires_grad_()
        value = torch.randn(1, 1, 1, 5).to(device, dtype).requires_grad_()
        out, lse = flash_online.attention(query, key, value, return_lse=True)
        assert torch.equal(out, value.expand_as(out))
        grad_out = torch.randn(out.shape).to(device, dtype)
        grads = torch.autograd.grad(out, (query, key, value), grad_out)
        assert torch.equal(grads[0], torch.zeros_like(query)) and torch.equal(grads[1], torch.zeros_like(key))
        torch.testing.assert_close(grads[2], grad_out.sum(2, keepdim=True))
        score = (query.double() @ key.double().mT)[..., 0] * head_dim**-0.5
        torch.testing.assert_close(lse.double(), score, rtol=2e-6, atol=0.0)


@pytest.mark.usefixtures("ours_alone")
@pytest.mark.parametrize("sign", [1, -1])
def test_products_that_overflow_before_their_scale(sign):
    """Scores are finite where torch's are: products of 6e38 and more are scaled to less than the largest float. CUDA's tensor
    cores sum products in float, before the scale."""
    query = torch.full((1, 1, 3, 64), 3.2e18).requires_grad_()
    key = (sign * torch.full((1, 1, 9, 64), 3.2e18)).requires_grad_()
    value = torch.randn(1, 1, 9, 4).requires_grad_()
    out, lse = flash_online.attention(query, key, value, return_lse=True)
    torch.testing.assert_close(out, value.mean(2, keepdim=True).expand_as(out))
    torch.testing.assert_close(lse, torch.full_like(lse, sign * 8 * 3.2e18**2))
    assert all(g.isfinite().all() for g in torch.autograd.grad(out.sum(), (query, key, value)))
    with torch.no_grad():
        out, _ = flash_online.kvcache_attention(query, key, value, 9, causal=False, return_lse=True)
        torch.testing.assert_close(out, value.mean(2, keepdim=True).expand_as(out))


@pytest.mark.parametrize("splits", [None, 3])
@pytest.mark.parametrize("level", [1e-3, 1e2, 1e4, 1e7, 3e9, 3e10, 1e15, 1e30, 1e36], ids=str)
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
def test_cached_keys(dtype, level, splits, cache_device):
    """Ties share the weight; of random scores the largest has nearly all of it."""
    with torch.no_grad():
        ties = (5, 40, 610)
        scale, (query, key, value), _ = tied(dtype, cache_device, level, keys=700, ties=ties, queries=2)
        options = {"scale": scale, "causal": False, "num_splits": splits, "return_lse": True}
        out, lse = flash_online.kvcache_attention(query, key, value, 700, **options)
        scores = query.double() @ key.double().mT * scale
        expected = torch.softmax(scores, -1) @ value.double()
        close = {"rtol": 4 * torch.finfo(dtype).eps, "atol": max(4 * torch.finfo(dtype).eps, 1e-10)}
        if level <= 1e4:  # scores differ in the digits that the dtype does not have
            close = {name: x + 2e-6 * level for name, x in close.items()} if dtype != torch.float64 else close
        torch.testing.assert_close(out.double(), expected, **close)
        torch.testing.assert_close(lse.double(), torch.logsumexp(scores, -1), rtol=2e-6, atol=1e-4)
        query = torch.randn(query.shape, generator=torch.Generator().manual_seed(3)).to(query)
        query *= min(level**0.5, 1e3) if dtype == torch.float16 else level**0.5
        random = torch.randn(key.shape).to(key) * key.abs().max()
        out = flash_online.kvcache_attention(query, random, value, 700, scale=scale, causal=False, num_splits=splits)
        scores = query.double() @ random.double().mT * scale
        if level >= 1e7:
            two = scores.topk(2).values
            clear = two[..., 0] - two[..., 1] > 40 + 1e-5 * two[..., 0].abs()  # by more than a float32 product's rounding
            assert clear.float().mean() > 0.5
            largest = value.expand(1, 2, 700, 8).gather(2, scores.argmax(-1)[..., None].expand(1, 2, 2, 8))
            torch.testing.assert_close(out[clear], largest[clear], rtol=close["rtol"], atol=0.0)


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("weight", [1.0, 0.4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_long_rows_of_equal_weights(dtype, weight, cached):
    """Sums over many keys keep their digits: a float that grows one key at a time is off by 4 % after 5,000,000 of them."""
    for keys, share in ((5000, 1), (70_000, 1), (1_000_000, 1), (1_000_000, 3)):
        query = torch.ones(1, 1, 2, 1).to(dtype)
        key = torch.zeros(1, 1, keys, 1).to(dtype)
        key[0, 0, keys // share - 1] = -math.log(weight)
        value = torch.full((1, 1, 1, 16), 0.4).to(dtype).expand(1, 1, keys, 16)
        with torch.no_grad():
            if cached:
                options = {"causal": False, "num_splits": share, "return_lse": True}
                out, lse = flash_online.kvcache_attention(query, key, value, keys, scale=1.0, **options)
            else:
                out, lse = flash_online.attention(query, key, value, scale=1.0, return_lse=True)
                slopes = torch.full((1,), 1e-9)
                alibi = flash_online.attention(query, key, value, scale=1.0, alibi_slopes=slopes)
                torch.testing.assert_close(alibi, value[:, :, :2], rtol=2 * torch.finfo(dtype).eps + 1e-6, atol=0.0)
        torch.testing.assert_close(out, value[:, :, :2], rtol=2 * torch.finfo(dtype).eps + 1e-6, atol=0.0)
        expected = torch.logsumexp(key.double()[0, 0, :, 0], 0)
        torch.testing.assert_close(lse.double(), expected.expand(1, 1, 2), rtol=3e-7, atol=0.0)


TINY = {
    "values": (1, 1, 1e-39, 1),
    "values near 2^-126": (1, 1, 1e-36, 1),
    "keys": (1, 1e-39, 1, 1),
    "queries": (1e-39, 1, 1, 1),
    "queries with large keys": (1e-39, 3e37, 1, 1),
    "gradients": (1, 1, 1, 1e-39),
    "products": (1, 1, 1e-20, 1e-19),
    "nothing": (1, 1, 1e-30, 1),
}


@pytest.mark.parametrize("mask", [False, True])
@pytest.mark.parametrize("heads", [(1, 1), (4, 2)], ids=str)
@pytest.mark.parametrize("name", TINY)
def test_numbers_under_the_normal_ones(name, heads, mask):
    """bfloat16 has float's exponents, subnormal ones among them, and results keep them as torch's do. The heads differ in size:
    the first is an ordinary one."""
    sizes = TINY[name]
    for queries, keys, head_dim in ((18, 35, 16), (70, 300, 64), (3, 1, 40)):
        groups, lengths = (heads[0], heads[1], heads[1], heads[0]), (queries, keys, keys, queries)
        made = zip(groups, lengths, sizes, strict=True)
        query, key, value, grad_out = (torch.randn(1, h, n, head_dim) * size for h, n, size in made)
        if heads[1] > 1:
            for tensor, size in zip((query, key, value, grad_out), sizes, strict=True):
                tensor[:, : tensor.shape[1] // 2] /= size
        leaves = [t.bfloat16().requires_grad_() for t in (query, key, value)]
        bias = torch.zeros(queries, keys, requires_grad=mask)
        out = flash_online.attention(*leaves, mask=bias if mask else None)
        grads = torch.autograd.grad(out, leaves, grad_out.bfloat16())
        wide = [t.detach().double().requires_grad_() for t in leaves]
        k, v = (t.repeat_interleave(heads[0] // heads[1], 1) for t in wide[1:])
        truth = torch.softmax(wide[0] @ k.mT / head_dim**0.5, -1) @ v
        expected = torch.autograd.grad(truth, wide, grad_out.bfloat16().double())
        for got, want in zip((out, *grads), (truth, *expected), strict=True):
            for head in range(got.shape[1]):  # heads of other sizes have other tolerances
                close = 0.02 * want[:, head].abs().max().item() + 2.0**-133
                torch.testing.assert_close(got[:, head].double(), want[:, head], rtol=0.0, atol=close)


@pytest.mark.slow
@pytest.mark.parametrize("instruction_set", LESSER_SETS)
def test_lesser_instruction_sets(instruction_set):
    skip_unless_lesser(instruction_set)
    run_tests(instruction_set, "-x", __file__, "-m", "not gpu", "-k", "not instruction_set")
