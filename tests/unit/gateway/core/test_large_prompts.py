"""Large prompts: how many are on their way to tokenizers at a time, and when they are sent again."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from services.gateway.core.dispatch_window import WINDOW_BYTES
from services.gateway.core.effects import DispatchAttempt
from services.gateway.core.open_request import LARGE_BYTES, OpenRequest
from services.gateway.core.supervisor import RequestSupervisor
from shared.ids import Attempt, InstanceId, RequestId
from shared.messages.gateway import PromptsHeld, RequestPlaced, RequestQueued, RequestRejected
from shared.messages.lifecycle import Service
from shared.messages.tokenizer import TextPrompt
from tests.unit.gateway.core.test_supervisor import DETOKENIZER, ENGINE, POLICY, first_message, life

MIB = 2**20
PER_MIB = 1.0
"""Seconds that a MiB of prompt has longer."""


def opened(core: RequestSupervisor, name: str, size: int, now: float = 0.0) -> list[Any]:
    prompt = TextPrompt("x" * size)
    return sent(core.open(replace(first_message(RequestId(name)), prompt=prompt), now))


def sent(effects: list[Any]) -> list[tuple[str, int]]:
    """Which attempts are dispatched."""
    return [(e.tokenize.request, e.tokenize.attempt) for e in effects if isinstance(e, DispatchAttempt)]


def held(core: RequestSupervisor, name: str, now: float, tokenizer: str = "t-1", attempt: int = 1) -> None:
    message = PromptsHeld(InstanceId(tokenizer), ((RequestId(name), Attempt(attempt)),))
    assert core.handle(message, now) == []


def placed(core: RequestSupervisor, name: str, now: float) -> None:
    assert core.handle(RequestPlaced(RequestId(name), Attempt(1), ENGINE, DETOKENIZER), now) == []


def gone(core: RequestSupervisor, instance: str, now: float, service: Service = "tokenizer") -> list[Any]:
    return sent(core.instance_gone(life(service, instance), "failed", now))


def test_a_prompt_that_a_tokenizer_has_is_not_sent_again() -> None:
    core = RequestSupervisor(POLICY)
    opened(core, "r", 4 * MIB)
    for now in range(1, 28):
        held(core, "r", float(now))
        assert core.tick(now + 0.5) == []
    due = 27 + POLICY.placement_s + 4 * PER_MIB
    core = RequestSupervisor(replace(POLICY, queue_s=500.0))
    opened(core, "r", 4 * MIB)
    held(core, "r", 27.0)
    assert core.tick(due - 0.1) == []
    assert sent(core.tick(due + 0.1)) == [("r", 2)], "the tokenizer has become silent"


def test_a_prompt_that_a_tokenizer_has_waits_no_longer_than_any_other() -> None:
    core = RequestSupervisor(POLICY)
    opened(core, "r", 4 * MIB)
    held(core, "r", POLICY.queue_s)
    *_, rejected = core.tick(POLICY.queue_s + 0.1)
    assert isinstance(rejected, RequestRejected)


def test_a_large_prompt_has_longer_and_a_small_one_does_not() -> None:
    core = RequestSupervisor(POLICY)
    opened(core, "large", 4 * MIB)
    opened(core, "small", 4096)
    assert sent(core.tick(POLICY.placement_s + 0.1)) == [("small", 2)]
    assert sent(core.tick(POLICY.placement_s + 4 * PER_MIB + 0.1)) == [("large", 2)]


def test_a_silent_tokenizer_may_be_busy_with_what_is_large() -> None:
    core = RequestSupervisor(POLICY)
    opened(core, "large", 4 * MIB)
    opened(core, "small", 4096)
    assert sent(core.instance_silent(life("tokenizer", "t-1"), "silent", 2.0)) == [("small", 2)]
    assert gone(core, "t-1", 6.0) == [("large", 2), ("small", 3)]


def test_a_silent_coordinator_may_have_lost_its_queue_whatever_is_in_it() -> None:
    core = RequestSupervisor(POLICY)
    opened(core, "large", 4 * MIB)
    core.handle(RequestQueued(RequestId("large"), Attempt(1)), 0.1)
    assert sent(core.instance_silent(life("coordinator", "c"), "silent", 2.0)) == [("large", 2)]


def test_only_what_a_dead_tokenizer_may_have_had_is_sent_again() -> None:
    core = RequestSupervisor(POLICY)
    for name in ("one", "other", "unknown"):
        opened(core, name, 4 * MIB)
    held(core, "one", 1.0, "t-1")
    held(core, "other", 1.0, "t-2")
    assert gone(core, "c", 1.1, "coordinator") == [("unknown", 2)], "tokenizers find another coordinator"
    assert gone(core, "t-2", 1.2) == [("other", 2), ("unknown", 3)]
    held(core, "other", 1.3, "t-1", attempt=1)
    assert gone(core, "t-2", 1.4) == [("other", 3), ("unknown", 4)], "an attempt that was given up is nobody's"


def test_no_more_than_a_window_of_large_prompts_is_on_its_way() -> None:
    core, window = RequestSupervisor(POLICY), WINDOW_BYTES // (4 * MIB)
    names = [f"r{number}" for number in range(window + 3)]
    assert [opened(core, name, 4 * MIB) != [] for name in names] == [True] * window + [False] * 3
    assert opened(core, "small", LARGE_BYTES) == [("small", 1)]
    assert core.tick(0.25) == []
    placed(core, names[0], 0.3)
    assert sent(core.tick(0.5)) == [(names[window], 1)], "the oldest of those that wait"
    core.close(RequestId(names[1]), 0.6)
    core.handle(
        RequestRejected(request=RequestId(names[2]), attempt=Attempt(1), kind="invalid_request", message="no"), 0.6
    )
    assert sent(core.tick(0.75)) == [(names[window + 1], 1), (names[window + 2], 1)]


def test_a_smaller_prompt_does_not_overtake_a_larger_one() -> None:
    core = RequestSupervisor(POLICY)
    assert opened(core, "first", 12 * MIB) == [("first", 1)]
    assert opened(core, "second", 6 * MIB) == []
    assert opened(core, "third", MIB) == []
    assert core.tick(0.25) == []
    placed(core, "first", 0.3)
    assert opened(core, "fourth", MIB) == []
    assert sent(core.tick(0.5)) == [("second", 1), ("third", 1), ("fourth", 1)]


def test_one_that_is_larger_than_the_window_goes_alone() -> None:
    core = RequestSupervisor(POLICY)
    assert opened(core, "first", MIB) == [("first", 1)]
    assert opened(core, "huge", 2 * WINDOW_BYTES) == []
    placed(core, "first", 0.1)
    assert sent(core.tick(0.25)) == [("huge", 1)]


def test_what_waits_for_room_is_given_up_as_what_waits_for_an_engine() -> None:
    core = RequestSupervisor(POLICY)
    opened(core, "first", WINDOW_BYTES)
    opened(core, "second", MIB)
    held(core, "first", POLICY.queue_s - 0.1)
    rejected = [each for each in core.tick(POLICY.queue_s + 0.1) if isinstance(each, RequestRejected)]
    assert [each.request for each in rejected] == ["first", "second"]


def test_the_retries_of_an_outage_are_no_flood() -> None:
    """All that a dead engine had is to be computed anew, as fast as tokenizers take it."""
    core = RequestSupervisor(POLICY)
    names = [f"r{number}" for number in range(10)]
    for name in names:
        opened(core, name, 4 * MIB)
        core.tick(0.0)
        placed(core, name, 0.1)
    again = sent(core.instance_gone(life("scheduler", ENGINE), "failed", 1.0))
    assert again == [(name, 2) for name in names[:4]]
    assert sent(core.tick(1.25)) == []


def test_pauses_grow_with_what_each_attempt_sends() -> None:
    core, now = RequestSupervisor(POLICY), 0.0
    opened(core, "r", 2 * MIB)
    message = replace(first_message(RequestId("r")), prompt=TextPrompt("x" * 2 * MIB))
    for pause in (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 8.0):
        core.undelivered(message, now)
        assert core.tick(now + pause - 0.01) == []
        now += pause
        [dispatch] = [each for each in core.tick(now) if isinstance(each, DispatchAttempt)]
        message = dispatch.tokenize


def test_nothing_of_a_request_stays_when_it_has_ended() -> None:
    core = RequestSupervisor(POLICY)
    opened(core, "r", MIB)
    core.close(RequestId("r"), 1.0)
    core.tick(1.25)
    kept: list[OpenRequest] = core._window._large
    assert kept == []
