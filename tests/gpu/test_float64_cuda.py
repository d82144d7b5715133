"""float64 on CUDA: random attention against the reference, at lengths and head dims around the kernels' tiles, and rows of
every kind. Derivatives by finite differences are in tests/torch_api/test_autograd.py, for both devices."""

from __future__ import annotations

import random

import pytest
import torch
from cases import HEADS, OPTIONS
from oracle import Attention, Packed, compare_with_reference

import flash_online
from flash_online.testing import LAYOUTS

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("ours_alone")]
DOUBLE = torch.float64
# Blocks of 16 and 32 rows, tiles of 16 to 128; chunks of 32 columns, parts of 64, panels of 128.
LENGTHS = [1, 2, 15, 16, 17, 31, 32, 33, 47, 64, 65, 100, 127, 128, 129, 200, 257]
WIDTHS = [0, 1, 3, 8, 31, 32, 33, 63, 64, 65, 96, 100, 127, 128, 129, 160, 200, 256, 257, 300, 512]
# Head dims of queries and values at the edges of the backward kernels: both at most 64, at most 128, over that.
HEAD_DIMS = [(64, 64), (8, 63), (33, 1), (128, 128), (65, 32), (40, 100), (97, 96), (129, 64), (200, 256), (512, 128)]


def draw(number: int) -> tuple[random.Random, dict]:
    """A stream of choices, and what dense and packed problems have in common."""
    choose = random.Random(number)
    names = list(OPTIONS)
    chosen = OPTIONS[names[number % len(names)]] | choose.choice([{}, {}, {"dropout_p": 0.3}, {"sinks": True}])
    layouts = tuple(choose.choice(LAYOUTS) for _ in range(4))
    widths = choose.choice(WIDTHS), choose.choice(WIDTHS[1:])
    return choose, dict(
        options=chosen, dtype=DOUBLE, heads=choose.choice(HEADS), head_dims=widths, layouts=layouts, seed=number
    )


@pytest.mark.parametrize("number", range(120))
def test_random_attention(number):
    choose, common = draw(number)
    lengths = choose.choice([*LENGTHS, 0]), choose.choice([*LENGTHS, 0])
    shape = tuple(choose.choice([0, 1, 1]) for _ in range(4))
    mask_dtype = choose.choice([None, torch.float32])
    Attention.of(batch=choose.choice([(1,), (2,)]), lengths=lengths, mask_shape=shape, mask_dtype=mask_dtype, **common).check(
        "cuda"
    )


@pytest.mark.parametrize("number", range(40))
def test_random_packed_attention(number):
    choose, common = draw(number)
    common["options"] = {k: v for k, v in common["options"].items() if k != "mask"}
    lengths = tuple((choose.choice([*LENGTHS, 0]), choose.choice([*LENGTHS, 0])) for _ in range(choose.choice([1, 2, 4])))
    Packed.of(lengths=lengths, spare=(choose.choice([0, 70]), choose.choice([0, 3])), **common).check("cuda")


@pytest.mark.parametrize("head_dims", HEAD_DIMS, ids=str)
@pytest.mark.parametrize("name", OPTIONS)
def test_attention_options_at_the_edges_of_the_backward_kernels(name, head_dims):
    number = list(OPTIONS).index(name) * len(HEAD_DIMS) + HEAD_DIMS.index(head_dims)
    choose = random.Random(number)
    options = OPTIONS[name] | choose.choice([{}, {"dropout_p": 0.3}])
    common = dict(dtype=DOUBLE, heads=choose.choice(HEADS), head_dims=head_dims, seed=number)
    lengths = choose.choice([(197, 130), (130, 197), (33, 300), (300, 5)])
    Attention.of(options, batch=(2,), lengths=lengths, **common).check("cuda")
    if "mask" not in options:
        Packed.of(options, lengths=(lengths, (0, 40), (40, 0), (129, 65)), spare=(70, 3), **common).check("cuda")


@pytest.mark.parametrize("width", [64, 128, 160])
def test_attention_weights_of_any_size(width):
    """The gradient of a value is its weight: down to e to the power of -707, and 0 below that of -708."""
    bias = torch.cat((-torch.arange(0, 708, 0.9), torch.tensor([-720.0, -800, -1e6, -1e300, -torch.inf]))).to("cuda", DOUBLE)
    q, k, v = (torch.zeros(1, 1, n, width, dtype=DOUBLE, device="cuda") for n in (1, len(bias), len(bias)))
    flash_online.attention(q, k, v.requires_grad_(), mask=bias).sum().backward()
    expected = (bias - bias.logsumexp(0)).exp()
    torch.testing.assert_close(v.grad[0, 0, :, -1], expected, rtol=5e-13, atol=1e-307)


@pytest.mark.parametrize("width", [64, 128, 160])
def test_nan_and_infinity_reach_the_gradients_of_attention(width):
    q, k, v = (torch.randn(1, 1, 70, width, dtype=DOUBLE, device="cuda", requires_grad=True) for _ in range(3))
    for bad in (torch.nan, torch.inf):
        bias = torch.zeros(70, 70, dtype=DOUBLE, device="cuda")
        bias[40, 50] = bad
        grads = torch.autograd.grad(flash_online.attention(q, k, v, mask=bias).sum(), (q, k, v))
        assert not grads[0][0, 0, 40].isfinite().any() and grads[0][0, 0, :40].isfinite().all()
        assert not grads[1][0, 0, 50].isfinite().any() and not grads[2][0, 0, 50].isfinite().any()


@pytest.mark.parametrize("mask", [torch.float32, DOUBLE], ids=str)
def test_attention_hidden_by_the_lowest_number(mask):
    """A row that sees nothing but keys hidden by the mask's lowest number attends to all of them alike."""
    q, k, v = (torch.randn(1, 2, n, 40, dtype=DOUBLE, device="cuda") for n in (33, 70, 70))
    bias = torch.full((33, 70), torch.finfo(mask).min, dtype=mask, device="cuda")
    out = flash_online.attention(q, k, v, mask=bias)
    torch.testing.assert_close(out, v.mean(2, keepdim=True).expand_as(out), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("width", [40, 64, 72, 128, 160])
def test_attention_gradients_repeat_bit_for_bit(width):
    q, k, v = (torch.randn(2, h, 300, width, dtype=DOUBLE, device="cuda", requires_grad=True) for h in (4, 2, 2))
    bias = torch.randn(300, 300, dtype=DOUBLE, device="cuda", requires_grad=True)
    runs = [
        torch.autograd.grad(flash_online.attention(q, k, v, mask=bias, causal=True).square().sum(), (q, k, v, bias))
        for _ in range(5)
    ]
    assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(runs[0], run, strict=True))


def test_attention_memory_is_linear():
    q, k, v = (torch.randn(1, 2, 8192, 64, dtype=DOUBLE, device="cuda", requires_grad=True) for _ in range(3))
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    flash_online.attention(q, k, v, causal=True).sum().backward()
    assert torch.cuda.max_memory_allocated() - before < 12 * q.nbytes  # a table of scores would be 128 times q


ROW_SHAPES = [((5, 1), 1), ((40, 7), 1), ((9, 33), 1), ((3, 511), 1), ((3, 512), 1), ((2, 4099), 1), ((3, 600, 5), 1)]
ROW_SHAPES += [((70, 40), 0), ((2, 3, 700), 1), ((4, 1000, 33), 1), ((2, 70_001), 1)]


@pytest.mark.parametrize("shape, dim", ROW_SHAPES, ids=str)
def test_softmax_logsumexp_and_topk(shape, dim):
    x = torch.randn(shape, dtype=DOUBLE, device="cuda").mul(5).requires_grad_()
    for name in ("softmax", "log_softmax", "logsumexp"):
        compare_with_reference(name, x, dim)
    for k in {1, min(5, shape[dim]), min(1500, shape[dim])}:
        for renormalize in (False, True):
            compare_with_reference("topk_softmax", x, k, dim, renormalize=renormalize)


@pytest.mark.parametrize("classes", [1, 3, 33, 512, 5000])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_cross_entropy(classes, smoothing):
    for rest in ((), (6,)):
        x = torch.randn(70, classes, *rest, dtype=DOUBLE, device="cuda", requires_grad=True)
        target = torch.randint(classes, (70, *rest), device="cuda")
        target[3] = -100
        weight = torch.rand(classes, dtype=DOUBLE, device="cuda") + 0.1
        probabilities = torch.rand_like(x).softmax(1).detach().requires_grad_()
        for t in (target, probabilities):
            for options in ({}, {"weight": weight, "reduction": "sum"}, {"weight": weight, "reduction": "none", "z_loss": 0.1}):
                compare_with_reference("cross_entropy", x, t, label_smoothing=smoothing, **options)
