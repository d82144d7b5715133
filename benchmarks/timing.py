"""Times calls: samples of all providers are interleaved, and the median of each counts."""

from __future__ import annotations

import functools
import gc
import statistics
import time
from contextlib import nullcontext

import torch

from flash_online import testing

SAMPLE_SECONDS = 0.005  # a sample of a short call on the CPU: several calls, after one to warm up
LONG_CALL = 0.05  # a call this long needs no warm-up call
EVENT_SECONDS = 0.002  # a sample between two events
GRAPH_SECONDS, MAX_NODES = 0.002, 100  # a sample of a CUDA graph; calls in the graph


class Timer:
    """A call and its samples: `times` has the seconds of one call, once per sample."""

    def __init__(self, call, setting, device: str, max_samples: int | None = None):
        self.call, self.setting, self.device, self.max_samples = call, setting, device, max_samples
        self.times: list[float] = []

    def sample(self) -> None:
        if self.max_samples is not None and len(self.times) >= self.max_samples:
            return
        with self.setting():
            self.times.append(self._on_cuda() if self.device == "cuda" else self._on_cpu())

    def _on_cuda(self) -> float:
        raise NotImplementedError("on CUDA: EventTimer, GraphTimer or HostTimer")

    def _on_cpu(self) -> float:
        if not self.times or self.times[-1] < LONG_CALL:
            self.call()
        took, end = [], time.perf_counter() + SAMPLE_SECONDS
        while not took or time.perf_counter() < end:
            start = time.perf_counter()
            self.call()
            took.append(time.perf_counter() - start)
        return statistics.median(took)

    @property
    def median(self) -> float:
        return statistics.median(self.times)

    @property
    def best(self) -> float:
        return min(self.times)


class EventTimer(Timer):
    """Samples are timed between two CUDA events. A call before them warms up and lets the host run ahead of the device. A
    sample has enough calls to fill it, at least one."""

    repeat = 0

    def _on_cuda(self) -> float:
        if not self.repeat:
            self.repeat = max(1, min(MAX_NODES, round(EVENT_SECONDS / self._timed(2))))
        return self._timed(self.repeat)

    def _timed(self, repeat: int) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.call()
        begin.record()
        for _ in range(repeat):
            self.call()
        end.record()
        end.synchronize()
        return 1e-3 * begin.elapsed_time(end) / repeat


class GraphTimer(Timer):
    """Samples replay a CUDA graph, captured on that stream, with enough calls to fill a sample; a call that fills one alone is
    not captured. Construct it within the call's setting."""

    def __init__(self, call, pool, stream=None, max_samples: int | None = None):
        super().__init__(call, nullcontext, "cuda", max_samples)
        once = testing.time_call(call, seconds=0, least_runs=2, device="cuda").best
        self.nodes = max(1, min(MAX_NODES, round(GRAPH_SECONDS / once)))
        self.graph = None
        if self.nodes > 1:
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph, pool=pool, stream=stream):
                for _ in range(self.nodes):
                    call()
            once = testing.time_call(self.graph.replay, seconds=0, device="cuda").best / self.nodes
        self.repeat = max(1, round(GRAPH_SECONDS / (once * self.nodes)))

    def _on_cuda(self) -> float:
        run = self.graph.replay if self.graph else self.call

        def calls():
            for _ in range(self.repeat):
                run()

        seconds = testing.time_call(calls, seconds=0, least_runs=1, device="cuda").median
        return seconds / (self.repeat * self.nodes)


class HostTimer(Timer):
    """Host seconds per call, over many calls in a row; with `wait` until the device has finished them too."""

    def __init__(self, call, setting, device: str, wait: bool):
        super().__init__(call, setting, device)
        self.wait = wait

    def _on_cuda(self) -> float:
        self.call()
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(MAX_NODES):
            self.call()
        if self.wait:
            torch.cuda.synchronize()
        return (time.perf_counter() - start) / MAX_NODES


def interleave(timers: list[Timer], seconds: float, rounds: int) -> None:
    """Samples every timer once per round, in alternating order, for at least `rounds` rounds and `seconds` seconds."""
    collected = gc.isenabled()
    gc.collect()
    gc.disable()
    end, done = time.perf_counter() + seconds, 0
    while done < rounds or time.perf_counter() < end:
        for timer in timers if done % 2 == 0 else reversed(timers):
            timer.sample()
        done += 1
    if collected:
        gc.enable()


@functools.cache
def matmul(size: int, dtype: torch.dtype, device: str):
    """A product of two square matrices: the baseline of attention. In float8 its result is bfloat16."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(size, size, generator=generator).to(dtype).to(device) for _ in range(2))
    if dtype == torch.float8_e4m3fn:
        one = torch.ones((), device=device)
        return lambda: torch._scaled_mm(a, b.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True)
    out = torch.empty_like(a)
    return lambda: torch.mm(a, b, out=out)


def call_timer(call, setting, device: str, max_samples: int | None = None) -> Timer:
    return (EventTimer if device == "cuda" else Timer)(call, setting, device, max_samples)


def graph_timer(call, setting, stream, max_samples: int | None = None) -> Timer:
    """Times a call as replays of a CUDA graph on that stream."""
    with setting(), torch.cuda.stream(stream):
        return GraphTimer(call, torch.cuda.graph_pool_handle(), stream, max_samples)
