"""flash_online.attention and merge_attention against the float64 reference, forward and backward."""

from __future__ import annotations

import math

import pytest
import torch
from cases import BATCHES, DTYPES, EDGE_LENGTHS, HEAD_DIMS, HEADS, MASK_RANKS, MASK_SHAPES, OPTIONS
from devices import skip_without_room
from oracle import Attention, CaptureRng, rng_state

import flash_online
from flash_online import reference
from flash_online.testing import LAYOUTS, assert_close_to_float64, lay_out, random_tensor

INF = math.inf


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_options(options, dtype, device):
    Attention.of(options, dtype=dtype, heads=(4, 2, 2), lengths=(13, 21)).check(device)
    Attention.of(options, dtype=dtype, heads=(2, 2, 2), lengths=(37, 19), head_dims=(16, 12)).check(device)


@pytest.mark.parametrize("lengths", EDGE_LENGTHS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_block_edges(lengths, dtype, causal, device):
    Attention(dtype=dtype, batch=(), heads=(2, 1, 1), lengths=lengths, head_dims=(24, 24), options={"causal": causal}).check(
        device
    )


@pytest.mark.parametrize(
    "mask_shape", [(1, 1, 1, 1), (0, 1, 1, 1), (1, 0, 1, 1), (0, 0, 1, 1), (0, 1, 0, 1), (1, 0, 1, 0)], ids=str
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_several_spans_of_keys(mask_shape, dtype, device):
    """Gradients of queries and masks that several work items add to, with keys and whole items that some queries do not see."""
    for options in ({}, {"causal": True, "alignment": "lower_right"}, {"window": (70, 130), "softcap": 3.0}):
        problem = Attention(
            dtype=dtype, heads=(4, 2, 2), lengths=(140, 530), mask="float", mask_shape=mask_shape, options=options, sinks=True
        )
        problem.check(device)


@pytest.mark.parametrize("window", [(0, 0), (15, 0), (64, 0), (0, 64), (127, 3), (None, 128)], ids=str)
@pytest.mark.parametrize("alignment", ["upper_left", "lower_right"])
@pytest.mark.parametrize("lengths", [(257, 129), (129, 257), (65, 300)], ids=str)
def test_windows_across_blocks(window, alignment, lengths, device):
    options = {"window": window, "alignment": alignment}
    Attention(batch=(), heads=(1, 1, 1), lengths=lengths, options=options).check(device)
    Attention(batch=(), heads=(1, 1, 1), lengths=lengths, options=options | {"causal": True}, sinks=True, alibi=1).check(device)


@pytest.mark.parametrize("head_dims", HEAD_DIMS, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_widths(head_dims, dtype, device):
    Attention(dtype=dtype, batch=(1,), heads=(2, 2, 2), lengths=(19, 35), head_dims=head_dims).check(device)


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("batch", BATCHES, ids=str)
def test_heads_and_batches(heads, batch, device):
    Attention(batch=batch, heads=heads, lengths=(9, 11), head_dims=(8, 6), mask="float", mask_rank=3).check(device)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_layouts(layout, dtype, device):
    """Strides of every kind, with NaN in the memory between and around the elements."""
    for which in range(4):
        layouts = tuple(layout if i == which else "contiguous" for i in range(4))
        Attention(dtype=dtype, heads=(4, 2, 2), lengths=(20, 33), layouts=layouts, mask="float").check(device)
    Attention(dtype=dtype, lengths=(65, 70), layouts=(layout,) * 4, mask="bool", options={"causal": True}).check(device)


@pytest.mark.parametrize("shape", MASK_SHAPES, ids=str)
@pytest.mark.parametrize("rank", MASK_RANKS)
@pytest.mark.parametrize("kind", ["bool", "float", "-inf"])
def test_mask_shapes(shape, rank, kind, device):
    Attention(heads=(4, 2, 2), lengths=(70, 67), mask=kind, mask_shape=shape, mask_rank=rank).check(device)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["float", "-inf"])
def test_float32_mask_beside_16_bit_query(dtype, kind, device):
    Attention(dtype=dtype, mask=kind, mask_dtype=torch.float32).check(device)


@pytest.mark.parametrize("wanted", ["q", "k", "v", "m", "s", "qm", "kv", ""], ids=lambda w: w or "nothing")
@pytest.mark.parametrize("grad_lse", [False, True])
def test_subsets_of_gradients(wanted, grad_lse, device):
    """Any subset of gradients: that of the mask, for one, is right also when no other tensor requires grad."""
    Attention(mask="float", mask_shape=(0, 1, 1, 1), sinks=True, wanted=wanted, grad_lse=grad_lse).check(device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_gradient_of_lse_alone(dtype, device):
    query, key, value = (torch.randn(2, 2, n, 8, dtype=dtype, requires_grad=True, device=device) for n in (7, 9, 9))
    _, lse = flash_online.attention(query, key, value, causal=True, return_lse=True)
    _, expected = reference.attention(query, key, value, causal=True, return_lse=True)
    grad = torch.randn_like(lse)
    ours = torch.autograd.grad(lse, (query, key, value), grad, allow_unused=True)
    theirs = torch.autograd.grad(expected, (query, key), grad)
    torch.testing.assert_close(ours[:2], theirs)
    assert ours[2] is None or (ours[2] == 0).all()


@pytest.mark.parametrize("lengths", [(0, 5), (5, 0), (0, 0)], ids=str)
@pytest.mark.parametrize("options", ["plain", "causal lower right", "sinks", "float mask"])
def test_empty_lengths(lengths, options, device):
    Attention.of(OPTIONS[options], lengths=lengths).check(device)


@pytest.mark.parametrize(
    "batch, heads, head_dims", [((0,), (2, 2, 2), (8, 8)), ((2,), (2, 2, 2), (8, 0)), ((2,), (2, 2, 2), (0, 0))]
)
def test_other_empty_dimensions(batch, heads, head_dims, device):
    Attention(batch=batch, heads=heads, head_dims=head_dims).check(device)


# --- Rows with nothing to attend to, and what is not a number -----------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mask_kind", ["bool", "float", "window", "causal"])
def test_row_without_keys_is_zero(dtype, mask_kind, device):
    query, key, value = (torch.randn(2, 2, n, 8, device=device).to(dtype).requires_grad_() for n in (9, 6, 6))
    mask, options = None, {}
    empty = torch.zeros(9, dtype=torch.bool, device=device)
    if mask_kind == "window":
        options, empty[8:] = {"window": (2, 0)}, True  # position 8 sees keys 6..8, of which there are none
    elif mask_kind == "causal":
        options, empty[:3] = {"causal": True, "alignment": "lower_right"}, True
    else:
        keep = torch.ones(9, 6, dtype=torch.bool, device=device)
        keep[4], empty[4] = False, True
        mask = keep if mask_kind == "bool" else torch.where(keep, 0.0, -INF).to(dtype).requires_grad_()
    out, lse = flash_online.attention(query, key, value, mask=mask, **options, return_lse=True)
    assert (out[:, :, empty] == 0).all() and (lse[:, :, empty] == -INF).all()
    assert (out[:, :, ~empty] != 0).any(-1).all() and lse[:, :, ~empty].isfinite().all()
    inputs = [query, key, value] + ([mask] if mask is not None and mask.requires_grad else [])
    grads = torch.autograd.grad((out.float().sum() + lse[:, :, ~empty].float().sum()), inputs)
    assert all(g.isfinite().all() for g in grads)
    assert (grads[0][:, :, empty] == 0).all()
    if len(grads) == 4:
        assert (grads[3][empty] == 0).all()
    # The gradient of lse has no effect where lse is -inf.
    out, lse = flash_online.attention(query, key, value, mask=mask, **options, return_lse=True)
    assert all(g.isfinite().all() for g in torch.autograd.grad(lse.sum(), inputs, allow_unused=True) if g is not None)


def test_row_with_only_a_sink(device):
    sinks = torch.tensor([0.5, -2.0], requires_grad=True, device=device)
    query, key, value = (torch.randn(1, 2, 3, 4, requires_grad=True, device=device) for _ in range(3))
    mask = torch.zeros(3, 3, dtype=torch.bool, device=device)
    out, lse = flash_online.attention(query, key, value, mask=mask, sinks=sinks, return_lse=True)
    assert (out == 0).all()
    torch.testing.assert_close(lse, sinks.detach()[None, :, None].expand(1, 2, 3))
    grads = torch.autograd.grad(lse.sum(), [query, key, sinks])
    assert (grads[0] == 0).all() and (grads[1] == 0).all()
    torch.testing.assert_close(grads[2], torch.full((2,), 3.0, device=device))


def test_sink_of_minus_infinity_is_no_sink(device):
    query, key, value = (torch.randn(1, 2, 5, 4, device=device) for _ in range(3))
    expected = flash_online.attention(query, key, value, return_lse=True)
    found = flash_online.attention(query, key, value, sinks=torch.full((2,), -INF, device=device), return_lse=True)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bad", [math.nan, INF])
def test_nan_and_infinity_reach_their_rows(dtype, bad, device):
    """NaN in a query poisons its row alone; +inf as a score does too; NaN in a value poisons every row that sees it."""
    query, key, value = (torch.rand(1, 2, 40, 8, device=device).to(dtype) + 0.5 for _ in range(3))
    clean = flash_online.attention(query, key, value)
    poisoned = query.clone()
    poisoned[0, 1, 33, 2] = bad  # keys are positive, so +inf here makes scores of +inf
    out, lse = flash_online.attention(poisoned, key, value, return_lse=True)
    assert out[0, 1, 33].isnan().all() and not lse[0, 1, 33].isfinite()
    out[0, 1, 33] = clean[0, 1, 33]
    assert torch.equal(out, clean)
    poisoned = value.clone()
    poisoned[0, 0, 35, 1] = bad
    out = flash_online.attention(query, key, poisoned, causal=True)
    assert not out[0, 0, 35:, 1].isfinite().any() and out[0, 1].isfinite().all()


def test_what_is_hidden_stays_finite(device):
    """Huge but finite keys and values that a mask hides change nothing, whatever their scores would have been."""
    query, key, value = (torch.randn(1, 2, 20, 8, device=device) for _ in range(3))
    mask = torch.ones(20, 20, dtype=torch.bool, device=device)
    mask[:, 7] = False
    expected = flash_online.attention(query, key, value, mask=mask)
    key[:, :, 7], value[:, :, 7] = 1e30, 1e30
    torch.testing.assert_close(flash_online.attention(query, key, value, mask=mask), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("size", [1e-30, 1e3, 1e15])
def test_extreme_scores(size, dtype, device):
    """Scores of 1e30 and more: the softmax is one-hot, lse is the largest score, nothing overflows."""
    query, key, value = (random_tensor(1, 2, 33, 16, dtype=dtype, device=device) for _ in range(3))
    query, key = query * size, key * size
    plain = reference.attention(query, key, value, return_lse=True)
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {}
    for ours, theirs in zip(flash_online.attention(query, key, value, return_lse=True), plain, strict=True):
        torch.testing.assert_close(ours, theirs, **tolerance)


@pytest.mark.parametrize("shift", [-10000.0, -200.0, -89.0, 89.0, 200.0, 10000.0, 1000000.0])
def test_lse_far_from_zero(shift, device):
    """Scores of whole numbers have no rounding error, however large; a lse there has few digits left after its point. The
    weights that the backward pass takes from it, exp(score - lse), have all of float32's digits nonetheless."""
    query, key = (torch.randint(-1, 2, (1, 2, n, 8), device=device).float() for n in (9, 130))
    value, mask = torch.randn(1, 2, 130, 8, device=device), torch.randint(-2, 3, (9, 130), device=device).float() + shift

    def run(function, dtype):
        leaves = [t.to(dtype).requires_grad_() for t in (query, key, value, mask)]
        out, lse = function(*leaves[:3], mask=leaves[3], scale=1.0, return_lse=True)
        return [out, lse, *torch.autograd.grad(out.sum() + out.square().sum(), leaves)]

    ours = run(flash_online.attention, torch.float32)
    plain, truth = run(reference.attention, torch.float32), run(reference.attention, torch.float64)
    for name, a, b, c in zip(["out", "lse", "query", "key", "value", "mask"], ours, plain, truth, strict=True):
        assert_close_to_float64(a, b, c, name=f"{name}, shift {shift}")


def test_mask_of_the_smallest_number_is_not_minus_infinity(device):
    """finfo.min hides keys with others, as transformers' masks do; alone it leaves a plain mean."""
    query, key, value = (torch.randn(1, 1, 4, 8, device=device) for _ in range(3))
    mask = torch.full((4, 4), torch.finfo(torch.float32).min, device=device)
    out = flash_online.attention(query, key, value, mask=mask)
    torch.testing.assert_close(out, value.mean(-2, keepdim=True).expand_as(out))  # torch's fused CUDA kernel gives 0
    mask[0, 0] = 0
    torch.testing.assert_close(flash_online.attention(query, key, value, mask=mask)[0, 0, 0], value[0, 0, 0])


# --- Layout of results, determinism, independence ------------------------------------------------------------------------


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (1, 0, 2, 3), (2, 0, 1, 3)], ids=str)
def test_out_and_gradients_keep_the_order_of_strides(order, device):
    def make(*shape):
        inverse = sorted(range(4), key=order.__getitem__)
        return torch.randn([shape[i] for i in order], device=device).permute(inverse)

    query, key, value = make(2, 4, 5, 8), make(2, 2, 7, 8), make(2, 2, 7, 6)
    for t in (query, key, value):
        t.requires_grad_()
    out, lse = flash_online.attention(query, key, value, return_lse=True)

    def by_stride(t):
        return sorted(range(4), key=lambda i: -t.stride(i))

    assert by_stride(out) == list(order) and lse.is_contiguous()
    assert out.permute(order).is_contiguous()
    for t, g in zip((query, key, value), torch.autograd.grad(out.sum(), (query, key, value)), strict=True):
        assert by_stride(g) == by_stride(t)


@pytest.mark.parametrize(
    "problem",
    [
        Attention(heads=(4, 2, 2), lengths=(150, 140), mask="float", options={"causal": True}, sinks=True),
        Attention(batch=(1,), heads=(1, 1, 1), lengths=(600, 900), options={"causal": True}),
        Attention(batch=(1,), heads=(1, 1, 1), lengths=(600, 900), options={"window": (200, 100)}, dtype=torch.bfloat16),
        Attention(batch=(3,), heads=(4, 2, 1), lengths=(300, 400), mask="float", mask_shape=(0, 0, 1, 1)),
        Attention(batch=(2,), heads=(4, 4, 4), lengths=(200, 300), mask="float", dtype=torch.bfloat16),
    ],
    ids=str,
)
def test_same_bits_for_any_number_of_threads(problem):
    results = []
    for threads in (1, 2, 3, 7):
        torch.set_num_threads(threads)
        results.append(_forward_and_backward(problem, deterministic=True, device="cpu"))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("kind", ["bool", "-inf", "causal", "window"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_hidden_blocks_are_not_computed(kind, dtype, device):
    """Keys and values that a whole tile of queries does not see may hold NaN: 0 * NaN would show that they were read."""
    length, block = 512, 256
    query, key, value = (random_tensor(1, 2, length, 16, dtype=dtype, device=device).requires_grad_() for _ in range(3))
    rows, columns = torch.arange(length, device=device)[:, None], torch.arange(length, device=device)
    seen = {"causal": rows >= columns, "window": (rows - columns).abs() <= 32}.get(kind, rows // block == columns // block)
    options = {"causal": {"causal": True}, "window": {"window": (32, 32)}}.get(kind)
    if options is None:
        options = {"mask": seen if kind == "bool" else torch.where(seen, 0.0, -INF).to(dtype)}
    options["deterministic"] = True
    poisoned = torch.arange(length, device=device) >= block  # what the first 128 queries are far from
    first = slice(0, 128)
    spoilt_key, spoilt_value = (t.detach().masked_fill(poisoned[:, None], math.nan) for t in (key, value))
    expected = flash_online.attention(query, key, value, **options)[:, :, first]
    found = flash_online.attention(query, spoilt_key, spoilt_value, **options)[:, :, first]
    assert torch.equal(found, expected)
    grad = torch.autograd.grad(found.sum(), query)[0][:, :, first]
    assert torch.equal(grad, torch.autograd.grad(expected.sum(), query)[0][:, :, first])


def test_same_bits_run_to_run(device):
    problem = Attention(heads=(4, 2, 2), lengths=(150, 140), mask="float", mask_shape=(0, 0, 1, 1), sinks=True)
    first = _forward_and_backward(problem, deterministic=True, device=device)
    for _ in range(3):
        assert all(
            torch.equal(a, b)
            for a, b in zip(first, _forward_and_backward(problem, deterministic=True, device=device), strict=True)
        )
    torch.use_deterministic_algorithms(True)
    for a, b in zip(first, _forward_and_backward(problem, deterministic=None, device=device), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("size", [1.0, 2.0, 4.0])  # scores up to 4, 16, 64
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_same_bits_alone_and_in_a_batch(dtype, size, device):
    """A row's result does not depend on the batch that it sits in, nor on the rows next to it."""
    query, key, value = (random_tensor(5, 3, n, 16, dtype=dtype, scale=size, device=device) for n in (70, 90, 90))
    together = flash_online.attention(query, key, value, return_lse=True)
    for b in range(5):
        alone = flash_online.attention(query[b : b + 1], key[b : b + 1], value[b : b + 1], return_lse=True)
        assert torch.equal(alone[0], together[0][b : b + 1]) and torch.equal(alone[1], together[1][b : b + 1])
    for rows in (slice(0, 1), slice(69, 70), slice(13, 57)):
        part = flash_online.attention(query[:, :, rows], key, value)
        assert torch.equal(part, together[0][:, :, rows])


def _forward_and_backward(problem, deterministic, *, device):
    inputs = {n: t.detach().requires_grad_() for n, t in problem.inputs(device).items()}
    tensors = dict(inputs)
    positional = [tensors.pop(n) for n in ("query", "key", "value")]
    out, lse = flash_online.attention(*positional, **tensors, **problem.options, deterministic=deterministic, return_lse=True)
    return [out, lse, *torch.autograd.grad(out.sum() + out.square().sum() + lse.sum(), list(inputs.values()))]


# --- Dropout ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dropout_p", [0.1, 0.5, 0.999, 1.0])
def test_dropout_drops_what_the_rule_says(dtype, dropout_p, device):
    """Against the reference with the same (seed, offset): the mask is Philox of the position and nothing else."""
    options = {"dropout_p": dropout_p}
    Attention(dtype=dtype, heads=(4, 2, 2), lengths=(33, 70), options=options).check(device)
    Attention(dtype=dtype, batch=(2, 2), lengths=(5, 6), options=options | {"causal": True}, mask="float", sinks=True).check(
        device
    )


def test_dropout_follows_the_default_generator(device):
    query, key, value = (torch.randn(2, 2, 30, 8, device=device) for _ in range(3))

    def run():
        return flash_online.attention(query, key, value, dropout_p=0.3)

    torch.manual_seed(1)
    first, second = run(), run()
    torch.manual_seed(1)
    again = run()
    assert torch.equal(first, again) and not torch.equal(first, second)
    before = rng_state(device)
    flash_online.attention(query, key, value)
    assert torch.equal(before, rng_state(device)), "a call without dropout must not draw"


def test_dropout_does_not_depend_on_the_tiles(device):
    """The weights dropped among the first 20 keys and 9 queries are the same whatever the lengths are."""
    lengths = ((200, 20), (9, 300), (130, 129))
    skip_without_room(device, torch.float32, *(keys for _, keys in lengths))  # a value's columns

    def dropped(queries, keys):
        torch.manual_seed(5)
        value = torch.eye(keys, device=device)[None, None].expand(1, 3, keys, keys)
        query, key = torch.zeros(1, 3, queries, 4, device=device), torch.zeros(1, 3, keys, 4, device=device)
        return flash_online.attention(query, key, value, dropout_p=0.4)[:, :, :9, :20] == 0

    expected = dropped(9, 20)
    assert 0.3 < expected.float().mean() < 0.5
    for queries, keys in lengths:
        assert torch.equal(dropped(queries, keys), expected)


def test_dropout_keeps_the_mean(device):
    query, key = torch.zeros(1, 1, 1000, 4, device=device), torch.zeros(1, 1, 50, 4, device=device)
    out = flash_online.attention(query, key, torch.ones(1, 1, 50, 1, device=device), dropout_p=0.25)
    # A row is a mean of 50 Bernoulli trials over 0.75: its standard deviation is sqrt(0.25 / 0.75 / 50) = 0.082.
    assert abs(out.mean().item() - 1) < 5 * 0.082 / math.sqrt(1000)
    assert abs(out.std().item() - 0.082) < 0.01


def test_dropout_of_keys_that_share_a_draw_is_independent(device):
    """Eight neighbouring keys are decided about by four words: no two of them are dropped together too often or too seldom."""
    for dropout_p in (0.1, 0.5):
        rng = torch.tensor([3, 4], device=device)
        kept = torch.ops.flash_online.attention_dropout_mask(rng, 0, 2, 4, 0, 1024, 512, dropout_p).reshape(-1, 8).double()
        mean = kept.mean(0)
        assert (mean - (1 - dropout_p)).abs().max() < 5 * math.sqrt(dropout_p * (1 - dropout_p) / len(kept))
        correlation = torch.corrcoef(kept.T) - torch.eye(8, device=device)
        assert correlation.abs().max() < 5 / math.sqrt(len(kept))


def test_dropout_differs_between_rows_heads_and_batches(device):
    with CaptureRng() as capture:
        flash_online.attention(*(torch.randn(1, 1, 2, 2, device=device) for _ in range(3)), dropout_p=0.5)
    assert capture.rng.dtype == torch.int64 and capture.rng.shape == (2,)
    value = torch.eye(64, device=device).expand(2, 2, 64, 64)
    kept = (
        flash_online.attention(
            torch.zeros(2, 2, 8, 4, device=device), torch.zeros(2, 2, 64, 4, device=device), value, dropout_p=0.5
        )
        != 0
    )
    rows = kept.reshape(-1, 64)
    assert len(torch.unique(rows, dim=0)) == len(rows)


# --- Merging ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("cuts", [(), (7,), (0, 3, 3, 20, 31), tuple(range(1, 31))], ids=str)
@pytest.mark.parametrize("stacked", [False, True])
def test_merge_of_disjoint_keys_is_the_whole(dtype, cuts, stacked, device):
    query, key, value = (torch.randn(2, 3, n, 8, device=device).to(dtype) for n in (5, 31, 31))
    bounds = [0, *cuts, 31]
    parts = [
        flash_online.attention(query, key[:, :, a:b], value[:, :, a:b], return_lse=True)
        for a, b in zip(bounds, bounds[1:], strict=False)
    ]
    outs, lses = (torch.stack(ts) if stacked else list(ts) for ts in zip(*parts, strict=True))
    out, lse = flash_online.merge_attention(outs, lses)
    assert out.dtype == dtype and lse.dtype == parts[0][1].dtype
    truth = reference.attention(query.double(), key.double(), value.double(), return_lse=True)
    plain = reference.merge_attention([o.clone() for o, _ in parts], [s.clone() for _, s in parts])
    assert_close_to_float64(out, plain[0], truth[0], name="out")
    assert_close_to_float64(lse, plain[1], truth[1], name="lse", magnitude=1.0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("layout", ["contiguous", "transposed", "sliced", "strided"])
def test_merge_gradients(dtype, stacked, layout, device):
    accumulator = torch.float64 if dtype == torch.float64 else torch.float32
    outs = [random_tensor(2, 3, 5, 8, dtype=dtype, layout=layout, requires_grad=True, device=device) for _ in range(3)]
    lses = [torch.randn(2, 3, 5, dtype=accumulator, device=device) for _ in range(3)]
    lses[1][0, 1] = -INF
    for lse in lses:
        lse.requires_grad_()
    grad_out, grad_lse = (
        torch.randn(2, 3, 5, 8, device=device).to(dtype),
        torch.randn(2, 3, 5, dtype=accumulator, device=device),
    )

    def run(function, convert):
        leaves = [convert(t).detach().requires_grad_() for t in (*outs, *lses)]
        first, second = leaves[:3], leaves[3:]
        results = function(*(torch.stack(ts) if stacked else ts for ts in (first, second)))
        return [*results, *torch.autograd.grad(results, leaves, [convert(grad_out), convert(grad_lse)])]

    ours = run(flash_online.merge_attention, lambda t: t)
    plain = run(reference.merge_attention, lambda t: t.clone())
    truth = run(reference.merge_attention, lambda t: t.double())
    for i, (a, b, c) in enumerate(zip(ours, plain, truth, strict=True)):
        rounding = dtype if i >= 5 else None  # the gradient of a lse is made of outs in their own dtype
        assert_close_to_float64(a, b, c, rounding, name=f"result {i}", magnitude=1.0)


def test_merge_of_nothing(device):
    outs = torch.zeros(2, 3, 4, requires_grad=True, device=device)
    lses = torch.full((2, 3), -INF, requires_grad=True, device=device)
    out, lse = flash_online.merge_attention(outs, lses)
    assert (out == 0).all() and (lse == -INF).all()
    for grad in torch.autograd.grad(out.sum() + torch.where(lse == -INF, 0, lse).sum(), (outs, lses)):
        assert (grad == 0).all()


def test_merge_with_an_empty_part_changes_nothing(device):
    out, lse = torch.randn(3, 4, device=device), torch.randn(3, device=device)
    merged = flash_online.merge_attention([out, torch.zeros(3, 4, device=device)], [lse, torch.full((3,), -INF, device=device)])
    assert torch.equal(merged[0], out) and torch.equal(merged[1], lse)
    single = flash_online.merge_attention([out], [lse])
    assert torch.equal(single[0], out) and torch.equal(single[1], lse)


def test_merge_of_far_apart_lses(device):
    out, lse = flash_online.merge_attention(
        torch.tensor([[[1.0]], [[2.0]], [[3.0]]], device=device), torch.tensor([[1e30], [-1e30], [0.0]], device=device)
    )
    assert out.item() == 1 and lse.item() == torch.tensor(1e30).item()


# --- Larger than any tile, once ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", ["plain", "causal", "all options"])
def test_a_long_sequence(options, device):
    Attention.of(OPTIONS[options], batch=(1,), heads=(2, 1, 1), lengths=(700, 1100), head_dims=(64, 64)).check(device)


def test_mask_expanded_by_hand(device):
    """A mask given with strides of 0 has a gradient of its own shape, and the same result as one that broadcasts."""
    query, key, value = (torch.randn(2, 3, 6, 8, device=device) for _ in range(3))
    small = torch.randn(6, 6, requires_grad=True, device=device)
    out = flash_online.attention(query, key, value, mask=small.expand(2, 3, 6, 6))
    (ours,) = torch.autograd.grad(out.square().sum(), small)
    out = flash_online.attention(query, key, value, mask=small)
    (theirs,) = torch.autograd.grad(out.square().sum(), small)
    torch.testing.assert_close(ours, theirs)
    leaf = lay_out(torch.randn(6, 6, device=device), "sliced").expand(2, 3, 6, 6).requires_grad_()
    (grad,) = torch.autograd.grad(flash_online.attention(query, key, value, mask=leaf).square().sum(), leaf)
    assert grad.shape == leaf.shape


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mask_shape", [(2, 1, 2, 1, 0), (2, 1, 1, 1, 0), (2, 1, 2, 7, 0)], ids=str)
def test_a_mask_without_keys_over_batches_that_do_not_fuse(mask_shape, dtype, device):
    """The outer batches are separate problems, which share the scratch of the first one."""
    query, key = torch.randn(2, 3, 2, 7, 8, dtype=dtype, device=device), torch.randn(2, 3, 2, 0, 8, dtype=dtype, device=device)
    leaves = [tensor.requires_grad_() for tensor in (query, key, key.clone())]
    mask = torch.zeros(mask_shape, dtype=dtype, device=device)
    for _ in range(20):
        out, lse = flash_online.attention(*leaves, mask=mask, return_lse=True)
        out.sum().backward()
        assert not out.any() and (lse == -INF).all() and not query.grad.any()


def test_sinks_and_slopes_of_a_query_head_that_is_broadcast(device):
    query, key = torch.randn(1, 1, 5, 8, device=device), torch.randn(1, 3, 7, 8, device=device)
    for options in ({"sinks": torch.randn(3)}, {"alibi_slopes": torch.rand(3)}):
        ((name, whole),) = options.items()
        for numbers in (whole.to(device), whole[:1].to(device)):
            found = flash_online.attention(query, key, key, **{name: numbers})
            expected = flash_online.attention(query.expand(1, 3, 5, 8), key, key, **{name: numbers.expand(3)})
            assert torch.equal(found, expected)
        with pytest.raises(flash_online.InvalidArgument, match=f"{name}: expected a floating \\[3\\]"):
            flash_online.attention(query, key, key, **{name: torch.rand(2, device=device)})
