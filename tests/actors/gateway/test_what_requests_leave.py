"""Once a request has ended nothing of it is left, also before Python looks for cycles of garbage, which it seldom does:
bodies have megabytes."""

from __future__ import annotations

import asyncio
import gc
import json
import select
from collections import Counter
from collections.abc import Collection, Iterator
from typing import Any

import pytest

from services.gateway.api.generation import GenerationRequest
from services.gateway.api.response import GenerationResponse
from services.gateway.core.open_request import OpenRequest
from services.gateway.http import connection
from services.gateway.http.bodies import body_budget
from services.gateway.http.bodies.body_budget import MEMORY_BODY, BodyBudget, BodyLease
from services.gateway.http.call import Call
from services.gateway.http.connection import MIN_PIECE_BYTES
from shared.bus.memory_bus import MemoryBus
from shared.messages.model_card import EncoderDecoderModel
from tests.support.gateway.fake_services import MODEL, FakeRing, eventually
from tests.support.gateway.gateway_server import GatewayStack, gateway_stack

KEPT = (Call, GenerationRequest, GenerationResponse, OpenRequest)


@pytest.fixture
def no_collections() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def left() -> Counter[str]:
    return Counter(type(each).__name__ for each in gc.get_objects() if type(each) in KEPT)


async def post(stack: GatewayStack, path: str, **fields: Any) -> int:
    return (await stack.http.post(path, json={"model": MODEL, **fields})).status_code


async def leave(stack: GatewayStack, path: str, begun: Collection[Any], *, behind: bytes = b"", **fields: Any) -> None:
    """Asks for more than it waits for, which is until something has `begun`; sends further requests `behind` it."""
    _, writer = await asyncio.open_connection("127.0.0.1", stack.gateway.server.port)
    body = json.dumps({"model": MODEL, **fields}).encode()
    head = b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % (path.encode(), len(body))
    writer.write(head + body + behind)
    await eventually(lambda: bool(begun))
    writer.close()


@pytest.mark.usefixtures("no_collections")
@pytest.mark.parametrize("stream", [False, True])
async def test_nothing_of_a_request_is_left_at_its_end(memory_bus: MemoryBus, stream: bool) -> None:
    async with gateway_stack(memory_bus) as stack:
        prompts = {"hello": 200, "FAIL once": 200, "REJECT": 400, "REJECT OVERLOAD": 429}
        for prompt, status in prompts.items():
            assert await post(stack, "/v1/completions", prompt=prompt, stream=stream) == status
            messages = [{"role": "user", "content": prompt}]
            assert await post(stack, "/v1/chat/completions", messages=messages, stream=stream) == status
        assert await post(stack, "/v1/completions", prompt="x", max_tokens=-1, stream=stream) == 400
        assert await post(stack, "/tokenize", prompt="REFUSE") == 400
        stack.ring.step = 0.02
        await leave(stack, "/v1/completions", stack.ring.running, prompt="hello", max_tokens=10_000, stream=stream)
        await eventually(lambda: not left())


@pytest.mark.skipif(not hasattr(select, "POLLRDHUP"), reason="only Linux says so of what is not read")
async def test_who_leaves_is_missed_also_behind_requests_that_are_not_read(
    memory_bus: MemoryBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "LOOK_SECONDS", 0.02)
    async with gateway_stack(memory_bus) as stack:
        stack.ring.step, ring = 0.02, stack.ring
        behind = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n" * (2 * MIN_PIECE_BYTES // 32)
        await leave(stack, "/v1/completions", ring.running, behind=behind, prompt="hello", max_tokens=10_000)
        await eventually(lambda: bool(ring.cancelled))


CHAT = {"messages": [{"role": "user", "content": "SILENCE"}]}
QUESTIONS: dict[str, dict[str, Any]] = {
    "/tokenize": {"prompt": "SILENCE"},
    "/v1/completions": {"prompt": "SILENCE", "echo": True, "logprobs": 1, "max_tokens": 1},
    "/v1/completions/render": {"prompt": ["SILENCE"] * 3},
    "/v1/messages/count_tokens": CHAT,
    "/v1/responses/input_tokens": {"input": "SILENCE"},
    "/v1/chat/completions": {**CHAT, "use_beam_search": True, "n": 2},
    "/generative_scoring": {"query": "SILENCE", "items": ["SILENCE"] * 20, "label_token_ids": [1, 2]},
}
READ: dict[str, dict[str, Any]] = {"/v1/completions": {"prompt": ["SILENCE"] * 3, "max_tokens": 1}}


@pytest.mark.usefixtures("no_collections")
@pytest.mark.parametrize(
    ("questions", "encoder"),
    [(QUESTIONS, None), (READ, EncoderDecoderModel(row_size=4, rows=64, start=2))],
    ids=["all", "of prompts that an encoder reads"],
)
async def test_questions_to_a_tokenizer_are_called_off_when_their_client_leaves(
    memory_bus: MemoryBus, questions: dict[str, dict[str, Any]], encoder: EncoderDecoderModel | None
) -> None:
    ring = FakeRing(memory_bus)
    ring.encoder_decoder = encoder
    async with gateway_stack(memory_bus, ring=ring) as stack:
        for path, fields in questions.items():
            ring.held.clear()
            await leave(stack, path, ring.held, **fields)
            await eventually(lambda: {each.request for each in ring.held} <= ring.withdrawn and bool(ring.held))
        assert not ring.running
        await eventually(lambda: not left())


def test_memory_is_given_back_again_when_the_bus_has_forgotten_the_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    given_back: list[None] = []
    monkeypatch.setattr(body_budget, "give_back_freed_memory", lambda: given_back.append(None))
    budget, lease = BodyBudget(16 * MEMORY_BODY, patience=0.01), BodyLease()
    budget._grant(lease, MEMORY_BODY)
    budget.give_back_memory()
    assert len(given_back) == 0
    budget.give_back(lease, 0)
    for _ in range(body_budget.GIVE_BACK_AGAIN):
        budget.give_back_memory()
        assert len(given_back) == 1
    for _ in range(3):
        budget.give_back_memory()
    assert len(given_back) == 2
