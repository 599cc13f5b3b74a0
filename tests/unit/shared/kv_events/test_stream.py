"""What a holder of cached blocks tells of them: coalesced, numbered, cut to size."""

from __future__ import annotations

from hashlib import blake2b

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.blocks import BlockHash, split_hashes
from shared.ids import Incarnation, InstanceId, ModelName
from shared.kv_events.stream import MAX_HASHES, KvEventStream
from shared.messages.kv_events import KvDump, KvEvents, KvSource

SOURCE = KvSource(instance=InstanceId("engine-1"), model=ModelName("m"), node=None)
EPOCH = Incarnation(7)


def name(number: int) -> BlockHash:
    return BlockHash(blake2b(b"%d" % number, digest_size=16).digest())


def journal() -> KvEventStream:
    return KvEventStream(SOURCE, EPOCH)


def event(number: int, stored: bytes = b"", removed: bytes = b"") -> KvEvents:
    return KvEvents(source=SOURCE, epoch=EPOCH, number=number, stored=stored, removed=removed, cleared=number == 0)


def test_an_epoch_begins_with_a_cleared_event_even_when_nothing_is_held() -> None:
    told = journal()
    assert told.flush() == [event(0)]
    assert told.flush() == []


def test_events_are_numbered_without_gaps_and_one_says_what_has_gone_and_what_has_come() -> None:
    told = journal()
    told.changes.stored(name(1))
    assert told.flush() == [event(0), event(1, stored=name(1))]
    told.changes.stored(name(2))
    told.changes.removed(name(1))
    assert told.flush() == [event(2, stored=name(2), removed=name(1))]


def test_what_comes_and_goes_between_two_flushes_is_not_mentioned() -> None:
    told = journal()
    told.changes.stored(name(1))
    told.flush()
    told.changes.stored(name(2))
    told.changes.removed(name(2))
    told.changes.removed(name(1))
    told.changes.stored(name(1))
    assert not told.pending
    assert told.flush() == []


def test_large_changes_and_dumps_are_cut_to_messages_of_bounded_size() -> None:
    told = journal()
    many = [name(i) for i in range(2 * MAX_HASHES + 1)]
    for hash_ in many:
        told.changes.stored(hash_)
    events = told.flush()
    assert [len(e.stored) // 16 for e in events] == [0, MAX_HASHES, MAX_HASHES, 1]
    dump = list(told.dump(many))
    assert [(d.part, d.parts, d.number, len(d.hashes) // 16) for d in dump] == [
        (0, 3, 3, MAX_HASHES),
        (1, 3, 3, MAX_HASHES),
        (2, 3, 3, 1),
    ]


def test_what_goes_and_what_comes_shares_messages_of_bounded_size() -> None:
    told = journal()
    old, new = [name(i) for i in range(MAX_HASHES + 1)], [name(-1 - i) for i in range(MAX_HASHES + 1)]
    for hash_ in old:
        told.changes.stored(hash_)
    told.flush()
    for gone, come in zip(old, new, strict=True):
        told.changes.removed(gone)
        told.changes.stored(come)
    events = told.flush()
    counts = [(len(e.removed) // 16, len(e.stored) // 16) for e in events]
    assert counts == [(MAX_HASHES, 0), (1, MAX_HASHES - 1), (0, 2)]
    assert b"".join(e.removed for e in events) == b"".join(old)
    assert b"".join(e.stored for e in events) == b"".join(new)


def test_a_dump_is_of_the_moment_at_which_it_was_asked_for() -> None:
    told, held = journal(), {name(1): None, name(2): None}
    for hash_ in held:
        told.changes.stored(hash_)
    told.flush()
    dump = told.dump(held)
    del held[name(1)]
    told.changes.removed(name(1))
    told.flush()
    assert [(part.number, part.hashes) for part in dump] == [(1, name(1) + name(2))]


def test_a_dump_of_nothing_is_one_part() -> None:
    told = journal()
    told.flush()
    assert list(told.dump([])) == [KvDump(source=SOURCE, epoch=EPOCH, number=0, part=0, parts=1, hashes=b"")]


def test_a_dump_before_its_events_is_a_bug() -> None:
    with pytest.raises(ValueError, match="flushed"):
        journal().dump([])


@given(st.lists(st.one_of(st.integers(0, 5), st.none()), max_size=60))
def test_replaying_the_events_gives_what_is_held_and_so_does_each_dump(steps: list[int | None]) -> None:
    """An integer turns that block's presence around, None flushes."""
    told, held, replayed = journal(), set[BlockHash](), set[BlockHash]()
    for step in [*steps, None]:
        if step is not None:
            hash_ = name(step)
            (told.changes.removed if hash_ in held else told.changes.stored)(hash_)
            held ^= {hash_}
            continue
        for told_event in told.flush():
            removed, stored = set(split_hashes(told_event.removed)), set(split_hashes(told_event.stored))
            assert removed <= replayed
            assert not stored & replayed
            replayed = (replayed - removed) | stored
        assert replayed == held
        assert set(split_hashes(b"".join(part.hashes for part in told.dump(held)))) == held
