"""Scores of every level in the kernels of each family: from 1e-3 to what the dtype's products reach, with keys that tie.

FLASH_ONLINE_KERNEL=sm80 in the environment runs these on the general kernels.
"""

from __future__ import annotations

import math

import pytest
import torch
from devices import skip_without_room

import flash_online

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("ours_alone")]

LEVELS = [1e-3, 1.0, 3e2, 7e4, 3e5, 5e6, 3e7, 1e8, 3e9, 7e11, 1e16, 3e30]
# Queries, keys, width: one tile, the entry for little work, the short backward pass, more than one tile and off it.
SIZES = [(65, 40, 64), (200, 333, 64), (700, 450, 64), (300, 257, 128), (129, 700, 256), (150, 300, 96), (90, 200, 192)]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def visible(queries: int, keys: int, causal: bool, window: tuple | None) -> torch.Tensor:
    at = torch.arange(queries, device="cuda")[:, None] - torch.arange(keys, device="cuda")
    seen = at >= 0 if causal else torch.ones_like(at, dtype=torch.bool)
    return seen if window is None else seen & (at <= window[0]) & (at >= -window[1])


class Problem:
    """Every key has a twin of equal score among the next ones. Scores have the standard deviation `level`, from the inputs as
    far as the dtype holds them and otherwise from the scale, which is no power of two."""

    def __init__(
        self, dtype, sizes, level, *, heads=(2, 2), batch=2, mask=None, offset=0.0, causal=False, window=None, **options
    ):
        queries, keys, width = sizes
        g = torch.Generator("cuda").manual_seed(round(math.log(level) * 8) % 999 + queries)

        def normal(*shape, size=1.0):
            return (torch.randn(shape, generator=g, device="cuda") * size).to(dtype)

        side = min(math.sqrt(level), 60.0 if dtype == torch.float16 else 1e15)
        self.scale = 1.1 * level / side**2 / math.sqrt(width)
        self.query = normal(batch, heads[0], queries, width, size=side)
        half = normal(batch, heads[1], (keys + 1) // 2, width, size=side)
        self.key = half.repeat_interleave(2, 2)[:, :, :keys].contiguous()
        self.value, self.grad = normal(batch, heads[1], keys, width), normal(batch, heads[0], queries, width)
        self.seen = visible(queries, keys, causal, window)
        self.options = dict(options)
        if causal:
            self.options["causal"] = True
        if window:
            self.options["window"] = window
        self.mask = None
        if mask == "bool":
            half_mask = torch.rand(batch, 1, queries, (keys + 1) // 2, generator=g, device="cuda") < 0.7
            self.mask = half_mask.repeat_interleave(2, 3)[..., :keys].contiguous()
        elif mask:  # the dtype and the shape of a float mask, equal for twins
            mask_dtype, shape = mask
            full = (batch, heads[0], queries, (keys + 1) // 2)
            shape = [n if kept else 1 for n, kept in zip(full, shape, strict=True)]
            half_mask = (torch.randn(shape, generator=g, device="cuda") + offset).to(mask_dtype)
            self.mask = half_mask.repeat_interleave(2, 3)[..., :keys].contiguous()
        self.dtype, self.level = dtype, level + abs(offset)

    def truth(self):
        leaves = [t.double().requires_grad_() for t in (self.query, self.key, self.value)]
        if self.mask is not None and self.mask.dtype != torch.bool:
            leaves.append(self.mask.double().requires_grad_())
        query, key, value = leaves[:3]
        group = query.shape[1] // key.shape[1]
        scores = query @ key.repeat_interleave(group, 1).mT * self.scale
        if cap := self.options.get("softcap"):
            scores = cap * torch.tanh(scores / cap)
        if (slopes := self.options.get("alibi_slopes")) is not None:
            at = torch.arange(scores.shape[-2], device="cuda")[:, None] - torch.arange(scores.shape[-1], device="cuda")
            scores = scores - slopes.double()[:, None, None] * at.abs()
        if len(leaves) > 3:
            scores = scores + leaves[3]
        elif self.mask is not None:
            scores = scores.masked_fill(~self.mask, -math.inf)
        scores = scores.masked_fill(~self.seen, -math.inf)
        lse = torch.logsumexp(scores, -1)
        weights = torch.softmax(scores, -1).nan_to_num(0.0)
        out = weights @ value.repeat_interleave(group, 1)
        return out.detach(), lse.detach(), torch.autograd.grad(out, leaves, self.grad.double())

    def ours(self, **more):
        leaves = [t.clone().requires_grad_() for t in (self.query, self.key, self.value)]
        options = self.options | more
        if self.mask is not None:
            options["mask"] = self.mask
            if self.mask.dtype != torch.bool:
                leaves.append(self.mask.clone().requires_grad_())
                options["mask"] = leaves[3]
        out, lse = flash_online.attention(*leaves[:3], scale=self.scale, return_lse=True, **options)
        return out.detach(), lse.detach(), torch.autograd.grad(out, leaves, self.grad)

    def compare(self, ours, truth, digits: float = 0.0):
        """`digits`: the relative rounding of products, where it is not that of float32."""
        eps = torch.finfo(self.dtype).eps
        # What rounding scores to float makes of the weights of keys that compete: from some level on none do but twins.
        competing = 0.02 * max(self.query.shape[-1] / 64, 1) if self.level < 1e6 else 0
        if cap := self.options.get("softcap"):  # keys whose scores are not near the cap
            competing = max(competing, min(self.level * 8e-7 / cap, 0.5))
        blur = min(self.level * 2e-6, competing) + min((self.level + 1) * digits, 2.0)
        blur += 2 * self.options.get("softcap", 0) * torch.finfo(torch.float32).eps  # of float32's tanh
        weight_gradient = self.grad.double().square().mean().sqrt() * self.value.double().square().mean().sqrt()
        dp = weight_gradient * math.sqrt(self.value.shape[-1]) * self.scale
        key, query = (t.double().square().mean().sqrt() for t in (self.key, self.query))
        sizes = [1.0, dp * key * 2, dp * query * 4, 4.0, dp / self.scale * 4]
        results = [ours[0], *ours[2]]
        names = ("out", "query", "key", "value", "mask")
        for name, got, expected, size in zip(names, results, [truth[0], *truth[2]], sizes, strict=False):
            got = got.double()
            bound = (4 * eps + blur) * max(float(expected.abs().max()), float(size))
            # A gradient times a large scale may overflow float16, and not by its truth alone.
            finite = expected.abs() + bound < float(torch.finfo(self.dtype).max)
            error = torch.where(finite, (got - expected).abs(), 0).max()
            assert not got.isnan().any() and error <= bound, (
                f"{name}: off by {error:.3g}, allowed {bound:.3g}, level {self.level:g}"
            )
        rows = truth[1] > -math.inf
        # Products are rounded by their terms, of which few are left of a small score.
        error = (ours[1].double() - truth[1])[rows].abs() / truth[1][rows].abs().clamp(min=max(1.0, 2 * self.level))
        assert error.max() <= 2e-6 + digits, f"lse: off by {error.max():.3g} of it, level {self.level:g}"

    def check(self, digits: float = 0.0, **more):
        truth = self.truth()
        self.compare(self.ours(**more), truth, digits)


def levels(dtype):
    return [level for level in LEVELS if dtype != torch.float16 or level <= 1e9]


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (40, 25)}], ids=["full", "causal", "window"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_plain(dtype, sizes, options):
    skip_without_room("cuda", dtype, sizes[-1])
    for level in levels(dtype):
        Problem(dtype, sizes, level, **options).check()


@pytest.mark.parametrize("sizes", SIZES[:4], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_groups_and_deterministic(dtype, sizes):
    for level in levels(dtype):
        # dK of two heads, each in float16, may be infinities of either sign.
        if dtype == torch.float16 and level > 1e6:
            continue
        Problem(dtype, sizes, level, heads=(4, 2), causal=True).check()
        Problem(dtype, sizes, level, heads=(4, 2)).check(deterministic=True)


@pytest.mark.parametrize("sizes", [(200, 264, 64), (300, 392, 128), (150, 264, 192), (150, 264, 256)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_options(dtype, sizes):
    """Bool masks, ALiBi, softcap; by the deterministic pass too, which other kernels make."""
    skip_without_room("cuda", dtype, sizes[-1])
    slopes = torch.tensor([0.5, 0.01], device="cuda")
    for level in levels(dtype):
        Problem(dtype, sizes, level, mask="bool").check()
        Problem(dtype, sizes, level, mask="bool", causal=True).check(deterministic=True)
        Problem(dtype, sizes, level, softcap=20.0).check()
        # Distances part the twins: by less than a float's rounding from some level on, than a double's from a later one.
        if not 1e4 < level < 1e18:
            Problem(dtype, sizes, level, alibi_slopes=slopes, causal=True).check()


@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (0, 1, 1, 1), (1, 0, 0, 1), (0, 0, 1, 1)], ids=str)
@pytest.mark.parametrize("sizes", [(200, 264, 64), (300, 392, 128)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_float_masks(dtype, sizes, shape):
    """Of the dtype and of float32, whose kernels differ, and their gradients."""
    for mask_dtype in {dtype, torch.float32}:
        for level in levels(dtype):
            Problem(dtype, sizes, level, mask=(mask_dtype, shape)).check()
        for offset in (-1e4, -90.0, 90.0, 1e4):
            Problem(dtype, sizes, 1.0, mask=(mask_dtype, shape), offset=offset).check()
        Problem(dtype, sizes, 1e8, mask=(mask_dtype, shape)).check(deterministic=True)


@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("causal", [False, True])
def test_tf32(width, causal):
    """Products have 16 digits: keys compete as long as their scores differ by less than that."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        for level in LEVELS:
            Problem(torch.float32, (200, 333, width), level, causal=causal).check(digits=2e-5)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_packed(dtype, width):
    """Sequences of a varlen call, each as the dense call of its own rows."""
    lengths = [(70, 50), (300, 301), (1, 129), (130, 64)]
    for level in levels(dtype):
        parts = [Problem(dtype, (*n, width), level, batch=1, causal=True) for n in lengths]
        scale = parts[0].scale

        packed = {
            name: torch.cat([getattr(p, name)[0].transpose(0, 1) for p in parts]) for name in ("query", "key", "value", "grad")
        }
        leaves = [packed[name].clone().requires_grad_() for name in ("query", "key", "value")]
        starts = [torch.tensor([0, *(n[i] for n in lengths)]).cumsum(0).to("cuda", torch.int32) for i in range(2)]
        most = [max(n[i] for n in lengths) for i in range(2)]
        options = {"causal": True, "alignment": "upper_left", "scale": scale, "return_lse": True}
        out, lse = flash_online.varlen_attention(*leaves, *starts, *most, **options)
        grads = torch.autograd.grad(out, leaves, packed["grad"])
        at = [0, 0]
        for part, count in zip(parts, lengths, strict=True):
            own = [slice(a, a + n) for a, n in zip(at, count, strict=True)]
            cut = [t.detach()[own[i]].transpose(0, 1)[None] for t, i in zip((out, *grads), (0, 0, 1, 1), strict=True)]
            part.compare((cut[0], lse.detach()[None, :, own[0]], cut[1:]), part.truth())
            at = [a + n for a, n in zip(at, count, strict=True)]


@pytest.mark.parametrize("splits", [None, 3])
@pytest.mark.parametrize("queries", [1, 5, 40, 200])
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_cached(dtype, width, queries, splits):
    for level in levels(dtype):
        problem = Problem(dtype, (queries, 900, width), level, heads=(8, 2))
        out, lse, _ = problem.truth()
        options = {"causal": False, "scale": problem.scale, "num_splits": splits, "return_lse": True}
        with torch.no_grad():
            ours = flash_online.kvcache_attention(problem.query, problem.key, problem.value, 900, **options)
        problem.compare((*ours, ()), (out, lse, ()))


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("width", [40, 64, 128, 256])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_only_key_has_weight_one(dtype, width, sign):
    """By the default scale, up to the largest scores."""
    skip_without_room("cuda", dtype, width)
    for size in {torch.float16: [3e4, 6e4], torch.bfloat16: [1e9, 1e18], torch.float32: [1e9, 1e18]}[dtype]:
        query = torch.full((1, 2, 70, width), size, dtype=dtype, device="cuda").requires_grad_()
        key = (sign * query[:, :, :1].detach()).clone().requires_grad_()
        value = torch.randn(1, 2, 1, width, device="cuda").to(dtype).requires_grad_()
        out, lse = flash_online.attention(query, key, value, return_lse=True)
        assert torch.equal(out, value.expand_as(out))
        torch.testing.assert_close(
            lse.double(), (query.double() @ key.double().mT)[..., 0] / math.sqrt(width), rtol=2e-6, atol=0
        )
        grad_out = torch.randn(out.shape, device="cuda").to(dtype)
        grads = torch.autograd.grad(out, (query, key, value), grad_out)
        expected = grad_out.double().sum(2, keepdim=True)
        eps = torch.finfo(dtype).eps
        torch.testing.assert_close(grads[2].double(), expected, rtol=2 * eps, atol=8 * eps)
        # The gradient of a weight less itself: its rounding, in units of queries and keys.
        for grad in grads[:2]:
            assert grad.double().abs().max() <= size * 2e-4 * width


@pytest.mark.parametrize("sinks", [-5.0, 3.0, 1e6])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sinks(dtype, sinks):
    """A sink with large scores: they leave it nothing, or it leaves them nothing."""
    for level in levels(dtype):
        problem = Problem(dtype, (200, 333, 64), level)
        leaf = torch.full((2,), sinks, device="cuda").requires_grad_()
        out, lse = flash_online.attention(
            problem.query, problem.key, problem.value, scale=problem.scale, sinks=leaf, return_lse=True
        )
        grad = torch.autograd.grad(out, leaf, problem.grad)[0]
        scores = problem.query.double() @ problem.key.double().mT * problem.scale
        wide = torch.full((2,), sinks, device="cuda", dtype=torch.float64).requires_grad_()
        joined = torch.cat([scores, wide[:, None, None].expand(2, 2, 200, 1)], -1)
        weights = torch.softmax(joined, -1)[..., :-1]
        truth = weights @ problem.value.double()
        expected = torch.autograd.grad(truth, wide, problem.grad.double())[0]
        blur = 4 * torch.finfo(dtype).eps + min(level * 2e-6, 0.02 if level < 1e6 else 0)
        assert (out.double() - truth).abs().max() <= blur * truth.abs().max()
        assert (lse.double() - torch.logsumexp(joined, -1)).abs().max() <= 2e-6 * max(level * 10, sinks, 10)
        assert (grad.double() - expected).abs().max() <= 100 * blur * max(1.0, float(expected.abs().max()))


@pytest.mark.parametrize("sizes", [(200, 333, 64), (300, 257, 128)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_of_padding(dtype, sizes):
    """Queries that see nothing but a mask of -1e9 give all keys equal weights; without a gradient they have no part in any."""
    problem = Problem(dtype, sizes, 1.0, mask=(torch.float32, (1, 0, 1, 1)))
    problem.mask[:, :, :70] = -1e9
    problem.mask[:, :, 100] = -1e9
    problem.grad[:, :, :40] = 0
    out, _, grads = problem.truth()
    ours, _, own = problem.ours()
    masked = [*range(70), 100]
    rounding = 0.1  # of a score of 1e9 nothing is left but the mask: the scores' own differences are gone
    assert (ours[:, :, masked].double() - problem.value.double().mean(2, keepdim=True)).abs().max() <= rounding
    kept = torch.ones(sizes[0], dtype=torch.bool, device="cuda")
    kept[masked] = False
    eps = 8 * torch.finfo(dtype).eps
    assert (ours.double() - out)[:, :, kept].abs().max() <= eps * out.abs().max()
    assert not own[0][:, :, :40].any() and not own[3][:, :, :40].any()
    for got, expected in zip(own, grads, strict=True):
        assert (got.double() - expected).abs().max() <= eps * expected.abs().max(), got.shape


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_large_rows_repeat_bit_for_bit(dtype, deterministic):
    """Each sum of the pass for large rows has one order, whatever the order of its CTAs."""
    problem = Problem(dtype, (300, 257, 64), 1e7)
    first = problem.ours(deterministic=deterministic)[2]
    assert all(
        torch.equal(a, b) for _ in range(4) for a, b in zip(first, problem.ours(deterministic=deterministic)[2], strict=True)
    )


def test_large_rows_leave_other_sequences_as_they_are():
    """A sequence without large rows keeps its bits."""
    problem = Problem(torch.bfloat16, (300, 257, 128), 1.0, batch=3)
    before = problem.ours(deterministic=True)[2]
    problem.query[1] *= 1e6
    after = problem.ours(deterministic=True)[2]
    for a, b in zip(before, after, strict=True):
        assert torch.equal(a[[0, 2]], b[[0, 2]]) and not torch.equal(a[1], b[1])
