"""Stored responses, from OpenAI's SDK through real gateways that share a real database."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest

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
    [prompt] = [each.prompt for each in seen if each.gateway == gateway]
    assert isinstance(prompt, ChatPrompt)
    messages: list[Any] = msgspec.json.decode(prompt.messages)
    return messages


async def test_a_response_is_found_again_and_goes_on_at_another_gateway(memory_bus: MemoryBus, tmp_path: Path) -> None:
    settings: Any = {"database_file": tmp_path / "database.sqlite"}
    async with gateway_stack(memory_bus, **settings) as stack:
        first = await create(stack, input="one", instructions="Be short.", metadata={"a": "b"})
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
    monkeypatch.setattr("services.gateway.response_store.CHECK_EVERY", 1)
    async with gateway_stack(memory_bus, database_file=tmp_path / "database.sqlite", responses_kept=2) as stack:
        responses = [await create(stack) for _ in range(4)]
        for response in responses[:2]:
            with pytest.raises(openai.NotFoundError):
                await stack.openai.responses.retrieve(response.id)
        for response in responses[2:]:
            assert (await stack.openai.responses.retrieve(response.id)).id == response.id
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
