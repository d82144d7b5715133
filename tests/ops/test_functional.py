"""flash_online.functional against torch.nn.functional: torch's own sample inputs, then the corners line by line."""

from __future__ import annotations

import contextlib
import math
import warnings

import pytest
import torch
from cases import DTYPES
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils import _pytree as pytree

import flash_online
import flash_online.functional as F
from flash_online.testing import LAYOUTS, assert_close_to_float64, lay_out

INF = math.inf
TF = torch.nn.functional
OURS = {
    "nn.functional.scaled_dot_product_attention": F.scaled_dot_product_attention,
    "softmax": F.softmax,
    "log_softmax": F.log_softmax,
    "nn.functional.cross_entropy": F.cross_entropy,
    "logsumexp": flash_online.logsumexp,
}
OPINFOS = [op for op in op_db if op.name in OURS]
WIDTH = {torch.float16: 0, torch.bfloat16: 0, torch.float32: 1, torch.float64: 2}


def in_math(function):
    """Torch's math backend with its arithmetic in the inputs' own dtype."""

    def call(*args, **kwargs):
        allowed = torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()
        torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)
        try:
            with sdpa_kernel(SDPBackend.MATH):
                return function(*args, **kwargs)
        finally:
            torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(allowed)

    return call


def in_fused(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    """Torch's fused kernel, which runs on four dimensions of equal batch and heads, on views that have them. It knows no
    gradient of a mask, so that its results do not hang on the mask here."""
    if attn_mask is not None:
        attn_mask = attn_mask.detach()
    if not enable_gqa:
        lead = torch.broadcast_shapes(query.shape[:-2], key.shape[:-2], value.shape[:-2])
        query, key, value = (t.expand(*lead, *t.shape[-2:]) for t in (query, key, value))
        if len(lead) < 2:
            query, key, value = (t.reshape(-1, 1, *t.shape[-2:]) for t in (query, key, value))
            attn_mask = attn_mask if attn_mask is None or attn_mask.dim() < 3 else attn_mask[:, None]
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        out = TF.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    return out if enable_gqa else out.reshape(*lead, *out.shape[-2:])


def differentiable(t):
    return isinstance(t, torch.Tensor) and t.is_floating_point() and t.requires_grad


def run(function, args, kwargs, grads, convert):
    """Results of function(*args, **kwargs) and the gradients of its differentiable inputs for the output gradients `grads`."""

    def leaf(t):
        if not isinstance(t, torch.Tensor):
            return t
        made = convert(t.detach()) if t.is_floating_point() else t
        return made.requires_grad_(t.requires_grad and made.is_floating_point())

    args, kwargs = pytree.tree_map(leaf, (args, kwargs))
    inputs = [t for t in pytree.tree_leaves((args, kwargs)) if differentiable(t)]
    outputs = pytree.tree_leaves(function(*args, **kwargs))
    wanted = [(o, g) for o, g in zip(outputs, grads, strict=False) if o.requires_grad]
    if not inputs or not wanted:
        return outputs, []
    found = torch.autograd.grad([o for o, _ in wanted], inputs, [g.to(o.dtype) for o, g in wanted], allow_unused=True)
    return outputs, list(found)


def compare(ours, theirs, args, kwargs, *, seed=0):
    """Values, dtypes, shapes and gradients of `ours` beside torch's function, in its dtype and in float64."""
    g = torch.Generator().manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sample = pytree.tree_leaves(theirs(*args, **kwargs))
        grads = [torch.randn(o.shape, generator=g, dtype=torch.float64) for o in sample if o.is_floating_point()]
        grads = [x.to(o.dtype) for x, o in zip(grads, sample, strict=False)]
        found, found_grads = run(ours, args, kwargs, grads, lambda t: t)
        plain = [run(f, args, kwargs, grads, lambda t: t.clone()) for f in (theirs, in_math(theirs))]
        if ours is F.scaled_dot_product_attention:
            with contextlib.suppress(RuntimeError):  # no fused kernel for this call
                plain.append(run(in_fused, args, kwargs, grads, lambda t: t.clone()))
        wide = {k: torch.float64 if isinstance(v, torch.dtype) else v for k, v in kwargs.items()}
        truth, truth_grads = run(in_math(theirs), args, wide, grads, torch.Tensor.double)
    assert len(found) == len(sample)
    narrowest = min([t.dtype for t in found if t.is_floating_point()], key=WIDTH.get)
    for i, (result, expected) in enumerate(zip(found, sample, strict=True)):
        assert result.dtype == expected.dtype and result.shape == expected.shape
        assert_close_to_float64(result, [p[0][i] for p in plain], truth[i], name=f"result {i}")
    inputs = [t for t in pytree.tree_leaves((args, kwargs)) if differentiable(t)]
    for i, (result, expected) in enumerate(zip(found_grads, truth_grads, strict=True)):
        result, expected = (torch.zeros_like(inputs[i]) if g is None else g for g in (result, expected))
        others = [p[1][i] for p in plain if p[1] and p[1][i] is not None]
        assert result.dtype == inputs[i].dtype and result.shape == inputs[i].shape
        rounding = min(narrowest, result.dtype, key=WIDTH.get)
        assert_close_to_float64(
            result, others, expected, rounding, name=f"gradient {i}", magnitude=magnitude(args, inputs[i], grads)
        )


def magnitude(args, differentiated, grads):
    """How large the terms are that a gradient is summed from (see assert_close_to_float64)."""
    if len(args) < 3 or not isinstance(args[2], torch.Tensor) or differentiated.numel() == 0 or args[2].numel() == 0:
        return 1.0
    # Of attention: the products of an output's gradient and a value, and of those that share an element of a mask, their sum.
    query, key, value = (t.detach().double() for t in args[:3])
    terms = grads[0].double().square().mean().sqrt() * value.square().mean().sqrt() * value.shape[-1] ** 0.5
    if any(differentiated is t for t in args[:3]):
        return terms.item()
    return terms.item() * math.sqrt(grads[0].numel() // value.shape[-1] * key.shape[-2] / differentiated.numel())


def parametrize_opinfo(test):
    cases = [
        pytest.param(op, dtype, id=f"{op.formatted_name}-{str(dtype).removeprefix('torch.')}")
        for op in OPINFOS
        for dtype in DTYPES
        if dtype in op.dtypes
    ]
    return pytest.mark.parametrize("op, dtype", cases)(test)


def narrowed(value, dtype):
    """A dtype argument of OpInfo's softmax samples is float64: on narrow inputs also try what a model would ask for."""
    return torch.float32 if isinstance(value, torch.dtype) and WIDTH[dtype] == 0 else value


@parametrize_opinfo
def test_opinfo_samples(op, dtype):
    count = 0
    for kind in ("sample_inputs", "reference_inputs"):
        for sample in getattr(op, kind)("cpu", dtype, requires_grad=True):
            args, kwargs = (sample.input, *sample.args), dict(sample.kwargs)
            if kwargs.get("dropout_p", 0) > 0:
                dropout_statistics(args, kwargs)
                continue
            if op.name == "logsumexp" and not isinstance(args[1] if len(args) > 1 else kwargs["dim"], int):
                continue  # ours takes one dimension
            compare(OURS[op.name], op.op, args, kwargs, seed=count)
            if "dtype" in kwargs and WIDTH[dtype] == 0:
                compare(OURS[op.name], op.op, args, {k: narrowed(v, dtype) for k, v in kwargs.items()}, seed=count)
            count += 1
    assert count > 0


@parametrize_opinfo
def test_opinfo_samples_under_override(op, dtype):
    """The unmodified torch function, made ours by override()."""
    if not hasattr(TF, op.name.removeprefix("nn.functional.")):
        return  # logsumexp is no name of torch.nn.functional
    for sample in op.sample_inputs("cpu", dtype, requires_grad=False):
        if sample.kwargs.get("dropout_p", 0) > 0:
            continue
        name = op.name.removeprefix("nn.functional.")
        expected = getattr(F, name)(sample.input, *sample.args, **sample.kwargs)
        with flash_online.override():
            found = getattr(torch.nn.functional, name)(sample.input, *sample.args, **sample.kwargs)
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("op", OPINFOS, ids=lambda op: op.formatted_name)
def test_opinfo_error_inputs(op):
    for case in op.error_inputs("cpu") if op.error_inputs_func else ():
        sample = case.sample_input
        with pytest.raises(case.error_type):
            OURS[op.name](sample.input, *sample.args, **sample.kwargs)


def dropout_statistics(args, kwargs):
    """Dropout cannot match torch's stream: the mean over many draws is the result without dropout."""
    kwargs = dict(kwargs)
    dropout_p = kwargs.pop("dropout_p")
    args = [t.detach().float() if isinstance(t, torch.Tensor) and t.is_floating_point() else t for t in args]
    kwargs = {k: v.detach().float() if isinstance(v, torch.Tensor) and v.is_floating_point() else v for k, v in kwargs.items()}
    expected = TF.scaled_dot_product_attention(*args, **kwargs)
    draws = torch.stack([F.scaled_dot_product_attention(*args, dropout_p=dropout_p, **kwargs) for _ in range(64)])
    assert draws.shape[1:] == expected.shape and len(torch.unique(draws[:, ..., 0].flatten(1), dim=0)) > 32
    spread = draws.std(0) / math.sqrt(64)
    assert ((draws.mean(0) - expected).abs() <= 6 * spread + 1e-4 * expected.abs().max()).all()


# --- scaled_dot_product_attention, corner by corner ------------------------------------------------------------------------


def attention(*shapes, dtype=torch.float32, requires_grad=True, **kwargs):
    """Both functions on random inputs of these shapes, compared."""
    inputs = [torch.randn(s, dtype=torch.float32).to(dtype).requires_grad_(requires_grad) for s in shapes]
    compare(F.scaled_dot_product_attention, TF.scaled_dot_product_attention, inputs, kwargs)


@pytest.mark.parametrize(
    "shapes",
    [
        ((5, 8), (7, 8), (7, 6)),
        ((3, 5, 8), (3, 7, 8), (3, 7, 6)),
        ((2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 6)),
        ((2, 2, 3, 5, 8), (2, 2, 3, 7, 8), (2, 2, 3, 7, 6)),
        ((2, 1, 2, 2, 3, 5, 8), (2, 1, 2, 2, 3, 7, 8), (2, 1, 2, 2, 3, 7, 6)),
    ],
    ids=["2-D", "3-D", "4-D", "5-D", "7-D"],
)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_number_of_dimensions(shapes, is_causal, dtype):
    attention(*shapes, is_causal=is_causal, dtype=dtype)


@pytest.mark.parametrize(
    "shapes",
    [
        ((2, 3, 5, 8), (1, 3, 7, 8), (2, 3, 7, 8)),  # one batch of keys
        ((1, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 8)),  # one batch of queries
        ((2, 4, 5, 8), (2, 1, 7, 8), (2, 1, 7, 8)),  # one key head without enable_gqa
        ((2, 1, 5, 8), (2, 4, 7, 8), (2, 4, 7, 8)),  # one query head
        ((2, 4, 5, 8), (2, 4, 7, 8), (2, 1, 7, 8)),  # one value head
        ((3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 8)),  # ranks that differ
        ((2, 3, 5, 8), (3, 7, 8), (7, 8)),
        ((5, 8), (2, 3, 7, 8), (2, 3, 7, 8)),
        ((2, 1, 5, 8), (1, 3, 7, 8), (2, 1, 7, 8)),
    ],
    ids=str,
)
def test_broadcast_batch_and_heads(shapes):
    attention(*shapes)
    attention(*shapes, attn_mask=torch.rand(5, 7) > 0.5)


@pytest.mark.parametrize("heads", [(6, 3, 3), (6, 1, 1), (6, 3, 2), (6, 2, 6), (6, 6, 6)], ids=str)
@pytest.mark.parametrize("lead", [(), (2,), (2, 2)], ids=str)
def test_enable_gqa(heads, lead):
    h, k, v = heads
    attention((*lead, h, 5, 8), (*lead, k, 7, 8), (*lead, v, 7, 4), enable_gqa=True)
    attention((*lead, h, 5, 8), (*lead, k, 7, 8), (*lead, v, 7, 4), enable_gqa=True, attn_mask=torch.randn(h, 5, 7))


@pytest.mark.parametrize("lengths", [(3, 9), (9, 3), (1, 5), (5, 1), (64, 65)], ids=str)
def test_causal_is_the_upper_left_triangle(lengths):
    queries, keys = lengths
    query, key, value = torch.randn(1, 2, queries, 8), torch.randn(1, 2, keys, 8), torch.randn(1, 2, keys, 8)
    attention(query.shape, key.shape, value.shape, is_causal=True)
    triangle = torch.ones(queries, keys, dtype=torch.bool).tril()
    expected = TF.scaled_dot_product_attention(query, key, value, triangle)
    torch.testing.assert_close(F.scaled_dot_product_attention(query, key, value, is_causal=True), expected)


@pytest.mark.parametrize("head_dims", [(8, 3), (3, 8), (1, 1), (33, 65)], ids=str)
def test_value_width_differs(head_dims):
    attention((2, 2, 5, head_dims[0]), (2, 2, 7, head_dims[0]), (2, 2, 7, head_dims[1]))


@pytest.mark.parametrize(
    "shapes",
    [
        ((0, 2, 5, 8), (0, 2, 7, 8), (0, 2, 7, 6)),
        ((2, 0, 5, 8), (2, 0, 7, 8), (2, 0, 7, 6)),
        ((2, 2, 0, 8), (2, 2, 7, 8), (2, 2, 7, 6)),
        ((2, 2, 5, 8), (2, 2, 0, 8), (2, 2, 0, 6)),
        ((2, 2, 5, 0), (2, 2, 7, 0), (2, 2, 7, 6)),
        ((2, 2, 5, 8), (2, 2, 7, 8), (2, 2, 7, 0)),
        ((2, 2, 0, 8), (2, 2, 0, 8), (2, 2, 0, 6)),
        ((0, 8), (0, 8), (0, 8)),
    ],
    ids=["batch", "heads", "queries", "keys", "head dim", "value head dim", "both lengths", "2-D"],
)
@pytest.mark.parametrize("is_causal", [False, True])
def test_sizes_of_zero(shapes, is_causal):
    attention(*shapes, is_causal=is_causal)


def test_width_of_zero_is_a_mean():
    query, key, value = torch.empty(1, 1, 4, 0), torch.empty(1, 1, 4, 0), torch.randn(1, 1, 4, 3)
    out = F.scaled_dot_product_attention(query, key, value)
    torch.testing.assert_close(out, value.mean(-2, keepdim=True).expand(1, 1, 4, 3))


@pytest.mark.parametrize("scale", [0.0, -1.5, 1e-3, 2.0, None])
@pytest.mark.parametrize("is_causal", [False, True])
def test_scale(scale, is_causal):
    attention((2, 2, 5, 8), (2, 2, 7, 8), (2, 2, 7, 8), scale=scale, is_causal=is_causal)


MASKS = {
    "[L, S]": (5, 7),
    "[1, S]": (1, 7),
    "[L, 1]": (5, 1),
    "[1, 1]": (1, 1),
    "[H, L, S]": (3, 5, 7),
    "[1, L, S]": (1, 5, 7),
    "[B, 1, 1, S]": (2, 1, 1, 7),
    "[1, H, L, S]": (1, 3, 5, 7),
    "[B, H, L, S]": (2, 3, 5, 7),
    "[B, 1, L, 1]": (2, 1, 5, 1),
}


@pytest.mark.parametrize("shape", MASKS.values(), ids=MASKS.keys())
@pytest.mark.parametrize("kind", ["bool", "float", "with gradient"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_mask_of_every_broadcast(shape, kind, dtype):
    mask = torch.rand(shape) > 0.3 if kind == "bool" else torch.randn(shape).to(dtype)
    attention((2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 8), attn_mask=mask.requires_grad_(kind == "with gradient"), dtype=dtype)


def test_mask_of_one_dimension():
    """Torch's math backend takes it, its fused kernel does not."""
    query, key, value = (torch.randn(2, 3, n, 8) for n in (5, 7, 7))
    for mask in (torch.rand(7) > 0.3, torch.randn(7)):
        expected = in_math(TF.scaled_dot_product_attention)(query, key, value, mask)
        torch.testing.assert_close(F.scaled_dot_product_attention(query, key, value, mask), expected)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_mask_of_every_stride(layout, kind):
    mask = torch.rand(2, 3, 5, 7) > 0.3 if kind == "bool" else torch.randn(2, 3, 5, 7)
    query, key, value = (torch.randn(2, 3, n, 8) for n in (5, 7, 7))
    laid_out = lay_out(mask, layout)
    expected = TF.scaled_dot_product_attention(query, key, value, laid_out.contiguous())
    torch.testing.assert_close(F.scaled_dot_product_attention(query, key, value, laid_out), expected)


def test_mask_gradient_alone():
    """In torch's CUDA kernels this once read memory that was never written (pytorch issue 148476)."""
    mask = torch.randn(5, 7, requires_grad=True)
    query, key, value = (torch.randn(2, 3, n, 8) for n in (5, 7, 7))
    compare(F.scaled_dot_product_attention, TF.scaled_dot_product_attention, (query, key, value, mask), {})


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_float32_mask_beside_a_16_bit_query(dtype):
    query, key, value = (torch.randn(2, 3, n, 8).to(dtype).requires_grad_() for n in (5, 7, 7))
    for shape in ((5, 7), (2, 1, 1, 7)):
        mask = torch.randn(shape)
        ours = F.scaled_dot_product_attention(query, key, value, mask)
        truth = TF.scaled_dot_product_attention(query.double(), key.double(), value.double(), mask.double())
        plain = TF.scaled_dot_product_attention(query, key, value, mask.to(dtype))
        assert_close_to_float64(ours, plain, truth, name="out")


def test_fully_masked_rows_are_zero():
    for mask in (torch.zeros(5, 7, dtype=torch.bool), torch.full((5, 7), -INF)):
        mask[1] = True if mask.dtype == torch.bool else 0.0
        inputs = [torch.randn(2, 2, n, 8, requires_grad=True) for n in (5, 7, 7)]
        out = F.scaled_dot_product_attention(*inputs, mask)
        assert (out[:, :, [0, 2, 3, 4]] == 0).all() and (out[:, :, 1] != 0).any()
        grads = torch.autograd.grad(out.sum(), inputs)
        assert all(g.isfinite().all() for g in grads) and (grads[0][:, :, [0, 2, 3, 4]] == 0).all()
        compare(F.scaled_dot_product_attention, TF.scaled_dot_product_attention, inputs, {"attn_mask": mask})


def test_rows_masked_by_the_smallest_number():
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        mask = torch.full((5, 7), torch.finfo(dtype).min, dtype=dtype)
        mask[2, 3] = 0
        attention((2, 2, 5, 8), (2, 2, 7, 8), (2, 2, 7, 8), attn_mask=mask, dtype=dtype)


def test_nan_reaches_its_row():
    query, key, value = (torch.randn(1, 2, n, 8) for n in (5, 7, 7))
    query[0, 1, 3, 0] = math.nan
    out = F.scaled_dot_product_attention(query, key, value)
    assert out[0, 1, 3].isnan().all() and out.isnan().sum() == 8
    assert F.scaled_dot_product_attention(query, key, value, is_causal=True)[0, 1, 3].isnan().all()
    mask = torch.zeros(5, 7)
    mask[2, 4] = math.nan
    assert F.scaled_dot_product_attention(torch.randn(1, 2, 5, 8), key, value, mask)[:, :, 2].isnan().all()


def test_a_score_of_infinity_is_nan():
    query, key, value = (torch.randn(1, 1, n, 8) for n in (5, 7, 7))
    mask = torch.zeros(5, 7)
    mask[3, 2] = INF
    out = F.scaled_dot_product_attention(query, key, value, mask)
    assert out[0, 0, 3].isnan().all() and out.isnan().sum() == 8
    expected = TF.scaled_dot_product_attention(query, key, value, mask)
    assert torch.equal(out.isnan(), expected.isnan())


def test_out_has_the_querys_dtype_and_order_of_strides():
    query = torch.randn(2, 5, 3, 8).transpose(1, 2)
    key = value = torch.randn(2, 3, 7, 8)
    out = F.scaled_dot_product_attention(query, key, value)
    assert out.transpose(1, 2).is_contiguous()
    assert F.scaled_dot_product_attention(query.contiguous(), key, value).is_contiguous()
    assert F.scaled_dot_product_attention(query.half(), key.half(), value.half()).dtype == torch.float16


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(dtype):
    inputs = [torch.randn(2, 3, n, 8) for n in (5, 7, 7)]
    mask = torch.randn(5, 7)
    with torch.autocast("cpu", dtype):
        assert F.scaled_dot_product_attention(*inputs).dtype == TF.scaled_dot_product_attention(*inputs).dtype == dtype
        mixed = [inputs[0].to(dtype), inputs[1], inputs[2]]
        assert F.scaled_dot_product_attention(*mixed).dtype == dtype
        ours = F.scaled_dot_product_attention(*inputs, attn_mask=mask)
        logits, target = torch.randn(4, 9).to(dtype), torch.randint(0, 9, (4,))
        for function, args in (("softmax", (logits, 1)), ("log_softmax", (logits, 1)), ("cross_entropy", (logits, target))):
            assert getattr(F, function)(*args).dtype == getattr(TF, function)(*args).dtype, function
    torch.testing.assert_close(ours.float(), TF.scaled_dot_product_attention(*inputs, mask), rtol=2e-2, atol=2e-2)
    outside = [t.requires_grad_() for t in inputs]
    with torch.autocast("cpu", dtype):
        out = F.scaled_dot_product_attention(*outside)
    for t, g in zip(outside, torch.autograd.grad(out.sum(), outside), strict=True):
        assert g.dtype == t.dtype


def test_dropout_is_reproducible():
    inputs = [torch.randn(2, 3, n, 8, requires_grad=True) for n in (5, 7, 7)]

    def call():
        out = F.scaled_dot_product_attention(*inputs, dropout_p=0.5)
        return [out, *torch.autograd.grad(out.sum(), inputs)]

    torch.manual_seed(3)
    first, other = call(), call()
    torch.manual_seed(3)
    assert all(torch.equal(a, b) for a, b in zip(first, call(), strict=True))
    assert not torch.equal(first[0], other[0])


def test_dropout_of_one_is_zero():
    inputs = [torch.randn(2, 3, 5, 8, requires_grad=True) for _ in range(3)]
    out = F.scaled_dot_product_attention(*inputs, dropout_p=1.0)
    assert (out == 0).all() and all((g == 0).all() for g in torch.autograd.grad(out.sum(), inputs))


def both_raise(name, *args, **kwargs):
    """Both functions raise, and ours an exception of torch's type."""
    with pytest.raises(Exception) as theirs:
        with sdpa_kernel(SDPBackend.MATH):
            getattr(TF, name)(*args, **kwargs)
    with pytest.raises(theirs.type) as ours:
        getattr(F, name)(*args, **kwargs)
    return str(ours.value)


def test_what_raises_in_torch_raises_here():
    sdpa = "scaled_dot_product_attention"
    q = torch.randn(2, 4, 5, 8)
    mask = torch.ones(5, 5, dtype=torch.bool)
    both_raise(sdpa, q, q, q, mask, is_causal=True)
    both_raise(sdpa, q, q.double(), q)
    both_raise(sdpa, q, q.half(), q.half())
    both_raise(sdpa, q[0, 0, 0], q, q)
    both_raise(sdpa, q, q, q, mask.long())
    both_raise(sdpa, q, q, q, mask.double())
    both_raise(sdpa, q, q, q, mask.half())
    both_raise(sdpa, q, q, q, torch.ones(4, 5, dtype=torch.bool))
    both_raise(sdpa, q, q, q, torch.ones(3, 1, 5, 5, dtype=torch.bool))
    both_raise(sdpa, q, q[..., :7], q)
    both_raise(sdpa, q, q, q[:, :, :4])
    both_raise(sdpa, q, q[:, :2], q[:, :2])
    both_raise(sdpa, q, q[:, :3], q[:, :3], enable_gqa=True)
    both_raise(sdpa, q, torch.randn(3, 4, 5, 8), q)
    both_raise(sdpa, q, q, q, dropout_p=1.5)
    both_raise(sdpa, q.to("meta"), q, q)
    both_raise(sdpa, q.long(), q.long(), q.long())


# --- softmax and log_softmax ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_softmax_rows_that_are_not_finite(name, dtype):
    rows = torch.tensor([[-INF, -INF, -INF], [INF, 0, 1], [math.nan, 0, 1], [-INF, 0, 1], [1, 2, 3]]).to(dtype)
    ours, theirs = getattr(F, name)(rows, 1), getattr(TF, name)(rows, 1)
    torch.testing.assert_close(ours, theirs, equal_nan=True)
    assert ours[:3].isnan().all() and ours[4].isfinite().all()


@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_softmax_without_dim_warns_as_torch(name):
    for shape in ((), (3,), (3, 4), (2, 3, 4), (2, 2, 3, 4)):
        x = torch.randn(shape)
        with pytest.warns(UserWarning, match="dim"):
            theirs = getattr(TF, name)(x)
        with pytest.warns(UserWarning, match="dim"):
            ours = getattr(F, name)(x)
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_softmax_of_integers(name):
    x = torch.arange(6).view(2, 3)
    both_raise(name, x, 1)
    torch.testing.assert_close(getattr(F, name)(x, 1, dtype=torch.float32), getattr(TF, name)(x, 1, dtype=torch.float32))
    both_raise(name, torch.randn(2, 3), 2)
    both_raise(name, torch.randn(2, 3), -3)


@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_softmax_casts_first(name):
    x = torch.randn(4, 1000) * 10
    for source, dtype in ((torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16), (torch.float32, torch.float64)):
        ours = getattr(F, name)(x.to(source), 1, dtype=dtype)
        theirs = getattr(TF, name)(x.to(source), 1, dtype=dtype)
        truth = getattr(TF, name)(x.to(source).to(dtype).double(), 1)
        assert ours.dtype == dtype
        assert_close_to_float64(ours, theirs, truth)


# --- cross_entropy -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_cross_entropy_options(reduction, smoothing, weighted, dtype):
    weight = torch.rand(7).to(dtype) if weighted else None
    kwargs = {"weight": weight, "reduction": reduction, "label_smoothing": smoothing}
    for shape in ((7,), (5, 7), (2, 7, 3), (2, 7, 3, 2)):
        logits = torch.randn(shape).to(dtype).requires_grad_()
        target = torch.randint(0, 7, shape[:1] + shape[2:] if len(shape) > 1 else ())
        if len(shape) > 1:
            target.view(-1)[1] = -100
        compare(F.cross_entropy, TF.cross_entropy, (logits, target), kwargs)
        probabilities = torch.rand(shape).softmax(0).to(dtype).requires_grad_()
        compare(F.cross_entropy, TF.cross_entropy, (logits, probabilities), kwargs)


@pytest.mark.parametrize("ignore_index", [-100, -1, 0, 3, 6, 7, 1000])
def test_ignore_index_may_be_any_number(ignore_index):
    logits = torch.randn(8, 7, requires_grad=True)
    target = torch.randint(0, 7, (8,))
    target[2] = ignore_index
    for reduction in ("mean", "sum", "none"):
        kwargs = {"ignore_index": ignore_index, "reduction": reduction, "label_smoothing": 0.2, "weight": torch.rand(7)}
        compare(F.cross_entropy, TF.cross_entropy, (logits, target), kwargs)


def test_all_targets_ignored():
    logits, target = torch.randn(4, 7, requires_grad=True), torch.full((4,), -100)
    assert F.cross_entropy(logits, target).isnan()
    assert F.cross_entropy(logits, target, reduction="sum") == 0
    assert (F.cross_entropy(logits, target, reduction="none") == 0).all()
    (grad,) = torch.autograd.grad(F.cross_entropy(logits, target, reduction="sum"), logits)
    assert (grad == 0).all()


def test_ignored_rows_may_hold_anything():
    """torch hands NaN on (pytorch issue 11551); an ignored row has gradient 0 here."""
    logits, target = torch.randn(5, 7), torch.tensor([1, -100, 2, -100, 6])
    logits[1], logits[3] = math.nan, -INF
    logits.requires_grad_()
    kept = [0, 2, 4]
    for reduction in ("mean", "sum", "none"):
        for smoothing in (0.0, 0.1):
            options = {"reduction": reduction, "label_smoothing": smoothing}
            loss = F.cross_entropy(logits, target, **options)
            expected = TF.cross_entropy(logits[kept], target[kept], **options)
            torch.testing.assert_close(loss[kept] if reduction == "none" else loss, expected)
            (grad,) = torch.autograd.grad(loss.sum(), logits)
            assert (grad[[1, 3]] == 0).all() and grad.isfinite().all()


def test_target_out_of_range():
    logits = torch.randn(3, 7)
    for bad in (7, -1, 10**12, -(10**12)):
        with pytest.raises(IndexError, match="target"):
            F.cross_entropy(logits, torch.tensor([0, bad, 1]))
    both_raise("cross_entropy", logits, torch.tensor([0, 7, 1]))


def test_cross_entropy_of_nothing():
    for reduction in ("mean", "sum", "none"):
        compare(
            F.cross_entropy,
            TF.cross_entropy,
            (torch.randn(0, 7, requires_grad=True), torch.zeros(0, dtype=torch.long)),
            {"reduction": reduction},
        )


def test_cross_entropy_legacy_arguments():
    logits, target = torch.randn(5, 7), torch.randint(0, 7, (5,))
    for size_average, reduce in ((True, None), (False, None), (None, False), (True, True), (False, False)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ours = F.cross_entropy(logits, target, None, size_average, -100, reduce)
            theirs = TF.cross_entropy(logits, target, None, size_average, -100, reduce)
        torch.testing.assert_close(ours, theirs)


def test_infinite_logits():
    logits = torch.tensor([[0.0, -INF, 1.0], [INF, 0.0, 1.0], [-INF, -INF, -INF], [math.nan, 0.0, 1.0], [0.0, 1.0, 2.0]])
    for target in ([0, 0, 0, 0, 0], [1, 1, 1, 1, 1]):
        ours = F.cross_entropy(logits, torch.tensor(target), reduction="none")
        theirs = TF.cross_entropy(logits, torch.tensor(target), reduction="none")
        torch.testing.assert_close(ours, theirs, equal_nan=True)


def test_cross_entropy_raises_as_torch():
    name, logits, target = "cross_entropy", torch.randn(3, 7), torch.tensor([0, 1, 2])
    both_raise(name, logits, target[:2])
    both_raise(name, logits, target.int().float())
    both_raise(name, logits, target, torch.ones(6))
    both_raise(name, logits, target, reduction="average")
    both_raise(name, logits, target, label_smoothing=1.5)
    both_raise(name, torch.tensor(1.0), torch.tensor(0))
    both_raise(name, logits, torch.rand(3, 6))
    both_raise(name, logits, torch.rand(3, 7), ignore_index=2)
    both_raise(name, logits.long(), target)
    both_raise(name, logits, target, torch.ones(7, 1))


def test_every_other_name_is_torchs():
    assert F.relu is TF.relu and F.linear is TF.linear
    assert {"softmax", "gelu", "cross_entropy"} <= set(dir(F))
    with pytest.raises(AttributeError):
        F.no_such_function  # noqa: B018
