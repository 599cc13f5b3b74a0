"""A request's way is put together from what each process remembers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from shared import topics
from shared.bus.memory_bus import MemoryBus
from shared.ids import InstanceId
from shared.messages.gateway import MAX_SPANS_FOUND, ReadSpans, SpansFound
from shared.telemetry.tracing import RESPONSE, OpenSpan, Tracing
from shared.traces.request_trace import GatewaysSilent, request_trace, spans_found
from tests.support.virtual_time import VirtualTimeLoop

GATEWAY, OTHER, ENGINE = InstanceId("gateway-1"), InstanceId("gateway-2"), InstanceId("engine-1")


async def serve(bus: MemoryBus, instance: InstanceId, open_spans: Sequence[OpenSpan] = ()) -> Tracing:
    tracing = Tracing()
    tracing.remember(1000)

    async def answer(request: ReadSpans) -> SpansFound:
        return spans_found(tracing, request.name, lambda _: open_spans)

    await bus.serve(topics.span_requests(instance), answer)
    return tracing


async def test_hops_of_all_processes_come_in_their_order(memory_bus: MemoryBus) -> None:
    await serve(memory_bus, OTHER)
    gateway, engine = await serve(memory_bus, GATEWAY), await serve(memory_bus, ENGINE, [OpenSpan("decode", 5.0)])
    request = gateway.request("POST /v1/completions", None)
    assert request is not None
    request.response = "cmpl-1"
    engine.record("prefill", request.context, 2.0, 5.0)
    engine.record("queue", request.context, 1.0, 2.0)
    engine.record("another's", f"00-{'a' * 32}-{'b' * 16}-00", 1.0, 2.0)
    silent = InstanceId("engine-9")
    found = await request_trace(memory_bus, "cmpl-1", [OTHER, GATEWAY], [silent, ENGINE])
    assert found is not None
    assert found.trace_id == request.trace_id
    assert [(hop.name, hop.instance, hop.ended) for hop in found.hops] == [
        ("POST /v1/completions", GATEWAY, None),
        ("queue", ENGINE, 2.0),
        ("prefill", ENGINE, 5.0),
        ("decode", ENGINE, None),
    ]
    assert found.unanswered == (silent,)
    request.end(failed=False, attributes={RESPONSE: "cmpl-1"})
    ended = await request_trace(memory_bus, request.trace_id, [OTHER, GATEWAY], [])
    assert ended is not None
    assert [hop.ended is None for hop in ended.hops] == [False]
    assert ended.unanswered == ()


async def test_nobody_knows_of_what_never_was(memory_bus: MemoryBus) -> None:
    await serve(memory_bus, GATEWAY)
    for name in ("cmpl-9", "c" * 32, ""):
        assert await request_trace(memory_bus, name, [GATEWAY, OTHER], [ENGINE]) is None


def test_a_silent_gateway_is_asked_again_and_named_where_it_stays_silent() -> None:
    """Its requests are not said to have never been."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(_ask_a_silent_gateway(MemoryBus()))


async def _ask_a_silent_gateway(memory_bus: MemoryBus) -> None:
    await serve(memory_bus, OTHER)
    tracing, asked = Tracing(), 0
    tracing.remember(1000)
    request = tracing.request("POST /v1/completions", None)
    assert request is not None
    request.response = "cmpl-1"

    async def answer(question: ReadSpans) -> SpansFound:
        nonlocal asked
        asked += 1
        if asked == 1 or question.name == "cmpl-2":
            await asyncio.sleep(3600)
        return spans_found(tracing, question.name, lambda _: [])

    await memory_bus.serve(topics.span_requests(GATEWAY), answer)
    found = await request_trace(memory_bus, "cmpl-1", [OTHER, GATEWAY], [])
    assert found is not None
    assert (found.trace_id, found.unanswered) == (request.trace_id, ())
    with pytest.raises(GatewaysSilent, match=r"^gateway-1 did not answer"):
        await request_trace(memory_bus, "cmpl-2", [OTHER, GATEWAY], [])


async def test_an_answer_is_bounded(memory_bus: MemoryBus) -> None:
    tracing = await serve(memory_bus, ENGINE)
    for number in range(MAX_SPANS_FOUND + 20):
        tracing.record(str(number), f"00-{'a' * 32}-{'b' * 16}-00", 0.0, 1.0)
    spans = spans_found(tracing, "a" * 32, lambda _: ()).spans
    assert (len(spans), spans[-1].name) == (MAX_SPANS_FOUND, str(MAX_SPANS_FOUND + 19))
