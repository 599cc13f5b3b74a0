"""The simulation beside the real actors: a coordinator's and schedulers', on an in-memory bus and a virtual clock.

What differs is that the actors' messages take no time but the workers', and that their heartbeats have other phases.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from collections import defaultdict
from pathlib import Path
from random import Random
from typing import Any

import pytest

from deploy.simulation.hops import HopDelays
from deploy.simulation.kit import EnginePools
from deploy.simulation.prompts import PromptSegment, SimRequest, generation_of
from deploy.simulation.store import VirtualCopies
from kvstore.actor import KvStoreActor
from kvstore.arena.directory import StoreDirectory
from services.coordinator.actor import CoordinatorActor
from services.coordinator.config import CoordinatorConfig, Policy
from services.scheduler.actor import SchedulerActor
from services.scheduler.core.limits import EngineLimits
from services.worker.kv.copy_thread import TransferLedger
from services.worker.kv.transfers import Transfers
from services.worker.sim.backend import SimBackend
from services.worker.sim.kv_copier import SimKvCopier
from shared import topics
from shared.actor import Actor, ActorRuntime, TopicSubscription
from shared.bus import Bus
from shared.bus.memory_bus import MemoryBus
from shared.ids import DetokenizerId, EngineId, GatewayId, Incarnation, InstanceId, NodeId
from shared.messages.coordinator import Route
from shared.messages.detokenizer import TokenBatch
from shared.messages.gateway import RequestPlaced
from shared.messages.lifecycle import Lifecycle, WorkerReport
from shared.messages.scheduler import StepFinished, StepTiming
from shared.messages.worker import StepPlan, Transfer
from shared.topics import Topic
from tests.support.engines.simulated_fleet import CARD, FixedLoad, make_kit, run
from tests.support.virtual_time import VirtualTimeLoop

SOON = 1e-6
HOPS = HopDelays(request=SOON, place=SOON, tokens=SOON, store=SOON, report=SOON)
TOLERANCE = 0.002
"""Seconds by which a token may come at another time: timers of the actors are as coarse as a millisecond."""
WARM_UP = 5.0
"""Seconds in which the actors find each other."""


class VirtualWorker(Actor):
    """A rank with the simulated device, which sleeps on the loop's clock."""

    service = "worker"

    def __init__(self, bus: Bus, engine: EngineId, device: SimBackend, directory: Path) -> None:
        super().__init__(bus, InstanceId(f"{engine}-rank0"))
        assert device.kv is not None
        copier = device.kv.copier
        assert isinstance(copier, SimKvCopier)
        self._copies = VirtualCopies(copier.seconds_per_block)
        self._ledger = TransferLedger(0)
        at_once = dataclasses.replace(device.kv, copier=SimKvCopier(0.0, copier.block_bytes))
        self._transfers = Transfers(at_once, directory)
        """Of real arenas; the time that copies take is the virtual clock's."""
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
            layout=None if self._device.kv is None else self._device.kv.layout,
            transfers=self._ledger.report(),
        )

    async def handle(self, message: StepPlan) -> None:
        loop = asyncio.get_running_loop()
        self._epoch, self._received = message.epoch, message.step + 1
        output = self._device.compute(message)
        if message.transfers or message.step == 0:
            self._ledger.record(message)
        begins = max(loop.time() + HOPS.plan, self._busy_until)
        self._busy_until = begins + max(output.timing.forward, SOON)  # timers of one moment fire in any order
        timing = StepTiming(wait=0.0, prepare=0.0, forward=output.timing.forward, sample=0.0)
        result = StepFinished(epoch=message.epoch, step=message.step, sampled=output.sampled, timing=timing)
        loop.call_at(self._busy_until + HOPS.result, asyncio.ensure_future, self._publish(result))

        in_order = {transfer.number: transfer for transfer in message.transfers}
        for number, ends in self._copies.add(message, begins, self._busy_until):
            loop.call_at(ends, self._copy, message.epoch, in_order[number])

    def _copy(self, epoch: Incarnation, transfer: Transfer) -> None:
        assert self._transfers.run(transfer, lambda: False) == "done"
        report = self._ledger.finish(epoch, transfer.number, failed=False)
        assert report is not None
        loop = asyncio.get_running_loop()
        publishes = self.bus.publish(topics.engine_results(self._engine), report)
        loop.call_later(HOPS.result, asyncio.ensure_future, publishes)

    async def _publish(self, result: StepFinished) -> None:
        self._published = result.step + 1
        await self.bus.publish(topics.engine_results(self._engine), result)


class VirtualStore(KvStoreActor):
    """A real store on real arenas, without what works beside it on threads: their time is not the clock's."""

    async def background(self) -> None:
        await self._kv.run()


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

    def __init__(self, load: FixedLoad, policy: Policy, pools: EnginePools, directory: Path) -> None:
        self._load, self._policy, self._pools = load, policy, pools
        self._directory = directory
        self.placed: dict[str, str] = {}
        """The first engine of each request."""
        self.handed = 0

    async def run(self) -> VirtualDetokenizer:
        loop = asyncio.get_running_loop()
        bus = MemoryBus(liveness=loop.time)
        kit, pooled = make_kit(LIMITS), self._pools.prefill > 0
        node = NodeId("node-1") if pooled else None
        detokenizer = VirtualDetokenizer(bus.connection())
        config = routing(self._policy)
        actors: list[Actor] = [
            detokenizer,
            CoordinatorActor(bus.connection(), InstanceId("coordinator-1"), config, clock=loop.time),
        ]
        if node is not None:
            directory, memory = StoreDirectory(self._directory), 2**25
            clock = loop.time
            store = VirtualStore(bus.connection(), InstanceId("kv"), node, directory, memory=memory, clock=clock)
            actors.append(store)
        for number in range(self._pools.total):
            engine, role = EngineId(f"engine-{number + 1}"), self._pools.role_of(number)
            actors.append(SchedulerActor(bus.connection(), InstanceId(engine), kit.limits, role=role, node=node))
            actors.append(VirtualWorker(bus.connection(), engine, kit.device.another(), self._directory))
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
            await bus.publish(topics.route(), Route(generation_of(request, CARD.name, request.at, CARD.block_size)))
        async with asyncio.timeout(60):
            while any(len(detokenizer.times[each.id]) < each.output_tokens for each in self._load.given):
                await asyncio.sleep(0.1)

    async def _note(self, message: object) -> None:
        if isinstance(message, RequestPlaced):
            self.placed.setdefault(message.request, message.engine)
            self.handed += message.handed_by is not None


LIMITS = EngineLimits(max_running=16, run_ahead=2)


def routing(policy: Policy) -> CoordinatorConfig:
    """Half of the load's prompts are handed over, where there is an engine for that."""
    return CoordinatorConfig(router_policy=policy, disaggregate_tokens=180)


def small_load(seed: int) -> FixedLoad:
    """Two users in three share one of four beginnings; times are apart by more than the tolerance."""
    random, at, given = Random(seed), 0.0, []
    for number in range(40):
        at += 0.011 + random.expovariate(20)
        shared = (PromptSegment(random.randrange(4), 256),) if random.random() < 0.67 else ()
        own = PromptSegment(100 + number, random.randrange(20, 300))
        given.append(SimRequest(number, at, (*shared, own), random.randrange(5, 60)))
    return FixedLoad(tuple(given))


@pytest.mark.parametrize(
    ("pools", "policy"),
    [
        (EnginePools(1), "kv"),
        (EnginePools(3), "round-robin"),
        (EnginePools(prefill=1, decode=1), "kv"),
        (EnginePools(prefill=1, decode=2), "round-robin"),
    ],
)
def test_actors_on_a_virtual_clock_and_the_simulation_agree_token_by_token(
    pools: EnginePools, policy: Policy, tmp_path: Path
) -> None:
    load = small_load(3)
    actors = ActorRun(load, policy, pools, tmp_path)
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        seen = runner.run(actors.run())
    simulated = run(
        load,
        engines=pools.total,
        routing=routing(policy),
        limits=LIMITS,
        hops=HOPS,
        pools=pools,
        store_blocks=4096 if pools.prefill else 0,
    )
    assert (actors.handed > 10) == (pools.prefill > 0)

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
