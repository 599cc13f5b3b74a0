"""A silent stream ends whose engine does not have its request, and one whose request waits or runs there does not."""

from __future__ import annotations

from services.detokenizer.core.actions import StreamOrphaned, ToGateway
from services.detokenizer.core.stream import RequestStream
from services.detokenizer.core.stream_probes import (
    DENIAL_INTERVAL,
    MAX_DENIALS,
    PROBE_AFTER,
    StreamProbe,
    StreamProbes,
)
from shared.messages.detokenizer import NewTokens, StreamMoved
from shared.messages.gateway import RequestFailed
from shared.messages.scheduler import ProbeReply
from tests.unit.detokenizer.core.test_detokenizer import GATEWAY, ONE, OTHER, TWO, Bench, R, ids, opened

ASK = StreamProbe(OTHER, R, ONE, 1)
UNKNOWN, WAITING = ProbeReply("unknown", 0), ProbeReply("waiting", 1)


def moved() -> Bench:
    bench = Bench()
    bench.batch(opened=(opened(),), entries=(NewTokens(R, ONE, 0, ids("a")),), moved=(StreamMoved(R, ONE, OTHER),))
    return bench


def streams(bench: Bench) -> list[RequestStream]:
    return list(bench.core.streams.values())


def test_only_silent_streams_are_asked_after() -> None:
    bench, unclaimed = moved(), StreamProbes()
    assert unclaimed.due(streams(bench), 0.0) == []
    assert unclaimed.due(streams(bench), PROBE_AFTER) == [ASK]
    assert unclaimed.due(streams(bench), PROBE_AFTER + 1) == [], "once in a while"
    bench.batch(engine=OTHER, entries=(NewTokens(R, ONE, 1, ids("b")),))
    assert unclaimed.due(streams(bench), 9 * PROBE_AFTER) == []
    assert not unclaimed.replied(ASK, UNKNOWN, 9 * PROBE_AFTER), "its tokens came first"
    assert unclaimed.due(streams(bench), 10 * PROBE_AFTER) == [StreamProbe(OTHER, R, ONE, 2)]


def test_a_stream_whose_end_was_lost_ends_without_another_batch_of_its_engine() -> None:
    bench, unclaimed = Bench(), StreamProbes()
    bench.batch(opened=(opened(),), entries=(NewTokens(R, ONE, 0, ids("a")),))
    unclaimed.due(streams(bench), 0.0)
    (probe,) = unclaimed.due(streams(bench), PROBE_AFTER)
    assert not unclaimed.replied(probe, UNKNOWN, PROBE_AFTER)
    (probe,) = unclaimed.due(streams(bench), PROBE_AFTER + DENIAL_INTERVAL)
    assert unclaimed.replied(probe, UNKNOWN, PROBE_AFTER + DENIAL_INTERVAL)
    failed = RequestFailed(R, ONE, "engine engine-1 does not have the request")
    assert bench.core.end_streams(StreamOrphaned(R, ONE, 1)) == [ToGateway(GATEWAY, failed)]
    assert not bench.core.streams


def test_a_stream_whose_engine_does_not_know_the_request_is_lost_when_it_says_so_again() -> None:
    bench, unclaimed = moved(), StreamProbes()
    unclaimed.due(streams(bench), 0.0)
    now = PROBE_AFTER
    for doubt in range(1, MAX_DENIALS + 1):
        assert unclaimed.due(streams(bench), now) == [ASK]
        assert unclaimed.replied(ASK, UNKNOWN if doubt % 2 else "nobody there", now) == (doubt == MAX_DENIALS)
        now += DENIAL_INTERVAL


def test_a_request_that_waits_its_turn_there_is_left_alone() -> None:
    bench, unclaimed = moved(), StreamProbes()
    unclaimed.due(streams(bench), 0.0)
    for turn in range(1, 5):
        now = 2 * turn * PROBE_AFTER
        assert unclaimed.due(streams(bench), now) == [ASK]
        assert not unclaimed.replied(ASK, UNKNOWN, now), "one doubt"
        assert unclaimed.due(streams(bench), now + DENIAL_INTERVAL) == [ASK]
        assert not unclaimed.replied(ASK, WAITING if turn < 4 else "no reply in time", now + DENIAL_INTERVAL)


def test_another_attempt_begins_anew() -> None:
    bench, unclaimed = moved(), StreamProbes()
    unclaimed.due(streams(bench), 0.0)
    unclaimed.due(streams(bench), PROBE_AFTER)
    unclaimed.replied(ASK, UNKNOWN, PROBE_AFTER)
    bench.batch(opened=(opened(attempt=TWO),), moved=(StreamMoved(R, TWO, OTHER),))
    assert unclaimed.due(streams(bench), PROBE_AFTER + DENIAL_INTERVAL) == []
    assert not unclaimed.replied(ASK, UNKNOWN, PROBE_AFTER + DENIAL_INTERVAL)


def test_the_gateway_is_informed_of_a_stream_that_nobody_claims() -> None:
    bench = moved()
    assert bench.core.end_streams(StreamOrphaned(R, TWO, 1)) == []
    failed = RequestFailed(R, ONE, "engine engine-2 does not have the request")
    assert bench.core.end_streams(StreamOrphaned(R, ONE, 1)) == [ToGateway(GATEWAY, failed)]
    assert not bench.core.streams


def test_a_stream_that_goes_on_meanwhile_is_not_ended() -> None:
    bench = moved()
    bench.batch(engine=OTHER, entries=(NewTokens(R, ONE, 1, ids("b")),))
    assert bench.core.end_streams(StreamOrphaned(R, ONE, 1)) == []
    assert bench.core.streams
