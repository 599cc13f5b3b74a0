"""A node's store over real arenas, question by question."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Iterator, Sequence
from pathlib import Path

import pytest

from kvstore.arena.directory import DirectoryTaken, DirectoryUnusable, StoreDirectory
from kvstore.arena.in_flight_block import BlockShape, InFlightBlock, is_sound
from kvstore.arena.owned_arena import OwnedArena
from kvstore.core.layout import PAGE, geometry
from kvstore.core.memory_budget import MEMORY_RETRY_SECONDS
from kvstore.node import node_store
from kvstore.node.node_store import NodeStore
from shared.blocks import BlockHash
from shared.ids import LeaseId
from shared.messages.kvstore import (
    NO_SLOT,
    Attach,
    AttachReply,
    Commit,
    Find,
    FindReply,
    KvLayout,
    KvStoreRefusal,
    Release,
    Reserve,
)
from shared.telemetry.metrics import service_registry
from tests.support.kv.arenas import (
    LARGE,
    MODEL,
    SMALL,
    Client,
    Clock,
    chain,
    contents,
    holds,
    name_of,
    new_directory,
    remove,
    slots_of,
    store_in,
    write,
    write_cell,
)
from tests.support.kv.random_blocks import carried
from tests.support.kv.store_invariants import check

FIVE_BLOCKS = 7 * PAGE
"""File header, slot headers, and five pages."""


@pytest.fixture
def directory() -> Iterator[Path]:
    directory = new_directory()
    yield directory
    remove(directory)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(directory: Path, clock: Clock) -> Iterator[NodeStore]:
    store = store_in(directory, FIVE_BLOCKS, clock)
    yield store
    check(store.core)
    store.close()


class Below:
    """A tier that takes everything."""

    def __init__(self) -> None:
        self.taken: list[tuple[str, BlockHash, bytes]] = []

    async def run(self) -> None: ...

    def offer(self, layout: str, block: InFlightBlock) -> bool:
        self.taken.append((layout, block.hash, bytes(block.payload)))
        return True

    async def fetch(
        self, layout: str, hashes: Sequence[BlockHash], shape: BlockShape
    ) -> AsyncGenerator[InFlightBlock, None]:
        return
        yield


def again(store: NodeStore, directory: Path, clock: Clock, memory: int = FIVE_BLOCKS) -> NodeStore:
    """The store after `kill -9` and a start: all that it knew is lost."""
    store.close()
    return store_in(directory, memory, clock, life=2)


def numbers(slots: list[tuple[int, int]]) -> list[int]:
    return [slot for slot, _ in slots]


# ---- attaching


def test_a_layout_gets_as_many_slots_as_all_the_memory_holds(store: NodeStore, directory: Path) -> None:
    engine = Client(store)
    assert engine.attached.slots == 5
    assert (directory / engine.attached.path).stat().st_size == FIVE_BLOCKS
    assert Client(store, instance="engine-2").attached == engine.attached


def test_a_layout_that_does_not_fit_or_is_unknown_is_not_served(store: NodeStore) -> None:
    huge = KvLayout(model="m", dtype="float32", layers=4, kv_heads=8, head_dim=64)
    refused = store.attach(Attach(huge, MODEL))
    assert isinstance(refused, KvStoreRefusal)
    assert "no block" in refused.reason
    odd = store.attach(Attach(KvLayout(model="m", dtype="int3", layers=1, kv_heads=1, head_dim=1), MODEL))
    assert isinstance(odd, KvStoreRefusal)
    assert "int3" in odd.reason


@pytest.mark.parametrize("absurd", [{"layers": 0}, {"kv_heads": -1}, {"head_dim": 0}, {"layers": 2**40}])
def test_a_layout_that_cannot_be_is_not_served(store: NodeStore, absurd: dict[str, int]) -> None:
    sizes = {"layers": 1, "kv_heads": 1, "head_dim": 8} | absurd
    assert isinstance(store.attach(Attach(KvLayout(model="m", dtype="float16", **sizes), MODEL)), KvStoreRefusal)


def test_a_question_that_makes_no_sense_harms_nobody(store: NodeStore) -> None:
    engine, names = Client(store), chain("a", 2)
    engine.save(names)
    to = {"layout": engine.layout, "owner": engine.owner, "lease": LeaseId(99)}
    a, b = names
    for hashes, parents, tokens in ((a + b"odd", a, b"\x10"), (a + b, a, b"\x10\x10"), (a, a, b"\x11"), (a, a, b"\0")):
        answer = store.reserve(Reserve(**to, hashes=hashes, parents=parents, tokens=tokens))
        assert answer == KvStoreRefusal("hashes, parents and tokens do not fit together") or hashes == a + b"odd"
    found = store.find(Find(**to, hashes=a + b + b"odd", deadline=-1.0))
    assert isinstance(found, FindReply)
    assert len(slots_of(found)) == 2
    store.release(Release(**to, drop=b"odd"))
    assert engine.found(names) == 2
    assert store.report().pinned == 0


def test_questions_about_a_layout_that_nobody_attached_are_not_served(store: NodeStore) -> None:
    engine = Client(store)
    unknown = {"layout": "another", "owner": engine.owner, "lease": LeaseId(1)}
    for answer in (
        store.find(Find(**unknown, hashes=b"", deadline=0.01)),
        store.reserve(Reserve(**unknown, hashes=b"", parents=b"", tokens=b"")),
        store.commit(Commit(**unknown)),
    ):
        assert answer == KvStoreRefusal("layout another is not attached")


def test_the_layout_that_nobody_uses_goes_for_one_too_many(store: NodeStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_store, "MAX_LAYOUTS", 2)
    first, second = (KvLayout(model=m, dtype="float16", layers=1, kv_heads=1, head_dim=8) for m in "ab")
    used, unused = Client(store, first), Client(store, second)
    used.save(chain("used", 1))
    Client(store)
    assert store.arena_of(unused.layout) is None
    assert not (store.arena_of(used.layout) or unused.arena).path.with_name(unused.attached.path).exists()
    assert used.found(chain("used", 1)) == 1
    lease, _ = used.find(chain("used", 1))
    Client(store).reserve(chain("small", 1))
    assert isinstance(store.attach(Attach(second, MODEL)), KvStoreRefusal), "both are in use"
    used.release(lease)
    assert isinstance(store.attach(Attach(second, MODEL)), AttachReply)


# ---- writing and finding


def test_blocks_are_found_once_every_head_is_written_and_committed(store: NodeStore) -> None:
    engine, names = Client(store), chain("a", 2)
    lease, reserved = engine.reserve(names)
    for name, (slot, _) in zip(names, slots_of(reserved), strict=True):
        write(engine.arena, slot, name)
        assert engine.found(names) == 0
    assert engine.commit(lease) == 2
    assert engine.found(names) == 2


def test_a_block_that_lacks_a_head_is_not_shown(store: NodeStore) -> None:
    engine, names = Client(store), chain("a", 3)
    lease, reserved = engine.reserve(names)
    slots = numbers(slots_of(reserved))
    write(engine.arena, slots[0], names[0])
    write_cell(engine.arena, slots[1], names[1], 0)
    write(engine.arena, slots[2], names[2])
    assert engine.commit(lease) == 2
    assert engine.found(names) == 1
    assert engine.found(names[2:]) == 1
    assert store.report().reserved == 0


def test_the_run_ends_at_the_first_block_that_is_missing(store: NodeStore) -> None:
    engine, names = Client(store), chain("a", 4)
    engine.save([names[0], names[1], names[3]], parents=[bytes(16), names[0], names[2]])
    assert engine.found(names) == 2
    assert engine.found(names[3:]) == 1


def test_what_is_there_or_being_written_gets_no_slot(store: NodeStore) -> None:
    engine, other, names = Client(store), Client(store, instance="engine-2"), chain("a", 3)
    engine.save(names[:1])
    engine.reserve(names[1:2], parents=[names[0]])
    _, reserved = other.reserve(names)
    assert [slot == NO_SLOT for slot, _ in slots_of(reserved)] == [True, True, False]
    _, twice = other.reserve([name_of("b"), name_of("b")])
    assert [slot == NO_SLOT for slot, _ in slots_of(twice)] == [False, True]


def test_a_lease_that_is_over_commits_nothing(store: NodeStore) -> None:
    engine = Client(store)
    lease, reserved = engine.reserve(chain("a", 1))
    write(engine.arena, slots_of(reserved)[0][0], chain("a", 1)[0])
    engine.release(lease)
    assert engine.commit(lease) == 0
    assert engine.found(chain("a", 1)) == 0


def test_what_was_released_before_it_was_asked_for_reserves_and_pins_nothing(store: NodeStore, clock: Clock) -> None:
    """A store that stood still reads releases and requests from two queues, and may take the release first."""
    engine, names = Client(store), chain("a", 2)
    engine.save(names)
    lease = next(engine.leases)
    engine.release(lease)
    _, reserved = engine.reserve(chain("b", 1), lease=lease)
    assert [slot for slot, _ in slots_of(reserved)] == [NO_SLOT]
    find = Find(layout=engine.layout, owner=engine.owner, lease=lease, hashes=b"".join(names), deadline=0.01)
    found = store.find(find)
    assert isinstance(found, FindReply)
    assert slots_of(found) == []
    assert (store.report().reserved, store.report().pinned) == (0, 0)
    clock.now += store.core.leases.seconds
    store.time_passed()
    assert not store.core.leases._released


def test_blocks_that_are_dropped_go_with_their_last_reader(store: NodeStore) -> None:
    engine, names = Client(store), chain("handed over", 1)
    lease, reserved = engine.reserve(names, tokens=7)
    write(engine.arena, slots_of(reserved)[0][0], names[0])
    engine.commit(lease)
    first, _ = engine.find(names)
    second, _ = engine.find(names)
    engine.release(first, drop=names)
    assert engine.found(names) == 0, "nobody finds it any more"
    assert store.report().committed == 1, "but somebody reads it"
    engine.release(second)
    assert store.report().committed == 0


def test_only_what_the_lease_pins_can_be_dropped(store: NodeStore) -> None:
    engine, names = Client(store), chain("a", 1)
    engine.save(names)
    lease, _ = engine.find(chain("b", 1))
    engine.release(lease, drop=names)
    assert engine.found(names) == 1


# ---- room


def test_the_end_of_the_chain_that_was_not_used_for_longest_goes_first(directory: Path, clock: Clock) -> None:
    below = Below()
    store = store_in(directory, FIVE_BLOCKS, clock, tier=below)
    engine, old, new = Client(store), chain("old", 3), chain("new", 2)
    engine.save(old)
    engine.save(new)
    engine.found(old)
    assert engine.save(chain("newest", 3)) == 3
    assert [name for _, name, _ in below.taken] == [new[1], new[0], old[2]]
    size = engine.arena.geometry.cell_bytes
    assert below.taken[0][2] == contents(new[1], 0, size) + contents(new[1], 1, size)
    assert engine.found(old) == 2


def test_partial_blocks_are_offered_to_nobody(directory: Path, clock: Clock) -> None:
    below = Below()
    store = store_in(directory, FIVE_BLOCKS, clock, tier=below)
    engine, names = Client(store), chain("handed over", 1)
    lease, reserved = engine.reserve(names, tokens=15)
    write(engine.arena, slots_of(reserved)[0][0], names[0])
    engine.commit(lease)
    assert engine.save(chain("a", 5)) == 5
    assert below.taken == []
    assert engine.found(names) == 0


def test_what_is_read_or_written_is_never_evicted(store: NodeStore) -> None:
    engine, names = Client(store), chain("read", 2)
    engine.save(names)
    pinned, _ = engine.find(names)
    writing, _ = engine.reserve(chain("written", 2))
    _, reserved = engine.reserve(chain("new", 3))
    assert [slot == NO_SLOT for slot, _ in slots_of(reserved)] == [False, True, True]
    engine.release(pinned)
    assert engine.save(chain("newer", 2)) == 2
    assert engine.found(names) == 0
    engine.release(writing)


def test_a_block_does_not_push_out_the_one_before_it(store: NodeStore) -> None:
    engine, names = Client(store), chain("a", 5)
    for at in range(5):
        engine.save(names[at : at + 1], parents=[names[at - 1] if at else bytes(16)])
    _, reserved = engine.reserve([name_of("sixth")], parents=[names[4]])
    assert numbers(slots_of(reserved)) == [NO_SLOT]
    assert engine.found(names) == 5


def test_a_reservation_evicts_no_more_than_a_bounded_number(store: NodeStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.core.store.MAX_EVICTIONS", 2)
    engine = Client(store)
    engine.save(chain("old", 5))
    _, reserved = engine.reserve(chain("new", 4))
    assert [slot == NO_SLOT for slot, _ in slots_of(reserved)] == [False, False, True, True]
    assert engine.found(chain("old", 5)) == 3


def test_layouts_share_one_budget_and_memory_goes_where_it_is_needed(store: NodeStore, directory: Path) -> None:
    small, old, new = Client(store, SMALL), chain("old", 5), chain("new", 1)
    assert small.save(old) == 5
    large = Client(store, LARGE)
    assert large.save(new) == 1
    assert small.found(old) == 1, "two pages of headers and two of payload"
    assert store.core.budget.memory <= FIVE_BLOCKS
    assert _memory_of(directory) <= store.core.budget.memory
    assert small.save(chain("small", 5)) == 3
    assert large.found(new) == 0
    assert _memory_of(directory) <= FIVE_BLOCKS


def test_a_reader_that_comes_late_sees_another_generation_than_its_own(store: NodeStore, clock: Clock) -> None:
    small, name = Client(store, SMALL), chain("read late", 1)
    small.save(name)
    _, found = small.find(name)
    [(slot, generation)] = slots_of(found)
    clock.now += 11
    store.time_passed()
    assert small.arena.generation(slot) == generation
    assert holds(small.arena, slot, name[0]), "until somebody needs the memory"
    large = Client(store, LARGE)
    for n in range(3):
        large.save(chain(("large", n), 1))
    assert not holds(small.arena, slot, name[0])
    assert small.arena.generation(slot) != generation


def test_hashes_of_one_layout_mean_nothing_in_another(store: NodeStore) -> None:
    small, large, names = Client(store, SMALL), Client(store, LARGE), chain("same tokens", 1)
    small.save(names)
    assert large.found(names) == 0
    assert large.save(names) == 1
    assert small.found(names) == large.found(names) == 1


def test_memory_that_the_system_does_not_have_is_not_written_to(
    store: NodeStore, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, names = Client(store), chain("a", 2)
    engine.save(names)
    monkeypatch.setattr(OwnedArena, "take_memory", lambda arena, *slots: 0)
    pinned, _ = engine.find(names)
    lease, reserved = engine.reserve(chain("b", 1))
    assert slots_of(reserved) == [(NO_SLOT, 0)]
    assert engine.commit(lease) == 0
    assert store.report().reserved == 0
    engine.release(pinned)
    assert engine.save(chain("b", 1)) == 1, "what there is already serves instead"
    assert engine.found(names) == 1
    clock.now += MEMORY_RETRY_SECONDS
    store.time_passed()
    assert engine.save(chain("c", 2)) == 2, "at once, too"
    assert store.report().committed == 2
    monkeypatch.undo()
    clock.now += MEMORY_RETRY_SECONDS
    store.time_passed()
    assert engine.save(chain("d", 3)) == 3
    assert engine.found(chain("c", 2)) == 2, "there is more again"


def test_memory_is_taken_ahead_of_its_use_and_within_the_budget(directory: Path, clock: Clock) -> None:
    store = store_in(directory, 20 * PAGE, clock)
    engine, arena = Client(store), store.arena_of(Client(store).layout)
    assert arena is not None
    ahead = [store.prepare(engine.layout) for _ in range(6)]
    assert ahead == [0, 1, 2, 3, 4, None], "a quarter of the budget"
    check(store.core)
    for slot in (0, 1, 2, 3):
        assert arena.take_memory(slot)
        store.prepared(arena, slot, True)
    store.prepared(arena, 4, False)
    before = _memory_of(directory)
    assert engine.save(chain("a", 4)) == 4
    assert _memory_of(directory) == before, "it was there"
    assert store.prepare(engine.layout) is None, "the system had no more"
    assert store.prepare("unknown") is None
    clock.now += MEMORY_RETRY_SECONDS
    store.time_passed()
    assert store.prepare(engine.layout) == 4
    store.close()


# ---- leases


def test_pins_and_reservations_run_out(store: NodeStore, clock: Clock) -> None:
    engine = Client(store)
    engine.save(chain("a", 1))
    engine.find(chain("a", 1))
    _, reserved = engine.reserve(chain("b", 1))
    [(slot, generation)] = slots_of(reserved)
    clock.now += 10
    store.time_passed()
    assert store.report().pinned == 0
    assert store.report().reserved == 1, "its writer may still write: it rests"
    assert engine.arena.generation(slot) != generation, "and can see that it should not"
    clock.now += 10
    store.time_passed()
    assert store.report().reserved == 0


def test_what_a_dead_engine_held_is_given_back_and_others_keep_theirs(store: NodeStore, clock: Clock) -> None:
    dying, other = Client(store), Client(store, instance="engine-2")
    other.save(chain("a", 2))
    dying.find(chain("a", 2))
    dying.reserve(chain("b", 1))
    mine, _ = other.find(chain("a", 1))
    store.owner_gone(dying.owner)
    assert store.report().pinned == 1
    _, reserved = other.reserve(chain("b", 1))
    assert slots_of(reserved)[0][0] != NO_SLOT, "the block may be written by somebody else at once"
    other.release(mine)
    assert store.report().pinned == 0


def test_the_next_life_of_an_engine_keeps_its_leases(store: NodeStore) -> None:
    before, after = Client(store, life=1), Client(store, life=2)
    after.save(chain("a", 1))
    after.find(chain("a", 1))
    store.owner_gone(before.owner)
    assert store.report().pinned == 1


# ---- restarts


def test_a_store_that_was_killed_serves_what_was_committed(store: NodeStore, directory: Path, clock: Clock) -> None:
    engine, names = Client(store), chain("a", 3)
    engine.save(names)
    engine.reserve(chain("b", 1))
    store = again(store, directory, clock)
    assert isinstance(store.find(_find(engine, names)), KvStoreRefusal), "until it is told the model's name"
    back = Client(store)
    assert back.attached == engine.attached
    assert back.found(names) == 3
    assert holds(engine.arena, 0, names[0]), "who has it mapped sees the same memory"
    assert back.found(chain("b", 1)) == 0
    store.close()


def test_slots_that_were_being_written_rest_after_a_restart(store: NodeStore, directory: Path, clock: Clock) -> None:
    _, reserved = Client(store).reserve(chain("a", 1))
    [(slot, generation)] = slots_of(reserved)
    store = again(store, directory, clock)
    back = Client(store)
    assert store.report().reserved == 1
    assert back.arena.generation(slot) > generation
    assert back.save(chain("b", 5)) == 4
    clock.now += 10
    store.time_passed()
    assert store.report().reserved == 0
    store.close()


def test_a_spoiled_block_is_dropped_at_its_first_use(store: NodeStore, directory: Path, clock: Clock) -> None:
    engine, names = Client(store), chain("a", 3)
    engine.save(names)
    engine.arena.cells(1, 1, 1)[7] ^= 1
    store = again(store, directory, clock)
    back = Client(store)
    assert back.found(names) == 1
    assert store.report().committed == 2
    assert back.found(names[2:]) == 1
    store.close()


def test_checksums_are_compared_once_and_only_as_long_as_the_asker_waits(
    store: NodeStore, directory: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, names = Client(store), chain("a", 4)
    engine.save(names)
    store = again(store, directory, clock)
    back = Client(store)
    looked_at: list[int] = []

    def sound(arena: OwnedArena, slot: int) -> bool:
        looked_at.append(slot)
        clock.now += 0.002
        return True

    monkeypatch.setattr(OwnedArena, "is_sound", sound)
    _, found = back.find(names, deadline=0.01)
    assert len(slots_of(found)) == 3, "half of the deadline"
    _, found = back.find(names, deadline=0.01)
    assert len(slots_of(found)) == 4
    back.find(names)
    assert looked_at == [0, 1, 2, 3]
    store.close()


def test_what_nobody_asks_for_is_compared_meanwhile(store: NodeStore, directory: Path, clock: Clock) -> None:
    engine, names = Client(store), chain("a", 3)
    engine.save(names)
    engine.arena.cells(2, 0, 1)[0] ^= 1
    store = again(store, directory, clock)
    assert not store.check_some(1.0)
    assert store.report().committed == 2
    assert all(block.checked for block in store.core.budget.tables[engine.layout].blocks.values())
    store.close()


def test_the_order_of_use_and_the_chains_outlive_the_store(store: NodeStore, directory: Path, clock: Clock) -> None:
    engine, first, second = Client(store), chain("first", 2), chain("second", 3)
    engine.save(first)
    engine.save(second)
    engine.found(first)
    store = again(store, directory, clock)
    back = Client(store)
    assert back.save(chain("new", 2)) == 2, "in place of the second one's last two"
    assert back.save(chain("newest", 2)) == 2, "and of what is left of it, and the first one's last"
    assert [back.found(names) for names in (first, second, chain("new", 2))] == [1, 0, 2]
    store.close()


def test_freed_memory_is_given_back_at_a_restart(store: NodeStore, directory: Path, clock: Clock) -> None:
    engine, name = Client(store), chain("a", 1)
    engine.save(name)
    lease, found = engine.find(name)
    [(slot, generation)] = slots_of(found)
    engine.release(lease, drop=name)
    before = _memory_of(directory)
    store = again(store, directory, clock)
    assert _memory_of(directory) < before
    assert engine.arena.generation(slot) != generation, "late readers can tell"
    store.close()


def test_another_size_of_memory_begins_anew(store: NodeStore, directory: Path, clock: Clock) -> None:
    engine, names = Client(store), chain("a", 1)
    engine.save(names)
    store = again(store, directory, clock, memory=2 * FIVE_BLOCKS)
    back = Client(store)
    assert back.attached.arena != engine.attached.arena
    assert back.attached.slots == 12
    assert back.found(names) == 0
    assert holds(engine.arena, 0, names[0]), "who maps the old file keeps it"
    store.close()


def test_files_that_are_no_arenas_are_removed(store: NodeStore, directory: Path, clock: Clock) -> None:
    (directory / "nonsense.arena").write_bytes(b"nonsense")
    (directory / "half.making").write_bytes(b"half")
    whole = OwnedArena.create(directory / "misnamed.arena", Client(store).attached.arena, LARGE, 2)
    assert geometry(LARGE, 2) == whole.geometry
    store = again(store, directory, clock)
    assert sorted(path.name for path in directory.iterdir()) == ["bandwidth", Client(store).attached.path, "lock"]
    store.close()


def test_two_stores_never_work_in_one_directory(store: NodeStore, directory: Path) -> None:
    with pytest.raises(DirectoryTaken, match=str(directory)):
        StoreDirectory(directory)
    store.close()
    StoreDirectory(directory).close()
    (directory / "file").touch()
    with pytest.raises(DirectoryUnusable, match="Not a directory"):
        StoreDirectory(directory / "file" / "below")


# ---- lower tiers and other nodes


def test_a_block_from_elsewhere_lands_and_is_found(store: NodeStore) -> None:
    engine, name = Client(store), name_of("from afar")
    shape = engine.arena.shape
    payload = b"".join(contents(name, head, shape.cell_bytes) for head in range(shape.cells))
    block = carried(name, bytes(16), payload, shape)
    assert store.land(engine.layout, block)
    assert store.land(engine.layout, block), "it is there already"
    assert engine.found([name]) == 1
    assert not store.land("unknown", block)
    pinned, _ = engine.find([name])
    engine.reserve(chain("written", 4))
    assert not store.land(engine.layout, block._replace(hash=name_of("no room")))
    engine.release(pinned)


def test_a_loan_pins_a_checked_run(store: NodeStore, directory: Path, clock: Clock) -> None:
    engine, names = Client(store), chain("a", 3)
    engine.save(names)
    engine.arena.cells(2, 0, 1)[0] ^= 1
    store = again(store, directory, clock)
    back = Client(store)
    assert store.lend("unknown", names) is None
    loan = store.lend(back.layout, names)
    assert loan is not None
    with loan as blocks:
        assert [block.hash for block in blocks] == names[:2]
        assert all(is_sound(block, back.arena.shape) for block in blocks)
        assert store.report().pinned == 2
    assert store.report().pinned == 0
    store.close()


# ---- what it tells of itself


def test_the_report_counts_slots_and_blocks(store: NodeStore) -> None:
    engine = Client(store)
    engine.save(chain("a", 2))
    engine.find(chain("a", 1))
    engine.reserve(chain("b", 1))
    store.count(hits=3, lower_hits=1, misses=2)
    report = store.report()
    assert (report.slots, report.committed, report.reserved, report.pinned) == (5, 2, 1, 1)
    assert (report.bytes_used, report.bytes_total) == (3 * PAGE, FIVE_BLOCKS)
    assert (report.hits, report.lower_hits, report.misses) == (3, 1, 2)


def _find(engine: Client, names: list[BlockHash]) -> Find:
    return Find(layout=engine.layout, owner=engine.owner, lease=LeaseId(99), hashes=b"".join(names), deadline=0.01)


def _memory_of(directory: Path) -> int:
    return sum(os.stat(path).st_blocks * 512 for path in directory.glob("*.arena"))


def test_what_comes_and_goes_is_counted(store: NodeStore, directory: Path, clock: Clock) -> None:
    before = {name: _count(name, labels) for name, labels in COUNTED.items()}
    engine = Client(store)
    engine.save(chain("a", 5))
    clock.now += 100
    engine.save(chain("b", 2))
    lease, reserved = engine.reserve(chain("c", 6))
    assert [slot for slot, _ in slots_of(reserved)].count(NO_SLOT) == 1
    write_cell(engine.arena, slots_of(reserved)[0][0], chain("c", 1)[0], 0)
    engine.commit(lease)
    engine.reserve(chain("d", 1))
    store.owner_gone(engine.owner)
    store.count(hits=5, lower_hits=2, misses=3)
    assert {name: _count(name, labels) - before[name] for name, labels in COUNTED.items()} == {
        "baton_kvstore_hits_total": 3,
        "baton_kvstore_misses_total": 3,
        "baton_kvstore_stored_total": 7,
        "baton_kvstore_unwritten_total": 5,
        "baton_kvstore_refused_total": 1,
        "baton_kvstore_evictions_total": 7,
        "baton_kvstore_evicted_age_seconds_sum": 5 * 100,
        "baton_kvstore_abandoned_total": 1,
    }


COUNTED = {
    "baton_kvstore_hits_total": {"tier": "arena"},
    "baton_kvstore_misses_total": {},
    "baton_kvstore_stored_total": {"source": "engine"},
    "baton_kvstore_unwritten_total": {},
    "baton_kvstore_refused_total": {},
    "baton_kvstore_evictions_total": {"kept": "no"},
    "baton_kvstore_evicted_age_seconds_sum": {},
    "baton_kvstore_abandoned_total": {},
}


def _count(name: str, labels: dict[str, str]) -> float:
    return service_registry("kvstore").get_sample_value(name, labels) or 0.0
