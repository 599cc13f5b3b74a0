"""Actors of one process hand messages over; whatever others have to hear goes over the bus."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from shared import topics
from shared.bus import Undelivered
from shared.bus.local_delivery import LocalDeliveryBus, LocalReceivers
from shared.bus.memory_bus import MemoryBus
from shared.ids import Attempt, EngineId, ModelName, RequestId
from shared.messages.lifecycle import LifecycleRequest
from shared.messages.scheduler import Cancel
from tests.support.settled import settled

TOPIC = topics.engine_control(EngineId("engine-1"))
CANCELS = [Cancel(RequestId(f"r{number}"), Attempt(1)) for number in range(4)]


class Receiver:
    """An inbox with room for so many messages, and whether they are taken out."""

    def __init__(self, room: int = 100) -> None:
        self.inbox: asyncio.Queue[Any] = asyncio.Queue(room)

    def offer(self, message: Any) -> bool:
        if self.inbox.full():
            return False
        self.inbox.put_nowait(message)
        return True


async def test_a_message_is_handed_over_as_it_is_and_passes_no_bus(memory_bus: MemoryBus) -> None:
    seen: list[str] = []

    async def tapped(subject: str, payload: bytes) -> None:
        seen.append(subject)

    await memory_bus.tap(">", tapped)
    receivers, receiver = LocalReceivers([TOPIC]), Receiver()
    first, second = (LocalDeliveryBus(memory_bus.connection(), receivers) for _ in range(2))
    await first.subscribe(TOPIC, receiver.inbox.put, offer=receiver.offer)
    await second.publish(TOPIC, CANCELS[0], confirm=True)
    assert receiver.inbox.get_nowait() is CANCELS[0], "before anything else runs"
    await second.publish(topics.lifecycle_requests(), LifecycleRequest())
    await settled()
    assert seen == [topics.lifecycle_requests().subject]


async def test_others_are_heard_as_ever_and_reach_whoever_is_here(memory_bus: MemoryBus) -> None:
    receiver, other = Receiver(), Receiver()
    bus = LocalDeliveryBus(memory_bus.connection(), LocalReceivers([TOPIC]))
    await bus.subscribe(TOPIC, receiver.inbox.put, offer=receiver.offer)
    await memory_bus.connection().publish(TOPIC, CANCELS[0])
    assert await receiver.inbox.get() == CANCELS[0]
    elsewhere = topics.engine_control(EngineId("engine-2"))
    await memory_bus.connection().subscribe(elsewhere, other.inbox.put)
    await bus.publish(elsewhere, CANCELS[1])
    assert await other.inbox.get() == CANCELS[1]


async def test_nothing_overtakes_what_waits_for_a_full_inbox(memory_bus: MemoryBus) -> None:
    receiver = Receiver(room=1)
    bus = LocalDeliveryBus(memory_bus, LocalReceivers([TOPIC]))
    await bus.subscribe(TOPIC, receiver.inbox.put, offer=receiver.offer)

    async def publish() -> None:
        for cancel in CANCELS:
            await bus.publish(TOPIC, cancel)

    publishing = asyncio.create_task(publish())
    await settled()
    assert not publishing.done(), "its sender waits"
    assert [await receiver.inbox.get() for _ in CANCELS] == CANCELS


async def test_what_nobody_receives_any_more_comes_back(memory_bus: MemoryBus) -> None:
    receiver, undelivered = Receiver(), list[Any]()

    async def record(message: Undelivered) -> None:
        undelivered.append(message.message)

    bus = LocalDeliveryBus(memory_bus, LocalReceivers([TOPIC]))
    bus.on_undelivered(record)
    subscription = await bus.subscribe(TOPIC, receiver.inbox.put, offer=receiver.offer)
    await subscription.stop()
    await bus.publish(TOPIC, CANCELS[0], confirm=True)
    assert (undelivered, receiver.inbox.empty()) == ([CANCELS[0]], True)


def test_what_several_share_is_not_handed_to_one() -> None:
    with pytest.raises(ValueError, match=r"tokenize\.m"):
        LocalReceivers([topics.tokenize(ModelName("m"))])
