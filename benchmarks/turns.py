"""How calls are timed: contestants take turns, and their medians count."""

from __future__ import annotations

import gc
import statistics
import time
from contextlib import nullcontext

import torch

from flash_online import testing

TURN_SECONDS = 0.005  # a turn of a short call: several calls, after one to warm up
LONG_CALL = 0.05  # seconds from which a call is its own warm-up
EVENT_SECONDS = 0.002  # a turn between two events
GRAPH_SECONDS, MOST_NODES = 0.002, 100  # a turn of a CUDA graph; calls in it


class Turns:
    """A call that is timed a turn at a time; the seconds a call took, one number a turn."""

    def __init__(self, call, setting, device: str, most: int | None = None):
        self.call, self.setting, self.device, self.most = call, setting, device, most
        self.times: list[float] = []

    def take(self) -> None:
        if self.most is not None and len(self.times) >= self.most:
            return
        with self.setting():
            self.times.append(self._on_cuda() if self.device == "cuda" else self._on_cpu())

    def _on_cuda(self) -> float:
        raise NotImplementedError("on CUDA: Events, Replays or Enqueued")

    def _on_cpu(self) -> float:
        if not self.times or self.times[-1] < LONG_CALL:
            self.call()
        took, end = [], time.perf_counter() + TURN_SECONDS
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


class Events(Turns):
    """Turns between two CUDA events, after a call to warm up, behind which the host is ahead of the device: as many calls as
    fill a turn, at least one."""

    repeat = 0

    def _on_cuda(self) -> float:
        if not self.repeat:
            self.repeat = max(1, min(MOST_NODES, round(EVENT_SECONDS / self._timed(2))))
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


class Replays(Turns):
    """Turns of a CUDA graph, captured on that stream, of as many calls as fill a turn; of the call itself where that alone
    takes as long. To be made within the call's setting."""

    def __init__(self, call, pool, stream=None, most: int | None = None):
        super().__init__(call, nullcontext, "cuda", most)
        once = testing.time_call(call, seconds=0, least_runs=2, device="cuda").best
        self.nodes = max(1, min(MOST_NODES, round(GRAPH_SECONDS / once)))
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


class Enqueued(Turns):
    """Seconds of the host for a call, of many in a row; with `wait` until the device is done with them too."""

    def __init__(self, call, setting, device: str, wait: bool):
        super().__init__(call, setting, device)
        self.wait = wait

    def _on_cuda(self) -> float:
        self.call()
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(MOST_NODES):
            self.call()
        if self.wait:
            torch.cuda.synchronize()
        return (time.perf_counter() - start) / MOST_NODES


def take_turns(all_turns: list[Turns], seconds: float, rounds: int) -> None:
    collected = gc.isenabled()
    gc.collect()
    gc.disable()
    end, done = time.perf_counter() + seconds, 0
    while done < rounds or time.perf_counter() < end:
        for turns in all_turns if done % 2 == 0 else reversed(all_turns):
            turns.take()
        done += 1
    if collected:
        gc.enable()
