"""What vectors of one response may hold of a gateway's memory."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import cast

import pytest

from services.gateway.api.errors import RequestError
from services.gateway.api.response import (
    MAX_VECTOR_BYTES,
    ChoiceState,
    GenerationResponse,
    ResponseHeader,
    ResponseWriter,
)
from services.gateway.http.call import LARGE_SHARE, BodyBudget, BodyLease, Call
from services.gateway.metrics import ModelMeters
from shared.ids import RequestId

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
        lease = BodyLease()
        return cast(Call, SimpleNamespace(_limits=SimpleNamespace(budget=budget), _lease=lease))

    first, second = call(), call()
    await Call.hold_answer(first, most - 100)
    with pytest.raises(RequestError, match="bytes of bodies") as refused:
        await Call.hold_answer(second, 10**9)
    assert refused.value.status == 503
    waiting = asyncio.ensure_future(Call.hold_answer(second, 10**9))
    await asyncio.sleep(0)
    Call.close(first)
    await waiting
    assert budget.used == most
