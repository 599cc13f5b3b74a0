"""What the device could do at best: moving memory, and multiplying matrices.

Memory: a large copy between two places of the device, which reads and writes each byte once; on a CPU also reading
alone, by the native kernels' own probe where they can be had, as a CPU fetches what it is about to overwrite and
decoding only reads. Matrices: the best of square products of several sizes; on a CPU also the registers' peak.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from itertools import pairwise

import torch

from services.worker.measure.roofline.wire import Ceilings, Timing
from services.worker.ops.interface import OpsUnavailable
from services.worker.ops.native.kernels import NativeKernels
from services.worker.ops.native.library import HALF
from services.worker.ops.native.native_ops import NativeOps

_COPIED_BYTES = {"cpu": 256 << 20, "cuda": 4 << 30}
"""Bytes of the source and of the target, far more than any cache holds."""
_SQUARES = {"cpu": (512, 1024, 2048), "cuda": (2048, 4096, 8192, 16384)}
_PROBED_STEPS = 200_000


def measure_ceilings(watch: Stopwatch, device: torch.device, dtype: torch.dtype, budget: float) -> Ceilings:
    """The device's limits, measured for about `budget` seconds."""
    squares = _SQUARES[device.type]
    memory = {"copy": _copying(watch, device, budget / 2)}
    matrix = {"matmul": max(_multiplying(watch, device, dtype, size, budget / 2 / len(squares)) for size in squares)}
    native = _native(device, dtype)
    if native is not None:
        memory["read"] = _reading(watch, native.kernels, budget / 4)
        matrix["registers"] = _registers(watch, native, budget / 8)
    return Ceilings(memory, matrix)


def _copying(watch: Stopwatch, device: torch.device, budget: float) -> float:
    size = _copied_bytes(device)
    source, target = (torch.zeros(size // 4, dtype=torch.float32, device=device).fill_(1) for _ in range(2))
    return 2 * size / watch.timed(lambda: target.copy_(source), budget).best


def _copied_bytes(device: torch.device) -> int:
    """A GPU that is nearly full copies less."""
    wished = _COPIED_BYTES[device.type]
    return wished if device.type == "cpu" else min(wished, int(torch.cuda.mem_get_info(device)[0]) // 4)


def _multiplying(watch: Stopwatch, device: torch.device, dtype: torch.dtype, size: int, budget: float) -> float:
    # Random numbers: a GPU that multiplies zeros takes less power, and so may run faster than it ever does at work.
    one, other = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    product = torch.empty(size, size, dtype=dtype, device=device)
    return 2 * size**3 / watch.timed(lambda: torch.mm(one, other, out=product), budget).best


def _native(device: torch.device, dtype: torch.dtype) -> NativeOps | None:
    try:
        return NativeOps(device, dtype)
    except OpsUnavailable:
        return None


def _reading(watch: Stopwatch, kernels: NativeKernels, budget: float) -> float:
    memory = torch.ones(_COPIED_BYTES["cpu"], dtype=torch.uint8)
    probe = kernels.library.baton_probe_reading
    return len(memory) / watch.timed(lambda: probe(kernels.pool, memory.data_ptr(), len(memory)), budget).best


def _registers(watch: Stopwatch, native: NativeOps, budget: float) -> float:
    loaded, pool = native.kernels.library, native.kernels.pool

    def probe() -> float:
        if native.kernels.tiles and native.number == HALF:
            return float(loaded.baton_probe_tiles(pool, _PROBED_STEPS))
        return float(loaded.baton_probe_multiplying(pool, native.number, _PROBED_STEPS))

    return probe() / watch.timed(probe, budget).best


# Times work on a device: by events where it queues work, by the clock where it does not.


_MAX_RUNS = 50

Agree = Callable[[int], int]
"""Ranks that compute together must do so equally often: one's wish → the least of all."""


class Stopwatch:
    """Runs work as often as a budget allows, and once more, or twice, before it counts."""

    def __init__(self, device: torch.device, agree: Agree = lambda wish: wish, *, cpu_time: bool = False) -> None:
        """`cpu_time`: of this process on all cores, for CPUs that others keep busy; means something for one thread."""
        self._device = device
        self.clock = time.process_time if cpu_time else time.perf_counter
        self._agree = agree

    def timed(self, work: Callable[[], object], budget: float) -> Timing:
        """At least one run counts, however small `budget` (in seconds)."""
        if self._device.type == "cuda":
            self._seconds(work, 1)  # compiles kernels, which is no estimate of anything
        begun = time.perf_counter()
        self._seconds(work, 1)
        elapsed = time.perf_counter() - begun  # which is more than the work's own time where others compute, too
        runs = self._agree(max(1, min(_MAX_RUNS, int(budget / max(elapsed, 1e-9)))))
        taken = self._seconds(work, runs)
        return Timing(statistics.median(taken), min(taken), runs)

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
