"""How fast blocks come from each other store, as measured on those that came. Knows no network, no clock."""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

KEEP = 0.98
"""How much of what was measured before still counts with each block: the last fifty or so decide."""
MAX_LINKS = 1024
"""Stores that are remembered; the one that sent least recently is forgotten first."""
MEMORY_SECONDS = 60.0
"""A link that was not used for so long is unknown: one that is too slow would else never be tried again."""


class LinkRate(NamedTuple):
    """What one link does at present, from request to arena."""

    bytes_per_second: float
    latency: float
    """Seconds until the first block comes, beyond the time of its bytes."""

    def seconds(self, size: int) -> float:
        """What so many bytes take."""
        return self.latency + size / self.bytes_per_second


class _Measured:
    __slots__ = ("at", "bytes", "first", "firsts", "seconds")

    def __init__(self) -> None:
        self.bytes = self.seconds = self.first = self.firsts = self.at = 0.0


class LinkRates:
    """Owns the measurements, by the address of the store that sent."""

    def __init__(self) -> None:
        self._links: OrderedDict[str, _Measured] = OrderedDict()

    def record(self, address: str, size: int, seconds: float, now: float, *, first: bool) -> None:
        """A block of so many bytes took so many seconds since the one before, or (`first`) since the request."""
        link = self._links.pop(address, None) or _Measured()
        if now - link.at > MEMORY_SECONDS:
            link = _Measured()
        self._links[address] = link
        link.at = now
        if first:
            link.first, link.firsts = link.first * KEEP + seconds, link.firsts * KEEP + 1.0
        else:
            link.bytes, link.seconds = link.bytes * KEEP + size, link.seconds * KEEP + seconds
        if len(self._links) > MAX_LINKS:
            self._links.popitem(last=False)

    def rate(self, address: str, now: float) -> LinkRate | None:
        """None where nothing was measured of late: at least two blocks of one request."""
        link = self._links.get(address)
        if link is None or link.seconds <= 0.0 or now - link.at > MEMORY_SECONDS:
            return None
        latency = link.first / link.firsts if link.firsts else 0.0
        return LinkRate(link.bytes / link.seconds, latency)
