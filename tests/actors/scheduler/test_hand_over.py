"""Two schedulers, their workers and a KV store on one bus: a request moves from one engine to the other."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any, cast

from services.scheduler.actor import SchedulerActor
from services.scheduler.core.invariants import check
from services.scheduler.core.limits import EngineLimits
from shared import topics
from shared.actor import Actor, ActorRuntime, TopicSubscription
from shared.bus import Bus, UndeliveredHandler
from shared.bus.memory_bus import MemoryBus
from shared.ids import Attempt, EngineId, Incarnation, InstanceId, NodeId, RequestId
from shared.messages.detokenizer import TokenBatch
from shared.messages.gateway import GatewayMessage, RequestFailed, RequestPlaced
from shared.messages.kvstore import KvStoreReply, KvStoreRequest, Release
from shared.messages.lifecycle import Lifecycle, Role, StoreReport, WorkerReport
from shared.messages.scheduler import Cancel, GenerateRequest
from shared.messages.worker import StepPlan
from shared.topics import Topic
from tests.support.engines.checking_store import LAYOUT, HonestStore
from tests.support.engines.checking_worker import DETOKENIZER, GATEWAY, HonestWorker, card, generate, right_output

NODE = NodeId("node-1")
P, D = EngineId("prefill-1"), EngineId("decode-1")
PROMPT = [5 + i % 17 for i in range(37)]
BLOCKS = 32


class _OthersBus:
    """The shared bus as another process's connection: who is told of undelivered messages is decided once."""

    def __init__(self, bus: MemoryBus) -> None:
        self._bus = bus

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bus, name)

    def on_undelivered(self, handler: UndeliveredHandler) -> None:
        pass


class Rank(Actor):
    """An honest worker, which says in its lifecycle how far its copying is, and only there."""

    service = "worker"

    def __init__(self, bus: Bus, engine: EngineId, store: HonestStore) -> None:
        super().__init__(bus, InstanceId(f"{engine}-rank0"))
        self.engine = engine
        self.worker = HonestWorker(BLOCKS, store)
        self.received = 0
        self.epoch: Incarnation | None = None

    def subscriptions(self) -> Sequence[TopicSubscription[Any]]:
        return [TopicSubscription(topics.engine_steps(self.engine))]

    def lifecycle_topic(self) -> Topic[Lifecycle]:
        return topics.rank_lifecycles(self.engine)

    async def handle(self, message: StepPlan) -> None:
        self.received = message.step + 1
        self.epoch = message.epoch
        finished = self.worker.step(message)
        await self.bus.publish(topics.engine_results(self.engine), finished)
        while (transferred := self.worker.copy(0)) is not None:
            await self.bus.publish(topics.engine_results(self.engine), transferred)

    def worker_report(self) -> WorkerReport:
        return WorkerReport(
            engine=self.engine,
            rank=0,
            world_size=1,
            model=card(256),
            num_blocks=BLOCKS,
            device="honest",
            epoch=self.epoch,
            received=self.received,
            published=self.received,
            layout=LAYOUT,
            transfers=self.worker.report(0),
        )


class Node:
    """The engines of one node and its store; a detokenizer and a gateway that take notes."""

    def __init__(self, bus: MemoryBus) -> None:
        self.bus = bus
        self.store = HonestStore()
        self.patience: float | None = 0.0
        """Seconds that the store takes for an answer; None: it never answers."""
        self.tokens: dict[str, list[int]] = {}
        self.sources: dict[str, list[EngineId]] = {}
        self.finished: dict[str, str] = {}
        self.words: list[GatewayMessage] = []
        self.schedulers = {P: self._scheduler(bus, P, "prefill"), D: self._scheduler(_OthersBus(bus), D, "decode")}
        self.running: list[tuple[ActorRuntime, asyncio.Task[None]]] = []

    def _scheduler(self, bus: Any, engine: EngineId, role: Role) -> SchedulerActor:
        return SchedulerActor(bus, InstanceId(engine), EngineLimits(), node=NODE, role=role)

    async def start(self) -> None:
        await self.bus.subscribe(topics.detokenizer_tokens(DETOKENIZER), self._note_batch)
        await self.bus.subscribe(topics.gateway_inbox(GATEWAY), self._note_word)
        await self.bus.serve(topics.kvstore_requests(NODE), self._answer)
        await self.bus.subscribe(topics.kvstore_releases(NODE), self._release)
        for engine, scheduler in self.schedulers.items():
            self._run(scheduler)
            self._run(Rank(cast(Bus, _OthersBus(self.bus)), engine, self.store))
        await self.until(lambda: all(s.core.epoch_state is not None for s in self.schedulers.values()), "all is ready")

    async def announce_store(self, phase: str = "ready") -> None:
        report = StoreReport(
            node=NODE,
            slots=64,
            committed=0,
            reserved=0,
            pinned=0,
            bytes_used=0,
            bytes_total=0,
            hits=0,
            misses=0,
        )
        life = Lifecycle(
            service="kvstore",
            instance=InstanceId("kvstore-1"),
            incarnation=self.store.incarnation,
            phase=phase,  # type: ignore[arg-type]
            pid=1,
            host="h",
            started=0.0,
            store=report,
        )
        await self.bus.publish(topics.lifecycle_of("kvstore", life.instance), life)

    async def attached(self) -> None:
        await self.announce_store()
        await self.until(lambda: all(s.core.store.attached for s in self.schedulers.values()), "the store is attached")

    async def _answer(self, question: KvStoreRequest) -> KvStoreReply:
        if self.patience is None:
            await asyncio.Event().wait()
        await asyncio.sleep(self.patience or 0.0)
        return self.store.answer(question)

    async def _release(self, release: Release) -> None:
        self.store.release(release)

    async def _note_batch(self, batch: TokenBatch) -> None:
        for entry in batch.entries:
            known = self.tokens.setdefault(entry.request, [])
            assert entry.position == len(known)
            known += entry.tokens
            self.sources.setdefault(entry.request, []).append(batch.engine)
            if entry.finish is not None:
                self.finished[entry.request] = entry.finish

    async def _note_word(self, message: GatewayMessage) -> None:
        self.words.append(message)

    def _run(self, actor: Actor) -> None:
        runtime = ActorRuntime(actor, drain_timeout=1.0)
        self.running.append((runtime, asyncio.create_task(runtime.run())))

    async def generate(self, request: GenerateRequest, engine: EngineId = P) -> None:
        await self.bus.publish(topics.engine_requests(engine), request)

    async def until(self, condition: Any, what: str) -> None:
        try:
            async with asyncio.timeout(60):
                while not condition():
                    await asyncio.sleep(0.002)
        except TimeoutError:
            raise AssertionError(f"never happened: {what}") from None

    async def at_rest(self) -> None:
        def idle() -> bool:
            return all(scheduler.is_idle() for scheduler in self.schedulers.values())

        await self.until(idle, "nothing is in hand")
        await self.until(lambda: not self.store.pinned and not self.store.reserved, "no lease is held")
        for scheduler in self.schedulers.values():
            check(scheduler.core)
            report = scheduler.engine_report()
            assert report is not None
            assert report.blocks_free == report.blocks_total

    async def stop(self) -> None:
        for runtime, task in self.running:
            runtime.stop()
            await task


@contextlib.asynccontextmanager
async def node_on(bus: MemoryBus) -> AsyncIterator[Node]:
    node = Node(bus)
    await node.start()
    try:
        yield node
    finally:
        await node.stop()


def requests(count: int, **more: Any) -> list[GenerateRequest]:
    options = {"max_tokens": 20, "ignore_eos": True, "decode_on": D, **more}
    return [generate(f"r{i}", PROMPT[: 5 + 8 * i], **options) for i in range(count)]


def expect_right(node: Node, asked: list[GenerateRequest]) -> None:
    for request in asked:
        name = request.generation.request
        assert (node.tokens[name], node.finished[name]) == right_output(request, 256)


async def test_requests_move_from_the_prefill_to_the_decode_engine(memory_bus: MemoryBus) -> None:
    async with node_on(memory_bus) as node:
        await node.attached()
        asked = requests(5)
        for request in asked:
            await node.generate(request)
        await node.until(lambda: len(node.finished) == 5, "all finish")
        expect_right(node, asked)
        for request in asked:
            assert node.sources[request.generation.request] == [P, *[D] * 19]
        placed = [word for word in node.words if isinstance(word, RequestPlaced)]
        assert {(word.request, word.engine, word.handed_by) for word in placed} == {(f"r{i}", D, P) for i in range(5)}
        await node.at_rest()
        reports = {engine: scheduler.engine_report() for engine, scheduler in node.schedulers.items()}
        assert {(r.role, r.node, r.prefill_tokens) for r in reports.values() if r} == {
            ("prefill", NODE, 0),
            ("decode", NODE, 0),
        }


async def test_a_store_that_never_answers_costs_its_deadline_and_nothing_else(memory_bus: MemoryBus) -> None:
    async with node_on(memory_bus) as node:
        await node.attached()
        node.patience = None
        asked = requests(3, decode_on=None)
        for request in asked:
            await node.generate(request)
        await node.until(lambda: len(node.finished) == 3, "all finish")
        expect_right(node, asked)


async def test_a_store_that_goes_and_comes_is_used_again(memory_bus: MemoryBus) -> None:
    async with node_on(memory_bus) as node:
        await node.attached()
        await node.announce_store("stopped")
        await node.until(lambda: not any(s.core.store.attached for s in node.schedulers.values()), "it is gone")
        first, second = requests(5)[3:]
        await node.generate(first)
        await node.until(lambda: len(node.finished) == 1, "the first finishes")
        node.store.restart(other_file=True)
        await node.attached()
        await node.generate(second)
        await node.until(lambda: len(node.finished) == 2, "the second finishes")
        expect_right(node, [first, second])
        assert set(node.sources[first.generation.request]) == {P}
        assert set(node.sources[second.generation.request]) == {P, D}
        await node.at_rest()


async def test_what_one_engine_computed_the_other_does_not_compute_again(memory_bus: MemoryBus) -> None:
    async with node_on(memory_bus) as node:
        await node.attached()
        await node.generate(generate("a", PROMPT, max_tokens=1), P)
        await node.until(lambda: node.store.committed == 2, "its blocks are in the store")
        await node.generate(generate("b", PROMPT, max_tokens=1), D)
        await node.until(lambda: "b" in node.finished, "the second finishes")
        assert node.schedulers[D].core.counters.blocks_loaded == 2
        assert node.tokens["a"] == node.tokens["b"]
        await node.at_rest()


async def test_a_cancel_that_comes_to_the_prefill_engine_late_is_passed_on(memory_bus: MemoryBus) -> None:
    async with node_on(memory_bus) as node:
        await node.attached()
        (request,) = requests(1, max_tokens=200)
        await node.generate(request)
        await node.until(lambda: D in node.sources.get("r0", []), "the decode engine has it")
        await memory_bus.publish(topics.engine_control(P), Cancel(RequestId("r0"), Attempt(1)))
        await node.at_rest()
        assert "r0" not in node.finished


async def test_a_decode_engine_that_is_not_there_fails_the_attempt(memory_bus: MemoryBus) -> None:
    async with node_on(memory_bus) as node:
        await node.attached()
        (request,) = requests(1, decode_on=EngineId("decode-9"))
        await node.generate(request)
        await node.until(lambda: any(isinstance(word, RequestFailed) for word in node.words), "it fails")
        assert node.words[-1] == RequestFailed(RequestId("r0"), Attempt(1), "decode-9 does not take it over")
        await node.at_rest()
