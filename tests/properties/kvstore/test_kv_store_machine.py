"""Arena, leases and eviction over real files, against a model that knows only who was told what.

The model does not foresee what is evicted: it hears of it, as a tier below does, and judges whether that was allowed.
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncGenerator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvstore.arena.in_flight_block import BlockShape, InFlightBlock
from kvstore.core.layout import PAGE, fingerprint
from kvstore.core.slot_table import SlotTable, StoredBlock
from shared.blocks import BlockHash
from shared.ids import LeaseId
from shared.messages.kvstore import NO_SLOT, KvLayout, LeaseOwner
from tests.support.kv.arenas import (
    LARGE,
    SMALL,
    Client,
    Clock,
    contents,
    holds,
    name_of,
    new_directory,
    remove,
    slots_of,
    store_in,
    write_cell,
)
from tests.support.kv.random_blocks import carried
from tests.support.kv.store_invariants import check

MEMORY = 10 * PAGE
"""Nine small blocks, or four large ones, or some of both."""
LAYOUTS = (SMALL, LARGE)
PATHS = (
    [(a,) for a in "xy"] + [(a, b) for a in "xy" for b in "xy"] + [(a, b, c) for a in "xy" for b in "xy" for c in "xy"]
)
"""Two trees of prompts."""


def chain_of(path: Sequence[str]) -> list[BlockHash]:
    return [name_of(tuple(path[: length + 1])) for length in range(len(path))]


def parent_of() -> dict[BlockHash, BlockHash]:
    return {name_of(path): name_of(path[:-1]) if path[:-1] else BlockHash(bytes(16)) for path in PATHS}


PARENT = parent_of()


@dataclass
class Writing:
    layout: str
    client: int
    lease: LeaseId
    slots: dict[BlockHash, tuple[int, int]]
    written: dict[BlockHash, set[int]] = field(default_factory=dict)


@dataclass
class Reading:
    layout: str
    client: int
    lease: LeaseId
    slots: dict[BlockHash, tuple[int, int]]


class Below:
    """Hears what is evicted, before its slot is used again."""

    def __init__(self, machine: KvStoreMachine) -> None:
        self._machine = machine

    async def run(self) -> None: ...

    def offer(self, layout: str, block: InFlightBlock) -> bool:
        self._machine.evicted(layout, block)
        return True

    async def fetch(
        self, layout: str, hashes: Sequence[BlockHash], shape: BlockShape
    ) -> AsyncGenerator[InFlightBlock, None]:
        return
        yield


class KvStoreMachine(RuleBasedStateMachine):
    """The model: blocks that were committed, in the order of their last use; who writes; who reads."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = new_directory()
        self.clock = Clock()
        self.life = 0
        self.lives = [1, 1]
        self.leases = map(LeaseId, itertools.count(1))
        self.committed: dict[str, dict[BlockHash, int]] = {fingerprint(layout): {} for layout in LAYOUTS}
        self.order = 0
        self.writing: list[Writing] = []
        self.reading: list[Reading] = []
        self.lent: list[tuple[str, list[InFlightBlock], AbstractContextManager[Sequence[InFlightBlock]]]] = []
        self.preparing: list[tuple[str, int]] = []
        self.coming: set[BlockHash] = set()
        self.doomed: set[tuple[str, BlockHash]] = set()
        self.unwanted: set[tuple[str, BlockHash]] = set()
        """Were being written when all was forgotten."""
        # Those whose leases have ended without their knowing.
        self.late_readers: list[Reading] = []
        self.late_writers: list[Writing] = []
        self.begin()

    def begin(self) -> None:
        self.life += 1
        self.store = store_in(self.directory, MEMORY, self.clock, tier=Below(self), life=self.life)
        self.attach()

    def attach(self) -> None:
        self.clients = {
            (who, fingerprint(layout)): Client(self.store, layout, instance=f"engine-{who}", life=self.lives[who])
            for who in range(2)
            for layout in LAYOUTS
        }
        for client in self.clients.values():
            client.leases = self.leases  # no process ever uses a number twice

    # ---- what the model hears

    def evicted(self, layout: str, block: InFlightBlock) -> None:
        name = block.hash
        mine = self.committed[layout]
        assert name in mine, "evicted, and was not there"
        assert not self.is_read(layout, name), "evicted under a reader"
        assert not self.has_child(layout, name), "a chain is evicted from its end"
        older = [
            other
            for other, used in mine.items()
            if used < mine[name]
            and not self.is_read(layout, other)
            and not self.has_child(layout, other)
            # The block before the one that comes is as good as its parent already.
            and other not in self.coming
        ]
        assert not older, "another one had not been used for longer"
        assert bytes(block.payload) == self.contents(layout, name)
        del mine[name]

    def is_read(self, layout: str, name: BlockHash) -> bool:
        return any(reading.layout == layout and name in reading.slots for reading in self.reading) or any(
            lent == layout and any(block.hash == name for block in blocks) for lent, blocks, _ in self.lent
        )

    def has_child(self, layout: str, name: BlockHash) -> bool:
        here = [*self.committed[layout], *(n for w in self.writing if w.layout == layout for n in w.slots)]
        return any(PARENT[other] == name for other in here)

    def contents(self, layout: str, name: BlockHash) -> bytes:
        shape = self.clients[0, layout].arena.shape
        return b"".join(contents(name, head, shape.cell_bytes) for head in range(shape.cells))

    def touch(self, layout: str, names: Sequence[BlockHash]) -> None:
        for name in names:
            self.order += 1
            self.committed[layout][name] = self.order

    # ---- writers

    @rule(who=st.integers(0, 1), layout=st.sampled_from(LAYOUTS), path=st.sampled_from(PATHS), skip=st.integers(0, 2))
    def reserve(self, who: int, layout: KvLayout, path: tuple[str, ...], skip: int) -> None:
        client = self.clients[who, fingerprint(layout)]
        key = client.layout
        names = chain_of(path)[skip:]
        here = [name for name in names if name in self.committed[key]]
        being_written = {n for w in self.writing if w.layout == key for n in w.slots}
        self.touch(key, [name for name in here if (key, name) not in self.doomed])
        self.coming = {PARENT[name] for name in names}
        lease, answer = client.reserve(names, parents=[PARENT[name] for name in names])
        given = {}
        full = False
        for name, (slot, generation) in zip(names, slots_of(answer), strict=True):
            if slot != NO_SLOT:
                assert not full, "a block behind one that found no room"
                assert name not in here
                assert name not in being_written
                assert client.arena.generation(slot) == generation
                given[name] = (slot, generation)
            elif name not in here and name not in being_written and not full:
                self.must_be_full(client, name)
                full = True
        if given:
            self.writing.append(Writing(key, who, lease, given))

    def must_be_full(self, client: Client, name: BlockHash) -> None:
        """Nothing could have gone for this block, but the one before it."""
        budget = self.store.core.budget
        table = budget.tables[client.layout]
        assert not table.free
        assert not self.may_go(table, name)
        if table.absent:
            assert budget.memory + table.block_bytes > budget.limit
            assert not any(each.free or self.may_go(each, name) for each in budget.tables.values())

    def may_go(self, table: SlotTable, name: BlockHash) -> list[StoredBlock]:
        return [block for block in table.blocks.values() if table.is_evictable(block) and block.hash != PARENT[name]]

    @precondition(lambda self: self.writing)
    @rule(data=st.data())
    def write_some_heads(self, data: st.DataObject) -> None:
        writing = data.draw(st.sampled_from(self.writing))
        arena = self.clients[writing.client, writing.layout].arena
        name = data.draw(st.sampled_from(sorted(writing.slots)))
        slot, generation = writing.slots[name]
        assert arena.generation(slot) == generation
        for head in data.draw(st.sets(st.integers(0, arena.geometry.cells - 1), min_size=1)):
            write_cell(arena, slot, name, head)
            writing.written.setdefault(name, set()).add(head)

    @precondition(lambda self: self.writing)
    @rule(data=st.data(), finish=st.booleans())
    def commit(self, data: st.DataObject, finish: bool) -> None:
        writing = data.draw(st.sampled_from(self.writing))
        client = self.clients[writing.client, writing.layout]
        heads = set(range(client.arena.geometry.cells))
        for name, (slot, _) in writing.slots.items() if finish else ():
            for head in heads - writing.written.get(name, set()):
                write_cell(client.arena, slot, name, head)
        whole = [name for name in writing.slots if finish or writing.written.get(name) == heads]
        self.writing.remove(writing)
        assert client.commit(writing.lease) == len(whole)
        self.touch(writing.layout, [name for name in whole if (writing.layout, name) not in self.unwanted])
        self.unwanted -= {(writing.layout, name) for name in writing.slots}

    # ---- readers

    @rule(who=st.integers(0, 1), layout=st.sampled_from(LAYOUTS), path=st.sampled_from(PATHS), skip=st.integers(0, 2))
    def find(self, who: int, layout: KvLayout, path: tuple[str, ...], skip: int) -> None:
        client = self.clients[who, fingerprint(layout)]
        names = chain_of(path)[skip:]
        lease, answer = client.find(names)
        run = []
        for name in names:
            if name not in self.committed[client.layout] or (client.layout, name) in self.doomed:
                break
            run.append(name)
        slots = slots_of(answer)
        assert len(slots) == len(run), "the longest run, and no more"
        if run:
            self.touch(client.layout, run)
            self.reading.append(Reading(client.layout, who, lease, dict(zip(run, slots, strict=True))))

    @precondition(lambda self: self.reading or self.writing)
    @rule(data=st.data(), drop=st.booleans())
    def release(self, data: st.DataObject, drop: bool) -> None:
        held: Reading | Writing = data.draw(st.sampled_from([*self.reading, *self.writing]))
        dropped = list(held.slots) if drop else []
        (self.reading if isinstance(held, Reading) else self.writing).remove(held)  # type: ignore[arg-type]
        if isinstance(held, Writing):
            self.unwanted -= {(held.layout, name) for name in held.slots}
        else:
            self.doomed |= {(held.layout, name) for name in dropped}
        self.let_go_of_the_doomed()
        self.clients[held.client, held.layout].release(held.lease, dropped)

    def let_go_of_the_doomed(self) -> None:
        for layout, name in sorted(self.doomed):
            if not self.is_read(layout, name):
                del self.committed[layout][name]
                self.doomed.remove((layout, name))

    @rule()
    def all_is_forgotten(self) -> None:
        writing = {(each.layout, name) for each in self.writing for name in each.slots}
        here = {(layout, name) for layout, names in self.committed.items() for name in names}
        assert self.store.reset().blocks == len(here | writing)
        self.unwanted |= writing
        self.doomed |= here
        self.let_go_of_the_doomed()

    # ---- tiers and other nodes

    @rule(layout=st.sampled_from(LAYOUTS), path=st.sampled_from(PATHS))
    def lend(self, layout: KvLayout, path: tuple[str, ...]) -> None:
        if len(self.lent) < 2:
            context = self.store.lend(fingerprint(layout), chain_of(path))
            assert context is not None
            self.lent.append((fingerprint(layout), list(context.__enter__()), context))

    @precondition(lambda self: self.lent)
    @rule()
    def end_loan(self) -> None:
        _, _, context = self.lent.pop(0)
        self.let_go_of_the_doomed()
        context.__exit__(None, None, None)

    @rule(layout=st.sampled_from(LAYOUTS), path=st.sampled_from(PATHS))
    def land(self, layout: KvLayout, path: tuple[str, ...]) -> None:
        key = fingerprint(layout)
        name = name_of(path)
        there = name in self.committed[key] or any(name in w.slots for w in self.writing if w.layout == key)
        shape = self.clients[0, key].arena.shape
        self.coming = {PARENT[name]}
        landed = self.store.land(key, carried(name, PARENT[name], self.contents(key, name), shape))
        if there:
            assert landed
        elif landed:
            self.touch(key, [name])
        else:
            self.must_be_full(self.clients[0, key], name)

    @rule(layout=st.sampled_from(LAYOUTS))
    def begin_to_take_memory(self, layout: KvLayout) -> None:
        if (slot := self.store.prepare(fingerprint(layout))) is not None:
            self.preparing.append((fingerprint(layout), slot))

    @precondition(lambda self: self.preparing)
    @rule(taken=st.booleans())
    def memory_is_taken(self, taken: bool) -> None:
        layout, slot = self.preparing.pop(0)
        arena = self.store.arena_of(layout)
        assert arena is not None
        self.store.prepared(arena, slot, taken and arena.take_memory(slot) == 1)

    # ---- deaths

    @rule(who=st.integers(0, 1))
    def engine_dies(self, who: int) -> None:
        owner = next(client.owner for (client_of, _), client in self.clients.items() if client_of == who)
        self.abandon([w for w in self.writing if w.client == who], [r for r in self.reading if r.client == who])
        self.store.owner_gone(LeaseOwner(owner.instance, owner.incarnation))
        self.lives[who] += 1
        self.attach()

    def abandon(self, writing: list[Writing], reading: list[Reading]) -> None:
        self.writing = [each for each in self.writing if each not in writing]
        self.reading = [each for each in self.reading if each not in reading]
        self.late_readers += reading
        self.late_writers += writing
        self.unwanted -= {(each.layout, name) for each in writing for name in each.slots}
        self.let_go_of_the_doomed()

    @rule(seconds=st.sampled_from((1.0, 11.0)))
    def time_passes(self, seconds: float) -> None:
        self.clock.now += seconds
        if seconds > 10:
            self.abandon(list(self.writing), list(self.reading))
            self.store.time_passed()
            self.clock.now += 10
        self.store.time_passed()
        if seconds > 10:
            assert not sum(table.reserved for table in self.store.core.budget.tables.values()), "a slot has leaked"

    @rule()
    def store_is_killed(self) -> None:
        """What is in its memory is lost; the files stay as they are."""
        for _, _, context in self.lent:
            context.__exit__(None, None, None)
        self.lent.clear()
        # Readers and their wish to have a block dropped are forgotten: it is like any other again.
        self.doomed.clear()
        self.preparing.clear()
        self.abandon(list(self.writing), list(self.reading))
        self.store.close()
        self.begin()

    # ---- what always holds

    @invariant()
    def bookkeeping_is_in_order(self) -> None:
        check(self.store.core, lent=len(self.lent))
        for layout, names in self.committed.items():
            table = self.store.core.budget.tables[layout]
            assert {name for name, block in table.blocks.items() if block.committed} == set(names)
        report = self.store.report()
        assert report.committed == sum(map(len, self.committed.values()))
        assert report.committed + report.reserved <= report.slots

    @invariant()
    def readers_read_what_they_were_told(self) -> None:
        for reading in self.reading:
            arena = self.clients[reading.client, reading.layout].arena
            for name, (slot, generation) in reading.slots.items():
                assert arena.generation(slot) == generation
                assert holds(arena, slot, name)
        for layout, blocks, _ in self.lent:
            for block in blocks:
                assert bytes(block.payload) == self.contents(layout, block.hash)

    @invariant()
    def who_comes_late_can_tell(self) -> None:
        """A slot whose generation is what it was holds what it did. A writer never sees that of its reservation."""
        for reading in self.late_readers:
            arena = self.clients[0, reading.layout].arena
            for name, (slot, generation) in reading.slots.items():
                assert arena.generation(slot) != generation or holds(arena, slot, name)
        for writing in self.late_writers:
            arena = self.clients[0, writing.layout].arena
            assert all(arena.generation(slot) != generation for slot, generation in writing.slots.values())

    def teardown(self) -> None:
        for _, _, context in self.lent:
            context.__exit__(None, None, None)
        self.store.close()
        remove(self.directory)


TestKvStore = KvStoreMachine.TestCase
TestKvStore.settings = settings(max_examples=40, stateful_step_count=40, deadline=None, report_multiple_bugs=False)
