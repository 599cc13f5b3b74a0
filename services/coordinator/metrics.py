"""The metrics of a coordinator, for Prometheus."""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client import Counter, Gauge, Histogram

from services.coordinator.config import Policy
from services.coordinator.core.actions import PlaceRequest
from services.coordinator.core.engine_slowdowns import Slowdown
from services.coordinator.core.kv_sources import KvSources
from shared.ids import InstanceId
from shared.telemetry.metrics import PublishedTotals, service_registry

METRICS = service_registry("coordinator")
PLACEMENTS = Counter("baton_coordinator_placements_total", "Requests placed, by engine.", ["engine"], registry=METRICS)
REJECTIONS = Counter("baton_coordinator_rejections_total", "Requests rejected, by kind.", ["kind"], registry=METRICS)
STALE = Counter(
    "baton_coordinator_stale_total",
    "Requests dropped because a newer attempt or a withdrawal was seen.",
    registry=METRICS,
)
UNREACHABLE = Counter(
    "baton_coordinator_unreachable_total",
    "Placements that could not be delivered, by engine.",
    ["engine"],
    registry=METRICS,
)
WAITING = Gauge("baton_coordinator_waiting_requests", "Requests that wait for an engine.", registry=METRICS)
EJECTED = Gauge(
    "baton_coordinator_ejected_engines",
    "Engines that are ready, and get no requests because they fail.",
    registry=METRICS,
)
ACCUSATIONS = Counter(
    "baton_coordinator_accusations_total",
    "How often requests kept failing on an engine, by engine.",
    ["engine"],
    registry=METRICS,
)
WAITED = Histogram(
    "baton_coordinator_queue_seconds",
    "Seconds that placed requests waited for an engine.",
    buckets=(0.0001, 0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60),
    registry=METRICS,
)
DECISION = Histogram(
    "baton_router_decision_seconds",
    "Seconds to place one request.",
    buckets=(1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 5e-3, 2.5e-2),
    registry=METRICS,
)
ROUTED = Counter(
    "baton_router_requests_total",
    "Requests placed, by policy and by whether they are handed over to another engine.",
    ["policy", "kind"],
    registry=METRICS,
)
BLOCKS = Counter(
    "baton_router_prompt_blocks_total",
    "Blocks of placed prompts, by policy and by where the engine is expected to find them.",
    ["policy", "where"],
    registry=METRICS,
)
PREDICTED_CACHED = Counter(
    "baton_router_predicted_cached_tokens_total",
    "Prompt tokens predicted to be cached; engines count the tokens that were.",
    registry=METRICS,
)
PACE = Gauge(
    "baton_router_engine_pace",
    "Seconds of an engine's work as a multiple of the median engine's, by kind: prefill, decode. Others than 1 only.",
    ["engine", "kind"],
    registry=METRICS,
)
INDEX_BLOCKS = Gauge("baton_router_index_blocks", "Blocks in the prefix map.", registry=METRICS)
INDEX_SOURCES = Gauge(
    "baton_router_index_sources", "Engines and KV stores whose events are followed.", registry=METRICS
)
FORGOTTEN = Counter(
    "baton_router_index_forgotten_blocks_total", "Blocks forgotten because the prefix map was full.", registry=METRICS
)
GAPS = Counter("baton_router_event_gaps_total", "Gaps in the numbered events of engines and stores.", registry=METRICS)
DUMP_REQUESTS = Counter(
    "baton_router_dump_requests_total", "Requests to engines and stores for a complete dump.", registry=METRICS
)
DUMPS = Counter("baton_router_dumps_total", "Complete dumps received.", registry=METRICS)


def record_placement(action: PlaceRequest, policy: Policy) -> None:
    """Counts a placement that reached its engine: how long it had waited, and what was expected of its engine."""
    reuse = action.reuse
    PLACEMENTS.labels(action.engine).inc()
    WAITED.observe(action.waited)
    ROUTED.labels(policy, "local" if action.generate.decode_on is None else "disaggregated").inc()
    PREDICTED_CACHED.inc(action.generate.predicted_cached)
    BLOCKS.labels(policy, "device").inc(reuse.device)
    BLOCKS.labels(policy, "store").inc(reuse.stored)
    BLOCKS.labels(policy, "remote").inc(reuse.remote)
    BLOCKS.labels(policy, "nowhere").inc(action.blocks - reuse.blocks)


def show_slowdowns(slowdowns: Mapping[InstanceId, Slowdown]) -> None:
    """Publishes the slowdowns of these engines, and no others."""
    PACE.clear()
    for engine, slowdown in slowdowns.items():
        PACE.labels(engine, "prefill").set(slowdown.prefill)
        PACE.labels(engine, "decode").set(slowdown.decode)


def show_index(sources: KvSources, totals: PublishedTotals) -> None:
    """Publishes the size of the prefix map, and what has been counted since the last call."""
    INDEX_BLOCKS.set(len(sources.map))
    INDEX_SOURCES.set(len(sources))
    counts = sources.map.forgotten, sources.gaps, sources.requests.asked, sources.dumps
    totals.publish(zip((FORGOTTEN, GAPS, DUMP_REQUESTS, DUMPS), counts, strict=True))
