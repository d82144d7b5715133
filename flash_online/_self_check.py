"""`python -m flash_online check [NAME ...]`: the runner of the self-checks, and what they share.

The check of an integration is a module with a function `check(say) -> bool`, which passes each line of its report to
`say`, returns whether all is right, and raises ImportError if the host is not installed. Checks of functions are tables of
`Call`s for `compare_calls`, checks of whole models are tables of models for `compare_models`.
"""

from __future__ import annotations

import importlib
import math
import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from . import _info, _policy, testing
from ._policy import strict

INTEGRATIONS = {
    "diffusers": "integrations._check_diffusers",
    "torch": "integrations._check_torch",
    "transformers": "integrations._check_transformers",
    "flash_attn": "compat._check",
    "distributed": "distributed._check",
}
SINGLE = ("sinks", "alibi_slopes", "lses", "lse", "rotary")  # tensors that stay float32 with 16-bit ones
CONSTANT = ("weight", "alibi_slopes")  # no gradient is computed


def main(names: list[str]) -> int:
    """Checks the package's own functions, or the integrations of these names. Returns the exit code: 1 if a check fails or its
    host is not installed, 2 for an unknown name."""
    is_first = os.environ.get("RANK", "0") == "0"  # one of torchrun's processes prints

    def say(line: str) -> None:
        if is_first:
            print(line, flush=True)

    def is_right(name: str) -> bool:
        say(f"== {name}")
        try:
            return importlib.import_module(f".{INTEGRATIONS[name]}", __package__).check(say)
        except ImportError as missing:
            say(f"not checked: {missing}")
            return False

    if unknown := [name for name in names if name not in INTEGRATIONS]:
        print(f"check: {unknown[0]!r} is not one of {', '.join(INTEGRATIONS)}", file=sys.stderr)
        return 2
    if not names:
        return 0 if importlib.import_module("._check_install", __package__).check(say) else 1
    wrong = [name for name in names if not is_right(name)]
    say(f"\nFAILED: {', '.join(wrong)}" if wrong else f"\nok: {', '.join(names)}")
    return 1 if wrong else 0


def require(holds: bool, said: str) -> None:
    """An assert that python -O keeps."""
    if not holds:
        raise AssertionError(said)


def why_no_cuda() -> str | None:
    """Returns why the GPU is skipped, or None if it is not."""
    if not torch.cuda.is_available():
        return "no GPU is visible to torch"
    if not _policy.ON_CUDA:
        return "this build has no CUDA kernels"
    try:
        architectures = _info.build_info()["architectures"]
    except ImportError:  # without the introspection module the kernels report it
        return None
    return _info.why_not_on(torch.cuda.get_device_capability(), architectures)


def devices() -> tuple[str, ...]:
    return ("cpu",) if why_no_cuda() else ("cpu", "cuda")


class MaskMeter(TorchDispatchMode):
    """Counts the calls of our attention operators, and measures the largest mask in elements of memory: what these operators
    get as `mask`, and what any operator makes of a shape that ends with `dense`, (queries, keys)."""

    def __init__(self, dense: tuple[int, int] | None = None) -> None:
        super().__init__()
        self.dense, self.calls, self.most = dense, 0, 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = function(*args, **(kwargs or {}))
        seen = [t for t in tree_leaves(results) if isinstance(t, Tensor) and t.shape[-2:] == self.dense]
        if function.namespace == "flash_online" and "attention" in function.__name__:
            self.calls += "backward" not in function.__name__
            named = zip(function._schema.arguments, args, strict=False)
            seen += [value for argument, value in named if argument.name == "mask" and value is not None]
        for mask in seen:
            sizes = (size for size, stride in zip(mask.shape, mask.stride(), strict=True) if stride)
            self.most = max(self.most, math.prod(sizes))
        return results


# --- Functions, compared with the reference in float64 ------------------------------------------------------------------------


@dataclass(frozen=True)
class Call:
    """A call of one of our functions, and the same mathematics in plain torch."""

    name: str  # of the line of the report that the call is a part of
    title: str  # the function as a user calls it
    ours: Callable[..., Any]
    plain: Callable[..., Any]
    arguments: dict[str, Any]  # of both; tensors among them have float32 where they are floating
    setting: Callable[[], AbstractContextManager[Any]] = nullcontext  # around ours, forward and backward
    differentiable: bool = True

    def given(self, dtype: torch.dtype, device: str) -> dict[str, Any]:
        """The arguments of a call in a dtype on a device."""

        def moved(name: str, tensor: Tensor) -> Tensor:
            return tensor.to(device, dtype if _is_floating(tensor) and name not in SINGLE else tensor.dtype)

        return {name: tree_map_only(Tensor, partial(moved, name), value) for name, value in self.arguments.items()}

    def run(self, function: Callable[..., Any], given: dict[str, Any], dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        """The results of a function and the gradients of its arguments, by name. Floating tensors are cast to `dtype` unless it
        is None."""
        leaves = {n: t.to(dtype) if dtype and _is_floating(t) else t for n, t in given.items()}
        wanted = [n for n, t in leaves.items() if self.differentiable and _is_floating(t) and n not in CONSTANT]
        leaves |= {n: leaves[n].detach().requires_grad_() for n in wanted}
        results = function(**leaves)
        results = results if isinstance(results, tuple) else (results,)
        found = {f"result {i}": t.detach() for i, t in enumerate(results)}
        if wanted:
            outputs, generator = [t for t in results if t.requires_grad], torch.Generator().manual_seed(1)
            # Multiples of 1/16 below 8 in magnitude are exact in every dtype.
            draws = [torch.randn(t.shape, generator=generator).clamp(-7, 7) * 16 for t in outputs]
            grads = [(draw.round() / 16).to(t) for draw, t in zip(draws, outputs, strict=True)]
            gradients = torch.autograd.grad(outputs, [leaves[n] for n in wanted], grads)
            found |= {f"gradient of {n}": t for n, t in zip(wanted, gradients, strict=True)}
        return found


def _is_floating(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def compare(call: Call, given: dict[str, Any], dtype: torch.dtype) -> tuple[float, float]:
    """The error closest to its limit among a call's results and gradients, and that limit. Raises AssertionError if one exceeds
    its limit."""
    with strict(), call.setting():
        ours = call.run(call.ours, given)
    # The rest is many small torch operations, and on a busy processor their threads would wait for each other.
    threads, worst = torch.get_num_threads(), (0.0, 1.0)
    torch.set_num_threads(1)
    try:
        truths, plain, single = (call.run(call.plain, given, to) for to in (torch.float64, None, torch.float32))
        for name, result in ours.items():
            truth = truths[name]
            if not result.is_floating_point():
                require(torch.equal(result, truth), f"{name}: expected the reference's indices, got others")
                continue
            # With 16-bit inputs an lse has the precision of float32, unless its logits were rounded. The gradient of a float32
            # input does not: it is a sum of 16-bit products.
            rounding = result.dtype if name.startswith("result") else dtype
            theirs = (single if rounding == torch.float32 and call.name != "linear_cross_entropy" else plain)[name]
            # The terms of a loss are about 1. The gradient of a sink is a sum of 140 such terms, and may be near 0.
            magnitude = 12.0 if name == "gradient of sinks" else 1.0 if result.numel() < 64 else 0.0
            testing.assert_close_to_float64(result, theirs, truth, rounding, name=name, magnitude=magnitude)
            allowed = testing.allowed_error(testing.error(theirs, truth), truth, rounding, magnitude=magnitude)
            worst = max(worst, (testing.error(result, truth).max, allowed.max), key=_share)
    finally:
        torch.set_num_threads(threads)
    return worst


def _share(deviation: tuple[float, float]) -> float:
    error, allowed = deviation
    return error / allowed


def compare_calls(say: Callable[[str], None], calls: list[Call], dtypes: tuple[torch.dtype, ...], on: tuple[str, ...]) -> bool:
    """Says a line per name and device with the worst of `compare` in each dtype; then each call that failed. Returns whether
    none did."""
    width = max(len(call.name) for call in calls) + 1
    say(f"{'function':{width}} {'device':7}" + "".join(f"{str(dtype)[6:]:22}" for dtype in dtypes))
    failures: list[str] = []
    for device in on:
        for name in dict.fromkeys(call.name for call in calls):
            lacks = device == "cuda" and name == "float8_attention" and torch.cuda.get_device_capability() != (9, 0)
            if lacks or device == "cuda" and name in _policy.OPERATORS and name not in _policy.ON_CUDA:
                say(f"{name:{width}} {device:7}no kernel")
                continue
            cells = []
            for dtype in dtypes:
                worst, before = (0.0, 1.0), len(failures)
                for call in (call for call in calls if call.name == name):
                    given = call.given(dtype, device)
                    try:
                        worst = max(worst, compare(call, given, dtype), key=_share)
                    except Exception as problem:  # a broken installation may raise anything: go on with the other functions
                        shown = tree_map_only(Tensor, lambda t: f"{str(t.dtype)[6:]}{list(t.shape)}", given)
                        said = ", ".join(f"{n}={value}" for n, value in shown.items())
                        failures.append(f"FAILED: {call.title}({said}) on {device}\n  {type(problem).__name__}: {problem}")
                cells.append("FAILED" if len(failures) > before else "{:.1e} of {:.1e}".format(*worst))
            say(f"{name:{width}} {device:7}" + "".join(f"{cell:22}" for cell in cells).rstrip())
    if failures:
        say("\n" + "\n".join(failures))
    return not failures


# --- Models, compared with the host's own attention ---------------------------------------------------------------------------


def difference(ours: list[Tensor], theirs: list[Tensor]) -> float:
    """The largest difference, relative to the largest element."""
    largest = max(t.abs().max().item() for t in theirs)
    return max((a - b).abs().max().item() for a, b in zip(ours, theirs, strict=True)) / largest


def compare_models(
    say: Callable[[str], None],
    host: ModuleType,
    setting: str,
    models: dict[str, Any],
    measure: Callable[[Any, str], tuple[float, float, int, str]],
    allowed: float,
) -> bool:
    """Says a line per model of `host` and device: `measure` of the model, the differences of outputs and of gradients, the
    elements of the largest mask, and a note; it raises where anything else is wrong. Returns whether all differences are at
    most `allowed`."""
    say(f"{host.__name__} {host.__version__}, {setting}, float32")
    say(f"Errors relative to the largest element, {allowed:g} allowed; the largest mask in elements.\n")
    widest = max([12, *map(len, models)])
    say(f"{'model':{widest}} {'where':5} {'error of output':16} {'error of gradient':18} largest mask")
    right, logging = True, host.utils.logging
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        for device in devices():
            for name, model in models.items():
                try:
                    output, gradient, mask, note = measure(model, device)
                    good = max(output, gradient) <= allowed
                    line = f"{output:<16.1e} {gradient:<18.1e} {mask:<13} {note}{'' if good else ' WRONG'}".rstrip()
                except Exception as problem:  # report a failing model and go on
                    line, good = f"FAILED: {type(problem).__name__}: {problem}", False
                say(f"{name:{widest}} {device:5} {line}")
                right = right and good
    finally:
        logging.set_verbosity(verbosity)
    return right
