"""The supervision of requests: what is done about each thing that can go wrong. Times are arguments."""

from __future__ import annotations

from itertools import permutations
from typing import Any

from msgspec.structs import replace

from services.gateway.core.cluster import ModelUnavailable
from services.gateway.core.effects import AttemptRetry, CancelAttempt, DispatchAttempt, ProbeEngine
from services.gateway.core.open_request import RetryPolicy
from services.gateway.core.supervisor import RequestSupervisor
from shared.ids import Attempt, DetokenizerId, EngineId, GatewayId, Incarnation, InstanceId, ModelName, RequestId
from shared.messages.coordinator import RequestEnded, Withdraw
from shared.messages.gateway import (
    Delta,
    Deltas,
    RequestFailed,
    RequestPlaced,
    RequestQueued,
    RequestRejected,
    StreamOpened,
)
from shared.messages.generation import SamplingOptions, StopConditions
from shared.messages.lifecycle import Lifecycle, Service
from shared.messages.scheduler import Cancel, Probe, ProbeReply
from shared.messages.tokenizer import TextPrompt, Tokenize
from shared.packing import unpack

R = RequestId("r")
ENGINE, OTHER = EngineId("engine-1"), EngineId("engine-2")
DETOKENIZER = DetokenizerId("detokenizer-1")
POLICY = RetryPolicy(
    silence_s=2.0, confirm_s=0.3, placement_s=10.0, queue_s=30.0, request_s=1000.0, attempts=3, pause_s=0.25
)


def first_message(request: RequestId = R) -> Tokenize:
    return Tokenize(
        request=request,
        attempt=Attempt(1),
        gateway=GatewayId("gateway-1"),
        model=ModelName("demo"),
        prompt=TextPrompt("hi"),
        sampling=SamplingOptions(seed=7),
        stopping=StopConditions(),
    )


def life(service: Service, instance: str) -> Lifecycle:
    return Lifecycle(
        service=service,
        instance=InstanceId(instance),
        incarnation=Incarnation(1),
        phase="ready",
        pid=1,
        host="h",
        started=0.0,
    )


class Watched:
    """A supervision with one open request, and short ways to tell it things."""

    def __init__(self, policy: RetryPolicy = POLICY) -> None:
        self.supervision = RequestSupervisor(policy)
        self.number = 0
        assert self.supervision.open(first_message(), 0.0) == [DispatchAttempt(first_message())]

    def placed(self, now: float, attempt: int = 1, engine: EngineId = ENGINE) -> list[Any]:
        return self.supervision.handle(RequestPlaced(R, Attempt(attempt), engine, DETOKENIZER), now)

    def handed_over(self, now: float, attempt: int = 1) -> list[Any]:
        return self.supervision.handle(RequestPlaced(R, Attempt(attempt), OTHER, DETOKENIZER, handed_by=ENGINE), now)

    def delta(self, position: int, now: float, attempt: int = 1, skip: int = 0, **more: Any) -> list[Any]:
        delta = Delta(R, Attempt(attempt), position, (position,), f"<{position}>", **more)
        return self.deltas((delta,), now, skip)

    def deltas(self, deltas: tuple[Delta, ...], now: float, skip: int = 0, opened: Any = None) -> list[Any]:
        """Streams that none of `opened` opens are opened first, and the effect of that is left out."""
        self.number += skip
        first = [] if opened is not None else [StreamOpened(delta.request, delta.attempt, 1, 0) for delta in deltas]
        message = Deltas(
            detokenizer=DETOKENIZER,
            epoch=Incarnation(1),
            number=self.number,
            opened=opened or tuple(first),
            deltas=deltas,
        )
        self.number += 1
        return [effect for effect in self.supervision.handle(message, now) if effect not in first]

    def probed(self, answer: Any, now: float, attempt: int = 1) -> list[Any]:
        return self.supervision.record_probe_reply(R, Attempt(attempt), answer, now)


def dispatched(effects: list[Any]) -> Tokenize:
    [dispatch] = [effect for effect in effects if isinstance(effect, DispatchAttempt)]
    return dispatch.tokenize


def streaming(tokens: int = 2) -> Watched:
    """A request that has been placed and has received `tokens` tokens, the last one at time 1."""
    watched = Watched()
    assert watched.placed(0.5) == []
    for position in range(tokens):
        assert len(watched.delta(position, 1.0)) == 1
    return watched


ABSENCE = ModelUnavailable("no scheduler is ready", 0.0)
MODEL = ModelName("demo")


def test_a_request_that_came_when_nobody_was_there_is_refused() -> None:
    watched = Watched()
    watched.supervision.handle(RequestQueued(R, Attempt(1)), 0.1)
    withdraw, rejected = watched.supervision.refuse_unserved(MODEL, ABSENCE, 2.1)
    assert withdraw == Withdraw(R, Attempt(1))
    assert isinstance(rejected, RequestRejected)
    assert (rejected.kind, rejected.retry_after) == ("unavailable", 1.0)
    assert rejected.message == "the request could not be served: no scheduler is ready"
    assert R not in watched.supervision


def test_requests_from_before_or_for_other_models_or_that_an_engine_has_had_are_not_refused() -> None:
    watched = Watched()
    assert watched.supervision.refuse_unserved(MODEL, ABSENCE._replace(since=0.1), 2.1) == []
    assert watched.supervision.refuse_unserved(ModelName("other"), ABSENCE, 2.1) == []
    watched.supervision.open(first_message(RequestId("begun")), 0.0, accepted=True)
    watched.placed(0.1)
    assert watched.supervision.refuse_unserved(MODEL, ABSENCE, 2.1) == []
    watched.supervision.handle(RequestFailed(R, Attempt(1), "the engine died"), 2.2)
    assert watched.supervision.refuse_unserved(MODEL, ABSENCE, 2.3) == []
    assert len(watched.supervision) == 2


def test_all_requests_can_be_given_up_and_what_held_them_is_told() -> None:
    watched = streaming()
    other = RequestId("other")
    watched.supervision.open(first_message(other), 1.0)
    cancel, ended, withdraw, refused = watched.supervision.give_up_all("the bus is away for 60 s", 1.0)
    assert (cancel, withdraw) == (CancelAttempt(ENGINE, Cancel(R, Attempt(1))), Withdraw(other, Attempt(1)))
    for rejected, request in ((ended, R), (refused, other)):
        assert isinstance(rejected, RequestRejected)
        assert (rejected.request, rejected.kind, rejected.retry_after) == (request, "unavailable", 1.0)
        assert rejected.message == "the request could not be served: the bus is away for 60 s"
    assert len(watched.supervision) == 0
    late = watched.delta(2, 2.5)
    assert late == [CancelAttempt(ENGINE, Cancel(R, Attempt(1)))], "an engine that missed the cancel is told again"


def test_what_comes_in_order_goes_to_the_client_and_finishes_once() -> None:
    watched = Watched()
    watched.placed(0.1)
    opened = StreamOpened(R, Attempt(1), 5, 2)
    first = Delta(R, Attempt(1), 0, (9,), "a")
    last = Delta(R, Attempt(1), 1, (2,), "", "stop")
    assert watched.deltas((first,), 0.2, opened=(opened,)) == [opened, first]
    assert watched.deltas((last,), 0.3) == [last]
    assert len(watched.supervision) == 0
    assert watched.deltas((last,), 0.4) == []
    assert watched.supervision.close(R, 0.5) == []


def test_a_failed_attempt_is_tried_again_at_once_with_what_the_client_has() -> None:
    watched = streaming(2)
    effects = watched.supervision.handle(RequestFailed(R, Attempt(1), "worker lost"), 1.1)
    assert effects[:2] == [CancelAttempt(ENGINE, Cancel(R, Attempt(1))), AttemptRetry(R, Attempt(2), "worker lost", 2)]
    again = dispatched(effects)
    assert (again.attempt, unpack(again.resume), again.sent_chars) == (2, [0, 1], len("<0><1>"))
    assert again.avoid == (ENGINE,)
    assert again.sampling == first_message().sampling


def test_stale_attempts_are_fenced() -> None:
    watched = streaming(2)
    watched.supervision.handle(RequestFailed(R, Attempt(1), "worker lost"), 1.1)
    assert watched.delta(2, 1.2, attempt=1) == []
    assert watched.supervision.handle(RequestFailed(R, Attempt(1), "again"), 1.2) == []
    assert watched.supervision.handle(RequestQueued(R, Attempt(1)), 1.2) == [Withdraw(R, Attempt(1))]
    assert watched.placed(1.2, attempt=1, engine=OTHER) == [CancelAttempt(OTHER, Cancel(R, Attempt(1)))]
    assert watched.placed(1.3, attempt=2, engine=OTHER) == []
    assert len(watched.delta(2, 1.4, attempt=2)) == 1


def test_a_duplicate_of_a_message_is_dropped_whole() -> None:
    watched = streaming(1)
    watched.number -= 1
    assert watched.delta(1, 1.1) == []
    assert len(watched.delta(1, 1.2)) == 1


def test_tokens_beyond_the_next_show_a_loss() -> None:
    watched = streaming(2)
    assert unpack(dispatched(watched.delta(3, 1.1, skip=1)).resume) == [0, 1]


def test_tokens_known_already_are_not_given_twice() -> None:
    watched = streaming(2)
    assert watched.delta(1, 1.1) == []
    assert len(watched.delta(2, 1.2)) == 1


def test_after_a_gap_that_was_not_about_it_a_stream_goes_on() -> None:
    watched = streaming(2)
    assert len(watched.delta(2, 1.1, skip=1)) == 1
    assert watched.supervision.tick(1.9) == []


def test_after_a_gap_a_stream_that_stays_silent_is_asked_about_soon() -> None:
    watched = streaming(2)
    assert watched.deltas((), 1.1, skip=1) == []
    assert watched.supervision.tick(1.3) == []
    assert watched.supervision.tick(1.5) == [ProbeEngine(ENGINE, Probe(R, Attempt(1)))]


def test_silence_is_asked_about_once_and_patience_follows_a_good_answer() -> None:
    watched = streaming(2)
    assert watched.supervision.tick(2.9) == []
    assert watched.supervision.tick(3.1) == [ProbeEngine(ENGINE, Probe(R, Attempt(1)))]
    assert watched.supervision.tick(3.2) == []
    assert watched.probed(ProbeReply("running", 2), 3.3) == []
    assert watched.supervision.tick(5.2) == []
    assert watched.supervision.tick(5.4) == [ProbeEngine(ENGINE, Probe(R, Attempt(1)))]


def test_a_request_unknown_to_its_engine_twice_is_tried_again() -> None:
    for answer in (ProbeReply("unknown", 0), "nobody there", ProbeReply("running", 5)):
        watched = streaming(2)
        watched.supervision.tick(3.1)
        assert watched.probed(answer, 3.2) == []
        assert watched.supervision.tick(3.4) == []
        assert watched.supervision.tick(3.6) == [ProbeEngine(ENGINE, Probe(R, Attempt(1)))]
        assert dispatched(watched.probed(answer, 3.7)).attempt == 2


def test_a_doubt_is_given_twice_as_long_with_each_attempt_in_vain() -> None:
    """Or a ring that is only slow would be asked for the same again and again."""
    watched = streaming()
    late = ProbeReply("running", 5)
    assert watched.supervision.tick(3.1) == [ProbeEngine(ENGINE, Probe(R, Attempt(1)))]
    assert watched.probed(late, 3.2) == []
    assert watched.supervision.tick(3.51) == [ProbeEngine(ENGINE, Probe(R, Attempt(1)))]
    assert dispatched(watched.probed(late, 3.52)).attempt == 2
    watched.placed(3.6, attempt=2)
    assert watched.supervision.tick(5.7) == [ProbeEngine(ENGINE, Probe(R, Attempt(2)))]
    assert watched.probed(late, 5.8, attempt=2) == []
    assert watched.supervision.tick(6.3) == []
    assert watched.supervision.tick(6.41) == [ProbeEngine(ENGINE, Probe(R, Attempt(2)))]
    assert len(watched.delta(2, 6.42, attempt=2)) == 1


def test_the_last_tokens_may_overtake_the_doubt() -> None:
    watched = streaming(2)
    watched.supervision.tick(3.1)
    assert watched.probed(ProbeReply("unknown", 0), 3.2) == []
    [last] = watched.delta(2, 3.3, finish="stop")
    assert last.finish == "stop"
    assert watched.supervision.tick(9.0) == []


def test_an_answer_older_than_the_newest_token_says_nothing() -> None:
    watched = streaming(2)
    watched.supervision.tick(3.1)
    watched.delta(2, 3.2)
    for now in (3.3, 4.0):
        assert watched.probed(ProbeReply("unknown", 0), now) == []
    assert watched.supervision.tick(5.1) == []


def test_an_engine_that_leaves_questions_unanswered_is_given_up_after_the_third() -> None:
    watched, now = streaming(2), 3.1
    for _ in range(2):
        assert watched.supervision.tick(now) == [ProbeEngine(ENGINE, Probe(R, Attempt(1)))]
        assert watched.probed("no answer in time", now + 1.0) == []
        now += 1.5
    watched.supervision.tick(now)
    assert dispatched(watched.probed("no answer in time", now + 1.0)).attempt == 2


def test_the_death_of_an_engine_or_detokenizer_is_acted_on_at_once() -> None:
    for service, instance in (("scheduler", ENGINE), ("detokenizer", DETOKENIZER)):
        watched = streaming(2)
        effects = watched.supervision.instance_gone(life(service, instance), "failed", 1.1)  # type: ignore[arg-type]
        assert unpack(dispatched(effects).resume) == [0, 1]
    assert streaming(2).supervision.instance_gone(life("scheduler", OTHER), "failed", 1.1) == []
    assert streaming(2).supervision.instance_gone(life("tokenizer", "t"), "failed", 1.1) == []


def test_a_silent_engine_or_detokenizer_is_asked_about_before_it_counts_as_dead() -> None:
    for service, instance in (("scheduler", ENGINE), ("detokenizer", DETOKENIZER)):
        watched = streaming(2)
        assert watched.supervision.instance_silent(life(service, instance), "silent", 1.1) == []  # type: ignore[arg-type]
        assert watched.supervision.tick(1.5) == [ProbeEngine(ENGINE, Probe(R, Attempt(1)))]
        assert watched.probed(ProbeReply("running", 2), 1.6) == []
        assert len(watched.delta(2, 1.7)) == 1
    assert dispatched(Watched().supervision.instance_silent(life("tokenizer", "t"), "silent", 1.1)).attempt == 2


def test_an_engine_that_stopped_without_requests_has_ended_its_streams() -> None:
    """Their last tokens come by the detokenizer, its farewell does not: they may be on their way for a while."""
    watched = streaming(2)
    assert watched.supervision.instance_gone(life("scheduler", ENGINE), "stopped", 1.1) == []
    assert watched.supervision.tick(3.3) == []
    assert len(watched.delta(2, 3.3, finish="length")) == 1
    lost = streaming(2)
    lost.supervision.instance_gone(life("scheduler", ENGINE), "stopped", 1.1)
    for now in (3.5, 4.0):
        assert lost.supervision.tick(now) == [ProbeEngine(ENGINE, Probe(R, Attempt(1)))]
        effects = lost.probed("nobody there", now)
    assert unpack(dispatched(effects).resume) == [0, 1]


def test_what_an_engine_left_that_stopped_is_computed_elsewhere_at_once() -> None:
    left = replace(life("scheduler", ENGINE), load=1)
    assert unpack(dispatched(streaming(2).supervision.instance_gone(left, "stopped", 1.1)).resume) == [0, 1]


def test_the_death_of_a_tokenizer_or_coordinator_concerns_what_is_not_placed() -> None:
    for service in ("tokenizer", "coordinator"):
        effects = Watched().supervision.instance_gone(life(service, "x"), "failed", 0.1)  # type: ignore[arg-type]
        assert effects[0] == Withdraw(R, Attempt(1))
        assert dispatched(effects).attempt == 2
    queued = Watched()
    queued.supervision.handle(RequestQueued(R, Attempt(1)), 0.1)
    assert queued.supervision.instance_gone(life("tokenizer", "t"), "failed", 0.2) == []
    assert dispatched(queued.supervision.instance_gone(life("coordinator", "c"), "failed", 0.3)).attempt == 2


def test_three_attempts_in_a_row_without_a_token_are_the_end() -> None:
    watched, now = Watched(), 0.0
    for attempt in (1, 2):
        watched.placed(now, attempt=attempt)
        effects = watched.supervision.handle(RequestFailed(R, Attempt(attempt), "no luck"), now)
        if attempt == 2:
            assert not any(isinstance(effect, DispatchAttempt) for effect in effects), (
                "the second failure earns a pause"
            )
            now += 0.3
            effects = watched.supervision.tick(now)
        assert dispatched(effects).attempt == attempt + 1
    watched.placed(now, attempt=3)
    *_, rejected = watched.supervision.handle(RequestFailed(R, Attempt(3), "no luck"), now)
    assert isinstance(rejected, RequestRejected)
    assert (rejected.kind, rejected.retry_after) == ("unavailable", 1.0)
    assert len(watched.supervision) == 0


def test_placed_attempts_that_keep_failing_are_tried_ever_more_slowly_until_a_token_comes() -> None:
    watched, now = Watched(replace(POLICY, attempts=9)), 0.0
    for attempt, pause in ((1, 0.0), (2, 0.25), (3, 0.5), (4, 1.0)):
        watched.placed(now, attempt=attempt)
        effects = watched.supervision.handle(RequestFailed(R, Attempt(attempt), "no luck"), now)
        if pause:
            assert watched.supervision.tick(now + pause - 0.01) == []
            now += pause
            effects = watched.supervision.tick(now)
        assert dispatched(effects).attempt == attempt + 1
    watched.placed(now, attempt=5)
    watched.delta(0, now, attempt=5)
    assert dispatched(watched.supervision.handle(RequestFailed(R, Attempt(5), "no luck"), now)).attempt == 6


def test_attempts_that_bring_tokens_do_not_count_as_a_row_but_are_bounded_in_all() -> None:
    watched, now = Watched(), 0.0
    for attempt in range(1, POLICY.attempts_in_all + 1):
        watched.placed(now, attempt=attempt)
        assert len(watched.delta(attempt - 1, now, attempt=attempt)) == 1
        effects = watched.supervision.handle(RequestFailed(R, Attempt(attempt), "crash"), now)
    assert isinstance(effects[-1], RequestRejected)


def test_where_no_tokenizer_is_there_the_request_waits_for_one_but_not_for_ever() -> None:
    watched = Watched()
    message = first_message()
    assert watched.supervision.undelivered(message, 0.0) == []
    now = 0.0
    while now < 29.0:
        now += 1.1
        message = dispatched(watched.supervision.tick(now))
        assert watched.supervision.undelivered(message, now) == []
    *_, rejected = watched.supervision.tick(30.1)
    assert isinstance(rejected, RequestRejected)


def test_pauses_grow_up_to_a_limit() -> None:
    watched, now, message = Watched(), 0.0, first_message()
    for pause in (0.25, 0.5, 1.0, 1.0):
        watched.supervision.undelivered(message, now)
        assert watched.supervision.tick(now + pause - 0.01) == []
        now += pause
        message = dispatched(watched.supervision.tick(now))


def test_a_request_that_queues_is_patient_until_its_deadline() -> None:
    watched = Watched()
    watched.supervision.handle(RequestQueued(R, Attempt(1)), 0.1)
    assert watched.supervision.tick(29.9) == []
    withdraw, rejected = watched.supervision.tick(30.1)
    assert withdraw == Withdraw(R, Attempt(1))
    assert isinstance(rejected, RequestRejected)


def test_a_request_that_vanishes_before_it_is_placed_is_tried_again_ever_more_slowly() -> None:
    watched = Watched()
    assert watched.supervision.tick(9.9) == []
    assert dispatched(watched.supervision.tick(10.1)).attempt == 2
    assert watched.supervision.tick(29.9) == []


def test_a_verdict_is_final_but_a_full_house_is_not_for_whoever_was_let_in() -> None:
    verdict = RequestRejected(request=R, attempt=Attempt(1), kind="invalid_request", message="no")
    full = RequestRejected(request=R, attempt=Attempt(1), kind="overloaded", message="full", retry_after=1.0)
    assert Watched().supervision.handle(verdict, 0.1) == [verdict]
    assert Watched().supervision.handle(full, 0.1) == [full]
    watched = streaming(2)
    watched.supervision.handle(RequestFailed(R, Attempt(1), "crash"), 1.1)
    later = RequestRejected(request=R, attempt=Attempt(2), kind="overloaded", message="full", retry_after=1.0)
    assert not any(isinstance(effect, RequestRejected) for effect in watched.supervision.handle(later, 1.2))
    assert dispatched(watched.supervision.tick(1.5)).attempt == 3


def test_a_client_that_leaves_frees_what_its_request_holds_wherever_it_is() -> None:
    assert Watched().supervision.close(R, 0.1) == [Withdraw(R, Attempt(1))]
    assert streaming().supervision.close(R, 1.1) == [CancelAttempt(ENGINE, Cancel(R, Attempt(1)))]


def test_a_placement_that_comes_too_late_is_cancelled() -> None:
    watched = Watched()
    watched.supervision.close(R, 0.1)
    assert watched.placed(0.2) == [CancelAttempt(ENGINE, Cancel(R, Attempt(1)))]


def test_an_engine_that_missed_the_cancel_is_told_again() -> None:
    watched = streaming()
    watched.supervision.close(R, 1.1)
    assert watched.delta(2, 1.2) == []
    assert watched.delta(3, 2.2) == [CancelAttempt(ENGINE, Cancel(R, Attempt(1)))]
    assert watched.delta(4, 2.3) == []


def opened_by(engine: EngineId | None, attempt: int = 1) -> tuple[StreamOpened, ...]:
    return (StreamOpened(R, Attempt(attempt), 5, 2, engine=engine),)


def test_a_stream_that_opens_for_nobody_is_cancelled_where_it_runs_though_its_placement_was_lost() -> None:
    watched = Watched()
    assert watched.supervision.close(R, 0.1) == [Withdraw(R, Attempt(1))]
    assert watched.deltas((), 0.2, opened=opened_by(OTHER)) == [CancelAttempt(OTHER, Cancel(R, Attempt(1)))]
    late = Delta(R, Attempt(1), 1, (1,), "b")
    assert watched.deltas((late,), 0.3, opened=()) == []
    assert watched.deltas((late,), 1.3, opened=()) == [CancelAttempt(OTHER, Cancel(R, Attempt(1)))]


def test_an_attempt_that_was_not_placed_in_time_is_cancelled_where_it_runs_and_the_next_one_is_not() -> None:
    watched = Watched()
    assert dispatched(watched.supervision.tick(10.1)).attempt == 2
    assert watched.deltas((), 10.2, opened=opened_by(OTHER)) == [CancelAttempt(OTHER, Cancel(R, Attempt(1)))]
    assert len(watched.deltas((), 10.3, opened=opened_by(ENGINE, 2))) == 1
    assert watched.supervision.close(R, 10.4) == [CancelAttempt(ENGINE, Cancel(R, Attempt(2)))]


def test_what_an_engine_without_a_name_sends_on_is_withdrawn_again() -> None:
    watched = Watched()
    watched.supervision.close(R, 0.1)
    assert watched.delta(0, 0.2) == []
    assert watched.delta(1, 1.2) == [Withdraw(R, Attempt(1))]
    assert watched.delta(2, 1.3) == []


def test_what_still_queues_for_nobody_is_withdrawn_again() -> None:
    watched = Watched()
    watched.supervision.close(R, 0.1)
    assert watched.supervision.handle(RequestQueued(R, Attempt(1)), 1.1) == [Withdraw(R, Attempt(1))]


def test_an_opened_stream_names_its_engine_to_those_that_wait_for_it() -> None:
    watched = Watched()
    watched.deltas((), 0.1, opened=opened_by(ENGINE))
    assert watched.supervision.tick(2.2) == [ProbeEngine(ENGINE, Probe(R, Attempt(1)))]


def test_tokens_may_overtake_the_word_of_their_placement() -> None:
    watched = Watched()
    assert len(watched.delta(0, 0.1)) == 1
    assert watched.placed(0.2) == []
    assert watched.supervision.tick(2.3) == [ProbeEngine(ENGINE, Probe(R, Attempt(1)))]


def test_a_silent_stream_whose_engine_was_never_named_is_tried_again() -> None:
    watched = Watched()
    watched.delta(0, 0.1)
    assert unpack(dispatched(watched.supervision.tick(2.2)).resume) == [0]


def test_usage_is_told_once_by_the_first_attempt() -> None:
    watched = Watched()
    assert len(watched.deltas((), 0.1, opened=(StreamOpened(R, Attempt(1), 5, 2),))) == 1
    watched.supervision.handle(RequestFailed(R, Attempt(1), "crash"), 0.2)
    assert watched.deltas((), 0.3, opened=(StreamOpened(R, Attempt(2), 5, 5),)) == []


def keyed() -> Watched:
    watched = Watched()
    watched.supervision.close(R, 0.0)
    watched.supervision.open(replace(first_message(), key="alice"), 0.0)
    return watched


def test_what_a_request_of_a_key_has_generated_is_told_to_whoever_placed_it() -> None:
    watched = keyed()
    watched.placed(0.1)
    watched.delta(0, 0.2)
    last = Delta(R, Attempt(1), 1, (2,), "", "stop")
    assert watched.deltas((last,), 0.3) == [last, RequestEnded(R, 2)]
    watched = keyed()
    watched.placed(0.1)
    watched.delta(0, 0.2)
    assert watched.supervision.close(R, 0.3)[1:] == [RequestEnded(R, 1)], "its client has left"
    assert keyed().supervision.close(R, 0.1) == [Withdraw(R, Attempt(1))], "nobody counted it"


def test_nothing_takes_longer_than_a_request_may_take() -> None:
    watched = streaming()
    stop, rejected = watched.supervision.tick(1000.1)
    assert stop == CancelAttempt(ENGINE, Cancel(R, Attempt(1)))
    assert isinstance(rejected, RequestRejected)


def test_an_instance_that_was_started_anew_counts_its_messages_anew() -> None:
    watched = streaming(2)
    watched.supervision.instance_gone(life("detokenizer", DETOKENIZER), "restarted", 1.1)
    watched.placed(1.2, attempt=2)
    watched.number = 0
    assert len(watched.delta(2, 1.3, attempt=2)) == 1


def test_the_engine_that_took_over_is_the_one_that_counts() -> None:
    watched = Watched()
    watched.placed(1.0)
    assert watched.handed_over(2.0) == []
    assert watched.supervision.instance_gone(life("scheduler", ENGINE), "died", 3.0) == []
    assert watched.supervision.tick(4.5) == [ProbeEngine(OTHER, Probe(R, Attempt(1)))]
    again = watched.supervision.instance_gone(life("scheduler", OTHER), "died", 5.0)
    assert CancelAttempt(OTHER, Cancel(R, Attempt(1), DETOKENIZER)) in again
    assert dispatched(again).avoid == (OTHER,)


def test_a_hand_over_holds_whenever_it_is_told() -> None:
    """Before the coordinator's word, before and after the first token."""
    for before, after in (((), ("token",)), (("token",), ())):
        watched = Watched()
        for _ in before:
            watched.delta(0, 0.5)
        watched.handed_over(1.0)
        watched.placed(1.1)
        for _ in after:
            watched.delta(0, 1.2)
        assert watched.supervision.instance_gone(life("scheduler", ENGINE), "died", 2.0) == []
        assert watched.supervision.close(R, 3.0) == [CancelAttempt(OTHER, Cancel(R, Attempt(1), DETOKENIZER))]


def test_the_next_attempt_may_begin_where_the_one_before_was_handed_over() -> None:
    watched = Watched()
    watched.handed_over(1.0)
    watched.supervision.instance_gone(life("scheduler", OTHER), "died", 2.0)
    watched.placed(3.0, attempt=2)
    assert watched.supervision.close(R, 4.0) == [CancelAttempt(ENGINE, Cancel(R, Attempt(2)))]


def test_a_hand_over_that_nobody_wants_any_more_is_cancelled_where_it_went() -> None:
    watched = Watched()
    watched.placed(1.0)
    assert watched.supervision.close(R, 2.0) == [CancelAttempt(ENGINE, Cancel(R, Attempt(1)))]
    assert watched.handed_over(3.0) == [CancelAttempt(OTHER, Cancel(R, Attempt(1), DETOKENIZER))]


def test_an_attempt_that_failed_of_what_caches_may_hold_is_repeated_without_them() -> None:
    watched = streaming(tokens=2)
    again = dispatched(watched.supervision.handle(RequestFailed(R, Attempt(1), "NaN", caches_doubtful=True), 1.1))
    assert (again.prefix_caching, again.avoid) == (False, (ENGINE,))
    watched.placed(1.2, attempt=2, engine=OTHER)
    watched.supervision.handle(RequestFailed(R, Attempt(2), "the engine died"), 1.3)
    later = dispatched(watched.supervision.tick(3.0))
    assert not later.prefix_caching, "nobody has shown yet that they are sound"


def test_output_without_its_opening_shows_a_loss() -> None:
    """The message that had it was lost; without it the client would be told of a prompt of no tokens."""
    watched = Watched()
    watched.placed(0.5)
    begun = (Delta(R, Attempt(1), 0, (5,), "a"),)
    tokenize = dispatched(watched.deltas(begun, 1.0, skip=1, opened=()))
    assert tokenize.attempt == 2
    opened = (StreamOpened(R, Attempt(2), 9, 0),)
    assert watched.deltas((Delta(R, Attempt(2), 0, (5,), "a"),), 2.0, opened=opened)[0] == opened[0]


def test_of_notices_in_any_order_the_last_engine_counts() -> None:
    """Decode-first: an engine takes the request, has another compute the prompt, and gets it back."""
    notices = (
        RequestPlaced(R, Attempt(1), ENGINE, DETOKENIZER),
        RequestPlaced(R, Attempt(1), OTHER, DETOKENIZER, handed_by=ENGINE, passes=1),
        RequestPlaced(R, Attempt(1), ENGINE, DETOKENIZER, handed_by=OTHER, passes=2),
    )
    for order in permutations(notices):
        watched = Watched()
        for placed in order:
            assert watched.supervision.handle(placed, 1.0) == []
        assert watched.supervision.instance_gone(life("scheduler", OTHER), "died", 2.0) == []
        assert watched.supervision.close(R, 3.0) == [CancelAttempt(ENGINE, Cancel(R, Attempt(1), DETOKENIZER))]
