"""Raw operators with tensors on the CPU and on a GPU: the dispatcher picks CUDA, which names what is elsewhere and runs
nothing."""

from __future__ import annotations

import pytest
import torch
from mixed import CALLS, PUBLIC_NAMES, arguments, first_of, ops, others

pytestmark = pytest.mark.gpu


def refuse(operator: str, place) -> str:
    """The message of the RuntimeError that a call raises; nothing on the device may fail later."""
    with pytest.raises(RuntimeError) as error:
        getattr(ops, operator)(**arguments(operator, place))
    torch.cuda.synchronize()
    return str(error.value)


@pytest.mark.parametrize("operator", CALLS)
def test_operators_take_tensors_of_one_gpu(operator):
    getattr(ops, operator)(**arguments(operator, lambda name, tensor: tensor.cuda()))
    torch.cuda.synchronize()


@pytest.mark.parametrize("operator, name", others())
def test_one_tensor_on_the_cpu(operator, name):
    message = refuse(operator, lambda own, tensor: tensor if own == name else tensor.cuda())
    assert f"{PUBLIC_NAMES.get(name, name)}: expected the device of " in message


@pytest.mark.parametrize("operator, name", others())
def test_one_tensor_on_the_gpu(operator, name):
    message = refuse(operator, lambda own, tensor: tensor.cuda() if own == name else tensor)
    assert f"{PUBLIC_NAMES.get(name, name)}: expected the device of " in message


@pytest.mark.parametrize("operator", CALLS)
def test_the_first_tensor_on_the_cpu_and_the_others_on_the_gpu(operator):
    first = first_of(operator)
    message = refuse(operator, lambda own, tensor: tensor if own == first else tensor.cuda())
    named = [name for name in CALLS[operator] if name != first or name == "outs"]
    assert message.split(":")[0].split("[")[0] in named and "expected the device of " in message


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
@pytest.mark.parametrize("operator, name", others())
def test_one_tensor_on_another_gpu(operator, name):
    message = refuse(operator, lambda own, tensor: tensor.to("cuda:1" if own == name else "cuda:0"))
    assert f"{PUBLIC_NAMES.get(name, name)}: expected the device of " in message


def test_factor_of_scale():
    with pytest.raises(RuntimeError, match="factor: expected the device of tensor"):
        ops.scale_(torch.ones(4, device="cuda"), torch.tensor(2.0))
    torch.cuda.synchronize()
