"""Lists of blocks on CUDA: every kernel family against the reference, tiles that are never read, long sequences, graphs.

FLASH_ONLINE_KERNEL=sm80 in the environment runs them on the general kernels."""

from __future__ import annotations

import pytest
import torch
from block_cases import SIZES, random_blocks
from cases import SPARSE_HEAD_DIMS, SPARSE_OPTIONS
from gradients import run
from oracle import Attention

import flash_online
from flash_online import BlockList, reference
from flash_online.testing import assert_close_to_float64

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("ours_alone")]

OPTIONS = SPARSE_OPTIONS | {"spans": {"spans": (1, 0)}, "spans of both": {"spans": (2, 1), "options": {"causal": True}}}


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("head_dims", SPARSE_HEAD_DIMS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_head_dims(dtype, head_dims, size):
    for seed, lengths in enumerate([(64, 128), (130, 257), (515, 700), (300, 65)]):
        for head_spans in (False, True):
            Attention(
                dtype=dtype,
                heads=(4, 2, 2),
                lengths=lengths,
                head_dims=head_dims,
                blocks=size,
                head_spans=head_spans,
                seed=seed,
            ).check("cuda")


@pytest.mark.parametrize("made", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("size", [(64, 64), (128, 128)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
def test_options(dtype, size, made):
    for seed, head_dim in enumerate((64, 128, 192)):
        Attention(
            dtype=dtype, heads=(2, 1, 1), lengths=(257, 330), head_dims=(head_dim,) * 2, blocks=size, head_spans=True,
            seed=seed, **made,
        ).check("cuda")  # fmt: skip


@pytest.mark.parametrize("lengths", [(0, 5), (5, 0), (1, 1), (1, 300), (65, 63), (200, 1)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_odd_lengths(dtype, lengths):
    for size in SIZES:
        Attention(dtype=dtype, lengths=lengths, head_dims=(64, 64), blocks=size).check("cuda")


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_more_work_tiles_than_sms(head_dim):
    for seed, size in enumerate(SIZES):
        Attention(
            dtype=torch.bfloat16, batch=(3,), heads=(8, 4, 4), lengths=(1400, 1400), head_dims=(head_dim,) * 2, blocks=size,
            head_spans=True, wanted="qkv", seed=seed,
        ).check("cuda")  # fmt: skip


def draw(length, heads=(2, 2), head_dim=128, dtype=torch.bfloat16, keys=None):
    g = torch.Generator("cuda").manual_seed(0)
    return [
        torch.randn(1, h, n, head_dim, device="cuda", generator=g).to(dtype)
        for h, n in ((heads[0], length), (heads[1], keys or length), (heads[1], keys or length))
    ]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
def test_hidden_tiles_are_not_read(head_dim, dtype):
    """The product of a hidden key's weight, 0, and NaN would be NaN."""
    query, key, value = draw(1152, head_dim=head_dim, dtype=dtype)
    key[:, :, 384:768], value[:, :, 384:768] = float("nan"), float("nan")
    blocks = BlockList(
        *(torch.tensor(n, dtype=torch.int32, device="cuda") for n in ([6] * 9, [[0, 1, 2, 6, 7, 8]] * 9)), (128, 128)
    )
    out, lse, *grads = run(flash_online.attention, (query, key, value), blocks=blocks)
    assert out.isfinite().all() and lse.isfinite().all() and grads[0].isfinite().all()
    for grad in grads[1:]:
        assert all(grad[:, :, rows].isfinite().all() for rows in (slice(0, 384), slice(768, 1152)))
        assert not grad[:, :, 384:768].any()


@pytest.mark.parametrize("head_dim", [64, 128])
def test_very_many_keys(head_dim):
    """A bit of a tile's mask map stands for several blocks of keys."""
    query, key, value = draw(200, keys=140_000, heads=(1, 1), head_dim=head_dim)
    blocks, mask = random_blocks(torch.Generator().manual_seed(1), (), (200, 140_000), (64, 64), 0.02, "cuda")
    ours = run(flash_online.attention, (query, key, value), blocks=blocks)
    plain = run(flash_online.attention, (query.float(), key.float(), value.float()), mask=mask)
    truth = run(flash_online.attention, (query.double(), key.double(), value.double()), mask=mask)
    for name, one, other, true in zip(("out", "lse", "dq", "dk", "dv"), ours, plain, truth, strict=True):
        assert_close_to_float64(one, other.to(one.dtype), true, name=name)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_a_list_of_everything(dtype):
    query, key, value = draw(700, (4, 2), dtype=dtype)
    for size in SIZES:
        for words in ({}, {"causal": True}):
            ours = run(
                flash_online.attention, (query, key, value), blocks=BlockList.dense(700, 700, size, device="cuda"), **words
            )
            theirs = run(flash_online.attention, (query, key, value), **words)
            for one, other in zip(ours, theirs, strict=True):
                torch.testing.assert_close(one, other, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_deterministic_gradients(head_dim):
    tensors = draw(1000, (4, 2), head_dim)
    blocks, _ = random_blocks(torch.Generator().manual_seed(2), (1, 4), (1000, 1000), (64, 64), 0.3, "cuda")
    first, again = (run(flash_online.attention, tensors, blocks=blocks, deterministic=True) for _ in range(2))
    other = run(flash_online.attention, tensors, blocks=blocks)
    for one, two, three in zip(first, again, other, strict=True):
        assert torch.equal(one, two)
        torch.testing.assert_close(one, three, atol=2e-2, rtol=2e-2)


def test_lists_have_the_tiles_that_the_cpu_makes():
    """Odd sizes, numbers of no block, counts beyond the capacity and below 0."""
    g = torch.Generator().manual_seed(3)
    for leading, (queries, keys), (rows, columns), capacity in [
        ((2, 3), (515, 700), (64, 64), 5), ((3,), (1, 5000), (128, 64), 40), ((), (700, 130), (64, 128), 1),
        ((1, 2), (300, 64), (128, 128), 0), ((2,), (64, 0), (64, 64), 3), ((0, 2), (64, 64), (64, 64), 3),
    ]:  # fmt: skip
        lists = (*leading, -(-queries // rows))
        counts = torch.randint(-2, capacity + 3, lists, generator=g, dtype=torch.int32)
        indices = torch.randint(-3, -(-keys // columns) + 3, (*lists, capacity), generator=g, dtype=torch.int32)
        make = torch.ops.flash_online.block_tiles
        expected = make(counts, indices, rows, columns, queries, keys)
        assert torch.equal(make(counts.cuda(), indices.cuda(), rows, columns, queries, keys).cpu(), expected)


def test_chosen_lists_are_those_that_the_cpu_makes():
    """Equal scores, scores that are not chosen, more keys than a warp has lanes."""
    g = torch.Generator().manual_seed(5)
    for shape, k, size in [((2, 3, 7, 9), 4, (64, 64)), ((3, 40, 20), 20, (64, 128)), ((5, 33), 1, (128, 64)),
                           ((2, 4, 5000), 300, None), ((1, 1, 1), 3, None), ((2, 0, 5), 2, None)]:  # fmt: skip
        scores = torch.randint(-4, 5, shape, generator=g).float() * torch.rand((), generator=g)
        scores[torch.rand(shape, generator=g) < 0.2] = -torch.inf
        scores[torch.rand(shape, generator=g) < 0.05] = torch.nan
        scores[torch.rand(shape, generator=g) < 0.05] = torch.inf
        for causal in (False, True):
            expected = BlockList.topk(scores, k, causal=causal, size=size)
            found = BlockList.topk(scores.cuda(), k, causal=causal, size=size)
            assert torch.equal(found.counts.cpu(), expected.counts) and torch.equal(found.indices.cpu(), expected.indices)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("reduce", ["mean", "max"])
def test_block_scores(reduce, dtype):
    query, key, _ = draw(300, (4, 2), 64, dtype, keys=450)
    for causal in (False, True):
        found = flash_online.block_scores(query, key, (64, 128), causal=causal, reduce=reduce)
        exact = flash_online.block_scores(query.cpu(), key.cpu(), (64, 128), causal=causal, reduce=reduce)
        torch.testing.assert_close(found.cpu(), exact, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("head_dim", [8, 36, 64, 128, 192, 256, 320])
def test_largest_scores(head_dim, dtype, causal):
    """Odd lengths and widths, groups of heads, rows that lie apart, scales of either sign, more tiles than SMs."""
    g = torch.Generator("cuda").manual_seed(head_dim)
    for lengths, heads, scale in [
        ((300, 450), (4, 2), None), ((64, 1), (2, 2), 3.0), ((1, 700), (3, 1), -0.2), ((1100, 1030), (4, 4), None),
        ((130, 200), (2, 1), 0.0),
    ]:  # fmt: skip
        query, key = (
            torch.randn(2, n, h, head_dim + 8, generator=g, device="cuda").to(dtype)[..., :head_dim].transpose(1, 2)
            for h, n in zip(heads, lengths, strict=True)
        )
        for size in SIZES:
            options = {"size": size, "causal": causal, "reduce": "max", "scale": scale}
            found = flash_online.block_scores(query, key, **options)
            exact = reference.block_scores(query.double(), key.double(), **options)
            assert found.dtype == torch.float32
            torch.testing.assert_close(found.double(), exact, atol=1e-4, rtol=1e-5)
            assert torch.equal(found, flash_online.block_scores(query, key, **options))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_largest_scores_of_infinities_and_nan(dtype):
    """They stay in their blocks, and what a causal mask hides counts for nothing."""
    query, key, _ = draw(400, (2, 2), 64, dtype)
    query, key = query.detach(), key.detach()
    key[0, 0, 10] = torch.nan
    key[0, 1, 130, :] = torch.inf
    key[0, 0, 399] = torch.nan
    query[0, 1, 70] = -torch.inf
    for causal in (False, True):
        found = flash_online.block_scores(query, key, (64, 64), reduce="max", causal=causal)
        exact = reference.block_scores(query.double(), key.double(), (64, 64), reduce="max", causal=causal)
        torch.testing.assert_close(found.double(), exact, atol=1e-4, rtol=1e-5, equal_nan=True)


def test_largest_scores_take_no_memory():
    query, key, _ = draw(8192, (4, 2), 128, torch.bfloat16)
    query, key = query.detach(), key.detach()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    scores = flash_online.block_scores(query, key, (128, 128), reduce="max", causal=True)
    assert torch.cuda.max_memory_allocated() - before < 2 * scores.nbytes + (1 << 20)


def test_largest_scores_under_transforms():
    query, key, _ = draw(200, (2, 2), 64, torch.bfloat16)
    query, key = query.detach(), key.detach()

    def call(q, k):
        return flash_online.block_scores(q, k, (64, 128), reduce="max")

    expected = call(query, key)
    assert torch.equal(torch.vmap(call)(query, key), expected)
    assert torch.equal(torch.vmap(call, in_dims=(0, None))(query, key[0])[0], expected[0])
    assert torch.equal(torch.compile(call, fullgraph=True)(query, key), expected)
    wide = query.double().requires_grad_()
    slope = torch.autograd.grad(call(wide, key.double()).sum(), wide)[0]
    by_cpu = query.double().cpu().requires_grad_()
    torch.testing.assert_close(slope.cpu(), torch.autograd.grad(call(by_cpu, key.double().cpu()).sum(), by_cpu)[0])


def test_graphs_and_new_lists():
    """A graph reads the list that is there when it runs; choosing blocks can be part of it."""
    query, key, value = (t.requires_grad_() for t in draw(640))

    def step():
        with torch.no_grad():
            blocks = BlockList.topk(flash_online.block_scores(query, key, (64, 64), causal=True), 3, causal=True, size=(64, 64))
        out = flash_online.attention(query, key, value, causal=True, blocks=blocks)
        return out, *torch.autograd.grad(out, (query, key, value), torch.ones_like(out))

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = step()
    for seed in (1, 2):
        with torch.no_grad():
            query.normal_(generator=torch.Generator("cuda").manual_seed(seed))
        graph.replay()
        for one, other in zip([t.clone() for t in made], step(), strict=True):
            torch.testing.assert_close(one, other, atol=1e-2, rtol=1e-2)


def test_no_synchronisation():
    query, key, value = (t.requires_grad_() for t in draw(512))
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        blocks = BlockList.topk(flash_online.block_scores(query, key, (128, 128)), 2)
        flash_online.attention(query, key, value, blocks=blocks).sum().backward()
        blocks = BlockList.dense(512, 512, device="cuda")
        flash_online.attention(query, key, value, blocks=blocks).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_compiled_and_mapped():
    query, key, value = draw(300, (2, 2), 64)
    blocks, _ = random_blocks(torch.Generator().manual_seed(4), (1, 2), (300, 300), (128, 64), 0.5, "cuda")
    expected = flash_online.attention(query, key, value, blocks=blocks)
    compiled = torch.compile(lambda q, k, v, b: flash_online.attention(q, k, v, blocks=b), fullgraph=True)
    assert torch.equal(compiled(query, key, value, blocks), expected)
    mapped = torch.vmap(lambda q, k, v: flash_online.attention(q, k, v, blocks=blocks._replace(
        counts=blocks.counts[0], indices=blocks.indices[0])))(query, key, value)  # fmt: skip
    assert torch.equal(mapped, expected)
