"""What a coordinator counts."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

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
    "baton_coordinator_decision_seconds",
    "Time to decide on one request.",
    buckets=(1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 5e-3, 2.5e-2),
)
