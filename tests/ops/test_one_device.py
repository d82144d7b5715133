"""The CPU's kernel of every operator refuses a tensor that is elsewhere, by name."""

from __future__ import annotations

import pytest
import torch
from mixed import CALLS, PUBLIC_NAMES, arguments, ops, others

CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)


def call(operator: str, moved: str | None = None):
    """Runs the CPU's kernel with the tensor `moved` on meta. The dispatcher alone would pick the fake implementation."""
    given = arguments(operator, lambda name, tensor: tensor.to("meta") if name == moved else tensor)
    function = getattr(ops, operator).default
    return function.redispatch(CPU, *(given.get(a.name, a.default_value) for a in function._schema.arguments))


@pytest.mark.parametrize("operator", CALLS)
def test_operators_take_tensors_of_one_device(operator):
    call(operator)


@pytest.mark.parametrize("operator, name", others())
def test_operators_name_the_tensor_that_is_elsewhere(operator, name):
    with pytest.raises(RuntimeError) as error:
        call(operator, name)
    assert f"{PUBLIC_NAMES.get(name, name)}: expected the device of " in str(error.value)
