"""Records of resumable streams: copies are never ahead of what continues them, and everything is bounded."""

from __future__ import annotations

from services.gateway.core.stream_records import (
    MAX_STREAM_BYTES,
    GatewayRun,
    StreamRecords,
    newest_attempt,
)
from shared.ids import Attempt, GatewayId, Incarnation, RequestId
from shared.messages.gateway import Delta, KeepStream, StreamOpened, StreamOpening, StreamsGrown

ONE, TWO = (
    GatewayRun(GatewayId("gateway-1"), Incarnation(1)),
    GatewayRun(GatewayId("gateway-2"), Incarnation(2)),
)


def opening(stream: str = "s", choices: int = 1, body: bytes = b"{}") -> StreamOpening:
    return StreamOpening(stream=stream, key="", kind="chat", body=body, choices=choices, seed=7, arrival=0.0)


def delta(position: int, text: str, *, request: str = "s", attempt: int = 1, finish: bool = False) -> Delta:
    tokens = tuple(range(position, position + len(text)))
    return Delta(RequestId(request), Attempt(attempt), position, tokens, text, "stop" if finish else None)


def grown(*deltas: Delta) -> StreamsGrown:
    return StreamsGrown(ONE.gateway, (), deltas)


def copies() -> StreamRecords:
    records = StreamRecords(2**20, 10.0)
    records.keep(KeepStream(ONE.gateway, ONE.incarnation, opening()), 0.0)
    return records


def text(records: StreamRecords, stream: str = "s") -> str:
    record = records.get(stream)
    assert record is not None
    return "".join(each.text for each in record.copy().deltas)


def test_a_copy_stays_behind_where_something_is_missing() -> None:
    records = copies()
    records.grow(grown(delta(0, "ab"), delta(0, "ab"), delta(3, "de"), delta(2, "c"), delta(2, "c")), 1.0)
    assert text(records) == "abc"
    records.grow(grown(delta(3, "d", attempt=4, finish=True), delta(4, "e")), 1.0)
    assert text(records) == "abcd", "nothing follows the end"
    record = records.get("s")
    assert record is not None
    assert record.finished
    assert newest_attempt(record) == 4


def test_a_copy_listens_to_its_owner_alone() -> None:
    records = copies()
    records.grow(StreamsGrown(TWO.gateway, (), (delta(0, "ab"),)), 1.0)
    records.record(delta(0, "ab"))
    assert text(records) == ""
    records.keep(KeepStream(TWO.gateway, TWO.incarnation, opening()), 1.0)
    records.grow(StreamsGrown(TWO.gateway, (), (delta(0, "xy"),)), 1.0)
    assert text(records) == "xy"


def test_whoever_takes_a_copy_over_owns_it_and_hears_no_former_owner() -> None:
    records = copies()
    records.grow(grown(delta(0, "ab", attempt=3)), 1.0)
    kept = records.get("s")
    assert kept is not None
    record = records.adopt(kept.copy(), 2.0)
    assert record is not None
    assert (record.owned, record.begun, record.progress, newest_attempt(record)) == (True, True, 2, 3)
    records.keep(KeepStream(ONE.gateway, ONE.incarnation, opening()), 2.0)
    records.grow(grown(delta(2, "c")), 2.0)
    records.record(delta(2, "d"))
    assert text(records) == "abd"


def test_what_is_added_goes_to_who_keeps_a_copy() -> None:
    records = StreamRecords(2**20, 10.0)
    first, second = records.open(opening("s"), 0.0), records.open(opening("t", choices=2), 0.0)
    assert first is not None
    assert second is not None
    second.copied_to = TWO
    records.record(StreamOpened(RequestId("t-1"), Attempt(1), 3, 0))
    for each in (delta(0, "ab"), delta(0, "xy", request="t-1"), delta(0, "?", request="other")):
        records.record(each)
    sent = records.take_grown(ONE.gateway)
    assert {peer: ([o.request for o in g.opened], [d.text for d in g.deltas]) for peer, g in sent.items()} == {
        TWO.gateway: (["t-1"], ["xy"])
    }
    assert records.take_grown(ONE.gateway) == {}
    records.fail(RequestId("t-0"))
    assert records.take_forgotten() == [(TWO.gateway, "t")]
    assert records.get("t") is None
    first.copied_to = TWO
    records.hand_over(first, ONE, 1.0)
    assert records.take_forgotten() == [(TWO.gateway, "s")], "the new owner chooses who keeps a copy"


def test_what_is_of_use_is_kept_and_nothing_else() -> None:
    records = copies()
    read, left = records.open(opening("read"), 0.0), records.open(opening("left"), 0.0)
    assert read is not None
    assert left is not None
    read.readers = 1
    assert records.expire({ONE}, 100.0) == [left]
    assert records.get("s") is not None, "its owner lives"
    assert records.expire(set(), 109.0) == []
    assert records.expire(set(), 111.0) == [], "a copy needs no cancel"
    assert records.get("s") is None
    read.readers = 0
    records.record(delta(0, "ab", request="read", finish=True))
    assert records.expire(set(), 115.0) == []
    assert records.expire(set(), 122.0) == [read]
    assert (len(records), records.bytes) == (0, 0)


def test_a_copy_is_not_kept_for_longer_than_a_stream_may_take() -> None:
    records = StreamRecords(2**20, 10.0, 100.0)
    records.keep(KeepStream(ONE.gateway, ONE.incarnation, opening()), 0.0)
    for now in (50.0, 99.0, 108.0):
        records.expire({ONE}, now)
        assert records.get("s") is not None
    records.expire({ONE}, 110.0)
    assert records.get("s") is None


def test_memory_has_bounds() -> None:
    records = StreamRecords(50_000, 10.0)
    kept = [records.open(opening(str(i), body=bytes(10_000)), 0.0) for i in range(5)]
    assert [each is not None for each in kept] == [True] * 4 + [False]
    records.record(delta(0, "ab", request="2", finish=True))
    assert records.open(opening("5", body=bytes(10_000)), 0.0) is not None, "a finished stream makes room"
    assert records.get("2") is None
    records.record(delta(0, "x" * 4000, request="3"))
    assert records.get("3") is None, "one that outgrows the room is not kept"
    assert records.bytes <= 50_000
    assert StreamRecords(2**30, 10.0).open(opening(body=bytes(MAX_STREAM_BYTES)), 0.0) is None
