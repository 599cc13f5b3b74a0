"""A KV store on the in-memory bus: what it answers, what it tells of its blocks and itself, whose leases it ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvstore.actor import KvStoreActor
from kvstore.arena.directory import StoreDirectory
from kvstore.core.layout import PAGE
from shared import topics
from shared.actor import ActorRuntime, Tick
from shared.blocks import DEFAULT_BLOCK_SIZE as BLOCK_SIZE
from shared.blocks import BlockHash
from shared.bus import NoResponders
from shared.bus.memory_bus import MemoryBus
from shared.ids import Incarnation, InstanceId, LeaseId, ModelName
from shared.kv_events.publisher import DUMP_PART_SECONDS
from shared.messages.kv_events import KvDump, KvDumpRequest, KvEvents
from shared.messages.kvstore import (
    Attach,
    AttachReply,
    Commit,
    CommitReply,
    Find,
    FindReply,
    KvLayout,
    KvStoreRefusal,
    KvStoreReply,
    LeaseOwner,
    Release,
    Reserve,
    ReserveReply,
)
from shared.messages.lifecycle import Drain, Lifecycle, Phase
from tests.support.kv.arenas import (
    LARGE,
    MODEL,
    NODE,
    SMALL,
    STORE,
    chain,
    name_of,
    names_in,
    new_directory,
    parents_of,
    remove,
    slots_of,
    write,
)
from tests.support.kv.random_blocks import carried

MEMORY = 12 * PAGE
COORDINATOR = InstanceId("coordinator-1")
ENGINE = LeaseOwner(InstanceId("engine-1"), Incarnation(1))


class World:
    """One store, an engine's questions, and a record of what the store tells."""

    def __init__(self, bus: MemoryBus, directory: Path) -> None:
        self.bus = bus
        bus.liveness_now = lambda: 0.0  # type: ignore[method-assign]  # nobody falls silent, however slow the machine
        self.directory = directory
        self.events: list[KvEvents] = []
        self.dumps: list[KvDump] = []
        self.lives: list[Lifecycle] = []
        self.leases = 0

    async def listen(self) -> None:
        await self.bus.subscribe(topics.all_kv_events(), self._into(self.events))
        await self.bus.subscribe(topics.kv_dumps(COORDINATOR), self._into(self.dumps))
        await self.bus.subscribe(topics.lifecycle_of("kvstore", STORE), self._into(self.lives))

    def _into(self, record: list[Any]) -> Callable[[Any], Any]:
        async def note(message: Any) -> None:
            record.append(message)

        return note

    async def start(self) -> None:
        self.actor = KvStoreActor(self.bus, STORE, NODE, StoreDirectory(self.directory), memory=MEMORY)
        self.runtime = ActorRuntime(self.actor, drain_timeout=1.0)
        self.task = asyncio.create_task(self.runtime.run())
        await self.until(lambda: self.runtime.phase == "ready")

    async def stop(self) -> None:
        self.runtime.stop()
        await self.task

    async def until(self, condition: Callable[[], Any]) -> None:
        async with asyncio.timeout(60):
            while not condition():
                await asyncio.sleep(0.002)

    async def ask(self, question: Any) -> Any:
        return await self.bus.request(topics.kvstore_requests(NODE), question, KvStoreReply, 60)

    async def attach(self, layout: KvLayout = SMALL, model: ModelName = MODEL) -> str:
        self.attached = await self.ask(Attach(layout, model))
        assert isinstance(self.attached, AttachReply)
        return self.attached.layout

    async def reserve(
        self, layout: str, names: Sequence[BlockHash], tokens: int = BLOCK_SIZE
    ) -> tuple[LeaseId, ReserveReply]:
        lease = self.lease()
        reserved = await self.ask(
            Reserve(
                layout=layout,
                owner=ENGINE,
                lease=lease,
                hashes=b"".join(names),
                parents=b"".join(parents_of(names)),
                tokens=bytes([tokens] * len(names)),
            )
        )
        assert isinstance(reserved, ReserveReply)
        return lease, reserved

    async def save(self, layout: str, names: Sequence[BlockHash], tokens: int = BLOCK_SIZE) -> None:
        lease, reserved = await self.reserve(layout, names, tokens)
        arena = self.actor.store.arena_of(layout)
        assert arena is not None
        for name, (slot, _) in zip(names, slots_of(reserved), strict=True):
            write(arena, slot, name)
        assert await self.ask(Commit(layout=layout, owner=ENGINE, lease=lease)) == CommitReply(len(names))

    async def find(
        self, layout: str, names: Sequence[BlockHash], owner: LeaseOwner = ENGINE
    ) -> tuple[LeaseId, FindReply]:
        lease = self.lease()
        found = await self.ask(Find(layout=layout, owner=owner, lease=lease, hashes=b"".join(names), deadline=1.0))
        assert isinstance(found, FindReply)
        return lease, found

    def lease(self) -> LeaseId:
        self.leases += 1
        return LeaseId(self.leases)

    async def release(self, layout: str, lease: LeaseId, drop: Sequence[BlockHash] = ()) -> None:
        message = Release(layout=layout, owner=ENGINE, lease=lease, drop=b"".join(drop))
        await self.bus.publish(topics.kvstore_releases(NODE), message)

    async def hear(self, owner: LeaseOwner, phase: Phase) -> None:
        life = Lifecycle(
            service="scheduler",
            instance=owner.instance,
            incarnation=owner.incarnation,
            phase=phase,
            pid=1,
            host="h",
            started=0.0,
        )
        await self.bus.publish(topics.lifecycle_of("scheduler", owner.instance), life)

    def told(self, model: ModelName = MODEL) -> list[tuple[list[BlockHash], list[BlockHash], bool]]:
        """(stored, removed, cleared) of this life's events, which must be numbered without a gap."""
        events = [e for e in self.events if e.source.model == model and e.epoch == self.actor.incarnation]
        assert [event.number for event in events] == list(range(len(events)))
        return [(names_in(event.stored), names_in(event.removed), event.cleared) for event in events]


@pytest.fixture
async def world(memory_bus: MemoryBus) -> AsyncIterator[World]:
    directory = new_directory()
    world = World(memory_bus, directory)
    await world.listen()
    await world.start()
    yield world
    await world.stop()
    remove(directory)


async def test_blocks_that_were_committed_are_found_and_let_go(world: World) -> None:
    layout, names = await world.attach(), chain("a", 2)
    await world.save(layout, names)
    lease, found = await world.find(layout, [*names, name_of("missing")])
    assert (len(slots_of(found)), found.arena, found.from_lower) == (2, world.attached.arena, 0)
    assert world.actor.store.report().pinned == 2
    await world.release(layout, lease)
    await world.until(lambda: not world.actor.store.report().pinned)


async def test_a_store_tells_of_itself_in_its_lifecycle(world: World) -> None:
    layout = await world.attach()
    await world.save(layout, chain("a", 3))
    await world.find(layout, chain("a", 4))

    def told() -> bool:
        report = world.lives[-1].store
        return report is not None and (report.node, report.committed, report.pinned, report.hits, report.misses) == (
            NODE,
            3,
            3,
            3,
            1,
        )

    await world.until(told)


async def test_an_unknown_layout_is_answered_so(world: World) -> None:
    question = Find(layout="none", owner=ENGINE, lease=LeaseId(1), hashes=b"", deadline=0.01)
    assert await world.ask(question) == KvStoreRefusal("layout none is not attached")


@pytest.mark.parametrize("phase", ["stopped", "failed"])
async def test_the_leases_of_an_engine_end_with_it(world: World, phase: Phase) -> None:
    layout = await world.attach()
    await world.save(layout, chain("a", 1))
    await world.hear(ENGINE, "ready")
    await world.find(layout, chain("a", 1))
    await world.reserve(layout, chain("b", 1))
    await world.hear(ENGINE, phase)
    await world.until(lambda: not world.actor.store.report().pinned)
    assert not len(world.actor.store.core.leases)


async def test_an_engine_that_was_started_anew_has_lost_its_leases_and_keeps_its_new_ones(world: World) -> None:
    layout, names = await world.attach(), chain("a", 2)
    await world.save(layout, names)
    await world.hear(ENGINE, "ready")
    await world.find(layout, names)
    after = LeaseOwner(ENGINE.instance, Incarnation(2))
    await world.find(layout, names[:1], after)
    await world.hear(after, "starting")
    await world.until(lambda: world.actor.store.report().pinned == 1)


async def test_the_store_tells_what_it_holds_and_what_it_lost(world: World) -> None:
    layout, old = await world.attach(), chain("old", 6)
    slots = world.attached.slots
    await world.save(layout, old)
    await world.until(lambda: len(world.told()) == 2)
    lease, _ = await world.find(layout, old[5:])
    await world.release(layout, lease, drop=old[5:])
    await world.until(lambda: len(world.told()) == 3)
    new = chain("new", slots - 3)
    await world.save(layout, new)
    await world.until(lambda: [name for stored, _, _ in world.told()[3:] for name in stored] == new)
    made_room = [name for _, removed, _ in world.told()[3:] for name in removed]
    # One more where memory is just being taken for a slot.
    assert made_room in (old[4:2:-1], old[4:1:-1])
    assert world.told()[:3] == [([], [], True), (old, [], False), ([], old[5:], False)]
    source = world.events[0].source
    assert (source.instance, source.model, source.node, source.store) == (STORE, MODEL, NODE, True)


async def test_whoever_asks_is_told_everything(world: World) -> None:
    layout, names = await world.attach(), chain("a", 3)
    await world.save(layout, names)
    await world.bus.publish(topics.kv_dump_requests(STORE), KvDumpRequest(COORDINATOR))
    await world.until(lambda: world.dumps)
    [dump] = world.dumps
    await world.until(lambda: len(world.told()) == 2)
    assert (dump.epoch, dump.number, dump.part, dump.parts) == (world.actor.incarnation, 1, 0, 1)
    assert sorted(names_in(dump.hashes)) == sorted(names)


async def test_a_block_that_lands_while_everything_is_told_is_told_afterwards(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = await world.attach()
    arena = world.actor.store.arena_of(layout)
    assert arena is not None
    shape = arena.shape
    first, second = (carried(name_of(n), bytes(16), bytes(shape.payload_bytes), shape) for n in "ab")
    publish = world.bus.publish

    async def land_and_publish(topic: Any, message: Any, *, confirm: bool = False) -> None:
        if isinstance(message, KvEvents):
            world.actor.store.land(layout, second)
        await publish(topic, message, confirm=confirm)

    monkeypatch.setattr(world.bus, "publish", land_and_publish)
    world.actor.store.land(layout, first)
    await world.actor.handle(KvDumpRequest(COORDINATOR))
    await world.until(lambda: len(world.told()) == 3 and world.dumps)
    assert world.told()[1:] == [([first.hash], [], False), ([second.hash], [], False)]
    [dump] = world.dumps
    told_by_then = [name for stored, _, _ in world.told()[: dump.number + 1] for name in stored]
    assert sorted(names_in(dump.hashes)) == sorted(told_by_then)


async def test_partial_blocks_are_nobodys_business(world: World) -> None:
    layout = await world.attach()
    await world.save(layout, chain("handed over", 1), tokens=9)
    await world.save(layout, chain("whole", 1))
    await world.until(lambda: len(world.told()) == 2)
    assert world.told()[1] == (chain("whole", 1), [], False)


async def test_after_a_restart_what_was_found_is_told_once_its_model_is_known(world: World) -> None:
    names = chain("a", 3)
    await world.save(await world.attach(), names)
    await world.stop()
    await world.start()
    await world.bus.publish(topics.kv_dump_requests(STORE), KvDumpRequest(COORDINATOR))
    await asyncio.sleep(4 * DUMP_PART_SECONDS)
    await world.attach()
    await world.until(lambda: len(world.told()) == 2)
    [cleared, (stored, removed, _)] = world.told()
    assert cleared == ([], [], True)
    assert (sorted(stored), removed) == (sorted(names), [])
    assert world.dumps == [], "before that there was nothing to tell"


async def test_a_model_is_told_of_once_however_many_layouts_it_has(world: World) -> None:
    small, large, names = await world.attach(SMALL), await world.attach(LARGE), chain("a", 1)
    await world.save(small, names)
    await world.save(large, names)
    await world.until(lambda: len(world.told()) == 2)
    lease, _ = await world.find(small, names)
    await world.release(small, lease, drop=names)
    lease, _ = await world.find(large, names)
    await world.release(large, lease, drop=names)
    await world.until(lambda: len(world.told()) == 3)
    assert world.told()[1:] == [(names, [], False), ([], names, False)]
    assert world.actor.store.report().committed == 0


async def test_two_models_are_told_of_apart(world: World) -> None:
    other = ModelName("another/model")
    names = chain("a", 1)
    await world.save(await world.attach(SMALL, MODEL), names)
    await world.attach(SMALL, other)
    await world.attach(LARGE, ModelName("third"))
    await world.until(lambda: len(world.told(other)) == 2 and world.told(ModelName("third")))
    assert world.told() == world.told(other) == [([], [], True), (names, [], False)]
    assert world.told(ModelName("third")) == [([], [], True)]


async def test_memory_is_at_hand_before_it_is_asked_for(world: World) -> None:
    layout = await world.attach()
    table = world.actor.store.core.budget.tables[layout]
    assert not table.free
    await world.reserve(layout, chain("a", 1))
    await world.until(lambda: len(table.free) == MEMORY // 4 // PAGE)


async def test_a_store_that_drains_is_absent_and_still_hears_releases(world: World) -> None:
    layout = await world.attach()
    await world.save(layout, chain("a", 1))
    lease, _ = await world.find(layout, chain("a", 1))
    await world.bus.publish(topics.instance_control(STORE), Drain())
    await world.until(lambda: world.runtime.phase == "draining")
    with pytest.raises(NoResponders):
        await world.find(layout, chain("a", 1))
    await world.release(layout, lease)
    await world.until(lambda: not world.actor.store.report().pinned)


async def test_a_directory_is_free_again_when_its_store_has_stopped(world: World) -> None:
    await world.stop()
    StoreDirectory(world.directory).close()
    await world.start()


async def test_a_slow_engine_keeps_its_reservations_until_their_lease_runs_out(world: World) -> None:
    """On a starved machine heartbeats fail to come for seconds: slots that were taken back then are being written."""
    layout, names = await world.attach(), chain("slow", 2)
    await world.hear(ENGINE, "ready")
    lease, reserved = await world.reserve(layout, names)
    arena = world.actor.store.arena_of(layout)
    assert arena is not None
    await world.actor.handle(Tick(0.0, 9.0))
    for name, (slot, generation) in zip(names, slots_of(reserved), strict=True):
        assert arena.header(slot).generation == generation
        write(arena, slot, name)
    assert await world.ask(Commit(layout=layout, owner=ENGINE, lease=lease)) == CommitReply(2)
