"""The maximum logit of attention (return_max_logit): each head's largest score, with every option, in calls of every kind."""

from __future__ import annotations

import pytest
import torch
from cases import DTYPES, OPTIONS, SPARSE_OPTIONS
from instruction_sets import run_tests, skip_unless_lesser
from oracle import Attention, Packed, whole_numbers

import flash_online
from flash_online import reference

INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", OPTIONS)
def test_with_every_option(name, dtype, device):
    for seed, (lengths, heads) in enumerate([((13, 17), (2, 2, 2)), ((70, 131), (4, 2, 1)), ((129, 65), (2, 1, 2))]):
        problem = Attention.of(OPTIONS[name], dtype=dtype, lengths=lengths, heads=heads, seed=seed, max_logit=True)
        problem.check(device)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", [name for name, line in OPTIONS.items() if "mask" not in line])
def test_packed_sequences(name, dtype, device):
    Packed.of(OPTIONS[name], dtype=dtype, heads=(4, 2, 2), max_logit=True).check(device)


@pytest.mark.parametrize("name", ["causal", "sinks", "scale"])
@pytest.mark.parametrize(
    "sparse", [{"spans": (2, 0)}, {"spans": (1, 1)}, {"blocks": (64, 64)}, {"blocks": (128, 128)}], ids=str
)
def test_spans_and_lists(sparse, name, device):
    Attention(lengths=(150, 200), max_logit=True, head_spans=True, **sparse, **SPARSE_OPTIONS[name]).check(device)


def test_dropout_does_not_enter(device):
    Attention(lengths=(40, 50), max_logit=True, options={"dropout_p": 0.5}).check(device)


class Module(torch.nn.Module):
    def __init__(self, call):
        super().__init__()
        self.call = call

    def forward(self, *tensors):
        return self.call(*tensors)


def scores(query, key, scale, causal=False):
    """float64, with the scale rounded to float32, as the CUDA kernels round it."""
    products = query.double() @ key.double().repeat_interleave(query.shape[1] // key.shape[1], 1).mT
    seen = reference.visible(query.shape[2], key.shape[2], causal=causal, device=query.device)
    return torch.where(seen, products * scale, -INF)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [8, 40, 64, 96, 128, 192, 256])
def test_exact_to_the_float(head_dim, dtype, causal, device):
    """Products of whole numbers are exact in any order; all scores are negative, so that rows and keys past the end, which are
    zeros, must not count."""
    eps = torch.finfo(dtype).eps
    g = torch.Generator().manual_seed(head_dim)
    for lengths in ((1, 1), (63, 65), (200, 333), (130, 97)):
        query, key = (whole_numbers(torch.randn(2, h, n, head_dim, generator=g)) for h, n in zip((4, 2), lengths, strict=True))
        query[..., 0], key[..., 0] = 30.0, -30.0 - torch.arange(2)[:, None, None]
        query, key = query.to(device, dtype), key.to(device, dtype)
        out, found = flash_online.attention(query, key, key, causal=causal, scale=0.25, return_max_logit=True)
        assert found.dtype == torch.float32 and found.shape == (2, 4)
        assert torch.equal(found.double(), scores(query, key, 0.25, causal).amax((2, 3))), lengths
        again = flash_online.attention(query, key, key, causal=causal, scale=0.25, return_lse=True, return_max_logit=True)
        assert torch.equal(again[2], found) and torch.equal(again[0], out)
        expected = flash_online.attention(query, key, key, causal=causal, scale=0.25)
        # Another kernel may compute it, with tiles of other sizes: an output is as exact as the largest value of its sum.
        torch.testing.assert_close(out, expected, rtol=4 * eps, atol=30 * eps)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_each_head_has_its_own(dtype, device):
    query, key = torch.zeros(2, 6, 70, 64, dtype=dtype, device=device), torch.zeros(2, 2, 90, 64, dtype=dtype, device=device)
    key[..., 0] = 1
    for batch in range(2):
        for head in range(6):
            query[batch, head, 10 * head + batch, 0] = 8.0 * (head + 6 * batch + 1)
    _, found = flash_online.attention(query, key, key, return_max_logit=True)
    assert torch.equal(found.cpu(), torch.arange(1.0, 13).view(2, 6))
    packed = (t.transpose(1, 2).flatten(0, 1) for t in (query, key, key))
    starts = [torch.arange(0, 3 * n, n, dtype=torch.int32, device=device) for n in (70, 90)]
    _, found = flash_online.varlen_attention(*packed, *starts, 70, 90, return_max_logit=True)
    assert torch.equal(found.cpu(), torch.arange(1.0, 13).view(2, 6))


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0)])
def test_nothing_is_seen(shape, device):
    query, key = (torch.randn(1, 2, n, 8, device=device) for n in shape)
    _, lse, found = flash_online.attention(query, key, key, return_lse=True, return_max_logit=True)
    assert lse.shape == (1, 2, shape[0]) and torch.equal(found.cpu(), torch.full((1, 2), -INF))


def test_a_head_that_sees_nothing(device):
    query = torch.randn(1, 2, 70, 16, device=device)
    mask = torch.zeros(1, 2, 70, 70, dtype=torch.bool, device=device)
    mask[:, 1, 60, 3] = True
    _, found = flash_online.attention(query, query, query, mask=mask, return_max_logit=True)
    assert found[0, 0] == -INF
    torch.testing.assert_close(found[0, 1], query[0, 1, 60] @ query[0, 1, 3] / 4)
    starts = torch.tensor([0, 0, 3, 3], dtype=torch.int32, device=device)
    packed = query[0].transpose(0, 1)
    _, found = flash_online.varlen_attention(packed, packed, packed, starts, starts, 3, 3, return_max_logit=True)
    assert (found[[0, 2]] == -INF).all() and found[1].isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("masked", [False, True])
def test_scores_that_are_not_finite(masked, dtype, device):
    """+inf is the largest, NaN counts as larger yet, and hidden scores do not count."""
    query, key, value = (torch.randn(1, 4, n, 64, device=device).to(dtype) for n in (100, 150, 150))
    key[0, :, :, 0] = 1
    query[0, 0, 70, 0] = NAN
    query[0, 1, 99, 0] = INF
    query[0, 2, 5, 0], query[0, 2, 6, 0] = INF, NAN
    key[0, 3, 140, 5] = NAN
    mask = torch.ones(150, dtype=torch.bool, device=device)
    mask[140] = not masked
    options = {"mask": mask.expand(100, 150)} if masked else {}
    _, found = flash_online.attention(query, key, value, return_max_logit=True, **options)
    assert found[0, [0, 2]].isnan().all() and found[0, 1] == INF
    assert found[0, 3].isfinite() if masked else found[0, 3].isnan()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_masks_of_lowest_numbers(dtype, device):
    """A row that sees lowest numbers alone has such a maximum; the head's is that of its other rows."""
    query = torch.randn(1, 1, 65, 32, device=device).to(dtype)
    mask = torch.full((65, 65), torch.finfo(dtype).min, device=device, dtype=dtype)
    _, found = flash_online.attention(query, query, query, mask=mask, return_max_logit=True)
    torch.testing.assert_close(found, torch.full_like(found, torch.finfo(dtype).min), rtol=1e-2, atol=0)
    mask[64, 3] = 0
    _, found = flash_online.attention(query, query, query, mask=mask, return_max_logit=True)
    torch.testing.assert_close(found[0, 0], (query[0, 0, 64].float() @ query[0, 0, 3].float()) / 32**0.5, rtol=1e-5, atol=1e-6)


def test_no_gradient_and_that_of_the_others(device):
    """A training step with it has the gradients of one without, of first and second order; nothing depends on it."""
    tensors = [torch.randn(1, 2, 20, 8, device=device, dtype=torch.float64).requires_grad_() for _ in range(3)]

    def gradients(**more):
        out, lse, *largest = flash_online.attention(*tensors, causal=True, return_lse=True, **more)
        assert all(not one.requires_grad for one in largest)
        first = torch.autograd.grad(out.sin().sum() + lse.square().sum(), tensors, create_graph=True)
        return *first, *torch.autograd.grad(sum(x.square().sum() for x in first), tensors)

    for one, other in zip(gradients(return_max_logit=True), gradients(), strict=True):
        torch.testing.assert_close(one, other)
    packed = [t.detach()[0].transpose(0, 1).requires_grad_() for t in tensors]
    starts = torch.tensor([0, 12, 20], dtype=torch.int32, device=device)
    found = []
    for more in ({}, {"return_max_logit": True}):
        out, *largest = flash_online.varlen_attention(*packed, starts, starts, 12, 12, return_lse=True, **more)
        found.append(torch.autograd.grad(out.sin().sum(), packed))
        assert not any(one.requires_grad for one in largest[1:])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


def test_transforms(device):
    query, key, value = (torch.randn(3, 2, 2, n, 8, device=device, dtype=torch.float64) for n in (9, 13, 13))

    def call(q, k, v):
        return flash_online.attention(q, k, v, causal=True, return_max_logit=True)

    expected = call(query, key, value)
    for one, other in zip(torch.func.vmap(call)(query, key, value), expected, strict=True):
        torch.testing.assert_close(one, other)
    one_query = torch.func.vmap(call, (None, 0, 0))(query[0], key, value)
    torch.testing.assert_close(one_query[1], call(query[:1].expand_as(query), key, value)[1])
    (out, found), (d_out, d_found) = torch.func.jvp(call, (query, key, value), (query, key, value))
    torch.testing.assert_close(found, expected[1])
    assert d_found is None or (d_found == 0).all()
    torch.testing.assert_close(d_out, torch.func.jvp(lambda *t: call(*t)[0], (query, key, value), (query, key, value))[1])
    grads, (_, found) = torch.func.grad_and_value(
        lambda q: (lambda out, most: (out.sum(), (out, most)))(*call(q, key, value)), has_aux=True
    )(query)
    del grads
    torch.testing.assert_close(found[1], expected[1])


@pytest.mark.slow
@pytest.mark.parametrize("packed", [False, True])
def test_compiled(packed, device):
    tensors = [torch.randn(1, 2, 20, 8, device=device) for _ in range(3)]
    if packed:
        tensors = [t[0].transpose(0, 1).contiguous() for t in tensors]
        starts = torch.tensor([0, 12, 20], dtype=torch.int32, device=device)

        def call(q, k, v):
            return flash_online.varlen_attention(q, k, v, starts, starts, 12, 12, return_max_logit=True)
    else:

        def call(q, k, v):
            return flash_online.attention(q, k, v, causal=True, return_max_logit=True)

    def step(call):
        leaves = [t.detach().requires_grad_() for t in tensors]
        out, found = call(*leaves)
        assert not found.requires_grad
        return out, found, *torch.autograd.grad(out.sin().sum(), leaves)

    for one, other in zip(step(torch.compile(call, fullgraph=True)), step(call), strict=True):
        assert torch.equal(one, other)
    with torch.no_grad():
        exported = torch.export.export(Module(call), tuple(tensors)).module()
        for one, other in zip(exported(*tensors), call(*tensors), strict=True):
            assert torch.equal(one, other)


def test_any_rank(device):
    query, key = torch.randn(7, 8, device=device), torch.randn(9, 8, device=device)
    _, found = flash_online.attention(query, key, key, return_max_logit=True)
    assert found.shape == ()
    torch.testing.assert_close(found, (query @ key.T).max() / 8**0.5)
    _, found = flash_online.attention(query.expand(3, 2, 4, 7, 8), key.expand(3, 1, 2, 9, 8), key, return_max_logit=True)
    assert found.shape == (3, 2, 4)


def test_errors(device):
    x = torch.randn(1, 1, 4, 8, device=device)
    with pytest.raises(TypeError, match="return_max_logit: expected"):
        flash_online.attention(x, x, x, return_max_logit=1)
    rows, starts = x[0].transpose(0, 1), torch.tensor([0, 4], dtype=torch.int32, device=device)
    with pytest.raises(flash_online.InvalidArgument, match="return_max_logit: expected False over cached keys"):
        flash_online.varlen_attention(rows, rows, rows, starts, starts, 4, 4, seqused_k=starts[1:], return_max_logit=True)


def test_plan_names_its_operator(device):
    x = torch.randn(1, 1, 4, 8, device=device)
    assert flash_online.explain(flash_online.attention, x, x, x, return_max_logit=True).operators == (
        "attention_forward_with_max_logit",
    )


@pytest.mark.parametrize("instruction_set", ["portable", "avx2", "avx512", "avx512_bf16"])
def test_lesser_instruction_sets(instruction_set):
    skip_unless_lesser(instruction_set)
    run_tests(instruction_set, __file__, "-k", "every_option or packed or exact or finite or lowest_numbers")
