"""The life of an actor: start, drain, undrain, stop, failure."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from typing import Any

import pytest

from shared import topics
from shared.actor import Actor, ActorRuntime, LifecycleTable, NameTaken, Tick, TopicSubscription
from shared.bus import Undelivered
from shared.bus.memory_bus import MemoryBus
from shared.ids import Attempt, EngineId, Incarnation, InstanceId, RequestId
from shared.messages.lifecycle import (
    KEEP_ALIVE_SECONDS,
    Drain,
    HeartbeatInterval,
    Lifecycle,
    LifecycleRequest,
    Phase,
    Standby,
    Undrain,
)
from shared.messages.scheduler import Cancel, Probe, ProbeReply, StopMatched
from shared.protocol import PROTOCOL
from shared.reliability.transitions import IllegalTransition

ENGINE = EngineId("engine-1")
CANCEL = Cancel(RequestId("r"), Attempt(1))


class Recorder(Actor):
    service = "scheduler"

    def __init__(self, bus: MemoryBus) -> None:
        super().__init__(bus, InstanceId("engine-1"))
        self.heard: asyncio.Queue[Any] = asyncio.Queue()
        self.idle = True
        self.phase: Phase = "ready"

    def subscriptions(self) -> Sequence[TopicSubscription[Any]]:
        return [
            TopicSubscription(topics.engine_requests(ENGINE), intake=True),
            TopicSubscription(topics.engine_control(ENGINE)),
            TopicSubscription(topics.engine_probes(ENGINE), request=True),
            TopicSubscription(topics.lifecycles("worker")),
        ]

    async def handle(self, message: Any) -> None:
        if message == StopMatched(RequestId("bug"), Attempt(1)):
            raise ZeroDivisionError("a bug")
        await self.heard.put(message)

    async def respond(self, request: Probe) -> ProbeReply:
        return ProbeReply("running", 3)

    def is_idle(self) -> bool:
        return self.idle

    def target_phase(self) -> Phase:
        return self.phase


class Stack:
    def __init__(self, bus: MemoryBus, keep_alive: float = KEEP_ALIVE_SECONDS) -> None:
        self.bus = bus
        self.actor = Recorder(bus)
        self.runtime = ActorRuntime(self.actor, drain_timeout=1.0, keep_alive=keep_alive)
        self.phases: list[Phase] = []

    async def start(self) -> None:
        await self.bus.subscribe(topics.lifecycles(), self._note)
        self.task = asyncio.create_task(self.runtime.run())
        await self.until("ready")

    async def _note(self, message: Lifecycle) -> None:
        if self.phases[-1:] != [message.phase]:
            self.phases.append(message.phase)

    async def until(self, phase: Phase) -> None:
        async with asyncio.timeout(60):
            while self.phases[-1:] != [phase]:
                await asyncio.sleep(0.005)

    async def stop(self) -> None:
        self.runtime.stop()
        async with asyncio.timeout(60):
            await self.task


@pytest.fixture
async def stack(memory_bus: MemoryBus) -> Stack:
    stack = Stack(memory_bus)
    await stack.start()
    return stack


async def test_messages_are_handled_and_questions_answered(stack: Stack) -> None:
    await stack.bus.publish(topics.engine_control(ENGINE), CANCEL)
    async with asyncio.timeout(60):
        assert await stack.actor.heard.get() == CANCEL
    reply = await stack.bus.request(topics.engine_probes(ENGINE), Probe(RequestId("r"), Attempt(1)), ProbeReply, 60)
    assert reply == ProbeReply("running", 3)
    await stack.stop()
    assert stack.phases == ["starting", "ready", "draining", "stopped"]


async def test_on_drain_the_intake_closes_and_the_rest_stays_open(stack: Stack) -> None:
    stack.actor.idle = False
    await stack.bus.publish(topics.instance_control(InstanceId("engine-1")), Drain())
    await stack.until("draining")
    await stack.bus.publish(topics.engine_control(ENGINE), CANCEL)
    async with asyncio.timeout(60):
        assert await stack.actor.heard.get() == CANCEL
    returned: asyncio.Queue[Undelivered] = asyncio.Queue()
    stack.bus.on_undelivered(returned.put)
    await stack.bus.publish(topics.engine_requests(ENGINE), None, confirm=True)  # type: ignore[arg-type]
    async with asyncio.timeout(60):
        await returned.get()
    await stack.bus.publish(topics.instance_control(InstanceId("engine-1")), Undrain())
    await stack.until("ready")
    stack.actor.idle = True
    await stack.stop()


async def test_a_stop_waits_for_work_in_hand_but_not_for_ever(stack: Stack) -> None:
    stack.actor.idle = False
    await stack.stop()
    assert stack.phases[-1] == "stopped"


class Waiting(Recorder):
    """Waits for others that never come."""

    def __init__(self, bus: MemoryBus) -> None:
        super().__init__(bus)
        self.events: list[str] = []
        self.waits = asyncio.Event()

    async def set_up(self) -> None:
        self.waits.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.events.append("left")
            raise

    async def tear_down(self) -> None:
        self.events.append("torn down")


async def test_a_set_up_that_may_be_left_does_not_hold_up_a_stop(memory_bus: MemoryBus) -> None:
    stack = Stack(memory_bus)
    stack.actor = actor = Waiting(memory_bus)
    actor.abandons_set_up = True
    stack.runtime = ActorRuntime(actor, drain_timeout=1.0)
    await memory_bus.subscribe(topics.lifecycles(), stack._note)
    stack.task = asyncio.create_task(stack.runtime.run())
    await actor.waits.wait()
    await stack.stop()
    assert (stack.phases, actor.events) == (["starting", "stopped"], ["left"])


async def test_an_actor_whose_dependency_is_missing_is_not_ready(stack: Stack) -> None:
    worker = Lifecycle(
        service="worker",
        instance=InstanceId("worker-1"),
        incarnation=Incarnation(1),
        phase="ready",
        pid=1,
        host="here",
        started=0.0,
    )
    stack.actor.phase = "starting"
    await stack.bus.publish(topics.lifecycle_of("worker", worker.instance), worker)
    await stack.until("starting")
    stack.actor.phase = "ready"
    await stack.bus.publish(topics.lifecycle_of("worker", worker.instance), worker)
    await stack.until("ready")
    await stack.stop()


async def test_processes_of_a_release_that_cannot_work_with_ours_do_not_exist_for_an_actor(
    stack: Stack, caplog: pytest.LogCaptureFixture
) -> None:
    def life(instance: str, **fields: int) -> Lifecycle:
        return Lifecycle(
            service="worker",
            instance=InstanceId(instance),
            incarnation=Incarnation(len(instance)),
            phase="ready",
            pid=1,
            host="here",
            started=0.0,
            **fields,  # type: ignore[arg-type]
        )

    for message in (
        life("too-new", min_protocol=98, protocol=99),
        life("too-new", min_protocol=98, protocol=99),
        life("other-blocks", protocol=PROTOCOL, block_size=64),
        life("newer-but-fine", min_protocol=PROTOCOL, protocol=99, block_size=16),
    ):
        await stack.bus.publish(topics.lifecycle_of("worker", message.instance), message)
    async with asyncio.timeout(60):
        assert (await stack.actor.heard.get()).instance == "newer-but-fine"
    refused = [record for record in caplog.records if record.message == "incompatible process"]
    reasons = [record.reason for record in refused]  # type: ignore[attr-defined]
    assert len(reasons) == 2
    assert "its release is too new" in reasons[0]
    assert reasons[1] == (
        "its KV blocks have 64 tokens, those here 16: --block-size must be the same in all of a stack"
    )
    await stack.stop()


async def test_a_bug_ends_the_process_and_is_said_on_the_bus(stack: Stack) -> None:
    await stack.bus.publish(topics.engine_control(ENGINE), StopMatched(RequestId("bug"), Attempt(1)))
    with pytest.raises(ExceptionGroup) as error:
        async with asyncio.timeout(60):
            await stack.task
    assert error.group_contains(ZeroDivisionError)
    await stack.until("failed")


async def test_ticks_arrive_as_messages(memory_bus: MemoryBus) -> None:
    class Ticking(Recorder):
        tick_every = 0.01

    stack = Stack(memory_bus)
    stack.actor = Ticking(memory_bus)
    stack.runtime = ActorRuntime(stack.actor)
    await stack.start()
    async with asyncio.timeout(60):
        first, second = await stack.actor.heard.get(), await stack.actor.heard.get()
    assert isinstance(first, Tick)
    assert isinstance(second, Tick)
    assert second.now > first.now
    await stack.stop()


def test_an_illegal_phase_is_refused_with_its_history() -> None:
    table = LifecycleTable()
    assert table.move("ready")
    assert not table.move("ready")
    table.move("stopped")
    with pytest.raises(IllegalTransition, match="starting → ready → stopped → ready"):
        table.move("ready")


async def test_a_name_that_another_process_has_is_refused_before_anybody_hears_of_it(stack: Stack) -> None:
    heard: list[Lifecycle] = []

    async def note(message: Lifecycle) -> None:
        heard.append(message)

    await stack.bus.subscribe(topics.lifecycles(), note)
    second = ActorRuntime(Recorder(stack.bus), drain_timeout=1.0)
    with pytest.raises(NameTaken, match=f"engine-1: process {os.getpid()} on "):
        await second.run()
    assert {message.incarnation for message in heard} <= {stack.runtime.incarnation}
    await stack.stop()
    successor = Stack(stack.bus)
    await successor.start()
    await successor.stop()


async def test_a_standby_loads_and_takes_no_requests_before_it_is_promoted(memory_bus: MemoryBus) -> None:
    stack = Stack(memory_bus)
    stack.actor.standby = True
    stack.runtime = ActorRuntime(stack.actor, drain_timeout=1.0)
    control, returned = topics.instance_control(InstanceId("engine-1")), asyncio.Queue[Undelivered]()
    await memory_bus.subscribe(topics.lifecycles(), stack._note)
    stack.task = asyncio.create_task(stack.runtime.run())
    await stack.until("draining")
    assert stack.phases == ["starting", "draining"], "never ready"
    assert stack.runtime._lifecycle().is_standby
    assert stack.runtime._lifecycle().shown_phase == "standby"
    memory_bus.on_undelivered(returned.put)
    await memory_bus.publish(topics.engine_requests(ENGINE), None, confirm=True)  # type: ignore[arg-type]
    async with asyncio.timeout(60):
        await returned.get()
    await memory_bus.publish(control, Undrain())
    await stack.until("ready")
    assert not stack.runtime._lifecycle().standby
    await memory_bus.publish(control, Standby())
    await stack.until("draining")
    assert stack.runtime._lifecycle().is_standby
    await memory_bus.publish(control, Drain())
    async with asyncio.timeout(60):
        while stack.runtime._lifecycle().standby:
            await asyncio.sleep(0.005)
    assert stack.runtime.phase == "draining", "drained, as any other"
    await stack.stop()


async def test_a_process_that_does_not_change_is_heard_of_when_somebody_asks(memory_bus: MemoryBus) -> None:
    stack = Stack(memory_bus, keep_alive=30.0)
    await stack.start()
    heard: asyncio.Queue[Lifecycle] = asyncio.Queue()
    await stack.bus.subscribe(topics.lifecycles("scheduler"), heard.put)
    await stack.bus.publish(topics.lifecycle_requests(), LifecycleRequest())
    async with asyncio.timeout(60):
        life = await heard.get()
    assert (life.phase, life.keep_alive) == ("ready", 30.0)
    await stack.stop()
    while (life := heard.get_nowait()).phase != "draining":
        assert life.phase == "ready", "it may have been asked by itself"


async def test_who_listens_asks_for_what_was_said_before(memory_bus: MemoryBus) -> None:
    asked: asyncio.Queue[LifecycleRequest] = asyncio.Queue()
    await memory_bus.subscribe(topics.lifecycle_requests(), asked.put)
    stack = Stack(memory_bus)
    await stack.start()
    async with asyncio.timeout(60):
        assert await asked.get() == LifecycleRequest()
    await stack.stop()


async def test_a_process_follows_the_pace_of_its_fleet(memory_bus: MemoryBus) -> None:
    stack = Stack(memory_bus)
    heard: asyncio.Queue[Lifecycle] = asyncio.Queue()
    await stack.bus.subscribe(topics.lifecycles("scheduler"), heard.put)
    await stack.start()
    await stack.bus.publish(topics.heartbeat_interval(), HeartbeatInterval(20.0))
    async with asyncio.timeout(60):
        while (await heard.get()).keep_alive != 20.0:
            pass
    await stack.stop()
