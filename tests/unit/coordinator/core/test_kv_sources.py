"""How a coordinator follows what engines and KV stores hold: gaps, epochs, dumps in parts, sources that are gone."""

from __future__ import annotations

import itertools

import pytest

from services.coordinator.core.kv_sources import (
    DUMP_TIMEOUTS,
    MAX_DUMPS,
    MAX_HELD_EVENTS,
    DumpRequests,
    KvSources,
    PrefixHits,
    Reuse,
)
from shared.blocks import hash_chain
from shared.ids import Incarnation, InstanceId, ModelName, NodeId
from shared.messages.kv_events import KvDump
from shared.packing import pack
from tests.support.engines.coordinator_events import MODEL, holds, source

A = InstanceId("a")
CHAIN = hash_chain(pack(range(16 * 6)), None, 16)


def blocks(*numbers: int) -> bytes:
    return b"".join(CHAIN[number] for number in numbers)


def dump(number: int, *numbers: int, part: int = 0, parts: int = 1, epoch: int = 1, name: str = "a") -> KvDump:
    return KvDump(
        source=source(name), epoch=Incarnation(epoch), number=number, part=part, parts=parts, hashes=blocks(*numbers)
    )


@pytest.fixture
def sources() -> KvSources:
    """One engine, "a", that was asked for a dump."""
    known = KvSources(limit=1000)
    known.follow(A)
    assert known.dumps_due(0.0) == [A]
    return known


def held(sources: KvSources, name: str = "a") -> list[int]:
    return [number for number, hash_ in enumerate(CHAIN) if InstanceId(name) in sources.hits(MODEL, hash_, 1).engines]


def test_events_from_the_beginning_need_no_dump(sources: KvSources) -> None:
    sources.record_events(holds("a", blocks(0, 1)), 0.0)
    sources.record_events(holds("a", blocks(2), number=1, removed=blocks(1)), 0.0)
    assert held(sources) == [0, 2]
    assert sources.is_complete(A)
    assert sources.dumps_due(100.0) == []


def test_a_gap_is_closed_by_a_dump_and_what_is_known_counts_meanwhile(sources: KvSources) -> None:
    sources.record_events(holds("a", blocks(0)), 0.0)
    sources.record_events(holds("a", blocks(2), number=2), 10.0)
    assert sources.gaps == 1
    assert held(sources) == [0, 2]
    assert sources.dumps_due(10.0) == [A]
    sources.record_dump(dump(2, 1, 2), 10.1)
    assert held(sources) == [1, 2]
    assert sources.is_complete(A)


def test_events_behind_the_dump_that_came_before_it_are_taken_in_again(sources: KvSources) -> None:
    sources.record_events(holds("a", blocks(5), number=7), 0.0)
    sources.record_events(holds("a", number=8, removed=blocks(1)), 0.0)
    sources.record_dump(dump(7, 0, 1, 5), 0.0)
    assert held(sources) == [0, 5]
    assert sources.is_complete(A)


def test_a_dump_that_does_not_reach_the_events_heard_is_asked_for_again(sources: KvSources) -> None:
    sources.record_events(holds("a", blocks(5), number=7), 0.0)
    sources.record_dump(dump(5, 0), 0.1)
    assert not sources.is_complete(A)
    assert sources.dumps_due(0.2) == [], "not at once"
    assert sources.dumps_due(10.0) == [A]
    sources.record_dump(dump(7, 0, 5), 10.1)
    assert held(sources) == [0, 5]


def test_more_events_than_are_kept_make_a_dump_useless(sources: KvSources) -> None:
    for number in range(10, 11 + MAX_HELD_EVENTS):
        sources.record_events(holds("a", number=number), 0.0)
    sources.record_dump(dump(9, 0), 0.0)
    assert not sources.is_complete(A)
    sources.record_dump(dump(10 + MAX_HELD_EVENTS, 0), 0.0)
    assert sources.is_complete(A)


def test_an_event_that_comes_after_the_dump_that_holds_it_changes_nothing(sources: KvSources) -> None:
    sources.record_dump(dump(4, 0, 1), 0.0)
    sources.record_events(holds("a", blocks(5), number=3), 0.0)
    sources.record_events(holds("a", number=4, removed=blocks(1)), 0.0)
    assert held(sources) == [0, 1]
    assert sources.is_complete(A)
    assert sources.gaps == 0


def test_a_dump_takes_effect_once_all_its_parts_are_there(sources: KvSources) -> None:
    sources.record_dump(dump(3, 0, part=0, parts=2), 0.0)
    assert held(sources) == []
    sources.record_dump(dump(3, 1, part=1, parts=2), 0.0)
    assert held(sources) == [0, 1]


def test_what_happens_while_a_dump_arrives_is_known_when_it_is_there(sources: KvSources) -> None:
    """However long that takes: nothing is kept of the events but what they say."""
    sources.record_dump(dump(3, 0, 1, part=0, parts=3), 0.0)
    sources.record_events(holds("a", blocks(5), number=4, removed=blocks(0, 2)), 0.0)
    sources.record_dump(dump(3, 2, 3, part=1, parts=3), 0.0)
    for number in range(5, 6 + 2 * MAX_HELD_EVENTS):
        sources.record_events(holds("a", number=number), 0.0)
    sources.record_events(holds("a", blocks(2), number=number + 1, removed=blocks(4)), 0.0)
    assert held(sources) == [2, 5], "what was known goes on to count"
    sources.record_dump(dump(3, 4, part=2, parts=3), 0.0)
    assert held(sources) == [1, 2, 3, 5]
    assert sources.is_complete(A)
    sources.record_events(holds("a", number=number + 2, removed=blocks(1)), 0.0)
    assert held(sources) == [2, 3, 5]
    assert sources.gaps == 0


def test_an_event_that_is_lost_while_a_dump_arrives_makes_it_useless(sources: KvSources) -> None:
    sources.record_dump(dump(3, 0, part=0, parts=2), 0.0)
    sources.record_events(holds("a", number=5), 0.0)
    sources.record_dump(dump(3, 1, part=1, parts=2), 0.0)
    assert not sources.is_complete(A)
    assert sources.dumps_due(10.0) == [A]


def test_nothing_is_kept_of_a_source_that_has_yet_to_be_asked() -> None:
    """In a large fleet a newcomer waits for the dumps of most."""
    known = KvSources(limit=1000)
    known.follow(A)
    known.record_events(holds("a", blocks(0), number=7), 0.0)
    assert known.dumps_due(0.0) == [A]
    known.record_dump(dump(6, 1), 0.0)
    assert not known.is_complete(A), "the event behind it came before the request, and so before the dump was made"
    known.record_dump(dump(7, 0, 1), 0.1)
    assert known.is_complete(A)


@pytest.mark.parametrize(
    "second",
    [
        dump(3, 2, part=2, parts=3),
        dump(4, 1, part=1, parts=3),
        dump(3, 1, part=1, parts=3, epoch=2),
    ],
)
def test_a_dump_with_a_part_missing_or_of_another_is_dropped(sources: KvSources, second: KvDump) -> None:
    sources.record_dump(dump(3, 0, part=0, parts=3), 0.0)
    sources.record_dump(second, 0.0)
    sources.record_dump(dump(3, 2, part=2, parts=3), 0.0)
    assert held(sources) == []
    assert not sources.is_complete(A)


def test_a_new_epoch_begins_with_nothing(sources: KvSources) -> None:
    sources.record_events(holds("a", blocks(0, 1)), 0.0)
    sources.record_events(holds("a", blocks(2), epoch=2), 1.0)
    assert held(sources) == [2]
    assert sources.is_complete(A)


def test_a_new_epoch_of_which_the_beginning_was_missed_is_asked_for(sources: KvSources) -> None:
    sources.record_events(holds("a", blocks(0, 1)), 0.0)
    sources.record_events(holds("a", blocks(2), epoch=2, number=5), 1.0)
    assert held(sources) == [2]
    assert sources.dumps_due(1.0) == [A]
    sources.record_dump(dump(5, 2, 3, epoch=2), 1.0)
    assert held(sources) == [2, 3]


def test_who_does_not_answer_is_asked_ever_less(sources: KvSources) -> None:
    asked = [seconds for seconds in range(1, 200) if sources.dumps_due(float(seconds))]
    assert asked == [2, 6, 14, 30, 62, 94, 126, 158, 190]
    assert max(b - a for a, b in itertools.pairwise(asked)) == DUMP_TIMEOUTS.longest


def test_a_source_that_is_gone_holds_nothing_and_one_not_known_to_live_is_ignored(sources: KvSources) -> None:
    sources.record_events(holds("a", blocks(0)), 0.0)
    sources.forget(A)
    assert held(sources) == []
    assert len(sources) == 0
    sources.record_events(holds("a", blocks(1), number=1), 0.0)
    sources.record_dump(dump(1, 1), 0.0)
    assert len(sources) == 0
    assert sources.dumps_due(1000.0) == []


def test_engines_and_stores_are_kept_apart_and_so_are_models(sources: KvSources) -> None:
    sources.follow(InstanceId("kvstore-n1"))
    sources.record_events(holds("a", blocks(0), node="n1"), 0.0)
    sources.record_events(holds("kvstore-n1", blocks(0, 1)), 0.0)
    assert sources.hits(MODEL, blocks(0, 1, 2), 3) == PrefixHits({A: 1}, {NodeId("n1"): 2})
    assert sources.hits(MODEL, blocks(0, 1, 2), 1) == PrefixHits({A: 1}, {NodeId("n1"): 1})
    assert sources.hits(ModelName("another"), blocks(0, 1, 2), 3) == PrefixHits({}, {})


N1, N2 = NodeId("n1"), NodeId("n2")


def test_what_each_engine_need_not_compute_is_counted_once_where_it_is_nearest() -> None:
    found = PrefixHits({A: 4}, {N1: 6, N2: 9})
    b = InstanceId("b")
    engines = [(A, N1), (A, N2), (A, None), (b, N1), (b, N2), (b, None), (InstanceId("c"), N1)]
    assert found.reuses(engines) == [
        Reuse(device=4, stored=2, remote=3, remote_node=N2),
        Reuse(device=4, stored=5),
        Reuse(device=4),
        Reuse(stored=6, remote=3, remote_node=N2),
        Reuse(stored=9),
        Reuse(),
        Reuse(stored=6, remote=3, remote_node=N2),
    ]


def test_of_stores_that_hold_equally_much_the_first_by_name_is_asked() -> None:
    found = PrefixHits({}, {N2: 5, N1: 5})
    assert found.reuses([(A, NodeId("n3"))]) == [Reuse(remote=5, remote_node=N1)]
    assert PrefixHits({}, {}).reuses([(A, N1)]) == [Reuse()]


def test_a_block_is_worth_less_the_farther_it_is_away() -> None:
    assert Reuse(device=1, stored=2, remote=4, remote_node=N1).worth(0.5) == 1 + 0.5 * (2 + 0.5 * 4)


MANY = [InstanceId(f"engine-{number:04}") for number in range(100)]


def needing_many() -> DumpRequests:
    requests = DumpRequests()
    for name in MANY:
        requests.need(name)
    return requests


def test_dumps_of_a_large_fleet_are_requested_some_at_a_time() -> None:
    requests, asked = needing_many(), list[InstanceId]()
    while due := requests.due(0.1):
        assert len(due) <= MAX_DUMPS
        assert requests.due(0.1) == [], "as many as may be awaited"
        asked += due
        for name in due:
            requests.received_part(name, 0.1)
            requests.met(name, 0.1)
    assert asked == MANY
    assert not requests.needed


def test_a_source_that_does_not_answer_keeps_others_waiting_for_one_timeout() -> None:
    requests = needing_many()
    silent = requests.due(0.0)
    assert requests.due(1.9) == []
    answering = requests.due(2.0)
    assert answering == MANY[MAX_DUMPS : 2 * MAX_DUMPS]
    for name in answering[:-1]:
        requests.met(name, 2.1)
    requests.received_part(answering[-1], 2.1)
    others = requests.due(2.2)
    assert not {*others} & {*silent, *answering}
    assert len(others) == MAX_DUMPS - 1, "one dump is arriving"


def test_one_that_is_gone_is_not_asked_and_asked_at_once_when_it_is_back() -> None:
    requests = DumpRequests()
    requests.need(A)
    assert requests.due(0.0) == [A]
    requests.forget(A)
    assert requests.due(100.0) == []
    requests.need(A)
    assert requests.due(0.1) == [A]
    assert requests.due(0.2) == []
