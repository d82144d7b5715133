"""How calls are timed: contestants take turns, and their medians count."""

from __future__ import annotations

import gc
import statistics
import time

from flash_online import testing

TURN_SECONDS = 0.005  # a turn of a short call: several calls, after one to warm up
LONG_CALL = 0.05  # seconds from which a call is its own warm-up


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
        repeat = 10  # calls between two waits, so that a launch's latency does not count

        def calls():
            for _ in range(repeat):
                self.call()

        return testing.time_call(calls, seconds=0, least_runs=1, device=self.device).median / repeat

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
