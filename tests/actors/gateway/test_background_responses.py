"""Responses in the background, from OpenAI's SDK through real gateways that share a real database."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest

from shared.bus.memory_bus import MemoryBus
from shared.messages.tokenizer import Tokenize
from tests.support.gateway.fake_services import MODEL, eventually, said
from tests.support.gateway.gateway_server import GatewayStack, gateway_stack


@pytest.fixture
async def stack(memory_bus: MemoryBus, tmp_path: Path) -> AsyncIterator[GatewayStack]:
    async with gateway_stack(memory_bus, database_file=tmp_path / "database.sqlite") as stack:
        yield stack


async def create(stack: GatewayStack, **fields: Any) -> Any:
    asked = {"model": MODEL, "input": "hi", "max_output_tokens": 8, "background": True}
    return await stack.openai.responses.create(**(asked | fields))


async def ended(stack: GatewayStack, id: str) -> Any:
    """Asks again and again, as clients do."""
    while (response := await stack.openai.responses.retrieve(id)).status in ("queued", "in_progress"):
        await asyncio.sleep(0.05)
    return response


async def events_of(stack: GatewayStack, id: str, **after: int) -> list[Any]:
    return [event async for event in await stack.openai.responses.retrieve(id, stream=True, **after)]


async def test_a_response_goes_on_without_its_client(stack: GatewayStack) -> None:
    begun = await create(stack)
    assert (begun.status, begun.background, begun.store, begun.output) == ("queued", True, True, [])
    response = await ended(stack, begun.id)
    assert (response.id, response.status, response.output_text) == (begun.id, "incomplete", said(8))
    assert response.usage.output_tokens == 8
    goes_on = await create(stack, previous_response_id=begun.id)
    assert (await ended(stack, goes_on.id)).output_text == said(8)
    assert len(stack.gateway.requests) == 0


async def test_its_events_are_streamed_from_anywhere(stack: GatewayStack) -> None:
    stack.ring.step = 0.05
    first: list[Any] = []
    stream = await create(stack, stream=True)
    async for event in stream:
        first.append(event)
        if event.type == "response.output_text.delta":
            break
    await stream.close()
    id = first[0].response.id
    rest = await events_of(stack, id, starting_after=first[-1].sequence_number)
    everything = await events_of(stack, id)
    assert [event.sequence_number for event in everything] == list(range(len(everything)))
    assert [event.to_json() for event in [*first, *rest]] == [event.to_json() for event in everything]
    assert everything[-1].type == "response.incomplete"
    assert "".join(event.delta for event in everything if event.type == "response.output_text.delta") == said(8)
    assert await stack.openai.responses.retrieve(id) == everything[-1].response
    async with stack.openai.responses.stream(response_id=id, starting_after=4) as parsed:
        assert [event.sequence_number async for event in parsed] == [e.sequence_number for e in everything[5:]]


async def test_it_is_cancelled_at_any_gateway(memory_bus: MemoryBus, tmp_path: Path) -> None:
    settings: Any = {"database_file": tmp_path / "database.sqlite"}
    async with (
        gateway_stack(memory_bus, **settings) as stack,
        gateway_stack(memory_bus, instance="gateway-2", **settings) as other,
    ):
        stack.ring.step = other.ring.step = 0.05
        for asked in (stack, other):
            begun = await create(stack, max_output_tokens=2000)
            await eventually(lambda: len(stack.gateway.requests) == 1)
            cancelled = await asked.openai.responses.cancel(begun.id)
            assert (cancelled.id, cancelled.status) == (begun.id, "cancelled")
            await eventually(lambda: len(stack.gateway.requests) == 0)
            assert (await stack.openai.responses.retrieve(begun.id)).status == "cancelled"
            assert (await other.openai.responses.cancel(begun.id)).status == "cancelled"
            await events_of(other, begun.id)
    assert stack.ring.cancelled | other.ring.cancelled


@pytest.mark.parametrize("killed", [False, True])
async def test_what_a_gateway_leaves_another_one_finishes(
    memory_bus: MemoryBus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, killed: bool
) -> None:
    monkeypatch.setattr("services.gateway.http.apis.background.LEASE", 0.5 if killed else 15.0)
    monkeypatch.setattr("services.gateway.http.apis.background.RENEW_EVERY", 0.2)
    monkeypatch.setattr("services.gateway.http.apis.background.CLAIM_EVERY", 0.1)
    monkeypatch.setattr("services.gateway.http.apis.background.STORE_EVERY", 0.05)
    settings: Any = {"database_file": tmp_path / "database.sqlite"}
    async with gateway_stack(memory_bus, instance="gateway-2", **settings) as other:
        other.gateway.requests.accepting = False  # until the first one has ended
        async with gateway_stack(memory_bus, **settings) as stack:
            stack.ring.step = other.ring.step = 0.02
            begun = await create(stack, max_output_tokens=100, temperature=1)
            await eventually(lambda: any(isinstance(each, Tokenize) for each in stack.ring.seen + other.ring.seen))
            before: list[Any] = []
            async for event in await other.openai.responses.retrieve(begun.id, stream=True):
                before.append(event)
                if event.type == "response.output_text.delta":
                    break
            stack.gateway.requests.accepting = False
            [responses] = stack.gateway._background
            if killed:
                [(_, task)] = responses._jobs.values()
                task.cancel()
            else:
                await responses.release()
        other.gateway.requests.accepting = True
        response = await ended(other, begun.id)
        assert (response.status, response.output_text) == ("incomplete", said(100))
        events = await events_of(other, begun.id)
        assert [event.sequence_number for event in events] == list(range(len(events)))
        assert [event.to_json() for event in events[: len(before)]] == [event.to_json() for event in before]
        assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == said(100)
        assert [event.type for event in events].count("response.output_item.added") == 1
        assert events[-1].response == response
        sent = [each for each in stack.ring.seen + other.ring.seen if isinstance(each, Tokenize)]
        assert {each.gateway for each in sent} == {"gateway-1", "gateway-2"}
        assert len({each.sampling.seed for each in sent}) == 1


async def test_what_operators_abort_is_incomplete(stack: GatewayStack) -> None:
    stack.ring.step = 0.02
    begun = await create(stack, max_output_tokens=2000)
    async for event in await stack.openai.responses.retrieve(begun.id, stream=True):
        if event.type == "response.output_text.delta":
            assert await stack.gateway.requests.abort([begun.id]) == [begun.id]
            break
    response = await ended(stack, begun.id)
    assert (response.status, response.incomplete_details.reason) == ("incomplete", None)
    assert response.output[0].status == "incomplete"
    assert said(100).startswith(response.output_text[:100])


async def test_a_failure_is_kept(memory_bus: MemoryBus, tmp_path: Path) -> None:
    async with gateway_stack(memory_bus, database_file=tmp_path / "database.sqlite", attempts=1) as stack:
        begun = await create(stack, input="FAIL ALWAYS")
        response = await ended(stack, begun.id)
        assert (response.status, response.error.code) == ("failed", "server_error")
        assert (await events_of(stack, begun.id))[-1].type == "response.failed"
        with pytest.raises(openai.BadRequestError, match="is failed"):
            await create(stack, previous_response_id=begun.id)


async def test_what_runs_counts_for_its_key(memory_bus: MemoryBus, tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    digest = hashlib.sha256(b"key-1").hexdigest()
    keys.write_text(f'[keys.a]\nhash = "sha256:{digest}"\nconcurrent_requests = 1\ntokens_per_minute = 10000\n')
    settings: Any = {"keys_file": keys, "database_file": tmp_path / "database.sqlite"}
    async with gateway_stack(memory_bus, clock=lambda: 0.0, **settings) as stack:
        begun = await create(stack, input="HOLD")
        with pytest.raises(openai.RateLimitError, match="concurrent"):
            await create(stack, background=False)
        stack.ring.hold.set()
        assert (await ended(stack, begun.id)).output_text == said(8)
        answer = await stack.openai.responses.with_raw_response.create(model=MODEL, input="hi", max_output_tokens=1)
        assert int(answer.headers["x-ratelimit-remaining-tokens"]) < 10_000 - 8 - 1


async def test_what_cannot_be_is_refused(stack: GatewayStack) -> None:
    with pytest.raises(openai.BadRequestError, match="background can only be used when `store` is true"):
        await create(stack, store=False)
    response = await create(stack, background=False)
    with pytest.raises(openai.BadRequestError, match="synchronous"):
        await stack.openai.responses.cancel(response.id)
    with pytest.raises(openai.BadRequestError, match="with background"):
        await stack.openai.responses.retrieve(response.id, stream=True)
    for query in ("?starting_after=1", "?stream=yes", "?stream=true&starting_after=x"):
        answer = await stack.http.get(f"/v1/responses/{response.id}{query}")
        assert answer.status_code == 400
