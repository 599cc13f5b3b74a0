"""What a coordinator believes of cached blocks, against a plain dictionary: events, losses, dumps, comings, goings.

Sources journal with the real journal; messages may be lost, and dumps cut short. When everything that was asked for has
been answered, the coordinator knows exactly what the sources hold.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import product

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from services.coordinator.core import kv_sources
from services.coordinator.core.kv_sources import KvSources
from shared.blocks import BlockHash, hash_chain
from shared.ids import Incarnation, InstanceId, ModelName, NodeId
from shared.kv_events import stream as kv_journal
from shared.kv_events.stream import KvEventStream
from shared.messages.kv_events import KvDump, KvEvents, KvSource
from shared.packing import pack

ANY = st.booleans()
NAMES = ("engine-1", "engine-2", "kvstore-1")
MODELS = (ModelName("m"), ModelName("n"))
CHAINS = [hash_chain(pack([seed] * 16 + list(range(16 * 5))), None, 16) for seed in range(2)]
BLOCKS = sorted({hash_ for chain in CHAINS for hash_ in chain})


@pytest.fixture(autouse=True, scope="module")
def _small_messages() -> object:
    """So that dumps have several parts, and what is kept for one runs out."""
    patch = pytest.MonkeyPatch()
    patch.setattr(kv_journal, "MAX_HASHES", 3)
    patch.setattr(kv_sources, "MAX_HELD_EVENTS", 4)
    patch.setattr(kv_sources, "MAX_REMOVED", 3)
    yield
    patch.undo()


class Holder:
    """An engine, or a node's store with several models: what it holds, and its journals."""

    def __init__(self, name: str, epoch: int) -> None:
        self.name = name
        models = MODELS if name.startswith("kvstore") else MODELS[:1]
        self.held: dict[ModelName, set[BlockHash]] = {model: set() for model in models}
        self.journals = {model: KvEventStream(self.source(model), Incarnation(epoch)) for model in models}

    def source(self, model: ModelName) -> KvSource:
        is_store = self.name.startswith("kvstore")
        return KvSource(instance=InstanceId(self.name), model=model, node=NodeId("node-1"), store=is_store)

    def turn_around(self, model: ModelName, hash_: BlockHash) -> None:
        changes = self.journals[model].changes
        (changes.removed if hash_ in self.held[model] else changes.stored)(hash_)
        self.held[model] ^= {hash_}

    def flush(self) -> list[KvEvents]:
        return [event for journal in self.journals.values() for event in journal.flush()]

    def dump(self) -> list[KvDump]:
        return [part for model, journal in self.journals.items() for part in journal.dump(self.held[model])]


class Channels:
    """What is on its way from one source: events and dumps keep their order, but not between each other."""

    def __init__(self) -> None:
        self.events: deque[KvEvents] = deque()
        self.dumps: deque[KvDump] = deque()
        self.lost_last: dict[ModelName, bool] = {}
        """Whether a model's newest event was lost: nothing can show that before the next one."""


class Knowledge(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.epoch = 0
        self.core = KvSources(limit=10_000)
        self.holders: dict[str, Holder] = {}
        self.on_the_way: dict[str, Channels] = {}
        for name in NAMES[1:]:
            self.start(name)
            self.flush(name)
            self.all_arrives(name)

    def start(self, name: str) -> None:
        self.begin_epoch(name)
        self.on_the_way[name] = Channels()
        self.core.follow(InstanceId(name))

    def begin_epoch(self, name: str) -> None:
        self.epoch += 1
        self.holders[name] = Holder(name, self.epoch)

    @rule()
    def one_comes_or_goes(self) -> None:
        name = NAMES[0]
        if name in self.holders:
            del self.holders[name], self.on_the_way[name]
            self.core.forget(InstanceId(name))
        else:
            self.start(name)

    @rule(name=st.sampled_from(NAMES[1:]))
    def an_engine_begins_a_new_epoch(self, name: str) -> None:
        self.begin_epoch(name)

    @rule(name=st.sampled_from(NAMES[1:]))
    def one_is_started_anew_under_its_name(self, name: str) -> None:
        self.core.forget(InstanceId(name))
        self.start(name)

    @rule(data=st.data(), hashes=st.one_of(st.sampled_from(CHAINS), st.sets(st.sampled_from(BLOCKS))), tells=ANY)
    def one_stores_and_removes_blocks(self, data: st.DataObject, hashes: Iterable[BlockHash], tells: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.holders)))
        holder = self.holders[name]
        model = data.draw(st.sampled_from(sorted(holder.held)))
        for hash_ in hashes:
            holder.turn_around(model, hash_)
        if tells:
            self.flush(name)

    def flush(self, name: str) -> None:
        self.on_the_way[name].events += self.holders[name].flush()

    @rule(seconds=st.sampled_from([0.1, 1.0, 3.0, 40.0]))
    def time_passes_and_who_is_asked_answers(self, seconds: float) -> None:
        self.now += seconds
        for name in self.core.dumps_due(self.now):
            self.answer(name)
        self.core.tidy()

    def answer(self, name: str) -> None:
        assert name in self.holders, "a source that is gone is not asked"
        self.flush(name)
        self.on_the_way[name].dumps += self.holders[name].dump()

    @rule(data=st.data(), messages=st.lists(st.tuples(ANY, st.integers(0, 4)), min_size=1, max_size=8))
    def messages_arrive_or_are_lost(self, data: st.DataObject, messages: list[tuple[bool, int]]) -> None:
        """One in five is lost."""
        name = data.draw(st.sampled_from(sorted(self.holders)))
        for is_event, luck in messages:
            channel = self.on_the_way[name].events if is_event else self.on_the_way[name].dumps
            if channel:
                self.arrive(name, channel.popleft(), lost=luck == 0)  # type: ignore[attr-defined]

    @rule(
        name=st.sampled_from(NAMES[1:]),
        changes=st.lists(st.sets(st.sampled_from(BLOCKS), max_size=3), min_size=1, max_size=8),
        lost=st.none() | st.integers(0, 8),
    )
    def blocks_change_while_a_dump_arrives(self, name: str, changes: list[set[BlockHash]], lost: int | None) -> None:
        """Of one that has missed something; and perhaps another event is lost then."""
        self.all_arrives(name)
        holder, way = self.holders[name], self.on_the_way[name]
        for is_lost in (True, False):
            for model in holder.held:
                holder.turn_around(model, BLOCKS[0])
            for event in holder.flush():
                self.arrive(name, event, lost=is_lost)
        self.now += 40.0
        for each in self.core.dumps_due(self.now):
            self.answer(each)
        for number, hashes in enumerate(changes):
            for model in holder.held:
                for hash_ in sorted(hashes):
                    holder.turn_around(model, hash_)
            self.flush(name)
            while way.events:
                self.arrive(name, way.events.popleft(), lost=number == lost)
            if way.dumps:
                self.arrive(name, way.dumps.popleft())
        self.all_arrives(name)

    def arrive(self, name: str, message: KvEvents | KvDump, *, lost: bool = False) -> None:
        if isinstance(message, KvEvents):
            self.on_the_way[name].lost_last[message.source.model] = lost
        if not lost and isinstance(message, KvEvents):
            self.core.record_events(message, self.now)
        elif not lost and isinstance(message, KvDump):
            self.core.record_dump(message, self.now)

    @rule()
    def after_a_while_without_losses_all_is_known(self) -> None:
        """The next event shows a gap, and questions are answered."""
        for name, holder in self.holders.items():
            for model in holder.held:
                holder.turn_around(model, BLOCKS[0])
            self.flush(name)
            self.all_arrives(name)
        for _ in range(4):
            self.now += 40.0
            for name in self.core.dumps_due(self.now):
                self.answer(name)
                self.all_arrives(name)
        assert self.core.dumps_due(self.now + 100.0) == []
        assert all(self.core.is_complete(InstanceId(name)) for name in self.holders)
        self.compare(list(self.holders))

    def all_arrives(self, name: str) -> None:
        way = self.on_the_way[name]
        while way.events or way.dumps:
            self.arrive(name, way.events.popleft() if way.events else way.dumps.popleft())

    @invariant()
    def what_counts_as_known_is_known_exactly(self) -> None:
        """Where the newest event was heard, and the coordinator wants no dump."""
        self.compare(
            [
                name
                for name, holder in self.holders.items()
                if self.core.is_complete(InstanceId(name))
                and not self.on_the_way[name].events
                and not any(self.on_the_way[name].lost_last.get(model, True) for model in holder.held)
                and not any(journal.pending for journal in holder.journals.values())
            ]
        )

    @invariant()
    def only_the_living_are_followed(self) -> None:
        assert len(self.core) <= len(self.holders) + 1
        for hash_ in BLOCKS:
            assert set(self.core.hits(MODELS[0], hash_, 1).engines) <= set(self.holders)

    def compare(self, names: list[str]) -> None:
        """Block by block: a walk would stop at the first that is missing."""
        for hash_, model in product(BLOCKS, MODELS):
            hits = self.core.hits(model, hash_, 1)
            for name in names:
                is_store = name.startswith("kvstore")
                known = NodeId("node-1") in hits.stores if is_store else InstanceId(name) in hits.engines
                assert known == (hash_ in self.holders[name].held.get(model, ())), (name, model)


Knowledge.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestKnowledge = Knowledge.TestCase
