"""The named tuples of attention's arguments have the order of the operators' schemas, where spans and tiles come last."""

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


def first_and_last(kind) -> tuple[list[str], list[str]]:
    """The tensors that come first in a schema, and those that come last."""
    fields = list(kind._fields)
    count = fields.index(SPANS[0])
    assert fields[count:] in (SPANS, [*SPANS, "tiles"])
    return fields[:count], fields[count:]


def test_forward_operators():
    tensors, last = first_and_last(AttentionTensors)
    assert names(OPS.attention_forward) == [*tensors, *OPTIONS, *last]
    lengths = ["max_seqlen_q", "max_seqlen_k"]
    tensors, last = first_and_last(VarlenTensors)
    assert names(OPS.attention_varlen_forward) == [*tensors, *lengths, *OPTIONS, *last]


def test_backward_operators():
    options, results = AttentionOptions(*OPTIONS), ["out", "lse", "lse_low"]
    gradients = ["grad_out", "grad_lse"]
    own = options.for_backward("mask_grad", "deterministic")
    tensors, last = first_and_last(AttentionTensors)
    assert names(OPS.attention_backward) == [*gradients, *tensors, *results, *own, *last]
    lengths, own = ["max_seqlen_q", "max_seqlen_k"], options.for_backward("deterministic")
    tensors, last = first_and_last(VarlenTensors)
    assert names(OPS.attention_varlen_backward) == [*gradients, *tensors, *results, *lengths, *own, *last]
    returned = [result.name.removeprefix("grad_") for result in OPS.attention_backward.default._schema.returns]
    assert returned == list(AttentionGradients._fields)


FAKES = ["forward", "inference", "training", "training_backward", "backward"]


@pytest.mark.parametrize("name", [f"attention_{kind}" for kind in FAKES])
def test_fakes(name):
    assert list(inspect.signature(getattr(_ops, f"_{name}_fake")).parameters) == names(getattr(OPS, name))
