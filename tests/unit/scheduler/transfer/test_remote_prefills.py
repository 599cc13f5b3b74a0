"""Decode-first: an engine takes a request, keeps room for it, and has another one compute its prompt."""

from __future__ import annotations

from dataclasses import replace as with_limits

import pytest
from msgspec.structs import replace

from services.scheduler.core.events import ForwardControl, SendHandOver, StoreGone, TimePassed
from services.scheduler.core.limits import EngineLimits
from services.scheduler.core.transfer.remote_prefills import KEEP_SECONDS
from shared.ids import Attempt, EngineId, RequestId
from shared.messages.gateway import RequestFailed, RequestPlaced
from shared.messages.scheduler import Cancel, GenerateRequest
from tests.support.engines.checking_worker import DETOKENIZER, generate, right_output
from tests.support.engines.engines_and_store import EnginesAndStore

P, D, R, ONE = EngineId("p"), EngineId("d"), RequestId("r"), Attempt(1)
PROMPT = [(7 * i) % 23 for i in range(37)]
LIMITS = EngineLimits(run_ahead=1, plan_late=False, max_batch_tokens=16, max_running=8)


def request(
    name: str = "r", prompt: list[int] = PROMPT, *, remote_from: int = 20, max_tokens: int = 20
) -> GenerateRequest:
    plain = generate(name, prompt, max_tokens=max_tokens, ignore_eos=True)
    return replace(plain, prefill_on=P, remote_from=remote_from)


def busy_pair(limits: EngineLimits = LIMITS, blocks: int = 32) -> EnginesAndStore:
    """The decode engine decodes something already, for long."""
    engines = EnginesAndStore("p", "d", limits=limits, blocks=blocks)
    engines["d"].send(generate("first", [1, 2, 3], max_tokens=200, ignore_eos=True))
    engines.until(lambda: engines["d"].phases == ["decoding"])
    return engines


def computed_prompts(engines: EnginesAndStore, name: str) -> int:
    return sum(work.count for plan in engines[name].sent_plans for work in plan.work if work.count > 1)


def ended(engines: EnginesAndStore, name: str) -> bool:
    stream = engines.streams.get((RequestId(name), ONE))
    return stream is not None and stream.finish is not None


def expect_right(engines: EnginesAndStore, asked: GenerateRequest) -> None:
    stream = engines.stream(asked.generation.request)
    tokens, finish = right_output(asked, 256)
    assert (stream.tokens, stream.finish) == (tokens[stream.start :], finish)


@pytest.mark.parametrize("length", [32, 37, 47])
@pytest.mark.parametrize("run_ahead", [0, 1, 2])
def test_a_prompt_is_computed_elsewhere_and_comes_back_to_be_decoded(length: int, run_ahead: int) -> None:
    engines = busy_pair(with_limits(LIMITS, run_ahead=run_ahead))
    before = computed_prompts(engines, "d")
    asked = request(prompt=(PROMPT + PROMPT)[:length])
    engines["d"].send(asked)
    engines.settle()
    expect_right(engines, asked)
    assert engines.stream("r").engine == D
    assert computed_prompts(engines, "d") == before, "nothing of the prompt"
    assert [(word.engine, word.handed_by, word.passes) for word in engines.told if isinstance(word, RequestPlaced)] == [
        (P, D, 1),
        (D, P, 2),
    ]
    assert engines["d"].engine.counters.passed_on == 1
    engines.check_nothing_is_held()


@pytest.mark.parametrize(
    "why", ["it decodes nothing", "few tokens are left", "nobody may", "its prompt is cached", "there is no store"]
)
def test_it_computes_the_prompt_itself_where(why: str) -> None:
    idle = why == "it decodes nothing"
    engines = EnginesAndStore("p", "d", limits=LIMITS) if idle else busy_pair()
    asked = request(remote_from=38 if why == "few tokens are left" else 20)
    if why == "nobody may":
        asked = replace(asked, prefill_on=None)
    if why == "its prompt is cached":
        engines["d"].send(replace(request("same"), prefill_on=None))
        engines.until(lambda: ended(engines, "same"))
    if why == "there is no store":
        engines["d"].send(StoreGone())
    engines["d"].send(asked)
    engines.settle()
    expect_right(engines, asked)
    assert engines["p"].sent_plans == []


def test_room_is_kept_for_what_is_away() -> None:
    engines = busy_pair(with_limits(LIMITS, max_running=2))
    engines["d"].send(request())
    engines.until(lambda: engines["d"].engine.counters.passed_on)
    engines["d"].send(generate("other", [5, 6], max_tokens=2, ignore_eos=True))
    engines.until(lambda: engines["d"].phases == ["decoding", "waiting"])
    engines.until(lambda: ended(engines, "r"))
    engines.settle()
    assert engines.stream("other").finish, "it was its turn afterwards"
    engines.check_nothing_is_held()


def test_blocks_are_kept_too_and_not_for_ever() -> None:
    engines = busy_pair(blocks=16)
    engines["d"].send(request(max_tokens=2))
    engines.until(lambda: engines["d"].engine.counters.passed_on)
    engines.passed.clear()  # the message is lost
    engines["d"].send(generate("large", [9] * 170, max_tokens=2, ignore_eos=True))
    engines["d"].answer()
    for _ in range(8):
        engines.turn()
    assert "waiting" in engines["d"].phases
    engines.now += KEEP_SECONDS
    engines["d"].send(TimePassed())
    engines.until(lambda: "waiting" not in engines["d"].phases, most=8)


def test_a_cancel_reaches_it_wherever_it_is_and_goes_in_no_circle() -> None:
    for turns in range(40):
        engines = busy_pair()
        engines["d"].send(request())
        for _ in range(turns):
            engines.turn()
        engines["d"].send(Cancel(R, ONE, DETOKENIZER))
        engines.settle()
        cancels = [
            output for side in engines.sides.values() for output in side.outputs if isinstance(output, ForwardControl)
        ]
        assert len(cancels) <= 2, turns
        assert all(R not in side.engine.requests for side in engines.sides.values()), turns
        engines.check_nothing_is_held()


def test_a_request_that_nobody_takes_is_failed_so_that_it_is_tried_again() -> None:
    engines = busy_pair()
    engines["d"].send(replace(request(), prefill_on=EngineId("gone")))
    engines.settle()
    assert [word.request for word in engines.told if isinstance(word, RequestFailed)] == [R]
    engines.check_nothing_is_held()


def test_a_new_attempt_that_was_made_meanwhile_wins() -> None:
    for turns in range(30):
        engines = busy_pair()
        engines["d"].send(request())
        for _ in range(turns):
            engines.turn()
        again = request()
        again = replace(again, generation=replace(again.generation, attempt=Attempt(2)))
        engines["d"].send(again)
        engines.settle()
        tokens, finish = right_output(again, 256)
        stream = engines.stream("r", 2)
        assert (stream.tokens, stream.finish) == (tokens, finish), turns
        engines.check_nothing_is_held()


def test_what_is_passed_on_says_who_keeps_room() -> None:
    engines = busy_pair()
    asked = request()
    engines["d"].send(asked)
    engines.until(lambda: engines["d"].engine.counters.passed_on)
    [sent] = [output for output in engines["d"].outputs if isinstance(output, SendHandOver)]
    assert sent.engine == P
    assert (sent.generate.decode_on, sent.generate.passed_by, sent.generate.prefill_on) == (D, D, None)
    assert sent.generate.generation == asked.generation
