"""Anthropic's API, from its own SDK through a real gateway to a scripted model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anthropic
import pytest
from anthropic import AsyncAnthropic

from services.gateway.batches.batch_run import BATCH_PRIORITY
from services.gateway.http.apis.anthropic import MessagesEndpoint
from shared.bus.memory_bus import MemoryBus
from shared.ids import ModelName
from shared.messages.dialects import Dialect
from shared.messages.tokenizer import Tokenize
from tests.actors.gateway.test_tool_calls import PARIS, ROME, SCHEMA, speaking
from tests.support.gateway.fake_services import MODEL, FakeRing, eventually, said
from tests.support.gateway.gateway_server import GatewayStack, gateway_stack
from tests.support.gateway.tool_calls import written

HELLO: Any = [{"role": "user", "content": "what is the weather"}]
TOOLS: Any = [{"name": "weather", "description": "Tells it.", "input_schema": SCHEMA}]
THINK: Any = {"type": "enabled", "budget_tokens": 1024}


@asynccontextmanager
async def client_of(stack: GatewayStack) -> AsyncIterator[AsyncAnthropic]:
    async with AsyncAnthropic(base_url=stack.url, api_key="key-1", max_retries=0, http_client=stack.http) as client:
        yield client


@pytest.fixture
async def client(memory_bus: MemoryBus) -> AsyncIterator[AsyncAnthropic]:
    async with gateway_stack(memory_bus) as stack, client_of(stack) as client:
        yield client


async def streamed(client: AsyncAnthropic, **fields: Any) -> tuple[list[str], Any]:
    """The types of the events, and the message that the SDK makes of them."""
    async with client.messages.stream(model=MODEL, **({"messages": HELLO, "max_tokens": 99} | fields)) as stream:
        kinds = [event.type async for event in stream]
        return kinds, await stream.get_final_message()


async def test_a_message_is_the_same_streamed_and_whole(client: AsyncAnthropic) -> None:
    whole = await client.messages.create(model=MODEL, messages=HELLO, max_tokens=8)
    assert whole.id.startswith("msg_")
    assert (whole.role, whole.model, whole.type) == ("assistant", MODEL, "message")
    [text] = whole.content
    assert (text.type, text.text) == ("text", said(8))
    assert (whole.stop_reason, whole.stop_sequence) == ("max_tokens", None)
    usage = whole.usage
    assert usage.output_tokens == 8
    assert (usage.cache_read_input_tokens or 0) > 0
    kinds, streaming = await streamed(client, max_tokens=8)
    assert kinds[0] == "message_start"
    assert kinds[-1] == "message_stop"
    assert [block.text for block in streaming.content] == [said(8)]
    assert streaming.stop_reason == whole.stop_reason
    assert streaming.usage.output_tokens == 8
    assert streaming.usage.input_tokens == usage.input_tokens


async def test_tools_and_thoughts_are_blocks(memory_bus: MemoryBus) -> None:
    text = "<think>Which city?</think>\n\nLet me look.\n" + written("hermes", [PARIS, ROME])
    dialect = Dialect("hermes", "qwen3")
    async with speaking(memory_bus, text, dialect) as stack, client_of(stack) as client:
        whole = await client.messages.create(model=MODEL, messages=HELLO, max_tokens=2000, tools=TOOLS, thinking=THINK)
        kinds, streaming = await streamed(client, tools=TOOLS, thinking=THINK, max_tokens=2000)
        for message in (whole, streaming):
            assert [block.type for block in message.content] == ["thinking", "text", "tool_use", "tool_use"]
            thinking, answer, *calls = message.content
            assert thinking.thinking.strip() == "Which city?"
            assert answer.text == "Let me look."
            assert [(call.name, call.input) for call in calls] == [
                ("weather", PARIS.arguments),
                ("weather", ROME.arguments),
            ]
            assert message.stop_reason == "tool_use"
            assert len({call.id for call in calls}) == 2
        assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 4
        without = await client.messages.create(model=MODEL, messages=HELLO, max_tokens=2000, tools=TOOLS)
        assert [block.type for block in without.content] == ["text", "tool_use", "tool_use"]


async def test_a_stream_that_loses_its_engine_goes_on_where_it_was(memory_bus: MemoryBus) -> None:
    async with gateway_stack(memory_bus) as stack, client_of(stack) as client:
        _, message = await streamed(client, messages=[{"role": "user", "content": "LOSE"}], max_tokens=8)
        assert message.content[0].text == said(8)
        assert [each.attempt for each in stack.ring.seen if isinstance(each, Tokenize)] == [1, 2]


async def test_a_client_that_leaves_frees_its_request(memory_bus: MemoryBus) -> None:
    async with gateway_stack(memory_bus) as stack, client_of(stack) as client:
        stack.ring.step = 0.02
        async with client.messages.stream(model=MODEL, messages=HELLO, max_tokens=10_000) as stream:
            async for event in stream:
                if event.type == "text":
                    break
        await eventually(lambda: bool(stack.ring.cancelled))
        await eventually(lambda: len(stack.gateway.requests) == 0)


async def test_tokens_are_counted_without_generating(memory_bus: MemoryBus) -> None:
    async with gateway_stack(memory_bus) as stack, client_of(stack) as client:
        counted = await client.messages.count_tokens(model=MODEL, messages=HELLO, system="Be short.")
        assert counted.input_tokens > 0
        assert not [each for each in stack.ring.seen if isinstance(each, Tokenize)]


async def test_errors_are_those_that_the_sdk_knows(client: AsyncAnthropic) -> None:
    with pytest.raises(anthropic.BadRequestError) as bad:
        await client.messages.create(model=MODEL, messages=HELLO, max_tokens=0)
    body: Any = bad.value.body
    assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
    assert "max_tokens" in bad.value.message
    with pytest.raises(anthropic.NotFoundError, match="does not exist"):
        await client.messages.create(model="other", messages=HELLO, max_tokens=1)
    with pytest.raises(anthropic.NotFoundError, match="does not exist") as unknown:
        await client.models.retrieve("other")
    shown: Any = unknown.value.body
    assert (shown["type"], shown["error"]["type"]) == ("error", "not_found_error")
    assert shown["request_id"] == unknown.value.request_id is not None
    assert (await client.models.retrieve(MODEL))._request_id is not None
    with pytest.raises(anthropic.BadRequestError, match="container"):
        await client.messages.create(model=MODEL, messages=HELLO, max_tokens=1, container="c")


async def test_a_bug_is_found_in_the_log_by_what_the_error_calls_the_request(
    client: AsyncAnthropic, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(MessagesEndpoint, "__call__", None)
    with pytest.raises(anthropic.InternalServerError, match="internal error") as failed:
        await client.with_options(max_retries=0).messages.create(model=MODEL, messages=HELLO, max_tokens=1)
    [line] = [vars(record) for record in caplog.records if record.getMessage() == "bug in an endpoint"]
    shown: Any = failed.value.body
    assert line["request"] == shown["request_id"] == failed.value.request_id


async def test_models_are_paged(memory_bus: MemoryBus) -> None:
    ring = FakeRing(memory_bus)
    ring.aliases = (ModelName("b"), ModelName("c"))
    async with gateway_stack(memory_bus, ring=ring) as stack, client_of(stack) as client:
        for walk in (client.models, client.beta.models):
            assert [model.id async for model in walk.list(limit=1)] == [MODEL, "b", "c"]
        before = await client.models.list(limit=1, before_id="c")
        assert ([model.id for model in before.data], before.has_more, before.first_id) == (["b"], True, "b")
        assert [model.id async for model in client.models.list(limit=1, before_id="c")] == ["b", MODEL]
        for lifecycle, expected in ((["active"], 3), (["retired", "deprecated"], 0)):
            assert len((await client.models.list(lifecycle=lifecycle)).data) == expected  # type: ignore[arg-type]
        for wrong in ({"limit": 0}, {"after_id": "x"}, {"before_id": "b", "after_id": "c"}, {"lifecycle": ["new"]}):
            with pytest.raises(anthropic.BadRequestError):
                await client.models.list(**wrong)  # type: ignore[arg-type]


async def test_the_key_may_come_as_the_sdk_sends_it(memory_bus: MemoryBus) -> None:
    async with gateway_stack(memory_bus, api_keys=("key-1",)) as stack, client_of(stack) as client:
        assert (await client.messages.create(model=MODEL, messages=HELLO, max_tokens=1)).content
        stranger = client.with_options(api_key="key-2")
        with pytest.raises(anthropic.AuthenticationError, match="x-api-key"):
            await stranger.messages.create(model=MODEL, messages=HELLO, max_tokens=1)


def requests(*texts: str, **fields: Any) -> Any:
    given = {"model": MODEL, "max_tokens": 3} | fields
    return [
        {"custom_id": f"n{i}", "params": given | {"messages": [{"role": "user", "content": text}]}}
        for i, text in enumerate(texts)
    ]


async def batch_ended(client: AsyncAnthropic, id: str) -> Any:
    async with asyncio.timeout(60):
        while (batch := await client.messages.batches.retrieve(id)).processing_status != "ended":
            await asyncio.sleep(0.05)
    return batch


async def results_of(client: AsyncAnthropic, id: str) -> dict[str, Any]:
    return {each.custom_id: each.result async for each in await client.messages.batches.results(id)}


async def test_batches_of_messages(memory_bus: MemoryBus, tmp_path: Path) -> None:
    async with (
        gateway_stack(memory_bus, database_file=tmp_path / "database.sqlite") as stack,
        client_of(stack) as client,
    ):
        batches = client.messages.batches
        made = await batches.create(requests=requests("one", "two"))
        assert made.id.startswith("msgbatch_")
        assert (made.processing_status, made.request_counts.processing, made.results_url) == ("in_progress", 2, None)
        assert (made.expires_at - made.created_at).total_seconds() == 24 * 3600
        done = await batch_ended(client, made.id)
        assert (done.request_counts.succeeded, done.request_counts.processing) == (2, 0)
        assert done.ended_at is not None
        results = await results_of(client, made.id)
        assert {each.message.content[0].text for each in results.values()} == {said(3)}
        [asked, _] = [each for each in stack.ring.seen if isinstance(each, Tokenize)]
        assert asked.priority == BATCH_PRIORITY

        wrong = await batches.create(requests=requests("hot", top_p=9))
        assert (await batch_ended(client, wrong.id)).request_counts.errored == 1
        refused = (await results_of(client, wrong.id))["n0"]
        assert (refused.type, refused.error.error.type) == ("errored", "invalid_request_error")
        assert "top_p" in refused.error.error.message

        held = await batches.create(requests=requests("three", "HOLD"))
        with pytest.raises(anthropic.BadRequestError, match="not ended"):
            await batches.delete(held.id)
        await eventually(lambda: len(stack.gateway.requests) == 1)
        assert (await batches.cancel(held.id)).processing_status == "canceling"
        cancelled = await batch_ended(client, held.id)
        assert (cancelled.request_counts.succeeded, cancelled.request_counts.canceled) == (1, 1)
        assert {name: each.type for name, each in (await results_of(client, held.id)).items()} == {
            "n0": "succeeded",
            "n1": "canceled",
        }
        assert (await stack.openai.batches.list()).data == []
        assert [each.id async for each in batches.list(limit=2)] == [held.id, wrong.id, made.id]
        assert [each.id for each in (await batches.list(before_id=made.id, limit=1)).data] == [wrong.id]
        assert (await batches.delete(made.id)).type == "message_batch_deleted"
        for gone in (batches.retrieve(made.id), batches.delete(made.id), batches.retrieve("batch_1")):
            with pytest.raises(anthropic.NotFoundError):
                await gone


async def test_what_no_batch_of_messages_can_be(memory_bus: MemoryBus, tmp_path: Path) -> None:
    async with (
        gateway_stack(memory_bus, database_file=tmp_path / "database.sqlite") as stack,
        client_of(stack) as client,
    ):
        hi: Any = requests("hi")[0]
        for given, named in (
            ([], "requests"),
            ([hi, hi], "requests\\[1\\].custom_id"),
            ([hi | {"custom_id": "a b"}], "custom_id"),
            ([hi | {"params": 3}], "requests\\[0\\].params"),
            ([hi | {"params": hi["params"] | {"stream": True}}], "requests\\[0\\].params.stream"),
            ([hi | {"url": "/"}], "url"),
        ):
            with pytest.raises(anthropic.BadRequestError, match=named):
                await client.messages.batches.create(requests=given)
        assert (await client.messages.batches.list()).data == []
        assert (await stack.openai.files.list()).data == []
