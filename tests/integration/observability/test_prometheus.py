"""A real Prometheus server scrapes a real stack by what `baton prometheus-config` prints, and evaluates every query."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.integration.observability.conftest import TRACE
from tests.support.cluster.stack import RunningStack
from tests.support.prometheus_server import PrometheusServer, program, prometheus_server
from tests.support.promql import family, filled, panel_queries, rules, series_named

SEEN_ONLY_WHEN_IT_HAPPENS = {
    "baton_gateway_disconnects_total": "by why, once a client has left",
    "baton_undecodable_messages_total": "by subject, which nobody knows before",
    "baton_undelivered_messages_total": "by service, once a message had no receiver",
    "baton_kvstore_tier_spoiled_total": "by tier, once a block is spoilt",
    "baton_scheduler_accepted_draft_tokens_total": "by position, with --speculative",
    "baton_kvstore_tier_hits_total": "by tier, once it is asked",
    "baton_kvstore_tier_misses_total": "by tier, once it is asked",
    "baton_kvstore_tier_bytes_in_total": "by tier, once it is asked",
    "baton_kvstore_tier_bytes_out_total": "by tier, once blocks are evicted",
    "baton_kvstore_tier_seconds_bucket": "by tier, once it is asked",
    "baton_kvstore_evictions_total": "by where to, once blocks are evicted",
}
"""Series that a healthy stack of one engine does not have; their metrics are announced all the same."""
VLLM_DASHBOARDS = (
    "vllm:e2e_request_latency_seconds_bucket",
    "vllm:generation_tokens_total",
    "vllm:inter_token_latency_seconds_bucket",
    "vllm:kv_cache_usage_perc",
    "vllm:num_preemptions_total",
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:prefix_cache_hits_total",
    "vllm:prefix_cache_queries_total",
    "vllm:prompt_tokens_total",
    "vllm:request_decode_time_seconds_sum",
    "vllm:request_generation_tokens_bucket",
    "vllm:request_prefill_time_seconds_sum",
    "vllm:request_prompt_tokens_bucket",
    "vllm:request_queue_time_seconds_sum",
    "vllm:request_success_total",
    "vllm:time_per_output_token_seconds_bucket",
    "vllm:time_to_first_token_seconds_bucket",
)
"""What vLLM's own dashboards (examples/observability: prometheus_grafana/grafana.json, dashboards/grafana) ask for, but
for `vllm:request_max_num_generation_tokens` and `vllm:num_requests_swapped`."""


@pytest.fixture(scope="module")
def server(stack: RunningStack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrometheusServer]:
    program("prometheus")
    folder = tmp_path_factory.mktemp("prometheus")
    printed = stack.baton("prometheus-config", "--scrape-interval=1s")
    assert printed.returncode == 0, printed.stderr
    (folder / "prometheus.yml").write_text(printed.stdout)
    with prometheus_server(folder, folder / "prometheus.yml") as server:
        members = {member.instance for member in stack.state.members}
        server.until(lambda: {each["metric"]["instance"] for each in server.query("up == 1")} == members)
        server.until(lambda: server.query("baton:slo_errors:ratio_rate5m"))
        yield server


def test_every_process_is_scraped_under_its_own_name(stack: RunningStack, server: PrometheusServer) -> None:
    found = {(each["metric"]["service"], each["metric"]["instance"]) for each in server.query('up{job="baton"}')}
    assert found == {(member.service, member.instance) for member in stack.state.members}


def test_every_series_of_rules_and_dashboards_is_there(server: PrometheusServer) -> None:
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    expressions = [expression for _, expression in panel_queries()] + [rule["expr"] for rule in rules()]
    used = {name for expression in expressions for name in series_named(expression)} - recorded
    there, families = set(server.names()), server.families()
    assert used - there <= SEEN_ONLY_WHEN_IT_HAPPENS.keys()
    announced = {family(name) for name in families} | families.keys()
    assert {name for name in used if family(name) not in announced} == set()


def test_prometheus_evaluates_every_query_of_every_dashboard(server: PrometheusServer) -> None:
    tried: list[set[str]] = []

    def nothing_is_missing() -> bool:
        """What a busy process did not say within a second is back with its next answer."""
        empty = [(where, expression) for where, expression in panel_queries() if not server.query(expression)]
        unexpected = [each for each in empty if not series_named(each[1]) & SEEN_ONLY_WHEN_IT_HAPPENS.keys()]
        # What a second of traffic has no rate of, or what needs a device whose peak is known.
        tried.append({where for where, text in unexpected if "rate(" not in text})
        return tried[-1] <= {"baton-overview: Alerts that fire"}

    try:
        server.until(nothing_is_missing)
    except AssertionError as error:
        raise AssertionError(f"without samples: {tried[-1:]}") from error


def test_rules_are_evaluated_without_an_error_and_a_healthy_stack_raises_none(server: PrometheusServer) -> None:
    loaded = [rule for group in server.ask("rules")["groups"] for rule in group["rules"]]
    assert len(loaded) == len(rules())
    server.until(lambda: all(rule["health"] == "ok" for rule in _rules_now(server)))
    firing = [rule["name"] for rule in _rules_now(server) if rule.get("state") == "firing"]
    assert firing == []


def _rules_now(server: PrometheusServer) -> list[dict[str, Any]]:
    return [rule for group in server.ask("rules")["groups"] for rule in group["rules"]]


def test_vllms_own_dashboards_find_their_metrics(server: PrometheusServer) -> None:
    assert set(VLLM_DASHBOARDS) - set(server.names()) == set()
    quantile = "histogram_quantile(0.95, sum by (le) (rate(vllm:time_to_first_token_seconds_bucket[$__rate_interval])))"
    assert server.query(filled(quantile)) is not None
    assert server.until(lambda: server.query("vllm:num_requests_running"))[0]["metric"]["model_name"]


def test_a_latency_leads_to_the_trace_of_a_request(server: PrometheusServer) -> None:
    """Prometheus keeps the examples, which Grafana shows on its charts."""
    for metric in ("time_to_first_token", "e2e_request_latency"):
        asked = {"query": f"baton_gateway_{metric}_seconds_bucket", "start": time.time() - 600, "end": time.time() + 60}
        found = server.until(lambda asked=asked: server.ask("query_exemplars", **asked))
        assert {each["labels"]["trace_id"] for series in found for each in series["exemplars"]} == {TRACE}


def test_a_process_that_dies_is_seen_and_found_again(stack: RunningStack, server: PrometheusServer) -> None:
    started = 'process_start_time_seconds{instance="tokenizer-1"}'
    before = server.until(lambda: server.query(started))[0]["value"][1]
    pid = stack.kill("tokenizer-1")
    stack.replaced("tokenizer-1", pid)

    def again() -> bool:
        found = server.query(started)
        return bool(found) and found[0]["value"][1] != before and bool(server.query('up{instance="tokenizer-1"} == 1'))

    server.until(again)
