"""Tools of tests, benchmarks and commands: the error metric and its tolerance, inputs in unusual memory layouts, a timer, and
two meters of memory. The module does not depend on the kernels.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

# --- Error and tolerance ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Error:
    """The difference between a result and the truth, over the positions where both are finite: its maximum and its root mean
    square."""

    max: float
    rms: float


def error(result: Tensor, truth: Tensor) -> Error:
    """The largest and the root-mean-square difference between a result and a float64 truth of its shape."""
    difference = result.detach().double() - truth.detach().double()
    difference = difference[difference.isfinite()]
    if difference.numel() == 0:
        return Error(0.0, 0.0)
    return Error(difference.abs().max().item(), difference.square().mean().sqrt().item())


def unit_in_last_place(truth: Tensor, dtype: torch.dtype, magnitude: float = 0.0) -> float:
    """eps(dtype) * max(max|truth|, magnitude), and at least the spacing of dtype's smallest numbers."""
    finite = truth[truth.isfinite()]
    largest = finite.abs().max().item() if finite.numel() else 0.0
    info = torch.finfo(dtype)
    return max(info.eps * max(largest, magnitude), info.smallest_normal * info.eps)


def allowed_error(theirs: Error, truth: Tensor, dtype: torch.dtype, *, magnitude: float = 0.0, bare: bool = False) -> Error:
    """The errors that `assert_close_to_float64` allows for a result, given torch's error `theirs` in the same dtype. The
    maximum is always bounded; the root mean square of fewer than 64 elements may be infinite."""
    finite = truth[truth.isfinite()]
    largest = finite.abs().max().item() if finite.numel() else 0.0
    few = truth.numel() < 64 and not bare
    magnitude = 0.0 if bare else magnitude
    magnitude = magnitude if few or 30 * largest < magnitude else 0.0
    if dtype == torch.float64:
        most = rms = 1e-10 * max(largest, magnitude, torch.finfo(dtype).tiny)
    else:
        ulp = unit_in_last_place(truth, dtype, magnitude)
        most, rms = 2 * theirs.max + 4 * ulp, 2 * theirs.rms + ulp
    return Error(most, math.inf if few else rms)


def assert_close_to_float64(
    ours: Tensor,
    torchs: Tensor | Sequence[Tensor],
    truth: Tensor,
    dtype: torch.dtype | None = None,
    *,
    name: str = "result",
    magnitude: float = 0.0,
    bare: bool = False,
) -> None:
    """Raises AssertionError unless `ours` is about as close to the float64 `truth` as torch's results in the same dtype.

    With ulp = eps(dtype) * max|truth|, the maximum error may be 2 * (maximum error of torch) + 4 ulp, and the root-mean-square
    error 2 * (root-mean-square error of torch) + 1 ulp; the largest error of several `torchs` counts. In float64 both may be
    1e-10 * max|truth|. The positions of NaN and of +-inf must agree with the truth rounded to `dtype`, since float16 overflows
    where float64 does not.

    Rounding to `dtype` is allowed; ours.dtype if None. `magnitude` is the size of the terms that a result is summed from. It
    replaces max|truth| where these terms cancel (max|truth| is below a thirtieth of it, as in the gradient of a softmax over a
    single key), and in results of fewer than 64 elements. So few elements make torch's error a matter of chance; the
    root-mean-square error is then not checked. With `bare` the rule applies unchanged, for any number of elements.
    """
    torchs = [torchs] if isinstance(torchs, Tensor) else list(torchs)
    dtype = dtype or ours.dtype
    assert ours.shape == truth.shape, f"{name}: expected shape {list(truth.shape)}, got {list(ours.shape)}"
    ours, truth = ours.detach(), truth.detach().double()
    expected = truth.to(ours.dtype)
    for what, test in (("NaN", torch.isnan), ("+inf", torch.isposinf), ("-inf", torch.isneginf)):
        wrong = test(ours) != test(expected)
        if wrong.any():
            at = tuple(wrong.nonzero()[0].tolist())
            raise AssertionError(
                f"{name}: expected {what} in {int(test(expected).sum())} places, got {int(test(ours).sum())}; at {list(at)} "
                f"expected {expected[at].item()}, got {ours[at].item()} (shape {list(ours.shape)}, {dtype})"
            )
    if ours.numel() == 0:
        return
    truth = torch.where(expected.isfinite(), truth, expected.double())
    errors = [] if dtype == torch.float64 else [error(t, truth) for t in torchs]
    theirs = Error(max((e.max for e in errors), default=0.0), max((e.rms for e in errors), default=0.0))
    got, allowed = error(ours, truth), allowed_error(theirs, truth, dtype, magnitude=magnitude, bare=bare)
    if got.max <= allowed.max and got.rms <= allowed.rms:
        return
    largest = truth[truth.isfinite()].abs().max().item() if truth.isfinite().any() else 0.0
    at = tuple((ours.double() - truth).abs().nan_to_num(posinf=0.0).argmax().unsqueeze(0).tolist())
    index = [int(i) for i in torch.unravel_index(torch.tensor(at[0]), ours.shape)] if ours.dim() else []
    raise AssertionError(
        f"{name}: max error {got.max:.3g} (allowed {allowed.max:.3g}, torch {theirs.max:.3g}), rms {got.rms:.3g} (allowed "
        f"{allowed.rms:.3g}, torch {theirs.rms:.3g}), max|truth| {largest:.3g}; worst at {index}: expected "
        f"{truth[tuple(index)].item():.9g}, got {ours[tuple(index)].item():.9g} (shape {list(ours.shape)}, {dtype})"
    )


# --- Inputs ----------------------------------------------------------------------------------------------------------------

LAYOUTS = ("contiguous", "transposed", "sliced", "strided", "columns", "unaligned", "expanded")


def lay_out(tensor: Tensor, layout: str) -> Tensor:
    """A copy of the tensor with another memory layout, surrounded by poison (NaN, True, a huge integer).

    contiguous; transposed: the dimensions -3 and -2 swapped, as in [B, L, H, E] storage; sliced: cut out of a larger tensor,
    with padding in every dimension; strided: every third element of the last dimension; columns: the last two dimensions
    swapped; unaligned: starting one element past an aligned address; expanded: the first dimension has stride 0 (all of its
    entries become the first). A tensor that has too few dimensions for a layout is sliced instead.
    """
    if tensor.dim() == 0 or layout == "contiguous":
        return tensor.clone(memory_format=torch.contiguous_format)
    if layout == "transposed" and tensor.dim() >= 3:
        return lay_out(tensor.transpose(-3, -2), "sliced").transpose(-3, -2)
    if layout == "columns" and tensor.dim() >= 2:
        return lay_out(tensor.transpose(-2, -1), "sliced").transpose(-2, -1)
    if layout == "strided":
        return _cut_out(tensor, [1] * (tensor.dim() - 1) + [3], before=1, after=1)
    if layout == "unaligned":
        storage = tensor.new_full((tensor.numel() + 2,), _poison(tensor.dtype))
        return storage[1:-1].view(tensor.shape).copy_(tensor)
    if layout == "expanded" and tensor.dim() >= 2 and tensor.shape[0] > 0:
        return lay_out(tensor[:1], "sliced").expand(tensor.shape)
    return _cut_out(tensor, [1] * tensor.dim(), before=1, after=2)


def random_tensor(
    *shape: int,
    dtype: torch.dtype = torch.float32,
    layout: str = "contiguous",
    scale: float = 1.0,
    generator: torch.Generator | None = None,
    requires_grad: bool = False,
    device: str = "cpu",
) -> Tensor:
    """Normally distributed numbers times `scale`, equal on every device and in every dtype up to rounding, in a layout of
    `lay_out`. The generator is a CPU one."""
    values = torch.randn(shape, generator=generator, dtype=torch.float32) * scale
    return lay_out(values.to(device, dtype), layout).requires_grad_(requires_grad)


def _cut_out(tensor: Tensor, steps: Sequence[int], before: int, after: int) -> Tensor:
    sizes = [before + max(n * step - step + 1, 0) + after for n, step in zip(tensor.shape, steps, strict=True)]
    storage = tensor.new_full(sizes, _poison(tensor.dtype))
    window = tuple(
        slice(before, before + max(n * step - step + 1, 0), step) for n, step in zip(tensor.shape, steps, strict=True)
    )
    return storage[window].copy_(tensor)


def _poison(dtype: torch.dtype):
    if dtype.is_floating_point:
        return math.nan
    return True if dtype == torch.bool else torch.iinfo(dtype).max // 2


# --- Time and memory -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Timing:
    """Seconds per call: the median and the least of `runs` runs."""

    median: float
    best: float
    runs: int


def time_call(call: Callable[[], object], *, seconds: float = 0.5, least_runs: int = 3, device: str = "cpu") -> Timing:
    """Times a call, for about `seconds` and at least `least_runs` runs, after one run to warm up. For a CUDA device each run
    includes the synchronization."""
    wait = torch.cuda.synchronize if torch.device(device).type == "cuda" else lambda: None
    call()
    wait()
    times, end = [], time.perf_counter() + seconds
    while len(times) < least_runs or time.perf_counter() < end:
        start = time.perf_counter()
        call()
        wait()
        times.append(time.perf_counter() - start)
    return Timing(statistics.median(times), min(times), len(times))


def peak_extra_bytes(call: Callable[[], object], *, device: str = "cpu") -> int:
    """The largest number of bytes that torch's allocator held during the call beyond those it held before, results included.

    The number is exact and repeatable, as it counts calls of the allocator. On the CPU it comes from torch.profiler, which sees
    the allocations of the calling thread only; operators allocate in that thread.
    """
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        result = call()  # held until the profiler stops, so that freeing it does not count
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    del result
    held = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def peak_resident_bytes(call: Callable[[], object]) -> int | None:
    """The largest number of bytes of physical memory that the process held during the call beyond those it held before; None
    where the system is not Linux.

    This includes memory that no allocator reports. Pages, thread stacks and memory kept from before the call limit its
    precision: it is of use from some ten MiB up.
    """
    status, reset = Path("/proc/self/status"), Path("/proc/self/clear_refs")
    try:
        reset.write_text("5")  # sets the high-water mark to the present size
    except OSError:
        return None

    def kibibytes(field: str) -> int:
        line = next(line for line in status.read_text().splitlines() if line.startswith(field))
        return int(line.split()[1])

    before = kibibytes("VmHWM")
    result = call()
    peak = kibibytes("VmHWM")
    del result
    return (peak - before) * 1024
