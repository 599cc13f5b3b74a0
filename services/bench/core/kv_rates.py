"""How fast KV blocks moved, and how that compares with copying the same bytes in memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from services.bench.core.statistics import percentile

MEBIBYTE = 2**20


class Moved(NamedTuple):
    """The same bytes moved several times, and as often copied in memory, in turn."""

    name: str
    bytes: int
    seconds: Sequence[float]
    copy_seconds: Sequence[float]

    @property
    def rate(self) -> float:
        """Bytes per second, of the median round."""
        return self.bytes / percentile(self.seconds, 50)

    @property
    def copy_rate(self) -> float:
        return self.bytes / percentile(self.copy_seconds, 50)

    @property
    def ratio(self) -> float:
        """Of the copy's speed."""
        return self.rate / self.copy_rate


class Missing(NamedTuple):
    """What could not be measured here, and what to do about it."""

    name: str
    reason: str


def described(moved: Moved) -> dict[str, Any]:
    return {
        "name": moved.name,
        "bytes": moved.bytes,
        "rounds": len(moved.seconds),
        "bytes_per_second": moved.rate,
        "copy_bytes_per_second": moved.copy_rate,
        "ratio": moved.ratio,
    }
