"""Wherever a client is cut off, and however far the copy is that goes on, it has each character once at the end."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from services.gateway.api.chat import AssistantMessage
from services.gateway.api.event_ids import EventId
from services.gateway.api.generation import ResponseOptions, StreamOptions
from services.gateway.api.response import ChoiceState, GenerationResponse, ResponseHeader
from services.gateway.http.resumable import ResumableWriter
from services.gateway.http.streaming import SseFrames
from services.gateway.metrics import ModelMeters
from services.gateway.parsing.output_dialect import OutputDialect
from services.gateway.parsing.output_parser import ParserOptions
from shared.ids import Attempt, RequestId
from shared.messages.gateway import Delta, LogprobText, PositionLogprobs

STREAM = "cmpl-0123456789abcdef01234567"
REQUEST = RequestId(STREAM)


class Client:
    """Reads events, and knows the last id."""

    def __init__(self) -> None:
        self.events: list[Any] = []
        self.data = b""
        self.on_lost = None

    def write_chunk(self, data: bytes) -> None:
        self.data += data

    def flush(self) -> None:
        pass

    def unread(self) -> int:
        return 0

    def is_closing(self) -> bool:
        return False

    def abort(self) -> None:
        raise AssertionError

    def read(self) -> list[tuple[str | None, Any]]:
        events = []
        for block in self.data.split(b"\n\n")[:-1]:
            lines = block.decode().split("\n")
            name = next((line[4:] for line in lines if line.startswith("id: ")), None)
            [data] = [line[6:] for line in lines if line.startswith("data: ")]
            events.append((name, data if data == "[DONE]" else json.loads(data)))
        return events


def delta(position: int, texts: list[str], finish: bool = False) -> Delta:
    logprobs = tuple(PositionLogprobs(LogprobText(text, text.encode(), -1.0, 7), ()) for text in texts)
    tokens = tuple(range(position, position + len(texts)))
    return Delta(REQUEST, Attempt(1), position, tokens, "".join(texts), "stop" if finish else None, None, logprobs)


def sent(last: EventId, deltas: list[Delta], chat: bool, tools: bool) -> list[tuple[str | None, Any]]:
    """What a client gets that comes back after `last`, of these deltas. `tools`: calls are looked for."""
    asyncio.set_event_loop(loop := asyncio.new_event_loop())
    try:
        return loop.run_until_complete(_sent(last, deltas, chat, tools))
    finally:
        asyncio.set_event_loop(None)
        loop.close()


async def _sent(last: EventId, deltas: list[Delta], chat: bool, tools: bool) -> list[tuple[str | None, Any]]:
    client, choice = Client(), ChoiceState(0, 0, echo="" if chat else "echo ")
    choice.message = AssistantMessage(ParserOptions(OutputDialect("hermes"))) if chat and tools else None
    header = ResponseHeader("chat" if chat else "completion", STREAM, 17, "demo")
    options = StreamOptions(include_usage=True, continuous_usage=False, resumable=True)
    writer = ResumableWriter(
        SseFrames(header, options, 1, ResponseOptions(logprobs=True, token_ids=True)),
        client,
        last=last,
        include_usage=True,
        keep_alive=60,
        unread_limit=2**20,
        now=0.0,
    )
    writer.start()
    response = GenerationResponse(header, {REQUEST: choice}, writer, ModelMeters(), 0.0)
    for each in deltas:
        response.restore(choice, each, 0.0)
    return client.read()


def summary(events: list[tuple[str | None, Any]], chat: bool) -> dict[str, Any]:
    """All that a client learns from its events, whatever they are cut into."""
    found: dict[str, Any] = {"text": "", "roles": 0, "tokens": [], "logprobs": [], "ends": [], "usage": [], "done": 0}
    for _, body in events:
        if body == "[DONE]":
            found["done"] += 1
            continue
        if body["usage"]:
            found["usage"].append(body["usage"])
        for choice in body["choices"]:
            found["roles"] += chat and "role" in choice["delta"]
            found["text"] += choice["delta"].get("content", "") if chat else choice["text"]
            found["tokens"] += choice.get("token_ids", [])
            columns = choice["logprobs"] or {}
            if chat:
                found["logprobs"] += [entry["token"] for entry in columns.get("content", [])]
            else:
                found["logprobs"] += zip(columns.get("tokens", []), columns.get("text_offset", []), strict=True)
            found["ends"] += [choice["finish_reason"]] if choice["finish_reason"] else []
    return found


def grouped(texts: list[str], sizes: list[int]) -> list[Delta]:
    """The output as deltas of so many tokens each, the last one with the rest and the end."""
    deltas, position = [], 0
    for size in sizes:
        if position + size < len(texts):
            deltas.append(delta(position, texts[position : position + size]))
            position += size
    return [*deltas, delta(position, texts[position:], finish=True)]


SIZES = st.lists(st.integers(1, 4), max_size=12)
TEXTS = st.lists(st.sampled_from(["", "a", "é", "🎉", '"', "word", "<tool"]), min_size=1, max_size=12)


@given(TEXTS, SIZES, SIZES, st.integers(0, 30), st.booleans(), st.booleans())
@example(["", "a"], [1], [1], 1, True, True)  # cut off behind the role, which came with a token without text
def test_a_client_has_everything_once(
    texts: list[str], first: list[int], second: list[int], read: int, chat: bool, tools: bool
) -> None:
    new = EventId(STREAM, (None,))
    whole = sent(new, grouped(texts, first), chat, tools)
    identified = [event for event in whole if event[0] is not None]
    had = identified[: read % (len(identified) + 1)]
    last = EventId.read(had[-1][0].encode()) if had and had[-1][0] else new
    rest = sent(last, grouped(texts, second), chat, tools)
    expected, found = summary(whole, chat), summary(had + rest, chat)
    assert found == expected
    assert found["text"] == ("" if chat else "echo ") + "".join(texts)
    assert [event[0] for event in (had + rest)][-2:][0] is not None
    assert (found["done"], found["ends"], len(found["usage"])) == (1, ["stop"], 1)
