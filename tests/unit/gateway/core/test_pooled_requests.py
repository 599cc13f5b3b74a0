"""Vectors of prompts as the supervision of requests and the detokenizer see them."""

from __future__ import annotations

from typing import Any

from services.detokenizer.core.actions import ToGateway
from services.detokenizer.core.detokenizer import Detokenizer
from services.detokenizer.core.text import TokenSpelling
from services.gateway.core.effects import AttemptRetry, DispatchAttempt
from services.gateway.core.open_request import RetryPolicy
from services.gateway.core.supervisor import RequestSupervisor
from shared.ids import Attempt, DetokenizerId, EngineId, GatewayId, Incarnation, ModelName, RequestId
from shared.messages.detokenizer import NewTokens, OpenStream, PooledPrompt, TokenBatch
from shared.messages.gateway import Delta, Deltas, PooledDelta, RequestFailed, RequestPlaced, StreamOpened
from shared.messages.generation import PoolingOptions, SamplingOptions, StopConditions
from shared.messages.tokenizer import TextPrompt, Tokenize
from shared.packing import pack

R, DETOKENIZER, ENGINE, GATEWAY = RequestId("r"), DetokenizerId("d"), EngineId("e"), GatewayId("g")
FIRST, SECOND = Attempt(1), Attempt(2)
VECTOR = b"\0\0\x80?"
POOLING = PoolingOptions(pooling="last", dimensions=1)


def supervision() -> RequestSupervisor:
    """With one placed request."""
    supervisor = RequestSupervisor(RetryPolicy())
    message = Tokenize(
        request=R,
        attempt=FIRST,
        gateway=GATEWAY,
        model=ModelName("m"),
        prompt=TextPrompt("x"),
        sampling=SamplingOptions(seed=1),
        stopping=StopConditions(max_tokens=0),
        pooling=POOLING,
    )
    supervisor.open(message, 0.0)
    supervisor.handle(RequestPlaced(R, FIRST, ENGINE, DETOKENIZER), 0.0)
    return supervisor


def deltas(attempt: Attempt, number: int, *, pooled: bool = True) -> Deltas:
    return Deltas(
        detokenizer=DETOKENIZER,
        epoch=Incarnation(1),
        number=number,
        opened=(StreamOpened(R, attempt, 5, 0),),
        deltas=(Delta(R, attempt, 0, (), "", "length"),),
        pooled=(PooledDelta(R, attempt, VECTOR),) if pooled else (),
    )


def test_the_vector_comes_before_the_end() -> None:
    supervisor = supervision()
    effects = supervisor.handle(deltas(FIRST, 0), 0.0)
    assert effects[1:] == [PooledDelta(R, FIRST, VECTOR), Delta(R, FIRST, 0, (), "", "length")]
    assert R not in supervisor


def test_an_end_without_a_vector_begins_another_attempt() -> None:
    supervisor = supervision()
    effects = supervisor.handle(deltas(FIRST, 0, pooled=False), 0.0)
    assert not any(isinstance(effect, Delta) for effect in effects)
    assert any(isinstance(effect, AttemptRetry) for effect in effects)
    (again,) = (effect.tokenize for effect in effects if isinstance(effect, DispatchAttempt))
    assert (again.attempt, again.pooling, again.resume) == (2, POOLING, b"")


def test_an_engine_that_dies_is_followed_by_another_attempt_whose_vector_counts() -> None:
    supervisor = supervision()
    effects = supervisor.handle(RequestFailed(R, FIRST, "gone", "beside others"), 0.0)
    assert any(isinstance(effect, DispatchAttempt) for effect in effects)
    assert supervisor.handle(deltas(FIRST, 0), 0.0)[-1:] != [Delta(R, FIRST, 0, (), "", "length")]
    supervisor.handle(RequestPlaced(R, SECOND, ENGINE, DETOKENIZER), 0.0)
    assert supervisor.handle(deltas(SECOND, 1), 0.0)[-1] == Delta(R, SECOND, 0, (), "", "length")


class NoWords:
    """A vocabulary that has no token to spell."""

    def spelling(self, token: int) -> TokenSpelling:
        raise AssertionError(f"token {token} is asked for")

    def open(self, context: Any, **_: Any) -> Any:
        class Stream:
            def push(self, token: int) -> str:
                raise AssertionError(f"token {token} came")

            def flush(self) -> str:
                return ""

        return Stream()


def test_a_detokenizer_passes_vectors_on_in_the_message_with_the_end() -> None:
    detokenizer = Detokenizer(DETOKENIZER, Incarnation(1), ModelName("m"), NoWords())
    opening = OpenStream(
        request=R,
        attempt=FIRST,
        gateway=GATEWAY,
        model=ModelName("m"),
        context=pack([]),
        resumed=0,
        sent_chars=0,
        prompt_tokens=5,
        cached_tokens=0,
    )
    batch = TokenBatch(
        engine=ENGINE,
        epoch=Incarnation(1),
        number=0,
        opened=(opening,),
        entries=(NewTokens(R, FIRST, 0, (), "length"),),
        pooled=(PooledPrompt(R, FIRST, VECTOR), PooledPrompt(RequestId("other"), FIRST, VECTOR)),
    )
    (sent,) = detokenizer.handle(batch)
    assert isinstance(sent, ToGateway)
    assert isinstance(sent.message, Deltas)
    assert sent.message.pooled == (PooledDelta(R, FIRST, VECTOR),)
    assert [(delta.tokens, delta.finish) for delta in sent.message.deltas] == [((), "length")]
    assert not detokenizer.streams
