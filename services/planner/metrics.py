"""The metrics of the planner, for Prometheus."""

from __future__ import annotations

from typing import get_args

from prometheus_client import Counter, Gauge

from shared.messages.supervisor import PlannerDecision, ProfileSource
from shared.telemetry.metrics import service_registry

METRICS = service_registry("planner")
DECISIONS = Counter(
    "baton_planner_decisions_total", "Decisions, by what became of them.", ["outcome"], registry=METRICS
)
ENGINES = Gauge("baton_planner_engines", "Engines by role: present, wanted, target.", ["role", "of"], registry=METRICS)
RATE = Gauge(
    "baton_planner_requests_per_second", "Requests per second: observed and predicted.", ["of"], registry=METRICS
)
CORRECTION = Gauge("baton_planner_correction", "Observed latency divided by the profile's.", ["of"], registry=METRICS)
SUFFICES = Gauge("baton_planner_suffices", "1 while the wanted fleet meets the targets.", registry=METRICS)
PROFILE = Gauge(
    "baton_planner_profile", "1: the latest decision was computed with this profile.", ["source"], registry=METRICS
)


def show(decision: PlannerDecision) -> None:
    """Publishes a decision's numbers."""
    for pool in decision.pools:
        for of in ("present", "wanted", "target"):
            ENGINES.labels(pool.role, of).set(getattr(pool, of))
    RATE.labels("observed").set(decision.observed_rate or 0.0)
    RATE.labels("predicted").set(decision.predicted_rate or 0.0)
    CORRECTION.labels("ttft").set(decision.ttft_correction)
    CORRECTION.labels("itl").set(decision.itl_correction)
    SUFFICES.set(decision.suffices)
    for source in get_args(ProfileSource):
        PROFILE.labels(source).set(source == decision.profile)
