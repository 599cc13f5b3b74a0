"""The metrics that every service has, and the port where they are read."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

from prometheus_client import Counter, Gauge, start_http_server

UNDECODABLE = Counter(
    "baton_undecodable_messages_total", "Payloads that could not be decoded, by subject.", ["subject"]
)
HANDLED = Counter("baton_messages_handled_total", "Messages that the service's actor has handled.", ["service"])
UNDELIVERED = Counter("baton_undelivered_messages_total", "Messages that had no subscriber.", ["service"])
PHASE = Gauge("baton_phase", "1 for the phase that the service is in, 0 for others.", ["service", "phase"])
HEARTBEAT_AGE = Gauge("baton_heartbeat_age_seconds", "Since the service's event loop last ran its heartbeat.")
BUS_CONNECTED = Gauge("baton_bus_connected", "1 while the bus is reachable.")

_MILLISECONDS = (1, 2.5, 5, 10, 20, 40, 60, 80, 100, 250, 500, 750, 1_000, 2_500, 5_000, 10_000, 20_000, 40_000, 80_000)
LATENCY_BUCKETS = tuple(ms / 1000 for ms in _MILLISECONDS)
"""Seconds; fine enough for time to first token and for inter-token latency alike."""


class PublishedTotals:
    """Owns what was published last of totals that only grow, so that counters grow by the differences."""

    def __init__(self) -> None:
        self._published: dict[Counter, tuple[object, float]] = {}

    def publish(self, totals: Iterable[tuple[Counter, float]], source: object = None) -> None:
        """Adds to each counter what its total has grown by since the last call; from 0 where the source is another."""
        for counter, total in totals:
            last_source, published = self._published.get(counter, (source, 0.0))
            grown = total - published if last_source == source else total
            if grown:
                counter.inc(grown)
            self._published[counter] = source, total


@contextlib.contextmanager
def metrics_server(host: str, port: int | None) -> Iterator[int | None]:
    """Serves `/metrics` on a thread while the context is open; port 0 picks a free one. Yields the port."""
    if port is None:
        yield None
        return
    server, thread = start_http_server(port, addr=host)
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join(timeout=2)
