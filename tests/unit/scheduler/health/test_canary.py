"""An engine asks a canary of itself through its ordinary path, and nobody else sees anything of it."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from services.scheduler.core.events import (
    Output,
    SendPlan,
    SendToGateway,
    SendTokens,
    TimePassed,
    WorkersLost,
    WorkersReady,
)
from services.scheduler.core.health.canary import CANARY_DETOKENIZER, CANARY_GATEWAY, IDLE_WAIT, OUTPUT_TOKENS
from services.scheduler.core.limits import EngineLimits
from shared.messages.gateway import RequestFailed
from shared.messages.lifecycle import EngineHealth
from shared.messages.scheduler import SampledTokens, SequenceFailed
from tests.support.engines.checking_worker import card, continuation, generate
from tests.support.engines.single_engine import PROMPT, Ring, told

INTERVAL = 5.0
LIMITS = EngineLimits(run_ahead=1, plan_late=False, canary_interval=INTERVAL, ejection_time=10.0)
TICK = 0.5


class WatchedRing(Ring):
    """An engine whose time passes. What its worker says may turn into garbage."""

    def __init__(self, limits: EngineLimits = LIMITS, step_seconds: float = 0.001) -> None:
        self.garbage = False
        self.undefined = False
        self.step_seconds = step_seconds
        self.computing = 0.0
        self.seen: list[Output] = []
        super().__init__(limits)

    def send(self, event: object) -> list[Output]:
        outputs = super().send(event)
        self.seen += [output for output in outputs if not isinstance(output, SendPlan)]
        return outputs

    def step(self) -> list[Output]:
        plan = self.plans.pop(0)
        self.now += self.step_seconds
        self.computing += self.step_seconds
        result = self.worker.step(plan)
        if self.garbage:
            result = replace(result, sampled=tuple(SampledTokens(one.sequence, (0,)) for one in result.sampled))
        if self.undefined:
            failed = [SequenceFailed(one.sequence, "the model computed NaN", "nan") for one in result.sampled]
            result = replace(result, failed=tuple(failed))
        return self.send(result)

    def tick(self, seconds: float = TICK) -> None:
        self.now += seconds
        self.send(TimePassed())
        self.finish()

    def until(self, when: float) -> None:
        while self.now < when:
            self.tick()

    @property
    def health(self) -> EngineHealth:
        return self.engine.health.suspicion.report

    @property
    def canaries(self) -> int:
        return self.engine.snapshot().counters.canaries

    def recorded(self) -> WatchedRing:
        """With the right answer known."""
        self.finish()
        assert self.canaries == 2
        assert self.engine.serves
        return self


def test_a_canary_is_in_no_report_and_no_message() -> None:
    ring = WatchedRing()
    assert ring.plans, "the first one is due at once"
    assert not ring.engine.serves
    assert ring.engine.idle
    assert ring.engine.load == 0
    report = ring.engine.report()
    assert report is not None
    assert (report.waiting, report.running) == (0, 0)
    ring.recorded()
    report = ring.engine.report()
    assert report is not None
    assert (report.tokens, report.prompt_tokens, report.cached_tokens) == (0, 0, 0)
    assert ring.engine.epoch_state is not None
    assert not ring.engine.epoch_state.memory.index.hash_of, "its blocks are no cache's"
    assert ring.free == 32
    assert ring.seen == []
    assert ring.health == EngineHealth()


def test_canaries_take_a_hundredth_of_the_time_at_most() -> None:
    ring = WatchedRing(step_seconds=0.2)
    ring.until(3000.0)
    assert ring.canaries > 10
    assert ring.computing <= 0.011 * ring.now
    fast = WatchedRing(step_seconds=0.0001)
    fast.until(300.0)
    assert 300 / INTERVAL / 1.2 <= fast.canaries <= 300 / INTERVAL + 2


def test_without_an_interval_there_are_none() -> None:
    ring = WatchedRing(replace_limits(canary_interval=0.0))
    ring.until(100.0)
    assert ring.canaries == 0
    assert ring.plans == []


def replace_limits(**fields: float) -> EngineLimits:
    from dataclasses import replace as with_fields

    return with_fields(LIMITS, **fields)  # type: ignore[arg-type]


def test_one_token_for_ever_is_found_within_an_interval() -> None:
    ring = WatchedRing().recorded()
    ring.garbage = True
    began = ring.now
    while ring.health.suspect is None:
        ring.tick()
    assert ring.now - began <= INTERVAL + 3 * TICK
    assert ring.health.suspect == "canary: token 0 for ever, where the engine said others before"
    assert ring.health.ejections == 1
    ring.until(ring.now + 4)
    assert ring.health.faults >= 3, "it is probed again and again"
    assert ring.seen == []


def test_new_workers_clear_a_suspect_only_with_the_right_answer_and_after_its_time() -> None:
    ring = WatchedRing().recorded()
    ring.garbage = True
    ring.until(ring.now + INTERVAL + 2)
    assert ring.health.suspect is not None
    ejected = ring.now
    restart(ring)
    assert (ring.health.suspect is not None, ring.health.faults) == (True, 0)
    ring.until(ring.now + 5)
    assert ring.health.faults >= 3, "they say the same"
    ring.garbage = False
    restart(ring)
    ring.until(ejected + LIMITS.ejection_time - 3)
    assert ring.health.suspect is not None, "not before its time"
    ring.until(ejected + LIMITS.ejection_time + 4)
    assert ring.health == EngineHealth(ejections=1)


def restart(ring: WatchedRing) -> None:
    ring.send(WorkersLost("killed"))
    ring.plans.clear()
    ring.send(WorkersReady(replace(card(), created=1 + int(ring.now)), 32))


def test_other_workers_of_a_sound_engine_say_anew_what_is_right() -> None:
    ring = WatchedRing().recorded()
    ring.garbage = True
    restart(ring)
    ring.until(ring.now + 60)
    assert ring.health == EngineHealth(), "the garbage is what they always say"


def test_a_busy_engine_has_its_canary_beside_the_requests() -> None:
    ring = WatchedRing().recorded()
    done = ring.canaries
    began = ring.now
    number = 0
    while ring.canaries == done:
        ring.now += 0.01
        while len(ring.engine.requests) < 3:
            ring.send(generate(f"r{number}", PROMPT, max_tokens=50, ignore_eos=True))
            number += 1
        ring.step()
        if int(ring.now / TICK) != int((ring.now - 0.01) / TICK):
            ring.send(TimePassed())
        assert ring.now - began < 60
    assert ring.now - began >= IDLE_WAIT * INTERVAL
    assert ring.health == EngineHealth()
    ring.finish()
    assert ring.output_of("r0") == continuation(PROMPT, 50), "nobody else is disturbed"
    report = ring.engine.report()
    assert report is not None
    assert report.tokens == 50 * number
    assert report.prompt_tokens == len(PROMPT) * number


def test_a_canary_that_takes_too_long_is_given_up() -> None:
    ring = WatchedRing(replace_limits(step_timeout=1000.0)).recorded()
    ring.until(ring.now + INTERVAL - 2)
    while not ring.plans:
        ring.now += TICK
        ring.send(TimePassed())
    ring.now += 11.0
    ring.send(TimePassed())
    assert ring.engine.snapshot().counters.canary_faults == 1
    assert ring.health.suspect is None, "once is no evidence"
    assert not any(name.startswith("canary-3") for name in ring.engine.requests)
    ring.finish()
    ring.tick()
    assert ring.health == EngineHealth()


def test_an_engine_that_loses_its_workers_in_a_canary_is_no_suspect() -> None:
    ring = WatchedRing().recorded()
    for _ in range(5):
        ring.plans.clear()
        ring.send(TimePassed())
        restart(ring)
        ring.send(TimePassed())
        assert ring.plans
    assert ring.health == EngineHealth()
    assert ring.seen == []


def test_an_engine_that_never_says_the_same_twice_is_not_compared() -> None:
    ring = WatchedRing()
    while ring.canaries < 20:
        ring.garbage = ring.canaries % 2 == 0
        if ring.plans:
            ring.step()
        else:
            ring.now += TICK
            ring.send(TimePassed())
    assert ring.engine.serves
    assert ring.health == EngineHealth()


@pytest.mark.parametrize("accusations", [1, 3])
def test_what_others_say_ejects_for_longer_each_time(accusations: int) -> None:
    ring = WatchedRing().recorded()
    lasted = []
    for _ in range(accusations):
        began = ring.now
        ring.engine.health.accuse("9 of 10 requests failed", ring.now)
        assert ring.health.suspect == "9 of 10 requests failed"
        while ring.health.suspect is not None:
            ring.tick()
        lasted.append(ring.now - began)
    expected = [LIMITS.ejection_time * 2**i for i in range(accusations)]
    assert all(base <= seconds <= base + 2 for base, seconds in zip(expected, lasted, strict=True))
    ring.until(ring.now + 310)
    assert ring.health.ejections == 0, "forgotten in the end"


def test_a_canary_is_addressed_to_the_engine_itself() -> None:
    ring = WatchedRing()
    (canary,) = ring.engine.requests.values()
    assert (canary.generation.gateway, canary.detokenizer) == (CANARY_GATEWAY, CANARY_DETOKENIZER)
    assert canary.generation.stopping.max_tokens == OUTPUT_TOKENS
    assert not canary.generation.prefix_caching
    assert not [output for output in ring.seen if isinstance(output, SendTokens | SendToGateway)]


def test_nan_moves_requests_on_and_makes_a_busy_engine_a_suspect_at_once() -> None:
    ring = WatchedRing().recorded()
    began = ring.now
    ring.undefined = True
    for number in range(3):
        ring.send(generate(f"r{number}", PROMPT, max_tokens=50, ignore_eos=True))
    while ring.health.suspect is None:
        ring.send(generate(f"more-{ring.now}", PROMPT, max_tokens=50, ignore_eos=True))
        ring.tick()
    assert ring.now - began <= 3 * TICK
    assert ring.health.suspect == "canary: the model computed NaN"
    answers = told(ring.seen)
    assert {type(answer) for answer in answers} == {RequestFailed}
    assert all(answer.caches_doubtful for answer in answers if isinstance(answer, RequestFailed))
    assert {"r0", "r1", "r2"} <= {answer.request for answer in answers}
    assert ring.entries == [], "not a token of them is sent"
    assert ring.engine.epoch_state is not None
    assert not ring.engine.epoch_state.memory.index.hash_of, "nobody is given what was computed"


def test_requests_that_are_undefined_themselves_make_no_suspect_and_few_canaries() -> None:
    ring = WatchedRing().recorded()
    done = ring.canaries
    while ring.now < 60.0:
        ring.send(generate(f"r{ring.now}", PROMPT, max_tokens=50, ignore_eos=True))
        ring.undefined = True
        ring.step()
        ring.undefined = False
        ring.finish()
        ring.tick()
    assert ring.health == EngineHealth()
    assert ring.canaries - done <= 2 * 60 / INTERVAL + 1
