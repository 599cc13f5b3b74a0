"""The metrics that every service has, and the port where they are read."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from prometheus_client import Counter, Gauge, start_http_server

UNDECODABLE = Counter("baton_undecodable_messages_total", "Payloads that were no message of ours.", ["subject"])
HANDLED = Counter("baton_messages_handled_total", "Messages an actor handled.", ["service"])
UNDELIVERED = Counter("baton_undelivered_messages_total", "Messages that had no subscriber.", ["service"])
PHASE = Gauge("baton_phase", "1 for the phase the service is in.", ["service", "phase"])
BUS_CONNECTED = Gauge("baton_bus_connected", "1 while the bus is reachable.")

LATENCY_BUCKETS = (
    0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
"""Seconds; fine enough for time to first token and for inter-token latency alike."""


@contextlib.contextmanager
def metrics_server(host: str, port: int | None) -> Iterator[int | None]:
    """Serves `/metrics` on a thread while the context is open; port 0 picks a free one. Yields the port, None for none."""
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
