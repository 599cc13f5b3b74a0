"""A store that hangs is left alone: the first requests wait for it, those that follow do not."""

from __future__ import annotations

from services.scheduler.core.events import AskStore, TimePassed
from services.scheduler.core.store_breaker import LONGEST_REST, REST, SILENT, UNANSWERED, StoreBreaker
from shared.ids import Attempt, RequestId
from shared.messages.kvstore import Find
from tests.engines_and_store import EnginesAndStore
from tests.honest_worker import generate, right_output

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
    return sum(isinstance(output, AskStore) and isinstance(output.question, Find) for output in outputs)


def later(engines: EnginesAndStore, seconds: float) -> None:
    engines.now += seconds
    engines["a"].send(TimePassed())


def lose_some(breaker: StoreBreaker, now: float, count: int = UNANSWERED) -> float:
    """One after the other; when that is over."""
    for _ in range(count):
        breaker.unanswered(now)
        now += SILENT / (UNANSWERED - 1)
    return now - SILENT / (UNANSWERED - 1)


def test_questions_stop_after_some_that_were_not_answered() -> None:
    breaker = StoreBreaker()
    now = lose_some(breaker, 0.0, UNANSWERED - 1)
    breaker.answered()
    now = lose_some(breaker, now, UNANSWERED - 1)
    assert not breaker.open, "in a row"
    breaker.unanswered(now + SILENT)
    assert breaker.open


def test_many_that_are_late_at_once_are_no_reason() -> None:
    breaker = StoreBreaker()
    for _ in range(10 * UNANSWERED):
        breaker.unanswered(5.0)
    assert not breaker.open


def test_it_is_tried_again_less_and_less_often() -> None:
    breaker = StoreBreaker()
    now, rests = lose_some(breaker, 0.0), []
    for _ in range(7):
        start = now
        while breaker.open:
            now += 0.5
            breaker.look_at_clock(now)
        rests.append(now - start)
        breaker.unanswered(now)
        assert breaker.open, "one try is enough"
    assert rests == [REST, 2 * REST, 4 * REST, 8 * REST, LONGEST_REST, LONGEST_REST, LONGEST_REST]
    breaker.answered()
    assert not breaker.open
    now = lose_some(breaker, now)
    breaker.look_at_clock(now + REST)
    assert not breaker.open, "after an answer it begins anew"


def test_an_engine_whose_store_hangs_soon_asks_it_no_more() -> None:
    engines = EnginesAndStore("a")
    asked = []
    for number in range(6):
        asked.append(finds(engines, number))
        engines.now += SILENT / 2
    assert asked[0] == 1
    assert asked[-3:] == [0, 0, 0], "requests begin at once"
    later(engines, REST)
    assert [finds(engines, 6), finds(engines, 7)] == [1, 0], "one finds out that it still hangs"


def test_a_store_that_answers_again_is_used_again() -> None:
    engines = EnginesAndStore("a")
    for number in range(4):
        finds(engines, number)
        engines.now += SILENT / 2
    assert not engines["a"].engine.store.attached
    later(engines, REST)
    engines["a"].send(generate("s", [7, *PROMPT], max_tokens=2))
    engines.settle()
    engines["a"].send(generate("t", [9, *PROMPT], max_tokens=2))
    engines.settle()
    assert engines["a"].engine.store.attached
    assert engines.store.committed, "what was computed is saved"
