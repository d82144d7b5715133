"""Every differentiable function and raw operator, by every way that a function can reach its user (called, compiled, exported,
traced), under every transform: the value is that of float64 mathematics in torch's own operations, or the cell stands in the
table of refusals and raises the error named there. No cell may turn from the one into the other unseen, and none gives zeros.

The usual cells are every case by the cheap ways, and a case of each kind by all ways. On the CPU every cell without a tracer is
quick, and one in QUICK of the others; the other usual cells are slow. FLASH_ONLINE_MATRIX=whole in the environment adds all
cells that are not usual, as slow ones: they take half an hour of two cores.
"""

from __future__ import annotations

import functools
import math
import os
import re
import traceback

import pytest
import torch
from derivative_cases import CASES
from devices import why_no_cuda
from transforms import INSIDE, OTHER_SIZES, TRANSFORMS, WAYS, results_of

from flash_online.testing import allowed_error, assert_close_to_float64, error

WHOLE = os.environ.get("FLASH_ONLINE_MATRIX") == "whole"

pytestmark = pytest.mark.filterwarnings("ignore")  # the tracers' own: what a warning would tell, the values do

N, ANOTHER = 5, 7

# --- refusals: what raises instead, as (the error, a word that it says). No other cell may. ----------------------------------

UNSUPPORTED = torch._dynamo.exc.Unsupported
FORWARD_MODE = ("func.jvp", "dual numbers", "jacfwd", "hessian")
SECOND = ("hessian", "double backward", "vectorized jacobian")

# What torch refuses of its own functions as well, by (way, transform).
OUTSIDE = (UNSUPPORTED, "functorch tracing attempt")  # torch.func around a compiled function: torch says to compile it whole
ONCE = (RuntimeError, "donated buffers|does not currently support double backward")
TORCHS = {
    **{("compile", t): OUTSIDE for t in ("func.grad", "func.vjp", "func.jvp", "vmap", "per-sample gradient")},
    **{("compile", t): OUTSIDE for t in ("jacrev", "jacfwd", "hessian")},
    ("compile", "double backward"): ONCE,
    # What comes out is detached, of torch's functions too, where it is not an error at once.
    ("compile", "vectorized jacobian"): (RuntimeError, "donated buffers|double backward|does not require grad|Batching rule"),
    ("inside compile", "vectorized jacobian"): (UNSUPPORTED, "Failed to convert args/kwargs to proxy"),
    ("inside make_fx symbolic", "vectorized jacobian"): (RuntimeError, "storage_offset|Expected IntList"),
}

# What is refused of some functions, by (case, way, transform).
OURS: dict[tuple[str, str, str], tuple[type[Exception], str]] = {}
PACKED_FORWARD = ("raw attention_varlen_forward", "raw attention_varlen_forward_with_max_logit")
# A graph by symbolic make_fx or TorchScript that asks for a size of a tensor that vmap has wrapped, as some of torch's do.
NO_SIZES = (RuntimeError, "Batching rule not implemented for aten::(sym_size|sym_numel|numel)")
OURS |= {
    (case, "make_fx symbolic", "vmap"): NO_SIZES
    for case in (
        *("sdpa broadcast", "attention alibi", "attention blocks", *PACKED_FORWARD),
        *("linear_cross_entropy", "linear_cross_entropy none", "linear_cross_entropy probabilities"),
        "linear_cross_entropy scale per row",
    )
}
# The derivative of what autograd's own vmap, of is_grads_batched, made in TorchScript.
OURS |= {
    (case, "jit.trace", "vectorized jacobian"): (RuntimeError, "Batching rule not implemented for aten::detach")
    for case in ("cross_entropy weighted probabilities", "cross_entropy weighted entropy", "cross_entropy z_loss")
}
# Its first result is linear in its first input: torch's Jacobian of one is a constant, which has no derivative.
OURS |= {
    ("raw attention_merge_backward", way, "vectorized jacobian"): (RuntimeError, "does not require grad")
    for way in {*WAYS, "inside make_fx"} - {"compile"}
}
# TorchScript traces no list of bools, which these operators take; linear_cross_entropy is traced without them.
OURS |= {
    (f"raw linear_cross_entropy_{name}", "jit.trace", t): (RuntimeError, "list of bool")
    for name in ("step", "backward")
    for t in TRANSFORMS
}
# Forward mode and second derivatives of packed sequences go sequence by sequence, by numbers that a tracer has not.
BY_SEQUENCE = ((NotImplementedError, UNSUPPORTED, torch._dynamo.exc.BackendCompilerFailed), "cu_seqlens: expected values")
for case in ("varlen", "varlen spans", "varlen causal sinks lse", *PACKED_FORWARD, "raw attention_varlen_backward"):
    differentiated = TRANSFORMS.keys() - {"vmap"} if case.endswith("backward") else {*FORWARD_MODE, *SECOND}
    OURS |= {
        (case, way, t): BY_SEQUENCE for way in INSIDE for t in differentiated if (way, t) not in TORCHS and way != "compile"
    }
OURS |= {
    ("raw attention_varlen_backward", "compile", t): BY_SEQUENCE for t in ("gradient", "double backward", "vectorized jacobian")
}
# What Dynamo traces of a Function that makes its gradients on the way forward is differentiated once.
OURS |= {
    (case, "inside compile", "double backward"): (torch._dynamo.exc.TorchRuntimeError, "does not require grad")
    for case in ("linear_cross_entropy", "linear_cross_entropy probabilities")
}

# Cells where torch's autodiff of TorchScript's own pointwise operators, which these graphs have with ours, is wrong. Torch's
# functions have the fault by themselves: test_torchscripts_own_hessian_is_wrong.
WRONG_IN_TORCH = {
    (case, "jit.trace", "hessian") for case in ("cross_entropy z_loss", "cross_entropy all", "linear_cross_entropy none")
}


def refusal(case: str, way: str, transform: str):
    return OURS.get((case, way, transform)) or TORCHS.get((way, transform))


# --- cells --------------------------------------------------------------------------------------------------------------------

# A case of each kind, which goes by every way in the usual part.
ALL_WAYS = {"sdpa causal", "attention sinks", "varlen", "softmax", "cross_entropy mean", "raw attention_merge"}
# Ways that cost less than a tenth of a second a case, and what every case goes through of the others.
CHEAP = {"eager", "export", "make_fx", "make_fx symbolic", "jit.trace"}
FEW = {("compile", "gradient"), ("inside compile", "func.grad")}
# Transforms of more than a second each, for the sake of one case of attention and one of rows.
SLOW_TRANSFORMS = {"jacrev", "jacfwd", "hessian", "double backward", "vectorized jacobian"}
# Made by make_fx with these inside, a graph holds for other sizes, of torch's functions too: tangents and bases have one.
KEEP_SIZES = {"gradient", "func.grad", "func.vjp", "vmap", "double backward"}
# On CUDA in 16 bits: the kernels differ, and not the tracers.
NARROW_WAYS = {"eager", "make_fx"}

# On the CPU one usual cell in so many is quick. These lie on diagonals, so that each case goes by each cheap way, and
# different cases under different transforms.
QUICK = 6

DEVICES = [("cpu", torch.float32)]
if why_no_cuda() is None:
    DEVICES += [("cuda", dtype) for dtype in (torch.float32, torch.float16, torch.bfloat16)]


def cells():
    for device, dtype in DEVICES:
        for i, case in enumerate(CASES):
            for j, way in enumerate((*WAYS, *INSIDE)):
                if dtype != torch.float32 and way not in NARROW_WAYS:
                    continue
                for k, transform in enumerate(TRANSFORMS):
                    marks = [pytest.mark.gpu] if device == "cuda" else []
                    usual = way in CHEAP or (way, transform) in FEW or case in ("sdpa causal", "softmax")
                    usual = usual or (case in ALL_WAYS and transform not in SLOW_TRANSFORMS)
                    if not usual and not WHOLE:
                        continue
                    # TorchScript's derivatives change with what it has run before: all transforms of a case run, or none.
                    place = i + j + (k if way != "jit.trace" else 0)
                    if not usual or (device == "cpu" and way != "eager" and place % QUICK):
                        marks += [pytest.mark.slow]
                    name = str(dtype).removeprefix("torch.")
                    yield pytest.param(
                        device, dtype, case, way, transform, id=f"{device}-{name}-{case}-{way}-{transform}", marks=marks
                    )


@functools.cache
def inputs_of(case: str, n: int, dtype: torch.dtype, device: str):
    return CASES[case].inputs(n, dtype, device)


@functools.cache
def expected(case: str, transform: str, n: int, dtype: torch.dtype, device: str):
    """The results in float64 and in `dtype`, by torch's own operations."""

    def by(convert):
        leaves, rest = (
            [convert(t) if t.is_floating_point() else t for t in part] for part in inputs_of(case, n, dtype, device)
        )
        return [t.detach() for t in results_of(TRANSFORMS[transform](lambda *given: CASES[case].plain(*given, *rest), leaves))]

    return by(torch.Tensor.double), by(torch.Tensor.clone)


@functools.lru_cache(maxsize=1)
def graph_of(case: str, way: str, dtype: torch.dtype, device: str):
    """The case's function, traced once for all transforms; or the error of tracing it."""
    leaves, rest = inputs_of(case, N, dtype, device)
    return WAYS[way](CASES[case].ours, [*leaves, *rest], len(leaves))


def found(case: str, way: str, transform: str, n: int, dtype: torch.dtype, device: str) -> list[torch.Tensor]:
    leaves, rest = inputs_of(case, n, dtype, device)
    if way in WAYS:
        function = graph_of(case, way, dtype, device)
        return results_of(TRANSFORMS[transform](lambda *given: function(*given, *rest), leaves))

    def whole(*inputs):
        given, others = inputs[: len(leaves)], inputs[len(leaves) :]
        return TRANSFORMS[transform](lambda *tensors: CASES[case].ours(*tensors, *others), given)

    first, others = inputs_of(case, N, dtype, device)
    return results_of(INSIDE[way](whole, [*first, *others], len(first))(*leaves, *rest))


@pytest.mark.parametrize("device, dtype, case, way, transform", [*cells()], indirect=["device"])
def test_cell(device, dtype, case, way, transform):
    n = ANOTHER if way in OTHER_SIZES and (way in WAYS or transform in KEEP_SIZES) else N
    if (case, way, transform) in WRONG_IN_TORCH:
        pytest.skip("TorchScript's own derivative is wrong")
    refused = refusal(case, way, transform)
    if refused is not None:
        kinds, word = refused
        with pytest.raises(kinds) as raised:
            found(case, way, transform, n, dtype, device)
        assert re.search(word, "".join(traceback.format_exception(raised.value)))
        return
    truth, plain = expected(case, transform, n, dtype, device)
    results = found(case, way, transform, n, dtype, device)
    assert len(results) == len(truth)
    # Results of one cell are sums of the same terms, which may cancel. A tangent sums a gradient's over all inputs; a sum of k
    # random terms has sqrt(k) times their size.
    gradient = expected(case, "func.grad", n, dtype, device)[0]
    size = max(t.abs().max().item() for t in (*truth, *gradient))
    if transform in ("func.jvp", "dual numbers"):
        size *= math.sqrt(sum(t.numel() for t in gradient))
    for i, (result, theirs, exact) in enumerate(zip(results, plain, truth, strict=True)):
        rounding = max(dtype, result.dtype, key=lambda d: torch.finfo(d).eps)
        theirs = theirs.to(result.dtype)
        if transform not in SECOND and "backward" not in case:
            assert_close_to_float64(result, theirs, exact, rounding, name=f"result {i}", magnitude=size)
            continue
        # The rule is for results and gradients; what differentiates a gradient starts from one that was rounded.
        assert result.shape == exact.shape and result.isfinite().all(), f"result {i}"
        got, allowed = error(result, exact), allowed_error(error(theirs, exact), exact, rounding, magnitude=size)
        assert got.max <= 2 * allowed.max, f"result {i}: max error {got.max:.3g}, allowed {2 * allowed.max:.3g}"


def test_every_refusal_is_of_a_cell():
    ways = {*WAYS, *INSIDE}
    named = {*OURS, *WRONG_IN_TORCH}
    assert all(case in CASES and way in ways and transform in TRANSFORMS for case, way, transform in named)
    assert all(way in ways and transform in TRANSFORMS for way, transform in TORCHS)


def test_torchscripts_own_hessian_is_wrong():
    """Where this fails torch is mended, and WRONG_IN_TORCH can go."""
    leaves, _ = inputs_of("softmax", N, torch.float32, "cpu")
    softmax = CASES["softmax"].plain
    traced = WAYS["jit.trace"](softmax, leaves, 1)
    right, _, found = (TRANSFORMS["hessian"](function, leaves)[0] for function in (softmax, traced, traced))
    assert not torch.allclose(found, right)  # TorchScript compiles what it has seen once
