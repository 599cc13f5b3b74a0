"""Requests that processes die of: suspects first, then given up and refused; those beside them go on."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from services.gateway.core.effects import CancelAttempt, DispatchAttempt
from services.gateway.core.open_request import RetryPolicy
from services.gateway.core.poisoned import fingerprint
from services.gateway.core.supervisor import RequestSupervisor
from shared.ids import Attempt, DetokenizerId, EngineId, RequestId
from shared.messages.gateway import Death, RequestFailed, RequestPlaced, RequestRejected
from shared.messages.generation import Grammar, SamplingOptions
from shared.messages.lifecycle import Lifecycle
from shared.messages.tokenizer import TextPrompt, Tokenize
from tests.unit.gateway.core.test_supervisor import first_message, life

POLICY = RetryPolicy(suspect_tokens=6, refuse_s=600.0)
A, B = RequestId("a"), RequestId("b")


class Supervision:
    """Two open requests on one engine."""

    def __init__(self) -> None:
        self.core = RequestSupervisor(POLICY)
        for request in (A, B):
            self.core.open(message(request), 0.0)
            self.place(request, 1)

    def place(self, request: RequestId, attempt: int, engine: str = "engine-1") -> None:
        self.core.handle(
            RequestPlaced(request, Attempt(attempt), EngineId(engine), DetokenizerId("detokenizer-1")), 0.1
        )

    def fail(self, request: RequestId, attempt: int, death: Death | None, reached: int = 0) -> list[Any]:
        return self.core.handle(RequestFailed(request, Attempt(attempt), "a rank died", death, reached), 1.0)

    def gone(self, last: Lifecycle, reason: str) -> list[Any]:
        return self.core.instance_gone(last, reason, 1.0)


def message(request: RequestId, prompt: str | None = None, seed: int = 7) -> Tokenize:
    """Prompts differ, unless told otherwise."""
    sampling = SamplingOptions(seed=seed)
    return replace(first_message(request), prompt=TextPrompt(prompt or request), sampling=sampling)


def suspicions(effects: list[Any]) -> dict[RequestId, int | None]:
    """Of all that is dispatched."""
    dispatched = [effect.tokenize for effect in effects if isinstance(effect, DispatchAttempt)]
    return {tokenize.request: tokenize.suspect_until for tokenize in dispatched}


def rejected(effects: list[Any]) -> list[tuple[RequestId, str]]:
    return [(effect.request, effect.kind) for effect in effects if isinstance(effect, RequestRejected)]


def test_one_death_makes_suspects_of_all_that_were_there_and_blames_nobody() -> None:
    effects = Supervision().gone(life("scheduler", "engine-1"), "failed")
    assert suspicions(effects) == {A: 6, B: 6}
    assert rejected(effects) == []


def test_a_suspect_is_computed_alone_until_it_is_beyond_its_death() -> None:
    assert suspicions(Supervision().fail(A, 1, "beside others", reached=40)) == {A: 41}


def test_the_second_death_ends_who_was_alone() -> None:
    it = Supervision()
    it.gone(life("scheduler", "engine-1"), "failed")
    it.place(A, 2, "engine-2")
    it.place(B, 2, "engine-2")
    effects = it.gone(replace(life("scheduler", "engine-2"), isolated=A), "failed")
    assert rejected(effects) == [(A, "poisoned")]
    assert suspicions(it.core.tick(3.0)) == {B: 6}, "one that only waited there is no more suspect than before"
    assert A not in it.core


def test_deaths_beside_others_blame_nobody_and_lengthen_the_next_trial() -> None:
    it = Supervision()
    assert suspicions(it.fail(A, 1, "beside others")) == {A: 6}
    it.place(A, 2)
    it.fail(A, 2, "beside others")
    it.core.tick(9.0)
    assert rejected(it.fail(A, 3, None)) == []
    assert A in it.core


def test_stops_silence_and_other_failures_make_no_suspects() -> None:
    assert suspicions(Supervision().gone(replace(life("scheduler", "engine-1"), load=2), "stopped")) == {
        A: None,
        B: None,
    }
    assert suspicions(Supervision().gone(life("scheduler", "engine-1"), "silent for 2 s")) == {A: None, B: None}
    assert suspicions(Supervision().fail(A, 1, None)) == {A: None}


def test_an_equal_request_is_refused_at_once_for_a_while() -> None:
    it = Supervision()
    it.fail(A, 1, "alone")
    assert rejected(it.fail(A, 2, "alone")) == [(A, "poisoned")]
    again = message(RequestId("c"), prompt="a", seed=8)
    assert rejected(it.core.open(again, 500.0)) == [(RequestId("c"), "poisoned")]
    assert RequestId("c") not in it.core
    assert suspicions(it.core.open(message(RequestId("d"), prompt="other"), 500.0)) == {RequestId("d"): None}
    assert suspicions(it.core.open(again, 601.0)) == {RequestId("c"): None}


def test_suspects_that_are_equal_end_together() -> None:
    it = Supervision()
    twin = RequestId("twin")
    it.core.open(message(twin, prompt="a"), 0.0)
    it.place(twin, 1)
    it.gone(life("scheduler", "engine-1"), "failed")
    assert sorted(rejected(it.fail(A, 2, "alone"))) == [(A, "poisoned"), (twin, "poisoned")]


def test_a_tokenizer_dies_of_what_was_dispatched() -> None:
    it = Supervision()
    it.core.open(message(RequestId("c")), 0.0)
    assert suspicions(it.gone(life("tokenizer", "tokenizer-1"), "failed")) == {RequestId("c"): 6}
    effects = it.gone(replace(life("tokenizer", "tokenizer-2"), isolated=RequestId("c")), "failed")
    assert rejected(effects) == [(RequestId("c"), "poisoned")]


WORD = Grammar("regex", "[a-z]+")


def guided(request: RequestId, grammar: Grammar = WORD) -> Tokenize:
    return replace(message(request), grammar=grammar)


class Guided(Supervision):
    """Two requests with one grammar."""

    def __init__(self) -> None:
        self.core = RequestSupervisor(POLICY)
        for request in (A, B):
            self.core.open(guided(request), 0.0)
            self.place(request, 1)

    def grammar_died(self, request: RequestId, attempt: int, now: float = 1.0) -> list[Any]:
        return self.core.handle(RequestFailed(request, Attempt(attempt), "killed", grammar_died=True), now)


def test_a_grammar_whose_process_died_is_tried_once_more_and_then_refused_by_its_hash() -> None:
    it = Guided()
    (dispatch,) = [each.tokenize for each in it.grammar_died(A, 1) if isinstance(each, DispatchAttempt)]
    assert (dispatch.attempt, dispatch.suspect_until) == (2, None), "nobody else need be kept from it"
    it.place(A, 2)
    (cancel, refused) = it.grammar_died(A, 2)
    assert isinstance(cancel, CancelAttempt)
    assert (refused.kind, refused.field) == ("poisoned", "grammar")
    assert "refused for 60 s" in refused.message
    assert B in it.core, "its own process may live"
    assert rejected(it.core.open(guided(RequestId("c")), 60.9)) == [(RequestId("c"), "poisoned")]
    other = guided(RequestId("d"), Grammar("regex", "[a-z]*"))
    assert it.core.open(other, 60.9) == [DispatchAttempt(other)]
    later = guided(RequestId("e"))
    assert it.core.open(later, 61.1) == [DispatchAttempt(later)]


def test_the_second_try_of_a_grammar_that_cost_a_process_waits_for_no_room() -> None:
    it = Guided()
    it.grammar_died(A, 1)
    full = RequestRejected(request=A, attempt=Attempt(2), kind="overloaded", message="too many", retry_after=1.0)
    assert rejected(it.core.handle(full, 2.0)) == [(A, "overloaded")]


def test_requests_that_compute_the_same_have_one_fingerprint_whoever_traces_them() -> None:
    traced = replace(message(B, "the same", seed=8), trace="00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00")
    assert fingerprint(traced) == fingerprint(message(A, "the same"))
    assert fingerprint(traced) != fingerprint(message(A, "another"))
