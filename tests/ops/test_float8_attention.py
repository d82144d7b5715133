"""float8_attention: against its definition step by step, which rounds where it rounds (float8_cases.py), and against float64 on
the numbers that float8 leaves of its inputs."""

from __future__ import annotations

import math

import pytest
import torch
from float8_cases import E4M3, Float8, check_results, quantised, skip_without_kernel, to_e4m3
from instruction_sets import run_tests, skip_unless_lesser

import flash_online
from flash_online import float8_attention, reference
from flash_online.testing import LAYOUTS

INF, NAN = math.inf, math.nan
INPUTS = [torch.float16, torch.bfloat16, E4M3]
OPTIONS = {
    "plain": {},
    "causal": {"causal": True},
    "causal, lower right": {"causal": True, "alignment": "lower_right"},
    "window": {"window": (30, 5)},
    "window left": {"window": (20, None)},
    "window right, lower right": {"window": (None, 5), "alignment": "lower_right"},
    "causal window, lower right": {"causal": True, "window": (140, None), "alignment": "lower_right"},
    "window of one key": {"window": (0, 0)},
    "softcap": {"softcap": 2.0, "causal": True},
    "scale": {"scale": 0.3},
    "negative scale": {"scale": -0.5},
    "scale of 0": {"scale": 0.0},
}
LENGTHS = [(13, 17), (70, 150), (129, 128), (64, 257), (1, 400), (300, 40)]


@pytest.fixture
def device8(device):
    """The device of a test, where float8_attention has a kernel."""
    skip_without_kernel(device)
    return device


@pytest.mark.parametrize("dtype", INPUTS, ids=str)
@pytest.mark.parametrize("name", OPTIONS)
def test_with_every_option(name, dtype, device8):
    for seed, lengths in enumerate(LENGTHS):
        sinks, mean = seed % 2 == 1, 3.0 * (seed % 3)
        Float8(dtype, lengths=lengths, options=OPTIONS[name], sinks=sinks, mean=mean, seed=seed).check(device8)


@pytest.mark.parametrize("dtype", INPUTS, ids=str)
@pytest.mark.parametrize("spans", [(1, 0), (2, 0), (0, 1), (0, 2), (1, 1), (2, 2)], ids=str)
def test_spans(spans, dtype, device8):
    for seed, lengths in enumerate([(13, 17), (70, 150), (129, 257)]):
        for options in ({}, {"causal": True}, {"window": (100, 9), "alignment": "lower_right"}):
            problem = Float8(dtype, lengths=lengths, options=options, spans=spans, head_spans=seed % 2 == 0, seed=seed)
            problem.check(device8)


@pytest.mark.parametrize("dtype", INPUTS, ids=str)
@pytest.mark.parametrize(
    "head_dims",
    [(1, 1), (3, 5), (8, 8), (16, 33), (40, 40), (64, 64), (72, 72), (80, 96), (96, 96), (128, 128), (128, 64), (192, 128)]
    + [(255, 17), (256, 256)],
    ids=str,
)
def test_head_dims(head_dims, dtype, device8):
    for seed, smooth_keys in enumerate((True, False)):
        Float8(dtype, lengths=(70, 200), head_dims=head_dims, smooth_keys=smooth_keys, mean=2.0, seed=seed).check(device8)


@pytest.mark.parametrize("heads", [(1, 1), (3, 3), (6, 2), (4, 1), (8, 2)], ids=str)
@pytest.mark.parametrize("batch", [(), (1,), (2, 3)], ids=str)
def test_heads_and_batches(heads, batch, device8):
    for dtype in INPUTS:
        Float8(dtype, batch=batch, heads=heads, sinks=True, spans=(1, 1), head_spans=True).check(device8)


@pytest.mark.parametrize("out_dtype", [torch.float16, torch.bfloat16, None], ids=str)
def test_dtypes_of_the_result(out_dtype, device8):
    for dtype in INPUTS:
        Float8(dtype, out_dtype=out_dtype, scales=False).check(device8)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout, device8):
    for dtype in INPUTS:
        Float8(dtype, layouts=(layout,) * 3).check(device8)
        Float8(dtype, layouts=("contiguous", layout, "transposed"), head_dims=(40, 24)).check(device8)


@pytest.mark.parametrize("dtype", INPUTS, ids=str)
@pytest.mark.parametrize("lengths, batch", [((128, 128), (2,)), ((200, 1000), (2,)), ((1024, 1024), (1,))], ids=str)
def test_against_float64_on_the_quantised_inputs(lengths, batch, dtype, device8):
    for head_dim in (64, 128):
        for options in ({}, {"causal": True}, {"softcap": 3.0}):
            given = Float8(dtype, batch, lengths=lengths, head_dims=(head_dim, head_dim), options=options).arguments()
            out, lse = float8_attention(**on(device8, given), return_lse=True)
            truth, wide_lse = reference.float8_attention(**given | {"out_dtype": torch.float64}, return_lse=True)
            error = (out.double().cpu() - truth).square().mean().sqrt() / truth.square().mean().sqrt()
            assert error <= 0.04, (options, error)
            assert (lse.cpu() - wide_lse).abs().max() <= (2e-5 if device8 == "cpu" else 2e-2)


def on(device: str, arguments: dict) -> dict:
    return {name: t.to(device) if isinstance(t, torch.Tensor) else t for name, t in arguments.items()}


# --- Quantisation, to the last bit: a single key has the weight 1, which float8 holds ---------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_every_value_rounds_to_the_nearest(dtype, device8):
    """All numbers up to 448, with a scale of 1: rows of 255 and their largest."""
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    every = every[every.isfinite() & (every.float().abs() <= 448)]
    every = torch.cat([every, every.new_zeros(-len(every) % 63)]).view(-1, 63)
    value = torch.cat([every, torch.full_like(every[:, :1], 448)], 1)[:, None, None, :].to(device8)
    query = torch.ones(len(value), 1, 1, 64, dtype=dtype, device=device8)
    out = float8_attention(query, query, value)
    assert torch.equal(out.float(), to_e4m3(value.float()).float())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_values_saturate_and_nan_stays(dtype, device8):
    value = torch.randn(8, 1, 1, 64, dtype=dtype) * torch.tensor([1, 2, 3, 0.1, 7, 100, 1e-3, 0]).to(dtype).view(-1, 1, 1, 1)
    value[:, ..., 5], value[:, ..., 6] = INF, -INF
    value[3:5, ..., 9] = NAN
    query = torch.ones(8, 1, 1, 64, dtype=dtype)
    out = float8_attention(query.to(device8), query.to(device8), value.to(device8)).cpu()
    multiple, scale = quantised(value.float(), 2)
    expected = (multiple.float() * scale[..., None, None]).to(dtype)
    assert torch.equal(out.isnan(), value.isnan())
    assert torch.equal(out.nan_to_num(0), expected.nan_to_num(0))
    finite = torch.where(value.isfinite(), value, 0).abs().amax(-1)
    assert torch.equal(out[..., 5], finite) and torch.equal(out[..., 6], -finite)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_scores_of_quantised_queries_and_keys(dtype, device8):
    """With a single key lse is its score. A column of one element has no sum, so that only the scale of the product rounds."""
    query, key = torch.randn(50, 4, 9, 1, dtype=dtype), torch.randn(50, 2, 1, 1, dtype=dtype)
    query[0, 0, 0], query[1, 0, 1], query[2] = INF, -INF, 0
    _, lse = float8_attention(*(t.to(device8) for t in (query, key, key)), smooth_keys=False, scale=1.0, return_lse=True)
    (q, q_scale), (k, k_scale) = quantised(query.float().unflatten(1, (2, 2)), 3), quantised(key.float(), 2)
    scores = q.float()[..., 0] * k.float()[:, :, None, :, 0] * (q_scale * k_scale)[..., None, None]
    # On CUDA lse is the sum of a maximum and of a logarithm to the base 2.
    torch.testing.assert_close(lse.cpu(), scores.flatten(1, 2), rtol=1e-6, atol=2e-6 if device8 == "cuda" else 0)


def test_a_single_smoothed_key_is_not_rounded(device8):
    """Less its mean nothing is left of it: the score is the product of the 16-bit numbers."""
    query, key = torch.randn(2, 4, 9, 64, dtype=torch.bfloat16), torch.randn(2, 2, 1, 64, dtype=torch.bfloat16)
    _, lse = float8_attention(*(t.to(device8) for t in (query, key, key)), return_lse=True)
    scores = (query.double() @ key.double().repeat_interleave(2, 1).mT).squeeze(-1) / 8
    torch.testing.assert_close(lse.double().cpu(), scores, rtol=1e-5, atol=1e-5)


def test_smoothing_helps_where_keys_have_a_common_part(device8):
    errors = []
    for smooth_keys in (True, False):
        given = Float8(torch.bfloat16, lengths=(128, 256), mean=20.0, smooth_keys=smooth_keys).arguments()
        out = float8_attention(**on(device8, given)).double().cpu()
        truth = reference.attention(*(given[n].double() for n in ("query", "key", "value")))
        errors.append((out - truth).square().mean().sqrt() / truth.square().mean().sqrt())
    assert errors[0] < 0.1 and errors[0] < 0.5 * errors[1], errors


def test_extreme_scales_of_e4m3(device8):
    """Scales of 0, negative ones, and those with which scores or results leave the range of 16 bits."""
    for factors in ((0, 1, 1), (1, 0, 1), (1, 1, 0), (-1, 1, 1), (1, -1, 1), (1, 1, -1), (1e3, 1e3, 1), (1e-30, 1, 1e30)):
        given = Float8(E4M3, out_dtype=torch.bfloat16).arguments()
        for name, factor in zip(("query_scale", "key_scale", "value_scale"), factors, strict=True):
            given[name] = given[name] * factor
        out, lse = float8_attention(**on(device8, given), return_lse=True)
        check_results(out, lse, given, device8, str(factors))


@pytest.mark.parametrize("level", [1e8, -1e8, 1e4])
def test_far_off_scores(level, device8):
    """Products are whole numbers and scales powers of two, so that no score rounds: the largest take all weight."""
    query = torch.full((1, 1, 40, 64), 0.0)
    query[..., 0] = 256.0
    key = torch.zeros(1, 1, 300, 64)
    key[..., 0] = torch.arange(300) % 7 + 1.0
    value = torch.randint(-8, 9, (1, 1, 300, 64)).float()
    power = 2.0 ** round(math.log2(abs(level) / 256 / 7))
    scales = {"query_scale": torch.full((), math.copysign(power, level)), "value_scale": torch.full((), 0.5)}
    given = {n: t.to(E4M3) for n, t in (("query", query), ("key", key), ("value", value))} | scales
    given |= {"scale": 1.0, "out_dtype": torch.float16}
    out, lse = float8_attention(**on(device8, given), return_lse=True)
    best = 6 if level > 0 else 0
    expected = value[:, :, best::7].mean(2, keepdim=True) / 2
    torch.testing.assert_close(out.float().cpu(), expected.expand(1, 1, 40, 64), rtol=2e-3, atol=2e-3)
    score = 256 * (best + 1) * math.copysign(power, level)
    assert (lse.cpu() - (score + math.log(len(range(best, 300, 7))))).abs().max() <= abs(score) * 2**-22 + 1e-5


# --- Rows ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", INPUTS, ids=str)
def test_nan_stays_in_its_row(dtype, device8):
    given = Float8(dtype, lengths=(150, 200), smooth_keys=False).arguments()
    clean = float8_attention(**on(device8, given), return_lse=True)
    query = given["query"].float()
    query[0, 1, 33, 5] = query[1, 2, 149] = NAN
    given["query"] = query.to(dtype)
    out, lse = float8_attention(**on(device8, given), return_lse=True)
    assert out[0, 1, 33].isnan().all() and out[1, 2, 149].isnan().all()
    assert lse[0, 1, 33].isnan() and lse[1, 2, 149].isnan()
    check_results(out, lse, given, device8)
    if dtype == E4M3:
        for ours, theirs in zip((out, lse), clean, strict=True):
            keep = torch.ones(2, 4, 150, dtype=torch.bool, device=device8)
            keep[0, 1, 33] = keep[1, 2, 149] = False
            assert torch.equal(ours[keep], theirs[keep])


@pytest.mark.parametrize("dtype", INPUTS, ids=str)
def test_nan_and_infinity_in_keys_and_values(dtype, device8):
    """NaN in a key or value reaches the rows that see it; keys that a whole tile does not see may hold anything."""
    given = Float8(dtype, heads=(2, 2), lengths=(128, 512), options={"causal": True}).arguments()
    key, value = given["key"].float(), given["value"].float()
    key[:, :, 400:], value[:, :, 450:] = NAN, NAN
    if dtype != E4M3:
        key[0, 0, 3, 7], value[0, 0, 5, 9] = INF, -INF
    given |= {"key": key.to(dtype), "value": value.to(dtype)}
    out, lse = float8_attention(**on(device8, given), return_lse=True)
    assert not out.isnan().any() and not lse.isnan().any()
    if dtype == E4M3:  # other keys would have other means and scales
        cut = given | {"key": given["key"][:, :, :128], "value": given["value"][:, :, :128]}
        assert torch.equal(out, float8_attention(**on(device8, cut)))
    key[1, 1, 20, 3] = NAN
    out, lse = float8_attention(**on(device8, given | {"key": key.to(dtype)}), return_lse=True)
    assert out[1, 1, 20:].isnan().all() and lse[1, 1, 20:].isnan().all()
    assert not out[1, 1, :20].isnan().any() and not out[:, 0].isnan().any() and not out[0].isnan().any()


@pytest.mark.parametrize("dtype", INPUTS, ids=str)
def test_rows_that_see_nothing(dtype, device8):
    for sinks in (False, True):
        options = {"causal": True, "alignment": "lower_right"}  # the first 50 rows see nothing
        problem = Float8(dtype, lengths=(200, 150), options=options, sinks=sinks)
        out, lse = problem.check(device8)
        hidden = lse[:, :, :50].cpu()
        assert not out[:, :, :50].any()
        expected = problem.arguments()["sinks"][:, None].expand(hidden.shape) if sinks else torch.full_like(hidden, -INF)
        assert torch.equal(hidden, expected)
        nothing = torch.zeros(200, 2, dtype=torch.int32, device=device8)
        out, lse = float8_attention(**on(device8, problem.arguments()) | {"query_spans": nothing}, return_lse=True)
        assert not out.any() and torch.equal(lse[:, :, :50].cpu(), expected)


@pytest.mark.parametrize("sink", [-INF, 30.0, 1e4])
def test_extreme_sinks(sink, device8):
    given = Float8(torch.bfloat16).arguments() | {"sinks": torch.tensor([0.0, sink, 1.0, sink])}
    out, lse = float8_attention(**on(device8, given), return_lse=True)
    check_results(out, lse, given, device8)


@pytest.mark.parametrize("dtype", INPUTS, ids=str)
def test_sizes_of_0(dtype, device8):
    for batch, heads, lengths, head_dims in (
        ((2,), (4, 2), (5, 0), (64, 64)),
        ((2,), (4, 2), (0, 5), (64, 64)),
        ((2,), (4, 2), (0, 0), (64, 64)),
        ((0,), (4, 2), (5, 7), (64, 64)),
        ((2, 0), (4, 2), (5, 7), (64, 64)),
        ((2,), (0, 0), (5, 7), (64, 64)),
        ((2,), (4, 2), (5, 7), (0, 64)),
        ((2,), (4, 2), (5, 7), (64, 0)),
    ):
        for sinks in (False, True):
            problem = Float8(dtype, batch, heads, lengths, head_dims, sinks=sinks, options={"causal": True})
            given = on(device8, problem.arguments())
            out, lse = float8_attention(**given, return_lse=True)
            assert out.shape == (*batch, heads[0], lengths[0], head_dims[1]) and lse.shape == out.shape[:-1]
            if lengths[1] == 0:
                expected = given["sinks"][:, None].expand(lse.shape) if sinks else torch.full_like(lse, -INF)
                assert not out.any() and torch.equal(lse, expected)
            elif out.numel() and head_dims[0] == 0:  # all scores are 0
                check_results(out, lse, problem.arguments(), device8)
            elif lse.numel():
                expected = reference.float8_attention(**problem.arguments(), return_lse=True)[1]
                least = {"rtol": 1e-3, "atol": 1e-3} if device8 == "cuda" else {}  # of sums of products with 14 bits
                torch.testing.assert_close(lse.cpu(), expected, **least)


def test_row_independence_of_e4m3_inputs(device8):
    """A row's bits are those of a call with fewer rows, batches, heads and, under a causal mask, keys."""
    for options in ({}, {"causal": True}, {"window": (70, 20)}, {"causal": True, "softcap": 3.0}):
        given = on(device8, Float8(E4M3, lengths=(300, 300), options=options, sinks=True, mean=1.0).arguments())
        out, lse = float8_attention(**given, return_lse=True)
        names = ("query_scale", "key_scale", "value_scale")
        for rows, keys in ((slice(0, 1), 300), (slice(0, 77), 300), (slice(0, 200), 300), (slice(0, 128), 128)):
            if keys < 300 and not options.get("causal"):
                continue
            for b, h in ((slice(0, 1), 1), (slice(1, 2), 0)):
                own = slice(2 * h, 2 * h + 2)
                part = given | {n: given[n][b, h : h + 1] for n in names} | {"sinks": given["sinks"][own]}
                part |= {"query": given["query"][b, own, rows]}
                part |= {n: given[n][b, h : h + 1, :keys] for n in ("key", "value")}
                one, one_lse = float8_attention(**part, return_lse=True)
                assert torch.equal(one, out[b, own, rows]), (options, rows, keys)
                assert torch.equal(one_lse, lse[b, own, rows]), (options, rows, keys)
    shifted = given | {"query": given["query"][:, :, 100:], "window": None, "causal": False}
    whole = float8_attention(**given | {"window": None, "causal": False})
    assert torch.equal(float8_attention(**shifted), whole[:, :, 100:])


def test_results_do_not_depend_on_the_number_of_threads():
    for dtype in INPUTS:
        given = Float8(dtype, lengths=(200, 300), options={"causal": True}, mean=2.0).arguments()
        results = []
        for threads in (1, 2, 7):
            torch.set_num_threads(threads)
            results.append(float8_attention(**given, return_lse=True))
        for result in results[1:]:
            assert all(torch.equal(a, b) for a, b in zip(result, results[0], strict=True))


# --- The call -----------------------------------------------------------------------------------------------------------------


def test_any_rank(device8):
    given = on(device8, Float8(torch.bfloat16, heads=(1, 1), batch=()).arguments())
    out, lse = float8_attention(**given, return_lse=True)
    flat = given | {n: given[n][0] for n in ("query", "key", "value")}
    one, one_lse = float8_attention(**flat, return_lse=True)
    assert torch.equal(one, out[0]) and torch.equal(one_lse, lse[0])
    query, key = torch.randn(2, 3, 4, 9, 64).half().to(device8), torch.randn(3, 2, 11, 64).half().to(device8)
    expanded = float8_attention(query, key.expand(2, 3, 2, 11, 64), key)
    assert torch.equal(float8_attention(query, key, key), expanded) and expanded.shape == (2, 3, 4, 9, 64)


def test_scales_broadcast(device8):
    given = on(device8, Float8(E4M3).arguments())
    for shape in ((), (1,), (2,), (2, 1), (1, 2), (2, 2)):
        scale = torch.rand(shape, device=device8) + 0.5
        call = given | {"query_scale": scale / 100, "value_scale": scale}
        whole = given | {"query_scale": (scale / 100).expand(2, 2).clone(), "value_scale": scale.expand(2, 2).clone()}
        assert torch.equal(float8_attention(**call), float8_attention(**whole))


def test_smooth_keys_has_no_effect_on_e4m3(device8):
    given = on(device8, Float8(E4M3, mean=2.0).arguments())
    assert torch.equal(float8_attention(**given), float8_attention(**given | {"smooth_keys": False}))


def test_transforms_and_graphs(device8):
    for dtype in INPUTS:
        given = on(device8, Float8(dtype, batch=(3, 2), lengths=(40, 50), sinks=True, spans=(1, 1)).arguments())
        names = [n for n, t in given.items() if isinstance(t, torch.Tensor) and t.dim() > 1 and "spans" not in n]
        fixed = {n: t for n, t in given.items() if n not in names}

        def call(*tensors, names=names, fixed=fixed, return_lse=True):
            return float8_attention(**dict(zip(names, tensors, strict=True)), **fixed, return_lse=return_lse)

        tensors = [given[n] for n in names]
        expected = call(*tensors)
        for ours, theirs in zip(torch.func.vmap(call)(*tensors), expected, strict=True):
            assert torch.equal(ours, theirs)
        alone = torch.func.vmap(lambda *t, call=call: call(*t, return_lse=False))(*tensors)
        assert torch.equal(alone, expected[0])
        query, *others = tensors
        first = [t[0] for t in others]
        (one, _) = torch.func.vmap(call, (0, *[None] * len(others)))(query, *first)
        assert torch.equal(one[0], expected[0][0])
        for ours, theirs in zip(torch.compile(call, fullgraph=True, backend="aot_eager")(*tensors), expected, strict=True):
            assert torch.equal(ours, theirs)
        with torch.inference_mode():
            assert torch.equal(call(*tensors)[0], expected[0])
        meta = float8_attention(**{n: t.to("meta") if isinstance(t, torch.Tensor) else t for n, t in given.items()})
        assert meta.shape == expected[0].shape and meta.dtype == expected[0].dtype and meta.stride() == expected[0].stride()


def test_vmap_over_sinks(device8):
    given = on(device8, Float8(torch.bfloat16, lengths=(20, 30)).arguments())
    sinks = torch.randn(3, 4, device=device8)
    out = torch.func.vmap(lambda s: float8_attention(**given, sinks=s))(sinks)
    assert all(torch.equal(out[i], float8_attention(**given, sinks=sinks[i])) for i in range(3))


@pytest.mark.slow
def test_compiled_and_exported(device8):
    class Module(torch.nn.Module):
        def __init__(self, options):
            super().__init__()
            self.options = options

        def forward(self, q, k, v):
            return float8_attention(q, k, v, return_lse=True, **self.options)

    for dtype in INPUTS:
        given = on(device8, Float8(dtype, lengths=(40, 50), scales=False).arguments())
        tensors = [given[n] for n in ("query", "key", "value")]
        for options in ({}, {"causal": True, "alignment": "lower_right", "window": (9, None), "scale": 0.01}):
            module = Module(options)
            expected = module(*tensors)
            torch.compiler.reset()  # there is a limit on the graphs of one function
            for dynamic in (False, True):
                for ours, theirs in zip(
                    torch.compile(module, fullgraph=True, dynamic=dynamic)(*tensors), expected, strict=True
                ):
                    assert torch.equal(ours, theirs)
            exported = torch.export.export(module, tuple(tensors)).module()(*tensors)
            assert all(torch.equal(ours, theirs) for ours, theirs in zip(exported, expected, strict=True))


def test_gradients_are_refused(device8):
    given = on(device8, Float8(torch.bfloat16, sinks=True).arguments())
    for name in ("query", "key", "value", "sinks"):
        call = given | {name: given[name].detach().requires_grad_()}
        with pytest.raises(flash_online.InvalidArgument, match=f"{name}: expected a tensor without a gradient, got"):
            float8_attention(**call)
        with torch.no_grad():
            assert torch.equal(float8_attention(**call), float8_attention(**given))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(given["query"], torch.ones_like(given["query"]))
        with pytest.raises(flash_online.InvalidArgument, match="query: expected a tensor without a tangent"):
            float8_attention(**given | {"query": dual})


def test_autocast(device8):
    query, key, value = (torch.randn(2, 4, n, 64, device=device8) for n in (9, 11, 11))
    with torch.autocast(device8, torch.bfloat16):
        out = float8_attention(query, key.half(), value)
        packed = float8_attention(*(t.to(E4M3) for t in (query, key, value)), out_dtype=torch.float16)
    assert out.dtype == torch.bfloat16 and packed.dtype == torch.float16
    assert torch.equal(out, float8_attention(query.bfloat16(), key.half().bfloat16(), value.bfloat16()))


def test_errors(device8):
    query, key, value = (torch.randn(2, h, n, 64, dtype=torch.float16, device=device8) for h, n in ((4, 7), (2, 9), (2, 9)))
    scale = torch.ones(2, device=device8)
    narrow = {"query": query.to(E4M3), "key": key.to(E4M3), "value": value.to(E4M3)}
    for change, message in (
        ({"key": key.bfloat16()}, "key: expected query's dtype torch.float16, got torch.bfloat16"),
        ({"value": value.to(E4M3)}, "value: expected query's dtype torch.float16, got torch.float8_e4m3fn"),
        (
            {n: t.float() for n, t in (("query", query), ("key", key), ("value", value))},
            "query: expected dtype float16, bfloat16",
        ),
        ({n: t.to(torch.float8_e5m2) for n, t in narrow.items()}, "query: expected dtype float16, bfloat16 or float8_e4m3fn"),
        ({"query_scale": scale}, "query_scale: expected None with torch.float16 inputs"),
        ({"key_scale": scale}, "key_scale: expected None with torch.float16 inputs"),
        ({"value_scale": scale}, "value_scale: expected None with torch.float16 inputs"),
        (narrow | {"key_scale": scale.double()}, "key_scale: expected float32 on"),
        (
            narrow | {"value_scale": torch.ones(3, device=device8)},
            r"value_scale: expected what broadcasts to \[2, 2\], got \[3\]",
        ),
        ({"key": key[..., :8]}, "key: expected query's width"),
        ({"value": value[:, :, :8]}, "value: expected key's length"),
        ({"value": value[:, :1]}, "value: expected key's 2 heads"),
        ({"key": key[:, :1].expand(2, 3, 9, 64), "value": value[:, :1].expand(2, 3, 9, 64)}, "key: expected heads"),
        ({"key": key[:1].expand(3, 2, 9, 64)}, "query, key, value: expected leading dimensions"),
        ({"query": query[0, 0, 0]}, "query: expected"),
        ({"out_dtype": torch.float32}, "out_dtype: expected float16 or bfloat16, got torch.float32"),
        ({"window": (1, -2)}, "window: expected"),
        ({"alignment": "left"}, "alignment: expected"),
        ({"softcap": -1.0}, "softcap: expected"),
        ({"sinks": torch.ones(3, device=device8)}, "sinks: expected"),
        ({"query_spans": torch.zeros(6, 2, dtype=torch.int32, device=device8)}, "query_spans: expected"),
        ({"key_spans": torch.zeros(9, 3, dtype=torch.int32, device=device8)}, "key_spans: expected"),
    ):
        given = {"query": query, "key": key, "value": value} | change
        with pytest.raises(flash_online.InvalidArgument, match=message):
            float8_attention(**given)
    for change, message in (
        ({"causal": 1}, "causal: expected"),
        ({"smooth_keys": 1}, "smooth_keys: expected"),
        ({"return_lse": None}, "return_lse: expected"),
        ({"out_dtype": "float16"}, "out_dtype: expected a torch.dtype or None, got str"),
        ({"query_scale": 1.0}, "query_scale: expected a Tensor"),
        ({"scale": "1"}, "scale: expected a float"),
    ):
        with pytest.raises(TypeError, match=message):
            float8_attention(query, key, value, **change)


RAW = torch.ops.flash_online.float8_attention
RAW_OPTIONS = (True, -1, -1, 0, None, None, 0.0, None, None, torch.float16, True)


def test_errors_of_the_operator(device8):
    query, key = torch.zeros(2, 4, 7, 64, device=device8).half(), torch.zeros(2, 2, 9, 64, device=device8).half()
    narrow, scale = query.to(E4M3), torch.ones(2, 2, device=device8)

    def raw(q=query, k=key, v=key, scales=(None, None, None), **changed):
        names = ("smooth_keys", "left", "right", "offset", "query_spans", "key_spans", "softcap", "sinks", "scale", "out_dtype")
        options = dict(zip((*names, "return_lse"), RAW_OPTIONS, strict=True)) | changed
        return RAW(q, k, v, *scales, *options.values())

    small = key.to(E4M3)
    for arguments, message in (
        ({"q": query.float()}, "query: expected dtype"),
        ({"q": query[0]}, r"query: expected \[batch, heads"),
        ({"k": key[..., :8]}, "key: expected query's batch and width"),
        ({"v": key[:, :1]}, "value: expected key's batch, heads and length"),
        ({"k": small, "v": small}, "key: expected query's dtype"),
        ({"v": key.bfloat16()}, "value: expected query's dtype"),
        ({"k": key[:, :1].expand(2, 3, 9, 64), "v": key[:, :1].expand(2, 3, 9, 64)}, "key: expected a number of heads"),
        ({"scales": (scale, None, None)}, "query_scale: expected none with 16-bit inputs"),
        ({"q": narrow, "k": small, "v": small, "scales": (None, scale[0], None)}, "key_scale: expected float32"),
        ({"softcap": -1.0}, "softcap: expected 0"),
        ({"out_dtype": torch.float32}, "out_dtype: expected float16 or bfloat16, got float32"),
        ({"sinks": torch.ones(3, device=device8)}, r"sinks: expected float32 \[4\]"),
        ({"query_spans": torch.zeros(2, 4, 6, 2, dtype=torch.int32, device=device8)}, "query_spans: expected 7 rows"),
    ):
        with pytest.raises(RuntimeError, match=message):
            raw(**arguments)
    out, lse = raw(return_lse=False)
    assert out.shape == query.shape and lse.numel() == 0


def test_explain(device8):
    given = on(device8, Float8(torch.bfloat16).arguments())
    plan = flash_online.explain(float8_attention, **given)
    assert plan.ours and plan.operators == ("float8_attention",) and "kernel" in plan.kernel, str(plan)


@pytest.mark.parametrize("instruction_set", ["portable", "avx2", "avx512", "avx512_bf16"])
def test_lesser_instruction_sets(instruction_set):
    skip_unless_lesser(instruction_set)
    run_tests(instruction_set, __file__, "-k", "cpu and (every_option or head_dims or rounds or saturate or far_off or nan)")
