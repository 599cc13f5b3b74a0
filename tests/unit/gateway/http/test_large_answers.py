"""What one response may hold of a gateway's memory, and for how long of its event loop."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from services.gateway.api.encoding.lazy_json import LazyArray, LazyEncoder
from services.gateway.api.errors import RequestError
from services.gateway.api.logprobs import EncodedEcho, by_text, echoed_logprobs
from services.gateway.api.response import (
    MAX_VECTOR_BYTES,
    ChoiceState,
    GenerationResponse,
    ResponseHeader,
    ResponseWriter,
)
from services.gateway.api.responses import written_items
from services.gateway.api.sglang.answer import answer
from services.gateway.api.sglang.request import SglangAnswerOptions
from services.gateway.core.api_keys import KeyName
from services.gateway.http import generation
from services.gateway.http.bodies.body_budget import (
    KEY_SHARE,
    LARGE_SHARE,
    MAX_WAITING,
    BodyBudget,
    BodyLease,
    BodyLimits,
)
from services.gateway.http.call import EXTENSION, Call
from services.gateway.metrics import ModelMeters
from shared.ids import RequestId
from shared.messages.gateway import LogprobText, PositionLogprobs

VECTOR = bytes(2**20)


async def test_a_response_fails_with_the_vector_that_is_too_much() -> None:
    choices = {
        RequestId(f"r-{number}"): ChoiceState(number, 0) for number in range(MAX_VECTOR_BYTES // len(VECTOR) + 1)
    }
    response = GenerationResponse(
        ResponseHeader("pooling", "pool-1", 17, "m", "input"), choices, ResponseWriter(), ModelMeters(), 0.0
    )
    *fitting, last = choices.values()
    for choice in fitting:
        response.record_vector(choice, VECTOR)
    assert response.error is None
    response.record_vector(last, b"1234")
    assert response.ended.result() == "failed"
    assert response.error is not None
    assert (response.error.status, response.error.param) == (400, "input")


async def test_answers_wait_for_room_and_the_largest_until_they_are_alone() -> None:
    budget = BodyBudget(1000 * 2**10, patience=0.01)
    most = int(budget.limit * LARGE_SHARE)

    def call() -> Call:
        limits = BodyLimits(2**20, 2**20, 1.0, 1.0, budget)
        return Call({"headers": [], "extensions": {EXTENSION: None}}, cast(Any, None), cast(Any, None), limits)

    first, second = call(), call()
    await first.hold(most - 100)
    with pytest.raises(RequestError, match="bytes of bodies") as refused:
        await second.hold(10**9)
    assert refused.value.status == 503
    waiting = asyncio.ensure_future(second.hold(10**9))
    await asyncio.sleep(0)
    first.close()
    await waiting
    assert budget.used == most


async def test_who_would_wait_for_each_other_is_refused_at_once() -> None:
    budget, first, second, other = BodyBudget(1000 * 2**10, patience=60.0), BodyLease(), BodyLease(), BodyLease()
    for lease in (first, second):
        await budget.take(lease, 300 * 2**10)
    waiting = asyncio.ensure_future(budget.take(first, 600 * 2**10))
    await asyncio.sleep(0)
    with pytest.raises(RequestError, match="bytes of bodies"):
        await budget.take(second, 600 * 2**10)
    assert not waiting.done()
    await budget.take(second, 350 * 2**10)  # what there is room for goes on, though others wait
    budget.give_back(second, 0)
    await waiting
    with pytest.raises(TimeoutError):  # who holds nothing is in nobody's way
        await asyncio.wait_for(budget.take(other, 300 * 2**10), 0.01)
    assert budget.used == first.held == 600 * 2**10


async def test_an_answer_is_held_until_it_is_read_or_its_client_is_too_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.gateway.http.call.MIN_RATE", 2**60)
    budget, sent, unread = BodyBudget(2**24, patience=0.01), list[Any](), asyncio.Event()

    async def send(message: Any) -> None:
        if sent and sent[-1].get("body"):
            await unread.wait()  # as uvicorn does while the transport has more than its high-water mark
        sent.append(message)

    aborted = list[bool]()
    connection = SimpleNamespace(abort=lambda: aborted.append(True))
    scope = {"headers": [], "extensions": {EXTENSION: connection}}
    for timeout, read, history in ((60.0, True, None), (0.01, False, None), (60.0, True, 0), (60.0, True, 2**10)):
        sent.clear()
        limits = BodyLimits(2**20, 2**20, timeout, timeout, budget)
        call = Call(scope, cast(Any, None), send, limits)
        if history is None:
            await call.hold(2**20)
        else:  # whoever answers: it is counted, beside what was read for it
            await call.hold(history, answers=False)
        answering = asyncio.ensure_future(call.respond(bytes(2**20)))
        await asyncio.sleep(0)
        assert not answering.done()
        assert budget.used == 2**20 + (history or 0)
        if read:
            unread.set()
        await answering
        call.close()
        assert (aborted, len(sent)) == (([], 3) if read else ([True], 2))
        aborted.clear()
        unread.clear()


async def test_items_that_are_listed_are_read_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(written_items, "TURN_SECONDS", 0.0)
    reading = asyncio.ensure_future(
        written_items.written_items(json.dumps([{"id": str(i)} for i in range(9)]).encode())
    )
    turns = 0
    while not reading.done():
        turns += 1
        await asyncio.sleep(0)
    assert [item.id for item in reading.result()] == [str(i) for i in range(9)]
    assert turns >= 9


async def test_log_probabilities_of_one_choice_are_made_in_turns() -> None:
    positions = [PositionLogprobs(text(n), (text(n), text(n + 1))) for n in range(5)]
    choice = ChoiceState(0, 0, logprobs=positions, prompt_logprobs=positions[1:], echo_first_token="t0", prompt_ids=[0])
    options = SglangAnswerOptions(batch=False, rid=None, logprobs=True, top=2, texts=True, prompt_from=1)
    header = ResponseHeader("sglang", "sglang-1", 17, "m")
    lazy = answer(choice, header, options, began=0.0, now=0.0, array=LazyArray)
    assert sum(isinstance(each, LazyArray) for each in lazy["meta_info"].values()) == 4
    whole = answer(choice, header, options, began=0.0, now=0.0)
    assert json.loads(await LazyEncoder().encode(lazy)) == whole
    echo = EncodedEcho(by_text, 1)
    for position in positions[1:]:
        echo.extend([position])
    asked: tuple[str, int, list[PositionLogprobs]] = ("t0", 0, positions[1:])
    encoded = await LazyEncoder().encode(echoed_logprobs(*asked, by_text, 1, echo).body())
    assert json.loads(encoded) == echoed_logprobs(*asked, by_text, 1).body()


def text(token: int) -> LogprobText:
    return LogprobText(f"t{token}", b"t", -0.5 * token, token)


async def test_one_key_has_a_share_of_what_bodies_may_hold_and_of_the_places_to_wait() -> None:
    budget, kib = BodyBudget(1000 * 2**10, patience=60.0), 2**10
    first, second, third = (BodyLease(key=KeyName("mine")) for _ in range(3))
    other, nobody = BodyLease(key=KeyName("other")), BodyLease()
    for lease in (first, second):
        await budget.take(lease, 200 * kib)
    waiting = asyncio.ensure_future(budget.take(first, 400 * kib))
    await asyncio.sleep(0)
    assert not waiting.done(), "562 KiB are its key's share"
    await budget.take(other, 80 * kib)  # others go on past what waits for its own key
    await budget.take(nobody, 80 * kib)
    with pytest.raises(RequestError, match="of this API key hold") as refused:  # or both would wait for each other
        await budget.take(second, 400 * kib)
    assert refused.value.status == 503
    many = [asyncio.ensure_future(budget.take(BodyLease(key=KeyName("mine")), 300 * kib)) for _ in range(MAX_WAITING)]
    await asyncio.sleep(0)
    assert sum(not each.done() for each in many) == int(MAX_WAITING * KEY_SHARE) - 1, "others may still wait"
    for each in many:
        each.cancel()
    await asyncio.gather(*many, return_exceptions=True)
    budget.give_back(second, 0)
    await waiting
    budget.give_back(first, 0)
    await budget.take(third, int(budget.limit * LARGE_SHARE) - 160 * kib)  # one alone may be larger than the share
    assert budget.used == int(budget.limit * LARGE_SHARE)


async def test_what_was_said_of_an_echoed_prompt_is_freed_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation, "FREED_AT_ONCE", 2)
    choice, encoded = ChoiceState(0, 0), EncodedEcho(by_text, 1)
    choice.encoded_echo = encoded
    position = PositionLogprobs(LogprobText("a", b"a", -1.0, 1), [], 1)
    choice.prompt_logprobs, encoded.entries = [position] * 9, [msgspec.Raw(b"{}")] * 9

    async def answered() -> None:
        async with generation.freed_in_turns([choice]):
            raise RequestError(400, "refused")

    answering, turns = asyncio.ensure_future(answered()), 0
    while not answering.done():
        turns += 1
        await asyncio.sleep(0)
    assert isinstance(answering.exception(), RequestError)
    assert not choice.prompt_logprobs
    assert not encoded.entries
    assert turns >= 10
