"""What captures and replays work on a device. Knows no decoder."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from services.worker.platforms.interface import MemoryReading

Replay = Callable[[], None]
"""Does again what was captured, on the memory that it was captured on."""


class Capture(Protocol):
    """Captures launches and replays them. All that one captured shares its scratch memory: replays may not overlap."""

    def capture(self, work: Callable[[], None]) -> Replay:
        """`work` is run twice: the first time to pay whatever is paid once. It waits for nothing, and reads and writes
        memory that stays where it is."""


class CudaCapture:
    """CUDA graphs with one memory pool."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, work: Callable[[], None]) -> Replay:
        """See `Capture.capture`."""
        # The first run compiles kernels, takes workspaces and makes NCCL's connections, which no capture survives.
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            work()
        torch.cuda.current_stream().wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # NCCL's watchdog, and whoever else has a thread, may ask the device for something meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            work()
        replay: Replay = graph.replay
        return replay


# What captured decodes take of a device's memory, found by capturing two of them.


MAX_DRIVER_BYTES = 32 << 20
"""Bytes that the driver may keep for one graph. What else is missing then was taken by other processes meanwhile."""


class MeasuredCapture:
    """Captures as another does, and looks at the memory before, between and behind."""

    def __init__(self, capture: Capture, look: Callable[[], MemoryReading]) -> None:
        self._capture = capture
        self._look = look
        self._seen = [look()]

    def capture(self, work: Callable[[], None]) -> Replay:
        """See `Capture.capture`; looks at the memory behind it."""
        replay = self._capture.capture(work)
        self._seen.append(self._look())
        return replay

    def of_all(self, sizes: int) -> int:
        """Bytes that so many sizes take when the largest are those that were captured: the first takes the memory that
        the others share, and each of them little more than what its own launches take."""
        taken = [_taken(before, after) for before, after in zip(self._seen[:-1], self._seen[1:], strict=True)]
        return sum(taken) + (sizes - len(taken)) * (taken[-1] if taken else 0)


def _taken(before: MemoryReading, after: MemoryReading) -> int:
    """By one graph. Others may take and give back what they like meanwhile."""
    own = max(0, after.own - before.own)
    return min(max(own, before.free - after.free), own + MAX_DRIVER_BYTES)
