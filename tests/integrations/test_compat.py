"""flash_online.compat: FlashAttention's functions against the float64 reference and torch, signatures, and what is refused."""

from __future__ import annotations

import inspect
import math

import pytest
import torch

import flash_online
from flash_online import InvalidArgument, reference
from flash_online.compat import bert_padding, flash_attn, flash_attn_cute, flash_attn_interface
from flash_online.testing import assert_close_to_float64, lay_out, random_tensor

HALF = [torch.float16, torch.bfloat16]
DTYPES = [*HALF, torch.float32, torch.float64]

# --- signatures: names, order and defaults of flash-attn 2.8.3, of the newest hopper/flash_attn_interface.py, of flash-attn-4

OPTIONS_2 = (
    "dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, "
    "deterministic=False, return_attn_probs=False"
)
PACKING = "cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k"
RAW_2 = "dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes"
DESCALE = "q_descale=None, k_descale=None, v_descale=None, window_size=(-1, -1), attention_chunk=0, softcap=0.0"
TUNING_3 = "num_splits=1, pack_gqa=None, deterministic=False, sm_margin=0, return_attn_probs=False"
OPTIONS_4 = (
    "softmax_scale=None, causal=False, window_size=(None, None), learnable_sink=None, softcap=0.0, num_splits=1, "
    "pack_gqa=None, deterministic=False, score_mod=None, score_mod_bwd=None, mask_mod=None"
)
GATHER_4 = "gather_bwd_recompute_p=False, gather_bwd_token_chunk=None"
SIGNATURES = {
    flash_attn: {
        "flash_attn_func": f"q, k, v, {OPTIONS_2}",
        "flash_attn_kvpacked_func": f"q, kv, {OPTIONS_2}",
        "flash_attn_qkvpacked_func": f"qkv, {OPTIONS_2}",
        "flash_attn_varlen_func": f"q, k, v, {PACKING}, {OPTIONS_2}, block_table=None",
        "flash_attn_varlen_kvpacked_func": f"q, kv, {PACKING}, {OPTIONS_2}",
        "flash_attn_varlen_qkvpacked_func": f"qkv, cu_seqlens, max_seqlen, {OPTIONS_2}",
        "flash_attn_with_kvcache": "q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None, "
        "cache_batch_idx=None, cache_leftpad=None, block_table=None, softmax_scale=None, causal=False, window_size=(-1, -1), "
        "softcap=0.0, rotary_interleaved=True, alibi_slopes=None, num_splits=0, return_softmax_lse=False",
        "_flash_attn_forward": f"q, k, v, {RAW_2}, return_softmax",
        "_flash_attn_backward": f"dout, q, k, v, out, softmax_lse, dq, dk, dv, {RAW_2}, deterministic, rng_state=None",
        "_flash_attn_varlen_forward": f"q, k, v, {PACKING}, dropout_p, softmax_scale, causal, window_size_left=-1, "
        "window_size_right=-1, softcap=0.0, alibi_slopes=None, return_softmax=False, block_table=None, leftpad_k=None, "
        "seqused_k=None, zero_tensors=False",
        "_flash_attn_varlen_backward": f"dout, q, k, v, out, softmax_lse, dq, dk, dv, {PACKING}, {RAW_2}, deterministic, "
        "rng_state=None, zero_tensors=False",
        "_get_block_size_n": "device, head_dim, is_dropout, is_causal",
    },
    flash_attn_interface: {
        "flash_attn_func": f"q, k, v, softmax_scale=None, causal=False, qv=None, {DESCALE}, {TUNING_3}",
        "flash_attn_varlen_func": f"q, k, v, {PACKING}, seqused_q=None, seqused_k=None, softmax_scale=None, causal=False, "
        f"qv=None, {DESCALE}, {TUNING_3}",
        "flash_attn_qkvpacked_func": f"qkv, softmax_scale=None, causal=False, {DESCALE}, deterministic=False, "
        "num_heads_q=None, sm_margin=0, return_attn_probs=False",
        "flash_attn_combine": "out_partial, lse_partial, out=None, out_dtype=None",
        "flash_attn_with_kvcache": "q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None, "
        "cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, page_table=None, cu_seqlens_q=None, "
        "cu_seqlens_k_new=None, max_seqlen_q=None, rotary_seqlens=None, q_descale=None, k_descale=None, v_descale=None, "
        "softmax_scale=None, causal=False, window_size=(-1, -1), attention_chunk=0, softcap=0.0, rotary_interleaved=True, "
        "scheduler_metadata=None, num_splits=0, pack_gqa=None, sm_margin=0, return_softmax_lse=False",
        "get_scheduler_metadata": "batch_size, max_seqlen_q, max_seqlen_k, num_heads_q, num_heads_kv, headdim, cache_seqlens, "
        "qkv_dtype=torch.bfloat16, headdim_v=None, cu_seqlens_q=None, cu_seqlens_k_new=None, cache_leftpad=None, "
        "page_size=None, max_seqlen_k_new=0, causal=False, window_size=(-1, -1), attention_chunk=0, has_softcap=False, "
        "num_splits=0, pack_gqa=None, sm_margin=0",
    },
    flash_attn_cute: {
        "flash_attn_func": f"q, k, v, qv=None, gather_kv_indices=None, {OPTIONS_4}, aux_tensors=None, aux_scalars=None, "
        f"block_sparse_tensors=None, block_sparse_tensors_bwd=None, return_lse=False, {GATHER_4}",
        "flash_attn_varlen_func": "q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, "
        "max_seqlen_k=None, min_seqlen_k=None, seqused_q=None, seqused_k=None, gather_kv_indices=None, page_table=None, "
        f"{OPTIONS_4}, block_sparse_tensors=None, aux_tensors=None, aux_scalars=None, return_lse=False, "
        f"scheduler_metadata=None, seqlen_k_per_split=None, disable_scheduler_metadata=False, {GATHER_4}",
    },
    bert_padding: {
        "unpad_input": "hidden_states, attention_mask, unused_mask=None",
        "unpad_input_for_concatenated_sequences": "hidden_states, attention_mask_in_length",
        "pad_input": "hidden_states, indices, batch, seqlen",
    },
}


def bare(signature: inspect.Signature) -> str:
    """A signature without annotations."""
    parameters = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    return str(signature.replace(parameters=parameters, return_annotation=inspect.Signature.empty))


@pytest.mark.parametrize("module", SIGNATURES, ids=lambda m: m.__name__.rpartition(".")[2])
def test_signatures_are_flash_attentions(module):
    for name, expected in SIGNATURES[module].items():
        assert bare(inspect.signature(getattr(module, name))) == f"({expected})", name
    public = {name for name in SIGNATURES[module] if not name.startswith("_")}
    assert public | ({n for n in module.__all__ if n.startswith("index_")}) == set(module.__all__)


# --- results ----------------------------------------------------------------------------------------------------------------


def dense_inputs(dtype, device, *, lengths=(37, 53), heads=(4, 2), dims=(16, 16), batch=2, layout="contiguous", seed=0):
    """q, k, v and a gradient of out, [batch, length, heads, head dim]."""
    g = torch.Generator().manual_seed(seed)
    shapes = ((lengths[0], heads[0], dims[0]), (lengths[1], heads[1], dims[0]), (lengths[1], heads[1], dims[1]))
    made = [random_tensor(batch, *shape, dtype=dtype, generator=g, device=device) for shape in shapes]
    grad = random_tensor(batch, lengths[0], heads[0], dims[1], dtype=dtype, generator=g, device=device)
    return [lay_out(t, layout) for t in made], grad


def expected_of(inputs, grad, dtype, **options):
    """out, lse and the gradients of (q, k, v, *more) by the reference, computed in `dtype`; FlashAttention's layout."""
    more = {name: t for name, t in options.items() if name == "sinks" and t is not None}
    leaves = [t.detach().to(dtype).requires_grad_() for t in (*inputs, *more.values())]
    q, k, v, *rest = leaves
    options |= dict(zip(more, rest, strict=True))
    out, lse = reference.attention(*(t.transpose(1, 2) for t in (q, k, v)), return_lse=True, **options)
    out = out.transpose(1, 2)
    return [out, lse, *torch.autograd.grad(out, leaves, grad.to(dtype))]


def assert_as_expected(results, inputs, grad, **options):
    """Compares [out, lse or None, gradients of inputs and sinks] with float64, by the tolerance of flash_online.testing."""
    dtype = inputs[0].dtype
    truth, plain = (expected_of(inputs, grad, d, **options) for d in (torch.float64, dtype))
    wide = expected_of(inputs, grad, torch.float32, **options) if dtype in HALF else plain
    for name, ours, t, p, w in zip(("out", "lse", "dq", "dk", "dv", "dsink"), results, truth, plain, wide, strict=False):
        if ours is not None:
            theirs = w if name in ("lse", "dsink") else p
            rounding = ours.dtype if name == "lse" else dtype
            assert_close_to_float64(ours, theirs, t, rounding, name=name, magnitude=1.0)


OPTIONS = {
    "plain": ({}, {}),
    "causal": ({"causal": True}, {"causal": True}),
    "window": ({"window_size": (9, 4)}, {"window": (9, 4)}),
    "window of -1 and a number": ({"window_size": (-1, 3)}, {"window": (None, 3)}),
    "window of None and a number": ({"window_size": (5, None)}, {"window": (5, None)}),
    "window as a tensor": ({"window_size": torch.tensor([7, 2])}, {"window": (7, 2)}),
    "no window at all": ({"window_size": None}, {}),
    "causal window": ({"causal": True, "window_size": (6, -1)}, {"causal": True, "window": (6, None)}),
    "softcap and scale": ({"softcap": 2.0, "softmax_scale": 0.9}, {"softcap": 2.0, "scale": 0.9}),
    "deterministic": ({"causal": True, "deterministic": True}, {"causal": True}),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OPTIONS)
def test_results_and_gradients(device, name, dtype):
    ours, theirs = OPTIONS[name]
    (q, k, v), grad = dense_inputs(dtype, device)
    leaves = [t.requires_grad_() for t in (q, k, v)]
    out, lse, weights = flash_attn.flash_attn_func(*leaves, **ours, return_attn_probs=True)
    assert out.shape == q.shape and out.is_contiguous() and lse.shape == (2, 4, 37) and weights.numel() == 0
    grads = torch.autograd.grad(out, leaves, grad)
    assert_as_expected([out, lse, *grads], (q, k, v), grad, alignment="lower_right", **theirs)
    alone = flash_attn.flash_attn_func(*leaves, **ours)
    third = flash_attn_interface.flash_attn_func(*leaves, **ours)
    fourth, _ = flash_attn_cute.flash_attn_func(*leaves, **ours)
    assert alone.is_contiguous() and torch.equal(alone, out) and torch.equal(third, out) and torch.equal(fourth, out)


# Lengths around a tile, none, one, more queries than keys (whose first see nothing); heads one per key, grouped, one key head.
SHAPES = [
    {"lengths": (0, 5)},
    {"lengths": (5, 0)},
    {"lengths": (1, 1)},
    {"lengths": (1, 65)},
    {"lengths": (65, 1)},
    {"lengths": (129, 64), "heads": (3, 3)},
    {"lengths": (64, 129), "heads": (6, 1)},
    {"lengths": (40, 40), "dims": (40, 24)},
    {"lengths": (33, 70), "dims": (59, 59), "layout": "sliced"},
    {"lengths": (33, 33), "dims": (8, 8), "layout": "strided"},
    {"lengths": (20, 30), "layout": "transposed"},
    {"batch": 0},
]


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_sizes_and_layouts(device, shape, dtype):
    (q, k, v), grad = dense_inputs(dtype, device, **shape)
    leaves = [t.requires_grad_() for t in (q, k, v)]
    for causal in (False, True):
        out, lse, _ = flash_attn.flash_attn_func(*leaves, causal=causal, return_attn_probs=True)
        grads = torch.autograd.grad(out, leaves, grad)
        assert_as_expected([out, lse, *grads], (q, k, v), grad, alignment="lower_right", causal=causal)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("per_sequence", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_alibi(device, dtype, per_sequence, causal):
    (q, k, v), grad = dense_inputs(dtype, device)
    slopes = torch.rand((2, 4) if per_sequence else (4,), device=device) * 0.3
    leaves = [t.requires_grad_() for t in (q, k, v)]
    out, lse, _ = flash_attn.flash_attn_func(*leaves, causal=causal, alibi_slopes=slopes, return_attn_probs=True)
    grads = torch.autograd.grad(out, leaves, grad)
    assert_as_expected([out, lse, *grads], (q, k, v), grad, alignment="lower_right", causal=causal, alibi_slopes=slopes)


def test_beside_torch(device):
    """Causal attention of equal lengths is torch's own."""
    (q, k, v), _ = dense_inputs(torch.float32, device, lengths=(48, 48), heads=(4, 4))
    expected = torch.nn.functional.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), is_causal=True)
    torch.testing.assert_close(flash_attn.flash_attn_func(q, k, v, causal=True).transpose(1, 2), expected)


@pytest.mark.parametrize("wanted", ["q", "k", "v", "kv"])
def test_gradients_of_some_inputs(device, wanted):
    (q, k, v), grad = dense_inputs(torch.float32, device)
    inputs = {"q": q, "k": k, "v": v}
    for name in wanted:
        inputs[name].requires_grad_()
    out = flash_attn.flash_attn_func(**inputs, causal=True)
    out.backward(grad)
    truth = expected_of((q, k, v), grad, torch.float64, causal=True, alignment="lower_right")
    for name, gradient in zip("qkv", truth[2:], strict=True):
        if name in wanted:
            torch.testing.assert_close(inputs[name].grad.double(), gradient, rtol=1e-4, atol=1e-5)
        else:
            assert inputs[name].grad is None


def test_the_lse_is_differentiable(device):
    (q, k, v), _ = dense_inputs(torch.float32, device)
    q.requires_grad_()
    _, lse, _ = flash_attn.flash_attn_func(q, k, v, return_attn_probs=True)
    (ours,) = torch.autograd.grad(lse.sum(), q)
    wide = q.detach().double().requires_grad_()
    _, truth = reference.attention(wide.transpose(1, 2), *(t.double().transpose(1, 2) for t in (k, v)), return_lse=True)
    torch.testing.assert_close(ours.double(), torch.autograd.grad(truth.sum(), wide)[0], rtol=1e-4, atol=1e-5)


def test_autocast(device):
    (q, k, v), _ = dense_inputs(torch.float32, device)
    with torch.autocast(device, torch.bfloat16):
        out = flash_attn.flash_attn_func(q, k, v)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, flash_attn.flash_attn_func(*(t.bfloat16() for t in (q, k, v))))


# --- packed together --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", HALF)
def test_packed_operands(device, dtype):
    (q, k, v), grad = dense_inputs(dtype, device, lengths=(33, 33), heads=(3, 3))
    starts = torch.tensor([0, 20, 33], dtype=torch.int32, device=device)
    options = {"causal": True, "window_size": (20, 0), "softcap": 5.0, "deterministic": True, "return_attn_probs": True}

    def run(function, *leaves, grad=grad):
        leaves = [t.detach().requires_grad_() if t.is_floating_point() else t for t in leaves if not isinstance(t, int)] + [
            t for t in leaves if isinstance(t, int)
        ]
        out, lse, _ = function(*leaves, **options)
        return out, lse, torch.autograd.grad(out, [t for t in leaves if torch.is_tensor(t) and t.requires_grad], grad)

    out, lse, (dq, dk, dv) = run(flash_attn.flash_attn_func, q, k, v)
    for function, leaves, expected in (
        (flash_attn.flash_attn_qkvpacked_func, [torch.stack([q, k, v], 2)], [torch.stack([dq, dk, dv], 2)]),
        (flash_attn.flash_attn_kvpacked_func, [q, torch.stack([k, v], 2)], [dq, torch.stack([dk, dv], 2)]),
    ):
        ours = run(function, *leaves)
        assert torch.equal(ours[0], out) and torch.equal(ours[1], lse)
        assert all(torch.equal(a, b) for a, b in zip(ours[2], expected, strict=True))

    q, k, v, grad = (t[0] for t in (q, k, v, grad))
    out, lse, (dq, dk, dv) = run(flash_attn.flash_attn_varlen_func, q, k, v, starts, starts, 20, 20, grad=grad)
    qkv, kv = torch.stack([q, k, v], 1), torch.stack([k, v], 1)
    for function, leaves, expected in (
        (flash_attn.flash_attn_varlen_qkvpacked_func, [qkv, starts, 20], [torch.stack([dq, dk, dv], 1)]),
        (flash_attn.flash_attn_varlen_kvpacked_func, [q, kv, starts, starts, 20, 20], [dq, torch.stack([dk, dv], 1)]),
    ):
        ours = run(function, *leaves, grad=grad)
        assert torch.equal(ours[0], out) and torch.equal(ours[1], lse)
        assert all(torch.equal(a, b) for a, b in zip(ours[2], expected, strict=True))


@pytest.mark.parametrize("grouped", [False, True])
def test_packed_operands_of_flash_attention_3(device, grouped):
    (q, k, v), grad = dense_inputs(torch.bfloat16, device, lengths=(20, 20), heads=(4, 2) if grouped else (3, 3))
    qkv = (torch.cat([q, k, v], 2) if grouped else torch.stack([q, k, v], 2)).requires_grad_()
    more = {"num_heads_q": 4} if grouped else {}
    options = {"causal": True, "deterministic": True, "return_attn_probs": True}
    out, lse = flash_attn_interface.flash_attn_qkvpacked_func(qkv, **options, **more)
    (gradient,) = torch.autograd.grad(out, qkv, grad)
    leaves = [t.requires_grad_() for t in (q, k, v)]
    expected, expected_lse = flash_attn_interface.flash_attn_func(*leaves, **options)
    grads = torch.autograd.grad(expected, leaves, grad)
    assert torch.equal(out, expected) and torch.equal(lse, expected_lse)
    assert torch.equal(gradient, torch.cat(grads, 2) if grouped else torch.stack(grads, 2))


# --- sequences of several lengths -------------------------------------------------------------------------------------------

LENGTHS = [(13, 17), (0, 4), (5, 0), (40, 40), (0, 0), (1, 33)]


def packed_inputs(dtype, device, heads=(4, 2), dim=16):
    g = torch.Generator().manual_seed(1)
    queries, keys = (sum(pair[i] for pair in LENGTHS) for i in range(2))
    q = random_tensor(queries, heads[0], dim, dtype=dtype, generator=g, device=device)
    k, v = (random_tensor(keys, heads[1], dim, dtype=dtype, generator=g, device=device) for _ in range(2))
    starts = [torch.tensor([0, *(p[i] for p in LENGTHS)]).cumsum(0).to(device, torch.int32) for i in range(2)]
    return q, k, v, starts, [max(p[i] for p in LENGTHS) for i in range(2)]


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("module", [flash_attn, flash_attn_interface, flash_attn_cute], ids=["2", "3", "4"])
def test_sequences_are_as_each_alone(device, dtype, module):
    q, k, v, starts, longest = packed_inputs(dtype, device)
    options = {"causal": True, "window_size": (12, -1), "softcap": 4.0}
    probs = {"return_lse" if module is flash_attn_cute else "return_attn_probs": True}
    names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
    packing = dict(zip(names, (*starts, *longest), strict=True))
    leaves = [t.requires_grad_() for t in (q, k, v)]
    out, lse, *_ = module.flash_attn_varlen_func(*leaves, **packing, **options, **probs)
    assert out.shape == q.shape and lse.shape == (4, q.shape[0])
    grad = torch.randn_like(out)
    grads = torch.autograd.grad(out, leaves, grad)
    begin = [0, 0]
    for lengths in LENGTHS:
        rows = [slice(first, first + n) for first, n in zip(begin, lengths, strict=True)]
        parts = [t[rows[i]].detach().unsqueeze(0) for t, i in ((q, 0), (k, 1), (v, 1))]
        found = [out[rows[0]], lse[:, rows[0]], grads[0][rows[0]], grads[1][rows[1]], grads[2][rows[1]]]
        rules = {"causal": True, "window": (12, None), "softcap": 4.0, "alignment": "lower_right"}
        assert_as_expected([t.unsqueeze(0) for t in found], parts, grad[rows[0]].unsqueeze(0), **rules)
        begin = [first + n for first, n in zip(begin, lengths, strict=True)]


@pytest.mark.parametrize("module", [flash_attn_interface, flash_attn_cute], ids=["3", "4"])
@pytest.mark.parametrize("sides", ["q", "k", "qk"])
def test_rows_that_are_not_used(device, module, sides):
    """seqused_*: as if the other rows were not there, whatever they hold, and gradients of 0 for them."""
    q, k, v, starts, longest = packed_inputs(torch.bfloat16, device)
    used = [torch.tensor([9, 0, 2, 40, 0, 1]), torch.tensor([5, 4, 0, 33, 0, 60])]  # 60 is more than the 33 that are there
    used = [u.to(device, torch.int32) if side in sides else None for u, side in zip(used, "qk", strict=True)]
    kept = []
    for start, count in zip(starts, used, strict=True):
        bounds = start.tolist()
        taken = [b - a for a, b in zip(bounds, bounds[1:], strict=False)] if count is None else count.tolist()
        rows = [torch.arange(a, min(a + n, b)) for a, b, n in zip(bounds, bounds[1:], taken, strict=False)]
        kept.append((torch.cat(rows).to(device), torch.tensor([0, *map(len, rows)]).cumsum(0).to(device, torch.int32)))
    (rows_q, starts_q), (rows_k, starts_k) = kept
    hidden_k = torch.ones(k.shape[0], dtype=torch.bool, device=device).index_fill(0, rows_k, False)
    k[hidden_k], v[hidden_k] = math.nan, math.nan
    names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
    options = {"causal": True, "deterministic": True}
    options |= {"return_lse": True} if module is flash_attn_cute else {"return_attn_probs": True}

    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    out, lse = module.flash_attn_varlen_func(
        *leaves, **dict(zip(names, (*starts, *longest), strict=True)), seqused_q=used[0], seqused_k=used[1], **options
    )
    grad = torch.randn_like(out)
    grads = torch.autograd.grad(out, leaves, grad)
    parts = [t[rows].detach().requires_grad_() for t, rows in ((q, rows_q), (k, rows_k), (v, rows_k))]
    expected, expected_lse = module.flash_attn_varlen_func(
        *parts, **dict(zip(names, (starts_q, starts_k, *longest), strict=True)), **options
    )
    expected_grads = torch.autograd.grad(expected, parts, grad[rows_q])

    torch.testing.assert_close(out, torch.zeros_like(out).index_copy(0, rows_q, expected), rtol=0, atol=0)
    torch.testing.assert_close(lse[:, rows_q], expected_lse, rtol=0, atol=0)
    for gradient, wanted, rows in zip(grads, expected_grads, (rows_q, rows_k, rows_k), strict=True):
        torch.testing.assert_close(gradient, torch.zeros_like(gradient).index_copy(0, rows, wanted), rtol=0, atol=0)


def test_padded_sequences_of_flash_attention_4(device):
    (q, k, v), grad = dense_inputs(torch.bfloat16, device, lengths=(20, 30))
    leaves = [t.requires_grad_() for t in (q, k, v)]
    used = torch.tensor([30, 11], dtype=torch.int32, device=device)
    out, lse = flash_attn_cute.flash_attn_varlen_func(*leaves, seqused_k=used, causal=True, return_lse=True)
    assert out.shape == q.shape and lse.shape == (2, 4, 20)
    grads = torch.autograd.grad(out, leaves, grad)
    for n, keys in enumerate((30, 11)):
        parts = [q[n : n + 1], k[n : n + 1, :keys], v[n : n + 1, :keys]]
        found = [out, lse, grads[0], grads[1][:, :keys], grads[2][:, :keys]]
        rules = {"causal": True, "alignment": "lower_right"}
        assert_as_expected([t[n : n + 1] for t in found], parts, grad[n : n + 1], **rules)
    assert not grads[1][1, 11:].any() and not grads[2][1, 11:].any()


# --- FlashAttention-4's sinks and returns, FlashAttention-3's merge ---------------------------------------------------------


@pytest.mark.parametrize("dtype", HALF)
def test_learnable_sink(device, dtype):
    (q, k, v), grad = dense_inputs(dtype, device)
    sink = torch.randn(4, device=device, dtype=dtype)
    leaves = [t.requires_grad_() for t in (q, k, v, sink)]
    out, lse = flash_attn_cute.flash_attn_func(q, k, v, causal=True, learnable_sink=sink, return_lse=True)
    grads = torch.autograd.grad(out, leaves, grad)
    assert_as_expected([out, lse, *grads], (q, k, v), grad, alignment="lower_right", causal=True, sinks=sink)


def test_what_flash_attention_4_returns(device):
    (q, k, v), _ = dense_inputs(torch.bfloat16, device)
    starts = torch.tensor([0, 37], dtype=torch.int32, device=device), torch.tensor([0, 53], dtype=torch.int32, device=device)
    for call in (
        lambda q, **options: flash_attn_cute.flash_attn_func(q, k, v, **options),
        lambda q, **options: flash_attn_cute.flash_attn_varlen_func(
            q[0], k[0], v[0], cu_seqlens_q=starts[0], cu_seqlens_k=starts[1], **options
        ),
    ):
        out, lse = call(q)
        assert lse is None
        again, lse = call(q, return_lse=True)
        assert torch.equal(again, out)
        wanted, detached = call(q.detach().requires_grad_())
        assert wanted.requires_grad and not detached.requires_grad and torch.equal(detached, lse)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_combine(device, dtype):
    (q, k, v), _ = dense_inputs(torch.float32, device, lengths=(20, 48))
    parts = [
        flash_attn_interface.flash_attn_func(q, k[:, i : i + 16], v[:, i : i + 16], return_attn_probs=True) for i in (0, 16, 32)
    ]
    outs, lses = torch.stack([out for out, _ in parts]), torch.stack([lse.transpose(1, 2) for _, lse in parts])
    out, lse = flash_attn_interface.flash_attn_combine(outs, lses, out_dtype=dtype)
    whole, whole_lse = flash_attn_interface.flash_attn_func(q, k, v, return_attn_probs=True)
    assert out.dtype == (dtype or torch.float32)
    torch.testing.assert_close(out, whole.to(out.dtype))
    torch.testing.assert_close(lse, whole_lse.transpose(1, 2))
    given = torch.empty_like(out)
    assert flash_attn_interface.flash_attn_combine(outs, lses, given, dtype)[0] is given and torch.equal(given, out)
    with pytest.raises(ValueError, match="out: expected .*, got"):
        flash_attn_interface.flash_attn_combine(outs, lses, given[1:], dtype)


# --- dropout ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (10, 3), "softcap": 3.0}], ids=str)
def test_dropout_and_its_pattern(device, dtype, options):
    """S_dmask shows the weights that were dropped, and the others up to a factor per row; a seed repeats all of it."""
    (q, k, v), grad = dense_inputs(dtype, device)
    leaves = [t.requires_grad_() for t in (q, k, v)]
    slopes = torch.rand(2, 4, device=device) * 0.2

    def run():
        torch.manual_seed(3)
        out, lse, weights = flash_attn.flash_attn_func(
            *leaves, 0.3, alibi_slopes=slopes, deterministic=True, return_attn_probs=True, **options
        )
        return out, lse, weights, *torch.autograd.grad(out, leaves, grad)

    out, lse, weights, *grads = run()
    assert all(torch.equal(a, b) for a, b in zip((out, lse, weights, *grads), run(), strict=True))
    assert weights.shape == (2, 4, 128, 128) and not weights[:, :, 37:].any() and not weights[..., 53:].any()
    weights = weights[:, :, :37, :53].double()
    rules = {"window" if name == "window_size" else name: value for name, value in options.items()}
    rules |= {"alignment": "lower_right", "alibi_slopes": slopes}
    visible = reference.visible(37, 53, **{n: x for n, x in rules.items() if n in ("causal", "window", "alignment")})
    keep = (weights >= 0) | ~visible.to(device)
    assert 0.25 < 1 - keep[:, :, visible].double().mean() < 0.35
    assert_as_expected([out, lse, *grads], (q, k, v), grad, dropout_p=0.3, keep=keep, **rules)
    identity = torch.eye(53, device=device, dtype=torch.float64).expand(2, 4, -1, -1)
    softmax = reference.attention(q.transpose(1, 2).double(), k.transpose(1, 2).double(), identity, **rules)
    torch.testing.assert_close(
        weights.abs() / weights.abs().sum(-1, keepdim=True).clamp(min=1e-30), softmax, rtol=0.02, atol=1e-3
    )


def test_dropout_of_packed_sequences(device):
    q, k, v, starts, longest = packed_inputs(torch.float32, device)
    torch.manual_seed(5)
    out, _, weights = flash_attn.flash_attn_varlen_func(q, k, v, *starts, *longest, 0.25, causal=True, return_attn_probs=True)
    assert weights.shape == (len(LENGTHS), 4, 128, 128)
    for n, (queries, keys) in enumerate(LENGTHS):
        rows, columns = (slice(s[n], s[n + 1]) for s in (s.tolist() for s in starts))
        keep = weights[n, :, :queries, :keys] >= 0
        parts = [t.transpose(0, 1).double() for t in (q[rows], k[columns], v[columns])]
        expected = reference.attention(*parts, causal=True, alignment="lower_right", dropout_p=0.25, keep=keep)
        torch.testing.assert_close(out[rows].transpose(0, 1).double(), expected, rtol=1e-4, atol=1e-5)


# --- the private functions that rings call ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dropout_p", [0.0, 0.2])
@pytest.mark.parametrize("options", [{}, {"softcap": 3.0, "alibi": True}], ids=["plain", "options"])
def test_a_ring_of_two_parts(device, dtype, dropout_p, options):
    """Forward over two parts of the keys, a merge, and the gradients of each part from the merged results."""
    (q, k, v), grad = dense_inputs(dtype, device, lengths=(40, 60))
    slopes = torch.rand(4, device=device) * 0.3 if options.get("alibi") else None
    raw = (dropout_p, 0.25, False, -1, -1, options.get("softcap", 0.0), slopes)
    keys = [slice(0, 30), slice(30, 60)]
    parts = [flash_attn._flash_attn_forward(q, k[:, s], v[:, s], *raw, True) for s in keys]
    out, lse = flash_online.merge_attention([p[0].transpose(1, 2) for p in parts], [p[1] for p in parts])
    out = out.transpose(1, 2)
    dq, dk, dv = torch.zeros_like(q), torch.full_like(k, math.nan), torch.full_like(v, math.nan)
    for s, (_, _, _, rng_state) in zip(keys, parts, strict=True):
        part = torch.full_like(q, math.nan)
        raw_grads = (part, dk[:, s], dv[:, s])
        flash_attn._flash_attn_backward(grad, q, k[:, s], v[:, s], out, lse, *raw_grads, *raw, False, rng_state)
        dq += part
    keep = None
    if dropout_p:
        keep = torch.cat([p[2][:, :, :40, :30] >= 0 for p in parts], -1)
    distance = [(torch.arange(40).unsqueeze(1) + 30 - 40 - torch.arange(30)).abs()] * 2  # a part counts from its own first key
    mask = None
    if slopes is not None:
        mask = -(slopes.double()[:, None, None] * torch.cat(distance, 1).to(device))

    def expected(to):
        leaves = [t.detach().to(to).requires_grad_() for t in (q, k, v)]
        more = {"mask": None if mask is None else mask.to(to), "softcap": raw[5], "scale": 0.25}
        result = reference.attention(*(t.transpose(1, 2) for t in leaves), dropout_p=dropout_p, keep=keep, **more)
        return [result, *torch.autograd.grad(result, leaves, grad.to(to).transpose(1, 2))]

    truth, plain = expected(torch.float64), expected(dtype)
    for name, ours, t, p in zip(("out", "dq", "dk", "dv"), (out.transpose(1, 2), dq, dk, dv), truth, plain, strict=True):
        assert_close_to_float64(ours, p, t, dtype, name=name)


@pytest.mark.parametrize("dtype", HALF)
def test_a_ring_of_packed_parts(device, dtype):
    """Every sequence's keys in two parts; one of them may be empty, and a query may see nothing at all."""
    q, k, v, (starts_q, starts_k), (longest_q, longest_k) = packed_inputs(dtype, device)
    half = (starts_k[:-1] + starts_k[1:]) // 2
    raw, grad = (0.0, 0.25, False, -1, -1, 0.0, None), torch.randn_like(q)
    bounds = [(starts_k[:-1], half), (half, starts_k[1:])]
    rows = [
        torch.cat([torch.arange(a, b) for a, b in zip(first.tolist(), last.tolist(), strict=True)]) for first, last in bounds
    ]
    starts = [torch.nn.functional.pad((last - first).cumsum(0, dtype=torch.int32), (1, 0)) for first, last in bounds]

    def packing(i):
        return starts_q, starts[i], longest_q, longest_k

    parts = [flash_attn._flash_attn_varlen_forward(q, k[r], v[r], *packing(i), *raw[:6]) for i, r in enumerate(rows)]
    out, lse = flash_online.merge_attention([p[0].transpose(0, 1) for p in parts], [p[1] for p in parts])
    out, dq, dk, dv = out.transpose(0, 1), torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for i, r in enumerate(rows):
        grads = [torch.full_like(t, math.nan) for t in (q, k[r], v[r])]
        flash_attn._flash_attn_varlen_backward(grad, q, k[r], v[r], out, lse, *grads, *packing(i), *raw, False)
        dq += grads[0]
        dk[r], dv[r] = grads[1], grads[2]

    def expected(to):
        leaves = [t.detach().to(to).requires_grad_() for t in (q, k, v)]
        result = reference.varlen_attention(*leaves, starts_q, starts_k, longest_q, longest_k, scale=0.25)
        return [result, *torch.autograd.grad(result, leaves, grad.to(to))]

    for name, ours, t, p in zip(
        ("out", "dq", "dk", "dv"), (out, dq, dk, dv), expected(torch.float64), expected(dtype), strict=True
    ):
        assert_close_to_float64(ours, p, t, dtype, name=name)


def test_the_raw_backward_needs_the_draw(device):
    (q, k, v), grad = dense_inputs(torch.float32, device)
    raw = (0.5, 0.25, False, -1, -1, 0.0, None)
    out, lse, _, rng_state = flash_attn._flash_attn_forward(q, k, v, *raw, False)
    assert rng_state.shape == (2,) and rng_state.dtype == torch.int64
    with pytest.raises(ValueError, match="rng_state: expected .*, got None"):
        flash_attn._flash_attn_backward(grad, q, k, v, out, lse, None, None, None, *raw, False)
    with pytest.raises(ValueError, match=r"softmax_lse: expected shape \[2, 4, 37\], got \[2, 4, 36\]"):
        flash_attn._flash_attn_backward(grad, q, k, v, out, lse[..., 1:], None, None, None, *raw, False, rng_state)


# --- torch.compile ----------------------------------------------------------------------------------------------------------


def test_compiled_in_one_graph(device):
    (q, k, v), _ = dense_inputs(torch.float32, device)
    starts = (
        torch.tensor([0, 37, 74], dtype=torch.int32, device=device),
        torch.tensor([0, 53, 106], dtype=torch.int32, device=device),
    )

    def call(q, k, v):
        dense = flash_attn.flash_attn_func(q, k, v, causal=True, window_size=(20, -1))
        second, _ = flash_attn_cute.flash_attn_func(q, k, v)
        packed = flash_attn.flash_attn_varlen_func(
            *(t.flatten(0, 1) for t in (q, k, v)), *starts, 37, 53, causal=True, window_size=(20, -1)
        )
        return dense, second, packed.view_as(dense)

    leaves = [t.requires_grad_() for t in (q, k, v)]
    eager = call(*leaves)
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")(*leaves)
    for ours, expected in zip(compiled, eager, strict=True):
        torch.testing.assert_close(ours, expected)
    torch.testing.assert_close(eager[2], eager[0])
    for ours, expected in zip(*(torch.autograd.grad(sum(r).sum(), leaves) for r in (compiled, eager)), strict=True):
        torch.testing.assert_close(ours, expected)


# --- what is refused --------------------------------------------------------------------------------------------------------

some = torch.ones(2)
REFUSED = [
    *((flash_attn_interface, "flash_attn_func", {name: some}) for name in ("qv", "q_descale", "k_descale", "v_descale")),
    (flash_attn_interface, "flash_attn_func", {"attention_chunk": 8}),
    (flash_attn_interface, "flash_attn_varlen_func", {"qv": some}),
    (flash_attn_interface, "flash_attn_varlen_func", {"attention_chunk": 8}),
    *((flash_attn_cute, "flash_attn_func", {name: some}) for name in ("qv", "gather_kv_indices", "block_sparse_tensors")),
    *((flash_attn_cute, "flash_attn_func", {name: len}) for name in ("score_mod", "score_mod_bwd", "mask_mod")),
    (flash_attn_cute, "flash_attn_func", {"aux_tensors": [some]}),
    (flash_attn_cute, "flash_attn_func", {"gather_bwd_recompute_p": True}),
    *((flash_attn_cute, "flash_attn_varlen_func", {name: some}) for name in ("gather_kv_indices", "scheduler_metadata")),
]


@pytest.mark.parametrize("module, name, given", REFUSED, ids=lambda x: next(iter(x)) if isinstance(x, dict) else None)
def test_refusals_name_the_argument(module, name, given):
    (q, k, v), _ = dense_inputs(torch.float32, "cpu")
    packing = () if "varlen" not in name or module is flash_attn_cute else (some, some, 1, 1)
    with pytest.raises(NotImplementedError, match=rf"^{name}: {next(iter(given))}: expected the default, got .*: \w+"):
        getattr(module, name)(q, k, v, *packing, **given)


@pytest.mark.parametrize("pages", [False, True])
@pytest.mark.parametrize("module", [flash_attn, flash_attn_interface])
def test_cached_keys(module, pages):
    """Layouts, positions and returns; the kernel itself is tested in tests/ops/test_kvcache.py."""
    q, k, v = (torch.randn(2, 3, heads, 16) for heads in (4, 2, 2))
    caches = [torch.randn(2, 32, 2, 16) for _ in range(2)]
    angles = torch.rand(40, 8) * 6
    lengths = torch.tensor([20, 5], dtype=torch.int32)
    options = {"cache_seqlens": lengths, "causal": True, "window_size": (9, -1), "softcap": 3.0, "softmax_scale": 0.3}
    expected_caches = [cache.transpose(1, 2).clone() for cache in caches]
    rotary = (angles.cos(), angles.sin(), True)
    expected, expected_lse = reference.kvcache_attention(
        *(q.transpose(1, 2), *expected_caches, lengths),
        **{"key": k.transpose(1, 2), "value": v.transpose(1, 2), "rotary": rotary, "window": (9, None), "softcap": 3.0},
        **{"scale": 0.3, "return_lse": True},
    )
    if pages:
        table = torch.tensor([[2, 0], [3, 1]], dtype=torch.int32)
        pools = [torch.empty(4, 16, 2, 16) for _ in range(2)]
        for pool, cache in zip(pools, caches, strict=True):
            for n in range(2):
                pool[table[n].long()] = cache[n].unflatten(0, (2, 16))
        options["block_table" if module is flash_attn else "page_table"], caches = table, pools
    out, lse = module.flash_attn_with_kvcache(
        *(q, *caches), k=k, v=v, rotary_cos=rotary[0], rotary_sin=rotary[1], return_softmax_lse=True, **options
    )
    torch.testing.assert_close(out.transpose(1, 2), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-4, atol=1e-5)
    if not pages:
        for cache, wanted in zip(caches, expected_caches, strict=True):
            torch.testing.assert_close(cache.transpose(1, 2), wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("module", [flash_attn, flash_attn_cute])
def test_packed_queries_over_pages(module):
    starts, lengths = torch.tensor([0, 3, 4], dtype=torch.int32), torch.tensor([20, 5], dtype=torch.int32)
    q, (k, v) = torch.randn(4, 4, 16), (torch.randn(4, 16, 2, 16) for _ in range(2))
    table = torch.tensor([[2, 0], [3, -1]], dtype=torch.int32)
    expected, expected_lse = reference.varlen_attention(
        *(q, k, v, starts, None, 3, 32), block_table=table, seqused_k=lengths, causal=True, window=(9, None), return_lse=True
    )
    options = {"causal": True, "window_size": (9, -1)}
    if module is flash_attn:
        ends = torch.tensor([0, 20, 25], dtype=torch.int32)
        options |= {"block_table": table, "return_attn_probs": True}
        out, lse, _ = module.flash_attn_varlen_func(q, k, v, starts, ends, 3, 20, **options)
    else:
        options |= {"page_table": table, "seqused_k": lengths, "return_lse": True}
        out, lse = module.flash_attn_varlen_func(q, k, v, cu_seqlens_q=starts, max_seqlen_q=3, **options)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-4, atol=1e-5)


def test_keys_in_pages_have_no_gradient():
    starts, q = torch.tensor([0, 3], dtype=torch.int32), torch.randn(3, 4, 16, requires_grad=True)
    pages, table = torch.randn(4, 16, 2, 16, requires_grad=True), torch.tensor([[2]], dtype=torch.int32)
    out = flash_attn.flash_attn_varlen_func(q, pages, pages, starts, starts, 3, 3, block_table=table)
    with pytest.raises(NotImplementedError, match="flash_attn_varlen_func: paged keys have no gradient"):
        out.sum().backward()


def _over_pages(q, pages):
    starts, table = torch.tensor([0, 3], dtype=torch.int32), torch.tensor([[2]], dtype=torch.int32)
    return flash_attn.flash_attn_varlen_func(q, pages, pages, starts, starts, 3, 3, block_table=table, causal=True)


def _over_page_table(q, pages):
    lengths, table = torch.tensor([3], dtype=torch.int32), torch.tensor([[2]], dtype=torch.int32)
    starts = torch.tensor([0, 3], dtype=torch.int32)
    options = {"page_table": table, "cu_seqlens_q": starts, "max_seqlen_q": 3}
    return flash_attn_interface.flash_attn_with_kvcache(q, pages, pages, cache_seqlens=lengths, **options)


def _over_a_cache(q, pages):
    lengths = torch.tensor([9], dtype=torch.int32)
    return flash_attn.flash_attn_with_kvcache(q[None], pages[:1], pages[:1], cache_seqlens=lengths, return_softmax_lse=True)[0]


def _with_sinks(q, pages):
    lengths, table = torch.tensor([3], dtype=torch.int32), torch.tensor([[2]], dtype=torch.int32)
    starts = torch.tensor([0, 3], dtype=torch.int32)
    options = {"max_seqlen_q": 3, "seqused_k": lengths, "page_table": table, "learnable_sink": q[0, :, 0]}
    return flash_attn_cute.flash_attn_varlen_func(q.detach(), pages.detach(), pages.detach(), cu_seqlens_q=starts, **options)[0]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("call", [_over_pages, _over_page_table, _over_a_cache, _with_sinks])
def test_the_forward_pass_over_cached_keys_takes_what_requires_a_gradient(call, compiled):
    """As FlashAttention's. The backward pass raises, also where torch.compile traces it before it runs."""
    q, pages = torch.randn(3, 4, 16, requires_grad=True), torch.randn(4, 16, 2, 16, requires_grad=True)
    wanted = call(q.detach(), pages.detach())
    assert not wanted.requires_grad
    function = torch.compile(call, fullgraph=True, backend="aot_eager") if compiled else call
    out = function(q, pages)
    assert torch.equal(out, wanted)
    with pytest.raises(NotImplementedError, match="(paged|cached) keys have no gradient"):
        out.sum().backward()
    assert q.grad is None and pages.grad is None


SINES = {"rotary_sin": torch.zeros(9, 40)}


def test_errors_of_cached_keys_have_flash_attentions_names():
    q, cache = torch.zeros(2, 1, 4, 16), torch.zeros(2, 9, 2, 16)
    for message, wrong in (
        (r"^q: expected k_cache's width 16, got 8", {"q": q[..., :8]}),
        (r"^k_cache, v_cache: expected .*got", {"v_cache": cache[:, :8]}),
        (r"^cache_leftpad: expected .*got", {"cache_leftpad": torch.zeros(2)}),
        (r"^cache_seqlens: expected .*, got None", {"k": cache[:, :1], "v": cache[:, :1], "cache_seqlens": None}),
        (r"^rotary_cos: expected k, ", {"rotary_cos": torch.zeros(9, 4), "rotary_sin": torch.zeros(9, 4)}),
        (r"^rotary_cos: .*got \[9, 40\]", {"k": cache[:, :1], "v": cache[:, :1], "rotary_cos": torch.zeros(9, 40)} | SINES),
        (r"^block_table: expected .*got", {"block_table": torch.zeros(2)}),
    ):
        arguments = {"q": q, "k_cache": cache, "v_cache": cache, "cache_seqlens": 3} | wrong
        with pytest.raises(InvalidArgument, match=message):
            flash_attn.flash_attn_with_kvcache(**arguments)
    for module in (flash_attn_interface, flash_attn_cute):
        with pytest.raises(InvalidArgument, match="^page_table: expected .*got"):
            if module is flash_attn_interface:
                module.flash_attn_with_kvcache(q, cache, cache, cache_seqlens=3, page_table=torch.zeros(2))
            else:
                starts = torch.tensor([0, 1, 2], dtype=torch.int32)
                options = {"seqused_k": starts[1:], "page_table": torch.zeros(2, 1)}
                module.flash_attn_varlen_func(q[:, 0], cache, cache, cu_seqlens_q=starts, max_seqlen_q=1, **options)
    with pytest.raises(NotImplementedError, match="flash_attn_with_kvcache: attention_chunk"):
        flash_attn_interface.flash_attn_with_kvcache(q, cache, cache, cache_seqlens=3, attention_chunk=4)


def test_neutral_arguments_have_no_effect():
    (q, k, v), _ = dense_inputs(torch.float32, "cpu")
    expected = flash_attn.flash_attn_func(q, k, v)
    assert torch.equal(flash_attn_interface.flash_attn_func(q, k, v, num_splits=0, pack_gqa=True, sm_margin=8), expected)
    assert torch.equal(flash_attn_cute.flash_attn_func(q, k, v, num_splits=3, pack_gqa=False, aux_scalars=None)[0], expected)


WRONG = [
    ({"q": torch.ones(3, 4, 8)}, r"q: expected shape \[batch, length, heads, head dim\], got \[3, 4, 8\]"),
    ({"k": torch.ones(2, 53, 2, 8)}, r"k: expected q's head dim 16 \(last dimension\), got 8"),
    ({"k": torch.ones(1, 53, 2, 16)}, r"k: expected q's batch 2 \(dimension 0\), got 1"),
    (
        {"k": torch.ones(2, 53, 3, 16), "v": torch.ones(2, 53, 3, 16)},
        r"k: expected a divisor of q's 4 heads \(dimension -2\), got 3",
    ),
    ({"v": torch.ones(2, 52, 2, 16)}, r"v: expected k's shape \[2, 53, 2, 16\] in all but the head dim, got \[2, 52, 2, 16\]"),
    ({"k": torch.ones(2, 53, 2, 16).half()}, "k: expected q's dtype torch.float32, got torch.float16"),
    ({"dropout_p": 1.5}, "dropout_p: expected .*got 1.5"),
    ({"softcap": -1.0}, "softcap: expected .*got -1.0"),
    ({"window_size": (1, 2, 3)}, r"window_size: expected .*, got \(1, 2, 3\)"),
    ({"window_size": (0.5, 1)}, "window_size: expected bounds that are int or None, got 0.5"),
    ({"alibi_slopes": torch.ones(3)}, r"alibi_slopes: .*got \[3\]"),
    ({"alibi_slopes": torch.ones(3, 4)}, r"alibi_slopes: expected \[4\] .*, got \[3, 4\]"),
]


@pytest.mark.parametrize("given, message", WRONG, ids=lambda x: None if isinstance(x, dict) else x.split(":")[0])
def test_errors_name_the_argument(given, message):
    (q, k, v), _ = dense_inputs(torch.float32, "cpu")
    with pytest.raises(ValueError, match=message):
        flash_attn.flash_attn_func(**{"q": q, "k": k, "v": v} | given)


def test_errors_of_types():
    (q, k, v), _ = dense_inputs(torch.float32, "cpu")
    with pytest.raises(TypeError, match="k: expected a Tensor, got None"):
        flash_attn.flash_attn_func(q, None, v)
    with pytest.raises(TypeError, match="softmax_scale: expected a float, got str"):
        flash_attn.flash_attn_func(q, k, v, softmax_scale="1")
    nested = torch.nested.nested_tensor([torch.ones(5, 2, 8), torch.ones(3, 2, 8)], layout=torch.strided)
    with pytest.raises(NotImplementedError, match="flash_online.attention: k: a nested tensor"):
        flash_attn.flash_attn_func(q, nested, nested)
    with pytest.raises(NotImplementedError, match="q: expected dtype .*got torch.int32"):
        flash_attn.flash_attn_func(q.int(), k.int(), v.int())
    with pytest.raises(ValueError, match=r"qkv: expected shape \[batch, length, 3, heads, head dim\], got \[2, 37, 4, 16\]"):
        flash_attn.flash_attn_qkvpacked_func(q)
    with pytest.raises(ValueError, match="cu_seqlens_q: expected .*got torch.int64"):
        flash_attn.flash_attn_varlen_func(q[0], k[0], v[0], torch.tensor([0, 37]), torch.tensor([0, 53]), 37, 53)
    with pytest.raises(ValueError, match=r"learnable_sink: expected .*, got \[2\]"):
        flash_attn_cute.flash_attn_func(q, k, v, learnable_sink=some)
    with pytest.raises(ValueError, match="num_heads_q: expected .*, got None"):
        flash_attn_interface.flash_attn_qkvpacked_func(q)
    starts = torch.tensor([0, 37], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"seqused_k: expected .*, got \[2\] torch.float32"):
        flash_attn_interface.flash_attn_varlen_func(q[0], k[0], v[0], starts, starts, 37, 37, seqused_k=some)


# --- padding ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [torch.bool, torch.int64])
def test_unpad_and_pad(device, kind):
    mask = torch.tensor([[1, 1, 0, 1], [0, 0, 0, 0], [1, 1, 1, 1]], device=device).to(kind)
    unused = torch.tensor([[0, 0, 1, 0], [0, 1, 0, 0], [0, 0, 0, 0]], device=device).to(kind)
    hidden = torch.randn(3, 4, 2, 5, device=device, requires_grad=True)
    tokens, indices, starts, longest, used = bert_padding.unpad_input(hidden, mask)
    assert torch.equal(tokens, hidden[mask.bool()]) and indices.tolist() == [0, 1, 3, 8, 9, 10, 11]
    assert starts.tolist() == [0, 3, 3, 7] and starts.dtype == used.dtype == torch.int32
    assert longest == 4 and type(longest) is int and used.tolist() == [3, 0, 4]
    padded = bert_padding.pad_input(tokens, indices, 3, 4)
    assert torch.equal(padded, hidden * mask.bool()[..., None, None])
    (gradient,) = torch.autograd.grad((padded * 3).sum(), hidden)
    assert torch.equal(gradient, 3.0 * mask.bool()[..., None, None].expand_as(hidden))
    tokens, indices, starts, longest, used = bert_padding.unpad_input(hidden, mask, unused)
    assert indices.tolist() == [0, 1, 2, 3, 5, 8, 9, 10, 11] and starts.tolist() == [0, 4, 5, 9]
    assert used.tolist() == [3, 0, 4] and longest == 4 and tokens.shape == (9, 2, 5)


def test_unpad_concatenated_sequences(device):
    lengths = torch.tensor([[2, 3, 0, 0, 0, 0], [3, 2, 0, 0, 0, 0], [6, 0, 0, 0, 0, 0]], device=device)
    hidden = torch.arange(18.0, device=device).view(3, 6, 1)
    tokens, indices, starts, longest = bert_padding.unpad_input_for_concatenated_sequences(hidden, lengths)
    assert indices.tolist() == [0, 1, 2, 3, 4, 6, 7, 8, 9, 10, 12, 13, 14, 15, 16, 17]
    assert starts.tolist() == [0, 2, 5, 8, 10, 16] and starts.dtype == torch.int32 and longest == 6
    assert torch.equal(tokens.flatten().long(), indices)


def test_index_functions(device):
    rows = torch.randn(6, 3, device=device, requires_grad=True)
    indices = torch.tensor([4, 0, 5], device=device)
    taken, residual = bert_padding.index_first_axis_residual(rows, indices)
    assert torch.equal(taken, rows[indices]) and torch.equal(residual, rows)
    (gradient,) = torch.autograd.grad(taken.sum() + 2 * residual.sum(), rows)
    assert gradient[:, 0].tolist() == [3, 2, 2, 2, 3, 3]
    put = bert_padding.index_put_first_axis(taken, indices, 6)
    assert torch.equal(put[indices], taken) and not put[[1, 2, 3]].any()


def test_padding_of_nothing(device):
    tokens, indices, starts, longest, _ = bert_padding.unpad_input(
        torch.ones(0, 3, 2, device=device), torch.ones(0, 3, device=device)
    )
    assert tokens.shape == (0, 2) and starts.tolist() == [0] and longest == 0
    assert bert_padding.pad_input(tokens, indices, 2, 3).shape == (2, 3, 2)


# --- python -m flash_online check flash_attn ----------------------------------------------------------------------------------


def test_the_check_passes_and_can_fail(monkeypatch):
    from flash_online.compat import _check

    lines: list[str] = []
    assert _check.check(lines.append)
    assert len(lines) >= 9 and not any("FAILED" in line for line in lines)
    right = flash_attn_interface.flash_attn_func
    monkeypatch.setattr(flash_attn_interface, "flash_attn_func", lambda q, k, v, causal: right(q, k, v))
    lines.clear()
    assert not _check.check(lines.append)
    assert "FAILED: flash_attn_interface.flash_attn_func(q=bfloat16[" in lines[-2]
    wrong = [line for line in lines[:-2] if "FAILED" in line]
    assert wrong and all(line.startswith("flash_attn_interface.flash_attn_func ") for line in wrong)

    def with_a_table(q, k, v, causal):
        return right(q, k, v, causal=causal) + (q.new_zeros(_check.QUERIES, _check.KEYS) + 0).sum()

    monkeypatch.setattr(flash_attn_interface, "flash_attn_func", with_a_table)
    lines.clear()
    assert not _check.check(lines.append)
    assert f"got one of {_check.QUERIES * _check.KEYS} elements" in lines[-2]
