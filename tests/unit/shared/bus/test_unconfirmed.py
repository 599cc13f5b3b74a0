"""What is kept of messages that nobody may have taken: bounded, and as it was sent."""

from __future__ import annotations

from shared import topics
from shared.bus import Undelivered
from shared.bus.codec import encode
from shared.bus.unconfirmed import Unconfirmed
from shared.ids import Attempt, EngineId, GatewayId, Incarnation, RequestId
from shared.messages.gateway import RequestFailed
from shared.messages.worker import StepPlan

STEPS = topics.engine_steps(EngineId("e"))


def sent(unconfirmed: Unconfirmed, step: int) -> int:
    return unconfirmed.add(STEPS, encode(StepPlan(epoch=Incarnation(1), step=step)))


def test_what_comes_back_is_what_was_sent_and_comes_once() -> None:
    unconfirmed = Unconfirmed()
    inbox, failed = topics.gateway_inbox(GatewayId("g")), RequestFailed(RequestId("r"), Attempt(1), "reason")
    ticket, other = unconfirmed.add(inbox, encode(failed)), sent(unconfirmed, 3)
    assert unconfirmed.take(ticket) == Undelivered(inbox, failed)
    assert unconfirmed.take(ticket) is None
    assert unconfirmed.take(other) == Undelivered(STEPS, StepPlan(epoch=Incarnation(1), step=3))


def test_the_oldest_are_forgotten_beyond_a_number() -> None:
    unconfirmed = Unconfirmed(limit=2)
    tickets = [sent(unconfirmed, step) for step in range(3)]
    assert [unconfirmed.take(ticket) is None for ticket in tickets] == [True, False, False]


def test_the_oldest_are_forgotten_beyond_a_size_but_never_the_latest() -> None:
    size = len(encode(StepPlan(epoch=Incarnation(1), step=0)))
    unconfirmed = Unconfirmed(limit_bytes=2 * size)
    tickets = [sent(unconfirmed, step) for step in range(3)]
    assert [unconfirmed.take(ticket) is None for ticket in tickets] == [True, False, False]
    small = Unconfirmed(limit_bytes=1)
    tickets = [sent(small, step) for step in range(2)]
    assert [small.take(ticket) is None for ticket in tickets] == [True, False]


def test_what_is_old_is_forgotten_at_the_second_call() -> None:
    unconfirmed = Unconfirmed()
    first = sent(unconfirmed, 0)
    unconfirmed.forget_old()
    second = sent(unconfirmed, 1)
    unconfirmed.forget_old()
    assert len(unconfirmed) == 1
    assert [unconfirmed.take(ticket) is None for ticket in (first, second)] == [True, False]
    full = Unconfirmed(limit_bytes=1)
    sent(full, 2)
    for _ in range(2):
        full.forget_old()
    assert full._bytes == len(full) == 0


def test_nothing_is_forgotten_that_the_server_may_not_have_had_yet() -> None:
    unconfirmed = Unconfirmed()
    ticket = sent(unconfirmed, 0)
    for away in (False, True, True, False):
        unconfirmed.forget_old(away=away)
    assert len(unconfirmed) == 1
    unconfirmed.forget_old()
    assert unconfirmed.take(ticket) is None


def test_what_was_taken_makes_room() -> None:
    size = len(encode(StepPlan(epoch=Incarnation(1), step=0)))
    unconfirmed = Unconfirmed(limit_bytes=2 * size)
    first, second = sent(unconfirmed, 0), sent(unconfirmed, 1)
    assert unconfirmed.take(first) is not None
    third = sent(unconfirmed, 2)
    assert [unconfirmed.take(ticket) is None for ticket in (second, third)] == [False, False]
