"""The drop-in's arguments are checked as torch checks them, and what torch accepts without keys or queries has gradients."""

from __future__ import annotations

import pytest
import torch

import flash_online
import flash_online.functional as F

TF = torch.nn.functional
QUERY = torch.randn(1, 2, 4, 8)
NONE = torch.randn(1, 2, 0, 8)
NOT_A_FLOAT = ["0.5", "x", [0.5], 0.5j, torch.tensor([0.5, 0.5])]


@pytest.mark.parametrize("value", NOT_A_FLOAT, ids=repr)
@pytest.mark.parametrize("name", ["dropout_p", "scale"])
@pytest.mark.parametrize("tensors", [(QUERY, QUERY), (NONE, QUERY), (QUERY, NONE)], ids=["full", "no queries", "no keys"])
def test_what_is_no_float(tensors, name, value):
    query, key = tensors
    for function in (TF.scaled_dot_product_attention, F.scaled_dot_product_attention):
        with pytest.raises(TypeError, match=name):
            function(query, key, key, **{name: value})


@pytest.mark.parametrize("dropout_p", [-0.5, float("nan"), 1.5, float("inf"), -float("inf")])
@pytest.mark.parametrize("mask", [None, torch.zeros(4, 4)], ids=["plain", "mask"])
def test_a_dropout_p_out_of_range(mask, dropout_p, device):
    query, mask = QUERY.to(device), None if mask is None else mask.to(device)
    with pytest.raises(RuntimeError, match="dropout_p"):
        F.scaled_dot_product_attention(query, query, query, mask, dropout_p)
    if device == "cpu":
        with pytest.raises(RuntimeError, match="dropout"):
            TF.scaled_dot_product_attention(query, query, query, mask, dropout_p)
    no_queries = query[:, :, :0]  # torch returns before it looks at dropout_p
    assert F.scaled_dot_product_attention(no_queries, query, query, dropout_p=dropout_p).shape == no_queries.shape


@pytest.mark.parametrize("value", [0, 1, 0.5, True, torch.tensor(0.5)], ids=repr)
def test_what_stands_for_a_float(value):
    expected = F.scaled_dot_product_attention(QUERY, QUERY, QUERY, scale=float(value))
    assert torch.equal(F.scaled_dot_product_attention(QUERY, QUERY, QUERY, scale=value), expected)


@pytest.mark.parametrize("function", ["softmax", "log_softmax"])
@pytest.mark.parametrize("dtype", ["float32", 1, 0.5, str], ids=repr)
def test_what_is_no_dtype(function, dtype):
    x = torch.randn(3, 5)
    for module in (TF, F):
        with pytest.raises(TypeError, match="dtype"):
            getattr(module, function)(x, 1, dtype=dtype)
    with pytest.raises(TypeError, match="dtype"):
        getattr(flash_online, function)(x, 1, dtype)


@pytest.mark.parametrize("function", ["softmax", "log_softmax"])
def test_pythons_float_is_a_dtype(function):
    x = torch.randn(3, 5)
    expected = getattr(TF, function)(x, 1, dtype=float)
    for result in (getattr(F, function)(x, 1, dtype=float), getattr(flash_online, function)(x, 1, float)):
        assert result.dtype == expected.dtype == torch.float64
        torch.testing.assert_close(result, expected)


@pytest.mark.parametrize("function", ["softmax", "log_softmax", "topk_softmax"])
def test_a_complex_result_is_due_to_dtype(function):
    x = torch.randn(3, 5, dtype=torch.float64)
    with pytest.raises(NotImplementedError, match=r"dtype: a complex result \(torch.complex128\)"):
        getattr(flash_online, function)(x, 1, dtype=torch.complex128)
    with pytest.raises(NotImplementedError, match=r"a complex tensor \(torch.complex128\)"):
        getattr(flash_online, function)(x.to(torch.complex128), 1)


EMPTY = {  # query, key and value heads; queries, keys; the mask's shape
    "no keys": ((2, 2, 2), (4, 0), (4, 0)),
    "no keys, a broadcast mask": ((2, 2, 2), (4, 0), (4, 1)),
    "no keys, groups": ((4, 2, 1), (4, 0), (1, 4, 4, 1)),
    "no queries": ((2, 2, 2), (0, 5), (1, 5)),
    "no heads": ((0, 0, 0), (4, 5), (4, 5)),
}


@pytest.mark.parametrize("name", EMPTY)
def test_gradients_of_a_mask_beside_no_pairs(name, device):
    """Zeros of the mask's shape, whatever it holds; the drop-in and flash_online.attention."""
    (heads, key_heads, value_heads), (queries, keys), shape = EMPTY[name]
    mask = torch.full(shape, -torch.inf, device=device)

    def call(function):
        query = torch.randn(1, heads, queries, 8, device=device, requires_grad=True)
        key = torch.randn(1, key_heads, keys, 8, device=device, requires_grad=True)
        value = torch.randn(1, value_heads, keys, 8, device=device, requires_grad=True)
        leaf = mask.clone().requires_grad_()
        out = function(query, key, value, leaf)
        assert torch.equal(out, torch.zeros_like(out)) and out.shape == (1, heads, queries, 8)
        out.sum().backward()
        for tensor in (query, key, value, leaf):
            assert tensor.grad is not None and torch.equal(tensor.grad, torch.zeros_like(tensor))

    call(lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, m, enable_gqa=key_heads != heads))
    call(lambda q, k, v, m: flash_online.attention(q, k, v, mask=m))
