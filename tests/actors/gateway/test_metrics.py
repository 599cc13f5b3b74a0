"""`/metrics`: formats by `Accept`, examples of traced requests, and a number of series that clients cannot raise."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics_families
from prometheus_client.parser import text_string_to_metric_families

from services.gateway.metrics import Histogram, MergedPages, Meters
from services.gateway.peers import MetricsPages
from shared.bus.memory_bus import MemoryBus
from shared.ids import GatewayId
from shared.messages.gateway import ReadMetrics
from shared.telemetry.tracing import TRACING
from tests.support.gateway.fake_services import MODEL
from tests.support.gateway.gateway_server import GatewayStack, gateway_stack
from tests.support.otlp_receiver import otlp_receiver

OPENMETRICS = "application/openmetrics-text;version=1.0.0;q=0.9,text/plain;version=0.0.4;q=0.2"
"""As Prometheus asks."""
CLIENTS = 20
"""That ask for the page at once."""
TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.fixture
async def stack(memory_bus: MemoryBus) -> AsyncIterator[GatewayStack]:
    async with gateway_stack(memory_bus) as stack:
        yield stack


@pytest.fixture
def tracing() -> Iterator[None]:
    with otlp_receiver() as receiver:
        TRACING.set_up("gateway", "gateway-1", receiver.endpoint, sample_rate=0.0)
        yield
        TRACING.shut_down()


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], **fields}


async def page(stack: GatewayStack, accept: str | None = None) -> tuple[str, str]:
    """The content type and the page."""
    answer = await stack.http.get("/metrics", headers={} if accept is None else {"accept": accept})
    assert answer.status_code == 200
    return answer.headers["content-type"], answer.text


async def test_who_asks_for_openmetrics_gets_it_and_everybody_else_text(stack: GatewayStack) -> None:
    await stack.http.post("/v1/chat/completions", json=chat(max_tokens=4))
    kind, text = await page(stack)
    assert kind.startswith("text/plain; version=0.0.4")
    named = {metric.name for metric in text_string_to_metric_families(text)}
    assert "vllm:time_to_first_token_seconds" in named
    kind, text = await page(stack, OPENMETRICS)
    assert kind.startswith("application/openmetrics-text; version=1.0.0")
    found = {metric.name: metric for metric in openmetrics_families(text)}
    assert {name.removesuffix("_created") for name in named} == found.keys()
    first = found["baton_gateway_time_to_first_token_seconds"].samples[0]
    assert first.labels == {"gateway": "gateway-1", "model": MODEL, "le": "0.001"}


async def test_who_asks_at_once_gets_the_same_page_and_the_loop_is_nobodys_alone(
    stack: GatewayStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []
    asked, all_have_asked = 0, threading.Event()
    make, ask = stack.gateway.peers.own_metrics_page, MetricsPages.page

    async def counted(pages: MetricsPages, openmetrics: bool) -> bytes:
        nonlocal asked
        if (asked := asked + 1) == CLIENTS:
            all_have_asked.set()
        return await ask(pages, openmetrics)

    def recorded(openmetrics: bool) -> bytes:
        made.append(threading.get_ident())
        assert all_have_asked.wait(60)
        return make(openmetrics)

    monkeypatch.setattr(MetricsPages, "page", counted)
    monkeypatch.setattr(stack.gateway.peers, "own_metrics_page", recorded)
    pages = await asyncio.gather(*(page(stack) for _ in range(CLIENTS)))
    assert len({text for _, text in pages}) == len(made) <= 2, "the one that is being made, and one for all others"
    answer = await stack.gateway.respond(ReadMetrics())
    assert isinstance(answer, asyncio.Future), "deltas are handled meanwhile"
    assert b"baton_gateway_choices_finished_total" in (await answer).text
    assert threading.main_thread().ident not in made


def test_a_page_is_made_while_models_and_ends_of_outputs_come(monkeypatch: pytest.MonkeyPatch) -> None:
    meters, buckets = Meters(), Histogram.buckets
    meters.of("a")

    def buckets_meanwhile(histogram: Histogram) -> Any:
        meters.of(str(histogram)).record_finish("stop", 1, 1)
        return buckets(histogram)

    monkeypatch.setattr(Histogram, "buckets", buckets_meanwhile)
    assert {sample.labels["model"] for family in meters.collect() for sample in family.samples} == {"a"}


@pytest.mark.usefixtures("tracing")
async def test_latencies_have_the_trace_of_a_request_as_their_example(stack: GatewayStack) -> None:
    traced = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
    await stack.http.post("/v1/chat/completions", json=chat(max_tokens=4), headers=traced)
    _, text = await page(stack, OPENMETRICS)
    exemplars: dict[str, list[Any]] = {}
    for metric in openmetrics_families(text):
        exemplars[metric.name] = [sample.exemplar for sample in metric.samples if sample.exemplar is not None]
    for name in ("time_to_first_token", "inter_token_latency", "time_per_output_token", "e2e_request_latency"):
        examples = exemplars[f"baton_gateway_{name}_seconds"]
        assert examples, name
        assert {each.labels["trace_id"] for each in examples} == {TRACE}
        assert all(each.value >= 0 and float(each.timestamp) > 1e9 for each in examples)
    _, text = await page(stack)
    assert TRACE not in text


async def test_a_request_that_is_not_traced_is_no_example(stack: GatewayStack) -> None:
    before = (await page(stack, OPENMETRICS))[1].count("# {")
    await stack.http.post("/v1/chat/completions", json=chat(max_tokens=4))
    assert (await page(stack, OPENMETRICS))[1].count("# {") == before


def test_pages_of_gateways_of_two_releases_become_one() -> None:
    """A former release answers with text, whatever it is asked for."""
    old = b"# HELP a_total Text.\n# TYPE a_total counter\na_total 2.0\n"
    new = b'# HELP a Text.\n# TYPE a counter\na_total 3.0 # {trace_id="7"} 1.0 5.0\n# EOF\n'
    pages = MergedPages({GatewayId("g1"): old, GatewayId("g2"): new})
    samples = [sample for metric in openmetrics_families(pages.text(True).decode()) for sample in metric.samples]
    assert [(each.labels, each.value, each.exemplar is not None) for each in samples] == [
        ({"gateway": "g1"}, 2.0, False),
        ({"gateway": "g2"}, 3.0, True),
    ]
    assert b'a_total{gateway="g2"} 3.0' in pages.text()


async def test_clients_cannot_raise_the_number_of_series(stack: GatewayStack) -> None:
    """By models that do not exist, paths, methods, headers, user names, ids, or texts: what a label may be is known
    before anybody asks."""

    async def series() -> set[str]:
        text = (await page(stack))[1]
        return {line.rpartition(" ")[0] for line in text.splitlines() if not line.startswith("#")}

    async def ask(number: int) -> None:
        strange = f"strange-{number}"
        headers = {"x-request-id": strange, "user-agent": strange, "authorization": f"Bearer {strange}"}
        asked = chat(max_tokens=2, user=strange, request_id=strange, stop=[strange], cache_salt=strange)
        await stack.http.post("/v1/chat/completions", json=asked, headers=headers)
        await stack.http.post("/v1/chat/completions", json={**asked, "model": strange}, headers=headers)
        await stack.http.post("/v1/completions", json={"model": MODEL, "prompt": strange, strange: number})
        await stack.http.post("/v1/chat/completions", json=chat(max_tokens=strange))
        await stack.http.request(strange.upper(), f"/{strange}")

    for number in range(2):
        await ask(number)
    before = await series()
    for number in range(2, 12):
        await ask(number)
    assert await series() == before
    assert not [each for each in before if "strange" in each]
