"""The metrics of a detokenizer, for Prometheus."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

from services.detokenizer.core.actions import DetokenizerCounters
from shared.telemetry.metrics import PublishedTotals, service_registry

METRICS = service_registry("detokenizer")
STREAMS = Gauge("baton_detokenizer_streams", "Open streams.", registry=METRICS)
TOKENS = Counter("baton_detokenizer_tokens_total", "Tokens turned into text.", registry=METRICS)
STOPPED = Counter("baton_detokenizer_stopped_total", "Requests ended by a stop string.", registry=METRICS)
UNKNOWN = Counter(
    "baton_detokenizer_unknown_total", "Messages about attempts without an open stream.", registry=METRICS
)
STALE = Counter("baton_detokenizer_stale_batches_total", "Batches of an engine's former epoch.", registry=METRICS)
GAPS = Counter("baton_detokenizer_gaps_total", "Gaps in the numbered batches of engines.", registry=METRICS)
FAILED = Counter("baton_detokenizer_failed_total", "Requests that failed here.", registry=METRICS)
SECONDS = Histogram(
    "baton_detokenizer_batch_seconds",
    "Seconds for one batch of tokens, from its arrival to the last message sent.",
    buckets=(5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2, 0.1),
    registry=METRICS,
)


def publish(counters: DetokenizerCounters, totals: PublishedTotals) -> None:
    """Publishes what was counted since the last call."""
    totals.publish(
        (
            (TOKENS, counters.tokens),
            (STOPPED, counters.stopped),
            (UNKNOWN, counters.unknown),
            (STALE, counters.stale),
            (GAPS, counters.gaps),
            (FAILED, counters.failed),
        )
    )
