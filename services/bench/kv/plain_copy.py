"""What everything in `bench kv` is compared with: the same bytes copied in memory, a block at a time, by one thread."""

from __future__ import annotations

import mmap
import time

from services.bench.kv.blocks import KvShape


class PlainCopy:
    """Owns two pieces of memory, both touched before."""

    def __init__(self, shape: KvShape) -> None:
        self._size, self._step = shape.total_bytes, shape.block.payload_bytes
        self._source = memoryview(_touched(self._size))
        self._target = memoryview(_touched(self._size))

    def seconds(self) -> float:
        """For all blocks."""
        source, target, step = self._source, self._target, self._step
        begin = time.perf_counter()
        for at in range(0, self._size, step):
            target[at : at + step] = source[at : at + step]
        return time.perf_counter() - begin


def _touched(size: int) -> mmap.mmap:
    memory = mmap.mmap(-1, size)
    memory.write(b"\1" * size)
    return memory
