"""Large bodies read in a process: the same request or refusal as on the event loop, whatever happens to it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from services.gateway.api.errors import RequestError
from services.gateway.api.generation import RequestLimits
from services.gateway.http.body_parser import MAX_INLINE_VALUES, BodyContext, BodyKind, BodyParser, is_small, read_body
from services.gateway.parsing.output_dialect import OutputDialect
from tests.support.gateway.fake_services import CARD, MODEL

USER = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
IDS = [7] * (2 * MAX_INLINE_VALUES)


def context(kind: BodyKind) -> BodyContext:
    return BodyContext(kind, [CARD], RequestLimits(), {MODEL: OutputDialect("hermes", "qwen3")})


@pytest.fixture
async def parser() -> AsyncIterator[BodyParser]:
    parser = BodyParser(context)
    yield parser
    await parser.close()


def large(fields: dict[str, Any]) -> bytes:
    body = json.dumps(fields | {"metadata": IDS}).encode()
    assert not is_small(body)
    return body


async def test_requests_are_the_same_as_on_the_event_loop(parser: BodyParser) -> None:
    bodies: list[tuple[BodyKind, dict[str, Any]]] = [
        ("chat", {"messages": [USER] * 9, "tools": [TOOL], "stop": ["a"], "stream": True}),
        ("chat", {"messages": [USER], "response_format": {"type": "json_object"}, "logit_bias": {"5": 1}}),
        ("completion", {"prompt": IDS, "max_tokens": 5}),
        ("completion", {"prompt": ["a", "b"], "use_beam_search": True, "n": 2}),
        ("tokenize", {"prompt": "x"}),
        ("detokenize", {"tokens": IDS}),
    ]
    for kind, fields in bodies:
        body = large(fields)
        assert await parser.read(kind, body) == read_body(body, context(kind))


async def test_refusals_are_the_same_as_on_the_event_loop(parser: BodyParser) -> None:
    for fields in ({"messages": []}, {"messages": [USER], "model": "other"}, {"messages": [USER], "n": 0}):
        with pytest.raises(RequestError) as here:
            read_body(large(fields), context("chat"))
        with pytest.raises(RequestError) as beside:
            await parser.read("chat", large(fields))
        assert (beside.value.status, beside.value.body()) == (here.value.status, here.value.body())


async def test_a_body_whose_process_dies_is_refused_and_the_next_is_read(parser: BodyParser) -> None:
    body = b'{"messages":[' + b"[]," * 3_000_000 + b"7]}"
    await parser.read("completion", large({"prompt": "x"}))
    (process,) = parser._idle
    reading = asyncio.create_task(parser.read("chat", body))
    while parser._idle:  # until the process has the body
        await asyncio.sleep(0)
    process.kill()
    with pytest.raises(RequestError, match="too much memory") as error:
        await reading
    assert error.value.status == 400
    assert (await parser.read("completion", large({"prompt": IDS}))).sequences == 1


async def test_the_processes_end_with_their_gateway(parser: BodyParser) -> None:
    await parser.read("completion", large({"prompt": "x"}))
    (process,) = parser._idle
    assert process.stdin is not None
    process.stdin.close()  # as the kernel does when the gateway is killed
    async with asyncio.timeout(60):
        assert await process.wait() == 0
    parser._idle.clear()


def test_usual_bodies_are_small() -> None:
    assert is_small(b"{}")
    assert is_small(json.dumps({"messages": [USER | {"content": "word " * 40_000}]}).encode())
    assert not is_small(b"x" * 300_000)
