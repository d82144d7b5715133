"""torch's own samples (OpInfo) of every function that ours replace, each a test of its own: values, dtypes, shapes and
gradients by the rule of the tolerance without any allowance (assert_close_to_float64 with bare=True); torch's error inputs.

FLASH_ONLINE_FUZZ_SEED (0) is the seed of the samples' numbers.
"""

from __future__ import annotations

import functools
import math
import os
import warnings

import pytest
import torch
from cases import DTYPES
from devices import why_no_cuda
from drop_in import TF, WIDTH, compare
from torch.testing._internal.common_methods_invocations import op_db

import flash_online
import flash_online.functional as F

OURS = {
    "nn.functional.scaled_dot_product_attention": F.scaled_dot_product_attention,
    "softmax": F.softmax,
    "log_softmax": F.log_softmax,
    "nn.functional.cross_entropy": F.cross_entropy,
    "nn.functional.linear_cross_entropy": F.linear_cross_entropy,  # torch has it from 2.13 on
    "logsumexp": flash_online.logsumexp,
}
SEED = int(os.environ.get("FLASH_ONLINE_FUZZ_SEED", "0"))
OPINFOS = {op.formatted_name: op for op in op_db if op.name in OURS}


def name_in_torch(op) -> str:
    return op.name.removeprefix("nn.functional.")


def dtypes_of(op, device):
    forwarded = {torch.float64} if device == "cuda" and "attention" in op.name else set()
    return [dtype for dtype in DTYPES if dtype in op.supported_dtypes(device) and dtype not in forwarded]


def arguments_of(op, sample):
    """(args, kwargs) of a sample, or None where ours has another signature: logsumexp takes one dimension."""
    args, kwargs = (sample.input, *sample.args), dict(sample.kwargs)
    kwargs.pop("options", None)  # how torch cuts linear_cross_entropy into chunks
    if op.name == "logsumexp" and not isinstance(args[1] if len(args) > 1 else kwargs["dim"], int):
        return None
    return args, kwargs


@functools.cache
def samples_of(name, dtype, device):
    """The sample inputs, then the reference inputs; equal in every process."""
    op, made = OPINFOS[name], []
    torch.manual_seed(SEED)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for kind in ("sample_inputs", "reference_inputs"):
            made += [s for s in getattr(op, kind)(device, dtype, requires_grad=True) if arguments_of(op, s) is not None]
    return made


def every_sample():
    """On the CPU a sample is quick in one dtype in three, and slow in the others."""
    for device in ("cpu",) if why_no_cuda() else ("cpu", "cuda"):
        for name, op in OPINFOS.items():
            for i, dtype in enumerate(dtypes_of(op, device)):
                for index in range(len(samples_of(name, dtype, device))):
                    marks = [pytest.mark.gpu] if device == "cuda" else [pytest.mark.slow] * bool((i + index) % 3)
                    label = f"{device}-{name}-{str(dtype).removeprefix('torch.')}-{index}"
                    yield pytest.param(device, name, dtype, index, id=label, marks=marks)


@pytest.fixture
def device(request):
    """The device of a sample is a parameter here: samples are counted when tests are collected."""
    with flash_online.strict():
        yield request.param


@pytest.mark.parametrize("device, name, dtype, index", list(every_sample()), indirect=["device"])
def test_opinfo_sample(device, name, dtype, index):
    sample, op = samples_of(name, dtype, device)[index], OPINFOS[name]
    args, kwargs = arguments_of(op, sample)
    try:
        if kwargs.get("dropout_p", 0) > 0:
            check_mean_of_dropout(args, kwargs)
            return
        compare(OURS[op.name], op.op, args, kwargs, seed=SEED + index, bare=True)
        if "dtype" in kwargs and WIDTH[dtype] == 0:  # OpInfo asks for float64; a model would ask for float32
            compare(OURS[op.name], op.op, args, kwargs | {"dtype": torch.float32}, seed=SEED + index, bare=True)
    except AssertionError as failure:
        raise AssertionError(f"{failure}\n{sample.summary()}") from failure


def check_mean_of_dropout(args, kwargs):
    """Dropout cannot match torch's stream: the mean over many draws is the result without dropout."""
    kwargs = dict(kwargs)
    dropout_p = kwargs.pop("dropout_p")
    args = [t.detach().float() if isinstance(t, torch.Tensor) and t.is_floating_point() else t for t in args]
    kwargs = {k: v.detach().float() if isinstance(v, torch.Tensor) and v.is_floating_point() else v for k, v in kwargs.items()}
    expected = TF.scaled_dot_product_attention(*args, **kwargs)
    draws = torch.stack([F.scaled_dot_product_attention(*args, dropout_p=dropout_p, **kwargs) for _ in range(64)])
    assert draws.shape[1:] == expected.shape and len(torch.unique(draws[:, ..., 0].flatten(1), dim=0)) > 32
    spread = draws.std(0) / math.sqrt(64)
    assert ((draws.mean(0) - expected).abs() <= 6 * spread + 1e-4 * expected.abs().max()).all()


def every_op(chosen):
    for device in ("cpu", "cuda"):
        for name, op in OPINFOS.items():
            if chosen(op):
                marks = [pytest.mark.gpu] if device == "cuda" else []
                yield pytest.param(device, name, id=f"{device}-{name}", marks=marks)


@pytest.mark.parametrize("device, name", list(every_op(lambda op: hasattr(TF, name_in_torch(op)))), indirect=["device"])
def test_opinfo_samples_under_override(device, name):
    """The unmodified torch function, made ours by override()."""
    op, compared = OPINFOS[name], 0
    for dtype in dtypes_of(op, device):
        for sample in samples_of(name, dtype, device):
            args, kwargs = arguments_of(op, sample)
            if kwargs.get("dropout_p", 0) > 0:
                continue
            expected = getattr(F, name_in_torch(op))(*args, **kwargs)
            with flash_online.override():
                found = getattr(torch.nn.functional, name_in_torch(op))(*args, **kwargs)
            torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
            compared += 1
    assert compared > 0


@pytest.mark.parametrize("device, name", list(every_op(lambda op: op.error_inputs_func is not None)), indirect=["device"])
def test_opinfo_error_inputs(device, name):
    """Ours raise what torch raises. Few functions have error inputs: see test_functional_attention.py and its neighbours."""
    op = OPINFOS[name]
    cases = list(op.error_inputs(torch.device(device)))
    assert cases, "an op with error_inputs_func and without error inputs"
    for case in cases:
        sample = case.sample_input
        with pytest.raises(case.error_type):
            OURS[op.name](sample.input, *sample.args, **sample.kwargs)
