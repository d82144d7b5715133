"""What tests, benchmarks and the demo measure with: the error metric and its tolerance, inputs in awkward layouts, a timer
and two meters of memory. None of it knows the kernels.
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
    """How far a result lies from the truth, over the positions where both are finite."""

    max: float
    rms: float


def error(result: Tensor, truth: Tensor) -> Error:
    """The largest and the root-mean-square difference to a float64 truth."""
    difference = result.detach().double() - truth.detach().double()
    difference = difference[difference.isfinite()]
    if difference.numel() == 0:
        return Error(0.0, 0.0)
    return Error(difference.abs().max().item(), difference.square().mean().sqrt().item())


def unit_in_last_place(truth: Tensor, dtype: torch.dtype, magnitude: float = 0.0) -> float:
    """eps(dtype) * max|truth|, at least the spacing of dtype's smallest numbers; `magnitude` raises max|truth|."""
    finite = truth[truth.isfinite()]
    largest = finite.abs().max().item() if finite.numel() else 0.0
    info = torch.finfo(dtype)
    return max(info.eps * max(largest, magnitude), info.smallest_normal * info.eps)


def assert_close_to_float64(
    ours: Tensor,
    torchs: Tensor | Sequence[Tensor],
    truth: Tensor,
    dtype: torch.dtype | None = None,
    *,
    name: str = "result",
    magnitude: float = 0.0,
) -> None:
    """Raises AssertionError unless `ours` is about as close to the float64 `truth` as torch's results in the same dtype.

    With ulp = eps(dtype) * max|truth|: max error(ours) <= 2 * max error(torch) + 4 ulp, and the root mean square likewise with
    1 ulp; torch is whichever of `torchs` is farther off. In float64: 1e-10 of max|truth|. Positions of NaN and of +-inf
    are compared first, with the truth rounded to `dtype`, since float16 overflows where float64 does not.

    `dtype` is the one whose rounding is allowed; ours.dtype if not given. `magnitude` is the size of the terms that a result
    is summed from. It stands in for max|truth| where they cancel (max|truth| is below a thirtieth of it: the gradient of a
    softmax over a single key), and in results of fewer than 64 elements, where torch's error is luck rather than a measure;
    there the root mean square is luck too and is not looked at.
    """
    torchs = [torchs] if isinstance(torchs, Tensor) else list(torchs)
    dtype = dtype or ours.dtype
    assert ours.shape == truth.shape, f"{name}: shape {list(ours.shape)}, expected {list(truth.shape)}"
    ours, truth = ours.detach(), truth.detach().double()
    expected = truth.to(ours.dtype)
    for what, test in (("NaN", torch.isnan), ("+inf", torch.isposinf), ("-inf", torch.isneginf)):
        wrong = test(ours) != test(expected)
        if wrong.any():
            at = tuple(wrong.nonzero()[0].tolist())
            raise AssertionError(
                f"{name}: {what} in {int(test(ours).sum())} places, expected in {int(test(expected).sum())}; "
                f"at {list(at)} got {ours[at].item()}, expected {expected[at].item()} (shape {list(ours.shape)}, {dtype})"
            )
    if ours.numel() == 0:
        return
    truth = torch.where(expected.isfinite(), truth, expected.double())
    finite = truth[truth.isfinite()]
    largest = finite.abs().max().item() if finite.numel() else 0.0
    few = ours.numel() < 64
    magnitude = magnitude if few or 30 * largest < magnitude else 0.0
    got = error(ours, truth)
    if dtype == torch.float64:
        allowed = Error(*[1e-10 * max(largest, magnitude, torch.finfo(dtype).tiny)] * 2)
        theirs = Error(0.0, 0.0)
    else:
        ulp = unit_in_last_place(truth, dtype, magnitude)
        errors = [error(t, truth) for t in torchs]
        theirs = Error(max((e.max for e in errors), default=0.0), max((e.rms for e in errors), default=0.0))
        allowed = Error(2 * theirs.max + 4 * ulp, 2 * theirs.rms + ulp)
    if got.max <= allowed.max and (got.rms <= allowed.rms or few):
        return
    at = tuple((ours.double() - truth).abs().nan_to_num(posinf=0.0).argmax().unsqueeze(0).tolist())
    index = [int(i) for i in torch.unravel_index(torch.tensor(at[0]), ours.shape)] if ours.dim() else []
    raise AssertionError(
        f"{name}: max error {got.max:.3g} (allowed {allowed.max:.3g}, torch {theirs.max:.3g}), rms {got.rms:.3g} (allowed "
        f"{allowed.rms:.3g}, torch {theirs.rms:.3g}), max|truth| {largest:.3g}; worst at {index}: got "
        f"{ours[tuple(index)].item():.9g}, expected {truth[tuple(index)].item():.9g} (shape {list(ours.shape)}, {dtype})"
    )


# --- Inputs ----------------------------------------------------------------------------------------------------------------

LAYOUTS = ("contiguous", "transposed", "sliced", "strided", "columns", "unaligned", "expanded")


def lay_out(tensor: Tensor, layout: str) -> Tensor:
    """A copy of the tensor whose elements lie in memory in another way, with poison (NaN, True, a huge integer) around them.

    contiguous; transposed: the dimensions -3 and -2 swapped, as in [B, L, H, E] storage; sliced: cut out of a larger tensor,
    padding in every dimension; strided: every third element of the last dimension; columns: the last two dimensions swapped;
    unaligned: starting one element past an aligned address; expanded: the first dimension has stride 0 (its other entries
    are lost). A tensor of too few dimensions for a layout is sliced instead.
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
) -> Tensor:
    """Normal numbers times `scale` on the CPU, the same in every dtype up to rounding, laid out as `lay_out` does."""
    values = torch.randn(shape, generator=generator, dtype=torch.float32) * scale
    return lay_out(values.to(dtype), layout).requires_grad_(requires_grad)


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
    """Seconds a call takes: the median and the least of `runs` runs."""

    median: float
    best: float
    runs: int


def time_call(call: Callable[[], object], *, seconds: float = 0.5, least_runs: int = 3, device: str = "cpu") -> Timing:
    """Times a call after one run to warm up, for about `seconds` and at least `least_runs` runs; waits for a CUDA device."""
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
    """The most bytes that torch's allocator held during the call beyond what it held before, what is returned included.

    Counts calls of the allocator, so it is exact and repeatable. On the CPU it goes through torch.profiler and sees only
    what the calling thread allocates, which is where operators allocate.
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
    """The most bytes of physical memory that the process held during the call beyond what it held before; Linux, else None.

    Counts what no allocator reports, to the precision of pages, thread stacks and memory kept from before the call: of use
    from some ten MiB up.
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
