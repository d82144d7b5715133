"""The named tuples of attention's arguments have the order of the operators' schemas."""

from __future__ import annotations

import inspect

import pytest
import torch

from flash_online import _ops
from flash_online._attention_arguments import AttentionGradients, AttentionOptions, AttentionTensors, VarlenTensors

OPS = torch.ops.flash_online
OPTIONS = AttentionOptions._fields


def names(operator) -> list[str]:
    return [argument.name for argument in operator.default._schema.arguments]


def test_forward_operators():
    assert names(OPS.attention_forward) == [*AttentionTensors._fields, *OPTIONS]
    lengths = ["max_seqlen_q", "max_seqlen_k"]
    assert names(OPS.attention_varlen_forward) == [*VarlenTensors._fields, *lengths, *OPTIONS]


def test_backward_operators():
    options, results = AttentionOptions(*OPTIONS), ["out", "lse", "lse_low"]
    gradients = ["grad_out", "grad_lse"]
    own = options.for_backward("mask_grad", "deterministic")
    assert names(OPS.attention_backward) == [*gradients, *AttentionTensors._fields, *results, *own]
    lengths, own = ["max_seqlen_q", "max_seqlen_k"], options.for_backward("deterministic")
    assert names(OPS.attention_varlen_backward) == [*gradients, *VarlenTensors._fields, *results, *lengths, *own]
    returned = [result.name.removeprefix("grad_") for result in OPS.attention_backward.default._schema.returns]
    assert returned == list(AttentionGradients._fields)


FAKES = ["forward", "inference", "training", "training_backward", "backward"]


@pytest.mark.parametrize("name", [f"attention_{kind}" for kind in FAKES])
def test_fakes(name):
    assert list(inspect.signature(getattr(_ops, f"_{name}_fake")).parameters) == names(getattr(OPS, name))
