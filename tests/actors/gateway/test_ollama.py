"""Ollama's API, from its own client through a real gateway to a scripted model."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import ollama
import pytest
from msgspec.structs import replace

from services.gateway.core.cluster import ClusterView
from shared.bus.memory_bus import MemoryBus
from shared.messages.dialects import Dialect
from shared.messages.tokenizer import Tokenize
from tests.actors.gateway.test_tool_calls import PARIS, ROME, TOOLS, speaking
from tests.support.gateway.fake_services import MODEL, eventually, said
from tests.support.gateway.gateway_server import GatewayStack, gateway_stack
from tests.support.gateway.model_cards import vectors_card
from tests.support.gateway.tool_calls import written

HELLO: Any = [{"role": "user", "content": "what is the weather"}]


@pytest.fixture
async def stack(memory_bus: MemoryBus) -> AsyncIterator[GatewayStack]:
    async with gateway_stack(memory_bus) as stack:
        yield stack


@asynccontextmanager
async def client_of(stack: GatewayStack) -> AsyncIterator[ollama.AsyncClient]:
    client = ollama.AsyncClient(host=stack.url)
    yield client
    await client.close()


@pytest.fixture
async def client(stack: GatewayStack) -> AsyncIterator[ollama.AsyncClient]:
    async with client_of(stack) as client:
        yield client


async def pieces(client: ollama.AsyncClient, **fields: Any) -> list[Any]:
    return [piece async for piece in await client.chat(model=MODEL, **({"messages": HELLO, "stream": True} | fields))]


async def test_a_chat_is_the_same_streamed_and_whole(client: ollama.AsyncClient) -> None:
    whole = await client.chat(model=MODEL, messages=HELLO, options={"num_predict": 8})
    assert (whole.message.content, whole.done, whole.done_reason) == (said(8), True, "length")
    assert (whole.eval_count, whole.prompt_eval_count) == (8, 4)
    assert 0 < (whole.total_duration or 0) < 60e9
    assert (whole.prompt_eval_duration or 0) + (whole.eval_duration or 0) == pytest.approx(whole.total_duration, abs=9)
    *more, last = await pieces(client, options={"num_predict": 8})
    assert "".join(piece.message.content for piece in more) == said(8)
    assert not any(piece.done for piece in more)
    assert (last.done, last.done_reason, last.eval_count) == (True, "length", 8)
    generated = await client.generate(model=MODEL, prompt="hi", options={"num_predict": 8})
    assert generated.response == said(8)
    raw = [piece async for piece in await client.generate(model=MODEL, prompt="hi", raw=True, stream=True)]
    assert "".join(piece.response for piece in raw) == said(8)
    assert raw[-1].done_reason == "stop"


async def test_tools_and_thoughts_have_fields_of_their_own(memory_bus: MemoryBus) -> None:
    text = "<think>Which city?</think>\n\nLet me look.\n" + written("hermes", [PARIS, ROME])
    async with speaking(memory_bus, text, Dialect("hermes", "qwen3")) as stack, client_of(stack) as client:
        whole = (await client.chat(model=MODEL, messages=HELLO, tools=TOOLS, think=True)).message
        assert (whole.thinking or "").strip() == "Which city?"
        assert (whole.content or "").strip() == "Let me look."
        calls = [(call.function.name, call.function.arguments) for call in whole.tool_calls or ()]
        assert calls == [("weather", PARIS.arguments), ("weather", ROME.arguments)]
        streamed = await pieces(client, tools=TOOLS)
        found = [call.function.arguments for piece in streamed for call in piece.message.tool_calls or ()]
        assert found == [PARIS.arguments, ROME.arguments]
        assert "".join(piece.message.thinking or "" for piece in streamed).strip() == "Which city?"
        silent = (await client.chat(model=MODEL, messages=HELLO, tools=TOOLS, think=False)).message
        assert silent.thinking is None


async def test_log_probabilities_go_along(client: ollama.AsyncClient) -> None:
    asked: Any = {"logprobs": True, "top_logprobs": 2, "options": {"num_predict": 4}}
    whole = await client.chat(model=MODEL, messages=HELLO, **asked)
    assert len(whole.logprobs or ()) == 4
    assert all(len(each.top_logprobs or ()) == 2 for each in whole.logprobs or ())
    streamed = await pieces(client, **asked)
    assert sum(len(piece.logprobs or ()) for piece in streamed) == 4


async def test_a_stream_that_loses_its_engine_goes_on_where_it_was(
    stack: GatewayStack, client: ollama.AsyncClient
) -> None:
    lost = await pieces(client, messages=[{"role": "user", "content": "LOSE"}], options={"num_predict": 8})
    assert "".join(piece.message.content for piece in lost) == said(8)
    assert [each.attempt for each in stack.ring.seen if isinstance(each, Tokenize)] == [1, 2]


async def test_a_client_that_leaves_frees_its_request(stack: GatewayStack, client: ollama.AsyncClient) -> None:
    stack.ring.step = 0.02
    stream = await client.chat(model=MODEL, messages=HELLO, stream=True, options={"num_predict": 10_000})
    await anext(stream)
    await stream.aclose()  # type: ignore[attr-defined]
    await eventually(lambda: bool(stack.ring.cancelled))
    await eventually(lambda: len(stack.gateway.requests) == 0)


async def test_models_are_listed_and_shown(
    stack: GatewayStack, client: ollama.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    [model] = (await client.list()).models
    assert model.model == MODEL
    [running] = (await client.ps()).models
    assert running.digest == model.digest
    shown = await client.show(MODEL + ":latest")
    assert shown.capabilities == ["completion"]
    numbers, ours = [(await stack.http.get(path)).json()["version"] for path in ("/api/version", "/version")]
    assert ours.startswith(numbers)
    assert all(map(str.isdigit, numbers.split("."))), "as Open WebUI compares them"
    loaded = await client.chat(model=MODEL, messages=[])
    assert (loaded.done, loaded.done_reason) == (True, "load")
    silent = replace(vectors_card(4), name=MODEL, generates=False)
    monkeypatch.setattr(ClusterView, "models", lambda _: [silent])
    assert [each.model for each in (await client.list()).models] == [MODEL]
    assert (await client.show(MODEL)).capabilities == ["embedding"]


async def test_errors_are_those_that_the_client_knows(client: ollama.AsyncClient) -> None:
    with pytest.raises(ollama.ResponseError, match="does not exist") as missing:
        await client.chat(model="other", messages=HELLO)
    assert missing.value.status_code == 404
    with pytest.raises(ollama.ResponseError, match=r"options\.mirostat"):
        await client.chat(model=MODEL, messages=HELLO, options={"mirostat": 2})
    with pytest.raises(ollama.ResponseError, match="not found"):
        await client.show("other")
