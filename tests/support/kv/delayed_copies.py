"""A device that copies blocks late: nothing is done before it is waited for, and what is read too early is poison."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np
import torch

from services.worker.kv.arena_cells import Int32s
from services.worker.kv.cuda_copier import Caches, StagingBuffer, TorchBlocks

POISON = 0x7EADBEEF


class LateStage:
    def __init__(self, stream: LateBlockStream, shape: tuple[int, ...]) -> None:
        self._stream = stream
        self.on_device: Int32s = np.full(shape, POISON, dtype=np.int32)
        self.host: Int32s = torch.full(shape, POISON, dtype=torch.int32).numpy()  # as aligned as page-locked memory
        self.over = 0
        """How much must be done until nothing is on its way here."""

    def wait(self) -> None:
        self._stream.run_up_to(self.over)


class LateBlockStream:
    """See :class:`services.worker.kv.cuda_copier.BlockStream`. On a CPU."""

    def __init__(self, caches: Caches) -> None:
        self._caches = caches
        self._blocks = TorchBlocks(caches)
        self._asked: deque[Callable[[], None]] = deque()
        self._done = 0

    def stage(self, shape: tuple[int, ...]) -> LateStage:
        return LateStage(self, shape)

    def fetch(self, blocks: Int32s, stage: StagingBuffer) -> None:
        assert isinstance(stage, LateStage)

        def fetched() -> None:
            self._blocks.gather(torch.from_numpy(blocks), torch.from_numpy(stage.on_device[: len(blocks)]))
            stage.host[: len(blocks)] = stage.on_device[: len(blocks)]

        stage.host[:] = POISON
        self._ask(fetched, stage)

    def bring(self, blocks: Int32s, stage: StagingBuffer) -> None:
        assert isinstance(stage, LateStage)

        def brought() -> None:
            stage.on_device[: len(blocks)] = stage.host[: len(blocks)]
            self._blocks.scatter(torch.from_numpy(blocks), torch.from_numpy(stage.on_device[: len(blocks)]))

        self._ask(brought, stage)

    def clear(self, blocks: Int32s) -> None:
        self.run_up_to(self._done + len(self._asked))
        for halves in self._caches:
            for cache in halves:
                cache[torch.from_numpy(blocks).long()] = 0

    def run_up_to(self, count: int) -> None:
        """Runs the first `count` of all copies requested so far."""
        while self._done < count:
            self._asked.popleft()()
            self._done += 1

    def _ask(self, work: Callable[[], None], stage: LateStage) -> None:
        self._asked.append(work)
        stage.over = self._done + len(self._asked)
