"""attention_weight_sums: per key the sum of its weights, against the definition in float64."""

from __future__ import annotations

import pytest
import torch
from cases import DTYPES
from instruction_sets import run_tests, skip_unless_lesser

import flash_online
from flash_online import reference
from flash_online.testing import LAYOUTS, random_tensor

INF = float("inf")
OPTIONS = {
    "plain": {},
    "causal": {"causal": True},
    "causal, lower right": {"causal": True, "alignment": "lower_right"},
    "window": {"window": (9, 3)},
    "window left": {"window": (20, None)},
    "window right, lower right": {"window": (None, 5), "alignment": "lower_right"},
    "causal window, lower right": {"causal": True, "window": (30, None), "alignment": "lower_right"},
    "softcap": {"softcap": 2.0, "causal": True},
    "negative scale": {"scale": -0.5},
    "scale of 0": {"scale": 0.0},
}


def draw(lengths, heads=(4, 2), batch=(2,), dtype=torch.float32, head_dim=24, device="cpu", seed=0, layout="contiguous"):
    g = torch.Generator().manual_seed(seed)
    shapes = zip(heads, lengths, strict=True)
    return [random_tensor(*batch, h, n, head_dim, dtype=dtype, layout=layout, generator=g).to(device) for h, n in shapes]


def check(query, key, lengths=None, **options):
    """Compares the sums with those of float64, for the lse that attention returns."""
    rows = {name: option for name, option in options.items() if name != "last"}
    _, lse = flash_online.attention(query, key, key, return_lse=True, **rows)
    sums = flash_online.attention_weight_sums(query, key, lse, **options)
    _, wide_lse = reference.attention(query.double(), key.double(), key.double(), return_lse=True, **rows)
    truth = reference.attention_weight_sums(query.double(), key.double(), wide_lse, **options)
    assert sums.dtype == torch.float32 and sums.shape == (*query.shape[:-1][:-1], key.shape[-2]) and not sums.requires_grad
    # A weight has the rounding errors of its exponent's terms, lse and score, as a factor.
    size = 1 + torch.where(wide_lse.isinf(), 0, wide_lse).abs().max() if wide_lse.numel() else 1
    error = (sums - truth).abs()
    assert (error <= truth * (size * 2**-21) + 1e-30).all(), (options, (error / truth).max().item(), size)
    assert torch.equal(sums, flash_online.attention_weight_sums(query, key, lse, **options))
    return sums


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", OPTIONS)
def test_with_every_option(name, dtype, device):
    for seed, (lengths, heads) in enumerate([((13, 17), (2, 2)), ((70, 131), (4, 2)), ((129, 65), (6, 1)), ((1, 300), (2, 1))]):
        for last in (None, 1, 10, 1000):
            check(*draw(lengths, heads, dtype=dtype, device=device, seed=seed), last=last, **OPTIONS[name])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [1, 8, 40, 64, 96, 128, 136, 192, 256, 512])
def test_head_dims(head_dim, dtype, device):
    for lengths in ((200, 333), (257, 128)):
        query, key = draw(lengths, dtype=dtype, head_dim=head_dim, device=device)
        check(query, key)
        check(query, key, causal=True)
        check(query, key, window=(100, 30), alignment="lower_right", last=70)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout, device):
    for dtype in (torch.bfloat16, torch.float32):
        query, key = draw((70, 90), dtype=dtype, device=device, layout=layout)
        check(query, key, causal=True)


def test_weights_of_a_row_sum_to_one(device):
    query, key = draw((300, 200), head_dim=64, dtype=torch.bfloat16, device=device)
    options = {"causal": True, "alignment": "lower_right"}  # the first 100 rows see nothing
    _, lse = flash_online.attention(query, key, key, return_lse=True, **options)
    sums = flash_online.attention_weight_sums(query, key, lse, **options)
    torch.testing.assert_close(sums.sum(-1), torch.full_like(sums[..., 0], 200.0), rtol=1e-4, atol=0)
    last = flash_online.attention_weight_sums(query, key, lse, last=64, **options)
    torch.testing.assert_close(last.sum(-1), torch.full_like(sums[..., 0], 64.0), rtol=1e-4, atol=0)


def test_sinks_take_their_share(device):
    query, key = draw((50, 60), device=device)
    sinks = torch.tensor([0.0, 1.0, -INF, 5.0], device=device)
    _, lse = flash_online.attention(query, key, key, sinks=sinks, return_lse=True)
    sums = flash_online.attention_weight_sums(query, key, lse)
    scores = query @ key.repeat_interleave(2, 1).mT / 24**0.5
    torch.testing.assert_close(sums, (scores - lse.unsqueeze(-1)).exp().sum(-2))


@pytest.mark.parametrize("lengths", [(0, 5), (5, 0), (0, 0)])
def test_no_rows(lengths, device):
    query, key = draw(lengths, device=device)
    _, lse = flash_online.attention(query, key, key, return_lse=True)
    for last in (None, 3):
        assert torch.equal(flash_online.attention_weight_sums(query, key, lse, last=last), key.new_zeros(2, 4, lengths[1]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_rows_of_no_weight(dtype, device):
    """A row with lse -inf adds nothing, whatever its scores are; a row with a NaN reaches the keys that it sees alone."""
    query, key = draw((70, 90), heads=(2, 2), head_dim=64, dtype=dtype, device=device)
    _, lse = flash_online.attention(query, key, key, causal=True, return_lse=True)
    lse[..., 5] = -INF
    sums = flash_online.attention_weight_sums(query, key, lse, causal=True)
    others = lse.clone()
    others[..., 5] = INF
    assert torch.equal(sums, flash_online.attention_weight_sums(query, key, others, causal=True))
    lse[..., 30] = float("nan")
    touched = flash_online.attention_weight_sums(query, key, lse, causal=True)
    assert touched[..., :31].isnan().all() and torch.equal(touched[..., 31:], sums[..., 31:])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_far_off_scores(dtype, device):
    """The scores of a head may lie anywhere: their lse takes them back. Products are whole numbers, so that no sum rounds."""
    for level in (1e3, -1e3, 3e4):
        query, key = (
            torch.zeros(1, 1, 40, 64, dtype=dtype, device=device),
            torch.zeros(1, 1, 50, 64, dtype=dtype, device=device),
        )
        query[..., 0], key[..., 0] = 256.0, level / 256.0
        _, lse = flash_online.attention(query, key, key, scale=1.0, return_lse=True)
        sums = flash_online.attention_weight_sums(query, key, lse, scale=1.0)
        torch.testing.assert_close(sums, torch.full_like(sums, 40 / 50), rtol=abs(level) * 2**-22 + 1e-5, atol=0)


def test_transforms_and_graphs(device):
    query, key = (t.requires_grad_() for t in draw((40, 50), batch=(3, 2), head_dim=64, device=device))
    _, lse = flash_online.attention(query, key, key, causal=True, return_lse=True)

    def call(q, k, s):
        return flash_online.attention_weight_sums(q, k, s, causal=True)

    expected = call(query, key, lse)
    assert expected.shape == (3, 2, 4, 50) and not expected.requires_grad
    torch.testing.assert_close(torch.func.vmap(call)(query, key, lse), expected)
    torch.testing.assert_close(torch.func.vmap(call, (0, None, 0))(query, key[0], lse)[0], expected[0])
    primal, tangent = torch.func.jvp(lambda q: call(q, key, lse), (query,), (query,))
    assert torch.equal(primal, expected) and (tangent == 0).all()
    assert (torch.func.grad(lambda q: call(q, key, lse).sum() + q.sum())(query) == 1).all()
    assert torch.equal(torch.compile(call, fullgraph=True, backend="aot_eager")(query, key, lse), expected)


@pytest.mark.slow
def test_compiled_and_exported(device):
    class Module(torch.nn.Module):
        def forward(self, q, k, s):
            return flash_online.attention_weight_sums(q, k, s, causal=True, last=30, alignment="lower_right")

    query, key = draw((40, 50), head_dim=64, device=device)
    _, lse = flash_online.attention(query, key, key, causal=True, alignment="lower_right", return_lse=True)
    expected = Module()(query, key, lse)
    for dynamic in (False, True):
        assert torch.equal(torch.compile(Module(), fullgraph=True, dynamic=dynamic)(query, key, lse), expected)
    assert torch.equal(torch.export.export(Module(), (query, key, lse)).module()(query, key, lse), expected)


def test_any_rank_and_dtype_of_lse(device):
    query, key = (t[0, 0] for t in draw((7, 9), device=device))
    _, lse = flash_online.attention(query, key, key, return_lse=True)
    sums = flash_online.attention_weight_sums(query, key, lse)
    assert sums.shape == (9,)
    torch.testing.assert_close(sums, flash_online.attention_weight_sums(query, key, lse.double()))


def test_errors(device):
    query, key = draw((7, 9), device=device)
    lse = torch.zeros(2, 4, 7, device=device)
    for change, message in (
        ({"lse": lse[..., :5]}, "lse: expected query's"),
        ({"key": key[..., :8]}, "key: expected"),
        ({"key": key.half()}, "key: expected query's dtype"),
        ({"key": key[:, :1].expand(2, 3, 9, 24)}, "key: expected heads"),
        ({"last": -1}, "last: expected"),
        ({"window": (1, -2)}, "window: expected"),
        ({"alignment": "left"}, "alignment: expected"),
        ({"softcap": -1.0}, "softcap: expected"),
    ):
        given = {"query": query, "key": key, "lse": lse} | change
        with pytest.raises(flash_online.InvalidArgument, match=message):
            flash_online.attention_weight_sums(**given)
    with pytest.raises(TypeError, match="causal: expected"):
        flash_online.attention_weight_sums(query, key, lse, causal=1)


@pytest.mark.parametrize("instruction_set", ["portable", "avx2", "avx512", "avx512_bf16"])
def test_lesser_instruction_sets(instruction_set):
    skip_unless_lesser(instruction_set)
    run_tests(instruction_set, __file__, "-k", "every_option or head_dims or far_off or no_weight")
