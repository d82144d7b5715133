"""The named tuples of attention's arguments have the order of the operators' schemas, where spans come last."""

from __future__ import annotations

import inspect

import pytest
import torch

from flash_online import _ops
from flash_online._attention_arguments import AttentionGradients, AttentionOptions, AttentionTensors, VarlenTensors

OPS = torch.ops.flash_online
OPTIONS = AttentionOptions._fields
SPANS = ["query_spans", "key_spans"]


def names(operator) -> list[str]:
    return [argument.name for argument in operator.default._schema.arguments]


def without_spans(kind) -> list[str]:
    *fields, query_spans, key_spans = kind._fields
    assert [query_spans, key_spans] == SPANS
    return fields


def test_forward_operators():
    assert names(OPS.attention_forward) == [*without_spans(AttentionTensors), *OPTIONS, *SPANS]
    lengths = ["max_seqlen_q", "max_seqlen_k"]
    assert names(OPS.attention_varlen_forward) == [*without_spans(VarlenTensors), *lengths, *OPTIONS, *SPANS]


def test_backward_operators():
    options, results = AttentionOptions(*OPTIONS), ["out", "lse", "lse_low"]
    gradients = ["grad_out", "grad_lse"]
    own = options.for_backward("mask_grad", "deterministic")
    assert names(OPS.attention_backward) == [*gradients, *without_spans(AttentionTensors), *results, *own, *SPANS]
    lengths, own = ["max_seqlen_q", "max_seqlen_k"], options.for_backward("deterministic")
    tensors = without_spans(VarlenTensors)
    assert names(OPS.attention_varlen_backward) == [*gradients, *tensors, *results, *lengths, *own, *SPANS]
    returned = [result.name.removeprefix("grad_") for result in OPS.attention_backward.default._schema.returns]
    assert returned == list(AttentionGradients._fields)


FAKES = ["forward", "inference", "training", "training_backward", "backward"]


@pytest.mark.parametrize("name", [f"attention_{kind}" for kind in FAKES])
def test_fakes(name):
    assert list(inspect.signature(getattr(_ops, f"_{name}_fake")).parameters) == names(getattr(OPS, name))
