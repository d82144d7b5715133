"""What torch knows of the operators: schemas, fakes, flop counts, vmap rules; and what rests on them: torch.compile, export,
autocast, selective checkpointing."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cases import DTYPES
from derivative_cases import CASES
from oracle import Operators
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

import flash_online
import flash_online.functional as F
from flash_online._copies import Copies
from flash_online._ops import accumulator_of, dense_strides_in_order

RAW = torch.ops.flash_online
TF = torch.nn.functional
PLAIN = (-1, -1, False, 0.5, 0.0, 0.0)  # window, alignment, scale, softcap, dropout_p
DROPPED = (3, 2, True, 0.5, 2.0, 0.25)


def transposed(*sizes, dtype):
    """[B, H, L, E] as it comes out of a projection: heads inside lengths."""
    b, h, n, e = sizes
    return torch.randn(b, n, h, e, dtype=dtype).transpose(1, 2)


def attention_tensors(dtype, layout):
    make = transposed if layout == "transposed" else lambda *sizes, dtype: torch.randn(*sizes, dtype=dtype)
    query, key, value = make(2, 4, 3, 8, dtype=dtype), make(2, 2, 5, 8, dtype=dtype), make(2, 1, 5, 6, dtype=dtype)
    if layout == "broadcast":
        query, key = query[:1].expand(2, -1, -1, -1), key[..., :1].expand(-1, -1, -1, 8)
    if layout == "empty":
        key, value = key[:, :, :0], value[:, :, :0]
    return query, key, value


def forward_arguments(dtype, layout, all_options):
    query, key, value = attention_tensors(dtype, layout)
    if not all_options:
        return query, key, value, None, None, None, None, *PLAIN
    accumulator = accumulator_of(dtype)
    mask = torch.randn(4, key.shape[-2], 3, dtype=dtype).mT.unsqueeze(0)  # shared by the batch; strides not in order
    slopes = torch.rand(4, dtype=accumulator).expand(2, 4)
    return query, key, value, mask, slopes, torch.randn(4, dtype=accumulator), torch.tensor([3, 4]), *DROPPED


def backward_arguments(dtype, layout, all_options):
    query, key, value, mask, slopes, sinks, rng, *options = forward_arguments(dtype, layout, all_options)
    out, lse, lse_low = RAW.attention_forward(query, key, value, mask, slopes, sinks, rng, *options)
    grads = torch.randn_like(out), torch.randn_like(lse) if all_options else None
    return *grads, query, key, value, mask, slopes, sinks, rng, out, lse, lse_low, *options, mask is not None, False


def varlen_forward_arguments(dtype, layout, all_options):
    make = (lambda t, h, e: torch.randn(h, t, e, dtype=dtype).transpose(0, 1)) if layout == "transposed" else None
    make = make or (lambda t, h, e: torch.randn(t, h, e, dtype=dtype))
    query, key, value = make(7, 4, 8), make(9, 2, 8), make(9, 1, 6)
    if layout == "broadcast":
        query, key = query[:1].expand(7, -1, -1), key[..., :1].expand(-1, -1, 8)
    if layout == "empty":
        key, value = key[:0], value[:0]
    starts = torch.tensor([0, 3, 3, 6], dtype=torch.int32), torch.tensor([0, 4, 5, 9], dtype=torch.int32)
    if not all_options:
        return query, key, value, *starts, None, None, None, 3, 4, *PLAIN
    accumulator = accumulator_of(dtype)
    slopes, sinks = torch.rand(4, dtype=accumulator).expand(3, 4), torch.randn(4, dtype=accumulator)
    return query, key, value, *starts, slopes, sinks, torch.tensor([3, 4]), 3, 4, *DROPPED


def varlen_backward_arguments(dtype, layout, all_options):
    *tensors, max_seqlen_q, max_seqlen_k = (arguments := varlen_forward_arguments(dtype, layout, all_options))[:10]
    out, lse, lse_low = RAW.attention_varlen_forward(*arguments)
    grads = torch.randn_like(out), torch.randn_like(lse) if all_options else None
    return *grads, *tensors, out, lse, lse_low, max_seqlen_q, max_seqlen_k, *arguments[10:], False


def parts(dtype):
    outs = [torch.randn(3, 2, 4, dtype=dtype), torch.randn(3, 4, 2, dtype=dtype).mT]
    return outs, [torch.randn(3, 2, dtype=accumulator_of(dtype)) for _ in outs]


def copies(dtype):
    """Five rows of two tensors, in one."""
    sources, plan = [torch.randn(4, 3, dtype=dtype).T, torch.randn(2, 4, dtype=dtype)], Copies()
    whole = torch.empty(5, 4, dtype=dtype, device="meta")
    result = plan.new(whole.shape, whole.stride(), 0)
    plan.add(0, torch.empty_like(sources[0], device="meta"), result, whole[:3])
    plan.add(1, torch.empty_like(sources[1], device="meta"), result, whole[3:])
    return sources, plan.plan()


def row_calls(dtype, layout):
    """(operator, arguments) of the row operators, over a middle and a last dimension."""
    x = torch.randn(3, 5, 4, dtype=dtype)
    if layout == "transposed":
        x = torch.randn(4, 5, 3, dtype=dtype).transpose(0, 2)
    elif layout == "broadcast":
        x = torch.randn(3, 1, 4, dtype=dtype).expand(3, 5, 4)
    elif layout == "empty":
        x = x[:0]
    accumulator = accumulator_of(dtype)
    rows, targets, weight = x[:, 0].to(accumulator), torch.arange(12).view(3, 4)[: len(x)] % 5, torch.rand(5, dtype=accumulator)
    probabilities = torch.rand(3, 5, 4, dtype=dtype)[: len(x)]
    for dim in (1, 2):
        for log in (False, True):
            yield RAW.softmax_forward, (x, dim, log, accumulator)
            yield RAW.softmax_forward, (x, dim, log, dtype)
            yield RAW.softmax_backward, (torch.rand_like(x), probabilities, dim, log, dtype)
        yield RAW.logsumexp_forward, (x, dim)
        for lse_dtype in (accumulator, dtype):
            yield RAW.logsumexp_forward, (x, dim, lse_dtype)
            yield RAW.logsumexp_backward, (x.select(dim, 0).to(lse_dtype), x, dim)
        for renormalize in (False, True):
            y, indices = RAW.topk_softmax_forward(x, 2, dim, renormalize, accumulator)
            yield RAW.topk_softmax_forward, (x, 2, dim, renormalize, accumulator)
            yield RAW.topk_softmax_backward, (torch.randn_like(y), y, indices, x, dim, renormalize)
    for factor in (1.0, 0.3):
        yield RAW.scale_, (x.contiguous().clone(), torch.tensor(factor, dtype=accumulator))
    for target in (targets, probabilities):
        soft = target is probabilities
        yield RAW.cross_entropy_forward, (x, target, weight, 2, 0.1)
        yield RAW.cross_entropy_backward, (rows, rows, x, target, weight, 2, 0.1, soft)
        yield RAW.cross_entropy_backward, (rows, None, x, target, None, -100, 0.0, False)
        *_, entropy = RAW.cross_entropy_forward(x, target, weight, 2, 0.1, True)
        yield RAW.cross_entropy_forward, (x, target, weight, 2, 0.1, True)
        yield RAW.cross_entropy_backward, (rows, rows, x, target, weight, 2, 0.1, soft, rows, entropy)
        for mean, options in ((True, (weight, 2, 0.1)), (False, (None, -100, 0.0))):
            loss, numbers = RAW.cross_entropy_loss(x, target, *options, mean, accumulator)
            yield RAW.cross_entropy_loss, (x, target, *options, mean, dtype)
            yield RAW.cross_entropy_loss, (x, target, *options, mean, accumulator)
            yield RAW.cross_entropy_loss_backward, (loss, numbers, x, target, *options)
        written = x.clone(memory_format=torch.preserve_format) if layout != "broadcast" else x.contiguous()
        yield RAW.cross_entropy_backward_, (rows, rows, written, target, weight, 2, 0.1, soft, True)
        yield RAW.cross_entropy_backward_, (rows, None, written, target, None, -100, 0.0, False, False)
        yield RAW.cross_entropy_backward_, (rows, rows, written, target, weight, 2, 0.1, soft, True, True, rows, entropy)
    # The classes of x are [3, 5, 4] logits here as well: of 3 rows of width 2, 5 classes and 4 positions.
    parameters = torch.randn(5, 4, 2, dtype=dtype), torch.randn(5, 4, dtype=dtype)
    hidden = (
        torch.randn(2, 3, dtype=dtype).t()[: len(x)] if layout == "transposed" else torch.randn(3, 2, dtype=dtype)[: len(x)]
    )
    for target, linear_bias in ((targets, None), (probabilities, parameters[1])):
        soft = target is probabilities
        wanted = [True, not soft, soft, soft]
        for scale, softcap, argmax in ((1.0, 0.0, False), (0.5, 2.0, True)):
            row_scale = torch.rand(len(hidden), dtype=accumulator) if argmax else None
            arguments = (hidden, parameters[0], linear_bias, target, weight, row_scale, 2, 0.1, dtype, scale, softcap)
            yield RAW.linear_cross_entropy_forward, (*arguments, argmax)
            yield RAW.linear_cross_entropy_backward, (*arguments, rows, rows, rows, wanted)
            yield RAW.linear_cross_entropy_backward, (*arguments, rows, None, None, [False, True, False, False])
            yield RAW.linear_cross_entropy_step, (*arguments, rows, None if soft else rows, wanted, argmax)
            entropy = RAW.linear_cross_entropy_forward(*arguments, argmax, True)[3]
            yield RAW.linear_cross_entropy_forward, (*arguments, argmax, True, 2)
            yield RAW.linear_cross_entropy_backward, (*arguments, rows, rows, rows, wanted, rows, entropy)
            yield RAW.linear_cross_entropy_step, (*arguments, rows, None, wanted, argmax, True, 2)
            yield RAW.linear_cross_entropy_reduced, (*arguments, 2 if soft else 1, 0.1, argmax, soft, 2)


def cached_calls(dtype, layout):
    """(operator, arguments) of those over cached keys: two sequences of pages of four keys."""
    shape = {"contiguous": (6, 2, 4, 8), "transposed": (6, 4, 2, 8), "broadcast": (6, 2, 4, 8), "empty": (0, 2, 4, 8)}[layout]
    key, value = torch.randn(shape, dtype=dtype), torch.randn(shape, dtype=dtype)
    if layout == "transposed":
        key, value = key.transpose(1, 2), value.transpose(1, 2)
    query, new = torch.randn(2, 4, 3, 8, dtype=dtype), torch.randn(2, 2, 3, 8, dtype=dtype)
    if layout == "broadcast":
        query, new = query[:1].expand(2, -1, -1, -1), new[..., :1].expand(-1, -1, -1, 8)
    lengths, table = torch.tensor([5, 2], dtype=torch.int32), torch.tensor([[0, 3, 1], [2, 5, -1]], dtype=torch.int32)
    nothing = (None,) * 7
    attend = (query, key, value, lengths, None, None, table, *nothing, 0, 3, 2, -1, True, 0.5, 2.0, 2)
    starts = torch.tensor([0, 1, 3], dtype=torch.int32)
    packed = (query[0].transpose(0, 1).contiguous(), key, value, lengths, lengths, None, table, starts, *nothing[1:])
    yield RAW.attention_cached, attend
    yield RAW.attention_cached, (*packed, 0, 2, -1, 0, True, 0.5, 0.0, 0)
    yield RAW.attention_cached_, (torch.empty(2, 4, 3, 8, dtype=dtype), *attend)
    yield RAW.attention_decode, (query, key, value, lengths, table, 2, 0.5, 2)
    angles = torch.rand(9, 2, dtype=dtype)
    where = (lengths, None, None, table, None, None, None)
    yield RAW.cache_append_, (key, value, new, new.clone(), query, *where, angles, angles.clone(), None, None, None, True, True)
    yield RAW.cache_append_, (key, value, new, new.clone(), None, *where, None, None, None, None, None, False, True)


def float8_calls(dtype, layout):
    query, key, _ = attention_tensors(dtype, layout)
    value = torch.randn(2, 2, key.shape[-2], 6, dtype=dtype)
    spans = torch.tensor([[0, 4]] * 3, dtype=torch.int32).expand(1, 4, 3, 2), torch.tensor([[1, 3]] * 5, dtype=torch.int32)
    spans = spans[0], spans[1].expand(2, 1, 5, 2)[:, :, : key.shape[-2]]
    plain = (-1, -1, False, None, None, 0.0, None, 0.5)
    yield RAW.float8_attention, (query, key, value, None, None, None, True, *plain, dtype, False)
    narrow = (t.to(torch.float8_e4m3fn) for t in (query, key, value))
    scales = torch.rand(2, 2), torch.rand(2, 1).expand(2, 2), torch.rand(()).expand(2, 2)
    options = (2, 1, True, *spans, 2.0, torch.randn(4), None)
    yield RAW.float8_attention, (*narrow, *scales, False, *options, torch.bfloat16, True)


def calls(dtype, layout):
    for all_options in (False, True):
        for operator in (RAW.attention_forward, RAW.attention_forward_with_max_logit):
            yield operator, forward_arguments(dtype, layout, all_options)
        yield RAW.attention_backward, backward_arguments(dtype, layout, all_options)
        plain = forward_arguments(dtype, layout, False)[:3]
        yield RAW.attention_inference, (*plain, all_options, 0.5)
        *tensors, _, left, right, lower_right, scale, softcap, _ = forward_arguments(dtype, layout, all_options)
        yield RAW.attention_inference_with_options, (*tensors, left, right, lower_right, scale, softcap)
        yield RAW.attention_training, (*plain, all_options, 0.5)
        out, stats = RAW.attention_training(*plain, all_options, 0.5)
        yield RAW.attention_training_backward, (torch.randn_like(out), *plain, out, stats, all_options, 0.5, False)
        for operator in (RAW.attention_varlen_forward, RAW.attention_varlen_forward_with_max_logit):
            yield operator, varlen_forward_arguments(dtype, layout, all_options)
        yield RAW.attention_varlen_backward, varlen_backward_arguments(dtype, layout, all_options)
    query, key, _ = attention_tensors(dtype, layout)
    for visible in ((-1, 0, False, -1), (2, 1, True, 2)):
        yield RAW.attention_weight_sums, (query, key, query[..., 0].to(accumulator_of(dtype)), *visible, 0.5, 2.0)
    yield from float8_calls(dtype if dtype.itemsize == 2 else torch.bfloat16, layout)
    outs, lses = parts(dtype)
    yield RAW.attention_dropout_mask, (torch.tensor([1, 2]), 1, 2, 3, 1, 4, 5, 0.5)
    counts, indices = torch.tensor([[2, 0]], dtype=torch.int32), torch.tensor([[[0, 2, 9], [1, 1, 1]]], dtype=torch.int32)
    yield RAW.block_tiles, (counts, indices, 128, 64, 200, 190)
    yield RAW.block_means, (query, key, 64, 128)
    yield RAW.block_maxima, (query, key, 64, 128, True, 0.5)
    yield RAW.block_topk, (torch.randn(2, 3, 4), 2, True, 64, 128)
    yield RAW.attention_merge, (outs, lses)
    yield RAW.attention_merge_backward, (torch.randn_like(outs[0]), torch.randn_like(lses[0]), outs, lses)
    yield RAW.copy_blocks, copies(dtype)
    yield from cached_calls(dtype, layout)
    yield from row_calls(dtype, layout)


LAYOUTS = ["contiguous", "transposed", "broadcast", "empty"]


def names():
    """Every operator of the library that has tensors: torch_sdpa_register is a switch, and with it come torch's own kernels,
    under names that begin with kept_."""
    schemas = (schema.name for schema in torch._C._jit_get_all_schemas())
    ours = {name.removeprefix("flash_online::") for name in schemas if name.startswith("flash_online::")}
    return {name for name in ours if name != "torch_sdpa_register" and not name.startswith("kept_")}


def test_every_operator_is_checked_here():
    assert {op._qualified_op_name.split("::")[1] for op, _ in calls(torch.float32, "contiguous")} == names()


def calls_of(name, dtype, layout):
    found = [call for call in calls(dtype, layout) if call[0]._qualified_op_name == f"flash_online::{name}"]
    assert found, f"no call of {name} in {dtype}, {layout}"
    return found


@pytest.mark.parametrize("name", sorted(names()))
def test_opcheck(name):
    """torch's own checks but for tracing: nothing is written, nothing aliases, fakes are right."""
    for dtype in DTYPES:
        for layout in LAYOUTS:
            for op, arguments in calls_of(name, dtype, layout):
                checks = ["test_schema", "test_faketensor", "test_autograd_registration"]
                if any(isinstance(a, torch.Tensor) and a.dtype == torch.float8_e4m3fn for a in arguments):
                    del checks[0]  # it compares tensors with torch.allclose, which does not take float8
                torch.library.opcheck(op.default, arguments, test_utils=checks)


@pytest.mark.parametrize("count", [pytest.param(1, id="one call"), pytest.param(None, id="all calls", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", sorted(names()))
def test_opcheck_of_tracing(name, count):
    for op, arguments in calls_of(name, torch.float32, "transposed")[:count]:
        torch.library.opcheck(op.default, arguments, test_utils="test_aot_dispatch_dynamic")


def is_floating(value):
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def test_operators_have_a_derivative_or_say_that_they_have_none():
    """test_matrix.py differentiates its cases; whatever is none of them refuses inputs that require grad."""
    cases = {case.split()[1] for case in CASES if case.startswith("raw ")}
    refused = {name for name in names() if name not in cases} - {
        "attention_dropout_mask",
        "block_tiles",
    }  # without a floating input
    assert refused
    for op, arguments in calls(torch.float32, "contiguous"):
        if op._qualified_op_name.split("::")[1] in refused:
            leaves = tree_map_only(torch.Tensor, lambda t: t.detach().requires_grad_() if is_floating(t) else t, arguments)
            with pytest.raises(NotImplementedError, match="without a derivative"):
                op(*leaves)


def metadata(results):
    return [(t.dtype, tuple(t.shape), t.stride()) for t in tree_leaves(results) if t is not None]


@pytest.mark.thin(4)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_fakes_have_the_results_strides(dtype, layout):
    for op, arguments in calls(dtype, layout):
        mode = FakeTensorMode()
        with mode:
            fake = op(*tree_map_only(torch.Tensor, mode.from_tensor, arguments))
        assert metadata(fake) == metadata(op(*arguments)), op


def test_dense_strides_in_order():
    for sizes, strides, expected in (
        ((2, 3, 4), (12, 4, 1), (12, 4, 1)),
        ((2, 3, 4), (4, 8, 1), (4, 8, 1)),
        ((2, 3, 5), (1, 2, 6), (1, 2, 6)),
        ((2, 3, 4), (0, 4, 1), (12, 4, 1)),
        ((2, 3, 4), (0, 0, 0), (12, 4, 1)),
        ((2, 1, 4), (4, 4, 1), (4, 4, 1)),
        ((2, 0, 4), (0, 4, 1), (4, 4, 1)),
        ((), (), ()),
    ):
        assert tuple(dense_strides_in_order(sizes, strides)) == expected, (sizes, strides)


# --- flops ------------------------------------------------------------------------------------------------------------------


def test_flops_are_torchs():
    """Causal attention counts in full and the backward pass as five products, as for torch's kernels."""
    query, key = (torch.randn(2, 4, 6, 8, requires_grad=True) for _ in range(2))
    counts = []
    for function in (F.scaled_dot_product_attention, TF.scaled_dot_product_attention):
        with FlopCounterMode(display=False) as counter:
            function(query, key, key, is_causal=True).sum().backward()
        counts.append(counter.get_total_flops())
    assert counts[0] == 7 * 2 * (2 * 4 * 6 * 6 * 8)
    assert counts[1] in (0, counts[0])  # 0 where torch has no formula for the kernel of this device


def test_flops_of_grouped_heads_and_of_rows():
    query, key, value = torch.randn(2, 4, 3, 8), torch.randn(2, 2, 5, 8), torch.randn(2, 1, 5, 6)
    with FlopCounterMode(display=False) as counter:
        flash_online.attention(query, key, value)
        F.softmax(query, -1)
    assert counter.get_total_flops() == 2 * (2 * 4 * 3 * 5) * (8 + 6)


def test_flops_of_packed_sequences():
    """Those of a dense call on each sequence; without data, as torch counts, the longest for all."""
    query, key, value = leaf(7, 4, 8), leaf(9, 2, 8), leaf(9, 2, 6)
    starts = torch.tensor([0, 3, 3, 6], dtype=torch.int32), torch.tensor([0, 4, 5, 9], dtype=torch.int32)
    with FlopCounterMode(display=False) as counter:
        flash_online.varlen_attention(query, key, value, *starts, 3, 4).sum().backward()
    rectangles = 4 * (3 * 4 + 0 * 1 + 3 * 4)
    assert counter.get_total_flops() == 2 * rectangles * (8 + 6) + 2 * rectangles * (3 * 8 + 2 * 6)
    mode = FakeTensorMode()
    fake = tree_map_only(torch.Tensor, mode.from_tensor, (query.detach(), key.detach(), value.detach(), *starts))
    with mode, FlopCounterMode(display=False) as counter:
        flash_online.varlen_attention(*fake, 3, 4)
    assert counter.get_total_flops() == 2 * 4 * (3 * 3 * 4) * (8 + 6)


def test_flops_of_a_linear_cross_entropy():
    """Three products where the gradients are made on the way forward, four where they are not, one alone."""
    x, w, target = leaf(6, 4), leaf(5, 4), torch.tensor([0, 1, 2, 3, 4, 0])
    for reduction, products in (("mean", 3), ("none", 4)):
        for options in ({}, {"softcap": 2.0, "scale": 0.5}):
            with FlopCounterMode(display=False) as counter:
                flash_online.linear_cross_entropy(x, w, target, reduction=reduction, **options).sum().backward()
            assert counter.get_total_flops() == products * 2 * 6 * 4 * 5
        with FlopCounterMode(display=False) as counter:
            F.linear_cross_entropy(x, w, target, reduction=reduction).sum().backward()
        assert counter.get_total_flops() == products * 2 * 6 * 4 * 5
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        F.linear_cross_entropy(x, w, target)
    assert counter.get_total_flops() == 2 * 6 * 4 * 5


# --- torch.compile ----------------------------------------------------------------------------------------------------------


def leaf(*sizes, dtype=torch.float32):
    return torch.randn(*sizes, dtype=dtype, requires_grad=True)


QKV = (leaf(2, 4, 3, 8), leaf(2, 2, 5, 8), leaf(2, 2, 5, 6))
TARGET = torch.tensor([[0, 1, 2, 3, 0], [-100, 1, 1, 1, 1], [3, 2, 1, 0, -100]])
WEIGHT = torch.tensor([0.5, 1.0, 2.0, 0.25])
STARTS = torch.tensor([0, 3, 3, 6], dtype=torch.int32)


def all_of_attention(query, key, value, sinks, mask):
    return flash_online.attention(
        *(query, key, value),
        mask=mask,
        causal=True,
        window=(2, 1),
        alignment="lower_right",
        softcap=3.0,
        sinks=sinks,
        alibi_slopes=torch.ones(4),
        return_lse=True,
    )


def autocast_region(query, key, value, x):
    with torch.autocast("cpu", torch.bfloat16):
        attended = F.scaled_dot_product_attention(query, key, value, enable_gqa=True)
        return attended, F.softmax(x, 1), F.cross_entropy(x.bfloat16(), TARGET)


COMPILED = {
    "causal, grouped": (lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True), QKV),
    "float mask": (
        lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, m, enable_gqa=True),
        (*QKV, leaf(3, 5)),
    ),
    "one tensor three times": (lambda q: F.scaled_dot_product_attention(q, q, q, is_causal=True), QKV[:1]),
    "two dimensions": (lambda q, k, v: F.scaled_dot_product_attention(q[0, 0], k[0, 0], v[0, 0]), QKV),
    "broadcast": (lambda q, k, v: F.scaled_dot_product_attention(q, k[:1], v, enable_gqa=True), QKV),
    "dropout": (lambda q, k, v: F.scaled_dot_product_attention(q, k, v, dropout_p=0.3, enable_gqa=True), QKV),
    "no keys": (lambda q, k, v: F.scaled_dot_product_attention(q, k[:, :, :0], v[:, :, :0]), QKV),
    "all of attention": (all_of_attention, (*QKV, leaf(4), leaf(3, 5))),
    "packed": (
        lambda q, k, v, s: flash_online.varlen_attention(
            *(q, k, v, STARTS, STARTS, 3, 3),
            causal=True,
            window=(2, 1),
            softcap=3.0,
            sinks=s,
            alibi_slopes=torch.ones(4),
            return_lse=True,
        ),
        (leaf(7, 4, 8), leaf(7, 2, 8), leaf(7, 2, 6), leaf(4)),
    ),
    "packed dropout": (
        lambda q, k, v: flash_online.varlen_attention(q, k, v, STARTS, STARTS, 3, 3, dropout_p=0.3),
        (leaf(7, 4, 8), leaf(7, 2, 8), leaf(7, 2, 6)),
    ),
    "merge": (
        lambda a, b, la, lb: flash_online.merge_attention([a, b], [la, lb]),
        (leaf(2, 3, 4), leaf(2, 3, 4), leaf(2, 3), leaf(2, 3)),
    ),
    "softmax": (
        lambda x: (F.softmax(x, 1), F.softmax(x, -1, dtype=torch.float64), flash_online.softmax(x.half(), 0, torch.float32)),
        (leaf(3, 4, 5),),
    ),
    "log_softmax": (lambda x: (F.log_softmax(x, 1), flash_online.log_softmax(x, -1)), (leaf(3, 4, 5),)),
    "logsumexp": (
        lambda x: (flash_online.logsumexp(x, 1), flash_online.logsumexp(x, (0, 2), keepdim=True)),
        (leaf(3, 4, 5),),
    ),
    "top k": (lambda x: flash_online.topk_softmax(x, 2, 1, renormalize=True), (leaf(3, 4, 5),)),
    "cross-entropy": (lambda x: F.cross_entropy(x, TARGET, WEIGHT, label_smoothing=0.1), (leaf(3, 4, 5),)),
    "z-loss": (
        lambda x: flash_online.cross_entropy(x, TARGET, WEIGHT, z_loss=0.1, return_lse=True),
        (leaf(3, 4, 5),),
    ),
    "linear cross-entropy": (
        lambda x, w, b: F.linear_cross_entropy(x, w, TARGET[0, :4].clone(), linear_bias=b, label_smoothing=0.1),
        (leaf(4, 3), leaf(6, 3), leaf(6)),
    ),
    "probabilities": (lambda x, p: F.cross_entropy(x, p.softmax(1)), (leaf(3, 4, 5), leaf(3, 4, 5))),
    "autocast": (autocast_region, (*QKV, leaf(3, 4, 5))),
}


def results_and_gradients(function, leaves):
    torch.manual_seed(5)
    results = function(*leaves)
    results = results if isinstance(results, tuple) else (results,)
    floating = [t for t in results if t.requires_grad]
    return *results, *torch.autograd.grad(floating, leaves, [torch.ones_like(t) for t in floating], allow_unused=True)


@pytest.mark.thin(2)
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", COMPILED)
def test_compile(name, dynamic):
    """One graph, the eager results and gradients, the eager strides."""
    function, leaves = COMPILED[name]
    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for ours, expected in zip(results_and_gradients(compiled, leaves), results_and_gradients(function, leaves), strict=True):
        torch.testing.assert_close(ours, expected, check_stride=True)


def test_dynamic_shapes_compile_once():
    count = 0

    def backend(graph, inputs):
        nonlocal count
        count += 1
        return graph.forward

    torch._dynamo.reset()
    attend = torch.compile(lambda q, k: F.scaled_dot_product_attention(q, k, k), fullgraph=True, dynamic=True, backend=backend)
    loss = torch.compile(lambda x, t: F.cross_entropy(x, t), fullgraph=True, dynamic=True, backend=backend)
    for n in (3, 5, 8):
        query, key, logits, target = (
            torch.randn(2, 2, n, 4),
            torch.randn(2, 2, n + 2, 4),
            torch.randn(n, 7),
            torch.arange(n) % 7,
        )
        torch.testing.assert_close(attend(query, key), F.scaled_dot_product_attention(query, key, key))
        torch.testing.assert_close(loss(logits, target), F.cross_entropy(logits, target))
    assert count == 2


@pytest.mark.skipif(shutil.which("g++") is None and shutil.which("clang++") is None, reason="Inductor needs a C++ compiler")
def test_inductor():
    """Inductor believes the fakes' strides, fuses around the operators and saves what autograd asks for."""

    def step(query, key, value):
        attended = F.scaled_dot_product_attention(query * 2, key, value, is_causal=True).transpose(1, 2)
        return F.cross_entropy(attended.flatten(2).transpose(1, 2), TARGET[:2, :3])

    leaves = [torch.randn(2, 3, 2, 4).transpose(1, 2).requires_grad_() for _ in range(3)]
    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True)
    for ours, expected in zip(results_and_gradients(compiled, leaves), results_and_gradients(step, leaves), strict=True):
        torch.testing.assert_close(ours, expected)


# --- export, checkpointing, modes -------------------------------------------------------------------------------------------


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.project = torch.nn.Linear(8, 24)

    def forward(self, x, target):
        query, key, value = self.project(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).flatten(2)
        return F.cross_entropy(attended.flatten(0, 1), target.flatten()), F.softmax(attended, -1)


@pytest.mark.parametrize("strict", [False, True])
def test_export(strict):
    model, x, target = Model(), torch.randn(2, 5, 8), torch.randint(0, 8, (2, 5))
    length = torch.export.Dim("length", min=2, max=64)
    program = torch.export.export(model, (x, target), dynamic_shapes=({1: length}, {1: length}), strict=strict)
    program = program.run_decompositions()
    called = {str(node.target) for node in program.graph.nodes}
    assert {f"flash_online.{op}.default" for op in ("attention_forward", "cross_entropy_forward", "softmax_forward")} <= called
    for n in (5, 9):
        x, target = torch.randn(2, n, 8), torch.randint(0, 8, (2, n))
        torch.testing.assert_close(program.module()(x, target), model(x, target))


@pytest.mark.parametrize("dropout_p, operator", [(0.25, "attention_forward"), (0.0, "attention_training")])
@pytest.mark.parametrize("save", [[], flash_online.SAC_SAVE_OPS], ids=["recompute", "save"])
def test_selective_checkpointing(save, dropout_p, operator):
    query, key, value = (leaf(1, 2, 5, 4) for _ in range(3))

    def block(query, key, value):
        return F.scaled_dot_product_attention(query * 1.5, key, value, dropout_p=dropout_p).square().sum()

    torch.manual_seed(1)
    expected = torch.autograd.grad(block(query, key, value), (query, key, value))
    torch.manual_seed(1)
    with Operators() as counter:
        result = checkpoint(
            block, *(query, key, value), use_reentrant=False, context_fn=lambda: create_selective_checkpoint_contexts(save)
        )
        torch.testing.assert_close(torch.autograd.grad(result, (query, key, value)), expected)
    assert counter.names.count(operator) == (1 if save else 2)


def test_inside_a_device_context():
    """A mode that sees every torch function, such as torch.device's, is no reason to leave our kernels."""
    with torch.device("cpu"), Operators() as counter:
        F.softmax(torch.randn(2, 3), 1)
    assert counter.names == ["softmax_forward"]


def test_parameters_and_buffers_are_ordinary():
    with Operators() as counter:
        assert type(F.softmax(torch.nn.Parameter(torch.randn(2, 3)), 1)) is torch.Tensor
        F.log_softmax(torch.nn.Buffer(torch.randn(2, 3)), 1)
    assert counter.names == ["softmax_forward"] * 2


@pytest.mark.parametrize("lower", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", DTYPES)
def test_autocast_casts_as_torch(dtype, lower):
    """Result dtypes and gradient dtypes of every drop-in under CPU autocast; a float mask is cast with the rest."""
    query, key, value = (leaf(2, 2, 4, 8, dtype=dtype) for _ in range(3))
    mask, logits, target = leaf(4, 4, dtype=dtype), leaf(3, 5, dtype=dtype), torch.tensor([0, 4, 2])
    cases = {
        "attention": (lambda f, q, k, v, m: f.scaled_dot_product_attention(q, k, v, m), (query, key, value, mask)),
        "softmax": (lambda f, x: f.softmax(x, 1), (logits,)),
        "log_softmax": (lambda f, x: f.log_softmax(x, 1), (logits,)),
        "cross_entropy": (lambda f, x: f.cross_entropy(x, target), (logits,)),
        "smoothed": (lambda f, x: f.cross_entropy(x, target, label_smoothing=0.1), (logits,)),
        "probabilities": (lambda f, x: f.cross_entropy(x, x.softmax(1)), (logits,)),
    }
    for name, (function, leaves) in cases.items():
        results = []
        for module in (F, TF):
            with torch.autocast("cpu", lower):
                result = function(module, *leaves)
            results.append((result, *torch.autograd.grad(result.sum(), leaves)))
        for ours, torchs in zip(*results, strict=True):
            assert ours.dtype == torchs.dtype, name
            torch.testing.assert_close(ours.float(), torchs.float(), rtol=0.05, atol=0.05)


def test_a_package_that_is_not_built_says_how(tmp_path):
    source = Path(flash_online.__file__).parent
    shutil.copytree(source, tmp_path / "flash_online", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    command = [sys.executable, "-c", "import sys; sys.path.insert(0, sys.argv[1]); import flash_online", str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert result.returncode != 0
    assert "ImportError" in result.stderr and "not built" in result.stderr and "pip install" in result.stderr
