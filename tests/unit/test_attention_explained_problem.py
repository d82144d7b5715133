"""The problem that `explain` shows to the CUDA kernels is the call's own."""

from __future__ import annotations

import importlib
from types import SimpleNamespace

import pytest
import torch

explain = importlib.import_module("flash_online.explain")  # the package's attribute of this name is the function


def call(operator, *arguments):
    """The arguments by the names of the operator's schema, as a recorded call has them."""
    schema = getattr(torch.ops.flash_online, operator).default._schema
    defaults = {argument.name: argument.default_value for argument in schema.arguments}
    return SimpleNamespace(**defaults | dict(zip(defaults, arguments, strict=False)))


@pytest.fixture
def shown(monkeypatch):
    """The arguments that reach the introspection module, of which one kernel takes everything."""
    seen = []

    def attention_candidates(*arguments):
        seen.append(arguments)
        return "sm80 \n"

    def float8_candidates(*arguments):
        seen.append(arguments)
        return "other the GPU is another\nfloat8 \n"

    module = SimpleNamespace(attention_candidates=attention_candidates, float8_candidates=float8_candidates)
    properties = SimpleNamespace(major=9, minor=0, shared_memory_per_block_optin=227 << 10)
    monkeypatch.setattr(explain, "_introspection", lambda: module)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    return seen


def test_float8_problem(shown):
    query, key = torch.empty(2, 20, 4, 64).transpose(1, 2).to(torch.float8_e4m3fn), torch.empty(2, 2, 30, 64)
    key, spans = key.to(torch.float8_e4m3fn), torch.zeros(1, 1, 30, 4, dtype=torch.int32)
    options = (5, 0, True, None, spans, 3.0, None, 0.125, torch.bfloat16, True)
    arguments = (query, key, key, None, torch.ones(2, 2), None, False, *options)
    found = explain._float8_kernel(call("float8_attention", *arguments))
    assert found == ("flash_online's CUDA kernel (float8)", {"flash_online's CUDA kernel (other)": "the GPU is another"})
    _, dtype, out_dtype, query_shape, key_shape, value_shape, out_shape, *others = shown[0]
    out, _ = torch.ops.flash_online.float8_attention(*arguments)
    assert out_shape == query_shape == ((2, 4, 20, 64), out.stride(), 0) and key_shape == value_shape
    assert (dtype, out_dtype) == ("float8_e4m3fn", "bfloat16")
    assert others == [False, 5, 0, 10, (0, 2), False, 0.125, 3.0, (9, 0, 227 << 10)]


def test_the_introspection_module_takes_a_float8_problem():
    shape = ((2, 4, 20, 64), (5120, 1280, 64, 1), 0)
    for dtype in ("float8_e4m3fn", "bfloat16"):
        tensors = (dtype, "bfloat16", shape, shape, shape, shape)
        options = (True, -1, 0, 0, (1, 0), True, 0.125, 0.0, (9, 0, 227 << 10))
        lines = explain._introspection().float8_candidates(str(explain.LIBRARY), *tensors, *options)
        assert all(" " in line for line in lines.splitlines())  # none in a build for the CPU alone


@pytest.mark.parametrize("lower_right", [False, True])
def test_dense_problem(shown, lower_right):
    query = torch.empty(2, 20, 4, 64).transpose(1, 2)
    key = torch.empty(2, 4, 30, 64)
    arguments = (query, key, key, None, None, None, None, 5, 0, lower_right, 0.125, 0.0, 0.0)
    assert explain._cuda_kernel("attention_forward", call("attention_forward", *arguments)) == (
        "flash_online's CUDA kernel (sm80)",
        {},
    )
    _, dtype, query_shape, _, _, out_shape, *others, gpu, backward, sparsity, max_logit = shown[0]
    *_, packed, left, right, is_lower_right, scale, _, _, tf32 = others
    out = torch.ops.flash_online.attention_forward(*arguments)[0]
    assert out_shape == query_shape == ((2, 4, 20, 64), out.stride(), 0)
    assert (dtype, packed, left, right, is_lower_right, scale, tf32) == ("float32", None, 5, 0, lower_right, 0.125, False)
    assert gpu == (9, 0, 227 << 10) and backward is None and sparsity == (False, False, 0) and not max_logit
    explain._cuda_kernel("attention_forward_with_max_logit", call("attention_forward_with_max_logit", *arguments))
    assert shown[1] == (*shown[0][:-1], True)


@pytest.mark.parametrize("tile_keys", [64, 128])
def test_sparse_problem(shown, tile_keys):
    query = torch.empty(1, 2, 200, 64)
    spans = torch.zeros(1, 1, 200, 2, dtype=torch.int32)
    tiles = torch.ones(1, 1, 4, 4 if tile_keys == 64 else 2, dtype=torch.bool)
    for given, expected in (((spans, None, None), (True, False, 0)), ((None, spans, tiles), (False, True, tile_keys))):
        arguments = (query, query, query, None, None, None, None, -1, -1, False, 0.125, 0.0, 0.0, False, None, *given)
        explain._cuda_kernel("attention_forward", call("attention_forward", *arguments))
        assert shown.pop()[-2] == expected


def test_packed_problem(shown):
    query, key = torch.empty(50, 4, 64), torch.empty(70, 4, 64)
    starts = torch.zeros(4, dtype=torch.int32)
    arguments = (query, key, key, starts, starts, None, None, None, 20, 30, -1, 0, True, 0.125, 0.0, 0.0)
    explain._cuda_kernel("attention_varlen_forward", call("attention_varlen_forward", *arguments))
    *_, packed, left, right, lower_right, _, _, _, _, _, _, sparsity, max_logit = shown[0]
    assert sparsity == (False, False, 0) and not max_logit
    explain._cuda_kernel("attention_varlen_forward_with_max_logit", call("attention_varlen_forward_with_max_logit", *arguments))
    assert shown[1] == (*shown[0][:-1], True)
    assert (packed, left, right, lower_right) == ((3, 20, 30), -1, 0, True)
