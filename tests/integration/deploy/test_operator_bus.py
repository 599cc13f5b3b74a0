"""What operators ask is asked again where nobody answers, as the host that got the question may be gone."""

from __future__ import annotations

import asyncio
import time

import nats
import pytest
from nats.aio.msg import Msg

from deploy.supervisor import operator_bus
from shared.bus import Bus, NoResponders, ReplyTimeout
from shared.bus.nats_connection import NatsOptions, connect
from tests.support.cluster.nats_server import NatsServer

SUBJECT = "admin.anything"


async def _is_there(bus: Bus) -> bool:
    """Whether somebody hears a question, though nobody answers it."""
    try:
        await bus.request_raw(SUBJECT, b"", 0.2)
    except ReplyTimeout:
        return True
    except NoResponders:
        return False
    raise AssertionError("nobody answers the first question")


async def test_a_question_that_got_lost_is_asked_again(own_nats: NatsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operator_bus, "ASK_AGAIN", 0.2)
    asked: list[bytes] = []

    async def heard(message: Msg) -> None:
        asked.append(message.data)
        if len(asked) == 3:
            await message.respond(b"the answer")

    service = await nats.connect(own_nats.url)
    bus = await connect(NatsOptions(servers=(own_nats.url,)))
    try:
        await service.subscribe(f"*.{SUBJECT}", cb=heard)
        await service.flush()
        while not await _is_there(bus):  # on a busy machine the server once said that nobody was
            await asyncio.sleep(0.05)
        asked.clear()
        assert await operator_bus.first_answer(bus, SUBJECT, b"well?") == b"the answer"
        assert asked == [b"well?"] * 3
        monkeypatch.setattr(operator_bus, "ANSWER_TIMEOUT", 0.5)
        begun = time.monotonic()
        with pytest.raises(ReplyTimeout):
            await operator_bus.first_answer(bus, SUBJECT, b"nobody?")
        assert time.monotonic() - begun >= 0.5
        with pytest.raises(NoResponders):
            await operator_bus.first_answer(bus, "admin.nothing", b"")
    finally:
        await bus.close()
        await service.close()
