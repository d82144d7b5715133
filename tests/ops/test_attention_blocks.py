"""attention with lists of blocks. On the CPU it has the bits of the same bool mask: results, gradients, dropout. Also
derivatives of second order, forward mode, vmap, compiled and exported calls, and errors. tests/unit/test_blocks.py has the
functions that make lists."""

from __future__ import annotations

import functools

import pytest
import torch
from block_cases import SIZES, random_blocks
from gradients import check_compiled, check_transforms, run
from instruction_sets import run_tests, skip_unless_lesser
from span_cases import random_spans

import flash_online
from flash_online import BlockList, reference
from flash_online.testing import assert_close_to_float64

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
CPU = pytest.mark.parametrize("device", ["cpu"])


def draw(dtype, lengths=(200, 300), heads=(4, 2), batch=2, seed=0, head_dim=16, size=(64, 64), leading=None, density=0.5):
    """(query, key, value, a list of blocks, the mask that it stands for)."""
    g = torch.Generator().manual_seed(seed)
    shapes = ((batch, heads[0], lengths[0], head_dim), *((batch, heads[1], lengths[1], head_dim),) * 2)
    tensors = [torch.randn(shape, generator=g).to(dtype) for shape in shapes]
    return *tensors, *random_blocks(g, (batch, heads[0]) if leading is None else leading, lengths, size, density)


OPTIONS = {
    "plain": {},
    "causal": {"causal": True},
    "window, lower right": {"window": (90, 7), "alignment": "lower_right"},
    "ALiBi, lower right": {  # the CPU's tiles then begin at other queries than the list's
        "alibi_slopes": torch.tensor([0.5, 0.25, 0.01, 0.05]),
        "alignment": "lower_right",
    },
    "softcap, ALiBi": {"softcap": 2.0, "alibi_slopes": torch.tensor([0.5, 0.25, 0.1, 0.05])},
    "sinks": {"sinks": torch.tensor([0.5, -1.0, 0.0, 2.0])},
    "dropout": {"dropout_p": 0.3},
    "deterministic": {"deterministic": True},
}


@CPU
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bits_of_the_same_mask(dtype, size, name, device):
    for seed, (lengths, leading) in enumerate([((200, 300), None), ((129, 64), (1, 4)), ((3, 200), (2, 1)), ((130, 97), ())]):
        *tensors, blocks, mask = draw(dtype, lengths, size=size, leading=leading, seed=seed)
        ours = run(flash_online.attention, tensors, blocks=blocks, **OPTIONS[name])
        theirs = run(flash_online.attention, tensors, mask=mask, **OPTIONS[name])
        for n, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            assert torch.equal(one, other), (n, lengths)


@CPU
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_with_a_float_mask_and_spans(dtype, device):
    """All of them combine by "and"; a bias gets its gradient."""
    *tensors, blocks, mask = draw(dtype, (150, 200), size=(64, 128))
    g = torch.Generator().manual_seed(1)
    bias = torch.randn(1, 4, 1, 200, generator=g).to(dtype)
    given = {"query_spans": random_spans(g, (2, 1), 150, 200, 1), "blocks": blocks, "causal": True}
    ours = run(flash_online.attention, tensors, mask=bias, **given)
    plain, truth = (
        run(reference.attention, [t.to(kind) for t in tensors], mask=bias.to(kind), **given) for kind in (dtype, torch.float64)
    )
    for name, one, other, true in zip(("out", "lse", "dq", "dk", "dv", "dbias"), ours, plain, truth, strict=True):
        assert_close_to_float64(one, other, true, name=name)


@CPU
@pytest.mark.parametrize("lengths", [(0, 5), (5, 0), (1, 1), (1, 300), (64, 64), (65, 63), (200, 1)], ids=str)
def test_odd_lengths_and_empty_rows(lengths, device):
    for size in SIZES:
        *tensors, blocks, mask = draw(torch.float32, lengths, size=size)
        words = ({"blocks": blocks}, {"mask": mask})
        for one, other in zip(*(run(flash_online.attention, tensors, **o) for o in words), strict=True):
            assert torch.equal(one, other)
        nothing = blocks._replace(counts=torch.zeros_like(blocks.counts))
        out, lse = flash_online.attention(*tensors, blocks=nothing, return_lse=True)
        assert not out.any() and lse.isneginf().all()
        everything = BlockList.dense(*lengths, size)
        # Not the same bits where the plain call is one of few rows over many keys, which has a kernel of its own.
        torch.testing.assert_close(flash_online.attention(*tensors, blocks=everything), flash_online.attention(*tensors))


@CPU
@pytest.mark.parametrize("rows", [64, 128])
def test_a_size_that_follows_from_the_number_of_blocks(rows, device):
    for length in (1, 64, 65, 128, 129, 300):
        *tensors, blocks, mask = draw(torch.float32, (length, length), size=(rows, rows))
        found = flash_online.attention(*tensors, blocks=blocks._replace(size=None))
        assert torch.equal(found, flash_online.attention(*tensors, mask=mask)), length


@CPU
def test_counts_that_are_no_counts(device):
    """Less than 0 counts as 0, more than there is room for as all of it."""
    *tensors, blocks, _ = draw(torch.float32, (64, 200), leading=(), density=1.0)
    for count, mask in ((-7, torch.zeros(64, 200, dtype=torch.bool)), (1000, None)):
        odd = blocks._replace(counts=torch.full_like(blocks.counts, count))
        assert torch.equal(flash_online.attention(*tensors, blocks=odd), flash_online.attention(*tensors, mask=mask))


@CPU
def test_shapes(device):
    """Any number of batch dimensions, ranks below four, and lists that broadcast."""
    g = torch.Generator().manual_seed(3)
    for query_shape, key_shape, leading in [
        ((70, 8), (90, 8), ()),
        ((3, 70, 8), (3, 90, 8), (1,)),
        ((2, 3, 70, 8), (1, 3, 90, 8), (3,)),
        ((2, 5, 4, 70, 8), (2, 1, 2, 90, 8), (5, 1)),
        ((2, 5, 4, 70, 8), (2, 1, 2, 90, 8), (2, 1, 4)),
    ]:
        query, key = torch.randn(query_shape, generator=g), torch.randn(key_shape, generator=g)
        blocks, mask = random_blocks(g, leading, (70, 90), (64, 64))
        assert torch.equal(
            flash_online.attention(query, key, key, blocks=blocks), flash_online.attention(query, key, key, mask=mask)
        )


@CPU
def test_second_derivatives_and_forward_mode(device):
    *tensors, blocks, mask = draw(torch.float64, (66, 70), heads=(2, 1), batch=1, head_dim=2, leading=())
    leaves = [t.requires_grad_() for t in tensors]
    found = []
    for words in ({"blocks": blocks}, {"mask": mask}):
        attend = functools.partial(flash_online.attention, **words)
        tangents = [torch.linspace(-1, 1, t.numel(), dtype=t.dtype).view(t.shape) for t in leaves]
        once = torch.autograd.grad(attend(*leaves).square().sum(), leaves, create_graph=True)
        twice = torch.autograd.grad(sum((g * t).sum() for g, t in zip(once, tangents, strict=True)), leaves)
        found.append((*torch.func.jvp(attend, tuple(tensors), tuple(tangents)), *once, *twice))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


@CPU
def test_transforms(device):
    """vmap over tensors, over lists and over both; a gradient per sample."""
    *tensors, blocks, _ = draw(torch.float32, (70, 140), batch=3)

    def attend(query, key, value, counts, indices):
        return flash_online.attention(query, key, value, blocks=BlockList(counts, indices, blocks.size))

    check_transforms(attend, tensors, (blocks.counts, blocks.indices))


@CPU
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled(dynamic, device):
    *tensors, blocks, mask = draw(torch.float32, (133, 140), size=(128, 64))
    check_compiled(flash_online.attention, tensors, {"blocks": blocks}, mask, dynamic)


@CPU
def test_exported(device):
    *tensors, blocks, _ = draw(torch.float32, (70, 140))

    class Attend(torch.nn.Module):
        def forward(self, query, key, value, counts, indices):
            return flash_online.attention(query, key, value, blocks=BlockList(counts, indices, (64, 64)))

    program = torch.export.export(Attend(), (*tensors, blocks.counts, blocks.indices))
    expected = flash_online.attention(*tensors, blocks=blocks)
    assert torch.equal(program.module()(*tensors, blocks.counts, blocks.indices), expected)


@CPU
def test_explained(device):
    *tensors, blocks, _ = draw(torch.float32, (70, 140))
    plan = flash_online.explain(flash_online.attention, *tensors, blocks=blocks)
    assert plan.ours and plan.operators == ("block_tiles", "attention_inference_with_options")


def bad(counts=(1, 4, 2), indices=(1, 4, 2, 3), size=(64, 64), dtype=torch.int32, device="cpu"):
    return BlockList(*(torch.zeros(shape, dtype=dtype, device=device) for shape in (counts, indices)), size)


@CPU
@pytest.mark.parametrize(
    ("blocks", "error", "message"),
    [
        ((1, 2), TypeError, "blocks: expected a BlockList or None, got tuple"),
        (bad(dtype=torch.int64), RuntimeError, "blocks.counts: expected dtype int32, got torch.int64"),
        (
            bad(size=(64, 32)),
            RuntimeError,
            "size: expected a pair (rows of queries, rows of keys), each 64 or 128, got (64, 32)",
        ),
        (bad(size=64), RuntimeError, "size: expected a pair"),
        (bad(counts=(1, 4, 3), indices=(1, 4, 3, 3), size=None), RuntimeError, "expected counts of 2 blocks of 64 queries"),
        (bad(counts=(1, 4, 3), indices=(1, 4, 3, 3)), RuntimeError, "expected counts of 2 blocks of 64 queries"),
        (bad(indices=(1, 4, 3, 3)), RuntimeError, "blocks.indices: expected 2 blocks of queries, got 3"),
        (bad(indices=(4, 2, 3)), RuntimeError, "one dimension more than counts"),
        (bad(counts=(1, 3, 2)), RuntimeError, "blocks.counts: expected leading dimensions that broadcast to [2, 4]"),
        (bad(indices=(3, 4, 2, 3)), RuntimeError, "blocks.indices: expected leading dimensions that broadcast to [2, 4]"),
        (bad(device="meta"), RuntimeError, "blocks.counts: expected query's device cpu, got meta"),
    ],
)
def test_errors(blocks, error, message, device):
    query = torch.randn(2, 4, 100, 8)
    with pytest.raises(error) as raised:
        flash_online.attention(query, query, query, blocks=blocks)
    assert message in str(raised.value)


@pytest.mark.parametrize("instruction_set", ["portable", "avx2", "avx512", "avx512_bf16"])
def test_lesser_instruction_sets(instruction_set):
    skip_unless_lesser(instruction_set)
    run_tests(instruction_set, __file__, "-k", "bits_of_the_same_mask or odd_lengths")
