"""Overflow over real HTTP: what is served elsewhere, what is not, and that nothing the provider does harms a client."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from deploy.cli.keys import new_key
from shared.bus.memory_bus import MemoryBus
from shared.messages.tokenizer import Tokenize
from tests.support.gateway.fake_provider import FakeProvider, fake_provider
from tests.support.gateway.fake_services import MODEL, eventually, said
from tests.support.gateway.gateway_server import GatewayStack, gateway_stack

SECRET = "sk-of-the-operator"
FULL = "REJECT OVERLOAD"
HEADER = "x-baton-served-by"


@pytest.fixture
async def provider() -> AsyncIterator[FakeProvider]:
    async with fake_provider() as provider:
        yield provider


def settings(provider: FakeProvider, **more: Any) -> dict[str, Any]:
    return {"overflow": provider.url, "overflow_key": SECRET, "overflow_model": ("theirs",), **more}


@pytest.fixture
async def stack(memory_bus: MemoryBus, provider: FakeProvider) -> AsyncIterator[GatewayStack]:
    async with gateway_stack(memory_bus, **settings(provider, overflow_wait_s=30.0)) as stack:
        yield stack


def chat(text: str, **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": text}], **fields}


async def post(stack: GatewayStack, body: dict[str, Any], **headers: str) -> httpx2.Response:
    return await stack.http.post("/v1/chat/completions", json=body, headers=headers)


async def outcomes(stack: GatewayStack) -> dict[str, float]:
    """Of this process, over all tests."""
    page = (await stack.http.get("/metrics")).text
    lines = [line for line in page.splitlines() if line.startswith("baton_gateway_overflow_requests_total{")]
    return {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in lines}


def counted(before: dict[str, float], after: dict[str, float]) -> list[tuple[str, str]]:
    new = [name for name, value in after.items() if value > before.get(name, 0.0)]
    return sorted((n.split('cause="')[1].split('"')[0], n.split('outcome="')[1].split('"')[0]) for n in new)


async def test_what_is_served_here_stays_here(stack: GatewayStack, provider: FakeProvider) -> None:
    answer = await post(stack, chat("hello", max_tokens=4))
    assert (answer.status_code, HEADER in answer.headers) == (200, False)
    assert answer.json()["choices"][0]["message"]["content"] == said(4)
    assert provider.bodies == []


async def test_what_is_refused_here_is_answered_by_the_provider(
    stack: GatewayStack, provider: FakeProvider, caplog: pytest.LogCaptureFixture
) -> None:
    before = await outcomes(stack)
    with caplog.at_level(logging.INFO):
        answer = await post(stack, chat(FULL, temperature=0.5, store=False), Authorization="Bearer client-key")
    assert (answer.status_code, answer.headers[HEADER]) == (200, "overflow")
    assert answer.content == provider.sent, "unchanged"
    assert provider.bodies == [chat(FULL, temperature=0.5) | {"model": "theirs"}]
    assert provider.headers[0]["authorization"] == f"Bearer {SECRET}"
    assert "client-key" not in str(provider.headers)
    assert counted(before, await outcomes(stack)) == [("full", "served")]
    line = next(vars(record) for record in caplog.records if record.getMessage() == "overflow")
    assert (line["prompt_tokens"], line["output_tokens"], line["provider_model"]) == (7, 3, "theirs")
    assert all(SECRET not in str(vars(record)) for record in caplog.records)


@pytest.mark.parametrize("usage", [False, True])
async def test_a_stream_of_the_provider_is_read_by_openais_client(
    stack: GatewayStack, provider: FakeProvider, usage: bool
) -> None:
    options: Any = {"stream_options": {"include_usage": True}} if usage else {}
    stream = await stack.openai.chat.completions.create(**chat(FULL), stream=True, **options)
    assert stream.response.headers[HEADER] == "overflow"
    chunks = [chunk async for chunk in stream]
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "Lyon is nice"
    assert [chunk.usage.total_tokens for chunk in chunks if chunk.usage] == ([10] if usage else [])
    assert all(chunk.choices for chunk in chunks) is not usage
    assert provider.bodies[0]["stream_options"] == {"include_usage": True}


async def test_tokens_come_as_the_provider_sends_them(stack: GatewayStack, provider: FakeProvider) -> None:
    provider.behaviour = "holds"
    stream = await stack.openai.chat.completions.create(**chat(FULL), stream=True)
    texts = []
    async for chunk in stream:
        texts.append(chunk.choices[0].delta.content)
        if len(texts) == 2:
            provider.hold.set()
    assert texts[:3] == ["Lyon", " is", " nice"]


@pytest.mark.parametrize(
    ("wrong", "stream"),
    [
        *((wrong, stream) for wrong in (500, 429, 401, 400, "silent", "dead") for stream in (False, True)),
        ("error event", True),
    ],
)
async def test_a_provider_without_an_answer_changes_nothing(
    memory_bus: MemoryBus, provider: FakeProvider, wrong: Any, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    if wrong == "dead":
        await provider.server.close(0.0)
    elif isinstance(wrong, int):
        provider.status = wrong
    else:
        provider.behaviour = wrong
    quick = settings(provider, overflow_silence_s=0.2, overflow_answer_s=0.2)
    async with gateway_stack(memory_bus, **quick) as stack:
        before = await outcomes(stack)
        with caplog.at_level(logging.INFO), pytest.raises(openai.RateLimitError, match="2048 tokens are allowed") as e:
            await stack.openai.chat.completions.create(**chat(FULL), stream=stream)
        assert e.value.response.headers["retry-after"] == "3"
        assert HEADER not in e.value.response.headers
        assert len(provider.bodies) == (wrong != "dead")
        assert counted(before, await outcomes(stack)) == [("full", "no answer")]
        assert all("sk-" not in str(vars(record)) for record in caplog.records)


async def test_a_stream_that_the_provider_breaks_off_ends_with_an_error(
    stack: GatewayStack, provider: FakeProvider
) -> None:
    provider.behaviour = "breaks off"
    before = await outcomes(stack)
    stream = await stack.openai.chat.completions.create(**chat(FULL), stream=True)
    texts = [(await anext(stream)).choices[0].delta.content for _ in range(2)]
    with pytest.raises(openai.APIError, match="broke off"):
        await anext(stream)
    assert texts == ["Lyon", " is"]
    assert counted(before, await outcomes(stack)) == [("full", "broken off")]


async def test_a_provider_that_keeps_failing_is_left_alone(
    memory_bus: MemoryBus, provider: FakeProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.gateway.core.overflow.BREAKER_SPAN", 0.0)
    provider.status = 503
    async with gateway_stack(memory_bus, **settings(provider)) as stack:
        for _ in range(6):
            assert (await post(stack, chat(FULL))).status_code == 429
        assert len(provider.bodies) == 3
        assert 'baton_gateway_overflow_breaker_open{gateway="gateway-1"} 1.0' in (await stack.http.get("/metrics")).text


async def test_the_budget_bounds_what_is_sent(memory_bus: MemoryBus, provider: FakeProvider) -> None:
    async with gateway_stack(memory_bus, **settings(provider, overflow_tokens_per_day=15)) as stack:
        answers = [(await post(stack, chat(FULL))).status_code for _ in range(3)]
        assert answers == [200, 200, 429], "10 tokens each"
        before = await outcomes(stack)
        assert (await post(stack, chat(FULL))).status_code == 429
        assert counted(before, await outcomes(stack)) == []
    async with gateway_stack(memory_bus, **settings(provider, overflow_requests_per_minute=1)) as stack:
        assert [(await post(stack, chat(FULL))).status_code for _ in range(2)] == [200, 429]


async def test_requests_with_fields_of_our_own_get_the_local_answer(
    stack: GatewayStack, provider: FakeProvider
) -> None:
    before = await outcomes(stack)
    assert (await post(stack, chat(FULL, top_k=3))).status_code == 429
    resumable = chat(FULL, stream=True, stream_options={"resumable": True})
    assert (await post(stack, resumable)).status_code == 429
    assert provider.bodies == []
    assert counted(before, await outcomes(stack)) == [("full", "not forwardable")]


async def test_what_a_client_does_wrong_is_told_by_us(stack: GatewayStack, provider: FakeProvider) -> None:
    assert (await post(stack, chat("hello", temperature=-1))).status_code == 400
    assert (await post(stack, chat("REJECT"))).status_code == 400
    assert (await post(stack, chat("hello") | {"model": "unknown"})).status_code == 404
    assert provider.bodies == []


async def test_without_any_engine_everything_is_served_elsewhere(memory_bus: MemoryBus, provider: FakeProvider) -> None:
    async with gateway_stack(memory_bus, wait=False, **settings(provider)) as stack:
        ready = await stack.http.get("/ready")
        assert (ready.status_code, ready.json()["served_by"]) == (200, "overflow")
        assert (await stack.http.get("/health")).status_code == 503
        answer = await post(stack, chat("hello"))
        assert (answer.status_code, answer.headers[HEADER]) == (200, "overflow")


async def test_a_key_holds_for_what_is_served_elsewhere(
    memory_bus: MemoryBus, provider: FakeProvider, tmp_path: Path
) -> None:
    path = tmp_path / "keys.toml"
    keys = {
        "alice": new_key(path, "alice", {"tokens_per_minute": 300}),
        "bob": new_key(path, "bob", {"models": ["another"]}),
    }
    async with gateway_stack(memory_bus, wait=False, keys_file=path, **settings(provider)) as stack:

        async def status(name: str) -> int:
            return (await post(stack, chat("hi", max_tokens=200), authorization=f"Bearer {keys[name]}")).status_code

        assert await status("bob") == 403
        assert [await status("alice"), await status("alice")] == [200, 200], "10 tokens of 300 are gone"
        listed = await stack.http.get("/metrics")
        assert keys["alice"] not in listed.text
        body = chat("hi", max_tokens=290)
        assert (await post(stack, body, authorization=f"Bearer {keys['alice']}")).status_code == 429
        assert len(provider.bodies) == 2


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_that_waits_for_too_long_is_served_elsewhere(
    memory_bus: MemoryBus, provider: FakeProvider, stream: bool
) -> None:
    async with gateway_stack(memory_bus, **settings(provider, overflow_wait_s=0.1)) as stack:
        before = await outcomes(stack)
        answer = await post(stack, chat("QUEUE", stream=stream))
        assert (answer.status_code, answer.headers[HEADER]) == (200, "overflow")
        await eventually(lambda: bool(stack.ring.withdrawn))
        assert counted(before, await outcomes(stack)) == [("slow", "served")]
        assert not len(stack.gateway.requests)


async def test_where_the_provider_fails_the_request_waits_on(memory_bus: MemoryBus, provider: FakeProvider) -> None:
    provider.status = 500
    async with gateway_stack(memory_bus, **settings(provider, overflow_wait_s=0.1)) as stack:
        stream = stack.openai.chat.completions.create(**chat("HOLD"), stream=True, max_tokens=5)
        asked = asyncio.create_task(stream)
        await eventually(lambda: bool(provider.bodies))
        stack.ring.hold.set()
        chunks = [chunk async for chunk in await asked]
        assert "".join(c.choices[0].delta.content or "" for c in chunks) == said(5)
        assert len(provider.bodies) == 1


async def test_the_first_token_wins(memory_bus: MemoryBus, provider: FakeProvider) -> None:

    provider.behaviour = "silent"
    async with gateway_stack(memory_bus, **settings(provider, overflow_wait_s=0.1)) as stack:
        before = await outcomes(stack)
        asked = asyncio.create_task(post(stack, chat("HOLD", max_tokens=3)))
        await eventually(lambda: bool(provider.bodies))
        stack.ring.hold.set()
        answer = await asked
        assert (answer.json()["choices"][0]["message"]["content"], HEADER in answer.headers) == (said(3), False)
        await eventually(lambda: provider.left == 1)
        assert counted(before, await outcomes(stack)) == [("slow", "not needed")]


async def test_after_long_waits_requests_go_elsewhere_at_once(memory_bus: MemoryBus, provider: FakeProvider) -> None:

    async with gateway_stack(memory_bus, **settings(provider, overflow_wait_s=0.5)) as stack:
        provider.status = 500
        asked = asyncio.create_task(post(stack, chat("HOLD", max_tokens=3)))
        await eventually(lambda: bool(provider.bodies))
        provider.status = 200
        answer = await post(stack, chat("hello"))
        assert answer.headers[HEADER] == "overflow"
        tokenized = [message for message in stack.ring.seen if isinstance(message, Tokenize)]
        assert len(tokenized) == 1, "it was sent to no engine"
        stack.ring.hold.set()
        assert (await asked).status_code == 200


async def test_a_client_that_leaves_ends_the_providers_work(stack: GatewayStack, provider: FakeProvider) -> None:
    provider.behaviour = "holds"
    before = await outcomes(stack)
    async with stack.http.stream("POST", "/v1/chat/completions", json=chat(FULL, stream=True)) as answer:
        async for _ in answer.aiter_lines():
            break
    await eventually(lambda: provider.left == 1)
    assert stack.gateway.provider is not None
    await eventually(lambda: stack.gateway.provider.idle)
    assert counted(before, await outcomes(stack)) == [("full", "client left")]


async def test_a_client_that_leaves_before_the_answer_ends_the_providers_work(
    stack: GatewayStack, provider: FakeProvider
) -> None:
    provider.behaviour = "silent"
    before = await outcomes(stack)
    asked = asyncio.create_task(post(stack, chat(FULL)))
    await eventually(lambda: bool(provider.bodies))
    asked.cancel()
    await eventually(lambda: provider.left == 1)
    assert stack.gateway.provider is not None
    await eventually(lambda: stack.gateway.provider.idle)
    assert counted(before, await outcomes(stack)) == [("full", "not needed")]


async def test_two_gateways_that_overflow_into_each_other_pass_a_request_on_once(memory_bus: MemoryBus) -> None:
    other = MemoryBus()
    async with fake_provider() as unused:
        first = {"wait": False, "instance": "gateway-1"}
        async with gateway_stack(memory_bus, **settings(unused), **first) as one:
            back = {"overflow": f"{one.url}/v1"}
            async with gateway_stack(other, wait=False, instance="gateway-2", **back) as two:
                provider = one.gateway.provider
                assert provider is not None
                provider.settings = provider.settings._replace(url=f"{two.url}/v1")
                answer = await post(one, chat("hello"))
                assert (answer.status_code, HEADER in answer.headers) == (503, False)
                assert unused.bodies == []
                marked = await post(one, chat("hello"), **{"x-baton-overflow": "1"})
                assert marked.status_code == 503
    await other.close()
