"""attention and varlen_attention with spans. On the CPU they have the bits of the same bool mask: results, gradients, dropout.
Also derivatives of second order, forward mode, vmap, compiled and exported calls, and errors. tests/unit/test_spans.py has the
functions that make spans, test_kvcache_spans.py calls over cached keys."""

from __future__ import annotations

import functools

import pytest
import torch
from gradients import check_compiled, check_transforms, run
from instruction_sets import run_tests, skip_unless_lesser
from torch.autograd import forward_ad

import flash_online
from flash_online import reference, spans
from flash_online.testing import assert_close_to_float64

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
CPU = pytest.mark.parametrize("device", ["cpu"])


def random_spans(g, shape, most, intervals):
    """Intervals of any order, some of them empty, some beyond the other length."""
    bounds = torch.randint(-3, most + 4, (*shape, 2 * intervals), generator=g, dtype=torch.int32)
    if intervals == 1:  # or rows would see little
        bounds = bounds.sort(-1).values
    return bounds


def draw(dtype, lengths=(70, 133), heads=(4, 2), batch=2, seed=0, head_dim=16, kinds=(1, 2), one_head=(False, True)):
    """(query, key, value, spans, the mask that they stand for). `kinds`: intervals of query_spans and key_spans; 0: none."""
    g = torch.Generator().manual_seed(seed)
    shapes = ((batch, heads[0], lengths[0], head_dim), *((batch, heads[1], lengths[1], head_dim),) * 2)
    tensors = [torch.randn(shape, generator=g).to(dtype) for shape in shapes]
    given = {}
    sides = (("query_spans", lengths[0], lengths[1]), ("key_spans", lengths[1], lengths[0]))
    for (name, own, other), intervals, one in zip(sides, kinds, one_head, strict=True):
        if intervals:
            given[name] = random_spans(g, (batch, 1 if one else heads[0], own), other, intervals)
    return *tensors, given, spans.to_mask(*lengths, **given)


OPTIONS = {
    "plain": {},
    "causal": {"causal": True},
    "window, lower right": {"window": (40, 7), "alignment": "lower_right"},
    "softcap, ALiBi": {"softcap": 2.0, "alibi_slopes": torch.tensor([0.5, 0.25, 0.1, 0.05])},
    "sinks": {"sinks": torch.tensor([0.5, -1.0, 0.0, 2.0])},
    "dropout": {"dropout_p": 0.3},
    "deterministic": {"deterministic": True},
}
KINDS = [(1, 0), (2, 0), (0, 1), (0, 2), (1, 2), (2, 2)]


@CPU
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("kinds", KINDS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bits_of_the_same_mask(dtype, kinds, name, device):
    options = OPTIONS[name]
    for seed, (lengths, one_head) in enumerate(
        [((70, 133), (False, True)), ((129, 64), (True, False)), ((3, 200), (True, True))]
    ):
        *tensors, given, mask = draw(dtype, lengths, kinds=kinds, one_head=one_head, seed=seed)
        ours = run(flash_online.attention, tensors, **given, **options)
        theirs = run(flash_online.attention, tensors, mask=mask, **options)
        for n, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            assert torch.equal(one, other), (n, lengths)


@CPU
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_with_a_float_mask(dtype, device):
    """Spans leave the mask to a bias, which gets its gradient."""
    *tensors, given, mask = draw(dtype, (65, 96), kinds=(2, 1))
    bias = torch.randn(1, 4, 1, 96, generator=torch.Generator().manual_seed(1)).to(dtype)
    ours = run(flash_online.attention, tensors, mask=bias, **given)
    plain, truth = (
        run(reference.attention, [t.to(kind) for t in tensors], mask=bias.to(kind), **given) for kind in (dtype, torch.float64)
    )
    for name, one, other, true in zip(("out", "lse", "dq", "dk", "dv", "dbias"), ours, plain, truth, strict=True):
        assert_close_to_float64(one, other, true, name=name)
    assert torch.equal(ours[1].isneginf(), ~mask.any(-1).expand_as(ours[1]))


@CPU
@pytest.mark.parametrize("lengths", [(0, 5), (5, 0), (1, 1), (1, 300), (64, 64), (65, 63), (200, 1)], ids=str)
def test_odd_lengths_and_empty_rows(lengths, device):
    for kinds in KINDS:
        *tensors, given, mask = draw(torch.float32, lengths, kinds=kinds)
        for one, other in zip(*(run(flash_online.attention, tensors, **o) for o in (given, {"mask": mask})), strict=True):
            assert torch.equal(one, other)
    query, key, value = tensors
    nothing = torch.zeros(lengths[0], 2, dtype=torch.int32)
    out, lse = flash_online.attention(query, key, value, query_spans=nothing, return_lse=True)
    assert not out.any() and lse.isneginf().all()


@CPU
def test_shapes_and_strides(device):
    """Any number of batch dimensions, ranks below four, spans that broadcast, and views of any strides."""
    g = torch.Generator().manual_seed(3)
    for query_shape, key_shape, spans_shape in [
        ((7, 8), (9, 8), (7,)),
        ((3, 7, 8), (3, 9, 8), (1, 7)),
        ((2, 3, 7, 8), (1, 3, 9, 8), (7,)),
        ((2, 5, 4, 7, 8), (2, 1, 2, 9, 8), (5, 1, 7)),
        ((2, 5, 4, 7, 8), (2, 1, 2, 9, 8), (2, 1, 4, 7)),
    ]:
        query, key = torch.randn(query_shape, generator=g), torch.randn(key_shape, generator=g)
        given = random_spans(g, spans_shape, 9, 1)
        mask = spans.to_mask(7, 9, query_spans=given)
        expected = flash_online.attention(query, key, key, mask=mask)
        assert torch.equal(flash_online.attention(query, key, key, query_spans=given), expected)
        turned = given.unsqueeze(0).transpose(0, -1).contiguous().transpose(0, -1).squeeze(0)  # bounds are not neighbours
        assert torch.equal(flash_online.attention(query, key, key, query_spans=turned), expected)
    wide = torch.zeros(7, 6, dtype=torch.int32)
    wide[:, 2:4] = random_spans(g, (7,), 9, 1)
    query, key = torch.randn(2, 2, 7, 8, generator=g), torch.randn(2, 2, 9, 8, generator=g)
    part = wide[:, 2:4]
    assert torch.equal(
        flash_online.attention(query, key, key, query_spans=part),
        flash_online.attention(query, key, key, query_spans=part.clone()),
    )


@CPU
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_packed(dtype, device):
    """Spans count from a sequence's first key or query; each sequence has the bits of a dense call."""
    g = torch.Generator().manual_seed(0)
    query_lengths, key_lengths = [5, 0, 70, 33], [9, 4, 64, 131]
    starts = [torch.tensor([0, *torch.tensor(n).cumsum(0)], dtype=torch.int32) for n in (query_lengths, key_lengths)]
    query, key, value = (torch.randn(n + 3, h, 16, generator=g).to(dtype) for n, h in ((108, 4), (208, 2), (208, 2)))
    by_head = torch.cat([random_spans(g, (4, n), m, 2) for n, m in zip((*query_lengths, 3), (*key_lengths, 9), strict=True)], 1)
    by_key = torch.cat([random_spans(g, (n,), m, 1) for n, m in zip((*key_lengths, 3), (*query_lengths, 9), strict=True)])
    packing = (*starts, max(query_lengths), max(key_lengths))
    leaves = [t.detach().requires_grad_() for t in (query, key, value)]
    out, lse = flash_online.varlen_attention(
        *leaves, *packing, query_spans=by_head, key_spans=by_key, return_lse=True, causal=True
    )
    out.float().square().sum().backward()
    for n in range(4):
        q, k = (slice(start[n], start[n + 1]) for start in starts)
        own = [
            t[rows].transpose(0, 1).unsqueeze(0).detach().requires_grad_() for t, rows in zip(leaves, (q, k, k), strict=True)
        ]
        words = {"query_spans": by_head[:, q], "key_spans": by_key[k], "causal": True, "alignment": "lower_right"}
        one, one_lse = flash_online.attention(*own, return_lse=True, **words)
        one.float().square().sum().backward()
        assert torch.equal(out[q], one[0].transpose(0, 1)) and torch.equal(lse[:, q], one_lse[0])
        for whole, part, rows in zip(leaves, own, (q, k, k), strict=True):
            assert torch.equal(whole.grad[rows], part.grad[0].transpose(0, 1))
    assert not out[108:].any() and not leaves[1].grad[208:].any()


@CPU
def test_second_derivatives_and_forward_mode(device):
    *tensors, given, mask = draw(torch.float64, (6, 7), head_dim=4, kinds=(2, 1))
    leaves = [t.requires_grad_() for t in tensors]

    def attend(*leaves):
        return flash_online.attention(*leaves, **given, return_lse=True)[0]

    assert torch.autograd.gradcheck(attend, leaves, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(attend, leaves, check_fwd_over_rev=True)
    tangents = [torch.randn_like(t) for t in leaves]
    found = []
    for words in (given, {"mask": mask}):
        attend = functools.partial(flash_online.attention, **words)
        found.append(torch.func.jvp(attend, tuple(tensors), tuple(tangents)))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(tensors[0].detach(), tangents[0])
        out = flash_online.attention(dual, *(t.detach() for t in tensors[1:]), **given)
        assert forward_ad.unpack_dual(out).tangent is not None


@CPU
def test_packed_second_derivatives(device):
    g = torch.Generator().manual_seed(0)
    starts = torch.tensor([0, 3, 3, 7], dtype=torch.int32)
    leaves = [torch.randn(8, 2, 3, generator=g, dtype=torch.float64).requires_grad_() for _ in range(3)]
    given = {"query_spans": random_spans(g, (8,), 4, 2), "key_spans": random_spans(g, (2, 8), 4, 1)}

    def attend(*leaves):
        return flash_online.varlen_attention(*leaves, starts, starts, 4, 4, **given)

    assert torch.autograd.gradcheck(attend, leaves)
    assert torch.autograd.gradgradcheck(attend, leaves)


@CPU
def test_transforms(device):
    """vmap over tensors, over spans and over both; a gradient per sample."""
    *tensors, given, _ = draw(torch.float32, (9, 12), batch=3, kinds=(1, 2))

    def attend(query, key, value, query_spans, key_spans):
        return flash_online.attention(query, key, value, query_spans=query_spans, key_spans=key_spans)

    check_transforms(attend, tensors, (given["query_spans"], given["key_spans"]))


@CPU
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled(dynamic, device):
    *tensors, given, mask = draw(torch.float32, (33, 40), kinds=(2, 1))
    check_compiled(flash_online.attention, tensors, given, mask, dynamic)
    packed = [t[0].transpose(0, 1) for t in tensors]
    starts = [torch.tensor([0, n], dtype=torch.int32) for n in (33, 40)]
    words = {name: one[0] for name, one in given.items()}
    attend = lambda *x: flash_online.varlen_attention(*x, *starts, 33, 40, **words)  # noqa: E731
    assert torch.equal(torch.compile(attend, fullgraph=True, dynamic=dynamic)(*packed), attend(*packed))


@CPU
def test_exported(device):
    *tensors, given, _ = draw(torch.float32, (9, 12), kinds=(1, 1))

    class Attend(torch.nn.Module):
        def forward(self, query, key, value, query_spans, key_spans):
            return flash_online.attention(query, key, value, query_spans=query_spans, key_spans=key_spans)

    program = torch.export.export(Attend(), (*tensors, *given.values()))
    assert torch.equal(program.module()(*tensors, *given.values()), flash_online.attention(*tensors, **given))


@CPU
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("unit", [1, 9])
def test_what_is_built(unit, dtype, device):
    """The functions of flash_online.spans give what attention takes. Of 450 rows many tiles are hidden, and many are whole."""
    g, length = torch.Generator().manual_seed(0), 50 * unit
    tensors = [torch.randn(2, heads, length, 16, generator=g).to(dtype) for heads in (4, 2, 2)]
    ids = torch.tensor([[0] * 20 + [1] * 13 + [0] * 17, [5] * 50]).repeat_interleave(unit, 1)
    branch = [-1, *range(24 * unit), 3 * unit, *range(24 * unit + 1, length - 1)]
    row = torch.arange(length)
    two = torch.stack([row // 64 * 0, row // 64 * 0 + 10, row // 64 * 64, row // 64 * 64 + 64], -1).int()
    for words in (
        spans.documents(ids),
        spans.prefix(torch.tensor([7, 50]) * unit, length),
        spans.padding(torch.tensor([0, 31]) * unit, length),
        spans.sink_window(4, 9 * unit, length),
        spans.shared_prefix(torch.tensor([0, 10, 25, 44], dtype=torch.int32) * unit, length),
        spans.tree(torch.tensor([branch, [-1] * length])),
        {"query_spans": two},  # whole and hidden tiles of two intervals
        {"key_spans": two.flip(-2), "query_spans": spans.padding(torch.tensor([9, 40]) * unit, length)["query_spans"]},
    ):
        same = {"mask": spans.to_mask(length, length, **words), "causal": words.get("causal", False)}
        for one, other in zip(*(run(flash_online.attention, tensors, **which) for which in (words, same)), strict=True):
            assert torch.equal(one, other), sorted(words)


GOOD = torch.zeros(6, 2, dtype=torch.int32)


@CPU
@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ([[0, 1]], TypeError, "expected a Tensor"),
        (GOOD.long(), RuntimeError, "expected dtype int32, got torch.int64"),
        (GOOD[0], RuntimeError, "expected [..., 6, 2 or 4]"),
        (GOOD[:5], RuntimeError, "expected the length 6 (last dimension but one), got 5"),
        (torch.zeros(6, 3, dtype=torch.int32), RuntimeError, "expected 2 or 4 bounds (last dimension), got 3"),
        (GOOD.expand(3, 6, 2), RuntimeError, "expected 1 or query's 4 heads (dimension -3), got 3"),
        (GOOD.expand(3, 1, 6, 2), RuntimeError, "broadcast to [2, 4] (batch and heads), got [3, 1, 6, 2]"),
        (GOOD.expand(1, 2, 1, 6, 2), RuntimeError, "got [1, 2, 1, 6, 2]"),
        (GOOD.to("meta"), RuntimeError, "expected query's device cpu, got meta"),
    ],
)
@pytest.mark.parametrize("name", ["query_spans", "key_spans"])
def test_errors(name, given, error, message, device):
    query = torch.randn(2, 4, 6, 8)
    with pytest.raises(error) as raised:
        flash_online.attention(query, query, query, **{name: given})
    assert message in str(raised.value) and str(raised.value).startswith(name)


@CPU
def test_errors_of_packed_calls(device):
    rows, starts = torch.randn(6, 4, 8), torch.tensor([0, 6], dtype=torch.int32)
    with pytest.raises(RuntimeError, match="query_spans: expected the length 6"):
        flash_online.varlen_attention(rows, rows, rows, starts, starts, 6, 6, query_spans=GOOD[:5])


@pytest.mark.parametrize("instruction_set", ["portable", "avx2", "avx512", "avx512_bf16"])
def test_lesser_instruction_sets(instruction_set):
    skip_unless_lesser(instruction_set)
    run_tests(instruction_set, __file__, "-k", "bits_of_the_same_mask or odd_lengths or packed or what_is_built")
