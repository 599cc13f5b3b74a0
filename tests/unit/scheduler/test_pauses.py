"""A paused engine begins nothing, or computes nothing; nothing is lost by it, and nobody takes it for a hung one."""

from __future__ import annotations

import pytest

from services.scheduler.core.events import TimePassed, WorkersLost, WorkersReady
from services.scheduler.core.limits import EngineLimits
from shared.ids import Attempt, RequestId
from shared.messages.scheduler import Cancel, PauseGeneration, PauseMode, PauseState, ProbeReply, ResumeGeneration
from tests.support.engines.checking_worker import HonestWorker, card, generate, right_output
from tests.support.engines.single_engine import PROMPT, Ring, told

ONE_AT_A_TIME = EngineLimits(max_running=1)


def right(request: str) -> list[int]:
    return right_output(generate(request, PROMPT, max_tokens=6, ignore_eos=True), 256)[0]


def running(ring: Ring, request: str) -> None:
    """With its first token."""
    ring.send(generate(request, PROMPT, max_tokens=6, ignore_eos=True))
    ring.step()


def test_nothing_is_planned_while_all_is_paused_and_every_token_comes_afterwards() -> None:
    ring = Ring()
    running(ring, "a")
    ring.send(PauseGeneration("all"))
    assert ring.engine.pause_state() == PauseState("all", len(ring.plans))
    ring.finish()
    assert ring.engine.pause_state() == PauseState("all", 0)
    before = ring.output_of("a")
    assert 0 < len(before) < 6
    ring.send(generate("b", PROMPT, max_tokens=6, ignore_eos=True))
    for _ in range(5):
        ring.now += 3600
        ring.send(TimePassed())
    assert (ring.plans, ring.output_of("a")) == ([], before)
    assert ring.engine.probe(*_named("a")) == ProbeReply("running", len(before))
    assert ring.engine.probe(*_named("b")) == ProbeReply("waiting", 0)
    ring.send(ResumeGeneration())
    ring.finish()
    assert (ring.output_of("a"), ring.output_of("b")) == (right("a"), right("b"))
    assert ring.engine.pause_state() == PauseState(None, 0)


def test_what_runs_ends_while_only_new_requests_are_paused() -> None:
    ring = Ring(ONE_AT_A_TIME)
    running(ring, "a")
    ring.send(PauseGeneration("new"))
    ring.send(generate("b", PROMPT, max_tokens=6, ignore_eos=True))
    assert ring.engine.pause_state().busy > 1, "a request, and steps in flight"
    ring.finish()
    assert (ring.output_of("a"), ring.output_of("b")) == (right("a"), [])
    assert ring.engine.pause_state() == PauseState("new", 0)
    ring.send(ResumeGeneration())
    ring.finish()
    assert ring.output_of("b") == right("b")


@pytest.mark.parametrize("mode", ["new", "all"])
def test_a_suspects_trial_does_not_begin(mode: PauseMode) -> None:
    ring = Ring()
    ring.send(PauseGeneration(mode))
    ring.send(generate("a", PROMPT, max_tokens=6, ignore_eos=True, suspect_until=3))
    ring.send(TimePassed())
    assert (ring.engine.isolated, ring.plans) == (None, [])
    ring.send(ResumeGeneration())
    ring.send(TimePassed())
    ring.finish()
    assert ring.output_of("a") == right("a")


def test_what_waits_can_be_cancelled() -> None:
    ring = Ring()
    ring.send(PauseGeneration("all"))
    ring.send(generate("a", PROMPT))
    ring.send(Cancel(*_named("a")))
    assert ring.engine.load == 0
    assert ring.send(ResumeGeneration()) == []


def test_a_pause_outlasts_the_workers() -> None:
    ring = Ring()
    running(ring, "a")
    ring.send(PauseGeneration("new"))
    (failed,) = told(ring.send(WorkersLost("killed", died=True)))
    assert failed.request == "a"
    ring.plans.clear()
    ring.worker = HonestWorker(32)
    ring.send(WorkersReady(card(256), 32))
    ring.send(generate("a", PROMPT, attempt=2, max_tokens=6, ignore_eos=True))
    assert ring.plans == []
    report = ring.engine.report()
    assert report is not None
    assert report.paused == "new"


def test_no_canary_is_asked_while_it_is_paused_and_one_under_way_is_no_fault() -> None:
    ring = Ring(EngineLimits(run_ahead=1, plan_late=False, canary_interval=5.0, ejection_time=10.0))
    ring.finish()
    ring.now += 10
    ring.send(TimePassed())
    assert ring.plans, "a canary is under way"
    ring.send(PauseGeneration("all"))
    ring.finish()
    for _ in range(10):
        ring.now += 60
        ring.send(TimePassed())
    assert ring.plans == []
    counters = ring.engine.snapshot().counters
    assert (counters.canaries, counters.canary_faults) == (2, 0)
    ring.send(ResumeGeneration())
    ring.finish()
    counters = ring.engine.snapshot().counters
    assert (counters.canaries, counters.canary_faults) == (3, 0)


def _named(request: str) -> tuple[RequestId, Attempt]:
    return RequestId(request), Attempt(1)
