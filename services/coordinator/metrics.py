"""What a coordinator counts."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

from services.coordinator.core.actions import Place
from services.coordinator.core.kv_sources import KvSources
from services.coordinator.core.routing import Policy

PLACEMENTS = Counter("baton_coordinator_placements_total", "Requests placed, by engine.", ["engine"])
REJECTIONS = Counter("baton_coordinator_rejections_total", "Requests rejected, by kind.", ["kind"])
STALE = Counter("baton_coordinator_stale_total", "Requests dropped because a newer attempt or a withdrawal was seen.")
UNREACHABLE = Counter("baton_coordinator_unreachable_total", "Placements that found nobody, by engine.", ["engine"])
WAITING = Gauge("baton_coordinator_waiting_requests", "Requests that wait here for an engine.")
WAITED = Histogram(
    "baton_coordinator_queue_seconds",
    "How long placed requests had waited here.",
    buckets=(0.0001, 0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60),
)
DECISION = Histogram(
    "baton_router_decision_seconds",
    "Time to decide on one request.",
    buckets=(1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 5e-3, 2.5e-2),
)
ROUTED = Counter(
    "baton_router_requests_total",
    "Requests placed, by policy and by whether another engine decodes.",
    ["policy", "kind"],
)
BLOCKS = Counter(
    "baton_router_prompt_blocks_total",
    "Blocks of placed prompts, by policy and by where the engine is expected to find them.",
    ["policy", "where"],
)
PREDICTED_CACHED = Counter(
    "baton_router_predicted_cached_tokens_total",
    "Tokens of placed prompts that need not be computed, as predicted; engines count what they found.",
)
INDEX_BLOCKS = Gauge("baton_router_index_blocks", "Blocks in the prefix map.")
INDEX_SOURCES = Gauge("baton_router_index_sources", "Engines and KV stores whose events are followed.")
FORGOTTEN = Counter("baton_router_index_forgotten_blocks_total", "Blocks that the prefix map's limit cost.")
GAPS = Counter("baton_router_event_gaps_total", "Times that a source's events were missed.")
DUMP_REQUESTS = Counter("baton_router_dump_requests_total", "Times that a source was asked for all that it holds.")
DUMPS = Counter("baton_router_dumps_total", "Complete answers to that.")


def note_routed(place: Place, policy: Policy) -> None:
    """Counts what was expected of a placement."""
    reuse = place.reuse
    ROUTED.labels(policy, "local" if place.generate.decode_on is None else "disaggregated").inc()
    PREDICTED_CACHED.inc(place.generate.predicted_cached)
    parts = {"device": reuse.device, "store": reuse.stored, "remote": reuse.remote}
    for where, blocks in {**parts, "nowhere": place.blocks - reuse.blocks}.items():
        BLOCKS.labels(policy, where).inc(blocks)


class IndexGauges:
    """Owns what was shown of the sources last, so that their running totals become counters."""

    def __init__(self) -> None:
        self._shown: dict[Counter, int] = {}

    def show(self, sources: KvSources) -> None:
        INDEX_BLOCKS.set(len(sources.map))
        INDEX_SOURCES.set(len(sources))
        self._raise(FORGOTTEN, sources.map.forgotten)
        self._raise(GAPS, sources.gaps)
        self._raise(DUMP_REQUESTS, sources.requests.asked)
        self._raise(DUMPS, sources.dumps)

    def _raise(self, counter: Counter, total: int) -> None:
        counter.inc(total - self._shown.get(counter, 0))
        self._shown[counter] = total
