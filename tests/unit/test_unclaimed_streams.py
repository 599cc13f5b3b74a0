"""A stream that moved to an engine which never got its request ends, and one whose request waits there does not."""

from __future__ import annotations

from services.detokenizer.core.actions import StreamUnclaimed, ToGateway
from services.detokenizer.core.stream import Stream
from services.detokenizer.core.unclaimed import CONFIRM, DOUBTS, PATIENCE, Ask, Unclaimed
from shared.messages.detokenizer import Moved, NewTokens
from shared.messages.gateway import Failed
from shared.messages.scheduler import Probe, ProbeReply
from tests.unit.test_detokenizer_core import GATEWAY, ONE, OTHER, TWO, Bench, R, ids, opened

ASK = Ask(OTHER, Probe(R, ONE))
UNKNOWN, WAITING = ProbeReply("unknown", 0), ProbeReply("waiting", 1)


def moved() -> Bench:
    bench = Bench()
    bench.batch(opened=(opened(),), entries=(NewTokens(R, ONE, 0, ids("a")),), moved=(Moved(R, ONE, OTHER),))
    return bench


def streams(bench: Bench) -> list[Stream]:
    return list(bench.core.streams.values())


def test_only_streams_that_moved_and_are_silent_are_asked_after() -> None:
    bench, unclaimed = moved(), Unclaimed()
    assert unclaimed.due(streams(bench), 0.0) == []
    assert unclaimed.due(streams(bench), PATIENCE) == [ASK]
    assert unclaimed.due(streams(bench), PATIENCE + 1) == [], "once in a while"
    bench.batch(engine=OTHER, entries=(NewTokens(R, ONE, 1, ids("b")),))
    assert unclaimed.due(streams(bench), 9 * PATIENCE) == []
    assert not unclaimed.answered(ASK, UNKNOWN, 9 * PATIENCE), "its tokens came first"


def test_a_stream_whose_engine_does_not_know_the_request_is_lost_when_it_says_so_again() -> None:
    bench, unclaimed = moved(), Unclaimed()
    unclaimed.due(streams(bench), 0.0)
    now = PATIENCE
    for doubt in range(1, DOUBTS + 1):
        assert unclaimed.due(streams(bench), now) == [ASK]
        assert unclaimed.answered(ASK, UNKNOWN if doubt % 2 else "nobody there", now) == (doubt == DOUBTS)
        now += CONFIRM


def test_a_request_that_waits_its_turn_there_is_left_alone() -> None:
    bench, unclaimed = moved(), Unclaimed()
    unclaimed.due(streams(bench), 0.0)
    for turn in range(1, 5):
        now = 2 * turn * PATIENCE
        assert unclaimed.due(streams(bench), now) == [ASK]
        assert not unclaimed.answered(ASK, UNKNOWN, now), "one doubt"
        assert unclaimed.due(streams(bench), now + CONFIRM) == [ASK]
        assert not unclaimed.answered(ASK, WAITING if turn < 4 else "no answer in time", now + CONFIRM)


def test_another_attempt_begins_anew() -> None:
    bench, unclaimed = moved(), Unclaimed()
    unclaimed.due(streams(bench), 0.0)
    unclaimed.due(streams(bench), PATIENCE)
    unclaimed.answered(ASK, UNKNOWN, PATIENCE)
    bench.batch(opened=(opened(attempt=TWO),), moved=(Moved(R, TWO, OTHER),))
    assert unclaimed.due(streams(bench), PATIENCE + CONFIRM) == []
    assert not unclaimed.answered(ASK, UNKNOWN, PATIENCE + CONFIRM)


def test_the_gateway_is_told_of_a_stream_that_nobody_claims() -> None:
    bench = moved()
    assert bench.core.handle(StreamUnclaimed(R, TWO)) == []
    failed = Failed(R, ONE, "engine engine-2 never got the request")
    assert bench.core.handle(StreamUnclaimed(R, ONE)) == [ToGateway(GATEWAY, failed)]
    assert not bench.core.streams


def test_a_stream_that_goes_on_meanwhile_is_not_ended() -> None:
    bench = moved()
    bench.batch(engine=OTHER, entries=(NewTokens(R, ONE, 1, ids("b")),))
    assert bench.core.handle(StreamUnclaimed(R, ONE)) == []
    assert bench.core.streams
