"""A store that hangs is left alone: the first requests wait for it, those that follow do not."""

from __future__ import annotations

from services.scheduler.core.events import SendStoreRequest, TimePassed
from services.scheduler.core.transfer.store_client import MAX_UNANSWERED, MIN_SILENCE, PAUSES, new_breaker
from shared.ids import Attempt, RequestId
from shared.messages.kvstore import Find
from shared.reliability.retry import CircuitBreaker
from tests.support.engines.checking_worker import generate, right_output
from tests.support.engines.engines_and_store import EnginesAndStore

PROMPT = [5 + i % 17 for i in range(37)]


def finds(engines: EnginesAndStore, number: int) -> int:
    """How many searches a request makes of whose blocks nobody has any. No question is answered in time."""
    side, name, prompt = engines["a"], f"r{number}", [5 + number, *PROMPT]
    outputs = side.send(generate(name, prompt, max_tokens=2))
    while engines.streams.get((RequestId(name), Attempt(1))) is None or not engines.stream(name).finish:
        assert side.answer(lost=True) or side.step()
    while side.answer(lost=True):
        pass
    assert engines.stream(name).tokens == right_output(generate(name, prompt, max_tokens=2), 256)[0]
    return sum(isinstance(output, SendStoreRequest) and isinstance(output.request, Find) for output in outputs)


def later(engines: EnginesAndStore, seconds: float) -> None:
    engines.now += seconds
    engines["a"].send(TimePassed())


def lose_some(breaker: CircuitBreaker, now: float, count: int = MAX_UNANSWERED) -> float:
    """One after the other; when that is over."""
    for _ in range(count):
        breaker.record_failure(now)
        now += MIN_SILENCE / (MAX_UNANSWERED - 1)
    return now - MIN_SILENCE / (MAX_UNANSWERED - 1)


def test_questions_stop_after_some_that_were_not_answered() -> None:
    breaker = new_breaker()
    now = lose_some(breaker, 0.0, MAX_UNANSWERED - 1)
    breaker.record_success()
    now = lose_some(breaker, now, MAX_UNANSWERED - 1)
    assert not breaker.is_open, "in a row"
    breaker.record_failure(now + MIN_SILENCE)
    assert breaker.is_open


def test_many_that_are_late_at_once_are_no_reason() -> None:
    breaker = new_breaker()
    for _ in range(10 * MAX_UNANSWERED):
        breaker.record_failure(5.0)
    assert not breaker.is_open


def test_it_is_tried_again_less_and_less_often() -> None:
    breaker = new_breaker()
    now, rests = lose_some(breaker, 0.0), []
    for _ in range(7):
        start = now
        while breaker.is_open:
            now += 0.5
            breaker.update(now)
        rests.append(now - start)
        breaker.record_failure(now)
        assert breaker.is_open, "one try is enough"
    assert rests == [
        PAUSES.first,
        2 * PAUSES.first,
        4 * PAUSES.first,
        8 * PAUSES.first,
        PAUSES.longest,
        PAUSES.longest,
        PAUSES.longest,
    ]
    breaker.record_success()
    assert not breaker.is_open
    now = lose_some(breaker, now)
    breaker.update(now + PAUSES.first)
    assert not breaker.is_open, "after an answer it begins anew"


def test_an_engine_whose_store_hangs_soon_asks_it_no_more() -> None:
    engines = EnginesAndStore("a")
    asked = []
    for number in range(6):
        asked.append(finds(engines, number))
        engines.now += MIN_SILENCE / 2
    assert asked[0] == 1
    assert asked[-3:] == [0, 0, 0], "requests begin at once"
    later(engines, PAUSES.first)
    assert [finds(engines, 6), finds(engines, 7)] == [1, 0], "one finds out that it still hangs"


def test_a_store_that_answers_again_is_used_again() -> None:
    engines = EnginesAndStore("a")
    for number in range(4):
        finds(engines, number)
        engines.now += MIN_SILENCE / 2
    assert not engines["a"].engine.store.attached
    later(engines, PAUSES.first)
    engines["a"].send(generate("s", [7, *PROMPT], max_tokens=2))
    engines.settle()
    engines["a"].send(generate("t", [9, *PROMPT], max_tokens=2))
    engines.settle()
    assert engines["a"].engine.store.attached
    assert engines.store.committed, "what was computed is saved"
