"""Whose lifecycles an engine hears: its own ranks', and no other engine's unless it hands requests over."""

from __future__ import annotations

import asyncio

import pytest

from services.scheduler.actor import SchedulerActor
from services.scheduler.core.limits import EngineLimits
from shared import topics
from shared.bus.memory_bus import MemoryBus
from shared.ids import EngineId, Incarnation, InstanceId, NodeId
from shared.messages.lifecycle import Lifecycle, Role, Service

OWN = {"lifecycle.worker.engine-1", "lifecycle.detokenizer.*", "lifecycle.gateway.*"}


def watched(bus: MemoryBus, role: Role, node: str | None) -> set[str]:
    at = None if node is None else NodeId(node)
    actor = SchedulerActor(bus, InstanceId("engine-1"), EngineLimits(), role=role, node=at)
    subjects = [each.topic.subject for each in actor.subscriptions()]
    return {subject for subject in subjects if subject.startswith("lifecycle.")}


@pytest.mark.parametrize(
    ("role", "node", "others"),
    [
        ("mixed", None, set[str]()),
        ("mixed", "n", {"lifecycle.kvstore.*"}),
        ("decode", "n", {"lifecycle.kvstore.*"}),
        ("prefill", "n", {"lifecycle.kvstore.*", "lifecycle.scheduler.*"}),
    ],
)
async def test_an_engine_hears_those_that_it_works_with(
    memory_bus: MemoryBus, role: Role, node: str | None, others: set[str]
) -> None:
    assert watched(memory_bus, role, node) == OWN | others


@pytest.mark.parametrize("service", [None, "worker"])
async def test_who_watches_all_ranks_hears_each_message_of_one_once(
    memory_bus: MemoryBus, service: Service | None
) -> None:
    heard: list[InstanceId] = []
    end = asyncio.Event()

    async def note(life: Lifecycle) -> None:
        heard.append(life.instance)
        if life.instance == "last":
            end.set()

    await memory_bus.subscribe(topics.lifecycles(service), note)
    await memory_bus.publish(topics.rank_lifecycles(EngineId("engine-1")), rank("some-name"))
    await memory_bus.publish(topics.lifecycle_of("worker", InstanceId("last")), rank("last"))
    async with asyncio.timeout(60):
        await end.wait()
    assert heard == ["some-name", "last"]


def rank(name: str) -> Lifecycle:
    return Lifecycle(
        service="worker",
        instance=InstanceId(name),
        incarnation=Incarnation(1),
        phase="ready",
        pid=1,
        host="h",
        started=0.0,
    )
