"""Stored chats, from OpenAI's SDK through real gateways that share a real database."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest

from services.gateway.api.errors import RequestError
from services.gateway.conversations import chat_store
from services.gateway.http.call import MAX_LOOP_BODY, Call
from shared.bus.memory_bus import MemoryBus
from tests.support.gateway.fake_services import MODEL, said
from tests.support.gateway.gateway_server import GatewayStack, gateway_stack

PARTS: Any = [{"type": "text", "text": "two"}, {"type": "text", "text": "three"}]
MESSAGES: Any = [{"role": "system", "content": "Be short."}, {"role": "user", "content": PARTS}]


@pytest.fixture
async def stack(memory_bus: MemoryBus, tmp_path: Path) -> AsyncIterator[GatewayStack]:
    async with gateway_stack(memory_bus, database_file=tmp_path / "database.sqlite") as stack:
        yield stack


async def create(stack: GatewayStack, **fields: Any) -> Any:
    asked = {"model": MODEL, "messages": MESSAGES, "max_tokens": 8, "store": True} | fields
    return await stack.openai.chat.completions.create(**asked)


async def test_a_chat_is_found_again_at_another_gateway(memory_bus: MemoryBus, tmp_path: Path) -> None:
    settings: Any = {"database_file": tmp_path / "database.sqlite"}
    async with gateway_stack(memory_bus, **settings) as stack:
        asked: Any = {"metadata": {"a": "b"}, "temperature": 0.5, "user": "bob", "logprobs": True, "n": 2}
        whole = await create(stack, **asked)
        chunks = [chunk async for chunk in await create(stack, **asked, stream=True)]
        # What a client sees the end of is there.
        streamed = await stack.openai.chat.completions.retrieve(chunks[-1].id)
        await create(stack, store=False)
    async with gateway_stack(memory_bus, instance="gateway-2", **settings) as other:
        chats = other.openai.chat.completions
        found = await chats.retrieve(whole.id)
        repeated = {"temperature": 0.5, "input_user": "bob", "seed": None, "tools": None, "metadata": {"a": "b"}}
        assert found.model_dump() | whole.model_dump() | {"metadata": {"a": "b"}} == found.model_dump()
        assert {name: found.model_dump()[name] for name in repeated} == repeated
        assert streamed.choices == whole.choices
        assert (streamed.usage, streamed.created) == (whole.usage, chunks[-1].created)
        listed = [each async for each in chats.list(limit=1)]
        assert [each.model_dump() for each in listed] == [found.model_dump(), streamed.model_dump()]
        messages = [each.model_dump(exclude_unset=True) async for each in chats.messages.list(whole.id, limit=1)]
        assert [(each["id"], each["role"], each["content"], each["content_parts"]) for each in messages] == [
            (f"{whole.id}-0", "system", "Be short.", None),
            (f"{whole.id}-1", "user", None, PARTS),
        ]
        newest = await chats.messages.list(whole.id, limit=1, order="desc")
        assert ([each.id for each in newest.data], newest.has_more) == ([messages[1]["id"]], True)
        assert (await chats.update(whole.id, metadata={"c": "d"})).metadata == {"c": "d"}
        for filters, expected in (
            ({"metadata": {"c": "d"}}, [whole.id]),
            ({"metadata": {"a": "b"}, "model": MODEL, "order": "desc"}, [streamed.id]),
            ({"model": "none"}, []),
        ):
            assert [each.id async for each in chats.list(**filters)] == expected  # type: ignore[arg-type]
        assert (await chats.delete(whole.id)).deleted
        for again in (chats.retrieve(whole.id), chats.delete(whole.id), chats.messages.list(whole.id)):
            with pytest.raises(openai.NotFoundError, match="not found"):
                await again


async def test_long_contents_are_read_part_by_part(stack: GatewayStack, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [str(i) * 150_000 for i in range(8)]
    kept = await create(stack, messages=[{"role": "user", "content": text} for text in texts])
    messages = stack.openai.chat.completions.messages
    for order, expected in (("asc", texts), ("desc", texts[::-1])):
        assert [each.content async for each in messages.list(kept.id, limit=3, order=order)] == expected  # type: ignore[arg-type]
    monkeypatch.setattr(chat_store, "MAX_PAGE_BYTES", 400_000)
    page = await messages.list(kept.id)
    assert (len(page.data), page.has_more) == (2, True)
    assert [each.content async for each in messages.list(kept.id)] == texts


async def test_a_filter_finds_what_is_behind_any_number_of_others(
    stack: GatewayStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_store, "SCANNED_AT_ONCE", 1)
    monkeypatch.setattr(chat_store, "MAX_SCANNED", 2)
    kept = [await create(stack, metadata={"a": value}) for value in "xyyyxy"]
    chats = stack.openai.chat.completions
    assert [each.id async for each in chats.list(metadata={"a": "x"})] == [kept[0].id, kept[4].id]
    page = await chats.list(metadata={"a": "x"})
    assert ([each.id for each in page.data], page.has_more) == ([kept[0].id], True)
    assert [each async for each in chats.list(metadata={"a": "z"})] == []


async def test_what_is_read_is_held_as_bodies_are(stack: GatewayStack, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages of 16 MiB that many ask for at once would take all memory."""
    kept, chats = await create(stack), stack.openai.chat.completions
    held: list[int] = []
    hold = Call.hold

    async def recorded(call: Call, size: int) -> None:
        held.append(size)
        await hold(call, size)

    monkeypatch.setattr(Call, "hold", recorded)
    read = (chats.retrieve(kept.id), chats.update(kept.id, metadata={}), chats.list(), chats.messages.list(kept.id))
    for each in read:
        held.clear()
        shown = (await each).to_json(indent=None)
        assert 100 < sum(held) < 2 * len(shown)

    async def full(call: Call, size: int) -> None:
        raise RequestError(503, "no room")

    monkeypatch.setattr(Call, "hold", full)
    with pytest.raises(openai.InternalServerError, match="no room"):
        await chats.with_raw_response.list(timeout=5)
    monkeypatch.setattr("services.gateway.http.call.MEMORY_BODY", 256)
    with pytest.raises(openai.InternalServerError, match="no room"):
        await create(stack)
    monkeypatch.setattr(Call, "hold", hold)
    assert [each.id async for each in chats.list()] == [kept.id], "what has no room to be answered is not stored"


async def test_chats_belong_to_their_key_and_the_oldest_go_first(
    memory_bus: MemoryBus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.gateway.database.oldest_first.CHECK_EVERY", 1)
    settings: Any = {"database_file": tmp_path / "database.sqlite", "responses_kept": 2}
    async with gateway_stack(memory_bus, api_keys=("key-1", "key-2"), **settings) as stack:
        first, second, third = [await create(stack) for _ in range(3)]
        chats = stack.openai.chat.completions
        assert [each.id async for each in chats.list()] == [second.id, third.id]
        stranger = stack.openai.with_options(api_key="key-2").chat.completions
        assert [each async for each in stranger.list()] == []
        for refused in (
            *(chats.retrieve(first.id), stranger.retrieve(third.id), stranger.delete(third.id)),
            *(stranger.update(third.id, metadata={"a": "b"}), stranger.messages.list(third.id)),
        ):
            with pytest.raises(openai.NotFoundError, match="not found"):
                await refused
        with pytest.raises(openai.BadRequestError, match="after"):
            await stranger.list(after=third.id)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"metadata": {"a": 1}}, "metadata.a"),
        ({"metadata": {str(i): "" for i in range(17)}}, "metadata"),
        ({"extra_body": {"request_id": "mine"}}, "request_id"),
        ({"extra_body": {"prompt_token_ids": [3]}, "messages": []}, "store"),
        ({"stream": True, "extra_body": {"stream_options": {"resumable": True}}}, "stream_options.resumable"),
    ],
)
async def test_what_cannot_be_stored_is_refused(stack: GatewayStack, fields: Any, param: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        await create(stack, **fields)
    assert refused.value.param == param
    assert [each async for each in stack.openai.chat.completions.list()] == []


async def test_parameters_are_refused_by_name(stack: GatewayStack) -> None:
    for query, param in (("limit=0", "limit"), ("order=up", "order"), ("after=x", "after"), ("modl=x", "modl")):
        answer = await stack.http.get(f"/v1/chat/completions?{query}")
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


async def test_what_is_read_on_the_event_loop_is_never_large(stack: GatewayStack) -> None:
    large = {"metadata": {"a": "b" * MAX_LOOP_BODY}}
    for path in ("/v1/chat/completions/chatcmpl-1", "/v1/batches", "/api/show"):
        answer = await stack.http.post(path, json=large)
        assert answer.status_code == 413
        assert f"{MAX_LOOP_BODY} bytes" in answer.text


async def test_without_a_database_nothing_is_stored(memory_bus: MemoryBus, tmp_path: Path) -> None:
    async with gateway_stack(memory_bus) as stack:
        with pytest.raises(openai.BadRequestError, match="nothing is stored") as refused:
            await create(stack)
        assert refused.value.param == "store"
        assert [each async for each in stack.openai.chat.completions.list()] == []
        with pytest.raises(openai.NotFoundError, match="nothing is stored"):
            await stack.openai.chat.completions.retrieve("chatcmpl-1")
    (tmp_path / "away.sqlite").mkdir()  # which no database can be
    async with gateway_stack(memory_bus, database_file=tmp_path / "away.sqlite") as stack:
        answer = await create(stack)
        assert (answer.choices[0].message.content, answer.model_extra["store"]) == (said(8), False)
        async with asyncio.timeout(60):
            assert [chunk async for chunk in await create(stack, stream=True)][-1].choices[0].finish_reason
