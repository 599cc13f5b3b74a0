"""Times work on a device: by events where it queues work, by the clock where it does not."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from itertools import pairwise

import torch

from services.worker.roofline.findings import Timed

_MOST_RUNS = 50

Agree = Callable[[int], int]
"""Ranks that compute together must do so equally often: one's wish → the least of all."""


class Stopwatch:
    """Runs work as often as a budget allows, and once more, or twice, before it counts."""

    def __init__(self, device: torch.device, agree: Agree = lambda wish: wish, *, cpu_time: bool = False) -> None:
        """`cpu_time`: of this process on all cores, for CPUs that others keep busy; means something for one thread."""
        self._device = device
        self.clock = time.process_time if cpu_time else time.perf_counter
        self._agree = agree

    def timed(self, work: Callable[[], object], budget: float) -> Timed:
        """At least one run counts, however small `budget` (in seconds)."""
        if self._device.type == "cuda":
            self._seconds(work, 1)  # compiles kernels, which is no estimate of anything
        begun = time.perf_counter()
        self._seconds(work, 1)
        elapsed = time.perf_counter() - begun  # which is more than the work's own time where others compute, too
        runs = self._agree(max(1, min(_MOST_RUNS, int(budget / max(elapsed, 1e-9)))))
        taken = self._seconds(work, runs)
        return Timed(statistics.median(taken), min(taken), runs)

    def _seconds(self, work: Callable[[], object], runs: int) -> list[float]:
        return self._by_events(work, runs) if self._device.type == "cuda" else self._by_clock(work, runs)

    def _by_clock(self, work: Callable[[], object], runs: int) -> list[float]:
        taken = []
        for _ in range(runs):
            begun = self.clock()
            work()
            taken.append(self.clock() - begun)
        return taken

    def _by_events(self, work: Callable[[], object], runs: int) -> list[float]:
        """Runs are queued one behind the other: the host's part shows as far as the device has to wait for it."""
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(runs + 1)]  # type: ignore[no-untyped-call]
        torch.cuda.synchronize(self._device)
        marks[0].record()
        for mark in marks[1:]:
            work()
            mark.record()
        torch.cuda.synchronize(self._device)
        return [before.elapsed_time(after) / 1e3 for before, after in pairwise(marks)]
