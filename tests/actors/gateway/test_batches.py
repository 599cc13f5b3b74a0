"""`/v1/batches` by the official client: through the real endpoints of a gateway, with a fake ring behind it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Collection
from pathlib import Path
from typing import Any

import openai
import pytest

from deploy.cli.keys import new_key
from services.gateway.batches.batch_run import BATCH_PRIORITY
from shared.bus.memory_bus import MemoryBus
from shared.messages.tokenizer import Tokenize
from tests.support.gateway.fake_services import MODEL, FakeRing, said
from tests.support.gateway.gateway_server import GatewayStack, gateway_stack

CHATS = "/v1/chat/completions"


@pytest.fixture
async def stack(memory_bus: MemoryBus, tmp_path: Path) -> AsyncIterator[GatewayStack]:
    async with gateway_stack(memory_bus, database_file=tmp_path / "database.sqlite") as stack:
        yield stack


def chats(count: int, url: str = CHATS, held: Collection[int] = (), **fields: Any) -> bytes:
    """`held`: the numbers of those that are answered once the ring's `hold` is set."""

    def body(number: int) -> dict[str, Any]:
        text = f"HOLD {number}" if number in held else f"{number}"
        return {"model": MODEL, "messages": [{"role": "user", "content": text}], "max_tokens": 3} | fields

    lines = [{"custom_id": f"n{n}", "method": "POST", "url": url, "body": body(n)} for n in range(count)]
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


async def new_batch(client: openai.AsyncOpenAI, text: bytes, **fields: Any) -> Any:
    file = await client.files.create(file=("in.jsonl", text), purpose="batch")
    given = {"endpoint": CHATS, "completion_window": "24h"} | fields
    return await client.batches.create(input_file_id=file.id, **given)


async def ended(client: openai.AsyncOpenAI, id: str) -> Any:
    async with asyncio.timeout(60):
        while (batch := await client.batches.retrieve(id)).status in ("validating", "in_progress", "finalizing"):
            await asyncio.sleep(0.05)
    return batch


async def lines_of(client: openai.AsyncOpenAI, file: str | None) -> list[Any]:
    assert file is not None
    return [json.loads(line) for line in (await client.files.content(file)).text.splitlines()]


async def test_a_batch_is_answered_as_its_requests_would_be(stack: GatewayStack) -> None:
    client = stack.openai
    text = chats(6) + chats(1, top_p=9).replace(b'"n0"', b'"hot"')
    batch = await new_batch(client, text, metadata={"for": "a test"})
    assert (batch.object, batch.status, batch.endpoint, batch.metadata) == (
        "batch",
        "validating",
        CHATS,
        {"for": "a test"},
    )
    assert batch.expires_at == batch.created_at + 24 * 3600

    done = await ended(client, batch.id)

    assert (done.status, done.request_counts.total) == ("completed", 7)
    assert (done.request_counts.completed, done.request_counts.failed) == (6, 1)
    assert done.created_at <= done.in_progress_at <= done.finalizing_at <= done.completed_at
    answers = await lines_of(client, done.output_file_id)
    assert [answer["custom_id"] for answer in answers] == [f"n{n}" for n in range(6)]
    assert {answer["response"]["body"]["choices"][0]["message"]["content"] for answer in answers} == {said(3)}
    (refused,) = await lines_of(client, done.error_file_id)
    assert (refused["custom_id"], refused["response"]["status_code"]) == ("hot", 400)
    assert refused["response"]["body"]["error"]["param"] == "top_p"
    sent = [message for message in stack.ring.seen if isinstance(message, Tokenize)]
    assert {message.priority for message in sent} == {BATCH_PRIORITY}
    output = await client.files.retrieve(done.output_file_id)
    assert (output.purpose, output.filename) == ("batch_output", f"{batch.id}_output.jsonl")


async def test_batches_are_listed_and_cancelled(stack: GatewayStack) -> None:
    client = stack.openai
    stack.ring.busy = 9  # by others: no line is sent
    await stack.ring.announce()
    made = [(await new_batch(client, chats(2))).id for _ in range(3)]
    assert [batch.id async for batch in client.batches.list(limit=2)] == made[::-1]

    cancelling = await client.batches.cancel(made[0])
    assert cancelling.status == "cancelling"
    async with asyncio.timeout(60):
        while (batch := await client.batches.retrieve(made[0])).status != "cancelled":
            await asyncio.sleep(0.05)
    assert (batch.output_file_id, batch.request_counts.completed) == (None, 0)
    assert not any(isinstance(message, Tokenize) for message in stack.ring.seen)

    stack.ring.busy = 0
    assert (await ended(client, made[2])).status == "completed"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"endpoint": "/v1/moderations"}, "endpoint"),
        ({"completion_window": "1d"}, "completion_window"),
        ({"completion_window": "169h"}, "completion_window"),
        ({"metadata": {"a": "b" * 513}}, "metadata"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 5}}, "output_expires_after.seconds"),
        ({"extra_body": {"priority": 3}}, "priority"),
        ({"extra_body": {"input_file_id": "file-none"}}, "input_file_id"),
    ],
)
async def test_what_no_batch_can_be_is_refused_by_field(
    stack: GatewayStack, fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        await new_batch(stack.openai, chats(1), **fields)
    assert raised.value.param == param


async def test_a_batch_is_its_keys_alone_and_has_its_keys_rights(memory_bus: MemoryBus, tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    secrets = {"alice": new_key(keys, "alice", {}), "bob": new_key(keys, "bob", {})}
    secrets["stranger"] = new_key(keys, "stranger", {"models": ["another/model"]})
    async with gateway_stack(memory_bus, database_file=tmp_path / "database.sqlite", keys_file=keys) as stack:
        clients = {name: stack.openai.with_options(api_key=secret) for name, secret in secrets.items()}
        batch = await new_batch(clients["alice"], chats(2))
        assert (await ended(clients["alice"], batch.id)).request_counts.completed == 2
        sent = [message for message in stack.ring.seen if isinstance(message, Tokenize)]
        assert {message.key for message in sent} == {"alice"}

        for hidden in (clients["bob"].batches.retrieve(batch.id), clients["bob"].batches.cancel(batch.id)):
            with pytest.raises(openai.NotFoundError, match="No such Batch object"):
                await hidden
        assert (await clients["bob"].batches.list()).data == []
        with pytest.raises(openai.BadRequestError, match="the id of one of the files is expected"):
            await clients["bob"].batches.create(
                input_file_id=batch.input_file_id, endpoint=CHATS, completion_window="24h"
            )

        strange = await new_batch(clients["stranger"], chats(1))
        done = await ended(clients["stranger"], strange.id)
        (refused,) = await lines_of(clients["stranger"], done.error_file_id)
        assert refused["response"]["status_code"] == 403


async def test_a_batch_outlives_its_gateway(memory_bus: MemoryBus, tmp_path: Path) -> None:
    kept, ring = tmp_path / "database.sqlite", FakeRing(memory_bus, step=0.02)
    async with gateway_stack(memory_bus, ring=ring, database_file=kept, instance="gateway-2") as other:
        assert other.gateway.batch_runner is not None
        await other.gateway.batch_runner.stop()
        silent = FakeRing(memory_bus)
        async with gateway_stack(memory_bus, ring=silent, wait=False, database_file=kept) as stack:
            batch = await new_batch(stack.openai, chats(30, held=range(10, 30), max_tokens=8), completion_window="48h")
            async with asyncio.timeout(60):
                while (await stack.openai.batches.retrieve(batch.id)).request_counts.completed < 3:
                    await asyncio.sleep(0.05)
        left = await other.openai.batches.retrieve(batch.id)
        assert left.status == "in_progress"

        ring.hold.set()
        other.gateway.batch_runner.resume()

        done = await ended(other.openai, batch.id)
        assert (done.status, done.request_counts.completed) == ("completed", 30)
        answers = await lines_of(other.openai, done.output_file_id)
        assert [answer["custom_id"] for answer in answers] == [f"n{n}" for n in range(30)]
