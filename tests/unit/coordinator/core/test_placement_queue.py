"""What a coordinator does with requests that no engine can take at once, or ever."""

from __future__ import annotations

import pytest

from services.coordinator.config import CoordinatorConfig
from services.coordinator.core.actions import CancelOnEngine, NotifyGateway, PlaceRequest
from services.coordinator.core.coordinator import Coordinator
from shared.ids import Attempt, EngineId, InstanceId, RequestId
from shared.messages.coordinator import Withdraw
from shared.messages.gateway import RequestPlaced, RequestQueued, RequestRejected
from shared.messages.lifecycle import Lifecycle
from shared.messages.scheduler import Cancel, GenerateRequest
from tests.support.engines.coordinator_events import GATEWAY, at, detokenizer, engine, life, route, summary

FULL = engine("a", waiting=8)
CONFIG = CoordinatorConfig(queue_limit=2, queue_timeout=10)


def coordinator(*lives: Lifecycle, config: CoordinatorConfig = CONFIG) -> Coordinator:
    core = Coordinator(InstanceId("coordinator-1"), config)
    for heard in lives:
        core.lifecycle(heard, at(0))
    return core


def rejection(core: Coordinator, **parameters: object) -> RequestRejected:
    (action,) = core.route(route("r", **parameters), at(1))  # type: ignore[arg-type]
    assert isinstance(action, NotifyGateway)
    assert isinstance(action.message, RequestRejected)
    return action.message


def test_a_prompt_over_the_context_is_the_clients_fault() -> None:
    rejected = rejection(coordinator(engine("a"), detokenizer()), prompt=64, max_tokens=None)
    assert (rejected.kind, rejected.field) == ("invalid_request", "messages")
    assert rejected.message == (
        "This model's maximum context length is 64 tokens. However, your request has 64 input tokens, and the output "
        "needs one at least. Please reduce the length of the input."
    )
    assert rejected.code == "context_length_exceeded"


def test_a_prompt_that_leaves_room_for_one_token_is_served() -> None:
    core = coordinator(engine("a"), detokenizer())
    assert summary(core.route(route("r", prompt=63, max_tokens=None), at(1))) == [("place", "r", "a")]


def test_an_output_limit_above_what_is_left_of_the_context_is_cut_to_it_as_vllm_does() -> None:
    core = coordinator(engine("a"), detokenizer())
    (placed,) = (a for a in core.route(route("r", prompt=60, max_tokens=64), at(1)) if isinstance(a, PlaceRequest))
    assert placed.generate.generation.stopping.max_tokens == 4


def test_more_tokens_than_the_context_holds_are_refused_as_vllm_does() -> None:
    rejected = rejection(coordinator(engine("a"), detokenizer()), prompt=60, max_tokens=65)
    assert (rejected.kind, rejected.field) == ("invalid_request", "max_tokens")
    assert rejected.message == (
        "'max_tokens' or 'max_completion_tokens' is too large: 65. This model's maximum context length is 64 tokens "
        "and your request has 60 input tokens (65 > 64 - 60)."
    )


def test_a_request_queued_before_the_model_was_known_is_judged_when_it_is() -> None:
    core = coordinator()
    assert summary(core.route(route("r", prompt=99), at(1))) == [("queued", "r")]
    core.lifecycle(detokenizer(), at(1.5))
    assert summary(core.lifecycle(engine("a"), at(2))) == [("rejected", "r", "invalid_request")]


def test_the_queue_is_first_come_first_served_within_a_priority() -> None:
    core = coordinator(FULL, detokenizer(), config=CoordinatorConfig(queue_limit=9))
    for request, priority, arrival in (("late", 0, 2.0), ("early", 0, 1.0), ("urgent", -1, 3.0)):
        assert summary(core.route(route(request, priority=priority, arrival=arrival), at(1))) == [("queued", request)]
    placed = core.lifecycle(engine("a", waiting=6), at(1.5)) + core.lifecycle(engine("a", waiting=7), at(2))
    assert [line[1] for line in summary(placed)] == ["urgent", "early", "late"]


def test_a_new_request_does_not_overtake_the_queue() -> None:
    core = coordinator(FULL, detokenizer())
    core.route(route("first", arrival=1.0), at(1))
    core.fleet.record_lifecycle(engine("a", waiting=7), at(2))  # room for one, and no request was placed for it yet
    actions = core.route(route("second", arrival=2.0), at(2))
    assert summary(actions) == [("place", "first", "a"), ("queued", "second")]


def test_a_full_queue_is_overloaded_and_says_when_to_come_back() -> None:
    core = coordinator(FULL, detokenizer())
    core.route(route("r0"), at(1))
    core.route(route("r1"), at(1))
    (action,) = core.route(route("r2"), at(4.5))
    assert isinstance(action, NotifyGateway)
    assert isinstance(action.message, RequestRejected)
    assert (action.message.kind, action.message.retry_after) == ("overloaded", 4.0)
    assert len(core.queue) == 2


def test_without_any_queue_a_request_still_finds_a_free_engine() -> None:
    core = coordinator(engine("a"), detokenizer(), config=CoordinatorConfig(queue_limit=0))
    assert summary(core.route(route("r"), at(1))) == [("place", "r", "a")]


def test_waiting_has_an_end() -> None:
    core = coordinator(FULL, detokenizer())
    core.route(route("r"), at(1))
    for second in range(2, 12):
        core.lifecycle(FULL, at(second))
        core.lifecycle(detokenizer(), at(second))
        assert summary(core.time_passed(at(second))) == [("queued", "r")]
    assert summary(core.time_passed(at(11.5))) == [("rejected", "r", "overloaded")]
    assert core.time_passed(at(12)) == []


def test_the_gateway_is_notified_again_and_again_that_its_request_waits() -> None:
    core = coordinator(FULL, detokenizer())
    assert core.route(route("r"), at(1)) == [NotifyGateway(GATEWAY, RequestQueued(RequestId("r"), Attempt(1)))]
    assert core.time_passed(at(1.5)) == []
    assert core.time_passed(at(2.0)) == [NotifyGateway(GATEWAY, RequestQueued(RequestId("r"), Attempt(1)))]


def test_a_request_for_which_nobody_is_there_waits_like_any_other_and_then_hears_why() -> None:
    core = coordinator()
    assert summary(core.route(route("r"), at(1))) == [("queued", "r")]
    core.lifecycle(engine("a", "draining"), at(2))
    assert summary(core.time_passed(at(11))) == [("queued", "r")]
    (action,) = core.time_passed(at(11.1))
    assert isinstance(action, NotifyGateway)
    assert isinstance(action.message, RequestRejected)
    assert action.message.kind == "unavailable"
    assert action.message.message == "waited 10 s, but no engine for the model 'demo/model' is ready"


def test_an_engine_that_comes_back_finds_its_requests() -> None:
    core = coordinator()
    core.lifecycle(engine("a"), at(20))
    core.lifecycle(detokenizer(), at(20))
    core.lifecycle(engine("a", "failed"), at(21))
    core.lifecycle(detokenizer(), at(22))
    assert summary(core.route(route("r"), at(22))) == [("queued", "r")]
    assert summary(core.lifecycle(engine("a", incarnation=2), at(23))) == [("place", "r", "a")]


def test_without_a_detokenizer_requests_wait_and_then_hear_why() -> None:
    core = coordinator(engine("a"))
    assert summary(core.route(route("r"), at(1))) == [("queued", "r")]
    core.lifecycle(engine("a"), at(11))
    (action,) = core.time_passed(at(11.5))
    assert isinstance(action, NotifyGateway)
    assert isinstance(action.message, RequestRejected)
    assert action.message.message == "waited 10 s, but no detokenizer is ready"


def test_a_withdrawn_request_is_neither_kept_nor_taken_later() -> None:
    core = coordinator(FULL, detokenizer())
    core.route(route("r"), at(1))
    assert core.withdraw(Withdraw(RequestId("r"), Attempt(1))) == []
    assert len(core.queue) == 0
    assert core.route(route("r"), at(1)) == []
    assert core.withdraw(Withdraw(RequestId("unseen"), Attempt(1))) == []
    assert core.route(route("unseen"), at(1)) == []


def test_a_withdrawal_of_an_old_attempt_leaves_the_new_one_alone() -> None:
    core = coordinator(FULL, detokenizer())
    core.route(route("r", 2), at(1))
    assert core.withdraw(Withdraw(RequestId("r"), Attempt(1))) == []
    assert RequestId("r") in core.queue


def test_a_withdrawn_request_is_cancelled_where_it_was_placed_but_a_newer_attempt_is_not() -> None:
    core = coordinator(engine("a"), detokenizer())
    assert summary(core.route(route("r", 2), at(1))) == [("place", "r", "a")]
    assert core.withdraw(Withdraw(RequestId("r"), Attempt(1))) == []
    (cancel,) = core.withdraw(Withdraw(RequestId("r"), Attempt(2)))
    assert cancel == CancelOnEngine(EngineId("a"), Cancel(RequestId("r"), Attempt(2)))
    assert core.withdraw(Withdraw(RequestId("r"), Attempt(2))) == [cancel], "the first may have been lost"


def test_stale_attempts_are_dropped_and_new_ones_take_their_place() -> None:
    core = coordinator(FULL, detokenizer())
    core.route(route("r", 1), at(1))
    assert summary(core.route(route("r", 2), at(1))) == [("queued", "r")]
    assert core.route(route("r", 1), at(1)) == []
    assert core.route(route("r", 2), at(1)) == []
    assert [w.generation.attempt for w in core.queue] == [2]


def test_a_placement_that_found_nobody_goes_elsewhere_at_once() -> None:
    core = coordinator(engine("a"), engine("b", waiting=1), detokenizer())
    (first,) = core.route(route("r"), at(1))
    assert isinstance(first, PlaceRequest)
    assert first.engine == "a"
    assert summary(core.engine_unreachable(first.generate, at(1))) == [("place", "r", "b")]
    assert summary(core.route(route("s"), at(1))) == [("place", "s", "b")]
    core.lifecycle(engine("a"), at(1.5))
    assert summary(core.route(route("t"), at(1.5))) == [("place", "t", "a")]


def test_a_placement_that_found_nobody_is_dropped_when_the_gateway_has_moved_on() -> None:
    core = coordinator(engine("a"), engine("b"), detokenizer())
    (first,) = core.route(route("r"), at(1))
    assert isinstance(first, PlaceRequest)
    core.withdraw(Withdraw(RequestId("r"), Attempt(1)))
    assert core.engine_unreachable(first.generate, at(1)) == []
    unknown = GenerateRequest(route("u").generation, first.generate.detokenizer)
    assert core.engine_unreachable(unknown, at(1)) == []


def test_when_the_gateway_is_gone_nothing_is_generated_for_it() -> None:
    core = coordinator(engine("a", max_running=1, max_waiting=0), detokenizer())
    (placed,) = core.route(route("r"), at(1))
    assert isinstance(placed, PlaceRequest)
    (queued,) = core.route(route("s"), at(1))
    assert isinstance(queued, NotifyGateway)
    assert summary(
        core.gateway_unreachable(RequestPlaced(RequestId("r"), Attempt(1), placed.engine, placed.generate.detokenizer))
    ) == [("cancel", "r", "a")]
    assert core.gateway_unreachable(queued.message) == []
    assert len(core.queue) == 0


def test_a_drained_coordinator_hands_its_queue_to_another_and_may_get_it_back() -> None:
    core = coordinator(FULL, detokenizer())
    core.route(route("r"), at(1))
    assert core.release_queue() == []
    core.lifecycle(life("coordinator", "coordinator-2"), at(1))
    (handed,) = core.release_queue()
    assert handed == route("r")
    assert len(core.queue) == 0
    assert summary(core.route(handed, at(2))) == [("queued", "r")]


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.coordinator.core.coordinator.MAX_REMEMBERED", 3)
    core = coordinator(config=CoordinatorConfig(queue_limit=0))
    for i in range(10):
        core.route(route(f"r{i}"), at(30))
    assert len(core._fence._attempts) == 3
