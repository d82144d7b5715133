"""The fast path is chosen by looking at the call: an error of the operator surfaces once, with torch's type."""

from __future__ import annotations

import importlib

import pytest
import torch

import flash_online
import flash_online.functional as F

attention_module = importlib.import_module("flash_online.attention")  # the package's attribute is the function
FUNCTIONS = (F.scaled_dot_product_attention, flash_online.attention)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("a launch failed")], ids=repr)
@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("way", ["_run_inference", "_run_training", "_run_training_backward"])
def test_an_error_of_the_operator_surfaces_once(way, function, error, monkeypatch):
    calls = []

    def fail(*args):
        calls.append(args)
        raise error

    query = torch.randn(1, 2, 3, 4, requires_grad=way != "_run_inference")
    out = function(query, query, query) if way == "_run_training_backward" else None
    if way == "_run_training_backward":  # in a cell of the Function that `lean` has built
        backward = attention_module._lean_attention.__self__.backward
        cell = backward.__closure__[backward.__code__.co_freevars.index("run_backward")]
        monkeypatch.setattr(cell, "cell_contents", fail)
    else:
        monkeypatch.setattr(attention_module, way, fail)
    with pytest.raises(type(error), match=str(error)):
        function(query, query, query) if out is None else out.sum().backward()
    assert len(calls) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("options", [{}, {"return_lse": True}], ids=repr)
def test_a_gpus_memory_that_does_not_suffice(function, requires_grad, options):
    """The output alone would take 2^44 bytes; the inputs are views of a few."""
    if options and function is not flash_online.attention:
        pytest.skip("an option of flash_online.attention")
    row = torch.randn(1, 1, 1, 64, device="cuda", dtype=torch.bfloat16, requires_grad=requires_grad)
    query, key = row.expand(1 << 17, 16, 1 << 16, 64), row.expand(1 << 17, 16, 1, 64)
    before = torch.cuda.memory_allocated()
    with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
        function(query, key, key, **options)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before


Q = torch.randn(2, 4, 3, 8)
PLAIN = {
    "equal shapes": (Q, Q, Q),
    "other lengths and widths": (Q, torch.randn(2, 4, 5, 8), torch.randn(2, 4, 5, 6)),
    "strides": (Q.transpose(1, 2).contiguous().transpose(1, 2), Q, Q),
    "no keys": (Q, Q[:, :, :0], Q[:, :, :0]),
    "rank 5": (Q[None], Q[None], Q[None]),
}
NOT_PLAIN = {
    "rank 3": (Q[0], Q[0], Q[0]),
    "a batch to broadcast": (Q, Q[:1], Q[:1]),
    "a parameter": (torch.nn.Parameter(Q), Q, Q),
    "dtypes": (Q, Q.double(), Q),
    "integers": (Q.long(), Q.long(), Q.long()),
    "complex": (Q.to(torch.complex64),) * 3,
    "sparse": (Q.to_sparse(), Q, Q),
    "nested": (torch.nested.nested_tensor([Q[0], Q[0]]),) * 3,
    "meta": (Q.to("meta"),) * 3,
    "widths": (Q, Q[..., :5], Q),
    "lengths": (Q, Q, Q[:, :, :2]),
    "heads that do not divide": (Q, Q[:, :3], Q[:, :3]),
}


@pytest.mark.parametrize("name", PLAIN)
def test_what_takes_it(name):
    query, key, value = PLAIN[name]
    assert attention_module.try_fast_path(query, key, value, False, None, False) is not None


@pytest.mark.parametrize("name", NOT_PLAIN)
def test_what_does_not_take_it(name):
    assert attention_module.try_fast_path(*NOT_PLAIN[name], False, None, True) is None


def test_groups_of_heads_take_it_where_they_are_allowed():
    call = (Q, Q[:, :2], Q[:, :1], False, None)
    assert attention_module.try_fast_path(*call, False) is None
    assert attention_module.try_fast_path(*call, True) is not None
