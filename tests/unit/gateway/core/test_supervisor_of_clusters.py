"""The supervision of requests that go to other clusters, and of those that come from there. Times are arguments."""

from __future__ import annotations

import pytest

from services.gateway.core.effects import AttemptRetry, CancelAttempt, DispatchAttempt, Effect
from services.gateway.core.open_request import EmittedOutput, RetryPolicy
from services.gateway.core.supervisor import RequestSupervisor
from shared.ids import Attempt, DetokenizerId, EngineId, InstanceId, relay_id
from shared.messages.coordinator import Withdraw
from shared.messages.gateway import (
    Delta,
    Deltas,
    PromptsHeld,
    RequestPlaced,
    RequestQueued,
    RequestRejected,
    StreamOpened,
)
from shared.messages.scheduler import ProbeReply
from tests.unit.gateway.core.test_remote_clusters import GATEWAY, MODEL, US, clusters, status, tokenize

REQUEST = tokenize().request
RELAY = relay_id(US, GATEWAY)
POLICY = RetryPolicy(elsewhere_s=1.0, relayed_s=5.0)


def destinations(effects: list[Effect]) -> list[str | None]:
    return [effect.cluster for effect in effects if isinstance(effect, DispatchAttempt)]


def placed(supervisor: RequestSupervisor, engine: EngineId, attempt: int = 1) -> list[Effect]:
    return supervisor.handle(RequestPlaced(REQUEST, Attempt(attempt), engine, DetokenizerId(engine)), 0.0)


def rejected(kind: str, attempt: int = 1) -> RequestRejected:
    return RequestRejected(request=REQUEST, attempt=Attempt(attempt), kind=kind, message="full")  # type: ignore[arg-type]


def test_a_request_that_queues_here_leaves_after_a_while_for_a_cluster_with_room() -> None:
    known = clusters(free=1)
    supervisor = RequestSupervisor(POLICY, known)
    assert destinations(supervisor.open(tokenize(), 0.0)) == [None]
    supervisor.handle(RequestQueued(REQUEST, Attempt(1)), 0.0)
    assert supervisor.tick(5.0) == []
    known.record_status(status(US), 5.0, 0.0)
    effects = supervisor.tick(5.1)
    assert effects[:2] == [Withdraw(REQUEST, Attempt(1)), AttemptRetry(REQUEST, Attempt(2), "queued for 1 s", 0)]
    assert destinations(effects) == ["us"]


def test_a_cluster_that_refuses_is_left_alone_and_the_first_refusal_at_home_counts_as_the_first() -> None:
    known = clusters()
    known.record_status(status(US), 0.0, 0.0)
    supervisor = RequestSupervisor(POLICY, known)
    assert destinations(supervisor.open(tokenize(), 0.0)) == ["us"]
    effects = supervisor.handle(rejected("overloaded"), 0.0)
    assert destinations(effects) == [None]
    effects = supervisor.handle(rejected("overloaded", 2), 0.0)
    assert effects == [rejected("overloaded", 2)], "no engine had it: it does not wait, but gets its 429"


def test_a_refusal_here_is_none_while_another_cluster_has_room() -> None:
    known = clusters(free=1)
    known.record_status(status(US), 0.0, 0.0)
    supervisor = RequestSupervisor(POLICY, known)
    assert destinations(supervisor.open(tokenize(), 0.0)) == [None]
    assert destinations(supervisor.handle(rejected("overloaded"), 0.0)) == ["us"]
    assert supervisor.handle(rejected("invalid_request", 2), 0.0) == [rejected("invalid_request", 2)]


def test_nobody_there_to_take_it_is_the_next_attempt_at_once() -> None:
    known = clusters()
    known.record_status(status(US), 0.0, 0.0)
    supervisor = RequestSupervisor(POLICY, known)
    supervisor.open(tokenize(), 0.0)
    assert destinations(supervisor.undelivered(tokenize(), 0.0)) == [None]


def test_what_a_relay_had_goes_on_elsewhere_behind_what_the_client_has() -> None:
    known = clusters()
    known.record_status(status(US), 0.0, 0.0)
    supervisor = RequestSupervisor(POLICY, known)
    supervisor.open(tokenize(), 0.0)
    placed(supervisor, RELAY)
    opened = StreamOpened(REQUEST, Attempt(1), 1, 0, None, RELAY)
    delta = Delta(REQUEST, Attempt(1), 0, (5,), "five")
    supervisor.handle(
        Deltas(detokenizer=DetokenizerId(RELAY), epoch=1, number=0, opened=(opened,), deltas=(delta,)),  # type: ignore[arg-type]
        0.0,
    )
    known.expire(100.0)
    cancelled, retried, again = supervisor.relay_gone(RELAY, 1.0)
    assert isinstance(cancelled, CancelAttempt)
    assert (cancelled.engine, retried) == (
        RELAY,
        AttemptRetry(REQUEST, Attempt(2), f"{RELAY} is gone, or its link is cut", 1),
    )
    assert isinstance(again, DispatchAttempt)
    assert (again.cluster, again.tokenize.sent_chars, len(again.tokenize.resume)) == (None, 4, 4)


def test_a_suspect_goes_to_no_other_cluster() -> None:
    known = clusters(free=1)
    supervisor = RequestSupervisor(POLICY, known)
    (sent,) = supervisor.open(tokenize(), 0.0)
    known.record_status(status(US), 0.0, 0.0)
    assert isinstance(sent, DispatchAttempt)
    request = supervisor._open[REQUEST]
    request.record_death(0, POLICY)
    assert destinations(supervisor.handle(rejected("overloaded"), 0.0)) == []
    assert supervisor.move_to_others(0.0) == []


def test_a_drained_cluster_moves_what_it_has_but_not_what_others_sent_it() -> None:
    known = clusters(free=1)
    supervisor = RequestSupervisor(POLICY, known)
    supervisor.open(tokenize(), 0.0)
    placed(supervisor, EngineId("engine-1"))
    assert supervisor.move_to_others(0.0) == [], "there is no other cluster"
    known.record_status(status(US, free=0), 0.0, 0.0)
    known.switch(True, 1.0)
    assert destinations(supervisor.move_to_others(0.0)) == ["us"]


def test_a_relayed_request_that_a_tokenizer_works_on_does_not_go_back() -> None:
    supervisor = RequestSupervisor(POLICY, clusters())
    supervisor.resume(tokenize(), EmittedOutput(Attempt(1), [], 0, None, 0.0), 0.0, relayed=True)
    for now in (1.0, 5.0, 10.0):
        supervisor.handle(PromptsHeld(InstanceId("tokenizer-1"), ((REQUEST, Attempt(1)),)), now)
        assert supervisor.tick(now + 0.9) == []
    supervisor.handle(RequestQueued(REQUEST, Attempt(1)), 11.0)
    assert isinstance(supervisor.tick(11.1)[-1], RequestRejected), "no engine was free"


@pytest.mark.parametrize("queued", [True, False])
def test_a_relayed_request_stays_here_and_goes_back_where_it_gets_no_engine(queued: bool) -> None:
    known = clusters()
    known.record_status(status(US), 0.0, 0.0)
    supervisor = RequestSupervisor(POLICY, known)
    emitted = EmittedOutput(Attempt(1), [], 0, None, 0.0)
    assert destinations(supervisor.resume(tokenize(), emitted, 0.0, relayed=True)) == [None]
    assert supervisor.state_of(REQUEST) == ProbeReply("waiting", 0)
    if queued:
        supervisor.handle(RequestQueued(REQUEST, Attempt(1)), 0.0)
    else:
        supervisor.undelivered(tokenize(), 0.0)
    assert destinations(supervisor.tick(4.0)) == ([] if queued else [None])
    ended = supervisor.tick(5.1)[-1]
    assert isinstance(ended, RequestRejected)
    assert (ended.kind, len(supervisor)) == ("unavailable", 0)
    assert known.has_room(MODEL), "though another one has room"
