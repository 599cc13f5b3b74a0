"""The simulation beside the real actors: a coordinator's and schedulers', on an in-memory bus and a virtual clock.

What differs is that the actors' messages take no time but the workers', and that their heartbeats have other phases.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import defaultdict
from random import Random
from typing import Any

import pytest

from deploy.simulation.hops import HopDelays
from deploy.simulation.prompts import PromptSegment, SimRequest, generation_of
from services.coordinator.actor import CoordinatorActor
from services.coordinator.config import CoordinatorConfig, Policy
from services.scheduler.actor import SchedulerActor
from services.scheduler.core.limits import EngineLimits
from services.worker.sim.backend import SimBackend
from shared import topics
from shared.actor import Actor, ActorRuntime, TopicSubscription
from shared.bus import Bus
from shared.bus.memory_bus import MemoryBus
from shared.ids import DetokenizerId, EngineId, GatewayId, Incarnation, InstanceId
from shared.messages.coordinator import Route
from shared.messages.detokenizer import TokenBatch
from shared.messages.gateway import RequestPlaced
from shared.messages.lifecycle import Lifecycle, WorkerReport
from shared.messages.scheduler import StepFinished, StepTiming
from shared.messages.worker import StepPlan
from shared.topics import Topic
from tests.support.engines.simulated_fleet import CARD, FixedLoad, make_kit, run
from tests.support.virtual_time import VirtualTimeLoop

SOON = 1e-6
HOPS = HopDelays(request=SOON, place=SOON, tokens=SOON, report=SOON)
TOLERANCE = 0.002
"""Seconds by which a token may come at another time: timers of the actors are as coarse as a millisecond."""
WARM_UP = 5.0
"""Seconds in which the actors find each other."""


class VirtualWorker(Actor):
    """A rank with the simulated device, which sleeps on the loop's clock."""

    service = "worker"

    def __init__(self, bus: Bus, engine: EngineId, device: SimBackend) -> None:
        super().__init__(bus, InstanceId(f"{engine}-rank0"))
        self._engine, self._device = engine, device
        self._busy_until = 0.0
        self._epoch: Incarnation | None = None
        self._received = self._published = 0

    def subscriptions(self) -> list[TopicSubscription[Any]]:
        return [TopicSubscription(topics.engine_steps(self._engine))]

    def lifecycle_topic(self) -> Topic[Lifecycle]:
        return topics.rank_lifecycles(self._engine)

    def worker_report(self) -> WorkerReport:
        blocks, card = self._device.num_blocks, self._device.card
        return WorkerReport(
            engine=self._engine,
            rank=0,
            world_size=1,
            model=card,
            num_blocks=blocks,
            device="sim",
            epoch=self._epoch,
            received=self._received,
            published=self._published,
        )

    async def handle(self, message: StepPlan) -> None:
        loop = asyncio.get_running_loop()
        self._epoch, self._received = message.epoch, message.step + 1
        output = self._device.compute(message)
        begins = max(loop.time() + HOPS.plan, self._busy_until)
        self._busy_until = begins + output.timing.forward
        timing = StepTiming(wait=0.0, prepare=0.0, forward=output.timing.forward, sample=0.0)
        result = StepFinished(epoch=message.epoch, step=message.step, sampled=output.sampled, timing=timing)
        loop.call_at(self._busy_until + HOPS.result, asyncio.ensure_future, self._publish(result))

    async def _publish(self, result: StepFinished) -> None:
        self._published = result.step + 1
        await self.bus.publish(topics.engine_results(self._engine), result)


class VirtualDetokenizer(Actor):
    """Takes notes of when tokens came."""

    service = "detokenizer"

    def __init__(self, bus: Bus) -> None:
        super().__init__(bus, InstanceId("detokenizer-1"))
        self.times: defaultdict[str, list[float]] = defaultdict(list)
        self.cached: dict[str, int] = {}

    def subscriptions(self) -> list[TopicSubscription[Any]]:
        return [TopicSubscription(topics.detokenizer_tokens(DetokenizerId(self.instance)))]

    async def handle(self, message: TokenBatch) -> None:
        now = asyncio.get_running_loop().time()
        for opened in message.opened:
            self.cached[opened.request] = opened.cached_tokens
        for entry in message.entries:
            self.times[entry.request] += [now] * len(entry.tokens)


class ActorRun:
    """The load on real actors: when each token came, and where each request was placed."""

    def __init__(self, load: FixedLoad, policy: Policy, engines: int) -> None:
        self._load, self._policy, self._engines = load, policy, engines
        self.placed: dict[str, str] = {}

    async def run(self) -> VirtualDetokenizer:
        loop = asyncio.get_running_loop()
        bus = MemoryBus(liveness=loop.time)
        kit = make_kit(LIMITS)
        detokenizer = VirtualDetokenizer(bus.connection())
        config = CoordinatorConfig(router_policy=self._policy)
        actors: list[Actor] = [
            detokenizer,
            CoordinatorActor(bus.connection(), InstanceId("coordinator-1"), config, clock=loop.time),
        ]
        for number in range(self._engines):
            engine = EngineId(f"engine-{number + 1}")
            actors.append(SchedulerActor(bus.connection(), InstanceId(engine), kit.limits))
            actors.append(VirtualWorker(bus.connection(), engine, kit.device.another()))
        await bus.subscribe(topics.gateway_inbox(GatewayId("gateway-1")), self._note)
        runtimes = [ActorRuntime(actor, drain_timeout=1.0) for actor in actors]
        async with asyncio.TaskGroup() as tasks:
            for runtime in runtimes:
                tasks.create_task(runtime.run())
            await self._send(bus, detokenizer)
            for runtime in runtimes:
                runtime.stop()
        return detokenizer

    async def _send(self, bus: MemoryBus, detokenizer: VirtualDetokenizer) -> None:
        loop = asyncio.get_running_loop()
        for request in self._load.given:
            await asyncio.sleep(WARM_UP + request.at - loop.time())
            await bus.publish(topics.route(), Route(generation_of(request, CARD.name, request.at)))
        async with asyncio.timeout(60):
            while any(len(detokenizer.times[each.id]) < each.output_tokens for each in self._load.given):
                await asyncio.sleep(0.1)

    async def _note(self, message: object) -> None:
        if isinstance(message, RequestPlaced):
            self.placed[message.request] = message.engine


LIMITS = EngineLimits(max_running=16, run_ahead=2)


def small_load(seed: int) -> FixedLoad:
    """Two users in three share one of four beginnings; times are apart by more than the tolerance."""
    random, at, given = Random(seed), 0.0, []
    for number in range(40):
        at += 0.011 + random.expovariate(20)
        shared = (PromptSegment(random.randrange(4), 256),) if random.random() < 0.67 else ()
        own = PromptSegment(100 + number, random.randrange(20, 300))
        given.append(SimRequest(number, at, (*shared, own), random.randrange(5, 60)))
    return FixedLoad(tuple(given))


@pytest.mark.parametrize(("engines", "policy"), [(1, "kv"), (3, "round-robin")])
def test_actors_on_a_virtual_clock_and_the_simulation_agree_token_by_token(engines: int, policy: Policy) -> None:
    load, actors = small_load(3), None
    actors = ActorRun(load, policy, engines)
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        seen = runner.run(actors.run())
    simulated = run(load, engines=engines, routing=CoordinatorConfig(router_policy=policy), limits=LIMITS, hops=HOPS)

    assert {sent.request.id: sent.engine for sent in simulated.sent} == actors.placed
    for sent in simulated.sent:
        record = simulated.records[sent.request.id]
        real = [time - WARM_UP for time in seen.times[sent.request.id]]
        assert len(real) == record.output_tokens == sent.request.output_tokens
        assert record.cached_tokens == seen.cached[sent.request.id]
        assert real == pytest.approx(list(record.token_times), abs=TOLERANCE), sent
        gaps = [later - earlier for earlier, later in itertools.pairwise(real)]
        ours = [later - earlier for earlier, later in itertools.pairwise(record.token_times)]
        assert gaps == pytest.approx(ours, abs=TOLERANCE)
