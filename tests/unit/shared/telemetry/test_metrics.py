"""Counters grow by what totals have grown by; metrics under the names of another server."""

from __future__ import annotations

import urllib.request

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from shared.telemetry.metrics import (
    ForeignName,
    ForeignNames,
    ProcessMetrics,
    PublishedTotals,
    metrics_page,
    metrics_server,
)


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


def test_metrics_under_the_names_and_labels_of_another_server() -> None:
    """Of a counter parts are shown, and its sum; a histogram is shown whole."""
    prompts = Counter("prompts", "Prompts.", ["source", "model"], registry=None)
    seconds, running = (
        Histogram("seconds", "Seconds.", buckets=(1,), registry=None),
        Gauge("now", "Now.", registry=None),
    )
    names = ForeignNames(
        [prompts, seconds, running],
        [
            ForeignName("prompts", "their:queries", summed=["source"]),
            ForeignName("prompts", "their:hits", where={"source": "cached"}),
            ForeignName("seconds", "their:seconds"),
            ForeignName("now", "their:running"),
        ],
        {"model": "model_name"},
    )
    registry = CollectorRegistry()
    registry.register(names)
    for source, model, count in (("cached", "a", 3), ("computed", "a", 4), ("cached", "b", 5)):
        prompts.labels(source, model).inc(count)
    seconds.observe(0.5)
    running.set(2)
    names.added = {"engine": "engine-1"}
    value = registry.get_sample_value
    assert value("their:queries_total", {"engine": "engine-1", "model_name": "a"}) == 7
    assert value("their:queries_total", {"engine": "engine-1", "model_name": "b"}) == 5
    assert value("their:hits_total", {"engine": "engine-1", "model_name": "a"}) == 3
    assert value("their:seconds_bucket", {"engine": "engine-1", "le": "1.0"}) == 1
    assert value("their:seconds_sum", {"engine": "engine-1"}) == 0.5
    assert value("their:running", {"engine": "engine-1"}) == 2
    names.added = None
    assert list(registry.collect()) == []


@pytest.mark.parametrize("openmetrics", [False, True])
def test_names_keep_their_colons_in_every_format(openmetrics: bool) -> None:
    registry = CollectorRegistry()
    Counter("vllm:answers", "Answers.", ["model_name"], registry=registry).labels("a:b").inc()
    assert b'vllm:answers_total{model_name="a:b"} 1.0' in metrics_page(registry, openmetrics=openmetrics)


@pytest.mark.parametrize(
    ("accept", "kind"),
    [
        ("application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.2", "application/openmetrics-text"),
        ("text/plain", "text/plain"),
        ("*/*", "text/plain"),
    ],
)
def test_a_process_serves_the_format_that_is_asked_for(accept: str, kind: str) -> None:
    with metrics_server("127.0.0.1", 0, ProcessMetrics()) as port:
        asked = urllib.request.Request(f"http://127.0.0.1:{port}/metrics", headers={"Accept": accept})
        with urllib.request.urlopen(asked, timeout=10) as answer:
            page = answer.read()
            assert answer.headers["content-type"].startswith(kind)
    assert b"baton_messages_handled" in page
    assert page.endswith(b"# EOF\n") == (kind == "application/openmetrics-text")


def test_a_process_shows_its_own_services_metrics_and_those_of_no_other_whose_code_it_has() -> None:
    """Every service is forked from a process that has imported them all."""
    import services.scheduler.metrics
    import services.tokenizer.metrics  # noqa: F401

    own = Gauge("own", "Its own.", registry=None)
    page = metrics_page(ProcessMetrics("tokenizer", added=[own]), openmetrics=False)
    for name in (b"baton_tokenizer_", b"baton_messages_handled", b"process_cpu_seconds", b"own 0.0"):
        assert name in page
    assert b"baton_scheduler_" not in page
