"""Log-probabilities of prompts as the supervision of requests and the detokenizer see them."""

from __future__ import annotations

from typing import Any

import pytest

from services.detokenizer.core.actions import ToGateway
from services.detokenizer.core.detokenizer import Detokenizer
from services.detokenizer.core.text import TokenSpelling
from services.gateway.core.effects import AttemptRetry, DispatchAttempt, Effect
from services.gateway.core.open_request import RetryPolicy
from services.gateway.core.supervisor import RequestSupervisor
from shared.ids import Attempt, DetokenizerId, EngineId, GatewayId, Incarnation, ModelName, RequestId
from shared.messages.detokenizer import NewTokens, OpenStream, PromptLogprobs, TokenBatch
from shared.messages.gateway import (
    Delta,
    Deltas,
    LogprobText,
    PositionLogprobs,
    PromptLogprobsDelta,
    RequestPlaced,
    StreamOpened,
)
from shared.messages.generation import SamplingOptions, StopConditions, TokenLogprobs
from shared.messages.tokenizer import TextPrompt, Tokenize
from shared.packing import pack

R, DETOKENIZER, ENGINE = RequestId("r"), DetokenizerId("detokenizer-1"), EngineId("engine-1")
PROMPT_TOKENS = 5


class Watched:
    """A supervision with one placed request that wants its prompt's log-probabilities."""

    def __init__(self) -> None:
        self.supervision = RequestSupervisor(RetryPolicy())
        self.number = 0
        message = Tokenize(
            request=R,
            attempt=Attempt(1),
            gateway=GatewayId("gateway-1"),
            model=ModelName("m"),
            prompt=TextPrompt("x"),
            sampling=SamplingOptions(seed=1, prompt_logprobs=0),
            stopping=StopConditions(max_tokens=4),
        )
        self.supervision.open(message, 0.0)
        self.place(1)

    def place(self, attempt: int) -> None:
        self.supervision.handle(RequestPlaced(R, Attempt(attempt), ENGINE, DETOKENIZER), 0.0)

    def hear(self, attempt: int = 1, *, opened: bool = False, **more: Any) -> list[Effect]:
        message = Deltas(
            detokenizer=DETOKENIZER,
            epoch=Incarnation(1),
            number=self.number,
            opened=(StreamOpened(R, Attempt(attempt), PROMPT_TOKENS, 0),) if opened else (),
            **more,
        )
        self.number += 1
        return self.supervision.handle(message, 0.0)


def part(first: int, end: int, attempt: int = 1) -> PromptLogprobsDelta:
    entries = tuple(PositionLogprobs(LogprobText("a", b"a", -1.0, i), ()) for i in range(first, end))
    return PromptLogprobsDelta(R, Attempt(attempt), first, entries)


def delta(position: int, attempt: int = 1) -> Delta:
    return Delta(R, Attempt(attempt), position, (7,), "b")


def test_parts_reach_the_client_as_they_come() -> None:
    watched = Watched()
    assert watched.hear(opened=True, scored=(part(1, 3),))[1:] == [part(1, 3)]
    assert watched.hear(scored=(part(3, 5),), deltas=(delta(0),)) == [part(3, 5), delta(0)]


def test_what_came_already_is_not_told_again_and_what_goes_beyond_it_is() -> None:
    watched = Watched()
    watched.hear(opened=True, scored=(part(1, 4),))
    assert watched.hear(scored=(part(1, 3),)) == []
    assert watched.hear(scored=(part(3, 5),)) == [part(3, 5)]


@pytest.mark.parametrize("lost", [(1, 3), (3, 5), (1, 5)])
def test_output_ahead_of_a_lost_part_begins_another_attempt(lost: tuple[int, int]) -> None:
    watched = Watched()
    first, end = lost
    told = [part(a, b) for a, b in ((1, first), (end, PROMPT_TOKENS)) if a < b]
    watched.hear(opened=True, scored=tuple(told))
    effects = watched.hear(deltas=(delta(0),))
    assert not any(isinstance(effect, Delta) for effect in effects)
    assert any(isinstance(effect, AttemptRetry) for effect in effects)
    (again,) = (effect.tokenize for effect in effects if isinstance(effect, DispatchAttempt))
    assert (again.attempt, again.sampling.prompt_logprobs) == (2, 0)
    watched.place(2)
    assert watched.hear(2, scored=(part(1, 5, 2),), deltas=(delta(0, 2),), opened=True)[-1] == delta(0, 2)


def test_an_attempt_behind_the_first_token_asks_for_no_scores() -> None:
    watched = Watched()
    watched.hear(opened=True, scored=(part(1, 5),), deltas=(delta(0),))
    effects = watched.hear(deltas=(delta(3),))
    (again,) = (effect.tokenize for effect in effects if isinstance(effect, DispatchAttempt))
    assert again.sampling == SamplingOptions(seed=1)
    watched.place(2)
    assert watched.hear(2, deltas=(delta(1, 2),)) == [delta(1, 2)]


def test_parts_of_an_older_attempt_are_dropped() -> None:
    watched = Watched()
    watched.hear(opened=True, deltas=(delta(0),))
    watched.place(2)
    assert watched.hear(1, scored=(part(1, 5),)) == []


def test_a_prompt_of_one_token_has_nothing_to_tell() -> None:
    watched = Watched()
    opened = (StreamOpened(R, Attempt(1), 1, 0),)
    message = Deltas(detokenizer=DETOKENIZER, epoch=Incarnation(1), number=0, opened=opened, deltas=(delta(0),))
    assert watched.supervision.handle(message, 0.0)[-1] == delta(0)


class Alphabet:
    """Token i is the letter i."""

    def spelling(self, token: int) -> TokenSpelling:
        return TokenSpelling(chr(97 + token), chr(97 + token).encode())

    def open(self, context: Any, **_: Any) -> Any:
        class Stream:
            def push(self, token: int) -> str:
                return chr(97 + token)

            def flush(self) -> str:
                return ""

        return Stream()


def test_the_detokenizer_spells_them_ahead_of_the_output() -> None:
    core = Detokenizer(DETOKENIZER, Incarnation(1), ModelName("m"), Alphabet())
    opened = OpenStream(
        request=R,
        attempt=Attempt(1),
        gateway=GatewayId("gateway-1"),
        model=ModelName("m"),
        context=pack([0, 1, 2]),
        resumed=0,
        sent_chars=0,
        prompt_tokens=3,
        cached_tokens=0,
    )
    batch = TokenBatch(
        engine=ENGINE,
        epoch=Incarnation(1),
        number=0,
        opened=(opened,),
        scored=(PromptLogprobs(R, Attempt(1), 1, (TokenLogprobs(1, -0.5, ((2, -0.25),), 2),)),),
        entries=(NewTokens(R, Attempt(1), 0, (3,)),),
    )
    (action,) = core.handle(batch)
    assert isinstance(action, ToGateway)
    assert isinstance(action.message, Deltas)
    spelled = PositionLogprobs(LogprobText("b", b"b", -0.5, 1), (LogprobText("c", b"c", -0.25, 2),), 2)
    assert action.message.scored == (PromptLogprobsDelta(R, Attempt(1), 1, (spelled,)),)
    assert [each.text for each in action.message.deltas] == ["d"]
    stale = TokenBatch(
        engine=ENGINE,
        epoch=Incarnation(1),
        number=1,
        scored=(PromptLogprobs(R, Attempt(2), 1, ()), PromptLogprobs(RequestId("other"), Attempt(1), 1, ())),
    )
    assert core.handle(stale) == []
    assert core.counters.unknown == 2
