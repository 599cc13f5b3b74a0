"""The metrics that every service has, and the port where they are read."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, generate_latest, start_http_server
from prometheus_client.core import Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.openmetrics.exposition import ALLOWUTF8
from prometheus_client.openmetrics.exposition import generate_latest as openmetrics_page
from prometheus_client.registry import Collector

UNDECODABLE = Counter(
    "baton_undecodable_messages_total", "Payloads that could not be decoded, by subject.", ["subject"]
)
HANDLED = Counter("baton_messages_handled_total", "Messages that the service's actor has handled.", ["service"])
UNDELIVERED = Counter("baton_undelivered_messages_total", "Messages that had no subscriber.", ["service"])
PHASE = Gauge("baton_phase", "1 for the phase that the service is in, 0 for others.", ["service", "phase"])
HEARTBEAT_AGE = Gauge("baton_heartbeat_age_seconds", "Since the service's event loop last ran its heartbeat.")
BUS_CONNECTED = Gauge("baton_bus_connected", "1 while the bus is reachable.")
BUS_ROUND_TRIP = Gauge(
    "baton_bus_round_trip_seconds",
    "From the latest ping of the bus's server to its answer, or as long as it was waited for; every 5 s.",
)
BUS_DROPPED = Counter(
    "baton_bus_dropped_messages_total",
    "Messages lost at this process: received faster than handled (slow_consumer), or not sent as the bus was away and "
    "the buffer full (buffer_full).",
    ["why"],
)
for why in ("slow_consumer", "buffer_full"):
    BUS_DROPPED.labels(why)
INBOX = Gauge("baton_inbox_messages", "Messages that have arrived and that the service's actor has not handled.")

_MILLISECONDS = (1, 2.5, 5, 10, 20, 40, 60, 80, 100, 250, 500, 750, 1_000, 2_500, 5_000, 10_000, 20_000, 40_000, 80_000)
LATENCY_BUCKETS = tuple(ms / 1000 for ms in _MILLISECONDS)
"""Seconds; fine enough for time to first token and for inter-token latency alike."""


TOKEN_BUCKETS = tuple(digit * 10**power for power in range(6) for digit in (1, 2, 5))
"""Tokens of a request."""


class ForeignName(NamedTuple):
    """What another server calls one of our metrics, or a part of it."""

    metric: str
    """Our name, without `_total`."""
    name: str
    """The other's, likewise."""
    where: Mapping[str, str] = {}
    """Samples with these labels only."""
    summed: Sequence[str] = ()
    """Labels that the other does not have: samples that differ in them are added up."""


class ForeignNames(Collector):
    """Our metrics once more, under the names and labels of another server, so that its dashboards read them."""

    def __init__(
        self, sources: Sequence[Collector], names: Sequence[ForeignName], labels: Mapping[str, str] | None = None
    ) -> None:
        """`sources`: where our metrics are. `labels`: what the other server calls our labels."""
        self._sources, self.names, self._labels = sources, names, labels or {}
        self.added: Mapping[str, str] | None = {}
        """Labels of the other server that no sample of ours has; None: there is nothing to show yet."""

    def collect(self) -> Iterator[Metric]:
        """Yields the metrics, as `prometheus_client` asks for them."""
        if self.added is None:
            return
        families = {family.name: family for source in self._sources for family in source.collect()}
        for name in self.names:
            yield self._renamed(families[name.metric], name, self.added)

    def _renamed(self, family: Metric, name: ForeignName, added: Mapping[str, str]) -> Metric:
        sums: defaultdict[tuple[str, tuple[tuple[str, str], ...]], float] = defaultdict(float)
        for sample in family.samples:
            if sample.name.endswith("_created") or not name.where.items() <= sample.labels.items():
                continue
            left_out = {*name.where, *name.summed}
            labels = {self._labels.get(key, key): value for key, value in sample.labels.items() if key not in left_out}
            sums[name.name + sample.name[len(family.name) :], (*added.items(), *labels.items())] += sample.value
        renamed = Metric(name.name, family.documentation, family.type)
        for (sample_name, all_labels), value in sums.items():
            renamed.add_sample(sample_name, dict(all_labels), value)
        return renamed


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


@cache
def service_registry(service: str) -> CollectorRegistry:
    """Returns where the metrics of one service are. Each has its own, as a process may hold the code of others, too:
    services are forked from one that has imported them all (ADR 40), and must not show counters that stay 0."""
    return CollectorRegistry()


class ProcessMetrics(Collector):
    """What a process measures: what the library says of any process, what every service has, and its services' own."""

    def __init__(self, *services: str, added: Sequence[Collector] = ()) -> None:
        """`added`: further ones."""
        self._services = services
        self.added = added

    def collect(self) -> Iterator[Metric]:
        """Yields the metrics, as `prometheus_client` asks for them."""
        for source in (REGISTRY, *map(service_registry, self._services), *self.added):
            yield from source.collect()


TEXT, OPENMETRICS = (
    "text/plain; version=0.0.4; charset=utf-8",
    "application/openmetrics-text; version=1.0.0; charset=utf-8",
)
"""Content types of pages."""


def wants_openmetrics(accept: str) -> bool:
    """Whether a client with this `Accept` is to get the OpenMetrics format, which has exemplars."""
    return "openmetrics" in choose_encoder(accept)[1]


def metrics_page(registry: Collector, *, openmetrics: bool) -> bytes:
    """What is measured, in Prometheus' text format or in OpenMetrics'.

    By itself the library writes `vllm_x` for the name `vllm:x` in the latter, though both formats have colons."""
    if openmetrics:
        page: bytes = openmetrics_page(registry, escaping=ALLOWUTF8, version="1.0.0")  # type: ignore[no-untyped-call]
        return page
    return generate_latest(registry)


@contextlib.contextmanager
def metrics_server(host: str, port: int | None, metrics: Collector) -> Iterator[int | None]:
    """Serves `/metrics` on a thread while the context is open; port 0 picks a free one. Yields the port."""

    def answer(environ: dict[str, Any], start_response: Any) -> list[bytes]:
        openmetrics = wants_openmetrics(environ.get("HTTP_ACCEPT", ""))
        page = metrics_page(metrics, openmetrics=openmetrics)
        start_response("200 OK", [("Content-Type", OPENMETRICS if openmetrics else TEXT)])
        return [page]

    if port is None:
        yield None
        return
    server, thread = start_http_server(port, addr=host)
    server.set_app(answer)
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join(timeout=2)
