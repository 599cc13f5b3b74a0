"""What captures and replays work on a device. Knows no decoder."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

Replay = Callable[[], None]
"""Does again what was captured, on the memory that it was captured on."""


class Capture(Protocol):
    """All that one of them captured shares its scratch memory, so replays may not overlap."""

    def capture(self, work: Callable[[], None]) -> Replay:
        """`work` is run twice: the first time to pay whatever is paid once. It waits for nothing, and reads and writes
        memory that stays where it is."""


class CudaCapture:
    """CUDA graphs with one memory pool."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, work: Callable[[], None]) -> Replay:
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
