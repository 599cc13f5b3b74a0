"""How fast KV blocks moved, and how that compares with copying the same bytes in memory."""

from __future__ import annotations

import mmap
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from services.bench.kv.blocks import KvShape
from services.bench.statistics import percentile

MEBIBYTE = 2**20


class KvTransferRate(NamedTuple):
    """Times of moving the same bytes several times, alternating with as many copies in memory."""

    name: str
    bytes: int
    seconds: Sequence[float]
    copy_seconds: Sequence[float]
    latency: float | None = None
    """Seconds until a single block is there, of the median one; None where it was not measured."""

    @property
    def rate(self) -> float:
        """Bytes per second, of the median round."""
        return self.bytes / percentile(self.seconds, 50)

    @property
    def copy_rate(self) -> float:
        """Bytes per second of the plain copy, of the median round."""
        return self.bytes / percentile(self.copy_seconds, 50)

    @property
    def ratio(self) -> float:
        """The rate as a share of the copy's rate."""
        return self.rate / self.copy_rate


class PathFailed(Exception):
    """A path could not be measured here; the text says why, and how to change that."""


def described(moved: KvTransferRate) -> dict[str, Any]:
    """The figures as a JSON object: bytes, rounds, rates in bytes per second."""
    return {
        "name": moved.name,
        "bytes": moved.bytes,
        "rounds": len(moved.seconds),
        "bytes_per_second": moved.rate,
        "copy_bytes_per_second": moved.copy_rate,
        "ratio": moved.ratio,
        "block_seconds": moved.latency,
    }


# What everything in `bench kv` is compared with: the same bytes copied in memory, a block at a time, by one thread.


class MemoryCopy:
    """Owns two buffers, both touched before."""

    def __init__(self, shape: KvShape) -> None:
        self._size, self._step = shape.total_bytes, shape.block.payload_bytes
        self._source = memoryview(_touched(self._size))
        self._target = memoryview(_touched(self._size))

    def seconds(self) -> float:
        """Copies all blocks once; returns the seconds that it took."""
        source, target, step = self._source, self._target, self._step
        begin = time.perf_counter()
        for at in range(0, self._size, step):
            target[at : at + step] = source[at : at + step]
        return time.perf_counter() - begin


def _touched(size: int) -> mmap.mmap:
    memory = mmap.mmap(-1, size)
    memory.write(b"\1" * size)
    return memory
