"""Numbers that are no plain Python numbers, or too large: what torch takes is taken, and the rest is an error of ours."""

from __future__ import annotations

import pytest
import torch

import flash_online
import flash_online.functional as F
from flash_online.compat import flash_attn

TF = torch.nn.functional
X, TARGET, WEIGHT = torch.randn(3, 4), torch.tensor([0, 1, 2]), torch.randn(5, 4)
Q = torch.randn(2, 3, 6, 8)
STARTS, PACKED = torch.tensor([0, 4, 6], dtype=torch.int32), torch.randn(6, 3, 8)


def scalar(number, dtype=None):
    return torch.tensor(number, dtype=dtype)


SAME_AS_TORCH = {
    "softmax": (F.softmax, TF.softmax, (X,)),
    "log_softmax": (F.log_softmax, TF.log_softmax, (X,)),
    "our softmax": (flash_online.softmax, torch.softmax, (X,)),
    "our log_softmax": (flash_online.log_softmax, torch.log_softmax, (X,)),
    "our logsumexp": (flash_online.logsumexp, torch.logsumexp, (X,)),
}


@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.uint8], ids=str)
@pytest.mark.parametrize("name", SAME_AS_TORCH)
def test_a_dim_in_a_tensor(name, dtype, dim):
    ours, torchs, arguments = SAME_AS_TORCH[name]
    dim = scalar(dim % 2 if dtype is torch.uint8 else dim, dtype)
    torch.testing.assert_close(ours(*arguments, dim), torchs(*arguments, dim))


@pytest.mark.parametrize("dim", [scalar(1.0), scalar(True), scalar([1]), True, 1.0], ids=repr)
@pytest.mark.parametrize("name", [name for name in SAME_AS_TORCH if name != "our logsumexp"])
def test_other_tensors_are_no_dim(name, dim):
    ours, torchs, arguments = SAME_AS_TORCH[name]
    with pytest.raises(TypeError):
        torchs(*arguments, dim)
    with pytest.raises(TypeError, match="^dim: expected an int, got"):
        ours(*arguments, dim)


def test_topk_numbers_in_tensors():
    found, indices = flash_online.topk_softmax(X, scalar(2), scalar(0))
    wanted, places = torch.topk(X.softmax(0), scalar(2), scalar(0))
    torch.testing.assert_close(found, wanted)
    assert torch.equal(indices, places)


@pytest.mark.parametrize("index", [scalar(2), scalar([2]), scalar(2, dtype=torch.int32)], ids=repr)
def test_cross_entropy_with_an_ignore_index_in_a_tensor(index):
    wanted = TF.cross_entropy(X, TARGET, ignore_index=index)
    for function in (F.cross_entropy, flash_online.cross_entropy):
        torch.testing.assert_close(function(X, TARGET, ignore_index=index), wanted)
    logits = X @ WEIGHT.mT
    wanted = TF.cross_entropy(logits, TARGET, ignore_index=index)
    for function in (F.linear_cross_entropy, flash_online.linear_cross_entropy):
        torch.testing.assert_close(function(X, WEIGHT, TARGET, ignore_index=index), wanted)


@pytest.mark.parametrize("index", [scalar(2.0), scalar(True), scalar([1, 2]), True], ids=repr)
def test_cross_entropy_with_other_tensors_as_ignore_index(index):
    for call in (
        lambda: F.cross_entropy(X, TARGET, ignore_index=index),
        lambda: flash_online.linear_cross_entropy(X, WEIGHT, TARGET, ignore_index=index),
    ):
        with pytest.raises(TypeError, match="^ignore_index: expected an int, got"):
            call()


BEYOND = [2**63, -(2**63) - 1, 2**70]


@pytest.mark.parametrize("number", BEYOND, ids=str)
def test_integers_beyond_64_bits_are_an_error_that_names_them(number):
    """Torch raises ValueError, and InvalidArgument is one."""
    with pytest.raises(ValueError):
        TF.cross_entropy(X, TARGET, ignore_index=number)
    for name, call in {
        "ignore_index": lambda: F.cross_entropy(X, TARGET, ignore_index=number),
        "ignore_index:": lambda: flash_online.linear_cross_entropy(X, WEIGHT, TARGET, ignore_index=number),
        "dim": lambda: F.softmax(X, number),
        "k": lambda: flash_online.topk_softmax(X, number),
    }.items():
        with pytest.raises(flash_online.InvalidArgument, match=f"^{name}.*64 bits"):
            call()
    with pytest.raises(flash_online.InvalidArgument, match="^max_seqlen_k: expected .*got"):
        flash_online.varlen_attention(PACKED, PACKED, PACKED, STARTS, STARTS, 4, number)


@pytest.mark.parametrize("bound", [2**62, 2**63 - 1, 2**63, 2**70], ids=str)
def test_attention_with_a_vast_window(device, bound):
    query, packed, starts = (t.to(device) for t in (Q, PACKED, STARTS))
    layout = query.transpose(1, 2)
    for call in (
        lambda window: flash_online.attention(query, query, query, window=window),
        lambda window: flash_online.varlen_attention(packed, packed, packed, starts, starts, 4, 4, window=window),
        lambda window: flash_attn.flash_attn_func(layout, layout, layout, window_size=window),
        lambda window: flash_attn.flash_attn_varlen_func(packed, packed, packed, starts, starts, 4, 4, window_size=window),
    ):
        for window in ((bound, None), (None, bound), (bound, bound), (2, bound)):
            none = tuple(None if side == bound else side for side in window)
            assert torch.equal(call(window), call(none)), window


@pytest.mark.parametrize("bound", [2**62, 2**63 - 1, 2**63, 2**70], ids=str)
def test_vast_numbers_over_cached_keys(cache_device, bound):
    query, packed, starts = (t.to(cache_device) for t in (Q, PACKED, STARTS))
    lengths = torch.tensor([6, 3], dtype=torch.int32, device=cache_device)
    for options in ({"cache_seqlens": lengths}, {"cache_seqlens": 6}, {"cache_seqlens": lengths, "causal": False}):
        wanted = flash_online.kvcache_attention(query, query, query, **options)
        for window in ((bound, None), (bound, bound)):
            assert torch.equal(flash_online.kvcache_attention(query, query, query, window=window, **options), wanted)
        splits = flash_online.kvcache_attention(query, query, query, num_splits=bound, **options)
        torch.testing.assert_close(splits, wanted)
    table = torch.zeros(2, 1, dtype=torch.int32, device=cache_device)
    pool = query[:1].transpose(1, 2)
    arguments = (packed, pool, pool, starts, starts)
    wanted = flash_online.varlen_attention(*arguments, 4, 6, block_table=table)
    longest = min(bound, 2**63 - 1)  # a larger one is an error
    assert torch.equal(flash_online.varlen_attention(*arguments, 4, longest, block_table=table), wanted)
    packed_keys = (packed, packed, packed, starts, starts, 4)
    assert torch.equal(
        flash_online.varlen_attention(*packed_keys, longest, num_splits=1),
        flash_online.varlen_attention(*packed_keys, 4, num_splits=1),
    )


LEARNED = torch.nn.Parameter(torch.tensor(0.5))
FLOATS = {
    "scale": lambda number: F.scaled_dot_product_attention(Q, Q, Q, scale=number),
    "our scale": lambda number: flash_online.attention(Q, Q, Q, scale=number, softcap=1.0),
    "a packed scale": lambda number: flash_online.varlen_attention(PACKED, PACKED, PACKED, STARTS, STARTS, 4, 4, scale=number),
    "a cached scale": lambda number: flash_online.kvcache_attention(Q, Q, Q, 6, scale=number),
    "softcap": lambda number: flash_online.attention(Q, Q, Q, softcap=number),
    "dropout_p": lambda number: F.scaled_dot_product_attention(Q, Q, Q, dropout_p=number),
    "label_smoothing": lambda number: F.cross_entropy(X, TARGET, label_smoothing=number),
    "z_loss": lambda number: flash_online.cross_entropy(X, TARGET, z_loss=number),
    "softmax_scale": lambda number: flash_attn.flash_attn_func(Q, Q, Q, softmax_scale=number),
}


@pytest.mark.parametrize("name", FLOATS)
def test_a_float_in_a_tensor_has_no_derivative_to_lose(name):
    """Torch takes a tensor without dimensions for a float, unless it requires a gradient."""
    call, argument = FLOATS[name], name.split()[-1]
    assert call(scalar(0.5)).isfinite().all()
    for number in (LEARNED, scalar([0.5]), scalar([[0.5]])):
        with pytest.raises(TypeError, match=f"^{argument}: expected a float, got a tensor"):
            call(number)
    with pytest.raises(TypeError, match=f"^{argument}: expected a float, got a tensor with a derivative"):
        torch.func.grad(lambda number: call(number).sum())(scalar(0.5))
    with pytest.raises(TypeError, match=f"^{argument}: expected a float, got a tensor with a derivative"):
        torch.func.jvp(call, (scalar(0.5),), (scalar(1.0),))


def test_torch_refuses_the_same_scales():
    for number in (LEARNED, scalar([0.5])):
        with pytest.raises(TypeError):
            TF.scaled_dot_product_attention(Q, Q, Q, scale=number)
    assert TF.scaled_dot_product_attention(Q, Q, Q, scale=scalar(0.5)).shape == Q.shape


@pytest.mark.parametrize("keepdim", [False, True])
@pytest.mark.parametrize("dim", [(), [], 0, -1, (0,)], ids=repr)
@pytest.mark.parametrize("x", [scalar(1.5), scalar(3), scalar(float("-inf"))], ids=repr)
def test_logsumexp_of_a_scalar(x, dim, keepdim):
    torch.testing.assert_close(flash_online.logsumexp(x, dim, keepdim), torch.logsumexp(x, dim, keepdim))


def test_logsumexp_over_no_named_dimension():
    for x in (X, X[:0], torch.randn(2, 3, 0)):
        torch.testing.assert_close(flash_online.logsumexp(x, (), True), torch.logsumexp(x, (), True))
    torch.testing.assert_close(flash_online.logsumexp(X[:0], ()), torch.logsumexp(X[:0], ()))
    with pytest.raises(RuntimeError):
        torch.logsumexp(X, ())
    with pytest.raises(flash_online.InvalidArgument, match="^dim: "):
        flash_online.logsumexp(X, ())
    x = X.double().requires_grad_()
    assert torch.autograd.gradcheck(lambda t: flash_online.logsumexp(t, (), True), x)
    for keepdim in (1, scalar(True), None):
        with pytest.raises(TypeError):
            torch.logsumexp(X, 0, keepdim)
        with pytest.raises(TypeError, match="^keepdim: expected a bool"):
            flash_online.logsumexp(X, 0, keepdim)
