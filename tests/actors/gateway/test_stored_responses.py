"""Stored responses, from OpenAI's SDK through real gateways that share a real database."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest

from services.gateway import response_store
from services.gateway.api.errors import RequestError
from services.gateway.database.sql_database import SqlDatabase
from services.gateway.http.call import MAX_PARAMETERS, Call
from shared.bus.memory_bus import MemoryBus
from shared.messages.tokenizer import ChatPrompt, Tokenize
from tests.support.gateway.fake_services import MODEL, said
from tests.support.gateway.gateway_server import GatewayStack, gateway_stack


@pytest.fixture
async def stack(memory_bus: MemoryBus, tmp_path: Path) -> AsyncIterator[GatewayStack]:
    async with gateway_stack(memory_bus, database_file=tmp_path / "database.sqlite") as stack:
        yield stack


async def create(stack: GatewayStack, **fields: Any) -> Any:
    return await stack.openai.responses.create(**({"model": MODEL, "input": "hi", "max_output_tokens": 8} | fields))


def last_messages(*stacks: GatewayStack) -> list[Any]:
    """The chat that the last of these gateways asked for, whichever ring has it."""
    gateway = stacks[-1].gateway.instance
    seen = [each for stack in stacks for each in stack.ring.seen if isinstance(each, Tokenize)]
    [prompt] = [each.prompt for each in seen if each.gateway == gateway][-1:]
    assert isinstance(prompt, ChatPrompt)
    messages: list[Any] = msgspec.json.decode(prompt.messages)
    return messages


async def test_a_response_is_found_again_and_goes_on_at_another_gateway(memory_bus: MemoryBus, tmp_path: Path) -> None:
    settings: Any = {"database_file": tmp_path / "database.sqlite"}
    async with gateway_stack(memory_bus, **settings) as stack:
        first = await create(stack, input="one", instructions="Be short.", metadata={"a": ',"items_size":1}'})
        assert (first.store, first.previous_response_id) == (True, None)
        assert (await stack.openai.responses.retrieve(first.id)) == first
        stream = await create(stack, input="two", previous_response_id=first.id, stream=True)
        second = [event async for event in stream][-1].response
        assert (await stack.openai.responses.retrieve(second.id)) == second
    async with gateway_stack(memory_bus, instance="gateway-2", **settings) as other:
        third = await create(other, input=[{"role": "user", "content": "three"}], previous_response_id=second.id)
        assert third.previous_response_id == second.id
        assert [(each["role"], each["content"]) for each in last_messages(stack, other)] == [
            ("user", "one"),
            ("assistant", said(8)),
            ("user", "two"),
            ("assistant", said(8)),
            ("user", "three"),
        ]
        items = [item async for item in other.openai.responses.input_items.list(third.id, order="asc", limit=2)]
        assert [(item.role, item.content[0].text) for item in items] == [  # type: ignore[union-attr]
            ("user", "one"),
            ("assistant", said(8)),
            ("user", "two"),
            ("assistant", said(8)),
            ("user", "three"),
        ]
        assert len({item.id for item in items}) == 5
        newest = await other.openai.responses.input_items.list(third.id, limit=1)
        assert (newest.data[0].id, newest.has_more) == (items[-1].id, True)


async def test_items_are_referred_to_by_their_ids(
    memory_bus: MemoryBus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: Any = {"api_keys": ("key-1", "key-2"), "database_file": tmp_path / "database.sqlite"}
    async with gateway_stack(memory_bus, **settings) as stack:
        first = await create(stack, input="one")
        stream = await create(stack, input="two", previous_response_id=first.id, stream=True)
        second = [event async for event in stream][-1].response
        items = [item.id async for item in stack.openai.responses.input_items.list(second.id, order="asc")]
        assert items[1] == first.output[0].id
        asked: Any = [{"type": "item_reference", "id": items[0]}, {"type": None, "id": second.output[0].id}]
        counted = await stack.openai.responses.input_tokens.count(
            model=MODEL, input=[*asked, {"role": "user", "content": "x"}]
        )
        assert counted.input_tokens
        third = await create(stack, input=[*asked, {"role": "user", "content": "three"}])
        assert [each["content"] for each in last_messages(stack)] == ["one", said(8), "three"]
        kept = [item.id async for item in stack.openai.responses.input_items.list(third.id, order="asc")]
        assert kept[:2] == [items[0], second.output[0].id]
        twice: Any = [{"type": "item_reference", "id": items[1]}]
        with pytest.raises(openai.BadRequestError, match="Duplicate item") as bad:
            await create(stack, input=twice, previous_response_id=first.id)
        assert bad.value.param == "input[0].id"
        stranger = stack.openai.with_options(api_key="key-2").responses
        unknown: Any = [{"type": "item_reference", "id": "msg_1"}]
        for refused in (create(stack, input=unknown), stranger.create(model=MODEL, input=asked)):
            with pytest.raises(openai.NotFoundError, match="not found") as gone:
                await refused
            assert gone.value.param == "input"
        monkeypatch.setattr(response_store, "MAX_REFERENCED", 100)
        with pytest.raises(openai.BadRequestError, match="more than 100 bytes"):
            await create(stack, input=asked[1:])
    async with gateway_stack(memory_bus) as stack:
        with pytest.raises(openai.NotFoundError, match="not found"):
            await create(stack, input=asked)


async def test_a_stored_response_has_an_id_of_its_own(stack: GatewayStack) -> None:
    with pytest.raises(openai.BadRequestError, match="`store` is false") as refused:
        await create(stack, extra_body={"request_id": "resp_mine"})
    assert refused.value.param == "request_id"
    assert (await create(stack, store=False, extra_body={"request_id": "resp_mine"})).id == "resp_mine"


async def test_what_is_not_to_be_stored_is_not(stack: GatewayStack) -> None:
    response = await create(stack, store=False)
    assert not response.store
    with pytest.raises(openai.NotFoundError, match="not found"):
        await stack.openai.responses.retrieve(response.id)
    with pytest.raises(openai.BadRequestError, match="not found") as bad:
        await create(stack, previous_response_id=response.id)
    assert (bad.value.param, bad.value.code) == ("previous_response_id", "previous_response_not_found")


async def test_a_deleted_response_is_gone(stack: GatewayStack) -> None:
    response = await create(stack)
    await stack.openai.responses.delete(response.id)
    for again in (stack.openai.responses.retrieve, stack.openai.responses.delete):
        with pytest.raises(openai.NotFoundError):
            await again(response.id)


async def test_responses_belong_to_their_key(memory_bus: MemoryBus, tmp_path: Path) -> None:
    async with gateway_stack(
        memory_bus, api_keys=("key-1", "key-2"), database_file=tmp_path / "database.sqlite"
    ) as stack:
        response = await create(stack)
        assert (await stack.openai.responses.retrieve(response.id)).id == response.id
        stranger = stack.openai.with_options(api_key="key-2")
        for ask in (stranger.responses.retrieve, stranger.responses.delete, stranger.responses.input_items.list):
            with pytest.raises(openai.NotFoundError, match="not found"):
                await ask(response.id)
        with pytest.raises(openai.BadRequestError, match="not found"):
            await stranger.responses.create(model=MODEL, input="x", previous_response_id=response.id)


async def test_the_oldest_go_first(memory_bus: MemoryBus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.gateway.database.oldest_first.CHECK_EVERY", 1)
    async with gateway_stack(memory_bus, database_file=tmp_path / "database.sqlite", responses_kept=2) as stack:
        responses = [await create(stack) for _ in range(4)]
        for response in responses[:2]:
            with pytest.raises(openai.NotFoundError):
                await stack.openai.responses.retrieve(response.id)
        for response in responses[2:]:
            assert (await stack.openai.responses.retrieve(response.id)).id == response.id
    monkeypatch.setattr("services.gateway.database.oldest_first.CHECK_EVERY", 32)  # bytes alone make it look
    monkeypatch.setattr("services.gateway.database.oldest_first.UNSEEN_BYTES", 3000)
    async with gateway_stack(memory_bus, database_file=tmp_path / "small.sqlite", responses_size=4500) as stack:
        first, last = await create(stack), await create(stack, input="x" * 2000)
        with pytest.raises(openai.NotFoundError):
            await stack.openai.responses.retrieve(first.id)
        assert (await stack.openai.responses.retrieve(last.id)).id == last.id


async def test_without_a_database_nothing_is_stored(memory_bus: MemoryBus) -> None:
    async with gateway_stack(memory_bus) as stack:
        assert not (await create(stack)).store
        for fields in ({"store": True}, {"previous_response_id": "resp_1"}):
            with pytest.raises(openai.BadRequestError, match="nothing is stored"):
                await create(stack, **fields)
        with pytest.raises(openai.NotFoundError, match="nothing is stored"):
            await stack.openai.responses.retrieve("resp_1")


async def test_a_database_that_is_away_stops_no_response(memory_bus: MemoryBus, tmp_path: Path) -> None:
    (tmp_path / "database.sqlite").mkdir()  # which no database can be
    async with gateway_stack(memory_bus, database_file=tmp_path / "database.sqlite") as stack:
        response = await create(stack)
        assert (response.output_text, response.store) == (said(8), False)
        with pytest.raises(openai.InternalServerError, match="does not answer"):
            await stack.openai.responses.retrieve(response.id)


@pytest.mark.parametrize(
    ("path", "param"),
    [
        ("?stram=true", "stram"),
        ("?include[]=reasoning.encrypted_content", "include"),
        ("/input_items?limit=0", "limit"),
        ("/input_items?order=up", "order"),
        ("/input_items?after=x", "after"),
    ],
)
async def test_parameters_are_refused_by_name(stack: GatewayStack, path: str, param: str) -> None:
    response = await create(stack)
    answer = await stack.http.get(f"/v1/responses/{response.id}{path}")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


async def test_more_parameters_than_there_are_is_no_bug_of_the_server(stack: GatewayStack) -> None:
    answer = await stack.http.get("/v1/responses/resp_none?" + "&".join(f"p{n}=1" for n in range(100)))
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "p0")
    answer = await stack.http.get("/v1/responses/resp_none?" + "&" * MAX_PARAMETERS)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "query")


async def test_what_is_larger_than_a_conversation_may_be_is_refused_unread(
    memory_bus: MemoryBus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: Any = {"database_file": tmp_path / "database.sqlite", "max_body": 4000, "max_media_body": 4000}
    async with gateway_stack(memory_bus, **settings) as stack:
        made = await stack.openai.conversations.create()
        said_long: Any = [{"role": "user", "content": "x" * 2500}]
        for _ in range(2):
            [item] = (await stack.openai.conversations.items.create(made.id, items=said_long)).data
            await stack.openai.conversations.items.delete(str(item.id), conversation_id=made.id)
        asked: Any = {"include": ["message.output_text.logprobs"], "top_logprobs": 9}
        first = await create(stack, input="x" * 2500, **asked)
        second = await create(stack, input="x" * 500, previous_response_id=first.id, **asked)
        for field, id in (("conversation", made.id), ("previous_response_id", second.id)):
            await create(stack, input="more", **{field: id})  # what is counted need not be in the prompt
        monkeypatch.setattr("services.gateway.http.apis.responses.MAX_BYTES", 4000)
        monkeypatch.setattr(SqlDatabase, "chunks", None)
        for field, id in (("conversation", made.id), ("previous_response_id", second.id)):
            with pytest.raises(openai.APIStatusError, match=f"{field}: it has [0-9]+ bytes; 4000 are allowed") as error:
                await create(stack, input="more", **{field: id})
            assert (error.value.status_code, error.value.body["param"]) == (413, field)  # type: ignore[index]


async def test_a_conversation_goes_on_at_another_gateway(memory_bus: MemoryBus, tmp_path: Path) -> None:
    settings: Any = {"database_file": tmp_path / "database.sqlite"}
    async with gateway_stack(memory_bus, **settings) as stack:
        greeting: Any = [{"role": "system", "content": "Be short."}]
        made = await stack.openai.conversations.create(items=greeting, metadata={"a": "b"})
        assert (made.object, made.metadata) == ("conversation", {"a": "b"})
        first = await create(stack, input="one", conversation=made.id)
        assert first.conversation.id == made.id
        stream = await create(stack, input="two", conversation={"id": made.id}, stream=True, store=False)
        second = [event async for event in stream][-1].response
        assert (second.conversation.id, second.store) == (made.id, False)
    async with gateway_stack(memory_bus, instance="gateway-2", **settings) as other:
        client = other.openai.conversations
        begun = await create(other, input="three", conversation=made.id, background=True)
        async with asyncio.timeout(60):
            while (third := await other.openai.responses.retrieve(begun.id)).status != "incomplete":
                await asyncio.sleep(0.05)
        [asked] = [each for each in (*stack.ring.seen, *other.ring.seen) if isinstance(each, Tokenize)][-1:]
        said_before = ["Be short.", "one", said(8), "two", said(8), "three"]
        assert [each["content"] for each in msgspec.json.decode(asked.prompt.messages)] == said_before  # type: ignore[union-attr]
        items: list[Any] = [item async for item in client.items.list(made.id, order="asc", limit=2)]
        assert [item.content[0].text for item in items] == [*said_before, said(8)]
        assert items[-1].id == third.output[0].id
        newest = await client.items.list(made.id, limit=1)
        assert (newest.data[0].id, newest.has_more) == (items[-1].id, True)
        assert await client.items.retrieve(items[1].id, conversation_id=made.id) == items[1]
        assert (await client.items.delete(items[1].id, conversation_id=made.id)).id == made.id
        with pytest.raises(openai.NotFoundError):
            await client.items.retrieve(items[1].id, conversation_id=made.id)
        again: Any = {"id": items[1].id, "role": "user", "content": "four"}  # a client's own id, which was free again
        added = await client.items.create(made.id, items=[again])
        assert (await client.items.retrieve(items[1].id, conversation_id=made.id)).content[0].text == "four"  # type: ignore[union-attr]
        await other.openai.responses.input_tokens.count(model=MODEL, input="five", conversation=made.id)
        left = [item.id async for item in client.items.list(made.id, order="asc", limit=100)]
        assert left == [*(item.id for item in items if item is not items[1]), added.data[0].id]
        assert (await client.update(made.id, metadata={"c": "d"})).metadata == {"c": "d"}
        assert (await client.retrieve(made.id)).created_at == made.created_at
        assert (await client.delete(made.id)).deleted
        for refused in (client.retrieve(made.id), create(other, conversation=made.id), client.items.list(made.id)):
            with pytest.raises(openai.NotFoundError, match="not found"):
                await refused


async def test_additions_to_a_conversation_at_once_are_all_kept_and_each_once(stack: GatewayStack) -> None:
    client = stack.openai.conversations
    made = await client.create()
    texts = {str(i) for i in range(12)}
    await asyncio.gather(*(client.items.create(made.id, items=[{"role": "user", "content": x}]) for x in texts))
    items: list[Any] = [item async for item in client.items.list(made.id, limit=5)]
    assert ({item.content[0].text for item in items}, len(items)) == (texts, 12)
    response: Any = {"id": "resp_1", "status": "completed", "conversation": {"id": made.id}, "output": [{"id": "o"}]}
    store = stack.gateway._background[0].store
    for _ in range(2):  # as a gateway does that takes up what another one has nearly ended
        assert await store.add_to_conversation(response, b'[{"id": "a"}, {"id": "b"}]', 1, "")
    assert [item.id for item in await store.conversations.items(made.id, "")][12:] == ["b", "o"]


async def test_pages_show_all_items_though_some_have_the_same_id(stack: GatewayStack) -> None:
    client = stack.openai.conversations
    for ids in ("abab", "aaab", "baaa"):
        named: Any = [{"id": id, "role": "user", "content": str(i)} for i, id in enumerate(ids)]
        made = await client.create(items=named[:2])
        await client.items.create(made.id, items=named[2:])
        for limit in (1, 2, 3):
            listed: list[Any] = [item async for item in client.items.list(made.id, order="asc", limit=limit)]
            assert [item.content[0].text for item in listed] == ["0", "1", "2", "3"]
        newest = await client.items.list(made.id, limit=2)
        assert [item.id for item in newest.data] == {"abab": ["b", "a"], "aaab": ["b", "a"], "baaa": ["a"]}[ids]


async def test_what_is_read_of_the_database_is_held_as_bodies_are(
    stack: GatewayStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A conversation of 64 MiB that many ask for at once would take all memory."""
    held: list[int] = []
    hold = Call.hold

    async def recorded(call: Call, size: int, **how: Any) -> None:
        held.append(size)
        await hold(call, size, **how)

    monkeypatch.setattr(Call, "hold", recorded)
    client, long = stack.openai.conversations, "x" * 3000
    made = await client.create(items=[{"role": "user", "content": long}])
    [item] = (await client.items.list(made.id)).data
    await client.items.retrieve(str(item.id), conversation_id=made.id)
    first = await create(stack, input=long, conversation=made.id)
    await create(stack, previous_response_id=first.id)
    await stack.openai.responses.input_items.list(first.id)
    await client.items.delete(str(item.id), conversation_id=made.id)
    assert len(held) == 6
    assert all(size > len(long) for size in held)
    held.clear()
    shown = await stack.http.get(f"/v1/responses/{first.id}")
    assert 1 <= sum(held) / len(shown.content) < 1.2

    async def full(call: Call, size: int) -> None:
        raise RequestError(503, "no room")

    monkeypatch.setattr(Call, "hold", full)
    monkeypatch.setattr("services.gateway.http.call.MEMORY_BODY", 256)
    database = SqlDatabase(tmp_path / "database.sqlite")
    before = await database.usage("response", "")
    with pytest.raises(openai.InternalServerError, match="no room"):
        await create(stack)
    assert await database.usage("response", "") == before, "what has no room to be answered is not stored"
    await database.close()


async def test_conversations_have_bounds(
    stack: GatewayStack, memory_bus: MemoryBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, user = stack.openai.conversations, {"role": "user", "content": "hi"}
    made = await client.create(items=[user])  # type: ignore[list-item]
    monkeypatch.setattr("services.gateway.conversations.conversation_store.MAX_ITEMS", 1)
    for refused in (client.items.create(made.id, items=[user]), create(stack, conversation=made.id)):  # type: ignore[list-item]
        with pytest.raises(openai.BadRequestError, match="at most 1"):
            await refused
    for call in (
        client.create(items=[user] * 21),  # type: ignore[list-item]
        client.create(items=[{"type": "item_reference", "id": "x"}]),
        client.create(metadata={"a": "x" * 513}),
        client.update(made.id, metadata=None, extra_body={"metadata": 3}),
        client.items.list(made.id, limit=0),
    ):
        with pytest.raises(openai.BadRequestError):
            await call
    async with gateway_stack(memory_bus, instance="gateway-2") as without:
        with pytest.raises(openai.NotFoundError, match="database"):
            await without.openai.conversations.create()
