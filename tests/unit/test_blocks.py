"""flash_online.BlockList and block_scores: what makes lists of blocks, compared with dense definitions."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

import flash_online
from flash_online import BlockList, block_scores

SIZES = [(64, 64), (128, 64), (64, 128), (128, 128)]


def seen_by(blocks: BlockList, key_blocks: int) -> torch.Tensor:
    """bool [..., nq, key_blocks], by a loop over the list."""
    seen = torch.zeros(*blocks.counts.shape, key_blocks, dtype=torch.bool)
    for row, count, indices in zip(
        seen.flatten(0, -2),
        blocks.counts.flatten(),
        blocks.indices.expand(*blocks.counts.shape, -1).flatten(0, -2),
        strict=True,
    ):
        listed = indices[:count].tolist()
        assert listed == sorted(set(listed))
        row[listed] = True
    return seen


@pytest.mark.parametrize("leading", [(), (3,), (2, 3)], ids=str)
def test_from_mask(leading):
    mask = torch.rand(*leading, 5, 7, generator=torch.Generator().manual_seed(0)) < 0.4
    blocks = BlockList.from_mask(mask, (64, 128))
    assert blocks.counts.dtype == blocks.indices.dtype == torch.int32 and blocks.size == (64, 128)
    assert torch.equal(seen_by(blocks, 7), mask)


def test_dense():
    for size in SIZES:
        blocks = BlockList.dense(300, 130, size)
        shape = math.ceil(300 / size[0]), math.ceil(130 / size[1])
        assert torch.equal(seen_by(blocks, shape[1])[0], torch.ones(shape, dtype=torch.bool))


def test_from_flex():
    """Whole blocks alone: of a mask without a function, and of one whose partial blocks are none."""
    whole = create_block_mask(lambda b, h, i, j: (i // 128 + j // 128) % 3 != 0, 2, 3, 512, 640, device="cpu", BLOCK_SIZE=128)
    expected = (torch.arange(4)[:, None] + torch.arange(5)) % 3 != 0
    assert torch.equal(seen_by(BlockList.from_flex(whole), 5), expected.expand(2, 3, 4, 5))
    counts = torch.tensor([[[2, 0, 1]]], dtype=torch.int32)
    indices = torch.tensor([[[[0, 2, 1], [0, 1, 2], [1, 0, 2]]]], dtype=torch.int32)
    given = BlockMask.from_kv_blocks(counts, indices, BLOCK_SIZE=(64, 128))
    found = BlockList.from_flex(given)
    assert found.size == (64, 128)
    assert seen_by(found, 3)[0, 0].tolist() == [[True, False, True], [False] * 3, [False, True, False]]
    causal = create_block_mask(lambda b, h, i, j: i >= j, 1, 1, 512, 512, device="cpu", BLOCK_SIZE=128)
    with pytest.raises(RuntimeError, match="block_mask: expected whole blocks, got 4 partial ones: use query_spans, key_spans"):
        BlockList.from_flex(causal)


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("reduce", ["mean", "max"])
def test_block_scores(reduce, causal, size):
    g = torch.Generator().manual_seed(0)
    for lengths in ((300, 300), (200, 450), (1, 70), (130, 64)):
        query, key = torch.randn(2, 4, lengths[0], 16, generator=g), torch.randn(2, 2, lengths[1], 16, generator=g)
        found = block_scores(query, key, size, causal=causal, reduce=reduce)
        keys = key.repeat_interleave(2, 1).double()
        scores = query.double() @ keys.transpose(-1, -2) / 4
        seen = torch.ones(lengths, dtype=torch.bool)
        if causal:
            seen = seen.tril()
        for i in range(found.shape[-2]):
            rows = slice(i * size[0], min((i + 1) * size[0], lengths[0]))
            for j in range(found.shape[-1]):
                columns = slice(j * size[1], min((j + 1) * size[1], lengths[1]))
                if not seen[rows, columns].any():
                    assert found[..., i, j].isneginf().all()
                    continue
                if reduce == "max":
                    expected = scores[..., rows, columns].masked_fill(~seen[rows, columns], -math.inf).amax((-1, -2))
                else:
                    expected = scores[..., rows, columns].mean((-1, -2))
                torch.testing.assert_close(found[..., i, j].double(), expected, atol=1e-5, rtol=1e-5)


def test_largest_scores_chunk_by_chunk(monkeypatch):
    query = torch.randn(1, 2, 500, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    whole = block_scores(query, query, (64, 64), reduce="max", causal=True, scale=0.3)
    monkeypatch.setattr("flash_online.blocks._CHUNK_SCORES", 1)
    assert torch.equal(block_scores(query, query, (64, 64), reduce="max", causal=True, scale=0.3), whole)


@pytest.mark.parametrize("causal", [False, True])
def test_topk(causal):
    scores = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(0))
    scores[0, 0, 2] = -math.inf
    blocks = BlockList.topk(scores, 3, causal=causal, size=(64, 64))
    seen = seen_by(blocks, 6)
    for b in range(2):
        for h in range(3):
            for i in range(6):
                row = scores[b, h, i].clone()
                if causal:
                    row[i + 1 :], row[i] = -math.inf, math.inf
                best = [j for j in row.argsort(descending=True).tolist() if row[j] > -math.inf][:3]
                assert seen[b, h, i].nonzero().flatten().tolist() == sorted(best)
    assert not causal or seen.diagonal(dim1=-2, dim2=-1).all()


def test_topk_with_blocks_of_two_sizes():
    """The block's own keys are those of its last query."""
    seen = seen_by(BlockList.topk(torch.zeros(1, 2, 4), 1, causal=True, size=(128, 64)), 4)
    assert seen[0].nonzero()[:, 1].tolist() == [1, 3]
    seen = seen_by(BlockList.topk(torch.zeros(1, 4, 2), 1, causal=True, size=(64, 128)), 2)
    assert seen[0].nonzero()[:, 1].tolist() == [0, 0, 1, 1]


def test_moba_from_these_parts():
    """Mixture of block attention: a block of queries sees its own block of keys, and those with the largest scores of mean
    query and mean key; equal to its dense definition."""
    g = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, heads, 320, 16, generator=g, dtype=torch.float64) for heads in (4, 2, 2))
    blocks = BlockList.topk(block_scores(query, key, (64, 64), causal=True), 2, causal=True, size=(64, 64))
    out = flash_online.attention(query, key, value, causal=True, blocks=blocks)
    key, value = (t.repeat_interleave(2, 1) for t in (key, value))
    means = [t.unflatten(2, (5, 64)).mean(3) for t in (query, key)]
    gates = (means[0].float() @ means[1].float().transpose(-1, -2) / 4).masked_fill(torch.ones(5, 5).triu(1).bool(), -math.inf)
    gates.diagonal(dim1=-2, dim2=-1).fill_(math.inf)
    chosen = torch.zeros_like(gates, dtype=torch.bool).scatter_(-1, gates.topk(2).indices, True) & (gates > -math.inf)
    seen = chosen.repeat_interleave(64, -1).repeat_interleave(64, -2) & torch.ones(320, 320).tril().bool()
    weights = (query @ key.transpose(-1, -2) / 4).masked_fill(~seen, -math.inf).softmax(-1)
    torch.testing.assert_close(out, weights @ value)


def test_vsa_from_these_parts():
    """Video sparse attention: attention of the mean rows of cubes of 64 tokens, and attention to the cubes whose mean keys have
    the largest scores, each times a gate; equal to its dense definition, with gradients."""
    g = torch.Generator().manual_seed(1)
    tensors = [torch.randn(2, 3, 512, 16, generator=g, dtype=torch.float64).requires_grad_() for _ in range(5)]

    def parts(query, key, value, coarse_gate, fine_gate):
        scores = block_scores(query, key, (64, 64))
        blocks = BlockList.topk(scores.detach(), 3, size=(64, 64))
        means = [t.unflatten(-2, (8, 64)).mean(-2) for t in (query, key, value)]
        coarse = flash_online.attention(*means).repeat_interleave(64, -2)
        return coarse * coarse_gate + flash_online.attention(query, key, value, blocks=blocks) * fine_gate

    def dense(query, key, value, coarse_gate, fine_gate):
        means = [t.unflatten(-2, (8, 64)).mean(-2) for t in (query, key, value)]
        scores = means[0] @ means[1].transpose(-1, -2) / 4
        chosen = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, scores.topk(3).indices, True)
        seen = chosen.repeat_interleave(64, -1).repeat_interleave(64, -2)
        fine = (query @ key.transpose(-1, -2) / 4).masked_fill(~seen, -math.inf).softmax(-1) @ value
        return (scores.softmax(-1) @ means[2]).repeat_interleave(64, -2) * coarse_gate + fine * fine_gate

    found, expected = ((out := f(*tensors), *torch.autograd.grad(out.square().sum(), tensors)) for f in (parts, dense))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("leading", [(), (1,), (2, 3)], ids=str)
def test_transpose(leading):
    mask = torch.rand(*leading, 5, 7, generator=torch.Generator().manual_seed(0)) < 0.4
    mask[..., -1] = False
    blocks = BlockList.from_mask(mask, (64, 128))
    other = blocks.transpose(7)
    assert other.size == (128, 64) and torch.equal(seen_by(other, 5), mask.transpose(-1, -2))
    assert torch.equal(seen_by(other.transpose(5), 7), mask)
    seen = mask.flatten(0, -2).any(0).nonzero()  # without the number of blocks, up to the last one that any block sees
    count = int(seen.max()) + 1
    assert torch.equal(seen_by(blocks.transpose(), 5), mask.transpose(-1, -2)[..., :count, :])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: BlockList.from_mask(torch.zeros(2, 3)), "mask: expected bool"),
        (lambda: BlockList.from_mask(torch.zeros(2, 3, dtype=torch.bool), (64, 96)), "size: expected a pair"),
        (lambda: BlockList.dense(3, 4, (64,)), "size: expected a pair"),
        (lambda: BlockList.topk(torch.zeros(2, 3), 0), "k: expected at least 1, got 0"),
        (lambda: BlockList.topk(torch.zeros(2, 3, dtype=torch.int32), 1), "scores: expected floating"),
        (lambda: block_scores(torch.zeros(3, 4, 5), torch.zeros(2, 4, 5), (64, 64)), "where Hk divides Hq"),
        (lambda: block_scores(torch.zeros(2, 4, 5), torch.zeros(2, 4, 5).half(), (64, 64)), "expected query's dtype"),
        (lambda: block_scores(torch.zeros(2, 4, 5), torch.zeros(2, 4, 5), (64, 64), reduce="sum"), "reduce: expected"),
    ],
)
def test_errors(call, message):
    with pytest.raises(RuntimeError) as raised:
        call()
    assert message in str(raised.value)


@pytest.mark.parametrize("length, keys, size", [(129, 300, (128, 64)), (1, 300, (64, 64)), (130, 520, (128, 64))])
@pytest.mark.parametrize("k", [1, 2])
def test_topk_of_a_last_block_of_queries_that_is_not_full(length, keys, size, k):
    """The own block has the last query; blocks of keys after it, which no query sees, take no place."""
    query, key = torch.randn(1, 1, length, 8), torch.randn(1, 1, keys, 8)
    for reduce in ("mean", "max"):
        scores = block_scores(query, key, size, causal=True, reduce=reduce)
        blocks = BlockList.topk(scores, k, causal=True, size=size)
        chosen = seen_by(blocks, scores.shape[-1])
        own = (torch.arange(1, scores.shape[-2] + 1) * size[0]).clamp(max=length).sub(1) // size[1]
        assert chosen.gather(-1, own[None, None, :, None]).all() and not (chosen & scores.isneginf()).any()
        lse = flash_online.attention(query, key, key, causal=True, blocks=blocks, return_lse=True)[1]
        assert lse[..., -1].isfinite().all()


@pytest.mark.parametrize("reduce", ["mean", "max"])
def test_scores_under_autocast_are_those_without(reduce):
    query, key = torch.randn(1, 2, 130, 16), torch.randn(1, 1, 200, 16)
    for wants_gradient in (False, True):
        given = query.clone().requires_grad_(wants_gradient), key
        expected = block_scores(*given, (64, 64), reduce=reduce)
        with torch.autocast("cpu", torch.bfloat16):
            found = block_scores(*given, (64, 64), reduce=reduce)
        assert found.dtype == torch.float32 and torch.equal(found, expected)


@pytest.mark.parametrize(
    "call, error, message",
    [
        (lambda: BlockList.dense(-1, 5), flash_online.InvalidArgument, "L: expected an int >= 0, got -1"),
        (lambda: BlockList.dense(1, 5, (64.0, 64)), flash_online.InvalidArgument, "size: expected a pair"),
        (lambda: BlockList.dense(64, 64).transpose(-1), flash_online.InvalidArgument, "key_blocks: expected None or an int"),
        (lambda: BlockList.from_flex(None), TypeError, "block_mask: expected a BlockMask of FlexAttention, got NoneType"),
        (lambda: block_scores(*[torch.ones(1, 1, 4, 4)] * 2, (64, 64), scale="x"), TypeError, "scale: expected"),
        (lambda: block_scores(*[torch.ones(1, 1, 4, 4).int()] * 2, (64, 64)), NotImplementedError, "query: expected dtype"),
        (
            lambda: block_scores(*[torch.ones(1, 1, 4, 4).to_sparse()] * 2, (64, 64)),
            NotImplementedError,
            "flash_online.block_scores: query: a sparse tensor",
        ),
    ],
)
def test_errors_name_the_argument(call, error, message):
    with pytest.raises(error, match=f"^{message}"):
        call()
    assert BlockList.topk(torch.randn(3, 4), 10**20).indices.shape == (3, 4)
