"""How often the processes of a fleet say how they are."""

from __future__ import annotations

import pytest

from services.coordinator.core.fleet_heartbeat import MAX_KV_EVENT_SECONDS, REPEAT_SECONDS, FleetHeartbeat
from shared.ids import Incarnation, InstanceId
from shared.messages.kv_events import KV_EVENT_SECONDS
from shared.messages.lifecycle import (
    HEARTBEAT_SECONDS,
    KEEP_ALIVE_SECONDS,
    MAX_KEEP_ALIVE_SECONDS,
    HeartbeatInterval,
    Lifecycle,
    Service,
)

BUDGET = 100.0
KV_BUDGET = 1_000_000.0
"""More than is ever needed."""


def said_of(keep_alive: float) -> HeartbeatInterval:
    return HeartbeatInterval(keep_alive, KV_EVENT_SECONDS)


def lives(count: int, service: Service = "scheduler", keep_alive: float = KEEP_ALIVE_SECONDS) -> list[Lifecycle]:
    return [
        Lifecycle(
            service=service,
            instance=InstanceId(f"{service}-{number}"),
            incarnation=Incarnation(1),
            phase="ready",
            pid=1,
            host="h",
            started=0.0,
            keep_alive=keep_alive,
        )
        for number in range(count)
    ]


def settled() -> FleetHeartbeat:
    """One that has listened for long enough to know all."""
    interval = FleetHeartbeat(BUDGET, KV_BUDGET)
    assert interval.due([], 0.0) is None
    return interval


@pytest.mark.parametrize(("engines", "said"), [(101, 2.0), (200, 2.0), (201, 4.0), (1024, 16.0)])
def test_no_more_come_in_a_second_than_were_provided_for(engines: int, said: float) -> None:
    assert settled().due([*lives(engines), *lives(90, "gateway")], REPEAT_SECONDS) == said_of(said)
    assert engines / said <= BUDGET


def test_a_fleet_beyond_all_bounds_goes_on_to_say_that_it_lives() -> None:
    assert settled().due(lives(10_000), REPEAT_SECONDS) == said_of(MAX_KEEP_ALIVE_SECONDS)


def test_a_small_fleet_is_told_nothing() -> None:
    interval = settled()
    for at in range(100):
        assert interval.due([*lives(100), *lives(100, "worker")], REPEAT_SECONDS + at) is None


def test_who_has_just_begun_to_listen_says_nothing() -> None:
    interval = FleetHeartbeat(BUDGET, KV_BUDGET)
    for at in range(int(REPEAT_SECONDS)):
        assert interval.due(lives(1000), float(at)) is None


def test_it_is_said_again_for_those_that_have_come_since() -> None:
    interval, at = settled(), REPEAT_SECONDS
    assert interval.due(lives(300), at) == said_of(4.0)
    assert interval.due(lives(300), at + 0.5) is None
    assert interval.due(lives(300), at + REPEAT_SECONDS) == said_of(4.0)


def test_an_engine_that_comes_and_goes_changes_nothing_but_a_smaller_fleet_does() -> None:
    interval, at = settled(), REPEAT_SECONDS
    assert interval.due(lives(201), at) == said_of(4.0)
    assert interval.due(lives(200), at + 0.5) is None
    assert interval.due(lives(160), at + 1.0) is None
    assert interval.due(lives(140), at + 1.5) == said_of(2.0)
    assert interval.due(lives(10), at + 2.0) == said_of(KEEP_ALIVE_SECONDS)
    assert interval.due(lives(10), at + 2.0 + REPEAT_SECONDS) == said_of(KEEP_ALIVE_SECONDS), "one may be lost"


def test_while_somebody_knows_no_promises_all_speak_as_often_as_he_wants_to_hear() -> None:
    interval, at = settled(), REPEAT_SECONDS
    assert interval.due(lives(300), at) == said_of(4.0)
    older = lives(1, "gateway", keep_alive=HEARTBEAT_SECONDS)
    assert interval.due([*lives(300), *older], at + 0.5) == said_of(KEEP_ALIVE_SECONDS)


@pytest.mark.parametrize(
    ("engines", "stores", "said"),
    [(33, 0, 0.05), (63, 1, 0.05), (64, 1, 0.1), (256, 0, 0.2), (1024, 0, 0.8), (100_000, 0, MAX_KV_EVENT_SECONDS)],
)
def test_blocks_are_reported_as_often_as_was_provided_for(engines: int, stores: int, said: float) -> None:
    interval = FleetHeartbeat(1e9, kv_budget=1280.0)
    assert interval.due([], 0.0) is None
    fleet = [*lives(engines), *lives(stores, "kvstore"), *lives(3 * engines, "worker")]
    assert interval.due(fleet, REPEAT_SECONDS) == HeartbeatInterval(KEEP_ALIVE_SECONDS, said)
    assert interval.due(lives(10), REPEAT_SECONDS + 1) == HeartbeatInterval(KEEP_ALIVE_SECONDS, KV_EVENT_SECONDS)


def test_a_small_fleet_reports_its_blocks_at_once() -> None:
    interval = FleetHeartbeat(1e9, kv_budget=1280.0)
    assert interval.due([], 0.0) is None
    assert interval.due(lives(32), REPEAT_SECONDS) is None
