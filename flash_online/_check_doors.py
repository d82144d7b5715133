"""`python -m flash_online check DOOR ...`: checks integrations (doors) with their installed hosts.

The check of an integration is a module with a function `check(say) -> bool`, which passes each line of its report to `say`,
returns whether all is right, and raises ImportError if the host is not installed.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
from torch import Tensor

from . import testing


def doors() -> dict[str, str]:
    """The module of each integration's check, by the integration's name."""
    package = Path(__file__).parent
    found = {
        path.stem.removeprefix("_check_"): f"integrations.{path.stem}"
        for path in sorted(package.glob("integrations/_check_*.py"))
    }
    for name, door in (("compat", "flash_attn"), ("distributed", "distributed")):
        if (package / name / "_check.py").is_file():
            found[door] = f"{name}._check"
    return found


def shares_of_allowed(
    call: Callable[..., Tensor],
    plain: Callable[..., Tensor],
    inputs: list[Tensor],
    grad: Tensor,
    setting: AbstractContextManager[object] | None = None,
) -> list[float]:
    """The errors of `call`'s result and of the inputs' gradients for `grad`, each divided by the error that
    testing.allowed_error allows; inf if a result is not finite. `plain` is the same function in plain torch, run in float64 and
    in the inputs' dtype. `call` runs inside `setting`, forward and backward."""

    def run(function: Callable[..., Tensor], dtype: torch.dtype) -> list[Tensor]:
        leaves = [t.to(dtype).requires_grad_() for t in inputs]
        out = function(*leaves)
        return [out.detach(), *torch.autograd.grad(out, leaves, grad.to(dtype))]

    with setting or nullcontext():
        ours = run(call, grad.dtype)
    shares = []
    for result, theirs, truth in zip(ours, run(plain, grad.dtype), run(plain, torch.float64), strict=True):
        allowed = testing.allowed_error(testing.error(theirs, truth), truth, grad.dtype)
        shares.append(testing.error(result, truth).max / allowed.max if result.isfinite().all() else float("inf"))
    return shares


def main(names: list[str]) -> int:
    """Runs the checks of these integrations. Returns the exit code: 1 if one fails or its host is not installed, 2 for an
    unknown name."""
    known = doors()
    unknown = [name for name in names if name not in known]
    if unknown:
        print(f"check: {unknown[0]!r} is not one of {', '.join(known)}", file=sys.stderr)
        return 2
    wrong = []
    is_first = os.environ.get("RANK", "0") == "0"  # one of torchrun's processes prints

    def say(line: str) -> None:
        if is_first:
            print(line, flush=True)

    for name in names:
        say(f"== {name}")
        try:
            right = importlib.import_module(f".{known[name]}", __package__).check(say)
        except ImportError as missing:
            say(f"not checked: {missing}")
            right = False
        if not right:
            wrong.append(name)
    say(f"\nFAILED: {', '.join(wrong)}" if wrong else f"\nok: {', '.join(names)}")
    return 1 if wrong else 0
