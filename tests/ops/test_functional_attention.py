"""scaled_dot_product_attention of flash_online.functional against torch.nn.functional's, the corners line by line.

test_opinfo.py has torch's own samples.
"""

from __future__ import annotations

import math

import pytest
import torch
from cases import DTYPES
from drop_in import both_raise, compare, in_math

import flash_online.functional as F
from flash_online.testing import LAYOUTS, assert_close_to_float64, lay_out

INF = math.inf
TF = torch.nn.functional


def attention(*shapes, dtype=torch.float32, requires_grad=True, device, **kwargs):
    """Both functions on random inputs of these shapes, compared."""
    inputs = [torch.randn(s, dtype=torch.float32, device=device).to(dtype).requires_grad_(requires_grad) for s in shapes]
    compare(F.scaled_dot_product_attention, TF.scaled_dot_product_attention, inputs, kwargs)


@pytest.fixture(autouse=True)
def _without_what_is_torchs(request):
    """Float64 on CUDA goes to torch, which test_dispatch.py tests."""
    values = getattr(getattr(request.node, "callspec", None), "params", {})
    if values.get("device") == "cuda" and torch.float64 in values.values():
        pytest.skip("float64 on CUDA goes to torch")


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
def test_any_number_of_dimensions(shapes, is_causal, dtype, device):
    attention(*shapes, is_causal=is_causal, dtype=dtype, device=device)


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
def test_broadcast_batch_and_heads(shapes, device):
    attention(*shapes, device=device)
    attention(*shapes, attn_mask=torch.rand(5, 7, device=device) > 0.5, device=device)


@pytest.mark.parametrize("heads", [(6, 3, 3), (6, 1, 1), (6, 3, 2), (6, 2, 6), (6, 6, 6)], ids=str)
@pytest.mark.parametrize("lead", [(), (2,), (2, 2)], ids=str)
def test_enable_gqa(heads, lead, device):
    h, k, v = heads
    attention((*lead, h, 5, 8), (*lead, k, 7, 8), (*lead, v, 7, 4), enable_gqa=True, device=device)
    attention(
        (*lead, h, 5, 8),
        (*lead, k, 7, 8),
        (*lead, v, 7, 4),
        enable_gqa=True,
        attn_mask=torch.randn(h, 5, 7, device=device),
        device=device,
    )


@pytest.mark.parametrize("lengths", [(3, 9), (9, 3), (1, 5), (5, 1), (64, 65)], ids=str)
def test_causal_is_the_upper_left_triangle(lengths, device):
    queries, keys = lengths
    query, key, value = (
        torch.randn(1, 2, queries, 8, device=device),
        torch.randn(1, 2, keys, 8, device=device),
        torch.randn(1, 2, keys, 8, device=device),
    )
    attention(query.shape, key.shape, value.shape, is_causal=True, device=device)
    triangle = torch.ones(queries, keys, dtype=torch.bool, device=device).tril()
    expected = TF.scaled_dot_product_attention(query, key, value, triangle)
    torch.testing.assert_close(F.scaled_dot_product_attention(query, key, value, is_causal=True), expected)


@pytest.mark.parametrize("head_dims", [(8, 3), (3, 8), (1, 1), (33, 65)], ids=str)
def test_value_width_differs(head_dims, device):
    attention((2, 2, 5, head_dims[0]), (2, 2, 7, head_dims[0]), (2, 2, 7, head_dims[1]), device=device)


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
def test_sizes_of_zero(shapes, is_causal, device):
    attention(*shapes, is_causal=is_causal, device=device)


def test_width_of_zero_is_a_mean(device):
    query, key, value = (
        torch.empty(1, 1, 4, 0, device=device),
        torch.empty(1, 1, 4, 0, device=device),
        torch.randn(1, 1, 4, 3, device=device),
    )
    out = F.scaled_dot_product_attention(query, key, value)
    torch.testing.assert_close(out, value.mean(-2, keepdim=True).expand(1, 1, 4, 3))


@pytest.mark.parametrize("scale", [0.0, -1.5, 1e-3, 2.0, None])
@pytest.mark.parametrize("is_causal", [False, True])
def test_scale(scale, is_causal, device):
    attention((2, 2, 5, 8), (2, 2, 7, 8), (2, 2, 7, 8), scale=scale, is_causal=is_causal, device=device)


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
def test_mask_of_every_broadcast(shape, kind, dtype, device):
    mask = torch.rand(shape, device=device) > 0.3 if kind == "bool" else torch.randn(shape, device=device).to(dtype)
    attention(
        (2, 3, 5, 8),
        (2, 3, 7, 8),
        (2, 3, 7, 8),
        attn_mask=mask.requires_grad_(kind == "with gradient"),
        dtype=dtype,
        device=device,
    )


def test_mask_of_one_dimension(device):
    """Torch's math backend takes it, its fused kernel does not."""
    query, key, value = (torch.randn(2, 3, n, 8, device=device) for n in (5, 7, 7))
    for mask in (torch.rand(7, device=device) > 0.3, torch.randn(7, device=device)):
        expected = in_math(TF.scaled_dot_product_attention)(query, key, value, mask)
        torch.testing.assert_close(F.scaled_dot_product_attention(query, key, value, mask), expected)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_mask_of_every_stride(layout, kind, device):
    mask = torch.rand(2, 3, 5, 7, device=device) > 0.3 if kind == "bool" else torch.randn(2, 3, 5, 7, device=device)
    query, key, value = (torch.randn(2, 3, n, 8, device=device) for n in (5, 7, 7))
    laid_out = lay_out(mask, layout)
    expected = TF.scaled_dot_product_attention(query, key, value, laid_out.contiguous())
    torch.testing.assert_close(F.scaled_dot_product_attention(query, key, value, laid_out), expected)


def test_mask_gradient_alone(device):
    """In torch's CUDA kernels this once read memory that was never written (pytorch issue 148476)."""
    mask = torch.randn(5, 7, requires_grad=True, device=device)
    query, key, value = (torch.randn(2, 3, n, 8, device=device) for n in (5, 7, 7))
    compare(F.scaled_dot_product_attention, in_math(TF.scaled_dot_product_attention), (query, key, value, mask), {})


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_float32_mask_beside_a_16_bit_query(dtype, device):
    query, key, value = (torch.randn(2, 3, n, 8, device=device).to(dtype).requires_grad_() for n in (5, 7, 7))
    for shape in ((5, 7), (2, 1, 1, 7)):
        mask = torch.randn(shape, device=device)
        ours = F.scaled_dot_product_attention(query, key, value, mask)
        truth = TF.scaled_dot_product_attention(query.double(), key.double(), value.double(), mask.double())
        plain = TF.scaled_dot_product_attention(query, key, value, mask.to(dtype))
        assert_close_to_float64(ours, plain, truth, name="out")


def test_fully_masked_rows_are_zero(device):
    for mask in (torch.zeros(5, 7, dtype=torch.bool, device=device), torch.full((5, 7), -INF, device=device)):
        mask[1] = True if mask.dtype == torch.bool else 0.0
        inputs = [torch.randn(2, 2, n, 8, requires_grad=True, device=device) for n in (5, 7, 7)]
        out = F.scaled_dot_product_attention(*inputs, mask)
        assert (out[:, :, [0, 2, 3, 4]] == 0).all() and (out[:, :, 1] != 0).any()
        grads = torch.autograd.grad(out.sum(), inputs)
        assert all(g.isfinite().all() for g in grads) and (grads[0][:, :, [0, 2, 3, 4]] == 0).all()
        compare(F.scaled_dot_product_attention, TF.scaled_dot_product_attention, inputs, {"attn_mask": mask})


def test_rows_masked_by_the_smallest_number(device):
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        mask = torch.full((5, 7), torch.finfo(dtype).min, dtype=dtype, device=device)
        mask[2, 3] = 0
        attention((2, 2, 5, 8), (2, 2, 7, 8), (2, 2, 7, 8), attn_mask=mask, dtype=dtype, device=device)


def test_nan_reaches_its_row(device):
    query, key, value = (torch.randn(1, 2, n, 8, device=device) for n in (5, 7, 7))
    query[0, 1, 3, 0] = math.nan
    out = F.scaled_dot_product_attention(query, key, value)
    assert out[0, 1, 3].isnan().all() and out.isnan().sum() == 8
    assert F.scaled_dot_product_attention(query, key, value, is_causal=True)[0, 1, 3].isnan().all()
    mask = torch.zeros(5, 7, device=device)
    mask[2, 4] = math.nan
    assert F.scaled_dot_product_attention(torch.randn(1, 2, 5, 8, device=device), key, value, mask)[:, :, 2].isnan().all()


def test_a_score_of_infinity_is_nan(device):
    query, key, value = (torch.randn(1, 1, n, 8, device=device) for n in (5, 7, 7))
    mask = torch.zeros(5, 7, device=device)
    mask[3, 2] = INF
    out = F.scaled_dot_product_attention(query, key, value, mask)
    assert out[0, 0, 3].isnan().all() and out.isnan().sum() == 8
    expected = TF.scaled_dot_product_attention(query, key, value, mask)
    assert torch.equal(out.isnan(), expected.isnan())


def test_out_has_the_querys_dtype_and_order_of_strides(device):
    query = torch.randn(2, 5, 3, 8, device=device).transpose(1, 2)
    key = value = torch.randn(2, 3, 7, 8, device=device)
    out = F.scaled_dot_product_attention(query, key, value)
    assert out.transpose(1, 2).is_contiguous()
    assert F.scaled_dot_product_attention(query.contiguous(), key, value).is_contiguous()
    assert F.scaled_dot_product_attention(query.half(), key.half(), value.half()).dtype == torch.float16


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(dtype, device):
    inputs = [torch.randn(2, 3, n, 8, device=device) for n in (5, 7, 7)]
    mask = torch.randn(5, 7, device=device)
    with torch.autocast(device, dtype):
        assert F.scaled_dot_product_attention(*inputs).dtype == TF.scaled_dot_product_attention(*inputs).dtype == dtype
        mixed = [inputs[0].to(dtype), inputs[1], inputs[2]]
        assert F.scaled_dot_product_attention(*mixed).dtype == dtype
        ours = F.scaled_dot_product_attention(*inputs, attn_mask=mask)
        logits, target = torch.randn(4, 9, device=device).to(dtype), torch.randint(0, 9, (4,), device=device)
        for function, args in (("softmax", (logits, 1)), ("log_softmax", (logits, 1)), ("cross_entropy", (logits, target))):
            assert getattr(F, function)(*args).dtype == getattr(TF, function)(*args).dtype, function
    torch.testing.assert_close(ours.float(), TF.scaled_dot_product_attention(*inputs, mask), rtol=2e-2, atol=2e-2)
    outside = [t.requires_grad_() for t in inputs]
    with torch.autocast(device, dtype):
        out = F.scaled_dot_product_attention(*outside)
    for t, g in zip(outside, torch.autograd.grad(out.sum(), outside), strict=True):
        assert g.dtype == t.dtype


def test_dropout_is_reproducible(device):
    inputs = [torch.randn(2, 3, n, 8, requires_grad=True, device=device) for n in (5, 7, 7)]

    def call():
        out = F.scaled_dot_product_attention(*inputs, dropout_p=0.5)
        return [out, *torch.autograd.grad(out.sum(), inputs)]

    torch.manual_seed(3)
    first, other = call(), call()
    torch.manual_seed(3)
    assert all(torch.equal(a, b) for a, b in zip(first, call(), strict=True))
    assert not torch.equal(first[0], other[0])


def test_dropout_of_one_is_zero(device):
    inputs = [torch.randn(2, 3, 5, 8, requires_grad=True, device=device) for _ in range(3)]
    out = F.scaled_dot_product_attention(*inputs, dropout_p=1.0)
    assert (out == 0).all() and all((g == 0).all() for g in torch.autograd.grad(out.sum(), inputs))


@pytest.mark.forwards  # float64 on CUDA
def test_attention_raises_as_torch(device):
    sdpa = "scaled_dot_product_attention"
    q = torch.randn(2, 4, 5, 8, device=device)
    mask = torch.ones(5, 5, dtype=torch.bool, device=device)
    both_raise(sdpa, q, q, q, mask, is_causal=True)
    both_raise(sdpa, q, q.double(), q)
    both_raise(sdpa, q, q.half(), q.half())
    both_raise(sdpa, q[0, 0, 0], q, q)
    both_raise(sdpa, q, q, q, mask.long())
    both_raise(sdpa, q, q, q, mask.double())
    both_raise(sdpa, q, q, q, mask.half())
    both_raise(sdpa, q, q, q, torch.ones(4, 5, dtype=torch.bool, device=device))
    both_raise(sdpa, q, q, q, torch.ones(3, 1, 5, 5, dtype=torch.bool, device=device))
    both_raise(sdpa, q, q[..., :7], q)
    both_raise(sdpa, q, q, q[:, :, :4])
    both_raise(sdpa, q, q[:, :2], q[:, :2])
    both_raise(sdpa, q, q[:, :3], q[:, :3], enable_gqa=True)
    both_raise(sdpa, q, torch.randn(3, 4, 5, 8, device=device), q)
    both_raise(sdpa, q, q, q, dropout_p=1.5)
    both_raise(sdpa, q.to("meta"), q, q)
    both_raise(sdpa, q.long(), q.long(), q.long())


def test_every_other_name_is_torchs():
    assert F.relu is TF.relu and F.linear is TF.linear
    assert {"softmax", "gelu", "cross_entropy"} <= set(dir(F))
    with pytest.raises(AttributeError):
        F.no_such_function  # noqa: B018
