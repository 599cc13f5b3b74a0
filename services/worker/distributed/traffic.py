"""What a rank has exchanged with others, by the kind of exchange: through memory of their host, and in data-parallel
groups by all-to-all. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

ExchangeName = Literal[
    "sum", "gather", "broadcast", "all_gather", "reduce_scatter", "dispatch", "combine", "all_to_all"
]


class ExchangedBytes(NamedTuple):
    """Payload of all exchanges of a kind since the rank started."""

    kind: ExchangeName
    sent: int
    """That others could read of this rank."""
    received: int
    """That this rank read of others: of each of them where it adds up what all have."""


class HostTraffic:
    """Owns what is counted in this process. Counted by the threads that exchange; read by any."""

    def __init__(self) -> None:
        self._counted: dict[ExchangeName, ExchangedBytes] = {}

    def add(self, kind: ExchangeName, sent: int, received: int) -> None:
        """An exchange is over."""
        _, before_sent, before_received = self._counted.get(kind, (kind, 0, 0))
        self._counted[kind] = ExchangedBytes(kind, before_sent + sent, before_received + received)

    def __iter__(self) -> Iterator[ExchangedBytes]:
        yield from tuple(self._counted.values())


HOST_TRAFFIC = HostTraffic()
"""Of this process, which is one rank."""
