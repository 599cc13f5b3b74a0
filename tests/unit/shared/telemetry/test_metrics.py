"""Counters grow by what totals have grown by."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter

from shared.telemetry.metrics import PublishedTotals


def test_totals_become_counters() -> None:
    registry, totals = CollectorRegistry(), PublishedTotals()
    blocks = Counter("blocks", "Blocks.", registry=registry)
    found = Counter("found", "Found.", ["where"], registry=registry)
    for total in (3, 3, 7):
        totals.publish([(blocks, total), (found.labels("here"), 2 * total)])
    assert registry.get_sample_value("blocks_total") == 7
    assert registry.get_sample_value("found_total", {"where": "here"}) == 14


def test_totals_of_another_source_begin_at_nothing() -> None:
    registry, totals = CollectorRegistry(), PublishedTotals()
    lost = Counter("lost", "Lost.", registry=registry)
    for source, total in (("first", 5), ("second", 2), ("second", 4)):
        totals.publish([(lost, total)], source)
    assert registry.get_sample_value("lost_total") == 5 + 4
