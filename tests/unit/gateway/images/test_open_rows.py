"""Rows of open requests are asked for as long as these are open, and made again where they are lost."""

from __future__ import annotations

import asyncio

import pytest
from msgspec.structs import replace

from services.gateway.api.errors import RequestError
from services.gateway.images import open_rows
from services.gateway.images.open_rows import OpenRows
from shared import topics
from shared.bus.memory_bus import MemoryBus
from shared.ids import Attempt, GatewayId, InstanceId, ModelName, RequestId, RowsName
from shared.messages.encoder import EncodeInput, ReadRows, RenewRows, RowsPiece
from shared.messages.generation import MAX_PROMPT_EMBEDS_BYTES, MediaRows, PromptEmbeds, SamplingOptions, StopConditions
from shared.messages.tokenizer import ChatPrompt, Tokenize

MODEL, ENCODER = ModelName("seer"), InstanceId("encoder-1")
LOST, MADE = RowsName(bytes(16)), RowsName(bytes([1] * 16))
FILE = EncodeInput(b"file")


def image(name: RowsName, count: int = 3) -> PromptEmbeds:
    media = (MediaRows(name, count, ENCODER),)
    return PromptEmbeds(dtype="float32", size=1, rows=b"", runs=((0, count),), media=media)


def chat(*embeds: PromptEmbeds, request: str = "r") -> Tokenize:
    return Tokenize(
        request=RequestId(request),
        attempt=Attempt(2),
        gateway=GatewayId("gateway-1"),
        model=MODEL,
        prompt=ChatPrompt(messages=b"[]", embeds=embeds, images=tuple(range(len(embeds)))),
        sampling=SamplingOptions(seed=0),
        stopping=StopConditions(),
    )


class Encoder:
    """Encodes, or refuses to."""

    refuses = False

    async def encode(self, field: str, question: EncodeInput, model: ModelName) -> PromptEmbeds:
        assert (field, question, model) == ("messages", FILE, MODEL)
        if self.refuses:
            raise RequestError(503, "no encoder answered")
        return image(MADE)


@pytest.fixture
def encoder() -> Encoder:
    return Encoder()


async def test_rows_are_made_again_where_an_engine_found_them_lost(memory_bus: MemoryBus, encoder: Encoder) -> None:
    rows = OpenRows(memory_bus, encoder.encode)
    rows.add(image(LOST), FILE, MODEL)
    sent: asyncio.Queue[Tokenize] = asyncio.Queue()
    running = asyncio.create_task(rows.run())
    request, own = chat(image(LOST)), PromptEmbeds(dtype="float32", size=1, rows=bytes(4))
    assert not rows.remake(request, sent.put)
    rows.record_lost(request.request)
    assert rows.remake(request, sent.put)
    assert await asyncio.wait_for(sent.get(), 60) == chat(image(MADE))
    assert not rows.remake(request, sent.put), "the next attempt has rows again"
    for unmakeable in (chat(image(RowsName(bytes(15) + b"x"))), chat(own)):
        rows.record_lost(unmakeable.request)
        assert rows.remake(unmakeable, sent.put)
        assert await asyncio.wait_for(sent.get(), 60) == unmakeable
    encoder.refuses = True
    rows.record_lost(request.request)
    assert rows.remake(request, sent.put)
    assert await asyncio.wait_for(sent.get(), 60) == request
    running.cancel()


async def test_encoders_hear_what_open_requests_need(
    memory_bus: MemoryBus, encoder: Encoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: asyncio.Queue[RenewRows] = asyncio.Queue()
    await memory_bus.subscribe(topics.rows_leases(MODEL), heard.put)
    rows = OpenRows(memory_bus, encoder.encode)
    rows.add(image(LOST), FILE, MODEL)
    await rows.renew([chat(image(LOST))])
    assert heard.empty(), "it was said just now"
    monkeypatch.setattr(open_rows, "RENEW_INTERVAL", 0.0)
    monkeypatch.setattr(open_rows, "ROWS_LEASE", 0.0)
    await rows.renew([chat(image(LOST)), chat(image(LOST), image(MADE), request="s"), replace(chat(), model="other")])
    assert await asyncio.wait_for(heard.get(), 60) == RenewRows((LOST, MADE))
    await rows.renew([])
    rows.record_lost(RequestId("r"))
    sent: asyncio.Queue[Tokenize] = asyncio.Queue()
    running = asyncio.create_task(rows.run())
    assert rows.remake(chat(image(LOST)), sent.put)
    assert await asyncio.wait_for(sent.get(), 60) == chat(image(LOST)), "its file is forgotten"
    running.cancel()


async def test_other_clusters_get_rows_in_the_message(memory_bus: MemoryBus, encoder: Encoder) -> None:
    async def respond(request: ReadRows) -> RowsPiece:
        return RowsPiece(bytes(range(12)) if request.name == MADE else b"")

    await memory_bus.serve(topics.kept_rows(ENCODER), respond)
    rows = OpenRows(memory_bus, encoder.encode)
    whole = await rows.with_rows(chat(image(MADE)))
    assert whole == chat(replace(image(MADE), rows=bytes(range(12)), media=()))
    assert await rows.with_rows(chat(image(LOST))) is None
    assert await rows.with_rows(chat(image(MADE, MAX_PROMPT_EMBEDS_BYTES // 4 + 1))) is None
    assert await rows.with_rows(chat()) == chat()
