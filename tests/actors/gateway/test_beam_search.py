"""Beam search over real HTTP: many one-token requests behind one answer, whatever becomes of some of them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from services.gateway.core.beam_search import BeamSearch
from shared.bus.memory_bus import MemoryBus
from shared.messages.tokenizer import Tokenize, TokenPrompt
from shared.packing import unpack
from shared.telemetry.metrics import service_registry
from tests.support.gateway.fake_services import CARD, MODEL, eventually, word
from tests.support.gateway.gateway_server import GatewayStack, gateway_stack


@pytest.fixture
async def stack(memory_bus: MemoryBus) -> AsyncIterator[GatewayStack]:
    async with gateway_stack(memory_bus) as stack:
        yield stack


def body(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": "well then", "use_beam_search": True, "n": 3, "max_tokens": 4, **fields}


async def ask(stack: GatewayStack, endpoint: str = "completions", **fields: Any) -> dict[str, Any]:
    answer = await stack.http.post(f"/v1/{endpoint}", json=body(**fields))
    assert answer.status_code == 200, answer.text
    decoded: dict[str, Any] = answer.json()
    return decoded


def expected(width: int, most: int, **settings: Any) -> BeamSearch:
    """The fake ring finds token i -0.5 - i likely, whatever came before."""
    beams = BeamSearch(width=width, max_tokens=most, ends=CARD.eos_token_ids, **settings)
    while not beams.over:
        beams.advance([[(i, -0.5 - i) for i in range(beams.candidates)] for _ in beams.running])
    return beams


def steps(stack: GatewayStack) -> list[Tokenize]:
    return [message for message in stack.ring.seen if isinstance(message, Tokenize)]


@pytest.mark.parametrize("early_stopping", [False, True, "never"])
async def test_the_choices_are_the_best_hypotheses(stack: GatewayStack, early_stopping: Any) -> None:
    answer = await ask(stack, length_penalty=2.0, early_stopping=early_stopping, logprobs=2, return_token_ids=True)
    found = expected(3, 4, length_penalty=2.0, early_stopping=early_stopping).ended
    assert [choice["token_ids"] for choice in answer["choices"]] == [list(h.beam.tokens) for h in found]
    for choice, hypothesis in zip(answer["choices"], found, strict=True):
        tokens = hypothesis.beam.tokens
        shown = tokens[:-1] if hypothesis.finish == "stop" else tokens
        assert (choice["text"], choice["finish_reason"]) == ("".join(map(word, shown)), hypothesis.finish)
        assert choice["logprobs"]["token_logprobs"] == [-0.5 - token for token in tokens]
        assert choice["prompt_token_ids"] == [0, 1]
    assert answer["usage"]["prompt_tokens"] == 2
    assert answer["usage"]["completion_tokens"] == sum(len(h.beam.tokens) for h in found)


async def test_a_step_asks_for_one_token_of_every_beam(stack: GatewayStack) -> None:
    await ask(stack, max_tokens=2, ignore_eos=True)
    asked = [unpack(m.prompt.tokens) for m in steps(stack) if isinstance(m.prompt, TokenPrompt)]
    assert asked == [[0, 1], [0, 1, 0], [0, 1, 1], [0, 1, 2]]
    assert {(m.stopping.max_tokens, m.sampling.temperature, m.sampling.logprobs) for m in steps(stack)} == {(1, 0.0, 6)}


async def test_as_many_log_probabilities_as_asked_for_are_told(stack: GatewayStack) -> None:
    answer = await ask(stack, n=1, logprobs=9, max_tokens=1)
    assert len(answer["choices"][0]["logprobs"]["top_logprobs"][0]) == 9


async def test_chats_and_several_prompts_are_searched_too(stack: GatewayStack) -> None:
    chat = await ask(stack, "chat/completions", messages=[{"role": "user", "content": "hi"}], prompt=None)
    several = await ask(stack, prompt=["well then", "a b c"])
    texts = [choice["text"] for choice in several["choices"]]
    assert texts[:3] == texts[3:] == [choice["message"]["content"] for choice in chat["choices"]]
    assert [choice["index"] for choice in several["choices"]] == list(range(6))
    assert several["usage"]["prompt_tokens"] == 5


async def test_failing_engines_cost_tries_and_nothing_else(stack: GatewayStack) -> None:
    smooth = await ask(stack)
    stack.ring.fails_first_attempts = True
    rough = await ask(stack)
    assert rough["choices"] == smooth["choices"]
    assert max(message.attempt for message in steps(stack)) == 2


async def test_a_client_that_leaves_ends_the_search(stack: GatewayStack) -> None:
    sent = json.dumps(body(prompt="HOLD", max_tokens=500)).encode()
    stack.ring.step = 0.01
    reader, writer = await asyncio.open_connection("127.0.0.1", stack.gateway.server.port)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n")
    writer.write(b"content-length: %d\r\n\r\n%b" % (len(sent), sent))
    await eventually(lambda: len(steps(stack)) > 10)
    writer.close()
    await eventually(lambda: len(stack.gateway.requests) == 0 and stack.gateway.requests.idle)
    seen = len(steps(stack))
    await asyncio.sleep(0.05)
    assert len(steps(stack)) == seen
    assert reader is not None


async def test_a_search_is_one_request_to_whoever_counts(stack: GatewayStack) -> None:
    def counted(outcome: str) -> float:
        labels = {"model": MODEL, "endpoint": "completion", "outcome": outcome}
        return service_registry("gateway").get_sample_value("baton_gateway_requests_total", labels) or 0.0

    def generated() -> int:
        return stack.gateway.requests.meters.of(MODEL).generation_tokens

    before, tokens = counted("finished"), generated()
    answer = await ask(stack)
    assert counted("finished") == before + 1
    assert generated() == tokens + answer["usage"]["completion_tokens"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": 5000}, "max_tokens"),
        ({"prompt": [1] * 2048}, "prompt"),
        ({"stream": True}, "stream"),
        ({"temperature": 1.0}, "temperature"),
    ],
)
async def test_what_cannot_be_searched_is_refused(stack: GatewayStack, fields: dict[str, Any], param: str) -> None:
    answer = await stack.http.post("/v1/completions", json=body(**fields))
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert not steps(stack)


async def test_a_gateway_that_stops_says_so(memory_bus: MemoryBus) -> None:
    async with gateway_stack(memory_bus) as stack:
        stack.ring.step = 0.01
        asking = asyncio.create_task(stack.http.post("/v1/completions", json=body(max_tokens=2000)))
        await eventually(lambda: len(steps(stack)) > 5)
        stack.gateway.requests.stop()
        assert (await asking).status_code == 503
