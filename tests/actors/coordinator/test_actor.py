"""A coordinator on the in-memory bus: what it hears, what it sends and in which order, how it ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from msgspec.structs import replace

from services.coordinator import metrics
from services.coordinator.actor import CoordinatorActor
from services.coordinator.config import CoordinatorConfig
from services.coordinator.core.fleet_heartbeat import REPEAT_SECONDS
from services.coordinator.core.outliers import MIN_FAILURES
from shared import topics
from shared.actor import ActorRuntime, Tick
from shared.bus.codec import encode
from shared.bus.memory_bus import MemoryBus
from shared.ids import Attempt, EngineId, InstanceId, RequestId
from shared.messages.coordinator import Withdraw
from shared.messages.gateway import RequestFailed, RequestPlaced, RequestQueued, RequestRejected
from shared.messages.kv_events import KV_EVENT_SECONDS
from shared.messages.lifecycle import (
    Drain,
    EngineHealth,
    HeartbeatInterval,
    Lifecycle,
    StepTimeFit,
    StepTimesReport,
)
from shared.messages.scheduler import Cancel, GenerateRequest, OutlierReport
from tests.support.engines.coordinator_events import GATEWAY, MODEL, detokenizer, engine, route

ENGINE = EngineId("a")


class World:
    """One coordinator, and a record of all that it sends."""

    def __init__(self, bus: MemoryBus, config: CoordinatorConfig, name: str = "coordinator-1") -> None:
        self.bus = bus
        bus.liveness_now = lambda: 0.0  # type: ignore[method-assign]  # nobody falls silent, however slow the machine
        self.actor = CoordinatorActor(bus, InstanceId(name), config)
        self.runtime = ActorRuntime(self.actor, drain_timeout=1.0)
        self.sent: list[Any] = []
        self.news = asyncio.Event()

    async def start(self, *, gateway: bool = True, engine_listens: bool = True) -> None:
        if gateway:
            await self.bus.subscribe(topics.gateway_inbox(GATEWAY), self._note)
        if engine_listens:
            await self.bus.subscribe(topics.engine_requests(ENGINE), self._note)
        await self.bus.subscribe(topics.engine_control(ENGINE), self._note)
        self.task = asyncio.create_task(self.runtime.run())
        await self.until(lambda: self.runtime.phase == "ready")

    async def _note(self, message: Any) -> None:
        self.sent.append(message)

    async def until(self, condition: Any) -> None:
        async with asyncio.timeout(60):
            while not condition():
                await asyncio.sleep(0.002)

    async def hear(self, *lives: Lifecycle) -> None:
        for life in lives:
            await self.bus.publish(topics.lifecycle_of(life.service, life.instance), life)

    async def got(self, *kinds: type) -> list[Any]:
        """What was sent, once it is of exactly these kinds."""
        await self.until(lambda: len(self.sent) >= len(kinds))
        assert [type(m) for m in self.sent] == list(kinds)
        return self.sent

    async def stop(self) -> None:
        self.runtime.stop()
        async with asyncio.timeout(60):
            await self.task


@pytest.fixture
async def world(memory_bus: MemoryBus, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    monkeypatch.setattr("services.coordinator.core.coordinator.RENEW_SECONDS", 60.0)
    world = World(memory_bus, CoordinatorConfig(queue_limit=2))
    yield world
    if not world.task.done():
        await world.stop()


async def test_a_request_reaches_the_engine_before_its_gateway_hears_of_it(world: World) -> None:
    await world.start()
    await world.hear(engine("a"), detokenizer())
    await world.bus.publish(topics.route(), route("r"))
    generate, placed = await world.got(GenerateRequest, RequestPlaced)
    assert generate.generation == route("r").generation
    assert placed == RequestPlaced(RequestId("r"), Attempt(1), ENGINE, generate.detokenizer)


async def test_a_waiting_request_is_placed_when_a_report_shows_room(world: World) -> None:
    await world.start()
    await world.hear(engine("a", waiting=8), detokenizer())
    await world.bus.publish(topics.route(), route("r"))
    await world.got(RequestQueued)
    assert world.actor.load() == 1
    await world.hear(engine("a"))
    await world.got(RequestQueued, GenerateRequest, RequestPlaced)
    assert world.actor.is_idle()


async def test_a_withdrawn_request_is_never_placed(world: World) -> None:
    await world.start()
    await world.hear(engine("a", waiting=8), detokenizer())
    await world.bus.publish(topics.route(), route("r"))
    await world.got(RequestQueued)
    await world.bus.publish(topics.withdrawals(), Withdraw(RequestId("r"), Attempt(1)))
    await world.until(world.actor.is_idle)
    await world.hear(engine("a"))
    await world.bus.publish(topics.route(), route("s"))
    _, generate, _ = await world.got(RequestQueued, GenerateRequest, RequestPlaced)
    assert generate.generation.request == "s"


async def test_a_request_that_is_withdrawn_after_it_was_placed_is_cancelled_at_its_engine(world: World) -> None:
    await world.start()
    await world.hear(engine("a"), detokenizer())
    await world.bus.publish(topics.route(), route("r"))
    await world.got(GenerateRequest, RequestPlaced)
    await world.bus.publish(topics.withdrawals(), Withdraw(RequestId("r"), Attempt(1)))
    *_, cancel = await world.got(GenerateRequest, RequestPlaced, Cancel)
    assert cancel == Cancel(RequestId("r"), Attempt(1))


async def test_an_engine_without_subscriber_loses_its_request_to_another(world: World) -> None:
    await world.start(engine_listens=False)
    await world.hear(engine("a"), engine("b", waiting=3), detokenizer())
    await world.bus.subscribe(topics.engine_requests(EngineId("b")), world._note)
    await world.bus.publish(topics.route(), route("r"))
    await world.until(lambda: len(world.sent) == 3)
    assert [m.engine for m in world.sent if isinstance(m, RequestPlaced)] == ["a", "b"]
    assert [m.generation.request for m in world.sent if isinstance(m, GenerateRequest)] == ["r"]


async def test_when_the_gateway_is_gone_its_request_is_cancelled_at_the_engine(world: World) -> None:
    await world.start(gateway=False)
    await world.hear(engine("a"), detokenizer())
    await world.bus.publish(topics.route(), route("r"))
    _, cancel = await world.got(GenerateRequest, Cancel)
    assert cancel == Cancel(RequestId("r"), Attempt(1))


async def test_a_message_too_large_for_the_bus_is_said_by_name() -> None:
    large = route("r", prompt=480)
    bus = MemoryBus(max_payload=len(encode(large)))  # the placement makes it a little larger
    world = World(bus, CoordinatorConfig())
    await world.start()
    await world.hear(engine("a", max_model_len=4096), detokenizer())
    await world.bus.publish(topics.route(), large)
    (rejected,) = await world.got(RequestRejected)
    assert rejected.kind == "too_large"
    assert str(bus.max_payload) in rejected.message
    await world.stop()
    await bus.close()


async def test_how_slow_engines_are_is_a_metric(world: World) -> None:
    await world.start()
    compares = world.actor.core.fleet
    async with asyncio.timeout(60):
        while not compares.slowdowns:
            for name, seconds in (("a", 0.01), ("b", 0.01), ("slow", 0.02)):
                times = StepTimesReport(decodes=StepTimeFit(8.0, 80.0, seconds, 0.0, 0.0))
                await world.hear(engine(name, step_times=times))
            await asyncio.sleep(0.05)
    shown = {sample.labels["kind"]: sample.value for sample in metrics.PACE.collect()[0].samples}
    assert shown == {"prefill": 1, "decode": 2}
    await world.stop()
    metrics.show_slowdowns({})


async def test_a_stopped_coordinator_fails_the_requests_that_wait(world: World) -> None:
    await world.start()
    await world.hear(engine("a", waiting=8), detokenizer())
    await world.bus.publish(topics.route(), route("r"))
    await world.got(RequestQueued)
    await world.stop()
    _, failed = await world.got(RequestQueued, RequestFailed)
    assert (failed.request, failed.attempt) == ("r", 1)


async def test_a_drained_coordinator_takes_no_more_and_empties_its_queue(world: World) -> None:
    await world.start()
    await world.hear(engine("a", waiting=8), detokenizer())
    await world.bus.publish(topics.route(), route("r"))
    await world.got(RequestQueued)
    await world.bus.publish(topics.instance_control(InstanceId("coordinator-1")), Drain())
    await world.until(lambda: world.runtime.phase == "draining")
    await world.bus.publish(topics.route(), route("unheard"))
    await world.hear(engine("a"))
    _, generate, _ = await world.got(RequestQueued, GenerateRequest, RequestPlaced)
    assert generate.generation.request == "r"


async def test_of_two_coordinators_the_drained_one_hands_its_queue_over(world: World) -> None:
    other = World(world.bus, CoordinatorConfig(queue_limit=2), "coordinator-2")
    await world.start()
    await world.hear(engine("a", waiting=8), detokenizer())
    await world.bus.publish(topics.route(), route("r"))
    await world.got(RequestQueued)
    other.task = asyncio.create_task(other.runtime.run())
    await other.until(lambda: world.actor.core.fleet.peers)
    await world.hear(engine("a", waiting=8), detokenizer())
    await world.bus.publish(topics.instance_control(InstanceId("coordinator-1")), Drain())
    await world.until(lambda: other.actor.load() == 1)
    assert world.actor.load() == 0
    await world.hear(engine("a"))
    await world.got(RequestQueued, RequestQueued, GenerateRequest, RequestPlaced)
    await other.stop()


async def test_of_two_coordinators_each_hears_what_the_other_has_placed(world: World) -> None:
    other = World(world.bus, CoordinatorConfig(), "coordinator-2")
    await world.start()
    other.task = asyncio.create_task(other.runtime.run())
    worlds = (world, other)
    for each in worlds:
        await each.until(lambda: each.actor.core.fleet.peers)  # noqa: B023
    await world.hear(engine("a"), detokenizer())

    def in_hand() -> list[int]:
        candidates = [each.actor.core.fleet.decode_candidates(route("x").generation) for each in worlds]
        return [candidate.reserved.requests for (candidate,) in candidates]

    for each in worlds:
        await each.until(lambda: each.actor.core.fleet.ready(MODEL))  # noqa: B023
    await world.bus.publish(topics.route(), route("r"))
    await world.got(GenerateRequest, RequestPlaced)
    await world.until(lambda: in_hand() == [1, 1])
    await other.stop()


async def test_garbage_on_every_subject_harms_nobody(world: World) -> None:
    await world.start()
    await world.hear(engine("a"), detokenizer())
    for subject in ("route", "withdraw", "placements", "lifecycle.scheduler.a", "instance.coordinator-1.control"):
        for garbage in (b"", b"\xc1", b"\x93\x01", b'{"a":1}', bytes(range(256))):
            await world.bus.publish_raw(subject, garbage)
    await world.bus.publish(topics.route(), route("r"))
    await world.got(GenerateRequest, RequestPlaced)


async def test_an_engine_on_which_requests_keep_failing_is_told_so(world: World) -> None:
    await world.start()
    await world.bus.subscribe(topics.engine_requests(EngineId("b")), world._note)
    for life in (engine("a", max_running=64, blocks_used=0), engine("b", blocks_used=90)):
        assert life.engine is not None
        await world.hear(replace(life, engine=replace(life.engine, health=EngineHealth())))
    await world.hear(detokenizer())
    for number in range(MIN_FAILURES):
        await world.bus.publish(topics.route(), route(f"r{number}"))
        await world.until(lambda number=number: len(placed(world)) == number + 1)
        assert placed(world)[-1] == ENGINE, "it is the cheapest, as it fails what it gets"
        await world.bus.publish(topics.withdrawals(), Withdraw(RequestId(f"r{number}"), Attempt(1)))
        await world.bus.publish(topics.route(), route(f"r{number}", attempt=2, avoid=("a",), max_tokens=100))
    await world.until(lambda: any(isinstance(message, OutlierReport) for message in world.sent))
    await world.bus.publish(topics.route(), route("after"))
    await world.until(lambda: placed(world)[-1] == "b")


def placed(world: World) -> list[str]:
    return [message.engine for message in world.sent if isinstance(message, RequestPlaced)]


async def test_a_large_fleet_is_told_to_say_less_often_how_it_is(memory_bus: MemoryBus) -> None:
    world = World(memory_bus, CoordinatorConfig(lifecycle_budget=2.0))
    now = 0.0
    memory_bus.liveness_now = lambda: now  # type: ignore[method-assign]
    await memory_bus.subscribe(topics.heartbeat_interval(), world._note)
    await world.start()
    await world.hear(*(replace(engine(f"engine-{number}"), keep_alive=30.0) for number in range(7)))
    await world.until(lambda: len(list(world.actor.core.fleet.registry.all("scheduler"))) == 7)
    await world.actor.handle(Tick(now, now))
    now = REPEAT_SECONDS
    await world.actor.handle(Tick(now, now))
    await world.until(lambda: HeartbeatInterval(4.0, KV_EVENT_SECONDS) in world.sent)
    await world.stop()
